"""Average predictions, contrasts and slopes: closed forms, numerical derivatives, many draws, and other libraries."""

import json
import re
import shlex

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from pages import ROOT, blocks_of, difference
from scipy.special import expit, ndtr

import viper
from viper.cli import main
from viper.models import effects
from viper.models.notebook import notebook_card
from viper.report import views, words
from viper.report.average_section import average_section
from viper.report.sections import drivers_section
from viper.report.study import read_study
from viper.report.views import AverageEffect

Logistic = viper.VariationalLogisticRegression
MANY = 50_000  # draws of a brute-force comparison: their standard error is 0.4 % of an sd, 1.2 % at the ends
ENDS = 0.04  # of an sd: agreement of the ends of intervals, for 10,000 draws against MANY


@pytest.fixture(scope="module")
def patients():
    rng = np.random.default_rng(0)
    n = 300
    frame = pd.DataFrame(
        {
            "age": rng.normal(50, 12, n).round(),
            "sex": rng.choice(["female", "male"], n),
            "dose": rng.lognormal(0, 0.5, n),
            "ward": rng.choice(["east", "north", "west"], n),
            "treated": rng.integers(0, 2, n),
        }
    )
    male = frame["sex"] == "male"
    log_odds = 0.04 * (frame["age"] - 50) * male + 0.8 * male + np.log(frame["dose"]) - 0.7 * frame["treated"]
    frame["died"] = np.where(rng.random(n) < expit(log_odds), "yes", "no")
    return frame


@pytest.fixture(scope="module")
def model(patients):
    return Logistic.from_formula("died ~ bs(age, df=4)*sex + log(dose) + ward + treated", patients, random_state=0)


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(150, 4)) * [1.0, 5.0, 0.1, 1.0]
    y = rng.random(150) < expit(X @ [1.0, -0.2, 3.0, 0.0] - 0.5)
    return X, y, Logistic(prior_scale=[2.0, 1.0, 20.0, 2.0]).fit(X, y)


def draws_of_average(model, frame, count=MANY):
    """Average probabilities of draws of the coefficients, without anything of the module under test."""
    X = model.formula_.encode(frame).to_numpy()
    coefficients = model.sample(count, random_state=5)
    parts = np.array_split(coefficients, max(1, count // 5000))
    return np.concatenate([expit(part[:, :-1] @ X.T + part[:, -1:]).mean(1) for part in parts])


def assert_summarises(row, draws):
    sd = draws.std()
    assert row["sd"] == pytest.approx(sd, rel=0.01)
    assert row["estimate"] == pytest.approx(draws.mean(), abs=0.02 * sd)
    assert row["lower"] == pytest.approx(np.quantile(draws, 0.025), abs=ENDS * sd)
    assert row["upper"] == pytest.approx(np.quantile(draws, 0.975), abs=ENDS * sd)


# --- closed forms ---


def test_average_of_one_row_is_its_prediction(arrays):
    X, _, model = arrays
    for row in X[:5]:
        found = model.average([row]).loc[0]
        assert found["estimate"] == pytest.approx(model.predict_proba([row])[0, 1], rel=1e-13)
        assert found["sd"] == pytest.approx(model.predict_std([row])[0], rel=0.01)
        # between draws, the ends are interpolated
        assert [found["lower"], found["upper"]] == pytest.approx(model.predict_interval([row])[0], rel=3e-3)


def test_estimate_is_the_mean_of_the_predictions(model, patients):
    probability = model.predict_proba(patients)[:, 1]
    assert model.average(patients).loc[0, "estimate"] == pytest.approx(probability.mean(), rel=1e-13)
    groups = model.average(patients, by="ward").set_index("ward")["estimate"]
    assert groups.to_dict() == pytest.approx(pd.Series(probability).groupby(patients["ward"]).mean().to_dict())


def test_contrast_of_a_saturated_model_is_that_of_two_cells():
    """One binary column: f₀ and f₁ are two correlated normals, integrated by quadrature in two dimensions."""
    x = np.repeat([0.0, 1.0], [40, 30])
    y = np.r_[np.arange(40) < 12, np.arange(30) < 18]
    model = Logistic(prior_scale=100.0, intercept_scale=100.0).fit(x[:, None], y)
    found = model.contrast(x[:, None]).loc[0]
    nodes, weight = np.polynomial.hermite_e.hermegauss(40)
    z = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2)
    w = np.outer(weight, weight).ravel() / weight.sum() ** 2
    beta = model.posterior_.mean.numpy() + z @ model.posterior_.factor.numpy().T
    change = expit(beta.sum(1)) - expit(beta[:, 1])
    mean = w @ change
    assert found["contrast"] == "1 - 0"
    assert found["estimate"] == pytest.approx(mean, rel=1e-10)
    assert found["estimate"] == pytest.approx(18 / 30 - 12 / 40, abs=0.01)  # the prior is nearly flat
    assert found["sd"] == pytest.approx(np.sqrt(w @ (change - mean) ** 2), rel=2e-3)
    # the difference has the sign of the coefficient
    slope, sd = model.coef_[0, 0], np.sqrt(model.covariance_[0, 0])
    assert found["p_direction"] == pytest.approx(ndtr(slope / sd), abs=1e-3)
    np.testing.assert_allclose(
        effects.probability_of_direction(np.array([[-1.0, 2.0, -3.0]]), np.array([0.1]), np.ones(1)), 2 / 3
    )


def test_ratios_compare_the_same_two_averages(model, patients):
    low, high = (draws_of_average(model, patients.assign(treated=value)) for value in (0, 1))
    for measure, draws in {"ratio": high / low, "odds": high / (1 - high) * (1 - low) / low}.items():
        found = model.contrast(patients, "treated", measure=measure).loc[0]
        assert found["contrast"] == "1 / 0"
        sd = draws.std()
        assert found["estimate"] == pytest.approx(np.median(draws), abs=0.02 * sd)
        assert found["sd"] == pytest.approx(sd, rel=0.03)
        assert [found["lower"], found["upper"]] == pytest.approx(np.quantile(draws, [0.025, 0.975]), abs=0.05 * sd)
        assert found["p_direction"] == pytest.approx(np.mean(draws < 1), abs=0.005)


# --- derivatives ---


def test_slopes_are_derivatives_of_the_average_prediction(arrays):
    X, _, model = arrays
    found = model.slopes(X).set_index("variable")["estimate"]
    for j in range(4):
        h = 1e-3 * X[:, j].std()
        ends = [model.predict_proba(X + s * h * np.eye(4)[j])[:, 1].mean() for s in (-2, -1, 1, 2)]
        derivative = (ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / (12 * h)  # error of order h⁴
        assert found[f"x{j}"] == pytest.approx(derivative, rel=1e-7)


def test_slopes_go_through_splines_and_logarithms(model, patients):
    inside = patients[patients["age"].between(30, 70)]
    found = model.slopes(patients, ["age", "dose"], at={"sex": "male"}).set_index("variable")["estimate"]
    same = {}
    for name, h in {"age": 1e-4, "dose": 1e-6}.items():
        low, high = (inside.assign(**{name: inside[name] + s * h, "sex": "male"}) for s in (-1, 1))
        same[name] = (model.predict_proba(high)[:, 1] - model.predict_proba(low)[:, 1]).mean() / (2 * h)
    at_inside = model.slopes(inside, ["age", "dose"], at={"sex": "male"}).set_index("variable")["estimate"]
    assert at_inside.to_dict() == pytest.approx(same, rel=1e-5)
    assert np.isfinite(found).all()  # also at the ends of the spline, where one side is missing


# --- many draws ---


def test_contrasts_of_a_formula_agree_with_many_draws(model, patients):
    found = model.contrast(patients, ["sex", "ward", "dose"]).set_index(["variable", "contrast"])
    sides = {
        ("sex", "male - female"): ({"sex": "female"}, {"sex": "male"}),
        ("ward", "west - east"): ({"ward": "east"}, {"ward": "west"}),
        ("dose", "+0.5"): ({}, {"dose": patients["dose"] + 0.5}),
    }
    for name, (low, high) in sides.items():
        draws = draws_of_average(model, patients.assign(**high)) - draws_of_average(model, patients.assign(**low))
        assert_summarises(found.loc[name], draws)


def test_intervals_have_no_more_noise_than_many_draws(model, patients):
    """The linear part has no sampling noise, so that few draws do nearly as well as many."""
    ends = [model.contrast(patients, "sex", draws=400, random_state=s).loc[0, ["lower", "upper"]] for s in range(8)]
    sd = model.contrast(patients, "sex").loc[0, "sd"]
    plain = np.sqrt(0.025 * 0.975 / 400) / 0.0584  # standard error of a normal quantile, in sds
    assert np.std(np.array(ends, dtype=float), axis=0).max() < 0.6 * plain * sd


@pytest.mark.parametrize(("covariance", "columns"), [("diagonal", 4), ("full", 60)])
def test_other_shapes_of_the_posterior(covariance, columns):
    rng = np.random.default_rng(2)
    X = rng.normal(size=(30, columns))
    model = Logistic(covariance=covariance).fit(X, X[:, 0] + rng.normal(size=30) > 0)
    moved = X.copy()
    moved[:, 0] += 1.0
    coefficients = model.sample(MANY, random_state=3)
    low, high = (expit(coefficients[:, :-1] @ rows.T + coefficients[:, -1:]).mean(1) for rows in (X, moved))
    assert_summarises(model.contrast(X, {0: 1.0}).loc[0], high - low)


def test_gaussian_process_agrees_with_its_joint_draws():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, size=(120, 2))
    y = rng.random(120) < expit(2 * np.sin(2 * X[:, 0]) + X[:, 1])
    model = viper.VariationalGPClassifier(n_inducing=8, mean="constant", n_starts=1, random_state=0).fit(X, y)
    rows = X[:60]
    low, high = rows.copy(), rows.copy()
    low[:, 0], high[:, 0] = -0.5, 0.8
    probability = expit(model.sample(np.concatenate([low, high]), n=40_000, random_state=1))
    draws = probability[:, 60:].mean(1) - probability[:, :60].mean(1)
    # the process is averaged over hyperparameters and far from linear: the ends need more draws than usual
    assert_summarises(model.contrast(rows, {0: [-0.5, 0.8]}, draws=100_000).loc[0], draws)
    h = 1e-3
    ends = [model.predict_proba(rows + np.array([[s * h, 0.0]]))[:, 1].mean() for s in (-1, 1)]
    assert model.slopes(rows, 0).loc[0, "estimate"] == pytest.approx((ends[1] - ends[0]) / (2 * h), rel=1e-5)


# --- rows, groups and weights ---


def test_weights_count_rows(model, patients):
    times = np.arange(len(patients)) % 3
    weighted = model.contrast(patients, "sex", sample_weight=times)
    repeated = model.contrast(patients.loc[patients.index.repeat(times)], "sex")
    columns = ["estimate", "sd", "lower", "upper"]
    np.testing.assert_allclose(weighted[columns], repeated[columns], rtol=1e-10)


def test_groups_are_subsets(model, patients):
    found = model.contrast(patients, "treated", by=["sex", "ward"]).set_index(["sex", "ward"])
    assert len(found) == 6
    for (sex, ward), row in found.iterrows():
        some = patients[(patients["sex"] == sex) & (patients["ward"] == ward)]
        alone = model.contrast(some, "treated", draws=10_000).loc[0]
        assert row["estimate"] == pytest.approx(alone["estimate"], rel=1e-12)
        assert row["sd"] == pytest.approx(alone["sd"], rel=1e-10)


def test_given_values_replace_columns_in_every_row(model, patients):
    found = model.average(patients, at={"sex": ["female", "male"], "age": [40, 60]}, by="treated")
    assert found[["sex", "age", "treated"]].drop_duplicates().shape == (8, 3)
    row = found[(found["sex"] == "male") & (found["age"] == 60) & (found["treated"] == 1)].iloc[0]
    rows = patients[patients["treated"] == 1].assign(sex="male", age=60)
    assert row["estimate"] == pytest.approx(model.predict_proba(rows)[:, 1].mean(), rel=1e-12)


def test_contrast_among_the_treated(model, patients):
    """Grouped by the column itself, as for the effect on the treated: groups are those of the observed rows."""
    found = model.contrast(patients, "treated", by="treated").set_index("treated")["estimate"]
    some = patients[patients["treated"] == 1]
    low, high = (model.predict_proba(some.assign(treated=value))[:, 1].mean() for value in (0, 1))
    assert found[1] == pytest.approx(high - low, rel=1e-10)


def test_forms_of_the_same_rows_agree(arrays):
    X, y, model = arrays
    expected = model.contrast(X, {1: 2.0, 3: [0.0, 1.0]})
    assert list(expected["variable"]) == ["x1", "x3"]
    assert list(expected["contrast"]) == ["+2", "1 - 0"]
    pd.testing.assert_frame_equal(model.contrast(scipy.sparse.csr_array(X), {1: 2.0, 3: [0.0, 1.0]}), expected)
    frame = pd.DataFrame(X, columns=list("abcd"))
    named = Logistic(prior_scale=[2.0, 1.0, 20.0, 2.0]).fit(frame, y).contrast(frame, {"b": 2.0, "d": [0.0, 1.0]})
    pd.testing.assert_frame_equal(named.drop(columns="variable"), expected.drop(columns="variable"))


def test_offsets_move_the_log_odds(arrays):
    X, _, model = arrays
    offset = np.linspace(-1, 1, len(X))
    found = model.average(X, offset=offset).loc[0, "estimate"]
    assert found == pytest.approx(model.predict_proba(X, offset)[:, 1].mean(), rel=1e-12)


def test_blocks_change_nothing(model, patients, monkeypatch):
    whole = model.slopes(patients, ["dose", "treated"], by="sex")
    monkeypatch.setattr(effects, "CHUNK_ROWS", 70)
    monkeypatch.setattr(effects, "TILE", 30_000)
    pieces = model.slopes(patients, ["dose", "treated"], by="sex")
    pd.testing.assert_frame_equal(pieces, whole, rtol=1e-9)


def test_draws_from_some_of_the_rows_do_for_all(model, patients, monkeypatch):
    """Estimates and the linear part are of all rows, so that only the remainder is that of a sample."""
    weight = np.arange(len(patients)) % 3
    given = {"by": "sex", "sample_weight": weight}
    whole = model.contrast(patients, ["treated", "dose"], draws=10_000, **given)
    monkeypatch.setattr(effects, "DRAWN_ROWS", 60)
    study = effects.EffectStudy(model, patients, None, "sex", weight, None, 0.95, None, None)
    assert len(study.drawn) == 60
    assert (weight[study.drawn] > 0).all()
    assert np.bincount(study.group[study.drawn]).tolist() == [30, 30]
    some = model.contrast(patients, ["treated", "dose"], draws=10_000, **given)
    np.testing.assert_allclose(some["estimate"], whole["estimate"], rtol=1e-10)
    np.testing.assert_allclose(some["sd"], whole["sd"], rtol=0.02)
    for end in ("lower", "upper"):
        np.testing.assert_array_less(np.abs(some[end] - whole[end]), 0.05 * whole["sd"])


@pytest.mark.parametrize("missing", ["mean", "indicator", "multiple"])
def test_missing_values_are_filled_in_before_they_are_changed(patients, missing):
    holes = patients.assign(dose=patients["dose"].where(np.arange(len(patients)) % 4 > 0))
    model = Logistic.from_formula("died ~ dose + sex", holes, missing=missing, random_state=0)
    whole = holes.fillna({"dose": model.formula_.means["dose"]})
    pd.testing.assert_frame_equal(model.contrast(holes, {"dose": 1.0}), model.contrast(whole, {"dose": 1.0}))
    pd.testing.assert_frame_equal(model.slopes(holes, "dose"), model.slopes(whole, "dose"))
    average = model.average(holes).loc[0]
    assert average["estimate"] == pytest.approx(model.predict_proba(holes)[:, 1].mean(), rel=1e-10)
    assert average["lower"] < average["estimate"] < average["upper"]


def test_saved_models_have_the_same_effects(model, patients, tmp_path):
    model.save(tmp_path / "model.viper")
    again = viper.load(tmp_path / "model.viper").contrast(patients)
    pd.testing.assert_frame_equal(again, model.contrast(patients))


# --- which changes ---


def test_changes_are_those_asked_for(model, patients):
    x = patients["dose"].to_numpy()
    low, high = np.quantile(x, [0.25, 0.75])
    found = model.contrast(patients, {"dose": "iqr", "ward": "pairwise", "age": [40, 50, 60]})
    quartiles = [f"{high:.6g} - {low:.6g}"]
    wards = ["north - east", "west - east", "west - north"]
    assert list(found["contrast"]) == [*quartiles, *wards, "50 - 40", "60 - 40"]
    around = model.contrast(patients, {"treated": "sd"}).loc[0]
    x = patients["treated"].to_numpy(dtype=float)
    ends = [model.predict_proba(patients.assign(treated=x + s * x.std() / 2))[:, 1].mean() for s in (-1, 1)]
    assert around["estimate"] == pytest.approx(ends[1] - ends[0], rel=1e-10)
    steps = model.contrast(patients, {"ward": "sequential"})
    assert list(steps["contrast"]) == ["north - east", "west - north"]


def test_default_step_is_a_round_number_within_the_range_of_a_spline(model, patients):
    assert effects.round_step(patients["age"].to_numpy()) == 10.0
    assert effects.round_step(np.array([0.0, 3e-7])) == 2e-7  # its sd is 1.5e-7
    assert effects.round_step(np.full(3, 7.0)) == 1.0
    found = model.contrast(patients, "age").loc[0]  # x + 10 lies beyond the range of bs() for some rows
    low = np.minimum(patients["age"], patients["age"].max() - 10)
    ends = [model.predict_proba(patients.assign(age=age))[:, 1].mean() for age in (low, low + 10)]
    assert found["contrast"] == "+10"
    assert found["estimate"] == pytest.approx(ends[1] - ends[0], rel=1e-10)


def test_all_columns_by_default(model, patients):
    assert list(dict.fromkeys(model.contrast(patients)["variable"])) == model.formula_.inputs
    assert list(model.slopes(patients)["variable"]) == ["treated", "age", "dose"]
    assert "sex" not in list(model.contrast(patients, at={"sex": "male"})["variable"])


def test_result_says_how_it_was_made(model, patients):
    found = model.contrast(patients, "sex", level=0.9)
    assert found.attrs == {"level": 0.9, "measure": "difference", "rows": 300, "draws": 10_000}
    numbers = ["before", "after", "estimate", "sd", "lower", "upper", "p_direction"]
    assert list(found) == ["variable", "contrast", *numbers]
    assert found.loc[0, "after"] - found.loc[0, "before"] == pytest.approx(found.loc[0, "estimate"], rel=1e-12)
    pd.testing.assert_frame_equal(found, model.contrast(patients, "sex", level=0.9))  # the seed is fixed
    narrow, wide = found.loc[0], model.contrast(patients, "sex").loc[0]
    assert wide["lower"] < narrow["lower"] < narrow["estimate"] < narrow["upper"] < wide["upper"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, X: m.contrast(X, "agee"),
            "columns of the model; got 'agee'. Did you mean 'age'",
        ),
        (
            lambda m, X: m.contrast(X, {"sex": ["male", "fmale"]}),
            "its levels; got 'fmale'. Did you mean 'female'",
        ),
        (lambda m, X: m.contrast(X, {"sex": 1}), "'sex', a category, must be a list of levels or one of"),
        (
            lambda m, X: m.contrast(X, {"age": "two"}),
            "of 'age' must be a number, a list of numbers or one",
        ),
        (lambda m, X: m.contrast(X, {"age": [40]}), "must have two values or more"),
        (lambda m, X: m.contrast(X, "sex", measure="lift"), "measure must be one of"),
        (lambda m, X: m.contrast(X, "sex", at={"sex": "male"}), "got 'sex' in both. Leave out one"),
        (lambda m, X: m.average(X, at={"age": "old"}), "at must give 'age' a number; got 'old'"),
        (lambda m, X: m.average(X, at=["age"]), "at must be a dict of columns and values; got list"),
        (lambda m, X: m.average(X, by="wards"), "by must name columns of X; got 'wards'. Did you mean 'ward'"),
        (lambda m, X: m.average(X, by=[1, 2, 3]), "by must have one entry for each of the 300 rows; got shape"),
        (lambda m, X: m.average(X, by="sex", at={"sex": "male"}), "by and at must name different columns"),
        (lambda m, X: m.average(X, sample_weight=-np.ones(300)), "sample_weight must not be negative"),
        (lambda m, X: m.average(X, level=1.5), "level must lie strictly between 0 and 1"),
        (lambda m, X: m.average(X, level=0.999999), "the level of effects must be at most 0.9999; got 0.999999"),
        (lambda m, X: m.average(X, draws=10), "draws must be at least 200 for a 95 % interval; got 10"),
        (lambda m, X: m.average(X[:0]), "at least one row to average over; got none"),
        (lambda m, X: m.average(X.drop(columns="dose")), "X must have the columns of the fit; got none named 'dose'"),
        (lambda m, X: m.average(viper.Files("x.csv")), "effects need rows in memory; got Files"),
        (lambda m, X: m.slopes(X, "sex"), "slopes need numbers; got 'sex', a category. Use contrast"),
        (lambda m, X: m.slopes(X, {"age": 1}), "variables of slopes must be names; got a dict"),
    ],
)
def test_errors_say_what_to_do(model, patients, call, message):
    with pytest.raises((ValueError, TypeError)) as error:
        call(model, patients)
    assert message in str(error.value)


def test_too_many_groups_are_refused(arrays):
    X, _, model = arrays
    many = np.tile(X, (10, 1))
    with pytest.raises(ValueError, match=r"at most 1,000 groups; got 1,500\. Group the values first"):
        model.average(many, by=np.arange(1500))


# --- the command ---


@pytest.fixture(scope="module")
def folder(model, patients, tmp_path_factory):
    folder = tmp_path_factory.mktemp("effects")
    patients.assign(weight=1 + np.arange(len(patients)) % 2).to_csv(folder / "data.csv", index=False)
    model.save(folder / "model.viper")
    return folder


@pytest.fixture
def run(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("viper.cli.catch_signals", lambda: None)
    monkeypatch.setattr("warnings.showwarning", lambda *_: None)

    def call(*arguments):
        with pytest.raises(SystemExit) as done:
            main(["effects", "model.viper", "data.csv", *arguments])
        out, err = capsys.readouterr()
        return done.value.code, out, err

    return call


def document(result):
    code, out, err = result
    assert code == 0, err
    return json.loads(out)


def test_command_prints_what_the_library_returns(run, model, patients):
    said = document(run("--json"))
    expected = model.contrast(patients)
    order = expected["estimate"].abs().sort_values(ascending=False, kind="stable").index
    assert [row["variable"] for row in said["contrasts"]] == list(expected.loc[order, "variable"])
    for name in ("estimate", "lower", "p_direction"):
        assert [row[name] for row in said["contrasts"]] == pytest.approx(expected.loc[order, name].tolist(), rel=1e-6)
    assert said["averages"][0]["estimate"] == pytest.approx(model.average(patients).loc[0, "estimate"])
    assert said["probability_of"] == "died = yes"


def test_command_takes_changes_places_groups_and_weights(run, model, patients):
    weights = 1 + np.arange(len(patients)) % 2
    options = ["--contrast", "age=40,60", "--contrast", "ward=west", "--contrast", "dose=0.5", "-v", "treated"]
    said = document(run(*options, "--by", "sex", "--weight", "weight", "--slope", "dose", "--json"))
    changes = {"treated": None, "age": [40, 60], "ward": ["east", "west"], "dose": 0.5}
    expected = model.contrast(patients, changes, by="sex", sample_weight=weights)
    assert [row["contrast"] for row in said["contrasts"]] == list(expected["contrast"])
    assert [row["estimate"] for row in said["contrasts"]] == pytest.approx(expected["estimate"].tolist(), rel=1e-6)
    slopes = model.slopes(patients, "dose", by="sex", sample_weight=weights)["estimate"]
    assert [row["estimate"] for row in said["slopes"]] == pytest.approx(slopes.tolist(), rel=1e-6)
    places = document(run("--at", "age=40,60", "--at", "sex=male", "--json"))
    assert [(row["age"], row["sex"]) for row in places["averages"]] == [(40.0, "male"), (60.0, "male")]
    assert "contrasts" not in places


def test_command_shows_percentage_points(run, model, patients):
    code, out, _ = run("-v", "sex")
    assert code == 0
    row = model.contrast(patients, "sex").loc[0]
    assert re.search(rf"male - female +\{100 * row['estimate']:+.1f} ", out)
    assert f"{100 * model.average(patients).loc[0, 'estimate']:.1f} %" in out
    code, out, _ = run("-v", "sex", "--measure", "ratio")
    assert re.search(r"male / female +\d\.\d+ ", out)


def test_command_writes_one_tidy_table(run, folder):
    code, _, err = run("--slope", "dose", "-v", "sex", "--out", "effects.csv")
    assert code == 0, err
    written = pd.read_csv(folder / "effects.csv")
    assert list(written["effect"]) == ["average", "contrast", "slope"]
    assert list(written)[:3] == ["effect", "variable", "contrast"]
    code, _, err = run("--out", "effects.csv")
    assert (code, "--force" in err) == (4, True)


def test_page_shows_what_the_commands_print(capsys, monkeypatch, tmp_path):
    page = (ROOT / "docs" / "effects.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("viper.cli.catch_signals", lambda: None)
    exec(blocks_of(page)[0].source, {})
    session = re.findall(r"^```\n(viper .*?)^```\n\n```text\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert len(session) == 2
    for command, shown in session:
        with pytest.raises(SystemExit):
            main(shlex.split(command)[1:])
        assert difference(shown, capsys.readouterr().out) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--at", "agee=3"], "--at must name columns of the model; got 'agee'. Did you mean 'age'?"),
        (["--at", "age"], "--at must have the form column=value; got 'age'."),
        (["--contrast", "sex=male,femal"], "one of its levels; got 'femal'. Did you mean 'female'?"),
        (["--contrast", "age=lots"], "must be a number, a list of numbers or one of"),
        (["--slope", "sex"], "slopes need numbers; got 'sex', a category."),
        (["--by", "sexe"], "--by must be a column of the table; got 'sexe'. Did you mean 'sex'?"),
        (["--weight", "w"], "--weight must be a column of the table; got 'w'."),
        (["-v", "died"], "variables must name columns of the model; got 'died'."),
    ],
)
def test_errors_of_the_command_are_one_line(run, options, message):
    code, out, err = run(*options)
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert message in err


# --- where coefficients do not tell ---


@pytest.mark.parametrize(
    ("terms", "entangled", "splines"),
    [
        ("age + sex + log(dose) + C(treated)", [], set()),
        ("age*sex + dose", ["age", "sex"], set()),
        ("ward/age + dose", ["ward", "age"], set()),
        ("bs(age, df=4) + dose + sex", ["age"], {"age"}),
        ("poly(age, 2) + dose", ["age"], set()),
        ("age + I(age**2) + dose", ["age"], set()),
        ("I(age*dose) + sex", ["age", "dose"], set()),
        ("(age + dose + sex)^2", ["age", "dose", "sex"], set()),
    ],
)
def test_columns_that_no_single_coefficient_describes(patients, terms, entangled, splines):
    encoding = Logistic.from_formula(f"died ~ {terms}", patients).formula_
    assert sorted(encoding.entangled) == sorted(entangled)
    assert encoding.splines == splines


def test_tables_of_coefficients_say_so(model, patients, folder, capsys, monkeypatch):
    plain = Logistic.from_formula("died ~ age + sex", patients)
    assert "no single coefficient" not in notebook_card(plain)
    assert "<b>age, sex</b>: in interactions or splines, where no single coefficient describes" in notebook_card(model)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("viper.cli.catch_signals", lambda: None)
    with pytest.raises(SystemExit):
        main(["summary", "model.viper"])
    out = " ".join(capsys.readouterr().out.split())
    said = "age, sex: in interactions or splines, so no single coefficient is the effect of a column."
    assert f"{said} See: viper effects model.viper data.csv" in out


# --- the report ---


def test_report_shows_the_same_effects(model, patients):
    study = read_study(model, patients, "died")
    found = study.average_effects
    table = model.contrast(patients, draws=4000).sort_values("estimate", key=lambda x: -x.abs(), kind="stable")
    assert [e.name for e in found.effects] == list(table["variable"])
    for name in ("before", "after", "lower", "upper"):
        assert [getattr(e, name) for e in found.effects] == pytest.approx(table[name].tolist(), abs=1e-3)
    assert [e.mean for e in found.effects] == pytest.approx(table["estimate"].tolist(), rel=1e-10)
    changes = {(e.name, e.change) for e in found.effects}
    assert {("sex", "male instead of female"), ("age", "10 higher"), ("treated", "1 instead of 0")} <= changes
    page = average_section(study).replace(words.THIN, " ")
    top = found.effects[0]
    assert f"If {top.name} were {top.change} in every row, the average probability would be" in page
    assert "appear in more than one line" in drivers_section(study)
    assert f"would be {100 * abs(top.mean):.0f} percentage points" in words.driver_sentence(study)


def test_report_averages_over_some_of_many_rows_and_levels(patients, monkeypatch):
    rng = np.random.default_rng(6)
    frame = patients.assign(town=[f"town {k:02d}" for k in rng.integers(0, 15, len(patients))])
    study = read_study(Logistic.from_formula("died ~ age + town", frame), frame, "died")
    monkeypatch.setattr(views, "AVERAGED_ROWS", (100, 100))
    assert study.average_effects.rows == 100
    towns = [e.change for e in study.average_effects.effects if e.name == "town"]
    assert len(towns) == views.MOST_CATEGORIES - 1
    assert all(change.endswith(" instead of town 00") for change in towns)
    assert "Averaged over 100 of the 300 rows, evenly spaced" in average_section(study)


def test_report_of_arrays_and_processes(arrays):
    X, y, _ = arrays
    frame = pd.DataFrame(X[:, :2], columns=["x0", "x1"]).assign(y=y)
    linear = Logistic().fit(X[:, :2], y)
    process = viper.VariationalGPClassifier(n_inducing=8, n_starts=1, mean="constant", random_state=0)
    for model in (linear, process.fit(X[:, :2], y)):
        study = read_study(model, frame, "y")
        assert {e.name for e in study.average_effects.effects} == {"x0", "x1"}
        assert "percentage points" in average_section(study)


def test_signs_of_points():
    assert [words.signed_points(x, 1) for x in (0.048, -0.432, -0.0001, 0.0)] == ["+4.8", "−43.2", "0.0", "0.0"]
    assert [words.point_digits(width) for width in (0.5, 0.12, 0.03, 0.005)] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("effect", "sentence"),
    [
        (
            AverageEffect("age", "10 higher", 0.31, 0.262, -0.048, -0.066, -0.029, 1.0),
            "If age were 10 higher in every row, the average probability would be 4.8 percentage points lower "
            "(2.9 to 6.6): 26 % instead of 31 %.",
        ),
        (
            AverageEffect("sex", "male instead of female", 0.5, 0.51, 0.01, 0.0095, 0.0105, 1.0),
            "If sex were male instead of female in every row, the average probability would be 1.00 percentage point "
            "higher (0.95 to 1.05): 51 % instead of 50 %.",
        ),
    ],
)
def test_sentences_about_average_effects(effect, sentence):
    assert words.average_sentence(effect).replace(words.THIN, " ") == sentence


# --- other libraries ---


def test_statsmodels_finds_the_same_effects(patients):
    """With a nearly flat prior and many rows, posterior and sampling distribution are the same to 1 %."""
    api = pytest.importorskip("statsmodels.formula.api")
    rng = np.random.default_rng(4)
    frame = patients.iloc[rng.integers(0, len(patients), 20_000)].reset_index(drop=True)
    frame["dose"] *= rng.lognormal(0, 0.1, len(frame))
    male = frame["sex"] == "male"
    log_odds = 0.5 * male + 0.03 * (frame["age"] - 50) + np.log(frame["dose"]) - 0.7 * frame["treated"]
    frame["died"] = (rng.random(len(frame)) < expit(log_odds)).astype(int)
    formula = "died ~ age + sex + dose + treated"
    peer = api.logit(formula, frame).fit(disp=0).get_margeff(at="overall", dummy=True).summary_frame()
    model = Logistic.from_formula(formula, frame, prior_scale=100.0, intercept_scale=100.0)
    changes = model.contrast(frame, ["sex", "treated"]).set_index("variable")
    slopes = model.slopes(frame, ["age", "dose"]).set_index("variable")
    ours = {"age": slopes.loc["age"], "dose": slopes.loc["dose"], "treated": changes.loc["treated"]}
    for name, row in {**ours, "sex[T.male]": changes.loc["sex"]}.items():
        sd = peer.loc[name, "Std. Err."]
        assert row["estimate"] == pytest.approx(peer.loc[name, "dy/dx"], abs=0.02 * sd)
        assert row["sd"] == pytest.approx(sd, rel=0.01)
        assert row["lower"] == pytest.approx(peer.loc[name, "Conf. Int. Low"], abs=0.06 * sd)
        assert row["upper"] == pytest.approx(peer.loc[name, "Cont. Int. Hi."], abs=0.06 * sd)
