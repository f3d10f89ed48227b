"""The compiled pass over rows against the plain one, and its nodes against mpmath."""

import math
import shutil
import threading
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from types import SimpleNamespace

import mpmath as mp
import numpy as np
import pytest
import torch
from softplus_reference import expectations

from viper import VariationalLogisticRegression
from viper.inference.classes.sums import RowHessian
from viper.inference.kernels import choice, compiled, library
from viper.inference.kernels.compiled import compiled_sums
from viper.inference.rows import Block, Dense
from viper.inference.start import without_variance
from viper.inference.steps import largest_curvature
from viper.inference.sums import row_sums
from viper.models.fitting import ROUGH_TOLERANCE
from viper.softplus import c_library
from viper.softplus.limit import limit
from viper.softplus.pointwise import EXACT_NODES, KernelRecipe
from viper.softplus.quadrature import LARGEST_SD, NEAR_POLE, NEAR_POLE_SIZE, gauss_reach, node_sets

EPS = np.finfo(float).eps

built = pytest.mark.skipif(not library.is_compiled(), reason="viper was installed without a C compiler")


# --- the nodes ---


@pytest.mark.parametrize("tolerance", [EXACT_NODES, ROUGH_TOLERANCE])
def test_nodes_are_as_good_as_they_say(tolerance):
    """At the end of each set's reach, where errors are largest; nodes and weights are rounded to float64."""
    rng = np.random.default_rng(0)
    with mp.workdps(30):
        for nodes in node_sets(tolerance)[1:]:
            tau = mp.sqrt(nodes.reach)
            for mean in (0.0, float(rng.uniform(-3, 0)), float(rng.uniform(-30, -3))):
                points = [mean + sign * tau * mp.mpf(z) for z in nodes.z.tolist() for sign in (1, -1)]
                weights = [w for w in nodes.weights.tolist() for _ in (1, -1)]
                s = [1 / (1 + mp.exp(-x)) for x in points]
                terms = [[mp.log1p(mp.exp(x)) for x in points], s, [x * (1 - x) for x in s]]
                sums = [mp.fdot(weights, part) for part in terms]
                errors = [abs(x - y) for x, y in zip(sums, expectations(mean, nodes.reach)[:3], strict=True)]
                assert errors[0] < (tolerance + 4e-16) * (1 + abs(mean) + tau)
                assert max(errors[1:]) < tolerance + 4e-16


def test_fewer_nodes_for_less():
    for tolerance in (EXACT_NODES, ROUGH_TOLERANCE):
        sets = node_sets(tolerance)
        assert sets[0].reach == 0.0
        assert sets[-1].reach == LARGEST_SD**2
        assert all(a.reach < b.reach and len(a.z) <= len(b.z) for a, b in pairwise(sets))
        assert all(float(s.weights.sum()) == pytest.approx(0.5, abs=1e-15) for s in sets)


@pytest.mark.parametrize("count", [2, 5, 12])
def test_the_reach_of_gauss_hermite_is_that_of_its_remainder(count):
    """n!/(2n)! v^n max|f^{(2n+2)}|, the maximum from the poles of the logistic; at most 1.24 times too large."""
    v, order = gauss_reach(count, 1e-9), 2 * count + 1
    with mp.workdps(40):
        largest = abs((2 ** (order + 1) - 1) * mp.bernoulli(order + 1) / (order + 1))
        remainder = mp.factorial(count) / mp.factorial(2 * count) * mp.mpf(v) ** count * largest
    assert 1e-9 / 1.24 < float(remainder) <= 1e-9


def test_near_the_pole_nothing_is_larger_than_assumed():
    """|f|, |f'| and |f''| on the line to which the integral of the trapezoidal rule is shifted, for x = ϑ + τz."""
    x = np.linspace(-60.0, 60.0, 24_001)
    w = x + 1j * NEAR_POLE
    s = 1.0 / (1.0 + np.exp(-w))
    f = np.abs(np.log1p(np.exp(w))) / (1.0 + np.abs(x))
    assert math.pi > NEAR_POLE
    assert 2.0 * max(f.max(), np.abs(s).max(), np.abs(s * (1.0 - s)).max()) < NEAR_POLE_SIZE


# --- the sums ---


def make_block(rows, columns, intercept, everything, order, seed=0):
    """Some rows, with or without offset, residual variance and weights, stored by rows, by columns or with gaps."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((rows, columns))
    X = {"C": X, "F": np.asfortranarray(X), "gaps": np.repeat(np.repeat(X, 2, 0), 3, 1)[::2, ::3]}[order]
    label = torch.from_numpy(rng.random(rows).round())
    extra = {"offset": rng.standard_normal(rows), "residual": 0.1 * rng.random(rows), "weight": rng.random(rows)}
    extra = {name: torch.from_numpy(x) for name, x in extra.items()} if everything else {}
    return Block(Dense(torch.from_numpy(X), intercept), label, **extra)


def parameters(size, spread, seed=1):
    rng = np.random.default_rng(seed)
    factor = np.triu(rng.standard_normal((size, size))) * spread / math.sqrt(size)
    return torch.from_numpy(0.7 * rng.standard_normal(size)), torch.from_numpy(factor)


def both(block, mean, factor, formula, recipe, gram="full"):
    """The sums by compiled code and by plain formulas."""
    fast = compiled_sums(block, recipe, mean, factor, gram, False)
    return fast, row_sums(block, mean, factor, formula, None, gram, False, True)


def assert_same(fast, plain, rtol=4e-15):
    assert fast is not None
    for mine, reference in zip(fast, plain, strict=True):
        assert mine.shape == reference.shape
        largest = float(reference.abs().max()) if reference.numel() else 0.0
        torch.testing.assert_close(mine, reference, rtol=0.0, atol=rtol * largest)


@built
@pytest.mark.parametrize("order", ["C", "F", "gaps"])
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "intercept"),
    [
        (1, 1, False),
        (7, 1, True),
        (127, 2, True),
        (128, 8, False),
        (129, 7, True),
        (300, 25, True),
        (500, 63, True),
        (150, 255, True),
    ],
)
def test_sums_are_those_of_the_plain_formulas(rows, columns, intercept, everything, order):
    block = make_block(rows, columns, intercept, everything, order)
    mean, factor = parameters(columns + intercept, 0.3)
    assert_same(*both(block, mean, factor, limit().moments, KernelRecipe("heat", nodes=EXACT_NODES)))


@pytest.mark.parametrize("width", c_library.WIDTHS)
@pytest.mark.parametrize("order", ["C", "F", "gaps"])
@pytest.mark.parametrize(("rows", "columns"), [(3, 9), (150, 16), (200, 26), (4100, 70)])
def test_vectors_of_any_length_give_the_same_sums(monkeypatch, width, order, rows, columns):
    functions = c_library.right_functions(library.ROWS_MODULE + width, library.ARGUMENTS, library.is_right)
    if functions is None:
        pytest.skip("not built, or not for this machine")
    monkeypatch.setattr(compiled, "library", lambda: library.Library(*functions))
    block = make_block(rows, columns, True, True, order)
    mean, factor = parameters(columns + 1, 0.3)
    for recipe, of_sigma, gram in (("heat", factor, "full"), ("heat", factor[:, 0].square(), "diagonal")):
        assert_same(*both(block, mean, of_sigma, limit().moments, KernelRecipe(recipe, nodes=EXACT_NODES), gram))


@pytest.mark.parametrize("width", [*c_library.WIDTHS, None])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 101])
@pytest.mark.parametrize("columns", [1, 3, 8, 26])
def test_columns_become_rows_and_nothing_odd_is_missed(monkeypatch, width, rows, columns):
    """In compiled code and, without it, in NumPy."""
    functions = None
    if width is not None:
        functions = c_library.right_functions(library.ROWS_MODULE + width, library.ARGUMENTS, library.is_right)
        if functions is None:
            pytest.skip("not built, or not for this machine")
    monkeypatch.setattr(compiled, "library", lambda: functions and library.Library(*functions))
    rng = np.random.default_rng(rows + columns)
    given, out = list(1e308 * rng.uniform(-1.0, 1.0, (columns, rows))), np.empty((rows, columns))
    assert compiled.join_columns(given, out)  # though their sum overflows
    np.testing.assert_array_equal(out, np.column_stack(given))
    for odd in (math.nan, math.inf, -math.inf):
        changed, i, j = [x.copy() for x in given], rng.integers(rows), rng.integers(columns)
        changed[j][i] = odd
        assert not compiled.join_columns(changed, out)
        np.testing.assert_array_equal(out, np.column_stack(changed))


@built
@pytest.mark.parametrize("spread", [0.0, 1e-9, 1e-3, 0.02, 0.1, 0.3, 1.0, 3.0])
def test_every_variance_within_reach(spread):
    block = make_block(400, 5, True, False, "C")
    mean, factor = parameters(6, 0.9 * spread)
    assert_same(*both(block, mean, factor, limit().moments, KernelRecipe("heat", nodes=EXACT_NODES)))
    fast, plain = both(block, mean, factor, limit().moments, KernelRecipe("heat", nodes=ROUGH_TOLERANCE))
    assert_same(fast, plain, 2e-8)


@built
@pytest.mark.parametrize("gram", ["full", "none"])
def test_without_variance_and_with_the_largest_curvature(gram):
    block = make_block(300, 9, True, True, "C")  # with a residual variance, which these ignore
    mean, _ = parameters(10, 0.0)
    fast, plain = both(block, mean, None, without_variance, KernelRecipe("softplus"), gram)
    assert_same([fast[0], *fast[2:]], [plain[0], *plain[2:]])
    fast, plain = both(block, mean, None, largest_curvature, KernelRecipe("quarter"), gram)
    assert_same(fast[2:], plain[2:])


@built
@pytest.mark.parametrize("kind", ["full", "lower", "diagonal", "some zero"])
def test_any_factor(kind):
    block = make_block(200, 10, False, False, "C")
    mean, factor = parameters(10, 0.4)
    other = torch.randn(10, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.1
    holes = factor.clone()
    holes[:, 3], holes[2], holes[5, 5] = 0.0, 0.0, 0.0
    factor = {"full": other, "lower": other.tril(), "diagonal": other[0].square(), "some zero": holes}[kind]
    assert_same(*both(block, mean, factor, limit().moments, KernelRecipe("heat", nodes=EXACT_NODES)))


@built
def test_one_row_is_the_softplus_to_rounding():
    """The exponential and the logarithm of _rows.c, from the smallest numbers to the largest."""
    one = torch.ones(1, 1, dtype=torch.float64)
    with mp.workdps(60):
        for size in (0.0, 1e-300, 1e-17, 1e-9, 0.1, math.log(2.0), 1.0, 5.0, 36.0, 40.0, 300.0, 700.0, 1e4, 1e300):
            for theta in (size, -size):
                mean = torch.tensor([theta], dtype=torch.float64)
                label = torch.zeros(1, dtype=torch.float64)
                value, magnitude, slope, curvature = compiled_sums(
                    Block(Dense(one), label), KernelRecipe("softplus"), mean, None, "full", False
                )
                exact = mp.log1p(mp.exp(theta)) if theta < 709 else mp.mpf(theta)
                s, rest = (1 / (1 + mp.exp(-mp.mpf(x))) for x in (theta, -theta))
                assert float(value) == pytest.approx(-float(exact), rel=1e-15, abs=1e-300)
                assert float(slope) == pytest.approx(-float(s), rel=2e-15, abs=1e-300)
                assert float(curvature) == pytest.approx(float(s * rest), rel=3e-15, abs=1e-300)
                assert float(magnitude) == pytest.approx(size + 1.0)


@built
def test_rounding_is_as_the_certificate_says():
    """η within 10⁻¹⁶ (1 + |ϑ| + τ) and |ϑ| + τ + 40 roundings of mpmath's; g and h within as many as a sum of nodes."""
    rng = np.random.default_rng(0)
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    with mp.workdps(30):
        for _ in range(60):
            theta, tau = float(rng.normal() * 10 ** rng.uniform(-2, 2)), float(10 ** rng.uniform(-4, math.log10(8.0)))
            mean, factor = torch.tensor([theta]).double(), torch.tensor([[tau]]).double()
            sums = compiled_sums(Block(Dense(one), zero), KernelRecipe("heat"), mean, factor, "full", False)
            eta, g, h = expectations(mp.mpf(float(mean)), mp.mpf(float(factor)) ** 2)[:3]
            size = 1.0 + abs(theta) + tau
            assert abs(float(mp.mpf(-float(sums[0])) - eta)) < EXACT_NODES * size + EPS * (size + 39.0)
            assert abs(float(mp.mpf(-float(sums[2])) - g)) < EXACT_NODES + 40.0 * EPS
            assert abs(float(mp.mpf(float(sums[3])) - h)) < EXACT_NODES + 40.0 * EPS


@built
def test_far_away_nothing_is_left():
    """Where e^-|ϑ| underflows, h is 0, so that a huge x does not turn it into a curvature."""
    X = torch.tensor([[1e200]], dtype=torch.float64)
    ones = torch.ones(1, dtype=torch.float64)
    block = Block(Dense(X), 0.0 * ones)
    value, _, slope, curvature = compiled_sums(block, KernelRecipe("softplus"), -ones, None, "full", False)
    assert (float(value), float(slope), float(curvature)) == (0.0, 0.0, 0.0)


@built
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_seen(bad):
    block = make_block(150, 3, True, False, "C")
    block.design.matrix[140, 1] = bad
    mean, factor = parameters(4, 0.1)
    fast, plain = both(block, mean, None, without_variance, KernelRecipe("softplus"))
    assert not math.isfinite(float(fast[0]))
    assert not math.isfinite(float(plain[0]))
    fast, _ = both(block, mean, factor, limit().moments, KernelRecipe("heat"))
    assert fast is None or not math.isfinite(float(fast[0]))


@built
def test_beyond_the_reach_the_plain_formulas_take_over(monkeypatch):
    """Ten rows and a prior so wide that standard deviations of rows exceed LARGEST_SD."""
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((10, 3)), np.arange(10) % 2
    answers = []
    returned = []
    original = choice.compiled_sums

    def spy(*arguments):
        returned.append(original(*arguments))
        return returned[-1]

    for replacement in (spy, lambda *_: None):
        monkeypatch.setattr(choice, "compiled_sums", replacement)
        answers.append(VariationalLogisticRegression(prior_scale=200.0).fit(X, y))
    assert any(x is None for x in returned)
    assert any(x is not None for x in returned)
    np.testing.assert_allclose(answers[0].coef_, answers[1].coef_, rtol=1e-6)
    np.testing.assert_allclose(answers[0].elbo_, answers[1].elbo_, rtol=1e-9)


@built
@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_a_fit_is_the_same_without_it(monkeypatch, covariance):
    rng = np.random.default_rng(3)
    X = rng.standard_normal((1000, 8))
    y = rng.random(1000) < 1 / (1 + np.exp(-X @ rng.standard_normal(8)))
    compiled_fit = VariationalLogisticRegression(covariance=covariance).fit(X, y)
    monkeypatch.setattr(choice, "compiled_sums", lambda *_: None)
    plain = VariationalLogisticRegression(covariance=covariance).fit(X, y)
    assert compiled_fit.passes_ == plain.passes_
    np.testing.assert_allclose(compiled_fit.coef_, plain.coef_, rtol=1e-7)
    np.testing.assert_allclose(compiled_fit.elbo_, plain.elbo_, rtol=1e-12)


@built
def test_threads_do_not_disturb_each_other():
    block = make_block(20_000, 12, True, True, "C")
    mean, factor = parameters(13, 0.3)
    answers = [None] * 8

    def work(i):
        answers[i] = both(block, mean, factor, limit().moments, KernelRecipe("heat", nodes=EXACT_NODES))[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(mine, first) for sums in answers for mine, first in zip(sums, answers[0], strict=True))


def zero(*arguments):
    return 0


@pytest.mark.parametrize("trouble", ["none", "no library", "an older one", "wrong sums"])
def test_without_a_library_that_is_right_there_is_no_compiled_pass(monkeypatch, tmp_path, trouble):
    path = tmp_path / "_rows.so"
    path.write_text("no library")
    monkeypatch.setattr(
        c_library, "find_spec", lambda _: None if trouble == "none" else SimpleNamespace(origin=str(path))
    )
    if trouble == "an older one":
        monkeypatch.setattr(c_library.ctypes, "CDLL", lambda _: SimpleNamespace(row_sums_0=zero))
    if trouble == "wrong sums":
        monkeypatch.setattr(
            c_library.ctypes, "CDLL", lambda _: SimpleNamespace(**dict.fromkeys(library.ARGUMENTS, zero))
        )
    library.library.cache_clear()
    try:
        assert not library.is_compiled()
        model = VariationalLogisticRegression().fit(np.arange(8.0)[:, None], np.arange(8) % 3 > 0)
        assert model.converged_
    finally:
        monkeypatch.undo()
        library.library.cache_clear()


def test_it_is_there_where_viper_was_installed_with_a_compiler():
    """Otherwise all tests that need it would be skipped silently."""
    try:
        version("vi-per")
    except PackageNotFoundError:
        pytest.skip("viper is run from its sources")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    assert library.is_compiled()


@built
@pytest.mark.parametrize("order", ["C", "F", "gaps"])
@pytest.mark.parametrize(
    ("rows", "columns", "classes"), [(1, 1, 3), (95, 2, 4), (300, 25, 5), (193, 64, 10), (97, 200, 3), (0, 3, 3)]
)
def test_classes_are_summed_as_one_after_the_other(rows, columns, classes, order):
    """Latent Gaussians, gradients, curvatures and products with the Hessian, by products with one matrix at a time."""
    design, size = make_block(rows, columns, True, False, order).design, columns + 1
    rng = np.random.default_rng(3)
    mean = torch.from_numpy(rng.standard_normal((classes, size)))
    factor = torch.from_numpy(np.triu(rng.standard_normal((classes, size, size))))
    assert_same(
        compiled.class_latent(design, mean, factor),
        (design.project(mean.T.contiguous()), torch.stack([design.spread(one) for one in factor], 1)),
    )
    g, h = torch.from_numpy(rng.standard_normal((2, rows, classes)))
    for columns_of_h in (h, h[:, :1], h[:, :0]):
        grams = [design.gram(one) for one in columns_of_h.T.contiguous()]
        plain = design.pull(g).T, torch.stack(grams) if grams else g.new_zeros(0, size, size)
        assert_same(compiled.class_gather(design, g, columns_of_h), plain, 1e-13)
    hessian = RowHessian(torch.softmax(g, 1), h[:, 0].abs())
    plain = design.pull(hessian.times(design.project(mean.T.contiguous()))).T
    assert_same([compiled.class_hessian(design, mean, *hessian)], [plain], 1e-13)


@built
def test_no_rows():
    block = make_block(0, 3, True, False, "C")
    mean, factor = parameters(4, 0.1)
    fast = compiled_sums(block, KernelRecipe("heat"), mean, factor, "full", False)
    assert all(not x.any() for x in fast)
