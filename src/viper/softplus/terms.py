"""How long the paper's series must be: l against the error of η_l."""

import torch
from torch import Tensor

from viper.softplus import normal
from viper.softplus.bounds import number
from viper.softplus.expectation import Array, read_gaussian
from viper.softplus.limit import TERM_COUNT, limit
from viper.softplus.series import accelerated_weights, positive_sd


def terms_needed(mean: Array, variance: Array, relative_error: float) -> Array:
    """The smallest l for which η_l is within `relative_error` of E[log(1+e^X)] (the paper's Figure 1(c)), elementwise.

    The error η_l - η = Σ_{k>=2l} (-1)^k E[e^{-k|X|}]/k is itself an alternating sum of moments, so it is evaluated
    directly (accelerated), never as a difference; it decreases in l, so l is found by bisection.

    Examples
    --------
    >>> import viper
    >>> viper.terms_needed(0.0, 0.01, 0.01)
    12
    """
    relative_error = number(relative_error, "relative_error", 1e-15, "0.01 for 1 %")
    (mean_, variance_), give_back = read_gaussian(mean, variance, integer=True)
    m, v = -mean_.detach().double().abs(), variance_.detach().double()
    target = relative_error * (limit().moments(m, v)[0] + mean_.detach().double().clamp(min=0.0))
    return give_back((smallest_terms(m, v, target),))[0]


def smallest_terms(mean: Tensor, variance: Tensor, target: Tensor) -> Tensor:
    """Bisect for the smallest l with η_l - η <= target, for mean <= 0."""
    low = torch.zeros_like(mean)  # too few
    high = torch.ones_like(mean)  # enough, once the doubling ends
    while bool((short := truncation_error(mean, variance, high) > target).any()) and float(high.max()) < 2.0**52:
        low, high = torch.where(short, high, low), torch.where(short, 2 * high, high)
    while bool((high - low > 1).any()):
        middle = torch.floor((low + high) / 2)
        short = truncation_error(mean, variance, middle) > target
        wide = high - low > 1
        low, high = torch.where(short & wide, middle, low), torch.where(~short & wide, middle, high)
    return high.to(torch.int64)


def truncation_error(mean: Tensor, variance: Tensor, terms: Tensor) -> Tensor:
    """η_l - η = Σ_{j>=0} (-1)^j a_{2l+j}, a_k = E[e^{-k|X|}]/k, for mean <= 0 and l given elementwise."""
    weights = accelerated_weights(TERM_COUNT)
    sd = positive_sd(variance)
    total = torch.zeros_like(mean)
    for j, w in enumerate(weights.tolist()):
        k = 2.0 * terms + j
        below, above = normal.exponential_tails(mean, sd, k)
        total = total + w * (below + above) / k
    return total
