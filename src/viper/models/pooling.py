"""Rubin's rules: the posteriors of several completed tables, as one Gaussian."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from viper.inference.posterior import Diagonal, Full, Posterior
from viper.inference.rows import Dense


class PooledPosterior(NamedTuple):
    """N(μ̄, W + (1 + 1/m) B), and the part (1 + 1/m) B of each variance: the share due to missing values."""

    posterior: Any
    missing_information: Tensor


def pool_posteriors(posteriors: Sequence[Posterior]) -> PooledPosterior:
    """Return the Gaussian with Rubin's total covariance T = W + (1 + 1/m) B.

    μ̄ is the mean of the m means, W the mean of their covariances within the tables, and B the covariance of the means
    between the tables. The mixture of the m posteriors has nearly these moments; 1/m allows for the finite m.
    """
    m = len(posteriors)
    means = torch.stack([posterior.mean for posterior in posteriors])
    mean = means.mean(0)
    between = (1.0 + 1.0 / m) / (m - 1.0) * (means - mean).square().sum(0)
    if all(isinstance(posterior, Diagonal) for posterior in posteriors):
        variance = torch.stack([posterior.variance for posterior in posteriors]).mean(0) + between
        return PooledPosterior(Diagonal(mean, variance), between / variance)
    total = sum(posterior.covariance() for posterior in posteriors) / m
    total = total + (1.0 + 1.0 / m) / (m - 1.0) * (means - mean).T @ (means - mean)
    return PooledPosterior(Full(mean, torch.linalg.cholesky(total)), between / total.diagonal())


def spread_of_draws(deviations: Tensor, posterior: Posterior) -> Tensor:
    """Return (1/K) Σ_k [(d_kᵀμ)² + d_kᵀΣd_k] for deviations d_k of the draws of x from their mean: rows × K × columns.

    It is what drawing x adds to the variance of f = xᵀβ: Var f = E[xᵀΣx] + Var[xᵀμ].
    """
    rows, draws, columns = deviations.shape
    flat = deviations.reshape(rows * draws, columns)
    constant = flat.new_zeros(len(flat), len(posterior.mean) - columns)  # the intercept does not vary
    design = Dense(torch.cat([flat, constant], 1))
    total = design.project(posterior.mean).square() + posterior.spread(design)
    return total.reshape(rows, draws).mean(1)
