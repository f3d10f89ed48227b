"""Thresholds t_1 < … < t_{K-1}, given by the logarithms δ of the gaps between them.

    g = e^δ,      t = B g,      Σ_j t_j = 0,

with one gap for each of the K-2 middle levels. Because thresholds are centred, the order of the levels can be reversed:
reversed gaps give the thresholds with signs and order reversed. The intercept determines where the thresholds lie.

The rows with two classes (`rows`) leave Σ_k n_k log(1 - e^{-g_k}) out of the likelihood, n_k the weight of the rows of
level k. The prior is Gaussian, δ ~ N(δ₀, Q⁻¹), and the prior mean of the coefficients may depend on δ. At first,
δ_k ~ N(0, σ²) independently of the coefficients; if rows are added to a fit, the prior is the posterior so far.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from viper.inference.problem import LOG_2PI, Prior

LEAST_BEND = 1e-8  # smallest curvature of the profile, relative to the largest; a negative one counts by its size


@dataclass(frozen=True)
class ThresholdSums:
    """Sums over the rows with two classes at a few points δ: c(y-g) and c h of each threshold, points × thresholds.

    `pull` and `cross` are the means over points of Aᵀ c(y-g), and of Aᵀ c h (d × thresholds).
    """

    residual: Tensor
    curvature: Tensor
    pull: Tensor
    cross: Tensor


@dataclass(frozen=True)
class GapPrior:
    """δ ~ N(δ₀, Q⁻¹); given δ, the prior mean of the coefficients is m₀ + M(δ - δ₀)."""

    mean: Tensor  # δ₀
    precision: Tensor  # Q
    moving: Tensor  # M, d × gaps

    @classmethod
    def independent(cls, size: int, dimension: int, scale: float) -> "GapPrior":
        """δ_k ~ N(0, σ²), independent of the d coefficients."""
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
    """The gaps' part of the objective, given the weights n_k of all K levels and the prior of the gaps."""

    counts: Tensor
    prior: GapPrior

    @property
    def size(self) -> int:
        return len(self.counts) - 2

    @property
    def middle(self) -> Tensor:
        return self.counts[1:-1]

    def start(self) -> Tensor:
        """The δ that reproduces the observed shares of the levels without features."""
        shares = (self.counts + 0.5).cumsum(0)[:-1] / (self.counts + 0.5).sum()
        return torch.logit(shares).diff().log()

    def constant(self, delta: Tensor) -> Tensor:
        """Σ_k n_k log(1 - e^{-g_k}) + log p(δ), for one δ or for rows of them."""
        return (self.middle * log_one_minus_exp(delta.exp())).sum(-1) + self.prior.log_density(delta)

    def derivatives(
        self, delta: Tensor, weights: Tensor, sums: ThresholdSums, mean: Tensor, factor: Tensor, prior: Prior
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient and negative Hessian in δ of the ELBO, averaged over points δ (points × gaps) with these weights.

        `mean` and `factor` belong to q; `prior` is that of w given the mean of δ. Only the Hessian accounts for the
        mean of q, which moves with δ by R, the third result. The covariance of q is held fixed.
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
    """B with t = B g: cumulative sums minus their mean, (size + 1) × size."""
    steps = torch.ones(size + 1, size, dtype=torch.float64).tril(-1)
    return steps - steps.mean(0)


def thresholds_of(delta: Tensor) -> Tensor:
    """t = B e^δ, for one δ or for rows of them."""
    return delta.exp() @ threshold_matrix(delta.shape[-1]).to(delta).T


def inverse_root(matrix: Tensor) -> Tensor:
    """The symmetric square root of H⁻¹; negative eigenvalues of H are replaced by their absolute values.

    A symmetric root does not depend on the order of the gaps, and neither do points on its axes.
    """
    if not len(matrix):
        return matrix
    values, vectors = torch.linalg.eigh(matrix)
    size = values.abs()
    return (vectors * size.clamp(min=LEAST_BEND * float(size.max())).rsqrt()) @ vectors.T


def level_shares(below: Tensor, above: Tensor) -> Tensor:
    """P(y = k) of all levels, from P(y ≤ k) and P(y > k) of all but the last, along the last axis.

    Each is a difference of the smaller tails, so that small probabilities keep their digits.
    """
    inside = torch.where(
        above[..., :-1] < below[..., 1:], above[..., :-1] - above[..., 1:], below[..., 1:] - below[..., :-1]
    )
    return torch.cat([below[..., :1], inside.clamp(min=0.0), above[..., -1:]], -1)
