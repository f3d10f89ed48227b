"""Labels and probabilities, checked; shares of rows with their credible intervals; rows cut into groups.

`label` is True for the rows of the second class; `probability` is the predicted probability of that class.
"""

from typing import Any, NamedTuple

import numpy as np


def checked_predictions(label: Any, probability: Any) -> tuple[np.ndarray, np.ndarray]:
    label, probability = np.asarray(label), np.asarray(probability, dtype=float)
    if label.dtype != bool or label.ndim != 1 or label.shape != probability.shape or not len(label):
        raise ValueError(
            "label must be True or False and probability a number, with one of each per row; got labels of type "
            f"{label.dtype} and shape {label.shape} and probabilities of shape {probability.shape}. "
            "Pass y == model.classes_[1]."
        )
    if not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ValueError(f"probability must lie in [0, 1]; got {probability.min():g} to {probability.max():g}.")
    return label, probability


def share_interval(count: Any, rows: Any, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the credible interval of a share, of which `count` of `rows` were seen, under Jeffreys' Beta(½, ½).

    It starts at 0 if none was seen, ends at 1 if all were, and is [0, 1] without rows.
    """
    from scipy.special import betaincinv

    count, rows = np.asarray(count, dtype=float), np.asarray(rows, dtype=float)
    tail = 0.5 * (1 - level)
    low, high = (betaincinv(count + 0.5, rows - count + 0.5, q) for q in (tail, 1 - tail))
    return np.where(count == 0, 0.0, low), np.where(count == rows, 1.0, high)


class Groups(NamedTuple):
    """Which group each row belongs to, and what the groups are called."""

    place: np.ndarray  # row -> number of its group
    names: list[str]

    def sums(self, values: Any = None) -> np.ndarray:
        """The sum of the values of each group; without values, its number of rows."""
        return np.bincount(self.place, values, len(self.names))


def equal_groups(values: Any, count: int) -> np.ndarray:
    """The number of each row's group, of `count` groups of equally many rows; equal values share a group.

    The groups are numbered without gaps, in the order of the values.
    """
    values = np.asarray(values, dtype=float)
    edges = np.quantile(values, np.linspace(0, 1, count + 1)[1:-1])
    return np.unique(np.searchsorted(edges, values), return_inverse=True)[1]
