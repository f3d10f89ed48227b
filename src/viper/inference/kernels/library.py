"""The library compiled from _rows.c, if there is one. Nothing here imports torch, so `viper --version` is quick."""

import ctypes
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from viper.softplus.c_library import ADDRESS, COUNT, SIZE, widest_functions

ROWS_MODULE = "viper.inference.kernels._rows"
ARGUMENTS: dict[str, list[Any]] = {
    "row_sums_4": [ADDRESS, SIZE, SIZE, SIZE, COUNT, COUNT, *[ADDRESS] * 9, SIZE, COUNT, COUNT, COUNT, *[ADDRESS] * 3],
    "wide_latent_1": [ADDRESS, SIZE, SIZE, COUNT, COUNT, *[ADDRESS] * 4],
    "wide_gather_1": [ADDRESS, SIZE, SIZE, COUNT, COUNT, *[ADDRESS] * 3],
    "wide_bend_2": [ADDRESS, COUNT, SIZE, SIZE, COUNT, COUNT, *[ADDRESS] * 5, COUNT, ADDRESS],
    "sparse_latent_2": [*[ADDRESS] * 3, SIZE, *[ADDRESS] * 3],
    "sparse_gather_1": [*[ADDRESS] * 3, SIZE, *[ADDRESS] * 3],
    "sparse_bend_1": [*[ADDRESS] * 3, SIZE, COUNT, COUNT, *[ADDRESS] * 5],
    "row_moments_1": [ADDRESS, ADDRESS, SIZE, ADDRESS, SIZE, *[ADDRESS] * 3],
    "row_bends_1": [ADDRESS, ADDRESS, SIZE, ADDRESS, COUNT, *[ADDRESS] * 3],
    "class_latent_1": [ADDRESS, SIZE, SIZE, SIZE, *[COUNT] * 4, *[ADDRESS] * 4],
    "class_gather_1": [ADDRESS, SIZE, SIZE, SIZE, *[COUNT] * 4, *[ADDRESS] * 4],
    "class_hessian_1": [ADDRESS, SIZE, SIZE, SIZE, *[COUNT] * 3, *[ADDRESS] * 4],
    "join_columns_1": [ADDRESS, SIZE, COUNT, ADDRESS],
}


class Library(NamedTuple):
    """The functions of _rows.c."""

    row_sums: Callable[..., int]
    wide_latent: Callable[..., int]
    wide_gather: Callable[..., int]
    wide_bend: Callable[..., int]
    sparse_latent: Callable[..., int]
    sparse_gather: Callable[..., int]
    sparse_bend: Callable[..., int]
    row_moments: Callable[..., int]
    row_bends: Callable[..., int]
    class_latent: Callable[..., int]
    class_gather: Callable[..., int]
    class_hessian: Callable[..., int]
    join_columns: Callable[..., int]


@cache
def library() -> Library | None:
    """Return the functions of _rows.c, compiled for the widest vectors of this machine, or None."""
    functions = widest_functions(ROWS_MODULE, ARGUMENTS, is_right)
    return Library(*functions) if functions else None


def is_right(function: Callable[..., int]) -> bool:
    """Check the library on one row; it fails if compiler flags relaxed the arithmetic."""
    one = ctypes.c_double * 1
    x, label, mean, nodes, out = one(1.0), one(0.0), one(0.3), (ctypes.c_double * 4)(0, 1, 0, 0.5), (one * 3)()
    failed = function(
        x, 1, 1, 1, 1, 1, label, None, None, None, None, mean, None, None, nodes, len(nodes), 0, 0, 1, None, None, out
    )
    return not failed and math.isclose(out[0][0], -math.log1p(math.exp(0.3)), rel_tol=1e-14)


def is_compiled() -> bool:
    """Return whether rows on a CPU are summed by compiled code."""
    return library() is not None
