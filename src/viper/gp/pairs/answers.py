"""Answers that prefer one of k items to all others, as weighted pairs.

A choice of c among k items by the softmax of utilities, p_j = e^{f_j}/Σ e^{f_i}, is k - 1 pairs (c, j) with the weights

    w_j = E p_j / E s(f_j - f_c),      without uncertainty p_c + p_j,

the chance that the choice falls on one of the two. With them the slope of the pairs in the means of f is that of the
choice, because d/df Σ_j w_j E log s(f_c - f_j) = Σ_j w_j E s(f_j - f_c) (e_c - e_j) = e_c - E p, and their expected
curvature is too: w_j p_c p_j / (p_c + p_j)² on average over choices is p_c p_j. Weights depend on f. They begin at 2/k,
as for equal utilities, and each fit gives those of the next; after the third, means are within 0.02 sd of the limit.
"""

import math
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch

from viper.data.checks import rectangular
from viper.errors import shown
from viper.gp.joint import joint_draws, sobol_uniforms

FITS = 3  # of choices among more than two
CHOICE_DRAWS = 512
CHOICES_AT_ONCE = 1_024


class Answers(NamedTuple):
    """Items by number, answer by answer with the preferred one first, and how many each answer is about."""

    items: np.ndarray
    sizes: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        found: np.ndarray = np.cumsum(self.sizes) - self.sizes
        return found

    @property
    def pairs(self) -> np.ndarray:
        """The preferred item of each answer with each of the others."""
        return np.stack([self.per_pair(self.items[self.starts]), np.delete(self.items, self.starts)], 1)

    @property
    def largest(self) -> int:
        """Items of the largest answer."""
        return int(self.sizes.max())

    def per_pair(self, of_answers: np.ndarray) -> np.ndarray:
        """A value of each answer, repeated for each of its pairs."""
        return np.repeat(of_answers, self.sizes - 1)

    @property
    def first_weights(self) -> np.ndarray:
        """w of every pair if all utilities were equal."""
        return self.per_pair(2.0 / self.sizes)

    def weights(self, process: Any, X: np.ndarray) -> np.ndarray:
        """w of every pair, where `process` is the posterior of f at items."""
        found = np.ones(int((self.sizes - 1).sum()))
        for k in np.unique(self.sizes[self.sizes > 2]):
            of_size = np.flatnonzero(self.sizes == k)
            parts = np.split(of_size, range(CHOICES_AT_ONCE, len(of_size), CHOICES_AT_ONCE))
            values = [choice_weights(process, X[self.items[self.starts[part, None] + np.arange(k)]]) for part in parts]
            found[self.per_pair(self.sizes == k)] = np.concatenate(values).ravel()
        return found


def choice_weights(process: Any, items: np.ndarray) -> np.ndarray:
    """E p_j / E s(f_j - f_c) of each item not chosen, m × (k - 1); of choices m × k × p with the chosen one first."""
    m, k, columns = items.shape
    with torch.no_grad():
        rows = process.rows(torch.from_numpy(items.reshape(m * k, columns)))
        uniform = sobol_uniforms(CHOICE_DRAWS, k, 0)
        f = joint_draws(rows.mean.reshape(m, k), process.among(rows, k), uniform)
        worse = torch.sigmoid(f[..., 1:] - f[..., :1]).mean(1)
        return (f.softmax(-1)[..., 1:].mean(1) / worse.clamp(min=1e-300)).numpy()


def read_answers(given: Any, items: int) -> Answers:
    """Answers as numbers of items, checked."""
    numbers, sizes = answer_lists(given)
    if not len(sizes):
        raise ValueError("pairs must be at least one; got none. Compare two items.")
    if odd := [x for x in numbers.tolist() if not is_row_number(x)]:
        raise ValueError(f"pairs must be numbers of rows of X; got {shown(odd[0])}. Count items from 0.")
    numbers, answer = numbers.astype(float), np.repeat(np.arange(len(sizes)), sizes)
    outside = (numbers < 0) | (numbers >= items)
    if outside.any():
        raise ValueError(
            f"pairs must be numbers of rows of X, 0 to {items - 1}; got {numbers[outside][0]:.0f} in pair "
            f"{answer[outside.argmax()]}. Count items from 0."
        )
    order = np.lexsort((numbers, answer))
    twice = np.flatnonzero((np.diff(numbers[order]) == 0) & (np.diff(answer[order]) == 0))
    if len(twice):
        k = order[twice[0]]
        raise ValueError(
            f"a pair must be of different items; got item {numbers[k]:.0f} twice in pair {answer[k]}. Leave it out."
        )
    return Answers(numbers.astype(np.intp), sizes)


def answer_lists(given: Any) -> tuple[np.ndarray, np.ndarray]:
    """Items by number, answer by answer, and how many each answer has: the same in an array, any number in lists."""
    if isinstance(given, list | tuple) and len({np.shape(one)[:1] for one in given if np.ndim(one) == 1}) > 1:
        for k, one in enumerate(given):
            if np.ndim(one) != 1 or len(one) < 2:
                raise ValueError(
                    f"an answer must be a list of two items or more, the best one first; got {shown(one)} in pair {k}."
                )
        items = [item for one in given for item in np.asarray(one).tolist()]
        return np.array(items, dtype=object), np.array([len(one) for one in given])
    table = rectangular(given, "pairs")
    if table.ndim != 2 or table.shape[1] < 2:
        raise ValueError(f"pairs must have two columns or more, the better item first; got shape {table.shape}.")
    return table.ravel(), np.full(len(table), table.shape[1])


def is_row_number(x: Any) -> bool:
    return not isinstance(x, bool) and isinstance(x, Real) and math.isfinite(x) and x == math.floor(x)
