"""What f ~ Σ_j π_j N(ϑ_j, τ_j²) says about two classes, without sampling: sums over components, and quantiles."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.inference.mixture.posterior import GaussianMixture, quantiles_of_mixtures
from viper.models.prediction import TargetReading, log_odds
from viper.softplus.information import answer_information
from viper.softplus.limit import limit


def mixture_reading(posterior: GaussianMixture) -> TargetReading:
    """How ϑ and τ² (rows × components) are read, given the weights of the components."""
    weights = posterior.weights
    return TargetReading(
        partial(mixed_probabilities, weights=weights),
        partial(mixed_sds, weights=weights),
        partial(mixed_interval, weights=weights),
        partial(mixed_scores, weights=weights),
        partial(more_probable, weights=weights),
        partial(mixed_table, weights=weights),
        partial(mixed_information, weights=weights),
        partial(mixed_moments, weights=weights),
    )


def mixed_probabilities(mean: Tensor, variance: Tensor, weights: Tensor) -> np.ndarray:
    """E s(-f) and E s(f)."""
    sides = [limit().moments(sign * mean, variance)[1] @ weights.to(mean) for sign in (-1.0, 1.0)]
    return torch.stack(sides, 1).cpu().numpy()


def mixed_sds(mean: Tensor, variance: Tensor, weights: Tensor) -> np.ndarray:
    """√(E s - E s' - (E s)²)."""
    _, g, h = limit().moments(mean, variance)
    share = weights.to(mean)
    return ((g - h) @ share - (g @ share).square()).clamp(min=0.0).sqrt().cpu().numpy()


def mixed_interval(mean: Tensor, variance: Tensor, z: float, weights: Tensor) -> np.ndarray:
    """Quantiles of s(f), which is monotone in f."""
    level = float(torch.special.ndtr(torch.tensor(z, dtype=torch.float64)) * 2.0 - 1.0)
    return torch.sigmoid(quantiles_of_mixtures(mean, variance.sqrt(), weights.to(mean), level)).cpu().numpy()


def mixed_scores(mean: Tensor, variance: Tensor, weights: Tensor) -> np.ndarray:
    """Log-odds of E s(f)."""
    return log_odds(mixed_probabilities(mean, variance, weights))


def more_probable(mean: Tensor, variance: Tensor, classes: np.ndarray, weights: Tensor) -> np.ndarray:
    """The class with the larger probability."""
    return classes[(mixed_probabilities(mean, variance, weights)[:, 1] > 0.5).astype(int)]


def mixed_table(mean: Tensor, variance: Tensor, classes: np.ndarray, z: float, weights: Tensor) -> dict[str, Any]:
    """The columns that are written to files."""
    p, ends = mixed_probabilities(mean, variance, weights)[:, 1], mixed_interval(mean, variance, z, weights)
    label = classes[(p > 0.5).astype(int)]
    sd = mixed_sds(mean, variance, weights)
    return {"label": label, "probability": p, "sd": sd, "lower": ends[:, 0], "upper": ends[:, 1]}


def mixed_information(mean: Tensor, variance: Tensor, weights: Tensor) -> np.ndarray:
    """H(E p) - Σ_j π_j E_j H(p): the information within components, and that between them."""
    share = weights.to(mean)
    within = answer_information(mean, variance) @ share
    g = limit().moments(mean, variance)[1]
    between = binary_entropy(g @ share) - binary_entropy(g) @ share
    return (within + between).clamp(min=0.0).cpu().numpy()


def binary_entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p) + torch.special.entr(1.0 - p)


def mixed_moments(mean: Tensor, variance: Tensor, weights: Tensor) -> np.ndarray:
    """Mean and standard deviation of f."""
    share = weights.to(mean)
    centre = mean @ share
    whole = (variance + (mean - centre[:, None]).square()) @ share
    return torch.stack([centre, whole.sqrt()], -1).cpu().numpy()
