"""The expected log-sum-exp against the expected softplus, quadrature, Monte Carlo and its own identities."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import special, stats
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacrev, vmap

import viper
from viper.softplus import c_library, compiled_classes, gumbel, logsumexp
from viper.softplus.expectation import expected_softplus
from viper.softplus.gumbel import Precision, level_index, sd_level
from viper.softplus.logsumexp import DEFAULT_TOLERANCE, expected_logsumexp

FIELDS = ("value", "slope", "curvature")
CPU = torch.device("cpu")


@pytest.fixture(params=["compiled", "plain"])
def route(request, monkeypatch):
    """Both ways to the same numbers; without a compiler there is one."""
    if request.param == "plain":
        monkeypatch.setattr(logsumexp, "compiled_moments", lambda *_: None)
    elif compiled_classes.class_library() is None:
        pytest.skip("the C code was not built")


@pytest.fixture
def builds():
    """The function of each build that this machine can run."""
    given = compiled_classes.CLASS_ROWS, compiled_classes.is_exact
    found = [c_library.right_functions(compiled_classes.CLASSES_MODULE + width, *given) for width in c_library.WIDTHS]
    return [functions[0] for functions in found if functions]


def classes(rows, count, least, most, span, seed=0):
    """Means uniform on an interval of length `span`, sds log-uniform on [least, most]."""
    rng = np.random.default_rng(seed)
    mean = rng.uniform(-0.5 * span, 0.5 * span, (rows, count))
    sd = np.exp(rng.uniform(math.log(least), math.log(most), (rows, count)))
    return mean, sd**2


def close(a, b, atol=DEFAULT_TOLERANCE):
    a, b = np.broadcast_arrays(a, b)
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


# --- independent numbers ---

SCALES = [
    (1e-8, 1e-3, 5),
    (1e-3, 0.03, 8),
    (0.02, 0.6, 8),
    (0.5, 7, 20),
    (5, 100, 50),
    (100, 1e3, 700),
    (1e-4, 1e3, 700),
]


@pytest.mark.parametrize(("least", "most", "span"), SCALES)
def test_two_classes_are_the_softplus_of_the_difference(route, least, most, span):
    mean, variance = classes(300, 2, least, most, span)
    variance[::7, 0] = 0.0
    ours = expected_logsumexp(mean, variance)
    softplus = expected_softplus(mean[:, 0] - mean[:, 1], variance.sum(1))
    close(ours.value - mean[:, 1], softplus.value)
    close(ours.slope[:, 0], softplus.slope)
    close(ours.curvature, softplus.curvature[:, None])
    close(expected_logsumexp(mean, variance, cross=True).cross[:, 0, 1], softplus.curvature)


def by_quadrature(mean, variance, nodes=160):
    """K = 3: log(e^x + e^y + e^z) = c + softplus(x - c), c = log(e^y + e^z), exactly in x, Gauss-Hermite in y and z."""
    z, w = np.polynomial.hermite_e.hermegauss(nodes)
    w = w / w.sum()
    y, x = (mean[k] + math.sqrt(variance[k]) * z for k in (1, 2))
    c = np.logaddexp(y[:, None], x)
    inner = expected_softplus(mean[0] - c, variance[0])
    return w @ (c + inner.value) @ w, w @ inner.slope @ w, w @ inner.curvature @ w


@pytest.mark.parametrize(
    ("mean", "variance"),
    [
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
        ([1.0, -0.5, 0.3], [0.01, 0.3, 2.0]),
        ([4.0, 0.0, -4.0], [0.0, 1e-4, 0.09]),
        ([-3.0, 2.0, 0.0], [40.0, 0.5, 1.5]),
        ([300.0, 0.0, 1.0], [1.0, 1e4, 2.0]),
    ],
)
def test_three_classes_by_quadrature(route, mean, variance):
    mean, variance = np.array(mean), np.array(variance)
    ours = expected_logsumexp(mean, variance)
    for first in range(3):
        order = [first, *(k for k in range(3) if k != first)]
        if variance[order[1:]].max() > 4.0:  # too wide for these nodes
            continue
        value, slope, curvature = by_quadrature(mean[order], variance[order])
        close([ours.value, ours.slope[first], ours.curvature[first]], [value, slope, curvature])


def test_three_classes_in_mpmath():
    """E log(e^{0.5 + 0.7x} + e^{1.3y} + 2), by mpmath with 20 digits: sums over x and y in steps of 0.1."""
    ours = expected_logsumexp(np.array([0.5, 0.0, math.log(2)]), np.array([0.49, 1.69, 0.0]))
    close(ours.value, 1.7237959548644094476)


@pytest.mark.parametrize(("count", "sd"), [(5, 2.0), (30, 1.0), (1000, 0.5), (1000, 3.0)])
def test_many_classes_by_monte_carlo(route, count, sd):
    """Antithetic pairs, and as control variate the linear part at the mean."""
    rng = np.random.default_rng(count)
    mean, sds = rng.normal(0, 2, count), sd * rng.uniform(0.5, 1.5, count)
    z = rng.standard_normal((20_000_000 // count // 100, count))
    f = mean + sds * np.concatenate([z, -z])
    p, p0 = special.softmax(f, -1), special.softmax(mean)
    value = special.logsumexp(f, -1) - (f - mean) @ p0
    draws = np.column_stack([value, p[:, :3], (p * (1 - p))[:, :3]])
    draws = draws.reshape(2, len(z), -1).mean(0)
    error = draws.std(0) / math.sqrt(len(z))
    ours = expected_logsumexp(mean, sds**2)
    ours = np.concatenate([[ours.value], ours.slope[:3], ours.curvature[:3]])
    assert np.all(np.abs(ours - draws.mean(0)) < 5 * error + DEFAULT_TOLERANCE)


@pytest.mark.parametrize("count", [3, 40, 1000])
@pytest.mark.parametrize("variance", [[0.02, 3e-5], [1.0, 0.3], [900.0, 1e6], [25.0, 1e-3]])
def test_known_classes_merge_into_one(route, count, variance):
    """Classes without variance are one class at the log of their sum: K classes equal 3, whatever K."""
    rng = np.random.default_rng(1)
    known = rng.normal(-math.log(count), 2, count - 2)
    many = np.concatenate([[0.3, -1.0], known]), np.concatenate([variance, np.zeros(count - 2)])
    few = np.array([0.3, -1.0, special.logsumexp(known)]), np.array([*variance, 0.0])
    ours, expected = expected_logsumexp(*many), expected_logsumexp(*few)
    close(ours.value, expected.value, 2 * DEFAULT_TOLERANCE)
    close(ours.slope[:2], expected.slope[:2], 2 * DEFAULT_TOLERANCE)
    close(ours.curvature[:2], expected.curvature[:2], 2 * DEFAULT_TOLERANCE)
    close(ours.slope[2:], expected.slope[2] * special.softmax(known), 2 * DEFAULT_TOLERANCE)


@pytest.mark.parametrize("sd", [0.0, 0.01, 1.0, 30.0, 1e3])
def test_one_wide_class_beside_narrow_ones(route, sd):
    """Scales from 1e-3 to 1e3 in one row, against a fine sum over the wide class."""
    mean, variance = np.array([0.0, 20.0, 1.0]), np.array([1e-6, sd**2, 0.0])
    z = np.linspace(-9, 9, 40_001)
    w = stats.norm.pdf(z)
    w /= w.sum()
    c = np.logaddexp(20.0 + sd * z, 1.0)
    inner = expected_softplus(-c, 1e-6)
    ours = expected_logsumexp(mean, variance)
    # the sum over z has an error of its own where the sd is large: e^x bends within a fraction of a step
    close(ours.value, w @ (c + inner.value), 1e-9 if sd < 100 else 2e-6)
    close(ours.slope[0], w @ inner.slope, 1e-9 if sd < 100 else 1e-6)


def test_without_variance_it_is_the_log_sum_exp(route):
    mean, _ = classes(50, 7, 1, 2, 40)
    ours = expected_logsumexp(mean, 0.0 * mean, cross=True)
    p = special.softmax(mean, -1)
    close(ours.value, special.logsumexp(mean, -1))
    close(ours.slope, p)
    close(ours.curvature, p * (1 - p))
    close(ours.cross, p[:, :, None] * p[:, None])


@pytest.mark.parametrize("tolerance", [1e-10, 1e-5])
@pytest.mark.parametrize(("count", "least", "most"), [(2, 1e-4, 0.1), (3, 0.1, 3), (10, 0.3, 1), (40, 1, 8)])
def test_vectors_of_any_length_give_the_same_moments(monkeypatch, builds, count, least, most, tolerance):
    """As exact as the tolerance says, by the plain formulas with a smaller one."""
    mean, variance = classes(150, count, least, most, 8.0)
    with monkeypatch.context() as patch:
        patch.setattr(logsumexp, "compiled_moments", lambda *_: None)
        exact = expected_logsumexp(mean, variance, tolerance=1e-12)
    for function in builds:
        monkeypatch.setattr(compiled_classes, "class_library", lambda f=function: f)
        moments = compiled_classes.compiled_moments(
            torch.from_numpy(mean), torch.from_numpy(variance), Precision(tolerance),
            logsumexp.widest_step(tolerance), logsumexp.doubled_from(tolerance),
        )  # fmt: skip
        assert moments[3].all()
        for ours, name in zip(moments, FIELDS, strict=False):
            close(ours.numpy(), getattr(exact, name), tolerance)


# --- identities ---


def test_what_a_softmax_obeys(route):
    mean, variance = classes(200, 6, 1e-3, 30, 15)
    ours = expected_logsumexp(mean, variance, cross=True)
    close(ours.slope.sum(-1), 1.0, 1e-14)
    close(ours.cross.sum(-1), ours.slope)
    close(ours.cross, ours.cross.transpose(0, 2, 1), 1e-14)
    close(np.diagonal(ours.cross, axis1=1, axis2=2), ours.slope - ours.curvature, 1e-14)
    assert np.all(ours.slope >= 0)
    assert np.all(ours.curvature >= 0)
    # convex in the means: its Hessian is the mean of diag(p) - p pᵀ
    curvature = np.einsum("ij,jk->ijk", ours.slope, np.eye(6)) - ours.cross
    assert np.linalg.eigvalsh(curvature).min() > -1e-9
    # between the log-sum-exp of the means (Jensen) and the mean of the sum
    assert np.all(ours.value >= special.logsumexp(mean, -1) - DEFAULT_TOLERANCE)
    assert np.all(ours.value <= special.logsumexp(mean + variance / 2, -1) + DEFAULT_TOLERANCE)


def test_relabelling_shifting_and_far_classes(route):
    mean, variance = classes(100, 5, 1e-2, 5, 10)
    ours, order = expected_logsumexp(mean, variance), [3, 0, 4, 1, 2]
    other = expected_logsumexp(mean[:, order] + 1234.5, variance[:, order])
    close(other.value - 1234.5, ours.value, 1e-11)
    close(other.slope, ours.slope[:, order], 1e-11)
    far = np.full((100, 1), -700.0)
    beside = expected_logsumexp(np.hstack([mean, far]), np.hstack([variance, np.ones((100, 1))]))
    close(beside.value, ours.value)
    close(beside.slope[:, :5], ours.slope)
    assert np.all(beside.slope[:, 5] < 1e-100)


@pytest.mark.parametrize("size", [1e13, 1e40, 1e125, 1e150])
def test_classes_of_any_size(size):
    """Far above the scale of the logarithm it is E max(f₁, f₂) = m₁ Φ(a) + m₂ Φ(-a) + θ φ(a), with a = (m₁ - m₂)/θ."""
    mean, sd = torch.tensor([[0.3, -0.5]], dtype=torch.float64), torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    theta = math.sqrt(1.25)
    a = 0.8 / theta
    share = special.ndtr(a)
    largest = 0.3 * share - 0.5 * (1 - share) + theta * math.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    found = viper.expected_logsumexp(size * mean, (size * sd) ** 2)
    assert float(found.value) / size == pytest.approx(largest, rel=1e-9)
    assert float(found.slope[0, 0]) == pytest.approx(share, rel=1e-9)
    narrow = viper.expected_logsumexp(np.array([0.0, 1.0, -1.0]), np.array([size**2, 1.0, 0.0]))
    assert float(narrow.slope[0]) == pytest.approx(0.5, abs=1e-9)  # one class as wide as that beside narrow ones


def test_one_class():
    ours = expected_logsumexp(np.array([[2.5], [-1.0]]), np.array([[4.0], [0.0]]))
    close(ours.value, [2.5, -1.0])
    close(ours.slope, 1.0)
    close(ours.curvature, 0.0)


@pytest.mark.parametrize("tolerance", [1e-5, 1e-8])
def test_the_tolerance_holds(route, tolerance):
    for least, most, span in SCALES:
        mean, variance = classes(30, 4, least, most, span, seed=2)
        exact = expected_logsumexp(mean, variance, tolerance=1e-12)
        ours = expected_logsumexp(mean, variance, tolerance=tolerance)
        for field in FIELDS:
            close(getattr(ours, field), getattr(exact, field), tolerance)


# --- the parts of the proof ---


@pytest.mark.parametrize("y", [0.1, 1.0, 9.0, 40.0])
def test_size_of_the_gamma_function(y):
    for order in (1, 2):
        exact = special.loggamma(order + 1j * y).real
        assert logsumexp.log_gamma_size(y, order) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("sd", [0.0, 0.01, 0.03, 0.2, 0.5, 1.0, 5.9, 6.1, 50.0])
def test_smoothed_gumbel_function(sd):
    """Q(u; τ) and its derivative against mpmath, relatively to Q: the sum over many classes needs small Q."""
    precision, step = Precision(1e-10), 0.34
    for shift, i in ((0.1, 0), (-0.16, 2), (0.0, 9), (0.05, -6)):
        u = i * step - shift

        def smoothed(f, u=u):
            edges = np.linspace(-12, 12, 25).tolist()
            return float(mpmath.quad(lambda z: mpmath.npdf(z) * f(sd * z - u), edges)) if sd else float(f(-u))

        exact = smoothed(lambda x: -mpmath.expm1(-mpmath.exp(x))), smoothed(lambda x: mpmath.exp(x - mpmath.exp(x)))
        at, around = torch.tensor([sd], dtype=torch.float64), torch.tensor([shift], dtype=torch.float64)
        if sd > gumbel.WIDEST:
            ours = gumbel.mixed_gaussians(torch.tensor([u], dtype=torch.float64), at, 2, gumbel.gumbel_rule())[:, 0]
        else:
            one = sd_level(precision, step, int(level_index(precision, step, at)))
            ours = (one.weights(around, at) @ one.on(CPU, 2)[0])[:, 0, i - one.first]
        np.testing.assert_array_less(np.abs(np.asarray(ours.tolist()) - exact), precision.relative * exact[0] + 1e-13)


def test_gauss_rule_for_the_gumbel_weight():
    """It integrates powers up to 2n - 1; the moments follow from the cumulants (j-1)! ζ(j) and γ."""
    nodes, weights = (x.numpy() for x in gumbel.gumbel_rule())
    cumulants = [0.0, logsumexp.EULER, *(math.factorial(j - 1) * special.zeta(j) for j in range(2, 20))]
    moments = [1.0]
    for n in range(1, 20):
        moments.append(sum(math.comb(n - 1, j - 1) * cumulants[j] * moments[n - j] for j in range(1, n + 1)))
    np.testing.assert_allclose([weights @ nodes**n for n in range(20)], moments, rtol=1e-11)


# --- derivatives and transforms ---


def points():
    mean = [[0.3, -0.5, 1.2], [2.0, 5.0, 0.0]]
    variance = [[0.001, 0.05, 0.3], [40.0, 1.0, 4.0]]
    return [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (mean, variance)]


def test_gradients():
    def everything(mean, variance):
        return tuple(expected_logsumexp(mean, variance, tolerance=1e-12, cross=True))

    assert gradcheck(everything, points(), atol=1e-6, rtol=1e-4, check_forward_ad=True)
    assert gradgradcheck(lambda m, v: everything(m, v)[0], points(), atol=1e-6, rtol=1e-4)


def test_slope_and_curvature_are_the_gradient(route):
    mean, variance = points()
    ours = expected_logsumexp(mean, variance)
    d_mean, d_variance = torch.autograd.grad(ours.value.sum(), (mean, variance))
    assert torch.equal(d_mean, ours.slope)
    assert torch.equal(2 * d_variance, ours.curvature)


def test_transforms():
    mean, variance = (x.detach() for x in points())
    whole = expected_logsumexp(mean, variance, cross=True)

    def value(m, v):
        return expected_logsumexp(m, v).value

    close(vmap(value)(mean, variance), whole.value, 1e-11)
    close(vmap(value, in_dims=(0, None))(mean, variance[1])[1], whole.value[1], 1e-11)
    close(vmap(grad(value))(mean, variance), whole.slope, 1e-11)
    expected = torch.diag_embed(whole.slope) - whole.cross
    close(vmap(hessian(value))(mean, variance), expected)
    close(vmap(jacrev(lambda m, v: expected_logsumexp(m, v).slope))(mean, variance), expected)


def test_a_third_derivative_is_refused():
    mean, variance = points()
    first = torch.autograd.grad(expected_logsumexp(mean, variance).value.sum(), mean, create_graph=True)[0]
    second = torch.autograd.grad(first[:, 0].sum(), mean, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="differentiable twice"):
        second.sum().backward()


# --- any input ---


def test_kinds_of_arrays(route):
    mean, variance = classes(24, 5, 0.01, 2, 6)
    ours = viper.expected_logsumexp(mean, variance)
    assert [type(x) for x in ours] == [np.ndarray] * 3 + [type(None)]
    shaped = expected_logsumexp(mean.reshape(2, 3, 4, 5), variance.reshape(2, 3, 4, 5), cross=True)
    assert [x.shape for x in shaped] == [(2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5), (2, 3, 4, 5, 5)]
    close(shaped.value.ravel(), ours.value, 1e-11)
    single = expected_logsumexp(*(torch.tensor(x, dtype=torch.float32) for x in (mean, variance)))
    for field in FIELDS:
        found, exact = getattr(single, field), getattr(ours, field)
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found, exact, rtol=2e-6, atol=1e-7)
    shared = expected_logsumexp(mean, variance[:1])
    close(shared.value[1], expected_logsumexp(mean[1], variance[0]).value, 1e-11)
    assert expected_logsumexp(mean[:0], variance[:0]).slope.shape == (0, 5)
    close(expected_logsumexp(mean, 0.5).value, expected_logsumexp(mean, np.full_like(mean, 0.5)).value, 1e-14)


def test_blocks_change_nothing(monkeypatch):
    mean, variance = classes(60, 4, 0.01, 300, 50)
    whole = expected_logsumexp(mean, variance, cross=True)
    monkeypatch.setattr(logsumexp, "FLOATS", 1)
    for field, part in zip((*FIELDS, "cross"), expected_logsumexp(mean, variance, cross=True), strict=True):
        close(part, getattr(whole, field), 1e-11)


def test_long_integrals_are_cut():
    """A narrow class beside one of sd 1,000 takes a few hundred nodes, not forty thousand."""
    x, sd = torch.tensor([[0.0, 0.0]], dtype=torch.float64), torch.tensor([[0.0, 1e3]], dtype=torch.float64)
    pieces = logsumexp.plan_pieces(x, sd, DEFAULT_TOLERANCE)
    assert len(pieces.row) > 1
    assert int(pieces.nodes.sum()) < 2500
    t = torch.linspace(-3, 3e3, 1000, dtype=torch.float64)
    windows = [
        logsumexp.window_of(logsumexp.Pieces(*(part[i : i + 1] for part in pieces))._replace(first=t[:1] * 0), 1.0, t)
        for i in range(len(pieces.row))
    ]
    close(sum(window[0] for window in windows), 1.0, 1e-15)


@pytest.mark.parametrize(
    ("mean", "variance", "options", "message"),
    [
        (0.0, 1.0, {}, r"classes on their last axis; got shape \(\)"),
        (np.zeros((3, 0)), 1.0, {}, "classes on their last axis"),
        (np.zeros(3), -1.0, {}, "variance must be finite and not negative; got -1.0"),
        (np.array([0.0, np.nan]), 1.0, {}, "mean must be finite; got nan"),
        (np.zeros(3), np.zeros(2), {}, "shapes that broadcast"),
        (np.zeros(3), 1.0, {"tolerance": 1e-15}, "tolerance must be at least 1e-12 and finite; got 1e-15"),
        (np.zeros(3), 1.0, {"tolerance": "fast"}, "tolerance must be"),
    ],
)
def test_bad_input(mean, variance, options, message):
    with pytest.raises(ValueError, match=message):
        expected_logsumexp(mean, variance, **options)


@pytest.mark.cuda
def test_on_a_gpu():
    for least, most, span in SCALES:
        mean, variance = classes(100, 6, least, most, span)
        here = expected_logsumexp(mean, variance, cross=True)
        there = expected_logsumexp(*(torch.tensor(x, device="cuda") for x in (mean, variance)), cross=True)
        for field in (*FIELDS, "cross"):
            close(getattr(there, field).cpu(), getattr(here, field), 2 * DEFAULT_TOLERANCE)
