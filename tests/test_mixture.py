"""The mixture tables against the logistic function: in float64 on a dense grid, and in mpmath where it matters.

The tables' errors are above 1e-12, so float64 with its 1e-15 sees them to three digits.
"""

import functools
import itertools
import runpy
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest
from scipy.special import expit, log_expit, ndtr
from tolerances import TOLERANCE

from viper.softplus.mixture_table import MIXTURES, QUADRATURE

DERIVATION = Path(__file__).parents[1] / "derivations" / "logistic_mixture.py"

every_table = pytest.mark.parametrize("table", MIXTURES, ids=lambda table: f"J={len(table.weights)}")
every_mixture = pytest.mark.parametrize("table", [*MIXTURES, QUADRATURE], ids=lambda table: f"J={len(table.weights)}")


def mixture_moments(table, mean, variance=0.0):
    """Σ p_j [m Φ(z_j) + d_j φ(z_j)], Σ p_j Φ(z_j), Σ p_j φ(z_j) / d_j with d_j² = v + σ_j², z_j = m / d_j."""
    p, mean = np.array(table.weights), np.asarray(mean)[..., None]
    d = np.sqrt(variance + np.array(table.variances))
    z = mean / d
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    return (mean * ndtr(z) + d * density) @ p, ndtr(z) @ p, (density / d) @ p


@functools.cache
def logistic_moments(mean, variance):
    """E[log(1 + e^X)], E[s(X)], E[s'(X)] for X ~ N(m, v), by quadrature in 20 digits."""

    def expectation(f):
        return float(mp.quad(lambda u: mp.npdf(u) * f(mean + mp.sqrt(variance) * u), [-12, -3, 0, 3, 12]))

    def slope(x):
        return 1 / (1 + mp.exp(-x))

    with mp.workdps(20):
        return (
            expectation(lambda x: mp.log1p(mp.exp(x))),
            expectation(slope),
            expectation(lambda x: slope(x) * slope(-x)),
        )


@every_table
def test_error_is_the_largest_at_variance_zero(table):
    # x > 0 follows by symmetry, checked below; past -40 both sides are below 1e-17 and vanish.
    x = np.linspace(-40.0, 0.0, 20_001)
    exact = -log_expit(-x), expit(x), expit(x) * expit(-x)
    largest = max(np.abs(ours - e).max() for ours, e in zip(mixture_moments(table, x), exact, strict=True))
    assert 0.9 * table.error < largest <= table.error


@every_table
def test_error_bounds_every_mean_and_variance(table):
    for mean, variance in itertools.product([0.0, -0.8, 2.5, 7.0], [0.01, 1.0, 30.0]):
        ours, exact = mixture_moments(table, mean, variance), logistic_moments(mean, variance)
        # The sums themselves round, relative to values up to 7.
        assert np.abs(np.subtract(ours, exact)).max() <= table.error + 10 * TOLERANCE["roundoff"]


@every_mixture
def test_error_is_attained_in_high_precision(table):
    """At the grid point where the curvature is worst, with every operation in 40 digits."""
    x = np.linspace(0.0, 20.0, 20_001)
    curvature = expit(x) * expit(-x)
    worst = x[np.abs(mixture_moments(table, x)[2] - curvature).argmax()]
    with mp.workdps(40):
        normals = [(p, mp.sqrt(v)) for p, v in zip(table.weights, table.variances, strict=True)]
        approximate = mp.fsum(p * mp.npdf(mp.mpf(worst), 0, sd) for p, sd in normals)
        error = abs(approximate - mp.sech(mp.mpf(worst) / 2) ** 2 / 4)
    assert 0.9 * table.error < error <= table.error


@every_mixture
def test_weights_are_a_distribution_in_any_order(table):
    assert min(table.weights) > 0
    assert min(table.variances) > 0
    assert len(table.weights) == len(table.variances)
    for weights in (table.weights, table.weights[::-1], sorted(table.weights)):
        assert sum(weights) == 1.0
    assert sum(int(p * 2**53) for p in table.weights) == 2**53


@every_mixture
def test_limits_are_exact(table):
    value, slope, curvature = mixture_moments(table, np.array([1e3, 1e100]))
    assert value == pytest.approx([1e3, 1e100], rel=TOLERANCE["roundoff"])
    assert slope == pytest.approx(1.0, rel=TOLERANCE["roundoff"])
    assert curvature.max() == 0.0


@every_mixture
def test_symmetry(table):
    """value(x) - value(-x) = x, slope(x) + slope(-x) = 1, curvature(x) = curvature(-x)."""
    x = np.linspace(0.0, 20.0, 101)
    (value, slope, curvature), mirror = mixture_moments(table, x), mixture_moments(table, -x)
    np.testing.assert_allclose(value - mirror[0], x, rtol=TOLERANCE["roundoff"], atol=TOLERANCE["roundoff"])
    np.testing.assert_allclose(slope + mirror[1], 1.0, rtol=TOLERANCE["roundoff"])
    np.testing.assert_array_equal(curvature, mirror[2])


def test_tables_are_in_order_and_one_of_nine_terms_reaches_1e_8():
    errors = [table.error for table in MIXTURES]
    assert errors == sorted(errors, reverse=True)
    assert min(table.error for table in MIXTURES if len(table.weights) <= 9) <= 1e-8


def test_smallest_table_is_derived_again():
    derivation = runpy.run_path(str(DERIVATION))
    table = MIXTURES[0]
    weights, variances = derivation["fit"](len(table.weights))
    assert derivation["round_up"](derivation["worst_error"](weights, variances)) == table.error
    # Another linear algebra library may stop the search elsewhere within its tolerance of 1e-4.
    np.testing.assert_allclose(weights, table.weights, rtol=1e-2)
    np.testing.assert_allclose(variances, table.variances, rtol=1e-2)
