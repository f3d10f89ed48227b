"""A logistic likelihood for your own GPyTorch models.

With f(x_i) ~ N(ϑ_i, τ_i²) under the variational distribution and y in {0, 1},

    E[log p(y_i | f_i)] = y_i ϑ_i - E[log(1+e^{f_i})],      log E[p(y_i | f_i)] = log E[s((2y_i-1) f_i)],

both in closed form: no quadrature, no samples. Both return one number per point, whatever the batch shape.
"""

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Bernoulli

from viper.softplus.bound_names import BoundName
from viper.softplus.bounds import bound_key
from viper.softplus.expectation import expected_sigmoid, expected_softplus


class LogitLikelihood(Likelihood):
    """p(y = 1 | f) = s(f) = 1/(1+e^{-f}), for any ApproximateGP, deep kernel or batch of independent outputs.

    Parameters
    ----------
    bound : {"viper", "pg", "mc", "quadrature"}, default "viper"
        Treatment of E[log(1+e^f)]: exact (default), or with `terms` the paper's η_l; Pólya-Gamma with its constants, so
        that the loss is an ELBO; Monte Carlo; quadrature.
    terms : int, optional
        Number of terms l of the paper's bound η_l. None is the limit.
    samples, nodes, random_state : int
        Options of the bounds "mc" and "quadrature".
    signed : bool, default False
        Whether targets are in {-1, 1} instead of {0, 1}.

    Examples
    --------
    >>> import torch
    >>> from gpytorch.distributions import MultivariateNormal
    >>> from viper.gp.likelihood import LogitLikelihood
    >>> f = MultivariateNormal(torch.tensor([1.0, -2.0]), torch.eye(2))
    >>> LogitLikelihood().expected_log_prob(torch.tensor([1.0, 0.0]), f)
    tensor([-0.4069, -0.1827])
    """

    has_analytic_marginal: bool = True

    def __init__(
        self,
        bound: BoundName = "viper",
        terms: int | None = None,
        *,
        samples: int = 1000,
        nodes: int = 64,
        random_state: int = 0,
        signed: bool = False,
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "bound": bound,
            "terms": terms,
            "samples": samples,
            "nodes": nodes,
            "random_state": random_state,
        }
        bound_key(**self.options, tolerance=None)  # raises if the options are incompatible
        self.signed = signed

    def _labels(self, observations: Tensor, like: Tensor) -> Tensor:
        """Targets as 0 and 1, checked."""
        y = observations.to(like)
        low = -1.0 if self.signed else 0.0
        if not bool(((y == low) | (y == 1.0)).all()):
            wrong = y[(y != low) & (y != 1.0)][0].item()
            hint = "" if self.signed or wrong != -1.0 else " Pass signed=True for targets in {-1, 1}."
            raise ValueError(f"targets must be {low:g} or 1; got {wrong:g}.{hint}")
        return (y + 1.0) / 2.0 if self.signed else y

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Bernoulli:
        """The distribution of y given values of f, as 0 and 1."""
        return Bernoulli(logits=function_samples)

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """E[log p(y | f)] of each point; a lower bound on it under bounds other than the exact one."""
        mean, variance = function_dist.mean, function_dist.variance
        y = self._labels(observations, mean)
        return y * mean - expected_softplus(mean, variance, **self.options).value

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """log E[p(y | f)] of each point, accurate even where the probability is tiny."""
        sign = 2.0 * self._labels(observations, function_dist.mean) - 1.0
        average = expected_sigmoid(sign * function_dist.mean, function_dist.variance).mean
        return average.clamp(min=torch.finfo(average.dtype).tiny).log()

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Bernoulli:
        """The distribution of y with f integrated out: Bernoulli with E[s(f)]."""
        return Bernoulli(probs=expected_sigmoid(function_dist.mean, function_dist.variance).mean)
