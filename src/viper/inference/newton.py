"""The solver: natural-gradient steps until none is left to take, for logistic regression and Gaussian processes alike.

F is checked after every step of steps.py and the step halved until F does not decrease. Near the optimum, Anderson's
mixture of the last steps is tried first. Many rows are approached through a random few, and all but the last pass may
use a cheaper formula.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.inference.anderson import Mixing, Step, whitened
from viper.inference.problem import (
    LARGEST_DIRECT,
    Gaussian,
    Prior,
    Problem,
    divergence,
    kl_to_prior,
    prior_factor,
    widened,
)
from viper.inference.start import beginning
from viper.inference.steps import diagonal_step, full_step, gradient, opening
from viper.inference.sums import Sums, row_spread
from viper.softplus.limit import limit


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
    unseen: float = 0.0  # what the last step gained, if that was foreseen and not computed

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
    """Maximise F from `q` (default: as `beginning` finds it) until less than `tol` nats are left, or `Stage.enough`.

    With `problem.rough` a rough stage comes first, which only chooses where the last begins; that is often one pass.
    """
    began = time.perf_counter()
    history: list[Iteration] = []
    passes = 0.0
    if q is None:
        q, passes = beginning(problem, generator or np.random.default_rng(0))
    stages = [problem] if problem.rough is None else [replace(problem, refine=False), problem]
    mixing = Mixing()
    for stage in stages:
        result = iterate(Stage(stage, mixing, tol, began, report), q, max_iter)
        if not stage.refine and not math.isfinite(result.objective):
            mixing.forget()
            continue  # the rough formula was not enough; the last stage needs none of this
        history += result.history
        passes += result.passes
        q = result.q
    return replace(result, history=history, passes=passes)


def iterate(run: "Stage", q: Gaussian, max_iter: int) -> Result:
    """Damped natural-gradient steps on one source, until the next one is the last."""
    problem, mixing = run.problem, run.mixing
    run.move_to(q, q.factor, *problem.evaluate(q, q.factor))
    rho = 1.0
    for count in range(max_iter):
        if count == PATIENCE and run.far():
            run.approach()
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
                return run.result  # a rough formula cannot tell better from worse so near the optimum
            rho *= 0.5
            if rho < SHORTEST_STEP or move < min(SMALL_MOVE, ROUNDING * run.total.magnitude):
                run.give_up()
                return run.result
            proposal = run.step(rho)
            move = run.distance(proposal)
        mixing.taken(move / rho, 1.0)
        rho = min(1.0, 2.0 * rho)
    run.result.status = f"not converged in {max_iter} iterations"
    return run.result


def from_narrow_priors(problem: Problem) -> tuple[Gaussian | None, float]:
    """A q near the optimum under a very wide prior, or None if it is not so wide; and the passes that took.

    Where the data do not stop them, ϑ and τ grow with the prior's width, by a factor at each step from the mode. But q
    relative to the prior hardly changes with that width: what is best for a narrow one, widened likewise, is near the
    best for one ten times as wide, and so on.
    """
    prior = problem.prior
    spread, count = problem.source.reduce(partial(row_spread, factor=prior_factor(prior)))
    width = math.sqrt(float(spread / count))
    q, passes = None, 1.0
    for k in range(math.ceil(math.log10(width)) - 1 if width > WIDE else 0, 0, -1):
        narrow = replace(problem, prior=Prior(prior.mean / 10.0**k, prior.precision * 100.0**k))
        result = iterate(Stage(narrow, Mixing(), NEAR, 0.0, None), q or opening(narrow), PATIENCE)
        q = widened(result.q, 10.0)
        passes += result.passes
    return q, passes


SHORTEST_STEP = 1e-10
WIDE = 100.0  # log-odds, of the prior's standard deviation
NEAR, FAR = 0.1, 0.03  # nats that may be left under a narrower prior; a move that many more will follow
LOCAL = 1.0  # nats: moves below this are of the last, linear phase
PATIENCE = 10  # steps; most fits are through after fewer, and a fit that still makes long ones has far to go


class Stage:
    """The state of `iterate`: where it is, the sums there, and the record."""

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
        """How far a proposal is, in nats."""
        return math.inf if new is None else divergence(self.result.q, new)

    def towards(self, new: Gaussian | None, rho: float) -> tuple[Step | None, float]:
        """The step to try first, near the optimum mixed with those before it; and how far the proposal is.

        A damped step is tried only if it is mixed.
        """
        direct = self.problem.source.dimension <= LARGEST_DIRECT
        whole = self.step(1.0) if rho < 1.0 and direct else new
        if whole is not None and direct:
            residual = whitened(self.result.q, whole)
            move = 0.5 * float(residual @ residual)
            if 0.0 < move <= LOCAL:
                step = self.mixing.step(self.result.q, whole, residual, rho)
                return (step, move) if rho == 1.0 or step.share < 1.0 else (None, self.distance(new))
        self.mixing.past.clear()
        return (Step(new) if rho == 1.0 and new is not None else None), self.distance(new)

    def accept(self, new: Gaussian | None, rho: float, move: float) -> bool:
        """Move to the proposal, `move` nats away, if F is not lower there."""
        if new is None or not math.isfinite(move):
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

    def enough(self) -> float:
        """How many nats may be left: by default so few that the gradient is a millionth of what it was at first."""
        return self.tol if self.tol is not None else min(MOST_LEFT, SHARE_LEFT * (abs(self.result.objective) + 1.0))

    def nearly_there(self, move: float, share: float) -> bool:
        """Whether this step is the last. Moves go on shrinking at their rate ρ, and distances add up like √move.

        The last step of a rough stage leaves one to the stage after it, which is mixed better still.
        """
        rate = self.mixing.rate(move, self.slowest)
        if not rate < 1.0:
            return move < 0.1 * self.enough()  # where rounding decides
        left = move * rate * share / (1.0 - math.sqrt(rate * share)) ** 2
        if self.problem.refine:
            return left < self.enough()
        after = rate * EXPECTED_SHARE
        return left * after < self.enough() and self.foreseen(left, after)

    def foreseen(self, gain: float, rate: float) -> bool:
        """Whether what a step gains is known well enough without a look: F is quadratic, and √ρ of the way is left."""
        return gain * math.sqrt(rate) < UNSEEN * (abs(self.result.objective) + 1.0)

    def far(self) -> bool:
        """Whether the last step was so long that many more will follow."""
        return bool(self.result.history) and self.result.history[-1].move > FAR

    def approach(self) -> None:
        """Go to where narrower priors lead, if F is higher there."""
        q, passes = from_narrow_priors(self.problem)
        self.result.passes += passes
        if q is None:
            return
        value, total = self.problem.evaluate(q, q.factor)
        if value > self.result.objective:
            self.mixing.forget()
            self.move_to(q, q.factor, value, total)

    def give_up(self) -> None:
        """No step goes uphill: at the top, as far as rounding lets one see, or stuck."""
        full = self.step(1.0)
        self.result.converged = full is not None and divergence(self.result.q, full) < SMALL_MOVE
        self.result.status = "converged to rounding" if self.result.converged else "no step improves the objective"

    def gain(self, new: Gaussian) -> float:
        """F(new) - F, to second order, for a step to the top: half of what the gradient promises."""
        q = self.result.q
        widened = divergence(q, replace(new, mean=q.mean))
        return widened + 0.5 * float((new.mean - q.mean) @ gradient(self.problem, q, self.total))

    def finish(self, step: Step, move: float) -> bool:
        """Take the last step; unseen if what it gains is foreseen, else see that no further one is due."""
        self.result.converged, self.result.status = True, "converged"
        rate = min(1.0, self.mixing.rate(move, self.slowest) * step.share)
        if not self.problem.refine or self.foreseen(move, rate):
            gain = self.gain(step.q)
            self.result.unseen = gain
            self.result.q, self.result.factor = step.q, step.q.factor
            self.result.objective += gain
            self.mixing.taken(move, step.share)
            return True
        if not self.accept(step.q, 1.0, move):
            return step.share == 1.0  # already as high as arithmetic can see, or a mixture that went astray
        check = self.step(1.0)
        self.result.converged = check is not None and divergence(step.q, check) < 10.0 * self.enough()
        return self.result.converged


MOST_LEFT, SHARE_LEFT = 3e-9, 1e-12  # nats, and relative to F
ROUNDING = 1e-15  # of F, relative to the sum of the sizes of its terms
UNSEEN = 1e-10  # relative to F: the error of a gain that is foreseen and not computed
EXPECTED_SHARE = 0.05  # that mixing will leave in the step after this one
SMALL_MOVE = 1e-6  # nats: no harm is done if rounding hides whether such a step is uphill
ROUGH_NOISE = 1e-9  # per √row: from where the rough formulas meet


def exact_elbo(problem: Problem, result: Result) -> tuple[float, float, float]:
    """The exact ELBO at the q found, a certified lower bound of it (docs/certificate.md), and KL(q ‖ p)."""
    kl = kl_to_prior(result.q, result.factor, problem.prior)
    value, magnitude = result.objective, result.magnitude
    if problem.bound is not limit() or math.isnan(magnitude):
        value, total = problem.evaluate(result.q, result.factor, limit(), gram=False)
        magnitude = total.magnitude
    return value, value - certificate_of_sum(magnitude, kl) - 2.0 * abs(result.unseen), kl


def certificate_of_sum(magnitude: float, kl: float) -> float:
    """What `certificate` allows for each row, summed, doubled for the summation; and as much for KL."""
    eps = torch.finfo(torch.float64).eps
    return 256 * eps * (magnitude + abs(kl)) + 4e-15 * magnitude
