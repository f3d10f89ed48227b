"""One natural-gradient step, for full and for diagonal covariances.

With the sums of problem.py at q = N(μ, Λ⁻¹), the step of length ρ in natural parameters is

    Λ_ρ = (1-ρ) Λ + ρ (S₀⁻¹ + Aᵀ diag(c h) A),      μ_ρ = μ + ρ Λ_ρ⁻¹ [Aᵀ c(y - g) - S₀⁻¹(μ - m₀)],

which for ρ = 1 is Newton's in μ. For the diagonal family Λ is replaced by its diagonal in q, not in the step for μ. How
far a step moves q is measured by the KL divergence between old and new q, in nats: no scale of the data enters.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from scipy.linalg.lapack import dpotrs
from torch import Tensor

from viper.inference.kernels.fused import PROGRAMS, Program
from viper.inference.rows import Prior, Source, Sums, sums
from viper.softplus.pointwise import Formula, Triple


@dataclass(frozen=True)
class Gaussian:
    """q(w) = N(μ, Λ⁻¹) as the solver holds it: `precision` is a matrix with `cholesky` Λ = LLᵀ, or a vector."""

    mean: Tensor
    precision: Tensor
    cholesky: Tensor | None = None

    @cached_property
    def factor(self) -> Tensor:
        """F with Σ = F Fᵀ (F = L⁻ᵀ), or the vector of variances."""
        if self.cholesky is None:
            return 1.0 / self.precision
        eye = torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device)
        return torch.linalg.solve_triangular(self.cholesky, eye, upper=False).T.contiguous()

    @cached_property
    def log_determinant(self) -> Tensor:
        """log |Λ|."""
        if self.cholesky is None:
            return self.precision.log().sum()
        return 2.0 * self.cholesky.diagonal().log().sum()


def kl_to_prior(q: Gaussian, factor: Tensor, prior: Prior) -> float:
    """KL(q ‖ p) = ½ [log|Λ| - log|S₀⁻¹| - d + tr(S₀⁻¹Σ) + (μ-m₀)ᵀ S₀⁻¹ (μ-m₀)]."""
    shift = q.mean - prior.mean
    if prior.precision.ndim == 1:
        variance = factor if factor.ndim == 1 else factor.square().sum(1)
        expected = prior.precision @ torch.addcmul(variance, shift, shift)
    else:
        trace = prior.diagonal @ factor if factor.ndim == 1 else (factor * (prior.precision @ factor)).sum()
        expected = trace + shift @ prior.apply(shift)
    return 0.5 * (float(q.log_determinant) - float(prior.log_determinant) - len(shift) + float(expected))


@dataclass(frozen=True)
class Problem:
    """What the steps need to know: rows, prior, bound, family and how products with large matrices are made."""

    source: Source
    prior: Prior
    moments: Formula
    rough: Formula | None = None  # a cheaper version of `moments`, for all but the last pass
    diagonal: bool = False
    scale: float = 1.0  # rows of the whole problem per row of `source`
    refine: bool = True  # False: this is a rough stage
    to_mode: bool = False  # and one that only looks for the mode

    @property
    def iterative(self) -> bool:
        """Solve for the step of μ by conjugate gradients, where the full matrix would be too large."""
        return self.diagonal and self.source.dimension > LARGEST_DIRECT

    @property
    def single(self) -> bool:
        """Take the curvature in float32: on the way to the mode, where matrix products dominate."""
        many = self.source.rows >= MANY_ROWS and self.source.dimension >= MANY_COLUMNS
        return many and self.to_mode and self.source.float32_pays

    def total(self, mean: Tensor, factor: Tensor | None, formula: Formula | None = None, gram: bool = True) -> Sums:
        """The sums over rows; without `gram`, no curvature."""
        return sums(
            self.source,
            mean,
            factor,
            formula or (self.moments if self.refine or self.rough is None else self.rough),
            gram=("diagonal" if self.iterative else "full") if gram else "none",
            scale=self.scale,
            single=self.single,
            certify=self.refine,
        )

    def evaluate(
        self, q: Gaussian, factor: Tensor, formula: Formula | None = None, gram: bool = True
    ) -> tuple[float, Sums]:
        """F and the sums at q."""
        total = self.total(q.mean, factor, formula, gram)
        return total.value - kl_to_prior(q, factor, self.prior), total

    def coarsened(self, k: int, generator: np.random.Generator) -> "Problem":
        """The same on about k random rows, roughly."""
        subset = self.source.subset(k, generator)
        return replace(self, source=subset, scale=self.scale * self.source.rows / subset.rows, refine=False)


MANY_ROWS, MANY_COLUMNS = 5_000, 16  # where float32 saves more than the conversion costs
SMALL = 64  # dimension up to which torch's own time shows
LARGEST_DIRECT = 2000  # dimension up to which the diagonal family still solves d × d systems directly
CG_TOLERANCE = 1e-10
NOT_FINITE = "the rows must give finite sums; got an overflow or NaN. Scale the features and offsets."


def gradient(problem: Problem, q: Gaussian, total: Sums) -> Tensor:
    """∂F/∂μ = Aᵀ c(y - g) - S₀⁻¹(μ - m₀)."""
    return total.gradient - problem.prior.apply(q.mean - problem.prior.mean)


def cholesky(matrix: Tensor) -> Tensor | None:
    """L with LLᵀ = matrix, or None where there is none."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    return None if int(info) or not math.isfinite(float(factor.trace())) else factor


def solved(root: Tensor, vector: Tensor) -> Tensor:
    """(LLᵀ)⁻¹ v; on a CPU by LAPACK itself, as torch's call takes longer than the work where that is little."""
    if root.device.type == "cpu" and len(vector) <= SMALL:
        return torch.from_numpy(dpotrs(root.numpy(), vector.numpy(), lower=1)[0])
    return torch.cholesky_solve(vector[:, None], root)[:, 0]


def gaussian(mean: Tensor, precision: Tensor) -> Gaussian | None:
    """N(mean, precision⁻¹), or None if the precision is not positive definite."""
    if precision.ndim == 1:
        return Gaussian(mean, precision) if bool((precision > 0).all()) else None
    root = cholesky(precision)
    return None if root is None else Gaussian(mean, precision, root)


def widened(q: Gaussian, by: float) -> Gaussian:
    """The distribution of `by` times what has distribution q."""
    return Gaussian(by * q.mean, q.precision / by**2, None if q.cholesky is None else q.cholesky / by)


def prior_factor(prior: Prior) -> Tensor:
    """F with S₀ = F Fᵀ, or the vector of variances."""
    root = None if prior.precision.ndim == 1 else torch.linalg.cholesky(prior.precision)
    return Gaussian(prior.mean, prior.precision, root).factor


def divergence(old: Gaussian, new: Gaussian) -> float:
    """KL(old ‖ new) = ½ [log|Λ| - log|Λ'| - d + tr(Λ'Σ) + δᵀΛ'δ]."""
    shift = new.mean - old.mean
    if old.cholesky is None or new.cholesky is None:
        ratio = new.precision / old.precision
        return 0.5 * float((ratio - 1.0 - ratio.log()).sum() + shift @ (new.precision * shift))
    # tr(Λ'Σ) = ‖L⁻¹L'‖²
    ratio = torch.linalg.solve_triangular(old.cholesky, new.cholesky, upper=False)
    spread = old.log_determinant - new.log_determinant - len(shift) + ratio.square().sum()
    return 0.5 * float(spread + (new.cholesky.T @ shift).square().sum())


def full_step(problem: Problem, q: Gaussian, total: Sums, rho: float) -> Gaussian | None:
    """The step of the full family, or None if Λ_ρ is not positive definite."""
    target = problem.prior.plus(total.gram)
    precision = target if rho == 1.0 else torch.lerp(q.precision, target, rho)
    root = cholesky(precision)
    if root is None:
        return None
    direction = solved(root, gradient(problem, q, total))
    return Gaussian(torch.add(q.mean, direction, alpha=rho), precision, root)


def diagonal_step(problem: Problem, q: Gaussian, total: Sums, rho: float) -> Gaussian | None:
    """The step of the diagonal family: variances from the diagonal, μ by Newton with the whole curvature."""
    slope = gradient(problem, q, total)
    if problem.iterative:
        diagonal = problem.prior.diagonal + total.gram
        direction = conjugate_gradients(problem, total, slope, diagonal)
    else:
        curvature = problem.prior.plus(total.gram)
        diagonal = curvature.diagonal()
        root = cholesky(curvature)
        if root is None:  # a truncated bound, far from its optimum
            root = torch.diag(torch.maximum(diagonal, problem.prior.diagonal).sqrt())
        direction = solved(root, slope)
    return gaussian(q.mean + rho * direction, torch.lerp(q.precision, diagonal, rho))


def conjugate_gradients(problem: Problem, total: Sums, slope: Tensor, diagonal: Tensor) -> Tensor:
    """(S₀⁻¹ + Aᵀ diag(c h) A)⁻¹ v by conjugate gradients, preconditioned with the diagonal."""
    x, residual = torch.zeros_like(slope), slope.clone()
    z = residual / diagonal
    direction, rz = z.clone(), residual @ z
    start = rz.clone()
    for _ in range(10 * math.isqrt(len(slope)) + 100):
        if rz <= CG_TOLERANCE**2 * start:
            break
        product = problem.prior.apply(direction) + total.curvature(direction)
        alpha = rz / (direction @ product)
        x, residual = x + alpha * direction, residual - alpha * product
        z = residual / diagonal
        rz, old = residual @ z, rz
        direction = z + (rz / old) * direction
    return x


def opening(problem: Problem) -> Gaussian:
    """One step from the prior's mean with Σ = 0 and h = ¼, its largest value, so that it cannot go too far."""
    total = problem.total(problem.prior.mean, None, largest_curvature)
    step = diagonal_step if problem.diagonal else full_step
    q = step(problem, Gaussian(problem.prior.mean, problem.prior.diagonal), total, 1.0)
    if q is None:
        raise ValueError(NOT_FINITE)
    return q


def largest_curvature(mean: Tensor, variance: Tensor) -> Triple:
    """Böhning & Lindsay's (1988) quadratic: the slope at the mean, and s' <= ¼."""
    return torch.zeros_like(mean), torch.sigmoid(mean), torch.full_like(mean, 0.25)


PROGRAMS[largest_curvature] = Program("quarter")
