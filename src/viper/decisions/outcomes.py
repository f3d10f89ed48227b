"""The kept outcomes of a block of weights, and the Gaussian factors that stand for their likelihoods.

    s(±f)^weight  ~  exp(weight · (shift · f - precision · f² / 2)),        f = w'x

The posterior is the prior times all factors: expectation propagation. Each factor is the one with which the posterior
has the mean and the variance, along x, of the other factors times the likelihood. An outcome that arrives gets its
factor at once, and those of older ones are moved, since theirs were found without it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

TIME, ARM, PROPENSITY, REWARD, WEIGHT, PRECISION, SHIFT = range(7)  # columns of a table
COLUMNS = 7
NEW_FACTOR = 1.0, 0.0, 0.0  # weight, precision and shift of an outcome that was not visited
FIRST_ROOM = 8  # outcomes; then twice as many, again and again


class Played(NamedTuple):
    """One outcome: when it came, of which arm, its propensity and its reward, and the vector it was chosen by."""

    time: int
    arm: int
    propensity: float
    reward: float
    vector: np.ndarray  # features of the arm, context, 1


class Outcomes:
    """A table of outcomes, oldest first: time, arm, propensity, reward, weight, precision, shift; and their vectors."""

    def __init__(self, width: int) -> None:
        self.width, self.count = width, 0
        self.next = 0  # the factor that was not visited for longest
        self._hold(np.zeros((FIRST_ROOM, COLUMNS)), np.zeros((FIRST_ROOM, width)))

    def _hold(self, table: np.ndarray, vectors: np.ndarray) -> None:
        self._table, self._vectors = table, vectors
        self.addresses = vectors.ctypes.data, table.ctypes.data  # asking takes as long as a visit

    @property
    def table(self) -> np.ndarray:
        return self._table[: self.count]

    @property
    def vectors(self) -> np.ndarray:
        return self._vectors[: self.count]

    def append(self, row: Sequence[float] | np.ndarray, vector: np.ndarray) -> None:
        if self.count == len(self._table):
            self._hold(*(np.concatenate([part, np.zeros_like(part)]) for part in (self._table, self._vectors)))
        self._table[self.count], self._vectors[self.count] = row, vector
        self.count += 1

    def drop(self, count: int) -> None:
        """Forget so many of the oldest."""
        for part in (self._table, self._vectors):
            part[: self.count - count] = part[count : self.count].copy()
        self.count -= count
        self.next = max(self.next - count, 0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "addresses"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._hold(self._table, self._vectors)
