"""The star family of softmax regression: two classes, explicit contrasts, and the conditions of its optimum."""

import math

import numpy as np
import pytest
import torch

from viper.inference.newton import newton
from viper.inference.problem import Prior, Problem
from viper.inference.rows import Arrays
from viper.inference.star import Star, StarProblem, centred, fit_star, star_divergence
from viper.softplus.gumbel import Precision
from viper.softplus.limit import limit

EXACT = Precision(1e-10)
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
    return StarProblem(Arrays(X, y, intercept=True, **options), classes, prior_of(X.shape[1]), diagonal)


def test_two_classes_are_binary_regression_with_twice_the_prior_variance():
    X, y = data(2)
    star = fit_star(problem_of(X, y, 2))
    source = Arrays(X, y, intercept=True)
    binary = newton(Problem(source, prior_of(3, 1.3 * math.sqrt(2.0)), limit()))
    assert star.converged
    torch.testing.assert_close(star.q.mean[1] - star.q.mean[0], binary.q.mean, **NEAR)
    covariance = torch.linalg.inv(binary.q.precision)
    torch.testing.assert_close(star.q.contrast_covariance(1, 0), covariance, **NEAR)
    assert star.objective == pytest.approx(binary.objective, abs=1e-7)


@pytest.mark.parametrize("diagonal", [False, True])
def test_the_optimum_is_stationary(diagonal):
    X, y = data(4)
    problem = problem_of(X, y, 4, diagonal)
    q = fit_star(problem).q
    _, sums = problem.evaluate(q, EXACT)
    assert problem.gradient(q, sums).abs().max() < 1e-3
    M, P = q.precision.sum(0), q.precision
    joint = P * P / M if diagonal else P @ torch.linalg.solve(M, P)
    torch.testing.assert_close(P - joint, problem.target(sums.gram), rtol=1e-3, atol=1e-3)
    # no step in any direction gains anything
    best, _ = problem.evaluate(q, EXACT)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        noise = torch.randn(q.precision.shape, dtype=torch.float64, generator=generator) * 0.02
        other = P * (1 + noise) if diagonal else P + 0.5 * (noise + noise.mT) * P.diagonal(dim1=1, dim2=2).mean()
        shift = 0.05 * torch.randn(q.mean.shape, dtype=torch.float64, generator=generator)
        assert problem.evaluate(Star(q.mean + centred(shift), other), EXACT)[0] < best


@pytest.mark.parametrize("diagonal", [False, True])
def test_divergence_is_that_of_the_contrasts(diagonal):
    """KL between Gaussians of the (K-1) d differences to the last class, with their full covariances."""
    K, d, rng = 3, 2, np.random.default_rng(3)
    roots = torch.tensor(rng.normal(size=(K, d, d)))
    P = roots @ roots.mT + torch.eye(d)
    P = P.diagonal(dim1=1, dim2=2).contiguous() if diagonal else P
    q = Star(centred(torch.tensor(rng.normal(size=(K, d)))), P)
    prior = Prior(torch.zeros(d, dtype=torch.float64), torch.tensor([0.7, 2.0], dtype=torch.float64))
    S = torch.block_diag(*(torch.linalg.inv(torch.diag(p) if diagonal else p) for p in P))
    D = torch.block_diag(*[torch.diag(1 / prior.precision)] * K)
    C = torch.kron(torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, -1.0]], dtype=torch.float64), torch.eye(d))
    ours = torch.distributions.MultivariateNormal(C @ q.mean.reshape(-1), C @ S @ C.T)
    theirs = torch.distributions.MultivariateNormal(torch.zeros(2 * d, dtype=torch.float64), C @ D @ C.T)
    exact = torch.distributions.kl_divergence(ours, theirs)
    assert star_divergence(q, q.factors(), prior, torch.zeros(K, d)) == pytest.approx(float(exact), rel=1e-12)


def test_objective_by_monte_carlo():
    X, y = data(3)
    problem = problem_of(X, y, 3)
    result = fit_star(problem)
    A = torch.cat([X, torch.ones(len(X), 1)], 1)
    noise = torch.randn(20_000, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    w = result.q.mean + torch.einsum("kij,skj->ski", result.q.factors(), noise)
    draws = torch.log_softmax(torch.einsum("nd,skd->snk", A, w), -1)[:, torch.arange(len(y)), y.long()].sum(1)
    kl = star_divergence(result.q, result.q.factors(), problem.prior, problem.prior_mean)
    error = float(draws.std()) / math.sqrt(len(draws))
    assert abs(float(draws.mean()) - kl - result.objective) < 4 * error


def test_relabelling_offsets_and_weights():
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
