"""Newton's method for one precision per row: the same optimum of a full covariance with many columns."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
import torch

from viper import VariationalLogisticRegression
from viper.inference.problem import MOST_LEFT, Prior, Problem
from viper.inference.rows import Arrays, Dense, SourceTraits, Sparse
from viper.inference.start import coarse_sizes
from viper.inference.wide.sites import RowSites, climb_by_sites, sites_help
from viper.models.fitting import ROUGH_BOUND, fast_row_space
from viper.softplus.limit import limit


def rows(n, p, seed=0, density=1.0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, p)) * (rng.random((n, p)) < density)
    return X, rng.random(n) < 1.0 / (1.0 + np.exp(-X @ rng.standard_normal(p)))


def expected(theta, tau2, function):
    """E f(X) for X ~ N(ϑ, τ²) by the trapezoidal rule, whose error falls like e^(-2π²/step) with the step of X."""
    z = np.linspace(-9.0, 9.0, 1501)
    assert np.sqrt(tau2.max()) * (z[1] - z[0]) < 0.5
    w = np.exp(-0.5 * np.square(z))
    return function(theta[:, None] + np.sqrt(tau2)[:, None] * z) @ (w / w.sum())


def nats_to_the_next_step(A, y, weight, offset, precision, centre, mean, covariance):
    """½ |∂F/∂μ|² + ¼ |S₀⁻¹ + Aᵀ diag(c h) A - Λ|², whitened by q: zero at the optimum only."""
    factor = np.linalg.cholesky(covariance)
    theta, tau2 = A @ mean + offset, np.square(A @ factor).sum(1)
    sigmoid = lambda x: 1.0 / (1.0 + np.exp(-x))  # noqa: E731
    g, h = expected(theta, tau2, sigmoid), expected(theta, tau2, lambda x: sigmoid(x) * sigmoid(-x))
    slope = A.T @ (weight * (y - g)) - precision @ (mean - centre)
    change = factor.T @ (precision + A.T @ (A * (weight * h)[:, None])) @ factor - np.eye(len(mean))
    return 0.5 * np.sum(np.square(factor.T @ slope)) + 0.25 * np.sum(np.square(change))


@pytest.mark.parametrize("kind", ["dense", "sparse", "weighted", "correlated prior", "more columns than rows"])
def test_the_gradient_vanishes(kind):
    n, p = (270, 500) if kind == "more columns than rows" else (600, 280)
    X, y = rows(n, p, density=0.2 if kind == "sparse" else 1.0)
    rng = np.random.default_rng(1)
    weight, offset, centre, scale = np.ones(n), np.zeros(n), 0.0, 1.0
    if kind == "weighted":
        weight, offset, centre = rng.integers(0, 4, n).astype(float), rng.standard_normal(n), 0.3
    if kind == "correlated prior":
        scale = 0.4 * np.eye(p) + 0.3
    model = VariationalLogisticRegression(prior_scale=scale, prior_mean=centre)
    given = {"sample_weight": weight, "offset": offset} if kind == "weighted" else {}
    model.fit(scipy.sparse.csr_matrix(X) if kind == "sparse" else X, y, **given)
    A = np.hstack([X, np.ones((n, 1))])
    precision = np.zeros((p + 1, p + 1))
    precision[:p, :p] = np.linalg.inv(scale) if np.ndim(scale) else np.eye(p)
    precision[p, p] = 0.01
    middle = np.append(np.full(p, centre), 0.0)
    at = model.posterior_.mean.numpy(), model.covariance_
    assert nats_to_the_next_step(A, y, weight, offset, precision, middle, *at) < 1e-8
    assert model.converged_
    assert not any(step.rough for step in model.history_)


def test_the_answer_is_that_of_natural_gradient_steps(monkeypatch):
    X, y = rows(500, 260, 2)
    model = VariationalLogisticRegression().fit(X, y)
    monkeypatch.setattr("viper.inference.start.sites_help", lambda problem: False)
    other = VariationalLogisticRegression().fit(X, y)
    assert other.history_
    np.testing.assert_allclose(model.elbo_, other.elbo_, atol=1e-8)
    sd = np.sqrt(np.diag(other.covariance_))
    # 1e-9 nats are 4e-5 standard deviations
    np.testing.assert_allclose(model.posterior_.mean.numpy() / sd, other.posterior_.mean.numpy() / sd, atol=1e-4)
    np.testing.assert_allclose(model.covariance_ / np.outer(sd, sd), other.covariance_ / np.outer(sd, sd), atol=1e-4)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_basis_of_the_rows_by_cholesky(sparse):
    X, _ = rows(260, 400, 5, density=0.3)
    sd = torch.linspace(0.5, 2.0, 401, dtype=torch.float64)
    design = Sparse(scipy.sparse.csr_array(X), True) if sparse else Dense(torch.from_numpy(X), True)
    Q, R = (part.numpy() for part in fast_row_space(design, sd))
    np.testing.assert_allclose(Q.T @ Q, np.eye(260), atol=1e-12)
    np.testing.assert_allclose(R @ Q.T, np.hstack([X, np.ones((260, 1))]) * sd.numpy(), atol=1e-12)


@pytest.mark.parametrize("fault", ["rows that are sums of others", "a large column", "few rows"])
def test_rows_whose_basis_would_lose_digits(fault):
    X, _ = rows(100 if fault == "few rows" else 260, 400, 6)
    if fault == "rows that are sums of others":
        X[1] = X[0] + 1e-4 * X[1]
    if fault == "a large column":
        X[:, 3] *= 1e5
    assert fast_row_space(Dense(torch.from_numpy(X)), torch.ones(400, dtype=torch.float64)) is None


def make(X, y, **given):
    A, d = torch.from_numpy(X), X.shape[1]
    prior = Prior(torch.zeros(d, dtype=torch.float64), torch.ones(d, dtype=torch.float64))
    return Problem(Arrays(A, torch.from_numpy(y.astype(float)), **given), prior, limit(), ROUGH_BOUND)


def test_a_newton_step_squares_the_distance():
    """Without the dependence of h on τ², a step would only divide the distance."""
    X, y = rows(700, 260, 3)
    problem = make(X, y)
    found = climb_by_sites(problem, lambda value: None)
    assert found.close
    block = next(problem.source.blocks())
    block = next(Arrays(block.design.matrix, block.label, block_rows=700).cut())
    sites = RowSites(problem, block, found.q.mean, torch.full((700,), 0.1, dtype=torch.float64))
    theta, tau2 = block.design.project(found.q.mean), block.design.spread(found.q.factor)
    precisions = limit().moments(theta, tau2)[2].numpy()
    noise = np.exp(0.03 * np.random.default_rng(0).standard_normal(700))
    start = sites.at(found.q.mean.numpy(), precisions * noise)
    once = sites.at(*sites.improved(start))
    assert 1e-4 < start.move < 1.0
    assert once.move < 0.1 * start.move**2 + 1e-9


def test_what_float32_cannot_hold_is_left_to_the_solver():
    X, y = rows(400, 260, 4)
    assert sites_help(make(X, y))
    with np.errstate(all="raise"):
        assert climb_by_sites(make(X * 1e25, y), lambda value: None) is None


def test_few_columns_and_many_rows_are_not_for_it():
    assert not sites_help(make(*rows(400, 100)))
    assert not sites_help(make(*rows(2_000, 260)))


class ManyRows:
    """What is known of rows before the first pass."""

    def __init__(self, rows, dimension, on_card):
        self.rows, self.dimension = rows, dimension
        self.traits = SourceTraits(smallest_sample=10_000 if on_card else 0)


CASES = [(10**8, True, True), (10**8, False, False), (10**7, True, False)]


@pytest.mark.parametrize(("count", "on_card", "larger"), CASES)
def test_very_many_rows_on_an_accelerator_begin_on_a_subset_that_saves_a_pass(count, on_card, larger):
    """Its mode and one step leave about 5d²n/2k² nats; the first pass with variances multiplies that by 2d/n."""
    d = 26
    problem = replace(make(*rows(10, 2)), source=ManyRows(count, d, on_card))
    k = coarse_sizes(problem)[0]
    left = 5 * d**2 * count / (2 * k**2) * 2 * d / count
    assert (left < MOST_LEFT) == larger
    assert k < 0.1 * count
