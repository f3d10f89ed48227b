"""Covariances that hold where weights are no counts, or rows belong together: the sandwich.

The mean of q solves Σ_i s_i = S₀⁻¹(μ - m₀) with the scores s_i = c_i (y_i - g_i) a_i. Even if the model is wrong,

    Cov μ = Λ⁻¹ (S₀⁻¹ + Σ_k u_k u_kᵀ) Λ⁻¹,      u_k = Σ_{i in group k} s_i,      Λ = S₀⁻¹ + Aᵀ diag(c h) A,

where groups are independent of one another: single rows, or all rows of one patient (White 1980; Liang & Zeger 1986;
Binder 1983 for surveys). If each row counts once and the model is right, the sum estimates Aᵀ diag(h) A, and the
covariance is that of the posterior. The prior is in it once, so that a direction without data keeps the prior's width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from viper.inference.posterior import Full, LowRank, Posterior, latent
from viper.inference.problem import Prior, cholesky
from viper.inference.rows import Block, RowSource
from viper.softplus.limit import limit


def robust_posterior(posterior: Posterior, prior: Prior, source: RowSource, groups: Any) -> tuple[Full, int]:
    """Return the Gaussian with the same mean and the robust covariance, and the number of independent groups."""
    if isinstance(posterior, LowRank) and source.rows < len(posterior.mean):
        raise ValueError(
            f"robust needs more rows than coefficients; got {source.rows} rows and {len(posterior.mean)} coefficients. "
            "Leave columns out."
        )
    if isinstance(posterior, LowRank):
        raise ValueError("robust needs covariance='full' or 'diagonal'; got 'low-rank'. Fit again with one of these.")
    if groups is None:
        bread, meat, count = source.reduce(partial(block_scores, posterior=posterior))
        number = round(float(count))
    else:
        bread, meat, number = grouped_scores(posterior, source, groups)
    factor = sandwich_factor(prior.plus, bread, meat, number)
    # made square and triangular by a QR decomposition
    return Full(posterior.mean, torch.linalg.qr(factor.T, mode="r").R.T.contiguous()), number


def sandwich_factor(plus_prior: Callable[[Tensor], Tensor], bread: Tensor, meat: Tensor, number: int) -> Tensor:
    """F = Λ⁻¹M^{½} with FFᵀ = Λ⁻¹MΛ⁻¹, where Λ and M are bread and meat plus the prior's precision."""
    if number < 2:
        raise ValueError(f"robust needs at least two independent groups of rows; got {number}.")
    root = cholesky(plus_prior(bread))
    inner = cholesky(plus_prior(meat * (number / (number - 1.0))))  # the usual allowance for few groups
    if root is None or inner is None:
        raise ValueError("robust needs scores with finite sums; got an overflow or NaN. Standardise the features.")
    return torch.cholesky_solve(inner, root)


def score_factors(block: Block, posterior: Posterior) -> tuple[Tensor, Tensor]:
    """c(y - g) and c h of the rows of a block."""
    theta, tau2 = latent(block, posterior)
    _, g, h = limit().moments(theta, tau2)
    weight = torch.ones_like(g) if block.weight is None else block.weight
    return weight * (block.label - g), weight * h


def block_scores(block: Block, posterior: Posterior) -> list[Tensor]:
    """A block's Aᵀ diag(c h) A, Σ s sᵀ, and its number of rows with a positive weight."""
    residual, curvature = score_factors(block, posterior)
    count = torch.tensor(float(len(residual))) if block.weight is None else (block.weight > 0).sum()
    return [block.design.gram(curvature), block.design.gram(residual.square()), count.to(residual)]


def grouped_scores(posterior: Posterior, source: RowSource, groups: Any) -> tuple[Tensor, Tensor, int]:
    """Aᵀ diag(c h) A, Σ_k u_k u_kᵀ, and the number of groups, for rows in memory."""
    codes, number = numbered_groups(groups, source)
    totals, bread, start = np.zeros((number, len(posterior.mean))), torch.zeros(()), 0
    for block in source.in_memory().blocks():
        residual, curvature = score_factors(block, posterior)
        stop = start + len(residual)
        entries = residual.cpu().numpy(), (codes[start:stop], np.arange(stop - start))
        totals += sums_by_group(block.design, scipy.sparse.csr_array(entries, shape=(number, stop - start)))
        bread = bread + block.design.gram(curvature)
        start = stop
    meat = torch.from_numpy(totals.T @ totals).to(posterior.mean)
    return bread, meat, number


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
