"""Whether a Gaussian process's intervals leave out most of what is unknown, because its mean has no posterior.

With b_i = c_i h_i, the information of row i about its log-odds, the variance that q has, weighted by information, is

    γ = Σ_i b_i τ_i²:

the number of weights that q holds as if it had estimated them. The k weights of the mean are point estimates. With a
posterior they would add z_iᵀ(ZᵀBZ)⁻¹z_i to the variance of row i, Z their rows and B = diag b, which sums up to

    Σ_i b_i z_iᵀ(ZᵀBZ)⁻¹z_i = tr I = k

whatever the rows are, if the columns of Z are independent; else k is their rank. Intervals should thus be √(1 + k/γ)
times as wide.
"""

import math
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from viper.errors import NarrowIntervalsWarning, users_line
from viper.inference.posterior import Posterior, latent
from viper.inference.rows import Block, RowSource
from viper.softplus.limit import limit

# k/γ above which to warn. In 132 fits to simulated rows, 95 % intervals held the true probability at this share of the
# rows (median): k/γ below 1/2, 94 %; up to 1, 86 %; up to 2, 75 %; up to 4, 66 %; beyond, 3 %.
TOO_MANY = 2.0
FAR_TOO_NARROW = 10.0  # times too narrow, beyond which the number says nothing more


def intervals_too_narrow_by(mean: Any, source: RowSource, posterior: Posterior, inputs: Tensor) -> float:
    """How many times wider intervals should be, for the weights of the mean function; 1 where it has none."""
    free = sum(parameter.numel() for parameter in mean.parameters() if parameter.requires_grad)
    if free < 2:  # a constant, or nothing
        return 1.0
    count = min(free, independent(inputs) if hasattr(mean, "weights") else source.rows)
    held = float(source.reduce(partial(weights_held, posterior=posterior))[0])
    return math.sqrt(1.0 + count / held) if held > 0.0 else math.inf


def independent(inputs: Tensor) -> int:
    """The rank of the columns of the inputs and a column of ones."""
    total, rows = inputs.sum(0, keepdim=True), inputs.new_full((1, 1), len(inputs))
    gram = torch.cat([torch.cat([inputs.T @ inputs, total]), torch.cat([total, rows], 1).T], 1)
    return int(torch.linalg.matrix_rank(gram, hermitian=True, rtol=1e-10))


def weights_held(block: Block, posterior: Posterior) -> list[Tensor]:
    """A block's part of γ."""
    theta, tau2 = latent(block, posterior)
    held = limit().moments(theta, tau2)[2] * tau2
    return [held.sum() if block.weight is None else block.weight @ held]


def warn_of_narrow_intervals(factor: float) -> None:
    """Say so if intervals are `factor` times too narrow, and that is much."""
    if factor**2 <= 1.0 + TOO_MANY:
        return
    size = f"about {factor:.1f} times" if factor < FAR_TOO_NARROW else f"more than {FAR_TOO_NARROW:.0f} times"
    warnings.warn(
        f"The mean function explains most of what these data say, and its weights are point estimates: intervals are "
        f"{size} too narrow. Use mean='constant', or VariationalLogisticRegression.",
        NarrowIntervalsWarning,
        stacklevel=users_line(),
    )
