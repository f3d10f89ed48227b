"""Q(u; τ) = 1 - E exp(-e^{τZ - u}), Z ~ N(0, 1): the Gumbel distribution's tail, smoothed by a Gaussian of sd τ.

On a grid of step h, a Gaussian of mean δ turns tables into Q by a weighted sum over nodes l g near δ,

    Q(i h - δ; τ) ≈ Σ_l w_l Q(i h - l g; b),

without one exponential per point. Small τ interpolate (w_l is the mean of a Lagrange polynomial), larger ones use the
trapezoidal rule (w_l is proportional to a normal density of variance τ² - b²), and beyond WIDEST Gauss's rule for the
Gumbel weight sums normal distribution functions. Derivatives in u have tables of their own. docs/math/logsumexp.md
bounds each error.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.softplus.normal import SQRT_2, pdf
from viper.softplus.quadrature import full_gauss_hermite

STENCIL = 8  # nodes of interpolation that share a polynomial
LARGEST_DERIVATIVE = 1154.0  # bound on the 8th and 9th derivatives of Q(u; 0), relative to Q
LEAST_LOSS = 1.07  # nodes may be closer than necessary by this factor, so that tables need few different u
FINEST_PARTS = 128  # distances of nodes are multiples of 1/128 of a step, or coarser
WIDEST = 6.0  # τ, beyond which the 14 nodes below err by less than 1e-15
WIDE_NODES = 14
NARROWEST_BASE = 0.5  # below this b, the table's own quadrature would need a finer step
STRIP_LINES = np.linspace(0.01, 0.5 * math.pi - 0.01, 100)  # Im u; up to π/2, |exp(-e^{-u})| <= 1


class Precision(NamedTuple):
    """What the tables need for one tolerance."""

    tolerance: float

    @property
    def relative(self) -> float:
        """The largest relative error of Q on the grid."""
        return self.tolerance / 20.0

    def reach(self, sd: float) -> float:
        """z, the number of sds that carry a Gaussian: 1,000 classes of this sd lose a fifth of the tolerance."""
        return math.sqrt(2.0 * math.log(4e3 * max(1.0, sd) / self.tolerance))

    @property
    def start(self) -> float:
        """The u below which 1 - Q is negligible at τ = 0: a tenth of the tolerance."""
        return -math.log(math.log(10.0 / self.tolerance))

    @property
    def ends(self) -> tuple[float, float]:
        """The u below which tables take Q for 1, and above which they take it for 0, at τ = 0."""
        return -math.log(math.log(1e6 / self.tolerance)), math.log(1e5 / self.tolerance)


def gumbel_derivatives(u: Tensor) -> Tensor:
    """Q(u; 0) = 1 - e^{-x} and four derivatives of e^{-x} in u, where x = e^{-u}."""
    x = torch.exp(-u.clamp(min=-700.0))
    e = torch.exp(-x)
    x = x.clamp(max=1e60)
    polynomials = (x, x * (x - 1.0), x * ((x - 3.0) * x + 1.0), x * (((x - 6.0) * x + 7.0) * x - 1.0))
    return torch.stack([-torch.expm1(-x), *(torch.where(e > 0, p * e, 0.0) for p in polynomials)])


def gaussian_derivatives(y: Tensor, sd: Tensor | float, orders: int) -> list[Tensor]:
    """Φ(-y) and the first derivatives of Φ(y) = Φ(u/τ) in u."""
    density, parts = pdf(y) / sd, [0.5 * torch.erfc(y / SQRT_2)]
    hermite = [torch.ones_like(y), -y, y * y - 1.0, y * (3.0 - y * y)]
    return parts + [density * hermite[n] / sd**n for n in range(orders - 1)]


@cache
def gumbel_rule() -> tuple[Tensor, Tensor]:
    """Gauss's nodes and weights for the Gumbel density, by Stieltjes' recurrence on a fine grid."""
    g = np.arange(-6.0, 700.0, 1.0 / 64.0)
    weights = np.exp(-g - np.exp(-g)) / 64.0
    before, now, off = np.zeros_like(g), np.ones_like(g), 0.0
    diagonal, beside = [], []
    for _ in range(WIDE_NODES):
        centre = float(weights @ (g * now * now))
        following = (g - centre) * now - off * before
        off = math.sqrt(float(weights @ (following * following)))
        before, now = now, following / off
        diagonal.append(centre)
        beside.append(off)
    nodes, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1))
    return torch.from_numpy(nodes), torch.from_numpy(vectors[0] ** 2)


@cache
def equally_spaced_gumbel() -> tuple[Tensor, Tensor]:
    """The trapezoidal rule for the Gumbel density: step 0.3, error e^{-π²/0.3}; exact to rounding for any τ >= 0.5."""
    g = torch.arange(-3.9, 38.0, 0.3, dtype=torch.float64)
    return g, 0.3 * torch.exp(-g - torch.exp(-g))


def mixed_gaussians(u: Tensor, sd: Tensor | float, orders: int, rule: tuple[Tensor, Tensor]) -> Tensor:
    """Q(u; τ) = Σ_j ω_j Φ((g_j - u)/τ) and derivatives of 1 - Q, by a rule for the Gumbel variable g."""
    total = torch.zeros(orders, *u.shape, dtype=u.dtype, device=u.device)
    for g, weight in zip(*(x.tolist() for x in rule), strict=True):
        for part, more in zip(total, gaussian_derivatives((u - g) / sd, sd, orders), strict=True):
            part.add_(more, alpha=weight)
    return total


def aliasing(base: float, sd: float, gap: float) -> float:
    """Bound on the relative error of the trapezoidal rule with nodes `gap` apart.

    The line of integration moves by a; of this the Gaussian base absorbs a - c and the Gumbel function c < π/2, so that
    the error is at most 6.4/cos c · exp(a²/2(τ² - b²) + (a - c)²/2b² - 2πa/g), for every a >= c.
    """
    rest = sd * sd - base * base
    if base == 0.0:
        a, by_base = STRIP_LINES, np.zeros_like(STRIP_LINES)
    else:
        a = np.maximum((2 * math.pi / gap + STRIP_LINES / base**2) / (1 / rest + 1 / base**2), STRIP_LINES)
        by_base = (a - STRIP_LINES) ** 2 / (2 * base * base)
    exponents = a * a / (2 * rest) + by_base - 2 * math.pi * a / gap - np.log(np.cos(STRIP_LINES))
    return 6.4 * math.exp(exponents.min())


def widest_gap(base: float, sd: float, error: float) -> float:
    """The largest distance of nodes at which `aliasing` is within `error`, by bisection."""
    low, high = 0.0, 4.0 * sd
    for _ in range(24):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if aliasing(base, sd, middle) <= error else (low, middle)
    return low


class SdLevel:
    """Tables for sds in (low, high] on a grid of step h: `table[n, l, i]` is the n-th derivative at i h - l g."""

    def __init__(self, precision: Precision, step: float, low: float, high: float) -> None:
        self.step, self.low, self.high = step, low, high
        self.interpolates = low < 0.0
        z = precision.reach(high)
        # the distance of nodes is `multiple` / `parts` of a step
        if self.interpolates:
            self.base, self.parts, self.multiple = 0.0, interpolation_nodes(precision, step), 1
            self.gap, self.half = step / self.parts, self.parts // 2 + STENCIL // 2
        else:
            bases = [0.0, *(share * low for share in (0.5, 0.6, 0.7, 0.8) if share * low >= NARROWEST_BASE)]
            gaps = [widest_gap(base, low, precision.relative) for base in bases]
            counts = [self.half_count(z, base, gap) for base, gap in zip(bases, gaps, strict=True)]
            _, self.base, gap = min(zip(counts, bases, gaps, strict=True))
            self.parts, self.multiple = as_fraction(gap / step)
            self.gap = self.multiple * step / self.parts
            self.half = self.half_count(z, self.base, self.gap)
        left, right = precision.ends
        first = math.floor((left - z * high) / step) - 2
        last = math.ceil((right + min(0.5 * high * high, z * high)) / step) + 2
        self.first, self.count = first, last - first + 1
        self.tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def half_count(self, z: float, base: float, gap: float) -> int:
        return math.ceil((z * math.sqrt(self.high**2 - base**2) + 0.5 * self.step) / gap)

    def on(self, device: torch.device, orders: int) -> tuple[Tensor, Tensor]:
        """`table[n, l, i]`, and `tails`: h Σ_{i' > i} of each."""
        if (orders, device) not in self.tables:
            table = self.table(orders)
            table[0, :, 0], table[0, :, -1] = 1.0, 0.0
            table[1:, :, 0] = table[1:, :, -1] = 0.0
            tails = self.step * (table.flip(-1).cumsum(-1).flip(-1) - table)
            self.tables[orders, device] = table.to(device), tails.to(device)
        return self.tables[orders, device]

    def table(self, orders: int) -> Tensor:
        """Q(i h - l g; b) and derivatives of 1 - Q, indexed by order, l and i."""
        i = torch.arange(self.first, self.first + self.count, dtype=torch.float64)
        l = torch.arange(-self.half, self.half + 1, dtype=torch.float64)[:, None]
        where = (i * self.parts - l * self.multiple).long()
        return self.fine(int(where.min()), int(where.max()) + 1, orders)[:, where - where.min()]

    def fine(self, first: int, end: int, orders: int) -> Tensor:
        """Q(j h/n; b) and derivatives of 1 - Q for j = first, ..., end - 1, where n is `parts`."""
        u = torch.arange(first, end, dtype=torch.float64) * (self.step / self.parts)
        if self.base == 0.0:
            return gumbel_derivatives(u)[:orders]
        rule = gumbel_rule() if self.base > WIDEST else equally_spaced_gumbel()
        return mixed_gaussians(u, self.base, orders, rule)

    def weights(self, shift: Tensor, sd: Tensor) -> Tensor:
        """w_l for Gaussians of mean δ = `shift`, |δ| <= h/2, one row each."""
        if self.interpolates:
            return self.lagrange(shift, sd)
        l = torch.arange(-self.half, self.half + 1, dtype=shift.dtype, device=shift.device)
        rest = sd * sd - self.base**2
        w = torch.exp((l * self.gap - shift[:, None]).square() / (-2.0 * rest[:, None]))
        return w / w.sum(1, keepdim=True)

    def lagrange(self, shift: Tensor, sd: Tensor) -> Tensor:
        """E ℓ_l(δ + τZ), ℓ_l the Lagrange polynomials of the STENCIL nodes around δ; Gauss-Hermite makes it exact."""
        z, omega = full_gauss_hermite(STENCIL // 2)
        first = torch.floor(shift / self.gap) - (STENCIL // 2 - 1)
        x = (shift / self.gap - first)[:, None] + sd[:, None] / self.gap * z.to(sd)
        w = torch.zeros(len(shift), 2 * self.half + 1, dtype=shift.dtype, device=shift.device)
        place = first.long() + self.half
        for a in range(STENCIL):
            others = [b for b in range(STENCIL) if b != a]
            polynomial = torch.ones_like(x)
            for b in others:
                polynomial = polynomial * ((x - b) / (a - b))
            w.scatter_(1, (place + a)[:, None], (polynomial @ omega.to(sd))[:, None])
        return w


@cache
def sd_level(precision: Precision, step: float, index: int, bands: int = 2) -> SdLevel:
    """The tables of sds in (t 2^{index/bands}, t 2^{(index+1)/bands}], t = `interpolated(...)`; index -1: up to t."""
    t = interpolated(precision, step)
    low = t * 2.0 ** (index / bands) if index >= 0 else -1.0
    return SdLevel(precision, step, low, t * 2.0 ** ((index + 1) / bands))


def as_fraction(ratio: float) -> tuple[int, int]:
    """n and m with m/n close to the ratio but not above it; n is the least power of two for which that loses little."""
    parts = 1
    while parts < FINEST_PARTS and math.floor(ratio * parts) * LEAST_LOSS < ratio * parts:
        parts *= 2
    while ratio * parts < 1.0:
        parts *= 2
    return parts, math.floor(ratio * parts)


def largest_interpolated(precision: Precision) -> float:
    """The sd, in distances of nodes, from which the trapezoidal rule is as good as interpolation."""
    return math.sqrt(math.log(10.0 / precision.relative) / (2 * math.pi**2)) * 1.02


@cache
def interpolation_nodes(precision: Precision, step: float) -> int:
    """How many nodes of interpolation a step has.

    At distance g the error is at most g⁸ max|∂⁸Q|/8! · E Π|x - l|, with x normal around the middle of the nodes l.
    """
    z = np.linspace(-9.0, 9.0, 361)
    x = np.linspace(0.0, 1.0, 11)[:, None] + largest_interpolated(precision) * z + STENCIL // 2 - 1
    spread = np.max(
        np.prod([np.abs(x - l) for l in range(STENCIL)], 0) @ (0.05 * np.exp(-0.5 * z * z)) / math.sqrt(math.tau)
    )
    g = (precision.relative / (LARGEST_DERIVATIVE * spread / math.factorial(STENCIL))) ** (1.0 / STENCIL)
    return math.ceil(step / g)


def interpolated(precision: Precision, step: float) -> float:
    """The largest sd that is interpolated."""
    return step / interpolation_nodes(precision, step) * largest_interpolated(precision)


def level_index(precision: Precision, step: float, sd: Tensor) -> Tensor:
    """The index of each sd's level."""
    steps = torch.log2(sd.clamp(min=1e-300) / interpolated(precision, step)) * 2.0
    return (torch.ceil(steps) - 1).clamp(min=-1).long()
