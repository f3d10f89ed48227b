"""Quasi-Newton ascent in the mean and the Cholesky factor of q, where natural-gradient steps are slow or expensive.

F is concave in μ and C, where Σ = CCᵀ (Challis & Barber 2013). From q₀ = N(μ₀, C₀C₀ᵀ), L-BFGS climbs in the coordinates

    μ = μ₀ + C₀ m,      C = C₀ T,      ∂F/∂T = C₀ᵀ[C⁻ᵀ - (S₀⁻¹ + Aᵀ diag(c h) A) C],

T lower triangular, with the logarithms of its diagonal as coordinates. Near q₀, half the squared gradient in these
coordinates is the number of nats to the optimum, so new coordinates are chosen in every round.

A few rows that dwarf all others, such as outliers under a wide prior, make natural-gradient steps tiny, but do not
shorten these.
"""

import math
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from viper.inference.problem import Gaussian, Problem, gaussian

ROUNDS = 20
STEPS = 60  # in a round
MEMORY = 20  # steps that L-BFGS remembers
CLOSE = 1e-9  # nats to the optimum: from there a natural-gradient step does the rest
LEAST_GAIN = 1e-9  # nats: a round that gains less is the last
LARGEST_CLIMB = 500  # most coefficients; the memory of L-BFGS then takes 40 MB


class Climbed(NamedTuple):
    """The best q found, the number of passes, whether its gradient is small enough, and the number of steps."""

    q: Gaussian
    passes: float
    close: bool
    steps: int = 0


def climb(
    problem: Problem,
    q: Gaussian,
    report: Callable[[float], None] | None = None,
    *,
    close: float = CLOSE,
    steps: int = STEPS,
    rounds: int = ROUNDS,
    most: int = ROUNDS * STEPS,
    coordinates: "type[Ascent] | None" = None,
) -> Climbed:
    """Climb from q until half the squared gradient is below `close`. `report` is called with F after every step.

    There are at most `most` steps in all. Another family of q brings its own `coordinates`.
    """
    passes, taken, best = 0, 0, -math.inf
    for _ in range(rounds):
        ascent = (coordinates or Ascent)(problem, q, report, close)
        start = ascent.origin()
        value, _ = ascent.negative(start)
        if not math.isfinite(value) or ascent.left < close or taken >= most:
            return Climbed(q, passes + 1, math.isfinite(value) and ascent.left < close, taken)
        found = scipy.optimize.minimize(
            ascent.negative,
            start,
            jac=True,
            method="L-BFGS-B",
            callback=ascent.tell,
            options={
                "maxiter": min(steps, most - taken),
                "maxfun": 3 * steps,
                "maxcor": ascent.memory,
                "ftol": 1e-15,
                "gtol": 0.0,
            },
        )
        passes, taken = passes + 1 + found.nfev, taken + found.nit
        new = ascent.at(found.x)
        gain = -found.fun - best
        if new is None or not gain >= 0.0:
            return Climbed(q, passes, ascent.left < close, taken)
        q, best = new, -found.fun
        if ascent.left < close or gain < LEAST_GAIN:
            break
    return Climbed(q, passes, ascent.left < close, taken)


class Ascent:
    """F and its gradient in the coordinates around one q."""

    def __init__(self, problem: Problem, q: Gaussian, report: Callable[[float], None] | None, close: float) -> None:
        self.problem, self.q, self.report, self.close = problem, q, report, close
        self.d = len(q.mean)
        self.log_scale = -0.5 * q.log_determinant
        self.value, self.left = -math.inf, math.inf  # F, and half the squared gradient: about the nats left
        self.memory = MEMORY

    @cached_property
    def low(self) -> Tensor:
        """Row and column of each entry of T below the diagonal."""
        return torch.tril_indices(self.d, self.d, -1, device=self.q.mean.device)

    def origin(self) -> np.ndarray:
        return np.zeros(2 * self.d + self.low.shape[1])

    def parts(self, x: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """m, T and log diag T, from the coordinates x."""
        m, logs, rest = torch.from_numpy(x).to(self.q.mean).split([self.d, self.d, len(x) - 2 * self.d])
        T = torch.diag(logs.exp())
        T[self.low[0], self.low[1]] = rest
        return m, T, logs

    def negative(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """-F, up to a constant, and its gradient."""
        m, T, logs = self.parts(x)
        likelihood, penalty, parts = self.terms(m, T)
        self.value = likelihood - 0.5 * penalty + self.log_scale + float(logs.sum())
        gradient = torch.cat(parts).cpu().numpy()
        with np.errstate(over="ignore"):  # far from the optimum
            self.left = 0.5 * float(gradient @ gradient)
        if not (math.isfinite(self.value) and np.isfinite(gradient).all()):
            return math.inf, np.zeros_like(gradient)
        return -self.value, -gradient

    def terms(self, m: Tensor, T: Tensor) -> tuple[float, float, list[Tensor]]:
        """The likelihood's part of F, tr(S₀⁻¹Σ) + (μ-m₀)ᵀS₀⁻¹(μ-m₀), and the gradient."""
        prior, root = self.problem.prior, self.q.factor
        mean, C = self.q.mean + root @ m, root @ T
        total = self.problem.total(mean, C)
        shift = mean - prior.mean
        pull = prior.apply(shift)
        trace = (C * (prior.precision[:, None] * C if prior.precision.ndim == 1 else prior.precision @ C)).sum()
        down = root.T @ (prior.plus(total.gram) @ C)
        gradient = [root.T @ (total.gradient - pull), 1.0 - down.diagonal() * T.diagonal()]
        return total.value, float(trace + shift @ pull), [*gradient, -down[self.low[0], self.low[1]]]

    def tell(self, x: np.ndarray) -> None:
        """Report a step. L-BFGS ends when this raises StopIteration."""
        if self.report is not None:
            self.report(self.value)
        if self.left < self.close:
            raise StopIteration

    def at(self, x: np.ndarray) -> Gaussian | None:
        """Return q at the coordinates x, or None if it is not a proper one."""
        m, T, _ = self.parts(x)
        assert self.q.cholesky is not None
        inverse = torch.linalg.solve_triangular(T, self.q.cholesky.T, upper=False)  # C⁻¹ = T⁻¹L₀ᵀ
        return gaussian(self.q.mean + self.q.factor @ m, inverse.T @ inverse)
