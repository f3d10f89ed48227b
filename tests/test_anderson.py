"""Steps that are mixed with earlier ones, and the last step, after which F is not computed."""

import numpy as np
import pytest
import torch

from viper import VariationalLogisticRegression
from viper.inference.anderson import SMALLEST_SHARE, Mixing, mixing_weights, weights_from_gram, whitened
from viper.inference.problem import divergence, gaussian

EYE = torch.eye(3, dtype=torch.float64)


def test_a_linear_map_is_solved_by_as_many_steps_as_it_has_directions():
    """μ -> Aμ + b: once the residuals span the space, the mixture is the fixed point, and its share is tiny."""
    generator = torch.Generator().manual_seed(0)
    A = 0.9 * torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=generator))[0]
    b = torch.randn(3, dtype=torch.float64, generator=generator)
    fixed = torch.linalg.solve(EYE - A, b)
    mixing, q = Mixing(), gaussian(torch.zeros(3, dtype=torch.float64), EYE)
    shares = []
    for _ in range(4):
        new = gaussian(A @ q.mean + b, EYE)
        step = mixing.step(q, new, whitened(q, new), 1.0)
        shares.append(step.share)
        q = step.q
    torch.testing.assert_close(q.mean, fixed, rtol=1e-10, atol=1e-10)
    assert shares[0] == 1.0
    assert shares[-1] == SMALLEST_SHARE


def test_steps_that_go_too_far_are_mixed_part_of_the_way():
    """μ -> -5μ + b moves away from its fixed point; mixed steps of a quarter of the way reach it."""
    b = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    mixing, q = Mixing(), gaussian(torch.zeros(3, dtype=torch.float64), EYE)
    for _ in range(3):
        new = gaussian(-5.0 * q.mean + b, EYE)
        step = mixing.step(q, new, whitened(q, new), 0.25)
        q = step.q if step.share < 1.0 else gaussian(torch.lerp(q.mean, new.mean, 0.25), EYE)
    torch.testing.assert_close(q.mean, b / 6.0, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("diagonal", [False, True])
def test_the_residual_measures_the_divergence_of_a_small_step(diagonal):
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(3, 3, dtype=torch.float64, generator=generator)
    precision = root @ root.T + EYE
    old = gaussian(root[0], precision.diagonal() if diagonal else precision)
    new = gaussian(old.mean + 1e-4 * root[1], old.precision + 1e-4 * (root[2].abs() if diagonal else root.T @ root))
    residual = whitened(old, new)
    assert 0.5 * float(residual @ residual) == pytest.approx(divergence(old, new), rel=1e-3)


def test_changes_that_are_dependent_are_not_mixed():
    residual = torch.arange(1.0, 6.0, dtype=torch.float64)
    for other in (residual, 0.0 * residual):
        assert mixing_weights(torch.stack([residual, other], 1).numpy(), (residual + 1.0).numpy()) is None


def test_more_steps_than_entries_of_a_residual_leave_nothing_of_it():
    """Many weights do so; the smallest are chosen."""
    generator = torch.Generator().manual_seed(3)
    changes, residual = torch.randn(2, 5, dtype=torch.float64, generator=generator).split([4, 1], 1)
    weights, left = mixing_weights(changes.numpy().copy(order="F"), residual[:, 0].numpy())
    assert left == 0.0
    np.testing.assert_allclose(weights, np.linalg.pinv(changes.numpy()) @ residual[:, 0].numpy(), rtol=1e-12)


def test_weights_from_the_gram_matrix_are_those_of_least_squares():
    generator = torch.Generator().manual_seed(2)
    changes, residual = torch.randn(40, 5, dtype=torch.float64, generator=generator).split([4, 1], 1)
    weights = weights_from_gram((changes.T @ changes).numpy(), (changes.T @ residual)[:, 0].numpy())
    expected, left = mixing_weights(changes.numpy().copy(order="F"), residual[:, 0].numpy())
    remains = residual[:, 0].numpy() - changes.numpy() @ expected
    assert left == pytest.approx(remains @ remains, rel=1e-12)
    np.testing.assert_allclose(weights, expected, rtol=1e-8)
    np.testing.assert_allclose(expected, np.linalg.lstsq(changes.numpy(), residual[:, 0].numpy())[0], rtol=1e-12)
    assert weights_from_gram(np.zeros((2, 2)), np.ones(2)) is None


def test_a_mixture_that_is_no_gaussian_is_not_taken():
    mixing, q = Mixing(), gaussian(torch.zeros(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64))
    first = gaussian(q.mean, torch.full((1, 1), 4.0, dtype=torch.float64))
    second = gaussian(q.mean, torch.full((1, 1), 1.5, dtype=torch.float64))
    assert mixing.step(q, first, torch.tensor([1.0, 0.0], dtype=torch.float64), 1.0).q is first
    # residuals 1 and 0.5 cancel where the precision is 2 · 1.5 - 4 < 0
    step = mixing.step(q, second, torch.tensor([0.5, 0.0], dtype=torch.float64), 1.0)
    assert step.q is second
    assert step.share == 1.0


def rows(n, p, seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, p))
    return X, rng.random(n) < 1 / (1 + np.exp(-X @ rng.uniform(-2, 2, p)))


def test_slow_bounds_are_not_slow():
    """Each Pólya-Gamma step shrinks the distance by a tenth or less: unmixed, a fit took a hundred."""
    X, y = rows(40_000, 10, 2)
    model = VariationalLogisticRegression(bound="pg", random_state=0).fit(X, y)
    assert model.converged_
    assert model.n_iter_ < 20
    plain = VariationalLogisticRegression(bound="pg", random_state=0, tol=1e-14).fit(X, y)
    np.testing.assert_allclose(model.coef_, plain.coef_, rtol=1e-6)


@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize("n", [60, 700, 6_000, 70_000])
def test_what_the_last_step_gains_is_foreseen(n, family):
    X, y = rows(n, 8, n)
    model = VariationalLogisticRegression(covariance=family, random_state=0).fit(X, y)
    assert model.elbo_ == pytest.approx(model.elbo(X, y), rel=1e-10)
    assert model.elbo_bound_ < model.elbo_
    best = VariationalLogisticRegression(covariance=family, random_state=0, tol=1e-15).fit(X, y)
    assert best.elbo_ - model.elbo(X, y) < 1e-8 + 1e-13 * abs(best.elbo_)
