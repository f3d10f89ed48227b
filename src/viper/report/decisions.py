"""From probabilities to decisions: whom to act on, what that gets right and wrong, and what it is worth.

Rows with a probability of at least the threshold are acted on. Acting on a row of the first class is a false alarm
(false positive), leaving alone one of the second a miss (false negative).
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from viper.report.shares import checked_predictions, share_interval

if TYPE_CHECKING:
    import pandas

CURVE_THRESHOLDS = 100
BENEFIT_DRAWS = 4000  # draws of the four shares; ends of intervals of net benefit are good to 2 % of the width
BENEFIT_SEED = 1


def cost_threshold(cost_fp: float = 1.0, cost_fn: float = 1.0) -> float:
    """c₊ / (c₊ + c₋): acting costs c₊(1 - p) on average and not acting c₋p, so act where p is at least this.

    Examples
    --------
    >>> cost_threshold(cost_fp=1, cost_fn=9)  # a miss is nine times as bad as a false alarm
    0.1
    """
    for name, cost in (("cost_fp", cost_fp), ("cost_fn", cost_fn)):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"{name} must be a number of at least 0; got {cost!r}.")
    if cost_fp + cost_fn == 0:
        raise ValueError("cost_fp or cost_fn must be above 0; got 0 for both.")
    return cost_fp / (cost_fp + cost_fn)


def budget_threshold(probability: Any, budget: float) -> float:
    """The lowest threshold at which at most `budget` rows are acted on: a number of rows, or a share if below 1.

    Rows with equal probabilities are acted on together or not at all, so there may be fewer than the budget allows.
    """
    ranked = np.sort(np.asarray(probability, dtype=float))[::-1]
    most = budget_rows(budget, len(ranked))
    if most >= len(ranked):
        return 0.0
    above = ranked[ranked > ranked[most]]  # ranked[most] is the first that is too many
    return float(above[-1]) if len(above) else float(np.nextafter(ranked[0], 2.0))


def budget_rows(budget: float, rows: int) -> int:
    """The number of rows that a budget allows."""
    if 0 < budget < 1:
        return math.floor(budget * rows + 1e-9)
    if budget < 1 or budget != int(budget):
        raise ValueError(f"budget must be a number of rows, or a share of them between 0 and 1; got {budget!r}.")
    return int(budget)


class Confusion(NamedTuple):
    """The four counts at a threshold."""

    threshold: float
    true_positive: int
    false_positive: int
    false_negative: int
    true_negative: int

    @property
    def rows(self) -> int:
        return sum(self[1:])

    @property
    def acted(self) -> int:
        """The number of rows acted on."""
        return self.true_positive + self.false_positive

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Rate -> the count and the number of rows of which it is a share."""
        tp, fp, fn, tn = self[1:]
        return {
            "sensitivity": (tp, tp + fn),
            "specificity": (tn, tn + fp),
            "ppv": (tp, tp + fp),
            "npv": (tn, tn + fn),
            "accuracy": (tp + tn, self.rows),
            "acted": (tp + fp, self.rows),
        }

    def rates(self, level: float = 0.95) -> "pandas.DataFrame":
        """One row per rate: its `value`, `lower` and `upper`, and the counts: `count` of `rows`.

        sensitivity (recall): share of the second class that is acted on; specificity: share of the first class that is
        left alone; ppv (precision): share of those acted on that are of the second class; npv: share of those left
        alone that are of the first class. The credible interval, under Jeffreys' prior, allows for the number
        of rows. The threshold and the model's probabilities are treated as given, so use rows that the model has
        not learned from.
        """
        import pandas

        count, rows = np.array(list(self.counts.values())).T
        lower, upper = share_interval(count, rows, level)
        value = np.divide(count, rows, out=np.full(len(rows), np.nan), where=rows > 0)
        columns = {"value": value, "lower": lower, "upper": upper, "count": count, "rows": rows}
        return pandas.DataFrame(columns, index=pandas.Index(list(self.counts), name="rate"))

    def cost(self, cost_fp: float = 1.0, cost_fn: float = 1.0) -> float:
        """Total cost of the false alarms and misses."""
        return cost_fp * self.false_positive + cost_fn * self.false_negative


def confusion(label: Any, probability: Any, threshold: float = 0.5) -> Confusion:
    """Count what acting on rows with a probability of at least `threshold` gets right and wrong.

    Examples
    --------
    >>> confusion([False, True, True, False], [0.1, 0.4, 0.8, 0.6], 0.5).counts["sensitivity"]
    (1, 2)
    """
    label, probability = checked_predictions(label, probability)
    if math.isnan(threshold):
        raise ValueError(f"threshold must be a number; got {threshold!r}.")
    (tp,), (fp,) = counts_above(label, probability, np.array([threshold]))
    positive = int(label.sum())
    return Confusion(float(threshold), int(tp), int(fp), positive - int(tp), len(label) - positive - int(fp))


def counts_above(label: np.ndarray, probability: np.ndarray, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """True and false positives at each threshold."""
    found = [
        len(p) - np.searchsorted(p, thresholds) for p in (np.sort(probability[label]), np.sort(probability[~label]))
    ]
    return found[0], found[1]


def decision_curve(label: Any, probability: Any, thresholds: Any = None, level: float = 0.95) -> "pandas.DataFrame":
    """Net benefit TP/n - w FP/n with w = t/(1 - t), at each threshold t (Vickers and Elkin, 2006).

    A threshold says how many false alarms one hit is worth: 1/w. Net benefit is then in hits per row. Acting on
    nobody has net benefit 0, acting on everybody b - w(1 - b) at base rate b.

    Columns: `threshold`; `net_benefit` with `lower` and `upper`; `act_on_all`; `gain`, the net benefit beyond the
    better of acting on all and acting on none, with `gain_lower` and `gain_upper`; and `acted`, the share acted on. The
    intervals are those of shares of rows under a Dirichlet(½, ½, ½, ½) prior.

    Parameters
    ----------
    label : array of bool
    probability : array
    thresholds : array, optional
        Above 0 and below 1. By default 100 from near 0 to the highest probability.
    level : float
    """
    import pandas

    label, probability = checked_predictions(label, probability)
    at = default_thresholds(probability) if thresholds is None else np.asarray(thresholds, dtype=float)
    if not (at.ndim == 1 and ((at > 0) & (at < 1)).all()):
        raise ValueError("thresholds must lie strictly between 0 and 1; got others.")
    rows, positive = len(label), int(label.sum())
    tp, fp = counts_above(label, probability, at)
    four = np.stack([tp, fp, positive - tp, rows - positive - fp], 1)
    weight = at / (1 - at)
    benefit, everyone = net_benefits(four / rows, weight)
    drawn = np.random.default_rng(BENEFIT_SEED).standard_gamma(four + 0.5, (BENEFIT_DRAWS, *four.shape))
    drawn_benefit, drawn_everyone = net_benefits(drawn / drawn.sum(-1, keepdims=True), weight)
    ends = [0.5 - 0.5 * level, 0.5 + 0.5 * level]
    low, high = np.quantile(drawn_benefit, ends, axis=0)
    gain_low, gain_high = np.quantile(drawn_benefit - np.maximum(drawn_everyone, 0.0), ends, axis=0)
    return pandas.DataFrame(
        {
            "threshold": at,
            "net_benefit": benefit,
            "lower": low,
            "upper": high,
            "act_on_all": everyone,
            "gain": benefit - np.maximum(everyone, 0.0),
            "gain_lower": gain_low,
            "gain_upper": gain_high,
            "acted": (tp + fp) / rows,
        }
    )


def net_benefits(shares: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Net benefit of the model and of acting on all, from the shares of TP, FP, FN and TN."""
    tp, fp, fn, tn = np.moveaxis(shares, -1, 0)
    return tp - weight * fp, tp + fn - weight * (fp + tn)


def default_thresholds(probability: np.ndarray) -> np.ndarray:
    """Evenly spaced from near 0 to the highest probability, so that rare outcomes have as many as common ones."""
    top = min(float(probability.max()), 0.99) or 0.01
    return np.linspace(top / CURVE_THRESHOLDS, top, CURVE_THRESHOLDS)


def shown_thresholds(label: np.ndarray, probability: np.ndarray) -> tuple[np.ndarray, int]:
    """Round thresholds to choose from, dense where the probabilities are, and the index of the base rate among them.

    They end where so few rows are acted on that nothing can be said.
    """
    base = float(np.clip(label.mean(), 0.001, 0.999))
    last = float(np.quantile(probability, max(0.5, 1 - max(10 / len(label), 0.005))))
    top = min(max(last, 2 * base), 0.99)
    spread = np.quantile(probability, np.linspace(0.01, 0.99, 60))
    wanted = np.concatenate([np.linspace(0.02 * top, top, 50), spread, [base, 0.5]])
    at = np.unique([float(f"{x:.2g}") if x < 0.9 else round(1 - float(f"{1 - x:.2g}"), 12) for x in wanted])
    at = at[(at > 0) & (at <= top)]
    return at, int(np.abs(at - base).argmin())
