"""q(β) = Σ_j π_j N(μ_j, Σ_j) as a value: moments, draws, density, and the moments of f for rows.

A row has a ϑ and a τ² for each component, and an average over β is a weighted sum of averages under the components.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.inference.problem import LOG_2PI
from viper.inference.rows import Block, Matrix
from viper.softplus.expectation import expected_softplus
from viper.softplus.limit import limit

QUANTILE_HALVINGS = 60  # halvings of the interval that contains a quantile
OUTERMOST = 10.0  # standard deviations; quantiles lie within so many of the outermost components
GAP_SEED = 1


@dataclass(frozen=True)
class GaussianMixture:
    """Σ_j π_j N(μ_j, F_j F_jᵀ), with the guess r(j | β) of the bound on its entropy (`mixture.family`).

    Row k of the guess holds a_k and b_k; the last row is not used, because the last component takes the rest.
    """

    weights: Tensor  # J
    means: Tensor  # J × d
    factors: Tensor  # J × d × d
    guess_offsets: Tensor  # J
    guess_slopes: Tensor  # J × d

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (len(self.weights),)

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """The shape of the standard normal noise of a draw; the last number chooses the component."""
        return (self.means.shape[1] + 1,)

    @property
    def mean(self) -> Tensor:
        return self.weights @ self.means

    @property
    def variance(self) -> Tensor:
        return self.covariance().diagonal()

    @property
    def sds(self) -> Tensor:
        """Standard deviations of the coefficients in each component, J × d."""
        return torch.linalg.vector_norm(self.factors, dim=2)

    def covariance(self) -> Tensor:
        """Σ_j π_j (Σ_j + μ_j μ_jᵀ) - μ μᵀ."""
        shift = self.means - self.mean
        inside = self.factors @ self.factors.mT + shift[:, :, None] * shift[:, None]
        return torch.einsum("j,jab->ab", self.weights, inside)

    def spread(self, design: Matrix) -> Tensor:
        """diag(A Cov(β) Aᵀ)."""
        return design.spread(torch.linalg.cholesky(self.covariance()))

    def draw(self, noise: Tensor) -> Tensor:
        """Draws (k × d) from standard normal noise, k × (d + 1)."""
        share = torch.special.ndtr(noise[:, -1].contiguous())
        which = torch.searchsorted(self.weights.cumsum(0)[:-1].contiguous(), share)
        return self.means[which] + torch.einsum("kab,kb->ka", self.factors[which], noise[:, :-1])

    def log_density(self, noise: Tensor) -> Tensor:
        """log q at `draw(noise)`."""
        return self.log_density_at(self.draw(noise))

    def log_density_at(self, draws: Tensor) -> Tensor:
        """log q of each row."""
        return torch.logsumexp(self.log_parts(draws), 0)

    def log_parts(self, draws: Tensor) -> Tensor:
        """log π_j N(β; μ_j, Σ_j), components × draws."""
        parts = []
        for weight, mean, factor in zip(self.weights, self.means, self.factors, strict=True):
            z = torch.linalg.solve(factor, (draws - mean).T)
            log_scale = torch.linalg.slogdet(factor).logabsdet
            parts.append(weight.log() - log_scale - 0.5 * (z.square().sum(0) + draws.shape[1] * LOG_2PI))
        return torch.stack(parts)

    def log_guess(self, draws: Tensor) -> Tensor:
        """log r(j | β), components × draws."""
        z = self.guess_offsets[:, None] + self.guess_slopes @ draws.T
        here, past = (torch.nn.functional.logsigmoid(sign * z) for sign in (1.0, -1.0))
        here[-1] = 0.0
        return here + past.cumsum(0) - past

    def latent(self, block: Block) -> tuple[Tensor, Tensor]:
        """ϑ and τ² of the rows of a block under each component, rows × J."""
        theta = block.design.project(self.means.T.contiguous())
        tau2 = torch.stack([block.design.spread(factor) for factor in self.factors], 1).clamp(min=0.0)
        if block.offset is not None:
            theta = theta + block.offset[:, None]
        return theta, tau2 if block.residual is None else tau2 + block.residual[:, None]

    def expected_log_likelihoods(self, block: Block) -> Tensor:
        """E[log p(y_i | f_i)] of each row."""
        theta, tau2 = self.latent(block)
        return (block.label[:, None] * theta - limit().moments(theta, tau2)[0]) @ self.weights

    def correct(self, block: Block) -> Tensor:
        """Whether the more probable class of each row is its own."""
        probability = limit().moments(*self.latent(block))[1] @ self.weights
        return (probability > 0.5) == (block.label > 0.5)

    def entropy_gap(self, draws: int = 20_000, random_state: int = GAP_SEED) -> tuple[float, float]:
        """Estimate by how many nats the bound on the entropy puts `elbo_` below the ELBO; with its standard error.

        The gap is the mean divergence from the true probabilities of the components, given β, to the guess.
        """
        noise = np.random.default_rng(random_state).standard_normal((draws, *self.noise_shape))
        beta = self.draw(torch.from_numpy(noise).to(self.weights))
        truth = torch.log_softmax(self.log_parts(beta), 0)
        values = (truth.exp() * (truth - self.log_guess(beta))).sum(0)
        return float(values.mean()), float(values.std()) / draws**0.5

    def coefficient_ends(self, level: float) -> Tensor:
        """Quantiles of each coefficient, d × 2, that leave the same share on either side."""
        return quantiles_of_mixtures(self.means.T, self.sds.T, self.weights, level)

    def positive(self) -> Tensor:
        """P(β_j > 0) of each coefficient."""
        return self.weights @ torch.special.ndtr(self.means / self.sds)


def count_gaussians(posterior: Any) -> int:
    """Return the number of Gaussians in a posterior."""
    return len(posterior.weights) if isinstance(posterior, GaussianMixture) else 1


def entropy_terms(log_weights: Tensor, means: Tensor, factors: Tensor, guess: Tensor) -> Tensor:
    """H_j - log π_j + E_j[log r(j | β)] of each component; `guess` has (a_k, b_k) in its rows."""
    half_logs = torch.linalg.slogdet(factors).logabsdet  # ½ log |Σ_j|
    total = half_logs + 0.5 * means.shape[1] * (1.0 + LOG_2PI) - log_weights
    if not len(guess):
        return total
    z = guess[:, 0] + means @ guess[:, 1:].T  # components × decisions
    spread = torch.stack([(factor.T @ guess[:, 1:].T).square().sum(0) for factor in factors])
    yes, no = (-expected_softplus(sign * z, spread).value for sign in (-1.0, 1.0))  # E log s(z), E log s(-z)
    return total + no.tril(-1).sum(1) + torch.cat([yes.diagonal(), yes.new_zeros(1)])


def quantiles_of_mixtures(means: Tensor, sds: Tensor, weights: Tensor, level: float) -> Tensor:
    """The ends of central intervals of mixtures of normals (rows × J), rows × 2, by halving."""
    reach = OUTERMOST * sds.max(1).values
    ends = []
    for q in (0.5 - 0.5 * level, 0.5 + 0.5 * level):
        low, high = means.min(1).values - reach, means.max(1).values + reach
        for _ in range(QUANTILE_HALVINGS):
            middle = 0.5 * (low + high)
            under = torch.special.ndtr((middle[:, None] - means) / sds) @ weights < q
            low, high = torch.where(under, middle, low), torch.where(under, high, middle)
        ends.append(0.5 * (low + high))
    return torch.stack(ends, 1)
