"""How good probabilities are: proper scores, ranking, calibration. `label` is True where the second class was seen."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas


class Scores(NamedTuple):
    """Means over rows. Higher is better of `log_score`, `auc` and `accuracy`, lower of the others.

    log_score : mean log p(y); 0 at best
    brier : mean (p - y)²
    auc : probability that a row of the second class is ranked above one of the first; None without both classes
    accuracy : share of rows whose class is the more probable one
    calibration_error : mean |observed share - predicted probability| over bins of equally many rows
    interval_width : mean width of the intervals, if there are any
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

    label, probability = checked(label, probability)
    table = calibration(label, probability, bins)
    error = float(np.average(np.abs(table["observed"] - table["predicted"]), weights=table["rows"]))
    return Scores(
        rows=len(label),
        log_score=-float(log_loss(label, probability, labels=[False, True])),
        brier=float(brier_score_loss(label, probability, pos_label=True)),
        auc=auc(label, probability),
        accuracy=float(np.mean((probability > 0.5) == label)),
        calibration_error=error,
        interval_width=None if interval is None else float(np.diff(np.asarray(interval), axis=1).mean()),
    )


def auc(label: np.ndarray, score: np.ndarray) -> float | None:
    """Probability that a row of the second class scores higher than one of the first; None without both classes."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(label, score)) if 0 < label.sum() < len(label) else None


def checked(label: Any, probability: Any) -> tuple[np.ndarray, np.ndarray]:
    label, probability = np.asarray(label), np.asarray(probability, dtype=float)
    if label.dtype != bool or label.ndim != 1 or label.shape != probability.shape or not len(label):
        raise ValueError(
            f"label must be True or False and probability a number, for each of the same rows; got {label.dtype} of "
            f"shape {label.shape} and {probability.shape}. Pass y == model.classes_[1]."
        )
    if not bool(((probability >= 0) & (probability <= 1)).all()):
        raise ValueError(f"probability must lie in [0, 1]; got {probability.min():g} to {probability.max():g}.")
    return label, probability


def calibration(label: Any, probability: Any, bins: int = 10, level: float = 0.95) -> "pandas.DataFrame":
    """Predicted against observed share, in bins of equally many rows; equal probabilities share a bin.

    Columns: `predicted` and `observed` means, number of `rows`, and `lower` and `upper`, the credible interval of the
    observed share under Jeffreys' prior Beta(½, ½); where no row, or every row, is positive, it reaches the end.
    """
    import pandas
    from scipy.special import betaincinv

    if bins < 1:
        raise ValueError(f"bins must be at least 1; got {bins}.")
    label, probability = checked(label, probability)
    edges = np.quantile(probability, np.linspace(0, 1, bins + 1)[1:-1])
    place = np.searchsorted(edges, probability)
    rows = np.bincount(place, minlength=bins)
    filled = rows > 0
    seen = np.bincount(place, weights=label, minlength=bins)[filled]
    total, rows = np.bincount(place, weights=probability, minlength=bins)[filled], rows[filled]
    tail = 0.5 * (1 - level)
    low, high = (betaincinv(seen + 0.5, rows - seen + 0.5, q) for q in (tail, 1 - tail))
    low, high = np.where(seen == 0, 0.0, low), np.where(seen == rows, 1.0, high)
    return pandas.DataFrame(
        {"predicted": total / rows, "observed": seen / rows, "rows": rows, "lower": low, "upper": high}
    )
