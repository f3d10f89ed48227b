"""How many threads a pass over rows uses."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

from threadpoolctl import ThreadpoolController

LOCK = Lock()
INSIDE: list[Any] = []  # one limiter per active context; INSIDE[0] remembers the original limits


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: on blocks of this size, the pools of torch and of NumPy's BLAS mostly wait for each other.

    OpenMP's limit belongs to the thread that sets it, the limit of BLAS to the process. So every context sets both, and
    the last one to leave restores the limits that the first one found.
    """
    with LOCK:
        mine = thread_pools().limit(limits=1)
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
