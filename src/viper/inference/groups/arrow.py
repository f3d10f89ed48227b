"""Arrow matrices: a dense border, and diagonal blocks that are coupled only to the border.

    Λ = [ A   Bᵀ ]      S = A - Bᵀ C⁻¹ B       Σ = [ S⁻¹          -S⁻¹ Wᵀ           ]      W = C⁻¹ B
        [ B   C  ]                                 [ -W S⁻¹       C⁻¹ + W S⁻¹ Wᵀ    ]

C is block diagonal, with one block per group. Of Σ, only what rows need is computed: the border, and each group's
covariance with itself and with the border. Work and memory are linear in the number of groups.
"""

from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

from viper.errors import NotFinite
from viper.inference.groups.met import Met


class Arrow(NamedTuple):
    """The parts of an arrow matrix: border (d × d), cross (G × r × d, or sparse as `Met`) and blocks (G × r × r)."""

    border: np.ndarray
    cross: Any
    blocks: np.ndarray

    def mixed(self, other: "Arrow", share: float) -> "Arrow":
        """(1-ρ) of this matrix plus ρ of another."""
        return Arrow(*((1.0 - share) * mine + share * its for mine, its in zip(self, other, strict=True)))


class Split(NamedTuple):
    """A vector, split into its entries in the border (d,) and in each group (G × r)."""

    border: np.ndarray
    groups: np.ndarray

    def dot(self, other: "Split") -> float:
        return float(self.border @ other.border + np.vdot(self.groups, other.groups))

    def moved(self, step: "Split", share: float = 1.0) -> "Split":
        return Split(self.border + share * step.border, self.groups + share * step.groups)


class Inverse(NamedTuple):
    """The inverse of a precision, as far as rows need it, with the factors that solve linear systems."""

    covariance: Arrow
    log_determinant: float  # of the precision
    root: np.ndarray  # lower Cholesky factor of S
    blocks: np.ndarray  # C⁻¹
    ties: Any  # W = C⁻¹B, as the cross part

    def solve(self, vector: Split) -> Split:
        """Λ⁻¹v."""
        flat = flat_cross(self.ties)
        border = scipy.linalg.cho_solve((self.root, True), vector.border - flat.T @ vector.groups.ravel())
        groups = np.matmul(self.blocks, vector.groups[:, :, None])[:, :, 0]
        return Split(border, groups - (flat @ border).reshape(groups.shape))


def flat_cross(cross: Any) -> Any:
    """The cross part as a matrix, groups and effects × border."""
    return cross.matrix if isinstance(cross, Met) else cross.reshape(-1, cross.shape[-1])


def outer_cross(like: Any, groups: np.ndarray, border: np.ndarray) -> Any:
    """The cross part (G × r, d) of the outer product of a vector with itself, at the entries of `like`."""
    return like.outer(groups, border) if isinstance(like, Met) else groups[:, :, None] * border


def invert_arrow(precision: Arrow) -> Inverse:
    """Return the inverse. Raises NotFinite unless the matrix is positive definite."""
    border, cross, C = precision
    if C.shape[1] == 1:
        inner, logs = 1.0 / C, np.log(C[:, 0, 0])
    else:
        sign, logs = np.linalg.slogdet(C)
        if not (sign > 0.0).all():
            raise NotFinite
        inner = np.linalg.inv(C)
    ties, schur = eliminated(border, cross, inner)
    try:
        root = np.linalg.cholesky(schur)
    except np.linalg.LinAlgError:
        raise NotFinite from None
    top = from_root(root)
    covariance_cross, within = crossed(ties, top)
    log_determinant = float(logs.sum()) + 2.0 * float(np.log(root.diagonal()).sum())
    return Inverse(Arrow(top, covariance_cross, inner - within), log_determinant, root, inner, ties)


def eliminated(border: np.ndarray, cross: Any, inner: np.ndarray) -> tuple[Any, np.ndarray]:
    """W and S."""
    if isinstance(cross, Met):
        ties = cross.tied(inner)
        return ties, border - cross.complement(ties)
    ties = inner * cross if inner.shape[1] == 1 else inner @ cross
    return ties, border - flat_cross(cross).T @ flat_cross(ties)


def crossed(ties: Any, top: np.ndarray) -> tuple[Any, np.ndarray]:
    """-W S⁻¹, and -W S⁻¹ Wᵀ of each group, from S⁻¹."""
    if isinstance(ties, Met):
        cross = -1.0 * ties.times_dense(top)
        return cross, cross.within(ties)
    cross = -(flat_cross(ties) @ top).reshape(ties.shape)
    if ties.shape[1] == 1:
        return cross, np.einsum("gd,gd->g", cross[:, 0], ties[:, 0])[:, None, None]
    return cross, cross @ ties.transpose(0, 2, 1)


def from_root(root: np.ndarray) -> np.ndarray:
    """S⁻¹ from its lower Cholesky factor."""
    found, _ = scipy.linalg.lapack.dpotri(root, lower=1)
    below = np.tril(found)
    below += np.tril(found, -1).T
    return below
