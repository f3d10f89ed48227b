"""The posterior by Markov chain Monte Carlo: slow, exact in the limit, and what every approximation is held against.

The model is that of the logistic estimator. With f = Xβ + b + o,

    log p(y, β, b) = Σ_i c_i (y_i f_i - log(1 + e^{f_i})) + log N(β; m₀, S₀) + log N(b; 0, s²),

sampled by NumPyro's NUTS in float64. The chains move in coordinates u with β = β̂ + Fu, where β̂ is the mode and FFᵀ the
inverse curvature there: the posterior of u is close to N(0, I) whatever the scales of the columns, and no less exact.
"""

import time
import warnings
from dataclasses import dataclass
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.linalg
import scipy.optimize
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_array, check_consistent_length, column_or_1d

from viper.errors import ConvergenceWarning, users_line

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

# Thresholds of Vehtari, Gelman, Simpson, Carpenter & Bürkner (2021), Bayesian Analysis 16:667.
LARGEST_RHAT = 1.01
SMALLEST_ESS = 400.0
TARGET_ACCEPTANCE = 0.9
START_SPREAD = 2.0  # chains start from N(0, 2²) in u, wider than the posterior, so that R-hat can tell


@dataclass(frozen=True)
class MCMCResult:
    """Draws from the posterior, and whether to believe them.

    Attributes
    ----------
    draws : array of shape (chains, draws, d)
        Coefficients of the features in order; the intercept, if there is one, is last.
    names : list of str
        Their names.
    rhat, ess : arrays of shape (d,)
        Rank-normalised split R-hat, and the smaller of the bulk and tail effective sample sizes.
    divergences : int
        Number of divergent transitions after warmup.
    seconds : float
        Time taken, compilation included.
    """

    draws: Array
    names: list[str]
    rhat: Array
    ess: Array
    divergences: int
    seconds: float

    @property
    def flat(self) -> Array:
        """All chains in one array, (chains · draws) × d."""
        return self.draws.reshape(-1, self.draws.shape[-1])

    def mean(self) -> Array:
        return self.flat.mean(axis=0)

    def sd(self) -> Array:
        return self.flat.std(axis=0, ddof=1)

    def mcse(self, of: str = "mean") -> Array:
        """Monte Carlo standard error of `mean()`, or with of="sd" of `sd()`."""
        return diagnostic("mcse", self.draws, method=of)

    def summary(self, level: float = 0.95) -> "pd.DataFrame":
        """One row per coefficient: mean, sd, central interval, Monte Carlo error of the mean, ESS and R-hat."""
        import pandas as pd

        lower, upper = np.quantile(self.flat, [(1.0 - level) / 2.0, (1.0 + level) / 2.0], axis=0)
        columns = {"mean": self.mean(), "sd": self.sd(), "lower": lower, "upper": upper}
        columns |= {"mcse": self.mcse(), "ess": self.ess, "rhat": self.rhat}
        return pd.DataFrame(columns, index=self.names)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Rows (A with the column of ones, o, y, c) and the prior N(m₀, CCᵀ) of all coefficients."""

    design: Array
    offset: Array
    label: Array
    weight: Array
    mean: Array
    factor: Array

    def log_joint(self, beta: Any, xp: ModuleType = np) -> Any:
        """log p(y, β), constants of the prior included. `xp` is NumPy or jax.numpy."""
        # f = o + Aβ, z = C⁻¹(β - m₀)
        f = self.offset + self.design @ beta
        z = scipy.linalg.solve_triangular(self.factor, np.eye(len(self.mean)), lower=True) @ (beta - self.mean)
        likelihood = self.weight @ (self.label * f - xp.logaddexp(0.0, f))
        return likelihood - 0.5 * (z @ z + len(z) * np.log(2.0 * np.pi)) - np.log(np.diag(self.factor)).sum()


def sample_posterior(
    X: Any,
    y: ArrayLike | None = None,
    *,
    prior_mean: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
    intercept_scale: float = 10.0,
    fit_intercept: bool = True,
    sample_weight: ArrayLike | None = None,
    offset: ArrayLike | None = None,
    chains: int = 4,
    draws: int = 1000,
    warmup: int = 1000,
    random_state: int | np.random.Generator | None = 0,
    progress: bool = False,
) -> MCMCResult:
    """Sample the posterior of logistic regression with NUTS.

    Parameters
    ----------
    X : array-like of shape (n, p), or a fitted VariationalLogisticRegression
        Features. Of a fitted model the rows of its fit are taken, with their labels, weights, offset and prior.
    y : array-like of shape (n,)
        Any two labels; the second in sorted order counts as 1.
    prior_mean : float or array of shape (p,)
        m₀.
    prior_scale : float, array of shape (p,) or array of shape (p, p)
        Standard deviations of the coefficients, or their full covariance matrix S₀.
    intercept_scale : float
        Standard deviation of the intercept, whose prior mean is 0.
    fit_intercept : bool
        Whether there is an intercept.
    sample_weight, offset : arrays of shape (n,), optional
        c and o.
    chains, draws, warmup : int
        Number of chains, of draws kept from each, and of draws before those, for adaptation.
    random_state : int, Generator or None
        The same number gives the same draws.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    MCMCResult

    Warns
    -----
    ConvergenceWarning
        If R-hat is above 1.01, the effective sample size below 400, or transitions diverged.
    """
    jax, infer = import_numpyro()
    start = time.perf_counter()
    given: dict[str, Any] = {"y": y, "sample_weight": sample_weight, "offset": offset, "prior_mean": prior_mean}
    given |= {"prior_scale": prior_scale, "intercept_scale": intercept_scale, "fit_intercept": fit_intercept}
    if hasattr(X, "posterior_"):
        model, names = model_of_fit(X, given), X._names()
    else:
        model = build_model(X, **given)
        names = [*feature_names(X), "intercept"][: len(model.mean)]
    with double_precision(jax):
        centre, factor = mode_and_factor(model, jax)
        kernel = infer.NUTS(
            potential_fn=lambda u: -model.log_joint(centre + factor @ u, jax.numpy),
            dense_mass=True,
            target_accept_prob=TARGET_ACCEPTANCE,
        )
        sampler = infer.MCMC(
            kernel,
            num_warmup=warmup,
            num_samples=draws,
            num_chains=chains,
            chain_method="vectorized",
            progress_bar=progress,
        )
        u, divergences = run(sampler, chains, len(centre), np.random.default_rng(random_state), jax)
    return checked_result(centre + u @ factor.T, names, divergences, time.perf_counter() - start)


def import_numpyro() -> tuple[Any, Any]:
    try:
        import jax
        import numpyro.infer
    except ImportError as error:
        message = "sample_posterior needs NumPyro; install it with pip install 'vi-per[mcmc]'"
        raise ImportError(message) from error
    return jax, numpyro.infer


def double_precision(jax: Any) -> Any:
    """A context in which JAX computes in float64, as it did not before and will not after."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return jax.experimental.enable_x64()  # until JAX 0.8


# --- the model ---


def build_model(
    X: ArrayLike,
    y: ArrayLike | None,
    prior_mean: ArrayLike = 0.0,
    prior_scale: ArrayLike = 1.0,
    intercept_scale: float = 10.0,
    fit_intercept: bool = True,
    sample_weight: ArrayLike | None = None,
    offset: ArrayLike | None = None,
) -> Model:
    """Check what was given, and add the intercept to rows and prior."""
    features = check_array(X, dtype=np.float64, input_name="X")
    n, p = features.shape
    if y is None:
        raise ValueError("y must hold a label for each row of X; got None. Pass it, or a fitted model alone.")
    label = binary(column_or_1d(y))
    check_consistent_length(features, label)
    mean, factor = np.broadcast_to(vector("prior_mean", prior_mean, p), p), prior_factor(prior_scale, p)
    if fit_intercept:
        features = np.column_stack([features, np.ones(n)])
        mean = np.append(mean, 0.0)
        factor = scipy.linalg.block_diag(
            factor, positive("intercept_scale", vector("intercept_scale", intercept_scale, 1))
        )
    weight = np.ones(n) if sample_weight is None else vector("sample_weight", sample_weight, n)
    if (weight < 0.0).any():
        raise ValueError(f"sample_weight must be non-negative; got {weight.min()}. Remove or correct those rows.")
    shift = np.zeros(n) if offset is None else vector("offset", offset, n)
    offset, weight = np.broadcast_to(shift, n), np.broadcast_to(weight, n)
    return Model(design=features, offset=offset, label=label, weight=weight, mean=mean, factor=factor)


def model_of_fit(fitted: Any, given: dict[str, Any]) -> Model:
    """Rows and prior of a fitted estimator; whatever else was `given` is refused."""
    defaults = signature(sample_posterior).parameters
    if others := [name for name, value in given.items() if value is not defaults[name].default]:
        raise TypeError(f"a fitted model brings its rows and its prior; got {', '.join(others)} too. Leave them out.")
    if getattr(fitted, "_training_rows", None) is None:
        raise ValueError("sample_posterior needs the training rows; got a model without them. Pass X, y and the prior.")
    source = fitted._training_rows.in_memory()

    def per_row(x: Any, otherwise: float) -> Array:
        return np.full(source.rows, otherwise) if x is None else np.asarray(x.cpu(), dtype=np.float64)

    offset, label, weight = per_row(source.offset, 0.0), per_row(source.label, 0.0), per_row(source.weight, 1.0)
    precision = fitted.prior_.precision.numpy()
    covariance = np.diag(1.0 / precision) if precision.ndim == 1 else np.linalg.inv(precision)
    design, mean = source.dense_design().cpu().numpy(), fitted.prior_.mean.numpy()
    factor = np.linalg.cholesky(covariance)
    return Model(design=design, offset=offset, label=label, weight=weight, mean=mean, factor=factor)


def binary(y: NDArray[Any]) -> Array:
    """1 for the second of two labels, else 0."""
    labels = np.unique(y)
    if len(labels) != 2:
        raise ValueError(f"y must have exactly two classes; got {len(labels)}: {labels.tolist()[:5]}. Choose two.")
    return (y == labels[1]).astype(np.float64)


def vector(name: str, value: ArrayLike, length: int) -> Array:
    """A finite number, or a vector of `length` of them."""
    array = np.asarray(value, dtype=np.float64)
    if array.shape not in ((), (length,)):
        raise ValueError(f"{name} must be a number or of shape ({length},); got shape {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite; got {array[~np.isfinite(array)][0]}.")
    return array


def positive(name: str, array: Array) -> Array:
    if not (array > 0.0).all():
        raise ValueError(f"{name} must be positive; got {np.min(array)}.")
    return array


def prior_factor(scale: ArrayLike, p: int) -> Array:
    """C with CCᵀ = S₀, lower triangular."""
    array = np.asarray(scale, dtype=np.float64)
    if array.ndim < 2:
        return np.diag(np.broadcast_to(positive("prior_scale", vector("prior_scale", array, p)), p))
    if array.shape != (p, p) or not np.allclose(array, array.T):
        raise ValueError(
            f"prior_scale must be a symmetric {p} × {p} matrix; got shape {array.shape}. See its docstring."
        )
    try:
        return np.asarray(np.linalg.cholesky(array), np.float64)
    except np.linalg.LinAlgError as error:
        smallest = np.linalg.eigvalsh(array)[0]
        rule = f"prior_scale must be positive definite; got smallest eigenvalue {smallest:.3g}"
        raise ValueError(f"{rule}. Add a small number to its diagonal.") from error


def feature_names(X: ArrayLike) -> list[str]:
    """The columns of a data frame, else x0, x1, …"""
    columns = getattr(X, "columns", None)
    return [f"x{j}" for j in range(np.shape(X)[1])] if columns is None else [str(column) for column in columns]


# --- sampling ---


def mode_and_factor(model: Model, jax: Any) -> tuple[Array, Array]:
    """The mode β̂ and F with FFᵀ the inverse of -∇² log p there, found in coordinates where the prior is N(0, I)."""

    def potential(z: Any) -> Any:
        return -model.log_joint(model.mean + model.factor @ z, jax.numpy)

    hessian = jax.jit(jax.hessian(potential))
    found = scipy.optimize.minimize(
        jax.jit(potential),
        np.zeros(len(model.mean)),
        jac=jax.jit(jax.grad(potential)),
        hess=hessian,
        method="trust-exact",
    )
    # H = LLᵀ, so H⁻¹ = L⁻ᵀL⁻¹
    L = np.linalg.cholesky(np.asarray(hessian(found.x)))
    inverse = scipy.linalg.solve_triangular(L, np.eye(len(L)), lower=True)
    return model.mean + model.factor @ found.x, model.factor @ inverse.T


def run(sampler: Any, chains: int, d: int, generator: np.random.Generator, jax: Any) -> tuple[Array, int]:
    """The draws of u (chains × draws × d), and the number of divergent transitions."""
    start = jax.numpy.asarray(START_SPREAD * generator.standard_normal((chains, d)))
    key = jax.random.PRNGKey(int(generator.integers(2**31)))
    sampler.run(key, init_params=start if chains > 1 else start[0], extra_fields=("diverging",))
    divergences = np.asarray(sampler.get_extra_fields()["diverging"]).sum()
    return np.asarray(sampler.get_samples(group_by_chain=True)), int(divergences)


def diagnostic(name: str, draws: Array, **options: Any) -> Array:
    """R-hat, effective sample size or Monte Carlo error of each coefficient, by ArviZ."""
    from arviz_stats.base.array import array_stats

    return np.asarray(getattr(array_stats, name)(draws, chain_axis=0, draw_axis=1, **options))


def checked_result(draws: Array, names: list[str], divergences: int, seconds: float) -> MCMCResult:
    """The result, with a warning if it should not be believed."""
    tail = diagnostic("ess", draws, method="tail", prob=(0.05, 0.95))
    ess = np.minimum(diagnostic("ess", draws, method="bulk"), tail)
    result = MCMCResult(draws, names, diagnostic("rhat", draws), ess, divergences, seconds)
    if found := complaints(result):
        warnings.warn(" ".join(found), ConvergenceWarning, stacklevel=users_line())
    return result


def complaints(result: MCMCResult) -> list[str]:
    found = []
    # "not ≤", so that NaN complains too: it is what one chain, or one that never moved, gives
    if not (result.rhat <= LARGEST_RHAT).all():
        worst = np.max(result.rhat)
        found.append(f"R-hat must be at most {LARGEST_RHAT}; got {worst:.3f}. Use several chains and more warmup.")
    if not (result.ess >= SMALLEST_ESS).all():
        worst = np.min(result.ess)
        found.append(f"effective sample size must be at least {SMALLEST_ESS:.0f}; got {worst:.0f}. Take more draws.")
    if result.divergences:
        found.append(f"no transition may diverge; got {result.divergences}. Scale the features or narrow the prior.")
    return found
