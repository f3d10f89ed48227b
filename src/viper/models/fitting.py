"""From rows, prior and options to a posterior: which solver runs, on which form of the problem."""

import warnings
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.errors import ConvergenceWarning, users_line
from viper.inference.adam import adam
from viper.inference.device import algebra_device
from viper.inference.newton import Result, newton
from viper.inference.posterior import Diagonal, Full, LowRank, Posterior, moved
from viper.inference.problem import Gaussian, Prior, Problem
from viper.inference.progress import Progress, Tasks
from viper.inference.rows import Arrays, RowSource
from viper.inference.threads import one_thread
from viper.softplus.bounds import build_bound
from viper.softplus.pointwise import Bound, Triple

ROUGH_TOLERANCE = 1e-8  # of the moments in all but the last pass: moves the optimum by less than 1e-9 nats
FLOAT32_TOLERANCE = 1e-6  # nats: what rounding of the products in float32 leaves
BOUND_TOLERANCE = 1e-12  # nats: h is not the second derivative of these bounds in ϑ, so their steps converge linearly
LARGEST_FULL = 20_000  # coefficients whose full covariance still fits a machine (3.2 GB)


class Fit(NamedTuple):
    """A posterior with the prior it belongs to and the solver's account of it."""

    posterior: Posterior
    prior: Prior
    problem: Problem
    result: Result


@dataclass(frozen=True)
class Options:
    """How to fit; the estimator's parameters of the same names."""

    bound: str
    terms: int | None
    samples: int
    nodes: int
    covariance: str
    solver: str
    max_iter: int | None
    tol: float | None
    learning_rate: float
    batch_size: int | None
    dtype: str
    verbose: Any
    tasks: Tasks | None = None  # where scikit-learn's callbacks hear of iterations

    @property
    def exact(self) -> bool:
        """Whether the objective is the ELBO itself."""
        return self.bound == "viper" and self.terms is None

    def tolerance(self) -> float | None:
        """The chosen `tol`, or a default other than the solver's own."""
        if self.tol is not None or self.solver == "adam":
            return self.tol
        if self.dtype == "float32":
            return FLOAT32_TOLERANCE
        return None if self.exact else BOUND_TOLERANCE


def fit_posterior(source: RowSource, prior: Prior, options: Options, seed: int, start: Gaussian | None = None) -> Fit:
    """Fit q under a given prior; with more coefficients than rows, in the span of the rows."""
    wide = source.dimension > source.rows and prior.precision.ndim == 1 and options.solver == "newton"
    prior = moved(prior, source.device if wide else algebra_device(source.dimension, source.device))
    if options.covariance == "diagonal":
        problem, result = run(source, prior, options, seed, start)
        return Fit(Diagonal(result.q.mean, result.factor), prior, problem, result)
    if wide:
        return fit_wide(source, prior, options, seed)
    if source.dimension > LARGEST_FULL:
        raise ValueError(
            f"covariance='full' holds up to {LARGEST_FULL} coefficients, or any number if rows are fewer; got "
            f"{source.dimension} coefficients and {source.rows} rows. Use covariance='diagonal'."
        )
    problem, result = run(source, prior, options, seed, start)
    return Fit(Full(result.q.mean, result.factor), prior, problem, result)


def fit_wide(source: RowSource, prior: Prior, options: Options, seed: int) -> Fit:
    """A D = RᵀQᵀ with D the prior sds: rows Rᵀ (n × n) and prior N(0, I) for w = QᵀD⁻¹(β - m₀)."""
    sd = prior.precision.rsqrt()
    source = source.in_memory()
    dense = source.dense_design()
    shift = dense @ prior.mean
    basis, upper = torch.linalg.qr((dense * sd).T)
    offset = shift if source.offset is None else shift + source.offset.to(shift)
    rows = Arrays(upper.T.contiguous(), source.label, offset=offset, weight=source.weight, device=source.device)
    identity = Prior(torch.zeros_like(upper[0]), torch.ones_like(upper[0]))
    problem, result = run(rows, identity, options, seed)
    return Fit(LowRank(prior.mean, sd, basis, result.q.mean, result.factor), prior, problem, result)


def run(
    source: RowSource, prior: Prior, options: Options, seed: int, start: Gaussian | None = None
) -> tuple[Problem, Result]:
    """Solve, show progress, and warn if it did not converge."""
    problem = make_problem(source, prior, options, seed)
    report = Progress(options.verbose, options.tasks, source.rows)
    source.observe(report.rows_done)
    settings: dict[str, Any] = {"report": report, "generator": np.random.default_rng(seed)}
    settings |= {} if options.max_iter is None else {"max_iter": int(options.max_iter)}
    settings |= {} if options.tolerance() is None else {"tol": options.tolerance()}
    with closing(report), one_thread() if source.device.type == "cpu" else nullcontext():
        if options.solver == "adam":
            if options.batch_size is not None and source.traits.where != "memory":
                raise ValueError(
                    f"batch_size needs rows in memory and no checkpoint; got batch_size={options.batch_size} for "
                    f"{type(source).__name__}. Leave it out, or use solver='newton'."
                )
            result = adam(problem, learning_rate=options.learning_rate, batch_size=options.batch_size, **settings)
        else:
            result = newton(problem, start, **settings)
    if not result.converged:
        warnings.warn(
            f"The solver stopped early: {result.status}. Raise max_iter, standardise the features, or choose a "
            "smaller prior_scale.",
            ConvergenceWarning,
            stacklevel=users_line(),
        )
    return problem, result


def make_problem(source: RowSource, prior: Prior, options: Options, seed: int) -> Problem:
    """The problem under the chosen bound; the exact one also with a cheap version for the way there."""
    diagonal = options.covariance == "diagonal"
    chosen = build_bound(options.bound, options.terms, options.samples, options.nodes, seed, None)
    if not options.exact:
        return Problem(source, prior, without_cusp(chosen), diagonal=diagonal)
    return Problem(source, prior, chosen, None if source.traits.smallest_sample else ROUGH, diagonal)


ROUGH = build_bound("viper", None, None, None, None, ROUGH_TOLERANCE)


def without_cusp(bound: Bound) -> Bound:
    """η_l has curvature -∞ at ϑ = τ = 0, met only by rows that are zero and multiply it by zero: call it 0 there."""

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        value, slope, curvature = bound.moments(mean, variance)
        return value, slope, curvature.nan_to_num(neginf=0.0)

    return replace(bound, moments=moments, kernel=None)
