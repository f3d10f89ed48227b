"""A block's sums on a CUDA device, in Triton; symbols as in sums.py.

With few columns one kernel does everything: a thread holds a row, X is read once, and nothing is written per row. With
many columns three kernels share the work: X is read twice, and ϑ, τ², c(y - g) and c h are written per row. A single
kernel would be slower there, because all threads that share a row would repeat what follows the sum over columns. A
tile is a group of rows, padded to `WIDTH` columns. The column of ones of an intercept is generated, not read.
"""

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from viper.inference.rows import Block, Dense, Gram
from viper.softplus.limit import EVEN, MOST_ORDER, ODD
from viper.softplus.pointwise import KernelRecipe

MOST_NARROW = 10  # columns: one thread can hold their curvature matrix


def launch(
    block: Block, recipe: KernelRecipe, mean: Tensor, factor: Tensor | None, gram: Gram, single: bool
) -> list[Tensor] | None:
    """Return value, magnitude, gradient and curvature on the host; None if a variance exceeds the recipe's range.

    With an intercept, `mean` has one more entry than the matrix has columns. Each program adds up its share of the rows
    in a fixed order, so results repeat to the last bit.
    """
    assert isinstance(block.design, Dense)
    matrix, factor, wanted = block.design.matrix, square(factor), gram != "none"
    with torch.cuda.device(matrix.device):  # Triton launches on the current device
        if len(mean) <= MOST_NARROW:
            value, magnitude, beyond, slope, curvature = launch_narrow(matrix, block, recipe, mean, factor, wanted)
        else:
            value, magnitude, beyond, slope, curvature = launch_wide(
                matrix, block, recipe, mean, factor, wanted, single
            )
    if gram == "diagonal":
        curvature = curvature.diagonal()
    return None if recipe.kind == "heat" and float(beyond) else [value, magnitude, slope, curvature]


def square(factor: Tensor | None) -> Tensor | None:
    """Return F as a matrix, also for the diagonal family, which stores variances."""
    return factor if factor is None or factor.ndim == 2 else torch.diag(factor.sqrt())


def heat_table() -> tuple[float, ...]:
    """Coefficients of v^m q^i in what the expansion adds to η/q and to g/(q(1-2s)), then those in h/q."""
    table = []
    for rows in ([(), *EVEN[:MOST_ORDER]], [(), *ODD[:MOST_ORDER]], EVEN[: MOST_ORDER + 1]):
        for m, row in enumerate(rows):
            padding = MOST_ORDER + 1 - len(row)
            table += [c / (2.0**m * math.factorial(m)) for c in row] + [0.0] * padding
    return tuple(table)


# constants of the kernels, because loads would take registers
ORDERS = tl.constexpr(MOST_ORDER + 1)
HEAT = tl.constexpr(heat_table())


@triton.jit
def heat_sums(q, v, ORDER: tl.constexpr):
    """Σ_m v^m Σ_i t_mi q^i for the three parts of the table, nested in q and then in v."""
    to_value, to_slope, to_curvature = 0.0 * q, 0.0 * q, 0.0 * q
    for m in tl.static_range(ORDER, -1, -1):
        E, D, B = 0.0 * q, 0.0 * q, 0.0 * q
        for i in tl.static_range(m, -1, -1):
            E = E * q + HEAT[m * ORDERS + i]
            D = D * q + HEAT[(ORDERS + m) * ORDERS + i]
            B = B * q + HEAT[(2 * ORDERS + m) * ORDERS + i]
        to_value, to_slope, to_curvature = to_value * v + E, to_slope * v + D, to_curvature * v + B
    return to_value, to_slope, to_curvature


@triton.jit
def moments(theta, v, KIND: tl.constexpr, ORDER: tl.constexpr):
    """η, g and h at ϑ and v = τ²."""
    # s, q = s(1-s) and log(1+e^-|ϑ|), at -|ϑ|
    e = tl.exp(-tl.abs(theta))
    s = e / (1.0 + e)
    q = s / (1.0 + e)
    eta, g, h = libdevice.log1p(e), s, q
    if KIND == "quarter":
        h = 0.25 + 0.0 * q
    if KIND == "heat":
        to_value, to_slope, to_curvature = heat_sums(q, v, ORDER)
        eta += q * to_value
        g += q * (1.0 - 2.0 * s) * to_slope
        h = q * to_curvature
    return eta + tl.maximum(theta, 0.0), tl.where(theta > 0.0, 1.0 - g, g), h


ROWS, WARPS = 128, 4  # rows and warps of a tile
# registers per thread and programs per multiprocessor, keyed by whether there are more than 8 columns: the fastest
# values tried on an H200
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
    """For this program's rows: value, magnitude, rows beyond the reach, gradient, lower triangle of the curvature."""
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
    """Add up the totals of all programs, one entry per program, and fill in the whole curvature matrix."""
    place = tl.program_id(0)
    i, j = (place - 3 - SIZE) // SIZE, (place - 3 - SIZE) % SIZE
    high, low = tl.maximum(i, j), tl.minimum(i, j)
    source = tl.where(place < 3 + SIZE, place, 3 + SIZE + high * (high + 1) // 2 + low)
    column = tl.arange(0, MOST)
    parts = tl.load(SUMS + source * programs + column, mask=column < programs, other=0.0)
    tl.store(TOTALS + place, tl.sum(parts, 0))


@cache
def cached_kernels(
    device: torch.device, features: torch.dtype, registers: int, width: int, *options: Any
) -> tuple[Any, Any]:
    """Return the two kernels for these options, looked up once: Triton's own lookup takes as long as a launch."""
    real, size = torch.float64, options[1]
    types = [features, *[real] * 6, *[1] * 4, 1.0]
    by_rows = narrow_kernel.warmup(*types, *options, grid=(1,), num_warps=WARPS, maxnreg=registers)
    return by_rows, total_kernel.warmup(real, real, 1, size, width, grid=(1,))


def launch_narrow(
    matrix: Tensor, block: Block, recipe: KernelRecipe, mean: Tensor, factor: Tensor | None, gram: bool
) -> list[Tensor]:
    """Value, magnitude, number of rows beyond the reach, gradient and curvature, on the host.

    Work that is not needed to start the first kernel is done while it runs.
    """
    device, (rows, columns), size = matrix.device, matrix.shape, len(mean)
    label, offset, weight = block.label, block.offset, block.weight
    kind, order, reach, _ = recipe
    registers, share = SHARES[size > 8]
    tiles, most = triton.cdiv(rows, ROWS), share * multiprocessors(device)
    programs, width = max(1, min(tiles, most)), triton.next_power_of_2(most)
    options = columns, size, ROWS, kind, order, offset is not None, weight is not None, gram
    by_rows, together = cached_kernels(device, matrix.dtype, registers, width, *options)
    sums = mean.new_empty(3 + size + gram * size * (size + 1) // 2, programs)
    by_rows[programs, 1, 1](
        matrix, mean, factor, label, offset, weight, sums, rows, matrix.stride(0), tiles, programs, reach, *options
    )
    entries = 3 + size + gram * size * size
    totals = torch.empty(entries, dtype=mean.dtype, pin_memory=True)  # so that the device can write to it
    together[entries, 1, 1](sums, totals, programs, size, width)
    scalars, slope, curvature = totals.split([3, size, entries - 3 - size])
    parts = [*scalars.unbind(), slope, curvature.view(size, size) if gram else curvature]
    torch.cuda.current_stream(device).synchronize()
    return parts


POINTS, POINT_WARPS = 512, 8  # rows of a tile of the elementwise kernel, and warps
HEAD = tl.constexpr(16)  # slots before the gradient: three are used, the others align what follows
# for the other two kernels: rows of a tile, warps, and programs per multiprocessor, keyed by whether there are more
# than 16 columns: the fastest values tried on an H200
TILES = {False: (16, 1, 16), True: (32, 1, 8)}
STAGES = 1  # tiles that are read ahead; with more, the products wait for registers


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
    """c(y - g) and c h of every row; for this program's rows, value, magnitude and the number beyond the reach."""
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
    """Aᵀ c(y - g) and Aᵀ diag(c h) A, for the rows of this program."""
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


def launch_wide(
    matrix: Tensor, block: Block, recipe: KernelRecipe, mean: Tensor, factor: Tensor | None, gram: bool, single: bool
) -> list[Tensor]:
    """Value, magnitude, number of rows beyond the reach, gradient and curvature, on the host by one copy."""
    (rows, columns), size = matrix.shape, len(mean)
    label, offset, weight = block.label, block.offset, block.weight
    kind, order, reach, _ = recipe
    width = max(16, triton.next_power_of_2(size))
    tile, warps, per_unit = TILES[width > 16]
    tiles, point_tiles = triton.cdiv(rows, tile), triton.cdiv(rows, POINTS)
    programs = max(1, min(tiles, per_unit * multiprocessors(matrix.device)))
    theta, tau2, g, h = mean.new_empty(4, triton.cdiv(rows, 16) * 16).unbind()  # aligned
    sums = mean.new_empty(programs, HEAD.value + width + width * width)
    latent_kernel[(programs,)](
        matrix, mean, factor, theta, tau2, rows, matrix.stride(0), tiles,
        columns, size, width, tile, kind == "heat", single, num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    moments_kernel[(programs,)](
        theta, tau2, label, offset, weight, g, h, sums, rows, point_tiles, sums.shape[1], reach,
        POINTS, order, kind, offset is not None, weight is not None, num_warps=POINT_WARPS,
    )  # fmt: skip
    gather_kernel[(programs,)](
        matrix, g, h, sums, rows, matrix.stride(0), tiles,
        columns, size, width, tile, gram, single, num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    scalars, slope, curvature = sums.sum(0).cpu().split([HEAD.value, width, width * width])
    return [
        *scalars[:3].unbind(),
        slope[:size],
        curvature.reshape(width, width)[:size, :size] if gram else curvature[:0],
    ]
