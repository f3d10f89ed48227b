"""Averages of the probabilities of levels over rows, for effects: A_k(w, δ) = Σ_i c_i P(y = k | f_i, t) / Σ_i c_i.

With p_k = s(t_k - f) - s(t_{k-1} - f), E[A_k] is the average of E p_k, and the gradients are exact given the gaps:

    E ∂p_k/∂f = E s'(f - t_{k-1}) - E s'(f - t_k),      E ∂p_k/∂t_k = E s'(f - t_k),

averaged over the points of the gaps, as everything else is (`OrdinalPosterior.points`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from viper.inference.ordinal.gaps import level_shares, threshold_matrix, thresholds_of
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.rows import Block, Matrix
from viper.models.ordinal.reading import threshold_tails


@dataclass(frozen=True)
class LevelJoint:
    """Coefficients and log gaps (w, δ) as one Gaussian vector."""

    posterior: OrdinalPosterior

    @property
    def mean(self) -> Tensor:
        return self.posterior.joint_mean

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return self.posterior.noise_shape

    def draw(self, noise: Tensor) -> Tensor:
        return self.posterior.draw(noise)

    def spread(self, design: Matrix) -> Tensor:
        """Variances of gᵀ(w, δ) for the rows g of a matrix."""
        return design.spread(self.posterior.joint_factor)


def add_level_block(found: Any, block: Block, member: Tensor, posterior: OrdinalPosterior, draws: Tensor) -> None:
    """Add a block's sums over rows. `member` (groups × rows) is each row's weight in each group.

    `found` has one row per group and level, group by group; `draws` are those of (w, δ), in columns.
    """
    theta, tau2 = posterior.latent(block)
    thresholds, shares = posterior.thresholds()
    below, above, h = threshold_tails(theta, tau2, thresholds)
    shares = shares.to(theta)
    p = torch.einsum("npk,p->nk", level_shares(below, above), shares)
    groups, K, d = len(member), p.shape[1], len(posterior.mean)
    found.mean.add_((member @ p).flatten().cpu())
    # E ∂p/∂f, and E ∂p/∂δ by dt/dδ at the points
    at_thresholds = torch.einsum("npk,p->nk", h, shares)
    slope = torch.nn.functional.pad(at_thresholds, (1, 0)) - torch.nn.functional.pad(at_thresholds, (0, 1))
    steps = (posterior.log_gaps + posterior.points()[0] @ posterior.gap_factor.T).exp().to(theta)
    moves = threshold_matrix(posterior.size).to(theta) * steps[:, None]
    by_gap = torch.einsum("gn,npk,p,pkm->gkm", member, h, shares, moves)
    zero = by_gap.new_zeros(groups, 1, posterior.size)
    own = torch.cat([by_gap, zero], 1) - torch.cat([zero, by_gap], 1)
    gradient = found.gradient.view(groups, K, -1)
    for k in range(K):
        gradient[:, k, :d].add_(block.design.pull((member.T * slope[:, k : k + 1]).contiguous()).T.cpu())
    gradient[:, :, d:].add_(own.cpu())
    if not draws.numel():
        return
    f = block.design.project(draws[:d].contiguous())
    f = f if block.offset is None else f + block.offset[:, None]
    t = thresholds_of(draws[d:].T)
    under = [member @ torch.sigmoid(t[:, j] - f) for j in range(K - 1)]
    edges = torch.stack([torch.zeros_like(under[0]), *under, member.sum(1, keepdim=True).expand_as(under[0])], 1)
    found.draws.view(groups, K, -1).add_(edges.diff(dim=1).cpu())
