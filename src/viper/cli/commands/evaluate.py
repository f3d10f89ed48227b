"""`viper evaluate`: how good a model's probabilities are on rows whose classes are known."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from viper.cli import options
from viper.cli.terminal import note, print_json, print_table, say, short_number

if TYPE_CHECKING:
    import pandas


def evaluate_model(
    model: options.ModelPath,
    data: options.TablePath,
    target: options.KnownTarget = None,
    bins: Annotated[int, typer.Option(help="Number of bins in the calibration table.", min=1)] = 10,
    level: options.Level = 0.95,
    as_json: options.Json = False,
    *,
    reading: options.Reading,
) -> None:
    """Score a model on rows whose classes are known: AUC, log score, Brier score, calibration.

    Examples
    --------
    viper evaluate model.viper test.csv
    viper evaluate model.viper test.csv --target died --bins 20 --json
    """
    fitted, table = options.open_model_and_rows(model, data, reading)

    from viper.cli.commands.predict import prediction_frame
    from viper.cli.preparing import labelled_rows
    from viper.report.metrics import calibration, scores

    rows = labelled_rows(fitted, table, target)
    with table.located():
        predicted = prediction_frame(fitted, rows.frame, level)
    used = rows.known & predicted["probability"].notna().to_numpy()
    if not used.any():
        raise ValueError("some rows must have a class and no missing values; got none.")
    label, predicted = rows.positive[used], predicted[used]
    score = scores(label, predicted["probability"], predicted[["lower", "upper"]], bins)
    shape = calibration(label, predicted["probability"], bins, level)
    if not used.all():
        note(f"{int((~used).sum()):,} rows with missing values are left out.")
    if as_json:
        print_json({**score._asdict(), "level": level, "calibration": shape.to_dict("records")})
    else:
        print_evaluation(score, shape, f"{rows.target} = {fitted.classes_[1]}", level)


def print_evaluation(score: Any, shape: "pandas.DataFrame", positive: str, level: float) -> None:
    from viper.cli.model_card import SCORE_TITLES

    say(f"[bold]{score.rows:,} rows[/], probability that [bold cyan]{escape(positive)}[/]")
    cells = [[title, short_number(getattr(score, name), digits)] for name, (title, digits) in SCORE_TITLES.items()]
    print_table(["score", ""], cells)
    say("[bold]Calibration[/]: predicted probability against observed frequency")
    rows: list[list[str | Text]] = []
    for predicted, observed, n, low, high in shape.itertuples(index=False):
        agrees = "yes" if low <= predicted <= high else "no"
        bar = Text("█" * round(20 * observed) or "▏", style="cyan", justify="left")
        rows.append([f"{predicted:.3f}", f"{observed:.3f}", f"{low:.2f} … {high:.2f}", f"{n:,}", agrees, bar])
    print_table(["predicted", "observed", f"{100 * level:g} %", "rows", "agrees", ""], rows, left=0)
