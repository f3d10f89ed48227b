"""One decision and one step in C: microseconds where the formulas of arms.py take a hundred.

_arms.c is compiled when viper is installed; where it is missing, arms.py does the same.
"""

import ctypes
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from viper.decisions.arms import VARIANCES, WEIGHTS
from viper.softplus.compiled_classes import LENGTH, POINTER

DECISION, OUTCOME = "arm_decision_1", "arm_step_1"  # renamed when the arguments change
TABLE = len(WEIGHTS), WEIGHTS.ctypes.data, VARIANCES.ctypes.data


@cache
def arm_library() -> Any:
    """Return the functions of _arms.c, or None if they were not built."""
    built = find_spec("viper.decisions._arms")
    if built is None or built.origin is None:
        return None
    try:
        library = ctypes.CDLL(built.origin)
        decision, step = getattr(library, DECISION), getattr(library, OUTCOME)
    except (OSError, AttributeError):
        return None
    decision.argtypes = [
        ctypes.c_int,
        ctypes.c_double,
        ctypes.c_double,
        LENGTH,
        LENGTH,
        POINTER,
        LENGTH,
        *[POINTER] * 3,
        LENGTH,
    ]
    decision.argtypes += [POINTER] * 3
    step.argtypes = [LENGTH, POINTER, ctypes.c_double, POINTER, POINTER, LENGTH, *[POINTER] * 3]
    step.restype = None
    return library


class Addresses:
    """Where the weights of a bandit lie; asking NumPy for an address takes as long as a small decision."""

    def __init__(self, mean: np.ndarray, covariance: np.ndarray) -> None:
        self.size = mean.shape[1]
        self.mean, self.covariance = mean.ctypes.data, covariance.ctypes.data
        self.work = np.empty(self.size)
        self.work_at = self.work.ctypes.data

    def decision(self, policy: int, spread: float, epsilon: float, x: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Mean and variance of the log-odds, reward, information and chance of every arm, as rows."""
        out = np.empty((5, len(block)))
        failed = arm_library().arm_decision_1(
            policy, spread, epsilon, len(block), self.size, x.ctypes.data, self.size if len(x) > 1 else 0,
            self.mean, self.covariance, block.ctypes.data, *TABLE, out.ctypes.data,
        )  # fmt: skip
        if failed:
            raise MemoryError
        return out

    def step(self, x: np.ndarray, reward: float, block: int) -> None:
        """Change the weights of a block by one outcome."""
        mean, covariance = self.mean + 8 * block * self.size, self.covariance + 8 * block * self.size**2
        arm_library().arm_step_1(self.size, x.ctypes.data, reward, mean, covariance, *TABLE, self.work_at)
