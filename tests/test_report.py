"""The report as text: its numbers are the model's, all text is escaped, and nothing is loaded from elsewhere."""

import base64
import hashlib
import itertools
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, roc_auc_score
from sklearn.pipeline import make_pipeline

import viper
from viper import report
from viper.cli import scoring
from viper.errors import StorageError
from viper.formula.learn import learn_formula
from viper.models.prediction import Predictions
from viper.report import charts, svg, trust, views, words
from viper.report.page import ReportPage
from viper.report.shares import named_groups
from viper.report.study import coefficient_change, read_study, spatial_columns
from viper.report.svg import Scale

VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """Elements with their attributes and text; fails if tags are not nested properly."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **{f"@{key}": value for key, value in attrs}}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, "text": "", **{f"@{key}": value for key, value in attrs}})

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, **attributes):
        wanted = {f"@{key.rstrip('_')}": value for key, value in attributes.items()}
        return [e for e in self.elements if e["tag"] == tag and wanted.items() <= e.items()]

    def text(self, id_):
        return next(e["text"] for e in self.elements if e.get("@id") == id_)


def patients(n=200, seed=0):
    generator = np.random.default_rng(seed)
    frame = pd.DataFrame({"age": generator.normal(50, 10, n), "dose": generator.normal(0, 0.1, n)})
    frame["smoker"] = generator.integers(0, 2, n)
    f = 0.1 * (frame["age"] - 50) + 8 * frame["dose"] + frame["smoker"] - 0.5
    return frame.assign(ill=np.where(generator.random(n) < scipy.special.expit(f), "yes", "no"))


INPUTS = ["age", "dose", "smoker"]


@pytest.fixture(scope="module")
def data():
    return patients()


@pytest.fixture(scope="module")
def model(data):
    return viper.VariationalLogisticRegression(random_state=0).fit(data[INPUTS], data["ill"])


@pytest.fixture(scope="module")
def study(model, data):
    return read_study(model, data, "ill")


@pytest.fixture(scope="module")
def page(study):
    return Page(ReportPage(study).text())


# --- what it says ---


def test_every_section_is_there(page):
    sections = {e["@id"] for e in page.all("section")}
    first = {"summary", "performance", "decisions", "average", "coefficients", "effects", "certainty"}
    assert sections == first | {"groups", "checks", "trust", "card"}


def test_scores_are_those_of_scikit_learn(page, model, data):
    probability = model.predict_proba(data[INPUTS])[:, 1]
    summary = page.text("summary")
    assert f"{roc_auc_score(data['ill'], probability):.3f}" in summary
    assert f"{brier_score_loss(data['ill'] == 'yes', probability):.3f}" in summary


def test_coefficients_are_per_standard_deviation_or_unit(study, model, data):
    found = {c.name: c for c in study.coefficients}
    mean = dict(zip(INPUTS, model.coef_[0], strict=True))
    for name, unit in {"age": float(f"{data['age'].std():.2g}"), "dose": float(f"{data['dose'].std():.2g}")}.items():
        assert found[name].unit == f"+{unit:g}"
        assert found[name].mean == pytest.approx(unit * mean[name])
    assert (found["smoker"].unit, found["smoker"].mean) == ("0 → 1", pytest.approx(mean["smoker"]))
    low, high = model.coefficient_interval()[2]
    assert (found["smoker"].lower, found["smoker"].upper) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize(
    ("name", "values", "scale", "expected"),
    [
        ("C(ward)[T.B]", [0, 1], 1.0, ("ward: B", 1.0, "instead of A")),
        ("ward[T.<B>]", [0, 1], 1.0, ("ward: <B>", 1.0, "instead of A")),
        ("ward[T.B]:age", [0, 40], 1.0, ("ward: B × age", 20.0, "+20")),
        ("ward[T.B]:sex[T.m]", [0, 1], 1.0, ("ward: B × sex: m", 1.0, "together")),
        ("ward[T.a:b]:age", [0, 40], 1.0, ("ward: a:b × age", 20.0, "+20")),
        ("a:b", [0, 40], 1.0, ("a:b", 20.0, "+20")),
        ("age", [-1.0, 1.0], 12.34, ("age", 1.0, "+12.3")),
        ("age", [0.0, 123.0], 1.0, ("age", 62.0, "+62")),
        ("age:bmi", [0.0, 2468.0], 1.0, ("age × bmi", 1200.0, "+1200")),
        ("flag", [0, 1], 1.0, ("flag", 1.0, "0 → 1")),
        ("balance", [-1.0, 1.0], 288_123.4, ("balance", 1.0, "+288,000")),
        ("days(seen)", [-1.0, 1.0], 255.2, ("days(seen)", 1.0, "+255 days")),
        ("month(seen)[T.Apr]", [0, 1], 1.0, ("month of seen: Apr", 1.0, "instead of Mar")),
    ],
)
def test_changes_of_encoded_columns(name, values, scale, expected):
    levels = {"ward": ["A", "B", "<B>", "a:b"], "sex": ["f", "m"], "month(seen)": ["Mar", "Apr"]}
    assert coefficient_change(name, np.array(values, dtype=float), scale, levels, ["a:b"]) == expected


def test_rows_are_listed_from_the_widest_interval(page, model, data):
    interval = model.predict_interval(data[INPUTS])
    widest = np.argsort(interval[:, 0] - interval[:, 1])[:60]
    assert [int(e["@data-row"]) for e in page.all("button", class_="pick")] == widest.tolist()


def test_the_scripts_data_are_the_models(page, model, data):
    rows = json.loads(next(e["text"] for e in page.all("script") if e.get("@id") == "data"))["rows"]
    latent, sd = model.predict_latent(data[INPUTS])
    for k, row in rows.items():
        assert (row["theta"], row["tau"]) == pytest.approx((latent[int(k)], sd[int(k)]), rel=1e-5)


def test_trust_section_shows_the_certificates(page, model):
    text = page.text("trust")
    assert f"{model.diagnose(draws=4000).k_hat:.2f}" in text
    assert f"{model.elbo_ - model.elbo_bound_:.1e}" in text
    marks = [e["text"] for e in page.all("p", class_="mark")]
    assert marks == ["Not tested", "Close", "Certified"]


def test_training_rows_are_recognised(study, model):
    assert study.from_training
    assert "The model learned from these rows" in ReportPage(study).text()
    other = read_study(model, patients(seed=1), "ill")
    assert not other.from_training
    assert "If the model has learned from some of these rows" in ReportPage(other).text()


def test_held_out_rows_are_announced_unless_the_model_was_fitted_to_them(model, data, tmp_path):
    for rows, note in ((patients(seed=1), "has learned from none of these rows"), (data, "which flatters it")):
        report.write(model, rows, "ill", tmp_path / "report.html", overwrite=True, held_out=True)
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert note in text
        assert "If the model has learned" not in text


def test_rows_are_numbered_as_in_the_table(model, data):
    holes = data.set_axis([f"patient {k}" for k in range(len(data))])
    holes.iloc[0, holes.columns.get_loc("dose")] = np.nan
    study = read_study(model, holes, "ill")
    assert study.names == [str(k) for k in range(2, 201)]
    page = Page(ReportPage(study).text())
    first = page.all("button", class_="pick")[0]
    assert (first["text"], first["@aria-label"]) == (study.names[int(first["@data-row"])], f"Show row {first['text']}")


def test_no_identifier_gets_into_the_page_unless_it_is_asked_for(model, data):
    ids = [f"p{k:04d}" for k in range(len(data))]
    numbered = data.assign(patient=ids).set_axis([f"q{k:04d}" for k in range(len(data))])
    text = ReportPage(read_study(model, numbered, "ill")).text()
    assert not any(name in text for name in (*ids, *numbered.index))
    page = Page(ReportPage(read_study(model, numbered, "ill", row_labels="patient")).text())
    first = page.all("button", class_="pick")[0]
    assert first["text"] == ids[int(first["@data-row"])]
    assert first["@aria-label"] == f"Show patient {first['text']}"
    assert any(e["text"] == f"patient {first['text']}" for e in page.all("h3"))


def test_a_page_without_rows_has_no_value_of_a_row(data, tmp_path):
    """Six-digit numbers, a different one in each row, are searched in the source, as are marks on charts."""
    generator = np.random.default_rng(3)
    rows = data[["age", "dose", "ill"]].assign(income=generator.permutation(900_000)[: len(data)] + 100_000)
    model = viper.VariationalLogisticRegression.from_formula("ill ~ .", rows, random_state=0)
    for name, shown in (("some", True), ("none", False)):
        path = tmp_path / f"{name}.html"
        report.write(model, rows, "ill", path, rows=shown, spatial=("age", "dose"))
        text = path.read_text(encoding="utf-8")
        page = Page(text)
        assert bool(page.all("g", class_="person yes")) is shown
        assert bool(page.all("button", class_="pick")) is shown
        assert bool(page.all("circle", class_="site no")) is shown
        assert ("rows" in json.loads(next(e["text"] for e in page.all("script", id="data")))) is shown
        drawn = re.sub(r' d="[^"]*"', "", text)  # outlines are pairs of numbers, too
        incomes = {number.replace(",", "") for number in re.findall(r"(?<![\d.])\d{3},?\d{3}(?![\d.])", drawn)}
        assert bool(incomes & set(map(str, rows["income"]))) is shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_labels": "case"}, "row_labels must be a column of data; got 'case'"),
        ({"row_labels": "age", "rows": False}, "row_labels must be left out where no rows are shown"),
    ],
)
def test_row_labels_are_checked(model, data, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        report.write(model, data, "ill", tmp_path / "report.html", **options)


def test_bare_labels_are_shown_with_the_target(page, study):
    text = " ".join(e["text"] for e in page.all("section"))
    assert not re.search(r"(was|were|is|are) ill = ", text)
    assert "that had ill = no" in text
    assert "Outcome: ill = " in text
    named = replace(
        study, model=viper.VariationalLogisticRegression().fit([[0.0], [1.0], [2.0]], ["well", "sick", "well"])
    )
    assert (named.predicate("had"), named.predicate("has", 0)) == ("had the outcome “well”", "has the outcome “sick”")


def test_a_loaded_model_is_diagnosed_only_with_its_training_rows(model, data, tmp_path):
    model.save(tmp_path / "model.viper")
    loaded = viper.load(tmp_path / "model.viper")
    assert read_study(loaded, data, "ill").diagnosis.k_hat == pytest.approx(model.diagnose().k_hat)
    other = read_study(loaded, patients(seed=1), "ill")
    assert other.diagnosis is None
    assert "can only be measured with the rows of the fit" in ReportPage(other).text()


def test_the_recorded_diagnosis_is_shown_for_other_rows(data, tmp_path):
    model = viper.VariationalLogisticRegression.from_formula("ill ~ .", data[[*INPUTS, "ill"]], random_state=0)
    found = model.diagnose()
    model.formula_.record["diagnosis"] = scoring.diagnosis_record(model, len(data))
    model.save(tmp_path / "model.viper")
    other = read_study(viper.load(tmp_path / "model.viper"), patients(seed=1), "ill")
    assert not other.from_training
    assert other.diagnosis.k_hat == pytest.approx(found.k_hat, abs=0.2)
    assert "Not measured" not in ReportPage(other).text()


@pytest.mark.parametrize(
    ("k_hat", "size", "expected"),
    [
        (-math.inf, 4000, ("good", "Close")),
        (0.3, 3000, ("good", "Close")),
        (0.6, 3900, ("good", "Close")),
        (0.6, 3000, ("fair", "Usable")),
        (0.8, 3900, ("good", "Close")),
        (0.8, 3000, ("fair", "Not certified")),
        (0.8, 900, ("bad", "Not certified")),
    ],
)
def test_verdict_follows_the_diagnosis(model, data, k_hat, size, expected):
    study = read_study(model, data, "ill")
    found = replace(study.diagnosis, k_hat=k_hat, effective_sample_size=size)
    vars(study)["diagnosis"] = found
    answer = trust.posterior_verdict(study)
    assert (answer.kind, answer.word) == expected
    words = {"Close": "can be used as they are", "Usable": "differ a little", "Not certified": "may differ so much"}
    assert words[answer.word] in answer.text
    assert "inf" not in answer.text
    assert "(model)" not in answer.text  # no code on a page for a board
    # a page that says "close" does not quote limits that k̂ exceeds
    assert ("close below 0.5" in answer.text) is (math.isfinite(k_hat) and (k_hat < 0.5 or answer.word != "Close"))


def test_blanks_around_levels_make_no_groups_of_their_own(data):
    wards = np.array(["ICU", "east", "west"])[np.arange(len(data)) % 3]
    plain = data.assign(ward=wards)
    blank = data.assign(ward=[f" {ward} " if k % 5 == 0 else ward for k, ward in enumerate(wards)])
    model = viper.VariationalLogisticRegression.from_formula("ill ~ age + ward", plain, random_state=0)
    assert read_study(model, blank, "ill").frame.equals(read_study(model, plain, "ill").frame)
    assert named_groups(blank["ward"]).names == ["ICU", "east", "west"]
    assert named_groups(["10", "2", " 2", "1"]).names == ["1", "2", "10"]
    assert list(model.average(blank, by="ward")["ward"]) == ["ICU", "east", "west"]
    often = plain.sort_values("ward", ascending=False).iloc[:150]  # fewer of the first level than of the last
    ward = next(effect for effect in read_study(model, often, "ill").effects if effect.name == "ward")
    assert [str(level) for level in ward.values] == ["ICU", "east", "west"]


# --- three questions, and the worst of their answers ---


@pytest.fixture(scope="module")
def remembering(data):
    """A model that remembers its training data, as `viper fit` makes it."""
    model = viper.VariationalLogisticRegression.from_formula("ill ~ .", data[[*INPUTS, "ill"]], random_state=0)
    model.formula_.record["diagnosis"] = scoring.diagnosis_record(model, len(data))
    return model


def test_the_headline_is_the_worst_of_three_answers(study):
    answers = {
        "prediction_verdict": ("good", "open", "fair", "bad"),
        "posterior_verdict": ("good", "open", "fair", "bad"),
        "arithmetic_verdict": ("good", "bad"),
    }
    order = ["good", "open", "fair", "bad"]
    for kinds in itertools.product(*answers.values()):
        with pytest.MonkeyPatch.context() as patch:
            for name, kind in zip(answers, kinds, strict=True):
                patch.setattr(trust, name, lambda _, kind=kind, name=name: trust.Verdict(kind, "word", f"why {name}"))
            found = trust.overall_verdict(study)
        worst = max(kinds, key=order.index)
        assert found.kind == worst
        assert found.word.startswith(trust.HEADLINES[worst].rstrip("."))
        if worst != "good":
            first = list(answers)[kinds.index(worst)]
            assert (found.text == f"why {first}") == (first == "prediction_verdict")
            assert found.text.startswith("It beats the average. But ") == (kinds[0] == "good")


def test_a_column_in_other_units_changes_the_headline(remembering):
    """Sound arithmetic and a close posterior do not make up for bad predictions."""
    new = patients(400, seed=4)
    sound, broken = (read_study(remembering, rows, "ill") for rows in (new, new.assign(age=1000 * new["age"])))
    assert trust.overall_verdict(sound).kind == "open"  # 400 rows are too few to say how far it can be trusted
    assert trust.overall_verdict(broken).kind == "bad"
    assert trust.posterior_verdict(broken).kind == trust.arithmetic_verdict(broken).kind == "good"
    shown = Page(ReportPage(broken).text()).all("p", class_="verdict bad")
    assert shown[0]["text"].startswith("Do not trust its numbers for rows like these.")


def test_rows_unlike_those_of_the_fit_are_used_with_care(remembering):
    """A column that moved is named with what differs, even where the predictions are still good."""
    new = patients(400, seed=4)
    far = read_study(remembering, new.assign(dose=new["dose"] + 0.15), "ill")
    vars(far)["label"] = far.predictions.probability > np.random.default_rng(0).random(400)  # so that it predicts
    assert [d.column for d in far.drifted] == ["dose"]
    assert trust.overall_verdict(far).kind == "fair"
    assert "column dose differs" in trust.overall_verdict(far).text
    page = Page(ReportPage(far).text())
    assert "standard deviations higher" in page.text("drift")
    near = Page(ReportPage(read_study(remembering, new, "ill")).text())
    assert "Yes: no column differs" in near.text("drift")


def test_rows_that_cannot_be_encoded_are_left_out_with_their_reason(data):
    wards = data.assign(ward=np.where(data["age"] > 50, "east", "west"))
    model = viper.VariationalLogisticRegression.from_formula("ill ~ dose + ward", wards, random_state=0)
    new = wards.copy()
    new.loc[new.index[:3], "ward"] = "north"
    new.loc[new.index[3], "dose"] = np.nan
    study = read_study(model, new, "ill")
    assert study.left_out == {"with ward not in the training data": 3, "with other values missing": 1}
    assert len(study.label) == 196


def test_a_model_that_predicts_many_new_rows_is_trusted():
    train, new = patients(3000), patients(3000, seed=1)
    model = viper.VariationalLogisticRegression(random_state=0).fit(train[INPUTS], train["ill"])
    found = trust.overall_verdict(read_study(model, new, "ill"))
    assert (found.kind, found.word) == ("good", trust.HEADLINES["good"])


def test_predictions_without_skill_are_not_trusted(remembering):
    """Labels that have nothing to do with the columns: the model cannot be better than their average."""
    new = patients(400, seed=1)
    new["ill"] = np.random.default_rng(5).permutation(new["ill"])
    assert trust.prediction_verdict(read_study(remembering, new, "ill")).word in ("No", "Not shown")


def test_gain_is_the_paired_difference_of_log_scores(study):
    p, y = study.predictions.probability, study.label
    each = np.where(y, np.log(p / y.mean()), np.log((1 - p) / (1 - y.mean())))
    gain, error = study.gain
    assert gain == pytest.approx(each.mean())
    assert error == pytest.approx(each.std() / math.sqrt(len(y)))


def test_an_unfinished_search_is_not_trusted(study):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(study), "facts", replace(study.facts, converged=False, status="the limit was reached"))
        assert trust.posterior_verdict(study).kind == "bad"


def test_the_page_of_training_rows_shows_the_cross_validated_scores(data, tmp_path):
    model = viper.VariationalLogisticRegression.from_formula("ill ~ .", data[[*INPUTS, "ill"]], random_state=0)
    without = read_study(model, data, "ill")
    assert trust.prediction_verdict(without).word == "Not tested"
    found = scoring.held_out_scores(model, learn_formula("ill ~ .", data[[*INPUTS, "ill"]]), 5, None, 1, 0.95, True)
    model.formula_.record["scores"] = found
    model.save(tmp_path / "model.viper")
    study = read_study(viper.load(tmp_path / "model.viper"), data, "ill")
    base = (data["ill"] == "yes").mean()
    entropy = -base * np.log(base) - (1 - base) * np.log(1 - base)
    assert study.cross_validated.log_skill == pytest.approx(1 + found["log_score"] / entropy)
    assert study.cross_validated.log_skill < study.scores.log_skill
    page = Page(ReportPage(study).text())
    summary = page.text("summary")
    assert "Honest: 5-fold cross-validation" in summary
    assert f"{found['auc']:.3f}" in summary
    tiles = [e["text"] for e in page.all("dd")]
    assert f"{found['auc']:.3f}" in tiles
    assert "In 5-fold cross-validation, given one row that" in summary
    assert f"to the right one {100 * found['auc']:.1f} times in 100" in summary
    assert f"its skill is {words.percent(study.cross_validated.log_skill)} in 5-fold cross-validation" in summary
    verdict = trust.prediction_verdict(study)
    assert study.calibration_verdict.verdict == "unclear"  # 200 rows are few
    assert verdict.word == "Probably"
    assert study.calibration_verdict.sentence in verdict.text
    assert trust.overall_verdict(study).kind != "good"
    for judged, word in (("good", "Yes"), ("fair", "Yes"), ("poor", "With care")):
        vars(study)["calibration_verdict"] = study.calibration_verdict._replace(verdict=judged)
        assert trust.prediction_verdict(study).word == word
    other = Page(ReportPage(read_study(viper.load(tmp_path / "model.viper"), patients(seed=1), "ill")).text())
    assert "Honest" not in other.text("summary")


def test_filled_in_values_are_mentioned(data):
    holes = data.assign(ward=np.where(data["age"] > 50, "east", "west")).astype({"ward": object})
    holes.loc[holes.index[:26], "age"] = np.nan
    holes.loc[holes.index[30:40], "ward"] = None
    model = viper.VariationalLogisticRegression.from_formula("ill ~ age + ward", holes, missing="mean", random_state=0)
    page = Page(ReportPage(read_study(model, holes, "ill")).text())
    mean = words.readable_number(holes["age"].mean())
    common = holes["ward"].mode()[0]
    text = page.text("summary").replace(words.THIN, " ")
    assert f"Missing values were filled in: 13 % of age with the mean ({mean}) and 5 % of ward with “{common}”" in text
    assert "13 %" in page.text("card").replace(words.THIN, " ")


def test_the_model_card_remembers_the_training_data(remembering, data):
    page = Page(ReportPage(read_study(remembering, patients(seed=1), "ill")).text())
    card = page.text("card")
    assert f"{words.readable_number(data['age'].min())} to {words.readable_number(data['age'].max())}" in card
    assert "200 (no: " in card
    assert remembering.formula_.training.versions["torch"] in card


# --- rare outcomes ---


@pytest.fixture(scope="module")
def rare():
    """An outcome of 1 %, and a study of new rows."""
    generator = np.random.default_rng(0)
    frame = pd.DataFrame({"x": generator.normal(size=30_000), "z": generator.normal(size=30_000)})
    frame["fraud"] = np.where(generator.random(30_000) < scipy.special.expit(frame["x"] - 5.2), "yes", "no")
    model = viper.VariationalLogisticRegression(random_state=0).fit(frame[["x", "z"]][:15_000], frame["fraud"][:15_000])
    return read_study(model, frame[15_000:], "fraud")


def positions(markup, tag, attribute):
    return np.array([float(e[f"@{attribute}"]) for e in Page(markup).all(tag) if f"@{attribute}" in e])


def test_charts_of_a_rare_outcome_fill_their_frames(rare):
    """Half of the marks used to lie within a tenth of the frame; every chart now spreads them over most of it."""
    assert 0.005 < rare.base_rate < 0.02
    for markup, bottom, top in (
        (charts.reliability_chart(rare), 304, 14),
        (charts.rows_chart(rare, rare.names), 286, 14),
    ):
        y = positions(markup, "circle", "cy")
        assert np.quantile(y, 0.9) - np.quantile(y, 0.1) > 0.25 * (bottom - top)
        assert y.min() >= top - 1e-9
        assert y.max() <= bottom + 1e-9
    effects = rare.effects
    axis = charts.effects_axis(effects)
    assert axis.high < 0.3
    assert all(e.predictions.upper.max() <= axis.high for e in effects) or axis.kind == "log-odds"


def test_words_about_a_rare_outcome_have_digits(rare):
    page = Page(ReportPage(rare).text())
    text = " ".join(e["text"] for e in page.all("section")).replace(words.THIN, " ")
    assert not re.search(r"(?<![\d.,])0 %(?! (is|would))", text.split("The numbers")[0].split("Does it predict?")[0])
    assert "<1 %" not in text
    assert ">99 %" not in text
    assert f"{100 * rare.base_rate:.2g} %" in page.text("summary").replace(words.THIN, " ")
    assert "the average of all rows, " in page.text("certainty")


def test_both_classes_of_a_rare_outcome_are_drawn(rare):
    assert rare.label[rare.sampled].sum() >= 10
    assert len(set(rare.sampled.tolist())) == len(rare.sampled)
    assert (np.diff(rare.predictions.latent[rare.sampled]) >= 0).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.linspace(0.001, 0.999, 50), (0.0, 1.0, "linear")),
        (np.linspace(0.01, 0.1, 50), (0.0, 0.15, "linear")),
        (np.linspace(0.9, 0.99, 50), (0.85, 1.0, "linear")),
        (np.geomspace(1e-3, 0.3, 50), (5e-4, 0.3, "log-odds")),
        (1 - np.geomspace(1e-3, 0.3, 50), (0.7, 0.9995, "log-odds")),
        (np.full(9, 0.5), (0.0, 0.6, "linear")),
        (np.r_[np.full(50, 1e-4), np.full(50, 1 - 1e-4)], (0.0, 1.0, "linear")),
        (np.zeros(3), (0.0, 1e-4, "linear")),
    ],
)
def test_axes_of_probabilities_suit_their_values(values, expected):
    axis = charts.probability_axis(values)
    assert (axis.low, axis.high) == pytest.approx(expected[:2], rel=0.5, abs=1e-6)
    assert axis.kind == expected[2]
    assert 2 <= len(axis.ticks) <= 9
    assert all(axis.low <= t <= axis.high for t, _ in axis.ticks)
    assert len({name for _, name in axis.ticks}) == len(axis.ticks)


@pytest.mark.parametrize("p", [1e-5, 0.01, 0.3, 0.5, 0.9, 0.99999])
def test_a_log_odds_scale_is_one(p):
    scale = Scale(1e-6, 1 - 1e-6, 0.0, 100.0, "log-odds")
    reach = scipy.special.logit(1 - 1e-6)
    assert float(scale(p)) == pytest.approx(50 + 50 * scipy.special.logit(p) / reach)
    assert (float(scale(0.0)), float(scale(1.0))) == pytest.approx((0.0, 100.0))


def test_density_axis_follows_a_narrow_interval(rare):
    for k in map(int, rare.sampled[:: len(rare.sampled) // 5]):
        low, high = charts.density_ends(rare, k)
        assert low <= rare.predictions.lower[k] < rare.predictions.upper[k] <= high
        assert rare.predictions.upper[k] > 0.2 * high
        theta, tau = float(rare.predictions.latent[k]), float(rare.predictions.latent_sd[k])
        _, height = charts.density_curve(theta, tau, (low, high))
        assert np.sum(height[2::4] * 2 * charts.SMEAR * (high - low)) == pytest.approx(1.0, abs=1e-3)


def test_a_curve_that_turns_is_not_described_by_its_ends():
    x = np.linspace(0, 4, 41)
    p = 0.05 + 0.9 * np.exp(-((x - 2) ** 2))
    seen = Predictions(scipy.special.logit(p), np.full(41, 0.1), p, np.full(41, 0.01), p - 0.01, p + 0.01)
    text = words.effect_sentence(views.Effect("x", x, True, seen)).replace(words.THIN, " ")
    assert text == "The probability rises from 6.6 % at 0 to 95 % at 2, then falls to 6.6 % at 4."
    rising = seen._replace(probability=np.sort(p))
    assert words.effect_sentence(views.Effect("x", x, True, rising)).startswith("The probability rises from ")
    rare = seen._replace(probability=np.concatenate([np.linspace(0.005, 0.004, 20), np.linspace(0.004, 0.03, 21)]))
    text = words.effect_sentence(views.Effect("x", x, True, rare)).replace(words.THIN, " ")
    assert text == "The probability falls from 0.5 % at 0 to 0.4 % at 1.9, then rises to 3 % at 4."
    wave = seen._replace(probability=0.5 + 0.4 * np.sin(4 * x))
    text = words.effect_sentence(views.Effect("x", x, True, wave))
    assert text.startswith("The probability rises and falls several times: it is highest, 90")
    flat = seen._replace(probability=np.full(41, 0.3) + 1e-6 * np.sin(x))
    text = words.effect_sentence(views.Effect("x", x, True, flat)).replace(words.THIN, " ")
    assert text == "The probability hardly changes: it is 30 % everywhere."


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 2]),
        ([1.0, 0.5, 0.51, 0.0], [0, 3]),  # a wiggle
        ([0.01, 1.0, 1.0, 0.52], [0, 2, 3]),
        ([0.5, 0.49, 1.0, 0.0, 0.3], [0, 2, 3, 4]),
        ([0.3, 0.3], [0, 1]),
        ([0.3], [0]),
    ],
)
def test_turning_points_leave_out_wiggles(curve, expected):
    assert views.turning_points(np.array(curve)) == expected


@pytest.mark.parametrize(("theta", "tau"), [(0.3, 0.7), (-4.0, 1.0), (0.0, 12.0), (2.0, 1e-6)])
def test_density_is_that_of_the_probability(theta, tau):
    p, height = charts.density_curve(theta, tau)
    # the mean of the density over a window, by quadrature of the logit-normal density itself
    if tau > 0.1:
        exact = lambda q: scipy.stats.norm.pdf(scipy.special.logit(q), theta, tau) / (q * (1 - q))  # noqa: E731
        for k in (20, 100, 150):
            mean = scipy.integrate.quad(exact, p[k] - charts.SMEAR, p[k] + charts.SMEAR)[0] / (2 * charts.SMEAR)
            assert height[k] == pytest.approx(mean, rel=1e-8)
    assert np.isfinite(height).all()
    # windows that tile [0, 1] hold all the mass
    assert np.sum(height[2::4] * 2 * charts.SMEAR) == pytest.approx(1.0)


# --- safety ---

NASTY = "<img src=x onerror=alert(1)>&\"'</script><!--"


@pytest.fixture(scope="module")
def nasty():
    data = patients(80).rename(columns={"age": NASTY})
    data["ill"] = np.where(data["ill"] == "yes", "</script><script>alert(2)</script>", "$title ${style}")
    data.index = [f"<i>{k}</i>" for k in range(80)]
    data["<s>case</s>"] = data.index
    model = viper.VariationalLogisticRegression().fit(data[[NASTY, "dose"]], data["ill"])
    renamed = data.rename(columns={"ill": "<u>ill</u>"})
    return ReportPage(read_study(model, renamed, "<u>ill</u>", row_labels="<s>case</s>")).text()


def test_names_and_labels_are_escaped(nasty):
    page = Page(nasty)
    assert {e["tag"] for e in page.elements}.isdisjoint({"img", "i", "u", "b", "s"})
    assert len(page.all("script")) == 2
    assert not any(key.startswith("@on") for e in page.elements for key in e)
    assert any(e["text"] == NASTY for e in page.all("th"))
    assert "$title ${style}" in page.text("summary")
    data = json.loads(next(e["text"] for e in page.all("script") if e.get("@id") == "data"))
    assert data["rows"][data["first"]]["name"].startswith("<i>")


def test_nothing_is_loaded(nasty, study):
    for text in (nasty, ReportPage(study).text()):
        page = Page(text)
        assert not re.search(r"url\(|@import|https?:", text)
        assert [e.get("@href") for e in page.all("link")] == ["data:,"]
        assert not any("@src" in e for e in page.elements)
        (policy,) = (e["@content"] for e in page.all("meta") if "@http-equiv" in e)
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert "base-uri 'none'; form-action 'none'" in policy
        for tag, name in (("style", "style-src"), ("script", "script-src")):
            content = next(e["text"] for e in page.all(tag) if "@type" not in e)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"{name} 'sha256-{digest}'" in policy
        assert not any("@style" in e for e in page.elements)


def test_everything_has_a_name(page):
    pictures = page.all("svg")
    assert len(pictures) > 10
    assert all(e["@role"] == "img" and e["@aria-label"] for e in pictures)
    assert all(e["text"].strip() or e.get("@aria-label") for e in page.all("button"))
    assert all(e["text"].strip() or e["@class"] == "wide" for e in page.all("th"))
    assert all("@scope" in e for e in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert {e["@for"] for e in page.all("label")} == {e["@id"] for tag in ("select", "input") for e in page.all(tag)}
    ids = [e["@id"] for e in page.elements if "@id" in e]
    assert len(ids) == len(set(ids))
    assert page.elements[0]["@lang"] == "en"


# --- files ---


def test_an_existing_file_is_kept_unless_overwrite_is_set(model, data, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("mine")
    with pytest.raises(StorageError, match="path must be new"):
        report.write(model, data, "ill", path)
    assert path.read_text() == "mine"
    report.write(model, data=data, target="ill", path=path, overwrite=True)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_a_page_is_not_named_like_another_format(model, data, tmp_path):
    with pytest.raises(StorageError, match=r"path must be HTML; got .*report\.pdf\. End its name in \.html\."):
        report.write(model, data, "ill", tmp_path / "report.pdf")
    assert not [*tmp_path.iterdir()]


def test_an_existing_file_is_refused_before_anything_is_computed(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr("viper.report.classes.page.any_study", lambda *arguments: pytest.fail("it began to compute"))
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(StorageError, match="path must be new"):
        report.write(model, data, "ill", tmp_path / "report.html")


def test_bad_data_leave_the_old_report_in_place(model, data, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("mine")
    with pytest.raises(ValueError, match="known classes"):
        report.write(model, data.assign(ill="perhaps"), "ill", path, overwrite=True)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda d: d.to_numpy(), TypeError, "data must be a pandas DataFrame that includes the target; got .*ndarray"),
        (lambda d: d.drop(columns="ill"), ValueError, "target must be a column of data; got 'ill'"),
        (
            lambda d: d.drop(columns="dose"),
            ValueError,
            "data must have all columns of the model; got none named 'dose'",
        ),
        (lambda d: d[:0], ValueError, "data must have rows without missing values; got none"),
        (lambda d: d.assign(ill=None), ValueError, "got none .*200"),
        (lambda d: d.assign(age="old"), ValueError, "X must be numeric; got column 'age'"),
    ],
)
def test_bad_input_is_explained(model, data, change, error, message, tmp_path):
    with pytest.raises(error, match=message):
        report.write(model, change(data), "ill", tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_models_of_other_libraries_are_refused(data, tmp_path):
    plain = LogisticRegression().fit(data[["dose"]], data["ill"])
    for other, message in (
        (make_pipeline(plain), "got Pipeline. Pass pipeline"),
        (plain, "got LogisticRegression. Fit"),
    ):
        with pytest.raises(TypeError, match=message):
            report.write(other, data, "ill", tmp_path / "report.html")


def test_an_unfitted_model_is_refused(data, tmp_path):
    with pytest.raises(ValueError, match="not fitted yet"):
        report.write(viper.VariationalLogisticRegression(), data, "ill", tmp_path / "report.html")


# --- odd data ---


def test_rows_with_missing_values_are_left_out_and_counted(model, data):
    holes = data.copy()
    holes.loc[3, "dose"] = np.nan
    holes.loc[4:6, "ill"] = None
    holes.index = [0] * len(holes)  # rows are identified by position
    study = read_study(model, holes, "ill")
    assert len(study.label) == 196
    assert study.left_out == {"without ill": 3, "with other values missing": 1}
    assert "3 without ill; 1 with other values missing" in ReportPage(study).text()


@pytest.mark.parametrize(
    "rows",
    [lambda d: d[:1], lambda d: d[d["ill"] == "no"], lambda d: d.assign(dose=0.1, smoker=1), lambda d: d[:7]],
    ids=["one row", "one class", "constant columns", "few rows"],
)
def test_any_rows_give_a_page(model, data, rows):
    page = Page(ReportPage(read_study(model, rows(data), "ill")).text())
    assert not any("nan" in str(value) for e in page.elements for key, value in e.items() if key.startswith("@"))
    assert not any("nan" in e["text"] for e in page.all("section"))


def test_models_fitted_to_plain_arrays_are_reported(data):
    model = viper.VariationalLogisticRegression(solver="newton", bound="pg", prior_scale="ard").fit(
        data[INPUTS].to_numpy(), data["ill"]
    )
    page = Page(ReportPage(read_study(model, data, "ill")).text())
    assert "bound 'pg'" in page.text("card")
    assert "nats lower" in page.text("trust")


def test_the_page_of_many_rows_stays_small_and_says_so():
    data = patients(20_000)
    for j in range(1, 28):
        data[f"column number {j}"] = data["age"] * j % 7.0
    inputs = [name for name in data if name != "ill"]
    model = viper.VariationalLogisticRegression(random_state=0).fit(data[inputs], data["ill"])
    text = ReportPage(read_study(model, data, "ill")).text()
    assert len(text.encode()) < 2_000_000
    assert "The chart shows 240 of the 20,000 rows" in text
    assert "6 with smaller effects are not shown" in text


# --- Gaussian processes and maps ---


@pytest.fixture(scope="module")
def process():
    generator = np.random.default_rng(0)
    frame = pd.DataFrame({"lon": generator.uniform(0, 4, 150), "lat": generator.uniform(50, 52, 150)})
    frame["wet"] = generator.random(150) < scipy.special.expit(3 * np.sin(2 * frame["lon"]))
    model = viper.VariationalGPClassifier(n_inducing=20, n_starts=2, random_state=0).fit(
        frame[["lon", "lat"]], frame["wet"]
    )
    return model, frame


def test_a_process_has_relevance_starts_and_maps(process, tmp_path):
    model, frame = process
    model.save(tmp_path / "model.viper")
    for fitted in (model, viper.load(tmp_path / "model.viper")):
        page = Page(ReportPage(read_study(fitted, frame, "wet")).text())
        names = [e["@aria-label"] for e in page.all("svg")]
        assert sum(name.startswith("Map: ") for name in names) == 2
        assert "Lengthscale" in page.text("coefficients")
        assert f"{model.starts_[0].elbo:,.3f}".replace("-", "−") in page.text("trust")
        assert "√" not in page.text("trust")
        assert "Probability of wet = True" in page.all("h1")[0]["text"]


def test_the_classes_on_a_map_differ_in_shape(process):
    model, frame = process
    page = Page(ReportPage(read_study(model, frame, "wet")).text())
    assert len(page.all("path", class_="site yes")) == 2 * frame["wet"].sum()
    assert len(page.all("circle", class_="site no")) == 2 * (~frame["wet"]).sum()
    assert "triangles are those that had wet = True" in page.text("map")


def test_map_shows_the_models_predictions(process):
    model, frame = process
    grid = read_study(model, frame, "wet").map
    at = pd.DataFrame({"lon": [grid.x[3]], "lat": [grid.y[10]]})
    assert grid.probability[10, 3] == pytest.approx(model.predict_proba(at)[0, 1])
    assert grid.sd[10, 3] == pytest.approx(model.predict_std(at)[0])


@pytest.mark.parametrize(
    ("names", "is_gp", "expected"),
    [
        (["age", "Longitude", "LATITUDE"], False, ("Longitude", "LATITUDE")),
        (["x", "y", "z"], False, ("x", "y")),
        (["age", "dose"], False, None),
        (["age", "dose"], True, ("age", "dose")),
        (["age", "dose", "c"], True, None),
    ],
)
def test_coordinates_are_found_by_name(names, is_gp, expected):
    assert spatial_columns(pd.DataFrame(np.ones((2, len(names))), columns=names), is_gp) == expected


def test_coordinates_can_be_named(model, data, tmp_path):
    report.write(model, data, "ill", tmp_path / "report.html", spatial=("age", "dose"))
    assert "Map: " in (tmp_path / "report.html").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="two numeric columns of X; got 'height'"):
        report.write(model, data, "ill", tmp_path / "other.html", spatial=("age", "height"))


# --- words and scales ---


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0, "0 %"),
        (1e-5, "<0.01 %"),
        (0.00034, "0.034 %"),
        (0.003, "0.3 %"),
        (0.0345, "3.5 %"),
        (0.05, "5 %"),
        (0.684, "68 %"),
        (0.966, "97 %"),
        (0.996, "99.6 %"),
        (0.9996, "99.96 %"),
        (0.99999, ">99.99 %"),
        (1.0, "100 %"),
    ],
)
def test_percent(p, expected):
    assert words.percent(p).replace(words.THIN, " ") == expected


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((0.61, 0.75), "61–75 %"),
        ((0.001, 0.004), "0.1–0.4 %"),
        ((0.0123, 0.0124), "1.23–1.24 %"),
        ((0.0, 1.0), "0–100 %"),
        ((0.97, 0.999999), "97 to >99.99 %"),
        ((1e-9, 0.032), "<0.01–3.2 %"),
    ],
)
def test_percent_range(ends, expected):
    assert words.percent_range(*ends).replace(words.THIN, " ").replace(words.JOIN, "") == expected


def test_no_model_is_certain():
    assert words.chance(1.0) == words.percent(1 - 1e-9)
    assert words.chance(0.0) == words.percent(1e-9)
    assert "100" not in words.chance_range(0.2, 1.0)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0, "0"),
        (-0.0591, "−0.0591"),
        (1990.0, "1990"),
        (288_123.4, "288,123"),
        (1e-7, "1e−7"),
        ("a", "a"),
        (True, "True"),
        (math.nan, "nan"),
    ],
)
def test_readable_number(x, expected):
    assert words.readable_number(x) == expected


def test_example_of_reliability_in_words():
    table = pd.DataFrame(
        {
            "predicted": [0.02, 0.7, 0.99],
            "observed": [0.0, 0.68, 1.0],
            "rows": [50, 200, 9],
            "lower": [0.0, 0.61, 0.7],
            "upper": [0.1, 0.75, 1.0],
        }
    )
    text = words.group_sentence(table, "were ill").replace(words.THIN, " ").replace(words.JOIN, "")
    assert text == "Of the 200 rows to which the model gave about 70 %, 68 % were ill (allowing for chance, 61–75 %)."


@pytest.mark.parametrize(
    ("low", "high", "kind"), [(0.0, 1.0, "linear"), (-3.7, 12.2, "linear"), (1e-9, 3e4, "log"), (2, 3, "linear")]
)
def test_ticks_are_round_and_inside(low, high, kind):
    ticks = Scale(low, high, 0, 100, kind).ticks(5)
    assert 2 <= len(ticks) <= 8
    assert all(low <= t <= high for t in ticks)
    assert np.ptp(np.diff(np.log10(ticks) if kind == "log" else ticks)) < 1e-9


def test_names_of_ticks_keep_clear_of_each_other():
    """Every k-th name is drawn, for the smallest k at which neighbours do not touch; every tick is."""
    places, sizes = [0.0, 10.0, 20.0, 30.0, 40.0], [8.0, 12.0, 8.0, 12.0, 8.0]
    assert svg.spaced_step(places, [10.0] * 5) == 1
    assert svg.spaced_step(places, [10.1] * 5) == 2
    assert svg.spaced_step(places, sizes) == 1
    assert svg.spaced_step(places, [100.0] * 5) == 5
    assert svg.spaced_step([], []) == 1
    chart = svg.Chart((0.0, 1.0), (0.0, 1.0), width=200, margins=(10, 0, 40, 0))
    chart.x_axis("share", [(k / 10, f"{10 * k}.00 %") for k in range(11)])
    drawn = "".join(chart.parts)
    assert drawn.count('class="tick"') == 4  # 0, 30, 60 and 90 %, 60 apart; names are 8 letters of 7
    assert drawn.count('class="axis"') == 1 + 11
    assert "rotate" not in drawn


def test_a_table_with_a_chart_is_stacked_on_a_phone():
    head = [svg.column_heading("Column"), svg.column_heading("Relevance", "wide")]
    assert 'class="stacked"' in svg.data_table("Relevance", head, [])
    assert "stacked" not in svg.data_table("Relevance", [head[0]] * 4, [])
