"""The kernels of fused.py for many columns: X is read twice, and per row ϑ, τ², c(y - g) and c h are written.

Symbols as in problem.py. A tile is some rows, padded to `WIDTH` columns; the column of ones of an intercept is made,
not read. One kernel for all three steps, as in fused_narrow.py, would be slower: what follows a sum over columns is
computed once for every thread that shares the row.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from viper.inference.kernels.fused_moments import moments

POINTS, POINT_WARPS = 512, 8  # rows of a tile of the elementwise kernel, and warps
HEAD = tl.constexpr(16)  # places before the gradient: three are used, and what follows is aligned
# rows of a tile of the other two, warps, and programs per multiprocessor, by whether there are more than 16 columns: of
# those tried on an H200, the fastest
TILES = {False: (16, 1, 16), True: (32, 1, 16)}


@triton.jit
def read_tile(X, index, column, rows, stride, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    here = (index < rows)[:, None]
    x = tl.load(X + index[:, None] * stride + column[None, :], mask=here & (column[None, :] < COLUMNS), other=0.0)
    if SIZE > COLUMNS:
        x = tl.where((column[None, :] == COLUMNS) & here, 1.0, x)
    return x


@triton.jit
def latent_kernel(
    X, MU, F, THETA, TAU2,
    rows, stride, tiles,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    VARIANCE: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """ϑ = Aμ and τ² = |AF|², row by row."""
    column, row = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    mean = tl.load(MU + column, mask=column < SIZE, other=0.0)
    light = tl.float32 if SINGLE else tl.float64
    if VARIANCE:
        inside = (column[:, None] < SIZE) & (column[None, :] < SIZE)
        factor = tl.load(F + column[:, None] * SIZE + column[None, :], mask=inside, other=0.0).to(light)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        index = tile.to(tl.int64) * ROWS + row
        x = read_tile(X, index, column, rows, stride, COLUMNS, SIZE)
        tl.store(THETA + index, tl.sum(x.to(tl.float64) * mean[None, :], 1), mask=index < rows)
        if VARIANCE:
            projected = tl.dot(x.to(light), factor, input_precision="ieee", out_dtype=light)
            tl.store(TAU2 + index, tl.sum(projected * projected, 1).to(tl.float64), mask=index < rows)


@triton.jit
def moments_kernel(
    THETA, TAU2, Y, O, C, G, H, OUT,
    rows, tiles, width, reach,
    POINTS: tl.constexpr, ORDER: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """c(y - g) and c h of every row; for this program's, value, magnitude and how many have a τ² beyond the reach."""
    value, magnitude = tl.zeros((POINTS,), tl.float64), tl.zeros((POINTS,), tl.float64)
    beyond = tl.zeros((POINTS,), tl.float64)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        index = tile.to(tl.int64) * POINTS + tl.arange(0, POINTS)
        here = index < rows
        theta = tl.load(THETA + index, mask=here, other=0.0)
        y = tl.load(Y + index, mask=here, other=0.0).to(tl.float64)
        c = tl.load(C + index, mask=here, other=0.0) if WEIGHT else here.to(tl.float64)
        if OFFSET:
            theta += tl.load(O + index, mask=here, other=0.0)
        v = tl.zeros_like(theta)
        if KIND == "heat":
            v = tl.load(TAU2 + index, mask=here, other=0.0)
            beyond += tl.where(v <= reach, 0.0, 1.0)
            magnitude += c * (tl.abs(theta) + tl.sqrt(v) + 1.0)
        eta, g, h = moments(theta, v, KIND, ORDER)
        value += c * (y * theta - eta)
        tl.store(G + index, c * (y - g), mask=here)
        tl.store(H + index, c * h, mask=here)
    out = OUT + tl.program_id(0) * width
    tl.store(out, tl.sum(value, 0))
    tl.store(out + 1, tl.sum(magnitude, 0))
    tl.store(out + 2, tl.sum(beyond, 0))


@triton.jit
def gather_kernel(
    X, G, H, OUT,
    rows, stride, tiles,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    GRAM: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Aᵀ c(y - g) and Aᵀ diag(c h) A of the rows of this program."""
    column, row = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    light = tl.float32 if SINGLE else tl.float64
    slope, curvature = tl.zeros((ROWS, WIDTH), tl.float64), tl.zeros((WIDTH, WIDTH), tl.float64)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        index = tile.to(tl.int64) * ROWS + row
        x = read_tile(X, index, column, rows, stride, COLUMNS, SIZE)
        slope += x.to(tl.float64) * tl.load(G + index, mask=index < rows, other=0.0)[:, None]
        if GRAM:
            h = tl.load(H + index, mask=index < rows, other=0.0).to(light)
            weighted = x.to(light) * h[:, None]
            part = tl.dot(tl.trans(weighted), x.to(light), input_precision="ieee", out_dtype=light)
            curvature += part.to(tl.float64)
    out = OUT + tl.program_id(0) * (HEAD + WIDTH + WIDTH * WIDTH) + HEAD
    tl.store(out + column, tl.sum(slope, 0))
    tl.store(out + WIDTH + column[:, None] * WIDTH + column[None, :], curvature)


@cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


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
    single: bool,
) -> list[Tensor]:
    """Value, magnitude, number of rows beyond the reach, gradient and curvature, on the host by one copy."""
    rows, columns = matrix.shape
    width = max(16, triton.next_power_of_2(size))
    tile, warps, per_unit = TILES[width > 16]
    tiles, point_tiles = triton.cdiv(rows, tile), triton.cdiv(rows, POINTS)
    programs = max(1, min(tiles, per_unit * multiprocessors(matrix.device)))
    theta, tau2, g, h = mean.new_empty(4, triton.cdiv(rows, 16) * 16).unbind()  # aligned
    sums = mean.new_empty(programs, HEAD.value + width + width * width)
    latent_kernel[(programs,)](
        matrix, mean, factor, theta, tau2, rows, matrix.stride(0), tiles,
        columns, size, width, tile, kind == "heat", single, num_warps=warps,
    )  # fmt: skip
    moments_kernel[(programs,)](
        theta, tau2, label, offset, weight, g, h, sums, rows, point_tiles, sums.shape[1], reach,
        POINTS, order, kind, offset is not None, weight is not None, num_warps=POINT_WARPS,
    )  # fmt: skip
    gather_kernel[(programs,)](
        matrix, g, h, sums, rows, matrix.stride(0), tiles,
        columns, size, width, tile, gram, single, num_warps=warps,
    )  # fmt: skip
    scalars, slope, curvature = sums.sum(0).cpu().split([HEAD.value, width, width * width])
    return [
        *scalars[:3].unbind(),
        slope[:size],
        curvature.reshape(width, width)[:size, :size] if gram else curvature[:0],
    ]
