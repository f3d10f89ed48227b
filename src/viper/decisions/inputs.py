"""The inputs of an experiment: ranges, whole numbers and choices, as a user writes them and as a model sees them.

A point has four forms. *Values* are the user's: a row of an array, or of a table with names. *Numbers* are the same,
with a choice as its place in the list. *Units* lie in [0, 1), where candidates are drawn. *Columns* are what a model
takes: each range as [-√3, √3], so that evenly spread points have an sd of 1, and a 0/1 column for each choice.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from viper.errors import instead, shown

if TYPE_CHECKING:
    import pandas

HALF_WIDTH = math.sqrt(3.0)
WORDS = ("integer", "log")
SLACK = 1e-9  # share of a range by which rounding may put a point outside
MOST_POINTS_DRAWN = 1 << 17  # draws after which the search for points that keep the constraints gives up
CANDIDATES = 512
BEST = 5  # candidates around which the search goes on
AROUND = 16  # points around each, in each round
SPREADS = (0.1, 0.03, 0.01)  # sds of the rounds, in units
OTHER_CHOICE = 0.15  # probability of trying another choice


class NumberInput(NamedTuple):
    """Numbers from low to high."""

    low: float
    high: float
    integer: bool = False
    log: bool = False

    @property
    def width(self) -> int:
        return 1

    def ends(self) -> tuple[float, float]:
        """The values at units 0 and 1; whole numbers get equal shares."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.integer and not self.log else (self.low, self.high)
        return (math.log(low), math.log(high)) if self.log else (low, high)

    def numbers(self, unit: np.ndarray) -> np.ndarray:
        low, high = self.ends()
        x = low + (high - low) * unit
        x = np.exp(x) if self.log else x
        return np.clip(np.rint(x) if self.integer else x, self.low, self.high)

    def units(self, number: np.ndarray) -> np.ndarray:
        low, high = self.ends()
        return ((np.log(number) if self.log else number) - low) / (high - low)

    def columns(self, number: np.ndarray) -> np.ndarray:
        return (HALF_WIDTH * (2.0 * self.units(number) - 1.0))[:, None]

    def read(self, value: Any, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number; got {shown(value)}.")
        x, slack = float(value), SLACK * (self.high - self.low)
        if not self.low - slack <= x <= self.high + slack:
            raise ValueError(f"{name} must lie in [{self.low:g}, {self.high:g}]; got {shown(value)}.")
        if self.integer and x != round(x):
            raise ValueError(f"{name} must be a whole number; got {shown(value)}.")
        return min(max(x, self.low), self.high)

    def value(self, number: float) -> Any:
        return round(number) if self.integer else float(number)


class ChoiceInput(NamedTuple):
    """One of several values without an order."""

    values: tuple[Any, ...]

    @property
    def width(self) -> int:
        return len(self.values)

    def numbers(self, unit: np.ndarray) -> np.ndarray:
        return np.clip(np.floor(unit * len(self.values)), 0, len(self.values) - 1)

    def units(self, number: np.ndarray) -> np.ndarray:
        return (number + 0.5) / len(self.values)

    def columns(self, number: np.ndarray) -> np.ndarray:
        return (number[:, None] == np.arange(len(self.values))).astype(float)

    def read(self, value: Any, name: str) -> float:
        value = value.item() if isinstance(value, np.generic) else value
        if value not in self.values:
            raise ValueError(f"{name} must be one of {shown(list(self.values))}; got {shown(value)}.")
        return float(self.values.index(value))

    def value(self, number: float) -> Any:
        return self.values[int(number)]


class Linear(NamedTuple):
    """Σ weights · numbers <= most."""

    weights: tuple[float, ...]
    most: float


Constraint = Linear | Callable[[Any], Any]


class Inputs:
    """All inputs of an experiment, by name or by position, and the constraints on them."""

    def __init__(self, bounds: Any, constraints: Any = ()) -> None:
        self.names = [str(name) for name in bounds] if isinstance(bounds, Mapping) else None
        given = list(bounds.values()) if isinstance(bounds, Mapping) else as_list(bounds)
        if isinstance(bounds, Mapping) and (odd := [name for name in bounds if not isinstance(name, str)]):
            raise TypeError(f"names of inputs must be texts; got {shown(odd[0])}. Write {str(odd[0])!r}.")
        if not given:
            raise ValueError("bounds must have at least one input; got none.")
        self.labels = self.names or [f"x{j}" for j in range(len(given))]
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"inputs must have different names; got {shown(self.labels)}.")
        self.parts = [read_input(one, label) for one, label in zip(given, self.labels, strict=True)]
        if self.names is None and any(isinstance(part, ChoiceInput) for part in self.parts):
            raise ValueError('bounds with choices must name them; got a list. Write {"catalyst": ["a", "b"]}.')
        alone = callable(constraints) or (isinstance(constraints, tuple) and len(constraints) == 2)
        self.constraints = [self.read_constraint(one) for one in ([constraints] if alone else as_list(constraints))]

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def width(self) -> int:
        """How many columns a model takes."""
        return sum(part.width for part in self.parts)

    def read_constraint(self, given: Any) -> Constraint:
        """A function of a point that says whether it is allowed, or (weights, most): Σ weights · x <= most."""
        if callable(given) or isinstance(given, Linear):
            constraint: Constraint = given
            return constraint
        if not isinstance(given, tuple) or len(given) != 2:
            raise TypeError(
                f"a constraint must be a function of a point, or a pair (weights, most); got {shown(given)}."
            )
        weights, most = given
        if isinstance(weights, Mapping):
            if unknown := [name for name in weights if name not in self.labels]:
                hint = instead(str(unknown[0]), self.labels)
                raise ValueError(f"a constraint must name inputs; got {shown(unknown[0])}. {hint}".rstrip())
            weights = [weights.get(label, 0.0) for label in self.labels]
        try:
            numbers = tuple(float(x) for x in weights), float(most)
        except (TypeError, ValueError):
            raise ValueError(f"a constraint's weights must be numbers; got {shown(given)}.") from None
        if len(numbers[0]) != len(self) or not np.isfinite([*numbers[0], numbers[1]]).all():
            raise ValueError(
                f"a constraint must have {len(self)} finite weights and a finite bound; got {shown(given)}."
            )
        used = [part for part, weight in zip(self.parts, numbers[0], strict=True) if weight]
        if any(isinstance(part, ChoiceInput) for part in used):
            raise ValueError("a linear constraint must be about numbers; got a choice. Pass a function of a point.")
        return Linear(*numbers)

    # --- from one form to another ---

    def numbers(self, units: np.ndarray) -> np.ndarray:
        return np.column_stack([part.numbers(units[:, j]) for j, part in enumerate(self.parts)])

    def units(self, numbers: np.ndarray) -> np.ndarray:
        return np.column_stack([part.units(numbers[:, j]) for j, part in enumerate(self.parts)])

    def columns(self, numbers: np.ndarray) -> np.ndarray:
        if not len(numbers):
            return np.zeros((0, self.width))
        return np.column_stack([part.columns(numbers[:, j]) for j, part in enumerate(self.parts)])

    def point(self, numbers: np.ndarray) -> Any:
        """One point as a user's function takes it: a dictionary, or an array if inputs have no names."""
        if self.names is None:
            return numbers.copy()
        values = [part.value(x) for part, x in zip(self.parts, numbers, strict=True)]
        return dict(zip(self.names, values, strict=True))

    def values(self, numbers: np.ndarray) -> "np.ndarray | pandas.DataFrame":
        """Points as users get them: a table, or an array if inputs have no names."""
        if self.names is None:
            return numbers.copy()
        import pandas as pd

        return pd.DataFrame([self.point(row) for row in numbers], columns=self.names)

    def read(self, x: Any) -> np.ndarray:
        """Points given as a table, a dictionary, a list of dictionaries or an array, as numbers; checked."""
        rows = self.rows_of(x)
        found = np.empty((len(rows), len(self)))
        for i, row in enumerate(rows):
            if len(row) != len(self):
                raise ValueError(f"a point must have {len(self)} inputs, {shown(self.labels)}; got {len(row)}.")
            for j, (part, value) in enumerate(zip(self.parts, row, strict=True)):
                found[i, j] = part.read(value, self.labels[j])
        return found

    def rows_of(self, x: Any) -> list[Sequence[Any]]:
        if hasattr(x, "to_dict"):
            x = x.to_dict("records") if hasattr(x, "columns") else x.to_dict()
        if isinstance(x, Mapping):
            x = [x]
        if isinstance(x, np.ndarray | torch.Tensor):
            x = np.asarray(x)
            x = x[None] if x.ndim == 1 else x
        if not isinstance(x, Sequence | np.ndarray) or isinstance(x, str):
            raise TypeError(f"points must be a table, an array or dictionaries; got {type(x).__name__}.")
        rows = list(x)
        if rows and not isinstance(rows[0], Mapping | Sequence | np.ndarray):
            rows = [rows]  # one point
        return [self.in_order(row) if isinstance(row, Mapping) else list(row) for row in rows]

    def in_order(self, row: Mapping[Any, Any]) -> list[Any]:
        if missing := [label for label in self.labels if label not in row]:
            raise ValueError(f"a point must have a value for every input; got none for {shown(missing[0])}.")
        if strange := [name for name in row if name not in self.labels]:
            hint = instead(str(strange[0]), self.labels)
            raise ValueError(f"a point must have no other values than inputs; got {shown(strange[0])}. {hint}".rstrip())
        return [row[label] for label in self.labels]

    # --- points to ask for ---

    def allowed(self, numbers: np.ndarray) -> np.ndarray:
        """Which points keep all constraints."""
        kept = np.ones(len(numbers), dtype=bool)
        for constraint in self.constraints:
            if isinstance(constraint, Linear):
                kept &= numbers @ np.array(constraint.weights) <= constraint.most * (1.0 + 1e-12) + 1e-12
            else:
                kept &= np.array([bool(constraint(self.point(row))) for row in numbers], dtype=bool)
        return kept

    def spread(self, count: int, seed: int) -> np.ndarray:
        """The first `count` allowed points of a scrambled Sobol sequence."""
        engine = torch.quasirandom.SobolEngine(len(self), scramble=True, seed=seed)
        found: list[np.ndarray] = []
        drawn, size = 0, max(64, count)
        while sum(map(len, found)) < count and drawn < MOST_POINTS_DRAWN:
            numbers = self.numbers(engine.draw(size, dtype=torch.float64).numpy())
            found.append(numbers[self.allowed(numbers)] if self.constraints else numbers)
            drawn += size
            size = min(4 * size, MOST_POINTS_DRAWN - drawn) or 1
        points = np.concatenate(found)[:count]
        if not len(points):
            raise ValueError(f"constraints must leave points to ask for; got none among {drawn:,}. Loosen them.")
        return points

    def around(self, centres: np.ndarray, sd: float, generator: np.random.Generator) -> np.ndarray:
        """Allowed points near others."""
        units = np.repeat(self.units(centres), AROUND, axis=0)
        step = sd * generator.standard_normal(units.shape)
        other = generator.random(units.shape)
        for j, part in enumerate(self.parts):
            if isinstance(part, ChoiceInput):
                step[:, j] = 0.0
                change = generator.random(len(units)) < OTHER_CHOICE
                units[change, j] = other[change, j]
            elif part.integer:
                low, high = part.ends()
                step[:, j] *= max(1.0, 1.0 / (sd * (high - low)))  # or it would never reach the next number
        numbers = self.numbers(np.clip(units + step, 0.0, 1.0))
        return numbers[self.allowed(numbers)] if self.constraints else numbers

    def best(
        self, worth: Callable[[np.ndarray], np.ndarray], seed: int, known: np.ndarray | None = None
    ) -> tuple[np.ndarray, float]:
        """The allowed point that is worth most, and its worth: the best of many, then of those around the best."""
        points = self.spread(CANDIDATES, seed)
        if known is not None and len(known):
            points = np.concatenate([points, known])
        generator = np.random.default_rng(seed)
        values = worth(points)
        for sd in SPREADS:
            top = points[np.argsort(-values, kind="stable")[:BEST]]
            more = self.around(top, sd, generator)
            if len(more):
                points, values = np.concatenate([points, more]), np.concatenate([values, worth(more)])
        i = int(np.argmax(values))
        return points[i], float(values[i])


def as_list(given: Any) -> list[Any]:
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        raise TypeError(f"bounds and constraints must be lists or dictionaries; got {shown(given)}.")
    return list(given)


def read_input(given: Any, name: str) -> NumberInput | ChoiceInput:
    """(low, high), (low, high, "integer"), (low, high, "log"), or a list of choices."""
    if isinstance(given, NumberInput | ChoiceInput):
        return given
    if isinstance(given, list) and not (len(given) == 2 and all(is_real(x) for x in given)):
        values = tuple(x.item() if isinstance(x, np.generic) else x for x in given)
        if len(values) < 2 or len(set(values)) < len(values):
            raise ValueError(f"choices of {name} must be two or more, all different; got {shown(given)}.")
        if not all(isinstance(x, str) or (isinstance(x, Real) and math.isfinite(x)) for x in values):
            raise TypeError(f"choices of {name} must be texts or finite numbers; got {shown(given)}.")
        return ChoiceInput(values)
    if not isinstance(given, tuple | list | np.ndarray) or len(given) < 2 or not all(map(is_real, given[:2])):
        raise TypeError(f"bounds of {name} must be (low, high) or a list of choices; got {shown(given)}.")
    low, high = float(given[0]), float(given[1])
    words = list(given[2:])
    if wrong := [word for word in words if word not in WORDS]:
        raise ValueError(f"bounds of {name} may end with {list(WORDS)}; got {shown(wrong[0])}.")
    if not (low < high and math.isfinite(low) and math.isfinite(high - low)):
        raise ValueError(f"bounds of {name} must be finite, the lower first; got ({low:g}, {high:g}).")
    if "log" in words and low <= 0.0:
        raise ValueError(f"bounds of {name} must be positive for a log scale; got ({low:g}, {high:g}).")
    if "integer" in words and (low != round(low) or high != round(high)):
        raise ValueError(f"bounds of {name} must be whole numbers; got ({low:g}, {high:g}).")
    return NumberInput(low, high, "integer" in words, "log" in words)


def is_real(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)
