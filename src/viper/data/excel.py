"""Write a sheet of an Excel workbook as separated values, so that it can be read like any other text."""

import csv
import struct
import zipfile
import zlib
from collections.abc import Iterator
from datetime import date, datetime, time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viper.errors import FileError, instead, listed

if TYPE_CHECKING:
    from viper.data.csv_text import CsvText

# What zipfile and openpyxl raise for damaged and encrypted workbooks; openpyxl does not validate what it reads. The
# XML parser, which is lxml if that is installed, raises a SyntaxError.
DAMAGE: tuple[type[Exception], ...] = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, SyntaxError, LookupError, ValueError, TypeError),
    *(AttributeError, RuntimeError, ArithmeticError, AssertionError),
)


def write_sheet(table: "CsvText", sheet: str | None, target: Path, separator: str, decimal: str) -> None:
    """Write the cells of a sheet as text; line i is row i of the sheet. Formulas become the values last saved."""
    openpyxl = import_openpyxl()
    try:
        check_unpacked(table)
        with table.source.open("rb") as file:
            book = openpyxl.load_workbook(file, read_only=True, data_only=True)
            cells = chosen_sheet(book, sheet, table.path).iter_rows(values_only=True)
            with target.open("w", encoding="utf-8", newline="") as out:
                write = csv.writer(out, delimiter=separator, lineterminator="\n").writerow
                for row in with_same_width(cells, table.path):
                    write([text_of_cell(cell, decimal) for cell in row])
    except FileError:
        raise
    except DAMAGE as error:
        reason = (str(error).splitlines() or ["damage"])[0].strip("'\". ")
        raise FileError(
            f"{table.path} must be an Excel workbook; got a zip archive or a damaged file: {reason}. Save the table as "
            ".xlsx or CSV."
        ) from None


def import_openpyxl() -> Any:
    try:
        import openpyxl
    except ImportError:
        raise ImportError(
            "reading Excel files needs openpyxl. Run: pip install 'vi-per[excel]', or save the table as CSV"
        ) from None
    return openpyxl


def check_unpacked(table: "CsvText") -> None:
    with zipfile.ZipFile(table.source) as archive:
        size = sum(one.file_size for one in archive.infolist())
    if size > table.limit:
        table.refuse_size(size)


def sheet_names(path: Path) -> list[str]:
    """Return the names of the sheets of a workbook."""
    book = import_openpyxl().load_workbook(path, read_only=True)
    names = list(book.sheetnames)
    book.close()
    return names


def chosen_sheet(book: Any, sheet: str | None, path: Path) -> Any:
    """Return a sheet by its name or number, counted from 1; by default the first."""
    names = list(book.sheetnames)
    if sheet is None or sheet in names:
        return book[sheet or names[0]]
    if sheet.isdecimal() and 1 <= int(sheet) <= len(names):
        return book[names[int(sheet) - 1]]
    hint = instead(sheet, names) if not sheet.isdecimal() else f"Choose one of {listed(names)}."
    raise FileError(f"--sheet must be a sheet of {path}, or its number; got {sheet!r}. {hint}")


def with_same_width(rows: Iterator[tuple[Any, ...]], path: Path) -> Iterator[list[Any]]:
    """Yield every row with as many cells as the first that is not empty; empty rows stay empty."""
    width = 0
    for number, row in enumerate(rows, 1):
        cells = list(row)
        while cells and cells[-1] in (None, ""):
            cells.pop()
        width = width or len(cells)
        if len(cells) > width:
            raise FileError(
                f"every row must have {width} cells, like the header; got {len(cells)} in row {number} of {path}. "
                "Name every column, and remove cells beside the table."
            )
        yield [] if not cells else cells + [None] * (width - len(cells))


def text_of_cell(value: Any, decimal: str) -> str:
    """Return the content of a cell as text, with dates in ISO 8601."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return str(value.date()) if value.time() == time() else value.isoformat(sep=" ")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, float):
        return repr(value).removesuffix(".0").replace(".", decimal)
    return " ".join(str(value).splitlines())
