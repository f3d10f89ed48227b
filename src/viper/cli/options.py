"""Options that several commands share, and how a command opens the files it is given."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from viper.data.table_file import TableFile

MissingRule = StrEnum("MissingRule", ["error", "drop", "mean", "indicator", "multiple"])
FormatWord = StrEnum("FormatWord", ["csv", "parquet", "arrow", "excel", "libsvm"])


def optional(text: str, *names: str, **settings: Any) -> Any:
    """Return an option whose default, if it has one, is described in its help text."""
    return typer.Option(*names, help=text, show_default=False, **settings)


TablePath = Annotated[
    Path, typer.Argument(help="Table to read: CSV (also .gz), Parquet, Arrow, Excel or LIBSVM; - is standard input.")
]
ModelPath = Annotated[Path, typer.Argument(help="Model file written by `viper fit` or `model.save`.")]
Target = Annotated[
    str | None,
    optional("Column to predict, with two classes. (default: from --formula; y in a LIBSVM file)", "--target", "-t"),
]
KnownTarget = Annotated[
    str | None, optional("Column with the observed classes. (default: the target of the fit)", "--target", "-t")
]
FormulaText = Annotated[
    str | None, optional('Terms of the model, such as "y ~ age + C(ward) + x1:x2". (default: all usable columns)')
]
RULES = (
    "error refuses them, drop leaves out rows with any, mean fills in means and most common levels, indicator does so "
    "and adds columns that say where, multiple draws them from the other columns several times"
)
Missing = Annotated[MissingRule, typer.Option(help=f"How to treat missing values: {RULES}.")]
Imputations = Annotated[
    int, typer.Option(help="For --missing multiple: how many times to draw all missing values.", min=2)
]
Sweeps = Annotated[
    int, typer.Option(help="For --missing multiple: rounds over the columns before a draw counts.", min=1)
]
Drop = Annotated[list[str] | None, optional("Column to leave out. Repeat for more columns.")]
Category = Annotated[
    list[str] | None,
    optional("Column of numbers, or of text with many levels, to treat as categorical. Repeat for more columns."),
]
Positive = Annotated[
    str | None,
    optional("Class whose probability is modelled. (default: the last in order, of categories or of the alphabet)"),
]
Level = Annotated[float, typer.Option(help="Posterior mass of the credible intervals.", min=0.001, max=0.999999)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Force = Annotated[bool, typer.Option("--force", "--overwrite", "-f", help="Replace the output file if it exists.")]
Seed = Annotated[int, typer.Option(help="Seed of the random numbers and of the split into folds.")]
READING = {"rich_help_panel": "Reading the table"}


@dataclass(frozen=True)
class Reading:
    """How to read a table: the group of options of every command that takes one."""

    format: Annotated[
        FormatWord | None, optional("Format of the table. (default: from its name and first bytes)", **READING)
    ] = None
    encoding: Annotated[str, typer.Option(help="Encoding of a CSV file, such as latin-1.", **READING)] = "utf-8"
    separator: Annotated[
        str | None, optional("Separator of a CSV file's fields. (default: detected in its first line)", **READING)
    ] = None
    decimal: Annotated[
        str | None,
        optional("Decimal separator of a CSV file. (default: a comma where the cells show it, or a point)", **READING),
    ] = None
    na: Annotated[
        list[str] | None, optional("Text of a missing value, besides an empty cell and NA. Repeat for more.", **READING)
    ] = None

    sheet: Annotated[str | None, optional("Sheet of an Excel file: its name or number. (default: 1)", **READING)] = None
    multiline: Annotated[
        bool, typer.Option("--multiline", help="Allow cells of a CSV file, in quotes, to span lines.", **READING)
    ] = False
    max_gb: Annotated[
        float | None,
        optional("Most memory for the table, in gigabytes. (default: 0.5, or 20 times the file)", min=0.001, **READING),
    ] = None

    def table(self, path: Path) -> "TableFile":
        """Return the table at `path`; raises FileError if there is no such file."""
        from viper.data.table_file import TableFile, readable_table

        separator = {"\\t": "\t", "tab": "\t"}.get(self.separator or "", self.separator)
        form = None if self.format is None else self.format.value
        most = None if self.max_gb is None else int(self.max_gb * 1e9)
        more: dict[str, Any] = {"multiline": self.multiline, "most_bytes": most, "sheet": self.sheet}
        return readable_table(
            TableFile(path, self.encoding, separator, self.decimal, tuple(self.na or ()), form, **more)
        )


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

    All paths, also that of the output, are checked before torch is loaded, so that mistakes are reported at once.
    """
    from viper.data.table_file import check_input
    from viper.data.writing import check_output

    check_input(model)
    if out is not None:
        check_output(out, force)
    table = reading.table(data)
    table.kind()

    import viper

    return viper.load(model), table
