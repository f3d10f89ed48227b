"""q(β) as a value: moments, draws, densities, and the moments of f for new rows.

There are three forms, all N(μ, Σ): a full covariance with factor Σ = FFᵀ, a diagonal one, and the posterior of more
coefficients than rows, where the data inform only the n directions they span and all others keep the prior.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from viper.inference.classes.posterior import StarPosterior
from viper.inference.mixture.posterior import GaussianMixture
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.problem import LOG_2PI, Prior
from viper.inference.rows import Block, Matrix, RowSource
from viper.softplus.pointwise import Formula

LEAST_OUTSIDE = 1e-2  # share of a coefficient's prior variance outside the span; below it, 1 - ‖q‖² loses digits
LEAST_SPREAD = 1e-6  # likewise, share of a row's prior τ²


@dataclass(frozen=True)
class Full:
    """N(μ, FFᵀ)."""

    mean: Tensor
    factor: Tensor

    @property
    def variance(self) -> Tensor:
        """Marginal variances, diag Σ."""
        return self.factor.square().sum(1)

    def covariance(self) -> Tensor:
        return self.factor @ self.factor.T

    def spread(self, design: Matrix) -> Tensor:
        """diag(A Σ Aᵀ)."""
        return design.spread(self.factor)

    def draw(self, noise: Tensor) -> Tensor:
        """Draws (k × d) from standard normal noise of the same shape."""
        return self.mean + noise @ self.factor.T

    def log_density(self, noise: Tensor) -> Tensor:
        """log q at `draw(noise)`."""
        return gaussian_log_density(noise, self.log_scale)

    @property
    def log_scale(self) -> Tensor:
        """½ log |Σ|."""
        return torch.linalg.slogdet(self.factor).logabsdet

    def as_prior(self, forget: float = 1.0) -> Prior:
        """Return this Gaussian as a prior for the next rows, with its precision multiplied by `forget`."""
        inverse = torch.linalg.inv(self.factor)
        return Prior(self.mean, forget * inverse.T @ inverse)


@dataclass(frozen=True)
class Diagonal:
    """N(μ, diag v)."""

    mean: Tensor
    variance: Tensor

    def covariance(self) -> Tensor:
        return torch.diag(self.variance)

    def spread(self, design: Matrix) -> Tensor:
        return design.spread(self.variance)

    def draw(self, noise: Tensor) -> Tensor:
        return self.mean + noise * self.variance.sqrt()

    def log_density(self, noise: Tensor) -> Tensor:
        return gaussian_log_density(noise, self.log_scale)

    @property
    def log_scale(self) -> Tensor:
        return 0.5 * self.variance.log().sum()

    def as_prior(self, forget: float = 1.0) -> Prior:
        return Prior(self.mean, forget / self.variance)


@dataclass(frozen=True)
class LowRank:
    """N(m₀ + DQω, D(I + Q(FFᵀ - I)Qᵀ)D): N(m₀, D²), but w ~ N(ω, FFᵀ) in the span of an orthonormal Q.

    With more coefficients than rows N(m₀, D²) is the prior, and Q spans the rows. In the low-rank family m₀ is the
    posterior mean and D² the diagonal part, which is narrower than the prior.
    """

    prior_mean: Tensor
    prior_sd: Tensor
    basis: Tensor
    inner_mean: Tensor
    inner_factor: Tensor

    @property
    def mean(self) -> Tensor:
        return self.prior_mean + self.prior_sd * (self.basis @ self.inner_mean)

    @property
    def variance(self) -> Tensor:
        inside = (self.basis @ self.inner_factor).square_().sum(1)
        outside = 1.0 - self.basis.square().sum(1)
        near = (outside < LEAST_OUTSIDE).nonzero()[:, 0]  # 1 - ‖q‖² cancels there; ‖e - Qq‖² does not
        rest = -self.basis[near] @ self.basis.T
        rest[torch.arange(len(near)), near] += 1.0
        outside[near] = rest.square_().sum(1)
        return self.prior_sd.square() * (inside + outside)

    @property
    def outside_sd(self) -> Tensor:
        """D, with 0 for coordinates that are columns of Q, because they lie inside the span."""
        contained = (self.basis.amax(1) == 1.0) & (self.basis.abs().sum(1) == 1.0)
        return self.prior_sd.masked_fill(contained, 0.0)

    def covariance(self) -> Tensor:
        scaled = self.prior_sd[:, None] * self.basis
        inner = self.inner_factor @ self.inner_factor.T
        inner.diagonal().sub_(1.0)
        total = scaled @ inner @ scaled.T
        total.diagonal().copy_(self.variance)
        return total

    def spread(self, design: Matrix) -> Tensor:
        # ‖Da‖² - ‖QᵀDa‖² + ‖FᵀQᵀDa‖²
        sd = self.outside_sd
        prior = design.spread(sd.square())
        inside = design.spread(self.prior_sd[:, None] * (self.basis @ self.inner_factor))
        outside = (prior - design.spread(sd[:, None] * self.basis)).clamp(min=0.0)
        cancelled = (prior * LEAST_SPREAD > outside + inside).nonzero()[:, 0]
        for some in cancelled.split(len(self.inner_mean)):  # ‖Da - QQᵀDa‖² is exact, but dense
            rows = design.pull(torch.nn.functional.one_hot(some, len(prior)).T.to(prior)).T * sd
            outside[some] = (rows - rows @ self.basis @ self.basis.T).square_().sum(1)
        return outside + inside

    def draw(self, noise: Tensor) -> Tensor:
        inside = noise @ self.basis
        moved = self.inner_mean + inside @ self.inner_factor.T
        return self.prior_mean + self.prior_sd * (noise - inside @ self.basis.T + moved @ self.basis.T)

    def log_density(self, noise: Tensor) -> Tensor:
        return gaussian_log_density(noise, self.log_scale)

    @property
    def log_scale(self) -> Tensor:
        return self.prior_sd.log().sum() + torch.linalg.slogdet(self.inner_factor).logabsdet

    def as_prior(self, forget: float = 1.0) -> Prior:
        # Σ⁻¹ = D⁻¹(I + Q(F⁻ᵀF⁻¹ - I)Qᵀ)D⁻¹, where nothing is wider than N(m₀, D²): F⁻ᵀF⁻¹ - I = EEᵀ
        inverse = torch.linalg.inv(self.inner_factor)
        values, vectors = torch.linalg.eigh(inverse.T @ inverse)
        added = math.sqrt(forget) * vectors * (values - 1.0).clamp(min=0.0).sqrt()
        return Prior(self.mean, forget / self.prior_sd.square(), (self.basis @ added) / self.prior_sd[:, None])


Posterior = Full | Diagonal | LowRank


def square_factor(posterior: Posterior) -> Tensor:
    """F with Σ = FFᵀ, d × d; for `LowRank` it is D(I + Q(F - I)Qᵀ), because Q is orthonormal."""
    if isinstance(posterior, Full):
        return posterior.factor
    assert isinstance(posterior, LowRank)
    inner = posterior.inner_factor.clone()
    inner.diagonal().sub_(1.0)
    whole = posterior.basis @ inner @ posterior.basis.T
    whole.diagonal().add_(1.0)
    return posterior.prior_sd[:, None] * whole


@dataclass(frozen=True)
class Several:
    """Independent Gaussians, one for each column of y. ϑ and τ² of the rows have a column for each."""

    parts: tuple[Posterior, ...]

    @property
    def mean(self) -> Tensor:
        return torch.stack([part.mean for part in self.parts])

    @property
    def variance(self) -> Tensor:
        return torch.stack([part.variance for part in self.parts])

    def covariance(self) -> Tensor:
        return torch.stack([part.covariance() for part in self.parts])

    def latent(self, block: Block) -> tuple[Tensor, Tensor]:
        """ϑ and τ², rows × columns of y. Offsets may have columns too."""
        o = block.offset
        offsets = [o] * len(self.parts) if o is None or o.ndim == 1 else o.unbind(1)
        blocks = [replace(block, offset=offset) for offset in offsets]
        means, variances = zip(*map(latent, blocks, self.parts), strict=True)
        return torch.stack(means, 1), torch.stack(variances, 1)


Moved = TypeVar("Moved")  # a Gaussian or a mixture of them, whose fields are tensors


def moved(value: Moved, device: torch.device | str) -> Moved:
    """Return the Gaussian on a device; unchanged if it is already there."""
    if isinstance(value, Several):
        return replace(value, parts=tuple(moved(part, device) for part in value.parts))
    given: Any = value
    parts = {field.name: getattr(given, field.name) for field in fields(given)}
    there = torch.device(device)
    elsewhere = {name: x.to(there) for name, x in parts.items() if x is not None and x.device != there}
    return cast(Moved, replace(given, **elsewhere)) if elsewhere else value


def gaussian_log_density(noise: Tensor, log_scale: Tensor) -> Tensor:
    """log N(x; μ, Σ) where Σ^{-1/2}(x - μ) = noise and log_scale = ½ log|Σ|."""
    return -0.5 * (noise.square().sum(-1) + noise.shape[-1] * LOG_2PI) - log_scale


def prior_log_density(prior: Prior, draws: Tensor) -> Tensor:
    """log p(β) for each row β of `draws`."""
    shift = draws - prior.mean
    quadratic = (shift * prior.apply(shift.T).T).sum(1)
    return 0.5 * (prior.log_determinant - quadratic - draws.shape[1] * LOG_2PI)


def noise_shape(posterior: Any) -> tuple[int, ...]:
    """The shape of the standard normal noise of a draw."""
    return tuple(getattr(posterior, "noise_shape", posterior.mean.shape))


def latent_shape(posterior: Any) -> tuple[int, ...]:
    """The shape of ϑ, and of τ², of a row."""
    return tuple(getattr(posterior, "latent_shape", posterior.mean.shape[:-1]))


def latent(
    block: Block, posterior: Posterior | Several | StarPosterior | OrdinalPosterior | GaussianMixture
) -> tuple[Tensor, Tensor]:
    """ϑ and τ² of the rows of a block."""
    if isinstance(posterior, Several | StarPosterior | OrdinalPosterior | GaussianMixture):
        return posterior.latent(block)
    theta = block.design.project(posterior.mean)
    tau2 = posterior.spread(block.design).clamp(min=0.0)
    return (
        theta if block.offset is None else theta + block.offset,
        tau2 if block.residual is None else tau2 + block.residual,
    )


def expected_log_likelihood(
    source: RowSource, posterior: Posterior | StarPosterior | GaussianMixture, moments: Formula
) -> float:
    """Σ_i c_i E_q[log p(y_i | f_i)] = Σ_i c_i (y_i ϑ_i - η(ϑ_i, τ_i²))."""
    return float(source.reduce(partial(block_expected_log_likelihood, posterior=posterior, moments=moments))[0])


def block_expected_log_likelihood(
    block: Block, posterior: Posterior | StarPosterior | GaussianMixture, moments: Formula
) -> list[Tensor]:
    if isinstance(posterior, StarPosterior | GaussianMixture):
        terms = posterior.expected_log_likelihoods(block)
    else:
        theta, tau2 = latent(block, posterior)
        terms = block.label * theta - moments(theta, tau2)[0]
    return [terms.sum() if block.weight is None else block.weight @ terms]


def accuracy(source: RowSource, posterior: Posterior | Several | StarPosterior | GaussianMixture) -> float:
    """Return the (weighted) share of rows whose class, or whose labels, are predicted correctly."""
    correct, total = source.reduce(partial(block_accuracy, posterior=posterior))
    return float(correct / total)


def block_accuracy(block: Block, posterior: Posterior | Several | StarPosterior | GaussianMixture) -> list[Tensor]:
    if isinstance(posterior, StarPosterior | GaussianMixture):
        correct = posterior.correct(block)
    else:
        correct = (latent(block, posterior)[0] > 0) == (block.label > 0.5)
    correct = correct.reshape(len(correct), -1).all(1).to(torch.float64)  # all labels of a row must be correct
    weight = torch.ones_like(correct) if block.weight is None else block.weight
    return [weight @ correct, weight.sum()]
