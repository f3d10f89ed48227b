"""The heat expansion E[f(X)] = Σ_m (v/2)^m/m! f^{(2m)}(ϑ) of the softplus f, for small variance v."""

import math

import torch
from torch import Tensor

from viper.moments import Formula, Triple, blocked, polynomial, reflected

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
# Stopped after order m = 1 ... 4, the first omitted term of h is v^{m+1}/(2^{m+1} (m+1)!) f^{(2m+4)}, and
# sup|f^{(2m+4)}| is |s^{(2m+3)}(0)| = 1/4, 17/16, 31/4, 691/8; those of η and g are less
HEAT_ERRORS = (1 / 4 / 8, 17 / 16 / 48, 31 / 4 / 384, 691 / 8 / 3840)
HEAT_ERROR = HEAT_ERRORS[-1]


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
