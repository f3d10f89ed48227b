"""The mode of the posterior by Newton's method: where the solver begins.

At Σ = 0 a pass needs neither τ² nor the expected softplus, only s(ϑ): the first steps, which go furthest, cost least.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from viper.inference.kernels.fused import PROGRAMS, Program
from viper.inference.rows import Sums
from viper.inference.steps import NOT_FINITE, Gaussian, Problem, diagonal_step, full_step, gradient, opening
from viper.softplus.pointwise import Triple
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
    total = problem.total(mode.q.mean, None, without_variance, gram=False)
    total.gram = mode.curvature
    step = diagonal_step if problem.diagonal else full_step
    return step(problem, mode.q, total, 1.0) or mode.q


def log_joint(problem: Problem, mean: Tensor) -> tuple[float, Sums]:
    """log p(y | μ) + log p(μ), up to a constant, and the sums for its derivatives."""
    total = problem.total(mean, None, without_variance)
    shift = mean - problem.prior.mean
    return total.value - 0.5 * float(shift @ problem.prior.apply(shift)), total


def without_variance(mean: Tensor, variance: Tensor) -> Triple:
    """The softplus and its derivatives at the mean."""
    s = torch.sigmoid(mean)
    return softplus(mean), s, s * (1.0 - s)


PROGRAMS[without_variance] = Program("softplus")
