"""What an answer would tell about f ~ N(ϑ, τ²): the mutual information of label and f, in nats and without sampling.

    information = H(E p) - E H(p),      p = s(f),      H(p) = -p log p - (1-p) log(1-p),

which is called BALD. The logistic function is a scale mixture, s(f) = Σ_j w_j Φ(f/σ_j), and so is its entropy, without
Φ: H(s(f)) = log(1+e^f) - f s(f) = Σ_j w_j σ_j² φ(f; 0, σ_j²). Their means have τ² added to the variances:

    E p = Σ_j w_j Φ(ϑ/d_j),      E H(p) = Σ_j w_j σ_j² φ(ϑ; 0, d_j²),      d_j² = σ_j² + τ².

For classes, with η, g and h of the expected log-sum-exp, Stein's identity gives E H(p) = η - Σ_k (ϑ_k g_k + τ_k² h_k).
"""

import math

import torch
from torch import Tensor

from viper.softplus.mixture_table import QUADRATURE
from viper.softplus.pointwise import Triple, blocked, over_terms, sum_terms

SHARE, SPREAD = (torch.tensor(x, dtype=torch.float64) for x in (QUADRATURE.weights, QUADRATURE.variances))
HALF_SHARE, TWICE_SPREAD, OF_ENTROPY = 0.5 * SHARE, 2.0 * SPREAD, SHARE * SPREAD / math.sqrt(math.pi)


def answer_information(mean: Tensor, variance: Tensor) -> Tensor:
    """Information of a yes or a no about its log-odds f ~ N(mean, variance), elementwise to 5e-14; differentiable."""
    return information_in_blocks(*torch.broadcast_tensors(mean, variance))[0]


def information_of_block(mean: Tensor, variance: Tensor) -> tuple[Tensor]:
    # 1/(√2 d_j), so that Φ(ϑ/d_j) = ½ + ½ erf(x_j)
    rate = torch.add(over_terms(TWICE_SPREAD, variance), variance, alpha=2.0).rsqrt()
    x = mean * rate
    given = sum_terms(OF_ENTROPY, rate * (-x * x).exp())
    p = (0.5 + sum_terms(HALF_SHARE, x.erf())).clamp(0.0, 1.0)
    return ((torch.special.entr(p) + torch.special.entr(1.0 - p) - given).clamp(min=0.0),)


information_in_blocks = blocked(information_of_block, 4 * len(HALF_SHARE))


def class_information(mean: Tensor, variance: Tensor, moments: Triple) -> Tensor:
    """Information of a class about f_k ~ N(mean_k, variance_k), the last axis, given η, g and h of the log-sum-exp."""
    value, slope, curvature = moments
    given = value - (mean * slope + variance * curvature).sum(-1)
    return (torch.special.entr(slope).sum(-1) - given).clamp(min=0.0)
