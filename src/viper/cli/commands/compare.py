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
from viper.cli.terminal import note, plus_minus, print_json, print_table, say, short_number, show_progress

LARGEST_GP = 5_000  # rows for viper's Gaussian process
LARGEST_LOO = 2_000  # rows for leave-one-out without --loo: it takes about a second per thousand rows and model
LOO_DRAWS = 1_000
LARGEST_EXACT_GP = 1_000  # rows for scikit-learn's, whose time is cubic in them
DIGITS_SHOWN = {"brier": 4, "auc": 4, "calibration_error": 3, "interval_width": 3, "seconds": 2}
RANKED = ("brier", "auc", "calibration_error", "seconds")  # columns whose best value is highlighted

ONLY_FOR_TWO = ("bound", "terms", "prior auto")  # in names of models for two classes only, or too slow for more

MakeModel = Callable[[], Any]


def compare_models(
    data: options.TablePath,
    target: options.Target = None,
    formula: options.FormulaText = None,
    ordered: options.Ordered = False,
    levels: options.Levels = None,
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
    loo: Annotated[
        bool | None,
        typer.Option(
            "--loo/--no-loo",
            help="Also compare viper's logistic models by leave-one-out. (default: up to 2,000 rows)",
            show_default=False,
        ),
    ] = None,
    seed: options.Seed = 1,
    level: options.Level = 0.95,
    as_json: options.Json = False,
    *,
    reading: options.Reading,
) -> None:
    """Cross-validate viper's models and scikit-learn's on one table, with the standard errors of their differences.

    Examples
    --------
    viper compare data.csv --target y
    viper compare data.csv --target y --only viper --only LogisticRegression --cv 10
    viper compare data.parquet --target y --missing mean --json
    viper compare survey.csv --target health --ordered --levels poor,fair,good
    """
    from viper.cli.classes import check_ordered_options, ordered_categories
    from viper.cli.preparing import prepare_rows

    check_ordered_options(ordered, {"--levels": levels}, {"--positive": positive})
    table = reading.table(data)
    prepared = prepare_rows(table, target, formula, drop, category, missing.value)
    if prepared.group_terms:
        raise typer.BadParameter(
            f"compare takes formulas without group terms; got {prepared.group_terms[0]}. viper fit scores such a model"
        )

    from viper.data.checks import seed_of
    from viper.formula.learn import Imputing, learn_formula

    imputing = Imputing(imputations, sweeps, seed_of(seed))
    with table.located():
        learned = learn_formula(prepared.formula, prepared.frame, missing.value, True, positive, imputing)
        column = prepared.frame[learned.encoding.target]
        order = ordered_categories(column, learned.y, levels) if ordered else None
    chosen, skipped = choose_models(models_for(learned, order, seed), len(learned.y), only)
    for text in (*prepared.notes, *skipped):
        note(text)
    document = comparison(chosen, learned, cv, seed, level, as_json)
    if wants_loo(loo, learned):
        fitting = {row["model"]: chosen[row["model"]] for row in document["results"] if "error" not in row}
        document["loo"] = loo_results(fitting, learned.X, learned.labels, as_json)
    if as_json:
        print_json({**document, "skipped": skipped})
    else:
        print_comparison(document, level)


def comparison(
    models: dict[str, MakeModel], learned: Any, cv: int, seed: int, level: float, quiet: bool
) -> dict[str, Any]:
    """Cross-validate the models; one that fails gets its error instead of scores, and the comparison goes on."""
    from viper.cli.scoring import Folds, cross_validated, train_test_splits

    folds = Folds(learned, train_test_splits(learned.labels, cv, None, seed))
    held_out, failed = {}, []
    with show_progress("Comparing", len(models) * len(folds.splits), quiet) as step:
        for name, make in models.items():
            step(name, by=0)
            try:
                held_out[name] = cross_validated(make(), folds, level, step)
            except (ValueError, ImportError, ArithmeticError) as error:
                stop_if_interrupted()
                failed.append({"model": name, "error": " ".join(str(error).split())})
    rows, columns = learned.X.shape
    results = [*ranked_results(held_out), *failed]
    return {"rows": rows, "columns": columns, "folds": len(folds.splits), "results": results}


def ranked_results(held_out: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the models' scores, the best log score first, and their differences from the best with standard errors.

    Folds share training rows, so the errors are slightly too small (Bengio and Grandvalet, 2004).
    """
    from viper.report.metrics import score_differences

    if not held_out:
        return []
    label = next(iter(held_out.values())).label
    probabilities = {name: rows.probability for name, rows in held_out.items()}
    tables = {score: score_differences(label, probabilities, score) for score in ("log_score", "brier")}
    results = []
    for name in tables["log_score"].index:
        result = {"model": name, **held_out[name].scores()}
        for score, table in tables.items():
            row = table.loc[name]
            result |= {f"{score}_difference": row["difference"], f"{score}_difference_error": row["error"]}
            result |= {f"{score}_clearly_worse": bool(row["clear"])}
        results.append(result)
    return results


def wants_loo(asked: bool | None, learned: Any) -> bool:
    """Return whether to compare by leave-one-out: if asked to, or by default for few rows, where it is possible."""
    if not (learned.tables or has_more_classes(learned)):
        return len(learned.y) <= LARGEST_LOO if asked is None else asked
    if asked:
        why = "each fold draws its missing values anew" if learned.tables else "it needs exactly two classes"
        note(f"leave-one-out is skipped: {why}.")
    return False


def has_more_classes(learned: Any) -> bool:
    """Return whether there are more than two classes."""
    return len({*learned.labels.tolist()}) > 2


def loo_results(models: dict[str, MakeModel], X: Any, y: Any, quiet: bool) -> list[dict[str, Any]]:
    """Return leave-one-out scores of the models that have them, the best first, with differences from the best.

    They are for the exact posterior, so they compare priors, not approximations of the same posterior.
    """
    made = {name: make() for name, make in models.items()}
    ours = {
        name: model
        for name, model in made.items()
        if hasattr(model, "loo") and (model.bound, model.terms, model.covariance) == ("viper", None, "full")
    }
    found = {}
    with show_progress("Leaving out rows", len(ours), quiet) as step:
        for name, model in ours.items():
            step(f"{name}, leaving out rows", by=0)
            found[name] = model.fit(X, y).loo(draws=LOO_DRAWS)
            step()
    best = max(found.values(), key=lambda result: result.elpd_loo, default=None)
    results = []
    for name, result in sorted(found.items(), key=lambda item: -item[1].elpd_loo):
        difference, error = result.minus(best)
        values = {"elpd_loo": result.elpd_loo, "se": result.se, "p_loo": result.p_loo}
        values |= {"difference": difference, "difference_error": error, "doubtful_rows": len(result.doubtful)}
        results.append({"model": name, **values})
    return results


def comparable_models(seed: int, intercept: bool) -> dict[str, tuple[int | None, MakeModel]]:
    """Return name -> (largest number of rows, function that makes the model)."""

    def logistic(**given: Any) -> MakeModel:
        settings: dict[str, Any] = {"fit_intercept": intercept, "random_state": seed, "verbose": False}
        return lambda: viper.VariationalLogisticRegression(**settings, **given)

    def gp() -> Any:
        return viper.VariationalGPClassifier(random_state=seed, verbose=False)

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
        "class shares only": (None, sklearn("dummy", "DummyClassifier", strategy="prior")),
    }


def models_for(learned: Any, order: list[Any] | None, seed: int) -> dict[str, tuple[int | None, MakeModel]]:
    """Return the models that suit the classes, beginning with the ordinal one if the classes are ordered levels."""
    every = comparable_models(seed, learned.encoding.intercept)
    if has_more_classes(learned):
        every = {name: made for name, made in every.items() if not any(word in name for word in ONLY_FOR_TWO)}
    return every if order is None else {"viper ordinal": (None, ordinal_model(seed, order)), **every}


def ordinal_model(seed: int, order: list[Any]) -> MakeModel:
    return lambda: viper.VariationalOrdinalRegression(categories=order, random_state=seed, verbose=False)


def choose_models(
    every: dict[str, tuple[int | None, MakeModel]], rows: int, only: list[str] | None
) -> tuple[dict[str, MakeModel], list[str]]:
    """Return those of the wanted models that can handle so many rows, and a note for each of the others."""
    wanted = {n: c for n, c in every.items() if not only or any(word.lower() in n.lower() for word in only)}
    if not wanted:
        raise ValueError(f"--only must be part of one of {list(every)}; got {only}.")
    large = {name: most for name, (most, _) in wanted.items() if most is not None and rows > most}
    skipped = [f"{name} is skipped: it takes at most {most:,} rows." for name, most in large.items()]
    if len(large) == len(wanted):
        raise ValueError(f"--only must keep a model that can handle {rows:,} rows; got {only}. {' '.join(skipped)}")
    return {name: make for name, (_, make) in wanted.items() if name not in large}, skipped


def print_comparison(document: dict[str, Any], level: float) -> None:
    results = document["results"]
    done = [row for row in results if "error" not in row]
    best: dict[str, float | None] = {}
    for name in RANKED:
        found = [row[name] for row in done if row[name] is not None]
        best[name] = (max if name == "auc" else min)(found, default=None)

    def cell(row: dict[str, Any], name: str, digits: int) -> str | Text:
        text = short_number(row[name], digits)
        return Text(text, style="bold green", justify="right") if name in best and row[name] == best[name] else text

    rows = []
    for row in done:
        against = plus_minus(row["log_score_difference"], row["log_score_difference_error"])
        scored = [cell(row, name, digits) for name, digits in DIGITS_SHOWN.items()]
        rows.append([row["model"], short_number(row["log_score"], 4), "best" if row is done[0] else against, *scored])
    size = f"{document['rows']:,} rows × {document['columns']} columns"
    say(f"[bold]{size}[/], {document['folds']}-fold cross-validation; the best log score comes first")
    width = f"{100 * level:g} % width"
    titles = ["model", "log score", "from the best", "Brier", "AUC", "calib. error", width, "s per fit"]
    print_table(titles, rows, spare=(6, 5, 7, 3))
    if said := tie_sentence([(row["model"], not row["log_score_clearly_worse"]) for row in done]):
        say(f"  {said}")
    for row in results:
        if "error" in row:
            say(f"  [yellow]{escape(row['model'])} failed:[/] {escape(row['error'])}")
    if document.get("loo"):
        print_loo(document["loo"])


def tie_sentence(tied: list[tuple[str, bool]]) -> str:
    """Say which models are not clearly worse than the first: by two standard errors of the difference or less."""
    best, *others = tied or [("", False)]
    close = [escape(name) for name, is_close in others if is_close]
    if not others:
        return ""
    if not close:
        return f"[bold]{escape(best[0])}[/] is clearly best: all others are behind by more than two standard errors."
    return f"No clear difference from the best (within two standard errors): {'; '.join(close)}."


def print_loo(results: list[dict[str, Any]]) -> None:
    say("\n[bold]Leave-one-out[/] with the exact posterior: summed log scores of rows predicted from all others (elpd)")
    rows = []
    for k, row in enumerate(results):
        against = plus_minus(row["difference"], row["difference_error"]) if k else "best"
        elpd = f"{row['elpd_loo']:,.1f} ± {row['se']:,.1f}"
        rows.append([row["model"], elpd, against, f"{row['p_loo']:,.1f}", f"{row['doubtful_rows']:,}"])
    print_table(["model", "elpd", "from the best", "parameters", "doubtful rows"], rows)
    close = [(row["model"], -row["difference"] <= 2 * row["difference_error"]) for row in results]
    if said := tie_sentence(close):
        say(f"  {said}")
    if any(row["doubtful_rows"] for row in results):
        say("  [dim]Leaving out a doubtful row changes the fit too much for importance weights; prefer --cv.[/]")
