"""Explain in words why a fit is hard: which of features, prior, weights and offsets is far from ordinary."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from viper.inference.problem import Prior
from viper.inference.rows import Block, RowSource

WIDE = 100.0  # log-odds that a column spans under a very wide prior; usually it spans a few
HEAVY = 1e6  # a weight this large counts a row a million times
LARGEST_SUM = 1e300  # larger sums overflow


@dataclass(frozen=True)
class Sizes:
    """The largest entry of each column, the prior's standard deviations, the largest weight and offset."""

    columns: np.ndarray
    prior: np.ndarray
    weight: float
    offset: float

    @property
    def widest(self) -> int:
        """The column whose log-odds vary most under its prior."""
        return int(np.argmax(np.log10(np.maximum(self.columns, 1e-300)) + np.log10(self.prior)))


def sizes(source: RowSource, prior: Prior) -> Sizes:
    """Find the largest entries in one pass over the rows."""
    largest = np.max([found.cpu().numpy() for found in source.map(largest_entries)], 0)
    return Sizes(largest[:-2], prior.diagonal.rsqrt().cpu().numpy(), float(largest[-2]), float(largest[-1]))


def largest_entries(block: Block) -> Tensor:
    """The largest |a_ij| of each column, the largest weight and the largest |offset| of a block."""
    ones = torch.ones_like(block.label)
    weight = ones if block.weight is None else block.weight
    offset = 0.0 * ones if block.offset is None else block.offset.abs()
    return torch.cat([block.design.peaks(), weight.max()[None], offset.max()[None]])


def why_not_finite(found: Sizes) -> str:
    """The error for rows whose sums overflow, or whose curvature has no Cholesky factor."""
    j = found.widest
    column, sd = float(found.columns[j]), float(found.prior[j])
    largest = float(found.columns.max())
    with np.errstate(over="ignore"):
        if found.weight > HEAVY and np.float64(found.weight) > np.square(largest):
            return f"sample_weight must count rows; got {found.weight:.3g}. Divide the weights by their mean."
        if found.offset > np.sqrt(LARGEST_SUM) and found.offset > largest:
            return f"offset must be a log-odds; got {found.offset:.3g}. Scale the offsets."
        if sd > max(1.0, column):
            return (
                "prior_scale must not be far larger than the rows can determine; got "
                f"{sd:.3g} for a column of numbers up to {column:.3g}. Choose a smaller prior_scale."
            )
    return (
        f"X must have columns of moderate size, so that sums keep enough digits; got numbers up to {largest:.3g}. "
        "Standardise the features."
    )


def what_to_do(found: Sizes) -> str:
    """The advice for a fit that stopped early."""
    j = found.widest
    column, sd = float(found.columns[j]), float(found.prior[j])
    if found.weight > HEAVY:
        return f"Weights are as large as {found.weight:.3g}: unless they count rows, divide them by their mean."
    if found.offset > WIDE:
        return f"Offsets are as large as {found.offset:.3g}, but they are log-odds: check their unit."
    if column * sd > WIDE and sd > column:
        return f"The prior is very wide: choose a prior_scale smaller than {sd:.3g}, or raise max_iter."
    if column * sd > WIDE:
        return f"Features are as large as {column:.3g}: standardise them, or raise max_iter."
    return "Raise max_iter."
