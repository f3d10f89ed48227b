"""The solver: natural-gradient steps until none is left to take, for logistic regression and Gaussian processes alike.

F is checked after every step of steps.py and the step halved until F does not decrease. Near the optimum, Anderson's
mixture of the last steps is tried first. Many rows are approached through a random few, and all but the last pass may
use a cheaper formula.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.limit import limit
from viper.mode import chord_step, find_mode
from viper.problem import Sums
from viper.steps import (
    LARGEST_DIRECT,
    Gaussian,
    Problem,
    diagonal_step,
    divergence,
    full_step,
    gaussian,
    kl_to_prior,
)


class ConvergenceWarning(UserWarning):
    """The iteration stopped before it converged."""


def users_line() -> int:
    """The `stacklevel` of a warning that points at the first line outside viper and scikit-learn."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("viper.", "sklearn.")):
        frame, level = frame.f_back, level + 1
    return level


class Iteration(NamedTuple):
    """One accepted step: rows used, whether roughly, objective F, step length ρ, KL moved in nats, seconds so far."""

    rows: int
    rough: bool
    objective: float
    step: float
    move: float
    seconds: float


@dataclass
class Result:
    """Where the solver stopped: q, the objective there, and how it came about."""

    q: Gaussian
    factor: Tensor
    objective: float
    converged: bool
    status: str
    history: list[Iteration] = field(default_factory=list)
    passes: float = 0.0
    magnitude: float = math.nan  # Σ c (|ϑ| + τ + 1) at q
    move: float = math.inf  # KL of the last step

    @property
    def iterations(self) -> int:
        return len(self.history)


def newton(
    problem: Problem,
    q: Gaussian | None = None,
    *,
    tol: float = 1e-9,
    max_iter: int = 200,
    report: Callable[[Iteration], None] | None = None,
    generator: np.random.Generator | None = None,
) -> Result:
    """Maximise F from `q` (default: as `beginning` finds it) until a step would move q by less than `tol` nats.

    With `problem.rough` a rough stage comes first, which only chooses where the last begins; that is often one pass.
    """
    began = time.perf_counter()
    history: list[Iteration] = []
    passes, move = 0.0, math.inf
    if q is None:
        q, passes = beginning(problem, generator or np.random.default_rng(0))
    stages = [problem] if problem.rough is None else [replace(problem, refine=False), problem]
    for stage in stages:
        result = iterate(stage, q, tol, max_iter, began, report, move)
        if not stage.refine and not math.isfinite(result.objective):
            continue  # float32 was not enough; the last stage needs none of this
        history += result.history
        passes += result.passes
        q, move = result.q, result.move
    return replace(result, history=history, passes=passes)


def beginning(problem: Problem, generator: np.random.Generator) -> tuple[Gaussian, float]:
    """Laplace's q, found on random subsets where rows are many, and the passes that took.

    From the mode of a subset of very many rows one step leads to that of all; of fewer, it is found by itself.
    """
    whole = replace(problem, refine=False)
    stages = [coarse_stage(problem, k, generator) for k in coarse_sizes(problem)]
    chord = problem.source.rows >= CHORD_ROWS and not problem.iterative and bool(stages)
    if not chord:
        stages.append((whole, MODE_MOVE))
    mean, passes = None, float(chord)
    for stage, enough in stages:
        mode = find_mode(stage, mean, enough)
        mean, passes = mode.q.mean, passes + mode.passes * stage.source.rows / problem.source.rows
    return chord_step(whole, mode) if chord else mode.q, passes


CHORD_ROWS = 50_000  # rows from which a pass without matrix products pays
MODE_MOVE = 10.0  # nats: a Newton step from there ends within a fraction of one, and q's mean is as far from the mode
COARSE_SHARE = 0.1  # of a subset's own sampling error: a step that moves less has no place on it
COARSE_RATIO = 10
LARGEST_SUBSET = 1 << 25  # entries (256 MB)
ROWS_PER_DIMENSION = 40  # rows below which a subset does not determine the fit


def coarse_sizes(problem: Problem) -> list[int]:
    """Sizes of the subsets: a tenth of the rows, a tenth of those, ..., as long as they determine the fit.

    None is too large to be held in memory beside a source that is not.
    """
    least = max(ROWS_PER_DIMENSION * problem.source.dimension, problem.source.smallest_subset)
    most = max(LARGEST_SUBSET // problem.source.dimension, least)
    sizes: list[int] = []
    k = problem.source.rows
    while k >= 4 * least:
        k = min(max(k // COARSE_RATIO, least), most)
        sizes.insert(0, k)
    return sizes


def coarse_stage(problem: Problem, k: int, generator: np.random.Generator) -> tuple[Problem, float]:
    """The problem on a subset, and when it has served; its optimum is about d/2 · n/k nats from that of all rows."""
    stage = problem.coarsened(k, generator)
    return stage, COARSE_SHARE * 0.5 * problem.source.dimension * stage.scale


def iterate(
    problem: Problem,
    q: Gaussian,
    tol: float,
    max_iter: int,
    began: float,
    report: Callable[[Iteration], None] | None,
    last: float = math.inf,
) -> Result:
    """Damped natural-gradient steps on one source; `last` is the move of the step that led there.

    The stage ends with the step after which, at the rate so far, a further one would move q by less than `tol`.
    """
    run = Stage(problem, began, report)
    slowest = min(0.5, 2.0 * problem.source.dimension / (problem.source.rows * problem.scale))
    run.move_to(q, q.factor, *problem.evaluate(q, q.factor))
    rho = 1.0
    for _ in range(max_iter):
        proposal = run.step(rho)
        move = math.inf if proposal is None else divergence(run.result.q, proposal)
        if proposal is not None and rho == 1.0 and remaining(move, last, slowest) < run.enough(tol):
            if run.finish(proposal, move, tol):
                return run.result
            last = math.inf
            continue
        if last > LOCAL or not run.accept(run.extrapolated(proposal, rho), rho):
            while not run.accept(proposal, rho, move if rho == 1.0 else None):
                if not problem.refine and move < LOCAL:
                    return run.result  # a rough formula cannot tell better from worse so near the optimum
                rho *= 0.5
                if rho < SHORTEST_STEP:
                    run.give_up()
                    return run.result
                proposal = run.step(rho)
        last = run.result.history[-1].move / rho
        rho = min(1.0, 2.0 * rho)
    run.result.status = f"not converged in {max_iter} iterations"
    return run.result


SHORTEST_STEP = 1e-10
LOCAL = 1.0  # nats: moves below this are of the last, linear phase


def remaining(move: float, last: float, slowest: float) -> float:
    """KL left after this step, if moves go on shrinking at the rate ρ = move/last: distances add up like √move.

    A single step may do better than the rate that the dependence of h on Σ sets in the end, about `slowest`.
    """
    if move <= 0.0 or math.isinf(last):
        return max(move, 0.0)
    rate = max(move / last, slowest) if last > 0.0 else math.inf
    return move * rate / (1.0 - math.sqrt(rate)) ** 2 if rate < 1.0 else math.inf


class Stage:
    """The state of `iterate`: where it is, the sums there, and the record."""

    def __init__(self, problem: Problem, began: float, report: Callable[[Iteration], None] | None) -> None:
        self.problem, self.began, self.report = problem, began, report
        memory = MEMORY if problem.source.dimension <= LARGEST_DIRECT else 0
        self.proposals: deque[tuple[Gaussian, Tensor]] = deque(maxlen=memory)  # with their residuals
        self.total: Sums

    def move_to(self, q: Gaussian, factor: Tensor, value: float, total: Sums) -> None:
        if not hasattr(self, "result"):
            self.result = Result(q, factor, value, False, "")
        self.result.q, self.result.factor, self.result.objective = q, factor, value
        self.result.magnitude = total.magnitude
        self.result.passes += 1
        self.total = total

    def step(self, rho: float) -> Gaussian | None:
        step = diagonal_step if self.problem.diagonal else full_step
        return step(self.problem, self.result.q, self.total, rho)

    def extrapolated(self, new: Gaussian | None, rho: float) -> Gaussian | None:
        """Anderson's step: the mixture of the last proposals whose residuals Λ⁺ - Λ, so mixed, are least."""
        if new is None or rho < 1.0:
            self.proposals.clear()
            return None
        residual = new.precision - self.result.q.precision
        older = list(self.proposals)
        self.proposals.append((new, residual))
        if not older:
            return None
        changes = torch.stack([self.whitened(residual - past).flatten() for _, past in older], 1)
        gamma = torch.linalg.lstsq(changes, self.whitened(residual).flatten()[:, None]).solution[:, 0]
        if not float(gamma.abs().sum()) <= LONGEST_EXTRAPOLATION:
            return None
        mean, precision = new.mean.clone(), new.precision.clone()
        for weight, (past, _) in zip(gamma, older, strict=True):
            mean += weight * (past.mean - new.mean)
            precision += weight * (past.precision - new.precision)
        return gaussian(mean, precision)

    def whitened(self, precision: Tensor) -> Tensor:
        """FᵀMF: a change of the precision as the present q sees it."""
        factor = self.result.factor
        return precision * factor if factor.ndim == 1 else factor.T @ precision @ factor

    def accept(self, new: Gaussian | None, rho: float, move: float | None = None) -> bool:
        """Move to the proposal, `move` nats away, if F is not lower there."""
        if new is None:
            return False
        move = divergence(self.result.q, new) if move is None else move
        if not math.isfinite(move):
            return False
        factor = new.factor
        value, total = self.problem.evaluate(new, factor)
        if not value >= self.result.objective - self.noise():
            self.result.passes += 1
            return False
        self.move_to(new, factor, value, total)
        self.record(rho, move)
        return True

    def noise(self) -> float:
        """The rounding error of F, and the steps of a rough formula: below it F cannot tell better from worse."""
        per_row = 1e-15 * (abs(self.result.objective) + 1.0) + (0.0 if self.problem.refine else ROUGH_NOISE)
        return per_row * self.problem.source.rows**0.5 * self.problem.scale

    def record(self, rho: float, move: float) -> None:
        problem, value = self.problem, self.result.objective
        self.result.history.append(
            Iteration(problem.source.rows, not problem.refine, value, rho, move, time.perf_counter() - self.began)
        )
        if self.report is not None:
            self.report(self.result.history[-1])

    def enough(self, tol: float) -> float:
        """A rough stage also ends where the step that the last stage takes in any case leads on unseen."""
        return tol if self.problem.refine else max(tol, 0.5 * UNSEEN * abs(self.result.objective))

    def give_up(self) -> None:
        """No step goes uphill: at the top, as far as rounding lets one see, or stuck."""
        full = self.step(1.0)
        self.result.converged = full is not None and divergence(self.result.q, full) < SMALL_MOVE
        self.result.status = "converged to rounding" if self.result.converged else "no step improves the objective"

    def finish(self, new: Gaussian, move: float, tol: float) -> bool:
        """Take the last step; unseen if it changes F by next to nothing, else see that no further one is due."""
        self.result.converged, self.result.status, self.result.move = True, "converged", move
        if not self.problem.refine or move < UNSEEN * (abs(self.result.objective) + 1.0):
            self.result.q, self.result.factor = new, new.factor
            self.result.objective += move  # to first order, a natural-gradient step gains what it moves
            return True
        if not self.accept(new, 1.0):
            return True  # already as high as arithmetic can see
        check = self.step(1.0)
        self.result.converged = check is not None and divergence(new, check) < 10.0 * tol
        return self.result.converged


UNSEEN = 1e-11  # relative to F: the gain of the last step, which is foreseen and not computed
MEMORY = 6  # proposals that Anderson's step mixes
SMALL_MOVE = 1e-6  # nats: no harm is done if rounding hides whether such a step is uphill
LONGEST_EXTRAPOLATION = 20.0  # sum of its weights
ROUGH_NOISE = 1e-9  # per √row: from products in float32, and where the rough formulas meet


def exact_elbo(problem: Problem, result: Result) -> tuple[float, float, float]:
    """The exact ELBO at the q found, a certified lower bound of it (docs/certificate.md), and KL(q ‖ p)."""
    kl = kl_to_prior(result.q, result.factor, problem.prior)
    value, magnitude = result.objective, result.magnitude
    if problem.moments is not limit().moments or math.isnan(magnitude):
        value, total = problem.evaluate(result.q, result.factor, limit().moments, gram=False)
        magnitude = total.magnitude
    return value, value - certificate_of_sum(magnitude, kl) - UNSEEN * (abs(value) + 1.0), kl


def certificate_of_sum(magnitude: float, kl: float) -> float:
    """What `certificate` allows for each row, summed, doubled for the summation; and as much for KL."""
    eps = torch.finfo(torch.float64).eps
    return 256 * eps * (magnitude + abs(kl)) + 4e-15 * magnitude
