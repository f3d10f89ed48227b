"""The Gaussian process on a GPU gives what it gives on the CPU."""

import numpy as np
import pytest
import torch

import viper

gpytorch = pytest.importorskip("gpytorch")

from viper import VariationalGPClassifier  # noqa: E402
from viper.gp.likelihood import LogitLikelihood, SoftmaxLikelihood  # noqa: E402

pytestmark = pytest.mark.cuda


def waves(n, seed):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    return X, rng.random(n) < 1 / (1 + np.exp(-3 * np.sin(2 * X[:, 0]) - X[:, 1]))


def fixed_kernel():
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel().initialize(lengthscale=0.6))
    return kernel.initialize(outputscale=4.0).requires_grad_(False)


@pytest.mark.parametrize("options", [{}, {"covariance": "diagonal"}, {"bound": "pg"}, {"bound": "mc"}, {"terms": 5}])
def test_same_gaussian_process(options):
    """Given kernel and inducing points, q and everything derived from it."""
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
    draws, sd = gpu.sample(X[:5], 4000, random_state=1), cpu.predict_latent(X[:5])[1]
    np.testing.assert_allclose(draws.mean(0), cpu.predict_latent(X[:5])[0], atol=5 * sd.max() / 4000**0.5)


@pytest.mark.parametrize(
    "options", [{}, {"kernel": "matern52"}, {"covariance": "diagonal"}, {"n_inducing": 5000, "max_iter": 20}]
)
@pytest.mark.filterwarnings("ignore::viper.errors.ConvergenceWarning")
def test_gaussian_process_learned_there(options):
    """The whole search finds as good an optimum, though rounding may lead elsewhere."""
    X, y = waves(400, 4)
    options = {"n_inducing": 20, "n_starts": 3, "random_state": 0} | options
    cpu, gpu = (VariationalGPClassifier(device=device, **options).fit(X, y) for device in ("cpu", "cuda"))
    assert gpu.elbo_ == pytest.approx(cpu.elbo_, abs=1.0)
    assert gpu.score(X, y) == pytest.approx(cpu.score(X, y), abs=0.01)


@pytest.mark.filterwarnings("ignore::viper.errors.ConvergenceWarning")
def test_gaussian_process_of_tensors_that_lie_there(tmp_path):
    X, y = waves(1000, 5)
    there = torch.from_numpy(X).cuda()
    gp = VariationalGPClassifier(n_inducing=15, n_starts=2, max_iter=10, warm_start=True, random_state=0)
    first = gp.fit(there, torch.from_numpy(y).cuda()).elbo_
    assert gp.fit(there, y).elbo_ >= first - 1e-6
    np.testing.assert_allclose(gp.predict_proba(there), gp.predict_proba(X), rtol=1e-9)
    gp.save(tmp_path / "model.viper")
    np.testing.assert_allclose(viper.load(tmp_path / "model.viper").predict_proba(X), gp.predict_proba(X))


@pytest.mark.filterwarnings("ignore::viper.errors.ConvergenceWarning")
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


def test_softmax_likelihood_follows_its_model():
    mean, variance = torch.randn(7, 4), torch.rand(28)
    y = torch.arange(7) % 4
    for options in ({"mixing_weights": False}, {"num_features": 4}):
        likelihood = SoftmaxLikelihood(num_classes=4, **options)
        values = []
        for device in ("cpu", "cuda"):
            f = gpytorch.distributions.MultitaskMultivariateNormal(mean.to(device), torch.diag(variance).to(device))
            moved = likelihood.to(device)
            parts = moved.expected_log_prob(y.to(device), f), moved.log_marginal(y.to(device), f), moved(f).probs
            assert all(part.device.type == device for part in parts)
            values.append([part.detach().cpu() for part in parts])
        torch.testing.assert_close(*values)


def test_narrow_intervals_are_reported_there_too():
    X = np.array([[0.0], [1.0], [2.0]])
    with pytest.warns(UserWarning, match="intervals are more than 10 times too narrow"):
        VariationalGPClassifier(device="cuda", priors=None, random_state=0).fit(X, [0, 1, 1])


@pytest.mark.filterwarnings("ignore::viper.errors.ConvergenceWarning")
def test_more_classes_on_the_device():
    X, _ = waves(300, 7)
    y = (X[:, 0] > 0.3).astype(int) + (X[:, 1] > 0.0)
    cpu, gpu = (
        VariationalGPClassifier(n_inducing=15, n_starts=1, random_state=0, device=device).fit(X, y)
        for device in ("cpu", "cuda")
    )
    assert gpu.elbo_ == pytest.approx(cpu.elbo_, abs=1.0)
    assert gpu.score(X, y) == pytest.approx(cpu.score(X, y), abs=0.02)
