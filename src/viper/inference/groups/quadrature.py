"""What a Gaussian posterior of single groups misses, by adaptive Gauss-Hermite quadrature.

Given the border w, the evidence of the main factor's groups is a product of integrals over one effect each,

    log I_g = log ∫ Π_{i∈g} p(y_i | b, w) N(b; 0, σ²) db,

and the ELBO replaces each by its best Gaussian lower bound F_g. Where groups have few events the difference
Δ = Σ_g (log I_g - F_g) is large and depends on σ; it is computed at the posterior mean of the border and added to the
ELBO. Its gradient in log σ is Σ_g (E[b²] under the integrand - E_q[b²])/σ², and in w the difference of expected
residuals.
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

GROUP_NODES = 15  # of the quadrature over a group's effect
GROUP_STEPS = 40  # of Newton's method for a single group's best Gaussian, at most
CLOSE_EFFECT = 1e-5  # change of a group's effect, in sds, at which it ends


class Missed(NamedTuple):
    """Δ, its derivative in log σ of the main factor, and its gradient in the border."""

    value: float
    by_log_sd: float
    by_border: np.ndarray


def missed_evidence(rows: GroupedRows, q: Effects, variance: float, chosen: np.ndarray | None = None) -> Missed:
    """Δ at the posterior mean of the border, for a main factor with one effect for each group.

    `rows` may be those of some `chosen` groups of q.
    """
    effects, spreads = q.mean.groups[:, 0], q.inverse.blocks[:, 0, 0]
    if chosen is not None:
        effects, spreads = effects[chosen], spreads[chosen]
    value, by_log_sd = [], []
    difference = np.empty(rows.rows)
    z_nodes, weights = (x.numpy() for x in full_gauss_hermite(GROUP_NODES))
    moments = (fast_limit(ROUGH_ROW_ERROR) or limit()).moments

    def chunk(part: slice, groups: slice) -> None:
        X, z, label = rows.X[part], rows.main.columns[part, 0], rows.label[part]
        here = rows.main.codes[part] - groups.start
        first = rows.first_rows[groups] - part.start
        count = np.ones(len(z)) if rows.weight is None else rows.weight[part]
        known = X @ q.mean.border[: rows.fixed]
        for place, values in rows.sparse:
            known += values[part] * q.mean.border[place[part]]
        if rows.offset is not None:
            known += rows.offset[part]

        def sums(x: np.ndarray) -> np.ndarray:
            return np.add.reduceat(count * x, first)

        def evaluate(mu: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
            """F_g, its gradient in μ, the precision that it asks for, and E[s(f)] of the rows."""
            theta, tau2 = known + z * mu[here], z**2 * v[here]
            eta, slope, bend = (x.numpy() for x in moments(torch.from_numpy(theta), torch.from_numpy(tau2)))
            bound = sums(label * theta - eta) - 0.5 * ((mu**2 + v) / variance - 1.0 - np.log(v / variance))
            return bound, sums(z * (label - slope)) - mu / variance, 1.0 / variance + sums(z**2 * bend), slope

        mu, v = effects[groups].copy(), spreads[groups].copy()
        bound, up, target, slope = evaluate(mu, v)
        rho = np.ones_like(mu)  # of each group: halved where a step would not help
        for _ in range(GROUP_STEPS):
            precision = (1.0 - rho) / v + rho * target
            step = rho * up / precision
            change = np.maximum(np.abs(step) * np.sqrt(precision), np.abs(rho * (target * v - 1.0)))
            if change.max() < CLOSE_EFFECT:
                break
            new = evaluate(mu + step, 1.0 / precision)
            better = new[0] >= bound - 1e-10
            mu, v = np.where(better, mu + step, mu), np.where(better, 1.0 / precision, v)
            bound, up, target = (np.where(better, its, old) for its, old in zip(new, (bound, up, target), strict=False))
            slope = np.where(better[here], new[3], slope)
            rho = np.where(better, np.minimum(1.0, 2.0 * rho), 0.5 * rho)
        b = mu[:, None] + np.sqrt(v)[:, None] * z_nodes  # groups × nodes
        logs = np.empty_like(b)
        chances = np.empty((len(z), GROUP_NODES))
        for k in range(GROUP_NODES):
            f = known + z * b[:, k][here]
            logs[:, k] = sums(label * f - np.logaddexp(0.0, f))
            chances[:, k] = scipy.special.expit(f)
        # ∫ e^{ℓ(b)} N(b; 0, σ²) db with nodes of N(μ, v)
        logs += 0.5 * (np.log(v / variance)[:, None] - b**2 / variance + z_nodes**2) + np.log(weights)
        top = logs.max(1)
        shares = np.exp(logs - top[:, None])
        total = shares.sum(1)
        shares /= total[:, None]
        value.append(float((top + np.log(total) - bound).sum()))
        by_log_sd.append(float(((shares * b**2).sum(1) - mu**2 - v).sum()) / variance)
        expected = np.einsum("ik,ik->i", chances, shares[here])
        difference[part] = count * (slope - expected)

    over_chunks(rows, chunk)
    return Missed(sum(value), sum(by_log_sd), pulled(rows, difference).border)
