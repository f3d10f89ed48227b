"""Bayesian neural networks without sampling: heads with exact losses, and layers that propagate moments."""

from viper.nn.heads import LogitHead
from viper.nn.layers import BayesianLinear, BayesianNetwork, MomentGELU, MomentReLU, MomentTanh
from viper.nn.logits import LatentMoments
from viper.nn.process import GaussianProcessHead

__all__ = [
    "BayesianLinear",
    "BayesianNetwork",
    "GaussianProcessHead",
    "LatentMoments",
    "LogitHead",
    "MomentGELU",
    "MomentReLU",
    "MomentTanh",
]
