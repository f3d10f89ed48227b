"""The posterior of fixed and random effects, given variance components: natural-gradient steps on arrows.

q(β, b) = N(μ, Λ⁻¹) with Λ an arrow. As in steps.py,

    Λ⁺ = P + Aᵀ diag(c h) A,      μ⁺ = μ + Λ⁺⁻¹ [Aᵀ c(y - g) - P(μ - m₀)],

where P holds the prior precision of fixed effects and D_f⁻¹ for every group of factor f. A step is halved until the
ELBO does not decrease.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from viper.errors import NotFinite
from viper.inference.groups.arrow import Arrow, Inverse, Split, invert_arrow
from viper.inference.groups.rows import GroupedRows
from viper.inference.groups.sums import GroupSums, grouped_sums, weighted_gram

MOST_EFFECT_STEPS = 100
SHORTEST_SHARE = 1e-6
VALUE_NOISE = 1e-13  # rounding of F, relative


@dataclass(frozen=True)
class GroupPrior:
    """Prior means and precisions of the fixed effects, and D of each factor's effects, the main one first."""

    mean: np.ndarray
    precision: np.ndarray  # p × p
    covariances: tuple[np.ndarray, ...]

    def arrow(self, rows: GroupedRows) -> Arrow:
        """P as an arrow."""
        p, d = rows.fixed, rows.border
        border = np.zeros((d, d))
        border[:p, :p] = self.precision
        for factor, start, D in zip(rows.others, rows.starts[1:], self.covariances[1:], strict=True):
            inverse = np.linalg.inv(D)
            for i in range(factor.width):
                for j in range(factor.width):
                    at = start + np.arange(factor.levels) * factor.width
                    border[at + i, at + j] = inverse[i, j]
        main = rows.main
        blocks = np.broadcast_to(np.linalg.inv(self.covariances[0]), (main.levels, main.width, main.width))
        return Arrow(border, rows.empty_cross(), blocks)

    def pull(self, rows: GroupedRows, mean: Split) -> Split:
        """P(μ - m₀)."""
        border = np.empty_like(mean.border)
        border[: rows.fixed] = self.precision @ (mean.border[: rows.fixed] - self.mean)
        for factor, start, D in zip(rows.others, rows.starts[1:], self.covariances[1:], strict=True):
            effects = mean.border[start : start + factor.effects].reshape(factor.levels, factor.width)
            border[start : start + factor.effects] = (effects @ np.linalg.inv(D)).reshape(-1)
        return Split(border, mean.groups @ np.linalg.inv(self.covariances[0]))

    def divergence(self, rows: GroupedRows, q: "Effects") -> float:
        """KL(q ‖ prior)."""
        p, moved = rows.fixed, q.mean.border[: rows.fixed] - self.mean
        value = q.inverse.log_determinant - np.linalg.slogdet(self.precision)[1]
        value += np.vdot(self.precision, q.covariance.border[:p, :p]) + moved @ self.precision @ moved - p
        for f, D in enumerate(self.covariances):
            factor = rows.factors[f]
            value += factor.levels * np.linalg.slogdet(D)[1] - factor.effects
            value += np.vdot(np.linalg.inv(D), q.second_moments(rows, f))
        return 0.5 * float(value)


@dataclass(frozen=True)
class Effects:
    """q(β, b): its mean, its precision, and the parts of its covariance that rows need."""

    mean: Split
    precision: Arrow
    inverse: Inverse

    @property
    def covariance(self) -> Arrow:
        return self.inverse.covariance

    def second_moments(self, rows: GroupedRows, f: int) -> np.ndarray:
        """Σ_g E[b_g b_gᵀ] of one factor."""
        if f == 0:
            return self.mean.groups.T @ self.mean.groups + self.covariance.blocks.sum(0)
        factor, start = rows.factors[f], rows.starts[f]
        effects = self.mean.border[start : start + factor.effects].reshape(factor.levels, factor.width)
        found = effects.T @ effects
        at = start + np.arange(factor.levels) * factor.width
        for i in range(factor.width):
            for j in range(factor.width):
                found[i, j] += self.covariance.border[at + i, at + j].sum()
        return found

    def variances(self, rows: GroupedRows, f: int) -> np.ndarray:
        """Posterior variances of the effects of one factor, G × r."""
        if f == 0:
            return np.diagonal(self.covariance.blocks, axis1=1, axis2=2)
        factor, start = rows.factors[f], rows.starts[f]
        return self.covariance.border.diagonal()[start : start + factor.effects].reshape(-1, factor.width)


@dataclass(frozen=True)
class GroupFit:
    """The best q given variance components, its ELBO, and whether the solver converged."""

    q: Effects
    elbo: float
    converged: bool
    passes: int


def start_effects(rows: GroupedRows, prior: GroupPrior, border: np.ndarray | None = None) -> Effects:
    """q after one step from the prior's mean with the largest possible curvature, ¼; or near a known border."""
    mean = np.zeros(rows.border)
    mean[: rows.fixed] = prior.mean
    if border is not None:
        mean = border.copy()
    start = Split(mean, np.zeros((rows.main.levels, rows.main.width)))
    nothing = Arrow(
        np.zeros((rows.border, rows.border)),
        rows.empty_cross(),
        np.zeros((rows.main.levels, rows.main.width, rows.main.width)),
    )
    total = grouped_sums(rows, start, nothing)
    if border is None:
        quarter = np.full(rows.rows, 0.25) if rows.weight is None else 0.25 * rows.weight
        total = total._replace(gram=weighted_gram(rows, quarter))
    precision = sum_of_arrows(prior.arrow(rows), total.gram)
    inverse = invert_arrow(precision)
    return Effects(start.moved(inverse.solve(slope(rows, prior, start, total))), precision, inverse)


def sum_of_arrows(left: Arrow, right: Arrow) -> Arrow:
    return Arrow(*(a + b for a, b in zip(left, right, strict=True)))


def slope(rows: GroupedRows, prior: GroupPrior, mean: Split, total: GroupSums) -> Split:
    """∂F/∂μ."""
    pull = prior.pull(rows, mean)
    return Split(total.gradient.border - pull.border, total.gradient.groups - pull.groups)


def fit_effects(
    rows: GroupedRows,
    prior: GroupPrior,
    q: Effects | None = None,
    *,
    rough: bool = False,
    tol: float = 1e-7,
    most: int = MOST_EFFECT_STEPS,
    report: Callable[[float, float], None] | None = None,
) -> GroupFit:
    """Maximise the ELBO from q until less than about `tol` nats are left. `report` gets F and the last gain.

    `rough` sums have errors of 1e-9 per row.
    """
    q = q or start_effects(rows, prior)
    base = prior.arrow(rows)
    total = grouped_sums(rows, q.mean, q.covariance, rough)
    value, passes, rho = total.value - prior.divergence(rows, q), 1, 1.0
    last = math.inf
    while passes < most:
        target = sum_of_arrows(base, total.gram)
        up = slope(rows, prior, q.mean, total)
        while True:
            precision = target if rho == 1.0 else q.precision.mixed(target, rho)
            inverse = invert_arrow(precision)
            step = inverse.solve(up)
            new = Effects(q.mean.moved(step, rho), precision, inverse)
            sums = grouped_sums(rows, new.mean, new.covariance, rough)
            found, passes = sums.value - prior.divergence(rows, new), passes + 1
            if not math.isfinite(found) and rho < SHORTEST_SHARE:
                raise NotFinite
            if found >= value - VALUE_NOISE * (1.0 + abs(value)):
                break
            rho *= 0.5
            if rho < SHORTEST_SHARE or passes >= most:
                return GroupFit(q, value, abs(found - value) < 1e-6 * (1.0 + abs(value)), passes)
        gain = found - value
        q, value, total = new, found, sums
        if report is not None:
            report(value, gain)
        rate = min(0.9, gain / last) if last < math.inf and last > 0 else 0.5
        left = max(gain, 0.0) * rate / (1.0 - rate)
        if rho == 1.0 and left < tol:
            return GroupFit(q, value, True, passes)
        last, rho = gain, min(1.0, 2.0 * rho)
    return GroupFit(q, value, False, passes)
