"""Rows larger than memory as a source for the solver: read ahead in chunks, and checked as they arrive.

Rows that take long to decode are kept from the first pass until the fit ends, if there is room for them.
A chunk is a whole number of the blocks into which arrays in memory are split, so every sum over rows, and hence the
fit, is the same wherever the rows are stored.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from viper.data import checks
from viper.data.blocks import Chunk, MemoryMap, check_finite_chunk
from viper.data.indicators import as_indicators, check_labels_vary, label_names
from viper.data.kept import KeptRows
from viper.errors import shown
from viper.inference.rows import (
    BLOCK_ROWS,
    CPU,
    Arrays,
    Block,
    BlockSource,
    RowFunction,
    SourceTraits,
    add_up,
    scattered,
    traits_on,
)

CHUNK_BYTES = 1 << 25  # bytes of features per chunk: enough to read at full speed; about four chunks exist at a time
CHUNK_BYTES_DEVICE = 1 << 28
SCAN_ROWS = 1 << 18  # rows per chunk when only labels are read
FIRST_ROWS = 100  # rows compared in every pass, to detect a source that has changed
ROW_ROUNDING = 1e-6  # how much recomputed rows may differ, relative to the largest entry

PARTS = ("features", "label", "offset", "weight")  # parts of a chunk

ONE_COLUMN = checks.RowFormat()  # of two classes
Item = TypeVar("Item")
RowName = Callable[[int], str]  # names the i-th row of a chunk in messages


def ignore_progress(rows: int) -> None:
    """Do nothing: the default observer of a source."""


class Reader(Protocol):
    """An opened description: the number of features, their names if known, and the rows."""

    @property
    def width(self) -> int: ...

    @property
    def names(self) -> Sequence[str] | None: ...

    @property
    def without_rows(self) -> str:
        """The error if there are none."""

    def read(self, rows: int, features: bool = True) -> Iterator[Chunk]:
        """Yield all rows from the first, about `rows` at a time; without `features`, X may be left out."""

    def keep(self) -> KeptRows | None:
        """Return a place to keep all rows during a fit, or None if there is no room or reading them is fast."""

    def check_unchanged(self) -> None:
        """Raise if there are signs that the rows have changed since they were opened."""


# ---------------------------------------------------------------------------------------------------------------------
# The first pass, and what every pass checks


class Scanned(NamedTuple):
    """What the first pass finds: classes or names of labels, the numbers of rows and of columns of y.

    If there was room to keep them, also all rows.
    """

    classes: np.ndarray
    rows: int
    labels: int = 0  # if y has several columns
    kept: KeptRows | None = None


def scan(reader: Reader, known: Any, observer: Callable[[int], None], format: checks.RowFormat = ONE_COLUMN) -> Scanned:
    """Read the labels of all rows, and features only if they are to be kept or the reader cannot skip them."""
    kept = reader.keep() if format.keep else None
    rows = SCAN_ROWS if kept is None else chunk_rows(reader.width, *format.placed(reader.width))
    seen = LabelScan(known, format, reader)
    with nullcontext() if kept is None else closing(kept):
        for chunk in read_ahead(reader.read(rows, features=kept is not None)):
            seen.add(chunk)
            if kept is not None:
                kept.add(chunk)
            observer(len(chunk.label))
        found = seen.found()
        if kept is None or not kept.complete:
            return found
        kept.open(reader.width, partial(check_chunk, classes=found.classes, labels=found.labels))
    return found._replace(kept=kept)


class LabelScan:
    """What is known about the labels after some rows."""

    def __init__(self, known: Any, format: checks.RowFormat, reader: Reader) -> None:
        self.known, self.reader, self.labels, self.many = known, reader, format.labels, format.classes != 2
        self.classes: np.ndarray | None = None
        if known is not None:
            self.classes = np.asarray(known) if self.labels else checks.known_classes(known)
        self.rows, self.any_weight = 0, False
        self.some = self.not_all = np.zeros(1, bool)  # whether a label has rows with it, and rows without

    def add(self, chunk: Chunk) -> None:
        y, weight = chunk.label, check_weight(chunk)
        check_finite_chunk(y, "y", chunk.place)
        if y.ndim == 2 or self.labels:
            self.add_indicators(chunk)
        elif self.known is None:
            self.classes = more_classes(self.classes, y, chunk.place, self.many)
        self.rows += len(y)
        self.any_weight = self.any_weight or weight is None or bool((weight > 0.0).any())

    def add_indicators(self, chunk: Chunk) -> None:
        y = chunk.label
        if self.labels is None or y.ndim != 2:
            wanted = "one column" if self.labels is None else "a column for each label"
            raise ValueError(f"y must have {wanted}; got shape {y.shape} from {chunk.place(0)} on.")
        self.classes = label_names(getattr(self.reader, "targets", None), y.shape[1], self.classes)
        ones = as_indicators(y, self.classes, chunk.place)
        self.some, self.not_all, self.labels = self.some | ones.any(0), self.not_all | ~ones.all(0), y.shape[1]

    def found(self) -> Scanned:
        if self.classes is None or not self.rows:
            raise ValueError(self.reader.without_rows)
        if not self.any_weight:
            raise ValueError(checks.ALL_WEIGHTS_ZERO)
        if not self.labels:
            checks.check_class_count(self.classes, self.many)
        elif self.known is None:
            check_labels_vary(self.classes, self.some, self.not_all)
        return Scanned(self.classes, self.rows, self.labels or 0)


def more_classes(found: np.ndarray | None, y: np.ndarray, place: RowName, many: bool = False) -> np.ndarray:
    """Add the labels of more rows to those found. Raises if one is missing, or unless `many`, if there are over two."""
    if found is not None and len(found) >= 2 and not checks.class_numbers(y, found)[1].any():
        return found
    if y.dtype.kind == "O":
        import pandas

        if (missing := pandas.isna(y)).any():
            where = place(int(missing.argmax()))
            raise ValueError(
                f"y must have a label in every row; got none or NA in {where}. Fill it in, or drop the row."
            )
    labels = checks.distinct(y if found is None else np.concatenate([found, y]))
    if len(labels) > 2:
        try:
            check_classification_targets(y)
            checks.check_class_count(labels, many)
        except ValueError as error:
            i = row_of_third_class([] if found is None else list(found), y)
            raise ValueError(f"{error} The third is {shown(y[i : i + 1].tolist()[0])} in {place(i)}.") from None
    return labels


def row_of_third_class(found: list[Any], y: np.ndarray) -> int:
    """Return the first row with a third label, given those found before."""
    while True:
        new = np.logical_and.reduce([y != label for label in found] or [np.ones(len(y), bool)])
        i = int(new.argmax())
        found = [*found, y[i]]
        if len(found) > 2:
            return i


def check_chunk(chunk: Chunk, classes: np.ndarray | None, labels: int = 0, known: bool = False) -> Chunk:
    """Check that the numbers are finite, and make labels True for the second class, or for 1. Errors name the row.

    Features that are `known` to be finite are not checked again.
    """
    if not known and not chunk.finite:
        check_finite_chunk(chunk.features, "X", chunk.place)
    offset = finite_numbers(chunk.offset, "offset", chunk.place)
    if classes is None:
        return Chunk(chunk.features, np.zeros(len(chunk.features), bool), offset=offset)
    if labels:
        found = as_indicators(chunk.label, classes, chunk.place)
        return Chunk(chunk.features, found, offset=offset, weight=check_weight(chunk))
    if len(classes) > 2 and offset is not None and offset.shape[1:] != (len(classes),):
        raise ValueError(
            f"offset must have {len(classes)} columns, one for each class; got shape {offset.shape} from "
            f"{chunk.place(0)} on."
        )
    code, strange = checks.class_numbers(chunk.label, classes)
    if strange.any():
        i = int(strange.argmax())
        got = f"{shown(chunk.label[i : i + 1].tolist()[0])} in {chunk.place(i)}"
        raise ValueError(f"y must contain only the known classes {shown(classes.tolist())}; got {got}.")
    return Chunk(chunk.features, code, offset=offset, weight=check_weight(chunk))


def check_weight(chunk: Chunk) -> np.ndarray | None:
    weight = finite_numbers(chunk.weight, "sample_weight", chunk.place)
    if weight is not None and bool((weight < 0.0).any()):
        i = int(weight.argmin())
        raise ValueError(f"sample_weight must not be negative; got {weight[i]} in {chunk.place(i)}.")
    return weight


def finite_numbers(x: np.ndarray | None, name: str, place: RowName) -> np.ndarray | None:
    """Return a finite float64 vector, or None."""
    if x is None:
        return None
    values = checks.read_numbers(x, name)
    check_finite_chunk(values, name, place)
    return values


# ---------------------------------------------------------------------------------------------------------------------
# The source


@dataclass(eq=False)
class Stream(BlockSource):
    """Rows that are read again in every pass; `classes` is None if their labels are unknown.

    The observer is called with the number of rows of every chunk that has been used.
    """

    reader: Reader
    classes: np.ndarray | None
    rows: int
    intercept: bool = False
    device: torch.device = CPU
    dtype: torch.dtype = torch.float64
    block_rows: int = BLOCK_ROWS
    labels: int = 0  # columns of y, if there are several
    observer: Callable[[int], None] = ignore_progress
    pending: list["StreamSample"] = field(default_factory=list)
    first: Chunk | None = None  # first rows of the first pass
    kept: KeptRows | None = None  # all rows, until they are released
    known: bool = False  # whether a whole pass found the features finite, and a change since would have been noticed

    @property
    def traits(self) -> SourceTraits:
        return replace(traits_on(self.device, self.rows, "stream"), labels=self.labels)

    def observe(self, callback: Callable[[int], None]) -> None:
        self.observer = callback

    @property
    def dimension(self) -> int:
        return self.reader.width + int(self.intercept)

    def release(self) -> None:
        self.kept = None

    def checked_chunks(self) -> Iterator[Chunk]:
        """Yield all rows in order, in chunks of the same size: those kept, or read ahead."""
        if self.kept is not None:
            self.reader.check_unchanged()
            return iter(self.kept)
        rows = chunk_rows(self.reader.width, self.device, self.block_rows)
        check = partial(check_chunk, classes=self.classes, labels=self.labels, known=self.known)
        return read_ahead(regrouped(map(check, self.reader.read(rows)), rows))

    def chunks(self) -> Iterator[Arrays]:
        """Yield all rows in order, as arrays."""
        seen = 0
        for part in self.checked_chunks():
            if not seen:
                self.recognise(slice_of(part, 0, FIRST_ROWS))
            seen += len(part.features)
            yield self.arrays(part)
            self.observer(len(part.features))
        if seen != self.rows and self.classes is not None:
            raise ValueError(
                f"the source must have the same rows in every pass; got {self.rows} rows, and now {seen}. "
                "Do not write to it during a fit; a function must start over in each call."
            )
        self.known = isinstance(self.reader, MemoryMap) and self.reader.stamp is not None

    def recognise(self, now: Chunk) -> None:
        """Raise if the first rows differ from those of the first pass, unless their number differs too."""
        before = self.first = self.first or each_array(now, np.copy)
        alike = (equal_up_to_rounding(getattr(now, name), getattr(before, name)) for name in PARTS)
        if len(now.features) == len(before.features) and not all(alike):
            raise ValueError(
                "the source must have the same rows in every pass; got different ones at the start. A function must "
                "start over in each call, with the same seed; do not write to files during a fit."
            )

    def arrays(self, chunk: Chunk) -> Arrays:
        vectors: dict[str, Any] = {
            name: None if x is None else checks.as_tensor(x).to(self.device)
            for name, x in (("label", chunk.label), ("offset", chunk.offset), ("weight", chunk.weight))
        }
        options: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "block_rows": self.block_rows}
        return Arrays(checks.as_tensor(chunk.features), intercept=self.intercept, **vectors, **options)

    def blocks(self) -> Iterator[Block]:
        for chunk in self.chunks():
            yield from chunk.blocks()

    def reduce(self, function: RowFunction) -> list[Tensor]:
        return add_up(chunk.reduce(function) for chunk in self.chunks())

    def sample(self, k: int, generator: np.random.Generator) -> "StreamSample":
        """Return the rows that `Arrays.sample` would choose, read when they are first needed."""
        return self.take(scattered(self.rows, k, generator).numpy())

    def take(self, chosen: np.ndarray) -> "StreamSample":
        """Yield the chosen rows, in ascending order."""
        sample = StreamSample(self, chosen)
        self.pending.append(sample)
        return sample

    def in_memory(self) -> Arrays:
        return self.take(np.arange(self.rows)).in_memory()

    def gather(self) -> None:
        """Read the rows of all pending samples: in one pass, or directly if the reader can pick rows."""
        samples, start = list(self.pending), 0
        self.pending.clear()
        if isinstance(self.reader, MemoryMap):
            for sample in samples:
                pieces = [check_chunk(chunk, self.classes, self.labels) for chunk in self.reader.pick(sample.chosen)]
                rows = self.arrays(concatenated_chunks(pieces))
                sample.held = replace(rows, features=rows.features.to(self.device))
            return
        for chunk in self.chunks():
            for sample in samples:
                sample.collect(chunk, start)
            start += chunk.rows


class StreamSample(BlockSource):
    """Some rows of a stream, in memory once they are needed. Samples drawn together are read together."""

    def __init__(self, stream: Stream, chosen: np.ndarray) -> None:
        self.stream, self.chosen, self.rows = stream, chosen, len(chosen)
        self.dimension, self.device = stream.dimension, stream.device
        self.held: Arrays | None = None

    @property
    def traits(self) -> SourceTraits:
        return replace(traits_on(self.device, self.rows, "stream"), labels=self.stream.labels)

    def in_memory(self) -> Arrays:
        if self.held is None:
            self.stream.gather()
        assert self.held is not None
        return self.held

    def collect(self, chunk: Arrays, start: int) -> None:
        """Keep the chosen rows of a chunk."""
        if self.held is None:
            self.held = empty_arrays(chunk, self.rows)
        low, high = np.searchsorted(self.chosen, [start, start + chunk.rows])
        found = arrays_of(chunk.take(torch.from_numpy(self.chosen[low:high] - start)))
        for name, mine in arrays_of(self.held).items():
            mine[low:high] = found[name]

    def blocks(self) -> Iterator[Block]:
        return self.in_memory().blocks()

    def reduce(self, function: RowFunction) -> list[Tensor]:
        return self.in_memory().reduce(function)


def equal_up_to_rounding(now: np.ndarray | None, before: np.ndarray | None) -> bool:
    if now is None or before is None:
        return now is before
    now, before = np.asarray(now, np.float64) / 2.0, np.asarray(before, np.float64) / 2.0  # so no difference overflows
    return bool((np.abs(now - before) <= ROW_ROUNDING * np.abs(before).max(0, initial=0.0)).all())


def arrays_of(rows: Arrays) -> dict[str, Tensor]:
    """Return features, label and the vectors that are present, by name."""
    return {"features": rows.features, **rows.vectors()}


def empty_arrays(like: Arrays, k: int) -> Arrays:
    """Return uninitialised arrays for k rows, on the device where they will be used."""
    empty: dict[str, Any] = {
        name: x.new_empty((k, *x.shape[1:]), device=like.device) for name, x in arrays_of(like).items()
    }
    return replace(like, **empty)


# ---------------------------------------------------------------------------------------------------------------------
# From chunks as they are read to chunks as they are used


def chunk_rows(width: int, device: torch.device, block_rows: int) -> int:
    """Return the rows of a chunk: whole blocks, unless a single block is already too large."""
    size = CHUNK_BYTES if device.type == "cpu" else CHUNK_BYTES_DEVICE
    rows = max(1, size // (8 * max(1, width)))
    return rows - rows % block_rows if rows > block_rows else rows


def read_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the same items, each produced in another thread while the previous one is in use."""
    end: Any = object()
    here = copy_context()  # with the number of threads

    def following() -> Any:
        return here.run(next, items, end)

    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(following)
        while (item := coming.result()) is not end:
            coming = reader.submit(following)
            yield item


def regrouped(chunks: Iterator[Chunk], rows: int) -> Iterator[Chunk]:
    """Yield the same rows in chunks of `rows`, except for the last."""
    held: list[Chunk] = []
    count = 0
    for chunk in chunks:
        start, length = 0, len(chunk.features)
        while length - start >= rows - count:
            stop = start + rows - count
            yield concatenated_chunks([*held, slice_of(chunk, start, stop)])
            held, count, start = [], 0, stop
        if start < length:
            held.append(slice_of(chunk, start, length))
            count += length - start
    if held:
        yield concatenated_chunks(held)


def each_array(chunk: Chunk, function: Callable[[np.ndarray], np.ndarray]) -> Chunk:
    """Return the chunk with the function applied to each of its arrays."""
    changed: dict[str, Any] = {name: None if (x := getattr(chunk, name)) is None else function(x) for name in PARTS}
    return Chunk(**changed)


def slice_of(chunk: Chunk, start: int, stop: int) -> Chunk:
    return each_array(chunk, lambda x: x[start:stop])


def concatenated_chunks(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    columns = {name: [getattr(chunk, name) for chunk in chunks] for name in PARTS}
    joined: dict[str, Any] = {name: None if x[0] is None else np.concatenate(x) for name, x in columns.items()}
    return Chunk(**joined)
