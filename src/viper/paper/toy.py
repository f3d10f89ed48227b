"""The illustrative Gaussian process of Section 3.2: a sine seen through 50 labels, with a gap from 2.5 to 3.5.

    y_i ~ Bernoulli(s(f(x_i) + ε_i)),  f(x) = -4.5 sin(πx/2),  ε_i ~ N(0, 1)

Each run draws labels anew. "best" fits find the optimum of the hyperparameters by L-BFGS from five starts; "recipe" is
the paper's way, natural gradients and Adam for at most 1,500 steps, whose results depend on where it stops.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.special import expit

from viper.paper.artefact import Artefact, Config, Job, Request, Row
from viper.paper.figures import COLOURS
from viper.paper.methods import METHODS, ORDER, REACH, Fitted, Marginals, divergence, fit, marginals, published
from viper.paper.tables import Cell, Table, spread

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

GRID = np.linspace(0.0, 5.0, 100)  # the published coverages are multiples of 0.01
SOLVERS = {"best": {"solver": "profile"}, "recipe": {"solver": "natural-adam", "inducing": "kmeans"}}
RECIPE_METHODS = ("VI-MC", "VI-PER", "VI-PG")  # those of the paper
METRICS = {
    "ELBO": "elbo",
    "KL_MC (grid)": "kl_mc",
    "MSE (grid)": "mse",
    "CI width (grid)": "width",
    "coverage (grid)": "coverage",
    "AUC (test)": "auc",
    "seconds": "runtime",
}
COLUMNS = ["solver", "method", *METRICS.values(), "iterations", "converged"]


class Toy(NamedTuple):
    """Inputs, noisy log-odds f(x) + ε and labels, for training and for the test."""

    x: np.ndarray
    f: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    f_test: np.ndarray
    y_test: np.ndarray


def truth(x: np.ndarray) -> np.ndarray:
    return -4.5 * np.sin(0.5 * np.pi * x)


def simulate(seed: int) -> Toy:
    generator = np.random.default_rng(seed)
    parts: list[np.ndarray] = []
    for x in (np.concatenate([np.linspace(0.0, 2.5, 25), np.linspace(3.5, 5.0, 25)]), np.linspace(0.0, 5.0, 50)):
        f = truth(x) + generator.standard_normal(50)
        parts += [x, f, generator.random(50) < expit(f)]
    return Toy(*parts)


def configure(request: Request) -> Config:
    return {"samples": 1000, "solvers": ["best"] if request.quick else list(SOLVERS)}


def jobs(request: Request) -> list[Job]:
    return [{"seed": seed} for seed in request.seeds(published=100, quick=3)]


def run(job: Job, config: Config, data: Path | None) -> list[Row]:
    seed = int(job["seed"])
    toy = simulate(seed)
    rows: list[Row] = []
    for solver in config["solvers"]:
        reference = None
        for method in METHODS if solver == "best" else RECIPE_METHODS:
            fitted = fit(toy.x[:, None], toy.y, method, seed, config["samples"], **SOLVERS[solver])
            q = marginals(fitted.model, GRID[:, None])
            reference = reference or q
            scores = evaluate(toy, fitted, q)
            rows.append({"solver": solver, "method": method, "kl_mc": divergence(reference, q), **scores})
    return rows


def evaluate(toy: Toy, fitted: Fitted, q: Marginals) -> dict[str, float]:
    from sklearn.metrics import roc_auc_score

    model, runtime = fitted
    error = q.mean - truth(GRID)
    return {
        "elbo": model.elbo_,
        "mse": float((error**2).mean()),
        "width": q.width,
        "coverage": float((np.abs(error) < REACH * q.sd).mean()),
        "auc": float(roc_auc_score(toy.y_test, model.predict_latent(toy.x_test[:, None])[0])),
        "runtime": runtime,
        "iterations": model.n_iter_,
        "converged": int(model.converged_),
    }


def tables(frame: "pandas.DataFrame", config: Config) -> list[Table]:
    rows: list[list[Cell]] = []
    for method in ORDER:
        for solver in config["solvers"]:
            part = frame[(frame.method == method) & (frame.solver == solver)]
            if len(part):
                rows.append([method, f"ours, {solver}", *(spread(part[name]) for name in METRICS.values())])
                if method == "VI-MC":
                    rows[-1][3] = None
        if published("toy", method, "elbo"):
            rows.append([method, "published", *(published("toy", method, name) for name in METRICS.values())])
    count = frame.seed.nunique()
    notes = [
        f"Median (2.5 %, 97.5 % quantile) of {count} runs; published: 100. ELBO: exact at the fitted posterior; "
        "published by 10,000 samples. KL_MC: sum over the grid of KL(VI-MC ‖ method) between marginals, VI-MC fitted "
        "the same way. Intervals: ±1.96 sd; published ±2 sd. Seconds are of one thread.",
        "best: L-BFGS on the profile, five starts; recipe: natural gradients and Adam, at most 1,500 steps.",
    ]
    return [Table("toy", "GP classification: illustrative example", ["method", "source", *METRICS], rows, notes)]


def figures(frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
    """Posterior mean and 95 % band of the first run's data, by method."""
    import matplotlib.pyplot as plt

    seed = int(frame.seed.min())
    toy = simulate(seed)
    fits = {name: fit(toy.x[:, None], toy.y, name, seed, config["samples"]) for name in METHODS}
    found = {name: marginals(fitted.model, GRID[:, None]) for name, fitted in fits.items()}
    figure, axes = plt.subplots(1, len(ORDER), figsize=(13, 3.4), sharey=True)
    for axis, name in zip(axes, ORDER, strict=True):
        q, colour = found[name], COLOURS["limit" if name == "VI-PER limit" else name]
        axis.fill_between(GRID, q.mean - REACH * q.sd, q.mean + REACH * q.sd, color=colour, alpha=0.25, lw=0)
        axis.plot(GRID, q.mean, color=colour, lw=2)
        axis.plot(GRID, truth(GRID), color="black", ls="--", lw=1)
        axis.plot(toy.x, toy.f, "o", color="black", ms=2.5)
        axis.plot(toy.x_test, toy.f_test, "+", color="magenta", ms=5)
        axis.set(title=name if name != "VI-PER" else "VI-PER, l = 12", xlabel="x")
        if name != "VI-MC":
            text = f"KL = {divergence(found['VI-MC'], q):.3g}"
            axis.text(0.97, 0.96, text, transform=axis.transAxes, ha="right", va="top")
    axes[0].set(ylabel="f(x), with f(x) + ε of the data")
    return {"toy": figure}


ARTEFACTS = [
    Artefact(
        name="toy",
        what="GP classification, illustrative example: fit and table over 100 runs",
        where="Section 3.2",
        minutes=20.0,
        keys=["seed"],
        columns=COLUMNS,
        configure=configure,
        jobs=jobs,
        run=run,
        tables=tables,
        figures=figures,
    )
]
