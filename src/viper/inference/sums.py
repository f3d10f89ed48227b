"""The sums over rows that every step needs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from viper.inference.kernels import kernel_for
from viper.inference.rows import Block, Matrix, RowSource
from viper.softplus.pointwise import Bound, Formula, KernelRecipe


@dataclass
class Sums:
    """Sums over rows at one q: likelihood part of F, its gradient in μ, and the curvature Aᵀ diag(c h) A."""

    value: float
    magnitude: float  # Σ c (|ϑ| + τ + 1), by which rounding errors are measured; maybe 0 unless asked for
    gradient: Tensor
    gram: Tensor  # matrix, its diagonal, or empty
    curvature: Callable[[Tensor], Tensor]  # v -> Aᵀ diag(c h) A v, a pass of its own


Gram = Literal["full", "diagonal", "none"]


def sums(
    source: RowSource,
    mean: Tensor,
    factor: Tensor | None,
    bound: Bound,
    *,
    gram: Gram = "full",
    scale: float = 1.0,
    single: bool = False,
    certify: bool = False,
) -> Sums:
    """One pass: F's likelihood part and derivatives at q = N(μ, Σ), `factor` as in `Matrix.spread`, or None for Σ = 0.

    Everything is multiplied by `scale`. `single` takes τ² and the curvature in float32: they steer the next step, and
    only ϑ and the gradient decide where the steps end. `certify` asks for the magnitude.
    """
    rows = partial(
        row_sums,
        mean=mean,
        factor=factor,
        moments=bound.moments,
        recipe=bound.kernel,
        gram=gram,
        single=single,
        certify=certify,
    )
    value, magnitude, slope, total = source.reduce(rows)

    def curvature(vector: Tensor) -> Tensor:
        function = partial(curvature_product, mean=mean, factor=factor, moments=bound.moments, v=vector)
        return scale * source.reduce(function)[0]

    if scale != 1.0:
        slope, total = slope * scale, total * scale
    return Sums(float(value) * scale, float(magnitude) * scale, slope, total, curvature)


def row_sums(
    block: Block,
    mean: Tensor,
    factor: Tensor | None,
    moments: Formula,
    recipe: KernelRecipe | None,
    gram: Gram,
    single: bool,
    certify: bool,
) -> list[Tensor]:
    """A block's part of value, magnitude, gradient and curvature, by a kernel where there is one for it."""
    kernel = None if gram == "diagonal" else kernel_for(block, recipe, len(mean))
    if kernel is not None and (found := kernel(mean, factor, gram == "full", single)) is not None:
        return found
    light = block.design.single() if single and (factor is not None or gram == "full") else block.design
    theta, tau2 = latent_moments(block, mean, factor, light)
    eta, g, h = moments(theta, tau2)
    if block.weight is None:
        value = torch.dot(block.label, theta) - eta.sum()
        g = block.label - g
    else:
        value = torch.dot(block.weight, block.label * theta - eta)
        g, h = (block.label - g) * block.weight, h * block.weight
    magnitude = torch.zeros_like(value)
    if certify:
        size = theta.abs() + tau2.sqrt() + 1.0
        magnitude = size.sum() if block.weight is None else torch.dot(block.weight, size)
    curvature = {"full": light.gram, "diagonal": block.design.gram_diagonal, "none": empty}[gram]
    return [value, magnitude, block.design.pull(g), curvature(h)]


def empty(vector: Tensor) -> Tensor:
    return vector.new_zeros(0)


def latent_moments(
    block: Block, mean: Tensor, factor: Tensor | None, light: Matrix | None = None
) -> tuple[Tensor, Tensor]:
    """ϑ and τ² of the rows of a block; τ² by way of `light`, the same design in float32."""
    theta = block.design.project(mean)
    tau2 = torch.zeros_like(theta) if factor is None else (light or block.design).spread(factor)
    if block.offset is not None:
        theta = theta + block.offset
    if block.residual is not None:
        tau2 = tau2 + block.residual
    return theta, tau2


def curvature_product(block: Block, mean: Tensor, factor: Tensor | None, moments: Formula, v: Tensor) -> list[Tensor]:
    """A block's part of Aᵀ diag(c h) A v."""
    h = moments(*latent_moments(block, mean, factor))[2]
    if block.weight is not None:
        h = h * block.weight
    return [block.design.pull(h * block.design.project(v))]


def row_spread(block: Block, factor: Tensor) -> list[Tensor]:
    """A block's part of Σ c diag(A F Fᵀ Aᵀ), `factor` as in `Matrix.spread`, and of Σ c."""
    spread = block.design.spread(factor)
    weight = torch.ones_like(spread) if block.weight is None else block.weight
    return [torch.dot(weight, spread), weight.sum()]
