"""Rows that are read in chunks, once per pass: functions that yield blocks, and memory maps.

A description (`Files`, `Blocks`, `MemoryMap`) is opened once, to check everything that can be checked without reading
rows, and is then read once per pass. Only a few chunks are in memory at a time, however many rows there are.
"""

import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import isgenerator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.lib.array_utils import byte_bounds

from viper.data.arrow import stamp_of
from viper.errors import shown
from viper.inference.memory import SHARE_FOR_CACHE, available_memory


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows as arrays. Parts that the reader lacks, or was not asked for, are None.

    The labels are the user's until `stream.check_chunk` replaces them by whether a row is in the second class.
    """

    features: Any
    label: Any
    offset: np.ndarray | None = field(default=None, kw_only=True)
    weight: np.ndarray | None = field(default=None, kw_only=True)
    place: Callable[[int], str] = field(default=str, kw_only=True)  # names the i-th of these rows in messages
    finite: bool = field(default=False, kw_only=True)  # whether the features are known to be finite


def check_finite_chunk(x: np.ndarray, name: str, place: Callable[[int], str]) -> None:
    """Raise if there is a NaN or infinity; the message says where the first one is."""
    if x.dtype.kind != "f":
        return
    with np.errstate(all="ignore"):
        if np.isfinite(x.sum()):  # then all entries are finite
            return
    bad = ~np.isfinite(x)
    if bad.any():
        i = int(bad.reshape(len(x), -1).any(1).argmax())
        raise ValueError(f"{name} must be finite; got NaN or infinity in {place(i)}. Impute or drop those rows.")


DATED = re.compile("(?i)date|time|duration")  # types of columns that scikit-learn would read as nanoseconds


def refuse_odd_array(x: Any, name: str, here: str = "") -> None:
    """Raise for lazy frames, and for values that NumPy would silently change: masked entries, records and dates."""
    kind: Any = getattr(x, "dtype", None)
    if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
        got = f"{int(np.ma.getmaskarray(x).sum()):,} masked entries{here}"
        raise ValueError(f"{name} must have a value in every entry; got {got}. Leave those rows out, or fill them in.")
    if getattr(kind, "names", None):
        raise ValueError(
            f"{name} must be an array of numbers; got records with the fields {list(kind.names)[:8]}{here}. "
            "Pass pandas.DataFrame(X)."
        )
    if is_lazy(x):
        raise ValueError(f"{name} must be in memory; got a LazyFrame{here}. Pass {name}.collect().")
    dated = [str(kind)] if getattr(kind, "kind", "") in ("M", "m") else []
    dated += [f"column {shown(n)} ({one})" for n, one in column_types(x) if DATED.match(str(one))]
    if dated:
        raise ValueError(
            f"{name} must be numeric; got {', '.join(dated[:5])}{here}. Encode dates as numbers, or use from_formula, "
            "which has days(), year(), month() and weekday()."
        )


def is_lazy(x: Any) -> bool:
    """Return whether x is a LazyFrame of polars."""
    return hasattr(x, "collect") and hasattr(x, "lazy")


def column_types(x: Any) -> Iterable[tuple[Any, Any]]:
    """The names and types of the columns of a frame of pandas or polars, or of an Arrow table."""
    if hasattr(x, "dtypes") and hasattr(x, "columns"):
        return zip(x.columns, x.dtypes, strict=True)
    schema: Any = getattr(x, "schema", None)
    return zip(schema.names, schema.types, strict=True) if hasattr(schema, "types") else ()


def check_names(names: Sequence[str] | None, what: str) -> None:
    """Raise unless `names` is None or a list in which every name occurs once."""
    if isinstance(names, str):
        raise ValueError(
            f"{what} must be a list of columns; got the text {shown(names)}. Write {what}=[{shown(names)}]."
        )
    known = [] if names is None else list(names)
    if len({*known}) < len(known):
        twice = next(name for i, name in enumerate(known) if name in known[:i])
        raise ValueError(f"{what} must name each column once; got {shown(twice)} twice. Leave one out.")


# ---------------------------------------------------------------------------------------------------------------------
# Functions that yield blocks


@dataclass(frozen=True)
class Blocks:
    """Rows from a function that is called once per pass and yields blocks ``(X, y[, weight[, offset]])``.

    Every call must yield the same rows in the same order, in blocks of any size. To predict, a block may be X alone.

    Parameters
    ----------
    factory : callable
        Takes no arguments and returns an iterable; for instance a generator function.
    names : list of str, optional
        Names of the features; by default the columns of the first block, if it is a DataFrame. The columns of other
        DataFrames are put into the same order.

    Examples
    --------
    >>> import numpy as np, viper
    >>> def rows():
    ...     for seed in range(100):
    ...         X = np.random.default_rng(seed).standard_normal((1000, 2))
    ...         yield X, X[:, 0] > X[:, 1]
    >>> viper.VariationalLogisticRegression().fit(viper.Blocks(rows)).predict([[1.0, 0.0]])
    array([ True])
    """

    factory: Callable[[], Iterable[Any]]
    names: Sequence[str] | None = None

    def open(self, labels: bool, known: Sequence[str] | None) -> "BlockReader":
        check_names(self.names, "names")
        blocks = start_pass(self.factory)
        if blocks is start_pass(self.factory):
            raise ValueError(
                "the function must start over in every call; got the same iterator twice. Return a new iterable."
            )
        first = next(blocks, None)
        if first is None:
            raise ValueError("the source must yield at least one block; got none. Return a new iterable for each call.")
        X = next(BlockReader(lambda: [first], labels, 0, None, None).read(1)).features
        columns = frame_names(first)
        names = columns if self.names is None else list(self.names)
        if names is not None and len(names) != X.shape[1]:
            raise ValueError(f"names must be one per column, {X.shape[1]}; got {len(names)}.")
        same = columns is not None and names is not None and sorted(columns) == sorted(names)
        return BlockReader(self.factory, labels, X.shape[1], names, names if same else columns)


def start_pass(factory: Any) -> Iterator[Any]:
    """Return the blocks of a new pass."""
    if isgenerator(factory):
        refuse_generator()
    if not callable(factory):
        raise ValueError(
            f"the source must be a function that returns blocks; got {type(factory).__name__}. Write Blocks(lambda: "
            "blocks)."
        )
    blocks = factory()
    try:
        return iter(blocks)
    except TypeError:
        raise ValueError(
            f"the function must return an iterable of blocks; got {type(blocks).__name__}. Let it yield them."
        ) from None


def refuse_generator() -> NoReturn:
    raise ValueError(
        "X must be readable once per pass; got a generator, which can be read only once. Pass the function that "
        "makes it, without calling it."
    )


def frame_names(block: Any) -> list[str] | None:
    """Return the column names of a block that is a frame, if they are text."""
    X = block[0] if isinstance(block, tuple | list) and block else block
    columns = getattr(X, "column_names", getattr(X, "columns", None))  # column_names: Arrow tables
    return list(columns) if columns is not None and all(isinstance(name, str) for name in columns) else None


@dataclass(frozen=True)
class BlockReader:
    """A function that yields blocks, after its first block has been examined."""

    factory: Callable[[], Iterable[Any]]
    labels: bool
    width: int
    names: Sequence[str] | None
    columns: Sequence[str] | None  # columns of the first block, if it is a frame

    def read(self, rows: int, features: bool = True) -> Iterator[Chunk]:
        first = 0
        for number, block in enumerate(start_pass(self.factory)):
            parts = block if isinstance(block, tuple | list) else (block,)
            if not 1 + self.labels <= len(parts) <= 4:
                raise ValueError(
                    f"a block must be (X, y), (X, y, weight) or (X, y, weight, offset); got {len(parts)} part(s) in "
                    f"block {number}. Yield tuples."
                )
            first = first or len(parts)
            if len(parts) != first:
                raise ValueError(
                    f"all blocks must have the same parts; got {len(parts)} in block {number} and {first} before. "
                    "Give every block weights, of one if need be."
                )
            X, y, weight, offset = [*parts, None, None, None][:4]
            X = self.in_order(X, number)
            y, weight = (y, weight) if self.labels else (None, None)
            yield as_chunk(X, y, weight=weight, offset=offset, number=number, width=self.width)

    @property
    def without_rows(self) -> str:
        return "the source must have at least one row; got none. Let a function start over in each call."

    def keep(self) -> None:
        """Keep no rows: a function may be fast, and need not return the same rows."""

    def check_unchanged(self) -> None:
        """Do nothing: only the rows themselves show whether they have changed."""

    def in_order(self, X: Any, number: int) -> Any:
        """Return X; if it is a frame, put its columns in the order of the first block."""
        there = frame_names(X)
        if self.columns is None or there is None or there == list(self.columns):
            return X
        if sorted(there) != sorted(self.columns) or len({*there}) < len(there):
            raise ValueError(
                f"every block must have the columns of the first, {list(self.columns)[:10]}; got {there[:10]} in "
                f"block {number}."
            )
        return np.asarray(X)[:, [there.index(name) for name in self.columns]]


def as_chunk(X: Any, y: Any, *, weight: Any, offset: Any, number: int, width: int) -> Chunk:
    """Return a block as arrays of the same length; errors name the block."""
    here = f"block {number}"
    if hasattr(X, "toarray"):
        raise ValueError(f"X must be a dense numeric array; got {type(X).__name__} in {here}. Yield X.toarray().")
    refuse_odd_array(X, "X", f" in {here}")
    try:
        X = np.asarray(X)
        X = X if X.dtype in (np.float32, np.float64) else X.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"X must be a dense numeric array; got {str(error).splitlines()[0]} in {here}.") from None
    if X.ndim != 2 or (width and X.shape[1] != width):
        columns = f"{width} columns, as the first block" if width else "two dimensions"
        raise ValueError(f"X must have {columns}; got shape {X.shape} in {here}.")
    given = {"y": y, "sample_weight": weight, "offset": offset}
    y, weight, offset = (one_per_row(x, name, X.shape[:1], f" in {here}") for name, x in given.items())
    return Chunk(X, y, weight=weight, offset=offset, place=lambda i: f"{here}, row {i}")


def one_per_row(x: Any, name: str, shape: tuple[int, ...], here: str = "") -> Any:
    """Return an array with one entry per row, or None. y and offset may have columns; a number is the same for all."""
    if x is None:
        return None
    refuse_odd_array(x, name, here)
    x = x if isinstance(x, np.ndarray) else np.asarray(x)
    if name == "y" and x.ndim == 2 and x.shape[:1] == shape:
        return x[:, 0] if x.shape[1] == 1 else x
    if name != "y" and x.ndim == 0:
        return np.broadcast_to(x, shape)
    if name == "offset" and x.ndim == 2 and x.shape[:1] == shape:
        return x
    if x.shape != shape:
        raise ValueError(f"{name} must have one entry per row of X, {shape}; got shape {x.shape}{here}.")
    return x


# ---------------------------------------------------------------------------------------------------------------------
# Memory maps


PICKED_ROWS = 2048  # rows at a time: the system maps 64 kB around each row


@dataclass(frozen=True, eq=False)
class MemoryMap:
    """A memory-mapped X, with y, weights and offset in arrays or memory maps of their own.

    Chunks of X are views of the map. Pages of a large map are released once they have been used, so rows already read
    do not accumulate in memory; mapping them again in every pass takes a third of the time of a fit. Numbers of types
    other than this machine's floats are copied.
    """

    X: np.memmap
    y: Any = None
    weight: Any = field(default=None, kw_only=True)
    offset: Any = field(default=None, kw_only=True)
    names: Sequence[str] | None = field(default=None, init=False)
    stamp: tuple[int, int] | None = field(default=None, kw_only=True)  # of the file of X, when it was opened

    @property
    def width(self) -> int:
        return int(self.X.shape[1])

    @cached_property
    def stays(self) -> bool:
        """Whether the map may stay in memory."""
        return self.X.nbytes <= SHARE_FOR_CACHE * available_memory()

    def open(self, labels: bool, known: Sequence[str] | None) -> "MemoryMap":
        if self.X.ndim != 2:
            raise ValueError(f"X must be a 2-D array; got shape {self.X.shape}. Reshape your data.")
        if self.X.dtype.kind not in "fiub":
            raise ValueError(f"X must be numeric; got dtype {self.X.dtype}. Encode text and dates as numbers.")
        if not labels:
            return MemoryMap(
                self.X, offset=one_per_row(self.offset, "offset", self.X.shape[:1]), stamp=stamp_of_map(self.X)
            )
        if self.y is None:
            raise ValueError("This estimator requires y to be passed, but the target y is None.")
        parts = {"y": self.y, "sample_weight": self.weight, "offset": self.offset}
        y, weight, offset = (one_per_row(x, name, self.X.shape[:1]) for name, x in parts.items())
        return MemoryMap(self.X, y, weight=weight, offset=offset, stamp=stamp_of_map(self.X))

    @property
    def without_rows(self) -> str:
        return f"X must have at least one row; got shape {self.X.shape}."

    def keep(self) -> None:
        """Keep no copy: the rows are mapped already."""

    def check_unchanged(self) -> None:
        if self.stamp != stamp_of_map(self.X):
            raise ValueError(
                f"the source must have the same rows in every pass; got {self.X.filename}, which was written to since "
                "the first. Do not write to a memory map during a fit."
            )

    def read(self, rows: int, features: bool = True) -> Iterator[Chunk]:
        self.check_unchanged()
        for start in range(0, len(self.X) + rows, rows):
            if (
                features and not self.stays and start >= 2 * rows
            ):  # a chunk is requested while the one before it is in use
                release_pages(self.X, self.X[start - 2 * rows : start - rows])
            if start < len(self.X):
                yield self.chunk(slice(start, start + rows), lambda i, start=start: f"row {start + i}", features)  # type: ignore[misc]

    def pick(self, chosen: np.ndarray) -> Iterator[Chunk]:
        """Yield the chosen rows, in ascending order, without reading the others."""
        for start in range(0, len(chosen), PICKED_ROWS):
            part = chosen[start : start + PICKED_ROWS]
            yield self.chunk(part, lambda i, part=part: f"row {part[i]}")  # type: ignore[misc]

    def chunk(self, part: slice | np.ndarray, place: Callable[[int], str], features: bool = True) -> Chunk:
        y, weight, offset = (None if x is None else copied(x, part) for x in (self.y, self.weight, self.offset))
        X = None
        if features:
            X = viewed(self.X, part, self.stays) if isinstance(part, slice) else copied(self.X, part, self.stays)
        return Chunk(X, y, weight=weight, offset=offset, place=place)


def stamp_of_map(X: np.memmap) -> tuple[int, int] | None:
    """Return size and time of the last change of a map's file, or None; changed pages are written to it first."""
    if X.filename is None or X.mode == "c":  # changed pages of a private map are in no file
        return None
    if X.mode != "r":
        X.flush()
    return stamp_of(Path(X.filename))


def viewed(x: np.memmap, part: slice, stay: bool) -> np.ndarray:
    """Return a view of some rows in the file, or a copy if their type is not a float of this machine."""
    rows = np.asarray(x[part])
    plain = rows.dtype in (np.float64, np.float32) and rows.dtype.isnative and rows.flags.aligned
    return rows if plain and min(rows.strides) >= 0 else copied(x, part, stay)


def copied(x: np.ndarray, part: slice | np.ndarray, stay: bool = False) -> np.ndarray:
    """Return a copy of some rows. If they are mapped from a file, its pages are released unless they may `stay`."""
    rows = np.array(x[part], dtype=x.dtype.newbyteorder("="), copy=True, subok=False)
    if not stay:
        release_pages(x, x)
    return rows


def release_pages(x: np.ndarray, part: np.ndarray) -> None:
    """Tell the system that the pages of a part of a map are not needed; it reads them again if they are."""
    mapped = getattr(x, "_mmap", None)
    # pages of a private map ("c") may hold values that no file contains
    if mapped is None or getattr(x, "mode", "c") == "c" or not hasattr(mmap, "MADV_DONTNEED"):
        return
    low, high = byte_bounds(part)
    start = (low - np.frombuffer(mapped, np.uint8, 1).ctypes.data) // mmap.PAGESIZE * mmap.PAGESIZE
    if high > low:
        mapped.madvise(mmap.MADV_DONTNEED, start, min(high - low + mmap.PAGESIZE, len(mapped) - start))
