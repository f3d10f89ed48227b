"""Logistic, softmax and ordinal likelihoods for your own GPyTorch models.

With f(x_i) ~ N(ϑ_i, τ_i²) under the variational distribution and y in {0, 1},

    E[log p(y_i | f_i)] = y_i ϑ_i - E[log(1+e^{f_i})],      log E[p(y_i | f_i)] = log E[s((2y_i-1) f_i)],

both in closed form: no quadrature, no samples. Both return one number per point, whatever the batch shape. For K
classes and independent f_k(x_i), the expectations are E log Σ_k e^{f_k} and E softmax_k, which are integrals over one
dimension (`viper.softplus.logsumexp`). For ordered levels, each point takes two softplus terms.
"""

from typing import Any

import torch
from gpytorch import likelihoods
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from viper.inference.ordinal.gaps import level_shares
from viper.softplus.bound_names import BoundName
from viper.softplus.bounds import bound_key
from viper.softplus.expectation import expected_sigmoid, expected_softplus
from viper.softplus.logsumexp import DEFAULT_TOLERANCE, checked_tolerance, expected_logsumexp


class LogitLikelihood(Likelihood):
    """p(y = 1 | f) = s(f) = 1/(1+e^{-f}), for any ApproximateGP, deep kernel or batch of independent outputs.

    Parameters
    ----------
    bound : {"viper", "pg", "mc", "quadrature"}, default "viper"
        Treatment of E[log(1+e^f)]: exact (default), or with `terms` the paper's η_l; Pólya-Gamma with its constants, so
        the loss is an ELBO; Monte Carlo; quadrature.
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
        """Check targets, and return them as 0 and 1."""
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


class SoftmaxLikelihood(likelihoods.SoftmaxLikelihood):
    """p(y = k | f) ∝ e^{f_k}: GPyTorch's softmax likelihood, with exact expectations in place of samples.

    f is a MultitaskMultivariateNormal with one task per class, as `IndependentMultitaskVariationalStrategy` returns it,
    and y has the numbers 0, ..., K-1. As in GPyTorch's own training, the tasks at a point count as independent.

    Parameters
    ----------
    num_features : int, optional
        Number of tasks. Required with mixing weights; without them, it equals the number of classes.
    num_classes : int
        K.
    mixing_weights : bool, default True
        Whether to learn a matrix W with logits W f. Mixed classes are correlated: E[log p(y | f)] is then exact for two
        classes and a lower bound for more, and predictions treat classes as independent, with variances that reproduce
        those of the differences f_j - f_k as closely as possible.
    mixing_weights_prior : gpytorch.priors.Prior, optional
        Prior of W.
    tolerance : float, default 1e-10
        Largest absolute error of an expectation; see `viper.expected_logsumexp`.

    Examples
    --------
    >>> import torch
    >>> from gpytorch.distributions import MultitaskMultivariateNormal
    >>> from viper.gp.likelihood import SoftmaxLikelihood
    >>> f = MultitaskMultivariateNormal(torch.tensor([[1.0, 0.0, -1.0]]), torch.eye(3))
    >>> likelihood = SoftmaxLikelihood(num_classes=3, mixing_weights=False)
    >>> likelihood.expected_log_prob(torch.tensor([0]), f)
    tensor([-0.6375])
    >>> likelihood(f).probs
    tensor([[0.5960, 0.2814, 0.1226]])
    """

    has_analytic_marginal: bool = True

    def __init__(
        self,
        num_features: int | None = None,
        num_classes: int | None = None,
        mixing_weights: bool = True,
        mixing_weights_prior: Prior | None = None,
        *,
        tolerance: float = DEFAULT_TOLERANCE,
    ) -> None:
        if num_classes is None or int(num_classes) < 2:
            raise ValueError(f"num_classes must be at least 2; got {num_classes}.")
        if mixing_weights and num_features is None:
            raise ValueError("mixing weights need num_features; got None. Pass it, or mixing_weights=False.")
        super().__init__(num_features, num_classes, mixing_weights, mixing_weights_prior)
        self.tolerance = checked_tolerance(tolerance)

    def __call__(self, input: Any, *args: Any, **kwargs: Any) -> Categorical:
        return Likelihood.__call__(self, input, *args, **kwargs)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Categorical:
        """The distribution of y given values of f, whose last axis holds the tasks."""
        return Categorical(logits=self._mixed(function_samples))

    def _mixed(self, f: Tensor) -> Tensor:
        """W f, with the number of tasks checked."""
        if f.shape[-1] != self.num_features:
            raise ValueError(
                f"f must have {self.num_features} tasks on its last axis; got shape {tuple(f.shape)}. Wrap the "
                "variational strategy in IndependentMultitaskVariationalStrategy, with this num_tasks."
            )
        return f if self.mixing_weights is None else f @ self.mixing_weights.mT

    def _classes(self, function_dist: MultitaskMultivariateNormal, certain: bool) -> tuple[Tensor, Tensor]:
        """Means and variances of independent classes; if `certain`, they bound E log Σ e^{f_k} from above."""
        if isinstance(function_dist, MultivariateNormal) and len(function_dist.event_shape) != 2:
            raise ValueError(
                f"f must be a MultitaskMultivariateNormal; got {type(function_dist).__name__}. Wrap the variational "
                "strategy in IndependentMultitaskVariationalStrategy."
            )
        mean, variance = self._mixed(function_dist.mean), function_dist.variance
        if self.mixing_weights is not None:
            W = self.mixing_weights
            variance = independent_variances((W * variance[..., None, :]) @ W.mT, certain)
        return mean, variance.clamp(min=0.0)

    def _numbers(self, observations: Tensor, like: Tensor) -> Tensor:
        """Check targets, and return them as integers."""
        y = observations.to(like.device).long()
        if not bool(((y == observations.to(like.device)) & (y >= 0) & (y < self.num_classes)).all()):
            got = f"{observations.min().item():g} to {observations.max().item():g}"
            raise ValueError(f"targets must be whole numbers from 0 to {self.num_classes - 1}; got {got}.")
        return y.expand(like.shape[:-1])[..., None]

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultitaskMultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """E[log p(y | f)] of each point; with mixing weights and more than two classes, a lower bound on it."""
        mean, variance = self._classes(function_dist, certain=True)
        chosen = mean.gather(-1, self._numbers(observations, mean))[..., 0]
        return chosen - expected_logsumexp(mean, variance, tolerance=self.tolerance).value

    def log_marginal(
        self, observations: Tensor, function_dist: MultitaskMultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """log E[p(y | f)] of each point."""
        average = self._average(function_dist)
        chosen = average.gather(-1, self._numbers(observations, average))[..., 0]
        return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()

    def marginal(self, function_dist: MultitaskMultivariateNormal, *args: Any, **kwargs: Any) -> Categorical:
        """The distribution of y with f integrated out: Categorical with E[softmax(f)]."""
        return Categorical(probs=self._average(function_dist))

    def _average(self, function_dist: MultitaskMultivariateNormal) -> Tensor:
        return expected_logsumexp(*self._classes(function_dist, certain=False), tolerance=self.tolerance).slope


class OrdinalLikelihood(Likelihood):
    """P(y ≤ k | f) = s(t_k - f), for levels 0, …, K-1 with thresholds t_0 < … < t_{K-2} that are learned.

    For a level between thresholds a < b, p(y | f) = s(b-f) s(f-a) (1 - e^{a-b}), so E[log p(y | f)] is two expected
    softplus terms and a constant: exact, without quadrature. With two levels and the threshold 0 it is
    `LogitLikelihood`.

    Parameters
    ----------
    num_levels : int
        K.
    thresholds : sequence of K-1 increasing numbers, optional
        Initial values. By default, all levels are equally probable at f = 0.
    learn : bool, default True
        Whether training changes the thresholds. They stay in order.

    Examples
    --------
    >>> import torch
    >>> from gpytorch.distributions import MultivariateNormal
    >>> from viper.gp.likelihood import OrdinalLikelihood
    >>> f = MultivariateNormal(torch.tensor([1.0, -2.0]), torch.eye(2))
    >>> likelihood = OrdinalLikelihood(3, thresholds=[-1.0, 1.0], learn=False)
    >>> likelihood.expected_log_prob(torch.tensor([2, 0]), f)
    tensor([-0.8061, -0.4069])
    >>> likelihood(f).probs
    tensor([[0.1555, 0.3445, 0.5000],
            [0.6967, 0.2339, 0.0693]])
    """

    has_analytic_marginal: bool = True

    def __init__(self, num_levels: int, thresholds: Any = None, *, learn: bool = True) -> None:
        super().__init__()
        if not isinstance(num_levels, int) or num_levels < 2:
            raise ValueError(f"num_levels must be a whole number from 2 on; got {num_levels!r}.")
        start = torch.logit(torch.arange(1, num_levels) / num_levels)
        if thresholds is not None:
            given = torch.as_tensor(thresholds).detach()
            start = (given if given.is_floating_point() else given.to(torch.get_default_dtype())).clone()
        if start.shape != (num_levels - 1,) or not bool(start.isfinite().all()) or not bool((start.diff() > 0).all()):
            raise ValueError(f"thresholds must be {num_levels - 1} increasing numbers; got {thresholds!r}.")
        self.num_levels = num_levels
        self.register_parameter("first_threshold", torch.nn.Parameter(start[:1], requires_grad=learn))
        self.register_parameter("log_gaps", torch.nn.Parameter(start.diff().log(), requires_grad=learn))

    @property
    def thresholds(self) -> Tensor:
        """t_0 < … < t_{K-2}."""
        gaps = torch.cat([torch.zeros_like(self.first_threshold), self.log_gaps.exp()])
        return self.first_threshold + gaps.cumsum(0)

    def _levels(self, observations: Tensor, like: Tensor) -> Tensor:
        """Check targets, and return them as integers."""
        given = observations.to(like.device)
        y = given.long()
        if not bool(((y == given) & (y >= 0) & (y < self.num_levels)).all()):
            got = f"{observations.min().item():g} to {observations.max().item():g}"
            raise ValueError(f"targets must be whole numbers from 0 to {self.num_levels - 1}; got {got}.")
        return y.expand(like.shape)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Categorical:
        """The distribution of y given values of f."""
        f = function_samples[..., None] - self.thresholds.to(function_samples)
        return Categorical(probs=level_shares(torch.sigmoid(-f), torch.sigmoid(f)))

    def expected_log_prob(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """E[log p(y | f)] of each point."""
        mean, variance = function_dist.mean, function_dist.variance
        y, t = self._levels(observations, mean), self.thresholds.to(mean)
        last = self.num_levels - 1
        below = -expected_softplus(mean - t[y.clamp(max=last - 1)], variance).value  # E log s(t_k - f)
        above = -expected_softplus(t[(y - 1).clamp(min=0)] - mean, variance).value  # E log s(f - t_{k-1})
        total = torch.where(y < last, below, 0.0) + torch.where(y > 0, above, 0.0)
        if last == 1:
            return total
        constant = torch.log(-torch.expm1(-self.log_gaps.exp())).to(mean)[(y - 1).clamp(0, last - 2)]
        return total + torch.where((y > 0) & (y < last), constant, 0.0)

    def log_marginal(
        self, observations: Tensor, function_dist: MultivariateNormal, *args: Any, **kwargs: Any
    ) -> Tensor:
        """log E[p(y | f)] of each point."""
        average = self._average(function_dist)
        chosen = average.gather(-1, self._levels(observations, function_dist.mean)[..., None])[..., 0]
        return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log()

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Categorical:
        """The distribution of y with f integrated out."""
        return Categorical(probs=self._average(function_dist))

    def _average(self, function_dist: MultivariateNormal) -> Tensor:
        f = function_dist.mean[..., None] - self.thresholds.to(function_dist.mean)
        variance = function_dist.variance[..., None].expand_as(f)
        return level_shares(expected_sigmoid(-f, variance).mean, expected_sigmoid(f, variance).mean)


def independent_variances(covariance: Tensor, certain: bool) -> Tensor:
    """v with v_j + v_k ≈ Var(f_j - f_k) for f ~ N(m, C), by least squares; if `certain`, raised until none is below.

    Softmax depends on differences only, so C may become C + a1ᵀ + 1aᵀ. E log Σ e^{f_k} falls with every covariance,
    because its second derivatives -p_j p_k are negative (Slepian). So it is at most its value for independent f_k with
    variances C_kk + 2a_k, if no covariance C_jk + a_j + a_k is negative. For two classes both choices of v are exact.
    """
    K = covariance.shape[-1]
    own = covariance.diagonal(dim1=-2, dim2=-1)
    sums = covariance.sum(-1) - own
    if K == 2:
        return (0.5 * (own - sums).sum(-1, keepdim=True)).expand_as(own)
    a = -(sums - sums.sum(-1, keepdim=True) / (2 * (K - 1))) / (K - 2)
    if certain:
        missing = -covariance - a[..., None] - a[..., None, :]
        among = ~torch.eye(K, dtype=torch.bool, device=a.device)
        a = a + 0.5 * torch.where(among, missing, 0.0).amax(-1)
    return own + 2.0 * a
