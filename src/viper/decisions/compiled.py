"""One decision and what one reward changes, in C: microseconds where the formulas of arms.py take a hundred.

_arms.c is compiled when viper is installed; where it is missing, arms.py does the same.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from viper.decisions.arms import VARIANCES, WEIGHTS, ArmPosterior
from viper.decisions.outcomes import Outcomes
from viper.softplus.c_library import ADDRESS, COUNT, REAL, SIZE, c_functions

ARMS_MODULE = "viper.decisions._arms"
POSTERIOR = [*[SIZE] * 3, *[ADDRESS] * 5]  # width, weights that arms share, own ones; the arrays
ARM_FUNCTIONS: dict[str, list[Any]] = {
    "arm_decision_2": [COUNT, REAL, REAL, SIZE, ADDRESS, ADDRESS, SIZE, *POSTERIOR, SIZE, *[ADDRESS] * 3],
    "arm_visits_2": [*[SIZE] * 4, REAL, *[ADDRESS] * 2, *POSTERIOR, SIZE, *[ADDRESS] * 3],
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

    def __init__(self, posterior: ArmPosterior, width: int) -> None:
        shared, own = len(posterior.mean), posterior.own_mean.shape[1]
        self.posterior = width, shared, own, *(part.ctypes.data for part in posterior)
        self.work = np.empty(2 * shared + own)
        self.work_at = self.work.ctypes.data

    def decision(
        self, functions: ArmLibrary, policy: int, spread: float, epsilon: float, x: np.ndarray, arm: np.ndarray
    ) -> np.ndarray:
        """Mean and variance of the log-odds, reward, information and chance of every arm, as rows."""
        out = np.empty((5, len(arm)))
        failed = functions.decision(
            policy, spread, epsilon, len(arm), arm.ctypes.data, x.ctypes.data, x.shape[1] if len(x) > 1 else 0,
            *self.posterior, *TABLE, out.ctypes.data,
        )  # fmt: skip
        if failed:
            raise MemoryError
        return out

    def visits(self, functions: ArmLibrary, kept: Outcomes, least: int, most: int, calm: float) -> int:
        """Visit outcomes, as `viper.decisions.arms.visits` does."""
        return functions.visits(
            kept.count, kept.next, least, most, calm, *kept.addresses, *self.posterior, *TABLE, self.work_at
        )
