"""From whatever rows are kept in to a source that the solver can sum over: the one place where the kinds part.

An estimator says in a `Form` how it wants its rows and gets a source; what the rows came as matters no further.
"""

from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import validate_data

from viper.data import checks
from viper.data.files import Description, Reader, describe
from viper.data.stream import Stream, scan
from viper.inference.device import choose_device, rows_per_block
from viper.inference.progress import Progress
from viper.inference.rows import BLOCK_ROWS, Arrays, Source


@dataclass(frozen=True)
class Form:
    """How an estimator wants its rows: with a column of ones, where, in which precision, and how loudly.

    To one that is `linear` sums tell of every entry of X that is not finite, so that there is no need to look first.
    """

    intercept: bool = False
    device: Any = None
    dtype: str = "float64"
    verbose: Any = "auto"
    linear: bool = False


def kept_elsewhere(X: Any) -> bool:
    """Whether X stands for rows that are not in memory."""
    return is_dask(X) or describe(X) is not None


def labelled(
    estimator: Any,
    X: Any,
    y: Any,
    sample_weight: Any,
    offset: Any,
    form: Form,
    *,
    reset: bool = False,
    classes: Any = None,
) -> tuple[np.ndarray, Source]:
    """The two classes (the known ones, or those found in y) and a source of the rows.

    With `reset` the estimator learns number and names of the columns, else they must be as it knows them.
    """
    if is_dask(X):
        from viper.data.dask import collections

        kept = {"intercept": form.intercept, "device": form.device, "dtype": form.dtype, "linear": form.linear}
        return collections.labelled(estimator, X, y, sample_weight, offset, reset=reset, classes=classes, **kept)
    description = describe(X, y, sample_weight, offset)
    if description is not None:
        reader = opened(estimator, description, labels=True, reset=reset)
        with closing(Progress(form.verbose)) as progress:
            classes, count = scan(reader, classes, progress.rows_done)
        return classes, streamed(reader, classes, count, form)
    X = checks.read_features(estimator, X, reset=reset)
    classes, label = checks.read_labels(y, X.shape[0], classes)
    return classes, as_arrays(X, label, sample_weight, offset, form)


def unlabelled(estimator: Any, X: Any, offset: Any, form: Form) -> Arrays | Stream:
    """A source of rows to predict; their labels say nothing."""
    description = describe(X, offset=offset)
    if description is not None:
        return streamed(opened(estimator, description, labels=False, reset=False), None, 0, form)
    X = checks.read_features(estimator, X, reset=False)
    return as_arrays(X, torch.zeros(X.shape[0], dtype=torch.bool), None, offset, form)


def as_arrays(X: Any, label: torch.Tensor, sample_weight: Any, offset: Any, form: Form) -> Arrays:
    return checks.read_rows(
        X,
        label,
        intercept=form.intercept,
        sample_weight=sample_weight,
        offset=offset,
        device=form.device,
        dtype=form.dtype,
    )


def opened(estimator: Any, description: Description, *, labels: bool, reset: bool) -> Reader:
    """A reader whose columns the estimator knows, or learns with `reset`."""
    if hasattr(estimator, "formula_"):
        raise ValueError(
            "a model with a formula reads tables in memory; got files or blocks. Pass a DataFrame at a time."
        )
    known = None if reset else getattr(estimator, "feature_names_in_", None)
    reader = description.open(labels, None if known is None else [str(name) for name in known])
    # scikit-learn's own comparison of number and names, on no rows
    validate_data(estimator, heading(reader), reset=reset, skip_check_array=True)
    return reader


def heading(reader: Reader) -> Any:
    """A table without rows: the columns of the reader, with names if they have any."""
    nothing = np.empty((0, reader.width))
    if reader.names is None:
        return nothing
    import pandas

    return pandas.DataFrame(nothing, columns=list(reader.names))


def streamed(reader: Reader, classes: np.ndarray | None, count: int, form: Form) -> Stream:
    device = choose_device(form.device, None)
    block_rows = BLOCK_ROWS if device.type == "cpu" else rows_per_block(reader.width, device)
    return Stream(reader, classes, count, form.intercept, device, getattr(torch, form.dtype), block_rows)


def is_dask(X: Any) -> bool:
    """Whether X is a Dask collection, without importing Dask."""
    return getattr(X, "__dask_graph__", None) is not None and not isinstance(X, type)
