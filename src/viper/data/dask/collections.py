"""Turn Dask collections into partitions checked by the workers, and predictions into lazy collections.

The workers check their partitions with checks.py; errors name the partition.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import itemgetter
from typing import Any

import dask.array as da
import numpy as np
import torch
from dask.base import compute, is_dask_collection, persist
from dask.core import flatten
from dask.delayed import delayed

from viper.data import checks
from viper.data.checks import RowFormat, as_arrays, unlabelled_arrays
from viper.data.dask.messages import (
    active_client,
    map_on_workers,
    reachable,
    run_on_workers,
    shares_of_threads,
    threads_of_workers,
)
from viper.data.dask.partitions import BRIEF_ENTRIES, Partitions, UncheckedArrays
from viper.data.indicators import (
    as_indicators,
    as_matrix,
    check_labels_vary,
    has_several_columns,
    label_names,
    read_indicators,
)
from viper.inference.rows import CPU, Arrays, Block, BlockSource, Dense, Mapped, SourceTraits
from viper.inference.threads import one_thread

MOST_LABELS = 10_000  # most labels that a partition returns to find the classes


@dataclass(frozen=True)
class PartitionReader:
    """How a worker checks and stores a partition."""

    columns: Any = field(repr=False)  # an estimator that knows its columns, and whose name appears in errors
    classes: np.ndarray
    format: RowFormat

    def read_group(self, numbers: list[int], *columns: list[Any]) -> list[Arrays]:
        return [self.read(*given) for given in zip(numbers, *columns, strict=True)]

    def read(self, number: int, X: Any, y: Any, weight: Any, offset: Any) -> Arrays:
        with located(number):
            X = checks.read_features(self.columns, X, reset=False, finite=not self.format.linear)
            rows = X.shape[0]
            if self.format.labels:
                label = read_indicators(y, rows, self.classes)[1]
            else:
                label = checks.read_labels(y, rows, self.classes, many=self.format.classes != 2)[1]
            offset = checks.read_vector(offset, "offset", rows)
            weight = checks.read_weights(weight, rows, some_positive=False)
            part = as_arrays(X, label, self.format, offset=offset, weight=weight)
        if not self.format.linear:
            return part
        known = {field.name: getattr(part, field.name) for field in fields(part)}
        return UncheckedArrays(**known, check=partial(self.check_finite, number))

    def check_finite(self, number: int, X: Any) -> None:
        with located(number):
            checks.check_finite(self.columns, X)


@contextmanager
def located(number: int) -> Iterator[None]:
    """Add the number of the partition to errors."""
    try:
        yield
    except ValueError as error:
        error.add_note(f"This is in partition {number}, counted from 0.")
        raise


def open_labelled_collection(
    columns: Any, X: Any, y: Any, format: RowFormat, *, sample_weight: Any, offset: Any, classes: Any
) -> tuple[np.ndarray, Partitions]:
    """Return the classes, or the names of several labels, and a source of the rows, which stay on the workers.

    `columns` is an estimator that knows its columns.
    """
    if y is None:
        raise ValueError("This estimator requires y to be passed, but the target y is None.")
    client = active_client()
    several = bool(format.labels) or (format.labels == 0 and has_several_columns(y))
    known, names = classes, getattr(y, "columns", None)
    if several:
        y = as_label_array(y)
        classes = label_names(names, y.shape[1], known)
        format = replace(format, labels=len(classes))
    vectors = {"y": y, "sample_weight": sample_weight, "offset": offset}
    with reachable(client, [X, *vectors.values()]):
        numbers, sizes, blocks, parts_of = aligned(client, X, vectors)
        if classes is None:
            found = run_on_workers(client, distinct_labels, parts_of["y"])
            labels = np.concatenate(found)
            classes = checks.read_labels(labels, len(labels), many=format.classes != 2)[0]
        if several and known is None:
            found = run_on_workers(client, partial(ones_and_others, names=classes), parts_of["y"])
            check_labels_vary(classes, *np.any(found, axis=0))
        if len(classes) > 2 and offset is not None and not several:
            raise ValueError("offsets of more than two classes need rows in memory; got a Dask collection.")
        reader = PartitionReader(columns, np.asarray(classes), format)
        dimension = columns.n_features_in_ + int(format.intercept)
        # float arrays are kept as they are, so that one task can read many partitions without copying them
        kept = not is_frame(X) and X.dtype in (np.float64, np.float32)
        places = groups_by_thread(client, blocks, sum(sizes) * dimension) if kept else None
        places = places or [[i] for i in range(len(blocks))]
        given = [[[x[i] for i in some] for some in places] for x in (numbers, blocks, *parts_of.values())]
        parts = map_on_workers(client, reader.read_group, *given)
        if sample_weight is not None and not any(run_on_workers(client, have_weight, parts)):
            raise ValueError(checks.ALL_WEIGHTS_ZERO)
        columns_of_y = len(reader.classes) if several else 0
        return reader.classes, Partitions(client, parts, places, np.array(sizes), dimension, labels=columns_of_y)


def groups_by_thread(client: Any, blocks: list[Any], entries: int) -> list[list[int]] | None:
    """Return the partitions of each thread, to be read by one task; None without a client or if they are too large."""
    if client is None:
        return None
    threads = threads_of_workers(client)
    brief = entries <= BRIEF_ENTRIES * sum(threads.values())
    return [share.places for share in shares_of_threads(client, blocks, threads)] if brief else None


def have_weight(parts: list[Arrays]) -> bool:
    return any(part.weight is not None and bool((part.weight > 0).any()) for part in parts)


def ones_and_others(y: Any, names: np.ndarray) -> np.ndarray:
    """Whether each column of a partition contains 1, and whether it contains 0; raises for anything else."""
    ones = as_indicators(np.asarray(y), names)
    return np.stack([ones.any(0), (~ones).any(0)])


def distinct_labels(y: Any) -> np.ndarray:
    """Return the distinct labels of a partition, or just enough of them to show that there are too many."""
    return checks.distinct(np.ravel(np.asarray(y)))[:MOST_LABELS]


# ---------------------------------------------------------------------------------------------------------------------
# Shapes and partitions


def is_table(x: Any) -> bool:
    """Return whether x is a DataFrame or a Series."""
    return hasattr(x, "to_dask_array")


def is_frame(X: Any) -> bool:
    return is_table(X) and X.ndim == 2


def with_whole_rows(X: Any) -> Any:
    """Return a frame, or an array with all columns in each chunk."""
    if is_frame(X):
        return X
    if X.ndim != 2 or math.isnan(X.shape[1]):
        raise ValueError(f"X must have two dimensions and a known number of columns; got shape {X.shape}.")
    return X.rechunk({1: -1}) if len(X.chunks[1]) > 1 else X


def example_row(X: Any) -> Any:
    """Return placeholder rows with the number, names and types of the collection's columns."""
    return X._meta_nonempty if is_frame(X) else np.zeros((1, X.shape[1]))


def aligned(
    client: Any, X: Any, vectors: dict[str, Any]
) -> tuple[list[int], list[int], list[Any], dict[str, list[Any]]]:
    """Return numbers, sizes and rows of the nonempty partitions, and the vectors split in the same way.

    Everything is computed once and kept, as futures of the client or in this process.
    """
    given = {"X": X} | {name: one_column(x, name) for name, x in vectors.items()}
    for frames in (False, True):
        lazy = {name: x for name, x in given.items() if is_dask_collection(x) and is_table(x) == frames}
        # persisted together, because Dask would compute a common origin twice if they were persisted one by one
        given |= zip(lazy, persist(*lazy.values()), strict=True)
    X = given.pop("X")
    blocks = persisted_blocks(client, X)
    sizes = row_counts(client, X, blocks)
    cut = {
        name: like_rows(client, persisted_vector(x, name), name, sizes) for name, x in given.items() if x is not None
    }
    some = [i for i, size in enumerate(sizes) if size]
    columns = {name: cut.get(name, [None] * len(some)) for name in vectors}
    return some, [sizes[i] for i in some], not_empty(blocks, sizes), columns


def persisted_vector(x: Any, name: str) -> Any:
    """Return the result of `as_vector`, persisted if it is a new collection."""
    vector = as_vector(x, name)
    return vector if vector is x or not is_dask_collection(vector) else persist(vector)[0]


def persisted_blocks(client: Any, x: Any) -> list[Any]:
    """Return the blocks of a persisted collection, as futures if there is a client."""
    if client is None:
        return list(compute(*row_blocks(x)))
    from distributed import futures_of

    by_key = {future.key: future for future in futures_of(x)}
    if is_table(x):  # its own keys are aliases of these
        return [by_key[key] for key in sorted(by_key, key=itemgetter(-1))]
    return [by_key[key] for key in flatten(x.__dask_keys__())]


def not_empty(blocks: list[Any], sizes: list[int]) -> list[Any]:
    """Return the blocks that have rows."""
    return [block for block, size in zip(blocks, sizes, strict=True) if size]


def row_blocks(X: Any) -> list[Any]:
    """Return the partitions of a collection as delayed objects."""
    return list(np.ravel(X.to_delayed()))


def row_counts(client: Any, X: Any, blocks: list[Any]) -> list[int]:
    """Return the number of rows of each partition, counted by the workers if unknown."""
    if not is_frame(X) and not any(map(math.isnan, X.chunks[0])):
        sizes = list(X.chunks[0])
    else:
        sizes = run_on_workers(client, count_rows, blocks)
    if not sum(sizes):
        raise ValueError(f"X must have at least one row; got none in {len(sizes)} partitions.")
    return sizes


def count_rows(block: Any) -> int:
    return int(block.shape[0])


def one_column(x: Any, name: str) -> Any:
    """Return the only column of a frame; anything else is returned unchanged."""
    if not is_frame(x):
        return x
    if len(x.columns) != 1:
        raise ValueError(f"{name} must have one column; got {len(x.columns)}: {list(x.columns)[:5]}.")
    return x[x.columns[0]]


def as_label_array(y: Any) -> Any:
    """Return y with several columns as a Dask array with all columns in each chunk, or as an array in memory."""
    if not is_dask_collection(y):
        return as_matrix(y)
    if not is_table(y):
        return with_whole_rows(y)
    width = len(y.columns)
    parts = [da.from_delayed(delayed(as_matrix, pure=False)(part), (math.nan, width), float) for part in row_blocks(y)]
    return da.concatenate(parts, allow_unknown_chunksizes=True)


def as_vector(x: Any, name: str) -> Any:
    """Return a 1-D Dask array, or something in memory that will become one: an array or a number."""
    x = one_column(x, name)
    if is_table(x):
        dtype = x.dtype if isinstance(x.dtype, np.dtype) else object
        parts = [da.from_delayed(delayed(np.asarray, pure=False)(part), (math.nan,), dtype) for part in row_blocks(x)]
        return da.concatenate(parts, allow_unknown_chunksizes=True)
    if not is_dask_collection(x):
        return np.asarray(x)
    if x.ndim == 2 and x.shape[1] == 1:
        return x[:, 0]
    if x.ndim == 2 and name == "y":
        return x
    if x.ndim != 1:
        raise ValueError(f"{name} must have one dimension; got shape {x.shape}.")
    return x


def like_rows(client: Any, x: Any, name: str, sizes: list[int]) -> list[Any]:
    """Return a vector split like the nonempty partitions of X."""
    rows = sum(sizes)
    if not is_dask_collection(x):
        whole = np.full(rows, x) if x.ndim == 0 else x if x.ndim == 2 and name == "y" else np.ravel(x)
        x = persist(da.from_array(whole, chunks=-1))[0]
    if any(map(math.isnan, x.chunks[0])):
        x = x.compute_chunk_sizes()
    if x.shape[:1] != (rows,) or (x.ndim > 1 and name != "y"):
        if name == "y":
            checks.check_label_count(x.shape[0], rows)
        raise ValueError(f"{name} must have shape ({rows},), one entry per row; got {name}.shape == {x.shape}.")
    if x.chunks[0] != tuple(sizes):
        return persisted_blocks(client, persist(x.rechunk({0: tuple(size for size in sizes if size)}))[0])
    return not_empty(persisted_blocks(client, x), sizes)


# ---------------------------------------------------------------------------------------------------------------------
# Predictions


class LazyRows(BlockSource):
    """Rows of a collection to predict: functions are applied to partitions when the result is computed."""

    device, traits = CPU, SourceTraits("cluster")

    def __init__(self, columns: Any, X: Any, offset: Any, format: RowFormat) -> None:
        self.columns, self.format, self.partitions = columns, format, row_blocks(X)
        self.dimension = int(columns.n_features_in_) + int(format.intercept)
        self.sizes = (math.nan,) * X.npartitions if is_frame(X) else X.chunks[0]
        self.offsets = offsets_by_partition(offset, self.sizes)

    @property
    def rows(self) -> int:
        return int(sum(compute(*[delayed(count_rows)(block) for block in self.partitions])))

    def blocks(self) -> Iterator[Block]:
        return self.map(lambda block: block)

    def map(self, function: Callable[[Block], Mapped]) -> Iterator[Mapped]:
        for part in self.delayed_parts(function, list):
            yield from part.compute()

    def apply(self, function: Callable[[Block], np.ndarray]) -> Any:
        """Return a Dask array. For a frame, its chunk sizes are unknown."""
        nothing = torch.zeros(0, self.dimension, dtype=torch.float64)
        empty = function(Block(Dense(nothing), nothing[:, 0]))
        shape, dtype = empty.shape[1:], empty.dtype
        parts = self.delayed_parts(function, lambda found: np.concatenate([empty, *found]))
        arrays = [da.from_delayed(part, (size, *shape), dtype) for part, size in zip(parts, self.sizes, strict=True)]
        return da.concatenate(arrays, allow_unknown_chunksizes=True)

    def delayed_parts(self, function: Callable[[Block], Any], join: Callable[[Iterable[Any]], Any]) -> list[Any]:
        """Return join(function(block), ...) of each partition, delayed. A worker receives the functions only once."""
        shipped = delayed((function, join, self.columns, self.format), pure=False, traverse=False)
        run = delayed(map_partition, pure=False)
        return [run(shipped, block, offset) for block, offset in zip(self.partitions, self.offsets, strict=True)]


def map_partition(shipped: tuple[Any, ...], X: Any, offset: Any) -> Any:
    """On a worker: compute the result of `delayed_parts` for one partition, which may be empty."""
    function, join, columns, format = shipped
    if not X.shape[0]:
        return join([])
    with one_thread():
        return join(unlabelled_arrays(columns, X, offset, format).map(function))


def offsets_by_partition(offset: Any, sizes: tuple[float, ...]) -> list[Any]:
    """Return the offset of each partition: one number for all, or a vector with the same partitions."""
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
