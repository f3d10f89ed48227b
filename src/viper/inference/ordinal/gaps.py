"""Thresholds t_1 < … < t_{K-1} by the logarithms δ of the gaps between them.

    g = e^δ,      t = B g,      Σ_j t_j = 0,

with one gap for each of the K-2 middle levels. Centred thresholds make the order of the levels reversible: reversed
gaps are the thresholds with their signs and order reversed. Where they lie is the intercept's business.

What the rows with two classes (`rows`) leave out of the likelihood is Σ_k n_k log(1 - e^{-g_k}), n_k the weight of the
rows of level k, and the prior is δ_k ~ N(0, σ²).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
class Gaps:
    """The level constants and the prior of the gaps, given n_k of all K levels and σ."""

    counts: Tensor
    scale: float

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
        prior = -0.5 * (delta / self.scale).square() - math.log(self.scale) - 0.5 * math.log(2.0 * math.pi)
        return (self.middle * log_one_minus_exp(delta.exp()) + prior).sum(-1)

    def derivatives(
        self, delta: Tensor, weights: Tensor, sums: ThresholdSums, response: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradient and negative Hessian in δ of the ELBO, averaged over points δ (points × gaps) with these weights.

        Only the Hessian allows for the mean of q, which follows by `response` = dμ/dt. q's covariance is held.
        """
        g, B = delta.exp(), threshold_matrix(self.size)
        in_gaps = -sums.residual @ B + self.middle / torch.expm1(g)
        slope = weights @ (g * in_gaps - delta / self.scale**2)
        # d²/dg² log(1 - e^{-g}) = -e^g/(e^g - 1)²
        own = weights @ (self.middle * g.square() / (torch.expm1(g) * -torch.expm1(-g)) - g * in_gaps)
        bend = torch.diag(own + self.scale**-2)
        for weight, at, curvature in zip(weights, g, sums.curvature, strict=True):
            outer = torch.diag(curvature) - sums.cross.T @ response
            bend = bend + weight * (B * at).T @ outer @ (B * at)
        return slope, bend


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
