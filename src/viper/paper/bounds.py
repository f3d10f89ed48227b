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
from viper.paper.tables import Cell, Table

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

# The ranges of Figure 1, and of the grids: over them the paper's numbers of terms are found again.
THETA, TAU = (-3.0, 3.0), (0.1, 3.0)
LEVELS = (0.005, 0.01, 0.025, 0.05)
PUBLISHED_TERMS = {0.005: 17, 0.01: 12, 0.025: 7, 0.05: 5}  # Appendix B.2, "less than 17 for all values", 12, 7 and 5


def one_grid(request: Request) -> list[Job]:
    """All points in a single run."""
    return [{"grid": "all"}]


def line(low: float, high: float, points: int) -> Tensor:
    return torch.linspace(low, high, points, dtype=torch.float64)


def grid(step: float) -> tuple[Tensor, Tensor]:
    """ϑ and τ over the paper's ranges, flat."""
    theta = line(*THETA, round((THETA[1] - THETA[0]) / step) + 1)
    tau = line(*TAU, round((TAU[1] - TAU[0]) / step) + 1)
    both = torch.meshgrid(theta, tau, indexing="ij")
    return both[0].reshape(-1), both[1].reshape(-1)


def as_rows(**columns: Any) -> list[Row]:
    """Columns of equal length, or constants, as rows."""
    length = next(len(x) for x in columns.values() if isinstance(x, Tensor))
    lists = {k: x.tolist() if isinstance(x, Tensor) else [x] * length for k, x in columns.items()}
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def mesh(frame: "pandas.DataFrame", column: str) -> tuple[Any, Any, Any]:
    """τ, ϑ and values as the picture of a grid wants them."""
    wide = frame.pivot(index="theta", columns="tau", values=column)
    return wide.columns.to_numpy(), wide.index.to_numpy(), wide.to_numpy()


# ---------------------------------------------------------------------------------------------------------------------
# Figure 1


def configure_figure_1(request: Request) -> Config:
    return {"terms": 10, "samples": 1000, "points": 31 if request.quick else 121, "step": 0.5 if request.quick else 0.1}


def jobs_figure_1(request: Request) -> list[Job]:
    return [{"panel": panel} for panel in "abc"]


def run_figure_1(job: Job, config: Config, data: Path | None) -> list[Row]:
    if job["panel"] == "c":
        theta, tau = grid(config["step"])
        return as_rows(theta=theta, tau=tau, terms=terms_needed(theta, tau**2, 0.01))
    points = int(config["points"])
    if job["panel"] == "a":
        theta, tau = line(*THETA, points), torch.full((points,), 2.0, dtype=torch.float64)
    else:
        theta, tau = torch.ones(points, dtype=torch.float64), line(*TAU, points)
    bounds: dict[str, dict[str, Any]] = {
        "exact": {},
        "jaakkola_jordan": {"bound": "pg"},
        "viper": {"terms": config["terms"]},
        "monte_carlo": {"bound": "mc", "samples": config["samples"], "random_state": 1},
    }
    values: dict[str, Any] = {k: expected_softplus(theta, tau**2, **v).value for k, v in bounds.items()}
    return as_rows(theta=theta, tau=tau, **values)


def tables_figure_1(frame: "pandas.DataFrame", config: Config) -> list[Table]:
    rows: list[list[Cell]] = []
    for panel in "ab":
        part = frame[frame.panel == panel]
        for name, column in LINES.items():
            error = (part[column] - part.exact).abs()
            rows.append([panel, name, float(error.max()), float((error / part.exact).max())])
    largest = float(frame.terms.max())
    return [
        Table(
            "figure-1",
            "Error of the bounds in Figure 1",
            ["panel", "bound", "largest error", "largest relative error"],
            rows,
            [
                f"Panel (a): τ = 2, ϑ from -3 to 3; (b): ϑ = 1, τ from 0.1 to 3. Monte Carlo with "
                f"{config['samples']:,} samples. Panel (c) needs at most l = {largest:.0f}; published: "
                f"{PUBLISHED_TERMS[0.01]}."
            ],
        )
    ]


LINES = {"Jaakkola-Jordan": "jaakkola_jordan", "VI-PER, l = 10": "viper", "Monte Carlo": "monte_carlo"}
LOOKS: dict[str, dict[str, Any]] = {
    "jaakkola_jordan": {"color": COLOURS["VI-PG"], "lw": 2},
    "viper": {"color": COLOURS["VI-PER"], "lw": 2},
    "monte_carlo": {"color": COLOURS["VI-MC"], "lw": 1.5, "ls": "--"},
}


def figures_figure_1(frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    labels = (("ϑ", "theta", "(a) error at τ = 2"), ("τ", "tau", "(b) error at ϑ = 1"))
    for axis, panel, (symbol, x, title) in zip(axes, "ab", labels, strict=False):
        part = frame[frame.panel == panel]
        for name, column in LINES.items():
            axis.plot(part[x], part[column] - part.exact, label=name, **LOOKS[column])
        axis.axhline(0.0, color="black", lw=0.6)
        axis.set(title=title, xlabel=symbol, ylabel="bound - E[log(1+e$^X$)]")
    axes[0].legend()
    part = frame[frame.panel == "c"]
    drawn = axes[2].pcolormesh(*mesh(part, "terms"), cmap="viridis", rasterized=True)
    axes[2].set(title="(c) l for a relative error of 1 %", xlabel="τ", ylabel="ϑ")
    axes[2].grid(visible=False)
    figure.colorbar(drawn, ax=axes[2], ticks=MaxNLocator(integer=True))
    return {"figure-1": figure}


# ---------------------------------------------------------------------------------------------------------------------
# Relative errors over the grid


def configure_errors(request: Request) -> Config:
    return {"terms": 12, "step": 0.5 if request.quick else 0.1}


def run_errors(job: Job, config: Config, data: Path | None) -> list[Row]:
    theta, tau = grid(config["step"])
    exact = expected_softplus(theta, tau**2).value
    jj = expected_softplus(theta, tau**2, bound="pg").value
    viper = expected_softplus(theta, tau**2, terms=config["terms"]).value
    return as_rows(theta=theta, tau=tau, jaakkola_jordan=(jj - exact) / exact, viper=(viper - exact) / exact)


def tables_errors(frame: "pandas.DataFrame", config: Config) -> list[Table]:
    tighter = frame.jaakkola_jordan < frame.viper
    rows: list[list[Cell]] = [
        ["largest relative error of Jaakkola-Jordan", float(frame.jaakkola_jordan.max())],
        ["largest relative error of l = 12", float(frame.viper.max())],
        ["share of the grid where Jaakkola-Jordan is tighter", float(tighter.mean())],
        ["largest τ where it is", float(frame.tau[tighter].max()) if tighter.any() else None],
    ]
    note = "The paper's text says that l = 12 is at least as tight everywhere; near ϑ = 0 with small τ it is not."
    return [Table("errors", "Relative errors of the bounds over the grid", ["", "value"], rows, [note])]


def figures_errors(frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm, SymLogNorm

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), sharey=True)
    reach = float(frame.jaakkola_jordan.max())
    floor = 1e-5  # of the colours
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


# ---------------------------------------------------------------------------------------------------------------------
# Number of terms over the grid


def configure_terms(request: Request) -> Config:
    return {"step": 0.5 if request.quick else 0.1, "levels": list(LEVELS)}


def run_terms(job: Job, config: Config, data: Path | None) -> list[Row]:
    theta, tau = grid(config["step"])
    needed = {column(level): terms_needed(theta, tau**2, level) for level in LEVELS}
    return as_rows(theta=theta, tau=tau, **needed)


def column(level: float) -> str:
    return f"terms_{100 * level:g}"


def tables_terms(frame: "pandas.DataFrame", config: Config) -> list[Table]:
    rows = [
        [f"{100 * level:g} %", str(int(frame[column(level)].max())), str(PUBLISHED_TERMS[level])] for level in LEVELS
    ]
    note = "Largest l over ϑ from -3 to 3 and τ from 0.1 to 3. As τ → 0 the error at ϑ = 0 tends to that of the cusp."
    return [Table("terms", "Terms needed for a relative error", ["relative error", "l", "published l"], rows, [note])]


def figures_terms(frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(1, 4, figsize=(13.5, 3.2), sharey=True)
    for axis, level, letter in zip(axes, LEVELS, "abcd", strict=True):
        drawn = axis.pcolormesh(*mesh(frame, column(level)), cmap="viridis", rasterized=True)
        axis.set(title=f"({letter}) {100 * level:g} %", xlabel="τ")
        axis.grid(visible=False)
        figure.colorbar(drawn, ax=axis, ticks=MaxNLocator(integer=True))
    axes[0].set_ylabel("ϑ")
    return {"terms": figure}


ARTEFACTS = [
    Artefact(
        name="figure-1",
        what="error of the bounds, and terms needed for 1 %",
        where="Figure 1",
        minutes=0.1,
        keys=["panel"],
        columns=["theta", "tau", "exact", "jaakkola_jordan", "viper", "monte_carlo", "terms"],
        configure=configure_figure_1,
        jobs=jobs_figure_1,
        run=run_figure_1,
        tables=tables_figure_1,
        figures=figures_figure_1,
    ),
    Artefact(
        name="errors",
        what="relative errors of the bounds over a grid",
        where="Appendix B.1",
        minutes=0.1,
        keys=["grid"],
        columns=["theta", "tau", "jaakkola_jordan", "viper"],
        configure=configure_errors,
        jobs=one_grid,
        run=run_errors,
        tables=tables_errors,
        figures=figures_errors,
    ),
    Artefact(
        name="terms",
        what="terms needed for 0.5, 1, 2.5 and 5 %",
        where="Appendix B.2",
        minutes=0.1,
        keys=["grid"],
        columns=["theta", "tau", *map(column, LEVELS)],
        configure=configure_terms,
        jobs=one_grid,
        run=run_terms,
        tables=tables_terms,
        figures=figures_terms,
    ),
]
