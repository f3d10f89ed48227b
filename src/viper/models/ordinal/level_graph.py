"""Probabilities of levels in order as nodes of an ONNX graph, and their intervals.

Probabilities are sums over the points of the gaps, as in `reading`. The ends of a middle level's interval solve
P(p ≤ x) = 0.025, say, by the same quadrature over the gap as there, and by bisection in a loop of the graph.
Probabilities are off by less than 1e-9, ends by less than 1e-7.
"""

import math
from typing import Any

import numpy as np
import torch

from viper.inference.ordinal.gaps import threshold_matrix
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.models.graph import OnnxGraph, erfc, expected_tail
from viper.models.ordinal.reading import FARTHEST_SD, GAP_NODES, LARGEST_DISTANCE, LOG_2

HALVINGS = 48  # bisections of a bracket in log-odds, which is at most about 1,200 wide


def level_nodes(
    graph: OnnxGraph, score: str, loading: str, tau2: str, posterior: OrdinalPosterior, reach: float
) -> tuple[str, str]:
    """Add E P(y = k), n × K, and the ends of its interval, n × K × 2; NaN for rows with a NaN.

    `score` and `tau2` are mean and variance of f given the gaps, n × 1, and `loading` is df/dζ, n × gaps, for standard
    normal coordinates ζ of the gaps.
    """
    add = graph.add
    whole = add("Add", add("ReduceSum", loading, np.array([1]), keepdims=1), add("Add", score, tau2))
    strange = add("IsNaN", add("Sub", whole, whole))
    probabilities = level_probability_nodes(graph, score, loading, tau2, posterior)
    interval = interval_nodes(graph, score, loading, tau2, posterior, reach)
    ends = add("Where", add("Unsqueeze", strange, np.array([2])), np.nan, interval)
    return add("Where", strange, np.nan, probabilities), ends


def level_probability_nodes(graph: OnnxGraph, score: str, loading: str, tau2: str, posterior: OrdinalPosterior) -> str:
    add = graph.add
    places = posterior.points()[0].numpy()
    thresholds, shares = (x.numpy() for x in posterior.thresholds())
    points, count = thresholds.shape
    theta = add("Add", score, add("MatMul", loading, places.T)) if places.size else score
    f = add("Sub", add("Unsqueeze", theta, np.array([2])), thresholds[None])  # n × points × thresholds
    flat = add("Reshape", f, np.array([0, points * count, 1]))
    small = expected_tail(graph, add("Abs", flat), add("Unsqueeze", tau2, np.array([2])))
    small = add("Reshape", small, np.array([0, points, count]))
    large, positive = add("Sub", 1.0, small), add("Greater", f, 0.0)
    below, above = (add("Where", positive, *pair) for pair in ((small, large), (large, small)))

    def some(x: str, start: int, stop: int) -> str:
        return add("Gather", x, np.arange(start, stop), axis=2)

    parts = [some(below, 0, 1)]
    if count > 1:
        (low, next_low), (high, next_high) = ((some(x, 0, count - 1), some(x, 1, count)) for x in (below, above))
        smaller = add("Less", high, next_low)
        difference = add("Where", smaller, add("Sub", high, next_high), add("Sub", next_low, low))
        parts.append(add("Relu", difference))
    levels = add("Concat", *parts, some(above, count - 1, count), axis=2)
    return add("ReduceSum", add("Mul", levels, shares[None, :, None]), np.array([1]), keepdims=0)


def interval_nodes(
    graph: OnnxGraph, score: str, loading: str, tau2: str, posterior: OrdinalPosterior, reach: float
) -> str:
    """The ends of `reading.interval_ends`."""
    add, m = graph.add, posterior.size
    G = posterior.gap_factor.numpy()
    V, B = G @ G.T, threshold_matrix(m).numpy()
    own = V.diagonal()
    gaps = np.exp(posterior.log_gaps.numpy() + 0.5 * own)
    centres = np.concatenate([B[:1], 0.5 * (B[1:] + B[:-1]), B[-1:]])
    u = add("Sub", score, (centres @ gaps)[None])  # n × K
    of_centres = ((centres @ (gaps[:, None] * np.expm1(V) * gaps)) * centres).sum(1)
    of_f = add("Add", tau2, add("ReduceSumSquare", loading, axes=[1], keepdims=1))
    shared = add("MatMul", loading, 2.0 * (G.T * gaps) @ centres.T)
    spread = add("Relu", add("Sub", add("Add", of_f, of_centres[None]), shared))
    slope = add("Sub", add("MatMul", loading, G.T / own), (((centres[1:-1] * gaps) @ V).diagonal() / own)[None])
    middle = np.arange(1, m + 1)
    left = add("Sub", add("Gather", spread, middle, axis=1), add("Mul", add("Mul", slope, slope), own[None]))
    rest = add("Sqrt", add("Relu", left))
    log_gaps, sd = posterior.log_gaps.numpy()[None], np.sqrt(own)[None]
    inner = level_quantile_nodes(graph, add("Gather", u, middle, axis=1), slope, rest, log_gaps, sd, reach)

    def outer(k: int, sign: float) -> str:
        one, at = np.array([2]), np.array([k])
        mean, scale = (add("Unsqueeze", add("Gather", x, at, axis=1), one) for x in (u, add("Sqrt", spread)))
        sides = add("Mul", scale, np.array([-reach, reach]))
        return add("Sigmoid", add("Add", add("Mul", mean, sign), sides))

    return add("Concat", outer(0, -1.0), inner, outer(m + 1, 1.0), axis=1)


def level_quantile_nodes(
    graph: OnnxGraph, u: str, slope: str, rest: str, delta: np.ndarray, sd: np.ndarray, reach: float
) -> str:
    """The x with P(p ≤ x) at either level, n × gaps × 2, by halving between bounds on their log-odds."""
    add, last = graph.add, np.array([2])
    swing = add("Add", rest, add("Mul", add("Abs", slope), sd))
    far = add("Min", add("Add", add("Abs", u), add("Mul", swing, FARTHEST_SD)), LARGEST_DISTANCE)
    lowest, highest = (0.5 * np.exp(delta + sign * FARTHEST_SD * sd) for sign in (-1.0, 1.0))
    cosh = add("Mul", add("Add", add("Exp", far), add("Exp", add("Neg", far))), 0.5)
    low = add("Sub", log_sinh(lowest), add("Log", add("Add", cosh, np.exp(-lowest))))
    high = add("Add", add("Mul", low, 0.0), log_sinh(highest) - np.log(np.exp(-highest) + 1.0))
    low, high = (add("Unsqueeze", x, last) for x in (low, high))
    both = np.zeros((1, 1, 2))
    starts = [add("Add", x, both) for x in (low, high)]
    body = OnnxGraph(graph.onnx, "half_")
    given = [add("Unsqueeze", x, np.array([2, 3])) for x in (u, slope, rest)]
    at: list[Any] = [*given, *(x[:, :, None, None] for x in (delta, sd))]
    level = float(torch.special.ndtr(torch.tensor(reach, dtype=torch.float64)))
    middle = body.add("Mul", body.add("Add", "half_low", "half_high"), 0.5)
    under = body.add("Less", probability_below_nodes(body, middle, *at), np.array([1.0 - level, level]))
    body.add("Where", under, middle, "half_low", name="half_next_low")
    body.add("Where", under, "half_high", middle, name="half_next_high")
    body.add("Identity", "half_go_on", name="half_still")
    helper, types = graph.onnx.helper, graph.onnx.TensorProto
    info = helper.make_tensor_value_info
    shape = [None, delta.shape[1], 2]
    inputs = [info("half_number", types.INT64, []), info("half_go_on", types.BOOL, [])]
    inputs += [info(f"half_{name}", types.DOUBLE, shape) for name in ("low", "high")]
    outputs = [info("half_still", types.BOOL, [])]
    outputs += [info(f"half_next_{name}", types.DOUBLE, shape) for name in ("low", "high")]
    whole = helper.make_graph(body.nodes, "halving", inputs, outputs, body.constants)
    steps = [graph.constant(np.array(HALVINGS)), graph.constant(np.array(True))]
    ends = ["lowest_end", "highest_end"]
    graph.nodes.append(helper.make_node("Loop", [*steps, *starts], ends, body=whole))
    return add("Sigmoid", add("Mul", add("Add", *ends), 0.5))


def log_sinh(x: np.ndarray) -> np.ndarray:
    return x + np.log(-np.expm1(-2.0 * x)) - LOG_2


def probability_below_nodes(
    graph: OnnxGraph, logit: str, u: str, slope: str, rest: str, delta: np.ndarray, sd: np.ndarray
) -> str:
    """P(p ≤ x), as `reading.probability_below`, n × gaps × 2."""
    add, last = graph.add, np.array([3])
    logit = add("Unsqueeze", logit, last)
    x = add("Add", logit, LOG_2)
    softplus = add("Add", add("Max", x, 0.0), add("Log", add("Add", add("Exp", add("Neg", add("Abs", x))), 1.0)))
    gap = add("Mul", softplus, 2.0)
    start = add("Max", add("Log", gap), delta - FARTHEST_SD * sd)
    end = add("Max", start, delta + FARTHEST_SD * sd)
    nodes, weights = np.polynomial.legendre.leggauss(GAP_NODES)
    width = add("Sqrt", add("Sub", end, start))
    y = add("Mul", width, 0.5 * (nodes + 1.0))
    log_gap = add("Add", start, add("Mul", y, y))
    away = add("Sub", log_gap, delta)
    z = add("Div", away, sd)
    density = add("Mul", add("Exp", add("Mul", add("Mul", z, z), -0.5)), 1.0 / (math.sqrt(2.0 * math.pi) * sd))
    half = add("Mul", add("Exp", log_gap), 0.5)
    # `reading.distance_of_level`
    twice = add("Mul", half, 2.0)
    left = add("Sub", 1.0, add("Exp", add("Neg", twice)))
    left = add("Sub", left, add("Mul", add("Exp", add("Sub", logit, twice)), 2.0))
    log_cosh = add("Sub", add("Sub", half, logit), LOG_2)
    log_cosh = add("Max", add("Add", log_cosh, add("Log", add("Max", left, 1e-300))), 0.0)
    root = add("Sqrt", add("Sub", 1.0, add("Exp", add("Mul", log_cosh, -2.0))))
    r = add("Add", log_cosh, add("Log", add("Add", root, 1.0)))
    centre = add("Add", u, add("Mul", slope, away))
    spread = add("Max", rest, 1e-300)
    sides = add("Neg", add("Add", r, centre)), add("Sub", centre, r)
    outside = add("Add", *(normal_share(graph, add("Div", side, spread)) for side in sides))
    inner = add("Mul", add("Mul", add("Mul", width, y), weights), add("Mul", density, outside))
    inner = add("ReduceSum", inner, last, keepdims=0)
    before = normal_share(graph, add("Div", add("Sub", start, delta), sd))
    return add("Add", add("Squeeze", before, last), inner)


def normal_share(graph: OnnxGraph, x: str) -> str:
    """Φ(x)."""
    tail = graph.add("Mul", erfc(graph, graph.add("Mul", graph.add("Abs", x), math.sqrt(0.5))), 0.5)
    return graph.add("Where", graph.add("Greater", x, 0.0), graph.add("Sub", 1.0, tail), tail)
