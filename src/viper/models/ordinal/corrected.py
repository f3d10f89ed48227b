"""Summaries of an ordinal regression, from its posterior or from weighted draws of the exact one."""

from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from viper.inference.importance import weighted_quantiles
from viper.inference.ordinal.gaps import thresholds_of
from viper.inference.ordinal.importance import (
    OrdinalWeighedFit,
    level_log_likelihood,
    level_probabilities_of_draws,
    log_prior_of_levels,
    weighted_log_likelihoods,
)
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.rows import Block
from viper.models.arviz import arviz_container, by_chain, count_draws, row_groups
from viper.models.diagnosis import CorrectedPosterior, summary_frame
from viper.models.prediction import half_width

if TYPE_CHECKING:
    import pandas


def threshold_names(levels: np.ndarray) -> list[str]:
    """'low | medium', 'medium | high'."""
    names = [str(level) for level in levels.tolist()]
    return [f"{low} | {high}" for low, high in pairwise(names)]


def as_parameters(draws: Tensor, width: int) -> Tensor:
    """Draws of β and of the thresholds c = t - intercept, from draws of (w, δ); `width` is the length of w."""
    w, delta = draws[:, :width], draws[:, width:]
    return torch.cat([w[:, :-1], thresholds_of(delta) - w[:, -1:]], 1)


class CorrectedOrdinal(CorrectedPosterior):
    """Summaries and predictions of an ordinal regression from draws of (w, δ) with weights."""

    @property
    def width(self) -> int:
        """Number of coefficients, with the intercept."""
        return self.weighted.draws.shape[1] - len(self.classes_) + 2

    @cached_property
    def parameters(self) -> Tensor:
        """Draws of coefficients and thresholds."""
        return as_parameters(self.weighted.draws, self.width)

    @property
    def mean_(self) -> np.ndarray:
        """Posterior means of the coefficients, then of the thresholds."""
        return self._moments(self.parameters)[0].numpy()

    @property
    def sd_(self) -> np.ndarray:
        """Their posterior standard deviations."""
        return self._moments(self.parameters)[1].numpy()

    def sample(self, n: int = 1, random_state: Any = None) -> np.ndarray:
        """Return equally weighted draws of coefficients and thresholds, n × (p + levels - 1)."""
        return as_parameters(torch.from_numpy(super().sample(n, random_state)), self.width).numpy()

    def to_arviz(self, draws: int = 1000, chains: int = 4, random_state: Any = None) -> Any:
        """Return equally weighted draws in the container of the installed ArviZ."""
        sample = torch.from_numpy(self.sample(count_draws(chains, draws), random_state))
        groups = {"posterior": parameter_draws(sample, self.width, (chains, draws))}
        return ordinal_container(groups, self.names, self.classes_)

    def coefficient_interval(self, level: float = 0.95) -> np.ndarray:
        """Credible intervals of coefficients and thresholds."""
        return self._quantiles(self.parameters, level).T.numpy()

    def summary(self, level: float = 0.95) -> "pandas.DataFrame":
        """The estimator's `summary`, computed from the weighted draws."""
        mean, sd = self._moments(self.parameters)
        low, high = self._quantiles(self.parameters, level)
        positive = self.weighted.weights @ (self.parameters > 0).double()
        return summary_frame(self.names, mean, sd, low, high, positive, level)

    def predict_latent(self, X: Any, offset: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the score f(x) = xᵀβ, less the mean of the thresholds."""
        mean, sd = self._by_level(X, offset, lambda f, _: self._moments(f).T).T
        return mean, sd

    def predict_proba(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior-averaged probabilities, rows × levels."""
        return self._by_level(X, offset, lambda f, delta: self._of_levels(f, delta)[0])

    def predict_std(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior standard deviations of the probabilities."""
        found = self._by_level(X, offset, lambda f, delta: self._of_levels(f, delta)[1])
        return found[:, 1] if len(self.classes_) == 2 else found

    def predict_interval(self, X: Any, level: float = 0.95, offset: Any = None) -> np.ndarray:
        """Credible intervals of the probabilities, rows × levels × 2."""
        half_width(level)
        levels = [0.5 - 0.5 * level, 0.5 + 0.5 * level]

        def ends(f: Tensor, delta: Tensor) -> Tensor:
            p = level_probabilities_of_draws(f, delta)
            found = weighted_quantiles(p.flatten(1), self.weighted.weights, levels)
            return found.reshape(2, *p.shape[1:]).permute(1, 2, 0)

        found = self._by_level(X, offset, ends)
        return found[:, 1] if len(self.classes_) == 2 else found

    def decision_function(self, X: Any, offset: Any = None) -> np.ndarray:
        """log of the posterior-averaged probabilities, less their mean over levels; for two levels, their log-odds."""
        logs = np.log(np.maximum(self.predict_proba(X, offset), np.finfo(float).tiny))
        return logs[:, 1] - logs[:, 0] if logs.shape[1] == 2 else logs - logs.mean(1, keepdims=True)

    def predict(self, X: Any, offset: Any = None) -> np.ndarray:
        """The most probable level, per row."""
        return self.classes_[self.predict_proba(X, offset).argmax(1)]

    def _of_levels(self, f: Tensor, delta: Tensor) -> Tensor:
        p = level_probabilities_of_draws(f, delta)
        return self._moments(p.flatten(1)).reshape(2, *p.shape[1:])

    def _by_level(self, X: Any, offset: Any, summary: Any) -> np.ndarray:
        """A summary (rows × …) of the draws of f and δ."""
        return torch.cat(list(self._summarise(X, offset, self.weighted.draws, summary))).numpy()


def summary_of_ordinal_draws(block: Block, draws: Tensor, summary: Any) -> Tensor:
    """summary(f, δ) for the rows of a block, f as draws × rows."""
    width = block.design.pull(block.label).shape[0]
    w, delta = draws[:, :width].to(block.label.device), draws[:, width:]
    f = block.design.project(w.T.contiguous()).T
    return summary((f if block.offset is None else f + block.offset).cpu(), delta)


def levels_to_arviz(
    fit: OrdinalWeighedFit | None,
    posterior: OrdinalPosterior,
    names: list[str],
    levels: np.ndarray,
    shape: tuple[int, int],
    seed: int,
) -> Any:
    """Draw (w, δ) from q and record log q. With the rows of a fit, also record log p, levels and log likelihoods."""
    width = len(posterior.mean)
    noise = torch.from_numpy(np.random.default_rng(seed).standard_normal((count_draws(*shape), width + posterior.size)))
    draws = posterior.draw(noise)
    groups: dict[str, dict[str, Any]] = {"posterior": parameter_draws(as_parameters(draws, width), width, shape)}
    statistics = {"log_q": posterior.log_density(noise)}
    if fit is not None:
        w, delta = draws.to(fit.source.device).split([width, posterior.size], 1)
        of_prior = log_prior_of_levels(fit.prior, fit.gap_prior, w, delta)
        statistics["lp"] = level_log_likelihood(fit.source, w, delta) + of_prior
        groups |= row_groups(fit.source, draws, shape, partial(weighted_log_likelihoods, width=width))
    groups["sample_stats"] = {name: by_chain(value, shape) for name, value in statistics.items()}
    return ordinal_container(groups, names, levels)


def parameter_draws(draws: Tensor, width: int, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    values = by_chain(draws, shape)
    return {"coefficient": values[..., : width - 1], "threshold": values[..., width - 1 :]}


def ordinal_container(groups: dict[str, dict[str, Any]], names: list[str], levels: np.ndarray) -> Any:
    """Draws in ArviZ's container: "coefficient" by feature, "threshold" by the two levels that it separates."""
    between = threshold_names(levels)
    dims = {"coefficient": ["feature"], "threshold": ["between"], "y": ["row"]}
    features = names[: len(names) - len(between)]
    return arviz_container(groups, features, "VariationalOrdinalRegression", {"between": between}, dims)
