"""The posterior by Markov chain Monte Carlo: slow, exact in the limit, and the reference for every approximation.

The model is that of the logistic estimator. With f = Xβ + b + o,

    log p(y, β, b) = Σ_i c_i (y_i f_i - log(1 + e^{f_i})) + log N(β; m₀, S₀) + log N(b; 0, s²),

sampled by NumPyro's NUTS in float64. The chains move in coordinates u with β = β̂ + Fu, where β̂ is the mode and FFᵀ the
inverse curvature there. The posterior of u is close to N(0, I) whatever the scales of the columns; draws stay exact.

For a Gaussian process with given kernel, the log-odds of the rows are sampled themselves, f ~ N(m, K) with the same
likelihood, by elliptical slice sampling (Murray, Adams & MacKay 2010). With K = AAᵀ and f = m + Az, a step moves on

    z(ω) = μ + (z - μ) cos ω + ν sin ω,      ν ~ N(0, Σ),

to a random point of this ellipse where p(y|f) N(z; 0, I)/N(z; μ, Σ) exceeds a random level. Any μ and Σ leave the
posterior as it is (Nishihara, Murray & Adams 2014); those of the variational posterior make steps long.
"""

import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.linalg
import scipy.optimize
import torch
from numpy.typing import ArrayLike
from sklearn.utils import check_array

from viper.data.checks import read_labels, read_vector, read_weights
from viper.errors import ConvergenceWarning, users_line
from viper.inference.newton import newton
from viper.inference.problem import Prior, Problem
from viper.inference.progress import StepProgress
from viper.inference.rows import Arrays
from viper.models.facts import coefficient_names
from viper.models.prior import read_mean, read_scale
from viper.softplus.limit import limit

if TYPE_CHECKING:
    import pandas as pd

# Thresholds of Vehtari, Gelman, Simpson, Carpenter & Bürkner (2021), Bayesian Analysis 16:667.
LARGEST_RHAT = 1.01
SMALLEST_ESS = 400.0
TARGET_ACCEPTANCE = 0.9
LARGEST_PROCESS = 5_000  # rows; the eigenvectors of their covariance take a minute
LEAST_EIGENVALUE = 1e-12  # relative to the largest; smaller ones are rounding
STEPS_PER_DRAW = 10  # for elliptical slice sampling
START_SPREAD = 2.0  # chains start from N(0, 2²) in u, wider than the posterior, so that R-hat can detect a failure


@dataclass(frozen=True)
class MCMCResult:
    """Draws from the posterior, with diagnostics that say whether to trust them.

    Attributes
    ----------
    draws : array of shape (chains, draws, d)
        Coefficients of the features in order; the intercept, if there is one, is last. For a Gaussian process, the
        log-odds of the rows.
    names : list of str
        Their names.
    rhat, ess : arrays of shape (d,)
        Rank-normalised split R-hat, and the smaller of the bulk and tail effective sample sizes.
    divergences : int
        Number of divergent transitions after warmup.
    seconds : float
        Time taken, compilation included.
    """

    draws: np.ndarray
    names: list[str]
    rhat: np.ndarray
    ess: np.ndarray
    divergences: int
    seconds: float

    @property
    def flat(self) -> np.ndarray:
        """All chains in one array, (chains · draws) × d."""
        return self.draws.reshape(-1, self.draws.shape[-1])

    def mean(self) -> np.ndarray:
        return self.flat.mean(axis=0)

    def sd(self) -> np.ndarray:
        return self.flat.std(axis=0, ddof=1)

    def mcse(self, of: str = "mean") -> np.ndarray:
        """Monte Carlo standard error of `mean()`, or of `sd()` with of="sd"."""
        return arviz_diagnostic("mcse", self.draws, method=of)

    def summary(self, level: float = 0.95) -> "pd.DataFrame":
        """One row per coefficient: mean, sd, central interval, Monte Carlo error of the mean, ESS and R-hat."""
        import pandas as pd

        lower, upper = np.quantile(self.flat, [(1.0 - level) / 2.0, (1.0 + level) / 2.0], axis=0)
        columns = {"mean": self.mean(), "sd": self.sd(), "lower": lower, "upper": upper}
        columns |= {"mcse": self.mcse(), "ess": self.ess, "rhat": self.rhat}
        return pd.DataFrame(columns, index=self.names)


@dataclass(frozen=True, kw_only=True)
class JointDensity:
    """log p(y, β) for rows (A with the column of ones, o, y, c) and the prior N(m₀, CCᵀ) of all coefficients."""

    design: np.ndarray
    offset: np.ndarray
    label: np.ndarray
    weight: np.ndarray
    mean: np.ndarray
    factor: np.ndarray

    def log_joint(self, beta: Any, xp: ModuleType = np) -> Any:
        """log p(y, β), constants of the prior included. `xp` is NumPy or jax.numpy."""
        # z = C⁻¹(β - m₀)
        z = scipy.linalg.solve_triangular(self.factor, np.eye(len(self.mean)), lower=True) @ (beta - self.mean)
        return (
            self.log_likelihood(beta, xp)
            - 0.5 * (z @ z + len(z) * np.log(2.0 * np.pi))
            - np.log(np.diag(self.factor)).sum()
        )

    def log_likelihood(self, beta: Any, xp: ModuleType = np) -> Any:
        """log p(y | β), with f = o + Aβ."""
        f = self.offset + self.design @ beta
        return self.weight @ (self.label * f - xp.logaddexp(0.0, f))

    def parameters(self, draws: np.ndarray) -> np.ndarray:
        """The parameters to report for draws of β (… × d): the draws themselves."""
        return draws


@dataclass(frozen=True, kw_only=True)
class OrdinalDensity(JointDensity):
    """log p(y, w, δ) of an ordinal regression: labels are level numbers, and the log gaps δ follow w."""

    def thresholds(self, delta: Any, xp: ModuleType = np) -> Any:
        """Thresholds whose mean is 0, e^δ apart."""
        steps = xp.cumsum(xp.exp(delta), -1)
        from_zero = xp.concatenate([xp.zeros_like(steps[..., :1]), steps], -1)
        return from_zero - from_zero.mean(-1, keepdims=True)

    def log_likelihood(self, beta: Any, xp: ModuleType = np) -> Any:
        """Σ c log(s(t_k - f) - s(t_{k-1} - f)), as a difference of logarithms of the smaller tails."""
        d = self.design.shape[1]
        f, level = self.offset + self.design @ beta[:d], self.label.astype(int)
        t = self.thresholds(beta[d:], xp) if len(beta) > d else xp.zeros(1)
        far = xp.full(1, 1e3)
        edges = xp.concatenate([-far, t, far])
        low, high = edges[level] - f, edges[level + 1] - f
        # s(b) - s(a) = s(b) s(-a) (1 - e^{a-b})
        return self.weight @ (-xp.logaddexp(0.0, -high) - xp.logaddexp(0.0, low) + xp.log(-xp.expm1(low - high)))

    def parameters(self, draws: np.ndarray) -> np.ndarray:
        """Coefficients, and thresholds less the intercept."""
        d = self.design.shape[1]
        inner = draws[..., d:]
        t = self.thresholds(inner) if inner.shape[-1] else np.zeros((*inner.shape[:-1], 1))
        return np.concatenate([draws[..., : d - 1], t - draws[..., d - 1 : d]], -1)


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
    """Sample the posterior of logistic or ordinal regression with NUTS, or of a Gaussian process by `sample_latent`.

    Parameters
    ----------
    X : array-like of shape (n, p), or a fitted estimator
        Features. A fitted model provides its training rows, with their labels, weights and offset, and its
        prior. For a Gaussian process this is the full prior with the fitted kernel and mean, without inducing points;
        up to 5,000 rows are allowed, and the result has one column per row.
    y : array-like of shape (n,)
        Any two labels; the second in sorted order counts as 1.
    prior_mean : float or array of shape (p,)
        m₀.
    prior_scale : float, array of shape (p,) or array of shape (p, p)
        Standard deviations of the coefficients, or their full covariance matrix S₀.
    intercept_scale : float
        Standard deviation of the intercept, whose prior mean is 0.
    fit_intercept : bool
        Whether to include an intercept.
    sample_weight, offset : arrays of shape (n,), optional
        c and o.
    chains, draws, warmup : int
        Number of chains, draws kept per chain, and earlier draws per chain, which only serve adaptation (for a Gaussian
        process, earlier steps).
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
    start = time.perf_counter()
    given: dict[str, Any] = {"y": y, "sample_weight": sample_weight, "offset": offset, "prior_mean": prior_mean}
    given |= {"prior_scale": prior_scale, "intercept_scale": intercept_scale, "fit_intercept": fit_intercept}
    if hasattr(X, "latent_prior"):
        check_only_model(given)
        mean, covariance, label, weight = X.latent_prior()
        settings: dict[str, Any] = {"chains": chains, "draws": draws, "warmup": warmup, "random_state": random_state}
        return sample_latent(mean, covariance, label, sample_weight=weight, progress=progress, **settings)
    jax, infer = import_numpyro()
    if hasattr(X, "posterior_"):
        model, names = model_of_fit(X, given), X._names()
    else:
        model = build_model(X, **given)
        names = coefficient_names(feature_names(X), fit_intercept)
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
        u, divergences = draw_chains(sampler, chains, len(centre), np.random.default_rng(random_state), jax)
    draws_of = model.parameters(centre + u @ factor.T)
    return checked_result(draws_of, names, divergences, time.perf_counter() - start)


def import_numpyro() -> tuple[Any, Any]:
    try:
        import jax
        import numpyro.infer
    except ImportError as error:
        message = "sample_posterior needs NumPyro; install it with pip install 'vi-per[mcmc]'"
        raise ImportError(message) from error
    return jax, numpyro.infer


def double_precision(jax: Any) -> Any:
    """Return a context in which JAX computes in float64; its setting outside is not changed."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return jax.experimental.enable_x64()  # before JAX 0.8


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
) -> JointDensity:
    """Check the arguments, and add the intercept to rows and prior."""
    design = check_array(X, dtype=np.float64, input_name="X")
    n, p = design.shape
    if y is None:
        raise ValueError("y must hold a label for each row of X; got None. Pass it, or a fitted model alone.")
    label = read_labels(y, n)[1].numpy().astype(np.float64)
    mean, scale = read_mean(prior_mean, p).numpy(), read_scale(prior_scale, "prior_scale", p).numpy()
    factor = np.diag(scale) if scale.ndim == 1 else np.linalg.cholesky(scale)
    if fit_intercept:
        design, mean = np.column_stack([design, np.ones(n)]), np.append(mean, 0.0)
        own = read_scale(intercept_scale, "intercept_scale", 1).numpy()
        factor = scipy.linalg.block_diag(factor, own)
    weight, shift = read_weights(sample_weight, n), read_vector(offset, "offset", n)
    return JointDensity(
        design=design,
        offset=np.zeros(n) if shift is None else shift.numpy(),
        label=label,
        weight=np.ones(n) if weight is None else weight.numpy(),
        mean=mean,
        factor=factor,
    )


def model_of_fit(fitted: Any, given: dict[str, Any]) -> JointDensity:
    """Return rows and prior of a fitted estimator; raises if any other argument was `given`."""
    check_only_model(given)
    if hasattr(fitted, "factors_"):
        raise ValueError(
            f"sample_posterior is for models without effects of groups; got {fitted.factors_[0].term}. Call diagnose "
            "or corrected, which compare with the exact posterior."
        )
    if getattr(fitted, "_training_rows", None) is None:
        raise ValueError("sample_posterior needs the training rows; got a model without them. Pass X, y and the prior.")
    source = fitted._training_rows.in_memory()

    def per_row(x: Any, otherwise: float) -> np.ndarray:
        return np.full(source.rows, otherwise) if x is None else np.asarray(x.cpu(), dtype=np.float64)

    offset, label, weight = per_row(source.offset, 0.0), per_row(source.label, 0.0), per_row(source.weight, 1.0)
    precision = fitted.prior_.without_loadings().precision.numpy()
    covariance = np.diag(1.0 / precision) if precision.ndim == 1 else np.linalg.inv(precision)
    design, mean = source.dense_design().cpu().numpy(), fitted.prior_.mean.numpy()
    factor = np.linalg.cholesky(covariance)
    kind: type[JointDensity] = JointDensity
    if hasattr(fitted, "thresholds_"):
        kind, gaps = OrdinalDensity, fitted.gap_prior_
        factor = np.linalg.cholesky(np.linalg.inv(gaps.joint_precision(fitted.prior_).numpy()))
        mean = np.append(mean, gaps.mean.numpy())
    return kind(design=design, offset=offset, label=label, weight=weight, mean=mean, factor=factor)


def check_only_model(given: dict[str, Any]) -> None:
    """Raise unless all other arguments have their default values."""
    defaults = signature(sample_posterior).parameters
    if others := [name for name, value in given.items() if value is not defaults[name].default]:
        raise TypeError(f"a fitted model provides its rows and its prior; got {', '.join(others)} too. Leave them out.")


def feature_names(X: ArrayLike) -> list[str]:
    """Return the columns of a data frame, or x0, x1, … for an array."""
    columns = getattr(X, "columns", None)
    return [f"x{j}" for j in range(np.shape(X)[1])] if columns is None else [str(column) for column in columns]


# --- sampling ---


def mode_and_factor(model: JointDensity, jax: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the mode β̂ and F, where FFᵀ is the inverse of -∇² log p at β̂.

    The search uses coordinates in which the prior is N(0, I).
    """

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


def draw_chains(sampler: Any, chains: int, d: int, generator: np.random.Generator, jax: Any) -> tuple[np.ndarray, int]:
    """Return the draws of u (chains × draws × d) and the number of divergent transitions."""
    start = jax.numpy.asarray(START_SPREAD * generator.standard_normal((chains, d)))
    key = jax.random.PRNGKey(int(generator.integers(2**31)))
    sampler.run(key, init_params=start if chains > 1 else start[0], extra_fields=("diverging",))
    divergences = np.asarray(sampler.get_extra_fields()["diverging"]).sum()
    return np.asarray(sampler.get_samples(group_by_chain=True)), int(divergences)


# --- Gaussian processes ---


def sample_latent(
    mean: ArrayLike,
    covariance: ArrayLike,
    y: ArrayLike,
    *,
    sample_weight: ArrayLike | None = None,
    chains: int = 4,
    draws: int = 1000,
    warmup: int = 1000,
    random_state: int | np.random.Generator | None = 0,
    progress: bool = False,
) -> MCMCResult:
    """Sample the log-odds f of n rows under the prior N(m, K) and exact Bernoulli likelihoods, by elliptical slices.

    Parameters
    ----------
    mean, covariance : arrays of shape (n,) and (n, n)
        m, offsets included, and K, which may be singular.
    y : array-like of shape (n,)
        Labels in [0, 1]: 0 and 1, or shares of ones.
    sample_weight : array of shape (n,), optional
        c.
    chains, draws, warmup, random_state, progress
        As in `sample_posterior`; ten steps are taken per draw, and `warmup` steps before the first.
    """
    began = time.perf_counter()
    root = covariance_root(np.asarray(covariance, dtype=np.float64))
    label, n = np.asarray(y, dtype=np.float64), len(root)
    weight = read_weights(sample_weight, n, some_positive=False)
    rows = JointDensity(
        design=root,
        offset=np.broadcast_to(np.asarray(mean, dtype=np.float64), (n,)).copy(),
        label=label,
        weight=np.ones(n) if weight is None else weight.numpy(),
        mean=np.zeros(root.shape[1]),
        factor=np.eye(root.shape[1]),
    )
    generator = np.random.default_rng(random_state)
    step = elliptical_slices(rows, generator)
    z = step.first(chains)
    found = np.empty((chains, draws, n))
    with closing(StepProgress(True if progress else "auto", "sampling: draw")) as shown:
        for _ in range(warmup):
            z = step.take(z)
        for k in range(draws):
            for _ in range(STEPS_PER_DRAW):
                z = step.take(z)
            found[:, k] = rows.offset + z @ root.T
            shown.step(k + 1, draws)
    return checked_result(found, [f"f[{i}]" for i in range(n)], 0, time.perf_counter() - began)


def covariance_root(covariance: np.ndarray) -> np.ndarray:
    """Return A with AAᵀ = K and as many columns as K has rank."""
    n = len(covariance)
    if covariance.shape != (n, n) or not np.isfinite(covariance).all():
        raise ValueError(f"covariance must be a finite square matrix; got shape {covariance.shape}.")
    if n > LARGEST_PROCESS:
        raise ValueError(f"a Gaussian process is sampled for at most {LARGEST_PROCESS} rows; got {n}. Take a sample.")
    values, vectors = np.linalg.eigh(covariance)
    kept = values > LEAST_EIGENVALUE * values[-1]
    return np.ascontiguousarray(vectors[:, kept] * np.sqrt(values[kept]))


@dataclass(frozen=True)
class EllipticalSlices:
    """Steps of elliptical slice sampling for several chains at once, on ellipses of N(μ, FFᵀ)."""

    log_ratio: Callable[[np.ndarray], np.ndarray]  # log p(y|f) + log N(z; 0, I) - log N(z; μ, FFᵀ), chains
    centre: np.ndarray
    factor: np.ndarray
    generator: np.random.Generator

    def first(self, chains: int) -> np.ndarray:
        """Starts that are spread wider than the posterior."""
        return self.centre + START_SPREAD * self.generator.standard_normal((chains, len(self.centre))) @ self.factor.T

    def take(self, z: np.ndarray) -> np.ndarray:
        """One step of every chain."""
        random, chains = self.generator, len(z)
        here = z - self.centre
        there = random.standard_normal(z.shape) @ self.factor.T
        level = self.log_ratio(z) + np.log(random.random(chains))
        angle = 2.0 * np.pi * random.random(chains)
        low, high = angle - 2.0 * np.pi, angle.copy()
        moved, left = z.copy(), np.arange(chains)
        while len(left):
            turn = angle[left, None]
            tried = self.centre + here[left] * np.cos(turn) + there[left] * np.sin(turn)
            above = self.log_ratio(tried) > level[left]
            moved[left[above]] = tried[above]
            left = left[~above]
            # the interval of angles shrinks towards 0, where the chain is
            below = angle[left] < 0.0
            low[left[below]], high[left[~below]] = angle[left[below]], angle[left[~below]]
            angle[left] = low[left] + random.random(len(left)) * (high[left] - low[left])
        return moved


def elliptical_slices(rows: JointDensity, generator: np.random.Generator) -> EllipticalSlices:
    """Steps on the ellipses of the variational posterior of z, whose prior is N(0, I)."""
    tensors: dict[str, Any] = {name: torch.from_numpy(getattr(rows, name)) for name in ("label", "offset", "weight")}
    prior = Prior(torch.from_numpy(rows.mean), torch.ones(len(rows.mean), dtype=torch.float64))
    q = newton(Problem(Arrays(torch.from_numpy(rows.design), **tensors), prior, limit())).q
    centre, precision = q.mean.numpy(), q.precision.numpy()
    L = np.linalg.cholesky(precision)

    def log_ratio(z: np.ndarray) -> np.ndarray:
        f = rows.offset + z @ rows.design.T
        likelihood = (rows.label * f - np.logaddexp(0.0, f)) @ rows.weight
        return likelihood - 0.5 * np.square(z).sum(1) + 0.5 * np.square((z - centre) @ L).sum(1)

    factor = scipy.linalg.solve_triangular(L, np.eye(len(L)), lower=True).T
    return EllipticalSlices(log_ratio, centre, factor, generator)


# --- diagnostics ---


def arviz_diagnostic(name: str, draws: np.ndarray, **options: Any) -> np.ndarray:
    """Return R-hat, effective sample size or Monte Carlo error of each coefficient, computed by ArviZ."""
    from arviz_stats.base.array import array_stats

    return np.asarray(getattr(array_stats, name)(draws, chain_axis=0, draw_axis=1, **options))


def checked_result(draws: np.ndarray, names: list[str], divergences: int, seconds: float) -> MCMCResult:
    """Return the result, and warn if it should not be trusted."""
    tail = arviz_diagnostic("ess", draws, method="tail", prob=(0.05, 0.95))
    ess = np.minimum(arviz_diagnostic("ess", draws, method="bulk"), tail)
    result = MCMCResult(draws, names, arviz_diagnostic("rhat", draws), ess, divergences, seconds)
    if found := convergence_problems(result):
        warnings.warn(" ".join(found), ConvergenceWarning, stacklevel=users_line())
    return result


def convergence_problems(result: MCMCResult) -> list[str]:
    found = []
    # "not ≤", so that NaN counts as a problem: it is the R-hat of a single chain, or of one that never moved
    if not (result.rhat <= LARGEST_RHAT).all():
        worst = np.max(result.rhat)
        found.append(f"R-hat must be at most {LARGEST_RHAT}; got {worst:.3f}. Use several chains and more warmup.")
    if not (result.ess >= SMALLEST_ESS).all():
        worst = np.min(result.ess)
        found.append(f"effective sample size must be at least {SMALLEST_ESS:.0f}; got {worst:.0f}. Take more draws.")
    if result.divergences:
        found.append(f"no transition may diverge; got {result.divergences}. Scale the features or narrow the prior.")
    return found
