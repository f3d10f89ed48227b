"""What the weights of rows mean: counts of equal rows, and weights of the two classes.

A weight c counts a row c times, in the coefficients and in how certain they are. Class weights w₀, w₁ multiply the
weights of the rows of each class. To first order they add log(w₁/w₀) to all log-odds, as if the classes had other
shares; `prevalence_offset` takes that back.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.data.schema import ABOVE_ZERO, WHOLE, Fields, Items, between
from viper.errors import WeightWarning, instead, users_line
from viper.inference.rows import Arrays, Block, Mapped, RowFunction, RowSource, SourceWrapper
from viper.inference.threads import one_thread

WEIGHTING = "weighting"  # its name in a file
WEIGHTING_FIELDS = Fields(
    {},
    {
        "class_weight": Items(ABOVE_ZERO, 2),
        "class_share": between(0.0, 1.0),
        "robust_groups": WHOLE,
        "mean_weight": ABOVE_ZERO,
    },
)
APART = 0.01  # share by which fractional weights may differ from one on average, without a note


class ClassWeightMixin:
    """Estimators with an option `class_weight`."""

    class_weight: Any
    classes_: np.ndarray
    class_weight_: np.ndarray
    class_share_: float
    robust_groups_: int
    mean_weight_: float  # of the rows, without class weights: as how many equal rows one counts; NaN if not known

    def _weighted_rows(self, source: RowSource) -> RowSource:
        """Return the rows with the weights of their classes, which are learned."""
        note_fractional_weights(source)
        given = self.class_weight is not None
        mass = class_mass(source) if given or source.traits.where == "memory" else np.full(2, math.nan)
        self.mean_weight_ = float(mass.sum() / source.rows)
        self.class_weight_ = read_class_weight(self.class_weight, self.classes_, mass)
        weighed = self.class_weight_ * mass
        self.class_share_ = float(weighed[1] / weighed.sum())
        return self._known_weights(source)

    def _known_weights(self, source: RowSource) -> RowSource:
        """Return rows with the weights that the fit gave to their classes."""
        weights = getattr(self, "class_weight_", np.ones(2))
        return source if bool((weights == 1.0).all()) else reweighted(source, float(weights[0]), float(weights[1]))

    def prevalence_offset(self, prevalence: float | None = None) -> float:
        """Return the `offset` with which predictions refer to classes with their true shares.

        Without `prevalence`, log(w₀/w₁): it takes back what class weights added to the log-odds. With it, the log-odds
        of the prevalence less those of the second class among the rows of the fit, counted by their weights: for rows
        that were sampled by class, as in a case-control study. Pass it to any `predict` method:
        ``model.predict_proba(X, offset=model.prevalence_offset(0.02))``.

        Parameters
        ----------
        prevalence : float in (0, 1), optional
            Share of the second class where the model is applied.
        """
        weights = getattr(self, "class_weight_", np.ones(2))
        if prevalence is None:
            return float(np.log(weights[0] / weights[1]))
        if not 0.0 < prevalence < 1.0:
            raise ValueError(f"prevalence must lie strictly between 0 and 1; got {prevalence!r}. Use 0.02 for 2 %.")
        share = getattr(self, "class_share_", math.nan)
        if math.isnan(share):
            raise ValueError(
                "prevalence_offset needs the share of the second class in the fit; got a model without it. Use "
                "log(p/(1-p)) - log(s/(1-s)) for a prevalence p and a share s."
            )
        return math.log(prevalence / (1.0 - prevalence)) - math.log(share / (1.0 - share))

    def _weighting_state(self) -> dict[str, Any]:
        """What a file keeps of all this."""
        share, groups = getattr(self, "class_share_", math.nan), getattr(self, "robust_groups_", 0)
        weights = getattr(self, "class_weight_", np.ones(2)).tolist()
        each = getattr(self, "mean_weight_", math.nan)
        known = {"class_weight": weights, "class_share": share, "robust_groups": groups, "mean_weight": each}
        missing = {
            "class_weight": weights == [1.0, 1.0],
            "class_share": math.isnan(share),
            "robust_groups": not groups,
            "mean_weight": math.isnan(each),
        }
        kept = {name: value for name, value in known.items() if not missing[name]}
        return {WEIGHTING: kept} if kept else {}

    def _restore_weighting(self, metadata: Mapping[str, Any]) -> None:
        state = metadata.get(WEIGHTING, {})
        self.class_weight_ = np.array(state.get("class_weight", [1.0, 1.0]))
        self.class_share_ = state.get("class_share", math.nan)
        self.robust_groups_ = state.get("robust_groups", 0)
        self.mean_weight_ = state.get("mean_weight", math.nan)


def note_fractional_weights(source: RowSource) -> None:
    """Warn if weights of rows in memory are no counts, and are not one on average either."""
    weight = source.in_memory().weight if source.traits.where == "memory" else None
    if weight is None or abs(float(weight.sum()) / len(weight) - 1.0) <= APART:
        return
    if bool((weight == weight.round()).all()):
        return
    warnings.warn(
        f"sample_weight sums to {float(weight.sum()):.6g} over {len(weight)} rows, and intervals are as wide as for so "
        "many rows. If the weights say how many others a row stands for, divide them by their mean and use "
        "model.robust().",
        WeightWarning,
        stacklevel=users_line(),
    )


def read_class_weight(given: Any, classes: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Return w₀ and w₁. "balanced" gives both classes the same total weight and leaves the sum of weights as it is."""
    if given is None:
        return np.ones(2)
    if isinstance(given, str) and given == "balanced":
        if not (mass > 0).all():
            raise ValueError(f"class_weight='balanced' needs rows of both classes; got weights {mass.tolist()}.")
        return mass.sum() / (2.0 * mass)
    if not isinstance(given, Mapping):
        raise ValueError(f"class_weight must be None, 'balanced' or a dictionary of the classes; got {given!r:.60}.")
    labels = classes.tolist()
    for label, weight in given.items():
        if label not in labels:
            raise ValueError(f"class_weight must name the classes; got {label!r}. {instead(str(label), labels)}")
        if not isinstance(weight, int | float | np.number) or not 0.0 < weight < math.inf:
            raise ValueError(f"class_weight must be positive; got {weight!r} for class {label!r}.")
    return np.array([float(given.get(label, 1.0)) for label in labels])


def class_mass(source: RowSource) -> np.ndarray:
    """The total weight of the rows of each class."""
    if source.traits.where == "memory":  # without cutting them into blocks
        rows = source.in_memory()
        with one_thread():  # torch's others would not survive a fork
            if rows.weight is None:
                counted = rows.label.dtype == torch.bool
                second = float(rows.label.count_nonzero() if counted else rows.label.sum(dtype=torch.float64))
                return np.array([rows.rows - second, second])
            second = float((rows.label * rows.weight).sum(dtype=torch.float64))
            return np.array([float(rows.weight.sum()) - second, second])
    return np.array([float(part) for part in source.reduce(partial(block_class_mass))])


def block_class_mass(block: Block) -> list[Tensor]:
    weight = torch.ones_like(block.label) if block.weight is None else block.weight
    return [torch.dot(weight, 1.0 - block.label), torch.dot(weight, block.label)]


# --- rows with other weights ---


def reweighted(source: RowSource, first: float, second: float) -> RowSource:
    """Return the rows with their weights multiplied by that of their class."""
    if source.traits.where != "memory":
        return Reweighted(source, first, second)
    rows = source.in_memory()
    factor = torch.where(rows.label > 0.5, second, first).to(torch.float64)
    return replace(rows, weight=factor if rows.weight is None else factor * rows.weight)


@dataclass
class Reweighted(SourceWrapper):
    """Rows whose weights are multiplied block by block, wherever they are kept."""

    source: RowSource
    first: float
    second: float

    def reduce(self, function: RowFunction) -> list[Tensor]:
        # a flat call, so that the source finds the keywords of the function
        flat = partial(of_reweighted_block, function.func, self.first, self.second, *function.args)
        return self.source.reduce(partial(flat, **function.keywords))

    def map(self, function: Callable[[Block], Mapped]) -> Iterator[Mapped]:
        return self.source.map(partial(of_reweighted_block, function, self.first, self.second))

    def sample(self, k: int, generator: np.random.Generator) -> RowSource:
        return reweighted(self.source.sample(k, generator), self.first, self.second)

    def in_memory(self) -> Arrays:
        return reweighted(self.source.in_memory(), self.first, self.second).in_memory()


def of_reweighted_block(
    function: Callable[..., Any], first: float, second: float, block: Block, /, **given: Any
) -> Any:
    factor = torch.where(block.label > 0.5, second, first).to(block.label)
    weight = factor if block.weight is None else factor * block.weight
    return function(replace(block, weight=weight), **given)
