"""Posteriors refined to mixtures of Gaussians: one is the posterior itself, more are closer to the exact one."""

import math

import numpy as np
import pytest
import torch
from scipy.special import expit, logsumexp

import viper
from viper import VariationalLogisticRegression
from viper.inference.mixture.family import GaussianMixture, entropy_terms


def small(n=25, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(n)
    return x[:, None], (generator.random(n) < expit(2.0 * x - 1.5)).astype(int)


@pytest.fixture(scope="module")
def fitted():
    return VariationalLogisticRegression(prior_scale=3.0, intercept_scale=5.0).fit(*small())


@pytest.fixture(scope="module")
def exact():
    """Log evidence, means, sds and 2.5 % and 97.5 % quantiles of slope and intercept, on a grid."""
    X, y = small()
    beta, alpha = np.meshgrid(np.linspace(-8, 16, 1201), np.linspace(-12, 6, 901), indexing="ij")
    joint = -0.5 * (beta / 3.0) ** 2 - 0.5 * (alpha / 5.0) ** 2 - math.log(2 * math.pi * 15.0)
    for x, label in zip(X[:, 0], y, strict=True):
        f = beta * x + alpha
        joint += label * f - np.logaddexp(0.0, f)
    joint += math.log(0.02 * 0.02)
    evidence = logsumexp(joint)
    weight = np.exp(joint - evidence)
    found = []
    for values, axis in ((beta[:, 0], 1), (alpha[0], 0)):
        marginal = weight.sum(axis)
        mean = marginal @ values
        ends = np.interp([0.025, 0.975], np.cumsum(marginal) - 0.5 * marginal, values)
        found.append([mean, math.sqrt(marginal @ (values - mean) ** 2), *ends])
    return evidence, np.array(found)


def test_one_component_is_the_posterior(fitted):
    X = small()[0]
    one = fitted.refined(components=1)
    assert one.elbo_ == pytest.approx(fitted.elbo_, rel=1e-10)
    assert np.array_equal(one.mean_, fitted.posterior_.mean.numpy())
    assert np.allclose(one.mixture.covariance(), fitted.covariance_, rtol=1e-12)
    assert np.allclose(one.coefficient_interval(0.9), fitted.coefficient_interval(0.9), rtol=1e-10)
    assert np.allclose(one.summary(), fitted.summary(), rtol=1e-10)
    for method in ("predict", "predict_proba", "predict_std", "predict_interval", "decision_function"):
        assert np.allclose(getattr(one, method)(X), getattr(fitted, method)(X), rtol=1e-9), method
    assert np.allclose(one.predict_latent(X), fitted.predict_latent(X), rtol=1e-10)


def test_more_components_are_closer_to_the_exact_posterior(fitted, exact):
    evidence, truth = exact
    bounds, errors, sds = [], [], []
    for components in (1, 2, 4):
        found = fitted.refined(components)
        bounds.append(found.elbo_)
        errors.append(np.abs((found.coefficient_interval() - truth[:, 2:]) / truth[:, 1:2]).max())
        sds.append(np.abs(found.sd_ / truth[:, 1] - 1.0).max())
    assert bounds[0] < bounds[1] < bounds[2] < evidence
    # two components close more than half of the gap, even with the bound on the entropy
    assert evidence - bounds[1] < 0.5 * (evidence - bounds[0])
    assert errors[2] < errors[1] < 0.6 * errors[0]
    assert sds[1] < 0.03 < sds[0]


def test_the_bound_on_the_entropy(fitted):
    found = fitted.refined(components=3)
    gap, error = found.entropy_gap()
    assert -4.0 * error < gap < 0.05
    diagnosis = found.diagnose()
    assert diagnosis.elbo == found.elbo_
    assert diagnosis.k_hat < 0.7


def test_the_bound_is_exact_for_two_components_of_one_covariance():
    # along one axis: quadrature of -∫ q log q
    weights, away, sd = torch.tensor([0.3, 0.7], dtype=torch.float64), 1.4, 0.8
    means = torch.tensor([[-away], [away]], dtype=torch.float64)
    factors = torch.full((2, 1, 1), sd, dtype=torch.float64)
    b = -2.0 * away / sd**2  # log odds of the first component are a + bβ
    guess = torch.tensor([[math.log(0.3 / 0.7), b]], dtype=torch.float64)
    bound = weights @ entropy_terms(weights.log(), means, factors, guess)
    grid = torch.linspace(-12.0, 12.0, 20_001, dtype=torch.float64)
    log_q = GaussianMixture(weights, means, factors).log_density(grid[:, None])
    entropy = -(log_q.exp() * log_q).sum() * (grid[1] - grid[0])
    assert float(bound) == pytest.approx(float(entropy), rel=1e-9)
    worse = weights @ entropy_terms(weights.log(), means, factors, 0.5 * guess)
    assert worse < bound


def test_predictions_are_those_of_draws(fitted):
    found = fitted.refined()
    X = np.linspace(-2, 2, 7)[:, None]
    draws = found.sample(40_000, random_state=0)
    f = draws[:, :1] @ X.T + draws[:, 1:]
    p = expit(f)
    error = p.std(0) / 200.0
    assert (np.abs(found.predict_proba(X)[:, 1] - p.mean(0)) < 5 * error).all()
    assert np.allclose(found.predict_std(X), p.std(0), rtol=0.06)  # of a skewed p, from draws
    assert np.allclose(found.predict_interval(X, 0.8), np.quantile(p, [0.1, 0.9], axis=0).T, atol=0.01)
    mean, sd = found.predict_latent(X)
    assert (np.abs(mean - f.mean(0)) < 5 * sd / 200.0).all()
    assert np.allclose(sd, f.std(0), rtol=0.03)
    assert found.predict(X).tolist() == (found.predict_proba(X)[:, 1] > 0.5).astype(int).tolist()


def test_a_loaded_model_needs_its_rows(fitted, tmp_path):
    fitted.save(tmp_path / "m.viper")
    again = viper.load(tmp_path / "m.viper")
    with pytest.raises(ValueError, match="refined needs the training rows"):
        again.refined()
    X, y = small()
    assert again.refined(2, X, y).elbo_ == pytest.approx(fitted.refined(2).elbo_, rel=1e-9)


def test_what_cannot_be_refined(fitted):
    X, y = small()
    for wrong in (0, 2.5, True, 100):
        with pytest.raises(ValueError, match="components must be a whole number from 1 to 16"):
            fitted.refined(wrong)
    with pytest.raises(ValueError, match="needs two classes, a full covariance"):
        VariationalLogisticRegression(covariance="diagonal").fit(X, y).refined()
    with pytest.raises(ValueError, match="needs two classes"):
        VariationalLogisticRegression().fit(X, np.arange(len(X)) % 3).refined()
    with pytest.raises(ValueError, match="refined judges a posterior; got robust"):
        fitted.robust().refined()
