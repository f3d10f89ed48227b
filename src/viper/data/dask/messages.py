"""Run functions on the workers that hold the data: as Dask tasks, or as messages if the delay of tasks would matter.

A task takes about 12 ms from call to answer, because client, scheduler and worker each wait a while to send in batches;
a message that the scheduler forwards takes 2 to 4 ms and needs no bookkeeping. The call runs on the worker's own
threads, queued with its tasks. If the worker is single-threaded and idle, the call runs on its event-loop thread, so
that Dask's 10 ms callbacks do not interrupt it. Lost or moved data are not retried here: the caller falls back to
tasks, and the scheduler recomputes what is missing.
"""

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from dask.base import compute, get_scheduler, is_dask_collection
from dask.delayed import delayed

FAN_IN = 16  # threads that are called directly; sums that one task of a tree adds up


def errors_of_loss(*others: type[BaseException]) -> tuple[type[BaseException], ...]:
    """Return the errors raised when the scheduler or data on a worker are lost, and the `others`."""
    closed = getattr(sys.modules.get("distributed.client"), "ClosedClientError", CancelledError)
    return CancelledError, OSError, TimeoutError, closed, *others


def active_client() -> Any:
    """Return the client that Dask would use, or None."""
    client = getattr(get_scheduler(), "__self__", None)
    return client if "distributed" in sys.modules and hasattr(client, "who_has") else None


def threads_of_workers(client: Any) -> dict[str, int]:
    """Return how many threads each worker has."""
    try:
        threads: dict[str, int] = client.nthreads()
    except (AttributeError, RuntimeError) as error:  # what a client raises that closes meanwhile
        if client.status == "running":
            raise
        raise connection_error(client, error) from error
    return threads


def run_on_workers(client: Any, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """Return function(a, b, ...) for each a, b, ... of the columns, computed on the worker that holds a."""
    if client is None:
        return list(compute(*[delayed(function, pure=False)(*row) for row in zip(*columns, strict=True)]))
    try:
        found = call_each(client, function, *columns)
        return gathered(client, map_on_workers(client, function, *columns)) if found is None else found
    except errors_of_loss() as error:
        raise connection_error(client, error) from error


def map_on_workers(client: Any, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """Do the same in tasks; return futures, whose results stay on the workers."""
    if client is None:
        return run_on_workers(None, function, *columns)
    return client.map(function, *columns, pure=False)


def gathered(client: Any, futures: list[Any]) -> list[Any]:
    """Return the results and let the workers release them, even after an error, when the client would keep them."""
    from distributed import KilledWorker

    try:
        return client.gather(futures)
    except KilledWorker as error:
        raise ConnectionError(
            f"the workers must survive a pass; got {str(error).splitlines()[0]} They usually run out of memory: use "
            "smaller partitions, or more workers."
        ) from error
    finally:
        for future in futures:
            future.release()


@contextmanager
def reachable(client: Any, collections: Iterable[Any]) -> Iterator[None]:
    """Raise a single ConnectionError if the scheduler is lost here, or was lost before with rows persisted on it."""
    if "distributed" in sys.modules:
        from distributed import futures_of

        for future in futures_of([x for x in collections if is_dask_collection(x)]):
            if future.client.status != "running":
                raise connection_error(future.client, CancelledError())
    try:
        yield
    except errors_of_loss(RuntimeError) as error:  # older clients that have just closed raise the latter
        if client is None or type(error) is ConnectionError:  # already one of ours
            raise
        if isinstance(error, RuntimeError) and client.status == "running":
            raise
        raise connection_error(client, error) from error


def connection_error(client: Any, error: BaseException) -> ConnectionError:
    """Return the error to raise when the scheduler or data on a worker are lost for good."""
    if client.status != "running":
        return ConnectionError(
            f"the Dask scheduler must stay reachable during a fit; got client status {client.status!r}. "
            "Start a new cluster and client and fit again."
        )
    return ConnectionError(
        f"the workers must keep the rows and the scheduler stay reachable; got {type(error).__name__}. Data that were "
        "sent by client.scatter, or persisted before client.restart(), cannot be recomputed: use collections that know "
        "their origin."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Where the data are


class Share(NamedTuple):
    """What one thread of the cluster holds: its worker (None if unknown) and positions in the list of futures."""

    worker: str | None
    places: list[int]


def shares_of_threads(client: Any, futures: Sequence[Any], threads: dict[str, int]) -> list[Share]:
    """Return which thread holds which futures once they are computed; failed futures have no worker."""
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
    """Split into at most `count` runs of nearly equal length."""
    count = min(count, len(places))
    edges = [len(places) * i // count for i in range(count + 1)]
    return (places[low:high] for low, high in pairwise(edges))


# ---------------------------------------------------------------------------------------------------------------------
# Messages


def call_each(client: Any, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any] | None:
    """Return the result of `run_on_workers`, or None if tasks are needed instead."""
    threads = threads_of_workers(client)
    if sum(threads.values()) > FAN_IN:
        return None
    futures, *others = columns
    rows = list(zip(*others, strict=True)) if others else [()] * len(futures)
    known = shares_of_threads(client, futures, threads)
    given = [([rows[i] for i in share.places],) for share in known]
    answers = call_workers(client, partial(apply_to_each, function), futures, known, given)
    if answers is None:
        return None
    found = {
        i: x for share, answer in zip(known, answers, strict=True) for i, x in zip(share.places, answer, strict=True)
    }
    return [found[i] for i in range(len(futures))]


def apply_to_each(function: Callable[..., Any], held: list[Any], rows: list[tuple[Any, ...]]) -> list[Any]:
    return [function(x, *row) for x, row in zip(held, rows, strict=True)]


def call_workers(
    client: Any,
    function: Callable[..., Any],
    futures: Sequence[Any],
    known: list[Share],
    given: Sequence[tuple[Any, ...]],
    *,
    in_event_loop: bool = False,
) -> list[Any] | None:
    """Compute function(data, *arguments) for each share, on the worker that holds its data.

    Returns None unless all answer. With `in_event_loop`, idle workers do not respond to messages meanwhile, so the
    function should take a few seconds at most.
    """
    if not 0 < len(known) <= FAN_IN or any(share.worker is None for share in known):
        return None
    jobs: dict[str, list[tuple[list[str], tuple[Any, ...]]]] = {}
    for share, more in zip(known, given, strict=True):
        jobs.setdefault(str(share.worker), []).append(([futures[i].key for i in share.places], more))
    try:
        answers = client.run(answer_call, function, jobs, in_event_loop, workers=list(jobs))
    except Exception:  # noqa: BLE001 - lost, or configured to refuse: tasks find out which
        return None
    if any(found is None for found in answers.values()):
        return None
    in_turn = {worker: iter(found) for worker, found in answers.items()}
    return [next(in_turn[str(share.worker)]) for share in known]


async def answer_call(
    function: Callable[..., Any], jobs: dict[str, list[Any]], in_event_loop: bool, dask_worker: Any
) -> list[Any] | None:
    """On a worker: run its jobs, one per thread. Returns None if data are missing or a job raises."""
    held, mine = dask_worker.data, jobs.get(dask_worker.address)  # the scheduler may know it by another name
    if mine is None or not all(key in held for keys, _ in mine for key in keys):
        return None
    work = [partial(function, [held[key] for key in keys], *more) for keys, more in mine]
    try:
        if in_event_loop and is_idle(dask_worker):
            return [job() for job in work]
        begin = partial(asyncio.get_running_loop().run_in_executor, dask_worker.executors["default"])
        return await asyncio.gather(*map(begin, work))
    except Exception:  # noqa: BLE001 - tasks raise errors in the data again; a closing worker refuses new work
        return None


def is_idle(worker: Any) -> bool:
    """Return whether the worker can spare its event loop: it has one thread, no task, and its own loop."""
    return worker.state.nthreads == 1 and not worker.state.executing and not worker.address.startswith("inproc")
