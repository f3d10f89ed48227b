"""Unattended prediction on the command line: notes, exit codes, rules, and files that are read as in the fit."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import dump_svmlight_file

import viper
from viper.data.csv_text import CsvText, shown_decimal

GENERATOR = np.random.default_rng(0)
ROWS = 300
FRAME = pd.DataFrame(
    {
        "age": GENERATOR.uniform(20.0, 90.0, ROWS).round(1),
        "dose": GENERATOR.lognormal(0.0, 0.6, ROWS).round(2),
        "town": GENERATOR.choice(["Köln", "Bonn", "Mainz"], ROWS),
    }
)
LOG_ODDS = (FRAME["age"] - 55) / 15 + np.log(FRAME["dose"])
FRAME["died"] = np.where(GENERATOR.random(ROWS) < 1 / (1 + np.exp(-LOG_ODDS)), "yes", "no")
FORMULA = "died ~ bs(age, df=4) + log(dose) + town"


@pytest.fixture
def fitted(command):
    """The program in a folder with a model, its data and a table of new rows."""
    FRAME.to_csv("data.csv", index=False)
    code, _, err = command("fit", "data.csv", "--formula", FORMULA, "--missing", "mean", "--cv", "0", "-o", "m.viper")
    assert code == 0, err
    return command


def broken():
    new = FRAME[:20].astype({"age": object})
    new.loc[2, "age"], new.loc[3, "town"], new.loc[4, "age"] = 400.0, "Ulm", "old"
    new.loc[5:6, "age"] = None
    return new


def test_one_bad_row_does_not_cost_the_others(fitted):
    broken().to_csv("new.csv", index=False)
    code, _, err = fitted("predict", "m.viper", "new.csv", "-o", "p.csv")
    table = pd.read_csv("p.csv")
    assert code == 5
    assert np.flatnonzero(table["probability"].isna()).tolist() == [2, 3, 4]
    assert table["note"][3] == "no prediction: town = 'Ulm' is not in the training data"
    good = FRAME[:20].drop(index=[2, 3, 4, 5, 6])
    expected = viper.load("m.viper").predict_proba(good)[:, 1]
    np.testing.assert_allclose(table["probability"][good.index], expected, rtol=1e-12)
    assert "3 of 20 rows have no prediction, because values are not a number or date (1 in 'age'); " in err
    assert "not in the training data (1 in 'town')" in err
    assert "values filled in: 2 in 'age'." in err
    assert "20 rows written to p.csv" in err


def test_rules_given_again_replace_those_of_the_fit(fitted):
    broken().drop(index=4).to_csv("new.csv", index=False)
    code, out, err = fitted(
        "predict", "m.viper", "new.csv", "-o", "p.csv", "--unseen", "baseline", "--beyond", "clamp", "--json"
    )
    assert code == 0, err
    said = json.loads(out)
    assert (said["rows"], said["without_probability"]) == (19, 0)
    assert said["remarks"]["replaced"] == {"town": 1}
    assert said["remarks"]["clamped"] == {"bs(age, df=4)": 1}
    assert said["remarks"]["filled"] == {"age": 2}
    options = ["--unseen", "missing", "--beyond", "clamp", "-o", "n.viper", "--cv", "0", "--missing", "mean"]
    assert fitted("fit", "data.csv", "--formula", FORMULA, *options)[0] == 0
    assert viper.load("n.viper").formula_.unseen == "missing"
    assert fitted("predict", "n.viper", "new.csv", "-o", "q.csv")[0] == 0


def test_rows_left_out_by_the_rule_for_missing_values_are_no_failure(command):
    FRAME.to_csv("data.csv", index=False)
    command("fit", "data.csv", "-t", "died", "--missing", "drop", "--cv", "0", "-o", "m.viper")
    FRAME[:9].assign(age=FRAME["age"].where(FRAME.index != 3)).to_csv("new.csv", index=False)
    code, _, err = command("predict", "m.viper", "new.csv", "-o", "p.csv")
    assert code == 0
    assert "1 of 9 rows has no prediction, because values are missing (1 in 'age')." in err
    assert pd.read_csv("p.csv")["note"][3] == "no prediction: age is missing"


@pytest.mark.parametrize("out", ["p.csv", "-"])
def test_a_file_in_which_nothing_can_be_predicted_is_refused_with_the_first_reason(fitted, tmp_path, out):
    FRAME[:9].assign(town="Ulm").to_csv("new.csv", index=False)
    code, _, err = fitted("predict", "m.viper", "new.csv", "-o", out)
    assert code == 3
    assert "got none of 9. In line 2: town = 'Ulm' is not in the training data." in err
    assert not (tmp_path / "p.csv").exists()


def test_values_a_thousand_times_too_large_are_loud(fitted):
    FRAME.assign(dose=FRAME["dose"] * 1000).to_csv("new.csv", index=False)
    code, _, err = fitted("predict", "m.viper", "new.csv", "-o", "p.csv")
    assert code == 0
    assert "values far outside the range of the training data: 300 in 'dose'." in err
    assert "columns distributed differently from the training data: 'dose' (100% outside its range)." in err
    assert pd.read_csv("p.csv")["note"].str.contains("is far above the training data").all()
    _, out, err = fitted("evaluate", "m.viper", "new.csv")
    assert "values far outside the range of the training data: 300 in 'dose'." in err
    assert "Drift: 1 of 3 columns is distributed differently from the training data" in out
    assert "100% outside its range" in out
    said = json.loads(fitted("evaluate", "m.viper", "new.csv", "--json")[1])
    assert [one["column"] for one in said["drift"] if one["verdict"] != "same"] == ["dose"]


def test_evaluate_mentions_what_was_filled_in_and_finds_no_drift(fitted):
    FRAME.assign(age=FRAME["age"].where(FRAME.index % 60 > 0)).to_csv("new.csv", index=False)
    code, out, err = fitted("evaluate", "m.viper", "new.csv")
    assert code == 0
    assert "values filled in: 5 in 'age'." in err
    assert "Drift: All 3 columns are distributed as in the training data." in out


def test_evaluate_leaves_out_rows_that_cannot_be_predicted(fitted):
    broken().assign(died=FRAME["died"]).to_csv("new.csv", index=False)
    code, out, err = fitted("evaluate", "m.viper", "new.csv", "--json")
    assert code == 0, err
    assert json.loads(out)["rows"] == 17
    assert "3 rows without a class or a prediction are left out." in err
    for command in (["evaluate", "m.viper", "new.csv", "--checks", "--by", "age"], ["effects", "m.viper", "new.csv"]):
        code, _, err = fitted(*command)
        assert code == 0, err


# --- files are read as in the fit ---


def european(path, **options):
    FRAME.assign(age=FRAME["age"].where(FRAME.index % 50 > 0)).to_csv(
        path, index=False, **{"sep": ";", "decimal": ",", "encoding": "latin-1", "na_rep": "k.A.", **options}
    )


@pytest.fixture
def read_as_written(command):
    european("data.csv")
    reading = ["--decimal", ",", "--encoding", "latin-1", "--na", "k.A."]
    arguments = ["fit", "data.csv", "-t", "died", "--missing", "mean", "--cv", "0", "-o", "m.viper", *reading]
    code, _, err = command(*arguments)
    assert code == 0, err
    assert command("predict", "m.viper", "data.csv", *reading, "-o", "given.csv")[0] == 0
    return command


def test_how_the_file_of_the_fit_was_read_is_remembered(read_as_written):
    code, _, err = read_as_written("predict", "m.viper", "data.csv", "-o", "remembered.csv")
    assert code == 0, err
    pd.testing.assert_frame_equal(pd.read_csv("remembered.csv"), pd.read_csv("given.csv"))
    code, out, err = read_as_written("evaluate", "m.viper", "data.csv", "--json")
    assert json.loads(out)["rows"] == ROWS, err


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({"sep": ",", "decimal": "."}, ["decimal '.'"]),
        ({"encoding": "utf-8"}, ["encoding 'utf-8'"]),
        ({"sep": "\t", "decimal": ".", "encoding": "utf-8"}, ["decimal '.'", "encoding 'utf-8'"]),
        ({"sep": "|"}, []),
    ],
)
def test_a_file_that_is_evidently_different_is_read_as_it_is(read_as_written, options, noted):
    european("new.csv", **options)
    code, _, err = read_as_written("predict", "m.viper", "new.csv", "-o", "p.csv")
    assert code == 0, err
    pd.testing.assert_frame_equal(pd.read_csv("p.csv"), pd.read_csv("given.csv"))
    for words in ("decimal '.'", "encoding 'utf-8'"):
        assert (f"new.csv is read with {words}, as detected" in err) == (words in noted)


@pytest.mark.parametrize(
    ("known", "cells", "shown"),
    [
        (".", ["1.5", "2"], "."),
        (".", ["1,5", "2"], ","),
        (".", ["1,500", "2"], "."),
        (",", ["1,5", "2"], ","),
        (",", ["1.25", "2"], "."),
        (",", ["1.500", "2"], ","),
        (",", ["1.25", "3,5"], ","),
        (",", ["1", "2"], ","),
    ],
)
def test_the_decimal_mark_is_that_of_the_fit_unless_a_file_shows_the_other(tmp_path, known, cells, shown):
    path = tmp_path / "new.csv"
    path.write_text("a;b\n" + "".join(f"{cell};x\n" for cell in cells), encoding="utf-8")
    assert shown_decimal(CsvText(path), known) == shown


def test_an_unusual_separator_is_remembered(command):
    text = FRAME.to_csv(index=False).replace(",", "~")
    for name in ("data.csv", "new.csv"):
        Path(name).write_text(text, encoding="utf-8")
    assert command("fit", "data.csv", "-t", "died", "--separator", "~", "--cv", "0", "-o", "m.viper")[0] == 0
    code, _, err = command("predict", "m.viper", "new.csv", "-o", "p.csv")
    assert code == 0, err
    FRAME.to_csv("plain.csv", index=False)
    assert command("predict", "m.viper", "plain.csv", "-o", "q.csv")[0] == 0
    pd.testing.assert_frame_equal(pd.read_csv("p.csv"), pd.read_csv("q.csv"))


@pytest.mark.parametrize("what", ["predict", "evaluate", "report"])
def test_features_that_are_zero_in_all_rows_of_a_libsvm_file(command, what):
    X = GENERATOR.normal(size=(60, 3)) * (GENERATOR.random((60, 3)) < 0.5)
    y = (X[:, 0] + GENERATOR.normal(size=60) > 0).astype(int)
    dump_svmlight_file(X, y, "t.libsvm", zero_based=False)
    assert command("fit", "t.libsvm", "-o", "m.viper", "--cv", "0")[0] == 0
    dump_svmlight_file(X[:20] * [1, 1, 0], y[:20], "new.libsvm", zero_based=False)
    code, _, err = command(what, "m.viper", "new.libsvm")
    assert code == 0, err


# --- maps and cards ---


def test_a_map_ends_where_a_spline_does(command):
    places = pd.DataFrame(GENERATOR.uniform(0.0, 1.0, (200, 2)), columns=["lon", "lat"])
    died = places["lon"] + GENERATOR.normal(0.0, 0.3, 200) > 0.5
    places.assign(died=died.map({True: "yes", False: "no"})).to_csv("map.csv", index=False)
    formula = "died ~ bs(lon, df=4) + log(lat)"
    assert command("fit", "map.csv", "--formula", formula, "--cv", "0", "-o", "m.viper")[0] == 0
    code, _, err = command("report", "m.viper", "map.csv", "--map", "lon", "lat", "-o", "r.html")
    assert code == 0, err
    from viper.report.views import probability_grid

    grid = probability_grid(viper.load("m.viper"), places, ("lon", "lat"))
    assert np.isfinite(grid.probability).all()
    assert places["lon"].min() <= grid.x[0] < places["lon"].min() + 0.02
    assert places["lon"].max() - 0.02 < grid.x[-1] <= places["lon"].max()
    assert 0 < grid.y[0] < places["lat"].min() + 0.02
    assert grid.y[-1] > places["lat"].max()


def test_rows_that_cannot_be_predicted_do_not_stop_a_report(fitted):
    broken().assign(died=FRAME["died"]).to_csv("new.csv", index=False)
    code, _, err = fitted("report", "m.viper", "new.csv", "-o", "r.html")
    assert code == 0, err


def test_the_card_says_what_the_model_was_fitted_to(fitted):
    out = fitted("summary", "m.viper")[1]
    card = viper.load("m.viper").card()
    low, high, mean, sd = FRAME["age"].min(), FRAME["age"].max(), FRAME["age"].mean(), FRAME["age"].std(ddof=0)
    assert f"{low:.4g} to {high:.4g}, mean {mean:.4g}, sd {sd:.4g}" in out
    towns = FRAME["town"].value_counts()
    assert ", ".join(f"{town} ({count})" for town, count in towns.items()) in out
    assert f"sha256 {hashlib.sha256(Path('data.csv').read_bytes()).hexdigest()[:16]}…" in out
    assert json.loads(fitted("summary", "m.viper", "--json")[1])["card"] == json.loads(json.dumps(card))
    assert card["columns"][2] == {"name": "town", "kind": "category", "levels": towns.to_dict(), "missing": 0.0}
    assert card["rules"] == {"missing": "mean", "unseen": "error", "beyond": "refuse"}
    assert card["data"]["class_counts"] == FRAME["died"].value_counts().to_dict()


def test_a_model_without_a_record_has_a_shorter_card(command):
    fitted = viper.VariationalLogisticRegression().fit(FRAME[["age", "dose"]], FRAME["died"])
    card = fitted.card()
    assert [column["name"] for column in card["columns"]] == ["age", "dose"]
    assert card["data"] == {}
    assert card["prior"] == {"age": 1.0, "dose": 1.0}
    fitted.save("m.viper")
    code, out, _ = command("summary", "m.viper")
    assert code == 0
    assert "What was it fitted to?" not in out
