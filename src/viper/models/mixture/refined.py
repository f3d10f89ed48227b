"""A fitted logistic regression whose posterior is refined to a mixture of Gaussians."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from torch import Tensor

from viper.inference.importance import SEED, Diagnosis, weigh
from viper.inference.mixture.family import GaussianMixture, MixtureWeighedFit, fit_mixture
from viper.inference.posterior import Full
from viper.models.diagnosis import summary_frame
from viper.models.prediction import half_width, log_odds
from viper.softplus.limit import limit

if TYPE_CHECKING:
    import pandas

MOST_REFINED = 2_000_000  # rows × coefficients; with more, a posterior is Gaussian
MOST_COMPONENTS = 16
QUANTILE_HALVINGS = 60  # of an interval in which a quantile lies


class RefinedPosterior:
    """Summaries and predictions of a mixture of Gaussians, exact: no samples anywhere but in the two checks.

    Attributes
    ----------
    mixture : GaussianMixture
        `weights`, `means` and `factors` of the components.
    elbo_ : float
        A lower bound on the ELBO of the mixture, and so on the log evidence: the entropy is bounded from below.
    mean_, sd_ : arrays (d,)
        Posterior means and standard deviations of the coefficients, the intercept last.
    """

    def __init__(self, mixture: GaussianMixture, elbo: float, fit: MixtureWeighedFit, model: Any) -> None:
        self.mixture, self.elbo_ = mixture, elbo
        self.classes_, self.names = model.classes_, model._names()
        self._fit, self._open_rows = fit, model._open_rows

    @property
    def mean_(self) -> np.ndarray:
        return self.mixture.mean.numpy()

    @property
    def sd_(self) -> np.ndarray:
        return self.mixture.variance.sqrt().numpy()

    def sample(self, n: int = 1, random_state: Any = None) -> np.ndarray:
        """Draw coefficients, n × d."""
        seed = check_random_state(random_state).randint(2**31)
        return self.mixture.draw(n, np.random.default_rng(seed)).numpy()

    def entropy_gap(self, draws: int = 20_000, random_state: Any = None) -> tuple[float, float]:
        """By how many nats `elbo_` is below the ELBO, because of the bound on the entropy: estimate, standard error."""
        generator = np.random.default_rng(SEED if random_state is None else random_state)
        _, log_ratio, log_evidence = self._fit.weighed(draws, generator)
        values = log_ratio + log_evidence
        return float(values.mean()) - self.elbo_, float(values.std()) / draws**0.5

    def diagnose(self, draws: int = 4000, random_state: Any = None) -> Diagnosis:
        """Measure by importance weights how close the mixture is to the exact posterior."""
        generator = np.random.default_rng(SEED if random_state is None else random_state)
        return weigh([self._fit], self.elbo_, "full", draws, generator)[1]  # type: ignore[list-item]

    def coefficient_interval(self, level: float = 0.95) -> np.ndarray:
        """Credible intervals of the coefficients, d × 2."""
        half_width(level)
        means, sds = self.mixture.means.T, torch.linalg.vector_norm(self.mixture.factors, dim=2).T
        return self._ends(means, sds, level).numpy()

    def summary(self, level: float = 0.95) -> "pandas.DataFrame":
        """As the estimator's `summary`."""
        means, sds = self.mixture.means.T, torch.linalg.vector_norm(self.mixture.factors, dim=2).T
        low, high = torch.from_numpy(self.coefficient_interval(level)).T
        positive = torch.special.ndtr(means / sds) @ self.mixture.weights
        mean, sd = self.mixture.mean, self.mixture.variance.sqrt()
        return summary_frame(self.names, mean, sd, low, high, positive, level)

    def predict_latent(self, X: Any, offset: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and standard deviation of the log-odds, per row."""

        def moments(theta: Tensor, tau2: Tensor, weights: Tensor) -> Tensor:
            mean = theta @ weights
            return torch.stack([mean, ((tau2 + (theta - mean[:, None]).square()) @ weights).sqrt()], 1)

        found = self._over_rows(X, offset, moments)
        return found[:, 0], found[:, 1]

    def predict_proba(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior-averaged probabilities of the two classes, n × 2."""

        def averages(theta: Tensor, tau2: Tensor, weights: Tensor) -> Tensor:
            return torch.stack([limit().moments(sign * theta, tau2)[1] @ weights for sign in (-1.0, 1.0)], 1)

        return self._over_rows(X, offset, averages)

    def predict_std(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior standard deviation of the probability, per row: √(E s - E s' - (E s)²)."""

        def sds(theta: Tensor, tau2: Tensor, weights: Tensor) -> Tensor:
            _, g, h = limit().moments(theta, tau2)
            return ((g - h) @ weights - (g @ weights).square()).clamp(min=0.0).sqrt()

        return self._over_rows(X, offset, sds)

    def predict_interval(self, X: Any, level: float = 0.95, offset: Any = None) -> np.ndarray:
        """Credible interval of the probability of the second class, n × 2."""
        half_width(level)
        return self._over_rows(X, offset, lambda theta, tau2, _: torch.sigmoid(self._ends(theta, tau2.sqrt(), level)))

    def decision_function(self, X: Any, offset: Any = None) -> np.ndarray:
        """Log-odds of the posterior-averaged probability."""
        return log_odds(self.predict_proba(X, offset))

    def predict(self, X: Any, offset: Any = None) -> np.ndarray:
        """The more probable class, per row."""
        return self.classes_[(self.predict_proba(X, offset)[:, 1] > 0.5).astype(int)]

    def _over_rows(self, X: Any, offset: Any, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> np.ndarray:
        """What the function of ϑ, τ² (rows × components) and weights returns, for all rows."""
        rows = self._open_rows(X, offset).in_memory()
        theta, tau2 = self.mixture.latent(rows.dense_design(), rows.offset)
        return function(theta, tau2, self.mixture.weights).numpy()

    def _ends(self, means: Tensor, sds: Tensor, level: float) -> Tensor:
        """Quantiles of mixtures of normals, rows × 2, by halving."""
        reach = 10.0 * sds.max(1).values
        ends = []
        for q in (0.5 - 0.5 * level, 0.5 + 0.5 * level):
            low, high = means.min(1).values - reach, means.max(1).values + reach
            for _ in range(QUANTILE_HALVINGS):
                middle = 0.5 * (low + high)
                under = torch.special.ndtr((middle[:, None] - means) / sds) @ self.mixture.weights < q
                low, high = torch.where(under, middle, low), torch.where(under, high, middle)
            ends.append(0.5 * (low + high))
        return torch.stack(ends, 1)


def refine_posterior(model: Any, fit: Any, components: Any) -> RefinedPosterior:
    """Refine the posterior of a fitted model, with its prior and rows, to so many components."""
    whole = isinstance(components, int | np.integer) and not isinstance(components, bool)
    if not whole or not 0 < components <= MOST_COMPONENTS:
        raise ValueError(f"components must be a whole number from 1 to {MOST_COMPONENTS}; got {components!r}.")
    posterior, prior, source = fit.posterior, fit.prior, fit.source
    if not isinstance(posterior, Full) or source.device.type != "cpu":
        raise ValueError(
            "refined() needs two classes, a full covariance on the CPU and no more columns than rows; got "
            f"{type(posterior).__name__} on {source.device}. Use corrected(), or covariance='full'."
        )
    if source.rows * source.dimension > MOST_REFINED:
        raise ValueError(
            f"refined() is for small data, where posteriors are skewed; got {source.rows:,} rows and "
            f"{source.dimension} coefficients. Use the posterior as it is: diagnose() says how close it is."
        )
    rows = source.in_memory()
    mixture, elbo = fit_mixture(rows, prior.without_loadings(), posterior, int(components))
    return RefinedPosterior(mixture, elbo, MixtureWeighedFit(mixture, prior, rows), model)
