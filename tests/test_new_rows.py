"""New rows against the training data: distances, rows without a prediction and why, rules for new values, drift."""

import pickle

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from scipy.stats import chi2_contingency

import viper
from viper.errors import FormulaError
from viper.formula.drift import DriftCounter, column_drift
from viper.formula.screening import MARGIN, screen_rows
from viper.report.study import left_out_reasons

FORMULA = "y ~ bs(age, df=4) + log(dose) + ward + weight"


def patients(n=400, seed=0):
    rng = np.random.default_rng(seed)
    made = {"age": rng.uniform(20, 90, n), "dose": rng.lognormal(size=n), "ward": rng.choice(["a", "b", "c"], n)}
    frame = pd.DataFrame(made | {"weight": rng.normal(70, 10, n)})
    frame["y"] = np.where(rng.random(n) < 1 / (1 + np.exp(-(frame["age"] - 55) / 15)), "yes", "no")
    return frame


FRAME = patients()


@pytest.fixture(scope="module")
def model():
    return viper.VariationalLogisticRegression.from_formula(FORMULA, FRAME, missing="mean")


# --- distance ---


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_the_distance_is_the_leverage_relative_to_the_farthest_training_row(covariance):
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(300, 4)), rng.integers(0, 2, 300)
    fitted = viper.VariationalLogisticRegression(covariance=covariance).fit(X, y)
    new = rng.normal(size=(20, 4)) * 10.0 ** rng.integers(-1, 4, (20, 1))
    leverage = lambda rows: np.einsum("ij,jk,ik->i", rows, fitted.covariance_, rows)  # noqa: E731
    ones = lambda rows: np.column_stack([rows, np.ones(len(rows))])  # noqa: E731
    expected = np.sqrt(leverage(ones(new)) / leverage(ones(X)).max())
    table = fitted.predict_table(new)
    np.testing.assert_allclose(table["distance"], expected, rtol=1e-9)
    np.testing.assert_array_equal(table["note"] != "", expected > 1 + MARGIN)
    assert fitted.predict_table(X)["distance"].max() == pytest.approx(1.0, rel=1e-12)
    np.testing.assert_allclose(table["probability"], fitted.predict_proba(new)[:, 1], rtol=1e-12)
    np.testing.assert_allclose(table[["lower", "upper"]], fitted.predict_interval(new), rtol=1e-12)


def test_the_distance_outlives_the_training_rows(tmp_path):
    X, y = FRAME[["age", "weight"]], FRAME["y"]
    fitted = viper.VariationalLogisticRegression().fit(X, y)
    fitted.save(tmp_path / "m.viper")
    for copy in (pickle.loads(pickle.dumps(fitted)), viper.load(tmp_path / "m.viper")):
        pd.testing.assert_frame_equal(copy.predict_table(X * 3), fitted.predict_table(X * 3))


@pytest.mark.parametrize("form", [np.asarray, torch.from_numpy, scipy.sparse.csr_matrix, np.ndarray.tolist])
def test_every_form_of_rows_has_a_table(form):
    X, y = FRAME[["age", "weight"]].to_numpy(), FRAME["y"]
    fitted = viper.VariationalLogisticRegression().fit(X, y)
    pd.testing.assert_frame_equal(fitted.predict_table(form(X[:9])), fitted.predict_table(X)[:9])


def test_a_second_fit_has_its_own_distance():
    X, y = FRAME[["age", "weight"]].to_numpy(), FRAME["y"]
    once = viper.VariationalLogisticRegression().fit(X, y)
    assert once.predict_table(X[:1] * 1000)["distance"][0] > 100
    again = once.fit(X * 1000, y)
    assert again.predict_table(X[:1] * 1000)["distance"][0] < 1


def test_a_gaussian_process_has_distances_too():
    X, y = FRAME[["age", "weight"]].to_numpy(), FRAME["y"]
    fitted = viper.VariationalGPClassifier(n_inducing=8, n_starts=1, tol=1.0, random_state=0).fit(X, y)
    distance = fitted.predict_table(X)["distance"]
    assert distance.max() == pytest.approx(1.0, rel=1e-6)
    sd = fitted.predict_latent(X)[1]
    np.testing.assert_allclose(distance, sd / sd.max(), rtol=1e-6)


def test_values_a_thousand_times_too_large_are_noted(model):
    new = FRAME[:5].assign(weight=FRAME["weight"] * 1000)
    table = model.predict_table(new)
    assert (table["distance"] > 50).all()
    assert table["note"].str.contains("weight = ").all()
    assert table["note"].str.contains("is far above the training data, ").all()
    assert table["note"].str.contains("times as far out as the farthest row of the training data").all()


def test_rows_like_the_training_data_are_hardly_ever_noted(model):
    noted = (model.predict_table(patients(5000, seed=3).query("20.5 < age < 89.5"))["note"] != "").mean()
    assert noted < 0.01


# --- rows without a prediction ---


def broken_rows():
    new = (
        patients(10, seed=5)
        .assign(age=lambda t: t["age"].clip(25, 85))
        .astype({"age": object, "dose": object})
        .set_axis(range(100, 110))
    )
    new.loc[101, "age"] = 61000.0
    new.loc[102, "ward"] = "Z"
    new.loc[103, "age"] = None
    new.loc[104, "dose"] = -1.0
    new.loc[105, "age"] = "abc"
    new.loc[106, "dose"] = np.inf
    return new


REASONS = {
    101: "no prediction: age = 61000 is beyond the range of bs(age, df=4); age = 61000 is far above",
    102: "no prediction: ward = 'Z' is not in the training data",
    104: "no prediction: log(dose) has no value for dose = -1",
    105: "no prediction: age = 'abc' is not a number",
    106: "no prediction: dose = inf is not a number",
}


def test_each_row_that_cannot_be_predicted_says_why_and_the_others_are_predicted(model):
    new = broken_rows()
    table = model.predict_table(new)
    assert list(table.columns) == ["probability", "sd", "lower", "upper", "label", "distance", "note"]
    for row, reason in REASONS.items():
        assert table["note"][row].startswith(reason)
        assert table.loc[row].drop("note").isna().all()
    assert table["note"][103] == "age is filled in"
    good = new.drop(index=list(REASONS)).astype({"age": float, "dose": float})
    np.testing.assert_allclose(table.loc[good.index, "probability"], model.predict_proba(good)[:, 1], rtol=1e-12)
    assert table.loc[good.index, "label"].tolist() == model.predict(good).tolist()


def test_durations_where_the_model_had_numbers_are_one_clear_error():
    fitted = viper.VariationalLogisticRegression.from_formula("y ~ age + ward", FRAME)
    with pytest.raises(FormulaError, match="column 'age' must be numeric or text; got durations"):
        fitted.predict_table(FRAME.head(5).assign(age=pd.to_timedelta(range(5), unit="h")))


def test_without_a_rule_that_fills_in_missing_values_leave_a_row_empty():
    fitted = viper.VariationalLogisticRegression.from_formula("y ~ age + ward", FRAME, missing="drop")
    table = fitted.predict_table(FRAME[:3].assign(age=[np.nan, 50, 60], ward=["a", None, "b"]))
    assert table["note"].tolist() == ["no prediction: age is missing", "no prediction: ward is missing", ""]
    assert table["probability"].isna().tolist() == [True, True, False]


def test_a_bad_date_costs_one_row_and_a_later_one_is_no_drift():
    days = pd.to_datetime("2024-01-01") + pd.to_timedelta(np.arange(400) % 365, "D")
    dated = FRAME.assign(came=days.strftime("%Y-%m-%d"))
    fitted = viper.VariationalLogisticRegression.from_formula("y ~ weight + month(came)", dated, missing="drop")
    new = dated[:3].assign(came=["2031-05-05", "soon", None])
    table = fitted.predict_table(new)
    reasons = ["no prediction: came = 'soon' is not a date", "no prediction: came is missing"]
    assert table["note"].tolist() == ["", *reasons]
    np.testing.assert_allclose(table["probability"][0], fitted.predict_proba(new[:1])[0, 1], rtol=1e-12)
    assert [one.column for one in column_drift(fitted.formula_, new)] == ["weight"]
    assert fitted.card()["columns"][1]["low"] == "2024-01-01"


def test_a_table_in_which_nothing_can_be_predicted(model):
    table = model.predict_table(FRAME[:3].assign(ward="Z"))
    assert table["probability"].isna().all()
    assert table["note"].str.startswith("no prediction: ward = 'Z'").all()


def test_long_notes_end():
    wide = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 6)), columns=list("abcdef"))
    fitted = viper.VariationalLogisticRegression.from_formula(
        "y ~ a + b + c + d + e + f", wide.assign(y=np.arange(60) % 2)
    )
    (note,) = fitted.predict_table(wide[:1] * 0 + 1e6)["note"]
    assert note.count("is far above") == 3
    assert note.endswith("; and 4 more")  # three columns and the distance


# --- rules ---


def test_an_unseen_level_counts_as_the_rule_says(model):
    new = FRAME[:4].assign(ward=["Z", "a", "Z", "b"])
    for rule, level in (("baseline", "a"), ("missing", None)):
        table = model.predict_table(new, unseen=rule)
        same = new.assign(ward=new["ward"].replace({"Z": level}))
        np.testing.assert_allclose(table["probability"], model.predict_proba(same)[:, 1], rtol=1e-12)
        assert table["note"][0].startswith(f"ward = 'Z' is new and counts as {repr(level) if level else 'missing'}")
        fitted = viper.VariationalLogisticRegression.from_formula(FORMULA, FRAME, missing="mean", unseen=rule)
        np.testing.assert_allclose(fitted.predict_proba(new), model.predict_proba(same), rtol=1e-9)
    with pytest.raises(FormulaError, match=r"column 'ward' must be one of .* got 'Z' in row 0"):
        model.predict_proba(new)


def test_a_number_beyond_a_spline_is_clamped_if_asked(model):
    new = FRAME[:3].assign(age=[150.0, 5.0, 50.0])
    table = model.predict_table(new, beyond="clamp")
    same = new.assign(age=new["age"].clip(FRAME["age"].min(), FRAME["age"].max()))
    np.testing.assert_allclose(table["probability"], model.predict_proba(same)[:, 1], rtol=1e-9)
    assert "beyond the range of bs(age, df=4), which is taken at its end" in table["note"][0]
    assert table["note"][2] == ""
    with pytest.raises(FormulaError, match="must be finite"):
        model.predict_proba(new)
    assert model.predict_table(new)["probability"].isna().tolist() == [True, True, False]
    # a logarithm of a negative number has no nearest value
    assert model.predict_table(new.assign(dose=-1.0), beyond="clamp")["probability"].isna().all()


def test_rules_are_stored_and_kept_by_clones(tmp_path):
    fitted = viper.VariationalLogisticRegression.from_formula(
        FORMULA, FRAME, missing="mean", unseen="baseline", beyond="clamp"
    )
    fitted.save(tmp_path / "m.viper")
    loaded = viper.load(tmp_path / "m.viper")
    from sklearn.base import clone

    for one in (loaded, clone(fitted).fit(FRAME)):
        assert (one.formula_.unseen, one.formula_.beyond) == ("baseline", "clamp")


@pytest.mark.parametrize(("name", "rule"), [("unseen", "guess"), ("beyond", "error")])
def test_unknown_rules_are_refused(model, name, rule):
    with pytest.raises(FormulaError, match=f"{name} must be one of"):
        viper.VariationalLogisticRegression.from_formula(FORMULA, FRAME, **{name: rule})
    with pytest.raises(FormulaError, match=f"{name} must be one of"):
        model.predict_table(FRAME, **{name: rule})
    plain = viper.VariationalLogisticRegression().fit(FRAME[["age"]], FRAME["y"])
    with pytest.raises(ValueError, match=f"{name} is a rule of formulas"):
        plain.predict_table(FRAME[["age"]], **{name: "missing" if name == "unseen" else "clamp"})


def test_draws_of_missing_values_can_be_noted_too():
    holes = FRAME.assign(age=FRAME["age"].where(np.arange(len(FRAME)) % 7 > 0))
    fitted = viper.VariationalLogisticRegression.from_formula(
        "y ~ age + weight + ward", holes, missing="multiple", imputations=2, sweeps=2
    )
    table = fitted.predict_table(holes[:8])
    assert (table["note"] == "age is filled in").tolist() == [True, *[False] * 6, True]
    np.testing.assert_allclose(table["probability"], fitted.predict_proba(holes[:8])[:, 1], rtol=1e-12)
    assert np.isfinite(table["distance"]).all()


# --- drift ---


def test_the_index_is_the_sum_of_both_divergences(model):
    new = patients(700, seed=9).assign(weight=lambda t: t["weight"].clip(50, 90) + 5)
    (drift,) = (one for one in column_drift(model.formula_, new) if one.column == "weight")
    cuts = model.formula_.training.columns["weight"].cuts
    low, high = model.formula_.training.columns["weight"].wide_range(MARGIN)
    edges = [-np.inf, *np.nextafter(cuts, np.inf), np.inf]
    assert new["weight"].between(low, high).all()
    before, after = (np.histogram(t["weight"], edges)[0] for t in (FRAME, new))
    q, p = ((x + 0.5) / (x + 0.5).sum() for x in (before, after))
    assert drift.psi == pytest.approx(float(p @ np.log(p / q) + q @ np.log(q / p)))
    assert drift.p_value == pytest.approx(3 * chi2_contingency([before, after], correction=False).pvalue)
    assert drift.shift == pytest.approx((new["weight"].mean() - FRAME["weight"].mean()) / FRAME["weight"].std(ddof=0))
    assert drift.verdict == "major"


def test_the_same_population_has_not_moved(model):
    for seed in range(20, 60):
        for rows in (10, 200):
            assert not [one for one in column_drift(model.formula_, patients(rows, seed)) if one.moved]


@pytest.mark.parametrize(
    ("change", "column"),
    [
        (lambda t: t.assign(weight=t["weight"] * 1000), "weight"),
        (lambda t: t.assign(weight=t["weight"] + 10), "weight"),
        (lambda t: t.assign(weight=t["weight"].where(np.arange(len(t)) % 5 > 0)), "weight"),
        (lambda t: t.assign(ward="Z"), "ward"),
        (lambda t: t.assign(ward="a"), "ward"),
        (lambda t: t.assign(age=t["age"] / 2 + 10), "age"),
    ],
)
def test_what_has_moved_is_found_and_nothing_else(model, change, column):
    moved = [one for one in column_drift(model.formula_, change(patients(300, seed=11))) if one.moved]
    assert [one.column for one in moved] == [column]


def test_a_tiny_difference_in_many_rows_is_not_drift():
    big = patients(40_000, seed=1)
    fitted = viper.VariationalLogisticRegression.from_formula("y ~ weight", big)
    (drift,) = column_drift(fitted.formula_, patients(40_000, seed=2).assign(weight=lambda t: t["weight"] + 1))
    assert drift.p_value < 1e-6
    assert not drift.moved


def test_parts_add_up(model):
    new = patients(300, seed=11).assign(ward="Z")
    counter = DriftCounter(model.formula_)
    for start in range(0, 300, 70):
        counter.add(new[start : start + 70])
    for one, other in zip(counter.result(), column_drift(model.formula_, new), strict=True):
        assert one[0] == other[0]
        assert one[1:-1] == pytest.approx(other[1:-1])


def test_a_model_without_a_record_has_no_drift(model):
    from dataclasses import replace

    bare = replace(model.formula_, training=None)
    assert column_drift(bare, FRAME) == []
    assert screen_rows(bare, FRAME).remarks == []


def test_a_row_whose_log_odds_overflow_costs_itself_only():
    """Even if only a product of columns is too large; 1e140 is not."""
    fitted = viper.VariationalLogisticRegression.from_formula("y ~ age*weight + ward", FRAME)
    good = FRAME.head(5).drop(columns="y")
    bad = good.assign(age=[1e200, -1e308, 1e90, 1e140, 50.0], weight=[70.0, 70.0, 1e90, 70.0, None])
    table = fitted.predict_table(pd.concat([good, bad], ignore_index=True))
    np.testing.assert_allclose(table["probability"][:5], fitted.predict_proba(good)[:, 1], rtol=1e-12)
    assert table["probability"][5:].isna().tolist() == [True, True, True, False, True]
    notes = table["note"].tolist()
    assert notes[5].startswith("no prediction: age = 1e+200 is too large to compute with")
    assert notes[6].startswith("no prediction: age:weight has no value for age = -1e+308 and weight = 70")
    assert notes[7].startswith("no prediction: age = 1e+90 is too large to compute with")
    assert notes[9].startswith("no prediction: weight is missing")
    data = pd.concat([FRAME.head(60), bad.head(1).assign(y="no")], ignore_index=True)
    reasons = left_out_reasons(fitted, data, data.drop(columns="y"), "y")
    assert reasons == [None] * 60 + ["with age too large to compute with"]
