"""The posterior of an ordinal regression: log gaps δ, and coefficients w given δ, both Gaussian.

    δ ~ N(δ̂, GGᵀ),      w | δ ~ N(μ + R(δ - δ̂), FFᵀ)

The first is Laplace's approximation at the δ that maximises the ELBO over q(w); the second is q(w) there, with a mean
that follows its optimum as δ moves. Draws of (w, δ) always have thresholds in order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from viper.inference.ordinal.gaps import GapPrior, threshold_matrix, thresholds_of
from viper.inference.problem import LOG_2PI, Prior
from viper.inference.rows import Block, Matrix


@dataclass(frozen=True)
class OrdinalPosterior:
    """w given δ, and δ; the last entry of w is the intercept, minus the mean of the thresholds."""

    mean: Tensor  # μ
    factor: Tensor  # F
    response: Tensor  # R = dμ/dδ
    log_gaps: Tensor  # δ̂
    gap_factor: Tensor  # G

    @property
    def size(self) -> int:
        """Number of gaps."""
        return len(self.log_gaps)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (len(self.points()[1]),) if self.size else ()

    @property
    def noise_shape(self) -> tuple[int, ...]:
        return (len(self.mean) + self.size,)

    @classmethod
    def from_joint(cls, mean: Tensor, log_gaps: Tensor, covariance: Tensor) -> "OrdinalPosterior":
        """The Gaussian of (w, δ) with these means and this covariance."""
        d = len(mean)
        of_w, between, of_gaps = covariance[:d, :d], covariance[:d, d:], covariance[d:, d:]
        response = torch.linalg.solve(of_gaps, between.T).T
        given = of_w - response @ between.T
        return cls(mean, torch.linalg.cholesky(given), response, log_gaps, torch.linalg.cholesky(of_gaps))

    @property
    def joint_mean(self) -> Tensor:
        """The mean of (w, δ)."""
        return torch.cat([self.mean, self.log_gaps])

    @property
    def joint_factor(self) -> Tensor:
        """[[F, RG], [0, G]], which maps standard normal noise to (w, δ)."""
        below = self.factor.new_zeros(self.size, len(self.mean))
        return torch.cat([torch.cat([self.factor, self.moving], 1), torch.cat([below, self.gap_factor], 1)])

    @property
    def moving(self) -> Tensor:
        """R G: how the mean of w moves with standard normal coordinates of δ."""
        return self.response @ self.gap_factor

    @property
    def variance(self) -> Tensor:
        """Marginal variances of w."""
        return self.factor.square().sum(1) + self.moving.square().sum(1)

    def covariance(self) -> Tensor:
        """Marginal covariance of w."""
        return self.factor @ self.factor.T + self.moving @ self.moving.T

    def spread(self, design: Matrix) -> Tensor:
        """diag(A Cov(w) Aᵀ)."""
        inside = design.spread(self.factor)
        return inside if not self.size else inside + design.project(self.moving).square().sum(1)

    def draw(self, noise: Tensor) -> Tensor:
        """Draws (k × (d + gaps)) of (w, δ) from standard normal noise of the same shape."""
        inner, z = noise[:, : len(self.mean)], noise[:, len(self.mean) :]
        w = self.mean + inner @ self.factor.T + z @ self.moving.T
        return torch.cat([w, self.log_gaps + z @ self.gap_factor.T], 1)

    def log_density(self, noise: Tensor) -> Tensor:
        """log q at `draw(noise)`."""
        scales = [torch.linalg.slogdet(part).logabsdet for part in (self.factor, self.gap_factor)]
        return -0.5 * (noise.square() + LOG_2PI).sum(1) - scales[0] - scales[1]

    def as_prior(self, forget: float = 1.0) -> tuple[Prior, GapPrior]:
        """Return the posterior as a prior for the next rows, with its precision multiplied by `forget`."""
        inverse, of_gaps = torch.linalg.inv(self.factor), torch.linalg.inv(self.gap_factor)
        gaps = GapPrior(self.log_gaps, forget * of_gaps.T @ of_gaps, self.response)
        return Prior(self.mean, forget * inverse.T @ inverse), gaps

    def points(self) -> tuple[Tensor, Tensor]:
        """Standard normal coordinates of a few δ (k × gaps) and their weights, which are positive.

        The points have mean 0 and covariance I. Up to three gaps, they also match the fourth moments of each axis,
        because they are the Gauss-Hermite points with three nodes per axis.
        """
        m = self.size
        if not m:
            return self.mean.new_zeros(1, 0), self.mean.new_ones(1)
        reach = max(3, m)
        axes = reach**0.5 * torch.eye(m, dtype=self.mean.dtype, device=self.mean.device)
        places, weights = torch.cat([axes, -axes]), self.mean.new_full((2 * m,), 0.5 / reach)
        if m < 3:
            places = torch.cat([places, torch.zeros_like(axes[:1])])
            weights = torch.cat([weights, weights.new_full((1,), 1.0 - m / reach)])
        return places, weights

    def latent(self, block: Block) -> tuple[Tensor, Tensor]:
        """ϑ and τ² given each of the `points`, rows × points; without gaps, one of each per row."""
        theta, tau2 = block.design.project(self.mean), block.design.spread(self.factor).clamp(min=0.0)
        if block.offset is not None:
            theta = theta + block.offset
        if block.residual is not None:
            tau2 = tau2 + block.residual
        if not self.size:
            return theta, tau2
        moved = block.design.project(self.moving) @ self.points()[0].T
        return theta[:, None] + moved, tau2[:, None].expand_as(moved)

    def thresholds(self) -> tuple[Tensor, Tensor]:
        """The centred thresholds at each of the `points` (points × thresholds), and the weights of the points."""
        places, weights = self.points()
        return thresholds_of(self.log_gaps + places @ self.gap_factor.T), weights

    def parameters(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance of β and of the thresholds c_j = t_j - intercept, as g = e^δ is log-normal."""
        V, B = self.gap_factor @ self.gap_factor.T, threshold_matrix(self.size).to(self.mean)
        gaps = (self.log_gaps + 0.5 * V.diagonal()).exp()  # E g
        p = len(self.mean) - 1
        to_w = self.response @ V * gaps  # Cov(w, g)
        own = gaps[:, None] * torch.expm1(V) * gaps  # Cov(g)
        joint = torch.cat([torch.cat([self.covariance(), to_w], 1), torch.cat([to_w.T, own], 1)])
        change = joint.new_zeros(p + len(B), len(joint))
        change[:p, :p] = torch.eye(p).to(joint)
        change[p:, p], change[p:, p + 1 :] = -1.0, B
        return change @ torch.cat([self.mean, gaps]), change @ joint @ change.T
