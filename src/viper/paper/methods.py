"""Gaussian-process classifiers of the paper's Sections 3.2 and 4.2: the methods, one fit, and what was published."""

import time
import warnings
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from viper import VariationalGPClassifier
from viper.paper.tables import Cell, Spread

if TYPE_CHECKING:
    import pandas

REACH = 1.959963984540054  # 97.5 % quantile of the standard normal
METHODS: dict[str, dict[str, Any]] = {
    "VI-MC": {"bound": "mc"},  # first: KL_MC is measured from it
    "VI-PER": {"terms": 12},
    "VI-PER limit": {},
    "VI-PG": {"bound": "pg"},
}
ORDER = ("VI-PER", "VI-PER limit", "VI-MC", "VI-PG")  # in tables and figures


class Fitted(NamedTuple):
    model: VariationalGPClassifier
    runtime: float


class Marginals(NamedTuple):
    """f(x) ~ N(mean, sd²), at each of some rows."""

    mean: np.ndarray
    sd: np.ndarray

    @property
    def width(self) -> float:
        """Mean width of the 95 % credible intervals."""
        return float(2.0 * REACH * self.sd.mean())


def fit(X: np.ndarray, y: np.ndarray, method: str, seed: int, samples: int, **options: Any) -> Fitted:
    """A fit with the estimator's defaults (50 inducing points, ARD kernel, linear mean), and its seconds."""
    from viper.errors import ConvergenceWarning, JitterWarning, NarrowIntervalsWarning

    chosen = {**METHODS[method], **({"samples": samples} if method == "VI-MC" else {}), **options}
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # whether it converged is a column
        warnings.simplefilter("ignore", JitterWarning)
        warnings.simplefilter("ignore", NarrowIntervalsWarning)  # the mean is the paper's, and widths are a column
        model = VariationalGPClassifier(random_state=seed, verbose=False, **chosen).fit(X, y)
    return Fitted(model, time.process_time() - began)


def marginals(model: VariationalGPClassifier, X: np.ndarray) -> Marginals:
    return Marginals(*model.predict_latent(X))


def divergence(p: Marginals, q: Marginals) -> float:
    """Σ_i KL(p(f_i) ‖ q(f_i)), the sum over rows that the published values are of the size of."""
    terms = np.log(q.sd / p.sd) + (p.sd**2 + (p.mean - q.mean) ** 2) / (2.0 * q.sd**2) - 0.5
    return float(terms.sum())


# --- published ---


@cache
def published_runs() -> "pandas.DataFrame":
    """Median and quantiles over the authors' 100 runs (github.com/mkomod/vi-per, results/), by setting and method."""
    import pandas

    with (files("viper.paper") / "published_gp.csv").open(encoding="utf-8") as file:
        return pandas.read_csv(file).set_index(["setting", "method"])


def published(setting: str, method: str, metric: str) -> Cell:
    """A published metric, or None."""
    key = (setting, method)
    if key not in published_runs().index or metric not in published_runs():
        return None
    row = published_runs().loc[key]
    values = [float(row[metric + ending]) for ending in ("", "_low", "_high")]
    return Spread(*values) if values[0] == values[0] else None
