"""Fits the posterior of more than two classes to rows, given prior and options."""

import warnings
from contextlib import closing, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from viper.data.checks import read_numbers
from viper.errors import ConvergenceWarning, NotFinite, users_line
from viper.inference.classes.posterior import DiagonalStar, FullStar, posterior_of_star
from viper.inference.classes.problem import ClassProblem
from viper.inference.classes.solver import StarResult, fit_star
from viper.inference.classes.star import Star, star_divergence
from viper.inference.classes.sums import EXACT_TOLERANCE
from viper.inference.device import algebra_device
from viper.inference.kernels.compiled import MOST_COMPILED
from viper.inference.memory import machine_memory
from viper.inference.posterior import moved
from viper.inference.problem import Prior
from viper.inference.progress import Progress
from viper.inference.rows import RowSource
from viper.inference.threads import pass_threads
from viper.models.fitting import LARGEST_FULL, MATRICES, FitOptions

ROUNDING = 256 * 2.3e-16  # relative to the size of the summands


class FittedClasses(NamedTuple):
    """A posterior with its prior, the problem that was solved, and the solver's result."""

    posterior: FullStar | DiagonalStar
    prior: Prior | Star
    problem: ClassProblem
    result: StarResult

    def certified(self) -> tuple[float, float, float]:
        """The exact ELBO, a lower bound on it that allows for all errors, and KL(q ‖ p)."""
        result = self.result
        kl = star_divergence(result.q, self.problem.contrasts)
        error = EXACT_TOLERANCE * result.weight + ROUNDING * (result.magnitude + abs(kl))
        return result.objective, result.objective - error - 2.0 * abs(result.predicted_gain), kl


def fit_classes(
    source: RowSource, prior: Prior | Star, classes: int, options: FitOptions, seed: int, start: Star | None = None
) -> FittedClasses:
    """Fit the star under a given prior."""
    check_supported(options)
    diagonal = options.covariance == "diagonal"
    if not diagonal:
        check_size(source, classes)
    prior = moved(prior, algebra_device(source.dimension, source.device))
    problem = ClassProblem(source, classes, prior, diagonal)
    report = Progress(options.verbose, options.tasks, source.rows)
    source.observe(report.rows_done)
    settings: dict[str, Any] = {"report": report, "generator": np.random.default_rng(seed)}
    settings |= {} if options.max_iter is None else {"max_iter": int(options.max_iter)}
    settings |= {} if options.tolerance() is None else {"tol": options.tolerance()}
    in_blas = not diagonal and source.dimension > MOST_COMPILED
    threads = pass_threads(options.n_jobs, in_blas=in_blas) if source.device.type == "cpu" else nullcontext()
    with closing(report), threads:
        try:
            result = fit_star(problem, start, **settings)
        except (NotFinite, np.linalg.LinAlgError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "linalg" not in str(error):
                raise
            raise NotFinite(
                "the fit must stay finite; got numbers that overflow, or nearly collinear columns. "
                "Standardise the features, or use a narrower prior."
            ) from None
    if not result.converged:
        warnings.warn(
            f"The solver stopped early: {result.status}. Standardise the features, use a narrower prior, or raise "
            "max_iter.",
            ConvergenceWarning,
            stacklevel=users_line(),
        )
    return FittedClasses(posterior_of_star(result.q), prior, problem, result)


FOR_MANY = {"bound": ("viper",), "terms": (None,), "solver": ("newton",), "covariance": ("full", "diagonal")}


def unsupported_options(options: Any) -> list[str]:
    """Names of the options that are set to values for two classes only."""
    return [name for name, values in FOR_MANY.items() if getattr(options, name, values[0]) not in values]


def check_supported(options: FitOptions) -> None:
    """Raise if an option has a value for two classes only."""
    if wrong := unsupported_options(options):
        raise ValueError(
            f"Only binary classification is supported by {wrong[0]}={getattr(options, wrong[0])!r}; got more classes. "
            f"Use {wrong[0]}={FOR_MANY[wrong[0]][0]!r}, the default."
        )


def check_size(source: RowSource, classes: int) -> None:
    """Raise before any work if K full covariances are too large."""
    d = source.dimension
    need = 8 * MATRICES * classes * d**2
    if d > LARGEST_FULL or (source.device.type == "cpu" and need > machine_memory()):
        raise ValueError(
            f"covariance='full' must fit in memory; got {d} coefficients for each of {classes} classes, which need "
            f"about {need / 1e9:.0f} GB. Use covariance='diagonal', which needs no matrix."
        )


def with_class_means(prior: Prior, prior_mean: Any, classes: int, columns: int) -> Prior:
    """Return the prior with means (K, p), one row per class. A shift common to all classes changes nothing."""
    mean = read_numbers(prior_mean, "prior_mean")
    shape = (classes, columns)
    if mean.shape != shape:
        if mean.ndim < 2 and not mean.any():
            return prior
        raise ValueError(
            f"prior_mean for {classes} classes must be 0 or have shape {shape}, one row per class; got shape "
            f"{mean.shape}. A value common to all classes would change nothing."
        )
    if not np.isfinite(mean).all():
        raise ValueError("prior_mean must be finite; got NaN or infinity.")
    rest = torch.zeros(classes, len(prior.mean) - columns, dtype=torch.float64)
    return Prior(torch.cat([torch.from_numpy(mean), rest], 1), prior.precision)
