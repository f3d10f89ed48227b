"""Robust covariances for K classes: the sandwich of `viper.inference.robust`, in contrasts.

With the scores s_i = c_i (e_{y_i} - E p_i) ⊗ a_i and the prior's precision S₀⁻¹ of the contrasts,

    Cov μ = Λ⁻¹ (S₀⁻¹ + Σ_k u_k u_kᵀ) Λ⁻¹,      u_k = Σ_{i in group k} s_i,
    Λ = S₀⁻¹ + Σ_i c_i E[diag(p_i) - p_i p_iᵀ] ⊗ a_i a_iᵀ,

all seen through an orthonormal basis of the contrasts, (K-1) d of them.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from viper.inference.classes.posterior import StarPosterior
from viper.inference.classes.star import Star, star_prior
from viper.inference.classes.sums import EXACT_TOLERANCE
from viper.inference.problem import Prior
from viper.inference.robust import RowScores, gram_of_columns, sandwich_factor, scores_of_groups
from viper.inference.rows import Block, RowSource
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
    of_block = partial(block_class_scores, posterior=posterior)
    bread, meat, number = scores_of_groups(source, groups, of_block)
    own = contrast_precision(prior, K, d).to(bread)
    factor = sandwich_factor(own + bread, own, meat, number)
    return ContrastGaussian.from_contrasts(posterior.means, factor), number


def contrast_precision(prior: Prior | Star, classes: int, d: int) -> Tensor:
    """S₀⁻¹ in the basis of the contrasts."""
    basis, eye = contrast_basis(classes), torch.eye(d, dtype=torch.float64)
    vectors = torch.einsum("ka,ij->aikj", basis, eye).flatten(0, 1)  # one (K, d) for each contrast of each coefficient
    star = star_prior(prior, classes)
    times = star.times(vectors.to(star.precision))
    return torch.einsum("kb,mkj->mbj", basis.to(times), times).flatten(1)


def block_class_scores(block: Block, posterior: StarPosterior) -> RowScores:
    """c (e_y - E p) in the basis of the contrasts, and Σ c E[diag(p) - p pᵀ] ⊗ a aᵀ."""
    _, p, _, cross = class_moments(*posterior.latent(block), Precision(EXACT_TOLERANCE), True)
    basis = contrast_basis(p.shape[1]).to(p)
    residual = (-p).scatter_add(1, block.label.long()[:, None], torch.ones_like(p[:, :1])) @ basis
    curvature = basis.T @ (torch.diag_embed(p) - cross) @ basis
    if block.weight is not None:
        residual, curvature = residual * block.weight[:, None], curvature * block.weight[:, None, None]
    return RowScores(residual, gram_of_columns(block.design, curvature))
