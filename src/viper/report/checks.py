"""Checks of a model against rows: residuals in groups, and data that the posterior would have produced.

`label` is True for the rows of the second class; `probability` is the predicted probability of that class.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from viper.models.prediction import check_one_probability
from viper.report.shares import checked_predictions, equal_groups, named_groups
from viper.report.views import spaced_indices

if TYPE_CHECKING:
    import pandas

MOST_BINS = 40
CHECK_BUDGET = 40_000_000  # rows × draws of simulated outcomes: a few seconds
CHECK_DRAWS = (100, 1000)  # draws within that budget
CHECK_SEED = 1
BLOCK_DRAWS = 1 << 21  # values of f held at once, rows × draws
MOST_JOINT_POINTS = 2000  # rows from which a Gaussian process learns how its values vary together


def binned_residuals(
    label: Any, probability: Any, values: Any = None, bins: int | None = None, level: float = 0.95
) -> "pandas.DataFrame":
    """Mean of y - p in groups of rows with similar `values`, by default similar probabilities (Gelman and Hill, 2007).

    Columns: mean `value` of the group with its ends `low` and `high`; `rows`; `residual`, the mean of y - p; `band`,
    z √Σp(1-p) / rows: if the probabilities are right, a residual lies within ± band with probability `level`;
    `outside`, whether it does not. A share of 1 - `level` of the groups lies outside by chance. A run of residuals on
    one side means that the column acts in a way that the model does not have, such as a bend.

    Parameters
    ----------
    label : array of bool
    probability : array
    values : array, optional
        A column of numbers without missing values.
    bins : int, optional
        Number of groups, of equally many rows; by default √rows, at most 40.
    level : float
    """
    import pandas
    from scipy.special import ndtri

    label, probability = checked_predictions(label, probability)
    values = probability if values is None else np.asarray(values, dtype=float)
    if values.shape != label.shape or not np.isfinite(values).all():
        raise ValueError("values must be one finite number per row; got others. Leave out rows with missing values.")
    count = int(np.clip(np.sqrt(len(label)), 1, MOST_BINS)) if bins is None else bins
    if count < 1:
        raise ValueError(f"bins must be at least 1; got {bins}.")
    place = equal_groups(values, count)
    rows = np.bincount(place)
    residual = np.bincount(place, label - probability) / rows
    band = ndtri(0.5 + 0.5 * level) * np.sqrt(np.bincount(place, probability * (1 - probability))) / rows
    ends = pandas.Series(values).groupby(place).agg(["min", "max"])
    return pandas.DataFrame(
        {
            "value": np.bincount(place, values) / rows,
            "low": ends["min"].to_numpy(),
            "high": ends["max"].to_numpy(),
            "rows": rows,
            "residual": residual,
            "band": band,
            "outside": np.abs(residual) > band,
        }
    )


def predictive_check(
    model: Any,
    X: Any,
    y: Any,
    group: Any = None,
    *,
    level: float = 0.95,
    draws: int | None = None,
    random_state: Any = None,
) -> "pandas.DataFrame":
    """Compare the outcomes with outcomes drawn from the posterior: first β, then every row's class given β.

    One row per statistic: the number of rows of the second class ("positives"), the mean "log score" and "Brier
    score" of the model's probabilities, and with `group` the positives of each group. Columns: `observed`;
    `expected`, `lower` and `upper` of the drawn outcomes; `p_value`, the share of them that is larger, where those
    equal count half; and `unusual`, whether the observed value lies outside the interval, which is widened for the
    groups so that chance takes *any* of them outside with probability 1 - `level`. The drawn outcomes vary because β
    is uncertain and because outcomes are random.

    Parameters
    ----------
    model : fitted estimator
    X, y : rows and their classes
    group : array or Series, optional
        As in `by_group`.
    level : float
    draws : int, optional
        By default 100 to 1,000, fewer for more rows.
    random_state : int, RandomState or None
        The seed is fixed by default, so that repeated calls agree.
    """
    import pandas
    from scipy.special import expit
    from sklearn.utils import check_random_state

    check_one_probability(model)
    label = np.asarray(y) == model.classes_[1]
    probability = np.asarray(model.predict_proba(X))[:, 1]
    label, probability = checked_predictions(label, probability)
    count = int(np.clip(CHECK_BUDGET // len(label), *CHECK_DRAWS)) if draws is None else draws
    if count < 1:
        raise ValueError(f"draws must be at least 1; got {draws}.")
    place, names = (np.zeros(len(label), dtype=int), []) if group is None else named_groups(group)
    seed = check_random_state(CHECK_SEED if random_state is None else random_state).randint(2**31)
    generator = np.random.default_rng(seed)
    drawn = np.zeros((count, 3 + len(names)))
    start = 0
    for f in latent_draws(model, X, count, generator):
        here = slice(start, start + f.shape[1])
        outcome = generator.random(f.shape) < expit(f)
        drawn += check_statistics(outcome, probability[here], place[here], len(names))
        start = here.stop
    observed = check_statistics(label[None], probability, place, len(names))[0]
    scale = np.array([1.0, len(label), len(label), *[1.0] * len(names)])
    index = ["positives", "log score", "Brier score", *names]
    table = compare_statistics(observed / scale, drawn / scale, level)
    return pandas.DataFrame(table, index=pandas.Index(index, name="statistic"))


def compare_statistics(observed: np.ndarray, drawn: np.ndarray, level: float) -> dict[str, np.ndarray]:
    """Observed statistics against drawn ones: the first three each by itself, all further ones together."""
    groups = max(drawn.shape[1] - 3, 1)
    levels = np.where(np.arange(drawn.shape[1]) < 3, level, level ** (1 / groups))
    lower, upper = (
        np.array([np.quantile(drawn[:, k], 0.5 + side * 0.5 * levels[k]) for k in range(drawn.shape[1])])
        for side in (-1, 1)
    )
    above = (drawn > observed).mean(0) + 0.5 * (drawn == observed).mean(0)
    unusual = (observed < lower) | (observed > upper)
    columns = {"observed": observed, "expected": drawn.mean(0), "lower": lower, "upper": upper}
    return columns | {"p_value": above, "unusual": unusual}


def check_statistics(outcome: np.ndarray, probability: np.ndarray, place: np.ndarray, groups: int) -> np.ndarray:
    """Sums over rows, draws × statistics: positives, log score, squared error, and the positives of each group."""
    tiny = np.finfo(float).eps
    log_odds = np.log(np.clip(probability, tiny, 1)) - np.log(np.clip(1 - probability, tiny, 1))
    log_score = outcome @ log_odds + np.log(np.clip(1 - probability, tiny, 1)).sum()
    brier = outcome @ (1 - 2 * probability) + np.square(probability).sum()
    members = [outcome[:, place == k].sum(1) for k in range(groups)]
    return np.stack([outcome.sum(1), log_score, brier, *members], 1)


def latent_draws(model: Any, X: Any, count: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Joint draws of the log-odds of the rows of X, block by block: draws × rows of a block."""
    import torch
    from sklearn.utils import _safe_indexing

    from viper.inference.posterior import noise_shape

    some = spaced_indices(len(X), MOST_JOINT_POINTS)
    opened, posterior = model._joint(lambda: [_safe_indexing(X, some)])
    source = opened(X, None, max(1, BLOCK_DRAWS // count))
    noise = torch.from_numpy(generator.standard_normal((count, *noise_shape(posterior))))
    beta = posterior.draw(noise).T.contiguous().to(source.device)
    for block in source.map(lambda block: block):
        f = block.design.project(beta).cpu()
        if block.offset is not None:
            f = f + block.offset.cpu()[:, None]
        if block.residual is not None:
            f = f + block.residual.cpu().sqrt()[:, None] * torch.from_numpy(generator.standard_normal(f.shape))
        yield f.T.numpy()
