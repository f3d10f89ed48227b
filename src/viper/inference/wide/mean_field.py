"""Newton's method for the mean field by products with A and Aᵀ alone.

F is concave in the means μ and the standard deviations σ of independent coefficients (Challis & Barber 2013). With
λ = diag(S₀⁻¹ + Aᵀ diag(c h) A), the coordinates x and z of

    μ = μ₀ + λ^(-½) x,      σ = σ₀ (1 + (1+σ₀²λ)^(-½) z)

give F the gradient (λ^(-½) ∂F/∂μ, (1-σ₀²λ) (1+σ₀²λ)^(-½)) and a Hessian whose diagonal is about -1. The rest couples
the coefficients: with u = λ^(-½) x, v = 2σ₀² (1+σ₀²λ)^(-½) z, and A² for the squares of A's entries, rows see δϑ = Au
and δτ² = A²v, and

    δg = ∂g/∂ϑ δϑ + ½ ∂h/∂ϑ δτ²,      δh = ∂h/∂ϑ δϑ + ∂h/∂v δτ².

So a product with the Hessian reads A once. Conjugate gradients solve for each step to a tenth of the gradient, and
about ten steps end at the optimum.
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

MOST_CLIMBS = 100
LONG_STEP, ROUGH_SHARE, FINE_SHARE = (
    1.0,
    0.3,
    0.1,
)  # nats; the residual left of a step while the last one gained more, and later
SHORTEST_MOVE = 1e-6
LARGEST_SQUARE = 1e20  # of a column, weighted
FLATTEST = 0.03  # of F in these coordinates, for the nats that a gradient may leave


class MeanFieldPoint(NamedTuple):
    """q with F and the sums there, and the coordinates around it."""

    q: Gaussian
    value: float
    total: Sums
    gradient: Tensor  # (2, d)
    units: Tensor  # (2, d): λ^(-½) and 2σ² (1+σ²λ)^(-½), so that (u, v) are these times the coordinates
    ridge: Tensor  # (2, d): what the Hessian adds to each coordinate besides the rows

    @property
    def left(self) -> float:
        """The nats left, at most about: half the squared gradient over the least curvature."""
        return 0.5 * float(self.gradient.square().sum()) / FLATTEST

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
    """Where a climb ended: F there, about how many nats below the optimum, and whether that is close enough."""

    q: Gaussian
    value: float
    left: float
    close: bool
    passes: float  # readings of A
    magnitude: float
    predicted: float = 0.0  # how much of F is predicted, not computed


Told = Callable[[float, float, float], None]  # hears of F, the length of a step, and the nats that it was to gain


def climb_mean_field(
    problem: Problem,
    q: Gaussian,
    report: Told | None = None,
    *,
    close: float | None = None,
    most: float = math.inf,
    steps: int = MOST_CLIMBS,
) -> MeanField:
    """Climb from q until less than `close` nats are left (by default `most_left`), in about `most` readings of A.

    F is not computed after a last step that surely leaves less.
    """
    at, passes, gain, designs = point_at(problem, q), 1, math.inf, None
    for taken in range(steps):
        enough = most_left(at.value) if close is None else close
        if at.left < enough or not math.isfinite(at.value) or passes > most:
            break
        designs = designs if taken else steering_designs(problem, at.total)
        share = ROUGH_SHARE if gain > LONG_STEP else FINE_SHARE
        step, products = solved_step(problem, at, share, designs)
        gain, passes = 0.5 * float((step * at.gradient).sum()), passes + products
        new = at.moved(step, 1.0)
        if share == FINE_SHARE and share * gain < enough and new is not None:
            return MeanField(new, at.value + gain, share * gain, True, passes, at.total.magnitude, gain)
        found, rho, more = uphill(problem, at, step)
        passes += more
        if found is None:
            break
        at = found
        if report is not None:
            report(at.value, rho, gain)
    return MeanField(at.q, at.value, at.left, at.left < enough, passes, at.total.magnitude)


def uphill(problem: Problem, at: MeanFieldPoint, step: Tensor) -> tuple[MeanFieldPoint | None, float, int]:
    """The point at the end of the step, or of half of it, ..., where F is not lower; that fraction; and passes made."""
    rho, passes = 1.0, 0
    while rho > SHORTEST_MOVE:
        new = at.moved(step, rho)
        if new is not None:
            found, passes = point_at(problem, new), passes + 1
            if found.value >= at.value - problem.noise(at.value):
                return found, rho, passes
        rho *= 0.5
    return None, rho, passes


def solved_step(problem: Problem, at: MeanFieldPoint, share: float, designs: list[Matrix] | None) -> tuple[Tensor, int]:
    """Solve for Newton's step by conjugate gradients, until this share of the gradient is left; and the products."""
    residual = at.gradient.clone()
    x, direction = torch.zeros_like(residual), residual.clone()
    squares = start = float(residual.square().sum())
    for count in range(1, 10 * math.isqrt(residual.numel()) + 100):
        product = times_hessian(problem, at, direction, designs)
        bend = float((direction * product).sum())
        if designs is not None and not math.isfinite(bend):
            return solved_step(problem, at, share, None)
        if not bend > 0.0:  # converged to rounding, or a bound that is not concave
            return (x if count > 1 else direction), count
        x.add_(direction, alpha=squares / bend)
        residual.sub_(product, alpha=squares / bend)
        squares, before = float(residual.square().sum()), squares
        if squares <= share**2 * start:
            break
        direction.mul_(squares / before).add_(residual)
    return x, count


def times_hessian(problem: Problem, at: MeanFieldPoint, direction: Tensor, designs: list[Matrix] | None) -> Tensor:
    """Minus the Hessian of F times a direction, for steps only: `designs` may have rows in float32."""
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
    """N(m₀, v), v by the largest possible curvature: where a climb starts."""
    total = problem.total(problem.prior.mean, None, LARGEST_CURVATURE)
    return Gaussian(problem.prior.mean, problem.prior.diagonal + total.gram)
