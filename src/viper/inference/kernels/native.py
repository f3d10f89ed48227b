"""The shared library of _rows.c, which is built when viper is installed, if there is a C compiler that can."""

import ctypes
import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

NAME = "row_sums_1"  # another with every change of its arguments, so that an old library is not called by a newer viper
COUNT, SIZE, ADDRESS = ctypes.c_int, ctypes.c_ssize_t, ctypes.c_void_p
ARGUMENTS: list[Any] = [ADDRESS, SIZE, SIZE, SIZE, COUNT, COUNT, *[ADDRESS] * 7, SIZE, COUNT, COUNT, ADDRESS]


@cache
def row_sums() -> Callable[..., int] | None:
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
