"""E[f(ϑ+τZ)] as a weighted sum over nodes z_j of the standard normal, where f is the softplus.

Gauss-Hermite quadrature and antithetic Monte Carlo are the same formula with different nodes, `node_sum`.
`smooth_nodes` is the quadrature inside the limit. `node_sets` lists the nodes of the compiled pass, as few as the
variance and tolerance allow.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.softplus.pointwise import Bound, Triple, blocked, over_terms, reflected, sum_terms
from viper.softplus.series import positive_sd

MOST_NODES = 256  # beyond 300, the recurrence behind the weights overflows


def sigmoid_difference(low: Tensor, high: Tensor, gap: Tensor) -> Tensor:
    """s(high) - s(low) = s(high) s(-low) (1 - e^{-gap}) with gap = high - low, without cancellation."""
    return torch.sigmoid(high) * torch.sigmoid(-low) * -torch.expm1(-gap)


def softplus(x: Tensor) -> Tensor:
    """log(1+e^x) to full relative accuracy on both sides."""
    return x.clamp(min=0.0) + torch.log1p(torch.exp(-x.abs()))


# --- sums over nodes ---


def node_sum(z: Tensor, weights: Tensor) -> Bound:
    """η = Σ_j w_j [f(ϑ+τz_j) + f(ϑ-τz_j)], f the softplus, z_j >= 0, Σ_j w_j = ½, with the derivatives of this sum."""

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


def gauss_hermite(count: int) -> Bound:
    """Gauss-Hermite quadrature with `count` nodes for the standard normal weight."""
    return node_sum(*half_gauss_hermite(count))


def half_gauss_hermite(count: int) -> tuple[Tensor, Tensor]:
    """Return the nodes z_j >= 0 with weights that sum to one half."""
    z, w = full_gauss_hermite(count)
    half = count // 2
    if count % 2:  # the middle node is 0 and pairs with itself
        w[half] *= 0.5
        z[half] = 0.0
    return z[half:], w[half:]


def full_gauss_hermite(count: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights, summing to one, for the standard normal."""
    z, w = np.polynomial.hermite_e.hermegauss(count)
    return torch.from_numpy(z), torch.from_numpy(w / w.sum())


def monte_carlo(samples: int, seed: int) -> Bound:
    """Average over `samples` common random numbers, in antithetic pairs ±z scaled to unit variance.

    Pairing makes the estimate an even function of τ, so its derivative in v exists down to v = 0.
    """
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(samples // 2, dtype=torch.float64, generator=generator).abs()
    z = z / z.square().mean().sqrt()
    return node_sum(z, torch.full_like(z, 1.0 / samples))


def smooth_nodes(count: int) -> Bound:
    """E[f(X)], E[f'(X)], E[f''(X)], ..., each by Gauss-Hermite: derivatives of the limit, not of the sum."""
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


# --- the nodes of the compiled pass ---

MOST_GAUSS = 24
LARGEST_SD, SD_RATIO = 8.0, 1.12  # the sets of nodes cover τ up to this, each this many times further than the last
NEAR_POLE = 3.0  # imaginary part, below π, of the line to which the integral of the trapezoidal rule is moved
NEAR_POLE_SIZE = 200.0  # at least twice the largest |f|, |f'| and |f''| there, each over 1 + |ϑ| + τ


class Nodes(NamedTuple):
    """z_j >= 0 with weights that sum to one half, accurate for variances up to `reach`."""

    reach: float
    z: Tensor
    weights: Tensor


@cache
def node_sets(tolerance: float) -> list[Nodes]:
    """Return node sets, by increasing range, with errors of at most `tolerance` (times 1 + |ϑ| + τ for η)."""
    sets = [Nodes(gauss_reach(n, tolerance), *half_gauss_hermite(n)) for n in range(2, MOST_GAUSS + 1)]
    sd = LARGEST_SD
    while sd * sd > sets[0].reach:
        sets.append(equally_spaced(sd, tolerance))
        sd /= SD_RATIO
    kept: list[Nodes] = []
    for nodes in sorted(sets, key=lambda nodes: nodes.reach, reverse=True):
        if not kept or len(nodes.z) < len(kept[-1].z):
            kept.append(nodes)
    return [Nodes(0.0, *half_gauss_hermite(1)), *reversed(kept)]


def gauss_reach(count: int, tolerance: float) -> float:
    """v at which n!/(2n)! v^n max|f^{(2n+2)}|, Gauss's remainder for h and the largest of the three, is `tolerance`."""
    constant = 0.25 * math.factorial(count) * (2 * count + 1)  # with λ <= π²/8
    return math.pi**2 * (tolerance / constant) ** (1.0 / count)


def equally_spaced(sd: float, tolerance: float) -> Nodes:
    """The trapezoidal rule: error exp(a²/2 - 2πa/step) for any line at height a below the poles, at NEAR_POLE / τ."""
    need = math.log(NEAR_POLE_SIZE / tolerance)
    a = min(NEAR_POLE / sd, math.sqrt(2.0 * need))  # the best height, or the nearest that the poles allow
    step = 2.0 * math.pi * a / (need + 0.5 * a**2)
    count = math.ceil(math.sqrt(-2.0 * math.log(tolerance)) / step)
    z = step * np.arange(count + 1)
    weights = np.exp(-0.5 * z**2)
    weights[0] *= 0.5
    return Nodes(sd**2, torch.from_numpy(z), torch.from_numpy(0.5 * weights / weights.sum()))
