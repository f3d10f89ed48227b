"""A Gaussian process on rows that are not in memory: hyperparameters from some of them, the posterior from all.

Kernel, mean function and inducing points are chosen on random rows, as many as fit into memory with ease, each of which
stands for n/k rows. Given these, q maximises the ELBO of all n rows: its sums are taken where the rows are, by the same
solver as ever.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor

from viper.data.checkpoint import resumable
from viper.data.checks import in_memory, seed_of
from viper.errors import ConvergenceWarning, users_line
from viper.gp.model import Features, Rows, Scaler, SparseGP
from viper.inference.newton import exact_elbo, newton
from viper.inference.posterior import Diagonal, Full
from viper.inference.problem import Gaussian, Prior, Problem, gaussian
from viper.inference.progress import Progress
from viper.inference.rows import Block, Dense, RowFunction, Source, Through
from viper.inference.threads import one_thread
from viper.models.fitting import watch
from viper.softplus.pointwise import Bound

SEARCH_ROWS = 40_000  # up to which the search sees every row
TOLERANCE = 1e-12  # nats, of q


@dataclass(frozen=True)
class Look:
    """A block of rows, seen through the inducing points."""

    model: SparseGP
    scaler: Scaler

    def __reduce__(self) -> Any:
        return Look, (self.model, self.scaler)  # not the features, which autograd holds on to

    @cached_property
    def features(self) -> Features:
        nothing = self.model.inducing.new_zeros
        with torch.no_grad():
            return Features(self.model, Rows(nothing(0, self.model.inducing.shape[1]), nothing(0)))

    def __call__(self, block: Block) -> Block:
        assert isinstance(block.design, Dense)
        inputs = torch.from_numpy(self.scaler.apply(block.design.matrix.double().numpy()))
        with torch.no_grad():
            rows = Rows(inputs, block.label, block.offset, block.weight)
            return self.features.block(rows, *self.features.evaluate(inputs))


def through(block: Block, look: Look, function: RowFunction) -> list[Tensor]:
    return function(look(block))


@dataclass(frozen=True)
class Seen(Through):
    """The rows of any source, seen through the inducing points."""

    source: Source
    look: Look

    @property
    def dimension(self) -> int:
        return len(self.look.model.inducing)

    def blocks(self) -> Iterator[Block]:
        return map(self.look, self.source.blocks())  # type: ignore[attr-defined]

    def reduce(self, function: RowFunction) -> list[Tensor]:
        return self.source.reduce(partial(through, look=self.look, function=function))

    def subset(self, k: int, generator: np.random.Generator) -> "Seen":
        return Seen(self.source.subset(k, generator), self.look)


def fit(estimator: Any, source: Source, bound: Callable[[int], tuple[Bound, Bound]], checkpoint: Any) -> Any:
    """Fit an estimator that knows its classes and columns: search on some rows, then find q on all."""
    start = seed_of(estimator.random_state)
    with resumable(estimator, source, checkpoint, start) as (passes, seed):
        found = search(estimator, passes, seed)
        learned = {name: x for name, x in vars(found).items() if name.endswith("_") or name == "_scaler"}
        vars(estimator).update(learned | {name: getattr(estimator, name) for name in KNOWN if hasattr(estimator, name)})
        if source.rows > SEARCH_ROWS:
            all_rows(estimator, Seen(passes, Look(found.model_, found._scaler)), bound(seed)[0])
    return estimator


KNOWN = ("classes_", "n_features_in_", "feature_names_in_")


def search(estimator: Any, source: Source, seed: int) -> Any:
    """A copy of the estimator fitted to random rows, weighted so that they stand for all."""
    many = source.rows > SEARCH_ROWS
    rows = in_memory(source.subset(SEARCH_ROWS, np.random.default_rng(seed)) if many else source)
    weight = rows.weight
    if many:
        scale = torch.full_like(rows.label, source.rows / rows.rows, dtype=torch.float64)
        weight = scale if weight is None else scale * weight
    y = estimator.classes_[rows.label.numpy().astype(int)]
    fresh = clone(estimator).set_params(random_state=seed)
    return fresh.fit(rows.features.numpy(), y, *(None if x is None else x.numpy() for x in (weight, rows.offset)))


def all_rows(estimator: Any, seen: Seen, bound: Bound) -> None:
    """Set q and what belongs to it to the best for all rows, from one that is near it."""
    near = estimator.posterior_
    ones = torch.ones(seen.dimension, dtype=torch.float64)
    problem = Problem(seen, Prior(torch.zeros_like(ones), ones), bound, diagonal=isinstance(near, Diagonal))
    with closing(Progress(estimator.verbose)) as report, one_thread():
        watch(seen, report)
        result = newton(problem, as_gaussian(near), tol=TOLERANCE, report=report)
    estimator.posterior_ = type(near)(result.q.mean, result.factor)
    estimator.elbo_, estimator.elbo_bound_, estimator.kl_ = exact_elbo(problem, result)
    estimator.objective_, estimator.history_ = result.objective, result.history
    estimator.converged_ = bool(estimator.converged_ and result.converged)
    if not result.converged:
        estimator.status_ = result.status
        warnings.warn(
            f"The posterior of all rows stopped early: {result.status}. Use more inducing points, or another kernel.",
            ConvergenceWarning,
            stacklevel=users_line(),
        )


def as_gaussian(q: Full | Diagonal) -> Gaussian | None:
    if isinstance(q, Diagonal):
        return gaussian(q.mean, 1.0 / q.variance)
    return gaussian(q.mean, torch.cholesky_inverse(torch.linalg.cholesky(q.covariance())))
