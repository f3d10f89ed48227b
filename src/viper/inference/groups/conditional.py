"""The exact conditional distribution of the main factor's effects given everything else, by quadrature.

Given the border w and D, groups are independent, and

    p(b_g | y, w) ∝ Π_{i∈g} p(y_i | b, w)^{c_i} N(b; 0, D),      I_g(w) = ∫ Π_{i∈g} p(y_i | b, w)^{c_i} N(b; 0, D) db.

The nodes are those of a product Gauss-Hermite rule about q(b_g | w) = N(μ_g - W_g(w - μ), C_g⁻¹).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import scipy.linalg
import torch

from viper.inference.groups.arrow import flat_cross
from viper.inference.groups.rows import GroupedRows
from viper.inference.groups.solver import Effects
from viper.softplus.quadrature import full_gauss_hermite

NODES_BY_WIDTH = {1: 15, 2: 9, 3: 7, 4: 5}  # number of effects of a group -> nodes along each axis
FEWEST_NODES = 3  # nodes along each axis for more effects
ENTRIES_AT_ONCE = 1 << 19  # rows × draws × effects held at a time


class GroupMoments(NamedTuple):
    """log I_g, and mean and covariance of p(b_g | y, w), for each group and draw of w."""

    log_integral: np.ndarray  # G × S
    mean: np.ndarray  # G × S × r
    covariance: np.ndarray  # G × S × r × r


@dataclass(frozen=True)
class EffectNodes:
    """Nodes x (M × r) of a standard normal, and the logarithms of their weights."""

    places: np.ndarray
    log_weights: np.ndarray


def effect_nodes(width: int) -> EffectNodes:
    """The product rule over r effects."""
    nodes, weights = (x.numpy() for x in full_gauss_hermite(NODES_BY_WIDTH.get(width, FEWEST_NODES)))
    places = np.array(list(product(nodes, repeat=width)))
    return EffectNodes(places, np.array([sum(w) for w in product(np.log(weights), repeat=width)]))


def known_log_odds(rows: GroupedRows, part: slice, border: np.ndarray) -> np.ndarray:
    """The border's part of the log-odds in a chunk, rows × draws; `border` is draws × d."""
    f = rows.X[part] @ border[:, : rows.fixed].T
    by_effect = np.ascontiguousarray(border.T) if rows.sparse else border
    for place, values in rows.sparse:
        f += values[part, None] * by_effect[place[part]]
    return f if rows.offset is None else f + rows.offset[part, None]


class GroupIntegrals:
    """The integrals of the groups in a chunk of rows, for some draws of the border."""

    def __init__(self, rows: GroupedRows, part: slice, groups: slice, q: Effects, D: np.ndarray, border: np.ndarray):
        main = rows.main
        self.Z, self.label = main.columns[part], rows.label[part]
        self.here, self.first = main.codes[part] - groups.start, rows.first_rows[groups] - part.start
        self.count = np.ones(len(self.label)) if rows.weight is None else rows.weight[part]
        self.known = known_log_odds(rows, part, border)
        self.centre = conditional_means(q, groups, border)
        C = q.inverse.blocks[groups]
        self.root = np.linalg.cholesky(0.5 * (C + C.transpose(0, 2, 1)))
        self.nodes, self.precision = effect_nodes(main.width), np.linalg.inv(D)
        # Σ c y f is linear in b
        wins = (self.count * self.label)[:, None]
        self.linear = np.add.reduceat(wins * self.known, self.first)
        self.pull = np.add.reduceat(wins * self.Z, self.first)
        logs = np.stack([self.log_likelihood(b) + self.log_prior(b) for b in self.places()], -1)
        # ∫ g(b) db = Σ_m e^{log w_m + ½|x_m|²} |C⁻¹|^½ (2π)^{r/2} g(b_m); the last factor is also in the prior
        scale = np.log(np.diagonal(self.root, axis1=1, axis2=2)).sum(1) - 0.5 * np.linalg.slogdet(D)[1]
        logs += scale[:, None, None] + self.nodes.log_weights + 0.5 * np.square(self.nodes.places).sum(1)
        top = logs.max(-1, keepdims=True)
        shares = np.exp(logs - top)
        total = shares.sum(-1, keepdims=True)
        self.log_integral, self.shares = (top + np.log(total))[..., 0], shares / total

    def places(self) -> Iterator[np.ndarray]:
        """b at each node, groups × draws × r."""
        for x in self.nodes.places:
            yield self.centre + (self.root @ x)[:, None, :]

    def log_odds(self, b: np.ndarray) -> np.ndarray:
        """f of the rows, rows × draws."""
        f = self.known.copy()
        for c in range(self.Z.shape[1]):
            f += self.Z[:, c, None] * b[self.here, :, c]
        return f

    def softplus(self, b: np.ndarray) -> np.ndarray:
        return torch.nn.functional.softplus(torch.from_numpy(self.log_odds(b)), threshold=40.0).numpy()

    def log_likelihood(self, b: np.ndarray) -> np.ndarray:
        """Σ_{i∈g} c (y f - log(1 + e^f)), groups × draws."""
        lost = np.add.reduceat(self.count[:, None] * self.softplus(b), self.first)
        return self.linear + np.einsum("gr,gsr->gs", self.pull, b) - lost

    def log_prior(self, b: np.ndarray) -> np.ndarray:
        """-½ bᵀD⁻¹b."""
        return -0.5 * np.einsum("gsi,ij,gsj->gs", b, self.precision, b, optimize=True)

    def moments(self) -> GroupMoments:
        mean = sum(
            share[..., None] * b for share, b in zip(np.moveaxis(self.shares, -1, 0), self.places(), strict=True)
        )
        covariance = np.zeros((*mean.shape, mean.shape[-1]))
        for share, b in zip(np.moveaxis(self.shares, -1, 0), self.places(), strict=True):
            by = b - mean
            covariance += share[..., None, None] * by[..., :, None] * by[..., None, :]
        return GroupMoments(self.log_integral, mean, covariance)

    def log_without_row(self) -> np.ndarray:
        """log p(y_i | w, y of the group's other rows) = -log E[1/p(y_i | b, w)], rows × draws."""
        found = np.zeros_like(self.known)
        for share, b in zip(np.moveaxis(self.shares, -1, 0), self.places(), strict=True):
            f = self.log_odds(b)
            log_density = self.count[:, None] * (self.label[:, None] * f - self.softplus(b))
            found += share[self.here] * np.exp(np.minimum(-log_density, 700.0))
        return -np.log(found)


def conditional_means(q: Effects, groups: slice, border: np.ndarray) -> np.ndarray:
    """μ_g - W_g(w - μ), groups × draws × r."""
    mean, width = q.mean.groups[groups], q.mean.groups.shape[1]
    ties = flat_cross(q.inverse.ties)[groups.start * width : groups.stop * width]
    moved = (ties @ (border - q.mean.border).T).reshape(len(mean), width, len(border))
    return mean[:, None, :] - moved.transpose(0, 2, 1)


def group_integrals(
    rows: GroupedRows, q: Effects, D: np.ndarray, border: np.ndarray
) -> Iterator[tuple[slice, slice, slice, GroupIntegrals]]:
    """Chunk by chunk: the slices of rows, groups and draws, and their integrals."""
    for part, groups in rows.chunks():
        step = max(1, ENTRIES_AT_ONCE // ((part.stop - part.start) * rows.main.width))
        for start in range(0, len(border), step):
            some = slice(start, min(start + step, len(border)))
            yield part, groups, some, GroupIntegrals(rows, part, groups, q, D, border[some])


def drawn_border(q: Effects, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draws of the border from q (k × d) from standard normal noise, and log q of each."""
    root = q.inverse.root  # of the precision S of the border: w = μ + L⁻ᵀ noise
    moved = scipy.linalg.solve_triangular(root, noise.T, lower=True, trans="T").T
    log_scale = -float(np.log(np.diagonal(root)).sum())
    constant = 0.5 * noise.shape[1] * math.log(2.0 * math.pi)
    return q.mean.border + moved, -0.5 * np.square(noise).sum(1) - constant - log_scale
