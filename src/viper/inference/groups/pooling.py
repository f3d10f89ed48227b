"""The mixture over variance components, pooled: means and covariances of everything that meets in a row.

With weights π_k and Gaussians N(μ_k, Σ_k): μ = Σ π_k μ_k and Σ = Σ π_k (Σ_k + (μ_k - μ)(μ_k - μ)ᵀ), of which the blocks
of an arrow are kept. Every linear predictor has the mixture's mean and variance. For the fixed effects, the components
themselves are kept too.
"""

import math
from dataclasses import dataclass

import numpy as np

from viper.inference.groups.arrow import Arrow, Split, outer_cross
from viper.inference.groups.quadrature import Missed
from viper.inference.groups.rows import GroupedRows
from viper.inference.groups.solver import Effects

LEAST_POINT_WEIGHT = 1e-5  # components with less weight are dropped
LONGEST_STEP = 1.0  # longest correction of the mean, in posterior standard deviations


def corrected_mean(q: Effects, missed: Missed | None) -> Split:
    """The mean of q after one Newton step for what the Gaussians of its groups miss."""
    if missed is None:
        return q.mean
    up = Split(missed.by_border, np.zeros_like(q.mean.groups))
    step = q.inverse.solve(up)
    return q.mean.moved(step, 1.0 / max(1.0, math.sqrt(up.dot(step)) / LONGEST_STEP))


@dataclass(frozen=True)
class Pooled:
    """The pooled mean and covariance, and the weight, θ and fixed effects of each component."""

    mean: Split
    covariance: Arrow
    weights: np.ndarray  # K
    thetas: np.ndarray  # K × k
    fixed_means: np.ndarray  # K × p
    fixed_covariances: np.ndarray  # K × p × p


class Pool:
    """Adds up components one by one, so that only one is in memory at a time. `centre` is near their means."""

    def __init__(self, rows: GroupedRows, centre: Split) -> None:
        self.fixed, self.centre = rows.fixed, centre
        self.top = -math.inf  # the largest log-weight so far; all sums are relative to it
        self.total = 0.0
        self.first = Split(np.zeros_like(centre.border), np.zeros_like(centre.groups))
        self.second: Arrow | None = None
        self.log_weights: list[float] = []
        self.thetas: list[np.ndarray] = []
        self.means: list[np.ndarray] = []
        self.covariances: list[np.ndarray] = []

    def add(self, theta: np.ndarray, log_weight: float, q: Effects, missed: Missed | None) -> None:
        """Add a component, with its mean corrected by one Newton step for what the Gaussians of its groups miss."""
        mean = corrected_mean(q, missed)
        self.log_weights.append(log_weight)
        self.thetas.append(theta)
        self.means.append(mean.border[: self.fixed])
        self.covariances.append(q.covariance.border[: self.fixed, : self.fixed])
        scale = math.exp(self.top - log_weight) if log_weight > self.top else 1.0
        self.top = max(self.top, log_weight)
        weight = math.exp(log_weight - self.top)
        by = mean.moved(self.centre, -1.0)
        second = Arrow(
            q.covariance.border + np.outer(by.border, by.border),
            q.covariance.cross + outer_cross(q.covariance.cross, by.groups, by.border),
            q.covariance.blocks + by.groups[:, :, None] * by.groups[:, None, :],
        )
        self.total = scale * self.total + weight
        self.first = Split(
            scale * self.first.border + weight * by.border, scale * self.first.groups + weight * by.groups
        )
        if self.second is None:
            self.second = Arrow(*(weight * part for part in second))
        else:
            self.second = Arrow(*(scale * old + weight * new for old, new in zip(self.second, second, strict=True)))

    def result(self) -> Pooled:
        """The moments of all components."""
        assert self.second is not None
        by = Split(self.first.border / self.total, self.first.groups / self.total)
        covariance = Arrow(
            self.second.border / self.total - np.outer(by.border, by.border),
            self.second.cross / self.total - outer_cross(self.second.cross, by.groups, by.border),
            self.second.blocks / self.total - by.groups[:, :, None] * by.groups[:, None, :],
        )
        logs = np.array(self.log_weights)
        weights = np.exp(logs - np.logaddexp.reduce(logs))
        kept = weights > LEAST_POINT_WEIGHT
        return Pooled(
            self.centre.moved(by),
            covariance,
            weights[kept] / weights[kept].sum(),
            np.array(self.thetas)[kept],
            np.array(self.means)[kept],
            np.array(self.covariances)[kept],
        )
