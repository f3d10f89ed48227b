"""Probabilities of K classes as nodes of an ONNX graph: E softmax(f) for independent f_k ~ N(ϑ_k, τ_k²), and intervals.

The graph sums the integral of softplus/logsumexp.py over nodes t_i = t_0 + i h of each row, as many as its spread asks
for. With u = t - ϑ_k, L_k(t) = E exp(-e^{τ_k Z - u}) is a trapezoidal sum over Z if τ_k is small, and otherwise a sum
of normal distribution functions over Gauss's nodes g_j for the Gumbel density,

    L ≈ Σ_j w_j exp(-e^{τ z_j - u})   (τ < 2.5),      L ≈ Σ_j ω_j Φ((u - g_j)/τ)   (τ ≥ 2.5).

Probabilities are off by less than 1e-7, interval ends by less than 1e-6. Rows do not affect one another: an extreme row
only takes longer.
"""

import math
from typing import NamedTuple

import numpy as np

from viper.models.graph import OnnxGraph, erfc
from viper.softplus.gumbel import gumbel_rule
from viper.softplus.logsumexp import EULER

LARGEST_NARROW = 2.5  # τ up to which the trapezoidal sum errs by less than 1e-8, and beyond which Gauss's does
NARROW_STEP, NARROW_REACH = 0.2, 6.4
DIGITS = 24.0  # with steps h, errors are about e^{-DIGITS} times small powers of 1/h
CARRIED_SDS = 6.4  # sds that carry a Gaussian: Φ(-6.4) < 1e-10
BELOW, ABOVE = 3.3, 24.0  # how far a Gumbel variable reaches
MOST_ROW_NODES = 20_000.0  # per row; if its sds differ a thousandfold, the step gets wider
LEAST_FACTOR = 1e-30  # a smaller L_k makes the product negligible


class Factors(NamedTuple):
    """L_k and its derivative at the nodes, K × nodes."""

    value: str
    slope: str


def softmax_nodes(graph: OnnxGraph, theta: str, tau2: str, classes: int, reach: float) -> tuple[str, str]:
    """Add E softmax(f), n × K, and the ends of the intervals, n × K × 2, from ϑ and τ²; NaN for rows with a NaN."""
    add, helper, double = graph.add, graph.onnx.helper, graph.onnx.TensorProto.DOUBLE
    both, last = add("Add", theta, tau2), np.array([2])
    strange = add("IsNaN", add("ReduceSum", add("Sub", both, both), np.array([1]), keepdims=1))
    filled = (add("Where", strange, 0.0, x) for x in (theta, tau2))
    usable = [add("Concat", x, np.zeros((1, classes)), axis=0) for x in filled]  # runtimes need at least one row
    info = helper.make_tensor_value_info
    body = OnnxGraph(graph.onnx, "row_")
    outputs = row_nodes(body, "row_mean", "row_variance", classes)
    whole = helper.make_graph(
        body.nodes,
        "softmax_of_a_row",
        [info(name, double, [classes]) for name in ("row_mean", "row_variance")],
        [info(name, double, [classes]) for name in outputs],
        body.constants,
    )
    names = ["all_softmax", "all_odds", "all_odds_variances"]
    graph.nodes.append(helper.make_node("Scan", usable, names, body=whole, num_scan_inputs=2))
    softmax, odds, variance = (add("Slice", x, *(np.array([k]) for k in (0, -1, 0))) for x in names)
    ends = add("Mul", add("Unsqueeze", add("Sqrt", variance), last), np.array([-reach, reach]))
    interval = add("Sigmoid", add("Add", add("Unsqueeze", odds, last), ends))
    return add("Where", strange, np.nan, softmax), add("Where", add("Unsqueeze", strange, last), np.nan, interval)


def row_nodes(graph: OnnxGraph, theta: str, tau2: str, classes: int) -> list[str]:
    """Add E p, and mean and variance of the log-odds of each class, of one row: K numbers each."""
    add = graph.add
    tau = add("Sqrt", tau2)
    start, step, t = node_grid(graph, theta, tau, tau2, classes)
    column = np.array([1])
    factors = gumbel_factors(graph, t, *(add("Unsqueeze", x, column) for x in (theta, tau)))
    logs = add("Log", factors.value)
    rate = add("Div", factors.slope, factors.value)
    everything = add("ReduceSum", logs, np.array([0]), keepdims=1)
    # E p_k = h Σ_i P L_k'/L_k
    slope = add("ReduceSum", add("Mul", rate, add("Exp", everything)), column, keepdims=0)
    probability = add("Div", slope, add("ReduceSum", slope, np.array([0]), keepdims=1))
    # T without class k: P/L_k
    others = add("Exp", add("Sub", everything, logs))
    missing = add("Sub", 1.0, others)
    first = add("Sub", start, add("Mul", step, 0.5))
    mean = add("Add", first, add("Mul", step, add("ReduceSum", missing, column, keepdims=0)))
    from_mean = add("Sub", add("Unsqueeze", t, np.array([0])), add("Unsqueeze", mean, column))
    sums = add("ReduceSum", add("Mul", from_mean, missing), column, keepdims=0)
    gap = add("Sub", first, mean)
    second = add("Add", add("Mul", gap, gap), add("Mul", add("Mul", step, 2.0), sums))
    sheppard = add("Mul", add("Mul", step, step), 1.0 / 12.0)
    spread = add("Sub", second, add("Add", sheppard, math.pi**2 / 6.0))
    # Stein's and Poincaré's bounds: Σ_j v_j (E p_j)² ≤ Var log Σ e^{f_j} ≤ Σ_j v_j E p_j, j ≠ k
    each = add("Mul", add("MatMul", others, add("Transpose", rate, perm=[1, 0])), step)  # k × j
    each = add("Mul", each, 1.0 - np.eye(classes))
    least = add("ReduceSum", add("Mul", add("Mul", each, each), tau2), column, keepdims=0)
    most = add("ReduceSum", add("Mul", each, tau2), column, keepdims=0)
    spread = add("Min", add("Max", spread, least), most)
    odds = add("Sub", theta, add("Sub", mean, EULER))
    names = "row_softmax", "row_odds", "row_odds_variance"
    found = probability, odds, add("Add", spread, tau2)
    return [add("Identity", x, name=name) for name, x in zip(names, found, strict=True)]


def node_grid(graph: OnnxGraph, theta: str, tau: str, tau2: str, classes: int) -> tuple[str, str, str]:
    """Add t_0, h and the nodes of a row, which carry the integrals of all classes and of all but one."""
    add = graph.add
    axis, reach = np.array([0]), add("Mul", tau, CARRIED_SDS)
    # all but any one: the second largest of the places where L_k is negligible
    second = f"{graph.prefix}second"
    lowest = add("Sub", theta, reach)
    graph.nodes.append(
        graph.onnx.helper.make_node("TopK", [lowest, graph.constant(np.array([2]))], [second, f"{second}_index"])
    )
    start = add("Sub", add("ReduceMin", second, axes=[0], keepdims=0), BELOW)
    top = add("Add", theta, add("Min", reach, add("Mul", tau2, 0.5)))
    end = add("Add", add("ReduceMax", top, axes=[0], keepdims=0), ABOVE + math.log(classes))
    # a common Gaussian of variance v = 1/Σ 1/τ² makes errors e^{-2π²v/h²} times smaller
    precision = add("ReduceSum", add("Div", 1.0, add("Max", tau2, 1e-300)), axis, keepdims=0)
    common = add("Div", 8.0 * DIGITS, precision)
    step = add("Mul", add("Add", add("Sqrt", add("Add", common, math.pi**2)), math.pi), math.pi / (2.0 * DIGITS))
    range_ = add("Sub", end, start)
    step = add("Max", step, add("Div", range_, MOST_ROW_NODES))
    count = add("Add", add("Ceil", add("Div", range_, step)), 1.0)
    return start, step, add("Add", start, add("Mul", step, add("Range", 0.0, count, 1.0)))


def gumbel_factors(graph: OnnxGraph, t: str, theta: str, tau: str) -> Factors:
    """Add L_k(t_i) and L_k'(t_i), K × nodes."""
    add, last = graph.add, np.array([2])
    u = add("Unsqueeze", add("Sub", add("Unsqueeze", t, np.array([0])), theta), last)
    sd = add("Unsqueeze", tau, last)
    z = np.arange(-NARROW_REACH, NARROW_REACH + NARROW_STEP / 2, NARROW_STEP)
    weights = np.exp(-0.5 * z * z)
    weights /= weights.sum()
    exponent = add("Sub", add("Mul", add("Min", sd, LARGEST_NARROW), z), u)
    x = add("Exp", add("Min", exponent, 300.0))
    density = add("Exp", add("Neg", x))
    narrow = [add("MatMul", part, weights) for part in (density, add("Mul", x, density))]
    g, omega = (part.numpy() for part in gumbel_rule())
    wide_sd = add("Max", sd, LARGEST_NARROW)
    y = add("Div", add("Sub", u, g), wide_sd)
    tail = add("Mul", erfc(graph, add("Mul", add("Abs", y), math.sqrt(0.5))), 0.5)
    normal = add("Where", add("Greater", y, 0.0), add("Sub", 1.0, tail), tail)
    bell = add("Exp", add("Mul", add("Mul", y, y), -0.5))
    bell = add("Mul", add("Div", bell, wide_sd), 1.0 / math.sqrt(2.0 * math.pi))
    wide = [add("MatMul", part, omega) for part in (normal, bell)]
    chosen = add("Less", tau, LARGEST_NARROW)
    value, slope = (add("Where", chosen, *pair) for pair in zip(narrow, wide, strict=True))
    return Factors(add("Max", value, LEAST_FACTOR), slope)
