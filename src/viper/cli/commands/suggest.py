"""`viper suggest`: the unlabelled rows whose labels would tell most about a model."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from viper.cli import options
from viper.cli.classes import without_prediction
from viper.cli.commands.predict import PredictedParts
from viper.cli.remarks import note_counts
from viper.cli.terminal import note, print_json

if TYPE_CHECKING:
    import pandas

INFORMATION = "information"


def suggest_rows(
    model: options.ModelPath,
    data: options.TablePath,
    n: Annotated[int, typer.Option("--n", "-n", help="How many rows to suggest.", min=1)] = 10,
    out: options.TableOut = Path("-"),
    alone: Annotated[
        bool, typer.Option("--alone", help="Rank each row by itself, as if only one label were asked for.")
    ] = False,
    level: options.Level = 0.95,
    keep: options.Keep = None,
    safe_cells: options.SafeCells = False,
    unseen: options.UnseenOverride = None,
    beyond: options.BeyondOverride = None,
    force: options.Force = False,
    as_json: options.Json = False,
    *,
    reading: options.Reading,
) -> None:
    """Suggest the rows to label next: those whose labels would tell most about the model.

    Information is measured in nats; for two classes it is at most 0.69. It is near 0 where the probability is well
    known, even if the probability is one half. Each row is chosen for its gain: what its label tells beyond the labels
    of the rows above it, so that twenty rows do not ask the same question twenty times. The output has each row's
    number in the table (from 1), its gain and information, and the columns of `viper predict`.

    Examples
    --------
    viper suggest model.viper pool.csv --n 20
    viper suggest model.viper pool.csv --n 20 --keep patient_id --out to_label.csv
    viper suggest model.viper pool.parquet --alone --json
    """
    to_screen = str(out) == "-"
    fitted, table = options.open_model_and_rows(model, data, reading, None if to_screen else out, force)

    from viper.data.writing import frame_writer, without_formulas
    from viper.models.prediction import with_rules

    fitted = with_rules(fitted, *(None if rule is None else rule.value for rule in (unseen, beyond)))
    pool = UnlabelledRows(fitted, table, level, keep or [])
    with table.located():
        suggested = pool.suggested(n, alone)
    suggested = without_formulas(suggested) if safe_cells else suggested
    if not to_screen:
        with frame_writer(out, force) as write:
            write(suggested)
    elif not as_json:
        suggested.to_csv(sys.stdout, index=False, lineterminator="\n")
    note_counts(pool.counts, pool.empty, pool.rows)
    if as_json:
        print_json({"rows": pool.rows, "without_probability": pool.empty, "suggested": suggested.to_dict("records")})
    elif not to_screen:
        note(f"{len(suggested):,} of {pool.rows:,} rows written to {out}, the most informative first.")


class UnlabelledRows(PredictedParts):
    """Rows without labels; only the most informative ones are kept while the table is read."""

    def __init__(self, model: Any, table: Any, level: float, keep: list[str]) -> None:
        super().__init__(model, table, level, keep)
        self.best: pandas.DataFrame | None = None  # inputs of the rows kept so far, and their information

    def suggested(self, n: int, alone: bool) -> "pandas.DataFrame":
        """Return the rows to label, the best first, as they are written."""
        import numpy as np
        import pandas

        from viper.decisions.pool import suggest

        tables = [part[part.index.isin(self.kept.index)] for part in self]
        self.check_some_predicted()
        frame = self.kept.drop(columns=INFORMATION)
        if frame.empty:
            return pandas.concat([*tables, frame])
        found = suggest(self.model, frame, n, alone=alone)
        index = frame.index[found.rows]
        result = pandas.concat(tables).loc[index]
        first = {"row": np.asarray(index) + 1, "gain": found.gain, INFORMATION: found.information}
        for name, column in reversed(first.items()):
            if name in result:
                raise ValueError(f"--keep must not name a column that suggest writes; got {name!r}. Rename it first.")
            result.insert(0, name, column)
        return result

    @property
    def kept(self) -> "pandas.DataFrame":
        assert self.best is not None
        return self.best

    def _predict(self, frame: "pandas.DataFrame") -> "pandas.DataFrame":
        import pandas

        from viper.decisions.pool import MOST_CANDIDATES
        from viper.models.prediction import screen_for_model

        result = super()._predict(frame)
        usable = ~without_prediction(self.model, result)
        rows = screen_for_model(self.model, frame).frame if hasattr(self.model, "formula_") else frame
        rows = rows[usable]
        information = self.model.predict_information(rows) if len(rows) else []
        rows = rows.assign(**{INFORMATION: information})
        together = rows if self.best is None else pandas.concat([self.best, rows])
        self.best = together.nlargest(MOST_CANDIDATES, INFORMATION).sort_index()
        return result
