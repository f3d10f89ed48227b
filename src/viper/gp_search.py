"""The whole search for kernel, mean function and inducing points: starts, race, and what to tell about it."""

import math
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from viper.gp_model import Features, Rows, Sites, SparseGP
from viper.gp_natural_adam import natural_adam
from viper.gp_profile import Profile
from viper.gp_race import LAST_TOLERANCE, Attempt, Start, race
from viper.gp_starts import Candidate, candidates, greedy
from viper.moments import Formula
from viper.steps import Gaussian

SUBSET_ROWS = 20_000  # rows on which the starts of larger fits are climbed
FIRST_TOLERANCE = 0.1  # nats, of the inner maximum at the beginning
FULL_STEPS = 30  # on all rows, after the subset has chosen


class Found(NamedTuple):
    """The model found, with its q where the search fixed that too (else sites near it), and an account."""

    model: SparseGP
    starts: list[Start]
    steps: int
    converged: bool
    q: Gaussian | None = None
    sites: Sites | None = None


@dataclass(frozen=True)
class Search:
    """What both ways of searching need to know."""

    rows: Rows
    moments: Formula
    diagonal: bool
    steps: int
    tol: float
    generator: np.random.Generator

    def profile(self, model: SparseGP, count: int, place_greedily: bool) -> Found:
        """Climb the profile from `count` starts; those of many rows on a subset first."""
        few, scale = self.rows, 1.0
        if len(self.rows) > 2 * SUBSET_ROWS:
            few = self.rows.scatter(SUBSET_ROWS, self.generator)
            scale = len(self.rows) / len(few)

        def place(start: SparseGP, weight: Tensor) -> Tensor:
            if not place_greedily or len(start.inducing) >= len(few):
                return start.inducing.detach()
            return greedy(start, few.inputs, weight, len(start.inducing))

        tol = FIRST_TOLERANCE if count > 1 else LAST_TOLERANCE
        begun = candidates(model, few, count, self.generator, place)
        attempts = [
            Attempt(start, lambda m: Profile(m, few, self.moments, self.diagonal, scale, tol)) for start in begun
        ]
        best = race(attempts, self.steps, self.tol)
        if not math.isfinite(best.value):
            Features(best.model, few.take(slice(0, 2)))  # complains if it is the kernel
            raise ValueError("the ELBO must be finite at one start at least; got none. Check kernel and mean.")
        if few is not self.rows:
            again = Candidate("all rows", best.model)
            best = Attempt(again, lambda m: Profile(m, self.rows, self.moments, self.diagonal, tol=1e-4))
            best.run(min(self.steps, FULL_STEPS), self.tol)
            attempts.append(best)
        starts = [x.report() for x in attempts]
        return Found(best.model, starts, best.climb.steps, best.climb.finished, sites=best.profile.found())

    def natural_adam(self, model: SparseGP, learning_rate: float, batch_size: int | None) -> Found:
        """The paper's recipe, from the model as given."""
        began = time.perf_counter()
        q, history, converged = natural_adam(
            model,
            self.rows,
            self.moments,
            diagonal=self.diagonal,
            learning_rate=learning_rate,
            batch_size=batch_size,
            max_iter=self.steps,
            tol=self.tol,
            generator=self.generator,
        )
        start = Start("as given", max(history), len(history), time.perf_counter() - began)
        return Found(model, [start], len(history), converged, q)
