"""The search for the kernel that all classes share: the same race and climbs, on the profile of K classes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from viper.gp.classes.profile import ClassProfile
from viper.gp.model import Observations, SparseGP
from viper.gp.search import Search
from viper.gp.starts import AS_GIVEN, Candidate, learns_lengthscale

OTHER_LENGTHS = (0.5, 2.0)  # further starts, as multiples of √p
LEAST_TOLERANCE = 1e-4  # nats; least tolerance of the inner problem, whose integrals are rough


@dataclass(frozen=True)
class ClassSearch(Search):
    """A search for K classes."""

    classes: int = 0

    def profile_on(self, model: SparseGP, rows: Observations, tol: float, start: Any = None) -> ClassProfile:
        """The profile of all rows, estimated from `rows`."""
        scale = len(self.rows) / len(rows)
        return ClassProfile(model, rows, self.classes, self.diagonal, scale, max(tol, LEAST_TOLERANCE))

    def nearby(self, rows: Observations, dimension: int) -> Observations:
        """The rows where they are; small problems are on the CPU from the start (fitting.py)."""
        return rows

    def candidates(self, model: SparseGP, rows: Observations, count: int) -> Iterator[Candidate]:
        """The model as given, then with other lengthscales."""
        yield Candidate(AS_GIVEN, model.copy())
        root = math.sqrt(rows.inputs.shape[1])
        for factor in OTHER_LENGTHS[: count - 1]:
            other = model.copy()
            changed = [module for module in other.kernel.modules() if learns_lengthscale(module)]
            for module in changed:
                module.initialize(lengthscale=torch.full_like(module.lengthscale, factor * root))
            if changed:
                yield Candidate(f"lengthscale {factor:g}√p", other)

    def information(self, model: SparseGP, rows: Observations) -> Tensor:
        """c Σ_k p_k(1 - p_k) of each row, where p are the shares of the classes."""
        weight = torch.ones_like(rows.label) if rows.weight is None else rows.weight
        shares = torch.bincount(rows.label.long(), weight, self.classes) / weight.sum()
        return weight * (shares * (1.0 - shares)).sum()
