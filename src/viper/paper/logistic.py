"""The logistic regression study of Section 3 and Appendix B.3: data, methods and metrics of one run."""

import time
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from viper import VariationalLogisticRegression
from viper.errors import ImportanceWarning
from viper.paper.artefact import Artefact, Config, Job, Request, Row
from viper.paper.logistic_tables import agreement_tables, all_cells, comparison_table, optimum_table, study_figure
from viper.paper.methods import FAMILIES, METHODS, Marginals, fit_logistic, scores_against
from viper.paper.optimum import NormalDistribution, exact_optimum, gaussian_kl
from viper.paper.simulated import Simulated, simulate
from viper.paper.tables import ResultTable
from viper.report.metrics import auc

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

STUDY_ROWS = (500, 1000, 10_000)
STUDY_COEFFICIENTS = (5, 10, 25)
ROWS_AT_ONCE = 100  # with 10,000 draws, 4 MB


class LogisticArtefact(Artefact):
    """What the three artefacts of this study share: settings, sizes and columns."""

    keys = ("setting", "n", "p", "seed")
    columns = (
        *("method", "family", "elbo", "elbo_mc", "kl_mc", "kl_optimum", "f_mse", "f_coverage", "f_width"),
        *("beta_mse", "beta_coverage", "beta_width", "auc", "runtime", "iterations", "converged"),
        *("k_hat", "ess", "r_hat", "f_mse_error", "f_coverage_error", "f_width_error"),
    )
    settings: tuple[str, ...] = ("1", "2", "3")
    seeds = 100

    def jobs(self, request: Request) -> list[Job]:
        """Every setting with every n and p, with the seed as the outermost loop."""
        rows, coefficients = ((500,), (5, 10)) if request.quick else (STUDY_ROWS, STUDY_COEFFICIENTS)
        return [
            {"setting": setting, "n": n, "p": p, "seed": seed}
            for seed in request.seeds(self.seeds, 2)
            for setting in self.settings
            for n in rows
            for p in coefficients
        ]


class LogisticMCMC(LogisticArtefact):
    """The posterior by NUTS; errors of the metrics are estimated from the differences between chains."""

    name = "logistic-mcmc"
    what = "the posterior by MCMC, for the study below"
    where = "Section 3.1"
    minutes = 53.0
    seeds = 10

    def configure(self, request: Request) -> Config:
        return {"chains": 4, "draws": 100 if request.quick else 500, "warmup": 100 if request.quick else 500}

    def jobs(self, request: Request) -> list[Job]:
        """As in the study, for ten seeds; a single run in the quick version."""
        jobs = super().jobs(request)
        return jobs[:1] if request.quick else jobs

    def run(self, job: Job, config: Config, data: Path | None) -> list[Row]:
        from viper.models.reference import sample_posterior

        simulated = simulated_for(job)
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # R-hat and sample size are in the row
            result = sample_posterior(
                simulated.X, simulated.y, fit_intercept=False, random_state=int(job["seed"]), **config
            )
        seconds = time.process_time() - start
        chains = [draws_scores(simulated, chain) for chain in result.draws]
        errors = {
            f"{name}_error": float(np.std([scores[name] for scores in chains], ddof=1)) / len(chains) ** 0.5
            for name in ("f_mse", "f_coverage", "f_width")
        }
        diagnostics = {"ess": float(result.ess.min()), "r_hat": float(result.rhat.max())}
        scores = draws_scores(simulated, result.flat)
        return [{"method": "MCMC", "family": "-", "runtime": seconds, **diagnostics, **errors, **scores}]

    def tables(self, frame: "pandas.DataFrame", config: Config) -> list[ResultTable]:
        return [comparison_table("mcmc", "The posterior by MCMC", frame, all_cells(frame))]

    def cost(self, job: Job) -> float:
        """Seconds of a run, roughly."""
        return 8.0 + 2e-4 * float(job["n"]) * (1.0 + 0.04 * float(job["p"]))


class LogisticStudy(LogisticArtefact):
    """Every variational method under both families, and the importance-corrected posterior."""

    name = "logistic"
    what = "logistic regression study, with MCMC where it has been run"
    where = "Section 3.1, Appendix B.3"
    minutes = 47.0
    joined: Sequence[Artefact] = (LogisticMCMC(),)

    def configure(self, request: Request) -> Config:
        return {
            "samples": 200 if request.quick else 1000,  # for VI-MC
            "elbo_samples": 1000 if request.quick else 10_000,
            "draws": 1000 if request.quick else 4000,  # from the importance-corrected posterior
        }

    def run(self, job: Job, config: Config, data: Path | None) -> list[Row]:
        warm_up()
        simulated = simulated_for(job)
        return [row for family in FAMILIES for row in variational_rows(simulated, family, int(job["seed"]), config)]

    def tables(self, frame: "pandas.DataFrame", config: Config) -> list[ResultTable]:
        cells = all_cells(frame)
        tables = []
        for setting in sorted({cell[0] for cell in cells}):
            chosen, title = [c for c in cells if c[0] == setting], f"Logistic regression, Setting {setting}"
            tables.append(comparison_table(f"setting-{setting}", title, frame, chosen))
        if main := [c for c in cells if c[0] == "3" and c[1] >= 1000 and c[2] == 25]:
            title = "Logistic regression results (the paper's Table 2)"
            tables.append(comparison_table("table-2", title, frame, main))
        beside = agreement_tables(frame) if (frame.method == "MCMC").any() else []
        return [*tables, optimum_table(frame), *beside]

    def figures(self, frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
        return {"logistic": study_figure(frame)}

    def cost(self, job: Job) -> float:
        """Seconds of a run, roughly."""
        return 0.2 + 5e-4 * float(job["n"])


class LogisticText(LogisticStudy):
    """The same study with the distribution of Setting 3 that the paper's text describes."""

    name = "logistic-text"
    what = "the same with Setting 3 as in the text"
    where = "Section 3.1"
    minutes = 18.0
    settings = ("3-text",)
    joined = ()

    def tables(self, frame: "pandas.DataFrame", config: Config) -> list[ResultTable]:
        title = "Logistic regression, Setting 3 as in the paper's text: x ~ N(0, W⁻¹), W ~ Wishart(p + 3, I)"
        return [comparison_table("setting-3-text", title, frame, all_cells(frame)), optimum_table(frame)]


# ---------------------------------------------------------------------------------------------------------------------
# One run


def simulated_for(job: Job) -> Simulated:
    """The data of a run."""
    return simulate(str(job["setting"]), int(job["n"]), int(job["p"]), int(job["seed"]))


@cache
def warm_up() -> None:
    """Do the setup that each process does once, so that it does not count towards the time of the first fit."""
    simulated = simulate("1", 50, 2, 1)
    for options in METHODS.values():
        model, _ = fit_logistic(simulated.X, simulated.y, 1, options)
    corrected_row(model, simulated, 1000, 0.0)


def variational_rows(data: Simulated, family: str, seed: int, config: Config) -> Iterator[Row]:
    """Every method under one family; under Q', the limit is followed by the corrected posterior."""
    best = exact_optimum(data.X, data.y, family)
    reference: NormalDistribution | None = None
    for method, options in METHODS.items():
        chosen = {**options, "covariance": FAMILIES[family], "samples": config["samples"]}
        model, seconds = fit_logistic(data.X, data.y, seed, chosen)
        q = NormalDistribution(model.coef_[0], model.covariance_)
        reference = reference or q
        yield {
            "method": method,
            "family": family,
            "elbo": model.elbo_,
            "elbo_mc": sampled_elbo(model, data, config["elbo_samples"], seed),
            "kl_mc": None if method == "VI-MC" else gaussian_kl(reference, q),
            "kl_optimum": gaussian_kl(best, q),
            "runtime": seconds,
            "iterations": model.n_iter_,
            "converged": model.converged_,
            **normal_scores(data, q),
        }
        if (method, family) == ("VI-PER limit", "Q'"):
            yield corrected_row(model, data, config["draws"], seconds)


def corrected_row(model: VariationalLogisticRegression, data: Simulated, draws: int, seconds: float) -> Row:
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
        **normal_scores(data, NormalDistribution(mean, covariance)),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Metrics

Interval = tuple[np.ndarray, np.ndarray]


def normal_scores(data: Simulated, q: NormalDistribution) -> dict[str, Any]:
    """Metrics (iii) to (vi) of Section 3 for a Gaussian posterior: of f = Xβ at the rows, and of β."""
    f = Marginals(data.X @ q.mean, np.sqrt(((data.X @ q.covariance) * data.X).sum(1)))
    beta = Marginals(q.mean, np.sqrt(np.diag(q.covariance)))
    return metrics(data, f.mean, f.interval, beta.mean, beta.interval)


def draws_scores(data: Simulated, draws: np.ndarray) -> dict[str, Any]:
    """The same metrics from draws of β, with central intervals by their quantiles."""
    blocks = np.array_split(data.X, max(1, len(data.y) // ROWS_AT_ONCE))
    f = np.concatenate([np.quantile(X @ draws.T, [0.025, 0.975], axis=1) for X in blocks], axis=1)
    beta = np.quantile(draws, [0.025, 0.975], axis=0)
    mean = draws.mean(0)
    return metrics(data, data.X @ mean, (f[0], f[1]), mean, (beta[0], beta[1]))


def metrics(
    data: Simulated, f: np.ndarray, f_interval: Interval, beta: np.ndarray, beta_interval: Interval
) -> dict[str, Any]:
    """The metrics from means and intervals."""
    of_f, of_beta = scores_against(data.X @ data.beta, f, f_interval), scores_against(data.beta, beta, beta_interval)
    return {
        **{f"f_{name}": value for name, value in of_f.items()},
        **{f"beta_{name}": value for name, value in of_beta.items()},
        "auc": auc(data.y, f),
    }


def sampled_elbo(model: VariationalLogisticRegression, data: Simulated, samples: int, seed: int) -> float:
    """The ELBO as the paper estimates it: the likelihood's mean over draws of β, less the exact KL to the prior.

    It uses float32: rounding of a row's log-likelihood is a thousandth of the Monte Carlo error of 10,000 draws.
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
