"""Fits a posterior to rows, given prior and options: chooses the form of the problem and the solver, and runs it."""

import math
import warnings
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.errors import ConvergenceWarning, NotFinite, shown, users_line
from viper.formula.learn import formula_template
from viper.inference.adam import adam
from viper.inference.causes import sizes, what_to_do, why_not_finite
from viper.inference.device import algebra_device
from viper.inference.kernels.compiled import MOST_COMPILED
from viper.inference.low_rank.ascent import maximise_low_rank
from viper.inference.low_rank.family import LowRankGaussian, LowRankProblem
from viper.inference.memory import machine_memory
from viper.inference.newton import Result, exact_elbo, newton
from viper.inference.posterior import Diagonal, Full, LowRank, Posterior, latent, moved
from viper.inference.problem import Gaussian, Prior, Problem, cholesky, products_are_cheaper
from viper.inference.progress import Progress, Tasks
from viper.inference.rows import LEAST_TRIANGULAR, Arrays, Matrix, RowSource
from viper.inference.threads import pass_threads
from viper.softplus.bounds import build_bound
from viper.softplus.pointwise import Bound, Triple

ROUGH_TOLERANCE = 1e-8  # error of the moments in all but the last pass; moves the optimum by less than 1e-9 nats
FLOAT32_TOLERANCE = 1e-6  # nats; the rounding of products in float32
BOUND_TOLERANCE = 1e-12  # nats; h is not the second derivative of these bounds in ϑ, so steps converge linearly
LARGE_COLUMN = 1e3  # times the median column; up to there, rounding leaves ten digits of τ²
MOST_LOST = 1e9  # cancellation after which the covariance keeps seven digits
ALL_LOST = 1e13  # cancellation after which it keeps three digits
MOST_CANCELLED = 1e3  # cancellation in a pivot of A D² Aᵀ up to which Q is orthonormal to 1e-12
LARGEST_ERROR = 1e-3  # relative error of log-odds above which digits count as lost
LARGEST_OBJECTIVE = 1.0  # nats: F cannot be positive unless rounding makes it so
LARGEST_ROTATED = 1 << 26  # entries (512 MB) of the largest design that is rotated to keep more digits
SPAN_FACTOR = 3.0  # a pass over n rows in their span takes 3n³ operations, one in d sparse columns d³
MATRICES = 12  # square matrices that a fit holds: precisions, factors, curvatures
COPIES = 3  # dense copies of the rows that a fit in their span holds
UNCHECKED_BYTES = 1 << 20  # not worth asking the system for
LARGEST_FULL = 20_000  # coefficients; their full covariance takes 3.2 GB


class FittedPosterior(NamedTuple):
    """A posterior with its prior, the problem that was solved, and the solver's result."""

    posterior: Posterior
    prior: Prior
    problem: Problem
    result: Result

    def certified(self) -> tuple[float, float, float]:
        """The exact ELBO, a certified lower bound on it, and KL(q ‖ p)."""
        return exact_elbo(self.problem, self.result)


@dataclass(frozen=True)
class FitOptions:
    """The estimator's parameters that decide how the posterior is fitted."""

    bound: str
    terms: int | None
    samples: int
    nodes: int
    covariance: str
    rank: int
    solver: str
    max_iter: int | None
    tol: float | None
    learning_rate: float
    batch_size: int | None
    dtype: str
    n_jobs: int | None
    verbose: Any
    tasks: Tasks | None = None  # notified of every iteration, for scikit-learn's callbacks

    @property
    def exact(self) -> bool:
        """Whether the objective is the ELBO itself, not a bound on it."""
        return self.bound == "viper" and self.terms is None

    def tolerance(self) -> float | None:
        """The given `tol`, a default that fits dtype and bound, or None for the solver's own default."""
        if self.tol is not None or self.solver == "adam":
            return self.tol
        if self.dtype == "float32":
            return FLOAT32_TOLERANCE
        return None if self.exact else BOUND_TOLERANCE


def check_update(model: Any, forget: float) -> bool:
    """Raise if `partial_fit` cannot continue from a model; return whether this is the first call."""
    if not 0.0 < forget <= 1.0:
        raise ValueError(f"forget must lie in (0, 1]; got {forget!r}. 1 forgets nothing.")
    first = not hasattr(model, "posterior_")
    if first:
        if formula_template(model) is not None:
            raise ValueError("partial_fit needs a fitted formula; got one that is not fitted. Call fit first.")
        model._check_options()
    if isinstance(model.class_weight, str):
        raise ValueError(
            f"partial_fit needs class_weight as a dictionary; got {model.class_weight!r}. Name the classes."
        )
    if first and isinstance(model.prior_scale, str):
        raise ValueError(f"partial_fit needs numbers for prior_scale; got {model.prior_scale!r}. Call fit first.")
    return first


def fit_posterior(
    source: RowSource, prior: Prior, options: FitOptions, seed: int, start: Gaussian | None = None
) -> FittedPosterior:
    """Fit q under a given prior. With more coefficients than rows, the problem is solved in the span of the rows."""
    try:
        return fit_in_shape(source, prior, options, seed, start)
    except NotFinite:
        raise NotFinite(why_not_finite(sizes(source, prior))) from None


def fit_in_shape(
    source: RowSource, prior: Prior, options: FitOptions, seed: int, start: Gaussian | None
) -> FittedPosterior:
    """Choose the form of the problem by its family and its numbers of rows and coefficients, and solve it."""
    if (family := family_of(source, options)) != options.covariance:
        options = replace(options, covariance=family)
    if options.covariance == "low-rank":
        return fit_low_rank(source, prior, options, seed, start)
    prior = prior.without_loadings()
    wide = spans_fewer_dimensions(source) and prior.precision.ndim == 1 and options.solver == "newton"
    prior = moved(prior, source.device if wide else algebra_device(source.dimension, source.device))
    diagonal = options.covariance == "diagonal"
    if not diagonal:
        check_memory(source, wide)
    if wide and not diagonal:
        return fit_wide(source, prior, options, seed)
    if source.dimension > LARGEST_FULL and not diagonal:
        raise ValueError(
            f"covariance='full' allows {LARGEST_FULL} coefficients, or any number if there are fewer rows; got "
            f"{source.dimension} coefficients and {source.rows} rows. Use covariance='low-rank' or 'diagonal'."
        )
    if diagonal:
        problem, result = run_solver(source, prior, options, seed, start)
        return FittedPosterior(Diagonal(result.q.mean, result.factor), prior, problem, result)
    return fit_tall(source, prior, options, seed, start)


def family_of(source: RowSource, options: FitOptions) -> str:
    """Return the family to fit. One of low rank is the diagonal family if its rank is 0, the full one if it is large.

    The precision of a full covariance is the prior's plus a matrix whose rank is at most the number of rows. It is also
    a diagonal plus a matrix of rank d - 1.
    """
    if options.covariance != "low-rank":
        return options.covariance
    if options.rank == 0:
        return "diagonal"
    return "full" if options.rank >= min(source.rows, source.dimension - 1) else "low-rank"


def check_rank(rank: Any) -> None:
    """Raise unless the rank of the low-rank family is a whole number."""
    if not isinstance(rank, int | np.integer) or isinstance(rank, bool) or rank < 0:
        raise ValueError(f"rank must be a whole number, 0 or more; got {shown(rank)}.")


def fit_low_rank(
    source: RowSource, prior: Prior, options: FitOptions, seed: int, start: Gaussian | None
) -> FittedPosterior:
    """Fit a precision that is a diagonal plus a matrix of rank k, by products with k columns."""
    if options.solver == "adam":
        raise ValueError("covariance='low-rank' needs solver='newton'; got 'adam'.")
    if prior.precision.ndim == 2:
        raise ValueError(
            "covariance='low-rank' needs independent priors; got a prior covariance matrix. Give prior_scale as one "
            "number per feature, or use covariance='full'."
        )
    prior = moved(prior, source.device)
    problem, result = run_solver(source, prior, options, seed, start if isinstance(start, LowRankGaussian) else None)
    assert isinstance(result.q, LowRankGaussian)
    return FittedPosterior(result.q.posterior(), prior, problem, result)


def spans_fewer_dimensions(source: RowSource) -> bool:
    """Return whether to solve in the span of the rows: if they are fewer, unless they are sparse and nearly as many.

    Rows are dense in their span, where a pass takes about 3n³ operations, against d³ with sparse columns.
    """
    few = source.dimension > source.rows
    if not source.traits.sparse or source.dimension < LEAST_TRIANGULAR:
        return few
    return few and source.dimension**3 > SPAN_FACTOR * source.rows**3


def check_memory(source: RowSource, wide: bool) -> None:
    """Raise before any work if a full covariance needs more memory than the machine has."""
    if source.device.type != "cpu":
        return
    size = min(source.rows, source.dimension) if wide else source.dimension
    need = 8 * (MATRICES * size**2 + (COPIES * source.rows * source.dimension if wide else 0))
    if need > UNCHECKED_BYTES and need > (available := machine_memory()):
        raise ValueError(
            f"covariance='full' must fit in memory; got {source.dimension} coefficients and {source.rows} rows, which "
            f"need about {need / 1e9:.0f} GB of {available / 1e9:.0f} GB. Use covariance='low-rank', which keeps the "
            "strongest correlations, or 'diagonal'."
        )


def fit_tall(
    source: RowSource, prior: Prior, options: FitOptions, seed: int, start: Gaussian | None
) -> FittedPosterior:
    """Fit a full covariance in the columns' coordinates; if these lose too many digits, in the span of the rows."""
    small = source.traits.where == "memory" and source.rows * source.dimension <= LARGEST_ROTATED
    rotate = small and prior.precision.ndim == 1 and options.solver == "newton"
    try:
        problem, result = run_solver(source, prior, options, seed, start, warn=not rotate)
    except NotFinite:
        if not rotate or not spans_finite_rows(source, prior):
            raise
    else:
        lost = digits_lost(result.q)
        if not (rotate and lost > MOST_LOST):
            if rotate:
                warn_of_early_stop(source, prior, result)
            if lost > ALL_LOST:
                warn_of_lost_digits()
            return FittedPosterior(Full(result.q.mean, result.factor), prior, problem, result)
    low, _, problem, result = fit_wide(source, prior, options, seed)
    assert isinstance(low, LowRank)
    q = Full(low.mean, low.prior_sd[:, None] * (low.basis @ low.inner_factor))
    check_digits(source.in_memory(), q, problem.source.in_memory(), Full(result.q.mean, result.factor))
    return FittedPosterior(q, prior, problem, result)


def check_digits(rows: Arrays, q: Full, inner_rows: Arrays, inner_q: Full) -> None:
    """Raise unless both coordinates give the rows the same ϑ and τ, as they do if enough digits are left."""
    for block, inner in zip(rows.blocks(), inner_rows.blocks(), strict=True):
        (theta, tau2), (exact, exact2) = latent(block, q), latent(inner, inner_q)
        apart = torch.stack([theta - exact, tau2.sqrt() - exact2.sqrt()]).abs().amax(0)
        if not bool((apart <= LARGEST_ERROR * (1.0 + exact.abs() + exact2.sqrt())).all()):
            raise NotFinite


def digits_lost(q: Gaussian) -> float:
    """Return the largest Λ_jj/L_jj², by which Cholesky's pivot of column j cancels against the columns before it."""
    if q.cholesky is None:
        return 1.0
    return float((q.precision.diagonal() / q.cholesky.diagonal().square()).max())


def spans_finite_rows(source: RowSource, prior: Prior) -> bool:
    """Return whether the rows in units of the prior, and their squares, are finite numbers."""
    rows = source.in_memory().dense_design() * prior.precision.rsqrt()
    return bool(torch.isfinite(rows.square().sum()))


def warn_of_lost_digits() -> None:
    warnings.warn(
        "Some columns are nearly linear combinations of others, at a scale far from that of their prior, so the "
        "standard deviations of their coefficients are lost to rounding. Standardise the features, or leave out such "
        "columns.",
        ConvergenceWarning,
        stacklevel=users_line(),
    )


def fit_wide(source: RowSource, prior: Prior, options: FitOptions, seed: int) -> FittedPosterior:
    """Solve for w = QᵀD⁻¹(β - m₀), where A D = RQᵀ and D holds the prior sds: rows R, prior N(0, I)."""
    sd = prior.precision.rsqrt()
    source = source.in_memory()
    design = next(replace(source, block_rows=max(1, source.rows)).cut()).design
    shift = design.project(prior.mean)
    basis, rows = fast_row_space(design, sd) or row_space(source.dense_design() * sd)
    offset = shift if source.offset is None else shift + source.offset.to(shift)
    inner = Arrays(rows, source.label, offset=offset, weight=source.weight, device=source.device)
    identity = Prior(torch.zeros_like(rows[0]), torch.ones_like(rows[0]))
    problem, result = run_solver(inner, identity, options, seed, warn=False)
    warn_of_early_stop(source, prior, result)
    return FittedPosterior(LowRank(prior.mean, sd, basis, result.q.mean, result.factor), prior, problem, result)


def fast_row_space(design: Matrix, sd: Tensor) -> tuple[Tensor, Tensor] | None:
    """Do the same as `row_space` of A D, from the Cholesky factor A D² Aᵀ = LLᵀ: R = L and Q = D Aᵀ L⁻ᵀ.

    This takes a quarter of the time and keeps sparse rows sparse, but squares the rounding. So it returns None if rows
    are nearly linear combinations of others, or if a column is much larger than most.
    """
    size = design.peaks() * sd
    if sd.device.type != "cpu" or bool((size > LARGE_COLUMN * size[size > 0].nanmedian()).any()):
        return None
    gram = design.outer(sd.square())
    if len(gram) < LEAST_TRIANGULAR or (root := cholesky(gram)) is None:
        return None
    if float((gram.diagonal() / root.diagonal().square()).max()) > MOST_CANCELLED:
        return None
    inverse = Gaussian(gram[0], gram, root).factor  # L⁻ᵀ
    return sd[:, None] * design.pull(inverse), root


def row_space(design: Tensor) -> tuple[Tensor, Tensor]:
    """Return an orthonormal Q (d × m) whose span contains the rows of A, and R with A = RQᵀ.

    A column much larger than most would drown the others in rounding, so its unit vector is made a column of Q.
    """
    size = design.abs().amax(0)
    large = size > LARGE_COLUMN * size[size > 0].nanmedian()
    large[size.argsort(descending=True)[len(design) :]] = False  # at most as many as there are rows
    small = design[:, ~large]
    order = small.square().sum(1).argsort(descending=True)  # outliers first, so that they fill few columns of R
    basis, upper = torch.linalg.qr(small[order].T)
    upper = upper[:, order.argsort()]
    if not bool(large.any()):
        return basis, upper.T.contiguous()
    k = int(large.sum())
    whole = design.new_zeros(len(size), k + len(upper))
    whole[large, :k] = torch.eye(k).to(design)
    whole[~large, k:] = basis
    return whole, torch.cat([design[:, large], upper.T], 1)


def run_solver(
    source: RowSource,
    prior: Prior,
    options: FitOptions,
    seed: int,
    start: Gaussian | None = None,
    warn: bool = True,
) -> tuple[Problem, Result]:
    """Solve the problem with progress on the screen, and `warn` if the solver did not converge."""
    problem = make_problem(source, prior, options, seed)
    report = Progress(options.verbose, options.tasks, source.rows)
    source.observe(report.rows_done)
    if source.device.type == "cuda":
        report.expect("compiling the kernels for this GPU; the next process finds them in Triton's cache")
    settings: dict[str, Any] = {"report": report, "generator": np.random.default_rng(seed)}
    settings |= {} if options.max_iter is None else {"max_iter": int(options.max_iter)}
    settings |= {} if options.tolerance() is None else {"tol": options.tolerance()}
    in_blas = source.device.type == "cpu" and source.dimension > MOST_COMPILED and options.covariance == "full"
    with closing(report), pass_threads(options.n_jobs, in_blas=in_blas):
        if options.solver == "adam":
            if options.batch_size is not None and source.traits.where != "memory":
                raise ValueError(
                    f"batch_size needs rows in memory and no checkpoint; got batch_size={options.batch_size} for "
                    f"{type(source).__name__}. Leave it out, or use solver='newton'."
                )
            result = adam(problem, learning_rate=options.learning_rate, batch_size=options.batch_size, **settings)
        elif isinstance(problem, LowRankProblem):
            result = maximise_low_rank(problem, start, **settings)
        else:
            result = newton(problem, start, **settings)
    if not -math.inf < result.objective < LARGEST_OBJECTIVE:
        raise NotFinite
    if warn:
        warn_of_early_stop(source, prior, result)
    return problem, result


def warn_of_early_stop(source: RowSource, prior: Prior, result: Result) -> None:
    if not result.converged:
        warnings.warn(
            f"The solver stopped early: {result.status}. {what_to_do(sizes(source, prior))}",
            ConvergenceWarning,
            stacklevel=users_line(),
        )


def make_problem(source: RowSource, prior: Prior, options: FitOptions, seed: int) -> Problem:
    """Return the problem under the chosen bound. The exact one also gets a cheap bound for all but the last pass."""
    diagonal = options.covariance == "diagonal"
    family: Any = partial(Problem, diagonal=diagonal, iterative=diagonal and products_are_cheaper(source))
    if options.covariance == "low-rank":
        family = partial(LowRankProblem, diagonal=True, iterative=True, rank=options.rank)
    chosen = build_bound(options.bound, options.terms, options.samples, options.nodes, seed, None)
    if not options.exact:
        return family(source, prior, without_cusp(chosen))
    return family(source, prior, chosen, None if source.traits.smallest_sample else ROUGH_BOUND)


ROUGH_BOUND = build_bound("viper", None, None, None, None, ROUGH_TOLERANCE)


def without_cusp(bound: Bound) -> Bound:
    """Replace the curvature -∞ of η_l at ϑ = τ = 0 by 0. Only rows of zeros reach it, and they multiply it by zero."""

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        value, slope, curvature = bound.moments(mean, variance)
        return value, slope, curvature.nan_to_num(neginf=0.0)

    return replace(bound, moments=moments, kernel=None)
