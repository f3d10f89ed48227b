"""Several labels at once: each has the posterior of a fit of its own, and X is read once for all of them."""

import pickle
import warnings

import numpy as np
import pandas
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.datasets import make_multilabel_classification
from sklearn.metrics import accuracy_score
from sklearn.model_selection import KFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, scale

import viper
from viper import VariationalLogisticRegression
from viper.errors import ConvergenceWarning, StorageError
from viper.inference.classes.together import fit_together

NAMES = ["ham", "spam", "eggs"]


@pytest.fixture(scope="module")
def data():
    X, Y = make_multilabel_classification(600, 6, n_classes=3, n_labels=2, random_state=3)
    return scale(X), Y


@pytest.fixture(scope="module")
def model(data):
    return VariationalLogisticRegression().fit(*data)


def assert_same_numbers(a, b):
    """To the last bit but one: torch rounds the last rows of a block differently by where they lie in memory."""
    np.testing.assert_array_max_ulp(a, b, 4)


def assert_equal_fits(several, ones):
    """Each label's posterior is that of a fit by itself, to the last bit."""
    for j, one in enumerate(ones):
        np.testing.assert_array_equal(several.coef_[j], one.coef_[0])
        np.testing.assert_array_equal(several.covariance_[j], one.covariance_)
        assert several.estimators_[j].elbo_ == one.elbo_


# --- L labels are L fits ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"covariance": "diagonal"},
        {"class_weight": "balanced"},
        {"class_weight": {0: 1.0, 1: 3.0}},
        {"prior_scale": "auto"},
        {"bound": "pg"},
        {"fit_intercept": False},
        {"solver": "adam", "tol": 1e-3},
    ],
    ids=str,
)
def test_labels_are_separate_fits(data, options):
    X, Y = data
    ones = [VariationalLogisticRegression(**options).fit(X, y) for y in Y.T]
    assert_equal_fits(VariationalLogisticRegression(**options).fit(X, Y), ones)


@pytest.mark.parametrize("shape", ["sparse", "float32", "wide", "many"])
def test_labels_are_separate_fits_in_every_form_of_the_problem(data, shape):
    X, Y = data
    options = {"dtype": "float32"} if shape == "float32" else {}
    if shape == "sparse":
        X = scipy.sparse.csr_matrix(X)
    elif shape == "wide":
        X, Y = X[:40] @ np.random.default_rng(0).standard_normal((6, 70)), Y[:40]
    elif shape == "many":  # with random subsets first
        X, Y = np.tile(X, (60, 1)), np.tile(Y, (60, 1))
    ones = [VariationalLogisticRegression(**options).fit(X, y) for y in Y.T]
    assert_equal_fits(VariationalLogisticRegression(**options).fit(X, Y), ones)


def test_weights_and_offsets_are_those_of_each_label(data):
    X, Y = data
    generator = np.random.default_rng(1)
    weight, offset = generator.integers(0, 3, len(X)), generator.standard_normal(Y.shape)
    both = VariationalLogisticRegression().fit(X, Y, weight, offset)
    ones = [VariationalLogisticRegression().fit(X, Y[:, j], weight, offset[:, j]) for j in range(3)]
    assert_equal_fits(both, ones)
    for j, one in enumerate(ones):
        assert_same_numbers(both.predict_proba(X, offset)[:, j], one.predict_proba(X, offset[:, j])[:, 1])
    common = VariationalLogisticRegression().fit(X, Y, offset=offset[:, 0])
    assert_equal_fits(common, [VariationalLogisticRegression().fit(X, y, offset=offset[:, 0]) for y in Y.T])


def test_partial_fit_updates_each_label(data):
    X, Y = data
    both, ones = VariationalLogisticRegression(), [VariationalLogisticRegression() for _ in range(3)]
    for part in (slice(0, 300), slice(300, 600)):
        both.partial_fit(X[part], Y[part])
        for j, one in enumerate(ones):
            one.partial_fit(X[part], Y[part, j])
    assert_equal_fits(both, ones)
    constant = VariationalLogisticRegression().partial_fit(X[:5], np.zeros((5, 3), int), classes=NAMES)
    assert constant.classes_.tolist() == NAMES


# --- one reading of X for all labels ---


def test_a_pass_reads_the_rows_once_for_all_labels(data, model):
    X, Y = data
    read = []

    def blocks(labels):
        read.append(labels)
        for start in range(0, len(X), 250):
            yield X[start : start + 250], Y[start : start + 250, labels]

    several = VariationalLogisticRegression().fit(viper.Blocks(lambda: blocks([0, 1, 2])))
    np.testing.assert_array_equal(several.coef_, model.coef_)
    count = len(read)
    alone = []
    for j in range(3):
        read.clear()
        VariationalLogisticRegression().fit(viper.Blocks(lambda j=j: blocks(j)))
        alone.append(len(read))
    assert count == max(alone)


def test_files_name_several_targets(data, model, tmp_path):
    X, Y = data
    frame = pandas.DataFrame(X, columns=list("abcdef")).assign(**dict(zip(NAMES, Y.T, strict=True)))
    frame.to_csv(tmp_path / "rows.csv", index=False)
    files = viper.Files(tmp_path / "rows.csv", target=NAMES)
    found = VariationalLogisticRegression().fit(files)
    np.testing.assert_allclose(found.coef_, model.coef_, rtol=1e-12)  # CSV keeps every digit; sums round by alignment
    assert found.classes_.tolist() == NAMES
    assert found.feature_names_in_.tolist() == list("abcdef")
    assert found.score(files) == pytest.approx(model.score(*data), rel=1e-15)
    frame.assign(spam=np.where(np.arange(600) == 1, 7, frame["spam"])).to_csv(tmp_path / "odd.csv", index=False)
    with pytest.raises(ValueError, match=r"only 0 and 1.* got 7 in column 'spam' of .*odd.csv"):
        VariationalLogisticRegression().fit(viper.Files(tmp_path / "odd.csv", target=NAMES))


def test_rows_on_a_cluster_have_the_same_labels(data, model):
    da = pytest.importorskip("dask.array")
    dd = pytest.importorskip("dask.dataframe")
    X, Y = data
    lazy = da.from_array(X, chunks=(250, 3)), da.from_array(Y, chunks=(200, 2))
    for given in (lazy, (lazy[0], Y)):
        found = VariationalLogisticRegression().fit(*given)
        np.testing.assert_allclose(found.coef_, model.coef_, rtol=1e-9)
        np.testing.assert_allclose(found.predict_proba(lazy[0]).compute(), model.predict_proba(X), rtol=1e-9)
    assert found.score(*lazy) == model.score(X, Y)
    frame = dd.from_pandas(pandas.DataFrame(np.column_stack([X, Y]), columns=[*"abcdef", *NAMES]), npartitions=3)
    named = VariationalLogisticRegression().fit(frame[list("abcdef")], frame[NAMES])
    assert named.classes_.tolist() == NAMES
    np.testing.assert_allclose(named.coef_, model.coef_, rtol=1e-9)
    with pytest.raises(ValueError, match=r"got column 1 \(all 0\)"):
        VariationalLogisticRegression().fit(lazy[0], da.from_array(Y * [1, 0, 1], chunks=(200, 3)))
    with pytest.raises(ValueError, match=r"must contain only 0 and 1, a column for each label; got 0\.5 in column 1"):
        VariationalLogisticRegression().fit(lazy[0], da.from_array(Y * [1, 0.5, 1], chunks=(200, 3)))


def test_an_interrupted_fit_continues(data, model, tmp_path):
    X, Y = data
    fitted = VariationalLogisticRegression().fit(X, Y, checkpoint=tmp_path / "fit")
    np.testing.assert_allclose(fitted.coef_, model.coef_, rtol=1e-9)
    assert not (tmp_path / "fit").exists()


def test_an_error_of_one_label_ends_all_fits(data):
    X, Y = data
    with pytest.raises(ValueError, match="moderate size"):
        VariationalLogisticRegression().fit(X * 1e200, Y)


def test_warnings_say_which_label(data, model):
    def warned(text):
        warnings.warn(text, ConvergenceWarning, stacklevel=1)

    rows = model._training_rows
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit_together(rows, [lambda: warned("odd"), lambda: None], ["a", "b"])
        fit_together(rows, [lambda: warned("odd"), lambda: warned("odd")], ["a", "b"])
    assert [str(one.message) for one in found] == ["Label 'a': odd", "odd"]
    assert {one.filename for one in found} == {__file__}
    with pytest.warns(ConvergenceWarning, match="^The solver stopped early"):
        VariationalLogisticRegression(max_iter=1).fit(*data)


# --- scikit-learn's conventions ---


def test_predictions_have_a_column_for_each_label(data, model):
    X, Y = data
    probability = model.predict_proba(X)
    assert probability.shape == model.decision_function(X).shape == model.predict_std(X).shape == Y.shape
    assert model.predict_interval(X).shape == (*Y.shape, 2)
    np.testing.assert_array_equal(model.predict(X), (probability > 0.5).astype(int))
    np.testing.assert_allclose(
        model.decision_function(X), np.log(probability / (1 - probability)), rtol=1e-9, atol=1e-12
    )
    assert model.score(X, Y) == accuracy_score(Y, model.predict(X))  # all labels of a row
    assert model.multilabel_
    np.testing.assert_array_equal(model.classes_, [0, 1, 2])
    for j, one in enumerate(model.estimators_):
        assert_same_numbers(model.predict_interval(X)[:, j], one.predict_interval(X))
        assert_same_numbers(model.predict_std(X)[:, j], one.predict_std(X))


def test_every_form_of_y_is_read(data, model):
    X, Y = data
    for y in (Y.astype(bool), Y.astype(float), scipy.sparse.csr_matrix(Y), torch.from_numpy(Y), Y.tolist()):
        np.testing.assert_array_equal(VariationalLogisticRegression().fit(X, y).coef_, model.coef_)
    named = VariationalLogisticRegression().fit(X, pandas.DataFrame(Y, columns=NAMES))
    assert named.classes_.tolist() == NAMES
    np.testing.assert_array_equal(named.coef_, model.coef_)


def test_scikit_learn_clones_scores_and_crosses(data):
    X, Y = data
    pipeline = make_pipeline(StandardScaler(), VariationalLogisticRegression())
    by_hand = [clone(pipeline).fit(X[300:], Y[300:]), clone(pipeline).fit(X[:300], Y[:300])]
    folds = KFold(2)
    crossed = cross_val_predict(pipeline, X, Y, cv=folds, method="predict_proba")
    np.testing.assert_array_equal(
        crossed, np.concatenate([by_hand[0].predict_proba(X[:300]), by_hand[1].predict_proba(X[300:])])
    )
    assert (cross_val_score(pipeline, X, Y, cv=folds, scoring="roc_auc") > 0.7).all()


def test_a_model_can_be_fitted_again_to_one_label(data):
    X, Y = data
    model = VariationalLogisticRegression().fit(X, Y).fit(X, Y[:, 0])
    assert not model.multilabel_
    assert model.predict_proba(X).shape == (len(X), 2)


# --- the rest of the estimator ---


def test_answers_are_those_of_the_labels(data, model):
    X, Y = data
    summary = model.summary()
    assert summary.index.names == ["label", "coefficient"]
    for j, one in enumerate(model.estimators_):
        pandas.testing.assert_frame_equal(summary.loc[j], one.summary(), check_names=False)
        assert model.diagnose()[j].k_hat == one.diagnose().k_hat
    assert model.elbo_ == sum(one.elbo_ for one in model.estimators_)
    assert model.elbo(X, Y) == pytest.approx(model.elbo_, abs=3e-8)  # what each of the last steps gains is predicted
    assert model.coefficient_interval().shape == (3, 7, 2)
    np.testing.assert_array_equal(model.coefficient_interval()[1], model.estimators_[1].coefficient_interval())
    draws = model.sample(4000, random_state=0)
    assert draws.shape == (4000, 3, 7)
    between = np.corrcoef(draws[:, 0, 0], draws[:, 1, 0])[0, 1]
    assert abs(between) < 4 / np.sqrt(4000)  # labels are independent
    slopes = model.slopes(X[:50], draws=200)
    assert slopes["label"].unique().tolist() == [0, 1, 2]
    robust = model.robust()
    np.testing.assert_array_equal(
        robust.covariance_[2], VariationalLogisticRegression().fit(X, Y[:, 2]).robust().covariance_
    )


def test_tables_have_columns_for_each_label(data, model, tmp_path):
    X, Y = data
    named = VariationalLogisticRegression().fit(X, pandas.DataFrame(Y, columns=NAMES))
    table = named.predict_table(X[:9])
    np.testing.assert_array_equal(table["probability_spam"], model.predict_proba(X[:9])[:, 1])
    np.testing.assert_array_equal(table[["lower_eggs", "upper_eggs"]], model.predict_interval(X[:9])[:, 2])
    np.testing.assert_array_equal(table["label_ham"].astype(int), model.predict(X[:9])[:, 0])
    assert (table["distance"] <= 1.0).all()
    assert named.predict_to(X, tmp_path / "p.parquet") == len(X)
    written = pandas.read_parquet(tmp_path / "p.parquet")
    np.testing.assert_array_equal(written["sd_ham"], model.predict_std(X)[:, 0])
    assert "ham: x0" in named._repr_html_()
    assert named.card()["classes"] == NAMES


def test_saved_equals_loaded(data, tmp_path):
    X, Y = data
    model = VariationalLogisticRegression(class_weight="balanced", prior_scale=np.full(6, 2.0)).fit(
        X, pandas.DataFrame(Y, columns=NAMES)
    )
    model.save(tmp_path / "m.viper")
    for other in (viper.load(tmp_path / "m.viper"), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(other.predict_proba(X), model.predict_proba(X))
        pandas.testing.assert_frame_equal(other.summary(), model.summary())
        assert other.classes_.tolist() == NAMES
        assert (other.elbo_, other.passes_, other.converged_) == (model.elbo_, model.passes_, model.converged_)
        np.testing.assert_array_equal(other.class_weight_, model.class_weight_)
        assert other.diagnose(X, Y)["spam"].k_hat == model.diagnose()["spam"].k_hat


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, metadata: metadata["labels"].pop(), "labels must be 3"),
        (lambda tensors, metadata: tensors.pop("1.posterior.mean"), "got parts"),
        (lambda tensors, metadata: tensors.update({"7.posterior.mean": torch.zeros(7)}), "only what viper writes"),
        (lambda tensors, metadata: metadata["labels"][0].update(fit=3), "fit must be"),
        (lambda tensors, metadata: tensors["0.posterior.factor"].zero_(), "0.posterior.factor must be"),
        (lambda tensors, metadata: metadata["classes"]["values"].__setitem__(0, 1), "different labels"),
    ],
)
def test_a_wrong_file_is_refused(model, change, message, tmp_path):
    from viper.data.model_file import write_tensors

    tensors, metadata = model._pack()
    metadata = pickle.loads(pickle.dumps(metadata))
    tensors = {name: x.clone() for name, x in tensors.items()}
    change(tensors, metadata)
    write_tensors(tmp_path / "m.viper", "logistic", tensors, metadata)
    with pytest.raises(StorageError, match=message):
        viper.load(tmp_path / "m.viper")


def test_onnx_and_arviz_have_an_axis_of_labels(data, model):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("arviz_base")
    X, Y = data
    session = onnxruntime.InferenceSession(model.to_onnx(dtype="float64").SerializeToString())
    label, probabilities, interval = session.run(None, {"X": X})
    np.testing.assert_array_equal(label, model.predict(X))
    np.testing.assert_allclose(probabilities, model.predict_proba(X), atol=1e-10)
    np.testing.assert_allclose(interval, model.predict_interval(X), atol=1e-10)
    tree = model.to_arviz(draws=50, chains=2, random_state=0)
    assert tree["posterior"]["coefficient"].shape == (2, 50, 3, 6)
    assert tree["log_likelihood"]["y"].shape == (2, 50, 600, 3)
    np.testing.assert_array_equal(tree["observed_data"]["y"], Y)


# --- what cannot be fitted ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda Y: np.column_stack([Y, np.ones(len(Y))]), r"rows with 0 and rows with 1; got column 3 \(all 1\)"),
        (lambda Y: pandas.DataFrame(Y * [0, 1, 1], columns=NAMES), r"got column 'ham' \(all 0\)"),
        (lambda Y: np.where(Y == 1, 2, Y), r"only 0 and 1.* got 2 in column 0"),
        (lambda Y: Y - 0.5, r"only 0 and 1.* got 0.5 in column 0"),
        (lambda Y: np.where(Y == 1, np.nan, Y), r"only 0 and 1.* got nan"),
        (lambda Y: np.where(Y == 1, "yes", "no"), r"only 0 and 1.* got 'yes' in column 0"),
        (lambda Y: pandas.DataFrame(Y, columns=["a", "b", "b"]), "different names"),
        (lambda Y: Y[:-1], "same number of rows; got 600 and 599"),
    ],
)
def test_wrong_labels_get_one_clear_error(data, change, message):
    X, Y = data
    with pytest.raises(ValueError, match=message):
        VariationalLogisticRegression().fit(X, change(Y))


def test_a_fitted_model_wants_the_labels_of_its_fit(data, model):
    X, Y = data
    with pytest.raises(ValueError, match="column for each label"):
        model.elbo(X, Y[:, 0])
    with pytest.raises(ValueError, match="columns of the fit, 0, 1, 2; got 2 columns"):
        model.elbo(X, Y[:, :2])
    with pytest.raises(ValueError, match=r"offset must have shape \(600,\) or \(600, 3\)"):
        model.predict_proba(X, offset=np.zeros((600, 2)))
    with pytest.raises(ValueError, match="training rows"):
        pickle.loads(pickle.dumps(model)).diagnose()
