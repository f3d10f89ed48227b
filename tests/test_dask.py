"""Fits on Dask collections: the same answer wherever the partitions lie, and what happens when some of it breaks."""

import asyncio
import gc
import os
import pickle
import platform
import signal
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
import scipy.sparse
import torch

pytest.importorskip("distributed")

import cloudpickle
import dask
import dask.array as da
import dask.dataframe as dd
import joblib
import pandas as pd
from dask_workers import in_use, workers
from distributed import Client
from sklearn.model_selection import cross_val_score
from threadpoolctl import threadpool_info

import viper
from viper.data.arrays import RowFormat
from viper.data.checks import seed_of
from viper.data.dask import collections, messages, partitions
from viper.data.dask.messages import Share
from viper.data.dask.partitions import Partitions, pack
from viper.data.open import open_labelled_rows
from viper.errors import ConvergenceWarning
from viper.inference.rows import Arrays, Block, SourceTraits, scattered
from viper.inference.start import coarse_sizes
from viper.inference.sums import row_sums
from viper.softplus.limit import limit

# the workers cannot import this file
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SAME = 1e-10  # relative: the same sums, added up in another order
NAMES = list("abcde")
N = 24_000
UNEVEN = (1, 7_000, 0, 10_999, 6_000)

generator = np.random.default_rng(5)
X = generator.normal(size=(N, 5)) * [1.0, 2.0, 0.3, 1.0, 1.0] + [0.0, 1.0, 0.0, 0.0, 0.0]
OFFSET = generator.normal(size=N) / 3
Y = np.where(generator.random(N) < 1 / (1 + np.exp(0.3 - X @ [1.0, -0.5, 0.5, 0.0, 0.2] - OFFSET)), "yes", "no")
WEIGHT = generator.integers(0, 3, N).astype(float)
FRAME = pd.DataFrame(X, columns=NAMES).assign(y=Y, w=WEIGHT, o=OFFSET)


def classifier(**options):
    return viper.VariationalLogisticRegression(random_state=3, **options)


def arrays(chunks=7_000, **other):
    """X, y, weights and offset as Dask arrays, each cut as it is told or like the others."""
    cuts = {name: other.get(name, chunks) for name in ("X", "y", "w", "o")}
    return [da.from_array(x, chunks=cuts[name]) for name, x in zip("Xywo", (X, Y, WEIGHT, OFFSET), strict=True)]


def frames():
    """The same as DataFrame and Series, whose partitions do not know their lengths, one of them empty."""
    whole = dd.from_pandas(FRAME, npartitions=4, sort=False)
    gap = whole[whole.a > 1e9].partitions[:1]
    joined = dd.concat([whole, gap], interleave_partitions=False)
    return [joined[NAMES], joined["y"], joined["w"], joined["o"]]


def sparse():
    chunks = da.from_array(X, chunks=(9_000, 5)).map_blocks(scipy.sparse.csr_matrix)
    return [chunks, *arrays(9_000)[1:]]


def mixed():
    """A DataFrame with labels in other partitions, weights in memory and a number as offset."""
    return [frames()[0], arrays(5_000)[1], WEIGHT, 0.25]


LAYOUTS = {
    "even": partial(arrays, X=(7_000, 5)),
    "uneven, one empty, columns cut, all different": partial(arrays, X=(UNEVEN, 2), y=5_000, w=N, o=(UNEVEN,)),
    "frame": frames,
    "sorted: partitions of one class": None,
    "sparse": sparse,
    "mixed": mixed,
}


def by_class():
    order = np.argsort(Y, kind="stable")
    return [da.from_array(x[order], chunks=6_000) for x in (X, Y, WEIGHT, OFFSET)]


LAYOUTS["sorted: partitions of one class"] = by_class


@pytest.fixture(scope="module")
def three():
    with workers(3) as client:
        yield client


@pytest.fixture
def client(three):
    """The cluster as what Dask computes with; tests that do not ask for it use threads."""
    with in_use(three):
        yield three


@pytest.fixture(params=["threads", "cluster"])
def somewhere(request):
    return request.getfixturevalue("client") if request.param == "cluster" else None


def in_memory(collections):
    return [x.compute() if dask.is_dask_collection(x) else x for x in collections]


def history(model):
    return np.array([step[:-1] for step in model.history_], dtype=float)


def assert_same(model, other, way=True):
    scale = np.sqrt(np.diag(other.covariance_))
    for ours, theirs, unit in (
        (model.posterior_.mean.numpy(), other.posterior_.mean.numpy(), scale),
        (model.covariance_, other.covariance_, np.outer(scale, scale)),
    ):
        np.testing.assert_allclose(ours / unit, theirs / unit, rtol=SAME, atol=SAME)
    np.testing.assert_allclose([model.elbo_, model.elbo_bound_], [other.elbo_, other.elbo_bound_], rtol=SAME)
    if way:
        # the last moves are of the size of rounding
        np.testing.assert_allclose(history(model), history(other), rtol=SAME, atol=1e-9)
        assert model.passes_ == other.passes_
    assert model.classes_.tolist() == other.classes_.tolist()


# --- the same answer ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_posterior_is_that_of_the_rows_in_memory(layout, somewhere):
    given = LAYOUTS[layout]()
    model = classifier().fit(*given)
    assert_same(model, classifier().fit(*in_memory(given)))
    assert model.elbo(*given) == pytest.approx(model.elbo_, rel=SAME)


@pytest.mark.parametrize(
    "options",
    [
        {"covariance": "diagonal"},
        {"bound": "viper", "terms": 5},
        {"bound": "mc", "samples": 100},
        {"bound": "pg", "fit_intercept": False},
        {"prior_scale": "auto"},
        {"solver": "adam", "max_iter": 5, "tol": 1.0},
    ],
    ids=str,
)
def test_every_option_works_on_workers(options, client):
    few = slice(0, 2_000)
    given = da.from_array(X[few], chunks=(700, 5)), da.from_array(Y[few], chunks=700)
    # the last of the fits of "auto" begins at its optimum, where rounding decides whether there is a step to take
    way = options != {"prior_scale": "auto"}
    assert_same(classifier(**options).fit(*given), classifier(**options).fit(X[few], Y[few]), way)


def test_float32(client):
    given = arrays(X=(7_000, 5))
    single, double = classifier(dtype="float32").fit(*given), classifier().fit(*given)
    distance = (single.posterior_.mean - double.posterior_.mean).abs() / double.posterior_.variance.sqrt()
    assert distance.max() < 1e-3  # standard deviations: what float32 products allow


def test_a_checkpoint_of_other_rows_is_refused(somewhere, monkeypatch, tmp_path):
    """Rows of the same number, width and names, but not the same; those that are may be cut otherwise."""
    original, made = Partitions.reduce, []

    def reduce(source, function):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(1)
        return original(source, function)

    rows = arrays()[:2]
    expected = classifier().fit(*rows).coef_
    with monkeypatch.context() as patched:
        patched.setattr(Partitions, "reduce", reduce)
        with pytest.raises(KeyboardInterrupt):
            classifier().fit(*rows, checkpoint=tmp_path / "fit")
    for other in [(da.from_array(X + 0.1, chunks=7_000), rows[1]), (rows[0], da.from_array(Y[::-1], chunks=7_000))]:
        with pytest.raises(ValueError, match=r"checkpoint must be of the same fit; got .*'first rows'"):
            classifier().fit(*other, checkpoint=tmp_path / "fit")
    resumed = classifier().fit(*arrays(chunks=5_000)[:2], checkpoint=tmp_path / "fit")
    np.testing.assert_allclose(resumed.coef_, expected, rtol=SAME)
    assert not (tmp_path / "fit").exists()


def test_a_second_batch_continues_the_first(somewhere):
    half = N // 2
    parts = [[x[:half] for x in (X, Y, WEIGHT, OFFSET)], [x[half:] for x in (X, Y, WEIGHT, OFFSET)]]
    lazily, plainly = classifier(), classifier()
    for X_, y, weight, offset in parts:
        plainly.partial_fit(X_, y, sample_weight=weight, offset=offset)
        cut = [da.from_array(x, chunks=5_000) for x in (X_, y, weight, offset)]
        lazily.partial_fit(cut[0], cut[1], sample_weight=cut[2], offset=cut[3])
    assert_same(lazily, plainly)


def test_subsets_are_those_of_arrays(monkeypatch, somewhere):
    source = partitioned(cut(X, (UNEVEN, 5)))
    here = Arrays(torch.from_numpy(X), torch.zeros(N, dtype=torch.bool))
    for limit_ in (partitions.IN_MEMORY, 0):
        monkeypatch.setattr(partitions, "IN_MEMORY", limit_)
        subset = source.sample(500, np.random.default_rng(1))
        assert isinstance(subset, Arrays if limit_ else Partitions)
        found = subset.in_memory() if isinstance(subset, Partitions) else subset
        assert torch.equal(found.features, here.sample(500, np.random.default_rng(1)).features)


def partitioned(collection):
    return open_labelled_rows(classifier(), collection, da.from_array(Y, chunks=N), RowFormat(), reset=True)[1]


def test_a_common_origin_is_made_once(somewhere, tmp_path):
    """Else rows and labels that cannot be made twice alike would not belong together."""

    def load(i):
        with (tmp_path / "loads").open("a") as file:
            file.write("x")
        return FRAME[i * 6_000 : (i + 1) * 6_000].sample(frac=1.0)  # another order each time

    frame = dd.from_map(load, range(4))
    model = classifier().fit(frame[NAMES], frame["y"])
    assert (tmp_path / "loads").stat().st_size <= 5  # four, and one to see the columns
    np.testing.assert_allclose(model.coef_, classifier().fit(X, Y).coef_, atol=1e-6)


def test_more_coefficients_than_rows(somewhere):
    wide, y = generator.normal(size=(30, 50)), np.arange(30) % 2
    model = classifier().fit(da.from_array(wide, chunks=(7, 20)), da.from_array(y, chunks=7))
    np.testing.assert_allclose(model.posterior_.mean, classifier().fit(wide, y).posterior_.mean, atol=SAME)


# --- what a pass does ---


def count(block: Block) -> list[torch.Tensor]:
    return [torch.tensor(float(len(block.label)))]


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
    """The names of functions that become tasks meanwhile."""
    names, made = [], client.map
    with monkeypatch.context() as patch:
        patch.setattr(client, "map", lambda f, *_, **__: names.append(f.__name__) or made(f, *_, **__))
        yield names


def test_a_short_pass_makes_no_tasks(client, monkeypatch):
    source = partitioned(cut(X, (1_000, 5)))
    source.in_memory()  # once all is read
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
    # each is looked for where the next one is
    wrong = list(map(swapped, shares, [*shares[1:], shares[0]]))
    monkeypatch.setattr(messages, "shares_of_threads", lambda *_: wrong)
    monkeypatch.setattr(source, "shares", lambda: wrong)
    assert source.reduce(partial(count))[0] == N
    assert torch.equal(source.in_memory().features, torch.from_numpy(X))


def swapped(share, other):
    return Share(other.worker, share.places)


@pytest.mark.parametrize("trouble", ["none", "another name", "gone", "closing"])
def test_a_worker_that_cannot_answer_says_so(trouble):
    """So that tasks take over: it goes by another name (--contact-address), lost the data, or takes no more work."""
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
    """Whether that is the thread in which a worker listens; with a `recipe`, as what has compiled code."""
    time.sleep(pause)
    return [torch.tensor(float(threading.current_thread() is threading.main_thread()))]


def test_workers_keep_listening_until_a_pass_has_been_seen_to_be_short(client, monkeypatch):
    source = partitioned(cut(X, (9_000, 5)))
    monkeypatch.setattr(source, "last_tasks", time.monotonic() + 60)
    quick, slow, blocks = partial(thread_name, recipe="any"), partial(thread_name, recipe=None), 3
    assert source.reduce(quick)[0] == 0
    assert source.reduce(quick)[0] == blocks
    assert source.reduce(slow)[0] == 0  # what was measured says nothing of this one
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


# --- predictions ---


@contextmanager
def nothing_computed():
    def refuse(*_, **__):
        raise AssertionError("this was to be lazy")

    with dask.config.set(scheduler=refuse):
        yield


METHODS = ["predict", "predict_proba", "predict_std", "predict_interval", "decision_function", "predict_latent"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", [arrays, partial(arrays, X=(UNEVEN, 3), o=4_000), frames])
def test_predictions_are_lazy(layout, method):
    collection, _, _, offset = layout()
    names = NAMES if layout is frames else None
    model = classifier().fit(X if names is None else FRAME[NAMES], Y)
    rows = FRAME[NAMES] if names else X
    expected = getattr(model, method)(rows, offset=OFFSET)
    with nothing_computed():
        found = getattr(model, method)(collection, offset=offset)
    pairs = zip(found, expected, strict=True) if method == "predict_latent" else [(found, expected)]
    for lazy, now in pairs:
        assert isinstance(lazy, da.Array)
        assert (lazy.dtype, lazy.ndim, lazy.shape[1:]) == (now.dtype, now.ndim, now.shape[1:])
        if names is None:
            assert lazy.shape == now.shape
        if now.dtype.kind == "f":
            np.testing.assert_allclose(lazy.compute(), now, rtol=1e-13, atol=1e-15)  # the last block is shorter
        else:
            assert (lazy.compute() == now).all()


def test_predictions_on_workers(client):
    given = frames()
    model = classifier().fit(*given)
    assert model.feature_names_in_.tolist() == NAMES
    expected = classifier().fit(FRAME[NAMES], Y, WEIGHT, OFFSET)
    np.testing.assert_allclose(model.predict_proba(given[0]).compute(), expected.predict_proba(FRAME[NAMES]), atol=SAME)
    assert model.score(given[0], given[1], given[2]) == pytest.approx(expected.score(FRAME[NAMES], Y, WEIGHT), rel=SAME)


@pytest.mark.parametrize("draws", [400, 4000, 12_000])
def test_diagnosis_on_workers(client, draws):
    """Draws that travel with the tasks, and such as are sent ahead."""
    given = arrays()
    model = classifier().fit(*given)
    assert model.diagnose(draws=draws).k_hat == pytest.approx(
        classifier().fit(*in_memory(given)).diagnose(draws=draws).k_hat, abs=1e-4
    )


# --- bad input ---


def cut(x, chunks=6_000):
    return da.from_array(x, chunks=chunks)


def spoilt(x, value):
    """The same with one bad entry, in the third partition of four."""
    bad = x.copy()
    bad[13_000] = value
    return bad


LATE = np.where(np.arange(N) < N - 1, Y, "maybe")


@pytest.mark.parametrize(
    ("collections", "message", "partition"),
    [
        (lambda: (cut(spoilt(X, np.nan)), cut(Y)), "Input X contains NaN", 2),
        (lambda: (cut(spoilt(X, np.nan), ((0, 12_000, 0, 12_000), 5)), cut(Y)), "Input X contains NaN", 3),
        (lambda: (cut(X), cut(Y[:-1])), "X and y must have as many rows; got .* 24000 and 23999", None),
        (lambda: (cut(X), cut(Y), cut(WEIGHT[1:])), r"sample_weight must have shape \(24000,\)", None),
        (lambda: (cut(X), cut(Y), cut(spoilt(WEIGHT, -3.0))), "sample_weight must not be negative; got -3", 2),
        (lambda: (cut(X), cut(Y), cut(0 * WEIGHT)), "sample_weight must be positive somewhere", None),
        (lambda: (cut(X), cut(Y), None, cut(spoilt(OFFSET, np.inf))), "offset must be finite; got inf", 2),
        (lambda: (cut(X), cut(LATE)), r"exactly two classes; got 3: \['maybe', 'no', 'yes'\]", None),
        (lambda: (cut(X), cut(np.ones(N))), "exactly two classes; got 1 class", None),
        (lambda: (cut(X), cut(X[:, 0])), "Unknown label type", None),
        (lambda: (cut(X), None), "requires y", None),
        (lambda: (cut(X[:, 0]), cut(Y)), "X must have two dimensions", None),
        (lambda: (cut(X[:0]), cut(Y[:0])), "X must have at least one row", None),
        (lambda: (dd.from_pandas(FRAME, npartitions=2), cut(Y)), r"X must be numeric; got column 'y'", None),
        (lambda: (frames()[0], frames()[0]), "y must have one column; got 5", None),
        (lambda: (cut(spoilt(X.astype(object), "a")), cut(Y)), "X must be numeric; could not convert", 2),
    ],
)
def test_complaints(collections, message, partition):
    with pytest.raises(ValueError, match=message) as caught:
        classifier().fit(*collections())
    notes = getattr(caught.value, "__notes__", [])
    assert notes == ([] if partition is None else [f"This is in partition {partition}, counted from 0."])


def test_a_complaint_comes_back_from_a_worker(client):
    with pytest.raises(ValueError, match="Input X contains NaN") as caught:
        classifier().fit(cut(spoilt(X, np.nan)), cut(Y))
    assert caught.value.__notes__ == ["This is in partition 2, counted from 0."]


@pytest.mark.parametrize("entry", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [13_000, "in a subset"])
@pytest.mark.parametrize("options", [{}, {"covariance": "diagonal"}, {"bound": "pg"}], ids=str)
def test_sums_tell_of_an_entry_that_is_not_finite(options, row, entry):
    """Nobody looks for it before."""
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
    """Sums that overflow make nobody complain of entries that are finite."""
    large = X.copy()
    large[13_000, 2] = 1e200
    given = da.from_array(large, chunks=(6_000, 5)), cut(Y)
    for each in (given, in_memory(given)):
        with pytest.warns(ConvergenceWarning, match="no step improves"):
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
    """In the first process that comes here, its end."""
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
    """A scheduler and a worker that are nobody's children but ours, and the file that says where."""
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


def held_by(client):
    """Keys that workers still have, once all that nobody refers to is gone."""
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
    with pytest.raises(ConnectionError, match=r"must keep the rows .* got FuturesCancelledError\. .* their origin"):
        classifier().fit(*given)


# --- Gaussian processes ---


@pytest.fixture(scope="module")
def curve():
    """Rows of a nonlinear function, more than the search looks at."""
    rng = np.random.default_rng(2)
    x = rng.uniform(-2, 2, (50_000, 1))
    return x, rng.random(50_000) < 1 / (1 + np.exp(-3 * np.sin(2 * x[:, 0])))


def test_a_gaussian_process_is_that_of_a_stream(curve, client):
    x, y = curve
    options = {"n_inducing": 8, "n_starts": 1, "max_iter": 8, "tol": 10.0, "random_state": 1}
    lazy = da.from_array(x, chunks=(9_000, 1)), da.from_array(y, chunks=20_000)
    there = viper.VariationalGPClassifier(**options).fit(*lazy)
    here = viper.VariationalGPClassifier(**options).fit(viper.Blocks(lambda: [(x, y)]))
    np.testing.assert_allclose(there.posterior_.mean, here.posterior_.mean, rtol=1e-8, atol=1e-8)
    assert there.elbo_ == pytest.approx(here.elbo_, rel=SAME)
    assert there.elbo(*lazy) == pytest.approx(there.elbo_, rel=SAME)
    with nothing_computed():
        lazily = there.predict_proba(lazy[0])
    np.testing.assert_allclose(lazily[:500].compute(), there.predict_proba(x[:500]), rtol=1e-12)
    assert there.score(*lazy) == there.score(x, y)


# --- joblib ---


def test_estimators_travel_to_joblib_on_dask(client):
    few = slice(0, 1_000)
    with joblib.parallel_config(backend="dask"):
        there = cross_val_score(classifier(), X[few], Y[few], cv=3)
    assert there.tolist() == cross_val_score(classifier(), X[few], Y[few], cv=3).tolist()
