"""`viper compare`: bounds, covariances, kernels and scikit-learn's estimators on one table, side by side."""

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

import viper
from viper.cli import options
from viper.cli.signals import stop_if_interrupted
from viper.cli.terminal import note, print_json, print_table, say, short_number, show_progress

LARGEST_GP = 5_000  # rows for viper's Gaussian process
LARGEST_EXACT_GP = 1_000  # rows for scikit-learn's, whose time grows with their cube
DIGITS_SHOWN = {"log_score": 4, "brier": 4, "auc": 4, "calibration_error": 3, "interval_width": 3, "seconds": 2}
RANKED = ("log_score", "brier", "auc", "calibration_error", "seconds")  # columns whose best value is highlighted

MakeModel = Callable[[], Any]


def compare_models(
    data: options.TablePath,
    target: options.Target = None,
    formula: options.FormulaText = None,
    only: Annotated[
        list[str] | None,
        options.optional("Compare only models whose names contain this text. Repeat for more. (default: all)"),
    ] = None,
    missing: options.Missing = options.MissingRule.error,
    imputations: options.Imputations = 20,
    sweeps: options.Sweeps = 10,
    drop: options.Drop = None,
    category: options.Category = None,
    positive: options.Positive = None,
    cv: Annotated[int, typer.Option(help="Number of folds of the cross-validation.", min=2)] = 5,
    seed: options.Seed = 1,
    level: options.Level = 0.95,
    as_json: options.Json = False,
    *,
    reading: options.Reading,
) -> None:
    """Cross-validate viper's models and scikit-learn's on one table: log score, Brier, AUC, calibration, seconds.

    Examples
    --------
    viper compare data.csv --target y
    viper compare data.csv --target y --only viper --only LogisticRegression --cv 10
    viper compare data.parquet --target y --missing mean --json
    """
    from viper.cli.preparing import prepare_rows

    table = reading.table(data)
    prepared = prepare_rows(table, target, formula, drop, category, missing.value)

    from viper.cli.scoring import Folds, cross_validated_scores, train_test_splits
    from viper.data.checks import seed_of
    from viper.formula.learn import Imputing, learn_formula

    with table.located():
        imputing = Imputing(imputations, sweeps, seed_of(seed))
        learned = learn_formula(prepared.formula, prepared.frame, missing.value, True, positive, imputing)
    chosen, skipped = choose_models(comparable_models(seed, learned.encoding.intercept), len(learned.y), only)
    for text in (*prepared.notes, *skipped):
        note(text)
    splits = train_test_splits(learned.labels, cv, None, seed)
    folds = Folds(learned, splits)
    results = []
    with show_progress("Comparing", len(chosen) * len(splits), as_json) as step:
        for name, make in chosen.items():
            step(name, by=0)
            try:
                found = cross_validated_scores(make(), folds, level, step)
            except (ValueError, ImportError, ArithmeticError) as error:  # one that fails does not end the comparison
                stop_if_interrupted()
                found = {"error": " ".join(str(error).split())}
            results.append({"model": name, **found})
    results.sort(key=lambda row: -row.get("log_score", -float("inf")))
    document = {"rows": len(learned.y), "columns": learned.X.shape[1], "folds": len(splits), "results": results}
    if as_json:
        print_json({**document, "skipped": skipped})
    else:
        print_comparison(document, level)


def comparable_models(seed: int, intercept: bool) -> dict[str, tuple[int | None, MakeModel]]:
    """Return name -> (largest number of rows, function that makes the model)."""

    def logistic(**given: Any) -> MakeModel:
        settings: dict[str, Any] = {"fit_intercept": intercept, "random_state": seed, "verbose": False}
        return lambda: viper.VariationalLogisticRegression(**settings, **given)

    def gp() -> Any:
        return viper.VariationalGPClassifier(mean="constant", random_state=seed, verbose=False)

    def sklearn(module: str, name: str, **given: Any) -> MakeModel:
        return lambda: getattr(import_module(f"sklearn.{module}"), name)(**given)

    def exact_gp() -> Any:
        from sklearn.gaussian_process import GaussianProcessClassifier
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel

        return GaussianProcessClassifier(ConstantKernel(1.0) * RBF(1.0), random_state=seed)

    plain = sklearn("linear_model", "LogisticRegression", fit_intercept=intercept, max_iter=1000)
    trees = sklearn("ensemble", "HistGradientBoostingClassifier", random_state=seed)
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
        "share of the classes": (None, sklearn("dummy", "DummyClassifier", strategy="prior")),
    }


def choose_models(
    every: dict[str, tuple[int | None, MakeModel]], rows: int, only: list[str] | None
) -> tuple[dict[str, MakeModel], list[str]]:
    """Return the models asked for that can handle so many rows, and a note for each that cannot."""
    wanted = {n: c for n, c in every.items() if not only or any(word.lower() in n.lower() for word in only)}
    if not wanted:
        raise ValueError(f"--only must be part of one of {list(every)}; got {only}.")
    large = {name: most for name, (most, _) in wanted.items() if most is not None and rows > most}
    skipped = [f"{name} is left out: more than {most:,} rows." for name, most in large.items()]
    if len(large) == len(wanted):
        raise ValueError(f"--only must keep a model that can handle {rows:,} rows; got {only}. {' '.join(skipped)}")
    return {name: make for name, (_, make) in wanted.items() if name not in large}, skipped


def print_comparison(document: dict[str, Any], level: float) -> None:
    results = document["results"]
    done = [row for row in results if "error" not in row]
    best: dict[str, float | None] = {}
    for name in RANKED:
        found = [row[name] for row in done if row[name] is not None]
        best[name] = (max if name in ("log_score", "auc") else min)(found, default=None)

    def cell(row: dict[str, Any], name: str, digits: int) -> str | Text:
        text = short_number(row[name], digits)
        return Text(text, style="bold green") if name in best and row[name] == best[name] else text

    rows = [[row["model"], *(cell(row, name, digits) for name, digits in DIGITS_SHOWN.items())] for row in done]
    size = f"{document['rows']:,} rows × {document['columns']} columns"
    say(f"[bold]{size}[/], {document['folds']}-fold cross-validation; the best log score comes first")
    titles = ["model", "log score", "Brier", "AUC", "calib. error", f"{100 * level:g} % width", "s per fit"]
    print_table(titles, rows)
    for row in results:
        if "error" in row:
            say(f"  [yellow]{escape(row['model'])} failed:[/] {escape(row['error'])}")
