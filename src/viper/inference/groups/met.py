"""The cross part of an arrow in sparse form: entries only where a group meets an effect of the border.

A group of the main factor meets all fixed effects, and the effects of other factors that occur in its rows. With two
large crossed factors, few of all pairs meet. The other entries of a precision are zero; those of a covariance are not
needed, because no row has them. The border itself is dense.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse

PAIRS_AT_ONCE = 1 << 22  # pairs of entries of the same group


@dataclass(frozen=True)
class Meetings:
    """Which effects of the border each group meets. Entries are sorted by group, then by column."""

    column: np.ndarray  # of each entry
    first: np.ndarray  # entry of each group, and at the end the number of entries
    border: int  # d
    fixed: int  # p: the first columns, which every group meets
    entries: list[np.ndarray] = field(default_factory=list)  # of each row, for each column of the other factors

    @property
    def groups(self) -> int:
        return len(self.first) - 1

    @cached_property
    def owner(self) -> np.ndarray:
        """The group of each entry."""
        return np.repeat(np.arange(self.groups), np.diff(self.first))

    @cached_property
    def keys(self) -> np.ndarray:
        """A number for each entry, in increasing order."""
        return self.owner * self.border + self.column

    def fixed_entries(self, groups: slice) -> np.ndarray:
        """Entries of the fixed effects, groups × p."""
        return self.first[groups][:, None] + np.arange(self.fixed)

    def span(self, groups: slice) -> slice:
        """The entries of some groups."""
        return slice(int(self.first[groups.start]), int(self.first[groups.stop]))


def meetings_of(codes: np.ndarray, groups: int, places: list[np.ndarray], border: int, fixed: int) -> Meetings:
    """Find the meetings from the main group of each row, and the places in the border that the row meets."""
    always = (np.arange(groups)[:, None] * border + np.arange(fixed)).ravel()
    own = [codes * border + place for place in places]
    keys = np.unique(np.concatenate([always, *own]))
    first = np.searchsorted(keys, np.arange(groups + 1) * border)
    return Meetings(keys % border, first, border, fixed, [np.searchsorted(keys, key) for key in own])


@dataclass(frozen=True)
class Met:
    """Entries (r for each pair) of the cross part, G × r × d, where pairs meet."""

    at: Meetings
    values: np.ndarray  # entries × r

    __array_ufunc__ = None  # so that number * this does not become an array of objects

    def __add__(self, other: "Met") -> "Met":
        return Met(self.at, self.values + other.values)

    def __sub__(self, other: "Met") -> "Met":
        return Met(self.at, self.values - other.values)

    def __mul__(self, number: float) -> "Met":
        return Met(self.at, self.values * number)

    def __rmul__(self, number: float) -> "Met":
        return self * number

    def __truediv__(self, number: float) -> "Met":
        return self * (1.0 / number)

    @property
    def width(self) -> int:
        return self.values.shape[1]

    @cached_property
    def matrix(self) -> Any:
        """Return a sparse matrix, groups and effects × border."""
        at, r = self.at, self.width
        shape = at.groups * r, at.border
        if r == 1:
            return scipy.sparse.csr_array((self.values[:, 0], at.column, at.first), shape=shape)
        rows = (at.owner[:, None] * r + np.arange(r)).ravel()
        return scipy.sparse.coo_array((self.values.ravel(), (rows, np.repeat(at.column, r))), shape=shape).tocsr()

    def tied(self, inner: np.ndarray) -> "Met":
        """C⁻¹B, from C⁻¹."""
        return Met(self.at, np.einsum("eij,ej->ei", inner[self.at.owner], self.values))

    def complement(self, ties: "Met") -> np.ndarray:
        """Bᵀ C⁻¹ B."""
        return np.asarray((self.matrix.T @ ties.matrix).toarray())

    def times_dense(self, top: np.ndarray) -> "Met":
        """The entries of W S⁻¹ where pairs meet, if this is W."""
        at, sizes = self.at, np.diff(self.at.first)
        found = np.empty_like(self.values)
        ends = np.cumsum(sizes.astype(np.int64) ** 2)
        start = 0
        while start < at.groups:
            before = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + PAIRS_AT_ONCE, side="right")))
            span = at.span(slice(start, stop))
            each = np.repeat(sizes[start:stop], sizes[start:stop])  # pairs of each entry
            left = np.repeat(np.arange(span.start, span.stop), each)
            begin = np.cumsum(each) - each
            right = np.arange(len(left)) - np.repeat(begin - at.first[at.owner[span]], each)
            between = top[at.column[left], at.column[right]]
            found[span] = np.add.reduceat(between[:, None] * self.values[right], begin)
            start = stop
        return Met(at, found)

    def within(self, other: "Met") -> np.ndarray:
        """Sum over the border of products with another cross part, G × r × r."""
        return np.add.reduceat(self.values[:, :, None] * other.values[:, None, :], self.at.first[:-1])

    def outer(self, groups: np.ndarray, border: np.ndarray) -> "Met":
        """The outer product of a vector of effects (G × r) and one of the border."""
        return Met(self.at, groups[self.at.owner] * border[self.at.column][:, None])

    def fixed_part(self, groups: slice) -> np.ndarray:
        """The entries of fixed effects, groups × r × p."""
        return self.values[self.at.fixed_entries(groups)].transpose(0, 2, 1)

    def completed(self, at: Meetings, border: np.ndarray) -> "Met":
        """A covariance at other pairs: given the effects that it has met, a group is independent of all others."""
        place = np.searchsorted(self.at.keys, at.keys).clip(max=len(self.at.keys) - 1)
        known = self.at.keys[place] == at.keys
        values = np.where(known[:, None], self.values[place], 0.0)
        if not known.all():
            ties, new = self.conditional_ties(border), np.flatnonzero(~known)
            for e in new:  # T_g Σ[met, j]
                span = self.at.span(slice(at.owner[e], at.owner[e] + 1))
                values[e] = border[at.column[e], self.at.column[span]] @ ties.values[span]
        return Met(at, values)

    def conditional_ties(self, border: np.ndarray) -> "Met":
        """T with Cov(b_g, w_met) = T_g Var(w_met), if this is a covariance."""
        sizes, found = np.diff(self.at.first), np.empty_like(self.values)
        for size in np.unique(sizes):
            groups = np.flatnonzero(sizes == size)
            for some in np.array_split(groups, max(1, len(groups) * size * size // PAIRS_AT_ONCE)):
                entries = self.at.first[some][:, None] + np.arange(size)
                columns = self.at.column[entries]
                inside = border[columns[:, :, None], columns[:, None, :]]
                found[entries] = np.linalg.solve(inside, self.values[entries])
        return Met(self.at, found)
