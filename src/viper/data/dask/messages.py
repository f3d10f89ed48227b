"""Work for the workers that hold the data: as Dask's tasks, or as messages where the wait for tasks would be felt.

From call to answer a task takes some 12 ms, since client, scheduler and worker each collect for a while what they have
to say; a message that the scheduler hands on takes 2 to 4, and none of its bookkeeping. The work is done by the
worker's own threads in turn with its tasks. Or at once by the thread that listens, where the worker has one other
thread and nothing to do: then its clocks, some of which ring a hundred times a second, do not interrupt the work. What
is lost, has moved or is refused is not pursued here: the caller goes on with tasks, for which the scheduler makes again
whatever is gone.
"""

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from dask.base import compute, get_scheduler
from dask.delayed import delayed

FAN_IN = 16  # threads that are called one by one; sums that one task of a tree adds up
LOST = (CancelledError, OSError, TimeoutError)  # what is raised when the scheduler or data on a worker is gone


def active_client() -> Any:
    """The client that Dask would compute with, or None."""
    client = getattr(get_scheduler(), "__self__", None)
    return client if "distributed" in sys.modules and hasattr(client, "who_has") else None


def run(client: Any, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """function(a, b, ...) for each a, b, ... of the columns, where the a are; the results here."""
    if client is None:
        return list(compute(*[delayed(function, pure=False)(*row) for row in zip(*columns, strict=True)]))
    try:
        found = call_each(client, function, *columns)
        return gathered(client, keep(client, function, *columns)) if found is None else found
    except LOST as error:
        raise lost(client, error) from error


def keep(client: Any, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """The same as tasks, whose results stay there."""
    if client is None:
        return run(None, function, *columns)
    return client.map(function, *columns, pure=False)


def gathered(client: Any, futures: list[Any]) -> list[Any]:
    """The results, which the workers then forget; also if there is an error, with which the client would keep them."""
    from distributed import KilledWorker

    try:
        return client.gather(futures)
    except KilledWorker as error:
        raise ConnectionError(
            f"the workers must live through a pass; got {str(error).splitlines()[0]} Mostly they lack memory: use "
            "smaller partitions, or more workers."
        ) from error
    finally:
        for future in futures:
            future.release()


def lost(client: Any, error: BaseException) -> ConnectionError:
    """What to say when the scheduler or data on a worker is gone for good."""
    if client.status != "running":
        return ConnectionError(
            f"the Dask scheduler must stay reachable during a fit; got client status {client.status!r}. "
            "Start a new cluster and client and fit again."
        )
    return ConnectionError(
        f"the workers must keep the rows and the scheduler stay reachable; got {type(error).__name__}. Data that came "
        "by client.scatter, or were persisted before client.restart(), cannot be made again: use collections that know "
        "their origin."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Where the data are


class Share(NamedTuple):
    """What lies with one thread of the cluster: the worker, None if that is not known, and places in the list."""

    worker: str | None
    places: list[int]


def shares(client: Any, futures: Sequence[Any], threads: dict[str, int]) -> list[Share]:
    """Who has what once it is made, in as many shares as there are threads; what could not be made has no place."""
    from distributed import wait

    wait(futures)
    held = client.who_has(futures)
    at: dict[str | None, list[int]] = {}
    for i, future in enumerate(futures):
        alive = [worker for worker in held.get(future.key, ()) if worker in threads]
        at.setdefault(alive[0] if alive else None, []).append(i)
    alone = [Share(None, [i]) for i in at.pop(None, [])]
    return alone + [Share(worker, x) for worker, places in at.items() for x in split(places, threads[str(worker)])]


def split(places: list[int], count: int) -> Iterator[list[int]]:
    """At most `count` runs of nearly equal length."""
    count = min(count, len(places))
    edges = [len(places) * i // count for i in range(count + 1)]
    return (places[low:high] for low, high in pairwise(edges))


# ---------------------------------------------------------------------------------------------------------------------
# Messages


def call_each(client: Any, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any] | None:
    """What `run` returns, or None if it has to be done by tasks."""
    threads: dict[str, int] = client.nthreads()
    if sum(threads.values()) > FAN_IN:
        return None
    futures, *others = columns
    rows = list(zip(*others, strict=True)) if others else [()] * len(futures)
    known = shares(client, futures, threads)
    given = [([rows[i] for i in share.places],) for share in known]
    answers = call(client, partial(of_each, function), futures, known, given)
    if answers is None:
        return None
    found = {
        i: x for share, answer in zip(known, answers, strict=True) for i, x in zip(share.places, answer, strict=True)
    }
    return [found[i] for i in range(len(futures))]


def of_each(function: Callable[..., Any], held: list[Any], rows: list[tuple[Any, ...]]) -> list[Any]:
    return [function(x, *row) for x, row in zip(held, rows, strict=True)]


def call(
    client: Any,
    function: Callable[..., Any],
    futures: Sequence[Any],
    known: list[Share],
    given: Sequence[tuple[Any, ...]],
    *,
    at_once: bool = False,
) -> list[Any] | None:
    """function(data of a share, *what is given for it) on the worker that has them, for each share; None if not all
    answer. With `at_once` idle workers do not listen meanwhile, so that it should take seconds at most.
    """
    if not 0 < len(known) <= FAN_IN or any(share.worker is None for share in known):
        return None
    jobs: dict[str, list[tuple[list[str], tuple[Any, ...]]]] = {}
    for share, more in zip(known, given, strict=True):
        jobs.setdefault(str(share.worker), []).append(([futures[i].key for i in share.places], more))
    try:
        answers = client.run(answer, function, jobs, at_once, workers=list(jobs))
    except Exception:  # noqa: BLE001 - lost, or set up to refuse: tasks find out which
        return None
    if any(found is None for found in answers.values()):
        return None
    in_turn = {worker: iter(found) for worker, found in answers.items()}
    return [next(in_turn[str(share.worker)]) for share in known]


async def answer(
    function: Callable[..., Any], jobs: dict[str, list[Any]], at_once: bool, dask_worker: Any
) -> list[Any] | None:
    """On a worker: the results of its jobs, each by one of its threads; None if it has not all data, or they err."""
    held, mine = dask_worker.data, jobs.get(dask_worker.address)  # the scheduler may know it by another name
    if mine is None or not all(key in held for keys, _ in mine for key in keys):
        return None
    work = [partial(function, [held[key] for key in keys], *more) for keys, more in mine]
    try:
        if at_once and is_idle(dask_worker):
            return [job() for job in work]
        begin = partial(asyncio.get_running_loop().run_in_executor, dask_worker.executors["default"])
        return await asyncio.gather(*map(begin, work))
    except Exception:  # noqa: BLE001 - what the data cause, tasks say again; and a closing worker takes no new work
        return None


def is_idle(worker: Any) -> bool:
    """Whether nothing is lost if it does not listen: one thread, no task, and a loop of its own."""
    return worker.state.nthreads == 1 and not worker.state.executing and not worker.address.startswith("inproc")
