"""Robust covariances for levels in order: the sandwich of `viper.inference.robust`, in coefficients and log gaps.

A row of level k has the score (r a, e) with r = c (y - g) summed over its two terms, and e the derivative in δ of these
and of its constant log(1 - e^{-g_k}). Λ is the precision of q(w, δ).
"""

from functools import partial
from typing import Any

import torch

from viper.inference.ordinal.gaps import GapPrior, threshold_matrix
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.ordinal.rows import two_terms
from viper.inference.problem import Prior
from viper.inference.robust import RowScores, sandwich_factor, scores_of_groups
from viper.inference.rows import Block, RowSource
from viper.softplus.limit import limit


def robust_levels(
    posterior: OrdinalPosterior, prior: Prior, of_gaps: GapPrior, source: RowSource, groups: Any
) -> tuple[OrdinalPosterior, int]:
    """Return the Gaussian with the same means and the robust covariance, and the number of independent groups."""
    _, meat, number = scores_of_groups(source, groups, partial(block_level_scores, posterior=posterior))
    inverse = torch.linalg.inv(posterior.joint_factor)
    own = of_gaps.joint_precision(prior)
    factor = sandwich_factor(inverse.T @ inverse, own, meat, number)
    return OrdinalPosterior.from_joint(posterior.mean, posterior.log_gaps, factor @ factor.T), number


def block_level_scores(block: Block, posterior: OrdinalPosterior) -> RowScores:
    """Derivatives of the expected log likelihood of each row, averaged over the points of the posterior."""
    theta, tau2 = (x.reshape(len(block.label), -1) for x in posterior.latent(block))
    thresholds, shares = (x.to(theta) for x in posterior.thresholds())
    places = posterior.points()[0]
    g = (posterior.log_gaps + places @ posterior.gap_factor.T).exp().to(theta)  # points × gaps
    slopes = threshold_matrix(posterior.size).to(theta) * g[:, None]  # dt/dδ, points × thresholds × gaps
    count, level = thresholds.shape[1], block.label.long()
    residual = theta.new_zeros(len(level))
    own = theta.new_zeros(len(level), posterior.size)
    numbers = (level - 1).clamp(min=0), level.clamp(max=count - 1)
    for part, number in zip(two_terms(block, count + 1), numbers, strict=False):
        f = theta - thresholds.T[number]
        _, mean, _ = limit().moments(f, tau2)
        score = (part.label[:, None] - mean) * shares
        score = score if part.weight is None else score * part.weight[:, None]
        residual += score.sum(1)
        own -= torch.einsum("np,pnm->nm", score, slopes[:, number])
    if posterior.size:
        # the constant of a middle level: c g/(e^g - 1)
        inside = (level > 0) & (level < count)
        weight = inside.to(theta) if block.weight is None else inside * block.weight
        number, rate = (level - 1).clamp(0, posterior.size - 1), shares @ (g / torch.expm1(g))
        own.scatter_add_(1, number[:, None], (weight * rate[number])[:, None])
    return RowScores(residual[:, None], torch.zeros(()).to(theta), own)
