"""The star family of softmax regression: two classes, explicit contrasts, and the conditions of its optimum."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
import torch
from test_solver import peak_megabytes

from viper.inference.classes.ascent import StarCoordinates
from viper.inference.classes.problem import ClassProblem
from viper.inference.classes.solver import StarRun, fit_star, newton_step, solve_by_products
from viper.inference.classes.star import (
    Star,
    StarPrior,
    centred_classes,
    solve_precisions,
    star_divergence,
    star_prior,
    tied,
)
from viper.inference.classes.sums import EXACT_CLASSES
from viper.inference.newton import newton
from viper.inference.problem import Prior, Problem
from viper.inference.rows import Arrays
from viper.softplus.limit import limit

NEAR = {"rtol": 0, "atol": 3e-5}  # a fit ends 1e-8 nats before its optimum: means within 1.4e-4 of their sds


def data(classes, rows=150, columns=3, seed=0):
    rng = np.random.default_rng(seed)
    X = torch.tensor(rng.normal(size=(rows, columns)))
    logits = X.numpy() @ rng.normal(size=(columns, classes)) + rng.gumbel(size=(rows, classes))
    return X, torch.tensor(logits.argmax(1), dtype=torch.float64)


def prior_of(columns, scale=1.3, mean=0.0):
    precision = torch.full((columns + 1,), scale**-2, dtype=torch.float64)
    return Prior(torch.full((columns + 1,), mean, dtype=torch.float64), precision)


def problem_of(X, y, classes, diagonal=False, **options):
    return ClassProblem(Arrays(X, y, intercept=True, **options), classes, prior_of(X.shape[1]), diagonal)


@pytest.mark.parametrize("diagonal", [False, True])
def test_two_classes_are_binary_regression_with_twice_the_prior_variance(diagonal):
    X, y = data(2)
    star = fit_star(problem_of(X, y, 2, diagonal))
    source = Arrays(X, y, intercept=True)
    binary = newton(Problem(source, prior_of(3, 1.3 * math.sqrt(2.0)), limit(), diagonal=diagonal))
    assert star.converged
    torch.testing.assert_close(star.q.mean[1] - star.q.mean[0], binary.q.mean, **NEAR)
    parts = 1.0 / star.q.precision if diagonal else torch.linalg.inv(star.q.precision)
    covariance = 1.0 / binary.q.precision if diagonal else torch.linalg.inv(binary.q.precision)
    torch.testing.assert_close(parts.sum(0), covariance, **NEAR)
    assert star.objective == pytest.approx(binary.objective, abs=1e-7)


@pytest.mark.parametrize("diagonal", [False, True])
def test_the_optimum_is_stationary(diagonal):
    X, y = data(4)
    problem = problem_of(X, y, 4, diagonal)
    result = fit_star(problem)
    q = result.q
    at = problem.evaluate(q, EXACT_CLASSES)
    assert at.objective == pytest.approx(result.objective, abs=1e-8)
    assert problem.gradient(q.mean, at.sums).abs().max() < 1e-3
    torch.testing.assert_close(q.precision - tied(q.precision), problem.target(at.sums.gram), rtol=1e-3, atol=1e-3)
    # no step in any direction gains anything
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        noise = torch.randn(q.precision.shape, dtype=torch.float64, generator=generator) * 0.02
        P = q.precision
        other = P * (1 + noise) if diagonal else P + 0.5 * (noise + noise.mT) * P.diagonal(dim1=1, dim2=2).mean()
        shift = 0.05 * torch.randn(q.mean.shape, dtype=torch.float64, generator=generator)
        assert problem.evaluate(Star(q.mean + centred_classes(shift), other), EXACT_CLASSES).objective < at.objective


def test_the_solver_ends_close_to_the_optimum():
    """The default fit is within 1e-7 of one with a tolerance of 1e-13 nats."""
    for classes, rows, seed in ((3, 60, 0), (5, 150, 1)):
        problem = problem_of(*data(classes, rows, 6, seed), classes)
        plain, fine = fit_star(problem), fit_star(problem, tol=1e-13)
        assert plain.converged
        assert fine.objective == pytest.approx(plain.objective, abs=1e-7)
        shift = plain.q.mean - fine.q.mean
        ratio = torch.linalg.eigvals(torch.linalg.solve(fine.q.precision, plain.q.precision)).real
        apart = 0.5 * (shift[..., None].mT @ fine.q.precision @ shift[..., None]).sum()
        assert float(apart + 0.5 * (ratio - 1 - ratio.log()).sum()) < 1e-7


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_divergence_is_that_of_the_contrasts(diagonal, shared):
    """KL between Gaussians of the (K-1) d differences to the last class, with their full covariances."""
    K, d, rng = 3, 2, np.random.default_rng(3)
    roots = torch.tensor(rng.normal(size=(1 if shared else K, d, d)))
    P = roots @ roots.mT + torch.eye(d)
    P = P.diagonal(dim1=1, dim2=2).contiguous() if diagonal else P
    mean = centred_classes(torch.tensor(rng.normal(size=(K, d))))
    prior = Prior(torch.zeros(d, dtype=torch.float64), torch.tensor([0.7, 2.0], dtype=torch.float64))
    every = P.expand(K, *P.shape[1:])
    S = torch.block_diag(*(torch.linalg.inv(torch.diag(p) if diagonal else p) for p in every))
    D = torch.block_diag(*[torch.diag(1 / prior.precision)] * K)
    C = torch.kron(torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0]], dtype=torch.float64), torch.eye(d))
    ours = torch.distributions.MultivariateNormal(C @ mean.reshape(-1), C @ S @ C.T)
    theirs = torch.distributions.MultivariateNormal(torch.zeros(2 * d, dtype=torch.float64), C @ D @ C.T)
    exact = float(torch.distributions.kl_divergence(ours, theirs))
    for given in (prior, prior if diagonal else Prior(prior.mean, torch.diag(prior.precision))):
        assert star_divergence(Star(mean, P), star_prior(given, K)) == pytest.approx(exact, rel=1e-12)


def test_a_star_as_the_prior():
    """KL between two stars, as Gaussians of the differences to the last class; with equal precisions, a prior."""
    K, d, rng = 4, 3, np.random.default_rng(5)
    roots = torch.tensor(rng.normal(size=(2, K, d, d)))
    P, Q = roots @ roots.mT + torch.eye(d)
    means = torch.tensor(rng.normal(size=(2, K, d)))
    C = torch.kron(torch.cat([torch.eye(K - 1), -torch.ones(K - 1, 1)], 1).double(), torch.eye(d))
    ours, theirs = (
        torch.distributions.MultivariateNormal(C @ m.reshape(-1), C @ torch.block_diag(*torch.linalg.inv(p)) @ C.T)
        for m, p in zip(means, (P, Q), strict=True)
    )
    exact = float(torch.distributions.kl_divergence(ours, theirs))
    assert star_divergence(Star(means[0], P), star_prior(Star(means[1], Q), K)) == pytest.approx(exact, rel=1e-10)
    X, y = data(3)
    problem = problem_of(X, y, 3)
    same = Star(torch.zeros(3, 4, dtype=torch.float64), torch.diag(problem.prior.precision).expand(3, 4, 4))
    plain, star = fit_star(problem), fit_star(replace(problem, prior=same))
    assert star.objective == pytest.approx(plain.objective, abs=1e-7)
    torch.testing.assert_close(star.q.mean, plain.q.mean, **NEAR)


def test_precisions_where_two_classes_share_a_direction():
    """Plain iterations of the fixed point would hardly move there."""
    A = torch.tensor([[1.0, 5.0], [1.001, 0.01], [0.01, 5.0]], dtype=torch.float64)
    P = A
    for _ in range(30):
        P = solve_precisions(A, P)
    torch.testing.assert_close(P - tied(P), A, rtol=1e-8, atol=1e-10)
    turn = torch.linalg.qr(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)).Q
    full = start = turn @ torch.diag_embed(A) @ turn.T
    for _ in range(30):
        start = solve_precisions(full, start)
    torch.testing.assert_close(start, turn @ torch.diag_embed(P) @ turn.T, rtol=1e-6, atol=1e-8)


def test_objective_by_monte_carlo():
    X, y = data(3)
    problem = problem_of(X, y, 3)
    result = fit_star(problem)
    A = torch.cat([X, torch.ones(len(X), 1)], 1)
    noise = torch.randn(20_000, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    w = result.q.mean + torch.einsum("kij,skj->ski", result.q.factor, noise)
    draws = torch.log_softmax(torch.einsum("nd,skd->snk", A, w), -1)[:, torch.arange(len(y)), y.long()].sum(1)
    kl = star_divergence(result.q, problem.contrasts)
    error = float(draws.std()) / math.sqrt(len(draws))
    assert abs(float(draws.mean()) - kl - result.objective) < 4 * error


def test_relabelling_offsets_weights_and_residuals():
    X, y = data(3)
    plain = fit_star(problem_of(X, y, 3))
    order = torch.tensor([2, 0, 1])
    other = fit_star(problem_of(X, order[y.long()].double(), 3))
    torch.testing.assert_close(other.q.mean[order], plain.q.mean, **NEAR)
    common = torch.linspace(-3, 3, len(X), dtype=torch.float64)[:, None].expand(-1, 3).contiguous()
    shifted = fit_star(problem_of(X, y, 3, offset=common))
    torch.testing.assert_close(shifted.q.mean, plain.q.mean, **NEAR)
    twice = fit_star(problem_of(torch.cat([X, X]), torch.cat([y, y]), 3))
    weighted = fit_star(problem_of(X, y, 3, weight=torch.full((len(X),), 2.0, dtype=torch.float64)))
    assert weighted.objective == pytest.approx(twice.objective, abs=1e-6)
    torch.testing.assert_close(weighted.q.mean, twice.q.mean, **NEAR)
    spread = torch.full((len(X),), 0.3, dtype=torch.float64)
    one, each = (fit_star(problem_of(X, y, 3, residual=x)) for x in (spread, spread[:, None].expand(-1, 3)))
    assert one.objective == each.objective < plain.objective


def test_blocks_sparse_rows_and_another_start_end_at_the_same_star():
    X, y = data(4, 400)
    X = torch.where(X.abs() > 0.5, X, 0.0)
    whole = problem_of(X, y, 4)
    plain = fit_star(whole)
    for rows in (
        replace(whole.source, block_rows=64),
        Arrays(scipy.sparse.csr_array(X.numpy()), y, intercept=True),
    ):
        found = fit_star(replace(whole, source=rows))
        torch.testing.assert_close(found.q.mean, plain.q.mean, **NEAR)
        torch.testing.assert_close(found.q.precision, plain.q.precision, rtol=1e-4, atol=1e-4)
    again = fit_star(whole, plain.q)
    assert again.passes <= 4
    torch.testing.assert_close(again.q.mean, plain.q.mean, **NEAR)


def test_many_rows_begin_with_a_sample():
    X, y = data(3, 6000, 2)
    problem = problem_of(X, y, 3)
    result = fit_star(problem)
    assert result.converged
    assert result.passes % 1.0 > 0.0
    assert fit_star(problem, tol=1e-13).objective == pytest.approx(result.objective, abs=1e-7)


def test_many_columns_end_where_float64_and_single_steps_do(monkeypatch):
    """Steps in float32 between the best means for each precision save passes; data that overflow float32 skip them."""
    X, y = data(3, 800, 270)
    problem = problem_of(X, y, 3)
    found = fit_star(problem)
    plain = StarRun(problem, None, 200, None).fit(None, np.random.default_rng(0))
    assert found.converged
    assert plain.converged
    assert found.objective == pytest.approx(plain.objective, abs=3e-8)
    torch.testing.assert_close(found.q.mean, plain.q.mean, **NEAR)
    assert found.passes < plain.passes
    large = replace(problem.source, features=torch.full_like(X, torch.nan))
    monkeypatch.setattr(ClassProblem, "in_float32", lambda self: replace(self, source=large))
    assert fit_star(problem).objective == plain.objective


def correlated():
    """A mean-field problem whose columns are ReLU units of five factors, and its Hessian at zero."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(400, 5, generator=generator, dtype=torch.float64)
    X = torch.relu(factors @ torch.randn(5, 60, generator=generator, dtype=torch.float64))
    y = (factors @ torch.randn(5, 4, generator=generator, dtype=torch.float64)).argmax(1).double()
    problem = problem_of(X, y, 4, diagonal=True)
    at = problem.log_joint(torch.zeros(4, 61, dtype=torch.float64), gram=True)
    metric = Star(torch.zeros(4, 61, dtype=torch.float64), problem.precisions(at.sums.gram, at.sums.gram))
    return problem, at, metric


def test_a_newton_step_for_correlated_columns_solves_its_system():
    problem, at, metric = correlated()
    gradient = problem.gradient(metric.mean, at.sums)
    step = newton_step(problem, at.hessians, gradient, metric, 1e-9)
    torch.testing.assert_close(problem.hessian_times(at.hessians, step), gradient, rtol=0, atol=1e-5)  # share of |g|


def test_a_matrix_saves_products_where_columns_are_correlated(monkeypatch):
    problem, at, metric = correlated()
    gradient, made = problem.gradient(metric.mean, at.sums), []
    product = ClassProblem.hessian_times
    monkeypatch.setattr(ClassProblem, "hessian_times", lambda *given: made.append(None) or product(*given))
    newton_step(problem, at.hessians, gradient, metric, 0.01)
    with_matrix = len(made)
    monkeypatch.setattr(ClassProblem, "products_before_matrix", None)
    newton_step(problem, at.hessians, gradient, metric, 0.01)
    assert with_matrix < 0.7 * (len(made) - with_matrix)


def test_no_matrix_of_very_many_columns():
    """The matrix would take gigabytes, however many classes share it; the mean field exists to avoid it."""
    few, many = (problem_of(torch.zeros(200, columns), torch.zeros(200), 1000, True) for columns in (4000, 6000))
    assert few.products_before_matrix is not None
    assert many.products_before_matrix is None


def test_nothing_is_left_where_the_last_product_was_enough():
    """Two columns in the diagonal family: two products solve the system, so no matrix is needed."""
    metric = Star(torch.zeros(2, 2).double(), torch.ones(2, 2).double())
    curvature = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    gradient = torch.tensor([[1.0, -3.0], [-1.0, 3.0]]).double()
    x, left = solve_by_products(lambda v: v @ curvature, gradient, gradient, metric, 1e-6, 2)
    assert left is None
    torch.testing.assert_close(x @ curvature, gradient)
    assert solve_by_products(lambda v: v @ curvature, gradient, gradient, metric, 1e-6, 1)[1] is not None


@pytest.mark.parametrize("diagonal", [False, True])
def test_separated_classes_under_a_wide_prior(diagonal):
    """Curvatures change too fast for the fixed point. L-BFGS finds the same F from other starts, with right slopes."""
    rng = np.random.default_rng(0)
    y = torch.arange(60, dtype=torch.float64) % 3
    X = torch.tensor(rng.normal(size=(60, 2))) + 2.0 * torch.stack([(y == 1).double(), (y == 2).double()], 1) * 4.0
    problem = replace(problem_of(X, y, 3, diagonal), prior=prior_of(2, 12.0))
    result = fit_star(problem)
    assert result.converged
    other = StarRun(problem, None, 200, None)
    other.start(Star(result.q.mean * 0.9, result.q.precision * 1.2), EXACT_CLASSES)
    other.climb()
    assert other.converged
    assert other.result().objective == pytest.approx(result.objective, abs=1e-7)
    coordinates = StarCoordinates(result.q)
    x, v = 0.1 * rng.normal(size=(2, coordinates.length))

    def value(t):
        q = coordinates.star(x + t * v)
        return q, problem.evaluate(q, EXACT_CLASSES)

    slope = coordinates.gradient(x, problem, *value(0.0)) @ v
    assert slope == pytest.approx((value(1e-4)[1].objective - value(-1e-4)[1].objective) / 2e-4, rel=1e-5)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("several", [(), (5,), (2, 3)])
def test_the_prior_times_many_vectors(shared, several):
    """Against the precision of the contrasts as one matrix."""
    rng, K, d = np.random.default_rng(1), 4, 3
    root = torch.tensor(rng.normal(size=(1 if shared else K, d, d)))
    Q = root @ root.mT + torch.eye(d).double()
    whole, total = torch.block_diag(*Q.expand(K, d, d)), Q.expand(K, d, d).sum(0)
    beside = whole.reshape(K * d, K, d).sum(1)  # Q_k, one below the other
    whole = whole - beside @ torch.linalg.solve(total, beside.T)
    vectors = torch.tensor(rng.normal(size=(*several, K, d)))
    found = StarPrior(torch.zeros(K, d).double(), Q).times(vectors)
    torch.testing.assert_close(found.flatten(-2), vectors.flatten(-2) @ whole, rtol=1e-12, atol=1e-12)


def test_densities_of_many_draws_need_no_matrix_for_each():
    """4,000 draws of 5 classes and 60 coefficients are 10 MB; a matrix for each draw and class would be 576 MB."""
    _, own = peak_megabytes("""
from viper.inference.classes.posterior import star_log_density
from viper.inference.classes.star import StarPrior
Q = torch.eye(60).double().expand(5, 60, 60).clone()
draws = torch.from_numpy(generator.standard_normal((4000, 5, 60)))
start = peak()
assert star_log_density(StarPrior(torch.zeros(5, 60).double(), Q), draws).isfinite().all()
print(peak(), peak() - start)
""")
    assert own < 100
