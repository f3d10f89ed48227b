"""Rows in groups: the log-odds of row i are o_i + x_iᵀβ + Σ_f z_ifᵀ b_f[g_f(i)], with a factor f for each grouping.

The factor with the most effects is the main one: rows are sorted by its groups, whose effects are independent given
all others. Fixed effects and the effects of other factors form the border.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from viper.inference.groups.met import Meetings, Met, meetings_of

DENSE_CROSS = 1 << 20  # entries up to which a cross part is dense
SPARSE_SHARE = 0.2  # share of pairs that meet above which it is dense anyway
SORTED_ROWS = 1 << 15  # rows whose log-odds are computed at a time: their arrays fit in the cache


@dataclass(frozen=True)
class Factor:
    """One way of grouping rows: `codes` of groups 0 … levels-1, and what their effects multiply (n × r)."""

    codes: np.ndarray
    levels: int
    columns: np.ndarray

    @property
    def width(self) -> int:
        """r, the number of effects of a group."""
        return self.columns.shape[1]

    @property
    def effects(self) -> int:
        return self.levels * self.width

    def take(self, index: np.ndarray) -> "Factor":
        return Factor(self.codes[index], self.levels, self.columns[index])

    @cached_property
    def counts(self) -> np.ndarray:
        """Rows of each group."""
        return np.bincount(self.codes, minlength=self.levels)


@dataclass(frozen=True)
class GroupedRows:
    """Design X (n × p), labels, factors with the main one first, and optional weights and offsets.

    Rows must be sorted by the main factor's codes, all of which occur.
    """

    X: np.ndarray
    label: np.ndarray
    factors: tuple[Factor, ...]
    weight: np.ndarray | None = None
    offset: np.ndarray | None = None
    places: np.ndarray | None = None  # where each row was before sorting

    @property
    def main(self) -> Factor:
        return self.factors[0]

    @property
    def others(self) -> tuple[Factor, ...]:
        return self.factors[1:]

    @property
    def rows(self) -> int:
        return len(self.label)

    @property
    def fixed(self) -> int:
        """p, the number of fixed effects."""
        return self.X.shape[1]

    @cached_property
    def starts(self) -> list[int]:
        """Where each factor's effects begin in the border, which does not contain those of the main factor."""
        ends = np.cumsum([self.fixed, *(factor.effects for factor in self.others)])
        return [0, *ends[:-1].tolist()]

    @property
    def border(self) -> int:
        """Size of the border: fixed effects and the effects of all factors but the main one."""
        return self.fixed + sum(factor.effects for factor in self.others)

    @cached_property
    def sparse(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The border's design besides X: for each column of each other factor, its places and its values."""
        found = []
        for factor, start in zip(self.others, self.starts[1:], strict=True):
            places = start + factor.codes * factor.width
            found += [(places + c, factor.columns[:, c]) for c in range(factor.width)]
        return found

    @cached_property
    def meetings(self) -> Meetings | None:
        """Which effects of the border each main group meets, if these are few; otherwise None."""
        pairs = self.main.levels * self.border
        most = self.main.levels * self.fixed + self.rows * len(self.sparse)
        dense = pairs * self.main.width <= DENSE_CROSS or most > SPARSE_SHARE * pairs
        return None if dense else self.all_meetings()

    def all_meetings(self) -> Meetings:
        places = [place for place, _ in self.sparse]
        return meetings_of(self.main.codes, self.main.levels, places, self.border, self.fixed)

    def empty_cross(self) -> Any:
        """A cross part of zeros."""
        if self.meetings is None:
            return np.zeros((self.main.levels, self.main.width, self.border))
        return Met(self.meetings, np.zeros((len(self.meetings.column), self.main.width)))

    @cached_property
    def first_rows(self) -> np.ndarray:
        """The first row of each main group."""
        return np.concatenate([[0], np.cumsum(self.main.counts)[:-1]])

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Yield rows and main groups of chunks that do not split groups."""
        last = np.append(self.first_rows[1:], self.rows)
        group = 0
        while group < self.main.levels:
            start = int(self.first_rows[group])
            end = max(group + 1, int(np.searchsorted(last, start + SORTED_ROWS, side="right")))
            yield slice(start, int(last[end - 1])), slice(group, end)
            group = end

    def some_groups(self, groups: np.ndarray) -> "GroupedRows":
        """Return the rows of some main groups; the other factors keep all their levels."""
        chosen = np.zeros(self.main.levels, dtype=bool)
        chosen[groups] = True
        index = np.flatnonzero(chosen[self.main.codes])
        number = np.cumsum(chosen) - 1
        main = Factor(number[self.main.codes[index]], int(chosen.sum()), self.main.columns[index])
        weight, offset = (None if x is None else x[index] for x in (self.weight, self.offset))
        others = tuple(factor.take(index) for factor in self.others)
        return GroupedRows(self.X[index], self.label[index], (main, *others), weight, offset)


def sorted_rows(
    X: np.ndarray,
    label: np.ndarray,
    factors: list[Factor],
    weight: np.ndarray | None = None,
    offset: np.ndarray | None = None,
) -> tuple[GroupedRows, list[int]]:
    """Return the rows, sorted by the factor with the most effects, and the new order of the factors."""
    order = sorted(range(len(factors)), key=lambda f: -factors[f].effects)
    index = np.argsort(factors[order[0]].codes, kind="stable")
    weight, offset = (None if x is None else x[index] for x in (weight, offset))
    grouped = tuple(factors[f].take(index) for f in order)
    return GroupedRows(np.ascontiguousarray(X[index]), label[index], grouped, weight, offset, index), order
