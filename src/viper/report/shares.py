"""Labels and probabilities, checked; shares of rows with their credible intervals; rows cut into groups.

`label` is True for the rows of the second class; `probability` is the predicted probability of that class.
"""

import datetime
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from viper.formula.columns import as_dates, as_days, is_date, is_text, number_text, sorted_values, without_blanks

MOST_VALUES = 10  # different numbers that form groups of their own
NANOSECONDS_PER_DAY = 86_400_000_000_000
MOST_LEVELS = 20  # groups of a column of text


def checked_predictions(label: Any, probability: Any) -> tuple[np.ndarray, np.ndarray]:
    label, probability = np.asarray(label), np.asarray(probability, dtype=float)
    if label.dtype != bool or label.ndim != 1 or label.shape != probability.shape or not len(label):
        raise ValueError(
            "label must be True or False and probability a number, with one of each per row; got labels of type "
            f"{label.dtype} and shape {label.shape} and probabilities of shape {probability.shape}. "
            "Pass y == model.classes_[1]."
        )
    if not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ValueError(f"probability must lie in [0, 1]; got {probability.min():g} to {probability.max():g}.")
    return label, probability


def share_interval(count: Any, rows: Any, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the credible interval of a share, of which `count` of `rows` were seen, under Jeffreys' Beta(½, ½).

    It starts at 0 if none was seen, ends at 1 if all were, and is [0, 1] without rows.
    """
    from scipy.special import betaincinv

    count, rows = np.asarray(count, dtype=float), np.asarray(rows, dtype=float)
    tail = 0.5 * (1 - level)
    low, high = (betaincinv(count + 0.5, rows - count + 0.5, q) for q in (tail, 1 - tail))
    return np.where(count == 0, 0.0, low), np.where(count == rows, 1.0, high)


def equal_groups(values: Any, count: int, weight: np.ndarray | None = None) -> np.ndarray:
    """The number of each row's group, of `count` groups of equally many rows; equal values share a group.

    The groups are numbered without gaps, in the order of the values. With weights, rows are counted by them.
    """
    values = np.asarray(values, dtype=float)
    inner = np.linspace(0, 1, count + 1)[1:-1]
    edges = np.quantile(values, inner) if weight is None else counted_quantiles(values, weight, inner)
    return np.unique(np.searchsorted(edges, values), return_inverse=True)[1]


def counted_quantiles(values: np.ndarray, weight: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Quantiles by linear interpolation, as `numpy.quantile` computes them for rows repeated by their weights."""
    order = np.argsort(values, kind="stable")
    sorted_rows, last = values[order], np.cumsum(weight[order])
    position = shares * (last[-1] - 1.0)
    below, above = (
        sorted_rows[np.searchsorted(last, place, side="right").clip(max=len(values) - 1)]
        for place in (np.floor(position), np.floor(position) + 1.0)
    )
    return below + (position - np.floor(position)) * (above - below)


class Groups(NamedTuple):
    """Which group each row belongs to, and what the groups are called."""

    place: np.ndarray  # row -> index of its group
    names: list[str]


def named_groups(column: Any, count: int = 5) -> Groups:
    """Cut rows into groups by a column: its values, or `count` ranges of equally many rows if they are many numbers.

    The levels of a category keep their order. The rarest of more than 20 levels are one group, and so are missing
    values.
    """
    import pandas

    column = without_blanks(pandas.Series(column).reset_index(drop=True))
    if column.dtype.kind != "M" and is_date(column):
        column = as_dates(pandas.Series(as_days(column)))
    known, kind = column.notna().to_numpy(), column.dtype.kind
    place = np.full(len(column), -1)
    if kind in "iufM" and column.nunique() > max(MOST_VALUES, count):
        exact = column[known].to_numpy(dtype="datetime64[ns]" if kind == "M" else float)
        values = exact.astype("int64") if kind == "M" else exact
        edges = round_edges(values, count) if kind != "M" else date_edges(values, count)
        place[known] = np.unique(np.searchsorted(edges, values, side="right"), return_inverse=True)[1]
        shown = [short_value(pandas.Timestamp(int(edge)) if kind == "M" else edge) for edge in edges]
        between = [f"{low} to {high}" for low, high in itertools.pairwise(shown)]
        names = [f"below {shown[0]}", *between, f"{shown[-1]} or more"] if shown else ["all"]
    else:
        place[known], levels = pandas.factorize(column[known], sort=True)
        if kind == "O" and not isinstance(column.dtype, pandas.CategoricalDtype) and is_text(column):
            levels = pandas.Index(sorted_values(map(str, levels)), dtype=object)
            place[known] = levels.get_indexer(column[known].map(str))
        names = [short_value(level) for level in levels]
        if len(names) > MOST_LEVELS:
            place, names = with_rare_levels_joined(place, names)
    if not known.all():
        place[~known], names = len(names), [*names, "missing"]
    return Groups(place, names)


def round_edges(values: np.ndarray, count: int) -> np.ndarray:
    """Round numbers near the quantiles that cut rows into equal groups; none is below or above all values."""
    quantiles = np.unique(np.quantile(values, np.linspace(0, 1, count + 1)))
    gap = float(np.diff(quantiles).min())
    step = 10.0 ** (math.floor(math.log10(gap)) - 1)
    edges = np.unique(np.round(np.round(quantiles[1:-1] / step) * step, 12))
    return edges[(edges > values.min()) & (edges <= values.max())]


def date_edges(values: np.ndarray, count: int) -> np.ndarray:
    """Times in nanoseconds near the quantiles that cut rows into equal groups; midnights if they are far apart."""
    edges = np.unique(np.quantile(values, np.linspace(0, 1, count + 1)[1:-1]).astype(np.int64))
    days = np.unique(edges // NANOSECONDS_PER_DAY) * NANOSECONDS_PER_DAY
    inside = (days > values.min()) & (days <= values.max())
    return days if len(days) == len(edges) and inside.all() else edges


def with_rare_levels_joined(place: np.ndarray, names: list[str]) -> tuple[np.ndarray, list[str]]:
    """Keep the most common levels, in their order, and make one group of the others."""
    counts = np.bincount(place[place >= 0], minlength=len(names))
    kept = np.sort(np.argsort(-counts, kind="stable")[: MOST_LEVELS - 1])
    moved = np.full(len(names) + 1, len(kept))  # the last entry is for place -1
    moved[kept], moved[-1] = np.arange(len(kept)), -1
    return moved[place], [*(names[k] for k in kept), f"{len(names) - len(kept)} other levels"]


def short_value(value: Any) -> str:
    """A number with at most four digits, or all those before the point; a date; other values unchanged."""
    if isinstance(value, datetime.datetime):
        return str(value.date() if value.time() == datetime.time() else value)
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        return str(value)
    return number_text(float(value), 4)
