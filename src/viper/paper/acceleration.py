"""Not in the paper: what acceleration does to the series of Theorem 1, and the cusp that truncation leaves.

With the same terms P_k/k but other weights, the alternating sum converges like (3+√8)^-m in the number of terms m
(Cohen, Rodriguez Villegas & Zagier 2000), whereas the error of the truncated one is of order 1/m at ϑ = 0 as τ → 0.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from viper import expected_softplus
from viper.paper.artefact import Artefact, Config, Job, Request, Row
from viper.paper.bounds import as_rows, evenly_spaced
from viper.paper.figures import COLOURS
from viper.paper.tables import Cell, ResultTable
from viper.softplus.series import accelerated_weights, series, truncated_weights

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

LONGEST_SERIES = 25  # terms
SMALL_TAU = (0.01, 0.03, 0.1, 0.3)
RATE = 3.0 + math.sqrt(8.0)


class Acceleration(Artefact):
    """The worst error by number of terms, and the bound near ϑ = 0 at small τ."""

    name = "acceleration"
    what = "error by number of terms, plain and accelerated; the cusp"
    where = "new"
    minutes = 0.1
    keys = ("panel",)
    columns = ("weights", "terms", "error", "theta", "tau", "excess", "curvature", "exact_curvature")

    def configure(self, request: Request) -> Config:
        return {"points": 21 if request.quick else 121, "terms": 12}

    def jobs(self, request: Request) -> list[Job]:
        return [{"panel": "terms"}, {"panel": "cusp"}]

    def run(self, job: Job, config: Config, data: Path | None) -> list[Row]:
        points = config["points"]
        return errors_by_terms(points) if job["panel"] == "terms" else around_the_cusp(points, config["terms"])

    def tables(self, frame: "pandas.DataFrame", config: Config) -> list[ResultTable]:
        errors = frame[frame.panel == "terms"].set_index(["weights", "terms"]).error
        counts = [m for m in (3, 5, 7, 9, 13, 17, 23, 25) if ("plain", m) in errors.index]
        rows: list[list[Cell]] = [
            [str(m), float(errors["plain", m]), float(errors["accelerated", m]), 2.0 * RATE**-m] for m in counts
        ]
        near = frame[frame.panel == "cusp"]
        bends: list[list[Cell]] = [
            [f"{tau:g}", float(part.excess.max()), float(part.curvature.min()), float(part.exact_curvature.min())]
            for tau, part in near.groupby("tau")
        ]
        return [
            ResultTable(
                "acceleration",
                "Worst relative error by number of terms",
                ["terms", "plain", "accelerated", "proven: 2 (3+√8)^-m"],
                rows,
                ["Over ϑ from -3 to 3 and τ from 0.001 to 3; 2l - 1 terms are the paper's l. Below 1e-15, rounding."],
            ),
            ResultTable(
                "cusp",
                f"The cusp of the bound with l = {config['terms']}",
                ["τ", "largest excess", "smallest curvature", "exact smallest curvature"],
                bends,
                ["Over ϑ from -0.6 to 0.6. A negative curvature means that the bound is not convex there."],
            ),
        ]

    def figures(self, frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
        import matplotlib.pyplot as plt

        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8))
        marks = {"plain": (COLOURS["VI-PER"], "o"), "accelerated": (COLOURS["VI-PG"], "D")}
        for weights, (colour, marker) in marks.items():
            part = frame[(frame.panel == "terms") & (frame.weights == weights)]
            left.semilogy(part.terms, part.error, color=colour, marker=marker, ms=4, label=weights)
        counts = frame.terms.dropna().drop_duplicates().sort_values()
        left.semilogy(counts, 2.0 * RATE**-counts, color="black", lw=0.8, ls=":", label="proven for accelerated")
        left.set(title="(a) worst relative error", xlabel="number of terms", ylim=(1e-17, 3.0))
        left.legend()
        near = frame[frame.panel == "cusp"]
        shades = plt.get_cmap("viridis")([0.0, 0.3, 0.6, 0.85])
        for (tau, part), shade in zip(near.groupby("tau"), shades, strict=True):
            middle.plot(part.theta, part.excess, color=shade, label=f"τ = {tau:g}")
            right.plot(part.theta, part.curvature, color=shade)
            right.plot(part.theta, part.exact_curvature, color=shade, lw=1.0, ls="--")
        middle.set(title=f"(b) excess of the bound, l = {config['terms']}", xlabel="ϑ")
        middle.legend()
        right.axhline(0.0, color="black", lw=0.6)
        right.set(title="(c) its curvature (dashed: exact)", xlabel="ϑ", ylim=(-50.0, 10.0))
        right.set_yscale("symlog", linthresh=1.0)
        return {"acceleration": figure}


def errors_by_terms(points: int) -> list[Row]:
    """The worst relative error over ϑ in [-3, 3], τ in [0.001, 3], by number of terms."""
    tau = 10.0 ** evenly_spaced(-3.0, math.log10(3.0), points)
    both = torch.meshgrid(evenly_spaced(-3.0, 3.0, points), tau, indexing="ij")
    theta, variance = both[0].reshape(-1), both[1].reshape(-1) ** 2
    exact = expected_softplus(theta, variance).value

    def worst(weights: Tensor) -> float:
        return float(((series(weights).moments(theta, variance)[0] - exact) / exact).abs().max())

    plain: list[Row] = [
        {"weights": "plain", "terms": 2 * l - 1, "error": worst(truncated_weights(l))}
        for l in range(1, LONGEST_SERIES // 2 + 2)
    ]
    accelerated: list[Row] = [
        {"weights": "accelerated", "terms": m, "error": worst(accelerated_weights(m))}
        for m in range(2, LONGEST_SERIES + 1)
    ]
    return [*plain, *accelerated]


def around_the_cusp(points: int, l: int) -> list[Row]:
    """η_l - η and both curvatures around ϑ = 0 for small τ."""
    rows: list[Row] = []
    theta = evenly_spaced(-0.6, 0.6, points)
    for sd in SMALL_TAU:
        variance = torch.full_like(theta, sd * sd)
        exact, truncated = (expected_softplus(theta, variance, terms=terms) for terms in (None, l))
        rows += as_rows(
            theta=theta,
            tau=sd,
            excess=truncated.value - exact.value,
            curvature=truncated.curvature,
            exact_curvature=exact.curvature,
        )
    return rows
