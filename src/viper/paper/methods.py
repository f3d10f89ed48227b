"""The paper's methods, for all artefacts: their options, one timed fit of each, and their scores against the truth."""

import time
import warnings
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from viper import VariationalGPClassifier, VariationalLogisticRegression
from viper.errors import JitterWarning, NarrowIntervalsWarning

# In the order of the fits: VI-MC comes first, because KL_MC is measured from it.
METHODS: dict[str, dict[str, Any]] = {
    "VI-MC": {"bound": "mc"},
    "VI-PER": {"terms": 12},
    "VI-PER limit": {},
    "VI-PG": {"bound": "pg"},
}
# The paper's Gaussian process; everything but q maximises the ELBO alone.
PAPER_GP = {"kernel": "rbf", "lengthscales": "many", "mean": "linear", "priors": None, "n_inducing": 50}
TABLE_ORDER = ("VI-PER", "VI-PER limit", "VI-MC", "VI-PG")
FAMILIES = {"Q": "diagonal", "Q'": "full"}  # the paper's name of a family -> the option `covariance`
REACH = 1.959963984540054  # 97.5 % quantile of the standard normal

# The results record convergence and widths of intervals, and the linear mean is the paper's choice.
IGNORED_WARNINGS = (ConvergenceWarning, JitterWarning, NarrowIntervalsWarning)


def fit_logistic(
    X: np.ndarray, y: np.ndarray, seed: int, options: dict[str, Any]
) -> tuple[VariationalLogisticRegression, float]:
    """Logistic regression without an intercept, and the processor seconds its fit took."""
    model = VariationalLogisticRegression(fit_intercept=False, verbose=False, random_state=seed, **options)
    return model, seconds_to_fit(model, X, y)


def fit_gp(
    X: np.ndarray, y: np.ndarray, method: str, seed: int, samples: int, **options: Any
) -> tuple[VariationalGPClassifier, float]:
    """The paper's GP (50 inducing points, ARD kernel, linear mean, no priors), and the seconds of its fit."""
    chosen = {**PAPER_GP, **METHODS[method], **({"samples": samples} if method == "VI-MC" else {}), **options}
    model = VariationalGPClassifier(random_state=seed, verbose=False, **chosen)
    return model, seconds_to_fit(model, X, y)


def seconds_to_fit(model: Any, X: np.ndarray, y: np.ndarray) -> float:
    """Fit a model and return the processor seconds it took."""
    with warnings.catch_warnings():
        for category in IGNORED_WARNINGS:
            warnings.simplefilter("ignore", category)
        start = time.process_time()
        model.fit(X, y)
        return time.process_time() - start


class Marginals(NamedTuple):
    """f(x) ~ N(mean, sd²) at each of some rows."""

    mean: np.ndarray
    sd: np.ndarray

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """Ends of the 95 % credible intervals."""
        return self.mean - REACH * self.sd, self.mean + REACH * self.sd

    @property
    def width(self) -> float:
        """Mean width of the 95 % credible intervals."""
        return float(2.0 * REACH * self.sd.mean())


def gp_marginals(model: VariationalGPClassifier, X: np.ndarray) -> Marginals:
    """The posterior of f at the rows of X."""
    return Marginals(*model.predict_latent(X))


def marginal_kl(p: Marginals, q: Marginals) -> float:
    """Σ_i KL(p(f_i) ‖ q(f_i)): the published values have the size of a sum over rows."""
    terms = np.log(q.sd / p.sd) + (p.sd**2 + (p.mean - q.mean) ** 2) / (2.0 * q.sd**2) - 0.5
    return float(terms.sum())


def scores_against(truth: np.ndarray, mean: np.ndarray, interval: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Mean squared error of the means, and coverage and mean width of the intervals."""
    low, high = interval
    return {
        "mse": float(np.square(mean - truth).mean()),
        "coverage": float(((low <= truth) & (truth <= high)).mean()),
        "width": float((high - low).mean()),
    }
