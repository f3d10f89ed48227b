"""Newton's method for the mean and one precision per row, where a full covariance has nearly as many columns as rows.

At the optimum Λ = S₀⁻¹ + Aᵀ diag(λ) A with λ = c h, so there are d + n unknowns. Natural-gradient steps replace λ by
c h, which depends on λ again: with many columns they converge slowly, or overshoot. To first order, with K = AΣAᵀ,
u = (K∘K) δλ and r = c h - λ,

    δτ² = -u,      δϑ = AΣ ∂F/∂μ + ½ K c ∂h/∂ϑ u,      δλ = r + c ∂h/∂ϑ δϑ + c ∂h/∂v δτ²,

a system of n equations, which GMRES solves with products of the n × n matrices K and K∘K. If the optimum is too far
for Newton's method, the diagonal family is climbed in coordinates in which q is N(0, I). There it contains q, nearly
contains the optimum, and needs no products of matrices.

All this happens in float32, in fixed coordinates w = F₀⁻¹β in which the curvature is near the identity, so that no
digits are lost to cancellation. It ends within about 1e-11 nats of the optimum; the solver takes the last step in
float64.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg.blas import strmm
from scipy.linalg.lapack import spotrf, strtri
from scipy.sparse.linalg import LinearOperator, gmres
from torch import Tensor

from viper.inference.anderson import probes
from viper.inference.climb import Climbed
from viper.inference.kernels.compiled import moments_of_rows
from viper.inference.problem import Gaussian, Prior, Problem, gaussian
from viper.inference.rows import LEAST_TRIANGULAR, Arrays, Block, Dense
from viper.inference.sums import row_curvatures
from viper.inference.wide.mean_field import MOST_READINGS, MeanField, climb_mean_field, widest

MOST_ROWS_PER_COLUMN = 6  # with more, K takes longer than the passes it saves
MOST_ROWS = 10_000  # K and K∘K then take 0.8 GB; more are allowed with more columns, whose d × d matrices take as much
MOST_SITE_POINTS = 24  # a fit needs 4 to 10
ROUGHLY, NEARLY = 10.0, 0.1  # nats left in the diagonal family: in the original coordinates, and in those of q
NEWTON_REACH = 5.0  # nats: from there Newton's method converges
LEAST_PRECISION = 1e-4  # least precision of a row when w is chosen, so that rows without weight are not huge in w
QUADRATIC = 1e-5  # nats from which one Newton step reaches the optimum, up to rounding in float32
GMRES_TOLERANCE, GMRES_STEPS = 1e-3, 30
LEAST_KEPT = 0.1  # share of a row's precision that one step must keep
ROUNDING_OF_SINGLE = 1e-6  # rounding of F in float32, relative


def sites_help(problem: Problem) -> bool:
    """Return whether this is a full covariance with nearly as many columns as rows, or more, in memory."""
    source = problem.source
    fits = source.traits.where == "memory" and source.device.type == "cpu" and source.traits.float32_pays
    d = source.dimension
    wide = d >= LEAST_TRIANGULAR and source.rows <= max(2 * d, min(MOST_ROWS_PER_COLUMN * d, MOST_ROWS))
    return fits and wide and not problem.diagonal and problem.rough is not None and problem.prior.loadings is None


class SitePoint(NamedTuple):
    """q by its mean and the rows' precisions λ, and what follows from them; w = F z with q(z) = N(F⁻¹w, I)."""

    mean: np.ndarray
    precisions: np.ndarray
    factor: np.ndarray  # F, upper triangular, float32
    root: np.ndarray  # F⁻ᵀ, lower triangular, float32
    rows: np.ndarray  # E = A F₀ F, float32
    theta: Tensor
    tau2: Tensor
    value: float  # F, up to a constant
    slope: np.ndarray  # the gradient in z
    wanted: np.ndarray  # c h

    @property
    def missing(self) -> np.ndarray:
        """c h - λ."""
        return self.wanted - self.precisions

    @property
    def move(self) -> float:
        """The KL divergence to the natural-gradient step's proposal, to second order and through random directions."""
        Z = probes(self.rows.shape[1]).numpy().astype(np.float32)
        spread = self.rows.T @ (self.missing.astype(np.float32)[:, None] * (self.rows @ Z))
        return 0.5 * float(self.slope @ self.slope) + 0.25 * float(np.square(spread, dtype=np.float64).sum())


class RowSites:
    """The problem in the coordinates w."""

    def __init__(self, problem: Problem, block: Block, mean: Tensor, precisions: Tensor) -> None:
        assert problem.rough is not None
        self.prior, self.block = problem.prior, block
        self.bound, self.partials = problem.rough, problem.bound.partials
        self.weight = torch.ones_like(block.label) if block.weight is None else block.weight
        start = gaussian(mean, self.prior.plus(block.design.gram(precisions.clamp(min=LEAST_PRECISION))))
        if start is None or start.cholesky is None:
            raise ArithmeticError
        self.outer, self.inverse = start.factor.numpy(), start.cholesky.T.numpy()  # F₀ and F₀⁻¹
        self.rows = block.design.project(start.factor).numpy().astype(np.float32)  # B = A F₀
        # S with SᵀS = F₀ᵀ S₀⁻¹ F₀
        root = prior_root(self.prior)
        root = root[:, None] * start.factor if root.ndim == 1 else root @ start.factor
        self.prior_root = root.numpy().astype(np.float32)
        self.prior_part = self.prior_root.T @ self.prior_root

    def at(self, mean: np.ndarray, precisions: np.ndarray) -> SitePoint:
        """q = N(μ, (S₀⁻¹ + Aᵀ diag(λ) A)⁻¹), and what follows from it."""
        scaled = self.rows * np.sqrt(precisions).astype(np.float32)[:, None]
        inner = scaled.T @ scaled
        inner += self.prior_part
        root, failed = spotrf(inner.T, lower=1, clean=1, overwrite_a=1)
        inverse, singular = strtri(root, lower=1)
        if failed or singular:
            raise ArithmeticError
        rows = strmm(1.0, inverse, self.rows.T, lower=1).T
        spread = np.einsum("ij,ij->i", rows, rows).astype(np.float64)
        block, at = self.block, torch.from_numpy(mean)
        theta, tau2 = block.design.project(at), torch.from_numpy(spread)
        theta = theta if block.offset is None else theta + block.offset
        tau2 = tau2 if block.residual is None else tau2 + block.residual
        eta, g, h = moments_of_rows(theta, tau2, self.bound.kernel) or self.bound.moments(theta, tau2)
        shift = at - self.prior.mean
        pull = self.prior.apply(shift)
        # tr(S₀⁻¹Σ) = d - Σ λ τ²
        kl = np.log(root.diagonal()).sum(dtype=np.float64) + 0.5 * (float(shift @ pull) - precisions @ spread)
        value = float(self.weight @ (block.label * theta - eta)) - float(kl)
        if not math.isfinite(value):
            raise ArithmeticError
        slope = inverse @ (self.outer.T @ (block.design.pull((block.label - g) * self.weight) - pull).numpy())
        return SitePoint(mean, precisions, inverse.T, root, rows, theta, tau2, value, slope, (self.weight * h).numpy())

    def climbed(self, point: SitePoint) -> tuple[np.ndarray, np.ndarray, float]:
        """Mean and precisions after climbing the diagonal family around q, and the number of passes."""
        given: Any = {"offset": point.theta, "residual": self.block.residual, "weight": self.block.weight}
        rows = Arrays(torch.from_numpy(point.rows.astype(np.float64)), self.block.label, **given)
        root = self.prior_root @ point.factor
        centre = point.root.T @ (self.inverse @ (self.prior.mean.numpy() - point.mean))
        prior = Prior(torch.from_numpy(centre), torch.from_numpy((root.T @ root).astype(np.float64)))
        around = Problem(rows, prior, self.bound, diagonal=True, iterative=True)
        origin = torch.zeros_like(prior.mean)
        found = climb_mean_field(around, Gaussian(origin, torch.ones_like(origin)), close=NEARLY)
        precisions = row_curvatures(Block(Dense(rows.features), rows.label, **given), *field_of(found.q), self.bound)
        mean = point.mean + self.outer @ (point.factor @ found.q.mean.numpy())
        return mean, precisions.numpy(), found.passes

    def improved(self, point: SitePoint) -> tuple[np.ndarray, np.ndarray]:
        """Mean and precisions after Newton's step."""
        K = point.rows @ point.rows.T
        squares = np.square(K)
        _, by_mean, by_variance = self.partials(point.theta, point.tau2)
        tilt, bend = (self.weight * by_mean).numpy(), (self.weight * by_variance).numpy()

        def system(change: np.ndarray) -> np.ndarray:
            u = squares @ change.astype(np.float32)
            return change + bend * u - 0.5 * tilt * (K @ (tilt * u).astype(np.float32))

        wanted = point.missing + tilt * (point.rows @ point.slope.astype(np.float32))
        operator = LinearOperator(K.shape, system, dtype=np.float64)
        change, _ = gmres(operator, wanted, rtol=GMRES_TOLERANCE, restart=GMRES_STEPS, maxiter=1)
        u = squares @ change.astype(np.float32)
        slope = point.slope + 0.5 * (point.rows.T @ (tilt * u).astype(np.float32))
        mean = point.mean + self.outer @ (point.factor @ slope)
        return mean, np.maximum(point.precisions + change, LEAST_KEPT * point.precisions)

    def towards(self, point: SitePoint, mean: np.ndarray, precisions: np.ndarray) -> tuple[SitePoint | None, float]:
        """Return the new point, or the one half way, if F is not lower there, otherwise None; and the passes made."""
        least = point.value - ROUNDING_OF_SINGLE * (abs(point.value) + 1.0)
        new = self.at(mean, precisions)
        if new.value >= least:
            return new, 1.0
        new = self.at(0.5 * (mean + point.mean), 0.5 * (precisions + point.precisions))
        return (new if new.value >= least else None), 2.0


def climb_by_sites(problem: Problem, report: Callable[[float], None]) -> Climbed | None:
    """Return q near the optimum of the full family, or None if float32 does not suffice."""
    with np.errstate(all="ignore"):
        try:
            return ascend_by_sites(problem, report)
        except (ArithmeticError, torch.linalg.LinAlgError):  # type: ignore[attr-defined] # of a prior in q's coordinates
            return None


def ascend_by_sites(problem: Problem, report: Callable[[float], None]) -> Climbed | None:
    """From the diagonal family to the full one: climb while the optimum is far, then use Newton's method."""
    assert problem.rough is not None
    arrays = problem.source.in_memory()
    block = next(replace(arrays, block_rows=arrays.rows).cut())
    start = climb_roughly(replace(problem, source=arrays, refine=False, diagonal=True, iterative=True))
    precisions = row_curvatures(block, *field_of(start.q), problem.rough)
    sites = RowSites(problem, block, start.q.mean, precisions)
    point, passes = sites.at(start.q.mean.numpy(), precisions.numpy()), start.passes + 2.0
    near = False
    for _ in range(MOST_SITE_POINTS):
        report(point.value)
        move, new = point.move, None
        if move < NEWTON_REACH:
            mean, values = sites.improved(point)
            if near := move < QUADRATIC:
                break
            new, more = sites.towards(point, mean, values)
            passes += more
        if new is None:
            mean, values, more = sites.climbed(point)
            passes += more
            new, more = sites.towards(point, mean, values)
            passes += more
        if new is None:
            raise ArithmeticError
        point = new
        if passes > MOST_READINGS:
            break
    gram = block.design.gram(torch.from_numpy(values))
    q = gaussian(torch.from_numpy(mean), problem.prior.plus(gram))
    return None if q is None else Climbed(q, passes + 1.0, near)


def climb_roughly(problem: Problem) -> MeanField:
    """Climb the diagonal family from the prior's mean."""
    return climb_mean_field(problem, widest(problem), close=ROUGHLY)


def field_of(q: Gaussian) -> tuple[Tensor, Tensor]:
    return q.mean, q.factor


def prior_root(prior: Prior) -> Tensor:
    """R with RᵀR = S₀⁻¹, or its diagonal."""
    return prior.precision.sqrt() if prior.precision.ndim == 1 else torch.linalg.cholesky(prior.precision).T
