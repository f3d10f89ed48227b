"""From checked arrays to the rows of a Gaussian process: standardised, without repetitions, in their own order."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from viper.gp.model import Rows


def dense(X: Any) -> np.ndarray:
    """X as a float64 NumPy array; sparse matrices are made dense."""
    if scipy.sparse.issparse(X):
        X = X.toarray()
    return np.ascontiguousarray(X.detach().cpu().numpy() if isinstance(X, Tensor) else X, dtype=np.float64)


def merge(
    X: np.ndarray, label: Tensor, offset: Tensor | None, weight: Tensor | None
) -> tuple[np.ndarray, Tensor, Tensor | None, Tensor | None]:
    """Equal rows as one with their weights added and labels averaged, in lexicographic order; none of weight zero.

    The objective is the same, and neither the order of the rows nor whether they are repeated or weighted leads the
    search for hyperparameters elsewhere.
    """
    c = np.ones(len(X)) if weight is None else weight.numpy()
    kept = c > 0.0
    keys = X if offset is None else np.column_stack([X, offset.numpy()])
    keys, c, y = keys[kept], c[kept], label.numpy().astype(np.float64)[kept]
    order = np.lexsort(keys.T[::-1])
    keys = keys[order]
    first = np.concatenate([[True], (keys[1:] != keys[:-1]).any(1)])
    group = np.cumsum(first) - 1
    total = np.bincount(group, c[order])
    share = np.bincount(group, c[order] * y[order]) / total
    unique = np.ascontiguousarray(keys[first])
    columns = X.shape[1]
    return (
        np.ascontiguousarray(unique[:, :columns]),
        torch.from_numpy(share),
        None if offset is None else torch.from_numpy(unique[:, columns].copy()),
        None if (total == 1.0).all() else torch.from_numpy(total),
    )


@dataclass(frozen=True)
class Scaler:
    """x -> (x - centre)/scale; a constant column is only centred."""

    centre: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, X: np.ndarray, weight: Tensor | None, standardize: bool) -> "Scaler":
        if not standardize:
            return cls(np.zeros(X.shape[1]), np.ones(X.shape[1]))
        c = None if weight is None else weight.numpy()
        centre = np.average(X, axis=0, weights=c)
        scale = np.sqrt(np.average((X - centre) ** 2, axis=0, weights=c))
        flat = scale <= 1e-12 * np.maximum(np.abs(X).max(0), np.finfo(float).tiny)
        return cls(centre, np.where(flat, 1.0, scale))

    def apply(self, X: np.ndarray) -> np.ndarray:
        return (X - self.centre) / self.scale


def k_means(rows: Rows, count: int, seed: int) -> Tensor:
    """Centres of `count` clusters of the (weighted) rows; of a sample of them where they are many."""
    inputs = rows.inputs.cpu().numpy()
    weight = None if rows.weight is None else rows.weight.cpu().numpy()
    if len(inputs) > 100 * count:
        index = np.sort(np.random.default_rng(seed).choice(len(inputs), 100 * count, replace=False))
        inputs, weight = inputs[index], None if weight is None else weight[index]
    found = KMeans(count, n_init=1, max_iter=20, random_state=seed).fit(inputs, sample_weight=weight)
    return torch.from_numpy(np.asarray(found.cluster_centers_, dtype=np.float64)).to(rows.inputs)


def random_rows(rows: Rows, count: int, seed: int) -> Tensor:
    index = np.random.default_rng(seed).choice(len(rows), count, replace=False)
    return rows.inputs[torch.from_numpy(index).to(rows.inputs.device)].clone()


def read_inducing(value: Any, columns: int) -> np.ndarray:
    """Inducing points given as an array, one per row, in the units of X."""
    points = np.asarray(value, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != columns or not len(points):
        raise ValueError(f"inducing points must have shape (M, {columns}), M >= 1; got {points.shape}.")
    if not np.isfinite(points).all():
        raise ValueError("inducing points must be finite; got NaN or infinity.")
    return points
