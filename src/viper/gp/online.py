"""New rows for a fitted Gaussian process: the posterior is updated, and kernel and mean function stay as they are.

As long as the rows so far are known, q is the best one for all rows, found from where it was. If they are not, as in a
model from a file, what they said is kept as a Gaussian factor: q so far is the prior of the new rows.

New inducing points are appended where new rows lie outside, that is, where the variance that the points leave
unexplained costs much. A Cholesky factor of more points begins with that of the first ones, so the first whitened
values stay what they were, and the new ones begin at their prior N(0, 1).
"""

import copy

import numpy as np
import torch
from torch import Tensor

from viper.gp.kernels import covariance
from viper.gp.model import Features, Observations, SparseGP
from viper.inference.posterior import Diagonal, Full, Posterior, latent
from viper.inference.problem import Gaussian, Prior, gaussian
from viper.softplus.limit import limit

LEAST_COST = 0.01  # nats; what new rows lose to unexplained variance before inducing points are added
MOST_INDUCING = 2_000  # inducing points up to which some are added
PLACED_ROWS = 5_000  # new rows among which they are chosen


def with_more_points(model: SparseGP, posterior: Posterior, rows: Observations, scale: float) -> SparseGP:
    """The model with inducing points at some of the new rows, each of which stands for `scale` rows."""
    with torch.no_grad():
        features = Features(model, rows)
        block = features.in_memory()
        design, left = block.features[:, : len(features.root)], block.residual
        assert left is not None
        theta, tau2 = latent(next(block.blocks()), posterior) if block.rows else (left, left)
        # b/2, so that Σ b r/2 is about what r costs
        half = 0.5 * scale * limit().moments(theta, tau2)[2]
        half = half if rows.weight is None else half * rows.weight
        chosen = costly_rows(model, rows.inputs, design, left.clone(), half)
        if not chosen:
            return model
        grown = copy.deepcopy(model)
        points = torch.cat([model.inducing.detach(), rows.inputs[chosen]])
        grown.inducing = torch.nn.Parameter(points, requires_grad=model.inducing.requires_grad)
    return grown


def costly_rows(model: SparseGP, inputs: Tensor, design: Tensor, left: Tensor, half: Tensor) -> list[int]:
    """Rows that explain what costs most, one by one by pivoted Cholesky, until little is left to pay."""
    most = max(0, min(MOST_INDUCING - len(model.inducing), len(inputs)))
    found = inputs.new_zeros(len(inputs), most)
    chosen: list[int] = []
    for k in range(most):
        cost = half * left
        if float(cost.sum()) < LEAST_COST:
            break
        i = int(cost.argmax())
        column = covariance(model.kernel, inputs, inputs[i : i + 1])[:, 0] - design @ design[i]
        found[:, k] = (column - found[:, :k] @ found[i, :k]) / left[i].sqrt()
        left = (left - found[:, k].square()).clamp_(min=0.0)
        left[i] = 0.0
        chosen.append(i)
    return chosen


def with_more_values(posterior: Posterior, before: int, after: int) -> Posterior:
    """q with values of N(0, 1) for the inducing points from `before` to `after`; weights of the mean stay last."""
    more = after - before
    if not more:
        return posterior
    order = np.r_[:before, len(posterior.mean) : len(posterior.mean) + more, before : len(posterior.mean)]
    mean = torch.cat([posterior.mean, posterior.mean.new_zeros(more)])[order]
    if isinstance(posterior, Diagonal):
        return Diagonal(mean, torch.cat([posterior.variance, posterior.variance.new_ones(more)])[order])
    assert isinstance(posterior, Full)
    factor = torch.block_diag(posterior.factor, torch.eye(more, dtype=mean.dtype))
    return Full(mean, factor[order][:, order])


def as_start(prior: Prior) -> Gaussian:
    found = gaussian(prior.mean, prior.precision)
    assert found is not None
    return found
