"""The paper's recipe for Gaussian processes: natural-gradient steps for q, Adam for everything else, minibatches.

The sums over a minibatch are scaled up to all rows; the KL term is not. The result is the best θ at the end of any pass
over the rows, with its q, rather than the last θ.
"""

import math

import numpy as np
import torch

from viper.errors import NotPositiveDefinite
from viper.gp.model import Features, Observations, SparseGP, backward
from viper.gp.profile import identity_prior
from viper.inference.problem import Gaussian, Problem
from viper.inference.steps import diagonal_step, full_step, opening
from viper.softplus.pointwise import Bound

WINDOW = 20  # passes over which the objective must rise by `tol`


def natural_adam(
    model: SparseGP,
    rows: Observations,
    bound: Bound,
    *,
    diagonal: bool,
    learning_rate: float,
    batch_size: int | None,
    max_iter: int,
    tol: float,
    generator: np.random.Generator,
) -> tuple[Gaussian, list[float], bool]:
    """Train `model` in place for up to `max_iter` passes.

    Returns its q, the objective after each pass, and whether it converged.
    """
    step = diagonal_step if diagonal else full_step
    optimiser = torch.optim.Adam(model.free, lr=learning_rate) if model.free else None
    q: Gaussian | None = None
    best, history = (-math.inf, model.free_vector(), q), []
    for _ in range(max_iter):
        for part, scale in minibatches(rows, batch_size, generator):
            model.zero_grad(set_to_none=True)
            try:
                source = Features(model, part)
            except NotPositiveDefinite:
                model.set_free(best[1])
                continue
            problem = Problem(source, identity_prior(source), bound, diagonal=diagonal, scale=scale)
            q = q or opening(problem)
            factor = q.factor
            _, total = problem.evaluate(q, factor)
            if optimiser is not None:
                backward(source, q, factor, bound.moments, scale)
                ascend(model, optimiser)
            q = step(problem, q, total, learning_rate) or q
        value = full_objective(model, rows, bound, diagonal, q)
        history.append(value)
        if value > best[0]:
            best = value, model.free_vector(), q
        if len(history) > WINDOW and max(history[-WINDOW:]) - max(history[:-WINDOW]) < tol:
            break
    model.set_free(best[1])
    assert best[2] is not None
    return best[2], history, len(history) < max_iter


def minibatches(
    rows: Observations, size: int | None, generator: np.random.Generator
) -> list[tuple[Observations, float]]:
    if size is None or size >= len(rows):
        return [(rows, 1.0)]
    order = torch.from_numpy(generator.permutation(len(rows))).to(rows.inputs.device)
    return [(rows.take(part), len(rows) / len(part)) for part in order.split(size)]


def ascend(model: SparseGP, optimiser: torch.optim.Adam) -> None:
    """One Adam step up the gradient of F + log prior."""
    prior = model.log_prior()
    if prior is not None and prior.requires_grad:
        prior.backward()
    for parameter in model.free:
        if parameter.grad is not None:
            parameter.grad.neg_().nan_to_num_(0.0)
    optimiser.step()


def full_objective(model: SparseGP, rows: Observations, bound: Bound, diagonal: bool, q: Gaussian | None) -> float:
    """F on all rows."""
    if q is None:
        return -math.inf
    try:
        with torch.no_grad():
            source = Features(model, rows)
    except NotPositiveDefinite:
        return -math.inf
    value = Problem(source, identity_prior(source), bound, diagonal=diagonal).evaluate(q, q.factor, gram=False)[0]
    return value if math.isfinite(value) else -math.inf
