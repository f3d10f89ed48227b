"""`viper missing`: show what is missing in a table."""

from typing import Annotated, Any

from rich.markup import escape

from viper.cli import options
from viper.cli.terminal import print_json, print_table, say


def report_missing(
    data: options.TablePath,
    target: Annotated[
        str | None,
        options.optional("Column with two classes, to show whether it is related to missing values.", "--target", "-t"),
    ] = None,
    positive: options.Positive = None,
    level: options.Level = 0.95,
    as_json: options.Json = False,
    *,
    reading: options.Reading,
) -> None:
    """Show what is missing in a table: how much, in which columns together, and whether it is related to the outcome.

    Examples
    --------
    viper missing patients.csv
    viper missing patients.csv --target died
    viper missing patients.csv --target died --json
    """
    table = reading.table(data)
    frame = table.read()

    from viper.cli.preparing import check_option_column
    from viper.report.missing import missing_values

    if target is not None:
        check_option_column(frame, target, "--target")
    with table.located():
        found = missing_values(frame, target, positive, level)
    if as_json:
        columns, patterns = (part.to_dict("index") for part in (found.columns, found.patterns))
        print_json({**found._asdict(), "columns": columns, "patterns": patterns, "level": level})
    else:
        print_missing(found, frame.shape[1], level)


def print_missing(found: Any, width: int, level: float) -> None:
    from viper.report.missing import MOST_PATTERNS
    from viper.report.words import percent

    cells, rows = int(found.columns["missing"].sum()), found.rows
    if not cells:
        say(f"Nothing is missing in {rows:,} rows and {width:,} columns.")
        return
    values = f"{cells:,} of {rows * width:,} values are missing"
    where = f"({percent(cells / (rows * width))}), in {len(found.columns):,} of {width:,} columns."
    whole = f"{found.complete:,} of {rows:,} rows are complete ({percent(found.complete / rows)})."
    say(f"[bold]{values}[/] {where} {whole}")
    titles = ["column", "missing", "share"]
    if found.target is not None:
        outcome = escape(f"{found.target} = {found.positive}")
        say(f"How often [bold cyan]{outcome}[/] in rows with a value, and in rows without one:")
        titles += ["with", "without", f"difference, {100 * level:g} %"]
    lines = [column_cells(name, row, found.target) for name, row in found.columns.iterrows()]
    linked = bool(found.columns["goes_with"].any())
    titles, lines = ([*titles, "most and least often missing"], lines) if linked else (titles, [c[:-1] for c in lines])
    print_table(titles, lines, spare=(len(titles) - 1,) if linked else ())
    say("[bold]Missing together[/]")
    shown = found.patterns.head(MOST_PATTERNS)
    print_table(
        ["columns", "rows", "share"],
        [[name or "none", f"{row.rows:,.0f}", percent(row.share)] for name, row in shown.iterrows()],
        longest=80,
    )
    if (left := len(found.patterns) - len(shown)) > 0:
        say(f"  [dim]{left:,} more combinations.[/]\n")
    print_advice(found)


def column_cells(name: Any, row: Any, target: str | None) -> list[str]:
    from viper.report.words import percent

    cells = [str(name), f"{row['missing']:,.0f}", percent(row["share"])]
    if target is not None:
        points = f"{100 * row['lower']:+.0f} … {100 * row['upper']:+.0f} points"
        cells += ["–"] * 3 if name == target else [percent(row["observed"]), percent(row["absent"]), points]
    return [*cells, row["goes_with"]]


def print_advice(found: Any) -> None:
    """Say what each way of treating missing values would mean for this table."""
    from viper.errors import listed

    say("[bold]What to do[/]")
    lost = f"{found.rows - found.complete:,}"
    say(f"  --missing drop       leaves out {lost} rows; right if values are missing by pure chance.")
    say("  --missing multiple   draws them from the other columns; right if those explain which values are missing.")
    say("  --missing indicator  tells the model which values are missing; right if that is informative in itself.")
    if found.related:
        names = escape(listed(found.related))
        say(f"  Rows without {names} differ in the outcome: leaving them out would bias the probabilities.")
