"""Read tables on disk as data frames: CSV (also .gz), Parquet, Arrow, Excel and LIBSVM; errors name line and cell.

Nothing here imports torch, so that a command reports a wrong file name at once.
"""

import atexit
import difflib
import math
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from viper.data.arrow import (
    BY_SUFFIX,
    CSV,
    EXCEL,
    FORMATS,
    LIBSVM,
    ArrowFile,
    TableFormat,
    first_bytes,
    format_by_magic,
)
from viper.data.csv_text import (
    MAYBE_THOUSANDS,
    WHOLE_NUMBER,
    WITH_COMMA,
    CsvText,
    decimal_of,
    line_of_row,
    read_csv,
    records,
    spelled_number,
    spelled_numbers,
)
from viper.data.excel import write_sheet
from viper.errors import FileError, RowError, shown

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
    sheet: str | None = None  # of an Excel workbook: its name or number; None is the first

    def read(self, text: tuple[str, ...] = ()) -> "pandas.DataFrame":
        """Read all rows; the columns in `text` are not converted to numbers."""
        (frame,) = self.chunks(None, text)
        return frame

    def chunks(self, rows: int | None, text: tuple[str, ...] = ()) -> Iterator["pandas.DataFrame"]:
        """Yield the rows in parts of at most `rows`, or in one."""
        kind = self.kind()
        if kind in (CSV, EXCEL):
            yield from read_csv(self.text, rows, text)
        elif kind == LIBSVM:
            frame = read_libsvm(self.source)
            yield frame.reindex(columns=list(dict.fromkeys([*frame, *self.zeros])), fill_value=0.0)
        else:
            found = 0
            for frame in ArrowFile(self.source, kind).frames(rows, self.check_size):
                found += len(frame)
                yield frame
            if not found:
                raise FileError(f"the file must have rows; got {self.path}, which has none.")

    @cached_property
    def text(self) -> CsvText:
        """The table as separated values: the file itself, or what a sheet of a workbook holds."""
        if self.kind() != EXCEL:
            return self
        decimal = self.decimal or "."
        separator = ";" if decimal == "," else ","
        stored = temporary_file()
        write_sheet(self, self.sheet, stored, separator, decimal)
        options = {"multiline": True, "most_bytes": self.limit, "stored": stored}
        return CsvText(self.path, "utf-8", separator, decimal, self.missing, **options)  # type: ignore[arg-type]

    def check_size(self, size: float) -> None:
        if size > self.limit:
            self.refuse_size(size)

    def kind(self) -> TableFormat:
        """The file's format. Raises if the file does not exist or is empty."""
        check_input(self.source)
        if self.format is not None:
            return FORMATS[self.format]
        start = first_bytes(self.source)
        if start.startswith(b"\xd0\xcf\x11\xe0"):
            raise FileError(f"{self.path} must be a table; got a workbook of old Excel. Save it as .xlsx or as CSV.")
        if start[3:] == bytes(5) + b"{":  # the length of a model's header, and its first character
            raise FileError(f"{self.path} must be a table; got a model. Name a table; a model comes before it.")
        return format_by_magic(start) or BY_SUFFIX.get(self.path.suffix.lower(), CSV)

    def line(self, row: int) -> int | None:
        """Return the line of a text file, or of a sheet, on which data row `row` (from 0) begins."""
        return line_of_row(records(self.text), row) if self.kind() in (CSV, EXCEL) else None

    def place(self, row: int) -> str:
        """Describe where data row `row` (from 0) is: its line in a text file or sheet, otherwise its number."""
        line = self.line(row)
        return f"row {row + 1}" if line is None else f"{'row' if self.kind() == EXCEL else 'line'} {line}"

    @contextmanager
    def located(self) -> Iterator[None]:
        """Make errors about a row of this table name its line instead."""
        try:
            yield
        except RowError as error:
            where = f"{self.place(int(error.row))} of {self.path}."
            raise FileError(str(error).replace(f"row {error.row}.", where)) from None


def temporary_file() -> Path:
    """Return a new file that is removed when the program ends."""
    descriptor, name = tempfile.mkstemp(prefix="viper-")
    os.close(descriptor)
    atexit.register(Path(name).unlink, missing_ok=True)
    return Path(name)


def readable_table(table: TableFile) -> TableFile:
    """Return the table; if it can be read only once, as standard input (-) and pipes, with its bytes in a file."""
    standard = str(table.path) == "-"
    if not standard:
        check_input(table.path)
        kind = table.path.stat().st_mode
        if stat.S_ISREG(kind):
            return table
        standard = os.path.samestat(table.path.stat(), os.fstat(0))
        if not standard and not stat.S_ISFIFO(kind):
            raise FileError(f"the table must be a file or a pipe; got {table.path}, which is a device or a socket.")
    stored = temporary_file()
    named = replace(table, path=Path("standard input") if standard else table.path, stored=stored)
    if standard and sys.stdin is None:
        raise FileError("the table must be a file or a pipe; got standard input, which is closed.")
    with sys.stdin.buffer if standard else table.path.open("rb") as source, stored.open("wb") as target:
        copy_at_most(source, target, named)
    return named


def copy_at_most(source: BinaryIO, target: BinaryIO, table: TableFile) -> None:
    """Copy all bytes; raises if they fill half of the disk's free space, or the limit that was given."""
    folder = tempfile.gettempdir()
    room = shutil.disk_usage(folder).free // 2
    copied = 0
    while part := source.read(1 << 20):
        copied += len(part)
        if table.most_bytes is not None and copied > table.most_bytes:
            table.refuse_size(copied)
        if copied > room:
            raise FileError(
                f"a stream is kept in {folder} and may take half of the space there; got {table.path}, "
                "which takes more. Set TMPDIR to a folder on a larger disk, or save the stream as a file."
            )
        target.write(part)


def check_input(path: Path) -> None:
    """Raise unless the file exists, can be read and is not empty."""
    if path.is_symlink() and not path.exists():
        raise FileError(f"the file must exist; got {path}, a link that leads nowhere. Name the file itself.")
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


def check_decimals(column: "pandas.Series", table: TableFile) -> None:
    """Raise if the texts are numbers with another decimal mark than the table's."""
    there = column.dropna()
    if not all(isinstance(text, str) for text in there):
        return
    texts = there.unique()
    if table.kind() in (CSV, EXCEL) and decimal_of(table.text) == ",":
        odd = [text for text in texts if "." in text]
        if odd and all(spells_number(text) for text in texts):
            row = int((column == odd[0]).to_numpy().argmax())
            raise FileError(
                f"column {column.name!r} must have decimal commas, as the table has; got {odd[0]!r} in "
                f"{table.place(row)}. Pass --decimal . if it has points."
            )
    commas = [text for text in texts if WITH_COMMA.fullmatch(text)]
    if not commas or len(commas) + sum(WHOLE_NUMBER.fullmatch(text) is not None for text in texts) < len(texts):
        return
    row = int((column == commas[0]).to_numpy().argmax())
    unclear = " Remove the commas if they mark thousands." if all(map(MAYBE_THOUSANDS.fullmatch, commas)) else ""
    raise FileError(
        f"column {column.name!r} must be numbers with a decimal point, or text; got {commas[0]!r} in "
        f"{table.place(row)}. Pass --decimal , if that is a decimal comma, or --category {column.name!r} if the column "
        f"is text.{unclear}"
    )


def spells_number(text: str) -> bool:
    return not math.isnan(spelled_number(text))


def check_numbers(frame: "pandas.DataFrame", table: TableFile, categories: tuple[str, ...] = ()) -> None:
    """Raise if most cells of a text column are numbers; the message names the first that is not, and its line."""
    import numpy as np
    import pandas

    for name, kind in frame.dtypes.items():
        if name in categories or kind.kind in "iufb":
            continue
        column = frame[name]
        if not pandas.api.types.is_string_dtype(column.dtype):
            continue
        check_decimals(column, table)
        numbers = spelled_numbers(column)
        bad = ~np.isfinite(numbers) & column.notna().to_numpy()
        few = len(np.unique(numbers[~bad & ~np.isnan(numbers)])) < FEWEST_NUMBERS
        if few or not bad.any() or bad.sum() > (1 - MOSTLY) * column.notna().sum():
            continue
        row = int(bad.argmax())
        more = f" and {bad.sum() - 1} more cells" if bad.sum() > 1 else ""
        got = shown(column.iloc[row])
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
    except (ValueError, OverflowError) as error:
        raise FileError(f"{path} must be LIBSVM text, 'label index:value …'; got {error}.") from None
    if X.shape[0] * X.shape[1] > MOST_CELLS:
        raise FileError(
            f"a LIBSVM file may have at most {MOST_CELLS:,} cells, including zeros; got {X.shape[0]:,} × "
            f"{X.shape[1]:,}. Fit the sparse matrix in Python, with covariance='low-rank'."
        )
    frame = pandas.DataFrame(X.toarray(), columns=[f"x{j}" for j in range(X.shape[1])])
    if X.shape[1] and X[:, [0]].nnz == 0:  # indices begin at 1
        frame = frame.iloc[:, 1:]
    label = y.astype(int) if (y == y.round()).all() else y
    return frame.assign(y=label)[["y", *frame.columns]]
