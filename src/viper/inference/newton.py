"""The solver: natural-gradient steps to the optimum of F, for logistic regression and Gaussian processes alike.

F is checked after every step of steps.py, and a step is halved until F does not decrease. Near the optimum, Anderson's
mixture of the last steps is tried first. Fits with many rows start on random subsets (start.py), and all but the last
pass may use a cheaper formula. Where steps stay short, as with outliers under a wide prior, climb.py takes over.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.inference.anderson import LEAST_PROBED, Mixing, Step, whitened
from viper.inference.climb import CLOSE, LARGEST_CLIMB, climb
from viper.inference.problem import LARGEST_MIXED, LARGEST_SOLVED, Gaussian, Problem, divergence, most_left
from viper.inference.start import beginning, from_tighter_priors, near_mean_field
from viper.inference.steps import diagonal_step, full_step, gradient
from viper.inference.sums import Sums
from viper.inference.wide.mean_field import MOST_CLIMBED, MOST_READINGS, MeanField, climb_mean_field
from viper.softplus.limit import limit

SHORTEST_STEP = 1e-10
SMALL_MOVE = 1e-6  # nats: for a step this small, it is harmless if rounding hides whether F increases
ROUNDING_OF_F = 1e-15  # relative to the sum of the absolute values of its terms
PREDICTED_ERROR = 1e-10  # relative to F: error of a gain that is predicted rather than computed
EXPECTED_SHARE = 0.05  # share of the residual that the next step's mixture is expected to leave
LOCAL = 1.0  # nats: shorter moves belong to the last phase, where convergence is linear
FIRST_STEPS = 10  # most fits need fewer; one that still moves far after so many has a long way to go
FAR = 0.03  # nats: after a move this long, many more will follow
MANY_STEPS, TOO_MANY_STEPS = 25, 60  # a fit that still moves far after the first, or at all after the second, is slow
LARGEST_ROUNDING = 1e-5  # nats: rounding of F below which a fit that it ends counts as converged
OUTGROWN = "log-odds grew beyond a hundred million, where rounding hides what a step gains"
NEAR = 0.1  # allowed distance to the optimum under a tighter prior, in nats


class Iteration(NamedTuple):
    """An accepted step: rows, whether rough formulas were used, F, step length ρ, KL moved in nats, seconds so far."""

    rows: int
    rough: bool
    objective: float
    step: float
    move: float
    seconds: float


@dataclass
class Result:
    """Where the solver stopped: q and the objective there, with the history of its steps."""

    q: Gaussian
    factor: Tensor
    objective: float
    converged: bool
    status: str
    history: list[Iteration] = field(default_factory=list)
    passes: float = 0.0
    magnitude: float = math.nan  # Σ c (|ϑ| + τ + 1) at q
    predicted_gain: float = 0.0  # gain of the last step, if predicted rather than computed

    @property
    def iterations(self) -> int:
        return len(self.history)


def newton(
    problem: Problem,
    q: Gaussian | None = None,
    *,
    tol: float | None = None,
    max_iter: int = 200,
    report: Callable[[Iteration], None] | None = None,
    generator: np.random.Generator | None = None,
) -> Result:
    """Maximise F from `q` (default: from `beginning`) until less than `tol` nats (default: `most_left`) are left.

    With `problem.rough` a rough stage comes first. It only chooses the start of the exact stage, often a single pass.
    """
    began = time.perf_counter()
    history: list[Iteration] = []
    passes, near = 0.0, False
    generator = generator or np.random.default_rng(0)
    if problem.iterative:
        result = newton_by_products(problem, q, tol, max_iter, generator, report)
        ended = result.converged or result.status == OUTGROWN or len(result.history) >= max_iter
        if ended or problem.source.dimension > LARGEST_SOLVED:
            return result
        problem, q, history, passes = replace(problem, iterative=False), result.q, result.history, result.passes
    elif q is None:
        q, passes, near, *_ = beginning(problem, generator, told(problem, report, began))
    exact_only = problem.rough is None or near
    stages = [problem] if exact_only else [replace(problem, refine=False), problem]
    mixing = Mixing()
    for stage in stages:
        result = iterate(Stage(stage, mixing, tol, began, report), q, max_iter)
        if not stage.refine and not math.isfinite(result.objective):
            mixing.forget()
            continue  # the rough formula failed; the last stage starts where this one did
        history += result.history
        passes += result.passes
        q = result.q
    return replace(result, history=history, passes=passes)


def newton_by_products(
    problem: Problem,
    q: Gaussian | None,
    tol: float | None,
    max_iter: int,
    generator: np.random.Generator,
    report: Callable[[Iteration], None] | None,
) -> Result:
    """Maximise F over the mean field without d × d matrices: on more and more rows, then roughly and exactly on all."""
    began = time.perf_counter()
    history: list[Iteration] = []

    def record(stage: Problem, value: float, rho: float, move: float) -> None:
        history.append(Iteration(stage.source.rows, not stage.refine, value, rho, move, time.perf_counter() - began))
        if report is not None:
            report(history[-1])

    def climbed(stage: Problem, q: Gaussian, **limits: Any) -> MeanField:
        steps = min(max(max_iter - len(history), 0), MOST_CLIMBED)
        return climb_mean_field(stage, q, partial(record, stage), steps=steps, **limits)

    rough = near_mean_field(problem, q, generator, climbed)
    found = climbed(problem, rough.q, close=tol, flattest=rough.flattest)
    passes = rough.passes + found.passes
    result = Result(found.q, found.q.factor, found.value, found.close, "converged", history, passes, found.magnitude)
    result.predicted_gain = found.predicted
    if not found.close:
        given_up = len(history) >= max_iter or found.passes > MOST_READINGS
        result.converged = not given_up and found.left < least_move(found.magnitude)
        status = f"not converged in {len(history)} iterations" if given_up else ended_at(result.converged)
        result.status = OUTGROWN if found.outgrown else status
    return result


def least_move(magnitude: float) -> float:
    """Return the nats below which a move may fail to increase F because of rounding alone."""
    return max(SMALL_MOVE, min(ROUNDING_OF_F * magnitude, LARGEST_ROUNDING))


def ended_at(converged: bool) -> str:
    """The status if no step increases F: q is the optimum up to rounding, or the solver is stuck."""
    return "converged to rounding" if converged else "no step improves the objective"


def told(problem: Problem, report: Callable[[Iteration], None] | None, began: float) -> Callable[..., None]:
    """Return a function that reports F after a step of a climb, which is not part of the history."""

    def tell(value: float, *_: float) -> None:
        if report is not None:
            seconds = time.perf_counter() - began
            report(Iteration(problem.source.rows, not problem.refine, value, 1.0, math.nan, seconds))

    return tell


def iterate(run: "Stage", q: Gaussian, max_iter: int) -> Result:
    """Damped natural-gradient steps on one source, up to and including the last."""
    problem, mixing = run.problem, run.mixing
    run.move_to(q, q.factor, *problem.evaluate(q, q.factor))
    rho = 1.0
    for count in range(max_iter):
        if count >= FIRST_STEPS and run.far() and problem.outgrown(run.total.magnitude):
            run.result.status = OUTGROWN
            return run.result
        if count == FIRST_STEPS and run.far():
            run.approach()
            rho = 1.0
        if (count == MANY_STEPS and run.far()) or count == TOO_MANY_STEPS:
            run.climb()
            rho = 1.0
        proposal = run.step(rho)
        step, move = run.towards(proposal, rho)
        if step is not None and run.nearly_there(move, step.share):
            if run.finish(step, move):
                return run.result
            mixing.forget()
            continue
        if step is not None and step.share < 1.0 and run.accept(step.q, rho, move):
            mixing.taken(move, step.share)
            rho = min(1.0, 2.0 * rho)
            continue
        move = move if rho == 1.0 else run.distance(proposal)
        while not run.accept(proposal, rho, move):
            if not problem.refine and move < LOCAL:
                return run.result  # so near the optimum, a rough formula cannot tell better from worse
            rho *= 0.5
            if rho < SHORTEST_STEP or move < min(SMALL_MOVE, ROUNDING_OF_F * run.total.magnitude):
                run.give_up()
                if run.result.converged or not run.climb():
                    return run.result
                rho = 1.0
            proposal = run.step(rho)
            move = run.distance(proposal)
        mixing.taken(move / rho, 1.0)
        rho = min(1.0, 2.0 * rho)
    run.result.status = f"not converged in {max_iter} iterations"
    return run.result


def nearly_solved(problem: Problem, q: Gaussian) -> tuple[Gaussian, float]:
    """Return q within NEAR nats of the optimum, or after a few steps, and the number of passes."""
    stage = Stage(problem, Mixing(), NEAR, 0.0, None)
    stage.climbed = True  # not worth it here
    result = iterate(stage, q, FIRST_STEPS)
    return result.q, result.passes


class Stage:
    """The state of `iterate`: the current q, the sums there, and the history."""

    def __init__(
        self,
        problem: Problem,
        mixing: Mixing,
        tol: float | None,
        began: float,
        report: Callable[[Iteration], None] | None,
    ) -> None:
        self.problem, self.mixing, self.tol, self.began, self.report = problem, mixing, tol, began, report
        self.slowest = min(0.5, 2.0 * problem.source.dimension / (problem.source.rows * problem.scale))
        self.total: Sums
        self.climbed = problem.source.dimension > LARGEST_CLIMB and not problem.diagonal

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

    def distance(self, new: Gaussian | None) -> float:
        """Return the distance to a proposal, in nats."""
        return math.inf if new is None else divergence(self.result.q, new)

    def towards(self, new: Gaussian | None, rho: float) -> tuple[Step | None, float]:
        """Return the step to try first, or None, and the distance to the proposal. Near the optimum the step is mixed.

        A damped step is returned only if it is mixed.
        """
        mixed = self.problem.diagonal or self.problem.source.dimension <= LARGEST_MIXED
        whole = self.step(1.0) if rho < 1.0 and mixed else new
        if whole is not None and mixed:
            residual = whitened(self.result.q, whole)
            move = 0.5 * float(residual @ residual)
            if 0.0 < move <= LOCAL:
                step = self.mixing.step(self.result.q, whole, residual, rho)
                return (step, move) if rho == 1.0 or step.share < 1.0 else (None, self.distance(new))
        self.mixing.past.clear()
        return (Step(new) if rho == 1.0 and new is not None else None), self.distance(new)

    def accept(self, new: Gaussian | None, rho: float, move: float) -> bool:
        """Move to the proposal, `move` nats away, unless F is lower there. Return whether it moved."""
        if new is None or not math.isfinite(move):
            return False
        factor = new.factor
        value, total = self.problem.evaluate(new, factor)
        noise = self.problem.noise(self.result.objective)
        if not self.result.objective - noise <= value <= noise:  # F cannot be positive
            self.result.passes += 1
            return False
        self.move_to(new, factor, value, total)
        self.record(rho, move)
        return True

    def higher(self, value: float) -> bool:
        """Return whether F is higher than here and, as it must be, not positive."""
        return self.result.objective < value <= self.problem.noise(value)

    def record(self, rho: float, move: float) -> None:
        self.result.history.append(self.iteration(self.result.objective, rho, move))
        if self.report is not None:
            self.report(self.result.history[-1])

    def iteration(self, value: float, rho: float, move: float) -> Iteration:
        seconds = time.perf_counter() - self.began
        return Iteration(self.problem.source.rows, not self.problem.refine, value, rho, move, seconds)

    def enough(self) -> float:
        """Return how many nats may remain."""
        return most_left(self.result.objective) if self.tol is None else self.tol

    def nearly_there(self, move: float, share: float) -> bool:
        """Return whether this step is the last, if moves keep shrinking at their rate and distances add up like √move.

        A rough stage stops one step early; the exact stage takes that step with a better mixture.
        """
        rate = self.mixing.rate(move, self.slowest)
        if not rate < 1.0:
            return move < 0.1 * self.enough()  # rounding dominates here
        left = move * rate * share / (1.0 - math.sqrt(rate * share)) ** 2
        if self.problem.refine:
            return left < self.enough()
        after = rate * EXPECTED_SHARE
        return left * after < self.enough() and self.predictable(left, after)

    def predictable(self, gain: float, rate: float) -> bool:
        """Return whether a step's gain can be predicted: F is nearly quadratic, and √rate of the way remains."""
        return gain * math.sqrt(rate) < PREDICTED_ERROR * (abs(self.result.objective) + 1.0)

    def far(self) -> bool:
        """Return whether the last step was so long that many more will follow."""
        return bool(self.result.history) and self.result.history[-1].move > FAR

    def approach(self) -> None:
        """Move to the point that tighter priors lead to, if F is higher there."""
        q, passes = from_tighter_priors(self.problem, nearly_solved)
        self.result.passes += passes
        if q is None:
            return
        value, total = self.problem.evaluate(q, q.factor)
        if self.higher(value):
            self.mixing.forget()
            self.move_to(q, q.factor, value, total)

    def climb(self) -> bool:
        """Move to the maximum that L-BFGS finds from here, or for the mean field Newton's method with products.

        Tried only once. Return whether F is higher there.
        """
        if self.climbed:
            return False
        self.climbed = True
        problem, tell = self.problem, told(self.problem, self.report, self.began)
        if problem.diagonal:
            found: Any = climb_mean_field(replace(problem, iterative=True), self.result.q, tell, close=CLOSE)
        else:
            found = climb(problem, self.result.q, tell)
        self.result.passes += found.passes
        q = found.q
        value, total = problem.evaluate(q, q.factor)
        if not self.higher(value):
            return False
        self.mixing.forget()
        self.move_to(q, q.factor, value, total)
        return True

    def give_up(self) -> None:
        """Stop because no step increases F."""
        full, least = self.step(1.0), least_move(self.result.magnitude)
        self.result.converged = full is not None and divergence(self.result.q, full) < least
        self.result.status = ended_at(self.result.converged)

    def gain(self, new: Gaussian) -> float:
        """Return F(new) - F to second order for a step to the optimum: half of the gradient's linear prediction."""
        q = self.result.q
        if q.cholesky is not None and len(q.mean) >= LEAST_PROBED:
            from_precision = 0.5 * float(whitened(q, replace(new, mean=q.mean)).square().sum())
        else:
            from_precision = divergence(q, Gaussian(q.mean, new.precision, new.cholesky))
        return from_precision + 0.5 * float((new.mean - q.mean) @ gradient(self.problem, q, self.total))

    def finish(self, step: Step, move: float) -> bool:
        """Take the last step and return whether it was the last. F is computed only if the gain is not predictable."""
        self.result.converged, self.result.status = True, "converged"
        rate = min(1.0, self.mixing.rate(move, self.slowest) * step.share)
        if not self.problem.refine or self.predictable(move, rate):
            gain = self.gain(step.q)
            self.result.predicted_gain = gain
            self.result.q, self.result.factor = step.q, step.q.factor
            self.result.objective += gain
            self.mixing.taken(move, step.share)
            return True
        if not self.accept(step.q, 1.0, move):
            return step.share == 1.0  # a plain step is at the top up to rounding; a mixture may have overshot
        check = self.step(1.0)
        self.result.converged = check is not None and divergence(step.q, check) < 10.0 * self.enough()
        return self.result.converged


def exact_elbo(problem: Problem, result: Result) -> tuple[float, float, float]:
    """Return the exact ELBO at the solver's q, a certified lower bound on it (docs/certificate.md), and KL(q ‖ p)."""
    kl = problem.kl(result.q, result.factor)
    value, magnitude = result.objective, result.magnitude
    if problem.bound is not limit() or math.isnan(magnitude):
        value, magnitude = problem.measure(result.q, result.factor, limit())
    return value, value - elbo_certificate(magnitude, kl) - 2.0 * abs(result.predicted_gain), kl


def elbo_certificate(magnitude: float, kl: float) -> float:
    """Sum `certificate` over rows, double it for the rounding of the summation, and add an allowance for KL."""
    eps = torch.finfo(torch.float64).eps
    return 256 * eps * (magnitude + abs(kl)) + 4e-15 * magnitude
