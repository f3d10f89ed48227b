"""L-BFGS that can be paused, compared with other climbs and resumed.

Parameters come in groups (log scales, weights, coordinates of points) whose curvatures differ by orders of magnitude.
The recursion begins with one scale per group, taken from the last few steps, instead of one for all. That halves the
number of steps.

Several starts climb a few steps each and only the best continues to the top, so the state of a climb is an object. A
step to a point where the objective is not finite (no Cholesky factor, or an overflow) is shortened; it is no error.
"""

import math
from collections import deque
from collections.abc import Callable

import numpy as np

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]

PAIRS = 60  # most remembered pairs of a step and the change of the slope over it
SUFFICIENT = 1e-4  # Armijo's fraction of the predicted gain
SHORTEST_LENGTH = 1e-10
LONGEST_MOVE = 4.0  # units; largest change of a parameter in one step, a factor of 50 in a scale
STALLED = 2  # stop after this many steps in a row that gain too little
FIRST_STEP = 0.5  # units; length of the first step
RECENT = 5  # latest steps, from which the scales of the groups are estimated
APART = 30.0  # largest ratio of a group's scale to the common one


class Climb:
    """Maximises a smooth function from x, step by step.

    For each parameter, `unit` is a typical size of its changes, and `group` is the number of its group.
    """

    def __init__(
        self, objective: Objective, x: np.ndarray, unit: np.ndarray | float = 1.0, group: np.ndarray | None = None
    ) -> None:
        self.objective, self.x, self.unit = objective, x, unit
        self.group = np.zeros(len(x), dtype=np.intp) if group is None else group
        self.value, self.slope = objective(x)
        self.slope = self.slope * unit  # per unit, like all directions and differences
        self.pairs: deque[tuple[np.ndarray, np.ndarray, float]] = deque(maxlen=PAIRS)
        self.steps, self.evaluations, self.small = 0, 1, 0
        self.finished = len(x) == 0 or not math.isfinite(self.value)

    def run(self, steps: int, tol: float) -> "Climb":
        """Take up to `steps` steps, or until `STALLED` of them in a row gain less than `tol`."""
        for _ in range(steps):
            if self.finished:
                break
            self.small = self.small + 1 if self.step() < tol else 0
            self.finished = self.finished or self.small >= STALLED
        return self

    def step(self) -> float:
        """Take one step along the quasi-Newton direction, shortened until F rises enough; return the gain."""
        direction = self.direction()
        rate = float(direction @ self.slope)
        if not rate > 0.0:
            self.pairs.clear()
            direction, rate = self.direction(), float(self.slope @ self.slope)
        length = min(1.0, LONGEST_MOVE / max(float(np.abs(direction).max()), 1e-300))
        while length > SHORTEST_LENGTH:
            x = self.x + length * self.unit * direction
            value, slope = self.objective(x)
            slope = slope * self.unit
            self.evaluations += 1
            if math.isfinite(value) and value >= self.value + SUFFICIENT * length * rate:
                return self.move(x, value, slope)
            length *= shorter(length * rate, value - self.value)
        if not self.pairs:
            self.finished = True
        self.pairs.clear()
        return 0.0

    def move(self, x: np.ndarray, value: float, slope: np.ndarray) -> float:
        s, y = (x - self.x) / self.unit, self.slope - slope
        curvature = float(s @ y)
        if curvature > 1e-10 * float(y @ y):
            self.pairs.append((s, y, 1.0 / curvature))
        gain, self.x, self.value, self.slope = value - self.value, x, value, slope
        self.steps += 1
        return gain

    def direction(self) -> np.ndarray:
        """The two-loop recursion; without pairs, a first step of fixed length along the slope."""
        if not self.pairs:
            return self.slope * min(1.0, FIRST_STEP / max(float(np.linalg.norm(self.slope)), 1e-300))
        d, alphas = self.slope.copy(), []
        for s, y, rho in reversed(self.pairs):
            alphas.append(rho * float(s @ d))
            d -= alphas[-1] * y
        d *= self.scales()[self.group]
        for (s, y, rho), alpha in zip(self.pairs, reversed(alphas), strict=True):
            d += (alpha - rho * float(y @ d)) * s
        return d

    def scales(self) -> np.ndarray:
        """The inverse curvature of each group: sᵀy/yᵀy over its recent steps; where that is negative, ‖s‖/‖y‖."""
        s, y, rho = self.pairs[-1]
        common = 1.0 / (rho * float(y @ y))
        products = np.zeros((3, int(self.group.max()) + 1))
        for s, y, rho in list(self.pairs)[-RECENT:]:
            parts = (s * s, s * y, y * y)
            products += [rho * np.bincount(self.group, part, products.shape[1]) for part in parts]
        ss, sy, yy = products
        with np.errstate(all="ignore"):
            own = np.where(sy > 0.0, sy / yy, np.sqrt(ss / yy))
        own = np.where(np.isfinite(own) & (own > 0.0), own, common)
        return own.clip(common / APART, common * APART)


def shorter(predicted: float, gained: float) -> float:
    """The factor, within [0.1, 0.5], that shortens a step to the top of the interpolating parabola."""
    if not math.isfinite(gained):
        return 0.1
    return min(0.5, max(0.1, 0.5 * predicted / (predicted - gained)))
