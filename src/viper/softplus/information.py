"""What an answer would tell about f ~ N(ϑ, τ²): the mutual information of label and f, in nats and without sampling.

With η, g and h of the expected softplus at (ϑ, τ²), Stein's identity gives E f s(f) = ϑ g + τ² h, so that

    information = H(E p) - E H(p) = H(g) - (η - ϑ g - τ² h),      H(g) = -g log g - (1-g) log(1-g),

which is called BALD. For classes, η, g and h are those of the expected log-sum-exp, and H is summed over classes.
"""

import torch
from torch import Tensor

from viper.softplus.expectation import expected_softplus
from viper.softplus.pointwise import Triple


def answer_information(mean: Tensor, variance: Tensor) -> Tensor:
    """Information of a yes or a no about its log-odds f ~ N(mean, variance), elementwise; differentiable."""
    value, slope, curvature = expected_softplus(mean, variance)
    entropy = torch.special.entr(slope) + torch.special.entr(1.0 - slope)
    return (entropy - value + mean * slope + variance * curvature).clamp(min=0.0)


def class_information(mean: Tensor, variance: Tensor, moments: Triple) -> Tensor:
    """Information of a class about f_k ~ N(mean_k, variance_k), the last axis, given η, g and h of the log-sum-exp."""
    value, slope, curvature = moments
    given = value - (mean * slope + variance * curvature).sum(-1)
    return (torch.special.entr(slope).sum(-1) - given).clamp(min=0.0)
