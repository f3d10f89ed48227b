"""Every artefact of the paper in its quick version, once: the files, and the numbers in them."""

import numpy as np
import pandas as pd
import pytest

from viper.paper import artefacts, reproduce
from viper.paper.published import published_logistic

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    for outcome in reproduce("all", quick=True, out=folder):
        assert outcome.skipped is None
        assert outcome.made == outcome.runs > 0
    return folder / "quick"


def runs(out, name):
    return pd.read_csv(out / name / "runs.csv")


def table(out, name, file=None):
    return pd.read_csv(out / name / f"{file or name}.csv", dtype={"setting": str, "l": str})


def test_every_artefact_has_tables_and_its_configuration(out):
    for artefact in artefacts():
        folder = out / artefact.name
        names = {p.name for p in folder.iterdir()}
        assert {"runs.csv", "runs.json"} <= names
        for name in names:
            stem, dot, ending = name.rpartition(".")
            if dot and ending == "md":
                assert {f"{stem}.csv", f"{stem}.tex"} <= names
            if dot and ending == "png":
                assert f"{stem}.pdf" in names
        assert any(name.endswith(".md") for name in names)
        assert not any(name.startswith(".") for name in names)


def test_tables_and_figures_are_made_again_from_the_runs_alone(out):
    before = {p.name: p.read_bytes() for p in (out / "terms").iterdir()}
    for step in ("table", "figure"):
        (outcome,) = reproduce("terms", quick=True, out=out.parent, step=step)
        assert outcome.made == 0
    assert {p.name: p.read_bytes() for p in (out / "terms").iterdir()} == before


def test_terms_needed_are_the_published_ones(out):
    found = table(out, "terms")
    assert found["l"].astype(int).tolist() == found["published l"].tolist() == [17, 12, 7, 5]


def test_figure_1(out):
    frame = runs(out, "figure-1")
    lines = frame[frame.panel != "c"]
    # η at ϑ = 1, τ = 2 is in both panels
    (a,) = lines[(lines.panel == "a") & np.isclose(lines.theta, 1.0)].exact
    b = lines[lines.panel == "b"]
    assert np.interp(2.0, b.tau, b.exact) == pytest.approx(a, rel=1e-3)
    assert a == pytest.approx(1.642495369528834, rel=1e-9)  # trapezoidal rule, 4,001 points
    assert (lines.jaakkola_jordan > lines.exact).all()
    assert (lines.viper > lines.exact - 1e-9).all()  # ten digits are written
    assert frame.terms.max() == 12


def test_relative_errors(out):
    frame = runs(out, "errors")
    assert frame.viper.max() < 0.01 < frame.jaakkola_jordan.max()
    tighter = frame[frame.jaakkola_jordan < frame.viper]
    assert len(tighter)
    assert (tighter.tau < 0.62).all()


def test_acceleration_keeps_its_proven_rate(out):
    frame = runs(out, "acceleration")
    fast = frame[frame.weights == "accelerated"].set_index("terms").error
    bound = 2.0 * (3.0 + np.sqrt(8.0)) ** -fast.index.to_numpy(float)
    assert (fast <= 1.01 * bound + 1e-14).all()
    slow = frame[frame.weights == "plain"].set_index("terms").error
    assert slow.loc[23] == pytest.approx(0.03, rel=0.05)
    cusp = frame[frame.panel == "cusp"]
    assert cusp.curvature[cusp.tau == 0.1].min() < 0.0 < cusp.exact_curvature.min()


def test_logistic_regression(out):
    frame = runs(out, "logistic")
    assert len(frame) == 3 * 2 * 2 * 9
    assert (frame[frame.method == "VI-PER limit"].kl_optimum < 1e-8).all()
    narrow, limit, exact = (
        frame[(frame.method == m) & (frame.family == f)].set_index(["setting", "n", "p", "seed"])
        for m, f in (("VI-PG", "Q'"), ("VI-PER limit", "Q'"), ("corrected", "-"))
    )
    assert (narrow.f_width < 0.9 * exact.f_width).all()
    np.testing.assert_allclose(limit.f_width, exact.f_width, rtol=0.06)  # 1,000 weighted draws; 5 % in a width
    np.testing.assert_allclose(frame.elbo_mc.dropna(), frame.elbo.dropna(), atol=1.0)  # 1,000 draws of sd 3 at most


def test_the_published_value_stands_beside_ours(out):
    found = table(out, "logistic", "setting-3")
    for n_p, family, method in (("500 / 5", "Q", "VI-PG"), ("500 / 10", "Q'", "VI-PER")):
        ours, theirs = (
            found[(found["n / p"] == n_p) & (found.family == family) & (found.method == method) & (found.source == s)]
            for s in ("ours", "published")
        )
        cell = ("3", 500, int(n_p.split(" / ")[1]), method, family)
        width, elbo = published_logistic(*cell, "f_width"), published_logistic(*cell, "elbo_mc")
        assert theirs["CI width"].item() == width.median
        assert theirs["ELBO, sampled 2.5%"].item() == elbo.low
        assert width.low < ours["CI width"].item() < width.high


def test_mcmc_agrees(out):
    (row,) = runs(out, "logistic-mcmc").to_dict("records")
    found = table(out, "logistic", "agreement").set_index("method")
    assert found["CI width"]["VI-PER limit"] == pytest.approx(row["f_width"], abs=5.0 * row["f_width_error"])
    assert found["coverage - MCMC"]["VI-PG"] < -0.05


def test_the_bound_tightens_with_terms(out):
    found = table(out, "elbo-terms")
    gaps = found["ELBO - bound"].to_numpy()
    assert found["l"].tolist() == ["1", "3", "12", "limit"]
    assert gaps[0] > gaps[1] > gaps[2] > 1e-3
    assert abs(gaps[3]) < 1e-8  # the sum over rows in two orders
    assert found["KL*"].iloc[-1] < 1e-8
    # near the optimum the ELBO lost is the KL to it, up to the curvature: both are second order
    np.testing.assert_allclose(found["ELBO lost"].iloc[:3], found["KL*"].iloc[:3], rtol=0.15)


def test_runtime_has_every_method(out):
    found = table(out, "runtime")
    ours = found[found.source == "ours"]
    assert ours.n.tolist() == ["500", "1,000"]
    assert (ours[["VI-MC", "VI-PER", "VI-PER limit", "VI-PG"]] > 0.0).all(axis=None)


def test_latex_tables_need_no_unicode(out):
    files = {path: path.read_text(encoding="utf-8") for path in out.glob("*/*.tex")}
    assert files
    assert {path.name: {c for c in text if not c.isascii()} for path, text in files.items() if not text.isascii()} == {}
