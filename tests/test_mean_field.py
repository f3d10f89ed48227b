"""Newton's method for the mean field: its derivatives, its products, and how many products it needs."""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse
import torch
from test_compiled import built
from test_products import choose, fit
from test_solver import data, make_problem
from tolerances import TOLERANCE

import viper
from viper.inference.kernels import compiled
from viper.inference.newton import newton
from viper.inference.problem import Gaussian, Prior, kl_to_prior
from viper.inference.rows import Arrays, Dense, Sparse, light_designs
from viper.inference.sums import product_with_hessian
from viper.inference.wide import mean_field
from viper.inference.wide.mean_field import climb_mean_field, point_at, steering_designs, times_hessian, widest
from viper.models.fitting import ROUGH_BOUND, ROUGH_TOLERANCE
from viper.softplus.limit import limit, mixture, smallest_mixture
from viper.softplus.pointwise import KernelRecipe


def problem_of(n, p, seed, bound=None, **options):
    X, y = data(n, p, seed)
    return make_problem(X, y.astype(float), bound or limit(), True, iterative=True, **options)


def random_q(p, seed):
    mean, size = torch.from_numpy(np.random.default_rng(seed).standard_normal((2, p)))
    return Gaussian(mean, 5.0 * size.exp())


# --- the derivatives ---


def objective(problem, at, coordinates):
    """F at coordinates around a point, by the public function, which autograd can differentiate."""
    block = next(iter(problem.source.blocks()))
    A, prior = block.design.matrix, problem.prior
    mean = at.q.mean + at.units[0] * coordinates[0]
    variance = at.q.factor * (1.0 + 0.5 * at.q.precision * at.units[1] * coordinates[1]) ** 2
    theta, tau2 = A @ mean, A.square() @ variance
    likelihood = (block.label * theta - viper.expected_softplus(theta, tau2).value).sum()
    return likelihood - kl_by_terms(mean, variance, prior)


def kl_by_terms(mean, variance, prior):
    p = prior.precision
    return 0.5 * (p * (variance + (mean - prior.mean) ** 2) - 1.0 - (p * variance).log()).sum()


def test_gradient_and_hessian_are_those_of_the_objective():
    problem = problem_of(40, 6, 1)
    at = point_at(problem, random_q(6, 2))
    origin = torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
    value = objective(problem, at, origin)
    assert at.value == pytest.approx(float(value.detach()), rel=TOLERANCE["special"])
    (slope,) = torch.autograd.grad(value, origin, create_graph=True)
    torch.testing.assert_close(at.gradient, slope.detach(), rtol=TOLERANCE["autograd"], atol=1e-12)
    for direction in torch.from_numpy(np.random.default_rng(3).standard_normal((3, 2, 6))):
        (bend,) = torch.autograd.grad((slope * direction).sum(), origin, retain_graph=True)
        product = times_hessian(problem, at, direction, None)
        torch.testing.assert_close(product, -bend, rtol=1e-9, atol=1e-10)  # partials by quadrature, with fewer digits


def test_the_hessian_of_a_prior_covariance():
    """A diagonal matrix as the prior covariance is the same as its diagonal."""
    problem = problem_of(30, 5, 4)
    one = torch.linspace(0.5, 2.0, 5, dtype=torch.float64)
    direction = torch.from_numpy(np.random.default_rng(5).standard_normal((2, 5)))
    found = []
    for precision in (one, torch.diag(one)):
        changed = replace(problem, prior=Prior(problem.prior.mean, precision))
        found.append(times_hessian(changed, point_at(changed, random_q(5, 6)), direction, None))
    torch.testing.assert_close(*found, rtol=TOLERANCE["special"], atol=1e-13)


# --- the products ---


def by_formula(A, w, u, v):
    a, b = A @ u, A**2 @ v
    return torch.stack([A.T @ (w[0] * a + w[1] * b), (A**2).T @ (w[1] * a + w[2] * b)])


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 8, 33])
def test_products_with_the_hessian(rows, intercept):
    """Dense rows in both precisions, rows with gaps between them, and sparse rows, against the formulas."""
    rng = np.random.default_rng(rows)
    X = rng.standard_normal((rows, 131)) * (rng.random((rows, 131)) < 0.5)
    A = torch.from_numpy(np.column_stack([X[:, :130], np.ones(rows)])[:, : 130 + intercept])
    u, v = torch.from_numpy(rng.standard_normal((2, A.shape[1])))
    w = torch.from_numpy(rng.standard_normal((3, rows))).unbind()
    exact = by_formula(A, w, u, v)
    sparse = scipy.sparse.csr_array(X[:, :130])
    wide = sparse.copy()
    wide.indices, wide.indptr = wide.indices.astype(np.int64), wide.indptr.astype(np.int64)  # left to the formulas
    for design in (Dense(torch.from_numpy(X)[:, :130], intercept), Sparse(sparse, intercept), Sparse(wide, intercept)):
        found = product_with_hessian(design, w, u, v)
        torch.testing.assert_close(found, exact, rtol=TOLERANCE["special"], atol=1e-12)
    single = product_with_hessian(Dense(torch.from_numpy(X).float()[:, :130], intercept), w, u, v)
    scale = by_formula(A.abs(), [x.abs() for x in w], u.abs(), v.abs())
    assert bool(((single - exact).abs() <= TOLERANCE["float32"] * scale).all())


def test_copies_for_products_are_light(monkeypatch):
    """In float32 if dense; no copies if they save nothing, or if squares of columns are out of float32's range."""
    X, y = data(50, 4, 7)
    monkeypatch.setattr("viper.inference.rows.SMALLEST_LIGHT", 200)
    dense, sparse = (Arrays(x, torch.from_numpy(y)) for x in (torch.from_numpy(X), scipy.sparse.csr_array(X)))
    assert [design.matrix.dtype for design in light_designs(dense)] == [torch.float32]
    assert np.shares_memory(light_designs(sparse)[0].matrix.data, sparse.features.data)
    problem = problem_of(50, 4, 7)
    total = problem.total(problem.prior.mean, problem.prior.precision)
    assert steering_designs(problem, total) is not None
    total.gram[1] = 1e30
    assert steering_designs(problem, total) is None
    for limits in ((0, 199), (201, 1000)):
        for name, entries in zip(("SMALLEST_LIGHT", "LARGEST_LIGHT"), limits, strict=True):
            monkeypatch.setattr(f"viper.inference.rows.{name}", entries)
        assert light_designs(dense) is None
    assert light_designs(sparse) is not None


# --- the moments of rows ---


@built
@pytest.mark.parametrize("tau2", [0.0, 1e-6, 0.3, 2.0, 30.0, 1e3, 1e8])
def test_compiled_moments_for_every_variance(tau2):
    """Within the tolerance of the rough bound for every variance, and up to rounding where there are nodes."""
    theta = torch.linspace(-40.0, 40.0, 101, dtype=torch.float64)
    given = theta, torch.full_like(theta, tau2)
    exact, partials = limit().moments(*given), limit().partials(*given)
    scale = 1.0 + theta.abs() + tau2**0.5
    for found, true, size in zip(
        compiled.moments_of_rows(*given, ROUGH_BOUND.kernel), exact, (scale, 1, 1), strict=True
    ):
        assert bool(((found - true).abs() <= 1.01 * ROUGH_TOLERANCE * size).all())
    closest = compiled.moments_of_rows(*given, limit().kernel)
    assert (closest is None) == (tau2 > 64.0)
    for found, true in zip(closest or exact, exact, strict=True):
        torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-13)
    # of the mixture exactly, and near those of the logistic
    rough = compiled.partials_of_rows(*given, ROUGH_BOUND.kernel)
    normals = mixture(smallest_mixture(ROUGH_TOLERANCE)).partials(*given)
    for found, true, same in zip(rough, partials, normals, strict=True):
        assert float((found - true).abs().max()) < 1e-6
        torch.testing.assert_close(found, same, rtol=1e-10, atol=1e-15)


@built
def test_compiled_moments_are_for_some_rows_only():
    theta = torch.zeros(3, dtype=torch.float64)
    for recipe in (None, KernelRecipe("quarter"), KernelRecipe("softplus")):
        assert compiled.moments_of_rows(theta, theta, recipe) is None
    assert compiled.moments_of_rows(theta.float(), theta.float(), ROUGH_BOUND.kernel) is None
    assert compiled.moments_of_rows(theta, theta * torch.nan, ROUGH_BOUND.kernel) is None
    assert compiled.partials_of_rows(theta, theta, limit().kernel) is None  # no mixture is exact


# --- the climb ---


def test_few_steps_from_afar():
    """About ten steps, to the same optimum as steps with matrices."""
    problem = problem_of(300, 150, 8, ROUGH_BOUND)
    start = widest(problem)
    found, other = climb_mean_field(problem, start, close=1e-9), newton(replace(problem, iterative=False))
    assert found.close
    assert found.value == pytest.approx(other.objective, abs=1e-8)
    reported = []
    climb_mean_field(problem, start, lambda *said: reported.append(said), close=1e-9)
    values, _, gains = zip(*reported, strict=True)
    assert len(values) < 15
    assert all(b >= a for a, b in pairwise(values))
    # quadratic at last, but for what conjugate gradients leave of each step
    assert gains[-1] < 0.1 * gains[-2] < 0.01 * gains[-3]


def test_a_predicted_last_step():
    """F after a last step is predicted, and so are the nats that are left."""
    problem = problem_of(200, 40, 9)
    found = climb_mean_field(problem, widest(problem))
    assert found.close
    assert found.predicted > 0.0
    assert found.value == pytest.approx(problem.evaluate(found.q, found.q.factor)[0], abs=1e-9)
    at = point_at(problem, found.q)
    assert 0.5 * float(at.gradient.square().sum()) < 1e-8


def test_steps_stay_among_positive_deviations():
    problem = problem_of(60, 5, 10)
    at = point_at(problem, random_q(5, 11))
    step = torch.stack([torch.zeros(5), -torch.ones(5)]).double() / (0.5 * at.q.precision * at.units[1])
    assert at.moved(step, 1.0) is None
    assert torch.allclose(at.moved(step, 0.5).precision, 4.0 * at.q.precision)


def test_few_products_leave_the_rest_to_matrices(monkeypatch):
    """Columns that are nearly the same under a wide prior: products alone would end too early."""
    rng = np.random.default_rng(12)
    X = rng.standard_normal((400, 1)) + 1e-3 * rng.standard_normal((400, 40))
    y = (X[:, 0] + rng.logistic(size=400) > 0).astype(int)
    elbos = []
    for products in (True, False):
        choose(monkeypatch, products)
        elbos.append(fit(X, y, prior_scale=1e3).elbo_)
    assert elbos[0] == pytest.approx(elbos[1], abs=1e-8)


def test_the_limit_of_iterations_is_kept(monkeypatch):
    choose(monkeypatch, True)
    monkeypatch.setattr(mean_field, "NEARLY_QUADRATIC", 0.0)
    problem = problem_of(100, 20, 13)
    found = climb_mean_field(problem, widest(problem), steps=2)
    assert not found.close
    assert found.left > 1e-9


@pytest.mark.parametrize("max_iter", [1, 3, 5, 200])
def test_a_fit_counts_the_steps_of_every_stage(monkeypatch, max_iter):
    """It takes at most `max_iter` steps, and reports convergence if and only if it has converged."""
    choose(monkeypatch, True)
    X, y = data(100, 20, 16)
    few = max_iter < 10
    with pytest.warns(viper.errors.ConvergenceWarning, match="Raise max_iter") if few else nullcontext():
        model = fit(X, y, max_iter=max_iter, tol=1e-13)
    assert model.n_iter_ <= max_iter
    assert model.converged_ is (not few)
    assert model.status_ == (f"not converged in {max_iter} iterations" if few else "converged")


@pytest.mark.parametrize("size", [1e30, 1e100])
def test_rounding_never_makes_the_objective_positive(monkeypatch, size):
    choose(monkeypatch, True)
    X, y = data(60, 30, 17)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fit(size * X, y).elbo_ <= 0.0


def test_kl_of_the_point():
    problem = problem_of(20, 3, 14)
    q = random_q(3, 15)
    expected = kl_by_terms(q.mean, q.factor, problem.prior)
    assert kl_to_prior(q, q.factor, problem.prior) == pytest.approx(float(expected), rel=TOLERANCE["roundoff"] * 10)
