"""Binned residuals and posterior predictive checks, against their definitions and by simulation."""

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import norm
from viper.metrics import binned_residuals, predictive_check, row_scores

import viper
from viper.report.checks import latent_draws


def test_residuals_by_definition():
    rng = np.random.default_rng(0)
    p = rng.beta(1, 3, 400)
    label = rng.random(400) < p
    table = binned_residuals(label, p, bins=8)
    for k, rows in enumerate(np.array_split(np.argsort(p), 8)):
        row = table.iloc[k]
        assert row["residual"] == pytest.approx(label[rows].mean() - p[rows].mean())
        assert row["band"] == pytest.approx(norm.ppf(0.975) * np.sqrt((p[rows] * (1 - p[rows])).sum()) / 50)
        assert (row["value"], row["low"], row["high"]) == pytest.approx((p[rows].mean(), p[rows].min(), p[rows].max()))
    assert len(binned_residuals(label, p)) == 20
    assert binned_residuals(label, p)["rows"].sum() == 400


def test_bands_hold_19_of_20_residuals():
    rng = np.random.default_rng(1)
    outside = []
    for _ in range(100):
        p = rng.beta(2, 3, 1000)
        outside.append(binned_residuals(rng.random(1000) < p, p)["outside"].mean())
    assert 0.035 < np.mean(outside) < 0.065


def test_a_bend_shows_by_column_but_not_by_probability():
    rng = np.random.default_rng(2)
    x = rng.normal(size=4000)
    label = rng.random(4000) < expit(x**2 - 1)
    p = np.full(4000, label.mean())  # the best that a line can do
    table = binned_residuals(label, p, x, bins=10)
    assert table["outside"].sum() > 5
    assert table["residual"].iloc[0] > 0 > table["residual"].iloc[5]


def test_residuals_need_finite_values():
    with pytest.raises(ValueError, match="values must be one finite number per row"):
        binned_residuals([True, False], [0.1, 0.2], [1.0, np.nan])
    with pytest.raises(ValueError, match="bins must be at least 1; got 0"):
        binned_residuals([True, False], [0.1, 0.2], bins=0)


@pytest.fixture(scope="module")
def fitted():
    rng = np.random.default_rng(3)
    X = rng.normal(size=(500, 2))
    y = np.where(rng.random(500) < expit(X[:, 0] - 1), "ill", "well")
    return viper.VariationalLogisticRegression(verbose=False).fit(X, y == "ill"), X, y == "ill"


def test_drawn_outcomes_have_the_moments_of_the_posterior(fitted):
    """Mean Σ E s(f); variance Σ E[s(1-s)] + Var Σ s(f), from draws made here."""
    model, X, y = fitted
    table = predictive_check(model, X, y, draws=4000)
    p = expit(np.column_stack([X, np.ones(500)]) @ model.sample(20_000, random_state=5).T)
    row = table.loc["positives"]
    assert row["observed"] == y.sum()
    assert row["expected"] == pytest.approx(p.sum(0).mean(), abs=0.6)
    sd = np.sqrt((p * (1 - p)).sum(0).mean() + p.sum(0).var())
    assert row["upper"] - row["lower"] == pytest.approx(2 * 1.96 * sd, rel=0.05)
    mean = model.predict_proba(X)[:, 1]
    assert table.loc["log score", "observed"] == pytest.approx(row_scores(y, mean).mean())
    assert table.loc["Brier score", "observed"] == pytest.approx(row_scores(y, mean, "brier").mean())
    assert not table["unusual"].any()
    np.testing.assert_array_equal(predictive_check(model, X, y, draws=50), predictive_check(model, X, y, draws=50))


def test_a_group_that_the_model_does_not_know_is_unusual(fitted):
    model, X, y = fitted
    group = np.where(np.arange(500) % 10 == 0, "odd", "usual")
    changed = y | (group == "odd")
    table = predictive_check(model, X, changed, group)
    assert table["unusual"].to_dict()["odd"]
    assert table.loc["odd", "p_value"] < 0.01
    assert table.loc["usual", "observed"] == y[group == "usual"].sum()
    assert not predictive_check(model, X, y, group)["unusual"][["odd", "usual"]].any()


def test_a_gaussian_process_is_checked_too(fitted):
    """Its draws have the mean and covariance of its own `sample`."""
    _, X, y = fitted
    gp = viper.VariationalGPClassifier(n_inducing=10, mean="constant", verbose=False).fit(X[:80], y[:80])
    table = predictive_check(gp, X[:80], y[:80], draws=200)
    assert table.loc["positives", "lower"] <= y[:80].sum() <= table.loc["positives", "upper"]
    drawn = np.concatenate(list(latent_draws(gp, X[:80], 20_000, np.random.default_rng(0))), 1)
    other = gp.sample(X[:80], 20_000, random_state=1)
    np.testing.assert_allclose(drawn.mean(0), other.mean(0), atol=0.05 * other.std())
    np.testing.assert_allclose(np.cov(drawn.T), np.cov(other.T), atol=0.06 * other.var(0).max())


def test_a_model_by_formula_takes_a_table(fitted):
    pandas = pytest.importorskip("pandas")
    _, X, y = fitted
    frame = pandas.DataFrame({"a": X[:, 0], "kind": np.where(X[:, 1] > 0, "u", "v"), "y": np.where(y, "yes", "no")})
    model = viper.VariationalLogisticRegression.from_formula("y ~ a + kind", frame, verbose=False)
    model = model if hasattr(model, "posterior_") else model.fit(frame)
    table = predictive_check(model, frame, frame["y"], frame["kind"], draws=200)
    assert table.index.tolist() == ["positives", "log score", "Brier score", "u", "v"]
    assert table.loc["positives", "observed"] == y.sum() == table.loc[["u", "v"], "observed"].sum()
    drawn = np.concatenate(list(latent_draws(model, frame, 4000, np.random.default_rng(0))), 1)
    mean, sd = model.predict_latent(frame)
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.05)
    np.testing.assert_allclose(drawn.std(0), sd, rtol=0.1)
