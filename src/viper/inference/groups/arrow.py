"""Arrow matrices: a dense border, and blocks on the diagonal that meet only the border.

    Λ = [ A   Bᵀ ]      S = A - Bᵀ C⁻¹ B       Σ = [ S⁻¹          -S⁻¹ Wᵀ           ]      W = C⁻¹ B
        [ B   C  ]                                 [ -W S⁻¹       C⁻¹ + W S⁻¹ Wᵀ    ]

C is block diagonal, with a block for each group. Of Σ, only the blocks that meet in a row are computed: the border, and
each group's covariance with itself and with the border. Work and memory are linear in the number of groups.
"""

from typing import NamedTuple

import numpy as np
import scipy.linalg

from viper.errors import NotFinite


class Arrow(NamedTuple):
    """The parts of an arrow matrix: border (d × d), cross (G × r × d) and blocks (G × r × r)."""

    border: np.ndarray
    cross: np.ndarray
    blocks: np.ndarray

    def mixed(self, other: "Arrow", share: float) -> "Arrow":
        """(1-ρ) of this matrix plus ρ of another."""
        return Arrow(*((1.0 - share) * mine + share * its for mine, its in zip(self, other, strict=True)))


class Split(NamedTuple):
    """A vector: its entries in the border (d,), and those of each group (G × r)."""

    border: np.ndarray
    groups: np.ndarray

    def dot(self, other: "Split") -> float:
        return float(self.border @ other.border + np.vdot(self.groups, other.groups))

    def moved(self, step: "Split", share: float = 1.0) -> "Split":
        return Split(self.border + share * step.border, self.groups + share * step.groups)


class Inverse(NamedTuple):
    """The covariance that belongs to a precision, as far as rows need it, and what solves linear systems."""

    covariance: Arrow
    log_determinant: float  # of the precision
    root: np.ndarray  # lower Cholesky factor of S
    blocks: np.ndarray  # C⁻¹
    ties: np.ndarray  # W = C⁻¹B, G × r × d

    def solve(self, vector: Split) -> Split:
        """Λ⁻¹v."""
        right = vector.border - np.einsum("grd,gr->d", self.ties, vector.groups, optimize=True)
        border = scipy.linalg.cho_solve((self.root, True), right)
        groups = np.matmul(self.blocks, vector.groups[:, :, None])[:, :, 0] - self.ties @ border
        return Split(border, groups)


def invert_arrow(precision: Arrow) -> Inverse:
    """Return the inverse; raises NotFinite unless the matrix is positive definite."""
    border, cross, C = precision
    G, r, d = cross.shape
    if r == 1:
        inner, logs = 1.0 / C, np.log(C[:, 0, 0])
    else:
        sign, logs = np.linalg.slogdet(C)
        if not (sign > 0.0).all():
            raise NotFinite
        inner = np.linalg.inv(C)
    ties = inner * cross if r == 1 else inner @ cross
    flat = ties.reshape(G * r, d)
    schur = border - cross.reshape(G * r, d).T @ flat
    try:
        root = np.linalg.cholesky(schur)
    except np.linalg.LinAlgError:
        raise NotFinite from None
    top = scipy.linalg.cho_solve((root, True), np.eye(d))
    covariance_cross = -(flat @ top).reshape(G, r, d)
    if r == 1:
        blocks = inner - np.einsum("gd,gd->g", covariance_cross[:, 0], ties[:, 0])[:, None, None]
    else:
        blocks = inner - covariance_cross @ ties.transpose(0, 2, 1)
    log_determinant = float(logs.sum()) + 2.0 * float(np.log(root.diagonal()).sum())
    return Inverse(Arrow(top, covariance_cross, blocks), log_determinant, root, inner, ties)
