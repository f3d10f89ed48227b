"""A block's sums in one pass in C; the plain formulas take fifty operations and store every intermediate array.

_rows.c is compiled when viper is installed. Without the library, or beyond the range of its nodes, the plain formulas
of sums.py are used. Long blocks are summed by as many threads as threads.py says, with the same result for any number.
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
from viper.inference.threads import PASS_THREADS
from viper.softplus.pointwise import KernelRecipe
from viper.softplus.quadrature import node_sets

MOST_COMPILED = 256  # columns: with one vector of sums each, they still fit in the cache
WORK_OF_THREAD = 1 << 21  # products per thread, about 0.2 ms: below that, starting one takes longer than it saves
NAME = "row_sums_2"  # renamed when the arguments change, so that a newer viper never calls an old library
COUNT, SIZE, ADDRESS = ctypes.c_int, ctypes.c_ssize_t, ctypes.c_void_p
ARGUMENTS: list[Any] = [ADDRESS, SIZE, SIZE, SIZE, COUNT, COUNT, *[ADDRESS] * 8, SIZE, COUNT, COUNT, COUNT, ADDRESS]


@cache
def library_function() -> Callable[..., int] | None:
    """Return the function of _rows.c, or None if it was not built, cannot run on this machine, or fails its check."""
    built = find_spec("viper.inference.kernels._rows")
    if built is None or built.origin is None:
        return None
    try:
        library = ctypes.CDLL(built.origin)
        function = getattr(library, NAME) if hasattr(library, NAME) else older_function(library)
    except (OSError, AttributeError):
        return None
    function.argtypes = ARGUMENTS
    return function if is_right(function) else None


def older_function(library: Any) -> Any:
    """The same function from a library built before it had threads, for as long as such builds are about."""
    older = library.row_sums_1
    older.argtypes = [*ARGUMENTS[:6], *[ADDRESS] * 7, SIZE, COUNT, COUNT, ADDRESS]

    def call(*given: Any) -> int:
        X, label, code, rest, out = given[:6], given[6], given[7], given[8:17], given[18]
        if code is not None:
            held = np.frombuffer((ctypes.c_ubyte * X[1]).from_address(code), np.uint8).astype(np.float64)
            label = held.ctypes.data
        return older(*X, label, *rest, out)

    return call


def is_right(function: Callable[..., int]) -> bool:
    """Check the library on one row; it fails if compiler flags relaxed the arithmetic."""
    one = ctypes.c_double * 1
    x, label, mean, nodes, out = one(1.0), one(0.0), one(0.3), (ctypes.c_double * 4)(0, 1, 0, 0.5), (one * 3)()
    failed = function(x, 1, 1, 1, 1, 1, label, None, None, None, None, mean, None, nodes, len(nodes), 0, 0, 1, out)
    return not failed and math.isclose(out[0][0], -math.log1p(math.exp(0.3)), rel_tol=1e-14)


def is_compiled() -> bool:
    """Return whether rows on a CPU are summed by compiled code."""
    return library_function() is not None


def compiled_sums(
    block: Block, recipe: KernelRecipe, mean: Tensor, factor: Tensor | None, gram: bool, single: bool
) -> list[Tensor] | None:
    """Return value, magnitude, gradient and curvature in float64; None without a library or beyond its range.

    With an intercept, `mean` has one more entry than the matrix has columns. Labels may be booleans. Other Python
    threads can run meanwhile.
    """
    function = library_function()
    if function is None:
        return None
    assert isinstance(block.design, Dense)
    matrix, d = block.design.matrix, len(mean)
    rows, columns = matrix.shape
    nodes, out = packed_nodes(recipe.nodes), matrix.new_zeros(2 + d + d * d * gram)
    residual, factor = (block.residual, square(factor)) if recipe.kind == "heat" else (None, None)
    label, code = (None, block.label) if block.label.dtype == torch.bool else (block.label, None)
    vectors = label, code, block.offset, residual, block.weight, mean, factor, nodes
    arrays = [None if x is None else in_order(x) for x in vectors]
    threads = min(PASS_THREADS.get(), 1 + rows * d * (d if gram else 8) // WORK_OF_THREAD)
    failed = function(
        matrix.data_ptr(), rows, *matrix.stride(), columns, d,
        *[None if x is None else x.data_ptr() for x in arrays], len(nodes),
        recipe.kind == "quarter", gram, threads, out.data_ptr(),
    )  # fmt: skip
    if failed:
        return None
    value, magnitude, slope, curvature = out.split([1, 1, d, d * d * gram])
    return [value[0], magnitude[0], slope, curvature.view(d, d) if gram else curvature]


def square(factor: Tensor | None) -> Tensor | None:
    """Return F as a matrix, also for the diagonal family, which stores variances."""
    return factor if factor is None or factor.ndim == 2 else torch.diag(factor.sqrt())


def in_order(x: Tensor) -> Tensor:
    """Return the array as the C code reads it: contiguous, and float64 unless it is boolean."""
    return x.contiguous() if x.dtype == torch.bool else x.to(torch.float64).contiguous()


@cache
def packed_nodes(tolerance: float) -> Tensor:
    """Return, for each set of nodes, its largest variance, the number of pairs, then z and weight of each pair."""
    sets = node_sets(tolerance)
    parts = [np.concatenate([[s.reach, len(s.z)], np.stack([s.z, s.weights], 1).ravel()]) for s in sets]
    return torch.from_numpy(np.concatenate(parts))
