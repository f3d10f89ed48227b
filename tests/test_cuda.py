"""The estimators on a GPU give what they give on the CPU."""

import gpytorch
import numpy as np
import pytest
import torch

import viper
from viper import VariationalGPClassifier, VariationalLogisticRegression
from viper.gpytorch import LogitLikelihood

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
    assert gpu.diagnose().effective_sample_size > 100


def test_float32_on_the_device():
    X, y = data(20_000, 20, 2)
    double, single = (
        VariationalLogisticRegression(device="cuda", dtype=dtype).fit(X, y) for dtype in ("float64", "float32")
    )
    sd = np.sqrt(np.diag(double.covariance_))
    assert np.max(np.abs(single.coef_ - double.coef_)[0] / sd[:-1]) < 1e-2


def waves(n, seed):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    return X, rng.random(n) < 1 / (1 + np.exp(-3 * np.sin(2 * X[:, 0]) - X[:, 1]))


def fixed_kernel():
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel().initialize(lengthscale=0.6))
    return kernel.initialize(outputscale=4.0).requires_grad_(False)


@pytest.mark.parametrize("options", [{}, {"covariance": "diagonal"}, {"bound": "pg"}, {"bound": "mc"}, {"terms": 5}])
def test_same_gaussian_process(options):
    """With kernel and inducing points given, q and all that follows from it."""
    X, y = waves(3000, 3)
    weight, offset = np.linspace(0.5, 1.5, len(X)), np.linspace(-0.3, 0.3, len(X))
    options |= {"kernel": fixed_kernel(), "mean": "zero", "inducing": X[:40], "learn_inducing": False, "n_starts": 1}
    cpu, gpu = (
        VariationalGPClassifier(device=device, random_state=0, **options).fit(X, y, weight, offset)
        for device in ("cpu", "cuda")
    )
    assert gpu.elbo_ == pytest.approx(cpu.elbo_, rel=1e-9)
    assert gpu.elbo(X, y, weight, offset) == pytest.approx(cpu.elbo_, rel=1e-9)
    assert gpu.posterior_.mean.device == gpu.model_.inducing.device == torch.device("cpu")
    np.testing.assert_allclose(
        gpu.predict_proba(X[:50], offset[:50]), cpu.predict_proba(X[:50], offset[:50]), rtol=1e-5
    )
    np.testing.assert_allclose(gpu.predict_std(X[:50]), cpu.predict_std(X[:50]), rtol=1e-5)
    np.testing.assert_allclose(gpu.sample(X[:5], 3, random_state=1).mean(), cpu.sample(X[:5], 3, random_state=1).mean())


@pytest.mark.parametrize(
    "options", [{}, {"kernel": "matern52"}, {"covariance": "diagonal"}, {"n_inducing": 5000, "max_iter": 20}]
)
@pytest.mark.filterwarnings("ignore::viper.solver.ConvergenceWarning")
def test_gaussian_process_learned_there(options):
    """The whole search: as good an optimum, though rounding may lead elsewhere."""
    X, y = waves(1000, 4)
    options = {"n_inducing": 20, "n_starts": 3, "random_state": 0} | options
    cpu, gpu = (VariationalGPClassifier(device=device, **options).fit(X, y) for device in ("cpu", "cuda"))
    assert gpu.elbo_ == pytest.approx(cpu.elbo_, abs=1.0)
    assert gpu.score(X, y) == pytest.approx(cpu.score(X, y), abs=0.01)


@pytest.mark.filterwarnings("ignore::viper.solver.ConvergenceWarning")
def test_gaussian_process_of_tensors_that_lie_there(tmp_path):
    X, y = waves(1000, 5)
    there = torch.from_numpy(X).cuda()
    gp = VariationalGPClassifier(n_inducing=15, n_starts=2, max_iter=10, warm_start=True, random_state=0)
    first = gp.fit(there, torch.from_numpy(y).cuda()).elbo_
    assert gp.fit(there, y).elbo_ >= first - 1e-6
    np.testing.assert_allclose(gp.predict_proba(there), gp.predict_proba(X), rtol=1e-9)
    gp.save(tmp_path / "model.viper")
    np.testing.assert_allclose(viper.load(tmp_path / "model.viper").predict_proba(X), gp.predict_proba(X))


@pytest.mark.filterwarnings("ignore::viper.solver.ConvergenceWarning")
def test_natural_adam_on_the_device():
    X, y = waves(1000, 6)
    options = {"n_inducing": 15, "solver": "natural-adam", "max_iter": 20, "random_state": 0}
    for extra in ({}, {"batch_size": 200}):
        cpu, gpu = (VariationalGPClassifier(device=d, **options, **extra).fit(X, y) for d in ("cpu", "cuda"))
        assert gpu.elbo_ == pytest.approx(cpu.elbo_, rel=1e-4)


def test_likelihood_follows_its_model():
    mean, root = torch.randn(2, 7), torch.randn(2, 7, 7)
    covariance = root @ root.mT + torch.eye(7)
    y = (mean > 0).float()
    for likelihood in (LogitLikelihood(), LogitLikelihood("pg"), LogitLikelihood("mc"), LogitLikelihood(terms=5)):
        values = []
        for device in ("cpu", "cuda"):
            f = gpytorch.distributions.MultivariateNormal(mean.to(device), covariance.to(device))
            moved = likelihood.to(device)
            parts = moved.expected_log_prob(y.to(device), f), moved.log_marginal(y.to(device), f), moved(f).probs
            assert all(part.device.type == device for part in parts)
            values.append([part.cpu() for part in parts])
        torch.testing.assert_close(*values)
