"""Rows of a model with effects of groups, and what its methods share: methods that also take `groups`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas


class RowsAndGroups(tuple[Any, Any]):
    """Rows to predict, and their groups."""

    __slots__ = ()

    def __new__(cls, X: Any, groups: Any) -> "RowsAndGroups":
        return super().__new__(cls, (X, groups))


class GroupedInput(NamedTuple):
    """Columns of X without the intercept, a table of the columns of groups, and known log-odds."""

    design: np.ndarray
    table: "pandas.DataFrame"
    offset: np.ndarray | None


def count_of_rows(groups: Any) -> int:
    """The number of rows for which groups are given."""
    return len(next(iter(groups.values()))) if isinstance(groups, Mapping) else 0 if groups is None else len(groups)


class TakesGroups:
    """Predictions that also take `groups`. A model with a formula finds the groups in X."""

    def predict_latent(self, X: Any, offset: Any = None, *, groups: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and standard deviation of the log-odds f(x), per row."""
        return super().predict_latent(RowsAndGroups(X, groups), offset)  # type: ignore[misc]

    def predict_proba(self, X: Any, offset: Any = None, *, groups: Any = None) -> np.ndarray:
        """Posterior-averaged probabilities of the two classes, n × 2. A model with a formula finds groups in X."""
        return super().predict_proba(RowsAndGroups(X, groups), offset)  # type: ignore[misc]

    def predict_std(self, X: Any, offset: Any = None, *, groups: Any = None) -> np.ndarray:
        """Posterior standard deviation of the probability, per row."""
        return super().predict_std(RowsAndGroups(X, groups), offset)  # type: ignore[misc]

    def predict_interval(self, X: Any, level: float = 0.95, offset: Any = None, *, groups: Any = None) -> np.ndarray:
        """Credible interval of the probability of the second class: n × 2. For new groups it includes their effects."""
        return super().predict_interval(RowsAndGroups(X, groups), level, offset)  # type: ignore[misc]

    def predict_information(self, X: Any, offset: Any = None, *, groups: Any = None) -> np.ndarray:
        """How much the label of each row would tell about the model, in nats."""
        return super().predict_information(RowsAndGroups(X, groups), offset)  # type: ignore[misc]

    def decision_function(self, X: Any, offset: Any = None, *, groups: Any = None) -> np.ndarray:
        """Log-odds of the posterior-averaged probability."""
        return super().decision_function(RowsAndGroups(X, groups), offset)  # type: ignore[misc]

    def predict(self, X: Any, offset: Any = None, *, groups: Any = None) -> np.ndarray:
        """The more probable class, per row."""
        return super().predict(RowsAndGroups(X, groups), offset)  # type: ignore[misc]
