"""The low-rank family: between the diagonal and the full one, at the optimum of its own ELBO, by products alone."""

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import torch
from test_solver import assert_same_posterior, data, kl

import viper
from viper import VariationalLogisticRegression
from viper.inference.low_rank.ascent import LowRankAscent, leading_start, maximise_low_rank
from viper.inference.low_rank.family import LowRankGaussian, LowRankProblem
from viper.inference.problem import Prior
from viper.inference.rows import Arrays
from viper.softplus.limit import limit

TIGHT = 1e-11  # nats, where two fits are to agree to 1e-5 of a standard deviation


def rows(n, p, seed=0, factors=2, strength=1.0):
    """Columns with a few common factors, whose leading directions are well apart."""
    rng = np.random.default_rng(seed)
    sizes = strength * 2.0 ** -np.arange(factors)
    X = rng.standard_normal((n, p)) + (rng.standard_normal((n, factors)) * sizes) @ rng.standard_normal((factors, p))
    return X, (X @ rng.normal(0.0, 1.0 / np.sqrt(p), p) + rng.logistic(size=n) > 0).astype(int)


def fit(X, y=None, rank=2, fit_options=None, **options):
    return VariationalLogisticRegression(covariance="low-rank", rank=rank, **options).fit(X, y, **fit_options or {})


def problem_of(X, y, rank, scale=1.0):
    prior = Prior(torch.zeros(X.shape[1], dtype=torch.float64), torch.full((X.shape[1],), scale**-2).double())
    source = Arrays(torch.from_numpy(X), torch.from_numpy(y.astype(float)))
    return LowRankProblem(source, prior, limit(), diagonal=True, iterative=True, rank=rank)


def some_q(d, k, seed=0):
    rng = np.random.default_rng(seed)
    mean, precision, loadings = rng.normal(size=d), rng.uniform(1.5, 4.0, d), 0.5 * rng.normal(size=(d, k))
    return LowRankGaussian(*(torch.from_numpy(x) for x in (mean, precision)), loadings=torch.from_numpy(loadings))


def covariance_of(q):
    V = q.loadings / q.sd[:, None]
    return torch.linalg.inv(torch.diag(q.precision) + V @ V.T)


# --- the family ---


def test_moments_and_posterior_are_those_of_the_precision():
    q = some_q(7, 3)
    exact = covariance_of(q)
    torch.testing.assert_close(q.factor, exact.diagonal(), rtol=1e-12, atol=0)
    torch.testing.assert_close(q.log_determinant, -float(torch.logdet(exact)), rtol=1e-12, atol=0)
    posterior = q.posterior()
    torch.testing.assert_close(posterior.covariance(), exact, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(posterior.mean, q.mean, rtol=0, atol=0)
    prior = posterior.as_prior(0.5).without_loadings()
    torch.testing.assert_close(prior.precision, 0.5 * torch.linalg.inv(exact), rtol=1e-10, atol=1e-12)


def test_loadings_so_large_that_products_lose_digits():
    """I + WᵀW of two equal columns of 1e9 is singular in double precision; log |Λ| and Σ are known to seven digits."""
    column = torch.full((6, 1), 1e9, dtype=torch.float64)
    q = LowRankGaussian(torch.zeros(6).double(), torch.ones(6).double(), loadings=torch.cat([column, column], 1))
    assert q.log_determinant == pytest.approx(np.log(1.0 + 2.0 * 6.0 * 1e18), rel=1e-6)
    torch.testing.assert_close(q.factor, torch.full((6,), 5.0 / 6.0).double(), rtol=1e-6, atol=0)


def test_the_objective_is_that_of_the_full_family_at_the_same_gaussian():
    """F, and KL to a prior that itself has loadings, against dense matrices."""
    X, y = rows(60, 7)
    problem, q = problem_of(X, y, 3), some_q(7, 3)
    model = VariationalLogisticRegression(fit_intercept=False).fit(X, y)
    model.posterior_ = q.posterior()
    value, magnitude = problem.measure(q, q.factor)
    assert value + problem.kl(q, q.factor) == pytest.approx(model.elbo(X, y) + model.kl_, rel=1e-13)
    assert magnitude > 60
    loadings = torch.from_numpy(np.random.default_rng(1).normal(size=(7, 2)))
    prior = Prior(q.mean.flip(0), problem.prior.precision, loadings)
    dense = prior.without_loadings()
    with_loadings = LowRankProblem(problem.source, prior, limit(), rank=3)
    p = torch.distributions.MultivariateNormal(q.mean, covariance_of(q))
    exact = torch.distributions.MultivariateNormal(dense.mean, precision_matrix=dense.precision)
    assert with_loadings.kl(q, q.factor) == pytest.approx(float(torch.distributions.kl_divergence(p, exact)), rel=1e-11)
    for one, other in ((prior.log_determinant, dense.log_determinant), (prior.diagonal, dense.diagonal)):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    torch.testing.assert_close(prior.apply(q.loadings), dense.apply(q.loadings), rtol=1e-12, atol=1e-12)


def test_the_gradient_is_that_of_differences():
    X, y = rows(40, 5)
    ascent = LowRankAscent(problem_of(X, y, 2), some_q(5, 2), None, 0.0)
    x = 0.1 * np.random.default_rng(3).standard_normal(len(ascent.origin()))
    _, gradient = ascent.negative(x)
    found = scipy.optimize.approx_fprime(x, lambda x: ascent.negative(x)[0], 1e-6)
    np.testing.assert_allclose(found, gradient, atol=2e-5, rtol=1e-5)  # one-sided differences


# --- between the two other families ---


def test_rank_zero_is_the_diagonal_family():
    X, y = rows(80, 6)
    plain = VariationalLogisticRegression(covariance="diagonal").fit(X, y)
    assert_same_posterior(fit(X, y, rank=0), plain)


@pytest.mark.parametrize("shape", [(80, 6), (9, 20)])
def test_as_many_directions_as_rows_or_columns_are_the_full_family(shape):
    X, y = rows(*shape)
    model = VariationalLogisticRegression().fit(X, y)
    for rank in (min(shape), 50):
        assert_same_posterior(fit(X, y, rank=rank), model)


@pytest.mark.parametrize("shape", [(120, 6), (12, 30)])
def test_the_search_itself_ends_at_the_full_posterior(shape):
    """Without the shortcut: Λ = λ_min I + a matrix of rank d - 1, or the prior plus one of rank n."""
    X, y = rows(*shape)
    full = VariationalLogisticRegression(fit_intercept=False).fit(X, y)
    result = maximise_low_rank(problem_of(X, y, min(shape[0], shape[1] - 1)))
    assert result.converged
    assert result.objective == pytest.approx(full.elbo_, abs=1e-6)
    found = result.q.posterior()
    assert kl(full.posterior_.mean.numpy(), full.covariance_, found.mean.numpy(), found.covariance().numpy()) < 1e-6


def test_the_elbo_rises_with_the_rank():
    X, y = rows(300, 24, factors=3, strength=2.0)
    elbos = [fit(X, y, rank=rank).elbo_ for rank in (0, 1, 2, 3, 5)]
    full = VariationalLogisticRegression().fit(X, y).elbo_
    assert np.all(np.diff(elbos) > 0)
    assert elbos[-1] < full
    assert full - elbos[3] < 0.5 * (full - elbos[0])  # three directions hold most of what correlates


def test_the_optimum_is_that_of_an_independent_search():
    """By Gauss-Hermite quadrature, autograd and SciPy in other coordinates: (μ, log δ, V)."""
    X, y = rows(150, 5)
    k, p = 1, 5
    nodes, weights = (torch.from_numpy(x) for x in np.polynomial.hermite_e.hermegauss(100))
    A, label = torch.from_numpy(X), torch.from_numpy(y.astype(float))

    def parts(x):
        mean, logs, V = x[:p], x[p : 2 * p], x[2 * p :].view(p, k)
        return mean, torch.diag(1.0 + logs.exp()) + V @ V.T

    def loss(x):
        mean, precision = parts(x)
        spread = torch.linalg.inv(precision)
        theta, tau = A @ mean, (A * (A @ spread)).sum(1).sqrt()
        softplus = torch.nn.functional.softplus(theta[:, None] + tau[:, None] * nodes) @ (weights / weights.sum())
        return (softplus - label * theta).sum() + 0.5 * (spread.trace() + mean @ mean + torch.logdet(precision) - p)

    def with_gradient(x):
        point = torch.tensor(x, requires_grad=True)
        value = loss(point)
        return float(value.detach()), torch.autograd.grad(value, point)[0].numpy()

    model = fit(X, y, rank=k, fit_intercept=False)
    best = None
    for seed in range(3):
        start = np.random.default_rng(seed).normal(size=2 * p + p * k)
        found = scipy.optimize.minimize(with_gradient, start, jac=True, options={"gtol": 1e-9})
        best = found if best is None or found.fun < best.fun else best
    assert -best.fun == pytest.approx(model.elbo_, abs=1e-8)
    mean, precision = parts(torch.from_numpy(best.x))
    exact = mean.numpy(), torch.linalg.inv(precision).numpy()
    assert kl(*exact, model.posterior_.mean.numpy(), model.covariance_) < 1e-8


def test_stationarity():
    """Λ and T have the same diagonal, and W spans leading eigenvectors of diag(s) T diag(s)."""
    X, y = rows(200, 12)
    problem = problem_of(X, y, 2)
    q = maximise_low_rank(problem, tol=TIGHT).q
    total = problem.sums(q)
    A = torch.from_numpy(X)
    h = problem.bound.moments(A @ q.mean, (A * (A @ covariance_of(q))).sum(1))[2]
    T = torch.eye(12, dtype=torch.float64) + A.T @ (h[:, None] * A)
    torch.testing.assert_close(T.diagonal(), 1.0 + total.diagonal, rtol=1e-10, atol=0)
    precision = torch.linalg.inv(covariance_of(q))
    torch.testing.assert_close(T.diagonal(), precision.diagonal(), rtol=1e-5, atol=0)
    scaled = q.sd[:, None] * T * q.sd
    basis, w, _ = torch.linalg.svd(q.loadings, full_matrices=False)
    torch.testing.assert_close(scaled @ basis, basis * (1.0 + w.square()), rtol=0, atol=1e-4)
    assert torch.linalg.eigvalsh(scaled)[-3] < 1.0 + w.square().min()  # the leading ones


def test_a_start_near_the_end():
    X, y = rows(200, 12)
    problem = problem_of(X, y, 2)
    start, _ = leading_start(problem)
    result = maximise_low_rank(problem)
    assert problem.measure(start, start.factor)[0] < result.objective
    mean_field = VariationalLogisticRegression(covariance="diagonal", fit_intercept=False).fit(X, y).elbo_
    assert problem.measure(start, start.factor)[0] > mean_field
    again = maximise_low_rank(problem, result.q)
    assert (again.converged, again.iterations) == (True, 0)
    assert again.objective == pytest.approx(result.objective, abs=1e-10)


# --- the same answer, however the rows are given ---


def test_units_do_not_matter():
    X, y = rows(120, 15)
    s = 10.0 ** np.random.default_rng(0).uniform(-3, 3, 15)
    plain, scaled = fit(X, y, tol=TIGHT), fit(X * s, y, tol=TIGHT, prior_scale=1.0 / s)
    assert scaled.elbo_ == pytest.approx(plain.elbo_, rel=1e-11)
    scale = np.append(s, 1.0)
    spread = np.sqrt(np.diag(plain.covariance_))
    np.testing.assert_allclose(
        scaled.covariance_ * np.outer(scale, scale), plain.covariance_, rtol=0, atol=1e-4 * spread.min() ** 2
    )


def test_weights_are_repeated_rows_and_an_offset_is_a_column():
    X, y = rows(90, 8)
    times = np.random.default_rng(0).integers(1, 4, 90)
    offset = np.random.default_rng(1).normal(size=90)
    given = {"sample_weight": times, "offset": offset}
    again = {"offset": np.repeat(offset, times)}
    one, other = fit(X, y, 2, given, tol=TIGHT), fit(X.repeat(times, 0), y.repeat(times), 2, again, tol=TIGHT)
    assert_same_posterior(one, other, within=1e-4)
    assert one.elbo_ == pytest.approx(other.elbo_, rel=1e-12)


def test_dense_and_sparse_rows(tmp_path):
    X, y = rows(150, 12)
    X[np.abs(X) < 1.0] = 0.0
    here = fit(X, y, tol=TIGHT)
    mapped = np.memmap(tmp_path / "rows", dtype=float, mode="w+", shape=X.shape)
    mapped[:] = X
    blocks = viper.Blocks(lambda: ((X[i : i + 40], y[i : i + 40]) for i in range(0, 150, 40)))
    for given in ((scipy.sparse.csr_array(X), y), (mapped, y), (blocks, None)):
        assert_same_posterior(here, fit(*given, tol=TIGHT), within=1e-4)


def test_files_and_partitions(tmp_path):
    """Read in chunks, or kept by Dask: the optimum is the same."""
    pandas, dask_array = pytest.importorskip("pandas"), pytest.importorskip("dask.array")
    pytest.importorskip("pyarrow")
    X, y = rows(150, 6)
    here = fit(X, y, tol=TIGHT)
    frame = pandas.DataFrame(X, columns=[f"x{j}" for j in range(6)]).assign(y=y)
    frame.to_parquet(tmp_path / "rows.parquet")
    given = dask_array.from_array(X, chunks=(60, 6)), dask_array.from_array(y, chunks=60)
    for other in (fit(viper.Files(tmp_path / "rows.parquet", target="y"), tol=TIGHT), fit(*given, tol=TIGHT)):
        assert_same_posterior(here, other, within=1e-4)


def test_the_search_holds_nothing_of_the_size_of_a_covariance():
    """Of 200,000 columns, such a matrix would take 320 GB."""
    d = 200_000
    X = scipy.sparse.random(5, d, 1e-5, "csr", random_state=0)
    ones = torch.ones(d, dtype=torch.float64)
    problem = LowRankProblem(
        Arrays(X, torch.zeros(5).double()), Prior(0.0 * ones, ones), limit(), diagonal=True, iterative=True, rank=1
    )
    q = LowRankGaussian(0.0 * ones, ones, loadings=ones[:, None] / d)
    ascent = LowRankAscent(problem, q, None, 1e-9)
    assert np.isfinite(ascent.negative(ascent.origin())[0])


def test_many_rows_begin_on_some_of_them():
    X, y = rows(4001, 6)
    model = fit(X, y)
    assert model.passes_ % 1.0 > 0.0
    assert model.elbo_bound_ <= model.elbo_ < VariationalLogisticRegression().fit(X, y).elbo_


def test_other_bounds_and_float32():
    X, y = rows(120, 9)
    exact = fit(X, y)
    for options in ({"bound": "pg"}, {"terms": 12}, {"bound": "quadrature"}):
        other = fit(X, y, **options)
        assert other.converged_
        assert other.elbo_ <= exact.elbo_ + 1e-8
        assert other.elbo_ == pytest.approx(exact.elbo_, abs=1.0)
    assert fit(X, y, dtype="float32").elbo_ == pytest.approx(exact.elbo_, abs=1e-4)


def test_a_chosen_prior_scale():
    X, y = rows(80, 6)
    model = fit(X, y, prior_scale="auto")
    for factor in (0.8, 1.25):
        assert fit(X, y, prior_scale=factor * model.prior_scale_[0]).elbo_ < model.elbo_


# --- what can be done with the model ---


def test_new_rows_update_the_posterior(tmp_path):
    """The posterior so far is the prior of the next rows, also after a file; with nothing new it stays."""
    X, y = rows(300, 12)
    model = fit(X[:200], y[:200], 3)
    before = model.covariance_
    model.save(tmp_path / "model.viper")
    model = viper.load(tmp_path / "model.viper")
    again = fit(X[:200], y[:200], 3).partial_fit(X[200:], y[200:])
    model.partial_fit(X[200:], y[200:])
    assert_same_posterior(model, again)
    model.save(tmp_path / "next.viper")
    restored = viper.load(tmp_path / "next.viper")
    np.testing.assert_array_equal(restored.predict_proba(X), model.predict_proba(X))
    torch.testing.assert_close(restored.prior_.loadings, model.prior_.loadings, rtol=0, atol=0)
    assert restored.diagnose(X[200:], y[200:], random_state=0).k_hat < 0.7
    nothing = fit(X[:200], y[:200], 3)
    nothing.partial_fit(X[:1], y[:1], sample_weight=np.array([1e-12]))
    np.testing.assert_allclose(nothing.covariance_, before, atol=1e-6 * np.diag(before).max())


def test_predictions_follow_from_the_covariance():
    X, y = rows(200, 12)
    model = fit(X, y, 2)
    assert type(model.posterior_).__name__ == "LowRank"
    A = np.column_stack([X, np.ones(200)])
    tau = np.sqrt(np.einsum("ij,jk,ik->i", A, model.covariance_, A))
    np.testing.assert_allclose(model.predict_latent(X)[1], tau, rtol=1e-10)
    np.testing.assert_allclose(model.summary()["sd"], np.sqrt(np.diag(model.covariance_)), rtol=1e-10)
    draws = model.sample(20_000, random_state=0)
    np.testing.assert_allclose(np.cov(draws.T), model.covariance_, atol=0.05 * np.diag(model.covariance_).max())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "adam"}, "covariance='low-rank' needs solver='newton'; got 'adam'."),
        ({"prior_scale": np.eye(6)}, "covariance='low-rank' needs independent priors; got a prior covariance matrix."),
        ({"rank": -1}, "rank must be a whole number, 0 or more; got -1."),
        ({"rank": 2.0}, "rank must be a whole number, 0 or more; got 2.0."),
    ],
)
def test_unsupported_options_are_refused(options, message):
    X, y = rows(60, 6)
    with pytest.raises(ValueError, match="^" + message.replace("(", r"\(")):
        fit(X, y, **{"rank": 2, **options})


def test_robust_covariances_are_for_matrices():
    X, y = rows(60, 6)
    with pytest.raises(ValueError, match="robust needs"):
        fit(X, y).robust()


def test_no_two_columns_need_to_differ():
    """Duplicate columns, a constant one, and one of zeros."""
    X, y = data(100, 4, 3)
    X = np.column_stack([X, X[:, 0], np.ones(100), np.zeros(100)])
    model = fit(X, y, 3)
    assert model.converged_
    sd = np.sqrt(np.diag(model.covariance_))
    assert sd[6] == pytest.approx(1.0, rel=1e-6)  # the prior's
    assert abs(model.coef_[0, 0] - model.coef_[0, 4]) < 1e-4
