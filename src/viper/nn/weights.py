"""Gaussian weights of several outputs, as parameters: w_k ~ N(μ_k, S_k) for k = 1, ..., K, with d entries each.

    full        S_k = F_k F_kᵀ, F_k⁻¹ = U_k diag(1/s_k), U_k upper triangular with ones on its diagonal
    diagonal    S_k = diag(s_k²)
    low-rank    S_k⁻¹ = diag(s_k⁻¹) (I + W_k W_kᵀ) diag(s_k⁻¹), W_k of `rank` columns

Every entry but μ is free of units, so one learning rate suits all of them. The optimiser moves the inverse factor: if
its noise makes F_k too large, the loss rises at once. Under the prior N(0, D) the divergence is that of independent
Gaussians, or, for classes, that of their contrasts: Gaussians that are independent up to a common shift
(`inference.classes.star`).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from viper.inference.classes.star import Star
from viper.inference.problem import Gaussian

Covariance = Literal["full", "diagonal", "low-rank"]
HEAD_COVARIANCES: tuple[Covariance, ...] = ("full", "diagonal", "low-rank")
FIRST_SHARE = 0.1  # initial standard deviations, relative to those of the prior
FIRST_LOADING = 0.1  # at zero, loadings would have no gradient


class GaussianWeights(torch.nn.Module):
    """Means and covariances of K vectors of weights. The constructor draws means as `torch.nn.Linear` does."""

    def __init__(
        self, outputs: int, size: int, covariance: Covariance, rank: int, prior_sd: Tensor, shares_shift: bool
    ) -> None:
        super().__init__()
        self.covariance, self.rank, self.shares_shift = covariance, rank, shares_shift
        reach = 1.0 / math.sqrt(size)
        self.mean = torch.nn.Parameter(torch.empty(outputs, size).uniform_(-reach, reach))
        self.log_scale = torch.nn.Parameter((FIRST_SHARE * prior_sd).log().to(self.mean).repeat(outputs, 1))
        if covariance == "full":
            self.mixing = torch.nn.Parameter(torch.zeros(outputs, size, size))
        if covariance == "low-rank":
            first = torch.randn(outputs, size, rank) * (FIRST_LOADING / math.sqrt(size))
            self.loadings = torch.nn.Parameter(first)

    # --- their moments ---

    def factor(self, dtype: torch.dtype | None = None) -> Tensor:
        """F_k with S_k = F_k F_kᵀ, of the full family."""
        eye = torch.eye(self.mean.shape[1], dtype=dtype or self.mean.dtype, device=self.mean.device)
        unit = torch.linalg.solve_triangular(self.mixing.to(eye), eye, upper=True, unitriangular=True)
        return self.log_scale.to(eye).exp()[..., None] * unit

    def inverse_factor(self) -> Tensor:
        """F_k⁻¹, in float64."""
        mixing = self.mixing.double()
        unit = mixing.triu(1) + torch.eye(mixing.shape[-1], dtype=mixing.dtype, device=mixing.device)
        return unit * (-self.log_scale.double()).exp()[:, None]

    def root(self, dtype: torch.dtype | None = None) -> Tensor:
        """L_k with L_k L_kᵀ = I + W_kᵀ W_k, of the low-rank family."""
        W = self.loadings.to(dtype)
        return torch.linalg.cholesky(W.mT @ W + torch.eye(W.shape[-1], dtype=W.dtype, device=W.device))

    def latent_variance(self, x: Tensor) -> Tensor:
        """xᵀ S_k x for the rows of x (n, d), as (n, K)."""
        if self.covariance == "full":
            return (x @ self.factor()).square().sum(-1).T
        apart = x.square() @ (2.0 * self.log_scale).exp().T
        if self.covariance == "diagonal":
            return apart
        # Woodbury: |s∘x|² - |L⁻¹ Wᵀ (s∘x)|², which rounding may make negative
        inner = torch.linalg.solve_triangular(self.root(), self.loadings.mT, upper=False)
        inside = x @ (inner * self.log_scale.exp()[:, None]).mT
        least = torch.finfo(x.dtype).eps * apart
        return torch.maximum(apart - inside.square().sum(-1).T, least)

    def entry_variances(self) -> Tensor:
        """diag S_k (K, d), in float64."""
        variance = (2.0 * self.log_scale.double()).exp()
        if self.covariance == "full":
            return self.factor(torch.float64).square().sum(-1)
        if self.covariance == "diagonal":
            return variance
        inner = torch.linalg.solve_triangular(self.root(torch.float64), self.loadings.double().mT, upper=False)
        return variance * (1.0 - inner.square().sum(-2)).clamp(min=0.0)

    def log_volume(self) -> Tensor:
        """Σ_k log|S_k|."""
        apart = 2.0 * self.log_scale.double().sum()
        if self.covariance != "low-rank":
            return apart
        return apart - 2.0 * self.root(torch.float64).diagonal(dim1=-2, dim2=-1).log().sum()

    def log_total_precision(self) -> Tensor:
        """log |Σ_k S_k⁻¹|."""
        log_scale = self.log_scale.double()
        apart = torch.logsumexp(-2.0 * log_scale, 0)
        if self.covariance == "diagonal":
            return apart.sum()
        if self.covariance == "full":
            inverse = self.inverse_factor()
            stacked = inverse.reshape(-1, inverse.shape[-1])  # Σ_k F_k⁻ᵀ F_k⁻¹
            return 2.0 * torch.linalg.cholesky(stacked.T @ stacked).diagonal().log().sum()
        # diag(λ) + V Vᵀ with all loadings side by side, by whichever of the two matrices is smaller
        V = (self.loadings.double() / log_scale.exp()[..., None]).permute(1, 0, 2).reshape(len(apart), -1)
        V = V * (-0.5 * apart).exp()[:, None]
        inner = V.T @ V if V.shape[1] < V.shape[0] else V @ V.T
        inner = inner + torch.eye(len(inner), dtype=V.dtype, device=V.device)
        return apart.sum() + 2.0 * torch.linalg.cholesky(inner).diagonal().log().sum()

    def divergence_from(self, prior_sd: Tensor) -> Tensor:
        """KL from the prior N(0, diag(prior_sd²)) of every output, or from that of their contrasts."""
        (K, d), sd = self.mean.shape, prior_sd.double()
        mean, precision = self.mean.double(), sd.square().reciprocal()
        free = K - 1 if self.shares_shift else K
        if self.shares_shift:
            mean = mean - mean.mean(0)
        expected = (precision * (mean.square() + free / K * self.entry_variances())).sum()
        volume = 2.0 * free * sd.log().sum() - self.log_volume() - free * d
        if self.shares_shift:
            volume = volume - self.log_total_precision() + d * math.log(K)
        return 0.5 * (expected + volume)

    # --- to the solvers and back ---

    def to_star(self) -> Star:
        """The contrasts of all outputs, for the solvers."""
        mean = self.mean.detach().double()
        if self.covariance == "diagonal":
            return Star(mean - mean.mean(0), (-2.0 * self.log_scale.detach().double()).exp())
        inverse = self.inverse_factor().detach()
        return Star(mean - mean.mean(0), inverse.mT @ inverse)

    def to_gaussian(self, k: int) -> Gaussian:
        """The weights of one output, for the solvers."""
        mean = self.mean[k].detach().double()
        if self.covariance == "diagonal":
            return Gaussian(mean, (-2.0 * self.log_scale[k].detach().double()).exp())
        inverse = self.inverse_factor()[k].detach()
        return Gaussian(mean, inverse.T @ inverse, inverse.T.contiguous())

    @torch.no_grad()
    def assign(self, which: int | slice, mean: Tensor, factor: Tensor) -> None:
        """Set the weights of one output, or of several; factors as in `Gaussian.factor`: F, S = F Fᵀ, or variances."""
        self.mean[which] = mean.to(self.mean)
        if factor.ndim == mean.ndim:
            self.log_scale[which] = (0.5 * factor.log()).to(self.mean)
            return
        factor = upper_factor(factor)
        scale = factor.diagonal(dim1=-2, dim2=-1)
        self.log_scale[which] = scale.log().to(self.mean)
        self.mixing[which] = (inverse_upper(factor) * scale[..., None, :]).triu(1).to(self.mean)

    @torch.no_grad()
    def assign_loadings(self, which: int | slice, mean: Tensor, sd: Tensor, loadings: Tensor) -> None:
        """Set the weights in the low-rank family; fewer columns than `rank` leave the others zero."""
        self.mean[which], self.log_scale[which] = mean.to(self.mean), sd.log().to(self.mean)
        self.loadings[which] = 0.0
        self.loadings[which, ..., : loadings.shape[-1]] = loadings.to(self.mean)


def inverse_upper(factor: Tensor) -> Tensor:
    """F_k⁻¹ of upper triangular matrices."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor)
    return torch.linalg.solve_triangular(factor, eye, upper=True)


def upper_factor(factor: Tensor) -> Tensor:
    """Return upper triangular U_k, their diagonals positive, with U_k U_kᵀ = F_k F_kᵀ."""
    if factor.shape[-2] != factor.shape[-1] or bool(factor.tril(-1).any()):
        lower = torch.linalg.qr(factor.flip(-2).mT).R.mT  # JFFᵀJ = LLᵀ with the order J of rows reversed
        factor = lower.flip(-2, -1)
    return factor * factor.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
