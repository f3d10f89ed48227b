"""Fits effects of groups: the rows in groups, the posterior of variance components, and the pooled posterior."""

import time
import warnings
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from viper.errors import ConvergenceWarning, users_line
from viper.inference.groups.arrow import Arrow, Split, flat_cross
from viper.inference.groups.components import ComponentPrior
from viper.inference.groups.evidence import (
    ComponentPosterior,
    ComponentProfile,
    component_posterior,
    starting_components,
)
from viper.inference.groups.met import Meetings, Met
from viper.inference.groups.rows import Factor, GroupedRows, sorted_rows
from viper.inference.groups.sums import expected_terms, row_moments
from viper.inference.memory import available_memory
from viper.inference.newton import Iteration
from viper.inference.problem import Prior
from viper.inference.progress import Progress, Tasks
from viper.inference.threads import pass_threads

FEW_EVENTS = 10.0  # rows of the rarer class per group, on average, below which single groups are far from Gaussian
CROSS_COPIES = 12  # arrays as large as all groups' covariances with the border that a fit holds at a time
ROW_ARRAYS = 12  # arrays as long as the rows
PREDICTED_ROWS = 1 << 15


@dataclass(frozen=True)
class GroupPosterior:
    """The pooled posterior: a border that all rows may meet, and the groups of the factor with the most effects.

    Attributes
    ----------
    mean, border : Tensor (d,) and (d, d)
        Mean and covariance of the border: the fixed effects, then the effects of all other factors.
    effects, cross, blocks : Tensor (G, r), (G, r, d) and (G, r, r)
        The groups: means of their effects, covariances with the border, and covariances within each group.
    """

    mean: Tensor
    border: Tensor
    effects: Tensor
    cross: Tensor
    blocks: Tensor

    @property
    def variance(self) -> Tensor:
        return self.border.diagonal()

    def parts(self) -> tuple[Split, Arrow]:
        arrays = [getattr(self, name).numpy() for name in ("mean", "effects", "border", "cross", "blocks")]
        return Split(*arrays[:2]), Arrow(*arrays[2:])

    def ties(self) -> Any:
        """T with Cov(b, w) = T Var(w), effects of groups × border."""
        border = scipy.linalg.cho_factor(self.border.numpy(), lower=True)
        return scipy.linalg.cho_solve(border, flat_cross(self.cross.numpy()).T).T


@dataclass(frozen=True)
class MetPosterior:
    """The same posterior if few groups meet few border effects: only covariances of pairs that meet are kept.

    Attributes
    ----------
    cross : Tensor (m, r)
        Covariances of each group's effects with the border effects that it meets.
    column, count : Tensor (m,) and (G,)
        Indices of these border effects, group by group, and how many each group meets.
    fixed : Tensor (p,)
        Indices of the fixed effects, which all groups meet.
    """

    mean: Tensor
    border: Tensor
    effects: Tensor
    cross: Tensor
    blocks: Tensor
    column: Tensor
    count: Tensor
    fixed: Tensor

    @property
    def variance(self) -> Tensor:
        return self.border.diagonal()

    @cached_property
    def met(self) -> Met:
        first = np.concatenate([[0], np.cumsum(self.count.long().numpy())])
        return Met(Meetings(self.column.long().numpy(), first, len(self.mean), len(self.fixed)), self.cross.numpy())

    def is_whole(self) -> bool:
        """Whether every group meets some effects, listed in order, and all fixed effects first."""
        count, column = self.count.long(), self.column.long()
        if int(count.sum()) != len(column) or int(count.min()) < max(1, len(self.fixed)):
            return False
        first = count.cumsum(0) - count
        inside = torch.ones(len(column), dtype=torch.bool)
        inside[first] = False  # a group's first entry has none before it
        rising = bool((column.diff()[inside[1:]] > 0).all()) and int(column.max()) < len(self.mean)
        return rising and all(bool((column[first + k] == k).all()) for k in range(len(self.fixed)))

    def parts(self) -> tuple[Split, Arrow]:
        return Split(self.mean.numpy(), self.effects.numpy()), Arrow(self.border.numpy(), self.met, self.blocks.numpy())

    def ties(self) -> Any:
        return self.met.conditional_ties(self.border.numpy()).matrix


class GroupOptions(NamedTuple):
    """Options of a fit with groups."""

    scale: float
    quadrature: Any
    n_jobs: int | None
    verbose: Any
    seed: int
    tasks: Tasks | None = None


class FittedGroups(NamedTuple):
    """The posterior, the order of its factors, the mixture, whether quadrature was used, and the largest sd."""

    posterior: GroupPosterior | MetPosterior
    order: list[int]
    found: ComponentPosterior
    quadrature: bool
    largest_sd: float
    expected: float  # E log p(y | all effects) of the rows under the pooled posterior
    history: list[Iteration]
    rows: GroupedRows


def fit_groups(
    X: np.ndarray,
    label: np.ndarray,
    factors: list[Factor],
    weight: np.ndarray | None,
    offset: np.ndarray | None,
    prior: Prior,
    options: GroupOptions,
) -> FittedGroups:
    """Fit fixed effects (columns of X), effects of groups and variance components."""
    rows, order = sorted_rows(X, label, factors, weight, offset)
    check_group_memory(rows)
    quadrature = needs_quadrature(rows) if options.quadrature == "auto" else bool(options.quadrature)
    history: list[Iteration] = []
    began = time.perf_counter()
    progress = Progress(options.verbose, options.tasks, rows.rows)

    def report(value: float, gain: float) -> None:
        history.append(Iteration(rows.rows, False, value, 1.0, max(gain, 0.0), time.perf_counter() - began))
        progress(history[-1])

    precision = prior.precision if prior.precision.ndim == 2 else torch.diag(prior.precision)
    profile = ComponentProfile(
        rows, prior.mean.numpy(), precision.numpy(), ComponentPrior(options.scale), quadrature, report
    )
    with closing(progress), pass_threads(options.n_jobs), torch.no_grad():
        found = component_posterior(profile, starting_components(rows), np.random.default_rng(options.seed))
    if not found.converged:
        warnings.warn(
            "The solver stopped before it converged. Standardise the features, or use a narrower prior.",
            ConvergenceWarning,
            stacklevel=users_line(),
        )
    mean, covariance = found.pooled.mean, found.pooled.covariance
    posterior = kept_posterior(rows, mean, covariance)
    spreads = [row_moments(rows, *chunk, mean, covariance)[1].max() for chunk in rows.chunks()]
    expected = grouped_value(rows, mean, covariance)
    return FittedGroups(posterior, order, found, quadrature, float(np.sqrt(max(spreads))), expected, history, rows)


def kept_posterior(rows: GroupedRows, mean: Split, covariance: Arrow) -> GroupPosterior | MetPosterior:
    """Return the part of the pooled mean and covariance that a model keeps."""
    cross, at = covariance.cross, rows.meetings
    arrays = [mean.border, covariance.border, mean.groups, cross if at is None else cross.values, covariance.blocks]
    if at is not None:
        arrays += [x.astype(float) for x in (at.column, np.diff(at.first), np.arange(at.fixed))]
    tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in arrays]
    return GroupPosterior(*tensors) if at is None else MetPosterior(*tensors)


def grouped_value(rows: GroupedRows, mean: Split, covariance: Arrow) -> float:
    """Σ c (yϑ - η)."""
    parts = []
    for part, groups in rows.chunks():
        theta, tau2 = row_moments(rows, part, groups, mean, covariance)
        terms = expected_terms(rows.label[part], theta, tau2)
        parts.append(terms.sum() if rows.weight is None else rows.weight[part] @ terms)
    return float(np.sum(parts))


def needs_quadrature(rows: GroupedRows) -> bool:
    """Whether the main factor's groups have one effect each and few events."""
    if rows.main.width != 1:
        return False
    count = np.ones(rows.rows) if rows.weight is None else rows.weight
    events = float(min((count * rows.label).sum(), (count * (1.0 - rows.label)).sum()))
    return events < FEW_EVENTS * rows.main.levels


def check_group_memory(rows: GroupedRows) -> None:
    """Raise before any work if the covariances of groups with the border do not fit in memory."""
    pairs = rows.main.effects * rows.border if rows.meetings is None else rows.meetings.keys.size * rows.main.width
    need = 8.0 * (CROSS_COPIES * pairs + CROSS_COPIES * rows.border**2)
    need += 8.0 * rows.rows * (ROW_ARRAYS + 2 * rows.fixed + 3 * len(rows.factors))
    if need > (there := available_memory()):
        raise ValueError(
            f"the posterior of {rows.main.effects + rows.border:,} effects must fit in memory; got {rows.rows:,} rows, "
            f"which need about {need / 1e9:.1f} GB of {there / 1e9:.1f} GB. Use a coarser grouping for all group terms "
            "but the largest, or fewer columns."
        )


def group_latent(
    X: np.ndarray, factors: list[Factor], offset: np.ndarray | None, posterior: GroupPosterior | MetPosterior
) -> tuple[np.ndarray, np.ndarray]:
    """ϑ and τ² of rows; `factors` are in the posterior's order, and have zeros where a group is new."""
    rows = GroupedRows(X, np.zeros(len(X)), tuple(factors), None, offset)
    mean, covariance = posterior.parts()
    if isinstance(posterior, MetPosterior):
        covariance = covariance._replace(cross=posterior.met.completed(rows.all_meetings(), covariance.border))
    every = slice(0, len(mean.groups))
    parts = [slice(start, start + PREDICTED_ROWS) for start in range(0, max(1, len(X)), PREDICTED_ROWS)]
    found = [row_moments(rows, part, every, mean, covariance) for part in parts]
    theta, tau2 = (np.concatenate(x) for x in zip(*found, strict=True))
    return theta, tau2
