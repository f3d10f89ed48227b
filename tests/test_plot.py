"""The plots show the model's numbers, draw into the given Axes, and change no setting."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
import scipy.spatial.distance
import scipy.special
import scipy.stats
import torch
from matplotlib.figure import Figure
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import viper
from viper.models.prediction import predictions
from viper.report import plot, views
from viper.report.metrics import binned_residuals, calibration, decision_curve


def rows(n=240, seed=0):
    generator = np.random.default_rng(seed)
    X = pd.DataFrame(generator.normal(size=(n, 3)) * [1.0, 5.0, 0.2] + [0.0, 30.0, 1.0], columns=["age", "dose", "c"])
    f = 1.2 * X["age"] - 0.2 * (X["dose"] - 30.0)
    return X, np.where(generator.random(n) < scipy.special.expit(f), "ill", "well")


@pytest.fixture(scope="module")
def data():
    return rows()


@pytest.fixture(scope="module")
def logistic(data):
    return viper.VariationalLogisticRegression().fit(*data)


@pytest.fixture(scope="module")
def process(data):
    X, y = data
    model = viper.VariationalGPClassifier(mean="constant", n_inducing=15, n_starts=1, random_state=0)
    return model.fit(X[["age", "dose"]], y)


@pytest.fixture
def ax():
    return Figure().subplots()


DRAWINGS = {
    "forest": lambda m, X, y, **o: plot.forest(m, **o),
    "densities": lambda m, X, y, **o: plot.densities(m, **o),
    "partial_effect": lambda m, X, y, **o: plot.partial_effect(m, X, "dose", **o),
    "observations": plot.observations,
    "reliability": plot.reliability,
    "probability_map": lambda m, X, y, **o: plot.probability_map(m, X, y, columns=("age", "dose"), size=8, **o),
    "convergence": lambda m, X, y, **o: plot.convergence(m, **o),
    "bounds": lambda m, X, y, **o: plot.bounds(**o),
}


@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.parametrize("kind", ["logistic", "process"])
def test_drawings_return_their_axes_and_touch_no_setting(name, kind, data, request, ax):
    import matplotlib.pyplot as plt

    model, (X, y) = request.getfixturevalue(kind), data
    X = X[["age", "dose"]] if kind == "process" else X
    if (name, kind) == ("densities", "process"):
        with pytest.raises(TypeError, match=r"needs a model with coefficients; got VariationalGPClassifier. Use"):
            DRAWINGS[name](model, X, y)
        return
    before, opened = dict(matplotlib.rcParams), plt.get_fignums()  # of earlier tests
    assert DRAWINGS[name](model, X, y, ax=ax) is ax
    assert plt.get_fignums() == opened
    new = DRAWINGS[name](model, X, y)
    assert isinstance(new, matplotlib.axes.Axes)
    assert new is not ax
    new.figure.canvas.draw()
    plt.close(new.figure)
    assert dict(matplotlib.rcParams) == before


PIPELINE = r"must be one of viper's; got Pipeline. Pass pipeline\[-1\], with pipeline\[:-1\].transform\(X\)"


@pytest.mark.parametrize("name", [name for name in DRAWINGS if name != "bounds"])
def test_a_pipeline_is_refused_with_advice(name, data, ax):
    X, y = data
    pipeline = make_pipeline(StandardScaler(), viper.VariationalLogisticRegression())
    pipeline.set_output(transform="pandas").fit(X, y)
    with pytest.raises(TypeError, match=PIPELINE):
        DRAWINGS[name](pipeline, X, y, ax=ax)
    DRAWINGS[name](pipeline[-1], pipeline[:-1].transform(X), y, ax=ax)


# --- plots show what the model says ---


def test_forest_shows_the_intervals(logistic, ax):
    plot.forest(logistic, ax=ax, level=0.8)
    names = [label.get_text() for label in ax.get_yticklabels()]
    shown = {name: path[:, 0] for name, path in zip(names, ax.collections[0].get_segments(), strict=True)}
    expected = np.exp(logistic.coefficient_interval(0.8))
    for j, name in enumerate(logistic.feature_names_in_):
        np.testing.assert_allclose(shown[name], expected[j])


def test_forest_names_units_and_plain_ticks(data, ax):
    frame = data[0].assign(y=data[1], sex=np.where(np.arange(len(data[1])) % 2, "f", "m"))
    model = viper.VariationalLogisticRegression.from_formula("y ~ age + dose + sex", frame)
    plot.forest(model, ax=ax)
    labels = {text.get_text() for text in ax.get_yticklabels()}
    assert labels >= {f"dose (per {model.formula_.units['dose']})", "sex[T.m] (vs f)"}
    assert ax.get_title(loc="left").startswith("Odds ratio, 95")
    ax.figure.canvas.draw()
    ticks = [text.get_text() for text in ax.get_xticklabels() if text.get_text()]
    assert "1" in ticks
    np.testing.assert_allclose([float(text) for text in ticks], ax.get_xticks())


def test_forest_shows_the_largest(logistic, ax):
    plot.forest(logistic, top=1, odds=False, ax=ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["age"]


def test_forest_of_a_process_shows_its_relevance(process, ax):
    plot.forest(process, ax=ax)
    np.testing.assert_allclose(
        ax.collections[1].get_offsets()[:, 0], np.sort(process.summary()["relevance"].to_numpy())
    )


def test_densities_are_normal_curves(logistic, ax):
    plot.densities(logistic, ["dose"], ax=ax)
    x, height = ax.lines[0].get_data()
    row = logistic.summary().loc["dose"]
    expected = scipy.stats.norm(row["mean"], row["sd"]).pdf(x)
    np.testing.assert_allclose(height / height.max(), expected / expected.max(), atol=1e-12)
    with pytest.raises(ValueError, match=r"names must be coefficients of the model; got \['x'\]"):
        plot.densities(logistic, ["x"])


def test_partial_effect_moves_one_column(logistic, data, ax):
    X, _ = data
    plot.partial_effect(logistic, X, "dose", points=9, ax=ax)
    x, probability = ax.lines[0].get_data()
    by_hand = pd.DataFrame({name: [np.sort(X[name])[119]] * 9 for name in X}).assign(dose=x)
    np.testing.assert_allclose(probability, logistic.predict_proba(by_hand)[:, 1])
    assert (x[0], x[-1]) == pytest.approx(tuple(X["dose"].quantile([0.01, 0.99])))


def test_arrays_have_numbered_columns(data):
    X, y = data[0].to_numpy(), data[1]
    model = viper.VariationalLogisticRegression().fit(X, y)
    assert views.column_effect(model, X, 1).name == views.column_effect(model, X, "x1").name == "x1"
    with pytest.raises(ValueError, match="feature must be a column of X; got 'x7'"):
        views.column_effect(model, X, 7)


def test_map_shows_mean_and_sd(process, data, ax):
    X = data[0][["age", "dose"]]
    plot.probability_map(process, X, show="sd", size=7, ax=ax)
    mesh = ax.collections[0]
    corners = mesh.get_coordinates().reshape(-1, 2)
    expected = process.predict_std(pd.DataFrame(corners, columns=X.columns))
    np.testing.assert_allclose(np.asarray(mesh.get_array()).ravel(), expected, atol=1e-12)
    with pytest.raises(ValueError, match="show must be 'mean' or 'sd'; got 'median'"):
        plot.probability_map(process, X, show="median")


def test_map_needs_two_columns(logistic, data):
    with pytest.raises(ValueError, match=r"a map needs two columns; got 3. Name them"):
        plot.probability_map(logistic, data[0])
    with pytest.raises(ValueError, match="columns must be two numeric columns of X; got 'height'"):
        plot.probability_map(logistic, data[0], columns=("age", "height"))


def test_convergence_needs_a_history(logistic, tmp_path):
    logistic.save(tmp_path / "model.viper")
    loaded = viper.load(tmp_path / "model.viper")
    loaded.history_ = []
    with pytest.raises(ValueError, match="convergence needs the history of the fit"):
        plot.convergence(loaded)


def test_convergence_of_a_process_shows_its_starts(data, ax):
    X, y = data
    model = viper.VariationalGPClassifier(mean="constant", n_inducing=10, n_starts=2, random_state=0)
    model.fit(X[["age"]], y)
    plot.convergence(model, ax=ax)
    best = max(start.elbo for start in model.starts_)
    shown = np.sort(ax.collections[1].get_offsets()[:, 0])
    np.testing.assert_allclose(shown, np.sort([best - start.elbo for start in model.starts_]))


def test_trace_of_adam_is_the_distance_to_its_end(data):
    with pytest.warns(match="not converged|stopped"):
        model = viper.VariationalLogisticRegression(solver="adam", max_iter=30).fit(*data)
    trace = views.convergence_trace(model)
    assert "below the final objective" in trace.meaning
    assert len(trace.values) == 30
    best = max(step.objective for step in model.history_)
    assert trace.values[0] == pytest.approx(model.objective_ - model.history_[0].objective)
    assert (trace.values > 0).all()
    assert best >= model.objective_


def test_bounds_shows_every_method(ax):
    plot.bounds("sd", mean=0.5, ax=ax)
    x = torch.from_numpy(ax.lines[0].get_xdata())
    errors = views.relative_errors(torch.full_like(x, 0.5), x**2)
    for line, (name, error) in zip(ax.lines, errors.items(), strict=True):
        assert line.get_label() == name
        np.testing.assert_allclose(line.get_ydata(), error.clamp(plot.FLOOR))
    with pytest.raises(ValueError, match="over must be 'mean' or 'sd'; got 'τ'"):
        plot.bounds("τ")


# --- the numbers behind the plots ---


def test_predictions_are_the_models(logistic, data):
    seen = predictions(logistic, data[0], level=0.9)
    np.testing.assert_allclose(seen.probability, logistic.predict_proba(data[0])[:, 1])
    np.testing.assert_allclose(seen.sd, logistic.predict_std(data[0]))
    np.testing.assert_allclose(np.stack([seen.lower, seen.upper], 1), logistic.predict_interval(data[0], level=0.9))


def test_reliability_shows_the_calibration_of_evaluate(logistic, data, ax):
    X, y = data
    plot.reliability(logistic, X, y, bins=7, ax=ax)
    table = calibration(y == logistic.classes_[1], logistic.predict_proba(X)[:, 1], bins=7)
    np.testing.assert_allclose(ax.collections[-1].get_offsets(), table[["predicted", "observed"]])
    ends = np.array([[*line[:, 1]] for line in ax.collections[-2].get_segments()])
    np.testing.assert_allclose(ends, table[["lower", "upper"]])


def test_the_decision_curve_and_the_residuals_are_those_of_metrics(logistic, data, ax):
    X, y = data
    label, probability = y == logistic.classes_[1], logistic.predict_proba(X)[:, 1]
    plot.net_benefit(logistic, X, y, ax=ax)
    curve = decision_curve(label, probability)
    np.testing.assert_allclose(ax.lines[-1].get_xydata(), curve[["threshold", "net_benefit"]])
    ax.clear()
    plot.residuals(logistic, X, y, ax=ax)
    table = binned_residuals(label, probability)
    np.testing.assert_allclose(ax.collections[-1].get_offsets(), table[["value", "residual"]])


def test_typical_row_is_made_of_values_that_occur():
    frame = pd.DataFrame(
        {
            "n": [1, 2, 3, 10],
            "x": [0.5, np.nan, 1.5, 2.5],
            "ward": ["b", "a", "b", None],
            "old": [True, True, False, True],
        }
    )
    frame["kind"] = pd.Categorical(["u", "v", "v", "v"])
    row = views.typical_row(frame)
    assert row.iloc[0].to_dict() == {"n": 2, "x": 1.5, "ward": "b", "old": True, "kind": "v"}
    assert row.dtypes.equals(frame.dtypes)


@pytest.mark.parametrize(
    ("values", "expected", "curve"),
    [
        (["b", "a", "b", None], ["a", "b"], False),
        ([True, False, True], [False, True], False),
        ([3.0, 1.0, 3.0, np.nan], [1.0, 3.0], False),
        (list(range(101)), [1, 50, 99], True),
        ([x / 100 for x in range(101)], [0.01, 0.5, 0.99], True),
    ],
)
def test_where_to_look_along_a_column(values, expected, curve):
    found, is_curve = views.values_along(pd.Series(values, name="x"), 3)
    assert is_curve is curve
    assert found.tolist() == (pytest.approx(expected) if curve else expected)


def test_unusual_is_by_standard_deviations_and_by_mahalanobis(data):
    X = data[0]
    found = views.Outlyingness(X)
    z = ((X - X.mean()) / X.std(ddof=0)).iloc[5]
    name = z.abs().idxmax()
    assert found.extremes(5, 1) == [(name, X.iloc[5][name], pytest.approx(z[name]))]
    inverse = np.linalg.inv(np.cov(X.to_numpy().T))
    distance = [scipy.spatial.distance.mahalanobis(x, X.mean(), inverse) for x in X.to_numpy()]
    nearer = [found.rarity(k) for k in range(len(X))]
    np.testing.assert_allclose(nearer, scipy.stats.rankdata(distance, "min") / len(X) - 1 / len(X))
