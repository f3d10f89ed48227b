"""A block's sums by one pass in C on a CPU, where the plain formulas take fifty operations and write all they make.

The formulas are those of problem.py, which is the reference and takes over wherever this does not apply: other bounds,
variances beyond the reach of the nodes, sparse or float32 rows, many columns, no library.
"""

import ctypes
import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.inference.rows import Block, Dense
from viper.softplus.pointwise import KernelRecipe
from viper.softplus.quadrature import node_sets

NAME = "row_sums_1"  # another with every change of its arguments, so that an old library is not called by a newer viper
COUNT, SIZE, ADDRESS = ctypes.c_int, ctypes.c_ssize_t, ctypes.c_void_p
ARGUMENTS: list[Any] = [ADDRESS, SIZE, SIZE, SIZE, COUNT, COUNT, *[ADDRESS] * 7, SIZE, COUNT, COUNT, ADDRESS]


@cache
def library_function() -> Callable[..., int] | None:
    """The function of _rows.c; None where it was not built, does not run on this machine, or errs."""
    built = find_spec("viper.inference.kernels._rows")
    if built is None or built.origin is None:
        return None
    try:
        function = getattr(ctypes.CDLL(built.origin), NAME)
    except (OSError, AttributeError):
        return None
    function.argtypes = ARGUMENTS
    return function if is_right(function) else None


def is_right(function: Callable[..., int]) -> bool:
    """Whether one row gives its softplus, which it does not if compiled with flags that bend arithmetic."""
    one = ctypes.c_double * 1
    x, label, mean, nodes, out = one(1.0), one(0.0), one(0.3), (ctypes.c_double * 4)(0, 1, 0, 0.5), (one * 3)()
    failed = function(x, 1, 1, 1, 1, 1, label, None, None, None, mean, None, nodes, len(nodes), 0, 0, out)
    return not failed and math.isclose(out[0][0], -math.log1p(math.exp(0.3)), rel_tol=1e-14)


MOST_COMPILED = 256  # columns: the sums of a vector of rows each fit the cache


def is_compiled() -> bool:
    """Whether rows on a CPU are summed by compiled code."""
    return library_function() is not None


def compiled_sums(
    block: Block, recipe: KernelRecipe, mean: Tensor, factor: Tensor | None, gram: bool, single: bool
) -> list[Tensor] | None:
    """Value, magnitude, gradient and curvature, always in float64; None without a library or beyond its reach.

    `mean` has an entry more than the matrix has columns where there is an intercept. Other threads run meanwhile.
    """
    function = library_function()
    if function is None:
        return None
    assert isinstance(block.design, Dense)
    matrix, d = block.design.matrix, len(mean)
    nodes, out = packed_nodes(recipe.nodes), matrix.new_empty(2 + d + d * d * gram)
    residual, factor = (block.residual, square(factor)) if recipe.kind == "heat" else (None, None)
    vectors = block.label, block.offset, residual, block.weight, mean, factor, nodes
    arrays = [None if x is None else in_order(x) for x in vectors]
    failed = function(
        matrix.data_ptr(), len(matrix), *matrix.stride(), matrix.shape[1], d,
        *[None if x is None else x.data_ptr() for x in arrays], len(nodes),
        recipe.kind == "quarter", gram, out.data_ptr(),
    )  # fmt: skip
    if failed:
        return None
    value, magnitude, slope, curvature = out.split([1, 1, d, d * d * gram])
    return [value[0], magnitude[0], slope, curvature.view(d, d) if gram else curvature]


def square(factor: Tensor | None) -> Tensor | None:
    """F as a matrix, also of the diagonal family, which holds variances instead."""
    return factor if factor is None or factor.ndim == 2 else torch.diag(factor.sqrt())


def in_order(x: Tensor) -> Tensor:
    """As the C code reads it: float64, one number after the other."""
    return x.to(torch.float64).contiguous()


@cache
def packed_nodes(tolerance: float) -> Tensor:
    """Reach, number of pairs, and z and weight of each, set by set."""
    sets = node_sets(tolerance)
    parts = [np.concatenate([[s.reach, len(s.z)], np.stack([s.z, s.weights], 1).ravel()]) for s in sets]
    return torch.from_numpy(np.concatenate(parts))
