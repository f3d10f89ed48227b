"""A fit on a Dask cluster of two single-threaded workers, compared with the same fit in one process.

The workers make the rows themselves, as partitions of a Dask array. The overhead of a pass is measured with a function
that only returns sums of the right size.
"""

import time
from collections.abc import Callable
from functools import partial

import dask
import dask.array as da
import numpy as np
import torch
from distributed import Client, LocalCluster, wait
from torch import Tensor

import viper
from benchmarks.table import Table, machine
from viper.data.checks import RowFormat
from viper.data.open import open_labelled_rows
from viper.inference.rows import Block

WORKERS = 2
CLUSTERS: dict[str, tuple[dict[str, bool], dict[str, int]]] = {
    f"{WORKERS} workers": ({}, {}),
    # without Dask's monitoring, which shares the same two cores
    f"{WORKERS} workers, profiler and memory monitor off": (
        {"distributed.worker.profile.enabled": False},
        {"memory_limit": 0},
    ),
}
SPEEDUP, OVERHEAD = 1.7, 50.0  # targets: least ratio of rows per second, most milliseconds per pass


def run(quick: bool, device: str = "cpu") -> Table:
    if device != "cpu":
        raise SystemExit(f"The cluster benchmark compares processes on the CPU; got device {device!r}.")
    n, p, parts = (200_000, 25, 8) if quick else (5_000_000, 25, 16)
    table: list[list[str | float]] = []
    passes: list[float] = []
    for name, (config, options) in CLUSTERS.items():
        with (
            dask.config.set(config),
            LocalCluster(WORKERS, threads_per_worker=1, processes=True, dashboard_address=":0", **options) as machines,
            Client(machines) as client,
        ):
            X, y = rows_on_workers(client, n, p, parts)
            here = rows_here(X.chunks[0], p)
            fits = {"one process": here, name: (X, y)}
            model = viper.VariationalLogisticRegression(random_state=0)
            times = shortest_times(
                {name: partial(model.fit, *given) for name, given in fits.items()}, 1 if quick else 9
            )
            passes = passes or pass_times(model, X, y, p)
        one = times["one process"]
        table += [
            [name, n, p, seconds, n / seconds, one / seconds, SPEEDUP if i else float("nan")]
            for i, (name, seconds) in enumerate(times.items())
        ]
    notes = [
        f"Overhead per pass: median {np.median(passes):.1f} ms, shortest {min(passes):.1f} ms, longest "
        f"{max(passes):.1f} ms of {len(passes)}; target {OVERHEAD:.0f} ms.",
        "Wall-clock seconds, the shortest of several fits taken in turn, including reading and checks. "
        f"{parts} partitions, made and kept by the workers. One process and two workers are measured together, twice.",
        machine(device),
    ]
    columns = ["where", "rows", "columns", "seconds", "rows/s", "times one process", "target"]
    return Table("Logistic regression on a Dask cluster", columns, table, notes)


def rows_here(sizes: tuple[int, ...], p: int) -> list[np.ndarray]:
    """The same rows, generated here: gathering them would leave copies of all partitions on one worker."""
    parts = [partition(seed, size, p) for seed, size in enumerate(sizes)]
    return [np.concatenate(x) for x in zip(*parts, strict=True)]


def rows_on_workers(client: Client, n: int, p: int, parts: int) -> tuple[da.Array, da.Array]:
    """Normal rows and labels drawn from the model; each seed gives a partition, and each worker gets equally many."""
    sizes = [n // parts + int(i < n % parts) for i in range(parts)]
    addresses = list(client.nthreads())
    blocks = [
        client.persist(dask.delayed(partition, nout=2)(seed, size, p), workers=addresses[seed % len(addresses)])
        for seed, size in enumerate(sizes)
    ]
    wait(blocks)
    X = da.concatenate([da.from_delayed(block[0], (size, p), float) for block, size in zip(blocks, sizes, strict=True)])
    y = da.concatenate([da.from_delayed(block[1], (size,), bool) for block, size in zip(blocks, sizes, strict=True)])
    X, y = dask.persist(X, y)
    wait([X, y])
    return X, y


def partition(seed: int, size: int, p: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows and labels of one partition."""
    coefficients = np.random.default_rng(0).uniform(-1.0, 1.0, p)
    generator = np.random.default_rng([1, seed])
    X = generator.standard_normal((size, p))
    return X, generator.random(size) < 1.0 / (1.0 + np.exp(-X @ coefficients))


def shortest_times(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Wall-clock seconds of the fastest of several calls, taken in turn after a warm-up call of each."""
    best = dict.fromkeys(contenders, float("inf"))
    for turn in range(rounds + 1):
        for name, work in contenders.items():
            start = time.perf_counter()
            work()
            if turn:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def zero_sums(block: Block, mean: Tensor, factor: Tensor) -> list[Tensor]:
    """Sums of the size that a step needs, without the work."""
    return [torch.zeros(()), torch.zeros(()), torch.zeros_like(mean), torch.zeros_like(factor)]


def pass_times(model: viper.VariationalLogisticRegression, X: da.Array, y: da.Array, p: int) -> list[float]:
    """Milliseconds of each of several passes that compute nothing."""
    source = open_labelled_rows(model, X, y, RowFormat(intercept=True))[1]
    function = partial(zero_sums, mean=torch.zeros(p + 1).double(), factor=torch.zeros(p + 1, p + 1).double())
    found = []
    for _ in range(50):
        start = time.perf_counter()
        source.reduce(function)
        found.append(1e3 * (time.perf_counter() - start))
    return found
