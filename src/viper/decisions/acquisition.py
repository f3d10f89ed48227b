"""Acquisition functions: what the label at x would be worth, where a model says f(x) ~ N(ϑ, τ²), p = s(f).

Each is a callable. Given a tensor, batches × q points × columns, it returns a number for each batch, with gradients in
the points; given an array, points × columns, a number for each point. Larger is better, and `optimize_acqf` of BoTorch
takes them as they are. For single points, all but the look-aheads depend on ϑ and τ² alone and are exact: closed forms,
except for the expected improvement and the information about the maximum, one-dimensional integrals to 1e-12.

For several points, q > 1, the expected improvement and the probability of improvement are those of the best of them, by
joint draws. All others value each point as if the points before it, and `pending` points, were labelled: whatever a
label will be, it adds a precision of h = E s'(f) (`viper.decisions.latent`).
"""

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from viper.data.checks import read_whole
from viper.decisions.latent import Conditioned, Joint, after_label, label_precision, latent_of
from viper.errors import shown
from viper.gp.joint import LEAST_LATENT_VARIANCE, joint_draws, root_of, sobol_uniforms
from viper.softplus.expectation import expected_softplus
from viper.softplus.improvement import after_answer, expected_excess
from viper.softplus.information import answer_information
from viper.softplus.normal import cdf

__all__ = [
    "ExpectedImprovement",
    "Information",
    "LevelSetLookAhead",
    "LevelSetUncertainty",
    "MaximumInformation",
    "PosteriorDraw",
    "ProbabilityLookAhead",
    "ProbabilityOfImprovement",
    "Straddle",
    "UpperConfidenceBound",
]

BATCH_DRAWS = 256  # joint draws of a batch


class Acquisition:
    """A function of points, larger where a label is worth more. All others in this module derive from it.

    Parameters
    ----------
    model : VariationalGPClassifier or gpytorch.models.GP
        Fitted, of two classes; a GPyTorch model trained with `viper.gpytorch.LogitLikelihood`.
    reference : tensor or array (r, columns), optional
        Points over which the function averages.
    pending : tensor or array (k, columns), optional
        Points that await their labels.
    """

    _log: ClassVar[bool] = False  # BoTorch asks
    X_pending: Tensor | None

    def __init__(self, model: Any, *, reference: Any = None, pending: Any = None) -> None:
        self.model = model
        self.latent = latent_of(model)
        self.reference = None if reference is None else self._read_points(reference, "reference")
        self.set_X_pending(pending)

    def set_X_pending(self, X_pending: Any = None) -> None:
        """Set the points that await their labels; BoTorch calls this between the points of a batch."""
        self.X_pending = None if X_pending is None else self._read_points(X_pending, "pending")
        if self.X_pending is not None and not len(self.X_pending):
            self.X_pending = None
        self._known = Conditioned(self.latent, self.X_pending, self.reference)

    def _read_points(self, points: Any, name: str) -> Tensor:
        given = points.detach() if isinstance(points, Tensor) else torch.from_numpy(read_array(points, name))
        x = given.to(self.latent.dtype)
        if x.ndim != 2 or (self.latent.columns is not None and x.shape[1] != self.latent.columns):
            wanted = f"points × {self.latent.columns or 'columns'}"
            raise ValueError(f"{name} must be {wanted}; got shape {tuple(x.shape)}.")
        if not bool(x.isfinite().all()):
            raise ValueError(f"{name} must be finite; got NaN or infinity.")
        return x

    def __call__(self, X: Any) -> Any:
        """The value of each batch of points, as a tensor; or of each point of an array, as an array."""
        if not isinstance(X, Tensor):
            points = self._read_points(X, "X")
            with torch.no_grad():
                return self.forward(points[:, None]).numpy()
        if X.ndim < 2 or X.shape[-2] < 1 or (self.latent.columns is not None and X.shape[-1] != self.latent.columns):
            wanted = f"batches × q × {self.latent.columns or 'columns'}"
            raise ValueError(f"X must be a tensor of {wanted}; got shape {tuple(X.shape)}.")
        flat = X.reshape(-1, *X.shape[-2:])
        return self.forward(flat).to(X).reshape(X.shape[:-2])

    def forward(self, X: Tensor) -> Tensor:
        """The values of b batches of q points."""
        return self.of_batch(self._known.joint(X))

    def of_batch(self, joint: Joint) -> Tensor:
        """The sum over points, each given the labels of those before it."""
        mean, C, across = joint
        reference = self._known.reference_covariance.diagonal() if self.reference is not None else mean.new_zeros(0)
        total = mean.new_zeros(len(mean))
        for i in range(mean.shape[1]):
            variance = C[:, i, i].clamp(min=LEAST_LATENT_VARIANCE)
            total = total + self.of_point(mean[:, i], variance, across[:, i], reference, i)
            if i + 1 < mean.shape[1]:
                h = label_precision(mean[:, i], variance)
                scale = (h / (1.0 + h * variance))[:, None]
                toward = across[:, i]
                reference = (reference - scale * toward.square()).clamp(min=LEAST_LATENT_VARIANCE)
                across = across - (scale * C[:, i])[..., None] * toward[:, None]
                C = after_label(C, i, h)
        return total

    def of_point(self, mean: Tensor, variance: Tensor, across: Tensor, reference: Tensor, i: int) -> Tensor:
        """The value of the i-th point, given its covariances with the reference points and their variances."""
        raise NotImplementedError


# --- learning the function ---


class Information(Acquisition):
    """H(E p) - E H(p), in nats: what a label says about f, called BALD. In closed form.

    For a batch, the sum over its points, each given the labels of those before it.
    """

    def of_point(self, mean: Tensor, variance: Tensor, across: Tensor, reference: Tensor, i: int) -> Tensor:
        return answer_information(mean, variance)


# --- where the probability crosses a threshold ---


class ThresholdAcquisition(Acquisition):
    """Asks where p crosses `threshold`: where f crosses b = logit(threshold)."""

    def __init__(self, model: Any, threshold: float = 0.5, *, pending: Any = None) -> None:
        self.level = log_odds_of(threshold, "threshold")
        super().__init__(model, pending=pending)


class Straddle(ThresholdAcquisition):
    """`spread` · τ - |ϑ - b|, b = logit(threshold): large near the threshold and where f is uncertain.

    Parameters
    ----------
    model, pending
        As in `Information`.
    threshold : float, default 0.5
        The probability whose level set is sought.
    spread : float, default 1.96
        Sds of the log-odds.
    """

    def __init__(self, model: Any, threshold: float = 0.5, *, spread: float = 1.96, pending: Any = None) -> None:
        self.spread = positive_number(spread, "spread")
        super().__init__(model, threshold, pending=pending)

    def of_point(self, mean: Tensor, variance: Tensor, across: Tensor, reference: Tensor, i: int) -> Tensor:
        return self.spread * variance.sqrt() - (mean - self.level).abs()


class LevelSetUncertainty(ThresholdAcquisition):
    """H(Φ((ϑ - b)/τ)), in nats: how uncertain it is on which side of the threshold p lies.

    Parameters
    ----------
    model, threshold, pending
        As in `Straddle`.
    """

    def of_point(self, mean: Tensor, variance: Tensor, across: Tensor, reference: Tensor, i: int) -> Tensor:
        return entropy_of_side((mean - self.level) / variance.sqrt())


class LookAhead(Acquisition):
    """How much a label is expected to lower a measure of uncertainty, averaged over reference points.

    Given a yes or a no, f has the moments of `viper.softplus.improvement.after_answer` and is treated as Gaussian. The
    two answers are weighted by their probabilities.
    """

    def __init__(self, model: Any, reference: Any, *, pending: Any = None) -> None:
        if not len(reference):
            raise ValueError("reference must have at least one point; got none.")
        super().__init__(model, reference=reference, pending=pending)

    def measure(self, mean: Tensor, variance: Tensor) -> Tensor:
        """The uncertainty at points where f ~ N(mean, variance)."""
        raise NotImplementedError

    def of_point(self, mean: Tensor, variance: Tensor, across: Tensor, reference: Tensor, i: int) -> Tensor:
        known = self._known.reference_mean
        after = after_answer(mean, variance)
        slope = across / variance[:, None]  # of f at the reference points in f at the point
        total = self.measure(known, reference).mean(-1)
        for chance, there, left in (
            (after.chance, after.mean_yes, after.variance_yes),
            (1.0 - after.chance, after.mean_no, after.variance_no),
        ):
            shifted = known + slope * (there - mean)[:, None]
            smaller = reference - slope.square() * (variance - left)[:, None]
            total = total - chance * self.measure(shifted, smaller.clamp(min=LEAST_LATENT_VARIANCE)).mean(-1)
        return total


class LevelSetLookAhead(LookAhead):
    """By how much a label is expected to lower the share of reference points on the wrong side of a threshold.

    A point is on the wrong side with probability Φ(-|ϑ - b|/τ), b = logit(threshold). With ``measure="entropy"``, how
    many nats the label is expected to add about the side of a point.

    Parameters
    ----------
    model, pending
        As in `Information`.
    reference : tensor or array (r, columns)
        Points where the side matters, such as 500 Sobol points.
    threshold : float, default 0.5
    measure : {"errors", "entropy"}, default "errors"
    """

    def __init__(
        self, model: Any, reference: Any, threshold: float = 0.5, *, measure: str = "errors", pending: Any = None
    ) -> None:
        if measure not in ("errors", "entropy"):
            raise ValueError(f"measure must be 'errors' or 'entropy'; got {shown(measure)}.")
        self.level, self.word = log_odds_of(threshold, "threshold"), measure
        super().__init__(model, reference, pending=pending)

    def measure(self, mean: Tensor, variance: Tensor) -> Tensor:
        z = (mean - self.level) / variance.sqrt()
        return cdf(-z.abs()) if self.word == "errors" else entropy_of_side(z)


class ProbabilityLookAhead(LookAhead):
    """By how much a label is expected to lower the variance of p, on average over the reference points.

    Parameters
    ----------
    model, reference, pending
        As in `LevelSetLookAhead`.
    """

    def measure(self, mean: Tensor, variance: Tensor) -> Tensor:
        _, g, h = expected_softplus(*torch.broadcast_tensors(mean, variance), tolerance=1e-6)
        return g - h - g.square()


# --- where the probability is largest ---


class UpperConfidenceBound(Acquisition):
    """s(ϑ + `spread` · τ): the upper end of the interval of p.

    Parameters
    ----------
    model, pending
        As in `Information`.
    spread : float, default 1
        Sds of the log-odds.
    """

    def __init__(self, model: Any, *, spread: float = 1.0, pending: Any = None) -> None:
        self.spread = positive_number(spread, "spread")
        super().__init__(model, pending=pending)

    def of_point(self, mean: Tensor, variance: Tensor, across: Tensor, reference: Tensor, i: int) -> Tensor:
        return torch.sigmoid(mean + self.spread * variance.sqrt())


class ImprovementAcquisition(Acquisition):
    """Looks for p above `best`; batches by joint draws."""

    def __init__(
        self, model: Any, best: float, *, draws: int = BATCH_DRAWS, random_state: int = 0, pending: Any = None
    ) -> None:
        self.level = log_odds_of(best, "best")
        self.draws, self.random_state = read_whole(draws, "draws", 1), int(random_state)
        super().__init__(model, pending=pending)

    def of_batch(self, joint: Joint) -> Tensor:
        if joint.mean.shape[1] == 1:
            return super().of_batch(joint)
        uniform = sobol_uniforms(self.draws, joint.mean.shape[1], self.random_state)
        return self.of_draws(joint.mean, joint.covariance, uniform.to(joint.mean))

    def of_draws(self, mean: Tensor, covariance: Tensor, uniform: Tensor) -> Tensor:
        """The value of batches with means and covariances of f, by common uniform numbers."""
        raise NotImplementedError


class ExpectedImprovement(ImprovementAcquisition):
    """E max(p - best, 0): a one-dimensional integral, to 1e-12. Of a batch, that of its largest p, by joint draws.

    Parameters
    ----------
    model, pending
        As in `Information`.
    best : float
        The probability to improve on, such as the largest mean probability so far.
    draws, random_state : int, default 256 and 0
        Joint draws of a batch, by a scrambled Sobol sequence, and their seed.
    """

    def of_point(self, mean: Tensor, variance: Tensor, across: Tensor, reference: Tensor, i: int) -> Tensor:
        return expected_excess(mean, variance, torch.full_like(mean, self.level))

    def of_draws(self, mean: Tensor, covariance: Tensor, uniform: Tensor) -> Tensor:
        f = joint_draws(mean, covariance, uniform)
        return (torch.sigmoid(f.amax(-1)) - 1.0 / (1.0 + math.exp(-self.level))).clamp(min=0.0).mean(1)


class ProbabilityOfImprovement(ImprovementAcquisition):
    """P(p > best) = Φ((ϑ - b)/τ), b = logit(best). Of a batch, that any of its points is better, by joint draws.

    Parameters
    ----------
    model, best, draws, random_state, pending
        As in `ExpectedImprovement`.
    """

    def of_point(self, mean: Tensor, variance: Tensor, across: Tensor, reference: Tensor, i: int) -> Tensor:
        return cdf((mean - self.level) / variance.sqrt())

    def of_draws(self, mean: Tensor, covariance: Tensor, uniform: Tensor) -> Tensor:
        root = root_of(covariance)
        # P(all f_i <= b) as a product of conditional probabilities, averaged over draws from the truncated normals
        product, drawn = torch.ones_like(mean[:, :1]), mean.new_zeros(len(mean), len(uniform), 0)
        for i in range(mean.shape[1]):
            known = (drawn * root[:, None, i, :i]).sum(-1)
            chance = cdf((self.level - mean[:, i, None] - known) / root[:, i, i, None])
            product = product * chance
            z = torch.special.ndtri((uniform[:, i] * chance).clamp(1e-300, 1.0 - 1e-16))
            drawn = torch.cat([drawn, z[..., None]], -1)
        return 1.0 - product.mean(1)


class PosteriorDraw(Acquisition):
    """s(f̃(x)) for one draw f̃ of the posterior: Thompson sampling asks where it is largest.

    The draw is exact at the reference points and the conditional mean between them. In a batch each point has a draw of
    its own.

    Parameters
    ----------
    model, pending
        As in `Information`.
    reference : tensor or array (r, columns)
        Points that determine the draw, such as 500 Sobol points.
    random_state : int, default 0
    """

    def __init__(self, model: Any, reference: Any, *, random_state: int = 0, pending: Any = None) -> None:
        self.random_state = int(random_state)
        super().__init__(model, reference=reference, pending=pending)

    def forward(self, X: Tensor) -> Tensor:
        joint = self._known.joint(X)
        q = X.shape[1]
        C = self._known.reference_covariance.to(joint.mean)
        root = root_of(C)
        noise = np.random.default_rng(self.random_state).standard_normal((q, len(root)))
        # C⁻¹(f̃ - ϑ) = L⁻ᵀ z
        weights = torch.linalg.solve_triangular(root.mT, torch.from_numpy(noise.T).to(root), upper=True)
        f = joint.mean + (joint.across * weights.T).sum(-1)
        return torch.sigmoid(f).sum(-1)


class MaximumInformation(Acquisition):
    """H(E q) - E H(q) with q = E[p | p ≤ p*], in nats: what a label says about the largest probability p*.

    p* comes from joint draws of f at reference points. Given p*, f is a normal cut off there, whose E s(f) is a
    one-dimensional integral to 1e-12.

    Parameters
    ----------
    model, pending
        As in `Information`.
    reference : tensor or array (r, columns)
        Points among which the largest probability is sought, such as 500 Sobol points.
    draws : int, default 32
        How many p* to draw.
    random_state : int, default 0
    """

    def __init__(
        self, model: Any, reference: Any, *, draws: int = 32, random_state: int = 0, pending: Any = None
    ) -> None:
        super().__init__(model)
        points = self._read_points(reference, "reference")
        known = Conditioned(self.latent, None, points)
        noise = np.random.default_rng(random_state).standard_normal((read_whole(draws, "draws", 1), len(points)))
        root = root_of(known.reference_covariance)
        f = known.reference_mean + torch.from_numpy(noise).to(root) @ root.mT
        self.tops = f.amax(1).sort().values
        self.set_X_pending(pending)

    def of_point(self, mean: Tensor, variance: Tensor, across: Tensor, reference: Tensor, i: int) -> Tensor:
        g = expected_softplus(mean, variance).slope
        tops = self.tops.to(mean)[:, None]
        below = cdf((tops - mean) / variance.sqrt())
        # E[p; f <= b] = E p - E max(p - c, 0) - c P(f > b)
        cut = g - expected_excess(mean, variance, tops) - torch.sigmoid(tops) * (1.0 - below)
        given = (cut / below.clamp(min=1e-6)).clamp(min=1e-12)
        given = torch.minimum(torch.minimum(given, torch.sigmoid(tops)), g)
        return (answer_entropy(given.mean(0)) - answer_entropy(given).mean(0)).clamp(min=0.0)


# --- formulas and checks ---


def answer_entropy(p: Tensor) -> Tensor:
    """H(p) = -p log p - (1 - p) log(1 - p)."""
    return torch.special.entr(p) + torch.special.entr(1.0 - p)


def entropy_of_side(z: Tensor) -> Tensor:
    """H(Φ(z))."""
    tail = cdf(-z.abs()).clamp(min=1e-300)
    return -(tail * tail.log() + (1.0 - tail) * torch.log1p(-tail))


def log_odds_of(probability: Any, name: str) -> float:
    if isinstance(probability, bool) or not isinstance(probability, int | float | np.number):
        raise TypeError(f"{name} must be a probability; got {shown(probability)}.")
    p = float(probability)
    if not 0.0 < p < 1.0:
        raise ValueError(f"{name} must lie strictly between 0 and 1; got {shown(probability)}.")
    return math.log(p) - math.log1p(-p)


def positive_number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0.0 < float(value) < math.inf:
        raise ValueError(f"{name} must be a positive number; got {shown(value)}.")
    return float(value)


def read_array(points: Any, name: str) -> np.ndarray:
    try:
        return np.ascontiguousarray(points, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numbers; got {shown(points)}.") from None
