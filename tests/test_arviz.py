"""to_arviz: the numbers against the posterior and the joint density, and ArviZ's own functions on them."""

import importlib
import sys
import warnings

import numpy as np
import pytest
import scipy.stats

import viper

arviz_base = pytest.importorskip("arviz_base")
DRAWS, CHAINS = 500, 4


@pytest.fixture(scope="module")
def data():
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    X = pandas.DataFrame(rng.normal(size=(200, 3)), columns=["age", "dose", "<b>"])
    y = np.where(rng.random(200) < 1 / (1 + np.exp(-X["age"] + 0.5)), "ill", "well")
    return X, y


@pytest.fixture(scope="module")
def model(data):
    return viper.VariationalLogisticRegression(random_state=0).fit(*data)


@pytest.fixture(scope="module")
def tree(model):
    return model.to_arviz(draws=DRAWS, chains=CHAINS)


def betas(tree):
    values = tree["posterior"]
    parts = [values["coefficient"].values, values["intercept"].values[..., None]]
    return np.concatenate(parts, -1).reshape(DRAWS * CHAINS, -1)


def test_names_and_shapes(tree):
    assert dict(tree["posterior"].sizes) == {"chain": CHAINS, "draw": DRAWS, "feature": 3}
    assert tree["posterior"]["feature"].values.tolist() == ["age", "dose", "<b>"]
    assert tree.attrs["inference_library"] == "viper"


def test_draws_follow_the_posterior(tree, model):
    z = (betas(tree) - model.posterior_.mean.numpy()) @ np.linalg.inv(np.linalg.cholesky(model.covariance_)).T
    assert scipy.stats.kstest(z.ravel(), "norm").pvalue > 1e-3


def test_log_p_and_log_q(tree, model, data):
    beta = betas(tree)
    log_q = scipy.stats.multivariate_normal(model.posterior_.mean.numpy(), model.covariance_).logpdf(beta)
    assert np.allclose(tree["sample_stats"]["log_q"].values.ravel(), log_q, rtol=1e-10)
    design = np.column_stack([data[0], np.ones(200)])
    sign = np.where(data[1] == "well", 1.0, -1.0)
    rows = -np.logaddexp(0.0, -sign * (beta @ design.T))
    prior = scipy.stats.norm.logpdf(beta, 0.0, [1.0, 1.0, 1.0, 10.0]).sum(1)
    assert np.allclose(tree["sample_stats"]["lp"].values.ravel(), rows.sum(1) + prior, rtol=1e-10)
    assert np.allclose(tree["log_likelihood"]["y"].values.reshape(beta.shape[0], 200), rows, rtol=1e-10, atol=1e-12)
    assert np.array_equal(tree["observed_data"]["y"].values, data[1] == "well")


def test_importance_weights_give_the_elbo_from_above(tree, model):
    """log mean p/q estimates the evidence, mean log p/q the ELBO."""
    ratio = (tree["sample_stats"]["lp"] - tree["sample_stats"]["log_q"]).values.ravel()
    assert abs(ratio.mean() - model.elbo_) < 4 * ratio.std() / len(ratio) ** 0.5
    assert np.log(np.mean(np.exp(ratio - ratio.max()))) + ratio.max() > model.elbo_


def test_weights_and_offsets_count(data):
    X, y = data[0][:50], data[1][:50]
    weight, offset = np.arange(50) % 3, np.linspace(-1, 1, 50)
    model = viper.VariationalLogisticRegression(random_state=0).fit(X, y, sample_weight=weight, offset=offset)
    tree = model.to_arviz(draws=10, chains=1)
    prior = scipy.stats.norm.logpdf(tree["posterior"]["coefficient"].values[0], 0, 1).sum(1)
    prior += scipy.stats.norm.logpdf(tree["posterior"]["intercept"].values[0], 0, 10)
    total = tree["log_likelihood"]["y"].values[0].sum(1) + prior
    assert np.allclose(tree["sample_stats"]["lp"].values[0], total)
    assert np.all(tree["log_likelihood"]["y"].values[0][:, weight == 0] == 0)


def test_summary(tree, model):
    arviz_stats = pytest.importorskip("arviz_stats")
    table = arviz_stats.summary(tree, round_to="none")
    assert table.index.tolist() == ["coefficient[age]", "coefficient[dose]", "coefficient[<b>]", "intercept"]
    error = np.abs(table["mean"].to_numpy(float) - model.posterior_.mean.numpy())
    assert np.all(error < 5 * model.summary()["sd"].to_numpy() / (DRAWS * CHAINS) ** 0.5)
    assert np.all(table["r_hat"].to_numpy(float) < 1.02)


def test_plot_forest(tree):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    try:
        import arviz_plots
    except AttributeError:
        pytest.skip("arviz-plots 0.8 cannot be imported with matplotlib 3.11")
    assert arviz_plots.plot_forest(tree, backend="matplotlib") is not None
    matplotlib.pyplot.close("all")


def test_loo(tree):
    arviz_stats = pytest.importorskip("arviz_stats")
    assert np.isfinite(arviz_stats.loo(tree).elpd)


@pytest.mark.filterwarnings("ignore::viper.errors.ImportanceWarning")
def test_corrected(data):
    corrected = viper.VariationalLogisticRegression(random_state=0).fit(*data).corrected()
    tree = corrected.to_arviz(draws=DRAWS, chains=CHAINS, random_state=0)
    assert dict(tree["posterior"].sizes) == {"chain": CHAINS, "draw": DRAWS, "feature": 3}
    assert np.all(np.abs(betas(tree).mean(0) - corrected.mean_) < 5 * corrected.sd_ / (DRAWS * CHAINS) ** 0.5)


def test_without_rows_only_the_posterior(model, data, tmp_path):
    model.save(tmp_path / "model.viper")
    loaded = viper.load(tmp_path / "model.viper")
    alone = loaded.to_arviz(draws=5)
    assert {*alone.children} == {"posterior", "sample_stats"}
    assert {*alone["sample_stats"].data_vars} == {"log_q"}
    again = loaded.to_arviz(*data, draws=5)
    assert np.array_equal(again["sample_stats"]["lp"], model.to_arviz(draws=5)["sample_stats"]["lp"])


def test_many_rows_have_no_pointwise_likelihood(model, monkeypatch):
    monkeypatch.setattr("viper.models.arviz.LARGEST_POINTWISE", 100)
    assert "log_likelihood" not in model.to_arviz(draws=5, chains=2).children


def test_no_intercept(data):
    tree = viper.VariationalLogisticRegression(fit_intercept=False).fit(*data).to_arviz(draws=5)
    assert {*tree["posterior"].data_vars} == {"coefficient"}


def test_inference_data_where_arviz_is_old(model, monkeypatch):
    """ArviZ 0.x; in this environment it may be missing, or too old for its neighbours."""
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            arviz = importlib.import_module("arviz")
        except (ImportError, AttributeError) as error:
            pytest.skip(f"no ArviZ 0.x: {error}")
    found = model.to_arviz(draws=50, chains=2)
    assert isinstance(found, arviz.InferenceData)
    assert {*found.groups()} == {"posterior", "sample_stats", "log_likelihood", "observed_data"}
    assert arviz.summary(found).index[0] == "coefficient[age]"


def test_errors_and_warnings(model, monkeypatch):
    with pytest.raises(ValueError, match="draws must be at least 1; got 0"):
        model.to_arviz(draws=0)
    for name in ("arviz_base", "arviz"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"vi-per\[arviz\]"):
        model.to_arviz()
