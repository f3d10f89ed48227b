"""Raw columns of a table: text with blanks, dates, identifiers, and what `.` stands for."""

import calendar
import json
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pytest
from tolerances import TOLERANCE

import viper
import viper.report.page
import viper.report.shares
from viper.errors import FormulaError, LeftOutWarning
from viper.formula.columns import as_days, has_row_numbers, is_date, is_identifier, levels_of

RNG = np.random.default_rng(5)
ROWS = 240
WHEN = pd.Series(pd.Timestamp("2023-01-01") + pd.to_timedelta(RNG.integers(0, 900, ROWS), "D"))
FRAME = pd.DataFrame({"x": RNG.normal(size=ROWS), "when": WHEN, "ward": RNG.choice(["ICU", "east", "west"], ROWS)})
LOG_ODDS = FRAME["x"] + 2 * (WHEN.dt.month == 7) - (FRAME["ward"] == "ICU")
FRAME["y"] = np.where(RNG.random(ROWS) < 1 / (1 + np.exp(-LOG_ODDS)), "yes", "no")
Logistic = viper.VariationalLogisticRegression


def close(model, other):
    np.testing.assert_allclose(model.coef_, other.coef_, rtol=TOLERANCE["converged"])


def notes(err):
    return [text.strip() for text in err.split("note: ")[1:]]


# --- text ---


def test_blanks_around_text_do_not_make_levels(command):
    blanks = RNG.choice(["", " ", "\t  "], ROWS)
    untidy = FRAME.assign(ward=blanks + FRAME["ward"] + blanks[::-1])
    model, tidy = (Logistic.from_formula("y ~ x + ward", frame) for frame in (untidy, FRAME))
    assert model.formula_.levels == {"ward": ["ICU", "east", "west"]}
    close(model, tidy)
    for made in (model, tidy):  # and a tidy model reads untidy rows
        np.testing.assert_array_equal(made.predict_proba(untidy), made.predict_proba(FRAME))
    categories = untidy.assign(ward=untidy["ward"].astype("category"))
    close(Logistic.from_formula("y ~ x + ward", categories), tidy)
    untidy.to_parquet("t.parquet")
    code, out, err = command("fit", "t.parquet", "-t", "y", "--drop", "when", "--json", "-o", "m.viper")
    assert code == 0, err
    changed = int((untidy["ward"] != FRAME["ward"]).sum())
    assert f"blanks around the text of column 'ward' are removed, in {changed} cells." in notes(err)
    assert "ward[T.east]" in {row["name"] for row in json.loads(out)["coefficients"]}


def test_capitals_make_levels_and_are_noted(command):
    shouted = FRAME.assign(ward=FRAME["ward"].where(FRAME.index % 2 == 0, FRAME["ward"].str.upper()))
    shouted["y"] = FRAME["y"].where(FRAME.index % 3 > 0, FRAME["y"].str.title())
    shouted.to_csv("t.csv", index=False)
    code, _, err = command("fit", "t.csv", "-t", "y", "--drop", "when", "--cv", "0", "-o", "m.viper")
    assert code == 0, err
    for groups in (
        "column 'ward' distinguishes 'EAST' and 'east', 'WEST' and 'west'",
        "column 'y' distinguishes 'No' and 'no', 'Yes' and 'yes'",
    ):
        assert f"{groups}; spell them alike if they mean the same." in notes(err)
    FRAME.to_csv("tidy.csv", index=False)
    assert "apart" not in command("fit", "tidy.csv", "-t", "y", "--drop", "when", "--cv", "0")[2]


def test_blanks_around_classes_do_not_make_classes(command):
    untidy = FRAME.assign(y=FRAME["y"].where(RNG.random(ROWS) < 0.8, FRAME["y"] + " "))
    model = Logistic.from_formula("y ~ x", untidy)
    assert model.classes_.tolist() == ["no", "yes"]
    close(model, Logistic.from_formula("y ~ x", FRAME))
    untidy.to_csv("t.csv", index=False)
    code, out, err = command("fit", "t.csv", "--formula", "y ~ x", "--json", "-o", "m.viper")
    assert code == 0, err
    assert json.loads(out)["classes"] == ["no", "yes"]
    scores = json.loads(command("evaluate", "m.viper", "t.csv", "--json")[1])
    assert scores["rows"] == ROWS
    always = Logistic.from_formula("y ~ x", FRAME.assign(y=FRAME["y"] + " "))  # blanks that are part of every label
    assert always.classes_.tolist() == ["no ", "yes "]


@pytest.mark.parametrize("missing", [None, pd.NA, np.nan])
@pytest.mark.parametrize("values", [[1, 2, 3, 4], [1.5, 2, 3, 4], [1.5, 2.5, 3.5, 4.5]])
def test_numbers_that_are_python_objects_are_numbers(values, missing):
    """As they are in an array of objects, and in tables that other programs put together."""
    rows = pd.DataFrame({"x": [*values, missing] * 8, "y": [0, 1] * 20}, dtype=object)
    plain = pd.DataFrame({"x": [*map(float, values), np.nan] * 8, "y": [0, 1] * 20})
    fits = [Logistic.from_formula("y ~ x", table, missing="mean") for table in (rows, plain)]
    assert np.array_equal(fits[0].coef_, fits[1].coef_)
    assert fits[0].classes_.dtype == fits[1].classes_.dtype
    rows.loc[7, "x"] = 10**400
    with pytest.raises(FormulaError, match="column 'x' must be finite; got inf in row 7"):
        Logistic.from_formula("y ~ x", rows, missing="mean")


def test_a_whole_number_too_large_for_a_float_is_named(command):
    """pandas reads such a column as text, and cannot make numbers of it."""
    Path("rows.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(40)) + "9" * 400 + ",1\n")
    code, _, err = command("fit", "rows.csv", "--target", "y")
    assert code == 3
    assert "column 'x' must be numeric, as most of it is; got 9999" in err
    assert "in line 42" in err


def test_numbers_as_text_are_in_the_order_of_numbers():
    months = pd.Series([str(month) for month in RNG.integers(1, 13, 200)])
    assert levels_of(months, 50) == [str(month) for month in range(1, 13)]
    assert levels_of(pd.Series(["b", "10", "9"]), 50) == ["10", "9", "b"]
    assert levels_of(pd.Series(["1", "01", "1.0", "-2"]), 50) == ["-2", "01", "1", "1.0"]


# --- dates ---

KINDS = {
    "timestamps": WHEN,
    "seconds": WHEN.astype("datetime64[s]"),
    "date objects": WHEN.dt.date,
    "text": WHEN.dt.strftime("%Y-%m-%d"),
    "text with a time": WHEN.dt.strftime("%Y-%m-%dT00:00:00"),
    "text with blanks": WHEN.dt.strftime(" %Y-%m-%d "),
    "Arrow text": WHEN.dt.strftime("%Y-%m-%d").astype(pd.ArrowDtype(pa.string())),
    "date32": WHEN.dt.date.astype(pd.ArrowDtype(pa.date32())),
    "UTC": WHEN.dt.tz_localize("UTC"),
    "New York": WHEN.dt.tz_localize("America/New_York"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_date_are_those_of_the_calendar(kind):
    frame = FRAME.assign(when=KINDS[kind])
    model = Logistic.from_formula("y ~ days(when) + year(when) + month(when) + weekday(when)", frame, standardize=False)
    X = model.formula_.encode(frame)
    days = [datetime.fromisoformat(str(day)).toordinal() - datetime(1970, 1, 1).toordinal() for day in WHEN]
    assert X["days(when)"].tolist() == days
    assert X["year(when)"].tolist() == WHEN.dt.year.tolist()
    for i, month in enumerate(["Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]):
        assert (X[f"month(when)[T.{month}]"] == (WHEN.dt.month == i + 2)).all()
    for i, day in enumerate(["Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]):
        assert (X[f"weekday(when)[T.{day}]"] == (WHEN.dt.day_of_week == i + 1)).all()
    assert model.formula_.units["month(when)[T.Feb]"] == "vs Jan"


def test_dates_before_1970_and_times_of_day():
    times = pd.Series(pd.to_datetime(["1969-12-31 18:00", "1601-01-01", "2024-02-29 12:00", None], format="ISO8601"))
    expected = [-0.25, -134774.0, 19782.5]
    np.testing.assert_allclose(as_days(times), [*expected, np.nan], rtol=TOLERANCE["roundoff"])
    np.testing.assert_allclose(as_days(times.astype(str).where(times.notna())), [*expected, np.nan])
    frame = pd.DataFrame({"t": times[:3].tolist() * 5, "y": [0, 1, 1] * 5})
    X = Logistic.from_formula("y ~ year(t) + weekday(t)", frame, standardize=False).formula_.encode(frame)
    assert X["year(t)"][:3].tolist() == [1969, 1601, 2024]
    assert (X.loc[0, "weekday(t)[T.Wed]"], X.loc[2, "weekday(t)[T.Thu]"]) == (1, 1)


def test_a_model_with_dates_is_stored_and_fills_in_missing_dates(tmp_path):
    holes = FRAME.assign(when=WHEN.where(RNG.random(ROWS) > 0.1))
    model = Logistic.from_formula("y ~ bs(days(when), df=4) + month(when):x", holes, missing="mean")
    model.save(tmp_path / "m.viper")
    loaded = viper.load(tmp_path / "m.viper")
    middle = holes.assign(when=holes["when"].fillna(holes["when"].mean()))
    as_text = holes.assign(when=holes["when"].dt.strftime("%Y-%m-%d"))
    for frame in (holes, middle, as_text, polars.from_pandas(holes)):
        np.testing.assert_allclose(
            loaded.predict_proba(frame), model.predict_proba(middle), rtol=TOLERANCE["converged"]
        )
    with pytest.raises(FormulaError, match=r"'when' must hold dates such as 2024-12-31; got '31/12/2024' in row 0"):
        loaded.predict_proba(as_text.assign(when="31/12/2024"))


def test_months_that_do_not_occur_have_no_coefficients():
    autumn = FRAME[WHEN.dt.month.isin([9, 10, 12])]
    model = Logistic.from_formula("y ~ x + month(when)", autumn)
    assert list(model.formula_.names) == ["x", "month(when)[T.Oct]", "month(when)[T.Dec]"]
    assert model.formula_.units["month(when)[T.Oct]"] == "vs Sep"
    text = autumn.assign(month=WHEN.dt.strftime("%b"))
    same = Logistic.from_formula("y ~ x + month", text)
    np.testing.assert_allclose(model.coef_, same.coef_, atol=TOLERANCE["converged"])
    by_month = model.contrast(autumn, "when")
    assert by_month["contrast"].tolist() == ["Oct - Sep", "Dec - Sep"]
    np.testing.assert_allclose(by_month["estimate"], same.contrast(text, "month")["estimate"], atol=1e-6)


def test_a_month_that_the_fit_has_not_seen_follows_the_rule_for_new_levels(tmp_path):
    autumn, day = FRAME[WHEN.dt.month.isin([9, 10, 12])], pd.Timestamp("2024-07-01")
    rows = autumn[:3].assign(when=[day, pd.Timestamp("2024-10-07"), None])
    strict = Logistic.from_formula("y ~ x + month(when)", autumn, missing="mean")
    strict.save(tmp_path / "m.viper")
    strict = viper.load(tmp_path / "m.viper")
    with pytest.raises(FormulaError, match=r"month\(when\) must be among those of the fit; got Jul \(2024-07-01\) in"):
        strict.predict_proba(rows)
    found = strict.predict_table(rows)
    assert found["probability"].isna().tolist() == [True, False, False]
    assert found["note"].iloc[0] == "no prediction: month(when) = 'Jul' is not in the training data"
    first = Logistic.from_formula("y ~ x + month(when)", autumn, missing="mean", unseen="baseline")
    september = rows.assign(when=[pd.Timestamp("2024-09-01"), *rows["when"][1:]])
    np.testing.assert_allclose(first.predict_proba(rows), strict.predict_proba(september))
    holes = Logistic.from_formula("y ~ x + month(when)", autumn, missing="mean", unseen="missing")
    np.testing.assert_allclose(
        holes.predict_proba(rows), strict.predict_proba(rows.assign(when=rows["when"].mask([True, False, False])))
    )
    assert "counts as the first of the training data" in first.predict_table(rows)["note"].iloc[0]


def test_a_contrast_of_dates_stays_in_the_months_of_the_fit():
    months = [7, 8, 9, 10, 12]
    autumn = FRAME[WHEN.dt.month.isin(months) & (WHEN.dt.year == 2024)]
    model = Logistic.from_formula("y ~ x + days(when) + month(when)", autumn)
    found = model.contrast(autumn, "when").iloc[0]
    step = pd.Timedelta(int(found["contrast"].removeprefix("+").removesuffix(" days")), "D")
    movable = autumn[(autumn["when"] + step).dt.month.isin(months)]
    before, after = (model.predict_proba(movable.assign(when=movable["when"] + by))[:, 1] for by in (0 * step, step))
    assert 0 < len(movable) < len(autumn)
    assert found["estimate"] == pytest.approx(float((after - before).mean()), abs=1e-9)


@pytest.mark.parametrize("write", [str, str.upper, lambda name: name[:3], lambda name: f"{name[:3]}."])
def test_months_and_days_of_the_week_are_in_the_order_of_the_calendar(write):
    months = [write(calendar.month_name[k]) for k in range(1, 13)]
    days = [write(day) for day in calendar.day_name]
    for names in (months, days, months[2:5]):
        shuffled = pd.Series(np.random.default_rng(1).permutation(names * 3))
        assert levels_of(shuffled, 50) == names
        assert viper.report.shares.named_groups(shuffled).names == names
        frame = pd.DataFrame({"x": np.arange(len(shuffled)) % 5.0, "name": shuffled, "y": np.arange(len(shuffled)) % 2})
        model = Logistic.from_formula("y ~ x", frame)
        assert model.average(frame, by="name")["name"].tolist() == names
    assert levels_of(pd.Series([*months, "never"]), 50) == sorted([*months, "never"])


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ("when", r"got dates. Write which part counts: days\(when\), year\(when\), month\(when\), weekday\(when\)\."),
        ("year(x)", "must contain dates, such as 2024-12-31; got column 'x'"),
        ("month(when + x)", "month\\(\\) must contain one column of dates"),
        ("month(when, 2)", "month\\(\\) must contain one column of dates"),
        ("log(month(when))", "must have a value for every row"),
        ("month()", "must be a function of columns"),
        ("days(when) + C(when)", "used in one way; got 'when' as dates and otherwise"),
        ("x + days(when) + when", "used in one way"),
    ],
)
@pytest.mark.parametrize("kind", ["timestamps", "text"])
def test_dates_are_neither_numbers_nor_categories(term, message, kind):
    with pytest.raises(FormulaError, match=message):
        Logistic.from_formula(f"y ~ {term}", FRAME.assign(when=KINDS[kind]))


WRITTEN = {"times": WHEN, "text": WHEN.dt.strftime("%Y-%m-%d")}


@pytest.mark.parametrize("kind", WRITTEN)
def test_effects_of_dates_are_differences_of_predictions(kind):
    frame = FRAME.assign(when=WRITTEN[kind])
    model = Logistic.from_formula("y ~ x + days(when)", frame)

    def average(when):
        return model.predict_proba(FRAME.assign(when=when))[:, 1].mean()

    later = model.contrast(frame, {"when": 30}).iloc[0]
    assert later["contrast"] == "+30 days"
    assert later["estimate"] == pytest.approx(average(WHEN + pd.Timedelta(30, "D")) - average(WHEN), abs=1e-12)
    assert model.contrast(frame)["contrast"].tolist() == ["+1", "+200 days"]
    first, last = pd.Timestamp("2023-02-01"), pd.Timestamp("2024-02-01 12:00")
    for given in ([first, last], [str(first.date()), str(last)]):
        found = model.contrast(frame, {"when": given}).iloc[0]
        assert found["contrast"] == "2024-02-01 12:00:00 - 2023-02-01"
        assert found["estimate"] == pytest.approx(average(last) - average(first), abs=1e-12)
        at = model.average(frame, at={"when": given})
        assert at["when"].tolist() == ["2023-02-01", "2024-02-01 12:00:00"]
        np.testing.assert_allclose(at["estimate"], [average(first), average(last)], atol=1e-12)
    step = pd.Timedelta(1, "h")
    slope = (average(WHEN + step) - average(WHEN - step)) * 12
    assert model.slopes(frame, "when")["estimate"].iloc[0] == pytest.approx(slope, rel=1e-6)
    ends = model.contrast(frame, {"when": "minmax"})["contrast"].iloc[0]
    assert ends == f"{WHEN.max():%Y-%m-%d} - {WHEN.min():%Y-%m-%d}"


@pytest.mark.parametrize("kind", WRITTEN)
def test_months_and_weekdays_are_compared_one_at_a_time(kind):
    frame = FRAME.assign(when=WRITTEN[kind])
    found = Logistic.from_formula("y ~ x + month(when) + weekday(when)", frame).contrast(frame, "when")
    # the same model, in which both are categories of their own
    parts = FRAME.assign(month=WHEN.dt.month, day=WHEN.dt.day_of_week)
    plain = Logistic.from_formula("y ~ x + C(month) + C(day)", parts).contrast(parts, ["month", "day"])
    assert found["contrast"].iloc[[0, 10, 11, 16]].tolist() == ["Feb - Jan", "Dec - Jan", "Tue - Mon", "Sun - Mon"]
    np.testing.assert_allclose(found["estimate"], plain["estimate"], atol=1e-6)


def test_impossible_changes_of_dates():
    model = Logistic.from_formula("y ~ x + month(when)", FRAME)
    assert model.slopes(FRAME)["variable"].tolist() == ["x"]
    for ask, message in {
        lambda: model.slopes(FRAME, "when"): "slopes need numbers; got 'when', dates whose year, month or weekday",
        lambda: model.average(FRAME, at={"when": 3}): "at must give 'when' a date, such as 2024-12-31; got '3'",
        lambda: model.average(FRAME, at={"when": "2024-02-30"}): "a date, such as 2024-12-31; got '2024-02-30'",
        lambda: model.contrast(FRAME, {"when": "far"}): "'when' must be a number of days, a list of dates or one of",
        lambda: model.contrast(FRAME.assign(when="31/12/2024")): "'when' must hold dates such as 2024-12-31; got",
    }.items():
        with pytest.raises(ValueError, match=message):
            ask()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_commands_take_tables_with_dates(suffix, command):
    FRAME.to_csv("t.csv", index=False)
    FRAME.to_parquet("t.parquet")
    formula = "y ~ x + days(when) + month(when)"
    model = Logistic.from_formula(formula, FRAME)
    model.save("m.viper")
    code, out, err = command("effects", "m.viper", f"t.{suffix}", "--json")
    assert code == 0, err
    rows = {row["variable"]: row for row in json.loads(out)["contrasts"]}
    assert rows["when"]["contrast"] == "+365 days"
    assert rows["when"]["estimate"] == pytest.approx(model.contrast(FRAME, "when")["estimate"].iloc[0], abs=1e-9)
    at = command("effects", "m.viper", f"t.{suffix}", "--at", "when=2023-07-01,2024-01-01", "--json")
    assert [row["when"] for row in json.loads(at[1])["averages"]] == ["2023-07-01", "2024-01-01"]
    code, _, err = command("effects", "m.viper", f"t.{suffix}", "--at", "when=July")
    assert (code, err.strip()) == (3, "viper: at must give 'when' a date, such as 2024-12-31; got 'July'.")
    code, out, err = command("evaluate", "m.viper", f"t.{suffix}", "--json")
    assert code == 0, err
    code, _, err = command("report", "m.viper", f"t.{suffix}", "-o", "r.html")
    assert code == 0, err
    page = Path("r.html").read_text()
    assert "365 days later" in page


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_report_of_a_frame_with_dates(kind, tmp_path):
    frame = FRAME.assign(when=WRITTEN[kind])
    model = Logistic.from_formula("y ~ x + weekday(when)", frame)
    viper.report.write(model, frame, "y", tmp_path / "r.html")
    assert "Tue instead of Mon" in (tmp_path / "r.html").read_text()


def test_the_page_shows_dates_as_dates(tmp_path):
    frame = FRAME.assign(when=WHEN.where(np.arange(ROWS) % 9 > 0))
    model = Logistic.from_formula("y ~ x + days(when) + month(when)", frame, missing="mean")
    study = viper.report.study.read_study(model, frame, "y", by=["when"])
    page = viper.report.page.ReportPage(study).text()
    first, last = frame["when"].min().date(), frame["when"].max().date()
    assert f"{first} to {last}" in page  # the range of the column
    assert f"of when with the mean ({frame['when'].mean().date()})" in page
    effect = next(e for e in study.effects if e.name == "when")
    assert set(as_days(frame["when"])) >= set(effect.values)
    assert viper.report.words.effect_sentence(effect).count(" on 202") >= 2
    assert "below 2023-" in page
    assert "2023</text>" in page
    for day in as_days(frame["when"]):
        assert f"{day:,.0f}" not in page
    assert "month of when: Feb" in page


@pytest.mark.parametrize(
    ("low", "high", "names"),
    [
        ("2024-01-30", "2024-02-02", ["2024-01-30", "2024-01-31", "2024-02-01", "2024-02-02"]),
        ("2023-11-20", "2024-04-10", ["Dec 2023", "Jan 2024", "Feb 2024", "Mar 2024", "Apr 2024"]),
        ("2021-03-01", "2023-08-17", ["Jul 2021", "Jan 2022", "Jul 2022", "Jan 2023", "Jul 2023"]),
        ("1967-01-01", "2000-12-31", ["1970", "1980", "1990", "2000"]),
    ],
)
def test_ticks_of_dates(low, high, names):
    ends = as_days(pd.Series(pd.to_datetime([low, high])))
    ticks = viper.report.views.date_ticks(*ends, 5)
    assert [name for _, name in ticks] == names
    for day, name in ticks:
        moment = pd.Timestamp(0) + pd.Timedelta(day, "D")
        assert name in (f"{moment:%Y-%m-%d}", f"{moment:%b %Y}", f"{moment:%Y}")
        assert low <= f"{moment:%Y-%m-%d}" <= high


def test_text_that_is_not_all_dates_is_text():
    assert is_date(pd.Series(["2024-01-31", None]))
    for text in ("2024-02-30", "2024", "31.01.2024", "x"):
        assert not is_date(pd.Series(["2024-01-31", text]))


@pytest.mark.parametrize("kind", ["timestamps", "text"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_command_line_leaves_dates_out_and_says_so(kind, suffix, command):
    frame = FRAME.assign(when=KINDS[kind])
    frame.to_csv("t.csv", index=False)
    frame.to_parquet("t.parquet")
    for options in (["-t", "y"], ["--formula", "y ~ ."]):
        code, out, err = command("fit", f"t.{suffix}", *options, "--json")
        assert code == 0, err
        assert any("'when' is left out: dates; name days(when)" in text for text in notes(err))
        assert json.loads(out)["formula"] == "y ~ x + ward"
    code, out, err = command("fit", f"t.{suffix}", "--formula", "y ~ . + month(when)", "--json", "-o", "m.viper")
    assert (code, json.loads(out)["formula"]) == (0, "y ~ x + ward + month(when)"), err
    assert command("predict", "m.viper", f"t.{suffix}", "-o", "p.csv")[0] == 0
    assert pd.read_csv("p.csv")["probability"].count() == ROWS


# --- identifiers, and what `.` stands for ---


@pytest.mark.parametrize("name", ["id", "ID", "patient_id", "Patient ID", "patientId", "id_patient", "index"])
def test_names_of_identifiers(name):
    whole = pd.Series(RNG.permutation(1000)[:100], name=name)
    assert is_identifier(whole, 100)
    assert not is_identifier(whole.rename("age"), 100)
    assert not is_identifier(whole % 7, 7)  # codes
    assert not is_identifier(whole + 0.5, 100)


@pytest.mark.parametrize("name", ["bid", "acid", "liquid", "grid", "paid", "idea", "price_index", "COVID", "hybrid"])
def test_other_names(name):
    assert not is_identifier(pd.Series(range(100), name=name), 100)


EXTRA = FRAME.assign(patient_id=RNG.permutation(ROWS) + 4000, constant=1, empty=np.nan, nr=range(1, ROWS + 1))


@pytest.mark.parametrize("size", [1.0, 1e-300, 1e300])
def test_a_column_that_differs_only_in_its_last_digits_is_left_out(size):
    """Nothing of it would be left after its mean is subtracted, and as it is it would stand in for the intercept."""
    apart = 1.0 + np.arange(ROWS) * 2.0**-52
    with pytest.warns(LeftOutWarning, match="'stamp': the same in all rows to 12 digits; subtract its smallest value"):
        model = Logistic.from_formula("y ~ .", FRAME.assign(stamp=size * apart).drop(columns="when"))
    assert "stamp" not in model.formula_.inputs
    used = Logistic.from_formula("y ~ .", FRAME.assign(stamp=apart - 1.0).drop(columns="when"))
    assert "stamp" in used.formula_.inputs


def test_dot_does_not_treat_infinite_numbers_as_equal(command):
    frame = FRAME.drop(columns="when").assign(odd=np.where(np.arange(ROWS) == 3, np.inf, FRAME["x"]))
    with pytest.raises(ValueError, match="inf"):
        Logistic.from_formula("y ~ .", frame)


def test_dot_stands_for_the_columns_that_are_of_use(command):
    with pytest.warns(LeftOutWarning) as caught:
        model = Logistic.from_formula("y ~ .", EXTRA.drop(columns="nr"), missing="mean")
    assert caught[0].filename == __file__
    assert model.formula_.inputs == ["x", "ward"]
    for name, why in {"when": "dates", "patient_id": "it identifies rows", "constant": "the same in all rows"}.items():
        assert f"{name!r}: {why}" in str(caught[0].message)
    with pytest.warns(LeftOutWarning):
        wanted = Logistic.from_formula("y ~ . + patient_id - when", EXTRA.drop(columns=["nr", "empty"]))
    assert wanted.formula_.inputs == ["x", "patient_id", "ward"]
    EXTRA.to_csv("t.csv", index=False)
    for options in (["-t", "y"], ["--formula", "y ~ ."]):
        code, out, err = command("fit", "t.csv", *options, "--json", "--cv", "0")
        assert code == 0, err
        assert json.loads(out)["formula"] == "y ~ x + ward + nr"
        assert "column 'patient_id' is left out: it identifies rows; name it in a formula to use it." in notes(err)
        different = "has a different whole number in every row; pass --drop 'nr' if it only identifies rows."
        assert f"column 'nr' {different}" in notes(err)


def test_a_number_for_every_row_is_noted_in_any_order():
    shuffled = pd.Series(np.random.default_rng(0).permutation(5000) + 10**6)
    assert has_row_numbers(shuffled)
    assert has_row_numbers(shuffled.astype(float))
    assert not has_row_numbers(shuffled // 2)
    assert not has_row_numbers(shuffled + 0.5)


def test_dot_has_the_limit_of_levels_that_no_formula_has(command):
    named = FRAME.assign(name=[f"person {i // 3}" for i in range(ROWS)])
    rule = r"a text column must have at most 50 levels; got 80 in 'name', such as 'person 0'\."
    with pytest.raises(FormulaError, match=rule + r" Write '\. - name' to leave it out, or '\. \+ name' to use it"):
        Logistic.from_formula("y ~ .", named)
    with pytest.warns(LeftOutWarning):
        assert "name" not in Logistic.from_formula("y ~ . - name", named).formula_.inputs
    named.to_csv("t.csv", index=False)
    for options in (["-t", "y"], ["--formula", "y ~ ."]):
        code, _, err = command("fit", "t.csv", *options)
        assert code == 3
        assert err.endswith("Pass --drop 'name', or --category 'name' to use it anyway.")
    written = FRAME.assign(when=np.resize(WHEN.dt.strftime("%d.%m.%Y")[:80], ROWS))
    with pytest.raises(FormulaError, match=r"Write dates as 2024-12-31\."):
        Logistic.from_formula("y ~ .", written)


def test_text_that_tells_rows_apart_is_left_out_as_a_number_is(command):
    named = FRAME.assign(
        name=[f"person {i}" for i in range(ROWS)],
        ticket=[f"A {i // 3 if i < 150 else i}" for i in range(ROWS)],
        seen=WHEN.dt.strftime("%d.%m.%Y"),
    ).drop(columns="when")
    with pytest.warns(LeftOutWarning) as caught:
        model = Logistic.from_formula("y ~ .", named)
    assert model.formula_.inputs == ["x", "ward"]
    reasons = {
        "name": "it identifies rows, as its 240 texts all differ",
        "ticket": "it has 140 different texts in 240 rows; name it in a formula to use it",
    }
    for name, why in reasons.items():
        assert f"{name!r}: {why}" in str(caught[0].message)
    assert "; write dates as 2024-12-31." in str(caught[0].message)
    named.to_csv("t.csv", index=False)
    code, out, err = command("fit", "t.csv", "-t", "y", "--json", "--cv", "0", "-o", "m.viper")
    assert (code, json.loads(out)["formula"]) == (0, "y ~ x + ward"), err
    for name, why in reasons.items():
        assert f"column {name!r} is left out: {why}." in notes(err)
    # an explicit request for a level per row is an error that explains; one for a few rows per level is a model
    rule = "a category must have levels that occur in several rows; got 'name', which differs in all 240 rows"
    with pytest.raises(FormulaError, match=rule):
        Logistic.from_formula("y ~ x + name", named)
    code, _, err = command("fit", "t.csv", "-t", "y", "--category", "name")
    assert code == 3
    assert rule in err
    assert "ticket" in Logistic.from_formula("y ~ x + ticket", named).formula_.inputs
    assert "person" not in str(model.card())


def test_names_in_a_small_table_are_left_out_unless_a_formula_names_them(command):
    first = FRAME[:12].drop(columns="when").assign(name=[f"person {i}" for i in range(12)])
    first["seen"] = [f"{i + 1:02d}/03/2024" for i in range(12)]
    with pytest.warns(LeftOutWarning, match="'name': it identifies rows, as its 12 texts all differ; 'seen': it ident"):
        model = Logistic.from_formula("y ~ .", first)
    assert model.formula_.inputs == ["x", "ward"]
    first.to_csv("t.csv", index=False)
    code, out, err = command("fit", "t.csv", "-t", "y", "--json", "--cv", "0")
    assert (code, json.loads(out)["formula"]) == (0, "y ~ x + ward"), err
    assert "column 'seen' is left out: it identifies rows, as its 12 texts all differ; write dates as" in err
    first[["y", "name"]].to_csv("two.csv", index=False)
    code, _, err = command("fit", "two.csv", "-t", "y")
    assert "besides the target; got 'name' (it identifies rows, as its 12 texts all differ). Add one." in err
    assert Logistic.from_formula("y ~ x + name", first).formula_.inputs == ["x", "name"]
    with pytest.warns(LeftOutWarning, match="'seen'"):
        assert "name" in Logistic.from_formula("y ~ . + name", first).formula_.inputs
    assert "name" in Logistic.from_formula("y ~ name", first[:4]).formula_.inputs


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, b"bytes", np.zeros(2)], ids=["list", "struct", "binary", "array"])
def test_nested_columns_are_refused_in_one_line(value, command):
    nested = FRAME.assign(tags=[value] * ROWS)
    for formula in ("y ~ tags", "y ~ .", "y ~ C(tags)"):
        with pytest.raises(FormulaError, match="column 'tags' must have one number, text or date in every row"):
            Logistic.from_formula(formula, nested)
    nested.to_parquet("t.parquet")
    for options in (["-t", "y"], ["--formula", "y ~ tags"], ["-t", "tags"]):
        code, _, err = command("fit", "t.parquet", *options)
        assert code == 3, err
        assert "column 'tags' must have one number, text or date in every row" in err
    assert command("fit", "t.parquet", "-t", "y", "--drop", "tags", "-o", "m.viper")[0] == 0
    assert command("predict", "m.viper", "t.parquet", "-o", "p.csv")[0] == 0  # where they are ignored


# --- formulas that are no formulas ---

BAD = {
    "a term taken from nothing": "-(-x)",
    "a bracket": "(-x)",
    "a difference": "-(x - z)*ward",
    "nothing times a term": "x*0",
    "minus signs": f"I({'-' * 20_000}x)",
    "an open call": f"I({'-' * 20_000}x",
    "brackets": f"{'(' * 20_000}x{')' * 20_000}",
    "a long sum": f"I({'x + ' * 20_000}x)",
    "terms": " + ".join(["x:z"] * 30_000),
    "calls in calls": f"{'log(' * 3_000}x{')' * 3_000}",
    "a tower": f"x{':x' * 5_000}",
}


@pytest.mark.parametrize("terms", BAD.values(), ids=BAD)
def test_every_fault_of_a_formula_is_a_formula_error(terms):
    with pytest.raises(FormulaError) as caught:
        Logistic.from_formula(f"y ~ {terms}", FRAME.assign(z=FRAME["x"] ** 2))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
