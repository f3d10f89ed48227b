"""The numbers of the kernel, against mpmath and against identities."""

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy.special import expit
from softplus_cases import FLOAT32, OPTIONS, PROMISED, STD, STD_FLOOR, both_dtypes, box, every_bound, sample_points
from softplus_reference import expectations, points, read_table, reference
from tolerances import TOLERANCE
from torch.autograd import gradcheck

from viper.softplus import jaakkola_jordan, limit
from viper.softplus.bounds import certificate
from viper.softplus.expectation import expected_sigmoid, expected_softplus, terms_needed

EPS = np.finfo(float).eps
ROWS = read_table()
TABLE = {name: np.array([row[name] for row in ROWS]) for name in ROWS[0]}
MEAN, VARIANCE = TABLE["mean"], TABLE["variance"]


def relative_error(ours, exact):
    return np.abs(ours - exact) / np.where(exact == 0, 1.0, np.abs(exact))


# --- the reference itself ---


def test_table_holds_the_points_of_the_recipe():
    assert [(row["mean"], row["variance"]) for row in ROWS] == list(points())
    assert len(ROWS) >= 200


@pytest.mark.parametrize("index", [1, 26, 43, 61, 113, 165])
def test_recipe_gives_the_table(index):
    row = ROWS[index]
    numbers = [row[name] for name in ("value", "slope", "curvature", "std")]
    assert list(reference(row["mean"], row["variance"])) == pytest.approx(numbers, rel=2 * EPS, abs=0)


@pytest.mark.parametrize(("mean", "variance"), [(3.0, 400.0), (-60.0, 100.0), (-1.0, 1.0)])
def test_two_routes_to_the_reference_agree(mean, variance):
    with mp.workdps(50):
        direct, by_parts = (expectations(mean, variance, route) for route in ("direct", "by parts"))
        assert max(abs(a / b - 1) for a, b in zip(direct, by_parts, strict=True)) < mp.mpf(10) ** -45


def test_reference_satisfies_two_identities():
    with mp.workdps(50):
        value, slope, curvature, square = expectations(1.25, 2.5)
        mirrored = expectations(-1.25, 2.5)
        assert abs(slope - curvature - square) < mp.mpf(10) ** -45
        assert abs(value - mirrored[0] - mp.mpf("1.25")) < mp.mpf(10) ** -45


# --- the limit ---


@pytest.mark.parametrize("field", PROMISED)
def test_limit_against_mpmath(field):
    ours = getattr(expected_softplus(MEAN, VARIANCE), field)
    assert relative_error(ours, TABLE[field]).max() <= PROMISED[field]


def test_limit_one_point_at_a_time():
    """The order of the expansion for small variance follows the largest variance of a block."""
    for row in (row for row in ROWS if row["variance"] <= limit.HEAT_EXACT):
        result = expected_softplus(row["mean"], row["variance"])
        for field, promised in PROMISED.items():
            assert getattr(result, field) == pytest.approx(row[field], rel=promised, abs=0)


@pytest.mark.parametrize("variance", 10.0 ** np.arange(-9, -2.5, 0.25))
def test_expansion_of_every_order_meets_the_quadrature(variance):
    mean = np.linspace(-30.0, 30.0, 121)
    # Two variances: one block of this variance alone, and one that takes the full order
    alone, full = (
        expected_softplus(mean, variance),
        expected_softplus(np.append(mean, 0.0), np.append(np.full(121, variance), 2.4e-3)),
    )
    for field in PROMISED:
        np.testing.assert_allclose(getattr(alone, field), getattr(full, field)[:-1], rtol=2e-14)


@pytest.mark.parametrize("field", PROMISED)
def test_limit_in_float32(field):
    mean, variance = MEAN.astype(np.float32), VARIANCE.astype(np.float32)
    ours = getattr(expected_softplus(mean, variance), field)
    assert ours.dtype == np.float32
    # The reference for the rounded input is float64's, which the test above holds to mpmath
    exact = getattr(expected_softplus(mean.astype(float), variance.astype(float)), field)
    normal_number = exact >= np.finfo(np.float32).tiny
    assert normal_number.sum() > 100
    assert relative_error(ours, exact)[normal_number].max() <= FLOAT32


def test_tail_is_relatively_accurate():
    value, slope, curvature = expected_softplus(-40.0, 0.25)
    # E[e^X] = e^{ϑ+v/2}; the next term of log(1+e^x) is e^-40 smaller
    assert [value, slope, curvature] == pytest.approx([math.exp(-39.875)] * 3, rel=TOLERANCE["roundoff"], abs=0)


@pytest.mark.parametrize("mean", [0.0, -1e-8, 0.5, -3.0, 20.0, -40.0, -300.0, 700.0])
def test_variance_zero_is_the_softplus(mean):
    value, slope, curvature = expected_softplus(mean, 0.0)
    with mp.workdps(30):
        exact = [float(x) for x in expectations(mean, 0.0)[:3]]
    assert [value, slope, curvature] == pytest.approx(exact, rel=TOLERANCE["special"], abs=0)


@pytest.mark.parametrize("threshold", [limit.HEAT_EXACT, limit.FEW_EXACT, limit.NODES_EXACT])
def test_formulas_meet(threshold):
    mean = np.linspace(-50.0, 50.0, 401)
    below, above = (expected_softplus(mean, v) for v in (threshold, np.nextafter(threshold, 1)))
    for field, promised in PROMISED.items():
        assert relative_error(getattr(below, field), getattr(above, field)).max() <= promised / 10


@both_dtypes
def test_box_has_no_overflow_nan_or_negative_curvature(dtype):
    mean, variance = box(100_000, dtype=dtype)
    value, slope, curvature = expected_softplus(mean, variance)
    assert bool(torch.stack([value, slope, curvature]).isfinite().all())
    assert bool((value >= mean.clamp(min=0)).all())  # Jensen, with log(1+e^x) >= max(x, 0)
    assert float(slope.min()) >= 0.0
    assert float(slope.max()) <= 1.0
    # Zero only where the result underflows in float32
    assert float(curvature.min()) > 0.0 if dtype == torch.float64 else float(curvature.min()) >= 0.0
    assert float(curvature.max()) <= 0.25 * (1 + 4 * torch.finfo(dtype).eps)


@every_bound
def test_nothing_is_nan_beyond_the_box(options):
    mean = np.array([-1e308, -1e200, -1e155, -1e5, -5e-324, 0.0, 5e-324, 1e5, 1e155, 1e200, 1e307])[:, None]
    variance = np.array([0.0, 5e-324, 1e-300, 1e-3, 0.2, 1.0, 1e8, 1e200, 1e306])
    assert not any(np.isnan(field).any() for field in expected_softplus(mean, variance, **options))


@every_bound
def test_reflection(options):
    """log(1+e^x) = x + log(1+e^-x), so η(ϑ) - η(-ϑ) = ϑ, g(ϑ) + g(-ϑ) = 1 and h(ϑ) = h(-ϑ)."""
    mean, variance = (x.numpy() for x in box(2_000, seed=1))
    here, there = expected_softplus(mean, variance, **options), expected_softplus(-mean, variance, **options)
    np.testing.assert_allclose(here.slope + there.slope, 1.0, rtol=TOLERANCE["roundoff"])
    np.testing.assert_allclose(here.curvature, there.curvature, rtol=TOLERANCE["special"])
    scale = np.abs(mean) + np.sqrt(variance)
    assert np.abs(here.value - there.value - mean).max() <= TOLERANCE["roundoff"] * scale.max()


# --- the probability ---


def test_sigmoid_against_mpmath():
    mean, std = expected_sigmoid(MEAN, VARIANCE)
    assert relative_error(mean, TABLE["slope"]).max() <= PROMISED["slope"]
    above = TABLE["std"] > STD_FLOOR
    assert above.sum() > 150
    assert relative_error(std, TABLE["std"])[above].max() <= STD
    assert (std[~above] <= STD_FLOOR).all()


@both_dtypes
def test_sigmoid_is_a_probability_in_the_whole_box(dtype):
    mean, std = expected_sigmoid(*box(50_000, seed=2, dtype=dtype))
    assert float(mean.min()) >= 0.0
    assert float(mean.max()) <= 1.0
    assert float(std.min()) >= 0.0
    # Var[s] <= E[s] (1 - E[s])
    assert float((std**2 - mean * (1 - mean)).max()) <= torch.finfo(dtype).eps


def test_sigmoid_std_in_float32_is_rounded_once():
    ours = expected_sigmoid(np.float32([-30.0, -5.0, 2.0]), np.float32([1e-8, 0.1, 3.0])).std
    exact = expected_sigmoid(
        np.float32([-30.0, -5.0, 2.0]).astype(float), np.float32([1e-8, 0.1, 3.0]).astype(float)
    ).std
    np.testing.assert_allclose(ours, exact, rtol=np.finfo(np.float32).eps)


def test_sigmoid_is_differentiable():
    assert gradcheck(lambda mean, variance: tuple(expected_sigmoid(mean, variance)), sample_points(requires_grad=True))


# --- Theorem 1 with finite l ---


def theorem_1(mean, variance, terms):
    """η_l as printed in the paper."""
    tau = mp.sqrt(variance)
    total = tau * mp.npdf(mean / tau) + mean * mp.ncdf(mean / tau)
    for k in range(1, 2 * terms):
        left = mp.exp(k * mean + k**2 * variance / 2) * mp.ncdf(-mean / tau - k * tau)
        right = mp.exp(-k * mean + k**2 * variance / 2) * mp.ncdf(mean / tau - k * tau)
        total += (-1) ** (k - 1) * (left + right) / k
    return total


def theorem_1_with_derivatives(mean, variance, terms):
    """η_l, ∂η_l/∂ϑ and 2 ∂η_l/∂v by central differences of 60-digit numbers: 20 digits are right."""
    with mp.workdps(60):
        mean, variance, step = mp.mpf(mean), mp.mpf(variance), mp.mpf(variance) * mp.mpf(10) ** -14
        up, down = (theorem_1(mean + s, variance, terms) for s in (step, -step))
        more, less = (theorem_1(mean, variance + s, terms) for s in (step, -step))
        return float(theorem_1(mean, variance, terms)), float((up - down) / (2 * step)), float((more - less) / step)


@pytest.mark.parametrize(
    ("mean", "variance", "terms"),
    [
        *itertools.product([0.0, -0.6, 2.5], [0.01, 4.0], [1, 12]),
        (-40.0, 2.0, 3),  # tail
        (-12.0, 9.0, 5),
        (0.01, 1e-6, 5),  # curvature -400
        (0.05, 1e-3, 300),  # more terms than are summed at once
        (0.001, 1e-5, 1000),
        (-0.3, 2500.0, 4),
    ],
)
def test_finite_l_against_the_formula_of_theorem_1(mean, variance, terms):
    value, slope, curvature = expected_softplus(mean, variance, terms=terms)
    exact = theorem_1_with_derivatives(mean, variance, terms)
    assert value == pytest.approx(exact[0], rel=PROMISED["value"], abs=0)
    assert slope == pytest.approx(exact[1], rel=PROMISED["slope"], abs=0)
    # Terms as large as l and φ₀ cancel in h_l
    density = math.exp(-(mean**2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)
    assert curvature == pytest.approx(exact[2], rel=PROMISED["curvature"], abs=10 * EPS * (density + terms))


def test_finite_l_has_negative_curvature_where_it_is_not_convex():
    """Below τ = 1/(2l) the cusp of the truncated softplus at 0 is seen: h_l is about l - φ₀."""
    curvature = expected_softplus(0.0, 1e-6, terms=5).curvature
    assert curvature == pytest.approx(5 - 1e3 / math.sqrt(2 * math.pi), rel=1e-2)  # to first order in τ
    assert expected_softplus(0.0, 0.0, terms=5).curvature == -math.inf


@pytest.mark.parametrize("mean", [0.0, -0.4, 3.0, -700.0])
def test_finite_l_at_variance_zero_sums_powers(mean):
    value, slope, _ = expected_softplus(mean, 0.0, terms=4)
    k = np.arange(1, 8)
    powers = (-1.0) ** (k - 1) * np.exp(-k * abs(mean))
    assert value == pytest.approx(max(mean, 0) + (powers / k).sum(), rel=TOLERANCE["roundoff"], abs=0)
    jump = 0.5 if mean == 0 else float(mean > 0)
    assert slope == pytest.approx(jump - np.sign(mean) * powers.sum(), rel=TOLERANCE["special"], abs=0)


def test_finite_l_decreases_to_the_limit():
    mean, variance = (x.numpy() for x in box(5_000, seed=3))
    values = [expected_softplus(mean, variance, terms=l).value for l in (1, 2, 3, 5, 12, 17, 40)]
    values.append(expected_softplus(mean, variance).value)
    slack = PROMISED["value"] * values[-1]
    for larger, smaller in itertools.pairwise(values):
        assert (larger >= smaller - slack).all()
    assert (values[0] > 1.01 * values[-1]).any()


@pytest.mark.parametrize(("terms", "percent"), [(5, 5.0), (7, 2.5), (12, 1.0), (17, 0.5)])
def test_the_papers_claims(terms, percent):
    """On the grid of the paper's figures, ϑ in [-3, 3] and τ in [0.1, 3], and not with one term less."""
    mean, variance = np.linspace(-3, 3, 61)[:, None], np.linspace(0.1, 3.0, 30) ** 2
    exact = expected_softplus(mean, variance).value
    worst = [(expected_softplus(mean, variance, terms=l).value / exact - 1).max() for l in (terms - 1, terms)]
    assert worst[1] < percent / 100 <= worst[0]
    assert terms_needed(mean, variance, percent / 100).max() == terms


def test_terms_needed_by_brute_force():
    mean, variance = np.linspace(-4, 4, 17)[:, None], np.array([0.0, 1e-3, 0.05, 1.0, 9.0, 100.0])
    exact = expected_softplus(mean, variance).value
    errors = np.stack([expected_softplus(mean, variance, terms=l).value / exact - 1 for l in range(1, 81)])
    for threshold in (0.3, 0.05, 0.01, 0.005):
        np.testing.assert_array_equal(terms_needed(mean, variance, threshold), (errors > threshold).sum(0) + 1)


def test_terms_needed_may_be_many():
    # At ϑ = v = 0 the error is 1/(4l) to first order: Σ_{k>=2l} (-1)^k/k
    assert terms_needed(0.0, 0.0, 1e-12) == pytest.approx(0.25e12 / math.log(2), rel=1e-6)
    assert terms_needed(-1000.0, 0.0, 0.01) == 1  # where η underflows


# --- Jaakkola-Jordan ---


def test_jaakkola_jordan_is_its_formula_at_the_best_t():
    mean, variance = np.linspace(-6, 6, 25)[:, None], np.array([1e-3, 0.3, 2.0, 50.0])
    value, slope, curvature = expected_softplus(mean, variance, bound="pg")
    t = np.sqrt(mean**2 + variance)

    def bound_at(t):
        return mean / 2 + np.log(2 * np.cosh(t / 2)) + np.tanh(t / 2) / (4 * t) * (mean**2 + variance - t**2)

    # NumPy's sum cancels
    formula = mean / 2 + np.log(2 * np.cosh(t / 2))
    np.testing.assert_allclose(value, formula, rtol=TOLERANCE["roundoff"], atol=TOLERANCE["roundoff"])
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert (bound_at(factor * t) >= value * (1 - TOLERANCE["roundoff"])).all()
    np.testing.assert_allclose(curvature, np.tanh(t / 2) / (2 * t), rtol=TOLERANCE["roundoff"])
    np.testing.assert_allclose(slope, 0.5 + curvature * mean, rtol=TOLERANCE["special"])


def test_jaakkola_jordan_is_above_the_limit():
    mean, variance = (x.numpy() for x in box(20_000, seed=4))
    exact = expected_softplus(mean, variance).value
    assert (expected_softplus(mean, variance, bound="pg").value >= exact * (1 - PROMISED["value"])).all()


def test_jaakkola_jordan_partials_where_series_and_formula_meet():
    t = torch.tensor([0.0999999, 0.1000001], dtype=torch.float64)
    _, _, b = jaakkola_jordan.jaakkola_jordan().partials(torch.zeros_like(t), t**2)
    # Both cancel or truncate there; the function itself moves by 2e-9
    assert float(b[0]) == pytest.approx(float(b[1]), rel=1e-8)


# --- Monte Carlo and quadrature ---


def test_monte_carlo_follows_its_seed():
    mean, variance = np.linspace(-2, 2, 5), 1.5
    first, again, other = (expected_softplus(mean, variance, bound="mc", random_state=s).value for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).all()
    unseeded = [expected_softplus(0.0, 1.0, bound="mc").value for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_monte_carlo_leaves_global_generators_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    expected_softplus(0.0, 1.0, bound="mc")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # noqa: NPY002


@pytest.mark.parametrize("samples", [1_000, 100_000])
def test_monte_carlo_is_within_its_error(samples):
    mean, variance = np.array([-3.0, 0.0, 0.5, 4.0]), np.array([[0.1], [1.0], [9.0]])
    ours = expected_softplus(mean, variance, bound="mc", samples=samples, random_state=0)
    exact = expected_softplus(mean, variance)
    # f has slope at most 1 and s at most 1/4, so their standard deviations are at most τ and τ/4; 4 of them
    error = 4 * np.sqrt(variance / samples)
    assert (np.abs(ours.value - exact.value) <= error).all()
    assert (np.abs(ours.slope - exact.slope) <= error / 4).all()
    assert (np.abs(ours.curvature - exact.curvature) <= error).all()


def test_monte_carlo_uses_the_same_numbers_at_every_point():
    mean, variance = (x.numpy() for x in box(300, seed=5))
    options = {"bound": "mc", "samples": 40, "random_state": 7}
    together = expected_softplus(mean, variance, **options).value
    alone = [expected_softplus(m, v, **options).value for m, v in zip(mean.tolist(), variance.tolist(), strict=True)]
    np.testing.assert_allclose(together, alone, rtol=TOLERANCE["roundoff"])


@pytest.mark.parametrize("nodes", [1, 2, 7, 64, 256])
def test_quadrature_against_numpy(nodes):
    mean, variance = np.linspace(-5, 5, 11)[:, None, None], np.array([[1e-4], [0.5], [20.0]])
    z, w = np.polynomial.hermite_e.hermegauss(nodes)
    w, tau = w / w.sum(), np.sqrt(variance)
    x = mean + tau * z
    value, slope, curvature = expected_softplus(mean[..., 0], variance[..., 0], bound="quadrature", nodes=nodes)
    np.testing.assert_allclose(value, np.logaddexp(0, x) @ w, rtol=TOLERANCE["special"])
    np.testing.assert_allclose(slope, expit(x) @ w, rtol=TOLERANCE["special"])
    # NumPy's sum cancels, by 1/τ
    np.testing.assert_allclose(curvature, (expit(x) * z) @ w / tau[..., 0], rtol=TOLERANCE["special"], atol=1e-13)


@pytest.mark.parametrize("options", [OPTIONS["quadrature"], OPTIONS["mc"]], ids=["quadrature", "mc"])
def test_curvature_of_sums_for_tiny_variance(options):
    """Both are even in τ with unit second moment, so h -> s'(ϑ)."""
    mean = np.array([0.0, 1.0, -30.0, 300.0])
    for variance in (0.0, 1e-300, 1e-14):
        curvature = expected_softplus(mean, variance, **options).curvature
        np.testing.assert_allclose(curvature, expit(mean) * expit(-mean), rtol=TOLERANCE["special"])


# --- the fast path ---


@pytest.mark.parametrize("tolerance", [1e-3, 1e-4, 1e-6, 1e-8, 1e-10, 1e-13])
def test_fast_path_is_within_its_tolerance(tolerance):
    mean, variance = (x.numpy() for x in box(50_000, seed=6))
    mean, variance = np.append(mean, MEAN), np.append(variance, VARIANCE)
    ours, exact = expected_softplus(mean, variance, tolerance=tolerance), expected_softplus(mean, variance)
    for field in PROMISED:
        assert np.abs(getattr(ours, field) - getattr(exact, field)).max() <= tolerance
        assert getattr(ours, field).min() >= 0.0


@pytest.mark.parametrize("tolerance", [1e-4, 1e-6, 1e-8, 1e-10])
def test_fast_path_for_one_variance_at_a_time(tolerance):
    """A block of equal variances uses the lowest order of its expansion, or one mixture."""
    mean = np.linspace(-40.0, 40.0, 401)
    for variance in 10.0 ** np.arange(-8, 3, 0.2):
        ours, exact = expected_softplus(mean, variance, tolerance=tolerance), expected_softplus(mean, variance)
        for field in PROMISED:
            assert np.abs(getattr(ours, field) - getattr(exact, field)).max() <= tolerance


@pytest.mark.parametrize("tolerance", [1e-4, 1e-6, 1e-8, 1e-10])
def test_fast_path_is_near_its_tolerance_where_formulas_meet(tolerance):
    """Just below the variance where the expansion ends its error is the whole tolerance, so its reach is not short."""
    variance = limit.heat_reach(tolerance)[limit.FAST_ORDER - 1]
    error = abs(
        expected_softplus(0.0, variance, tolerance=tolerance).curvature - expected_softplus(0.0, variance).curvature
    )
    assert 0.3 * tolerance < error <= tolerance


def test_fast_path_in_float32():
    mean, variance = box(50_000, seed=7, dtype=torch.float32)
    ours, exact = expected_softplus(mean, variance, tolerance=1e-6), expected_softplus(mean.double(), variance.double())
    eps = torch.finfo(torch.float32).eps
    # ϑ g + Σ p d φ rounds relative to |ϑ| and τ; slope and curvature to 1
    scale = mean.double().abs() + variance.double().sqrt() + 1
    assert float(((ours.value - exact.value).abs() / scale).max()) <= 1e-6 + 8 * eps
    assert float((ours.slope - exact.slope).abs().max()) <= 1e-6 + 8 * eps
    assert float((ours.curvature - exact.curvature).abs().max()) <= 1e-6 + 8 * eps


# --- the certified bound ---


def test_certified_is_above_mpmath_by_less_than_1e_9():
    gap = expected_softplus(MEAN, VARIANCE, bound="certified").value - TABLE["value"] * (1 + EPS)
    assert gap.min() >= 0.0
    assert gap.max() <= 1e-9


def test_certificate_is_at_most_1e_9_up_to_1e4_and_covers_the_measured_error():
    grid = torch.tensor([0.0, 1.0, 1e4], dtype=torch.float64)
    assert float(certificate(grid[:, None], grid**2).max()) < 1e-9
    error = np.abs(expected_softplus(MEAN, VARIANCE).value - TABLE["value"])
    allowed = certificate(torch.from_numpy(MEAN), torch.from_numpy(VARIANCE)).numpy()
    assert (error < 0.1 * allowed).all()


def test_certified_is_rounded_up_in_float32():
    mean, variance = box(20_000, seed=8, dtype=torch.float32)
    ours = expected_softplus(mean, variance, bound="certified").value
    exact = expected_softplus(mean.double(), variance.double(), bound="certified").value
    assert ours.dtype == torch.float32
    gap = ours.double() - exact
    assert float(gap.min()) >= 0.0
    assert float((gap / exact).max()) <= torch.finfo(torch.float32).eps
