"""The mode of the posterior by Newton's method: where the solver begins.

At Σ = 0 a pass needs neither τ² nor the expected softplus, only s(ϑ): the first steps, which go furthest, cost least.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.inference.problem import Gaussian, Problem
from viper.inference.steps import NOT_FINITE, diagonal_step, full_step, gradient, opening
from viper.inference.sums import Sums
from viper.softplus.pointwise import Bound, KernelRecipe, Triple
from viper.softplus.quadrature import softplus

MOST_PASSES = 50
SHORTEST_STEP = 1e-3


class Mode(NamedTuple):
    """q with the mode as mean and the curvature there as precision, as Laplace has it; the sums; and passes taken."""

    q: Gaussian
    curvature: Tensor
    passes: int


def find_mode(problem: Problem, mean: Tensor | None, enough: float) -> Mode:
    """Newton's steps from `mean` (default: one careful step from the prior's) until one moves less than `enough`."""
    step = diagonal_step if problem.diagonal else full_step
    passes = 1
    if mean is None:
        mean, passes = opening(problem).mean, 2
    value, total = log_joint(problem, mean)
    while True:
        at = Gaussian(mean, problem.prior.diagonal)
        new = step(problem, at, total, 1.0)
        if new is None:
            raise ValueError(NOT_FINITE)
        shift, rho = new.mean - mean, 1.0
        if 0.5 * float(shift @ gradient(problem, at, total)) < enough or passes > MOST_PASSES:
            return Mode(new, total.gram, passes)
        candidate = log_joint(problem, mean + shift)
        while not candidate[0] >= value and rho > SHORTEST_STEP:
            rho *= 0.5
            passes += 1
            candidate = log_joint(problem, mean + rho * shift)
        mean, (value, total) = mean + rho * shift, candidate
        passes += 1


def chord_step(problem: Problem, mode: Mode) -> Gaussian:
    """One step towards the mode of all rows from that of a subset, with its curvature: the cheapest of passes."""
    total = problem.total(mode.q.mean, None, WITHOUT_VARIANCE, gram=False)
    total.gram = mode.curvature
    step = diagonal_step if problem.diagonal else full_step
    return step(problem, mode.q, total, 1.0) or mode.q


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


def beginning(problem: Problem, generator: np.random.Generator) -> tuple[Gaussian, float]:
    """Laplace's q, found on random subsets where rows are many, and the passes that took.

    From the mode of a subset one step, without matrix products, leads near that of all.
    """
    whole = replace(problem, refine=False, to_mode=True)
    mean, passes = None, 0.0
    for stage in coarse_stages(whole, generator):
        mode = find_mode(stage, mean, COARSE_SHARE * 0.5 * stage.source.dimension * stage.scale)
        mean, passes = mode.q.mean, passes + mode.passes * stage.source.rows / problem.source.rows
    if mean is not None and not problem.iterative:
        q, passes = chord_step(whole, mode), passes + 1.0
        if problem.source.rows >= MANY_ENOUGH:
            return q, passes
        mean = q.mean
    mode = find_mode(whole, mean, MODE_MOVE)
    return mode.q, passes + mode.passes


MANY_ENOUGH = 50_000  # rows that leave the curvature of a subset good enough to begin with


MODE_MOVE = 20.0  # nats: a Newton step from there ends within a fraction of one, and q's mean is as far from the mode


COARSE_SHARE = 0.1  # of a subset's sampling error, about d/2 · n/k nats: a step that moves less has no place on it


COARSE_RATIO = 10


LARGEST_SUBSET = 1 << 25  # entries (256 MB)


ROWS_PER_DIMENSION = 40  # rows below which a subset does not determine the fit


def coarse_stages(whole: Problem, generator: np.random.Generator) -> list[Problem]:
    """The problem on random subsets, each a part of the next, the smallest first."""
    stages: list[Problem] = []
    for k in coarse_sizes(whole):
        stages.insert(0, (stages[0] if stages else whole).coarsened(k, generator))
    return stages


def coarse_sizes(problem: Problem) -> list[int]:
    """Sizes of the subsets, the largest first, as long as they determine the fit.

    The mode of k of n rows is about d/2 · n/k nats from that of all, and the curvature there off by √(d/k), so that
    one step with it leaves d²n/2k²: less than one nat for k = d√n, and hence no more. No subset is too large to be
    held in memory beside a source that is not.
    """
    d, rows = problem.source.dimension, problem.source.rows
    least = max(ROWS_PER_DIMENSION * d, problem.source.traits.smallest_sample)
    most = max(min(math.isqrt(d * d * rows), LARGEST_SUBSET // d), least)
    sizes: list[int] = []
    k = rows
    while k >= 4 * least:
        k = min(max(k // COARSE_RATIO, least), most)
        sizes.append(k)
    return sizes
