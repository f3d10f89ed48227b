"""Dask for tests: clusters of worker processes on this machine, and the same rows in many layouts."""

import sys
from contextlib import contextmanager

import cloudpickle
import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
from distributed import Client, LocalCluster
from distributed.utils import get_mp_context

import viper
from viper.data.checks import RowFormat
from viper.data.open import open_labelled_rows
from viper.inference.rows import Block

# the workers cannot import this file
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@contextmanager
def workers(count):
    """A client of this many single-threaded processes, forked from one that has imported the library."""
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        get_mp_context().set_forkserver_preload(["distributed", "viper.data.dask.collections"])
        machines = LocalCluster(n_workers=count, threads_per_worker=1, processes=True, dashboard_address=":0")
        with machines, Client(machines, set_as_default=False) as client:
            yield client


@contextmanager
def in_use(client):
    """Dask computes with this client inside the context, and with threads outside."""
    with client.as_current(), dask.config.set(scheduler=client.get):
        yield client


# --- rows ---

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
    """X, y, weights and offset as Dask arrays, each with its own chunks or those of the others."""
    cuts = {name: other.get(name, chunks) for name in ("X", "y", "w", "o")}
    return [da.from_array(x, chunks=cuts[name]) for name, x in zip("Xywo", (X, Y, WEIGHT, OFFSET), strict=True)]


def frames():
    """The same as DataFrame and Series with partitions of unknown length, one of them empty."""
    whole = dd.from_pandas(FRAME, npartitions=4, sort=False)
    gap = whole[whole.a > 1e9].partitions[:1]
    joined = dd.concat([whole, gap], interleave_partitions=False)
    return [joined[NAMES], joined["y"], joined["w"], joined["o"]]


def cut(x, chunks=6_000):
    return da.from_array(x, chunks=chunks)


def partitioned(collection):
    return open_labelled_rows(classifier(), collection, da.from_array(Y, chunks=N), RowFormat(), reset=True)[1]


def count(block: Block) -> list[torch.Tensor]:
    return [torch.tensor(float(len(block.label)))]


# --- comparisons ---


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
