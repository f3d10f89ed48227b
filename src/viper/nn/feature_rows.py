"""The features of a frozen body as rows for the solvers, from tensors or a DataLoader.

Features that fit in memory are computed once. Others are computed again in every pass of the solver. With
`torch.distributed`, each process has part of a batch, and sums are taken over all processes.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, distributed
from torch.utils.data import DataLoader, RandomSampler

from viper.errors import shown
from viper.inference.memory import available_memory
from viper.inference.rows import (
    BLOCK_ROWS,
    Arrays,
    Block,
    BlockSource,
    RowFunction,
    RowSource,
    SourceTraits,
    SourceWrapper,
    join_blocks,
    scattered,
    traits_on,
)

MEMORY_SHARE = 0.25  # share of the available memory, for features that are kept


class BlockMaker(Protocol):
    """Turns features and targets into rows for the solvers."""

    def __call__(self, features: Tensor, y: Tensor) -> Block: ...


def feature_rows(features: Any, y: Tensor | None, body: torch.nn.Module | None, as_block: BlockMaker) -> RowSource:
    """Rows of a tensor with targets y, or of an iterable of pairs of inputs and targets; kept if they fit in memory."""
    source = FeatureRows(batches_of(features, y), body, as_block)
    size = 8 * source.rows * source.dimension
    return source.in_memory() if size <= MEMORY_SHARE * available_memory() else source


def batches_of(features: Any, y: Tensor | None) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    """A function that goes through all pairs of inputs and targets, in the same order in every call."""
    if isinstance(features, Tensor):
        if y is None or len(y) != len(features):
            got = "no y" if y is None else f"{len(y)} for {len(features)} rows"
            raise ValueError(f"y must have one entry for each row of features; got {got}. Pass fit(features, y).")
        if not isinstance(y, Tensor):
            raise TypeError(f"y must be a tensor; got {type(y).__name__}. Use torch.as_tensor.")
        return lambda: zip(features.split(BLOCK_ROWS), y.split(BLOCK_ROWS), strict=True)
    if y is not None or isinstance(features, Iterator) or not isinstance(features, Iterable):
        raise TypeError(
            "features must be a tensor with targets y, or a DataLoader of pairs (inputs, y) alone; got "
            f"{type(features).__name__}{'' if y is None else ' and y'}."
        )
    if isinstance(features, DataLoader) and isinstance(features.sampler, RandomSampler):
        raise ValueError(
            "the DataLoader must give the same rows in the same order in every pass; got shuffle=True. Create one with "
            "shuffle=False for the fit."
        )
    return lambda: map(checked_pair, features)


def checked_pair(batch: Any) -> tuple[Tensor, Tensor]:
    """A batch of a DataLoader as inputs and targets."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise ValueError(f"a batch must be a pair of inputs and targets; got {shown(type(batch).__name__)}.")
    return batch[0], batch[1]


@dataclass(frozen=True)
class FeatureRows(BlockSource):
    """Rows that the body computes in every pass."""

    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    body: torch.nn.Module | None
    as_block: BlockMaker

    @cached_property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and of coefficients."""
        rows = sum(len(y) for _, y in self.batches())
        if not rows:
            raise ValueError("there must be at least one row; got none. Let the DataLoader start over in each pass.")
        design: Any = next(self.blocks()).design
        return rows, design.matrix.shape[1] + int(design.intercept)

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def dimension(self) -> int:
        return self.shape[1]

    @cached_property
    def device(self) -> torch.device:
        return next(self.blocks()).label.device

    @property
    def traits(self) -> SourceTraits:
        return traits_on(self.device, self.rows, "stream")

    def blocks(self) -> Iterator[Block]:
        with evaluating(self.body) as body:
            for inputs, y in self.batches():
                with torch.no_grad():
                    block = self.as_block(inputs if body is None else body(inputs), y)
                yield block

    def sample(self, k: int, generator: np.random.Generator) -> Arrays:
        """The rows that `Arrays.sample` would choose, in one pass."""
        chosen, start, found = scattered(self.rows, k, generator), 0, []
        for block in self.blocks():
            inside = chosen[(chosen >= start) & (chosen < start + len(block.label))] - start
            start += len(block.label)
            if len(inside):
                found.append(next(join_blocks([block]).take(inside).blocks()))
        return join_blocks(found)

    def in_memory(self) -> Arrays:
        return join_blocks(list(self.blocks()))


@contextmanager
def evaluating(body: torch.nn.Module | None) -> Iterator[torch.nn.Module | None]:
    """Until the context ends, the body is in evaluation mode: no dropout, no update of batch norms."""
    training = body is not None and body.training
    try:
        yield body.eval() if body is not None else None
    finally:
        if body is not None:
            body.train(training)


@dataclass(frozen=True)
class RowsOfAllRanks(SourceWrapper):
    """Rows that are divided among processes; sums are over all of them, and equal in every process."""

    source: RowSource

    @property
    def traits(self) -> SourceTraits:
        return replace(self.source.traits, where="cluster")

    @cached_property
    def rows_of_all(self) -> int:
        count = torch.tensor([self.source.rows], device=self.source.device)
        distributed.all_reduce(count)
        return int(count)

    @property
    def rows(self) -> int:
        return self.rows_of_all

    def reduce(self, function: RowFunction) -> list[Tensor]:
        sums = [x.contiguous() for x in self.source.reduce(function)]
        for x in sums:
            distributed.all_reduce(x)
        return sums

    def sample(self, k: int, generator: np.random.Generator) -> RowSource:
        return self.source.sample(k, generator)


def of_all_ranks(source: RowSource) -> RowSource:
    """The same rows, or those of all processes if there are several."""
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return RowsOfAllRanks(source) if several else source
