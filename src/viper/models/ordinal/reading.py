"""Probabilities of ordered levels, P(y = k) = s(t_k - f) - s(t_{k-1} - f), from f and thresholds, without sampling.

Probabilities integrate the gaps over a few points with weights (`OrdinalPosterior.points`), given which f ~ N(ϑ, τ²).
For two neighbouring thresholds a < b at a distance g, the mean of p = s(b - f) - s(a - f) is in closed form, and so is

    E p² = E p · coth(g/2) - E s'(f - a) - E s'(f - b).

At a distance r from the middle of a and b, p = sinh(g/2)/(cosh(g/2) + cosh(r)). So P(p ≤ x) is the probability that f
is farther from the middle than some r. For intervals, g is integrated by its own quadrature; given g, the distance of f
from the middle is treated as normal, with its exact mean and variance. An interval ends where P(p ≤ x) is 0.025, say,
or 0.975. The lowest and the highest level have only one threshold, and their ends are in closed form.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.special
import torch
from torch import Tensor

from viper.inference.importance import LINEAR
from viper.inference.ordinal.gaps import level_shares, threshold_matrix
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.models.prediction import TargetReading, columns_by_class
from viper.softplus.limit import limit

SCORE_NODES = 48  # nodes over f, for the expected entropy
GAP_NODES = 24  # nodes over a level's own gap
FARTHEST_SD = 6.0  # standard deviations beyond which a billionth of a normal is left
LARGEST_DISTANCE = 600.0  # distance from which a probability is below 1e-260
LOG_2 = math.log(2.0)
ROOT_TOLERANCE, MOST_ROOT_STEPS = 1e-8, 60  # for the log-odds at which an interval ends
ENDS_AT_ONCE = 1 << 20  # rows × levels × nodes (8 MB)


def ordinal_reading(posterior: OrdinalPosterior) -> TargetReading:
    """How ϑ and τ² (rows × points) are read, given the thresholds at the points."""
    thresholds, weights = posterior.thresholds()
    given: dict[str, Any] = {"thresholds": thresholds, "weights": weights}
    intervals = partial(level_intervals, posterior=posterior)
    return TargetReading(
        partial(level_probabilities, **given),
        partial(level_sds, **given),
        intervals,
        partial(level_scores, **given),
        partial(probable_level, **given),
        partial(level_table, intervals=intervals, **given),
        partial(information_of_level, **given),
        partial(score_moments, weights=weights),
    )


def threshold_tails(mean: Tensor, variance: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E s(t - f), E s(f - t) and E s'(f - t), rows × points × thresholds."""
    f = mean[..., None] - thresholds.to(mean)
    _, small, h = limit().moments(-f.abs(), variance[..., None].expand_as(f))
    above = f > 0.0
    return torch.where(above, small, 1.0 - small), torch.where(above, 1.0 - small, small), h


def level_probabilities(mean: Tensor, variance: Tensor, thresholds: Tensor, weights: Tensor) -> np.ndarray:
    """E P(y = k), rows × levels."""
    below, above, _ = threshold_tails(mean, variance, thresholds)
    return torch.einsum("npk,p->nk", level_shares(below, above), weights.to(mean)).cpu().numpy()


def level_sds(mean: Tensor, variance: Tensor, thresholds: Tensor, weights: Tensor) -> np.ndarray:
    """Standard deviations of P(y = k)."""
    below, above, h = threshold_tails(mean, variance, thresholds)
    p = level_shares(below, above)
    half = 0.5 * thresholds.to(mean).diff(dim=1)
    inside = p[..., 1:-1] / half.tanh() - h[..., :-1] - h[..., 1:]
    squares = torch.cat([p[..., :1] - h[..., :1], inside, p[..., -1:] - h[..., -1:]], -1)
    first, second = (torch.einsum("npk,p->nk", x, weights.to(mean)) for x in (p, squares))
    return (second - first.square()).clamp(min=0.0).sqrt().cpu().numpy()


def level_intervals(mean: Tensor, variance: Tensor, z: float, posterior: OrdinalPosterior) -> np.ndarray:
    """The ends between which P(y = k) lies with equal probability on either side: rows × levels × 2."""
    step = max(1, ENDS_AT_ONCE // (GAP_NODES * posterior.size))
    parts = zip(mean.cpu().split(step), variance.cpu().split(step), strict=True)
    return np.concatenate([interval_ends(*part, z, posterior).numpy() for part in parts])


def interval_ends(mean: Tensor, variance: Tensor, z: float, posterior: OrdinalPosterior) -> Tensor:
    q, m = posterior, posterior.size
    V, B = q.gap_factor @ q.gap_factor.T, threshold_matrix(m)
    gaps = (q.log_gaps + 0.5 * V.diagonal()).exp()  # E g, which is log-normal
    centres = torch.cat([B[:1], 0.5 * (B[1:] + B[:-1]), B[-1:]])  # centres of the levels, as sums of gaps
    # the points are at ± reach on each axis ζ of δ = δ̂ + Gζ; so df/dζ, and Cov(f, δ)
    loading = (mean[:, :m] - mean[:, m : 2 * m]) / (2.0 * q.points()[0].abs().max())
    shared = loading @ q.gap_factor.T
    # u = f - centre: mean, and variance
    u = mean[:, : 2 * m].mean(1, keepdim=True) - centres @ gaps
    of_centres = (centres @ (gaps[:, None] * torch.expm1(V) * gaps) * centres).sum(1)
    of_f = variance[:, :1] + loading.square().sum(1, keepdim=True)
    spread = (of_f + of_centres - 2.0 * (shared * gaps) @ centres.T).clamp(min=0.0)
    # given its own log gap, u is normal: slope, and what variance is left
    own = V.diagonal()
    slope = (shared - ((centres[1:-1] * gaps) * V).sum(1)) / own
    rest = (spread[:, 1:-1] - slope.square() * own).clamp(min=0.0).sqrt()
    of_gap = q.log_gaps.expand_as(slope), own.sqrt().expand_as(slope)
    middle = [level_quantile(u[:, 1:-1], slope, rest, *of_gap, float(scipy.special.ndtr(x * z))) for x in (-1, 1)]
    sides, sd = torch.tensor([-z, z], dtype=u.dtype), spread.sqrt()[..., None]
    first = torch.sigmoid(-u[:, :1, None] + sides * sd[:, :1])
    last = torch.sigmoid(u[:, -1:, None] + sides * sd[:, -1:])
    return torch.cat([first, torch.stack(middle, -1), last], 1)


def level_quantile(u: Tensor, slope: Tensor, rest: Tensor, delta: Tensor, sd: Tensor, level: float) -> Tensor:
    """x with P(p ≤ x) = level, for log g ~ N(delta, sd²) and u | g ~ N(u + slope (log g - delta), rest²)."""
    far = (u.abs() + FARTHEST_SD * (rest + slope.abs() * sd)).clamp(max=LARGEST_DISTANCE)
    low = logit_of_level(far, 0.5 * (delta - FARTHEST_SD * sd).exp())
    high = logit_of_level(torch.zeros_like(far), 0.5 * (delta + FARTHEST_SD * sd).exp())

    def excess(logit: Tensor) -> Tensor:
        return probability_below(logit, u, slope, rest, delta, sd) - level

    return torch.sigmoid(bracketed_root(excess, low, high))


def logit_of_level(r: Tensor, half: Tensor) -> Tensor:
    """log p/(1-p) = log sinh(g/2) - log(cosh(g/2) + cosh(r) - sinh(g/2)), at a distance r from the middle."""
    log_sinh = half + torch.log(-torch.expm1(-2.0 * half)) - LOG_2
    return log_sinh - torch.log((-half).exp() + r.cosh())


def distance_of_level(logit: Tensor, half: Tensor) -> Tensor:
    """r with cosh r = sinh(g/2)/x - cosh(g/2), or 0 if p < x everywhere: the inverse of `logit_of_level`.

    2 cosh r = e^{g/2} ((1 - e^{-g})/x' - 2 e^{-g}) with x' = e^logit, whose logarithm does not overflow.
    """
    rest = -torch.expm1(-2.0 * half) - 2.0 * torch.exp(logit - 2.0 * half)
    log_cosh = half - logit - LOG_2 + rest.clamp(min=torch.finfo(rest.dtype).tiny).log()
    log_cosh = log_cosh.clamp(min=0.0)
    return log_cosh + torch.log1p((-torch.expm1(-2.0 * log_cosh)).sqrt())


def probability_below(logit: Tensor, u: Tensor, slope: Tensor, rest: Tensor, delta: Tensor, sd: Tensor) -> Tensor:
    """P(p ≤ x), by quadrature over log g from the g at which p = x in the middle: for smaller gaps, p ≤ x for all u.

    There P(p ≤ x | g) begins like a square root, which the substitution log g = start + y² removes.
    """
    # tanh(g/4) = x, so that g = 2 log((1+x)/(1-x)) = 2 log(1 + 2 e^logit)
    gap = 2.0 * torch.nn.functional.softplus(logit + LOG_2, threshold=LINEAR)
    start = torch.maximum(gap.log(), delta - FARTHEST_SD * sd)
    end = torch.maximum(delta + FARTHEST_SD * sd, start)
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(GAP_NODES))
    width = (end - start).sqrt()[..., None]
    y = 0.5 * width * (nodes + 1.0)
    log_gap = start[..., None] + y.square()
    half = 0.5 * log_gap.exp()
    z = (log_gap - delta[..., None]) / sd[..., None]
    density = torch.exp(-0.5 * z.square()) / (math.sqrt(2.0 * math.pi) * sd[..., None])
    r = distance_of_level(logit[..., None], half)
    centre = u[..., None] + slope[..., None] * (log_gap - delta[..., None])
    spread = rest.clamp(min=torch.finfo(rest.dtype).tiny)[..., None]
    outside = torch.special.ndtr((-r - centre) / spread) + torch.special.ndtr((centre - r) / spread)
    inner = (0.5 * width * weights * 2.0 * y * density * outside).sum(-1)
    return torch.special.ndtr((start - delta) / sd) + inner


def bracketed_root(function: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Roots of increasing functions by Chandrupatla's method: inverse quadratic steps, and halving where these fail."""
    a, b = high, low
    fa, fb = function(a), function(b)
    c, fc = b, fb
    t = torch.full_like(a, 0.5)
    for _ in range(MOST_ROOT_STEPS):
        x = a + t * (b - a)
        fx = function(x)
        same = torch.sign(fx) == torch.sign(fa)
        c, fc = torch.where(same, a, b), torch.where(same, fa, fb)
        b, fb = torch.where(same, b, a), torch.where(same, fb, fa)
        a, fa = x, fx
        if bool(((b - a).abs() < ROOT_TOLERANCE).logical_or(fa == 0.0).all()):
            break
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        smooth = (phi.square() < xi) & ((1.0 - phi).square() < 1.0 - xi)
        step = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        least = 0.25 * ROOT_TOLERANCE / (b - a).abs().clamp(min=ROOT_TOLERANCE)
        t = torch.where(smooth, step, 0.5).nan_to_num(0.5).clamp(least, 1.0 - least)
    return torch.where(fa.abs() < fb.abs(), a, b)


def information_of_level(mean: Tensor, variance: Tensor, thresholds: Tensor, weights: Tensor) -> np.ndarray:
    """Mutual information of the level with f and gaps, in nats: H(E p) - E H(p), the latter by quadrature over f."""
    below, above, _ = threshold_tails(mean, variance, thresholds)
    average = torch.einsum("npk,p->nk", level_shares(below, above), weights.to(mean))
    nodes, shares = (torch.from_numpy(x).to(mean) for x in np.polynomial.hermite_e.hermegauss(SCORE_NODES))
    given = torch.zeros_like(mean)
    for node, share in zip(nodes, shares / shares.sum(), strict=True):
        f = (mean + node * variance.sqrt())[..., None] - thresholds.to(mean)
        given += share * torch.special.entr(level_shares(torch.sigmoid(-f), torch.sigmoid(f))).sum(-1)
    return (torch.special.entr(average).sum(-1) - given @ weights.to(mean)).clamp(min=0.0).cpu().numpy()


def score_moments(mean: Tensor, variance: Tensor, weights: Tensor) -> np.ndarray:
    """Mean and standard deviation of the score f: the points have the moments of the gaps."""
    share = weights.to(mean)
    centre = mean @ share
    spread = variance[:, 0] + (mean - centre[:, None]).square() @ share
    return torch.stack([centre, spread.sqrt()], -1).cpu().numpy()


def level_scores(mean: Tensor, variance: Tensor, **given: Tensor) -> np.ndarray:
    """log E P(y = k), less its mean over levels."""
    logs = np.log(np.maximum(level_probabilities(mean, variance, **given), np.finfo(float).tiny))
    return logs - logs.mean(1, keepdims=True)


def probable_level(mean: Tensor, variance: Tensor, classes: np.ndarray, **given: Tensor) -> np.ndarray:
    """The most probable level."""
    return classes[level_probabilities(mean, variance, **given).argmax(1)]


def level_table(
    mean: Tensor, variance: Tensor, classes: np.ndarray, z: float, intervals: Any, **given: Tensor
) -> dict[str, Any]:
    """`label`, and four columns for each level."""
    chances, sds = partial(level_probabilities, **given), partial(level_sds, **given)
    columns = columns_by_class(chances, sds, intervals, mean, variance, classes, z)
    return {"label": probable_level(mean, variance, classes, **given), **columns}
