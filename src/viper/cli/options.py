"""Options that several commands share, and how a command opens its files."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from viper.cli.terminal import note

if TYPE_CHECKING:
    from viper.data.table_file import TableFile
    from viper.formula.training import TrainingFile

MissingRule = StrEnum("MissingRule", ["error", "drop", "mean", "indicator", "multiple"])
UnseenRule = StrEnum("UnseenRule", ["error", "missing", "baseline"])
BeyondRule = StrEnum("BeyondRule", ["refuse", "clamp"])
FormatWord = StrEnum("FormatWord", ["csv", "parquet", "arrow", "excel", "libsvm"])


def optional(text: str, *names: str, **settings: Any) -> Any:
    """Return an option whose help text describes its default, if it has one."""
    return typer.Option(*names, help=text, show_default=False, **settings)


TablePath = Annotated[
    Path, typer.Argument(help="Table to read: CSV (also .gz), Parquet, Arrow, Excel or LIBSVM; - is standard input.")
]
ModelPath = Annotated[Path, typer.Argument(help="Model file written by `viper fit` or `model.save`.")]
Target = Annotated[
    str | None,
    optional("Column to predict. (default: from --formula; y in a LIBSVM file)", "--target", "-t"),
]
KnownTarget = Annotated[
    str | None, optional("Column with the observed classes. (default: the model's target)", "--target", "-t")
]
FormulaText = Annotated[
    str | None, optional('Terms of the model, such as "y ~ age + C(ward) + x1:x2". (default: all usable columns)')
]
Ordered = Annotated[
    bool,
    typer.Option(
        "--ordered",
        help="Treat the classes as levels in order, such as 1, 2, 3: ordinal regression (proportional odds).",
    ),
]
Levels = Annotated[
    str | None,
    optional(
        "Levels of an --ordered target from the lowest to the highest, such as low,medium,high. (default: numeric "
        "order)"
    ),
]
RULES = (
    "error refuses them, drop leaves out rows that have any, mean fills in means and most common levels, indicator "
    "also adds columns that say where, multiple draws them from the other columns several times"
)
Missing = Annotated[MissingRule, typer.Option(help=f"How to treat missing values: {RULES}.")]
Imputations = Annotated[
    int, typer.Option(help="For --missing multiple: how many times to draw all missing values.", min=2)
]
Sweeps = Annotated[int, typer.Option(help="For --missing multiple: passes over the columns before each draw.", min=1)]
Drop = Annotated[list[str] | None, optional("Column to leave out. Repeat for more columns.")]
Category = Annotated[
    list[str] | None,
    optional("Column of numbers, or of text with many levels, to treat as categorical. Repeat for more columns."),
]
Positive = Annotated[
    str | None,
    optional(
        "Class whose probability is modelled. (default: the last one, in the order of categories, or otherwise in "
        "numeric or alphabetical order)"
    ),
]
UNSEEN = (
    "How predictions treat a level that is not in the training data: error leaves the row without a prediction, "
    "missing treats the value as missing, baseline as the reference level"
)
BEYOND = (
    "How predictions treat a number beyond the range of a spline: refuse leaves the row without a prediction, clamp "
    "uses the end of the range"
)
Unseen = Annotated[UnseenRule, typer.Option(help=f"{UNSEEN}.")]
Beyond = Annotated[BeyondRule, typer.Option(help=f"{BEYOND}.")]
UnseenOverride = Annotated[UnseenRule | None, optional(f"{UNSEEN}. (default: as in the fit)")]
BeyondOverride = Annotated[BeyondRule | None, optional(f"{BEYOND}. (default: as in the fit)")]
TableOut = Annotated[
    Path, typer.Option("--out", "-o", help="CSV (also .gz) or Parquet file to write; - is standard output.")
]
Keep = Annotated[list[str] | None, optional("Column to copy into the output. Repeat for more.")]
SafeCells = Annotated[
    bool,
    typer.Option(
        "--safe-cells",
        help="Put an apostrophe before text that a spreadsheet would run as a formula: cells that begin with = + - @.",
    ),
]
Level = Annotated[
    float,
    typer.Option("--level", "--interval", help="Posterior probability of credible intervals.", min=0.001, max=0.999999),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", "--overwrite", "-f", help="Replace the output file if it exists.")]
Seed = Annotated[
    int, typer.Option(help="Seed of the random numbers and of the split into folds.", min=0, max=2**32 - 1)
]
INCOMPLETE = 5  # exit code: the output is complete, but some rows have no prediction
READING = {"rich_help_panel": "Reading the table"}


@dataclass(frozen=True)
class Reading:
    """How to read a table: the options of every command that reads one."""

    format: Annotated[
        FormatWord | None, optional("Format of the table. (default: from its name and first bytes)", **READING)
    ] = None
    encoding: Annotated[
        str | None, optional("Encoding of a CSV file, such as latin-1. (default: as in the fit, or utf-8)", **READING)
    ] = None
    separator: Annotated[
        str | None, optional("Separator of a CSV file's fields. (default: detected from its first line)", **READING)
    ] = None
    decimal: Annotated[
        str | None,
        optional("Decimal separator of a CSV file. (default: as in the fit, or detected from its cells)", **READING),
    ] = None
    na: Annotated[
        list[str] | None,
        optional(
            "Text for a missing value, besides an empty cell and NA. Repeat for more. (default: as in the fit)",
            **READING,
        ),
    ] = None

    sheet: Annotated[str | None, optional("Sheet of an Excel file: its name or number. (default: 1)", **READING)] = None
    multiline: Annotated[
        bool, typer.Option("--multiline", help="Allow quoted cells of a CSV file to span lines.", **READING)
    ] = False
    max_gb: Annotated[
        float | None,
        optional(
            "Most memory for the table, in gigabytes. (default: 0.5, or 20 times the file's size if that is more)",
            min=0.001,
            **READING,
        ),
    ] = None

    def table(self, path: Path) -> "TableFile":
        """Return the table at `path`; raises FileError if there is no such file. A stream is copied to a file first."""
        from viper.data.table_file import TableFile, readable_table

        separator = {"\\t": "\t", "tab": "\t"}.get(self.separator or "", self.separator)
        form = None if self.format is None else self.format.value
        most = None if self.max_gb is None else int(self.max_gb * 1e9)
        more: dict[str, Any] = {"format": form, "sheet": self.sheet, "multiline": self.multiline, "most_bytes": most}
        missing = tuple(self.na or ())
        return readable_table(TableFile(path, self.encoding or "utf-8", separator, self.decimal, missing, **more))

    def as_in_the_fit(self, table: "TableFile", fitted_to: "TrainingFile") -> "TableFile":
        """Read the table like the training file, unless other options were given or the table clearly needs others."""
        from viper.data.csv_text import shown_decimal, shown_encoding, shown_separator, worded_csv_errors

        if table.kind().word != "csv":
            return table
        if self.encoding is None:
            table = replace(table, encoding=shown_encoding(table, fitted_to.encoding))
        with worded_csv_errors(table):
            if self.separator is None:
                table = replace(table, separator=shown_separator(table, fitted_to.separator))
            if self.decimal is None:
                table = replace(table, decimal=shown_decimal(table, fitted_to.decimal))
        for name in ("encoding", "decimal"):
            used, before = getattr(table, name), getattr(fitted_to, name)
            if getattr(self, name) is None and used != before:
                note(f"{table.path} is read with {name} {used!r}, as detected; the training file had {before!r}.")
        return table if self.na is not None else replace(table, missing=tuple(fitted_to.na))


def with_reading_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `reading` of a command with one option for each field of `Reading`."""
    signature = inspect.signature(command)
    if "reading" not in signature.parameters:
        return command
    fields = inspect.signature(Reading).parameters

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        reading = Reading(**{name: given.pop(name) for name in fields})
        command(**given, reading=reading)

    own = [parameter for parameter in signature.parameters.values() if parameter.name != "reading"]
    parameters = [*own, *fields.values()]
    expanded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def open_model_and_rows(
    model: Path, data: Path, reading: Reading, out: Path | None = None, force: bool = False
) -> tuple[Any, "TableFile"]:
    """Load a model and open the table it is applied to.

    All paths, including that of the output, are checked before torch is loaded, so that mistakes are reported at once.
    """
    from viper.data.table_file import check_input
    from viper.data.writing import check_output

    check_input(model)
    if out is not None:
        check_output(out, force, model, data)
    table = reading.table(data)
    table.kind()

    import viper
    from viper.cli.preparing import input_columns

    fitted = viper.load(model)
    training = getattr(getattr(fitted, "formula_", None), "training", None)
    if training is not None and training.file is not None:
        table = reading.as_in_the_fit(table, training.file)
    if table.kind().word == "libsvm":
        table = replace(table, zeros=tuple(input_columns(fitted)))
    return fitted, table
