"""The joint distribution of a sparse Gaussian process at many rows.

*As a linear model of a few independent normals*, for sums over many rows (`JointFeatures`). Given the inducing values,
f = o + A w + e, where e has the covariance R = K_xx - AAᵀ between rows. Points p, chosen one by one where the
unexplained variance is largest, add columns to A:

    f = o + [A, V] (w, e_p) + rest,      V = (K_xp - A A_pᵀ) L⁻ᵀ,      LLᵀ = R_pp,      e_p ~ N(0, I).

The rest is small, and is treated as independent between rows.

*As a mean and a covariance*, differentiable in the rows (`LatentProcess`). With the symbols of `viper.gp.average`,
where F Fᵀ is the covariance of the first component's (w - μ₀), and B are columns of the mean's weights,

    f ~ N(ϑ, C),      C_xz = c_x c_z ([A₀, B]_x F Fᵀ [A₀, B]_zᵀ + K_xz - A₀ₓ A₀zᵀ) + D_x D_zᵀ.

With a single component c = 1 and D = 0. C is complete, so its diagonal is exactly the variance that `predict_latent`
returns.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from viper.gp.average import Averaged, Component
from viper.gp.kernels import LEAST_SQUARE, NoKernel, PairKernel, covariance, stationary_shape, variances, weight_columns
from viper.gp.model import Features, Observations, Scaler
from viper.inference.posterior import Diagonal, Full, Posterior
from viper.inference.rows import Block, BlockSource, Dense
from viper.softplus.expectation import expected_softplus
from viper.softplus.limit import LEAST_PROBABILITY, mean_of_same_probability

MOST_POINTS = 200  # most points added to the inducing points
LEAST_LEFT = 1e-8  # share of the mean prior variance; smaller remainders count as explained
LEAST_LATENT_VARIANCE = 1e-12  # variance of f, so that its square root has a gradient
JITTERS = (0.0, 1e-10, 1e-8, 1e-6, 1e-4)  # relative to the mean variance


class JointFeatures:
    """The points that explain how f varies between rows given the inducing values, and the columns they add."""

    def __init__(self, components: list[Component], inputs: Tensor) -> None:
        self.averaged = Averaged(components, inputs.device) if len(components) > 1 else None
        with torch.no_grad():
            self.inducing = Features.of_no_rows(components[0].model, inputs.device)
            self.model = self.inducing.model
            self.points, self.design, self.root = self.chosen(inputs)

    def chosen(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return points p, A_p, and the Cholesky factor of R_pp, by pivoting."""
        block = self.inducing.block_of(Observations(inputs, inputs.new_zeros(len(inputs))))
        A, left = self.induced(block), block.residual.clone()  # type: ignore[union-attr]
        least = LEAST_LEFT * float((left + A.square().sum(1)).mean())
        found = inputs.new_zeros(len(inputs), min(MOST_POINTS, len(inputs)))
        index: list[int] = []
        for k in range(found.shape[1]):
            i = int(left.argmax())
            if float(left[i]) <= least:
                break
            column = covariance(self.model.kernel, inputs, inputs[i : i + 1])[:, 0] - A @ A[i]
            found[:, k] = (column - found[:, :k] @ found[i, :k]) / left[i].sqrt()
            left = (left - found[:, k].square()).clamp_(min=0.0)
            left[i] = 0.0
            index.append(i)
        return inputs[index], A[index], torch.tril(found[index, : len(index)])

    def induced(self, block: Block) -> Tensor:
        """A without the columns of the mean function's weights."""
        return block.design.matrix[:, : len(self.inducing.root)]  # type: ignore[attr-defined]

    def of(self, rows: Observations, block_rows: int) -> "JointRows":
        return JointRows(self, rows, block_rows)

    def extended(self, posterior: Posterior) -> Posterior:
        """The posterior of (w, e_p)."""
        more = len(self.points)
        mean = torch.cat([posterior.mean, posterior.mean.new_zeros(more)])
        if isinstance(posterior, Diagonal):
            return Diagonal(mean, torch.cat([posterior.variance, posterior.variance.new_ones(more)]))
        assert isinstance(posterior, Full)
        return Full(mean, torch.block_diag(posterior.factor, torch.eye(more, dtype=mean.dtype)))


class JointRows(BlockSource):
    """Rows in memory with the columns [A, V], for predictions."""

    def __init__(self, features: JointFeatures, rows: Observations, block_rows: int) -> None:
        self.features, self.data, self.block_rows = features, rows, block_rows

    @property
    def rows(self) -> int:
        return len(self.data)

    @property
    def dimension(self) -> int:
        joint = self.features
        return (joint.averaged or joint.inducing).dimension + len(joint.points)

    @property
    def device(self) -> torch.device:
        return self.data.inputs.device

    def blocks(self) -> Iterator[Block]:
        with torch.no_grad():
            for start in range(0, self.rows, self.block_rows):
                yield self.extended(self.data.take(slice(start, start + self.block_rows)))

    def extended(self, rows: Observations) -> Block:
        joint, block = self.features, self.features.inducing.block_of(rows)
        residual = block.residual
        between = covariance(joint.model.kernel, rows.inputs, joint.points) - joint.induced(block) @ joint.design.T
        # V = (K_xp - A A_pᵀ) L⁻ᵀ
        V = torch.linalg.solve_triangular(joint.root, between.T, upper=False).T
        assert residual is not None
        left = (residual - V.square().sum(1)).clamp_(min=0.0)
        if joint.averaged is not None:
            block, c = joint.averaged.stretched(rows)
            V, left = c[:, None] * V, c.square() * left
        return replace(block, design=Dense(torch.cat([block.design.matrix, V], 1)), residual=left)  # type: ignore[attr-defined]


# --- as a mean and a covariance ---


class LatentRows(NamedTuple):
    """What C needs from rows: C_xz = roots roots'ᵀ + scale K_xz scale' - explained explained'ᵀ."""

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
    """Mean and covariance of f at rows in the units of X, with their gradients."""

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
        """Covariances between two sets of rows: n × m."""
        K = covariance(self.parts[0].kernel, u.inputs, v.inputs)
        return u.roots @ v.roots.T + u.scale[:, None] * K * v.scale - u.explained @ v.explained.T

    def among(self, rows: LatentRows, q: int) -> Tensor:
        """Covariances within each run of q consecutive rows: n/q × q × q."""
        if q == 1:
            return self.variance(rows)[:, None, None]
        roots, explained, scale, x = (part.reshape(len(part) // q, q, *part.shape[1:]) for part in rows[1:])
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
    sign = -theta.sign()  # so that p <= ½, where it has more correct digits
    p = weights @ expected_softplus(sign * thetas, spreads).slope
    _, g, h = expected_softplus(sign * theta, variance)
    step = (p - g) / h.detach().clamp(min=LEAST_PROBABILITY)
    return theta + sign * (step - step.detach())


def batch_covariance(kernel: Kernel, x: Tensor) -> Tensor:
    """K_xx of each batch: b × q × p to b × q × q."""
    shape = stationary_shape(kernel)
    if shape is not None:
        scaled = x / kernel.base_kernel.lengthscale.reshape(-1)
        square = (scaled[:, :, None] - scaled[:, None]).square().sum(-1).clamp(min=LEAST_SQUARE)
        return kernel.outputscale * shape(square)[0]
    if isinstance(kernel, NoKernel):
        return x.new_zeros(*x.shape[:2], x.shape[1])
    if isinstance(kernel, PairKernel) and x.shape[-1] == kernel.columns:  # items
        return batch_covariance(kernel.of, x)
    return torch.stack([covariance(kernel, one, one) for one in x])


def joint_draws(mean: Tensor, covariance: Tensor, uniform: Tensor) -> Tensor:
    """Draws of f ~ N(mean, C) at batches of q points, all from the same uniform numbers: batches × draws × q."""
    return mean[:, None] + torch.special.ndtri(uniform) @ root_of(covariance).mT


def root_of(covariance: Tensor) -> Tensor:
    """A Cholesky factor, with the smallest jitter that suffices."""
    level = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=LEAST_LATENT_VARIANCE)
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    for jitter in JITTERS:
        root, info = torch.linalg.cholesky_ex(covariance + jitter * level[..., None, None] * eye)
        if not bool(info.any()):
            return root
    raise ValueError("the covariance of f must be positive definite; got one that is not. Choose points further apart.")


def sobol_uniforms(draws: int, q: int, seed: int) -> Tensor:
    """A scrambled Sobol sequence in (0, 1): draws × q."""
    engine = torch.quasirandom.SobolEngine(q, scramble=True, seed=seed)
    return engine.draw(draws, dtype=torch.float64).clamp(1e-12, 1.0 - 1e-12)
