"""A block's sums by two or four kernels on a CUDA device, where the plain formulas take fifty and write all they make.

The formulas are those of problem.py, which is the reference and takes over wherever this does not apply: other bounds,
variances beyond the reach of the heat expansion, many columns, no Triton. Each program adds up its share of the rows
in a fixed order, so that results repeat to the last bit.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from viper.softplus.limit import heat_reach
from viper.softplus.pointwise import Formula
from viper.softplus.quadrature import EXACT_NODES

MOST_COLUMNS = 64  # whose curvature matrix a program can hold
MOST_NARROW = 10  # and a thread


class Program(NamedTuple):
    """What a kernel does for a formula: "quarter" (h = ¼), "softplus" (Σ = 0) or "heat", to an order."""

    kind: str
    order: int = 0
    reach: float = math.inf  # the largest variance for which it holds
    nodes: float = EXACT_NODES  # the tolerance of the nodes that take the place of the expansion on a CPU


PROGRAMS: dict[Formula, Program] = {}


def heat_program(tolerance: float, order: int, nodes: float) -> Program:
    return Program("heat", order, heat_reach(tolerance)[order - 1], nodes)


@cache
def available() -> bool:
    """Whether Triton is there; it comes with the CUDA builds of torch."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available()


@cache
def launchers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Of the kernel for few columns and of those for many; imported late, as Triton need not be there."""
    from viper.inference.kernels.triton import launch_narrow, launch_wide

    return launch_narrow, launch_wide


def fused_sums(
    matrix: Tensor,
    label: Tensor,
    offset: Tensor | None,
    weight: Tensor | None,
    mean: Tensor,
    factor: Tensor | None,
    program: Program,
    gram: bool,
    single: bool,
) -> list[Tensor] | None:
    """Value, magnitude, gradient and curvature as `row_sums` has them, on the host.

    None where a row is beyond the program's reach. `mean` has an entry more than `matrix` has columns where there is
    an intercept.
    """
    size, (few, many) = len(mean), launchers()
    kind, order, reach, _ = program
    asked = matrix, size, label, offset, weight, mean, factor, kind, order, reach, gram
    with torch.cuda.device(matrix.device):  # Triton launches on the current one
        value, magnitude, beyond, slope, curvature = few(*asked) if size <= MOST_NARROW else many(*asked, single)
    return None if program.kind == "heat" and float(beyond) else [value, magnitude, slope, curvature]
