"""More than two classes: time beside scikit-learn's point estimate, and posteriors beside long chains of NUTS.

Coefficients are centred over classes. Errors of means are averages in posterior sds of NUTS, errors of sds are averages
of |sd/sd of NUTS - 1|, and coverage is the share of the chains' draws inside a method's 95 % intervals, averaged over
coefficients. One-vs-rest fits each class against all others; its coefficients are centred too. One-vs-each maximises a
bound with Σ_k log σ(f_y - f_k) in place of log softmax, whose expectation under a star is exact (Titsias 2016). The
ELBO of every Gaussian is that of the softmax model: exact for independent classes, by draws for Laplace's covariance.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import scale

import viper
from benchmarks.table import Page, Table, interleaved, machine
from viper.inference.classes.problem import ClassProblem
from viper.inference.classes.star import Star, centred_classes
from viper.inference.classes.sums import EXACT_CLASSES
from viper.inference.problem import Prior
from viper.inference.rows import Arrays

PRIOR_SD, INTERCEPT_SD = 1.0, 10.0
SAME_PRIOR = (
    f"Standardised columns; prior N(0, {PRIOR_SD:g}) on coefficients and N(0, {INTERCEPT_SD:g}²) on intercepts, for "
    "each class."
)
Found = tuple[np.ndarray, np.ndarray, float]  # means and sds, K × d, and the ELBO
ELBO_DRAWS = 4000
DRAWS = {"iris": 1000, "wine": 1000, "digits": 250}
SETS = {"iris": load_iris, "wine": load_wine, "digits": load_digits}


TITLES = ["Time of a fit", "ELBO", "Posteriors beside NUTS"]


def run(quick: bool, device: str = "cpu") -> Page:
    torch.set_num_threads(1)
    took = times(quick, device)
    fits = gaussians([name for name in SETS if name != "digits"] if quick else list(SETS))
    return Page("More than two classes", [took, elbos(fits, device), qualities(fits, quick, device)], TITLES)


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


class Fit(NamedTuple):
    """The result of a method on a data set, and its seconds."""

    name: str
    method: str
    found: Found
    seconds: float


def gaussians(names: list[str]) -> list[Fit]:
    """All methods on all data sets."""
    fits = []
    for name in names:
        X, y = rows_of(name)
        for method, fit in METHODS.items():
            found, seconds = timed(partial(fit, X, y))
            fits.append(Fit(name, method, found, seconds))
            print(name, method, found[2], f"{seconds:.1f} s", flush=True)
    return fits


def rows_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    X, y = SETS[name](return_X_y=True)
    return scale(X), y


def elbos(fits: list[Fit], device: str) -> Table:
    rows: list[list[str | float]] = [
        [fit.name, fit.method, f"{fit.found[2]:.2f}", fit.seconds] for fit in fits if np.isfinite(fit.found[2])
    ]
    notes = [
        machine(device),
        f"{SAME_PRIOR} Larger is better: the log evidence less the ELBO is KL(q ‖ posterior). Exact for "
        f"independent classes; Laplace's is an average over {ELBO_DRAWS:,} antithetic draws. "
        "Seconds are wall-clock on a machine that others used too, compilation included.",
    ]
    return Table("ELBO", ["data", "method", "ELBO, nats", "seconds"], rows, notes)


def qualities(fits: list[Fit], quick: bool, device: str) -> Table:
    rows: list[list[str | float]] = []
    for name in dict.fromkeys(fit.name for fit in fits):
        draws, seconds = timed(partial(nuts, *rows_of(name), 200 if quick else DRAWS[name]))
        exact = draws.mean(0), draws.std(0)
        for fit in fits:
            if fit.name == name:
                mean, sd, _ = fit.found
                inside = (np.abs(draws - mean) <= 1.959963984540054 * sd).mean()
                error, ratio = np.abs((mean - exact[0]) / exact[1]).mean(), np.abs(sd / exact[1] - 1.0).mean()
                rows.append([name, fit.method, error, ratio, inside, fit.seconds])
        rows.append([name, "NUTS (NumPyro)", 0.0, 0.0, 0.95, seconds])
    notes = [
        machine(device),
        f"{SAME_PRIOR} NUTS: 4 chains of {DRAWS['iris']:,} draws ({DRAWS['digits']:,} on digits) after as many. "
        "Seconds are wall-clock, compilation included.",
    ]
    columns = ["data", "method", "error of means, sd", "error of sds", "coverage", "seconds"]
    return Table("Posteriors beside NUTS", columns, rows, notes)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def problem_of(X: np.ndarray, y: np.ndarray, diagonal: bool = False) -> ClassProblem:
    """The rows, with the prior that all methods share."""
    source = Arrays(torch.from_numpy(X), torch.from_numpy(y).double(), intercept=True)
    precision = torch.from_numpy(prior_precision(source.dimension))
    return ClassProblem(source, int(y.max()) + 1, Prior(torch.zeros_like(precision), precision), diagonal)


def elbo_of(X: np.ndarray, y: np.ndarray, mean: Any, precision: Any) -> float:
    """The exact ELBO of independent classes, up to a common shift."""
    q = Star(centred_classes(torch.as_tensor(mean)), torch.as_tensor(precision))
    return problem_of(X, y, q.diagonal).evaluate(q, EXACT_CLASSES).objective


def star(X: np.ndarray, y: np.ndarray, covariance: str = "full") -> Found:
    fit = viper.VariationalLogisticRegression(covariance=covariance).fit(X, y)
    return fit.posterior_.mean.numpy(), fit.posterior_.variance.sqrt().numpy(), fit.elbo_


def corrected(X: np.ndarray, y: np.ndarray) -> Found:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", viper.errors.ImportanceWarning)  # the table shows what it warns about
        found = viper.VariationalLogisticRegression().fit(X, y).corrected()
    return found.mean_, found.sd_, np.nan


def one_vs_each(X: np.ndarray, y: np.ndarray) -> Found:
    """Maximise Σ_i Σ_{k≠y} E log σ(f_y - f_k) - KL over stars, by L-BFGS in coordinates of Böhning's curvature."""
    A, K = torch.from_numpy(np.c_[X, np.ones(len(X))]), int(y.max()) + 1
    label, d = torch.from_numpy(y)[:, None], A.shape[1]
    prior = torch.from_numpy(prior_precision(d))
    root = torch.linalg.inv(torch.linalg.cholesky(A.T @ A / (2 * K) + torch.diag(prior)))  # rootᵀ root = covariance
    shift, turn = torch.zeros(K, d, dtype=A.dtype, requires_grad=True), torch.zeros(K, d, d, dtype=A.dtype)
    turn = turn.requires_grad_()
    rows = torch.arange(len(A))
    others = torch.ones(len(A), K, dtype=torch.bool).scatter_(1, label, False)

    def moved() -> tuple[torch.Tensor, torch.Tensor]:
        lower = turn.tril(-1) + torch.diag_embed(turn.diagonal(dim1=1, dim2=2).exp())
        return shift @ root, lower @ root  # covariance of class k: Bᵀ B

    def negative_elbo() -> torch.Tensor:
        mean, B = moved()
        theta, tau2 = A @ mean.T, torch.stack([(A @ b.T).square().sum(1) for b in B], 1)
        apart, spread = theta - theta[rows, label[:, 0], None], tau2 + tau2[rows, label[:, 0], None]
        loss = viper.expected_softplus(apart[others], spread[others]).value.sum()
        centred = mean - mean.mean(0)
        inverse = torch.linalg.inv(B)
        log_volume = 2 * torch.linalg.slogdet(inverse)[1].sum() - torch.linalg.slogdet((inverse @ inverse.mT).sum(0))[1]
        divergence = (prior * (centred.square() + (1 - 1 / K) * B.square().sum(1))).sum() + log_volume
        return loss + 0.5 * (divergence + d * np.log(K) - (K - 1) * (d + prior.log().sum()))

    optimiser = torch.optim.LBFGS([shift, turn], max_iter=500, history_size=30, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = negative_elbo()
        loss.backward()
        return loss

    optimiser.step(closure)
    mean, B = (x.detach() for x in moved())
    variance, inverse = B.square().sum(1), torch.linalg.inv(B)
    elbo = elbo_of(X, y, mean, inverse @ inverse.mT)
    return (mean - mean.mean(0)).numpy(), np.sqrt(centred_variance(variance.numpy())), elbo


def centred_variance(own: np.ndarray) -> np.ndarray:
    """Variances of w_k - w̄ for independent w_k."""
    return (1 - 2 / len(own)) * own + own.sum(0) / len(own) ** 2


def prior_precision(d: int) -> np.ndarray:
    return np.append(np.full(d - 1, PRIOR_SD**-2), INTERCEPT_SD**-2)


def laplace(X: np.ndarray, y: np.ndarray) -> Found:
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
    covariance = np.linalg.inv(H)
    centre = np.kron(np.eye(K) - 1.0 / K, np.eye(d))
    sd = np.sqrt(np.diag(centre @ covariance @ centre)).reshape(K, d)
    # E log p(y|w) by draws, less KL(q ‖ p) over all K d coefficients, whose common shift keeps its prior
    noise = np.random.default_rng(0).standard_normal((ELBO_DRAWS // 2, K * d)) @ np.linalg.cholesky(covariance).T
    fits = []
    for draw in np.concatenate([noise, -noise]).reshape(-1, K, d):
        f = A @ (w + draw).T
        fits.append((f[np.arange(len(y)), y] - np.logaddexp.reduce(f, 1)).sum())
    each = np.tile(prior, K)
    kl = 0.5 * (each @ np.diag(covariance) + (prior * w**2).sum() - K * d - np.log(each).sum())
    return w - w.mean(0), sd, float(np.mean(fits) - kl - 0.5 * np.linalg.slogdet(H)[1])


def one_vs_rest(X: np.ndarray, y: np.ndarray) -> Found:
    fits = [viper.VariationalLogisticRegression().fit(X, y == k) for k in range(y.max() + 1)]
    mean = np.stack([fit.posterior_.mean.numpy() for fit in fits])
    variance = np.stack([fit.posterior_.variance.numpy() for fit in fits])
    elbo = elbo_of(X, y, mean, np.stack([np.linalg.inv(fit.posterior_.covariance().numpy()) for fit in fits]))
    return mean - mean.mean(0), np.sqrt(centred_variance(variance)), elbo


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


def advi(X: np.ndarray, y: np.ndarray) -> Found:
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
    mean, sd = (np.array(found.params[f"w_auto_{name}"]) for name in ("loc", "scale"))
    elbo = elbo_of(X, y, mean.astype(float), sd.astype(float) ** -2)
    return mean - mean.mean(0), np.sqrt(centred_variance(sd**2)), elbo


METHODS: dict[str, Callable[[np.ndarray, np.ndarray], Found]] = {
    "viper, star": star,
    "viper, star, corrected": corrected,
    "viper, diagonal": partial(star, covariance="diagonal"),
    "Laplace": laplace,
    "one-vs-each bound": one_vs_each,
    "one-vs-rest (viper)": one_vs_rest,
    "ADVI, mean field (NumPyro)": advi,
}
