"""Whether new rows are like the training data: for each column, how its distribution differs from that of the fit.

The population stability index of shares p (new rows) and q (training rows) over the bins of the training data is

    PSI = Σ_k (p_k - q_k) log(p_k / q_k),

the sum of both Kullback-Leibler divergences. A column has moved if the difference is large, PSI >= 0.1, and not due to
chance. Credit scoring, where the index comes from, calls 0.1 a slight and 0.25 a major change (Siddiqi 2006).
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from viper.formula.columns import level_codes
from viper.formula.encoding import Encoding
from viper.formula.screening import MARGIN
from viper.formula.training import TrainingColumn

if TYPE_CHECKING:
    import pandas

SLIGHT, MAJOR = 0.1, 0.25  # PSI from which a change counts
SIGNIFICANCE = 0.01  # over all columns together
SMOOTHING = 0.5  # rows added to every bin, so that the logarithm of an empty one is finite


class ColumnDrift(NamedTuple):
    """How one column of new rows differs from the training data."""

    column: str
    psi: float  # population stability index
    p_value: float  # of the same difference or a larger one by chance, in a test of homogeneity
    shift: float | None  # of the mean, in standard deviations of the training data; None for categories
    outside: float  # share of rows far outside the range, or with a level that is not in the training data
    missing: float  # share of missing values
    missing_before: float  # in the training data
    verdict: str  # "same", "slight" or "major"

    @property
    def moved(self) -> bool:
        """Whether the difference is large, and not due to chance."""
        return self.verdict != "same"


class DriftCounter:
    """Counts the rows of a table, part by part, in the bins of the training data."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self.training = {} if encoding.training is None else encoding.training.columns
        self.counts = {name: np.zeros(len(column.rows) + 3, dtype=int) for name, column in self.training.items()}
        self.sums = dict.fromkeys(self.training, 0.0)

    def add(self, data: Any) -> None:
        """Count the rows of one part."""
        frame = self.encoding._select(data)
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
        from scipy.stats import chi2_contingency

        column, training = self.training[name], self.encoding.training
        assert training is not None
        before = np.array([*column.rows, 0, 0, 0], dtype=float)
        hole = column.missing / max(1, training.rows)
        before[-1] = before.sum() * hole / max(1 - hole, 1e-9) if hole < 1 else column.missing
        kept = (before > 0) | (counts > 0)
        p_value = 1.0
        if kept.sum() > 1:
            p_value = float(chi2_contingency(np.stack([before[kept], counts[kept]]), correction=False).pvalue)
        q, p = (smoothed_shares(x[kept]) for x in (before, counts))
        psi = float(((p - q) * np.log(p / q)).sum())
        present = counts[:-1].sum()
        shift = None
        if column.mean is not None and column.sd:
            shift = float((self.sums[name] / present - column.mean) / column.sd) if present else None
        real = p_value * len(self.counts) < SIGNIFICANCE
        verdict = "same" if not real or psi < SLIGHT else "slight" if psi < MAJOR else "major"
        shares = counts / counts.sum()
        return ColumnDrift(name, psi, p_value, shift, float(shares[-3:-1].sum()), float(shares[-1]), hole, verdict)


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
    import pandas

    values = pandas.to_numeric(column, errors="coerce").to_numpy(dtype=float, na_value=np.nan)
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
