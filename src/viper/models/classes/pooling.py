"""Rubin's rules for K classes: the posteriors of several completed tables as one Gaussian of the contrasts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from viper.inference.classes.posterior import DiagonalStar, StarPosterior
from viper.inference.classes.sums import class_spreads
from viper.inference.rows import Dense
from viper.models.classes.contrasts import ContrastGaussian, gaussian_of_contrasts, uncentred_variances
from viper.models.pooling import PooledPosterior


def pool_stars(posteriors: Sequence[StarPosterior]) -> PooledPosterior:
    """Return the Gaussian with Rubin's total covariance T = W + (1 + 1/m) B of the centred coefficients.

    T is not the covariance of a star, because the means of all classes vary together between tables. Diagonal stars are
    pooled to a diagonal star, whose variances have Rubin's total over classes.
    """
    m, K = len(posteriors), len(posteriors[0].mean)
    means = torch.stack([posterior.mean for posterior in posteriors])
    mean, share = means.mean(0), (1.0 + 1.0 / m) / (m - 1.0)
    between = share * (means - mean).square().sum(0)
    if all(isinstance(posterior, DiagonalStar) for posterior in posteriors):
        own = torch.stack([posterior.own_variances for posterior in posteriors]).mean(0)
        found = DiagonalStar(mean, own + K / (K - 1.0) * between)
        return PooledPosterior(found, between / (between + variances_within(posteriors)))
    moves = (means - mean).flatten(1)
    total = sum(posterior.covariance() for posterior in posteriors) / m + share * moves.T @ moves
    return PooledPosterior(gaussian_of_contrasts(mean, total), between / (between + variances_within(posteriors)))


def variances_within(posteriors: Sequence[StarPosterior]) -> Tensor:
    """The mean over tables of the variances of the centred coefficients."""
    return torch.stack([posterior.variance for posterior in posteriors]).mean(0)


def star_spread_of_draws(deviations: Tensor, posterior: StarPosterior) -> Tensor:
    """Return what drawing x adds to the variance of each f_k, rows × classes, as `spread_of_draws` for two classes."""
    rows, draws, columns = deviations.shape
    flat = deviations.reshape(rows * draws, columns)
    design = Dense(torch.cat([flat, flat.new_zeros(len(flat), posterior.mean.shape[1] - columns)], 1))
    moved = design.project(posterior.mean.T.contiguous()).square().reshape(rows, draws, -1).mean(1)
    contrasts = isinstance(posterior, ContrastGaussian)
    own = posterior.spreads(design) if contrasts else class_spreads(design, posterior.factor)  # type: ignore[attr-defined]
    return uncentred_variances(moved) + own.reshape(rows, draws, -1).mean(1)
