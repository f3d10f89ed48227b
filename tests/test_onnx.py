"""The ONNX graph against the estimator it came from, in onnxruntime."""

import mpmath
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.exceptions import NotFittedError

import viper
from viper.models.classes.softmax_graph import softmax_nodes
from viper.models.graph import DEGREE, OnnxGraph, log_erfc_polynomial
from viper.models.onnx import expected_tail
from viper.softplus.log_odds import log_odds_moments

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")


def data(n, p, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p))
    return X, rng.random(n) < 1 / (1 + np.exp(-X[:, 0] + X[:, -1]))


def run(model, X, dtype="float32"):
    session = runtime.InferenceSession(model.to_onnx(dtype=dtype).SerializeToString())
    assert [output.name for output in session.get_outputs()] == ["label", "probabilities", "interval"]
    return session.run(None, {"X": X.astype(dtype)})


MODELS = {
    "full": {},
    "diagonal": {"covariance": "diagonal"},
    "low-rank": {"covariance": "low-rank", "rank": 2},
    "no intercept": {"fit_intercept": False},
    "wide prior": {"prior_scale": 100.0},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-7), ("float64", 2e-11)])
def test_agrees_with_predict_proba(options, dtype, tolerance):
    X, y = data(60, 4)
    model = viper.VariationalLogisticRegression(**options).fit(X, y)
    new = (10 ** np.random.default_rng(1).uniform(-3, 3, (500, 1)) * data(500, 4, 2)[0]).astype(dtype)
    label, probabilities, interval = run(model, new, dtype)
    assert probabilities.dtype == dtype
    assert np.abs(probabilities - model.predict_proba(new)).max() < tolerance
    assert np.abs(interval - model.predict_interval(new)).max() < tolerance
    assert np.array_equal(label, model.predict(new))


@pytest.mark.parametrize("size", [1.0, 1.7e9])
def test_more_coefficients_than_rows(size):
    (X, y), new = data(30, 80), data(50, 80, 1)[0]
    X[:, 3], new[:, 3] = size * X[:, 3], size * new[:, 3]
    model = viper.VariationalLogisticRegression().fit(X, y)
    assert type(model.posterior_).__name__ == "LowRank"
    assert np.abs(run(model, new, "float64")[1] - model.predict_proba(new)).max() < 2e-11


@pytest.mark.parametrize(
    ("labels", "kind"), [([0, 1], np.int64), ([False, True], bool), (["no", "yes"], object), ([-1.0, 1.0], float)]
)
def test_labels_keep_their_type(labels, kind):
    X, y = data(60, 2)
    model = viper.VariationalLogisticRegression().fit(X, np.array(labels)[y.astype(int)])
    label, *_ = run(model, X)
    assert label.dtype == kind
    assert label.tolist() == model.predict(X).tolist()


def test_expected_sigmoid_for_every_mean_and_variance():
    """The graph's tail alone, against the exact kernel."""
    graph = OnnxGraph(onnx)
    graph.add("Identity", expected_tail(graph, "size", "variance"), name="tail")
    info = lambda name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, [None, 1])  # noqa: E731
    whole = onnx.helper.make_graph(
        graph.nodes, "tail", [info("size"), info("variance")], [info("tail")], graph.constants
    )
    opsets = [onnx.helper.make_opsetid("", 17)]
    session = runtime.InferenceSession(
        onnx.helper.make_model(whole, opset_imports=opsets, ir_version=8).SerializeToString()
    )
    size, sd = np.meshgrid([0.0, *np.geomspace(1e-8, 1e8, 160)], [0.0, *np.geomspace(1e-6, 1e6, 120)])
    columns = {"size": size.reshape(-1, 1), "variance": (sd**2).reshape(-1, 1)}
    exact = viper.expected_sigmoid(-torch.from_numpy(columns["size"]), torch.from_numpy(columns["variance"])).mean
    assert np.abs(session.run(None, columns)[0] - exact.numpy()).max() < 2e-11


def softmax_session(classes):
    graph = OnnxGraph(onnx)
    names = ("probability", "interval")
    for name, node in zip(names, softmax_nodes(graph, "mean", "variance", classes, 1.96), strict=True):
        graph.add("Identity", node, name=name)
    info = lambda name, *more: onnx.helper.make_tensor_value_info(  # noqa: E731
        name, onnx.TensorProto.DOUBLE, [None, classes, *more]
    )
    inputs, outputs = [info("mean"), info("variance")], [info("probability"), info("interval", 2)]
    whole = onnx.helper.make_graph(graph.nodes, "softmax", inputs, outputs, graph.constants)
    opsets = [onnx.helper.make_opsetid("", 17)]
    proto = onnx.helper.make_model(whole, opset_imports=opsets, ir_version=8)
    onnx.checker.check_model(proto)
    return runtime.InferenceSession(proto.SerializeToString())


@pytest.mark.parametrize("classes", [3, 8])
def test_expected_softmax_for_every_mean_and_variance(classes):
    """The graph's integral alone against the exact kernel, from sds of 0 to 1,000 and means up to 700 apart."""
    session, rng = softmax_session(classes), np.random.default_rng(3)
    sds = [0.0, 1e-3, 0.1, 0.5, 1.0, 2.4, 2.6, 5.0, 30.0, 1e3]
    mean = rng.normal(size=(40, classes)) * 10 ** rng.uniform(-2, 2.3, (40, 1))
    variance = (np.repeat(sds, 4)[:, None] * rng.uniform(0.3, 1.0, (40, classes))) ** 2
    variance[::4, 0] *= 1e-4  # one class is known much better than the others
    probability, interval = session.run(None, {"mean": mean, "variance": variance})
    exact = viper.expected_logsumexp(mean, variance)
    assert np.abs(probability - exact.slope).max() < 1e-7
    centre, spread = log_odds_moments(torch.from_numpy(mean), torch.from_numpy(variance))
    ends = torch.sigmoid(centre[..., None] + 1.96 * spread.sqrt()[..., None] * torch.tensor([-1.0, 1.0]))
    assert np.abs(interval - ends.numpy()).max() < 3e-6  # the variance in Python is right to 1e-6


def test_softmax_of_no_rows_and_of_rows_without_numbers():
    session = softmax_session(3)
    none = np.zeros((0, 3))
    assert session.run(None, {"mean": none, "variance": none})[1].shape == (0, 3, 2)
    mean = np.array([[0.0, np.nan, 1.0], [0.0, 0.0, 0.0], [np.inf, 0.0, 0.0]])
    probability, interval = session.run(None, {"mean": mean, "variance": np.zeros((3, 3))})
    assert np.isnan(probability[[0, 2]]).all()
    assert np.isnan(interval[[0, 2]]).all()
    assert np.abs(probability[1] - 1 / 3).max() < 1e-12


@pytest.mark.parametrize("options", [{}, {"covariance": "diagonal"}, {"fit_intercept": False}], ids=str)
def test_more_than_two_classes(options):
    X, y = data(90, 3)
    names = np.array(["b", "c", "a"])[np.digitize(X[:, 0] + y, [-0.3, 0.8])]
    model = viper.VariationalLogisticRegression(**options).fit(X, names)
    new = 10 ** np.random.default_rng(1).uniform(-2, 2, (50, 1)) * data(50, 3, 2)[0]
    label, probabilities, interval = run(model, new, "float64")
    assert np.abs(probabilities - model.predict_proba(new)).max() < 1e-7
    assert np.abs(interval - model.predict_interval(new)).max() < 3e-6
    assert label.tolist() == model.predict(new).tolist()
    assert run(model, new)[1].dtype == np.float32


def test_formula_of_more_than_two_classes():
    frame = table()
    frame["stage"] = np.where(frame["dose"] > 2.5, "late", np.where(frame["died"] == "yes", "early", "none"))
    model = viper.VariationalLogisticRegression.from_formula("stage ~ age + ward", frame)
    new = frame[:20].assign(ward=["neu", *frame["ward"][1:20]])  # a new level, which cannot be predicted
    probabilities = run_columns(model.to_onnx(dtype="float64"), new)["probabilities"]
    assert np.isnan(probabilities[0]).all()
    assert np.abs(probabilities[1:] - model.predict_proba(new[1:])).max() < 1e-7


def test_erfc_polynomial():
    for x in [0.0, 0.1, 0.7, 1.0, 2.0, 3.5, 6.0, 20.0]:
        t = 2.0 / (2.0 + x)
        power = np.polynomial.polynomial.polyval(2.0 * t - 1.0, log_erfc_polynomial(DEGREE))
        assert abs(t * np.exp(power - x * x) - float(mpmath.erfc(x))) < 2e-12


def test_writes_a_file_once(tmp_path):
    X, y = data(60, 2)
    model = viper.VariationalLogisticRegression().fit(X, y)
    proto = model.to_onnx(tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == proto.SerializeToString()
    with pytest.raises(viper.StorageError, match="overwrite=True"):
        model.to_onnx(tmp_path / "model.onnx")
    model.to_onnx(tmp_path / "model.onnx", overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_errors_and_warnings(monkeypatch):
    X, y = data(60, 2)
    with pytest.raises(NotFittedError):
        viper.VariationalLogisticRegression().to_onnx()
    model = viper.VariationalLogisticRegression().fit(X, y)
    with pytest.raises(ValueError, match=r"dtype must be .* got 'int8'"):
        model.to_onnx(dtype="int8")
    with monkeypatch.context() as patch:
        patch.setattr("viper.models.onnx.LARGEST_FILE", 10)
        with pytest.raises(ValueError, match="at most 2 GB; got a posterior of"):
            model.to_onnx()
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(ImportError, match=r"vi-per\[onnx\]"):
        model.to_onnx()


def test_a_gaussian_process_says_what_to_do_instead():
    with pytest.raises(NotImplementedError, match="depends on its kernel"):
        viper.VariationalGPClassifier().to_onnx()


# --- formulas ---


def table(n=200, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(50.0, 10.0, n),
            "dose": rng.gamma(2.0, 1.0, n) + 0.1,
            "ward": rng.choice(["x:y", "z[1]", "k", "größe"], n),  # levels that look like syntax
            "grade": rng.integers(1, 4, n),
            "smoker": rng.random(n) < 0.3,
        }
    )
    logit = 0.05 * (frame["age"] - 50) + 0.3 * frame["dose"] + (frame["ward"] == "k") - 0.4 * frame["grade"]
    return frame.assign(died=np.where(rng.random(n) < 1 / (1 + np.exp(-logit)), "yes", "no"))


def run_columns(proto, frame, dtype=np.float64):
    """Run a formula's graph on raw columns."""
    session = runtime.InferenceSession(proto.SerializeToString())
    feed = {}
    for info in session.get_inputs():
        column = frame[info.name]
        if info.type == "tensor(string)":
            values = column.astype(object).where(column.notna(), "").to_numpy(dtype=object)
        else:
            values = column.to_numpy(dtype=bool if info.type == "tensor(bool)" else dtype)
        feed[info.name] = values[:, None]
    return dict(zip(("label", "probabilities", "interval"), session.run(None, feed), strict=True))


FORMULAS = [
    "died ~ .",
    "died ~ age*ward + C(grade) + smoker",
    "died ~ scale(log(dose)) + center(age):ward + poly(age, 3) + I(dose**2/2 - 1) + log1p(dose) + sqrt(dose)",
    "died ~ bs(age, df=5) + bs(dose, df=4, degree=2)*smoker + abs(age - 50)",
    "died ~ center(scale(age)) + ward:C(grade) - 1",
    'died ~ C(ward, Treatment("k")) + poly(dose, degree=2, raw=True) + exp(-dose)',
    "died ~ (age + dose + ward)^2",
]


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_reads_raw_columns(formula, standardize):
    frame = table()
    model = viper.VariationalLogisticRegression.from_formula(formula, frame, standardize=standardize)
    new = table(300, seed=1)
    for name in ("age", "dose"):  # within the range of the splines
        new[name] = new[name].clip(frame[name].min(), frame[name].max())
    found = run_columns(model.to_onnx(dtype="float64", level=0.9), new)
    assert np.abs(found["probabilities"] - model.predict_proba(new)).max() < 1e-9
    assert np.abs(found["interval"] - model.predict_interval(new, 0.9)).max() < 1e-9
    assert found["label"].tolist() == model.predict(new).tolist()


@pytest.mark.parametrize("missing", ["mean", "indicator"])
def test_missing_values_are_filled_in_as_in_the_fit(missing):
    frame, new = table(), table(100, seed=1)
    for rows in (frame, new):
        rows.loc[rows.index[::7], "age"] = np.nan
        rows.loc[rows.index[::5], "ward"] = None
    formula = "died ~ age + ward + C(grade) + age:smoker"
    model = viper.VariationalLogisticRegression.from_formula(formula, frame, missing=missing)
    found = run_columns(model.to_onnx(dtype="float64"), new)
    assert np.abs(found["probabilities"] - model.predict_proba(new)).max() < 1e-9


def test_rows_that_cannot_be_predicted_are_nan():
    model = viper.VariationalLogisticRegression.from_formula("died ~ bs(age, df=4) + ward + C(grade) + dose", table())
    new = table(6, seed=1).assign(ward="k", age=50.0)
    new.loc[0, "ward"] = "never seen"
    new.loc[1, "ward"] = ""
    new.loc[2, "age"] = 1000.0  # beyond the spline
    new["grade"] = [1, 2, 3, 7, 1, 2]
    new.loc[4, "dose"] = np.nan
    found = run_columns(model.to_onnx(dtype="float64"), new)
    assert np.isnan(found["probabilities"]).all(1).tolist() == [True] * 5 + [False]
    assert np.isnan(found["interval"]).all(1).tolist() == [True] * 5 + [False]
    assert np.abs(found["probabilities"][5:] - model.predict_proba(new[5:])).max() < 1e-9


def test_multiple_imputation_is_refused():
    frame = table(80)
    frame.loc[::9, "age"] = np.nan
    model = viper.VariationalLogisticRegression.from_formula(
        "died ~ age + dose", frame, missing="multiple", random_state=0
    )
    with pytest.raises(ValueError, match=r"fill in missing values by one number; got missing='multiple'.*'mean'"):
        model.to_onnx()
