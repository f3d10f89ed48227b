"""The expected log-sum-exp of rows on a CPU, in C: one pass per row, ten times as fast as the plain formulas.

_classes.c is compiled when viper is installed. It leaves out rows with classes wider than WIDEST_COMPILED or with more
than MOST_COMPILED_NODES nodes, and all rows where the library is missing; logsumexp.py does those.
"""

import ctypes
import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from viper.softplus.gumbel import Precision, SdLevel, interpolated, sd_level

SYMBOL = "class_rows_1"  # renamed when the arguments change, so that a newer viper never calls an old library
WIDEST_COMPILED = 48.0  # sd; a class as wide as this, among narrow ones, takes a thousand nodes
POWERS = 8  # steps: 1, 2, 4, ..., 128 times the least
LEVELS = 26  # of sds, from the interpolated ones to the widest
MOST_COMPILED_NODES = 2048
MOST_HALF = 128  # rows of a table on each side of the middle one
PADDING = 16  # columns added to a table on both sides
POINTER, LENGTH = ctypes.c_void_p, ctypes.c_ssize_t


class PackedLevel(ctypes.Structure):
    """A SdLevel as the C code reads it; without tables, all zero."""

    _fields_ = (
        ("base", ctypes.c_double),
        ("gap", ctypes.c_double),
        ("half", LENGTH),
        ("first", LENGTH),
        ("count", LENGTH),
        ("Q", POINTER),
        ("D", POINTER),
        ("tails", POINTER),
    )


@cache
def class_library() -> Callable[..., int] | None:
    """Return the function of _classes.c, or None if it was not built or cannot run on this machine."""
    built = find_spec("viper.softplus._classes")
    if built is None or built.origin is None:
        return None
    try:
        function = getattr(ctypes.CDLL(built.origin), SYMBOL)
    except (OSError, AttributeError):
        return None
    function.argtypes = [LENGTH, LENGTH, *[POINTER] * 10]
    return function if is_exact(function) else None


def is_exact(function: Callable[..., int]) -> bool:
    """Check the library on one row, log(e^0.3 + 1); it fails if compiler flags relaxed the arithmetic."""
    tables = Tables(Precision(1e-10), 0.34)
    mean, zero = torch.tensor([[0.3, 0.0]], dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64)
    value, _, _, done = tables.moments(function, mean, zero, torch.full((POWERS,), math.inf, dtype=torch.float64))
    return bool(done.all()) and math.isclose(float(value), math.log1p(math.exp(0.3)), abs_tol=1e-10)


class Tables:
    """The packed levels of one tolerance, made when a row first needs them."""

    def __init__(self, precision: Precision, step: float) -> None:
        self.precision, self.step = precision, step
        self.levels = (PackedLevel * (POWERS * LEVELS))()
        self.kept: list[Tensor] = []  # what the addresses point to
        share = interpolated(precision, 1.0)
        numbers = [
            precision.tolerance,
            step,
            precision.start,
            precision.ends[1],
            WIDEST_COMPILED,
            share,
            MOST_COMPILED_NODES,
            POWERS,
            LEVELS,
        ]
        self.options = torch.tensor([*numbers, MOST_COMPILED_NODES, POWERS, LEVELS], dtype=torch.float64)

    def moments(self, function: Callable[..., int], mean: Tensor, variance: Tensor, doubled_from: Tensor) -> Any:
        """Value, slope and curvature of (n, K) matrices, and which rows are done."""
        value, slope, curvature = mean.new_zeros(len(mean)), torch.zeros_like(mean), torch.zeros_like(mean)
        done = torch.zeros(len(mean), dtype=torch.uint8)
        inputs = mean.contiguous(), variance.contiguous(), self.options, doubled_from.contiguous()
        while True:
            needed = torch.zeros(POWERS * LEVELS, dtype=torch.uint8)
            addresses = [x.data_ptr() for x in inputs], [x.data_ptr() for x in (value, slope, curvature, done, needed)]
            failed = function(*mean.shape, *addresses[0], ctypes.addressof(self.levels), *addresses[1])
            if failed or not bool(needed.any()):
                return value, slope, curvature, done.bool()
            for number in needed.nonzero()[:, 0].tolist():
                power, index = divmod(number, LEVELS)
                self.pack(number, sd_level(self.precision, self.step * 2.0**power, index - 1))

    def pack(self, number: int, one: SdLevel) -> None:
        """Put a level where the C code finds it: rows with PADDING more columns on both sides, tails by columns."""
        assert one.half <= MOST_HALF
        table, tails = one.on(torch.device("cpu"), 2)
        padded = [
            torch.cat([x[:, :1].expand(-1, PADDING), x, x[:, -1:].expand(-1, PADDING)], 1).contiguous() for x in table
        ]
        by_column = tails.permute(2, 1, 0).contiguous()
        self.kept += [*padded, by_column]
        addresses = [x.data_ptr() for x in (*padded, by_column)]
        self.levels[number] = PackedLevel(one.base, one.gap, one.half, one.first, one.count, *addresses)


@cache
def tables_for(precision: Precision, step: float) -> Tables:
    """The tables of one tolerance, shared by all calls."""
    return Tables(precision, step)


def compiled_moments(
    mean: Tensor, variance: Tensor, precision: Precision, step: float, doubled_from: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Value, slope, curvature and the rows for which they are right; None without a library or off the CPU."""
    if mean.device.type != "cpu" or (function := class_library()) is None:
        return None
    return tables_for(precision, step).moments(function, mean, variance, doubled_from)
