"""How well a model predicts each row from all the others, without fitting it again (PSIS-LOO).

Draw β from q and weight each draw by p(y, β) / (q(β) p(y_i | β)): in proportion to these weights, the draws are from
the exact posterior without row i. Their largest weights are smoothed (PSIS, by ArviZ), and the shape k̂_i of their tail
says whether the answer for that row can be trusted (Vehtari et al. 2017; Magnusson et al. 2019).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from viper.inference.classes.importance import ClassWeighedFit, class_logits
from viper.inference.classes.sums import ROUGH_CLASSES
from viper.inference.importance import EVEN_WEIGHTS, WeighedFit, check_draw_count
from viper.inference.ordinal.importance import OrdinalWeighedFit, weighted_log_likelihoods
from viper.inference.rows import Block
from viper.models.arviz import class_row_log_likelihoods, row_log_likelihoods
from viper.softplus.limit import sigmoid_moments

ROWS_AT_ONCE = 256  # rows whose weights are smoothed between two reports of progress


@dataclass(frozen=True)
class LeaveOneOut:
    """Expected log predictive density of the rows, each predicted from all the others.

    elpd_loo : Σ_i log p(y_i | y_-i); `se` is its standard error, √n sd_i
    p_loo : effective number of parameters: how much higher the log density of the rows is if none is left out
    pointwise, k_hat, effective : log p(y_i | y_-i), the diagnostic k̂, and the share of effective draws, of each row
    threshold : k̂ below which a row's answer can be trusted, min(1 - 1/log₁₀ S, 0.7) for S draws
    """

    elpd_loo: float
    se: float
    p_loo: float
    pointwise: np.ndarray
    k_hat: np.ndarray
    effective: np.ndarray
    threshold: float
    draws: int

    @property
    def rows(self) -> int:
        return len(self.pointwise)

    @property
    def doubtful(self) -> np.ndarray:
        """The rows whose absence changes the posterior too much for the weights: k̂ is above the threshold.

        If nearly all draws are effective, k̂ describes a tail that hardly counts, and the row is not doubtful.
        """
        return np.flatnonzero(~(self.k_hat < self.threshold) & (self.effective < EVEN_WEIGHTS))

    def minus(self, other: "LeaveOneOut") -> tuple[float, float]:
        """The difference of two elpd of the same rows and its standard error, √n times the sd of their differences."""
        if self.rows != other.rows:
            raise ValueError(f"both must have the same rows; got {self.rows:,} and {other.rows:,}.")
        return sum_and_error(self.pointwise - other.pointwise)

    def __str__(self) -> str:
        doubtful, per_row = len(self.doubtful), self.elpd_loo / self.rows
        what = f"elpd {self.elpd_loo:.2f} ± {self.se:.2f} ({per_row:.4f} per row), p_loo {self.p_loo:.2f}. "
        if not doubtful:
            return what + "The answer can be trusted for every row."
        rows = "one row" if doubtful == 1 else f"{doubtful:,} of {self.rows:,} rows"
        return f"{what}For {rows} it cannot be trusted (k̂ above {self.threshold:.2f}): cross-validate."


def leave_one_out(
    fit: WeighedFit | ClassWeighedFit | OrdinalWeighedFit,
    count: int,
    generator: np.random.Generator,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> LeaveOneOut:
    """Draw from q, and weight the draws for each row; `step(done, total)` reports progress."""
    check_draw_count(count)
    source = fit.source
    if source.traits.where == "cluster":
        raise ValueError("loo needs rows in memory or in files; got rows on a cluster. Pass a sample of them.")
    draws, log_ratio, _ = fit.weighed(count, generator)
    correction = (log_ratio - log_ratio.max()).numpy()
    of_block: Callable[..., tuple[Tensor, Tensor]] = terms_and_densities
    if isinstance(fit, ClassWeighedFit):
        draws, of_block = draws.unflatten(1, fit.posterior.mean.shape), class_terms_and_densities
    if isinstance(fit, OrdinalWeighedFit):
        of_block = partial(level_terms_and_densities, width=len(fit.posterior.mean))
    parts = []
    done = 0
    for terms, densities in source.map(partial(of_block, draws=draws.to(source.device))):
        for some, density in zip(terms.split(ROWS_AT_ONCE, 1), densities.split(ROWS_AT_ONCE, 1), strict=True):
            parts.append(weighted_rows(some, density, correction))
            done += some.shape[1]
            step(done, source.rows)
    return leave_one_out_result(np.concatenate([np.stack(part) for part in parts], 1), count)


def leave_one_out_result(found: np.ndarray, draws: int) -> LeaveOneOut:
    """The result, from what `weighted_rows` returns for all rows."""
    elpd, k_hat, effective, p_loo = found
    total, error = sum_and_error(elpd)
    threshold = min(1.0 - 1.0 / math.log10(draws), 0.7)
    return LeaveOneOut(total, error, float(p_loo.sum()), elpd, k_hat, effective, threshold, draws)


def terms_and_densities(block: Block, draws: Tensor) -> tuple[Tensor, Tensor]:
    """What each row adds to the log target, and log p(y_i | β), draws × rows; they differ by a residual variance."""
    terms = row_log_likelihoods(block, draws)
    if block.residual is None or not bool(block.residual.any()):
        return terms, terms
    f = block.design.project(draws.T.contiguous())
    f = f if block.offset is None else f + block.offset[:, None]
    sign = 2.0 * block.label[:, None] - 1.0
    # E s(±f) for labels of 0 and 1
    density = sigmoid_moments(sign * f, block.residual[:, None].expand_as(f))[0].log().T
    return terms, density if block.weight is None else density * block.weight


def class_terms_and_densities(block: Block, draws: Tensor) -> tuple[Tensor, Tensor]:
    """`terms_and_densities` for more than two classes."""
    terms = class_row_log_likelihoods(block, draws)
    if block.residual is None or not bool(block.residual.any()):
        return terms, terms
    f = class_logits(block, draws)
    spread = block.residual.reshape(len(f), 1, -1).expand_as(f)
    p = ROUGH_CLASSES(f.flatten(0, 1), spread.flatten(0, 1))[1].reshape(f.shape)
    density = p.gather(2, block.label.long()[:, None, None].expand(-1, len(draws), 1))[..., 0].log().T
    return terms, density if block.weight is None else density * block.weight


def level_terms_and_densities(block: Block, draws: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`terms_and_densities` for ordered levels."""
    terms = weighted_log_likelihoods(block, draws, width)
    return terms, terms


def weighted_rows(terms: Tensor, log_density: Tensor, correction: np.ndarray) -> tuple[np.ndarray, ...]:
    """log p(y_i | y_-i), k̂_i, the share of effective draws and p_i of some rows, from log p(y_i | β), draws × rows."""
    from arviz_stats.base.array import array_stats
    from scipy.special import logsumexp

    each = log_density.T.cpu().numpy()  # rows × draws
    log_ratio = correction - terms.T.cpu().numpy()
    log_weights = np.full_like(each, -math.log(each.shape[1]))
    k_hat = np.full(len(each), -math.inf)
    uneven = np.ptp(log_ratio, axis=1) > 1e-9  # otherwise q is the posterior without the row
    if uneven.any():
        log_weights[uneven], k_hat[uneven] = array_stats.psislw(-log_ratio[uneven])
    elpd = logsumexp(log_weights + each, axis=1)
    effective = np.exp(-logsumexp(2 * log_weights, axis=1)) / each.shape[1]
    return elpd, k_hat, effective, logsumexp(each, axis=1) - math.log(each.shape[1]) - elpd


def sum_and_error(values: np.ndarray) -> tuple[float, float]:
    """The sum over rows and its standard error √n sd."""
    return float(values.sum()), float(math.sqrt(len(values)) * values.std())
