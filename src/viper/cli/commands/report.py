"""`viper report`: write an HTML page about a model."""

from pathlib import Path
from typing import Annotated

import typer

from viper.cli import options
from viper.cli.terminal import note, note_if_slow, show_progress


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
    row_labels: Annotated[
        str | None, options.optional("Column with names for the rows on the page. (default: row numbers)")
    ] = None,
    no_rows: Annotated[
        bool,
        typer.Option("--no-rows", help="Show no individual rows, only figures about groups of rows."),
    ] = False,
    by: Annotated[
        list[str] | None,
        options.optional(
            "Column that groups the rows, to score each group. Repeat for more. (default: chosen for you)"
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
    viper report model.viper patients.csv --row-labels case --out report.html
    viper report model.viper patients.csv --no-rows --out report.html
    """
    if row_labels is not None and no_rows:
        raise typer.BadParameter("--row-labels and --no-rows exclude each other; got both. Choose one")
    fitted, table = options.open_model_and_rows(model, data, reading, out, force)

    from viper.cli.classes import model_of_label
    from viper.cli.preparing import check_option_column, input_columns, labelled_rows
    from viper.data.model_file import write_bytes
    from viper.data.writing import IN_A_SHELL, PAGE_OUTPUT, check_ending
    from viper.errors import OutputError, StorageError
    from viper.report.classes.page import any_page, any_study

    check_ending(out, PAGE_OUTPUT, IN_A_SHELL)
    fitted = model_of_label(fitted, target)
    # names are kept as written, such as 007, but a column that the model uses is read as in the fit
    as_text = () if row_labels is None or row_labels in input_columns(fitted) else (row_labels,)
    rows = labelled_rows(fitted, table, target, as_text)
    if row_labels is not None:
        check_option_column(rows.frame, row_labels, "--row-labels")
    for name in by or ():
        check_option_column(rows.frame, name, "--by")
    try:
        with table.located():
            study = any_study(fitted, rows.frame, rows.target, spatial, False, row_labels, not no_rows, by)
            with note_if_slow(f"looking at {len(study.label):,} rows"):
                page = any_page(study)
            with show_progress("Writing the report", len(page.writers)) as step:
                write_bytes(out, page.text(step).encode(), force)
    except (StorageError, FileExistsError, PermissionError) as error:
        raise OutputError(str(error)) from None
    note(f"the report was written to {out}; open it in a browser.")
