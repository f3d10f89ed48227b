"""Anderson's mixing: near the optimum, the last few proposals combined so that their residuals cancel.

A natural-gradient step from q_k proposes q_k⁺. Its residual is the change in whitened coordinates,

    r_k = (√½ Fᵀ(Λ_k⁺ - Λ_k)F, Lᵀ(μ_k⁺ - μ_k)),      so that ½|r_k|² is the KL divergence of a small step,

and weights γ minimise |r_k - Σ_i γ_i (r_k - r_i)|². What is left of |r_k|², the share θ², tells how far the mixture
Σ_i γ_i q_i⁺ goes: where a plain step shrinks the divergence by κ², it shrinks it by about κ²θ². Where whole steps go
too far, as under very wide priors, what is mixed is the part ρ of the way from q_i to q_i⁺.
"""

import math
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from viper.inference.problem import Gaussian, gaussian

MEMORY = 6  # proposals that are mixed
LONGEST = 1e3  # sum of the weights; a slow rate needs long ones
ENTRIES_PER_WEIGHT = 4  # of a residual: with fewer, nothing is left of it whatever the map does
SMALLEST_SHARE = 0.03  # to be believed: the map is not linear
UNKNOWN_SHARE = 0.999  # of mixtures of more proposals than a residual has entries for


class Step(NamedTuple):
    """Where to go next, and the share of the residual that is left; 1 for a plain step."""

    q: Gaussian
    share: float = 1.0


class Past(NamedTuple):
    """Where a step began, what it proposed, and the residual."""

    q: Gaussian
    new: Gaussian
    residual: Tensor


class Mixing:
    """The last proposals with their residuals, and the pace at which moves shrink."""

    def __init__(self) -> None:
        self.past: deque[Past] = deque(maxlen=MEMORY)
        self.last = math.inf  # the move before this one, in nats, and the share of the step that followed it
        self.share = 1.0

    def step(self, q: Gaussian, new: Gaussian, residual: Tensor, rho: float) -> Step:
        """The mixture of a proposal with those before it, or itself where there is none."""
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
        """Note the step just taken."""
        self.last, self.share = move, share

    def rate(self, move: float, slowest: float) -> float:
        """κ², by which a plain step shrinks the move: as the last one did, had it been plain, but not below `slowest`.

        A single step may do better than the rate that the dependence of h on Σ sets in the end.
        """
        return max(move / (self.last * self.share), slowest) if self.last > 0.0 else math.inf

    def forget(self) -> None:
        self.past.clear()
        self.taken(math.inf, 1.0)


def mixing_weights(changes: Tensor, residual: Tensor) -> Tensor | None:
    """γ with the least |r - Cγ|, or None if the changes C are so nearly dependent that γ is too long.

    By Householder's QR: the pivoting driver, torch's default, starts from pivots that it does not set, so that the
    last digits would differ from run to run.
    """
    try:
        gamma = torch.linalg.lstsq(changes, residual[:, None], driver="gels").solution[:, 0]
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None
    return gamma if float(gamma.abs().sum()) <= LONGEST else None


def part_way(q: Gaussian, new: Gaussian, rho: float) -> tuple[Tensor, Tensor]:
    """Mean and precision the part ρ of the way from q to the proposal."""
    if rho == 1.0:
        return new.mean, new.precision
    return torch.lerp(q.mean, new.mean, rho), torch.lerp(q.precision, new.precision, rho)


def whitened(q: Gaussian, new: Gaussian) -> Tensor:
    """The residual r, as the present q sees it."""
    change, shift = new.precision - q.precision, new.mean - q.mean
    if q.cholesky is None:
        return torch.cat([math.sqrt(0.5) * change * q.factor, shift * q.precision.sqrt()])
    return torch.cat([(math.sqrt(0.5) * (q.factor.T @ change @ q.factor)).flatten(), q.cholesky.T @ shift])
