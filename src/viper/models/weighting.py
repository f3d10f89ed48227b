"""What the weights of rows mean: counts of equal rows, and weights of the two classes.

A weight c counts a row c times, for the coefficients and for how certain they are. Class weights w₀, w₁ multiply the
weights of the rows of each class. To first order they add log(w₁/w₀) to all log-odds, as if the classes had other
shares; `prevalence_offset` undoes that.
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

from viper.data.schema import ABOVE_ZERO, WHOLE, Either, Fields, Items, between
from viper.errors import StorageError, WeightWarning, instead, shown, users_line
from viper.inference.rows import Arrays, Block, Mapped, RowFunction, RowSource, SourceWrapper
from viper.inference.threads import one_thread

WEIGHTING = "weighting"  # its name in a file
WEIGHTING_FIELDS = Fields(
    {},
    {
        "class_weight": Items(ABOVE_ZERO),
        "class_share": Either(between(0.0, 1.0), Items(between(0.0, 1.0))),
        "robust_groups": WHOLE,
        "mean_weight": ABOVE_ZERO,
    },
)
APART = 0.01  # fractional weights whose mean is closer than this to one need no warning


class ClassWeightMixin:
    """Estimators with an option `class_weight`."""

    class_weight: Any
    classes_: np.ndarray
    class_weight_: np.ndarray
    class_share_: Any
    robust_groups_: int
    mean_weight_: float  # mean weight of the rows, without class weights; NaN if unknown

    def _weighted_rows(self, source: RowSource, complete: bool = False) -> RowSource:
        """Learn the weights of the classes, and return the rows with them. `complete` rows must have all classes."""
        note_fractional_weights(source)
        given = self.class_weight is not None
        count = len(self.classes_)
        mass = class_mass(source, count) if given or source.traits.where == "memory" else np.full(count, math.nan)
        if complete and count > 2 and (mass == 0.0).any():
            empty = self.classes_[int(mass.argmin())]
            raise ValueError(
                f"every class must have rows with a positive weight; got none of class {shown(empty.item())}. Leave "
                "its rows out."
            )
        self.mean_weight_ = float(mass.sum() / source.rows)
        self.class_weight_ = read_class_weight(self.class_weight, self.classes_, mass)
        weighed = self.class_weight_ * mass
        shares = weighed / weighed.sum()
        self.class_share_ = float(shares[1]) if count == 2 else shares
        return self._known_weights(source)

    def _known_weights(self, source: RowSource) -> RowSource:
        """Return rows with the weights that the fit gave to their classes."""
        weights = getattr(self, "class_weight_", np.ones(2))
        return source if bool((weights == 1.0).all()) else reweighted(source, tuple(weights.tolist()))

    def prevalence_offset(self, prevalence: Any = None) -> Any:
        """Return the `offset` that makes predictions refer to the true shares of the classes.

        Without `prevalence`, log(w₀/w₁): it removes what class weights added to the log-odds. With it, the log-odds of
        the prevalence less those of the second class among the rows of the fit, counted by their weights: for rows
        that were sampled by class, as in a case-control study. Pass it to any `predict` method:
        ``model.predict_proba(X, offset=model.prevalence_offset(0.02))``.

        Parameters
        ----------
        prevalence : float in (0, 1), optional
            Share of the second class where the model is applied. With more than two classes, the shares of all; the
            result then has a column for each.
        """
        weights = getattr(self, "class_weight_", np.ones(2))
        if len(weights) > 2:
            return class_offsets(prevalence, weights, self.class_share_)
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
        """The part of a model file about weights."""
        share, groups = getattr(self, "class_share_", math.nan), getattr(self, "robust_groups_", 0)
        weights = getattr(self, "class_weight_", np.ones(2)).tolist()
        share = share.tolist() if isinstance(share, np.ndarray) else share
        each = getattr(self, "mean_weight_", math.nan)
        known = {"class_weight": weights, "class_share": share, "robust_groups": groups, "mean_weight": each}
        missing = {
            "class_weight": set(weights) == {1.0},
            "class_share": np.isnan(share).any(),
            "robust_groups": not groups,
            "mean_weight": math.isnan(each),
        }
        kept = {name: value for name, value in known.items() if not missing[name]}
        return {WEIGHTING: kept} if kept else {}

    def _restore_weighting(self, metadata: Mapping[str, Any]) -> None:
        state = metadata.get(WEIGHTING, {})
        count = len(self.classes_)
        self.class_weight_ = np.array(state.get("class_weight", [1.0] * count))
        share = state.get("class_share", math.nan)
        self.class_share_ = np.array(share) if isinstance(share, list) else share
        if self.class_weight_.shape != (count,) or np.shape(self.class_share_) not in ((), (count,)[: count - 2]):
            raise StorageError(f"weighting must have {count} classes, as the model; got others.")
        self.robust_groups_ = state.get("robust_groups", 0)
        self.mean_weight_ = state.get("mean_weight", math.nan)


def class_offsets(prevalence: Any, weights: np.ndarray, shares: Any) -> np.ndarray:
    """`prevalence_offset` for more than two classes, 1 × K: -log w_k, or the logs of the new shares over the old."""
    if prevalence is None:
        return -np.log(weights)[None]
    given = np.asarray(prevalence, dtype=np.float64)
    if given.shape != weights.shape or not (given > 0).all() or abs(given.sum() - 1.0) > 1e-6:
        raise ValueError(f"prevalence must be {len(weights)} positive shares that sum to 1; got {prevalence!r:.60}.")
    if np.shape(shares) != given.shape or np.isnan(shares).any():
        raise ValueError("prevalence_offset needs the shares of the classes in the fit; got a model without them.")
    return (np.log(given) - np.log(shares))[None]


def note_fractional_weights(source: RowSource) -> None:
    """Warn if weights of rows in memory are not counts, and are not one on average either."""
    weight = source.in_memory().weight if source.traits.where == "memory" else None
    if weight is None or abs(float(weight.sum()) / len(weight) - 1.0) <= APART:
        return
    if bool((weight == weight.round()).all()):
        return
    warnings.warn(
        f"sample_weight sums to {float(weight.sum()):.6g} over {len(weight)} rows, and intervals are as narrow as for "
        "that many rows. If weights say how many others a row stands for (survey weights), divide them by their mean "
        "and use model.robust().",
        WeightWarning,
        stacklevel=users_line(),
    )


def read_class_weight(given: Any, classes: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Return the weights. "balanced" gives all classes the same total weight and keeps the sum of weights."""
    if given is None:
        return np.ones(len(classes))
    if isinstance(given, str) and given == "balanced":
        if not (mass > 0).all():
            every = "both classes" if len(classes) == 2 else "every class"
            raise ValueError(f"class_weight='balanced' needs rows of {every}; got weights {mass.tolist()}.")
        return mass.sum() / (len(classes) * mass)
    if not isinstance(given, Mapping):
        raise ValueError(f"class_weight must be None, 'balanced' or a dictionary of the classes; got {given!r:.60}.")
    labels = classes.tolist()
    for label, weight in given.items():
        if label not in labels:
            raise ValueError(f"class_weight must name the classes; got {label!r}. {instead(str(label), labels)}")
        if not isinstance(weight, int | float | np.number) or not 0.0 < weight < math.inf:
            raise ValueError(f"class_weight must be positive; got {weight!r} for class {label!r}.")
    return np.array([float(given.get(label, 1.0)) for label in labels])


def class_mass(source: RowSource, classes: int) -> np.ndarray:
    """The total weight of the rows of each class."""
    if classes > 2:
        return source.reduce(partial(block_class_masses, classes=classes))[0].cpu().numpy()
    if source.traits.where == "memory":  # no need to cut them into blocks
        rows = source.in_memory()
        if rows.weight is None and rows.label.dtype == torch.bool:
            label = rows.label
            second = float(np.count_nonzero(label.numpy()) if label.device.type == "cpu" else label.count_nonzero())
            return np.array([rows.rows - second, second])
        with one_thread():  # torch's other threads would not survive a fork
            if rows.weight is None:
                second = float(rows.label.sum(dtype=torch.float64))
                return np.array([rows.rows - second, second])
            second = float((rows.label * rows.weight).sum(dtype=torch.float64))
            return np.array([float(rows.weight.sum()) - second, second])
    return np.array([float(part) for part in source.reduce(partial(block_class_mass))])


def block_class_masses(block: Block, classes: int) -> list[Tensor]:
    weight = torch.ones_like(block.label) if block.weight is None else block.weight
    return [torch.zeros(classes, dtype=weight.dtype, device=weight.device).index_add_(0, block.label.long(), weight)]


def block_class_mass(block: Block) -> list[Tensor]:
    weight = torch.ones_like(block.label) if block.weight is None else block.weight
    return [torch.dot(weight, 1.0 - block.label), torch.dot(weight, block.label)]


# --- rows with other weights ---


def reweighted(source: RowSource, weights: tuple[float, ...]) -> RowSource:
    """Return the rows with their weights multiplied by that of their class."""
    if source.traits.where != "memory":
        return Reweighted(source, weights)
    rows = source.in_memory()
    factor = torch.tensor(weights, dtype=torch.float64, device=rows.label.device)[rows.label.long()]
    return replace(rows, weight=factor if rows.weight is None else factor * rows.weight)


@dataclass
class Reweighted(SourceWrapper):
    """Rows whose weights are multiplied block by block, wherever they are kept."""

    source: RowSource
    weights: tuple[float, ...]

    def reduce(self, function: RowFunction) -> list[Tensor]:
        # a flat call, so that the source finds the keywords of the function
        flat = partial(of_reweighted_block, function.func, self.weights, *function.args)
        return self.source.reduce(partial(flat, **function.keywords))

    def map(self, function: Callable[[Block], Mapped]) -> Iterator[Mapped]:
        return self.source.map(partial(of_reweighted_block, function, self.weights))

    def sample(self, k: int, generator: np.random.Generator) -> RowSource:
        return reweighted(self.source.sample(k, generator), self.weights)

    def in_memory(self) -> Arrays:
        return reweighted(self.source.in_memory(), self.weights).in_memory()


def of_reweighted_block(function: Callable[..., Any], weights: tuple[float, ...], block: Block, /, **given: Any) -> Any:
    factor = torch.tensor(weights, dtype=torch.float64, device=block.label.device)[block.label.long()]
    weight = factor if block.weight is None else factor * block.weight
    return function(replace(block, weight=weight), **given)
