"""The sums over rows with K classes: F's likelihood part, its gradient in each μ_k, and each class's curvature.

Row i sees f_ik ~ N(ϑ_ik, τ_ik²), independent over k up to a common shift, with ϑ_k = o_k + Aμ_k and τ_k² = r_k +
diag(A P_k⁻¹ Aᵀ). With the moments η, g and h of the expected log-sum-exp, a pass adds up c(ϑ_y - η),
Aᵀ c(1[y = k] - g_k) and Aᵀ diag(c h_k) A for every class. Labels are the numbers 0, ..., K-1.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from viper.inference.kernels.compiled import class_gather, class_hessian, class_latent
from viper.inference.rows import LEAST_TRIANGULAR, Block, Gram, Matrix, RowSource, add_up
from viper.softplus.gumbel import Precision
from viper.softplus.logsumexp import class_moments

PRODUCT_COLUMNS = 700  # most columns of a product of A with several factors

ClassFormula = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]  # ϑ, τ² -> value, slope, curvature
Integral = partial[tuple[Tensor, Tensor, Tensor]]  # `expected_classes` with its tolerance


class ClassSums(NamedTuple):
    """Sums over rows at one star."""

    value: float
    magnitude: float  # Σ c (1 + max|ϑ| + max τ), which scales rounding errors
    weight: float  # Σ c
    gradient: Tensor  # (K, d)
    gram: Tensor  # (K, d, d) or (K, d), the sum over classes if they share a precision, or empty


class RowHessian(NamedTuple):
    """s (diag p - p pᵀ) for each row: the Hessian of η, exact where τ = 0 and right on average elsewhere."""

    probability: Tensor
    scale: Tensor

    def times(self, vectors: Tensor) -> Tensor:
        """The products with the rows of `vectors` (n, K)."""
        inner = self.probability * vectors
        return (inner - self.probability * inner.sum(1, keepdim=True)) * self.scale[:, None]


def expected_classes(theta: Tensor, tau2: Tensor | None, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """The moments of the expected log-sum-exp."""
    assert tau2 is not None
    value, slope, curvature, _ = class_moments(theta, tau2, Precision(tolerance), False)
    return value, slope, curvature


def softmax_classes(theta: Tensor, tau2: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The moments at τ = 0: softmax and its derivatives."""
    value = torch.logsumexp(theta, 1)
    p = torch.exp(theta - value[:, None])
    return value, p, p * (1.0 - p)


def class_predictors(block: Block, mean: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """ϑ (n, K) and τ² (n, K) of a block's rows; factors as in `Star.factor`, or None for P⁻¹ = 0."""
    theta, tau2 = class_gaussians(block.design, mean, factor)
    if block.offset is not None:
        theta = theta + block.offset
    residual = block.residual if block.residual is None or block.residual.ndim == 2 else block.residual[:, None]
    if tau2 is None:
        return theta, None if residual is None else residual.expand_as(theta)
    tau2 = tau2.expand_as(theta)
    return theta, tau2 if residual is None else tau2 + residual


def class_gaussians(design: Matrix, mean: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Aμ_k and diag(A F_k F_kᵀ Aᵀ) for every class, or for a single factor that all classes share."""
    if factor is None or factor.ndim == 3:
        compiled = class_latent(design, mean, mean.new_zeros(0) if factor is None else factor)
        if compiled is not None:
            return compiled[0], None if factor is None else compiled[1]
    theta = design.project(mean.T.contiguous())
    return theta, None if factor is None else class_spreads(design, factor)


def class_spreads(design: Matrix, factor: Tensor) -> Tensor:
    """diag(A F_k F_kᵀ Aᵀ) for every factor; small factors are multiplied several at a time."""
    if factor.ndim == 2:
        return design.spread_apart(factor.T.contiguous())
    if factor.shape[-1] >= LEAST_TRIANGULAR:
        return torch.stack([design.spread(one) for one in factor], 1)
    d, found = factor.shape[-1], []
    for some in factor.split(max(1, PRODUCT_COLUMNS // d)):
        inner = design.project(some.permute(1, 0, 2).reshape(d, -1).contiguous())
        found.append(inner.view(-1, len(some), d).square_().sum(2))
    return torch.cat(found, 1)


def class_rows(
    block: Block, mean: Tensor, factor: Tensor | None, moments: ClassFormula, gram: Gram, shared: bool
) -> tuple[list[Tensor], RowHessian]:
    """A block's sums and the Hessians of its rows; curvatures are summed over classes that share a precision."""
    theta, tau2 = class_predictors(block, mean, factor)
    eta, slope, curvature = moments(theta, tau2)
    label = block.label.long()[:, None]
    value = theta.gather(1, label)[:, 0] - eta
    scale = torch.ones_like(value)
    size = 1.0 + theta.abs().amax(1)
    if tau2 is not None:
        scale = (curvature.sum(1) / (slope * (1.0 - slope)).sum(1).clamp(min=1e-300)).clamp(max=1.0)  # Jensen
        size = size + tau2.amax(1).sqrt()
    residual = (-slope).scatter_add_(1, label, torch.ones_like(label, dtype=slope.dtype))
    weight = value.new_tensor(float(len(value)))
    if block.weight is not None:
        c = block.weight
        value, scale, size, weight = value * c, scale * c, size * c, c.sum()
        residual, curvature = residual * c[:, None], curvature * c[:, None]
    if shared:
        curvature = curvature.sum(1, keepdim=True)
    sums = [value.sum(), size.sum(), weight, *class_pulls(block.design, residual, curvature, gram)]
    return sums, RowHessian(slope, scale)


def class_pulls(design: Matrix, residual: Tensor, curvature: Tensor, gram: Gram) -> tuple[Tensor, Tensor]:
    """Aᵀ c(1[y = k] - g_k) for every class, and Aᵀ diag(c h_k) A for every column h_k."""
    if gram != "diagonal":
        compiled = class_gather(design, residual, curvature if gram == "full" else curvature[:, :0])
        if compiled is not None:
            return compiled
    gradient = design.pull(residual).T.contiguous()
    if gram == "none":
        return gradient, curvature.new_zeros(0)
    if gram == "diagonal":
        return gradient, design.gram_diagonal(curvature).T.contiguous()
    return gradient, torch.stack([design.gram(h) for h in curvature.T.contiguous()])


def class_sums(
    block: Block, mean: Tensor, factor: Tensor | None, moments: ClassFormula, gram: Gram, shared: bool
) -> list[Tensor]:
    """A block's sums."""
    return class_rows(block, mean, factor, moments, gram, shared)[0]


def row_hessians(block: Block, mean: Tensor, factor: Tensor | None, moments: ClassFormula) -> RowHessian:
    """The Hessians of a block's rows, on their device."""
    there = block.label.device
    return class_rows(block, mean.to(there), None if factor is None else factor.to(there), moments, "none", False)[1]


def hessian_product(source: RowSource, hessians: list[RowHessian], vectors: Tensor) -> Tensor:
    """Aᵀ H A v for v (K, d)."""
    in_turn, there = iter(hessians), vectors.to(source.device)

    def of_block(block: Block) -> list[Tensor]:
        hessian = next(in_turn)
        compiled = class_hessian(block.design, there, hessian.probability, hessian.scale)
        if compiled is not None:
            return [compiled]
        return [block.design.pull(hessian.times(block.design.project(there.T.contiguous()))).T]

    return add_up(source.map(of_block))[0].to(vectors)


def shared_hessian(source: RowSource, hessians: list[RowHessian]) -> Tensor:
    """Aᵀ diag(s (1 - |p|²)/K) A, the mean of the blocks Aᵀ diag(s p_k (1 - p_k)) A."""
    in_turn = iter(hessians)

    def of_block(block: Block) -> list[Tensor]:
        hessian = next(in_turn)
        p = hessian.probability
        return [block.design.gram(hessian.scale * (1.0 - p.square().sum(1)).clamp(min=0.0) / p.shape[1])]

    return add_up(source.map(of_block))[0]


EXACT_TOLERANCE = 1e-10  # error of each moment of the expected log-sum-exp
COARSE_CLASSES, ROUGH_CLASSES, EXACT_CLASSES = (
    partial(expected_classes, tolerance=tolerance) for tolerance in (1e-3, 1e-5, EXACT_TOLERANCE)
)
