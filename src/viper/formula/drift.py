"""Whether new rows are like the training data: for each column, how its distribution differs from that of the fit.

The population stability index of shares p (new rows) and q (training rows) over the bins of the training data is

    PSI = Σ_k (p_k - q_k) log(p_k / q_k),

the sum of both Kullback-Leibler divergences. A column has moved if the difference is large, PSI >= 0.1, and not due to
chance. Credit scoring, where the index comes from, calls 0.1 a slight and 0.25 a major change (Siddiqi 2006).
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from viper.data.csv_text import spelled_numbers
from viper.formula.columns import level_codes
from viper.formula.encoding import Encoding
from viper.formula.screening import MARGIN
from viper.formula.training import FEWEST_RECORDED, TrainingColumn

if TYPE_CHECKING:
    import pandas

SLIGHT, MAJOR = 0.1, 0.25  # PSI from which a change counts
SIGNIFICANCE = 0.001  # over all columns together: one false alarm in a thousand tables
SMOOTHING = 0.5  # rows added to every bin, so that the logarithm of an empty one is finite


class ColumnDrift(NamedTuple):
    """How one column of new rows differs from the training data."""

    column: str
    psi: float  # population stability index
    p_value: float  # bound on the probability of such a difference by chance
    shift: float | None  # change of the mean, in training standard deviations; None for categories
    outside: float  # share of rows far outside the range, or with a level that is not in the training data
    missing: float  # share of missing values
    missing_before: float  # share in the training data
    verdict: str  # "same", "slight" or "major"

    @property
    def moved(self) -> bool:
        """Whether the difference is large, and not due to chance."""
        return self.verdict != "same"


class DriftCounter:
    """Counts the rows of a table, part by part, in the bins of the training data."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        known = {} if encoding.training is None else encoding.training.columns
        dates = encoding.parsed.dates  # left out: new rows are later, which is no drift
        self.training = {name: column for name, column in known.items() if name not in dates}
        self.counts = {name: np.zeros(len(column.rows) + 3, dtype=int) for name, column in self.training.items()}
        self.sums = dict.fromkeys(self.training, 0.0)

    def add(self, data: Any) -> None:
        """Count the rows of one part."""
        frame = self.encoding._raw(data)
        for name, column in self.training.items():
            if column.kind == "number":
                bins, total = bins_of_numbers(frame[name], column)
                self.sums[name] += total
            else:
                bins = bins_of_levels(frame[name], self.encoding.levels[name])
            self.counts[name] += np.bincount(bins, minlength=len(self.counts[name]))

    def result(self) -> list[ColumnDrift]:
        """Compare every column with the training data, the one that differs most first."""
        found = [self._compare(name, counts) for name, counts in self.counts.items() if counts.sum()]
        return sorted(found, key=lambda drift: -drift.psi)

    def _compare(self, name: str, counts: np.ndarray) -> ColumnDrift:
        column, training = self.training[name], self.encoding.training
        assert training is not None
        hole = column.missing / max(1, training.rows)
        before = np.array([*column.rows, 0, 0, 0], dtype=float)
        before[-1] = before.sum() * hole / (1 - hole)
        kept = (before > 0) | (counts > 0)
        q, p = (smoothed_shares(x[kept]) for x in (before, counts))
        psi = float(((p - q) * np.log(p / q)).sum())
        p_value = chance_of_difference(before, counts, column.kind == "number")
        real = p_value * len(self.counts) < SIGNIFICANCE
        verdict = "same" if not real or psi < SLIGHT else "slight" if psi < MAJOR else "major"
        shares = counts / counts.sum()
        shift = self._shift(name, int(counts[:-1].sum()))
        return ColumnDrift(name, psi, p_value, shift, float(shares[-3:-1].sum()), float(shares[-1]), hole, verdict)

    def _shift(self, name: str, present: int) -> float | None:
        mean, sd = self.training[name].mean, self.training[name].sd
        return float((self.sums[name] / present - mean) / sd) if present and mean is not None and sd else None


def chance_of_difference(before: np.ndarray, after: np.ndarray, numbers: bool) -> float:
    """Return a bound on the probability of such a difference between rows of one population.

    Three tests, each allowed a third of the errors: χ² of the bins of present values; the share of missing values, also
    by χ²; and the number of values outside, each of which has a probability of at most 2/(n+1) if n training rows
    define the range, and of about (rare levels + 1)/(n+1) for a level that was not among them (Good-Turing).
    """
    from scipy.stats import binom

    inside, outside, present = after[:-3].astype(float), int(after[-3:-1].sum()), int(after[:-1].sum())
    if numbers:  # values beyond the range belong to the first and the last bin
        inside[0] += after[-3]
        inside[-1] += after[-2]
    rows = before[:-1].sum()
    rate = 2.0 if numbers else 1.0 + float((before[:-3] <= FEWEST_RECORDED).sum())
    chances = [
        homogeneity(before[:-3], inside),
        homogeneity(np.array([rows, before[-1]]), np.array([present, after[-1]], dtype=float)),
        float(binom.sf(outside - 1, present, min(1.0, rate / (rows + 1)))) if outside else 1.0,
    ]
    return min(1.0, len(chances) * min(chances))


def homogeneity(before: np.ndarray, after: np.ndarray) -> float:
    """Return the p-value of Pearson's χ² test, with bins of less than one expected row joined to the most common."""
    from scipy.stats import chi2_contingency

    expected = (before + after) * after.sum() / max(1.0, before.sum() + after.sum())
    rare = expected < 1.0
    rare[np.argmax(expected)] = True
    table = np.stack([np.append(x[~rare], x[rare].sum()) for x in (before, after)])
    if table.shape[1] < 2 or not table.sum(1).all():
        return 1.0
    return float(chi2_contingency(table, correction=False).pvalue)


def column_drift(encoding: Encoding, data: Any) -> list[ColumnDrift]:
    """Compare the columns of a table with the training data, the one that differs most first.

    The list is empty for a model that has no record of its training data.
    """
    counter = DriftCounter(encoding)
    counter.add(data)
    return counter.result()


def smoothed_shares(counts: np.ndarray) -> np.ndarray:
    """(n_k + ½) / Σ_j (n_j + ½)."""
    return (counts + SMOOTHING) / (counts + SMOOTHING).sum()


def bins_of_numbers(column: "pandas.Series[Any]", training: TrainingColumn) -> tuple[np.ndarray, float]:
    """Return the bin of each number, where the last three are far below, far above and missing; and the finite sum."""
    values = spelled_numbers(column)
    last = len(training.rows)
    low, high = training.wide_range(MARGIN)
    bins = np.searchsorted(np.array(training.cuts), values, side="left")
    with np.errstate(invalid="ignore"):
        bins = np.where(values < low, last, np.where(values > high, last + 1, bins))
    bins[np.isnan(values)] = last + 2
    return bins, float(values[np.isfinite(values)].sum())


def bins_of_levels(column: "pandas.Series[Any]", levels: list[Any]) -> np.ndarray:
    """Return the bin of each level, where the last three are new levels, nothing and missing."""
    codes = level_codes(column, levels)
    return np.where(column.isna().to_numpy(), len(levels) + 2, np.where(codes < 0, len(levels), codes))
