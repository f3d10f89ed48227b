"""The estimator on a GPU gives what it gives on the CPU."""

import numpy as np
import pytest
import torch

from viper import VariationalLogisticRegression

pytestmark = pytest.mark.cuda


def data(n, p, seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, p))
    y = rng.random(n) < 1 / (1 + np.exp(-X @ rng.uniform(-1, 1, p) - 0.2))
    return X, y


@pytest.mark.parametrize("options", [{}, {"covariance": "diagonal"}, {"bound": "pg"}, {"terms": 5}, {"solver": "adam"}])
def test_same_posterior(options):
    X, y = data(30_000, 8, 0)
    weight, offset = np.linspace(0.5, 1.5, len(X)), np.linspace(-0.3, 0.3, len(X))
    cpu, gpu = (
        VariationalLogisticRegression(device=device, random_state=0, **options).fit(X, y, weight, offset)
        for device in ("cpu", "cuda")
    )
    np.testing.assert_allclose(gpu.coef_, cpu.coef_, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(gpu.covariance_, cpu.covariance_, rtol=1e-7, atol=1e-12)
    assert gpu.elbo_ == pytest.approx(cpu.elbo_, rel=1e-11)
    np.testing.assert_allclose(
        gpu.predict_proba(X[:50], offset[:50]), cpu.predict_proba(X[:50], offset[:50]), rtol=1e-8
    )


def test_tensors_that_lie_there_and_more_columns_than_rows():
    X, y = data(50, 80, 1)
    there = torch.from_numpy(X).cuda()
    gpu, cpu = VariationalLogisticRegression().fit(there, y), VariationalLogisticRegression().fit(X, y)
    np.testing.assert_allclose(gpu.coef_, cpu.coef_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(gpu.predict_std(there), cpu.predict_std(X), rtol=1e-6)
    pytest.importorskip("arviz_stats")
    assert gpu.diagnose().effective_sample_size > 10


def test_float32_on_the_device():
    X, y = data(20_000, 20, 2)
    double, single = (
        VariationalLogisticRegression(device="cuda", dtype=dtype).fit(X, y) for dtype in ("float64", "float32")
    )
    sd = np.sqrt(np.diag(double.covariance_))
    assert np.max(np.abs(single.coef_ - double.coef_)[0] / sd[:-1]) < 1e-2
