"""The expected softplus: nanoseconds per point for value, slope and curvature together, and the worst error.

Points have means uniform on [-8, 6] and sds log-uniform on [1e-3, 10]; a second set has sds of at most 0.05, as with
many rows. Errors are measured against the exact limit, which is itself compared with mpmath.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import viper
from benchmarks.table import Table, interleaved, machine

Moments = tuple[Tensor, ...]
FAST = "fast path (tolerance 1e-8)"
AUTOGRAD = "η₁₂, autograd of the paper's formula"
AUTOGRAD_BLOCK = 1 << 11  # points per block for autograd: the fastest among 2^9 ... 2^16 on a CPU
ERRORS = ["value, absolute", "value, relative", "slope, absolute", "curvature, absolute", "not finite"]
SOFTPLUS_COLUMNS = ["method", "sd at most", "ns per point", "speed", *ERRORS]


def run(quick: bool, device: str = "cpu") -> Table:
    torch.set_num_threads(1)
    size = (20_000 if quick else 1_000_000) * (10 if device == "cuda" else 1)
    rows: list[list[str | float]] = []
    durations = {}
    for largest in (10.0, 0.05):
        mean, variance = random_points(size, largest, device)
        methods = contenders(device, largest < 1)
        exact = viper.expected_softplus(mean, variance)
        with_data = {name: partial(method, mean, variance) for name, method in methods.items()}
        for work in with_data.values() if device == "cuda" else ():  # compile and load kernels before timing
            work()
        took = interleaved(with_data, device, 3 if quick else 15, 6.0)
        durations[largest] = took
        for name, method in methods.items():
            ns, speed = took[name] / size * 1e9, took[AUTOGRAD] / took[name]
            rows.append([name, largest, ns, speed, *moment_errors(method(mean, variance), exact)])
    notes = [
        machine(device),
        f"{size:,} points in float64; {'time between events' if device == 'cuda' else 'processor time'}, the shortest "
        f"of several calls. Speed is relative to {AUTOGRAD}; errors are the largest, against the exact limit.",
        f"The exact limit against 30-digit mpmath: {error_of_limit(5 if quick else 60):.1e} relative at worst.",
        overflow_note(size, device),
        speed_note(durations[10.0]),
    ]
    if not quick:
        notes += [memory_note(device, {"tolerance": 1e-8}, "Fast path"), memory_note(device, {}, "Exact limit")]
    return Table("Expected softplus with slope and curvature", SOFTPLUS_COLUMNS, rows, notes)


def random_points(size: int, largest: float, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Mean uniform on [-8, 6], sd log-uniform on [1e-3, largest]; made in place, without temporary arrays."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.empty(size, dtype=torch.float64).uniform_(-8.0, 6.0, generator=generator)
    log_sd = torch.empty(size, dtype=torch.float64).uniform_(math.log(1e-3), math.log(largest), generator=generator)
    return mean.to(device), log_sd.mul_(2.0).exp_().to(device)


def contenders(device: str, brief: bool) -> dict[str, Callable[..., Moments]]:
    """Every way to compute the three numbers; with `brief` only ours and the paper's."""

    def ours(**options: Any) -> Callable[..., Moments]:
        return partial(viper.expected_softplus, **options)

    methods: dict[str, Callable[..., Moments]] = {FAST: ours(tolerance=1e-8), "exact limit": ours()}
    if device == "cuda":
        methods[f"{FAST}, compiled"] = torch.compile(ours(tolerance=1e-8), fullgraph=True)
        methods["exact limit, compiled"] = torch.compile(ours(), fullgraph=True)
    methods |= {"η₁₂, analytic": ours(terms=12), AUTOGRAD: eta_by_autograd}
    if not brief:
        methods |= {
            "Gauss-Hermite, 20 nodes": ours(bound="quadrature", nodes=20),
            "Gauss-Hermite, 64 nodes": ours(bound="quadrature", nodes=64),
            "Monte Carlo, 1,000 samples": ours(bound="mc", samples=1000, random_state=0),
            "Jaakkola-Jordan": ours(bound="pg"),
        }
    return methods


# ---------------------------------------------------------------------------------------------------------------------
# The paper's formula, as written, differentiated by torch


def eta(mean: Tensor, variance: Tensor, terms: int) -> Tensor:
    """Theorem 1: τ φ(ϑ/τ) + ϑ Φ(ϑ/τ) + Σ_k (-1)^{k-1}/k [e^{kϑ+k²τ²/2} Φ(-ϑ/τ-kτ) + e^{-kϑ+k²τ²/2} Φ(ϑ/τ-kτ)]."""
    Phi = torch.special.ndtr
    sd = variance.sqrt()
    z = mean / sd
    total = sd / math.sqrt(2 * math.pi) * torch.exp(-0.5 * z**2) + mean * Phi(z)
    k = torch.arange(1, 2 * terms, dtype=mean.dtype, device=mean.device)[:, None]
    half = 0.5 * k**2 * variance
    both = torch.exp(k * mean + half) * Phi(-z - k * sd) + torch.exp(-k * mean + half) * Phi(z - k * sd)
    return total + ((-1) ** (k - 1) / k * both).sum(0)


def eta_by_autograd(mean: Tensor, variance: Tensor) -> Moments:
    """η₁₂, ∂η₁₂/∂ϑ and 2 ∂η₁₂/∂v by one forward and one backward pass, in blocks."""
    out = [torch.empty_like(mean) for _ in range(3)]
    size = AUTOGRAD_BLOCK if mean.device.type == "cpu" else 1 << 20
    for start in range(0, len(mean), size):
        block = slice(start, start + size)
        m, v = mean[block].detach().requires_grad_(), variance[block].detach().requires_grad_()
        value = eta(m, v, 12)
        slope, rate = torch.autograd.grad(value.sum(), (m, v))
        out[0][block], out[1][block], out[2][block] = value.detach(), slope, 2.0 * rate
    return tuple(out)


def overflow_note(size: int, device: str) -> str:
    """Where the paper's formula overflows."""
    mean, variance = random_points(size, 10.0, device)
    value, slope, curvature = eta_by_autograd(mean, variance)
    for_value, for_any = ~value.isfinite(), ~(value.isfinite() & slope.isfinite() & curvature.isfinite())
    if not for_any.any():
        return f"{AUTOGRAD}: finite everywhere."
    return (
        f"{AUTOGRAD}: e^(k²τ²/2) overflows against Φ = 0; {for_value.double().mean():.1%} of the values and "
        f"{for_any.double().mean():.1%} of the points are not finite, the first at sd = "
        f"{float(variance[for_any].min().sqrt()):.2f}. Its errors are over the other points."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Errors, speed, memory


def moment_errors(moments: Moments, exact: Moments) -> list[float]:
    """The columns ERRORS: the largest over the finite results, and the share of points that are not finite."""
    finite = torch.stack([x.isfinite() for x in moments]).all(0)
    gaps = [(x - y).abs()[finite] for x, y in zip(moments, exact, strict=True)]
    relative = gaps[0] / exact[0][finite]
    return [*(float(x.max()) for x in (gaps[0], relative, *gaps[1:])), 1.0 - float(finite.double().mean())]


def error_of_limit(count: int) -> float:
    """Worst relative error of the exact limit at random points, against the trapezoidal rule in 30 digits."""
    mean, variance = random_points(count, 10.0)
    results = zip(*(x.tolist() for x in viper.expected_softplus(mean, variance)), strict=True)
    return max(
        abs(float(ours / truth - 1))
        for m, v, row in zip(mean.tolist(), variance.tolist(), results, strict=True)
        for ours, truth in zip(row, trapezoid(m, v), strict=True)
    )


def trapezoid(mean: float, variance: float) -> list[Any]:
    """E[f(X)] for the softplus f, its slope and curvature. The error falls exponentially, as f is analytic within π."""
    from mpmath import mp, mpf  # type: ignore[import-untyped]

    mp.dps = 30
    sd = mp.sqrt(mpf(variance))
    step = min(mpf(1) / 5, sd / 4)
    totals = [mpf(0)] * 3
    # e^x shifts the mass by sd²; less than 1e-30 of it lies beyond 12 sd
    for j in range(int(-12 * sd / step), int((12 * sd + variance) / step) + 1):
        x = mean + j * step
        weight, s = step * mp.npdf(x, mean, sd), 1 / (1 + mp.exp(-x))
        for i, f in enumerate((mp.log1p(mp.exp(x)), s, s * (1 - s))):
            totals[i] += weight * f
    return totals


def speed_note(took: dict[str, float]) -> str:
    """The ratios of times; the targets on one thread of a CPU are 20, 2 and 1."""
    fast, exact = took[FAST], took["exact limit"]
    return (
        f"The fast path is {took[AUTOGRAD] / fast:.0f} times faster than autograd of η₁₂ and "
        f"{took['Gauss-Hermite, 64 nodes'] / fast:.1f} times faster than 64-point quadrature; the exact limit is "
        f"{took[AUTOGRAD] / exact:.1f} times faster than autograd of η₁₂."
    )


def memory_note(device: str, options: dict[str, Any], name: str) -> str:
    """What one call at 10⁸ points needs beyond its inputs and outputs, in its own process."""
    program = f"from benchmarks.softplus import extra_memory; print(extra_memory({device!r}, {options!r}))"
    if device == "cpu" and not Path("/proc/self/status").exists():
        return f"{name}: memory is measured on Linux only."
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    megabytes = float(done.stdout)
    return f"{name}: 10⁸ points need {megabytes:,.0f} MB beyond the inputs (1,600 MB) and outputs (2,400 MB)."


def extra_memory(device: str, options: dict[str, Any], size: int = 10**8) -> float:
    """Peak memory during a call, in MB, less the memory before it and the size of the outputs."""
    torch.set_num_threads(1)
    viper.expected_softplus(*random_points(10**5, 10.0, device), **options)  # whatever is loaded at first use
    mean, variance = random_points(size, 10.0, device)
    before = high_water(device)
    out = viper.expected_softplus(mean, variance, **options)
    return (high_water(device) - before - sum(x.nbytes for x in out)) / 1e6


def high_water(device: str) -> int:
    """The largest amount of memory held so far, in bytes."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
