"""Rows of more than two classes, projected on inducing points that all classes share."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from viper.gp.model import Features, Observations
from viper.inference.rows import Block


def merged_by_class(rows: Observations) -> Observations:
    """Merge equal rows of the same class, sort them lexicographically, and drop rows of weight zero."""
    c = np.ones(len(rows)) if rows.weight is None else rows.weight.numpy()
    parts = [rows.inputs.numpy(), *([] if rows.offset is None else [rows.offset.numpy()]), rows.label.numpy()[:, None]]
    keys = np.column_stack(parts)[c > 0.0]
    order = np.lexsort(keys.T[::-1])
    keys = keys[order]
    first = np.concatenate([[True], (keys[1:] != keys[:-1]).any(1)])
    total = np.bincount(np.cumsum(first) - 1, c[c > 0.0][order])
    unique, columns = torch.from_numpy(np.ascontiguousarray(keys[first])), rows.inputs.shape[1]
    return Observations(
        unique[:, :columns].contiguous(),
        unique[:, -1].clone(),
        offset=None if rows.offset is None else unique[:, columns:-1].contiguous(),
        weight=None if (total == 1.0).all() else torch.from_numpy(total),
    )


class ClassFeatures(Features):
    """Blocks (A, o, r, y, c) with an offset for each class or none, and class numbers as labels.

    A mean function shared by all classes would change no probability. Differences between classes are part of q.
    """

    def block(self, rows: Observations, cross: Tensor, variance: Tensor, mean: Tensor, columns: Tensor) -> Block:
        return replace(super().block(rows, cross, variance, mean, columns), offset=rows.offset)
