"""Importance weights of draws of coefficients and log gaps: log p(y|w,δ) + log p(w) + log p(δ) - log q(w,δ)."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.inference.ordinal.gaps import GapPrior, log_one_minus_exp, thresholds_of
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.posterior import prior_log_density
from viper.inference.problem import Prior
from viper.inference.rows import Block, RowSource, reported_sum

LEVELS_AT_ONCE = 1 << 21  # rows × draws (16 MB)


class OrdinalWeighedFit(NamedTuple):
    """A posterior with the priors of coefficients and log gaps, and the rows that it was fitted to."""

    posterior: OrdinalPosterior
    prior: Prior
    gap_prior: GapPrior
    source: RowSource
    sparse: bool = False

    def weighed(
        self, count: int, generator: np.random.Generator, report: Callable[[int, int], None] | None = None
    ) -> tuple[Tensor, Tensor, float]:
        """Return draws of (w, δ), log p(y,w,δ)/q(w,δ) without its mean, and that mean's log: the log evidence."""
        q = self.posterior
        noise = torch.from_numpy(generator.standard_normal((count, len(q.mean) + q.size))).to(q.mean)
        draws = q.draw(noise)
        w, delta = draws.split([len(q.mean), q.size], 1)
        joint = level_log_likelihood(self.source, w, delta, report)
        joint = joint + log_prior_of_levels(self.prior, self.gap_prior, w, delta)
        log_ratio = (joint - q.log_density(noise)).cpu()
        log_evidence = float(torch.logsumexp(log_ratio, 0)) - math.log(count)
        return draws.cpu(), log_ratio - log_evidence, log_evidence


def log_prior_of_levels(prior: Prior, of_gaps: GapPrior, w: Tensor, delta: Tensor) -> Tensor:
    """log p(w | δ) + log p(δ) of draws."""
    moved = (delta - of_gaps.mean.to(delta)) @ of_gaps.moving.to(delta).T
    return prior_log_density(prior, w - moved) + of_gaps.log_density(delta)


def level_log_likelihood(
    source: RowSource, w: Tensor, delta: Tensor, report: Callable[[int, int], None] | None = None
) -> Tensor:
    """Σ_i c_i log p(y_i | w, δ) for each draw. `report` is called with rows done and all rows."""
    function = partial(block_level_log_likelihood, w=w, delta=delta)
    return reported_sum(source, function, torch.zeros_like(w[:, 0]), report)


def block_level_log_likelihood(block: Block, w: Tensor, delta: Tensor) -> list[Tensor]:
    parts, size = [], max(1, LEVELS_AT_ONCE // max(1, len(block.label)))
    for some, gaps in zip(w.split(size), delta.split(size), strict=True):
        terms = level_log_likelihoods(block, some, gaps)
        parts.append(terms.sum(1) if block.weight is None else terms @ block.weight)
    return [torch.cat(parts)]


def level_log_likelihoods(block: Block, w: Tensor, delta: Tensor) -> Tensor:
    """log p(y_i | w, δ) = log s(t_k - f) + log s(f - t_{k-1}) + log(1 - e^{-g_k}), draws × rows."""
    w, delta = w.to(block.label.device), delta.to(block.label.device)
    f = block.design.project(w.T.contiguous()).T
    f = f if block.offset is None else f + block.offset
    t, level, last = thresholds_of(delta), block.label.long(), delta.shape[1] + 1
    below = torch.nn.functional.logsigmoid(t[:, level.clamp(max=last - 1)] - f)
    above = torch.nn.functional.logsigmoid(f - t[:, (level - 1).clamp(min=0)])
    total = torch.where(level < last, below, 0.0) + torch.where(level > 0, above, 0.0)
    if last == 1:
        return total
    constants = log_one_minus_exp(delta.exp())[:, (level - 1).clamp(0, last - 2)]
    return total + torch.where((level > 0) & (level < last), constants, 0.0)


def weighted_log_likelihoods(block: Block, draws: Tensor, width: int) -> Tensor:
    """c_i log p(y_i | w, δ), draws × rows, for draws of (w, δ)."""
    terms = level_log_likelihoods(block, draws[:, :width], draws[:, width:])
    return terms if block.weight is None else terms * block.weight


def level_probabilities_of_draws(f: Tensor, delta: Tensor) -> Tensor:
    """P(y = k | w, δ) for f (draws × rows) and δ (draws × gaps): draws × rows × levels, all sums of positive terms."""
    t = thresholds_of(delta)[:, None]
    below, above = torch.sigmoid(t - f[..., None]), torch.sigmoid(f[..., None] - t)
    if not delta.shape[1]:
        return torch.cat([below, above], -1)
    inside = below[..., 1:] * above[..., :-1] * -torch.expm1(-delta.exp())[:, None]
    return torch.cat([below[..., :1], inside, above[..., -1:]], -1)
