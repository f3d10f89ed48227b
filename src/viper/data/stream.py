"""Rows larger than memory as a source for the solver: read ahead in chunks, checked as they come, never kept.

A chunk is a whole number of the blocks that arrays in memory are cut into, so that every sum over rows, and with it
the fit, is the same wherever the rows are kept.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from viper.data import checks
from viper.data.files import Chunk, MemoryMap, Reader
from viper.inference.rows import BLOCK_ROWS, CPU, Arrays, Block, InBlocks, RowFunction, add_up, scattered

CHUNK_BYTES = 1 << 24  # of features in a chunk: large enough to read at full speed; about four chunks exist at a time
CHUNK_BYTES_DEVICE = 1 << 28
SCAN_ROWS = 1 << 18  # at a time, where only labels are read
FIRST_ROWS = 100  # by which a source is recognised in every pass
ROUNDING = 1e-6  # of the largest entry: what a function that computes its rows may be off

Item = TypeVar("Item")
Watch = Callable[[int], None]


def unseen(rows: int) -> None:
    """Nobody watches."""


class Checked(NamedTuple):
    """Rows that can be trusted: finite features, whether the label is the second class, weight and offset."""

    X: np.ndarray
    label: np.ndarray
    weight: np.ndarray | None
    offset: np.ndarray | None


# ---------------------------------------------------------------------------------------------------------------------
# The first pass, and what every pass checks


def scan(reader: Reader, known: Any, watch: Watch) -> tuple[np.ndarray, int]:
    """The two classes and the number of rows; features are read only if they cannot be left out."""
    classes = None if known is None else checks.distinct(np.asarray(known))
    rows, weighty = 0, False
    for chunk in ahead(reader.read(SCAN_ROWS, features=False)):
        y, weight = chunk.y, check_weight(chunk)
        assert y is not None
        finite(y, "y", chunk.place)
        if known is None:
            classes = distinct(classes, y, chunk.place)
        rows += len(y)
        weighty = weighty or weight is None or bool((weight > 0.0).any())
        watch(len(y))
    if classes is None or not rows:
        raise ValueError("the source must have at least one row; got none. Let a function begin anew in each call.")
    if not weighty:
        raise ValueError("sample_weight must be positive somewhere; got all zero. Leave it out to weigh rows equally.")
    checks.two_classes(classes)
    return classes, rows


def distinct(found: np.ndarray | None, y: np.ndarray, place: Callable[[int], str]) -> np.ndarray:
    """The labels found so far and those of some more rows; a complaint if one is missing or there are too many."""
    if found is not None and len(found) == 2 and bool(((y == found[0]) | (y == found[1])).all()):
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
            checks.two_classes(labels)
        except ValueError as error:
            i = third([] if found is None else list(found), y)
            raise ValueError(f"{error} The third is {y[i : i + 1].tolist()[0]!r} in {place(i)}.") from None
    return labels


def third(found: list[Any], y: np.ndarray) -> int:
    """The first row with the third label, after those that were found before."""
    while True:
        new = np.logical_and.reduce([y != label for label in found] or [np.ones(len(y), bool)])
        i = int(new.argmax())
        found = [*found, y[i]]
        if len(found) > 2:
            return i


def check(chunk: Chunk, classes: np.ndarray | None) -> Checked:
    """What was read, with the label as a code; a complaint names file and row."""
    X = chunk.X
    assert X is not None
    finite(X, "X", chunk.place)
    offset = numbers(chunk.offset, "offset", chunk.place)
    if classes is None:
        return Checked(X, np.zeros(len(X), bool), None, offset)
    assert chunk.y is not None
    code = np.asarray(chunk.y == classes[1], dtype=bool)
    strange = ~(code | (chunk.y == classes[0]))
    if strange.any():
        i = int(strange.argmax())
        got = f"{chunk.y[i : i + 1].tolist()[0]!r} in {chunk.place(i)}"
        raise ValueError(f"y must contain only the known classes {classes.tolist()}; got {got}.")
    return Checked(X, code, check_weight(chunk), offset)


def check_weight(chunk: Chunk) -> np.ndarray | None:
    weight = numbers(chunk.weight, "sample_weight", chunk.place)
    if weight is not None and bool((weight < 0.0).any()):
        i = int(weight.argmin())
        raise ValueError(f"sample_weight must not be negative; got {weight[i]} in {chunk.place(i)}.")
    return weight


def numbers(x: np.ndarray | None, name: str, place: Callable[[int], str]) -> np.ndarray | None:
    """A finite vector of float64, or None."""
    if x is None:
        return None
    values = checks.read_numbers(x, name)
    finite(values, name, place)
    return values


def finite(x: np.ndarray, name: str, place: Callable[[int], str]) -> None:
    """No NaN or infinity, or a complaint that says where the first is."""
    if x.dtype.kind != "f":
        return
    with np.errstate(all="ignore"):
        if np.isfinite(x.sum()):  # one number that is not makes the sum so
            return
    bad = ~np.isfinite(x)
    if bad.any():
        i = int(bad.reshape(len(x), -1).any(1).argmax())
        raise ValueError(f"{name} must be finite; got NaN or infinity in {place(i)}. Impute or drop those rows.")


# ---------------------------------------------------------------------------------------------------------------------
# The source


@dataclass(eq=False)
class Stream(InBlocks):
    """Rows that are read anew for every pass; `classes` is None where their labels are not known.

    `watch` is told of the rows of every chunk that was used.
    """

    reader: Reader
    classes: np.ndarray | None
    rows: int
    intercept: bool = False
    device: torch.device = CPU
    dtype: torch.dtype = torch.float64
    block_rows: int = BLOCK_ROWS
    watch: Watch = unseen
    pending: list["Sample"] = field(default_factory=list)
    first: Checked | None = None  # rows of the first pass

    smallest_subset, float32_pays = Arrays.smallest_subset, Arrays.float32_pays  # so that the way there is the same

    @property
    def dimension(self) -> int:
        return self.reader.width + int(self.intercept)

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk: whole blocks, if one is not too large already."""
        size = CHUNK_BYTES if self.device.type == "cpu" else CHUNK_BYTES_DEVICE
        rows = max(1, size // (8 * max(1, self.reader.width)))
        return rows - rows % self.block_rows if rows > self.block_rows else rows

    def chunks(self) -> Iterator[Arrays]:
        """All rows in order, as arrays of `chunk_rows`."""
        checked = (check(chunk, self.classes) for chunk in self.reader.read(self.chunk_rows))
        seen = 0
        for part in ahead(regrouped(checked, self.chunk_rows)):
            if not seen:
                self.recognise(piece(part, 0, FIRST_ROWS))
            seen += len(part.X)
            yield self.arrays(part)
            self.watch(len(part.X))
        if seen != self.rows and self.classes is not None:
            raise ValueError(
                f"the source must have the same rows in every pass; got {self.rows} rows, and now {seen}. "
                "Let nothing write to it during a fit, and let a function begin anew in each call."
            )

    def recognise(self, now: Checked) -> None:
        """The first rows must be those of the first pass, as far as there are as many."""
        before = self.first = self.first or Checked(*(None if x is None else x.copy() for x in now))  # type: ignore[arg-type]
        if len(now.X) == len(before.X) and not all(map(alike, now, before)):
            raise ValueError(
                "the source must have the same rows in every pass; got others at its beginning than before. Let a "
                "function begin anew in each call, with the same seed, and let nothing write to files during a fit."
            )

    def arrays(self, rows: Checked) -> Arrays:
        offset, weight = (None if x is None else checks.as_tensor(x) for x in (rows.offset, rows.weight))
        offset, weight = (None if x is None else x.to(self.device) for x in (offset, weight))
        X, label = checks.as_tensor(rows.X), torch.from_numpy(rows.label).to(self.device)
        return Arrays(X, label, self.intercept, offset, None, weight, self.device, self.dtype, self.block_rows)

    def blocks(self) -> Iterator[Block]:
        for chunk in self.chunks():
            yield from chunk.blocks()

    def reduce(self, function: RowFunction) -> list[Tensor]:
        return add_up(chunk.reduce(function) for chunk in self.chunks())

    def subset(self, k: int, generator: np.random.Generator) -> "Sample":
        """The rows that `Arrays.subset` would take, read when they are first needed."""
        return self.take(scattered(self.rows, k, generator).numpy())

    def take(self, chosen: np.ndarray) -> "Sample":
        """The chosen rows, in ascending order."""
        sample = Sample(self, chosen)
        self.pending.append(sample)
        return sample

    def whole(self) -> Arrays:
        """All rows in memory, where they are few."""
        return self.take(np.arange(self.rows)).arrays

    def gather(self) -> None:
        """One pass in which all samples that were asked for get their rows; none where rows can be picked."""
        samples, start = list(self.pending), 0
        self.pending.clear()
        if isinstance(self.reader, MemoryMap):
            for sample in samples:
                pieces = [check(chunk, self.classes) for chunk in self.reader.pick(sample.chosen)]
                rows = self.arrays(concatenated(pieces))
                sample.held = replace(rows, features=rows.features.to(self.device))
            return
        for chunk in self.chunks():
            for sample in samples:
                sample.collect(chunk, start)
            start += chunk.rows


class Sample(InBlocks):
    """Some rows of a stream in memory, once they are needed; samples asked for together are read together."""

    smallest_subset, float32_pays = Arrays.smallest_subset, Arrays.float32_pays

    def __init__(self, stream: Stream, chosen: np.ndarray) -> None:
        self.stream, self.chosen = stream, chosen
        self.held: Arrays | None = None

    @property
    def rows(self) -> int:
        return len(self.chosen)

    @property
    def dimension(self) -> int:
        return self.stream.dimension

    @property
    def device(self) -> torch.device:
        return self.stream.device

    @property
    def arrays(self) -> Arrays:
        if self.held is None:
            self.stream.gather()
        assert self.held is not None
        return self.held

    def whole(self) -> Arrays:
        return self.arrays

    def collect(self, chunk: Arrays, start: int) -> None:
        """Keep those rows of a chunk that were chosen."""
        if self.held is None:
            self.held = room(chunk, self.rows)
        low, high = np.searchsorted(self.chosen, [start, start + chunk.rows])
        found = chunk.take(torch.from_numpy(self.chosen[low:high] - start))
        for mine, theirs in zip(columns(self.held), columns(found), strict=True):
            if mine is not None and theirs is not None:
                mine[low:high] = theirs

    def blocks(self) -> Iterator[Block]:
        return self.arrays.blocks()

    def reduce(self, function: RowFunction) -> list[Tensor]:
        return self.arrays.reduce(function)

    def subset(self, k: int, generator: np.random.Generator) -> Arrays:
        return self.arrays.subset(k, generator)


def alike(now: np.ndarray | None, before: np.ndarray | None) -> bool:
    """Whether numbers are the same but for rounding."""
    if now is None or before is None:
        return now is before
    now, before = np.asarray(now, np.float64) / 2.0, np.asarray(before, np.float64) / 2.0  # as differences overflow
    return bool((np.abs(now - before) <= ROUNDING * np.abs(before).max(0, initial=0.0)).all())


def columns(rows: Arrays) -> tuple[Tensor | None, ...]:
    return rows.features, *rows.vectors()


def room(like: Arrays, k: int) -> Arrays:
    """Arrays for k rows, not yet filled, where they will be used."""
    empty = (None if x is None else x.new_empty((k, *x.shape[1:]), device=like.device) for x in columns(like))
    features, label, offset, residual, weight = empty
    assert label is not None
    return replace(like, features=features, label=label, offset=offset, residual=residual, weight=weight)


# ---------------------------------------------------------------------------------------------------------------------
# From chunks as they are read to chunks as they are used


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, the next one made in another thread while the last is in use."""
    end: Any = object()
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = reader.submit(next, items, end)
            yield item


def regrouped(chunks: Iterator[Checked], rows: int) -> Iterator[Checked]:
    """The same rows in chunks of `rows`, but for the last."""
    held: list[Checked] = []
    count = 0
    for chunk in chunks:
        start = 0
        while len(chunk.X) - start >= rows - count:
            stop = start + rows - count
            yield concatenated([*held, piece(chunk, start, stop)])
            held, count, start = [], 0, stop
        if start < len(chunk.X):
            held.append(piece(chunk, start, len(chunk.X)))
            count += len(chunk.X) - start
    if held:
        yield concatenated(held)


def piece(chunk: Checked, start: int, stop: int) -> Checked:
    return Checked(*(None if x is None else x[start:stop] for x in chunk))  # type: ignore[arg-type]


def concatenated(pieces: list[Checked]) -> Checked:
    if len(pieces) == 1:
        return pieces[0]
    return Checked(*(None if x[0] is None else np.concatenate(x) for x in zip(*pieces, strict=True)))  # type: ignore[arg-type]
