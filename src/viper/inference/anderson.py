"""Anderson mixing: near the optimum, combine the last few proposals so that their residuals cancel.

A natural-gradient step from q_k proposes q_k⁺. Its residual is the change in whitened coordinates,

    r_k = (√½ Fᵀ(Λ_k⁺ - Λ_k)F, Lᵀ(μ_k⁺ - μ_k)),      so that ½|r_k|² is the KL divergence of a small step,

and the weights γ minimise |r_k - Σ_i γ_i (r_k - r_i)|². The share θ² of |r_k|² that remains measures the mixture
Σ_i γ_i q_i⁺: a plain step multiplies the divergence by κ², a mixed one by about κ²θ². If full steps overshoot,
as under very wide priors, it mixes points a fraction ρ of the way from q_i to q_i⁺.
"""

import math
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg.lapack import dgels, dposv
from torch import Tensor

from viper.inference.problem import Gaussian, gaussian, is_small
from viper.inference.rows import product

MEMORY = 6  # number of proposals in a mixture
LARGEST_WEIGHTS = 1e3  # limit on Σ|γ_i|; slow convergence needs large weights
ENTRIES_PER_WEIGHT = 4  # with fewer entries in a residual, the weights could cancel any residual entirely
SMALLEST_SHARE = 0.03  # smaller estimates of θ² are not trusted, because the map is not linear
LEAST_PROBED, PROBES = 257, 48  # from this dimension on, a residual is measured along so many random directions
UNKNOWN_SHARE = 0.999  # the θ² assumed if a residual has too few entries for the weights
GRAM_RIDGE = 1e-10  # added to a Gram matrix of changes, relative to its diagonal


class Step(NamedTuple):
    """The next point, and the share of the residual that remains (1 for a plain step)."""

    q: Gaussian
    share: float = 1.0


class Past(NamedTuple):
    """Where a step started, its proposal, and the residual."""

    q: Gaussian
    new: Gaussian
    residual: np.ndarray


class Mixing:
    """The last proposals with their residuals, and how fast moves shrink."""

    def __init__(self) -> None:
        self.past: deque[Past] = deque(maxlen=MEMORY)
        self.last = math.inf  # the previous move, in nats
        self.share = 1.0  # share of the residual that the step taken then left

    def step(self, q: Gaussian, new: Gaussian, residual: Tensor, rho: float) -> Step:
        """Return the proposal mixed with earlier ones, or the proposal itself if no mixture is usable."""
        most = max(1, residual.shape[0] // ENTRIES_PER_WEIGHT)
        older = list(self.past)[-(MEMORY if rho < 1.0 else most) :]
        whole = residual.cpu().numpy()
        self.past.append(Past(q, new, whole))
        if not older:
            return Step(new)
        found = mixing_weights(np.stack([whole - past.residual for past in older]).T, whole)
        if found is None:
            return Step(new)
        gamma, left = found
        mean, precision = part_way(q, new, rho)
        ends = [part_way(past.q, past.new, rho) for past in older]
        # (1 - Σγ) of this end and γ of the others
        weights = [1.0 - float(gamma.sum()), *gamma.tolist()]
        means, precisions = zip((mean, precision), *ends, strict=True)
        mixed = gaussian(weighted_sum(weights, means), weighted_sum(weights, precisions))
        if mixed is None:
            return Step(new)
        share = left / float(whole @ whole)
        return Step(mixed, max(share, SMALLEST_SHARE if len(older) <= most else UNKNOWN_SHARE))

    def taken(self, move: float, share: float) -> None:
        """Record the step just taken."""
        self.last, self.share = move, share

    def rate(self, move: float, slowest: float) -> float:
        """κ², the factor by which a plain step shrinks the move, estimated from the last step; at least `slowest`.

        A single step may do better than the final rate, which is set by the dependence of h on Σ.
        """
        return max(move / (self.last * self.share), slowest) if self.last > 0.0 else math.inf

    def forget(self) -> None:
        self.past.clear()
        self.taken(math.inf, 1.0)


def mixing_weights(changes: np.ndarray, residual: np.ndarray) -> tuple[np.ndarray, float] | None:
    """Return the γ that minimises |r - Cγ|², and this minimum; `changes` are overwritten.

    Returns None if γ is too large because the columns of C are nearly dependent. LAPACK is called directly, which takes
    half the time of torch's function for so few columns. Its result holds γ, followed by the rest of r in rotated
    coordinates.
    """
    entries, count = changes.shape
    if count > entries:
        residual = np.pad(residual, (0, count - entries))
    _, solution, singular = dgels(changes, residual, overwrite_a=1)
    gamma, left = solution[:count], solution[count:]
    return None if singular or not np.abs(gamma).sum() <= LARGEST_WEIGHTS else (gamma, float(left @ left))


def weights_from_gram(gram: np.ndarray, wanted: np.ndarray) -> np.ndarray | None:
    """Solve the same problem from CᵀC (overwritten) and Cᵀr: faster for long residuals, but needs a small ridge."""
    gram.flat[:: len(gram) + 1] *= 1.0 + GRAM_RIDGE
    _, weights, singular = dposv(gram, wanted)
    return None if singular else weights


def weighted_sum(weights: Sequence[float], parts: Sequence[Tensor]) -> Tensor:
    """Σ_i w_i x_i."""
    total = parts[0] * weights[0]
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        total.add_(part, alpha=weight)
    return total


def part_way(q: Gaussian, new: Gaussian, rho: float) -> tuple[Tensor, Tensor]:
    """Return mean and precision a fraction ρ of the way from q to the proposal."""
    if rho == 1.0:
        return new.mean, new.precision
    return torch.lerp(q.mean, new.mean, rho), torch.lerp(q.precision, new.precision, rho)


def whitened(q: Gaussian, new: Gaussian) -> Tensor:
    """Return the residual r of a proposal, in the metric of the current q."""
    if q.cholesky is not None and is_small(q.mean):
        F, d = q.factor.numpy(), q.mean.shape[0]
        residual = np.empty(d * d + d)
        change = new.precision.numpy() - q.precision.numpy()
        np.matmul(F.T @ change, math.sqrt(0.5) * F, out=residual[: d * d].reshape(d, d))
        np.matmul(new.mean.numpy() - q.mean.numpy(), q.cholesky.numpy(), out=residual[d * d :])
        return torch.from_numpy(residual)
    change, shift = new.precision - q.precision, new.mean - q.mean
    if q.cholesky is None:
        return torch.cat([math.sqrt(0.5) * change * q.factor, shift * q.precision.sqrt()])
    if len(shift) >= LEAST_PROBED:
        spread = q.factor.T @ (change @ (q.factor @ probes(len(shift)).to(shift)))
    else:
        spread = product(product(q.factor.T, change), q.factor)
    return torch.cat([(math.sqrt(0.5) * spread).flatten(), q.cholesky.T @ shift])


@cache
def probes(dimension: int) -> Tensor:
    """Z (d × k) of random signs with E[ZZᵀ] = I: |MZ|² estimates |M|² to a few per cent, for d²k operations, not d³."""
    signs = np.random.default_rng(0).integers(0, 2, (dimension, PROBES)) * 2.0 - 1.0
    return torch.from_numpy(signs / math.sqrt(PROBES))
