"""The choice of device, and passes on a CUDA device for a solver that runs on the host.

A pass copies μ and a factor of Σ to the device and brings the sums of each block back in one copy. The d × d algebra
between passes stays on the host, which is faster up to several hundred dimensions. Rows that do not fit on the device
stay in host memory and stream through pinned buffers while the block before them is computed.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from viper.errors import shown

LARGEST_ON_HOST = 512  # dimension up to which the host does the algebra of a step
SHARE_FOR_ROWS = 0.6  # share of a device's free memory that X may take; the rest is for blocks
SHARE_FOR_BLOCK = 0.1
LITTLE = 1 << 30  # bytes up to which all rows are first tried as one block, which is halved if it does not fit
FEWEST_ROWS, MOST_BLOCK_ROWS = 1 << 14, 1 << 24  # rows in a block
SMALLEST_SAMPLE = 1 << 20  # with fewer rows, a pass takes no longer than its launch


def choose_device(device: Any, X: Any = None) -> torch.device:
    """Return the device to compute on: the one given, otherwise that of a tensor X, otherwise the CPU."""
    if device is None:
        return X.device if isinstance(X, Tensor) else torch.device("cpu")
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a device of torch, such as 'cpu' or 'cuda'; got {shown(device)}.") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be available; got {str(target)!r} and no CUDA device. Use device='cpu'.")
    if target == torch.device("cuda"):
        target = torch.device("cuda", torch.cuda.current_device())  # with an index, as in the devices of tensors
    return target


def algebra_device(dimension: int, device: torch.device) -> torch.device:
    """Return the device for the d × d matrices of a fit whose rows are on `device`."""
    return torch.device("cpu") if dimension <= LARGEST_ON_HOST else device


def free_memory(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


def rows_fit(size: int, device: torch.device) -> bool:
    """Return whether `size` bytes of rows leave enough memory to compute."""
    return size <= SHARE_FOR_ROWS * free_memory(device)


def bytes_per_row(columns: int) -> int:
    """Return the bytes needed per row of a block, including everything that the plain formulas compute from it."""
    return 8 * (3 * columns + 24)


def rows_per_block(columns: int, device: torch.device) -> int:
    """Return how many rows fit in a share of the free memory."""
    return int(min(MOST_BLOCK_ROWS, max(FEWEST_ROWS, SHARE_FOR_BLOCK * free_memory(device) // bytes_per_row(columns))))


def is_one_block(rows: int, columns: int) -> bool:
    """Return whether all rows fit in one block. Querying the free memory instead would take as long as a kernel."""
    return rows * bytes_per_row(columns) <= LITTLE


def reduce_on_device(
    blocks: Callable[[int], Iterator[Any]], function: partial[list[Tensor]], rows: int, device: torch.device
) -> list[Tensor]:
    """Σ over blocks of at most `rows` rows, with the function's tensors copied to the device and its sums copied back.

    If memory runs out, the pass starts again with blocks half as large.
    """
    home = next((x.device for x in function.keywords.values() if isinstance(x, Tensor)), device)
    # no need to wait: small tensors have been read when the call returns, so they may change afterwards
    moved = {
        name: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for name, x in function.keywords.items()
    }
    there = partial(function.func, *function.args, **moved)
    while True:
        try:
            totals: list[Tensor] = []
            for block in blocks(rows):
                part = fetched(there(block), home)
                totals = part if not totals else [total + more for total, more in zip(totals, part, strict=True)]
            return totals
        except torch.cuda.OutOfMemoryError:
            if rows <= FEWEST_ROWS:
                raise ValueError(
                    f"blocks of rows must fit in the memory of the device; got {free_memory(device) >> 20} MB free on "
                    f"{device}, too little for {rows} rows. Free memory there, or use device='cpu'."
                ) from None
            rows //= 2
            torch.cuda.empty_cache()


def fetched(totals: list[Tensor], home: torch.device) -> list[Tensor]:
    """Move the tensors to another device, in a single copy of those that are not there yet."""
    away = [total for total in totals if total.device != home]
    if not away:
        return totals
    flat = torch.cat([total.reshape(-1) for total in away]).to(home)
    parts = iter(flat.split([total.numel() for total in away]))
    return [total if total.device == home else next(parts).reshape(total.shape) for total in totals]


def prefetched(features: Tensor, parts: list[slice], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Yield rows of a host tensor on the device, part by part; the next part is copied while one is in use."""
    longest = max((part.stop - part.start for part in parts), default=0)
    buffers = [torch.empty(longest, features.shape[1], dtype=dtype, pin_memory=True) for _ in range(2)]
    stream = torch.cuda.Stream(device)
    arrived: list[torch.cuda.Event | None] = [None, None]

    def load(i: int) -> tuple[Tensor, torch.cuda.Event]:
        if (before := arrived[i % 2]) is not None:
            before.synchronize()  # wait until the buffer is free again
        source = features[parts[i]]
        buffer = buffers[i % 2][: len(source)].copy_(source)
        with torch.cuda.stream(stream):
            x = buffer.to(device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        arrived[i % 2] = event
        return x, event

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(load, 0) if parts else None
        for i in range(len(parts)):
            assert following is not None
            x, event = following.result()
            following = pool.submit(load, i + 1) if i + 1 < len(parts) else None
            torch.cuda.current_stream(device).wait_event(event)
            x.record_stream(torch.cuda.current_stream(device))
            yield x
