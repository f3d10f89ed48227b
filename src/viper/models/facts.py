"""The facts about a fitted model, collected once. Notebook, report and command line choose their own words."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

INTERCEPT = "intercept"


def coefficient_names(columns: Iterable[Any], intercept: bool) -> list[str]:
    """Return the names of the coefficients, the intercept last. A column of that name is quoted, as in a formula."""
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
    prior: PriorFacts | None = None  # None for a Gaussian process
    process: ProcessFacts | None = None  # None for a logistic regression

    @property
    def kind(self) -> str:
        return "logistic" if self.process is None else "gp"

    @property
    def exact(self) -> bool:
        """Whether the fit maximised the ELBO itself rather than a bound on it."""
        return self.bound == "viper" and self.terms is None

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
        elbo=model.elbo_,
        elbo_certified=model.elbo_bound_,
        converged=model.converged_,
        status=str(model.status_),
        iterations=model.n_iter_,
        prior=prior_facts(model) if is_logistic else None,
        process=None if is_logistic else process_facts(model),
    )


def prior_facts(model: Any) -> PriorFacts:
    scale = np.asarray(model.prior_scale_)
    correlated = scale.ndim == 2
    sds = np.sqrt(np.diag(scale)) if correlated else scale
    return PriorFacts(model.prior_scale, dict(zip(model._names(), sds.tolist(), strict=False)), correlated)


def process_facts(model: Any) -> ProcessFacts:
    kernel, mean = (part if isinstance(part, str) else type(part).__name__ for part in (model.kernel, model.mean))
    return ProcessFacts(kernel, mean, len(model.inducing_points_))
