"""Rows held in arrays: the source of most fits, on the CPU or on a device."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.inference.kernels import accelerator
from viper.inference.rows import Block, Dense, InBlocks, Matrix, RowFunction, Sparse

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
        few = self.device.type == "cpu" or self.rows < accelerator.SMALLEST_SUBSET
        return 0 if few else accelerator.SMALLEST_SUBSET

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

        return accelerator.reduce_there(of, function, self.block_rows, self.device)

    def vectors(self) -> tuple[Tensor | None, ...]:
        return self.label, self.offset, self.residual, self.weight

    def vector(self, x: Tensor | None, part: slice) -> Tensor | None:
        return None if x is None else x[part].to(device=self.device, dtype=torch.float64)

    def designs(self, parts: list[slice]) -> Iterator[Matrix]:
        if isinstance(self.features, Tensor) and self.features.device != self.device:
            for x in accelerator.streamed(self.features, parts, self.dtype, self.device):
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
