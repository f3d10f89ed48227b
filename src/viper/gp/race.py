"""Which beginnings to follow to the end: all climb a little, the lower are dropped again and again, one climbs on."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from viper.gp.kernels import stationary_shape
from viper.gp.lbfgs import Climb
from viper.gp.model import SparseGP, expand, flatten
from viper.gp.profile import Profile
from viper.gp.starts import Candidate

MEAN_LAST_STEPS = 6
ROUND = 5  # steps
MOST_LEFT = {10: 2, 20: 1}  # by steps done, how many starts stay at most
HOPE = 2.0  # a start goes if even this many times its last round's gain would not bring it to the best
MET = 0.7  # largest difference of parameters (log scales) of kernels that count as the same: a factor of two
UNITS = (0.05, 20.0)  # in which lengthscales are units of the inducing points
LAST_SHARE = 0.01  # of the tolerance of a step's gain, for the inner maximum at the end
INNER_SHARE = 0.1  # of a step's gain, which the inner maximum may miss


Report = Callable[[int, float, float], None]  # rows, objective, gain of a step


def silent(rows: int, objective: float, gain: float) -> None:
    pass


class Start(NamedTuple):
    """One start: what it was, the objective it reached, and what it cost.

    The objective is the profile of the ELBO as the search sees it (accurate to 1e-6 per row), plus the log prior of
    hyperparameters where there are any.
    """

    start: str
    elbo: float
    evaluations: int
    seconds: float


def units(model: SparseGP) -> np.ndarray:
    """What counts as a change of one in each free parameter: for an inducing point, one lengthscale."""
    scaled = stationary_shape(model.kernel) is not None
    length = model.kernel.base_kernel.lengthscale.detach().cpu().numpy().clip(*UNITS) if scaled else 1.0
    parts = [np.ones(x.shape) * (length if x is model.inducing else 1.0) for x in model.free]
    return np.concatenate([part.reshape(-1) for part in parts]) if parts else np.zeros(0)


def groups(model: SparseGP) -> np.ndarray:
    """Free parameters of like curvature by number: each tensor is a group, each column of the inducing points one."""
    parts: list[np.ndarray] = []
    for x in model.free:
        first = parts[-1].max() + 1 if parts else 0
        own = np.arange(x.shape[1]) if x is model.inducing else np.zeros(1, dtype=np.intp)
        parts.append(np.broadcast_to(first + own, x.shape or (1,)).reshape(-1))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.intp)


class Attempt:
    """One start on its way up; `report` hears of every step."""

    def __init__(self, candidate: Candidate, profile: Callable[[SparseGP], Profile], report: Report = silent) -> None:
        began = time.perf_counter()
        self.candidate, self.profile, self.report = candidate, profile(candidate.model), report
        self.spent = 0
        model = candidate.model
        held = [x for x in model.mean.parameters() if x.requires_grad] if candidate.mean_last else []
        if held:
            for parameter in held:
                parameter.requires_grad_(False)
            first = self.begin().run(MEAN_LAST_STEPS, 1e-2)
            self.spent = first.evaluations
            expand(model, first.x)
            for parameter in held:
                parameter.requires_grad_(True)
        self.climb = self.begin()
        self.seconds = time.perf_counter() - began

    def begin(self) -> Climb:
        model = self.candidate.model
        return Climb(self.profile, flatten(model), units(model), groups(model))

    def run(self, steps: int, tol: float) -> None:
        """Up to `steps` more steps; the inner maximum is found the better, the less the last step gained."""
        began = time.perf_counter()
        for _ in range(steps):
            if self.climb.finished:
                break
            before = self.climb.value
            self.climb.run(1, tol)
            gain = self.climb.value - before
            self.profile.tol = min(self.profile.tol, max(LAST_SHARE * tol, INNER_SHARE * gain))
            self.report(len(self.profile.rows), self.climb.value, gain)
        self.seconds += time.perf_counter() - began

    @property
    def value(self) -> float:
        return self.climb.value

    @property
    def model(self) -> SparseGP:
        """The model at the best θ found."""
        expand(self.candidate.model, self.climb.x)
        return self.candidate.model

    def onward(self, name: str, profile: Callable[[SparseGP], Profile]) -> "Attempt":
        """From here on other rows of the same distribution, whose objective is curved alike."""
        new = Attempt(Candidate(name, self.model), profile, self.report)
        new.climb.pairs.extend(self.climb.pairs)
        return new

    def account(self) -> Start:
        return Start(self.candidate.name, self.value, self.spent + self.climb.evaluations, self.seconds)


def race(attempts: list[Attempt], steps: int, tol: float) -> Attempt:
    """Climb all a little, the better ones further, the best to the top; `steps` bounds the steps of each."""
    still = attempts
    done = 0
    while len(still) > 1 and done < min(steps, max(MOST_LEFT)):
        before = [attempt.value for attempt in still]
        for attempt in still:
            attempt.run(min(ROUND, steps - done), tol)
        done += ROUND
        best = max(attempt.value for attempt in still)
        hoped = [attempt.value + HOPE * (attempt.value - value) for attempt, value in zip(still, before, strict=True)]
        still = [attempt for attempt, hope in zip(still, hoped, strict=True) if hope >= best]
        still = apart(sorted(still, key=lambda attempt: -attempt.value))[: MOST_LEFT.get(done)]
    winner = max(still, key=lambda attempt: attempt.value)
    winner.run(max(0, steps - winner.climb.steps), tol)
    return winner


def apart(attempts: list[Attempt]) -> list[Attempt]:
    """The attempts without any whose kernel has become that of a better one: they have met."""
    kept: list[Attempt] = []
    scales: list[np.ndarray] = []
    for attempt in attempts:
        kernel = [x.detach().cpu().numpy().reshape(-1) for x in attempt.model.kernel.parameters() if x.requires_grad]
        mine = np.concatenate([*kernel, np.zeros(0)])
        if not len(mine) or all(np.abs(mine - other).max() > MET for other in scales):
            kept.append(attempt)
            scales.append(mine)
    return kept
