"""Soil liquefaction: the quick version against the optimum, and the same numbers from a file in the real layout."""

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import scipy.stats
from scipy.special import expit

from viper import datasets
from viper.paper import reproduce, soil
from viper.paper.artefact import Request
from viper.paper.optimum import NormalDistribution, gaussian_kl
from viper.paper.published import PUBLISHED_SOIL_FITS


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    reproduce("soil", quick=True, out=folder)
    return folder / "quick" / "soil"


@pytest.fixture(scope="module")
def frame(out):
    return pd.read_csv(out / "runs.csv").set_index(["family", "method"])


@pytest.fixture(scope="module")
def found(frame):
    return {key: soil.posterior_in(row) for key, row in frame.iterrows()}


def test_the_study_is_the_papers():
    full = Request(None, 1, False, None)
    config = soil.Soil().configure(full)
    assert (config["rows"], config["grid"]) == (1_719_400, [310, 290])
    jobs = [(job["method"], job["family"]) for job in soil.Soil().jobs(full)]
    assert {(m, f) for m in ("VI-PER", "VI-PER limit", "VI-MC", "VI-PG") for f in ("Q", "Q'")} < set(jobs)
    assert len(jobs) == 10


@pytest.mark.parametrize("family", ["Q", "Q'"])
def test_the_limit_is_the_optimum_and_the_others_are_not(found, frame, family):
    best = found[family, "optimum"]
    assert soil.largest_shift(best, found[family, "VI-PER limit"]) < 1e-4
    assert gaussian_kl(best, found[family, "VI-PER limit"]) < 1e-8
    assert gaussian_kl(best, found[family, "VI-MC"]) < 1e-6
    assert soil.largest_shift(best, found[family, "VI-PER"]) > 0.1
    assert gaussian_kl(best, found[family, "VI-PG"]) > 0.2
    # to the digits kept
    assert frame.elbo[family, "VI-PER limit"] == pytest.approx(frame.elbo[family, "optimum"], abs=2e-6)
    assert frame.elbo[family, "optimum"] - frame.elbo[family, "VI-PG"] > 0.1


@pytest.fixture(scope="module")
def data():
    return datasets.make_liquefaction(1, 20_000, (31, 29))


@pytest.fixture(scope="module")
def design(data):
    return np.column_stack([np.ones(len(data.y)), data.X])


def test_elbos_are_those_of_quadrature_at_the_stored_posteriors(found, frame, data, design):
    for key, q in found.items():
        # ten digits of the posterior and of the ELBO are stored
        assert frame.elbo[key] == pytest.approx(soil.elbo_by_quadrature(design, data.y, q), rel=2e-9)


def polya_gamma(design, y, full):
    """VI-PG by its own fixed point, Σ⁻¹ = I + Xᵀ diag(tanh(c/2)/2c) X, μ = Σ Xᵀ(y - ½), c² = E f² (Durante & Rigon)."""
    precision = np.eye(6)
    for _ in range(200):
        mean = np.linalg.solve(precision, design.T @ (y - 0.5))
        covariance = np.linalg.inv(precision) if full else np.diag(1.0 / np.diag(precision))
        c = np.sqrt(((design @ covariance) * design).sum(1) + (design @ mean) ** 2)
        precision = np.eye(6) + (design * (np.tanh(c / 2) / (2 * c))[:, None]).T @ design
    return NormalDistribution(mean, covariance)


@pytest.mark.parametrize("family", ["Q", "Q'"])
def test_vi_pg_is_the_fixed_point_of_polya_gamma_augmentation(found, data, design, family):
    assert gaussian_kl(polya_gamma(design, data.y, family == "Q'"), found[family, "VI-PG"]) < 1e-8


def test_widths_and_aucs_follow_from_the_stored_posteriors(found, frame, data):
    X = np.column_stack([np.ones(len(data.y_test)), data.X_test])
    for key, q in found.items():
        sd = np.linalg.norm(X @ np.linalg.cholesky(q.covariance), axis=1)
        assert frame.width[key] == pytest.approx(np.mean(2.0 * scipy.stats.norm.ppf(0.975) * sd), rel=1e-8)
        # the AUC is the Mann-Whitney statistic over the number of pairs; ten digits of μ decide every pair but a few
        f, liquefied = X @ q.mean, data.y_test == 1
        pairs = scipy.stats.mannwhitneyu(f[liquefied], f[~liquefied]).statistic
        assert frame.auc[key] == pytest.approx(pairs / (liquefied.sum() * (~liquefied).sum()), abs=1e-6)


def test_the_elbo_of_the_optimum_cannot_be_raised(found, data, design):
    best = found["Q'", "optimum"]
    factor = np.linalg.cholesky(best.covariance)

    def loss(step):
        """-ELBO at μ + L u, L e^v."""
        scaled = factor * np.exp(step[6:])
        return -soil.elbo_by_quadrature(
            design, data.y, NormalDistribution(best.mean + factor @ step[:6], scaled @ scaled.T)
        )

    here = loss(np.zeros(12))
    slope = scipy.optimize.approx_fprime(np.zeros(12), loss, 1e-4)
    assert np.abs(slope).max() < 1e-3  # one-sided differences: half the curvature, about 1, times the step
    assert loss(np.full(12, 0.05)) > here


def test_the_elbo_by_quadrature_is_that_by_draws(found):
    data = datasets.make_liquefaction(1, 2_000, (3, 3))
    design = np.column_stack([np.ones(len(data.y)), data.X])
    q = found["Q'", "VI-PER limit"]
    normal = scipy.stats.multivariate_normal(q.mean, q.covariance)
    draws = normal.rvs(2000, random_state=1)
    f = draws @ design.T
    terms = (
        (data.y * f - np.logaddexp(0.0, f)).sum(1) - 0.5 * (draws**2 + np.log(2 * np.pi)).sum(1) - normal.logpdf(draws)
    )
    assert abs(soil.elbo_by_quadrature(design, data.y, q) - terms.mean()) < 4.0 * terms.std() / np.sqrt(len(terms))


def test_the_map_shows_the_sd_of_the_probability(found):
    q = found["Q'", "VI-PG"]
    X = datasets.make_liquefaction(1, 100, (4, 4)).X_test
    draws = scipy.stats.multivariate_normal(q.mean, q.covariance).rvs(20_000, random_state=2)
    sampled = expit(draws @ np.column_stack([np.ones(len(X)), X]).T).std(0)
    np.testing.assert_allclose(soil.uncertainty_map(X, q), sampled, rtol=0.03)


def test_coefficients_are_in_the_order_of_the_data(found):
    constants = datasets.liquefaction.generator_constants()
    expected = [float(constants["intercept"]), *constants["beta"]]
    q = found["Q'", "VI-PER limit"]
    assert np.abs((q.mean - expected) / np.sqrt(np.diag(q.covariance))).max() < 4.0


def test_files(out):
    names = {path.name for path in out.iterdir()}
    figures = {f"soil-map-{kind}.{ending}" for kind in ("diagonal", "full") for ending in ("png", "pdf")}
    tables = {
        f"{name}.{ending}" for name in ("soil", "soil-optimum", "soil-coefficients") for ending in ("csv", "md", "tex")
    }
    assert figures | tables | {"runs.csv", "runs.json"} == names
    with (out / "soil.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    published = {(row["family"], row["method"]): row for row in rows if row["source"] == "published"}
    widths = {key: float(row["CI width"]) for key, row in published.items()}
    assert [widths["Q", method] for method in ("VI-PER", "VI-MC", "VI-PG")] == [0.0335, 0.0335, 0.0065]
    assert [widths["Q'", method] for method in ("VI-PER", "VI-MC", "VI-PG")] == [0.0129, 0.0121, 0.0101]
    assert "stand-in" in (out / "soil.md").read_text(encoding="utf-8")


def test_the_real_file_is_used_where_there_is_one(tmp_path):
    made = datasets.make_liquefaction(2, 3_000, (20, 10))
    train = pd.DataFrame(made.X, columns=list(datasets.liquefaction.FEATURES))
    train["liq"], train["earthquake"] = made.y.astype(int), [made.quakes[k] for k in made.quake]
    test = pd.DataFrame(made.X_test, columns=list(datasets.liquefaction.FEATURES))
    test["liq"], test["earthquake"] = made.y_test.astype(int), "lomaprieta1989"
    test[["lon", "lat"]] = made.position
    path = tmp_path / "data" / soil.REAL_FILE
    path.parent.mkdir()
    pd.concat([train.assign(lon=0.0, lat=0.0), test]).to_csv(path)
    config = soil.Soil().configure(Request(None, 1, False, path.parent))
    job = {"method": "VI-PER limit", "family": "Q'", "seed": 2}
    (ours,), (theirs,) = (
        soil.Soil().run(job, {**config, "data": where, "rows": 3_000, "grid": [20, 10]}, None)
        for where in (config["data"], None)
    )
    assert config["data"] == str(path)
    for name in ("elbo", "auc", "width", *soil.MEAN_COLUMNS):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-7)


RESULTS = Path(__file__).parents[1] / "results" / "soil" / "runs.csv"


@pytest.mark.skipif(not RESULTS.exists(), reason="needs the results of a full run")
def test_the_full_run_reaches_its_aims():
    frame = pd.read_csv(RESULTS).set_index(["family", "method"])
    assert frame.converged.dropna().all()
    for family in ("Q", "Q'"):
        best, limit, twelve = (soil.posterior_in(frame.loc[family, m]) for m in ("optimum", "VI-PER limit", "VI-PER"))
        assert soil.largest_shift(best, limit) < 1e-4
        assert 1.0 < soil.largest_shift(best, twelve) < 2.2
        assert frame.width[family, "VI-PG"] < 0.82 * frame.width[family, "VI-PER limit"]
    # calibration: the published sds (VI-MC, Q')
    published = PUBLISHED_SOIL_FITS["VI-MC"][1]
    sd = np.sqrt(np.diag(soil.posterior_in(frame.loc["Q'", "VI-PER limit"]).covariance))
    np.testing.assert_allclose(sd, published, rtol=5e-3)
