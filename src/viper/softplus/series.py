"""Theorem 1 of the paper: η = E[max(X,0)] + Σ_k w_k/k E[e^{-k|X|}].

With the truncated weights w_k = (-1)^{k-1} this is the paper's η_l; with accelerated weights, 20 terms reach the limit
to rounding. The error of η_l is a series of the same kind, which shows how many terms a given accuracy needs.
"""

from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from viper.softplus import normal
from viper.softplus.pointwise import Bound, Triple, blocked, over_terms, reflected, reflected_partials, sum_terms

TERM_COUNT = 20  # accelerated terms that reach the limit: relative error 1/T_20(3) = 1e-15
TERM_CHUNK = 64  # terms evaluated at once; longer sums are split, so memory does not grow with l


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


# --- the error of η_l ---


def truncation_error(mean: Tensor, variance: Tensor, terms: Tensor) -> Tensor:
    """η_l - η = Σ_{j>=0} (-1)^j a_{2l+j}, a_k = E[e^{-k|X|}]/k, for mean <= 0 and l given elementwise.

    This is itself an alternating sum of moments, so it is accelerated and never computed as a difference.
    """
    sd = positive_sd(variance)
    total = torch.zeros_like(mean)
    for j, w in enumerate(accelerated_weights(TERM_COUNT).tolist()):
        k = 2.0 * terms + j
        below, above = normal.exponential_tails(mean, sd, k)
        total = total + w * (below + above) / k
    return total


def smallest_terms(mean: Tensor, variance: Tensor, target: Tensor) -> Tensor:
    """Return the smallest l with η_l - η <= target, for mean <= 0, by bisection: the error decreases in l."""
    low = torch.zeros_like(mean)  # too few terms
    high = torch.ones_like(mean)  # enough terms, once the doubling ends
    while bool((short := truncation_error(mean, variance, high) > target).any()) and float(high.max()) < 2.0**52:
        low, high = torch.where(short, high, low), torch.where(short, 2 * high, high)
    while bool((high - low > 1).any()):
        middle = torch.floor((low + high) / 2)
        short = truncation_error(mean, variance, middle) > target
        wide = high - low > 1
        low, high = torch.where(short & wide, middle, low), torch.where(~short & wide, middle, high)
    return high.to(torch.int64)
