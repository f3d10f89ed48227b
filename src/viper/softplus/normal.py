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
    return 0.5 * torch.erfc(-z / SQRT_2)  # torch.special.ndtr loses digits below -10


# (x + K) erfcx(x) by powers of t = (x - K)/(x + K), relative error 2e-16: derivations/erfcx.py
ERFCX_CENTRE = 3.25
# fmt: off
ERFCX = (
    1.0811797647743422, -0.9129949832951073, 0.6457337773843056, -0.3751649422636419, 0.17200591888557049,
    -0.05667521903649944, 0.009529321785568604, 0.0018073248058833949, -0.0014879109096115522, 0.0001593600878413444,
    0.00014751029817489133, -4.313757329467987e-05, -1.530854020175914e-05, 7.425454641696979e-06,
    2.010530172835351e-06, -1.1996921446083475e-06, -3.5216141385187315e-07, 1.8588683148831436e-07,
    7.097022254739322e-08, -2.457673754694876e-08, -1.2512837394243785e-08, 1.9761057445007267e-09,
    1.269585623316916e-09,
)
# fmt: on
_ERFCX_SCALARS = tuple(torch.tensor(c, dtype=torch.float64) for c in ERFCX)


def erfcx(x: Tensor) -> Tensor:
    """e^{x²} erfc(x) for x >= 0, by a polynomial: as accurate as torch's, and two to four times as fast."""
    inverse = (x + ERFCX_CENTRE).reciprocal_()
    t = (inverse * (-2.0 * ERFCX_CENTRE)).add_(1.0)
    total = torch.full_like(t, ERFCX[-1])
    one_pass = x.device.type == "cpu" and x.dtype == torch.float64 and not torch.compiler.is_compiling()
    for c, scalar in zip(ERFCX[-2::-1], _ERFCX_SCALARS[-2::-1], strict=True):
        total = torch.addcmul(scalar, total, t) if one_pass else total.mul_(t).add_(c)
    return total.mul_(inverse)


def difference(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of X₁ - X₂ from those of (X₁, X₂), on the last axes."""
    C = covariance
    variance = C[..., 0, 0] + C[..., 1, 1] - C[..., 0, 1] - C[..., 1, 0]
    return mean[..., 0] - mean[..., 1], variance.clamp(min=0.0)


def expected_relu(mean: Tensor, sd: Tensor) -> Tensor:
    """E[max(X, 0)] = τ φ(ϑ/τ) + ϑ Φ(ϑ/τ) for X ~ N(ϑ, τ²) with ϑ <= 0 and τ > 0.

    Written as τ φ(z) (1 - |z| R(|z|)) with Mills' ratio R(z) = Φ(-z)/φ(z) = √(π/2) erfcx(z/√2), which underflows only
    if the result does.
    """
    z = (-mean / sd).clamp(max=1e30)  # where φ(z) = 0 and z R(z) = 1
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
    kt, z = k * (sd / SQRT_2), z / SQRT_2
    above = erfcx(kt + z).mul_(half_density)
    gap = kt - z
    below = erfcx(gap.abs()).mul_(half_density)
    leading = torch.addcmul(k * mean, kt, kt).clamp_(max=0.0).exp_()
    return torch.where(gap < 0, leading - below, below), above
