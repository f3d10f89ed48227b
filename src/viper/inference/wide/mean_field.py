"""Newton's method for the mean field by products with A and Aᵀ alone.

F is concave in the means μ and the standard deviations σ of independent coefficients (Challis & Barber 2013). With
λ = diag(S₀⁻¹ + Aᵀ diag(c h) A), the coordinates x and z of

    μ = μ₀ + λ^(-½) x,      σ = σ₀ (1 + (1+σ₀²λ)^(-½) z)

give F the gradient (λ^(-½) ∂F/∂μ, (1-σ₀²λ) (1+σ₀²λ)^(-½)) and a Hessian whose diagonal is about -1. The rest couples
the coefficients: with u = λ^(-½) x, v = 2σ₀² (1+σ₀²λ)^(-½) z, and A² for the squares of A's entries, rows see δϑ = Au
and δτ² = A²v, and

    δg = ∂g/∂ϑ δϑ + ½ ∂h/∂ϑ δτ²,      δh = ∂h/∂ϑ δϑ + ∂h/∂v δτ².

So a product with the Hessian reads A once. Conjugate gradients solve for each step to a tenth of the gradient, and
about ten steps reach the optimum.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from viper.inference.problem import Gaussian, Problem, kl_to_prior, most_left
from viper.inference.rows import Matrix, light_designs
from viper.inference.steps import LARGEST_CURVATURE, gradient
from viper.inference.sums import Sums

MOST_CLIMBED = 100  # steps; most fits need about ten
MOST_READINGS = 3000  # readings of A if there are too many columns for matrices to take over
LONG_STEP = 1.0  # nats: after a step that gained more, the next is solved roughly
ROUGH_SHARE, FINE_SHARE = 0.3, 0.1  # share of the gradient that a step leaves
FIRST_CLIMBED = 10  # steps after which most fits gain less than LONG_STEP
SHORTEST_MOVE = 1e-6  # smallest fraction of a step that is tried
LARGEST_SQUARE = 1e20  # largest weighted square of a column for float32; its inverse is the smallest
FLATTEST = 0.03  # curvature assumed in the flattest direction of these coordinates, until products find a smaller one
NEARLY_QUADRATIC = 1e-4  # nats: the gain of a step this small can be predicted


class MeanFieldPoint(NamedTuple):
    """q with F and the sums there, and the coordinates around it."""

    q: Gaussian
    value: float
    total: Sums
    gradient: Tensor  # (2, d)
    units: Tensor  # (2, d): λ^(-½) and 2σ² (1+σ²λ)^(-½), so that (u, v) are these times the coordinates
    ridge: Tensor  # (2, d): what the Hessian adds to each coordinate besides the rows

    def moved(self, step: Tensor, rho: float) -> Gaussian | None:
        """q at ρ times these coordinates, or None if a standard deviation were not positive."""
        ratio = 1.0 + (0.5 * rho) * self.q.precision * self.units[1] * step[1]
        if not bool((ratio > 0.0).all()):
            return None
        return Gaussian(self.q.mean + rho * self.units[0] * step[0], self.q.precision / ratio.square())


def point_at(problem: Problem, q: Gaussian) -> MeanFieldPoint:
    """F and its derivatives at q."""
    total = problem.total(q.mean, q.factor)
    value = total.value - kl_to_prior(q, q.factor, problem.prior)
    prior = problem.prior.diagonal
    bend = torch.maximum(prior + total.gram, prior)
    ratio, of_sd = bend / q.precision, (1.0 + bend / q.precision).rsqrt()
    units = torch.stack([bend.rsqrt(), 2.0 * q.factor * of_sd])
    slope = torch.stack([gradient(problem, q, total) * units[0], (1.0 - ratio) * of_sd])
    return MeanFieldPoint(q, value, total, slope, units, torch.stack([prior / bend, torch.ones_like(prior)]))


class MeanField(NamedTuple):
    """Where a climb ended: q and F there, about how many nats are left, and whether that is close enough."""

    q: Gaussian
    value: float
    left: float
    close: bool
    passes: float  # readings of A
    magnitude: float
    flattest: float  # smallest curvature found
    predicted: float = 0.0  # part of F that is predicted, not computed
    outgrown: bool = False  # whether it ended far from the optimum because log-odds became too large


Told = Callable[[float, float, float], None]  # takes F, the length of a step, and its predicted gain in nats


def climb_mean_field(
    problem: Problem,
    q: Gaussian,
    report: Told | None = None,
    *,
    close: float | None = None,
    most: float = MOST_READINGS,
    steps: int = MOST_CLIMBED,
    flattest: float = FLATTEST,
) -> MeanField:
    """Climb from q until less than `close` nats are left (by default `most_left`), in about `most` readings of A.

    The nats left are at most half the squared gradient over the least curvature. F is not computed after the last step,
    whose gain is predicted.
    """
    at, passes, gain, designs = point_at(problem, q), 1, math.inf, None
    for taken in range(steps + 1):
        enough = most_left(at.value) if close is None else close
        left = half_square(at.gradient) / flattest
        outgrown = taken >= FIRST_CLIMBED and gain > LONG_STEP and problem.outgrown(at.total.magnitude)
        if left < enough or not math.isfinite(at.value) or passes > most or taken == steps or outgrown:
            break
        designs = designs if taken else steering_designs(problem, at.total)
        share = ROUGH_SHARE if gain > LONG_STEP else FINE_SHARE
        step, rest, bend, products = solved_step(problem, at, share, designs)
        flattest, gain, passes = min(flattest, bend), 0.5 * float((step * at.gradient).sum()), passes + products
        new = at.moved(step, 1.0)
        if new is not None and gain < NEARLY_QUADRATIC and rest / flattest < enough:
            value, left = at.value + gain, rest / flattest
            return MeanField(new, value, left, True, passes, at.total.magnitude, flattest, gain)
        found, rho, more = uphill(problem, at, step)
        passes += more
        if found is None:
            break
        at = found
        if report is not None:
            report(at.value, rho, gain)
    magnitude = at.total.magnitude
    return MeanField(at.q, at.value, left, left < enough, passes, magnitude, flattest, outgrown=outgrown)


def half_square(vector: Tensor) -> float:
    return 0.5 * float(vector.square().sum())


def uphill(problem: Problem, at: MeanFieldPoint, step: Tensor) -> tuple[MeanFieldPoint | None, float, int]:
    """The first point at the whole step, half of it, ... where F is not lower; that fraction; and the passes made."""
    rho, passes, noise = 1.0, 0, problem.noise(at.value)
    while rho > SHORTEST_MOVE:
        new = at.moved(step, rho)
        if new is not None:
            found, passes = point_at(problem, new), passes + 1
            if at.value - noise <= found.value <= noise:  # F cannot be positive
                return found, rho, passes
        rho *= 0.5
    return None, rho, passes


class Solved(NamedTuple):
    """A step, half the squared gradient that it leaves, the least curvature met, and the number of products."""

    step: Tensor
    rest: float
    flattest: float
    products: int


def solved_step(problem: Problem, at: MeanFieldPoint, share: float, designs: list[Matrix] | None) -> Solved:
    """Solve for Newton's step by conjugate gradients, until this share of the gradient is left.

    The last iteration must also add no more than this share to the step, because a small gradient says little about
    directions in which the Hessian is nearly singular.
    """
    residual = at.gradient.clone()
    x, direction = torch.zeros_like(residual), residual.clone()
    left = start = half_square(residual)
    flattest = math.inf
    for count in range(1, 10 * math.isqrt(residual.numel()) + 100):
        product = times_hessian(problem, at, direction, designs)
        bend, size = 0.5 * float((direction * product).sum()), half_square(direction)
        if designs is not None and not math.isfinite(bend):
            return solved_step(problem, at, share, None)
        if not bend > 0.0:  # converged to rounding, or a bound that is not concave
            return Solved(x if count > 1 else direction, left, flattest, count)
        length, flattest = left / bend, min(flattest, bend / size)
        x.add_(direction, alpha=length)
        residual.sub_(product, alpha=length)
        left, before = half_square(residual), left
        if left <= share**2 * start and length**2 * size <= share**2 * half_square(x):
            break
        direction.mul_(left / before).add_(residual)
    return Solved(x, left, flattest, count)


def times_hessian(problem: Problem, at: MeanFieldPoint, direction: Tensor, designs: list[Matrix] | None) -> Tensor:
    """Minus the Hessian of F times a direction; `designs` may be in float32, because the result only steers steps."""
    given = at.units * direction
    out = at.total.hessian(*given, designs=designs).mul_(at.units)
    if problem.prior.precision.ndim == 1 and problem.prior.loadings is None:
        return out.addcmul_(at.ridge, direction)
    out[0] += at.units[0] * problem.prior.apply(given[0])
    out[1] += direction[1]
    return out


def steering_designs(problem: Problem, total: Sums) -> list[Matrix] | None:
    """`light_designs`, if the squares of all columns are well within the range of float32."""
    sizes = total.gram[total.gram > 0.0]
    safe = bool(((sizes > 1.0 / LARGEST_SQUARE) & (sizes < LARGEST_SQUARE)).all())
    return light_designs(problem.source) if safe else None


def widest(problem: Problem) -> Gaussian:
    """N(m₀, v), where a climb starts, with v from the largest possible curvature."""
    total = problem.total(problem.prior.mean, None, LARGEST_CURVATURE)
    return Gaussian(problem.prior.mean, problem.prior.diagonal + total.gram)
