"""The illustrative Gaussian process of Section 3.2: a sine observed through 50 labels, with a gap from 2.5 to 3.5.

    y_i ~ Bernoulli(s(f(x_i) + ε_i)),  f(x) = -4.5 sin(πx/2),  ε_i ~ N(0, 1)

Each run draws new labels. "best" fits find the optimum of the hyperparameters by L-BFGS from five starts; "recipe" is
the paper's method, natural gradients and Adam for at most 1,500 steps, whose results depend on where it stops.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import expit

from viper import VariationalGPClassifier
from viper.paper.artefact import Artefact, Config, Job, Request, Row
from viper.paper.figures import COLOURS
from viper.paper.methods import METHODS, TABLE_ORDER, Marginals, fit_gp, gp_marginals, marginal_kl, scores_against
from viper.paper.published import published_gp
from viper.paper.tables import Cell, ResultTable, spread_of
from viper.report.metrics import auc

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

TOY_GRID = np.linspace(0.0, 5.0, 100)  # the published coverages are multiples of 0.01
SOLVERS = {"best": {"solver": "profile"}, "recipe": {"solver": "natural-adam", "inducing": "kmeans"}}
RECIPE_METHODS = ("VI-MC", "VI-PER", "VI-PG")  # those of the paper
TOY_METRICS = {
    "ELBO": "elbo",
    "KL_MC (grid)": "kl_mc",
    "MSE (grid)": "mse",
    "CI width (grid)": "width",
    "coverage (grid)": "coverage",
    "AUC (test)": "auc",
    "seconds": "runtime",
}


class ToyExample(Artefact):
    """Every method on 100 draws of the labels, by both solvers."""

    name = "toy"
    what = "GP classification, illustrative example over 100 runs"
    where = "Section 3.2"
    minutes = 20.0
    keys = ("seed",)
    columns = ("solver", "method", *TOY_METRICS.values(), "iterations", "converged")

    def configure(self, request: Request) -> Config:
        return {"samples": 1000, "solvers": ["best"] if request.quick else list(SOLVERS)}

    def jobs(self, request: Request) -> list[Job]:
        return [{"seed": seed} for seed in request.seeds(published=100, quick=3)]

    def run(self, job: Job, config: Config, data: Path | None) -> list[Row]:
        seed = int(job["seed"])
        toy = simulate_toy(seed)
        rows: list[Row] = []
        for solver in config["solvers"]:
            reference = None
            for method in METHODS if solver == "best" else RECIPE_METHODS:
                model, seconds = fit_gp(toy.x[:, None], toy.y, method, seed, config["samples"], **SOLVERS[solver])
                q = gp_marginals(model, TOY_GRID[:, None])
                reference = reference or q
                labels = {"solver": solver, "method": method}
                times = {"runtime": seconds, "iterations": model.n_iter_, "converged": int(model.converged_)}
                rows.append({**labels, "kl_mc": marginal_kl(reference, q), **toy_scores(toy, model, q), **times})
        return rows

    def tables(self, frame: "pandas.DataFrame", config: Config) -> list[ResultTable]:
        rows: list[list[Cell]] = []
        for method in TABLE_ORDER:
            for solver in config["solvers"]:
                part = frame[(frame.method == method) & (frame.solver == solver)]
                if len(part):
                    rows.append([method, f"ours, {solver}", *(spread_of(part[name]) for name in TOY_METRICS.values())])
                    if method == "VI-MC":
                        rows[-1][3] = None
            theirs = [published_gp("toy", method, name) for name in TOY_METRICS.values()]
            if any(theirs):
                rows.append([method, "published", *theirs])
        count = frame.seed.nunique()
        notes = [
            f"Median (2.5 %, 97.5 % quantile) of {count} runs; published: 100. ELBO: exact at the fitted posterior; "
            "published by 10,000 samples. KL_MC: sum over the grid of KL(VI-MC ‖ method) between marginals, VI-MC "
            "fitted the same way. Intervals: ±1.96 sd; published ±2 sd. Seconds are of one thread.",
            "best: L-BFGS on the profile, five starts; recipe: natural gradients and Adam, at most 1,500 steps.",
        ]
        columns = ["method", "source", *TOY_METRICS]
        return [ResultTable("toy", "GP classification: illustrative example", columns, rows, notes)]

    def figures(self, frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
        """Posterior mean and 95 % band for the data of the first run, by method."""
        import matplotlib.pyplot as plt

        seed = int(frame.seed.min())
        toy = simulate_toy(seed)
        fits = {name: fit_gp(toy.x[:, None], toy.y, name, seed, config["samples"])[0] for name in METHODS}
        found = {name: gp_marginals(model, TOY_GRID[:, None]) for name, model in fits.items()}
        figure, axes = plt.subplots(1, len(TABLE_ORDER), figsize=(13, 3.4), sharey=True)
        for axis, name in zip(axes, TABLE_ORDER, strict=True):
            q, colour = found[name], COLOURS["limit" if name == "VI-PER limit" else name]
            axis.fill_between(TOY_GRID, *q.interval, color=colour, alpha=0.25, lw=0)
            axis.plot(TOY_GRID, q.mean, color=colour, lw=2)
            axis.plot(TOY_GRID, sine(TOY_GRID), color="black", ls="--", lw=1)
            axis.plot(toy.x, toy.f, "o", color="black", ms=2.5)
            axis.plot(toy.x_test, toy.f_test, "+", color="magenta", ms=5)
            axis.set(title=name if name != "VI-PER" else "VI-PER, l = 12", xlabel="x")
            if name != "VI-MC":
                text = f"KL = {marginal_kl(found['VI-MC'], q):.3g}"
                axis.text(0.97, 0.96, text, transform=axis.transAxes, ha="right", va="top")
        axes[0].set(ylabel="f(x), with f(x) + ε of the data")
        return {"toy": figure}


class ToyData(NamedTuple):
    """Inputs, noisy log-odds f(x) + ε and labels, for training and for testing."""

    x: np.ndarray
    f: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    f_test: np.ndarray
    y_test: np.ndarray


def sine(x: np.ndarray) -> np.ndarray:
    """f(x), the true log-odds without noise."""
    return -4.5 * np.sin(0.5 * np.pi * x)


def simulate_toy(seed: int) -> ToyData:
    """Training rows with the gap, and test rows without it."""
    generator = np.random.default_rng(seed)
    parts: list[np.ndarray] = []
    for x in (np.concatenate([np.linspace(0.0, 2.5, 25), np.linspace(3.5, 5.0, 25)]), np.linspace(0.0, 5.0, 50)):
        f = sine(x) + generator.standard_normal(50)
        parts += [x, f, generator.random(50) < expit(f)]
    return ToyData(*parts)


def toy_scores(toy: ToyData, model: VariationalGPClassifier, q: Marginals) -> dict[str, Any]:
    """ELBO, scores over the grid against the true f, and AUC of the test rows."""
    test, _ = model.predict_latent(toy.x_test[:, None])
    return {"elbo": model.elbo_, "auc": auc(toy.y_test, test), **scores_against(sine(TOY_GRID), q.mean, q.interval)}
