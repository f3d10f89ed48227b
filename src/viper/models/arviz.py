"""Posterior draws for ArviZ: a DataTree (arviz-base), or an InferenceData where only ArviZ 0.x is installed.

The draws come from q, so they are independent; the sample statistics hold log p(y, β) as "lp" and log q(β) as "log_q",
whose difference is the logarithm of an importance weight.
"""

from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.inference.importance import log_likelihood
from viper.inference.posterior import Posterior, prior_log_density
from viper.inference.problem import Prior
from viper.inference.rows import Block, RowSource

LARGEST_POINTWISE = 1 << 24  # draws × rows whose log likelihoods are kept (128 MB)


def from_posterior(
    posterior: Posterior, prior: Prior, source: RowSource | None, names: list[str], shape: tuple[int, int], seed: int
) -> Any:
    """Draws of β with log q; with the rows in `source` also log p, and if they are here, log likelihoods and labels."""
    count = check_shape(*shape)
    generator = np.random.default_rng(seed)
    noise = torch.from_numpy(generator.standard_normal((count, len(posterior.mean)))).to(posterior.mean.device)
    draws = posterior.draw(noise)
    statistics = {"log_q": posterior.log_density(noise)}
    groups: dict[str, dict[str, Any]] = {"posterior": coefficients(draws, names, shape)}
    if source is not None:
        statistics["lp"] = log_likelihood(source, draws) + prior_log_density(prior, draws)
        groups |= by_row(source, draws, shape)
    groups["sample_stats"] = {name: by_chain(value, shape) for name, value in statistics.items()}
    return container(groups, names)


def by_row(source: RowSource, draws: Tensor, shape: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Labels and log likelihoods of the rows, if they are not on a cluster and few enough to hold."""
    groups = {}
    if source.traits.where != "cluster" and source.rows <= LARGEST_POINTWISE:
        groups["observed_data"] = {"y": torch.cat(list(source.map(lambda block: block.label))).cpu().numpy()}
        if len(draws) * source.rows <= LARGEST_POINTWISE:
            groups["log_likelihood"] = {
                "y": by_chain(torch.cat(list(source.map(partial(pointwise, draws=draws))), 1), shape)
            }
    return groups


def from_draws(draws: Tensor, names: list[str], shape: tuple[int, int]) -> Any:
    """Equally weighted draws (chains · draws × d) alone."""
    return container({"posterior": coefficients(draws, names, shape)}, names)


def check_shape(chains: int, draws: int) -> int:
    """The number of draws in all chains."""
    for name, value in (("chains", chains), ("draws", draws)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")
    return chains * draws


def by_chain(values: Tensor, shape: tuple[int, int]) -> np.ndarray:
    """Values of all draws, chains × draws × ..."""
    return values.cpu().numpy().reshape(*shape, *values.shape[1:])


def features(names: list[str]) -> list[str]:
    return names[:-1] if has_intercept(names) else names


def has_intercept(names: list[str]) -> bool:
    return bool(names) and names[-1] == "intercept"


def coefficients(draws: Tensor, names: list[str], shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """The draws by the names they have in ArviZ."""
    values = by_chain(draws, shape)
    if not has_intercept(names):
        return {"coefficient": values}
    return {"coefficient": values[..., :-1], "intercept": values[..., -1]}


def pointwise(block: Block, draws: Tensor) -> Tensor:
    """c_i (y_i f_i - log(1+e^{f_i})), draws × rows."""
    f = block.design.project(draws.T.contiguous())
    f = f if block.offset is None else f + block.offset[:, None]
    terms = block.label[:, None] * f - torch.nn.functional.softplus(f)
    return terms.T if block.weight is None else terms.T * block.weight


def container(groups: dict[str, dict[str, Any]], names: list[str]) -> Any:
    """Whatever the installed ArviZ stores inference in."""
    coords, dims = {"feature": features(names)}, {"coefficient": ["feature"], "y": ["row"]}
    about = {"inference_library": "viper", "modeling_interface": "VariationalLogisticRegression"}
    try:
        return import_module("arviz_base").from_dict(groups, coords=coords, dims=dims, attrs={"/": about})
    except ImportError:
        pass
    try:
        return import_module("arviz").from_dict(**groups, coords=coords, dims=dims, attrs=about)
    except ImportError as error:
        raise ImportError("to_arviz needs ArviZ. pip install 'vi-per[arviz]'") from error
