"""One natural-gradient step, for full and for diagonal covariances.

With the sums of sums.py at q = N(μ, Λ⁻¹), the step of length ρ in natural parameters is

    Λ_ρ = (1-ρ) Λ + ρ (S₀⁻¹ + Aᵀ diag(c h) A),      μ_ρ = μ + ρ Λ_ρ⁻¹ [Aᵀ c(y - g) - S₀⁻¹(μ - m₀)],

which for ρ = 1 is Newton's step in μ. The diagonal family keeps only the diagonal of Λ in q, but solves for the step of
μ with the whole matrix. The length of a move is the KL divergence from the old q to the new one, in nats, which does
not depend on the scale of the data.
"""

import math

import torch
from scipy.linalg.lapack import dpotrs
from torch import Tensor

from viper.errors import NotFinite
from viper.inference.problem import Gaussian, Problem, cholesky, gaussian, is_small, light_product
from viper.inference.sums import Sums
from viper.softplus.pointwise import Bound, KernelRecipe, Triple

CG_TOLERANCE = 0.03  # relative: a step this inexact still shrinks the next a thousandfold


def gradient(problem: Problem, q: Gaussian, total: Sums) -> Tensor:
    """∂F/∂μ = Aᵀ c(y - g) - S₀⁻¹(μ - m₀)."""
    return total.gradient - problem.prior.apply(q.mean - problem.prior.mean)


def solved(root: Tensor, vector: Tensor) -> Tensor:
    """(LLᵀ)⁻¹ v; on a CPU and in few dimensions, calls LAPACK directly, with less overhead than torch."""
    if is_small(vector):
        return torch.from_numpy(dpotrs(root.numpy(), vector.numpy(), lower=1)[0])
    return torch.cholesky_solve(vector[:, None], root)[:, 0]


def full_step(problem: Problem, q: Gaussian, total: Sums, rho: float) -> Gaussian | None:
    """Return the step of the full family, or None if Λ_ρ is not positive definite."""
    target = problem.prior.plus(total.gram)
    precision = target if rho == 1.0 else torch.lerp(q.precision, target, rho)
    root = cholesky(precision)
    if root is None:
        return None
    direction = solved(root, gradient(problem, q, total))
    return Gaussian(torch.add(q.mean, direction, alpha=rho), precision, root)


def diagonal_step(problem: Problem, q: Gaussian, total: Sums, rho: float) -> Gaussian | None:
    """The step of the diagonal family: variances from the diagonal of the curvature, μ by Newton with all of it."""
    slope = gradient(problem, q, total)
    if problem.iterative:
        diagonal = problem.prior.diagonal + total.gram
        direction = conjugate_gradients(problem, total, slope, torch.maximum(diagonal, problem.prior.diagonal))
    else:
        curvature = problem.prior.plus(total.gram)
        diagonal = curvature.diagonal()
        root = cholesky(curvature)
        if root is None:  # a truncated bound, far from its optimum
            root = torch.diag(torch.maximum(diagonal, problem.prior.diagonal).sqrt())
        direction = solved(root, slope)
    return gaussian(q.mean + rho * direction, torch.lerp(q.precision, diagonal, rho))


def conjugate_gradients(problem: Problem, total: Sums, slope: Tensor, diagonal: Tensor) -> Tensor:
    """(S₀⁻¹ + Aᵀ diag(c h) A)⁻¹ v by conjugate gradients, preconditioned with the whitening or the diagonal.

    They end when the residual is small and two steps in a row add next to nothing: a small residual alone says little
    about directions in which the matrix is nearly singular.
    """
    R = problem.whitening
    precondition = (lambda r: r / diagonal) if R is None else (lambda r: light_product(R, light_product(R.T, r)))
    x, residual = torch.zeros_like(slope), slope.clone()
    z = precondition(residual)
    direction, rz = z.clone(), residual @ z
    start, small = float(rz), 0
    for _ in range(10 * math.isqrt(len(slope)) + 100):
        product = problem.prior.apply(direction) + total.curvature(direction)
        bend = direction @ product
        if not bend > 0.0:  # converged to rounding, or a truncated bound
            break
        alpha = rz / bend
        x.add_(alpha * direction)
        residual.sub_(alpha * product)
        z = precondition(residual)
        added, whole = alpha**2 * (direction @ (diagonal * direction)), x @ (diagonal * x)
        small = small + 1 if added <= CG_TOLERANCE**2 * whole else 0
        rz, old = residual @ z, rz
        if small >= 2 and rz <= CG_TOLERANCE**2 * start:
            break
        direction = z + (rz / old) * direction
    return x


def largest_curvature(mean: Tensor, variance: Tensor) -> Triple:
    """The quadratic bound of Böhning & Lindsay (1988): the slope at the mean, and s' <= ¼. Its value is not used."""
    return torch.zeros_like(mean), torch.sigmoid(mean), torch.full_like(mean, 0.25)


LARGEST_CURVATURE = Bound(largest_curvature, kernel=KernelRecipe("quarter"))


def opening(problem: Problem) -> Gaussian:
    """Step once from the prior's mean with Σ = 0 and h = ¼, the largest possible value, so that it cannot overshoot."""
    total = problem.total(problem.prior.mean, None, LARGEST_CURVATURE)
    step = diagonal_step if problem.diagonal else full_step
    q = step(problem, Gaussian(problem.prior.mean, problem.prior.diagonal), total, 1.0)
    if q is None:
        raise NotFinite
    return q
