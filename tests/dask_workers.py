"""Dask clusters for tests: worker processes on this machine."""

from contextlib import contextmanager

import dask
from distributed import Client, LocalCluster
from distributed.utils import get_mp_context


@contextmanager
def workers(count):
    """The client of so many processes with one thread each, forked from one that has imported the library."""
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        get_mp_context().set_forkserver_preload(["distributed", "viper.data.dask.collections"])
        machines = LocalCluster(n_workers=count, threads_per_worker=1, processes=True, dashboard_address=":0")
        with machines, Client(machines, set_as_default=False) as client:
            yield client


@contextmanager
def in_use(client):
    """Dask computes with this client, and elsewhere with threads."""
    with client.as_current(), dask.config.set(scheduler=client.get):
        yield client
