"""Sums over grouped rows: the expected log-likelihood, its gradient, and its curvature as an arrow.

For row i with effects w ~ N(μ, Σ): ϑ_i = o_i + a_iᵀμ, τ_i² = a_iᵀΣa_i, where a_i has entries at the fixed effects and
at one group of each factor, so that τ² needs only the blocks of Σ that an arrow holds.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import scipy.sparse
import torch

from viper.inference.groups.arrow import Arrow, Split
from viper.inference.groups.rows import GroupedRows
from viper.inference.threads import PASS_THREADS
from viper.softplus.limit import fast_limit, limit

ROUGH_ROW_ERROR = 1e-9


class GroupSums(NamedTuple):
    """Σ c (yϑ - η), the gradient Aᵀ c(y - g), and the curvature Aᵀ diag(c h) A."""

    value: float
    gradient: Split
    gram: Arrow


def row_moments(
    rows: GroupedRows, part: slice, groups: slice, mean: Split, covariance: Arrow
) -> tuple[np.ndarray, np.ndarray]:
    """ϑ and τ² of the rows in a chunk."""
    p, X, main = rows.fixed, rows.X[part], rows.main
    here = main.codes[part] - groups.start
    border = covariance.border
    theta = X @ mean.border[:p]
    tau2 = np.einsum("ij,ij->i", X @ border[:p, :p], X)
    entries = [(place[part], values[part]) for place, values in rows.sparse]
    for k, (place, values) in enumerate(entries):
        theta += values * mean.border[place]
        inner = 2.0 * np.einsum("ij,ij->i", X, border[:, :p][place])
        inner += values * border[place, place]
        for other, its in entries[:k]:
            inner += 2.0 * its * border[place, other]
        tau2 += values * inner
    Z, U = main.columns[part], mean.groups[groups]
    cross, blocks = covariance.cross[groups], covariance.blocks[groups]
    for c in range(main.width):
        z = Z[:, c]
        theta += z * U[:, c][here]
        inner = 2.0 * np.einsum("ij,ij->i", X, cross[:, c, :p][here]) + z * blocks[:, c, c][here]
        for place, values in entries:
            inner += 2.0 * values * cross[here, c, place]
        for before in range(c):
            inner += 2.0 * Z[:, before] * blocks[:, c, before][here]
        tau2 += z * inner
    if rows.offset is not None:
        theta += rows.offset[part]
    return theta, np.maximum(tau2, 0.0)


def over_chunks(rows: GroupedRows, function: Callable[[slice, slice], None]) -> None:
    """Call the function for every chunk, in as many threads as a pass may use."""
    chunks = list(rows.chunks())
    threads = min(PASS_THREADS.get(), len(chunks))
    if threads < 2:
        for chunk in chunks:
            function(*chunk)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda chunk: function(*chunk), chunks))


def grouped_sums(rows: GroupedRows, mean: Split, covariance: Arrow, rough: bool = False) -> GroupSums:
    """One pass over all rows; `rough` formulas have errors of 1e-9 a row."""
    bound = fast_limit(ROUGH_ROW_ERROR) if rough else None
    moments = (bound or limit()).moments
    residual, curvature, values = (np.empty(rows.rows) for _ in range(3))

    def fill(part: slice, groups: slice) -> None:
        theta, tau2 = row_moments(rows, part, groups, mean, covariance)
        eta, slope, bend = (x.numpy() for x in moments(torch.from_numpy(theta), torch.from_numpy(tau2)))
        label = rows.label[part]
        residual[part], curvature[part], values[part] = label - slope, bend, label * theta - eta

    over_chunks(rows, fill)
    if rows.weight is not None:
        residual, curvature, values = (rows.weight * x for x in (residual, curvature, values))
    return GroupSums(float(values.sum()), pulled(rows, residual), weighted_gram(rows, curvature))


def pulled(rows: GroupedRows, vector: np.ndarray) -> Split:
    """Aᵀv."""
    border = np.zeros(rows.border)
    border[: rows.fixed] = vector @ rows.X
    for place, values in rows.sparse:
        border += np.bincount(place, vector * values, minlength=rows.border)
    groups = np.add.reduceat(vector[:, None] * rows.main.columns, rows.first_rows, axis=0)
    return Split(border, groups)


def weighted_gram(rows: GroupedRows, h: np.ndarray) -> Arrow:
    """Aᵀ diag(h) A."""
    p, d, main, X = rows.fixed, rows.border, rows.main, rows.X
    border = np.zeros((d, d))
    border[:p, :p] = X.T @ (h[:, None] * X)
    cross, blocks = np.zeros((main.levels, main.width, d)), np.empty((main.levels, main.width, main.width))
    flat = cross.reshape(-1)
    every = np.arange(rows.rows + 1)
    sparse = [scipy.sparse.csr_array((values, place, every), shape=(rows.rows, d)) for place, values in rows.sparse]
    for k, (place, values) in enumerate(rows.sparse):
        weighted = scipy.sparse.csr_array((h * values, place, every), shape=(rows.rows, d))
        ties = np.asarray(weighted.T @ X)
        border[:, :p] += ties
        border[:p, :] += ties.T
        border[np.diag_indices(d)] += np.bincount(place, h * values**2, minlength=d)
        for other in sparse[:k]:
            meeting = (weighted.T @ other).tocoo()
            np.add.at(border, (meeting.row, meeting.col), meeting.data)
            np.add.at(border, (meeting.col, meeting.row), meeting.data)
    for c in range(main.width):
        hz = h * main.columns[:, c]
        cross[:, c, :p] = np.add.reduceat(hz[:, None] * X, rows.first_rows, axis=0)
        for place, values in rows.sparse:
            at = (main.codes * main.width + c) * d + place
            flat += np.bincount(at, hz * values, minlength=flat.size)
        blocks[:, c, :] = np.add.reduceat(hz[:, None] * main.columns, rows.first_rows, axis=0)
    return Arrow(border, cross, blocks)
