"""The importance-corrected posterior: the exact one, as weighted draws, with the estimator's own methods."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from torch import Tensor

from viper.arviz import check_shape, from_draws
from viper.importance import Diagnosis, WeightedDraws, summary_frame, weighted_quantiles
from viper.prediction import half_width, log_odds

if TYPE_CHECKING:
    import pandas


class CorrectedPosterior:
    """Summaries and predictions from draws β_s with weights w_s; `diagnosis` says how far to trust them.

    `latent(X, offset, draws)` yields f = o + Xβ, draws × rows, for some rows at a time.
    """

    def __init__(
        self,
        weighted: WeightedDraws,
        diagnosis: Diagnosis,
        names: list[str],
        classes: np.ndarray,
        latent: Callable[[Any, Any, Tensor], Iterator[Tensor]],
    ) -> None:
        self.weighted, self.diagnosis, self.names = weighted, diagnosis, names
        self.classes_ = classes
        self._latent = latent

    @property
    def mean_(self) -> np.ndarray:
        """Posterior means of the coefficients, intercept last."""
        return self.weighted.mean.numpy()

    @property
    def sd_(self) -> np.ndarray:
        """Posterior standard deviations of the coefficients, intercept last."""
        return self.weighted.variance.sqrt().numpy()

    def sample(self, n: int = 1, random_state: Any = None) -> np.ndarray:
        """`n` equally weighted draws of the coefficients, n × d."""
        generator = np.random.default_rng(check_random_state(random_state).randint(2**31))
        return self.weighted.resample(n, generator).numpy()

    def to_arviz(self, draws: int = 1000, chains: int = 4, random_state: Any = None) -> Any:
        """Equally weighted draws, as the container of the installed ArviZ."""
        sample = self.sample(check_shape(chains, draws), random_state)
        return from_draws(torch.from_numpy(sample), self.names, (chains, draws))

    def coefficient_interval(self, level: float = 0.95) -> np.ndarray:
        """Credible intervals of the coefficients, d × 2."""
        return self._quantiles(self.weighted.draws, level).T.numpy()

    def summary(self, level: float = 0.95) -> "pandas.DataFrame":
        """Mean, sd, interval, odds ratio with interval and probability of direction of every coefficient."""
        low, high = self._quantiles(self.weighted.draws, level)
        positive = self.weighted.weights @ (self.weighted.draws > 0).double()
        mean, sd = self.weighted.mean, self.weighted.variance.sqrt()
        return summary_frame(self.names, mean, sd, low, high, positive, level)

    def predict_latent(self, X: Any, offset: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the latent f(x), per row."""
        mean, sd = self._over_rows(X, offset, self._moments)
        return mean, sd

    def predict_proba(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior-averaged probabilities of the two classes, n × 2."""
        weights = self.weighted.weights
        return self._over_rows(
            X, offset, lambda f: torch.stack([weights @ torch.sigmoid(sign * f) for sign in (-1.0, 1.0)])
        ).T

    def predict_std(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior standard deviation of the probability, per row."""
        return self._over_rows(X, offset, lambda f: self._moments(torch.sigmoid(f)))[1]

    def predict_interval(self, X: Any, level: float = 0.95, offset: Any = None) -> np.ndarray:
        """Credible interval of the probability of the second class, n × 2."""
        return self._over_rows(X, offset, lambda f: torch.sigmoid(self._quantiles(f, level))).T

    def decision_function(self, X: Any, offset: Any = None) -> np.ndarray:
        """Log-odds of the posterior-averaged probability."""
        return log_odds(self.predict_proba(X, offset))

    def predict(self, X: Any, offset: Any = None) -> np.ndarray:
        """The more probable class, per row."""
        return self.classes_[(self.predict_proba(X, offset)[:, 1] > 0.5).astype(int)]

    def _over_rows(self, X: Any, offset: Any, summary: Callable[[Tensor], Tensor]) -> np.ndarray:
        """A summary (k × rows) of the draws of f (draws × rows), for all rows."""
        return torch.cat([summary(f) for f in self._latent(X, offset, self.weighted.draws)], 1).numpy()

    def _moments(self, values: Tensor) -> Tensor:
        mean = self.weighted.weights @ values
        return torch.stack([mean, (self.weighted.weights @ (values - mean).square()).sqrt()])

    def _quantiles(self, values: Tensor, level: float) -> Tensor:
        half_width(level)  # the check of `level`
        return weighted_quantiles(values, self.weighted.weights, [0.5 - 0.5 * level, 0.5 + 0.5 * level])
