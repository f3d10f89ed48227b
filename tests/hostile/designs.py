"""Nasty designs for logistic regression, and a judge that knows the right answer by other means.

`designs(seed, count)` yields problems that are hard on a solver, each made of one to three kinds of trouble: separable
classes, columns that are duplicated, nearly collinear, constant, huge or tiny, with or without a prior that follows
their scale, outliers, dates in seconds, rare classes, few rows, more columns than rows, large offsets, weights from
1e-8 to 1e8, wide and narrow priors, sparse rows, a diagonal posterior. The same seed gives the same designs.

`judge(design)` fits a design and says how that ended:

- "right": the posterior is the optimum, by the judge's own computation;
- "clear": one error of one line with "; got", or a ConvergenceWarning;
- "wrong": an answer that is not the optimum, without a word;
- "raw": any other exception or warning.

The ELBO is concave in the mean and the Cholesky factor of q, so its stationary point is the optimum. The judge takes
the fitted q and computes in extended precision how far the next step would go: with moments of the softplus by the
trapezoidal rule (viper's are a series), and with a QR decomposition (viper's is Cholesky's). `report(seed, count)`
returns the lines for all designs that did not end right, and the counts; run as a script, this file prints them.
"""

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from scipy.special import expit, ndtr

from viper import VariationalLogisticRegression
from viper.errors import ConvergenceWarning

FEW = 1e-5  # nats to the optimum: far above the solver's tolerance, far below what anyone could notice
SHARE = 1e-4  # of a standard deviation
SHARE_OF_SD = 5e-3  # an sd that is off by this share costs about as many nats
SLOW = 5.0  # seconds
ROUNDING = 1e-12  # nats for each nat of the sums: their rounding


@dataclass
class Design:
    """Rows, labels and options of one fit."""

    name: str
    X: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None = None
    offset: np.ndarray | None = None
    options: dict[str, Any] = field(default_factory=dict)
    sparse: bool = False

    def fit(self) -> VariationalLogisticRegression:
        X = scipy.sparse.csr_matrix(self.X) if self.sparse else self.X
        return VariationalLogisticRegression(**self.options).fit(X, self.y, self.weight, self.offset)


class Verdict(NamedTuple):
    """How a fit ended, in a word and a line, and the seconds it took."""

    word: str
    line: str
    seconds: float


# --- the designs ---


def designs(seed: int, count: int) -> Iterator[Design]:
    """Yield `count` designs; the k-th depends on the seed and k only."""
    for k in range(count):
        rng = np.random.default_rng([seed, k])
        design = plain(rng)
        chosen = rng.choice(list(TROUBLES), rng.integers(1, 4), replace=False)
        for name in sorted(chosen, key=list(TROUBLES).index):
            TROUBLES[name](design, rng)
            design.name += f" {name}"
        if len(np.unique(design.y)) < 2:
            design.y[0] = ~design.y[0]
        design.name = f"{seed}/{k}{design.name} {design.X.shape[0]}x{design.X.shape[1]}"
        yield design


def plain(rng: np.random.Generator) -> Design:
    """Normal features, and labels of a logistic model."""
    n, p = int(rng.integers(20, 120)), int(rng.integers(1, 12))
    X = rng.normal(size=(n, p))
    return Design("", X, labels(X, rng))


def labels(X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.random(len(X)) < expit(X @ rng.normal(size=X.shape[1]))


def separable(d: Design, rng: np.random.Generator) -> None:
    score = d.X @ rng.normal(size=d.X.shape[1])
    d.y = score > np.median(score)


def duplicated(d: Design, rng: np.random.Generator) -> None:
    d.X = np.hstack([d.X, d.X[:, rng.integers(d.X.shape[1], size=3)]])


def collinear(d: Design, rng: np.random.Generator) -> None:
    near = d.X[:, :1] + 10.0 ** rng.uniform(-9, -3) * rng.normal(size=(len(d.X), 2))
    d.X = np.hstack([d.X, near])


def powers(d: Design, rng: np.random.Generator) -> None:
    """A Vandermonde matrix."""
    x = rng.uniform(0, rng.choice([1.0, 10.0, 100.0]), len(d.X))
    d.X = x[:, None] ** np.arange(1, rng.integers(4, 9))


def constant(d: Design, rng: np.random.Generator) -> None:
    d.X[:, 0] = rng.choice([0.0, 1.0, 1e6])


def scaled_with_prior(d: Design, rng: np.random.Generator) -> None:
    """Columns and their prior are scaled together, which changes nothing but units."""
    scale = 10.0 ** rng.uniform(-140, 140, d.X.shape[1])
    d.X = d.X * scale
    d.options["prior_scale"] = 1.0 / scale
    d.options.pop("prior_mean", None)


def scaled(d: Design, rng: np.random.Generator) -> None:
    d.X = d.X * 10.0 ** rng.uniform(-12, 12, d.X.shape[1])


def outliers(d: Design, rng: np.random.Generator) -> None:
    d.X[rng.integers(len(d.X), size=2), rng.integers(d.X.shape[1], size=2)] *= 10.0 ** rng.uniform(3, 12)


def dates(d: Design, rng: np.random.Generator) -> None:
    d.X[:, 0] = 1.7e9 + np.cumsum(rng.integers(1, 10_000, len(d.X)))


def rare(d: Design, rng: np.random.Generator) -> None:
    d.y = np.zeros(len(d.X), dtype=bool)
    d.y[rng.integers(len(d.X))] = True


def few_rows(d: Design, rng: np.random.Generator) -> None:
    keep = int(rng.integers(2, 6))
    d.X, d.y = d.X[:keep].copy(), d.y[:keep].copy()
    d.weight, d.offset = (None if x is None else x[:keep] for x in (d.weight, d.offset))


def wide(d: Design, rng: np.random.Generator) -> None:
    d.X = rng.normal(size=(len(d.X), len(d.X) + int(rng.integers(5, 60))))
    d.X[:, : len(d.X) // 4] *= 10.0 ** rng.uniform(-9, 9, len(d.X) // 4)
    d.options.pop("prior_scale", None)


def offsets(d: Design, rng: np.random.Generator) -> None:
    d.offset = 10.0 ** rng.uniform(0, 5) * rng.normal(size=len(d.X))


def weights(d: Design, rng: np.random.Generator) -> None:
    d.weight = 10.0 ** rng.uniform(-8, 8, len(d.X)) if rng.random() < 0.5 else np.full(len(d.X), 1e10)


def wide_prior(d: Design, rng: np.random.Generator) -> None:
    d.options |= {"prior_scale": 10.0 ** rng.uniform(1, 8), "intercept_scale": 10.0 ** rng.uniform(1, 6)}


def vague_prior(d: Design, rng: np.random.Generator) -> None:
    d.options["prior_scale"] = 10.0 ** rng.uniform(20, 100)


def narrow_prior(d: Design, rng: np.random.Generator) -> None:
    d.options["prior_scale"] = 10.0 ** rng.uniform(-6, -1)


def prior_far_away(d: Design, rng: np.random.Generator) -> None:
    d.options["prior_mean"] = 10.0 ** rng.uniform(0, 4)


def no_intercept(d: Design, rng: np.random.Generator) -> None:
    d.options["fit_intercept"] = False


def mean_field(d: Design, rng: np.random.Generator) -> None:
    d.options["covariance"] = "diagonal"


def sparse(d: Design, rng: np.random.Generator) -> None:
    d.X = np.where(rng.random(d.X.shape) < 0.7, 0.0, d.X)
    d.sparse = True


def heavy_tails(d: Design, rng: np.random.Generator) -> None:
    d.X = rng.standard_cauchy(d.X.shape)
    d.y = labels(np.sign(d.X), rng)


TROUBLES = {
    each.__name__: each
    for each in (
        heavy_tails, wide, powers, duplicated, collinear, constant, dates, outliers, scaled, sparse, separable, rare,
        few_rows, offsets, weights, wide_prior, vague_prior, narrow_prior, prior_far_away, no_intercept, mean_field,
        scaled_with_prior,
    )
}  # fmt: skip
# in this order: some make new columns, others change them


# --- the judge ---


def judge(design: Design) -> Verdict:
    """Fit the design and compare the answer with the optimum."""
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            model = design.fit()
        except ValueError as error:
            one_line = "; got" in str(error) and "\n" not in str(error)
            return Verdict("clear" if one_line else "raw", str(error), time.perf_counter() - began)
        except Exception as error:  # noqa: BLE001 (what else there is, is what is judged)
            return Verdict("raw", f"{type(error).__name__}: {error}", time.perf_counter() - began)
    seconds = time.perf_counter() - began
    with np.errstate(all="ignore"):
        faults = distance(model, design)
    if strange := [each for each in noted if each.category.__module__ != ConvergenceWarning.__module__]:
        return Verdict("raw", str(strange[0].message), seconds)
    if short := [each for each in noted if issubclass(each.category, ConvergenceWarning)]:
        return Verdict("clear", f"{short[0].message} {faults}", seconds)
    return Verdict("wrong" if faults else "right", faults, seconds)


def distance(model: VariationalLogisticRegression, design: Design) -> str:
    """Return what is wrong with a fitted posterior, or nothing.

    With A the rows in units of the prior and Λ = I + Aᵀ diag(c h) A, the mean's next step is Λ⁻¹ times the gradient,
    half of whose squared length in Λ⁻¹ is the number of nats to the optimum, and the posterior covariance is Λ⁻¹.
    """
    long = np.longdouble
    ones = np.ones((len(design.X), 1)) if model.fit_intercept else np.empty((len(design.X), 0))
    raw = np.hstack([design.X, ones]).astype(long)
    sd = 1.0 / np.sqrt(model.prior_.precision.numpy().astype(long))
    prior_mean, mean = model.prior_.mean.numpy().astype(long), model.posterior_.mean.numpy().astype(long)
    rows, weight = raw * sd, np.ones(len(raw)) if design.weight is None else design.weight
    offset = np.zeros(len(raw)) if design.offset is None else design.offset
    X = scipy.sparse.csr_matrix(design.X) if design.sparse else design.X
    theta, tau = model.predict_latent(X, design.offset)
    if not (np.isfinite(theta).all() and np.isfinite(tau).all()):
        return f"log-odds {theta} with sds {tau}"
    exact = raw @ mean + offset
    rounding = 1e-13 * (np.abs(raw) @ np.abs(mean) + np.abs(offset))
    if (off := float(np.max(np.abs(exact - theta) - SHARE * tau - rounding))) > 0:
        return f"log-odds off by {off:.1e}"
    slope, curvature = moments(np.where(design.y, theta, -theta).astype(float), tau)
    # slope: E s(-f) for y = 1 and E s(f) for y = 0, so that no digits cancel
    pull = np.where(design.y, 1.0, -1.0) * slope * weight
    gradient = rows.T @ pull.astype(long) - (mean - prior_mean) / sd
    size = np.abs(rows).T @ np.abs(pull) + np.abs((mean - prior_mean) / sd)
    root = triangle(np.vstack([np.sqrt(weight * curvature)[:, None] * rows, np.eye(rows.shape[1])]))
    step = solve_lower(root.T, gradient[:, None])[:, 0]
    noise = solve_lower(root.T, (1e-15 * size)[:, None])[:, 0]
    left = 0.5 * float(np.sum(np.maximum(np.abs(step) - np.abs(noise), 0.0) ** 2))
    rounding = 1e-15 * float(weight @ (np.abs(theta) + tau))
    if left > FEW + min(rounding, 10 * FEW) + ROUNDING * abs(model.elbo_):
        return f"{left:.1e} nats short"
    if design.options.get("covariance") == "diagonal":
        inner = 1.0 / np.sum(root * root, 0)
        spread = np.sum(rows**2 * inner, 1)
    else:
        inner = np.sum(solve_lower(root.T, np.eye(len(root), dtype=long)) ** 2, 0)
        spread = np.sum(solve_lower(root.T, rows.T) ** 2, 0)
    for what, ours, theirs in (
        ("the sd of a log-odds", np.sqrt(spread), tau),
        ("the sd of a coefficient", sd * np.sqrt(inner), np.sqrt(model.posterior_.variance.numpy())),
    ):
        ratio = np.abs(theirs / np.where(ours > 0, ours, 1.0) - 1.0)[ours > 0]
        if len(ratio) and not ratio.max() < SHARE_OF_SD:
            return f"{what} is off by {float(ratio.max()):.1e} of itself"
    return ""


def moments(theta: np.ndarray, tau: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E s(-X) and E s'(X) for X ~ N(ϑ, τ²) by the trapezoidal rule, which converges exponentially for such integrands.

    For τ < 1, over the normal density; otherwise over the logistic density s', with
    E s(-X) = ∫ s'(u) Φ((-ϑ-u)/τ) du and E s'(X) = ∫ s'(u) φ((u-ϑ)/τ)/τ du.
    """
    slope, curvature = np.empty_like(theta), np.empty_like(theta)
    small = tau < 1.0
    z = np.arange(-14.0, 14.0, 0.05)
    density = 0.05 * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    s = expit(-(theta[small, None] + tau[small, None] * z))
    slope[small], curvature[small] = s @ density, (s * expit(theta[small, None] + tau[small, None] * z)) @ density
    u = np.arange(-700.0, 700.0, 0.25)
    logistic = 0.25 * expit(u) * expit(-u)
    t, scale = theta[~small, None], tau[~small, None]
    slope[~small] = ndtr((-t - u) / scale) @ logistic
    curvature[~small] = (np.exp(-0.5 * ((u - t) / scale) ** 2) / (np.sqrt(2 * np.pi) * scale)) @ logistic
    return slope, curvature


def triangle(matrix: np.ndarray) -> np.ndarray:
    """R of the QR decomposition by Householder's reflections, largest rows first, in extended precision."""
    matrix = matrix[np.argsort(-np.abs(matrix).max(1))].copy()
    for j in range(matrix.shape[1]):
        column = matrix[j:, j]
        peak = np.abs(column).max()
        if peak == 0:
            continue
        v = column / peak
        v[0] += np.copysign(np.sqrt(v @ v), v[0])
        v /= np.sqrt(v @ v)
        matrix[j:] -= 2.0 * np.outer(v, v @ matrix[j:])
    return np.triu(matrix[: matrix.shape[1]])


def solve_lower(lower: np.ndarray, right: np.ndarray) -> np.ndarray:
    """L⁻¹ b in extended precision."""
    out = np.array(right, dtype=np.longdouble)
    for j in range(len(lower)):
        out[j] = (out[j] - lower[j, :j] @ out[:j]) / lower[j, j]
    return out


def prepare(folder: Path) -> None:
    """Nothing is needed."""


def run_case(material: None, seed: int) -> tuple[str, str]:
    """Judge one design, in the words of the other hostile cases."""
    design = next(designs(seed, 1))
    found = judge(design)
    return "line" if found.word == "clear" else found.word, f"{design.name}: {found.line}"


def report(seed: int, count: int) -> Iterator[str]:
    """Judge designs, and yield a line for each that did not end right or took long, and at last the counts."""
    counts = dict.fromkeys(("right", "clear", "wrong", "raw"), 0)
    longest = 0.0
    for each in designs(seed, count):
        found = judge(each)
        counts[found.word] += 1
        longest = max(longest, found.seconds)
        if found.word != "right" or found.seconds > SLOW:
            yield f"{each.name}: {found.word} {found.line} ({found.seconds:.1f} s)"
    ended = ", ".join(f"{number} {word}" for word, number in counts.items())
    yield f"{count} designs: {ended}; {longest:.1f} s at most"


if __name__ == "__main__":
    import sys

    for text in report(int(sys.argv[1]), int(sys.argv[2])):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
