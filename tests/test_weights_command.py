"""`viper fit` with weights, groups and robust covariances: what it says equals what the library and peers compute."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold

import viper
from viper.cli.scoring import train_test_splits
from viper.formula.learn import learn_formula
from viper.models.facts import scales_by_name

GENERATOR = np.random.default_rng(0)
PATIENTS, VISITS = 250, 4
ROWS = PATIENTS * VISITS
PATIENT = np.repeat(np.arange(PATIENTS), VISITS)
FRAME = pd.DataFrame(
    {
        "patient": [f"{number:03d}" for number in PATIENT],
        "w": GENERATOR.gamma(1.0, size=ROWS).round(3) + 0.5,
        "age": np.repeat(GENERATOR.normal(60.0, 10.0, PATIENTS), VISITS).round(1),
        "dose": GENERATOR.normal(size=ROWS).round(2),
        "ward": GENERATOR.choice(["a", "b", "c"], ROWS),
    }
)
LOG_ODDS = 0.08 * (FRAME["age"] - 65) + np.repeat(GENERATOR.normal(0.0, 1.5, PATIENTS), VISITS)
FRAME["died"] = np.where(GENERATOR.random(ROWS) < 1 / (1 + np.exp(-LOG_ODDS)), "yes", "no")
FORMULA = "died ~ age + dose + ward"
MEAN_ONE = (FRAME["w"] / FRAME["w"].mean()).to_numpy()


@pytest.fixture
def fit(command):
    """Fit the table on the command line; returns the document that it prints as JSON."""
    FRAME.to_csv("data.csv", index=False)

    def call(*arguments):
        code, out, err = command("fit", "data.csv", "-t", "died", "--json", *arguments)
        assert code == 0, err
        return json.loads(out)

    return call


def refused(command, *arguments):
    code, _, err = command("fit", "data.csv", "-t", "died", *arguments)
    assert code != 0
    return err


def numbers(said, name):
    return [row[name] for row in said["coefficients"]]


def by_library(**given):
    return viper.VariationalLogisticRegression.from_formula(FORMULA, FRAME, random_state=1, **given)


def test_weights_are_those_of_the_library_and_no_feature(fit):
    said = fit("--weights", "w", "--drop", "patient", "--cv", "0")
    with pytest.warns(viper.errors.WeightWarning):
        table = by_library(sample_weight=FRAME["w"]).summary()
    assert [row["name"] for row in said["coefficients"]] == list(table.index)
    assert numbers(said, "mean") == pytest.approx(table["mean"].tolist(), rel=1e-9)
    assert numbers(said, "sd") == pytest.approx(table["sd"].tolist(), rel=1e-9)
    assert said["data"]["left_out"] == {"patient": "by --drop", "w": "given as --weights"}
    assert any("pass --robust" in note and f"{FRAME['w'].sum():,.6g} rows" in note for note in said["notes"])


@pytest.mark.filterwarnings("ignore:cov_type not fully supported")
@pytest.mark.parametrize("groups", [None, "patient"])
def test_robust_covariances_are_stored_and_agree_with_statsmodels(fit, command, groups):
    options = ["--drop", "patient"] if groups is None else ["--groups", "patient"]
    said = fit("--weights", "w", "--robust", *options, "--prior", "100", "-o", "m.viper", "--cv", "0")
    X = sm.add_constant(learn_formula(FORMULA, FRAME, standardize=True).X, prepend=False)
    peer = sm.GLM((FRAME["died"] == "yes").astype(float), X, family=sm.families.Binomial(), var_weights=MEAN_ONE)
    kind = (
        {"cov_type": "HC0"}
        if groups is None
        else {"cov_type": "cluster", "cov_kwds": {"groups": PATIENT, "use_correction": False}}
    )
    number = ROWS if groups is None else PATIENTS
    expected_sds = peer.fit(**kind).bse * np.sqrt(number / (number - 1))
    # the means of the posterior and the maximum of the likelihood differ by about 1/n
    np.testing.assert_allclose(numbers(said, "sd"), expected_sds, rtol=0.01)
    expected = {"class_weight": None, "weights": "w", "groups": groups, "robust_groups": number, "mean_weight": 1.0}
    assert said["weighting"] == said["card"]["weighting"] == expected
    loaded = viper.load("m.viper")
    assert loaded.summary()["sd"].tolist() == pytest.approx(numbers(said, "sd"), rel=1e-12)
    shown = command("summary", "m.viper")[1]
    assert "weights   of the rows: w" in shown
    assert f"robust (sandwich covariance), from {number:,} independent" in shown
    assert json.loads(command("summary", "m.viper", "--json")[1])["weighting"] == expected


def test_whole_numbers_are_repeated_rows_and_all_say_so(fit, command, capsys):
    """A weight of 3 gives what three equal rows give; terminal, card and page tell how narrow that makes intervals."""
    counts = FRAME.assign(w=1 + np.arange(ROWS) % 3)
    counts.to_csv("counts.csv", index=False)
    repeated = counts.loc[np.repeat(counts.index, counts["w"])]
    code, _, err = command("fit", "counts.csv", "--formula", FORMULA, "--weights", "w", "--cv", "0", "-o", "c.viper")
    assert code == 0, err
    assert "a weight of 3 counts a row three times, so intervals are as wide as for 1,999 rows" in " ".join(err.split())
    model = viper.load("c.viper")
    by_hand = viper.VariationalLogisticRegression.from_formula(FORMULA, counts, sample_weight=counts["w"])
    own = viper.VariationalLogisticRegression.from_formula(FORMULA, repeated, standardize=False)
    plain = viper.VariationalLogisticRegression.from_formula(
        FORMULA, counts, sample_weight=counts["w"], standardize=False
    )
    np.testing.assert_allclose(plain.coef_, own.coef_, rtol=1e-6)
    for one in (model, by_hand):
        assert one.mean_weight_ == counts["w"].mean()
    said = "a row counts as 2 rows on average, and intervals are as narrow as for that many rows"
    assert said in " ".join(command("summary", "c.viper")[1].split())
    viper.report.write(by_hand, counts, "died", "r.html")
    assert said in Path("r.html").read_text()
    assert own.mean_weight_ == 1.0
    robust = by_hand.robust()
    robust.save("robust.viper")
    assert "equal rows" not in " ".join(command("summary", "robust.viper")[1].split())


def test_robust_weights_have_no_scale(fit):
    said = fit("--weights", "w", "--robust", "--cv", "0")
    FRAME.assign(w=1000 * FRAME["w"]).to_csv("data.csv", index=False)
    again = fit("--weights", "w", "--robust", "--cv", "0")
    np.testing.assert_allclose(numbers(again, "lower"), numbers(said, "lower"), rtol=1e-9)


@pytest.mark.filterwarnings("ignore::viper.errors.WeightWarning")
def test_scores_keep_a_group_in_one_fold_and_use_the_weights(fit):
    said = fit("--weights", "w", "--robust", "--groups", "patient", "--cv", "3", "--seed", "7")["scores"]
    learned = learn_formula(FORMULA, FRAME, standardize=True)
    probability, width = np.empty(ROWS), np.empty(ROWS)
    folds = StratifiedGroupKFold(3, shuffle=True, random_state=7).split(learned.X, learned.y, PATIENT)
    for train, test in folds:
        assert not set(PATIENT[train]) & set(PATIENT[test])
        model = viper.VariationalLogisticRegression(random_state=7)
        model.fit(learned.X.iloc[train], learned.y[train], sample_weight=MEAN_ONE[train])
        model = model.robust(groups=PATIENT[train])
        probability[test] = model.predict_proba(learned.X.iloc[test])[:, 1]
        width[test] = np.diff(model.predict_interval(learned.X.iloc[test]))[:, 0]
    assert said["auc"] == pytest.approx(roc_auc_score(learned.y, probability), rel=1e-9)
    assert said["interval_width"] == pytest.approx(width.mean(), rel=1e-6)
    assert said["how"] == "3-fold cross-validation, groups kept together, each row counted once"


def test_splits_of_groups():
    y = (FRAME["died"] == "yes").to_numpy()
    ((train, test),) = train_test_splits(y, 5, 0.3, 1, PATIENT)
    assert not set(PATIENT[train]) & set(PATIENT[test])
    assert len(test) == pytest.approx(0.3 * ROWS, abs=VISITS)
    few = np.repeat([0, 1, 2, 3], 5)  # the second class is in two groups
    splits = train_test_splits(few >= 2, 5, None, 1, few)
    assert len(splits) == 2
    assert all(len(set(few[test])) == 2 for _, test in splits)
    assert train_test_splits(few >= 3, 5, None, 1, few) == []
    assert train_test_splits(y, 0, None, 1, PATIENT) == []


def test_robust_with_drawn_values(fit):
    holes = FRAME.assign(age=FRAME["age"].mask(np.arange(ROWS) % 17 == 3), died=FRAME["died"].mask(PATIENT == 5))
    holes.to_csv("data.csv", index=False)
    multiple = ("--missing", "multiple", "--imputations", "3", "--sweeps", "2", "--cv", "2")
    said = fit("--robust", "--groups", "patient", "--weights", "w", *multiple)
    assert said["weighting"]["robust_groups"] == PATIENTS - 1
    assert said["scores"]["rows"] == ROWS - VISITS


def test_balanced_classes_say_what_they_do(fit, command):
    said = fit("--class-weight", "balanced", "--drop", "patient", "--drop", "w", "-o", "m.viper", "--cv", "0")
    meaning, intervals = said["notes"]
    share = (FRAME["died"] == "yes").mean()
    assert "not frequencies in this table" in meaning
    assert f"{share:.1%}" in meaning
    assert "pass --robust" in intervals
    weights = said["weighting"]["class_weight"]
    assert weights == pytest.approx({"no": 0.5 / (1 - share), "yes": 0.5 / share})
    assert "of the classes: no × " in command("summary", "m.viper")[1]
    robust = fit("--class-weight", "balanced", "--drop", "patient", "--drop", "w", "--robust", "--cv", "0")
    assert "allow for the weights" in robust["notes"][1]


def test_priors_are_shown_by_name(fit, command):
    fit("--prior", "age=0.5", "--prior", "ward=2", "--drop", "patient", "--cv", "0", "-o", "m.viper")
    assert "priors    sd w 1, age 0.5, dose 1, ward[T.b] 2, ward[T.c] 2" in command("summary", "m.viper")[1]
    assert scales_by_name({"a": 1.0, "b": 1.0}) == ""
    assert scales_by_name({"a": 1.0, "b": 2.0}) == "a 1, b 2"
    assert scales_by_name({f"x{j}": 0.5 + (j > 1) for j in range(9)}) == "x0 0.5, x1 0.5, all others 1.5"
    assert scales_by_name({f"x{j}": float(j) for j in range(20)}).endswith("x7 7, 12 more")


def test_a_column_that_the_formula_names_stays(fit):
    said = fit("--formula", "died ~ age + w", "--weights", "w", "--cv", "0")
    assert [row["name"] for row in said["coefficients"]] == ["age", "w", "intercept"]


def test_a_report_of_a_robust_model(fit, command):
    fit("--weights", "w", "--robust", "--groups", "patient", "--cv", "0", "-o", "m.viper")
    code, _, err = command("report", "m.viper", "data.csv", "-o", "page.html")
    assert code == 0, err
    assert f"from {PATIENTS} independent groups of rows by patient" in Path("page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("column", "cell", "options", "message"),
    [
        ("w", -1.0, ["--weights", "w"], "numbers of at least 0; got '-1.0' in column 'w', line 5. Correct"),
        ("w", None, ["--weights", "w"], "numbers of at least 0; got a missing value in column 'w', line 5. Correct"),
        ("ward", "d", ["--weights", "ward"], f"line 2, and {ROWS - 1:,} more such cells"),
        ("w", 1.0, ["--weights", "weight"], "--weights must be a column of the table; got 'weight'."),
        ("w", 1.0, ["--weights", "died"], "--weights must not be the target"),
        ("patient", None, ["--groups", "patient"], "got a missing value in column 'patient', line 5. Give"),
        ("w", 1.0, ["--model", "gp", "--robust"], "--robust is only for logistic regression"),
    ],
)
def test_faults_are_one_clear_line(command, column, cell, options, message):
    table = FRAME.astype({column: object})
    table.loc[3, column] = cell
    table.to_csv("data.csv", index=False)
    assert message in refused(command, *options)


def test_a_gaussian_process_takes_weights_and_groups(fit):
    said = fit("--model", "gp", "--inducing", "10", "--weights", "w", "--groups", "patient", "--cv", "2")
    columns = {"class_weight": None, "weights": "w", "groups": "patient", "robust_groups": 0}
    assert said["weighting"] == columns | {"mean_weight": pytest.approx(FRAME["w"].mean())}


def test_evaluate_counts_rows_by_their_weights(fit, command):
    fit("--formula", FORMULA, "--cv", "0", "-o", "m.viper")
    counts = FRAME.assign(w=np.arange(ROWS) % 4)
    counts.to_csv("counts.csv", index=False)
    counts.loc[np.repeat(counts.index, counts["w"])].to_csv("repeated.csv", index=False)
    code, out, err = command("evaluate", "m.viper", "counts.csv", "--weights", "w", "--json")
    assert code == 0, err
    found, repeated = json.loads(out), json.loads(command("evaluate", "m.viper", "repeated.csv", "--json")[1])
    for name in ("log_score", "brier", "auc", "accuracy", "calibration_error", "log_skill", "interval_width"):
        assert found[name] == pytest.approx(repeated[name], rel=1e-9)
    for name in ("loss", "upper", "p_value", "slope", "slope_error"):
        assert found["calibration_verdict"][name] == pytest.approx(repeated["calibration_verdict"][name], rel=1e-6)
    code, _, err = command("evaluate", "m.viper", "counts.csv", "--weights", "ward")
    assert (code, "--weights must be a column of numbers of at least 0" in err) == (3, True)
