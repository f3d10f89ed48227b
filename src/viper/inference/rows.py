"""Where rows come from: blocks of the design matrix with labels, and the sources that provide them.

Observation i sees f_i ~ N(ϑ_i, τ_i²) with ϑ = o + Aμ and τ² = r + diag(AΣAᵀ), where q(w) = N(μ, Σ). The objective is

    F(q) = Σ_i c_i (y_i ϑ_i - η(ϑ_i, τ_i²)) - KL(q ‖ p),     p = N(m₀, S₀),

and a step needs only sums over rows: of F's terms, of Aᵀ c(y - g) and of Aᵀ diag(c h) A. A source adds them up over
its blocks, whatever these are: arrays in memory, features computed on the fly, files, or partitions on a cluster.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import scipy.sparse
import torch
from scipy.linalg.blas import dtrmm, strmm
from torch import Tensor

from viper.inference.device import SMALLEST_SAMPLE, prefetched, reduce_on_device
from viper.inference.threads import PASS_THREADS


class Matrix(Protocol):
    """A block of the design matrix A (rows × dimension), dense or sparse."""

    def project(self, vector: Tensor) -> Tensor:
        """A v."""

    def spread(self, factor: Tensor) -> Tensor:
        """diag(A F Fᵀ Aᵀ), or `spread_apart` when `factor` is a vector of variances."""

    def pull(self, vector: Tensor) -> Tensor:
        """Aᵀ r."""

    def gram(self, weights: Tensor) -> Tensor:
        """Aᵀ diag(w) A."""

    def spread_apart(self, variances: Tensor) -> Tensor:
        """Σ_j A_ij² v_j, for a vector of variances or the columns of a matrix."""

    def gram_diagonal(self, weights: Tensor) -> Tensor:
        """The diagonal of Aᵀ diag(w) A, for a vector of weights or the columns of a matrix."""

    def gram_product(self, weights: Tensor, vector: Tensor) -> Tensor:
        """Aᵀ diag(w) A v, for a vector or the columns of a matrix."""

    def peaks(self) -> Tensor:
        """The largest |A_ij| of each column."""

    def outer(self, variances: Tensor) -> Tensor:
        """A diag(v) Aᵀ."""

    def single(self) -> "Matrix":
        """Return the block in float32 if that is cheaper, otherwise unchanged."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices; on a CPU by NumPy, whose BLAS is up to seven times faster for tall thin matrices."""
    if left.device.type != "cpu":
        return left @ right
    with np.errstate(all="ignore"):  # an overflow shows up in F
        return torch.from_numpy(np.matmul(left.numpy(), right.numpy()))


def bordered(inner: Tensor, border: Tensor) -> Tensor:
    """[[G, b], [bᵀ, c]] from G and (b, c)."""
    return torch.cat([torch.cat([inner, border[None, :-1]]), border[:, None]], 1)


@dataclass(frozen=True)
class Dense:
    """A dense block [X, 1] or X. Products are computed in its own precision and returned in that of the argument.

    The intercept is the last coordinate; its column of ones is not stored.
    """

    matrix: Tensor
    intercept: bool = False

    def project(self, vector: Tensor) -> Tensor:
        inner = vector.to(self.matrix)
        if self.intercept:
            return product(self.matrix, inner[:-1]).add_(inner[-1]).to(vector)
        return product(self.matrix, inner).to(vector)

    def spread(self, factor: Tensor) -> Tensor:
        if factor.ndim == 1:
            return self.spread_apart(factor)
        if self.is_large(factor) and not bool(factor.tril(-1).any()):
            return self.triangular_spread(factor)
        return torch.linalg.vector_norm(self.project(factor.to(self.matrix)), dim=1).square_().to(factor)

    def spread_apart(self, variances: Tensor) -> Tensor:
        return torch.cat([part.squared().project(variances) for part in self.parts()])

    def triangular_spread(self, factor: Tensor) -> Tensor:
        """diag(A F Fᵀ Aᵀ) for an upper triangular F, in half the operations."""
        X, F = self.matrix.numpy(), factor.to(self.matrix).numpy()
        width, multiply = X.shape[1], dtrmm if self.matrix.dtype == torch.float64 else strmm
        inner = multiply(1.0, F[:width, :width].T, X.T, lower=1)  # FᵀXᵀ
        total = np.einsum("ij,ij->j", inner, inner)
        if self.intercept:
            total += np.square(X @ F[:width, width] + F[width, width])
        return torch.from_numpy(total).to(factor)

    def is_large(self, factor: Tensor) -> bool:
        """Return whether a product with a factor of Σ is worth a call to BLAS of its own."""
        known = self.matrix.device.type == "cpu" and self.matrix.dtype in (torch.float32, torch.float64)
        return known and len(factor) >= LEAST_TRIANGULAR and len(self.matrix) > 0

    def pull(self, vector: Tensor) -> Tensor:
        below = product(self.matrix.T, vector.to(self.matrix)).to(vector)
        return torch.cat([below, vector.sum(0, keepdim=True)]) if self.intercept else below

    def gram(self, weights: Tensor) -> Tensor:
        inner = self.inner_gram(weights.to(self.matrix)).to(weights)
        if not self.intercept:
            return inner
        return bordered(inner, self.pull(weights))

    def inner_gram(self, weights: Tensor) -> Tensor:
        """Xᵀ diag(w) X; with w >= 0 as BᵀB, B = diag(√w) X, for which NumPy does half the operations."""
        if self.matrix.shape[1] < LEAST_TRIANGULAR or not bool((weights >= 0.0).all()):
            return product((self.matrix * weights[:, None]).T, self.matrix)
        scaled = self.matrix * weights.sqrt()[:, None]
        return product(scaled.T, scaled)

    def gram_diagonal(self, weights: Tensor) -> Tensor:
        pairs = zip(self.parts(), weights.split(self.part_rows), strict=True)
        return add_up([part.squared().pull(some)] for part, some in pairs)[0]

    def gram_product(self, weights: Tensor, vector: Tensor) -> Tensor:
        if vector.ndim == 2:
            return self.pull(weights[:, None] * self.project(vector))
        if self.matrix.device.type != "cpu" or self.matrix.dtype != vector.dtype:
            return self.pull(weights * self.project(vector))
        X, w, v = self.matrix.numpy(), weights.numpy(), vector.numpy()
        total, columns = np.zeros(len(v)), X.shape[1]
        for start in range(0, len(X), self.part_rows):
            part = X[start : start + self.part_rows]
            inner = part @ v[:columns]
            if self.intercept:
                inner += v[columns]
            inner *= w[start : start + self.part_rows]
            total[:columns] += inner @ part
            total[columns:] += inner.sum()
        return torch.from_numpy(total)

    @property
    def part_rows(self) -> int:
        """Rows that stay in the cache between two products, or all rows on another device."""
        if self.matrix.device.type != "cpu":
            return max(1, len(self.matrix))
        return max(1, CACHED_ENTRIES // max(1, self.matrix.shape[1]))

    def parts(self) -> "Iterator[Dense]":
        return (Dense(part, self.intercept) for part in self.matrix.split(self.part_rows))

    def squared(self) -> "Dense":
        return Dense(self.matrix.square(), self.intercept)

    def peaks(self) -> Tensor:
        found = self.matrix.abs().amax(0).double()
        return torch.cat([found, torch.ones_like(found[:1])]) if self.intercept else found

    def outer(self, variances: Tensor) -> Tensor:
        inner = variances[: self.matrix.shape[1]].to(self.matrix)
        scaled = self.matrix * inner.sqrt()
        found = product(scaled, scaled.T).to(variances)
        return found.add_(variances[-1]) if self.intercept else found

    def single(self) -> "Dense":
        return self.in_float32

    @cached_property
    def in_float32(self) -> "Dense":
        return Dense(self.matrix.float(), self.intercept)


@dataclass(frozen=True)
class Sparse:
    """A SciPy CSR block [X, 1] or X; only `gram` (dimension²) and a full `spread` (a few rows) create dense arrays."""

    matrix: Any
    intercept: bool = False

    def project(self, vector: Tensor) -> Tensor:
        return self.times(self.matrix, vector)

    def spread(self, factor: Tensor) -> Tensor:
        if factor.ndim == 1:
            return self.spread_apart(factor)
        return self.project(factor).square_().sum(1)

    def spread_apart(self, variances: Tensor) -> Tensor:
        return self.times(self.squared, variances)

    def pull(self, vector: Tensor) -> Tensor:
        return self.transposed_times(self.transposed, vector)

    def gram(self, weights: Tensor) -> Tensor:
        scaled = self.matrix.multiply(weights.numpy()[:, None]).tocsr()
        inner = torch.from_numpy((scaled.T @ self.matrix).toarray())
        return bordered(inner, self.pull(weights)) if self.intercept else inner

    def gram_diagonal(self, weights: Tensor) -> Tensor:
        return self.transposed_times(self.squared.T, weights)

    def gram_product(self, weights: Tensor, vector: Tensor) -> Tensor:
        return self.pull((weights[:, None] if vector.ndim == 2 else weights) * self.project(vector))

    def peaks(self) -> Tensor:
        found = torch.from_numpy(abs(self.matrix).max(0).toarray().ravel())
        return torch.cat([found, torch.ones_like(found[:1])]) if self.intercept else found

    def outer(self, variances: Tensor) -> Tensor:
        scaled = self.matrix.multiply(variances[: self.matrix.shape[1]].numpy()).tocsr()
        found = torch.from_numpy((scaled @ self.transposed).toarray())
        return found.add_(variances[-1]) if self.intercept else found

    def single(self) -> "Sparse":
        return self

    def times(self, matrix: Any, vector: Tensor) -> Tensor:
        """X v or X² v, plus the contribution of the column of ones."""
        if not self.intercept:
            return torch.from_numpy(matrix @ vector.numpy())
        return torch.from_numpy(matrix @ vector[:-1].numpy()).add_(vector[-1])

    def transposed_times(self, matrix: Any, vector: Tensor) -> Tensor:
        below = torch.from_numpy(matrix @ vector.numpy())
        return torch.cat([below, vector.sum(0, keepdim=True)]) if self.intercept else below

    @cached_property
    def transposed(self) -> Any:
        """Xᵀ, with the same arrays."""
        return self.matrix.T

    @cached_property
    def squared(self) -> Any:
        """X with its entries squared; the indices are shared."""
        X = self.matrix
        return type(X)((np.square(X.data), X.indices, X.indptr), shape=X.shape, copy=False)


@dataclass(frozen=True)
class Block:
    """Some rows: design A, labels y in [0, 1], and optionally offset o, residual variance r and weights c."""

    design: Matrix
    label: Tensor
    offset: Tensor | None = field(default=None, kw_only=True)
    residual: Tensor | None = field(default=None, kw_only=True)
    weight: Tensor | None = field(default=None, kw_only=True)

    def pieces(self, rows: int) -> Iterator["Block"]:
        """The same rows in blocks of at most `rows`, with labels as float64."""
        assert isinstance(self.design, Dense)
        for start in range(0, len(self.label), rows):
            part = slice(start, start + rows)
            given = {one.name: getattr(self, one.name) for one in fields(self)[1:]}
            vectors: dict[str, Any] = {
                name: None if x is None else x[part].to(torch.float64) for name, x in given.items()
            }
            yield Block(Dense(self.design.matrix[part], self.design.intercept), **vectors)


Gram = Literal["full", "diagonal", "none"]  # how much of the curvature Aᵀ diag(c h) A a pass adds up
Mapped = TypeVar("Mapped")
RowFunction = partial[list[Tensor]]  # takes a block; a source may move the tensors among its keywords to another device


class LongRowFunction(partial[list[Tensor]]):
    """A row function that takes blocks of any length, with labels as they are stored."""


PLACES = ("memory", "stream", "cluster")


@dataclass(frozen=True)
class SourceTraits:
    """What is known about a source before its first pass."""

    where: Literal["memory", "stream", "cluster"] = "memory"
    smallest_sample: int = 0  # rows below which a pass costs only its kernel launch; 0 on a CPU
    float32_pays: bool = True  # whether products are faster in float32, conversion included
    sparse: bool = False  # whether most entries are zeros that are not stored
    labels: int = 0  # columns of y, if it is a matrix of zeros and ones


class RowSource(Protocol):
    """Where rows come from. The results do not depend on where the rows are stored."""

    @property
    def rows(self) -> int: ...

    @property
    def dimension(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def traits(self) -> SourceTraits: ...

    def reduce(self, function: RowFunction) -> list[Tensor]:
        """Make one pass: return the sum of the function's results over all blocks."""

    def map(self, function: Callable[[Block], Mapped]) -> Iterator[Mapped]:
        """Yield the function's result for each block, in the order of the rows."""

    def apply(self, function: Callable[[Block], np.ndarray]) -> Any:
        """Return the results as one array, for a function with one entry per row; lazy for a Dask collection."""

    def sample(self, k: int, generator: np.random.Generator) -> "RowSource":
        """Return about k random rows."""

    def in_memory(self) -> "Arrays":
        """Return all rows as arrays in this process."""

    def head(self) -> Block:
        """Return a fixed selection of rows that identifies the source."""

    def observe(self, callback: Callable[[int], None]) -> None:
        """Call back with the number of rows whenever some have been read, if reading is slow."""

    def release(self) -> None:
        """Forget rows that were kept because they are slow to read; later passes read them again."""


class BlockSource:
    """A source that yields its blocks one after the other, in this process."""

    @property
    def traits(self) -> SourceTraits:
        return SourceTraits()

    def blocks(self) -> Iterator[Block]:
        raise NotImplementedError

    def reduce(self, function: RowFunction) -> list[Tensor]:
        return add_up(map(function, self.blocks()))

    def map(self, function: Callable[[Block], Mapped]) -> Iterator[Mapped]:
        return map(function, self.blocks())

    def apply(self, function: Callable[[Block], np.ndarray]) -> Any:
        return concatenated(self.map(function))

    def in_memory(self) -> "Arrays":
        return join_blocks(list(self.blocks()))

    def sample(self, k: int, generator: np.random.Generator) -> RowSource:
        return self.in_memory().sample(k, generator)

    def head(self) -> Block:
        return next(self.blocks())

    def observe(self, callback: Callable[[int], None]) -> None:
        """Do nothing: rows in memory need no progress report."""

    def release(self) -> None:
        """Do nothing: rows in memory belong to the user."""


class SourceWrapper:
    """Wraps another source and delegates everything except `reduce` and `sample`, which every wrapper defines."""

    source: RowSource

    @property
    def rows(self) -> int:
        return self.source.rows

    @property
    def dimension(self) -> int:
        return self.source.dimension

    @property
    def device(self) -> torch.device:
        return self.source.device

    @property
    def traits(self) -> SourceTraits:
        return self.source.traits

    def map(self, function: Callable[[Block], Mapped]) -> Iterator[Mapped]:
        return self.source.map(function)

    def apply(self, function: Callable[[Block], np.ndarray]) -> Any:
        return self.source.apply(function)

    def in_memory(self) -> "Arrays":
        return self.source.in_memory()

    def head(self) -> Block:
        return self.source.head()

    def observe(self, callback: Callable[[int], None]) -> None:
        self.source.observe(callback)

    def release(self) -> None:
        self.source.release()


@dataclass(frozen=True)
class JoinedSource:
    """The rows of two sources, the first before the second, wherever each is kept."""

    first: RowSource
    second: RowSource

    @property
    def rows(self) -> int:
        return self.first.rows + self.second.rows

    @property
    def dimension(self) -> int:
        return self.first.dimension

    @property
    def device(self) -> torch.device:
        return self.first.device

    @property
    def traits(self) -> SourceTraits:
        """The traits of the source that is farther away."""
        return max((self.first.traits, self.second.traits), key=lambda traits: PLACES.index(traits.where))

    def reduce(self, function: RowFunction) -> list[Tensor]:
        return add_up(source.reduce(function) for source in (self.first, self.second))

    def map(self, function: Callable[[Block], Mapped]) -> Iterator[Mapped]:
        for source in (self.first, self.second):
            yield from source.map(function)

    def apply(self, function: Callable[[Block], np.ndarray]) -> Any:
        return concatenated(source.apply(function) for source in (self.first, self.second))

    def sample(self, k: int, generator: np.random.Generator) -> RowSource:
        share = min(self.first.rows, max(1, round(k * self.first.rows / self.rows)))
        rest = min(self.second.rows, max(1, k - share))
        return joined_rows(self.first.sample(share, generator), self.second.sample(rest, generator))

    def in_memory(self) -> "Arrays":
        return join_arrays(self.first.in_memory(), self.second.in_memory())

    def head(self) -> Block:
        return self.first.head()

    def observe(self, callback: Callable[[int], None]) -> None:
        for source in (self.first, self.second):
            source.observe(callback)

    def release(self) -> None:
        for source in (self.first, self.second):
            source.release()


def joined_rows(first: RowSource, second: RowSource) -> RowSource:
    """The rows of two sources; arrays in memory become one."""
    both = JoinedSource(first, second)
    return both.in_memory() if both.traits.where == "memory" else both


def join_arrays(first: "Arrays", second: "Arrays") -> "Arrays":
    """The rows of both as dense arrays. If only one has offsets or weights, those of the other are 0 or 1."""

    def together(name: str, missing: float) -> Tensor | None:
        parts = [getattr(rows, name) for rows in (first, second)]
        if parts == [None, None]:
            return None
        full = [torch.full_like(rows.label, missing, dtype=torch.float64) for rows in (first, second)]
        return torch.cat([other if x is None else x.to(other) for x, other in zip(parts, full, strict=True)])

    return Arrays(
        torch.cat([first.dense_design(), second.dense_design().to(first.device)]),
        torch.cat([first.label, second.label.to(first.label)]),
        offset=together("offset", 0.0),
        residual=together("residual", 0.0),
        weight=together("weight", 1.0),
        device=first.device,
        block_rows=first.block_rows,
    )


def add_up(parts: Iterable[list[Tensor]]) -> list[Tensor]:
    """The sums of the first entries, of the second, ...; the tensors of the first part are overwritten."""
    totals: list[Tensor] = []
    for part in parts:
        if not totals:
            totals = part
            continue
        for total, more in zip(totals, part, strict=True):
            total.add_(more)
    return totals


def light_designs(source: RowSource) -> list[Matrix] | None:
    """Return the blocks of A for products that need only a few digits: sparse or in float32, if that saves time."""
    if source.traits.where != "memory" or source.device.type != "cpu":
        return None
    if not source.traits.sparse and not SMALLEST_LIGHT <= source.rows * source.dimension <= LARGEST_LIGHT:
        return None
    return list(source.map(lambda block: block.design.single()))


def reported_sum(
    source: RowSource,
    function: "partial[list[Tensor]]",
    zero: Tensor,
    report: Callable[[int, int], None] | None,
) -> Tensor:
    """`source.reduce(function)[0]`. `report` is called with rows done and all rows, except while a cluster adds up."""
    if report is None or source.traits.where == "cluster":
        return source.reduce(function)[0]
    total, done = zero, 0
    for part, rows in source.map(lambda block: (function(block)[0], len(block.label))):
        total, done = total + part.to(total.device), done + rows
        report(done, source.rows)
    return total


def concatenated(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Return the parts as one array."""
    found = list(parts)
    if not found:
        raise ValueError("there must be at least one row to predict; got none.")
    return found[0] if len(found) == 1 else np.concatenate(found)


LEAST_TRIANGULAR = 257  # dimension from which halving the operations of a triangular or symmetric product pays
CACHED_ENTRIES = 1 << 18  # entries (2 MB) of a dense part that is read twice, the second time from the cache
BLOCK_ROWS = 16384  # few enough that a block and its features stay in the cache
LONG_PASS = 1 << 33  # products in a call to the compiled pass, which cannot be interrupted: about a second
SMALLEST_LIGHT = 1 << 14  # entries (128 kB), below which the cache has room for float64
LARGEST_LIGHT = 1 << 23  # entries of a copy in float32 (32 MB), so that products read it from the cache
ENTRIES_OF_THREAD = 1 << 19  # chosen entries that a thread takes: about half a millisecond
KEPT_ENTRIES = 1 << 19  # entries (4 MB) up to which a single block is kept, with everything derived from it


CPU = torch.device("cpu")
GOLDEN = 0.5 * (5.0**0.5 - 1.0)


def scattered(rows: int, k: int, generator: np.random.Generator, device: torch.device = CPU) -> Tensor:
    """Return k of the rows in order, one from each of k equal runs, at position u + i φ mod 1 within the i-th run.

    Multiples of the golden ratio φ are spread evenly and never in step with the data, so that sorted or periodic files
    cause no bias. The choice is the same wherever it is computed.
    """
    i = torch.arange(k, dtype=torch.float64, device=device)
    place = (i * GOLDEN + generator.random()).frac()
    return ((i + place) * (rows / k)).floor_().long().clamp_(max=rows - 1)


def traits_on(device: torch.device, rows: int, where: Literal["memory", "stream"]) -> SourceTraits:
    """Return the traits of rows that are processed on `device`."""
    if device.type == "cpu":
        return SourceTraits(where)
    least = SMALLEST_SAMPLE
    return SourceTraits(where, 0 if rows < least else least, float32_pays=False)


@dataclass(frozen=True)
class Arrays(BlockSource):
    """Rows held in arrays: X (NumPy, torch or SciPy CSR), labels, and optional offset, residual variance and weights.

    X is only ever copied one block at a time. `dtype` is the precision of products with X; everything else is float64.
    A CUDA device holds everything, except that an X too large for it stays in host memory.
    """

    features: Any
    label: Tensor
    intercept: bool = field(default=False, kw_only=True)
    offset: Tensor | None = field(default=None, kw_only=True)
    residual: Tensor | None = field(default=None, kw_only=True)
    weight: Tensor | None = field(default=None, kw_only=True)
    device: torch.device = field(default=CPU, kw_only=True)
    dtype: torch.dtype = field(default=torch.float64, kw_only=True)
    block_rows: int = field(default=BLOCK_ROWS, kw_only=True)

    @property
    def rows(self) -> int:
        return int(self.features.shape[0])

    @property
    def dimension(self) -> int:
        return int(self.features.shape[1]) + int(self.intercept)

    @cached_property
    def traits(self) -> SourceTraits:
        labels = self.label.shape[1] if self.label.ndim == 2 else 0
        sparse = scipy.sparse.issparse(self.features)
        return replace(traits_on(self.device, self.rows, "memory"), sparse=sparse, labels=labels)

    def in_memory(self) -> "Arrays":
        return self

    def blocks(self) -> Iterator[Block]:
        return self.cut() if self.only_block is None else iter([self.only_block])

    @cached_property
    def only_block(self) -> Block | None:
        """All rows as one block for all passes, if it is small or already on the device; otherwise None."""
        if not 0 < self.rows <= self.block_rows:
            return None
        if hasattr(self.features, "tocsr"):
            return next(self.cut()) if self.features.nnz <= KEPT_ENTRIES else None
        there = isinstance(self.features, Tensor) and self.features.is_cuda and self.features.dtype == self.dtype
        small = self.device.type == "cpu" and self.rows * self.dimension <= KEPT_ENTRIES
        return next(self.cut()) if there or small else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, without cached values derived from them."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def cut(self) -> Iterator[Block]:
        """The rows in blocks of `block_rows`."""
        X, starts = self.features, range(0, self.rows, self.block_rows)
        parts = [slice(start, min(start + self.block_rows, self.rows)) for start in starts]
        elsewhere = isinstance(X, Tensor) and X.device != self.device
        pieces = prefetched(X, parts, self.dtype, self.device) if elsewhere else (rows_of(X, part) for part in parts)
        for part, piece in zip(parts, pieces, strict=True):
            sparse = hasattr(piece, "tocsr")
            design = (Sparse if sparse else Dense)(
                piece if sparse else torch.as_tensor(piece, dtype=self.dtype), self.intercept
            )
            vectors = {name: x[part].to(self.device, torch.float64) for name, x in self.vectors().items()}
            yield Block(design, **vectors)

    def long_blocks(self) -> Iterator[Block]:
        """The rows in views that take about a second each, or in blocks if they must be copied."""
        X = self.features
        if self.rows <= self.block_rows or not isinstance(X, Tensor) or X.dtype != self.dtype:
            yield from self.blocks()
            return
        step = self.block_rows * max(1, LONG_PASS // (self.block_rows * self.dimension * (self.dimension + 32)))
        for start in range(0, self.rows, step):
            part = slice(start, start + step)
            yield Block(Dense(X[part], self.intercept), **{name: x[part] for name, x in self.vectors().items()})

    def reduce(self, function: RowFunction) -> list[Tensor]:
        if self.device.type == "cpu":
            long = isinstance(function, LongRowFunction)
            return add_up(map(function, self.long_blocks() if long else self.blocks()))

        def in_blocks_of(rows: int) -> Iterator[Block]:
            return (self if rows == self.block_rows else replace(self, block_rows=rows)).blocks()

        return reduce_on_device(in_blocks_of, function, self.block_rows, self.device)

    def vectors(self) -> dict[str, Tensor]:
        """Return the labels and, if present, offset, residual variance and weights."""
        given = {"label": self.label, "offset": self.offset, "residual": self.residual, "weight": self.weight}
        return {name: x for name, x in given.items() if x is not None}

    def dense_design(self) -> Tensor:
        """Return all rows of A as one dense matrix, for problems with few rows."""
        X = self.features
        X = torch.as_tensor(X.toarray() if scipy.sparse.issparse(X) else X, dtype=torch.float64, device=self.device)
        return torch.cat([X, torch.ones_like(X[:, :1])], 1) if self.intercept else X

    def sample(self, k: int, generator: np.random.Generator) -> "Arrays":
        """Return a copy of the k rows that `scattered` chooses."""
        return self.take(scattered(self.rows, k, generator, self.device))

    def take(self, index: Tensor) -> "Arrays":
        """Return a copy of the chosen rows."""
        vectors: dict[str, Any] = {name: x[index.to(x.device)] for name, x in self.vectors().items()}
        X = self.features
        if not isinstance(X, Tensor):
            features = X[index.cpu().numpy()]
        elif X.stride(0) == 1:  # stored by columns
            features = X.T.index_select(1, index.to(X.device)).T
        else:
            features = fetched_rows(X, index)
        return replace(self, features=features, **vectors)


def fetched_rows(X: Tensor, index: Tensor) -> Tensor:
    """X[index]. The rows are far apart, and nearly all of the time is spent waiting for memory, which threads share."""
    threads = min(PASS_THREADS.get(), 1 + len(index) * X.shape[1] // ENTRIES_OF_THREAD)
    if threads == 1 or X.device.type != "cpu" or not X.is_contiguous():
        return X.index_select(0, index.to(X.device))
    out = X.new_empty(len(index), X.shape[1])

    def fetch(places: Tensor, into: Tensor) -> None:
        np.take(X.numpy(), places.numpy(), 0, into.numpy(), "clip")  # without "clip" NumPy would copy once more

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fetch, index.tensor_split(threads), out.tensor_split(threads)))
    return out


def rows_of(X: Any, part: slice) -> Any:
    """Return some rows of X without a copy; SciPy would copy those of a CSR matrix."""
    if not scipy.sparse.issparse(X) or X.format != "csr":
        return X[part]
    bounds = X.indptr[part.start : part.stop + 1]
    entries = slice(bounds[0], bounds[-1])
    rows = type(X)((part.stop - part.start, X.shape[1]), dtype=X.dtype)
    rows.data, rows.indices, rows.indptr = X.data[entries], X.indices[entries], bounds - bounds[0]
    return rows


def join_blocks(blocks: list[Block]) -> Arrays:
    """Return the rows of several blocks as arrays."""
    designs: list[Any] = [block.design for block in blocks]
    matrices = [design.matrix for design in designs]
    sparse = scipy.sparse.issparse(matrices[0])
    vectors: dict[str, Any] = {
        name: torch.cat([getattr(block, name) for block in blocks])
        for name in ("label", "offset", "residual", "weight")
        if getattr(blocks[0], name) is not None
    }
    return Arrays(
        scipy.sparse.vstack(matrices, "csr") if sparse else torch.cat(matrices),
        intercept=designs[0].intercept,
        device=blocks[0].label.device,
        **vectors,
    )
