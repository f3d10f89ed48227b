"""What a Gaussian latent value f(x) ~ N(ϑ, τ²) says about a probability: everything in closed form, nothing sampled.

A classifier that knows ϑ and τ² of new rows gets its predictions from here: E[s(f)], the standard deviation of s(f),
and intervals s(ϑ ± zτ) for the probability itself.
"""

from collections.abc import Iterator
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import scipy.special
import torch
from sklearn.metrics import accuracy_score
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data import writing
from viper.data.open import is_dask, kept_elsewhere
from viper.inference.posterior import Posterior, accuracy, expected_log_likelihood, moved
from viper.inference.rows import Source
from viper.softplus.expectation import expected_sigmoid
from viper.softplus.limit import limit


class Predictions(NamedTuple):
    """What a model says about each row: log-odds f ~ N(ϑ, τ²), and the probability s(f) of the second class."""

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
    """Everything the model says about the rows of X, in closed form."""
    check_model(model)
    mean, sd = (torch.from_numpy(np.array(x, dtype=float)) for x in model.predict_latent(X))
    return Predictions.from_latent(mean, sd.square(), half_width(level))


def check_model(model: Any) -> None:
    """Check that it is one of viper's models, which know more than probabilities. A pipeline hides it."""
    if hasattr(model, "predict_latent"):
        return
    fix = "Fit one of its estimators."
    if hasattr(model, "steps"):
        fix = (
            "Pass pipeline[-1], with pipeline[:-1].transform(X) for X; or fit by from_formula, which standardises the "
            "columns and keeps that with the model."
        )
    raise TypeError(f"the model must be one of viper's; got {type(model).__name__}. {fix}")


class PredictionMixin:
    """Predictions from `_latent_blocks(X, offset)`, which yields ϑ and τ² of some rows at a time; and `classes_`.

    Of Dask collections they are lazy.
    """

    classes_: np.ndarray
    posterior_: Posterior
    kl_: float

    def _latent_blocks(self, X: Any, offset: Any) -> Iterator[tuple[Tensor, Tensor]]:
        raise NotImplementedError

    def _labelled(self, X: Any, y: Any, sample_weight: Any, offset: Any) -> Source:
        raise NotImplementedError

    def _latent(self, X: Any, offset: Any) -> tuple[Tensor, Tensor]:
        blocks = list(self._latent_blocks(X, offset))
        if not blocks:
            raise ValueError("there must be at least one row to predict; got none.")
        return torch.cat([mean for mean, _ in blocks]), torch.cat([variance for _, variance in blocks])

    def predict_latent(self, X: Any, offset: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the latent f(x), the log-odds, per row.

        For the probability's own scale see `predict_proba` and `predict_std`.
        """
        if is_dask(X):
            pair = self._lazily("predict_latent", X, offset, columns=2)
            return pair[:, 0], pair[:, 1]
        mean, variance = self._latent(X, offset)
        return mean.cpu().numpy(), variance.sqrt().cpu().numpy()

    def predict_proba(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior-averaged probabilities E[s(f(x))] of the two classes, n × 2."""
        if is_dask(X):
            return self._lazily("predict_proba", X, offset, columns=2)
        mean, variance = self._latent(X, offset)
        # both sides directly, so that the small one keeps its digits
        sides = [expected_sigmoid(sign * mean, variance).mean for sign in (-1.0, 1.0)]
        return torch.stack(sides, 1).cpu().numpy()

    def predict_std(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior standard deviation of the probability s(f(x)), per row."""
        if is_dask(X):
            return self._lazily("predict_std", X, offset)
        return expected_sigmoid(*self._latent(X, offset)).std.cpu().numpy()

    def predict_interval(self, X: Any, level: float = 0.95, offset: Any = None) -> np.ndarray:
        """Credible interval of the probability of the second class, n × 2: s(ϑ ± zτ), of posterior mass `level`."""
        z = half_width(level)
        if is_dask(X):
            return self._lazily("predict_interval", X, offset, columns=2, level=level)
        mean, variance = self._latent(X, offset)
        reach = z * variance.sqrt()
        return torch.sigmoid(torch.stack([mean - reach, mean + reach], 1)).cpu().numpy()

    def predict_to(
        self, X: Any, path: str | PathLike[str], *, level: float = 0.95, offset: Any = None, overwrite: bool = False
    ) -> int:
        """Write the predictions to a Parquet file, a row for each of X in the same order, and return their number.

        Columns: `label`, the more probable class; `probability` of the second class, `sd`, `lower` and `upper`, as from
        `predict_proba`, `predict_std` and `predict_interval`. Neither X nor the predictions are ever held whole, and
        the file gets its name when it is complete.
        """
        z = half_width(level)
        blocks = (Predictions.from_latent(mean, variance, z) for mean, variance in self._latent_blocks(X, offset))
        return writing.write_columns(path, (block.table(self.classes_) for block in blocks), overwrite)

    def decision_function(self, X: Any, offset: Any = None) -> np.ndarray:
        """Log-odds of the posterior-averaged probability; positive where the second class is predicted."""
        if is_dask(X):
            return self._lazily("decision_function", X, offset)
        return log_odds(self.predict_proba(X, offset))

    def predict(self, X: Any, offset: Any = None) -> np.ndarray:
        """The more probable class, per row."""
        if is_dask(X):
            return self._lazily("predict", X, offset, dtype=self.classes_.dtype)
        mean, _ = self._latent(X, offset)
        return self.classes_[(mean > 0).cpu().numpy().astype(int)]

    def score(self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """Share of rows whose class is predicted right."""
        if kept_elsewhere(X):
            check_is_fitted(self, "posterior_")
            source = self._labelled(X, y, sample_weight, offset)
            return accuracy(source, moved(self.posterior_, source.device))
        return float(accuracy_score(y, self.predict(X, offset), sample_weight=sample_weight))

    def elbo(self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """The exact ELBO of the given rows at the fitted posterior, against the prior of the fit.

        For a Gaussian process that prior is the fitted kernel and mean function.
        """
        check_is_fitted(self, "posterior_")
        source = self._labelled(X, y, sample_weight, offset)
        return expected_log_likelihood(source, moved(self.posterior_, source.device), limit().moments) - self.kl_

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.classifier_tags.multi_class = False
        tags.input_tags.sparse = True
        return tags

    def _lazily(self, name: str, X: Any, offset: Any, columns: int = 0, dtype: Any = np.float64, **options: Any) -> Any:
        """The method of that name, partition by partition when it is computed: a Dask array."""
        from viper.data.dask.collections import predict_lazily

        check_is_fitted(self, "posterior_")
        return predict_lazily(self, name, X, offset, columns, dtype, **options)


def log_odds(probability: np.ndarray) -> np.ndarray:
    """log(p₁/p₀) of each row, where what underflows counts as the smallest number."""
    low, high = np.log(np.maximum(probability, np.finfo(float).tiny)).T
    return high - low


def half_width(level: float) -> float:
    """z with P(|N(0,1)| < z) = level."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie strictly between 0 and 1; got {level!r}. Use 0.95 for a 95 % interval.")
    return float(scipy.special.ndtri(0.5 + 0.5 * level))
