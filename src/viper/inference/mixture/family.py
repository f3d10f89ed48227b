"""q(β) = Σ_j π_j N(μ_j, Σ_j): a mixture of Gaussians, for posteriors that are skewed.

    F = Σ_j π_j { E_j[log p(y, β)] + H_j - log π_j + E_j[log r(j | β)] }

The expected log likelihood is exact for every component. The entropy of a mixture has no closed form, but a lower bound
with any r(j | β), which guesses the component of a β: the gap is the mean KL divergence from the true probabilities of
the components to r. Here r decides one component after the other by a logistic regression on β,

    r(j | β) = s(z_j) Π_{k<j} s(-z_k),      z_k = a_k + b_kᵀβ,

whose expectations are those of softplus again, exact. If components have the same covariance, so is r for two of them.
So F is a lower bound on the log evidence, and for one component the ELBO.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from viper.inference.importance import log_likelihood
from viper.inference.posterior import LOG_2PI, Full, prior_log_density
from viper.inference.problem import Prior
from viper.inference.rows import Arrays, RowSource
from viper.softplus.expectation import expected_softplus
from viper.softplus.limit import limit

START_APART = 0.6  # standard deviations by which components start on either side of the mean
CURVE_STEP = 1e-4  # of ϑ, for the derivative of the curvature
SKEW_STEPS = 50  # to find the direction of the largest skewness
MOST_EVALUATIONS = 3000


@dataclass(frozen=True)
class GaussianMixture:
    """Σ_j π_j N(μ_j, F_j F_jᵀ)."""

    weights: Tensor  # J
    means: Tensor  # J × d
    factors: Tensor  # J × d × d

    @property
    def mean(self) -> Tensor:
        return self.weights @ self.means

    def covariance(self) -> Tensor:
        """Σ_j π_j (Σ_j + μ_j μ_jᵀ) - μ μᵀ."""
        shift = self.means - self.mean
        inside = self.factors @ self.factors.mT + shift[:, :, None] * shift[:, None]
        return torch.einsum("j,jab->ab", self.weights, inside)

    @property
    def variance(self) -> Tensor:
        return self.covariance().diagonal()

    def draw(self, count: int, generator: np.random.Generator) -> Tensor:
        """Draws, k × d, of components in proportion to their weights."""
        shares = (self.weights / self.weights.sum()).numpy()
        which = torch.from_numpy(generator.choice(len(shares), count, p=shares))
        noise = torch.from_numpy(generator.standard_normal((count, self.means.shape[1])))
        return self.means[which] + torch.einsum("kab,kb->ka", self.factors[which], noise)

    def log_density(self, draws: Tensor) -> Tensor:
        """log q of each row."""
        parts = []
        for weight, mean, factor in zip(self.weights, self.means, self.factors, strict=True):
            z = torch.linalg.solve(factor, (draws - mean).T)
            log_scale = torch.linalg.slogdet(factor).logabsdet
            parts.append(weight.log() - log_scale - 0.5 * (z.square().sum(0) + draws.shape[1] * LOG_2PI))
        return torch.logsumexp(torch.stack(parts), 0)

    def latent(self, design: Tensor, offset: Tensor | None) -> tuple[Tensor, Tensor]:
        """ϑ and τ² of rows under each component, rows × J."""
        theta = design @ self.means.T
        tau2 = torch.stack([(design @ factor).square().sum(1) for factor in self.factors], 1)
        return theta if offset is None else theta + offset[:, None], tau2


@dataclass(frozen=True)
class MixtureWeighedFit:
    """A mixture with the prior and the rows that it was fitted to."""

    posterior: GaussianMixture
    prior: Prior
    source: RowSource
    sparse: bool = False

    def weighed(
        self, count: int, generator: np.random.Generator, report: Callable[[int, int], None] | None = None
    ) -> tuple[Tensor, Tensor, float]:
        """Return draws from q, log p(y|β)p(β)/q(β) without its mean, and that mean's log: the log evidence."""
        draws = self.posterior.draw(count, generator)
        joint = log_likelihood(self.source, draws, report) + prior_log_density(self.prior, draws)
        log_ratio = joint - self.posterior.log_density(draws)
        log_evidence = float(torch.logsumexp(log_ratio, 0)) - math.log(count)
        return draws, log_ratio - log_evidence, log_evidence


@dataclass(frozen=True)
class Refining:
    """The rows and the prior in coordinates u in which the Gaussian posterior is N(0, I): β = μ + F u."""

    design: Tensor
    offset: Tensor
    label: Tensor
    weight: Tensor
    shift: Tensor  # mean of the prior
    precision: Tensor
    constant: float  # of log p(β), and log |F| of the entropy

    def bound(self, log_weights: Tensor, means: Tensor, factors: Tensor, guess: Tensor) -> Tensor:
        """F, a lower bound on the ELBO; `guess` has (a_k, b_k) in its rows."""
        theta = self.offset[:, None] + self.design @ means.T
        tau2 = torch.stack([(self.design @ factor).square().sum(1) for factor in factors], 1)
        eta = expected_softplus(theta, tau2).value
        likelihood = self.weight @ (self.label[:, None] * theta - eta)
        away = means - self.shift
        traces = torch.stack([(factor * (self.precision @ factor)).sum() for factor in factors])
        prior = -0.5 * (((away @ self.precision) * away).sum(1) + traces)
        entropy = entropy_terms(log_weights, means, factors, guess)
        return log_weights.exp() @ (likelihood + prior + entropy) + self.constant


def entropy_terms(log_weights: Tensor, means: Tensor, factors: Tensor, guess: Tensor) -> Tensor:
    """H_j - log π_j + E_j[log r(j | β)] of each component, for triangular factors."""
    half_logs = factors.diagonal(dim1=1, dim2=2).abs().log().sum(1)  # ½ log |Σ_j|
    total = half_logs + 0.5 * means.shape[1] * (1.0 + LOG_2PI) - log_weights
    if not len(guess):
        return total
    z = guess[:, 0] + means @ guess[:, 1:].T  # components × decisions
    spread = torch.stack([(factor.T @ guess[:, 1:].T).square().sum(0) for factor in factors])
    yes, no = (-expected_softplus(sign * z, spread).value for sign in (-1.0, 1.0))  # E log s(z), E log s(-z)
    return total + no.tril(-1).sum(1) + torch.cat([yes.diagonal(), yes.new_zeros(1)])


def refining(source: Arrays, prior: Prior, posterior: Full) -> Refining:
    """Rows and prior in the coordinates of the Gaussian posterior."""
    dense, F = source.dense_design(), posterior.factor
    rows, zero = dense @ F, torch.zeros(source.rows, dtype=torch.float64)
    offset = dense @ posterior.mean + (zero if source.offset is None else source.offset)
    precision = prior.precision if prior.precision.ndim == 2 else torch.diag(prior.precision)
    constant = 0.5 * prior.log_determinant - 0.5 * len(F) * LOG_2PI + float(torch.linalg.slogdet(F).logabsdet)
    shift = torch.linalg.solve(F, prior.mean - posterior.mean)
    weight = zero + 1.0 if source.weight is None else source.weight
    return Refining(rows, offset, source.label.to(torch.float64), weight, shift, F.T @ precision @ F, constant)


def skewed_directions(problem: Refining, count: int) -> Tensor:
    """Orthonormal directions of the largest third derivatives of the log likelihood, each with the sign of its skew."""
    tau2 = problem.design.square().sum(1)
    ends = [limit().moments(problem.offset + s * CURVE_STEP, tau2)[2] for s in (1.0, -1.0)]
    third = -problem.weight * (ends[0] - ends[1]) / (2.0 * CURVE_STEP)
    found: list[Tensor] = []
    rows = problem.design
    for _ in range(min(count, rows.shape[1])):
        starts = torch.eye(rows.shape[1], dtype=rows.dtype)
        best, size = starts[0], -1.0
        for start in starts[:8]:
            v = start
            for _ in range(SKEW_STEPS):
                move = rows.T @ (third * (rows @ v).square())
                v = move / move.norm().clamp(min=1e-300)
            if (value := abs(float(third @ (rows @ v) ** 3))) > size:
                best, size = v, value
        found.append(best)
        rows = rows - (rows @ best)[:, None] * best
    return torch.stack(found)


def start_of_mixture(problem: Refining, components: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means, a factor and guesses from which the search starts: equal weights, along the most skewed directions."""
    d = problem.design.shape[1]
    axes = skewed_directions(problem, math.ceil(math.log2(components)))
    signs = torch.tensor([[1.0 if (j >> bit) & 1 else -1.0 for bit in range(len(axes))] for j in range(components)])
    means = START_APART * signs.to(axes) @ axes
    inside = torch.eye(d, dtype=torch.float64) - START_APART**2 * axes.T @ axes  # so that the whole has covariance I
    guess = []
    for j in range(components - 1):  # component j against the mean of those that follow
        rest = means[j + 1 :].mean(0)
        b = torch.linalg.solve(inside, means[j] - rest)
        guess.append(torch.cat([(-0.5 * b @ (means[j] + rest) - math.log(components - 1 - j))[None], b]))
    return means, torch.linalg.cholesky(inside), torch.stack(guess)


def fit_mixture(source: Arrays, prior: Prior, posterior: Full, components: int) -> tuple[GaussianMixture, float]:
    """Maximise F by L-BFGS, from components along the directions of the largest skewness; return q and F."""
    problem = refining(source, prior, posterior)
    d = len(posterior.mean)
    eye, none = torch.eye(d, dtype=torch.float64), torch.zeros(0, 1 + d, dtype=torch.float64)
    if components == 1:
        one = torch.ones(1, dtype=torch.float64)
        value = problem.bound(one.log(), torch.zeros(1, d, dtype=torch.float64), eye[None], none)
        return GaussianMixture(one, posterior.mean[None], posterior.factor[None]), float(value)
    lower = torch.tril_indices(d, d, -1)
    sizes = [components, components * d, components * d, components * lower.shape[1], (components - 1) * (1 + d)]

    def unpacked(flat: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits, means, logs, below, guess = flat.split(sizes)
        factors = torch.diag_embed(logs.reshape(components, d).exp())
        factors[:, lower[0], lower[1]] = below.reshape(components, -1)
        return torch.log_softmax(logits, 0), means.reshape(components, d), factors, guess.reshape(-1, 1 + d)

    def negative(flat: np.ndarray) -> tuple[float, np.ndarray]:
        given = torch.from_numpy(flat).clone().requires_grad_()
        value = -problem.bound(*unpacked(given))
        value.backward()
        assert given.grad is not None
        return float(value.detach()), given.grad.numpy()

    means, factor, guess = start_of_mixture(problem, components)
    logs, below = factor.diagonal().log(), factor[lower[0], lower[1]]
    parts = [means.new_zeros(components), means, logs.repeat(components), below.repeat(components), guess]
    start = torch.cat([part.reshape(-1) for part in parts])
    options = {"maxiter": MOST_EVALUATIONS, "maxfun": MOST_EVALUATIONS, "ftol": 1e-12, "gtol": 1e-6, "maxcor": 30}
    found = scipy.optimize.minimize(negative, start.numpy(), jac=True, method="L-BFGS-B", options=options)
    log_weights, means, factors, _ = unpacked(torch.from_numpy(found.x))
    F = posterior.factor
    return GaussianMixture(log_weights.exp(), posterior.mean + means @ F.T, F @ factors), -float(found.fun)
