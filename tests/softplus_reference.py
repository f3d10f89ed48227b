"""Reference values of the expected softplus in 50 digits, and the table of them in data/softplus_reference.json.

Run `python tests/softplus_reference.py` to write the table again (two minutes). A row holds, for X ~ N(ϑ, v) with
ϑ = mean and v = τ² = variance exactly as printed, and f(x) = log(1+e^x), s = f':

    value E[f(X)]      slope E[s(X)]      curvature E[s'(X)]      std, the standard deviation of s(X)

Two routes, each a trapezoidal rule on an integrand that is positive and analytic:

    direct:    E[F(X)] = ∫ F(x) φ((x-ϑ)/τ)/τ dx                                                    for v <= 100,
    by parts:  E[F(X)] = ∫ F'(u) P(X > u) du,  and once more  E[f(X)] = ∫ s'(u) E[max(X-u, 0)] du  for v > 100,

the second because its integrand is as narrow as s' however large τ is.

Why this is good to 45 digits. (1) Step: the singularities nearest to the real line are those of f, s and s' at ±iπ.
The trapezoidal rule with step δ on a function analytic in |Im x| <= a errs by at most 2/(e^{2πa/δ}-1) ∫|F(x±ia)| dx.
On the lines Im x = ±a the Gaussian and its tails are larger by e^{a²/2τ²} than on the real line, and the rest, if
a = 3, by at most 1/sin²(3) = 50 times what it is nearby; integrands are positive, so this is a *relative* error. With
δ = min(1,τ)/8 and a = min(3, 16πτ) it is below e^{-140} for every τ. (2) Range: f, s, s', s², φ and Φ are log-concave,
and so are their products and E[max(X-u, 0)]. Such terms rise to one peak and then fall faster than geometrically, so a
walk outward from the peak may stop at the first term below 10^-60 of it (10^-(digits+10) where fewer are asked for):
what is left out is a few times that term. (3) Arithmetic: every term is positive; E[s²] - E[s]² loses about
2 log10(1/τ) digits, at most 16 of the 50 here. Adaptive quadrature, by contrast, misses narrow peaks without notice.
"""

import json
import random
from functools import cache
from pathlib import Path

import mpmath as mp

TABLE = Path(__file__).parent / "data" / "softplus_reference.json"
DIGITS = 50
BY_PARTS_ABOVE = 100.0  # variance


def sigmoid(x):
    return 1 / (1 + mp.exp(-x)) if x >= 0 else mp.exp(x) / (1 + mp.exp(x))


def logistic_density(x):
    return sigmoid(x) * sigmoid(-x)


def peak(term, low, high):
    """The n in [low, high] with the largest term, for terms that rise and then fall."""
    while low < high:
        middle = (low + high) // 2
        if term(middle) < term(middle + 1):
            low = middle + 1
        else:
            high = middle
    return low


def trapezoid(integrand, step, low, high):
    """step Σ_n integrand(n step) over all integers n, for a log-concave integrand with its peak in [low, high]."""

    def term(n):
        return integrand(n * step)

    start = peak(term, int(mp.floor(low / step)), int(mp.ceil(high / step)))
    total = largest = term(start)
    for direction in (-1, 1):
        n = start + direction
        while (t := term(n)) > largest * mp.mpf(10) ** -(mp.mp.dps + 10):
            total += t
            n += direction
    return step * total


def four_functions(x):
    """f(x), s(x), s'(x) and s(x)², from one exponential."""
    e = mp.exp(-abs(x))
    small, large = e / (1 + e), 1 / (1 + e)
    s = large if x >= 0 else small
    return max(x, 0) + mp.log1p(e), s, small * large, s * s


def direct(wanted, mean, variance):
    """E[F(X)] = ∫ F(ϑ+τz) φ(z) dz of these of the four; the peak is where z = τ (log F)', which is between -1 and 2."""
    sd, root = mp.sqrt(variance), mp.sqrt(2 * mp.pi)

    @cache
    def weighted(z):
        density = mp.exp(-z * z / 2) / root
        return [density * value for value in four_functions(mean + sd * z)]

    step = min(1, 1 / sd) / 8
    return tuple(trapezoid(lambda z, k=k: weighted(z)[k], step, -sd, 2 * sd) for k in wanted)


def by_parts(derivative, mean, variance, order=1):
    """E[F(X)] = ∫ F'(u) P(X > u) du, or with order 2 ∫ F''(u) E[max(X-u, 0)] du.

    The peak is between min(ϑ, 0) - 3, left of which the first factor rises by more than the second falls (its
    logarithm by at least 0.9 against 1.3/τ per unit), and 1, right of which both fall.
    """
    sd = mp.sqrt(variance)

    def tail(u):
        z = (mean - u) / sd
        return mp.ncdf(z) if order == 1 else sd * mp.npdf(z) + (mean - u) * mp.ncdf(z)

    return trapezoid(lambda u: derivative(u) * tail(u), min(1, sd) / 8, min(mean, 0) - 3, 1)


def expectations(mean, variance, route=None):
    """E[f(X)], E[s(X)], E[s'(X)], E[s(X)²] as mpmath numbers; the route follows the variance unless it is named."""
    mean, variance = mp.mpf(mean), mp.mpf(variance)
    if variance == 0:
        return four_functions(mean)
    if (route or ("by parts" if variance > BY_PARTS_ABOVE else "direct")) == "direct":
        return direct(range(4), mean, variance)
    return (
        by_parts(logistic_density, mean, variance, order=2),
        by_parts(logistic_density, mean, variance),
        *direct([2], mean, variance),  # whose integrand is narrow as it is
        by_parts(lambda u: 2 * sigmoid(u) * logistic_density(u), mean, variance),
    )


def reference(mean, variance):
    """value, slope, curvature, std, as floats. Var[s(X)] = Var[s(-X)], and at -|ϑ| the two terms do not cancel."""
    with mp.workdps(DIGITS):
        value, slope, curvature, _ = expectations(mean, variance)
        _, p, _, p2 = expectations(-abs(mean), variance)
        return tuple(float(x) for x in (value, slope, curvature, mp.sqrt(p2 - p * p)))


def points():
    """(mean, variance) of the table: a grid, both sides of every change of formula, and random points of the box."""
    means = (0.0, -1e-3, 0.7, -3.0, 12.0, -40.0, 40.0, -250.0, 700.0, -700.0)
    sds = (0.0, 1e-8, 1e-3, 0.05, 0.4, 1.0, 5.0, 18.0, 37.5, 100.0, 1e4)
    yield from ((mean, sd * sd) for mean in means for sd in sds)
    # 0.16 is a threshold of viper.softplus.limit, 2.5e-3 was one of its first version
    sides = [v * (1 + side * 1e-12) for v in (2.5e-3, 0.16) for side in (-1, 1)]
    yield from ((mean, v) for mean in (0.0, -1.5, 4.0, -40.0) for v in sides)
    rng = random.Random(0)
    for _ in range(80):
        mean = rng.choice((-1, 1)) * 10 ** rng.uniform(-2, 2.84)
        sd = 10 ** rng.uniform(-4, 4) if rng.random() < 0.5 else 10 ** rng.uniform(-1, 1.7)
        yield mean, sd * sd


def write_table():
    columns = ("mean", "variance", "value", "slope", "curvature", "std")
    rows = [dict(zip(columns, (*point, *reference(*point)), strict=True)) for point in points()]
    lines = ",\n".join(json.dumps(row) for row in rows)
    TABLE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def read_table():
    return json.loads(TABLE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    write_table()
