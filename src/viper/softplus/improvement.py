"""How far a probability p = s(f), f ~ N(ϑ, τ²), lies above a level c = s(b), and what an answer tells about f.

    E max(p - c, 0) = ∫_{z₀}^∞ (s(ϑ + τz) - c) φ(z) dz = ∫_c^1 Φ((ϑ - logit u)/τ) du,      z₀ = (b - ϑ)/τ.

The first integrand is smooth on the scale π/τ of the logistic, the second one where τ > 1. Gauss-Legendre and
tanh-sinh nodes give both to 1e-12. All of it is plain torch, with derivatives by autograd.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.softplus.mixture_table import MIXTURES
from viper.softplus.normal import SQRT_2PI, cdf, pdf

NODES = 64
WIDEST_SD = 1.0  # τ up to which the first integral is taken
NORMAL_REACH = 8.6  # sds beyond which a normal is below 1e-16
DECAY = 37.0  # in the exponent, from the lower end to where the integrand has fallen by 1e-16
STEEPEST = 3.2  # of the nodes of tanh-sinh


def expected_excess(mean: Tensor, variance: Tensor, level: Tensor) -> Tensor:
    """E max(s(f) - s(level), 0) for f ~ N(mean, variance), elementwise; differentiable."""
    mean, variance, level = torch.broadcast_tensors(mean, variance, level)
    sd = variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()
    narrow = sd <= WIDEST_SD
    # the branch that is not taken gets an sd of 1, so that its gradients are finite
    by_nodes = excess_by_nodes(mean, torch.where(narrow, sd, 1.0), level)
    by_levels = excess_by_levels(mean, torch.where(narrow, 1.0, sd), level)
    return torch.where(narrow, by_nodes, by_levels)


def excess_by_nodes(mean: Tensor, sd: Tensor, level: Tensor) -> Tensor:
    """The integral over z, from max(z₀, -8.6) to where the density has fallen by 1e-16."""
    z, w = (x.to(mean).reshape(-1, *[1] * mean.ndim) for x in unit_nodes())
    start = ((level - mean) / sd).clamp(min=-NORMAL_REACH)
    end = torch.where(start > 0.0, (start.clamp(min=0.0).square() + 2.0 * DECAY).sqrt(), NORMAL_REACH)
    at = start + (end - start) * z
    f = mean + sd * at
    # s(f) - s(b) = s(f) s(-b) (1 - e^{b - f})
    above = torch.sigmoid(f) * torch.sigmoid(-level) * -torch.expm1(level - f)
    return ((end - start) * w * above * pdf(at)).sum(0)


def excess_by_levels(mean: Tensor, sd: Tensor, level: Tensor) -> Tensor:
    """The integral over u = 1 - (1 - c) t, with nodes t that crowd at both ends."""
    t, left, w = (x.to(mean).reshape(-1, *[1] * mean.ndim) for x in crowded_nodes())
    c, rest = torch.sigmoid(level), torch.sigmoid(-level)
    log_odds = torch.log(c + rest * left) - torch.log(rest * t)
    return rest * (w * cdf((mean - log_odds) / sd)).sum(0)


@cache
def unit_nodes() -> tuple[Tensor, Tensor]:
    """Gauss-Legendre on [0, 1]."""
    z, w = np.polynomial.legendre.leggauss(NODES)
    return torch.from_numpy(0.5 * (z + 1.0)), torch.from_numpy(0.5 * w)


@cache
def crowded_nodes() -> tuple[Tensor, Tensor, Tensor]:
    """Tanh-sinh on [0, 1]: t, 1 - t and weights, each to full relative precision."""
    u = np.linspace(-STEEPEST, STEEPEST, NODES + 1)
    a = math.pi * np.sinh(u)
    t, left = 1.0 / (1.0 + np.exp(-a)), 1.0 / (1.0 + np.exp(a))
    weight = (u[1] - u[0]) * math.pi * np.cosh(u) * t * left
    return torch.from_numpy(t), torch.from_numpy(left), torch.from_numpy(weight)


class AfterAnswer(NamedTuple):
    """The chance of a yes under f ~ N(ϑ, τ²), and the means and variances of f after a yes and after a no."""

    chance: Tensor
    mean_yes: Tensor
    mean_no: Tensor
    variance_yes: Tensor
    variance_no: Tensor


def after_answer(mean: Tensor, variance: Tensor) -> AfterAnswer:
    """Moments of f given either answer, in closed form:

    E[f | 1] = ϑ + τ² h/g,      Var[f | 1] = τ² + τ⁴ (t/g - h²/g²),      g = E s, h = E s', t = E s''.

    Those given 0 follow by symmetry. g, h and t are sums over the twelve normals of `mixture_table`, which is within
    9e-12, so that any number of derivatives exist.
    """
    table = MIXTURES[-1]
    weights, own = (
        torch.tensor(x, dtype=mean.dtype, device=mean.device).reshape(-1, *[1] * mean.ndim)
        for x in (table.weights, table.variances)
    )
    rate = (own + variance).rsqrt()
    z = mean * rate
    density = weights * torch.exp(-0.5 * z.square()) / SQRT_2PI * rate
    yes, no = (weights * cdf(z)).sum(0), (weights * cdf(-z)).sum(0)
    h, t = density.sum(0), -(density * z * rate).sum(0)
    up, down = h / yes, h / no
    return AfterAnswer(
        yes,
        mean + variance * up,
        mean - variance * down,
        variance + variance.square() * (t / yes - up.square()),
        variance - variance.square() * (t / no + down.square()),
    )
