"""New rows for a fitted Gaussian process: the posterior is updated, and kernel and mean function stay as they are.

As long as the rows so far are known, q is the best one for all rows, found from where it was. If they are not, as in a
model from a file, what they said is kept as a Gaussian factor: q so far is the prior of the new rows.

New inducing points are appended where new rows lie outside, that is, where the variance that the points leave
unexplained costs much. A Cholesky factor of more points begins with that of the first ones, so the first whitened
values stay what they were, and the new ones begin at their prior N(0, 1).
"""

import numpy as np
import torch

from viper.gp.model import Features, Observations, SparseGP
from viper.gp.starts import greedy
from viper.inference.posterior import Diagonal, Full, Posterior, latent
from viper.inference.problem import Gaussian, Prior, gaussian
from viper.softplus.limit import limit

LEAST_COST = 0.01  # nats; what new rows lose to unexplained variance before inducing points are added
MOST_INDUCING = 2_000  # inducing points up to which some are added
PLACED_ROWS = 5_000  # new rows among which they are chosen


def with_more_points(model: SparseGP, posterior: Posterior, rows: Observations, scale: float) -> SparseGP:
    """The model with inducing points at some of the new rows, each of which stands for `scale` rows."""
    most = min(MOST_INDUCING - len(model.inducing), len(rows))
    if most <= 0:
        return model
    with torch.no_grad():
        features = Features(model, rows)
        known = features.in_memory()
        assert known.residual is not None
        information = scale * limit().moments(*latent(next(known.blocks()), posterior))[2]
        information = information if rows.weight is None else information * rows.weight
        if 0.5 * float(information @ known.residual) < LEAST_COST:
            return model
        explained = known.features[:, : len(features.root)]
        points = greedy(model, rows.inputs, information, most, LEAST_COST, explained)
        return model.with_points(torch.cat([model.inducing.detach(), points]))


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
