"""Gaussians whose precision is the prior's, plus a diagonal, plus a matrix of rank k.

    q = N(μ, Λ⁻¹),      Λ = diag(λ) + VVᵀ,      λ = diag(S₀⁻¹) + δ with δ >= 0,      V of k columns.

With s = λ^(-1/2), W = diag(s) V and K = (I + WᵀW)⁻¹, all formulas need only products with k columns:

    Σ = diag(s) (I - W K Wᵀ) diag(s),      τ² = Σ_j s_j² x_j² - |Rᵀ Wᵀ diag(s) x|²  where  K = RRᵀ,
    log|Λ| = Σ_j log λ_j + log|I + WᵀW|.

Without V it is the mean field. The best q of this form matches T = S₀⁻¹ + Aᵀ diag(c h) A in the way maximum-likelihood
factor analysis matches a sample covariance T (Jöreskog 1967): at the optimum the diagonals of Λ and T agree where
δ > 0, and W spans leading eigenvectors of diag(s) T diag(s). If V has as many columns as there are rows or
coefficients, Λ = T.
"""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from viper.inference.kernels.compiled import wide_gather
from viper.inference.posterior import LowRank
from viper.inference.problem import Gaussian, Problem
from viper.inference.rows import Block
from viper.inference.sums import latent_moments
from viper.softplus.pointwise import Bound, Formula

LARGEST_SQUARED = 1e8  # length of a column of W: I + WᵀW then keeps half of the digits of I


@dataclass(frozen=True)
class LowRankGaussian(Gaussian):
    """q as the solver of this family stores it: `precision` is the vector λ, and `loadings` are W."""

    loadings: Tensor = field(kw_only=True)

    @cached_property
    def sd(self) -> Tensor:
        """s, the standard deviations of the diagonal part."""
        return self.precision.rsqrt()

    @cached_property
    def inner_root(self) -> Tensor:
        """L with LLᵀ = I + WᵀW, from a QR decomposition if W is so large that the sum would lose I."""
        gram = self.loadings.T @ self.loadings
        gram.diagonal().add_(1.0)
        if float(gram.diagonal().max()) < LARGEST_SQUARED:
            return torch.linalg.cholesky(gram)
        upper = torch.linalg.qr(torch.cat([torch.eye(len(gram)).to(gram), self.loadings]), mode="r")[1]
        return (upper * upper.diagonal().sign()[:, None]).T

    @cached_property
    def root(self) -> Tensor:
        """R = L⁻ᵀ, so that K = RRᵀ."""
        return torch.linalg.inv(self.inner_root).T

    @cached_property
    def factor(self) -> Tensor:
        """Marginal variances, diag Σ."""
        return (1.0 - (self.loadings @ self.root).square().sum(1)) / self.precision

    @cached_property
    def log_determinant(self) -> float:
        """log |Λ|."""
        return float(self.precision.log().sum() + 2.0 * self.inner_root.diagonal().log().sum())

    def posterior(self) -> LowRank:
        """The same Gaussian: Σ = diag(s) (I + Q (G - I) Qᵀ) diag(s) with W = Q diag(w) Oᵀ and G = 1/(1 + w²)."""
        basis, w, _ = torch.linalg.svd(self.loadings, full_matrices=False)
        inner = torch.diag((1.0 + w.square()).rsqrt())
        return LowRank(self.mean, self.sd, basis, torch.zeros_like(w), inner)


@dataclass
class LowRankSums:
    """Sums over rows at one q: as `Sums`, with the diagonal of the curvature and its product with diag(s) W K."""

    value: float
    magnitude: float
    gradient: Tensor
    diagonal: Tensor
    products: Tensor


def low_rank_sums(
    block: Block, mean: Tensor, sd: Tensor, loadings: Tensor, root: Tensor, moments: Formula
) -> list[Tensor]:
    """A block's value, magnitude, Aᵀ c(y - g), diagonal of Aᵀ diag(c h) A, and its product with diag(s) W K."""
    theta, apart = latent_moments(block, mean, sd.square())
    inside = block.design.project(sd[:, None] * (loadings @ root))
    tau2 = (apart - inside.square().sum(1)).clamp_(min=0.0)
    eta, g, h = moments(theta, tau2)
    value, slope = block.label * theta - eta, block.label - g
    size = theta.abs() + tau2.sqrt() + 1.0 + apart  # `apart` cancels in τ²
    if block.weight is not None:
        value, slope, h, size = (block.weight * x for x in (value, slope, h, size))
    both = wide_gather(block.design, slope, h) or (block.design.pull(slope), block.design.gram_diagonal(h))
    return [value.sum(), size.sum(), *both, block.design.pull((h[:, None] * inside) @ root.T)]


@dataclass(frozen=True)
class LowRankProblem(Problem):
    """Maximise F over this family. Methods inherited from `Problem` concern the mean field, where the search starts."""

    rank: int = 0

    def sums(self, q: LowRankGaussian, bound: Bound | None = None) -> LowRankSums:
        """The sums at q, by another bound if given."""
        bound = bound or (self.bound if self.refine or self.rough is None else self.rough)
        at: Any = {"mean": q.mean, "sd": q.sd, "loadings": q.loadings, "root": q.root, "moments": bound.moments}
        value, magnitude, *rest = self.source.reduce(partial(low_rank_sums, **at))
        return LowRankSums(self.scale * float(value), self.scale * float(magnitude), *(self.scale * x for x in rest))

    def kl(self, q: Gaussian, factor: Tensor) -> float:
        """KL(q ‖ p) = ½ [log|Λ| - log|S₀⁻¹| - d + tr(S₀⁻¹Σ) + (μ-m₀)ᵀ S₀⁻¹ (μ-m₀)]."""
        assert isinstance(q, LowRankGaussian)
        prior, shift = self.prior, q.mean - self.prior.mean
        trace = prior.precision @ q.factor
        if prior.loadings is not None:
            scaled = q.sd[:, None] * prior.loadings
            trace = trace + scaled.square().sum() - (q.root.T @ (q.loadings.T @ scaled)).square().sum()
        expected = float(trace + shift @ prior.apply(shift))
        return 0.5 * (q.log_determinant - prior.log_determinant - len(shift) + expected)

    def measure(self, q: Gaussian, factor: Tensor, bound: Bound | None = None) -> tuple[float, float]:
        assert isinstance(q, LowRankGaussian)
        total = self.sums(q, bound)
        return total.value - self.kl(q, factor), total.magnitude
