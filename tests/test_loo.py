"""Leave-one-out by importance weights, against ArviZ on the same draws and against models fitted without each row."""

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import norm

import viper
from viper.models.loo import weighted_rows

arviz_stats = pytest.importorskip("arviz_stats")


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    return X, rng.random(60) < expit(1.5 * X[:, 0] - 0.5)


@pytest.fixture(scope="module")
def model(data):
    return viper.VariationalLogisticRegression(random_state=3, verbose=False).fit(*data)


@pytest.fixture(scope="module")
def found(model):
    return model.loo(draws=4000)


@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto")
def test_arviz_agrees_on_the_same_draws(model, found):
    """to_arviz makes the draws of one chain from the same seed as loo."""
    tree = model.to_arviz(draws=4000, chains=1, random_state=3)
    lp, log_q = tree["sample_stats"]["lp"], tree["sample_stats"]["log_q"]
    other = arviz_stats.loo_approximate_posterior(tree, log_p=lp, log_q=log_q, pointwise=True)
    assert found.elpd_loo == pytest.approx(other.elpd, rel=1e-8)
    assert found.se == pytest.approx(other.se, rel=1e-8)
    assert found.p_loo == pytest.approx(other.p, rel=1e-8)
    np.testing.assert_allclose(found.pointwise, other.elpd_i.values.ravel(), rtol=1e-8)
    np.testing.assert_allclose(found.k_hat, other.pareto_k.values.ravel(), rtol=1e-8, atol=1e-8)
    assert found.threshold == pytest.approx(other.good_k)


@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto")
def test_arviz_agrees_on_draws_from_the_posterior():
    """Without a correction it is ArviZ's plain loo of a matrix of log densities."""
    rng = np.random.default_rng(1)
    log_density = -rng.gamma(0.5, 1.0, (1, 2000, 30))
    import torch
    from arviz_base import from_dict

    other = arviz_stats.loo(
        from_dict({"posterior": {"b": np.zeros((1, 2000))}, "log_likelihood": {"y": log_density}}),
        pointwise=True,
        reff=1.0,
    )
    each = torch.from_numpy(log_density[0])
    elpd, k_hat, _, p_loo = weighted_rows(each, each, np.zeros(2000))
    np.testing.assert_allclose(elpd, other.elpd_i.values, rtol=1e-8)
    np.testing.assert_allclose(k_hat, other.pareto_k.values, rtol=1e-8)
    assert p_loo.sum() == pytest.approx(other.p, rel=1e-8)


def test_refits_without_each_row_agree(data, found):
    """Exact posteriors by quadrature on a grid, one for each row left out: nothing is shared with the weights."""
    X, y = data
    axes = [np.linspace(-3, 6, 61), np.linspace(-3, 3, 61), np.linspace(-4, 3, 61)]
    beta = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    prior = norm.logpdf(beta, 0, [1.0, 1.0, 10.0]).sum(1)
    f = beta @ np.column_stack([X, np.ones(60)]).T
    rows = -np.logaddexp(0, np.where(y, -f, f))
    whole = prior + rows.sum(1)
    exact = np.empty(60)
    for i in range(60):
        weight = np.exp(whole - rows[:, i] - (whole - rows[:, i]).max())
        exact[i] = np.log(weight @ np.exp(rows[:, i]) / weight.sum())
    np.testing.assert_allclose(found.pointwise, exact, atol=0.03)  # Monte Carlo error of 4,000 draws
    assert found.elpd_loo == pytest.approx(exact.sum(), abs=0.15)
    assert len(found.doubtful) == 0
    lppd = np.log(np.exp(whole - whole.max()) @ np.exp(rows) / np.exp(whole - whole.max()).sum())
    assert found.p_loo == pytest.approx(lppd.sum() - exact.sum(), abs=0.3)


def test_variational_refits_agree(data, found):
    X, y = data
    keep = ~np.eye(60, dtype=bool)
    alone = viper.VariationalLogisticRegression(verbose=False)
    refits = [alone.fit(X[keep[i]], y[keep[i]]).predict_proba(X[i : i + 1])[0, int(y[i])] for i in range(0, 60, 6)]
    np.testing.assert_allclose(found.pointwise[::6], np.log(refits), atol=0.06)  # q is not the exact posterior


def test_models_are_compared_by_rows(data, found):
    X, y = data
    one = viper.VariationalLogisticRegression(random_state=3, verbose=False).fit(X[:, 1:], y).loo()
    difference, error = found.minus(one)
    d = found.pointwise - one.pointwise
    assert difference == pytest.approx(found.elpd_loo - one.elpd_loo)
    assert error == pytest.approx(np.sqrt(60 * d.var()))
    assert difference > 2 * error
    with pytest.raises(ValueError, match="both must have the same rows; got 60 and 50"):
        found.minus(viper.VariationalLogisticRegression(verbose=False).fit(X[:50], y[:50]).loo(draws=200))


def test_weights_count_and_a_loaded_model_needs_rows(data, tmp_path):
    X, y = data
    weight = np.arange(60) % 3.0
    model = viper.VariationalLogisticRegression(random_state=3, verbose=False).fit(X, y, sample_weight=weight)
    whole = model.loo(draws=500)
    assert (whole.pointwise[weight == 0] == pytest.approx(0.0, abs=1e-12)) or np.allclose(
        whole.pointwise[weight == 0], 0
    )
    model.save(tmp_path / "m.viper")
    loaded = viper.load(tmp_path / "m.viper")
    with pytest.raises(ValueError, match="loo needs the training rows; got a model without them"):
        loaded.loo()
    again = loaded.loo(X, y, sample_weight=weight, draws=500)
    np.testing.assert_allclose(again.pointwise, whole.pointwise)
    with pytest.raises(ValueError, match="draws must be at least 100; got 10"):
        model.loo(draws=10)


def test_an_influential_row_is_doubtful(data):
    X, y = data
    far = np.vstack([X, [[60.0, 0.0]]]), np.append(y, False)
    model = viper.VariationalLogisticRegression(prior_scale=10.0, verbose=False).fit(*far)
    found = model.loo()
    assert 60 in found.doubtful
    assert "it cannot be trusted (k̂ above 0.70): cross-validate" in str(found)
    assert "can be trusted for every row" in str(
        viper.VariationalLogisticRegression(verbose=False).fit(X, y).loo(draws=1000)
    )


def test_rows_in_files_give_the_same_answer(data, found, tmp_path):
    import pandas as pd

    X, y = data
    pd.DataFrame(X, columns=["a", "b"]).assign(y=y.astype(int)).to_parquet(tmp_path / "rows.parquet")
    model = viper.VariationalLogisticRegression(random_state=3, verbose=False).fit(
        viper.Files(tmp_path / "rows.parquet", target="y")
    )
    np.testing.assert_allclose(model.loo().pointwise, found.pointwise, atol=1e-5)
