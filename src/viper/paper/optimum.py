"""The exact optimum of the ELBO, computed without any of the library's formulas or solvers.

The expectations are sums by the trapezoidal rule, which for Gaussian integrals of analytic functions errs by less than
rounding; the iteration is the fixed point of the stationarity conditions

    Σ⁻¹ = I + Xᵀ diag(E s'(f)) X  (its diagonal, for the mean field)        Xᵀ(y - E s(f)) = μ,

from the posterior mode of scikit-learn, until nothing moves. All in NumPy.
"""

from typing import NamedTuple

import numpy as np
import scipy.linalg
from numpy.typing import NDArray
from scipy.special import expit

Array = NDArray[np.float64]

STILL = 1e-12  # nats between one iterate and the next: near the rounding error of the sums over rows
MOST_ITERATIONS = 200
SPAN = 8.5  # sds: the normal density beyond is below rounding, e^(-36)
DIGITS = 36.0  # -log of the error wanted


class Gaussian(NamedTuple):
    """N(μ, Σ)."""

    mean: Array
    covariance: Array


def optimum(X: Array, y: Array, family: str) -> Gaussian:
    """The maximiser of the exact ELBO under the prior N(0, I), in family "Q" (diagonal) or "Q'" (full)."""
    from sklearn.linear_model import LogisticRegression

    mode = LogisticRegression(solver="newton-cholesky", fit_intercept=False, tol=1e-6).fit(X, y).coef_[0]
    q = Gaussian(mode, np.zeros((X.shape[1],) * 2))
    for _ in range(MOST_ITERATIONS):
        after = improved(X, y, q, family)
        if q.covariance.any() and kl(q, after) < STILL:
            return after
        q = after
    raise RuntimeError(f"the optimum must be found within {MOST_ITERATIONS} iterations; got still moving.")


def improved(X: Array, y: Array, q: Gaussian, family: str) -> Gaussian:
    """Newton's step for μ, and the stationary Σ for the present curvature."""
    slope, curvature = expectations(X @ q.mean, np.sqrt(((X @ q.covariance) * X).sum(1).clip(0.0)))
    precision = np.eye(X.shape[1]) + (X * curvature[:, None]).T @ X
    mean = q.mean + scipy.linalg.solve(precision, X.T @ (y - slope) - q.mean, assume_a="pos")
    if family == "Q":
        return Gaussian(mean, np.diag(1.0 / np.diag(precision)))
    return Gaussian(mean, scipy.linalg.inv(precision))


def expectations(theta: Array, tau: Array) -> tuple[Array, Array]:
    """E[s(f)] and E[s'(f)], f ~ N(ϑ, τ²), by the trapezoidal rule with step h.

    Its error is of the order e^{-2πa/h}, with a = π/τ the distance of the poles of s(ϑ + τz) from the real line, and
    e^{-2π²/h²} from the density.
    """
    largest = max(float(tau.max()), 1e-3)
    step = min(2.0 * np.pi**2 / (DIGITS * largest), np.pi * np.sqrt(2.0 / DIGITS))
    z = np.arange(-np.ceil(SPAN / step), np.ceil(SPAN / step) + 1) * step
    weights = np.exp(-0.5 * z * z)
    weights /= weights.sum()
    slope, curvature = np.zeros_like(theta), np.zeros_like(theta)
    for node, weight in zip(z, weights, strict=True):
        s = expit(theta + node * tau)
        slope += weight * s
        curvature += weight * s * (1.0 - s)
    return slope, curvature


def kl(p: Gaussian, q: Gaussian) -> float:
    """KL(p ‖ q) = ½ Σ_j (λ_j - 1 - log λ_j) + ½ |L⁻¹(μ_p - μ_q)|², λ the eigenvalues of L⁻¹ Σ_p L⁻ᵀ, Σ_q = LLᵀ.

    Written so that it keeps its digits also when p and q nearly agree.
    """
    L = np.linalg.cholesky(q.covariance)
    half = scipy.linalg.solve_triangular(L, p.covariance, lower=True)
    excess = np.linalg.eigvalsh(scipy.linalg.solve_triangular(L, half.T, lower=True)) - 1.0
    near = excess**2 * (0.5 - excess * (1.0 / 3.0 - 0.25 * excess))
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.where(np.abs(excess) < 1e-3, near, excess - np.log1p(excess)).sum()
    shift = scipy.linalg.solve_triangular(L, p.mean - q.mean, lower=True)
    return float(0.5 * (spread + shift @ shift))
