"""Gaussian priors: as the user gives them, or with scales from the data.

Scales maximise the ELBO, with the posterior maximised inside.

G(σ) = max_q F(q; σ). By the envelope theorem its gradient is F's own at the inner optimum,

    ∂G/∂log σ_j = ((μ_j - m_j)² + Σ_jj)/σ_j² - 1,

summed over the coefficients that share a scale: all of them ("auto") or one each ("ard").
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from viper.data import checks
from viper.errors import ConvergenceWarning, users_line
from viper.inference.problem import Gaussian, Prior
from viper.models.fitting import Fit

SMALLEST_SCALE, LARGEST_SCALE = 1e-100, 1e100  # so that variances and their logarithms are numbers
SMALLEST, LARGEST = 1e-3, 1e3  # scales that are searched


def read_scale(value: Any, name: str, size: int) -> Tensor:
    """Prior standard deviations: a positive number or one per coefficient -> vector; a covariance matrix as it is."""
    array = checks.read_numbers(value, name)
    if array.ndim == 2:
        return read_covariance(torch.tensor(array), name, size)
    if array.ndim > 1 or (array.ndim == 1 and len(array) != size):
        raise ValueError(
            f"{name} must be a number, a vector of {size} (one per feature) or a {size}×{size} covariance matrix; "
            f"got shape {tuple(array.shape)}."
        )
    if not ((array >= SMALLEST_SCALE) & (array <= LARGEST_SCALE)).all():
        raise ValueError(
            f"{name} must be positive and finite, between {SMALLEST_SCALE:g} and {LARGEST_SCALE:g}; got {value!r}."
        )
    return torch.from_numpy(np.full(size, array))


def read_covariance(matrix: Tensor, name: str, size: int) -> Tensor:
    """A symmetric positive definite matrix of the right size."""
    if tuple(matrix.shape) != (size, size):
        raise ValueError(f"{name} as a covariance matrix must be {size}×{size}; got {tuple(matrix.shape)}.")
    if not bool(matrix.isfinite().all()) or not torch.allclose(matrix, matrix.T):
        raise ValueError(f"{name} as a covariance matrix must be finite and symmetric; got one that is not.")
    smallest, largest = torch.linalg.eigvalsh(matrix)[[0, -1]].tolist()
    if smallest <= size * torch.finfo(torch.float64).eps * largest:
        raise ValueError(
            f"{name} as a covariance matrix must be positive definite; got smallest eigenvalue {smallest:.3g}. "
            "Add a small multiple of the identity."
        )
    return matrix


def read_mean(value: Any, size: int) -> Tensor:
    """Prior means: a number, or one per feature."""
    array = checks.read_numbers(value, "prior_mean")
    if array.ndim > 1 or (array.ndim == 1 and len(array) != size):
        raise ValueError(
            f"prior_mean must be a number or a vector of {size}, one per feature; got shape {tuple(array.shape)}."
        )
    if not np.isfinite(array).all():
        raise ValueError(f"prior_mean must be finite; got {value!r}.")
    return torch.from_numpy(np.full(size, array))


def make_prior(mean: Tensor, scale: Tensor, intercept_scale: Tensor | None) -> Prior:
    """N(mean, scale²) on the coefficients, with N(0, intercept_scale²) on an intercept, the last coordinate."""
    diagonal = scale.ndim == 1
    precision = scale.square().reciprocal() if diagonal else torch.cholesky_inverse(torch.linalg.cholesky(scale))
    if intercept_scale is None:
        return Prior(mean, precision)
    own = intercept_scale.square().reciprocal()
    mean = torch.cat([mean, mean.new_zeros(1)])
    return Prior(mean, torch.cat([precision, own]) if diagonal else torch.block_diag(precision, own[None]))


def best_scales(solve: Callable[[Tensor, Gaussian | None], Fit], size: int, separate: bool) -> tuple[Tensor, Fit]:
    """The scales of the first `size` coefficients that maximise the ELBO, and the fit there.

    `solve(scales, start)` fits the posterior under given scales, starting from a q.
    """
    warm: Gaussian | None = None

    def negative(log_scale: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal warm
        scale = expand(log_scale)
        posterior, prior, _, result = solve(scale, warm)
        warm = result.q
        second = (posterior.mean - prior.mean)[:size].square() + posterior.variance[:size]
        slope = (second.cpu() / scale.square() - 1.0).numpy()
        return -result.objective, -slope if separate else -slope.sum(keepdims=True)

    def expand(log_scale: np.ndarray) -> Tensor:
        return torch.from_numpy(np.exp(log_scale)).expand(size).clone()

    count = size if separate else 1
    bounds = [(np.log(SMALLEST), np.log(LARGEST))] * count
    options = {"maxiter": 200, "ftol": 1e-12, "gtol": 1e-6}
    with warnings.catch_warnings():
        # a scale far off, tried once on the way, may be hard to fit; the last fit below speaks for itself
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = scipy.optimize.minimize(
            negative, np.zeros(count), jac=True, method="L-BFGS-B", bounds=bounds, options=options
        )
    scale = expand(found.x)
    if float(scale.max()) > 0.999 * LARGEST or (not separate and float(scale.min()) < 1.001 * SMALLEST):
        warnings.warn(
            f"the best prior_scale must lie between {SMALLEST} and {LARGEST}; got an end of that range. "
            "Standardise the features.",
            stacklevel=users_line(),
        )
    return scale, solve(scale, warm)
