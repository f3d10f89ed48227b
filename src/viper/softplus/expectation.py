"""E[log(1+e^X)] for Gaussian X: the one function on which every model of this library is built.

    η = E[log(1+e^X)]      g = ∂η/∂ϑ = E[s(X)]      h = 2 ∂η/∂v = E[s'(X)]      X ~ N(ϑ, v), s(x) = 1/(1+e^-x)

`expected_softplus` returns all three, exactly or by any bound of the paper, and is differentiable. `expected_sigmoid`
returns the mean and standard deviation of the probability s(X). `terms_needed` returns the length the series needs.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from viper.softplus.bound_names import BoundName
from viper.softplus.bounds import BOUNDS, bound_key, checked_number
from viper.softplus.limit import limit, sigmoid_moments
from viper.softplus.pointwise import Bound, Triple
from viper.softplus.series import smallest_terms

Array = Any  # a torch tensor, NumPy array or float; results have the caller's type
T = TypeVar("T", bound=tuple[Any, ...])


class ExpectedSoftplus(NamedTuple):
    """Moments of the softplus of a Gaussian: `value` η, `slope` ∂η/∂mean, `curvature` 2 ∂η/∂variance."""

    value: Array
    slope: Array
    curvature: Array


class ExpectedSigmoid(NamedTuple):
    """Mean and standard deviation of the probability s(X)."""

    mean: Array
    std: Array


def expected_softplus(
    mean: Array,
    variance: Array,
    *,
    bound: BoundName = "viper",
    terms: int | None = None,
    samples: int = 1000,
    nodes: int = 64,
    random_state: int | None = None,
    tolerance: float | None = None,
) -> ExpectedSoftplus:
    """E[log(1+e^X)] for X ~ N(mean, variance), with its derivatives, elementwise.

    Parameters
    ----------
    mean, variance : tensor, array or float
        Broadcast against each other; float32 or float64; variance >= 0. The results have the same type.
    bound : {"viper", "pg", "mc", "quadrature", "certified"}
        ``"viper"``: Theorem 1 of the paper; with `terms=l` its η_l, otherwise the limit l → ∞, exact to rounding.
        ``"pg"``: Jaakkola-Jordan at its optimal t, identical to Pólya-Gamma.
        ``"mc"``: the mean over `samples` common random numbers. ``"quadrature"``: Gauss-Hermite with `nodes`.
        ``"certified"``: the limit plus a proven allowance for every error of its evaluation, hence a true upper bound,
        less than 1e-9 above the limit while |mean| and sd are at most 1e4 (float32 results are rounded up).
    terms : int, optional
        l of η_l: 2l-1 terms. Only for ``"viper"``.
    samples, random_state : int
        Number (even: antithetic pairs) and seed of the random numbers of ``"mc"``.
    nodes : int
        Number of nodes of ``"quadrature"``.
    tolerance : float, optional
        Largest absolute error allowed in each of the three results, for ``"viper"`` without `terms`; None means exact.
        Tolerances down to 1e-11 use a faster formula, in the input's precision.

    Returns
    -------
    ExpectedSoftplus
        Named tuple ``(value, slope, curvature)``: the bound and its own exact derivatives.

    Notes
    -----
    Differentiable twice through `value`, once through `slope` and `curvature`; works under ``torch.func`` transforms
    and ``torch.compile(fullgraph=True)``, where input values are not checked. Exact formulas compute in float64
    whatever the input's dtype. η_l has a cusp: at mean = variance = 0 its curvature is -inf.

    Examples
    --------
    >>> import viper
    >>> viper.expected_softplus(1.0, 4.0).value
    1.642495369528834
    >>> viper.expected_softplus(1.0, 4.0, bound="pg").value
    1.719577361472801
    """
    chosen = BOUNDS[bound_key(bound, terms, samples, nodes, random_state, tolerance)]
    tensors, give_back = read_gaussian(mean, variance)
    function = _Moments if torch.compiler.is_compiling() else _EagerMoments
    return give_back(ExpectedSoftplus(*function.apply(*tensors, chosen)))


def expected_sigmoid(mean: Array, variance: Array) -> ExpectedSigmoid:
    """Mean and standard deviation of the probability s(X), X ~ N(mean, variance), elementwise and in closed form.

    E[s(X)] = g and Var[s(X)] = E[s(X)²] - g², where E[s²] = g - h because s' = s - s². Both keep their
    relative accuracy if the probability is nearly certain or the variance tiny. A standard deviation below 1e-150,
    whose square underflows in float64, is returned as 0.

    Examples
    --------
    >>> import viper
    >>> mean, std = viper.expected_sigmoid(1.0, 4.0)
    >>> round(mean, 4), round(std, 4)
    (0.6477, 0.2961)
    """
    tensors, give_back = read_gaussian(mean, variance)
    return give_back(ExpectedSigmoid(*_Probability.apply(*tensors)))


def terms_needed(mean: Array, variance: Array, relative_error: float) -> Array:
    """The smallest l for which η_l is within `relative_error` of E[log(1+e^X)] (the paper's Figure 1(c)), elementwise.

    The error η_l - η = Σ_{k>=2l} (-1)^k E[e^{-k|X|}]/k decreases in l, so l is found by bisection.

    Examples
    --------
    >>> import viper
    >>> viper.terms_needed(0.0, 0.01, 0.01)
    12
    """
    relative_error = checked_number(relative_error, "relative_error", 1e-15, "0.01 for 1 %")
    (mean_, variance_), give_back = read_gaussian(mean, variance, integer=True)
    m, v = -mean_.detach().double().abs(), variance_.detach().double()
    target = relative_error * (limit().moments(m, v)[0] + mean_.detach().double().clamp(min=0.0))
    return give_back((smallest_terms(m, v, target),))[0]


# --- evaluation, with derivatives ---


class _Moments(torch.autograd.Function):
    """(ϑ, v) -> (η, g, h) with analytic derivatives: dη = g dϑ + ½h dv, and those of g and h from the partials."""

    @staticmethod
    def forward(mean: Tensor, variance: Tensor, bound: Bound) -> Triple:
        return bound.moments(mean, variance)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Bound], output: Triple) -> None:
        mean, variance, ctx.bound = inputs
        ctx.save_for_backward(mean, variance, output[1], output[2])
        ctx.save_for_forward(mean, variance, output[1], output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d_value: Tensor | None, d_slope: Tensor | None, d_curvature: Tensor | None) -> Any:
        mean, variance, slope, curvature = ctx.saved_tensors
        to_mean, to_variance = torch.zeros_like(mean), torch.zeros_like(mean)
        if d_value is not None:
            to_mean, to_variance = d_value * slope, 0.5 * d_value * curvature
        if d_slope is not None or d_curvature is not None:
            g_mean, h_mean, h_variance = _Partials.apply(mean, variance, ctx.bound)
            if d_slope is not None:
                to_mean, to_variance = to_mean + d_slope * g_mean, to_variance + 0.5 * d_slope * h_mean
            if d_curvature is not None:
                to_mean, to_variance = to_mean + d_curvature * h_mean, to_variance + d_curvature * h_variance
        return to_mean, to_variance, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], mean: Tensor, variance: Tensor, bound: Bound) -> Any:
        return _Moments.apply(*with_mapped_axis_first(info, in_dims, mean, variance), bound), (0, 0, 0)


class _EagerMoments(_Moments):
    """The same function with forward-mode derivatives, which the compiler does not support in a custom function."""

    @staticmethod
    def jvp(ctx: Any, d_mean: Tensor | None, d_variance: Tensor | None, _: None) -> Triple:
        mean, variance, slope, curvature = ctx.saved_tensors
        d_mean = torch.zeros_like(mean) if d_mean is None else d_mean
        d_half = torch.zeros_like(mean) if d_variance is None else 0.5 * d_variance
        g_mean, h_mean, h_variance = _Partials.apply(mean, variance, ctx.bound)
        return (
            slope * d_mean + curvature * d_half,
            g_mean * d_mean + h_mean * d_half,
            h_mean * d_mean + 2 * h_variance * d_half,
        )


class _Partials(torch.autograd.Function):
    """(ϑ, v) -> (∂g/∂ϑ, ∂h/∂ϑ, ∂h/∂v), which cannot be differentiated further."""

    @staticmethod
    def forward(mean: Tensor, variance: Tensor, bound: Bound) -> Triple:
        return bound.partials(mean, variance)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("expected_softplus is differentiable twice; a third derivative was requested.")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], mean: Tensor, variance: Tensor, bound: Bound) -> Any:
        return _Partials.apply(*with_mapped_axis_first(info, in_dims, mean, variance), bound), (0, 0, 0)


class _Probability(torch.autograd.Function):
    """(ϑ, v) -> mean and standard deviation of s(X)."""

    @staticmethod
    def forward(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        return sigmoid_moments(mean, variance)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, d_mean: Tensor, d_std: Tensor) -> Any:
        mean, variance, p, std = ctx.saved_tensors
        # h = E[s'], t = E[s''], u = ½E[s''']; Var = p - h - p², so ∂Var/∂ϑ = h - t - 2ph and ∂Var/∂v = ½t - u - pt
        h, t, u = _Partials.apply(mean, variance, limit())
        per_std = torch.where(std > 0, 0.5 * d_std / std.clamp(min=torch.finfo(std.dtype).tiny), 0.0)
        to_mean = d_mean * h + per_std * (h - t - 2 * p * h)
        return to_mean, 0.5 * d_mean * t + per_std * (0.5 * t - u - p * t)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], mean: Tensor, variance: Tensor) -> Any:
        return _Probability.apply(*with_mapped_axis_first(info, in_dims, mean, variance)), (0, 0)


def with_mapped_axis_first(info: Any, in_dims: tuple[int | None, ...], mean: Tensor, variance: Tensor) -> list[Tensor]:
    """Return both tensors with the mapped axis first, expanded if only one is mapped."""
    return [
        x.movedim(dim, 0) if dim is not None else x.expand(info.batch_size, *x.shape)
        for x, dim in zip((mean, variance), in_dims[:2], strict=True)
    ]


# --- reading the arguments ---


def read_gaussian(
    mean: Array, variance: Array, integer: bool = False
) -> tuple[tuple[Tensor, Tensor], Callable[[T], T]]:
    """Checked float tensors of one shape, and a function that returns results in the caller's type."""
    use_torch = isinstance(mean, Tensor) or isinstance(variance, Tensor)
    use_float = not use_torch and np.ndim(mean) == 0 and np.ndim(variance) == 0
    m, v = read_tensor(mean, "mean", variance), read_tensor(variance, "variance", mean)
    if m.device != v.device:
        raise ValueError(
            f"mean and variance must be on one device; got {m.device} and {v.device}. Move one with .to()."
        )
    try:
        shape = torch.broadcast_tensors(m, v)[0].shape  # torch.broadcast_shapes imports sympy
    except RuntimeError:
        raise ValueError(
            f"mean and variance must have shapes that broadcast; got {tuple(m.shape)} and {tuple(v.shape)}."
        ) from None
    dtype = torch.promote_types(m.dtype, v.dtype)
    if not (torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack()):
        check_values(m, v)
    scalar: type = int if integer else float

    def give_back(result: T) -> T:
        if use_torch:
            return result
        items = [scalar(x) if use_float else x.detach().numpy() for x in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)

    return (m.to(dtype).expand(shape), v.to(dtype).expand(shape)), give_back


def read_tensor(x: Array, name: str, other: Array) -> Tensor:
    """A float32 or float64 tensor; a Python number takes the other argument's dtype and device."""
    if isinstance(x, int | float) and not isinstance(x, bool):
        like = other if isinstance(other, Tensor) and other.is_floating_point() else torch.empty(0, dtype=torch.float64)
        return like.new_tensor(float(x))
    array = x if isinstance(x, Tensor) else np.asarray(x)
    if str(array.dtype).removeprefix("torch.") not in ("float32", "float64"):
        raise TypeError(f"{name} must be float32 or float64; got {array.dtype}. Convert it, as with .astype(float).")
    # torch shares memory only with writable arrays that have no negative strides
    return array if isinstance(array, Tensor) else torch.from_numpy(np.require(array, requirements=["C", "W"]))


def check_values(mean: Tensor, variance: Tensor) -> None:
    """Raise unless every mean is finite and every variance finite and not negative."""
    for x, name, rule, least in (
        (mean, "mean", "finite", torch.finfo(mean.dtype).min),
        (variance, "variance", "finite and not negative", 0.0),
    ):
        low, high = x.detach().aminmax() if x.numel() else (0.0, 0.0)
        if not (low >= least and high < math.inf):  # NaN compares false
            good = x.isfinite() & (x >= least)
            where = tuple((~good).nonzero()[0].tolist())
            place = f" at index {where}" if where else ""
            raise ValueError(f"{name} must be {rule}; got {x[where].item()}{place}.")
