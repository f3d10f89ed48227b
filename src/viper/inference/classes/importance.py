"""Importance weights of the star's draws: log p(y|β) + log p(β) - log q(β), with densities of the contrasts."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.inference.classes.posterior import StarPosterior, star_log_density
from viper.inference.classes.star import Star, star_prior
from viper.inference.classes.sums import ROUGH_CLASSES
from viper.inference.problem import Prior
from viper.inference.rows import Block, RowSource, reported_sum

LOGITS_AT_ONCE = 1 << 21  # rows × draws × classes (16 MB)


class ClassWeighedFit(NamedTuple):
    """A star with the prior and the rows that it was fitted to."""

    posterior: StarPosterior
    prior: Prior | Star
    source: RowSource
    sparse: bool = False

    def weighed(
        self, count: int, generator: np.random.Generator, report: Callable[[int, int], None] | None = None
    ) -> tuple[Tensor, Tensor, float]:
        """Return draws (s, K d) from q, log p(y|β)p(β)/q(β) without its mean, and that mean's log: the log evidence."""
        means = self.posterior.means
        noise = torch.from_numpy(generator.standard_normal((count, *means.shape))).to(means.device)
        draws = self.posterior.draw(noise)
        prior = star_log_density(star_prior(self.prior, len(means)), draws)
        likelihood = class_log_likelihood(self.source, draws, report)
        log_ratio = (likelihood + prior - self.posterior.log_density(draws)).cpu()
        log_evidence = float(torch.logsumexp(log_ratio, 0)) - math.log(count)
        return draws.cpu().flatten(1), log_ratio - log_evidence, log_evidence


def class_log_likelihood(source: RowSource, draws: Tensor, report: Callable[[int, int], None] | None) -> Tensor:
    """Σ_i c_i log softmax_{y_i}(f_i) for each draw. `report` is called with rows done and all rows."""
    function = partial(block_class_log_likelihood, draws=draws)
    return reported_sum(source, function, torch.zeros_like(draws[:, 0, 0]), report)


def block_class_log_likelihood(block: Block, draws: Tensor) -> list[Tensor]:
    label, K = block.label.long(), draws.shape[1]
    parts = []
    for some in draws.to(block.label.device).split(max(1, LOGITS_AT_ONCE // (K * max(1, len(label))))):
        f = class_logits(block, some)
        own = f.gather(2, label[:, None, None].expand(-1, len(some), 1))[..., 0] - log_sum(f, block.residual)
        parts.append(own.sum(0) if block.weight is None else block.weight @ own)
    return [torch.cat(parts)]


def log_sum(f: Tensor, residual: Tensor | None) -> Tensor:
    """log Σ_k e^{f_k} of logits (rows, draws, K), or its mean over residual noise in f if rows have such a variance."""
    if residual is None:
        return torch.logsumexp(f, 2)
    spread = residual.reshape(len(f), 1, -1).expand_as(f)
    return ROUGH_CLASSES(f.flatten(0, 1), spread.flatten(0, 1))[0].reshape(f.shape[:2])


def class_logits(block: Block, draws: Tensor) -> Tensor:
    """f = o + Aβ, rows × draws × classes, for draws (s, K, d)."""
    s, K, d = draws.shape
    f = block.design.project(draws.reshape(s * K, d).T.contiguous()).reshape(-1, s, K)
    return f if block.offset is None else f + block.offset[:, None]
