"""The sums over rows that a step needs: F's likelihood part, its gradient in μ, and its curvature.

With ϑ = o + Aμ and τ² = r + diag(AΣAᵀ), one pass adds up c(yϑ - η), Aᵀ c(y - g) and Aᵀ diag(c h) A over the blocks of
a source, where η, g and h are a bound's moments at ϑ and τ². The formulas here are the reference; `kernel_for` finds
a compiled kernel for the same sums if there is one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from viper.inference.kernels.choice import kernel_for
from viper.inference.kernels.compiled import moments_of_rows, partials_of_rows, wide_bend, wide_gather, wide_latent
from viper.inference.rows import BLOCK_ROWS, Block, Dense, Gram, LongRowFunction, Matrix, RowSource, add_up
from viper.softplus.pointwise import Bound, Formula, KernelRecipe, Triple


@dataclass
class Sums:
    """Sums over rows at one q: likelihood part of F, its gradient in μ, and the curvature Aᵀ diag(c h) A."""

    value: float
    magnitude: float  # Σ c (|ϑ| + τ + 1), which scales rounding errors; may be 0 without `certify`
    gradient: Tensor
    gram: Tensor  # matrix, its diagonal, or empty
    curvature: Callable[[Tensor], Tensor]  # u -> Aᵀ diag(c h) A u, by another pass; c h is kept for rows in memory
    hessian: Callable[..., Tensor]  # (u, v) -> `product_with_hessian`, likewise; uses `designs` if given


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
    """Compute F's likelihood part and derivatives at q = N(μ, Σ); `factor` as in `Matrix.spread`, None for Σ = 0.

    Everything is multiplied by `scale`. With `single`, τ² and the curvature are computed in float32: they only steer
    the next step, while ϑ and the gradient decide where the steps end. `certify` requests the magnitude.
    """
    kept = source.traits.where == "memory" and source.device.type == "cpu"
    seen: list[tuple[Tensor, Tensor]] | None = [] if kept and gram == "diagonal" else None
    rows = LongRowFunction(
        row_sums,
        mean=mean,
        factor=factor,
        moments=bound.moments,
        recipe=bound.kernel,
        gram=gram,
        single=single,
        certify=certify,
        seen=seen,
    )
    value, magnitude, slope, total = source.reduce(rows)

    at: dict[str, Any] = {"mean": mean, "factor": factor, "bound": bound}
    curvature = row_product(source, scale, curvature_product, row_curvatures, at, seen)
    hessian = row_product(source, scale, product_with_hessian, second_derivatives, at, seen)
    if scale != 1.0:
        slope, total = slope * scale, total * scale
    return Sums(float(value) * scale, float(magnitude) * scale, slope, total, curvature, hessian)


def row_product(
    source: RowSource,
    scale: float,
    product: Callable[..., Tensor],
    weigh: Callable[..., Any],
    at: dict[str, Any],
    seen: list[tuple[Tensor, Tensor]] | None,
) -> Callable[..., Tensor]:
    """Return u, ... -> Σ over blocks of product(design, weigh(block), u, ...). Weights of rows in memory are kept.

    `seen` holds ϑ and τ² of all rows, if known. The returned function also takes `designs`, as returned by
    `light_designs`.
    """
    kept: list[Any] = []

    def total(*vectors: Tensor, designs: Iterable[Matrix] | None = None) -> Tensor:
        if source.traits.where != "memory" or source.device.type != "cpu":
            given: dict[str, Any] = dict(zip("uv", vectors, strict=False))
            return scale * source.reduce(partial(weighed_product, product=product, weigh=weigh, **at, **given))[0]
        if not kept:
            kept.extend(weights_of_blocks(source, weigh, at, seen))
        parts = zip(designs or source.map(lambda block: block.design), kept, strict=True)
        return scale * add_up([product(design, weights, *vectors)] for design, weights in parts)[0]

    return total


def weights_of_blocks(
    source: RowSource, weigh: Callable[..., Any], at: dict[str, Any], seen: list[tuple[Tensor, Tensor]] | None
) -> Iterator[Any]:
    """What `weigh` returns for each block."""
    if not seen:
        yield from source.map(partial(weigh, **at))
        return
    theta, tau2 = (torch.cat(parts) for parts in zip(*seen, strict=True))
    stop = 0
    for block in source.map(lambda block: block):
        start, stop = stop, stop + len(block.label)
        yield weigh(block, **at, latent=(theta[start:stop], tau2[start:stop]))


def weighed_product(
    block: Block,
    product: Callable[..., Tensor],
    weigh: Callable[..., Any],
    mean: Tensor,
    factor: Tensor | None,
    bound: Bound,
    **vectors: Tensor,
) -> list[Tensor]:
    """One block's part of `row_product`."""
    return [product(block.design, weigh(block, mean, factor, bound), **vectors)]


def row_sums(
    block: Block,
    mean: Tensor,
    factor: Tensor | None,
    moments: Formula,
    recipe: KernelRecipe | None,
    gram: Gram,
    single: bool,
    certify: bool,
    seen: list[tuple[Tensor, Tensor]] | None = None,
) -> list[Tensor]:
    """A block's value, magnitude, gradient and curvature: by a kernel if there is one, otherwise by the formulas.

    ϑ and τ² of its rows are appended to `seen`.
    """
    kernel = kernel_for(block, recipe, len(mean), full=gram == "full" or (factor is not None and factor.ndim == 2))
    keep: Any = {} if seen is None else {"seen": seen}
    if kernel is not None and (found := kernel(mean, factor, gram, single, **keep)) is not None:
        return found
    if is_long(block):
        again = partial(row_sums, mean=mean, factor=factor, moments=moments, gram=gram, single=single, seen=seen)
        return add_up(again(piece, recipe=recipe, certify=certify) for piece in block.pieces(BLOCK_ROWS))
    light = block.design.single() if single and (factor is not None or gram == "full") else block.design
    theta, tau2 = latent_moments(block, mean, factor, light)
    if seen is not None:
        seen.append((theta, tau2))
    eta, g, h = moments_of_rows(theta, tau2, recipe) or moments(theta, tau2)
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
    if gram == "diagonal" and (both := wide_gather(block.design, g, h)) is not None:
        return [value, magnitude, *both]
    curvature = {"full": light.gram, "diagonal": block.design.gram_diagonal, "none": no_curvature}[gram]
    return [value, magnitude, block.design.pull(g), curvature(h)]


def is_long(block: Block) -> bool:
    """Return whether the formulas would take too much memory for this block, or its labels are not numbers yet."""
    dense = isinstance(block.design, Dense) and block.label.device.type == "cpu"
    return dense and (len(block.label) > BLOCK_ROWS or block.label.dtype == torch.bool)


def no_curvature(vector: Tensor) -> Tensor:
    return vector.new_zeros(0)


def latent_moments(
    block: Block, mean: Tensor, factor: Tensor | None, light: Matrix | None = None
) -> tuple[Tensor, Tensor]:
    """ϑ and τ² of the rows of a block; τ² is computed from `light`, the same design in float32, if given."""
    both = None if factor is None or factor.ndim == 2 else wide_latent(block.design, mean, factor)
    if both is not None:
        theta, tau2 = both
    else:
        theta = block.design.project(mean)
        tau2 = torch.zeros_like(theta) if factor is None else (light or block.design).spread(factor)
    if block.offset is not None:
        theta = theta + block.offset
    if block.residual is not None:
        tau2 = tau2 + block.residual
    return theta, tau2


def curvature_product(design: Matrix, weights: Tensor, u: Tensor) -> Tensor:
    """Aᵀ diag(c h) A u."""
    return design.gram_product(weights, u)


def row_curvatures(
    block: Block, mean: Tensor, factor: Tensor | None, bound: Bound, latent: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """c h of each row."""
    at = latent or latent_moments(block, mean, factor)
    h = (moments_of_rows(*at, bound.kernel) or bound.moments(*at))[2]
    return h if block.weight is None else h * block.weight


def product_with_hessian(design: Matrix, weights: Triple, u: Tensor, v: Tensor) -> Tensor:
    """(Aᵀ s, A²ᵀ t), s = w₁ Au + w₂ A²v and t = w₂ Au + w₃ A²v, where A² has the squares of A's entries."""
    found = wide_bend(design, weights, u, v)
    if found is not None:
        return found
    first, second, third = weights
    a, b = design.project(u), design.spread_apart(v)
    return torch.stack([design.pull(first * a + second * b), design.gram_diagonal(second * a + third * b)])


def second_derivatives(
    block: Block, mean: Tensor, factor: Tensor | None, bound: Bound, latent: tuple[Tensor, Tensor] | None = None
) -> Triple:
    """w of each row: c ∂g/∂ϑ, ½ c ∂h/∂ϑ and ½ c ∂h/∂v."""
    at = latent or latent_moments(block, mean, factor)
    slope, by_mean, by_variance = partials_of_rows(*at, bound.kernel) or bound.partials(*at)
    half = 0.5 if block.weight is None else 0.5 * block.weight
    return 2.0 * half * slope, half * by_mean, half * by_variance


def row_spread(block: Block, factor: Tensor) -> list[Tensor]:
    """A block's Σ c diag(A F Fᵀ Aᵀ), `factor` as in `Matrix.spread`, and Σ c."""
    spread = block.design.spread(factor)
    weight = torch.ones_like(spread) if block.weight is None else block.weight
    return [torch.dot(weight, spread), weight.sum()]
