"""Several fits to the same rows, which are read once for all of them in every pass.

A solver learns about its rows only through sums. Each fit has its own thread; they run one at a time, until each asks
for sums and waits. Once all are waiting, requests about the same rows are answered in one pass. Each fit gets the sums
that it would get alone, so it takes the same steps to the same posterior.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from viper.errors import ConvergenceWarning, WeightWarning, listed, users_line
from viper.inference.rows import (
    Arrays,
    Block,
    LongRowFunction,
    Mapped,
    RowFunction,
    RowSource,
    SourceTraits,
    SourceWrapper,
)

Fitted = TypeVar("Fitted")


# --- the rows of one label ---


@dataclass(frozen=True)
class LabelRows(SourceWrapper):
    """The rows of a source whose y has several columns, seen with one of these columns.

    Inside `fit_together`, passes are shared with the other fits.
    """

    source: RowSource
    column: int

    @property
    def traits(self) -> SourceTraits:
        return replace(self.source.traits, labels=0)

    def reduce(self, function: RowFunction) -> list[Tensor]:
        mine = RUNNING.get()
        asked = SumsRequest(self.source, self.column, function)
        return asked.answered_alone() if mine is None else mine.ask(asked)

    def map(self, function: Callable[[Block], Mapped]) -> Iterator[Mapped]:
        return self.source.map(partial(of_column, function, self.column))

    def apply(self, function: Callable[[Block], np.ndarray]) -> Any:
        return self.source.apply(partial(of_column, function, self.column))

    def sample(self, k: int, generator: np.random.Generator) -> "LabelRows":
        mine = RUNNING.get()
        samples = Samples() if mine is None else mine.samples
        return replace(self, source=samples.of(self.source, k, generator))

    def in_memory(self) -> Arrays:
        rows = self.source.in_memory()
        vectors: dict[str, Any] = {name: column_of(x, self.column) for name, x in rows.vectors().items()}
        return replace(rows, **vectors)

    def head(self) -> Block:
        return column_block(self.source.head(), self.column)

    def observe(self, callback: Callable[[int], None]) -> None:
        """Do nothing: the passes belong to all fits."""

    def release(self) -> None:
        """Do nothing: other labels still need the rows."""


def column_of(x: Tensor, column: int) -> Tensor:
    """Return one column, or the vector itself if all columns share it."""
    return x if x.ndim == 1 else x[:, column].contiguous()


def column_block(block: Block, column: int) -> Block:
    """Return the block with one column of labels and offsets."""
    offset = None if block.offset is None else column_of(block.offset, column)
    return replace(block, label=column_of(block.label, column), offset=offset)


def of_column(function: Callable[[Block], Mapped], column: int, block: Block) -> Mapped:
    return function(column_block(block, column))


class Samples:
    """Random subsets of rows. Fits that start with the same seed choose the same rows, which are kept only once."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[RowSource, RowSource, Any]] = {}

    def of(self, source: RowSource, k: int, generator: np.random.Generator) -> RowSource:
        key = id(source), k, repr(generator.bit_generator.state)
        if key not in self.known:
            sample = source.sample(k, generator)
            self.known[key] = source, sample, generator.bit_generator.state  # keeps the source, and so its id
        _, sample, generator.bit_generator.state = self.known[key]
        return sample


# --- passes for several fits ---


class SumsRequest(NamedTuple):
    """The sums that one fit asks for."""

    source: RowSource
    column: int
    function: RowFunction

    def answered_alone(self) -> list[Tensor]:
        return shared_pass([self])[0]


def shared_pass(asked: list[SumsRequest]) -> list[list[Tensor]]:
    """Return the sums of each request. All concern the same rows, which are read once."""
    # one flat dictionary of keywords, so that the source finds the tensors in it
    keywords = {f"{i}.{name}": x for i, one in enumerate(asked) for name, x in one.function.keywords.items()}
    recipes = [one.function.keywords.get("recipe") for one in asked]
    keywords["recipe"] = None if None in recipes else recipes[0]  # tells a cluster that the pass is brief
    parts = [(one.function.func, one.function.args, one.column) for one in asked]
    long = all(isinstance(one.function, LongRowFunction) for one in asked)
    function: RowFunction = (LongRowFunction if long else partial)(sums_of_columns, parts=parts, **keywords)
    counts, *sums = asked[0].source.reduce(function)
    ends = (counts[1:] / counts[0]).long().cumsum(0).tolist()
    return [sums[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def sums_of_columns(block: Block, parts: list[tuple[Any, Any, int]], recipe: Any, **keywords: Any) -> list[Tensor]:
    """Return [1, number of results of each function], then the results of the functions, each for its own column."""
    given: list[dict[str, Any]] = [{} for _ in parts]
    for name, x in keywords.items():
        i, _, rest = name.partition(".")
        given[int(i)][rest] = x
    found = [
        function(*args, column_block(block, column), **own)
        for (function, args, column), own in zip(parts, given, strict=True)
    ]
    counts = torch.tensor([1.0, *map(len, found)], dtype=torch.float64)
    return [counts, *(x for sums in found for x in sums)]


# --- fits that take turns ---


class Turn(Generic[Fitted]):
    """A fit in its own thread, which runs only during its turn: from `go` until it asks for sums or ends."""

    def __init__(self, pool: ThreadPoolExecutor, fit: Callable[[], Fitted], samples: "Samples") -> None:
        self.samples = samples
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.requests: SimpleQueue[SumsRequest | None] = SimpleQueue()
        self.request: SumsRequest | None = None
        self.fitted = pool.submit(copy_context().run, self.run, fit)
        self.fitted.add_done_callback(lambda _: self.requests.put(None))

    def run(self, fit: Callable[[], Fitted]) -> Fitted:
        RUNNING.set(self)
        self.receive()
        return fit()

    def ask(self, request: SumsRequest) -> list[Tensor]:
        """In the fit's thread: end this turn, and return the sums when the next turn begins."""
        self.requests.put(request)
        found: list[Tensor] = self.receive()
        return found

    def receive(self) -> Any:
        answer = self.answers.get()
        if answer is GIVEN_UP:
            raise GeneratorExit
        return answer

    def go(self, answer: Any = None) -> None:
        """Give the fit its turn, with the sums that it asked for. Raises any error that the fit raises."""
        self.answers.put(answer)
        self.request = self.requests.get()
        if self.request is None:
            self.fitted.result()


GIVEN_UP = object()
RUNNING: ContextVar[Turn[Any] | None] = ContextVar("the fit that has its turn", default=None)


def fit_together(
    source: RowSource,
    fits: Sequence[Callable[[], Fitted]],
    names: list[Any],
    ended: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Fitted], float]:
    """Run fits to `LabelRows` of a source; return their results and the number of passes over the source.

    Fits that still work on a sample are served first, so that all arrive at the full rows together. `ended` is called
    with the number of fits that have ended, and of all fits. Warnings name the fits that they are about.
    """
    samples, heard, rows_read = Samples(), Heard(), 0
    with ThreadPoolExecutor(len(fits)) as pool:
        turns = [Turn(pool, fit, samples) for fit in fits]
        try:
            for turn, name in zip(turns, names, strict=True):
                with heard.about(name):
                    turn.go()
            while waiting := [(turn, turn.request) for turn in turns if turn.request is not None]:
                rows = min((request.source for _, request in waiting), key=lambda rows: rows.rows)
                served = [(turn, request) for turn, request in waiting if request.source is rows]
                found = shared_pass([request for _, request in served])
                rows_read += rows.rows
                for (turn, _), sums in zip(served, found, strict=True):
                    with heard.about(names[turns.index(turn)]):
                        turn.go(sums)
                ended(sum(turn.request is None for turn in turns), len(turns))
        finally:
            for turn in turns:
                turn.answers.put(GIVEN_UP)
    heard.repeat(len(turns))
    return [turn.fitted.result() for turn in turns], rows_read / source.rows


class Heard:
    """The warnings of several fits, collected so that each is issued once, pointing to the user's line."""

    def __init__(self) -> None:
        self.names: dict[tuple[type[Warning], str], list[Any]] = {}

    @contextmanager
    def about(self, name: Any) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as found:
            for kind in (ConvergenceWarning, WeightWarning):
                warnings.simplefilter("always", kind)
            yield
        for one in found:
            self.names.setdefault((one.category, str(one.message)), []).append(name)

    def repeat(self, fits: int) -> None:
        """Issue the warnings; each names the fits that it is about, unless it is about all."""
        for (kind, text), names in self.names.items():
            which = "" if len(names) == fits else f"Label {listed(names)}: "
            warnings.warn(which + text, kind, stacklevel=users_line())
