"""How close the mixture over variance components is to the exact posterior, by importance weights.

Exact here means the posterior of the border w, and of θ restricted to the points θ_k of the mixture. Effects of the
main factor's groups are integrated out exactly (conditional.py), so that their number does not spoil the weights:

    weight ∝ p(y, w | θ_k) p(θ_k) Δ_k / (π_k q_k(w)),      p(y, w | θ) = p(w | θ) Π_g I_g(w, θ),

where Δ_k is the volume that θ_k represents. As π_k ∝ Δ_k p(θ_k) e^{F_k}, with F_k the ELBO at θ_k plus what quadrature
adds to it, the weights are p(y, w | θ_k) / (e^{F_k} q_k(w)). They correct means and spreads of w, and the weights of
θ_k.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.inference.groups.components import ComponentPrior
from viper.inference.groups.conditional import (
    GroupIntegrals,
    GroupMoments,
    conditional_means,
    drawn_border,
    group_integrals,
)
from viper.inference.groups.evidence import ComponentProfile
from viper.inference.groups.pooling import corrected_mean
from viper.inference.groups.rows import GroupedRows
from viper.inference.groups.solver import Effects, GroupPrior
from viper.inference.memory import available_memory

Report = Callable[[int, int], None]
Visit = Callable[[slice, slice, slice, GroupIntegrals], None]  # of rows, groups and draws


class PointDraws(NamedTuple):
    """Draws of the border from one component k: its θ and value, q and prior there, and which draws they are."""

    theta: np.ndarray
    value: float  # log p(θ_k) + F_k
    bound: float  # F_k
    q: Effects
    prior: GroupPrior
    part: slice
    border: np.ndarray
    log_q: np.ndarray


@dataclass
class GroupWeighedFit:
    """The mixture π_k N(μ_k, Σ_k) at points θ_k, with the rows and priors that it was fitted to."""

    rows: GroupedRows
    mean: np.ndarray  # of the prior of fixed effects
    precision: np.ndarray
    prior: ComponentPrior
    quadrature: bool
    thetas: np.ndarray  # K × t
    weights: np.ndarray  # K
    spread: np.ndarray  # posterior covariance of θ, t × t
    keeps: bool = False  # whether to keep `moments`
    moments: GroupMoments | None = field(default=None, init=False)  # of all groups given each draw
    elbo: float = field(default=math.nan, init=False)  # the mixture's log evidence, with θ integrated out
    posterior: Any = None
    source: Any = None
    sparse: bool = False

    def points(self, count: int, generator: np.random.Generator) -> Iterator[PointDraws]:
        """Draw the border from each component, in proportion to its weight."""
        profile = ComponentProfile(self.rows, self.mean, self.precision, self.prior, self.quadrature)
        ends = np.floor(np.cumsum(self.weights) / self.weights.sum() * count + generator.random()).astype(int)
        ends[-1] = count
        starts = np.concatenate([[0], ends[:-1]])
        for k in np.argsort(-self.weights):
            if ends[k] == starts[k]:
                continue
            theta = self.thetas[k]
            value, _ = profile(theta)
            assert profile.fit is not None
            prior = GroupPrior(self.mean, self.precision, profile.covariances(theta))
            q = replace(profile.fit.q, mean=corrected_mean(profile.fit.q, profile.known_missed))
            drawn = drawn_border(q, generator.standard_normal((ends[k] - starts[k], self.rows.border)))
            part = slice(int(starts[k]), int(ends[k]))
            yield PointDraws(theta, value, value - profile.log_prior(theta), q, prior, part, *drawn)

    def weighed(
        self, count: int, generator: np.random.Generator, report: Report | None = None, visit: Visit | None = None
    ) -> tuple[Tensor, Tensor, float]:
        """Return draws of (w, θ), the logarithms of their weights without their mean, and that mean's log.

        `visit` is called with the integrals of each chunk of rows for some of the draws.
        """
        rows, main = self.rows, self.rows.main
        check_draw_memory(rows, count, self.keeps)
        draws, log_ratio = np.empty((count, rows.border + self.thetas.shape[1])), np.empty(count)
        if self.keeps:
            shapes = (main.levels, count), (main.width,), (main.width,)
            self.moments = GroupMoments(*(np.empty(sum(shapes[: k + 1], ())) for k in range(3)))
        done, top = 0, -math.inf
        for point in self.points(count, generator):
            start = point.part.start
            value = border_log_prior(rows, point.prior, point.border) - point.log_q - point.bound
            for part, groups, some, found in group_integrals(rows, point.q, point.prior.covariances[0], point.border):
                value[some] += found.log_integral.sum(0)
                at = slice(start + some.start, start + some.stop)
                if self.moments is not None:
                    for kept, new in zip(self.moments, found.moments(), strict=True):
                        kept[groups, at] = new
                if visit is not None:
                    visit(part, groups, at, found)
                done += (part.stop - part.start) * (some.stop - some.start)
                if report is not None:
                    report(done // count, rows.rows)
            draws[point.part], log_ratio[point.part] = np.c_[point.border, tiled(point.theta, value)], value
            top = max(top, point.value)
        # ∫ p(y, θ) dθ is about the maximum times |2π Var(θ)|^½
        self.elbo = top + 0.5 * float(np.linalg.slogdet(2.0 * math.pi * self.spread)[1])
        log_ratio += self.elbo
        log_evidence = float(np.logaddexp.reduce(log_ratio)) - math.log(count)
        return torch.from_numpy(draws), torch.from_numpy(log_ratio - log_evidence), log_evidence

    def effects(self, count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws from q itself: border (S × d), effects of the main factor (S × G × r), and θ (S × t)."""
        rows, main = self.rows, self.rows.main
        check_draw_memory(rows, count, True)
        border, thetas = np.empty((count, rows.border)), np.empty((count, self.thetas.shape[1]))
        groups = np.empty((count, main.levels, main.width))
        for point in self.points(count, generator):
            C = point.q.inverse.blocks
            root = np.linalg.cholesky(0.5 * (C + C.transpose(0, 2, 1)))
            mean = conditional_means(point.q, slice(0, main.levels), point.border)
            noise = generator.standard_normal(mean.shape)
            groups[point.part] = (mean + np.einsum("gij,gsj->gsi", root, noise)).transpose(1, 0, 2)
            border[point.part], thetas[point.part] = point.border, point.theta
        return border, groups, thetas


def tiled(theta: np.ndarray, each: np.ndarray) -> np.ndarray:
    return np.broadcast_to(theta, (len(each), len(theta)))


def border_log_prior(rows: GroupedRows, prior: GroupPrior, border: np.ndarray) -> np.ndarray:
    """log p(w | θ) of each draw: fixed effects, and the effects of all factors but the main one."""
    by = border[:, : rows.fixed] - prior.mean
    found = -0.5 * np.einsum("si,ij,sj->s", by, prior.precision, by, optimize=True)
    found += 0.5 * np.linalg.slogdet(prior.precision)[1] - 0.5 * rows.border * math.log(2.0 * math.pi)
    for factor, start, D in zip(rows.others, rows.starts[1:], prior.covariances[1:], strict=True):
        effects = border[:, start : start + factor.effects].reshape(len(border), factor.levels, factor.width)
        found -= 0.5 * np.einsum("sgi,ij,sgj->s", effects, np.linalg.inv(D), effects, optimize=True)
        found -= 0.5 * factor.levels * np.linalg.slogdet(D)[1]
    return found


def check_draw_memory(rows: GroupedRows, count: int, effects: bool) -> None:
    """Raise before any work if the draws do not fit in memory."""
    width = rows.main.width
    need = 8.0 * count * (3.0 * rows.border + (rows.main.levels * (1 + 2 * width + width**2) if effects else 0))
    if need > (there := available_memory()):
        raise ValueError(
            f"draws of {rows.main.effects + rows.border:,} effects must fit in memory; got {count:,} draws, which need "
            f"about {need / 1e9:.1f} GB of {there / 1e9:.1f} GB. Pass fewer, as draws=."
        )
