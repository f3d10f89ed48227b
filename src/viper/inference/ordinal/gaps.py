"""Thresholds t_1 < … < t_{K-1} by the logarithms δ of the gaps between them.

    g = e^δ,      t = B g,      Σ_j t_j = 0,

with one gap for each of the K-2 middle levels. Centred thresholds make the order of the levels reversible: reversed
gaps are the thresholds with their signs and order reversed. Where they lie is the intercept's business.

What the rows with two classes (`rows`) leave out of the likelihood is Σ_k n_k log(1 - e^{-g_k}), n_k the weight of the
rows of level k. The prior is Gaussian, δ ~ N(δ₀, Q⁻¹), and the prior mean of the coefficients may follow δ; at first
δ_k ~ N(0, σ²) independently of them, and where rows are added to a fit, both are the posterior so far.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from viper.inference.problem import LOG_2PI, Prior

LEAST_BEND = 1e-8  # of the largest: where the profile is not concave, its curvature's size is used


@dataclass(frozen=True)
class ThresholdSums:
    """Sums over the rows with two classes at a few points δ: c(y-g) and c h of each threshold, points × thresholds.

    `pull` is the mean over points of Aᵀ c(y-g), and `cross` that of Aᵀ c h, d × thresholds.
    """

    residual: Tensor
    curvature: Tensor
    pull: Tensor
    cross: Tensor


@dataclass(frozen=True)
class GapPrior:
    """δ ~ N(δ₀, Q⁻¹), given which the prior mean of the coefficients is m₀ + M(δ - δ₀)."""

    mean: Tensor  # δ₀
    precision: Tensor  # Q
    moving: Tensor  # M, d × gaps

    @classmethod
    def independent(cls, size: int, dimension: int, scale: float) -> "GapPrior":
        """δ_k ~ N(0, σ²), which says nothing about d coefficients."""
        zero = torch.zeros(dimension, size, dtype=torch.float64)
        return cls(torch.zeros(size, dtype=torch.float64), torch.eye(size, dtype=torch.float64) / scale**2, zero)

    def same_as(self, other: "GapPrior") -> bool:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(torch.equal(one, another) for one, another in pairs)

    def given(self, prior: Prior, delta: Tensor) -> Prior:
        """The prior of the coefficients, given δ."""
        if not bool(self.moving.any()):
            return prior
        shift = (self.moving @ (delta - self.mean)).to(prior.mean)
        return replace(prior, mean=prior.mean + shift)

    def log_density(self, delta: Tensor) -> Tensor:
        """log p(δ), for one δ or for rows of them."""
        away = delta - self.mean.to(delta)
        constant = 0.5 * float(torch.linalg.slogdet(self.precision).logabsdet) - 0.5 * len(self.mean) * LOG_2PI
        return constant - 0.5 * ((away @ self.precision.to(delta)) * away).sum(-1)

    def joint_precision(self, prior: Prior) -> Tensor:
        """The precision of (w, δ): [[P, -PM], [-MᵀP, Q + MᵀPM]] with P = S₀⁻¹."""
        M, P = self.moving, prior.plus(torch.zeros(2 * (len(prior.mean),), dtype=torch.float64))
        return torch.cat([torch.cat([P, -P @ M], 1), torch.cat([-M.T @ P, self.precision + M.T @ P @ M], 1)])


@dataclass(frozen=True)
class Gaps:
    """The level constants and the prior of the gaps, given n_k of all K levels."""

    counts: Tensor
    prior: GapPrior

    @property
    def size(self) -> int:
        return len(self.counts) - 2

    @property
    def middle(self) -> Tensor:
        return self.counts[1:-1]

    def start(self) -> Tensor:
        """δ at which the levels of rows without features have their shares."""
        shares = (self.counts + 0.5).cumsum(0)[:-1] / (self.counts + 0.5).sum()
        return torch.logit(shares).diff().log()

    def constant(self, delta: Tensor) -> Tensor:
        """Σ_k n_k log(1 - e^{-g_k}) + log p(δ), for one δ or for rows of them."""
        return (self.middle * log_one_minus_exp(delta.exp())).sum(-1) + self.prior.log_density(delta)

    def derivatives(
        self, delta: Tensor, weights: Tensor, sums: ThresholdSums, mean: Tensor, factor: Tensor, prior: Prior
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient and negative Hessian in δ of the ELBO, averaged over points δ (points × gaps) with these weights.

        `mean` and `factor` are those of q, `prior` is that of w given the mean of δ. Only the Hessian allows for the
        mean of q, which follows δ by R, the third result. q's covariance is held.
        """
        g, B, M = delta.exp(), threshold_matrix(self.size), self.prior.moving
        pulled = prior.apply(M)  # PM
        in_gaps = -sums.residual @ B + self.middle / torch.expm1(g)
        average = weights @ delta
        slope = weights @ (g * in_gaps) - self.prior.precision @ (average - self.prior.mean)
        slope = slope + pulled.T @ (mean - prior.mean)
        # d²/dg² log(1 - e^{-g}) = -e^g/(e^g - 1)²
        own = weights @ (self.middle * g.square() / (torch.expm1(g) * -torch.expm1(-g)) - g * in_gaps)
        bend = torch.diag(own) + self.prior.precision + M.T @ pulled
        response = torch.zeros_like(M)
        for weight, at, curvature in zip(weights, g, sums.curvature, strict=True):
            inner = factor.T @ (sums.cross @ (B * at) + pulled)
            bend = bend + weight * ((B * at).T @ (curvature[:, None] * (B * at)) - inner.T @ inner)
            response = response + weight * (factor @ inner)
        return slope, bend, response


def log_one_minus_exp(gap: Tensor) -> Tensor:
    """log(1 - e^{-g}), to the last digits for small and large g."""
    return torch.where(gap < math.log(2.0), (-torch.expm1(-gap)).log(), torch.log1p(-(-gap).exp()))


def threshold_matrix(size: int) -> Tensor:
    """B with t = B g: cumulative sums less their mean, (size + 1) × size."""
    steps = torch.ones(size + 1, size, dtype=torch.float64).tril(-1)
    return steps - steps.mean(0)


def thresholds_of(delta: Tensor) -> Tensor:
    """t = B e^δ, for one δ or for rows of them."""
    return delta.exp() @ threshold_matrix(delta.shape[-1]).to(delta).T


def inverse_root(matrix: Tensor) -> Tensor:
    """The symmetric square root of H⁻¹, with the sizes of H's eigenvalues where they are not positive.

    A symmetric root does not depend on the order of the gaps, and neither do points on its axes.
    """
    if not len(matrix):
        return matrix
    values, vectors = torch.linalg.eigh(matrix)
    size = values.abs()
    return (vectors * size.clamp(min=LEAST_BEND * float(size.max())).rsqrt()) @ vectors.T


def level_shares(below: Tensor, above: Tensor) -> Tensor:
    """P(y = k) of all levels from P(y ≤ k) and P(y > k) of all but the last, on the last axis.

    Each is the difference of the smaller tails, so that small ones keep their digits.
    """
    inside = torch.where(
        above[..., :-1] < below[..., 1:], above[..., :-1] - above[..., 1:], below[..., 1:] - below[..., :-1]
    )
    return torch.cat([below[..., :1], inside.clamp(min=0.0), above[..., -1:]], -1)
