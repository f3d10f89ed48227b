"""From Dask collections to partitions that the workers have checked, and lazy predictions back.

Every complaint is that of checks.py, raised by the worker that finds it, with the number of the partition.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import itemgetter
from typing import Any

import dask.array as da
import numpy as np
from dask.base import compute, is_dask_collection, persist
from dask.core import flatten
from dask.delayed import delayed

from viper.data import checks
from viper.data.dask.messages import active_client, keep, run, shares
from viper.data.dask.partitions import BRIEF, Partitions, Unseen
from viper.inference.rows import Arrays
from viper.inference.threads import one_thread

MOST_LABELS = 100  # of a partition that are looked at to find the two classes


@dataclass(frozen=True)
class Reader:
    """How a worker checks and keeps a partition."""

    blank: Any = field(repr=False)  # an estimator that knows its columns, in whose name complaints are made
    classes: np.ndarray
    intercept: bool
    device: Any
    dtype: str
    linear: bool  # as in `rows.Form`

    def read_group(self, numbers: list[int], *columns: list[Any]) -> list[Arrays]:
        return [self.read(*given) for given in zip(numbers, *columns, strict=True)]

    def read(self, number: int, X: Any, y: Any, weight: Any, offset: Any) -> Arrays:
        with located(number):
            X = checks.read_features(self.blank, X, reset=False, finite=not self.linear)
            label = checks.read_labels(y, X.shape[0], self.classes)[1]
            part = checks.read_rows(
                X, label, intercept=self.intercept, offset=offset, device=self.device, dtype=self.dtype
            )
            c = checks.read_weights(weight, X.shape[0], whole=False)
            part = part if c is None else replace(part, weight=c.to(part.device))
        if not self.linear:
            return part
        known = {field.name: getattr(part, field.name) for field in fields(part)}
        return Unseen(**known, look=partial(self.look, number))

    def look(self, number: int, X: Any) -> None:
        with located(number):
            checks.check_finite(self.blank, X)


@contextmanager
def located(number: int) -> Iterator[None]:
    """Complaints say in which partition."""
    try:
        yield
    except ValueError as error:
        error.add_note(f"This is in partition {number}, counted from 0.")
        raise


def labelled(
    estimator: Any,
    X: Any,
    y: Any,
    sample_weight: Any,
    offset: Any,
    *,
    intercept: bool,
    device: Any,
    dtype: str,
    linear: bool,
    reset: bool,
    classes: Any,
) -> tuple[np.ndarray, Partitions]:
    """The two classes and a source of the rows, which stay with the workers."""
    if y is None:
        raise ValueError("This estimator requires y to be passed, but the target y is None.")
    client = active_client()
    X = check_columns(estimator, X, reset)
    numbers, sizes, blocks, columns = aligned(client, X, {"y": y, "sample_weight": sample_weight, "offset": offset})
    if classes is None:
        found = run(client, distinct_labels, columns["y"])
        classes = checks.read_labels(np.concatenate(found), sum(map(len, found)))[0]
    reader = Reader(blank_copy(estimator), np.asarray(classes), intercept, device, dtype, linear)
    dimension = estimator.n_features_in_ + int(intercept)
    places = groups(client, blocks, sum(sizes) * dimension) if client is not None and is_float_array(X) else None
    places = places or [[i] for i in range(len(blocks))]
    given = [[[x[i] for i in some] for some in places] for x in (numbers, blocks, *columns.values())]
    parts = keep(client, reader.read_group, *given)
    if sample_weight is not None and not any(run(client, have_weight, parts)):
        checks.read_weights(np.zeros(1), 1)  # complains
    return reader.classes, Partitions(client, parts, places, np.array(sizes), dimension)


def is_float_array(X: Any) -> bool:
    """Whether partitions are kept as they are, so that many can be read at once without many copies."""
    return not is_frame(X) and X.dtype in (np.float64, np.float32)


def groups(client: Any, blocks: list[Any], entries: int) -> list[list[int]] | None:
    """The partitions that lie with each thread, which one task reads; None if they are too large for that."""
    threads = client.nthreads()
    brief = entries <= BRIEF * sum(threads.values())
    return [share.places for share in shares(client, blocks, threads)] if brief else None


def have_weight(parts: list[Arrays]) -> bool:
    return any(part.weight is not None and bool((part.weight > 0).any()) for part in parts)


def distinct_labels(y: Any) -> np.ndarray:
    """The labels of a partition, each once, but no more than enough to see that there are too many."""
    return checks.distinct(np.ravel(np.asarray(y)))[:MOST_LABELS]


def blank_copy(estimator: Any) -> Any:
    """An estimator that knows its columns and nothing else."""
    blank = object.__new__(type(estimator))
    known = {name: x for name, x in vars(estimator).items() if name in ("n_features_in_", "feature_names_in_")}
    vars(blank).update(known)
    return blank


# ---------------------------------------------------------------------------------------------------------------------
# Shapes and partitions


def is_table(x: Any) -> bool:
    """A DataFrame or a Series."""
    return hasattr(x, "to_dask_array")


def is_frame(X: Any) -> bool:
    return is_table(X) and X.ndim == 2


def check_columns(estimator: Any, X: Any, reset: bool) -> Any:
    """A frame, or an array with all columns in each chunk; the estimator learns or compares number and names."""
    if hasattr(estimator, "formula_") and not reset:
        raise ValueError(
            "a model with a formula reads frames in memory; got a Dask collection. Predict partition by partition: "
            "frame.map_partitions(lambda part: pandas.Series(model.predict_proba(part)[:, 1], part.index))."
        )
    if is_frame(X):
        checks.read_features(estimator, X._meta_nonempty, reset=reset)
        return X
    if X.ndim != 2 or math.isnan(X.shape[1]):
        raise ValueError(f"X must have two dimensions and a known number of columns; got shape {X.shape}.")
    checks.read_features(estimator, np.zeros((1, X.shape[1])), reset=reset)
    return X.rechunk({1: -1}) if len(X.chunks[1]) > 1 else X


def aligned(
    client: Any, X: Any, vectors: dict[str, Any]
) -> tuple[list[int], list[int], list[Any], dict[str, list[Any]]]:
    """Numbers and sizes of the partitions that are not empty, their rows, and vectors cut likewise.

    All are computed once and kept: as futures of the client, or here.
    """
    given = {"X": X} | {name: one_column(x, name) for name, x in vectors.items()}
    for frames in (False, True):
        lazy = {name: x for name, x in given.items() if is_dask_collection(x) and is_table(x) == frames}
        # in one go, as they may have a common origin: on their own, they would be optimised apart and make it twice
        given |= zip(lazy, persist(*lazy.values()), strict=True)
    X = given.pop("X")
    blocks = kept(client, X)
    sizes = row_counts(client, X, blocks)
    cut = {name: like_rows(client, kept_vector(x, name), name, sizes) for name, x in given.items() if x is not None}
    some = [i for i, size in enumerate(sizes) if size]
    columns = {name: cut.get(name, [None] * len(some)) for name in vectors}
    return some, [sizes[i] for i in some], full(blocks, sizes), columns


def kept_vector(x: Any, name: str) -> Any:
    """As `as_vector`, and computed if it was not."""
    vector = as_vector(x, name)
    return vector if vector is x or not is_dask_collection(vector) else persist(vector)[0]


def kept(client: Any, x: Any) -> list[Any]:
    """The blocks of a persisted collection as futures of the client, or themselves."""
    if client is None:
        return list(compute(*row_blocks(x)))
    from distributed import futures_of

    by_key = {future.key: future for future in futures_of(x)}
    if is_table(x):  # whose own keys are other names for these
        return [by_key[key] for key in sorted(by_key, key=itemgetter(-1))]
    return [by_key[key] for key in flatten(x.__dask_keys__())]


def full(blocks: list[Any], sizes: list[int]) -> list[Any]:
    """Those that are not empty."""
    return [block for block, size in zip(blocks, sizes, strict=True) if size]


def row_blocks(X: Any) -> list[Any]:
    """The partitions of a collection, delayed."""
    return list(np.ravel(X.to_delayed()))


def row_counts(client: Any, X: Any, blocks: list[Any]) -> list[int]:
    """How many rows each partition has, counted where the collection does not know."""
    if not is_frame(X) and not any(map(math.isnan, X.chunks[0])):
        sizes = list(X.chunks[0])
    else:
        sizes = run(client, count_rows, blocks)
    if not sum(sizes):
        raise ValueError(f"X must have a row at least; got none in {len(sizes)} partitions.")
    return sizes


def count_rows(block: Any) -> int:
    return int(block.shape[0])


def one_column(x: Any, name: str) -> Any:
    """A frame as the Series it holds, anything else as it is."""
    if not is_frame(x):
        return x
    if len(x.columns) != 1:
        raise ValueError(f"{name} must have one column; got {len(x.columns)}: {list(x.columns)[:5]}.")
    return x[x.columns[0]]


def as_vector(x: Any, name: str) -> Any:
    """A 1-D Dask array, or what will become one: an array in memory or a number."""
    x = one_column(x, name)
    if is_table(x):
        dtype = x.dtype if isinstance(x.dtype, np.dtype) else object
        parts = [da.from_delayed(delayed(np.asarray, pure=False)(part), (math.nan,), dtype) for part in row_blocks(x)]
        return da.concatenate(parts, allow_unknown_chunksizes=True)
    if not is_dask_collection(x):
        return np.asarray(x)
    if x.ndim == 2 and x.shape[1] == 1:
        return x[:, 0]
    if x.ndim != 1:
        raise ValueError(f"{name} must have one dimension; got shape {x.shape}.")
    return x


def like_rows(client: Any, x: Any, name: str, sizes: list[int]) -> list[Any]:
    """A vector in the partitions of X that are not empty."""
    rows = sum(sizes)
    if not is_dask_collection(x):
        x = persist(da.from_array(np.full(rows, x) if x.ndim == 0 else np.ravel(x), chunks=-1))[0]
    if any(map(math.isnan, x.chunks[0])):
        x = x.compute_chunk_sizes()
    if x.shape != (rows,):
        if name == "y":
            raise ValueError(
                f"X and y must have as many rows; got inconsistent numbers of samples: {rows} and {x.shape[0]}."
            )
        raise ValueError(f"{name} must have shape ({rows},), one entry per row; got {name}.shape == {x.shape}.")
    if x.chunks[0] != tuple(sizes):
        return kept(client, persist(x.rechunk((tuple(size for size in sizes if size),)))[0])
    return full(kept(client, x), sizes)


# ---------------------------------------------------------------------------------------------------------------------
# Predictions


def predict_lazily(model: Any, name: str, X: Any, offset: Any, columns: int, dtype: Any, **options: Any) -> Any:
    """The model's method of that name applied to each partition, as a Dask array; `columns` is 0 for a vector.

    The rows of a frame become those of an array with unknown chunk sizes.
    """
    X = check_columns(model, X, reset=False)
    sizes = (math.nan,) * X.npartitions if is_frame(X) else X.chunks[0]
    shipped, tail = delayed(model, pure=False, traverse=False), (columns,) if columns else ()
    predict = delayed(partial(predict_part, name=name, tail=tail, dtype=dtype, options=options), pure=False)
    parts = [
        da.from_delayed(predict(shipped, block, some), (size, *tail), dtype)
        for block, some, size in zip(row_blocks(X), offsets(offset, sizes), sizes, strict=True)
    ]
    return da.concatenate(parts, allow_unknown_chunksizes=True)


def predict_part(
    model: Any, X: Any, offset: Any, *, name: str, tail: tuple[int, ...], dtype: Any, options: dict[str, Any]
) -> np.ndarray:
    if not X.shape[0]:
        return np.empty((0, *tail), dtype)
    with one_thread():
        result = getattr(model, name)(X, offset=offset, **options)
    return np.stack(result, 1) if isinstance(result, tuple) else result


def offsets(offset: Any, sizes: tuple[float, ...]) -> list[Any]:
    """The offset of each partition: a number for all, or a vector in as many partitions."""
    if offset is None or (not is_dask_collection(offset) and np.ndim(offset) == 0):
        return [offset] * len(sizes)
    x = as_vector(offset, "offset")
    known = not any(map(math.isnan, sizes))
    if not is_dask_collection(x):
        x = da.from_array(x, chunks=-1)
    if known and not any(map(math.isnan, x.shape)) and x.shape[0] == sum(sizes):
        x = x.rechunk((sizes,)) if x.chunks[0] != sizes else x
    if x.numblocks[0] != len(sizes):
        raise ValueError(
            f"offset must have the rows and partitions of X; got {x.numblocks[0]} partitions for {len(sizes)}. "
            "Call compute_chunk_sizes() on both."
        )
    return row_blocks(x)
