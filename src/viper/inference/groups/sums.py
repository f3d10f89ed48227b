"""Sums over grouped rows: the expected log-likelihood, its gradient, and its curvature as an arrow.

For row i with effects w ~ N(μ, Σ): ϑ_i = o_i + a_iᵀμ, τ_i² = a_iᵀΣa_i, where a_i has entries at the fixed effects and
at one group of each factor, so that τ² needs only the blocks of Σ that an arrow holds.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import scipy.sparse
import torch

from viper.inference.groups.arrow import Arrow, Split
from viper.inference.groups.met import Met
from viper.inference.groups.rows import GroupedRows
from viper.inference.threads import PASS_THREADS, one_thread
from viper.softplus.limit import fast_limit, limit

ROUGH_ROW_ERROR = 1e-9
ChunkResult = TypeVar("ChunkResult")


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
    met, blocks = covariance.cross, covariance.blocks[groups]
    sparse = isinstance(met, Met)
    cross = met.fixed_part(groups) if sparse else met[groups]
    for c in range(main.width):
        z = Z[:, c]
        theta += z * U[:, c][here]
        inner = 2.0 * np.einsum("ij,ij->i", X, cross[:, c, :p][here]) + z * blocks[:, c, c][here]
        for k, (place, values) in enumerate(entries):
            inner += 2.0 * values * (met.values[met.at.entries[k][part], c] if sparse else cross[here, c, place])
        for before in range(c):
            inner += 2.0 * Z[:, before] * blocks[:, c, before][here]
        tau2 += z * inner
    if rows.offset is not None:
        theta += rows.offset[part]
    return theta, np.maximum(tau2, 0.0)


def expected_terms(label: np.ndarray, theta: np.ndarray, tau2: np.ndarray) -> np.ndarray:
    """yϑ - η of each row."""
    return label * theta - limit().moments(torch.from_numpy(theta), torch.from_numpy(tau2))[0].numpy()


def over_chunks(rows: GroupedRows, function: Callable[[slice, slice], ChunkResult]) -> list[ChunkResult]:
    """Call the function for every chunk, in as many threads as a pass may use; results are in the chunks' order."""
    chunks = list(rows.chunks())
    threads = min(PASS_THREADS.get(), len(chunks))
    if threads < 2:
        return [function(*chunk) for chunk in chunks]

    def alone(chunk: tuple[slice, slice]) -> ChunkResult:
        with one_thread():  # OpenMP's limit belongs to a thread
            return function(*chunk)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(alone, chunks))


def grouped_sums(rows: GroupedRows, mean: Split, covariance: Arrow, rough: bool = False) -> GroupSums:
    """One pass over all rows; `rough` formulas have errors of 1e-9 per row."""
    bound = fast_limit(ROUGH_ROW_ERROR) if rough else None
    moments = (bound or limit()).moments

    def of_chunk(part: slice, groups: slice) -> tuple[float, Split, "ChunkGram"]:
        theta, tau2 = row_moments(rows, part, groups, mean, covariance)
        eta, slope, bend = (x.numpy() for x in moments(torch.from_numpy(theta), torch.from_numpy(tau2)))
        label = rows.label[part]
        residual, values = label - slope, label * theta - eta
        if rows.weight is not None:
            residual, bend, values = (rows.weight[part] * x for x in (residual, bend, values))
        return float(values.sum()), pulled_chunk(rows, part, groups, residual), chunk_gram(rows, part, groups, bend)

    found = over_chunks(rows, of_chunk)
    gradient = joined_splits([split for _, split, _ in found])
    return GroupSums(math.fsum(value for value, _, _ in found), gradient, joined_gram(rows, [x for _, _, x in found]))


def joined_splits(parts: list[Split]) -> Split:
    """Add up the borders and concatenate the groups."""
    return Split(np.sum([part.border for part in parts], axis=0), np.concatenate([part.groups for part in parts]))


def pulled(rows: GroupedRows, vector: np.ndarray) -> Split:
    """Aᵀv."""
    return joined_splits([pulled_chunk(rows, part, groups, vector[part]) for part, groups in rows.chunks()])


def pulled_chunk(rows: GroupedRows, part: slice, groups: slice, vector: np.ndarray) -> Split:
    border = np.zeros(rows.border)
    border[: rows.fixed] = vector @ rows.X[part]
    for place, values in rows.sparse:
        border += np.bincount(place[part], vector * values[part], minlength=rows.border)
    return Split(border, sums_of_groups(rows, part, groups, vector[:, None] * rows.main.columns[part]))


def sums_of_groups(rows: GroupedRows, part: slice, groups: slice, values: np.ndarray) -> np.ndarray:
    """Sum values over the rows of each main group in a chunk."""
    return np.add.reduceat(values, rows.first_rows[groups] - part.start, axis=0)


class ChunkGram(NamedTuple):
    """Aᵀ diag(h) A of a chunk: fixed effects, other effects with them and with each other, and the groups' parts."""

    fixed: np.ndarray  # p × p
    ties: np.ndarray  # d × p
    meetings: list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # rows, columns and entries
    cross: np.ndarray
    blocks: np.ndarray


def chunk_gram(rows: GroupedRows, part: slice, groups: slice, h: np.ndarray) -> ChunkGram:
    p, d, main, X = rows.fixed, rows.border, rows.main, rows.X[part]
    count, width, every = groups.stop - groups.start, main.width, np.arange(len(h) + 1)
    entries = [(place[part], values[part]) for place, values in rows.sparse]
    ties, meetings = np.zeros((d, p)), []
    for k, (place, values) in enumerate(entries):
        weighted = scipy.sparse.csr_array((h * values, place, every), shape=(len(h), d))
        ties += weighted.T @ X
        diagonal = np.bincount(place, h * values**2, minlength=d)
        at = np.flatnonzero(diagonal)
        meetings.append((at, at, diagonal[at]))
        for other, its in entries[:k]:
            met = (weighted.T @ scipy.sparse.csr_array((its, other, every), shape=(len(h), d))).tocoo()
            meetings += [(met.row, met.col, met.data), (met.col, met.row, met.data)]
    blocks = np.empty((count, width, width))
    for c in range(width):
        blocks[:, c, :] = sums_of_groups(rows, part, groups, (h * main.columns[part, c])[:, None] * main.columns[part])
    cross = chunk_cross(rows, part, groups, h, entries)
    return ChunkGram(X.T @ (h[:, None] * X), ties, meetings, cross, blocks)


def chunk_cross(
    rows: GroupedRows, part: slice, groups: slice, h: np.ndarray, entries: list[tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """The cross part of a chunk: groups × r × d, or entries × r where pairs meet."""
    p, d, main, X, at = rows.fixed, rows.border, rows.main, rows.X[part], rows.meetings
    count, width = groups.stop - groups.start, main.width
    if at is None:
        cross = np.zeros((count, width, d))
        flat, here = cross.reshape(-1), (main.codes[part] - groups.start) * width
        for c in range(width):
            hz = h * main.columns[part, c]
            for place, values in entries:
                flat += np.bincount((here + c) * d + place, hz * values, minlength=flat.size)
            cross[:, c, :p] = sums_of_groups(rows, part, groups, hz[:, None] * X)
        return cross
    span = at.span(groups)
    cross = np.zeros((span.stop - span.start, width))
    for c in range(width):
        hz = h * main.columns[part, c]
        for entry, (_, values) in zip(at.entries, entries, strict=True):
            cross[:, c] += np.bincount(entry[part] - span.start, hz * values, minlength=len(cross))
        cross[at.fixed_entries(groups) - span.start, c] = sums_of_groups(rows, part, groups, hz[:, None] * X)
    return cross


def joined_gram(rows: GroupedRows, parts: list[ChunkGram]) -> Arrow:
    """The sum over chunks as an arrow."""
    p, d = rows.fixed, rows.border
    border = np.zeros((d, d))
    border[:p, :p] = np.sum([part.fixed for part in parts], axis=0)
    ties = np.sum([part.ties for part in parts], axis=0)
    border[p:, :p], border[:p, p:] = ties[p:], ties[p:].T
    for part in parts:
        for row, column, entry in part.meetings:
            np.add.at(border, (row, column), entry)
    cross: Any = np.concatenate([part.cross for part in parts])
    if rows.meetings is not None:
        cross = Met(rows.meetings, cross)
    return Arrow(border, cross, np.concatenate([part.blocks for part in parts]))


def weighted_gram(rows: GroupedRows, h: np.ndarray) -> Arrow:
    """Aᵀ diag(h) A."""
    return joined_gram(rows, [chunk_gram(rows, part, groups, h[part]) for part, groups in rows.chunks()])
