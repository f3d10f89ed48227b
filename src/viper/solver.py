"""Natural-gradient iterations on sums over rows: one solver for logistic regression and Gaussian processes.

With the sums of problem.py at q = N(μ, Λ⁻¹), the step of length ρ in natural parameters is

    Λ_ρ = (1-ρ) Λ + ρ (S₀⁻¹ + Aᵀ diag(c h) A),      μ_ρ = μ + ρ Λ_ρ⁻¹ [Aᵀ c(y - g) - S₀⁻¹(μ - m₀)],

which for ρ = 1 is Newton's in μ. For the diagonal family Λ is replaced by its diagonal in q, not in the step for μ. F
is checked after every step and ρ halved until it does not decrease. How far a step moves q is measured by the KL
divergence between old and new q, in nats: no scale of the data enters. Many rows are approached through a random few.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.moments import Formula, limit
from viper.problem import Prior, Source, Sums, curvature_product, sums


class ConvergenceWarning(UserWarning):
    """The iteration stopped before it converged."""


class Iteration(NamedTuple):
    """One accepted step: rows used, whether roughly, objective F, step length ρ, KL moved in nats, seconds so far."""

    rows: int
    rough: bool
    objective: float
    step: float
    move: float
    seconds: float


@dataclass(frozen=True)
class Gaussian:
    """q(w) = N(μ, Λ⁻¹) as the solver holds it: `precision` is a matrix with `cholesky` Λ = LLᵀ, or a vector."""

    mean: Tensor
    precision: Tensor
    cholesky: Tensor | None = None

    @property
    def factor(self) -> Tensor:
        """F with Σ = F Fᵀ (F = L⁻ᵀ), or the vector of variances."""
        if self.cholesky is None:
            return 1.0 / self.precision
        eye = torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device)
        return torch.linalg.solve_triangular(self.cholesky, eye, upper=False).T.contiguous()

    @property
    def log_determinant(self) -> Tensor:
        """log |Λ|."""
        if self.cholesky is None:
            return self.precision.log().sum()
        return 2.0 * self.cholesky.diagonal().log().sum()


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
    curvature: Tensor | None = None  # Aᵀ diag(c h) A at q
    magnitude: float = math.nan  # Σ c (|ϑ| + τ + 1) at q
    exact: bool = False  # whether `objective` was evaluated with the problem's final formula

    @property
    def iterations(self) -> int:
        return len(self.history)


def kl_to_prior(q: Gaussian, factor: Tensor, prior: Prior) -> float:
    """KL(q ‖ p) = ½ [log|Λ| - log|S₀⁻¹| - d + tr(S₀⁻¹Σ) + (μ-m₀)ᵀ S₀⁻¹ (μ-m₀)]."""
    shift = q.mean - prior.mean
    if factor.ndim == 1:
        trace = prior.diagonal @ factor
    elif prior.precision.ndim == 1:
        trace = prior.precision @ factor.square().sum(1)
    else:
        trace = (factor * (prior.precision @ factor)).sum()
    quadratic = shift @ prior.apply(shift)
    return 0.5 * float(q.log_determinant - prior.log_determinant - len(shift) + trace + quadratic)


@dataclass(frozen=True)
class Problem:
    """What the steps need to know: rows, prior, bound, family and how products with large matrices are made."""

    source: Source
    prior: Prior
    moments: Formula
    rough: Formula | None = None  # a cheaper version of `moments`, for passes whose result is refined later
    diagonal: bool = False
    scale: float = 1.0  # rows of the whole problem per row of `source`
    final: Formula | None = None  # a dearer version of `moments`, for the last pass
    refine: bool = True  # False: this is a rough stage

    @property
    def iterative(self) -> bool:
        """Solve for the step of μ by conjugate gradients, where the full matrix would be too large."""
        return self.diagonal and self.source.dimension > LARGEST_DIRECT

    @property
    def shape(self) -> Literal["full", "diagonal"]:
        """Which part of the curvature a pass takes."""
        return "diagonal" if self.iterative else "full"

    def evaluate(
        self, q: Gaussian, factor: Tensor, gram: bool = True, formula: Formula | None = None
    ) -> tuple[float, Sums]:
        """F and the sums at q; without `gram`, no curvature."""
        formula = formula or (self.moments if self.refine or self.rough is None else self.rough)
        shape = self.shape if gram else "none"
        total = sums(self.source, q.mean, factor, formula, gram=shape, scale=self.scale, rough=not self.refine)
        return total.value - kl_to_prior(q, factor, self.prior), total

    def coarsened(self, k: int, generator: np.random.Generator) -> "Problem":
        """The same on about k random rows, roughly."""
        subset = self.source.subset(k, generator)
        return replace(self, source=subset, scale=self.scale * self.source.rows / subset.rows, refine=False)


LARGEST_DIRECT = 2000  # dimension up to which the diagonal family still solves d × d systems directly
CG_TOLERANCE = 1e-10
SHORTEST_STEP = 1e-10


def gradient(problem: Problem, q: Gaussian, total: Sums) -> Tensor:
    """∂F/∂μ = Aᵀ c(y - g) - S₀⁻¹(μ - m₀)."""
    return total.gradient - problem.prior.apply(q.mean - problem.prior.mean)


def cholesky(matrix: Tensor) -> Tensor | None:
    """L with LLᵀ = matrix, or None where there is none."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    return None if int(info) or not bool(factor.diagonal().isfinite().all()) else factor


def full_step(problem: Problem, q: Gaussian, total: Sums, rho: float) -> tuple[Gaussian, float] | None:
    """The step of the full family and the KL it moves, or None if Λ_ρ is not positive definite."""
    target = problem.prior.plus(total.gram)
    precision = target if rho == 1.0 else torch.lerp(q.precision, target, rho)
    root = cholesky(precision)
    if root is None or q.cholesky is None:
        return None
    direction = rho * torch.cholesky_solve(gradient(problem, q, total)[:, None], root)[:, 0]
    new = Gaussian(q.mean + direction, precision, root)
    # KL(old ‖ new) = ½ [log|Λ| - log|Λ_ρ| - d + tr(Λ_ρ Σ) + δᵀΛ_ρδ], tr(Λ_ρ Σ) = ‖L⁻¹ L_ρ‖²
    ratio = torch.linalg.solve_triangular(q.cholesky, root, upper=False)
    move = q.log_determinant - new.log_determinant - len(direction) + ratio.square().sum()
    return new, 0.5 * float(move + (root.T @ direction).square().sum())


def diagonal_step(problem: Problem, q: Gaussian, total: Sums, rho: float) -> tuple[Gaussian, float] | None:
    """The step of the diagonal family: variances from the diagonal, μ by Newton with the whole curvature."""
    slope = gradient(problem, q, total)
    if problem.iterative:
        diagonal = problem.prior.diagonal + total.gram
        direction = rho * conjugate_gradients(problem, total, slope, diagonal)
    else:
        curvature = problem.prior.plus(total.gram)
        diagonal = curvature.diagonal()
        root = cholesky(curvature)
        if root is None:
            root = torch.diag(diagonal.clamp(min=problem.prior.diagonal).sqrt())
        direction = rho * torch.cholesky_solve(slope[:, None], root)[:, 0]
    precision = torch.lerp(q.precision, diagonal, rho)
    if not bool((precision > 0).all()):
        return None
    ratio = precision / q.precision
    move = 0.5 * float((ratio - 1.0 - ratio.log()).sum() + direction @ (precision * direction))
    return Gaussian(q.mean + direction, precision), move


def conjugate_gradients(problem: Problem, total: Sums, slope: Tensor, diagonal: Tensor) -> Tensor:
    """(S₀⁻¹ + Aᵀ diag(c h) A)⁻¹ v by conjugate gradients, preconditioned with the diagonal."""
    x, residual = torch.zeros_like(slope), slope.clone()
    z = residual / diagonal
    direction, rz = z.clone(), residual @ z
    start = rz.clone()
    for _ in range(10 * math.isqrt(len(slope)) + 100):
        if rz <= CG_TOLERANCE**2 * start:
            break
        product = problem.prior.apply(direction) + curvature_product(problem.source, total.curvature, direction)
        alpha = rz / (direction @ product)
        x, residual = x + alpha * direction, residual - alpha * product
        z = residual / diagonal
        rz, old = residual @ z, rz
        direction = z + (rz / old) * direction
    return x


def opening(problem: Problem) -> Gaussian:
    """q with the prior's mean and the precision S₀⁻¹ + Aᵀ diag(c h) A found there for Σ = 0, as Laplace would."""
    mean, prior = problem.prior.mean, problem.prior
    nothing = torch.zeros_like(mean) if problem.diagonal else torch.zeros_like(mean)[:, None]
    gram = sums(
        problem.source,
        mean,
        nothing,
        problem.moments,
        gram=problem.shape,
        scale=problem.scale,
        rough=not problem.refine,
    ).gram.nan_to_num(0.0)
    if problem.diagonal:
        diagonal = gram if gram.ndim == 1 else gram.diagonal()
        return Gaussian(mean, prior.diagonal + diagonal.clamp(min=0.0))
    precision = prior.plus(gram)
    root = cholesky(precision)
    if root is None:
        precision = torch.diag(prior.precision) if prior.precision.ndim == 1 else prior.precision
        root = torch.linalg.cholesky(precision)
    return Gaussian(mean, precision, root)


def newton(
    problem: Problem,
    q: Gaussian | None = None,
    *,
    tol: float = 1e-10,
    max_iter: int = 200,
    report: Callable[[Iteration], None] | None = None,
    generator: np.random.Generator | None = None,
) -> Result:
    """Maximise F from `q` (default: the prior) until a further step would move q by less than `tol` nats.

    Rough stages come first: on random subsets where rows are many, then on all rows with `problem.rough`. They only
    choose where the last stage, on all rows and in full precision, begins.
    """
    began = time.perf_counter()
    generator = generator or np.random.default_rng(0)
    history: list[Iteration] = []
    passes = 0.0
    curvature: Tensor | None = None
    stages = [(problem, tol)]
    if q is None and problem.rough is not None:
        stages.insert(0, (replace(problem, refine=False), ROUGH_MOVE))
    if q is None:
        stages = [(problem.coarsened(k, generator), COARSE_MOVE) for k in coarse_sizes(problem)] + stages
        q = opening(stages[0][0])
        passes += stages[0][0].source.rows / problem.source.rows
    for stage, move in stages:
        last = stage is problem
        result = iterate(stage, q, move, max_iter, began, report, curvature if not last else None)
        if not math.isfinite(result.objective) and not last:
            continue  # float32 was not enough; the last stage needs none of this
        history += result.history
        passes += result.passes * stage.source.rows / problem.source.rows
        q, curvature = result.q, result.curvature
    return replace(result, history=history, passes=passes)


COARSE_MOVE = 1e-1  # nats at which a subset has served: far below what its sampling error moves
ROUGH_MOVE = 1e-3  # nats at which full precision takes over
COARSE_RATIO = 10
ROWS_PER_DIMENSION = 40  # rows below which a subset does not determine the fit


def coarse_sizes(problem: Problem) -> list[int]:
    """Sizes of the subsets: a tenth of the rows, a tenth of those, ..., as long as they determine the fit."""
    least = ROWS_PER_DIMENSION * problem.source.dimension
    sizes: list[int] = []
    k = problem.source.rows
    while k >= 4 * least:
        k = max(k // COARSE_RATIO, least)
        sizes.insert(0, k)
    return sizes


CHORDS = 1  # steps that reuse a subset's curvature before a pass over all rows pays for its own


def iterate(
    problem: Problem,
    q: Gaussian,
    tol: float,
    max_iter: int,
    began: float,
    report: Callable[[Iteration], None] | None,
    curvature: Tensor | None = None,
) -> Result:
    """Damped natural-gradient steps on one source, the first with a given curvature Aᵀ diag(c h) A.

    The stage ends with the step after which, at the rate so far, a further one would move q by less than `tol`.
    """
    run = Stage(problem, began, report, curvature)
    run.move_to(q, q.factor, *run.evaluate(q, q.factor))
    rho, last = 1.0, math.inf
    for _ in range(max_iter):
        proposal = run.step(rho)
        if proposal is not None and rho == 1.0 and run.own_curvature and remaining(proposal[1], last) < tol:
            if run.finish(*proposal, tol):
                return run.result
            run.refresh()
            last = math.inf
            continue
        while not run.accept(proposal, rho):
            rho *= 0.5
            if rho < SHORTEST_STEP:
                run.result.status = "no step improves the objective"
                return run.result
            proposal = run.step(rho)
        last = run.result.history[-1].move / rho
        rho = min(1.0, 2.0 * rho)
    run.result.status = f"not converged in {max_iter} iterations"
    return run.result


def remaining(move: float, last: float) -> float:
    """KL left after this step, if moves go on shrinking at the rate ρ = move/last: distances add up like √move."""
    if math.isinf(last):
        return move
    rate = move / last
    return move * rate / (1.0 - math.sqrt(rate)) ** 2 if rate < 1.0 else math.inf


class Stage:
    """The state of `iterate`: where it is, the sums there, and the record."""

    def __init__(
        self,
        problem: Problem,
        began: float,
        report: Callable[[Iteration], None] | None,
        curvature: Tensor | None,
    ) -> None:
        self.problem, self.began, self.report = problem, began, report
        self.borrowed = None if problem.iterative else curvature
        self.chords = CHORDS
        # below the rounding error of the sums, or the error of a rough formula, F cannot tell better from worse
        self.slack = 0.0 if problem.refine else ROUGH_SLACK * problem.source.rows * problem.scale
        self.total: Sums

    @property
    def own_curvature(self) -> bool:
        return self.borrowed is None

    def evaluate(self, q: Gaussian, factor: Tensor) -> tuple[float, Sums]:
        value, total = self.problem.evaluate(q, factor, gram=self.own_curvature)
        if self.borrowed is not None:
            total.gram = self.borrowed
        return value, total

    def move_to(self, q: Gaussian, factor: Tensor, value: float, total: Sums) -> None:
        if not hasattr(self, "result"):
            self.result = Result(q, factor, value, False, "")
        self.result.q, self.result.factor, self.result.objective = q, factor, value
        self.result.magnitude = total.magnitude
        self.result.curvature = total.gram
        self.result.passes += 1
        self.total = total

    def refresh(self) -> None:
        """Take all sums anew at the present q."""
        self.result.exact = False
        q, factor = self.result.q, self.result.factor
        self.move_to(q, factor, *self.evaluate(q, factor))

    def step(self, rho: float) -> tuple[Gaussian, float] | None:
        step = diagonal_step if self.problem.diagonal else full_step
        return step(self.problem, self.result.q, self.total, rho)

    def accept(self, proposal: tuple[Gaussian, float] | None, rho: float) -> bool:
        """Move to the proposal if F is not lower there."""
        if proposal is None or not math.isfinite(proposal[1]):
            return False
        new, move = proposal
        factor = new.factor
        if self.borrowed is not None:
            self.chords -= 1
            self.borrowed = self.borrowed if self.chords > 0 else None
        value, total = self.evaluate(new, factor)
        if not value >= self.result.objective - self.noise():
            self.result.passes += 1
            return False
        self.move_to(new, factor, value, total)
        self.record(rho, move)
        return True

    def noise(self) -> float:
        return self.slack + 1e-15 * self.problem.source.rows**0.5 * (abs(self.result.objective) + 1.0)

    def record(self, rho: float, move: float) -> None:
        problem, value = self.problem, self.result.objective
        self.result.history.append(
            Iteration(problem.source.rows, not problem.refine, value, rho, move, time.perf_counter() - self.began)
        )
        if self.report is not None:
            self.report(self.result.history[-1])

    def finish(self, new: Gaussian, move: float, tol: float) -> bool:
        """Take the last step: unseen in a rough stage; else see that F did not fall and that no further step is due."""
        self.result.converged, self.result.status = True, "converged"
        if not self.problem.refine:
            self.result.q = new
            return True
        factor, gram = new.factor, self.total.gram
        value, total = self.problem.evaluate(new, factor, gram=False, formula=self.problem.final)
        total.gram, total.curvature = gram, self.total.curvature
        if not value >= self.result.objective - self.noise() - FINAL_SLACK * self.problem.source.rows:
            # already as high as arithmetic can see
            self.result.passes += 1
            return True
        self.move_to(new, factor, value, total)
        self.result.exact = self.problem.final is not None
        self.record(1.0, move)
        check = self.step(1.0)
        self.result.converged = check is not None and check[1] < 100.0 * tol
        return self.result.converged


FINAL_SLACK = 2e-11  # per row: twice the error of the fast moments
ROUGH_SLACK = 1e-6  # per row: twice the error of the rough moments, where their formulas meet


def exact_elbo(problem: Problem, result: Result) -> tuple[float, float, float]:
    """The exact ELBO at the q found, a certified lower bound of it (docs/certificate.md), and KL(q ‖ p)."""
    kl = kl_to_prior(result.q, result.factor, problem.prior)
    value, magnitude = result.objective, result.magnitude
    if not result.exact:
        value, total = problem.evaluate(result.q, result.factor, gram=False, formula=limit().moments)
        magnitude = total.magnitude
    return value, value - certificate_of_sum(magnitude, kl), kl


def certificate_of_sum(magnitude: float, kl: float) -> float:
    """What `certificate` allows for each row, summed, doubled for the summation; and as much for KL."""
    eps = torch.finfo(torch.float64).eps
    return 256 * eps * (magnitude + abs(kl)) + 4e-15 * magnitude
