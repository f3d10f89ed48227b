"""How many threads a pass over rows uses."""

from functools import cache
from typing import Any

from threadpoolctl import ThreadpoolController


def one_thread() -> Any:
    """One thread: on blocks of this size the pools of torch and of NumPy's BLAS mostly wait for each other."""
    return thread_pools().limit(limits=1)


@cache
def thread_pools() -> ThreadpoolController:
    return ThreadpoolController()
