"""Notes about the rows that a command predicts: rows without a prediction, unusual values, drift."""

from typing import TYPE_CHECKING, Any

from viper.cli.terminal import note, print_table, say

if TYPE_CHECKING:
    import numpy
    import pandas

    from viper.formula.drift import ColumnDrift
    from viper.models.prediction import TablePredictions

MOST_MOVED = 6  # columns that a note lists as distributed differently
MOST_DRIFTS_SHOWN = 20  # in a table

Counts = dict[str, dict[str, int]]  # of rows, by kind of remark and column


def add_counts(total: Counts, more: Counts) -> None:
    for kind, by_column in more.items():
        for column, number in by_column.items():
            total.setdefault(kind, {})[column] = total.get(kind, {}).get(column, 0) + number


def note_counts(counts: Counts, empty: int, rows: int) -> None:
    """Note how many rows have no prediction, and how many values are filled in, replaced or unusual, by column."""
    from viper.errors import counted
    from viper.formula.screening import FATAL, NOTED

    if empty:
        why = [f"{FATAL[kind]} ({counted(counts[kind])})" for kind in FATAL if kind in counts]
        has = "has" if empty == 1 else "have"
        note(f"{empty:,} of {rows:,} rows {has} no prediction, because values are {'; '.join(why)}.")
    for kind, words in NOTED.items():
        if kind in counts and kind != "far":
            note(f"values {words}: {counted(counts[kind])}.")
    if far := sum(counts.get("far", {}).values()):
        they, theirs = ("row is", "its interval") if far == 1 else ("rows are", "their intervals")
        note(f"{far:,} {they} {NOTED['far']}: do not rely on {theirs}.")


def note_drift(drifts: "list[ColumnDrift]") -> None:
    """Note the columns that are distributed differently from the training data."""
    if moved := [one for one in drifts if one.moved]:
        shown = [f"{one.column!r} ({drift_words(one)})" for one in moved[:MOST_MOVED]]
        more = f" and {len(moved) - MOST_MOVED} more" if len(moved) > MOST_MOVED else ""
        note(f"columns distributed differently from the training data: {', '.join(shown)}{more}.")


def drift_words(drift: "ColumnDrift") -> str:
    """Say how a column differs most: by missing values, values outside its range, its mean, or its shares."""
    if drift.missing - drift.missing_before > 0.05:
        return f"{drift.missing:.0%} missing, {drift.missing_before:.0%} in the training data"
    if drift.outside > 0.05:
        return (
            f"{drift.outside:.0%} outside its range" if drift.shift is not None else f"{drift.outside:.0%} new levels"
        )
    if drift.shift is not None and abs(drift.shift) > 0.2:
        return f"its mean is {abs(drift.shift):.2g} sd {'higher' if drift.shift > 0 else 'lower'}"
    return f"stability index {drift.psi:.2f}"


def drift_of(model: Any, frame: "pandas.DataFrame") -> "list[ColumnDrift]":
    """Compare the rows with the training data; the list is empty if the model has no record of them."""
    from viper.formula.drift import column_drift

    return column_drift(model.formula_, frame) if hasattr(model, "formula_") else []


def print_drift(drifts: "list[ColumnDrift]") -> None:
    """Print the columns that are distributed differently from the training data, or say that there are none."""
    moved = [one for one in drifts if one.moved]
    if not drifts:
        return
    if not moved:
        columns = "The column is" if len(drifts) == 1 else f"All {len(drifts)} columns are"
        say(f"[bold]Drift[/]: {columns} distributed as in the training data.")
        return
    be = "is" if len(moved) == 1 else "are"
    say(f"[bold]Drift[/]: {len(moved)} of {len(drifts)} columns {be} distributed differently from the training data")
    rows = [[one.column, drift_words(one), f"{one.psi:.2f}", one.verdict] for one in moved[:MOST_DRIFTS_SHOWN]]
    print_table(["column", "here", "stability index", "change"], rows, left=2)
    if len(moved) > MOST_DRIFTS_SHOWN:
        say(f"  [dim]{len(moved) - MOST_DRIFTS_SHOWN} more, less different; --json lists all.[/]")


def table_predictions(model: Any, frame: "pandas.DataFrame", level: float) -> "TablePredictions":
    """Predict every row that can be predicted; the others get only a note."""
    from viper.cli.preparing import input_columns
    from viper.models.prediction import predict_each_row

    return predict_each_row(model, frame[input_columns(model)], level)


def kept_rows(model: Any, frame: "pandas.DataFrame", kept: "numpy.ndarray") -> "pandas.DataFrame":
    """Return the rows that are used, with their columns as the model reads them."""
    from viper.formula.screening import columns_as_read

    return columns_as_read(model.formula_, frame[kept]) if hasattr(model, "formula_") else frame[kept]
