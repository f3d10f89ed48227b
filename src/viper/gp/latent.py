"""The log-odds of a Gaussian process at any rows together, differentiable in the rows.

With the symbols of `viper.gp.average`, where F Fᵀ is the covariance of the first component's (w - μ₀), e₀ has the
covariance K_xx - A₀A₀ᵀ between rows, and B are columns of the mean's weights,

    f ~ N(ϑ, C),      C_xz = c_x c_z ([A₀, B]_x F Fᵀ [A₀, B]_zᵀ + K_xz - A₀ₓ A₀zᵀ) + D_x D_zᵀ.

With a single component c = 1 and D = 0. The diagonal of C is the variance that `predict_latent` returns, for every
row, because nothing is left out between rows.
"""

import copy
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from viper.gp.average import Component
from viper.gp.kernels import NoKernel, covariance, stationary_shape, variances, weight_columns
from viper.gp.model import Features, Scaler
from viper.inference.posterior import Full
from viper.softplus.expectation import expected_softplus
from viper.softplus.limit import LEAST_PROBABILITY, mean_of_same_probability

LEAST_SQUARE = 1e-30  # squared distance, so that Matern kernels have a derivative at 0


class LatentRows(NamedTuple):
    """Rows as they enter C: C_xz = roots roots'ᵀ + scale K_xz scale' - explained explained'ᵀ."""

    mean: Tensor  # ϑ
    roots: Tensor  # [c [A₀, B] F, D]
    explained: Tensor  # c A₀
    scale: Tensor  # c
    inputs: Tensor  # standardised


class LatentComponent:
    """A component of the average: its moments at standardised rows."""

    def __init__(self, component: Component) -> None:
        model = copy.deepcopy(component.model).requires_grad_(False)
        self.kernel, self.mean, self.inducing = model.kernel, model.mean, model.inducing
        self.inverse = Features.of_no_rows(model).inverse  # L⁻¹
        posterior = component.posterior
        self.centre = posterior.mean
        self.root = posterior.factor if isinstance(posterior, Full) else torch.diag(posterior.variance.sqrt())

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ϑ, τ², A and [A, B] F."""
        A = covariance(self.kernel, x, self.inducing) @ self.inverse.T
        design = torch.cat([A, weight_columns(self.mean, x)], 1)
        roots = design @ self.root
        rest = (variances(self.kernel, x) - A.square().sum(1)).clamp(min=0.0)
        return self.mean(x) + design @ self.centre, roots.square().sum(1) + rest, A, roots


class LatentProcess:
    """Mean and covariance of f at rows given in the units of the model, with their gradients."""

    def __init__(self, components: list[Component], scaler: Scaler) -> None:
        self.parts = [LatentComponent(component) for component in components]
        self.weights = torch.tensor([component.weight for component in components], dtype=torch.float64)
        self.centre, self.unit = torch.from_numpy(scaler.centre), torch.from_numpy(scaler.scale)

    def rows(self, X: Tensor) -> LatentRows:
        """Rows n × p."""
        x = (X - self.centre) / self.unit
        if len(self.parts) == 1:
            theta, _, A, roots = self.parts[0].moments(x)
            return LatentRows(theta, roots, A, torch.ones_like(theta), x)
        found = [part.moments(x) for part in self.parts]
        thetas, spreads = (torch.stack([one[i] for one in found]) for i in (0, 1))
        ratio = (self.weights @ spreads) / spreads[0].clamp(min=torch.finfo(torch.float64).tiny)
        c = torch.where(spreads[0] > 0.0, ratio, 1.0).sqrt()[:, None]
        between = ((thetas - self.weights @ thetas) * self.weights.sqrt()[:, None]).T
        variance = self.weights @ spreads + between.square().sum(1)
        theta = same_probability(self.weights, thetas, spreads, variance)
        _, _, A, roots = found[0]
        return LatentRows(theta, torch.cat([c * roots, between], 1), c * A, c[:, 0], x)

    def between(self, u: LatentRows, v: LatentRows) -> Tensor:
        """Covariances of rows with others: n × m."""
        K = covariance(self.parts[0].kernel, u.inputs, v.inputs)
        return u.roots @ v.roots.T + u.scale[:, None] * K * v.scale - u.explained @ v.explained.T

    def among(self, rows: LatentRows, q: int) -> Tensor:
        """Covariances of each q rows that follow each other: n/q × q × q."""
        if q == 1:
            return self.variance(rows)[:, None, None]
        roots, explained, scale, x = (part.reshape(-1, q, *part.shape[1:]) for part in rows[1:])
        K = batch_covariance(self.parts[0].kernel, x)
        return roots @ roots.mT + scale[..., None] * K * scale[:, None, :] - explained @ explained.mT

    def variance(self, rows: LatentRows) -> Tensor:
        rest = rows.scale.square() * variances(self.parts[0].kernel, rows.inputs) - rows.explained.square().sum(1)
        return rows.roots.square().sum(1) + rest.clamp(min=0.0)


def same_probability(weights: Tensor, thetas: Tensor, spreads: Tensor, variance: Tensor) -> Tensor:
    """`mean_of_same_probability` with its gradient: of ϑ with g(ϑ, τ²) = p, dϑ = (dp - ∂g/∂τ² dτ²)/h."""
    with torch.no_grad():
        theta = mean_of_same_probability(weights, thetas, spreads, variance)
    if not thetas.requires_grad:
        return theta
    sign = -theta.sign()  # so that p <= ½, which is known to more digits
    p = weights @ expected_softplus(sign * thetas, spreads).slope
    _, g, h = expected_softplus(sign * theta, variance)
    step = (p - g) / h.detach().clamp(min=LEAST_PROBABILITY)
    return theta + sign * (step - step.detach())


def batch_covariance(kernel: Kernel, x: Tensor) -> Tensor:
    """K of each batch: b × q × p to b × q × q."""
    shape = stationary_shape(kernel)
    if shape is not None:
        scaled = x / kernel.base_kernel.lengthscale.reshape(-1)
        square = (scaled[:, :, None] - scaled[:, None]).square().sum(-1).clamp(min=LEAST_SQUARE)
        return kernel.outputscale * shape(square)[0]
    if isinstance(kernel, NoKernel):
        return x.new_zeros(*x.shape[:2], x.shape[1])
    return torch.stack([covariance(kernel, one, one) for one in x])
