"""The expected softplus and its derivatives, one formula per bound.

Each bound is a pair of elementwise functions of the mean ϑ and variance v = τ² of a Gaussian X:

    moments:   (ϑ, v) -> (η, g, h)          η ≈ E[log(1+e^X)],  g = ∂η/∂ϑ,  h = 2 ∂η/∂v
    partials:  (ϑ, v) -> (∂g/∂ϑ, ∂h/∂ϑ, ∂h/∂v)        (and ∂g/∂v = ½ ∂h/∂ϑ, because mixed derivatives commute)

Where η is an expectation E[F(X)] it solves the heat equation ∂η/∂v = ½ ∂²η/∂ϑ², so g = E[F'(X)], h = E[F''(X)] and
the partials are h, E[F'''(X)] and ½ E[F''''(X)]. Nothing here checks its input or knows about autograd; softplus.py
does both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper import normal
from viper.mixture import MIXTURES, Mixture

Triple = tuple[Tensor, Tensor, Tensor]
Formula = Callable[[Tensor, Tensor], Triple]
Pointwise = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Bound:
    """An approximation of E[log(1+e^X)]: its moments and their partial derivatives."""

    moments: Formula
    partials: Formula


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation in blocks: what a formula holds per point stays in the cache, and memory does not grow with the input

BLOCK = 1 << 18  # floats in flight on a CPU core: 2 MB
BLOCK_CUDA = 1 << 27


def blocked(formula: Pointwise, width: int, native: bool = False) -> Pointwise:
    """Evaluate `formula`, which holds about `width` floats per point, block by block; compilers tile by themselves.

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


# ---------------------------------------------------------------------------------------------------------------------
# Reflection: log(1+e^x) = x + log(1+e^-x), so ϑ <= 0 suffices


def reflected(formula: Formula) -> Formula:
    """Extend moments known for ϑ <= 0: η(ϑ) = ϑ + η(-ϑ), g(ϑ) = 1 - g(-ϑ), h(ϑ) = h(-ϑ)."""

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        value, slope, curvature = formula(-mean.abs(), variance)
        positive = (mean > 0).to(slope)  # lerp selects by it, three times faster than where on random signs
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
    return torch.tensordot(weights.to(terms), terms, dims=1)


# ---------------------------------------------------------------------------------------------------------------------
# Theorem 1: η = E[max(X,0)] + Σ_k w_k/k E[e^{-k|X|}], truncated or accelerated

TERM_CHUNK = 64  # terms evaluated at once; longer sums are taken in pieces, so memory does not grow with l


def truncated_weights(terms: int) -> Tensor:
    """w_k = (-1)^{k-1} for k = 1 ... 2l-1: the paper's η_l."""
    return 1.0 - 2.0 * (torch.arange(2 * terms - 1, dtype=torch.float64) % 2)


@cache
def accelerated_weights(count: int) -> Tensor:
    """Cohen, Rodriguez Villegas & Zagier's (2000, Algorithm 1) weights for an alternating sum of moments.

    If a_k = ∫ x^{k-1} dμ(x) for a positive measure μ on [0,1], then |Σ_{k>=1} (-1)^{k-1} a_k - Σ_{k<=n} w_k a_k|
    <= Σ_{k>=1} (-1)^{k-1} a_k / T_n(3), T_n Chebyshev's polynomial: each term gains a factor 3+√8. E[e^{-k|X|}]/k is
    such a sequence (docs/certificate.md). Computed in exact integers, rounded once.
    """
    norm = chebyshev_at_3(count)
    weights, b, c = [], -1, -norm
    for k in range(count):
        c = b - c
        weights.append(float(Fraction(c, norm)))
        b = b * (k + count) * (k - count) * 2 // ((2 * k + 1) * (k + 1))
    return torch.tensor(weights, dtype=torch.float64)


def chebyshev_at_3(n: int) -> int:
    """T_n(3) = ((3+√8)^n + (3-√8)^n)/2, an integer."""
    previous, current = 1, 3
    for _ in range(n - 1):
        previous, current = current, 6 * current - previous
    return current


def series(weights: Tensor) -> Bound:
    """Theorem 1's series with signed weights w_1 ... w_K; exact at v = 0 too, where it sums e^{-k|ϑ|}."""
    chunks = list(torch.arange(1, len(weights) + 1, dtype=torch.float64).split(TERM_CHUNK))
    parts = list(zip(chunks, weights.split(TERM_CHUNK), strict=True))
    excess = float(1.0 - 2.0 * weights.sum())  # weight of φ₀: -1 when truncated, about 1e-15 when accelerated
    squares = float((weights * torch.cat(chunks) ** 2).sum())

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        sd, density = positive_sd(variance), density_at_zero(mean, variance)
        value = normal.expected_relu(mean, sd)
        slope, curvature = normal.cdf(mean / sd), excess * density if excess else torch.zeros_like(density)
        for k, w in parts:
            below, above = normal.exponential_tails(mean, sd, over_terms(k, mean))
            both = below + above
            value = value + sum_terms(w / k, both)
            slope = slope + sum_terms(w, below - above)
            curvature = curvature + sum_terms(w * k, both)
        return value, slope, curvature

    def partials(mean: Tensor, variance: Tensor) -> Triple:
        sd, density = positive_sd(variance), density_at_zero(mean, variance)
        z2 = (mean / sd) ** 2
        slope_mean = excess * density
        # φ₀' = -ϑ/v φ₀ and φ₀'' = (z²-1)/v φ₀
        curvature_mean = -excess * mean / sd**2 * density
        fourth = excess * (z2 - 1.0) / sd**2 * density - 2.0 * squares * density
        for k, w in parts:
            below, above = normal.exponential_tails(mean, sd, over_terms(k, mean))
            slope_mean = slope_mean + sum_terms(w * k, below + above)
            curvature_mean = curvature_mean + sum_terms(w * k**2, below - above)
            fourth = fourth + sum_terms(w * k**3, below + above)
        return slope_mean, curvature_mean, 0.5 * fourth

    width = 6 * min(len(weights), TERM_CHUNK)
    return Bound(blocked(reflected(moments), width), blocked(reflected_partials(partials), width))


def positive_sd(variance: Tensor) -> Tensor:
    """τ = √v, with 0 moved to a number whose square underflows, so that ϑ/τ has its limit: 0 or -∞."""
    return variance.sqrt().clamp(min=1e-200)


def density_at_zero(mean: Tensor, variance: Tensor) -> Tensor:
    """φ₀, the density of N(ϑ, v) at 0; its limit at v = 0 is 0, or +∞ where ϑ = 0."""
    sd = positive_sd(variance)
    density = normal.pdf(mean / sd) / sd
    return torch.where((variance == 0) & (mean == 0), torch.inf, density)


# ---------------------------------------------------------------------------------------------------------------------
# Symmetric nodes: Gauss-Hermite quadrature and antithetic Monte Carlo are the same formula


def sigmoid_difference(low: Tensor, high: Tensor, gap: Tensor) -> Tensor:
    """s(high) - s(low) = s(high) s(-low) (1 - e^{-gap}) with gap = high - low, without cancellation."""
    return torch.sigmoid(high) * torch.sigmoid(-low) * -torch.expm1(-gap)


def softplus(x: Tensor) -> Tensor:
    """log(1+e^x) to full relative accuracy on both sides."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


def nodes(z: Tensor, weights: Tensor) -> Bound:
    """η = Σ_j w_j [f(ϑ+τz_j) + f(ϑ-τz_j)], f the softplus, z_j >= 0, Σ_j w_j = ½; derivatives of this very sum."""

    def points(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sd = positive_sd(variance)
        step = over_terms(z, mean) * sd
        return mean - step, mean + step, step, sd

    def difference_rate(low: Tensor, high: Tensor, step: Tensor, sd: Tensor) -> Tensor:
        """z_j (s(ϑ+τz_j) - s(ϑ-τz_j)) / τ, which tends to 2 z_j² s'(ϑ)."""
        per_step = -torch.expm1(-2.0 * step) / step.clamp(min=1e-300)
        return (step / sd) ** 2 * torch.sigmoid(high) * torch.sigmoid(-low) * per_step

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        low, high, step, sd = points(mean, variance)
        value = sum_terms(weights, softplus(low) + softplus(high))
        slope = sum_terms(weights, torch.sigmoid(low) + torch.sigmoid(high))
        return value, slope, sum_terms(weights, difference_rate(low, high, step, sd))

    def partials(mean: Tensor, variance: Tensor) -> Triple:
        low, high, step, sd = points(mean, variance)
        s_low, s_high = torch.sigmoid(low), torch.sigmoid(high)
        d_low, d_high = s_low * (1 - s_low), s_high * (1 - s_high)
        rate = difference_rate(low, high, step, sd)
        # ∂/∂v of z (s(ϑ+τz) - s(ϑ-τz))/τ; its limit z⁴ s'''(ϑ)/3 below τz = 1e-3, where the difference cancels
        z2 = (step / sd) ** 2
        far = (z2 * (d_low + d_high) - rate) / (2.0 * sd**2).clamp(min=1e-30)
        near = z2 * z2 * d_low * (1.0 - 6.0 * d_low) / 3.0
        return (
            sum_terms(weights, d_low + d_high),
            sum_terms(weights, rate * (1.0 - s_low - s_high)),
            sum_terms(weights, torch.where(step < 1e-3, near, far)),
        )

    return Bound(blocked(moments, 8 * len(z)), blocked(partials, 8 * len(z)))


MOST_NODES = 256  # beyond 300, the recurrence behind the weights overflows


def gauss_hermite(count: int) -> Bound:
    """Gauss-Hermite quadrature with `count` nodes for the standard normal weight."""
    z, w = full_gauss_hermite(count)
    half = count // 2
    if count % 2:  # the middle node is 0, a pair with itself
        w[half] *= 0.5
        z[half] = 0.0
    return nodes(z[half:], w[half:])


def full_gauss_hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights, summing to one, for the standard normal."""
    z, w = np.polynomial.hermite_e.hermegauss(count)
    return torch.from_numpy(z), torch.from_numpy(w / w.sum())


def monte_carlo(samples: int, seed: int) -> Bound:
    """The mean over `samples` common random numbers, in antithetic pairs ±z scaled to unit variance.

    Pairing makes the estimate an even function of τ, so its derivative in v exists down to v = 0.
    """
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(samples // 2, dtype=torch.float64, generator=generator).abs()
    z = z / z.square().mean().sqrt()
    return nodes(z, torch.full_like(z, 1.0 / samples))


# ---------------------------------------------------------------------------------------------------------------------
# Heat expansion: E[f(X)] = Σ_m (v/2)^m/m! f^{(2m)}(ϑ), for small variance

# f^{(2j)} = q E_j(q) and f^{(2j+1)} = q (1-2s) O_j(q) with q = s(1-s); rows are E_1 ... E_5 and O_1 ... O_4, by powers
# of q; they follow from q' = q (1-2s)
EVEN = (
    (1.0,),
    (1.0, -6.0),
    (1.0, -30.0, 120.0),
    (1.0, -126.0, 1680.0, -5040.0),
    (1.0, -510.0, 17640.0, -151200.0, 362880.0),
)
ODD = ((1.0,), (1.0, -12.0), (1.0, -60.0, 360.0), (1.0, -252.0, 5040.0, -20160.0))
# Stopped after order m = 1 ... 4, the first omitted term of h is v^{m+1}/(2^{m+1} (m+1)!) f^{(2m+4)}, and sup|f^{(2m+4)}|
# is |s^{(2m+3)}(0)| = 1/4, 17/16, 31/4, 691/8; those of η and g are less
HEAT_ERRORS = (1 / 4 / 8, 17 / 16 / 48, 31 / 4 / 384, 691 / 8 / 3840)
HEAT_ERROR = HEAT_ERRORS[-1]


def polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Σ_i c_i x^i = c_0 (1 + c_1/c_0 x (1 + c_2/c_1 x (...))), one pass over x for each degree; no c_i may be 0."""
    one = x.new_ones(())
    total = one
    for low, high in zip(coefficients[-2::-1], coefficients[:0:-1], strict=True):
        total = torch.addcmul(one, x, total, value=high / low)
    return total if coefficients[0] == 1.0 else coefficients[0] * total


def heat_sum(parts: list[Tensor], variance: Tensor, start: int = 0) -> Tensor:
    """Σ_m (v/2)^m start!/(m+start)! R_m, nested in v."""
    total = parts[-1]
    for m in range(len(parts) - 1, 0, -1):
        total = torch.addcmul(parts[m - 1], total, variance, value=0.5 / (m + start))
    return total


def heat_moments(mean: Tensor, variance: Tensor, order: int) -> Triple:
    """η, g, h to relative accuracy about HEAT_ERRORS v^{order+1}, for ϑ <= 0: one sigmoid and one logarithm."""
    s = torch.sigmoid(mean)
    q = torch.addcmul(s, s, s, value=-1.0)
    even, odd = [polynomial(row, q) for row in EVEN[: order + 1]], [polynomial(row, q) for row in ODD[:order]]
    first = (q * variance).mul_(0.5)
    value = torch.addcmul(-torch.log1p(-s), first, heat_sum(even[:order], variance, 1))
    slope = torch.addcmul(s, first, heat_sum(odd, variance, 1) * (1.0 - 2.0 * s))
    return value, slope, heat_sum(even, variance).mul_(q)


def heat(tolerance: float) -> Formula:
    """The expansion to the lowest order whose error in a block is at most `tolerance`."""
    reach = [(tolerance / error) ** (1.0 / (m + 2)) for m, error in enumerate(HEAT_ERRORS)]

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        largest = math.inf if torch.compiler.is_compiling() or not variance.numel() else float(variance.max())
        return heat_moments(mean, variance, 1 + sum(largest > v for v in reach[:-1]))

    return blocked(reflected(moments), 12, native=True)


# ---------------------------------------------------------------------------------------------------------------------
# The limit l -> ∞: expand, integrate or sum, whichever is exact there

HEAT_TOLERANCE = 2.2e-15  # of h, so that its relative error at ϑ = 0, where h = ¼, is below 1e-14
HEAT_EXACT = 2.5e-3  # v: HEAT_ERROR v^5 = HEAT_TOLERANCE
NODES_EXACT = 0.16  # v: 16-point Gauss-Hermite is exact to rounding (docs/certificate.md: error below 1e-15)
NODE_COUNT = 16
TERM_COUNT = 20  # accelerated terms: relative error 1/T_20(3) = 1e-15

Regimes = tuple[tuple[float, Formula], ...]


def piecewise(regimes: Regimes, native: bool = False) -> Formula:
    """Use each formula up to its largest variance, the last one (limit ∞) beyond.

    Eager mode evaluates a formula only on the points that need it. A compiler or a transform cannot look at values, so
    there every formula runs, on variances moved into its range, and the right one is selected.
    """

    def formula(mean: Tensor, variance: Tensor) -> Triple:
        if torch.compiler.is_compiling():
            return select(mean, variance)
        smallest, largest = variance.aminmax() if variance.numel() else (variance.sum(), variance.sum())
        flat_mean, flat_variance = mean.reshape(-1), variance.reshape(-1)
        out = [torch.empty_like(flat_mean) for _ in range(3)]
        low = -1.0
        for high, branch in regimes:
            if low < smallest and largest <= high:
                return branch(mean, variance)
            here = true_indices((flat_variance > low) & (flat_variance <= high))
            if here.numel():
                parts = branch(flat_mean.index_select(0, here), flat_variance.index_select(0, here))
                for total, part in zip(out, parts, strict=True):
                    total.index_copy_(0, here, part)
            low = high
        value, slope, curvature = (total.reshape(mean.shape) for total in out)
        return value, slope, curvature

    def select(mean: Tensor, variance: Tensor) -> Triple:
        out, low = regimes[0][1](mean, variance.clamp(max=regimes[0][0])), regimes[0][0]
        for high, branch in regimes[1:]:
            value, slope, curvature = branch(mean, variance.clamp(low, high))
            keep = variance > low
            out = (
                torch.where(keep, value, out[0]),
                torch.where(keep, slope, out[1]),
                torch.where(keep, curvature, out[2]),
            )
            low = high
        return out

    return blocked(formula, 2, native)


def true_indices(mask: Tensor) -> Tensor:
    """Where a flat mask is true; on a CPU by NumPy, which is nine times faster here."""
    return mask.nonzero().squeeze(1) if mask.is_cuda else torch.from_numpy(np.flatnonzero(mask.numpy()))


@cache
def limit() -> Bound:
    """E[log(1+e^X)] itself (Corollary 1), to rounding."""
    quadrature, tail = smooth_nodes(NODE_COUNT), series(accelerated_weights(TERM_COUNT))
    regimes = ((HEAT_EXACT, heat(HEAT_TOLERANCE)), (NODES_EXACT, quadrature.moments), (math.inf, tail.moments))
    return Bound(piecewise(regimes), piecewise(((NODES_EXACT, quadrature.partials), (math.inf, tail.partials))))


def smooth_nodes(count: int) -> Bound:
    """E[f(X)], E[f'(X)], E[f''(X)], ... each by Gauss-Hermite quadrature: the limit's derivatives, not the sum's."""
    z, w = full_gauss_hermite(count)

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        s = torch.addcmul(mean, over_terms(z, mean), variance.sqrt()).sigmoid_()
        curvature = sum_terms(w, torch.addcmul(s, s, s, value=-1.0))
        slope = sum_terms(w, s)
        # f = -log(1-s); with ϑ <= 0 and z_j τ < 3, s stays away from 1
        return -sum_terms(w, s.neg_().log1p_()), slope, curvature

    def partials(mean: Tensor, variance: Tensor) -> Triple:
        s = torch.sigmoid(mean + over_terms(z, mean) * variance.sqrt())
        q = s * (1.0 - s)
        return sum_terms(w, q), sum_terms(w, q * (1.0 - 2.0 * s)), 0.5 * sum_terms(w, q * (1.0 - 6.0 * q))

    return Bound(blocked(reflected(moments), 2 * count), blocked(partials, 4 * count))


# ---------------------------------------------------------------------------------------------------------------------
# The probability s(X): mean and standard deviation


def probability(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """E[s(X)] and the standard deviation of s(X), to rounding."""
    branches = (
        (NODES_EXACT, blocked(probability_by_nodes, 4 * NODE_COUNT)),
        (math.inf, blocked(probability_by_series, 6 * TERM_COUNT)),
    )
    average, std, _ = piecewise(branches)(-mean.abs(), variance)
    return torch.where(mean > 0, 1.0 - average, average), std


def probability_by_nodes(mean: Tensor, variance: Tensor) -> Triple:
    """Mean, standard deviation of s(X) by Gauss-Hermite, from the deviations s(x_j) - s(ϑ), which do not cancel."""
    z, w = full_gauss_hermite(NODE_COUNT)
    step = over_terms(z, mean) * variance.sqrt()
    deviation = sigmoid_difference(mean, mean + step, step)
    shift = sum_terms(w, deviation)
    return torch.sigmoid(mean) + shift, (sum_terms(w, deviation**2) - shift**2).clamp(min=0.0).sqrt(), shift


def probability_by_series(mean: Tensor, variance: Tensor) -> Triple:
    """Mean, standard deviation of s(X) from E[s], E[s²] = E[s - s'], whose leading terms cancel term by term."""
    sd, w = positive_sd(variance), accelerated_weights(TERM_COUNT)
    k = torch.arange(1, TERM_COUNT + 1, dtype=torch.float64)
    below, above = normal.exponential_tails(mean, sd, over_terms(k, mean))
    positive = normal.cdf(mean / sd)
    average = positive + sum_terms(w, below - above)
    square = positive + sum_terms(w * (1 - k), below) - sum_terms(w * (1 + k), above)
    return average, (square - average**2).clamp(min=0.0).sqrt(), square


# ---------------------------------------------------------------------------------------------------------------------
# The fast path: the logistic as a scale mixture of normals


COARSEST = 1e-4  # the expansion is used at least this accurately: beyond, it would not keep h > 0


@cache
def fast(tolerance: float) -> Bound | None:
    """Absolute error at most `tolerance` in all three moments, or None if no table reaches it."""
    tables = [table for table in MIXTURES if table.error <= tolerance]
    if not tables:
        return None
    mixed = mixture(min(tables, key=lambda table: len(table.weights)))
    tolerance = min(tolerance, COARSEST)
    small = (tolerance / HEAT_ERROR) ** 0.2
    return Bound(piecewise(((small, heat(tolerance)), (math.inf, mixed.moments)), native=True), mixed.partials)


def mixture(table: Mixture) -> Bound:
    """s(x) ≈ Σ_j p_j Φ(x/σ_j): with d_j = √(v + σ_j²) and z_j = ϑ/d_j, g = Σ p_j Φ(z_j), h = Σ p_j φ(z_j)/d_j."""
    weights, variances = (
        torch.tensor(table.weights, dtype=torch.float64),
        torch.tensor(table.variances, dtype=torch.float64),
    )
    log_weights = torch.tensor([math.log(p / normal.SQRT_2PI) for p in table.weights], dtype=torch.float64)

    def scales(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        rate = torch.rsqrt(over_terms(variances, variance) + variance)
        return rate, mean * rate

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        # r_j = 1/(√2 d_j) and x_j = z_j/√2, so that Φ(z_j) = ½ + ½ erf(x_j) and p_j φ(z_j) = e^{b_j - x_j²}
        rate = over_terms(2.0 * variances, variance).add(variance, alpha=2.0).rsqrt_()
        x = mean * rate
        density = torch.addcmul(over_terms(log_weights, mean), x, x, value=-1.0).exp_()
        slope = sum_terms(0.5 * weights, x.erf_()).add_(0.5).clamp_(0.0, 1.0)
        spread = (density / rate).sum(0).mul_(math.sqrt(0.5))
        value = torch.addcmul(spread, mean, slope).clamp_(min=0.0)
        return value, slope, density.mul_(rate).sum(0).mul_(math.sqrt(2.0))

    def partials(mean: Tensor, variance: Tensor) -> Triple:
        rate, z = scales(mean, variance)
        density = normal.pdf(z) * rate
        third = -sum_terms(weights, density * rate * z)
        return sum_terms(weights, density), third, 0.5 * sum_terms(weights, density * rate**2 * (z * z - 1.0))

    width = 4 * len(table.weights)
    return Bound(blocked(moments, width, native=True), blocked(partials, width, native=True))


# ---------------------------------------------------------------------------------------------------------------------
# Jaakkola-Jordan / Pólya-Gamma


def jaakkola_jordan() -> Bound:
    """E[log(1+e^X)] <= ϑ/2 + log(2 cosh(t/2)) at its best t = √(ϑ²+v); a(t) = tanh(t/2)/(2t) is the curvature."""

    def radius(mean: Tensor, variance: Tensor) -> Tensor:
        return torch.hypot(mean, variance.sqrt()).clamp(min=1e-150)

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        t = radius(mean, variance)
        a = torch.tanh(0.5 * t) / (2.0 * t)
        # ½(ϑ+t) without cancellation for ϑ < 0: (ϑ+t)(t-ϑ) = v
        half_sum = 0.5 * torch.where(mean < 0, variance / (t - mean), mean + t)
        return half_sum + torch.log1p(torch.exp(-t)), 0.5 + a * mean, a

    def partials(mean: Tensor, variance: Tensor) -> Triple:
        t = radius(mean, variance)
        a = torch.tanh(0.5 * t) / (2.0 * t)
        # b = a'(t)/t = (1/(4 cosh²(t/2)) - a)/t², by its Taylor series below t = 0.1
        t2 = t * t
        far = (0.25 * (1.0 - torch.tanh(0.5 * t) ** 2) - a) / t2
        near = polynomial(JJ_SERIES, t2)
        b = torch.where(t < 0.1, near, far)
        return a + b * mean * mean, b * mean, 0.5 * b

    return Bound(blocked(moments, 8), blocked(partials, 8))


# tanh(t/2)/(2t) = Σ_n T_n t^{2n}: T = 1/4, -1/48, 1/480, -17/80640, 31/1451520, ...; b = Σ 2n T_n t^{2n-2}
JJ_SERIES = (-1 / 24, 1 / 120, -17 / 13440, 31 / 181440, -691 / 31933440)
