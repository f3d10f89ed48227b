"""Two studies that the paper only hints at: runtime against n, and the ELBO against l."""

from pathlib import Path
from typing import TYPE_CHECKING

from viper.paper.artefact import Artefact, Config, Job, Request, Row
from viper.paper.figures import METHOD_MARKS
from viper.paper.logistic import warm_up
from viper.paper.methods import METHODS, TABLE_ORDER, fit_logistic
from viper.paper.optimum import NormalDistribution, exact_optimum, gaussian_kl
from viper.paper.published import published_logistic
from viper.paper.simulated import simulate
from viper.paper.tables import Cell, ResultTable, Spread, spread_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

RUNTIME_ROWS = (500, 1000, 10_000, 100_000, 1_000_000)
MOST_SAMPLED = 100_000  # rows for VI-MC: beyond, its 1,000 samples per row take minutes
REPEATED = 10_000  # rows up to which the shortest of three fits counts
TERMS = (1, 2, 3, 5, 8, 12, 17, 25, 50, 100)


class Runtime(Artefact):
    """Seconds of a fit by every method, for n from 500 to 10⁶."""

    name = "runtime"
    what = "seconds of a fit for n from 500 to 10⁶"
    where = "Section 2.3"
    minutes = 0.5
    keys = ("n", "seed")
    columns = ("method", "runtime", "iterations", "elbo")

    def configure(self, request: Request) -> Config:
        return {"setting": "1", "p": 5 if request.quick else 25, "samples": 200 if request.quick else 1000}

    def jobs(self, request: Request) -> list[Job]:
        rows = (500, 1000) if request.quick else RUNTIME_ROWS
        return [{"n": n, "seed": seed} for seed in request.seeds(3, quick=1) for n in rows]

    def run(self, job: Job, config: Config, data: Path | None) -> list[Row]:
        warm_up()
        n, seed = int(job["n"]), int(job["seed"])
        X, y, _ = simulate(config["setting"], n, config["p"], seed)
        rows: list[Row] = []
        for method, options in METHODS.items():
            if method == "VI-MC" and n > MOST_SAMPLED:
                continue
            times = []
            for _ in range(3 if n <= REPEATED else 1):
                model, seconds = fit_logistic(X, y, seed, {**options, "samples": config["samples"]})
                times.append(seconds)
            rows.append({"method": method, "runtime": min(times), "iterations": model.n_iter_, "elbo": model.elbo_})
        return rows

    def tables(self, frame: "pandas.DataFrame", config: Config) -> list[ResultTable]:
        rows: list[list[Cell]] = []
        for n in sorted(frame.n.unique()):
            part = frame[frame.n == n]
            theirs = [published_runtime(config, int(n), method) for method in METHODS]
            rows.append([f"{n:,}", "ours", *(spread_of(part.runtime[part.method == method]) for method in METHODS)])
            if any(theirs):
                rows.append([f"{n:,}", "published", *theirs])
        note = (
            f"Processor seconds of one fit on one thread, Setting {config['setting']}, p = {config['p']}, family Q': "
            f"median (2.5 %, 97.5 % quantile) of {frame.seed.nunique()} runs, up to {REPEATED:,} rows each the "
            "shortest of three fits. Published: 100 runs on other machines, by gradient ascent. VI-MC up to "
            f"{MOST_SAMPLED:,} rows."
        )
        return [ResultTable("runtime", "Runtime against n", ["n", "source", *METHODS], rows, [note])]

    def figures(self, frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
        import matplotlib.pyplot as plt

        figure, axis = plt.subplots(figsize=(6.5, 4.2))
        for method in TABLE_ORDER:
            mark = METHOD_MARKS[method]
            ours = frame[frame.method == method].groupby("n").runtime.median()
            axis.loglog(ours.index, ours, label=method, **mark)
            found = {int(n): published_runtime(config, int(n), method) for n in ours.index}
            theirs = [(n, spread.median) for n, spread in found.items() if spread]
            if theirs:
                axis.loglog(*zip(*theirs, strict=True), ls=":", lw=1.2, **{**mark, "mfc": "none"})
        axis.plot([], [], color="black", ls=":", lw=1.2, label="published")
        axis.set(xlabel="n", ylabel="seconds", title=f"Runtime of a fit, p = {config['p']}, family Q'")
        axis.legend()
        return {"runtime": figure}

    def cost(self, job: Job) -> float:
        return 1.0 + 1e-4 * float(job["n"])


def published_runtime(config: Config, n: int, method: str) -> Spread | None:
    """Published seconds of a fit under Q', if there are any for this n and p."""
    return published_logistic(config["setting"], n, config["p"], method, "Q'", "runtime")


class ElboByTerms(Artefact):
    """What the number of terms l costs: in the bound, in the ELBO, and in the distance to the optimum."""

    name = "elbo-terms"
    what = "the ELBO against the number of terms l"
    where = "Section 5"
    minutes = 0.1
    keys = ("n", "seed")
    columns = ("terms", "elbo", "gap", "loss", "kl_optimum", "runtime")

    def configure(self, request: Request) -> Config:
        return {"setting": "3", "p": 5 if request.quick else 25, "terms": [1, 3, 12] if request.quick else list(TERMS)}

    def jobs(self, request: Request) -> list[Job]:
        rows = (500,) if request.quick else (500, 1000, 10_000)
        return [{"n": n, "seed": seed} for seed in request.seeds(10, quick=2) for n in rows]

    def run(self, job: Job, config: Config, data: Path | None) -> list[Row]:
        """Fit with every l and in the limit: the bound maximised, the ELBO there, and the KL from the optimum."""
        X, y, _ = simulate(config["setting"], int(job["n"]), config["p"], int(job["seed"]))
        best = exact_optimum(X, y, "Q'")
        most = 0.0
        rows: list[Row] = []
        for terms in [None, *config["terms"]]:  # the limit first: the others are measured from it
            model, seconds = fit_logistic(X, y, int(job["seed"]), {"terms": terms})
            most = model.elbo_ if terms is None else most
            rows.append(
                {
                    "terms": "limit" if terms is None else terms,
                    "elbo": model.elbo_,
                    "gap": most - model.objective_,
                    "loss": most - model.elbo_,
                    "kl_optimum": gaussian_kl(best, NormalDistribution(model.coef_[0], model.covariance_)),
                    "runtime": seconds,
                }
            )
        return rows

    def tables(self, frame: "pandas.DataFrame", config: Config) -> list[ResultTable]:
        frame = frame.astype({"terms": str})
        metrics = ("gap", "loss", "kl_optimum", "runtime")
        rows: list[list[Cell]] = []
        for n in sorted(frame.n.unique()):
            for terms in [*map(str, config["terms"]), "limit"]:
                part = frame[(frame.n == n) & (frame.terms == terms)]
                rows.append([f"{n:,}", terms, *(spread_of(part[name]) for name in metrics)])
        columns = ["n", "l", "ELBO - bound", "ELBO lost", "KL*", "seconds"]
        note = (
            f"Setting {config['setting']}, p = {config['p']}, family Q', {frame.seed.nunique()} runs: median (2.5 %, "
            "97.5 % quantile) in nats. Bound: what was maximised, below the best ELBO; lost: how far the ELBO at the "
            "fitted q is below the best; KL*: from the exact optimum."
        )
        return [ResultTable("elbo-terms", "The ELBO against l", columns, rows, [note])]

    def figures(self, frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
        import matplotlib.pyplot as plt

        frame = frame[frame.terms.astype(str) != "limit"].astype({"terms": int})
        figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharex=True)
        panels = (("gap", "(a) bound below the best ELBO, nats"), ("kl_optimum", "(b) KL from the exact optimum, nats"))
        shades = plt.get_cmap("viridis")([0.0, 0.4, 0.8])
        for axis, (metric, title) in zip(axes, panels, strict=True):
            for n, shade in zip(sorted(frame.n.unique()), shades, strict=False):
                part = frame[frame.n == n].groupby("terms")[metric]
                axis.loglog(part.median().index, part.median(), color=shade, marker="o", ms=4, label=f"n = {n:,}")
                axis.fill_between(part.median().index, part.min(), part.max(), color=shade, alpha=0.15, lw=0)
            axis.axvline(12, color="black", lw=0.6, ls=":")
            axis.set(title=title, xlabel="l")
        axes[0].legend()
        return {"elbo-terms": figure}

    def cost(self, job: Job) -> float:
        return 1.0 + 1e-4 * float(job["n"])
