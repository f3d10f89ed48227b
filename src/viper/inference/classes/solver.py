"""The solver of K classes: Newton steps for the means by conjugate gradients, a fixed point for the precisions.

It starts at the mode, whose passes need no integrals. With many rows, this is the mode of a sample; otherwise it is the
mode of all rows, followed by the optimum with one precision for all classes, whose passes need only one matrix. Then
each pass proposes P from the curvatures (star.py), and μ by a Newton step with the Hessian s (diag g - g gᵀ) of each
row. Anderson's mixture of the last proposals is tried first; a step is halved until F does not decrease. All but the
last passes use rough integrals.
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

from viper.errors import NotFinite
from viper.inference.classes.ascent import climb_star
from viper.inference.classes.problem import ClassProblem, Evaluated
from viper.inference.classes.star import ChangeMixing, Star, centred_classes, star_divergence, star_from
from viper.inference.classes.sums import (
    COARSE_CLASSES,
    EXACT_CLASSES,
    ROUGH_CLASSES,
    Integral,
    RowHessian,
    softmax_classes,
)
from viper.inference.newton import Iteration

NATS_LEFT = 1e-8  # allowed distance to the optimum, in nats
NATS_LEFT_DIAGONAL = 1e-14  # likewise in the diagonal family, whose steps are cheap
GAIN_ROUNDING = 1e-15  # nats per coefficient: rounding error of the gain of a step
COARSE_LEFT, ROUGH_LEFT = 1e-2, 1e-6  # nats at which the stages with coarse and rough integrals end
DIRECT_LEFT = 1e-5  # nats: if coarse integrals leave no more, the rough stage is skipped
SHARED_LEFT = 3.0  # nats at which the stage with a shared precision ends
MODE_LEFT = 1.0  # nats at which the search for the mode ends
SAMPLE_LEFT = 5.0  # likewise on a sample, times the rows that each of its rows stands for
MODE_PASSES = 200
MOST_MEAN_STEPS, MEAN_SHARES = 6, (1.0, 0.5, 0.25, 0.125)  # steps for given precisions, and the shares of one to try
MEANS_LEFT = 0.01  # share of the last move, in nats, at which the search for the best means ends
FORCING, MODE_FORCING = 0.05, 0.2  # conjugate gradients end at this share of the gradient, in the metric of the star
MOST_PRODUCTS = 200
REMEMBERED = 15  # proposals in a mixture
MIXED_BELOW = 30.0  # nats: proposals are mixed once moves are shorter than this
LEAST_STEP = 1e-8
MOST_STEPS, MOST_CLIMBS = 25, 6  # steps in a stage before L-BFGS takes over, and how often that is restarted
HEAVY = 10.0  # mean weight of a row above which all integrals are exact
SHORT_STEP, MOST_SHORT = 1e-2, 5  # L-BFGS takes over after so many steps shorter than this share
LEAST_RATE = 0.05  # smaller rates of convergence are not trusted
LAST_MOVES = 1e3  # longest last move, relative to the nats that may be left
GROWTH = 1.5  # factor by which the share of a step grows after a success
FIRST_RATE = 0.5  # assumed ratio of successive moves, before two have been made
SLOWEST_SHARE = 0.03  # smaller shares of a residual are not trusted, because the map is not linear
ROWS_PER_COEFFICIENT = 20  # rows of a sample per coefficient of all classes
FEWEST_SAVED = 4  # a sample is used if there are at least so many times as many rows


@dataclass
class StarResult:
    """Where the solver stopped: q and the objective there, with the history of its steps."""

    q: Star
    objective: float
    converged: bool
    status: str
    history: list[Iteration] = field(default_factory=list)
    passes: float = 0.0
    magnitude: float = math.nan  # Σ c (1 + max|ϑ| + max τ) at q
    weight: float = math.nan  # Σ c
    predicted_gain: float = 0.0  # gain of the last step, if predicted rather than computed

    @property
    def iterations(self) -> int:
        return len(self.history)


def fit_star(
    problem: ClassProblem,
    q: Star | None = None,
    *,
    tol: float | None = None,
    max_iter: int = 200,
    report: Callable[[Iteration], None] | None = None,
    generator: np.random.Generator | None = None,
) -> StarResult:
    """Maximise F from `q` (default: from the mode) until less than `tol` nats (default: 3e-9, or less) are left."""
    generator = generator or np.random.default_rng(0)
    light = problem.in_float32()
    try:
        return StarRun(problem, tol, max_iter, report, light).fit(q, generator)
    except NotFinite:
        if light is problem:
            raise
        return StarRun(problem, tol, max_iter, report).fit(q, generator)


STAGES: tuple[tuple[Integral, float | None], ...] = (
    (COARSE_CLASSES, COARSE_LEFT),
    (ROUGH_CLASSES, ROUGH_LEFT),
    (EXACT_CLASSES, None),
)


# --- Newton steps ---


def newton_step(
    problem: ClassProblem, hessians: list[RowHessian], gradient: Tensor, metric: Star, share: float
) -> Tensor:
    """Solve (Aᵀ H A + D⁻¹) x = g by conjugate gradients, preconditioned by the star's covariance.

    If that takes more products than a matrix costs, as it may in the diagonal family, the matrix replaces the star as
    the preconditioner.
    """
    times, most = partial(problem.hessian_times, hessians), problem.products_before_matrix
    x, left = solve_by_products(times, gradient, gradient, metric, share, most or MOST_PRODUCTS)
    if most is not None and left is not None:
        finer = problem.shared_metric(hessians) or metric
        x = x + solve_by_products(times, left, gradient, finer, share, MOST_PRODUCTS)[0]
    return centred_classes(x)


def solve_by_products(
    times: Callable[[Tensor], Tensor], residual: Tensor, gradient: Tensor, metric: Star, share: float, most: int
) -> tuple[Tensor, Tensor | None]:
    """Solve for `residual`, up to `share` of the gradient; also return the rest if `most` products do not suffice."""
    x, z = torch.zeros_like(residual), metric.solve(residual)
    direction, size = z, float((residual * z).sum())
    enough = share * share * float((gradient * metric.solve(gradient)).sum())
    for _ in range(most):
        if not size > enough:
            break
        product = times(direction)
        alpha = size / float((direction * product).sum())
        x, residual = x + alpha * direction, residual - alpha * product
        z = metric.solve(residual)
        size, before = float((residual * z).sum()), size
        direction = z + (size / before) * direction
    return x, residual if size > enough else None


class ModeFound(NamedTuple):
    """The mode with Laplace's precision there, shared by all classes, and the passes made."""

    q: Star
    passes: float
    weight: float  # Σ c


def find_class_mode(problem: ClassProblem, mean: Tensor, enough: float) -> ModeFound:
    """Newton steps from `mean`, up to and including the first that gains less than `enough` nats."""
    at, passes = problem.log_joint(mean, gram=True), 1.0
    precision = at.sums.gram
    while True:
        if not math.isfinite(at.objective):
            raise NotFinite
        metric = star_from(mean, problem.precisions(precision, precision))
        if metric is None:
            raise NotFinite
        gradient = problem.gradient(mean, at.sums)
        hessians = at.hessians or problem.hessians(mean, None, softmax_classes)
        step, rho = newton_step(problem, hessians, gradient, metric, MODE_FORCING), 1.0
        last = 0.5 * float((step * gradient).sum()) < enough or passes > MODE_PASSES
        new = problem.log_joint(mean + step, gram=True)
        passes += 1.0
        while not new.objective >= at.objective and rho > LEAST_STEP:
            rho, passes = 0.5 * rho, passes + 1.0
            new = problem.log_joint(mean + rho * step, gram=True)
        mean, at, precision = mean + rho * step, new, new.sums.gram
        if last:
            return ModeFound(Star(mean, problem.precisions(precision, precision)), passes, at.sums.weight)


def with_best_means(problem: ClassProblem, q: Star, moments: Integral, enough: float) -> tuple[Star, Evaluated]:
    """The star with the precisions of q and the best means for them, and F there.

    The variances τ² of the rows do not change, so Newton steps need no products with matrices as large as P.
    """
    given, mean = problem.given_variances(q), q.mean
    at = given.log_joint(mean, False, moments)
    for _ in range(MOST_MEAN_STEPS):
        gradient = given.gradient(mean, at.sums)
        step = newton_step(given, at.hessians or [], gradient, q, FORCING)
        if not 0.5 * float((step * gradient).sum()) > enough:
            break
        for rho in MEAN_SHARES:
            new = given.log_joint(mean + rho * step, False, moments)
            if new.objective > at.objective:
                mean, at = mean + rho * step, new
                break
        else:
            break
    q = q.with_mean(mean)
    sums, hessians = given.total(mean, None, moments, "full", len(q.precision) == 1)
    return q, Evaluated(sums.value - star_divergence(q, problem.contrasts), sums, hessians)


# --- towards the optimum ---


class Proposal(NamedTuple):
    """Where a step leads, its residual in the metric of where it starts, and how many nats it should gain."""

    mean: Tensor
    precision: Tensor
    residual: Tensor
    move: float


class StarRun:
    """The state of one fit: the current star, past proposals, and how fast moves shrink."""

    def __init__(
        self,
        problem: ClassProblem,
        tol: float | None,
        max_iter: int,
        report: Callable[[Iteration], None] | None,
        light: ClassProblem | None = None,
    ) -> None:
        self.whole, self.light = problem, light or problem  # light: for all but exact integrals
        self.problem, self.tol, self.max_iter, self.report = self.light, tol, max_iter, report
        self.began, self.passes, self.gain = time.perf_counter(), 0.0, 0.0
        self.heavy = False  # whether rows count so often that rough integrals would hide what a step gains
        self.rho = 1.0  # share of a step that is tried first
        self.short = 0  # number of very short steps
        self.stuck = False  # whether steps gain too little, or nothing
        self.left = math.inf  # nats expected to be left after the last step
        self.history: list[Iteration] = []
        self.converged, self.status = False, "max_iter reached"
        self.q: Star
        self.at: Evaluated
        self.moments: Integral

    def fit(self, q: Star | None, generator: np.random.Generator) -> StarResult:
        """Run all stages, from q if given."""
        stages = STAGES[1:] if self.wide or q is not None else STAGES  # coarse integrals would lead away from near q
        if q is None:
            q = self.first_star(generator)
        for moments, left in stages:
            if (self.heavy and left is not None) or (moments is ROUGH_CLASSES and self.left < DIRECT_LEFT):
                continue
            self.start(q, moments)
            self.iterate(left if left is None or self.tol is None else max(left, self.tol))
            q = self.q
            if self.stuck:
                self.climb()
                break
        return self.result()

    def first_star(self, generator: np.random.Generator) -> Star:
        """The star to start from: at the mode of a sample if there are many rows, otherwise as in `from_mode`."""
        problem, rows = self.problem, self.problem.source.rows
        k = ROWS_PER_COEFFICIENT * (problem.classes - 1) * problem.source.dimension
        k = max(k, problem.source.traits.smallest_sample)
        if rows < FEWEST_SAVED * k:
            return self.from_mode()
        return self.mode_of(problem.coarsened(k, generator)).of_each_class()

    @property
    def wide(self) -> bool:
        """Whether products with P dominate, so that passes should be few and rough integrals save nothing."""
        return self.light is not self.whole

    def from_mode(self) -> Star:
        """The optimum with one precision for all classes, reached from the mode."""
        q = self.mode_of(self.problem)
        self.start(q, EXACT_CLASSES if self.heavy else ROUGH_CLASSES if self.wide else COARSE_CLASSES)
        self.iterate(SHARED_LEFT)
        return self.q.of_each_class()

    def mode_of(self, problem: ClassProblem) -> Star:
        """The mode, with Laplace's precision."""
        left = MODE_LEFT if problem is self.problem else SAMPLE_LEFT * problem.scale
        found = find_class_mode(problem, centred_classes(problem.contrasts.mean), left)
        self.passes += found.passes * problem.source.rows / self.problem.source.rows
        self.heavy = found.weight > HEAVY * self.problem.source.rows
        return found.q

    def start(self, q: Star, moments: Integral) -> None:
        """Start a stage at q, with these integrals."""
        same = hasattr(self, "q") and self.q.precision.shape == q.precision.shape
        if not same:
            self.mixing, self.last, self.share = ChangeMixing(REMEMBERED), math.inf, 1.0
        self.moments, self.rho = moments, 1.0
        self.problem = self.whole if self.exact else self.light
        self.converged, self.status = False, "max_iter reached"
        self.move_to(*self.arrive(q))

    def arrive(self, q: Star) -> tuple[Star, Evaluated]:
        """q and F there; in a wide problem, q with the best means for its precisions."""
        if not self.wide:
            return q, self.evaluate(q)
        self.passes += 1.0
        return with_best_means(self.problem, q, self.moments, MEANS_LEFT * min(self.last, 1.0))

    def evaluate(self, q: Star) -> Evaluated:
        self.passes += 1.0
        return self.problem.evaluate(q, self.moments)

    def move_to(self, q: Star, at: Evaluated) -> None:
        if not math.isfinite(at.objective):
            raise NotFinite
        self.q, self.at = q, at

    @property
    def exact(self) -> bool:
        return self.moments is EXACT_CLASSES

    def iterate(self, left: float | None) -> None:
        """Take steps until less than `left` nats are left."""
        self.stuck = False
        for _ in range(min(self.max_iter, MOST_STEPS)):
            enough = self.enough() if left is None else left
            new = self.propose()
            if new.move > MIXED_BELOW:
                self.mixing.past.clear()
            ends = self.q.mean, self.q.precision, new.mean, new.precision
            weights = self.mixing.weights(new.residual, ends)
            share = max(self.mixing.share(weights), SLOWEST_SHARE)
            if self.rho == 1.0 and self.nearly_there(new.move, share, enough):
                self.finish(new, weights, share)
                return
            if not self.step(new, weights, share):
                self.converged = new.move < max(ROUGH_LEFT, 10.0 * self.noise())
                self.status = "converged to rounding" if self.converged else "no step improves the objective"
                self.stuck = not self.converged
                return
        self.stuck = self.max_iter > MOST_STEPS

    def climb(self) -> None:
        """Climb by L-BFGS instead of steps, until a step would end the fit."""
        enough = max(self.enough(), NATS_LEFT)
        for _ in range(MOST_CLIMBS):
            self.start(self.q, EXACT_CLASSES)
            before = self.at.objective
            climb_star(self.problem, self.q, enough, self.evaluate, self.climbed)
            self.mixing, self.last, self.share = ChangeMixing(REMEMBERED), math.inf, 1.0
            new = self.propose()
            at_the_top = max(self.at.objective - before, new.move) < enough  # neither way gains more
            if at_the_top or self.nearly_there(new.move, 1.0, enough):
                self.finish(new, self.mixing.weights(new.residual, (self.q.mean, self.q.precision, *new[:2])), 1.0)
                return
        self.status = "the objective grows too slowly"

    def climbed(self, q: Star, at: Evaluated) -> None:
        gain = at.objective - self.at.objective
        self.move_to(q, at)
        self.record(1.0, gain)

    def propose(self) -> Proposal:
        """Propose the P_k of the current curvatures, and a Newton step for the means."""
        q, at = self.q, self.at
        precision = self.problem.precisions(at.sums.gram, q.precision)
        metric = star_from(q.mean, precision)
        if metric is None:
            raise NotFinite
        hessians = at.hessians or self.problem.hessians(q.mean, q.factor, self.moments)
        shift = newton_step(self.problem, hessians, self.problem.gradient(q.mean, at.sums), metric, FORCING)
        residual = star_whitened(q, shift, precision - q.precision)
        new = replace(metric, mean=q.mean + shift)
        return Proposal(new.mean, precision, residual, sum(map(abs, self.gains_at(new))))

    def gains_at(self, new: Star) -> tuple[float, float]:
        """F(new) - F(q) to second order for a step to the optimum, by the means and by the precisions.

        The first is half of the gradient's linear prediction, the second follows from the curvatures. Directions in
        which F is flat contribute nothing.
        """
        sums = self.at.sums
        target = self.problem.target(sums.gram)
        by_mean = 0.5 * float(((new.mean - self.q.mean) * self.problem.gradient(self.q.mean, sums)).sum())
        before, after = (one.expected(target) / one.copies + one.log_volume() for one in (self.q, new))
        return by_mean, 0.5 * (before - after)

    def step(self, new: Proposal, weights: list[float], share: float) -> bool:
        """Move to the mixture, or towards the proposal as far as F increases. Return whether to go on stepping."""
        if len(weights) > 1 and self.accept(self.mixed(weights, self.rho), self.rho, new.move):
            self.last, self.share = new.move, share
            self.rho = min(1.0, GROWTH * self.rho)
            return True
        rho, self.rho = self.rho, 1.0
        while rho > LEAST_STEP:
            if self.accept(self.mixed([1.0], rho), rho, new.move):
                self.last, self.share = (new.move, 1.0) if rho == 1.0 else (math.inf, 1.0)
                self.rho = min(1.0, GROWTH * rho)
                self.short += rho < SHORT_STEP
                return self.short < MOST_SHORT
            rho *= 0.5
        return False

    def mixed(self, weights: list[float], rho: float) -> Star | None:
        """The mixture of points a fraction ρ of the way from where steps started to where they lead."""
        mean, precision, new_mean, new_precision = self.mixing.mixed(weights)
        return star_from(mean.lerp(new_mean, rho), precision.lerp(new_precision, rho))

    def accept(self, q: Star | None, rho: float, move: float) -> bool:
        """Move to q unless F is lower there."""
        if q is None:
            return False
        q, at = self.arrive(q)
        if not at.objective >= self.at.objective - self.noise():
            return False
        self.move_to(q, at)
        self.record(rho, move)
        return True

    def record(self, rho: float, move: float) -> None:
        """Add the current state to the history."""
        elapsed = time.perf_counter() - self.began
        iteration = Iteration(self.problem.source.rows, not self.exact, self.at.objective, rho, move, elapsed)
        self.history.append(iteration)
        if self.report is not None:
            self.report(iteration)

    def noise(self) -> float:
        """The noise in F from rounding and rough integrals."""
        per_row = 1e-15 * (abs(self.at.objective) + 1.0) + self.moments.keywords["tolerance"]
        rows = self.problem.source.rows * self.problem.scale
        return per_row * self.at.sums.weight / rows**0.5  # √rows, times their mean weight

    def enough(self) -> float:
        if self.tol is not None:
            return self.tol
        known = GAIN_ROUNDING * self.q.mean.numel()
        return max(NATS_LEFT_DIAGONAL, known) if self.problem.diagonal else NATS_LEFT

    def nearly_there(self, move: float, share: float, enough: float) -> bool:
        """Whether this step is the last, if moves keep shrinking at their rate and distances add up like √move."""
        rate = FIRST_RATE if math.isinf(self.last) else move / max(self.last * self.share, 1e-300)
        self.left = math.inf
        if not rate < 1.0:
            return move < 0.1 * enough
        rate = max(rate, LEAST_RATE)  # one move may be short by chance
        self.left = move * rate * share / (1.0 - math.sqrt(rate * share)) ** 2
        return self.left < enough and move < LAST_MOVES * enough

    def finish(self, new: Proposal, weights: list[float], share: float) -> None:
        """Take the last step. Its gain in F is predicted."""
        q = self.mixed(weights, 1.0) or star_from(new.mean, new.precision)
        assert q is not None
        self.gain = sum(self.gains_at(q))
        self.q = q
        self.last, self.share = new.move, share
        self.converged, self.status = True, "converged"

    def result(self) -> StarResult:
        at, gain = self.at, self.gain if self.converged else 0.0
        return StarResult(
            self.q,
            at.objective + gain,
            self.converged,
            self.status,
            self.history,
            self.passes,
            at.sums.magnitude,
            at.sums.weight,
            gain,
        )


def star_whitened(q: Star, shift: Tensor, change: Tensor) -> Tensor:
    """(√½ F_kᵀ ΔP_k F_k, L_kᵀ Δμ_k) of all classes, as one vector; half its square is about the KL divergence."""
    share = math.sqrt(0.5 * q.copies)
    if q.diagonal:
        parts = share * change * q.factor, shift * q.cholesky
    else:
        parts = share * (q.factor.mT @ change @ q.factor), (q.cholesky.mT @ shift[..., None])[..., 0]
    return torch.cat([part.reshape(-1) for part in parts])
