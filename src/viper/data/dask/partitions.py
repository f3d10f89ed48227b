"""Rows on a cluster: Dask collections as a source whose partitions stay where they are.

The workers check their partitions once and keep them as `Arrays`, grouping small ones because each task has overhead.
A pass sends a function out and sums back: each thread adds up the partitions it holds, in blocks that fit the cache,
and a tree adds up the threads if there are many. The scheduler recomputes from its graph whatever a lost worker held,
so a fit loses only time. Without a client the same tasks run on Dask's threads.
"""

import ctypes
import io
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial, reduce
from itertools import chain
from operator import itemgetter
from types import FunctionType
from typing import Any

import cloudpickle
import numpy as np
import scipy.sparse
import torch
from dask.sizeof import sizeof
from torch import Tensor

from viper.data.dask import messages
from viper.data.dask.messages import FAN_IN, Share, errors_of_loss, run_on_workers
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
)
from viper.inference.threads import one_thread

IN_MEMORY = 1 << 19  # entries of a sample that this process holds: a pass over them takes no longer than a round trip
EMBEDDED = 90_000  # bytes of a function that travel with each task; Dask would keep larger ones as a node of the graph
HEAD_ENTRIES = 1 << 14  # entries of the rows that identify a source
ATTEMPTS = 3  # tries of a pass if the scheduler or data on a worker are lost
BRIEF_ENTRIES = 1 << 27  # per thread; a pass over more takes a second or so, and the delay of tasks no longer matters
CARRIED = 1 << 20  # most bytes that travel with a message to each worker
SILENT = 2.0  # most seconds without tasks; after more, the scheduler might consider the workers idle and close them


class Partitions(BlockSource):
    """Rows in partitions, each an `Arrays`: futures on the client's cluster, or held here if there is no client.

    `parts` are lists of partitions that are kept together, `places` holds the numbers of these partitions, and `sizes`
    the number of rows of each partition. With `chosen`, only these rows of each partition count; the workers select
    them again in every pass, because there are few such passes.
    """

    device = CPU  # of the solver; workers have their own
    traits = SourceTraits("cluster")  # the rest as for arrays in memory, so that the solver takes the same steps

    def __init__(
        self,
        client: Any,
        parts: Sequence[Any],
        places: list[list[int]],
        sizes: np.ndarray,
        dimension: int,
        chosen: list[Any] | None = None,
        pace: "Pace | None" = None,
        labels: int = 0,
    ) -> None:
        self.traits = replace(Partitions.traits, labels=labels)
        self.client, self.parts, self.places, self.sizes, self.dimension = client, list(parts), places, sizes, dimension
        self.chosen: list[Any] = [None] * len(sizes) if chosen is None else chosen
        self.layout: tuple[dict[str, int], list[Share]] | None = None
        self.pace = pace or Pace()
        self.last_tasks = time.monotonic()  # when the scheduler last got tasks from us

    @property
    def rows(self) -> int:
        return int(self.sizes.sum())

    def reduce(self, function: RowFunction) -> list[Tensor]:
        if self.client is None:
            sums = run_on_workers(None, partial(group_sums, function=function), self.parts, self.chosen_of_parts())
            return tensors(added(sums))
        packed, quick = pack(function), function.keywords.get("recipe") is not None
        for _ in range(ATTEMPTS):
            try:
                return tensors(self.remote_sums(packed, quick))
            except errors_of_loss() as error:
                self.layout, last = None, error
                if self.client.status != "running":
                    break
        raise messages.connection_error(self.client, last) from last

    def remote_sums(self, packed: bytes, quick: bool) -> list[Any]:
        """One pass on the cluster: by messages if it is brief, otherwise a task for each share, then a tree."""
        known = self.shares() if self.layout is None else self.layout[1]
        if self.is_brief(known, packed):
            sums = self.by_messages(known, packed, quick)
            if sums is not None:
                return added(sums)
            self.layout = None
        client, known = self.client, self.shares()
        self.last_tasks = time.monotonic()
        function = packed if len(packed) <= EMBEDDED else client.scatter(packed, broadcast=True, hash=False)
        groups = [[self.parts[i] for i in share.places] for share in known]
        sums = client.map(packed_sums, groups, self.chosen_of(known), packed=function, pure=False)
        while len(sums) > FAN_IN:
            sums = client.map(added, [sums[i : i + FAN_IN] for i in range(0, len(sums), FAN_IN)], pure=False)
        return added(messages.gathered(client, sums))

    def by_messages(self, known: list[Share], packed: bytes, quick: bool) -> list[Any] | None:
        """The sums of each share, or None. Quick functions run in event loops once measured to be brief."""
        given = [(x, packed) for x in self.chosen_of(known)]
        in_event_loop = quick and self.pace.seconds * self.rows < SILENT
        began = time.monotonic()
        sums = messages.call_workers(self.client, packed_sums, self.parts, known, given, in_event_loop=in_event_loop)
        if quick and sums is not None:
            self.pace.seconds = (time.monotonic() - began) / self.rows
        return sums

    def is_brief(self, known: list[Share], packed: bytes) -> bool:
        """Return whether a pass is so short, and sends so little, that messages are better than tasks."""
        light = len(packed) <= EMBEDDED and sum(x.nbytes for x in self.chosen if x is not None) <= CARRIED
        return (
            light
            and self.rows * self.dimension <= BRIEF_ENTRIES * len(known)
            and time.monotonic() - self.last_tasks < SILENT
        )

    def shares(self) -> list[Share]:
        """Return the parts held by each thread of the cluster, looked up again when workers have joined or left."""
        threads = messages.threads_of_workers(self.client)
        if self.layout is None or self.layout[0] != threads:
            known = messages.shares_of_threads(self.client, self.parts, threads)
            # parts lost in the meantime have no worker: ask again in the next pass
            self.layout = {} if any(share.worker is None for share in known) else threads, known
        return self.layout[1]

    def chosen_of_parts(self) -> list[list[Any]]:
        return [[self.chosen[i] for i in places] for places in self.places]

    def chosen_of(self, known: list[Share]) -> list[list[Any]]:
        by_part = self.chosen_of_parts()
        return [[rows for i in share.places for rows in by_part[i]] for share in known]

    def sample(self, k: int, generator: np.random.Generator) -> "Partitions | Arrays":
        """Return the rows that `Arrays.sample` would choose; in this process if they are few."""
        chosen = scattered(self.rows, k, generator).numpy()
        ends = np.cumsum(self.sizes)
        local = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
        local = [
            (rows - (end - size)).astype(np.int32) for rows, end, size in zip(local, ends, self.sizes, strict=True)
        ]
        picked = [rows if mine is None else mine[rows] for rows, mine in zip(local, self.chosen, strict=True)]
        sizes = np.array([len(rows) for rows in picked])
        some = [i for i, places in enumerate(self.places) if sizes[places].any()]
        parts, places = [self.parts[i] for i in some], [self.places[i] for i in some]
        sample = Partitions(
            self.client, parts, places, sizes, self.dimension, picked, self.pace, labels=self.traits.labels
        )
        return sample.in_memory() if k * self.dimension <= IN_MEMORY else sample

    def blocks(self) -> Iterator[Block]:
        return self.in_memory().blocks()

    def head(self) -> Block:
        """Return a fixed selection of a few rows, in one block."""
        few = min(self.rows, 1 + HEAD_ENTRIES // self.dimension)
        return self.sample(few, np.random.default_rng(0)).in_memory().head()

    def in_memory(self) -> Arrays:
        found = run_on_workers(self.client, on_host, self.parts, self.chosen_of_parts())
        pairs = zip(chain.from_iterable(self.places), chain.from_iterable(found), strict=True)
        return joined([part for _, part in sorted(pairs, key=itemgetter(0)) if part.rows])


@dataclass
class Pace:
    """Seconds per row of the last quick pass over these rows, or over a sample of them."""

    seconds: float = math.inf


@dataclass(frozen=True)
class UncheckedArrays(Arrays):
    """A partition not yet checked for finite entries. If the sums are not finite, `check` raises.

    This saves one pass over X.
    """

    check: Callable[[Any], None] = field(kw_only=True)

    def reduce(self, function: RowFunction) -> list[Tensor]:
        sums = super().reduce(function)
        if not all(bool(x.isfinite().all()) for x in sums):
            self.check(self.features)
        return sums


def joined(parts: list[Arrays]) -> Arrays:
    """Join several `Arrays` of NumPy arrays, as returned by `on_host`, into one of tensors."""
    features = [part.features for part in parts]
    sparse = scipy.sparse.issparse(features[0])
    vectors: dict[str, Any] = {
        name: torch.from_numpy(np.concatenate([part.vectors()[name] for part in parts])) for name in parts[0].vectors()
    }
    stacked = scipy.sparse.vstack(features, "csr") if sparse else torch.from_numpy(np.concatenate(features))
    return replace(parts[0], features=stacked, **vectors)


def tensors(sums: list[Any]) -> list[Tensor]:
    return [torch.as_tensor(x) for x in sums]


# ---------------------------------------------------------------------------------------------------------------------
# On the workers


def group_sums(parts: list[Arrays], chosen: list[Any], function: RowFunction) -> list[Any]:
    """Sum over some partitions in one thread; return NumPy arrays, which are cheap to send."""
    pairs = [(part, rows) for part, rows in zip(parts, chosen, strict=True) if rows is None or len(rows)]
    with one_thread(), kept_pages():
        total = add_up(taken(part, rows).reduce(function) for part, rows in pairs)
    return [x.cpu().numpy() for x in total]


@contextmanager
def kept_pages() -> Iterator[None]:
    """Let glibc keep freed pages for the next block.

    Dask's nanny starts workers with MALLOC_TRIM_THRESHOLD_, so every large array is new memory that the system must
    clear, and a pass takes three times as long. Afterwards freed pages are returned to the system as before.
    """
    trim = os.environ.get("MALLOC_TRIM_THRESHOLD_", "")
    if not trim.isdigit() or platform.libc_ver()[0] != "glibc":
        yield
        return
    adjust = ctypes.CDLL(None).mallopt
    adjust(M_MMAP_THRESHOLD, 1 << 25)  # the largest value that it accepts
    adjust(M_TRIM_THRESHOLD, 1 << 28)
    try:
        yield
    finally:
        adjust(M_MMAP_THRESHOLD, 1 << 17)  # its default
        adjust(M_TRIM_THRESHOLD, int(trim))


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h


def added(sums: list[list[Any]]) -> list[Any]:
    """The sums of the first entries, of the second, ...; nothing is overwritten, because a task may be run again."""
    return [reduce(np.add, entries) for entries in zip(*sums, strict=True)]


def packed_sums(groups: list[list[Arrays]], chosen: list[Any], packed: bytes) -> list[Any]:
    return group_sums(list(chain.from_iterable(groups)), chosen, cloudpickle.loads(packed))


def taken(part: Arrays, chosen: np.ndarray | None) -> Arrays:
    """Return the chosen rows, or all."""
    return part if chosen is None else part.take(torch.from_numpy(chosen).long())


def on_host(parts: list[Arrays], chosen: list[Any]) -> list[Arrays]:
    return [in_main_memory(taken(part, rows)) for part, rows in zip(parts, chosen, strict=True)]


def in_main_memory(part: Arrays) -> Arrays:
    """Return the rows in CPU memory, in blocks of the CPU's size, as NumPy arrays, which are sent without a copy."""
    if isinstance(part, UncheckedArrays):
        part.check(part.features)
    bare = lambda x: x.cpu().numpy() if isinstance(x, Tensor) else x  # noqa: E731
    known: dict[str, Any] = {each.name: bare(getattr(part, each.name)) for each in fields(Arrays)}
    return Arrays(**known | {"device": CPU, "block_rows": BLOCK_ROWS})


def size_of_arrays(part: Arrays) -> int:
    """Return the bytes in main memory, by which the scheduler decides what is cheap to move."""
    sparse = scipy.sparse.issparse(part.features)
    held = [part.features.data, part.features.indices] if sparse else [part.features]
    return sum(x.nbytes for x in [*held, *part.vectors().values()] if not getattr(x, "is_cuda", False))


sizeof.register(Arrays)(size_of_arrays)


# ---------------------------------------------------------------------------------------------------------------------
# Functions as bytes


class Packer(cloudpickle.Pickler):
    """Pickle formulas only once: they are closures, slow to pickle but the same in every pass."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType) and "<locals>" in obj.__qualname__:
            return unpack_closure, (pack_closure(obj),)
        return super().reducer_override(obj)


@lru_cache(maxsize=32)
def pack_closure(closure: FunctionType) -> bytes:
    return cloudpickle.dumps(closure)


@lru_cache(maxsize=32)
def unpack_closure(packed: bytes) -> Any:
    return cloudpickle.loads(packed)


def pack(function: RowFunction) -> bytes:
    buffer = io.BytesIO()
    Packer(buffer).dump(function)
    return buffer.getvalue()
