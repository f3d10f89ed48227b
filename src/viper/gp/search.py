"""The whole search for kernel, mean function and inducing points: starts, race, and what to tell about it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from viper.gp.model import Features, Rows, Sites, SparseGP
from viper.gp.natural_adam import natural_adam
from viper.gp.profile import Profile
from viper.gp.race import LAST_SHARE, Attempt, Report, Start, race
from viper.gp.starts import candidates, greedy
from viper.inference.newton import Iteration
from viper.inference.steps import Gaussian
from viper.softplus.pointwise import Formula

RACE_ROWS = 4_000  # on which the starts of larger fits race
GROWTH = 8  # of the number of rows from stage to stage
FEW_ROWS = 10_000  # up to which tolerances are in nats; beyond, in nats for as many rows
SAMPLE_TOLERANCE = 0.05  # nats
FIRST_TOLERANCE = 0.1  # nats, of the inner maximum at the beginning


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
    progress: Callable[[Iteration], None] | None = None

    def profile(self, model: SparseGP, count: int, place_greedily: bool) -> Found:
        """Climb the profile from `count` starts; those of many rows on a few, the best then on more and on all."""
        sizes = stages(len(self.rows))
        few = self.some(sizes[0])

        def place(start: SparseGP, weight: Tensor) -> Tensor:
            if not place_greedily or len(start.inducing) >= len(few):
                return start.inducing.detach()
            return greedy(start, few.inputs, weight, len(start.inducing))

        tol = self.tolerance(few)
        first = max(FIRST_TOLERANCE, tol) if count > 1 else LAST_SHARE * tol
        report = self.reporter()
        begun = candidates(model, few, count, self.generator, place)
        attempts = [Attempt(start, lambda m: self.on(m, few, first), report) for start in begun]
        best = race(attempts, self.steps, tol)
        if not math.isfinite(best.value):
            Features(best.model, few.take(slice(0, 2)))  # complains if it is the kernel
            raise ValueError("the ELBO must be finite at one start at least; got none. Check kernel and mean.")
        for size in sizes[1:]:
            best = self.onward(best, self.some(size))
            attempts.append(best)
        starts = [x.account() for x in attempts]
        return Found(best.model, starts, best.climb.steps, best.climb.finished, sites=best.profile.found())

    def some(self, size: int) -> Rows:
        return self.rows if size >= len(self.rows) else self.rows.scatter(size, self.generator)

    def on(self, model: SparseGP, rows: Rows, tol: float, start: Gaussian | None = None) -> Profile:
        """The profile of all rows as these rows show it."""
        scale = len(self.rows) / len(rows)
        return Profile(model, rows, self.moments, self.diagonal, scale, tol, start=start)

    def tolerance(self, rows: Rows) -> float:
        """Of a step's gain; what fewer rows than all gain below `SAMPLE_TOLERANCE` is theirs alone."""
        if rows is not self.rows:
            return SAMPLE_TOLERANCE * len(self.rows) / len(rows)
        return self.tol * max(1.0, len(rows) / FEW_ROWS)

    def onward(self, best: Attempt, rows: Rows) -> Attempt:
        """The climb from where fewer rows have led it."""
        model, q = best.model, best.profile.posterior()
        tol = self.tolerance(rows)
        new = best.onward(f"{len(rows):,} rows", lambda _: self.on(model, rows, max(FIRST_TOLERANCE, tol), q))
        new.run(self.steps, tol)
        return new

    def reporter(self) -> Report:
        """Tells `progress` of the steps of L-BFGS: the gain instead of a move of q."""
        began = time.perf_counter()

        def report(rows: int, objective: float, gain: float) -> None:
            if self.progress is not None:
                self.progress(Iteration(rows, True, objective, 1.0, gain, time.perf_counter() - began))

        return report

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


def stages(rows: int) -> list[int]:
    """How many rows are looked at in turn; the last are all."""
    sizes, size = [], RACE_ROWS
    while 2 * size < rows:
        sizes.append(size)
        size *= GROWTH
    return [*sizes, rows]
