"""The log-odds f of a model at points: means, covariances, and what pending labels leave of the covariances.

Whatever the label at a point will be, it adds a precision of h = E s'(f) along it (`viper.decisions.pool`). Pending
labels at points z leave the means as they are, and

    Cov(f_x, f_x')  becomes  Cov(f_x, f_x') - C_xz (C_zz + diag(1/h))⁻¹ C_zx'.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from viper.softplus.expectation import expected_softplus

LEAST_LABEL_PRECISION = 1e-12


class Joint(NamedTuple):
    """f at points x and at fixed points z: mean and covariance of q points, and their covariances with z."""

    mean: Tensor  # b × q
    covariance: Tensor  # b × q × q
    across: Tensor  # b × q × r


class FixedPoints(NamedTuple):
    """Points z that stay, with what the model says of them."""

    points: Tensor  # r × p
    mean: Tensor  # r
    covariance: Tensor  # r × r
    known: Any  # what the model keeps of them


class LatentModel(Protocol):
    """What acquisition functions need of a model."""

    columns: int | None
    dtype: torch.dtype

    def fixed(self, Z: Tensor) -> FixedPoints:
        """Points to condition on or average over."""

    def joint(self, X: Tensor, fixed: FixedPoints | None) -> Joint:
        """f at X, b × q × p, and its covariances with the fixed points."""


class EstimatorLatent:
    """A fitted VariationalGPClassifier."""

    def __init__(self, model: Any) -> None:
        self.process = model._process()
        self.columns: int | None = int(model.n_features_in_)
        self.dtype = torch.float64

    def fixed(self, Z: Tensor) -> FixedPoints:
        with torch.no_grad():
            rows = self.process.rows(Z.double())
            return FixedPoints(Z, rows.mean, self.process.between(rows, rows), rows)

    def joint(self, X: Tensor, fixed: FixedPoints | None) -> Joint:
        b, q, _ = X.shape
        rows = self.process.rows(X.reshape(b * q, -1).double())
        r = 0 if fixed is None else len(fixed.mean)
        across = rows.mean.new_zeros(b * q, 0) if fixed is None else self.process.between(rows, fixed.known)
        return Joint(rows.mean.reshape(b, q), self.process.among(rows, q), across.reshape(b, q, r))


class ModuleLatent:
    """A GPyTorch model, whose call returns the distribution of f."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.columns: int | None = None
        self.dtype = next((x.dtype for x in model.parameters()), torch.float64)

    def distribution(self, X: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model(X)
        if not hasattr(found, "covariance_matrix"):
            raise ValueError(f"model must return a MultivariateNormal; got {type(found).__name__}.")
        if found.mean.shape != X.shape[:-1]:
            raise ValueError(f"model must have one f a point; got shape {tuple(found.mean.shape)}. Use one output.")
        return found.mean, found.covariance_matrix

    def fixed(self, Z: Tensor) -> FixedPoints:
        with torch.no_grad():
            return FixedPoints(Z, *self.distribution(Z), Z)

    def joint(self, X: Tensor, fixed: FixedPoints | None) -> Joint:
        q = X.shape[1]
        Z = X[:, :0] if fixed is None else fixed.points.to(X).expand(len(X), -1, -1)
        mean, C = self.distribution(torch.cat([X, Z], 1))
        return Joint(mean[:, :q], C[:, :q, :q], C[:, :q, q:])


def latent_of(model: Any) -> LatentModel:
    """What acquisition functions need of this model; an error for models that they cannot use."""
    if hasattr(model, "fixed") and hasattr(model, "joint"):
        known: LatentModel = model
        return known
    if getattr(model, "_kind", None) == "gp":
        if not hasattr(model, "posterior_"):
            raise ValueError("model must be fitted; got one that is not. Call fit first.")
        if model.multiclass_:
            raise ValueError(f"model must have two classes; got {len(model.classes_)}. Fit one against the others.")
        if hasattr(model, "formula_"):
            raise ValueError("model must see its points as they are; got one with a formula. Fit it to an array.")
        return EstimatorLatent(model)
    if hasattr(model, "n_pairs_"):
        raise TypeError(
            "model must have answers about points; got one of preferences. Use viper.decisions.PairInformation or "
            "ExpectedBest."
        )
    if isinstance(model, torch.nn.Module):
        return ModuleLatent(model)
    raise TypeError(
        f"model must be a VariationalGPClassifier or a GPyTorch model trained with LogitLikelihood; got "
        f"{type(model).__name__}."
    )


class Conditioned:
    """The model once pending labels have arrived, and f at reference points."""

    def __init__(self, latent: LatentModel, pending: Tensor | None, reference: Tensor | None) -> None:
        self.latent = latent
        parts = [x for x in (pending, reference) if x is not None]
        self.fixed = latent.fixed(torch.cat(parts)) if parts else None
        k = self.pending = 0 if pending is None else len(pending)
        if self.fixed is None:
            return
        C = self.fixed.covariance
        if k:
            noisy = C[:k, :k] + torch.diag(1.0 / label_precisions(self.fixed.mean[:k], C[:k, :k]))
            self.inverse = torch.linalg.inv(noisy)  # (C_zz + diag(1/h))⁻¹
            self.gain = self.inverse @ C[:k, k:]
            C = C - C[:, :k] @ self.inverse @ C[:k]
        self.reference_mean, self.reference_covariance = self.fixed.mean[k:], C[k:, k:]

    def joint(self, X: Tensor) -> Joint:
        """f at X, and its covariances with the reference points."""
        found, k = self.latent.joint(X, self.fixed), self.pending
        if not k:
            return found
        toward, rest = found.across[..., :k], found.across[..., k:]
        C = found.covariance - toward @ self.inverse @ toward.mT
        return Joint(found.mean, C, rest - toward @ self.gain)


def label_precisions(mean: Tensor, covariance: Tensor) -> Tensor:
    """h of each point given labels of those before it."""
    C, worth = covariance.clone(), []
    for i in range(len(mean)):
        worth.append(label_precision(mean[i], C[i, i]))
        C = after_label(C, i, worth[-1])
    return torch.stack(worth)


def label_precision(mean: Tensor, variance: Tensor) -> Tensor:
    """h = E s'(f)."""
    return expected_softplus(mean, variance.clamp(min=0.0)).curvature.clamp(min=LEAST_LABEL_PRECISION)


def after_label(covariance: Tensor, i: int, h: Tensor) -> Tensor:
    """Covariances after a label at point i: less h C_i C_iᵀ / (1 + h C_ii)."""
    column = covariance[..., :, i]
    scale = h / (1.0 + h * covariance[..., i, i])
    return covariance - scale[..., None, None] * column[..., :, None] * column[..., None, :]
