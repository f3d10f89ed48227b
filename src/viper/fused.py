"""A block's sums by three kernels on a CUDA device, where the plain formulas take fifty and write all they make.

The formulas are those of problem.py, which is the reference and takes over wherever this does not apply: other bounds,
variances beyond the reach of the heat expansion, many columns, no Triton. Each program adds up its share of the rows
in a fixed order, so that results repeat to the last bit.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from viper.heat import EVEN, ODD, heat_reach
from viper.moments import Formula
from viper.nodes import EXACT_NODES

MOST_COLUMNS = 64  # whose curvature matrix a program can hold


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
    """Value, magnitude, gradient and curvature as `row_sums` has them, on the host by one copy.

    None where a row is beyond the program's reach. `mean` has an entry more than `matrix` has columns where there is
    an intercept.
    """
    from viper.fused_kernel import launch

    size = len(mean)
    table = heat_table(program.order, matrix.device)
    with torch.cuda.device(matrix.device):  # Triton launches on the current one
        scalars, slope, curvature = launch(
            matrix, size, label, offset, weight, mean, factor, table, program.kind, program.order, program.reach, gram,
            single,
        )  # fmt: skip
    if program.kind == "heat" and float(scalars[2]):
        return None
    return [scalars[0], scalars[1], slope, curvature if gram else slope.new_zeros(0)]


@cache
def heat_table(order: int, device: torch.device) -> Tensor:
    """Coefficients of v^m q^i in what the expansion adds to η/q, to g/(q(1-2s)), and in h/q."""
    table = torch.zeros(3, order + 1, order + 1, dtype=torch.float64)
    for m in range(order + 1):
        share = 1.0 / (2.0**m * math.factorial(m))
        rows = (EVEN[m - 1], ODD[m - 1], EVEN[m]) if m else ((), (), EVEN[0])
        for part, row in zip(table, rows, strict=True):
            part[m, : len(row)] = share * torch.tensor(row, dtype=torch.float64)
    return table.to(device)
