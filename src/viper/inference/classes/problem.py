"""The optimisation problem of K classes: maximise F(q) = Σ_i c_i (ϑ_{i,y_i} - η(ϑ_i, τ_i²)) - KL(q ‖ p) over stars."""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.inference.classes.star import (
    Star,
    StarPrior,
    centred_classes,
    solve_precisions,
    star_divergence,
    star_from,
    star_prior,
)
from viper.inference.classes.sums import (
    ClassFormula,
    ClassSums,
    RowHessian,
    class_predictors,
    class_rows,
    class_sums,
    hessian_product,
    row_hessians,
    shared_hessian,
    softmax_classes,
)
from viper.inference.kernels.compiled import MOST_COMPILED
from viper.inference.memory import machine_memory
from viper.inference.problem import LARGEST_SOLVED, Prior
from viper.inference.rows import Gram, RowSource, add_up

# Products with the Hessian before a matrix replaces them; a matrix that costs more than 50 products is never computed.
FEWEST_PRODUCTS, MOST_PRODUCTS_OF_MATRIX = 10, 50
COPY_SHARE = 0.1  # share of the machine's memory that X in float32 may take
HESSIAN_ENTRIES = 1 << 23  # entries of the rows sampled from a source elsewhere, to estimate the Hessian of all rows


class Evaluated(NamedTuple):
    """F at a star, with the sums and Hessians for a step from there."""

    objective: float
    sums: ClassSums
    hessians: list[RowHessian] | None  # of the rows `ClassProblem.near`, if the pass computed them


@dataclass(frozen=True)
class ClassProblem:
    """Rows with K classes and a prior: a Gaussian for each class, with common or (K, d) means, or a star."""

    source: RowSource
    classes: int
    prior: Prior | Star
    diagonal: bool = False
    scale: float = 1.0  # number of rows of the whole problem per row of `source`

    @cached_property
    def contrasts(self) -> StarPrior:
        """The prior of the contrasts."""
        return star_prior(self.prior, self.classes)

    @cached_property
    def here(self) -> bool:
        """Whether the rows are in this process, so that numbers can be kept for each row."""
        return self.source.traits.where == "memory" and self.source.device.type == "cpu"

    @cached_property
    def near(self) -> tuple[RowSource, float]:
        """The rows for products with the Hessian, all or a sample, and the factor by which their sums are scaled up."""
        if self.source.traits.where == "memory":
            return self.source, self.scale
        rows, most = self.source.rows, HESSIAN_ENTRIES // self.source.dimension
        near = self.source if rows <= most else self.source.sample(most, np.random.default_rng(0))
        return near.in_memory(), self.scale * rows / near.rows

    def in_float32(self) -> "ClassProblem":
        """Return the problem with X in float32 if products of large matrices dominate a pass; otherwise unchanged."""
        rows, d = self.source.rows, self.source.dimension
        fits = self.here and 4 * rows * d <= COPY_SHARE * machine_memory()
        if d <= MOST_COMPILED or self.diagonal or self.source.traits.sparse or not fits:
            return self
        arrays = self.source.in_memory()
        light: list[Any] = [block.design.single() for block in arrays.blocks()]
        X = torch.cat([design.matrix for design in light])
        return replace(self, source=replace(arrays, features=X, dtype=torch.float32))

    def given_variances(self, q: Star) -> "ClassProblem":
        """Return the problem with each row's τ² fixed at its value under q, so that only the means are unknown."""
        parts = self.source.map(partial(class_predictors, mean=q.mean, factor=q.factor))
        tau2: list[Any] = [part[1] for part in parts]
        return replace(self, source=replace(self.source.in_memory(), residual=torch.cat(tau2)))

    def total(
        self, mean: Tensor, factor: Tensor | None, moments: ClassFormula, gram: Gram, shared: bool = False
    ) -> tuple[ClassSums, list[RowHessian] | None]:
        """The sums over rows at a star, and for rows in this process their Hessians."""
        at: Any = {"mean": mean, "factor": factor, "moments": moments, "gram": gram, "shared": shared}
        if self.here:
            parts = list(self.source.map(partial(class_rows, **at)))
            sums, hessians = add_up(part[0] for part in parts), [part[1] for part in parts]
        else:
            sums, hessians = self.source.reduce(partial(class_sums, **at)), None
        value, magnitude, weight, gradient, curvature = [x * self.scale for x in sums] if self.scale != 1.0 else sums
        return ClassSums(float(value), float(magnitude), float(weight), gradient, curvature), hessians

    def evaluate(self, q: Star, moments: ClassFormula, gram: bool = True) -> Evaluated:
        """F at q."""
        sums, hessians = self.total(q.mean, q.factor, moments, self.kind(gram), len(q.precision) == 1)
        return Evaluated(sums.value - star_divergence(q, self.contrasts), sums, hessians)

    def kind(self, gram: bool) -> Gram:
        """How much of the curvature a pass adds up."""
        return ("diagonal" if self.diagonal else "full") if gram else "none"

    def log_joint(self, mean: Tensor, gram: bool, moments: ClassFormula = softmax_classes) -> Evaluated:
        """log p(y | μ) + log p(μ), up to a constant; other `moments` give E log p(y | f) with the τ² of the rows."""
        sums, hessians = self.total(mean, None, moments, self.kind(gram), True)
        return Evaluated(sums.value - 0.5 * self.contrasts.distance(mean), sums, hessians)

    def hessians(self, mean: Tensor, factor: Tensor | None, moments: ClassFormula) -> list[RowHessian]:
        """The Hessians of the rows `near`."""
        at: Any = {"mean": mean, "factor": factor, "moments": moments}
        return list(self.near[0].map(partial(row_hessians, **at)))

    def hessian_times(self, hessians: list[RowHessian], vectors: Tensor) -> Tensor:
        """(Aᵀ H A + D⁻¹) v for v (K, d), centred."""
        rows, scale = self.near
        return scale * hessian_product(rows, hessians, vectors) + self.contrasts.times(vectors)

    @property
    def products_before_matrix(self) -> int | None:
        """How many products with the Hessian cost as much as `shared_metric`, or None if that does not pay."""
        rows, d = self.source.rows, self.source.dimension
        price = d * (1.0 + d / (3.0 * rows)) / (8.0 * self.classes)
        small = d <= LARGEST_SOLVED and not self.source.traits.sparse
        worth = self.diagonal and small and price < MOST_PRODUCTS_OF_MATRIX
        return max(math.ceil(price), FEWEST_PRODUCTS) if worth else None

    def shared_metric(self, hessians: list[RowHessian]) -> Star | None:
        """A star with one precision for all classes: the mean of the Hessian's diagonal blocks."""
        rows, scale = self.near
        gram, own = scale * shared_hessian(rows, hessians), self.contrasts.curvature(True).mean(0)
        return star_from(torch.zeros_like(self.contrasts.mean), (gram.to(own) + own.diag())[None])

    def precisions(self, gram: Tensor, start: Tensor) -> Tensor:
        """The optimal P_k for curvatures G_k, iterated from `start`; for their sum, a single precision."""
        target = self.target(gram)
        return target / (self.classes - 1) if len(gram) == 1 else solve_precisions(target, start)

    def target(self, gram: Tensor) -> Tensor:
        """A_k, the curvature of the prior plus G_k, or its sum over classes."""
        own = self.contrasts.curvature(self.diagonal)
        if len(gram) == 1:
            own = own.sum(0, keepdim=True) * (self.classes // len(own))
        return own + gram

    def gradient(self, mean: Tensor, sums: ClassSums) -> Tensor:
        """∂F/∂μ_k, whose sum over classes is zero."""
        return centred_classes(sums.gradient) - self.contrasts.times(mean - self.contrasts.mean)

    def coarsened(self, k: int, generator: np.random.Generator) -> "ClassProblem":
        """Return the same problem on about k random rows."""
        sample = self.source.sample(k, generator)
        return replace(self, source=sample, scale=self.scale * self.source.rows / sample.rows)
