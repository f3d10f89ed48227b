"""Averages over hyperparameters for K classes: at each row, independent normals with the probabilities of a mixture.

Component c has the weight π_c and f_k(x) ~ N(ϑ_ck, τ_ck²), with means centred over classes. At each row f_k is treated
as N(ϑ_k, τ_k²) with the variance and the mean probabilities of the mixture,

    τ_k² = Σ_c π_c τ_ck² + Σ_c π_c (ϑ_ck - Σ_b π_b ϑ_bk)²,      E softmax(f) = Σ_c π_c E softmax(f_c).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.gp.average import Component, Point
from viper.gp.classes.profile import ClassProfile
from viper.gp.classes.rows import ClassFeatures
from viper.gp.classes.search import ClassSearch
from viper.gp.model import Features, Observations, Scaler
from viper.inference.classes.posterior import StarPosterior, posterior_of_star
from viper.inference.classes.sums import EXACT_CLASSES
from viper.inference.posterior import moved
from viper.inference.rows import Block, Dense, Sparse

COMPONENT_TOLERANCE = 1e-3  # nats; tolerance of q at each point
MOST_MATCHING_STEPS, MATCHED = 60, 1e-10  # steps that match the means, and the largest error of a probability
AVERAGED_ENTRIES = 3e8  # most rows × classes × dimension² with averages over hyperparameters; takes seconds
LEAST_AVERAGE = 1e-290
LONGEST_STRETCH = 1e3


def weighted_class_components(points: list[Point], search: ClassSearch) -> list[Component]:
    """The best q at each point. A profile below what the Gaussian at the mode predicts lowers the point's weight."""
    components: list[Component] = []
    log_weights: list[float] = []
    top = 0.0
    for point in points:
        profile = ClassProfile(point.model, search.rows, search.classes, search.diagonal, tol=COMPONENT_TOLERANCE)
        value = profile.resumed(point.found.sites)(point.model.free_vector())[0]  # type: ignore[arg-type]
        top = value if point.distance == 0.0 else top
        if profile.q is None or not math.isfinite(value):
            continue
        posterior = moved(posterior_of_star(profile.q), "cpu")
        log_weights.append(point.log_weight + min(0.0, value - top + point.distance))
        components.append(Component(0.0, point.found.family, point.model.on("cpu"), posterior))
    weights = np.exp(np.array(log_weights) - np.logaddexp.reduce(log_weights))
    return [x._replace(weight=float(weight)) for x, weight in zip(components, weights, strict=True)]


@dataclass(frozen=True)
class Projections:
    """Components, and the projection of rows to their inputs, on one device."""

    components: tuple[Component, ...]
    scaler: Scaler
    device: str | torch.device = "cpu"

    def __reduce__(self) -> Any:
        return Projections, (self.components, self.scaler, self.device)  # without the features

    def to(self, device: torch.device | str) -> "Projections":
        same = torch.device(device) == torch.device(self.device)
        return self if same else Projections(self.components, self.scaler, device)

    @cached_property
    def posteriors(self) -> list[Any]:
        return [moved(component.posterior, self.device) for component in self.components]

    @cached_property
    def features(self) -> list[Features]:
        with torch.no_grad():
            return [ClassFeatures.of_no_rows(component.model, self.device) for component in self.components]

    @cached_property
    def weights(self) -> Tensor:
        shares = [component.weight for component in self.components]
        return torch.tensor(shares, dtype=torch.float64, device=self.device)

    def inputs(self, block: Block) -> Observations:
        """The rows of a block in standardised columns."""
        assert isinstance(block.design, Dense | Sparse)
        X = block.design.matrix
        dense = X.double() if isinstance(X, Tensor) else torch.from_numpy(X.toarray())
        centre, scale = (torch.from_numpy(x).to(dense.device) for x in (self.scaler.centre, self.scaler.scale))
        return Observations(((dense - centre) / scale).to(self.device), block.label, offset=block.offset)


@dataclass(frozen=True)
class ClassProcesses(StarPosterior):
    """The posterior of the functions of K classes, at rows in the original columns."""

    projections: Projections

    @property
    def means(self) -> Tensor:  # type: ignore[override]
        return self.projections.posteriors[0].means

    def latent(self, block: Block) -> tuple[Tensor, Tensor]:
        """ϑ and τ² (n, K) of the rows of a block, up to a common shift."""
        parts = self.projections
        rows = parts.inputs(block)
        with torch.no_grad():
            moments = [q.latent(x.block_of(rows)) for q, x in zip(parts.posteriors, parts.features, strict=True)]
        if len(moments) == 1:
            return moments[0]
        thetas, variances = (torch.stack([pair[i] for pair in moments]) for i in (0, 1))
        return matched_moments(parts.weights, thetas - thetas.mean(2, keepdim=True), variances)


def matched_moments(weights: Tensor, thetas: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """ϑ and τ² as in the module's docstring, from their values in the components (C, n, K)."""
    average = lambda x: torch.einsum("c,cnk->nk", weights, x)  # noqa: E731
    middle = average(thetas)
    tau2 = average(variances) + average((thetas - middle).square())
    C, n, K = thetas.shape
    slopes = EXACT_CLASSES(thetas.reshape(-1, K), variances.reshape(-1, K))[1].reshape(C, n, K)
    p = average(slopes).clamp(min=LEAST_AVERAGE)
    # ϑ maximises the concave Σ_k p_k ϑ_k - η, whose gradient is p - g, by steps in log g as for the softmax, row by row
    theta, length = p.log() * (1.0 + math.pi / 8.0 * tau2).sqrt(), torch.ones_like(p[:, :1])
    best, least, last = theta, torch.full_like(length, math.inf), torch.zeros_like(theta)
    for _ in range(MOST_MATCHING_STEPS):
        _, g, h = (x.clamp(min=LEAST_AVERAGE) for x in EXACT_CLASSES(theta, tau2))
        error = (g - p).abs().amax(1, keepdim=True)
        closer = error < least
        best, least = torch.where(closer, theta, best), torch.minimum(error, least)
        if float(least.max()) <= MATCHED:
            break
        length = torch.where(closer, (1.5 * length).clamp(max=1.0), 0.5 * length)
        step = (p / g).log() * (g * (1.0 - g) / h).clamp(max=LONGEST_STRETCH)
        last = torch.where(closer, step, last)
        theta = best + length * last
    return best - best.mean(1, keepdim=True), tau2
