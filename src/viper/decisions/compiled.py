"""One decision and what one reward changes, in C: microseconds where the formulas of arms.py take a hundred.

_arms.c is compiled when viper is installed; where it is missing, arms.py does the same.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from viper.decisions.arms import VARIANCES, WEIGHTS
from viper.decisions.outcomes import Outcomes
from viper.softplus.c_library import ADDRESS, COUNT, REAL, SIZE, c_functions

ARMS_MODULE = "viper.decisions._arms"
ARM_FUNCTIONS: dict[str, list[Any]] = {
    "arm_decision_1": [COUNT, REAL, REAL, SIZE, SIZE, ADDRESS, SIZE, *[ADDRESS] * 3, SIZE, *[ADDRESS] * 3],
    "arm_visits_1": [*[SIZE] * 4, REAL, *[SIZE] * 3, *[ADDRESS] * 4, SIZE, *[ADDRESS] * 3],
}
TABLE = len(WEIGHTS), WEIGHTS.ctypes.data, VARIANCES.ctypes.data


class ArmLibrary(NamedTuple):
    """The functions of _arms.c."""

    decision: Callable[..., int]
    visits: Callable[..., int]


@cache
def arm_library() -> ArmLibrary | None:
    """Return the functions of _arms.c, or None if they were not built."""
    functions = c_functions(ARMS_MODULE, ARM_FUNCTIONS)
    return ArmLibrary(*functions) if functions else None


class Addresses:
    """Where the weights of a bandit lie; asking NumPy for an address takes as long as a small decision."""

    def __init__(self, mean: np.ndarray, covariance: np.ndarray) -> None:
        self.size = mean.shape[1]
        self.mean, self.covariance = mean.ctypes.data, covariance.ctypes.data
        self.work = np.empty(2 * self.size)
        self.work_at = self.work.ctypes.data

    def decision(
        self, functions: ArmLibrary, policy: int, spread: float, epsilon: float, x: np.ndarray, block: np.ndarray
    ) -> np.ndarray:
        """Mean and variance of the log-odds, reward, information and chance of every arm, as rows."""
        out = np.empty((5, len(block)))
        failed = functions.decision(
            policy, spread, epsilon, len(block), self.size, x.ctypes.data, self.size if len(x) > 1 else 0,
            self.mean, self.covariance, block.ctypes.data, *TABLE, out.ctypes.data,
        )  # fmt: skip
        if failed:
            raise MemoryError
        return out

    def visits(
        self, functions: ArmLibrary, block: int, kept: Outcomes, own: int, least: int, most: int, calm: float
    ) -> int:
        """Visit the outcomes of a block, as `viper.decisions.arms.visits` does."""
        mean, covariance = self.mean + 8 * block * self.size, self.covariance + 8 * block * self.size**2
        return functions.visits(
            kept.count, kept.next, least, most, calm, self.size, kept.width, own, *kept.addresses,
            mean, covariance, *TABLE, self.work_at,
        )  # fmt: skip
