"""Prior scales from the data: maximise the ELBO over them, with the posterior maximised inside.

G(σ) = max_q F(q; σ). By the envelope theorem its gradient is F's own at the inner optimum,

    ∂G/∂log σ_j = ((μ_j - m_j)² + Σ_jj)/σ_j² - 1,

summed over the coefficients that share a scale: all of them ("auto") or one each ("ard").
"""

import warnings
from collections.abc import Callable

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from viper.errors import ConvergenceWarning, users_line
from viper.inference.problem import Gaussian
from viper.models.fitting import Fit

SMALLEST, LARGEST = 1e-3, 1e3


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
    if float(scale.max()) > 0.999 * LARGEST or (not separate and float(scale.min()) < 1.001 * SMALLEST):
        warnings.warn(
            f"the best prior_scale must lie between {SMALLEST} and {LARGEST}; got an end of that range. "
            "Standardise the features.",
            stacklevel=users_line(),
        )
    return scale, solve(scale, warm)
