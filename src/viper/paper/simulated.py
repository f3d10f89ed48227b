"""The data of the logistic regression study, as the authors' program draws them: the same seed gives the same rows.

Everything comes from torch's generator in the order of that program, including a draw it discards, so that each
published run can be compared with ours.
"""

import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Wishart

# "3" is what was run; "3-text" is the distribution that the paper's text describes.
SETTINGS = ("1", "2", "3", "3-text")


class Simulated(NamedTuple):
    """Rows X, labels y and the coefficients β₀ they come from."""

    X: np.ndarray
    y: np.ndarray
    beta: np.ndarray


def simulate(setting: str, n: int, p: int, seed: int) -> Simulated:
    """Rows x ~ N(0, C) with C by setting, β₀ uniform on ±[0.2, 2], y ~ Bernoulli(s(xᵀβ₀)).

    Parameters
    ----------
    setting : {"1", "2", "3", "3-text"}
        C = I; C_jk = 0.3^|j-k|; C = W/(p+5) with W ~ Wishart(p+5, I), as was run; C = W⁻¹ with W ~ Wishart(p+3, I), as
        the paper says.
    n, p, seed : int
        Number of rows, number of coefficients, and a seed. The state of torch's generator is restored.
    """
    if setting not in SETTINGS:
        raise ValueError(f"setting must be one of {list(SETTINGS)}; got {setting!r}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        X = draw_rows(setting, n, p)
        torch.rand(p, dtype=torch.double)  # the authors' program draws and discards these too
        beta = torch.cat([draw_coefficient() for _ in range(p)]).double()
        y = torch.bernoulli(torch.sigmoid(X @ beta))
    return Simulated(X.numpy(), y.numpy(), beta.numpy())


def draw_rows(setting: str, n: int, p: int) -> Tensor:
    if setting == "1":
        return torch.randn(n, p, dtype=torch.double)
    return MultivariateNormal(torch.zeros(p, dtype=torch.double), row_covariance(setting, p)).sample((n,))


def row_covariance(setting: str, p: int) -> Tensor:
    if setting == "2":
        j = torch.arange(p)
        return 0.3 ** (j[:, None] - j).abs().double()
    with warnings.catch_warnings(action="ignore"):  # torch warns of singular draws, and repeats them
        if setting == "3-text":
            return torch.linalg.inv(Wishart(torch.tensor(p + 3.0).double(), torch.eye(p).double()).sample())
        draw = Wishart(torch.tensor(p + 5.0), torch.eye(p)).sample((1,))
    return (draw[0] / (p + 5)).double()


def draw_coefficient() -> Tensor:
    """Uniform on [-2, -0.2] or [0.2, 2]."""
    return -1.8 * torch.rand(1) - 0.2 if float(torch.rand(1)) < 0.5 else 1.8 * torch.rand(1) + 0.2
