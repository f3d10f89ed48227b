"""The posterior of K classes as a value: moments of centred coefficients and contrasts, draws, and predictions.

Only contrasts of w_1, ..., w_K are known. They are reported as β_k = w_k - w̄, which sum to zero over classes:

    Cov(β_j, β_k) = 1[j = k] S_j - (S_j + S_k)/K + Σ_i S_i/K²,      Cov(w_j - w_k) = S_j + S_k (j ≠ k), S_k = P_k⁻¹.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from viper.inference.classes.star import Star, StarPrior, centred_classes
from viper.inference.classes.sums import EXACT_CLASSES, class_predictors
from viper.inference.rows import Block

LOG_TAU = math.log(2.0 * math.pi)


class StarPosterior:
    """What the full and the diagonal family have in common. Coefficients are (K, d), classes first."""

    means: Tensor

    @property
    def factor(self) -> Tensor:
        """See `Star.factor`."""
        raise NotImplementedError

    @property
    def own_covariances(self) -> Tensor:
        """S_k (K, d, d)."""
        raise NotImplementedError

    @property
    def own_variances(self) -> Tensor:
        """diag S_k (K, d)."""
        raise NotImplementedError

    @property
    def mean(self) -> Tensor:
        return self.means

    @property
    def variance(self) -> Tensor:
        """Variances of the centred coefficients, (K, d)."""
        own, K = self.own_variances, len(self.means)
        return (1.0 - 2.0 / K) * own + own.sum(0) / K**2

    def covariance(self) -> Tensor:
        """Covariance of the centred coefficients, (K d, K d), class by class."""
        S, (K, d) = self.own_covariances, self.means.shape
        blocks = (S.sum(0) / K**2 - (S[:, None] + S[None]) / K).clone()
        blocks[torch.arange(K), torch.arange(K)] += S
        return blocks.permute(0, 2, 1, 3).reshape(K * d, K * d)

    def contrast(self, baseline: int) -> tuple[Tensor, Tensor]:
        """Means and variances (K, d) of w_k - w_baseline; zero for the baseline itself."""
        variance = self.own_variances + self.own_variances[baseline]
        variance[baseline] = 0.0
        return self.means - self.means[baseline], variance

    def latent(self, block: Block) -> tuple[Tensor, Tensor]:
        """ϑ and τ² (n, K) of the rows of a block, up to a common shift."""
        theta, tau2 = class_predictors(block, self.means, self.factor)
        assert tau2 is not None
        return theta, tau2.clamp(min=0.0)

    def draw(self, noise: Tensor) -> Tensor:
        """Draws of the centred coefficients from standard normal noise, both (s, K, d)."""
        if self.factor.ndim == 2:
            moved = noise * self.factor.sqrt()
        else:
            moved = torch.einsum("kij,skj->ski", self.factor, noise)
        found = self.means + moved
        return found - found.mean(1, keepdim=True)

    @cached_property
    def star(self) -> Star:
        """The means with their precisions."""
        if self.factor.ndim == 2:
            return Star(self.means, 1.0 / self.factor)
        inverse = torch.linalg.inv(self.factor)
        return Star(self.means, inverse.mT @ inverse)

    def log_density(self, draws: Tensor) -> Tensor:
        """log q of the contrasts of draws (s, K, d), in the coordinates of `star_log_density`."""
        return star_log_density(StarPrior(self.means, self.star.precision), draws)

    def as_prior(self, forget: float = 1.0) -> Star:
        """Return the posterior as a prior for the next rows, with its precision multiplied by `forget`."""
        return Star(self.means, forget * self.star.precision)

    def expected_log_likelihoods(self, block: Block) -> Tensor:
        """E_q[log p(y_i | f_i)] = ϑ_y - η of each row."""
        theta, tau2 = self.latent(block)
        return theta.gather(1, block.label.long()[:, None])[:, 0] - EXACT_CLASSES(theta, tau2)[0]

    def correct(self, block: Block) -> Tensor:
        """Whether the most probable class of each row is its own."""
        return EXACT_CLASSES(*self.latent(block))[1].argmax(1) == block.label.long()


@dataclass(frozen=True)
class FullStar(StarPosterior):
    """w_k ~ N(μ_k, F_k F_kᵀ) up to a common shift."""

    means: Tensor
    factors: Tensor

    @property
    def factor(self) -> Tensor:
        return self.factors

    @property
    def own_covariances(self) -> Tensor:
        return self.factors @ self.factors.mT

    @property
    def own_variances(self) -> Tensor:
        return self.factors.square().sum(2)


@dataclass(frozen=True)
class DiagonalStar(StarPosterior):
    """w_k ~ N(μ_k, diag v_k) up to a common shift."""

    means: Tensor
    variances: Tensor

    @property
    def factor(self) -> Tensor:
        return self.variances

    @property
    def own_covariances(self) -> Tensor:
        return torch.diag_embed(self.variances)

    @property
    def own_variances(self) -> Tensor:
        return self.variances.clone()


def posterior_of_star(q: Star) -> FullStar | DiagonalStar:
    """The solver's star as a posterior, with centred means."""
    mean = centred_classes(q.mean)
    return DiagonalStar(mean, q.factor) if q.diagonal else FullStar(mean, q.factor)


def star_log_density(star: StarPrior, draws: Tensor) -> Tensor:
    """log density of the contrasts of draws (s, K, d), in terms of the differences w_k - w_K, k < K."""
    K, d = star.mean.shape
    shift = draws - star.mean
    distance = (shift * star.times(shift)).sum((-2, -1))
    return 0.5 * (star.log_volume - distance - (K - 1) * d * LOG_TAU)
