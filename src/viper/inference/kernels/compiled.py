"""A block's sums in one pass in C; the plain formulas take fifty operations and store every intermediate array.

_rows.c is compiled when viper is installed. Without the library, or beyond the range of its nodes, the plain formulas
of sums.py are used. threads.py sets the number of threads that sum a long block; the result does not depend on it.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.inference.kernels.library import Library, library
from viper.inference.rows import Block, Dense, Gram, Matrix, Sparse
from viper.inference.threads import PASS_THREADS
from viper.softplus.limit import smallest_mixture
from viper.softplus.pointwise import KernelRecipe, Triple
from viper.softplus.quadrature import node_sets

MOST_COMPILED = 256  # columns; the d × d sums of each thread then still fit in the cache
MOST_DIAGONAL = 4096  # columns if no d × d matrix is involved; a tile of rows then still fits in the cache
PRODUCTS_PER_ENTRY = 8  # cost of an entry of X, moments included, if the curvature is not a matrix
WORK_OF_THREAD = 1 << 21  # products per thread, about 0.2 ms: below that, starting one takes longer than it saves
GRAMS = {"none": 0, "full": 1, "diagonal": 2}  # as in _rows.c
PAIRS_PER_NORMAL = 1.5  # pairs of nodes that take as long as one normal of a mixture
LEAST_WIDE = 64  # columns from which rows are read in place, without a transposition


def compiled_sums(
    block: Block,
    recipe: KernelRecipe,
    mean: Tensor,
    factor: Tensor | None,
    gram: Gram,
    single: bool,
    seen: list[tuple[Tensor, Tensor]] | None = None,
) -> list[Tensor] | None:
    """Return value, magnitude, gradient and curvature in float64; None without a library or beyond its range.

    With an intercept, `mean` has one more entry than the matrix has columns. Labels may be booleans. Other Python
    threads can run meanwhile. ϑ and τ² of the rows are appended to `seen`, if given.
    """
    functions = library()
    if functions is None:
        return None
    assert isinstance(block.design, Dense)
    matrix, d = block.design.matrix, len(mean)
    rows, columns = matrix.shape
    shape = {"none": (0,), "full": (d, d), "diagonal": (d,)}[gram]
    nodes, out = packed_nodes(recipe.nodes), np.zeros(2 + d + math.prod(shape))
    residual, factor = (block.residual, factor) if recipe.kind == "heat" else (None, None)
    by_factor, by_variances = (factor, None) if factor is None or factor.ndim == 2 else (None, factor)
    label, code = (None, block.label) if block.label.dtype == torch.bool else (block.label, None)
    vectors = label, code, block.offset, residual, block.weight, mean, by_factor, by_variances, nodes
    arrays = [None if x is None else in_order(x) for x in vectors]
    kept = [] if seen is None else [mean.new_empty(rows), mean.new_empty(rows)]
    places = [x.data_ptr() for x in kept] if kept else [None, None]
    threads = threads_for(rows * d * (d if gram == "full" else PRODUCTS_PER_ENTRY))
    failed = functions.row_sums(
        matrix.data_ptr(), rows, *matrix.stride(), columns, d,
        *[None if x is None else x.data_ptr() for x in arrays], len(nodes),
        recipe.kind == "quarter", GRAMS[gram], threads, *places, out.ctypes.data,
    )  # fmt: skip
    if failed:
        return None
    if seen is not None:
        seen.append((kept[0], kept[1]))
    parts = out[:1].reshape(()), out[1:2].reshape(()), out[2 : 2 + d], out[2 + d :].reshape(shape)
    return [torch.from_numpy(part) for part in parts]


def wide_latent(design: Matrix, mean: Tensor, variances: Tensor) -> tuple[Tensor, Tensor] | None:
    """ϑ = Aμ and τ² = Σ_j A_ij² v_j in one reading of A, or None if compiled code does not apply."""
    functions = library()
    if functions is not None and isinstance(design, Sparse) and (entries := csr_addresses(design.matrix)):
        rows, given = design.matrix.shape[0], pairs_of(mean, variances)
        theta, tau2 = (x.new_full((rows,), float(x[-1]) if design.intercept else 0.0) for x in (mean, variances))
        functions.sparse_latent(*entries, rows, given.data_ptr(), theta.data_ptr(), tau2.data_ptr())
        return theta, tau2
    if functions is None or not isinstance(design, Dense) or not is_wide(design.matrix):
        return None
    X, theta, tau2 = design.matrix, *mean.new_empty(2, len(design.matrix)).unbind()
    mean, variances = in_order(mean), in_order(variances)
    shape = X.data_ptr(), len(X), X.stride(0), X.shape[1], len(mean)
    failed = functions.wide_latent(*shape, mean.data_ptr(), variances.data_ptr(), theta.data_ptr(), tau2.data_ptr())
    return None if failed else (theta, tau2)


def wide_gather(design: Matrix, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor] | None:
    """Aᵀ g and the diagonal of Aᵀ diag(h) A in one reading of A, or None if compiled code does not apply."""
    functions = library()
    if functions is not None and isinstance(design, Sparse) and (entries := csr_addresses(design.matrix)):
        columns, g, h = design.matrix.shape[1], in_order(g), in_order(h)
        out = g.new_zeros(columns + design.intercept, 2)
        functions.sparse_gather(*entries, len(g), g.data_ptr(), h.data_ptr(), out.data_ptr())
        if design.intercept:
            out[columns, 0], out[columns, 1] = g.sum(), h.sum()
        slope, diagonal = out.T.contiguous()
        return slope, diagonal
    if functions is None or not isinstance(design, Dense) or not is_wide(design.matrix):
        return None
    X, size = design.matrix, design.matrix.shape[1] + design.intercept
    out, g, h = g.new_empty(2, size), in_order(g), in_order(h)
    shape = X.data_ptr(), len(X), X.stride(0), X.shape[1], size
    failed = functions.wide_gather(*shape, g.data_ptr(), h.data_ptr(), out.data_ptr())
    return None if failed else (out[0], out[1])


def wide_bend(design: Matrix, weights: Triple, u: Tensor, v: Tensor) -> Tensor | None:
    """(Aᵀ s, A²ᵀ t) with s = w₁ a + w₂ b and t = w₂ a + w₃ b of a = Au and b = A²v, where A² has the squares of A.

    A is read once; if it is in float32, the vectors are rounded to that. None if compiled code does not apply.
    """
    functions = library()
    rows = [in_order(w) for w in weights]
    addresses = [w.data_ptr() for w in rows]
    if functions is not None and isinstance(design, Sparse) and (entries := csr_addresses(design.matrix)):
        given, shape = pairs_of(u, v), design.matrix.shape
        out = torch.zeros_like(given)
        functions.sparse_bend(*entries, *shape, design.intercept, given.data_ptr(), *addresses, out.data_ptr())
        return out.T
    if functions is None or not isinstance(design, Dense) or not is_wide(design.matrix, single=True):
        return None
    X, out = design.matrix, u.new_zeros(2, len(u))
    u, v = u.to(X.dtype).contiguous(), v.to(X.dtype).contiguous()
    shape = X.dtype == torch.float32, len(X), X.stride(0), X.shape[1], len(u)
    threads = threads_for(PRODUCTS_PER_ENTRY * X.numel())
    failed = functions.wide_bend(X.data_ptr(), *shape, u.data_ptr(), v.data_ptr(), *addresses, threads, out.data_ptr())
    return None if failed else out


def threads_for(products: int) -> int:
    """Return how many threads should share this many products."""
    return min(PASS_THREADS.get(), 1 + products // WORK_OF_THREAD)


def moments_of_rows(theta: Tensor, tau2: Tensor, recipe: KernelRecipe | None) -> Triple | None:
    """η, g and h of each row, or None without a library or beyond its range."""
    functions = library_for_rows(theta, recipe)
    if functions is None or recipe is None:
        return None
    nodes = packed_nodes(recipe.nodes)
    return of_rows(functions.row_moments, theta, tau2, nodes, len(nodes))


def partials_of_rows(theta: Tensor, tau2: Tensor, recipe: KernelRecipe | None) -> Triple | None:
    """∂g/∂ϑ, ∂h/∂ϑ and ∂h/∂v of each row, by a mixture of normals, or None if compiled code does not apply."""
    functions = library_for_rows(theta, recipe)
    if functions is None or recipe is None or not len(normals := packed_mixture(recipe.nodes)):
        return None
    return of_rows(functions.row_bends, theta, tau2, normals, len(normals))


def of_rows(function: Callable[..., int], theta: Tensor, tau2: Tensor, table: Tensor, length: int) -> Triple | None:
    """Call a function that writes three numbers for each row."""
    theta, tau2 = in_order(theta), in_order(tau2)
    first, second, third = theta.new_empty(3, len(theta)).unbind()
    given = theta.data_ptr(), tau2.data_ptr(), len(theta), table.data_ptr(), length
    failed = function(*given, first.data_ptr(), second.data_ptr(), third.data_ptr())
    return None if failed else (first, second, third)


def library_for_rows(theta: Tensor, recipe: KernelRecipe | None) -> Library | None:
    """Return the library if it can compute the moments of these rows: on a CPU, in float64, with variances."""
    known = recipe is not None and recipe.kind == "heat" and theta.device.type == "cpu" and theta.dtype == torch.float64
    return library() if known and theta.ndim == 1 else None


def class_latent(design: Matrix, means: Tensor, factors: Tensor) -> tuple[Tensor, Tensor] | None:
    """ϑ (n, K) and τ² (n, K or 1) of several classes in one reading of A, or None if compiled code does not apply."""
    if (functions := library_for_classes(design, means)) is None:
        return None
    assert isinstance(design, Dense)
    X, means, factors = design.matrix, in_order(means), in_order(factors)
    theta, tau2 = means.new_empty(len(X), len(means)), means.new_empty(len(X), len(factors))
    counts = *means.shape[::-1], len(factors)
    addresses = [x.data_ptr() for x in (means, factors, theta, tau2)]
    failed = functions.class_latent(X.data_ptr(), len(X), *X.stride(), X.shape[1], *counts, *addresses)
    return None if failed else (theta, tau2)


def class_gather(design: Matrix, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor] | None:
    """Aᵀ g_k (K, d) and Aᵀ diag(h_k) A for the columns of g and h, or None if compiled code does not apply."""
    if (functions := library_for_classes(design, g)) is None:
        return None
    assert isinstance(design, Dense)
    X, g, h = design.matrix, in_order(g), in_order(h)
    size, classes, grams = X.shape[1] + design.intercept, g.shape[1], h.shape[1]
    slope, curvature = g.new_empty(classes, size), g.new_empty(grams, size, size)
    addresses = [x.data_ptr() for x in (g, h, slope, curvature)]
    failed = functions.class_gather(X.data_ptr(), len(X), *X.stride(), X.shape[1], size, classes, grams, *addresses)
    return None if failed else (slope, curvature)


def class_hessian(design: Matrix, vectors: Tensor, probability: Tensor, scale: Tensor) -> Tensor | None:
    """Aᵀ s (diag p - p pᵀ) A v (K, d) for rows with p (n, K) and s, or None if compiled code does not apply."""
    if (functions := library_for_classes(design, vectors)) is None:
        return None
    assert isinstance(design, Dense)
    X, vectors, probability, scale = design.matrix, in_order(vectors), in_order(probability), in_order(scale)
    out = torch.empty_like(vectors)
    addresses = [x.data_ptr() for x in (vectors, probability, scale, out)]
    failed = functions.class_hessian(X.data_ptr(), len(X), *X.stride(), X.shape[1], *vectors.shape[::-1], *addresses)
    return None if failed else out


def join_columns(columns: list[np.ndarray], out: np.ndarray) -> bool:
    """Copy columns into a matrix stored by rows, and return whether all entries are finite."""
    functions = library()
    if functions is not None and all(x.dtype == np.float64 and x.flags.c_contiguous for x in (out, *columns)):
        addresses = np.array([x.__array_interface__["data"][0] for x in columns], dtype=np.uintp)
        failed = functions.join_columns(addresses.ctypes.data, *out.shape, out.ctypes.data)
        if failed >= 0:
            return not failed
    with np.errstate(all="ignore"):
        np.stack(columns, 1, out=out, casting="unsafe")
        return bool(np.isfinite(out.sum()) or np.isfinite(out).all())


def library_for_classes(design: Matrix, other: Tensor) -> Library | None:
    """Return the library if it applies to these rows of several classes: dense, float64, with few columns."""
    if not isinstance(design, Dense) or design.matrix.device.type != "cpu" or other.device.type != "cpu":
        return None
    few = design.matrix.dtype == torch.float64 and design.matrix.shape[1] + design.intercept <= MOST_COMPILED
    return library() if few else None


def csr_addresses(X: Any) -> tuple[int, int, int] | None:
    """Return the addresses of entries, column indices and row starts, or None for types that the C code cannot read."""
    parts = ((X.data, np.float64), (X.indices, np.int32), (X.indptr, np.int32))
    if X.format != "csr" or any(x.dtype != kind or not x.flags.c_contiguous for x, kind in parts):
        return None
    first, second, third = (x.ctypes.data for x, _ in parts)
    return first, second, third


def pairs_of(first: Tensor, second: Tensor) -> Tensor:
    """Two vectors as the rows of an (n, 2) array."""
    return torch.stack([in_order(first), in_order(second)], 1)


def is_wide(X: Tensor, single: bool = False) -> bool:
    """Return whether rows are contiguous and long enough to be read in place; float32 counts only with `single`."""
    known = X.dtype == torch.float64 or (single and X.dtype == torch.float32)
    return X.device.type == "cpu" and known and X.stride(1) == 1 and X.shape[1] >= LEAST_WIDE


def in_order(x: Tensor) -> Tensor:
    """Return the array as the C code reads it: contiguous, and float64 unless it is boolean."""
    return (x if x.dtype in (torch.bool, torch.float64) else x.to(torch.float64)).contiguous()


@cache
def packed_nodes(tolerance: float) -> Tensor:
    """Return, for each set of nodes, its largest variance, the number of pairs, then z and weight of each pair.

    If a mixture of normals is as accurate, it comes last, serves all variances, and replaces longer sets.
    """
    normals = packed_mixture(tolerance)
    most = PAIRS_PER_NORMAL * len(normals) if len(normals) else math.inf
    sets = [s for s in node_sets(tolerance) if len(s.z) <= most]
    tables = [(s.reach, torch.stack([s.z, s.weights], 1)) for s in sets]
    tables += [(math.inf, normals)] if len(normals) else []
    return torch.cat([torch.cat([pairs.new_tensor([reach, len(pairs)]), pairs.ravel()]) for reach, pairs in tables])


@cache
def packed_mixture(tolerance: float) -> Tensor:
    """Return variance and weight of each normal of the mixture with this tolerance; empty if there is none."""
    table = smallest_mixture(tolerance)
    if table is None:
        return torch.empty(0, 2, dtype=torch.float64)
    return torch.tensor([table.variances, table.weights], dtype=torch.float64).T.contiguous()
