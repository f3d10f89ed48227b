"""Heads: the last layer of a network, with Gaussian weights.

A head sees the features of a body as rows of a design A with residual variance r, and has f_k = o_k + a·w_k with
w_k ~ N(μ_k, S_k): ϑ_k = o_k + A μ_k and τ_k² = r + diag(A S_k Aᵀ). Its loss trains body and head together by any
optimiser. Given the body, `fit` and `natural_step` use the solvers of logistic regression (`nn/solving.py`).
"""

import math
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from viper.errors import instead, shown
from viper.inference.problem import Prior
from viper.inference.rows import Block, Dense, RowSource, join_blocks
from viper.models.fitting import FittedPosterior
from viper.models.prior import LARGEST_SCALE, SMALLEST_SCALE, best_scales
from viper.nn.feature_rows import feature_rows, of_all_ranks
from viper.nn.logits import GaussianLogits, LatentMoments, Targets, checked_count, class_targets, label_targets
from viper.nn.solving import fitted_weights, take_natural_step, take_over
from viper.nn.weights import HEAD_COVARIANCES, Covariance, GaussianWeights

HEAD_RANK = 8


class HeadRows(NamedTuple):
    """Features as a head sees them: rows of A, and offsets o and residual variances r if there are any."""

    design: Tensor
    offset: Tensor | None = None
    residual: Tensor | None = None


class GaussianHead(GaussianLogits):
    """What all heads share: Gaussian weights `q`, and their training given the body."""

    q: GaussianWeights

    def __init__(
        self, in_features: int, out_features: int, targets: Targets, covariance: Covariance, rank: int
    ) -> None:
        super().__init__(out_features, targets)
        self.in_features = checked_count(in_features, "in_features")
        if covariance not in HEAD_COVARIANCES:
            raise ValueError(
                f"covariance must be 'full', 'diagonal' or 'low-rank'; got {shown(covariance)}. "
                f"{instead(str(covariance), HEAD_COVARIANCES)}"
            )
        self.covariance: Covariance = covariance
        self.rank = checked_count(rank, "rank", "Use covariance='diagonal' for rank 0.")

    def head_rows(self, features: Tensor) -> HeadRows:
        """Rows, offsets and residual variances of features (n, in_features), differentiable."""
        raise NotImplementedError

    def prior_sd(self) -> Tensor:
        """Prior standard deviations of the weights, the same for every output."""
        raise NotImplementedError

    def forward(self, features: Tensor) -> LatentMoments:
        features = self.checked_features(features)
        # autocast would round to half precision what is squared and added up
        with torch.autocast(features.device.type, enabled=False):
            flat = features.to(self.q.mean.dtype).reshape(-1, self.in_features)
            rows = self.head_rows(flat)
            mean, variance = rows.design @ self.q.mean.T, self.q.latent_variance(rows.design)
            mean = mean if rows.offset is None else mean + rows.offset
            variance = variance if rows.residual is None else variance + rows.residual[:, None]
            shape = (*features.shape[:-1], self.out_features)
            return LatentMoments(mean.reshape(shape), variance.reshape(shape))

    def divergence(self) -> Tensor:
        """KL(q ‖ p), computed in float64."""
        with torch.autocast(self.q.mean.device.type, enabled=False):
            return self.q.divergence_from(self.prior_sd()).to(self.q.mean)

    def checked_features(self, features: Tensor) -> Tensor:
        """Return the features. Raises unless they are finite and as wide as the head."""
        if not isinstance(features, Tensor) or not features.is_floating_point():
            kind = features.dtype if isinstance(features, Tensor) else type(features).__name__
            raise TypeError(f"features must be a tensor of floating-point numbers; got {kind}. Use torch.as_tensor.")
        if features.ndim == 0 or features.shape[-1] != self.in_features:
            raise ValueError(
                f"features must have {self.in_features} columns, the head's in_features; got shape "
                f"{tuple(features.shape)}. Pass the outputs of the last hidden layer."
            )
        if not torch.compiler.is_compiling() and not bool(features.isfinite().all()):
            raise ValueError(
                "features must be finite; got NaN or infinity. Check the inputs, or lower the learning rate of the "
                "body."
            )
        return features

    # --- given the body ---

    def as_block(self, features: Tensor, y: Tensor) -> Block:
        """Rows and targets in float64, for the solvers."""
        flat = self.checked_features(features.detach()).reshape(-1, self.in_features)
        rows = self.head_rows(flat.to(self.q.mean.dtype))
        like = rows.design.new_empty(len(flat), self.out_features)
        y = y.to(flat.device)
        if self.targets == "classes":
            label = class_targets(y.reshape(-1), like)
        else:
            label = label_targets(y.reshape(len(flat), -1) if self.out_features > 1 else y.reshape(-1), like).double()
            label = label[:, 0].contiguous() if self.out_features == 1 else label
        offset = None if rows.offset is None else rows.offset.double().expand(len(flat), -1).contiguous()
        if offset is not None and self.out_features == 1:
            offset = offset[:, 0].contiguous()
        residual = None if rows.residual is None else rows.residual.double()
        return Block(Dense(rows.design.double()), label, offset=offset, residual=residual)

    def gaussian_prior(self, sd: Tensor | None = None) -> Prior:
        """The prior for the solvers."""
        sd = (self.prior_sd() if sd is None else sd).detach().double().to(self.q.mean.device)
        return Prior(torch.zeros_like(sd), sd.square().reciprocal())

    @torch.no_grad()
    def natural_step(self, features: Tensor, y: Tensor, n: int, rate: float = 0.1) -> None:
        """Move q by one natural-gradient step on a batch, in closed form, while an optimiser trains the body.

        Parameters
        ----------
        features, y, n
            As for `loss`. With `torch.distributed`, every process passes its part of the batch and gets the same q.
        rate : float, default 0.1
            ρ, between 0 and 1. With all rows and rate 1 it is Newton's step; batches need smaller rates, which average
            over the last 1/rate batches.
        """
        checked_count(n, "n", "Pass the number of rows of the training set.")
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"rate must be above 0 and at most 1; got {rate}.")
        if self.covariance == "low-rank":
            raise ValueError(
                "natural_step needs covariance='full' or 'diagonal'; got 'low-rank', whose step has no closed form. "
                "Let the optimiser train the head, too, or call fit after training."
            )
        source = of_all_ranks(join_blocks([self.as_block(features, y)]))
        take_natural_step(self.q, source, self.gaussian_prior(), n / source.rows, rate)

    def fit(
        self, features: Any, y: Tensor | None = None, *, body: torch.nn.Module | None = None, verbose: Any = "auto"
    ) -> Self:
        """Set q to the posterior of the weights given a frozen body: the optimum of the ELBO, by Newton steps.

        Parameters
        ----------
        features : tensor (n, in_features), or DataLoader of pairs (inputs, y)
            A DataLoader must not shuffle. Features that do not fit in memory are computed again in every pass.
        y : tensor
            As for `loss`; left out with a DataLoader.
        body : torch.nn.Module, optional
            Computes the features from the inputs, in evaluation mode and without gradients.
        verbose : bool or "auto", default "auto"
            Whether to show progress. "auto" shows it on a terminal once a fit has taken two seconds.
        """
        self.solve(feature_rows(features, y, body, self.as_block), verbose)
        return self

    def solve(self, source: RowSource, verbose: Any) -> None:
        """Fit q to rows under the current prior."""
        take_over(self.q, fitted_weights(self.q, source, self.gaussian_prior(), verbose))


class LogitHead(GaussianHead):
    """A last layer with Gaussian weights: f_k = xᵀw_k + b_k, w_k ~ N(μ_k, S_k), for two classes, several, or labels.

    Trained by its exact ELBO, without a random number. On raw features it is `VariationalLogisticRegression`.

    Parameters
    ----------
    in_features : int
        Width of the last hidden layer.
    out_features : int, default 1
        Number of classes or labels; 1 for two classes, whose output is the log-odds of y = 1.
    prior_scale : float or "auto", default 1
        Prior standard deviation of the weights. "auto" makes it a parameter that the loss trains and `fit` chooses,
        both by maximising the ELBO.
    intercept_scale : float, default 10
        Prior standard deviation of the bias.
    bias : bool, default True
        Whether there is a bias.
    targets : {"classes", "labels"}, default "classes"
        Whether several outputs are classes (each row has one) or labels (a row may have any number).
    covariance : {"full", "diagonal", "low-rank"}, default "full"
        Covariance of the weights of one output: any matrix, a diagonal one, or the inverse of a diagonal plus a matrix
        of rank `rank`. Thousands of outputs need one of the latter two.
    rank : int, default 8
        Rank of covariance="low-rank".

    Attributes
    ----------
    q : GaussianWeights
        The weights, with the bias last: `q.mean` (out_features, in_features + 1), and the parameters of S_k.

    Notes
    -----
    The loss is exact for the chosen family. The weights of K classes are independent up to a common shift, which the
    softmax ignores; those of labels are independent.

    Examples
    --------
    >>> import torch
    >>> from viper.nn import LogitHead
    >>> x = torch.tensor([[-2.0], [-1.0], [0.5], [1.0], [3.0]])
    >>> y = torch.tensor([0, 0, 1, 0, 1])
    >>> head = LogitHead(1, prior_scale=2.0).fit(x, y)
    >>> head.predict_proba(torch.tensor([[2.0], [20.0]]))[:, 0]
    tensor([0.7735, 0.9589])
    """

    log_prior_scale: Tensor
    log_intercept_scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int = 1,
        *,
        prior_scale: float | str = 1.0,
        intercept_scale: float = 10.0,
        bias: bool = True,
        targets: Targets = "classes",
        covariance: Covariance = "full",
        rank: int = HEAD_RANK,
    ) -> None:
        super().__init__(in_features, out_features, targets, covariance, rank)
        self.has_bias = bias
        self.auto_scale = prior_scale == "auto"
        chosen = 1.0 if self.auto_scale else checked_scale(prior_scale, "prior_scale")
        first = torch.tensor(math.log(chosen), dtype=torch.float64)
        if self.auto_scale:
            self.log_prior_scale = torch.nn.Parameter(first)
        else:
            self.register_buffer("log_prior_scale", first)
        own = math.log(checked_scale(intercept_scale, "intercept_scale"))
        self.register_buffer("log_intercept_scale", torch.tensor(own, dtype=torch.float64))
        size = in_features + int(bias)
        shares_shift = self.targets == "classes"
        self.q = GaussianWeights(out_features, size, covariance, rank, self.prior_sd().detach(), shares_shift)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, targets={self.targets!r}, "
            f"covariance={self.covariance!r}, prior_scale={float(self.log_prior_scale.detach().exp()):g}"
        )

    def prior_sd(self) -> Tensor:
        own = self.log_prior_scale.exp().expand(self.in_features)
        return torch.cat([own, self.log_intercept_scale.exp()[None]]) if self.has_bias else own

    def head_rows(self, features: Tensor) -> HeadRows:
        if not self.has_bias:
            return HeadRows(features)
        return HeadRows(torch.cat([features, torch.ones_like(features[:, :1])], 1))

    def solve(self, source: RowSource, verbose: Any) -> None:
        """Fit q under the current prior, or under the best prior scale."""
        if not self.auto_scale:
            return super().solve(source, verbose)
        rest = self.prior_sd().detach().double().cpu()[self.in_features :]
        fits: list[Any] = []

        def solve(scale: Tensor, start: Any, last: bool) -> Any:
            prior = self.gaussian_prior(torch.cat([scale[: self.in_features], rest]))
            fits[:] = fitted_weights(self.q, source, prior, verbose, start)
            return fits[0] if len(fits) == 1 else self.side_by_side(fits)

        labels = 1 if self.targets == "classes" else self.out_features
        scale, _ = best_scales(solve, labels * self.in_features, separate=False)
        with torch.no_grad():
            self.log_prior_scale.copy_(scale[0].log())
        return take_over(self.q, fits)

    def side_by_side(self, fits: list[FittedPosterior]) -> tuple[Any, Any, Any, Any]:
        """Several labels as one fit to the search of the scale: the weights of all, and the sum of their ELBOs."""
        mean = torch.cat([fit.posterior.mean[: self.in_features] for fit in fits])
        variance = torch.cat([fit.posterior.variance[: self.in_features] for fit in fits])
        prior = SimpleNamespace(mean=torch.zeros_like(mean))
        result = SimpleNamespace(objective=sum(fit.result.objective for fit in fits), q=None)
        return SimpleNamespace(mean=mean, variance=variance), prior, SimpleNamespace(prior=None), result


def checked_scale(value: Any, name: str) -> float:
    """Return a prior standard deviation. Raises unless it is a positive number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        other = " or 'auto'" if name == "prior_scale" else ""
        raise ValueError(f"{name} must be a positive number{other}; got {shown(value)}.")
    return float(value)
