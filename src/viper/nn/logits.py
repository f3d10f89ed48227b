"""What Gaussian logits say about the targets: loss, probabilities, their spread, and the information in a label.

A network ends in independent f_k ~ N(ϑ_k, τ_k²), one for each output (for classes, up to a common shift). With the
expected softplus, or the expected log-sum-exp, and their derivatives η, g and h,

    labels:    E log p(y | f) = Σ_l (y_l ϑ_l - η_l)      E p_l = g_l      E p_l² = g_l - h_l
    classes:   E log p(y | f) = ϑ_y - η                  E p_k = g_k      E p_k² = g_k - h_k

and by Stein's identity E f_k p_k = ϑ_k g_k + τ_k² h_k, so that the expected entropy is η - Σ_k (ϑ_k g_k + τ_k² h_k), in
both cases. Nothing is sampled.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from viper.errors import instead, shown
from viper.softplus.expectation import expected_sigmoid, expected_softplus
from viper.softplus.information import answer_information, class_information
from viper.softplus.logsumexp import expected_logsumexp

Targets = Literal["classes", "labels"]
Targeted = TypeVar("Targeted", bound=Callable[..., Any])
SINGLE_TOLERANCE, DOUBLE_TOLERANCE = 1e-7, 1e-10  # errors of the log-sum-exp, for float32 and float64
SOFTPLUS_TOLERANCE = 1e-8  # for float32: less than its rounding, and three times as fast as exact


class LatentMoments(NamedTuple):
    """Means and variances of independent Gaussians, of one shape."""

    mean: Tensor
    variance: Tensor


class GaussianLogits(torch.nn.Module):
    """A network whose outputs are Gaussian logits; `forward` returns their moments, `divergence` the KL of its weights.

    A single output is a label: the log-odds of y = 1. Several are the logits of as many classes, or labels that are
    independent given the features. Every result has one column for each output.
    """

    def __init__(self, out_features: int, targets: Targets) -> None:
        super().__init__()
        self.out_features = checked_count(out_features, "out_features")
        if targets not in ("classes", "labels"):
            raise ValueError(
                f"targets must be 'classes' or 'labels'; got {shown(targets)}. "
                f"{instead(str(targets), ('classes', 'labels'))}"
            )
        self.targets: Targets = "labels" if out_features == 1 else targets

    def forward(self, features: Any) -> LatentMoments:
        """Means and variances of the logits, with a column for each output."""
        raise NotImplementedError

    def divergence(self) -> Tensor:
        """KL(q ‖ p) of the weights from their prior."""
        raise NotImplementedError

    def expected_log_likelihood(self, features: Tensor, y: Tensor) -> Tensor:
        """E_q log p(y_i | f_i) of each row, exact; summed over labels."""
        mean, variance = self(features)
        if self.targets == "labels":
            y = label_targets(y, mean)
            tolerance = None if mean.dtype == torch.float64 else SOFTPLUS_TOLERANCE
            return (y * mean - expected_softplus(mean, variance, tolerance=tolerance).value).sum(-1)
        y = class_targets(y, mean)
        return mean.gather(-1, y[..., None])[..., 0] - softmax_moments(mean, variance)[0]

    def loss(self, features: Tensor, y: Tensor, n: int) -> Tensor:
        """-ELBO / n = -mean of E log p(y_i | f_i) over the batch + KL / n: exact, without sampling.

        Parameters
        ----------
        features : tensor (batch, in_features)
            The last hidden layer, with its graph; the gradient flows into the body.
        y : tensor
            Classes as whole numbers 0, ..., out_features - 1, of shape (batch,); labels as 0 and 1, or shares between
            them, of shape (batch, out_features). A single output takes either shape.
        n : int
            Number of rows of the whole training set, not of the batch.
        """
        checked_count(n, "n", "Pass the number of rows of the training set.")
        return self.divergence() / n - self.expected_log_likelihood(features, y).mean()

    @torch.no_grad()
    def predict_proba(self, features: Tensor) -> Tensor:
        """E p of each class, or of each label, with the weights integrated out."""
        mean, variance = self(features)
        if self.targets == "labels":
            return expected_sigmoid(mean, variance).mean
        return softmax_moments(mean, variance)[1]

    @torch.no_grad()
    def predict_std(self, features: Tensor) -> Tensor:
        """Standard deviation of each probability: how uncertain p itself is."""
        mean, variance = self(features)
        if self.targets == "labels":
            return expected_sigmoid(mean, variance).std
        _, slope, curvature = softmax_moments(mean.double(), variance.double())
        return (slope - curvature - slope.square()).clamp(min=0.0).sqrt().to(mean)

    @torch.no_grad()
    def information(self, features: Tensor) -> Tensor:
        """Mutual information of label and weights in nats (BALD): H(E p) - E H(p), summed over labels; in closed form.

        This is what observing the row's label would tell about the weights. The error is below 1e-9.
        """
        mean, variance = (x.double() for x in self(features))
        if self.targets == "labels":
            return answer_information(mean, variance).sum(-1)
        return class_information(mean, variance, softmax_moments(mean, variance))


def softmax_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """η, g and h of the expected log-sum-exp, to the accuracy of the dtype; in compiled code only η has a gradient."""
    if torch.compiler.is_compiling():
        return graph_moments(mean, variance)
    tolerance = DOUBLE_TOLERANCE if mean.dtype == torch.float64 else SINGLE_TOLERANCE
    return expected_logsumexp(mean, variance, tolerance=tolerance)[:3]


@torch.library.custom_op("viper::softmax_moments", mutates_args=())  # its nodes depend on the values
def graph_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`softmax_moments` as one node of a graph."""
    return softmax_moments(mean, variance)


@graph_moments.register_fake
def shapes_of_moments(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes, which compiled code needs before it runs."""
    return mean.new_empty(mean.shape[:-1]), torch.empty_like(mean), torch.empty_like(mean)


def keep_moments(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[1:])


def pull_value(ctx: Any, to_value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """dη = g · dϑ + ½ h · dτ²."""
    slope, curvature = ctx.saved_tensors
    return to_value[..., None] * slope, 0.5 * to_value[..., None] * curvature


graph_moments.register_autograd(pull_value, setup_context=keep_moments)


# --- reading the arguments ---


def checked_count(value: Any, name: str, fix: str = "") -> int:
    """Return a whole number of at least 1. Raises otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number, 1 or more; got {shown(value)}. {fix}".strip())
    return value


def label_targets(y: Tensor, like: Tensor) -> Tensor:
    """Labels with the shape and dtype of the logits; their values are not checked in compiled code."""
    if y.shape == like.shape[:-1] and like.shape[-1] == 1:
        y = y[..., None]
    if y.shape != like.shape:
        raise ValueError(
            f"y must have shape {tuple(like.shape)}, a column for each label; got {tuple(y.shape)}. For classes, "
            "create the head with targets='classes'."
        )
    y = y.to(like)
    if not torch.compiler.is_compiling() and not bool(((y >= 0.0) & (y <= 1.0)).all()):
        wrong = y[~((y >= 0.0) & (y <= 1.0))][0].item()
        raise ValueError(f"y must be 0 or 1, or a share between them; got {wrong:g}. Use (y + 1) / 2 for ±1.")
    return y


def class_targets(y: Tensor, like: Tensor) -> Tensor:
    """Classes as whole numbers of the shape of the rows; their values are not checked in compiled code."""
    K = like.shape[-1]
    if y.is_floating_point() or y.dtype == torch.bool or y.shape != like.shape[:-1]:
        raise ValueError(
            f"y must be whole numbers of shape {tuple(like.shape[:-1])}, the class of each row; got {y.dtype} of shape "
            f"{tuple(y.shape)}. Use y.long(), or create the head with targets='labels' for a column for each label."
        )
    y = y.long()
    if not torch.compiler.is_compiling() and not bool(((y >= 0) & (y < K)).all()):
        wrong = y[(y < 0) | (y >= K)][0].item()
        raise ValueError(f"y must be between 0 and {K - 1}; got {wrong}. Number the classes from 0.")
    return y
