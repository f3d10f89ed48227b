"""From what a user has (arrays, frames, sparse matrices, tensors) to rows the solver trusts.

Every complaint a user's data or options can cause is raised here, as "rule; got value" with the fix; below this module
nothing is checked again.
"""

import math
import re
import warnings
from typing import Any

import numpy as np
import scipy.sparse
import torch
from sklearn.utils import assert_all_finite, check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from viper.errors import counted
from viper.inference.device import FEWEST_ROWS, choose_device, is_one_block, rows_fit, rows_per_block
from viper.inference.rows import Arrays, Source


def read_features(estimator: Any, X: Any, *, reset: bool, finite: bool = True) -> Any:
    """X as a 2-D float array, CSR matrix or tensor; names and number of columns are kept or compared.

    `finite` looks at every entry, else the caller does so later, by `check_finite`.
    An estimator fitted by a formula takes tables of raw columns, which its `formula_` encodes.
    """
    if not reset and (formula := getattr(estimator, "formula_", None)) is not None:
        X = formula.encode(X)
    if isinstance(X, Tensor):
        if X.device.type != "cpu":
            return read_device_tensor(estimator, X, reset)
        X = X.detach().to(torch.float32 if X.dtype == torch.bfloat16 else X.dtype).numpy()
    kinds = {"accept_sparse": "csr", "dtype": [np.float64, np.float32], "ensure_all_finite": finite}
    try:
        return validate_data(estimator, X, reset=reset, ensure_min_features=1, **kinds)
    except (ValueError, np.exceptions.DTypePromotionError) as error:
        if "Input X contains" in str(error):
            raise ValueError(not_finite(X, error)) from None
        if "could not" not in str(error):
            raise
        raise ValueError(
            f"X must be numeric; {not_numeric(X, error)}. Encode text and dates as numbers, or use from_formula, for "
            "which text is a category."
        ) from None


def check_finite(estimator: Any, X: Any) -> None:
    """What `read_features` says of an X that is not finite."""
    whole = X.cpu().numpy() if isinstance(X, Tensor) else X
    assert_all_finite(whole, estimator_name=type(estimator).__name__, input_name="X")


def not_numeric(X: Any, error: Exception) -> str:
    """What is wrong with an X that no float array can hold: its columns by name if it has them."""
    kinds = {
        str(name): str(kind) for name, kind in zip(getattr(X, "columns", ()), getattr(X, "dtypes", ()), strict=False)
    }
    odd = [f"{name!r} ({kind})" for name, kind in kinds.items() if not re.match("(?i)u?int|float|bool", kind)]
    more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
    return f"got column {', '.join(odd[:5])}{more}" if odd else f"{error}".splitlines()[0].rstrip(".")


def not_finite(X: Any, error: Exception) -> str:
    """scikit-learn's words on NaN and infinity, with the columns that hold them."""
    names = [str(name) for name in getattr(X, "columns", ())]
    X = check_array(X, dtype=[np.float64, np.float32], accept_sparse="coo", ensure_all_finite=False)
    at = X.col[~np.isfinite(X.data)] if scipy.sparse.issparse(X) else np.nonzero(~np.isfinite(X))[1]
    counts = {names[j] if names else f"x{j}": int(number) for j, number in enumerate(np.bincount(at)) if number}
    return (
        f"X must be finite; {str(error).splitlines()[0]} Not finite are {counted(counts)}. Leave those rows out or "
        "fill them in, as from_formula does with missing='drop' or 'mean'."
    )


def as_tensor(array: np.ndarray) -> Tensor:
    """The array's own memory as a tensor, which nothing writes to; a copy where its strides are negative."""
    if min(array.strides, default=0) < 0:
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only arrays
        return torch.from_numpy(array)


def read_device_tensor(estimator: Any, X: Tensor, reset: bool) -> Tensor:
    """A tensor that already lies on an accelerator, checked there."""
    if X.ndim != 2 or not X.is_floating_point():
        raise ValueError(f"X must be a 2-D tensor of floats; got shape {tuple(X.shape)}, dtype {X.dtype}.")
    if not math.isfinite(float(X.sum())) and not bool(X.isfinite().all()):  # a sum may overflow
        raise ValueError("X must be finite; got NaN or infinity. Impute or drop those rows.")
    if reset:
        estimator.n_features_in_ = X.shape[1]
    elif X.shape[1] != estimator.n_features_in_:
        raise ValueError(f"X must have {estimator.n_features_in_} features, as in fit; got {X.shape[1]}.")
    return X.detach()


def read_labels(y: Any, rows: int, known: Any = None) -> tuple[np.ndarray, Tensor]:
    """The two classes in sorted order, and which rows are of the second (one byte a row).

    With `known` classes the rows need not show both, but must show no other.
    """
    if y is None:
        raise ValueError("This estimator requires y to be passed, but the target y is None.")
    if isinstance(y, Tensor):
        if y.device.type != "cpu" and known is None and (found := labels_there(y.detach(), rows)) is not None:
            return found
        y = y.detach().cpu().numpy()
    elif isinstance(y, list | tuple) and {str} < {type(label) for label in y}:
        y = np.array(y, dtype=object)  # else numbers, NaN among them, become text
    y = column_or_1d(y, warn=True)
    if len(y) != rows:
        raise ValueError(f"X and y must have as many rows; got inconsistent numbers of samples: {rows} and {len(y)}.")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise ValueError("y must be finite; Input y contains NaN or infinity. Drop those rows.")
    if known is None and y.dtype.kind in "biuf":
        low, high = y.min(), y.max()
        code = y == high
        if low != high and bool((code | (y == low)).all()):
            return np.asarray([low, high], dtype=y.dtype), torch.from_numpy(code)
    classes = distinct(y if known is None else np.asarray(known))
    if len(classes) != 2:
        check_classification_targets(y)
        two_classes(classes)
    code = y == classes[1]
    strange = ~(code | (y == classes[0]))
    # what is true of the two is true of all rows, which would be sorted
    check_classification_targets(y if strange.any() else classes)
    if strange.any():
        raise ValueError(f"y must contain only the known classes {classes.tolist()}; got {y[strange].tolist()[0]!r}.")
    return classes, torch.from_numpy(np.ascontiguousarray(code, dtype=bool))


def labels_there(y: Tensor, rows: int) -> tuple[np.ndarray, Tensor] | None:
    """The same for two finite values in a tensor on an accelerator, without fetching it; None for anything else."""
    if y.shape != (rows,) or not rows:
        return None
    if y.dtype == torch.bool:
        found = torch.stack([y.all(), y.any()]).cpu().numpy()
        return (found, y) if found[0] != found[1] else None
    low, high = y.aminmax()
    code = y == high
    two = (code | (y == low)).all()
    found = torch.stack([low, high, two.to(y.dtype)]).cpu().numpy()
    return (found[:2], code) if found[0] != found[1] and found[2] else None


def distinct(labels: np.ndarray) -> np.ndarray:
    """The labels there are, sorted; of numbers and text, two are seen without sorting all."""
    if labels.dtype.kind in "biufUS" and len(labels):
        first = labels == labels[0]
        other = labels[first.argmin()]
        if bool((first | (labels == other)).all()):
            return np.unique(np.stack([labels[0], other]))
    try:
        return np.unique(labels)
    except TypeError:
        kinds = sorted({type(label).__name__ for label in labels})
        raise ValueError(
            f"y must have labels of one type, none missing; got {', '.join(kinds)}. Recode or drop those rows."
        ) from None


def two_classes(classes: np.ndarray) -> None:
    """Exactly two classes, or a complaint."""
    if len(classes) == 1:
        raise ValueError(
            f"y must have exactly two classes; got 1 class: {classes.tolist()[0]!r}. Add rows of the other class."
        )
    if len(classes) > 2:
        shown = f"{classes[:5].tolist()}{' ...' if len(classes) > 5 else ''}"
        raise ValueError(
            f"Only binary classification is supported: y must have exactly two classes; got {len(classes)}: {shown}. "
            "Wrap the estimator in OneVsRestClassifier for more."
        )


def read_vector(x: Any, name: str, rows: int) -> Tensor | None:
    """A finite float64 vector with one entry per row, or None."""
    if x is None:
        return None
    values = read_numbers(x, name)
    if values.ndim == 0:
        values = np.full(rows, values)
    if values.shape != (rows,):
        raise ValueError(f"{name} must have shape ({rows},), one entry per row; got {name}.shape == {values.shape}.")
    if not np.isfinite(values).all():
        raise ValueError(f"{name} must be finite; got {values[~np.isfinite(values)][0]}.")
    return as_tensor(values)


def read_numbers(x: Any, name: str) -> np.ndarray:
    """A float64 array of any shape."""
    try:
        return np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numeric; got {x!r:.60}.") from None


def read_weights(sample_weight: Any, rows: int, whole: bool = True) -> Tensor | None:
    """Row weights: a weight of 2 counts a row twice. Unless these are the `whole`, they may all be zero."""
    weight = read_vector(sample_weight, "sample_weight", rows)
    if weight is not None and bool((weight < 0).any()):
        raise ValueError(f"sample_weight must not be negative; got {float(weight.min())}.")
    if whole and weight is not None and not bool((weight > 0).any()):
        raise ValueError("sample_weight must be positive somewhere; got all zero. Leave it out to weigh rows equally.")
    return weight


def check_positive(value: Any, name: str, whole: bool) -> None:
    """A positive number, or integer if `whole`."""
    kinds = (int, np.integer) if whole else (int, float, np.number)
    if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive {'integer' if whole else 'number'}; got {value!r}.")


def check_word(value: Any, name: str, words: tuple[str | bool, ...]) -> None:
    if not isinstance(value, str | bool) or value not in words:
        raise ValueError(f"{name} must be one of {list(words)}; got {value!r}.")


FIT_SEED = 0  # where `random_state` is None: the same rows give the same answer to the last bit


def random_of_fit(random_state: Any) -> np.random.RandomState:
    """scikit-learn's `check_random_state`, except that None means a fixed seed."""
    return check_random_state(FIT_SEED if random_state is None else random_state)


def seed_of(random_state: Any) -> int:
    """The one seed that a fit needs."""
    return int(random_of_fit(random_state).randint(2**31))


def read_rows(
    X: Any,
    label: Tensor,
    *,
    intercept: bool,
    sample_weight: Any = None,
    offset: Any = None,
    device: Any = None,
    dtype: str = "float64",
) -> Arrays:
    """Checked features and labels, with weights and offset, as a source of rows."""
    rows = X.shape[0]
    target = choose_device(device, X)
    if isinstance(X, np.ndarray):
        X = as_tensor(X)
    elif scipy.sparse.issparse(X):
        if target.type != "cpu":
            raise ValueError(f"a sparse X is computed on the CPU; got device={str(target)!r}. Leave device out.")
        X = X.astype(np.float64)
        if intercept:
            X = scipy.sparse.hstack([X, np.ones((rows, 1))], format="csr")
            intercept = False
    offset, weight = read_vector(offset, "offset", rows), read_weights(sample_weight, rows)
    if target.type == "cpu":
        return Arrays(X, label, intercept, offset, None, weight, target, getattr(torch, dtype))
    # once, so that no pass waits for a transfer
    offset, weight = (None if x is None else x.to(target) for x in (offset, weight))
    if X.device != target and rows_fit(X.nbytes, target):
        X = X.to(target).contiguous()
    if X.device == target and is_one_block(rows, X.shape[1]):
        block_rows = max(rows, FEWEST_ROWS)
    else:
        block_rows = rows_per_block(X.shape[1], target)
    return Arrays(X, label.to(target), intercept, offset, None, weight, target, getattr(torch, dtype), block_rows)


def in_memory(source: Source) -> Arrays:
    """The rows as arrays, if they are there or there are few."""
    return source if isinstance(source, Arrays) else source.whole()  # type: ignore[attr-defined]


def dense_rows(source: Arrays) -> Tensor:
    """All rows of the design matrix at once, for problems with few rows."""
    X = source.features
    whole = torch.as_tensor(X.toarray() if scipy.sparse.issparse(X) else X, dtype=torch.float64, device=source.device)
    return torch.cat([whole, torch.ones_like(whole[:, :1])], 1) if source.intercept else whole
