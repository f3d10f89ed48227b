"""New rows against the training data: which rows a formula cannot encode, and what is unusual about the others.

A value may be missing, text where numbers are needed, a level that was not in the training data, beyond the range of a
spline, or far outside the range of the training data. Each finding is a `Remark` about one column in some rows.
"""

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from viper.data.csv_text import spelled_numbers
from viper.formula.columns import (
    as_days,
    as_trimmed,
    date_text,
    level_codes,
    parsed_dates,
    python_value,
    without_blanks,
)
from viper.formula.encoding import Encoding, calendar_name, undefined_cells
from viper.formula.training import TrainingColumn

if TYPE_CHECKING:
    import pandas

MARGIN = 0.1  # numbers may leave the training range by this share; one in n/2 similar rows leaves it slightly
LARGEST_ORDINARY = 1e15  # smaller numbers overflow in no term: their tenth power is 1e150, whose square is finite
MOST_REMARKS = 3  # remarks on one row that are written out
# kind -> words for a count of rows; those of FATAL leave a row without a prediction
FATAL = {
    "missing": "missing",
    "text": "not a number or date",
    "unseen": "not in the training data",
    "beyond": "beyond the range of a spline",
    "undefined": "without a value",
    "huge": "too large to compute with",
}
NOTED = {
    "filled": "filled in",
    "replaced": "not in the training data and replaced",
    "clamped": "beyond the range of a spline and taken at its end",
    "outside": "far outside the range of the training data",
    "averaged": "in a group that was not in the training data, averaged over its possible effects",
    "far": "farther from the training data than any row of it",
}


class Remark(NamedTuple):
    """What is unusual about one column in some rows of a table."""

    kind: str  # a key of FATAL or NOTED
    column: str
    rows: np.ndarray  # whether it concerns a row
    text: Callable[[int], str]  # the remark in words, by the position of a row

    @property
    def fatal(self) -> bool:
        """Whether these rows have no prediction."""
        return self.kind in FATAL


class Screened(NamedTuple):
    """A table with the columns that a formula reads, after its rules for new values, and remarks on its rows."""

    frame: "pandas.DataFrame"
    remarks: list[Remark]

    @property
    def usable(self) -> np.ndarray:
        """Which rows can be encoded."""
        masks = [remark.rows for remark in self.remarks if remark.fatal]
        return ~np.any(masks, 0) if masks else np.ones(len(self.frame), dtype=bool)


def screen_rows(encoding: Encoding, data: Any) -> Screened:
    """Apply the encoding's rules for new values, and find the rows that cannot be encoded or are unusual, and why."""
    frame = encoding._raw(data).copy(deep=False)
    remarks: list[Remark] = []
    for name in encoding.inputs:
        found: list[Remark] = []
        if name in encoding.levels:
            frame[name], found = screened_levels(encoding, frame[name])
        if name in encoding.parsed.dates:
            frame[name], found = screened_dates(encoding, frame[name])
        elif name in encoding.means:
            frame[name], more = screened_numbers(encoding, frame[name])
            found += more
        remarks += found
        if (holes := frame[name].isna().to_numpy() & ~fatal_rows(found, len(frame))).any():
            kind, words = ("filled", "filled in") if encoding.fills else ("missing", "missing")
            remarks.append(Remark(kind, name, holes, constant_text(f"{name} is {words}")))
    screened = Screened(frame, remarks)
    remarks += undefined_rows(encoding, screened)
    return screened


def constant_text(text: str) -> Callable[[int], str]:
    return lambda row: text


def fatal_rows(remarks: Iterable[Remark], rows: int) -> np.ndarray:
    """Return which rows have a remark that leaves them without a prediction."""
    found = np.zeros(rows, dtype=bool)
    for remark in remarks:
        found |= remark.rows & remark.fatal
    return found


def screened_numbers(encoding: Encoding, column: "pandas.Series[Any]") -> tuple["pandas.Series[Any]", list[Remark]]:
    """Return a column of numbers, and remarks on text, infinite values and values far out of range."""
    name, numbers = str(column.name), text_as_numbers(column)
    if numbers.dtype.kind not in "iuf":  # booleans, dates: `as_numbers` refuses the whole column
        return column, []
    values = numbers.to_numpy(dtype=float, na_value=np.nan)
    bad = (np.isnan(values) & column.notna().to_numpy()) | np.isinf(values)
    remarks = [Remark("text", name, bad, lambda row: f"{name} = {cell_words(column.iloc[row])} is not a number")]
    training = None if encoding.training is None else encoding.training.columns[name]
    if training is not None and training.kind == "number":
        remarks.append(out_of_range(name, values, training))
    return numbers, [remark for remark in remarks if remark.rows.any()]


def screened_dates(encoding: Encoding, column: "pandas.Series[Any]") -> tuple["pandas.Series[Any]", list[Remark]]:
    """Return a column of dates as days, and remarks on text that is not a date and on months that the fit lacks.

    Dates after those of the fit get no remark.
    """
    import pandas

    bad = np.zeros(len(column), dtype=bool)
    if column.dtype.kind not in "iufM":
        codes, texts = pandas.factorize(column)
        bad = np.isin(codes, np.flatnonzero(parsed_dates(texts).isna()))
    days = pandas.Series(as_days(column.mask(bad)), index=column.index, name=column.name)
    text = lambda row: f"{column.name} = {cell_words(column.iloc[row])} is not a date"  # noqa: E731
    remarks = [Remark("text", str(column.name), bad, text)] if bad.any() else []
    for function, new in encoding.new_dates(str(column.name), days.to_numpy()).items():
        remarks.append(new_date_remark(encoding, function, days, new))
    return (encoding.known_dates(days) if encoding.unseen != "error" else days), remarks


def new_date_remark(encoding: Encoding, function: str, days: "pandas.Series[Any]", new: np.ndarray) -> Remark:
    """Return the remark on dates whose month, or day of the week, is not in the training data."""
    call = f"{function}({days.name})"
    end = {
        "error": "is not in the training data",
        "missing": "is new, and the date counts as missing",
        "baseline": "is new and counts as the first of the training data",
    }[encoding.unseen]
    kind = "unseen" if encoding.unseen == "error" else "replaced"
    return Remark(kind, call, new, lambda row: f"{call} = {calendar_name(function, days.iloc[row])!r} {end}")


def text_as_numbers(column: "pandas.Series[Any]") -> "pandas.Series[Any]":
    """Return a column of text as numbers, with NaN for other text; any other column is returned unchanged."""
    import pandas
    from pandas.api import types

    if not types.is_string_dtype(column.dtype) and column.dtype.kind != "O":
        return column
    return pandas.Series(spelled_numbers(column), index=column.index, name=column.name)


def columns_as_read(encoding: Encoding, frame: "pandas.DataFrame") -> "pandas.DataFrame":
    """Return the frame as a formula reads it: text cells of a column of numbers as NaN, levels without blanks."""
    numbers = [name for name in encoding.means if name not in encoding.parsed.dates]
    levels = [name for name, known in encoding.levels.items() if all(as_trimmed(level) == level for level in known)]
    read = {name: text_as_numbers(frame[name]) for name in numbers}
    read |= {name: without_blanks(frame[name]) for name in levels}
    return frame.assign(**read)


def out_of_range(name: str, values: np.ndarray, training: TrainingColumn) -> Remark:
    low, high = training.wide_range(MARGIN)
    words = f"the training data, {training.low:.6g} to {training.high:.6g}"

    def text(row: int) -> str:
        return f"{name} = {values[row]:.6g} is far {'below' if values[row] < low else 'above'} {words}"

    with np.errstate(invalid="ignore"):
        return Remark("outside", name, np.isfinite(values) & ((values < low) | (values > high)), text)


def screened_levels(encoding: Encoding, column: "pandas.Series[Any]") -> tuple["pandas.Series[Any]", list[Remark]]:
    """Return a column of levels with the rule for unseen ones applied, and remarks on them."""
    name, levels = str(column.name), encoding.levels[str(column.name)]
    new = (level_codes(column, levels) < 0) & column.notna().to_numpy()
    if not new.any():
        return column, []
    if encoding.unseen == "error":
        text = lambda row: f"{name} = {cell_words(column.iloc[row])} is not in the training data"  # noqa: E731
        return column, [Remark("unseen", name, new, text)]
    stands_for = "missing" if encoding.unseen == "missing" else cell_words(levels[0])
    text = lambda row: f"{name} = {cell_words(column.iloc[row])} is new and counts as {stands_for}"  # noqa: E731
    return encoding.known_levels(column), [Remark("replaced", name, new, text)]


def undefined_rows(encoding: Encoding, screened: Screened) -> list[Remark]:
    """Return remarks on rows where a term has no finite value, or has one only because a number was clamped."""
    if not encoding.has_functions and not has_extreme_number(screened.frame).any():
        return []
    usable = screened.usable
    frame = encoding._with_means(screened.frame[usable], encoding.inputs)
    design = encoding._evaluated(frame, encoding.transforms)
    undefined = undefined_cells(design)
    rows = undefined.any(1)
    if not rows.any():
        return []
    clamped = np.zeros_like(undefined)
    if encoding.beyond == "clamp":
        left = undefined_cells(encoding._evaluated(frame[rows], encoding.transforms, clamp=True))
        clamped[rows] = undefined[rows] & ~left
    found = {"undefined": undefined & ~clamped, "clamped": clamped}
    return [
        term_remark(encoding, screened.frame, kind, term, mask_of_all_rows(bad, usable))
        for kind, cells in found.items()
        for term, bad in cells_by_term(list(design), cells).items()
    ]


def has_extreme_number(frame: "pandas.DataFrame") -> np.ndarray:
    """Return which rows have a number so large that a product may overflow."""
    numbers = frame.select_dtypes("number", exclude="timedelta")
    return (numbers.abs() > LARGEST_ORDINARY).any(axis=1).to_numpy(dtype=bool)


def cells_by_term(names: list[str], cells: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rows with such a cell, by the term that the column of X belongs to: bs(x)[2] belongs to bs(x)."""
    found: dict[str, np.ndarray] = {}
    for j in np.flatnonzero(cells.any(0)):
        term = re.sub(r"\[\d+\]$", "", names[j])
        found[term] = found.get(term, False) | cells[:, j]
    return found


def mask_of_all_rows(rows: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Return a mask of all rows from a mask of the usable ones."""
    every = np.zeros(len(usable), dtype=bool)
    every[usable] = rows
    return every


def term_remark(encoding: Encoding, frame: "pandas.DataFrame", kind: str, term: str, rows: np.ndarray) -> Remark:
    """Return a remark on a function of the formula that has no value, or has one only at the end of its range."""
    named = [name for name in encoding.inputs if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", term)]
    spline = "bs(" in term
    end = ", which is taken at its end" if kind == "clamped" else ""
    words_of = lambda name, value: date_text(value) if name in encoding.parsed.dates else cell_words(value)  # noqa: E731

    def text(row: int) -> str:
        values = " and ".join(f"{name} = {words_of(name, frame[name].iloc[row])}" for name in named)
        return f"{values} is beyond the range of {term}{end}" if spline else f"{term} has no value for {values}"

    return Remark("beyond" if spline and kind == "undefined" else kind, term, rows, text)


def cell_words(value: Any) -> str:
    """Return a value as a note shows it."""
    plain = python_value(value)
    return f"{plain:.6g}" if isinstance(plain, float) else f"{plain!r:.60}"


def row_notes(remarks: Iterable[Remark], rows: int) -> np.ndarray:
    """Return the remarks on each row as one text, or the empty text."""
    notes = np.full(rows, "", dtype=object)
    count = np.zeros(rows, dtype=int)
    for remark in sorted(remarks, key=lambda remark: not remark.fatal):
        for row in np.flatnonzero(remark.rows & (count < MOST_REMARKS)):
            start = "no prediction: " if remark.fatal and not count[row] else "; " if count[row] else ""
            notes[row] += start + remark.text(int(row))
        count += remark.rows
    for row in np.flatnonzero(count > MOST_REMARKS):
        notes[row] += f"; and {count[row] - MOST_REMARKS} more"
    return notes
