"""One natural-gradient step, for full and for diagonal covariances.

With the sums of sums.py at q = N(μ, Λ⁻¹), the step of length ρ in natural parameters is

    Λ_ρ = (1-ρ) Λ + ρ (S₀⁻¹ + Aᵀ diag(c h) A),      μ_ρ = μ + ρ Λ_ρ⁻¹ [Aᵀ c(y - g) - S₀⁻¹(μ - m₀)],

which for ρ = 1 is Newton's step in μ. The diagonal family keeps only the diagonal of Λ in q, but uses the whole matrix
for the step of μ. The length of a move is the KL divergence from the old q to the new one, in nats, which does not
depend on the scale of the data.
"""

import numpy as np
import torch
from scipy.linalg.lapack import dpotrs
from torch import Tensor

from viper.errors import NotFinite
from viper.inference.problem import Gaussian, Prior, Problem, cholesky, cholesky_by_lapack, gaussian, is_small
from viper.inference.sums import Sums
from viper.softplus.pointwise import Bound, KernelRecipe, Triple


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
    if rho == 1.0 and problem.prior.precision.ndim == 1 and is_small(q.mean):
        return small_step(problem.prior, q.mean.numpy(), total)
    target = problem.prior.plus(total.gram)
    precision = target if rho == 1.0 else torch.lerp(q.precision, target, rho)
    root = cholesky(precision)
    if root is None:
        return None
    direction = solved(root, gradient(problem, q, total))
    return Gaussian(torch.add(q.mean, direction, alpha=rho), precision, root)


@np.errstate(all="ignore")  # an overflow shows up in F
def small_step(prior: Prior, mean: np.ndarray, total: Sums) -> Gaussian | None:
    """The full step for ρ = 1, a diagonal S₀ and few dimensions, where NumPy and LAPACK take half of torch's time."""
    inverse, precision = prior.precision.numpy(), total.gram.numpy().copy()
    precision.reshape(-1)[:: len(mean) + 1] += inverse
    root = cholesky_by_lapack(precision)
    if root is None:
        return None
    slope = total.gradient.numpy() - inverse * (mean - prior.mean.numpy())
    direction, _ = dpotrs(root, slope, lower=1)
    return Gaussian(*map(torch.from_numpy, (mean + direction, precision, root)))


def diagonal_step(problem: Problem, q: Gaussian, total: Sums, rho: float) -> Gaussian | None:
    """The step of the diagonal family: variances from the diagonal of the curvature, μ by Newton's method with all."""
    slope, curvature = gradient(problem, q, total), problem.prior.plus(total.gram)
    diagonal, root = curvature.diagonal(), cholesky(curvature)
    if root is None:  # a truncated bound, far from its optimum
        root = torch.diag(torch.maximum(diagonal, problem.prior.diagonal).sqrt())
    direction = solved(root, slope)
    return gaussian(q.mean + rho * direction, torch.lerp(q.precision, diagonal, rho))


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
