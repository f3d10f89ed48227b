"""The levels of an outcome and their order: that of pandas categories, of a given list, or of sorted numbers."""

from typing import Any

import numpy as np
import torch
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from viper.data.blocks import refuse_odd_array
from viper.data.checks import plain_labels, refuse_missing_labels
from viper.errors import shown

GIVE_ORDER = "Pass categories=[...] from the lowest to the highest, or an ordered pandas Categorical."


def read_levels(y: Any, categories: Any, complete: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return the levels from the lowest to the highest, and the number of each row's level.

    With `complete`, every level must occur.
    """
    if y is None:
        raise ValueError("This estimator requires y to be passed, but the target y is None.")
    kind = getattr(y, "dtype", None)
    of_type = getattr(kind, "categories", None)
    if isinstance(y, Tensor):
        y = y.detach().cpu().numpy()
    refuse_odd_array(y, "y")
    if of_type is not None and hasattr(y, "isna") and bool(np.asarray(y.isna()).any()):
        raise ValueError("y must have a level in every row; got none in some. Drop those rows.")
    values = column_or_1d(plain_labels(np.asarray(y) if of_type is not None else y), warn=True)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise ValueError("y must be finite; Input y contains NaN or infinity. Drop those rows.")
    if values.dtype.kind == "O":
        refuse_missing_labels(values)
    if categories is not None:
        levels = given_levels(categories)
    elif of_type is not None:
        if not kind.ordered:  # type: ignore[union-attr]
            raise ValueError(f"the levels of y must have an order; got unordered categories. {GIVE_ORDER}")
        levels = given_levels(of_type)
    else:
        check_classification_targets(values)
        levels = sorted_levels(values)
    numbers = level_numbers(values, levels)
    if complete:
        check_levels(levels, np.bincount(numbers, minlength=len(levels)))
    return levels, numbers


def given_levels(categories: Any) -> np.ndarray:
    """Check levels that are given in order."""
    found = list(categories) if not isinstance(categories, str) and np.iterable(categories) else [categories]
    if len(found) < 2 or len({*map(str, found)}) < len(found):
        raise ValueError(
            f"categories must be a list of at least two different levels in order; got {shown(categories)}."
        )
    return np.asarray(found, dtype=object if any(isinstance(one, str) for one in found) else None)


def sorted_levels(values: np.ndarray) -> np.ndarray:
    """The numbers in y, sorted. Words have no order of their own."""
    if values.dtype.kind not in "biuf":
        try:
            if not all(isinstance(one, bool | int | float | np.number) for one in values):
                raise TypeError
            return np.unique(values.astype(float))
        except TypeError:
            first = shown(values.tolist()[0]) if len(values) else "nothing"
            raise ValueError(f"the levels of y must have an order; got words such as {first}. {GIVE_ORDER}") from None
    return np.unique(values)


def level_numbers(values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The number of each row's level; raises for one that is not known."""
    places = {level: number for number, level in enumerate(levels.tolist())}
    distinct, inverse = np.unique(values, return_inverse=True) if values.dtype.kind != "O" else (None, None)
    known = [places.get(value, -1) for value in (values if distinct is None else distinct).tolist()]
    numbers = np.asarray(known, dtype=np.int64)
    numbers = numbers if inverse is None else numbers[inverse]
    if (numbers < 0).any():
        strange = values[numbers < 0].tolist()[0]
        raise ValueError(
            f"y must contain only the known levels {shown(levels.tolist())}; got {shown(strange)}. Recode it, or name "
            "all levels in categories."
        )
    return numbers


def check_levels(levels: np.ndarray, counts: Any) -> None:
    """Raise unless there are at least two levels, and all of them have rows."""
    if not len(levels):
        raise ValueError("y must have rows; got none.")
    if len(levels) < 2:
        raise ValueError(
            f"y must have at least two levels; got 1 class: {shown(levels.tolist()[0])}. Add rows of another level."
        )
    if (empty := np.flatnonzero(np.asarray(counts) <= 0)).size:
        name = shown(levels.tolist()[empty[0]])
        raise ValueError(
            f"every level, or class, must have rows of positive weight; got none for {name}. Leave it out, with "
            "y.cat.remove_unused_categories() if it is a pandas category, or merge it with its neighbour."
        )


def as_labels(numbers: np.ndarray, levels: int) -> Tensor:
    """Labels as sources keep them: booleans for two levels."""
    return torch.from_numpy(numbers == 1 if levels == 2 else numbers.astype(np.int32))
