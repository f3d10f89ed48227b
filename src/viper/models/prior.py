"""The Gaussian prior of the coefficients: checks of the options, and scales chosen by maximising the ELBO.

The chosen scales maximise G(σ) = max_q F(q; σ), the ELBO with the posterior maximised inside. By the envelope theorem
its gradient is that of F at the inner optimum,

    ∂G/∂log σ_j = ((μ_j - m_j)² + Σ_jj)/σ_j² - 1,

summed over the coefficients that share a scale: all of them ("auto"), or only one ("ard").
"""

import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from viper.data import checks
from viper.errors import ConvergenceWarning, instead, shown, users_line
from viper.inference.problem import Prior
from viper.models.facts import INTERCEPT

SMALLEST_SCALE, LARGEST_SCALE = 1e-150, 1e150  # beyond, variances underflow or overflow
SMALLEST_CHOSEN, LARGEST_CHOSEN = 1e-3, 1e3  # the range that is searched
DEFAULT_SCALE = 1.0  # prior sd of the coefficients
OTHERS = "*"  # in a dictionary by name: all columns that the dictionary does not name


class PriorMixin:
    """Estimators with coefficients of columns, and options `prior_mean` and `prior_scale` for them."""

    prior_mean: Any
    prior_scale: Any
    n_features_in_: int

    def _columns(self) -> list[str]:
        known = getattr(self, "feature_names_in_", [f"x{j}" for j in range(self.n_features_in_)])
        return [str(name) for name in known]

    def _scale(self) -> Tensor:
        """The prior sds of the coefficients, or their covariance."""
        given = entries_by_name(self.prior_scale, "prior_scale", self._columns, DEFAULT_SCALE)
        return read_scale(given, "prior_scale", self.n_features_in_)

    def _prior_mean(self) -> Any:
        return entries_by_name(self.prior_mean, "prior_mean", self._columns, 0.0)

    def _fit_scales(self, solve: Callable[[Tensor, Any, bool], Any], careful: bool) -> Any:
        """Fit under the given scales, or under those that maximise the ELBO, and set `prior_scale_`."""
        if isinstance(self.prior_scale, str):
            scale, fit = best_scales(solve, self.n_features_in_, self.prior_scale == "ard", careful)
        else:
            scale = self._scale()
            fit = solve(scale, None, True)
        self.prior_scale_ = scale.numpy()
        return fit


def check_scale_word(value: Any) -> None:
    """Raise if the option `prior_scale` is a word that has no meaning; numbers are checked with the columns."""
    if isinstance(value, str) and value not in ("auto", "ard"):
        raise ValueError(
            f"prior_scale must be numbers, 'auto' or 'ard'; got {shown(value)}. Pass one number for all columns, or "
            "'auto' to have it chosen."
        )


def entries_by_name(value: Any, option: str, columns: Callable[[], list[str]], default: float) -> Any:
    """Return one number per column from a dictionary by name; anything else is returned unchanged.

    A name is that of a column, or of a formula's term or category, which stands for all of its columns. Columns that
    the dictionary does not name get the number of "*", or the default.
    """
    if not isinstance(value, Mapping):
        return value
    names = columns()  # 100,000 of them take as long as several passes
    found = dict.fromkeys(range(len(names)), value.get(OTHERS, default))
    terms = [re.sub(r"\[[^\]]*\]", "", name) for name in names]
    exact: dict[int, Any] = {}
    for name, number in value.items():
        if name == OTHERS:
            continue
        if name in names:
            exact[names.index(name)] = number
            continue
        of_term = [j for j, term in enumerate(terms) if term in (name, f"C({name})") and term != names[j]]
        if not of_term:
            known = list(dict.fromkeys([*names, *terms]))
            hint = "Set intercept_scale for it." if name == INTERCEPT else instead(str(name), known)
            raise ValueError(f"{option} must name columns; got {name!r}. {hint}")
        found |= dict.fromkeys(of_term, number)
    return [{**found, **exact}[j] for j in range(len(names))]


def read_scale(value: Any, name: str, size: int) -> Tensor:
    """Check prior standard deviations. A number or vector becomes a vector; a covariance matrix stays a matrix."""
    array = read_entries(value, name, size, matrix=True)
    if array.ndim == 2:
        return read_covariance(torch.tensor(array), name, size)
    if not (allowed := (array >= SMALLEST_SCALE) & (array <= LARGEST_SCALE)).all():
        raise ValueError(
            f"{name} must be positive and finite, between {SMALLEST_SCALE:g} and {LARGEST_SCALE:g}; got "
            f"{float(array[~allowed][0]) if np.ndim(value) else value!r}."
        )
    return torch.from_numpy(array)


def read_entries(value: Any, name: str, size: int, matrix: bool = False) -> np.ndarray:
    """Check one number, or one per feature, and return one per feature; a `matrix` is returned unchanged."""
    array = checks.read_numbers(value, name)
    if matrix and array.ndim == 2:
        return array
    if array.ndim > 1 or (array.ndim == 1 and len(array) != size):
        kinds = f"a number or a vector of {size}, one per feature"
        if matrix:
            kinds = f"a number, a vector of {size} (one per feature) or a {size}×{size} covariance matrix"
        raise ValueError(f"{name} must be {kinds}; got shape {tuple(array.shape)}.")
    return np.full(size, array)


def read_covariance(matrix: Tensor, name: str, size: int) -> Tensor:
    """Check that a covariance matrix has the right size and is symmetric and positive definite."""
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
    """Check prior means, given as one number or one per feature."""
    mean = read_entries(value, "prior_mean", size)
    if not np.isfinite(mean).all():
        raise ValueError(f"prior_mean must be finite; got {value!r}.")
    return torch.from_numpy(mean)


def make_prior(prior_mean: Any, scale: Tensor, intercept_scale: Any, intercept: bool) -> Prior:
    """Return N(prior_mean, scale²) on the coefficients, and N(0, intercept_scale²) on the intercept (last)."""
    mean = read_mean(prior_mean, len(scale))
    diagonal = scale.ndim == 1
    precision = scale.square().reciprocal() if diagonal else torch.cholesky_inverse(torch.linalg.cholesky(scale))
    if not intercept:
        return Prior(mean, precision)
    own = read_scale(intercept_scale, "intercept_scale", 1).square().reciprocal()
    mean = torch.cat([mean, mean.new_zeros(1)])
    return Prior(mean, torch.cat([precision, own]) if diagonal else torch.block_diag(precision, own[None]))


def expected_squares(posterior: Any, prior: Prior, size: int) -> tuple[Tensor, float]:
    """E[(β_j - m_j)²] of the first coefficients, summed over classes if there are several, and its value under p/σ²."""
    if posterior.mean.ndim == 1:
        return (posterior.mean - prior.mean)[:size].square() + posterior.variance[:size], 1.0
    shift = posterior.mean - (prior.mean - prior.mean.mean(0) if prior.mean.ndim == 2 else 0.0)
    return (shift.square() + posterior.variance)[:, :size].sum(0), len(shift) - 1.0


def best_scales(
    solve: Callable[[Tensor, Any, bool], Any], size: int, separate: bool, careful: bool = False
) -> tuple[Tensor, Any]:
    """Return the scales of the first `size` coefficients that maximise the ELBO, and the fit with these scales.

    `solve(scales, start, last)` fits the posterior under the given scales, starting from the Gaussian `start`; only the
    last fit need be exact. If `careful`, the first step is a short one and the search ends within 1e-6 nats, because
    fits under very wide priors take long.
    """
    warm: Any = None

    def negative(log_scale: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal warm
        scale = expand(log_scale)
        posterior, prior, problem, result = solve(scale, warm, False)
        warm = result.q if problem.prior is prior else None  # otherwise it is in other coordinates
        second, freedom = expected_squares(posterior, prior, size)
        slope = (second.cpu() / scale.square() - freedom).numpy()
        return -result.objective, -slope if separate else -slope.sum(keepdims=True)

    def expand(log_scale: np.ndarray) -> Tensor:
        return torch.from_numpy(np.exp(log_scale)).expand(size).clone()

    count = size if separate else 1
    # L-BFGS-B tries the far end of the range first, unless one end is open
    bounds = [(np.log(SMALLEST_CHOSEN), None if careful else np.log(LARGEST_CHOSEN))] * count
    options = {"maxiter": 200, "ftol": 1e-8 if careful else 1e-12, "gtol": 2e-3 if careful else 1e-6}
    with warnings.catch_warnings():
        # a poor scale that is tried once may be hard to fit; only the final fit may warn
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = scipy.optimize.minimize(
            negative, np.zeros(count), jac=True, method="L-BFGS-B", bounds=bounds, options=options
        )
    scale = expand(found.x)
    if float(scale.max()) > 0.999 * LARGEST_CHOSEN or (not separate and float(scale.min()) < 1.001 * SMALLEST_CHOSEN):
        warnings.warn(
            f"the best prior_scale must lie between {SMALLEST_CHOSEN} and {LARGEST_CHOSEN}; got an end of that range. "
            "Standardise the features.",
            stacklevel=users_line(),
        )
    return scale, solve(scale, warm, True)
