"""More than two classes beyond the estimator: formulas, the command line, scores, the report, the service."""

import json

import numpy as np
import pandas
import pytest
import sklearn.metrics as scikit
from sklearn.datasets import load_iris
from sklearn.metrics import confusion_matrix, log_loss, roc_auc_score
from typer.testing import CliRunner

import viper
from viper import metrics
from viper.cli.app import app
from viper.errors import FormulaError

SPECIES = ["setosa", "versicolor", "virginica"]


@pytest.fixture(scope="module")
def flowers():
    frame = load_iris(as_frame=True).frame
    frame.columns = ["sepal_length", "sepal_width", "petal_length", "petal_width", "species"]
    return frame.assign(species=np.array(SPECIES)[frame["species"]])


@pytest.fixture(scope="module")
def folder(flowers, tmp_path_factory):
    path = tmp_path_factory.mktemp("flowers")
    flowers.to_csv(path / "iris.csv", index=False)
    found = viper_command(
        "fit", path / "iris.csv", "--target", "species", "--cv", 2, "--out", path / "m.viper", "--json"
    )
    (path / "fit.json").write_text(found)
    return path


def viper_command(*arguments, status=0):
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert (done.exit_code == 0) == (status == 0), done.output
    return done.stdout if status == 0 else done.output


@pytest.fixture(scope="module")
def model(folder):
    return viper.load(folder / "m.viper")


# --- formulas ---


def test_a_formula_is_the_fit_to_its_columns(flowers, model):
    formula = viper.VariationalLogisticRegression.from_formula("species ~ .", flowers)
    X = formula.formula_.encode(flowers)
    plain = viper.VariationalLogisticRegression().fit(X, flowers["species"])
    np.testing.assert_array_equal(formula.predict_proba(flowers), plain.predict_proba(X))
    np.testing.assert_allclose(model.predict_proba(flowers), formula.predict_proba(flowers), rtol=1e-9)
    assert formula.classes_.tolist() == SPECIES


def test_methods_for_two_classes_refuse_more(flowers):
    fit = viper.VariationalLogisticRegression.from_formula
    with pytest.raises(FormulaError, match="positive names the one of two classes"):
        fit("species ~ .", flowers, positive="setosa")


# --- scores, against scikit-learn ---


def test_scores_are_those_of_scikit_learn(flowers, model):
    p, y = model.predict_proba(flowers), load_iris().target
    weight = np.random.default_rng(0).integers(1, 4, len(y))
    for given in (None, weight):
        found = metrics.class_scores(y, p, model.predict_interval(flowers), sample_weight=given)
        assert found.log_score == pytest.approx(-log_loss(y, p, sample_weight=given), rel=1e-12)
        assert found.accuracy == pytest.approx(np.average(p.argmax(1) == y, weights=given), rel=1e-14)
        each = [roc_auc_score(y == k, p[:, k], sample_weight=given) for k in range(3)]
        assert found.auc == pytest.approx(np.mean(each), rel=1e-12)
        brier = np.square(p - np.eye(3)[y]).sum(1)
        assert found.brier == pytest.approx(np.average(brier, weights=given), rel=1e-12)
    repeated = np.repeat(np.arange(len(y)), weight)
    rows = metrics.class_scores(y[repeated], p[repeated])
    weighed = metrics.class_scores(y, p, sample_weight=weight)
    for name in ("log_score", "brier", "auc", "accuracy", "log_skill", "brier_skill", "base_accuracy"):
        assert getattr(rows, name) == pytest.approx(getattr(weighed, name), rel=1e-10)
    np.testing.assert_array_equal(metrics.confusion_table(y, p), confusion_matrix(y, p.argmax(1)))


def test_two_classes_score_as_before():
    generator = np.random.default_rng(1)
    p = generator.random(200)
    y = (generator.random(200) < p).astype(int)
    two, many = metrics.scores(y == 1, p), metrics.class_scores(y, np.column_stack([1 - p, p]))
    for name in ("log_score", "auc", "accuracy", "log_skill", "brier_skill"):
        assert getattr(many, name) == pytest.approx(getattr(two, name), rel=1e-10)
    assert many.brier == pytest.approx(2 * two.brier, rel=1e-12)


def test_wrong_predictions_are_refused():
    with pytest.raises(ValueError, match="sum to 1"):
        metrics.class_scores([0, 1], [[0.5, 0.4], [0.5, 0.5]])
    with pytest.raises(ValueError, match="from 0 to 1"):
        metrics.class_scores([0, 2], [[0.5, 0.5], [0.5, 0.5]])
    with pytest.raises(ValueError, match="a column for each class"):
        metrics.class_scores([0, 1], [0.5, 0.5])


# --- the command line ---


def test_fit_prints_scores_and_coefficients_of_each_class(folder, model, flowers):
    document = json.loads((folder / "fit.json").read_text())
    assert document["classes"] == SPECIES
    table = model.summary()
    for row in document["coefficients"]:
        assert row["mean"] == pytest.approx(table.loc[(row["class"], row["column"]), "mean"], rel=1e-12)
    assert {"log_score", "brier", "auc", "accuracy", "calibration_error"} <= {*document["scores"]}
    shown = viper_command("summary", folder / "m.viper")
    assert document["multilabel"] is False
    assert "species, 3 classes" in shown
    assert "virginica: petal_width" in shown


def test_predictions_are_those_of_the_model(folder, model, flowers):
    viper_command("predict", folder / "m.viper", folder / "iris.csv", "--out", folder / "p.csv", "--force")
    written = pandas.read_csv(folder / "p.csv")
    columns = [f"probability_{name}" for name in SPECIES]
    np.testing.assert_allclose(written[columns], model.predict_proba(flowers), rtol=1e-12)
    ends = written[["lower_setosa", "upper_setosa"]]
    np.testing.assert_allclose(ends, model.predict_interval(flowers)[:, 0], rtol=1e-9)
    assert written["label"].tolist() == model.predict(flowers).tolist()
    assert written.columns[0] == "label"
    assert written.columns[-2:].tolist() == ["distance", "note"]


def test_evaluation_is_that_of_the_probabilities(folder, model, flowers):
    document = json.loads(viper_command("evaluate", folder / "m.viper", folder / "iris.csv", "--json"))
    p, y = model.predict_proba(flowers), load_iris().target
    assert document["log_score"] == pytest.approx(-log_loss(y, p), rel=1e-10)
    confused = pandas.DataFrame(document["confusion"]).T.to_numpy()
    np.testing.assert_array_equal(confused, confusion_matrix(y, p.argmax(1)))
    assert set(document["classes"]) == {*SPECIES}
    text = viper_command("evaluate", folder / "m.viper", folder / "iris.csv")
    assert "Confusion matrix" in text
    assert "are for two classes" in viper_command(
        "evaluate", folder / "m.viper", folder / "iris.csv", "--threshold", 0.5, status=2
    )


def test_models_are_compared_by_the_probabilities_of_all_classes(folder):
    only = ["--only", "LogisticRegression", "--only", "share"]
    found = json.loads(viper_command("compare", folder / "iris.csv", "--target", "species", "--cv", 2, *only, "--json"))
    best, worst = found["results"]
    assert best["model"] == "sklearn LogisticRegression"
    assert worst["log_score"] == pytest.approx(-np.log(3), rel=1e-6)  # the classes are equally common
    assert worst["log_score_difference"] == pytest.approx(worst["log_score"] - best["log_score"], rel=1e-9)
    assert worst["log_score_clearly_worse"]


def test_the_report_shows_every_class(folder):
    viper_command("report", folder / "m.viper", folder / "iris.csv", "--out", folder / "r.html", "--force")
    page = (folder / "r.html").read_text(encoding="utf-8")
    for heading in ("What is confused", "Do its percentages come true?", "The coefficients", "Model card"):
        assert heading in page
    for name in SPECIES:
        assert page.count(name) > 3


def test_the_service_answers_for_every_class(model):
    from viper.cli.commands.serve import Limits, ServedColumns, answer_rows, openapi_document

    columns = ServedColumns(model)
    row = columns.example()
    answer = answer_rows(model, columns, json.dumps({"rows": [row]}).encode(), Limits(10, 1.0))
    expected = model.predict_proba(pandas.DataFrame([row]))[0]
    assert [answer["predictions"][0][f"probability_{name}"] for name in SPECIES] == expected.tolist()
    schema = json.dumps(openapi_document(columns, Limits(10, 1.0)))
    assert all(f"upper_{name}" in schema for name in SPECIES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "sepal_length"], "must have a few classes, with several rows each"),
        (["--target", "species", "--positive", "setosa"], "one of two classes"),
    ],
)
def test_what_cannot_be_fitted_is_one_line(folder, arguments, message):
    said = viper_command("fit", folder / "iris.csv", *arguments, status=1)
    assert message in " ".join(said.split())


# --- ArviZ ---


def test_arviz_holds_draws_of_every_class(flowers):
    pytest.importorskip("arviz_base")
    fitted = viper.VariationalLogisticRegression.from_formula("species ~ .", flowers)
    tree = fitted.to_arviz(draws=500, chains=2, random_state=0)
    coefficient = tree["posterior"]["coefficient"]
    assert coefficient.dims == ("chain", "draw", "class", "feature")
    assert coefficient["class"].values.tolist() == SPECIES
    draws = coefficient.to_numpy().reshape(1000, 3, 4)
    np.testing.assert_allclose(draws.sum(1), 0.0, atol=1e-12)  # centred over classes
    sd = fitted.summary()["sd"].to_numpy().reshape(3, 5)[:, :4]
    assert (np.abs(draws.mean(0) - fitted.coef_) < 5 * sd / np.sqrt(1000)).all()
    ratio = (tree["sample_stats"]["lp"] - tree["sample_stats"]["log_q"]).to_numpy().ravel()
    evidence = np.log(np.mean(np.exp(ratio - ratio.max()))) + ratio.max()
    assert evidence == pytest.approx(fitted.diagnose().log_evidence, abs=0.3)  # two sets of draws
    assert evidence > fitted.elbo_ - 0.3
    rows = tree["log_likelihood"]["y"].to_numpy().reshape(1000, 150)
    intercept = tree["posterior"]["intercept"].to_numpy().reshape(1000, 3, 1)
    f = draws @ fitted.formula_.encode(flowers).to_numpy().T + intercept
    own = np.take_along_axis(f, load_iris().target[None, None], 1)[:, 0] - np.log(np.exp(f).sum(1))
    np.testing.assert_allclose(rows, own, rtol=1e-9, atol=1e-12)


# --- pictures ---


def test_pictures_of_every_class_or_one_line(flowers, model):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from viper import plot

    names = [text.get_text() for text in plot.forest(model).get_yticklabels()]
    assert len(names) == 12
    assert any(name.startswith("virginica: petal_width (per sd") for name in names)
    curves = plot.reliability(model, flowers, flowers["species"]).get_legend().get_texts()
    assert [text.get_text() for text in curves] == SPECIES
    for drawn in (plot.observations, plot.net_benefit):
        with pytest.raises(ValueError, match="for two classes; got a model of 3"):
            drawn(model, flowers, flowers["species"])
    with pytest.raises(ValueError, match="for two classes"):
        metrics.predictive_check(model, flowers, flowers["species"])


# --- effects, and several labels ---


def test_effects_of_every_class(folder, model, flowers):
    found = json.loads(viper_command("effects", folder / "m.viper", folder / "iris.csv", "--json"))
    assert found["probability_of"] == "a row is in the class"
    average = {row["class"]: row["estimate"] for row in found["averages"]}
    for name, p in zip(model.classes_, model.predict_proba(flowers).mean(0), strict=True):
        assert average[name] == pytest.approx(p, abs=1e-9)


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("labels"), np.random.default_rng(0)
    X = pandas.DataFrame(rng.normal(size=(120, 2)), columns=["a", "b"])
    Y = pandas.DataFrame({"urgent": X["a"] + rng.logistic(size=120) > 1, "spam": X["b"] > rng.logistic(size=120)})
    fit = viper.VariationalLogisticRegression().fit(X, Y.astype(int))
    fit.save(folder / "labels.viper")
    X.join(Y.astype(int)).to_csv(folder / "labels.csv", index=False)
    return folder, fit, X, Y.astype(int)


def test_scores_of_labels_are_those_of_scikit_learn(labels):
    folder, fit, X, Y = labels
    found = json.loads(viper_command("evaluate", folder / "labels.viper", folder / "labels.csv", "--json"))
    p, said = fit.predict_proba(X), fit.predict(X)
    assert found["exact"] == pytest.approx(fit.score(X, Y))
    assert found["hamming_loss"] == pytest.approx(scikit.hamming_loss(Y, said))
    assert found["f1_macro"] == pytest.approx(scikit.f1_score(Y, said, average="macro"))
    assert found["f1_micro"] == pytest.approx(scikit.f1_score(Y, said, average="micro"))
    ranked = scikit.label_ranking_average_precision_score(Y, p)
    assert found["ranking_precision"] == pytest.approx(ranked)
    assert found["auc"] == pytest.approx(scikit.roc_auc_score(Y, p, average="macro"))
    for j, name in enumerate(Y):
        own = found["labels"][name]
        assert own["f1"] == pytest.approx(scikit.f1_score(Y[name], said[:, j]))
        assert own["recall"] == pytest.approx(scikit.recall_score(Y[name], said[:, j]))
        assert own["average_precision"] == pytest.approx(scikit.average_precision_score(Y[name], p[:, j]))
    weight = np.arange(120) % 3
    twice, counted = np.repeat(np.arange(120), weight), metrics.label_scores(Y, p, sample_weight=weight)
    again = metrics.label_scores(Y.to_numpy()[twice], p[twice])
    assert counted.f1_macro == pytest.approx(again.f1_macro)
    assert counted.ranking_precision == pytest.approx(again.ranking_precision)


def test_one_label_is_a_model_of_two_classes(labels):
    folder, fit, X, Y = labels
    given = folder / "labels.viper", folder / "labels.csv", "--target", "spam"
    found = json.loads(viper_command("evaluate", *given, "--json", "--threshold", 0.4))
    assert found["brier"] == pytest.approx(np.square(fit.predict_proba(X)[:, 1] - Y["spam"]).mean())
    assert "decision" in found
    viper_command("report", *given, "--out", folder / "report.html")
    assert "spam = 1" in (folder / "report.html").read_text(encoding="utf-8")
    told = viper_command("evaluate", *given[:3], "spma", status=1)
    assert "--target must be one of the labels" in told
    told = viper_command("report", *given[:2], "--out", folder / "other.html", status=1)
    assert "--target must name one of the labels of the model" in told
    told = viper_command("evaluate", *given[:2], "--by", "a", status=2)
    assert "Name one of them by --target" in told


def test_wrong_labels_are_refused(labels):
    folder, _, X, Y = labels
    X.join(Y.replace({1: 2})).to_csv(folder / "wrong.csv", index=False)
    told = viper_command("evaluate", folder / "labels.viper", folder / "wrong.csv", status=1)
    assert "column 'urgent' must be 1 for rows with that label and 0 for the others; got '2'" in told
    with pytest.raises(ValueError, match="label must be 0 or 1"):
        metrics.label_scores([[0, 2]], [[0.5, 0.5]])
    with pytest.raises(ValueError, match="a column for each label"):
        metrics.each_label([0, 1], [0.5, 0.5])
