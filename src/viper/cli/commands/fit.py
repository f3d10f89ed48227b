"""`viper fit`: fit a model to a table."""

import shlex
import time
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from viper.cli import options
from viper.cli.terminal import note, note_if_slow, print_json, say
from viper.softplus.bound_names import FIT_BOUNDS

if TYPE_CHECKING:
    from viper.cli.preparing import RowCounts
    from viper.data.table_file import TableFile
    from viper.formula.learn import Learned

ModelKind = StrEnum("ModelKind", ["logistic", "gp"])
BoundWord = StrEnum("BoundWord", {word: word for word in FIT_BOUNDS})  # type: ignore[misc]
CovarianceShape = StrEnum("CovarianceShape", {"full": "full", "diagonal": "diagonal", "low_rank": "low-rank"})
ClassWeight = StrEnum("ClassWeight", ["balanced"])
KernelChoice = StrEnum("KernelChoice", ["rbf", "matern32", "matern52", "auto", "linear", "additive"])

DEFAULT_FOLDS = 5
MODEL = {"rich_help_panel": "Model"}
BOUND_METHODS = "viper exactly, pg by the Pólya-Gamma bound, mc by Monte Carlo, quadrature by Gauss-Hermite"


def fit_table(
    data: options.TablePath,
    target: options.Target = None,
    out: Annotated[
        Path | None, options.optional("File to save the model to. (default: do not save it)", "--out", "-o")
    ] = None,
    model: Annotated[
        ModelKind, typer.Option(help="Model: logistic regression, or gp, a Gaussian process.", **MODEL)
    ] = ModelKind.logistic,
    ordered: options.Ordered = False,
    levels: options.Levels = None,
    formula: options.FormulaText = None,
    prior: Annotated[
        list[str] | None,
        options.optional(
            "Prior sd of the coefficients: a number; auto (one for all) or ard (one each), chosen to maximise the "
            "ELBO; or age=0.5 for one column or term. Repeat for more. (default: 1)",
            **MODEL,
        ),
    ] = None,
    class_weight: Annotated[
        ClassWeight | None,
        options.optional(
            "balanced gives both classes the same total weight, which changes what the probabilities mean. "
            "(default: rows count equally)",
            **MODEL,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        options.optional(
            "Column with the weights of the rows: counts of identical rows or, with --robust, survey weights. It is "
            "not used as a feature.",
            **MODEL,
        ),
    ] = None,
    robust: Annotated[
        bool,
        typer.Option(
            "--robust",
            help="Estimate sds and intervals from the variation between rows (the sandwich estimator): for survey "
            "weights, class weights and repeated rows.",
            **MODEL,
        ),
    ] = False,
    groups: Annotated[
        str | None,
        options.optional(
            "Column that says which rows belong together, such as the visits of a patient. They are held out together "
            "for the scores, and --robust allows for their likeness. It is not used as a feature.",
            **MODEL,
        ),
    ] = None,
    bound: Annotated[
        BoundWord, typer.Option(help=f"How to compute the expected log-likelihood: {BOUND_METHODS}.", **MODEL)
    ] = BoundWord["viper"],
    terms: Annotated[
        int | None,
        options.optional("Number of terms l of the paper's bound. (default: its limit)", min=1, **MODEL),
    ] = None,
    covariance: Annotated[
        CovarianceShape,
        typer.Option(
            help="Shape of the posterior covariance: full, diagonal (mean field), or low-rank, for many columns.",
            **MODEL,
        ),
    ] = CovarianceShape["full"],
    rank: Annotated[
        int | None, options.optional("Rank of a low-rank covariance. (default: 16)", min=0, **MODEL)
    ] = None,
    components: Annotated[
        int,
        typer.Option(
            help="Number of Gaussians in the posterior; 2 or more for few rows or a rare class, where it is skewed.",
            min=1,
            **MODEL,
        ),
    ] = 1,
    kernel: Annotated[KernelChoice, typer.Option(help="Kernel of the Gaussian process.", **MODEL)] = KernelChoice.rbf,
    inducing: Annotated[
        int | None,
        options.optional(
            "Number of inducing points of the Gaussian process. (default: as many as it needs)", min=1, **MODEL
        ),
    ] = None,
    standardise: Annotated[
        bool,
        typer.Option(
            "--standardise/--no-standardise",
            "--standardize/--no-standardize",
            help="Centre numeric columns and divide them by their sd, so that one prior suits all.",
            **MODEL,
        ),
    ] = True,
    missing: options.Missing = options.MissingRule.error,
    imputations: options.Imputations = 20,
    sweeps: options.Sweeps = 10,
    drop: options.Drop = None,
    category: options.Category = None,
    positive: options.Positive = None,
    unseen: options.Unseen = options.UnseenRule.error,
    beyond: options.Beyond = options.BeyondRule.refuse,
    cv: Annotated[
        int | None,
        options.optional(
            f"Number of cross-validation folds for the scores; 0 for none. (default: {DEFAULT_FOLDS})", min=0
        ),
    ] = None,
    test_size: Annotated[
        float | None,
        options.optional("Share of rows to hold out for the scores, instead of --cv.", min=0.01, max=0.99),
    ] = None,
    seed: options.Seed = 1,
    jobs: Annotated[
        int | None,
        options.optional("Number of threads; -1 for all processors. (default: all if there are many rows)", min=-1),
    ] = None,
    level: options.Level = 0.95,
    force: options.Force = False,
    as_json: options.Json = False,
    *,
    reading: options.Reading,
) -> None:
    """Fit a model to a table, show what it learned and how well it predicts, and save it.

    Examples
    --------
    viper fit patients.csv --target died --out model.viper
    viper fit patients.csv --formula "died ~ age + C(ward) + age:smoker" --out model.viper
    viper fit patients.csv --formula "died ~ age + (1 | hospital)" --out model.viper
    viper fit map.parquet --target quake --model gp --test-size 0.3 --out map.viper
    viper fit patients.csv --target died --missing multiple --prior auto --json
    viper fit survey.csv --target voted --weights weight --robust --groups household
    viper fit survey.csv --target health --ordered --levels poor,fair,good --out model.viper
    """
    from viper.cli.preparing import prepare_rows
    from viper.data.writing import check_output

    if cv is not None and test_size is not None:
        raise typer.BadParameter("--cv and --test-size exclude each other; got both. Choose one")
    chosen = ModelOptions(
        model, ordered, prior or [], class_weight, robust, bound, terms, covariance, rank, components, kernel, inducing,
        standardise, jobs,
    )  # fmt: skip
    chosen.check(levels, positive)
    if out is not None:
        check_output(out, force, data)
    table = reading.table(data)
    prepared = prepare_rows(table, target, formula, drop, category, missing.value, weights, groups, robust)

    from viper.cli.classes import ordered_categories
    from viper.cli.scoring import diagnosis_record, held_out_scores
    from viper.data.checks import seed_of
    from viper.formula.learn import Imputing, check_can_pool, learn_formula

    estimator, settings = chosen.estimator(in_groups=bool(prepared.group_terms))
    check_can_pool(estimator, missing.value, components)
    imputing, scaled = Imputing(imputations, sweeps, seed_of(seed)), standardise and model is not ModelKind.gp
    with table.located(), note_if_slow(f"fitting {len(prepared.frame):,} rows", as_json):
        began = time.perf_counter()
        learned = learn_formula(prepared.formula, prepared.frame, missing.value, scaled, positive, imputing)
        learned = learned.with_rules(unseen.value, beyond.value)
        counts = prepared.counts.of_fit(learned)
        if ordered:
            settings["categories"] = ordered_categories(prepared.frame[learned.encoding.target], learned.y, levels)
        posterior = fit_weighted(estimator, learned, settings | {"random_state": seed}, counts)
        fitted = counts.completed(posterior)
        seconds = time.perf_counter() - began
    folds = DEFAULT_FOLDS if cv is None else cv
    record = {
        "seconds": seconds,
        "scores": held_out_scores(fitted, learned, folds, test_size, seed, level, as_json, counts),
        "diagnosis": diagnosis_record(posterior, len(learned.y)),
        "weighting": {title: name for title, name in (("weights", weights), ("groups", groups)) if name is not None},
    }
    store_record(fitted, prepared.left_out, table, record)
    notes = [*prepared.notes, *weighting_notes(fitted, counts, weights, groups)]
    save_and_show(fitted, out, force, level, as_json, notes)


class ModelOptions(NamedTuple):
    """The options that say which model is fitted."""

    model: ModelKind
    ordered: bool
    prior: list[str]
    class_weight: ClassWeight | None
    robust: bool
    bound: BoundWord
    terms: int | None
    covariance: CovarianceShape
    rank: int | None
    components: int
    kernel: KernelChoice
    inducing: int | None
    standardise: bool
    jobs: int | None

    def typed(self) -> dict[str, str | None]:
        """Return the options that only some models have, with None for those at their defaults."""
        given = {
            "--model": self.model is not ModelKind.logistic,
            "--bound": self.bound is not BoundWord["viper"],
            "--terms": self.terms is not None,
            "--covariance": self.covariance is not CovarianceShape["full"],
            "--rank": self.rank is not None,
            "--components": self.components > 1,
            "--class-weight": self.class_weight is not None,
            "--robust": self.robust,
        }
        return {option: option if there else None for option, there in given.items()}

    def check(self, levels: str | None, positive: str | None) -> None:
        """Raise for options that cannot be combined."""
        from viper.cli.classes import check_ordered_options

        typed = self.typed()
        if self.model is ModelKind.gp and (wrong := typed["--robust"] or typed["--components"]):
            raise typer.BadParameter(f"{wrong} is only for logistic regression; got --model gp. Leave one of them out")
        never = {option: typed[option] for option in typed if option not in ("--class-weight", "--robust")}
        check_ordered_options(self.ordered, {"--levels": levels}, {**never, "--positive": positive})

    def estimator(self, in_groups: bool) -> tuple[Any, dict[str, Any]]:
        """Return the estimator and its settings, for a formula with or without effects of groups."""
        import viper

        weighting = {"class_weight": None if self.class_weight is None else self.class_weight.value}
        method = {"bound": self.bound.value, "terms": self.terms, "covariance": self.covariance.value}
        common: dict[str, Any] = {"n_jobs": self.jobs}
        if self.model is ModelKind.gp:  # it standardises columns itself
            process: dict[str, Any] = {"kernel": self.kernel.value, "n_inducing": self.inducing or "auto"}
            process |= {"standardize": self.standardise} | ({} if in_groups else weighting)
            return viper.VariationalGPClassifier, common | method | process
        common["prior_scale"] = parse_prior_scales(self.prior)
        if in_groups:
            self.check_for_groups()
            return viper.VariationalMixedRegression, common
        if self.ordered:
            return viper.VariationalOrdinalRegression, common | weighting
        settings = {"components": self.components} | ({} if self.rank is None else {"rank": self.rank})
        return viper.VariationalLogisticRegression, common | method | settings | weighting

    def check_for_groups(self) -> None:
        """Raise for an option that models with group terms do not have."""
        typed = self.typed()
        for option in ("--bound", "--terms", "--covariance", "--class-weight", "--robust", "--components"):
            if typed[option]:
                raise typer.BadParameter(
                    f"{option} cannot be combined with group terms, such as (1 | ward); got both. Leave it out"
                )
        if self.ordered:
            raise typer.BadParameter("--ordered cannot be combined with group terms; got both. Leave one of them out")


def fit_weighted(estimator: Any, learned: "Learned", settings: dict[str, Any], counts: "RowCounts") -> Any:
    """Fit the rows with their weights, without the warning that `weighting_notes` replaces by one about the options."""
    from viper.errors import WeightWarning
    from viper.formula.learn import fit_learned

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeightWarning)
        return fit_learned(estimator, learned, settings, counts.weight)


def weighting_notes(fitted: Any, counts: "RowCounts", weights: str | None, groups: str | None) -> list[str]:
    """Say what weights and groups do to probabilities and intervals."""
    from viper.cli.preparing import target_of

    robust, notes = counts.robust, []
    way_out = "pass --robust." if hasattr(fitted, "robust") else "use logistic regression with --robust."
    if getattr(fitted, "class_weight", None) is not None:
        training = fitted.formula_.training
        share = f"{training.class_counts[str(fitted.classes_[1])] / training.rows_used:.1%}"
        meant = f"half of the rows have {target_of(fitted)} = {fitted.classes_[1]}"
        here = f"{share} have. In Python, predict with offset=model.prevalence_offset() to get frequencies"
        if len(fitted.classes_) > 2:
            meant, here = f"all classes of {target_of(fitted)} are equally common", "they are not"
        notes.append(
            f"--class-weight balanced: probabilities are for a population in which {meant}, not frequencies in this "
            f"table, in which {here}."
        )
        notes.append(
            "--class-weight balanced: the robust intervals allow for the weights."
            if robust
            else "--class-weight balanced: intervals treat each weight as a number of rows, and are too narrow if a "
            f"class is rare; {way_out}"
        )
    if counts.weight is not None and not robust:
        notes.append(
            f"--weights {weights}: a weight of 3 counts a row three times, so intervals are as wide as for "
            f"{counts.weight.sum():,.6g} rows. If a weight says how many others a row represents, {way_out}"
        )
    if counts.groups is not None and not robust:
        notes.append(
            f"--groups {groups}: the scores hold out whole groups, but intervals treat the rows as independent; "
            f"{way_out}"
        )
    return notes


def parse_prior_scales(texts: list[str]) -> float | str | dict[str, float | str]:
    """Return one scale for all columns, or one by name, with "*" for all others."""
    named = {
        name.strip(): parse_prior_scale(number) for name, sign, number in (x.rpartition("=") for x in texts) if sign
    }
    plain = [parse_prior_scale(text) for text in texts if "=" not in text]
    if len(plain) > 1 or (named and any(isinstance(x, str) for x in [*plain, *named.values()])):
        raise typer.BadParameter(
            f"--prior must be one number, auto or ard, or numbers by name; got {' and '.join(texts)}"
        )
    rest = plain[0] if plain else 1.0
    return {**named, "*": rest} if named else rest


def parse_prior_scale(text: str) -> float | str:
    if text in ("auto", "ard"):
        return text
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"--prior must be a number, auto or ard, or NAME=NUMBER; got {text!r}") from None


def store_record(fitted: Any, left_out: dict[str, str], table: "TableFile", record: dict[str, Any]) -> None:
    """Store with the model what `viper summary` shows later."""
    from dataclasses import replace

    from viper.cli.model_card import file_record

    fitted.formula_.record.update(record)
    training = replace(fitted.formula_.training, file=file_record(table, left_out))
    fitted.formula_ = replace(fitted.formula_, training=training)


def save_and_show(fitted: Any, out: Path | None, force: bool, level: float, as_json: bool, notes: list[str]) -> None:
    from viper.cli.model_card import MOST_SHOWN, model_document, print_model
    from viper.data.writing import is_stream
    from viper.errors import OutputError, StorageError

    document = model_document(fitted, level)  # first: a model that cannot be shown is not saved
    if out is not None:
        try:
            fitted.save(out, overwrite=force)
        except StorageError as error:
            raise OutputError(str(error)) from None
    for text in notes:
        note(text)
    if as_json:
        print_json({**document, "notes": notes, "saved": out})
        return
    print_model(document, MOST_SHOWN, saved=out)
    if out is None:
        note("the model was not saved; add --out model.viper to keep it.")
    elif is_stream(out):
        note(f"the model was written to {out}.")
    else:
        size = f"{out.stat().st_size / 1e3:,.0f} kB"
        say(f"Saved [bold]{escape(str(out))}[/] ({size}). Next: viper predict {escape(shlex.quote(str(out)))} new.csv")
