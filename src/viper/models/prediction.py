"""Predictions from the log-odds f(x) ~ N(ϑ, τ²), in closed form and without sampling.

The probability s(f) has mean E[s(f)], a standard deviation, and credible intervals s(ϑ ± zτ).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.special
import torch
from sklearn.metrics import accuracy_score
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data import writing
from viper.data.open import is_kept_elsewhere
from viper.formula.encoding import Encoding
from viper.formula.screening import (
    MARGIN,
    Remark,
    Screened,
    has_extreme_number,
    mask_of_all_rows,
    row_notes,
    screen_rows,
)
from viper.inference.posterior import Posterior, accuracy, expected_log_likelihood, latent, latent_shape, moved
from viper.inference.rows import Block, RowSource
from viper.softplus.expectation import expected_sigmoid
from viper.softplus.information import answer_information
from viper.softplus.limit import limit

if TYPE_CHECKING:
    import pandas


LEVERAGE_BUDGET = 4e9  # rows × coefficients² searched for the largest τ: about a second
LEVERAGE_ROWS = (200, 10_000)  # least and most rows searched; one in 10,000 similar rows has a larger τ
PREDICTED_COLUMNS = ("probability", "sd", "lower", "upper", "label", "distance", "note")


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

    @classmethod
    def from_reading(cls, reading: "TargetReading", mean: Tensor, variance: Tensor, z: float) -> "Predictions":
        """From ϑ and τ² as a reading for two classes takes them, which may be several per row."""
        if reading is TWO_CLASSES:
            return cls.from_latent(mean, variance, z)
        p, ends = reading.probabilities(mean, variance), reading.intervals(mean, variance, z=z)
        latent, latent_sd = reading.latent(mean, variance).T
        return cls(latent, latent_sd, p[:, 1], reading.sds(mean, variance), ends[:, 0], ends[:, 1])

    @property
    def width(self) -> np.ndarray:
        return self.upper - self.lower

    def take(self, index: Any) -> "Predictions":
        return Predictions(*(column[index] for column in self))

    def table(self, classes: np.ndarray) -> dict[str, np.ndarray]:
        """The columns that are written to files, with the more probable class as `label`."""
        columns = {name: getattr(self, name) for name in ("probability", "sd", "lower", "upper")}
        return {"label": classes[(self.latent > 0).astype(int)], **columns}


class TargetReading(NamedTuple):
    """What log-odds f ~ N(ϑ, τ²) say about the target. All functions take ϑ and τ² of rows, perhaps in several columns.

    `intervals` also takes z, `chosen` the names of the classes, and `table` both.
    """

    probabilities: Callable[[Tensor, Tensor], np.ndarray]
    sds: Callable[[Tensor, Tensor], np.ndarray]
    intervals: Callable[..., np.ndarray]
    scores: Callable[[Tensor, Tensor], np.ndarray]
    chosen: Callable[..., np.ndarray]
    table: Callable[..., dict[str, np.ndarray]]  # the columns that are written to files
    information: Callable[[Tensor, Tensor], np.ndarray]  # mutual information of target and f, in nats
    latent: Callable[[Tensor, Tensor], np.ndarray]  # mean and standard deviation of f


def predictions(model: Any, X: Any, level: float = 0.95, offset: Any = None) -> Predictions:
    """Return all predictions of the model for the rows of X."""
    check_model(model)
    check_one_probability(model)
    given = {} if offset is None else {"offset": offset}
    read = getattr(model, "_read_latent", model.predict_latent)
    mean, sd = (torch.from_numpy(np.array(x, dtype=float)) for x in read(X, **given))
    reading = getattr(model, "_reading", TWO_CLASSES)
    return Predictions.from_reading(reading, mean, sd.square(), half_width(level))


# --- rows of a table, each with its distance from the training data ---


class TablePredictions(NamedTuple):
    """Predictions of a table, one row each, and remarks on its rows."""

    table: "pandas.DataFrame"  # with PREDICTED_COLUMNS; a row that cannot be predicted has only a note
    remarks: list[Remark]

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of rows by kind of remark and column."""
        found: dict[str, dict[str, int]] = {}
        for remark in self.remarks:
            found.setdefault(remark.kind, {})[remark.column] = int(remark.rows.sum())
        return found


def predict_each_row(model: Any, X: Any, level: float = 0.95, offset: Any = None) -> TablePredictions:
    """Predict the rows that can be predicted, measure their distance from the training data, and note what is unusual.

    The distance of x is τ(x)/max τ(xᵢ) over training rows i. As τ² = xᵀΣx is the leverage of x under the posterior
    covariance Σ, a row at a distance above 1 lies outside the ellipsoid that contains the training rows.
    """
    import pandas

    check_model(model)
    index, usable = X.index if isinstance(X, pandas.DataFrame) else None, None
    remarks: list[Remark] = []
    if (encoding := getattr(model, "formula_", None)) is not None:
        X, remarks = screened = screen_for_model(model, X)
        index, usable = X.index, screened.usable
        X, offset = X[usable], offset if offset is None else np.asarray(offset)[usable]
    mean = sd = np.empty((0, *model._latent_shape))
    if usable is None or usable.any():
        mean, sd = model._read_latent(X, offset)
    given = {"classes": model.classes_, "z": half_width(level)}
    columns = model._reading.table(*map(torch.from_numpy, (mean, np.square(sd))), **given)
    if len(sd) and encoding is not None and encoding.imputation is not None:  # τ without the variance of imputed values
        sd = with_encoding(model, replace(encoding, imputation=None)).predict_latent(X)[1]
    distance = sd / model.largest_sd_
    columns["distance"] = distance if distance.ndim == 1 else distance.max(1)
    usable = np.ones(len(sd), dtype=bool) if usable is None else usable
    columns["note"] = np.empty(len(sd), dtype=object)
    if "probability" in columns:  # two classes; the order of the columns is part of the interface
        columns = {name: columns[name] for name in PREDICTED_COLUMNS}
    words = {name: object for name, x in columns.items() if x.dtype.kind != "f"}
    table = pandas.DataFrame(columns, index=np.flatnonzero(usable)).astype(words).reindex(range(len(usable)))
    remarks = [*remarks, *far_rows(table["distance"].to_numpy(dtype=float))]
    table["note"] = row_notes(remarks, len(table))
    return TablePredictions(table if index is None else table.set_axis(index), remarks)


def screen_for_model(model: Any, X: Any) -> Screened:
    """Find the rows that the formula cannot encode or the model cannot predict, and those that are unusual."""
    screened = screen_rows(model.formula_, X)
    groups = model._group_remarks(screened.frame) if hasattr(model, "_group_remarks") else []
    screened = screened._replace(remarks=[*screened.remarks, *groups])
    return screened._replace(remarks=[*screened.remarks, *huge_rows(model, screened)])


def huge_rows(model: Any, screened: Screened) -> list[Remark]:
    """Return a remark on the rows whose log-odds, or their variance, overflow. Only extreme numbers are checked."""
    asked = screened.usable & has_extreme_number(screened.frame)
    if not asked.any():
        return []
    with np.errstate(over="ignore", invalid="ignore"):
        mean, sd = model.predict_latent(screened.frame[asked])
        strange = ~np.isfinite(mean * 0.0 + np.square(sd))
        rows = mask_of_all_rows(strange if strange.ndim == 1 else strange.any(1), asked)
    values = screened.frame.select_dtypes("number", exclude="timedelta").abs()
    largest = np.argmax(values.fillna(0.0).to_numpy(dtype=float), axis=1)
    return [
        huge_remark(screened.frame[name], rows & (largest == j))
        for j, name in enumerate(values)
        if (rows & (largest == j)).any()
    ]


def huge_remark(column: "pandas.Series[Any]", rows: np.ndarray) -> Remark:
    name = str(column.name)
    return Remark("huge", name, rows, lambda row: f"{name} = {column.iloc[row]:.4g} is too large to compute with")


def far_rows(distance: np.ndarray) -> list[Remark]:
    """Return a remark on the rows that lie outside the training data by more than the margin."""
    with np.errstate(invalid="ignore"):
        far = distance > 1.0 + MARGIN

    def text(row: int) -> str:
        return f"{distance[row]:.3g} times as far out as the farthest row of the training data"

    return [Remark("far", "", far, text)] if far.any() else []


def largest_sd(source: RowSource, posterior: Posterior) -> float:
    """max τ(xᵢ) over the rows of a source, or over as many as the budget allows if there are more."""
    most = int(np.clip(LEVERAGE_BUDGET / source.dimension**2, *LEVERAGE_ROWS))
    rows = source if source.rows <= most else source.sample(most, np.random.default_rng(0))
    of_block = partial(from_latent, posterior=moved(posterior, rows.device), function=largest_variance)
    return float(np.sqrt(max(rows.map(of_block))))


def largest_variance(mean: Tensor, variance: Tensor) -> float:
    return float(variance.max())


def check_model(model: Any) -> None:
    """Raise unless the model is one of viper's: a pipeline hides everything but probabilities."""
    if hasattr(model, "predict_latent"):
        return
    fix = "Fit one of its estimators."
    if hasattr(model, "steps"):
        fix = (
            "Pass pipeline[-1], with pipeline[:-1].transform(X) for X; or fit with from_formula, which standardises "
            "the columns and stores their means and scales in the model."
        )
    raise TypeError(f"the model must be one of viper's; got {type(model).__name__}. {fix}")


def check_one_probability(model: Any) -> None:
    """Raise unless rows have a single probability: that of the second of two classes."""
    if len(model.classes_) > 2 or getattr(model, "multilabel_", False):
        raise ValueError(
            f"this is for two classes; got a model of {len(model.classes_)}. Look at one column of predict_proba, or "
            "at one of estimators_ if there are several labels."
        )


def with_rules(model: Any, unseen: str | None, beyond: str | None) -> Any:
    """Return the model with other rules for new levels and for numbers beyond a spline; None keeps a rule."""
    given = {name: rule for name, rule in (("unseen", unseen), ("beyond", beyond)) if rule is not None}
    if not given:
        return model
    if not hasattr(model, "formula_"):
        raise ValueError(f"{next(iter(given))} is a rule of formulas; got a model without one. Use from_formula.")
    return with_encoding(model, model.formula_.with_rules(**given))


def with_encoding(model: Any, encoding: Encoding) -> Any:
    """Return the fitted model with another encoding of the same columns."""
    twin = object.__new__(type(model))
    vars(twin).update(vars(model), formula_=encoding)
    return twin


class PredictionMixin:
    """Estimators that predict from ϑ and τ² of the rows that `_open_rows(X, offset)` opens.

    Predictions for a Dask collection are lazy.
    """

    classes_: np.ndarray
    posterior_: Posterior
    kl_: float
    _largest_sd: float | None = None

    def _open_rows(self, X: Any, offset: Any) -> RowSource:
        raise NotImplementedError

    def _open_labelled_rows(self, X: Any, y: Any, *, sample_weight: Any, offset: Any) -> RowSource:
        raise NotImplementedError

    def _known_weights(self, source: RowSource) -> RowSource:
        """Return rows with the weights that the fit gave to their classes."""
        raise NotImplementedError

    @property
    def _latent_shape(self) -> tuple[int, ...]:
        """The shape of what `_read_latent` returns for a row."""
        return latent_shape(self.posterior_)

    @property
    def _predictive(self) -> Posterior:
        """The posterior of the coefficients of the rows that `_open_rows` opens."""
        return self.posterior_

    @property
    def _reading(self) -> TargetReading:
        """How log-odds are read, given the kind of target."""
        return TWO_CLASSES

    def _predictor(
        self, X: Any, offset: Any, function: Callable[[Tensor, Tensor], Any]
    ) -> tuple[RowSource, Callable[[Block], Any]]:
        """Return the rows of X, and a function that computes function(ϑ, τ²) for a block of rows."""
        check_is_fitted(self, "posterior_")
        rows = self._open_rows(X, offset)
        return rows, partial(from_latent, posterior=moved(self._predictive, rows.device), function=function)

    def _predict(self, X: Any, offset: Any, function: Callable[[Tensor, Tensor], np.ndarray]) -> Any:
        """Return function(ϑ, τ²) of all rows as an array, which is lazy if X is a Dask collection."""
        rows, of_block = self._predictor(X, offset, function)
        return rows.apply(of_block)

    def predict_latent(self, X: Any, offset: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and standard deviation of the log-odds f(x), per row.

        For probabilities, see `predict_proba` and `predict_std`.
        """
        pair = self._predict(X, offset, self._reading.latent)
        return pair[..., 0], pair[..., 1]

    def _read_latent(self, X: Any, offset: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """The means and standard deviations that `_reading` takes."""
        if self._reading.latent is means_and_sds:
            return self.predict_latent(X, offset)
        pair = self._predict(X, offset, means_and_sds)
        return pair[..., 0], pair[..., 1]

    def predict_proba(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior-averaged probabilities E[s(f(x))] of the two classes, n × 2."""
        return self._predict(X, offset, self._reading.probabilities)

    def predict_std(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior standard deviation of the probability s(f(x)), per row."""
        return self._predict(X, offset, self._reading.sds)

    def predict_interval(self, X: Any, level: float = 0.95, offset: Any = None) -> np.ndarray:
        """Credible interval s(ϑ ± zτ) of the probability of the second class, with posterior mass `level`: n × 2."""
        return self._predict(X, offset, partial(self._reading.intervals, z=half_width(level)))

    def predict_information(self, X: Any, offset: Any = None) -> np.ndarray:
        """Mutual information of each row's label and f(x), in nats: how much the label would tell about the model.

        H(E p) - E H(p), known as BALD: near 0 where p is known, even if it is near ½, and at most log 2 for two
        classes. `viper.decisions.suggest` asks for labels by it.
        """
        return self._predict(X, offset, self._reading.information)

    def predict_table(
        self, X: Any, level: float = 0.95, offset: Any = None, *, unseen: str | None = None, beyond: str | None = None
    ) -> "pandas.DataFrame":
        """Predict every row that can be predicted, and say what is unusual about each: a table for unattended use.

        Parameters
        ----------
        X : array or DataFrame
            The rows. A model fitted by a formula takes tables of its raw columns.
        level : float, default 0.95
            Posterior mass of the intervals.
        offset : array (n,), optional
            Known part of the log-odds of each row.
        unseen, beyond : str, optional
            Rules for new levels and for numbers beyond a spline, instead of those given to `from_formula`.

        Returns
        -------
        DataFrame
            `probability` of the second class with `sd`, `lower` and `upper`; `label`, the more probable class;
            `distance` from the training data: √(xᵀΣx), the posterior sd of the log-odds, divided by the largest of the
            training rows, so that 1 is as far as any of them; and `note`, which says what is unusual. A row that cannot
            be predicted has only a note. Ranges, levels and missing values are known for models fitted by a formula,
            and only the distance for other models.
        """
        check_is_fitted(self, "posterior_")
        return predict_each_row(with_rules(self, unseen, beyond), X, level, offset).table

    @property
    def largest_sd_(self) -> float:
        """Largest posterior sd of the log-odds among the training rows; NaN if neither they nor it are stored."""
        if self._largest_sd is not None:
            return self._largest_sd
        fits = getattr(self, "_completed_fits", None) or [self]
        source = getattr(fits[0], "_training_rows", None)
        if source is None or source.traits.where != "memory":
            return float("nan")
        self._largest_sd = largest_sd(source, self._predictive)
        return self._largest_sd

    def predict_to(
        self, X: Any, path: str | PathLike[str], *, level: float = 0.95, offset: Any = None, overwrite: bool = False
    ) -> int:
        """Write the predictions to a Parquet file, in the order of the rows of X, and return the number of rows.

        The columns are `label`, the more probable class, and `probability` of the second class, `sd`, `lower` and
        `upper`, as given by `predict_proba`, `predict_std` and `predict_interval`. Rows are read, predicted and written
        in blocks, and the file gets its name only when it is complete.
        """
        check_is_fitted(self, "posterior_")
        columns = partial(self._reading.table, classes=self.classes_, z=half_width(level))
        rows, of_block = self._predictor(X, offset, columns)
        return writing.write_columns(path, rows.map(of_block), overwrite)

    def decision_function(self, X: Any, offset: Any = None) -> np.ndarray:
        """Log-odds of the posterior-averaged probability, which are positive if the second class is predicted."""
        return self._predict(X, offset, self._reading.scores)

    def predict(self, X: Any, offset: Any = None) -> np.ndarray:
        """The more probable class, per row."""
        check_is_fitted(self, "posterior_")
        return self._predict(X, offset, partial(self._reading.chosen, classes=self.classes_))

    def score(self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """Share of rows whose class is predicted correctly."""
        if is_kept_elsewhere(X):
            check_is_fitted(self, "posterior_")
            source = self._open_labelled_rows(X, y, sample_weight=sample_weight, offset=offset)
            return accuracy(source, moved(self._predictive, source.device))
        return float(accuracy_score(y, self.predict(X, offset), sample_weight=sample_weight))

    def elbo(self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """The exact ELBO of the given rows under the fitted posterior and the prior of the fit.

        For a Gaussian process, that prior is given by the fitted kernel and mean function.
        """
        check_is_fitted(self, "posterior_")
        source = self._known_weights(self._open_labelled_rows(X, y, sample_weight=sample_weight, offset=offset))
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
    return torch.stack([mean, variance.sqrt()], -1).cpu().numpy()


def class_probabilities(mean: Tensor, variance: Tensor) -> np.ndarray:
    """E[s(-f)] and E[s(f)], each computed directly so that the smaller one keeps its digits."""
    sides = [expected_sigmoid(sign * mean, variance).mean for sign in (-1.0, 1.0)]
    return torch.stack(sides, 1).cpu().numpy()


def probability_std(mean: Tensor, variance: Tensor) -> np.ndarray:
    return expected_sigmoid(mean, variance).std.cpu().numpy()


def probability_interval(mean: Tensor, variance: Tensor, z: float) -> np.ndarray:
    """s(ϑ ± zτ)."""
    reach = z * variance.sqrt()
    return torch.sigmoid(torch.stack([mean - reach, mean + reach], -1)).cpu().numpy()


def probable_classes(mean: Tensor, variance: Tensor, classes: np.ndarray) -> np.ndarray:
    return classes[(mean > 0).cpu().numpy().astype(int)]


def prediction_table(mean: Tensor, variance: Tensor, classes: np.ndarray, z: float) -> dict[str, np.ndarray]:
    return Predictions.from_latent(mean, variance, z).table(classes)


def columns_by_class(
    probabilities: Any, sds: Any, intervals: Any, mean: Tensor, variance: Tensor, classes: np.ndarray, z: float
) -> dict[str, np.ndarray]:
    """Return `probability`, `sd`, `lower` and `upper` of each class, with its name behind theirs: `probability_a`."""
    ends = intervals(mean, variance, z=z)
    parts = {"probability": probabilities(mean, variance), "sd": sds(mean, variance)}
    parts |= {"lower": ends[..., 0], "upper": ends[..., 1]}
    return {f"{part}_{name}": x[:, k] for k, name in enumerate(classes) for part, x in parts.items()}


def label_information(mean: Tensor, variance: Tensor) -> np.ndarray:
    return answer_information(mean, variance).cpu().numpy()


def log_odds_of_mean(mean: Tensor, variance: Tensor) -> np.ndarray:
    return log_odds(class_probabilities(mean, variance))


def log_odds(probability: np.ndarray) -> np.ndarray:
    """log(p₁/p₀) of each pair, where a probability that underflows counts as the smallest positive number."""
    logs = np.log(np.maximum(probability, np.finfo(float).tiny))
    return logs[..., 1] - logs[..., 0]


TWO_CLASSES = TargetReading(
    class_probabilities,
    probability_std,
    probability_interval,
    log_odds_of_mean,
    probable_classes,
    prediction_table,
    label_information,
    means_and_sds,
)


def half_width(level: float) -> float:
    """z with P(|N(0,1)| < z) = level."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie strictly between 0 and 1; got {level!r}. Use 0.95 for a 95 % interval.")
    return float(scipy.special.ndtri(0.5 + 0.5 * level))
