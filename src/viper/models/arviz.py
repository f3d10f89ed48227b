"""Posterior draws for ArviZ: a DataTree (arviz-base), or an InferenceData if only ArviZ 0.x is installed.

The draws come from q, so they are independent. The sample statistics hold log p(y, β) as "lp" and log q(β) as "log_q";
their difference is the logarithm of an importance weight.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.inference.classes.importance import class_log_likelihood, class_logits, log_sum
from viper.inference.classes.posterior import StarPosterior, star_log_density
from viper.inference.classes.star import star_prior
from viper.inference.importance import log_likelihood, softplus_given_draws
from viper.inference.posterior import Posterior, noise_shape, prior_log_density
from viper.inference.problem import Prior
from viper.inference.rows import Block, RowSource
from viper.models.facts import INTERCEPT

CLASS_DIMS = {"coefficient": ["class", "feature"], "y": ["row"], INTERCEPT: ["class"]}
LARGEST_POINTWISE = 1 << 24  # draws × rows: 128 MB of log likelihoods


def posterior_to_arviz(
    posterior: Posterior,
    prior: Prior,
    source: RowSource | None,
    names: list[str],
    shape: tuple[int, int],
    seed: int,
    estimator: str = "VariationalLogisticRegression",
) -> Any:
    """Draw β from q and record log q. With a `source` of rows, also record log p, labels and log likelihoods."""
    groups = draw_groups(posterior, prior, source, names, shape, np.random.default_rng(seed))
    return arviz_container(groups, names, estimator)


def labels_to_arviz(
    parts: list[tuple[Posterior, Prior, RowSource | None]],
    labels: list[Any],
    names: list[str],
    shape: tuple[int, int],
    seed: int,
) -> Any:
    """Draws for several labels, which are independent; their axis "label" comes after chains, draws and rows."""
    generator = np.random.default_rng(seed)
    found = [draw_groups(*part, names, shape, generator) for part in parts]
    groups = {
        group: {name: with_label_axis([one[group][name] for one in found], name) for name in values}
        for group, values in found[0].items()
    }
    dims = {"coefficient": ["label", "feature"], "y": ["row", "label"]}
    dims |= {name: ["label"] for name in (INTERCEPT, "lp", "log_q")}
    return arviz_container(groups, names, "VariationalLogisticRegression", {"label": labels}, dims)


def classes_to_arviz(
    posterior: StarPosterior,
    prior: Any,
    source: RowSource | None,
    classes: list[Any],
    names: list[str],
    shape: tuple[int, int],
    seed: int,
    estimator: str = "VariationalLogisticRegression",
) -> Any:
    """Draws for more than two classes: coefficients centred over an axis "class", and densities of their contrasts."""
    count, size = count_draws(*shape), posterior.means.shape
    noise = torch.from_numpy(np.random.default_rng(seed).standard_normal((count, *size))).to(posterior.means.device)
    draws = posterior.draw(noise)
    groups: dict[str, dict[str, Any]] = {"posterior": coefficient_draws(draws, names, shape)}
    statistics = {"log_q": posterior.log_density(draws)}
    if source is not None:
        prior_density = star_log_density(star_prior(prior, len(classes)), draws)
        statistics["lp"] = class_log_likelihood(source, draws, None) + prior_density
        groups |= row_groups(source, draws, shape, class_row_log_likelihoods)
    groups["sample_stats"] = {name: by_chain(value, shape) for name, value in statistics.items()}
    return arviz_container(groups, names, estimator, {"class": classes}, CLASS_DIMS)


def class_draws_to_arviz(
    draws: Tensor, classes: list[Any], names: list[str], shape: tuple[int, int], estimator: str
) -> Any:
    """Return a container with only these equally weighted draws (chains · draws × K × d)."""
    groups = {"posterior": coefficient_draws(draws, names, shape)}
    return arviz_container(groups, names, estimator, {"class": classes}, CLASS_DIMS)


def class_row_log_likelihoods(block: Block, draws: Tensor) -> Tensor:
    """c_i log softmax_{y_i}(f_i), draws × rows."""
    f = class_logits(block, draws.to(block.label.device))
    label = block.label.long()[:, None, None].expand(-1, len(draws), 1)
    own = f.gather(2, label)[..., 0] - log_sum(f, block.residual)
    return own.T if block.weight is None else own.T * block.weight


def with_label_axis(values: list[np.ndarray], name: str) -> np.ndarray:
    """Stack the values of all labels; coefficients have their features last."""
    return np.stack(values, -2 if name == "coefficient" else -1)


def draw_groups(
    posterior: Posterior,
    prior: Prior,
    source: RowSource | None,
    names: list[str],
    shape: tuple[int, int],
    generator: np.random.Generator,
) -> dict[str, dict[str, Any]]:
    """Return the groups of the container."""
    count = count_draws(*shape)
    noise = torch.from_numpy(generator.standard_normal((count, *noise_shape(posterior)))).to(posterior.mean.device)
    draws = posterior.draw(noise)
    statistics = {"log_q": posterior.log_density(noise)}
    groups: dict[str, dict[str, Any]] = {"posterior": coefficient_draws(draws, names, shape)}
    if source is not None:
        statistics["lp"] = log_likelihood(source, draws) + prior_log_density(prior, draws)
        groups |= row_groups(source, draws, shape)
    groups["sample_stats"] = {name: by_chain(value, shape) for name, value in statistics.items()}
    return groups


def row_groups(
    source: RowSource, draws: Tensor, shape: tuple[int, int], log_likelihoods: Callable[..., Tensor] | None = None
) -> dict[str, dict[str, Any]]:
    """Return labels and log likelihoods of the rows, unless the rows are on a cluster or too many to hold."""
    groups: dict[str, dict[str, Any]] = {}
    if source.traits.where != "cluster" and source.rows <= LARGEST_POINTWISE:
        groups["observed_data"] = {"y": torch.cat(list(source.map(lambda block: block.label))).cpu().numpy()}
        if len(draws) * source.rows <= LARGEST_POINTWISE:
            each = torch.cat(list(source.map(partial(log_likelihoods or row_log_likelihoods, draws=draws))), 1)
            groups["log_likelihood"] = {"y": by_chain(each, shape)}
    return groups


def draws_to_arviz(draws: Tensor, names: list[str], shape: tuple[int, int], estimator: str) -> Any:
    """Return a container with only these equally weighted draws (chains · draws × d)."""
    return arviz_container({"posterior": coefficient_draws(draws, names, shape)}, names, estimator)


def count_draws(chains: int, draws: int) -> int:
    """Return the number of draws in all chains."""
    for name, value in (("chains", chains), ("draws", draws)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")
    return chains * draws


def by_chain(values: Tensor, shape: tuple[int, int]) -> np.ndarray:
    """Return the values of all draws as chains × draws × ..."""
    return values.cpu().numpy().reshape(*shape, *values.shape[1:])


def coefficient_draws(draws: Tensor, names: list[str], shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Return the draws, keyed by their names in ArviZ."""
    values = by_chain(draws, shape)
    if INTERCEPT not in names:
        return {"coefficient": values}
    return {"coefficient": values[..., :-1], INTERCEPT: values[..., -1]}


def row_log_likelihoods(block: Block, draws: Tensor) -> Tensor:
    """c_i (y_i f_i - η(f_i, r_i)), draws × rows."""
    f = block.design.project(draws.T.contiguous())
    f = f if block.offset is None else f + block.offset[:, None]
    terms = block.label[:, None] * f - softplus_given_draws(f, block.residual)
    return terms.T if block.weight is None else terms.T * block.weight


def arviz_container(
    groups: dict[str, dict[str, Any]],
    names: list[str],
    estimator: str,
    more: dict[str, list[Any]] | None = None,
    dims: dict[str, list[str]] | None = None,
) -> Any:
    """Return the groups in the container of the installed ArviZ, with `more` coordinates and other `dims` if given."""
    coords = {"feature": [name for name in names if name != INTERCEPT], **(more or {})}
    dims = dims or {"coefficient": ["feature"], "y": ["row"]}
    about = {"inference_library": "viper", "modeling_interface": estimator}
    try:
        return import_module("arviz_base").from_dict(groups, coords=coords, dims=dims, attrs={"/": about})
    except ImportError:
        pass
    try:
        return import_module("arviz").from_dict(**groups, coords=coords, dims=dims, attrs=about)
    except ImportError as error:
        raise ImportError("to_arviz needs ArviZ. pip install 'vi-per[arviz]'") from error
