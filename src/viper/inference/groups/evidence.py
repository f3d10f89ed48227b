"""The posterior of variance components θ, and a mixture over a few of their values, as in INLA (Rue et al. 2009).

    log p(θ | y) ≈ max_q ELBO(q; θ) + log p(θ) + const,

plus what Gaussians of single groups miss (quadrature.py) if groups are sparse. The maximum θ̂ is found by BFGS; by the
envelope theorem the gradient needs only second moments of the effects. Points are placed around it in coordinates z
that are standard normal if the posterior of θ is Gaussian: a line for one component, a square grid for two if there are
few rows, otherwise a central composite design, whose weights integrate quadratic functions of a Gaussian exactly.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.interpolate
import scipy.linalg
import scipy.optimize
import scipy.stats

from viper.inference.groups.components import (
    LARGEST_LOG,
    SMALLEST_LOG,
    ComponentPrior,
    component_count,
    covariance_of,
    divergence_gradient,
)
from viper.inference.groups.pooling import Pool, Pooled
from viper.inference.groups.quadrature import Missed, missed_evidence
from viper.inference.groups.rows import GroupedRows
from viper.inference.groups.solver import GroupFit, GroupPrior, fit_effects, start_effects

NATS_TO_OPTIMUM = 1e-5  # nats left to the optimum of q, given θ
NEAR_MODE = 1e-4  # nats to the mode of θ, roughly: a hundredth of a standard deviation
MOST_MOVES = 50
LONGEST_LOG_MOVE = 0.7  # longest step in log σ
CURVATURE_STEP = 0.4  # step of the differences for second derivatives, in standard deviations
LINE_STEP, SQUARE_STEP = 0.9, 1.25  # spacing of points in z
DEEP = 5.0  # nats below the mode; no points are placed farther out
EQUAL_STEPS, LINE_GROWTH = 3, 1.25  # on each side, after so many equal steps, further ones grow by this factor
MOST_LINE_POINTS, MOST_SIDE = 20, 9  # points along a line, and along each half of an axis of the square
LEAST_FINE_SHARE = 1e-8
MOST_SQUARE_ROWS = 5_000
ROUGH_ROWS = 5_000  # with more rows, sums are rough: errors of 1e-9 per row, nearly the same for all θ
RADIUS = 1.1  # radius of the composite design, over √k (Rue et al. 2009)
FINE_LINE, FINE_SQUARE, FINE_DRAWS = 401, 61, 4096  # values of θ on a line, per axis of a square, and drawn
MOST_QUADRATURE = 100_000  # most rows in the groups that quadrature visits
SUBSET_BORDER = 1_000  # with a larger border, a pass over few rows takes as long as one over all
FEWEST_SUBSET, SUBSET_ROWS = 100_000, 20_000  # rows above which a fit starts on random groups, and their rows


@dataclass(frozen=True)
class ComponentPosterior:
    """The mixture over θ, pooled, and weighted values of θ that describe its posterior finely."""

    mode: np.ndarray
    pooled: Pooled
    values: np.ndarray  # m × k
    shares: np.ndarray  # m
    elbo: float  # at the mode
    log_evidence: float
    passes: int
    converged: bool


class ComponentProfile:
    """θ -> log p(θ | y), up to a constant, and its gradient; each evaluation starts where the last one ended."""

    def __init__(
        self,
        rows: GroupedRows,
        mean: np.ndarray,
        precision: np.ndarray,
        prior: ComponentPrior,
        quadrature: bool,
        report: Callable[[float, float], None] | None = None,
    ) -> None:
        self.rows, self.mean, self.precision, self.prior = rows, mean, precision, prior
        self.quadrature, self.report = quadrature, report
        self.widths = [factor.width for factor in rows.factors]
        ends = np.cumsum([component_count(width) for width in self.widths])
        self.parts = [slice(int(end) - component_count(w), int(end)) for end, w in zip(ends, self.widths, strict=True)]
        self.size = int(ends[-1])
        self.fit: GroupFit | None = None
        self.missed: Missed | None = None
        self.last = np.empty(0)  # θ of the last evaluation
        self.border: np.ndarray | None = None  # where to start, as found on a part of the rows
        self.passes = 0
        self.converged = True

    def covariances(self, theta: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(covariance_of(theta[part], w) for part, w in zip(self.parts, self.widths, strict=True))

    def __call__(self, theta: np.ndarray, tol: float = NATS_TO_OPTIMUM) -> tuple[float, np.ndarray]:
        rows, self.last = self.rows, theta
        given = GroupPrior(self.mean, self.precision, self.covariances(theta))
        q = start_effects(rows, given, self.border) if self.fit is None else self.fit.q
        self.fit = fit = fit_effects(rows, given, q, rough=rows.rows > ROUGH_ROWS, tol=tol, report=self.report)
        self.passes += fit.passes
        self.converged = fit.converged
        value, gradient = fit.elbo + self.log_prior(theta), np.empty(self.size)
        for f, (part, width) in enumerate(zip(self.parts, self.widths, strict=True)):
            factor, own = rows.factors[f], theta[part]
            gradient[part] = divergence_gradient(own, width, factor.levels, fit.q.second_moments(rows, f))
            gradient[part] += self.prior.gradient(own, width)
        if self.quadrature:
            some, chosen = self.looked_at
            found = missed_evidence(some, fit.q, float(given.covariances[0][0, 0]), chosen)
            scale = rows.main.levels / some.main.levels
            value += scale * found.value
            gradient[self.parts[0]] += scale * found.by_log_sd
            self.missed = found if chosen is None else None
        return value, gradient

    @cached_property
    def looked_at(self) -> tuple[GroupedRows, np.ndarray | None]:
        """The rows that quadrature visits: all, or those of every k-th group if there are very many."""
        rows = self.rows
        if rows.rows <= MOST_QUADRATURE:
            return rows, None
        chosen = np.arange(0, rows.main.levels, math.ceil(rows.rows / MOST_QUADRATURE))
        return rows.some_groups(chosen), chosen

    @cached_property
    def step(self) -> Missed:
        """What quadrature over all groups finds at the first θ for which it is needed: at the mode, or near it."""
        assert self.fit is not None
        return missed_evidence(self.rows, self.fit.q, float(self.covariances(self.last)[0][0, 0]))

    def log_prior(self, theta: np.ndarray) -> float:
        """log p(θ)."""
        parts = zip(self.parts, self.widths, strict=True)
        return sum(self.prior.log_density(theta[part], width) for part, width in parts)

    @property
    def known_missed(self) -> Missed | None:
        """What quadrature over all groups finds at the last θ, or near it; None without quadrature."""
        return self.step if self.quadrature and self.missed is None else self.missed

    def expected_hessian(self, theta: np.ndarray) -> np.ndarray:
        """2 Σ_g (1 - Var(b_g | y)/σ²)² on the diagonal: the information about log σ in effects known this well."""
        assert self.fit is not None
        found = np.empty(self.size)
        for f, (part, width) in enumerate(zip(self.parts, self.widths, strict=True)):
            D = np.diag(covariance_of(theta[part], width))
            spread = self.fit.q.variances(self.rows, f)
            known = np.clip(1.0 - spread / D, 0.0, 1.0)
            found[part] = np.r_[2.0 * np.square(known).sum(0), np.full(component_count(width) - width, len(known) / 4)]
        return np.diag(np.maximum(found, 1.0))

    def bounds(self) -> list[tuple[float, float]]:
        found = []
        for width in self.widths:
            found += [(SMALLEST_LOG, LARGEST_LOG)] * width + [(-4.0, 4.0)] * (component_count(width) - width)
        return found


def component_mode(profile: ComponentProfile, start: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """θ̂, the log density there, and an estimate of its negative Hessian, by BFGS with steps of bounded length."""
    low, high = np.array(profile.bounds()).T
    theta = np.clip(start, low, high)
    value, gradient = profile(theta)
    H = profile.expected_hessian(theta)
    for _ in range(MOST_MOVES):
        step = np.linalg.solve(H, gradient)
        if 0.5 * float(gradient @ step) < NEAR_MODE:
            break
        step *= min(1.0, LONGEST_LOG_MOVE / float(np.abs(step).max()))
        while True:
            moved = np.clip(theta + step, low, high)
            new, slope = profile(moved)
            if new >= value - 1e-6 or float(np.abs(step).max()) < 1e-4:
                break
            step *= 0.4
        s, fall = moved - theta, gradient - slope
        if float(s @ fall) > 1e-10:
            Hs = H @ s
            H = H + np.outer(fall, fall) / float(s @ fall) - np.outer(Hs, Hs) / float(s @ Hs)
        if new < value or not s.any():
            break
        theta, value, gradient = moved, new, slope
    return theta, value, H


def negative_hessian(profile: ComponentProfile, theta: np.ndarray, rough: np.ndarray) -> np.ndarray:
    """The negative Hessian by central differences of the gradient, along the axes of an estimate; positive definite."""
    values, vectors = np.linalg.eigh(rough)
    axes = vectors / np.sqrt(values)
    inner = np.empty((profile.size, profile.size))
    for k in range(profile.size):
        step = CURVATURE_STEP * axes[:, k]
        inner[k] = axes.T @ (profile(theta - step)[1] - profile(theta + step)[1]) / (2.0 * CURVATURE_STEP)
    back = np.linalg.inv(axes)
    H = back.T @ (0.5 * (inner + inner.T)) @ back
    values, vectors = np.linalg.eigh(H)
    return (vectors * np.maximum(values, 0.05)) @ vectors.T


def starting_components(rows: GroupedRows) -> np.ndarray:
    """σ = ½ for all effects, without correlations."""
    widths = [factor.width for factor in rows.factors]
    return np.concatenate([np.r_[np.full(w, math.log(0.5)), np.zeros(component_count(w) - w)] for w in widths])


def component_posterior(profile: ComponentProfile, start: np.ndarray, rng: np.random.Generator) -> ComponentPosterior:
    """Find the mode and integrate over θ."""
    rows = profile.rows
    if rows.rows > FEWEST_SUBSET and rows.main.levels > 1000 and rows.border <= SUBSET_BORDER:
        chosen = rng.permutation(rows.main.levels)[: max(500, int(rows.main.levels * SUBSET_ROWS / rows.rows))]
        part = ComponentProfile(
            rows.some_groups(chosen), profile.mean, profile.precision, profile.prior, profile.quadrature, profile.report
        )
        start, *_ = component_mode(part, start)
        assert part.fit is not None
        profile.border = part.fit.q.mean.border
    mode, top, hessian = component_mode(profile, start)
    assert profile.fit is not None
    elbo = profile.fit.elbo
    home = profile.fit, profile.missed
    if profile.size > 1:
        hessian = negative_hessian(profile, mode, hessian)
    profile.fit, profile.missed = home
    values, vectors = np.linalg.eigh(hessian)
    axes = vectors / np.sqrt(values)
    at = Around(profile, mode, top, axes)
    if profile.size == 1:
        line_points(at)
        fine, shares = fine_line(at)
    elif profile.size == 2 and rows.rows <= MOST_SQUARE_ROWS:
        fine, shares = square_points(at)
    else:
        fine, shares = composite_points(at, rng)
    log_evidence = top + 0.5 * profile.size * math.log(2.0 * math.pi) + float(np.log(np.abs(np.linalg.det(axes))))
    return ComponentPosterior(
        mode, at.pool.result(), fine, shares, elbo, log_evidence, profile.passes, profile.converged
    )


class Around:
    """Points θ = θ̂ + Vz around the mode, with their log density relative to the mode."""

    def __init__(self, profile: ComponentProfile, mode: np.ndarray, top: float, axes: np.ndarray) -> None:
        self.profile, self.mode, self.top, self.axes = profile, mode, top, axes
        self.limits = np.array(profile.bounds()).T
        self.zs: list[np.ndarray] = []
        self.drops: list[float] = []
        assert profile.fit is not None
        self.home = profile.fit
        self.pool = Pool(profile.rows, profile.fit.q.mean)

    def theta(self, z: np.ndarray) -> np.ndarray:
        return np.clip(self.mode + self.axes @ z, *self.limits)

    def drop(self, z: np.ndarray) -> float:
        """Evaluate at z, and return the log density relative to the mode."""
        value, _ = self.profile(self.theta(z))
        return value - self.top

    def keep(self, z: np.ndarray, drop: float, log_weight: float) -> None:
        """Add the posterior at z, where the profile was last evaluated, to the mixture."""
        self.zs.append(z)
        self.drops.append(drop)
        assert self.profile.fit is not None
        self.pool.add(self.theta(z), log_weight, self.profile.fit.q, self.profile.known_missed)


def line_points(at: Around) -> None:
    """Place points until the density is negligible on both sides, equally spaced at first, then farther apart."""
    found = {0.0: at.drop(np.zeros(1))}
    at.keep(np.zeros(1), found[0.0], found[0.0])
    for side in (1.0, -1.0):
        at.profile.fit, z, step = at.home, 0.0, LINE_STEP
        for k in range(MOST_LINE_POINTS):
            z += side * step
            following = step * (LINE_GROWTH if k >= EQUAL_STEPS and side < 0.0 else 1.0)  # σ → 0 is far away
            found[z] = drop = at.drop(np.array([z]))
            at.keep(np.array([z]), drop, drop + math.log(0.5 * (step + following) / LINE_STEP))
            if drop < -DEEP or not (at.limits[0] < at.theta(np.array([z]))).all():
                break
            step = following


def fine_line(at: Around) -> tuple[np.ndarray, np.ndarray]:
    """The density between the points of a line, by a cubic spline of its logarithm."""
    z = np.array([float(x[0]) for x in at.zs])
    order = np.argsort(z)
    curve = scipy.interpolate.CubicSpline(z[order], np.array(at.drops)[order])
    fine = np.linspace(z.min(), z.max(), FINE_LINE)
    shares = np.exp(curve(fine))
    thetas = np.array([at.theta(np.array([x])) for x in fine])
    return thetas, shares / shares.sum()


def square_points(at: Around) -> tuple[np.ndarray, np.ndarray]:
    """A square grid, up to where the density along the axes is negligible.

    Points where the axes, taken as independent, suggest a negligible density keep that estimate and are not evaluated.
    """
    axes: list[dict[float, float]] = []
    for axis in range(2):
        along = {0.0: 0.0}
        for side in (-1.0, 1.0):
            at.profile.fit, place, step = at.home, 0.0, SQUARE_STEP
            for count in range(MOST_SIDE):
                place += side * step
                step *= LINE_GROWTH if count >= EQUAL_STEPS else 1.0
                along[place] = at.drop(place * np.eye(2)[axis])
                if along[place] < -DEEP:
                    break
        axes.append(along)
    first, second = (np.array(sorted(along)) for along in axes)
    cells = np.outer(np.gradient(first), np.gradient(second))
    grid = np.array([[axes[0][i] + axes[1][j] for j in second] for i in first])
    for a, i in enumerate(first):
        at.profile.fit = at.home
        for b, j in enumerate(second):
            if grid[a, b] > -DEEP - 1.0:
                z = np.array([i, j])
                grid[a, b] = drop = at.drop(z)
                at.keep(z, drop, drop + math.log(cells[a, b]))
    return fine_square(at, first, second, grid)


def fine_square(at: Around, first: np.ndarray, second: np.ndarray, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The density between the points of a square, by a cubic spline of its logarithm."""
    orders = min(3, len(first) - 1), min(3, len(second) - 1)
    surface = scipy.interpolate.RectBivariateSpline(first, second, grid, kx=orders[0], ky=orders[1])
    a, b = np.linspace(first[0], first[-1], FINE_SQUARE), np.linspace(second[0], second[-1], FINE_SQUARE)
    shares = np.exp(np.minimum(surface(a, b), grid.max())).ravel()
    shares /= shares.sum()
    points = np.stack(np.meshgrid(a, b, indexing="ij"), -1).reshape(-1, 2)
    large = shares > LEAST_FINE_SHARE
    return np.array([at.theta(x) for x in points[large]]), shares[large] / shares[large].sum()


def composite_points(at: Around, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The mode, and points on a sphere: along the axes and towards corners of a cube.

    Each side of an axis is scaled so that the density falls by one nat at √2. These scales also describe the posterior
    of θ finely, as a split normal along each axis.
    """
    k = at.profile.size
    scales = np.ones((k, 2))
    for axis, side in itertools.product(range(k), range(2)):
        at.profile.fit = at.home
        z = np.zeros(k)
        z[axis] = (-1.0, 1.0)[side] * math.sqrt(2.0)
        scales[axis, side] = float(np.clip(1.0 / math.sqrt(max(-at.drop(z), 0.05)), 0.3, 3.0))
    directions = np.concatenate([np.eye(k), -np.eye(k), corner_signs(k) / math.sqrt(k)])

    def stretched(z: np.ndarray) -> np.ndarray:
        return np.where(z > 0, z * scales[:, 1], z * scales[:, 0])

    radius, each = RADIUS * math.sqrt(k), 1.0 / (len(directions) * RADIUS**2)
    at.profile.fit = at.home
    drop = at.drop(np.zeros(k))
    at.keep(np.zeros(k), drop, math.log(1.0 - 1.0 / RADIUS**2))
    for direction in directions:
        at.profile.fit = at.home
        z = stretched(radius * direction)
        drop = at.drop(z)
        wider = float(
            np.log(
                np.where(direction > 0, scales[:, 1], scales[:, 0])[direction != 0] / scales.mean(1)[direction != 0]
            ).sum()
        )
        at.keep(z, drop, math.log(each) + drop + 0.5 * radius**2 + wider)
    draws = scipy.stats.norm.ppf(scipy.stats.qmc.Sobol(k, rng=rng).random(FINE_DRAWS))
    shares = np.prod(scales[np.arange(k), (draws > 0).astype(int)], axis=1)  # the wider side has more mass
    return np.array([at.theta(stretched(z)) for z in draws]), shares / shares.sum()


def corner_signs(k: int) -> np.ndarray:
    """Corners of the cube: all of them up to five dimensions, opposite pairs from a Hadamard matrix beyond that."""
    if k <= 5:
        return np.array(list(itertools.product((-1.0, 1.0), repeat=k)))
    size = 1 << math.ceil(math.log2(k))
    half = scipy.linalg.hadamard(size)[:, :k].astype(float)
    return np.concatenate([half, -half])
