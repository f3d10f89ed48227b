"""Adding rows to a fitted Gaussian process: the posterior is updated; kernel and mean function do not change.

While the earlier rows are available, q is the best one for all rows, found from the previous q. Otherwise, as in a
model loaded from a file, the previous q takes the place of the earlier rows: it is the prior of the new ones.

Inducing points are appended if new rows lie outside, that is, if the variance that the present points leave unexplained
costs much. The Cholesky factor for more points begins with that of the present ones, so their whitened values keep
their meaning, and the new values start from their prior N(0, 1).
"""

import numpy as np
import torch

from viper.gp.model import Features, Observations, SparseGP
from viper.gp.starts import greedy
from viper.inference.posterior import Diagonal, Full, Posterior, latent
from viper.inference.problem import Gaussian, Prior, gaussian
from viper.softplus.limit import limit

LEAST_COST = 0.01  # nats; points are added if new rows lose more than this to unexplained variance
MOST_INDUCING = 2_000  # inducing points, beyond which none are added
PLACED_ROWS = 5_000  # most new rows among which they are chosen


def with_more_points(model: SparseGP, posterior: Posterior, rows: Observations, scale: float) -> SparseGP:
    """The model with more inducing points, at some of `rows`, each of which stands for `scale` new rows."""
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
    """q with N(0, 1) for the inducing points from `before` to `after`; the weights of the mean stay last."""
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
