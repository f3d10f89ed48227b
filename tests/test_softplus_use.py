"""The kernel as it is used: differentiated, transformed, compiled, given any input, in blocks, on a GPU."""

import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from memory import PEAK
from softplus_cases import FLOAT32, OPTIONS, PROMISED, STD, STD_FLOOR, both_dtypes, box, every_bound, sample_points
from tolerances import TOLERANCE
from torch.autograd import gradcheck, gradgradcheck

from viper.softplus import pointwise
from viper.softplus.expectation import expected_sigmoid, expected_softplus, terms_needed

EPS = np.finfo(float).eps


# --- derivatives and transforms ---


@every_bound
def test_gradients(options):
    inputs = sample_points(requires_grad=True)
    assert gradcheck(lambda m, v: tuple(expected_softplus(m, v, **options)), inputs, check_forward_ad=True)
    assert gradgradcheck(lambda m, v: expected_softplus(m, v, **options).value, inputs)


@every_bound
def test_second_derivatives_against_differences(options):
    """Central differences of slope and curvature, closer than gradcheck's 1e-3."""
    mean, variance = sample_points(requires_grad=True)
    _, slope, curvature = expected_softplus(mean, variance, **options)
    ours = [*torch.autograd.grad(slope.sum(), (mean, variance), retain_graph=True)]
    ours += torch.autograd.grad(curvature.sum(), (mean, variance))
    mean, variance = mean.detach(), variance.detach()
    zero, steps = torch.zeros_like(mean), (torch.full_like(mean, 1e-5), 3e-5 * variance)
    differences = {}
    for i, shift in enumerate(((steps[0], zero), (zero, steps[1]))):
        up = expected_softplus(mean + shift[0], variance + shift[1], **options)
        down = expected_softplus(mean - shift[0], variance - shift[1], **options)
        differences |= {(field, i): (getattr(up, field) - getattr(down, field)) / (2 * steps[i]) for field in PROMISED}
    exact = [differences[field, i] for field in ("slope", "curvature") for i in (0, 1)]
    # Rounding is divided by steps down to 6e-8; the fast path's expansion and partials differ by more than 1e-8
    atol = 1e-6 if "tolerance" in options else TOLERANCE["differences"]
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=atol)


@every_bound
def test_slope_and_curvature_are_the_gradient(options):
    mean, variance = sample_points(requires_grad=True)
    value, slope, curvature = expected_softplus(mean, variance, **options)
    d_mean, d_variance = torch.autograd.grad(value.sum(), (mean, variance))
    assert torch.equal(d_mean, slope)
    assert torch.equal(2 * d_variance, curvature)


@every_bound
def test_function_transforms(options):
    """grad, vmap over either argument, and hessian agree with plain evaluation and with each other."""
    mean, variance = sample_points()

    def value(point):
        return expected_softplus(point[0], point[1], **options).value

    plain = expected_softplus(mean, variance, **options)
    gradient = torch.func.vmap(torch.func.grad(value))(torch.stack([mean, variance], 1))
    exact = torch.stack([plain.slope, plain.curvature / 2], 1)
    torch.testing.assert_close(gradient, exact, rtol=TOLERANCE["roundoff"], atol=0)
    over_mean = torch.func.vmap(lambda m: expected_softplus(m, variance[:2], **options).value)(mean)
    again = expected_softplus(mean[:, None], variance[:2], **options).value
    torch.testing.assert_close(over_mean, again, rtol=TOLERANCE["roundoff"], atol=0)
    point = torch.tensor([-0.4, 0.7], dtype=torch.float64)
    hessian = torch.func.hessian(value)(point)
    partials = torch.autograd.functional.hessian(value, point)
    torch.testing.assert_close(hessian, partials, rtol=TOLERANCE["roundoff"], atol=0)
    torch.testing.assert_close(hessian, hessian.T, rtol=TOLERANCE["roundoff"], atol=0)


def test_hessian_of_the_limit_solves_the_heat_equation():
    """∂η/∂v = ½ ∂²η/∂ϑ²."""
    mean, variance = sample_points(requires_grad=True)
    _, slope, curvature = expected_softplus(mean, variance)
    (second,) = torch.autograd.grad(slope.sum(), mean)
    torch.testing.assert_close(second, curvature, rtol=TOLERANCE["special"], atol=0)


def test_third_derivative_is_refused():
    mean = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(expected_softplus(mean, 1.0).value, mean, create_graph=True)
    (second,) = torch.autograd.grad(slope, mean, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable twice"):
        torch.autograd.grad(second, mean)


def compiling(test):
    """Mark a test that compiles: torch emits warnings about its own code there."""
    for message in ("should not be instantiated", ".torch.jit.script_method. is deprecated"):
        test = pytest.mark.filterwarnings(f"ignore:.*{message}:DeprecationWarning")(test)
    return test


def compiled_equals_eager(options, backend, dtype=torch.float64):
    """Forward and backward of a compiled function against eager mode, on points of every regime."""

    def moments_and_gradients(function, mean, variance):
        mean, variance = mean.clone().requires_grad_(), variance.clone().requires_grad_()
        outputs = function(mean, variance)
        weights = (1.0, 0.5, 2.0)
        total = sum(w * x.sum() for w, x in zip(weights, outputs, strict=True))
        return [*outputs, *torch.autograd.grad(total, (mean, variance))]

    def function(mean, variance):
        return tuple(expected_softplus(mean, variance, **options))

    mean, variance = (x.to(dtype) for x in sample_points())
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    ours = moments_and_gradients(compiled, mean, variance)
    torch.compiler.reset()
    eager = moments_and_gradients(function, mean, variance)
    # exp and erfcx come from another library, and sums are in another order; large terms cancel in ∂h/∂v
    rtol = TOLERANCE["autograd"] if dtype == torch.float64 else TOLERANCE["float32"]
    # A compiler cannot see variances, and takes the longest expansion where eager mode takes one that is long enough
    atol = max(rtol / 100, options.get("tolerance", 0.0))
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=atol)


@every_bound
@both_dtypes
@compiling
def test_one_graph_is_captured(options, dtype):
    compiled_equals_eager(options, "aot_eager", dtype)


needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")


@needs_compiler
@pytest.mark.slow
@compiling
@pytest.mark.parametrize("name", ["limit", "fast"])
def test_compiled(name):
    compiled_equals_eager(OPTIONS[name], "inductor")


# --- shapes and types ---


@pytest.mark.parametrize("mean", [0.5, 1, np.float32(0.5), np.float64(0.5), np.array(0.5)], ids=repr)
def test_numbers_give_floats(mean):
    result = expected_softplus(mean, 2.0)
    assert [type(x) for x in result] == [float] * 3
    assert [type(x) for x in expected_sigmoid(mean, 2.0)] == [float] * 2
    assert type(terms_needed(mean, 2.0, 0.01)) is int
    assert result.value == pytest.approx(expected_softplus(np.array([float(mean)]), 2.0).value[0], rel=EPS)


@pytest.mark.parametrize(
    ("mean_shape", "variance_shape", "shape"),
    [((3,), (), (3,)), ((), (2, 2), (2, 2)), ((4, 1), (3,), (4, 3)), ((0,), (), (0,)), ((2, 0), (2, 1), (2, 0))],
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@every_bound
def test_arrays_broadcast(mean_shape, variance_shape, shape, dtype, options):
    mean, variance = np.full(mean_shape, 0.5, dtype), np.full(variance_shape, 2.0, dtype)
    one = expected_softplus(0.5, 2.0, **options)
    for ours, number in zip(expected_softplus(mean, variance, **options), one, strict=True):
        assert isinstance(ours, np.ndarray)
        assert (ours.shape, ours.dtype) == (shape, dtype)
        np.testing.assert_allclose(ours, number, rtol=FLOAT32)
    for ours in expected_softplus(torch.from_numpy(mean), torch.from_numpy(variance), **options):
        assert isinstance(ours, torch.Tensor)
        assert (tuple(ours.shape), ours.numpy().dtype) == (shape, dtype)
    assert expected_sigmoid(mean, variance).std.shape == shape
    assert terms_needed(mean, variance, 0.01).shape == shape


def test_dtypes_combine():
    single, double = torch.zeros(2), torch.ones(2, dtype=torch.float64)
    assert expected_softplus(single, double).value.dtype == torch.float64
    assert expected_softplus(single, 1.0).value.dtype == torch.float32
    assert expected_softplus(1, single).value.dtype == torch.float32
    assert expected_softplus(single, np.ones(2)).value.dtype == torch.float64
    assert expected_softplus([0.0, 1.0], 1.0).value.dtype == np.float64
    assert terms_needed(single, 1.0, 0.1).dtype == torch.int64


def test_any_layout_of_memory():
    mean, variance = np.arange(6.0).reshape(2, 3) - 3, np.arange(6.0).reshape(2, 3)
    plain = expected_softplus(mean, variance).value
    np.testing.assert_array_equal(expected_softplus(mean.T, variance.T).value, plain.T)
    np.testing.assert_array_equal(expected_softplus(mean[:, ::-1], variance[:, ::-1]).value, plain[:, ::-1])
    np.testing.assert_array_equal(expected_softplus(torch.tensor(mean).T, torch.tensor(variance).T).value, plain.T)
    constant = np.broadcast_to(1.0, (4,))  # read-only
    assert expected_softplus(constant, constant).value.shape == (4,)


def test_input_is_left_alone():
    mean, variance = sample_points()
    before = mean.clone(), variance.clone()
    for options in OPTIONS.values():
        expected_softplus(mean, variance, **options)
    assert torch.equal(mean, before[0])
    assert torch.equal(variance, before[1])


# --- blocks ---


@every_bound
def test_pieces_equal_the_whole(options):
    mean, variance = box(70_000, seed=9)
    variance[:35_000] = variance[:35_000].sort().values
    whole = expected_softplus(mean, variance, **options)
    # The order of the fast path's expansion follows the largest variance of a block, within its tolerance
    atol = 2 * options.get("tolerance", 0.0)
    for start in (0, 4_500, 31_111, 69_000):
        piece = slice(start, start + 500)
        part = expected_softplus(mean[piece], variance[piece], **options)
        for field in PROMISED:
            # The ends of vectors go through another implementation of exp
            ours, again = getattr(whole, field)[piece], getattr(part, field)
            torch.testing.assert_close(ours, again, rtol=TOLERANCE["special"], atol=atol)


def test_more_floats_per_point_than_a_block_holds():
    samples = 4 * pointwise.BLOCK
    value = expected_softplus(np.zeros(2), np.ones(2), bound="mc", samples=samples, random_state=0).value
    np.testing.assert_allclose(value, expected_softplus(0.0, 1.0).value, atol=4 / math.sqrt(samples))


MEMORY = f"""{PEAK}
import torch, viper
torch.set_num_threads(1)
options, dtype = eval(sys.argv[1]), getattr(torch, sys.argv[2])
mean, variance = torch.empty(4_000_000, dtype=dtype).uniform_(-9, 9), torch.empty(4_000_000, dtype=dtype).uniform_(0, 9)
variance[::2] *= 1e-3
viper.expected_softplus(mean[:9], variance[:9], **options)
before = peak()
result = viper.expected_softplus(mean, variance, **options)
print(peak() - before - sum(x.nbytes for x in result))
"""


@pytest.mark.parametrize(
    ("options", "dtype"), [("{'tolerance': 1e-8}", "float64"), ("{'bound': 'certified'}", "float32")]
)
def test_memory_is_that_of_the_results(options, dtype):
    pytest.importorskip("resource")
    command = [sys.executable, "-c", MEMORY, options, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # 4,000,000 points hold 32 MB for each float in use; blocks need a few MB in all
    assert int(done.stdout) < 25_000_000


# --- bad input ---

NAN, INF = math.nan, math.inf
BAD_VALUES = [
    (NAN, 1.0, "mean must be finite; got nan."),
    (INF, 1.0, "mean must be finite; got inf."),
    (0.0, -1.0, "variance must be finite and not negative; got -1.0."),
    (0.0, -5e-324, "variance must be finite and not negative; got -5e-324."),
    (0.0, NAN, "variance must be finite and not negative; got nan."),
    (0.0, INF, "variance must be finite and not negative; got inf."),
    (np.array([0.0, -INF]), 1.0, "mean must be finite; got -inf at index (1,)."),
    (torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [-3.0, 4.0]]), "got -3.0 at index (1, 0)."),
    (np.zeros(3), np.zeros(2), "shapes that broadcast; got (3,) and (2,)."),
]
BAD_TYPES = [
    (torch.tensor([1, 2]), "mean must be float32 or float64; got torch.int64. Convert"),
    (torch.zeros(2, dtype=torch.float16), "got torch.float16"),
    (np.array([1, 2]), "mean must be float32 or float64; got int64. Convert"),
    (True, "got bool"),
    (None, "got object"),
    ("one", "got <U3"),
    (1j, "got complex128"),
]
BAD_OPTIONS = [
    ({"terms": 0}, "terms must be an integer >= 1; got 0."),
    ({"terms": -3}, "terms must be an integer >= 1; got -3."),
    ({"terms": 12.0}, "terms must be an integer >= 1; got 12.0."),
    ({"terms": True}, "terms must be an integer >= 1; got True."),
    ({"terms": [12]}, "terms must be an integer >= 1; got [12]."),
    ({"terms": "12"}, "terms must be an integer >= 1; got '12'."),
    ({"bound": "vipper"}, "bound must be one of ['viper', 'pg', 'mc', 'quadrature', 'certified']; got 'vipper'."),
    ({"bound": 0}, "got 0."),
    ({"bound": ["mc"]}, "got ['mc']."),
    ({"bound": "pg", "terms": 3}, "terms belongs to bound='viper'; got bound='pg', terms=3."),
    (
        {"bound": "certified", "tolerance": 1e-8},
        "tolerance belongs to the limit of bound='viper'; got bound='certified'",
    ),
    ({"terms": 3, "tolerance": 1e-8}, "tolerance belongs to the limit of bound='viper'; got bound='viper', terms=3."),
    ({"tolerance": 0.0}, "tolerance must be positive and finite; got 0.0. Use None"),
    ({"tolerance": -1e-8}, "got -1e-08."),
    ({"tolerance": NAN}, "got nan."),
    ({"tolerance": INF}, "got inf."),
    ({"tolerance": "small"}, "got 'small'."),
    ({"bound": "mc", "samples": 7}, "samples must be an even integer >= 2; got 7."),
    ({"bound": "mc", "samples": 1e3}, "samples must be an even integer >= 2; got 1000.0."),
    ({"bound": "mc", "random_state": -1}, "random_state must be an integer from 0 to 18446744073709551615; got -1."),
    ({"bound": "mc", "random_state": 2**64}, "got 18446744073709551616."),
    ({"bound": "quadrature", "nodes": 0}, "nodes must be an integer from 1 to 256; got 0."),
    ({"bound": "quadrature", "nodes": 257}, "nodes must be an integer from 1 to 256; got 257."),
]


def message_of(error, function, *args, **kwargs):
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(("mean", "variance", "message"), BAD_VALUES, ids=range(len(BAD_VALUES)))
def test_bad_values(mean, variance, message):
    for function in (expected_softplus, expected_sigmoid, lambda m, v: terms_needed(m, v, 0.01)):
        text = message_of(ValueError, function, mean, variance)
        assert message in text
        assert " must " in text


@pytest.mark.parametrize(("mean", "message"), BAD_TYPES, ids=range(len(BAD_TYPES)))
def test_bad_types(mean, message):
    assert message in message_of(TypeError, expected_softplus, mean, 1.0)
    assert message.replace("mean", "variance") in message_of(TypeError, expected_softplus, 1.0, mean)


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=str)
def test_bad_options(options, message):
    # An equal number of the right type has been used before; its bound must not be returned for the wrong type
    for terms in (1, 12):
        expected_softplus(0.0, 1.0, terms=terms)
    assert message in message_of(ValueError, expected_softplus, 0.0, 1.0, **options)


@pytest.mark.parametrize("threshold", [0.0, -0.1, 1e-16, NAN, INF, "1 %"])
def test_bad_relative_error(threshold):
    text = message_of(ValueError, terms_needed, 0.0, 1.0, threshold)
    assert text == f"relative_error must be at least 1e-15 and finite; got {threshold!r}. Use 0.01 for 1 %."


def test_options_may_be_numpy_integers():
    assert expected_softplus(0.0, 1.0, terms=np.int64(5)) == expected_softplus(0.0, 1.0, terms=5)


LIGHT = """
import sys
import viper.softplus
from viper.softplus.bound_names import BOUND_NAMES, FIT_BOUNDS
assert "torch" not in sys.modules
from viper.softplus import expected_softplus
assert expected_softplus is viper.softplus.expectation.expected_softplus is viper.expected_softplus
for bound in BOUND_NAMES:
    expected_softplus(0.0, 1.0, bound=bound)
assert {*BOUND_NAMES} - {*FIT_BOUNDS} == {"certified"}
"""


def test_the_words_of_the_bounds_load_no_torch_and_each_is_a_bound():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- on a GPU ---


@pytest.mark.cuda
@every_bound
@both_dtypes
def test_cuda_equals_cpu(options, dtype):
    mean, variance = box(300_000, seed=10, dtype=dtype)
    there = expected_softplus(mean.cuda(), variance.cuda(), **options)
    here = expected_softplus(mean, variance, **options)
    double = dtype == torch.float64
    rtol, tiny = (PROMISED["value"], 0.0) if double else (FLOAT32, torch.finfo(dtype).tiny)
    for field, a, b in zip(here._fields, there, here, strict=True):
        assert a.is_cuda
        atol = tiny
        if "tolerance" in options:  # absolute errors only; in float32 ϑg + Σpdφ rounds relative to |ϑ| <= 700
            atol = 1e-8 if double else 16 * torch.finfo(dtype).eps * 700
        elif options.get("bound") == "pg" and field == "slope":  # ½ + aϑ cancels
            atol = EPS
        elif "terms" in options and field == "curvature":  # h_3 passes through 0
            atol = 1e-12 * float(b[b.isfinite()].abs().max())
        torch.testing.assert_close(a.cpu(), b, rtol=rtol, atol=atol)


@pytest.mark.cuda
def test_cuda_sigmoid_terms_and_gradients():
    mean, variance = box(20_000, seed=11)
    for a, b in zip(expected_sigmoid(mean.cuda(), variance.cuda()), expected_sigmoid(mean, variance), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=STD, atol=STD_FLOOR)
    assert torch.equal(terms_needed(mean.cuda(), variance.cuda(), 0.01).cpu(), terms_needed(mean, variance, 0.01))
    inputs = [x.detach().cuda().requires_grad_() for x in sample_points()]
    assert gradcheck(lambda m, v: tuple(expected_softplus(m, v)), inputs)


@pytest.mark.cuda
def test_cuda_and_cpu_do_not_mix():
    text = message_of(ValueError, expected_softplus, torch.zeros(2, device="cuda"), torch.ones(2))
    assert text.startswith("mean and variance must be on one device; got cuda:0 and cpu.")
    assert expected_softplus(torch.zeros(2, device="cuda"), 1.0).value.is_cuda


@pytest.mark.cuda
@compiling
def test_cuda_compiled():
    mean, variance = (x.cuda() for x in box(10_000, seed=12))
    torch.compiler.reset()
    compiled = torch.compile(lambda m, v: tuple(expected_softplus(m, v, tolerance=1e-8)), fullgraph=True)
    for a, b in zip(compiled(mean, variance), expected_softplus(mean, variance), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-8)
