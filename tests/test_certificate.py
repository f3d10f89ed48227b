"""Every number that the proof in docs/certificate.md uses."""

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
import torch
from softplus_reference import expectations

from viper.softplus import limit, normal, quadrature, series

EPS = np.finfo(float).eps


def tail_moment(mean, tau, k):
    """a_k = E[e^{-k|X|}]/k, as in Theorem 1."""
    grow = mp.exp((k * tau) ** 2 / 2)
    left = mp.exp(k * mean) * mp.ncdf(-mean / tau - k * tau)
    return grow * (left + mp.exp(-k * mean) * mp.ncdf(mean / tau - k * tau)) / k


def sigmoid_derivative(order):
    """s^{(n)}(0) = (2^{n+1} - 1) B_{n+1} / (n+1)."""
    return (2 ** (order + 1) - 1) * mp.bernoulli(order + 1) / (order + 1)


# --- (i) the accelerated series ---


@pytest.mark.parametrize(("mean", "tau"), [("-0.3", "0.7"), ("0", "0.1"), ("2", "5")])
def test_terms_are_moments_and_the_error_is_bounded(mean, tau):
    """(-1)^m Δ^m a_k >= 0, as for the moments of every positive measure on [0,1], and |S - S_n| <= S / T_n(3)."""
    with mp.workdps(60):
        mean, tau = mp.mpf(mean), mp.mpf(tau)
        a = [tail_moment(mean, tau, k) for k in range(1, 21)]
        for m, k in itertools.product(range(8), (0, 1, 5)):
            assert mp.fsum((-1) ** j * mp.binomial(m, j) * a[k + j] for j in range(m + 1)) > 0
        exact = expectations(mean, tau**2)[0] - tau * mp.npdf(mean / tau) - mean * mp.ncdf(mean / tau)
        for n in (4, 8):  # small enough for weights that are rounded to float64
            weights = series.accelerated_weights(n).tolist()
            error = abs(mp.fsum(w * x for w, x in zip(weights, a, strict=False)) - exact)
            assert exact / series.chebyshev_at_3(n) / 1000 < error <= exact / series.chebyshev_at_3(n)


def test_series_constants():
    n = series.TERM_COUNT
    assert n == 20
    assert series.chebyshev_at_3(n) == round(float(mp.chebyt(n, 3)))
    assert math.log(2) / series.chebyshev_at_3(n) < 7e-16
    k = torch.arange(1, n + 1)
    assert float((series.accelerated_weights(n).abs() / k).sum()) < 3.3


# --- (ii) quadrature ---


def quadrature_bound(count, variance):
    """N!/N (τ/π)^{2N}, up to the poles beyond the first pair."""
    return (1 + 1e-3) * math.factorial(count) / count * (variance / math.pi**2) ** count


@pytest.mark.parametrize("m", [5, 6, 16])
def test_poles_give_the_derivatives(m):
    """|f^{(2m)}(0)| = 2 (2m-1)! Σ_j (π(2j+1))^{-2m}, and the first pole has nearly all of it."""
    poles = 2 * mp.factorial(2 * m - 1) * mp.nsum(lambda j: (mp.pi * (2 * j + 1)) ** (-2 * m), [0, mp.inf])
    assert float(abs(sigmoid_derivative(2 * m - 1)) / poles) == pytest.approx(1, rel=1e-12)
    assert poles < (1 + mp.mpf("1e-3")) * 2 * mp.factorial(2 * m - 1) / mp.pi ** (2 * m)


@pytest.mark.parametrize("m", [3, 8])
def test_even_derivatives_are_largest_at_zero(m):
    x = np.linspace(-8, 8, 33)
    with mp.workdps(40):
        values = [abs(mp.diff(lambda t: 1 / (1 + mp.exp(-t)), mp.mpf(t), 2 * m - 1)) for t in x]
        assert max(values) == pytest.approx(abs(sigmoid_derivative(2 * m - 1)), rel=1e-12)


@pytest.mark.parametrize("count", [2, 4, 6])
def test_quadrature_error_is_bounded(count):
    """Few nodes, so that the error is larger than rounding; at ϑ = 0 the bound is nearly attained."""
    variance = limit.NODES_EXACT
    exact = float(expectations(0, variance)[0])
    z, w = np.polynomial.hermite_e.hermegauss(count)
    error = abs(np.logaddexp(0, math.sqrt(variance) * z) @ w / w.sum() - exact)
    assert 0.05 * quadrature_bound(count, variance) < error <= quadrature_bound(count, variance)


def test_quadrature_constants():
    assert quadrature_bound(limit.NODE_COUNT, limit.NODES_EXACT) < 4e-17
    assert quadrature_bound(limit.FEW_NODES, limit.FEW_EXACT) < 2e-17
    z, w = quadrature.full_gauss_hermite(16)
    assert float(z.max()) * math.sqrt(limit.NODES_EXACT) < 2.7
    with mp.workdps(40):
        for node, weight in zip(z.tolist(), w.tolist(), strict=True):
            exact = mp.findroot(lambda x: mp.hermite(16, x / mp.sqrt(2)), node)
            # w_j = 2^{N-1} (N-1)! / (N H_{N-1}²), H the physicists' polynomial at x/√2
            w_exact = 2**15 * mp.factorial(15) / (16 * mp.hermite(15, exact / mp.sqrt(2)) ** 2)
            assert abs(node / exact - 1) < EPS
            assert abs(weight / w_exact - 1) < 24 * EPS


# --- (iii) expansion ---


def test_expansion_is_made_of_derivatives():
    """f^{(2j)} = q E_j(q) and f^{(2j+1)} = q (1-2s) O_j(q)."""
    with mp.workdps(40):
        x = mp.mpf("-0.7")
        s = 1 / (1 + mp.exp(-x))
        q = s * (1 - s)
        for j, (even, odd) in enumerate(zip(limit.EVEN, limit.ODD, strict=True), start=1):
            derivative = [mp.diff(lambda t: 1 / (1 + mp.exp(-t)), x, n) for n in (2 * j - 1, 2 * j)]
            assert abs(q * mp.polyval(even[::-1], q) / derivative[0] - 1) < 1e-15
            assert abs(q * (1 - 2 * s) * mp.polyval(odd[::-1], q) / derivative[1] - 1) < 1e-15


@pytest.mark.parametrize("m", range(1, 9))
def test_expansion_constants(m):
    """Stopped after order m; η errs less than h, because max|f^{(2m+2)}| < max|f^{(2m+4)}|."""
    value, curvature = (float(abs(sigmoid_derivative(n))) for n in (2 * m + 1, 2 * m + 3))
    share = 1 / (2 ** (m + 1) * math.factorial(m + 1))
    assert curvature * share == pytest.approx(limit.HEAT_ERRORS[m - 1], rel=4 * EPS)
    reach = limit.heat_reach(limit.HEAT_TOLERANCE)[m - 1]
    assert curvature * share * reach ** (m + 1) == pytest.approx(limit.HEAT_TOLERANCE, rel=1e-12)
    assert value * share * reach ** (m + 1) <= 1.11e-15 < limit.HEAT_TOLERANCE
    if m == limit.MOST_ORDER:
        assert reach == limit.HEAT_EXACT == pytest.approx(0.029, rel=5e-3)
        assert value * share * reach ** (m + 1) < 6.5e-17
        assert limit.HEAT_TOLERANCE / 0.25 < 1e-14


def test_expansion_adds_little():
    """What the expansion adds to the softplus at q = ¼ if no coefficient were negative: its rounding is negligible."""
    terms = [
        sum(abs(e) * 0.25 ** (i + 1) for i, e in enumerate(row)) * (limit.HEAT_EXACT / 2) ** j / math.factorial(j)
        for j, row in enumerate(limit.EVEN[: limit.MOST_ORDER], start=1)
    ]
    assert sum(terms) < 4e-3


# --- (iv) rounding ---


def scaled_erfc(x):
    """e^{x²} erfc(x), by its continued fraction where e^{x²} would be huge."""
    if x < 20:
        return mp.exp(x * x) * mp.erfc(x)
    tail = mp.mpf(0)
    for k in range(80, 0, -1):
        tail = mp.mpf(k) / 2 / (x + tail)
    return 1 / (mp.sqrt(mp.pi) * (x + tail))


@pytest.mark.parametrize("x", ["1e-9", "0.1", "1", "3", "30", "1e4"])
def test_condition_of_erfcx(x):
    """|x erfcx'(x)| <= erfcx(x) and |erfcx'(x)| <= 2/√π, where erfcx'(x) = 2x erfcx(x) - 2/√π."""
    with mp.workdps(60):
        x = mp.mpf(x)
        derivative = 2 * x * scaled_erfc(x) - 2 / mp.sqrt(mp.pi)
        assert abs(derivative) <= 2 / mp.sqrt(mp.pi)
        assert abs(x * derivative) <= scaled_erfc(x)


RNG = np.random.default_rng(0)
POSITIVE = np.concatenate([[0.0], 10.0 ** RNG.uniform(-6, 6, 400), RNG.uniform(0, 12, 400)])
FUNCTIONS = {
    "exp": (torch.exp, mp.exp, -RNG.uniform(0, 700, 500)),
    "erfcx": (normal.erfcx, scaled_erfc, POSITIVE),
    "torch erfcx": (torch.special.erfcx, scaled_erfc, POSITIVE),
    "log1p": (torch.log1p, mp.log1p, -(10.0 ** RNG.uniform(-300, -0.03, 500))),
    "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + mp.exp(-x)), RNG.uniform(-700, 3, 500)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_good_to_five_units(name):
    """The assumption of the error analysis: relative error at most 5 ε, here on a CPU."""
    function, exact, x = FUNCTIONS[name]
    ours = function(torch.from_numpy(x)).tolist()
    with mp.workdps(40):
        assert max(abs(mp.mpf(a) / exact(mp.mpf(b)) - 1) for a, b in zip(ours, x.tolist(), strict=True)) < 5 * EPS
