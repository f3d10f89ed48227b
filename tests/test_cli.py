"""The commands, called in this process: what they print equals what the library computes."""

import csv
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pages import ROOT, difference
from sklearn.datasets import dump_svmlight_file
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, train_test_split

import viper
from viper.cli import main, terminal
from viper.cli.commands.fit import fit_table
from viper.formula.learn import learn_formula

GENERATOR = np.random.default_rng(0)
ROWS = 150
FRAME = pd.DataFrame(
    {
        "age": GENERATOR.normal(50.0, 10.0, ROWS).round(2),
        "<b>sex</b>": GENERATOR.choice(["female", "male"], ROWS),
        "grade": GENERATOR.integers(1, 5, ROWS),
        "smoker": GENERATOR.random(ROWS) < 0.3,
        "ward no": GENERATOR.integers(1, 4, ROWS),
    }
)
LOGIT = 0.1 * (FRAME["age"] - 50) + (FRAME["<b>sex</b>"] == "male") - 0.5 * FRAME["grade"] + 1.0
FRAME["died"] = np.where(GENERATOR.random(ROWS) < 1 / (1 + np.exp(-LOGIT)), "yes", "no")


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Return a function that runs a command in the folder of the data; it returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back what the program changes
    monkeypatch.setattr("viper.cli.catch_signals", lambda: None)  # the tests keep their own handlers
    FRAME.to_csv("data.csv", index=False)

    def call(*arguments):
        with pytest.raises(SystemExit) as done:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return done.value.code, out, err

    return call


def document(result):
    code, out, err = result
    assert code == 0, err
    return json.loads(out)


def fitted(run, *arguments):
    return document(run("fit", "data.csv", "--json", *arguments))


# --- fit and summary ---


def test_fit_says_what_the_library_says(run):
    said = fitted(run, "-t", "died", "-o", "m.viper")
    learned = learn_formula("died ~ age + `<b>sex</b>` + grade + smoker + `ward no`", FRAME, standardize=True)
    model = viper.VariationalLogisticRegression(random_state=1).fit(learned.X, learned.y)
    table = model.summary()
    assert [row["name"] for row in said["coefficients"]] == list(table.index)
    for name in ("mean", "lower", "odds_ratio", "odds_upper", "p_direction"):
        assert [row[name] for row in said["coefficients"]] == pytest.approx(table[name].tolist(), rel=1e-9)
    assert said["elbo"] == pytest.approx(model.elbo_)
    assert said["data"]["class_counts"] == FRAME["died"].value_counts().to_dict()
    unseeded = viper.VariationalLogisticRegression().fit(learned.X, learned.y)
    for diagnosis in (model.diagnose(), unseeded.diagnose()):
        assert said["diagnosis"]["k_hat"] == pytest.approx(diagnosis.k_hat, rel=1e-6)
        assert said["diagnosis"]["verdict"] == diagnosis.verdict
    assert said["prior_scales"] == {name: 1.0 for name in table.index if name != "intercept"}
    units = {row["name"]: row["unit"] for row in said["coefficients"]}
    assert units["<b>sex</b>[T.male]"] == "vs female"
    assert units["age"] == f"sd, {FRAME['age'].std(ddof=0):.3g}"
    saved = document(run("summary", "m.viper", "--json"))
    assert {name: said[name] for name in saved} == saved


def test_scores_are_those_of_cross_validation(run):
    said = fitted(run, "-t", "died", "--cv", "3", "--seed", "7")["scores"]
    learned = learn_formula("died ~ age + `<b>sex</b>` + grade + smoker + `ward no`", FRAME, standardize=True)
    probability = np.empty(ROWS)
    for train, test in StratifiedKFold(3, shuffle=True, random_state=7).split(learned.X, learned.y):
        model = viper.VariationalLogisticRegression(random_state=7).fit(learned.X.iloc[train], learned.y[train])
        probability[test] = model.predict_proba(learned.X.iloc[test])[:, 1]
    assert said["auc"] == pytest.approx(roc_auc_score(learned.y, probability))
    assert (said["rows"], said["how"]) == (ROWS, "3-fold cross-validation")


def test_held_out_rows(run):
    said = fitted(run, "-t", "died", "--test-size", "0.4", "--formula", "died ~ age")["scores"]
    train, test = train_test_split(np.arange(ROWS), test_size=0.4, random_state=1, stratify=FRAME["died"])
    X = learn_formula("died ~ age", FRAME, standardize=True).X
    model = viper.VariationalLogisticRegression(random_state=1).fit(X.iloc[train], FRAME["died"].iloc[train])
    expected = roc_auc_score(FRAME["died"].iloc[test], model.predict_proba(X.iloc[test])[:, 1])
    assert said["auc"] == pytest.approx(expected)
    assert said["rows"] == len(test)


def test_options_reach_the_model(run):
    options = ["--prior", "2.5", "--bound", "pg", "--covariance", "diagonal", "--no-standardise"]
    fitted(run, "--formula", "died ~ 0 + C(grade)", *options, "-o", "m.viper", "--cv", "0")
    model = viper.load("m.viper")
    assert (model.prior_scale, model.bound, model.covariance) == (2.5, "pg", "diagonal")
    assert not model.fit_intercept
    assert list(model.feature_names_in_) == [f"C(grade)[{level}]" for level in (1, 2, 3, 4)]


def test_drop_and_category(run):
    said = fitted(run, "-t", "died", "--drop", "age", "--category", "ward no", "--cv", "0")
    assert said["levels"]["ward no"] == ["1", "2", "3"]
    assert "age" not in said["formula"]


def test_gaussian_process(run):
    said = fitted(run, "-t", "died", "--model", "gp", "--inducing", "8", "--cv", "0", "-o", "g.viper")
    assert {row["name"] for row in said["columns"]} >= {"age", "<b>sex</b>[T.male]"}
    assert said["kernel"] == "rbf"
    assert viper.load("g.viper").mean == viper.VariationalGPClassifier().mean
    code, out, _ = run("summary", "g.viper")
    assert code == 0
    assert "Gaussian-process classification" in out
    assert "<b>sex</b>[T.male]" in out


def test_for_people(run, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, err = run("fit", "data.csv", "-t", "died", "-o", "m.viper", "--cv", "2")
    assert code == 0
    for words in ("probability that died = yes", "<b>sex</b>[T.male]", "vs female", "k̂ =", "AUC", "Saved m.viper"):
        assert words in out
    assert "\x1b" not in out + err


def test_how_to_see_the_rest_names_the_model_if_there_is_one(run):
    generator = np.random.default_rng(1)
    wide = pd.DataFrame(generator.normal(size=(60, 25)), columns=[f"c{j}" for j in range(25)])
    wide.assign(y=generator.integers(0, 2, 60)).to_csv("wide.csv", index=False)
    _, out, _ = run("fit", "wide.csv", "-t", "y", "--cv", "0")
    assert "6 more, fewer standard deviations from zero.\n" in out
    for command in (["fit", "wide.csv", "-t", "y", "--cv", "0", "-o", "my model.viper"], ["summary", "my model.viper"]):
        _, out, _ = run(*command)
        assert "6 more, fewer standard deviations from zero: viper summary 'my model.viper' --all\n" in out
    _, out, _ = run("summary", "my model.viper", "--all")
    assert "more" not in out


@pytest.fixture
def long_names(run):
    """A model whose columns have long names and whose numbers are of very different sizes."""
    names = ["mean corpuscular haemoglobin concentration", "left ventricular volume", "age", "dose"]
    table = pd.DataFrame(1000 * GENERATOR.normal(size=(200, 4)), columns=names)
    table["ward of the first admission"] = GENERATOR.choice(["intensive care, north", "general"], 200)
    score = table["age"] / 500 - table["dose"] / 900 + 12 * (table.iloc[:, 4] == "general") - 6
    table.assign(y=score + GENERATOR.normal(size=200) > 0).to_csv("long.csv", index=False)
    document(run("fit", "long.csv", "-t", "y", "--prior", "30", "--cv", "0", "-o", "m.viper", "--json"))
    return run


@pytest.mark.parametrize("width", [60, 80, 100, 120, None])
def test_numbers_are_never_cut(long_names, monkeypatch, width):
    if width:
        monkeypatch.setattr(terminal, "PIPE_WIDTH", width)
    out = long_names("summary", "m.viper")[1]
    numbers = r" +-?[\d.,]+(e[+-]\d+)?"
    interval = rf"{numbers} …{numbers}"
    for line in out.splitlines():
        assert len(line) <= (width or terminal.PIPE_WIDTH)
    title = next(line for line in out.splitlines() if "log-odds" in line)
    body = out.split("─ \n", 1)[1].split("\n" + " " * 20, 1)[0].splitlines()
    assert len(body) == 6
    for line in body:
        numeric = line[title.index("log-odds") - 2 :]
        assert re.sub(interval, "", numeric).count("…") == 0, line
        assert len(re.findall(interval, numeric)) == title.count("95 %")


def test_zero_is_in_one_place_in_all_rows(run):
    out = run("fit", "data.csv", "-t", "died", "--cv", "0")[1]
    rows = [line for line in out.splitlines() if "●" in line]
    assert len(rows) == 6
    zeros = {i for line in rows for i, sign in enumerate(line) if sign in "│┼"}
    assert len(zeros) == 1
    for line in rows:
        (zero,), dot = zeros, line.index("●")
        assert dot == zero or (dot > zero) == (float(line.split("…")[0].split()[-3]) > 0)


def test_a_full_prior_covariance_has_scales_too(run):
    model = viper.VariationalLogisticRegression(prior_scale=np.array([[4.0, 1.0], [1.0, 9.0]]))
    model.fit(FRAME[["age", "grade"]], FRAME["died"]).save("m.viper")
    said = document(run("summary", "m.viper", "--json"))
    assert said["prior_scales"] == pytest.approx({"age": 2.0, "grade": 3.0})
    assert "prior sd 2 to 3" in run("summary", "m.viper")[1]


def test_without_a_terminal_slow_steps_are_lines(run, monkeypatch):
    assert "Scoring" not in run("fit", "data.csv", "-t", "died", "--cv", "3")[2]
    monkeypatch.setattr(terminal, "PATIENT_SECONDS", -1.0)
    _, _, err = run("fit", "data.csv", "-t", "died", "--cv", "3")
    assert f"note: fitting {ROWS} rows …\n" in err
    assert [line for line in err.splitlines() if "Scoring" in line] == [
        f"note: Scoring: {k} of 3, 0 s." for k in (1, 2, 3)
    ]
    _, _, err = run("compare", "data.csv", "-t", "died", "--cv", "2", "--only", "share")
    assert "note: class shares only: 2 of 2, 0 s.\n" in err
    assert run("fit", "data.csv", "-t", "died", "--cv", "3", "--json")[2] == ""


def test_missing_values_by_each_rule(run):
    frame = FRAME.copy()
    frame.loc[[3, 8], "age"] = np.nan
    frame.to_csv("holes.csv", index=False)
    for rule, rows in (("drop", ROWS - 2), ("mean", ROWS)):
        said = document(
            run("fit", "holes.csv", "-t", "died", "--missing", rule, "--json", "--cv", "0", "-o", f"{rule}.viper")
        )
        assert (said["data"]["rows_used"], said["data"]["missing"]) == (rows, {"age": 2})
        assert run("predict", f"{rule}.viper", "holes.csv", "-o", f"{rule}.csv")[0] == 0
        probability = pd.read_csv(f"{rule}.csv")["probability"]
        assert np.flatnonzero(probability.isna()).tolist() == ([3, 8] if rule == "drop" else [])
    filled = frame.fillna({"age": frame["age"].mean()})
    np.testing.assert_allclose(probability, viper.load("mean.viper").predict_proba(filled)[:, 1], rtol=1e-12)


# --- predict and evaluate ---


def test_predictions_are_the_models(run, monkeypatch):
    fitted(run, "-t", "died", "-o", "m.viper", "--cv", "0")
    monkeypatch.setattr("viper.cli.commands.predict.PART_ROWS", 40)
    code, out, err = run("predict", "m.viper", "data.csv", "--level", "0.8", "--keep", "age")
    assert code == 0, err
    table = pd.read_csv(io.StringIO(out))
    model = viper.load("m.viper")
    np.testing.assert_allclose(table["probability"], model.predict_proba(FRAME)[:, 1], rtol=1e-12)
    np.testing.assert_allclose(table["sd"], model.predict_std(FRAME), rtol=1e-9)
    np.testing.assert_allclose(table[["lower", "upper"]], model.predict_interval(FRAME, 0.8), rtol=1e-12)
    assert table["label"].tolist() == model.predict(FRAME).tolist()
    assert table["age"].tolist() == FRAME["age"].tolist()


@pytest.mark.parametrize("options", [[], ["--robust"], ["--missing", "drop"], ["--missing", "multiple"]])
def test_rows_of_the_fit_are_noted(options, run):
    """Found by the file's bytes or, where the file is another, by the ELBO."""
    said = "the model was fitted to these rows, so the scores are too optimistic"
    FRAME.assign(age=FRAME["age"].where(FRAME.index > 2)).to_csv("holes.csv", index=False)
    FRAME.iloc[:-1].to_csv("fewer.csv", index=False)
    name = "holes.csv" if "--missing" in options else "data.csv"
    assert run("fit", name, "-t", "died", "-o", "m.viper", "--cv", "0", *options)[0] == 0
    assert said in run("evaluate", "m.viper", name)[2]
    assert said not in run("evaluate", "m.viper", "fewer.csv")[2]
    if not options:
        FRAME.to_parquet("same.parquet")
        assert said in run("evaluate", "m.viper", "same.parquet")[2]


def test_other_formats_give_the_same_predictions(run):
    fitted(run, "-t", "died", "-o", "m.viper", "--cv", "0")
    FRAME.to_parquet("data.parquet")
    FRAME.assign(spare=1).to_csv("data.csv.gz", index=False)
    run("predict", "m.viper", "data.csv", "-o", "a.csv")
    run("predict", "m.viper", "data.parquet", "-o", "b.parquet")
    code, _, err = run("predict", "m.viper", "data.csv.gz", "-o", "c.csv.gz")
    assert code == 0
    assert "columns ignored: 'spare'" in err
    a, b, c = pd.read_csv("a.csv"), pd.read_parquet("b.parquet"), pd.read_csv("c.csv.gz")
    assert (b.pop("note") == "").all()
    assert a.pop("note").isna().all()
    assert c.pop("note").isna().all()
    pd.testing.assert_frame_equal(a, b, check_dtype=False)
    pd.testing.assert_frame_equal(a, c)


def test_libsvm_leaves_out_zeros(run):
    X = GENERATOR.normal(size=(60, 3)) * (GENERATOR.random((60, 3)) < 0.5)
    y = (X[:, 0] + GENERATOR.normal(size=60) > 0).astype(int)
    dump_svmlight_file(X, y, "t.libsvm", zero_based=False)
    assert run("fit", "t.libsvm", "-o", "m.viper", "--no-standardise", "--cv", "0")[0] == 0
    dump_svmlight_file(X[:2] * [1, 1, 0], y[:2], "new.libsvm", zero_based=False)
    code, out, err = run("predict", "m.viper", "new.libsvm")
    assert code == 0, err
    X[:2, 2] = 0.0
    model = viper.load("m.viper")
    expected = model.predict_proba(pd.DataFrame(X[:2], columns=["x1", "x2", "x3"]))[:, 1]
    np.testing.assert_allclose([float(row["probability"]) for row in csv.DictReader(io.StringIO(out))], expected)


def test_a_model_saved_in_python(run):
    names = ["age", "grade"]
    viper.VariationalLogisticRegression().fit(FRAME[names], FRAME["died"]).save("python.viper")
    code, out, err = run("predict", "python.viper", "data.csv")
    assert code == 0, err
    expected = viper.load("python.viper").predict_proba(FRAME[names])[:, 1]
    np.testing.assert_allclose(pd.read_csv(io.StringIO(out))["probability"], expected)
    assert run("summary", "python.viper")[0] == 0
    assert document(run("evaluate", "python.viper", "data.csv", "-t", "died", "--json"))["rows"] == ROWS


def test_evaluate(run):
    fitted(run, "-t", "died", "-o", "m.viper", "--cv", "0")
    said = document(run("evaluate", "m.viper", "data.csv", "--json", "--bins", "4"))
    model = viper.load("m.viper")
    assert said["auc"] == pytest.approx(roc_auc_score(FRAME["died"], model.predict_proba(FRAME)[:, 1]))
    assert said["interval_width"] == pytest.approx(np.diff(model.predict_interval(FRAME)).mean())
    assert sum(row["rows"] for row in said["calibration"]) == ROWS
    code, out, _ = run("evaluate", "m.viper", "data.csv")
    assert code == 0
    assert "Calibration" in out
    FRAME.assign(died="maybe").to_csv("other.csv", index=False)
    code, _, err = run("evaluate", "m.viper", "other.csv")
    assert code == 3
    assert "must hold the classes of the model, ['no', 'yes']; got 'maybe' in line 2" in err


def test_evaluate_a_rare_outcome(run):
    """Never 0.000 where there is a number, and every score beside that of the base rate."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=4000)
    rare = pd.DataFrame({"x": x, "ill": np.where(generator.random(4000) < 0.004 * np.exp(x), "yes", "no")})
    rare.to_csv("rare.csv", index=False)
    assert run("fit", "rare.csv", "-t", "ill", "-o", "rare.viper", "--cv", "0")[0] == 0
    code, out, _ = run("evaluate", "rare.viper", "rare.csv")
    assert code == 0
    assert not re.search(r"(?<!\d)0\.0+(?![\d ]*±)(?!\d)", out), out
    assert "base rate only" in out
    said = document(run("evaluate", "rare.viper", "rare.csv", "--json"))
    assert said["base_accuracy"] == pytest.approx(1 - said["base_rate"])
    assert 0 < said["log_skill"] < 1
    assert said["average_precision"] > said["base_rate"]
    assert said["calibration_verdict"]["verdict"] in ("good", "fair", "unclear", "poor")
    assert said["calibration_verdict"]["sentence"] in " ".join(out.split())


def test_evaluate_decides_and_groups(run):
    fitted(run, "-t", "died", "-o", "m.viper", "--cv", "0")
    said = document(run("evaluate", "m.viper", "data.csv", "--json", "--cost-fn", "4", "--by", "age", "--checks"))
    found, label = said["decision"], FRAME["died"] == "yes"
    probability = viper.load("m.viper").predict_proba(FRAME)[:, 1]
    assert found["threshold"] == 0.2
    assert found["true_positive"] == ((probability >= 0.2) & label).sum()
    assert found["cost"] == found["false_positive"] + 4 * found["false_negative"]
    assert found["rates"]["sensitivity"]["value"] == pytest.approx(found["true_positive"] / label.sum())
    groups = said["groups"]["age"]["groups"]
    assert sum(row["rows"] for row in groups) == ROWS
    assert {"observed", "observed_lower", "auc", "brier_upper", "few", "differs"} <= set(groups[0])
    assert {row["statistic"] for row in said["checks"]["predictive"]} >= {"positives", "log score"}
    code, out, _ = run("evaluate", "m.viper", "data.csv", "--budget", "10%", "--by", "age", "--checks")
    assert code == 0
    assert f"at most {ROWS // 10} of {ROWS} rows are acted on" in out
    assert "By age" in out
    assert "Outcomes drawn from the posterior" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "--budget must be a number of rows, or a share such as 5%; got '0'"),
        (["--budget", "many"], "--budget must be a number of rows, or a share such as 5%; got 'many'"),
        (["--threshold", "0.3", "--cost-fn", "2"], "--threshold cannot be combined with costs or a budget"),
    ],
)
def test_evaluate_refuses_contradictions(run, arguments, message):
    code, _, err = run("evaluate", "m.viper", "data.csv", *arguments)
    assert code == 2
    assert message in err


# --- report ---


def test_report_escapes_names(run):
    pytest.importorskip("viper.report")
    fitted(run, "-t", "died", "-o", "m.viper", "--cv", "0")
    code, _, err = run("report", "m.viper", "data.csv", "-o", "r.html", "--map", "age", "grade")
    assert code == 0, err
    page = Path("r.html").read_text(encoding="utf-8")
    assert "<b>sex</b>" not in page
    assert "&lt;b&gt;sex&lt;/b&gt;" in page
    code, _, err = run("report", "m.viper", "data.csv", "-o", "r.html")
    assert code == 4
    assert "Pass --force" in err


def test_report_names_rows_only_if_asked(run):
    FRAME.assign(case=[f"{k:05d}" for k in range(ROWS)]).to_csv("cases.csv", index=False)
    run("fit", "cases.csv", "-t", "died", "--drop", "case", "-o", "m.viper", "--cv", "0")
    options = {"r.html": (), "named.html": ("--row-labels", "case"), "none.html": ("--no-rows",)}
    for name, more in options.items():
        code, _, err = run("report", "m.viper", "cases.csv", "-o", name, *more)
        assert code == 0, err
    plain, named, none = (Path(name).read_text(encoding="utf-8") for name in options)
    assert re.search('aria-label="Show case 0[0-9]{4}"', named)
    assert 'aria-label="Show row ' in plain
    assert not re.search(r">0\d{4}<", plain + none)
    assert 'class="person' not in none
    code, _, err = run("report", "m.viper", "cases.csv", "-o", "x.html", "--row-labels", "Case")
    assert code == 3
    assert "--row-labels must be a column of the table; got 'Case'" in err
    code, _, err = run("report", "m.viper", "cases.csv", "-o", "x.html", "--row-labels", "case", "--no-rows")
    assert code == 2
    assert "exclude each other" in err
    assert not Path("x.html").exists()


# --- compare, bound, reproduce ---


def test_compare(run):
    only = ["--only", "viper logistic", "--only", "sklearn Logistic", "--only", "share"]
    said = document(run("compare", "data.csv", "-t", "died", "--cv", "3", "--json", *only))
    by_name = {row["model"]: row for row in said["results"]}
    assert said["results"] == sorted(said["results"], key=lambda row: -row["log_score"])
    alone = fitted(run, "-t", "died", "--cv", "3")["scores"]
    assert by_name["viper logistic"]["log_score"] == pytest.approx(alone["log_score"], rel=1e-9)
    assert by_name["sklearn LogisticRegression"]["interval_width"] is None
    assert by_name["class shares only"]["log_score"] < alone["log_score"]
    code, out, _ = run("compare", "data.csv", "-t", "died", "--cv", "2", "--only", "share")
    assert code == 0
    assert "class shares only" in out


def test_compare_says_how_sure_its_ranking_is(run):
    only = ["--only", "viper logistic", "--only", "share"]
    said = document(run("compare", "data.csv", "-t", "died", "--cv", "3", "--json", *only))
    best, *others = said["results"]
    assert best["log_score_difference"] == 0
    assert not best["log_score_clearly_worse"]
    for row in others:
        assert row["log_score_difference"] == pytest.approx(row["log_score"] - best["log_score"], abs=1e-12)
        assert row["log_score_difference_error"] > 0
        assert row["brier_difference"] >= 0
    assert {row["model"]: row["log_score_clearly_worse"] for row in others}["viper logistic, terms 12"] is False
    assert {row["model"] for row in said["loo"]} == {"viper logistic", "viper logistic, prior auto"}
    assert said["loo"][0]["difference"] == 0
    code, out, _ = run("compare", "data.csv", "-t", "died", "--cv", "2", "--no-loo", *only)
    assert code == 0
    assert "No clear difference from the best" in out
    assert "Leave-one-out" not in out


def test_bound(run):
    said = document(run("bound", "--mean", "1", "--sd", "2", "--terms", "3", "--json"))
    methods = {row["method"]: row for row in said["methods"]}
    assert methods["exact"]["value"] == viper.expected_softplus(1.0, 4.0).value
    assert methods["paper's bound, l = 3"]["value"] == viper.expected_softplus(1.0, 4.0, terms=3).value
    pg = viper.expected_softplus(1.0, 4.0, bound="pg")
    assert methods["Jaakkola-Jordan (Pólya-Gamma)"]["slope"] == pg.slope
    assert methods["certified upper bound"]["gap"] > 0
    assert said["terms_for_1_percent"] == viper.terms_needed(1.0, 4.0, 0.01)
    code, out, _ = run("bound", "--mean", "1", "--sd", "2")
    assert code == 0
    assert "1.642495369528" in out


# --- the program ---


STEP = re.compile(r"^```(python)?\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", flags=re.MULTILINE | re.DOTALL)


def test_the_page_can_be_followed_from_top_to_bottom(run, capsys, monkeypatch):
    """Every block, in order and in one folder, as a reader would: each prints what the page shows."""
    monkeypatch.setattr(terminal, "PATIENT_SECONDS", 3600.0)  # no notes of progress, which depend on the machine
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    steps, names = [found.groups() for found in STEP.finditer(page)], {}
    commands = [source for language, source, _ in steps if language is None]
    assert len(commands) == 5
    for language, source, shown in steps:
        if language == "python":
            exec(source, names)
            printed = capsys.readouterr().out
        elif source.startswith("head"):
            _, lines, path = shlex.split(source)
            printed = "\n".join(Path(path).read_text(encoding="utf-8").splitlines()[: -int(lines)])
        else:
            printed = "".join(run(*shlex.split(source)[1:])[1:])
        if shown is not None:
            assert difference(*(re.sub(r"in [\d.]+ s\b", "", text) for text in (shown, printed))) is None


@pytest.mark.parametrize(
    "command", ["fit", "predict", "evaluate", "summary", "effects", "compare", "bound", "report", "demo", "reproduce"]
)
def test_every_command_has_help_with_an_example(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"viper {command}" in out.split("Examples")[1]


def test_the_program_alone_shows_its_help(run):
    assert run() == (2, "", run("--help")[1])


def test_help_names_kinds_of_values_as_people_do(run):
    text = run("fit", "--help")[1]
    assert "--drop <text>" in text
    assert "--cv <integer>" in text
    assert "--test-size <number>" in text
    assert not re.search(r"<(list|str|int|float)\b", text + run("bound", "--help")[1])


def test_a_wrong_value_is_refused_in_plain_words(run):
    line = "viper: --level must be less than or equal to 0.999999; got 95. See: viper predict --help\n"
    assert run("predict", "m.viper", "data.csv", "--level", "95") == (2, "", line)
    line = "viper: --cv must be a valid integer; got 'few'. See: viper fit --help\n"
    assert run("fit", "data.csv", "--cv", "few") == (2, "", line)
    code, _, err = run("fit", "data.csv", "--missing", "zero")
    assert code == 2
    assert err.startswith("viper: Invalid value for '--missing': 'zero' is not one of 'error',")


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help_cuts_nothing_and_examples_can_be_copied(columns, run, monkeypatch):
    """Whole names of options, and examples on one line each, on terminals of any width."""
    monkeypatch.setenv("COLUMNS", columns)
    text, _, examples = run("fit", "--help")[1].partition("Examples:\n")
    assert "--standardise, --standardize / --no-standardise" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    lines = inspect.cleandoc(fit_table.__doc__).partition("Examples\n--------\n")[2].splitlines()
    assert [line.strip() for line in examples.splitlines()] == lines


def test_help_needs_neither_torch_nor_pandas():
    program = "import sys\nfrom viper.cli import main\ntry:\n    main(['fit', '--help'])\nfinally:\n    "
    program += "assert not {'torch', 'pandas', 'sklearn', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_shell_completes_commands(run, monkeypatch):
    monkeypatch.setenv("_VIPER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "viper pre")
    monkeypatch.setenv("COMP_CWORD", "1")
    code, out, _ = run()
    assert (code, out.strip()) == (0, "predict")


def test_a_bug_is_named_as_one(run, monkeypatch):
    def broken(path):
        raise RuntimeError("out of order")

    monkeypatch.setattr("viper.data.table_file.check_input", broken)
    code, out, err = run("summary", "m.viper")
    assert (code, out) == (1, "")
    assert err.startswith("viper: this is a bug in viper: RuntimeError: out of order")


def test_reproduce_lists_and_makes_artefacts(run):
    assert "…" not in run("reproduce")[1]
    listed = document(run("reproduce", "--json"))
    assert "figure-1" in {one["name"] for one in listed}
    (made,) = document(run("reproduce", "figure-1", "--quick", "--step", "run", "--json", "-o", "results"))
    assert made["made"] > 0
    assert pd.read_csv(made["files"][0]).shape[0] >= made["made"]
    code, _, err = run("reproduce", "figure-2")
    assert code == 3
    assert "Did you mean 'figure-1'?" in err


THREE_COMMANDS = """
import contextlib, sys
from viper.cli import main
for arguments in (["fit", "data.csv", "-t", "died", "-o", "model.viper", "--cv", "0"], ["summary", "model.viper"],
                  ["predict", "model.viper", "data.csv"]):
    with contextlib.suppress(SystemExit):
        main(arguments)
    sys.stdout.write("-- the end --")
"""


@pytest.mark.parametrize("setting", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_what_is_piped_is_utf8_in_every_locale(tmp_path, setting):
    """Names, labels and the characters of tables are printed as they are in the file, whatever the locale can spell."""
    named = pd.DataFrame({"größe": np.arange(60.0) % 7, "ward": ["北", "süd", "west"] * 20})
    named["died"] = np.where(named["größe"] < 3, "da ✓", "no")
    named.to_csv(tmp_path / "data.csv", index=False)
    environment = os.environ | {"PYTHONCOERCECLOCALE": "0"} | setting
    done = subprocess.run(
        [sys.executable, "-c", THREE_COMMANDS], cwd=tmp_path, capture_output=True, check=True, env=environment
    )
    fitted, summary, predicted, _ = done.stdout.decode("utf-8").split("-- the end --")
    assert all(word in fitted for word in ("größe", "北", "da ✓"))
    assert all(word in summary for word in ("größe", "北", "…", "●"))
    assert predicted.count("da ✓") > 20


def test_a_line_too_long_for_the_terminal_goes_on_with_its_indent(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "PIPE_WIDTH", 20)
    terminal.say("head\n  [bold]one[/] two three four five six\n")
    assert capsys.readouterr().out == "head\n  one two three four\n  five six\n\n"


def test_an_interval_beyond_the_strip_ends_in_an_arrow():
    """A dot is drawn only where the estimate lies."""
    strip = lambda *interval: terminal.interval_strip(*interval, (-1.0, 1.0)).plain  # noqa: E731
    inside, partly, outside = strip(-1.0, -0.5, 0.2), strip(-0.4, 0.9, 1.4), strip(-3.0, -2.5, -2.0)
    assert "◂" not in inside + partly
    assert inside.count("●") == partly.count("●") == 1
    assert partly.endswith("▸")
    assert outside.startswith("◂ ")
    assert "●" not in outside
    assert {len(s) for s in (inside, partly, outside)} == {terminal.STRIP_WIDTH}
