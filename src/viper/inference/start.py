"""Where the solver starts: at the mode of the posterior, found by Newton's method on more and more rows.

At Σ = 0 a pass needs neither τ² nor the expected softplus, only s(ϑ), so the longest steps are the cheapest.
Under a very wide prior the mode is far from q; the solver then starts again from narrower priors.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.errors import NotFinite
from viper.inference.climb import Climbed
from viper.inference.problem import (
    LARGEST_SOLVED,
    MANY_ENOUGH,
    PRODUCT_PASSES,
    Gaussian,
    Prior,
    Problem,
    cholesky,
    direct_seconds,
    matrix_seconds,
    prior_factor,
    product_seconds,
    widened,
)
from viper.inference.steps import diagonal_step, full_step, gradient, opening
from viper.inference.sums import Sums, row_spread
from viper.inference.wide.mean_field import MOST_READINGS, MeanField, climb_mean_field, widest
from viper.inference.wide.sites import climb_by_sites, sites_help
from viper.softplus.pointwise import Bound, KernelRecipe, Triple
from viper.softplus.quadrature import softplus

MOST_PASSES = 200
SHORTEST_SEARCH = 1e-12  # smallest fraction of a step towards the mode that is tried
MODE_MOVE = 20.0  # nats: from there a Newton step ends within a fraction of a nat; q's mean is about that far off
MODE_MOVE_OF_COLUMN = 0.2  # nats per column, if that is less
COARSE_SHARE = 0.1  # moves below this share of a subset's sampling error, about d/2 · n/k nats, are not worth a step
COARSE_RATIO, FINE_RATIO = 10, 4  # rows of a subset to those of the next smaller one; with fewer than MANY_ENOUGH rows
LARGEST_SUBSET = 1 << 25  # entries (256 MB)
ONE_PASS_LEFT = 4e-10  # nats, estimated as d³/k²; about five times as many are left, still fewer than allowed
ROWS_PER_DIMENSION = 40  # rows below which a subset does not determine the fit
CLOSE_BY_PRODUCTS = 1e-9  # nats left by rough formulas; the exact ones take the last step
NEAR_MEAN_FIELD = 1e-3  # nats left if the mean field is only the start of another family
PASSES_SAVED = 3  # passes with matrices that starting at the mean field saves
WIDE_PRIOR = 100.0  # log-odds: the standard deviation of ϑ under the prior


def beginning(problem: Problem, generator: np.random.Generator, report: Callable[[float], None]) -> Climbed:
    """Return Laplace's q and the number of passes. With many rows, it is found on random subsets first.

    From the mode of a subset, one step without matrix products leads close to the mode of all rows. With nearly as many
    columns as rows, q is close to the optimum already.
    """
    if sites_help(problem) and (found := climb_by_sites(problem, report)) is not None:
        return found
    whole = replace(problem, refine=False, to_mode=True)
    mean, passes = None, 0.0
    for stage in coarse_stages(whole, generator):
        mode = find_mode(stage, mean, COARSE_SHARE * 0.5 * stage.source.dimension * stage.scale)
        mean, passes = mode.q.mean, passes + mode.passes * stage.source.rows / problem.source.rows
    if mean is None and mean_field_helps(problem):
        return Climbed(*from_mean_field(problem), False)
    if mean is not None:
        q, passes = chord_step(whole, mode), passes + 1.0
        if problem.source.rows >= MANY_ENOUGH:
            return Climbed(q, passes, False)
        mean = q.mean
    mode = find_mode(whole, mean, min(MODE_MOVE, MODE_MOVE_OF_COLUMN * problem.source.dimension))
    return Climbed(mode.q, passes + mode.passes, False)


def mean_field_helps(problem: Problem) -> bool:
    """Return whether climbing the mean field costs less than the few passes with matrices that it saves."""
    if problem.diagonal or problem.rough is None or problem.source.traits.where != "memory":
        return False
    return PRODUCT_PASSES * product_seconds(problem.source) < PASSES_SAVED * matrix_seconds(problem.source)


def from_mean_field(problem: Problem) -> tuple[Gaussian, float]:
    """Return N(μ, S₀⁻¹ + Aᵀ diag(c h) A) with μ and h of the mean field near its optimum.

    With many columns the mode is far from q, because it ignores the variances τ²; the mean field does not.
    """
    rough = replace(problem, refine=False, diagonal=True, iterative=True)
    found = climb_mean_field(rough, widest(rough), close=NEAR_MEAN_FIELD)
    total = replace(problem, refine=False).total(found.q.mean, found.q.factor)
    root = cholesky(precision := problem.prior.plus(total.gram))
    if root is None:
        raise NotFinite
    return Gaussian(found.q.mean, precision, root), found.passes + 1.0


def near_mean_field(
    problem: Problem,
    q: Gaussian | None,
    generator: np.random.Generator,
    climbed: Callable[..., MeanField],
) -> MeanField:
    """Climb the diagonal family by a rough formula from `q`, or on more and more rows; `climbed` takes the steps.

    Nearly collinear columns take many products. The climb ends once these have cost as much as solving d × d systems
    would.
    """
    rough = replace(problem, refine=False)
    passes = 0.0
    for stage in coarse_stages(rough, generator) if q is None else []:
        enough = COARSE_SHARE * 0.5 * stage.source.dimension * stage.scale
        found = climbed(stage, q or widest(stage), close=enough)
        q, passes = found.q, passes + found.passes * stage.source.rows / problem.source.rows
    budget = direct_seconds(problem.source) / product_seconds(problem.source)
    most = MOST_READINGS if problem.source.dimension > LARGEST_SOLVED else max(budget, 2 * PRODUCT_PASSES)
    found = climbed(rough, q or widest(rough), close=CLOSE_BY_PRODUCTS, most=most)
    return found._replace(passes=found.passes + passes)


def coarse_stages(whole: Problem, generator: np.random.Generator) -> list[Problem]:
    """Return the problem on nested random subsets, smallest first."""
    stages: list[Problem] = []
    for k in coarse_sizes(whole):
        stages.insert(0, (stages[0] if stages else whole).coarsened(k, generator))
    return stages


def coarse_sizes(problem: Problem) -> list[int]:
    """Return the sizes of the subsets, from the largest to the smallest that determines the fit.

    The mode of k of n rows is about d/2 · n/k nats from that of all rows, and its curvature is off by √(d/k), so one
    step with it leaves d²n/2k² nats. For k = 3d√n that is a twentieth of a nat, and two passes reach the optimum; no
    larger subset is needed. All subsets fit in memory, even if the rows do not. On an accelerator all passes are exact,
    and each multiplies the distance by about 2d/n. One is enough if that leaves ONE_PASS_LEFT nats, for which
    k = d√(d/ONE_PASS_LEFT). This pays only in float64: a pass in float32 is cheaper than so large a subset.
    """
    d, rows = problem.source.dimension, problem.source.rows
    least = max(ROWS_PER_DIMENSION * d, problem.source.traits.smallest_sample)
    most = max(min(3 * math.isqrt(d * d * rows), LARGEST_SUBSET // d), least)
    enough = math.ceil(d * math.sqrt(d / ONE_PASS_LEFT))
    in_double = getattr(problem.source, "dtype", torch.float64) == torch.float64
    if in_double and problem.source.traits.smallest_sample and rows >= COARSE_RATIO * enough:
        most = max(most, enough)
    ratio = COARSE_RATIO if rows >= MANY_ENOUGH else FINE_RATIO
    sizes: list[int] = []
    k = rows
    while k >= 4 * least:
        k = min(max(k // ratio, least), most)
        sizes.append(k)
    return sizes


class Mode(NamedTuple):
    """Laplace's q (mean: the mode; precision: the curvature there), the rows' part of the curvature, and the passes."""

    q: Gaussian
    curvature: Tensor
    passes: int


def find_mode(problem: Problem, mean: Tensor | None, enough: float) -> Mode:
    """Newton steps from `mean` (default: one careful step from the prior's mean) until one gains less than `enough`."""
    step = diagonal_step if problem.diagonal else full_step
    passes = 1
    if mean is None:
        mean, passes = opening(problem).mean, 2
    value, total = log_joint(problem, mean)
    while True:
        at = Gaussian(mean, problem.prior.diagonal)
        new = step(problem, at, total, 1.0)
        if new is None:
            raise NotFinite
        shift, rho = new.mean - mean, 1.0
        if 0.5 * float(shift @ gradient(problem, at, total)) < enough or passes > MOST_PASSES:
            return Mode(new, total.gram, passes)
        there, passes = new.mean, passes + 1
        candidate = log_joint(problem, there)
        while not candidate[0] >= value and rho > SHORTEST_SEARCH:
            rho *= 0.5
            there, passes = mean + rho * shift, passes + 1
            candidate = log_joint(problem, there)
        mean, (value, total) = there, candidate


def log_joint(problem: Problem, mean: Tensor) -> tuple[float, Sums]:
    """log p(y | μ) + log p(μ), up to a constant, and the sums for its derivatives."""
    total = problem.total(mean, None, WITHOUT_VARIANCE)
    shift = mean - problem.prior.mean
    return total.value - 0.5 * float(shift @ problem.prior.apply(shift)), total


def without_variance(mean: Tensor, variance: Tensor) -> Triple:
    """The softplus and its derivatives at the mean."""
    s = torch.sigmoid(mean)
    return softplus(mean), s, s * (1.0 - s)


WITHOUT_VARIANCE = Bound(without_variance, kernel=KernelRecipe("softplus"))


def chord_step(problem: Problem, mode: Mode) -> Gaussian:
    """Step from the mode of a subset towards that of all rows, with the subset's curvature: the cheapest pass."""
    total = problem.total(mode.q.mean, None, WITHOUT_VARIANCE, gram=False)
    total.gram = mode.curvature
    step = diagonal_step if problem.diagonal else full_step
    return step(problem, mode.q, total, 1.0) or mode.q


def from_tighter_priors(
    problem: Problem, solve: Callable[[Problem, Gaussian], tuple[Gaussian, float]]
) -> tuple[Gaussian | None, float]:
    """Return q near the optimum under a very wide prior, or None if the prior is not that wide, and the passes made.

    Unless the data limit them, ϑ and τ grow with the prior's width, and each step from the mode only multiplies them
    by some factor. But relative to the prior, q hardly depends on that width: the optimum under a narrow prior,
    widened in proportion, is close to the optimum under a prior ten times as wide, and so on. `solve` maximises F
    from a given q and returns the optimum and the number of passes.
    """
    prior = problem.prior
    spread, count = problem.source.reduce(partial(row_spread, factor=prior_factor(prior)))
    width = math.sqrt(float(spread / count))
    q, passes = None, 1.0
    for k in range(math.ceil(math.log10(width)) - 1 if width > WIDE_PRIOR else 0, 0, -1):
        tighter = replace(problem, prior=Prior(prior.mean / 10.0**k, prior.precision * 100.0**k))
        found, more = solve(tighter, q or opening(tighter))
        q, passes = widened(found, 10.0), passes + more
    return q, passes
