"""The logistic regression study of Section 3 and Appendix B.3: data, methods and metrics of one run."""

import time
import warnings
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning as SklearnConvergenceWarning

from viper import VariationalLogisticRegression
from viper.errors import ConvergenceWarning, ImportanceWarning
from viper.paper.artefact import Artefact, Config, Job, Request, Row, no_figures
from viper.paper.logistic_tables import figures, mcmc_tables, tables, text_tables
from viper.paper.optimum import Gaussian, kl, optimum
from viper.paper.simulated import Simulated, simulate

Array = NDArray[np.float64]

ROWS = (500, 1000, 10_000)
COEFFICIENTS = (5, 10, 25)
REACH = 1.959963984540054  # 97.5 % quantile of the standard normal

METHODS: dict[str, dict[str, Any]] = {
    "VI-MC": {"bound": "mc"},  # first: KL_MC is measured from it
    "VI-PER": {"terms": 12},
    "VI-PER limit": {},
    "VI-PG": {"bound": "pg"},
}
FAMILIES = {"Q": "diagonal", "Q'": "full"}

COLUMNS = [
    *["method", "family", "elbo", "elbo_mc", "kl_mc", "kl_optimum", "f_mse", "f_coverage", "f_width"],
    *["beta_mse", "beta_coverage", "beta_width", "auc", "runtime", "iterations", "converged"],
    *["k_hat", "ess", "r_hat", "f_mse_error", "f_coverage_error", "f_width_error"],
]


def configure(request: Request) -> Config:
    return {
        "samples": 200 if request.quick else 1000,  # of VI-MC
        "elbo_samples": 1000 if request.quick else 10_000,
        "draws": 1000 if request.quick else 4000,  # of the importance-corrected posterior
    }


def configure_mcmc(request: Request) -> Config:
    return {"chains": 4, "draws": 100 if request.quick else 500, "warmup": 100 if request.quick else 500}


def cells(request: Request, *, settings: tuple[str, ...], published: int) -> list[Job]:
    """Every setting with every n and p, seeds outermost."""
    rows, coefficients = ((500,), (5, 10)) if request.quick else (ROWS, COEFFICIENTS)
    return [
        {"setting": setting, "n": n, "p": p, "seed": seed}
        for seed in request.seeds(published, 2)
        for setting in settings
        for n in rows
        for p in coefficients
    ]


def mcmc_cells(request: Request) -> list[Job]:
    """The same for MCMC: ten seeds, and a single run in the quick version."""
    every = cells(request, settings=("1", "2", "3"), published=10)
    return every[:1] if request.quick else every


def data_of(job: Job) -> Simulated:
    return simulate(str(job["setting"]), int(job["n"]), int(job["p"]), int(job["seed"]))


# ---------------------------------------------------------------------------------------------------------------------
# One run


def run(job: Job, config: Config, data: Path | None) -> list[Row]:
    """Every variational method under both families, and the importance-corrected posterior."""
    warm_up()
    simulated = data_of(job)
    rows: list[Row] = []
    for family in FAMILIES:
        rows += variational(simulated, family, int(job["seed"]), config)
    return rows


@cache
def warm_up() -> None:
    """Build what is built once per process, so that it is not counted as the time of the first fit."""
    simulated = simulate("1", 50, 2, 1)
    for options in METHODS.values():
        model, _ = fitted(simulated, 1, options)
    corrected(model, simulated, 1000, 0.0)


def fitted(data: Simulated, seed: int, options: dict[str, Any]) -> tuple[VariationalLogisticRegression, float]:
    """A model and the seconds its fit took; whether it converged is among its results, not a warning."""
    model = VariationalLogisticRegression(fit_intercept=False, verbose=False, random_state=seed, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", SklearnConvergenceWarning)
        start = time.process_time()
        model.fit(data.X, data.y)
        return model, time.process_time() - start


def variational(data: Simulated, family: str, seed: int, config: Config) -> Iterator[Row]:
    best = optimum(data.X, data.y, family)
    reference: Gaussian | None = None
    for method, options in METHODS.items():
        chosen = {**options, "covariance": FAMILIES[family], "samples": config["samples"]}
        model, seconds = fitted(data, seed, chosen)
        q = Gaussian(model.coef_[0], model.covariance_)
        reference = reference or q
        yield {
            "method": method,
            "family": family,
            "elbo": model.elbo_,
            "elbo_mc": sampled_elbo(model, data, config["elbo_samples"], seed),
            "kl_mc": None if method == "VI-MC" else kl(reference, q),
            "kl_optimum": kl(best, q),
            "runtime": seconds,
            "iterations": model.n_iter_,
            "converged": model.converged_,
            **accuracy(data, q),
        }
        if (method, family) == ("VI-PER limit", "Q'"):
            yield corrected(model, data, config["draws"], seconds)


def corrected(model: VariationalLogisticRegression, data: Simulated, draws: int, seconds: float) -> Row:
    """The posterior itself, by importance weights; intervals from its means and variances."""
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportanceWarning)
        posterior = model.corrected(draws=draws)
    seconds += time.process_time() - start
    beta, weights = posterior.weighted.draws.numpy(), posterior.weighted.weights.numpy()
    mean = weights @ beta
    covariance = (beta - mean).T @ ((beta - mean) * weights[:, None])
    return {
        "method": "corrected",
        "family": "-",
        "runtime": seconds,
        "k_hat": posterior.diagnosis.k_hat,
        "ess": posterior.diagnosis.effective_sample_size,
        **accuracy(data, Gaussian(mean, covariance)),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Metrics


def accuracy(data: Simulated, q: Gaussian) -> dict[str, float]:
    """Metrics (iii) to (vi) of Section 3 for a Gaussian posterior: of f = Xβ at the rows, and of β."""
    f, sd = data.X @ q.mean, np.sqrt(((data.X @ q.covariance) * data.X).sum(1))
    beta_sd = np.sqrt(np.diag(q.covariance))
    beta_interval = (q.mean - REACH * beta_sd, q.mean + REACH * beta_sd)
    return scores(data, f, (f - REACH * sd, f + REACH * sd), q.mean, beta_interval)


def scores(
    data: Simulated, f: Array, f_interval: tuple[Array, Array], beta: Array, beta_interval: tuple[Array, Array]
) -> dict[str, float]:
    """The same from means and intervals."""
    from sklearn.metrics import roc_auc_score

    truth = data.X @ data.beta
    return {
        **compared("f", truth, f, *f_interval),
        **compared("beta", data.beta, beta, *beta_interval),
        "auc": float(roc_auc_score(data.y, f)),
    }


def compared(name: str, truth: Array, mean: Array, low: Array, high: Array) -> dict[str, float]:
    return {
        f"{name}_mse": float(np.square(mean - truth).mean()),
        f"{name}_coverage": float(((low <= truth) & (truth <= high)).mean()),
        f"{name}_width": float((high - low).mean()),
    }


ROWS_AT_ONCE = 100  # with 10,000 draws, 4 MB


def sampled_elbo(model: VariationalLogisticRegression, data: Simulated, samples: int, seed: int) -> float:
    """The ELBO as the paper estimates it: the likelihood's mean over draws of β, less the exact KL to the prior.

    In float32, whose rounding of one row's log-likelihood is a thousandth of what 10,000 draws leave undecided.
    """
    draws = model.sample(samples, random_state=seed)
    X, columns = torch.from_numpy(data.X).float(), torch.from_numpy(draws).float().T
    total = float(data.y @ (data.X @ draws.mean(0)))
    f = torch.empty(ROWS_AT_ONCE, samples)
    for start in range(0, len(X), ROWS_AT_ONCE):
        rows = X[start : start + ROWS_AT_ONCE]
        torch.mm(rows, columns, out=f[: len(rows)])
        total -= float(torch.nn.functional.softplus(f[: len(rows)]).mean(1).double().sum())
    return total - model.kl_


# ---------------------------------------------------------------------------------------------------------------------
# MCMC


def run_mcmc(job: Job, config: Config, data: Path | None) -> list[Row]:
    """NUTS; the errors of the metrics are estimated from the differences between its chains."""
    from viper.models.reference import sample_posterior

    simulated = data_of(job)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # R-hat and sample size are in the row
        result = sample_posterior(
            simulated.X, simulated.y, fit_intercept=False, random_state=int(job["seed"]), **config
        )
    seconds = time.process_time() - start
    chains = [of_draws(simulated, chain) for chain in result.draws]
    names = ("f_mse", "f_coverage", "f_width")
    errors = {f"{name}_error": float(np.std([c[name] for c in chains], ddof=1)) / len(chains) ** 0.5 for name in names}
    diagnostics = {"ess": float(result.ess.min()), "r_hat": float(result.rhat.max())}
    whole = of_draws(simulated, result.flat)
    return [{"method": "MCMC", "family": "-", "runtime": seconds, **diagnostics, **errors, **whole}]


def of_draws(data: Simulated, draws: Array) -> dict[str, float]:
    """Metrics from draws of β, with central intervals by their quantiles."""
    blocks = np.array_split(data.X, max(1, len(data.y) // ROWS_AT_ONCE))
    intervals = np.concatenate([np.quantile(X @ draws.T, [0.025, 0.975], axis=1) for X in blocks], axis=1)
    beta = np.quantile(draws, [0.025, 0.975], axis=0)
    mean = draws.mean(0)
    return scores(data, data.X @ mean, (intervals[0], intervals[1]), mean, (beta[0], beta[1]))


def mcmc_cost(job: Job) -> float:
    return 8.0 + 2e-4 * float(job["n"]) * (1.0 + 0.04 * float(job["p"]))


def cost(job: Job) -> float:
    """Seconds of a run, roughly."""
    return 0.2 + 5e-4 * float(job["n"])


def study(name: str, what: str, where: str, minutes: float, **parts: Any) -> Artefact:
    """An artefact of this study."""
    keys = ["setting", "n", "p", "seed"]
    given = {"configure": configure, "run": run, "tables": tables, "figures": figures, "cost": cost, **parts}
    return Artefact(name, what, where, minutes, keys, COLUMNS, **given)


ARTEFACTS = [
    study(
        "logistic-mcmc",
        "the posterior by MCMC, for the study below",
        "Section 3.1",
        53.0,
        configure=configure_mcmc,
        jobs=mcmc_cells,
        run=run_mcmc,
        cost=mcmc_cost,
        tables=mcmc_tables,
        figures=no_figures,
    ),
    study(
        "logistic",
        "logistic regression study, with MCMC where it has been run",
        "Section 3.1, Appendix B.3",
        47.0,
        jobs=partial(cells, settings=("1", "2", "3"), published=100),
        joined=["logistic-mcmc"],
    ),
    study(
        "logistic-text",
        "the same with Setting 3 as in the text",
        "Section 3.1",
        18.0,
        jobs=partial(cells, settings=("3-text",), published=100),
        tables=text_tables,
    ),
]
