"""What a Gaussian posterior of single groups misses, by adaptive Gauss-Hermite quadrature.

Given the border w, the evidence of the main factor's groups is a product of integrals over one effect each,

    log I_g = log ∫ Π_{i∈g} p(y_i | b, w) N(b; 0, σ²) db,

and the ELBO replaces each by its best Gaussian lower bound F_g. If groups have few events, the difference
Δ = Σ_g (log I_g - F_g) is large and depends on σ. It is computed at the posterior mean of the border and added to the
ELBO. Its gradient in log σ is Σ_g (E[b²] under the integrand - E_q[b²])/σ²; its gradient in w is the difference of
expected residuals.
"""

from typing import NamedTuple

import numpy as np
import scipy.special
import torch

from viper.inference.groups.rows import GroupedRows
from viper.inference.groups.solver import Effects
from viper.inference.groups.sums import ROUGH_ROW_ERROR, over_chunks, pulled
from viper.softplus.limit import fast_limit, limit
from viper.softplus.quadrature import full_gauss_hermite

GROUP_NODES = 15  # nodes of the quadrature over a group's effect
GROUP_STEPS = 40  # most Newton steps to a single group's best Gaussian
CLOSE_EFFECT = 1e-5  # change of a group's effect, in sds, at which these steps end


class Missed(NamedTuple):
    """Δ, its derivative in log σ of the main factor, and its gradient in the border."""

    value: float
    by_log_sd: float
    by_border: np.ndarray


class Bounds(NamedTuple):
    """At N(μ_g, v_g) of each group: F_g, its gradient in μ_g, the precision of a step; and E[s(f)] of the rows."""

    value: np.ndarray
    gradient: np.ndarray
    precision: np.ndarray
    chance: np.ndarray


class GroupChunk:
    """The rows of some groups, given the border: f = known + z b."""

    def __init__(self, rows: GroupedRows, part: slice, groups: slice, border: np.ndarray, variance: float) -> None:
        self.variance = variance
        self.z, self.label = rows.main.columns[part, 0], rows.label[part]
        self.here = rows.main.codes[part] - groups.start  # the group of each row
        self.first = rows.first_rows[groups] - part.start
        self.count = np.ones(len(self.z)) if rows.weight is None else rows.weight[part]
        self.known = rows.X[part] @ border[: rows.fixed]
        for place, values in rows.sparse:
            self.known += values[part] * border[place[part]]
        if rows.offset is not None:
            self.known += rows.offset[part]

    def sums(self, x: np.ndarray) -> np.ndarray:
        """Σ_{i∈g} c_i x_i."""
        return np.add.reduceat(self.count * x, self.first)

    def bounds(self, mu: np.ndarray, v: np.ndarray) -> Bounds:
        theta, tau2 = self.known + self.z * mu[self.here], self.z**2 * v[self.here]
        moments = (fast_limit(ROUGH_ROW_ERROR) or limit()).moments
        eta, g, h = (x.numpy() for x in moments(torch.from_numpy(theta), torch.from_numpy(tau2)))
        divergence = 0.5 * ((mu**2 + v) / self.variance - 1.0 - np.log(v / self.variance))
        gradient = self.sums(self.z * (self.label - g)) - mu / self.variance
        return Bounds(
            self.sums(self.label * theta - eta) - divergence,
            gradient,
            1.0 / self.variance + self.sums(self.z**2 * h),
            g,
        )

    def best(self, mu: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, Bounds]:
        """The best Gaussian of each group, by natural-gradient steps that are halved if F_g would decrease."""
        at, rho = self.bounds(mu, v), np.ones_like(mu)
        for _ in range(GROUP_STEPS):
            precision = (1.0 - rho) / v + rho * at.precision
            step = rho * at.gradient / precision
            change = np.maximum(np.abs(step) * np.sqrt(precision), np.abs(rho * (at.precision * v - 1.0)))
            if change.max() < CLOSE_EFFECT:
                break
            new = self.bounds(mu + step, 1.0 / precision)
            better = new.value >= at.value - 1e-10
            mu, v = np.where(better, mu + step, mu), np.where(better, 1.0 / precision, v)
            at = Bounds(
                np.where(better, new.value, at.value),
                np.where(better, new.gradient, at.gradient),
                np.where(better, new.precision, at.precision),
                np.where(better[self.here], new.chance, at.chance),
            )
            rho = np.where(better, np.minimum(1.0, 2.0 * rho), 0.5 * rho)
        return mu, v, at

    def integrals(self, mu: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """log I_g with nodes of N(μ_g, v_g), E[b²] under the integrand, and E[s(f)] of the rows under it."""
        nodes, weights = (x.numpy() for x in full_gauss_hermite(GROUP_NODES))
        b = mu[:, None] + np.sqrt(v)[:, None] * nodes  # groups × nodes
        logs, chances = np.empty_like(b), np.empty((len(self.z), GROUP_NODES))
        for k in range(GROUP_NODES):
            f = self.known + self.z * b[:, k][self.here]
            logs[:, k] = self.sums(self.label * f - np.logaddexp(0.0, f))
            chances[:, k] = scipy.special.expit(f)
        # ∫ e^{ℓ(b)} N(b; 0, σ²) db
        logs += 0.5 * (np.log(v / self.variance)[:, None] - b**2 / self.variance + nodes**2) + np.log(weights)
        top = logs.max(1)
        shares = np.exp(logs - top[:, None])
        total = shares.sum(1)
        shares /= total[:, None]
        return top + np.log(total), (shares * b**2).sum(1), np.einsum("ik,ik->i", chances, shares[self.here])


def missed_evidence(rows: GroupedRows, q: Effects, variance: float, chosen: np.ndarray | None = None) -> Missed:
    """Δ at the posterior mean of the border, for a main factor with one effect for each group.

    `rows` may be those of only some groups of q, `chosen`.
    """
    effects, spreads = q.mean.groups[:, 0], q.inverse.blocks[:, 0, 0]
    if chosen is not None:
        effects, spreads = effects[chosen], spreads[chosen]
    value, by_log_sd = [], []
    difference = np.empty(rows.rows)

    def add(part: slice, groups: slice) -> None:
        chunk = GroupChunk(rows, part, groups, q.mean.border, variance)
        mu, v, at = chunk.best(effects[groups], spreads[groups])
        log_integral, second_moment, chance = chunk.integrals(mu, v)
        value.append(float((log_integral - at.value).sum()))
        by_log_sd.append(float((second_moment - mu**2 - v).sum()) / variance)
        difference[part] = chunk.count * (at.chance - chance)

    over_chunks(rows, add)
    return Missed(sum(value), sum(by_log_sd), pulled(rows, difference).border)
