"""`viper compare`: bounds, families, kernels and scikit-learn's estimators on one table, side by side."""

from collections.abc import Callable
from typing import Annotated, Any

import typer

from viper.cli import options
from viper.cli.options import Missing

EXAMPLES = [
    "viper compare data.csv --target y",
    "viper compare data.csv --target y --only viper --only LogisticRegression --cv 10",
    "viper compare data.parquet --target y --missing mean --json",
]
LARGEST_GP = 5_000  # rows for a Gaussian process here
LARGEST_EXACT_GP = 1_000  # rows for scikit-learn's, which needs their cube
SORTS = ("log_score", "brier", "auc", "calibration_error", "seconds")


def compare(
    data: options.Data,
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Column with the two classes.", show_default=False)
    ] = None,
    formula: Annotated[str | None, typer.Option(help="Terms; all columns if not given.", show_default=False)] = None,
    only: Annotated[list[str] | None, typer.Option(help="Part of the names to compare.", show_default=False)] = None,
    missing: Annotated[Missing, typer.Option(help="Rows with missing values.")] = Missing.error,
    drop: Annotated[list[str] | None, typer.Option(help="Column to leave out.", show_default=False)] = None,
    category: Annotated[list[str] | None, typer.Option(help="Numeric column to take as text.", show_default=False)] = (
        None
    ),
    cv: Annotated[int, typer.Option(help="Folds.", min=2)] = 5,
    seed: options.Seed = 1,
    level: options.Level = 0.95,
    as_json: options.Json = False,
    format: options.FormatOption = None,
    encoding: options.Encoding = "utf-8",
    separator: options.Separator = None,
    decimal: options.Decimal = ".",
    na: options.Na = None,
) -> None:
    """Cross-validate viper's models and scikit-learn's on one table: log score, Brier, AUC, calibration, seconds."""
    from viper.cli.preparing import prepare
    from viper.cli.terminal import emit, note, progress

    table = options.table(data, format, encoding, separator, decimal, na)
    prepared = prepare(table, target, formula, tuple(drop or ()), tuple(category or ()), missing.value)

    from viper.cli.scoring import splits
    from viper.formula.learn import learn

    with table.located():
        learned = learn(prepared.formula, prepared.frame, missing.value, standardize=True)
    for text in prepared.notes:
        note(text)
    chosen, skipped = choose(candidates(seed, learned.encoding.intercept), len(learned.y), only)
    for text in skipped:
        note(text)
    parts = splits(learned.y, cv, None, seed)
    results = []
    with progress("Comparing", len(chosen) * len(parts), as_json) as step:
        for name, make in chosen.items():
            step(name, by=0)
            results.append({"model": name, **attempt(make, learned, parts, level, step)})
    results.sort(key=lambda row: -row.get("log_score", -float("inf")))
    document = {"rows": len(learned.y), "columns": learned.X.shape[1], "folds": len(parts), "results": results}
    if as_json:
        emit({**document, "skipped": skipped})
    else:
        draw(document, level)


def candidates(seed: int, intercept: bool) -> dict[str, tuple[int | None, Callable[[], Any]]]:
    """Name -> (largest number of rows, how to make it)."""

    def logistic(**given: Any) -> Callable[[], Any]:
        def make() -> Any:
            from viper import VariationalLogisticRegression

            return VariationalLogisticRegression(fit_intercept=intercept, random_state=seed, verbose=False, **given)

        return make

    def gp() -> Any:
        from viper import VariationalGPClassifier

        return VariationalGPClassifier(mean="constant", random_state=seed, verbose=False)

    def plain() -> Any:
        from sklearn.linear_model import LogisticRegression

        return LogisticRegression(fit_intercept=intercept, max_iter=1000)

    def exact_gp() -> Any:
        from sklearn.gaussian_process import GaussianProcessClassifier
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel

        return GaussianProcessClassifier(ConstantKernel(1.0) * RBF(1.0), random_state=seed)

    def trees() -> Any:
        from sklearn.ensemble import HistGradientBoostingClassifier

        return HistGradientBoostingClassifier(random_state=seed)

    def share() -> Any:
        from sklearn.dummy import DummyClassifier

        return DummyClassifier(strategy="prior")

    return {
        "viper logistic": (None, logistic()),
        "viper logistic, prior auto": (None, logistic(prior_scale="auto")),
        "viper logistic, diagonal": (None, logistic(covariance="diagonal")),
        "viper logistic, bound pg": (None, logistic(bound="pg")),
        "viper logistic, terms 12": (None, logistic(terms=12)),
        "viper Gaussian process": (LARGEST_GP, gp),
        "sklearn LogisticRegression": (None, plain),
        "sklearn GaussianProcessClassifier": (LARGEST_EXACT_GP, exact_gp),
        "sklearn HistGradientBoosting": (None, trees),
        "share of the classes": (None, share),
    }


def choose(
    every: dict[str, tuple[int | None, Callable[[], Any]]], rows: int, only: list[str] | None
) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Those asked for that can stand so many rows, and a word on those that cannot."""
    wanted = {n: c for n, c in every.items() if not only or any(word.lower() in n.lower() for word in only)}
    if not wanted:
        raise ValueError(f"--only must be part of one of {list(every)}; got {only}.")
    large = {name: most for name, (most, _) in wanted.items() if most is not None and rows > most}
    skipped = [f"{name} is left out: more than {most:,} rows." for name, most in large.items()]
    if len(large) == len(wanted):
        raise ValueError(f"--only must leave a model that takes {rows:,} rows; got {only}. {' '.join(skipped)}")
    return {name: make for name, (_, make) in wanted.items() if name not in large}, skipped


def attempt(make: Callable[[], Any], learned: Any, parts: list[Any], level: float, step: Any) -> dict[str, Any]:
    """Its scores, or why it has none: one model's failure is not the comparison's."""
    from viper.cli.scoring import score

    try:
        return score(make(), learned.X, learned.y, parts, level, step)
    except (ValueError, ImportError, ArithmeticError) as error:
        return {"error": " ".join(str(error).split())}


def draw(document: dict[str, Any], level: float) -> None:
    from rich.markup import escape
    from rich.text import Text

    from viper.cli.terminal import grid, number, say, show

    results = document["results"]
    done = [row for row in results if "error" not in row]
    best: dict[str, float | None] = {}
    for name in SORTS:
        found = [row[name] for row in done if row[name] is not None]
        best[name] = (max if name in ("log_score", "auc") else min)(found, default=None)

    def cell(row: dict[str, Any], name: str, digits: int) -> str | Text:
        text = number(row[name], digits)
        return Text(text, style="bold green") if name in best and row[name] == best[name] else text

    digits = {"log_score": 4, "brier": 4, "auc": 4, "calibration_error": 3, "interval_width": 3, "seconds": 2}
    rows = [[row["model"], *(cell(row, name, d) for name, d in digits.items())] for row in done]
    size = f"{document['rows']:,} rows × {document['columns']} columns"
    say(f"[bold]{size}[/], {document['folds']}-fold cross-validation; the best log score on top")
    show(grid(["model", "log score", "Brier", "AUC", "calib. error", f"{100 * level:g} % width", "s per fit"], rows))
    for row in results:
        if "error" in row:
            say(f"  [yellow]{escape(row['model'])} failed:[/] {escape(row['error'])}")
