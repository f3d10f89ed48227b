"""`viper fit`: a model of a table."""

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from viper.cli import options
from viper.cli.options import Missing
from viper.softplus.words import FIT_BOUNDS

if TYPE_CHECKING:
    import pandas

EXAMPLES = [
    "viper fit patients.csv --target died --out model.viper",
    'viper fit patients.csv --formula "died ~ age + C(ward) + age:smoker" --out model.viper',
    "viper fit map.parquet --target quake --model gp --test-size 0.3 --out map.viper",
    "viper fit patients.csv --target died --missing mean --prior auto --json",
]
MODEL = "Model"


class Kind(StrEnum):
    """Of model."""

    logistic = "logistic"
    gp = "gp"


BoundWord = StrEnum("BoundWord", {word: word for word in FIT_BOUNDS})  # type: ignore[misc]


class Covariance(StrEnum):
    """Of the posterior."""

    full = "full"
    diagonal = "diagonal"


class Kernel(StrEnum):
    """Of the Gaussian process."""

    rbf = "rbf"
    matern32 = "matern32"
    matern52 = "matern52"
    linear = "linear"


def fit(
    data: options.Data,
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Column with the two classes.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to save the model.", show_default=False)
    ] = None,
    model: Annotated[Kind, typer.Option(help="Linear log-odds, or a Gaussian process.", rich_help_panel=MODEL)] = (
        Kind.logistic
    ),
    formula: Annotated[
        str | None,
        typer.Option(
            help='Terms, such as "y ~ age + C(ward) + x1:x2"; all columns if not given.', rich_help_panel=MODEL
        ),
    ] = None,
    prior: Annotated[
        str, typer.Option(help="Prior sd of the coefficients: a number, auto or ard.", rich_help_panel=MODEL)
    ] = "1",
    bound: Annotated[BoundWord, typer.Option(help="viper is exact.", rich_help_panel=MODEL)] = BoundWord["viper"],
    terms: Annotated[int | None, typer.Option(help="l of the paper's bound.", rich_help_panel=MODEL, min=1)] = None,
    covariance: Annotated[Covariance, typer.Option(help="Of the posterior.", rich_help_panel=MODEL)] = Covariance.full,
    kernel: Annotated[Kernel, typer.Option(help="Of the Gaussian process.", rich_help_panel=MODEL)] = Kernel.rbf,
    inducing: Annotated[int, typer.Option(help="Points of the Gaussian process.", rich_help_panel=MODEL, min=1)] = 50,
    standardise: Annotated[
        bool,
        typer.Option(
            "--standardise/--no-standardise",
            "--standardize/--no-standardize",
            help="Divide numbers by their sd, so that one prior suits all.",
            rich_help_panel=MODEL,
        ),
    ] = True,
    missing: Annotated[Missing, typer.Option(help="Rows with missing values: refuse, leave out, or fill in.")] = (
        Missing.error
    ),
    drop: Annotated[list[str] | None, typer.Option(help="Column to leave out.", show_default=False)] = None,
    category: Annotated[list[str] | None, typer.Option(help="Numeric column to take as text.", show_default=False)] = (
        None
    ),
    cv: Annotated[
        int | None, typer.Option(help="Folds of the cross-validation; 0 for none. (default: 5)", min=0)
    ] = None,
    test_size: Annotated[
        float | None, typer.Option(help="Share of rows held out, instead of cross-validation.", min=0.01, max=0.99)
    ] = None,
    seed: options.Seed = 1,
    level: options.Level = 0.95,
    force: options.Force = False,
    as_json: options.Json = False,
    format: options.FormatOption = None,
    encoding: options.Encoding = "utf-8",
    separator: options.Separator = None,
    decimal: options.Decimal = ".",
    na: options.Na = None,
) -> None:
    """Fit a model to a table, say what it found and how well it predicts, and save it."""
    from viper.cli.preparing import prepare
    from viper.data.writing import check_output

    if cv is not None and test_size is not None:
        raise typer.BadParameter("--cv and --test-size exclude each other; got both. Choose one")
    if out is not None:
        check_output(out, force)
    table = options.table(data, format, encoding, separator, decimal, na)
    prepared = prepare(table, target, formula, tuple(drop or ()), tuple(category or ()), missing.value)

    settings: dict[str, Any] = {"bound": bound.value, "terms": terms, "covariance": covariance.value}
    settings |= {"random_state": seed, "standardize": standardise}
    if model is Kind.gp:
        # a constant mean, as the weights of a linear one are estimated as points, of which intervals say nothing
        settings |= {"kernel": kernel.value, "mean": "constant", "n_inducing": inducing}
    else:
        settings["prior_scale"] = prior_scale(prior)
    with table.located():
        fitted, learned, seconds = estimate(model, prepared.formula, prepared.frame, missing.value, settings, as_json)
    folds = 5 if cv is None else cv
    result = assess(fitted, learned, folds, test_size, seed, level, as_json)
    record(fitted, learned, prepared, data, seconds, result)
    present(fitted, out, force, level, as_json, prepared.notes)


def prior_scale(text: str) -> float | str:
    if text in ("auto", "ard"):
        return text
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"--prior must be a number, auto or ard; got {text!r}") from None


def estimate(
    kind: Kind, formula: str, frame: "pandas.DataFrame", missing: str, settings: dict[str, Any], quiet: bool
) -> tuple[Any, Any, float]:
    """The fitted model, the rows it saw, and seconds."""
    from viper.cli.terminal import waiting
    from viper.formula.learn import from_learned, learn

    standardize = settings.pop("standardize")
    own = kind is Kind.gp  # Gaussian processes standardise themselves
    learned = learn(formula, frame, missing, standardize and not own)
    if own:
        settings["standardize"] = standardize
    estimator = estimator_class(kind)
    began = time.perf_counter()
    with waiting(f"fitting {len(learned.y):,} rows", quiet):
        return from_learned(estimator, learned, settings), learned, time.perf_counter() - began


def estimator_class(kind: Kind) -> Any:
    import viper

    return viper.VariationalGPClassifier if kind is Kind.gp else viper.VariationalLogisticRegression


def assess(
    fitted: Any, learned: Any, folds: int, test_size: float | None, seed: int, level: float, quiet: bool
) -> dict[str, Any]:
    """Scores on rows that a model did not see, and the certificate of the approximation."""
    from viper.cli.scoring import diagnosis, held_out_scores

    result = held_out_scores(fitted, learned.X, learned.y, folds, test_size, seed, level, quiet)
    return {"scores": result, "diagnosis": diagnosis(fitted, len(learned.y))}


def record(fitted: Any, learned: Any, prepared: Any, data: Path, seconds: float, result: dict[str, Any]) -> None:
    """What `viper summary` tells later, stored with the model."""
    import numpy as np

    classes, counts = np.unique(learned.y, return_counts=True)
    facts = {
        "file": data.name,
        "rows": len(learned.kept),
        "rows_used": len(learned.y),
        "class_counts": {str(label): int(number) for label, number in zip(classes, counts, strict=True)},
        "missing": learned.encoding.counts,
        "left_out": prepared.left_out,
    }
    fitted.formula_.record.update({"data": facts, "seconds": seconds, **result})


def present(fitted: Any, out: Path | None, force: bool, level: float, as_json: bool, notes: list[str]) -> None:
    """Save, and say what was found."""
    from viper.cli.card import describe, draw
    from viper.cli.terminal import emit, note, say
    from viper.errors import OutputError, StorageError

    if out is not None:
        try:
            fitted.save(out, overwrite=force)
        except StorageError as error:
            raise OutputError(str(error)) from None
    for text in notes:
        note(text)
    document = describe(fitted, level)
    if as_json:
        emit({**document, "notes": notes, "saved": None if out is None else str(out)})
        return
    draw(document, most=20, saved=out)
    if out is None:
        note("the model was not saved; add --out model.viper to keep it.")
    else:
        say(f"Saved [bold]{out}[/] ({out.stat().st_size / 1e3:,.0f} kB). Next: viper predict {out} new.csv")
