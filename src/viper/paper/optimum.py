"""The exact optimum of the ELBO, computed without any of the library's formulas or solvers.

Expectations are sums by the trapezoidal rule, whose error for Gaussian integrals of analytic functions is below
rounding. The iteration solves the stationarity conditions

    Σ⁻¹ = I + Xᵀ diag(E s'(f)) X  (its diagonal, for the mean field)        Xᵀ(y - E s(f)) = μ,

from scikit-learn's posterior mode, until nothing moves. Everything is in NumPy.
"""

from typing import NamedTuple

import numpy as np
import scipy.linalg
from scipy.special import expit

STILL = 1e-12  # nats between two iterates: near the rounding error of the sums over rows
MOST_ITERATIONS = 200
SPAN = 8.5  # sds: beyond, the normal density is below rounding, e^-36
EXPONENT = 36.0  # the trapezoidal rule may err by e^-EXPONENT


class NormalDistribution(NamedTuple):
    """N(μ, Σ)."""

    mean: np.ndarray
    covariance: np.ndarray


def exact_optimum(X: np.ndarray, y: np.ndarray, family: str) -> NormalDistribution:
    """The maximiser of the exact ELBO under the prior N(0, I), in family "Q" (diagonal) or "Q'" (full)."""
    from sklearn.linear_model import LogisticRegression

    mode = LogisticRegression(solver="newton-cholesky", fit_intercept=False, tol=1e-6).fit(X, y).coef_[0]
    q = NormalDistribution(mode, np.zeros((X.shape[1],) * 2))
    for _ in range(MOST_ITERATIONS):
        after = improved(X, y, q, family)
        if q.covariance.any() and gaussian_kl(q, after) < STILL:
            return after
        q = after
    raise RuntimeError(f"the iteration must converge within {MOST_ITERATIONS} steps; got one that still moves.")


def improved(X: np.ndarray, y: np.ndarray, q: NormalDistribution, family: str) -> NormalDistribution:
    """Newton's step for μ, and the stationary Σ for the current curvature."""
    slope, curvature = expectations(X @ q.mean, np.sqrt(((X @ q.covariance) * X).sum(1).clip(0.0)))
    precision = np.eye(X.shape[1]) + (X * curvature[:, None]).T @ X
    mean = q.mean + scipy.linalg.solve(precision, X.T @ (y - slope) - q.mean, assume_a="pos")
    if family == "Q":
        return NormalDistribution(mean, np.diag(1.0 / np.diag(precision)))
    return NormalDistribution(mean, scipy.linalg.inv(precision))


def expectations(theta: np.ndarray, tau: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E[s(f)] and E[s'(f)], f ~ N(ϑ, τ²), by the trapezoidal rule with step h.

    Its error is of the order e^{-2πa/h}, where a = π/τ is the distance of the poles of s(ϑ + τz) from the real line,
    plus e^{-2π²/h²} from the density.
    """
    largest = max(float(tau.max()), 1e-3)
    step = min(2.0 * np.pi**2 / (EXPONENT * largest), np.pi * np.sqrt(2.0 / EXPONENT))
    z = np.arange(-np.ceil(SPAN / step), np.ceil(SPAN / step) + 1) * step
    weights = np.exp(-0.5 * z * z)
    weights /= weights.sum()
    slope, curvature = np.zeros_like(theta), np.zeros_like(theta)
    for node, weight in zip(z, weights, strict=True):
        s = expit(theta + node * tau)
        slope += weight * s
        curvature += weight * s * (1.0 - s)
    return slope, curvature


def gaussian_kl(p: NormalDistribution, q: NormalDistribution) -> float:
    """KL(p ‖ q) = ½ Σ_j (λ_j - 1 - log λ_j) + ½ |L⁻¹(μ_p - μ_q)|², λ the eigenvalues of L⁻¹ Σ_p L⁻ᵀ, Σ_q = LLᵀ.

    Written in a form that stays accurate when p and q nearly agree.
    """
    L = np.linalg.cholesky(q.covariance)
    half = scipy.linalg.solve_triangular(L, p.covariance, lower=True)
    excess = np.linalg.eigvalsh(scipy.linalg.solve_triangular(L, half.T, lower=True)) - 1.0
    near = excess**2 * (0.5 - excess * (1.0 / 3.0 - 0.25 * excess))
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.where(np.abs(excess) < 1e-3, near, excess - np.log1p(excess)).sum()
    shift = scipy.linalg.solve_triangular(L, p.mean - q.mean, lower=True)
    return float(0.5 * (spread + shift @ shift))
