"""A Gaussian process f of items, fitted to differences of f as the log-odds of a classifier.

A row is a pair (x, x') with log-odds f(x) - f(x'), whose kernel is `PairKernel`. Inducing values are differences too,
so solver, search and average over hyperparameters are those of `VariationalGPClassifier`.

Ties have a threshold t > 0. With d = f(x) - f(x'),

    P(x wins) = s(d - t),      P(x' wins) = s(-d - t),      P(tie) = s(t - d) s(t + d) (1 - e^{-2t}),

which add up to one. A pair with a winner is a row with the offset ±t; a tie is two such rows and a constant. The sign
of the offset is the last column of a row.
"""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.data import checks
from viper.errors import WeightWarning
from viper.gp.classifier import VariationalGPClassifier
from viper.gp.fitting.choices import Choices
from viper.gp.kernels import NoKernel, PairKernel, PairMean, make_kernel, pair_items, tie_constant
from viper.gp.model import Observations, Scaler
from viper.gp.search import LINE, Family
from viper.inference.rows import Arrays

CLASSES = np.array([False, True])


class PairRows:
    """Pairs of items, given with the better one first, as labelled rows (x, x'[, σ]).

    In a row, the two items are in the order of their features. It does not depend on which one won, nor the fit on how
    items are numbered.
    """

    def __init__(self, first: np.ndarray, second: np.ndarray, tied: np.ndarray | None, weight: Tensor | None) -> None:
        swapped = precedes(second, first)[:, None]
        items = np.where(swapped, second, first), np.where(swapped, first, second)
        label = np.where(swapped[:, 0], 0.0, 1.0)
        self.tie_weight: float | None = None
        if tied is None:
            rows = np.column_stack(items)
        else:
            # s(d - t) where the first wins, 1 - s(d + t) where the second does, and both for a tie
            c = np.ones(len(first)) if weight is None else weight.numpy()
            self.tie_weight = float(c[tied].sum())
            sign = np.where(tied, 1.0, np.where(swapped[:, 0], 1.0, -1.0))
            label = np.where(tied, 1.0, label)
            rows = np.column_stack([*items, sign])
            more = rows[tied]
            more[:, -1] = -1.0
            rows, label = np.vstack([rows, more]), np.concatenate([label, np.zeros(len(more))])
            weight = None if weight is None else torch.cat([weight, weight[torch.from_numpy(tied)]])
        self.arrays = Arrays(
            torch.from_numpy(np.ascontiguousarray(rows)),
            intercept=False,
            device=torch.device("cpu"),
            label=torch.from_numpy(label),
            weight=weight,
        )


def precedes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether each row of a comes before the same row of b, by the first column in which they differ."""
    differs = a != b
    column = differs.argmax(1)
    at = np.arange(len(a))
    return np.asarray(a[at, column] < b[at, column])


class PairChoices(Choices):
    """The options of a `PairProcess`."""

    @property
    def width(self) -> int:
        return self.columns // 2

    @property
    def tied(self) -> bool:
        return bool(self.columns % 2)

    def scaler(self, rows: Observations) -> Scaler:
        """Standardise by the compared items, in the same way for both items of a pair."""
        items = torch.cat(pair_items(rows.inputs, self.width)).unique(dim=0)
        of = Scaler.fit(Observations(items, torch.zeros(len(items))), self.options.standardize)
        more = [0.0] * self.tied
        return Scaler(np.r_[of.centre, of.centre, more], np.r_[of.scale, of.scale, np.ones(len(more))])

    def kernel_and_mean(self, family: Family) -> tuple[Any, Any]:
        options = self.options
        mean = PairMean(self.width, options.mean == "linear", options._tie_weight if self.tied else None).double()
        if family == LINE:
            return NoKernel(), mean
        kernel = family.shape if isinstance(options.kernel, str) else options.kernel
        return PairKernel(make_kernel(kernel, self.width, priors=options.priors, many=family.many), self.width), mean


class PairProcess(VariationalGPClassifier):
    """The classifier of pairs. Its rows have 2p columns, or 2p + 1 with ties."""

    _tie_weight = 0.0

    @property
    def _choices(self) -> PairChoices:
        return PairChoices(self, 2)

    @property
    def tied_(self) -> bool:
        """Whether there are ties."""
        return self._choices.tied

    @property
    def item_scaler(self) -> Scaler:
        p = self._choices.width
        return Scaler(self._scaler.centre[:p], self._scaler.scale[:p])

    def fit_pairs(self, rows: PairRows) -> "PairProcess":
        self._check_options()
        random = checks.random_of_fit(self.random_state)
        self.classes_, self._own_prior = CLASSES, None
        self.n_features_in_, self._tie_weight = rows.arrays.features.shape[1], rows.tie_weight or 0.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeightWarning)  # it advises `robust`, which pairs do not have
            source = self._weighted_rows(rows.arrays)
        self._fit(source.in_memory(), None, random)
        self._raw_rows = source
        return self

    def tie_constant(self) -> float:
        """What ties add to the log likelihood of their rows, at the fitted threshold."""
        return float(tie_constant(self._tie_weight, self.model_.mean.tie.detach())) if self.tied_ else 0.0

    def rows_of(self, first: np.ndarray, second: np.ndarray, sign: float = -1.0) -> np.ndarray:
        """Pairs as rows for prediction."""
        return np.column_stack([first, second, *([np.full(len(first), sign)] if self.tied_ else [])])
