"""How well a model predicts rows it was not fitted to, and how far its approximation can be trusted."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from viper.cli.terminal import note, show_progress

if TYPE_CHECKING:
    import pandas

WEIGHT_BUDGET = 2e8  # rows × draws of the importance weights: a few seconds
DRAW_LIMITS = (200, 4000)  # draws within that budget

Splits = list[tuple[np.ndarray, np.ndarray]]  # rows to train on and rows to test on


def held_out_scores(
    fitted: Any,
    X: "pandas.DataFrame",
    y: np.ndarray,
    folds: int,
    test_size: float | None,
    seed: int,
    level: float,
    quiet: bool = False,
) -> dict[str, Any] | None:
    """Score models like `fitted` on rows they were not fitted to; None if no rows are to be held out."""
    splits = train_test_splits(y, folds, test_size, seed)
    if not splits:
        return None
    model = type(fitted)(**fitted.get_params()).set_params(verbose=False)  # without the formula: X is encoded
    with show_progress("Scoring", len(splits), quiet) as step:
        outcome = cross_validated_scores(model, X, y, splits, level, step)
    how = f"{len(splits)}-fold cross-validation" if test_size is None else f"{len(splits[0][1])} held-out rows"
    return {"how": how, **outcome}


def train_test_splits(y: np.ndarray, folds: int, test_size: float | None, seed: int) -> Splits:
    """Split the rows so that both classes are in every part."""
    from sklearn.model_selection import StratifiedKFold, train_test_split

    fewest = int(min(np.unique(y, return_counts=True)[1]))
    if test_size is not None:
        if fewest < 2:
            raise ValueError(
                f"to hold rows out, each class must have at least two; got {fewest} in one. Pass --cv 0 instead."
            )
        return [tuple(train_test_split(np.arange(len(y)), test_size=test_size, random_state=seed, stratify=y))]
    if folds < 2:
        return []
    if fewest < folds:
        if fewest < 2:
            note("one class has a single row, so none can be held out and there are no scores.")
            return []
        note(f"the rarer class has only {fewest} rows, so there are {fewest} folds instead of {folds}.")
    cut = StratifiedKFold(min(folds, fewest), shuffle=True, random_state=seed)
    return list(cut.split(np.zeros(len(y)), y))


def cross_validated_scores(
    model: Any, X: "pandas.DataFrame", y: np.ndarray, splits: Splits, level: float, step: Callable[[], None]
) -> dict[str, Any]:
    """Score all held-out rows together, with intervals if the model has them, and time the median fit."""
    from sklearn.base import clone

    from viper.report.metrics import scores

    probability, interval = np.full(len(y), np.nan), np.full((len(y), 2), np.nan)
    classes = np.unique(y)
    seconds = []  # the median, because the first fit also loads libraries
    for train, test in splits:
        began = time.perf_counter()
        fold = clone(model).fit(X.iloc[train], y[train])
        seconds.append(time.perf_counter() - began)
        probability[test] = fold.predict_proba(X.iloc[test])[:, 1]
        if hasattr(fold, "predict_interval"):
            interval[test] = fold.predict_interval(X.iloc[test], level)
        step()
    seen = np.concatenate([test for _, test in splits])
    intervals = None if np.isnan(interval[seen]).any() else interval[seen]
    result = scores(y[seen] == classes[1], probability[seen], intervals)
    return {**result._asdict(), "seconds": float(np.median(seconds))}


def diagnosis_record(fitted: Any, rows: int) -> dict[str, Any] | None:
    """Return k̂ of the posterior and its verdict, to store with the model; None if it has no diagnosis."""
    if not hasattr(fitted, "diagnose"):
        return None
    found = fitted.diagnose(draws=int(np.clip(WEIGHT_BUDGET / rows, *DRAW_LIMITS)))
    names = ("k_hat", "threshold", "draws", "effective_sample_size", "log_evidence", "log_evidence_error")
    record = {name: getattr(found, name) for name in names}
    if not np.isfinite(found.k_hat):  # q is exact; JSON has no -∞
        record["k_hat"] = None
    return {**record, "reliable": found.reliable, "close": found.close, "verdict": found.verdict}
