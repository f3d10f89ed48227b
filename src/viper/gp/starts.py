"""Where to begin.

The profile has many local optima: the mean function may take all the signal, or the kernel may act on one group of
columns and miss another. So the best few groups of columns that a screen finds and that do not repeat each other are
starts, beside plain ones over lengthscales.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpytorch.means import ConstantMean, LinearMean
from torch import Tensor

from viper.gp.kernels import covariance, stationary_shape, variances
from viper.gp.model import Rows, SparseGP
from viper.gp.screen import Screen, best_mean, distinct, mean_columns

SCREEN_ROWS = 2000
SCREEN_POINTS = 60
LONG = 10.0  # lengthscale of a column outside the group: its effect is all but linear
FACTORS = (0.5, 2.0, 1.0, 0.25, 4.0)  # of √p, the plain lengthscales


@dataclass
class Candidate:
    """A model to climb from; `mean_last` keeps the mean function fixed at first."""

    name: str
    model: SparseGP
    mean_last: bool = False


Place = Callable[[SparseGP, Tensor], Tensor]  # where a start's inducing points begin, given the weights of the rows


def candidates(
    model: SparseGP, rows: Rows, count: int, generator: np.random.Generator, place: Place
) -> Iterator[Candidate]:
    """Up to `count` models to climb from: what the screen finds, then plain starts over lengthscales."""
    coefficients, weight = null_model(model, rows)
    if count == 1 or not model.free:
        yield placed(Candidate("as given", model), weight, place)
        return
    screened = 0
    if can_screen(model):
        for candidate in screened_models(model, rows, max(1, count - 2), generator):
            set_mean(candidate.model.mean, coefficients)
            screened += 1
            yield placed(candidate, weight, place)
    yield placed(Candidate("as given", copy.deepcopy(model), mean_last=True), weight, place)
    if not any(learns_lengthscale(module) for module in model.kernel.modules()):
        return
    root = math.sqrt(rows.inputs.shape[1])
    for factor in FACTORS[: max(0, count - screened - 1)]:
        other = copy.deepcopy(model)
        for module in other.kernel.modules():
            if learns_lengthscale(module):
                module.initialize(lengthscale=torch.full_like(module.lengthscale, factor * root))
        yield placed(Candidate(f"lengthscale {factor:g}√p", other), weight, place)


def learns_lengthscale(module: Any) -> bool:
    return getattr(module, "has_lengthscale", False) and module.raw_lengthscale.requires_grad


def can_screen(model: SparseGP) -> bool:
    kernel = model.kernel
    if stationary_shape(kernel) is None:
        return False
    return learns_lengthscale(kernel.base_kernel) and bool(kernel.raw_outputscale.requires_grad)


def null_model(model: SparseGP, rows: Rows) -> tuple[Tensor, Tensor]:
    """The mean function alone: its best coefficients, and each row's information c s(1-s) there."""
    basis = mean_columns(model.mean, rows.inputs)
    coefficients, s = best_mean(basis, rows)
    information = s * (1.0 - s)
    return coefficients, information if rows.weight is None else rows.weight * information


def placed(candidate: Candidate, weight: Tensor, place: Place) -> Candidate:
    model = candidate.model
    with torch.no_grad():
        model.inducing.copy_(place(model, weight))
    return candidate


def screened_models(model: SparseGP, rows: Rows, count: int, generator: np.random.Generator) -> Iterator[Candidate]:
    shape = stationary_shape(model.kernel)
    assert shape is not None
    few = rows if len(rows) <= SCREEN_ROWS else rows.scatter(SCREEN_ROWS, generator)
    _, information = null_model(model, few)
    points = greedy(model, few.inputs, information, min(SCREEN_POINTS, len(few)))
    for group in distinct(Screen(few, points, model.mean, shape).groups(), count):
        other = copy.deepcopy(model)
        length = torch.full_like(other.kernel.base_kernel.lengthscale, LONG)
        own = group.length * math.sqrt(len(group.columns))
        length[0, list(group.columns) if length.numel() > 1 else 0] = own
        other.kernel.base_kernel.initialize(lengthscale=length)
        other.kernel.initialize(outputscale=torch.full_like(other.kernel.outputscale, group.scale))
        name = "all" if len(group.columns) == rows.inputs.shape[1] else ", ".join(map(str, group.columns))
        yield Candidate(f"columns {name}", other)


def set_mean(mean: Any, coefficients: Tensor) -> None:
    if type(mean) is LinearMean and mean.weights.requires_grad:
        mean.initialize(weights=coefficients[:-1, None], bias=coefficients[-1:])
    elif type(mean) is ConstantMean and mean.raw_constant.requires_grad:
        mean.initialize(constant=coefficients[0])


def greedy(model: SparseGP, inputs: Tensor, weight: Tensor, count: int) -> Tensor:
    """Rows chosen one by one where the information times the variance not yet explained is largest.

    Pivoted Cholesky decomposition of H^{1/2} K H^{1/2}.
    """
    root = weight.clamp(min=1e-12).sqrt()
    with torch.no_grad():
        column_of = columns(model.kernel, inputs)
        left = variances(model.kernel, inputs) * weight
        known = inputs.new_zeros(len(inputs), count)
        chosen: list[int] = []
        for k in range(count):
            i = int(left.argmax())
            chosen.append(i)
            column = column_of(i) * root * root[i]
            known[:, k] = (column - known[:, :k] @ known[i, :k]) / left[i].clamp(min=1e-12).sqrt()
            left = (left - known[:, k].square()).clamp_(min=0.0)
            left[i] = -1.0
    return inputs[chosen]


def columns(kernel: Any, inputs: Tensor) -> Callable[[int], Tensor]:
    """i -> column i of K_xx."""
    shape = stationary_shape(kernel)
    if shape is None:
        return lambda i: covariance(kernel, inputs, inputs[i : i + 1])[:, 0]
    u, scale = inputs / kernel.base_kernel.lengthscale, kernel.outputscale
    return lambda i: scale * shape((u - u[i]).square_().sum(1))[0]
