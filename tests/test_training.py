"""The record of the training rows: counted again here from the rows, stored, and checked when it is read."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import viper
from viper.errors import StorageError
from viper.formula.encoding import Encoding
from viper.formula.learn import learn_formula
from viper.formula.training import FEWEST_RECORDED, MOST_BINS, TrainingColumn, equal_bins

FORMULA = "y ~ age + log(dose) + C(ward) + smoker"


def patients(n=400, seed=0):
    rng = np.random.default_rng(seed)
    table = {"age": rng.normal(60, 12, n), "dose": rng.lognormal(size=n), "ward": rng.choice([3, 1, 2], n)}
    table |= {"smoker": rng.choice(["yes", "no"], n), "y": rng.choice(["b", "a"], n)}
    frame = pd.DataFrame(table)
    frame.loc[[5, 7, 11], "age"] = np.nan
    frame.loc[[5], "smoker"] = None
    return frame


@pytest.mark.parametrize("missing", ["drop", "mean"])
def test_the_record_counts_the_rows(missing):
    frame = patients()
    training = learn_formula(FORMULA, frame, missing).encoding.training
    used = frame.dropna() if missing == "drop" else frame
    assert (training.rows, training.rows_used) == (400, len(used))
    assert training.class_counts == used["y"].value_counts().sort_index().to_dict()
    assert {name: column.missing for name, column in training.columns.items()} == frame.drop(
        columns="y"
    ).isna().sum().to_dict()
    age = training.columns["age"]
    present = used["age"].dropna()
    assert (age.low, age.high) == (present.min(), present.max())
    np.testing.assert_allclose([age.mean, age.sd], [present.mean(), present.std(ddof=0)], rtol=1e-12)
    np.testing.assert_array_equal(
        np.histogram(present, [-np.inf, *np.nextafter(age.cuts, np.inf), np.inf])[0], age.rows
    )
    assert training.columns["ward"].rows == used["ward"].value_counts().sort_index().tolist()
    assert training.columns["smoker"].rows == used["smoker"].value_counts().sort_index().tolist()
    assert training.missing_shares["age"] == 3 / 400
    assert training.file is None
    assert set(training.versions) == {"viper", "python", "numpy", "torch"}


@pytest.mark.parametrize("n", [1, 4, 9, 10, 11, 50, 437, 5000])
@pytest.mark.parametrize("values", ["distinct", "few", "mostly zero"])
def test_bins_are_nearly_equal_and_none_is_one_row(n, values):
    rng = np.random.default_rng(n)
    made = {"distinct": rng.normal(size=n), "few": rng.integers(0, 4, n), "mostly zero": rng.poisson(0.1, n)}
    x = np.sort(made[values].astype(float))
    cuts, rows = equal_bins(x)
    assert sum(rows) == n
    assert len(rows) == len(cuts) + 1 <= MOST_BINS
    assert min(rows) >= min(n, FEWEST_RECORDED)
    assert [int((x <= cut).sum()) for cut in cuts] == np.cumsum(rows)[:-1].tolist()
    if values == "distinct" and n % MOST_BINS == 0 and n >= 50:
        assert set(rows) == {n // MOST_BINS}


def test_a_rare_level_does_not_show_that_it_is_one_person():
    column = pd.Series(["a"] * 40 + ["b"])
    assert TrainingColumn.of_levels(column, ["a", "b"], 0).rows == [40, FEWEST_RECORDED]


def test_huge_and_tiny_numbers_have_finite_moments():
    x = np.array([1e300, 2e300, 3e300])
    for unit in (1.0, 5e7, 1e-300 * 1e-300):
        found = TrainingColumn.of_numbers(x * unit, 0)
        assert np.isfinite([found.mean, found.sd]).all()
    np.testing.assert_allclose(TrainingColumn.of_numbers(x, 0).sd, np.std([1, 2, 3]) * 1e300)


def test_it_is_stored_and_comes_back(tmp_path):
    model = viper.VariationalLogisticRegression.from_formula(FORMULA, patients(), missing="mean")
    model.save(tmp_path / "m.viper")
    assert viper.load(tmp_path / "m.viper").formula_.training == model.formula_.training
    assert viper.load(tmp_path / "m.viper").formula_ == model.formula_


def test_a_date_can_be_fixed(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert learn_formula(FORMULA, patients(), "drop").encoding.training.date == "1970-01-02T00:00:00+00:00"


def state():
    return json.loads(json.dumps(learn_formula(FORMULA, patients(), "mean").encoding.to_state()))


def forged(*path, value):
    made = state()
    at = made
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return made


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("training",), []),
        (("training",), {}),
        (("training", "rows"), -1),
        (("training", "rows"), True),
        (("training", "date"), "yesterday"),
        (("training", "versions"), ["numpy"]),
        (("training", "columns"), {}),
        (("training", "columns", "age"), None),
        (("training", "columns", "age", "kind"), "text"),
        (("training", "columns", "age", "cuts"), [2.0, 1.0]),
        (("training", "columns", "age", "low"), "1"),
        (("training", "columns", "age", "low"), None),
        (("training", "columns", "age", "sd"), float("nan")),
        (("training", "columns", "age", "other"), 1),
        (("training", "columns", "ward", "rows"), [5]),
        (("training", "file"), {"name": "x"}),
        (("training", "file"), {"name": "x", "sha256": None, "size": 1, "format": "csv", "na": "NA"}),
        (("unseen",), "guess"),
        (("beyond",), 3),
    ],
)
def test_a_forged_record_is_refused_in_one_line(path, value):
    with pytest.raises(StorageError, match=r"formula.* must .*; got") as error:
        Encoding.from_state(forged(*path, value=value))
    assert "\n" not in str(error.value)


def test_rules_and_record_are_stored_only_if_they_are_set():
    encoding = replace(learn_formula(FORMULA, patients(), "mean").encoding, training=None)
    assert not {"unseen", "beyond", "training"} & set(encoding.to_state())
    assert Encoding.from_state(json.loads(json.dumps(encoding.to_state()))) == encoding
    changed = replace(encoding, unseen="baseline", beyond="clamp")
    assert Encoding.from_state(json.loads(json.dumps(changed.to_state()))) == changed


def test_the_command_line_records_the_file(tmp_path):
    from typer.testing import CliRunner

    from viper.cli.app import app

    path = tmp_path / "patients.csv"
    patients().assign(ward=lambda t: t["ward"].astype(str), empty=1).to_csv(path, index=False, sep=";", na_rep="?")
    out = tmp_path / "m.viper"
    arguments = ["fit", str(path), "--target", "y", "--na", "?", "--missing", "mean", "--cv", "0", "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    file = viper.load(out).formula_.training.file
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (file.name, file.size, file.format) == ("patients.csv", path.stat().st_size, "csv")
    assert (file.separator, file.decimal, file.encoding, file.na) == (";", ".", "utf-8", ["?"])
    assert set(file.left_out) == {"empty"}
