"""MCMC against integrals on a grid, and its target against the formula written out."""

import math
import sys

import numpy as np
import pytest
import scipy.sparse
import scipy.stats
from tolerances import TOLERANCE

import viper
from viper import VariationalLogisticRegression
from viper.errors import ConvergenceWarning
from viper.models.reference import (
    MCMCResult,
    build_model,
    convergence_problems,
    import_numpyro,
    model_of_fit,
    sample_latent,
    sample_posterior,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def jax():
    pytest.importorskip("numpyro", reason="NumPyro is not installed: pip install 'vi-per[mcmc]'")
    return import_numpyro()[0]


def data(n, p, seed):
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((n, p)) + 0.5
    y = generator.random(n) < 1.0 / (1.0 + np.exp(0.5 - X.sum(1)))
    return X, y.astype(int)


def rows(n, seed):
    """Weights and offsets."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 4, n).astype(float), generator.normal(0.0, 2.0, n)


# --- the target ---


@pytest.mark.parametrize("scale", ["number", "vector", "matrix"])
@pytest.mark.parametrize("intercept", [False, True])
def test_log_joint_is_the_formula(scale, intercept):
    X, y = data(40, 3, 0)
    c, o = rows(40, 1)
    m = np.array([0.1, -0.2, 0.3])
    A = np.random.default_rng(2).standard_normal((3, 3))
    scales = {"number": 0.7, "vector": np.array([0.5, 1.0, 20.0]), "matrix": A @ A.T + np.eye(3)}
    S = {"number": 0.49 * np.eye(3), "vector": np.diag([0.25, 1.0, 400.0]), "matrix": scales["matrix"]}[scale]
    model = build_model(X, y, m, scales[scale], 5.0, intercept, c, o)
    for b in np.random.default_rng(3).normal(0.0, 3.0, (5, 3 + intercept)):
        f = X @ b[:3] + o + (b[3] if intercept else 0.0)
        expected = np.sum(c * np.where(y == 1, -np.log1p(np.exp(-f)), -np.log1p(np.exp(f))))
        expected += scipy.stats.multivariate_normal(m, S).logpdf(b[:3])
        expected += scipy.stats.norm(0.0, 5.0).logpdf(b[3]) if intercept else 0.0
        # SciPy inverts the matrix through its eigenvalues, with the error of the condition number, about 10.
        assert model.log_joint(b) == pytest.approx(expected, rel=10 * TOLERANCE["roundoff"])


def test_weights_are_repeated_rows():
    X, y = data(30, 2, 4)
    c, o = rows(30, 5)
    k = c.astype(int)
    weighted = build_model(X, y, sample_weight=c, offset=o)
    repeated = build_model(X.repeat(k, axis=0), y.repeat(k), offset=o.repeat(k))
    for b in np.random.default_rng(6).standard_normal((5, 3)):
        assert weighted.log_joint(b) == pytest.approx(repeated.log_joint(b), rel=TOLERANCE["roundoff"])


def test_an_offset_is_a_column_with_coefficient_one():
    X, y = data(30, 2, 7)
    o = rows(30, 8)[1]
    shifted, wider = build_model(X, y, offset=o), build_model(np.column_stack([o, X]), y)
    # log N(1; 0, 1), the prior of the coefficient that the offset does not have
    constant = scipy.stats.norm.logpdf(1.0)
    for b in np.random.default_rng(9).standard_normal((5, 3)):
        assert shifted.log_joint(b) + constant == pytest.approx(wider.log_joint([1.0, *b]), rel=TOLERANCE["roundoff"])


def test_the_second_label_counts_as_one():
    X, y = data(30, 2, 10)
    expected = build_model(X, y).label
    assert np.array_equal(build_model(X, np.array(["no", "yes"])[y]).label, expected)
    assert np.array_equal(build_model(X, y == 1).label, expected)
    assert np.array_equal(build_model(X, np.where(y == 1, -1.0, -2.0)).label, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": [0, 1, 2]}, r"y must have exactly two classes; got 3: \[0, 1, 2\]"),
        ({"y": [1, 1, 1]}, r"y must have exactly two classes; got 1 class: 1"),
        ({"y": [0, 1]}, r"inconsistent numbers of samples: 3 and 2"),
        ({"X": [[np.nan], [0.0], [1.0]]}, r"X contains NaN"),
        ({"prior_scale": 0.0}, r"prior_scale must be positive and finite, .*; got 0\.0"),
        ({"prior_scale": [1.0, 2.0]}, r"prior_scale must be a number, a vector of 1 .*; got shape \(2,\)"),
        ({"prior_scale": [[-1.0]]}, r"prior_scale .* must be positive definite; got smallest eigenvalue -1\. Add"),
        ({"prior_scale": np.eye(2)}, r"prior_scale as a covariance matrix must be 1×1; got \(2, 2\)"),
        ({"prior_scale": np.inf}, r"prior_scale must be positive and finite, .*; got inf"),
        ({"prior_mean": np.nan}, r"prior_mean must be finite; got nan"),
        ({"intercept_scale": -1.0}, r"intercept_scale must be positive and finite, .*; got -1\.0"),
        ({"sample_weight": [1.0, -1.0, 1.0]}, r"sample_weight must not be negative; got -1\.0"),
        ({"sample_weight": [1.0, 1.0]}, r"sample_weight must have shape \(3,\), one entry per row"),
        ({"offset": [0.0, np.inf, 0.0]}, r"offset must be finite; got inf"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=message):
        build_model(**({"X": [[0.0], [1.0], [2.0]], "y": [0, 1, 1]} | changes))


@pytest.mark.parametrize("scale", [0.7, [[0.5, 0.1], [0.1, 0.8]]])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("make", [np.asarray, scipy.sparse.csr_array])
def test_a_fitted_model_brings_its_own(scale, intercept, make):
    X, y = data(30, 2, 5)
    c, o = rows(30, 6)
    prior = {"prior_scale": scale, "prior_mean": [0.1, -0.2], "intercept_scale": 2.0, "fit_intercept": intercept}
    fitted = VariationalLogisticRegression(**prior).fit(make(X), y, sample_weight=c, offset=o)
    expected = build_model(X, y, sample_weight=c, offset=o, **prior)
    beta = np.array([0.3, -0.4, 0.5])[: 2 + intercept]
    assert model_of_fit(fitted, {}).log_joint(beta) == pytest.approx(expected.log_joint(beta), rel=1e-12)


def test_a_fitted_model_stands_alone(jax, tmp_path):
    X, y = data(30, 2, 5)
    fitted = VariationalLogisticRegression().fit(X, y)
    with pytest.raises(TypeError, match=r"provides its rows and its prior; got y, prior_scale too. Leave them out."):
        sample_posterior(fitted, y, prior_scale=2.0)
    fitted.save(tmp_path / "model.viper")
    with pytest.raises(ValueError, match="needs the training rows; got a model without them"):
        sample_posterior(viper.load(tmp_path / "model.viper"))
    with pytest.raises(ValueError, match="y must hold a label for each row of X; got None"):
        sample_posterior(X)


def test_draws_of_a_fitted_model(jax, plain):
    X, y = data(25, 1, 11)
    assert np.array_equal(sample_posterior(VariationalLogisticRegression().fit(X, y)).draws, plain.draws)


# --- the draws ---


def grid_moments(model, centre, sd):
    """Posterior means and sds of two coefficients by summing over a grid of 8 sds either way."""
    axes = [np.linspace(m - 8.0 * s, m + 8.0 * s, 161) for m, s in zip(centre, sd, strict=True)]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    log_p = np.array([model.log_joint(point) for point in points])
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = p @ points
    return mean, np.sqrt(p @ (points - mean) ** 2)


def assert_on_grid(result, model):
    mean, sd = grid_moments(model, result.mean(), result.sd())
    # 4 standard errors: exceeded once in 16,000 by chance, and the seed is fixed
    assert (np.abs(result.mean() - mean) < 4.0 * result.mcse()).all()
    assert (np.abs(result.sd() - sd) < 4.0 * result.mcse("sd")).all()


@pytest.fixture(scope="module")
def plain(jax):
    return sample_posterior(*data(25, 1, 11))


def test_means_and_sds_on_a_grid(plain):
    assert_on_grid(plain, build_model(*data(25, 1, 11)))


def test_weights_offset_and_prior_on_a_grid(jax):
    c, o = rows(25, 12)
    options = {"prior_mean": 2.0, "prior_scale": [[0.3]], "intercept_scale": 2.0, "sample_weight": c, "offset": o}
    X, y = data(25, 1, 13)
    assert_on_grid(sample_posterior(X, y, **options), build_model(X, y, **options))


def test_the_scale_of_a_column_does_not_matter(jax):
    scale = 1e6
    X, y = data(25, 1, 14)
    model = build_model(scale * X, y, prior_scale=1.0 / scale)
    assert_on_grid(sample_posterior(scale * X, y, prior_scale=1.0 / scale, draws=500), model)


def test_the_result(plain):
    assert plain.draws.shape == (4, 1000, 2)
    assert plain.draws.dtype == np.float64
    assert (plain.rhat < 1.01).all()
    assert (plain.ess > 400.0).all()
    assert plain.divergences == 0
    assert plain.seconds > 0.0


def test_the_same_seed_gives_the_same_draws_and_another_gives_others(jax, plain):
    X, y = data(25, 1, 11)
    assert np.array_equal(sample_posterior(X, y, random_state=0).draws, plain.draws)
    other = sample_posterior(X, y, random_state=np.random.default_rng(1))
    assert not np.array_equal(other.draws, plain.draws)
    assert len(np.unique(plain.draws[:, 0, 0])) == 4


def test_one_short_chain_without_intercept(jax):
    pd = pytest.importorskip("pandas")
    X, y = data(25, 2, 15)
    # one chain cannot vouch for itself
    message = r"R-hat must be at most 1\.01; got nan\. Use several .* size must be at least 400; got \d+\. Take more"
    with pytest.warns(ConvergenceWarning, match=message):
        result = sample_posterior(pd.DataFrame(X, columns=["a", "b"]), y, fit_intercept=False, draws=50, chains=1)
    assert result.draws.shape == (1, 50, 2)
    assert result.summary().index.tolist() == ["a", "b"]


def test_jax_is_left_as_it_was(jax, plain):
    assert jax.numpy.ones(1).dtype == np.float32


def test_summary(plain):
    table = plain.summary(level=0.5)
    assert table.index.tolist() == ["x0", "intercept"]
    assert table.columns.tolist() == ["mean", "sd", "lower", "upper", "mcse", "ess", "rhat"]
    inside = (plain.flat > table["lower"].to_numpy()) & (plain.flat < table["upper"].to_numpy())
    assert np.allclose(inside.mean(axis=0), 0.5)


def test_errors_and_warnings():
    def result(rhat=1.0, ess=500.0, divergences=0):
        return MCMCResult(np.zeros((4, 10, 1)), ["x0"], np.array([rhat]), np.array([ess]), divergences, 0.0)

    assert convergence_problems(result()) == []
    (message,) = convergence_problems(result(rhat=1.02))
    assert message.startswith("R-hat must be at most 1.01; got 1.020. Use")
    (message,) = convergence_problems(result(divergences=3))
    assert message.startswith("no transition may diverge; got 3. Scale")
    assert len(convergence_problems(result(rhat=np.nan, ess=np.nan))) == 2


def test_without_numpyro(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpyro", None)
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(
        ImportError, match=r"sample_posterior needs NumPyro; install it with pip install 'vi-per\[mcmc\]'"
    ):
        sample_posterior([[0.0], [1.0]], [0, 1])


def test_elliptical_slices_with_a_linear_kernel_are_logistic_regression(jax):
    generator = np.random.default_rng(8)
    X = generator.normal(size=(60, 3))
    y = generator.random(60) < 1 / (1 + np.exp(-X.sum(1)))
    weights = generator.integers(1, 3, 60).astype(float)
    nuts = sample_posterior(
        X, y, prior_scale=1.5, fit_intercept=False, sample_weight=weights, offset=0.3 * X[:, 0], draws=500
    )
    slices = sample_latent(0.3 * X[:, 0], 2.25 * X @ X.T, y.astype(float), sample_weight=weights, draws=500)
    f = 0.3 * X[:, 0] + nuts.flat @ X.T
    error = np.hypot(slices.mcse(), f.std(0) / math.sqrt(nuts.ess.min()))
    assert (abs(slices.mean() - f.mean(0)) < 5 * error).all()
    np.testing.assert_allclose(slices.sd(), f.std(0), rtol=0.08)  # 5/√(2 ess)
