"""`viper predict`: probabilities with intervals for new rows."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from viper.cli import options
from viper.cli.terminal import note, print_json

if TYPE_CHECKING:
    import pandas

PART_ROWS = 50_000  # rows read, predicted and written at a time


def predict_rows(
    model: options.ModelPath,
    data: options.TablePath,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="CSV (also .gz) or Parquet file to write; - is standard output.")
    ] = Path("-"),
    interval: options.Level = 0.95,
    keep: Annotated[list[str] | None, options.optional("Column to copy into the output. Repeat for more.")] = None,
    safe_cells: Annotated[
        bool,
        typer.Option(
            "--safe-cells",
            help="Put an apostrophe before text that a spreadsheet would run: cells that begin with = + - @.",
        ),
    ] = False,
    force: options.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON summary of what was written to --out.")] = False,
    *,
    reading: options.Reading,
) -> None:
    """Predict new rows: probability, its standard deviation and interval, and the more probable class.

    The table must have the columns of the fit; others are ignored. Missing values are treated as in the fit.

    Examples
    --------
    viper predict model.viper new.csv --out predictions.csv
    viper predict model.viper new.csv --interval 0.9 --keep patient_id | head
    viper predict model.viper new.parquet --out predictions.parquet
    """
    to_screen = str(out) == "-"
    if to_screen and as_json:
        raise typer.BadParameter("--json describes the file written, so --out must be a file; got -")
    fitted, table = options.open_model_and_rows(model, data, reading, None if to_screen else out, force)

    from viper.data.writing import frame_writer, without_formulas

    parts = PredictedParts(fitted, table, interval, keep or [])
    made = map(without_formulas, parts) if safe_cells else parts
    with table.located():
        if to_screen:
            for part in made:
                part.to_csv(sys.stdout, index=False, header=parts.first_part, lineterminator="\n")
                sys.stdout.flush()
        else:
            with frame_writer(out, force) as write:
                for part in made:
                    write(part)
    note_what_was_written(parts, out, to_screen, as_json)


class PredictedParts:
    """The predictions of a table, part by part, and counts of its rows."""

    def __init__(self, model: Any, table: Any, level: float, keep: list[str]) -> None:
        self.model, self.table, self.level, self.keep = model, table, level, keep
        self.rows = self.empty = 0
        self.ignored: list[str] = []
        self.first_part = True

    def __iter__(self) -> Iterator["pandas.DataFrame"]:
        from viper.cli.preparing import check_model_columns, check_option_column, input_columns, target_of, text_inputs

        names = input_columns(self.model)
        copied = tuple(name for name in self.keep if name not in names)  # read as text, so that they are not altered
        sparse = self.table.kind().word == "libsvm"  # such a file leaves out features that are zero in all of its rows
        for part in self.table.chunks(PART_ROWS, text_inputs(self.model) + copied):
            frame = part.reindex(columns=list(dict.fromkeys([*part, *names])), fill_value=0.0) if sparse else part
            if self.first_part:
                used = {*names, *self.keep, target_of(self.model)}
                self.ignored = [name for name in frame.columns if name not in used]
            check_model_columns(frame, names)
            for name in self.keep:
                check_option_column(frame, name, "--keep")
            frame.index = range(self.rows, self.rows + len(frame))  # rows of the file, which errors name
            result = prediction_frame(self.model, frame, self.level)
            self.rows += len(frame)
            self.empty += int(result["probability"].isna().sum())
            for name in reversed(self.keep):
                result.insert(0, name, frame[name])
            yield result
            self.first_part = False


def prediction_frame(model: Any, frame: "pandas.DataFrame", level: float) -> "pandas.DataFrame":
    """Predict every row; those with missing values stay empty if the model was fitted with `--missing drop`."""
    import numpy as np
    import pandas

    from viper.cli.preparing import input_columns
    from viper.models.prediction import predictions

    drops = hasattr(model, "formula_") and model.formula_.missing == "drop"
    complete = model.formula_.complete(frame) if drops else np.ones(len(frame), dtype=bool)
    names = ["probability", "sd", "lower", "upper", "label"]
    if not complete.any():
        return pandas.DataFrame(np.nan, index=frame.index, columns=names).astype({"label": object})
    table = predictions(model, frame.loc[complete, input_columns(model)], level).table(model.classes_)
    found = pandas.DataFrame(table, index=frame.index[complete]).astype({"label": object})
    return found.reindex(frame.index)[names]


def note_what_was_written(parts: PredictedParts, out: Path, to_screen: bool, as_json: bool) -> None:
    from viper.cli.preparing import target_of
    from viper.errors import listed

    if parts.empty:
        rows = "row has" if parts.empty == 1 else "rows have"
        note(f"{parts.empty:,} {rows} missing values and no prediction (the model was fitted with --missing drop).")
    if parts.ignored:
        note(f"columns ignored: {listed(parts.ignored)}.")
    if as_json:
        print_json({"rows": parts.rows, "without_probability": parts.empty, "ignored": parts.ignored, "saved": out})
    elif not to_screen:
        positive = f"{target_of(parts.model) or 'class'} = {parts.model.classes_[1]}"
        note(f"{parts.rows:,} rows written to {out}; probability is that of {positive}.")
