"""Gaussian building blocks: density, distribution function, and expectations that split at zero.

Everything here is elementwise on tensors, follows the dtype and device it is given, and keeps *relative* accuracy in
the tails: quantities of size e^-700 carry as many correct digits as quantities of size one.
"""

import math

import torch
from torch import Tensor

SQRT_2 = math.sqrt(2.0)
SQRT_2PI = math.sqrt(2.0 * math.pi)


def pdf(z: Tensor) -> Tensor:
    """φ(z), the standard normal density."""
    return torch.exp(-0.5 * z * z) / SQRT_2PI


def cdf(z: Tensor) -> Tensor:
    """Φ(z), the standard normal distribution function."""
    return 0.5 * torch.erfc(-z / SQRT_2)  # torch.special.ndtr loses its digits below -10


def expected_relu(mean: Tensor, sd: Tensor) -> Tensor:
    """E[max(X, 0)] = τ φ(ϑ/τ) + ϑ Φ(ϑ/τ) for X ~ N(ϑ, τ²) with ϑ <= 0 and τ > 0.

    Written as τ φ(z) (1 - |z| R(|z|)) with Mills' ratio R(z) = Φ(-z)/φ(z) = √(π/2) erfcx(z/√2), which underflows only
    where the result does.
    """
    z = -mean / sd
    mills = math.sqrt(0.5 * math.pi) * torch.special.erfcx(z / SQRT_2)
    return sd * pdf(z) * (1.0 - z * mills)


def exponential_tails(mean: Tensor, sd: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """E[e^{kX}; X < 0] and E[e^{-kX}; X > 0] for X ~ N(ϑ, τ²) with ϑ <= 0, τ > 0 and k > 0.

    The two halves of Theorem 1's summand, P_k = E[e^{-k|X|}]. With z = |ϑ|/τ they are

        e^{kϑ + k²τ²/2} Φ(z - kτ)   and   ½ e^{-z²/2} erfcx((kτ + z)/√2).

    The first is the reflection of the second, ½ e^{-z²/2} erfcx((kτ - z)/√2), where kτ >= z; elsewhere erfcx would
    overflow and Φ(a) = 1 - Φ(-a) gives e^{kϑ + k²τ²/2} - ½ e^{-z²/2} erfcx((z - kτ)/√2), with a negative exponent.
    `k` broadcasts against `mean` and `sd`.
    """
    z = -mean / sd
    half_density = 0.5 * torch.exp(-0.5 * z * z)
    kt = k * sd
    above = half_density * torch.special.erfcx((kt + z) / SQRT_2)
    below = half_density * torch.special.erfcx((kt - z).abs() / SQRT_2)
    exponent = torch.clamp(k * mean + 0.5 * kt * kt, max=0.0)
    return torch.where(kt < z, torch.exp(exponent) - below, below), above
