"""CSV with its faults: every one is answered with the line it is on."""

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
class Text:
    """A file of separated values, and how to read it.

    Attributes
    ----------
    path : Path
    encoding : str
    separator : str, optional
        By default that of , ; tab and | which is most frequent in the first line.
    decimal : str
    missing : tuple of str
        Cells that mean a missing value, besides the empty one, NA, NaN, null and the like.
    """

    path: Path
    encoding: str = "utf-8"
    separator: str | None = None
    decimal: str = "."
    missing: tuple[str, ...] = ()


def open_text(table: Text) -> IO[str]:
    with table.path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    encoding = "utf-8-sig" if table.encoding.lower().replace("-", "") == "utf8" else table.encoding
    try:
        if compressed:
            return gzip.open(table.path, "rt", encoding=encoding, newline="")
        return table.path.open("r", encoding=encoding, newline="")
    except LookupError:
        raise FileError(f"the encoding must be one that Python knows; got {encoding!r}. Try latin-1.") from None


def separator(table: Text) -> str:
    if table.separator is not None:
        return table.separator
    with open_text(table) as file:
        return likely_separator(file)


def likely_separator(lines: Iterable[str]) -> str:
    """The most frequent mark of the header, of those that are as frequent in the line after it if there are any."""
    header, first = ([*islice(filter(str.strip, lines), 2), "", ""])[:2]
    header, first = (re.sub(r'"[^"]*"', "", line) for line in (header, first))
    marks = [mark for mark in ",;\t|" if 0 < header.count(mark) == first.count(mark)]
    return max(marks or ",;\t|", key=header.count)


def records(table: Text) -> Iterator[tuple[int, list[str]]]:
    """Each record with the number of its last line; blank lines are skipped."""
    mark = separator(table)
    with open_text(table) as file:
        yield from records_of(file, mark)


def records_of(file: Iterable[str], mark: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(file, delimiter=mark)
    yield from ((reader.line_num, fields) for fields in reader if fields)


def line_of(found: Iterator[tuple[int, list[str]]], row: int) -> int | None:
    """The line on which data row `row` (from 0) begins, if it is found; the first record is the header."""
    try:
        last, fields = next(islice(found, row + 1, None))
    except (StopIteration, csv.Error):
        return None
    return last - sum(field.count("\n") for field in fields)


def header(table: Text) -> list[str]:
    """The names of the columns, which must be there and differ; the first row must be as long."""
    rows = records(table)
    names = next(rows, (0, []))[1]
    if not any(name.strip() for name in names):
        raise FileError(f"the file must begin with the names of its columns; got {table.path}, with none.")
    twice = [name for i, name in enumerate(names) if name.strip() and name in names[:i]]
    if twice:
        raise FileError(f"columns must have different names; got {twice[0]!r} twice in {table.path}. Rename one.")
    first = next(rows, None)
    if first is None:
        raise FileError(f"the file must have rows below its header; got {table.path}, with none.")
    if len(first[1]) > len(names):
        ragged(table.path, first[0], len(names), len(first[1]))
    return names


def read_csv(table: Text, rows: int | None, text: tuple[str, ...]) -> Iterator["pandas.DataFrame"]:
    import pandas

    with readable(table):
        names = header(table)
        options: dict[str, Any] = {"sep": separator(table), "decimal": table.decimal, "na_values": list(table.missing)}
        options |= {"dtype": dict.fromkeys(text, str), "low_memory": False, "skipinitialspace": True}
        with open_text(table) as file:
            whole = pandas.read_csv(file, **options, chunksize=rows)
            checked = False
            for part in [whole] if rows is None else whole:
                # a record that is too short lacks its last field
                if not checked and part.iloc[:, -1].isna().any():
                    check_lengths(table, len(names))
                    checked = True
                yield without_row_numbers(part)


def without_row_numbers(frame: "pandas.DataFrame") -> "pandas.DataFrame":
    """Without a first column that has no name: pandas and R write row numbers so."""
    return frame.iloc[:, 1:] if str(frame.columns[0]).startswith("Unnamed: 0") else frame


def check_lengths(table: Text, number: int) -> None:
    for line, fields in records(table):
        if len(fields) != number:
            ragged(table.path, line, number, len(fields))


def ragged(path: Path, line: int, expected: int, got: int) -> NoReturn:
    raise FileError(
        f"every line must have {expected} fields, as the header has; got {got} in line {line} of {path}. "
        "Quote fields that contain the separator."
    )


@contextmanager
def readable(table: Text) -> Iterator[None]:
    """What pandas and Python say of a bad CSV, as one line of ours."""
    import pandas

    try:
        yield
    except UnicodeDecodeError:
        undecodable(table)
    except UnicodeError as error:  # UTF-16 without its mark, for example
        raise FileError(f"{table.path} must be {table.encoding}; got {error}. Name the right --encoding.") from None
    except pandas.errors.ParserError as error:
        found = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
        if found:
            expected, line, got = map(int, found.groups())
            ragged(table.path, line, expected, got)
        reason = str(error).splitlines()[0].removeprefix("Error tokenizing data. C error: ")
        raise FileError(f"{table.path} must be CSV; got {reason}. Check its quotes.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FileError(f"{table.path} must be a whole gzip file; got {error}. Copy it again.") from None
    except csv.Error as error:
        raise FileError(f"{table.path} must be CSV; got {error}. Check its quotes and its --separator.") from None


def undecodable(table: Text) -> NoReturn:
    """Say where the first byte is that is not in the encoding."""
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
    raise FileError(f"{table.path} must be {table.encoding} text; got other bytes. Name the right --encoding.")
