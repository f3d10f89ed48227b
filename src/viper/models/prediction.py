"""Predictions from the log-odds f(x) ~ N(ϑ, τ²), in closed form and without sampling.

The probability s(f) has mean E[s(f)], a standard deviation, and credible intervals s(ϑ ± zτ).
"""

from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import scipy.special
import torch
from sklearn.metrics import accuracy_score
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data import writing
from viper.data.open import is_kept_elsewhere
from viper.inference.posterior import Posterior, accuracy, expected_log_likelihood, latent, moved
from viper.inference.rows import Block, RowSource
from viper.softplus.expectation import expected_sigmoid
from viper.softplus.limit import limit


class Predictions(NamedTuple):
    """A model's predictions for each row: log-odds f ~ N(ϑ, τ²), and the probability s(f) of the second class."""

    latent: np.ndarray  # ϑ
    latent_sd: np.ndarray  # τ
    probability: np.ndarray  # E[s(f)]
    sd: np.ndarray  # standard deviation of s(f)
    lower: np.ndarray  # s(ϑ - zτ)
    upper: np.ndarray  # s(ϑ + zτ)

    @classmethod
    def from_latent(cls, mean: Tensor, variance: Tensor, z: float) -> "Predictions":
        sd = variance.sqrt()
        ends = torch.sigmoid(mean - z * sd), torch.sigmoid(mean + z * sd)
        return cls(*(x.cpu().numpy() for x in (mean, sd, *expected_sigmoid(mean, variance), *ends)))

    @property
    def width(self) -> np.ndarray:
        return self.upper - self.lower

    def take(self, index: Any) -> "Predictions":
        return Predictions(*(column[index] for column in self))

    def table(self, classes: np.ndarray) -> dict[str, np.ndarray]:
        """The columns that are written to files, with the more probable class as `label`."""
        columns = {name: getattr(self, name) for name in ("probability", "sd", "lower", "upper")}
        return {"label": classes[(self.latent > 0).astype(int)], **columns}


def predictions(model: Any, X: Any, level: float = 0.95) -> Predictions:
    """Return all predictions of the model for the rows of X."""
    check_model(model)
    mean, sd = (torch.from_numpy(np.array(x, dtype=float)) for x in model.predict_latent(X))
    return Predictions.from_latent(mean, sd.square(), half_width(level))


def check_model(model: Any) -> None:
    """Raise unless the model is one of viper's, which predict more than probabilities. A pipeline hides the rest."""
    if hasattr(model, "predict_latent"):
        return
    fix = "Fit one of its estimators."
    if hasattr(model, "steps"):
        fix = (
            "Pass pipeline[-1], with pipeline[:-1].transform(X) for X; or fit with from_formula, which standardises "
            "the columns and stores their means and scales in the model."
        )
    raise TypeError(f"the model must be one of viper's; got {type(model).__name__}. {fix}")


class PredictionMixin:
    """Estimators that predict from ϑ and τ² of the rows that `_open_rows(X, offset)` opens.

    Predictions for a Dask collection are lazy.
    """

    classes_: np.ndarray
    posterior_: Posterior
    kl_: float

    def _open_rows(self, X: Any, offset: Any) -> RowSource:
        raise NotImplementedError

    def _open_labelled_rows(self, X: Any, y: Any, *, sample_weight: Any, offset: Any) -> RowSource:
        raise NotImplementedError

    def _predictor(
        self, X: Any, offset: Any, function: Callable[[Tensor, Tensor], Any]
    ) -> tuple[RowSource, Callable[[Block], Any]]:
        """Return the rows of X, and a function that computes function(ϑ, τ²) for a block of rows."""
        check_is_fitted(self, "posterior_")
        rows = self._open_rows(X, offset)
        return rows, partial(from_latent, posterior=moved(self.posterior_, rows.device), function=function)

    def _predict(self, X: Any, offset: Any, function: Callable[[Tensor, Tensor], np.ndarray]) -> Any:
        """Return function(ϑ, τ²) of all rows as an array, which is lazy if X is a Dask collection."""
        rows, of_block = self._predictor(X, offset, function)
        return rows.apply(of_block)

    def predict_latent(self, X: Any, offset: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and standard deviation of the log-odds f(x), per row.

        For probabilities, see `predict_proba` and `predict_std`.
        """
        pair = self._predict(X, offset, means_and_sds)
        return pair[:, 0], pair[:, 1]

    def predict_proba(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior-averaged probabilities E[s(f(x))] of the two classes, n × 2."""
        return self._predict(X, offset, class_probabilities)

    def predict_std(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior standard deviation of the probability s(f(x)), per row."""
        return self._predict(X, offset, probability_std)

    def predict_interval(self, X: Any, level: float = 0.95, offset: Any = None) -> np.ndarray:
        """Credible interval s(ϑ ± zτ) of the probability of the second class, with posterior mass `level`: n × 2."""
        return self._predict(X, offset, partial(probability_interval, z=half_width(level)))

    def predict_to(
        self, X: Any, path: str | PathLike[str], *, level: float = 0.95, offset: Any = None, overwrite: bool = False
    ) -> int:
        """Write the predictions to a Parquet file, in the order of the rows of X, and return the number of rows.

        The columns are `label`, the more probable class, and `probability` of the second class, `sd`, `lower` and
        `upper`, as given by `predict_proba`, `predict_std` and `predict_interval`. Rows are read, predicted and written
        in blocks, and the file gets its name only when it is complete.
        """
        check_is_fitted(self, "posterior_")
        columns = partial(prediction_table, classes=self.classes_, z=half_width(level))
        rows, of_block = self._predictor(X, offset, columns)
        return writing.write_columns(path, rows.map(of_block), overwrite)

    def decision_function(self, X: Any, offset: Any = None) -> np.ndarray:
        """Log-odds of the posterior-averaged probability, which are positive if the second class is predicted."""
        return self._predict(X, offset, log_odds_of_mean)

    def predict(self, X: Any, offset: Any = None) -> np.ndarray:
        """The more probable class, per row."""
        check_is_fitted(self, "posterior_")
        return self._predict(X, offset, partial(probable_classes, classes=self.classes_))

    def score(self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """Share of rows whose class is predicted correctly."""
        if is_kept_elsewhere(X):
            check_is_fitted(self, "posterior_")
            source = self._open_labelled_rows(X, y, sample_weight=sample_weight, offset=offset)
            return accuracy(source, moved(self.posterior_, source.device))
        return float(accuracy_score(y, self.predict(X, offset), sample_weight=sample_weight))

    def elbo(self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """The exact ELBO of the given rows under the fitted posterior and the prior of the fit.

        For a Gaussian process, that prior is given by the fitted kernel and mean function.
        """
        check_is_fitted(self, "posterior_")
        source = self._open_labelled_rows(X, y, sample_weight=sample_weight, offset=offset)
        return expected_log_likelihood(source, moved(self.posterior_, source.device), limit().moments) - self.kl_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.classifier_tags.multi_class = False
        tags.input_tags.sparse = True
        return tags


def from_latent(block: Block, posterior: Posterior, function: Callable[[Tensor, Tensor], Any]) -> Any:
    """Return function(ϑ, τ²) for the rows of a block, on their device."""
    device = block.label.device
    return function(*latent(block, posterior if posterior.mean.device == device else moved(posterior, device)))


def means_and_sds(mean: Tensor, variance: Tensor) -> np.ndarray:
    return torch.stack([mean, variance.sqrt()], 1).cpu().numpy()


def class_probabilities(mean: Tensor, variance: Tensor) -> np.ndarray:
    """E[s(-f)] and E[s(f)], each computed directly so that the smaller one keeps its digits."""
    sides = [expected_sigmoid(sign * mean, variance).mean for sign in (-1.0, 1.0)]
    return torch.stack(sides, 1).cpu().numpy()


def probability_std(mean: Tensor, variance: Tensor) -> np.ndarray:
    return expected_sigmoid(mean, variance).std.cpu().numpy()


def probability_interval(mean: Tensor, variance: Tensor, z: float) -> np.ndarray:
    """s(ϑ ± zτ)."""
    reach = z * variance.sqrt()
    return torch.sigmoid(torch.stack([mean - reach, mean + reach], 1)).cpu().numpy()


def probable_classes(mean: Tensor, variance: Tensor, classes: np.ndarray) -> np.ndarray:
    return classes[(mean > 0).cpu().numpy().astype(int)]


def prediction_table(mean: Tensor, variance: Tensor, classes: np.ndarray, z: float) -> dict[str, np.ndarray]:
    return Predictions.from_latent(mean, variance, z).table(classes)


def log_odds_of_mean(mean: Tensor, variance: Tensor) -> np.ndarray:
    return log_odds(class_probabilities(mean, variance))


def log_odds(probability: np.ndarray) -> np.ndarray:
    """log(p₁/p₀) of each row, where a probability that underflows counts as the smallest positive number."""
    low, high = np.log(np.maximum(probability, np.finfo(float).tiny)).T
    return high - low


def half_width(level: float) -> float:
    """z with P(|N(0,1)| < z) = level."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie strictly between 0 and 1; got {level!r}. Use 0.95 for a 95 % interval.")
    return float(scipy.special.ndtri(0.5 + 0.5 * level))
