"""The contrasts of K classes as a Gaussian with any covariance, as pooling and robust covariances produce.

    β = μ + Rz,      z ~ N(0, I),      Σ_k R_k = 0,

where R_k are the rows of R of class k. Coefficients, contrasts and draws have exactly this covariance. At a row, the
centred f_k = xᵀβ_k have variances C_k = ‖R_kᵀx‖². Predictions use independent f_k whose centred values have the same
variances, as they do under a star:

    τ_k² = (C_k - Σ_j C_j / (K(K-1))) K/(K-2),      or 0 where that is negative.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from viper.inference.classes.posterior import LOG_TAU, StarPosterior
from viper.inference.classes.star import Star
from viper.inference.classes.sums import class_predictors, class_spreads
from viper.inference.problem import cholesky
from viper.inference.rows import Block, Matrix


def contrast_basis(classes: int) -> Tensor:
    """K × (K-1) with orthonormal columns whose sums are zero."""
    return torch.from_numpy(np.ascontiguousarray(scipy.linalg.helmert(classes).T))


def to_independent(classes: int) -> Tensor:
    """The matrix (K, K) that turns variances C of centred values into variances τ² of independent ones."""
    K = classes
    return (torch.eye(K, dtype=torch.float64) - 1.0 / (K * (K - 1.0))) * (K / (K - 2.0))


def uncentred_variances(centred: Tensor) -> Tensor:
    """τ² from C, both n × K."""
    return (centred @ to_independent(centred.shape[1]).to(centred)).clamp(min=0.0)


@dataclass(frozen=True)
class ContrastGaussian(StarPosterior):
    """N(μ, RRᵀ) for coefficients (K, d) that are centred over classes; R is (K, d, r)."""

    means: Tensor
    root: Tensor

    @classmethod
    def from_contrasts(cls, means: Tensor, root: Tensor) -> "ContrastGaussian":
        """Return the Gaussian whose contrasts in `contrast_basis`, stacked, have the covariance root rootᵀ."""
        K, d = means.shape
        basis = contrast_basis(K).to(root)
        return cls(means, torch.einsum("ka,adr->kdr", basis, root.unflatten(0, (K - 1, d))).contiguous())

    @cached_property
    def factor(self) -> Tensor:
        """F_k with Cov β_k = F_k F_kᵀ (K, d, d)."""
        return torch.linalg.qr(self.root.mT, mode="r").R.mT.contiguous()

    @property
    def variance(self) -> Tensor:
        return self.root.square().sum(2)

    def covariance(self) -> Tensor:
        flat = self.root.flatten(0, 1)
        return flat @ flat.T

    def contrast(self, baseline: int) -> tuple[Tensor, Tensor]:
        return self.means - self.means[baseline], (self.root - self.root[baseline]).square().sum(2)

    def spreads(self, design: Matrix) -> Tensor:
        """τ² of the rows of a matrix, n × K."""
        return uncentred_variances(class_spreads(design, self.factor))

    def latent(self, block: Block) -> tuple[Tensor, Tensor]:
        theta = class_predictors(block, self.means, None)[0]
        tau2 = self.spreads(block.design)
        if block.residual is not None:
            tau2 = tau2 + (block.residual if block.residual.ndim == 2 else block.residual[:, None])
        return theta, tau2

    def draw(self, noise: Tensor) -> Tensor:
        """Centred coefficients from standard normal noise, both (s, K, d). The noise of the last class is not used."""
        moved = noise[:, :-1].flatten(1) @ self.root.flatten(0, 1).T
        return self.means + moved.unflatten(1, self.means.shape)

    def log_density(self, draws: Tensor) -> Tensor:
        apart = (self.root[:-1] - self.root[-1]).flatten(0, 1)
        shift = (draws - draws[:, -1:] - self.means + self.means[-1])[:, :-1].flatten(1)
        z = torch.linalg.solve(apart, shift.T)
        return -0.5 * (z.square().sum(0) + len(z) * LOG_TAU) - torch.linalg.slogdet(apart).logabsdet

    @cached_property
    def star(self) -> Star:
        """A star whose centred coefficients have the same total variance over classes."""
        K = len(self.means)
        roots = (K / (K - 1.0)) ** 0.5 * self.factor
        inverse = torch.linalg.inv(roots)
        return Star(self.means, inverse.mT @ inverse)


def gaussian_of_contrasts(means: Tensor, covariance: Tensor) -> ContrastGaussian:
    """Return the Gaussian with this covariance (K d, K d) of the centred coefficients."""
    K, d = means.shape
    basis = torch.kron(contrast_basis(K), torch.eye(d, dtype=torch.float64)).to(covariance)
    root = cholesky(basis.T @ covariance @ basis)
    if root is None:
        raise ValueError("covariances must be positive definite; got one that is not. Standardise the features.")
    return ContrastGaussian.from_contrasts(means, root)
