"""What is recorded about the rows that a model was fitted to: not the rows, but the distribution of each raw column.

New rows are compared with it: values out of range, shifted columns, missing values. It is plain data, stored with the
model, and part of the model card.
"""

import hashlib
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from viper.data.model_file import viper_version

if TYPE_CHECKING:
    import pandas

FEWEST_RECORDED = 5  # least count of a bin; rarer levels are recorded with this count, so that none reveals a person
MOST_BINS = 10
MOST_SORTED = 20_000  # values from which bins are cut; sorting all of them could take longer than the fit


@dataclass(frozen=True)
class TrainingColumn:
    """One raw column of the training rows.

    Attributes
    ----------
    kind : {"number", "category"}
        How the model uses the column. A column used as both is recorded as numbers.
    missing : int
        Number of missing values among all given rows.
    rows : list of int
        Numbers: rows in each bin, or of a random 20,000 if there are more. Categories: rows of each level, in the
        order of `Encoding.levels`, with 5 for a level that has fewer. Only rows of the fit that have a value count.
    cuts : list of float
        Numbers: bin k holds the values x with cuts[k-1] < x <= cuts[k]; there is one more bin than cuts.
    low, high, mean, sd : float, optional
        Numbers: smallest and largest value, mean and standard deviation.
    """

    kind: str
    missing: int
    rows: list[int]
    cuts: list[float] = field(default_factory=list)
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    sd: float | None = None

    def wide_range(self, margin: float) -> tuple[float, float]:
        """Return the smallest and the largest number, each moved outward by `margin` times their distance."""
        if self.low is None or self.high is None:
            raise ValueError("a range needs numbers; got levels.")
        reach = margin * self.high - margin * self.low
        return self.low - reach, self.high + reach

    @classmethod
    def of_numbers(cls, values: np.ndarray, missing: int) -> "TrainingColumn":
        """Describe numbers; NaN are missing."""
        present = values[~np.isnan(values)]
        low, high = float(present.min()), float(present.max())
        cuts, rows = equal_bins(np.sort(some_values(present, MOST_SORTED)))
        unit = max(abs(low), abs(high)) or 1.0  # squares of numbers near 1e308 overflow
        mean, sd = (float(moment(present / unit) * unit) for moment in (np.mean, np.std))
        return cls("number", missing, rows, cuts, low, high, mean, sd)

    @classmethod
    def of_levels(cls, column: "pandas.Series[Any]", levels: list[Any], missing: int) -> "TrainingColumn":
        """Count the rows of each level."""
        counts = column.value_counts()
        return cls("category", missing, [max(FEWEST_RECORDED, int(counts.get(level, 0))) for level in levels])


def some_values(values: np.ndarray, most: int) -> np.ndarray:
    """Return all values, or `most` of them drawn at random with a fixed seed."""
    if len(values) <= most:
        return values
    return values[np.random.default_rng(0).integers(len(values), size=most)]


def equal_bins(values: np.ndarray) -> tuple[list[float], list[int]]:
    """Cut sorted values into at most ten bins of about equal numbers of rows; equal values share a bin."""
    cuts, rows, start = [], [], 0
    wanted = max(FEWEST_RECORDED, math.ceil(len(values) / MOST_BINS))
    while start + wanted < len(values):
        cut = values[start + wanted - 1]
        end = int(np.searchsorted(values, cut, side="right"))
        if len(values) - end < FEWEST_RECORDED:
            break
        cuts.append(float(cut))
        rows.append(end - start)
        start = end
    return cuts, [*rows, len(values) - start]


@dataclass(frozen=True)
class TrainingFile:
    """The file that a model was fitted to, and how it was read.

    Attributes
    ----------
    name : str
        Its name, without the folder.
    sha256 : str, optional
        Digest of its bytes, in hexadecimal.
    size : int
        Its number of bytes.
    format : str
        "csv", "parquet", "arrow" or "libsvm".
    separator, decimal, encoding : str
        How a CSV file was read; the separator as it was given or detected.
    na : list of str
        Texts that meant a missing value, besides an empty cell and NA.
    left_out : dict
        Columns that were not used, and why.
    """

    name: str
    sha256: str | None
    size: int
    format: str
    separator: str | None = None
    decimal: str = "."
    encoding: str = "utf-8"
    na: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingData:
    """What is recorded about the rows that a model was fitted to.

    Attributes
    ----------
    rows, rows_used : int
        Number of given rows, and of those that were used.
    class_counts : dict
        Number of rows of each class, among those used.
    columns : dict of TrainingColumn
        The raw columns that the formula reads, without the target.
    date : str
        When the formula was learned: ISO 8601, in UTC. The variable SOURCE_DATE_EPOCH replaces the clock.
    versions : dict
        Versions of viper, Python, NumPy and torch.
    file : TrainingFile, optional
        The file, if the model was fitted on the command line.
    """

    rows: int
    rows_used: int
    class_counts: dict[str, int]
    columns: dict[str, TrainingColumn]
    date: str
    versions: dict[str, str]
    file: TrainingFile | None = None

    @classmethod
    def of(
        cls,
        frame: "pandas.DataFrame",
        labels: "pandas.Series[Any]",
        given: int,
        missing: Mapping[str, int],
        numbers: Mapping[str, np.ndarray],
        levels: Mapping[str, list[Any]],
    ) -> "TrainingData":
        """Describe rows before missing values are filled in; `numbers` and `levels` say how each column is used."""
        columns = {}
        for name in frame:
            count = missing.get(str(name), 0)
            if name in numbers:
                columns[str(name)] = TrainingColumn.of_numbers(numbers[str(name)], count)
            else:
                columns[str(name)] = TrainingColumn.of_levels(frame[name], levels[str(name)], count)
        counts = labels.value_counts()
        by_class = {str(label): int(counts[label]) for label in sorted(counts.index, key=str)}
        return cls(given, len(frame), by_class, columns, current_date(), current_versions())

    @property
    def missing_shares(self) -> dict[str, float]:
        """Share of missing values in each column, of all rows that were given."""
        return {name: column.missing / max(1, self.rows) for name, column in self.columns.items()}

    def to_state(self) -> dict[str, Any]:
        """Return everything as JSON."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "TrainingData":
        """Invert `to_state`, whose types have been checked."""
        columns = {name: TrainingColumn(**column) for name, column in state["columns"].items()}
        file = None if state.get("file") is None else TrainingFile(**state["file"])
        return cls(**state | {"columns": columns, "file": file})


def current_date() -> str:
    """Return the time in UTC to the second, or SOURCE_DATE_EPOCH, so that files can be reproduced."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    moment = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)
    return moment.isoformat(timespec="seconds")


@cache
def current_versions() -> dict[str, str]:
    """Return the versions of viper and what it depends on; viper is "unknown" if it is not installed."""
    libraries = {"python": platform.python_version(), "numpy": version("numpy"), "torch": version("torch")}
    return {"viper": viper_version(), **libraries}


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- checks of what is read from a file ---


def check_training_data(data: TrainingData, levels: Mapping[str, list[Any]]) -> None:
    """Raise a ValueError unless the values are consistent, as those of `TrainingData.of` are."""
    datetime.fromisoformat(data.date)
    for name, column in data.columns.items():
        check_training_column(column, len(levels.get(name, [])))


def check_training_column(column: TrainingColumn, levels: int) -> None:
    if column.kind == "category":
        if len(column.rows) != levels or column.cuts:
            raise ValueError("training data that count other levels")
        return
    numbers = [*column.cuts, column.low, column.high, column.mean, column.sd]
    if column.kind != "number" or any(x is None for x in numbers):
        raise ValueError("training data that are not finite numbers")
    if len(column.rows) != len(column.cuts) + 1 or sorted(set(column.cuts)) != column.cuts:
        raise ValueError("training data whose bins do not match")
