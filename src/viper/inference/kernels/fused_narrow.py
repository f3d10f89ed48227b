"""The pass of fused.py for few columns, by one kernel: a thread holds a row, X is read once, and no row is written.

Symbols as in problem.py. The sums of each program, over the rows its threads took in order, are added up by one more.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from viper.inference.kernels.fused_kernel import multiprocessors
from viper.inference.kernels.fused_moments import moments

ROWS, WARPS = 128, 4  # of a tile
# registers of a thread, and programs per multiprocessor, by whether there are more than 8 columns: of those tried on an
# H200, the fastest
SHARES = {False: (168, 3), True: (255, 2)}


@triton.jit(
    do_not_specialize=["rows", "stride", "tiles", "programs"],
    do_not_specialize_on_alignment=["X", "MU", "F", "Y", "O", "C", "OUT"],
)
def narrow_kernel(
    X, MU, F, Y, O, C, OUT,
    rows: tl.int64, stride: tl.int64, tiles: tl.int64, programs: tl.int64, reach,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, ORDER: tl.constexpr,
    OFFSET: tl.constexpr, WEIGHT: tl.constexpr, GRAM: tl.constexpr,
):  # fmt: skip
    """Value, magnitude, rows beyond the reach, gradient and the curvature's lower triangle, of this program's rows."""
    zero = tl.zeros((ROWS,), tl.float64)
    value, magnitude, beyond = zero, zero, zero
    slope, curvature = (), ()
    for i in tl.static_range(SIZE):
        slope += (zero,)
        for _ in tl.static_range(i + 1 if GRAM else 0):
            curvature += (zero,)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        index = tile * ROWS + tl.arange(0, ROWS)
        here = index < rows
        x = ()
        for j in tl.static_range(COLUMNS):
            x += (tl.load(X + index * stride + j, mask=here, other=0.0).to(tl.float64),)
        if SIZE > COLUMNS:
            x += (here.to(tl.float64),)
        y = tl.load(Y + index, mask=here, other=0.0).to(tl.float64)
        c = tl.load(C + index, mask=here, other=0.0) if WEIGHT else here.to(tl.float64)
        # ϑ = o + Aμ and τ² = |AF|²
        theta = tl.load(O + index, mask=here, other=0.0) if OFFSET else zero
        for i in tl.static_range(SIZE):
            theta += x[i] * tl.load(MU + i)
        v = zero
        if KIND == "heat":
            for j in tl.static_range(SIZE):
                along = zero
                for i in tl.static_range(SIZE):
                    along += x[i] * tl.load(F + i * SIZE + j)
                v += along * along
            beyond += tl.where(v <= reach, 0.0, 1.0)
            magnitude += c * (tl.abs(theta) + tl.sqrt(v) + 1.0)
        eta, g, h = moments(theta, v, KIND, ORDER)
        value += c * (y * theta - eta)
        g, h = c * (y - g), c * h
        more_slope, more_curvature = (), ()
        for i in tl.static_range(SIZE):
            more_slope += (slope[i] + x[i] * g,)
            for j in tl.static_range(i + 1 if GRAM else 0):
                more_curvature += (curvature[i * (i + 1) // 2 + j] + x[i] * h * x[j],)
        slope, curvature = more_slope, more_curvature
    totals = (value, magnitude, beyond) + slope + curvature  # noqa: RUF005
    for k in tl.static_range(len(totals)):
        tl.store(OUT + k * programs + tl.program_id(0), tl.sum(totals[k], 0))


@triton.jit(do_not_specialize=["programs"], do_not_specialize_on_alignment=["SUMS", "TOTALS"])
def total_kernel(SUMS, TOTALS, programs: tl.int64, SIZE: tl.constexpr, MOST: tl.constexpr):
    """One entry each of the totals of all programs, with the whole curvature matrix."""
    place = tl.program_id(0)
    i, j = (place - 3 - SIZE) // SIZE, (place - 3 - SIZE) % SIZE
    high, low = tl.maximum(i, j), tl.minimum(i, j)
    source = tl.where(place < 3 + SIZE, place, 3 + SIZE + high * (high + 1) // 2 + low)
    column = tl.arange(0, MOST)
    parts = tl.load(SUMS + source * programs + column, mask=column < programs, other=0.0)
    tl.store(TOTALS + place, tl.sum(parts, 0))


@cache
def found(device: torch.device, features: torch.dtype, registers: int, width: int, *options: Any) -> tuple[Any, Any]:
    """The two kernels for these options, found once: Triton's own way to them takes as long as the launch."""
    real, size = torch.float64, options[1]
    types = [features, *[real] * 6, *[1] * 4, 1.0]
    by_rows = narrow_kernel.warmup(*types, *options, grid=(1,), num_warps=WARPS, maxnreg=registers)
    return by_rows, total_kernel.warmup(real, real, 1, size, width, grid=(1,))


def launch(
    matrix: Tensor,
    size: int,
    label: Tensor,
    offset: Tensor | None,
    weight: Tensor | None,
    mean: Tensor,
    factor: Tensor | None,
    kind: str,
    order: int,
    reach: float,
    gram: bool,
) -> list[Tensor]:
    """Value, magnitude, number of rows beyond the reach, gradient and curvature, on the host.

    What need not be done before the first kernel begins, is done while it runs.
    """
    device, (rows, columns) = matrix.device, matrix.shape
    registers, share = SHARES[size > 8]
    tiles, most = triton.cdiv(rows, ROWS), share * multiprocessors(device)
    programs, width = max(1, min(tiles, most)), triton.next_power_of_2(most)
    options = columns, size, ROWS, kind, order, offset is not None, weight is not None, gram
    by_rows, together = found(device, matrix.dtype, registers, width, *options)
    sums = mean.new_empty(3 + size + gram * size * (size + 1) // 2, programs)
    by_rows[programs, 1, 1](
        matrix, mean, factor, label, offset, weight, sums, rows, matrix.stride(0), tiles, programs, reach, *options
    )
    entries = 3 + size + gram * size * size
    totals = torch.empty(entries, dtype=mean.dtype, pin_memory=True)  # which the card can write to
    together[entries, 1, 1](sums, totals, programs, size, width)
    scalars, slope, curvature = totals.split([3, size, entries - 3 - size])
    parts = [*scalars.unbind(), slope, curvature.view(size, size) if gram else curvature]
    torch.cuda.current_stream(device).synchronize()
    return parts
