"""The shape of a bound, and how its formulas are evaluated.

A bound is a pair of elementwise functions of the mean ϑ and variance v = τ² of a Gaussian X:

    moments:   (ϑ, v) -> (η, g, h)          η ≈ E[log(1+e^X)],  g = ∂η/∂ϑ,  h = 2 ∂η/∂v
    partials:  (ϑ, v) -> (∂g/∂ϑ, ∂h/∂ϑ, ∂h/∂v)        (and ∂g/∂v = ½ ∂h/∂ϑ, because mixed derivatives commute)

Where η is an expectation E[F(X)] it solves the heat equation ∂η/∂v = ½ ∂²η/∂ϑ², so g = E[F'(X)], h = E[F''(X)] and
the partials are h, E[F'''(X)] and ½ E[F''''(X)]. The formulas are in series.py, quadrature.py, limit.py and
jaakkola_jordan.py; they check no input and do not use autograd. expectation.py does both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Triple = tuple[Tensor, Tensor, Tensor]
Formula = Callable[[Tensor, Tensor], Triple]
Pointwise = Callable[[Tensor, Tensor], Any]

EXACT_NODES = 1e-16  # a tolerance below rounding


class KernelRecipe(NamedTuple):
    """How a compiled kernel computes the moments: "quarter" (h = ¼), "softplus" (v = 0) or "heat" (any v)."""

    kind: str
    order: int = 0  # order of the heat expansion that CUDA kernels use
    reach: float = math.inf  # the largest variance at which they may use it
    nodes: float = EXACT_NODES  # the tolerance of the quadrature nodes that CPU kernels use instead


def no_partials(mean: Tensor, variance: Tensor) -> Triple:
    raise NotImplementedError("this formula is only for the passes of a solver and has no partial derivatives")


@dataclass(frozen=True)
class Bound:
    """An approximation of E[log(1+e^X)]: its moments, their partial derivatives, and a kernel for sums over rows."""

    moments: Formula
    partials: Formula = no_partials
    kernel: KernelRecipe | None = None  # None: the formula itself is evaluated


# --- evaluation in blocks: the intermediate results stay in the cache, and memory does not grow with the input ---

BLOCK = 1 << 18  # floats in use at once on a CPU core: 2 MB
BLOCK_CUDA = 1 << 27


def blocked(formula: Pointwise, width: int, native: bool = False) -> Pointwise:
    """Evaluate `formula`, which holds about `width` floats per point, block by block; compilers do their own tiling.

    A block is computed in float64 and rounded once to the input's dtype; a `native` formula works in that dtype.
    """

    def block_of(mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
        if native or mean.dtype == torch.float64:
            return formula(mean, variance)
        return tuple(part.to(mean.dtype) for part in formula(mean.double(), variance.double()))

    def evaluate(mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
        size = max(1, (BLOCK_CUDA if mean.is_cuda else BLOCK) // width)
        if torch.compiler.is_compiling() or mean.numel() <= size:
            return block_of(mean, variance)
        flat_mean, flat_variance = mean.reshape(-1), variance.reshape(-1)
        first = block_of(flat_mean[:size], flat_variance[:size])
        out = [part.new_empty(flat_mean.shape) for part in first]
        for start in range(0, flat_mean.numel(), size):
            block = slice(start, start + size)
            parts = block_of(flat_mean[block], flat_variance[block]) if start else first
            for total, part in zip(out, parts, strict=True):
                total[block] = part
        return tuple(total.reshape(mean.shape) for total in out)

    return evaluate


# --- one formula for each range of variances ---


def piecewise(regimes: tuple[tuple[float, Formula], ...], native: bool = False) -> Formula:
    """Use each formula up to its largest variance, which is ∞ for the last.

    Eager mode evaluates a formula only on the points that need it. Compiled code cannot inspect values, so there
    every formula runs, on variances moved into its range, and the right result is selected.
    """
    lows = (-1.0, *(high for high, _ in regimes[:-1]))
    ranges = [(low, high, branch) for low, (high, branch) in zip(lows, regimes, strict=True)]

    def formula(mean: Tensor, variance: Tensor) -> Triple:
        if torch.compiler.is_compiling():
            return select(mean, variance)
        smallest, largest = map(float, variance.aminmax()) if variance.numel() else (0.0, 0.0)
        for low, high, branch in ranges:
            if low < smallest and largest <= high:
                return branch(mean, variance)
        flat_mean, flat_variance = mean.reshape(-1), variance.reshape(-1)
        out = [torch.empty_like(flat_mean) for _ in range(3)]
        for low, high, branch in ranges:
            here = true_indices((flat_variance > low) & (flat_variance <= high))
            if here.numel():
                parts = branch(flat_mean.index_select(0, here), flat_variance.index_select(0, here))
                for total, part in zip(out, parts, strict=True):
                    total.index_copy_(0, here, part)
        value, slope, curvature = (total.reshape(mean.shape) for total in out)
        return value, slope, curvature

    def select(mean: Tensor, variance: Tensor) -> Triple:
        out = regimes[0][1](mean, variance.clamp(max=regimes[0][0]))
        for low, high, branch in ranges[1:]:
            value, slope, curvature = branch(mean, variance.clamp(low, high))
            keep = variance > low
            out = (
                torch.where(keep, value, out[0]),
                torch.where(keep, slope, out[1]),
                torch.where(keep, curvature, out[2]),
            )
        return out

    return blocked(formula, 2, native)


def true_indices(mask: Tensor) -> Tensor:
    """Return the indices where a flat mask is true; on a CPU by NumPy, which is nine times faster here."""
    return mask.nonzero().squeeze(1) if mask.is_cuda else torch.from_numpy(np.flatnonzero(mask.numpy()))


# --- reflection: log(1+e^x) = x + log(1+e^-x), so ϑ <= 0 suffices ---


def reflected(formula: Formula) -> Formula:
    """Extend moments known for ϑ <= 0: η(ϑ) = ϑ + η(-ϑ), g(ϑ) = 1 - g(-ϑ), h(ϑ) = h(-ϑ)."""

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        value, slope, curvature = formula(-mean.abs(), variance)
        positive = (mean > 0).to(slope)  # lerp selects by it, three times as fast as torch.where on random signs
        return value + mean.clamp(min=0.0), torch.lerp(slope, 1.0 - slope, positive), curvature

    return moments


def reflected_partials(formula: Formula) -> Formula:
    """Extend partials known for ϑ <= 0: ∂g/∂ϑ and ∂h/∂v are even in ϑ, ∂h/∂ϑ is odd."""

    def partials(mean: Tensor, variance: Tensor) -> Triple:
        even, odd, even_too = formula(-mean.abs(), variance)
        return even, torch.where(mean > 0, -odd, odd), even_too

    return partials


def over_terms(values: Tensor, like: Tensor) -> Tensor:
    """A vector indexed by term, shaped to broadcast against points: (K,) -> (K, 1, ..., 1)."""
    return values.to(like).reshape(-1, *[1] * like.ndim)


def sum_terms(weights: Tensor, terms: Tensor) -> Tensor:
    """Σ_k w_k t_k over the leading axis."""
    return torch.mv(terms.reshape(len(terms), -1).T, weights.to(terms)).reshape(terms.shape[1:])


def polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Σ_i c_i x^i = c_0 (1 + c_1/c_0 x (1 + c_2/c_1 x (...))), one pass over x for each degree; no c_i may be 0."""
    one = x.new_ones(())
    total = one
    for low, high in zip(coefficients[-2::-1], coefficients[:0:-1], strict=True):
        total = torch.addcmul(one, x, total, value=high / low)
    return total if coefficients[0] == 1.0 else coefficients[0] * total
