"""Designs on which solvers fail: the answer is the optimum, or a clear line; a change of units changes nothing."""

import warnings
from contextlib import suppress

import numpy as np
import pandas as pd
import pytest
from hostile.designs import Design, designs, distance, judge, labels, moments

from viper import VariationalGPClassifier, VariationalLogisticRegression
from viper.data.scaling import column_moments
from viper.errors import ConvergenceWarning, NotFinite


@pytest.mark.parametrize("part", range(4))
def test_no_design_is_silently_wrong(part):
    bad = []
    for k, design in enumerate(designs(2026, 60)):
        if k % 4 == part and (found := judge(design)).word not in ("right", "clear"):
            bad.append((design.name, found))
    assert not bad


def test_the_judge_sees_what_is_wrong():
    design = Design("", np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3 == 0)
    model = design.fit()
    assert distance(model, design) == ""
    posterior = model.posterior_
    object.__setattr__(posterior, "mean", posterior.mean + 0.1)
    assert "nats short" in distance(model, design)
    object.__setattr__(posterior, "mean", posterior.mean - 0.1)
    object.__setattr__(posterior, "factor", 1.01 * posterior.factor)
    assert "the sd of" in distance(model, design)


def test_the_judges_moments():
    """Against closed forms of the derivatives of E softplus, for a normal of width zero and a symmetric one."""
    theta = np.array([-3.0, 0.0, 5.0])
    s = 1 / (1 + np.exp(theta))
    slope, curvature = moments(theta, np.zeros(3))
    np.testing.assert_allclose(slope, s, rtol=1e-12)
    np.testing.assert_allclose(curvature, s * (1 - s), rtol=1e-12)
    for tau in (0.5, 1.0, 2.0, 1e3):
        assert moments(np.zeros(1), np.array([tau]))[0][0] == pytest.approx(0.5, rel=1e-12)
    assert moments(np.zeros(1), np.array([1e6]))[1][0] == pytest.approx(1 / (1e6 * np.sqrt(2 * np.pi)), rel=1e-9)
    below, above = moments(np.array([1.0]), np.array([1 - 1e-12])), moments(np.array([1.0]), np.array([1.0]))
    np.testing.assert_allclose(below, above, rtol=1e-10)


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_an_outlier_of_a_million_is_fitted(family):
    """Two hundred steps once ended five nats short."""
    rng = np.random.default_rng(5)
    X = rng.normal(size=(40, 4))
    X[3, 1] *= 1e7
    design = Design("", X, labels(X / 1e3, rng), options={"covariance": family})
    assert judge(design).word == "right"


def test_heavy_weights_and_a_prior_far_away():
    """Steps towards the mode were once cut to a thousandth of their length, which left 3e14 nats."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(100, 3))
    weight = 10.0 ** rng.uniform(-8, 8, 100)
    assert judge(Design("", X, labels(X, rng), weight, options={"prior_mean": 170.0})).word == "right"


def test_large_columns_that_are_twice_the_same():
    """Only the prior informs their difference; its variance was once lost to cancellation."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(80, 1))
    y = rng.random(80) < 0.5
    model = VariationalLogisticRegression().fit(np.hstack([1e9 * x, 1e9 * x]), y)
    assert model.converged_
    difference = np.array([1.0, -1.0, 0.0])
    assert difference @ model.covariance_ @ difference == pytest.approx(2.0, rel=1e-9)
    one = VariationalLogisticRegression(prior_scale=[np.sqrt(2) * 1e9]).fit(x, y)  # the prior of 1e9 times their sum
    np.testing.assert_allclose(model.predict_latent(np.hstack([1e9 * x, 1e9 * x])), one.predict_latent(x), rtol=1e-5)


@pytest.mark.parametrize("factor", [1e-140, 1e-100, 1e-7, 1e7, 1e100, 1e140])
@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_a_column_and_its_prior_in_other_units(family, factor):
    rng = np.random.default_rng(3)
    X = rng.normal(size=(200, 4))
    y = labels(X, rng)
    first = VariationalLogisticRegression(covariance=family).fit(X, y)
    unit = np.array([1.0, factor, 1.0, 1.0])
    second = VariationalLogisticRegression(covariance=family, prior_scale=1 / unit).fit(X * unit, y)
    np.testing.assert_allclose(second.coef_[0] * unit, first.coef_[0], rtol=1e-9)
    sds = (np.sqrt(np.diag(model.covariance_))[:4] for model in (first, second))
    np.testing.assert_allclose(next(sds), next(sds) * unit, rtol=1e-9)
    assert second.elbo_ == pytest.approx(first.elbo_, rel=1e-12)
    assert second.history_[-1][:2] == first.history_[-1][:2]
    np.testing.assert_allclose(second.predict_proba(X * unit), first.predict_proba(X), rtol=1e-9)


@pytest.mark.parametrize("factor", [1e-300, 1e-170, 1e-140, 1e140, 1e155, 1e300, 1e307])
def test_a_standardised_column_in_any_units(factor):
    """From 1e155 on, and below 1e-170, the coefficient was once silently 0."""
    rng = np.random.default_rng(4)
    table = pd.DataFrame(rng.normal(size=(150, 2)), columns=["a", "b"])
    table["y"] = labels(table.to_numpy(), rng)
    scaled = table.assign(a=factor * table.a)
    for estimator, options in (
        (VariationalLogisticRegression, {}),
        (VariationalGPClassifier, {"n_inducing": 5, "mean": "constant"}),
    ):
        first, second = (estimator.from_formula("y ~ a + b", rows, **options) for rows in (table, scaled))
        np.testing.assert_allclose(second.predict_proba(scaled), first.predict_proba(table), rtol=1e-6)
        assert second.formula_.means["a"] == pytest.approx(factor * first.formula_.means["a"], rel=1e-12)
        if options:
            break
        assert second.coef_ == pytest.approx(first.coef_, rel=1e-9)


def test_moments_of_columns_are_those_of_numpy():
    rng = np.random.default_rng(6)
    X, weight = rng.normal(size=(100, 3)) * [1.0, 1e5, 1e-5] + 3.0, rng.random(100)
    mean, sd = column_moments(X)
    np.testing.assert_array_equal(mean, X.mean(0))
    np.testing.assert_array_equal(sd, X.std(0))
    assert np.array_equal(column_moments(np.zeros((3, 1))), [[0.0], [0.0]])
    mean, sd = column_moments(X, weight)
    np.testing.assert_allclose(mean, np.average(X, axis=0, weights=weight), rtol=1e-14)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(column_moments(X * 1e300, weight)[1], sd * 1e300, rtol=1e-9)  # 1e300 is rounded


def separable(n, p, seed=0):
    """Rows of standard normal columns that some plane separates by class."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, p))
    return X, X @ rng.standard_normal(p) > 0


@pytest.mark.parametrize(("shape", "family", "most"), [((60, 90), "diagonal", 500), ((40, 130), "full", 300)])
def test_separated_classes_in_huge_columns_end_soon(shape, family, most):
    """Under such a prior log-odds grow to 1e12, where F has no digits; the fits went on for 1,159 and 430 passes."""
    X, y = separable(*shape)
    with pytest.warns(
        ConvergenceWarning, match="log-odds grew beyond .* Features are as large as .*: standardise them"
    ):
        model = VariationalLogisticRegression(covariance=family).fit(1e12 * X, y)
    assert not model.converged_
    assert model.passes_ < most
    assert model.elbo_ < 0.0


@pytest.mark.parametrize("shape", [(60, 90), (200, 150), (100, 90)])
@pytest.mark.parametrize("size", [1e18, 1e30])
def test_rounding_never_makes_an_elbo_positive(shape, size):
    """It once was 2.9e17, beside a warning."""
    X, y = separable(*shape)
    with warnings.catch_warnings(), suppress(NotFinite):
        warnings.simplefilter("ignore", ConvergenceWarning)
        assert VariationalLogisticRegression().fit(size * X, y).elbo_ < 0.0


def test_one_huge_column_among_many():
    """A prior in the coordinates of q was not positive definite there, which ended in an error of LAPACK's."""
    X, y = separable(300, 300)
    X[:, 0] *= 1e30
    assert VariationalLogisticRegression().fit(X, y).converged_
