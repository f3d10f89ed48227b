"""Probabilities softmax(f) of K classes from f_k ~ N(ϑ_k, τ_k²), without sampling.

    E p_k,      Var p_k = E p_k - E p_k(1 - p_k) - (E p_k)²,      s(m_k ± z s_k),

all by the integrals of the expected log-sum-exp. The interval treats the log-odds of a class against all others,
f_k - log Σ_{j≠k} e^{f_j}, as normal, with their exact mean m_k and variance s_k².
"""

import numpy as np
import torch
from torch import Tensor

from viper.inference.classes.sums import EXACT_CLASSES
from viper.models.prediction import TargetReading, columns_by_class, means_and_sds
from viper.softplus.information import class_information
from viper.softplus.log_odds import log_odds_moments


def softmax_probabilities(mean: Tensor, variance: Tensor) -> np.ndarray:
    """E p of each class."""
    return EXACT_CLASSES(mean, variance)[1].cpu().numpy()


def softmax_sds(mean: Tensor, variance: Tensor) -> np.ndarray:
    """Standard deviations of p."""
    _, slope, curvature = EXACT_CLASSES(mean, variance)
    return (slope - curvature - slope.square()).clamp(min=0.0).sqrt().cpu().numpy()


def softmax_intervals(mean: Tensor, variance: Tensor, z: float) -> np.ndarray:
    """Lower and upper end for each class, n × K × 2."""
    centre, spread = log_odds_moments(mean, variance)
    reach = z * spread.sqrt()
    return torch.sigmoid(torch.stack([centre - reach, centre + reach], -1)).cpu().numpy()


def softmax_scores(mean: Tensor, variance: Tensor) -> np.ndarray:
    """log E p, less its mean over classes."""
    logs = np.log(np.maximum(softmax_probabilities(mean, variance), np.finfo(float).tiny))
    return logs - logs.mean(1, keepdims=True)


def probable_class(mean: Tensor, variance: Tensor, classes: np.ndarray) -> np.ndarray:
    """The most probable class."""
    return classes[softmax_probabilities(mean, variance).argmax(1)]


def softmax_table(mean: Tensor, variance: Tensor, classes: np.ndarray, z: float) -> dict[str, np.ndarray]:
    """`label`, and four columns for each class."""
    readings = softmax_probabilities, softmax_sds, softmax_intervals
    columns = columns_by_class(*readings, mean, variance, classes, z)
    return {"label": probable_class(mean, variance, classes), **columns}


def softmax_information(mean: Tensor, variance: Tensor) -> np.ndarray:
    """Mutual information of the class and f, in nats."""
    return class_information(mean, variance, EXACT_CLASSES(mean, variance)).cpu().numpy()


SOFTMAX_READING = TargetReading(
    softmax_probabilities,
    softmax_sds,
    softmax_intervals,
    softmax_scores,
    probable_class,
    softmax_table,
    softmax_information,
    means_and_sds,
)
