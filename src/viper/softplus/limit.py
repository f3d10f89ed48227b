"""E[log(1+e^X)] itself, the limit l → ∞ of the paper's bound: exact to rounding, or fast to a tolerance.

`limit` expands in the variance if that is small (the heat equation), integrates by Gauss-Hermite quadrature up to
a variance of 0.16, and sums the accelerated series beyond. `sigmoid_moments` does the same for the mean and standard
deviation of s(X). `fast_limit` replaces quadrature and series by a mixture of normals.
"""

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from viper.softplus import normal
from viper.softplus.mixture_table import MIXTURES, Mixture
from viper.softplus.pointwise import (
    Bound,
    Formula,
    KernelRecipe,
    Triple,
    blocked,
    over_terms,
    piecewise,
    polynomial,
    reflected,
    sum_terms,
)
from viper.softplus.quadrature import full_gauss_hermite, sigmoid_difference, smooth_nodes
from viper.softplus.series import TERM_COUNT, accelerated_weights, positive_sd, series

# --- small variances: η = Σ_m (v/2)^m/m! f^{(2m)}(ϑ), the solution of the heat equation ∂η/∂v = ½ ∂²η/∂ϑ² ---

MOST_ORDER = 8
Coefficients = tuple[float, ...]


def softplus_derivatives(count: int) -> tuple[list[Coefficients], list[Coefficients]]:
    """E_1 ... E_count and O_1 ... O_count, by powers of q: f^{(2j)} = q E_j(q) and f^{(2j+1)} = q (1-2s) O_j(q).

    Here q = s(1-s), so that q' = q (1-2s) and (1-2s)² = 1-4q; hence O = (qE)' and E⁺ = (1-4q)(qO)' - 2qO.
    """
    even: list[Coefficients] = [(1.0,)]
    odd: list[Coefficients] = [(1.0,)]
    while len(even) < count:
        padded = (0.0, *odd[-1], 0.0)
        # the coefficient of q^i: (i+1) o_i - 4i o_{i-1} - 2 o_{i-1}
        following = tuple((i + 1) * o - (4 * i + 2) * before for i, (before, o) in enumerate(pairwise(padded)))
        even.append(following)
        odd.append(tuple((i + 1) * e for i, e in enumerate(following)))
    return even, odd


EVEN, ODD = softplus_derivatives(MOST_ORDER + 2)
# After truncation at order m, the first omitted term of h is v^{m+1}/(2^{m+1} (m+1)!) f^{(2m+4)}, and |f^{(2m+4)}| is
# largest at 0, where q = ¼; the omitted terms of η and g are smaller
HEAT_ERRORS = [
    abs(sum(e * 0.25 ** (i + 1) for i, e in enumerate(EVEN[m + 1]))) / (2.0 ** (m + 1) * math.factorial(m + 1))
    for m in range(1, MOST_ORDER + 1)
]


def heat_reach(tolerance: float) -> list[float]:
    """Return the largest variances at which orders 1, 2, ... have errors within `tolerance`."""
    return [(tolerance / error) ** (1.0 / (m + 2)) for m, error in enumerate(HEAT_ERRORS)]


def heat_sum(parts: list[Tensor], variance: Tensor, start: int = 0) -> Tensor:
    """Σ_m (v/2)^m start!/(m+start)! R_m, nested in v."""
    total = parts[-1]
    for m in range(len(parts) - 1, 0, -1):
        total = torch.addcmul(parts[m - 1], total, variance, value=0.5 / (m + start))
    return total


def heat_moments(mean: Tensor, variance: Tensor, order: int) -> Triple:
    """η, g and h for ϑ <= 0 by one sigmoid and one logarithm; the relative error is about HEAT_ERRORS v^{order+1}."""
    s = torch.sigmoid(mean)
    q = torch.addcmul(s, s, s, value=-1.0)
    even, odd = [polynomial(row, q) for row in EVEN[: order + 1]], [polynomial(row, q) for row in ODD[:order]]
    first = (q * variance).mul_(0.5)
    value = torch.addcmul(-torch.log1p(-s), first, heat_sum(even[:order], variance, 1))
    slope = torch.addcmul(s, first, heat_sum(odd, variance, 1) * (1.0 - 2.0 * s))
    return value, slope, heat_sum(even, variance).mul_(q)


def heat(tolerance: float, most: int = MOST_ORDER) -> Formula:
    """Expand to the lowest order whose error in a block is within `tolerance`, but not beyond order `most`."""
    reach = heat_reach(tolerance)[:most]

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        largest = math.inf if torch.compiler.is_compiling() or not variance.numel() else float(variance.max())
        return heat_moments(mean, variance, 1 + sum(largest > v for v in reach[:-1]))

    return blocked(reflected(moments), 12, native=True)


# --- the limit to rounding ---

HEAT_TOLERANCE = 2.2e-15  # error of h, whose relative error at ϑ = 0, where h = ¼, is then below 1e-14
HEAT_EXACT = heat_reach(HEAT_TOLERANCE)[-1]  # v: 0.029
FEW_EXACT, FEW_NODES = 0.055, 10  # v up to which a Gauss-Hermite rule with this many nodes is exact to rounding
NODES_EXACT, NODE_COUNT = 0.16, 16  # likewise (docs/certificate.md: errors below 1e-16)


@cache
def limit() -> Bound:
    """E[log(1+e^X)] itself (Corollary 1), to rounding."""
    few, quadrature = smooth_nodes(FEW_NODES), smooth_nodes(NODE_COUNT)
    tail = series(accelerated_weights(TERM_COUNT))
    enough = piecewise(((FEW_EXACT, few.moments), (NODES_EXACT, quadrature.moments)))

    def nodes(mean: Tensor, variance: Tensor) -> Triple:
        """Use as few nodes as the variance allows; compiled code cannot inspect it and uses the larger number."""
        return (quadrature.moments if torch.compiler.is_compiling() else enough)(mean, variance)

    regimes = ((HEAT_EXACT, heat(HEAT_TOLERANCE)), (NODES_EXACT, nodes), (math.inf, tail.moments))
    partials = piecewise(((NODES_EXACT, quadrature.partials), (math.inf, tail.partials)))
    return Bound(piecewise(regimes), partials, KernelRecipe("heat", MOST_ORDER, HEAT_EXACT))


# --- the probability s(X): mean and standard deviation ---


def sigmoid_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """E[s(X)] and the standard deviation of s(X), to rounding."""
    branches = (
        (NODES_EXACT, blocked(sigmoid_moments_by_nodes, 4 * NODE_COUNT)),
        (math.inf, blocked(sigmoid_moments_by_series, 6 * TERM_COUNT)),
    )
    average, std, _ = piecewise(branches)(-mean.abs(), variance)
    return torch.where(mean > 0, 1.0 - average, average), std


def sigmoid_moments_by_nodes(mean: Tensor, variance: Tensor) -> Triple:
    """Mean and standard deviation of s(X) by Gauss-Hermite, from deviations s(x_j) - s(ϑ), which do not cancel."""
    z, w = full_gauss_hermite(NODE_COUNT)
    step = over_terms(z, mean) * variance.sqrt()
    deviation = sigmoid_difference(mean, mean + step, step)
    shift = sum_terms(w, deviation)
    return torch.sigmoid(mean) + shift, (sum_terms(w, deviation**2) - shift**2).clamp(min=0.0).sqrt(), shift


def sigmoid_moments_by_series(mean: Tensor, variance: Tensor) -> Triple:
    """Mean and standard deviation of s(X) from E[s] and E[s²] = E[s - s'], whose leading terms cancel one by one."""
    sd, w = positive_sd(variance), accelerated_weights(TERM_COUNT)
    k = torch.arange(1, TERM_COUNT + 1, dtype=torch.float64)
    below, above = normal.exponential_tails(mean, sd, over_terms(k, mean))
    positive = normal.cdf(mean / sd)
    average = positive + sum_terms(w, below - above)
    square = positive + sum_terms(w * (1 - k), below) - sum_terms(w * (1 + k), above)
    return average, (square - average**2).clamp(min=0.0).sqrt(), square


# --- the fast path: the logistic as a scale mixture of normals ---

COARSEST = 1e-4  # the expansion is at least this accurate; otherwise h > 0 could fail
FAST_ORDER = 5  # a longer expansion costs as much as the mixture


@cache
def fast_limit(tolerance: float) -> Bound | None:
    """The limit with an absolute error of at most `tolerance` in all three moments; None if no table reaches that."""
    table = smallest_mixture(tolerance)
    if table is None:
        return None
    mixed = mixture(table)
    tolerance = min(tolerance, COARSEST)
    small = heat_reach(tolerance)[FAST_ORDER - 1]
    regimes = ((small, heat(tolerance, FAST_ORDER)), (math.inf, mixed.moments))
    recipe = KernelRecipe("heat", FAST_ORDER, small, tolerance)
    return Bound(piecewise(regimes, native=True), mixed.partials, recipe)


def smallest_mixture(tolerance: float) -> Mixture | None:
    """Return the table with the fewest normals among those with an error of at most `tolerance`."""
    return min((t for t in MIXTURES if t.error <= tolerance), key=lambda t: len(t.weights), default=None)


def mixture(table: Mixture) -> Bound:
    """s(x) ≈ Σ_j p_j Φ(x/σ_j): with d_j = √(v + σ_j²) and z_j = ϑ/d_j, g = Σ p_j Φ(z_j), h = Σ p_j φ(z_j)/d_j."""
    weights, variances = (torch.tensor(x, dtype=torch.float64) for x in (table.weights, table.variances))
    log_weights = torch.tensor([math.log(p / normal.SQRT_2PI) for p in table.weights], dtype=torch.float64)
    half_weights, twice_variances = 0.5 * weights, 2.0 * variances

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        # r_j = 1/(√2 d_j) and x_j = z_j/√2, so that Φ(z_j) = ½ + ½ erf(x_j) and p_j φ(z_j) = e^{b_j - x_j²}
        rate = over_terms(twice_variances, variance).add(variance, alpha=2.0).rsqrt_()
        x = mean * rate
        density = torch.addcmul(over_terms(log_weights, mean), x, x, value=-1.0).exp_()
        slope = sum_terms(half_weights, x.erf_()).add_(0.5).clamp_(0.0, 1.0)
        spread = (density / rate).sum(0).mul_(math.sqrt(0.5))
        value = torch.addcmul(spread, mean, slope).clamp_(min=0.0)
        return value, slope, density.mul_(rate).sum(0).mul_(math.sqrt(2.0))

    def partials(mean: Tensor, variance: Tensor) -> Triple:
        rate = torch.rsqrt(over_terms(variances, variance) + variance)
        z = mean * rate
        density = normal.pdf(z) * rate
        third = -sum_terms(weights, density * rate * z)
        return sum_terms(weights, density), third, 0.5 * sum_terms(weights, density * rate**2 * (z * z - 1.0))

    width = 4 * len(table.weights)
    return Bound(blocked(moments, width, native=True), blocked(partials, width, native=True))


# --- one Gaussian for a mixture ---

NEWTON_STEPS = 12  # for the mean of f
NEWTON_ROUNDING = 1e-13  # steps of the mean below this are rounding
LEAST_PROBABILITY = 1e-290


def mean_of_same_probability(weights: Tensor, thetas: Tensor, variances: Tensor, variance: Tensor) -> Tensor:
    """ϑ with E s(f) = Σ π_k E s(f_k) for f ~ N(ϑ, τ²), by Newton's method for its logarithm, which is concave in ϑ."""
    moments = limit().moments
    # Rows with a probability above ½ are reflected, because that of the other class is then known more precisely.
    sign = torch.where(weights @ moments(thetas, variances)[1] > 0.5, -1.0, 1.0)
    p = (weights @ moments(sign * thetas, variances)[1]).clamp(min=LEAST_PROBABILITY)
    # s(f) ≈ Φ(√(π/8) f)
    theta = torch.logit(p) * (1.0 + math.pi / 8.0 * variance).sqrt()
    for _ in range(NEWTON_STEPS):
        _, g, h = (x.clamp(min=LEAST_PROBABILITY) for x in moments(theta, variance))
        step = (g / p).log() * g / h
        theta = theta - step
        if not bool((step.abs() > NEWTON_ROUNDING * (1.0 + theta.abs())).any()):
            break
    return sign * theta
