"""The bound of Jaakkola & Jordan (2000), identical to Pólya-Gamma: a quadratic in X, at its best t."""

import torch
from torch import Tensor

from viper.softplus.pointwise import Bound, Triple, blocked, polynomial


def jaakkola_jordan() -> Bound:
    """E[log(1+e^X)] <= ϑ/2 + log(2 cosh(t/2)) at its best t = √(ϑ²+v); a(t) = tanh(t/2)/(2t) is the curvature."""

    def radius_and_curvature(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.hypot(mean, variance.sqrt()).clamp(min=1e-150)
        return t, torch.tanh(0.5 * t) / (2.0 * t)

    def moments(mean: Tensor, variance: Tensor) -> Triple:
        t, a = radius_and_curvature(mean, variance)
        # ½(ϑ+t) without cancellation for ϑ < 0: (ϑ+t)(t-ϑ) = v
        half_sum = 0.5 * torch.where(mean < 0, variance / (t - mean), mean + t)
        return half_sum + torch.log1p(torch.exp(-t)), 0.5 + a * mean, a

    def partials(mean: Tensor, variance: Tensor) -> Triple:
        t, a = radius_and_curvature(mean, variance)
        # b = a'(t)/t = (1/(4 cosh²(t/2)) - a)/t², by its Taylor series below t = 0.1
        t2 = t * t
        far = (0.25 * (1.0 - torch.tanh(0.5 * t) ** 2) - a) / t2
        near = polynomial(JJ_SERIES, t2)
        b = torch.where(t < 0.1, near, far)
        return a + b * mean * mean, b * mean, 0.5 * b

    return Bound(blocked(moments, 8), blocked(partials, 8))


# tanh(t/2)/(2t) = Σ_n T_n t^{2n}: T = 1/4, -1/48, 1/480, -17/80640, 31/1451520, ...; b = Σ 2n T_n t^{2n-2}
JJ_SERIES = (-1 / 24, 1 / 120, -17 / 13440, 31 / 181440, -691 / 31933440)
