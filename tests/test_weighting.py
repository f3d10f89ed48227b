"""Weights: of classes, of surveys, of rows that belong together; priors by name."""

import warnings

import dask.array
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import statsmodels.api as sm
import typer
from sklearn.utils.class_weight import compute_class_weight

import viper
from viper import VariationalGPClassifier, VariationalLogisticRegression
from viper.errors import WeightWarning


def data(n=400, p=3, seed=0, share=0.0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p))
    return X, (rng.random(n) < 1 / (1 + np.exp(-X @ np.linspace(1.0, -0.5, p) + share))).astype(int)


def sds(model):
    return np.sqrt(np.diag(model.covariance_))


def blocks(X, y, rows=150):
    return viper.Blocks(lambda: ((X[i : i + rows], y[i : i + rows]) for i in range(0, len(X), rows)))


# --- weights of classes ---


@pytest.mark.parametrize("labels", [[0, 1], [False, True], ["no", "yes"]])
def test_class_weights_are_weights_of_rows(labels):
    X, y = data()
    names = np.array(labels)[y]
    weighted = VariationalLogisticRegression(class_weight={labels[1]: 3}).fit(X, names)
    rows = VariationalLogisticRegression().fit(X, names, sample_weight=np.where(y, 3.0, 1.0))
    np.testing.assert_array_equal(weighted.coef_, rows.coef_)
    np.testing.assert_array_equal(weighted.covariance_, rows.covariance_)
    assert weighted.elbo(X, names) == pytest.approx(weighted.elbo_, rel=1e-12)
    assert weighted.diagnose(X, names).elbo == weighted.diagnose().elbo
    assert weighted.diagnose(X, names).log_evidence == weighted.diagnose().log_evidence


def test_balanced_weights_are_those_of_scikit_learn():
    X, y = data(share=2.5)
    model = VariationalLogisticRegression(class_weight="balanced").fit(X, y)
    np.testing.assert_allclose(
        model.class_weight_, compute_class_weight("balanced", classes=np.array([0, 1]), y=y), rtol=1e-12
    )
    assert model.class_share_ == pytest.approx(0.5)
    twice = VariationalLogisticRegression(class_weight="balanced").fit(X, y, sample_weight=np.full(len(y), 2.0))
    np.testing.assert_allclose(twice.class_weight_, model.class_weight_, rtol=1e-12)


@pytest.mark.parametrize("where", ["blocks", "dask", "sparse"])
def test_class_weights_of_rows_kept_elsewhere(where):
    X, y = data(share=2.0)
    plain = VariationalLogisticRegression(class_weight="balanced").fit(X, y)
    rows = {
        "blocks": lambda: (blocks(X, y),),
        "dask": lambda: (dask.array.from_array(X, (150, 3)), dask.array.from_array(y, 150)),
        "sparse": lambda: (scipy.sparse.csr_matrix(X), y),
    }[where]()
    other = VariationalLogisticRegression(class_weight="balanced").fit(*rows)
    np.testing.assert_allclose(other.class_weight_, plain.class_weight_, rtol=1e-12)
    np.testing.assert_allclose(other.coef_, plain.coef_, rtol=1e-6)
    np.testing.assert_allclose(sds(other), sds(plain), rtol=1e-6)
    assert other.class_share_ == pytest.approx(0.5)
    np.testing.assert_allclose(sds(other.robust()), sds(plain.robust()), rtol=1e-6)


def test_class_weights_of_a_gaussian_process(tmp_path):
    X, y = data(120, 2)
    options = {"n_inducing": 6, "mean": "constant", "n_starts": 1}
    weighted = VariationalGPClassifier(class_weight={1: 2}, **options).fit(X, y)
    rows = VariationalGPClassifier(**options).fit(X, y, sample_weight=1 + y)
    np.testing.assert_allclose(weighted.predict_proba(X), rows.predict_proba(X), rtol=1e-9)
    assert weighted.elbo(X, y) == pytest.approx(weighted.elbo_, rel=1e-9)
    weighted.save(tmp_path / "model.viper")
    loaded = viper.load(tmp_path / "model.viper")
    assert loaded.prevalence_offset() == weighted.prevalence_offset() == -np.log(2.0)


def test_the_offset_undoes_class_weights():
    """With an intercept only, and much data, log-odds are those of the share; class weights add log w₁/w₀ exactly."""
    y = np.r_[np.ones(2_000), np.zeros(98_000)].astype(int)
    X = np.zeros((len(y), 1))
    model = VariationalLogisticRegression(class_weight="balanced", intercept_scale=100).fit(X, y)
    assert model.predict_proba(X[:1])[0, 1] == pytest.approx(0.5, abs=1e-4)
    assert model.predict_proba(X[:1], offset=model.prevalence_offset())[0, 1] == pytest.approx(0.02, rel=1e-3)
    assert model.predict_proba(X[:1], offset=model.prevalence_offset(0.3))[0, 1] == pytest.approx(0.3, rel=1e-3)
    plain = VariationalLogisticRegression().fit(X, y)
    assert plain.prevalence_offset() == 0.0
    assert plain.predict_proba(X[:1], offset=plain.prevalence_offset(0.3))[0, 1] == pytest.approx(0.3, rel=1e-2)
    with pytest.raises(ValueError, match=r"strictly between 0 and 1; got 3"):
        model.prevalence_offset(3)


def test_cases_and_controls():
    """Slopes of rows sampled by class are those of the population, and its probabilities return with the prevalence."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(200_000, 2))
    p = 1 / (1 + np.exp(-(X @ [1.0, -0.5] - 4.0)))
    y = rng.random(len(X)) < p
    kept = y | (rng.random(len(X)) < 0.05)
    model = VariationalLogisticRegression().fit(X[kept], y[kept])
    corrected = model.predict_proba(X[:1000], offset=model.prevalence_offset(y.mean()))[:, 1]
    assert np.abs(np.log(corrected / p[:1000])).max() < 0.2  # sampling error of about 3 %, more far out
    assert np.median(np.log(model.predict_proba(X[:1000])[:, 1] / p[:1000])) > 2.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"1": 1.0}, r"class_weight must name the classes; got '1'\. Did you mean 1\?"),
        ({2: 1.0}, r"class_weight must name the classes; got 2\. Choose one of 0, 1\."),
        ({1: 0.0}, r"class_weight must be positive; got 0\.0 for class 1\."),
        ("even", "class_weight must be None, 'balanced' or a dictionary of the classes; got 'even'"),
        (3.0, "class_weight must be None, 'balanced' or a dictionary"),
    ],
)
def test_wrong_class_weights(given, message):
    with pytest.raises(ValueError, match=message):
        VariationalLogisticRegression(class_weight=given).fit(*data())


def test_partial_fit_needs_class_weights_in_numbers():
    X, y = data()
    with pytest.raises(ValueError, match="partial_fit needs class_weight as a dictionary; got 'balanced'"):
        VariationalLogisticRegression(class_weight="balanced").partial_fit(X, y)
    model = VariationalLogisticRegression(class_weight={1: 2.0}).partial_fit(X, y)
    np.testing.assert_array_equal(model.coef_, VariationalLogisticRegression(class_weight={1: 2.0}).fit(X, y).coef_)


# --- the note about fractional weights ---


def test_a_note_where_weights_are_neither_counts_nor_one_on_average():
    X, y = data()
    rng = np.random.default_rng(2)
    survey = rng.uniform(100, 1000, len(y))
    with pytest.warns(
        WeightWarning, match=r"sums to 2\d{5}.* over 400 rows.*divide them by their mean and use"
    ) as told:
        VariationalLogisticRegression().fit(X, y, survey)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for weight in (survey / survey.mean(), rng.integers(0, 5, len(y)), 3.0, None):
            VariationalLogisticRegression().fit(X, y, weight)


# --- robust covariances ---


@pytest.mark.filterwarnings("ignore:cov_type not fully supported")
def test_robust_covariances_are_those_of_statsmodels():
    X, y = data(3000)
    rng = np.random.default_rng(3)
    groups, weight = rng.integers(0, 150, len(y)), rng.gamma(1.0, 1.0, len(y))
    weight /= weight.mean()
    model = VariationalLogisticRegression(prior_scale=100, intercept_scale=100).fit(X, y, weight)
    glm = sm.GLM(y, np.column_stack([X, np.ones(len(y))]), family=sm.families.Binomial(), var_weights=weight)
    by_row, by_group = model.robust(), model.robust(groups=groups)
    hc0 = glm.fit(cov_type="HC0").bse * np.sqrt(3000 / 2999)
    cluster = glm.fit(cov_type="cluster", cov_kwds={"groups": groups, "use_correction": False}).bse * np.sqrt(150 / 149)
    # the means of the posterior and the maximum of the likelihood differ by about 1/n
    np.testing.assert_allclose(sds(by_row), hc0, rtol=3e-3)
    np.testing.assert_allclose(sds(by_group), cluster, rtol=3e-3)
    assert (by_row.robust_groups_, by_group.robust_groups_, model.robust_groups_) == (3000, 150, 0)
    np.testing.assert_array_equal(by_row.coef_, model.coef_)
    assert (np.abs(sds(model) / hc0 - 1) > 0.1).all()  # what the posterior takes them for


def test_groups_of_one_row_are_rows():
    X, y = data()
    model = VariationalLogisticRegression().fit(X, y)
    np.testing.assert_allclose(sds(model.robust(groups=np.arange(len(y)))), sds(model.robust()), rtol=1e-12)
    names = np.array([f"patient {i % 80}" for i in range(len(y))], dtype=object)
    twice = VariationalLogisticRegression().fit(scipy.sparse.csr_matrix(X), y)
    np.testing.assert_allclose(sds(twice.robust(groups=names)), sds(model.robust(groups=names)), rtol=1e-8)


def test_repeated_rows_in_one_group_tell_nothing_new():
    """Each row k times, in a group of its own, is the row once: under a flat prior the sandwich sees that exactly."""
    X, y = data(600)
    flat = {"prior_scale": 1e3, "intercept_scale": 1e3}
    once = VariationalLogisticRegression(**flat).fit(X, y)
    four = VariationalLogisticRegression(**flat).fit(np.tile(X, (4, 1)), np.tile(y, 4))
    grouped = four.robust(groups=np.tile(np.arange(600), 4))
    np.testing.assert_allclose(sds(grouped), sds(once.robust()), rtol=2e-2)  # the variational mean moves with n
    assert (sds(four) / sds(once) < 0.55).all()


def test_robust_is_the_posterior_where_nothing_is_known():
    X, y = data()
    X = np.column_stack([X, np.zeros(len(y))])
    model = VariationalLogisticRegression(prior_scale=[1.0, 1.0, 1.0, 0.7]).fit(X, y)
    assert sds(model.robust())[3] == pytest.approx(0.7, rel=1e-9)
    np.testing.assert_allclose(sds(model.robust()), sds(model), rtol=0.15)  # the model is right here


def test_intervals_under_sampling_weights_cover():
    """Of 800 intervals from surveys with unequal weights, 93 to 97 % of the robust ones at 95 % contain the truth."""
    rng = np.random.default_rng(4)
    truth, runs, n = np.array([1.0, -0.5]), 400, 300
    hits = np.zeros(2)  # of the posterior, and of the robust covariance
    for _ in range(runs):
        X = rng.normal(size=(n, 2))
        y = rng.random(n) < 1 / (1 + np.exp(-X @ truth))
        weight = rng.gamma(1.0, 1.0, n)
        model = VariationalLogisticRegression(prior_scale=10).fit(X, y, weight / weight.mean())
        ends = np.array([fitted.coefficient_interval()[:2].T for fitted in (model, model.robust())])
        hits += ((ends[:, 0] <= truth) & (truth <= ends[:, 1])).sum(1)
    plain, robust = hits / (2 * runs)
    assert plain < 0.87
    assert 0.93 < robust < 0.97


def test_robust_covariances_of_a_diagonal_posterior_are_full():
    X, y = data(2000)
    X[:, 1] += X[:, 0]
    full, diagonal = (VariationalLogisticRegression(covariance=family).fit(X, y) for family in ("full", "diagonal"))
    np.testing.assert_allclose(diagonal.robust().covariance_, full.robust().covariance_, rtol=0.02, atol=1e-5)


def test_a_robust_model_is_saved_and_is_not_diagnosed(tmp_path):
    X, y = data()
    model = VariationalLogisticRegression(class_weight="balanced").fit(X, y).robust()
    model.save(tmp_path / "model.viper")
    loaded = viper.load(tmp_path / "model.viper")
    assert loaded.robust_groups_ == 400
    np.testing.assert_array_equal(loaded.predict_interval(X), model.predict_interval(X))
    with pytest.raises(ValueError, match=r"diagnose judges a posterior; got robust covariances\."):
        model.diagnose()
    again = viper.load(tmp_path / "model.viper")
    with pytest.raises(ValueError, match="robust judges a posterior; got robust"):
        again.robust(X, y)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (np.zeros(400), "robust needs at least two independent groups of rows; got 1"),
        (np.zeros(3), r"groups must have one entry for each of the 400 rows of the fit; got shape \(3,\)"),
        (np.r_[np.nan, np.ones(399)], "groups must have no missing values; got some"),
    ],
)
def test_wrong_groups(groups, message):
    model = VariationalLogisticRegression().fit(*data())
    with pytest.raises(ValueError, match=message):
        model.robust(groups=groups)


def test_robust_needs_more_rows_than_coefficients():
    X, y = data(30, 40)
    with pytest.raises(ValueError, match=r"robust needs more rows than coefficients; got 30 rows and 41"):
        VariationalLogisticRegression().fit(X, y).robust()


def test_groups_of_streamed_rows_are_refused():
    X, y = data()
    with pytest.raises(ValueError, match="groups need rows in memory; got rows that are read in blocks"):
        VariationalLogisticRegression().fit(blocks(X, y)).robust(groups=np.arange(400))


# --- priors by name ---


def table():
    X, y = data()
    return pd.DataFrame({"age": X[:, 0], "dose": X[:, 1], "ward": np.array(list("abcd"))[np.arange(400) % 4], "y": y})


def test_prior_scales_by_name():
    frame = table()
    X, y = frame[["age", "dose"]], frame.y
    named = VariationalLogisticRegression(prior_scale={"dose": 0.1}, prior_mean={"age": 2.0}).fit(X, y)
    listed = VariationalLogisticRegression(prior_scale=[1.0, 0.1], prior_mean=[2.0, 0.0]).fit(X, y)
    np.testing.assert_array_equal(named.coef_, listed.coef_)
    assert VariationalLogisticRegression(prior_scale={"*": 3}).fit(X, y).prior_scale_.tolist() == [3.0, 3.0]
    array = VariationalLogisticRegression(prior_scale={"x1": 0.1}, prior_mean={"x0": 2.0}).fit(X.to_numpy(), y)
    np.testing.assert_array_equal(array.coef_, listed.coef_)


@pytest.mark.parametrize("term", ["ward", "C(ward)"])
def test_prior_scales_of_a_formula(term, tmp_path):
    scales = {"ward": 0.2, f"{term}[T.c]": 0.4, "age": 0.5, f"age:{term}": 0.1, "*": 2}
    model = VariationalLogisticRegression.from_formula(f"y ~ age * {term} + dose", table(), prior_scale=scales)
    found = dict(zip(model.formula_.names, model.prior_scale_.tolist(), strict=True))
    expected = {"age": 0.5, "dose": 2.0, f"{term}[T.b]": 0.2, f"{term}[T.c]": 0.4, f"{term}[T.d]": 0.2}
    expected |= {f"age:{term}[T.{level}]": 0.1 for level in "bcd"}
    assert found == expected
    model.save(tmp_path / "model.viper")
    loaded = viper.load(tmp_path / "model.viper")
    assert loaded.prior_scale == scales
    np.testing.assert_array_equal(loaded.fit(table()).coef_, model.coef_)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prior_scale": {"agee": 1.0}}, r"prior_scale must name columns; got 'agee'\. Did you mean 'age'\?"),
        ({"prior_mean": {"Dose": 1.0}}, r"prior_mean must name columns; got 'Dose'\. Did you mean 'dose'\?"),
        ({"prior_scale": {"intercept": 1.0}}, r"got 'intercept'\. Set intercept_scale for it\."),
        ({"prior_scale": {"age": -1.0}}, r"prior_scale must be positive and finite.*; got -1\.0\."),
        ({"prior_scale": {"age": "wide"}}, "prior_scale must be numeric; got"),
    ],
)
def test_wrong_priors_by_name(given, message):
    frame = table()
    with pytest.raises(ValueError, match=message):
        VariationalLogisticRegression(**given).fit(frame[["age", "dose"]], frame.y)


def test_priors_by_name_on_the_command_line():
    from viper.cli.commands.fit import parse_prior_scales

    assert parse_prior_scales([]) == 1.0
    assert parse_prior_scales(["auto"]) == "auto"
    assert parse_prior_scales(["2", "age=0.5", "C(ward)=3"]) == {"age": 0.5, "C(ward)": 3.0, "*": 2.0}
    for wrong in (["1", "2"], ["auto", "age=1"], ["age=ard"]):
        with pytest.raises(typer.BadParameter) as caught:
            parse_prior_scales(wrong)
        assert "--prior must be one number, auto or ard, or numbers by name" in caught.value.message
