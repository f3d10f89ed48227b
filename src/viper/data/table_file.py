"""Tables on disk: CSV (also .gz), Parquet, Arrow and LIBSVM, with complaints that name file, line and cell.

Nothing here imports torch, so that a wrong file name is answered at once.
"""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viper.data.arrow import ipc_batches, open_ipc
from viper.data.csv_text import Text, line_of, read_csv, records
from viper.errors import FileError, RowError

if TYPE_CHECKING:
    import pandas

SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}
SUFFIXES |= {".libsvm": "libsvm", ".svm": "libsvm", ".svmlight": "libsvm"}
MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow"}
FORMATS = ("csv", "parquet", "arrow", "libsvm")
MOST_CELLS = 200_000_000  # of a LIBSVM file made dense: 1.6 GB
MOSTLY = 0.8  # share of numbers from which a column of text is taken for numbers with mistakes
FEWEST_NUMBERS = 5  # different ones among them; fewer are codes, like 0, 1, 2, 3+


@dataclass(frozen=True)
class Table(Text):
    """A file that holds a table; its format is what its name's ending and its first bytes say, unless it is given."""

    format: str | None = None

    def read(self, text: tuple[str, ...] = ()) -> "pandas.DataFrame":
        """All rows; the columns in `text` are not made numbers."""
        import pandas

        parts = list(self.chunks(None, text))
        return parts[0] if len(parts) == 1 else pandas.concat(parts, ignore_index=True)

    def chunks(self, rows: int | None, text: tuple[str, ...] = ()) -> Iterator["pandas.DataFrame"]:
        """The rows in parts of at most `rows`."""
        kind = self.kind()
        if kind == "csv":
            yield from read_csv(self, rows, text)
        elif kind == "libsvm":
            yield read_libsvm(self.path)
        else:
            yield from read_arrow(self.path, kind, rows)

    def kind(self) -> str:
        """The format, once it is clear that the file is there and not empty."""
        check_input(self.path)
        if self.format is not None:
            return self.format
        with self.path.open("rb") as file:
            start = file.read(6)
        if start.startswith(b"PK\x03\x04"):
            raise FileError(f"{self.path} must be a table; got a spreadsheet or zip archive. Save it as CSV.")
        known = (name for magic, name in MAGIC.items() if start.startswith(magic))
        return next(known, SUFFIXES.get(self.path.suffix.lower(), "csv"))

    def line(self, row: int) -> int | None:
        """The line of the file on which data row `row` (from 0) begins, if it is text."""
        return line_of(records(self), row) if self.kind() == "csv" else None

    @contextmanager
    def located(self) -> Iterator[None]:
        """Errors about a row of this table name its line instead."""
        try:
            yield
        except RowError as error:
            line = self.line(int(error.row))
            where = f"row {int(error.row) + 1}" if line is None else f"line {line}"
            raise FileError(str(error).replace(f"row {error.row}.", f"{where} of {self.path}.")) from None


def check_input(path: Path) -> None:
    """A file that exists, can be read and is not empty."""
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


def check_numbers(frame: "pandas.DataFrame", table: Table, categories: tuple[str, ...] = ()) -> None:
    """A column of text of which most cells are numbers is a mistake: say which cell is not, and where."""
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
        line = table.line(row)
        where = f"row {row + 1}" if line is None else f"line {line}"
        more = f" and {bad.sum() - 1} more cells" if bad.sum() > 1 else ""
        raise FileError(
            f"column {name!r} must be numeric, as most of it is; got {column.iloc[row]!r} in {where}{more}. Correct "
            f"it, pass --na {column.iloc[row]!r} if that means missing, or --category {name!r} if the column is text."
        )


# --- other formats ---


def read_arrow(path: Path, kind: str, rows: int | None) -> Iterator["pandas.DataFrame"]:
    """Parquet and Arrow, through pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise FileError(f"{path} needs pyarrow, which is not there. Run: pip install 'vi-per[arrow]'") from None
    try:
        if kind == "parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                batches = file.iter_batches(rows or 1 << 20)
                yield from whole_or_parts(batches, file.schema_arrow, rows)
        else:
            with pyarrow.memory_map(str(path)) as source:
                file = open_ipc(source)
                yield from whole_or_parts(ipc_batches(file), file.schema, rows)
    except pyarrow.ArrowException as error:
        raise FileError(
            f"{path} must be a table in the format {kind}; got {str(error).splitlines()[0]}. Write it again."
        ) from None


def whole_or_parts(batches: Iterator[Any], schema: Any, rows: int | None) -> Iterator["pandas.DataFrame"]:
    import pyarrow

    if rows is None:
        yield pyarrow.Table.from_batches(batches, schema).to_pandas()
    else:
        yield from (batch.to_pandas() for batch in batches)


def read_libsvm(path: Path) -> "pandas.DataFrame":
    """The label as column y, and feature j as column xj."""
    import pandas
    from sklearn.datasets import load_svmlight_file

    try:
        X, y = load_svmlight_file(str(path), zero_based=True)
    except ValueError as error:
        raise FileError(f"{path} must be LIBSVM text, 'label index:value …'; got {error}.") from None
    if X.shape[0] * X.shape[1] > MOST_CELLS:
        raise FileError(
            f"a LIBSVM file may have {MOST_CELLS:,} cells here, zeros included; got {X.shape[0]:,} × {X.shape[1]:,}. "
            "Fit the sparse matrix in Python, with covariance='diagonal'."
        )
    frame = pandas.DataFrame(X.toarray(), columns=[f"x{j}" for j in range(X.shape[1])])
    if X.shape[1] and X[:, [0]].nnz == 0:  # indices begin at 1
        frame = frame.iloc[:, 1:]
    label = y.astype(int) if (y == y.round()).all() else y
    return frame.assign(y=label)[["y", *frame.columns]]
