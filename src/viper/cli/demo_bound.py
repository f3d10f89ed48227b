"""The bounds on E[log(1+e^X)] side by side, as a table and as a picture (the paper's Figure 1)."""

from pathlib import Path
from typing import Any

import torch

import viper
from viper.report import plot, views


def table() -> Any:
    """Value, slope and curvature at ϑ = 1, τ = 2, and the worst relative error of the value over the paper's range."""
    from rich.console import Group
    from rich.table import Table

    theta, tau = torch.meshgrid(torch.linspace(-8, 6, 57).double(), torch.logspace(-2, 1, 31).double(), indexing="ij")
    errors = views.relative_errors(theta, tau**2)
    found = Table(box=None, header_style="dim", pad_edge=False)
    found.add_column("E log(1+eˣ), X ~ N(1, 2²)")
    for name in ("value", "slope", "curvature", "worst relative error"):
        found.add_column(name, justify="right")
    for name, options in views.METHODS.items():
        numbers = [f"{x:.8f}" for x in viper.expected_softplus(1.0, 4.0, **options)]
        found.add_row(name, *numbers, f"{errors[name].max():.1e}")
    told = (
        "\nThe last column is of the value, and relative to it, over ϑ from -8 to 6 and τ from 0.01 to 10; "
        "at ϑ = -8 and small τ the value is 0.0003."
    )
    return Group(found, told)


def picture(path: Path) -> None:
    """Errors against ϑ and against τ, and the number of terms for 1 % (the paper's Figure 1)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    by_mean, by_sd, by_terms = figure.subplots(1, 3)
    plot.bounds("mean", ax=by_mean)
    plot.bounds("sd", ax=by_sd)
    plot.canvas(by_terms)
    means, sds = torch.linspace(-8, 6, 281).double(), torch.logspace(-2, 1, 301).double()
    theta, variance = torch.meshgrid(means, sds**2, indexing="ij")
    needed = viper.terms_needed(theta, variance, 0.01)
    mesh = by_terms.pcolormesh(means.numpy(), sds.numpy(), needed.T.numpy(), cmap="viridis", rasterized=True)
    by_terms.set(xlabel="ϑ", ylabel="τ", yscale="log")
    plot.title(by_terms, "l needed for a relative error of 1 %")
    figure.colorbar(mesh, ax=by_terms)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150)
