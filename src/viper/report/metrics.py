"""Scores of predicted probabilities: proper scores, ranking and calibration.

`label` is True for the rows of the second class; `probability` is the predicted probability of that class.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas


class Scores(NamedTuple):
    """Means over rows. Higher is better for `log_score`, `auc` and `accuracy`, lower for the others.

    log_score : mean log p(y); 0 at best
    brier : mean (p - y)²
    auc : probability that a row of the second class is ranked above one of the first; None without both classes
    accuracy : share of rows whose class is the more probable one
    calibration_error : mean |observed share - predicted probability| over bins of equally many rows
    interval_width : mean width of the intervals; None without intervals
    """

    rows: int
    log_score: float
    brier: float
    auc: float | None
    accuracy: float
    calibration_error: float
    interval_width: float | None = None


def scores(label: Any, probability: Any, interval: Any = None, bins: int = 10) -> Scores:
    """Score probabilities of the second class.

    Examples
    --------
    >>> scores([False, True, True], [0.25, 0.5, 0.75]).brier
    0.125
    """
    from sklearn.metrics import brier_score_loss, log_loss

    label, probability = checked_predictions(label, probability)
    table = calibration(label, probability, bins)
    error = float(np.average(np.abs(table["observed"] - table["predicted"]), weights=table["rows"]))
    return Scores(
        rows=len(label),
        log_score=-float(log_loss(label, probability, labels=[False, True])),
        brier=float(brier_score_loss(label, probability, pos_label=True)),
        auc=auc(label, probability) if 0 < label.sum() < len(label) else None,
        accuracy=float(np.mean((probability > 0.5) == label)),
        calibration_error=error,
        interval_width=None if interval is None else float(np.diff(np.asarray(interval), axis=1).mean()),
    )


def auc(label: Any, ranking: Any) -> float:
    """P(r₁ > r₀) + ½ P(r₁ = r₀) for a random pair of rows, one of each class; any increasing function of p ranks alike.

    Both classes must occur.
    """
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(label, ranking))


def checked_predictions(label: Any, probability: Any) -> tuple[np.ndarray, np.ndarray]:
    label, probability = np.asarray(label), np.asarray(probability, dtype=float)
    if label.dtype != bool or label.ndim != 1 or label.shape != probability.shape or not len(label):
        raise ValueError(
            "label must be True or False and probability a number, with one of each per row; got labels of type "
            f"{label.dtype} and shape {label.shape} and probabilities of shape {probability.shape}. "
            "Pass y == model.classes_[1]."
        )
    if not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ValueError(f"probability must lie in [0, 1]; got {probability.min():g} to {probability.max():g}.")
    return label, probability


def calibration(label: Any, probability: Any, bins: int = 10, level: float = 0.95) -> "pandas.DataFrame":
    """Predicted probability against observed share, in bins of equally many rows; equal probabilities share a bin.

    Columns: `predicted` and `observed` means, the number of `rows`, and `lower` and `upper`, the credible interval of
    the observed share under Jeffreys' prior Beta(½, ½). If no row of a bin is positive the interval starts at 0, and
    if every row is, it ends at 1.
    """
    import pandas
    from scipy.special import betaincinv

    if bins < 1:
        raise ValueError(f"bins must be at least 1; got {bins}.")
    label, probability = checked_predictions(label, probability)
    edges = np.quantile(probability, np.linspace(0, 1, bins + 1)[1:-1])
    place = np.searchsorted(edges, probability)
    rows = np.bincount(place, minlength=bins)
    filled = rows > 0
    positive = np.bincount(place, weights=label, minlength=bins)[filled]
    total, rows = np.bincount(place, weights=probability, minlength=bins)[filled], rows[filled]
    tail = 0.5 * (1 - level)
    low, high = (betaincinv(positive + 0.5, rows - positive + 0.5, q) for q in (tail, 1 - tail))
    low, high = np.where(positive == 0, 0.0, low), np.where(positive == rows, 1.0, high)
    return pandas.DataFrame(
        {"predicted": total / rows, "observed": positive / rows, "rows": rows, "lower": low, "upper": high}
    )
