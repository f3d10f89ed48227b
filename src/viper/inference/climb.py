"""Quasi-Newton ascent in the mean and the Cholesky factor of q, where natural-gradient steps are slow or expensive.

F is concave in μ and C, where Σ = CCᵀ (Challis & Barber 2013). From q₀ = N(μ₀, C₀C₀ᵀ), L-BFGS climbs in the coordinates

    μ = μ₀ + C₀ m,      C = C₀ T,      ∂F/∂T = C₀ᵀ[C⁻ᵀ - (S₀⁻¹ + Aᵀ diag(c h) A) C],

T lower triangular, with the logarithms of its diagonal as coordinates. For the diagonal family T is diagonal and its
entries r have the coordinates (r - 1/r)/√2, which grow like r, in which F is concave, and keep r positive. Near q₀,
half the squared gradient in these coordinates is the number of nats to the optimum, so they are chosen anew in every
round.

A few rows that dwarf all others, such as outliers under a wide prior, make natural-gradient steps tiny and leave these
steps unharmed. And in the diagonal family these steps need no d × d matrix: a pass costs four products with A.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from viper.inference.problem import Gaussian, Problem, gaussian

ROUNDS = 20
STEPS = 60  # in a round
MEMORY, MEMORY_DIAGONAL, MEMORY_LARGE = 20, 10, 6  # steps that L-BFGS remembers
LARGE_DIAGONAL = 10_000  # coefficients from which its own vectors cost more than the passes that they save
CLOSE = 1e-9  # nats to the optimum: from there a natural-gradient step does the rest
LEAST_GAIN = 1e-9  # nats: a round that gains less is the last
LARGEST_CLIMB = 500  # coefficients: there, what L-BFGS remembers takes 40 MB


class Climbed(NamedTuple):
    """The highest q that was reached, the number of passes, whether its gradient is as small as was asked; steps."""

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

    There are at most `most` steps in all. `coordinates` are those around a q of another family.
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


def ratio_of(u: Tensor) -> Tensor:
    """The r with (r - 1/r)/√2 = u."""
    half = u * math.sqrt(0.5)
    larger = half.abs() + (half.square() + 1.0).sqrt()  # exp |asinh u/√2|
    return torch.where(half < 0.0, larger.reciprocal(), larger)


class Ascent:
    """F and its gradient in the coordinates around one q."""

    def __init__(self, problem: Problem, q: Gaussian, report: Callable[[float], None] | None, close: float) -> None:
        self.problem, self.q, self.report, self.close = problem, q, report, close
        self.d = len(q.mean)
        below = 0 if problem.diagonal else self.d
        self.low = torch.tril_indices(below, below, -1, device=q.mean.device)
        self.log_scale = -0.5 * q.log_determinant
        self.value, self.left = -math.inf, math.inf  # F, and half the squared gradient: about the nats left
        of_diagonal = MEMORY_DIAGONAL if self.d < LARGE_DIAGONAL else MEMORY_LARGE
        self.memory = of_diagonal if problem.diagonal else MEMORY

    def origin(self) -> np.ndarray:
        return np.zeros(2 * self.d + self.low.shape[1])

    def parts(self, x: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """m, T (its diagonal, for the diagonal family) and log diag T, from the coordinates x."""
        m, logs, rest = torch.from_numpy(x).to(self.q.mean).split([self.d, self.d, len(x) - 2 * self.d])
        if self.problem.diagonal:
            r = ratio_of(logs)
            return m, r, r.log()
        T = torch.diag(logs.exp())
        T[self.low[0], self.low[1]] = rest
        return m, T, logs

    def negative(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """-F, up to a constant, and its gradient."""
        m, T, logs = self.parts(x)
        likelihood, penalty, parts = (self.diagonal_terms if self.problem.diagonal else self.full_terms)(m, T)
        self.value = likelihood - 0.5 * penalty + self.log_scale + float(logs.sum())
        gradient = torch.cat(parts).cpu().numpy()
        with np.errstate(over="ignore"):  # far from the optimum
            self.left = 0.5 * float(gradient @ gradient)
        if not (math.isfinite(self.value) and np.isfinite(gradient).all()):
            return math.inf, np.zeros_like(gradient)
        return -self.value, -gradient

    def full_terms(self, m: Tensor, T: Tensor) -> tuple[float, float, list[Tensor]]:
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

    def diagonal_terms(self, m: Tensor, T: Tensor) -> tuple[float, float, list[Tensor]]:
        """The same for the diagonal family."""
        prior, root = self.problem.prior, self.q.factor.sqrt()
        mean, variance = self.q.mean + root * m, (root * T).square()
        total = self.problem.total(mean, variance)
        shift = mean - prior.mean
        pull = prior.apply(shift)
        bend = prior.diagonal + (total.gram if total.gram.ndim == 1 else total.gram.diagonal())
        gradient = [root * (total.gradient - pull), math.sqrt(2.0) * (1.0 - bend * variance) / (T + 1.0 / T)]
        return total.value, float(prior.diagonal @ variance + shift @ pull), gradient

    def tell(self, x: np.ndarray) -> None:
        """Report a step. L-BFGS ends when this raises StopIteration."""
        if self.report is not None:
            self.report(self.value)
        if self.left < self.close:
            raise StopIteration

    def at(self, x: np.ndarray) -> Gaussian | None:
        """Return q at the coordinates x, or None if it is not a proper one."""
        m, T, _ = self.parts(x)
        if self.q.cholesky is None:
            return gaussian(self.q.mean + self.q.factor.sqrt() * m, self.q.precision / T.square())
        inverse = torch.linalg.solve_triangular(T, self.q.cholesky.T, upper=False)  # C⁻¹ = T⁻¹L₀ᵀ
        return gaussian(self.q.mean + self.q.factor @ m, inverse.T @ inverse)
