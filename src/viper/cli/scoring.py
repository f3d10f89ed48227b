"""How well a model predicts rows it did not see, and how far its approximation can be trusted."""

from typing import TYPE_CHECKING, Any

import numpy as np

from viper.cli.terminal import note, progress

if TYPE_CHECKING:
    import pandas

WEIGHT_BUDGET = 2e8  # rows × draws of the importance weights: a few seconds
FEWEST_DRAWS, MOST_DRAWS = 200, 4000


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
    """Scores of models like `fitted`, each on rows it did not see; None if nothing is to be held out."""
    parts = splits(y, folds, test_size, seed)
    if not parts:
        return None
    model = type(fitted)(**fitted.get_params()).set_params(verbose=False)  # of rows that are encoded already
    with progress("Scoring", len(parts), quiet) as step:
        outcome = score(model, X, y, parts, level, step)
    held = sum(len(test) for _, test in parts)
    how = f"{len(parts)}-fold cross-validation" if test_size is None else f"{held} held-out rows"
    return {"how": how, **outcome}


def splits(y: np.ndarray, folds: int, test_size: float | None, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows to train on and rows to test on, with both classes in each."""
    from sklearn.model_selection import StratifiedKFold, train_test_split

    fewest = int(min(np.unique(y, return_counts=True)[1]))
    if test_size is not None:
        if fewest < 2:
            raise ValueError(f"to hold rows out, each class must have two; got {fewest} of one. Pass --cv 0 instead.")
        return [tuple(train_test_split(np.arange(len(y)), test_size=test_size, random_state=seed, stratify=y))]
    if folds < 2:
        return []
    if fewest < folds:
        if fewest < 2:
            note("one class has a single row: there is nothing to hold out, and no score.")
            return []
        note(f"the rarer class has {fewest} rows: {fewest} folds instead of {folds}.")
    cut = StratifiedKFold(min(folds, fewest), shuffle=True, random_state=seed)
    return list(cut.split(np.zeros(len(y)), y))


def score(model: Any, X: Any, y: np.ndarray, parts: list[Any], level: float, step: Any) -> dict[str, Any]:
    """Scores over all held-out rows together, and seconds of the median fit; intervals where the model has them."""
    import time

    from sklearn.base import clone

    from viper.report.metrics import scores

    probability, interval = np.full(len(y), np.nan), np.full((len(y), 2), np.nan)
    classes = np.unique(y)
    seconds = []  # the first fit also loads what it needs
    for train, test in parts:
        began = time.perf_counter()
        fold = clone(model).fit(X.iloc[train], y[train])
        seconds.append(time.perf_counter() - began)
        probability[test] = fold.predict_proba(X.iloc[test])[:, 1]
        if hasattr(fold, "predict_interval"):
            interval[test] = fold.predict_interval(X.iloc[test], level)
        step()
    seen = np.concatenate([test for _, test in parts])
    widths = None if np.isnan(interval[seen]).any() else interval[seen]
    result = scores(y[seen] == classes[1], probability[seen], widths)
    return {**result._asdict(), "seconds": float(np.median(seconds))}


def diagnosis(fitted: Any, rows: int) -> dict[str, Any] | None:
    """k̂ of the posterior with its verdict; None for models that have none."""
    if not hasattr(fitted, "diagnose"):
        return None
    draws = int(np.clip(WEIGHT_BUDGET / rows, FEWEST_DRAWS, MOST_DRAWS))
    found = fitted.diagnose(draws=draws)
    names = ("k_hat", "threshold", "draws", "effective_sample_size", "log_evidence", "log_evidence_error")
    facts = {name: getattr(found, name) for name in names}
    if not np.isfinite(found.k_hat):  # q is exact; JSON has no -∞
        facts["k_hat"] = None
    return {**facts, "reliable": found.reliable, "close": found.close, "verdict": found.verdict}
