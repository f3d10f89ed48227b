"""A screen for where a kernel would help: how much one on a group of columns would add to the mean function alone.

With working residual e = y - s and weights h = s(1-s) at the fitted mean, a kernel s K gains

    max_s ½ Σ_j [a_j² sλ_j/(1+sλ_j) - log(1+sλ_j)],

λ_j the eigenvalues of H^{1/2} K H^{1/2} and a_j the coordinates of H^{-1/2}e, orthogonal to the mean's columns: what
Laplace's approximation would give, at the price of one small eigendecomposition.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpytorch.means import ConstantMean, LinearMean
from torch import Tensor

from viper.gp.model import Rows

LENGTHS = (0.5, 1.0, 2.0)  # times √(size of the group), on standardised columns
SCALES = torch.logspace(-1.0, 2.5, 8, dtype=torch.float64)
BEAM = 3
WIDTH = 16  # columns by which groups may grow
DEPTH = 4
RIDGE = 1e-2  # keeps separable data finite


class Group(NamedTuple):
    """A group of columns on which a kernel would act: what it gains, with which output scale and lengthscale."""

    gain: float
    columns: tuple[int, ...]
    scale: float
    length: float


class Screen:
    """Gains over the mean function alone."""

    def __init__(self, rows: Rows, inducing: Tensor, mean: Any, shape: Callable[..., Any]) -> None:
        self.inputs, self.shape = rows.inputs, shape
        self.points = inducing
        self.basis = mean_columns(mean, rows.inputs)
        _, s = best_mean(self.basis, rows)
        weight = 1.0 if rows.weight is None else rows.weight
        # H^{1/2} and H^{-1/2} e, orthogonal to the mean's columns
        self.root = (weight * s * (1.0 - s)).clamp(min=1e-8).sqrt()
        self.span = torch.linalg.qr(self.basis * self.root[:, None]).Q
        self.residual = self.outside((weight * (rows.label - s) / self.root)[:, None])[:, 0]

    def outside(self, x: Tensor) -> Tensor:
        return x - self.span @ (self.span.T @ x)

    def gain(self, columns: tuple[int, ...], length: float) -> Group:
        pick = list(columns)
        ell = length * math.sqrt(len(pick))
        u, v = self.inputs[:, pick] / ell, self.points[:, pick] / ell
        among = self.shape(torch.cdist(v, v).square())[0]
        among.diagonal().add_(1e-6)
        cross = self.shape(torch.cdist(u, v, compute_mode="use_mm_for_euclid_dist").square())[0]
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(among), cross.T, upper=False).T
        half = self.outside(half * self.root[:, None])
        values, vectors = torch.linalg.eigh(half.T @ half)
        along = (vectors.T @ (half.T @ self.residual)).square()
        scales = SCALES.to(values)[:, None]
        grown = scales * values.clamp(min=0.0)
        gains = 0.5 * (scales * along / (1.0 + grown) - torch.log1p(grown)).sum(1)
        best = int(gains.argmax())
        return Group(float(gains[best]), columns, float(SCALES[best]), length)

    def best(self, columns: tuple[int, ...], lengths: tuple[float, ...] = LENGTHS) -> Group:
        return max(self.gain(columns, length) for length in lengths)

    def groups(self) -> list[Group]:
        """Single columns, all columns, and what grows from the best, in order of gain."""
        count = self.inputs.shape[1]
        singles = sorted((self.best((j,)) for j in range(count)), reverse=True)
        useful = [group.columns[0] for group in singles[:WIDTH]]
        found = {group.columns: group for group in singles}
        everything = tuple(range(count))
        if everything not in found:
            found[everything] = self.best(everything)
        front = singles[:BEAM]
        for _ in range(1, min(DEPTH, count - 1)):
            wider = {tuple(sorted({*group.columns, j})) for group in front for j in useful if j not in group.columns}
            scored = sorted((self.best(columns, LENGTHS[:2]) for columns in sorted(wider - set(found))), reverse=True)
            found |= {group.columns: group for group in scored}
            if not scored or scored[0].gain < front[0].gain:
                break
            front = scored[:BEAM]
        return sorted(found.values(), reverse=True)


def mean_columns(mean: Any, inputs: Tensor) -> Tensor:
    """The columns in which a mean function from a word is linear: [X, 1], [1] or none."""
    ones = torch.ones_like(inputs[:, :1])
    if type(mean) is LinearMean:
        return torch.cat([inputs, ones], 1)
    return ones if type(mean) is ConstantMean else ones[:, :0]


def best_mean(basis: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Ridge logistic regression on the mean's columns by Newton's method: coefficients and probabilities."""
    weight = 1.0 if rows.weight is None else rows.weight
    offset = 0.0 if rows.offset is None else rows.offset
    beta = torch.zeros_like(basis[0])
    for _ in range(15 if len(beta) else 0):
        s = torch.sigmoid(offset + basis @ beta)
        curvature = (basis * (weight * s * (1.0 - s))[:, None]).T @ basis
        curvature.diagonal().add_(RIDGE)
        step = torch.linalg.solve(curvature, basis.T @ (weight * (rows.label - s)) - RIDGE * beta)
        beta = beta + step
        if float(step.abs().max()) < 1e-6:
            break
    return beta, torch.sigmoid(offset + basis @ beta)


def distinct(groups: list[Group], count: int) -> list[Group]:
    """The best groups, leaving out any that shares half of all their columns with a better one."""
    chosen: list[Group] = []
    for group in groups:
        mine = set(group.columns)
        alike = (len(mine & set(o.columns)) / len(mine | set(o.columns)) for o in chosen)
        if len(chosen) < count and all(x < 0.5 for x in alike):
            chosen.append(group)
    return chosen
