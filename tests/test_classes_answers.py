"""Effects, leave-one-out, robust covariances, pooling of more than two classes: against statsmodels, ArviZ, draws."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import softmax

import viper
from viper.inference.classes.posterior import FullStar
from viper.inference.posterior import Full
from viper.models.classes.contrasts import ContrastGaussian, contrast_basis, gaussian_of_contrasts
from viper.models.classes.pooling import pool_stars
from viper.models.pooling import pool_posteriors
from viper.report import write as write_report

statsmodels = pytest.importorskip("statsmodels.api")
NAMES = np.array(["a", "b", "c"])


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1000, 3))
    X[:, 2] = X[:, 2] > 0
    f = X @ np.array([[0.0, 0.0, 0.0], [1.0, -0.5, 0.3], [-0.7, 0.8, 1.0]]).T + [0.0, 0.3, -0.2]
    return X, NAMES[(f + rng.gumbel(size=f.shape)).argmax(1)], rng.integers(0, 100, 1000)


@pytest.fixture(scope="module")
def model(data):
    return viper.VariationalLogisticRegression(prior_scale=100.0).fit(*data[:2])


def peer(data, **options):
    return statsmodels.MNLogit(np.searchsorted(NAMES, data[1]), statsmodels.add_constant(data[0])).fit(
        disp=0, **options
    )


# --- effects ---


def test_slopes_are_those_of_statsmodels(data, model):
    """Both are asymptotically normal here: 1,000 rows and a wide prior."""
    found, other = model.slopes(data[0]), peer(data).get_margeff()
    estimate, sd = (found.pivot(index="variable", columns="class", values=name) for name in ("estimate", "sd"))
    np.testing.assert_allclose(estimate, other.margeff, atol=1e-3)
    np.testing.assert_allclose(sd, other.margeff_se, rtol=0.01)


def test_averages_are_those_of_predictions_and_of_draws(data, model):
    X = data[0]
    by = np.where(X[:, 0] > 0, "high", "low")
    found = model.average(X, by=pd.Series(by, name="half")).set_index(["half", "class"])
    p = model.predict_proba(X)
    f = np.einsum("nd,skd->snk", np.c_[X, np.ones(len(X))], model.sample(4000, 1))
    drawn = softmax(f, 2)
    for half in ("high", "low"):
        rows = found.loc[half]
        np.testing.assert_allclose(rows["estimate"], p[by == half].mean(0), atol=1e-12)
        averages = drawn[:, by == half].mean(1)
        np.testing.assert_allclose(rows["sd"], averages.std(0), rtol=0.05)
        np.testing.assert_allclose(rows[["lower", "upper"]].T, np.quantile(averages, [0.025, 0.975], 0), atol=2e-3)


def test_contrasts_of_all_classes_cancel(data, model):
    found = model.contrast(data[0], {"x0": 1.0, "x2": None})
    assert list(found)[:3] == ["class", "variable", "contrast"]
    assert len(found) == 6
    np.testing.assert_allclose(found.groupby("variable")["estimate"].sum(), 0.0, atol=1e-10)
    moved = data[0] + [1.0, 0.0, 0.0]
    change = (model.predict_proba(moved) - model.predict_proba(data[0])).mean(0)
    np.testing.assert_allclose(found[found["variable"] == "x0"]["estimate"], change, atol=1e-10)


def test_a_common_offset_changes_no_effect(data, model):
    X = data[0][:50]
    offset = np.random.default_rng(1).normal(size=(50, 3))
    first, second = (model.average(X, offset=o) for o in (offset, offset + np.arange(50.0)[:, None]))
    np.testing.assert_allclose(first["estimate"], second["estimate"], atol=1e-9)
    with pytest.raises(ValueError, match=r"offset must have shape \(50, 3\)"):
        model.average(X, offset=np.zeros(50))


def test_a_column_named_class(data):
    frame = pd.DataFrame(data[0], columns=["class", "u", "v"])
    fit = viper.VariationalLogisticRegression().fit(frame, data[1])
    with pytest.raises(ValueError, match="the table has a column 'class' of its own"):
        fit.average(frame, by="class")


# --- leave-one-out ---


@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto")
def test_arviz_agrees_on_leave_one_out(data):
    arviz_stats = pytest.importorskip("arviz_stats")
    fit = viper.VariationalLogisticRegression(random_state=3).fit(data[0][:80], data[1][:80])
    found = fit.loo(draws=2000)
    tree = fit.to_arviz(draws=2000, chains=1, random_state=3)
    lp, log_q = tree["sample_stats"]["lp"], tree["sample_stats"]["log_q"]
    other = arviz_stats.loo_approximate_posterior(tree, log_p=lp, log_q=log_q, pointwise=True)
    np.testing.assert_allclose(found.pointwise, other.elpd_i.values.ravel(), rtol=1e-7)
    np.testing.assert_allclose(found.k_hat, other.pareto_k.values.ravel(), rtol=1e-6, atol=1e-6)
    assert found.p_loo == pytest.approx(other.p, rel=1e-7)


# --- robust ---


def test_robust_covariances_are_those_of_statsmodels(data, model):
    groups = data[2]
    clustered = {"cov_type": "cluster", "cov_kwds": {"groups": groups}}
    for robust, other in (
        (model.robust(), peer(data, cov_type="HC0")),
        (model.robust(groups=groups), peer(data, **clustered)),
    ):
        sd = robust.summary(baseline="a")["sd"].to_numpy().reshape(2, 4)
        # the posterior mean is not quite the mode; statsmodels has the intercept first
        np.testing.assert_allclose(sd, other.bse[[1, 2, 3, 0]].T, rtol=0.01)
        np.testing.assert_array_equal(robust.coef_, model.coef_)
    assert model.robust(groups=groups).robust_groups_ == 100
    with pytest.raises(ValueError, match="robust covariances"):
        robust.diagnose()


def test_each_row_twice_in_one_group_is_the_same_rows_once(data, model):
    X, y, _ = data
    twice = viper.VariationalLogisticRegression(prior_scale=100.0).fit(
        np.r_[X, X], np.r_[y, y], sample_weight=np.full(2000, 0.5)
    )
    pairs = twice.robust(groups=np.r_[np.arange(1000), np.arange(1000)])
    np.testing.assert_allclose(pairs.covariance_, model.robust().covariance_, rtol=1e-4, atol=1e-8)


def test_a_robust_model_predicts_draws_and_is_saved(data, model, tmp_path):
    X = data[0][:20]
    robust = model.robust(groups=data[2])
    f = np.einsum("nd,skd->snk", np.c_[X, np.ones(20)], robust.sample(20_000, 0))
    np.testing.assert_allclose(robust.predict_proba(X), softmax(f, 2).mean(0), atol=2e-3)
    np.testing.assert_allclose(robust.predict_std(X), softmax(f, 2).std(0), rtol=0.05)
    np.testing.assert_allclose(np.cov(robust.sample(20_000, 1).reshape(20_000, -1).T), robust.covariance_, atol=3e-3)
    robust.save(tmp_path / "robust.viper")
    loaded = viper.load(tmp_path / "robust.viper")
    np.testing.assert_array_equal(loaded.predict_interval(X), robust.predict_interval(X))
    assert loaded.robust_groups_ == 100
    average = loaded.average(X)
    np.testing.assert_allclose(average["sd"], softmax(f, 2).mean(1).std(0), rtol=0.05)


def test_a_star_is_a_gaussian_of_its_contrasts(model):
    """The general form gives the same moments, densities and predictions as the star that it is made from."""
    star = model.posterior_
    same = gaussian_of_contrasts(star.means, star.covariance())
    block = next(model._training_rows.blocks())
    (theta, tau2), (theta2, tau22) = star.latent(block), same.latent(block)
    np.testing.assert_allclose(theta, theta2, atol=1e-12)
    np.testing.assert_allclose(tau2, tau22, rtol=1e-8)
    np.testing.assert_allclose(star.variance, same.variance, rtol=1e-9)
    for baseline in range(3):
        np.testing.assert_allclose(star.contrast(baseline)[1], same.contrast(baseline)[1], atol=1e-9)
    draws = star.draw(torch.from_numpy(np.random.default_rng(0).standard_normal((50, 3, 4))))
    np.testing.assert_allclose(star.log_density(draws), same.log_density(draws), rtol=1e-9)
    basis = contrast_basis(3).numpy()
    np.testing.assert_allclose(basis.T @ basis, np.eye(2), atol=1e-15)
    np.testing.assert_allclose(basis.sum(0), 0.0, atol=1e-15)


# --- missing values ---


def test_pooling_is_rubin_s_for_the_contrasts():
    """A contrast of three classes, pooled as stars, has the moments of its own three Gaussians pooled."""
    rng = np.random.default_rng(2)
    tables = []
    for _ in range(4):
        means = torch.from_numpy(rng.normal(size=(3, 2)))
        tables.append(FullStar(means - means.mean(0), torch.from_numpy(np.tril(rng.uniform(0.5, 1.0, (3, 2, 2))))))
    pooled = pool_stars(tables).posterior
    assert isinstance(pooled, ContrastGaussian)
    apart = [one.means[1] - one.means[0] for one in tables]
    spread = [torch.linalg.cholesky(one.own_covariances[1] + one.own_covariances[0]) for one in tables]
    alone = pool_posteriors([Full(mean, root) for mean, root in zip(apart, spread, strict=True)]).posterior
    mean, variance = pooled.contrast(0)
    np.testing.assert_allclose(mean[1], alone.mean, rtol=1e-12)
    np.testing.assert_allclose(variance[1], alone.variance, rtol=1e-10)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_missing_values_of_more_classes_are_drawn(data, covariance, tmp_path):
    X, y, _ = data
    frame = pd.DataFrame(X[:300], columns=["u", "v", "w"]).assign(y=y[:300])
    complete = viper.VariationalLogisticRegression.from_formula("y ~ u + v + w", frame, covariance=covariance)
    rng = np.random.default_rng(4)
    holes = frame.assign(u=frame["u"].where(rng.random(300) > 0.3))
    fit = viper.VariationalLogisticRegression.from_formula(
        "y ~ u + v + w", holes, missing="multiple", imputations=5, covariance=covariance
    )
    share = fit.summary()["missing_information"].unstack()
    assert (share["u"] > share["w"]).all()
    contrast, before = (one.summary(baseline="a")["sd"].unstack() for one in (fit, complete))
    assert (contrast["u"] > before["u"]).all()  # a third of u is not known
    p = fit.predict_proba(holes)
    np.testing.assert_allclose(p.sum(1), 1.0, atol=1e-9)
    assert np.abs(p - complete.predict_proba(frame))[holes["u"].notna()].max() < 0.1
    fit.save(tmp_path / "model.viper")
    np.testing.assert_allclose(viper.load(tmp_path / "model.viper").predict_proba(holes), p, atol=1e-12)
    assert fit.diagnose(draws=500).draws == 500
    write_report(fit, holes, "y", tmp_path / "page.html")
    assert "It matters most for u" in (tmp_path / "page.html").read_text(encoding="utf-8")
