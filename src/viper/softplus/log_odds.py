"""Var log Σ_k e^{f_k} of independent Gaussians, and the log-odds of one class against all others.

With T = log Σ e^{f_k} + G, G a Gumbel variable (logsumexp.py), P(t) = P(T <= t) and the nodes t_i of its integrals,

    E (T - c)² = (t_0 - h/2 - c)² + 2h Σ_i (t_i - c)(1 - P(t_i)) - h²/12,      Var log Σ e^{f_k} = Var T - π²/6,

where h²/12 is Sheppard's correction for rounding T to the midpoints between nodes. Beyond the last node, 1 - P is taken
to fall like e^{-t}, which leaves an error of about 1e-6. The variance is at least Σ_k v_k (E p_k)² (Stein's lemma) and
at most Σ_k v_k E p_k² (Poincaré's inequality).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from viper.softplus.gumbel import Precision
from viper.softplus.logsumexp import EULER, class_moments, node_blocks

SPREAD_TOLERANCE = 1e-8
ROWS_AT_A_TIME = 1 << 14


class GaussianMoments(NamedTuple):
    """Mean and variance."""

    mean: Tensor
    variance: Tensor


def logsumexp_moments(mean: Tensor, variance: Tensor) -> GaussianMoments:
    """Mean and variance of log Σ_k e^{f_k} of each row of (n, K) matrices."""
    precision = Precision(SPREAD_TOLERANCE)
    value, slope, curvature, _ = class_moments(mean, variance, precision, False)
    centre = value + EULER
    second = torch.zeros_like(value)
    for nodes in node_blocks(mean, variance, precision, 2):
        h, row = nodes.step, nodes.row
        steps = torch.arange(nodes.product.shape[1], device=mean.device, dtype=mean.dtype)
        t = nodes.first[:, None] + h * steps - centre[row, None]
        missing = 1.0 - nodes.product if nodes.window is None else (1.0 - nodes.product) * nodes.window
        # beyond the last node 1 - P falls like e^{-t}
        beyond = 2.0 * (t[:, -1] + 0.5 * h + 1.0) * nodes.tails[0].sum(-1)
        begins = nodes.start != 0.0
        below = torch.where(begins, (t[:, 0] - 0.5 * h).square() - h * h / 12.0, 0.0)
        second.index_add_(0, row, below + 2.0 * h * (t * missing).sum(-1) + beyond)
    least, most = (variance * slope.square()).sum(-1), (variance * (slope - curvature)).sum(-1)
    return GaussianMoments(value, torch.minimum(torch.maximum(second - math.pi**2 / 6.0, least), most))


def log_odds_moments(mean: Tensor, variance: Tensor) -> GaussianMoments:
    """Mean and variance of f_k - log Σ_{j≠k} e^{f_j}, the log-odds of class k, for each row and class of (n, K)."""
    K = mean.shape[-1]
    others = torch.arange(K, device=mean.device).expand(K, K)[~torch.eye(K, dtype=torch.bool, device=mean.device)]
    others = others.reshape(K, K - 1)
    parts = []
    for m, v in zip(mean.split(max(1, ROWS_AT_A_TIME // K)), variance.split(max(1, ROWS_AT_A_TIME // K)), strict=True):
        rest = logsumexp_moments(*(x[:, others].reshape(-1, K - 1) for x in (m, v)))
        parts.append((m - rest.mean.reshape(m.shape), v + rest.variance.reshape(m.shape)))
    if not parts:
        return GaussianMoments(mean, variance)
    return GaussianMoments(*(torch.cat(one) for one in zip(*parts, strict=True)))
