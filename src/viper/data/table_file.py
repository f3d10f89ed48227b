"""Read tables on disk as data frames: CSV (also .gz), Parquet, Arrow and LIBSVM; errors name file, line and cell.

Nothing here imports torch, so that a command reports a wrong file name at once.
"""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from viper.data.arrow import BY_SUFFIX, CSV, FORMATS, LIBSVM, ArrowFile, TableFormat, first_bytes, format_by_magic
from viper.data.csv_text import CsvText, line_of_row, read_csv, records
from viper.errors import FileError, RowError

if TYPE_CHECKING:
    import pandas

MOST_CELLS = 200_000_000  # most cells of a LIBSVM file, which becomes dense: 1.6 GB
MOSTLY = 0.8  # a text column with at least this share of numbers is treated as numbers with mistakes
FEWEST_NUMBERS = 5  # distinct numbers in such a column; fewer are codes, like 0, 1, 2, 3+


@dataclass(frozen=True)
class TableFile(CsvText):
    """A file that holds a table. The format is the one given, or is recognised by the first bytes or the name."""

    format: str | None = None
    zeros: tuple[str, ...] = ()  # columns that a LIBSVM file leaves out if they are zero in all of its rows

    def read(self, text: tuple[str, ...] = ()) -> "pandas.DataFrame":
        """Read all rows; the columns in `text` are not converted to numbers."""
        (frame,) = self.chunks(None, text)
        return frame

    def chunks(self, rows: int | None, text: tuple[str, ...] = ()) -> Iterator["pandas.DataFrame"]:
        """Yield the rows in parts of at most `rows`, or in one."""
        kind = self.kind()
        if kind == CSV:
            yield from read_csv(self, rows, text)
        elif kind == LIBSVM:
            frame = read_libsvm(self.path)
            yield frame.reindex(columns=list(dict.fromkeys([*frame, *self.zeros])), fill_value=0.0)
        else:
            yield from ArrowFile(self.path, kind).frames(rows)

    def kind(self) -> TableFormat:
        """The file's format. Raises if the file does not exist, is empty or is a spreadsheet."""
        check_input(self.path)
        if self.format is not None:
            return FORMATS[self.format]
        start = first_bytes(self.path)
        if start.startswith(b"PK\x03\x04"):
            raise FileError(f"{self.path} must be a table; got a spreadsheet or zip archive. Save it as CSV.")
        return format_by_magic(start) or BY_SUFFIX.get(self.path.suffix.lower(), CSV)

    def line(self, row: int) -> int | None:
        """Return the line of a text file on which data row `row` (from 0) begins."""
        return line_of_row(records(self), row) if self.kind() == CSV else None

    def place(self, row: int) -> str:
        """Describe where data row `row` (from 0) is: its line in a text file, otherwise its number."""
        line = self.line(row)
        return f"row {row + 1}" if line is None else f"line {line}"

    @contextmanager
    def located(self) -> Iterator[None]:
        """Make errors about a row of this table name its line instead."""
        try:
            yield
        except RowError as error:
            where = f"{self.place(int(error.row))} of {self.path}."
            raise FileError(str(error).replace(f"row {error.row}.", where)) from None


def check_input(path: Path) -> None:
    """Raise unless the file exists, can be read and is not empty."""
    if not path.exists():
        folder = path.parent
        names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        near = difflib.get_close_matches(path.name, names, 1, 0.75)
        hint = f"Did you mean {folder / near[0]}?" if near else "Check the name."
        raise FileError(f"the file must exist; got {path}. {hint}")
    if path.is_dir():
        raise FileError(f"the file must be a table; got {path}, which is a directory. Name a file in it.")
    if not os.access(path, os.R_OK):
        raise FileError(f"the file must be readable; got {path}, which is not. Change its permissions.")
    if path.is_file() and path.stat().st_size == 0:
        raise FileError(f"the file must have a header and rows; got {path}, which is empty.")


def check_numbers(frame: "pandas.DataFrame", table: TableFile, categories: tuple[str, ...] = ()) -> None:
    """Raise if most cells of a text column are numbers; the message names the first that is not, and its line."""
    import pandas

    for name in frame.columns.difference(categories, sort=False):
        column = frame[name]
        if not pandas.api.types.is_string_dtype(column.dtype):
            continue
        numbers = pandas.to_numeric(column, errors="coerce")
        bad = (numbers.isna() & column.notna()).to_numpy()
        if not bad.any() or bad.sum() > (1 - MOSTLY) * column.notna().sum() or numbers.nunique() < FEWEST_NUMBERS:
            continue
        row = int(bad.argmax())
        more = f" and {bad.sum() - 1} more cells" if bad.sum() > 1 else ""
        got = repr(column.iloc[row])
        raise FileError(
            f"column {name!r} must be numeric, as most of it is; got {got} in {table.place(row)}{more}. Correct it, "
            f"pass --na {got} if that means missing, or --category {name!r} if the column is text."
        )


def read_libsvm(path: Path) -> "pandas.DataFrame":
    """Read a LIBSVM file as a frame: the label is column y, feature j is column xj."""
    import pandas
    from sklearn.datasets import load_svmlight_file

    try:
        X, y = load_svmlight_file(str(path), zero_based=True)
    except ValueError as error:
        raise FileError(f"{path} must be LIBSVM text, 'label index:value …'; got {error}.") from None
    if X.shape[0] * X.shape[1] > MOST_CELLS:
        raise FileError(
            f"a LIBSVM file may have at most {MOST_CELLS:,} cells, including zeros; got {X.shape[0]:,} × "
            f"{X.shape[1]:,}. Fit the sparse matrix in Python, with covariance='diagonal'."
        )
    frame = pandas.DataFrame(X.toarray(), columns=[f"x{j}" for j in range(X.shape[1])])
    if X.shape[1] and X[:, [0]].nnz == 0:  # indices begin at 1
        frame = frame.iloc[:, 1:]
    label = y.astype(int) if (y == y.round()).all() else y
    return frame.assign(y=label)[["y", *frame.columns]]
