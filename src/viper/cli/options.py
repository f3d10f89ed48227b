"""Options that several commands share."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from viper.data.table_file import TableFile


class Missing(StrEnum):
    """What becomes of rows with missing values."""

    error = "error"
    drop = "drop"
    mean = "mean"


class Format(StrEnum):
    """Of a table."""

    csv = "csv"
    parquet = "parquet"
    arrow = "arrow"
    libsvm = "libsvm"


Data = Annotated[Path, typer.Argument(help="Table: CSV (also .gz), Parquet, Arrow or LIBSVM.", show_default=False)]
Model = Annotated[Path, typer.Argument(help="Model written by `viper fit` or `model.save`.", show_default=False)]
Target = Annotated[str, typer.Option("--target", "-t", help="Column with the two classes.", show_default=False)]
Level = Annotated[float, typer.Option(help="Mass of the credible intervals.", min=0.001, max=0.999999)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Force = Annotated[bool, typer.Option("--force", "--overwrite", "-f", help="Replace the output if it exists.")]
Seed = Annotated[int, typer.Option(help="Of folds and random numbers.")]

READING = "Reading"
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="Of the table, if its name does not tell.", rich_help_panel=READING)
]
Encoding = Annotated[str, typer.Option("--encoding", help="Of a CSV, such as latin-1.", rich_help_panel=READING)]
Separator = Annotated[
    str | None, typer.Option("--separator", help="Of a CSV; found if not given.", rich_help_panel=READING)
]
Decimal = Annotated[str, typer.Option("--decimal", help="Decimal point of a CSV.", rich_help_panel=READING)]
Na = Annotated[
    list[str] | None,
    typer.Option("--na", help="Cell that means missing, besides the empty one and NA.", rich_help_panel=READING),
]


def table(
    path: Path,
    format: Format | None,
    encoding: str,
    separator: str | None,
    decimal: str,
    na: list[str] | None,
) -> "TableFile":
    """The file at `path`, with the options for reading it."""
    from viper.data.table_file import TableFile, check_input

    check_input(path)
    if separator is not None:
        separator = {"\\t": "\t", "tab": "\t"}.get(separator, separator)
    return TableFile(path, encoding, separator, decimal, tuple(na or ()), None if format is None else format.value)
