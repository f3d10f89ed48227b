"""Anderson mixing: near the optimum, the last few proposals are combined so that their residuals cancel.

A natural-gradient step from q_k proposes q_k⁺. Its residual is the change in whitened coordinates,

    r_k = (√½ Fᵀ(Λ_k⁺ - Λ_k)F, Lᵀ(μ_k⁺ - μ_k)),      so that ½|r_k|² is the KL divergence of a small step,

and the weights γ minimise |r_k - Σ_i γ_i (r_k - r_i)|². The share θ² of |r_k|² that is left says how good the mixture
Σ_i γ_i q_i⁺ is: a plain step multiplies the divergence by κ², a mixed one by about κ²θ². Where whole steps go too far,
as under very wide priors, the mixture is of points a part ρ of the way from q_i to q_i⁺.
"""

import math
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg.lapack import dposv
from torch import Tensor

from viper.inference.problem import Gaussian, gaussian

MEMORY = 6  # proposals that are mixed
LARGEST_WEIGHTS = 1e3  # sum of their absolute values; a slow rate needs large ones
ENTRIES_PER_WEIGHT = 4  # of a residual: with fewer, the weights cancel all of it whatever the map does
SMALLEST_SHARE = 0.03  # that is believed, because the map is not linear
UNKNOWN_SHARE = 0.999  # assumed if a residual has too few entries for the weights
GRAM_RIDGE = 1e-10  # added to a Gram matrix of changes, relative to its diagonal


class Step(NamedTuple):
    """Where to go next, and the share of the residual that is left; 1 for a plain step."""

    q: Gaussian
    share: float = 1.0


class Past(NamedTuple):
    """Where a step started, its proposal, and the residual."""

    q: Gaussian
    new: Gaussian
    residual: Tensor


class Mixing:
    """The last proposals with their residuals, and how fast moves shrink."""

    def __init__(self) -> None:
        self.past: deque[Past] = deque(maxlen=MEMORY)
        self.last = math.inf  # the previous move, in nats
        self.share = 1.0  # of the step that followed it

    def step(self, q: Gaussian, new: Gaussian, residual: Tensor, rho: float) -> Step:
        """The mixture of a proposal with earlier ones, or the proposal itself if there is no usable mixture."""
        most = max(1, len(residual) // ENTRIES_PER_WEIGHT)
        older = list(self.past)[-(MEMORY if rho < 1.0 else most) :]
        self.past.append(Past(q, new, residual))
        if not older:
            return Step(new)
        changes = torch.stack([residual - past.residual for past in older], 1)
        gamma = mixing_weights(changes, residual)
        if gamma is None:
            return Step(new)
        left = residual - changes @ gamma
        mean, precision = part_way(q, new, rho)
        ends = [part_way(past.q, past.new, rho) for past in older]
        mixed = gaussian(
            mean + sum(weight * (end - mean) for weight, (end, _) in zip(gamma, ends, strict=True)),
            precision + sum(weight * (end - precision) for weight, (_, end) in zip(gamma, ends, strict=True)),
        )
        if mixed is None:
            return Step(new)
        share = float(left @ left / (residual @ residual))
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


def mixing_weights(changes: Tensor, residual: Tensor) -> Tensor | None:
    """γ with the least |r - Cγ|, or None if it is too large because the changes C are nearly dependent.

    torch's default driver pivots, starting from memory it does not initialise, so that its last digits differ from run
    to run; "gels" does not.
    """
    try:
        gamma = torch.linalg.lstsq(changes, residual[:, None], driver="gels").solution[:, 0]
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None
    return gamma if float(gamma.abs().sum()) <= LARGEST_WEIGHTS else None


def weights_from_gram(gram: np.ndarray, wanted: np.ndarray) -> np.ndarray | None:
    """The same from CᵀC, which is overwritten, and Cᵀr: faster for long residuals, but only with a small ridge."""
    gram.flat[:: len(gram) + 1] *= 1.0 + GRAM_RIDGE
    _, weights, singular = dposv(gram, wanted)
    return None if singular else weights


def part_way(q: Gaussian, new: Gaussian, rho: float) -> tuple[Tensor, Tensor]:
    """Mean and precision a part ρ of the way from q to the proposal."""
    if rho == 1.0:
        return new.mean, new.precision
    return torch.lerp(q.mean, new.mean, rho), torch.lerp(q.precision, new.precision, rho)


def whitened(q: Gaussian, new: Gaussian) -> Tensor:
    """The residual r of a proposal, in the metric of the present q."""
    change, shift = new.precision - q.precision, new.mean - q.mean
    if q.cholesky is None:
        return torch.cat([math.sqrt(0.5) * change * q.factor, shift * q.precision.sqrt()])
    return torch.cat([(math.sqrt(0.5) * (q.factor.T @ change @ q.factor)).flatten(), q.cholesky.T @ shift])
