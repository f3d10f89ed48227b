"""How far a Gaussian process can be trusted: importance weights against integrals, and elliptical slice sampling."""

import math

import gpytorch
import numpy as np
import pytest
import torch
from tolerances import TOLERANCE

import viper
from viper.errors import ConvergenceWarning
from viper.gp.classifier import VariationalGPClassifier
from viper.inference.importance import Diagnosis, block_log_likelihood
from viper.inference.rows import Block, Dense
from viper.models.loo import terms_and_densities
from viper.models.reference import sample_latent, sample_posterior

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def wavy(n, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.uniform(-2.0, 2.0, (n, 1))
    return X, generator.random(n) < 1 / (1 + np.exp(-2 * np.sin(3 * X[:, 0])))


def fixed_kernel(scale=4.0, length=0.7):
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    kernel.outputscale, kernel.base_kernel.lengthscale = scale, length
    return kernel.double().requires_grad_(False)


def process(**options):
    """A Gaussian process with nothing to learn but q."""
    given = {"kernel": fixed_kernel(), "mean": "zero", "standardize": False, "learn_inducing": False, "n_starts": 1}
    return VariationalGPClassifier(**given | options, random_state=0)


def kernel_matrix(x, z, scale=4.0, length=0.7):
    return scale * np.exp(-0.5 * (x[:, None] - z[None]) ** 2 / length**2)


def expected_softplus(mean, variance):
    """E log(1+e^X) by quadrature in NumPy."""
    return np.logaddexp(0.0, mean[..., None] + np.sqrt(variance)[..., None] * NODES) @ WEIGHTS


# --- diagnose ---


@pytest.fixture(scope="module")
def two_points():
    """Twelve rows and two inducing points, so that w has two coordinates to integrate over."""
    X, y = wavy(12, 3)
    weight = np.linspace(0.5, 2.0, 12)
    model = process(inducing=np.array([[-1.0], [0.8]])).fit(X, y, sample_weight=weight)
    return model, X, y, weight


def variational_terms(X, y, weight, w):
    """log p̃(y|w) for rows of w, and the variance of f given w, written out."""
    z = np.array([-1.0, 0.8])
    among = kernel_matrix(z, z)
    L = np.linalg.cholesky(among + 1e-8 * among.diagonal().mean() * np.eye(2))
    A = np.linalg.solve(L, kernel_matrix(z, X[:, 0])).T
    residual = 4.0 - (A**2).sum(1)
    f = w @ A.T
    return (y * f - expected_softplus(f, np.broadcast_to(residual, f.shape))) @ weight, residual, A


def test_log_evidence_is_the_integral_over_inducing_values(two_points):
    model, X, y, weight = two_points
    found = model.diagnose(draws=20_000)
    w = np.stack(np.meshgrid(NODES, NODES), -1).reshape(-1, 2)
    log_terms = variational_terms(X, y, weight, w)[0]
    evidence = math.log((WEIGHTS[:, None] * WEIGHTS).reshape(-1) @ np.exp(log_terms))
    assert abs(found.log_evidence - evidence) < 4 * found.log_evidence_error
    assert found.elbo < evidence
    assert found.log_evidence_error < 0.01


def test_residual_cost_is_the_trace_term(two_points):
    model, X, y, weight = two_points
    _, residual, A = variational_terms(X, y, weight, np.zeros((1, 2)))
    theta = A @ model.posterior_.mean.numpy()
    explained = ((A @ model.posterior_.covariance().numpy()) * A).sum(1)
    cost = weight @ (expected_softplus(theta, explained + residual) - expected_softplus(theta, explained))
    assert model.diagnose(draws=100).residual_cost == pytest.approx(cost, rel=TOLERANCE["converged"])
    assert cost > 1.0
    assert "costs" in model.diagnose().verdict
    assert "use more of them" in model.diagnose().verdict


def test_nothing_is_lost_where_all_rows_are_inducing():
    X, y = wavy(40)
    found = process(n_inducing=40).fit(X, y).diagnose()
    assert 0.0 <= found.residual_cost < 1e-5  # the jitter, 1e-8 of the variance, times 40 rows
    assert found.close
    assert found.verdict.startswith("The Gaussian posterior is close to the exact one")
    assert "inducing" not in found.verdict
    assert found.log_evidence > found.elbo
    assert "inducing points cost 0.000 nats" in str(found)


def test_inducing_points_lose_about_what_the_cost_says():
    X, y = wavy(80)
    full = process(n_inducing=80).fit(X, y)
    costs, losses = [], []
    for few in (4, 6, 8):
        sparse = process(n_inducing=few).fit(X, y)
        costs.append(sparse.diagnose(draws=100).residual_cost)
        losses.append(full.elbo_ - sparse.elbo_)
    assert costs == sorted(costs, reverse=True)
    # the cost omits what inducing points lose in the mean
    assert all(0.3 < cost / loss < 3.0 for cost, loss in zip(costs, losses, strict=True))


def test_importance_terms_agree_row_by_row():
    generator = np.random.default_rng(5)
    A, residual = generator.normal(size=(7, 3)), generator.uniform(0.0, 2.0, 7)
    y, weight, offset = generator.integers(0, 2, 7).astype(float), np.arange(1.0, 8.0), generator.normal(size=7)
    vectors = {"offset": offset, "residual": residual, "weight": weight}
    block = Block(
        Dense(torch.from_numpy(A)), torch.from_numpy(y), **{name: torch.from_numpy(x) for name, x in vectors.items()}
    )
    draws = generator.normal(size=(5, 3))
    f = draws @ A.T + offset
    spread = np.broadcast_to(residual, f.shape)
    expected = weight * (y * f - expected_softplus(f, spread))
    terms, densities = (x.numpy() for x in terms_and_densities(block, torch.from_numpy(draws)))
    np.testing.assert_allclose(terms, expected, atol=1e-7)  # RESIDUAL_ERROR times the weights
    total = block_log_likelihood(block, torch.from_numpy(draws))[0].numpy()
    np.testing.assert_allclose(total, expected.sum(1), atol=3e-7)
    sign = np.where(y > 0, 1.0, -1.0)
    chances = (1 / (1 + np.exp(-sign[:, None] * (f[..., None] + np.sqrt(spread)[..., None] * NODES)))) @ WEIGHTS
    np.testing.assert_allclose(densities, weight * np.log(chances), rtol=1e-9)
    assert (densities >= terms - 1e-7).all()  # Jensen


def test_leaving_a_row_out_is_fitting_without_it():
    X, y = wavy(40, 1)
    found = process(n_inducing=40).fit(X, y).loo(draws=4000)
    for i in (0, 7, 21):
        kept = np.arange(40) != i
        without = process(inducing=X).fit(X[kept], y[kept])
        p = without.corrected(draws=4000).predict_proba(X[i : i + 1])[0, int(y[i])]
        assert found.pointwise[i] == pytest.approx(math.log(p), abs=0.03)  # Monte Carlo error of 4000 weighted draws


def test_a_loaded_model_takes_its_rows_again(tmp_path):
    X, y = wavy(40)
    model = VariationalGPClassifier(random_state=0, n_inducing=10, mean="zero").fit(X, y)
    model.save(tmp_path / "model.viper")
    loaded = viper.load(tmp_path / "model.viper")
    with pytest.raises(ValueError, match="diagnose needs the training rows; got a model without them"):
        loaded.diagnose()
    assert loaded.diagnose(X, y) == model.diagnose()


def test_the_verdict_without_a_certificate_advises():
    found = Diagnosis(0.9, 0.7, 4000, 30.0, -50.0, 0.2, -51.0, residual_cost=0.0)
    assert "Prefer a prior for smaller output scales" in found.verdict
    assert "viper.reference.sample_posterior(model)" in found.verdict


# --- elliptical slice sampling ---


def within_errors(result, mean, sd=None):
    assert (abs(result.mean() - mean) < 5 * result.mcse()).all()
    if sd is not None:
        assert (abs(result.sd() - sd) < 5 * result.mcse("sd")).all()


def test_without_likelihood_it_samples_the_prior():
    x = np.linspace(-1, 1, 6)
    K = kernel_matrix(x, x)
    found = sample_latent(np.arange(6.0), K, np.zeros(6), sample_weight=np.zeros(6), draws=500, random_state=1)
    within_errors(found, np.arange(6.0), np.full(6, 2.0))
    correlation = np.corrcoef(found.flat.T)
    np.testing.assert_allclose(correlation, K / 4.0, atol=0.06)  # 1/√ess


def test_one_row_is_an_integral_on_a_grid():
    f = np.linspace(-12, 12, 4001)
    density = np.exp(-0.125 * (f - 0.5) ** 2 + 3 * (0.25 * f - np.logaddexp(0, f)))
    density /= density.sum()
    mean = density @ f
    found = sample_latent([0.5], [[4.0]], [0.25], sample_weight=[3.0], draws=500)
    within_errors(found, mean, math.sqrt(density @ (f - mean) ** 2))


@pytest.mark.parametrize(("n", "mean"), [(40, "constant"), (120, "linear")])
def test_the_full_process_against_elliptical_slices(n, mean):
    X, y = wavy(n, n)
    model = process(n_inducing=n, mean=mean).fit(X, y)
    exact = sample_posterior(model, draws=500, warmup=300)
    assert exact.rhat.max() < 1.01
    for posterior in (model, model.corrected()):
        mean, sd = posterior.predict_latent(X)
        # Monte Carlo error, and a tenth of a posterior sd for the Gaussian
        assert (abs(mean - exact.mean()) < 5 * exact.mcse() + 0.1 * exact.sd()).all()
        np.testing.assert_allclose(sd, exact.sd(), rtol=0.1)


def test_what_it_does_not_sample():
    X, y = wavy(20)
    model = process(n_inducing=5).fit(X, y)
    with pytest.raises(TypeError, match="a fitted model provides its rows and its prior; got y too"):
        sample_posterior(model, y)
    with pytest.raises(ValueError, match="at most 5000 rows; got 5001"):
        sample_latent(np.zeros(5001), np.zeros((5001, 5001)), np.zeros(5001))
    with pytest.raises(ValueError, match="covariance must be a finite square matrix"):
        sample_latent(np.zeros(2), [[1.0, np.nan], [np.nan, 1.0]], np.zeros(2))
    with pytest.warns(ConvergenceWarning, match="effective sample size"):
        sample_posterior(model, draws=20, warmup=10)
