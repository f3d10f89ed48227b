"""Posteriors refined to mixtures of Gaussians: one is the posterior itself, more are closer to the exact one."""

import math

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from scipy.special import expit, logsumexp
from sklearn.base import clone

import viper
from viper import VariationalLogisticRegression
from viper.inference.mixture.posterior import GaussianMixture, entropy_terms


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
    one = fitted.refined(components=1)
    assert one.posterior_ is fitted.posterior_
    assert one.elbo_ == fitted.elbo_
    assert one.diagnose().k_hat == fitted.diagnose().k_hat
    # a mixture of one, and of two that are the same, has the same answers
    q, X = fitted.posterior_, small()[0]
    for weights in ([1.0], [0.3, 0.7]):
        J = len(weights)
        twin = fitted.refined(1)
        none = torch.zeros(J, dtype=torch.float64)
        parts = q.mean.expand(J, -1), q.factor.expand(J, -1, -1)
        twin.posterior_ = GaussianMixture(torch.tensor(weights, dtype=torch.float64), *parts, none, 0.0 * parts[0])
        assert np.allclose(twin.covariance_, fitted.covariance_, rtol=1e-12)
        assert np.allclose(twin.coefficient_interval(0.9), fitted.coefficient_interval(0.9), rtol=1e-10)
        assert np.allclose(twin.summary(), fitted.summary(), rtol=1e-10)
        names = (
            "predict",
            "predict_proba",
            "predict_std",
            "predict_interval",
            "decision_function",
            "predict_information",
        )
        for method in names:
            assert np.allclose(getattr(twin, method)(X), getattr(fitted, method)(X), rtol=1e-9), method
        assert np.allclose(twin.predict_latent(X), fitted.predict_latent(X), rtol=1e-10)
        pd.testing.assert_frame_equal(twin.predict_table(X), fitted.predict_table(X), rtol=1e-9)
        assert twin.elbo(*small()) == pytest.approx(fitted.elbo_, rel=1e-10)


def test_more_components_are_closer_to_the_exact_posterior(fitted, exact):
    evidence, truth = exact
    bounds, errors, sds = [], [], []
    for components in (1, 2, 4):
        found = fitted.refined(components)
        bounds.append(found.elbo_)
        errors.append(np.abs((found.coefficient_interval() - truth[:, 2:]) / truth[:, 1:2]).max())
        sds.append(np.abs(found.posterior_.variance.sqrt().numpy() / truth[:, 1] - 1.0).max())
    assert bounds[0] < bounds[1] < bounds[2] < evidence
    # two components close more than half of the gap, even with the bound on the entropy
    assert evidence - bounds[1] < 0.5 * (evidence - bounds[0])
    assert errors[2] < errors[1] < 0.6 * errors[0]
    assert sds[1] < 0.03 < sds[0]


def test_the_bound_on_the_entropy(fitted):
    found = fitted.refined(components=3)
    gap, error = found.posterior_.entropy_gap()
    assert -4.0 * error < gap < 0.05
    diagnosis = found.diagnose()
    assert diagnosis.elbo == found.elbo_
    assert diagnosis.k_hat < 0.7
    assert diagnosis.verdict.startswith("The mixture of 3 Gaussians is close to the exact posterior")


def test_the_bound_is_exact_for_two_components_of_one_covariance():
    # along one axis: quadrature of -∫ q log q
    weights, away, sd = torch.tensor([0.3, 0.7], dtype=torch.float64), 1.4, 0.8
    means = torch.tensor([[-away], [away]], dtype=torch.float64)
    factors = torch.full((2, 1, 1), sd, dtype=torch.float64)
    b = -2.0 * away / sd**2  # log odds of the first component are a + bβ
    guess = torch.tensor([[math.log(0.3 / 0.7), b]], dtype=torch.float64)
    bound = weights @ entropy_terms(weights.log(), means, factors, guess)
    grid = torch.linspace(-12.0, 12.0, 20_001, dtype=torch.float64)
    slopes = torch.cat([guess[:, 1:], guess.new_zeros(1, 1)])
    mixture = GaussianMixture(weights, means, factors, torch.tensor([guess[0, 0], 0.0]), slopes)
    log_q = mixture.log_density_at(grid[:, None])
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


def test_components_of_a_fit_are_those_of_refined(fitted, tmp_path):
    X, y = small()
    model = VariationalLogisticRegression(components=2, prior_scale=3.0, intercept_scale=5.0).fit(X, y)
    refined = fitted.refined()
    assert model.elbo_ == refined.elbo_ == model.objective_
    assert model.elbo_bound_ <= model.elbo_
    assert model.get_params() == refined.get_params()
    assert np.array_equal(model.coef_, refined.coef_)
    assert model.elbo(X, y) == pytest.approx(model.elbo_, rel=1e-12)
    model.save(tmp_path / "m.viper")
    again = viper.load(tmp_path / "m.viper")
    pd.testing.assert_frame_equal(again.predict_table(X), model.predict_table(X))
    assert again.diagnose(X, y).k_hat == model.diagnose().k_hat
    frame = pd.DataFrame({"x": X[:, 0], "y": y})
    files = tmp_path / "rows.parquet"
    frame.to_parquet(files)
    source = viper.Files(files, target="y")
    streamed = clone(model).fit(source)
    assert np.allclose(streamed.coef_, model.coef_, atol=1e-4)
    assert streamed.score(source) == model.score(X, y)
    sparse = clone(model).fit(scipy.sparse.csr_matrix(X), y)
    assert np.allclose(sparse.coef_, model.coef_, atol=1e-4)


def test_weighted_draws_of_a_mixture(fitted, exact):
    X, _ = small()
    model = fitted.refined()
    draws = model.sample(40_000, random_state=0)
    p = expit(draws[:, :1] @ X.T + draws[:, 1:]).mean(1)
    table = model.average(X, draws=40_000)
    assert table["estimate"].iloc[0] == pytest.approx(p.mean(), abs=5 * p.std() / 200.0)
    assert table["sd"].iloc[0] == pytest.approx(p.std(), rel=0.03)
    assert np.allclose(table[["lower", "upper"]], np.quantile(p, [0.025, 0.975]), atol=0.01)
    assert np.allclose(model.corrected().mean_, exact[1][:, 0], atol=0.08)
    assert model.loo().elpd_loo == pytest.approx(fitted.loo(draws=20_000).elpd_loo, abs=0.1)
    values = model.to_arviz(draws=500, random_state=0)["sample_stats"].dataset
    weights = (values["lp"] - values["log_q"]).values.ravel()
    assert logsumexp(weights) - math.log(len(weights)) == pytest.approx(model.diagnose().log_evidence, abs=0.1)


def test_more_columns_than_rows():
    generator = np.random.default_rng(0)
    X, y = generator.standard_normal((12, 15)), np.arange(12) % 2
    one = VariationalLogisticRegression().fit(X, y)
    two = VariationalLogisticRegression(components=2).fit(X, y)
    assert one.elbo_ < two.elbo_ < two.diagnose().log_evidence


def test_models_that_cannot_be_refined(fitted):
    X, y = small()
    for wrong in (0, 2.5, True, 100):
        with pytest.raises(ValueError, match="components must be a whole number from 1 to 16"):
            fitted.refined(wrong)
    diagonal = VariationalLogisticRegression(covariance="diagonal").fit(X, y)
    with pytest.raises(ValueError, match=r"components=2 needs covariance='full'.*got 'diagonal'"):
        diagonal.refined()
    with pytest.raises(ValueError, match="components=2 needs bound='viper'"):
        VariationalLogisticRegression(components=2, bound="pg").fit(X, y)
    three = np.arange(len(X)) % 3
    with pytest.raises(ValueError, match="components=2 is for two classes; got 3"):
        VariationalLogisticRegression(components=2).fit(X, three)
    with pytest.raises(ValueError, match="components=2 is for two classes; got several labels"):
        VariationalLogisticRegression(components=2).fit(X, np.c_[y, 1 - y])
    with pytest.raises(ValueError, match=r"several components are for small data.*got 300,000 rows"):
        VariationalLogisticRegression(components=2).fit(np.ones((300_000, 7)), np.arange(300_000) % 2)
    with pytest.raises(ValueError, match="need two classes"):
        VariationalLogisticRegression().fit(X, three).refined()
    with pytest.raises(ValueError, match="refined judges a posterior; got robust"):
        fitted.robust().refined()
    two = fitted.refined()
    for what in (two.robust, two.refined, two.to_onnx, lambda: two.partial_fit(X, y)):
        with pytest.raises(ValueError, match="is for one Gaussian; got components=2"):
            what()
    with pytest.raises(ValueError, match="components must be a whole number"):
        VariationalLogisticRegression(components=0).fit(X, y)
