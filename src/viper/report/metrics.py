"""Scores of predicted probabilities: proper scores, skill, ranking and calibration, and differences between models.

`viper.metrics` also has the functions of `report.decisions` and `report.checks`.

`label` is True for the rows of the second class; `probability` is the predicted probability of that class.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from viper.report.checks import binned_residuals, predictive_check
from viper.report.decisions import Confusion, budget_threshold, confusion, cost_threshold, decision_curve
from viper.report.shares import checked_predictions, equal_groups, named_groups, share_interval

if TYPE_CHECKING:
    import pandas

__all__ = [
    "CalibrationVerdict",
    "Confusion",
    "LabelScores",
    "Scores",
    "auc",
    "auc_interval",
    "binned_residuals",
    "budget_threshold",
    "by_class",
    "by_group",
    "calibration",
    "class_scores",
    "confusion",
    "confusion_table",
    "cost_threshold",
    "decision_curve",
    "each_label",
    "entropy",
    "judge_calibration",
    "label_scores",
    "predictive_check",
    "row_scores",
    "score_differences",
    "scores",
]

SMALL_LOSS = 0.005  # share of the entropy: 4 points at 50 %, a quarter of the probability at 1 %
LARGE_LOSS = 0.02  # share of the entropy: 8 points at 50 %, half of the probability at 1 %
JUDGED_LEVEL = 0.9  # level of the interval of the loss; chance exceeds each end once in 20 times
ROUNDED_SHARES = 1e-12  # smaller differences of shares and mean probabilities count as zero
ROWS_PER_GROUP = 100  # rows for each group by which calibration is judged
FEWEST_EXPECTED = 5.0  # rows of each class expected in a group whose count is nearly normal
LEAST_VARIANCE = 1e-6  # variance of a count; smaller only if all probabilities are 0 or 1, and then any error is plain
LARGEST_EXACT = 1e6  # statistic above which the noncentral χ² is as good as normal
FEW_OF_A_CLASS = 10  # rows of a class in a group, below which its scores say little
CLEAR_ERRORS = 2.0  # standard errors that make a difference clear
LARGEST_SHIFT = 3.0  # shift of the log-odds beyond which predictions are wrong in one way only: too high or too low


class Scores(NamedTuple):
    """Means over rows. Higher is better for the log score, AUC, accuracy, precision and skill, lower for the others.

    log_score : mean log p(y); 0 at best
    brier : mean (p - y)²; with more than two classes Σ_k (p_k - y_k)², from 0 to 2
    auc : probability that a row of the second class is ranked above one of the first; with more than two classes the
        mean over classes of that of a class against all others; None if a class has no rows
    accuracy : share of rows whose class is the most probable one
    calibration_error : mean |observed share - predicted probability| over bins of equally many rows; with more than two
        classes the mean over classes of that of a class against all others
    interval_width : mean width of the intervals; None without intervals
    base_rate : share of rows of the second class; None with more than two
    base_accuracy : accuracy of always predicting the commonest class
    log_skill, brier_skill : 1 - loss / loss of predicting the shares of the classes for every row; 1 is perfect, 0 no
        better than these shares, which are those of these rows; None if the rows have one class
    average_precision : mean share of the second class among the rows ranked above each of its rows, which is the base
        rate if the ranking is random; None without both classes, or with more than two
    """

    rows: int
    log_score: float
    brier: float
    auc: float | None
    accuracy: float
    calibration_error: float
    interval_width: float | None = None
    base_rate: float | None = None
    base_accuracy: float | None = None
    log_skill: float | None = None
    brier_skill: float | None = None
    average_precision: float | None = None


def scores(label: Any, probability: Any, interval: Any = None, bins: int = 10, sample_weight: Any = None) -> Scores:
    """Score probabilities of the second class.

    With `sample_weight`, a row of weight c counts as c equal rows: integer weights give the scores of repeated rows.

    Examples
    --------
    >>> scores([False, True, True], [0.25, 0.5, 0.75]).brier
    0.125
    """
    from sklearn.metrics import average_precision_score

    label, probability = checked_predictions(label, probability)
    weight = read_row_weights(sample_weight, len(label))
    base = float(np.average(label, weights=weight))
    both = len(np.unique(label[weight > 0])) > 1
    precision = average_precision_score(label, probability, sample_weight=weight) if both else None
    return mean_scores(label, probability, probability > 0.5, np.array([1 - base, base]), weight, interval)._replace(
        auc=auc(label, probability, weight) if both else None,
        calibration_error=calibration_error(label, probability, bins, sample_weight),
        base_rate=base,
        average_precision=None if precision is None else float(precision),
    )


def mean_scores(
    label: np.ndarray,
    p: np.ndarray,
    chosen: np.ndarray,
    shares: np.ndarray,
    weight: np.ndarray,
    interval: Any,
) -> Scores:
    """The scores that are means over rows, for two classes or more; `shares` are those of the classes."""
    mean = lambda values: float(np.average(values, weights=weight))  # noqa: E731
    known = np.broadcast_to(shares if p.ndim == 2 else shares[1], p.shape)
    losses = {name: mean(row_scores(label, p, name)) for name in ("log_score", "brier")}
    of_shares = {name: mean(row_scores(label, known, name)) for name in losses}
    several = int((shares > 0).sum()) > 1
    width = None if interval is None else np.diff(np.asarray(interval), axis=-1).reshape(len(label), -1).mean(1)
    return Scores(
        rows=len(label),
        **losses,
        auc=None,
        accuracy=mean(chosen == label),
        calibration_error=np.nan,
        interval_width=None if width is None else mean(width),
        base_accuracy=float(shares.max()),
        log_skill=1 - losses["log_score"] / of_shares["log_score"] if several else None,
        brier_skill=1 - losses["brier"] / of_shares["brier"] if several else None,
    )


def read_row_weights(given: Any, rows: int) -> np.ndarray:
    """Return the weights of rows, by default all one."""
    weight = np.ones(rows) if given is None else np.asarray(given, dtype=float)
    if weight.shape != (rows,) or not (np.isfinite(weight).all() and (weight >= 0).all() and weight.any()):
        raise ValueError(
            f"sample_weight must be one number of at least 0 for each of the {rows:,} rows; got shape {weight.shape}"
            f"{'' if weight.shape != (rows,) else ' with others'}."
        )
    return weight


def entropy(base: float) -> float:
    """-b log b - (1-b) log(1-b): what predicting the base rate b for every row loses, in nats per row."""
    from scipy.special import entr

    return float(entr(base) + entr(1 - base))


def auc(label: Any, ranking: Any, sample_weight: Any = None) -> float:
    """P(r₁ > r₀) + ½ P(r₁ = r₀) for a random pair of rows, one of each class; any increasing function of p ranks alike.

    Both classes must occur.
    """
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(label, ranking, sample_weight=sample_weight))


def auc_interval(label: Any, ranking: Any, level: float = 0.95) -> tuple[float, float]:
    """Interval of the AUC, from the variance of DeLong, DeLong and Clarke-Pearson (1988) on the logit scale.

    If all pairs are ranked alike that variance is zero; then it is the interval of a share that was seen in as many
    rows as the rarer class has.
    """
    from scipy.special import expit, logit, ndtri
    from scipy.stats import rankdata

    label, ranking = np.asarray(label, dtype=bool), np.asarray(ranking, dtype=float)
    ranks, one, zero = rankdata(ranking), int(label.sum()), int((~label).sum())
    area = auc(label, ranking)
    if area in (0.0, 1.0) or min(one, zero) < 2:
        fewest = min(one, zero)
        low, high = share_interval(round(area * fewest), fewest, level)
        return float(low), float(high)
    # share of the other class that each row is ranked above
    above_zero = (ranks[label] - rankdata(ranking[label])) / zero
    above_one = (ranks[~label] - rankdata(ranking[~label])) / one
    error = np.sqrt(above_zero.var(ddof=1) / one + above_one.var(ddof=1) / zero)
    reach = ndtri(0.5 + 0.5 * level) * error / (area * (1 - area))
    return float(expit(logit(area) - reach)), float(expit(logit(area) + reach))


# --- calibration ---


def calibration(
    label: Any, probability: Any, bins: int = 10, level: float = 0.95, sample_weight: Any = None
) -> "pandas.DataFrame":
    """Predicted probability against observed share, in bins of equally many rows; equal probabilities share a bin.

    Columns: `predicted` and `observed` means, the number of `rows`, and `lower` and `upper`, the credible interval of
    the observed share under Jeffreys' prior Beta(½, ½). If no row of a bin is positive the interval starts at 0, and
    if every row is, it ends at 1. With `sample_weight`, rows are counted by their weights.
    """
    import pandas

    if bins < 1:
        raise ValueError(f"bins must be at least 1; got {bins}.")
    label, probability = checked_predictions(label, probability)
    weight = read_row_weights(sample_weight, len(label))
    label, probability, weight = (x[weight > 0] for x in (label, probability, weight))
    place = equal_groups(probability, bins, None if sample_weight is None else weight)
    rows, positive = np.bincount(place, weight), np.bincount(place, weight * label)
    low, high = share_interval(positive, rows, level)
    predicted = np.bincount(place, weight * probability) / rows
    rows = rows.astype(np.int64) if (rows % 1 == 0).all() else rows
    return pandas.DataFrame(
        {"predicted": predicted, "observed": positive / rows, "rows": rows, "lower": low, "upper": high}
    )


def calibration_error(label: Any, probability: Any, bins: int, sample_weight: Any) -> float:
    """Mean |observed share - predicted probability| over the bins of `calibration`, by their rows."""
    table = calibration(label, probability, bins, sample_weight=sample_weight)
    error = float(np.average(np.abs(table["observed"] - table["predicted"]), weights=table["rows"]))
    return error if error > ROUNDED_SHARES else 0.0


class CalibrationVerdict(NamedTuple):
    """How wrong probabilities are, beyond chance, and whether it matters.

    verdict : "good", "fair", "poor", or "unclear" if the rows are too few to tell
    loss : estimated share of the log score lost to miscalibration, in units of the entropy of the base rate
    lower, upper : its 90 % interval
    p_value : of the hypothesis that all probabilities are right; it says nothing about the size of the error
    typical_error : root mean square of observed share - probability, without what chance adds
    shift : log-odds to add to every prediction so that their mean is right; above 0, predictions are too low
    slope : factor of the log-odds that fits best; below 1, predictions are too extreme. None if there is none
    shift_error, slope_error : their standard errors
    rows, groups : how many were used
    rarer : number of rows of the rarer class, which limits how much can be said
    """

    verdict: str
    loss: float
    lower: float
    upper: float
    p_value: float
    typical_error: float
    shift: float | None
    shift_error: float | None
    slope: float | None
    slope_error: float | None
    rows: int
    groups: int
    rarer: int

    @property
    def sentence(self) -> str:
        """The verdict in plain words, which terminal and page share."""
        size = f"{percentage_points(self.typical_error)} on average, beyond chance"
        if self.verdict == "unclear":
            start = (
                "Its percentages seem to be off"
                if self.p_value < 0.5 * (1 - JUDGED_LEVEL)
                else "Nothing here contradicts its percentages"
            )
            count, kind = (self.rarer, " with the rarer outcome") if self.rarer < 0.1 * self.rows else (self.rows, "")
            few = f"one row{kind} is" if count == 1 else f"{count:,} rows{kind} are"
            return f"{start}, but {few} too few to say how far they can be trusted."
        if self.verdict == "good":
            beyond = "" if self.p_value > 0.05 else f" Their error, {size}, can be measured but is too small to matter."
            return f"Its percentages can be taken at their word.{beyond}"
        how = f" {self.direction}" if self.direction else ""
        if self.verdict == "fair":
            return f"Its percentages are roughly right: off by {size}.{how}"
        return f"Its percentages are wrong: off by {size}.{how}"

    @property
    def direction(self) -> str:
        """The direction in which predictions are wrong, if it is clear; otherwise empty."""
        said = []
        if self.shift is not None and self.shift_error and abs(self.shift) > CLEAR_ERRORS * self.shift_error:
            said.append("too low" if self.shift > 0 else "too high")
        far_off = self.shift is not None and abs(self.shift) > LARGEST_SHIFT
        clear_slope = self.slope_error and abs((self.slope or 0.0) - 1) > CLEAR_ERRORS * self.slope_error
        if self.slope is not None and clear_slope and not (far_off and self.slope > 1):
            said.append("too extreme" if self.slope < 1 else "too cautious")
        return f"They are {' and '.join(said)}." if said else ""


def percentage_points(share: float) -> str:
    """A difference of probabilities in percentage points, with one or two significant digits."""
    points = 100 * share
    shown = f"{points:.0f}" if points >= 9.5 else f"{points:.1f}" if points >= 0.095 else f"{points:.1g}"
    return f"{shown} percentage point{'' if shown == '1' else 's'}"


def judge_calibration(
    label: Any, probability: Any, bins: int = 10, groups: Any = None, sample_weight: Any = None
) -> CalibrationVerdict:
    """Judge probabilities by the size of their error, beyond chance, and by how surely that size is known.

    The rows are cut into groups g of similar probability, one for every 100 rows, at most `bins`; or into the given
    `groups`, a number per row.
    Q = Σ_g (O_g - E_g)² / V_g compares the observed count of the second class with its expectation E = Σp and variance
    V = Σp(1-p) (Hosmer and Lemeshow). It is χ² with noncentrality λ, where λ/2n is the log score, in
    nats per row, that the errors of the probabilities cost. The loss is λ/2n over the entropy of the base rate, which
    is what knowing nothing costs. Its interval inverts the noncentral χ². Unlike the p-value, the loss does not depend
    on the number of rows (Nattino, Pennell and Lemeshow, 2020).

    The verdict is "good" if the loss is below 0.5 % (an error of 4 points at 50 %, or of a quarter of the probability
    at 1 %), "fair" below 2 % (8 points at 50 %, half of the probability at 1 %), otherwise "poor"; and "unclear" if
    the interval reaches from good to poor.

    With `sample_weight`, a row of weight c counts as c equal rows.
    """
    label, probability = checked_predictions(label, probability)
    weight = read_row_weights(sample_weight, len(label))
    groups = None if groups is None else np.asarray(groups)[weight > 0]
    label, probability, weight = (x[weight > 0] for x in (label, probability, weight))
    total, positive = float(weight.sum()), float(weight @ label)
    bins = int(np.clip(total // ROWS_PER_GROUP, 2, bins)) if bins > 1 else 1
    if groups is None:
        place = equal_groups(probability, bins, None if sample_weight is None else weight)
    else:
        place = np.unique(groups, return_inverse=True)[1]
    found = calibration_loss(label, probability, place, weight)
    shift, shift_error, slope, slope_error = recalibration(label, probability, weight)
    return CalibrationVerdict(
        **found._asdict(),
        typical_error=typical_error(label, probability, place, weight),
        shift=shift,
        shift_error=shift_error,
        slope=slope,
        slope_error=slope_error,
        rows=round(total),
        groups=int(place.max()) + 1,
        rarer=round(min(positive, total - positive)),
    )


class CalibrationLoss(NamedTuple):
    """The part of a `CalibrationVerdict` that depends on the groups of rows."""

    verdict: str
    loss: float
    lower: float
    upper: float
    p_value: float


def calibration_loss(
    label: np.ndarray, probability: np.ndarray, place: np.ndarray, weight: np.ndarray | None = None
) -> CalibrationLoss:
    """The verdict of `judge_calibration` on groups of rows, each with the number of its group."""
    from scipy.special import chdtrc

    place = np.unique(place, return_inverse=True)[1]
    weight = np.ones(len(label)) if weight is None else weight
    squares, means = misfits(label, probability, place, weight)
    statistic, freedom = float(squares.sum()), max(float(means.sum()), 1.0)
    lower = noncentrality(statistic, freedom, 0.5 + 0.5 * JUDGED_LEVEL)
    # an agreement better than chance is luck, and must not narrow the interval
    upper = noncentrality(max(statistic, freedom), freedom, 0.5 - 0.5 * JUDGED_LEVEL)
    # entropy of the mean probability, if the rows have one class only
    both = 0 < label.sum() < len(label)
    base = float(np.average(label if both else np.clip(probability, 1e-9, 1 - 1e-9), weights=weight))
    unit = 2 * float(weight.sum()) * entropy(base)
    loss, lower, upper = max(0.0, statistic - freedom) / unit, lower / unit, upper / unit
    clear = lower >= SMALL_LOSS or upper <= LARGE_LOSS
    verdict = "good" if loss < SMALL_LOSS else "fair" if loss < LARGE_LOSS else "poor"
    return CalibrationLoss(verdict if clear else "unclear", loss, lower, upper, float(chdtrc(freedom, statistic)))


def misfits(
    label: np.ndarray, probability: np.ndarray, place: np.ndarray, weight: Any = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """z² of each group, and its mean if all probabilities are right, which is at most about 1.

    z = (O - E)/√V. Where fewer than five rows of a class are expected, it is that class's count as a normal score.
    """
    rows, observed, expected = (np.bincount(place, weight * x) for x in (np.ones(len(label)), label, probability))
    variance = np.bincount(place, weight * probability * (1 - probability))
    other = 2 * expected > rows  # the first class is the rarer one
    rarer, count = np.where(other, rows - expected, expected), np.where(other, rows - observed, observed)
    squares, means = (observed - expected) ** 2 / np.maximum(variance, LEAST_VARIANCE), np.ones(len(rows))
    for g in np.flatnonzero(rarer < FEWEST_EXPECTED):
        squares[g], means[g] = rare_misfit(rarer[g], count[g])
    return squares, means


def rare_misfit(mean: float, count: float) -> tuple[float, float]:
    """z² of a Poisson count, where Φ(z) is its mid-p value, and the mean of z² over such counts."""
    from scipy.special import gammainc, gammaincc, gammaln, ndtri, xlogy

    def squared_score(k: Any) -> Any:
        below = np.where(k == 0, 0.0, gammaincc(np.maximum(k, 1), mean))  # P(N < k)
        above = gammainc(k + 1, mean)  # P(N > k)
        tail = np.minimum(below, above) + 0.5 * (1 - below - above)
        return np.square(ndtri(np.clip(tail, 1e-300, 0.5)))

    every = np.arange(60)  # the mean is below 5, so that larger counts have no mass
    mass = np.exp(xlogy(every, mean) - mean - gammaln(every + 1))
    return float(squared_score(np.asarray(count))), float(mass @ squared_score(every))


def noncentrality(statistic: float, freedom: float, mass: float) -> float:
    """λ ≥ 0 at which a noncentral χ² lies below the statistic with probability `mass`; 0 if there is none."""
    from scipy.special import chdtr, chndtrinc, ndtri

    if statistic > LARGEST_EXACT:
        return float(np.square(np.sqrt(statistic) - ndtri(mass)))
    return 0.0 if chdtr(freedom, statistic) <= mass else float(chndtrinc(statistic, freedom, mass))


def typical_error(label: np.ndarray, probability: np.ndarray, place: np.ndarray, weight: np.ndarray) -> float:
    """√Σ_g n_g/n [(observed - predicted)² - its variance]: unbiased under the root, and 0 where that is negative."""
    rows = np.bincount(place, weight)
    difference = np.bincount(place, weight * (label - probability)) / rows
    variance = np.bincount(place, weight * probability * (1 - probability)) / rows**2
    return float(np.sqrt(max(0.0, np.average(difference**2 - variance, weights=rows))))


def recalibration(
    label: np.ndarray, probability: np.ndarray, weight: np.ndarray
) -> tuple[float | None, float | None, float | None, float | None]:
    """Shift a of logit p + a and slope b of a' + b logit p that maximise the likelihood, each with its standard error.

    None if the rows have one class, if all probabilities are equal, or if logit p separates the classes.
    """
    from scipy.special import logit

    if not 0 < label.sum() < len(label):
        return None, None, None, None
    x = logit(np.clip(probability, 1e-15, 1 - 1e-15))
    shift, shift_error = newton_logistic(np.ones((len(x), 1)), label, x, weight) or (None, None)
    slope, slope_error = None, None
    separated = x[label].min() >= x[~label].max() or x[label].max() <= x[~label].min()
    if not separated:
        slope, slope_error = newton_logistic(np.stack([x, np.ones(len(x))], 1), label, 0.0, weight) or (None, None)
    return shift, shift_error, slope, slope_error


def newton_logistic(
    design: np.ndarray, label: np.ndarray, offset: Any, weight: np.ndarray
) -> tuple[float, float] | None:
    """The first coefficient of a logistic regression and its standard error; None if the steps do not converge."""
    from scipy.special import expit

    beta = np.zeros(design.shape[1])
    sign = np.where(label, -1, 1)
    objective = lambda b: float(weight @ np.logaddexp(0.0, sign * (offset + design @ b)))  # noqa: E731
    value = objective(beta)
    for _ in range(100):
        p = expit(offset + design @ beta)
        information = design.T @ (design * (weight * p * (1 - p))[:, None])
        if np.linalg.matrix_rank(information) < len(beta):
            return None
        step = np.linalg.solve(information, design.T @ (weight * (label - p)))
        while (new := objective(beta + step)) > value + 1e-9 * abs(value):
            step = 0.5 * step
        beta, value = beta + step, new
        if np.abs(step).max() < 1e-10 * (1 + np.abs(beta).max()):
            return float(beta[0]), float(np.sqrt(np.linalg.inv(information)[0, 0]))
    return None


# --- differences between models ---


def score_differences(label: Any, probabilities: Mapping[str, Any], score: str = "log_score") -> "pandas.DataFrame":
    """Mean scores of several models on the same rows, and their paired differences from the best, the best first.

    Columns: `score`; `difference`, the mean over rows of score - score of the best, which is never above 0 (for Brier,
    never below); its standard error `error`, sd / √rows; and `clear`, whether it is more than two standard errors.
    Both models meet the same easy and hard rows, so the error of a difference is much smaller than that of a score.

    Parameters
    ----------
    label : array of bool
    probabilities : mapping from the name of a model to its probabilities
    score : "log_score" or "brier"
    """
    import pandas

    if score not in ("log_score", "brier"):
        raise ValueError(f"score must be 'log_score' or 'brier'; got {score!r}.")
    if not probabilities:
        raise ValueError("probabilities must have at least one model; got none.")
    rows = {name: row_scores(label, given, score) for name, given in probabilities.items()}
    sign = 1.0 if score == "log_score" else -1.0
    ranked = sorted(rows, key=lambda name: -sign * rows[name].mean())
    best = rows[ranked[0]]
    differences = [rows[name] - best for name in ranked]
    error = np.array([d.std(ddof=1) / np.sqrt(len(d)) if len(d) > 1 else np.nan for d in differences])
    mean = np.array([d.mean() for d in differences])
    table = {
        "score": [rows[name].mean() for name in ranked],
        "difference": mean,
        "error": error,
        "clear": np.abs(mean) > CLEAR_ERRORS * error,
    }
    return pandas.DataFrame(table, index=pandas.Index(ranked, name="model"))


def row_scores(label: Any, probability: Any, score: str = "log_score") -> np.ndarray:
    """Log p(y) or (p - y)² of each row. As in scikit-learn, the log of 0 is that of the smallest step from 0.

    With a column of probabilities for each class, and numbers of classes as labels, log p_y or Σ_k (p_k - y_k)².
    """
    if np.ndim(probability) == 2:
        label, probability = np.asarray(label, dtype=int), np.asarray(probability, dtype=float)
        own = probability[np.arange(len(label)), label]
        if score == "brier":
            return np.square(probability).sum(1) + 1.0 - 2.0 * own
        return np.log(np.clip(own, np.finfo(float).eps, 1.0))
    label, probability = checked_predictions(label, probability)
    if score == "brier":
        return (probability - label) ** 2
    smallest = np.finfo(float).eps
    return np.log(np.clip(np.where(label, probability, 1 - probability), smallest, 1.0))


# --- subgroups ---


def by_group(label: Any, probability: Any, group: Any, level: float = 0.95, ranges: int = 5) -> "pandas.DataFrame":
    """Scores and calibration of each group of rows, with intervals.

    Columns: `rows`; `observed` and `predicted` shares of the second class; means over rows of `log_score` and `brier`;
    `auc`, empty without both classes. `observed`, the scores and AUC have columns `_lower` and `_upper`: Jeffreys'
    interval of a share, Student's of a mean, DeLong's of the AUC. `few` marks groups with fewer than 10 rows of a
    class, whose scores say little. `differs` marks groups whose observed count is further from the predicted one than
    chance would take *any* of the groups, with probability `level`, however many groups there are.
    `judge_calibration(label, probability, groups=...)` judges all groups together.

    Brier and log scores depend on the base rate, so they are not comparable between groups that differ in it; AUC and
    calibration are.

    Parameters
    ----------
    label : array of bool
    probability : array
    group : array, Series or Categorical
        What to group by: its values, or `ranges` ranges of equally many rows if it has more than 10 different numbers.
        Missing values are a group. With more than 20 levels, the rarest are one group.
    level, ranges : float, int
    """
    import pandas

    label, probability = checked_predictions(label, probability)
    if len(group) != len(label):
        raise ValueError(f"group must have one value per row; got {len(group)} for {len(label)} rows.")
    if ranges < 1:
        raise ValueError(f"ranges must be at least 1; got {ranges}.")
    place, names = named_groups(group, ranges)
    rows = [group_scores(label[place == k], probability[place == k], level) for k in range(len(names))]
    table = pandas.DataFrame(rows, index=pandas.Index(names, name=getattr(group, "name", None) or "group"))
    surprising = misfits(label, probability, place)[0] > joint_limit(len(names), level)
    return table.assign(
        differs=surprising & ~table["predicted"].between(table["observed_lower"], table["observed_upper"])
    )


def joint_limit(groups: int, level: float) -> float:
    """z² that none of the groups exceeds with probability `level`, if all probabilities are right (Šidák)."""
    from scipy.special import chdtri

    return float(chdtri(1, -np.expm1(np.log(level) / groups)))


def group_scores(label: np.ndarray, probability: np.ndarray, level: float) -> dict[str, Any]:
    both = 0 < label.sum() < len(label)
    found: dict[str, Any] = {"rows": len(label), "observed": label.mean()}
    found["observed_lower"], found["observed_upper"] = map(float, share_interval(label.sum(), len(label), level))
    found["predicted"] = probability.mean()
    for score in ("log_score", "brier"):
        found |= named_interval(score, *mean_interval(row_scores(label, probability, score), level))
    area = (auc(label, probability), *auc_interval(label, probability, level)) if both else (np.nan,) * 3
    found |= named_interval("auc", *area)
    return found | {"few": min(label.sum(), (~label).sum()) < FEW_OF_A_CLASS}


def named_interval(name: str, value: float, low: float, high: float) -> dict[str, float]:
    return {name: value, f"{name}_lower": low, f"{name}_upper": high}


def mean_interval(values: np.ndarray, level: float) -> tuple[float, float, float]:
    """Mean and Student's interval of it, which is empty for one row."""
    from scipy.special import stdtrit

    mean, n = float(values.mean()), len(values)
    reach = float(stdtrit(n - 1, 0.5 + 0.5 * level)) * values.std(ddof=1) / np.sqrt(n) if n > 1 else np.nan
    return mean, mean - reach, mean + reach


# --- more than two classes: `label` is the number of a row's class, `probability` has a column for each ---


def class_scores(
    label: Any, probability: Any, interval: Any = None, bins: int = 10, sample_weight: Any = None
) -> Scores:
    """Score the probabilities of K classes. A row of weight c counts as c equal rows.

    Examples
    --------
    >>> class_scores([0, 1, 2], [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]).accuracy
    0.6666666666666666
    """
    label, probability = checked_class_predictions(label, probability)
    weight = read_row_weights(sample_weight, len(label))
    shares = np.array([np.average(label == k, weights=weight) for k in range(probability.shape[1])])
    each = by_class(label, probability, bins=bins, sample_weight=sample_weight)
    return mean_scores(label, probability, probability.argmax(1), shares, weight, interval)._replace(
        auc=None if each["auc"].isna().any() else float(each["auc"].mean()),
        calibration_error=float(each["calibration_error"].mean()),
    )


def checked_class_predictions(label: Any, probability: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return integer labels and a matrix, or raise."""
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
        both = 0.0 < weight @ own < weight.sum()
        rows.append(
            {
                "share": np.average(own, weights=weight),
                "predicted": np.average(probability[:, k], weights=weight),
                "auc": auc(own, probability[:, k], weight) if both else np.nan,
                "recall": weight @ (own & said) / (weight @ own) if weight @ own else np.nan,
                "precision": weight @ (own & said) / (weight @ said) if weight @ said else np.nan,
                "calibration_error": calibration_error(own, np.clip(probability[:, k], 0.0, 1.0), bins, sample_weight),
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


# --- several labels: `label` and `probability` have a column for each ---


class LabelScores(NamedTuple):
    """Scores of all labels together, as scikit-learn defines them.

    exact : share of rows whose labels are all right (accuracy_score)
    hamming_loss : share of labels that are wrong
    f1_macro, f1_micro : F1 of each label on average, and of all labels as one
    ranking_precision : mean share of a row's labels among those ranked as high as each of them
        (label_ranking_average_precision_score)
    log_score : mean of the log scores of the labels
    auc : mean AUC of the labels; None if one has only one class
    interval_width : mean width of the intervals; None without intervals
    """

    rows: int
    labels: int
    exact: float
    hamming_loss: float
    f1_macro: float
    f1_micro: float
    ranking_precision: float
    log_score: float
    auc: float | None
    interval_width: float | None = None


def label_scores(
    label: Any, probability: Any, interval: Any = None, bins: int = 10, sample_weight: Any = None
) -> LabelScores:
    """Score the probabilities of several labels together. A label is predicted where it is more probable than not."""
    from sklearn.metrics import accuracy_score, f1_score, hamming_loss, label_ranking_average_precision_score

    label, probability = checked_label_predictions(label, probability)
    weight = read_row_weights(sample_weight, len(label))
    said, each = probability > 0.5, each_label(label, probability, None, bins, sample_weight)
    together: dict[str, Any] = {"sample_weight": weight, "zero_division": 0.0}
    return LabelScores(
        rows=label.shape[0],
        labels=label.shape[1],
        exact=float(accuracy_score(label, said, sample_weight=weight)),
        hamming_loss=float(hamming_loss(label, said, sample_weight=weight)),
        f1_macro=float(f1_score(label, said, average="macro", **together)),
        f1_micro=float(f1_score(label, said, average="micro", **together)),
        ranking_precision=float(label_ranking_average_precision_score(label, probability, sample_weight=weight)),
        log_score=float(each["log_score"].mean()),
        auc=None if each["auc"].isna().any() else float(each["auc"].mean()),
        interval_width=None if interval is None else float(np.average(np.ptp(interval, -1).mean(1), weights=weight)),
    )


def each_label(
    label: Any, probability: Any, names: Any = None, bins: int = 10, sample_weight: Any = None
) -> "pandas.DataFrame":
    """The `scores` of each label, with `recall`, `precision` and `f1`; indexed by label.

    What cannot be computed is NaN.
    """
    import pandas

    label, probability = checked_label_predictions(label, probability)
    weight = read_row_weights(sample_weight, len(label))
    rows = []
    for own, p in zip(label.T, probability.T, strict=True):
        right, said = weight @ (own & (p > 0.5)), weight @ (p > 0.5)
        recall, precision = (right / total if total else np.nan for total in (weight @ own, said))
        total = weight @ own + said
        rates = {"recall": recall, "precision": precision, "f1": 2.0 * right / total if total else np.nan}
        rows.append({**scores(own, p, None, bins, sample_weight)._asdict(), **rates})
    index = pandas.Index(range(len(rows)) if names is None else names, name="label")
    table = pandas.DataFrame(rows, index=index).drop(columns=["rows", "interval_width"])
    return table.astype(float)


def checked_label_predictions(label: Any, probability: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return booleans and a matrix, or raise."""
    label, probability = np.asarray(label), np.asarray(probability, dtype=float)
    if probability.ndim != 2 or label.shape != probability.shape or not label.size:
        raise ValueError(
            f"label and probability must have a column for each label; got shapes {label.shape} and "
            f"{probability.shape}."
        )
    if not np.isin(label, (0, 1)).all():
        raise ValueError("label must be 0 or 1; got others.")
    if not ((probability >= 0.0) & (probability <= 1.0)).all():
        raise ValueError("probability must lie between 0 and 1; got others.")
    return label.astype(bool), probability
