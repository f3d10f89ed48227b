"""The paper's own recipe, for like-for-like comparisons: Adam on μ and L (Σ = LLᵀ), or on μ and log σ.

It starts and stops as in the paper (Section 2.4): from μ ~ N(0, I) and Σ = 0.35 I, until the relative change of the
objective falls below a threshold. Two faults of the published code are corrected: the KL term counts once per pass,
however many minibatches there are, and the best q is returned rather than the last.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from viper.inference.newton import Iteration, Result
from viper.inference.problem import Gaussian, Problem
from viper.inference.steps import gradient
from viper.inference.sums import Sums

INITIAL_VARIANCE = 0.35


def adam(
    problem: Problem,
    *,
    tol: float = 1e-8,
    max_iter: int = 10_000,
    learning_rate: float = 0.05,
    batch_size: int | None = None,
    report: Callable[[Iteration], None] | None = None,
    generator: np.random.Generator | None = None,
) -> Result:
    """Maximise F by Adam; an iteration is one pass over the rows, in minibatches if `batch_size` is given."""
    began = time.perf_counter()
    generator = generator or np.random.default_rng(0)
    mean = problem.prior.mean.new_tensor(generator.standard_normal(problem.source.dimension))
    spread = starting_spread(mean, problem.diagonal)
    optimiser = torch.optim.Adam([mean, spread], lr=learning_rate)
    best = Result(*as_gaussian(mean, spread), -math.inf, False, f"not converged in {max_iter} iterations")
    last = -math.inf
    history = []
    for _ in range(max_iter):
        q, factor = as_gaussian(mean, spread)
        value, total = problem.evaluate(q, factor)
        history.append(
            Iteration(problem.source.rows, False, value, learning_rate, math.nan, time.perf_counter() - began)
        )
        if report is not None:
            report(history[-1])
        if value > best.objective:
            best = replace(best, q=q, factor=factor, objective=value)
        if math.isfinite(last) and abs(value - last) <= tol * abs(last):
            best.converged, best.status = True, "converged"
            break
        last = value
        if batch_size is None:
            update(problem, optimiser, mean, spread, total)
        else:
            for batch in batches(problem, batch_size, generator):
                update(batch, optimiser, mean, spread, batch.evaluate(*as_gaussian(mean, spread))[1])
    passes = len(history) * (1.0 if batch_size is None else 2.0)
    return replace(best, history=history, passes=passes)


def starting_spread(mean: Tensor, diagonal: bool) -> Tensor:
    """Return log σ (a vector) or L (a matrix) of the initial Σ."""
    sd = torch.full_like(mean, math.sqrt(INITIAL_VARIANCE))
    return sd.log() if diagonal else torch.diag(sd)


def as_gaussian(mean: Tensor, spread: Tensor) -> tuple[Gaussian, Tensor]:
    """Return q and its factor, given μ and either L or log σ."""
    if spread.ndim == 1:
        variance = torch.exp(2.0 * spread)
        return Gaussian(mean.clone(), 1.0 / variance), variance
    # Λ = MᵀM with M = L⁻¹ = QR, hence Λ = RᵀR, even if a long step left L with a small or negative diagonal
    inverse = torch.linalg.solve_triangular(spread, torch.eye(len(mean)).to(spread), upper=False)
    upper = torch.linalg.qr(inverse).R
    root = (upper * upper.diagonal().sign()[:, None]).T
    return Gaussian(mean.clone(), inverse.T @ inverse, root), spread.clone()


def batches(problem: Problem, size: int, generator: np.random.Generator) -> "list[Problem]":
    """Yield the problem on random minibatches of its rows; sums over a minibatch are scaled up to all rows."""
    source = problem.source.in_memory()
    order = generator.permutation(source.rows)
    parts = [order[i : i + size] for i in range(0, source.rows, size)]
    return [
        replace(problem, source=source.take(torch.from_numpy(part)), scale=problem.scale * source.rows / len(part))
        for part in parts
    ]


def update(problem: Problem, optimiser: torch.optim.Adam, mean: Tensor, spread: Tensor, total: Sums) -> None:
    """One Adam step along ∂F/∂μ and ∂F/∂L = -(S₀⁻¹ + G)L + L⁻ᵀ, or ∂F/∂log σ = 1 - (S₀⁻¹ + G)_jj σ_j²."""
    mean.grad = -gradient(problem, Gaussian(mean, mean), total)
    if spread.ndim == 1:
        diagonal = total.gram if total.gram.ndim == 1 else total.gram.diagonal()
        spread.grad = (problem.prior.diagonal + diagonal) * torch.exp(2.0 * spread) - 1.0
    else:
        ascent = torch.diag(1.0 / spread.diagonal()) - problem.prior.plus(total.gram) @ spread
        spread.grad = -torch.tril(ascent)
    optimiser.step()
