"""What is solved: rows, a Gaussian prior, and the sums over rows that every step needs.

Observation i sees f_i ~ N(ϑ_i, τ_i²) with ϑ = o + Aμ and τ² = r + diag(AΣAᵀ), where q(w) = N(μ, Σ). The objective is

    F(q) = Σ_i c_i (y_i ϑ_i - η(ϑ_i, τ_i²)) - KL(q ‖ p),     p = N(m₀, S₀),

and all a step needs of the data are sums over rows of F's terms, of Aᵀ c(y - g) and of Aᵀ diag(c h) A. A source adds
them up over its blocks, whatever these are: arrays in memory, features made on the fly, files, a cluster's partitions.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from viper.inference.device import SMALLEST_SUBSET, prefetched, reduce_on_device


class Matrix(Protocol):
    """A block of the design matrix A (rows × dimension), dense or sparse."""

    def project(self, vector: Tensor) -> Tensor:
        """A v."""

    def spread(self, factor: Tensor) -> Tensor:
        """diag(A F Fᵀ Aᵀ), or Σ_j A_ij² v_j when `factor` is a vector of variances v."""

    def pull(self, vector: Tensor) -> Tensor:
        """Aᵀ r."""

    def gram(self, weights: Tensor) -> Tensor:
        """Aᵀ diag(w) A."""

    def gram_diagonal(self, weights: Tensor) -> Tensor:
        """The diagonal of Aᵀ diag(w) A."""

    def single(self) -> "Matrix":
        """The same block in float32, where that is cheaper; else itself."""


def product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product; on a CPU through NumPy, whose BLAS takes tall thin matrices up to seven times faster."""
    if left.device.type != "cpu":
        return left @ right
    with np.errstate(all="ignore"):  # what overflows is seen in F
        return torch.from_numpy(np.matmul(left.numpy(), right.numpy()))


@dataclass(frozen=True)
class Dense:
    """A dense block [X, 1] or X; products are taken in its own precision and returned in that of the argument.

    The column of ones of an intercept, the last coordinate, need not be stored.
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
            squared = Dense(self.matrix.square(), self.intercept)
            return squared.project(factor)
        return torch.linalg.vector_norm(self.project(factor.to(self.matrix)), dim=1).square_().to(factor)

    def pull(self, vector: Tensor) -> Tensor:
        below = product(self.matrix.T, vector.to(self.matrix)).to(vector)
        return torch.cat([below, vector.sum(0, keepdim=True)]) if self.intercept else below

    def gram(self, weights: Tensor) -> Tensor:
        inner = product((self.matrix * weights.to(self.matrix)[:, None]).T, self.matrix).to(weights)
        if not self.intercept:
            return inner
        border = self.pull(weights)
        return torch.cat([torch.cat([inner, border[None, :-1]]), border[:, None]], 1)

    def gram_diagonal(self, weights: Tensor) -> Tensor:
        return Dense(self.matrix.square(), self.intercept).pull(weights)

    def single(self) -> "Dense":
        return self.in_float32

    @cached_property
    def in_float32(self) -> "Dense":
        return Dense(self.matrix.float(), self.intercept)


@dataclass(frozen=True)
class Sparse:
    """A SciPy CSR block; only `gram` and a full `spread` make anything dense, of size dimension² or a few rows."""

    matrix: Any

    def project(self, vector: Tensor) -> Tensor:
        return torch.from_numpy(self.matrix @ vector.numpy())

    def spread(self, factor: Tensor) -> Tensor:
        if factor.ndim == 1:
            return torch.from_numpy(self.matrix.power(2) @ factor.numpy())
        return torch.from_numpy(np.square(self.matrix @ factor.numpy()).sum(1))

    def pull(self, vector: Tensor) -> Tensor:
        return torch.from_numpy(self.matrix.T @ vector.numpy())

    def gram(self, weights: Tensor) -> Tensor:
        scaled = self.matrix.multiply(weights.numpy()[:, None]).tocsr()
        return torch.from_numpy((scaled.T @ self.matrix).toarray())

    def gram_diagonal(self, weights: Tensor) -> Tensor:
        return torch.from_numpy(self.matrix.power(2).T @ weights.numpy())

    def single(self) -> "Sparse":
        return self


@dataclass(frozen=True)
class Block:
    """Some rows: design A, labels y in [0, 1], and optionally offset o, residual variance r and weights c."""

    design: Matrix
    label: Tensor
    offset: Tensor | None = None
    residual: Tensor | None = None
    weight: Tensor | None = None


RowFunction = partial[list[Tensor]]  # of a block, with tensors as keywords, which sources may take elsewhere


class Source(Protocol):
    """Where rows come from.

    `reduce` is one pass: the sum over all blocks of what the function returns for each. `subset` holds about k random
    rows in memory.
    """

    @property
    def rows(self) -> int: ...

    @property
    def dimension(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def reduce(self, function: RowFunction) -> list[Tensor]: ...

    @property
    def smallest_subset(self) -> int:
        """Rows of which a subset need not be smaller, as a pass takes no longer than its launch; 0 if it does."""

    @property
    def float32_pays(self) -> bool:
        """Whether products are faster in float32, conversion included."""

    def subset(self, k: int, generator: np.random.Generator) -> "Source": ...


class InBlocks:
    """A source that yields its blocks one after the other, in this process."""

    @property
    def smallest_subset(self) -> int:
        return 0

    @property
    def float32_pays(self) -> bool:
        return True

    def blocks(self) -> Iterator[Block]:
        raise NotImplementedError

    def reduce(self, function: RowFunction) -> list[Tensor]:
        return add_up(map(function, self.blocks()))


class Through:
    """A source that does something with the rows of another one, and else is as that is."""

    source: Source

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
    def smallest_subset(self) -> int:
        return self.source.smallest_subset

    @property
    def float32_pays(self) -> bool:
        return self.source.float32_pays


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


BLOCK_ROWS = 16384  # rows at a time: block and features stay in the cache
FEW = 1 << 19  # entries (4 MB) of a block that is kept, with what is made of it


CPU = torch.device("cpu")
GOLDEN = 0.5 * (5.0**0.5 - 1.0)


def scattered(rows: int, k: int, generator: np.random.Generator, device: torch.device = CPU) -> Tensor:
    """k of the rows in order, one from each of k equal runs, at the place u + i φ mod 1 within the i-th run.

    Multiples of the golden ratio φ fall everywhere equally often and never in step with the data, so that sorted or
    periodic files give no bias; and wherever it is computed, the choice is the same.
    """
    i = torch.arange(k, dtype=torch.float64, device=device)
    place = (i * GOLDEN + generator.random()).frac()
    return ((i + place) * (rows / k)).floor_().long().clamp_(max=rows - 1)


@dataclass(frozen=True)
class Arrays(InBlocks):
    """Rows held in arrays: X (NumPy, torch or SciPy CSR), labels, and optional offset, residual, weight.

    X is not copied, but for a block at a time. `dtype` is that of the products with X; all else is float64. On a CUDA
    device all but X lie there, and X too unless it is too large.
    """

    features: Any
    label: Tensor
    intercept: bool = False
    offset: Tensor | None = None
    residual: Tensor | None = None
    weight: Tensor | None = None
    device: torch.device = CPU
    dtype: torch.dtype = torch.float64
    block_rows: int = BLOCK_ROWS

    @property
    def rows(self) -> int:
        return int(self.features.shape[0])

    @property
    def dimension(self) -> int:
        return int(self.features.shape[1]) + int(self.intercept)

    @property
    def smallest_subset(self) -> int:
        few = self.device.type == "cpu" or self.rows < SMALLEST_SUBSET
        return 0 if few else SMALLEST_SUBSET

    @property
    def float32_pays(self) -> bool:
        return self.device.type == "cpu"

    def blocks(self) -> Iterator[Block]:
        return iter([self.only_block]) if self.few else self.in_blocks()

    @property
    def few(self) -> bool:
        """Whether all rows are one block, and one worth to be kept: small, or on the card as they are."""
        if not 0 < self.rows <= self.block_rows or hasattr(self.features, "tocsr"):
            return False
        there = isinstance(self.features, Tensor) and self.features.is_cuda and self.features.dtype == self.dtype
        return there or (self.device.type == "cpu" and self.rows * self.dimension <= FEW)

    @cached_property
    def only_block(self) -> Block:
        """All rows, made once for all passes."""
        (block,) = self.in_blocks()
        return block

    def __getstate__(self) -> dict[str, Any]:
        """The fields, without what is made of them."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def in_blocks(self) -> Iterator[Block]:
        starts = range(0, self.rows, self.block_rows)
        parts = [slice(start, min(start + self.block_rows, self.rows)) for start in starts]
        for part, design in zip(parts, self.designs(parts), strict=True):
            yield Block(design, *[self.vector(x, part) for x in self.vectors()])  # type: ignore[arg-type]

    def reduce(self, function: RowFunction) -> list[Tensor]:
        if self.device.type == "cpu":
            return super().reduce(function)

        def of(rows: int) -> Iterator[Block]:
            return (self if rows == self.block_rows else replace(self, block_rows=rows)).blocks()

        return reduce_on_device(of, function, self.block_rows, self.device)

    def vectors(self) -> tuple[Tensor | None, ...]:
        return self.label, self.offset, self.residual, self.weight

    def vector(self, x: Tensor | None, part: slice) -> Tensor | None:
        return None if x is None else x[part].to(device=self.device, dtype=torch.float64)

    def designs(self, parts: list[slice]) -> Iterator[Matrix]:
        if isinstance(self.features, Tensor) and self.features.device != self.device:
            for x in prefetched(self.features, parts, self.dtype, self.device):
                yield Dense(x, self.intercept)
            return
        for part in parts:
            block = self.features[part]
            sparse = hasattr(block, "tocsr")
            yield Sparse(block) if sparse else Dense(torch.as_tensor(block, dtype=self.dtype), self.intercept)

    def subset(self, k: int, generator: np.random.Generator) -> "Arrays":
        """The k rows of `scattered`, copied."""
        return self.take(scattered(self.rows, k, generator, self.device))

    def take(self, index: Tensor) -> "Arrays":
        """The chosen rows, copied."""
        offset, residual, weight = (None if x is None else x[index.to(x.device)] for x in self.vectors()[1:])
        label = self.label[index.to(self.label.device)]
        X = self.features
        features = X[index.to(X.device)] if isinstance(X, Tensor) else X[index.cpu().numpy()]
        return replace(self, features=features, label=label, offset=offset, residual=residual, weight=weight)
