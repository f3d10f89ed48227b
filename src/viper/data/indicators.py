"""y with a column of zeros and ones for each label: the names of the labels, and which of them each row has."""

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from viper.data.blocks import refuse_odd_array
from viper.errors import listed, shown


def has_several_columns(y: Any) -> bool:
    """Return whether y is a table or a matrix with more than one column."""
    shape = getattr(y, "shape", None)
    if shape is None and isinstance(y, list | tuple) and len(y) and not isinstance(y[0], str):
        shape = (len(y), *np.shape(y[0]))
    return shape is not None and len(shape) == 2 and bool(shape[1] > 1)


def read_indicators(y: Any, rows: int, known: Any = None) -> tuple[np.ndarray, Tensor]:
    """Return the names of the labels, and which of them each row has: one byte for each, column by column.

    Labels are named by the columns, or numbered. Unless they are `known`, every label must have rows with it and rows
    without it.
    """
    if y is None:
        raise ValueError("This estimator requires y to be passed, but the target y is None.")
    matrix = as_matrix(y)
    names = label_names(getattr(y, "column_names", getattr(y, "columns", None)), matrix.shape[1], known)
    if len(matrix) != rows:
        raise ValueError(f"X and y must have the same number of rows; got {rows} and {len(matrix)}.")
    found = as_indicators(matrix, names)
    if known is None:
        check_labels_vary(names, found.any(0), ~found.all(0))
    return names, torch.from_numpy(found)


def label_names(columns: Any, count: int, known: Any = None) -> np.ndarray:
    """Return the names of the columns, or their numbers if they have none. They must match known ones."""
    if columns is None:
        names = np.arange(count) if known is None or len(known) != count else np.asarray(known)
    else:
        found = list(columns)
        text = all(isinstance(name, str) for name in found)
        names = np.array(found if text else [str(name) for name in found], dtype=object)
    if len({*names.tolist()}) < len(names):
        raise ValueError(f"the columns of y must have different names; got {listed(names.tolist())}. Rename some.")
    if known is not None and names.tolist() != np.asarray(known).tolist():
        got = listed(names.tolist()) if columns is not None else f"{count} columns"
        raise ValueError(f"y must have the columns of the fit, {listed(np.asarray(known).tolist())}; got {got}.")
    return names


def as_matrix(y: Any) -> np.ndarray:
    """Return y as a dense array with two axes."""
    refuse_odd_array(y, "y")
    if isinstance(y, Tensor):
        y = y.detach().cpu().numpy()
    matrix = y.toarray() if scipy.sparse.issparse(y) else np.asarray(y)
    if matrix.ndim != 2:
        raise ValueError(f"y must have a column for each label of the fit; got shape {matrix.shape}.")
    return matrix


def as_indicators(y: np.ndarray, names: np.ndarray, place: Callable[[int], str] | None = None) -> np.ndarray:
    """Return whether the entries are 1, stored column by column; raises if one is neither 0 nor 1."""
    ones = np.asarray(y == 1, dtype=bool, order="F")
    strange = ~(ones | (y == 0))
    if strange.any():
        i, j = (int(k[0]) for k in np.nonzero(strange))
        where = f"column {shown(names.tolist()[j])}" + ("" if place is None else f" of {place(i)}")
        raise ValueError(
            "y with several columns must contain only 0 and 1, a column for each label; got "
            f"{shown(y[i : i + 1, j].tolist()[0])} in {where}. Fit a column with more classes by itself."
        )
    return ones


def check_labels_vary(names: np.ndarray, some: Any, not_all: Any) -> None:
    """Raise unless each label has rows with it and rows without it."""
    constant = [f"{shown(names.tolist()[j])} (all {int(some[j])})" for j in np.flatnonzero(~(some & not_all))]
    if constant:
        more = f" and {len(constant) - 5} more" if len(constant) > 5 else ""
        raise ValueError(
            f"every label must have rows with 0 and rows with 1; got column {', '.join(constant[:5])}{more}. Leave it "
            "out."
        )
