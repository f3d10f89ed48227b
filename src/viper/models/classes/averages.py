"""Averages of the probabilities of K classes over rows, for effects: A_k(β) = Σ_i w_i softmax_k(f_i) / Σ_i w_i.

E[A_k] is the average of E p_k, and with the moments of the expected log-sum-exp the gradient is exact, too:

    E ∂p_k/∂f_j = E p_k (1[j = k] - p_j).

Its sum over j is zero, so only contrasts of the coefficients matter, and L = Σ_j E[∂A_k/∂β_j]ᵀ(β_j - μ_j) has the
variance Σ_j gⱼᵀ S_j gⱼ under the star.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from viper.inference.classes.posterior import StarPosterior
from viper.inference.classes.sums import EXACT_TOLERANCE
from viper.inference.rows import Block, Dense, Matrix
from viper.models.classes.contrasts import ContrastGaussian
from viper.softplus.gumbel import Precision
from viper.softplus.logsumexp import class_moments

TILE = 1 << 19  # probabilities held at a time, rows × draws × classes (4 MB), which stay in the cache


@dataclass(frozen=True)
class FlatStar:
    """A star whose coefficients (K, d) are one vector, class by class."""

    star: StarPosterior

    @property
    def mean(self) -> Tensor:
        return self.star.mean.flatten()

    def draw(self, noise: Tensor) -> Tensor:
        """Draws (s, K d) from standard normal noise of the same shape."""
        return self.star.draw(noise.unflatten(1, self.star.mean.shape)).flatten(1)

    def spread(self, design: Matrix) -> Tensor:
        """Variances of gᵀβ for the rows g (K d) of a matrix, whose sums over classes are zero."""
        if isinstance(self.star, ContrastGaussian):
            return design.spread(self.star.root.flatten(0, 1))
        assert isinstance(design, Dense)
        parts = design.matrix.unflatten(1, self.star.mean.shape).unbind(1)
        spreads = [Dense(part.contiguous()).spread(one) for part, one in zip(parts, self.star.factor, strict=True)]
        return torch.stack(spreads).sum(0)


def add_class_block(found: Any, block: Block, member: Tensor, posterior: StarPosterior, coefficients: Tensor) -> None:
    """Add a block's sums over rows. `member` (groups × rows) is each row's weight in each group.

    `found` has one row per group and class, group by group.
    """
    theta, tau2 = posterior.latent(block)
    _, p, _, cross = class_moments(theta, tau2, Precision(EXACT_TOLERANCE), True)
    found.mean.add_((member @ p).flatten().cpu())
    jacobian = torch.diag_embed(p) - cross  # rows × classes k × classes j
    groups, (n, K) = len(member), p.shape
    for k in range(K):
        weights = (member.T[:, :, None] * jacobian[:, k, None]).reshape(n, groups * K)
        pulled = block.design.pull(weights.contiguous()).T.reshape(groups, -1)  # groups × K d
        found.gradient.view(groups, K, -1)[:, k].add_(pulled.cpu())
    if not coefficients.numel():
        return
    draws = found.draws.view(groups, K, -1)
    if block.residual is not None:  # independent between rows: it moves the average, but not its spread
        without = class_moments(*posterior.latent(replace(block, residual=None)), Precision(EXACT_TOLERANCE), False)[1]
        draws.add_((member @ (p - without)).cpu()[:, :, None])
    start = 0
    for some in coefficients.T.unflatten(1, (K, -1)).split(max(1, TILE // (n * K))):
        # classes first, which is several times faster than last
        f = torch.stack([block.design.project(own.T.contiguous()) for own in some.unbind(1)])
        f = f if block.offset is None else f + block.offset.T[:, :, None]
        drawn = member @ torch.softmax(f, 0)  # classes × groups × draws
        draws[:, :, start : start + len(some)].add_(drawn.transpose(0, 1).cpu())
        start += len(some)
