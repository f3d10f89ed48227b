"""Look up the formulas of a bound by its name and options."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.softplus import quadrature, series
from viper.softplus.bound_names import BOUND_NAMES
from viper.softplus.jaakkola_jordan import jaakkola_jordan
from viper.softplus.limit import fast_limit, limit
from viper.softplus.pointwise import Bound, Triple, blocked

BOUNDS: dict[str, Bound] = {}  # each choice is built once; compiled code finds it here
MOST_BOUNDS = 256


def bound_key(bound: str, terms: Any, samples: Any, nodes: Any, random_state: Any, tolerance: Any) -> str:
    """Check a choice, build its formulas if they are new, and return their key in BOUNDS."""
    if bound == "mc" and random_state is None:
        random_state = torch.Generator().seed()
    choice = (bound, terms, samples, nodes, random_state, tolerance)
    key = repr(choice)  # text, because 1 == 1.0 == True
    if key not in BOUNDS:
        with torch._C._DisableFuncTorch():  # the constants must outlive a transform that uses the bound first
            chosen = build_bound(*choice)
        if len(BOUNDS) >= MOST_BOUNDS:
            BOUNDS.clear()
        BOUNDS[key] = chosen
    return key


# What torch.compiler.assume_constant_result does, but without importing the compiler, which takes longer than viper.
bound_key._dynamo_marked_constant = True  # type: ignore[attr-defined]


def build_bound(bound: str, terms: Any, samples: Any, nodes: Any, random_state: Any, tolerance: Any) -> Bound:
    """Return the formulas of a bound. Raises if an option is invalid or does not belong to this bound."""
    if not isinstance(bound, str) or bound not in BOUND_NAMES:
        raise ValueError(f"bound must be one of {list(BOUND_NAMES)}; got {bound!r}.")
    if terms is not None and bound != "viper":
        raise ValueError(f"terms belongs to bound='viper'; got bound={bound!r}, terms={terms!r}. Leave terms out.")
    if tolerance is not None and (bound != "viper" or terms is not None):
        raise ValueError(
            f"tolerance belongs to the limit of bound='viper'; got {bound=}, {terms=}. Leave tolerance out."
        )
    if bound == "pg":
        return jaakkola_jordan()
    if bound == "mc":
        seed = checked_int(random_state, "random_state", 0, 2**64 - 1)
        return quadrature.monte_carlo(checked_int(samples, "samples", 2, even=True), seed)
    if bound == "quadrature":
        return quadrature.gauss_hermite(checked_int(nodes, "nodes", 1, quadrature.MOST_NODES))
    if bound == "certified":
        return certified()
    if terms is not None:
        return series.series(series.truncated_weights(checked_int(terms, "terms", 1)))
    if tolerance is None:
        return limit()
    tolerance = checked_number(tolerance, "tolerance", 0.0, "None for the exact value")
    return fast_limit(tolerance) or limit()


def certified() -> Bound:
    """The limit plus its certificate, which the derivatives treat as a constant."""
    exact = limit()

    def raised(mean: Tensor, variance: Tensor) -> Triple:
        mean64, variance64 = mean.double(), variance.double()
        value, slope, curvature = exact.moments(mean64, variance64)
        value = rounded_up(value + certificate(mean64, variance64), mean.dtype)
        return value, slope.to(mean.dtype), curvature.to(mean.dtype)

    return Bound(blocked(raised, 4, native=True), exact.partials)


def rounded_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest number of `dtype` that is at least x."""
    nearest = x.to(dtype)
    return torch.where(nearest < x, torch.nextafter(nearest, torch.full_like(nearest, torch.inf)), nearest)


def certificate(mean: Tensor, variance: Tensor) -> Tensor:
    """Return the most by which the computed limit can fall below E[log(1+e^X)]; docs/certificate.md has the proof.

    4e-15 covers expansion, quadrature and series; 128 units of rounding, relative to |ϑ| + τ + 1, cover the arithmetic.
    """
    return 4e-15 + 128 * torch.finfo(torch.float64).eps * (mean.abs() + variance.sqrt() + 1.0)


def checked_int(x: Any, name: str, least: int, most: int | None = None, even: bool = False) -> int:
    """Return an integer option. Raises if it is out of range."""
    integer = isinstance(x, int | np.integer) and not isinstance(x, bool)
    if not integer or x < least or (most is not None and x > most) or (even and x % 2):
        span = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {'an even' if even else 'an'} integer {span}; got {x!r}.")
    return int(x)


def checked_number(x: Any, name: str, least: float, advice: str) -> float:
    """Return a positive, finite option. Raises if it is not."""
    real = isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)
    if not real or not least <= x < math.inf or x <= 0:
        rule = f"at least {least} and finite" if least else "positive and finite"
        raise ValueError(f"{name} must be {rule}; got {x!r}. Use {advice}.")
    return float(x)
