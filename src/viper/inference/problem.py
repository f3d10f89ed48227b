"""The optimisation problem: maximise F(q) = Σ_i c_i (y_i ϑ_i - η(ϑ_i, τ_i²)) - KL(q ‖ p) over Gaussians q.

The prior p and q are Gaussians given by their precisions. A `Problem` joins rows, prior and bound, and evaluates F.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from scipy.linalg.lapack import dpotrf, dtrtri
from torch import Tensor

from viper.inference.rows import RowSource
from viper.inference.sums import Sums, sums
from viper.softplus.pointwise import Bound

LOG_2PI = math.log(2.0 * math.pi)
MANY_ROWS, MANY_COLUMNS = 5_000, 16  # from here on, float32 saves more than the conversion costs
SMALL = 64  # dimension up to which the overhead of a call to torch exceeds the work
LARGEST_MIXED = 5000  # dimension up to which steps of the full family are mixed; past steps then take 2 GB
LARGEST_SOLVED = 5000  # dimension up to which the diagonal family may solve d × d systems (200 MB)
MANY_ENOUGH = 50_000  # rows of a subset whose curvature is good enough to start with
# Rough costs in seconds on one thread: a pass with d × d matrices takes GRAM n d² + SOLVE d³ + MATRICES, a pass with
# products alone PRODUCTS n d + BESIDES, and reading an entry again, from a file or another machine, READING.
SECONDS_GRAM, SECONDS_SOLVE, SECONDS_MATRICES = 4e-11, 2e-11, 2e-4
SECONDS_PRODUCTS, SECONDS_BESIDES = 5e-10, 1e-4
SECONDS_READING = 8e-9
# Passes of a typical fit: with matrices (fewer from MANY_ENOUGH rows on), and with products alone.
DIRECT_PASSES, DIRECT_FEWER, PRODUCT_PASSES = 9, 4, 45
MOST_LEFT, SHARE_LEFT = 3e-9, 1e-12  # allowed distance to the optimum: in nats, and relative to F
LARGEST_LOG_ODDS = 1e8  # on average over rows; there a sum of 10^4 rows is rounded by 1e-4 nats
ROUGH_NOISE = 1e-9  # per √row: jumps of the rough formulas where one takes over from another


@dataclass(frozen=True)
class Prior:
    """N(m₀, S₀), given by its precision S₀⁻¹: a vector (its diagonal), a vector and loadings V (+ VVᵀ), or a matrix."""

    mean: Tensor
    precision: Tensor
    loadings: Tensor | None = None

    @cached_property
    def log_determinant(self) -> float:
        """log |S₀⁻¹|."""
        if self.precision.ndim == 2:
            return 2.0 * float(torch.linalg.cholesky(self.precision).diagonal().log().sum())
        whole = float(self.precision.log().sum())
        if self.loadings is None:
            return whole
        inner = self.loadings.T @ (self.loadings / self.precision[:, None])
        inner.diagonal().add_(1.0)
        return whole + float(torch.linalg.slogdet(inner).logabsdet)

    def apply(self, vector: Tensor) -> Tensor:
        """S₀⁻¹ v, for a vector or the columns of a matrix."""
        if self.precision.ndim == 2:
            return self.precision @ vector
        inside = (self.precision * vector.T).T if vector.ndim == 2 else self.precision * vector
        return inside if self.loadings is None else inside + self.loadings @ (self.loadings.T @ vector)

    @property
    def diagonal(self) -> Tensor:
        if self.precision.ndim == 2:
            return self.precision.diagonal()
        return self.precision if self.loadings is None else self.precision + self.loadings.square().sum(1)

    def without_loadings(self) -> "Prior":
        """Return the prior with its precision as a matrix if it has loadings, otherwise unchanged."""
        if self.loadings is None:
            return self
        return Prior(self.mean, torch.diag(self.precision).addmm_(self.loadings, self.loadings.T))

    def plus(self, gram: Tensor) -> Tensor:
        """S₀⁻¹ + G as a matrix."""
        if self.precision.ndim == 2:
            return self.precision + gram
        total = gram.clone()
        total.diagonal().add_(self.precision)
        return total


@dataclass(frozen=True)
class Gaussian:
    """q(w) = N(μ, Λ⁻¹) as the solver stores it: `precision` is a matrix with its `cholesky` Λ = LLᵀ, or a vector."""

    mean: Tensor
    precision: Tensor
    cholesky: Tensor | None = None

    @cached_property
    def factor(self) -> Tensor:
        """F with Σ = F Fᵀ (F = L⁻ᵀ), or the vector of variances."""
        if self.cholesky is None:
            return 1.0 / self.precision
        if self.cholesky.device.type == "cpu":
            inverse, failed = dtrtri(self.cholesky.numpy(), lower=1)  # a third of the operations
            if not failed:
                return torch.from_numpy(inverse.T).contiguous()
        eye = torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device)
        return torch.linalg.solve_triangular(self.cholesky, eye, upper=False).T.contiguous()

    @cached_property
    def log_determinant(self) -> float:
        """log |Λ|."""
        if self.cholesky is None:
            return float(self.precision.log().sum())
        if is_small(self.cholesky):
            return 2.0 * float(np.log(self.cholesky.numpy().diagonal()).sum())
        return 2.0 * float(self.cholesky.diagonal().log().sum())


def is_small(x: Tensor) -> bool:
    """Return whether NumPy and LAPACK, called directly, save more than the work itself: few dimensions, on a CPU."""
    return x.shape[0] <= SMALL and x.device.type == "cpu"


def gaussian(mean: Tensor, precision: Tensor) -> Gaussian | None:
    """N(mean, precision⁻¹), or None if the precision is not positive definite."""
    if precision.ndim == 1:
        return Gaussian(mean, precision) if bool((precision > 0).all()) else None
    root = cholesky(precision)
    return None if root is None else Gaussian(mean, precision, root)


def cholesky(matrix: Tensor) -> Tensor | None:
    """L with LLᵀ = matrix, or None if the matrix is not positive definite."""
    if is_small(matrix):
        root = cholesky_by_lapack(matrix.numpy())
        return None if root is None else torch.from_numpy(root)
    factor, info = torch.linalg.cholesky_ex(matrix)
    return None if int(info) or not math.isfinite(float(factor.trace())) else factor


def cholesky_by_lapack(matrix: np.ndarray) -> np.ndarray | None:
    """L as above, by calling LAPACK directly."""
    root, failed = dpotrf(matrix.T, lower=1, clean=1)
    return None if failed or not math.isfinite(root.trace()) else root


def widened(q: Gaussian, by: float) -> Gaussian:
    """The distribution of `by` · w for w ~ q."""
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
    spread = old.log_determinant - new.log_determinant - len(shift)
    # tr(Λ'Σ) = ‖L⁻¹L'‖²
    if is_small(shift):
        root = new.cholesky.numpy()
        ratio, moved = old.factor.numpy().T @ root, root.T.dot(shift.numpy())  # may overflow, silently, for distant q
        return 0.5 * float(spread + np.vdot(ratio, ratio) + np.vdot(moved, moved))
    ratio = torch.linalg.solve_triangular(old.cholesky, new.cholesky, upper=False)
    return 0.5 * float(spread + ratio.square().sum() + (new.cholesky.T @ shift).square().sum())


def kl_to_prior(q: Gaussian, factor: Tensor, prior: Prior) -> float:
    """KL(q ‖ p) = ½ [log|Λ| - log|S₀⁻¹| - d + tr(S₀⁻¹Σ) + (μ-m₀)ᵀ S₀⁻¹ (μ-m₀)]."""
    shift = q.mean - prior.mean
    if prior.precision.ndim == 1:
        variance = factor if factor.ndim == 1 else row_squares(factor)
        expected = prior.precision @ torch.addcmul(variance, shift, shift)
    else:
        trace = prior.diagonal @ factor if factor.ndim == 1 else (factor * (prior.precision @ factor)).sum()
        expected = trace + shift @ prior.apply(shift)
    return 0.5 * (q.log_determinant - prior.log_determinant - len(shift) + float(expected))


def row_squares(factor: Tensor) -> Tensor:
    """diag(F Fᵀ); on a CPU by NumPy, which needs a quarter of torch's time for few columns."""
    if factor.device.type != "cpu":
        return factor.square().sum(1)
    return torch.from_numpy(np.einsum("ij,ij->i", factor.numpy(), factor.numpy()))


def most_left(value: float) -> float:
    """Return how many nats may remain by default: the gradient must shrink to a millionth of its first value."""
    return min(MOST_LEFT, SHARE_LEFT * (abs(value) + 1.0))


def direct_seconds(source: RowSource) -> float:
    """Estimate the cost of a fit of the diagonal family that solves d × d systems."""
    n, d = source.rows, source.dimension
    reading = 0.0 if source.traits.where == "memory" else SECONDS_READING * n * d
    passes = DIRECT_FEWER if n >= MANY_ENOUGH else DIRECT_PASSES
    return passes * (SECONDS_GRAM * n * d * d + SECONDS_SOLVE * d**3 + reading + SECONDS_MATRICES)


def product_seconds(source: RowSource) -> float:
    """Estimate the cost of a pass with products of A and Aᵀ only."""
    entry = SECONDS_PRODUCTS + (0.0 if source.traits.where == "memory" else SECONDS_READING)
    return entry * source.rows * source.dimension + SECONDS_BESIDES


def matrix_seconds(source: RowSource) -> float:
    """Estimate the cost of a pass of the full family: τ², the curvature, and the algebra that follows."""
    n, d = source.rows, source.dimension
    return 2.0 * SECONDS_GRAM * n * d * d + 3.0 * SECONDS_SOLVE * d**3


def products_are_cheaper(source: RowSource) -> bool:
    """Return whether the diagonal family should do without d × d matrices: by cost, or because they would not fit."""
    cheaper = PRODUCT_PASSES * product_seconds(source) < direct_seconds(source)
    return cheaper or source.dimension > LARGEST_SOLVED


@dataclass(frozen=True)
class Problem:
    """Rows, prior, bound and family; evaluates F and its derivatives."""

    source: RowSource
    prior: Prior
    bound: Bound
    rough: Bound | None = None  # a cheaper version of `bound`, for all but the last pass
    diagonal: bool = False
    scale: float = 1.0  # number of rows of the whole problem per row of `source`
    refine: bool = True  # False in a rough stage
    to_mode: bool = False  # True in a rough stage that only looks for the mode
    iterative: bool = False  # in the diagonal family: use products with A and Aᵀ only, and no d × d matrix

    @property
    def single(self) -> bool:
        """Whether to compute the curvature in float32: on the way to the mode, if matrix products dominate."""
        many = self.source.rows >= MANY_ROWS and self.source.dimension >= MANY_COLUMNS
        return many and self.to_mode and self.source.traits.float32_pays

    def total(self, mean: Tensor, factor: Tensor | None, bound: Bound | None = None, gram: bool = True) -> Sums:
        """Return the sums over rows at N(mean, FFᵀ), by another bound if given; without `gram`, omit the curvature."""
        return sums(
            self.source,
            mean,
            factor,
            bound or (self.bound if self.refine or self.rough is None else self.rough),
            gram=("diagonal" if self.iterative else "full") if gram else "none",
            scale=self.scale,
            single=self.single,
            certify=self.refine,
        )

    def kl(self, q: Gaussian, factor: Tensor) -> float:
        """KL(q ‖ p)."""
        return kl_to_prior(q, factor, self.prior)

    def noise(self, value: float) -> float:
        """Return the noise in F, from rounding and the jumps of a rough formula; smaller differences mean nothing."""
        per_row = 1e-15 * (abs(value) + 1.0) + (0.0 if self.refine else ROUGH_NOISE)
        return per_row * self.source.rows**0.5 * self.scale

    def outgrown(self, magnitude: float) -> bool:
        """Return whether log-odds are so large, on average, that rounding hides what steps gain."""
        return magnitude > LARGEST_LOG_ODDS * self.source.rows * self.scale

    def measure(self, q: Gaussian, factor: Tensor, bound: Bound | None = None) -> tuple[float, float]:
        """F and the magnitude of its terms at q, without derivatives."""
        value, total = self.evaluate(q, factor, bound, gram=False)
        return value, total.magnitude

    def evaluate(
        self, q: Gaussian, factor: Tensor, bound: Bound | None = None, gram: bool = True
    ) -> tuple[float, Sums]:
        """F and the sums at q."""
        total = self.total(q.mean, factor, bound, gram)
        return total.value - self.kl(q, factor), total

    def coarsened(self, k: int, generator: np.random.Generator) -> "Problem":
        """Return the same problem on about k random rows, as a rough stage."""
        sample = self.source.sample(k, generator)
        return replace(self, source=sample, scale=self.scale * self.source.rows / sample.rows, refine=False)
