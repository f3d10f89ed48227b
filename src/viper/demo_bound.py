"""The bounds on E[log(1+e^X)] side by side, as a table and as a picture (the paper's Figure 1)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import viper

METHODS: dict[str, dict[str, Any]] = {
    "Jaakkola-Jordan": {"bound": "pg"},
    "Monte Carlo, 1,000 samples": {"bound": "mc", "samples": 1000, "random_state": 0},
    "VI-PER, l = 10": {"terms": 10},
    "VI-PER, fast path": {"tolerance": 1e-8},
    "VI-PER, exact limit": {},
}
COLOURS = dict(zip(METHODS, ("#c44e52", "#999999", "#4c72b0", "#dd8452", "#2a7f62"), strict=True))
FLOOR = 1e-17  # below every rounding error: where a logarithmic axis puts an error of exactly 0


def relative_errors(mean: Tensor, variance: Tensor) -> dict[str, Tensor]:
    """|η - E[log(1+e^X)]| / E[log(1+e^X)] of every method, the expectation by brute force."""
    truth = integral(mean, variance)
    values = {name: viper.expected_softplus(mean, variance, **options).value for name, options in METHODS.items()}
    return {name: ((value - truth) / truth).abs() for name, value in values.items()}


def integral(mean: Tensor, variance: Tensor) -> Tensor:
    """E[log(1+e^X)] by the trapezoidal rule on 4,001 points: a computation that shares nothing with the library's."""
    z = torch.linspace(-12.0, 12.0, 4001, dtype=torch.float64)
    weights = torch.exp(-0.5 * z * z)
    x = mean[..., None] + variance.sqrt()[..., None] * z
    return torch.logaddexp(x, torch.zeros_like(x)) @ (weights / weights.sum())


def table() -> str:
    """Value, slope and curvature at ϑ = 1, τ = 2, and the worst relative error over the paper's range."""
    theta, tau = torch.meshgrid(torch.linspace(-8, 6, 57).double(), torch.logspace(-2, 1, 31).double(), indexing="ij")
    errors = relative_errors(theta, tau**2)
    lines = [
        "E[log(1+e^X)] for X ~ N(ϑ, τ²) at ϑ = 1, τ = 2; worst relative error over ϑ in [-8, 6], τ in [0.01, 10]",
        "",
        f"{'':28}{'value':>12}{'slope':>12}{'curvature':>12}{'worst error':>14}",
    ]
    for name, options in METHODS.items():
        numbers = "".join(f"{x:12.8f}" for x in viper.expected_softplus(1.0, 4.0, **options))
        lines.append(f"{name:28}{numbers}{errors[name].max():14.1e}")
    return "\n".join(lines)


def picture(path: Path) -> None:
    """Errors against ϑ and against τ, and the number of terms for 1 % (the paper's Figure 1)."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "font.size": 10,
    }
    with plt.rc_context(style):
        figure, (by_mean, by_sd, by_terms) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
        means, sds = torch.linspace(-8, 6, 281).double(), torch.logspace(-2, 1, 301).double()
        over_means = relative_errors(means, torch.full_like(means, 4.0))
        over_sds = relative_errors(torch.ones_like(sds), sds**2)
        for name in METHODS:
            look = {"color": COLOURS[name], "lw": 2 if "VI-PER" in name else 1.4, "label": name}
            by_mean.semilogy(means, over_means[name].clamp(FLOOR), **look)
            by_sd.loglog(sds, over_sds[name].clamp(FLOOR), **look)
        by_mean.set(title="Relative error at τ = 2", xlabel="ϑ", ylim=(FLOOR, 10))
        by_sd.set(title="Relative error at ϑ = 1", xlabel="τ", ylim=(FLOOR, 10))
        by_mean.legend(frameon=False, fontsize=8, loc=(0.02, 0.2))

        theta, tau = torch.meshgrid(means, sds, indexing="ij")
        needed = viper.terms_needed(theta, tau**2, 0.01)
        mesh = by_terms.pcolormesh(means, sds, needed.T, cmap="viridis", rasterized=True)
        by_terms.set(title="l needed for a relative error of 1 %", xlabel="ϑ", ylabel="τ", yscale="log")
        figure.colorbar(mesh, ax=by_terms)
        figure.savefig(path, dpi=150)
