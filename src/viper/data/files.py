"""Rows that are read in chunks, anew for every pass: files, memory maps, and functions that yield blocks.

A description (`Files`, `Blocks`, `MemoryMap`) is opened once, which checks what can be checked without reading rows,
and then read as often as there are passes. Memory is that of a chunk, whatever the number of rows.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import isgenerator
from os import PathLike
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from viper.data import arrow


class Chunk(NamedTuple):
    """Consecutive rows as they were read; parts that the source does not have, or was not asked for, are None."""

    X: np.ndarray | None
    y: np.ndarray | None
    weight: np.ndarray | None
    offset: np.ndarray | None
    place: Callable[[int], str]  # the i-th of these rows, in words


class Reader(Protocol):
    """An opened source: how wide its rows are, the names of the features if they have any, and the rows."""

    @property
    def width(self) -> int: ...

    @property
    def names(self) -> Sequence[str] | None: ...

    def read(self, rows: int, features: bool = True) -> Iterator[Chunk]:
        """All rows from the first, about `rows` at a time; without `features`, X may be left out."""


# ---------------------------------------------------------------------------------------------------------------------
# Files


@dataclass(frozen=True)
class Files:
    """Rows in Parquet, Arrow (Feather) or CSV files, read chunk by chunk and never all at once.

    Parameters
    ----------
    path : str, path, or list of them
        A file, a directory of files, or a pattern such as ``"rows/*.parquet"``. Rows come in the order of the names.
        Or a dataset of pyarrow.
    target : str, optional
        The column of labels: any two values. Needed to fit.
    features : list of str, optional
        The columns of X, all numeric. By default every column that has no other part and is not the index of a pandas
        frame, nor a first one without a name in CSV; to predict, those of the fit.
    weight, offset : str, optional
        The columns of row weights and of the known part of the log-odds.

    Examples
    --------
    >>> import tempfile, pandas, viper
    >>> rows = pandas.DataFrame(
    ...     {"dose": [0.1, 0.4, 0.8, 1.5, 2.0, 2.5], "ill": ["no", "no", "yes", "no", "yes", "yes"]}
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rows.to_csv(f"{folder}/rows.csv", index=False)
    ...     model = viper.VariationalLogisticRegression().fit(viper.Files(f"{folder}/*.csv", target="ill"))
    >>> model.feature_names_in_, model.classes_
    (array(['dose'], dtype=object), array(['no', 'yes'], dtype=object))
    """

    path: Any
    target: str | None = None
    features: Sequence[str] | None = None
    weight: str | None = None
    offset: str | None = None

    def open(self, labels: bool, known: Sequence[str] | None) -> "FileReader":
        if labels and self.target is None:
            raise ValueError("target must name the column of labels; got None. Write Files(path, target='y').")
        check_names(self.features, "features")
        if self.target is not None and self.features is not None and self.target in self.features:
            raise ValueError(f"features must not contain the target; got {self.target!r} as both. Leave it out.")
        files = arrow.find_files(self.path)
        others = {"target": self.target if labels else None, "weight": self.weight if labels else None}
        others["offset"] = self.offset
        apart = {name for name in (self.target, self.weight, self.offset) if name is not None}
        chosen = known if known is not None else self.features
        kinds = arrow.feature_types(files, None if chosen is None else list(chosen), apart, others)
        return FileReader(files, kinds, others)


def check_names(names: Sequence[str] | None, what: str) -> None:
    """None, or a list in which every name occurs once."""
    if isinstance(names, str):
        raise ValueError(f"{what} must be a list of columns; got the text {names!r}. Write {what}=[{names!r}].")
    known = [] if names is None else list(names)
    twice = [name for i, name in enumerate(known) if name in known[:i]]
    if twice:
        raise ValueError(f"{what} must name each column once; got {twice[0]!r} twice. Leave one out.")


@dataclass(frozen=True)
class FileReader:
    """The files of one table, with the columns that are wanted."""

    files: list[arrow.ArrowFile]
    kinds: dict[str, Any]  # feature -> numpy's type
    others: dict[str, str | None]

    @property
    def names(self) -> list[str]:
        return list(self.kinds)

    @property
    def width(self) -> int:
        return len(self.kinds)

    def read(self, rows: int, features: bool = True) -> Iterator[Chunk]:
        named = [name for name in self.others.values() if name is not None]
        wanted = list(dict.fromkeys([*(self.names if features else []), *named]))
        numbers = {*self.names, *named} - {self.others["target"]}
        dtype = np.result_type(*self.kinds.values())
        for file in self.files:
            start = 0
            for batch in file.batches(wanted, numbers, rows):
                X = arrow.batch_matrix(batch, self.names, dtype) if features else None
                y, weight, offset = (None if n is None else arrow.batch_vector(batch, n) for n in self.others.values())
                yield Chunk(X, y, weight, offset, file.place(start))
                start += batch.num_rows


# ---------------------------------------------------------------------------------------------------------------------
# Functions that yield blocks


@dataclass(frozen=True)
class Blocks:
    """Rows from a function that is called for every pass and yields blocks ``(X, y[, weight[, offset]])``.

    Every call must yield the same rows in the same order, in blocks of any size. To predict, the blocks may be X alone.

    Parameters
    ----------
    factory : callable
        Takes nothing, returns an iterable; for instance a generator function.
    names : list of str, optional
        Of the features; by default the columns of the first block, if it is a DataFrame. Blocks that are DataFrames are
        put in its order.

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
        blocks = begin(self.factory)
        if blocks is begin(self.factory):
            raise ValueError(
                "the function must begin anew in every call; got the same iterator twice. Return a new iterable."
            )
        first = next(blocks, None)
        if first is None:
            raise ValueError("the source must yield at least one block; got none. Return a new iterable for each call.")
        X = next(BlockReader(lambda: [first], labels, 0, None, None).read(1)).X
        assert X is not None
        columns = frame_names(first)
        names = columns if self.names is None else list(self.names)
        if names is not None and len(names) != X.shape[1]:
            raise ValueError(f"names must be one per column, {X.shape[1]}; got {len(names)}.")
        same = columns is not None and names is not None and sorted(columns) == sorted(names)
        return BlockReader(self.factory, labels, X.shape[1], names, names if same else columns)


def begin(factory: Any) -> Iterator[Any]:
    """The blocks of a new pass."""
    if isgenerator(factory):
        once()
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


def once() -> NoReturn:
    raise ValueError(
        "X must be readable once per pass; got a generator, which can be read only once. Pass the function that "
        "makes it, without calling it."
    )


def frame_names(block: Any) -> list[str] | None:
    """The columns of a block that is a frame, if they are text."""
    X = block[0] if isinstance(block, tuple | list) and block else block
    columns = getattr(X, "column_names", getattr(X, "columns", None))  # Arrow's, or those of any other frame
    return list(columns) if columns is not None and all(isinstance(name, str) for name in columns) else None


@dataclass(frozen=True)
class BlockReader:
    factory: Callable[[], Iterable[Any]]
    labels: bool
    width: int
    names: Sequence[str] | None
    columns: Sequence[str] | None  # of the first block, if it is a frame: their order

    def read(self, rows: int, features: bool = True) -> Iterator[Chunk]:
        first = 0
        for number, block in enumerate(begin(self.factory)):
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
                    "Give every block weights, if need be of one."
                )
            X, y, weight, offset = [*parts, None, None, None][:4]
            X = self.in_order(X, number)
            yield as_chunk(X, y if self.labels else None, weight if self.labels else None, offset, number, self.width)

    def in_order(self, X: Any, number: int) -> Any:
        """The columns of a frame in the order of the first block's, by their names."""
        there = frame_names(X)
        if self.columns is None or there is None or there == list(self.columns):
            return X
        if sorted(there) != sorted(self.columns) or len({*there}) < len(there):
            raise ValueError(
                f"every block must have the columns of the first, {list(self.columns)[:10]}; got {there[:10]} in "
                f"block {number}."
            )
        return np.asarray(X)[:, [there.index(name) for name in self.columns]]


def as_chunk(X: Any, y: Any, weight: Any, offset: Any, number: int, width: int) -> Chunk:
    """A block of arrays that fit each other, or a complaint that names the block."""
    here = f"block {number}"
    if hasattr(X, "toarray"):
        raise ValueError(f"X must be a dense numeric array; got {type(X).__name__} in {here}. Yield X.toarray().")
    try:
        X = np.asarray(X)
        X = X if X.dtype in (np.float32, np.float64) else X.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"X must be a dense numeric array; got {str(error).splitlines()[0]} in {here}.") from None
    if X.ndim != 2 or (width and X.shape[1] != width):
        columns = f"{width} columns, as the first block" if width else "two dimensions"
        raise ValueError(f"X must have {columns}; got shape {X.shape} in {here}.")
    given = {"y": y, "sample_weight": weight, "offset": offset}
    y, weight, offset = (fitting(x, name, X.shape[:1], f" in {here}") for name, x in given.items())
    return Chunk(X, y, weight, offset, lambda i: f"{here}, row {i}")


def fitting(x: Any, name: str, shape: tuple[int, ...], here: str = "") -> Any:
    """An array with one entry per row, or None; as for arrays, y may be one column, and else a number does for all."""
    if x is None:
        return None
    x = x if isinstance(x, np.ndarray) else np.asarray(x)
    if name == "y" and x.shape == (*shape, 1):
        return x[:, 0]
    if name != "y" and x.ndim == 0:
        return np.broadcast_to(x, shape)
    if x.shape != shape:
        raise ValueError(f"{name} must have one entry per row of X, {shape}; got shape {x.shape}{here}.")
    return x


# ---------------------------------------------------------------------------------------------------------------------
# Memory maps


PICKED = 2048  # rows at a time: the system maps 64 kB around each


@dataclass(frozen=True, eq=False)
class MemoryMap:
    """A memory-mapped X, with y, weights and offset in arrays or maps of their own.

    Each chunk is copied out and its pages given back, so that what was read does not pile up in memory.
    """

    X: np.memmap
    y: Any = None
    weight: Any = None
    offset: Any = None
    names: Sequence[str] | None = field(default=None, init=False)

    @property
    def width(self) -> int:
        return int(self.X.shape[1])

    def open(self, labels: bool, known: Sequence[str] | None) -> "MemoryMap":
        if self.X.ndim != 2:
            raise ValueError(f"X must be a 2-D array; got shape {self.X.shape}. Reshape your data.")
        if self.X.dtype.kind not in "fiub":
            raise ValueError(f"X must be numeric; got dtype {self.X.dtype}. Encode text and dates as numbers.")
        if not labels:
            return MemoryMap(self.X, None, None, fitting(self.offset, "offset", self.X.shape[:1]))
        if self.y is None:
            raise ValueError("This estimator requires y to be passed, but the target y is None.")
        parts = {"y": self.y, "sample_weight": self.weight, "offset": self.offset}
        return MemoryMap(self.X, *(fitting(x, name, self.X.shape[:1]) for name, x in parts.items()))

    def read(self, rows: int, features: bool = True) -> Iterator[Chunk]:
        for start in range(0, len(self.X), rows):
            yield self.chunk(slice(start, start + rows), lambda i, start=start: f"row {start + i}", features)  # type: ignore[misc]

    def pick(self, chosen: np.ndarray) -> Iterator[Chunk]:
        """The chosen rows, in ascending order, without a look at the others."""
        for start in range(0, len(chosen), PICKED):
            part = chosen[start : start + PICKED]
            yield self.chunk(part, lambda i, part=part: f"row {part[i]}")  # type: ignore[misc]

    def chunk(self, part: slice | np.ndarray, place: Callable[[int], str], features: bool = True) -> Chunk:
        given = (self.X if features else None, self.y, self.weight, self.offset)
        X, y, weight, offset = (None if x is None else copied(x, part) for x in given)
        return Chunk(X, y, weight, offset, place)


def copied(x: np.ndarray, part: slice | np.ndarray) -> np.ndarray:
    """Some rows, in memory; if they were mapped from a file, the map lets go of its pages."""
    rows = np.array(x[part], copy=True, subok=False)
    mapped = getattr(x, "_mmap", None)
    # pages of a private map ("c") may hold what is in no file
    if mapped is not None and getattr(x, "mode", "c") != "c" and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# What a user may pass in place of arrays

Description = Files | Blocks | MemoryMap  # each with `open(labels, known)`, `known` the features an estimator expects


def describe(X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None) -> Description | None:
    """The description of rows that are to be read in chunks, or None if X is something else."""
    if isinstance(X, np.memmap):
        return MemoryMap(X, y, sample_weight, offset)
    if isgenerator(X):
        once()
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
