"""The search for the best q of the low-rank family: from the mean field, along leading eigenvectors, by L-BFGS.

Around q₀ with s₀, W₀ = Q diag(w) and M = (I + W₀W₀ᵀ)^(1/2) = I + Q ((1 + w²)^(1/2) - I) Qᵀ, the coordinates are

    μ = μ₀ + diag(s₀) M⁻¹ m,      s = s₀ r,      W = diag(r) (W₀ + M E diag((1 + w²)^(1/2) / w)),

with (r - 1/r)/√2 for each r, so that V = diag(s)⁻¹ W does not depend on r. If T = S₀⁻¹ + Aᵀ diag(c h) A has the form
of Λ, half a squared step in these coordinates is about its length in nats, whatever the units of the columns. With
N = M⁻² and T' = diag(s) T diag(s),

    ∂F/∂W = N(T'NW - W),      ∂F/∂log s_j = 1 - (T'N)_jj,      NW = WK.

F is not concave in W: at W = 0, ∂F/∂W = 0, and every choice of eigenvectors is a stationary point. So the search starts
at the leading ones, found by subspace iteration together with the remaining diagonal.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from viper.inference.climb import ROUNDS, STEPS, Ascent, climb
from viper.inference.low_rank.family import LowRankGaussian, LowRankProblem
from viper.inference.newton import ROUNDING_OF_F, Iteration, Result
from viper.inference.problem import MOST_LEFT, Gaussian, Problem
from viper.inference.start import COARSE_SHARE, NEAR_MEAN_FIELD, coarse_stages
from viper.inference.wide.mean_field import climb_mean_field, widest

SHARE_OF_GRADIENT = 1e-2  # half the squared gradient over nats allowed; in flat directions the gradient is small
SUBSPACE_STEPS, MORE_DIRECTIONS = 6, 8  # steps towards the leading eigenvectors, and extra vectors carried along
LEAST_SHARE = 0.2  # share of λ that at least remains after one of these steps
LEAST_LOADING = 1e-3  # smallest w by which coordinates are scaled
REMEMBERED, MOST_REMEMBERED, FEWEST_REMEMBERED = 1 << 28, 12, 4  # bytes for past steps, most and fewest of them
AT_BOUND = 1e-12  # relative difference from a bound that counts as rounding
LARGEST_ROUNDING = 1e-6  # half the squared gradient, in nats, below which rounding may hide whether F increases


def ratio_of(u: Tensor) -> Tensor:
    """The r with (r - 1/r)/√2 = u."""
    half = u * math.sqrt(0.5)
    larger = half.abs() + (half.square() + 1.0).sqrt()  # exp |asinh u/√2|
    return torch.where(half < 0.0, larger.reciprocal(), larger)


class LowRankAscent(Ascent):
    """F and its gradient in the coordinates around one q."""

    def __init__(self, problem: Problem, q: Gaussian, report: Callable[[float], None] | None, close: float) -> None:
        assert isinstance(problem, LowRankProblem)
        assert isinstance(q, LowRankGaussian)
        super().__init__(problem, q, report, close)
        self.family, self.center, self.magnitude = problem, q, math.nan
        self.basis, self.w, _ = torch.linalg.svd(q.loadings, full_matrices=False)
        self.stretch = (1.0 + self.w.square()).sqrt()  # M in the directions of Q
        self.loadings = self.basis * self.w
        w = self.w.clamp(min=LEAST_LOADING)
        self.scale = (1.0 + w.square()).sqrt() / w
        self.memory = int(REMEMBERED // (16 * len(self.origin())))
        self.memory = min(MOST_REMEMBERED, max(FEWEST_REMEMBERED, self.memory))
        self.highest = problem.prior.precision.rsqrt()

    def origin(self) -> np.ndarray:
        return np.zeros(self.d * (2 + len(self.w)))

    def stretched(self, x: Tensor, by: Tensor) -> Tensor:
        """(I + Q (diag(by) - I) Qᵀ) x."""
        inside = self.basis.T @ x
        return x + self.basis @ ((by - 1.0) * inside if x.ndim == 1 else (by - 1.0)[:, None] * inside)

    def point(self, x: np.ndarray) -> tuple[LowRankGaussian, Tensor]:
        """q at the coordinates x, and r."""
        m, u, E = torch.from_numpy(x).to(self.q.mean).split([self.d, self.d, len(x) - 2 * self.d])
        r = torch.minimum(ratio_of(u), self.highest / self.center.sd)  # λ >= diag(S₀⁻¹)
        mean = self.q.mean + self.center.sd * self.stretched(m, 1.0 / self.stretch)
        loadings = (self.loadings + self.stretched(E.view(self.d, -1), self.stretch) * self.scale) * r[:, None]
        return LowRankGaussian(mean, self.q.precision / r.square(), loadings=loadings), r

    def at(self, x: np.ndarray) -> Gaussian | None:
        q = self.point(x)[0]
        return q if math.isfinite(q.log_determinant) else None

    def negative(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """-F and its gradient."""
        failed = math.inf, np.zeros_like(x)
        q, r = self.point(x)
        if not bool(q.loadings.isfinite().all() & (q.precision > 0.0).all() & q.precision.isfinite().all()):
            return failed
        total, prior = self.family.sums(q), self.problem.prior
        self.value, self.magnitude = total.value - self.family.kl(q, q.factor), total.magnitude
        slope = total.gradient - prior.apply(q.mean - prior.mean)
        inner = q.sd[:, None] * (q.loadings @ q.root) @ q.root.T  # diag(s) W K
        bent = q.sd[:, None] * (total.products + prior.apply(inner))  # T'WK
        by_sd = 1.0 - (prior.diagonal + total.diagonal) / q.precision + (bent * q.loadings).sum(1)
        apart = bent - q.loadings
        by_loadings = apart - (q.loadings @ q.root) @ (q.root.T @ (q.loadings.T @ apart))
        by_r = math.sqrt(2.0) * (by_sd + (by_loadings * q.loadings).sum(1)) / (r + 1.0 / r)
        at_bound = q.sd >= (1.0 - AT_BOUND) * self.highest
        parts = [
            self.stretched(self.center.sd * slope, 1.0 / self.stretch),
            torch.where(at_bound & ((by_r > 0.0) | (r > 1.0)), 0.0, by_r),
            self.stretched(r[:, None] * by_loadings * self.scale, self.stretch).flatten(),
        ]
        gradient = torch.cat(parts).cpu().numpy()
        if not (math.isfinite(self.value) and np.isfinite(gradient).all()):
            return failed
        back = float(by_r[at_bound & (by_r < 0.0) & (r > 1.0)].square().sum())  # away from the bound, in the next round
        self.left = 0.5 * (float(gradient @ gradient) + back)
        return -self.value, -gradient


def maximise_low_rank(
    problem: LowRankProblem,
    q: Gaussian | None = None,
    *,
    tol: float | None = None,
    max_iter: int = ROUNDS * STEPS,
    report: Callable[[Iteration], None] | None = None,
    generator: np.random.Generator | None = None,
) -> Result:
    """Maximise F over the family from `q` (default: from the mean field) until about `tol` nats are left.

    As in `newton`, large fits start on random subsets of the rows, and a cheaper formula comes first.
    """
    began = time.perf_counter()
    history: list[Iteration] = []
    passes, steps = 0.0, 0
    rough = replace(problem, refine=False)
    coarse = coarse_stages(rough, generator or np.random.default_rng(0)) if q is None else []

    def tell(value: float) -> None:
        history.append(
            Iteration(stage.source.rows, not stage.refine, value, 1.0, math.nan, time.perf_counter() - began)
        )
        if report is not None:
            report(history[-1])

    enough = MOST_LEFT if tol is None else tol
    low = None if q is None else allowed(problem, q)
    for stage in [*coarse, *([] if problem.rough is None else [rough]), problem]:
        share = stage.source.rows / problem.source.rows
        assert isinstance(stage, LowRankProblem)
        if low is None:
            low, made = leading_start(stage)
            passes += made * share
        close = SHARE_OF_GRADIENT * enough
        if stage.source is not problem.source:
            close = max(close, COARSE_SHARE * 0.5 * stage.source.dimension * stage.scale)
        found = climb(stage, low, tell, close=close, most=max_iter - steps, coordinates=LowRankAscent)
        assert isinstance(found.q, LowRankGaussian)
        low, passes, steps = found.q, passes + found.passes * share, steps + found.steps
    assert low is not None
    last = LowRankAscent(problem, low, None, close)
    last.negative(last.origin())
    rounding = max(enough, min(LARGEST_ROUNDING, ROUNDING_OF_F * last.magnitude))
    converged = last.left < max(close, rounding)
    if converged:
        status = "converged" if last.left < close else "converged to rounding"
    else:
        status = f"not converged in {max_iter} iterations" if steps >= max_iter else "no step improves the objective"
    return Result(low, low.factor, last.value, converged, status, history, passes + 1.0, last.magnitude)


def allowed(problem: LowRankProblem, q: Gaussian) -> LowRankGaussian:
    """Return q, fitted under another prior, with λ >= diag(S₀⁻¹)."""
    assert isinstance(q, LowRankGaussian)
    precision = torch.maximum(q.precision, problem.prior.precision)
    return LowRankGaussian(q.mean, precision, loadings=q.loadings * (q.precision / precision).sqrt()[:, None])


def leading_start(problem: LowRankProblem) -> tuple[LowRankGaussian, float]:
    """Return a q near the best, with the mean field's μ and h, and the number of passes.

    If the diagonals of Λ and T agree, V follows from λ as V = diag(λ)^(1/2) Q (θ - 1)^(1/2), where Q and θ are leading
    eigenvectors and eigenvalues of diag(s) T diag(s), and λ follows from V. The two are improved in turn.
    """
    found = climb_mean_field(problem, widest(problem), close=NEAR_MEAN_FIELD)
    prior, total = problem.prior, problem.total(found.q.mean, found.q.factor)
    diagonal = torch.maximum(prior.diagonal + total.gram, prior.diagonal)
    d, k = len(diagonal), problem.rank
    noise = np.random.default_rng(0).standard_normal((d, min(d, k + MORE_DIRECTIONS)))
    block = torch.linalg.qr(torch.from_numpy(noise).to(diagonal))[0]
    precision = diagonal
    for _ in range(SUBSPACE_STEPS):
        sd = precision.rsqrt()[:, None]
        scaled = sd * block
        image = sd * (prior.apply(scaled) + total.curvature(scaled))
        theta, turn = torch.linalg.eigh(block.T @ image)
        loadings = (block @ turn[:, -k:]) * (theta[-k:] - 1.0).clamp(min=LEAST_LOADING**2).sqrt()
        rest = diagonal - precision * loadings.square().sum(1)
        new = torch.maximum(torch.maximum(rest, prior.precision), LEAST_SHARE * precision)
        loadings, precision = loadings * (precision / new).sqrt()[:, None], new
        block = torch.linalg.qr(image)[0]
    return LowRankGaussian(found.q.mean, precision, loadings=loadings), found.passes + 1.0 + SUBSPACE_STEPS
