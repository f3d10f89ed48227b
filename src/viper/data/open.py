"""Turn whatever a user passes into a source that the solver can sum over. No other code knows the kinds of rows.

An estimator describes the rows it wants in a `RowFormat` and gets a source, whatever form the rows had.
"""

from contextlib import closing
from inspect import isgenerator
from os import PathLike
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import validate_data

from viper.data import arrow, checks
from viper.data.blocks import Blocks, MemoryMap, refuse_generator
from viper.data.checks import RowFormat, labelled_arrays, unlabelled_arrays
from viper.data.files import Files
from viper.data.stream import Reader, Scanned, Stream, scan
from viper.inference.progress import Progress
from viper.inference.rows import RowSource
from viper.inference.threads import pass_threads

Description = Files | Blocks | MemoryMap  # each with `open(labels, known)`, `known` the features an estimator expects


def is_kept_elsewhere(X: Any) -> bool:
    """Return whether X stands for rows that are not in memory."""
    return is_dask(X) or describe(X) is not None


def open_labelled_rows(
    estimator: Any,
    X: Any,
    y: Any,
    format: RowFormat,
    *,
    sample_weight: Any = None,
    offset: Any = None,
    reset: bool = False,
    classes: Any = None,
) -> tuple[np.ndarray, RowSource]:
    """Return the two classes, or the names of several labels, given or found in y, and a source of the rows.

    With `reset` the estimator learns the number and names of the columns; otherwise they must match those it knows.
    """
    if is_dask(X):
        from viper.data.dask import collections

        X, columns = dask_columns(estimator, X, reset)
        return collections.open_labelled_collection(
            columns, X, y, format, sample_weight=sample_weight, offset=offset, classes=classes
        )
    description = describe(X, y, sample_weight=sample_weight, offset=offset)
    if description is not None:
        reader = open_reader(estimator, description, labels=True, reset=reset)
        threads = pass_threads(getattr(estimator, "n_jobs", None))
        with closing(Progress(format.verbose)) as progress, threads:
            found = scan(reader, classes, progress.rows_done, format)
        return found.classes, stream_of(reader, found, format)
    return labelled_arrays(
        estimator, X, y, format, sample_weight=sample_weight, offset=offset, reset=reset, classes=classes
    )


def open_rows(estimator: Any, X: Any, offset: Any, format: RowFormat) -> RowSource:
    """Return a source of rows to predict; their labels are placeholders."""
    if is_dask(X):
        from viper.data.dask import collections

        X, columns = dask_columns(estimator, X, reset=False)
        return collections.LazyRows(columns, X, offset, format)
    description = describe(X, offset=offset)
    if description is not None:
        return stream_of(open_reader(estimator, description, labels=False, reset=False), None, format)
    return unlabelled_arrays(estimator, X, offset, format)


def describe(X: Any, y: Any = None, *, sample_weight: Any = None, offset: Any = None) -> Description | None:
    """Return the description of rows to read in chunks, or None if X is something else."""
    if isinstance(X, np.memmap):
        return MemoryMap(X, y, weight=sample_weight, offset=offset)
    if isgenerator(X):
        refuse_generator()
    if isinstance(X, str | PathLike):
        raise ValueError(f"X must be rows; got the path {str(X)!r}. Write viper.Files({str(X)!r}, target=...).")
    if arrow.is_dataset(X):
        raise ValueError("X must be rows; got a pyarrow dataset. Write viper.Files(dataset, target=...).")
    source = X if isinstance(X, Files | Blocks) else Blocks(X) if callable(X) and not hasattr(X, "shape") else None
    if source is None:
        return None
    for name, given in {"y": y, "sample_weight": sample_weight, "offset": offset}.items():
        if given is not None:
            raise ValueError(
                f"{name} must come from the source of the rows; got {type(given).__name__} beside "
                f"{type(source).__name__}. Name its column, or yield it with each block."
            )
    return source


def open_reader(estimator: Any, description: Description, *, labels: bool, reset: bool) -> Reader:
    """Return a reader of the columns that the estimator knows, or learns with `reset`."""
    if hasattr(estimator, "formula_"):
        raise ValueError(
            "a model with a formula reads tables in memory; got files or blocks. Pass one DataFrame at a time."
        )
    known = None if reset else getattr(estimator, "feature_names_in_", None)
    reader = description.open(labels, None if known is None else [str(name) for name in known])
    # let scikit-learn compare number and names, on a table without rows
    validate_data(estimator, empty_table(reader), reset=reset, skip_check_array=True)
    return reader


def empty_table(reader: Reader) -> Any:
    """Return a table with the reader's columns, named if they have names, and no rows."""
    nothing = np.empty((0, reader.width))
    if reader.names is None:
        return nothing
    import pandas

    return pandas.DataFrame(nothing, columns=list(reader.names))


def stream_of(reader: Reader, found: Scanned | None, format: RowFormat) -> Stream:
    """Return a stream of the rows of a reader, whose labels have been found or are not known."""
    classes, rows, labels, kept = (None, 0, 0, None) if found is None else found
    device, block_rows = format.placed(reader.width)
    dtype = getattr(torch, format.dtype)
    return Stream(reader, classes, rows, format.intercept, device, dtype, block_rows, labels, kept=kept)


def is_dask(X: Any) -> bool:
    """Return whether X is a Dask collection, without importing Dask."""
    return getattr(X, "__dask_graph__", None) is not None and not isinstance(X, type)


def dask_columns(estimator: Any, X: Any, reset: bool) -> tuple[Any, Any]:
    """Return the collection with all columns in each partition, and an estimator that knows only these columns.

    With `reset` the estimator learns the number and names of the columns; otherwise they must match.
    """
    from viper.data.dask import collections

    if hasattr(estimator, "formula_") and not reset:
        raise ValueError(
            "a model with a formula reads frames in memory; got a Dask collection. Predict partition by partition: "
            "frame.map_partitions(lambda part: pandas.Series(model.predict_proba(part)[:, 1], part.index))."
        )
    X = collections.with_whole_rows(X)
    checks.read_features(estimator, collections.example_row(X), reset=reset)
    columns = object.__new__(type(estimator))
    known = {name: x for name, x in vars(estimator).items() if name in ("n_features_in_", "feature_names_in_")}
    vars(columns).update(known)
    return X, columns
