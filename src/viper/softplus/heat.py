"""The heat expansion E[f(X)] = Σ_m (v/2)^m/m! f^{(2m)}(ϑ) of the softplus f, for small variance v."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from viper.softplus.pointwise import Formula, Triple, blocked, polynomial, reflected

MOST_ORDER = 8
Coefficients = tuple[float, ...]


def derivatives(count: int) -> tuple[list[Coefficients], list[Coefficients]]:
    """E_1 ... E_count and O_1 ... O_count, by powers of q: f^{(2j)} = q E_j(q) and f^{(2j+1)} = q (1-2s) O_j(q).

    Here q = s(1-s), so that q' = q (1-2s) and (1-2s)² = 1-4q; hence O = (qE)' and E⁺ = (1-4q)(qO)' - 2qO.
    """
    even: list[Coefficients] = [(1.0,)]
    odd: list[Coefficients] = [(1.0,)]
    while len(even) < count:
        padded = (0.0, *odd[-1], 0.0)
        # the coefficient of q^i: (i+1) o_i - 4i o_{i-1} - 2 o_{i-1}
        following = tuple((i + 1) * o - (4 * i + 2) * before for i, (before, o) in enumerate(pairwise(padded)))
        even.append(following)
        odd.append(tuple((i + 1) * e for i, e in enumerate(following)))
    return even, odd


EVEN, ODD = derivatives(MOST_ORDER + 2)
# Stopped after order m, the first omitted term of h is v^{m+1}/(2^{m+1} (m+1)!) f^{(2m+4)}, and |f^{(2m+4)}| is largest
# at 0, where q = ¼; those of η and g are less
HEAT_ERRORS = [
    abs(sum(e * 0.25 ** (i + 1) for i, e in enumerate(EVEN[m + 1]))) / (2.0 ** (m + 1) * math.factorial(m + 1))
    for m in range(1, MOST_ORDER + 1)
]


def heat_reach(tolerance: float) -> list[float]:
    """The largest variance at which orders 1, 2, ... have errors within `tolerance`."""
    return [(tolerance / error) ** (1.0 / (m + 2)) for m, error in enumerate(HEAT_ERRORS)]


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


def heat(tolerance: float, most: int = MOST_ORDER) -> Formula:
    """The expansion to the lowest order, `most` at most, whose error in a block is within `tolerance`."""
    reach = heat_reach(tolerance)[:most]

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        largest = math.inf if torch.compiler.is_compiling() or not variance.numel() else float(variance.max())
        return heat_moments(mean, variance, 1 + sum(largest > v for v in reach[:-1]))

    return blocked(reflected(moments), 12, native=True)
