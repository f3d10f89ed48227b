"""What a report tells, as numbers: one fitted model seen through one table of rows."""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from viper.data.checks import read_labels
from viper.errors import listed
from viper.inference.importance import Diagnosis
from viper.models.prediction import Predictions, check_model, predictions
from viper.report import views
from viper.report.metrics import Scores, scores
from viper.report.views import Effect, Grid, Reliability

if TYPE_CHECKING:
    import pandas

MOST_EFFECTS = 24  # partial effects drawn
MOST_COEFFICIENTS = 40  # coefficients listed
MOST_ROWS = 60  # rows in the table of the most uncertain
MOST_MARKS = 240  # rows in a picture of rows
CURVE_POINTS = 41
WEIGHING = 100_000_000  # rows times draws that a diagnosis may cost
MUTE = {"0", "1", "-1", "2", "yes", "no", "y", "n", "true", "false", "t", "f"}  # labels
HAVE = {"is": "has", "are": "have", "was": "had", "were": "had"}
SPATIAL = [  # names of columns that are coordinates
    *[("longitude", "latitude"), ("lon", "lat"), ("long", "lat"), ("lng", "lat")],
    *[("easting", "northing"), ("x", "y"), ("x_coord", "y_coord")],
]


class Coefficient(NamedTuple):
    """The change of the log-odds by a change of one column, in words `unit`."""

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
    """A model, rows with labels, and everything worth telling about the two; computed when first asked for."""

    model: Any
    frame: "pandas.DataFrame"  # raw columns, one row per label
    label: np.ndarray  # whether a row is of the second class
    target: str
    spatial: tuple[str, str] | None = None
    level: float = 0.95
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> rows
    held_out: bool = False  # as the caller says

    @property
    def mute(self) -> bool:
        """Whether the labels say little by themselves, as yes and no do."""
        return all(str(label).lower().removesuffix(".0") in MUTE for label in self.model.classes_)

    @property
    def names(self) -> tuple[str, str]:
        """The two classes; labels that say little by themselves with the target's name."""
        first, second = (f"{self.target} = {label}" if self.mute else str(label) for label in self.model.classes_)
        return first, second

    def which(self, verb: str, k: int = 1) -> str:
        """'were malignant', but 'had died = yes'."""
        return f"{HAVE[verb] if self.mute else verb} {self.names[k]}"

    @property
    def negative(self) -> str:
        return self.names[0]

    @property
    def positive(self) -> str:
        return self.names[1]

    @property
    def level_name(self) -> str:
        return f"{100 * self.level:g}\N{NARROW NO-BREAK SPACE}%"

    @property
    def X(self) -> Any:
        return views.as_fitted(self.model, self.frame)

    @property
    def is_gp(self) -> bool:
        return not hasattr(self.model, "coefficient_interval")

    @cached_property
    def seen(self) -> Predictions:
        return predictions(self.model, self.X, self.level)

    @cached_property
    def reliability(self) -> Reliability:
        return views.reliability(self.seen.probability, self.label, level=self.level)

    @cached_property
    def scores(self) -> Scores:
        return scores(self.label, self.seen.probability)

    @cached_property
    def effects(self) -> list[Effect]:
        """Partial effects, the largest first."""
        found = views.partial_effects(self.model, self.frame, self.level, CURVE_POINTS)
        return sorted(found, key=lambda effect: -effect.size)

    @cached_property
    def coefficients(self) -> list[Coefficient] | None:
        """Coefficients, the surest of direction first, for changes of about one standard deviation."""
        if self.is_gp:
            return None
        table = self.model.summary(self.level).drop(index="intercept", errors="ignore")
        found = []
        for name, row in table.iterrows():
            label, step, unit = self._changes.get(str(name), (str(name), 1.0, "+1"))
            mean, lower, upper = (step * float(row[key]) for key in ("mean", "lower", "upper"))
            found.append(Coefficient(label, unit, mean, lower, upper, float(row["p_direction"])))
        return sorted(found, key=lambda c: (-c.direction, -abs(c.mean)))

    @cached_property
    def _changes(self) -> dict[str, tuple[str, float, str]]:
        """By column of X, what to call it, the change to speak of, and that in words.

        One standard deviation, rounded to be read; one unit of what is 0 or 1, or has a standard deviation near 1.
        """
        encoding = getattr(self.model, "formula_", None)
        X = self.frame if encoding is None else encoding.encode(self.frame)
        scales = {} if encoding is None else dict(zip(encoding.names, encoding.scale, strict=True))
        levels = {} if encoding is None else encoding.levels
        return {
            name: change(name, X.iloc[:, j].to_numpy(dtype=float), scales.get(name, 1.0), levels)
            for j, name in enumerate(map(str, X.columns))
        }

    @cached_property
    def from_training(self) -> bool:
        """Whether these are surely the rows of the fit: their ELBO is the model's (without weights and offsets)."""
        elbo = self.model.elbo(self.X, self.model.classes_[self.label.astype(int)])
        return math.isclose(elbo, self.model.elbo_, rel_tol=1e-6, abs_tol=1e-6)

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """k̂ and company, from the rows of the fit if they are at hand, else as `viper fit` recorded them."""
        if not hasattr(self.model, "diagnose"):
            return None
        if self.draws >= 100:
            if self.from_training:
                return self.model.diagnose(self.X, self.model.classes_[self.label.astype(int)], draws=self.draws)
            if getattr(self.model, "_training_rows", None) is not None:
                return self.model.diagnose(draws=self.draws)
        return recorded_diagnosis(self.model)

    @property
    def draws(self) -> int:
        return min(4000, WEIGHING // max(len(self.label), 1))

    @property
    def no_diagnosis(self) -> str:
        """Why there is no k̂."""
        if not hasattr(self.model, "diagnose"):
            return "Of a Gaussian process, the distance from the exact posterior is not measured by k̂ here."
        if self.draws < 100:
            return f"{len(self.label):,} rows are too many to measure k̂ here; call model.diagnose()."
        return (
            "The distance from the exact posterior (k̂) needs the rows of the fit, and these rows are others. "
            "Make the report from the rows of the fit, or call model.diagnose()."
        )

    @cached_property
    def uncertain(self) -> np.ndarray:
        """The rows with the widest intervals, the widest first."""
        return np.argsort(-self.seen.width, kind="stable")[:MOST_ROWS]

    @cached_property
    def marked(self) -> np.ndarray:
        """Evenly spaced rows in the order of their log-odds, at most `MOST_MARKS`."""
        order = np.argsort(self.seen.latent, kind="stable")
        return order[np.unique(np.linspace(0, len(order) - 1, min(MOST_MARKS, len(order))).astype(int))]

    @cached_property
    def map(self) -> Grid | None:
        columns = self.spatial or spatial_columns(self.frame, self.is_gp)
        return None if columns is None else views.grid(self.model, self.frame, columns, size=40)


def recorded_diagnosis(model: Any) -> Diagnosis | None:
    """What `viper fit` found and stored with the model."""
    kept = getattr(getattr(model, "formula_", None), "record", {}).get("diagnosis")
    names = ("threshold", "draws", "effective_sample_size", "log_evidence", "log_evidence_error")
    if not isinstance(kept, dict) or not {"k_hat", *names} <= set(kept):
        return None
    k_hat = -math.inf if kept["k_hat"] is None else kept["k_hat"]  # q is exact; JSON has no -∞
    return Diagnosis(k_hat, **{name: kept[name] for name in names}, elbo=model.elbo_, covariance=model.covariance)


def change(name: str, values: np.ndarray, scale: float, levels: dict[str, list[Any]]) -> tuple[str, float, str]:
    """What to call a column of X, the change to speak of, and that in words."""
    level = re.fullmatch(r"(?:C\()?([^:]+?)(?:, .*?)?\)?\[T\.([^:]*)\]", name)
    if level and level[1] in levels:
        return f"{level[1]}: {level[2]}", 1.0, f"not {levels[level[1]][0]}"
    sd = float(values.std())
    if np.isin(values, (0.0, 1.0)).all():
        return name, 1.0, "0 → 1"
    if scale != 1.0 or sd == 0.0 or 0.8 < sd < 1.25:
        return name, 1.0, f"+{scale:.3g}"
    step = float(f"{sd:.2g}")
    return name, step, f"+{step:,g}"


def spatial_columns(frame: "pandas.DataFrame", is_gp: bool) -> tuple[str, str] | None:
    """Two columns that are coordinates by name, or the only two of a Gaussian process."""
    numeric = [name for name in frame.columns if not views.is_category(frame[name])]
    known = {str(name).lower().strip(): name for name in numeric}
    for first, second in SPATIAL:
        if first in known and second in known:
            return known[first], known[second]
    return (numeric[0], numeric[1]) if is_gp and frame.shape[1] == len(numeric) == 2 else None


def read(model: Any, data: Any, target: str, spatial: tuple[str, str] | None = None, held_out: bool = False) -> Study:
    """Check model, rows and target, and put rows with missing values aside."""
    import pandas
    from sklearn.utils.validation import check_is_fitted

    check_model(model)
    check_is_fitted(model, "posterior_")
    if not isinstance(data, pandas.DataFrame):
        raise TypeError(f"data must be pandas' DataFrame and hold the target too; got {type(data)}.")
    if target not in data.columns:
        raise ValueError(f"target must be a column of data; got {target!r}. There are {listed(data.columns)}.")
    frame = inputs(model, data, target)
    blank = data[target].isna().to_numpy()
    filled = getattr(getattr(model, "formula_", None), "missing", None) == "mean"
    partial = ~blank & (not filled) & frame.isna().any(axis=1).to_numpy()
    counts = {f"without {target}": int(blank.sum()), "with other values missing": int(partial.sum())}
    left_out = {reason: rows for reason, rows in counts.items() if rows}
    data, frame = data[~(blank | partial)], frame[~(blank | partial)]
    if not len(data):
        raise ValueError(f"data must have rows with all values; got none ({left_out or 'it is empty'}).")
    _, label = read_labels(data[target].to_numpy(), len(data), model.classes_)
    names = row_names(data.drop(columns=[target, *frame.columns]))
    if names is not None:
        frame = frame.set_axis(names)
    return Study(model, frame, label.numpy(), str(target), spatial, left_out=left_out, held_out=held_out)


def row_names(unused: "pandas.DataFrame") -> Any:
    """The first column of text or whole numbers that tells all rows apart, as an index; None if there is none."""
    import pandas
    import pandas.api.types as types

    for name, column in unused.items():
        named = types.is_string_dtype(column) or types.is_integer_dtype(column)
        if named and column.notna().all() and column.is_unique:
            return pandas.Index(column, name=name)
    return None


def inputs(model: Any, data: "pandas.DataFrame", target: str) -> "pandas.DataFrame":
    """The raw columns that the model takes."""
    if getattr(model, "formula_", None) is not None:
        wanted = list(model.formula_.inputs)
    else:
        wanted = list(getattr(model, "feature_names_in_", data.columns.drop(target)))
    if missing := [name for name in wanted if name not in data.columns]:
        raise ValueError(f"data must have the model's columns; got none named {listed(missing)}.")
    return data[wanted]
