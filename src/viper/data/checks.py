"""Checks of what a user passes: arrays, frames, sparse matrices, tensors and options.

Errors read "rule; got value" and end with the fix. Values that pass these checks are not checked again.
"""

import math
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from typing import Any

import numpy as np
import scipy.sparse
import torch
from sklearn.utils import assert_all_finite, check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from viper.data.blocks import column_types, refuse_odd_array
from viper.data.indicators import has_several_columns, read_indicators
from viper.errors import counted, shown
from viper.inference.device import FEWEST_ROWS, choose_device, is_one_block, rows_fit, rows_per_block
from viper.inference.rows import BLOCK_ROWS, Arrays
from viper.inference.threads import count_threads

NOT_NUMBERS = re.compile(r"could not|float\(\) argument")  # in NumPy's messages
MANY_ENTRIES = 1 << 20  # entries from which several threads pay


def rectangular(given: Any, name: str) -> np.ndarray:
    """Return an array. Raises if the rows of a list differ in length."""
    try:
        return np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    except ValueError:
        raise ValueError(f"{name} must have rows of equal length; got {shown(given)}.") from None


def read_features(estimator: Any, X: Any, *, reset: bool, finite: bool = True) -> Any:
    """Return X as a 2-D float array, CSR matrix or tensor.

    With `reset` the estimator learns the number and names of the columns; otherwise they must match those it knows.
    Unless `finite`, the caller later checks with `check_finite` that all entries are finite. An estimator fitted by a
    formula takes tables of raw columns, which its `formula_` encodes.
    """
    if not reset and (formula := getattr(estimator, "formula_", None)) is not None:
        X = formula.encode(X)
    if is_finite_matrix(X) and learns_columns(estimator, X.shape[1], reset):
        return X
    refuse_odd_array(X, "X")
    if hasattr(X, "columns") and getattr(X, "shape", ())[1:] == (0,):
        raise ValueError(f"X must have at least one column; got a table of {len(X):,} rows without any. Select some.")
    names = [name for name, _ in column_types(X)]
    if len({*names}) < len(names):
        raise ValueError(
            f"columns must have different names; got {shown(max(names, key=names.count))} twice. Rename one."
        )
    if isinstance(X, Tensor):
        if X.device.type != "cpu":
            return read_device_tensor(estimator, X, reset)
        X = X.detach().to(torch.float32 if X.dtype == torch.bfloat16 else X.dtype).numpy()
    large = isinstance(X, np.ndarray) and X.size >= MANY_ENTRIES
    kinds = {"accept_sparse": "csr", "dtype": [np.float64, np.float32], "ensure_all_finite": finite and not large}
    try:
        X = validate_data(estimator, X, reset=reset, ensure_min_features=1, **kinds)
        if finite and large and not math.isfinite(sum_on_threads(X, count_threads(getattr(estimator, "n_jobs", None)))):
            check_finite(estimator, X)  # the sum of finite entries may overflow
        return X
    except OverflowError:
        raise ValueError("X must be finite; got a whole number too large for a float. Rescale its column.") from None
    except (ValueError, TypeError) as error:
        if "Input X contains" in str(error):
            raise ValueError(not_finite(X, error)) from None
        if not NOT_NUMBERS.search(str(error)) and not (names and "with a sequence" in str(error)):
            raise
        raise (TypeError if type(error) is TypeError else ValueError)(
            f"X must be numeric; {not_numeric(X, error)}. Encode text and dates as numbers, or use from_formula, for "
            "which text is a category."
        ) from None


def learns_columns(estimator: Any, columns: int, reset: bool) -> bool:
    """Learn or compare the number of columns of an X without names. Returns False if scikit-learn must check it."""
    if hasattr(estimator, "feature_names_in_"):
        return False
    if reset:
        estimator.n_features_in_ = columns
    return getattr(estimator, "n_features_in_", None) == columns


def is_finite_matrix(X: Any) -> bool:
    """Return whether X is a small matrix of finite numbers; scikit-learn's checks of it take longer than a pass."""
    if type(X) is not np.ndarray or X.dtype != np.float64 or X.ndim != 2:
        return False
    return 0 < X.size < MANY_ENTRIES and math.isfinite(sum_or_overflow(X))


def sum_on_threads(X: np.ndarray, threads: int) -> float:
    """Sum all entries on several threads. (Torch's threads would not survive a fork.)"""
    with ThreadPoolExecutor(threads) as pool:
        return float(sum(pool.map(sum_or_overflow, np.array_split(X, threads))))


def sum_or_overflow(X: np.ndarray) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sum(X))


def check_finite(estimator: Any, X: Any) -> None:
    """Raise the same error as `read_features` if an entry is not finite."""
    array = X.cpu().numpy() if isinstance(X, Tensor) else X
    assert_all_finite(array, estimator_name=type(estimator).__name__, input_name="X")


def not_numeric(X: Any, error: Exception) -> str:
    """Return why X cannot become a float array: the columns at fault, if they have names."""
    kinds = {
        str(name): str(kind) for name, kind in zip(getattr(X, "columns", ()), getattr(X, "dtypes", ()), strict=False)
    }
    odd = [f"{shown(name)} ({kind})" for name, kind in kinds.items() if not re.match("(?i)u?int|float|bool", kind)]
    more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
    return f"got column {', '.join(odd[:5])}{more}" if odd else f"{error}".splitlines()[0].rstrip(".")


def not_finite(X: Any, error: Exception) -> str:
    """Return scikit-learn's message about NaN and infinity, with the columns that contain them."""
    names = [str(name) for name in getattr(X, "columns", ())]
    X = check_array(X, dtype=[np.float64, np.float32], accept_sparse="coo", ensure_all_finite=False)
    at = X.col[~np.isfinite(X.data)] if scipy.sparse.issparse(X) else np.nonzero(~np.isfinite(X))[1]
    counts = {names[j] if names else f"x{j}": int(number) for j, number in enumerate(np.bincount(at)) if number}
    return (
        f"X must be finite; {str(error).splitlines()[0]} Entries that are not finite: {counted(counts)}. Leave those "
        "rows out or fill them in, as from_formula does with missing='drop' or 'mean'."
    )


def as_tensor(array: np.ndarray) -> Tensor:
    """Return a read-only tensor that shares the array's memory; a copy if a stride is negative."""
    if min(array.strides, default=0) < 0:
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # read-only arrays
        return torch.from_numpy(array)


def read_device_tensor(estimator: Any, X: Tensor, reset: bool) -> Tensor:
    """Check a tensor on its accelerator and return it."""
    if X.ndim != 2 or not X.is_floating_point():
        raise ValueError(f"X must be a 2-D tensor of floats; got shape {tuple(X.shape)}, dtype {X.dtype}.")
    if not math.isfinite(float(X.sum())) and not bool(X.isfinite().all()):  # the sum of finite entries may overflow
        raise ValueError("X must be finite; got NaN or infinity. Impute or drop those rows.")
    if reset:
        estimator.n_features_in_ = X.shape[1]
    elif X.shape[1] != estimator.n_features_in_:
        raise ValueError(f"X must have {estimator.n_features_in_} features, as in fit; got {X.shape[1]}.")
    return X.detach()


def read_labels(y: Any, rows: int, known: Any = None, *, many: bool = False) -> tuple[np.ndarray, Tensor]:
    """Return the two classes, and whether each row is in the second (one byte per row).

    Classes found in y are sorted. `known` classes keep their order; the rows need not contain both, but must contain
    no other. With `many`, there may be more than two, and the numbers of the rows' classes are returned.
    """
    if y is None:
        raise ValueError("This estimator requires y to be passed, but the target y is None.")
    if isinstance(y, Tensor):
        if y.device.type != "cpu" and known is None and (found := read_device_labels(y.detach(), rows)) is not None:
            return found
        y = y.detach().cpu().numpy()
    refuse_odd_array(y, "y")
    y = plain_labels(y)
    if not (type(y) is np.ndarray and y.ndim == 1):
        y = column_or_1d(y, warn=True)
    check_label_count(len(y), rows)
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise ValueError("y must be finite; Input y contains NaN or infinity. Drop those rows.")
    if known is None and y.dtype.kind in "biuf":
        low, high = y.min(), y.max()
        code = y == high
        if low != high and bool((code | (y == low)).all()):
            return np.asarray([low, high], dtype=y.dtype), torch.from_numpy(code)
    classes = distinct(y) if known is None else known_classes(known)
    if len(classes) != 2:
        check_classification_targets(y)
        check_class_count(classes, many)
    code, strange = class_numbers(y, classes)
    # pass only the two classes, because scikit-learn would sort all rows
    check_classification_targets(y if strange.any() else classes)
    if strange.any():
        raise ValueError(
            f"y must contain only the known classes {shown(classes.tolist())}; got {shown(y[strange].tolist()[0])}."
        )
    return classes, torch.from_numpy(np.ascontiguousarray(code))


def class_numbers(y: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of each row's class, as a boolean if there are two, and which rows are in none of them."""
    if len(classes) == 2:
        code = np.asarray(y == classes[1], dtype=bool)
        return code, ~(code | (y == classes[0]))
    try:
        place = np.searchsorted(classes, y).clip(max=len(classes) - 1)
    except TypeError:  # labels of another type
        place = np.zeros(len(y), dtype=np.int64)
    return place.astype(np.int32), np.asarray(classes[place] != y, dtype=bool)


def plain_labels(y: Any) -> Any:
    """Return integers and booleans of pandas' nullable types as such; scikit-learn would make them floats.

    A list of text and something else becomes an array of objects; NumPy would make text of numbers, NaN included.
    """
    if isinstance(y, list | tuple) and {str} < {type(label) for label in y}:
        return np.array(y, dtype=object)
    kind = getattr(y, "dtype", None)
    if isinstance(kind, np.dtype) or getattr(kind, "kind", "") not in ("i", "u", "b") or not hasattr(y, "isna"):
        return y
    refuse_missing_labels(y)
    return y.to_numpy(dtype={"i": np.int64, "u": np.uint64, "b": bool}[kind.kind])  # type: ignore[union-attr]


def refuse_missing_labels(y: Any) -> None:
    """Raise if labels are None, NaN or NA, and say how many."""
    import pandas

    if missing := int(pandas.isna(y).sum()):
        raise ValueError(
            f"y must have a label in every row; got none in {missing:,} of {len(y):,} rows. Fill them in, or drop "
            "those rows."
        )


def check_label_count(labels: int, rows: int) -> None:
    if labels != rows:
        raise ValueError(
            "X and y must have the same number of rows; got inconsistent numbers of samples: "  # scikit-learn's words
            f"{rows} and {labels}."
        )


def read_device_labels(y: Tensor, rows: int) -> tuple[np.ndarray, Tensor] | None:
    """Do the same for a tensor with two finite values, on its accelerator; return None for anything else."""
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
    """Return the distinct labels, sorted. Two labels, numbers or text, are found without sorting all rows."""
    if labels.dtype.kind in "biufUS" and len(labels):
        first = labels == labels[0]
        other = labels[first.argmin()]
        if bool((first | (labels == other)).all()):
            return np.unique(np.stack([labels[0], other]))
    try:
        found = np.unique(labels)
    except TypeError:
        refuse_missing_labels(labels)
        kinds = sorted({type(label).__name__ for label in labels})
        raise ValueError(
            f"y must have labels of one type; got {', '.join(kinds)}. Recode them, or drop those rows."
        ) from None
    if found.dtype.kind == "O" and (found != found).any():
        refuse_missing_labels(labels)
    return found


def known_classes(given: Any) -> np.ndarray:
    """Return the classes: two different ones in the given order, others sorted."""
    classes = np.asarray(given)
    return classes if classes.shape == (2,) and classes[0] != classes[1] else distinct(classes)


def check_class_count(classes: np.ndarray, many: bool = False) -> None:
    """Raise unless there are exactly two classes, or at least two with `many`."""
    if len(classes) == 1:
        raise ValueError(
            f"y must have {'at least' if many else 'exactly'} two classes; got 1 class: "
            f"{shown(classes.tolist()[0])}. Add rows of {'another' if many else 'the other'} class."
        )
    if len(classes) > 2 and not many:
        first = f"[{', '.join(map(shown, classes[:5].tolist()))}]{' ...' if len(classes) > 5 else ''}"
        raise ValueError(
            f"Only binary classification is supported: y must have exactly two classes; got {len(classes)}: {first}. "
            "Wrap the estimator in OneVsRestClassifier for more."
        )


def read_vector(x: Any, name: str, rows: int, columns: int | None = None) -> Tensor | None:
    """Return a finite float64 vector with one entry per row, or None; with `columns`, it may be a matrix."""
    if x is None:
        return None
    values = read_numbers(x, name)
    if values.ndim == 0:
        values = np.full(rows, values)
    if values.shape not in ((rows,), (rows, columns)):
        either = f" or ({rows}, {columns})" if columns else ""
        raise ValueError(
            f"{name} must have shape ({rows},){either}, one entry per row; got {name}.shape == {values.shape}."
        )
    if not np.isfinite(values).all():
        raise ValueError(f"{name} must be finite; got {values[~np.isfinite(values)][0]}.")
    return as_tensor(values)


def read_offset(x: Any, rows: int, classes: int) -> Tensor | None:
    """Return a vector of offsets; with more than two classes, a matrix with a column for each."""
    if classes <= 2 or x is None:
        return read_vector(x, "offset", rows)
    values = read_numbers(x, "offset")
    if values.ndim != 2 or values.shape not in ((rows, classes), (1, classes)):
        raise ValueError(
            f"offset must have shape ({rows}, {classes}), a column for each class; got offset.shape == {values.shape}. "
            "A value added to all classes changes nothing."
        )
    if not np.isfinite(values).all():
        raise ValueError(f"offset must be finite; got {values[~np.isfinite(values)][0]}.")
    return as_tensor(np.broadcast_to(values, (rows, classes)).copy())


def read_numbers(x: Any, name: str) -> np.ndarray:
    """Return a float64 array of any shape."""
    refuse_odd_array(x, name)
    try:
        return np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be numeric; got {shown(x)}.") from None


ALL_WEIGHTS_ZERO = "sample_weight must be positive somewhere; got all zero. Leave it out to weigh rows equally."


def read_weights(sample_weight: Any, rows: int, *, some_positive: bool = True) -> Tensor | None:
    """Return row weights: a weight of 2 counts a row twice. Unless `some_positive`, they may all be zero."""
    weight = read_vector(sample_weight, "sample_weight", rows)
    if weight is not None and bool((weight < 0).any()):
        raise ValueError(f"sample_weight must not be negative; got {float(weight.min())}.")
    if some_positive and weight is not None and not bool((weight > 0).any()):
        raise ValueError(ALL_WEIGHTS_ZERO)
    return weight


def check_options(
    estimator: Any, words: dict[str, tuple[str | bool, ...]], numbers: tuple[str, ...], integers: tuple[str, ...]
) -> None:
    """Raise unless each option is one of its allowed words; numbers and integers must be positive or None."""
    for name, choices in words.items():
        check_word(getattr(estimator, name), name, choices)
    for name in (*numbers, *integers):
        value, kinds = getattr(estimator, name), (int, np.integer) if name in integers else (int, float, np.number)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf):
            raise ValueError(
                f"{name} must be a positive {'integer' if name in integers else 'number'}; got {shown(value)}."
            )


def check_word(value: Any, name: str, words: tuple[str | bool, ...]) -> None:
    if not isinstance(value, str | bool) or value not in words:
        raise ValueError(f"{name} must be one of {list(words)}; got {shown(value)}.")


def read_whole(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be a whole number from {least} on; got {shown(value)}.")
    return int(value)


FIT_SEED = 0  # used if `random_state` is None, so that the same rows give the same answer to the last bit


def random_of_fit(random_state: Any) -> np.random.RandomState:
    """scikit-learn's `check_random_state`, except that None means a fixed seed."""
    try:
        return check_random_state(FIT_SEED if random_state is None else random_state)
    except (ValueError, TypeError):
        raise ValueError(
            "random_state must be None, a RandomState or an integer from 0 to 4294967295; got "
            f"{shown(random_state)}. Choose one of these."
        ) from None


def seed_of(random_state: Any) -> int:
    """Return the one seed that a fit needs."""
    return default_seed() if random_state is None else int(random_of_fit(random_state).randint(2**31))


@cache
def default_seed() -> int:
    """The seed of a fit without `random_state`, cached because it takes as long as a pass over a thousand rows."""
    return int(random_of_fit(None).randint(2**31))


@dataclass(frozen=True)
class RowFormat:
    """How an estimator wants its rows: with or without a column of ones, on which device, in which precision.

    If the model is `linear` in X, entries that are not finite show up in the sums, so X need not be checked first.
    """

    intercept: bool = False
    device: Any = None
    dtype: str = "float64"
    verbose: Any = "auto"  # whether progress is shown while rows are counted
    linear: bool = False
    block_rows: int | None = None  # None: as many as suit the device
    labels: int | None = None  # columns of y: None for one, 0 for as many as it has
    classes: int = 2  # 0 for as many as y has
    keep: bool = False  # whether rows that are slow to read are kept until the source is told to release them

    def placed(self, width: int) -> tuple[torch.device, int]:
        """Return the device of rows that are read in chunks, and how many of them make a block."""
        device = choose_device(self.device)
        return device, self.rows_per_block(width, device)

    def rows_per_block(self, width: int, device: torch.device, resident: int | None = None) -> int:
        """Return the rows of a block with `width` features; `resident` is the number of all rows, if on the device."""
        if self.block_rows is not None or device.type == "cpu":
            return self.block_rows or BLOCK_ROWS
        if resident is not None and is_one_block(resident, width):
            return max(resident, FEWEST_ROWS)
        return rows_per_block(width, device)


def labelled_arrays(
    estimator: Any, X: Any, y: Any, format: RowFormat, *, sample_weight: Any, offset: Any, reset: bool, classes: Any
) -> tuple[np.ndarray, Arrays]:
    """Return the classes, given or found in y, and the rows."""
    X = read_features(estimator, X, reset=reset)
    rows = X.shape[0]
    several = format.labels or (format.labels == 0 and has_several_columns(y))
    if several:
        classes, label = read_indicators(y, rows, classes)
        offset = read_vector(offset, "offset", rows, len(classes))
    else:
        classes, label = read_labels(y, rows, classes, many=format.classes != 2)
        offset = read_offset(offset, rows, len(classes))
    weight = read_weights(sample_weight, rows)
    return classes, as_arrays(X, label, format, offset=offset, weight=weight)


def unlabelled_arrays(estimator: Any, X: Any, offset: Any, format: RowFormat) -> Arrays:
    """Return rows to predict; their labels are placeholders."""
    X = read_features(estimator, X, reset=False)
    label = torch.zeros(X.shape[0], dtype=torch.bool)
    known = {"offset": read_vector(offset, "offset", X.shape[0], format.labels)} if format.labels else {}
    known = known or {"offset": read_offset(offset, X.shape[0], format.classes)}
    return as_arrays(X, label, format, **known)


def as_arrays(
    X: Any, label: Tensor, format: RowFormat, *, offset: Tensor | None = None, weight: Tensor | None = None
) -> Arrays:
    """Return checked arrays as a source of rows on the format's device."""
    rows, intercept = X.shape[0], format.intercept
    device = choose_device(format.device, X)
    if isinstance(X, np.ndarray):
        X = as_tensor(X)
    elif scipy.sparse.issparse(X):
        if device.type != "cpu":
            raise ValueError(f"a sparse X is computed on the CPU; got device={str(device)!r}. Leave device out.")
        X = X.astype(np.float64, copy=False)
        if not X.has_canonical_format:  # repeated entries add up, but their squares do not
            X = X.copy()
            X.sum_duplicates()
    if device.type != "cpu":
        # moved once, so that no pass waits for a transfer
        label, offset, weight = (x if x is None else x.to(device) for x in (label, offset, weight))  # type: ignore[assignment]
        if X.device != device and rows_fit(X.nbytes, device):
            X = X.to(device).contiguous()
    resident = rows if device.type != "cpu" and X.device == device else None
    return Arrays(
        X,
        label,
        intercept=intercept,
        offset=offset,
        weight=weight,
        device=device,
        dtype=getattr(torch, format.dtype),
        block_rows=format.rows_per_block(X.shape[1], device, resident),
    )
