"""`viper report`: an HTML page about a model."""

from pathlib import Path
from typing import Annotated

import typer

from viper.cli import options
from viper.cli.terminal import note


def write_report(
    model: options.ModelPath,
    data: options.TablePath,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    target: options.KnownTarget = None,
    spatial: Annotated[
        tuple[str, str] | None,
        options.optional(
            "Two columns to draw as a map. (default: those named lon and lat, or x and y)", "--map", metavar="X Y"
        ),
    ] = None,
    force: options.Force = False,
    *,
    reading: options.Reading,
) -> None:
    """Write one self-contained HTML page about a model and how well it predicts the rows of a table.

    Examples
    --------
    viper report model.viper data.csv --out report.html
    viper report quakes.viper quakes.csv --map east north --out report.html
    """
    fitted, table = options.open_model_and_rows(model, data, reading, out, force)

    from viper import report
    from viper.cli.preparing import labelled_rows
    from viper.errors import OutputError, StorageError

    rows = labelled_rows(fitted, table, target)
    try:
        with table.located():
            report.write(fitted, rows.frame, rows.target, out, overwrite=force, spatial=spatial)
    except (StorageError, FileExistsError, PermissionError) as error:
        raise OutputError(str(error)) from None
    note(f"the report is {out}; open it in a browser.")
