"""More than two classes: probabilities against Monte Carlo, the same answer from every source, files, and errors."""

import math
import warnings

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.datasets import load_iris, load_wine
from sklearn.preprocessing import scale

import viper
from viper.errors import ImportanceWarning, StorageError
from viper.softplus.log_odds import log_odds_moments, logsumexp_moments

IRIS = load_iris()
X, Y = scale(IRIS.data), IRIS.target_names[IRIS.target]
NEAR = {"rtol": 0, "atol": 3e-5}


@pytest.fixture(scope="module")
def model():
    return viper.VariationalLogisticRegression().fit(X, Y)


def draws_of(model, rows, count=200_000):
    """f of some rows for draws of the coefficients: draws × rows × classes."""
    w = model.sample(count, 0)
    return np.einsum("nd,skd->snk", np.c_[rows, np.ones(len(rows))], w)


# --- what a fit is ---


def test_shapes_and_centred_coefficients(model):
    assert model.coef_.shape == (3, 4)
    assert model.intercept_.shape == (3,)
    assert model.covariance_.shape == (15, 15)
    np.testing.assert_allclose(model.coef_.sum(0), 0.0, atol=1e-12)
    np.testing.assert_allclose(model.covariance_ @ np.tile(np.eye(5), (3, 1)), 0.0, atol=1e-10)  # sums are known
    assert model.elbo_bound_ < model.elbo_ < model.elbo_bound_ + 1e-6
    assert model.elbo(X, Y) == pytest.approx(model.elbo_, abs=1e-7)
    assert model.score(X, Y) > 0.95


def test_draws_have_the_posterior_s_moments(model):
    w = model.sample(100_000, 1).reshape(100_000, -1)
    np.testing.assert_allclose(w.mean(0), np.c_[model.coef_, model.intercept_].ravel(), atol=0.02)
    np.testing.assert_allclose(np.cov(w.T), model.covariance_, atol=0.02)
    contrast = model.summary(baseline="setosa").loc["virginica"]
    own = model.sample(100_000, 1)
    apart = own[:, 2] - own[:, 0]
    np.testing.assert_allclose(contrast["mean"], apart.mean(0), atol=0.02)
    np.testing.assert_allclose(contrast["sd"], apart.std(0), rtol=0.02)


def test_predictions_by_monte_carlo(model):
    rows = X[[0, 60, 70, 77, 133]]
    f = draws_of(model, rows)
    p = np.exp(f - f.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(rows), p.mean(0), atol=2e-3)
    np.testing.assert_allclose(model.predict_std(rows), p.std(0), atol=2e-3)
    np.testing.assert_allclose(model.predict_proba(rows).sum(1), 1.0, rtol=1e-12)
    ends = model.predict_interval(rows)
    inside = ((p >= ends[..., 0]) & (p <= ends[..., 1])).mean(0)
    assert inside.min() > 0.94
    assert inside.max() < 0.97
    odds = np.log(p) - np.log1p(-p)
    moments = log_odds_moments(
        *(torch.from_numpy(x) for x in (model.predict_latent(rows)[0], model.predict_latent(rows)[1] ** 2))
    )
    np.testing.assert_allclose(moments.mean, odds.mean(0), atol=0.05)
    np.testing.assert_allclose(moments.variance, odds.var(0), rtol=0.03)
    np.testing.assert_array_equal(model.predict(rows), model.classes_[model.decision_function(rows).argmax(1)])


@pytest.mark.parametrize("sd", [1e-3, 0.3, 2.0, 20.0])
def test_variance_of_a_log_sum_of_two_by_quadrature(sd):
    """log(e^x + e^y) of two Gaussians, by Gauss-Hermite in one and many nodes in the other."""
    mean, variance = (
        torch.tensor([[0.4, -0.3]], dtype=torch.float64),
        torch.tensor([[sd**2, (0.5 * sd) ** 2]], dtype=torch.float64),
    )
    z = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    w = torch.exp(-0.5 * z * z)
    w = w / w.sum()
    values = torch.logaddexp(mean[0, 0] + sd * z[:, None], mean[0, 1] + 0.5 * sd * z)
    weights = w[:, None] * w
    centre = (weights * values).sum()
    exact = (weights * (values - centre).square()).sum()
    found = logsumexp_moments(mean, variance)
    assert float(found.mean) == pytest.approx(float(centre), abs=1e-7)
    assert float(found.variance) == pytest.approx(float(exact), rel=1e-5, abs=3e-6)


# --- identities ---


def test_relabelling_permutes_and_a_common_offset_changes_nothing(model):
    other = viper.VariationalLogisticRegression().fit(X, np.array([5, 3, 4])[IRIS.target])
    np.testing.assert_allclose(other.coef_[[2, 0, 1]], model.coef_, **NEAR)
    common = np.linspace(-2, 2, len(X))[:, None].repeat(3, 1)
    shifted = viper.VariationalLogisticRegression().fit(X, Y, offset=common)
    np.testing.assert_allclose(shifted.coef_, model.coef_, **NEAR)
    np.testing.assert_allclose(shifted.predict_proba(X, offset=common), model.predict_proba(X), atol=1e-5)


def test_the_same_answer_from_every_source(model, tmp_path):
    import pandas

    frame = pandas.DataFrame(X, columns=list("abcd")).assign(y=Y)
    frame.to_parquet(tmp_path / "rows.parquet")
    from_file = viper.VariationalLogisticRegression().fit(viper.Files(tmp_path / "rows.parquet", target="y"))
    in_blocks = viper.VariationalLogisticRegression().fit(
        lambda: ((X[i : i + 50], Y[i : i + 50]) for i in (0, 50, 100))
    )
    sparse = viper.VariationalLogisticRegression().fit(scipy.sparse.csr_array(X), Y)
    for other in (from_file, in_blocks, sparse):
        np.testing.assert_allclose(other.coef_, model.coef_, **NEAR)
        assert other.elbo_ == pytest.approx(model.elbo_, abs=1e-6)
    assert from_file.score(viper.Files(tmp_path / "rows.parquet", target="y")) == model.score(X, Y)
    np.testing.assert_allclose(from_file.predict_proba(frame[list("abcd")]), model.predict_proba(X), atol=1e-5)


def test_dask(model):
    da = pytest.importorskip("dask.array")
    other = viper.VariationalLogisticRegression().fit(da.from_array(X, (60, 4)), da.from_array(Y, 60))
    np.testing.assert_allclose(other.coef_, model.coef_, **NEAR)
    np.testing.assert_allclose(
        other.predict_proba(da.from_array(X, (60, 4))).compute(), model.predict_proba(X), atol=1e-5
    )


def test_weights_count_rows():
    weight = np.arange(len(X)) % 3 + 1.0
    once = viper.VariationalLogisticRegression().fit(
        np.repeat(X, weight.astype(int), 0), np.repeat(Y, weight.astype(int))
    )
    weighted = viper.VariationalLogisticRegression().fit(X, Y, sample_weight=weight)
    np.testing.assert_allclose(weighted.coef_, once.coef_, **NEAR)
    balanced = viper.VariationalLogisticRegression(class_weight="balanced").fit(X[:120], Y[:120])
    by_hand = viper.VariationalLogisticRegression().fit(
        X[:120], Y[:120], sample_weight=balanced.class_weight_[IRIS.target[:120]]
    )
    np.testing.assert_allclose(balanced.coef_, by_hand.coef_, **NEAR)
    np.testing.assert_allclose(balanced.class_share_, 1 / 3)
    np.testing.assert_allclose(balanced.prevalence_offset(), -np.log(balanced.class_weight_)[None])


def test_partial_fit_is_the_whole_fit_nearly(model):
    parts = viper.VariationalLogisticRegression().partial_fit(X[::2], Y[::2]).partial_fit(X[1::2], Y[1::2])
    sd = np.sqrt(np.diag(model.covariance_)).reshape(3, 5)[:, :4]
    assert np.abs((parts.coef_ - model.coef_) / sd).max() < 0.3
    assert parts.posterior_.variance.mean() == pytest.approx(float(model.posterior_.variance.mean()), rel=0.1)


def test_weighted_draws_agree_and_bound_the_evidence(model):
    diagnosis = model.diagnose()
    assert diagnosis.reliable
    assert diagnosis.log_evidence > model.elbo_
    corrected = model.corrected()
    assert corrected.sample(3, 0).shape == (3, 3, 5)
    np.testing.assert_allclose(corrected.predict_proba(X[:5]), model.predict_proba(X[:5]), atol=0.02)
    np.testing.assert_allclose(corrected.predict_interval(X[60:65]), model.predict_interval(X[60:65]), atol=0.05)
    assert corrected.summary(baseline="setosa").shape == model.summary(baseline="setosa").shape


def test_priors(model):
    other = viper.VariationalLogisticRegression(prior_mean=np.tile([[1.0], [0.0], [0.0]], (1, 4))).fit(X, Y)
    assert other.coef_[0].sum() > model.coef_[0].sum()
    wide = viper.VariationalLogisticRegression(prior_scale=np.eye(4)).fit(X, Y)
    np.testing.assert_allclose(wide.coef_, model.coef_, **NEAR)
    steps = [viper.VariationalLogisticRegression(prior_scale=s).fit(X[:, :2], Y).elbo_ for s in (0.999, 1.001)]
    fit = viper.VariationalLogisticRegression().fit(X[:, :2], Y)
    second = (fit.posterior_.mean.square() + fit.posterior_.variance)[:, :2].sum() - 2 * 2
    assert float(second) == pytest.approx((steps[1] - steps[0]) / math.log(1.001 / 0.999), rel=1e-3)
    chosen = viper.VariationalLogisticRegression(prior_scale="auto").fit(X[:, :2], Y)
    assert chosen.elbo_ > fit.elbo_


# --- files ---


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_save_and_load(covariance, tmp_path):
    fit = viper.VariationalLogisticRegression(covariance=covariance, class_weight={"setosa": 2.0}).fit(X, Y)
    fit.save(tmp_path / "model")
    again = viper.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict_proba(X), fit.predict_proba(X))
    np.testing.assert_array_equal(again.class_weight_, fit.class_weight_)
    assert again.summary().equals(fit.summary())
    fit.partial_fit(X[:9], Y[:9])
    fit.save(tmp_path / "next")
    assert str(viper.load(tmp_path / "next").diagnose(X[:9], Y[:9])) == str(fit.diagnose())


def test_a_forged_number_of_classes(model, tmp_path):
    state = model._pack()
    for labels in (["a", "b"], ["a", "b", "c", "d"], ["c", "b", "a"], ["a", "a", "b"]):
        metadata = {**state.metadata, "classes": {"dtype": "<U1", "values": labels}}
        with pytest.raises((StorageError, ValueError), match="must"):
            type(model)._unpack(state._replace(metadata=metadata), {})
    tensors = {**state.tensors, "posterior.means": state.tensors["posterior.means"][:2]}
    with pytest.raises(StorageError, match="shape"):
        type(model)._unpack(state._replace(tensors=tensors), {})


# --- errors ---


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"bound": "pg"}, {}, "Only binary classification is supported by bound='pg'"),
        ({"terms": 3}, {}, "Only binary classification is supported by terms=3"),
        ({"solver": "adam"}, {}, "Only binary classification is supported by solver='adam'"),
        ({"covariance": "low-rank"}, {}, "Only binary classification is supported by covariance='low-rank'"),
        ({"prior_mean": 1.0}, {}, r"prior_mean for 3 classes must be 0 or have shape \(3, 4\)"),
        ({}, {"offset": np.zeros(150)}, r"offset must have shape \(150, 3\), a column for each class"),
        ({}, {"offset": np.full((150, 3), np.nan)}, "offset must be finite"),
        ({}, {"sample_weight": (IRIS.target > 0) * 1.0}, "got none of class 'setosa'"),
        ({"class_weight": {"rose": 2.0}}, {}, "class_weight must name the classes; got 'rose'"),
    ],
)
def test_bad_input_of_many_classes(options, given, message):
    with pytest.raises(ValueError, match=message):
        viper.VariationalLogisticRegression(**options).fit(X, Y, **given)


def test_unknown_baselines(model):
    with pytest.raises(ValueError, match="baseline must be one of the classes; got 'rose'"):
        model.summary(baseline="rose")
    two = viper.VariationalLogisticRegression().fit(X[:100], Y[:100])
    with pytest.raises(ValueError, match="baseline is for more than two classes"):
        two.summary(baseline="setosa")


def test_more_classes_than_rows():
    few = viper.VariationalLogisticRegression().partial_fit(X[[0, 60]], [0, 1], classes=np.arange(5))
    np.testing.assert_allclose(few.predict_proba(X).sum(1), 1.0)
    np.testing.assert_allclose(few.predict_proba(X)[:, 2], few.predict_proba(X)[:, 4], atol=1e-6)


def test_a_solver_that_stops_early_says_so():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        fit = viper.VariationalLogisticRegression(max_iter=1).fit(X, Y)
    assert not fit.converged_
    assert any("The solver stopped early" in str(one.message) for one in heard)


# --- trust, and the prior ---


def test_uneven_weights_warn():
    """Many coefficients on few rows: one draw carries nearly all the weight, as it would for two classes."""
    rng = np.random.default_rng(0)
    rows, labels = rng.standard_normal((40, 60)), np.arange(40) % 4
    fit = viper.VariationalLogisticRegression(prior_scale=2.0).fit(rows, labels)
    with pytest.warns(ImportanceWarning, match=r"or hold rows out. Few draws .* use the model."):
        corrected = fit.corrected(draws=500)
    assert not corrected.diagnosis.reliable
    assert corrected.diagnosis.effective_sample_size < 50


def test_the_chosen_scale_is_a_maximum():
    """Wine: fits with scales near the chosen one have a smaller ELBO."""
    wine = load_wine()
    rows = scale(wine.data)
    chosen = viper.VariationalLogisticRegression(prior_scale="auto").fit(rows, wine.target)
    assert chosen.converged_
    for factor in (0.97, 1.03):
        other = viper.VariationalLogisticRegression(prior_scale=factor * float(chosen.prior_scale_[0]))
        assert other.fit(rows, wine.target).elbo_ < chosen.elbo_


@pytest.mark.slow
@pytest.mark.parametrize("load", [load_iris, load_wine])
def test_means_and_intervals_of_nuts(load):
    """Means within 0.05 sd of long chains, and 95 % intervals that hold 0.93 to 0.96 of their draws, on average."""
    numpyro = pytest.importorskip("numpyro", reason="NumPyro is not installed: pip install 'vi-per[mcmc]'")
    import jax
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    rows, labels = scale(load().data), load().target
    design = np.c_[rows, np.ones(len(rows))]
    sd = np.append(np.ones(rows.shape[1]), 10.0)

    def softmax():
        w = numpyro.sample("w", dist.Normal(0.0, np.tile(sd, (3, 1))).to_event(2))
        numpyro.sample("y", dist.Categorical(logits=design @ w.T), obs=labels)

    chains = MCMC(NUTS(softmax), num_warmup=500, num_samples=1500, num_chains=2, chain_method="sequential",
                  progress_bar=False)  # fmt: skip
    chains.run(jax.random.PRNGKey(0))
    draws = np.asarray(chains.get_samples()["w"])
    draws = draws - draws.mean(1, keepdims=True)
    posterior = viper.VariationalLogisticRegression().fit(rows, labels).posterior_
    mean, own = posterior.mean.numpy(), posterior.variance.sqrt().numpy()
    assert np.abs((mean - draws.mean(0)) / draws.std(0)).mean() < 0.05
    assert 0.93 < (np.abs(draws - mean) < 1.959963984540054 * own).mean() < 0.96
