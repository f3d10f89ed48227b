"""Networks with Gaussian weights throughout, trained without sampling: layers that pass on means and variances.

A linear layer of independent Gaussian weights maps independent units with means m and variances v to

    E = b + M m,      Var = s_b² + S² (m² + v) + M² v        (M, S: means and standard deviations of the weights),

exactly. ReLU, GELU and tanh have closed-form means and variances for Gaussian inputs, by the normal distribution
function, Owen's T and the expected sigmoid. Two things are approximated between layers: the units of a layer are
treated as Gaussian, which sums of many nearly are, and as independent, although they share the units before them. Given
the moments of the last layer, the loss is exact.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.nn.heads import checked_scale
from viper.nn.logits import GaussianLogits, LatentMoments, Targets, checked_count
from viper.softplus.expectation import expected_sigmoid
from viper.softplus.normal import SQRT_2PI, cdf, pdf

FIRST_SD = 0.05  # initial standard deviations, relative to those of the prior
LEAST_UNIT_VARIANCE = 1e-30  # replaces a variance of 0, relative to the unit's squared mean plus one
OWEN_NODES = 24  # Gauss-Legendre on [0, 1]: error below 1e-15 for every argument


def as_moments(x: Any) -> LatentMoments:
    """Units with their moments; those of a tensor have variance 0."""
    return x if isinstance(x, LatentMoments) else LatentMoments(x, torch.zeros_like(x))


class BayesianLinear(torch.nn.Module):
    """y = Wx + b with independent Gaussian weights; takes a tensor or moments, and returns moments.

    Parameters
    ----------
    in_features, out_features : int
        Widths.
    prior_scale : float, optional
        Prior standard deviation of the weights, by default √(2 / in_features), which keeps the variance of units from
        layer to layer.
    bias : bool, default True
        Whether there is a bias, with the prior N(0, 1).
    """

    def __init__(
        self, in_features: int, out_features: int, *, prior_scale: float | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        self.in_features = checked_count(in_features, "in_features")
        self.out_features = checked_count(out_features, "out_features")
        chosen = math.sqrt(2.0 / in_features) if prior_scale is None else checked_scale(prior_scale, "prior_scale")
        self.prior_scale = chosen
        reach = 1.0 / math.sqrt(in_features)
        self.mean = torch.nn.Parameter(torch.empty(out_features, in_features).uniform_(-reach, reach))
        self.log_sd = torch.nn.Parameter(torch.full((out_features, in_features), math.log(FIRST_SD * chosen)))
        self.bias_mean = torch.nn.Parameter(torch.empty(out_features).uniform_(-reach, reach)) if bias else None
        self.bias_log_sd = torch.nn.Parameter(torch.full((out_features,), math.log(FIRST_SD))) if bias else None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, prior_scale={self.prior_scale:g}"

    def forward(self, x: Any) -> LatentMoments:
        given = x.mean if isinstance(x, LatentMoments) else x
        if not isinstance(given, Tensor) or given.ndim == 0 or given.shape[-1] != self.in_features:
            got = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(x).__name__
            raise ValueError(f"the input must be a tensor with {self.in_features} columns, or moments; got {got}.")
        with torch.autocast(given.device.type, enabled=False):
            m, v = (part.to(self.mean.dtype) for part in as_moments(x))
            spread = (2.0 * self.log_sd).exp()
            mean, variance = m @ self.mean.T, (m.square() + v) @ spread.T + v @ self.mean.square().T
            if self.bias_mean is not None and self.bias_log_sd is not None:
                mean, variance = mean + self.bias_mean, variance + (2.0 * self.bias_log_sd).exp()
            return LatentMoments(mean, variance)

    def divergence(self) -> Tensor:
        """KL(q ‖ p) of weights and bias."""
        total = mean_field_divergence(self.mean, self.log_sd, self.prior_scale)
        if self.bias_mean is not None and self.bias_log_sd is not None:
            total = total + mean_field_divergence(self.bias_mean, self.bias_log_sd, 1.0)
        return total


def mean_field_divergence(mean: Tensor, log_sd: Tensor, prior_sd: float) -> Tensor:
    """Σ ½ [(m² + s²)/σ² - 1] - log(s/σ)."""
    ratio = log_sd - math.log(prior_sd)
    return (0.5 * ((mean / prior_sd).square() + (2.0 * ratio).exp() - 1.0) - ratio).sum()


# --- activations ---


class MomentReLU(torch.nn.Module):
    """Mean and variance of max(X, 0), in closed form."""

    def forward(self, x: Any) -> LatentMoments:
        return relu_moments(*as_moments(x))


class MomentGELU(torch.nn.Module):
    """Mean and variance of XΦ(X), in closed form up to Owen's T, whose quadrature errs by less than 1e-15."""

    def forward(self, x: Any) -> LatentMoments:
        return gelu_moments(*as_moments(x))


class MomentTanh(torch.nn.Module):
    """Mean and variance of tanh X = 2 s(2X) - 1, those of the sigmoid: to rounding."""

    def forward(self, x: Any) -> LatentMoments:
        mean, variance = as_moments(x)
        p, sd = expected_sigmoid(2.0 * mean, 4.0 * variance)
        return LatentMoments(2.0 * p - 1.0, 4.0 * sd.square())


def relu_moments(mean: Tensor, variance: Tensor) -> LatentMoments:
    """E max(X, 0) = max(ϑ, 0) + τ m and Var max(X, 0) = v (u - m²) below 0, v (1 - u - 2zm - m²) above.

    m = φ(z) - zΦ(-z) and u = (1 + z²)Φ(-z) - zφ(z), z = |ϑ|/τ, are the first two moments of max(Z - z, 0). No large
    terms cancel.
    """
    sd = (variance + LEAST_UNIT_VARIANCE * (1.0 + mean.square())).sqrt()
    z = mean.abs() / sd
    density, tail = pdf(z), cdf(-z)
    m, u = density - z * tail, (1.0 + z.square()) * tail - z * density
    share = torch.where(mean > 0.0, 1.0 - u - 2.0 * z * m, u) - m.square()
    return LatentMoments(mean.clamp(min=0.0) + sd * m.clamp(min=0.0), variance * share.clamp(0.0, 1.0))


def gelu_moments(mean: Tensor, variance: Tensor) -> LatentMoments:
    """E XΦ(X) = ϑΦ(a) + v φ(a)/√(1+v), and E X²Φ(X)² = (ϑ² + v) A + 2ϑvB + 2vC, with a = ϑ/√(1+v) and by Stein

        A = E Φ(X)² = Φ(a) - 2T(a, 1/√(1+2v)),      B = E Φ(X)φ(X) = φ(a)/√(1+v) Φ(b),      b = ϑ/√((1+v)(1+2v)),
        C = E XΦ(X)φ(X) = φ(a)/√(1+v) [ϑ/(1+v) Φ(b) + v/√((1+v)(1+2v)) φ(b)].

    Computed in float64, because the variance is a difference.
    """
    m, v = mean.double(), variance.double()
    one, two = 1.0 + v, 1.0 + 2.0 * v
    a, b = m * one.rsqrt(), m * (one * two).rsqrt()
    joint = pdf(a) * one.rsqrt()
    first = m * cdf(a) + v * joint
    both = cdf(a) - 2.0 * owens_t(a, two.rsqrt())
    B = joint * cdf(b)
    C = joint * (m / one * cdf(b) + v * (one * two).rsqrt() * pdf(b))
    second = (m.square() + v) * both + 2.0 * v * (m * B + C)
    return LatentMoments(first.to(mean), (second - first.square()).clamp(min=0.0).to(mean))


def owens_t(h: Tensor, a: Tensor) -> Tensor:
    """T(h, a) = 1/2π ∫_0^a exp(-h²(1+t²)/2)/(1+t²) dt for 0 <= a <= 1."""
    nodes, weights = (x.to(h).reshape(-1, *[1] * h.ndim) for x in unit_legendre())
    t = 1.0 + (nodes * a).square()
    return a / SQRT_2PI**2 * (weights * torch.exp(-0.5 * h.square() * t) / t).sum(0)


@cache
def unit_legendre() -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1]."""
    z, w = np.polynomial.legendre.leggauss(OWEN_NODES)
    return torch.from_numpy(0.5 * (z + 1.0)), torch.from_numpy(0.5 * w)


# --- networks ---


class BayesianNetwork(GaussianLogits):
    """Layers with Gaussian weights, one after the other: a classifier that is trained and predicts without sampling.

    Parameters
    ----------
    *layers : torch.nn.Module
        `BayesianLinear` and the activations of this module; ordinary layers may come first, and receive tensors. The
        last is a `BayesianLinear`.
    targets : {"classes", "labels"}, default "classes"
        Whether several outputs are classes (each row has one) or labels (a row may have any number).

    Notes
    -----
    Between layers, units are treated as Gaussian and independent; so are the logits of several classes. Given their
    means and variances, the loss is exact.

    Examples
    --------
    >>> import torch
    >>> from viper.nn import BayesianLinear, BayesianNetwork, MomentReLU
    >>> _ = torch.manual_seed(0)
    >>> network = BayesianNetwork(BayesianLinear(2, 50), MomentReLU(), BayesianLinear(50, 1))
    >>> x = torch.randn(200, 2)
    >>> y = (x.norm(dim=1) > 1.2).long()
    >>> optimiser = torch.optim.Adam(network.parameters(), lr=0.02)
    >>> for _ in range(300):
    ...     optimiser.zero_grad()
    ...     network.loss(x, y, n=200).backward()
    ...     _ = optimiser.step()
    >>> network.predict_proba(torch.tensor([[0.0, 0.0], [2.0, 2.0]]))[:, 0]
    tensor([0.1141, 0.9188])
    """

    def __init__(self, *layers: torch.nn.Module, targets: Targets = "classes") -> None:
        if not layers or not isinstance(layers[-1], BayesianLinear):
            got = type(layers[-1]).__name__ if layers else "none"
            raise ValueError(f"the last layer must be a BayesianLinear; got {got}. End with one for the logits.")
        super().__init__(layers[-1].out_features, targets)
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, features: Any) -> LatentMoments:
        for layer in self.layers:
            features = layer(features)
        return LatentMoments(*features)

    def divergence(self) -> Tensor:
        """The sum of the divergences of all Bayesian layers."""
        found = [layer.divergence() for layer in self.modules() if isinstance(layer, BayesianLinear)]
        return torch.stack(found).sum()
