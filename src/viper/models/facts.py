"""The facts about a fitted model, collected once. Notebook, report and command line choose their own words."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from viper.formula.columns import calendar_days, number_text
from viper.formula.training import TrainingData
from viper.inference.mixture.posterior import count_gaussians
from viper.models.weighting import APART

INTERCEPT = "intercept"
MOST_SCALES_NAMED = 8


def coefficient_names(columns: Iterable[Any], intercept: bool) -> list[str]:
    """Return the names of the coefficients, with the intercept last. A column named so is quoted, as in a formula."""
    names = [f"`{INTERCEPT}`" if name == INTERCEPT else name for name in map(str, columns)]
    return [*names, *([INTERCEPT] if intercept else [])]


@dataclass(frozen=True)
class PriorFacts:
    """The prior of a logistic regression's coefficients."""

    scale: Any  # the option `prior_scale`: a number, an array, a matrix, "auto" or "ard"
    sds: dict[str, float]  # coefficient -> its prior standard deviation; without the intercept
    correlated: bool  # whether a covariance matrix was given

    @property
    def chosen(self) -> bool:
        """Whether the standard deviations maximise the ELBO."""
        return isinstance(self.scale, str)

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest standard deviation."""
        return min(self.sds.values()), max(self.sds.values())


def scales_by_name(sds: Mapping[str, float]) -> str:
    """Say which coefficients have which prior standard deviation; empty if all have the same."""
    texts = {name: f"{sd:.3g}" for name, sd in sds.items()}
    common, times = Counter(texts.values()).most_common(1)[0]
    if times == len(texts):
        return ""
    rest = times > 1 and len(texts) > MOST_SCALES_NAMED
    named = [f"{name} {text}" for name, text in texts.items() if not rest or text != common]
    more = [f"{len(named) - MOST_SCALES_NAMED} more"] if len(named) > MOST_SCALES_NAMED else []
    return ", ".join([*named[:MOST_SCALES_NAMED], *more, *([f"all others {common}"] if rest else [])])


@dataclass(frozen=True)
class WeightingFacts:
    """How the rows of the fit counted. The columns are known for fits on the command line."""

    class_weight: dict[str, float] | None  # class -> factor of its rows; None without class weights
    weights: str | None  # column with the weights of the rows
    groups: str | None  # column that says which rows belong together
    robust_groups: int  # number of independent groups of rows behind robust covariances; 0 for the posterior itself
    mean_weight: float = math.nan  # mean weight of a row, without class weights; NaN if unknown

    def lines(self) -> dict[str, str]:
        """Sentences about "weights" and "intervals", where there is something to say."""
        weights = [] if self.weights is None else [f"of the rows: {self.weights}"]
        if abs(self.mean_weight - 1.0) > APART and not self.robust_groups:
            weights.append(
                f"a row counts as {number_text(self.mean_weight)} rows on average, and intervals are as narrow as for "
                "that many rows; survey weights need robust intervals (--robust)"
            )
        if self.class_weight is not None:
            factors = ", ".join(f"{label} × {factor:.3g}" for label, factor in self.class_weight.items())
            weights.append(f"of the classes: {factors}, so probabilities are not frequencies in these data")
        groups = "rows" if self.groups is None else f"groups of rows by {self.groups}"
        found = {"weights": "; ".join(weights)} if weights else {}
        if self.robust_groups:
            found["intervals"] = f"robust (sandwich covariance), from {self.robust_groups:,} independent {groups}"
        elif self.groups is not None:
            found["intervals"] = f"of the posterior, for independent rows; only the scores keep {groups} together"
        return found


@dataclass(frozen=True)
class ProcessFacts:
    """The Gaussian process: names of kernel and mean function, and the number of inducing points."""

    kernel: str
    mean: str
    inducing: int


@dataclass(frozen=True)
class ModelFacts:
    """What a model is, and how its fit ended."""

    classes: list[Any]
    target: str | None  # `target` and `formula` are None without a formula
    formula: str | None
    bound: str
    terms: int | None
    covariance: str
    elbo: float
    elbo_certified: float  # a lower bound on `elbo` that allows for all rounding errors
    converged: bool
    status: str  # why the solver stopped
    iterations: int
    weighting: WeightingFacts
    prior: PriorFacts | None = None  # None for a Gaussian process
    process: ProcessFacts | None = None  # None for a logistic or an ordinal regression
    ordered: bool = False  # whether the classes are levels in order
    grouped: bool = False  # whether there are effects of groups
    components: int = 1  # Gaussians in the posterior

    @property
    def family(self) -> str:
        """The variational family, in words."""
        if self.components == 1:
            return f"Gaussian, {self.covariance} covariance"
        return f"mixture of {self.components} Gaussians, {self.covariance} covariances"

    @property
    def kind(self) -> str:
        if self.process is not None:
            return "gp"
        return "ordinal" if self.ordered else "mixed" if self.grouped else "logistic"

    @property
    def exact(self) -> bool:
        """Whether the fit maximised the ELBO itself rather than a bound on it."""
        return self.bound == "viper" and self.terms is None

    @property
    def rounding(self) -> str:
        """How exact the ELBO is. With levels in order, its mean over their thresholds is a sum over a few points."""
        return f"{'rounded' if self.ordered else 'certified'} to {self.allowance:.0e} nats"

    @property
    def allowance(self) -> float:
        """Nats between the ELBO and its certified lower bound."""
        return self.elbo - self.elbo_certified


def model_facts(model: Any) -> ModelFacts:
    """Collect the facts of a fitted estimator."""
    encoding = getattr(model, "formula_", None)
    is_logistic = hasattr(model, "coef_")
    return ModelFacts(
        classes=model.classes_.tolist(),
        target=None if encoding is None else encoding.target,
        formula=None if encoding is None else encoding.formula,
        bound=model.bound,
        terms=model.terms,
        covariance=model.covariance,
        components=count_gaussians(model.posterior_),
        elbo=model.elbo_,
        elbo_certified=model.elbo_bound_,
        converged=model.converged_,
        status=str(model.status_),
        iterations=model.n_iter_,
        weighting=weighting_facts(model),
        prior=prior_facts(model) if is_logistic else None,
        process=None if is_logistic else process_facts(model),
        ordered=hasattr(model, "thresholds_"),
        grouped=hasattr(model, "factors_"),
    )


def weighting_facts(model: Any) -> WeightingFacts:
    encoding, factors = getattr(model, "formula_", None), np.asarray(getattr(model, "class_weight_", np.ones(2)))
    classes = list(map(str, model.classes_))
    if factors.ndim == 2:  # several labels
        classes = [f"{name} = {value}" for name in classes for value in (0, 1)]
    columns = {} if encoding is None else encoding.record.get("weighting", {})
    return WeightingFacts(
        class_weight=None if (factors == 1.0).all() else dict(zip(classes, factors.ravel().tolist(), strict=True)),
        weights=columns.get("weights"),
        groups=columns.get("groups"),
        robust_groups=getattr(model, "robust_groups_", 0),
        mean_weight=getattr(model, "mean_weight_", math.nan),
    )


def prior_facts(model: Any) -> PriorFacts:
    if getattr(model, "multilabel_", False):
        each = {name: prior_facts(fit) for name, fit in zip(model.classes_, model.estimators_, strict=True)}
        first = next(iter(each.values()))
        if all(one.sds == first.sds for one in each.values()):
            return first
        named = {f"{name}: {column}": sd for name, one in each.items() for column, sd in one.sds.items()}
        return PriorFacts(model.prior_scale, named, first.correlated)
    scale = np.asarray(model.prior_scale_)
    correlated = scale.ndim == 2
    sds = np.sqrt(np.diag(scale)) if correlated else scale
    return PriorFacts(model.prior_scale, dict(zip(model._names(), sds.tolist(), strict=False)), correlated)


def process_facts(model: Any) -> ProcessFacts:
    kernel, mean = (part if isinstance(part, str) else type(part).__name__ for part in (model.kernel, model.mean))
    return ProcessFacts(kernel, mean, len(model.inducing_points_))


def model_card(model: Any) -> dict[str, Any]:
    """Describe a fitted model and the data it was fitted to, ready for JSON; unknown facts are None or empty.

    `model`, `formula`, `target`, `classes`, `bound`, `covariance`, `prior` (standard deviations by coefficient; None
    for a Gaussian process), `weighting` (weights of classes and rows, robust covariances), `data` (file, digest, date,
    rows), `columns` (range or levels, and share missing), `rules` for new values, `scores` on rows that were held out,
    `diagnosis` of the approximation, and `versions`.
    """
    facts, encoding = model_facts(model), getattr(model, "formula_", None)
    training = None if encoding is None else encoding.training
    record = {} if encoding is None else encoding.record
    return {
        "model": facts.kind,
        "formula": facts.formula,
        "target": facts.target,
        "classes": facts.classes,
        "bound": facts.bound,
        "covariance": facts.covariance,
        "prior": None if facts.prior is None else facts.prior.sds,
        "weighting": asdict(facts.weighting),
        "data": {} if training is None else data_card(training),
        "columns": column_cards(model),
        "rules": {}
        if encoding is None
        else {name: getattr(encoding, name) for name in ("missing", "unseen", "beyond")},
        "scores": record.get("scores"),
        "diagnosis": record.get("diagnosis"),
        "versions": {} if training is None else training.versions,
    }


def data_card(training: TrainingData) -> dict[str, Any]:
    """Return what a card says about the rows, and about their file if there was one."""
    rows = {name: getattr(training, name) for name in ("date", "rows", "rows_used", "class_counts")}
    return rows if training.file is None else {**asdict(training.file), **rows}


def column_cards(model: Any) -> list[dict[str, Any]]:
    """Return what a card says about each raw column, or the names of the columns if nothing else is known."""
    encoding = getattr(model, "formula_", None)
    if encoding is None or encoding.training is None:
        names = getattr(model, "feature_names_in_", [f"x{j}" for j in range(model.n_features_in_)])
        return [{"name": str(name)} for name in (names if encoding is None else encoding.inputs)]
    shares = encoding.training.missing_shares
    cards = []
    for name, column in encoding.training.columns.items():
        if column.kind == "number":
            spread: dict[str, Any] = {key: getattr(column, key) for key in ("low", "high", "mean", "sd")}
            if name in encoding.parsed.dates:  # days since 1970
                spread = {key: str(calendar_days(spread[key])) for key in ("low", "high")} | {"kind": "date"}
        else:
            levels = zip(encoding.levels[name], column.rows, strict=True)
            spread = {"levels": {str(level): rows for level, rows in levels}}
        cards.append({"name": name, "kind": column.kind} | spread | {"missing": shares[name]})
    return cards
