"""Averages over hyperparameters: one Gaussian process with the probabilities of a mixture of several.

Component k has weight π_k, its own hyperparameters, and log-odds f(x) ~ N(ϑ_k, τ_k²). At each row, f is treated as
N(ϑ, τ²) with the variance and the mean probability of the mixture,

    τ² = Σ π_k τ_k² + Σ π_k (ϑ_k - Σ π_j ϑ_j)²,      E s(f) = Σ π_k E s(f_k).

Matching the mean of f instead would weaken confident predictions: where the classes are nearly separable, the scale of
f is known only within a factor, and a normal with that spread around the mean reaches far beyond 0. Given the
hyperparameters, rows vary together as in the first component. As a linear model of independent normals,

    f = ϑ + c [A₀(w - μ₀) + e₀] + D ξ,   D_k = √π_k (ϑ_k - Σ π_j ϑ_j),   c² = Σ π_k τ_k²/τ₀²,   ξ ~ N(0, I).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.gp.model import Features, Observations, Scaler, SparseGP, standardised_block
from viper.gp.profile import Profile
from viper.gp.search import LINE, Family, Found, Search, together
from viper.inference.posterior import Diagonal, Full, Posterior, latent, moved
from viper.inference.rows import Block, BlockSource, Dense
from viper.softplus.limit import mean_of_same_probability

PAIRS = 3  # pairs of opposite points around the mode of each family
# Prior odds of a line against a kernel. With even odds, 95 % intervals (10 columns, 100 rows) cover lines in 0.982 of
# cases instead of 0.987, and draws from a GP in 0.906 instead of 0.933; with 300 rows, 0.978 instead of 0.988, and
# 0.909 instead of 0.922.
LINE_ODDS = 1 / 3
LEAST_WEIGHT = 0.05  # least weight of a family that takes part
TOLERANCE = 1e-2  # nats; tolerance of q at each point
AVERAGED_ROWS = 10_000  # most rows with averages over hyperparameters; with more, these are known well enough


class Component(NamedTuple):
    """A Gaussian process with fixed hyperparameters, and its weight in the mixture."""

    weight: float
    family: Family
    model: SparseGP
    posterior: Any  # Posterior, or StarPosterior for more than two classes


class Point(NamedTuple):
    """Hyperparameters near the mode of a family, and their log weight before the profile there is known."""

    found: Found
    model: SparseGP
    log_weight: float
    distance: float  # ½ ‖z‖² in standard deviations of the Gaussian at the mode


def points_to_average(families: list[Found], generator: np.random.Generator) -> list[Point]:
    """The modes of the families that take part, each with pairs of opposite points; the first mode is always included.

    With k hyperparameters, the points have the mean and, if there are k pairs, the covariance of the Gaussian at the
    mode; fewer pairs lie in random orthogonal directions.
    """
    evidence = np.array([found.evidence + (math.log(LINE_ODDS) if found.family == LINE else 0.0) for found in families])
    share = np.exp(evidence - np.logaddexp.reduce(evidence))
    points: list[Point] = []
    for found, weight in zip(families, share, strict=True):
        counts = weight >= LEAST_WEIGHT and found.spread is not None
        if not counts and found is not families[0]:
            continue
        size = 0 if found.spread is None else len(found.spread)
        pairs = min(PAIRS, size) if counts else 0
        log_weight = math.log(weight / (2 * pairs + 1))
        points.append(Point(found, found.model.copy_at(), log_weight, 0.0))
        radius = math.sqrt(size * (1.0 + 0.5 / max(pairs, 1)))  # √k, enlarged to make up for the point at the mode
        for z in radius * np.linalg.qr(generator.standard_normal((size, pairs))).Q.T:
            around = [found.model.copy_at(found.spread @ step) for step in (z, -z)]
            points += [Point(found, model, log_weight, 0.5 * float(z @ z)) for model in around]
    return points


def profile_at(point: Point, search: Search) -> Profile:
    rows = search.nearby(search.rows, point.model.dimension)
    there, sites = rows.inputs.device, point.found.sites
    profile = search.profile_on(point.model.on(there), rows, TOLERANCE)
    return profile.resumed(None if sites is None else sites.on(there))


def weighted_components(points: list[Point], search: Search) -> list[Component]:
    """The best q at each point. A profile below what the Gaussian at the mode predicts lowers the point's weight."""
    components: list[Component] = []
    log_weights: list[float] = []
    profiles = [profile_at(point, search) for point in points]
    top = 0.0
    for point, best in zip(points, together([x.maximum for x in profiles], profiles[0].size), strict=True):
        if best is None:
            continue
        value, posterior = best
        top = value if point.distance == 0.0 else top
        log_weights.append(point.log_weight + min(0.0, value - top + point.distance))
        components.append(Component(0.0, point.found.family, point.model.on("cpu"), moved(posterior, "cpu")))
    weights = np.exp(np.array(log_weights) - np.logaddexp.reduce(log_weights))
    return [x._replace(weight=float(weight)) for x, weight in zip(components, weights, strict=True)]


class Averaged:
    """The mixture on one device; projects rows as the module's docstring describes."""

    def __init__(self, components: list[Component], device: torch.device | str = "cpu") -> None:
        self.weights = torch.tensor([component.weight for component in components], dtype=torch.float64, device=device)
        self.posteriors = [moved(component.posterior, device) for component in components]
        with torch.no_grad():
            self.features = [Features.of_no_rows(component.model, device) for component in components]

    @property
    def dimension(self) -> int:
        return self.features[0].dimension + len(self.features)

    @property
    def posterior(self) -> Full | Diagonal:
        """The distribution of (w - μ₀, ξ)."""
        main, more = self.posteriors[0], len(self.features)
        mean = main.mean.new_zeros(self.dimension)
        if isinstance(main, Diagonal):
            return Diagonal(mean, torch.cat([main.variance, mean.new_ones(more)]))
        assert isinstance(main, Full)
        return Full(mean, torch.block_diag(main.factor, torch.eye(more).to(mean)))

    def block_of(self, rows: Observations) -> Block:
        return self.stretched(rows)[0]

    def stretched(self, rows: Observations) -> tuple[Block, Tensor]:
        """A block [c A₀, D] of the mixture, and c."""
        blocks = [features.block_of(rows) for features in self.features]
        moments = [latent(block, q) for block, q in zip(blocks, self.posteriors, strict=True)]
        thetas, spreads = (torch.stack([pair[i] for pair in moments]) for i in (0, 1))
        ratio = (self.weights @ spreads) / spreads[0].clamp(min=torch.finfo(torch.float64).tiny)
        c = torch.where(spreads[0] > 0.0, ratio, 1.0).sqrt()
        between = ((thetas - self.weights @ thetas) * self.weights.sqrt()[:, None]).T
        variance = self.weights @ spreads + between.square().sum(1)
        theta = mean_of_same_probability(self.weights, thetas, spreads, variance)
        main = blocks[0]
        assert isinstance(main.design, Dense)
        assert main.residual is not None
        design = torch.cat([c[:, None] * main.design.matrix, between], 1)
        residual = c.square() * main.residual
        return Block(Dense(design), rows.label, offset=theta, residual=residual, weight=rows.weight), c


@dataclass(frozen=True)
class AveragedView:
    """Projects a block of rows of any source: (X, y, c, ...) -> (A, o, r, y, c)."""

    components: tuple[Component, ...]
    scaler: Scaler

    def __reduce__(self) -> Any:
        return AveragedView, (self.components, self.scaler)  # without the features, which hold autograd's graph

    @cached_property
    def averaged(self) -> Averaged:
        return Averaged(list(self.components))

    @property
    def dimension(self) -> int:
        return self.averaged.dimension

    def __call__(self, block: Block) -> Block:
        with torch.no_grad():
            return self.averaged.block_of(standardised_block(block, self.scaler))


class AveragedRows(BlockSource):
    """Rows in memory, projected by a mixture."""

    def __init__(self, averaged: Averaged, rows: Observations, block_rows: int) -> None:
        self.averaged, self.data, self.block_rows = averaged, rows, block_rows

    @property
    def rows(self) -> int:
        return len(self.data)

    @property
    def dimension(self) -> int:
        return self.averaged.dimension

    @property
    def device(self) -> torch.device:
        return self.data.inputs.device

    def blocks(self) -> Any:
        with torch.no_grad():
            for start in range(0, self.rows, self.block_rows):
                yield self.averaged.block_of(self.data.take(slice(start, start + self.block_rows)))


def posterior_of(mixture: list[Component]) -> Posterior:
    """The posterior used for predictions: that of the only component, or of the average."""
    return mixture[0].posterior if len(mixture) == 1 else Averaged(mixture).posterior


def family_weights(mixture: list[Component]) -> dict[str, float]:
    """The weight of each family in the mixture, the largest first."""
    found: dict[str, float] = {}
    for component in mixture:
        found[str(component.family)] = found.get(str(component.family), 0.0) + component.weight
    return dict(sorted(found.items(), key=lambda item: -item[1]))
