"""Scores of the probabilities of K classes: proper scores, skill, accuracy, ranking and calibration of each class.

`label` is the number of a row's class, from 0 on; `probability` has a column for each class.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from viper.report.metrics import auc, calibration, read_row_weights, row_scores

if TYPE_CHECKING:
    import pandas


class ClassScores(NamedTuple):
    """Means over rows. Higher is better for the log score, AUC, accuracy and skill, lower for the others.

    log_score : mean log p(y); 0 at best
    brier : mean Σ_k (p_k - y_k)², from 0 to 2
    auc : mean over classes of the AUC of a class against all others; None if a class has no rows
    accuracy : share of rows whose class is the most probable one
    calibration_error : mean over classes of that of the class against all others
    interval_width : mean width of the intervals; None without intervals
    base_accuracy : accuracy of always predicting the commonest class
    log_skill, brier_skill : 1 - loss / loss of predicting the shares of the classes for every row; None for one class
    """

    rows: int
    log_score: float
    brier: float
    auc: float | None
    accuracy: float
    calibration_error: float
    interval_width: float | None = None
    base_accuracy: float | None = None
    log_skill: float | None = None
    brier_skill: float | None = None


def class_scores(
    label: Any, probability: Any, interval: Any = None, bins: int = 10, sample_weight: Any = None
) -> ClassScores:
    """Score the probabilities of K classes. A row of weight c counts as c equal rows.

    Examples
    --------
    >>> class_scores([0, 1, 2], [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]).accuracy
    0.6666666666666666
    """
    label, probability = checked_class_predictions(label, probability)
    weight = read_row_weights(sample_weight, len(label))
    mean = lambda values: float(np.average(values, weights=weight))  # noqa: E731
    shares = np.array([mean(label == k) for k in range(probability.shape[1])])
    known = np.broadcast_to(shares, probability.shape)
    losses = {name: mean(row_scores(label, probability, name)) for name in ("log_score", "brier")}
    base = {name: mean(row_scores(label, known, name)) for name in losses}
    several = int((shares > 0).sum()) > 1
    each = by_class(label, probability, bins=bins, sample_weight=sample_weight)
    return ClassScores(
        rows=len(label),
        **losses,
        auc=None if each["auc"].isna().any() else float(each["auc"].mean()),
        accuracy=mean(probability.argmax(1) == label),
        calibration_error=float(each["calibration_error"].mean()),
        interval_width=None if interval is None else mean(np.diff(np.asarray(interval), axis=-1)[..., 0].mean(1)),
        base_accuracy=float(shares.max()),
        log_skill=1.0 - losses["log_score"] / base["log_score"] if several else None,
        brier_skill=1.0 - losses["brier"] / base["brier"] if several else None,
    )


def checked_class_predictions(label: Any, probability: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return whole numbers and a matrix, or raise."""
    label, probability = np.asarray(label), np.asarray(probability, dtype=float)
    if probability.ndim != 2 or label.shape != probability.shape[:1] or not len(label):
        raise ValueError(
            "probability must have a row for each label and a column for each class; got shapes "
            f"{label.shape} and {probability.shape}."
        )
    if not np.isin(label, np.arange(probability.shape[1])).all():
        raise ValueError(f"label must be the numbers of classes, from 0 to {probability.shape[1] - 1}; got others.")
    if not (np.isfinite(probability).all() and np.allclose(probability.sum(1), 1.0, atol=1e-6)):
        raise ValueError("probability must sum to 1 in every row; got rows that do not.")
    return label.astype(int), probability


def by_class(
    label: Any, probability: Any, classes: Any = None, bins: int = 10, sample_weight: Any = None
) -> "pandas.DataFrame":
    """Each class against all others: `share` of the rows, `predicted` mean probability, `auc`, `recall`, `precision`,
    `calibration_error`; indexed by class. What cannot be computed is NaN.
    """
    import pandas

    label, probability = checked_class_predictions(label, probability)
    weight = read_row_weights(sample_weight, len(label))
    chosen, rows = probability.argmax(1), []
    for k in range(probability.shape[1]):
        own, said = label == k, chosen == k
        table = calibration(own, np.clip(probability[:, k], 0.0, 1.0), bins, sample_weight=sample_weight)
        error = float(np.average(np.abs(table["observed"] - table["predicted"]), weights=table["rows"]))
        both = 0.0 < weight @ own < weight.sum()
        rows.append(
            {
                "share": np.average(own, weights=weight),
                "predicted": np.average(probability[:, k], weights=weight),
                "auc": auc(own, probability[:, k], weight) if both else np.nan,
                "recall": weight @ (own & said) / (weight @ own) if weight @ own else np.nan,
                "precision": weight @ (own & said) / (weight @ said) if weight @ said else np.nan,
                "calibration_error": error,
            }
        )
    return pandas.DataFrame(rows, index=pandas.Index(range(len(rows)) if classes is None else classes, name="class"))


def confusion_table(label: Any, probability: Any, classes: Any = None) -> "pandas.DataFrame":
    """Rows by true class (down) and most probable class (across)."""
    import pandas

    label, probability = checked_class_predictions(label, probability)
    count = probability.shape[1]
    table = np.zeros((count, count), dtype=np.int64)
    np.add.at(table, (label, probability.argmax(1)), 1)
    names = list(range(count)) if classes is None else list(classes)
    return pandas.DataFrame(
        table, index=pandas.Index(names, name="true"), columns=pandas.Index(names, name="most probable")
    )
