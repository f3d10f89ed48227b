"""What a pass over Dask partitions does: messages, tasks, and the work of one thread."""

import asyncio
import os
import pickle
import platform
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("distributed")

import cloudpickle
import dask
from dask_workers import N, X, arrays, assert_same, classifier, count, cut, in_memory, in_use, partitioned, workers
from threadpoolctl import threadpool_info

from viper.data.dask import collections, messages, partitions
from viper.data.dask.messages import Share
from viper.data.dask.partitions import pack
from viper.inference.rows import Arrays, Block
from viper.inference.sums import row_sums
from viper.softplus.limit import limit

# the workers cannot import this file
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_tree_adds_up_many_tasks(client, monkeypatch):
    monkeypatch.setattr(partitions, "FAN_IN", 2)
    monkeypatch.setattr(partitions, "BRIEF_ENTRIES", 0)
    source = partitioned(cut(X, (1_000, 5)))
    monkeypatch.setattr(source, "shares", lambda: [Share(None, [i]) for i in range(len(source.parts))])
    assert source.reduce(partial(count))[0] == N


@pytest.mark.parametrize("entries", [N * 5, N * 5 // 3], ids=["small enough for three threads", "too large"])
def test_small_partitions_are_read_together(entries, client, monkeypatch):
    monkeypatch.setattr(collections, "BRIEF_ENTRIES", entries // 3)
    source = partitioned(cut(X, (1_000, 5)))
    assert len(source.places) == (3 if entries == N * 5 else N // 1_000)
    assert sorted(i for some in source.places for i in some) == list(range(N // 1_000))
    assert torch.equal(source.in_memory().features, torch.from_numpy(X))


def test_there_is_one_task_for_each_thread(client):
    source = partitioned(cut(X, (1_000, 5)))
    assert source.reduce(partial(count))[0] == N
    shares = source.shares()
    assert len(shares) == 3
    assert sorted(i for share in shares for i in share.places) == list(range(len(source.parts)))
    held = client.who_has(source.parts)
    assert all(held[source.parts[i].key] == (share.worker,) for share in shares for i in share.places)


@contextmanager
def tasks_made(client, monkeypatch):
    """The names of functions that are run as tasks meanwhile."""
    names, made = [], client.map
    with monkeypatch.context() as patch:
        patch.setattr(client, "map", lambda f, *_, **__: names.append(f.__name__) or made(f, *_, **__))
        yield names


def test_a_short_pass_makes_no_tasks(client, monkeypatch):
    source = partitioned(cut(X, (1_000, 5)))
    source.in_memory()  # once all rows are read
    with tasks_made(client, monkeypatch) as names:
        assert source.reduce(partial(count))[0] == N
        assert source.sample(500, np.random.default_rng(1)).rows == 500
        assert names == []
        monkeypatch.setattr(source, "last_tasks", time.monotonic() - partitions.SILENT)
        assert source.reduce(partial(count))[0] == N
        assert names == ["packed_sums"]  # so that the scheduler sees that the workers are not idle
        assert source.reduce(partial(count))[0] == N
        assert names == ["packed_sums"]
        monkeypatch.setattr(partitions, "BRIEF_ENTRIES", 0)
        assert source.reduce(partial(count))[0] == N
        assert names == ["packed_sums", "packed_sums"]


def test_many_threads_get_tasks(client, monkeypatch):
    monkeypatch.setattr(messages, "FAN_IN", 2)
    source = partitioned(cut(X, (1_000, 5)))
    with tasks_made(client, monkeypatch) as names:
        assert source.reduce(partial(count))[0] == N
        assert source.in_memory().rows == N
    assert names == ["packed_sums", "on_host"]


def test_workers_may_refuse_messages():
    with dask.config.set({"distributed.worker.blocked-handlers": ["run"]}), workers(2) as client, in_use(client):
        with pytest.raises(Exception, match="explicitly disallowed"):
            client.run(os.getpid)
        assert_same(classifier().fit(*arrays()), classifier().fit(*in_memory(arrays())))


def test_what_messages_cannot_do_is_done_by_tasks(client, monkeypatch):
    source = partitioned(cut(X, (1_000, 5)))
    shares = source.shares()
    # each worker is asked for the data of the next
    wrong = list(map(swapped, shares, [*shares[1:], shares[0]]))
    monkeypatch.setattr(messages, "shares_of_threads", lambda *_: wrong)
    monkeypatch.setattr(source, "shares", lambda: wrong)
    assert source.reduce(partial(count))[0] == N
    assert torch.equal(source.in_memory().features, torch.from_numpy(X))


def swapped(share, other):
    return Share(other.worker, share.places)


@pytest.mark.parametrize("trouble", ["none", "another name", "gone", "closing"])
def test_a_worker_that_cannot_answer_says_so(trouble):
    """Tasks take over if it has another name (--contact-address), has lost the data, or takes no more work."""
    worker = pretended_worker()
    name, key = ("tcp://there:1" if trouble == "another name" else worker.address), "y" if trouble == "gone" else "x"
    if trouble == "closing":
        worker.executors["default"].shutdown()
    found = asyncio.run(messages.answer_call(sum, {name: [([key], ())]}, False, worker))
    assert found == ([5] if trouble == "none" else None)


def pretended_worker(address="tcp://here:1", nthreads=1, executing=()):
    state = SimpleNamespace(nthreads=nthreads, executing=set(executing))
    pool = ThreadPoolExecutor(1, thread_name_prefix="pool")
    return SimpleNamespace(address=address, data={"x": 5}, executors={"default": pool}, state=state)


@pytest.mark.parametrize(
    ("at_once", "where", "nthreads", "executing", "pooled"),
    [
        (True, "tcp://here:1", 1, [], False),
        (False, "tcp://here:1", 1, [], True),
        (True, "tcp://here:1", 2, [], True),
        (True, "tcp://here:1", 1, ["a task"], True),
        (True, "inproc://here/1", 1, [], True),  # whose loop is that of other workers too
    ],
)
def test_only_an_idle_worker_of_one_thread_works_where_it_listens(at_once, where, nthreads, executing, pooled):
    worker = pretended_worker(where, nthreads, executing)
    jobs = {worker.address: [(["x"], ())]}
    (name,) = asyncio.run(messages.answer_call(lambda _: threading.current_thread().name, jobs, at_once, worker))
    assert name.startswith("pool") == pooled


def thread_name(block: Block, recipe: str | None, pause=0.0) -> list[torch.Tensor]:
    """Whether this is a worker's event-loop thread; takes a `recipe` like functions with compiled code."""
    time.sleep(pause)
    return [torch.tensor(float(threading.current_thread() is threading.main_thread()))]


def test_workers_keep_listening_until_a_pass_has_been_seen_to_be_short(client, monkeypatch):
    source = partitioned(cut(X, (9_000, 5)))
    monkeypatch.setattr(source, "last_tasks", time.monotonic() + 60)
    quick, slow, blocks = partial(thread_name, recipe="any"), partial(thread_name, recipe=None), 3
    assert source.reduce(quick)[0] == 0
    assert source.reduce(quick)[0] == blocks
    assert source.reduce(slow)[0] == 0  # earlier measurements say nothing about this function
    assert source.reduce(quick)[0] == blocks
    monkeypatch.setattr(partitions, "SILENT", 0.1)
    assert source.reduce(partial(quick, pause=0.2))[0] == blocks
    assert source.reduce(quick)[0] == 0
    assert source.reduce(quick)[0] == blocks


def test_large_functions_are_sent_ahead(client, monkeypatch):
    monkeypatch.setattr(partitions, "EMBEDDED", 0)
    assert partitioned(cut(X, (9_000, 5))).reduce(partial(count))[0] == N


def test_formulas_are_packed_once():
    mean, factor = torch.zeros(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
    function = partial(
        row_sums, mean=mean, factor=factor, moments=limit().moments, gram="full", single=False, certify=True
    )
    before = partitions.pack_closure.cache_info().misses
    packed = [pack(function) for _ in range(3)]
    assert partitions.pack_closure.cache_info().misses <= before + 1
    copies = [pickle.loads(each).keywords["moments"] for each in packed]
    assert copies[0] is copies[1]
    points = torch.linspace(-5, 5, 7, dtype=torch.float64), torch.linspace(0, 9, 7, dtype=torch.float64)
    for ours, theirs in zip(copies[0](*points), limit().moments(*points), strict=True):
        assert torch.equal(ours, theirs)


def pool_sizes(block: Block) -> list[torch.Tensor]:
    return [torch.tensor(float(any(pool["num_threads"] > 1 for pool in threadpool_info())))]


def test_a_task_has_one_thread(somewhere):
    assert partitioned(cut(X, (9_000, 5))).reduce(partial(pool_sizes))[0] == 0


FAULTS = """
import resource
import numpy as np
from viper.data.dask.partitions import kept_pages

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        np.ones(1 << 19)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

outside = faults()
with kept_pages():
    faults()
    inside = faults()
print(outside, inside, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep pages by themselves")
def test_a_pass_does_not_ask_for_the_same_memory_again():
    started_by_nanny = os.environ | {"MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=started_by_nanny, capture_output=True, text=True, check=True
    )
    outside, inside, after = map(int, done.stdout.split())
    assert inside < 0.1 * min(outside, after)


def test_the_scheduler_knows_how_large_partitions_are():
    part = Arrays(torch.zeros(100, 5, dtype=torch.float64), torch.zeros(100, dtype=torch.bool), weight=torch.zeros(100))
    assert partitions.size_of_arrays(part) == 100 * 5 * 8 + 100 + 400
