"""The estimator: scikit-learn's rules, its own identities, and the exact posterior on a grid."""

import copy
import inspect
import pickle
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pytest
import scipy.sparse
import scipy.special
import scipy.stats
import sklearn
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import viper
from viper import VariationalLogisticRegression
from viper.errors import ConvergenceWarning, ImportanceWarning
from viper.inference.importance import Diagnosis
from viper.models import reference
from viper.models.notebook import notebook_facts

NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(100)
NODE_WEIGHTS = NODE_WEIGHTS / NODE_WEIGHTS.sum()
TIGHT = 1e-13  # nats, for two fits that should agree to 1e-6 of a standard deviation


def data(n=120, p=3, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((n, p))
    y = generator.random(n) < scipy.special.expit(0.5 + X @ generator.standard_normal(p))
    return X, y.astype(int)


@pytest.fixture(scope="module")
def fitted():
    return VariationalLogisticRegression(random_state=0).fit(*data())


# --- scikit-learn's rules ---


@parametrize_with_checks(
    [
        VariationalLogisticRegression(),
        VariationalLogisticRegression(covariance="diagonal"),
        VariationalLogisticRegression(covariance="low-rank", rank=1),
    ],
)
def test_scikit_learn(estimator, check):
    check(estimator)


def test_agrees_with_logistic_regression_where_data_are_many():
    X, y = data(20_000, 3, 1)
    model = VariationalLogisticRegression(prior_scale=10.0).fit(X, y)
    point = LogisticRegression(C=100.0).fit(X, y)
    # mode and mean differ by O(1/n), a hundredth of a standard deviation here
    assert np.abs((model.coef_ - point.coef_)[0] / np.sqrt(np.diag(model.covariance_))[:3]).max() < 0.05
    assert (model.predict(X) == point.predict(X)).mean() > 0.999


def test_inside_the_tools_of_scikit_learn():
    X, y = data(200)
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(kind=np.where(np.arange(200) % 3, "u", "v"))
    columns = ColumnTransformer([("numbers", StandardScaler(), ["a", "b", "c"]), ("words", OneHotEncoder(), ["kind"])])
    pipeline = make_pipeline(columns, VariationalLogisticRegression())
    assert pipeline.fit(frame, y).score(frame, y) > 0.6
    scores = cross_val_score(pipeline, frame, y, cv=3, scoring="neg_log_loss")
    assert (scores > -0.7).all()
    grid = {"variationallogisticregression__prior_scale": [1e-4, 1.0, "auto"]}
    search = GridSearchCV(pipeline, grid, cv=3, scoring="neg_log_loss").fit(frame, y)
    assert search.best_params_["variationallogisticregression__prior_scale"] != 1e-4
    calibrated = CalibratedClassifierCV(VariationalLogisticRegression(), cv=2).fit(X, y)
    assert np.isfinite(calibrated.predict_proba(X)).all()


def test_set_output_gives_names_to_the_coefficients():
    X, y = data(seed=3)
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    pipeline = make_pipeline(StandardScaler(), VariationalLogisticRegression()).set_output(transform="pandas")
    pipeline.fit(frame, y)
    assert pipeline[-1].feature_names_in_.tolist() == ["a", "b", "c"]
    assert pipeline[-1].summary().index.tolist() == ["a", "b", "c", "intercept"]


def test_clone_keeps_options_and_nothing_else(fitted):
    options = {"prior_scale": np.array([1.0, 2.0, 3.0]), "bound": "pg", "covariance": "diagonal"}
    copied = clone(VariationalLogisticRegression(**options))
    assert copied.get_params()["bound"] == "pg"
    assert np.array_equal(copied.prior_scale, options["prior_scale"])
    assert not hasattr(clone(fitted), "posterior_")


def test_three_classes_one_against_the_rest():
    X, _ = data(300, 2, 4)
    y = np.array(["left", "middle", "right"])[np.digitize(X[:, 0], [-0.5, 0.5])]
    model = OneVsRestClassifier(VariationalLogisticRegression(prior_scale=10.0)).fit(X, y)
    assert set(model.predict(X)) == {"left", "middle", "right"}
    alone = VariationalLogisticRegression(prior_scale=10.0).fit(X, y == "left")
    np.testing.assert_allclose(model.estimators_[0].coef_, alone.coef_)


def test_metadata_are_routed():
    X, y = data(150, seed=5)
    weight, offset = np.arange(150) % 3 + 0.5, np.linspace(-1.0, 1.0, 150)
    direct = VariationalLogisticRegression().fit(X, y, sample_weight=weight, offset=offset)
    with sklearn.config_context(enable_metadata_routing=True):
        model = VariationalLogisticRegression().set_fit_request(sample_weight=True, offset=True)
        model.set_predict_proba_request(offset=True).set_predict_request(offset=True)
        model.set_score_request(sample_weight=True, offset=True)
        pipeline = make_pipeline(FunctionTransformer(), model)
        pipeline.fit(X, y, sample_weight=weight, offset=offset)
        np.testing.assert_allclose(pipeline[-1].coef_, direct.coef_)
        np.testing.assert_allclose(pipeline.predict_proba(X, offset=offset), direct.predict_proba(X, offset))
        assert (pipeline.predict(X, offset=offset) == direct.predict(X, offset)).all()
        expected = np.average(direct.predict(X, offset) == y, weights=weight)
        assert pipeline.score(X, y, sample_weight=weight, offset=offset) == pytest.approx(expected)
        rows = {"sample_weight": weight, "offset": offset}
        assert len(cross_val_score(model, X, y, params=rows, cv=3)) == 3


# --- inputs ---


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda X: X.tolist(), id="list"),
        pytest.param(np.asfortranarray, id="Fortran"),
        pytest.param(lambda X: np.ascontiguousarray(X[::-1])[::-1], id="reversed"),
        pytest.param(lambda X: X.astype(">f8"), id="big-endian"),
        pytest.param(lambda X: pd.DataFrame(X, columns=["a", "b", "c"]), id="pandas"),
        pytest.param(lambda X: pl.DataFrame(X, schema=["a", "b", "c"]), id="polars"),
        pytest.param(torch.from_numpy, id="torch"),
        pytest.param(lambda X: torch.tensor(X, requires_grad=True), id="torch-with-gradient"),
        pytest.param(scipy.sparse.csr_matrix, id="CSR"),
        pytest.param(scipy.sparse.csc_array, id="CSC"),
    ],
)
def test_every_kind_of_array_gives_the_same(make, fitted):
    X, y = data()
    model = VariationalLogisticRegression(random_state=0).fit(make(X), y)
    np.testing.assert_allclose(model.coef_, fitted.coef_, rtol=1e-8)
    np.testing.assert_allclose(model.covariance_, fitted.covariance_, rtol=1e-8)
    np.testing.assert_allclose(model.predict_proba(make(X)), fitted.predict_proba(X), rtol=1e-8)


def test_read_only_arrays():
    X, y = data()
    weight = np.ones(len(y))
    for array in (X, y, weight):
        array.setflags(write=False)
    model = VariationalLogisticRegression().fit(X, y, sample_weight=weight, offset=0.0 * weight)
    assert np.isfinite(model.diagnose().k_hat)


@pytest.mark.parametrize(
    ("make", "classes"),
    [
        (lambda y: y, [0, 1]),
        (lambda y: 2.0 * y - 1.0, [-1.0, 1.0]),
        (lambda y: y == 1, [False, True]),
        (lambda y: np.where(y, "yes", "no"), ["no", "yes"]),
        (lambda y: np.where(y, "yes", "no").tolist(), ["no", "yes"]),
        (lambda y: pd.Series(np.where(y, "yes", "no")), ["no", "yes"]),
        (lambda y: pd.Series(np.where(y, "yes", "no"), dtype="category"), ["no", "yes"]),
        (lambda y: pl.Series(np.where(y, "yes", "no").tolist()), ["no", "yes"]),
        (torch.from_numpy, [0, 1]),
    ],
)
def test_any_two_labels(make, classes, fitted):
    X, y = data()
    model = VariationalLogisticRegression(random_state=0).fit(X, make(y))
    assert model.classes_.tolist() == classes
    np.testing.assert_allclose(model.coef_, fitted.coef_, rtol=1e-9)
    assert model.predict(X).tolist() == [classes[k] for k in fitted.predict(X)]
    assert model.elbo(X, make(y)) == pytest.approx(fitted.elbo_)


def test_names_and_numbers_of_features(fitted):
    X, y = data()
    assert not hasattr(fitted, "feature_names_in_")
    assert fitted.n_features_in_ == 3
    assert fitted.summary().index.tolist() == ["x0", "x1", "x2", "intercept"]
    for frame in (pd.DataFrame(X, columns=["a", "b", "c"]), pl.DataFrame(X, schema=["a", "b", "c"])):
        assert VariationalLogisticRegression().fit(frame, y).feature_names_in_.tolist() == ["a", "b", "c"]
    plain = VariationalLogisticRegression(fit_intercept=False).fit(X, y)
    assert plain.summary().index.tolist() == ["x0", "x1", "x2"]
    assert plain.intercept_.tolist() == [0.0]


# --- predictions ---


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_predictions_are_integrals_over_the_posterior(family):
    X, y = data(80, 3, 6)
    offset = np.linspace(-2.0, 2.0, 80)
    model = VariationalLogisticRegression(covariance=family).fit(X, y, offset=offset)
    A = np.column_stack([X, np.ones(80)])
    mean, sd = model.predict_latent(X, offset)
    np.testing.assert_allclose(mean, A @ np.r_[model.coef_[0], model.intercept_] + offset, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(sd**2, np.einsum("ij,jk,ik->i", A, model.covariance_, A), rtol=1e-10)
    s = scipy.special.expit(mean[:, None] + sd[:, None] * NODES)
    average = s @ NODE_WEIGHTS
    np.testing.assert_allclose(model.predict_proba(X, offset)[:, 1], average, rtol=1e-12)
    np.testing.assert_allclose(model.predict_proba(X, offset).sum(1), 1.0, rtol=1e-14)
    spread = np.sqrt((s - average[:, None]) ** 2 @ NODE_WEIGHTS)
    np.testing.assert_allclose(model.predict_std(X, offset), spread, rtol=1e-9)


def test_intervals_of_the_probability(fitted):
    X, _ = data()
    mean, sd = fitted.predict_latent(X)
    before = None
    for level in (0.1, 0.5, 0.9, 0.99):
        interval = fitted.predict_interval(X, level)
        ends = scipy.stats.norm(mean, sd).cdf(scipy.special.logit(interval).T)
        np.testing.assert_allclose(ends[0], 0.5 - 0.5 * level, atol=1e-10)
        np.testing.assert_allclose(ends[1], 0.5 + 0.5 * level, atol=1e-10)
        assert before is None or ((interval[:, 0] < before[:, 0]) & (interval[:, 1] > before[:, 1])).all()
        before = interval


def test_decision_function_ranks_as_the_probability(fitted):
    X, _ = data()
    decision, probability = fitted.decision_function(X), fitted.predict_proba(X)[:, 1]
    np.testing.assert_allclose(decision, scipy.special.logit(probability), rtol=1e-10)
    assert ((decision > 0) == (fitted.predict(X) == 1)).all()
    certain = fitted.decision_function(np.array([[1e9, 0.0, 0.0], [-1e9, 0.0, 0.0]]))
    assert np.isfinite(certain).all()


def test_score_counts_right_answers(fitted):
    X, y = data()
    assert fitted.score(X, y) == (fitted.predict(X) == y).mean()
    assert fitted.score(X, y, offset=np.full(len(y), -100.0)) == (y == 0).mean()


def test_draws_have_the_moments_of_the_posterior(fitted):
    draws = fitted.sample(40_000, random_state=1)
    sd = np.sqrt(np.diag(fitted.covariance_))
    error = (draws.mean(0) - np.r_[fitted.coef_[0], fitted.intercept_]) / sd
    assert np.abs(error).max() < 4.0 / 200.0
    np.testing.assert_allclose(np.cov(draws.T) / np.outer(sd, sd), fitted.covariance_ / np.outer(sd, sd), atol=0.03)
    assert np.array_equal(fitted.sample(3, random_state=2), fitted.sample(3, random_state=2))


def test_summary(fitted):
    table = fitted.summary(level=0.8)
    mean, sd = np.r_[fitted.coef_[0], fitted.intercept_], np.sqrt(np.diag(fitted.covariance_))
    normal = scipy.stats.norm(mean, sd)
    expected = {
        "mean": mean,
        "sd": sd,
        "lower": normal.ppf(0.1),
        "upper": normal.ppf(0.9),
        "odds_ratio": np.exp(mean),
        "odds_lower": np.exp(normal.ppf(0.1)),
        "odds_upper": np.exp(normal.ppf(0.9)),
        "p_direction": np.maximum(normal.cdf(0.0), normal.sf(0.0)),
    }
    assert table.columns.tolist() == list(expected)
    for name, column in expected.items():
        np.testing.assert_allclose(table[name], column, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(fitted.coefficient_interval(0.8), table[["lower", "upper"]])
    with pytest.raises(ValueError, match=r"level must lie strictly between 0 and 1; got 95\. Use 0\.95"):
        fitted.summary(level=95)


# --- the ELBO ---


@pytest.mark.parametrize("options", [{}, {"covariance": "diagonal"}, {"bound": "pg"}, {"terms": 3}])
def test_elbo_is_the_exact_one_whatever_the_bound(options):
    X, y = data(60, 3, 7)
    model = VariationalLogisticRegression(**options).fit(X, y)
    mean, sd = model.predict_latent(X)
    softplus = np.logaddexp(0.0, mean[:, None] + sd[:, None] * NODES) @ NODE_WEIGHTS
    covariance, m = model.covariance_, np.r_[model.coef_[0], model.intercept_]
    precision = np.diag([1.0, 1.0, 1.0, 0.01])
    logdet = np.linalg.slogdet(covariance)[1] + np.linalg.slogdet(precision)[1]
    kl = 0.5 * (np.trace(precision @ covariance) + m @ precision @ m - 4 - logdet)
    assert model.elbo_ == pytest.approx(np.sum(y * mean - softplus) - kl, rel=1e-11)
    assert model.elbo(X, y) == pytest.approx(model.elbo_, rel=1e-12)
    assert model.elbo_bound_ <= model.elbo_
    assert model.kl_ == pytest.approx(kl, rel=1e-10)


def test_elbo_of_other_rows(fitted):
    X, y = data()
    twice = fitted.elbo(np.vstack([X, X]), np.r_[y, y])
    assert twice == pytest.approx(fitted.elbo(X, y, sample_weight=np.full(len(y), 2.0)))
    assert twice + fitted.kl_ == pytest.approx(2.0 * (fitted.elbo_ + fitted.kl_))


def test_the_common_scale_maximises_the_elbo():
    X, y = data(300, 8, 8)
    model = VariationalLogisticRegression(prior_scale="auto").fit(X, y)
    best = model.prior_scale_[0]
    assert (model.prior_scale_ == best).all()

    def elbo(log_change):
        scale = best * np.exp(log_change)
        return VariationalLogisticRegression(prior_scale=scale, tol=TIGHT).fit(X, y).elbo_

    assert abs(elbo(1e-3) - elbo(-1e-3)) / 2e-3 < 1e-4
    assert model.elbo_ == pytest.approx(elbo(0.0), abs=1e-8)
    assert model.elbo_ > max(elbo(0.05), elbo(-0.05))


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_scales_of_each_feature_maximise_the_elbo(family):
    generator = np.random.default_rng(9)
    X = generator.standard_normal((400, 4))
    y = generator.random(400) < scipy.special.expit(2.0 * X[:, 0] - X[:, 1])
    model = VariationalLogisticRegression(prior_scale="ard", covariance=family).fit(X, y)
    scales = model.prior_scale_
    assert scales[0] > scales[1] > 5.0 * scales[2:].max()

    def elbo(j, log_change):
        changed = scales.copy()
        changed[j] *= np.exp(log_change)
        return VariationalLogisticRegression(prior_scale=changed, covariance=family, tol=TIGHT).fit(X, y).elbo_

    for j in range(2):
        assert abs(elbo(j, 1e-3) - elbo(j, -1e-3)) / 2e-3 < 1e-4
        assert model.elbo_ > max(elbo(j, 0.05), elbo(j, -0.05))


def test_scales_under_monte_carlo_see_one_set_of_random_numbers():
    X, y = data(100, 3, 10)
    model = VariationalLogisticRegression(prior_scale="auto", bound="mc", samples=100).fit(X, y)
    exact = VariationalLogisticRegression(prior_scale="auto").fit(X, y)
    assert model.prior_scale_[0] == pytest.approx(exact.prior_scale_[0], rel=0.05)


# --- priors ---


def test_a_full_prior_covariance_is_a_rotation_of_the_features():
    """β ~ N(0, LLᵀ) on X is γ ~ N(0, I) on XL, β = Lγ."""
    X, y = data(100, 3, 11)
    L = np.array([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [-0.3, 0.1, 0.7]])
    full = VariationalLogisticRegression(prior_scale=L @ L.T, tol=TIGHT).fit(X, y)
    white = VariationalLogisticRegression(tol=TIGHT).fit(X @ L, y)
    np.testing.assert_allclose(full.coef_[0], L @ white.coef_[0], rtol=1e-6)
    np.testing.assert_allclose(full.covariance_[:3, :3], L @ white.covariance_[:3, :3] @ L.T, rtol=1e-6, atol=1e-9)
    assert full.elbo_ == pytest.approx(white.elbo_, rel=1e-10)


def test_a_prior_mean_is_an_offset():
    X, y = data(100, 3, 12)
    mean = np.array([1.0, -2.0, 0.5])
    shifted = VariationalLogisticRegression(prior_mean=mean, tol=TIGHT).fit(X, y)
    offset = VariationalLogisticRegression(tol=TIGHT).fit(X, y, offset=X @ mean)
    np.testing.assert_allclose(shifted.coef_[0], offset.coef_[0] + mean, rtol=1e-6)
    np.testing.assert_allclose(shifted.covariance_, offset.covariance_, rtol=1e-6, atol=1e-9)
    assert shifted.elbo_ == pytest.approx(offset.elbo_, rel=1e-10)


@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize("forget", [1.0, 0.5])
def test_partial_fit_makes_the_posterior_the_prior(family, forget):
    X, y = data(200, 3, 13)
    A = np.column_stack([X, np.ones(200)])
    options = {"covariance": family, "fit_intercept": False, "tol": TIGHT}
    stream = VariationalLogisticRegression(**options).partial_fit(A[:120], y[:120])
    mean, covariance = stream.coef_[0], stream.covariance_
    stream.partial_fit(A[120:], y[120:], forget=forget)
    prior = np.sqrt(np.diag(covariance) / forget) if family == "diagonal" else covariance / forget
    chained = VariationalLogisticRegression(prior_mean=mean, prior_scale=prior, **options).fit(A[120:], y[120:])
    np.testing.assert_allclose(stream.coef_, chained.coef_, rtol=1e-6)
    np.testing.assert_allclose(stream.covariance_, chained.covariance_, rtol=1e-6, atol=1e-9)
    assert stream.elbo_ == pytest.approx(chained.elbo_, rel=1e-9)


def test_partial_fit_comes_close_to_fit():
    X, y = data(4000, 3, 14)
    stream = VariationalLogisticRegression()
    for start in range(0, 4000, 500):
        stream.partial_fit(X[start : start + 500], y[start : start + 500])
    whole = VariationalLogisticRegression().fit(X, y)
    assert np.abs((stream.coef_ - whole.coef_)[0] / np.sqrt(np.diag(whole.covariance_))[:3]).max() < 0.1


def test_partial_fit_may_see_one_class_at_a_time():
    X, y = data(100, 3, 15)
    order = np.argsort(y)
    X, y = X[order], np.array(["no", "yes"])[y[order]]
    stream = VariationalLogisticRegression().partial_fit(X[:10], y[:10], classes=["yes", "no"])
    stream.partial_fit(X[-10:], y[-10:])
    assert stream.classes_.tolist() == ["no", "yes"]
    with pytest.raises(ValueError, match=r"y must contain only the known classes \['no', 'yes'\]; got 'perhaps'\."):
        stream.partial_fit(X[:1], ["perhaps"])
    with pytest.raises(ValueError, match=r"forget must lie in \(0, 1\]; got 0\. 1 forgets nothing\."):
        stream.partial_fit(X[:1], ["no"], forget=0)
    with pytest.raises(ValueError, match=r"partial_fit needs numbers for prior_scale; got 'auto'\. Call fit first\."):
        VariationalLogisticRegression(prior_scale="auto").partial_fit(X, y)


def test_partial_fit_of_more_coefficients_than_rows():
    X, y = data(40, 25, 16)
    stream = VariationalLogisticRegression(tol=TIGHT).partial_fit(X[:20], y[:20])
    assert type(stream.posterior_).__name__ == "LowRank"
    first = stream.posterior_
    stream.partial_fit(X[20:], y[20:])
    np.testing.assert_allclose(stream.prior_.mean, first.mean)
    torch.testing.assert_close(stream.prior_.precision @ first.covariance(), torch.eye(26).double(), atol=1e-8, rtol=0)


# --- trust: against the exact posterior on a grid ---


@pytest.fixture(scope="module")
def grid():
    """A posterior of two coefficients, far from Gaussian, integrated on a grid: moments and evidence."""
    X = np.array([[-1.0], [0.3], [0.5], [1.0], [2.0], [0.1]])
    y = np.array([0, 0, 1, 1, 1, 1])
    b = np.linspace(-14.0, 22.0, 901)
    slope, intercept = np.meshgrid(b, b, indexing="ij")
    log_joint = scipy.stats.norm(0.0, 3.0).logpdf(slope) + scipy.stats.norm(0.0, 2.0).logpdf(intercept)
    for x, label in zip(X[:, 0], y, strict=True):
        f = intercept + x * slope
        log_joint = log_joint + label * f - np.logaddexp(0.0, f)
    joint = np.exp(log_joint - log_joint.max())
    evidence = log_joint.max() + np.log(joint.sum() * (b[1] - b[0]) ** 2)
    w = (joint / joint.sum()).ravel()
    draws = np.column_stack([slope.ravel(), intercept.ravel()])
    model = VariationalLogisticRegression(prior_scale=3.0, intercept_scale=2.0, random_state=0).fit(X, y)
    return model, X, y, draws, w, evidence


def test_diagnosis_finds_the_evidence(grid):
    model, *_, evidence = grid
    diagnosis = model.diagnose(draws=20_000)
    assert abs(diagnosis.log_evidence - evidence) < 4.0 * diagnosis.log_evidence_error
    assert diagnosis.log_evidence_error < 0.02
    assert model.elbo_ < evidence
    assert diagnosis.elbo == model.elbo_
    assert diagnosis.effective_sample_size < 20_000
    assert diagnosis.reliable == (diagnosis.k_hat < 0.7)
    assert f"log evidence {diagnosis.log_evidence:.3f}" in str(diagnosis)


def test_corrected_posterior_is_the_one_on_the_grid(grid):
    model, X, _, draws, w, _ = grid
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportanceWarning)
        corrected = model.corrected(draws=40_000)
    mean = w @ draws
    sd = np.sqrt(w @ (draws - mean) ** 2)
    error = 5.0 / np.sqrt(corrected.diagnosis.effective_sample_size)  # weights of the tails count more than once
    assert np.abs((corrected.mean_ - mean) / sd).max() < error
    assert np.abs(corrected.sd_ / sd - 1.0).max() < 2.0 * error
    s = scipy.special.expit(draws @ np.column_stack([X, np.ones(6)]).T)
    np.testing.assert_allclose(corrected.predict_proba(X)[:, 1], w @ s, atol=error * 0.3)
    np.testing.assert_allclose(corrected.predict_std(X), np.sqrt(w @ (s - w @ s) ** 2), atol=error * 0.3)
    table = corrected.summary(0.9)
    for j, name in enumerate(["x0", "intercept"]):
        mass = [w[draws[:, j] < table.loc[name, side]].sum() for side in ("lower", "upper")]
        np.testing.assert_allclose(mass, [0.05, 0.95], atol=error)
        assert table.loc[name, "p_direction"] == pytest.approx(w[draws[:, j] > 0].sum(), abs=error)
    np.testing.assert_allclose(corrected.coefficient_interval(0.9), table[["lower", "upper"]])
    interval = corrected.predict_interval(X, 0.9)
    for i in range(6):
        inside = (s[:, i] > interval[i, 0]) & (s[:, i] < interval[i, 1])
        assert w[inside].sum() == pytest.approx(0.9, abs=2.0 * error)
    resampled = corrected.sample(20_000, random_state=0)
    assert np.abs((resampled.mean(0) - corrected.mean_) / sd).max() < 0.02


def test_corrected_predictions_agree_with_each_other(grid):
    model, X, _, *_ = grid
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportanceWarning)
        corrected = model.corrected()
    offset = np.linspace(-1.0, 1.0, 6)
    mean, sd = corrected.predict_latent(X, offset)
    np.testing.assert_allclose(mean, np.column_stack([X, np.ones(6)]) @ corrected.mean_ + offset, rtol=1e-10)
    assert (sd > 0).all()
    probability = corrected.predict_proba(X, offset)
    np.testing.assert_allclose(corrected.decision_function(X, offset), scipy.special.logit(probability[:, 1]))
    assert (corrected.predict(X, offset) == (probability[:, 1] > 0.5)).all()
    many = corrected.predict_proba(np.tile(X, (500, 1)))  # more rows than are held at once
    np.testing.assert_allclose(many, np.tile(corrected.predict_proba(X), (500, 1)), rtol=1e-12)


@pytest.mark.parametrize("p", [3, 150])
def test_weights_are_even_where_q_is_exact(p):
    """Without information (weights of nearly zero) the posterior is the prior, in every family of q."""
    X, y = data(100, p, 17)
    for family in ("full", "diagonal"):
        model = VariationalLogisticRegression(covariance=family, random_state=0)
        diagnosis = model.fit(X, y, sample_weight=np.full(100, 1e-6)).diagnose()
        assert diagnosis.effective_sample_size == pytest.approx(4000, rel=1e-6)
        assert abs(diagnosis.log_evidence - model.elbo_) < 1e-5


def test_uneven_weights_are_not_hidden():
    generator = np.random.default_rng(18)
    x = generator.standard_normal(100)
    X = x[:, None] + 0.1 * generator.standard_normal((100, 12))
    y = generator.random(100) < scipy.special.expit(x)
    model = VariationalLogisticRegression(covariance="diagonal", random_state=0).fit(X, y)
    with pytest.warns(ImportanceWarning, match="not close enough for importance weights to certify it. Prefer"):
        corrected = model.corrected()
    assert not corrected.diagnosis.reliable
    assert not model.diagnose().reliable
    full = VariationalLogisticRegression(random_state=0).fit(X, y).diagnose()
    assert full.effective_sample_size > 20.0 * corrected.diagnosis.effective_sample_size


def test_a_diagnosis_is_the_same_when_asked_again(tmp_path):
    X, y = data(40, 3, 21)
    np.random.seed(0)  # noqa: NPY002  # must not matter
    for seed in (None, 3, np.random.RandomState(5)):
        model = VariationalLogisticRegression(random_state=seed).fit(X, y)
        found = model.diagnose()
        assert model.diagnose() == found == model.corrected().diagnosis
        assert f"k̂ = {found.k_hat:.2f}. {found.verdict}" == notebook_facts(model)["Verdict"]
        model.save(tmp_path / f"{seed is None}.viper", overwrite=True)
        assert viper.load(tmp_path / f"{seed is None}.viper").diagnose(X, y) == found
        assert model.diagnose(random_state=7) != found
    assert (
        VariationalLogisticRegression(random_state=1).fit(X, y).diagnose()
        == VariationalLogisticRegression().fit(X, y).diagnose()
    ), "no seed is the seed of the command line"


@pytest.mark.parametrize(
    ("k_hat", "share", "covariance", "words", "close"),
    [
        (0.3, 0.5, "full", "close to the exact one; use it", True),
        (0.6, 0.99, "full", "nearly equal; use it as it is", True),
        (0.9, 0.99, "full", "nearly equal; use it as it is. Only far quantiles may differ.", True),
        (0.6, 0.5, "full", "usable", False),
        (0.9, 0.5, "full", "Prefer a tighter prior, or", False),
        (0.9, 0.5, "diagonal", "Prefer covariance='full' and a tighter prior, or", False),
    ],
)
def test_the_verdict_knows_tail_and_effective_draws(k_hat, share, covariance, words, close):
    found = Diagnosis(k_hat, 0.7, 4000, share * 4000, -1.0, 0.1, -1.1, covariance)
    assert words in found.verdict
    assert found.close == close
    assert found.reliable == (k_hat < 0.7)


def test_nearly_equal_weights_need_no_warning():
    """For some seeds, the few largest weights look like a heavy tail."""
    X, y = data(2000, 2, 22)
    model = VariationalLogisticRegression().fit(X, y)
    for seed in range(60):
        corrected = model.corrected(random_state=seed)  # a warning is an error here
        assert corrected.diagnosis.close
        if not corrected.diagnosis.reliable:
            return
    pytest.fail("no seed shows it")


def test_diagnose_more_coefficients_than_rows():
    X, y = data(20, 30, 19)
    model = VariationalLogisticRegression(random_state=0, prior_scale=0.3).fit(X, y)
    diagnosis = model.diagnose()
    assert type(model.posterior_).__name__ == "LowRank"
    assert diagnosis.reliable
    assert model.elbo_ - 3 * diagnosis.log_evidence_error < diagnosis.log_evidence < model.elbo_ + 1.0


def test_reference_describes_the_same_model():
    theirs = inspect.signature(reference.sample_posterior).parameters
    ours = inspect.signature(VariationalLogisticRegression).parameters
    for name in ("prior_mean", "prior_scale", "intercept_scale", "fit_intercept"):
        assert theirs[name].default == ours[name].default
    assert {"sample_weight", "offset"} <= theirs.keys() & inspect.signature(
        VariationalLogisticRegression.fit
    ).parameters


@pytest.mark.slow
def test_corrected_posterior_is_that_of_mcmc():
    pytest.importorskip("numpyro", reason="NumPyro is not installed: pip install 'vi-per[mcmc]'")
    X, y = data(60, 4, 20)
    weight, offset = np.random.default_rng(0).integers(1, 3, 60).astype(float), np.linspace(-1.0, 1.0, 60)
    prior = {"prior_scale": np.array([0.3, 0.5, 0.8, 1.0]), "prior_mean": 0.2, "intercept_scale": 0.7}
    model = VariationalLogisticRegression(random_state=0, **prior).fit(X, y, sample_weight=weight, offset=offset)
    corrected = model.corrected(draws=20_000)
    mcmc = reference.sample_posterior(X, y, sample_weight=weight, offset=offset, **prior)
    assert mcmc.names == corrected.names
    own = corrected.sd_ / np.sqrt(corrected.diagnosis.effective_sample_size)
    assert (np.abs(corrected.mean_ - mcmc.mean()) < 4.0 * np.hypot(own, mcmc.mcse())).all()
    assert (np.abs(corrected.sd_ - mcmc.sd()) < 4.0 * np.hypot(own, mcmc.mcse("sd"))).all()


# --- storage ---


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, "Full"),
        ({"covariance": "diagonal", "prior_scale": "auto"}, "Diagonal"),
        ({"prior_scale": np.array([1.0, 2.0, 3.0]), "prior_mean": [0.0, 1.0, 2.0]}, "Full"),
        ({"prior_scale": np.eye(3), "fit_intercept": False}, "Full"),
        ({"solver": "adam", "max_iter": 50, "tol": 1.0, "random_state": np.random.RandomState(0)}, "Full"),
        ({"device": torch.device("cpu"), "prior_scale": 0.5}, "LowRank"),
    ],
)
@pytest.mark.parametrize("labels", ["int", "str", "bool", "object", "float32"])
def test_saved_and_loaded(options, shape, labels, tmp_path):
    X, y = data(3 if shape == "LowRank" else 60, 3, 21)
    y[:2] = [0, 1]
    y = np.where(y, "yes", "no").astype(object) if labels == "object" else y.astype(labels)
    model = VariationalLogisticRegression(**options).fit(pd.DataFrame(X, columns=["a", "b", "c"]), y)
    model.save(tmp_path / "model")
    loaded = viper.load(tmp_path / "model")
    assert type(loaded.posterior_).__name__ == shape
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    for method in ("predict_proba", "predict_std", "predict_interval", "predict", "decision_function"):
        assert np.array_equal(getattr(loaded, method)(frame), getattr(model, method)(frame))
    assert np.array_equal(loaded.covariance_, model.covariance_)
    assert loaded.classes_.dtype == model.classes_.dtype
    for name in ("elbo_", "elbo_bound_", "kl_", "objective_", "converged_", "n_iter_", "passes_", "status_"):
        assert getattr(loaded, name) == getattr(model, name)
    assert np.array_equal(loaded.prior_scale_, model.prior_scale_)
    assert len(loaded.history_) == len(model.history_)
    np.testing.assert_array_equal(np.array(loaded.history_), np.array(model.history_))
    assert loaded.elbo(frame, y) == model.elbo(frame, y)
    pd.testing.assert_frame_equal(loaded.summary(), model.summary())
    for name, value in loaded.get_params().items():
        if name not in ("random_state", "device"):
            assert np.array_equal(value, model.get_params()[name])
    with pytest.raises(ValueError, match="The feature names should match"):
        loaded.predict(frame.rename(columns={"a": "z"}))
    # a loaded model can go on learning
    loaded.partial_fit(frame, y)


def test_save_refuses_to_overwrite(fitted, tmp_path):
    fitted.save(tmp_path / "model")
    with pytest.raises(viper.StorageError, match=r"path must be new; got .* Pass overwrite=True to replace it\."):
        fitted.save(tmp_path / "model")
    fitted.save(tmp_path / "model", overwrite=True)


def test_options_that_cannot_be_saved(tmp_path):
    X, y = data()
    model = VariationalLogisticRegression().fit(X, y).set_params(random_state=object())
    with pytest.raises(TypeError, match=r"random_state must be a number, word or array to be saved; got object\."):
        model.save(tmp_path / "model")


def test_diagnosis_after_loading_needs_the_rows(fitted, tmp_path):
    X, y = data()
    fitted.save(tmp_path / "model")
    loaded = viper.load(tmp_path / "model")
    rule = r"diagnose needs the training rows; got a model without them\. Pass X and y\."
    with pytest.raises(ValueError, match=rule):
        loaded.diagnose()
    assert loaded.diagnose(X, y) == fitted.diagnose()


def test_pickles_hold_no_training_rows(fitted):
    X, y = data()
    for other in (pickle.loads(pickle.dumps(fitted)), copy.deepcopy(fitted)):
        assert not hasattr(other, "_training_rows")
        assert np.array_equal(other.predict_proba(X), fitted.predict_proba(X))
        assert other.diagnose(X, y) == fitted.diagnose()
    big = VariationalLogisticRegression().fit(*data(5000))
    assert len(pickle.dumps(big)) < 20_000


# --- the fit's own account ---


def test_the_same_seed_gives_the_same_fit():
    X, y = data(2000)
    for options in ({}, {"bound": "mc", "samples": 100}, {"solver": "adam", "max_iter": 20, "tol": 1.0}):
        one, two = (VariationalLogisticRegression(random_state=3, **options).fit(X, y) for _ in range(2))
        assert np.array_equal(one.coef_, two.coef_)
    before = torch.get_rng_state()
    VariationalLogisticRegression(random_state=3).fit(X, y).sample(5)
    assert torch.equal(before, torch.get_rng_state())


def test_a_convergence_warning_points_at_the_users_line():
    X, y = data()
    with pytest.warns(ConvergenceWarning, match="Raise max_iter") as told:
        VariationalLogisticRegression(max_iter=1).fit(X, y)
    assert told[0].filename == __file__


def test_verbose_reports_on_stderr(capsys):
    X, y = data()
    VariationalLogisticRegression(verbose=True).fit(X, y)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert all("rows  objective -" in line for line in lines)
    VariationalLogisticRegression().fit(X, y)
    assert capsys.readouterr().err == ""


def test_an_unfitted_model_says_so():
    with pytest.raises(sklearn.exceptions.NotFittedError):
        VariationalLogisticRegression().predict([[1.0]])
    broken = VariationalLogisticRegression(prior_scale=-1.0)
    with pytest.raises(ValueError, match="prior_scale must be positive"):
        broken.fit(*data())
    with pytest.raises(sklearn.exceptions.NotFittedError):
        broken.predict(data()[0])
