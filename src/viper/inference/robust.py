"""The sandwich: covariances that are valid if weights are not counts, or rows are not independent.

The mean of q solves Σ_i s_i = S₀⁻¹(μ - m₀) with the scores s_i = c_i (y_i - g_i) a_i. Even if the model is wrong,

    Cov μ = Λ⁻¹ (S₀⁻¹ + Σ_k u_k u_kᵀ) Λ⁻¹,      u_k = Σ_{i in group k} s_i,      Λ = S₀⁻¹ + Aᵀ diag(c h) A,

where groups are independent of one another: single rows, or all rows of one patient (White 1980; Liang & Zeger 1986;
Binder 1983 for surveys). If each row counts once and the model is right, the sum estimates Aᵀ diag(h) A, and the
covariance is that of the posterior. The prior enters once, so that a direction without data keeps the prior's width.

With more than two classes the scores are r_i ⊗ a_i, with a column of r for each contrast; with ordered levels they are
(r_i a_i, e_i), where e_i holds the derivatives with respect to the gaps between thresholds (`RowScores`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from viper.inference.posterior import Full, LowRank, Posterior, latent
from viper.inference.problem import Prior, cholesky
from viper.inference.rows import Block, Matrix, RowSource
from viper.softplus.limit import limit


@dataclass(frozen=True)
class RowScores:
    """Scores (r_i ⊗ a_i, e_i) of the rows of a block, and the block's part of Λ."""

    residual: Tensor  # r, rows × classes
    bread: Tensor
    own: Tensor | None = None  # e, rows × other parameters than coefficients


ScoresOfBlock = Callable[[Block], RowScores]


def robust_posterior(posterior: Posterior, prior: Prior, source: RowSource, groups: Any) -> tuple[Full, int]:
    """Return the Gaussian with the same mean and the robust covariance, and the number of independent groups."""
    if isinstance(posterior, LowRank) and source.rows < len(posterior.mean):
        raise ValueError(
            f"robust needs more rows than coefficients; got {source.rows} rows and {len(posterior.mean)} coefficients. "
            "Leave columns out."
        )
    if isinstance(posterior, LowRank):
        raise ValueError("robust needs covariance='full' or 'diagonal'; got 'low-rank'. Fit again with one of these.")
    bread, meat, number = scores_of_groups(source, groups, partial(block_scores, posterior=posterior))
    factor = sandwich_factor(prior.plus(bread), prior.plus(torch.zeros_like(meat)), meat, number)
    # made square and triangular by a QR decomposition
    return Full(posterior.mean, torch.linalg.qr(factor.T, mode="r").R.T.contiguous()), number


def sandwich_factor(precision: Tensor, of_prior: Tensor, meat: Tensor, number: int) -> Tensor:
    """F = Λ⁻¹M^{½} with FFᵀ = Λ⁻¹MΛ⁻¹, where M is the sum over groups plus the prior's precision."""
    if number < 2:
        raise ValueError(f"robust needs at least two independent groups of rows; got {number}.")
    root = cholesky(precision)
    inner = cholesky(of_prior + meat * (number / (number - 1.0)))  # the usual correction for few groups
    if root is None or inner is None:
        raise ValueError("robust needs scores with finite sums; got an overflow or NaN. Standardise the features.")
    return torch.cholesky_solve(inner, root)


def scores_of_groups(source: RowSource, groups: Any, of_block: ScoresOfBlock) -> tuple[Tensor, Tensor, int]:
    """The rows' part of Λ, Σ_k u_k u_kᵀ, and the number of groups; without groups, each row is its own."""
    if groups is None:
        bread, meat, count = source.reduce(partial(sums_of_scores, of_block=of_block))
        return bread, meat, round(float(count))
    codes, number = numbered_groups(groups, source)
    totals: Any = 0.0
    bread, start = torch.zeros(()), 0
    for block in source.in_memory().blocks():
        scores = of_block(block)
        stop = start + len(scores.residual)
        parts = []
        for column in scores.residual.T.cpu().numpy():
            entries = column, (codes[start:stop], np.arange(stop - start))
            parts.append(sums_by_group(block.design, scipy.sparse.csr_array(entries, shape=(number, stop - start))))
        if scores.own is not None:
            parts.append(np.zeros((number, scores.own.shape[1])))
            np.add.at(parts[-1], codes[start:stop], scores.own.cpu().numpy())
        totals = totals + np.hstack(parts)
        bread = bread + scores.bread.cpu()
        start = stop
    return bread, torch.from_numpy(totals.T @ totals).to(bread.dtype), number


def sums_of_scores(block: Block, of_block: ScoresOfBlock) -> list[Tensor]:
    """A block's part of Λ, Σ s sᵀ, and its number of rows with a positive weight."""
    scores = of_block(block)
    residual, own = scores.residual, scores.own
    count = torch.tensor(float(len(residual))) if block.weight is None else (block.weight > 0).sum()
    meat = gram_of_columns(block.design, residual[:, :, None] * residual[:, None])
    if own is not None:
        between = torch.cat([block.design.pull((r[:, None] * own).contiguous()) for r in residual.T])
        meat = torch.cat([torch.cat([meat, between], 1), torch.cat([between.T, own.T @ own], 1)])
    return [scores.bread, meat, count.to(residual)]


def gram_of_columns(design: Matrix, weights: Tensor) -> Tensor:
    """Σ_i W_i ⊗ a_i a_iᵀ for symmetric W_i, n × m × m."""
    size = weights.shape[1]
    pairs = {(a, b): design.gram(weights[:, a, b].contiguous()) for a in range(size) for b in range(a + 1)}
    return torch.cat([torch.cat([pairs[max(a, b), min(a, b)] for b in range(size)], 1) for a in range(size)])


def block_scores(block: Block, posterior: Posterior) -> RowScores:
    """c(y - g), and Aᵀ diag(c h) A."""
    theta, tau2 = latent(block, posterior)
    _, g, h = limit().moments(theta, tau2)
    weight = torch.ones_like(g) if block.weight is None else block.weight
    return RowScores((weight * (block.label - g))[:, None], block.design.gram(weight * h))


def numbered_groups(groups: Any, source: RowSource) -> tuple[np.ndarray, int]:
    """The number of each row's group, and how many there are."""
    if source.traits.where != "memory":
        raise ValueError("groups need rows in memory; got rows that are read in blocks. Leave groups out.")
    values = np.asarray(groups)
    if values.shape != (source.rows,):
        raise ValueError(
            f"groups must have one entry for each of the {source.rows} rows of the fit; got shape {values.shape}."
        )
    if any(value is None or value != value for value in values.tolist()):
        raise ValueError("groups must have no missing values; got some. Give each such row a group of its own.")
    names, codes = np.unique(values.astype(str) if values.dtype == object else values, return_inverse=True)
    return codes, len(names)


def sums_by_group(design: Any, residual: scipy.sparse.csr_array) -> np.ndarray:
    """Σ r_i a_i over the rows of each group; `residual` is groups × rows, with one r_i in each column."""
    sparse = scipy.sparse.issparse(design.matrix)
    sums = (residual @ design.matrix).toarray() if sparse else residual @ design.matrix.double().cpu().numpy()
    return np.hstack([sums, residual.sum(1)[:, None]]) if design.intercept else sums
