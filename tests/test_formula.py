"""Formulas: the matrix is formulaic's, the encoding survives a file, and nothing in a file can run."""

import json
import pickle
import re
from dataclasses import replace

import formulaic
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.base import clone
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from tolerances import TOLERANCE

import viper
from viper import VariationalGPClassifier, VariationalLogisticRegression
from viper.data import model_file
from viper.errors import FormulaError, StorageError
from viper.formula.encoding import Encoding
from viper.formula.grammar import parse_formula, tokenize
from viper.formula.learn import learn_formula

GENERATOR = np.random.default_rng(0)
ROWS = 120
FRAME = pd.DataFrame(
    {
        "y": GENERATOR.choice(["no", "yes"], ROWS),
        "age": GENERATOR.normal(50.0, 10.0, ROWS),
        "ward": GENERATOR.choice(["north", "east", "west"], ROWS),
        "mean r": GENERATOR.normal(size=ROWS),
        "grade": GENERATOR.integers(1, 4, ROWS),
        "log": GENERATOR.random(ROWS) + 1.0,
    }
)
FRAME.loc[0, "mean r"] = 5.0


def holed(**cells):
    frame = FRAME.copy()
    for name, rows in cells.items():
        frame[name] = frame[name].astype(object)
        frame.loc[rows, name] = None
        frame[name] = frame[name].infer_objects()
        if name in ("age", "log"):
            frame[name] = frame[name].astype(float)
    return frame


def stored(encoding):
    """The encoding after a journey through JSON."""
    return Encoding.from_state(json.loads(json.dumps(encoding.to_state())))


# --- the matrix ---

FORMULAS = {
    "plain": "age + `mean r`",
    "categories": "age + C(ward) + C(grade)",
    "text is a category": "ward + age",
    "interaction": "age + ward + age:ward",
    "crossed": "C(ward) * `mean r`",
    "nested": "age / ward",
    "no intercept": "0 + ward + age",
    "minus one": "age - 1",
    "power": "(age + ward + grade)^2 - age:ward",
    "functions": "log(age) + log1p(grade) + exp(`mean r`) + sqrt(age) + abs(`mean r`)",
    "arithmetic": "I(age**2) + log(age + 2 * grade) + I(-age / grade)",
    "learned": "center(age) + scale(`mean r`) + poly(age, 3) + bs(age, df=5)",
    "learned of a function": "center(log(age)):ward",
}


@pytest.mark.parametrize("right", FORMULAS.values(), ids=FORMULAS)
def test_the_matrix_is_formulaics(right):
    context = {"log1p": np.log1p, "sqrt": np.sqrt, "abs": np.abs}
    data = FRAME.drop(columns=["y", "log"])
    expected = (
        formulaic.Formula(right).get_model_matrix(data, context=context).drop(columns="Intercept", errors="ignore")
    )
    X = learn_formula(f"y ~ {right}", FRAME).X
    assert sorted(name.replace("`", "") for name in expected) == sorted(X)
    expected.columns = [name.replace("`", "") for name in expected]
    np.testing.assert_allclose(X, expected[list(X)], rtol=1e-14, atol=1e-14)


def test_a_power_in_a_call_may_be_written_as_in_r():
    in_r, in_python = (learn_formula(f"y ~ I(age{sign}2) + ward", FRAME).X for sign in ("^", "**"))
    np.testing.assert_array_equal(in_r, in_python)
    np.testing.assert_array_equal(in_r["I(age ** 2)"], FRAME["age"] ** 2)


def test_a_stored_power_of_one_column_still_loads():
    """Earlier versions took age^2, which is age."""
    state = learn_formula("y ~ age + ward", FRAME).encoding.to_state()
    X = Encoding.from_state(state | {"formula": "y ~ age^2 + ward"}).encode(FRAME)
    np.testing.assert_array_equal(X["age"], FRAME["age"])


@pytest.mark.parametrize("right", FORMULAS.values(), ids=FORMULAS)
def test_an_encoding_from_a_file_gives_the_same_rows(right):
    learned = learn_formula(f"y ~ {right}", FRAME, standardize=True)
    part = FRAME.drop(columns="y").iloc[5:9]
    np.testing.assert_array_equal(stored(learned.encoding).encode(part), learned.X.iloc[5:9])
    assert stored(learned.encoding) == learned.encoding


def test_a_table_may_be_polars_arrow_or_a_dictionary():
    learned = learn_formula("y ~ age + ward + C(grade)", FRAME)
    tables = (pl.from_dict(FRAME.to_dict("list")), pa.Table.from_pandas(FRAME), FRAME.to_dict("list"))
    for table in tables:
        np.testing.assert_array_equal(learned.encoding.encode(table), learned.X)


def test_dot_is_every_other_column():
    assert learn_formula("y ~ . - log", FRAME).encoding.formula == "y ~ age + ward + `mean r` + grade"
    squared = learn_formula("y ~ (.)^2", FRAME[["y", "age", "grade"]])
    assert list(squared.X) == ["age", "grade", "age:grade"]


def test_a_column_may_be_called_like_a_function():
    np.testing.assert_array_equal(learn_formula("y ~ log(log)", FRAME).X["log(log)"], np.log(FRAME["log"]))


def test_treatment_names_the_reference():
    learned = learn_formula('y ~ C(ward, Treatment("west"))', FRAME)
    assert list(learned.X) == ["C(ward)[T.east]", "C(ward)[T.north]"]
    assert set(learned.encoding.units.values()) == {"vs west"}
    with pytest.raises(FormulaError, match="must be one of"):
        learn_formula('y ~ C(ward, Treatment("wset"))', FRAME)


def test_standardised_columns_have_mean_0_and_sd_1_but_indicators_stay():
    learned = learn_formula("y ~ age + `mean r`:ward + ward", FRAME, standardize=True)
    indicator = learned.X.columns.str.startswith("ward[")
    assert set(np.unique(learned.X.loc[:, indicator])) == {0.0, 1.0}
    np.testing.assert_allclose(learned.X.loc[:, ~indicator].mean(), 0.0, atol=1e-14)
    np.testing.assert_allclose(learned.X.loc[:, ~indicator].std(ddof=0), 1.0)
    assert learned.encoding.units["age"] == f"sd, {FRAME['age'].std(ddof=0):.3g}"


def test_without_an_intercept_nothing_is_centred():
    learned = learn_formula("y ~ 0 + age", FRAME, standardize=True)
    np.testing.assert_allclose(learned.X["age"] * FRAME["age"].std(ddof=0), FRAME["age"])


# --- missing values ---


def test_missing_values_are_an_error_with_counts():
    with pytest.raises(FormulaError, match="got 2 in 'age', 1 in 'ward' in 120 rows"):
        learn_formula("y ~ age + ward", holed(age=[1, 2], ward=[3]))


def test_dropped_rows_are_those_with_holes():
    learned = learn_formula("y ~ age + ward", holed(age=[1, 2], ward=[2, 3]), "drop")
    assert np.flatnonzero(~learned.kept).tolist() == [1, 2, 3]
    np.testing.assert_array_equal(learned.X["age"], FRAME["age"].drop([1, 2, 3]))
    with pytest.raises(FormulaError, match=r"rows must have no missing values; got 1 in 'age', the first in row 7\."):
        learned.encoding.encode(holed(age=[7]))


def test_means_and_common_levels_are_filled_in_and_stored():
    frame = holed(age=[1, 2], ward=[3], y=[4])
    learned = learn_formula("y ~ age + C(ward)", frame, "mean")
    assert learned.kept.sum() == ROWS - 1
    mean = frame["age"].drop(4).mean()
    assert learned.X.loc[1, "age"] == pytest.approx(mean)
    new = stored(learned.encoding).encode(pd.DataFrame({"age": [np.nan], "ward": [None]}))
    common = frame["ward"].drop(4).mode()[0]
    same = learned.encoding.encode(pd.DataFrame({"age": [mean], "ward": [common]}))
    np.testing.assert_allclose(new, same, rtol=TOLERANCE["roundoff"])


@pytest.mark.parametrize("missing", ["drop", "mean"])
def test_pandas_nullable_columns_are_numbers(missing):
    """Int64, Float64 and boolean give the matrix of float64 and of Python's booleans, with holes and without."""
    smoker = pd.Series(GENERATOR.random(ROWS) < 0.4)
    plain = FRAME.assign(grade=FRAME["grade"].astype(float), smoker=smoker.astype(object))
    holes = plain.copy()
    holes.loc[[1, 2], "grade"], holes.loc[3, "age"], holes.loc[[4, 5], "smoker"] = np.nan, np.nan, None
    for frame in (plain, holes):
        nullable = frame.astype({"grade": "Int64", "age": "Float64", "smoker": "boolean"})
        assert learn_formula("y ~ grade + age + smoker", frame, missing).X.equals(
            (learned := learn_formula("y ~ grade + age + smoker", nullable, missing)).X
        )
        assert missing == "drop" or stored(learned.encoding).encode(nullable).equals(learned.X)


def test_labels_stay_whole_when_some_are_missing():
    frame = FRAME.assign(y=(FRAME["y"] == "yes").astype(float))
    frame.loc[3, "y"] = np.nan
    assert learn_formula("y ~ age", frame, "drop").y.dtype == np.int64


# --- estimators ---

SMALL_PROCESS = {"mean": "constant", "n_inducing": 8, "n_starts": 1}


@pytest.mark.parametrize("estimator", [VariationalLogisticRegression, VariationalGPClassifier])
def test_from_formula_is_fit_on_the_encoded_columns_and_survives_a_file(estimator, tmp_path):
    options = {} if estimator is VariationalLogisticRegression else SMALL_PROCESS
    model = estimator.from_formula("y ~ center(age) + C(ward)", FRAME, random_state=0, **options)
    X = learn_formula("y ~ center(age) + C(ward)", FRAME, standardize=estimator is VariationalLogisticRegression).X
    plain = estimator(random_state=0, **options).fit(X, FRAME["y"].to_numpy())
    np.testing.assert_array_equal(model.predict_proba(FRAME), plain.predict_proba(X))
    model.save(tmp_path / "m.viper")
    loaded = viper.load(tmp_path / "m.viper")
    assert loaded.formula_ == model.formula_
    for method in ("predict", "predict_proba", "predict_interval", "predict_std", "decision_function"):
        np.testing.assert_array_equal(getattr(loaded, method)(FRAME), getattr(model, method)(FRAME))
    assert loaded.elbo(FRAME, FRAME["y"]) == pytest.approx(model.elbo_)


def test_columns_are_standardised_by_default():
    for options, wanted in ({}, True), ({"standardize": False}, False):
        model = VariationalLogisticRegression.from_formula("y ~ age + log", FRAME, **options)
        spread = model.formula_.encode(FRAME).std(ddof=0)
        assert np.allclose(spread, 1.0) == wanted


def test_poly_survives_a_file(tmp_path):
    model = VariationalLogisticRegression.from_formula("y ~ poly(age, 3)", FRAME)
    model.save(tmp_path / "m.viper")
    np.testing.assert_array_equal(viper.load(tmp_path / "m.viper").predict_proba(FRAME), model.predict_proba(FRAME))


def test_the_formula_says_whether_there_is_an_intercept():
    assert VariationalLogisticRegression.from_formula("y ~ 0 + age", FRAME).intercept_ == 0.0
    with pytest.raises(FormulaError, match="the formula must say whether there is an intercept"):
        VariationalLogisticRegression.from_formula("y ~ age", FRAME, fit_intercept=False)


def test_weights_follow_their_rows():
    weight = GENERATOR.random(ROWS)
    frame = holed(age=[0, 5])
    model = VariationalLogisticRegression.from_formula("y ~ age", frame, missing="drop", sample_weight=weight)
    kept = frame["age"].notna()
    again = VariationalLogisticRegression.from_formula("y ~ age", frame[kept], sample_weight=weight[kept])
    np.testing.assert_array_equal(model.coef_, again.coef_)


def test_long_lists_say_how_many_more_there_are():
    frame = FRAME[["y"]].assign(**{f"column{k}": 0.0 for k in range(20)})
    with pytest.raises(FormulaError, match=r"Choose one of 'y', 'column0', .* 'column6' and 13 more."):
        parse_formula("y ~ nothing", frame.columns, [])
    model = VariationalLogisticRegression.from_formula("y ~ age", FRAME)
    with pytest.raises(FormulaError, match=r"none named 'age'. It has 'y', .* 'column6' and 13 more."):
        model.predict(frame)


# --- learned again ---


def same(model, other, frame=FRAME):
    np.testing.assert_allclose(model.predict_proba(frame), other.predict_proba(frame), rtol=0, atol=1e-10)


@pytest.mark.parametrize("estimator", [VariationalLogisticRegression, VariationalGPClassifier])
def test_clones_learn_the_formula_anew(estimator):
    options = {"random_state": 0} | (SMALL_PROCESS if estimator is VariationalGPClassifier else {})
    model = estimator.from_formula("y ~ age + ward", FRAME, **options)
    part = FRAME[FRAME["ward"] != "east"]
    copied = pickle.loads(pickle.dumps(clone(clone(model))))
    expected = estimator.from_formula("y ~ age + ward", part, **options)
    for fitted in (copied.fit(part, part["y"]), clone(model).fit(part), model.fit(part)):
        assert fitted.formula_.levels == {"ward": ["north", "west"]}
        assert fitted.formula_.centre == expected.formula_.centre
        same(fitted, expected, part)


def test_models_from_before_the_rule_was_kept_standardise_again():
    model = VariationalLogisticRegression.from_formula("y ~ age", FRAME)
    fitted = model.formula_
    model.formula_ = replace(fitted, standardize=False)  # as it is read from such a file
    assert clone(model).fit(FRAME).formula_.scale == fitted.scale


@pytest.mark.parametrize("standardize", [True, False])
def test_the_target_is_not_a_feature_in_cross_validation(standardize):
    frame = FRAME.assign(target=GENERATOR.integers(0, 2, ROWS))
    given = {"standardize": standardize}
    model = VariationalLogisticRegression.from_formula("target ~ age + grade", frame, **given)
    scores = cross_val_score(model, frame, frame["target"], scoring="neg_log_loss", cv=KFold(3))
    expected = []
    for train, test in KFold(3).split(frame):
        fold = VariationalLogisticRegression.from_formula("target ~ age + grade", frame.iloc[train], **given)
        expected.append(-log_loss(frame["target"].iloc[test], fold.predict_proba(frame.iloc[test])))
    np.testing.assert_allclose(scores, expected, rtol=1e-10)


def test_a_grid_search_keeps_the_formula():
    model = VariationalLogisticRegression.from_formula("y ~ age + ward", FRAME)
    search = GridSearchCV(model, {"prior_scale": [0.1, 1.0]}, cv=3).fit(FRAME, FRAME["y"])
    best = search.best_estimator_
    assert best.formula_.inputs == ["age", "ward"]
    same(best, VariationalLogisticRegression.from_formula("y ~ age + ward", FRAME, **search.best_params_))


def test_fit_again_takes_other_labels_and_keeps_the_rule(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")  # the date of a fit is recorded
    frame = holed(age=[0, 5])
    model = VariationalLogisticRegression.from_formula("y ~ age + grade", frame, missing="drop")
    model.save(tmp_path / "model.viper")
    other = pd.Series(frame["age"].fillna(50.0) > 50.0, index=frame.index[::-1])  # by position, not by index
    for fitted in (model, viper.load(tmp_path / "model.viper")):
        fitted.fit(frame.drop(columns="y"), other, sample_weight=np.ones(ROWS))
        by_hand = VariationalLogisticRegression.from_formula(
            "y ~ age + grade", frame.assign(y=other.to_numpy()), missing="drop"
        )
        assert fitted.formula_ == by_hand.formula_
        same(fitted, by_hand, FRAME)


def test_a_fit_that_fails_leaves_the_formula():
    model = VariationalLogisticRegression.from_formula("y ~ age + grade", FRAME)
    for X, y, words in (
        (FRAME[["age", "log"]].to_numpy(), FRAME["y"], "needs a table with named columns"),
        (FRAME, FRAME["y"][1:], f"the same number of rows; got {ROWS} and {ROWS - 1}"),
        (FRAME, np.zeros(ROWS), "at least two classes"),
        (FRAME.drop(columns="y"), None, "name columns of the data; got 'y'"),
    ):
        with pytest.raises(ValueError, match=words):
            model.fit(X, y)
    assert model.formula_.inputs == ["age", "grade"]
    with pytest.raises(FormulaError, match="the formula must say"):
        model.set_params(fit_intercept=False).fit(FRAME)
    with pytest.raises(ValueError, match="Call fit first"):
        clone(model).partial_fit(FRAME, FRAME["y"])


def test_without_the_formula_an_estimator_is_a_new_one():
    model = VariationalLogisticRegression.from_formula("y ~ age + grade", FRAME)
    plain = type(model)(**model.get_params()).fit(FRAME[["age", "log"]], FRAME["y"])
    assert not hasattr(plain, "formula_")


# --- refused ---

REFUSED = {
    "no text": (3, "a formula must be text; got int"),
    "no ~": ("age", "must have one ~; got 0"),
    "two ~": ("y ~ age ~ grade", "must have one ~; got 2"),
    "no target": ("~ age", "left side of ~ must be the target"),
    "a call as target": ("log(y) ~ age", "left side of ~ must be the target"),
    "no terms": ("y ~", "must have terms"),
    "only the intercept": ("y ~ 1", "at least one column"),
    "unknown column": ("y ~ agee", "got 'agee'. Did you mean 'age'?"),
    "a name like none": ("y ~ wad + xyy", "got 'wad'. Did you mean 'ward'?"),
    "unlike any other": ("y ~ logger", "got 'logger'. Choose one of 'y', 'age', 'ward', 'mean r', 'grade', 'log'."),
    "itself": ("y ~ age + y", "must not explain itself"),
    "open bracket": ("y ~ C(ward", "every bracket"),
    "sum without end": ("y ~ age +", "must be followed by a term"),
    "number as term": ("y ~ 2 * age", "must be terms joined by"),
    "function of text": ("y ~ log(ward)", "got 'ward', a column of text"),
    "table before formula": (FRAME, "a formula must be text; got DataFrame."),
    "open backtick": ("y ~ `age", "got '`age'"),
    "a million interactions": ("y ~ (age + grade + `mean r` + log + ward)^10", "may have at most 10,000 terms"),
    "a huge power": ("y ~ I(9**9**9**9)", "must be a function of columns and numbers"),
    "a tower of powers": (
        "y ~ I(age + (((((9**10)**10)**10)**10)**10)**10)",
        "must be a function of columns and numbers",
    ),
    "a large degree": ("y ~ poly(age, 50)", "degree of poly() must be at most 10"),
    "a square outside of a call": ("y ~ grade + age**2", "got age**…, which is age itself. Write I(age**2), or poly"),
    "a square in a product": ("y ~ ward:`mean r`^2", "Write I(`mean r`**2), or poly(`mean r`, 2)."),
    "brackets in a name": ("y ~ mean (r) + age", "must be in `backticks`; got mean r. Write `mean r`."),
    "half a name": ("y ~ mean + age", "Did you mean 'mean r'? Put names with blanks or signs in `backticks`."),
    "import": ("y ~ __import__('os')", "functions in a formula must be C, log"),
    "import in a call": ("y ~ log(__import__('os'))", "must contain columns and numbers"),
    "attribute": ("y ~ age.values", "got it after 'age'"),
    "attribute in a call": ("y ~ I(age.values)", "must"),
    "lambda": ("y ~ (lambda: 1)()", "must name columns"),
    "comprehension": ("y ~ I([age for age in log])", "got '["),
    "braces": ("y ~ {age.values}", "got '{age"),
    "numpy": ("y ~ np.load(age)", "must"),
    "numpy's logarithm": ("y ~ grade + np.log(age + 1)", "got np.log(). Write log(age + 1)."),
    "keyword": ("y ~ log(age, out=age)", "must be a function of columns and numbers"),
    "unpacked": ("y ~ log(*age)", "must be a function of columns and numbers"),
    "a function of formulaic's": ("y ~ hashed(ward, levels=3)", "got hashed()"),
    "condition": ("y ~ I(age if age else grade)", "must name columns"),
    "second statement": ("y ~ age; import os", "got '; import os'"),
    "string that ends": ("y ~ C(ward, Treatment('a\") + x(\"'))", "must be one of"),
}


@pytest.mark.parametrize(("formula", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(formula, message):
    with pytest.raises(FormulaError) as caught:
        learn_formula(formula, FRAME)
    assert message in str(caught.value)


ENCODE = {
    "absent": (FRAME.drop(columns="age"), "must have the columns of the fit; got none named 'age'"),
    "no table": (np.zeros((3, 2)), "needs a table with named columns; got numpy.ndarray"),
    "text for numbers": (FRAME.assign(age="old"), "column 'age' must be numeric; got 'old' in row 0"),
    "infinite": (FRAME.assign(age=np.inf), "column 'age' must be finite; got inf in row 0"),
    "new level": (FRAME.assign(ward="south"), "column 'ward' must be one of ['east', 'north', 'west'], as in the fit"),
    "beyond the spline": (FRAME.assign(**{"mean r": 99.0}), "bs(mean r, df=4)[1] must be finite; got nan in row 0"),
    "no logarithm": (FRAME.assign(age=-1.0), "log(age) must be finite; got nan in row 0"),
}


@pytest.mark.parametrize(("table", "message"), ENCODE.values(), ids=ENCODE)
def test_tables_that_do_not_fit(table, message):
    encoding = learn_formula("y ~ log(age) + C(ward) + bs(`mean r`, df=4)", FRAME).encoding
    with pytest.raises(FormulaError) as caught:
        encoding.encode(table)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([1, 2], "needs a table with named columns; got list. Pass"),
        (None, "needs a table with named columns; got None. Pass"),
        (FRAME["age"], "needs a table with named columns; got pandas.Series. Pass"),
        (FRAME[[]], "a formula needs a table with columns; got none. Pass the columns that the formula names."),
        ({}, "a formula needs a table with columns; got none. Pass the columns that the formula names."),
    ],
)
def test_what_is_no_table_is_named(table, message):
    with pytest.raises(FormulaError, match=re.escape(message)):
        learn_formula("y ~ age", table)


def test_dates_and_mixtures_are_refused():
    with pytest.raises(FormulaError, match="must be numeric"):
        learn_formula("y ~ when", FRAME.assign(when=pd.Timestamp(0)))
    with pytest.raises(FormulaError, match="got int, str"):
        learn_formula("y ~ C(mix)", FRAME.assign(mix=["a", 1] * (ROWS // 2)))


def test_numbers_are_the_text_they_are_written_as():
    frame = FRAME.assign(grade=FRAME["grade"].astype(str))
    encoding = learn_formula("y ~ grade", frame).encoding
    for kind in (int, float, object):
        assert encoding.encode(FRAME.astype({"grade": kind})).equals(encoding.encode(frame))
    with pytest.raises(FormulaError, match=r"must be one of \['1', '2', '3'\], as in the fit; got 7"):
        encoding.encode(FRAME.assign(grade=7))


# --- files ---


def test_a_file_cannot_run_code(tmp_path):
    proof = tmp_path / "proof"
    model = VariationalLogisticRegression.from_formula("y ~ age + C(ward)", FRAME)
    model.save(tmp_path / "good.viper")
    kind, tensors, metadata = model_file.read_tensors(tmp_path / "good.viper")
    evil = f"__import__('pathlib').Path({str(proof)!r}).touch()"
    attacks = [
        {"formula": f"y ~ age + C(ward) + {evil}"},
        {"formula": f"y ~ age + {{{evil}}}"},
        {"formula": f"y ~ log({evil})"},
        {"columns": ["y", "age", evil]},
        {"columns": ["y", "age", f"`+{evil}+`"], "formula": f"y ~ age + `{evil}`"},
        {"levels": {"ward": evil}},
        {"levels": {evil: ["a"]}},
        {"transforms": evil},
        {"names": [evil]},
        {"scale": [evil, 1.0, 1.0]},
        {"missing": evil},
        {"unknown": evil},
    ]
    for number, attack in enumerate(attacks):
        path = tmp_path / f"{number}.viper"
        model_file.write_tensors(path, kind, tensors, metadata | {"formula": metadata["formula"] | attack})
        with pytest.raises(StorageError):
            viper.load(path)
    assert not proof.exists()


def test_levels_that_look_like_code_are_text():
    evil = '"]; import os; os.abort() #'
    frame = FRAME.assign(ward=np.where(FRAME["ward"] == "east", evil, "b"))
    learned = learn_formula("y ~ C(ward)", frame)
    np.testing.assert_array_equal(stored(learned.encoding).encode(frame), learned.X)


def test_tokens_cover_what_they_came_from():
    assert [text for _, text in tokenize(" y~a1 + `b c`**2:log( 1.5e-3 , d=.5)")] == [
        *["y", "~", "a1", "+", "b c", "**", "2", ":", "log", "(", "1.5e-3", ",", "d", "=", ".5", ")"]
    ]


def test_plain_columns_do_not_pass_through_formulaic():
    parsed = parse_formula("y ~ a + b + b:c", ["y", "a", "b", "c"], [])
    assert parsed.plain == ("a",)
    assert sorted(parsed.variables.values()) == ["b", "c"]


def test_columns_named_like_constants():
    """`True` in a call is the column, not the number one."""
    table = pd.DataFrame({"True": [3.0, 5.0, 7.0, 9.0], "x": [1.0, 0.0, 1.0, 2.0], "y": [0, 1, 0, 1]})
    learned = learn_formula("y ~ I(`True` + 1) + x", table)
    np.testing.assert_array_equal(learned.X.filter(like="True").to_numpy()[:, 0], table["True"] + 1)
