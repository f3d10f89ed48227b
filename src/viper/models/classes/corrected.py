"""Summaries of the coefficients of K classes, from the star or from weighted draws of the exact posterior."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from viper.errors import instead, shown
from viper.inference.classes.importance import class_logits
from viper.inference.classes.posterior import StarPosterior
from viper.inference.importance import SEED, weighted_quantiles
from viper.inference.rows import Block
from viper.models.arviz import class_draws_to_arviz, count_draws
from viper.models.diagnosis import CorrectedPosterior, summary_frame
from viper.models.prediction import half_width

if TYPE_CHECKING:
    import pandas


def baseline_number(baseline: Any, classes: np.ndarray) -> int | None:
    """Return the index of the baseline class, if there is one."""
    if baseline is None:
        return None
    labels = classes.tolist()
    if baseline not in labels:
        raise ValueError(
            f"baseline must be one of the classes; got {shown(baseline)}. {instead(str(baseline), labels)}"
        )
    return labels.index(baseline)


def table_by_class(parts: "list[pandas.DataFrame]", classes: list[Any]) -> "pandas.DataFrame":
    """One table, indexed by class and coefficient."""
    import pandas

    table = pandas.concat(dict(zip(classes, parts, strict=True)), names=["class", "coefficient"])
    table.attrs |= parts[0].attrs
    return table


def class_summary(
    posterior: StarPosterior, names: list[str], classes: np.ndarray, level: float, baseline: Any
) -> "pandas.DataFrame":
    """Centred coefficients by class, or their contrasts with a baseline class, which is left out."""
    number = baseline_number(baseline, classes)
    mean, variance = (posterior.mean, posterior.variance) if number is None else posterior.contrast(number)
    sd = variance.sqrt()
    reach = half_width(level) * sd
    shown_classes = [k for k in range(len(classes)) if k != number]
    parts = [
        summary_frame(
            names,
            mean[k],
            sd[k],
            mean[k] - reach[k],
            mean[k] + reach[k],
            torch.special.ndtr(mean[k] / sd[k]),
            level,
        )
        for k in shown_classes
    ]
    return table_by_class(parts, classes[shown_classes].tolist())


class CorrectedClasses(CorrectedPosterior):
    """Summaries and predictions of more than two classes, from draws β_s (K, d) with weights w_s."""

    @property
    def draws(self) -> Tensor:
        """Centred coefficients, draws × classes × d."""
        return self.weighted.draws.unflatten(1, (len(self.classes_), -1))

    @property
    def mean_(self) -> np.ndarray:
        """Posterior means of the centred coefficients, K × d, intercept last."""
        return super().mean_.reshape(len(self.classes_), -1)

    @property
    def sd_(self) -> np.ndarray:
        """Their posterior standard deviations."""
        return super().sd_.reshape(len(self.classes_), -1)

    def sample(self, n: int = 1, random_state: Any = None) -> np.ndarray:
        """Return equally weighted draws, n × K × d."""
        return super().sample(n, random_state).reshape(n, len(self.classes_), -1)

    def to_arviz(self, draws: int = 1000, chains: int = 4, random_state: Any = None) -> Any:
        """Return equally weighted draws in the container of the installed ArviZ, with an axis "class"."""
        sample = torch.from_numpy(self.sample(count_draws(chains, draws), random_state))
        return class_draws_to_arviz(sample, self.classes_.tolist(), self.names, (chains, draws), self._estimator)

    def coefficient_interval(self, level: float = 0.95) -> np.ndarray:
        """Credible intervals of the centred coefficients, K × d × 2."""
        ends = self._quantiles(self.weighted.draws, level)
        return ends.T.reshape(len(self.classes_), -1, 2).numpy()

    def summary(self, level: float = 0.95, baseline: Any = None) -> "pandas.DataFrame":
        """The estimator's `summary`, computed from the weighted draws."""
        number, draws = baseline_number(baseline, self.classes_), self.draws
        if number is not None:
            draws = draws - draws[:, number : number + 1]
        parts, weights = [], self.weighted.weights
        chosen = [k for k in range(len(self.classes_)) if k != number]
        for k in chosen:
            mean, sd = self._moments(draws[:, k])
            low, high = self._quantiles(draws[:, k], level)
            positive = weights @ (draws[:, k] > 0).double()
            parts.append(summary_frame(self.names, mean, sd, low, high, positive, level))
        return table_by_class(parts, self.classes_[chosen].tolist())

    def predict_latent(self, X: Any, offset: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the centred f(x), n × K."""
        found = self._by_class(X, offset, lambda f: self._moments(f - f.mean(-1, keepdim=True)))
        return found[0], found[1]

    def predict_proba(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior-averaged probabilities, n × K."""
        return self._by_class(X, offset, lambda f: self._moments(torch.softmax(f, -1)))[0]

    def predict_std(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior standard deviations of the probabilities, n × K."""
        return self._by_class(X, offset, lambda f: self._moments(torch.softmax(f, -1)))[1]

    def predict_interval(self, X: Any, level: float = 0.95, offset: Any = None) -> np.ndarray:
        """Credible intervals of the probabilities, n × K × 2."""
        half_width(level)
        levels = [0.5 - 0.5 * level, 0.5 + 0.5 * level]

        def ends(f: Tensor) -> Tensor:
            p = torch.softmax(f, -1)
            return weighted_quantiles(p.flatten(1), self.weighted.weights, levels).reshape(2, *p.shape[1:])

        return self._by_class(X, offset, ends).transpose(1, 2, 0)

    def decision_function(self, X: Any, offset: Any = None) -> np.ndarray:
        """log of the posterior-averaged probabilities, less their mean over classes."""
        logs = np.log(np.maximum(self.predict_proba(X, offset), np.finfo(float).tiny))
        return logs - logs.mean(1, keepdims=True)

    def predict(self, X: Any, offset: Any = None) -> np.ndarray:
        """The most probable class, per row."""
        return self.classes_[self.predict_proba(X, offset).argmax(1)]

    def _by_class(self, X: Any, offset: Any, summary: Any) -> np.ndarray:
        """A summary (k × rows × classes) of the draws of f (draws × rows × classes)."""
        return torch.cat(list(self._summarise(X, offset, self.draws, summary)), 1).numpy()

    def _moments(self, values: Tensor) -> Tensor:
        weights = self.weighted.weights.reshape(-1, *[1] * (values.ndim - 1))
        mean = (weights * values).sum(0)
        return torch.stack([mean, (weights * (values - mean).square()).sum(0).sqrt()])


def summary_of_class_draws(block: Block, draws: Tensor, summary: Any) -> Tensor:
    """summary(f) for the rows of a block, f = o + Xβ as draws × rows × classes.

    A residual variance that a row has given β is added to each f_k as noise, with a fixed seed.
    """
    f = class_logits(block, draws.to(block.label.device)).transpose(0, 1).cpu()
    if block.residual is not None:
        noise = torch.from_numpy(np.random.default_rng(SEED).standard_normal(f.shape))
        f = f + block.residual.reshape(f.shape[1], -1).cpu().sqrt() * noise
    return summary(f)
