"""`viper report`: a page about a model."""

from pathlib import Path
from typing import Annotated

import typer

from viper.cli import options

EXAMPLES = [
    "viper report model.viper data.csv --out report.html",
    "viper report quakes.viper quakes.csv --map east north --out report.html",
]


def report(
    model: options.Model,
    data: options.Data,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("report.html"),
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Column with the classes. (default: that of the fit)")
    ] = None,
    spatial: Annotated[
        tuple[str, str] | None,
        typer.Option("--map", help="Two columns to draw as a map.", metavar="X Y", show_default=False),
    ] = None,
    force: options.Force = False,
    format: options.FormatOption = None,
    encoding: options.Encoding = "utf-8",
    separator: options.Separator = None,
    decimal: options.Decimal = ".",
    na: options.Na = None,
) -> None:
    """Write one self-contained page about a model and how it does on a table."""
    from viper.cli.predict import check_columns, inputs
    from viper.cli.predict import target as target_of
    from viper.cli.preparing import check_option
    from viper.data.table_file import check_input
    from viper.data.writing import check_output
    from viper.errors import OutputError

    check_input(model)
    check_output(out, force)
    table = options.table(data, format, encoding, separator, decimal, na)
    table.kind()

    import viper
    from viper import report as page
    from viper.cli.evaluate import labels, text_of
    from viper.cli.terminal import note
    from viper.errors import StorageError

    fitted = viper.load(model)
    name = target or target_of(fitted)
    if name is None:
        raise ValueError("--target must name the column with the classes; got none, and the model knows of none.")
    frame = table.read(text_of(fitted, name))
    check_columns(frame, inputs(fitted))
    check_option(frame, name, "--target")
    labels(frame[name], fitted.classes_, name, table)
    try:
        with table.located():
            page.write(fitted, frame, name, out, overwrite=force, spatial=spatial)
    except (StorageError, FileExistsError, PermissionError) as error:
        raise OutputError(str(error)) from None
    note(f"the report is {out}; open it in a browser.")
