"""Threads of a pass: as many as requested, the same answer for any number, and nothing left behind."""

import os
import subprocess
import sys
from threading import Barrier, Thread

import joblib
import numpy as np
import pytest
import torch
from joblib import Parallel, delayed
from threadpoolctl import threadpool_limits

import viper
from viper.inference import rows
from viper.inference.kernels import compiled, library
from viper.inference.kernels.compiled import compiled_sums
from viper.inference.rows import Arrays, Block, Dense, LongRowFunction
from viper.inference.sums import row_sums
from viper.inference.threads import PASS_THREADS, count_threads, one_thread, pass_threads, thread_pools
from viper.softplus.limit import limit
from viper.softplus.pointwise import KernelRecipe

built = pytest.mark.skipif(not library.is_compiled(), reason="viper was installed without a C compiler")


def blas_threads():
    return {pool["num_threads"] for pool in thread_pools().info() if pool["user_api"] == "blas"}


def test_overlapping_users_leave_the_pools_as_they_were():
    """The second enters while the first is active and leaves after it: the limits it found are not the first ones."""
    second_in, first_out = Barrier(2), Barrier(2)

    def second():
        with one_thread():
            second_in.wait()
            first_out.wait()

    with threadpool_limits(limits=2):
        before = blas_threads()
        other = Thread(target=second)
        with one_thread():
            other.start()
            second_in.wait()
            assert blas_threads() == {1}
        first_out.wait()
        other.join()
        assert blas_threads() == before


# --- the same sums for any number ---


def threads_of_a_pass(monkeypatch, number):
    """Let even the shortest pass use this number of threads."""
    monkeypatch.setattr(compiled, "WORK_OF_THREAD", 1)
    PASS_THREADS.set(number)


@pytest.fixture(autouse=True)
def one_again():
    yield
    PASS_THREADS.set(1)


def made_arrays(rows, columns, everything=True, seed=0):
    rng = np.random.default_rng(seed)
    X = torch.from_numpy(rng.standard_normal((rows, columns)))
    extra = {"offset": rng.standard_normal(rows), "weight": rng.random(rows), "residual": 0.1 * rng.random(rows)}
    extra = {name: torch.from_numpy(x) for name, x in extra.items()} if everything else {}
    return Arrays(X, torch.from_numpy(rng.random(rows) < 0.4), intercept=True, **extra)


def sums_of(arrays, gram="full", spread=0.3, recipe=True, seed=1):
    """The sums over all rows, as `sums` requests them."""
    rng, d = np.random.default_rng(seed), arrays.dimension
    mean, factor = rng.standard_normal(d), np.triu(rng.standard_normal((d, d))) * spread / d**0.5
    function = LongRowFunction(
        row_sums,
        mean=torch.from_numpy(mean),
        factor=torch.from_numpy(factor),
        moments=limit().moments,
        recipe=KernelRecipe("heat") if recipe else None,
        gram=gram,
        single=False,
        certify=True,
    )
    return arrays.reduce(function)


@built
@pytest.mark.parametrize("gram", ["full", "none"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (130, 3), (4032, 2), (4033, 7), (50_000, 5)])
def test_every_number_of_threads_gives_the_same_bits(monkeypatch, rows, columns, gram):
    """Even with more threads than pieces of 4,032 rows."""
    arrays = made_arrays(rows, columns)
    alone = sums_of(arrays, gram)
    for number in (1, 2, 3, 5, 64):
        threads_of_a_pass(monkeypatch, number)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(alone, sums_of(arrays, gram), strict=True))


@built
def test_the_sums_are_those_of_the_formulas(monkeypatch):
    arrays = made_arrays(40_000, 4)
    threads_of_a_pass(monkeypatch, 3)
    for fast, plain in zip(sums_of(arrays), sums_of(arrays, recipe=False), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-14 * float(plain.abs().max()))


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_rows_are_fetched_by_several_threads(monkeypatch, dtype):
    """Rows that lie one after the other in memory; others are fetched by one."""
    monkeypatch.setattr(rows, "ENTRIES_OF_THREAD", 50)
    calls, take = [], np.take
    monkeypatch.setattr(rows.np, "take", lambda *given: (calls.append(len(given[1])), take(*given)))
    X = torch.from_numpy(np.random.default_rng(0).standard_normal((300, 5))).to(dtype)
    index = rows.scattered(300, 100, np.random.default_rng(1))
    before = PASS_THREADS.set(3)
    try:
        for given, shares in ((X, [34, 33, 33]), (X.T.contiguous().T, []), (torch.cat([X, X], 1)[:, :5], [])):
            assert torch.equal(Arrays(given, X[:, 0]).take(index).features, X[index])
            assert sorted(calls, reverse=True) == shares
            calls.clear()
    finally:
        PASS_THREADS.reset(before)


def test_one_row_beyond_the_reach_does_not_spoil_the_others(monkeypatch):
    """Its block is summed by the plain formulas, the others by the compiled pass."""
    arrays = made_arrays(40_000, 3, everything=False)
    arrays.features[17_000] *= 1e3
    threads_of_a_pass(monkeypatch, 2)
    whole = Block(Dense(arrays.features, True), arrays.label)
    mean, factor = torch.zeros(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    assert compiled_sums(whole, KernelRecipe("heat"), mean, factor, "full", False) is None
    for fast, plain in zip(sums_of(arrays, spread=1.0), sums_of(arrays, spread=1.0, recipe=False), strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-11, atol=1e-13 * float(plain.abs().max()))


@built
@pytest.mark.parametrize("kept", ["by rows", "by columns", "float32", "memory map"])
def test_a_fit_is_the_same_for_any_number(monkeypatch, tmp_path, kept):
    arrays = made_arrays(40_000, 6, everything=False)
    X, y = arrays.features.numpy(), arrays.label.numpy()
    if kept == "memory map":
        np.save(tmp_path / "X.npy", X)
        X = np.load(tmp_path / "X.npy", mmap_mode="r")
    X = {"by columns": np.asfortranarray, "float32": np.float32}.get(kept, lambda x: x)(X)
    monkeypatch.setattr(compiled, "WORK_OF_THREAD", 1)
    alone = viper.VariationalLogisticRegression(n_jobs=1).fit(X, y)
    for number in (2, 3, 5):
        model = viper.VariationalLogisticRegression(n_jobs=number).fit(X, y)
        np.testing.assert_array_equal(model.coef_, alone.coef_)
        np.testing.assert_array_equal(model.covariance_, alone.covariance_)
        assert (model.elbo_, model.elbo_bound_, model.passes_) == (alone.elbo_, alone.elbo_bound_, alone.passes_)


FORKED_AND_INTERRUPTED = """
import os, signal
import numpy as np
import viper
from viper.inference.kernels import compiled

compiled.WORK_OF_THREAD = 1
rng = np.random.default_rng(0)
X = rng.standard_normal((60_000, 20))
y = rng.random(60_000) < 1 / (1 + np.exp(-X[:, 0]))
fit = lambda: viper.VariationalLogisticRegression(n_jobs=3, verbose=False).fit(X, y).coef_
before = fit()
signal.signal(signal.SIGALRM, signal.default_int_handler)
if (child := os.fork()) == 0:
    os._exit(0 if (fit() == before).all() else 1)
assert os.waitpid(child, 0)[1] == 0, "a fork after use"
caught = 0
while caught < 3:
    signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.01 * caught)
    try:
        while True:
            fit()
    except KeyboardInterrupt:
        caught += 1
assert (fit() == before).all(), "a fit after an interrupt"
print("as before")
"""


@built
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_and_an_interrupt_leave_it_as_it_was():
    command = [sys.executable, "-c", FORKED_AND_INTERRUPTED]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "as before", done.stderr


# --- the number of threads ---


@pytest.mark.parametrize("number", [0, 1.5, "2", True, [1]])
def test_odd_numbers_of_jobs(number):
    for model in (viper.VariationalLogisticRegression(n_jobs=number), viper.VariationalGPClassifier(n_jobs=number)):
        with pytest.raises(ValueError, match=r"n_jobs must be None or an integer other than 0; got .* Use -1"):
            model.fit(np.arange(8.0)[:, None], np.arange(8) % 3 > 0)


def test_numbers_of_jobs_are_those_of_joblib():
    everything = joblib.cpu_count()
    assert [count_threads(n) for n in (1, 3, np.int64(7), -1, -1000)] == [1, 3, 7, everything, 1]


def test_none_is_what_the_surroundings_say():
    before = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            assert count_threads(None) == min(number, joblib.cpu_count())
    finally:
        torch.set_num_threads(before)
    with one_thread():
        assert count_threads(None) == 1
    for number in (1, 2):
        with joblib.parallel_config(n_jobs=number):
            assert count_threads(None) == number
    workers = Parallel(n_jobs=2, backend="threading")
    assert workers(delayed(count_threads)(None) for _ in range(4)) == [1] * 4


def test_the_number_holds_inside_and_in_this_thread_only():
    seen = []
    with pass_threads(3):
        assert PASS_THREADS.get() == 3
        other = Thread(target=lambda: seen.append(PASS_THREADS.get()))
        other.start()
        other.join()
        with one_thread(), pass_threads(None):
            assert PASS_THREADS.get() == 1
        assert PASS_THREADS.get() == 3
    assert PASS_THREADS.get() == 1
    assert seen == [1]


def test_blas_has_the_threads_where_no_pass_is_compiled(monkeypatch):
    """With too many columns for the compiled pass."""
    seen = []
    rng = np.random.default_rng(0)
    for columns in (5, compiled.MOST_COMPILED + 1):
        X, y = rng.standard_normal((columns + 50, columns)), rng.integers(0, 2, columns + 50)
        model = viper.VariationalLogisticRegression(n_jobs=2, max_iter=1)
        monkeypatch.setattr(viper.models.fitting, "newton", lambda *args, **options: seen.append(blas_threads()))
        with pytest.raises(AttributeError):  # nothing was fitted
            model.fit(X, y)
    assert seen == [{1}, {2}]
