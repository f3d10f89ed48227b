"""The report as text: its numbers are the model's, all text is escaped, and nothing is loaded from elsewhere."""

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
from viper.report import charts, words
from viper.report.page import render
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
    return Page(render(study))


# --- what it says ---


def test_every_section_is_there(page):
    sections = {e["@id"] for e in page.all("section")}
    assert sections == {"summary", "performance", "coefficients", "effects", "certainty", "trust", "fitted"}


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
        ("C(ward)[T.B]", [0, 1], 1.0, ("ward: B", 1.0, "not A")),
        ("ward[T.<B>]", [0, 1], 1.0, ("ward: <B>", 1.0, "not A")),
        ("ward[T.B]:age", [0, 40], 1.0, ("ward[T.B]:age", 20.0, "+20")),
        ("age", [-1.0, 1.0], 12.34, ("age", 1.0, "+12.3")),
        ("age", [0.0, 123.0], 1.0, ("age", 62.0, "+62")),
        ("age:bmi", [0.0, 2468.0], 1.0, ("age:bmi", 1200.0, "+1,200")),
        ("flag", [0, 1], 1.0, ("flag", 1.0, "0 → 1")),
    ],
)
def test_changes_of_encoded_columns(name, values, scale, expected):
    assert coefficient_change(name, np.array(values, dtype=float), scale, {"ward": ["A", "B", "<B>"]}) == expected


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
    assert marks == ["Close", "Certified", "Yes"]


def test_training_rows_are_recognised(study, model):
    assert study.from_training
    assert "The model learned from these rows" in render(study)
    other = read_study(model, patients(seed=1), "ill")
    assert not other.from_training
    assert "If the model has learned from some of these rows" in render(other)


def test_held_out_rows_are_announced_unless_the_model_was_fitted_to_them(model, data, tmp_path):
    for rows, note in ((patients(seed=1), "has learned from none of these rows"), (data, "which flatters it")):
        report.write(model, rows, "ill", tmp_path / "report.html", overwrite=True, held_out=True)
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert note in text
        assert "If the model has learned" not in text


def test_an_unused_column_of_distinct_values_names_the_rows(model, data):
    numbered = data.assign(ward="east", weight=0.5 + np.arange(len(data)), patient=[f"p{k}" for k in range(len(data))])
    page = Page(render(read_study(model, numbered, "ill")))
    first = page.all("button", class_="pick")[0]
    assert first["text"] == f"p{first['@data-row']}"
    assert first["@aria-label"] == f"Show patient {first['text']}"
    assert any(e["text"] == f"patient {first['text']}" for e in page.all("h3"))
    assert read_study(model, numbered.assign(patient="p1"), "ill").frame.index.equals(data.index)


def test_bare_labels_are_shown_with_the_target(page, study):
    text = " ".join(e["text"] for e in page.all("section"))
    assert not re.search(r"(was|were|is|are) ill = ", text)
    assert "that had ill = yes" in text
    assert "Outcome: ill = " in text
    named = replace(
        study, model=viper.VariationalLogisticRegression().fit([[0.0], [1.0], [2.0]], ["well", "sick", "well"])
    )
    assert (named.predicate("were"), named.predicate("is", 0)) == ("were well", "is sick")


def test_calibration_sentence_claims_no_more_than_its_groups(study):
    text = words.calibration_sentence(study)
    assert not re.search("face value", text)
    assert "of 10 groups of rows (20 in each) came out as predicted" in text


def test_a_loaded_model_is_diagnosed_only_with_its_training_rows(model, data, tmp_path):
    model.save(tmp_path / "model.viper")
    loaded = viper.load(tmp_path / "model.viper")
    assert read_study(loaded, data, "ill").diagnosis.k_hat == pytest.approx(model.diagnose().k_hat)
    other = read_study(loaded, patients(seed=1), "ill")
    assert other.diagnosis is None
    assert "needs the rows of the fit" in render(other)


def test_the_recorded_diagnosis_is_shown_for_other_rows(data, tmp_path):
    model = viper.VariationalLogisticRegression.from_formula("ill ~ .", data[[*INPUTS, "ill"]], random_state=0)
    found = model.diagnose()
    model.formula_.record["diagnosis"] = scoring.diagnosis_record(model, len(data))
    model.save(tmp_path / "model.viper")
    other = read_study(viper.load(tmp_path / "model.viper"), patients(seed=1), "ill")
    assert not other.from_training
    assert other.diagnosis.k_hat == pytest.approx(found.k_hat, abs=0.2)
    assert "Not measured" not in render(other)


@pytest.mark.parametrize(
    ("k_hat", "size", "expected"),
    [
        (0.3, 3000, "Certified"),
        (0.6, 3900, "Certified"),
        (0.6, 3000, "Usable"),
        (0.8, 3900, "Close"),
        (0.8, 900, "Not certified"),
    ],
)
def test_verdict_follows_the_diagnosis(model, data, k_hat, size, expected):
    study = read_study(model, data, "ill")
    found = replace(study.diagnosis, k_hat=k_hat, effective_sample_size=size)
    vars(study)["diagnosis"] = found
    _, word, text = words.closeness_verdict(study)
    assert word == expected
    assert found.verdict in text


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
    model = viper.VariationalLogisticRegression().fit(data[[NASTY, "dose"]], data["ill"])
    return render(read_study(model, data.rename(columns={"ill": "<u>ill</u>"}), "<u>ill</u>"))


def test_names_and_labels_are_escaped(nasty):
    page = Page(nasty)
    assert {e["tag"] for e in page.elements}.isdisjoint({"img", "i", "u", "b"})
    assert len(page.all("script")) == 2
    assert not any(key.startswith("@on") for e in page.elements for key in e)
    assert any(e["text"] == NASTY for e in page.all("th"))
    assert "$title ${style}" in page.text("summary")
    data = json.loads(next(e["text"] for e in page.all("script") if e.get("@id") == "data"))
    assert data["rows"][data["first"]]["name"].startswith("<i>")


def test_nothing_is_loaded(nasty, study):
    for text in (nasty, render(study)):
        page = Page(text)
        assert not re.search(r"url\(|@import|https?:", text)
        assert [e.get("@href") for e in page.all("link")] == ["data:,"]
        assert not any("@src" in e for e in page.elements)
        (policy,) = (e["@content"] for e in page.all("meta") if "@http-equiv" in e)
        assert policy.startswith("default-src 'none'")


def test_everything_has_a_name(page):
    pictures = page.all("svg")
    assert len(pictures) > 10
    assert all(e["@role"] == "img" and e["@aria-label"] for e in pictures)
    assert all(e["text"].strip() or e.get("@aria-label") for e in page.all("button"))
    assert all(e["text"].strip() or e["@class"] == "wide" for e in page.all("th"))
    assert all("@scope" in e for e in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert [e["@for"] for e in page.all("label")] == [e["@id"] for e in page.all("select")]
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
    assert "3 without ill; 1 with other values missing" in render(study)


@pytest.mark.parametrize(
    "rows",
    [lambda d: d[:1], lambda d: d[d["ill"] == "no"], lambda d: d.assign(dose=0.1, smoker=1), lambda d: d[:7]],
    ids=["one row", "one class", "constant columns", "few rows"],
)
def test_any_rows_give_a_page(model, data, rows):
    page = Page(render(read_study(model, rows(data), "ill")))
    assert not any("nan" in str(value) for e in page.elements for key, value in e.items() if key.startswith("@"))
    assert not any("nan" in e["text"] for e in page.all("section"))


def test_models_fitted_to_plain_arrays_are_reported(data):
    model = viper.VariationalLogisticRegression(solver="newton", bound="pg", prior_scale="ard").fit(
        data[INPUTS].to_numpy(), data["ill"]
    )
    page = Page(render(read_study(model, data, "ill")))
    assert "bound 'pg'" in page.text("fitted")
    assert "below the exact ELBO" in page.text("trust")


def test_the_page_of_many_rows_stays_small_and_says_so():
    data = patients(20_000)
    for j in range(1, 28):
        data[f"column number {j}"] = data["age"] * j % 7.0
    inputs = [name for name in data if name != "ill"]
    model = viper.VariationalLogisticRegression(random_state=0).fit(data[inputs], data["ill"])
    text = render(read_study(model, data, "ill"))
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
        page = Page(render(read_study(fitted, frame, "wet")))
        names = [e["@aria-label"] for e in page.all("svg")]
        assert sum(name.startswith("Map: ") for name in names) == 2
        assert "Lengthscale" in page.text("coefficients")
        assert str(model.starts_[0].start) in page.text("trust")
        assert "Probability of wet = True" in page.all("h1")[0]["text"]


def test_the_classes_on_a_map_differ_in_shape(process):
    model, frame = process
    page = Page(render(read_study(model, frame, "wet")))
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
    ("p", "expected"), [(0, "0 %"), (0.004, "<1 %"), (0.684, "68 %"), (0.996, ">99 %"), (1.0, "100 %")]
)
def test_percent(p, expected):
    assert words.percent(p).replace(words.THIN, " ") == expected


@pytest.mark.parametrize(
    ("ends", "expected"), [((0.61, 0.75), "61–75 %"), ((0.001, 0.004), "0.1–0.4 %"), ((0.0, 1.0), "0–100 %")]
)
def test_percent_range(ends, expected):
    assert words.percent_range(*ends).replace(words.THIN, " ").replace(words.JOIN, "") == expected


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (0, "0"),
        (-0.0591, "−0.0591"),
        (1234.5, "1,234"),
        (1e-7, "1.0e−7"),
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
    assert text == "Of the 200 rows given about 70 %, 68 % were ill (margin 61–75 %)."


@pytest.mark.parametrize(
    ("low", "high", "log"), [(0.0, 1.0, False), (-3.7, 12.2, False), (1e-9, 3e4, True), (2, 3, False)]
)
def test_ticks_are_round_and_inside(low, high, log):
    ticks = Scale(low, high, 0, 100, log).ticks(5)
    assert 2 <= len(ticks) <= 8
    assert all(low <= t <= high for t in ticks)
    assert np.ptp(np.diff(np.log10(ticks) if log else ticks)) < 1e-9
