"""η, g and h of a tile of rows, in Triton: the formulas of the kernels in fused_kernel.py and fused_narrow.py."""

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice

from viper.softplus.heat import EVEN, MOST_ORDER, ODD


def heat_table() -> tuple[float, ...]:
    """Coefficients of v^m q^i in what the expansion adds to η/q, to g/(q(1-2s)), and in h/q, one after the other."""
    table = []
    for rows in ([(), *EVEN[:MOST_ORDER]], [(), *ODD[:MOST_ORDER]], EVEN[: MOST_ORDER + 1]):
        for m, row in enumerate(rows):
            padding = MOST_ORDER + 1 - len(row)
            table += [c / (2.0**m * math.factorial(m)) for c in row] + [0.0] * padding
    return tuple(table)


# constants of the kernels, as loads would take registers
WIDE = tl.constexpr(MOST_ORDER + 1)
HEAT = tl.constexpr(heat_table())


@triton.jit
def heat_sums(q, v, ORDER: tl.constexpr):
    """Σ_m v^m Σ_i t_mi q^i for the three parts of the table, nested in q and then in v."""
    to_value, to_slope, to_curvature = 0.0 * q, 0.0 * q, 0.0 * q
    for m in tl.static_range(ORDER, -1, -1):
        E, D, B = 0.0 * q, 0.0 * q, 0.0 * q
        for i in tl.static_range(m, -1, -1):
            E = E * q + HEAT[m * WIDE + i]
            D = D * q + HEAT[(WIDE + m) * WIDE + i]
            B = B * q + HEAT[(2 * WIDE + m) * WIDE + i]
        to_value, to_slope, to_curvature = to_value * v + E, to_slope * v + D, to_curvature * v + B
    return to_value, to_slope, to_curvature


@triton.jit
def moments(theta, v, KIND: tl.constexpr, ORDER: tl.constexpr):
    """η, g and h at ϑ and v = τ²."""
    # s, q = s(1-s) and log(1+e^-|ϑ|), at -|ϑ|
    e = tl.exp(-tl.abs(theta))
    s = e / (1.0 + e)
    q = s / (1.0 + e)
    eta, g, h = libdevice.log1p(e), s, q
    if KIND == "quarter":
        h = 0.25 + 0.0 * q
    if KIND == "heat":
        to_value, to_slope, to_curvature = heat_sums(q, v, ORDER)
        eta += q * to_value
        g += q * (1.0 - 2.0 * s) * to_slope
        h = q * to_curvature
    return eta + tl.maximum(theta, 0.0), tl.where(theta > 0.0, 1.0 - g, g), h
