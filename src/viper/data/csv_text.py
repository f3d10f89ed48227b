"""Read CSV files with pandas; error messages name the line."""

import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from viper.errors import FileError

if TYPE_CHECKING:
    import numpy as np
    import pandas

MOST_BYTES = 500_000_000  # most bytes of a table in memory, or MOST_GROWTH times the size of its file if that is more
MOST_GROWTH = 20
MOST_LINE = 1 << 24  # most bytes in a line
SAMPLED_CELLS = 100_000  # cells examined to recognise decimal commas
ABSENT = ("", "NA", "NaN", "nan", "null", "N/A", "#N/A", "None")  # missing values, which say nothing about commas
ROW_NUMBERS = re.compile(r"\s*|Unnamed: 0(\.\d+)?")  # how pandas and R name a first column of row numbers
WITH_COMMA = re.compile(r"\s*[+-]?\d*,\d+(?:[eE][+-]?\d+)?\s*")
WITH_POINT = re.compile(r"\s*[+-]?\d*\.\d+(?:[eE][+-]?\d+)?\s*")
WHOLE_NUMBER = re.compile(r"\s*[+-]?\d+\s*")
MAYBE_THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2},\d{3}\s*")


@dataclass(frozen=True)
class CsvText:
    """A file of separated values, and how to read it.

    `path` is the name that the user gave. If it can be read only once, the bytes are in `stored`.
    """

    path: Path
    encoding: str = "utf-8"
    separator: str | None = None  # None: the most likely one of , ; tab and |
    decimal: str | None = None  # None: a comma where the cells show it, otherwise a point
    missing: tuple[str, ...] = ()  # cells that mean a missing value, besides empty ones, NA, NaN and null
    multiline: bool = field(default=False, kw_only=True)  # whether cells in quotes may span lines
    most_bytes: int | None = field(default=None, kw_only=True)
    stored: Path | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, mark in (("separator", self.separator), ("decimal", self.decimal)):
            if mark is not None and (len(mark) != 1 or mark in '"\r\n\0'):
                raise FileError(f"the {name} must be one character; got {mark!r}. Write --{name} ',' or ';'.")
        if self.separator is not None and self.separator == self.decimal and self.separator != ",":
            raise FileError(f"the separator and the decimal mark must differ; got {self.decimal!r} as both.")

    @property
    def source(self) -> Path:
        """The file that holds the bytes."""
        return self.stored or self.path

    @property
    def limit(self) -> int:
        """The most bytes that the table may take in memory."""
        return self.most_bytes or max(MOST_BYTES, MOST_GROWTH * self.source.stat().st_size)

    def refuse_size(self, size: float) -> NoReturn:
        raise FileError(
            f"a table may take at most {in_gigabytes(self.limit)} in memory; got {self.path}, which takes "
            f"{in_gigabytes(size)} or more. Pass --max-gb {max(1, -(-int(size) // 10**9))} if it is meant to."
        )


def in_gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


class BoundedBytes(io.BufferedIOBase):
    """The bytes of a file as they are decompressed. Raises if there are too many, or a line is too long."""

    def __init__(self, file: Any, table: CsvText) -> None:
        self.file, self.table, self.limit = file, table, table.limit
        self.longest = table.most_bytes or MOST_LINE
        self.total = self.line = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            return b"".join(iter(lambda: self.read(1 << 20), b""))
        return self.checked(self.file.read, size)

    def read1(self, size: int = -1) -> bytes:
        return self.checked(self.file.read1, size if size > 0 else 1 << 16)

    def checked(self, read: Callable[[int], bytes], size: int) -> bytes:
        try:
            part = read(size)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise FileError(f"{self.table.path} must be a complete gzip file; got {error}. Copy it again.") from None
        self.total += len(part)
        end = max(part.rfind(b"\n"), part.rfind(b"\r"))
        self.line = self.line + len(part) if end < 0 else len(part) - end - 1
        if self.total > self.limit:
            self.table.refuse_size(self.total)
        if self.line > self.longest:
            raise FileError(
                f"a line of a table may have at most {self.longest / 1e6:,.0f} MB; got a longer one in "
                f"{self.table.path}. Check the file, or pass --max-gb 1 if it is meant to."
            )
        return part

    def close(self) -> None:
        self.file.close()
        super().close()


def open_bytes(table: CsvText) -> BoundedBytes:
    """Open the bytes, decompressed if they are gzip."""
    return BoundedBytes(gzip.open(table.source) if is_gzip(table.source) else table.source.open("rb"), table)


def open_text(table: CsvText) -> IO[str]:
    """Open the text, decompressed if it is gzip."""
    encoding = "utf-8-sig" if table.encoding.lower().replace("-", "") == "utf8" else table.encoding
    try:
        return io.TextIOWrapper(open_bytes(table), encoding=encoding, newline="")  # type: ignore[type-var]
    except LookupError:
        raise FileError(f"the encoding must be one that Python knows; got {encoding!r}. Try latin-1.") from None


def is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def separator_of(table: CsvText) -> str:
    if table.separator is not None:
        return table.separator
    with open_text(table) as file:
        return likely_separator(file)


def decimal_of(table: CsvText) -> str:
    """Return the decimal mark: the given one, or a comma if the file shows it.

    A file shows it if commas do not separate its cells and, in its first rows, a column has only whole numbers and
    numbers with a comma, some of which cannot be thousands, and no column has numbers with a point.
    """
    if table.decimal is not None:
        return table.decimal
    return "," if separator_of(table) != "," and shows_commas(records(table), table.missing) else "."


def shows_commas(rows: Iterable[tuple[int, list[str]]], missing: tuple[str, ...]) -> bool:
    found, cells = [], 0
    for _, fields in islice(rows, 1, None):
        found.append(fields)
        cells += len(fields)
        if cells > SAMPLED_CELLS:
            break
    absent = {*ABSENT, *missing}
    commas = False
    for column in zip(*found, strict=False):
        values = [cell for cell in column if cell.strip() not in absent]
        whole = [cell for cell in values if WHOLE_NUMBER.fullmatch(cell)]
        with_comma = [cell for cell in values if WITH_COMMA.fullmatch(cell)]
        with_point = [cell for cell in values if WITH_POINT.fullmatch(cell)]
        if with_point and len(with_point) + len(whole) == len(values):
            return False
        if with_comma and len(with_comma) + len(whole) == len(values):
            commas = commas or not all(MAYBE_THOUSANDS.fullmatch(cell) for cell in with_comma)
    return commas


def likely_separator(lines: Iterable[str]) -> str:
    """Return the most frequent separator in the header, preferring one that is as frequent in the next line."""
    header, first = ([*islice(filter(str.strip, lines), 2), "", ""])[:2]
    header, first = (re.sub(r'"[^"]*"', "", line) for line in (header, first))
    marks = [mark for mark in ",;\t|" if 0 < header.count(mark) == first.count(mark)]
    return max(marks or ",;\t|", key=header.count)


def shown_separator(table: CsvText, known: str | None) -> str | None:
    """Return the separator of another file if it is unusual and in the first line; None means to detect one."""
    if known is None or known in ",;\t|":
        return None
    with open_text(table) as file:
        return known if known in next(filter(str.strip, file), "") else None


def shown_encoding(table: CsvText, known: str) -> str:
    """Return the encoding of another file, or UTF-8 if this file has letters beyond ASCII that are valid in it."""
    if "utf" in known.lower():
        return known
    with open_bytes(table) as file:
        start = file.read(1 << 20)
    text = start.decode("utf-8", errors="replace").rstrip("\ufffd")  # the last character may be cut
    return known if start.isascii() or "\ufffd" in text else "utf-8"


def shown_decimal(table: CsvText, known: str) -> str:
    """Return the decimal mark of another file, or the one that this file shows; 1.500 may be thousands."""
    if known == ".":
        return decimal_of(replace(table, decimal=None))
    cells = [cell for _, fields in islice(records(table), 1, 1001) for cell in fields]
    points = any(re.fullmatch(r"[-+]?\d+\.\d+", cell) and not re.fullmatch(r".*\.\d{3}", cell) for cell in cells)
    return "." if points and not any(re.fullmatch(r"[-+]?\d+,\d+", cell) for cell in cells) else known


def records(table: CsvText) -> Iterator[tuple[int, list[str]]]:
    """Yield each record with the number of the line on which it begins; blank lines are skipped."""
    mark = separator_of(table)
    with open_text(table) as file:
        yield from parsed_records(file, mark, table.path)


def parsed_records(file: Iterable[str], mark: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the records of an open file likewise. Raises FileError if it is not CSV, as with a very long cell."""
    reader, line = csv.reader(file, delimiter=mark), 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise FileError(
            f"{path} must be CSV; got {error} in line {line}. Check its quotes and its separator."
        ) from None


def line_of_row(found: Iterator[tuple[int, list[str]]], row: int) -> int | None:
    """Return the line on which data row `row` (from 0) begins, or None; the first record is the header."""
    try:
        return next(islice(found, row + 1, None))[0]
    except (StopIteration, FileError):
        return None


def read_header(table: CsvText) -> list[str]:
    """Return the column names. Raises unless they exist, differ, and match the number of fields in the first row."""
    rows = records(table)
    names = next(rows, (0, []))[1]
    if not any(name.strip() for name in names):
        raise FileError(f"the file must begin with the names of its columns; got {table.path}, which has none.")
    check_distinct_names(names, table.path)
    if not table.multiline and any("\n" in name or "\r" in name for name in names):
        refuse_line_break(table.path, "a name", 1)
    first = next(rows, None)
    if first is None:
        raise FileError(f"the file must have rows below its header; got {table.path}, which has none.")
    if len(first[1]) > len(names):
        refuse_ragged(table.path, f"line {first[0]}", len(names), len(first[1]))
    return names


def check_distinct_names(names: Iterable[str], path: Path) -> None:
    """Raise unless the names differ; several columns may have no name."""
    there: set[str] = set()
    for name in names:
        if name.strip() and name in there:
            raise FileError(f"columns must have different names; got {name!r} twice in {path}. Rename one.")
        there.add(name)


def row_number_column(table: CsvText) -> str | None:
    """Return the name of a first column to leave out, because it holds row numbers as pandas and R write them."""
    first = read_header(table)[0]
    return first if ROW_NUMBERS.fullmatch(first) else None


def read_csv(table: CsvText, rows: int | None, text: tuple[str, ...]) -> Iterator["pandas.DataFrame"]:
    """Yield the rows in frames of at most `rows`, or in one; the columns in `text` are not converted to numbers."""
    import pandas

    with worded_csv_errors(table):
        names = read_header(table)
        numbered = ROW_NUMBERS.fullmatch(names[0])
        options: dict[str, Any] = {"sep": separator_of(table), "decimal": decimal_of(table), "skipinitialspace": True}
        options |= {"dtype": dict.fromkeys(text, str), "na_values": list(table.missing), "low_memory": False}
        with open_text(table) as file:
            whole = pandas.read_csv(file, **options, chunksize=rows)
            checked, start = False, 0
            for part in [whole] if rows is None else whole:
                # in a line that is too short, the last field is missing
                if not checked and part.iloc[:, -1].isna().any():
                    check_lengths(table, len(names))
                    checked = True
                if not table.multiline and (found := line_break_in(part)) is not None:
                    name, row = found
                    refuse_line_break(table.path, f"one in column {name!r}", line_of_row(records(table), start + row))
                start += len(part)
                yield part.iloc[:, 1:] if numbered else part


def line_break_in(frame: "pandas.DataFrame") -> tuple[str, int] | None:
    """Return the column and the row of the first cell that spans lines, or None."""
    from pandas.api import types

    for i, kind in enumerate(frame.dtypes):
        if types.is_object_dtype(kind) or types.is_string_dtype(kind):
            found = frame.iloc[:, i].astype("str").str.contains("[\r\n]", na=False).to_numpy(dtype=bool)
            if found.any():
                return str(frame.columns[i]), int(found.argmax())
    return None


def refuse_line_break(path: Path, what: str, line: int | None, fix: str = "pass --multiline") -> NoReturn:
    raise FileError(
        f"a cell must not span lines; got {what}, which begins in line {line} of {path}. Correct its quotes, or {fix} "
        "if cells span lines."
    )


def check_lengths(table: CsvText, count: int) -> None:
    """Raise unless every line has `count` fields."""
    for line, fields in records(table):
        if len(fields) != count:
            if not table.multiline and any("\n" in field for field in fields):
                refuse_line_break(table.path, "one", line)
            refuse_ragged(table.path, f"line {line}", count, len(fields))


def refuse_ragged(path: Path, where: str, expected: int, got: int) -> NoReturn:
    raise FileError(
        f"every line must have {expected} fields, like the header; got {got} in {where} of {path}. "
        "Quote fields that contain the separator."
    )


def spelled_number(text: Any) -> float:
    """Return the number that a text spells, infinity if it is too large, or NaN if it is not a number."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return math.nan
    except OverflowError:
        return math.inf


def spelled_numbers(column: "pandas.Series[Any]") -> "np.ndarray":
    """Apply `spelled_number` to all cells of a column."""
    import pandas

    try:
        numbers = pandas.to_numeric(column, errors="coerce")
    except OverflowError:  # an integer of about 1e308 or more
        numbers = column.map(spelled_number)
    return numbers.to_numpy(dtype=float, na_value=math.nan)


@contextmanager
def worded_csv_errors(table: CsvText) -> Iterator[None]:
    """Turn what pandas and Python raise for a bad CSV file into a FileError."""
    import pandas

    try:
        yield
    except UnicodeDecodeError:
        refuse_undecodable(table)
    except UnicodeError as error:  # such as UTF-16 without its byte-order mark
        raise FileError(f"{table.path} must be {table.encoding}; got {error}. Pass the right --encoding.") from None
    except pandas.errors.ParserError as error:
        found = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
        if found:
            expected, line, got = map(int, found.groups())
            refuse_ragged(table.path, f"line {line}", expected, got)
        if "EOF inside string" in str(error):
            line = max(line for line, _ in records(table))
            raise FileError(
                f"quotes must be closed; got one that is not, in the row that begins in line {line} of {table.path}. "
                "Close it, or remove it."
            ) from None
        reason = str(error).splitlines()[0].removeprefix("Error tokenizing data. C error: ")
        raise FileError(f"{table.path} must be CSV; got {reason}. Check its quotes.") from None


def refuse_undecodable(table: CsvText) -> NoReturn:
    """Raise with the position of the first byte that is not in the encoding."""
    at = 0
    with open_bytes(table) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode(table.encoding)
            except UnicodeDecodeError as error:
                utf16 = at == 0 and line[:2] in (b"\xff\xfe", b"\xfe\xff")
                raise FileError(
                    f"{table.path} must be {table.encoding} text; got byte 0x{line[error.start]:02x} at position "
                    f"{at + error.start}, in line {number}. Pass --encoding {'utf-16' if utf16 else 'latin-1'} if it "
                    "is that."
                ) from None
            at += len(line)
    raise FileError(f"{table.path} must be {table.encoding} text; got other bytes. Pass the right --encoding.")
