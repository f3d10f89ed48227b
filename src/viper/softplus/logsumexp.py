"""E log Σ_k e^{f_k} for independent Gaussians f_k ~ N(m_k, v_k): the softplus of more than two classes.

Add a Gumbel variable to each f_k. The largest sum, T, has the distribution function P(t) = Π_k L_k(t), where L_k(t) =
E exp(-e^{f_k - t}); its mean is E log Σ e^{f_k} + γ, and class k is the largest with probability E softmax_k. All of
this is one integral over t, whatever the number of classes:

    value = E T - γ     slope_k = ∫ P L_k'/L_k dt = E p_k     cross_jk = ∫ P (L_j'/L_j) (L_k'/L_k) dt = E p_j p_k,

and curvature_k = Σ_{j≠k} cross_jk = E p_k (1 - p_k). Sums over nodes one step h apart are off by at most
2|Γ(1 + 2πi/h)|, relatively, for the slopes, and 2|Γ(2 + 2πi/h)| for cross and curvature, whatever the means, variances
and number of classes (docs/math/logsumexp.md has the proof). gumbel.py computes the L_k.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from viper.softplus.bounds import checked_number
from viper.softplus.compiled_classes import compiled_moments
from viper.softplus.expectation import Array, read_gaussian
from viper.softplus.gumbel import WIDEST, Precision, gumbel_rule, level_index, mixed_gaussians, sd_level
from viper.softplus.normal import cdf

DEFAULT_TOLERANCE = 1e-10
FINEST_TOLERANCE, COARSEST_TOLERANCE = 1e-12, 1e-3
EULER = 0.57721566490153286061  # γ, the mean of a Gumbel variable
FLOATS, FLOATS_CUDA = 1 << 20, 1 << 27  # held at once
MOST_DOUBLINGS = 500  # doublings of the step: enough for any sd, up to 1e150
MOST_NODES_AT_ONCE = 256  # longer integrals are cut into pieces, whose steps grow
PIECE, WINDOW_WIDTH = 128, 8.0  # nodes before the next piece begins, and the sd of its window in steps
LEAST = 1e-30  # a smaller L_k makes P negligible


class ExpectedLogSumExp(NamedTuple):
    """Moments of log Σ_k e^{f_k}: its mean, E p, E p(1-p) and, if asked for, the matrix E p pᵀ; p is the softmax."""

    value: Array
    slope: Array
    curvature: Array
    cross: Array = None


def expected_logsumexp(
    mean: Array, variance: Array, *, tolerance: float = DEFAULT_TOLERANCE, cross: bool = False
) -> ExpectedLogSumExp:
    """E log Σ_k e^{f_k} for independent f_k ~ N(mean_k, variance_k), with its derivatives; classes on the last axis.

    Parameters
    ----------
    mean, variance : tensor or array
        Broadcast against each other; float32 or float64; variance >= 0. The last axis holds the K classes.
    tolerance : float
        Largest absolute error allowed in each number of the result, from 1e-12 to 1e-3. A larger one is faster.
    cross : bool
        Whether to return the matrices E[p_j p_k] too.

    Returns
    -------
    ExpectedLogSumExp
        Named tuple ``(value, slope, curvature, cross)``. With p = softmax(f): `value` without the last axis; `slope` =
        ∂value/∂mean = E[p], which sums to one; `curvature` = 2 ∂value/∂variance = E[p(1-p)]; `cross` = E[p pᵀ] or None.

    Notes
    -----
    Differentiable twice through `value`, once through the rest; works under ``torch.func.vmap`` and ``grad``. Computed
    in float64 whatever the input's dtype, in blocks of bounded memory. For two classes it is `expected_softplus` of the
    difference, which is faster.

    Examples
    --------
    >>> import numpy as np, viper
    >>> result = viper.expected_logsumexp(np.array([1.0, 0.0, -1.0]), np.array([4.0, 1.0, 0.0]))
    >>> round(float(result.value), 9)
    1.834456452
    >>> result.slope.round(4)
    array([0.5867, 0.3051, 0.1082])
    """
    tensors, give_back = read_classes(mean, variance)
    precision = Precision(checked_tolerance(tolerance))
    value, slope, curvature, pairs = _ClassMoments.apply(*tensors, precision, bool(cross))
    result = (value, slope, curvature, pairs) if cross else (value, slope, curvature)
    return ExpectedLogSumExp(*give_back(result))


def read_classes(mean: Array, variance: Array) -> Any:
    """Checked tensors of one shape with at least one class, and a function that returns the caller's type."""
    tensors, give_back = read_gaussian(mean, variance)
    if tensors[0].ndim == 0 or tensors[0].shape[-1] == 0:
        raise ValueError(
            f"mean and variance must have the classes on their last axis; got shape {tuple(tensors[0].shape)}. "
            "Pass one entry for each class."
        )
    return tensors, give_back


def checked_tolerance(tolerance: Any) -> float:
    """Return the tolerance as a number in its range. Raises if it is smaller."""
    number = checked_number(tolerance, "tolerance", FINEST_TOLERANCE, f"{DEFAULT_TOLERANCE}, the default")
    return min(number, COARSEST_TOLERANCE)


# --- derivatives ---


class _ClassMoments(torch.autograd.Function):
    """(m, v) -> value, slope, curvature, cross; d value = slope · dm + ½ curvature · dv."""

    @staticmethod
    def forward(mean: Tensor, variance: Tensor, precision: Precision, cross: bool) -> tuple[Tensor, ...]:
        return class_moments(mean, variance, precision, cross)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        mean, variance, ctx.precision, ctx.cross = inputs
        ctx.save_for_backward(mean, variance, output[1], output[2])
        ctx.save_for_forward(mean, variance, output[1], output[2])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d_value: Any, d_slope: Any, d_curvature: Any, d_cross: Any) -> Any:
        mean, variance, slope, curvature = ctx.saved_tensors
        to_mean, to_variance = torch.zeros_like(mean), torch.zeros_like(mean)
        if d_value is not None:
            to_mean, to_variance = d_value[..., None] * slope, 0.5 * d_value[..., None] * curvature
        if not ctx.cross:
            d_cross = None
        if d_slope is not None or d_curvature is not None or d_cross is not None:
            d_slope = torch.zeros_like(mean) if d_slope is None else d_slope
            d_curvature = torch.zeros_like(mean) if d_curvature is None else d_curvature
            d_cross = mean.new_zeros(*mean.shape[:-1], 0, 0) if d_cross is None else d_cross
            more = _ClassPull.apply(mean, variance, d_slope, d_curvature, d_cross, ctx.precision)
            to_mean, to_variance = to_mean + more[0], to_variance + more[1]
        return to_mean, to_variance, None, None

    @staticmethod
    def jvp(ctx: Any, d_mean: Any, d_variance: Any, *_: None) -> tuple[Tensor, ...]:
        mean, variance, slope, curvature = ctx.saved_tensors
        d_mean = torch.zeros_like(mean) if d_mean is None else d_mean
        d_variance = torch.zeros_like(mean) if d_variance is None else d_variance
        d_value = (slope * d_mean + 0.5 * curvature * d_variance).sum(-1)
        return d_value, *_ClassPush.apply(mean, variance, d_mean, d_variance, ctx.precision, ctx.cross)

    @staticmethod
    def vmap(info: Any, in_dims: Any, mean: Tensor, variance: Tensor, precision: Precision, cross: bool) -> Any:
        return _ClassMoments.apply(*all_mapped(info, in_dims[:2], (mean, variance)), precision, cross), (0, 0, 0, 0)


class _ClassLast(torch.autograd.Function):
    """Second derivatives, which cannot be differentiated further."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("expected_logsumexp is differentiable twice; a third derivative was requested.")

    @staticmethod
    def jvp(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("expected_logsumexp is differentiable twice; a third derivative was requested.")


class _ClassPull(_ClassLast):
    """Gradient in (m, v) of a·slope + b·curvature + Σ c∘cross."""

    @staticmethod
    def forward(mean: Tensor, variance: Tensor, a: Tensor, b: Tensor, c: Tensor, precision: Precision) -> Any:
        return gradient_of_moments(mean, variance, a, b, c, precision)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _ClassPull.apply(*all_mapped(info, in_dims[:5], inputs[:5]), inputs[5]), (0, 0)


class _ClassPush(_ClassLast):
    """Derivatives of slope, curvature and cross in a direction of (m, v)."""

    @staticmethod
    def forward(mean: Tensor, variance: Tensor, a: Tensor, b: Tensor, precision: Precision, cross: bool) -> Any:
        return moments_along(mean, variance, a, b, precision, cross)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _ClassPush.apply(*all_mapped(info, in_dims[:4], inputs[:4]), *inputs[4:]), (0, 0, 0)


def all_mapped(info: Any, in_dims: Any, tensors: Any) -> list[Tensor]:
    """The tensors with the mapped axis first, expanded where it is missing."""
    return [
        x.movedim(dim, 0) if dim is not None else x.expand(info.batch_size, *x.shape)
        for x, dim in zip(tensors, in_dims, strict=True)
    ]


# --- the nodes: how far apart, from where to where ---


def log_gamma_size(y: float, order: int) -> float:
    """log |Γ(order + iy)| for order 1 or 2, from |Γ(1 + iy)|² = πy / sinh(πy)."""
    size = 0.5 * (math.log(2 * math.pi * y) - math.pi * y - math.log(-math.expm1(-2 * math.pi * y)))
    return size + (0.5 * math.log1p(y * y) if order == 2 else 0.0)


@cache
def widest_step(tolerance: float) -> float:
    """h with 2 |Γ(2 + 2πi/h)| / 4, the error of curvature and cross, half the tolerance; E p(1-p) is at most 1/4."""
    low, high = 0.05, 2.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (
            (middle, high) if log_gamma_size(2 * math.pi / middle, 2) <= math.log(0.99 * tolerance) else (low, middle)
        )
    return low


@cache
def doubled_from(tolerance: float) -> Tensor:
    """The common variances from which the step may be 2, 4, 8, ... times as wide.

    All f_k share a Gaussian of variance v = 1 / Σ 1/v_k, their mean weighted by precisions, independent of their
    differences. It multiplies each error by e^{-(2π/h)² v/2}; that of the value has a factor h/π in place of |Γ|.
    """
    found = []
    for power in range(1, MOST_DOUBLINGS):
        step = widest_step(tolerance) * 2.0**power
        y = 2 * math.pi / step
        size = max(log_gamma_size(y, 2), math.log(2.0 * step / math.pi))
        found.append(2.0 / y**2 * (size - math.log(0.98 * tolerance)))
    return torch.tensor(found, dtype=torch.float64)


class Pieces(NamedTuple):
    """Parts of the integrals of rows: nodes (first + i) h with h = 2^power times the least step, i < nodes."""

    row: Tensor
    power: Tensor
    first: Tensor
    nodes: Tensor
    opens: Tensor  # centre and sd of the window Φ((t - centre)/sd) with which it begins; sd 0: at -∞
    closes: Tensor  # and of the one that begins the next piece; sd 0: it is the last
    active: Tensor  # which classes are not negligible there


class RowLimits(NamedTuple):
    """Bounds for each row or class, relative to the row's largest mean."""

    low: Tensor  # where P is negligible
    high: Tensor  # where the square of 1 - P is
    above: Tensor  # where each 1 - L_k is
    z: Tensor


def limits(x: Tensor, sd: Tensor, tolerance: float) -> RowLimits:
    """f >= m - zτ except with probability Φ(-z), and 1 - L(t) <= min(e^{m + v/2 - t}, e^{m + zτ - t} + Φ(-z))."""
    largest = sd.amax(-1, keepdim=True).clamp(min=1.0)
    z = torch.sqrt(2.0 * torch.log(4.0 * x.shape[-1] * largest / tolerance))
    precision = Precision(tolerance)
    low = torch.logsumexp(x - z * sd, -1) + precision.start
    share = torch.sqrt(tolerance / (1.0 + largest))
    short = torch.sqrt(2.0 * torch.log(x.shape[-1] / share))
    high = torch.logsumexp(x + torch.minimum(0.5 * sd * sd, short * sd), -1) - torch.log(share[..., 0])
    whole = torch.where(sd > WIDEST, x + z * sd, -torch.inf).amax(-1)  # wide classes have no tails
    return RowLimits(
        low, torch.maximum(high, whole), x + torch.minimum(0.5 * sd * sd, z * sd) + precision.ends[1], z[..., 0]
    )


def plan_pieces(x: Tensor, sd: Tensor, tolerance: float) -> Pieces:
    """One piece for each row, several where narrow classes force a small step and wide ones a long integral."""
    bounds, step = limits(x, sd, tolerance), widest_step(tolerance)
    device, thresholds = x.device, doubled_from(tolerance).to(x.device)
    row = torch.arange(len(x), device=device)
    start, begins = bounds.low, x.new_zeros(len(x), 2)
    done: list[Pieces] = []
    while len(row):
        active = bounds.above[row] > start[:, None]
        common = torch.where(active, sd[row].square().reciprocal(), 0.0).sum(-1)
        common = common + torch.where(begins[:, 1] > 0, begins[:, 1].square().reciprocal(), 0.0)
        power = torch.bucketize(0.97 / common, thresholds, right=True)
        h = step * torch.exp2(power.to(x))
        first = torch.floor(start / h)
        count = torch.ceil(bounds.high[row] / h) - first + 2
        last = count <= MOST_NODES_AT_ONCE
        doubling = thresholds[power.clamp(max=len(thresholds) - 1)]  # as wide as it takes for a step twice as long
        width = torch.maximum(WINDOW_WIDTH * h, torch.sqrt(doubling / 0.96))
        following = start + PIECE * h
        centre = following + bounds.z[row] * width
        closes = torch.where(last[:, None], 0.0, torch.stack([centre, width], -1))
        count = torch.where(last, count, torch.ceil((centre + bounds.z[row] * width) / h) - first + 2)
        done.append(Pieces(row, power, first, count.long(), begins, closes, active))
        row, start, begins = row[~last], following[~last], closes[~last]
    return Pieces(*(torch.cat(parts) for parts in zip(*done, strict=True)))


# --- the integrand at the nodes ---


class ClassNodes(NamedTuple):
    """The integrand of a block of pieces."""

    row: Tensor
    step: float
    start: Tensor  # half a step before the first node, less γ, for pieces that begin a row; 0 for the others
    window: Tensor | None
    product: Tensor  # P, (pieces, nodes)
    ratios: list[Tensor]  # L_k^{(n)} / L_k, n = 1, 2, ...: (pieces, classes, nodes)
    tails: Tensor  # h times the sums beyond the last node of 1 - L_k, L_k', ...: (orders, pieces, classes)
    first: Tensor  # the first node of each piece

    @property
    def weight(self) -> Tensor:
        """P with the window."""
        return self.product if self.window is None else self.product * self.window


def node_blocks(
    mean: Tensor, variance: Tensor, precision: Precision, orders: int, pairs: bool = False
) -> Iterator[ClassNodes]:
    """The integrand of all rows of two (n, K) matrices, in blocks of bounded memory."""
    if not len(mean):
        return
    reference = mean.amax(-1, keepdim=True)
    x, sd = mean - reference, variance.sqrt()
    pieces = plan_pieces(x, sd, precision.tolerance)
    K = x.shape[-1]
    most = FLOATS_CUDA if x.is_cuda else FLOATS
    order = torch.argsort(pieces.power * (2 * MOST_NODES_AT_ONCE) + pieces.nodes)
    power, count = pieces.power[order].tolist(), pieces.nodes[order].tolist()
    begin = 0
    while begin < len(order):
        end = begin + 1
        while end < len(order) and power[end] == power[begin] and count[end] <= 1.25 * count[begin] + 4:
            if (end + 1 - begin) * K * ((2 * orders + 2) * count[end] + (K if pairs else 0)) > most:
                break
            end += 1
        block = Pieces(*(part[order[begin:end]] for part in pieces))
        yield nodes_of(x, sd, reference[:, 0], block, power[begin], count[end - 1], precision, orders)
        begin = end


def nodes_of(
    x: Tensor, sd: Tensor, reference: Tensor, block: Pieces, power: int, count: int, precision: Precision, orders: int
) -> ClassNodes:
    """The integrand of pieces that share their step."""
    step = widest_step(precision.tolerance) * 2.0**power
    x, sd, K = x[block.row], sd[block.row], x.shape[-1]
    parts = x.new_zeros(orders, len(x) * K, count)
    tails = x.new_zeros(orders, len(x) * K)
    steps = torch.arange(count, device=x.device)
    centre = torch.round(x / step)
    from_class = (block.first[:, None] - centre).reshape(-1)
    shift, flat_x, flat_sd = (x - centre * step).reshape(-1), x.reshape(-1), sd.reshape(-1)
    # classes that are negligible on these nodes stay at zero
    active, wide = block.active.reshape(-1), flat_sd > WIDEST
    index = level_index(precision, step, flat_sd)
    index = torch.where(active & ~wide, index, -2)
    for number in torch.unique(index).tolist():
        if number < -1:
            continue
        tables = sd_level(precision, step, number)
        table, tail = tables.on(x.device, orders)
        here = (index == number).nonzero()[:, 0]
        weights = tables.weights(shift[here], flat_sd[here])
        place = from_class[here].clamp(-1e9, 1e9).long() - tables.first
        columns = (place[:, None] + steps).clamp(0, tables.count - 1)
        for n in range(orders):
            parts[n].index_copy_(0, here, (weights @ table[n]).gather(1, columns))
            tails[n].index_copy_(0, here, (weights * tail[n][:, columns[:, -1]].T).sum(1))
    if bool((wide & active).any()):
        here = (wide & active).nonzero()[:, 0]
        t = (block.first[:, None] + steps) * step
        u = t[here // K] - flat_x[here, None]
        parts.index_copy_(1, here, mixed_gaussians(u, flat_sd[here, None], orders, gumbel_rule()))
    L = (1.0 - parts[0]).clamp_(min=LEAST).reshape(len(x), K, count)
    ratios = [part.reshape(len(x), K, count) / L for part in parts[1:]]
    begins = block.opens[:, 1] == 0
    start = torch.where(begins, reference[block.row] + (block.first - 0.5) * step - EULER, 0.0)
    tails = torch.where(block.closes[:, 1:] == 0, tails.reshape(orders, len(x), K), 0.0)
    first = reference[block.row] + block.first * step
    return ClassNodes(block.row, step, start, window_of(block, step, steps), L.prod(1), ratios, tails, first)


def window_of(block: Pieces, step: float, steps: Tensor) -> Tensor | None:
    """Φ((t - b)/w) - Φ((t - b')/w') with the windows that begin and end the piece; None if all are whole rows."""
    if not bool((block.opens[:, 1] > 0).any() | (block.closes[:, 1] > 0).any()):
        return None
    t = (block.first[:, None] + steps) * step
    up, down = (
        torch.where(window[:, 1:] > 0, cdf((t - window[:, :1]) / window[:, 1:].clamp(min=1e-300)), default)
        for window, default in ((block.opens, 1.0), (block.closes, 0.0))
    )
    return up - down


# --- the integrals ---


def class_moments(mean: Tensor, variance: Tensor, precision: Precision, cross: bool) -> tuple[Tensor, ...]:
    """Value, slope, curvature and cross of tensors (..., K); cross is empty unless asked for."""
    shape, K = mean.shape, mean.shape[-1]
    m, v = mean.detach().double().reshape(-1, K), variance.detach().double().reshape(-1, K)
    pairs = m.new_zeros(len(m), K, K) if cross else m.new_zeros(len(m), 0, 0)
    step, thresholds = widest_step(precision.tolerance), doubled_from(precision.tolerance)
    compiled = None if cross else compiled_moments(m, v, precision, step, thresholds)
    if compiled is None:
        value, slope, curvature = plain_moments(m, v, precision, pairs)
    else:
        value, slope, curvature, done = compiled
        if not bool(done.all()):
            left = (~done).nonzero()[:, 0]
            parts = plain_moments(m[left], v[left], precision, pairs)
            for whole, part in zip((value, slope, curvature), parts, strict=True):
                whole.index_copy_(0, left, part)
    size = pairs.shape[-1]
    shapes = shape[:-1], shape, shape, (*shape[:-1], size, size)
    results = (value, slope, curvature, pairs)
    return tuple(result.to(mean.dtype).reshape(form) for result, form in zip(results, shapes, strict=True))


def plain_moments(m: Tensor, v: Tensor, precision: Precision, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value, slope and curvature of (n, K) matrices; fills in `pairs` unless it is empty."""
    value, slope, curvature = m.new_zeros(len(m)), torch.zeros_like(m), torch.zeros_like(m)
    cross = pairs.shape[-1] > 0
    for nodes in node_blocks(m, v, precision, 2, cross):
        h, r, weight = nodes.step, nodes.ratios[0], nodes.weight[:, None]
        missing = 1.0 - nodes.product if nodes.window is None else (1.0 - nodes.product) * nodes.window
        value.index_add_(0, nodes.row, nodes.start + h * missing.sum(-1) + nodes.tails[0].sum(-1))
        share = r * weight
        slope.index_add_(0, nodes.row, h * share.sum(-1) + nodes.tails[1])
        others = r.sum(1, keepdim=True) - r
        curvature.index_add_(0, nodes.row, h * share.mul(others).sum(-1))
        if cross:
            pairs.index_add_(0, nodes.row, h * share @ r.mT)
    slope = slope / slope.sum(-1, keepdim=True)
    if cross:
        pairs.diagonal(dim1=1, dim2=2).copy_(slope - curvature)
    return value, slope, curvature


def gradient_of_moments(
    mean: Tensor, variance: Tensor, a: Tensor, b: Tensor, c: Tensor, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Gradient in m and v of Ψ = Σ_k a_k slope_k + b_k curvature_k + Σ_jk c_jk cross_jk.

    With ρ_n = L_k^{(n)} / L_k, Ψ = ∫ P [Σ a ρ₁ - b ρ₂ + Σ_{j≠k} c_jk ρ₁ρ₁ + Σ c_kk (ρ₁ + ρ₂)] dt; a derivative in m_k
    turns L_k^{(n)} into -L_k^{(n+1)}, one in v_k into ½ L_k^{(n+2)}.
    """
    shape, K = mean.shape, mean.shape[-1]
    m, v, a, b = (x.detach().double().reshape(-1, K) for x in (mean, variance, a, b))
    once, twice = a, -b
    both = None
    if c.shape[-1]:
        c = c.detach().double().reshape(-1, K, K)
        diagonal = c.diagonal(dim1=1, dim2=2)
        once, twice = a + diagonal, diagonal - b
        both = c + c.mT
        both = both - torch.diag_embed(both.diagonal(dim1=1, dim2=2))
    to_mean, to_variance = torch.zeros_like(m), torch.zeros_like(m)
    for nodes in node_blocks(m, v, precision, 5, both is not None):
        r1, r2, r3, r4 = nodes.ratios
        one, two = once[nodes.row, :, None], twice[nodes.row, :, None]
        own = one * r1 + two * r2
        total = own.sum(1, keepdim=True)
        if both is not None:
            others = both[nodes.row] @ r1
            total = total + 0.5 * (r1 * others).sum(1, keepdim=True)
            one, own = one + others, own + others * r1
        weight, rest = nodes.weight[:, None] * nodes.step, total - own
        tail, once_, twice_ = nodes.tails, once[nodes.row], twice[nodes.row]
        to_mean.index_add_(
            0, nodes.row, -(weight * (r1 * rest + one * r2 + two * r3)).sum(-1) - once_ * tail[2] - twice_ * tail[3]
        )
        to_variance.index_add_(
            0,
            nodes.row,
            0.5 * ((weight * (r2 * rest + one * r3 + two * r4)).sum(-1) + once_ * tail[3] + twice_ * tail[4]),
        )
    return to_mean.to(mean.dtype).reshape(shape), to_variance.to(mean.dtype).reshape(shape)


def moments_along(
    mean: Tensor, variance: Tensor, d_mean: Tensor, d_variance: Tensor, precision: Precision, cross: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of slope, curvature and cross along (dm, dv), by the rules of `gradient_of_moments`."""
    shape, K = mean.shape, mean.shape[-1]
    m, v, a, b = (x.detach().double().reshape(-1, K) for x in (mean, variance, d_mean, 0.5 * d_variance))
    slope, curvature = torch.zeros_like(m), torch.zeros_like(m)
    size = K if cross else 0
    pairs = m.new_zeros(len(m), size, size)
    for nodes in node_blocks(m, v, precision, 5, cross):
        r1, r2, r3, r4 = nodes.ratios
        da, db, tail = a[nodes.row, :, None], b[nodes.row, :, None], nodes.tails
        own = db * r2 - da * r1
        rest, changed = own.sum(1, keepdim=True) - own, db * r3 - da * r2
        weight = nodes.weight[:, None] * nodes.step
        a_row, b_row = a[nodes.row], b[nodes.row]
        to_slope = (weight * (r1 * rest + changed)).sum(-1) + b_row * tail[3] - a_row * tail[2]
        to_curvature = (weight * (r2 * rest + db * r4 - da * r3)).sum(-1) + b_row * tail[4] - a_row * tail[3]
        slope.index_add_(0, nodes.row, to_slope)
        curvature.index_add_(0, nodes.row, -to_curvature)
        if cross:
            # r_j r_k (E - e_j - e_k) + g_j r_k + r_j g_k, where E - e_j is `rest`
            one = (weight * (changed - own * r1)) @ r1.mT
            pairs.index_add_(0, nodes.row, one + one.mT + (weight * own.sum(1, keepdim=True) * r1) @ r1.mT)
    if cross:
        pairs.diagonal(dim1=1, dim2=2).copy_(slope - curvature)
    shapes = shape, shape, (*shape[:-1], size, size)
    results = (slope, curvature, pairs)
    dslope, dcurvature, dpairs = (x.to(mean.dtype).reshape(form) for x, form in zip(results, shapes, strict=True))
    return dslope, dcurvature, dpairs
