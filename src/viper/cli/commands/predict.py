"""`viper predict`: probabilities with intervals for new rows."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from viper.cli import options
from viper.cli.classes import what_is_predicted, without_prediction
from viper.cli.remarks import Counts, add_counts, note_counts, note_drift, table_predictions
from viper.cli.terminal import note, print_json

if TYPE_CHECKING:
    import pandas


PART_ROWS = 50_000  # rows read, predicted and written at a time


def predict_rows(
    model: options.ModelPath,
    data: options.TablePath,
    out: options.TableOut = Path("-"),
    level: options.Level = 0.95,
    keep: options.Keep = None,
    safe_cells: options.SafeCells = False,
    unseen: options.UnseenOverride = None,
    beyond: options.BeyondOverride = None,
    force: options.Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON summary of what was written to --out.")] = False,
    *,
    reading: options.Reading,
) -> None:
    """Predict new rows: probability, its standard deviation and interval, the most probable class, and a note.

    The table must have the columns of the fit; others are ignored. It is read like the training file, and missing
    values are treated as in the fit. A row's distance from the training data is relative to the farthest training row,
    which has distance 1. A row that cannot be predicted gets only a note that says why, and the exit code is then 5.

    Examples
    --------
    viper predict model.viper new.csv --out predictions.csv
    viper predict model.viper new.csv --level 0.9 --keep patient_id | head
    viper predict model.viper new.parquet --out predictions.parquet
    viper predict model.viper new.csv --unseen baseline --beyond clamp --out predictions.csv
    """
    to_screen = str(out) == "-"
    if to_screen and as_json:
        raise typer.BadParameter("--json describes the file that is written, so --out must be a file; got -")
    fitted, table = options.open_model_and_rows(model, data, reading, None if to_screen else out, force)

    from viper.data.writing import frame_writer, without_formulas
    from viper.models.prediction import with_rules

    fitted = with_rules(fitted, *(None if rule is None else rule.value for rule in (unseen, beyond)))
    parts = PredictedParts(fitted, table, level, keep or [])
    made = map(without_formulas, parts) if safe_cells else parts
    with table.located():
        if to_screen:
            for part in made:
                part.to_csv(sys.stdout, index=False, header=parts.first_part, lineterminator="\n")
                sys.stdout.flush()
            parts.check_some_predicted()
        else:
            with frame_writer(out, force) as write:
                for part in made:
                    write(part)
                parts.check_some_predicted()
    note_what_was_written(parts, out, to_screen, as_json)
    if parts.failed:
        raise typer.Exit(options.INCOMPLETE)


class PredictedParts:
    """The predictions of a table, part by part, and counts of its rows."""

    def __init__(self, model: Any, table: Any, level: float, keep: list[str]) -> None:
        from viper.formula.drift import DriftCounter

        self.model, self.table, self.level, self.keep = model, table, level, keep
        self.rows = self.empty = 0
        self.counts: Counts = {}  # of rows, by kind of remark and column
        self.first_fault: tuple[int, str] | None = None  # the first row without a prediction, and its note
        self.drift = DriftCounter(model.formula_) if hasattr(model, "formula_") else None
        self.ignored: list[str] = []
        self.first_part = True

    def __iter__(self) -> Iterator["pandas.DataFrame"]:
        from viper.cli.preparing import check_model_columns, check_option_column, input_columns, target_of, text_inputs
        from viper.errors import FileError

        names = input_columns(self.model)
        copied = tuple(name for name in self.keep if name not in names)  # read as text, to be copied unchanged
        for frame in self.table.chunks(PART_ROWS, text_inputs(self.model) + copied):
            if self.first_part:
                used = {*names, *self.keep, target_of(self.model)}
                self.ignored = [name for name in frame.columns if name not in used]
            check_model_columns(frame, names)
            for name in self.keep:
                check_option_column(frame, name, "--keep")
            frame.index = range(self.rows, self.rows + len(frame))  # errors then name rows of the file
            result = self._predict(frame[names])
            for name in reversed(self.keep):
                if name in result:
                    raise FileError(
                        f"--keep must not name a column that predict writes; got {name!r}. Rename it first."
                    )
                result.insert(0, name, frame[name])
            yield result
            self.first_part = False

    def _predict(self, frame: "pandas.DataFrame") -> "pandas.DataFrame":
        """Predict one part, and count."""
        found = table_predictions(self.model, frame, self.level)
        add_counts(self.counts, found.counts())
        if self.drift is not None:
            self.drift.add(frame)
        empty = without_prediction(self.model, found.table)
        if self.first_fault is None and empty.any():
            self.first_fault = self.rows + int(empty.argmax()), found.table["note"][empty].iloc[0]
        self.rows += len(frame)
        self.empty += int(empty.sum())
        return found.table

    @property
    def failed(self) -> bool:
        """Whether rows have no prediction for another reason than --missing drop."""
        from viper.formula.screening import FATAL

        drops = hasattr(self.model, "formula_") and self.model.formula_.missing == "drop"
        return any(kind in FATAL and not (kind == "missing" and drops) for kind in self.counts)

    def check_some_predicted(self) -> None:
        """Raise FileError, with the first reason, if no row could be predicted."""
        from viper.errors import FileError

        if self.failed and self.first_fault is not None and self.empty == self.rows:
            row, reason = self.first_fault
            rule = f"the model must be able to predict some of the rows; got none of {self.rows:,}"
            raise FileError(f"{rule}. In {self.table.place(row)}: {reason.removeprefix('no prediction: ')}.")


def note_what_was_written(parts: PredictedParts, out: Path, to_screen: bool, as_json: bool) -> None:
    from viper.cli.preparing import target_of
    from viper.errors import listed

    drifts = [] if parts.drift is None else parts.drift.result()
    note_counts(parts.counts, parts.empty, parts.rows)
    note_drift(drifts)
    if parts.ignored:
        note(f"columns ignored: {listed(parts.ignored)}.")
    if as_json:
        counts = {"rows": parts.rows, "without_probability": parts.empty, "remarks": parts.counts}
        drift = [one._asdict() for one in drifts]
        print_json({**counts, "drift": drift, "ignored": parts.ignored, "saved": out})
    elif not to_screen:
        meant = what_is_predicted(parts.model, target_of(parts.model))
        note(f"{parts.rows:,} rows written to {out}, with the probability of {meant}.")
