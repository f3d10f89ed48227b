"""Exact Gaussian-process regression of measurements, for experiments with tens of runs.

y_i = m + f(x_i) + e_i with a Matern-5/2 kernel, a lengthscale for each column, noise, and an unknown level m. y is
standardised, hyperparameters maximise the evidence with weakly informative priors, and predictions are of f + m.
"""

import math
from typing import NamedTuple

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from viper.gp.kernels import LEAST_SQUARE, LENGTH_SPREAD, TYPICAL_LENGTH, matern52_shape
from viper.softplus.normal import expected_relu

LEVEL_VARIANCE = 1.0  # of m, where y has variance 1
# Medians and spreads of the logarithms of output variance and noise variance
TYPICAL_OUTPUT, OUTPUT_SPREAD = 1.0, 1.0
TYPICAL_NOISE, NOISE_SPREAD = 0.01, 2.0
LEAST_NOISE = 1e-6  # so that K has a Cholesky factor where points repeat
STARTS = ((0.0, 0.0), (-0.7, -3.0), (0.7, 2.0))  # of the logs of lengthscales and noise, from their medians


class Moments(NamedTuple):
    """Mean and standard deviation of the objective at points."""

    mean: np.ndarray
    sd: np.ndarray


class GaussianRegression:
    """The posterior of a measured objective given rows X, n × p, and values y."""

    def __init__(self, X: np.ndarray, y: np.ndarray) -> None:
        self.X = torch.from_numpy(np.ascontiguousarray(X))
        spread = float(np.std(y))
        self.centre = float(np.mean(y))
        self.unit = spread or abs(self.centre) or 1.0  # equal measurements say nothing about their spread
        self.y = torch.from_numpy((np.asarray(y, dtype=float) - self.centre) / self.unit)
        p = X.shape[1]
        centre = [math.log(TYPICAL_LENGTH * math.sqrt(p))] * p + [math.log(TYPICAL_OUTPUT), math.log(TYPICAL_NOISE)]
        self.prior_mean = torch.tensor(centre, dtype=torch.float64)
        self.prior_sd = torch.tensor([LENGTH_SPREAD] * p + [OUTPUT_SPREAD, NOISE_SPREAD], dtype=torch.float64)
        self.theta = self.searched()
        self.root, self.weights = self.solved(self.theta)

    def kernel(self, theta: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """K of f + m."""
        length, output = theta[:-2].exp(), theta[-2].exp()
        square = ((x[:, None] - z) / length).square().sum(-1).clamp(min=LEAST_SQUARE)
        return output * matern52_shape(square)[0] + LEVEL_VARIANCE

    def solved(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """L with LLᵀ = K + σ² I, and its solution for y."""
        K = self.kernel(theta, self.X, self.X)
        noise = theta[-1].exp() + LEAST_NOISE
        root = torch.linalg.cholesky(K + noise * torch.eye(len(K), dtype=K.dtype))
        return root, torch.cholesky_solve(self.y[:, None], root)[:, 0]

    def loss(self, theta: Tensor) -> Tensor:
        """-log p(y | θ) p(θ), up to a constant."""
        root, weights = self.solved(theta)
        prior = ((theta - self.prior_mean) / self.prior_sd).square().sum()
        return 0.5 * self.y @ weights + root.diagonal().log().sum() + 0.5 * prior

    def searched(self) -> Tensor:
        def value_and_gradient(values: np.ndarray) -> tuple[float, np.ndarray]:
            theta = torch.tensor(values, requires_grad=True)
            loss = self.loss(theta)
            (slope,) = torch.autograd.grad(loss, theta)
            return float(loss.detach()), slope.numpy()

        low, high = (self.prior_mean - 5.0 * self.prior_sd).numpy(), (self.prior_mean + 5.0 * self.prior_sd).numpy()
        found = []
        for length, noise in STARTS:
            start = self.prior_mean.clone()
            start[:-2] += length
            start[-1] += noise
            found.append(
                scipy.optimize.minimize(
                    value_and_gradient,
                    start.numpy(),
                    jac=True,
                    method="L-BFGS-B",
                    bounds=list(zip(low, high, strict=True)),
                    options={"maxiter": 100},
                )
            )
        return torch.from_numpy(min(found, key=lambda one: float(one.fun)).x)

    def predict(self, Z: np.ndarray, pending: np.ndarray | None = None) -> Moments:
        """f + m at rows of Z. Pending rows count as measured, at what is expected there: the mean stays as it is."""
        z = torch.from_numpy(np.ascontiguousarray(Z))
        with torch.no_grad():
            across = self.kernel(self.theta, z, self.X)
            mean = across @ self.weights
            x, root = self.X, self.root
            if pending is not None and len(pending):
                x = torch.cat([x, torch.from_numpy(np.ascontiguousarray(pending))])
                K = self.kernel(self.theta, x, x)
                noise = self.theta[-1].exp() + LEAST_NOISE
                root = torch.linalg.cholesky(K + noise * torch.eye(len(K), dtype=K.dtype))
                across = self.kernel(self.theta, z, x)
            inner = torch.linalg.solve_triangular(root, across.T, upper=False)
            own = self.theta[-2].exp() + LEVEL_VARIANCE
            sd = (own - inner.square().sum(0)).clamp(min=0.0).sqrt()
        return Moments(self.centre + self.unit * mean.numpy(), self.unit * sd.numpy())


def expected_gain(moments: Moments, best: float) -> np.ndarray:
    """E max(f - best, 0), with relative accuracy where it is small."""
    mean, sd = (torch.from_numpy(x) for x in (moments.mean - best, np.maximum(moments.sd, 1e-300)))
    return (expected_relu(-mean.abs(), sd) + mean.clamp(min=0.0)).numpy()
