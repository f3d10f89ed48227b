"""How many threads a pass over rows uses.

The compiled pass starts its own threads, which end with the pass. While they run, the pools of torch and BLAS are
limited to one thread each, so that they do not compete for the same processors. With too many columns for the compiled
pass, BLAS uses the threads instead.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from threading import Lock
from typing import Any

import joblib
import numpy as np
import torch
from threadpoolctl import ThreadpoolController

LOCK = Lock()
INSIDE: list[Any] = []  # one limiter per active context; INSIDE[0] remembers the original limits
PASS_THREADS: ContextVar[int] = ContextVar("threads of a compiled pass", default=1)


def count_threads(n_jobs: int | None) -> int:
    """Return the number of threads that `n_jobs` stands for, as in joblib: -1 means all processors, -2 all but one.

    None means the number set by an enclosing `joblib.parallel_config`, one inside joblib's workers, and otherwise the
    number that torch would use: all processors available to this process, or fewer if OMP_NUM_THREADS,
    `torch.set_num_threads` or threadpoolctl say so.
    """
    if n_jobs is not None:
        return joblib.effective_n_jobs(n_jobs)
    backend, configured = joblib.parallel.get_active_backend()
    if backend.nesting_level:
        return 1
    if configured is not None:
        return joblib.effective_n_jobs(configured)
    most = torch.get_num_threads()
    return most if most == 1 else min(joblib.cpu_count(), most)


def check_jobs(n_jobs: Any) -> None:
    """Raise unless `n_jobs` is None or an integer other than 0."""
    if n_jobs is not None and (isinstance(n_jobs, bool) or not isinstance(n_jobs, int | np.integer) or n_jobs == 0):
        raise ValueError(
            f"n_jobs must be None or an integer other than 0; got {n_jobs!r}. Use -1 for all processors, or 1 for one."
        )


@contextmanager
def pass_threads(n_jobs: int | None, *, in_blas: bool = False) -> Iterator[None]:
    """Let passes over rows use `count_threads` threads: in the compiled pass, or with `in_blas` in BLAS.

    Everything else uses one thread.
    """
    threads = count_threads(n_jobs)
    with few_threads(threads if in_blas else 1):
        before = PASS_THREADS.set(threads)
        try:
            yield
        finally:
            PASS_THREADS.reset(before)


def one_thread() -> AbstractContextManager[None]:
    """Use one thread: on small blocks, the pools of torch and of NumPy's BLAS mostly wait for each other."""
    return few_threads(1)


@contextmanager
def few_threads(in_blas: int) -> Iterator[None]:
    """Use one thread, and this number of them in BLAS.

    OpenMP's limit belongs to the thread that sets it, the limit of BLAS to the process. So every context sets both, and
    the last one to leave restores the limits that the first one found. If every pool already has the right number of
    threads, nothing is changed.
    """
    wanted = {"blas": in_blas, "openmp": 1}
    if not INSIDE and all(pool.num_threads == wanted[pool.user_api] for pool in thread_pools().lib_controllers):
        yield
        return
    with LOCK:
        mine = thread_pools().limit(limits=wanted)
        first = INSIDE[0] if INSIDE else mine
        INSIDE.append(mine)
    try:
        yield
    finally:
        with LOCK:
            mine.restore_original_limits()
            INSIDE.pop()
            if not INSIDE:
                first.restore_original_limits()


@cache
def thread_pools() -> ThreadpoolController:
    return ThreadpoolController()
