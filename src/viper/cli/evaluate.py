"""`viper evaluate`: how good a model's probabilities are on rows whose classes are known."""

from typing import Annotated, Any

import typer

from viper.cli import options

EXAMPLES = ["viper evaluate model.viper test.csv", "viper evaluate model.viper test.csv --target died --bins 20 --json"]


def evaluate(
    model: options.Model,
    data: options.Data,
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Column with the classes. (default: that of the fit)")
    ] = None,
    bins: Annotated[int, typer.Option(help="Of the calibration.", min=1)] = 10,
    level: options.Level = 0.95,
    as_json: options.Json = False,
    format: options.FormatOption = None,
    encoding: options.Encoding = "utf-8",
    separator: options.Separator = None,
    decimal: options.Decimal = ".",
    na: options.Na = None,
) -> None:
    """Score a model on rows it did not see: AUC, log score, Brier score, calibration."""
    from viper.cli.predict import check_columns, inputs, predict_frame
    from viper.cli.predict import target as target_of
    from viper.cli.preparing import check_option
    from viper.data.table_file import check_input

    check_input(model)
    table = options.table(data, format, encoding, separator, decimal, na)
    table.kind()

    import viper
    from viper.cli.terminal import emit, note
    from viper.report.metrics import calibration, scores

    fitted = viper.load(model)
    name = target or target_of(fitted)
    if name is None:
        raise ValueError("--target must name the column with the classes; got none, and the model knows of none.")
    frame = table.read(text_of(fitted, name))
    check_columns(frame, inputs(fitted))
    check_option(frame, name, "--target")
    with table.located():
        result = predict_frame(fitted, frame, level)
    label, used = labels(frame[name], fitted.classes_, name, table)
    used = used & result["probability"].notna().to_numpy()
    if not used.any():
        raise ValueError("some rows must have a class and no missing values; got none.")
    found = result[used]
    score = scores(label[used], found["probability"], found[["lower", "upper"]], bins)
    shape = calibration(label[used], found["probability"], bins, level)
    if not used.all():
        note(f"{int((~used).sum()):,} rows with missing values are left out.")
    if as_json:
        emit({**score._asdict(), "level": level, "calibration": shape.to_dict("records")})
    else:
        draw(score, shape, f"{name} = {fitted.classes_[1]}", level)


def text_of(model: Any, target: str) -> tuple[str, ...]:
    """Columns that hold text, though they may look like numbers."""
    levels = model.formula_.levels if hasattr(model, "formula_") else {}
    text = [name for name, values in levels.items() if isinstance(values[0], str)]
    return (*text, target) if isinstance(model.classes_[0], str) else tuple(text)


def labels(column: Any, classes: Any, name: str, table: Any) -> tuple[Any, Any]:
    """Which rows are of the second class, and which have a class at all; any other class is refused."""
    known = (column == classes[0]) | (column == classes[1])
    strange = (~known & column.notna()).to_numpy()
    if strange.any():
        row = int(strange.argmax())
        line = table.line(row)
        where = f"row {row + 1}" if line is None else f"line {line}"
        raise ValueError(
            f"column {name!r} must hold the classes of the model, {list(map(str, classes))}; got "
            f"{str(column.iloc[row])!r} in {where}. Recode it."
        )
    return (column == classes[1]).to_numpy(dtype=bool, na_value=False), column.notna().to_numpy()


def draw(score: Any, shape: Any, positive: str, level: float) -> None:
    from rich.markup import escape
    from rich.text import Text

    from viper.cli.card import SCORES
    from viper.cli.terminal import grid, number, say, show

    say(f"[bold]{score.rows:,} rows[/], probability that [bold cyan]{escape(positive)}[/]")
    show(grid(["score", ""], [[title, number(getattr(score, name), d)] for name, (title, d) in SCORES.items()]))
    say("[bold]Calibration[/]: of rows with such probabilities, how many were so")
    bar = lambda share: Text("█" * round(20 * share) or "▏", style="cyan")  # noqa: E731
    rows = [
        [
            f"{row['predicted']:.3f}",
            f"{row['observed']:.3f}",
            f"{row['lower']:.2f} … {row['upper']:.2f}",
            f"{int(row['rows']):,}",
            "yes" if row["lower"] <= row["predicted"] <= row["upper"] else "no",
            bar(row["observed"]),
        ]
        for row in shape.to_dict("records")
    ]
    table = grid(["predicted", "observed", f"{100 * level:g} %", "rows", "agrees", ""], rows, left=0)
    table.columns[-1].justify = "left"
    show(table)
