"""Pairs of nodes ±z for E[f(ϑ + τZ)], f the softplus, and its derivatives: as few as a variance needs.

The poles of f' are ±iπ, ±3iπ, ..., so that |f^{(r+1)}| is at most 2 r! λ(r+1) / π^{r+1} with λ(s) = Σ_{k>=0}
(2k+1)^{-s}. This bounds the error of Gauss-Hermite's nodes, best for small variances. Beyond, nodes are equally spaced:
the error of the trapezoidal rule falls with the height to which the line of integration can be moved towards the poles
(docs/certificate.md).
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.softplus.quadrature import half_gauss_hermite

EXACT_NODES = 1e-16  # a tolerance below rounding
MOST_GAUSS = 24
LARGEST_SD, SD_RATIO = 8.0, 1.12  # up to which there are nodes, and between one set of them and the next
NEAR_POLE = 3.0  # imaginary part, below π, of the line to which the trapezoidal rule's integral is moved
NEAR_POLE_SIZE = 200.0  # at least twice what |f|, |f'| and |f''| reach there, each over 1 + |ϑ| + τ


class Nodes(NamedTuple):
    """z_j >= 0 with weights that sum to one half; errors are small for variances up to `reach`."""

    reach: float
    z: Tensor
    weights: Tensor


@cache
def node_sets(tolerance: float) -> list[Nodes]:
    """Nodes with errors of at most `tolerance`, times 1 + |ϑ| + τ for η: each set has more and reaches further."""
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
    a = min(NEAR_POLE / sd, math.sqrt(2.0 * need))  # the best height, or as near to it as the poles allow
    step = 2.0 * math.pi * a / (need + 0.5 * a**2)
    count = math.ceil(math.sqrt(-2.0 * math.log(tolerance)) / step)
    z = step * np.arange(count + 1)
    weights = np.exp(-0.5 * z**2)
    weights[0] *= 0.5
    return Nodes(sd**2, torch.from_numpy(z), torch.from_numpy(0.5 * weights / weights.sum()))
