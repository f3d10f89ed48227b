"""Variance components: the covariance D of a factor's effects as a function of unbounded θ, and the prior of θ.

D = diag(σ) R diag(σ), with θ = (log σ_1, …, log σ_r, then atanh of the canonical partial correlations of R). The
prior is weak: σ has a half-t distribution with 3 degrees of freedom and scale `scale`, and R the LKJ distribution with
shape 2 (Lewandowski, Kurowicka & Joe 2009), whose partial correlations are independent.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln

T_FREEDOM = 3.0  # degrees of freedom of the half-t prior of a standard deviation
LKJ_SHAPE = 2.0  # shape of the LKJ prior of correlations: 1 is uniform, larger values pull towards 0
SMALLEST_LOG, LARGEST_LOG = -9.0, 5.0  # limits of log σ; the data say nothing beyond them
COVARIANCE_STEP = 1e-5  # step of central differences of D, whose entries are elementary functions


def component_count(width: int) -> int:
    """Return the number of parameters of the covariance of r effects."""
    return width + width * (width - 1) // 2


def covariance_of(theta: np.ndarray, width: int) -> np.ndarray:
    """D (r × r)."""
    sd = np.exp(np.clip(theta[:width], SMALLEST_LOG, LARGEST_LOG))
    root = np.eye(width)
    k = width
    for i in range(1, width):
        left = 1.0
        for j in range(i):
            z = math.tanh(theta[k])
            root[i, j] = z * math.sqrt(left)
            left *= 1.0 - z * z
            k += 1
        root[i, i] = math.sqrt(left)
    root *= sd[:, None]
    return root @ root.T


@dataclass(frozen=True)
class ComponentPrior:
    """The prior of θ; `scale` is that of the standard deviations."""

    scale: float

    def log_density(self, theta: np.ndarray, width: int) -> float:
        """log p(θ), with the Jacobian of the logarithms and of atanh."""
        u = theta[:width]
        ratio = np.exp(2.0 * (u - math.log(self.scale))) / T_FREEDOM
        half_t = math.log(2.0) + gammaln(0.5 * (T_FREEDOM + 1.0)) - gammaln(0.5 * T_FREEDOM)
        half_t -= 0.5 * math.log(T_FREEDOM * math.pi) + math.log(self.scale)
        value = float((half_t - 0.5 * (T_FREEDOM + 1.0) * np.log1p(ratio) + u).sum())
        k = width
        for i in range(1, width):
            for j in range(i):
                # a partial correlation given j others: Beta(a, a) on (-1, 1)
                a = LKJ_SHAPE + 0.5 * (width - 2 - j)
                norm = gammaln(2.0 * a) - 2.0 * gammaln(a) - (2.0 * a - 1.0) * math.log(2.0)
                value += norm + a * (-2.0 * math.log(math.cosh(theta[k])))  # (1-z²)^{a-1} dz/dθ = (1-z²)^a
                k += 1
        return value

    def gradient(self, theta: np.ndarray, width: int) -> np.ndarray:
        """∂ log p/∂θ."""
        found = np.empty_like(theta)
        ratio = np.exp(2.0 * (theta[:width] - math.log(self.scale))) / T_FREEDOM
        found[:width] = 1.0 - (T_FREEDOM + 1.0) * ratio / (1.0 + ratio)
        k = width
        for i in range(1, width):
            for j in range(i):
                found[k] = -2.0 * (LKJ_SHAPE + 0.5 * (width - 2 - j)) * math.tanh(theta[k])
                k += 1
        return found


def divergence_gradient(theta: np.ndarray, width: int, levels: int, second: np.ndarray) -> np.ndarray:
    """∂/∂θ of -½ (G log|D| + tr(D⁻¹S)), where S = Σ_g E[b_g b_gᵀ] (`second`)."""
    inverse = np.linalg.inv(covariance_of(theta, width))
    slope = -0.5 * (levels * inverse - inverse @ second @ inverse)
    found = np.empty_like(theta)
    for k in range(len(theta)):
        step = np.zeros_like(theta)
        step[k] = COVARIANCE_STEP
        change = covariance_of(theta + step, width) - covariance_of(theta - step, width)
        found[k] = np.vdot(slope, change) / (2.0 * COVARIANCE_STEP)
    return found
