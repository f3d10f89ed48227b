"""The star: Gaussians of the coefficients of K classes that are independent up to a common shift.

Softmax does not change when all f_k move together, so only contrasts of w_1, ..., w_K matter. q is the distribution of
the contrasts of independent w_k ~ N(μ_k, P_k⁻¹), the prior that of w_k ~ N(m_k, D). With M = Σ P_k, means centred over
classes and d coefficients each,

    2 KL = Σ_k (μ_k - m_k)ᵀ D⁻¹ (μ_k - m_k) + (1 - 1/K) Σ_k tr(D⁻¹ P_k⁻¹) - (K-1) d
           + (K-1) log|D| + Σ_k log|P_k| - log|M| + d log K,

and the precisions that maximise -KL - ½ Σ_k tr(G_k P_k⁻¹) satisfy P_k - P_k M⁻¹ P_k = A_k, A_k = (1 - 1/K) D⁻¹ + G_k.
The prior may itself be a star, with its own precision for each class: this is how rows are added to a posterior.
For two classes w_1 - w_2 is Gaussian with any mean and covariance, and its prior is N(m_1 - m_2, 2D).
"""

import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from viper.inference.anderson import LARGEST_WEIGHTS, weighted_sum, weights_from_gram
from viper.inference.problem import Prior

INNER_STEPS = 200
INNER_SHARE = 3e-3  # share of its first change at which the iteration for P ends; a larger one slows the outer steps
INNER_ERROR = 1e-13  # relative changes this small are rounding
INNER_MEMORY, INNER_PROBES = 5, 2  # changes in a mixture, and random directions along which they are measured


@dataclass(frozen=True)
class Star:
    """Means μ (K, d), centred over classes, and precisions P (K, d, d), or (K, d) in the diagonal family.

    A single precision, (1, d, d) or (1, d), is shared by all classes.
    """

    mean: Tensor
    precision: Tensor

    @property
    def diagonal(self) -> bool:
        return self.precision.ndim == 2

    @property
    def copies(self) -> int:
        """How many classes share a precision: 1, or all of them."""
        return len(self.mean) // len(self.precision)

    def of_each_class(self) -> "Star":
        """Return the same star with a precision for each class."""
        K = len(self.mean)
        return Star(self.mean, self.precision.expand(K, *self.precision.shape[1:]).contiguous())

    def with_mean(self, mean: Tensor) -> "Star":
        """Return a star with other means, keeping the precisions and what has been computed from them."""
        new = Star(mean, self.precision)
        new.__dict__.update({name: x for name, x in self.__dict__.items() if name != "mean"})
        return new

    @cached_property
    def cholesky(self) -> Tensor:
        """L_k with P_k = L_k L_kᵀ, or √P."""
        return self.precision.sqrt() if self.diagonal else torch.linalg.cholesky(self.precision)

    @cached_property
    def factor(self) -> Tensor:
        """F_k with P_k⁻¹ = F_k F_kᵀ (F_k = L_k⁻ᵀ), or the variances."""
        if self.diagonal:
            return 1.0 / self.precision
        root = self.cholesky
        eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device).expand_as(root)
        return torch.linalg.solve_triangular(root, eye, upper=False).mT.contiguous()

    def solve(self, vectors: Tensor) -> Tensor:
        """The covariance of the contrasts times `vectors` (K, d), whose sum over classes is zero."""
        if self.diagonal:
            return centred_classes(vectors * self.factor)
        return centred_classes((self.factor @ (self.factor.mT @ vectors[..., None]))[..., 0])

    def log_volume(self) -> float:
        """Σ_k log|P_k| - log|Σ_k P_k|."""
        own = 2.0 * self.cholesky.log().sum() if self.diagonal else 2.0 * diagonals(self.cholesky).log().sum()
        return self.copies * float(own) - float(log_determinant(self.copies * self.precision.sum(0)))

    def expected(self, matrices: Tensor) -> float:
        """Σ_k tr(A_k P_k⁻¹) for matrices A_k, or a single one; their diagonals in the diagonal family."""
        if self.diagonal:
            return self.copies * float((matrices * self.factor).sum())
        return self.copies * float((self.factor * (matrices @ self.factor)).sum())


def centred_classes(x: Tensor) -> Tensor:
    """Subtract the mean over classes."""
    return x - x.mean(0)


def diagonals(matrices: Tensor) -> Tensor:
    """The diagonals (K, d) of matrices (K, d, d)."""
    return matrices.diagonal(dim1=-2, dim2=-1)


def times_own(precisions: Tensor, vectors: Tensor) -> Tensor:
    """Q_k v_k for `vectors` (..., K, d). Unlike Q @ v, einsum makes no copy of Q for every v."""
    return precisions * vectors if precisions.ndim == 2 else torch.einsum("kij,...kj->...ki", precisions, vectors)


def log_determinant(precision: Tensor) -> Tensor:
    """log |P| of a matrix, or of a diagonal one."""
    if precision.ndim == 1:
        return precision.log().sum()
    return 2.0 * torch.linalg.cholesky(precision).diagonal().log().sum()


def star_from(mean: Tensor, precision: Tensor) -> Star | None:
    """The star, or None if a precision is not positive definite."""
    star = Star(mean, precision)
    if star.diagonal:
        return star if bool(((precision > 0.0) & precision.isfinite()).all()) else None
    root, info = torch.linalg.cholesky_ex(precision)
    if bool(info.any()) or not math.isfinite(float(diagonals(root).sum())):
        return None
    star.__dict__["cholesky"] = root
    return star


@dataclass(frozen=True)
class StarPrior:
    """The prior of the contrasts of w_k ~ N(m_k, Q_k⁻¹). A single Q, (1, d) or (1, d, d), is shared by all classes.

    Its curvature in w_k is Q_k - Q_k (Σ Q_j)⁻¹ Q_k, which is (1 - 1/K) D⁻¹ if all classes have Q = D⁻¹.
    """

    mean: Tensor
    precision: Tensor

    @property
    def classes(self) -> int:
        return len(self.mean)

    def times(self, vectors: Tensor) -> Tensor:
        """The precision of the contrasts times `vectors` (..., K, d)."""
        Q = self.precision
        own = times_own(Q, vectors)
        if len(Q) == 1:
            return own - own.mean(-2, keepdim=True)
        total = own.sum(-2)
        if Q.ndim == 2:
            common = total / Q.sum(0)
        else:
            common = torch.linalg.solve(Q.sum(0), total.reshape(-1, total.shape[-1]).T).T.reshape(total.shape)
        return own - times_own(Q, common[..., None, :].expand_as(own))

    def curvature(self, diagonal: bool) -> Tensor:
        """Its curvature in each w_k, or a single one that is the same for all; diagonals in the diagonal family."""
        Q = self.precision
        found = (1.0 - 1.0 / self.classes) * Q if len(Q) == 1 else Q - tied(Q)
        if diagonal:
            return found if found.ndim == 2 else diagonals(found)
        return torch.diag_embed(found) if found.ndim == 2 else found

    def distance(self, mean: Tensor) -> float:
        """(w - m)ᵀ Q (w - m), with Q the precision of the contrasts."""
        shift = mean - self.mean
        return float((shift * self.times(shift)).sum())

    @cached_property
    def log_volume(self) -> float:
        """log |precision of the contrasts|, as `Star.log_volume`."""
        Q = self.precision
        copies = self.classes // len(Q)
        return float(copies * sum(log_determinant(one) for one in Q) - log_determinant(copies * Q.sum(0)))


def star_prior(prior: Prior | Star, classes: int) -> StarPrior:
    """The prior of the contrasts: one Gaussian for each class, with the same covariance, or another star."""
    if isinstance(prior, Star):
        return StarPrior(prior.mean, prior.precision)
    mean = prior.mean if prior.mean.ndim == 2 else prior.mean.expand(classes, -1)
    return StarPrior(centred_classes(mean), prior.precision[None])


def star_divergence(q: Star, prior: StarPrior) -> float:
    """KL of the contrasts from their prior."""
    K, d = q.mean.shape
    curvature = prior.curvature(q.diagonal)
    # one factor, or one curvature, for all classes
    expected = q.expected(curvature if q.copies == 1 else curvature.sum(0, keepdim=True) / len(curvature))
    return 0.5 * (prior.distance(q.mean) + expected - (K - 1) * d + q.log_volume() - prior.log_volume)


def tied(precision: Tensor) -> Tensor:
    """P_k M⁻¹ P_k: what the common shift takes from each precision."""
    if precision.ndim == 2:
        return precision.square() / precision.sum(0)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(precision.sum(0)), precision, upper=False)
    return half.mT @ half


def solve_precisions(target: Tensor, start: Tensor, share: float = INNER_SHARE) -> Tensor:
    """P_k with P_k - P_k M⁻¹ P_k = A_k, by iterating P_k = A_k + P_k M⁻¹ P_k from `start`, with Anderson's mixtures.

    If two classes have most of the precision in a direction, plain iterations hardly change how they share it.
    """
    scale = (target if target.ndim == 2 else diagonals(target)).rsqrt()
    signs = np.random.default_rng(0).integers(0, 2, (target.shape[-1], INNER_PROBES)) * 2.0 - 1.0
    probes = scale[..., None] * torch.from_numpy(signs).to(target)

    def seen(change: Tensor) -> Tensor:
        scaled = change[..., None] * probes if change.ndim == 2 else change @ probes
        return (scaled * scale[..., None]).reshape(-1)

    P, mixing, first = start, ChangeMixing(INNER_MEMORY), math.inf
    for _ in range(INNER_STEPS):
        new = target + tied(P)
        residual = seen(new - P)
        moved = float(residual.abs().max())
        first = moved if math.isinf(first) else first
        if moved <= max(INNER_ERROR, share * first):
            return new
        weights = mixing.weights(residual, (new,))
        mixed = mixing.mixed(weights)[0]
        total = mixed.sum(0)  # the next P_k are positive if this is
        bad = (total <= 0).any() if total.ndim == 1 else torch.linalg.cholesky_ex(total)[1]
        P = new if bool(bad) else mixed
    return new


class ChangeMixing:
    """Anderson's mixture: the last proposals, weighted so that their residuals cancel."""

    def __init__(self, memory: int) -> None:
        self.past: deque[tuple[Tensor, tuple[Tensor, ...]]] = deque(maxlen=memory + 1)

    def weights(self, residual: Tensor, proposal: tuple[Tensor, ...]) -> list[float]:
        """Remember a proposal and return the weights of all that are remembered, latest first."""
        older = [other for other, _ in self.past]
        self.past.append((residual, proposal))
        plain = [1.0] + [0.0] * len(self.past)
        older = older[-(len(self.past) - 1) :] if len(self.past) > 1 else []
        if not older:
            return plain[:1]
        changes = residual - torch.stack(older)
        gamma = weights_from_gram((changes @ changes.T).cpu().numpy(), (changes @ residual).cpu().numpy())
        if gamma is None or not np.abs(gamma).sum() <= LARGEST_WEIGHTS:
            return plain[: len(self.past)]
        return [1.0 - float(gamma.sum()), *gamma.tolist()[::-1]]

    def mixed(self, weights: list[float]) -> tuple[Tensor, ...]:
        """The mixture of the proposals, part by part."""
        recent = list(self.past)[::-1]
        chosen = recent[: len(weights)]
        return tuple(weighted_sum(weights, parts) for parts in zip(*(parts for _, parts in chosen), strict=True))

    def share(self, weights: list[float]) -> float:
        """The share of the last residual's square that the mixture leaves."""
        recent = [residual for residual, _ in list(self.past)[::-1]]
        left = weighted_sum(weights, recent)
        return float(left @ left) / max(float(recent[0] @ recent[0]), 1e-300)
