"""How well a model predicts rows it was not fitted to, and how far its approximation can be trusted."""

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from viper.cli.preparing import EACH_ROW, RowCounts
from viper.cli.terminal import note, show_progress
from viper.errors import WeightWarning

if TYPE_CHECKING:
    import pandas

    from viper.formula.learn import Learned

WEIGHT_BUDGET = 2e8  # rows × draws of the importance weights: a few seconds
DRAW_LIMITS = (200, 4000)  # draws within that budget
GROUP_SPLITS = 100  # random splits of groups that are tried until both parts have both classes

Splits = list[tuple[np.ndarray, np.ndarray]]  # rows to train on and rows to test on


def held_out_scores(
    fitted: Any,
    learned: "Learned",
    folds: int,
    test_size: float | None,
    seed: int,
    level: float,
    quiet: bool = False,
    counts: RowCounts = EACH_ROW,
) -> dict[str, Any] | None:
    """Score models like `fitted` on rows they were not fitted to; None if no rows are to be held out."""
    splits = train_test_splits(learned.labels, folds, test_size, seed, counts.groups)
    if not splits:
        return None
    model = type(fitted)(**fitted.get_params()).set_params(verbose=False)  # without the formula: X is encoded
    with show_progress("Scoring", len(splits), quiet) as step:
        outcome = cross_validated(model, Folds(learned, splits, counts), level, step).scores()
    how = f"{len(splits)}-fold cross-validation" if test_size is None else f"{len(splits[0][1])} held-out rows"
    together = "" if counts.groups is None else ", groups kept together"
    return {"how": f"{how}{together}{'' if counts.weight is None else ', each row counted once'}", **outcome}


def train_test_splits(
    y: np.ndarray, folds: int, test_size: float | None, seed: int, groups: np.ndarray | None = None
) -> Splits:
    """Split the rows so that both classes are in every part, and all rows of a group in one."""
    from sklearn.model_selection import StratifiedKFold, train_test_split

    if groups is not None:
        return group_splits(y, folds, test_size, seed, groups)
    fewest = int(min(np.unique(y, return_counts=True)[1]))
    if test_size is not None:
        if fewest < 2:
            raise ValueError(
                f"--test-size needs at least two rows of each class; got {fewest} of one class. Pass --cv 0 instead."
            )
        return [tuple(train_test_split(np.arange(len(y)), test_size=test_size, random_state=seed, stratify=y))]
    if folds < 2:
        return []
    if fewest < folds:
        if fewest < 2:
            note("one class has a single row, so no rows can be held out and there are no scores.")
            return []
        note(f"the rarest class has only {fewest} rows, so there are {fewest} folds instead of {folds}.")
    cut = StratifiedKFold(min(folds, fewest), shuffle=True, random_state=seed)
    return list(cut.split(np.zeros(len(y)), y))


def group_splits(y: np.ndarray, folds: int, test_size: float | None, seed: int, groups: np.ndarray) -> Splits:
    """Split the rows so that no group is in two parts; nothing, with a note, if the groups do not allow it."""
    from sklearn.model_selection import GroupShuffleSplit, StratifiedGroupKFold

    fewest = min(len(np.unique(groups[y == label])) for label in np.unique(y))
    if test_size is None and folds < 2:
        return []
    if fewest < 2:
        note("one class is in a single group, so no group can be held out and there are no scores.")
        return []
    if test_size is not None:
        tried = GroupShuffleSplit(GROUP_SPLITS, test_size=test_size, random_state=seed).split(y, y, groups)
        splits = [split for split in tried if has_both_classes(y, *split)][:1]
    else:
        if fewest < folds:
            note(f"one class is in only {fewest} groups, so there are {fewest} folds instead of {folds}.")
        cut = StratifiedGroupKFold(min(folds, fewest), shuffle=True, random_state=seed)
        splits = [split for split in cut.split(y, y, groups) if len(split[1])]
        splits = splits if all(has_both_classes(y, train) for train, _ in splits) else []
    if not splits:
        note("no split of the groups leaves both classes in each part, so there are no scores.")
    return splits


def has_both_classes(y: np.ndarray, *parts: np.ndarray) -> bool:
    """Return whether each part has rows of all classes."""
    return all(len(np.unique(y[rows])) == len(np.unique(y)) for rows in parts)


class Folds:
    """Rows to train on and rows to test on, encoded.

    If missing values are drawn with the outcome's help, they are drawn again in each fold from its training rows, so
    that no label of a test row is used.
    """

    def __init__(self, learned: "Learned", splits: Splits, counts: RowCounts = EACH_ROW) -> None:
        quiet = None if learned.imputing is None else learned.imputing._replace(verbose=False)
        self.learned, self.splits, self.labels = learned._replace(imputing=quiet), splits, learned.labels
        self.counts = counts
        self.parts: dict[int, Learned] = {}  # the training rows of each fold, once they are needed

    def fit(self, model: Any, k: int) -> tuple[Any, "pandas.DataFrame"]:
        """Return a copy of the model fitted to the training rows, and the test rows in the form that it takes."""
        counts = self.counts.part(self.splits[k][0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeightWarning)  # in a part of the rows, weights need not be one on average
            fitted, X = self._fit(model, k, {} if counts.weight is None else {"sample_weight": counts.weight})
        return counts.completed(fitted), X

    def _fit(self, model: Any, k: int, weight: dict[str, np.ndarray]) -> tuple[Any, "pandas.DataFrame"]:
        from sklearn.base import clone

        train, test = self.splits[k]
        X, y = self.learned.X, self.labels
        if self.learned.groups is not None:
            from viper.models.groups.reading import RowsAndGroups

            model, groups = clone(model).set_params(new_groups="average"), self.learned.groups
            fitted = model.fit(X.iloc[train], y[train], groups=groups.iloc[train], **weight)
            return fitted, RowsAndGroups(X.iloc[test], groups.iloc[test])
        if not self.learned.tables:
            return clone(model).fit(X.iloc[train], y[train], **weight), X.iloc[test]
        from viper.formula.learn import fit_learned

        part, raw = self.parts.get(k) or self.learned.part(train), self.learned.raw()
        self.parts[k] = part
        if hasattr(model, "_pool"):
            return fit_learned(type(model), part, model.get_params(), **weight), raw.iloc[test]
        # other models get the mean of the draws
        X = part.encoding.encode(raw)
        return clone(model).fit(X.iloc[train], y[train], **weight), X.iloc[test]


class HeldOutRows(NamedTuple):
    """Predictions of rows by models that were not fitted to them.

    With two classes, `label` says whether a row is of the second, and `probability` is that of the second; with more,
    `label` is the number of a row's class, and `probability` has a column for each.
    """

    label: np.ndarray
    probability: np.ndarray
    interval: np.ndarray | None
    seconds: float  # of the median fit, because the first one also loads libraries

    def scores(self) -> dict[str, Any]:
        from viper.report.metrics import class_scores, scores

        score: Any = scores if self.probability.ndim == 1 else class_scores
        return {**score(self.label, self.probability, self.interval)._asdict(), "seconds": self.seconds}


def cross_validated(model: Any, folds: Folds, level: float, step: Callable[[], None]) -> HeldOutRows:
    """Predict all held-out rows, with intervals if the model has them, and time the fits."""
    y, splits = folds.labels, folds.splits
    classes, numbers = np.unique(y, return_inverse=True)
    two, order = len(classes) == 2, getattr(model, "categories", None)
    # columns of ordered levels are sorted like those of other classes
    columns = slice(None) if order is None or two else [order.index(label) for label in classes.tolist()]
    shape = (len(y),) if two else (len(y), len(classes))
    probability, interval = np.full(shape, np.nan), np.full((*shape, 2), np.nan)
    seconds = []
    for k, (_, test) in enumerate(splits):
        began = time.perf_counter()
        fold, X = folds.fit(model, k)
        seconds.append(time.perf_counter() - began)
        probability[test] = fold.predict_proba(X)[:, 1] if two else fold.predict_proba(X)[:, columns]
        if hasattr(fold, "predict_interval"):
            interval[test] = fold.predict_interval(X, level)[:, columns]
        step()
    seen = np.concatenate([test for _, test in splits])
    intervals = None if np.isnan(interval[seen]).any() else interval[seen]
    label = numbers[seen] == 1 if two else numbers[seen]
    return HeldOutRows(label, probability[seen], intervals, float(np.median(seconds)))


def diagnosis_record(fitted: Any, rows: int) -> dict[str, Any] | None:
    """Return k̂ of the posterior and its verdict, to store with the model; None if the model has none."""
    if not hasattr(fitted, "diagnose"):
        return None
    found = fitted.diagnose(draws=int(np.clip(WEIGHT_BUDGET / rows, *DRAW_LIMITS)))
    names = ("k_hat", "threshold", "draws", "effective_sample_size", "log_evidence", "log_evidence_error")
    record = {name: getattr(found, name) for name in names}
    if found.residual_cost is not None:
        record["residual_cost"] = found.residual_cost
    if found.elbo != fitted.elbo_:  # with variance components integrated out
        record["elbo"] = found.elbo
    if not np.isfinite(found.k_hat):  # q is exact; JSON has no -∞
        record["k_hat"] = None
    return {**record, "reliable": found.reliable, "close": found.close, "verdict": found.verdict}
