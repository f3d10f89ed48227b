"""Prior scales from the data: maximise the ELBO over them, with the posterior maximised inside.

G(σ) = max_q F(q; σ). By the envelope theorem its gradient is F's own at the inner optimum,

    ∂G/∂log σ_j = ((μ_j - m_j)² + Σ_jj)/σ_j² - 1,

summed over the coefficients that share a scale: all of them ("auto") or one each ("ard").
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from viper.posterior import Posterior
from viper.problem import Prior
from viper.solver import ConvergenceWarning, Gaussian, Problem, Result

SMALLEST, LARGEST = 1e-3, 1e3


class Fit(NamedTuple):
    """A posterior with the prior it belongs to and the solver's account of it."""

    posterior: Posterior
    prior: Prior
    problem: Problem
    result: Result


def best_scales(solve: Callable[[Tensor, Gaussian | None], Fit], size: int, separate: bool) -> tuple[Tensor, Fit]:
    """The scales of the first `size` coefficients that maximise the ELBO, and the fit there.

    `solve(scales, start)` fits the posterior under given scales, starting from a q.
    """
    warm: Gaussian | None = None

    def negative(log_scale: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal warm
        scale = expand(log_scale)
        posterior, prior, _, result = solve(scale, warm)
        warm = result.q
        second = (posterior.mean - prior.mean)[:size].square() + posterior.variance[:size]
        slope = (second.cpu() / scale.square() - 1.0).numpy()
        return -result.objective, -slope if separate else -slope.sum(keepdims=True)

    def expand(log_scale: np.ndarray) -> Tensor:
        return torch.from_numpy(np.exp(log_scale)).expand(size).clone()

    count = size if separate else 1
    bounds = [(np.log(SMALLEST), np.log(LARGEST))] * count
    options = {"maxiter": 200, "ftol": 1e-12, "gtol": 1e-6}
    with warnings.catch_warnings():
        # a scale far off, tried once on the way, may be hard to fit; the last fit below speaks for itself
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = scipy.optimize.minimize(
            negative, np.zeros(count), jac=True, method="L-BFGS-B", bounds=bounds, options=options
        )
    scale = expand(found.x)
    return scale, solve(scale, warm)
