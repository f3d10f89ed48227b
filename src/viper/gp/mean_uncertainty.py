"""Checks whether intervals omit most of the uncertainty, because the weights of the mean function have no posterior.

Let b_i = c_i h_i be the information of row i about its log-odds. The variances of the log-odds under q, weighted by
information, add up to

    γ = Σ_i b_i τ_i²,

which is how many weights q has estimated. The k weights of the mean function are point estimates. With a posterior
they would add z_iᵀ(ZᵀBZ)⁻¹z_i to the variance of row i, where Z holds their rows and B = diag b. Over all rows this is

    Σ_i b_i z_iᵀ(ZᵀBZ)⁻¹z_i = tr I = k,

whatever the rows are, if the columns of Z are independent; otherwise k is their rank. Intervals should therefore be
√(1 + k/γ) times as wide.
"""

import math
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from viper.errors import NarrowIntervalsWarning, users_line
from viper.gp.kernels import UncertainMean
from viper.inference.posterior import Posterior, latent
from viper.inference.rows import Block, RowSource
from viper.softplus.limit import limit

# k/γ above which to warn. In 132 fits to simulated rows, 95 % intervals contained the true probability for this share
# of the rows (median): k/γ below 1/2, 94 %; up to 1, 86 %; up to 2, 75 %; up to 4, 66 %; beyond, 3 %.
LARGEST_SHARE = 2.0
FAR_TOO_NARROW = 10.0  # factor above which its exact value is meaningless


def intervals_too_narrow_by(mean: Any, source: RowSource, posterior: Posterior, inputs: Tensor) -> float:
    """How many times wider intervals should be to include the weights of the mean function; 1 if it has none."""
    free = sum(parameter.numel() for parameter in mean.parameters() if parameter.requires_grad)
    if free < 2 or isinstance(mean, UncertainMean):  # at most a constant, or weights with a posterior
        return 1.0
    count = min(free, rank_with_constant(inputs) if hasattr(mean, "weights") else source.rows)
    estimated = float(source.reduce(partial(weights_estimated, posterior=posterior))[0])
    return math.sqrt(1.0 + count / estimated) if estimated > 0.0 else math.inf


def rank_with_constant(inputs: Tensor) -> int:
    """The rank of the columns of the inputs and a column of ones."""
    total, rows = inputs.sum(0, keepdim=True), inputs.new_full((1, 1), len(inputs))
    gram = torch.cat([torch.cat([inputs.T @ inputs, total]), torch.cat([total, rows], 1).T], 1)
    return int(torch.linalg.matrix_rank(gram, hermitian=True, rtol=1e-10))


def weights_estimated(block: Block, posterior: Posterior) -> list[Tensor]:
    """The contribution of a block to γ."""
    theta, tau2 = latent(block, posterior)
    estimated = limit().moments(theta, tau2)[2] * tau2
    return [estimated.sum() if block.weight is None else block.weight @ estimated]


def warn_of_narrow_intervals(factor: float) -> None:
    """Warn if intervals are too narrow by a factor that matters."""
    if factor**2 <= 1.0 + LARGEST_SHARE:
        return
    size = f"about {factor:.1f} times" if factor < FAR_TOO_NARROW else f"more than {FAR_TOO_NARROW:.0f} times"
    warnings.warn(
        f"The mean function explains most of these data, and its weights are point estimates: intervals are "
        f"{size} too narrow. Use mean='linear' with priors='default', whose weights have a posterior.",
        NarrowIntervalsWarning,
        stacklevel=users_line(),
    )
