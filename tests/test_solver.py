"""The solver against other ways to the same optimum, and under changes that should not change the answer."""

import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas
import pytest
import scipy.optimize
import scipy.sparse
import torch
from memory import PEAK
from sklearn.linear_model import LogisticRegression
from tolerances import TOLERANCE

import viper
from viper import VariationalLogisticRegression
from viper.data import checks
from viper.errors import ConvergenceWarning
from viper.inference import adam
from viper.inference.newton import nearly_solved, newton
from viper.inference.posterior import Full
from viper.inference.problem import Gaussian, Prior, Problem, divergence, kl_to_prior
from viper.inference.rows import Arrays, Dense
from viper.inference.start import find_mode, from_tighter_priors
from viper.inference.steps import full_step
from viper.inference.sums import sums
from viper.models.fitting import fit_posterior, run_solver
from viper.softplus.limit import limit

NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(200)
NODE_WEIGHTS = NODE_WEIGHTS / NODE_WEIGHTS.sum()


# --- the optimum by quadrature in NumPy and L-BFGS in SciPy ---


def moments_by_quadrature(theta, tau2):
    """E[log(1+e^X)], E[s(X)], E[s'(X)] by 200-point Gauss-Hermite."""
    x = theta[:, None] + np.sqrt(tau2)[:, None] * NODES
    s = 0.5 * (1.0 + np.tanh(0.5 * x))
    return np.logaddexp(0.0, x) @ NODE_WEIGHTS, s @ NODE_WEIGHTS, (s * (1.0 - s)) @ NODE_WEIGHTS


def optimum(A, y, scale, *, diagonal, weight=None, offset=0.0):
    """Mean and covariance of the q that maximises the exact ELBO under the prior N(0, diag scale²).

    L-BFGS on μ = Fm and on log sds, or on T with Σ = FTTᵀFᵀ, where FFᵀ is the inverse curvature at 0.
    """
    d = A.shape[1]
    c = np.ones(len(A)) if weight is None else weight
    precision = np.broadcast_to(scale, d) ** -2.0
    F = np.linalg.inv(np.linalg.cholesky(np.diag(precision) + 0.25 * (A * c[:, None]).T @ A)).T
    AF, lower = A @ F, np.tril_indices(d)
    PF = F.T * precision @ F

    def negative_diagonal(m, log_sd):
        mu, v = F @ m, np.exp(2.0 * log_sd)
        eta, g, h = moments_by_quadrature(offset + A @ mu, A**2 @ v)
        value = c @ (y * (offset + A @ mu) - eta) - 0.5 * (precision @ (v + mu**2) - 2.0 * log_sd.sum())
        to_m = F.T @ (A.T @ (c * (y - g)) - precision * mu)
        return value, to_m, 1.0 - v * (precision + (A**2).T @ (c * h))

    def negative_full(m, entries):
        T = np.zeros((d, d))
        T[lower] = entries
        eta, g, h = moments_by_quadrature(offset + AF @ m, np.square(AF @ T).sum(1))
        value = c @ (y * (offset + AF @ m) - eta) - 0.5 * (np.sum(T * (PF @ T)) + m @ PF @ m)
        value += np.log(np.abs(np.diag(T))).sum()
        to_T = np.diag(1.0 / np.diag(T)) - (PF + (AF * (c * h)[:, None]).T @ AF) @ T
        return value, AF.T @ (c * (y - g)) - PF @ m, to_T[lower]

    part = negative_diagonal if diagonal else negative_full

    def negative(x):
        value, to_m, to_rest = part(x[:d], x[d:])
        return -value, -np.concatenate([to_m, to_rest])

    rest = np.log(np.sqrt(np.square(F).sum(1))) if diagonal else np.eye(d)[lower]
    options = {"maxiter": 2000, "maxcor": 50, "ftol": 0.0, "gtol": 1e-7}
    start = np.concatenate([np.zeros(d), rest])
    found = scipy.optimize.minimize(negative, start, jac=True, method="L-BFGS-B", options=options)
    assert np.abs(found.jac).max() < 1e-5  # in units of the posterior's widths: KL below 1e-10 per coefficient
    x = found.x
    if diagonal:
        return F @ x[:d], np.diag(np.exp(2.0 * x[d:]))
    T = np.zeros((d, d))
    T[lower] = x[d:]
    return F @ x[:d], F @ T @ T.T @ F.T


def kl(mean, covariance, other_mean, other_covariance):
    """KL(N ‖ N') in coordinates where N' is standard."""
    root = np.linalg.cholesky(other_covariance)
    shift = np.linalg.solve(root, other_mean - mean)
    inner = np.linalg.solve(root, np.linalg.solve(root, covariance).T)
    excess = np.linalg.eigvalsh(inner) - 1.0
    return 0.5 * (np.sum(excess - np.log1p(excess)) + shift @ shift)


def paper_data(setting, n, p, seed):
    """The rows of the paper's simulations, as its code drew them."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        torch.manual_seed(seed)
        if setting == 1:
            X = torch.randn(n, p, dtype=torch.double)
        else:
            gap = (torch.arange(p)[:, None] - torch.arange(p)).abs()
            covariance = 0.3 ** gap.double()
            if setting == 3:
                warnings.simplefilter("ignore", UserWarning)  # torch's sampler warns that every sample is singular
                wishart = torch.distributions.Wishart(torch.tensor(p + 5.0), torch.eye(p))
                covariance = (wishart.sample((1,))[0] / (p + 5)).double()
            X = torch.distributions.MultivariateNormal(torch.zeros(p).double(), covariance).sample((n,))
        torch.rand(p, dtype=torch.double)  # drawn and not used, as in the published code
        b = [-1.8 * torch.rand(1) - 0.2 if torch.rand(1) < 0.5 else 1.8 * torch.rand(1) + 0.2 for _ in range(p)]
        y = torch.bernoulli(torch.sigmoid(X @ torch.cat(b).double()))
    return X.numpy(), y.numpy()


def data(n, p, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.standard_normal((n, p)) @ (np.eye(p) + 0.3 * generator.standard_normal((p, p)))
    y = generator.random(n) < 1.0 / (1.0 + np.exp(-X @ generator.normal(0.0, 1.0, p)))
    y[:2] = [False, True]
    return X, y.astype(float)


@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize(("n", "p"), [(500, 5), (1000, 25)])
@pytest.mark.parametrize("setting", [1, 2, 3])
def test_distance_from_the_exact_optimum(setting, n, p, family):
    X, y = paper_data(setting, n, p, 1)
    model = VariationalLogisticRegression(covariance=family, fit_intercept=False).fit(X, y)
    mean, covariance = optimum(X, y, 1.0, diagonal=family == "diagonal")
    assert kl(mean, covariance, model.coef_[0], model.covariance_) < 1e-8


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_the_optimum_with_weights_offsets_and_intercept(family):
    X, y = data(300, 4, 5)
    generator = np.random.default_rng(6)
    weight, offset = generator.integers(0, 4, 300).astype(float), generator.normal(0.0, 2.0, 300)
    scale = np.array([0.3, 1.0, 3.0, 10.0])
    model = VariationalLogisticRegression(covariance=family, prior_scale=scale, intercept_scale=5.0)
    model.fit(X, y, sample_weight=weight, offset=offset)
    A = np.column_stack([X, np.ones(300)])
    every = np.append(scale, 5.0)
    mean, covariance = optimum(A, y, every, diagonal=family == "diagonal", weight=weight, offset=offset)
    assert kl(mean, covariance, model.posterior_.mean.numpy(), model.covariance_) < 1e-8


# --- the steps ---


def random_problem(seed):
    """Options and rows that may be tiny, correlated, badly scaled, separable, weighted, or have offsets."""
    generator = np.random.default_rng(seed)
    p = int(generator.integers(1, 9))
    n = int(generator.choice([2, 3, 10, 50, 300, 1500]))
    X = generator.standard_normal((n, p))
    if seed % 3 == 0:
        X = X @ generator.standard_normal((p, p)) * 10.0 ** generator.uniform(-3.0, 3.0, p)
    if seed % 7 == 0:
        X[:, -1] = X[:, 0]
    f = X @ generator.standard_normal(p)
    separable = seed % 5 == 0
    y = f > np.median(f) if separable else generator.random(n) < 1.0 / (1.0 + np.exp(-f / (1.0 + np.std(f))))
    y[:2] = [False, True]
    rows = {
        "sample_weight": generator.exponential(2.0, n) if seed % 2 else None,
        "offset": generator.normal(0.0, 3.0, n) if seed % 4 == 1 else None,
    }
    options = {"covariance": ["full", "diagonal"][seed % 2], "prior_scale": 10.0 ** generator.uniform(-1.0, 1.5)}
    return options, X, y, rows


@pytest.mark.parametrize("decade", range(10))
def test_the_objective_never_decreases(decade):
    for seed in range(20 * decade, 20 * decade + 20):
        options, X, y, rows = random_problem(seed)
        model = VariationalLogisticRegression(**options).fit(X, y, **rows)
        assert model.converged_, seed
        assert np.isfinite(model.elbo_)
        for before, after in pairwise(model.history_):
            if before[:2] == after[:2]:
                # F may fall by the rounding of the sums, or in a rough stage by twice the error of its formula
                allowed = 1e-13 * (len(y) + abs(before.objective)) + (1e-6 * len(y) if after.rough else 0.0)
                assert after.objective >= before.objective - allowed, seed


def independent_gradient(problem, mean, factor, **bound):
    """∂F/∂μ and ∂F/∂L (or ∂F/∂ log σ) by autograd through the public kernel and torch's own KL."""
    block = next(iter(problem.source.blocks()))
    A = block.design.matrix
    diagonal = factor.ndim == 1
    mean = mean.clone().requires_grad_()
    spread = (0.5 * factor.log() if diagonal else torch.linalg.cholesky(factor @ factor.T)).clone().requires_grad_()
    root = torch.diag(spread.exp()) if diagonal else torch.tril(spread)
    theta, tau2 = A @ mean, (A @ root).square().sum(1)
    likelihood = (block.label * theta - viper.expected_softplus(theta, tau2, **bound).value).sum()
    normal = torch.distributions.MultivariateNormal
    prior = normal(problem.prior.mean, precision_matrix=torch.diag(problem.prior.precision))
    divergence = torch.distributions.kl_divergence(normal(mean, scale_tril=root), prior)
    (likelihood - divergence).backward()
    return mean.grad, spread.grad


def make_problem(X, y, bound, diagonal, **options):
    source = Arrays(torch.from_numpy(X), torch.from_numpy(y))
    ones = torch.ones(X.shape[1], dtype=torch.float64)
    return Problem(source, Prior(torch.zeros_like(ones), ones), bound, diagonal=diagonal, **options)


BOUNDS = {
    "viper": {},
    "viper, 12 terms": {"terms": 12},
    "pg": {"bound": "pg"},
    "mc": {"bound": "mc"},
    "quadrature": {"bound": "quadrature", "nodes": 32},
}


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("bound", BOUNDS)
def test_every_bound_ends_where_its_own_gradient_vanishes(bound, diagonal):
    options = {"covariance": "diagonal" if diagonal else "full", "fit_intercept": False, "random_state": 0}
    for n in (30, 400):
        X, y = data(n, 5, 8)
        model = VariationalLogisticRegression(**options, **BOUNDS[bound]).fit(X, y)
        problem = make_problem(X, y, limit(), diagonal)
        same_bound = BOUNDS[bound] | ({"random_state": checks.seed_of(0)} if bound == "mc" else {})
        factor = model.posterior_.variance if diagonal else model.posterior_.factor
        one = torch.ones(5, dtype=torch.float64)
        at_start = independent_gradient(problem, 0.0 * one, one if diagonal else torch.diag(one), **same_bound)
        at_end = independent_gradient(problem, model.posterior_.mean, factor, **same_bound)
        for before, after in zip(at_start, at_end, strict=True):
            assert after.norm() < 1e-6 * before.norm()


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_bounds_lie_below_the_exact_elbo(family):
    X, y = data(400, 5, 9)
    fits = {
        name: VariationalLogisticRegression(covariance=family, random_state=0, bound=bound, terms=terms).fit(X, y)
        for name, bound, terms in [("exact", "viper", None), ("l", "viper", 12), ("pg", "pg", None), ("mc", "mc", None)]
    }
    best = fits["exact"].elbo_
    assert abs(fits["exact"].objective_ - best) < 1e-8
    for name in ("l", "pg"):
        assert fits[name].objective_ < fits[name].elbo_ < best
    assert fits["mc"].elbo_ < best
    for model in fits.values():
        assert model.elbo_bound_ < model.elbo_ < model.elbo_bound_ + 1e-8


@pytest.mark.parametrize("diagonal", [False, True])
def test_polya_gamma_is_coordinate_ascent(diagonal):
    X, y = data(300, 4, 10)
    model = VariationalLogisticRegression(
        bound="pg", covariance="diagonal" if diagonal else "full", fit_intercept=False, prior_scale=2.0
    ).fit(X, y)
    mean, covariance = np.zeros(4), np.eye(4)
    for _ in range(500):
        # ω_i = E[PG(1, t_i)] = tanh(t_i/2)/(2 t_i), then q(β) in closed form
        t = np.sqrt((X @ mean) ** 2 + np.einsum("ij,jk,ik->i", X, covariance, X))
        precision = np.eye(4) / 4.0 + (X * (np.tanh(t / 2) / (2 * t))[:, None]).T @ X
        mean = np.linalg.solve(precision, X.T @ (y - 0.5))
        covariance = np.diag(1.0 / np.diag(precision)) if diagonal else np.linalg.inv(precision)
    assert kl(mean, covariance, model.coef_[0], model.covariance_) < 1e-8


def test_too_few_iterations_warn_with_advice():
    X, y = data(100, 3)
    with pytest.warns(ConvergenceWarning, match=r"not converged in 1 iterations\. Raise max_iter\."):
        model = VariationalLogisticRegression(max_iter=1).fit(X, y)
    assert not model.converged_
    assert model.status_ == "not converged in 1 iterations"
    assert np.isfinite(model.elbo_)


# --- Adam, the paper's recipe ---


@pytest.mark.parametrize("diagonal", [False, True])
def test_adam_agrees_with_newton(diagonal):
    X, y = data(200, 3, 11)
    problem = make_problem(X, y, limit(), diagonal)
    exact = newton(problem)
    result = adam.adam(problem, tol=1e-9)
    assert result.converged
    # it ends at a relative change below 1e-9, with steps that each shrink the distance by about 1 %
    assert 0.0 <= exact.objective - result.objective < 1e-5
    assert result.objective == max(step.objective for step in result.history)


def test_adam_starts_as_the_paper_says():
    X, y = data(50, 3, 12)
    problem = make_problem(X, y, limit(), False)
    result = adam.adam(problem, max_iter=1, generator=np.random.default_rng(5))
    mean = torch.from_numpy(np.random.default_rng(5).standard_normal(3))
    variance = torch.full((3,), 0.35, dtype=torch.float64)
    expected = problem.evaluate(Gaussian(mean, 1.0 / variance), variance)[0]
    assert result.history[0].objective == pytest.approx(expected, rel=TOLERANCE["special"])
    assert not result.converged


def test_minibatches_add_up_to_the_whole():
    X, y = data(103, 3, 13)
    problem = make_problem(X, y, limit(), False)
    q, factor = adam.as_gaussian(torch.ones(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64))
    whole = problem.evaluate(q, factor)[1]
    batches = adam.batches(problem, 10, np.random.default_rng(0))
    assert [batch.source.rows for batch in batches] == [10] * 10 + [3]
    for part in ("value", "gradient", "gram"):
        # each batch stands for all rows: their average, by rows, is the whole
        average = sum(getattr(b.evaluate(q, factor)[1], part) * b.source.rows / 103 for b in batches)
        torch.testing.assert_close(torch.as_tensor(average), torch.as_tensor(getattr(whole, part)), rtol=1e-12, atol=0)
    # and the prior counts once in each, as in the whole
    b = batches[0]
    assert b.evaluate(q, factor)[0] == pytest.approx(
        b.evaluate(q, factor)[1].value - (whole.value - problem.evaluate(q, factor)[0]), rel=TOLERANCE["special"]
    )


def test_adam_with_minibatches_comes_close():
    X, y = data(400, 3, 14)
    problem = make_problem(X, y, limit(), True)
    exact = newton(problem)
    result = adam.adam(problem, batch_size=50, max_iter=150, learning_rate=0.02)
    # minibatch noise of a constant learning rate; counting the prior eight times would cost 0.5
    assert 0.0 <= exact.objective - result.objective < 0.1


# --- what must not change the answer ---


@pytest.mark.parametrize(
    ("rows", "columns", "options"),
    [
        (60_000, 5, {}),  # on random subsets first
        (60_000, 5, {"bound": "mc", "samples": 20}),
        (2_000, 5, {"solver": "adam", "batch_size": 500, "max_iter": 5}),
        (3_000, 25, {"terms": 6}),  # mixed steps
        (40, 60, {"prior_scale": 200.0}),  # many of them, in the span of the rows
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The solver stopped early")
def test_a_fit_repeats_to_the_last_bit(rows, columns, options):
    """Without a seed, and wherever in memory the arrays are."""
    X, y = data(rows, columns, 3)
    first, *others = (VariationalLogisticRegression(**options).fit(X.copy(), y) for _ in range(3))
    for other in others:
        np.testing.assert_array_equal(other.coef_, first.coef_)
        np.testing.assert_array_equal(other.covariance_, first.covariance_)
        assert (other.elbo_, other.passes_) == (first.elbo_, first.passes_)


def assert_same_posterior(one, other, within=1e-6):
    """Means and sds agree within a fraction of the sds."""
    sd = np.sqrt(np.diag(one.covariance_))
    assert np.abs(one.posterior_.mean.numpy() - other.posterior_.mean.numpy()).max() < within * sd.min()
    assert np.abs(np.sqrt(np.diag(other.covariance_)) / sd - 1.0).max() < within


TIGHT = 1e-13  # nats, for two fits that should agree to 1e-6 of a standard deviation


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_coarse_to_fine_sees_sorted_rows_as_any_others(family, monkeypatch):
    X, y = data(60_000, 3, 15)
    order = np.argsort(y, kind="stable")
    fits = [
        VariationalLogisticRegression(covariance=family, random_state=seed, tol=TIGHT).fit(X[rows], y[rows])
        for seed, rows in [(0, order), (1, np.arange(60_000))]
    ]
    assert fits[0].passes_ % 1 > 0  # not whole: the mode was searched for on subsets
    monkeypatch.setattr("viper.inference.start.coarse_sizes", lambda problem: [])
    single = VariationalLogisticRegression(covariance=family, tol=TIGHT).fit(X, y)
    assert single.passes_ % 1 == 0
    for model in fits:
        assert_same_posterior(single, model)


@pytest.mark.parametrize("diagonal", [False, True])
def test_neither_blocks_nor_order_of_rows_matter(diagonal):
    X, y = data(1000, 4, 16)
    problem = make_problem(X, y, limit(), diagonal)
    reference = newton(problem, tol=TIGHT)
    order = np.random.default_rng(0).permutation(1000)
    sources = [replace(problem.source, block_rows=7), problem.source.take(torch.from_numpy(order))]
    for source in sources:
        result = newton(replace(problem, source=source), tol=TIGHT)
        assert result.objective == pytest.approx(reference.objective, rel=1e-12)
        torch.testing.assert_close(result.q.mean, reference.q.mean, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(result.q.precision, reference.q.precision, rtol=1e-6, atol=1e-6)


def test_sums_are_the_same_in_blocks():
    X, y = data(1000, 4, 17)
    source = Arrays(torch.from_numpy(X), torch.from_numpy(y), intercept=True)
    mean, factor = torch.ones(5, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
    one = sums(source, mean, factor, limit())
    many = sums(replace(source, block_rows=13), mean, factor, limit())
    assert many.value == pytest.approx(one.value, rel=1e-12)
    torch.testing.assert_close(many.gradient, one.gradient, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(many.gram, one.gram, rtol=1e-11, atol=1e-11)


def test_a_vector_of_precisions_is_a_diagonal_matrix():
    X, y = data(200, 4, 18)
    source, mean = Arrays(torch.from_numpy(X), torch.from_numpy(y)), torch.linspace(-1.0, 1.0, 4, dtype=torch.float64)
    vector = Prior(mean.square(), mean + 2.0)
    matrix = Prior(vector.mean, torch.diag(vector.precision))
    q = Gaussian(mean, torch.eye(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))
    problems = [Problem(source, prior, limit()) for prior in (vector, matrix)]
    one, other = [full_step(problem, q, problem.total(q.mean, q.factor), 1.0) for problem in problems]
    for name in ("mean", "precision", "cholesky"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-13, atol=1e-13)
    assert kl_to_prior(one, one.factor, vector) == pytest.approx(kl_to_prior(one, one.factor, matrix), rel=1e-13)


def test_an_array_forgets_the_names_of_a_table():
    X, y = data(50, 2, 19)
    model = VariationalLogisticRegression().fit(pandas.DataFrame(X, columns=["a", "b"]), y)
    with pytest.warns(UserWarning, match="valid feature names"):
        named = model.predict_proba(X)
    np.testing.assert_array_equal(model.fit(X, y).predict_proba(X), named)
    assert not hasattr(model, "feature_names_in_")
    with pytest.raises(ValueError, match="3 features"):
        model.predict(np.ones((1, 3)))


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_weights_count_rows(family):
    X, y = data(150, 3, 18)
    weight = np.random.default_rng(1).integers(0, 4, 150)
    weight[:2] = 1
    model = VariationalLogisticRegression(covariance=family, tol=TIGHT)
    weighted = model.fit(X, y, sample_weight=weight)
    repeated = VariationalLogisticRegression(covariance=family, tol=TIGHT).fit(
        np.repeat(X, weight, 0), np.repeat(y, weight)
    )
    assert_same_posterior(weighted, repeated)
    assert weighted.elbo_ == pytest.approx(repeated.elbo_, rel=1e-10)


def test_binomial_counts_are_two_weighted_rows():
    x = np.linspace(-2.0, 2.0, 9)[:, None]
    trials = np.arange(3, 12)
    successes = np.array([0, 1, 1, 3, 3, 5, 6, 9, 11])
    X, y = np.vstack([x, x]), np.repeat([1, 0], 9)
    counted = VariationalLogisticRegression(tol=TIGHT).fit(X, y, sample_weight=np.r_[successes, trials - successes])
    each = [(x[i], k < successes[i]) for i in range(9) for k in range(trials[i])]
    single = VariationalLogisticRegression(tol=TIGHT).fit(np.array([row for row, _ in each]), [hit for _, hit in each])
    assert_same_posterior(single, counted)


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_an_offset_is_a_coefficient_that_is_known(family):
    X, y = data(200, 3, 19)
    scale, mean = np.array([1.0, 1.0, 1e-30]), np.array([0.0, 0.0, 0.7])
    known = VariationalLogisticRegression(covariance=family, prior_mean=mean, prior_scale=scale, tol=TIGHT).fit(X, y)
    shifted = VariationalLogisticRegression(covariance=family, tol=TIGHT).fit(X[:, :2], y, offset=0.7 * X[:, 2])
    keep = [0, 1, 3]
    sd = np.sqrt(np.diag(shifted.covariance_))
    assert (known.posterior_.mean[keep] - shifted.posterior_.mean).abs().max() < 1e-6 * sd.min()
    np.testing.assert_allclose(known.covariance_[np.ix_(keep, keep)], shifted.covariance_, rtol=1e-6, atol=1e-9)
    assert known.elbo_ == pytest.approx(shifted.elbo_, rel=1e-10)


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_sparse_rows_are_dense_rows(family):
    X, y = data(200, 6, 20)
    X[np.abs(X) < 1.0] = 0.0
    dense = VariationalLogisticRegression(covariance=family, tol=TIGHT).fit(X, y)
    for make in (scipy.sparse.csr_matrix, scipy.sparse.csc_matrix, scipy.sparse.csr_array):
        assert_same_posterior(dense, VariationalLogisticRegression(covariance=family, tol=TIGHT).fit(make(X), y))


@pytest.mark.parametrize("sparse", [False, True])
def test_more_coefficients_than_rows(sparse):
    X, y = data(30, 33, 22)
    scale, mean = np.linspace(0.5, 2.0, 33), np.linspace(-1.0, 1.0, 33)
    offset, weight = np.linspace(-1.0, 1.0, 30), np.linspace(0.5, 2.0, 30)
    model = VariationalLogisticRegression(prior_scale=scale, prior_mean=mean, tol=TIGHT)
    wide = model.fit(scipy.sparse.csr_array(X) if sparse else X, y, sample_weight=weight, offset=offset)
    assert type(wide.posterior_).__name__ == "LowRank"
    problem, result = run_solver(model._training_rows, model.prior_, model._options(), 0)
    full = Full(result.q.mean, result.factor)
    sd = full.variance.sqrt()
    assert ((wide.posterior_.mean - full.mean).abs() / sd).max() < 1e-6
    np.testing.assert_allclose(wide.posterior_.covariance(), full.covariance(), rtol=0, atol=1e-6)
    torch.testing.assert_close(wide.posterior_.variance, full.variance, rtol=1e-7, atol=0)
    assert wide.elbo_ == pytest.approx(result.objective, rel=1e-9)
    assert wide.kl_ == pytest.approx(kl_to_prior(result.q, result.factor, problem.prior), rel=1e-6)
    # the same draws' log density, up to the choice of factor: its mean is minus the entropy
    assert float(wide.posterior_.log_scale) == pytest.approx(float(full.log_scale), rel=1e-6)
    block = next(iter(model._training_rows.blocks()))
    torch.testing.assert_close(wide.posterior_.spread(block.design), full.spread(block.design), rtol=1e-6, atol=1e-9)


def dense_optimum(A, y, scale):
    """Mean and covariance under N(0, diag scale²), by natural-gradient steps on columns of length one."""
    size = np.linalg.norm(A, axis=0)
    A, precision, d = A / size, (size * scale) ** -2.0, A.shape[1]
    mean, covariance = np.zeros(d), np.linalg.inv(np.diag(precision) + 0.25 * A.T @ A)
    for _ in range(400):
        _, g, h = moments_by_quadrature(A @ mean, np.einsum("ij,jk,ik->i", A, covariance, A))
        covariance = np.linalg.inv(np.diag(precision) + (A.T * h) @ A)
        step = covariance @ (A.T @ (y - g) - precision * mean)
        mean = mean + 0.5 * step
    assert np.abs(step).max() < 1e-11 * np.abs(mean).max()
    return mean / size, covariance / np.outer(size, size)


LARGE_COLUMNS = {
    "1e7": lambda x: 1e7 * x,
    "1.7e9": lambda x: 1.7e9 * x,
    "a year of Unix seconds": lambda x: 1.7e9 + 1e7 * x,
    "1e100": lambda x: 1e100 * x,
}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("column", LARGE_COLUMNS)
def test_more_coefficients_than_rows_and_one_large_column(column, sparse):
    for seed in range(5):
        X, y = data(24, 40, 100 + seed)
        X, new = 0.1 * X, 0.1 * data(10, 40, 200 + seed)[0]  # log-odds for which the quadrature is exact
        X[:, 3], new[:, 3] = LARGE_COLUMNS[column](X[:, 3]), LARGE_COLUMNS[column](new[:, 3])
        model = VariationalLogisticRegression(intercept_scale=1.0, tol=TIGHT)
        model.fit(scipy.sparse.csr_array(X) if sparse else X, y)
        assert type(model.posterior_).__name__ == "LowRank"
        assert model.converged_
        A, B = (np.column_stack([Z, np.ones(len(Z))]) for Z in (X, new))
        mean, covariance = dense_optimum(A, y, 1.0)
        sd = np.sqrt(np.diag(covariance))
        assert (np.abs(model.posterior_.mean.numpy() - mean) < 1e-6 * sd).all()
        np.testing.assert_allclose(model.posterior_.variance.sqrt(), sd, rtol=1e-6)
        np.testing.assert_allclose(model.covariance_ / np.outer(sd, sd), covariance / np.outer(sd, sd), atol=1e-6)
        precision = model.posterior_.as_prior().without_loadings().precision.numpy()
        np.testing.assert_allclose((precision @ covariance) / sd * sd[:, None], np.eye(41), atol=1e-5)
        for rows, design in ((X, A), (new, B)):
            theta, tau = model.predict_latent(rows)
            np.testing.assert_allclose(theta, design @ mean, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(tau, np.sqrt(np.einsum("ij,jk,ik->i", design, covariance, design)), rtol=1e-6)


@pytest.mark.parametrize("factor", [1e-140, 1e-100, 1e-7, 1e7, 1e100, 1e140])
def test_more_coefficients_than_rows_scaled_with_their_prior(factor):
    X, y = data(20, 30, 25)
    rows, other = X.copy(), X.copy()
    other[:, 3] *= factor
    ones, s = torch.ones(30, dtype=torch.float64), torch.ones(30, dtype=torch.float64)
    s[3] = factor
    options = VariationalLogisticRegression(fit_intercept=False, tol=TIGHT)._options()
    label = torch.from_numpy(y.astype(float))
    first, second = (
        fit_posterior(Arrays(Z, label), Prior(0.0 * ones, precision), options, 0).posterior
        for Z, precision in ((rows, ones), (other, s.square()))
    )
    torch.testing.assert_close(second.mean * s, first.mean, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(second.variance.sqrt() * s, first.variance.sqrt(), rtol=1e-9, atol=0)
    new = data(10, 30, 26)[0]
    for Z in (X, new):
        spreads = [q.spread(Dense(torch.from_numpy(Z * c.numpy()))) for q, c in ((first, ones), (second, s))]
        torch.testing.assert_close(spreads[1], spreads[0], rtol=1e-9, atol=1e-12)


def test_more_coefficients_than_rows_under_a_wide_prior():
    X, y = data(24, 40, 27)
    model = VariationalLogisticRegression(prior_scale=1e4, fit_intercept=False).fit(X, y)
    F = model.posterior_
    inside = ((X * F.prior_sd.numpy()) @ F.basis.numpy()) @ F.inner_factor.numpy()
    np.testing.assert_allclose(model.predict_latent(X)[1], np.linalg.norm(inside, axis=1), rtol=1e-9)


def test_float32_moves_the_posterior_by_little():
    X, y = data(2000, 5, 23)
    double = VariationalLogisticRegression().fit(X, y)
    single = VariationalLogisticRegression(dtype="float32").fit(X.astype(np.float32), y)
    assert single.converged_
    assert_same_posterior(double, single, within=1e-3)  # as the docstring says, about 1e-4 of the widths


# --- hard problems end, and end well ---


def separable(n=60):
    X = np.random.default_rng(0).standard_normal((n, 3))
    return X, X[:, 0] > 0.0


@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize("bound", [{}, {"terms": 12}, {"bound": "pg"}])
def test_separable_under_a_wide_prior(bound, family):
    X, y = separable()
    with warnings.catch_warnings():
        if "bound" in bound:  # these steps do not grow with the prior and may not suffice, but must not go wrong
            warnings.simplefilter("ignore", ConvergenceWarning)
        model = VariationalLogisticRegression(prior_scale=1e3, covariance=family, **bound).fit(X, y)
    assert np.isfinite(model.elbo_)
    assert np.isfinite(model.covariance_).all()
    assert (np.diag(model.covariance_) > 0).all()
    assert (model.predict(X) == y).all()


@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize(("n", "scale"), [(6, 1e2), (6, 1e4), (12, 1e5), (60, 1e3)])
def test_separable_under_a_wide_prior_reaches_the_optimum(n, scale, family):
    X, y = separable(n)
    options = {"prior_scale": scale, "intercept_scale": scale, "covariance": family}
    model = VariationalLogisticRegression(**options, tol=1e-11).fit(X, y)
    assert model.converged_
    # quadrature cannot see widths of a thousand; the exact kernel's own gradient can
    problem = make_problem(np.column_stack([X, np.ones(n)]), y.astype(float), limit(), family == "diagonal")
    problem = replace(problem, prior=Prior(torch.zeros(4).double(), torch.full((4,), scale**-2).double()))
    covariance = torch.from_numpy(model.covariance_)
    root = torch.linalg.cholesky(covariance)
    slope, bend = independent_gradient(
        problem, model.posterior_.mean, covariance.diagonal() if family == "diagonal" else root
    )
    # as a q of width one would see it; half the square are the nats that are left
    assert (root.T @ slope).norm() < 1e-3
    assert (bend if family == "diagonal" else torch.tril(root.T @ bend)).norm() < 1e-3


@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_narrow_priors_lead_to_a_wide_one(family):
    """Also if it is correlated or its mean is not zero; not used for a narrow prior."""
    X, y = separable()
    A = torch.from_numpy(np.column_stack([X, np.ones(60)]))
    root = torch.tril(torch.ones(4, 4).double()) * 1e3
    wide = Prior(torch.full((4,), 50.0).double(), torch.cholesky_inverse(root))
    problem = make_problem(A.numpy(), y.astype(float), limit(), family == "diagonal")
    q, passes = from_tighter_priors(replace(problem, prior=wide), nearly_solved)
    result = newton(replace(problem, prior=wide))
    assert result.converged
    assert divergence(q, result.q) < 10.0  # the mode is hundreds of widths away
    assert passes < 50
    narrow = Prior(wide.mean, torch.full((4,), 0.1).double())
    assert from_tighter_priors(replace(problem, prior=narrow), nearly_solved)[0] is None


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize("terms", [None, 12])
def test_zero_rows_change_nothing_but_the_intercept(terms, family, intercept):
    X, y = data(80, 3, 24)
    padded, labels = np.vstack([X, np.zeros((10, 3))]), np.r_[y, np.arange(10) % 2]
    options = {"terms": terms, "covariance": family, "fit_intercept": intercept, "tol": TIGHT}
    model = VariationalLogisticRegression(**options).fit(padded, labels)
    assert model.converged_
    assert np.isfinite(model.elbo_)
    if not intercept:
        plain = VariationalLogisticRegression(**options).fit(X, y)
        assert_same_posterior(plain, model)
        assert model.elbo_ == pytest.approx(plain.elbo_ - 10 * np.log(2.0), rel=1e-10)


@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize("terms", [None, 12])
def test_only_zero_rows_leave_the_prior(terms, family):
    options = {"terms": terms, "covariance": family, "fit_intercept": False, "prior_scale": 2.0}
    model = VariationalLogisticRegression(**options).fit(np.zeros((6, 2)), [0, 1, 0, 1, 0, 1])
    assert model.converged_
    np.testing.assert_allclose(model.covariance_, 4.0 * np.eye(2), rtol=1e-12)
    assert model.elbo_ == pytest.approx(-6 * np.log(2.0))


@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize("size", [1e6, 1e12])
def test_huge_offsets(size, family):
    """If s is 0 or 1 whatever β, the likelihood is linear in β: q is the prior, shifted along Xᵀ(y - s)."""
    X, y = data(60, 3, 25)
    offset = size * np.where(np.arange(60) % 2, 1.0, -1.0)
    model = VariationalLogisticRegression(covariance=family, prior_scale=0.5, intercept_scale=0.5)
    model.fit(X, y, offset=offset)
    assert model.converged_
    A = np.column_stack([X, np.ones(60)])
    np.testing.assert_allclose(model.posterior_.mean, 0.25 * A.T @ (y - (offset > 0)), rtol=1e-9)
    np.testing.assert_allclose(model.covariance_, 0.25 * np.eye(4), rtol=1e-9, atol=1e-12)
    right = VariationalLogisticRegression(covariance=family).fit(X, y, offset=size * (2.0 * y - 1.0))
    np.testing.assert_allclose(right.posterior_.mean, 0.0, atol=1e-12)
    assert right.elbo_ == pytest.approx(0.0, abs=1e-6 * size / 1e6)


def test_two_rows():
    model = VariationalLogisticRegression().fit([[0.0], [1.0]], [0, 1])
    mean, covariance = optimum(
        np.array([[0.0, 1.0], [1.0, 1.0]]), np.array([0.0, 1.0]), np.array([1.0, 10.0]), diagonal=False
    )
    assert kl(mean, covariance, model.posterior_.mean.numpy(), model.covariance_) < 1e-8


def test_duplicated_columns_share_what_one_would_have():
    """X β₁ + X β₂ with priors of scale σ is X β with a prior of scale √2 σ; β₁ - β₂ keeps its prior."""
    X, y = data(200, 2, 26)
    double = VariationalLogisticRegression(tol=TIGHT).fit(np.hstack([X, X]), y)
    single = VariationalLogisticRegression(prior_scale=np.sqrt(2.0), tol=TIGHT).fit(X, y)
    total = np.zeros((3, 5))
    total[[0, 0, 1, 1, 2], [0, 2, 1, 3, 4]] = 1.0
    np.testing.assert_allclose(total @ double.posterior_.mean.numpy(), single.posterior_.mean, rtol=1e-6)
    np.testing.assert_allclose(total @ double.covariance_ @ total.T, single.covariance_, rtol=1e-6, atol=1e-9)
    gap = np.array([1.0, 0.0, -1.0, 0.0, 0.0])
    assert gap @ double.covariance_ @ gap == pytest.approx(2.0, rel=1e-6)
    assert double.elbo_ == pytest.approx(single.elbo_, rel=1e-9)


def test_a_constant_column_takes_its_share_of_the_intercept():
    X, y = data(200, 2, 27)
    model = VariationalLogisticRegression(intercept_scale=1.0, tol=TIGHT).fit(np.column_stack([X, np.ones(200)]), y)
    plain = VariationalLogisticRegression(intercept_scale=np.sqrt(2.0), tol=TIGHT).fit(X, y)
    assert model.coef_[0, 2] + model.intercept_[0] == pytest.approx(plain.intercept_[0], rel=1e-6)
    assert model.coef_[0, 2] == pytest.approx(model.intercept_[0], rel=1e-6)
    np.testing.assert_allclose(model.coef_[0, :2], plain.coef_[0], rtol=1e-6)


@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize("factor", [1e-8, 1e8])
def test_scaling_a_feature_scales_its_coefficient(factor, family):
    X, y = data(200, 3, 28)
    plain = VariationalLogisticRegression(covariance=family, tol=TIGHT).fit(X, y)
    scaled = VariationalLogisticRegression(covariance=family, prior_scale=[1.0 / factor, 1.0, 1.0], tol=TIGHT)
    scaled.fit(X * [factor, 1.0, 1.0], y)
    assert scaled.converged_
    np.testing.assert_allclose(scaled.coef_[0] * [factor, 1.0, 1.0], plain.coef_[0], rtol=1e-6)
    assert scaled.elbo_ == pytest.approx(plain.elbo_, rel=1e-10)
    np.testing.assert_allclose(scaled.predict_proba(X * [factor, 1.0, 1.0]), plain.predict_proba(X), rtol=1e-6)


# --- size ---


def peak_megabytes(program):
    """Peak memory of a program, above that of its imports; both are printed by it."""
    text = (
        "import warnings\n"
        "import numpy as np, scipy.sparse, torch, viper, viper.models.logistic, sklearn.utils.validation\n"
        "warnings.simplefilter('error')\n"
        "torch.set_num_threads(1)\n"
        "generator = np.random.default_rng(0)\n" + PEAK + program
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return [int(word) / 1e6 for word in done.stdout.split()]


def test_many_more_coefficients_than_rows_fit_in_memory():
    """A 20,000 × 20,000 covariance alone would take 3,200 MB; the limit is a dozen times X (32 MB)."""
    whole, own = peak_megabytes("""
X = generator.standard_normal((200, 20_000))
y = X[:, :5].sum(1) > 0
start = peak()
model = viper.VariationalLogisticRegression().fit(X, y)
model.predict_interval(X), model.summary(), model.sample(10)
assert model.converged_
print(peak(), peak() - start)
""")
    assert whole < 2000
    assert own < 12 * 32


def test_sparse_rows_are_never_made_dense():
    """As a dense matrix X would take 800 MB."""
    (own,) = peak_megabytes("""
X = scipy.sparse.random(2000, 50_000, density=1e-3, format="csr", rng=generator, data_rvs=generator.standard_normal)
y = np.asarray(X[:, :2000].sum(1)).ravel() > 0
start = peak()
model = viper.VariationalLogisticRegression(covariance="diagonal").fit(X, y)
model.predict_proba(X), model.summary()
assert model.converged_
print(peak() - start)
""")
    assert own < 150


@pytest.mark.parametrize("diagonal", [False, True])
def test_the_beginning_is_the_mode(diagonal):
    X, y = data(400, 6, 31)
    problem = make_problem(X, y, limit(), diagonal)
    mode = find_mode(problem, None, 1e-24)
    other = LogisticRegression(C=1.0, fit_intercept=False, solver="newton-cholesky", tol=1e-12).fit(X, y)
    np.testing.assert_allclose(mode.q.mean, other.coef_[0], rtol=1e-8)
    s = 1.0 / (1.0 + np.exp(-X @ other.coef_[0]))
    precision = np.eye(6) + X.T @ (X * (s * (1.0 - s))[:, None])
    np.testing.assert_allclose(mode.q.precision, np.diag(precision) if diagonal else precision, rtol=1e-7)


def test_adam_survives_steps_that_turn_the_factor_over():
    """A step of 0.05 is longer than the posterior is wide: entries of L's diagonal cross zero on the way."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((20_000, 20))
    y = rng.random(20_000) < 1 / (1 + np.exp(-X[:, 0]))
    model = VariationalLogisticRegression(solver="adam", max_iter=20, batch_size=5_000, random_state=0)
    with pytest.warns(ConvergenceWarning):
        model.fit(X, y)
    assert np.isfinite(model.elbo_)
