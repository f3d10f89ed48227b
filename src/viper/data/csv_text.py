"""Read CSV files with pandas; error messages name the line."""

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from viper.errors import FileError

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class CsvText:
    """A file of separated values, and how to read it."""

    path: Path
    encoding: str = "utf-8"
    separator: str | None = None  # None: the most likely one of , ; tab and |
    decimal: str = "."
    missing: tuple[str, ...] = ()  # other cells that mean a missing value, besides empty ones, NA, NaN and null


def open_text(table: CsvText) -> IO[str]:
    """Open the text, decompressed if it is gzip."""
    compressed = is_gzip(table.path)
    encoding = "utf-8-sig" if table.encoding.lower().replace("-", "") == "utf8" else table.encoding
    try:
        if compressed:
            return gzip.open(table.path, "rt", encoding=encoding, newline="")
        return table.path.open("r", encoding=encoding, newline="")
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


def likely_separator(lines: Iterable[str]) -> str:
    """Return the most frequent separator in the header, preferring one that is as frequent in the next line."""
    header, first = ([*islice(filter(str.strip, lines), 2), "", ""])[:2]
    header, first = (re.sub(r'"[^"]*"', "", line) for line in (header, first))
    marks = [mark for mark in ",;\t|" if 0 < header.count(mark) == first.count(mark)]
    return max(marks or ",;\t|", key=header.count)


def shown_separator(table: CsvText, known: str | None) -> str | None:
    """Return an unusual separator of another file if the first line has it; None means to detect one."""
    if known is None or known in ",;\t|":
        return None
    with open_text(table) as file:
        return known if known in next(filter(str.strip, file), "") else None


def shown_encoding(table: CsvText, known: str) -> str:
    """Return the encoding of another file, or UTF-8 if this one is evidently that: letters beyond ASCII decode so."""
    if "utf" in known.lower():
        return known
    opener: Callable[..., Any] = gzip.open if is_gzip(table.path) else open
    with opener(table.path, "rb") as file:
        start = file.read(1 << 20)
    text = start.decode("utf-8", errors="replace").rstrip("\ufffd")  # the last character may be cut
    return known if start.isascii() or "\ufffd" in text else "utf-8"


def shown_decimal(table: CsvText, known: str) -> str:
    """Return the decimal separator of another file, or the other one if this file has numbers with that one only."""
    other = "." if known == "," else ","
    counts = dict.fromkeys((known, other), 0)
    mark = separator_of(table)
    for _, fields in islice(records(table), 1, 1001):
        for field in fields:
            found = re.fullmatch(r"\s*[-+]?\d+([.,])\d+\s*", field)
            if found and found[1] != mark:
                counts[found[1]] = counts.get(found[1], 0) + 1
    return other if counts[other] and not counts[known] else known


def records(table: CsvText) -> Iterator[tuple[int, list[str]]]:
    """Yield each record with the number of its last line; blank lines are skipped."""
    mark = separator_of(table)
    with open_text(table) as file:
        yield from parsed_records(file, mark)


def parsed_records(file: Iterable[str], mark: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(file, delimiter=mark)
    yield from ((reader.line_num, fields) for fields in reader if fields)


def line_of_row(found: Iterator[tuple[int, list[str]]], row: int) -> int | None:
    """Return the line on which data row `row` (from 0) begins, or None; the first record is the header."""
    try:
        last, fields = next(islice(found, row + 1, None))
    except (StopIteration, csv.Error):
        return None
    return last - sum(field.count("\n") for field in fields)


def read_header(table: CsvText) -> list[str]:
    """Return the column names. Raises unless they exist, differ, and match the number of fields in the first row."""
    rows = records(table)
    names = next(rows, (0, []))[1]
    if not any(name.strip() for name in names):
        raise FileError(f"the file must begin with the names of its columns; got {table.path}, which has none.")
    twice = [name for i, name in enumerate(names) if name.strip() and name in names[:i]]
    if twice:
        raise FileError(f"columns must have different names; got {twice[0]!r} twice in {table.path}. Rename one.")
    first = next(rows, None)
    if first is None:
        raise FileError(f"the file must have rows below its header; got {table.path}, which has none.")
    if len(first[1]) > len(names):
        refuse_ragged(table.path, f"line {first[0]}", len(names), len(first[1]))
    return names


def read_csv(table: CsvText, rows: int | None, text: tuple[str, ...]) -> Iterator["pandas.DataFrame"]:
    """Yield the rows in frames of at most `rows`, or in one; the columns in `text` are not converted to numbers."""
    import pandas

    with worded_csv_errors(table):
        names = read_header(table)
        options: dict[str, Any] = {"sep": separator_of(table), "decimal": table.decimal, "skipinitialspace": True}
        options |= {"dtype": dict.fromkeys(text, str), "na_values": list(table.missing), "low_memory": False}
        with open_text(table) as file:
            whole = pandas.read_csv(file, **options, chunksize=rows)
            checked = False
            for part in [whole] if rows is None else whole:
                # in a line that is too short, the last field is missing
                if not checked and part.iloc[:, -1].isna().any():
                    check_lengths(table, len(names))
                    checked = True
                # an unnamed first column is how pandas and R write row numbers
                yield part.iloc[:, 1:] if str(part.columns[0]).startswith("Unnamed: 0") else part


def check_lengths(table: CsvText, count: int) -> None:
    """Raise unless every line has `count` fields."""
    for line, fields in records(table):
        if len(fields) != count:
            refuse_ragged(table.path, f"line {line}", count, len(fields))


def refuse_ragged(path: Path, where: str, expected: int, got: int) -> NoReturn:
    raise FileError(
        f"every line must have {expected} fields, like the header; got {got} in {where} of {path}. "
        "Quote fields that contain the separator."
    )


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
        reason = str(error).splitlines()[0].removeprefix("Error tokenizing data. C error: ")
        raise FileError(f"{table.path} must be CSV; got {reason}. Check its quotes.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FileError(f"{table.path} must be a complete gzip file; got {error}. Copy it again.") from None
    except csv.Error as error:
        raise FileError(f"{table.path} must be CSV; got {error}. Check its quotes and its --separator.") from None


def refuse_undecodable(table: CsvText) -> NoReturn:
    """Raise with the position of the first byte that is not in the encoding."""
    opener: Callable[..., Any] = gzip.open if table.path.suffix == ".gz" else open
    at = 0
    with opener(table.path, "rb") as file:
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
