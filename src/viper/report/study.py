"""The numbers of a report: everything it shows about one fitted model and one table of rows."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from viper.data.checks import read_labels
from viper.errors import listed
from viper.formula.columns import as_dates, number_text, with_days
from viper.formula.drift import ColumnDrift, column_drift
from viper.formula.screening import FATAL, columns_as_read
from viper.formula.training import TrainingData
from viper.inference.importance import Diagnosis
from viper.inference.mixture.posterior import count_gaussians
from viper.models.facts import ModelFacts, model_facts
from viper.models.loo import LeaveOneOut
from viper.models.prediction import Predictions, check_model, predictions, screen_for_model
from viper.report import views
from viper.report.checks import predictive_check
from viper.report.metrics import (
    CalibrationVerdict,
    Scores,
    calibration,
    calibration_loss,
    entropy,
    judge_calibration,
    row_scores,
    scores,
)
from viper.report.shares import named_groups
from viper.report.views import AverageEffects, Effect, Grid

if TYPE_CHECKING:
    import pandas

MOST_EFFECTS = 24  # partial effects drawn
MOST_COEFFICIENTS = 40  # coefficients listed
MOST_UNCERTAIN = 60  # rows in the table of the least certain ones
MOST_GROUPINGS = 3  # columns by which rows are grouped, unless others are asked for
MOST_BENT = 2  # columns whose residuals are drawn
FEWEST_BENT_VALUES = 10  # different values of such a column
BENT_P_VALUE = 0.05  # for all columns together
MOST_LEFT_OUT = 2_000  # rows for leave-one-out, which takes a second per thousand
MOST_MARKS = 240  # rows in a chart of rows
FEWEST_MARKS = 10  # rows of each class in such a chart; up to four times as many are added from a rarer class
CURVE_POINTS = 41  # points of a partial effect
DIAGNOSIS_BUDGET = 100_000_000  # rows × draws that a diagnosis may take
BARE_LABELS = {"0", "1", "-1", "2", "yes", "no", "y", "n", "true", "false", "t", "f"}
SPATIAL = [  # names of columns that hold coordinates
    *[("longitude", "latitude"), ("lon", "lat"), ("long", "lat"), ("lng", "lat")],
    *[("easting", "northing"), ("x", "y"), ("x_coord", "y_coord")],
]


class HeldOutScores(NamedTuple):
    """Scores on rows that the model had not seen, as `viper fit` recorded them; skill is against the base rate."""

    how: str
    log_score: float
    brier: float
    auc: float | None
    base_rate: float

    @property
    def log_skill(self) -> float:
        return 1.0 + self.log_score / entropy(self.base_rate)


class Coefficient(NamedTuple):
    """The change of the log-odds when one column changes by `unit`, given in words."""

    name: str
    unit: str
    mean: float
    lower: float
    upper: float
    direction: float  # probability that the sign is that of the mean

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.lower > 0 or self.upper < 0


@dataclass(frozen=True)
class Study:
    """A model, labelled rows, and everything worth reporting about the two, computed on first use."""

    model: Any
    frame: "pandas.DataFrame"  # the model's columns, untransformed; one row per label
    label: np.ndarray  # whether a row belongs to the second class
    target: str
    spatial: tuple[str, str] | None = None
    level: float = 0.95
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> number of rows
    held_out: bool = False  # whether the caller says that the model has not seen these rows
    names: list[str] = field(default_factory=list)  # row names: numbers, or values of the column `naming`
    naming: str = "Row"
    show_rows: bool = True  # whether single rows may be shown
    by: dict[str, Any] = field(default_factory=dict)  # columns by which the caller wants groups of rows

    @property
    def bare(self) -> bool:
        """Whether the labels, such as yes and no, mean nothing without the target's name."""
        return all(str(label).lower().removesuffix(".0") in BARE_LABELS for label in self.model.classes_)

    @property
    def class_names(self) -> tuple[str, str]:
        """The two classes; bare labels with the target's name."""
        first, second = (f"{self.target} = {label}" if self.bare else str(label) for label in self.model.classes_)
        return first, second

    def predicate(self, have: str, k: int = 1) -> str:
        """'had the outcome “malignant”', but 'had died = yes': right whether a class is a noun, a verb or neither."""
        name = self.class_names[k]
        return f"{have} {name}" if self.bare else f"{have} the outcome “{name}”"

    @property
    def negative(self) -> str:
        return self.class_names[0]

    @property
    def positive(self) -> str:
        return self.class_names[1]

    @property
    def predicted(self) -> str:
        """What the model predicts, in words."""
        return f"the probability of {self.positive}, against {self.negative}"

    @property
    def level_name(self) -> str:
        return f"{100 * self.level:g}\N{NARROW NO-BREAK SPACE}%"

    @property
    def columns(self) -> "pandas.DataFrame":
        """The rows, without columns that only say which group they belong to."""
        return self.frame[views.ungrouped_columns(self.model, self.frame)]

    @cached_property
    def dates(self) -> set[str]:
        """The columns of dates, which `frame` holds as days since 1970-01-01."""
        return views.dates_of(self.model)

    @property
    def X(self) -> Any:
        return views.as_fitted(self.model, self.frame)

    @cached_property
    def facts(self) -> ModelFacts:
        return model_facts(self.model)

    @property
    def is_gp(self) -> bool:
        return self.facts.kind == "gp"

    @property
    def grouped(self) -> bool:
        """Whether there are effects of groups."""
        return hasattr(self.model, "factors_")

    @cached_property
    def predictions(self) -> Predictions:
        return predictions(self.model, self.X, self.level)

    @cached_property
    def calibration(self) -> "pandas.DataFrame":
        return calibration(self.label, self.predictions.probability, level=self.level)

    @cached_property
    def scores(self) -> Scores:
        return scores(self.label, self.predictions.probability)

    @cached_property
    def calibration_verdict(self) -> CalibrationVerdict:
        probability = self.predictions.probability
        if self.grouped and self.from_training and self.loo is not None:
            # effects of groups follow the rows of the fit, so each row is predicted from all the others
            right = np.exp(self.loo.pointwise)
            probability = np.where(self.label, right, 1.0 - right)
        return judge_calibration(self.label, probability)

    @cached_property
    def gain(self) -> tuple[float, float]:
        """Mean log score less that of predicting the base rate for every row, and the standard error of this mean."""
        base = np.full(len(self.label), self.base_rate)
        difference = row_scores(self.label, self.predictions.probability) - row_scores(self.label, base)
        return float(difference.mean()), float(difference.std()) / math.sqrt(len(difference))

    @cached_property
    def roc(self) -> tuple[np.ndarray, np.ndarray]:
        """False and true positive rates, from the highest threshold to the lowest."""
        from sklearn.metrics import roc_curve

        false, true, _ = roc_curve(self.label, self.predictions.probability)
        return false, true

    @property
    def base_rate(self) -> float:
        """The share of rows of the second class."""
        return float(self.label.mean())

    @cached_property
    def drift(self) -> list[ColumnDrift]:
        """How each column differs from the rows of the fit, the most different first; empty if these are those rows."""
        if self.training is None or self.from_training:
            return []
        return column_drift(self.model.formula_, self.frame)

    @property
    def drifted(self) -> list[ColumnDrift]:
        """The columns that differ much from the rows of the fit, and not by chance."""
        return [found for found in self.drift if found.moved]

    @cached_property
    def filled(self) -> dict[str, float]:
        """Share of missing values by column, where they are filled in."""
        shares = self.columns.isna().mean()
        return {str(name): float(share) for name, share in shares.items() if share > 0}

    @cached_property
    def cross_validated(self) -> HeldOutScores | None:
        """Scores that `viper fit` found on held-out rows, if any."""
        found, counts = self.record.get("scores"), self.class_counts
        if not isinstance(found, dict) or counts is None:
            return None
        if not {"how", "log_score", "brier", "auc"} <= set(found):
            return None
        positive = counts.get(str(self.model.classes_[1]))
        if positive is None:
            return None
        share = positive / max(1, sum(counts.values()))
        return HeldOutScores(found["how"], found["log_score"], found["brier"], found["auc"], share)

    @property
    def honest_scores(self) -> tuple[Scores | HeldOutScores, str]:
        """The scores to quote, and their source: if known, those of held-out rows, because rows of the fit flatter."""
        honest = self.cross_validated if self.from_training else None
        return (self.scores, "") if honest is None else (honest, f"in {honest.how}")

    @property
    def training(self) -> TrainingData | None:
        """What the model has recorded of the rows of the fit."""
        return getattr(getattr(self.model, "formula_", None), "training", None)

    @property
    def class_counts(self) -> dict[str, int] | None:
        """Rows of the fit by class, if the model has recorded them."""
        if self.training is not None:
            return self.training.class_counts
        found: dict[str, int] | None = self.record.get("data", {}).get("class_counts")  # files of version 0.1
        return found

    @property
    def record(self) -> dict[str, Any]:
        """What `viper fit` stored with the model."""
        return getattr(getattr(self.model, "formula_", None), "record", {})

    @cached_property
    def effects(self) -> list[Effect]:
        """Partial effects, the largest first."""
        found = views.column_effects(self.model, self.frame, self.level, CURVE_POINTS)
        return sorted(found, key=lambda effect: -effect.size)

    @cached_property
    def terms(self) -> list[Any]:
        """Effects of columns and pairs of an additive Gaussian process; empty for other models."""
        additive = self.is_gp and "term_sd" in self.model.summary()
        return self.model.term_effects(self.X, points=CURVE_POINTS, level=self.level) if additive else []

    @cached_property
    def average_effects(self) -> AverageEffects:
        return views.average_effects(self.model, self.frame, self.level)

    @cached_property
    def coefficients(self) -> list[Coefficient] | None:
        """Coefficients for changes of about one standard deviation, those with the surest direction first."""
        if self.is_gp:
            return None
        table = self.model.summary(self.level).drop(index="intercept", errors="ignore").dropna()  # no components
        found = []
        for name, row in table.iterrows():
            label, step, unit = self._changes.get(str(name), (str(name), 1.0, "+1"))
            mean, lower, upper = (step * float(row[key]) for key in ("mean", "lower", "upper"))
            found.append(Coefficient(label, unit, mean, lower, upper, float(row["p_direction"])))
        return sorted(found, key=lambda c: (-c.direction, -abs(c.mean)))

    @cached_property
    def _changes(self) -> dict[str, tuple[str, float, str]]:
        """Per column of X: its name for readers, the change to report, and that change in words.

        The change is one standard deviation, rounded; or 1 if the values are 0 and 1, or if one sd is about 1.
        """
        encoding = getattr(self.model, "formula_", None)
        X = self.frame if encoding is None else encoding.encode(self.frame)
        scales = {} if encoding is None else dict(zip(encoding.names, encoding.scale, strict=True))
        levels = {} if encoding is None else encoding.levels | encoding.calendar_levels
        return {
            name: coefficient_change(
                name, X.iloc[:, j].to_numpy(dtype=float), scales.get(name, 1.0), levels, self.frame.columns
            )
            for j, name in enumerate(map(str, X.columns))
        }

    @property
    def entangled(self) -> list[str]:
        """Columns of a logistic regression that no single coefficient describes, as in interactions and splines."""
        encoding = getattr(self.model, "formula_", None)
        return [] if self.is_gp or encoding is None else encoding.entangled

    @cached_property
    def from_training(self) -> bool:
        """Whether these are certainly the rows of the fit: their ELBO, without weights and offsets, is the model's."""
        return was_fitted_to(self.model, self.X, self.model.classes_[self.label.astype(int)])

    @cached_property
    def groupings(self) -> dict[str, Any]:
        """The columns to group rows by: those asked for, or the categories, then columns of the largest effects."""
        if self.by:
            return self.by
        columns = {str(name): self.frame.iloc[:, j] for j, name in enumerate(self.frame.columns)}
        columns |= {name: as_dates(columns[name]) for name in self.dates}
        categories = [
            name for name, x in columns.items() if name not in self.dates and views.is_category(x) and x.nunique() > 1
        ]
        numeric = [e.name for e in self.effects if e.name in columns and e.name not in categories]
        return {name: columns[name] for name in [*categories[:MOST_GROUPINGS], *numeric][:MOST_GROUPINGS]}

    @cached_property
    def bent_columns(self) -> list[str]:
        """Numeric columns along which the model is clearly off, the worst first."""
        found = {}
        for name in self.columns.columns:
            if not views.is_category(self.columns[name]) and self.columns[name].nunique() > FEWEST_BENT_VALUES:
                place = named_groups(self.columns[name], 10).place
                verdict = calibration_loss(self.label, self.predictions.probability, place)
                if verdict.verdict in ("fair", "poor") and verdict.p_value < BENT_P_VALUE / len(self.columns.columns):
                    found[str(name)] = verdict.loss
        return sorted(found, key=lambda name: -found[name])[:MOST_BENT]

    @cached_property
    def predictive(self) -> "pandas.DataFrame":
        """Statistics of the outcomes against outcomes drawn from the posterior."""
        return predictive_check(self.model, self.X, self.model.classes_[self.label.astype(int)], level=self.level)

    @cached_property
    def loo(self) -> LeaveOneOut | None:
        """Leave-one-out of the rows of the fit, if they are not too many."""
        if len(self.label) > MOST_LEFT_OUT or not self.from_training:
            return None
        return self.model.loo(self.X, self.model.classes_[self.label.astype(int)], draws=1000)

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """k̂ and the rest, as recorded by `viper fit`, otherwise from the rows of the fit if they are available."""
        if (found := recorded_diagnosis(self.model)) is not None:
            return found
        if self.draws >= 100 and not getattr(self.model, "robust_groups_", 0):
            if self.from_training:
                return self.model.diagnose(self.X, self.model.classes_[self.label.astype(int)], draws=self.draws)
            if getattr(self.model, "_grouped_rows" if self.grouped else "_training_rows", None) is not None:
                return self.model.diagnose(draws=self.draws)
        return None

    @property
    def draws(self) -> int:
        return min(4000, DIAGNOSIS_BUDGET // max(len(self.label), 1))

    @property
    def no_diagnosis(self) -> str:
        """Why there is no diagnosis."""
        if self.draws < 100:
            return f"How far it is from the exact posterior was not measured: {len(self.label):,} rows would take long."
        if getattr(self.model, "robust_groups_", 0):
            return (
                "Its intervals are robust ones, estimated from how the rows vary, so there is no posterior to compare "
                "them with."
            )
        return (
            "How far it is from the exact posterior can only be measured with the rows of the fit, and these are other "
            "rows. A report on the rows of the fit says it."
        )

    @cached_property
    def uncertain(self) -> np.ndarray:
        """The rows with the widest intervals, the widest first."""
        return np.argsort(-self.predictions.width, kind="stable")[:MOST_UNCERTAIN]

    @cached_property
    def sampled(self) -> np.ndarray:
        """At most `MOST_MARKS` rows, evenly spaced in order of their log-odds, and extra ones of a rare class."""
        order = np.argsort(self.predictions.latent, kind="stable")
        even = order[views.spaced_indices(len(order), MOST_MARKS)]
        rare = order[self.label[order] == (self.base_rate < 0.5)]
        if len(even) == len(order) or (self.label[even] == (self.base_rate < 0.5)).sum() >= FEWEST_MARKS:
            return even
        added = rare[views.spaced_indices(len(rare), 4 * FEWEST_MARKS)] if len(rare) else rare
        shown = np.zeros(len(order), dtype=bool)
        shown[even] = shown[added] = True
        return order[shown[order]]

    @cached_property
    def map(self) -> Grid | None:
        columns = self.spatial or spatial_columns(self.columns, self.is_gp)
        return None if columns is None else views.probability_grid(self.model, self.frame, columns, size=40)


def was_fitted_to(model: Any, X: Any, labels: "np.ndarray") -> bool:
    """Return whether these are certainly the rows of the fit: their ELBO, without weights and offsets, is the model's.

    A row more or less would change it.
    """
    training = getattr(getattr(model, "formula_", None), "training", None)
    if training is not None and training.rows_used != len(labels):
        return False
    return math.isclose(model.elbo(X, labels), model.elbo_, rel_tol=1e-6, abs_tol=1e-6)


def recorded_diagnosis(model: Any) -> Diagnosis | None:
    """The diagnosis that `viper fit` stored with the model, if any."""
    kept = getattr(getattr(model, "formula_", None), "record", {}).get("diagnosis")
    names = ("threshold", "draws", "effective_sample_size", "log_evidence", "log_evidence_error")
    if not isinstance(kept, dict) or not {"k_hat", *names} <= set(kept):
        return None
    k_hat = -math.inf if kept["k_hat"] is None else kept["k_hat"]  # q is exact; JSON has no -∞
    numbers = {name: kept[name] for name in names} | {"residual_cost": kept.get("residual_cost")}
    numbers |= {"elbo": kept.get("elbo", model.elbo_), "components": count_gaussians(model.posterior_)}
    return Diagnosis(k_hat, **numbers, covariance=model.covariance)


def coefficient_change(
    name: str, values: np.ndarray, scale: float, levels: dict[str, list[Any]], plain: Collection[str] = ()
) -> tuple[str, float, str]:
    """The name of a column of X for readers, the change to report, and that change in words.

    `plain` are names of columns in the data, which are kept.
    """
    parts = [name] if name in plain else re.split(r":(?![^\[]*\])", name)
    found = [level_of(part, levels) for part in parts]
    name = " × ".join(
        part if m is None else f"{spoken_name(m[0])}: {m[1]}" for part, m in zip(parts, found, strict=True)
    )
    if None not in found:
        first = found[0]
        return name, 1.0, f"instead of {levels[first[0]][0]}" if first and len(parts) == 1 else "together"
    sd = float(values.std())
    if np.isin(values, (0.0, 1.0)).all():
        return name, 1.0, "0 → 1"
    days = " days" if re.fullmatch(r"days\(.+\)", name) else ""
    if scale != 1.0 or sd == 0.0 or 0.8 < sd < 1.25:
        return name, 1.0, f"+{number_text(float(f'{scale:.3g}'))}{days}"
    step = float(f"{sd:.2g}")
    return name, step, f"+{number_text(step)}{days}"


def level_of(part: str, levels: Collection[str]) -> tuple[str, str] | None:
    """The category and the level of ward[T.b], C(ward)[T.b] or month(seen)[T.Feb]; None for anything else."""
    found = re.fullmatch(r"(.+?)\[T\.(.*)\]", part)
    if found is None:
        return None
    inside = re.fullmatch(r"C\((.+?)(?:, .*)?\)", found[1])
    name = inside[1] if inside else found[1]
    return (name, found[2]) if name in levels else None


def spoken_name(category: str) -> str:
    """'month of seen' for month(seen); other names unchanged."""
    return re.sub(r"^(month|weekday)\((.+)\)$", r"\1 of \2", category)


def spatial_columns(frame: "pandas.DataFrame", is_gp: bool) -> tuple[str, str] | None:
    """Two columns with names of coordinates, or the only two columns of a Gaussian process."""
    numeric = [name for name in frame.columns if not views.is_category(frame[name])]
    known = {str(name).lower().strip(): name for name in numeric}
    for first, second in SPATIAL:
        if first in known and second in known:
            return known[first], known[second]
    return (numeric[0], numeric[1]) if is_gp and frame.shape[1] == len(numeric) == 2 else None


def read_study(
    model: Any,
    data: Any,
    target: str,
    spatial: tuple[str, str] | None = None,
    held_out: bool = False,
    row_labels: str | None = None,
    rows: bool = True,
    by: Iterable[str] | None = None,
    kind: type[Study] = Study,
) -> Study:
    """Check model, rows and target, and leave out rows with missing values."""
    import pandas
    from sklearn.utils.validation import check_is_fitted

    check_model(model)
    check_is_fitted(model, "posterior_")
    if not isinstance(data, pandas.DataFrame):
        raise TypeError(f"data must be a pandas DataFrame that includes the target; got {type(data)}.")
    if target not in data.columns:
        raise ValueError(f"target must be a column of data; got {target!r}. Its columns are {listed(data.columns)}.")
    frame = model_columns(model, data, target)
    names = row_names(data, row_labels, rows)
    if absent := [name for name in by or () if name not in data.columns]:
        raise ValueError(f"by must name columns of data; got {listed(absent)}. It has {listed(data.columns)}.")
    reasons = left_out_reasons(model, data, frame, target)
    kept = np.array([reason is None for reason in reasons], dtype=bool)
    if (encoding := getattr(model, "formula_", None)) is not None:
        frame = columns_as_read(encoding, frame)
    left_out = dict(Counter(reason for reason in reasons if reason is not None).most_common())
    if not kept.any():
        raise ValueError(f"data must have rows without missing values; got none ({left_out or 'it is empty'}).")
    labels = data[target].to_numpy()[kept]
    if len(model.classes_) > 2:
        numbers = pandas.Index(model.classes_).get_indexer(labels)
        if (numbers < 0).any():
            got = labels[int((numbers < 0).argmax())]
            raise ValueError(f"{target} must hold the classes of the model, {listed(model.classes_)}; got {got!r}.")
    else:
        numbers = read_labels(labels, int(kept.sum()), model.classes_)[1].numpy()
    return kind(
        model,
        frame[kept],
        numbers,
        str(target),
        spatial,
        left_out=left_out,
        held_out=held_out,
        names=[name for name, keep in zip(names, kept, strict=True) if keep],
        naming=row_labels or "Row",
        show_rows=rows,
        by={str(name): data[name][kept] for name in by or ()},
    )


def left_out_reasons(model: Any, data: "pandas.DataFrame", frame: "pandas.DataFrame", target: str) -> list[str | None]:
    """Why each row cannot be predicted or judged; None if it can."""
    reasons = np.full(len(data), None, dtype=object)
    if getattr(model, "formula_", None) is None:
        reasons[frame.isna().any(axis=1).to_numpy()] = "with other values missing"
    else:
        for remark in reversed([remark for remark in screen_for_model(model, frame).remarks if remark.fatal]):
            missing = remark.kind == "missing"
            reasons[remark.rows] = (
                "with other values missing" if missing else f"with {remark.column} {FATAL[remark.kind]}"
            )
    reasons[data[target].isna().to_numpy()] = f"without {target}"
    return reasons.tolist()


def row_names(data: "pandas.DataFrame", column: str | None, shown: bool) -> list[str]:
    """What the rows are called: the values of a column, or by default their numbers in the table, from 1."""
    if column is None:
        return [str(k) for k in range(1, len(data) + 1)]
    if not shown:
        raise ValueError(f"row_labels must be left out where no rows are shown; got {column!r}. Choose one of the two.")
    if column not in data.columns:
        raise ValueError(f"row_labels must be a column of data; got {column!r}. It has {listed(data.columns)}.")
    return ["–" if missing else str(name) for name, missing in zip(data[column], data[column].isna(), strict=True)]


def model_columns(model: Any, data: "pandas.DataFrame", target: str) -> "pandas.DataFrame":
    """The columns of `data` that the model takes, untransformed but for dates, which become days since 1970."""
    if getattr(model, "formula_", None) is not None:
        wanted = list(model.formula_.raw_inputs)
    else:
        wanted = list(getattr(model, "feature_names_in_", data.columns.drop(target)))
    if missing := [name for name in wanted if name not in data.columns]:
        raise ValueError(f"data must have all columns of the model; got none named {listed(missing)}.")
    return with_days(data[wanted], getattr(getattr(model, "formula_", None), "date_functions", ()))
