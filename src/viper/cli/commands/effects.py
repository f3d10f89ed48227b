"""`viper effects`: average probabilities, contrasts and slopes, in percentage points."""

import csv
import math
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from viper.cli import options
from viper.cli.terminal import interval_strip, note, note_if_slow, print_json, print_table, say

if TYPE_CHECKING:
    import pandas

MeasureWord = StrEnum("MeasureWord", ["difference", "ratio", "odds"])
NUMBERS = ("before", "after", "estimate", "sd", "lower", "upper", "p_direction")


def show_effects(
    model: options.ModelPath,
    data: options.TablePath,
    variable: Annotated[
        list[str] | None,
        options.optional("Column to change. Repeat for more. (default: every column)", "--variable", "-v"),
    ] = None,
    contrast: Annotated[
        list[str] | None,
        options.optional(
            "Change to a column: age=10 adds 10 in every row, age=40,60 compares 60 with 40, ward=east,west compares "
            "west with east, ward=pairwise compares all pairs. Repeat for more.",
            metavar="COLUMN=CHANGE",
        ),
    ] = None,
    slope: Annotated[
        list[str] | None, options.optional("Numeric column whose average slope to show. Repeat for more.")
    ] = None,
    at: Annotated[
        list[str] | None,
        options.optional(
            "Value to set in every row first, such as age=50, or several: age=40,50,60. Repeat for more columns.",
            metavar="COLUMN=VALUE",
        ),
    ] = None,
    by: Annotated[
        list[str] | None, options.optional("Column that groups the rows, to average over each group. Repeat for more.")
    ] = None,
    measure: Annotated[
        MeasureWord,
        typer.Option(help="Compare probabilities by their difference, their ratio, or the ratio of their odds."),
    ] = MeasureWord.difference,
    weight: Annotated[str | None, options.optional("Column with the weights of the rows in the average.")] = None,
    level: options.Level = 0.95,
    out: Annotated[
        Path | None, options.optional("CSV (also .gz) or Parquet file for all results.", "--out", "-o")
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
    *,
    reading: options.Reading,
) -> None:
    """Show what changes the probability, on average over the rows of a table, in percentage points.

    Without options, every column is changed in turn: a category from its reference level to each other level, a column
    of zeros and ones from 0 to 1, and other numbers by a round step of about one standard deviation. With only --at or
    --by, average probabilities are shown.

    Examples
    --------
    viper effects model.viper data.csv
    viper effects model.viper data.csv --contrast age=40,60 --by sex
    viper effects model.viper data.csv --at age=40,50,60 --by sex
    viper effects model.viper data.csv --slope age --out slopes.csv
    """
    fitted, table = options.open_model_and_rows(model, data, reading, out, force)

    from viper.cli.preparing import target_of
    from viper.data.writing import frame_writer

    changes = requested_changes(fitted, variable or [], contrast or [])
    places = dict(read_assignment(fitted, text, "--at") for text in at or [])
    with table.located():
        frame, weights = rows_with_predictions(fitted, table, by or [], weight)
        given = {"by": by or None, "sample_weight": weights, "level": level}
        everything = not (changes or slope or places or by)
        found: dict[str, pandas.DataFrame] = {}
        with note_if_slow("computing effects"):
            found["average"] = fitted.average(frame, at=places, **given)
            if changes or everything:
                wanted = None if everything else changes
                found["contrast"] = fitted.contrast(frame, wanted, measure=measure.value, at=places, **given)
            if slope:
                found["slope"] = fitted.slopes(frame, slope, at=places, **given)
    if "contrast" in found and not (places or by):
        size = abs if measure == MeasureWord.difference else lambda x: abs(x.map(math.log))
        found["contrast"] = found["contrast"].sort_values("estimate", key=lambda x: -size(x), kind="stable")
    if out is not None:
        with frame_writer(out, force) as write:
            write(tidy_table(found))
        note(f"the effects are in {out}.")
    target = target_of(fitted)
    several = getattr(fitted, "multilabel_", False)
    positive = f"{target} = {fitted.classes_[1]}" if target else str(fitted.classes_[1])
    if len(fitted.classes_) > 2:
        positive = "a row has the level" if hasattr(fitted, "thresholds_") else "a row is in the class"
    positive = "a row has the label" if several else positive
    if as_json:
        tables = {f"{kind}s": table.to_dict("records") for kind, table in found.items()}
        facts = {"probability_of": positive, "rows": len(frame), "level": level, "measure": measure.value}
        print_json({**facts, "draws": found["average"].attrs["draws"], **tables})
    else:
        print_effects(found, positive, len(frame), level)


# --- what was asked for ---


def read_assignment(model: Any, text: str, option: str) -> tuple[str, list[Any]]:
    """Return the column and the values in `column=value,value`; quotes enclose a value with a comma."""
    from viper.cli.preparing import input_columns
    from viper.errors import instead

    names = input_columns(model)
    cuts = [i for i, letter in enumerate(text) if letter == "="]
    if not cuts:
        raise ValueError(f"{option} must have the form column=value; got {text!r}.")
    cut = next((i for i in cuts if text[:i] in names), cuts[0])
    name, rest = text[:cut], text[cut + 1 :]
    if name not in names:
        raise ValueError(f"{option} must name columns of the model; got {name!r}. {instead(name, names)}")
    levels = levels_of_column(model, name)
    values = [rest] if levels is not None and rest in map(str, levels) else next(csv.reader([rest]), [])
    if not values or not all(value.strip() for value in values):
        raise ValueError(f"{option} must have the form column=value; got {text!r}.")
    return name, [value.strip() for value in values]


def levels_of_column(model: Any, name: str) -> list[Any] | None:
    """Return the levels of a category, or the groups in a column of groups."""
    from viper.models.effects import grouping_columns

    known = model.formula_.levels.get(name) if hasattr(model, "formula_") else None
    return grouping_columns(model).get(name) or None if known is None else known


def requested_changes(model: Any, variables: list[str], contrasts: list[str]) -> dict[str, Any]:
    """Return column -> change, as `model.contrast` takes it; None is the default change."""
    changes: dict[str, Any] = dict.fromkeys(variables)
    for text in contrasts:
        if "=" not in text:
            changes.setdefault(text, None)
            continue
        name, values = read_assignment(model, text, "--contrast")
        changes[name] = values if len(values) > 1 else one_change(values[0], levels_of_column(model, name))
    return changes


def one_change(value: str, levels: list[Any] | None) -> Any:
    """Return a step, or a word such as iqr or pairwise; a level alone is compared with the reference."""
    if levels is not None:
        return [levels[0], value] if value in map(str, levels) else value
    try:
        return float(value)
    except ValueError:
        return value


def rows_with_predictions(model: Any, table: Any, by: list[str], weight: str | None) -> tuple["pandas.DataFrame", Any]:
    """Return the rows that the model can predict, and their weights, if there are any."""
    from viper.cli.classes import without_prediction
    from viper.cli.preparing import check_model_columns, check_option_column, input_columns, text_inputs
    from viper.cli.remarks import kept_rows, note_counts, table_predictions

    names = input_columns(model)
    frame = table.read(text_inputs(model))
    check_model_columns(frame, names)
    for name in by:
        check_option_column(frame, name, "--by")
    if weight is not None:
        check_option_column(frame, weight, "--weight")
    found = table_predictions(model, frame, 0.95)
    empty = without_prediction(model, found.table)
    note_counts(found.counts(), int(empty.sum()), len(frame))
    whole = ~empty
    if weight is not None:
        whole = whole & frame[weight].notna().to_numpy()
        if lacking := int((~whole & ~empty).sum()):
            note(f"{lacking:,} rows without a weight are left out.")
    if not whole.any():
        raise ValueError("the model must be able to predict some of the rows; got none.")
    frame = kept_rows(model, frame, whole)
    return frame, None if weight is None else frame[weight].to_numpy()


# --- what is shown ---


def tidy_table(found: dict[str, "pandas.DataFrame"]) -> "pandas.DataFrame":
    """Return all results in one table, whose first column says what each row is."""
    import pandas

    parts = [table.assign(effect=kind) for kind, table in found.items()]
    whole = pandas.concat(parts, ignore_index=True)
    first = ["effect", *(name for name in ("variable", "contrast") if name in whole)]
    labels = [name for name in whole if name not in (*first, *NUMBERS)]
    return whole[[*first, *labels, *(name for name in NUMBERS if name in whole)]]


def print_effects(found: dict[str, "pandas.DataFrame"], positive: str, rows: int, level: float) -> None:
    average = found["average"]
    said = f"Average probability that [bold cyan]{escape(positive)}[/] over [bold]{rows:,} rows[/]"
    if len(average) == 1:
        row = average.iloc[0]
        place = "".join(f", {name} = {shown_value(row[name])}" for name in average if name not in NUMBERS)
        digits = decimals([100 * row["sd"]])
        ends = f"{100 * row['lower']:.{digits}f} … {100 * row['upper']:.{digits}f}"
        say(f"{said}{escape(place)}: [bold]{100 * row['estimate']:.{digits}f} %[/] ({100 * level:g} %: {ends})\n")
    else:
        say(said)
        print_rows(average, level, "average, %", signed=False)
    if "contrast" in found:
        ratio = found["contrast"].attrs["measure"] != "difference"
        say("[bold]What changes it[/]: one column changes in every row, all others stay as they are")
        kind = {"ratio": "probability ×", "odds": "odds ×"}.get(found["contrast"].attrs["measure"], "points")
        print_rows(found["contrast"], level, kind, ratio=ratio)
        if not ratio:
            say("  [dim]points: percentage points, on average over the rows.[/]")
        say("  [dim]sign: probability that the change has the direction shown.[/]")
    if "slope" in found:
        say("[bold]Slopes[/]: change in the probability per unit of a column")
        print_rows(found["slope"], level, "points per 1")
        say("  [dim]points: percentage points, on average over the rows.[/]")


def print_rows(table: "pandas.DataFrame", level: float, title: str, signed: bool = True, ratio: bool = False) -> None:
    """Print one line for each row; if it has a sign, its interval is drawn too."""
    labels = [name for name in table if name not in NUMBERS]
    compared = "before" in table
    scale = 1.0 if ratio else 100.0
    digits = decimals([scale * sd for sd in table["sd"]])
    places = min(max(digits, 1), 4)
    position = math.log if ratio else float
    ends = (
        min(0.0, *(position(x) for x in table["lower"])) if signed else 0.0,
        max(0.0, *(position(x) for x in table["upper"])) if signed else 1.0,
    )
    lines: list[list[str | Text]] = []
    for _, row in table.iterrows():
        number = lambda name, sign="": f"{scale * row[name]:{sign}.{digits}f}"  # noqa: B023, E731
        plus = "+" if signed and not ratio else ""
        cells: list[str | Text] = [shown_value(row[name]) for name in labels]
        cells += [number("estimate", plus), number("sd"), f"{number('lower', plus)} … {number('upper', plus)}"]
        if compared:
            cells.append(f"{100 * row['before']:.{places}f} → {100 * row['after']:.{places}f}")
        if signed:
            low, middle, high = (position(row[name]) for name in ("lower", "estimate", "upper"))
            cells.append(interval_strip(low, middle, high, ends if ends[1] > ends[0] else (-1.0, 1.0)))
            cells.append(f"{row['p_direction']:.1%}" if row["p_direction"] < 0.9995 else "> 99.9%")
        lines.append(cells)
    names = {"variable": "column", "contrast": "change"}
    titles = [*(names.get(str(name), str(name)) for name in labels), title, "sd", f"{100 * level:g} %"]
    titles += ["average, %"] * compared + ["", "sign"] * signed
    spare = (len(titles) - 2, len(labels) + 1, len(titles) - 3) if compared else ()
    print_table(titles, lines, left=len(labels), spare=spare)


def decimals(sds: list[float]) -> int:
    """Return the decimals, from 1 to 6, at which the median of the standard deviations has two digits."""
    middle = median(sds)
    return min(max(1 - math.floor(math.log10(middle)), 1), 6) if middle > 0 else 1


def shown_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
