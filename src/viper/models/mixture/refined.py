"""Logistic regressions whose posterior is a mixture of Gaussians, refined from that of an ordinary fit."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from viper.inference.mixture.family import fit_mixture
from viper.inference.mixture.posterior import GaussianMixture
from viper.inference.newton import Result
from viper.inference.posterior import Full, LowRank, expected_log_likelihood, square_factor
from viper.inference.problem import Prior
from viper.inference.rows import RowSource
from viper.softplus.limit import limit

MOST_REFINED = 2_000_000  # rows × coefficients; beyond, posteriors are nearly Gaussian
MOST_COMPONENTS = 16


@dataclass(frozen=True)
class RefinedFit:
    """A mixture in place of a fit's Gaussian, with the fit's prior and solver result."""

    posterior: GaussianMixture
    prior: Prior
    result: Result | None
    elbo: float
    kl: float
    error: float  # bound on rounding

    def certified(self) -> tuple[float, float, float]:
        """The lower bound F on the ELBO, the same less rounding, and an upper bound on KL(q ‖ p)."""
        return self.elbo, self.elbo - self.error, self.kl


def check_components(components: Any) -> int:
    """Return a number of components, or raise."""
    whole = isinstance(components, int | np.integer) and not isinstance(components, bool)
    if not whole or not 0 < components <= MOST_COMPONENTS:
        raise ValueError(f"components must be a whole number from 1 to {MOST_COMPONENTS}; got {components!r}.")
    return int(components)


def check_components_option(model: Any) -> None:
    """Raise if other options of the model exclude more than one component."""
    if check_components(model.components) == 1:
        return
    for name, needed, why in (
        ("covariance", "full", "every component has its own covariance"),
        ("bound", "viper", "it maximises the exact ELBO"),
        ("terms", None, "it maximises the exact ELBO"),
        ("dtype", "float64", "the rounding of float32 hides skewness"),
    ):
        if (given := getattr(model, name)) != needed:
            raise ValueError(
                f"components={model.components} needs {name}={needed!r}, as {why}; got {given!r}. Use components=1."
            )


def check_one_component(model: Any, what: str) -> None:
    """Raise if the posterior is a mixture; `what` is for one Gaussian."""
    if isinstance(getattr(model, "posterior_", None), GaussianMixture) or getattr(model, "components", 1) != 1:
        raise ValueError(f"{what} is for one Gaussian; got components={model.components}. Fit with components=1.")


def check_small_rows(source: RowSource) -> None:
    """Raise unless the rows are few, and on the CPU."""
    if source.device.type != "cpu":
        raise ValueError(f"several components need rows on the CPU; got {source.device}. Use components=1.")
    if source.rows * source.dimension > MOST_REFINED:
        raise ValueError(
            f"several components are for small data, where posteriors are skewed; got {source.rows:,} rows and "
            f"{source.dimension} coefficients. Use components=1: diagnose() says how close it is."
        )


def refined_fit(
    posterior: Any, prior: Any, source: RowSource, components: int, result: Result | None, error: float
) -> RefinedFit:
    """Replace a Gaussian posterior by a mixture of several; `error` is the rounding of the ELBO."""
    check_small_rows(source)
    if not isinstance(posterior, Full | LowRank):
        raise ValueError(
            f"several components need two classes and a full covariance; got {type(posterior).__name__}. Use "
            "components=1, or corrected()."
        )
    rows = source.in_memory()
    gaussian = Full(posterior.mean, square_factor(posterior))
    mixture, elbo = fit_mixture(rows, prior.without_loadings(), gaussian, components)
    kl = expected_log_likelihood(rows, mixture, limit().moments) - elbo
    result = None if result is None else replace(result, objective=elbo)
    return RefinedFit(mixture, prior, result, elbo, kl, error)
