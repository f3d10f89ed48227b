"""Rows in memory: whatever an array is, checked and as a source for the solver."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from viper.data import checks
from viper.inference.device import FEWEST_ROWS, choose_device, is_one_block, rows_fit, rows_per_block
from viper.inference.rows import BLOCK_ROWS, Arrays


@dataclass(frozen=True)
class RowFormat:
    """How an estimator wants its rows: with a column of ones or without, on which device, in which precision.

    If the model is `linear` in X, entries that are not finite show in the sums, so that there is no need to look for
    them first.
    """

    intercept: bool = False
    device: Any = None
    dtype: str = "float64"
    verbose: Any = "auto"  # whether progress is shown while rows are counted
    linear: bool = False
    block_rows: int | None = None  # as many as suit the device, if None

    def rows_per_block(self, width: int, device: torch.device, resident: int | None = None) -> int:
        """Rows of a block with `width` features; `resident` is the number of all rows, if they are on the device."""
        if self.block_rows is not None or device.type == "cpu":
            return self.block_rows or BLOCK_ROWS
        if resident is not None and is_one_block(resident, width):
            return max(resident, FEWEST_ROWS)
        return rows_per_block(width, device)


def unlabelled_arrays(estimator: Any, X: Any, offset: Any, format: RowFormat) -> Arrays:
    """Rows to predict; their labels mean nothing."""
    X = checks.read_features(estimator, X, reset=False)
    label = torch.zeros(X.shape[0], dtype=torch.bool)
    return as_arrays(X, label, format, offset=checks.read_vector(offset, "offset", X.shape[0]))


def as_arrays(
    X: Any, label: Tensor, format: RowFormat, *, offset: Tensor | None = None, weight: Tensor | None = None
) -> Arrays:
    """Checked arrays as a source of rows, on the device of the format."""
    rows, intercept = X.shape[0], format.intercept
    device = choose_device(format.device, X)
    if isinstance(X, np.ndarray):
        X = checks.as_tensor(X)
    elif scipy.sparse.issparse(X):
        if device.type != "cpu":
            raise ValueError(f"a sparse X is computed on the CPU; got device={str(device)!r}. Leave device out.")
        X = X.astype(np.float64)
        if intercept:
            X = scipy.sparse.hstack([X, np.ones((rows, 1))], format="csr")
            intercept = False
    if device.type != "cpu":
        # once, so that no pass waits for a transfer
        label, offset, weight = (x if x is None else x.to(device) for x in (label, offset, weight))  # type: ignore[assignment]
        if X.device != device and rows_fit(X.nbytes, device):
            X = X.to(device).contiguous()
    resident = rows if device.type != "cpu" and X.device == device else None
    return Arrays(
        X,
        label,
        intercept=intercept,
        offset=offset,
        weight=weight,
        device=device,
        dtype=getattr(torch, format.dtype),
        block_rows=format.rows_per_block(X.shape[1], device, resident),
    )
