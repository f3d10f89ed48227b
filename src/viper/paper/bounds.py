"""The bounds on E[log(1+e^X)], X ~ N(ϑ, τ²): Figure 1 and the grids of Appendix B, against the exact value.

The paper measures errors against Monte Carlo with 5×10⁶ samples, whose own error is a few times 1e-4; here the
expectation is exact to rounding.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from viper import expected_softplus, terms_needed
from viper.paper.artefact import Artefact, Config, Job, Request, Row
from viper.paper.figures import COLOURS
from viper.paper.published import PUBLISHED_TERMS
from viper.paper.tables import Cell, ResultTable

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

# The ranges of Figure 1, also used for the grids: they reproduce the paper's numbers of terms.
THETA, TAU = (-3.0, 3.0), (0.1, 3.0)
LINES = {"Jaakkola-Jordan": "jaakkola_jordan", "VI-PER, l = 10": "viper", "Monte Carlo": "monte_carlo"}
LINE_STYLES: dict[str, dict[str, Any]] = {
    "jaakkola_jordan": {"color": COLOURS["VI-PG"], "lw": 2},
    "viper": {"color": COLOURS["VI-PER"], "lw": 2},
    "monte_carlo": {"color": COLOURS["VI-MC"], "lw": 1.5, "ls": "--"},
}


def evenly_spaced(low: float, high: float, points: int) -> Tensor:
    """Equally spaced points from low to high, inclusive."""
    return torch.linspace(low, high, points, dtype=torch.float64)


def theta_tau_grid(step: float) -> tuple[Tensor, Tensor]:
    """ϑ and τ over the paper's ranges, flattened."""
    theta = evenly_spaced(*THETA, round((THETA[1] - THETA[0]) / step) + 1)
    tau = evenly_spaced(*TAU, round((TAU[1] - TAU[0]) / step) + 1)
    both = torch.meshgrid(theta, tau, indexing="ij")
    return both[0].reshape(-1), both[1].reshape(-1)


def as_rows(**columns: Any) -> list[Row]:
    """Columns of equal length, or constants, as rows."""
    length = next(len(x) for x in columns.values() if isinstance(x, Tensor))
    lists = {k: x.tolist() if isinstance(x, Tensor) else [x] * length for k, x in columns.items()}
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def mesh(frame: "pandas.DataFrame", column: str) -> tuple[Any, Any, Any]:
    """τ, ϑ and the values of a column, in the shapes that pcolormesh takes."""
    wide = frame.pivot(index="theta", columns="tau", values=column)
    return wide.columns.to_numpy(), wide.index.to_numpy(), wide.to_numpy()


class Figure1(Artefact):
    """Errors of the bounds along two lines, and the number of terms needed over the grid."""

    name = "figure-1"
    what = "error of the bounds, and terms needed for 1 %"
    where = "Figure 1"
    minutes = 0.1
    keys = ("panel",)
    columns = ("theta", "tau", "exact", "jaakkola_jordan", "viper", "monte_carlo", "terms")

    def configure(self, request: Request) -> Config:
        points, step = (31, 0.5) if request.quick else (121, 0.1)
        return {"terms": 10, "samples": 1000, "points": points, "step": step}

    def jobs(self, request: Request) -> list[Job]:
        return [{"panel": panel} for panel in "abc"]

    def run(self, job: Job, config: Config, data: Path | None) -> list[Row]:
        if job["panel"] == "c":
            theta, tau = theta_tau_grid(config["step"])
            return as_rows(theta=theta, tau=tau, terms=terms_needed(theta, tau**2, 0.01))
        points = int(config["points"])
        if job["panel"] == "a":
            theta, tau = evenly_spaced(*THETA, points), torch.full((points,), 2.0, dtype=torch.float64)
        else:
            theta, tau = torch.ones(points, dtype=torch.float64), evenly_spaced(*TAU, points)
        bounds: dict[str, dict[str, Any]] = {
            "exact": {},
            "jaakkola_jordan": {"bound": "pg"},
            "viper": {"terms": config["terms"]},
            "monte_carlo": {"bound": "mc", "samples": config["samples"], "random_state": 1},
        }
        values: dict[str, Any] = {k: expected_softplus(theta, tau**2, **v).value for k, v in bounds.items()}
        return as_rows(theta=theta, tau=tau, **values)

    def tables(self, frame: "pandas.DataFrame", config: Config) -> list[ResultTable]:
        rows: list[list[Cell]] = []
        for panel in "ab":
            part = frame[frame.panel == panel]
            for name, column in LINES.items():
                error = (part[column] - part.exact).abs()
                rows.append([panel, name, float(error.max()), float((error / part.exact).max())])
        note = (
            f"Panel (a): τ = 2, ϑ from -3 to 3; (b): ϑ = 1, τ from 0.1 to 3. Monte Carlo with {config['samples']:,} "
            f"samples. Panel (c) needs at most l = {float(frame.terms.max()):.0f}; published: {PUBLISHED_TERMS[0.01]}."
        )
        columns = ["panel", "bound", "largest error", "largest relative error"]
        return [ResultTable("figure-1", "Error of the bounds in Figure 1", columns, rows, [note])]

    def figures(self, frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
        import matplotlib.pyplot as plt
        from matplotlib.ticker import MaxNLocator

        figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
        labels = (("ϑ", "theta", "(a) error at τ = 2"), ("τ", "tau", "(b) error at ϑ = 1"))
        for axis, panel, (symbol, x, title) in zip(axes, "ab", labels, strict=False):
            part = frame[frame.panel == panel]
            for name, column in LINES.items():
                axis.plot(part[x], part[column] - part.exact, label=name, **LINE_STYLES[column])
            axis.axhline(0.0, color="black", lw=0.6)
            axis.set(title=title, xlabel=symbol, ylabel="bound - E[log(1+e$^X$)]")
        axes[0].legend()
        part = frame[frame.panel == "c"]
        drawn = axes[2].pcolormesh(*mesh(part, "terms"), cmap="viridis", rasterized=True)
        axes[2].set(title="(c) l for a relative error of 1 %", xlabel="τ", ylabel="ϑ")
        axes[2].grid(visible=False)
        figure.colorbar(drawn, ax=axes[2], ticks=MaxNLocator(integer=True))
        return {"figure-1": figure}


class RelativeErrors(Artefact):
    """Relative errors of Jaakkola-Jordan and of l = 12 over the grid."""

    name = "errors"
    what = "relative errors of the bounds over a grid"
    where = "Appendix B.1"
    minutes = 0.1
    keys = ("grid",)
    columns = ("theta", "tau", "jaakkola_jordan", "viper")

    def configure(self, request: Request) -> Config:
        return {"terms": 12, "step": 0.5 if request.quick else 0.1}

    def jobs(self, request: Request) -> list[Job]:
        return [{"grid": "all"}]

    def run(self, job: Job, config: Config, data: Path | None) -> list[Row]:
        theta, tau = theta_tau_grid(config["step"])
        exact = expected_softplus(theta, tau**2).value
        jj = expected_softplus(theta, tau**2, bound="pg").value
        viper = expected_softplus(theta, tau**2, terms=config["terms"]).value
        return as_rows(theta=theta, tau=tau, jaakkola_jordan=(jj - exact) / exact, viper=(viper - exact) / exact)

    def tables(self, frame: "pandas.DataFrame", config: Config) -> list[ResultTable]:
        tighter = frame.jaakkola_jordan < frame.viper
        rows: list[list[Cell]] = [
            ["largest relative error of Jaakkola-Jordan", float(frame.jaakkola_jordan.max())],
            ["largest relative error of l = 12", float(frame.viper.max())],
            ["share of the grid where Jaakkola-Jordan is tighter", float(tighter.mean())],
            ["largest τ where it is", float(frame.tau[tighter].max()) if tighter.any() else None],
        ]
        note = "The paper's text says that l = 12 is at least as tight everywhere; near ϑ = 0 with small τ it is not."
        return [ResultTable("errors", "Relative errors of the bounds over the grid", ["", "value"], rows, [note])]

    def figures(self, frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
        import matplotlib.pyplot as plt
        from matplotlib.colors import LogNorm, SymLogNorm

        figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
        reach = float(frame.jaakkola_jordan.max())
        floor = 1e-5  # where the colours end
        frame = frame.assign(
            difference=frame.jaakkola_jordan - frame.viper,
            jaakkola_jordan=frame.jaakkola_jordan.clip(lower=floor),
            viper=frame.viper.clip(lower=floor),
        )
        one_scale, signed = LogNorm(floor, reach), SymLogNorm(1e-3, vmin=-reach, vmax=reach)
        panels: tuple[tuple[str, str, str, Any], ...] = (
            ("jaakkola_jordan", "(a) relative error, Jaakkola-Jordan", "viridis", one_scale),
            ("viper", f"(b) relative error, VI-PER, l = {config['terms']}", "viridis", one_scale),
            ("difference", "(c) (a) - (b); black: equal", "RdBu_r", signed),
        )
        for axis, (column, title, colours, norm) in zip(axes, panels, strict=True):
            drawn = axis.pcolormesh(*mesh(frame, column), cmap=colours, norm=norm, rasterized=True)
            axis.set(title=title, xlabel="τ")
            axis.grid(visible=False)
            figure.colorbar(drawn, ax=axis)
        axes[0].set_ylabel("ϑ")
        tau, theta, values = mesh(frame, "difference")
        if (values < 0.0).any() and (values > 0.0).any():
            axes[2].contour(tau, theta, values, levels=[0.0], colors="black", linewidths=1.2)
        return {"errors": figure}


def terms_column(level: float) -> str:
    return f"terms_{100 * level:g}"


class TermsNeeded(Artefact):
    """The number of terms needed over the grid, for each relative error of the paper."""

    name = "terms"
    what = "terms needed for 0.5, 1, 2.5 and 5 %"
    where = "Appendix B.2"
    minutes = 0.1
    keys = ("grid",)
    columns = ("theta", "tau", *map(terms_column, PUBLISHED_TERMS))

    def configure(self, request: Request) -> Config:
        return {"step": 0.5 if request.quick else 0.1, "levels": list(PUBLISHED_TERMS)}

    def jobs(self, request: Request) -> list[Job]:
        return [{"grid": "all"}]

    def run(self, job: Job, config: Config, data: Path | None) -> list[Row]:
        theta, tau = theta_tau_grid(config["step"])
        needed = {terms_column(level): terms_needed(theta, tau**2, level) for level in PUBLISHED_TERMS}
        return as_rows(theta=theta, tau=tau, **needed)

    def tables(self, frame: "pandas.DataFrame", config: Config) -> list[ResultTable]:
        rows = [
            [f"{100 * level:g} %", str(int(frame[terms_column(level)].max())), str(published)]
            for level, published in PUBLISHED_TERMS.items()
        ]
        note = (
            "Largest l over ϑ from -3 to 3 and τ from 0.1 to 3. As τ → 0 the error at ϑ = 0 tends to that of the cusp."
        )
        columns = ["relative error", "l", "published l"]
        return [ResultTable("terms", "Terms needed for a relative error", columns, rows, [note])]

    def figures(self, frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
        import matplotlib.pyplot as plt
        from matplotlib.ticker import MaxNLocator

        figure, axes = plt.subplots(1, 4, figsize=(13.5, 3.2), sharey=True)
        for axis, level, letter in zip(axes, PUBLISHED_TERMS, "abcd", strict=True):
            drawn = axis.pcolormesh(*mesh(frame, terms_column(level)), cmap="viridis", rasterized=True)
            axis.set(title=f"({letter}) {100 * level:g} %", xlabel="τ")
            axis.grid(visible=False)
            figure.colorbar(drawn, ax=axis, ticks=MaxNLocator(integer=True))
        axes[0].set_ylabel("ϑ")
        return {"terms": figure}
