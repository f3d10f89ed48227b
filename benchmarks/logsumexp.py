"""The expected log-sum-exp: nanoseconds per row and class for value, slope and curvature together, and the worst error.

Means are normal with sd 2; sds are log-uniform on the interval shown. Quasi-Monte Carlo averages over scrambled Sobol
points, the same for all rows. Errors are measured against our own tolerance of 1e-12, which is itself compared with
quadrature for three classes and with the expected softplus for two.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

import viper
from benchmarks.table import Table, interleaved, machine

Moments = tuple[Tensor, ...]
LOGSUMEXP_COLUMNS = [
    "method",
    "classes",
    "sd",
    "ns per row and class",
    "value, error",
    "slope, error",
    "curvature, error",
]
SIZES = {3: 20_000, 10: 6_000, 100: 600, 1000: 60}
SDS = ((0.01, 0.1), (0.1, 1.0), (1.0, 5.0))
SAMPLE_BLOCK = 1 << 20  # sampled floats per block: the fastest among 2^16 ... 2^24 on a CPU


def run(quick: bool, device: str = "cpu") -> Table:
    torch.set_num_threads(1)
    rows: list[list[str | float]] = []
    for classes, size in SIZES.items():
        for low, high in SDS:
            mean, variance = random_classes(max(10, size // (20 if quick else 1)), classes, low, high, device)
            exact = viper.expected_logsumexp(mean, variance, tolerance=1e-12)
            methods = competitors(classes, device)
            with_data = {name: partial(method, mean, variance) for name, method in methods.items()}
            took = interleaved(with_data, device, 2 if quick else 7, 4.0)
            for name, work in with_data.items():
                errors = [float((a - b).abs().max()) for a, b in zip(work(), exact[:3], strict=False)]
                rows.append([name, classes, f"{low} to {high}", took[name] / mean.numel() * 1e9, *errors])
    notes = [
        machine(device),
        f"{'Time between events' if device == 'cuda' else 'Processor time'}, the shortest of several calls, in "
        "float64; errors are the largest, absolute.",
        equal_error_note(rows),
        f"Tolerance 1e-12 against quadrature for three classes: {error_of_reference(5 if quick else 40):.0e} at worst.",
    ]
    return Table("Expected log-sum-exp with slope and curvature", LOGSUMEXP_COLUMNS, rows, notes)


def random_classes(size: int, classes: int, low: float, high: float, device: str) -> tuple[Tensor, Tensor]:
    """Normal means with sd 2, and sds log-uniform on [low, high]."""
    generator = torch.Generator().manual_seed(0)
    mean = 2.0 * torch.randn(size, classes, dtype=torch.float64, generator=generator)
    share = torch.rand(size, classes, dtype=torch.float64, generator=generator)
    sd = torch.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return mean.to(device), sd.square().to(device)


def competitors(classes: int, device: str) -> dict[str, Callable[..., Moments]]:
    """Ours at three tolerances, and averages over quasi-random points."""

    def ours(tolerance: float) -> Callable[..., Moments]:
        return lambda mean, variance: viper.expected_logsumexp(mean, variance, tolerance=tolerance)[:3]

    methods = {f"viper, tolerance {tolerance:.0e}": ours(tolerance) for tolerance in (1e-10, 1e-8, 1e-5)}
    return methods | {
        f"quasi-Monte Carlo, {points} points": partial(quasi_monte_carlo, sobol(points, classes, device))
        for points in (64, 512)
    }


def sobol(points: int, classes: int, device: str) -> Tensor:
    """Scrambled Sobol points, as standard normals."""
    engine = torch.quasirandom.SobolEngine(classes, scramble=True, seed=0)
    return torch.special.ndtri(engine.draw(points, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)).to(device)


def quasi_monte_carlo(z: Tensor, mean: Tensor, variance: Tensor) -> Moments:
    """Means of log Σ e^f, p and p(1-p) over the points, in blocks of rows."""
    size = max(1, (SAMPLE_BLOCK if mean.device.type == "cpu" else 1 << 26) // z.numel())
    parts = []
    for m, sd in zip(mean.split(size), variance.sqrt().split(size), strict=True):
        f = torch.addcmul(m[:, None], sd[:, None], z)
        value = torch.logsumexp(f, -1)
        p = f.sub_(value[..., None]).exp_()
        slope = p.mean(1)
        parts.append((value.mean(1), slope, slope - p.square_().mean(1)))
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def equal_error_note(rows: list[list[str | float]]) -> str:
    """How 512 quasi-random points compare with our largest tolerance here, in time and error."""
    pairs = []
    for i in range(0, len(rows), 5):
        ours, theirs = rows[i + 2], rows[i + 4]
        pairs.append((float(theirs[3]) / float(ours[3]), float(theirs[4]) / max(float(ours[4]), 1e-300)))
    times, errors = zip(*pairs, strict=True)
    return (
        f"A tolerance of 1e-5 is {min(times):.0f} to {max(times):.0f} times as fast as 512 quasi-random points, whose "
        f"error in the value is {min(errors):,.0f} to {max(errors):,.0f} times as large."
    )


def error_of_reference(count: int) -> float:
    """Worst error of the value at tolerance 1e-12 for three classes: 160² nodes for two classes, the third exact."""
    rng, worst = np.random.default_rng(0), 0.0
    z, w = np.polynomial.hermite_e.hermegauss(160)
    w = w / w.sum()
    for _ in range(count):
        mean, sd = rng.normal(0, 2, 3), np.exp(rng.uniform(math.log(0.01), math.log(1.5), 3))
        c = np.logaddexp(mean[1] + sd[1] * z[:, None], mean[2] + sd[2] * z)
        exact = w @ (c + viper.expected_softplus(mean[0] - c, sd[0] ** 2).value) @ w
        ours = viper.expected_logsumexp(mean, sd**2, tolerance=1e-12).value
        worst = max(worst, abs(float(exact - ours)))
    return worst
