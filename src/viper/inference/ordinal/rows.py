"""Rows with ordered levels as rows with two classes.

For thresholds a < b,

    s(b-f) - s(a-f) = s(b-f) s(f-a) (1 - e^{a-b}),

so a row of level k, between the thresholds t_{k-1} and t_k, becomes two rows with two classes: one of class 1 with the
offset -t_{k-1}, one of class 0 with the offset -t_k. The lowest and the highest level have only one of them. The last
factor depends on the thresholds alone (`gaps.Gaps`).
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from viper.inference.device import algebra_device
from viper.inference.ordinal.gaps import ThresholdSums
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.posterior import latent, moved
from viper.inference.rows import Arrays, Block, LongRowFunction, RowFunction, RowSource, SourceWrapper, add_up
from viper.inference.sums import sums
from viper.softplus.bounds import build_bound
from viper.softplus.limit import limit

# an error of 1e-8 in the moments moves thresholds by 1e-8 or less
ROUGH_LEVELS = build_bound("viper", None, None, None, None, 1e-8)


@dataclass(frozen=True)
class LevelRows:
    """Rows whose labels are the numbers of their levels, 0 … K-1."""

    source: RowSource
    levels: int

    def at(self, thresholds: Tensor) -> RowSource:
        """The rows with two classes, given the thresholds."""
        if self.split is None:
            return ThresholdRows(self.source, thresholds)
        rows, number = self.split
        offset = -thresholds.to(rows.device)[number]
        return replace(rows, offset=offset if rows.offset is None else rows.offset + offset)

    @cached_property
    def split(self) -> tuple[Arrays, Tensor] | None:
        """For rows in memory, the rows with two classes and the index of each one's threshold; middle levels twice."""
        if self.source.traits.where != "memory":
            return None
        rows = self.source.in_memory()
        level = rows.label.long()
        first, number = replace(rows, label=level > 0), (level - 1).clamp(min=0)
        middle = ((level > 0) & (level < self.levels - 1)).nonzero()[:, 0]
        if not len(middle):
            return first, number
        again = replace(rows.take(middle), label=torch.zeros_like(middle, dtype=torch.bool))
        return stacked_rows(first, again), torch.cat([number, level[middle]])

    def counts(self) -> Tensor:
        """The weight of the rows of each level."""
        return self.source.reduce(partial(level_counts, levels=self.levels))[0].cpu()

    def threshold_sums(self, posterior: OrdinalPosterior) -> ThresholdSums:
        """Make one pass for the derivatives of F at the points of a posterior."""
        thresholds, weights = posterior.thresholds()
        device = self.source.device
        function = partial(
            threshold_sums,
            posterior=moved(posterior, device),
            thresholds=thresholds.to(device),
            weights=weights.to(device),
        )
        return ThresholdSums(*(x.cpu() for x in self.source.reduce(function)))

    def expected_log_likelihood(self, posterior: OrdinalPosterior) -> float:
        """The expectation over w and δ of the rows with two classes, exact at the points of the posterior."""
        total, (places, weights) = 0.0, posterior.points()
        device = algebra_device(self.source.dimension, self.source.device)
        factor = posterior.factor.to(device)
        for place, weight, thresholds in zip(places, weights, posterior.thresholds()[0], strict=True):
            mean = (posterior.mean + posterior.moving @ place).to(device)
            total += float(weight) * sums(self.at(thresholds), mean, factor, limit(), gram="none").value
        return total


def stacked_rows(first: Arrays, second: Arrays) -> Arrays:
    """Concatenate the rows of both, which have the same columns and vectors."""
    vectors: dict[str, Any] = {name: torch.cat([x, second.vectors()[name]]) for name, x in first.vectors().items()}
    features = first.features, second.features
    both = scipy.sparse.vstack(features, "csr") if scipy.sparse.issparse(features[0]) else torch.cat(features)
    return replace(first, features=both, **vectors)


def two_terms(block: Block, levels: int) -> list[Block]:
    """A block as two blocks of rows with two classes, without thresholds.

    The second has the middle levels again; its rows of the lowest and the highest level have weight 0.
    """
    level = block.label.long()
    one = torch.ones_like(level, dtype=torch.float64)
    weight = one if block.weight is None else block.weight
    middle = ((level > 0) & (level < levels - 1)).to(weight)
    first = replace(block, label=(level > 0).to(one))
    again = replace(block, label=torch.zeros_like(one), weight=weight * middle)
    return [first] if levels == 2 else [first, again]


def level_counts(block: Block, levels: int) -> list[Tensor]:
    level = block.label.long()
    weight = torch.ones_like(level, dtype=torch.float64) if block.weight is None else block.weight
    return [torch.zeros(levels, dtype=torch.float64, device=level.device).index_add_(0, level, weight)]


def threshold_sums(block: Block, posterior: OrdinalPosterior, thresholds: Tensor, weights: Tensor) -> list[Tensor]:
    """A block's `ThresholdSums`."""
    (points, count), level = thresholds.shape, block.label.long()
    theta, tau2 = (x.reshape(len(level), -1) for x in latent(replace(block, offset=None), posterior))
    residual, curvature = theta.new_zeros(count, points), theta.new_zeros(count, points)
    pull, cross = theta.new_zeros(len(level)), theta.new_zeros(len(level), count)
    numbers = (level - 1).clamp(min=0), level.clamp(max=count - 1)
    for part, number in zip(two_terms(block, count + 1), numbers, strict=False):
        f = theta - thresholds.T[number] + (0.0 if block.offset is None else block.offset[:, None])
        _, g, h = (x.reshape(f.shape) for x in ROUGH_LEVELS.moments(f.reshape(-1), tau2.reshape(-1)))
        g = part.label[:, None] - g
        if part.weight is not None:
            g, h = part.weight[:, None] * g, part.weight[:, None] * h
        residual.index_add_(0, number, g)
        curvature.index_add_(0, number, h)
        pull += g @ weights
        cross.scatter_add_(1, number[:, None], (h @ weights)[:, None])
    return [residual.T.contiguous(), curvature.T.contiguous(), block.design.pull(pull), block.design.pull(cross)]


@dataclass(frozen=True)
class ThresholdRows(SourceWrapper):
    """Rows read in blocks, whose labels are levels, as rows with two classes."""

    source: RowSource
    thresholds: Tensor

    def reduce(self, function: RowFunction) -> list[Tensor]:
        kind = type(function) if isinstance(function, LongRowFunction) else partial
        of_terms = kind(sums_of_terms, inner=function.func, thresholds=self.thresholds, **function.keywords)
        return self.source.reduce(of_terms)

    def sample(self, k: int, generator: np.random.Generator) -> RowSource:
        return ThresholdRows(self.source.sample(k, generator), self.thresholds)

    def in_memory(self) -> Arrays:
        rows = LevelRows(self.source.in_memory(), len(self.thresholds) + 1).at(self.thresholds)
        return rows.in_memory()


def sums_of_terms(block: Block, inner: Any, thresholds: Tensor, **given: Any) -> list[Tensor]:
    """The inner function's sums over the rows with two classes of a block."""
    level, offset = block.label.long(), 0.0 if block.offset is None else block.offset
    numbers = (level - 1).clamp(min=0), level.clamp(max=len(thresholds) - 1)
    terms = zip(two_terms(block, len(thresholds) + 1), numbers, strict=False)
    return add_up(inner(replace(part, offset=offset - thresholds[number]), **given) for part, number in terms)


@dataclass(frozen=True)
class OrderedRows(SourceWrapper):
    """Rows whose labels are numbered in another order: label j is level `order[j]`."""

    source: RowSource
    order: Tensor

    def reduce(self, function: RowFunction) -> list[Tensor]:
        inner = partial(function.func, *function.args) if function.args else function.func
        return self.source.reduce(partial(reordered, of_levels=inner, order=self.order, **function.keywords))

    def map(self, function: Any) -> Any:
        return self.source.map(partial(reordered, of_levels=function, order=self.order))

    def apply(self, function: Any) -> Any:
        return self.source.apply(partial(reordered, of_levels=function, order=self.order))

    def sample(self, k: int, generator: np.random.Generator) -> RowSource:
        return OrderedRows(self.source.sample(k, generator), self.order)

    def in_memory(self) -> Arrays:
        rows = self.source.in_memory()
        return replace(rows, label=self.order.to(rows.device)[rows.label.long()])


def reordered(block: Block, of_levels: Any, order: Tensor, **given: Any) -> Any:
    """A function's result for a block, with its labels converted to levels."""
    return of_levels(replace(block, label=order.to(block.label.device)[block.label.long()].to(torch.float64)), **given)
