"""Bad input in Dask collections, and what happens when workers or the scheduler are lost."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("distributed")

import cloudpickle
import dask
import dask.array as da
import dask.dataframe as dd
from dask_workers import (
    FRAME,
    NAMES,
    OFFSET,
    WEIGHT,
    N,
    X,
    Y,
    arrays,
    assert_same,
    classifier,
    count,
    cut,
    frames,
    in_memory,
    in_use,
    partitioned,
    workers,
)
from distributed import Client, LocalCluster

from viper.data.checks import seed_of
from viper.data.dask import partitions
from viper.data.dask.messages import run_on_workers
from viper.data.dask.partitions import pack
from viper.inference.rows import Block, SourceTraits, scattered
from viper.inference.start import coarse_sizes

# the workers cannot import this file
cloudpickle.register_pickle_by_value(sys.modules[__name__])


# --- bad input ---


def spoilt(x, value):
    """The same rows with one bad entry, in the third partition of four."""
    bad = x.copy()
    bad[13_000] = value
    return bad


LATE = np.where(np.arange(N) < N - 1, Y, "maybe")


@pytest.mark.parametrize(
    ("collections", "message", "partition"),
    [
        (lambda: (cut(spoilt(X, np.nan)), cut(Y)), "Input X contains NaN", 2),
        (lambda: (cut(spoilt(X, np.nan), ((0, 12_000, 0, 12_000), 5)), cut(Y)), "Input X contains NaN", 3),
        (lambda: (cut(X), cut(Y[:-1])), "X and y must have the same number of rows; got .* 24000 and 23999", None),
        (lambda: (cut(X), cut(Y), cut(WEIGHT[1:])), r"sample_weight must have shape \(24000,\)", None),
        (lambda: (cut(X), cut(Y), cut(spoilt(WEIGHT, -3.0))), "sample_weight must not be negative; got -3", 2),
        (lambda: (cut(X), cut(Y), cut(0 * WEIGHT)), "sample_weight must be positive somewhere", None),
        (lambda: (cut(X), cut(Y), None, cut(spoilt(OFFSET, np.inf))), "offset must be finite; got inf", 2),
        (lambda: (cut(X), cut(np.ones(N))), "at least two classes; got 1 class", None),
        (lambda: (cut(X), cut(X[:, 0])), "Unknown label type", None),
        (lambda: (cut(X), None), "requires y", None),
        (lambda: (cut(X[:, 0]), cut(Y)), "X must have two dimensions", None),
        (lambda: (cut(X[:0]), cut(Y[:0])), "X must have at least one row", None),
        (lambda: (dd.from_pandas(FRAME, npartitions=2), cut(Y)), r"X must be numeric; got column 'y'", None),
        (lambda: (frames()[0], frames()[0]), "y with several columns must contain only 0 and 1", None),
        (lambda: (cut(spoilt(X.astype(object), "a")), cut(Y)), "X must be numeric; could not convert", 2),
    ],
)
def test_bad_input_is_refused(collections, message, partition):
    with pytest.raises(ValueError, match=message) as caught:
        classifier().fit(*collections())
    notes = getattr(caught.value, "__notes__", [])
    assert notes == ([] if partition is None else [f"This is in partition {partition}, counted from 0."])


def test_an_error_comes_back_from_a_worker(client):
    with pytest.raises(ValueError, match="Input X contains NaN") as caught:
        classifier().fit(cut(spoilt(X, np.nan)), cut(Y))
    assert caught.value.__notes__ == ["This is in partition 2, counted from 0."]


@pytest.mark.parametrize("entry", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [13_000, "in a subset"])
@pytest.mark.parametrize("options", [{}, {"covariance": "diagonal"}, {"bound": "pg"}], ids=str)
def test_sums_tell_of_an_entry_that_is_not_finite(options, row, entry):
    """X is not checked beforehand."""
    if row == "in a subset":
        seed = seed_of(classifier().random_state)
        row = int(scattered(N, coarse_sizes_of(N, 6)[0], np.random.default_rng(seed))[100])
    bad = X.copy()
    bad[row, 2] = entry
    given = da.from_array(bad, chunks=(6_000, 5)), cut(Y)
    what = "NaN" if np.isnan(entry) else "infinity"
    for complain in (
        classifier(**options).fit,
        partial(classifier(**options).fit, offset=cut(OFFSET)),
        classifier(**options).fit(X, Y).elbo,
        classifier(**options).partial_fit(X, Y).partial_fit,
    ):
        with pytest.raises(ValueError, match=f"Input X contains {what}") as caught:
            complain(*given)
        assert caught.value.__notes__ == [f"This is in partition {row // 6_000}, counted from 0."]


def coarse_sizes_of(rows, dimension):
    problem = SimpleNamespace(source=SimpleNamespace(rows=rows, dimension=dimension, traits=SourceTraits()))
    return coarse_sizes(problem)


def test_large_entries_are_no_fault():
    """If sums overflow, the error names the size of the numbers and not finite entries, here as in memory."""
    large = X.copy()
    large[13_000, 2] = 1e200
    given = da.from_array(large, chunks=(6_000, 5)), cut(Y)
    for each in (given, in_memory(given)):
        with pytest.raises(ValueError, match=r"columns of moderate size.*got numbers up to 1e\+200"):
            classifier().fit(*each)


def test_columns_are_those_of_the_fit():
    model = classifier().fit(FRAME[NAMES], Y)
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frames()[0][NAMES[::-1]])
    with pytest.raises(ValueError, match="offset must have the rows and partitions of X"):
        model.predict(frames()[0], offset=cut(OFFSET, 900))


# --- what breaks ---


def test_a_killed_worker_costs_only_time(monkeypatch):
    given = arrays(3_000)
    passes = []

    def pack_and_kill(function):
        passes.append(function)
        if len(passes) == 2:
            os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        return pack(function)

    monkeypatch.setattr(partitions, "pack", pack_and_kill)
    with workers(3) as client, in_use(client):
        model = classifier().fit(*given)
    assert len(passes) > 2
    assert_same(model, classifier().fit(*in_memory(given)))


def kill_one_and_count(block: Block) -> list[torch.Tensor]:
    """Kill the first process that calls this; count in the others."""
    try:
        os.close(os.open(MARK, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return count(block)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


MARK = ""


@pytest.mark.parametrize("brief", [0, partitions.BRIEF_ENTRIES], ids=["tasks", "messages"])
def test_a_worker_may_die_in_the_middle_of_a_pass(brief, tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, "BRIEF_ENTRIES", brief)
    monkeypatch.setitem(globals(), "MARK", str(tmp_path / "killed"))
    with workers(3) as client, in_use(client):
        source = partitioned(cut(X, (1_000, 5)))
        source.in_memory()
        assert source.reduce(partial(kill_one_and_count))[0] == N
        assert (tmp_path / "killed").exists()
        assert source.reduce(partial(count))[0] == N


@contextmanager
def own_processes(folder):
    """A scheduler and a worker as our own child processes, and the file with their address."""
    file = folder / "scheduler.json"
    started = []
    for role, where in (
        ("scheduler", ["--host", "127.0.0.1", "--port", "0"]),
        ("worker", ["--no-nanny", "--nthreads", "1", "--local-directory", str(folder)]),
    ):
        command = [
            sys.executable,
            "-m",
            f"distributed.cli.dask_{role}",
            "--no-dashboard",
            "--scheduler-file",
            str(file),
        ]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen([*command, *where], **silent))
        while not file.exists():
            time.sleep(0.05)
    try:
        yield file, started[0]
    finally:
        for process in started:
            process.kill()
            process.wait()


def sleepy_count(block: Block) -> list[torch.Tensor]:
    time.sleep(60)
    return count(block)


def test_a_lost_scheduler_is_an_error(tmp_path):
    impatient = dask.config.set({"distributed.comm.timeouts.connect": "3s"})
    with impatient, own_processes(tmp_path) as (file, scheduler), Client(scheduler_file=str(file)) as client:
        client.wait_for_workers(1)
        source = partitioned(cut(X, (9_000, 5)))
        assert source.reduce(partial(count))[0] == N
        threading.Timer(1.0, scheduler.kill).start()
        with pytest.raises(ConnectionError, match="scheduler must stay reachable"):
            source.reduce(partial(sleepy_count))  # lost during a pass
        with pytest.raises(ConnectionError, match="scheduler must stay reachable"):
            source.reduce(partial(count))  # lost before it


EARLY_LOSS = """
import logging
import sys

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

import viper

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    dask.config.set({"distributed.comm.timeouts.connect": "3s"})
    cluster = LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None)
    client = Client(cluster)
    X = np.random.default_rng(0).normal(size=(200, 2))
    rows, label = dask.persist(da.from_array(X, chunks=(50, 2)), da.from_array(X[:, 0] > 0, chunks=50))
    wait([rows, label])
    (client if sys.argv[1] == "client" else cluster).close()
    try:
        viper.VariationalLogisticRegression().fit(rows, label)
    except ConnectionError as error:
        print(error)
"""


@pytest.mark.parametrize("closed", ["client", "cluster"])
def test_a_scheduler_lost_before_the_fit_is_an_error(closed, tmp_path):
    script = tmp_path / "early.py"
    script.write_text(EARLY_LOSS)
    done = subprocess.run([sys.executable, script, closed], capture_output=True, text=True, timeout=120, check=False)
    (line,) = done.stdout.splitlines()
    assert line.startswith("the Dask scheduler must stay reachable during a fit; got client status "), done.stderr
    assert line.endswith("Start a new cluster and client and fit again.")


def test_a_scheduler_lost_while_rows_are_opened_is_an_error(tmp_path):
    impatient = dask.config.set({"distributed.comm.timeouts.connect": "3s"})
    with impatient, own_processes(tmp_path) as (file, scheduler), Client(scheduler_file=str(file)) as client:
        client.wait_for_workers(1)
        slow = cut(X, (9_000, 5)).map_blocks(lambda block: (time.sleep(60), block)[1], meta=np.empty((0, 0)))
        threading.Timer(1.0, scheduler.kill).start()
        with pytest.raises(ConnectionError, match=r"scheduler (must )?stay reachable"):
            classifier().fit(slow, cut(Y, 9_000))  # lost while the partitions are checked
        with pytest.raises(ConnectionError, match=r"scheduler (must )?stay reachable"):
            classifier().fit(cut(X, (9_000, 5)), cut(Y, 9_000))  # lost before


def test_a_client_that_has_just_closed_is_an_error():
    """Dask raises an error class of its own if the scheduler is lost between two messages."""
    with LocalCluster(1, processes=False, dashboard_address=None) as cluster, Client(cluster) as client:
        X_there, y_there = cut(X, (9_000, 5)), cut(Y, 9_000)
        client.status = "closed"
        try:
            with pytest.raises(ConnectionError, match="scheduler must stay reachable"):
                classifier().fit(X_there, y_there)
        finally:
            client.status = "running"


def test_a_client_that_closes_between_two_messages_is_an_error():
    """The client no longer has a scheduler then, and Dask itself raises an AttributeError."""
    with LocalCluster(1, processes=False, dashboard_address=None) as cluster, Client(cluster) as client:
        parts = client.map(np.ones, [3, 4])
        scheduler, client.scheduler, client.status = client.scheduler, None, "closed"
        try:
            with pytest.raises(ConnectionError, match="scheduler must stay reachable"):
                run_on_workers(client, np.sum, parts)
        finally:
            client.scheduler, client.status = scheduler, "running"


def held_by(client):
    """Keys that workers still hold after a garbage collection."""
    for _ in range(50):
        gc.collect()
        held = [key for keys in client.has_what().values() for key in keys]
        if not held:
            break
        time.sleep(0.1)
    return held


def test_a_fit_that_fails_leaves_nothing_on_the_workers(client):
    before = set(held_by(client))
    for _ in range(2):
        with pytest.raises(ValueError, match="contains NaN"):
            classifier().fit(cut(spoilt(X, np.nan), (6_000, 5)), cut(Y))
    assert set(held_by(client)) <= before


def test_rows_that_are_gone_are_an_error(client):
    given = dask.persist(*arrays()[:2])
    client.cancel(given)
    with pytest.raises(ConnectionError, match=r"must keep the rows .* got Futures?CancelledError\. .* their origin"):
        classifier().fit(*given)
