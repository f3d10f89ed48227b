"""More than two classes: time beside scikit-learn's point estimate, and posteriors beside long chains of NUTS.

Coefficients are centred over classes. Errors of means are in posterior sds of NUTS, averaged; those of sds are averages
of |sd/sd of NUTS - 1|; coverage is the share of the chains' draws inside each method's 95 % intervals, averaged over
coefficients. One-vs-rest fits each class against all others; its coefficients are centred too.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import scale

import viper
from benchmarks.table import Page, Table, interleaved, machine

PRIOR_SD, INTERCEPT_SD = 1.0, 10.0
Moments = tuple[np.ndarray, np.ndarray]  # means and sds, K × d
DRAWS = {"iris": 1000, "wine": 1000, "digits": 250}
SETS = {"iris": load_iris, "wine": load_wine, "digits": load_digits}


def run(quick: bool, device: str = "cpu") -> Page:
    torch.set_num_threads(1)
    return Page("More than two classes", [times(quick, device), qualities(quick, device)])


# --- time ---


def simulated(n: int, p: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, p))
    return X, (X @ (0.5 * rng.normal(size=(p, classes))) + rng.gumbel(size=(n, classes))).argmax(1)


def times(quick: bool, device: str) -> Table:
    """Processor seconds of whole fits."""
    rows: list[list[str | float]] = []
    digits = load_digits(return_X_y=True)
    sizes = {
        "n = 10,000, p = 25, K = 5": simulated(1000 if quick else 10_000, 25, 5),
        "digits, n = 1,797, p = 64, K = 10": (scale(digits[0]), digits[1]),
    }
    for name, (X, y) in sizes.items():
        fits: dict[str, Callable[[], Any]] = {
            "viper, star": partial(viper.VariationalLogisticRegression().fit, X, y),
            "viper, diagonal": partial(viper.VariationalLogisticRegression(covariance="diagonal").fit, X, y),
            "scikit-learn lbfgs": partial(LogisticRegression(max_iter=10_000).fit, X, y),
            "scikit-learn lbfgs, tol = 1e-8": partial(LogisticRegression(max_iter=10_000, tol=1e-8).fit, X, y),
        }
        took = interleaved(fits, device, 1 if quick else 5, 4.0)
        least = took["scikit-learn lbfgs"]
        rows += [[name, method, seconds, seconds / least] for method, seconds in took.items()]
    notes = [machine(device), "Processor time, the shortest of several interleaved fits, one thread."]
    return Table("Time of a fit", ["data", "method", "seconds", "times scikit-learn"], rows, notes)


# --- quality ---


def qualities(quick: bool, device: str) -> Table:
    rows: list[list[str | float]] = []
    for name, load in SETS.items():
        if quick and name == "digits":
            continue
        X, y = load(return_X_y=True)
        X = scale(X)
        draws, seconds = timed(partial(nuts, X, y, 200 if quick else DRAWS[name]))
        exact = draws.mean(0), draws.std(0)
        for method, fit in METHODS.items():
            (mean, sd), took = timed(partial(fit, X, y))
            inside = (np.abs(draws - mean) <= 1.959963984540054 * sd).mean()
            error, ratio = np.abs((mean - exact[0]) / exact[1]).mean(), np.abs(sd / exact[1] - 1.0).mean()
            rows.append([name, method, error, ratio, inside, took])
            print(*rows[-1], flush=True)
        rows.append([name, "NUTS (NumPyro)", 0.0, 0.0, 0.95, seconds])
    notes = [
        machine(device),
        f"Standardised columns; prior N(0, {PRIOR_SD:g}) on coefficients and N(0, {INTERCEPT_SD:g}²) on intercepts, "
        f"for each class. NUTS: 4 chains of {DRAWS['iris']:,} draws ({DRAWS['digits']:,} on digits) after as many. "
        "Seconds are wall-clock, compilation included.",
    ]
    columns = ["data", "method", "error of means, sd", "error of sds", "coverage", "seconds"]
    return Table("Posteriors beside NUTS", columns, rows, notes)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def star(X: np.ndarray, y: np.ndarray, covariance: str = "full") -> Moments:
    fit = viper.VariationalLogisticRegression(covariance=covariance).fit(X, y)
    return fit.posterior_.mean.numpy(), fit.posterior_.variance.sqrt().numpy()


def corrected(X: np.ndarray, y: np.ndarray) -> Moments:
    found = viper.VariationalLogisticRegression().fit(X, y).corrected()
    return found.mean_, found.sd_


def prior_precision(d: int) -> np.ndarray:
    return np.append(np.full(d - 1, PRIOR_SD**-2), INTERCEPT_SD**-2)


def laplace(X: np.ndarray, y: np.ndarray) -> Moments:
    """The mode by Newton's method, with the inverse Hessian of all K d coefficients."""
    A, K = np.c_[X, np.ones(len(X))], y.max() + 1
    d = A.shape[1]
    w, prior = np.zeros((K, d)), prior_precision(d)
    label = np.eye(K)[y]
    for _ in range(30):
        f = A @ w.T
        p = np.exp(f - f.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        weights = p[:, :, None] * (np.eye(K) - p[:, None])
        H = np.einsum("nd,njk,ne->jdke", A, weights, A, optimize=True).reshape(K * d, K * d)
        H[np.diag_indices(K * d)] += np.tile(prior, K)
        step = np.linalg.solve(H, ((label - p).T @ A - w * prior).ravel())
        w = w + step.reshape(K, d)
        if np.abs(step).max() < 1e-8:
            break
    centre = np.kron(np.eye(K) - 1.0 / K, np.eye(d))
    return w - w.mean(0), np.sqrt(np.diag(centre @ np.linalg.inv(H) @ centre)).reshape(K, d)


def one_vs_rest(X: np.ndarray, y: np.ndarray) -> Moments:
    fits = [viper.VariationalLogisticRegression().fit(X, y == k) for k in range(y.max() + 1)]
    mean = np.stack([fit.posterior_.mean.numpy() for fit in fits])
    variance, K = np.stack([fit.posterior_.variance.numpy() for fit in fits]), len(fits)
    return mean - mean.mean(0), np.sqrt((1 - 2 / K) * variance + variance.sum(0) / K**2)


def softmax_model(A: Any, y: Any, classes: int) -> None:
    import numpyro
    import numpyro.distributions as dist

    sd = 1.0 / np.sqrt(prior_precision(A.shape[1]))
    w = numpyro.sample("w", dist.Normal(0.0, np.tile(sd, (classes, 1))).to_event(2))
    numpyro.sample("y", dist.Categorical(logits=A @ w.T), obs=y)


def nuts(X: np.ndarray, y: np.ndarray, draws: int) -> np.ndarray:
    """Draws of the centred coefficients."""
    import jax
    import numpyro
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    options = {"num_chains": 4, "chain_method": "sequential", "progress_bar": False}
    chains = MCMC(NUTS(softmax_model), num_warmup=draws, num_samples=draws, **options)
    chains.run(jax.random.PRNGKey(0), np.c_[X, np.ones(len(X))], y, int(y.max()) + 1)
    w = np.asarray(chains.get_samples()["w"])
    return w - w.mean(1, keepdims=True)


def advi(X: np.ndarray, y: np.ndarray) -> Moments:
    """Mean-field ADVI: 10,000 steps of Adam."""
    import jax
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal
    from numpyro.optim import Adam

    guide = AutoNormal(softmax_model)
    given = (np.c_[X, np.ones(len(X))], y, int(y.max()) + 1)
    found = SVI(softmax_model, guide, Adam(0.01), Trace_ELBO()).run(
        jax.random.PRNGKey(0), 10_000, *given, progress_bar=False
    )
    w = np.asarray(guide.sample_posterior(jax.random.PRNGKey(1), found.params, sample_shape=(4000,))["w"])
    w = w - w.mean(1, keepdims=True)
    return w.mean(0), w.std(0)


METHODS: dict[str, Callable[[np.ndarray, np.ndarray], Moments]] = {
    "viper, star": star,
    "viper, star, corrected": corrected,
    "viper, diagonal": partial(star, covariance="diagonal"),
    "Laplace": laplace,
    "one-vs-rest (viper)": one_vs_rest,
    "ADVI, mean field (NumPyro)": advi,
}
