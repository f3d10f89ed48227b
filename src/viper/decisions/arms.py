"""What a bandit knows of its arms: independent Gaussian log-odds f ~ N(t, v), and what follows from them.

    reward       E s(f)
    information  H(E s(f)) - E H(s(f)) = H(g) - (η - t g - v h): what one outcome tells about f, in nats
    chances      P(arm k has the largest f) = ∫ N(u; t_k, v_k) Π_{j≠k} Φ((u - t_j) / √v_j) du

η, g and h are the expected softplus, its slope and its curvature. A Gaussian factor of f stands for every outcome's
likelihood (`viper.decisions.outcomes`); visiting the outcome gives it the one with which the posterior has the mean and
the variance of all other factors times the likelihood, along x a problem of one dimension.

_arms.c has the same formulas, since a decision is many small sums; without it, or with a policy of one's own, these.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import expit, ndtr, xlogy

from viper.decisions.outcomes import ARM, PRECISION, REWARD, SHIFT
from viper.softplus.mixture_table import MIXTURES

ACCURACY = 1e-8  # of expectations
SDS_OUT = 6.0  # sds; beyond, a normal distribution has 1e-9
STEP = 0.7  # sds between nodes: 1e-7 for ten arms, less for more
NODES_MOST = 128  # an sd counts as this share of the range of nodes at least, so that nodes are few
MIXTURE = next(mixture for mixture in MIXTURES if mixture.error < ACCURACY)
WEIGHTS, VARIANCES = (np.array(x) for x in (MIXTURE.weights, MIXTURE.variances))
PEAK = 1.0 / math.sqrt(2.0 * math.pi)


class MatchedStep(NamedTuple):
    """How one outcome changes f: its mean moves by v · slope, and its variance becomes v - v² · curvature."""

    slope: float
    curvature: float


class ArmPosterior(NamedTuple):
    """All weights: those that arms share are N(mean, covariance), and given these, w, those of arm a alone are
    N(own_mean[a] + slope[a] w, own_covariance[a]). A model without weights of one kind has arrays without columns.
    """

    mean: np.ndarray  # s
    covariance: np.ndarray  # s × s
    own_mean: np.ndarray  # arms × o
    slope: np.ndarray  # arms × o × s
    own_covariance: np.ndarray  # arms × o × o


def arm_moments(x: np.ndarray, posterior: ArmPosterior, arm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the log-odds of arms; x has one row, or one an arm.

    f = u'w + c'(own weights at w = 0), where the shared part of x and what c says of w through an arm's own weights
    add up to u.
    """
    shared, own = len(posterior.mean), posterior.own_mean.shape[1]
    rows = np.broadcast_to(x, (len(arm), x.shape[1]))
    c = rows[:, rows.shape[1] - own :]
    u = rows[:, :shared] + np.einsum("kos,ko->ks", posterior.slope[arm], c)
    across = np.einsum("koj,ko->kj", posterior.own_covariance[arm], c)
    t = u @ posterior.mean + np.einsum("ko,ko->k", posterior.own_mean[arm], c)
    v = np.einsum("ks,ks->k", u @ posterior.covariance, u) + np.einsum("ko,ko->k", across, c)
    return t, np.maximum(v, 0.0)


def rewards(t: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E s(f) of every arm, and the information of its outcome about f."""
    root = np.sqrt(v[:, None] + VARIANCES)
    u = t[:, None] / root
    cdf, density = ndtr(u), PEAK * np.exp(-0.5 * u * u)
    reward, h = np.clip(cdf @ WEIGHTS, 0.0, 1.0), (density / root) @ WEIGHTS
    softplus = (t[:, None] * cdf + root * density) @ WEIGHTS
    entropy = -xlogy(reward, reward) - xlogy(1.0 - reward, 1.0 - reward)
    return reward, np.maximum(entropy - (softplus - t * reward - v * h), 0.0)


def chances(t: np.ndarray, v: np.ndarray, spread: float = 1.0) -> tuple[np.ndarray, float]:
    """P(arm k has the largest f), and E s(max f), where f ~ N(t, spread² v); by equal steps."""
    sd = spread * np.sqrt(v)
    start, end = float((t - SDS_OUT * sd).max()), float((t + SDS_OUT * sd).max())
    may_be_best = t + SDS_OUT * sd >= start
    sd = np.maximum(sd, max((end - start) / NODES_MOST, 1e-12 * max(1.0, abs(start))))
    least = float(sd[may_be_best].min())
    start, end = start - SDS_OUT * least, end + SDS_OUT * least
    at = start + STEP * least * np.arange(math.ceil((end - start) / (STEP * least)) + 1)[:, None]
    u = (at - t) / sd
    cdf = ndtr(u)
    every = cdf.prod(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        mass = np.where(every > 0.0, PEAK * np.exp(-0.5 * u * u) / sd * (every / cdf), 0.0)
    total = mass.sum()
    return mass.sum(0) / total, float(mass.sum(1) @ expit(at[:, 0]) / total)


def least_ratio(regret: np.ndarray, information: np.ndarray) -> np.ndarray:
    """The distribution over arms with the least (Σ π regret)² / Σ π information: one arm, or two.

    They are next to each other on the lower edge of the convex hull of all pairs (information, regret). On a segment,
    the ratio is least where twice the relative change of the regret is that of the information.
    """
    chance = np.zeros(len(regret))
    edge = lower_edge(regret, information)
    best = (math.inf, edge[-1], edge[-1], 0.0)
    for a, b in zip(edge, [*edge[1:], edge[-1]], strict=True):
        gain, cost = information[b] - information[a], regret[b] - regret[a]
        q = 0.0 if gain * cost == 0.0 else (gain * regret[a] - 2.0 * cost * information[a]) / (cost * gain)
        q = min(max(q, 0.0), 1.0)
        r, g = regret[a] + q * cost, information[a] + q * gain
        ratio = 0.0 if r <= 0.0 else r * r / g if g > 0.0 else math.inf
        if ratio < best[0]:
            best = (ratio, a, b, q)
    _, a, b, q = best
    chance[a] += 1.0 - q
    chance[b] += q
    return chance


def lower_edge(regret: np.ndarray, information: np.ndarray) -> list[int]:
    """The arms on the lower edge of the convex hull, by increasing information."""
    edge: list[int] = []
    for c in np.lexsort((regret, information)).tolist():
        if edge and information[edge[-1]] == information[c]:
            continue
        while len(edge) > 1:
            a, b = edge[-2:]
            across = (information[b] - information[a]) * (regret[c] - regret[a])
            if across > (regret[b] - regret[a]) * (information[c] - information[a]):
                break
            edge.pop()
        edge.append(c)
    return edge


def largest(score: np.ndarray) -> np.ndarray:
    """Equal shares for the arms whose score is the largest."""
    best = score == score.max()
    return best / best.sum()


def matched_step(t: float, v: float, reward: float) -> MatchedStep:
    """The step of moment matching for one outcome, 0 or 1, of an arm with log-odds N(t, v).

    Where f is far on the wrong side, s(f) = e^f s(-f) turns E s(f) into an expectation under N(t + v, v).
    """
    sign = 1.0 if reward else -1.0
    far = sign * t + v < 0.0
    at = -(sign * t + v) if far else sign * t
    root = np.sqrt(VARIANCES + v)
    u = at / root
    density = WEIGHTS * PEAK * np.exp(-0.5 * u * u)
    value, slope, bend = float(WEIGHTS @ ndtr(u)), float((density / root).sum()), -float((u * density / root**2).sum())
    a = slope / value
    return MatchedStep(sign * (1.0 - a if far else a), a * a - bend / value)


def visit(x: np.ndarray, outcome: np.ndarray, posterior: ArmPosterior) -> float:
    """Move an outcome's factor to where the posterior has the moments of the other factors times the likelihood.
    Returns how far f moves, in its sds.

    Given the shared weights w, f is N(u'w + a, τ). Its factor of precision p and shift b is one of u'w with precision
    p / (1 + p τ) and shift (b - p a) / (1 + p τ) when the arm's own weights are integrated out.
    """
    mean, covariance, own_means, slopes, own_covariances = posterior
    arm, (reward, weight, precision, shift) = int(outcome[ARM]), outcome[REWARD:]
    own_mean, slope, own_covariance = own_means[arm], slopes[arm], own_covariances[arm]
    c = x[len(x) - len(own_mean) :]
    u = x[: len(mean)] + c @ slope
    own_across, across = own_covariance @ c, covariance @ u
    a, b, tau, s = float(own_mean @ c), float(mean @ u), float(own_across @ c), float(across @ u)
    t, v = a + b, tau + s
    if not (v > 0.0 and 1.0 / v > weight * precision):
        return 0.0
    others = 1.0 / (1.0 / v - weight * precision)
    centre = (t / v - weight * shift) * others
    step, curvature = matched_step(centre, others, reward)
    stays = 1.0 - others * curvature
    if not (curvature >= 0.0 and stays > 0.0):
        return 0.0
    outcome[PRECISION], outcome[SHIFT] = curvature / stays, (step + centre * curvature) / stays
    more, push = weight * (outcome[PRECISION] - precision), weight * (outcome[SHIFT] - shift)
    more_of_u, push_of_u = more / (1.0 + more * tau), (push - more * a) / (1.0 + more * tau)
    own_mean += push_of_u * own_across
    slope -= more_of_u * np.outer(own_across, u)
    own_covariance -= more_of_u * np.outer(own_across, own_across)
    mean += (push_of_u - more_of_u * b) / (1.0 + more_of_u * s) * across
    covariance -= more_of_u / (1.0 + more_of_u * s) * np.outer(across, across)
    return max(abs(push - more * t) * math.sqrt(v), abs(more) * v) / (1.0 + more * v)


def visits(
    X: np.ndarray, table: np.ndarray, first: int, least: int, most: int, calm: float, posterior: ArmPosterior
) -> int:
    """Visit the newest outcome and then, in turn from `first`, others until `least` one after the other have moved f by
    less than `calm`, or `most` are visited. Returns their number.
    """
    visited = quiet = 0
    i = len(table) - 1
    while True:
        quiet = quiet + 1 if visit(X[i], table[i], posterior) < calm else 0
        if quiet >= least or visited >= most:
            return visited
        i, visited = (first + visited) % len(table), visited + 1
