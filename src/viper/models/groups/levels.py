"""Which group each row belongs to: what a user passes as `groups`, learned once and applied to other rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from viper.errors import RowError, instead, listed, shown
from viper.formula.columns import as_column, level_codes, python_value, sorted_values
from viper.formula.grammar import GroupTerm
from viper.formula.screening import Remark, cell_words
from viper.models.effects import NEW_GROUP

if TYPE_CHECKING:
    import pandas

ONLY_GROUP = "group"  # the name of groups that are given as one array without a name
MOST_BORDER = 6_000  # fixed effects and effects of all factors but the largest, whose covariance is dense
AVERAGE = "average"  # what happens to new groups, if not an error


@dataclass(frozen=True)
class GroupFactor:
    """One group term and what it learned: its groups in order, how many rows each had, the columns of its slopes."""

    term: GroupTerm
    levels: list[Any]
    rows: np.ndarray
    slopes: list[int]  # places of the slopes' columns in X

    @property
    def width(self) -> int:
        return self.term.intercept + len(self.slopes)

    @property
    def effects(self) -> list[str]:
        """Names of the effects of a group: intercept, then slopes."""
        return [*(["intercept"] if self.term.intercept else []), *self.term.slopes]

    def multiplied(self, X: np.ndarray) -> np.ndarray:
        """What the effects of a row's group are multiplied by, n × r."""
        ones = [np.ones((len(X), 1))] if self.term.intercept else []
        return np.concatenate([*ones, X[:, self.slopes]], 1)

    def codes(self, table: "pandas.DataFrame") -> np.ndarray:
        """The number of each row's group, or -1 for one that the fit did not have."""
        return level_codes(joined_columns(table, self.term.columns), self.levels)


def as_group_table(groups: Any, rows: int) -> "pandas.DataFrame":
    """Return `groups` as a table: one array, or a column for each way of grouping."""
    import pandas

    if groups is None:
        raise ValueError("groups must say to which group each row belongs; got none. Pass groups=, such as an array.")
    if isinstance(groups, pandas.DataFrame):
        table = groups
    elif isinstance(groups, Mapping):
        table = pandas.DataFrame({str(name): np.asarray(as_column(column)) for name, column in groups.items()})
    elif hasattr(groups, "to_pandas") and hasattr(groups, "columns"):
        table = groups.to_pandas()
    else:
        column = groups if isinstance(groups, pandas.Series) else pandas.Series(np.asarray(as_column(groups)).squeeze())
        table = column.to_frame(column.name if isinstance(column.name, str) else ONLY_GROUP)
    if len(table) != rows:
        raise ValueError(f"groups must have one entry per row; got {len(table)} for {rows} rows.")
    return table.set_axis([str(name) for name in table.columns], axis=1)


def joined_columns(table: "pandas.DataFrame", columns: tuple[str, ...]) -> "pandas.Series[Any]":
    """Return one column, or several as text such as "north:3". A row without a value has no group."""
    if len(columns) == 1:
        return table[columns[0]]
    text = table[columns[0]].astype(object).map(group_text)
    for name in columns[1:]:
        text = text + ":" + table[name].astype(object).map(group_text)
    return text.mask(table[[*columns]].isna().any(axis=1)).rename(":".join(columns))


def group_text(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value)


def learn_factor(term: GroupTerm, table: "pandas.DataFrame", names: list[str], X: np.ndarray) -> GroupFactor:
    """Learn the groups of a term, and check that the rows can determine its effects."""
    import pandas

    if absent := [name for name in term.columns if name not in table.columns]:
        raise ValueError(f"{term} must name columns of groups; got {absent[0]!r}. {instead(absent[0], table.columns)}")
    if absent := [name for name in term.slopes if name not in names]:
        raise ValueError(
            f"a slope in {term} must be a column of numbers that is also a term by itself; got {absent[0]!r}. "
            f"{instead(absent[0], names)}"
        )
    column = joined_columns(table, term.columns)
    if column.isna().any():
        row = column.index[int(np.flatnonzero(column.isna())[0])]
        raise RowError(f"every row must have a group of {term.name!r}", "none", row, "Leave such rows out.")
    codes, found = pandas.factorize(column)
    try:
        levels = [python_value(level) for level in sorted_values(found)]
    except TypeError:
        kinds = sorted({type(level).__name__ for level in found})
        raise ValueError(f"groups of {term.name!r} must be of one kind; got {', '.join(kinds)}. Recode them.") from None
    rows = np.bincount(level_codes(column, levels), minlength=len(levels))
    if len(levels) < 2:
        raise ValueError(
            f"{term} must have at least two groups; got one, {shown(levels[0])}. Leave the term out: one group's "
            "intercept is the intercept of all."
        )
    if rows.max() == 1:
        raise ValueError(
            f"some groups of {term} must have several rows; got one row in each of {len(levels):,} groups, which says "
            "nothing about how groups differ. Leave the term out."
        )
    slopes = [names.index(name) for name in term.slopes]
    for name, place in zip(term.slopes, slopes, strict=True):
        spread = pandas.Series(X[:, place]).groupby(codes).agg(np.ptp)
        if not (spread > 0.0).any():
            raise ValueError(
                f"the slope of {name!r} in {term} must vary within some group; got one value in each. Its effect "
                f"belongs to the groups: keep {name!r} as a term by itself, and remove it left of |."
            )
    return GroupFactor(term, levels, rows, slopes)


def new_group_error(factor: GroupFactor, column: "pandas.Series[Any]", codes: np.ndarray) -> RowError:
    """The error for rows whose group was not in the fit."""
    row = int(np.flatnonzero(codes < 0)[0])
    value = column.iloc[row]
    return RowError(
        f"groups of {factor.term.name!r} must be among the {len(factor.levels):,} of the fit",
        shown(python_value(value)),
        column.index[row],
        f"Set new_groups={AVERAGE!r} to average over the effects it may have, or correct it.",
    )


def named_new(factor: GroupFactor, table: "pandas.DataFrame") -> np.ndarray:
    """The rows whose group is "new", which stands for a new group."""
    asked = np.zeros(len(table), dtype=bool)
    for name in factor.term.columns:
        if table[name].dtype.kind not in "biuf":
            asked |= (table[name].astype(object) == NEW_GROUP).to_numpy(dtype=bool, na_value=False)
    return asked


def group_remarks(factor: GroupFactor, table: "pandas.DataFrame", averaged: bool) -> list[Remark]:
    """Remarks on rows whose group was not in the fit."""
    column = joined_columns(table, factor.term.columns)
    new = factor.codes(table) < 0
    name = factor.term.name
    if not new.any():
        return []

    def text(row: int) -> str:
        end = "a new group, averaged over its possible effects" if averaged else "not in the training data"
        return f"{name} = {cell_words(column.iloc[row])} is {end}"

    return [Remark("averaged" if averaged else "unseen", name, new, text)]


def check_border(factors: list[GroupFactor], fixed: int) -> None:
    """Raise if the effects of all factors but the largest are too many for a dense covariance."""
    sizes = sorted(((len(factor.levels) * factor.width, factor) for factor in factors), key=lambda pair: -pair[0])
    border = fixed + sum(size for size, _ in sizes[1:])
    if border > MOST_BORDER:
        terms = listed([str(factor.term) for _, factor in sizes])
        raise ValueError(
            f"all group terms but the largest may have {MOST_BORDER:,} effects together; got {border:,} of {terms}. "
            "Use a coarser grouping, or only one of the large ones."
        )
