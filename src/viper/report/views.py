"""The numbers behind plots and the report: unusual rows, partial effects, maps, convergence, errors of bounds.

X holds untransformed columns: whatever the model's `predict_latent` takes, a DataFrame with its names or a plain array.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.errors import instead, listed
from viper.formula.columns import calendar_days, levels_of, with_days
from viper.models.effects import grouping_columns
from viper.models.prediction import Predictions, check_model, predict_each_row, predictions
from viper.softplus.expectation import expected_softplus

if TYPE_CHECKING:
    import pandas

FEW_VALUES = 6  # a numeric column with at most this many distinct values is shown value by value
MOST_CATEGORIES = 12  # categories of a column that are shown
AVERAGED_ROWS = (4_000, 20_000)  # fewest and most rows over which average effects are taken, of tables that have more
DRAWN_PROBABILITIES = 300_000_000  # drawn for all average effects together, which takes some seconds
DRAW_RANGE = (400, 4000)  # fewest and most draws of an average effect
MOST_DISTANCES = 20_000  # rows among which a row's distance from the mean is ranked
MOST_CELLS = 4_000_000  # rows × columns that are predicted at a time
MOST_COMBINED = 300  # columns; with more, their correlations are ignored
RARE = 0.1  # a probability below which differences show only as ratios
WIGGLE = 0.1  # share of a curve's range; smaller turns are not mentioned
DATE_STEPS = [  # between ticks: unit, number of them, how a tick is written
    *[("D", step, "%Y-%m-%d") for step in (1, 2, 7, 14)],
    *[("M", step, "%b %Y") for step in (1, 2, 3, 6)],
    *[("Y", step, "%Y") for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)],
]
TAIL = 0.01  # share of a column's values left out at each end of its curve


# --- columns ---


def frame_of(X: Any) -> "pandas.DataFrame":
    """X as a DataFrame; the columns of an array are named x0, x1, ..."""
    import pandas

    if isinstance(X, pandas.DataFrame):
        return X
    array = np.asarray(X.todense() if hasattr(X, "todense") else X)
    if array.ndim != 2:
        raise ValueError(f"X must have two dimensions; got {array.ndim}. Pass rows by columns.")
    return pandas.DataFrame(array, columns=[f"x{j}" for j in range(array.shape[1])])


def as_fitted(model: Any, frame: "pandas.DataFrame") -> Any:
    """The columns in the form the model was fitted to: a DataFrame, or a plain array."""
    named = getattr(model, "formula_", None) is not None or hasattr(model, "feature_names_in_")
    return frame if named else frame.to_numpy()


def dates_of(model: Any) -> set[str]:
    """The columns that the model reads as dates."""
    return set(getattr(getattr(model, "formula_", None), "date_functions", ()))


def date_ticks(low: float, high: float, count: int = 6) -> list[tuple[float, str]]:
    """About `count` days between two days since 1970, at the start of years or months if there is room for these."""
    first, last = (calendar_days(day) for day in (low, high))
    for unit, step, shape in DATE_STEPS:
        start, end = (int(day.astype(f"datetime64[{unit}]").astype(int)) for day in (first, last))
        places = np.arange(start - start % step, end + 1, step).astype(f"datetime64[{unit}]")
        days = [day for day in places.astype("datetime64[D]") if first <= day <= last]
        if len(days) <= count:
            return [(float(day.astype(int)), f"{day.item():{shape}}") for day in days]
    return []


def is_category(column: "pandas.Series") -> bool:
    import pandas.api.types as types

    return types.is_bool_dtype(column) or not types.is_numeric_dtype(column)


def ungrouped_columns(model: Any, frame: "pandas.DataFrame") -> list[Any]:
    """The columns of a table, without those that only say which group a row belongs to."""
    grouping = {*grouping_columns(model)} - {*getattr(getattr(model, "formula_", None), "inputs", ())}
    return [name for name in frame.columns if str(name) not in grouping]


def typical_row(frame: "pandas.DataFrame") -> "pandas.DataFrame":
    """One row of values that occur: the median of a numeric column, the most frequent value of any other."""
    import pandas

    def middle(values: "pandas.Series") -> "pandas.Series":
        known = values.dropna()
        if len(known) == 0:
            raise ValueError(f"a column must have values; got none in {values.name!r}. Drop it.")
        value = known.mode().iloc[0] if is_category(values) else known.quantile(0.5, interpolation="lower")
        return pandas.Series([value], dtype=values.dtype)

    return pandas.DataFrame({name: middle(frame[name]) for name in frame.columns})


def spaced_indices(count: int, most: int) -> np.ndarray:
    """Indices of at most `most` of `count` items, evenly spaced and including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).astype(int))


def repeat_row(row: "pandas.DataFrame", count: int) -> "pandas.DataFrame":
    return row.iloc[np.zeros(count, dtype=int)].reset_index(drop=True)


class Outlyingness:
    """How far rows lie from the rest: in single numeric columns, and in the combination of all of them."""

    def __init__(self, frame: "pandas.DataFrame") -> None:
        self.columns = frame[[name for name in frame.columns if not is_category(frame[name])]]
        self.names = [str(name) for name in self.columns]
        moments = [mean_and_spread(self.columns.iloc[:, j].to_numpy(dtype=float)) for j in range(len(self.names))]
        self.mean, self.sd = np.array(moments).reshape(-1, 2).T

    def z(self, rows: Any) -> np.ndarray:
        """Values of some rows in standard deviations from the mean; missing ones count as the mean."""
        return np.nan_to_num((self.columns.iloc[rows].to_numpy(dtype=float) - self.mean) / self.sd)

    def extremes(self, row: int, count: int = 3) -> list[tuple[str, float, float]]:
        """(column, value, z) of the columns in which a row lies furthest from the mean; z is in standard deviations."""
        (z,) = self.z([row])
        order = np.argsort(-np.abs(z), kind="stable")[:count]
        return [(self.names[j], float(self.columns.iloc[row, j]), float(z[j])) for j in order]

    def rarity(self, row: int) -> float:
        """The share of rows nearer to the mean in Mahalanobis distance; zero if there are too many columns."""
        if not 0 < len(self.names) <= MOST_COMBINED:
            return 0.0
        inverse, distances = self._distances
        (z,) = self.z([row])
        return float(np.searchsorted(distances, (1 - 1e-12) * (z @ inverse @ z)) / len(distances))

    @cached_property
    def _distances(self) -> tuple[np.ndarray, np.ndarray]:
        """The inverse of Σ zzᵀ over evenly spaced rows, and their zᵀ(...)z in order."""
        z = self.z(spaced_indices(len(self.columns), MOST_DISTANCES))
        inverse = np.linalg.pinv(z.T @ z, hermitian=True)
        return inverse, np.sort(((z @ inverse) * z).sum(1))


def mean_and_spread(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of the observed values; a standard deviation of 0 counts as 1."""
    known = values[~np.isnan(values)]
    return (float(known.mean()), float(known.std()) or 1.0) if len(known) else (0.0, 1.0)


# --- partial effects ---


class Effect(NamedTuple):
    """The prediction along one column, with all others at typical values."""

    name: str
    values: np.ndarray  # numbers, or categories
    curve: bool  # whether values between the given ones make sense
    predictions: Predictions
    dated: bool = False  # whether the values are days since 1970-01-01

    @property
    def size(self) -> float:
        """Range of the mean log-odds."""
        return float(np.ptp(self.predictions.latent))

    @property
    def turns(self) -> list[int]:
        """Both ends of a curve, and between them where it turns by more than a small part of its range.

        If all probabilities are small, or all large, this is the range of the log-odds, where they can be told apart.
        """
        p = np.clip(self.predictions.probability, 1e-300, 1.0 - 1e-16)
        return turning_points(np.log(p / (1.0 - p)) if p.max() < RARE or p.min() > 1.0 - RARE else p)


def turning_points(curve: np.ndarray) -> list[int]:
    """Indices of the first point, of each turn by more than `WIGGLE` of the range, and of the last point."""
    least = WIGGLE * float(np.ptp(curve))
    found, best, rising = [0], 0, None
    for k in range(1, len(curve)):
        if rising is None and abs(curve[k] - curve[0]) > least:
            rising, best = bool(curve[k] > curve[0]), k
        elif rising is not None and (curve[k] >= curve[best]) == rising:
            best = k
        elif rising is not None and abs(curve[k] - curve[best]) > least:
            found.append(best)
            rising, best = not rising, k
    last = len(curve) - 1
    return [*found, last] if last > found[-1] else found


def column_effect(model: Any, X: Any, feature: Any, level: float = 0.95, points: int = 61) -> Effect:
    """The prediction as `feature` varies and every other column stays at its median or most frequent value."""
    frame = frame_of(X)
    frame = with_days(frame, [name for name in dates_of(model) if name in frame])
    feature = f"x{feature}" if isinstance(feature, int) and feature not in frame.columns else feature
    if feature not in frame.columns:
        raise ValueError(f"feature must be a column of X; got {feature!r}. X has {listed(frame)}.")
    return effect_along(model, frame, feature, typical_row(frame), level, points)


def effect_along(
    model: Any, frame: "pandas.DataFrame", feature: Any, row: "pandas.DataFrame", level: float, points: int
) -> Effect:
    """The prediction as `feature` varies and every other column keeps its value in `row`."""
    return next(effects_along(model, frame, [feature], row, level, points))


def effects_along(
    model: Any, frame: "pandas.DataFrame", features: list[Any], row: "pandas.DataFrame", level: float, points: int
) -> Iterator[Effect]:
    """The same for several columns, predicted in one go."""
    import pandas

    known, dates = getattr(getattr(model, "formula_", None), "levels", {}), dates_of(model)
    places = [values_along(frame[feature], points, feature in known) for feature in features]
    places = [
        (observed_near(values, frame[feature]), curve) if feature in dates else (values, curve)
        for feature, (values, curve) in zip(features, places, strict=True)
    ]
    tables = []
    for feature, (values, _) in zip(features, places, strict=True):
        rows = repeat_row(row, len(values))
        rows[feature] = values
        tables.append(rows)
    found = predictions(model, as_fitted(model, pandas.concat(tables, ignore_index=True)), level)
    start = 0
    for feature, (values, curve) in zip(features, places, strict=True):
        here = slice(start, start + len(values))
        yield Effect(str(feature), np.asarray(values), curve, found.take(here), feature in dates)
        start = here.stop


def values_along(column: "pandas.Series", points: int, category: bool = False) -> tuple["pandas.Series", bool]:
    """At which values of a column to predict, and whether values between them make sense.

    The most frequent categories, in their order; all values of a numeric column with few; otherwise an even grid, of
    integers if all are.
    """
    import pandas

    known = column.dropna()
    if category or is_category(column):
        common = known[known.isin(known.value_counts().index[:MOST_CATEGORIES])]
        return pandas.Series(levels_of(common, MOST_CATEGORIES), dtype=column.dtype), False
    distinct = np.unique(known)
    if len(distinct) <= FEW_VALUES:
        return pandas.Series(distinct, dtype=column.dtype), False
    low, high = known.quantile([TAIL, 1.0 - TAIL])
    if low == high:
        low, high = distinct[0], distinct[-1]
    grid = np.linspace(float(low), float(high), points)
    if pandas.api.types.is_integer_dtype(column):
        return pandas.Series(np.unique(grid.round()).astype(np.int64), dtype=column.dtype), True
    return pandas.Series(grid), True


def observed_near(values: "pandas.Series", column: "pandas.Series") -> "pandas.Series":
    """The values of the column nearest to these: a date between them might lie in a month that the model lacks."""
    import pandas

    known = np.unique(column.dropna().to_numpy(dtype=float))
    place = np.searchsorted(0.5 * (known[1:] + known[:-1]), values.to_numpy(dtype=float))
    return pandas.Series(np.unique(known[place]))


def column_effects(model: Any, X: Any, level: float = 0.95, points: int = 61) -> Iterator[Effect]:
    """The partial effect of every column that changes the prediction."""
    frame = frame_of(X)
    row, features = typical_row(frame), ungrouped_columns(model, frame)
    step = max(1, MOST_CELLS // (points * max(1, len(features))))
    for start in range(0, len(features), step):
        some = effects_along(model, frame, features[start : start + step], row, level, points)
        yield from (effect for effect in some if effect.size > 0.0)


# --- average effects ---


class AverageEffect(NamedTuple):
    """By how much the average probability changes when one column changes in every row; `change` says how."""

    name: str
    change: str
    before: float
    after: float
    mean: float
    lower: float
    upper: float
    direction: float  # probability that the sign is that of the mean

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.lower > 0 or self.upper < 0


class AverageEffects(NamedTuple):
    """The average probability with its interval, the number of rows it is taken over, and what changes it."""

    probability: float
    lower: float
    upper: float
    rows: int
    effects: list[AverageEffect]  # the largest first


def average_effects(model: Any, frame: "pandas.DataFrame", level: float = 0.95) -> AverageEffects:
    """The average contrasts of all columns, over evenly spaced rows if there are many."""
    levels = getattr(getattr(model, "formula_", None), "levels", {})
    changes: dict[Any, Any] = {
        name: common_levels(frame[name], levels.get(name)) for name in ungrouped_columns(model, frame)
    }
    passes = sum(2 if change is None else len(change) for change in changes.values())
    most = int(np.clip(DRAWN_PROBABILITIES // (passes * DRAW_RANGE[0]), *AVERAGED_ROWS))
    some = frame.iloc[spaced_indices(len(frame), most)]
    draws = int(np.clip(DRAWN_PROBABILITIES // (passes * len(some)), *DRAW_RANGE))
    rows = as_fitted(model, some)
    if not hasattr(model, "formula_") and not hasattr(model, "feature_names_in_"):
        changes = dict(enumerate(changes.values()))
    average = model.average(rows, level=level, draws=draws).iloc[0]
    table = model.contrast(rows, changes, level=level, draws=draws)
    found = [
        AverageEffect(
            *(str(row["variable"]), change_in_words(row["contrast"], levels.get(row["variable"]))),
            *(float(row[name]) for name in ("before", "after", "estimate", "lower", "upper", "p_direction")),
        )
        for _, row in table.iterrows()
    ]
    order = sorted(found, key=lambda e: -abs(e.mean))
    probability, lower, upper = (float(average[name]) for name in ("estimate", "lower", "upper"))
    return AverageEffects(probability, lower, upper, len(some), order)


def common_levels(column: "pandas.Series", levels: list[Any] | None) -> list[Any] | None:
    """The reference and the most frequent other levels of a category with many; None for the default contrasts."""
    if levels is None or len(levels) <= MOST_CATEGORIES:
        return None
    frequent = column.astype(str).value_counts().index
    others = [level for level in frequent if level != str(levels[0]) and level in set(map(str, levels))]
    return [levels[0], *others[: MOST_CATEGORIES - 1]]


def change_in_words(contrast: str, levels: list[Any] | None) -> str:
    """'male instead of female', '1 instead of 0', '10 higher', '200 days later'."""
    if levels is not None:
        return f"{contrast.removesuffix(f' - {levels[0]}')} instead of {levels[0]}"
    if " - " in contrast:
        return contrast.replace(" - ", " instead of ")
    return f"{contrast.removeprefix('+')} {'later' if contrast.endswith(' days') else 'higher'}"


class Grid(NamedTuple):
    """Predictions on a grid of two columns, with all others at typical values; row i of a field belongs to `y[i]`."""

    names: tuple[str, str]
    x: np.ndarray
    y: np.ndarray
    probability: np.ndarray
    sd: np.ndarray


def probability_grid(
    model: Any, X: Any, columns: tuple[Any, Any] | None = None, size: int = 60, margin: float = 0.05
) -> Grid:
    """Mean and sd of the probability over the rectangle that two columns span, plus a margin around it.

    The grid ends where the model does: lines of it that a spline or a logarithm cannot reach are left out.
    """
    frame = frame_of(X)
    if columns is None:
        if frame.shape[1] != 2:
            raise ValueError(
                f"a map needs two columns; got {frame.shape[1]}. Name them: columns=({frame.columns[0]!r}, ...)."
            )
        columns = (frame.columns[0], frame.columns[1])
    ends: list[np.ndarray] = []
    for name in columns:
        if name not in frame.columns or is_category(frame[name]):
            raise ValueError(f"columns must be two numeric columns of X; got {name!r}. X has {listed(frame)}.")
        low, high = float(frame[name].min()), float(frame[name].max())
        reach = margin * (high - low) or 1.0
        ends.append(np.linspace(low - reach, high + reach, size))
    x, y = np.meshgrid(*ends)
    rows = repeat_row(typical_row(frame), size * size)
    rows[columns[0]], rows[columns[1]] = x.ravel(), y.ravel()
    seen = predict_each_row(model, as_fitted(model, rows)).table
    probability, sd = (seen[name].to_numpy(dtype=float).reshape(size, size) for name in ("probability", "sd"))
    across, along = (np.isfinite(probability).any(axis) for axis in (0, 1))
    if not across.any():
        raise ValueError(f"a map needs places that the model can predict; got none. {seen['note'].iloc[0]}.")
    kept = np.ix_(along, across)
    names = (str(columns[0]), str(columns[1]))
    return Grid(names, ends[0][across], ends[1][along], probability[kept], sd[kept])


class Trace(NamedTuple):
    """One number per iteration, which shrinks as the fit converges, and what it measures."""

    values: np.ndarray
    meaning: str


def convergence_trace(model: Any) -> Trace:
    """How far each step moved the posterior, or, if the solver does not measure that, how far it was from the end."""
    check_model(model)
    moves = np.array([step.move for step in model.history_], dtype=float)
    if np.isfinite(moves).all():
        return Trace(moves, "nats by which the step moved the posterior")
    below = model.objective_ - np.array([step.objective for step in model.history_], dtype=float)
    # the final objective itself is shown at the height of the step before it, not at log 0
    return Trace(np.maximum(below, below[below > 0].min(initial=1.0)), "nats below the final objective")


# method -> options of expected_softplus
SOFTPLUS_OPTIONS: dict[str, dict[str, Any]] = {
    "Jaakkola-Jordan": {"bound": "pg"},
    "Monte Carlo, 1,000 samples": {"bound": "mc", "samples": 1000, "random_state": 0},
    "VI-PER, l = 10": {"terms": 10},
    "VI-PER, fast path": {"tolerance": 1e-8},
    "VI-PER, exact limit": {},
}


def relative_errors(mean: Tensor, variance: Tensor) -> dict[str, Tensor]:
    """|η - E[log(1+e^X)]| / E[log(1+e^X)] of every method; the expectation is computed by brute force."""
    truth = softplus_by_brute_force(mean, variance)
    values = {name: expected_softplus(mean, variance, **options).value for name, options in SOFTPLUS_OPTIONS.items()}
    return {name: ((value - truth) / truth).abs() for name, value in values.items()}


def softplus_by_brute_force(mean: Tensor, variance: Tensor) -> Tensor:
    """E[log(1+e^X)] by the trapezoidal rule on 4,001 points, independent of everything else in the library."""
    z = torch.linspace(-12.0, 12.0, 4001, dtype=torch.float64)
    weights = torch.exp(-0.5 * z * z)
    x = mean[..., None] + variance.sqrt()[..., None] * z
    return torch.logaddexp(x, torch.zeros_like(x)) @ (weights / weights.sum())


# --- experiments ---


class ExperimentGrid(NamedTuple):
    """What an experiment knows over one input or two."""

    names: list[str]
    log: list[bool]
    x: np.ndarray
    y: np.ndarray | None
    estimate: Any
    asked: np.ndarray  # the answered points, in these inputs
    answers: np.ndarray
    title: str


def experiment_grid(made: Any, columns: Any, at: Any, level: float, size: int) -> ExperimentGrid:
    inputs = made.items
    labels = inputs.labels
    wanted = [columns] if isinstance(columns, str) else list(labels if columns is None else columns)
    if unknown := [name for name in wanted if name not in labels]:
        raise ValueError(f"columns must be inputs of the experiment; got {unknown[0]!r}. {instead(unknown[0], labels)}")
    if not 1 <= len(wanted) <= 2 or len(set(wanted)) < len(wanted):
        raise ValueError(f"columns must be one input or two; got {len(wanted)}. Choose among {listed(labels)}.")
    places = [labels.index(name) for name in wanted]
    if any(not hasattr(inputs.parts[j], "low") for j in places):
        raise ValueError(f"columns must be numbers; got choices among {listed(wanted)}. Set those by at=.")
    points, answers = answered_points(made)
    peak = made.goal in ("maximise", "minimise", "prefer")
    middle = inputs.read(made.best().x)[0] if peak else points[np.argsort(points.sum(1))[len(points) // 2]]
    for name, value in (at or {}).items():
        if name not in labels:
            raise ValueError(f"at must name inputs; got {name!r}. {instead(str(name), labels)}")
        middle[labels.index(name)] = inputs.parts[labels.index(name)].read(value, name)
    sides = [inputs.parts[j].numbers(np.linspace(0.0, 1.0, size)) for j in places]
    grid = np.stack(np.meshgrid(*sides), -1).reshape(-1, len(places))
    numbers = np.tile(middle, (len(grid), 1))
    numbers[:, places] = grid
    measured = "Expected measurement" if made.outcome == "real" else "Probability of a yes"
    what = "Utility" if made.goal == "prefer" else measured
    return ExperimentGrid(
        wanted,
        [inputs.parts[j].log for j in places],
        sides[0],
        sides[1] if len(sides) == 2 else None,
        made.estimate(inputs.values(numbers), level),
        points[:, places],
        answers,
        f"{what} after {len(made.answers[1])} answers",
    )


def answered_points(made: Any) -> tuple[np.ndarray, np.ndarray]:
    """Points as numbers, and their answers; of pairs both points, and 1 for the one that was preferred."""
    table, answers = made.answers
    if not len(answers):
        raise ValueError("an experiment needs answers to be shown; got none. Call tell.")
    numbers = made.inputs.read(table)
    if made.goal != "prefer":
        return numbers, answers
    return np.vstack(made.inputs.halves(numbers)), np.concatenate([answers, 1.0 - answers])
