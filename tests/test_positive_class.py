"""Which class the probability is of: chosen, in the order of categories, or the last in order."""

import json

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import get_scorer
from sklearn.model_selection import cross_val_predict, cross_val_score
from tolerances import TOLERANCE

import viper
from viper.errors import FormulaError

RNG = np.random.default_rng(3)
X = RNG.normal(size=200)
CASE = RNG.random(200) < 1 / (1 + np.exp(-2 * X))
FRAME = pd.DataFrame({"x": X, "y": np.where(CASE, "case", "control")})
Logistic = viper.VariationalLogisticRegression


def fitted(y=None, **options):
    return Logistic.from_formula("y ~ x", FRAME if y is None else FRAME.assign(y=y), **options)


def same_up_to_the_sign(model, other):
    np.testing.assert_allclose(model.coef_, -other.coef_, rtol=TOLERANCE["converged"])
    np.testing.assert_allclose(
        model.predict_proba(FRAME), other.predict_proba(FRAME)[:, ::-1], rtol=TOLERANCE["converged"]
    )


def test_the_positive_class_turns_every_sign():
    alphabetical, chosen = fitted(), fitted(positive="case")
    assert alphabetical.classes_.tolist() == ["case", "control"]
    assert chosen.classes_.tolist() == ["control", "case"]
    same_up_to_the_sign(chosen, alphabetical)
    assert (chosen.predict(FRAME) == alphabetical.predict(FRAME)).all()
    np.testing.assert_allclose(chosen.elbo(FRAME, FRAME["y"]), alphabetical.elbo_, rtol=TOLERANCE["converged"])


@pytest.mark.parametrize("ordered", [False, True])
def test_categories_keep_their_order(ordered):
    model = fitted(pd.Categorical(FRAME["y"], ["control", "unused", "case"], ordered=ordered))
    assert model.classes_.tolist() == ["control", "case"]
    same_up_to_the_sign(model, fitted())
    assert fitted(pd.Categorical(FRAME["y"], ["control", "case"]), positive="control").classes_[1] == "control"


@pytest.mark.parametrize(
    ("labels", "positive", "expected"),
    [
        ((False, True), False, [True, False]),
        ((False, True), "false", [True, False]),
        ((0, 1), 0, [1, 0]),
        ((0, 1), "0", [1, 0]),
        ((0.5, 2.0), 0.5, [2.0, 0.5]),
        (("9", "10"), None, ["9", "10"]),  # text in the order of the numbers
        (("9", "10"), "9", ["10", "9"]),
        (("yes", "no"), "no", ["yes", "no"]),
    ],
)
def test_any_kind_of_label(labels, positive, expected):
    model = fitted(np.where(CASE, *labels), positive=positive)
    assert model.classes_.tolist() == expected
    assert set(model.predict(FRAME)) == set(labels)


def test_an_unknown_class():
    with pytest.raises(FormulaError, match=r"positive must be one of the classes of 'y', 'case', 'control'; got 'ill'"):
        fitted(positive="ill")


def test_it_is_stored_and_learned_again(tmp_path):
    model = fitted(positive="case")
    model.save(tmp_path / "m.viper")
    loaded = viper.load(tmp_path / "m.viper")
    assert loaded.classes_.tolist() == ["control", "case"]
    np.testing.assert_array_equal(loaded.predict_proba(FRAME), model.predict_proba(FRAME))
    assert loaded.fit(FRAME).classes_.tolist() == ["control", "case"]


def test_gaussian_process():
    options = {"n_inducing": 5, "mean": "constant", "random_state": 0}
    one, other = (
        viper.VariationalGPClassifier.from_formula("y ~ x", FRAME, positive=p, **options) for p in ("case", "control")
    )
    assert one.classes_.tolist() == ["control", "case"]
    # the search for a kernel begins at other random points
    np.testing.assert_allclose(one.predict_proba(FRAME), other.predict_proba(FRAME)[:, ::-1], atol=1e-3)


@pytest.mark.parametrize("scoring", ["neg_log_loss", "roc_auc", "accuracy"])
def test_scikit_learn_scores_do_not_depend_on_it(scoring):
    alphabetical, chosen = fitted(), fitted(positive="case")
    scores = [cross_val_score(model, FRAME, FRAME["y"], scoring=scoring, cv=3) for model in (alphabetical, chosen)]
    np.testing.assert_allclose(scores[0], scores[1], rtol=TOLERANCE["converged"])
    if scoring != "accuracy":
        score = get_scorer(scoring)
        np.testing.assert_allclose(score(chosen, FRAME, CASE), score(alphabetical, FRAME, FRAME["y"]), rtol=1e-9)


def test_scikit_learn_predicts_in_its_own_order():
    of = [
        cross_val_predict(m, FRAME, FRAME["y"], method="predict_proba", cv=3)
        for m in (fitted(), fitted(positive="case"))
    ]
    np.testing.assert_allclose(*of, rtol=TOLERANCE["converged"])


def test_command_line(command):
    FRAME.to_csv("t.csv", index=False)
    code, out, err = command("fit", "t.csv", "--target", "y", "--positive", "case", "--out", "m.viper", "--json")
    assert code == 0, err
    record = json.loads(out)
    assert record["classes"] == ["control", "case"]
    assert record["scores"]["auc"] > 0.7
    assert json.loads(command("evaluate", "m.viper", "t.csv", "--json")[1])["auc"] > 0.7
    assert command("predict", "m.viper", "t.csv", "--out", "p.csv")[2].endswith("with the probability of y = case.")
    expected = fitted(positive="case", random_state=1).predict_proba(FRAME)[:, 1]
    np.testing.assert_allclose(pd.read_csv("p.csv")["probability"], expected, rtol=TOLERANCE["converged"])
    code, _, err = command("fit", "t.csv", "--target", "y", "--positive", "ill")
    assert code == 3
    assert "positive must be one of the classes of 'y'" in err


HOLES = [None, *[bool(x) for x in CASE[1:]]]


@pytest.mark.parametrize("missing", ["drop", "mean"])
@pytest.mark.parametrize(
    "labels",
    [
        HOLES,
        pd.array(HOLES, dtype="boolean"),
        pd.array([None, *CASE[1:].astype(int)], dtype="Int64"),
        [np.nan, *CASE[1:].astype(float)],
    ],
    ids=["objects", "boolean", "Int64", "float"],
)
def test_labels_with_holes_keep_their_type(labels, missing, command):
    model = fitted(labels, missing=missing)
    expected = Logistic.from_formula("y ~ x", FRAME.assign(y=CASE)[1:])
    assert model.classes_.tolist() == [0, 1]
    assert model.classes_.dtype.kind in "bi"
    np.testing.assert_allclose(model.coef_, expected.coef_, rtol=TOLERANCE["converged"])
    FRAME.assign(y=labels).to_csv("t.csv", index=False)
    code, out, err = command("fit", "t.csv", "--target", "y", "--missing", missing, "--json")
    assert code == 0, err
    assert json.loads(out)["data"]["rows_used"] == 199
