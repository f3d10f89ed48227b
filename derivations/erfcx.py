"""The polynomial behind `viper.softplus.normal.erfcx`.

erfcx(x) = e^{x²} erfc(x) falls from 1 at x = 0 to 1/(√π x) for large x. The map t = (x - K)/(x + K) takes [0, ∞) to
[-1, 1), where (x + K) erfcx(x) is smooth. The table holds its Chebyshev interpolant in t, written in powers of t; this
costs no accuracy, because Σ|c_i| is hardly larger than the function. K = 3.25 needs the fewest coefficients: 23 leave a
relative error of 2e-16.

Run `python derivations/erfcx.py` to print the table and its error, or add `--check` to compare it with the one in use.
"""

import sys
import textwrap

from mpmath import mp, mpf
from numpy.polynomial import chebyshev

COUNT = 23
CENTRE = mpf("3.25")


def erfcx(x: mpf) -> mpf:
    """e^{x²} erfc(x), by its continued fraction where e^{x²} would be huge."""
    if x < 20:
        return mp.exp(x * x) * mp.erfc(x)
    tail = mpf(0)
    for k in range(80, 0, -1):
        tail = k / 2 / (x + tail)
    return 1 / (mp.sqrt(mp.pi) * (x + tail))


def scaled(t: mpf) -> mpf:
    """(x + K) erfcx(x) at x = K (1 + t)/(1 - t)."""
    x = CENTRE * (1 + t) / (1 - t)
    return (x + CENTRE) * erfcx(x)


def table() -> list[mpf]:
    """Coefficients of 1, t, t², ... of the interpolant at the zeros of T_COUNT."""
    angles = [mp.pi * (j + mpf(1) / 2) / COUNT for j in range(COUNT)]
    samples = [scaled(mp.cos(a)) for a in angles]
    powers = [mpf(0)] * COUNT
    for k in range(COUNT):
        weight = (1 if k == 0 else 2) * mp.fsum(f * mp.cos(k * a) for f, a in zip(samples, angles, strict=True)) / COUNT
        for i, c in enumerate(chebyshev.cheb2poly([0] * k + [1])):  # integers below 2^53, hence exact
            powers[i] += weight * int(c)
    return powers


def worst_error(coefficients: list[mpf]) -> float:
    """Largest relative error of the polynomial on a fine grid of t."""
    grid = [mp.cos(mp.pi * (j + mpf(1) / 2) / 500) for j in range(500)]
    return float(max(abs(mp.polyval(coefficients[::-1], t) / scaled(t) - 1) for t in grid))


if __name__ == "__main__":
    mp.dps = 40
    numbers = [float(c) for c in table()]
    print(textwrap.indent(textwrap.fill(", ".join(map(repr, numbers)), 116, break_on_hyphens=False), "    ") + ",")
    print(f"relative error {worst_error([mpf(c) for c in numbers]):.1e}")
    if "--check" in sys.argv:
        from viper.softplus.normal import ERFCX

        sys.exit(0 if tuple(numbers) == ERFCX else "viper.softplus.normal.ERFCX differs from this table")
