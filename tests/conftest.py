"""What holds for every test: one torch thread, no windows, and `cuda` tests only where there is a device."""

import os

import pytest
import torch

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("SCIPY_ARRAY_API", "1")  # so that scikit-learn's checks of estimators skip none
# Tests run in one process per core (see the Makefile); more threads would only compete with the other workers.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="module")
def three():
    """A cluster of three worker processes."""
    from dask_workers import workers

    with workers(3) as client:
        yield client


@pytest.fixture
def client(three):
    """The cluster as what Dask computes with; tests that do not ask for it use threads."""
    from dask_workers import in_use

    with in_use(three):
        yield three


@pytest.fixture(params=["threads", "cluster"])
def somewhere(request):
    return request.getfixturevalue("client") if request.param == "cluster" else None


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Return a function that runs a command of the program in an empty folder: exit code, stdout and stderr."""
    import signal
    import warnings

    from viper.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back what the program changes
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)

    def call(*arguments):
        with pytest.raises(SystemExit) as done:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return done.value.code or 0, out, " ".join(err.split())

    return call
