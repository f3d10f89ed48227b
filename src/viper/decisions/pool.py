"""Active learning from a table: the rows whose labels would say most about a model.

The label of row i is worth I(y_i; f_i) nats, in closed form. Of several rows, each is chosen for what it adds to those
before it. Whatever the label of row i will be, it adds a precision of h_i = E s'(f_i) along it, so that

    Cov(f_j, f_k)  becomes  Cov(f_j, f_k) - h_i Cov(f_j, f_i) Cov(f_i, f_k) / (1 + h_i Var f_i).

Means stay as they are, and the information of the other rows follows from their new variances.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.errors import shown
from viper.inference.classes.posterior import StarPosterior
from viper.inference.classes.sums import EXACT_CLASSES
from viper.inference.mixture.posterior import count_gaussians
from viper.inference.posterior import Full, Posterior, latent, moved
from viper.inference.rows import Block
from viper.models.prediction import check_model
from viper.softplus.information import answer_information, class_information
from viper.softplus.limit import limit

MOST_CANDIDATES = 5_000  # a batch is chosen among so many rows, those with the most information


class Suggested(NamedTuple):
    """Rows to label, the best first."""

    rows: np.ndarray  # their numbers, from 0
    information: np.ndarray  # nats that the label of each row is worth on its own
    gain: np.ndarray  # nats that it adds to the rows before it


def suggest(model: Any, X: Any, n: int = 10, *, offset: Any = None, alone: bool = False) -> Suggested:
    """Choose the rows of X whose labels would say most about a fitted model.

    Parameters
    ----------
    model : estimator
        Logistic regression or a Gaussian process, of two classes or more, levels in order, or effects of groups.
    X : array or DataFrame
        Rows without labels.
    n : int
        How many rows to choose; all of them, if there are fewer.
    offset : array (n,), optional
        Known part of the log-odds of each row.
    alone : bool, default False
        Rank every row on its own. Otherwise each row is chosen for what it adds to those before it, so that a batch
        does not ask the same question twice; of more than 5,000 rows, the choice is among the 5,000 that are worth most
        on their own. Models of levels in order, of groups, of several labels or components, and Gaussian processes of
        more than two classes, always rank each row on its own.

    Returns
    -------
    Suggested
        `rows`, best first, the `information` of each on its own, and its `gain` over those before it.
    """
    check_model(model)
    if hasattr(model, "n_pairs_"):
        raise TypeError(
            "the model must predict rows; got one of preferences, whose answers are about pairs. Use PairInformation."
        )
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"n must be a whole number, 1 or more; got {shown(n)}.")
    given = {} if offset is None else {"offset": offset}
    information = np.asarray(model.predict_information(X, **given))
    best = np.argsort(-information, kind="stable")
    if alone or not knows_joint_rows(model):
        best = best[:n]
        return Suggested(best, information[best], information[best])
    kept = np.sort(best[:MOST_CANDIDATES])
    block, posterior = joint_block(model, numbered_rows(X, kept), None if offset is None else np.asarray(offset)[kept])
    chosen, gain = chosen_together(block, posterior, min(int(n), len(kept)))
    return Suggested(kept[chosen], information[kept[chosen]], gain)


def numbered_rows(X: Any, rows: np.ndarray) -> Any:
    return X.iloc[rows] if hasattr(X, "iloc") else X[torch.from_numpy(rows)] if isinstance(X, Tensor) else X[rows]


def knows_joint_rows(model: Any) -> bool:
    """Whether the model has a joint covariance of f over rows."""
    several = getattr(model, "multilabel_", False) or (model._kind in ("gp", "ordinal") and model.multiclass_)
    mixture = count_gaussians(model.posterior_) > 1
    return hasattr(model, "_joint") and not several and not mixture and not hasattr(model, "factors_")


def joint_block(model: Any, X: Any, offset: Any) -> tuple[Block, Posterior | StarPosterior]:
    """The rows as f = o + Aβ + rest, and the posterior of β."""
    opened, posterior = model._joint(lambda: [X])
    rows = opened(X, offset, MOST_CANDIDATES)
    (block,) = rows.map(lambda block: block)
    return block, moved(posterior, block.label.device)


def chosen_together(block: Block, posterior: Posterior | StarPosterior, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a block, each chosen for its information given those before it; and that information."""
    star = isinstance(posterior, StarPosterior)
    mean, variance = (
        posterior.latent(block) if isinstance(posterior, StarPosterior) else binary_latent(block, posterior)
    )
    roots = [block.design.project(root) for root in roots_of(posterior)]  # A F_k, one for each class
    removed: list[tuple[Tensor, Tensor]] = []  # of each row chosen: Cov(f, f_i) (n, K), and h / (1 + h v)
    left = torch.ones(len(mean), dtype=torch.bool)
    chosen, gains = [], []
    for _ in range(n):
        moments = EXACT_CLASSES(mean, variance) if star else limit().moments(mean, variance)
        gain = class_information(mean, variance, moments) if star else answer_information(mean, variance)[:, 0]
        i = int(torch.where(left, gain, -1.0).argmax())
        chosen.append(i)
        gains.append(float(gain[i]))
        left[i] = False
        covariance = torch.stack([root @ root[i] for root in roots], 1)
        for column, scale in removed:
            covariance -= scale * column * column[i]
        h = moments[2][i]
        scale = h / (1.0 + h * variance[i])
        removed.append((covariance, scale))
        variance = (variance - scale * covariance.square()).clamp(min=0.0)
    return np.array(chosen, dtype=np.intp), np.array(gains)


def binary_latent(block: Block, posterior: Posterior) -> tuple[Tensor, Tensor]:
    mean, variance = latent(block, posterior)
    return mean[:, None], variance[:, None]


def roots_of(posterior: Posterior | StarPosterior) -> list[Tensor]:
    """F_k with F_k F_kᵀ = Cov β_k."""
    if isinstance(posterior, StarPosterior):
        return [torch.diag(f.sqrt()) if f.ndim == 1 else f for f in posterior.factor]
    return [posterior.factor if isinstance(posterior, Full) else torch.linalg.cholesky(posterior.covariance())]
