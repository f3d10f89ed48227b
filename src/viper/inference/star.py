"""Softmax regression: the star q, under which the classes' coefficients are independent up to a common shift.

Softmax does not change when all f_k move together, so only contrasts of w_1, ..., w_K matter. q is the distribution of
the contrasts of independent w_k ~ N(μ_k, P_k⁻¹), the prior that of w_k ~ N(m_k, D). With M = Σ P_k, means centred over
classes and d coefficients each,

    F = Σ_i c_i (ϑ_{i, y_i} - η(ϑ_i, τ_i²)) - KL,     η the expected log-sum-exp,
    2 KL = Σ_k (μ_k - m_k)ᵀ D⁻¹ (μ_k - m_k) + (1 - 1/K) Σ_k tr(D⁻¹ P_k⁻¹) - (K-1) d
           + (K-1) log|D| + Σ_k log|P_k| - log|M| + d log K.

A stationary point satisfies P_k - P_k M⁻¹ P_k = A_k = (1 - 1/K) D⁻¹ + Xᵀ diag(c h_k) X; a natural-gradient step moves
μ_k by P_k⁻¹ ∂F/∂μ_k. One pass costs K n d², and the algebra K matrices of size d instead of one of size K d.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from viper.inference.problem import Prior
from viper.inference.rows import Block, RowSource
from viper.softplus.gumbel import Precision
from viper.softplus.logsumexp import class_moments

ROUGH_TOLERANCE, EXACT_TOLERANCE = 1e-6, 1e-10  # of the expected log-sum-exp, before and in the last passes
INNER_STEPS, INNER_ERROR, INNER_SHARE = 200, 1e-13, 1e-2  # of the fixed point for P
MOST_HALVINGS = 30


@dataclass(frozen=True)
class Star:
    """Means μ (K, d), centred over classes, and precisions P (K, d, d), or (K, d) in the diagonal family."""

    mean: Tensor
    precision: Tensor

    @property
    def diagonal(self) -> bool:
        return self.precision.ndim == 2

    def factors(self) -> Tensor:
        """F_k with P_k⁻¹ = F_k F_kᵀ, or the variances."""
        if self.diagonal:
            return 1.0 / self.precision
        roots = torch.linalg.cholesky(self.precision)
        eye = torch.eye(roots.shape[-1], dtype=roots.dtype, device=roots.device).expand_as(roots)
        return torch.linalg.solve_triangular(roots, eye, upper=False).mT.contiguous()

    def contrast_covariance(self, j: int, k: int) -> Tensor:
        """The covariance of w_j - w_k, P_j⁻¹ + P_k⁻¹; its diagonal in the diagonal family."""
        first, second = self.precision[j], self.precision[k]
        if self.diagonal:
            return 1.0 / first + 1.0 / second
        return torch.linalg.inv(first) + torch.linalg.inv(second)


@dataclass
class StarSums:
    """Sums over rows at one star: the likelihood part of F, its gradient in each μ_k, and each class's curvature."""

    value: float
    gradient: Tensor
    gram: Tensor


@dataclass
class StarResult:
    """Where the solver stopped."""

    q: Star
    objective: float
    converged: bool
    history: list[tuple[float, float]] = field(default_factory=list)  # F and the step after each pass


def class_predictors(block: Block, mean: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """ϑ (n, K) and τ² (n, K) of a block's rows."""
    theta = block.design.project(mean.T.contiguous())
    tau2 = torch.stack([block.design.spread(factor) for factor in factors], 1)
    return (theta if block.offset is None else theta + block.offset), tau2


def star_sums(block: Block, mean: Tensor, factors: Tensor, precision: Precision) -> list[Tensor]:
    """A block's value, Xᵀ c(1[y = k] - E p_k) and Xᵀ diag(c E p_k(1-p_k)) X for each class k; labels are numbers."""
    theta, tau2 = class_predictors(block, mean, factors)
    eta, slope, curvature, _ = class_moments(theta, tau2, precision, False)
    label = block.label.long()[:, None]
    value = theta.gather(1, label)[:, 0] - eta
    residual = (-slope).scatter_add(1, label, torch.ones_like(label, dtype=slope.dtype))
    if block.weight is not None:
        value, residual, curvature = value * block.weight, *(x * block.weight[:, None] for x in (residual, curvature))
    gram = block.design.gram if factors.ndim == 3 else block.design.gram_diagonal
    columns = [gram(h.contiguous()) for h in curvature.T]
    return [value.sum(), block.design.pull(residual).T.contiguous(), torch.stack(columns)]


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def star_divergence(q: Star, factors: Tensor, prior: Prior, prior_mean: Tensor) -> float:
    """KL of the contrasts from their prior."""
    K, d = q.mean.shape
    shift = centred(q.mean - prior_mean)
    if q.diagonal:
        expected = prior.diagonal * factors
        own, joint = q.precision.log().sum(), q.precision.sum(0).log().sum()
    else:
        scaled = prior.precision[:, None] * factors if prior.precision.ndim == 1 else prior.precision @ factors
        expected = scaled * factors
        own = 2.0 * torch.linalg.cholesky(q.precision).diagonal(dim1=1, dim2=2).log().sum()
        joint = 2.0 * torch.linalg.cholesky(q.precision.sum(0)).diagonal().log().sum()
    distance = sum(row @ prior.apply(row) for row in shift)
    total = distance + (1 - 1 / K) * expected.sum() - (K - 1) * d - (K - 1) * prior.log_determinant + own - joint
    return 0.5 * float(total + d * math.log(K))


def solve_precisions(target: Tensor, start: Tensor) -> Tensor:
    """P_k with P_k - P_k M⁻¹ P_k = A_k, M = Σ P_j, by iterating P_k = A_k + P_k M⁻¹ P_k from `start`.

    It stops when a hundredth of the first change is left: the next pass changes A_k anyway.
    """
    P, first = start, math.inf
    for _ in range(INNER_STEPS):
        if P.ndim == 2:
            new = target + P * P / P.sum(0)
        else:
            root = torch.linalg.cholesky(P.sum(0))
            half = torch.linalg.solve_triangular(root, P, upper=False)
            new = target + half.mT @ half
        moved = float((new - P).abs().max() / new.abs().max())
        P, first = new, moved if math.isinf(first) else first
        if moved <= max(INNER_ERROR, INNER_SHARE * first):
            break
    return P


class StarProblem:
    """Rows with K classes and a prior, shared by the classes but for its means (K, d)."""

    def __init__(self, source: RowSource, classes: int, prior: Prior, diagonal: bool = False) -> None:
        self.source, self.classes, self.prior, self.diagonal = source, classes, prior, diagonal
        mean = prior.mean if prior.mean.ndim == 2 else prior.mean.expand(classes, -1)
        self.prior_mean = centred(mean)

    def sums(self, q: Star, factors: Tensor, precision: Precision) -> StarSums:
        function = partial(star_sums, mean=q.mean, factors=factors, precision=precision)
        value, gradient, gram = self.source.reduce(function)
        return StarSums(float(value), gradient, gram)

    def evaluate(self, q: Star, precision: Precision) -> tuple[float, StarSums]:
        """F at q and the sums behind it."""
        factors = q.factors()
        sums = self.sums(q, factors, precision)
        return sums.value - star_divergence(q, factors, self.prior, self.prior_mean), sums

    def start(self) -> Star:
        """The prior's means, with the precision of the prior."""
        d = self.source.dimension
        prior = self.prior.diagonal if self.diagonal else self.prior.plus(self.prior_mean.new_zeros(d, d))
        return Star(self.prior_mean.clone(), prior.expand(self.classes, *prior.shape).clone())

    def target(self, gram: Tensor) -> Tensor:
        """A_k."""
        share = 1.0 - 1.0 / self.classes
        prior = self.prior.diagonal if self.diagonal else self.prior.plus(torch.zeros_like(gram[0]))
        return share * prior + gram

    def gradient(self, q: Star, sums: StarSums) -> Tensor:
        """∂F/∂μ_k, whose sum over classes is zero."""
        shift = centred(q.mean - self.prior_mean)
        return sums.gradient - torch.stack([self.prior.apply(row) for row in shift])


def fit_star(
    problem: StarProblem,
    q: Star | None = None,
    *,
    tol: float = 3e-9,
    max_iter: int = 200,
    report: Callable[[int, float], None] | None = None,
) -> StarResult:
    """Natural-gradient steps to the optimum of F, each halved until F does not decrease; stops `tol` nats before it."""
    q = q or problem.start()
    history: list[tuple[float, float]] = []
    for tolerance in (ROUGH_TOLERANCE, EXACT_TOLERANCE):
        result = ascend(problem, q, Precision(tolerance), max(tol, 1e2 * tolerance), max_iter, history, report)
        q = result.q
    return result


def ascend(
    problem: StarProblem,
    q: Star,
    precision: Precision,
    tol: float,
    max_iter: int,
    history: list[tuple[float, float]],
    report: Callable[[int, float], None] | None,
) -> StarResult:
    """The iterations with one tolerance: Anderson's mixture of the means first, then plain steps."""
    F, sums = problem.evaluate(q, precision)
    past: list[tuple[Tensor, Tensor]] = []
    for _ in range(max_iter):
        P = solve_precisions(problem.target(sums.gram), q.precision)
        gradient = problem.gradient(q, sums)
        move = centred(natural_move(P, gradient))
        left = 0.5 * float((move * gradient).sum())
        past.append((q.mean, move))
        noise = 1e-13 * abs(F) + 0.1 * tol  # the tolerance of the log-sum-exp hides smaller changes
        candidates = [(1.0, mixed_mean(past))] if len(past) > 1 else []
        candidates += [(0.5**n, q.mean + 0.5**n * move) for n in range(MOST_HALVINGS)]
        for step, mean in candidates:
            trial = Star(mean, q.precision + step * (P - q.precision))
            new_F, new_sums = problem.evaluate(trial, precision)
            if new_F >= F - noise:
                break
            past = past[-1:]
        else:
            return StarResult(q, F, left < tol, history)
        change, q, F, sums = new_F - F, trial, new_F, new_sums
        history.append((F, step))
        if report is not None:
            report(len(history), F)
        if abs(change) < tol and left < tol:
            return StarResult(q, F, True, history)
    return StarResult(q, F, False, history)


def natural_move(P: Tensor, gradient: Tensor) -> Tensor:
    """P_k⁻¹ g_k: a step of the contrasts along their natural gradient, because the g_k sum to zero."""
    if P.ndim == 2:
        return gradient / P
    return torch.cholesky_solve(gradient[..., None], torch.linalg.cholesky(P))[..., 0]


def mixed_mean(history: list[tuple[Tensor, Tensor]], most: int = 8) -> Tensor:
    """Anderson's mixture of the last means and moves."""
    del history[:-most]
    mean, move = history[-1]
    if len(history) == 1:
        return mean + move
    residuals = torch.stack([m.reshape(-1) for _, m in history])
    points = torch.stack([x.reshape(-1) + m.reshape(-1) for x, m in history])
    differences = residuals[-1] - residuals[:-1]
    weights = torch.linalg.lstsq(differences.T, residuals[-1][:, None]).solution[:, 0]
    return (points[-1] - weights @ (points[-1] - points[:-1])).reshape(mean.shape)
