"""Robust covariances for K classes: the sandwich of `viper.inference.robust`, in contrasts.

With the scores s_i = c_i (e_{y_i} - E p_i) ⊗ a_i and the prior's precision S₀⁻¹ of the contrasts,

    Cov μ = Λ⁻¹ (S₀⁻¹ + Σ_k u_k u_kᵀ) Λ⁻¹,      u_k = Σ_{i in group k} s_i,
    Λ = S₀⁻¹ + Σ_i c_i E[diag(p_i) - p_i p_iᵀ] ⊗ a_i a_iᵀ,

all seen through an orthonormal basis of the contrasts, (K-1) d of them.
"""

from functools import partial
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from viper.inference.classes.posterior import StarPosterior
from viper.inference.classes.star import Star, star_prior
from viper.inference.classes.sums import EXACT_TOLERANCE
from viper.inference.problem import Prior
from viper.inference.robust import numbered_groups, sandwich_factor, sums_by_group
from viper.inference.rows import Block, Matrix, RowSource
from viper.models.classes.contrasts import ContrastGaussian, contrast_basis
from viper.models.fitting import LARGEST_FULL
from viper.softplus.gumbel import Precision
from viper.softplus.logsumexp import class_moments


def robust_classes(
    posterior: StarPosterior, prior: Prior | Star, source: RowSource, groups: Any
) -> tuple[ContrastGaussian, int]:
    """Return the Gaussian with the same means and the robust covariance, and the number of independent groups."""
    K, d = posterior.means.shape
    if (size := (K - 1) * d) > LARGEST_FULL:
        raise ValueError(
            f"robust needs a matrix of all contrasts that fits in memory; got {size:,} contrasts. Leave columns out."
        )
    if groups is None:
        bread, meat, count = source.reduce(partial(block_class_scores, posterior=posterior))
        number = round(float(count))
    else:
        bread, meat, number = grouped_class_scores(posterior, source, groups)
    own = contrast_precision(prior, K, d).to(bread)
    factor = sandwich_factor(lambda total: own + total, bread, meat, number)
    return ContrastGaussian.from_contrasts(posterior.means, factor), number


def contrast_precision(prior: Prior | Star, classes: int, d: int) -> Tensor:
    """S₀⁻¹ in the basis of the contrasts."""
    basis, eye = contrast_basis(classes), torch.eye(d, dtype=torch.float64)
    vectors = torch.einsum("ka,ij->aikj", basis, eye).flatten(0, 1)  # one (K, d) for each contrast of each coefficient
    star = star_prior(prior, classes)
    times = star.times(vectors.to(star.precision))
    return torch.einsum("kb,mkj->mbj", basis.to(times), times).flatten(1)


def class_score_factors(block: Block, posterior: StarPosterior) -> tuple[Tensor, Tensor]:
    """c (e_y - E p) and c E[diag(p) - p pᵀ] of the rows of a block in the basis of the contrasts."""
    _, p, _, cross = class_moments(*posterior.latent(block), Precision(EXACT_TOLERANCE), True)
    basis = contrast_basis(p.shape[1]).to(p)
    residual = (-p).scatter_add(1, block.label.long()[:, None], torch.ones_like(p[:, :1])) @ basis
    curvature = basis.T @ (torch.diag_embed(p) - cross) @ basis
    if block.weight is None:
        return residual, curvature
    return residual * block.weight[:, None], curvature * block.weight[:, None, None]


def gram_of_contrasts(design: Matrix, weights: Tensor) -> Tensor:
    """Σ_i W_i ⊗ a_i a_iᵀ for symmetric W_i, n × (K-1) × (K-1)."""
    size = weights.shape[1]
    pairs = {(a, b): design.gram(weights[:, a, b].contiguous()) for a in range(size) for b in range(a + 1)}
    return torch.cat([torch.cat([pairs[max(a, b), min(a, b)] for b in range(size)], 1) for a in range(size)])


def block_class_scores(block: Block, posterior: StarPosterior) -> list[Tensor]:
    """A block's part of Λ, Σ s sᵀ, and its number of rows with a positive weight."""
    residual, curvature = class_score_factors(block, posterior)
    count = torch.tensor(float(len(residual))) if block.weight is None else (block.weight > 0).sum()
    squares = residual[:, :, None] * residual[:, None]
    return [
        gram_of_contrasts(block.design, curvature),
        gram_of_contrasts(block.design, squares),
        count.to(residual),
    ]


def grouped_class_scores(posterior: StarPosterior, source: RowSource, groups: Any) -> tuple[Tensor, Tensor, int]:
    """The same sums where rows of a group belong together, and the number of groups, for rows in memory."""
    codes, number = numbered_groups(groups, source)
    K, d = posterior.means.shape
    totals, bread, start = np.zeros((number, (K - 1) * d)), torch.zeros(()), 0
    for block in source.in_memory().blocks():
        residual, curvature = class_score_factors(block, posterior)
        stop = start + len(residual)
        for a, column in enumerate(residual.T.cpu().numpy()):
            entries = column, (codes[start:stop], np.arange(stop - start))
            by_group = scipy.sparse.csr_array(entries, shape=(number, stop - start))
            totals[:, a * d : (a + 1) * d] += sums_by_group(block.design, by_group)
        bread = bread + gram_of_contrasts(block.design, curvature)
        start = stop
    return bread, torch.from_numpy(totals.T @ totals).to(bread), number
