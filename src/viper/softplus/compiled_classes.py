"""The expected log-sum-exp of rows on a CPU, in C: one pass per row, ten times as fast as the plain formulas.

_classes.c is compiled when viper is installed. It leaves out rows with classes wider than WIDEST_COMPILED or with more
than MOST_COMPILED_NODES nodes, and all rows where the library is missing; logsumexp.py does those.
"""

import ctypes
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from viper.softplus.c_library import ADDRESS, REAL, SIZE, widest_functions
from viper.softplus.gumbel import Precision, SdLevel, interpolated, sd_level

WIDEST_COMPILED = 48.0  # sd; a class as wide as this, among narrow ones, takes a thousand nodes
POWERS = 8  # steps: 1, 2, 4, ..., 128 times the smallest
BANDS = 4  # levels of sds per factor of two
LEVELS = 56  # in all, from the interpolated sds to the widest
MOST_COMPILED_NODES = 2048
MOST_HALF, WIDER = 128, 8  # shifts on each side of the middle one, and more on the right
PADDING = 48  # columns added to a table on both sides, as many as the C code reads at once
CLASSES_MODULE = "viper.softplus._classes"
CLASS_ROWS: dict[str, list[Any]] = {"class_rows_3": [SIZE, SIZE, *[ADDRESS] * 11]}


class PackedLevel(ctypes.Structure):
    """A SdLevel as the C code reads it; without tables, all zero."""

    _fields_ = (
        ("base", REAL),
        ("gap", REAL),
        ("half", SIZE),
        ("first", SIZE),
        ("count", SIZE),
        ("Q", ADDRESS),
        ("D", ADDRESS),
        ("tails", ADDRESS),
        ("places", ADDRESS),
    )


@cache
def class_library() -> Callable[..., int] | None:
    """Return the function of _classes.c for the widest vectors that this machine has, or None."""
    functions = widest_functions(CLASSES_MODULE, CLASS_ROWS, is_exact)
    return functions[0] if functions else None


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
        limits = MOST_COMPILED_NODES, POWERS, LEVELS
        numbers = precision.tolerance, step, precision.start, WIDEST_COMPILED, *limits
        self.options = torch.tensor(numbers, dtype=torch.float64)
        smallest = [interpolated(precision, step * 2.0**power) for power in range(POWERS)]
        self.interpolated = torch.tensor(smallest, dtype=torch.float64)

    def moments(self, function: Callable[..., int], mean: Tensor, variance: Tensor, doubled_from: Tensor) -> Any:
        """Value, slope and curvature of (n, K) matrices, and which rows are done."""
        value, slope, curvature = mean.new_zeros(len(mean)), torch.zeros_like(mean), torch.zeros_like(mean)
        done = torch.zeros(len(mean), dtype=torch.uint8)
        inputs = mean.contiguous(), variance.contiguous(), self.options, self.interpolated, doubled_from.contiguous()
        while True:
            needed = torch.zeros(POWERS * LEVELS, dtype=torch.uint8)
            addresses = [x.data_ptr() for x in inputs], [x.data_ptr() for x in (value, slope, curvature, done, needed)]
            failed = function(*mean.shape, *addresses[0], ctypes.addressof(self.levels), *addresses[1])
            if failed or not bool(needed.any()):
                return value, slope, curvature, done.bool()
            for number in needed.nonzero()[:, 0].tolist():
                power, index = divmod(number, LEVELS)
                self.pack(number, sd_level(self.precision, self.step * 2.0**power, index - 1, BANDS))

    def pack(self, number: int, one: SdLevel) -> None:
        """Put a level where the C code finds it: a row for each part of a step, and where shifts begin in them."""
        assert one.half <= MOST_HALF
        shifts = torch.arange(-one.half, one.half + WIDER + 1)
        columns, rows = -shifts * one.multiple // one.parts, -shifts * one.multiple % one.parts
        before = PADDING - int(columns.min())
        width = before + one.count + PADDING + int(columns.max()) + 1
        begin = (one.first - before) * one.parts
        fine = one.fine(begin, begin + width * one.parts, 2).reshape(2, width, one.parts)
        table = fine.transpose(1, 2).contiguous()
        tails = one.step * (table.flip(-1).cumsum(-1).flip(-1) - table)
        parts = *table.unbind(), tails.permute(1, 2, 0).contiguous(), rows * width + before + columns
        self.kept += parts
        addresses = [x.data_ptr() for x in parts]
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
