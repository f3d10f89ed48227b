"""From whatever rows are kept in to a source that the solver can sum over: the one place where the kinds part.

An estimator says in a `Form` how it wants its rows and gets a source; what the rows came as matters no further.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from viper import design
from viper.problem import Arrays


@dataclass(frozen=True)
class Form:
    """How an estimator wants its rows: with a column of ones, where, in which precision, and how loudly."""

    intercept: bool = False
    device: Any = None
    dtype: str = "float64"
    verbose: Any = "auto"


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
) -> tuple[np.ndarray, Any]:
    """The two classes (the known ones, or those found in y) and a source of the rows.

    With `reset` the estimator learns number and names of the columns, else they must be as it knows them.
    """
    if is_dask(X):
        from viper import cluster_rows

        return cluster_rows.labelled(
            estimator,
            X,
            y,
            sample_weight,
            offset,
            intercept=form.intercept,
            device=form.device,
            dtype=form.dtype,
            reset=reset,
            classes=classes,
        )
    X = design.read_features(estimator, X, reset=reset)
    classes, label = design.read_labels(y, X.shape[0], classes)
    return classes, in_memory(X, label, sample_weight, offset, form)


def unlabelled(estimator: Any, X: Any, offset: Any, form: Form) -> Arrays:
    """A source of rows to predict; their labels say nothing."""
    X = design.read_features(estimator, X, reset=False)
    return in_memory(X, torch.zeros(X.shape[0], dtype=torch.bool), None, offset, form)


def in_memory(X: Any, label: torch.Tensor, sample_weight: Any, offset: Any, form: Form) -> Arrays:
    return design.read_rows(
        X,
        label,
        intercept=form.intercept,
        sample_weight=sample_weight,
        offset=offset,
        device=form.device,
        dtype=form.dtype,
    )


def is_dask(X: Any) -> bool:
    """Whether X is a Dask collection, without importing Dask."""
    return getattr(X, "__dask_graph__", None) is not None and not isinstance(X, type)
