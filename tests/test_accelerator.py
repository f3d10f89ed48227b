"""What a pass on a device does when memory runs out, simulated on the CPU; test_cuda.py uses a device."""

from functools import partial

import numpy as np
import pytest
import torch

from viper import VariationalLogisticRegression
from viper.data import checks
from viper.inference import device, rows
from viper.inference.device import FEWEST_ROWS, fetched, reduce_on_device, rows_per_block

CPU = torch.device("cpu")


def sums(block, power):
    return [block.pow(power).sum(), block.pow(power).sum(0)]


def blocks_up_to(X, most):
    """Blocks of X; if they have more than `most` rows, memory runs out at the second block."""

    def blocks(rows):
        for start in range(0, len(X), rows):
            if rows > most and start:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            yield X[start : start + rows]

    return blocks


def test_blocks_are_halved_until_they_fit():
    X = torch.from_numpy(np.random.default_rng(0).standard_normal((5 * FEWEST_ROWS, 3)))
    function = partial(sums, power=torch.tensor(2.0))
    value, columns = reduce_on_device(blocks_up_to(X, 2 * FEWEST_ROWS), function, 8 * FEWEST_ROWS // 2, CPU)
    torch.testing.assert_close(columns, X.square().sum(0))
    torch.testing.assert_close(value, X.square().sum())


def test_a_device_without_room_is_an_error(monkeypatch):
    monkeypatch.setattr(device, "free_memory", lambda device: 5 << 20)
    X = torch.ones(4 * FEWEST_ROWS, 3)
    with pytest.raises(ValueError, match=r"must fit in the memory of the device; got 5 MB free on cpu, .*device='cpu'"):
        reduce_on_device(blocks_up_to(X, 1), partial(sums, power=torch.tensor(1.0)), 2 * FEWEST_ROWS, CPU)


def test_sums_come_back_as_they_were():
    totals = [torch.tensor(3.0), torch.arange(4.0), torch.arange(6.0).reshape(2, 3)]
    for x, y in zip(fetched(totals, torch.device("meta")), totals, strict=True):
        assert (x.device.type, x.shape) == ("meta", y.shape)
    assert fetched(totals, CPU) is totals


def test_blocks_are_sized_to_the_memory(monkeypatch):
    for free in (1 << 28, 1 << 33, 1 << 37):
        monkeypatch.setattr(device, "free_memory", lambda device, free=free: free)
        count = rows_per_block(25, CPU)
        assert count == FEWEST_ROWS or 8 * 25 * count <= 0.1 * free


@pytest.mark.cuda
@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_that_do_not_fit_stream_through(monkeypatch, order):
    rng = np.random.default_rng(0)
    X = np.asarray(rng.standard_normal((50_000, 6)), order=order)
    y = rng.random(50_000) < 1 / (1 + np.exp(-X[:, 0]))
    there = VariationalLogisticRegression(device="cuda", random_state=0).fit(X, y)
    monkeypatch.setattr(checks, "rows_fit", lambda size, device: False)
    monkeypatch.setattr(checks, "rows_per_block", lambda columns, device: 7_000)
    streamed = VariationalLogisticRegression(device="cuda", random_state=0).fit(X, y)
    np.testing.assert_allclose(streamed.coef_, there.coef_, rtol=1e-10)
    np.testing.assert_allclose(streamed.covariance_, there.covariance_, rtol=1e-10)


@pytest.mark.cuda
def test_rows_on_the_card_stay_there(monkeypatch):
    def never(*arguments):
        raise AssertionError("X lies on the card already")

    monkeypatch.setattr(rows, "prefetched", never)
    X = np.random.default_rng(0).standard_normal((5_000, 3))
    assert VariationalLogisticRegression(device="cuda").fit(X, X[:, 0] > 0.3).converged_
