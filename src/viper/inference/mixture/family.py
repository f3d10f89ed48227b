"""q(β) = Σ_j π_j N(μ_j, Σ_j): a mixture of Gaussians, for posteriors that are skewed.

    F = Σ_j π_j { E_j[log p(y, β)] + H_j - log π_j + E_j[log r(j | β)] }

The expected log likelihood is exact for every component. The entropy of a mixture has no closed form, but any r(j | β)
that guesses the component of β gives a lower bound, whose gap is the mean KL divergence from the true probabilities of
the components to r. Here r decides on one component after the other by a logistic regression on β,

    r(j | β) = s(z_j) Π_{k<j} s(-z_k),      z_k = a_k + b_kᵀβ,

whose expectations are again those of softplus, and exact. For two components with the same covariance, r is exact too.
So F is a lower bound on the log evidence, and with one component it is the ELBO.
"""

import math
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from viper.inference.mixture.posterior import GaussianMixture, entropy_terms
from viper.inference.posterior import Full
from viper.inference.problem import LOG_2PI, Prior
from viper.inference.rows import Arrays
from viper.softplus.expectation import expected_softplus
from viper.softplus.limit import limit

START_APART = 0.6  # standard deviations by which components start on either side of the mean
CURVE_STEP = 1e-4  # step in ϑ for the derivative of the curvature
SKEW_STEPS = 50  # steps to find the direction of the largest skewness
MOST_EVALUATIONS = 3000


@dataclass(frozen=True)
class Refining:
    """The rows and the prior in coordinates u in which the Gaussian posterior is N(0, I): β = μ + F u."""

    design: Tensor
    offset: Tensor
    label: Tensor
    weight: Tensor
    shift: Tensor  # mean of the prior
    precision: Tensor
    constant: float  # the constant of log p(β), and log |F| for the entropy

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
    return in_coefficients(*unpacked(torch.from_numpy(found.x)), posterior), -float(found.fun)


def in_coefficients(
    log_weights: Tensor, means: Tensor, factors: Tensor, guess: Tensor, posterior: Full
) -> GaussianMixture:
    """The mixture of u in terms of β = μ + F u: a + bᵀu = (a - bᵀF⁻¹μ) + (F⁻ᵀb)ᵀβ."""
    F = posterior.factor
    guess = torch.cat([guess, guess.new_zeros(1, guess.shape[1])])
    slopes = torch.linalg.solve(F.T, guess[:, 1:].T).T
    offsets = guess[:, 0] - slopes @ posterior.mean
    return GaussianMixture(log_weights.exp(), posterior.mean + means @ F.T, F @ factors, offsets, slopes)
