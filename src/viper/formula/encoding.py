"""What a formula learned from a table. It is plain data, stored with the model and applied to other rows.

frame → checked columns → missing values by rule → formulaic → standardised or not → X
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from viper.errors import FormulaError, RowError, StorageError, counted, listed
from viper.formula.columns import as_frame, as_levels, as_numbers, python_value, with_days
from viper.formula.grammar import ParsedFormula, parse_formula
from viper.formula.training import TrainingData

if TYPE_CHECKING:
    import pandas

MISSING_RULES = ("error", "drop", "mean")
UNSEEN_RULES = ("error", "missing", "baseline")
BEYOND_RULES = ("refuse", "clamp")
ADDED_FIELDS = ("positive", "unseen", "beyond", "training")  # since version 0.1: stored unless they are the default


@dataclass(frozen=True)
class Encoding:
    """What a formula learned from the data: how to compute the columns of X for any rows.

    Attributes
    ----------
    formula : str
        The formula, with `.` replaced by the columns it stands for.
    target : str
        Name of the column with the labels.
    columns : list of str
        The columns that the formula reads, with the target first.
    missing : {"error", "drop", "mean"}
        What happens to rows with missing values.
    means : dict
        Means of the columns that are used as numbers.
    levels : dict
        Levels of the columns that are used as categories, with the reference first.
    common : dict
        The most common level of each of these columns.
    transforms : dict
        State of functions such as `center`, by call.
    names : list of str
        Names of the columns of X.
    intercept : bool
        Whether the formula has an intercept.
    centre, scale : list of float
        X is (raw - centre) / scale. Columns that are not standardised have centre 0 and scale 1.
    standardize : bool
        Whether standardised columns were requested.
    counts : dict
        Number of missing values by column, in the data that the formula learned from.
    positive : label or None
        The class whose probability is modelled; None if it is the last in sorted order.
    record : dict
        What the command line reports about the fit, as JSON that is stored with the model.
    unseen : {"error", "missing", "baseline"}
        What happens to a level that was not in the training data: the row has no prediction, the value counts as
        missing, or it counts as the reference level.
    beyond : {"refuse", "clamp"}
        What happens to a number beyond the range of a spline: the row has no prediction, or the number counts as the
        nearest one within the range.
    training : TrainingData, optional
        What is remembered of the rows that the formula learned from. Files of version 0.1 have none.
    """

    formula: str
    target: str
    columns: list[str]
    missing: str
    means: dict[str, float]
    levels: dict[str, list[Any]]
    common: dict[str, Any]
    transforms: dict[str, Any]
    names: list[str]
    intercept: bool
    centre: list[float]
    scale: list[float]
    standardize: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    positive: Any = None
    unseen: str = "error"
    beyond: str = "refuse"
    training: TrainingData | None = None

    def encode(self, data: Any) -> "pandas.DataFrame":
        """Return the columns of X for rows of raw columns. Columns that the formula does not name are ignored.

        Raises
        ------
        FormulaError
            If a column is missing or of another kind than in the fit, a level is new, a value is missing (unless
            `missing` is "mean"), or a function has no finite value.
        """
        frame = self._filled(self._select(data))
        raw = self._design(frame, self.transforms)
        if list(raw) != self.names:
            raise FormulaError(f"the formula must produce the columns {self.names}; got {list(raw)}. Fit it again.")
        return (raw - np.array(self.centre)) / np.array(self.scale)

    def complete(self, data: Any) -> np.ndarray:
        """Return which rows have no missing value in the columns of the formula."""
        return ~self._select(data).isna().to_numpy().any(1)

    @property
    def inputs(self) -> list[str]:
        """Return the columns that the formula reads, without the target."""
        return self.columns[1:]

    @property
    def units(self) -> dict[str, str]:
        """Describe, for each column of X, the change in raw units to which its coefficient refers."""
        return {name: self._unit(name, *at) for name, *at in zip(self.names, self.centre, self.scale, strict=True)}

    def _unit(self, name: str, centre: float, scale: float) -> str:
        if (centre, scale) != (0.0, 1.0):
            return f"sd, {scale:.3g}"
        for function, levels in (("month", MONTHS), ("weekday", WEEKDAYS)):
            if re.fullmatch(rf"{function}\([^()]+\)\[T\.\w+\]", name):
                return f"vs {levels[0]}"
        level = re.fullmatch(r"(?:C\()?(.+?)\)?\[T\.(.*)\]", name)
        if level and level[1] in self.levels and ":" not in name:
            return f"vs {self.levels[level[1]][0]}"
        return "1"

    @cached_property
    def _parsed(self) -> ParsedFormula:
        return parse_formula(self.formula, self.columns, [name for name in self.levels if name not in self.means])

    def _select(self, data: Any) -> "pandas.DataFrame":
        frame = as_frame(data)
        absent = [name for name in self.inputs if name not in frame.columns]
        if absent:
            raise FormulaError(
                f"the data must have the columns of the fit; got none named {listed(absent)}. "
                f"It has {listed(frame.columns)}."
            )
        return with_days(frame[self.inputs], self._parsed.dates)

    def _filled(self, frame: "pandas.DataFrame") -> "pandas.DataFrame":
        counts = frame.isna().sum()
        holes = {str(name): int(number) for name, number in counts.items() if number}
        if not holes:
            return frame
        if self.missing != "mean":
            name = next(iter(holes))
            row = frame.index[int(np.flatnonzero(frame[name].isna())[0])]
            got = f"{counted(holes)}, the first"
            raise RowError("rows must have no missing values", got, row, "Leave them out, or fit with missing='mean'.")
        whole = [name for name in holes if name in self.means and frame[name].dtype.kind in "iu"]  # pandas' Int64
        values = {name: self.means.get(name, self.common.get(name)) for name in holes}
        return frame.astype(dict.fromkeys(whole, "float64")).fillna(values)

    def _design(self, frame: "pandas.DataFrame", state: dict[str, Any]) -> "pandas.DataFrame":
        """Return the columns of X before they are standardised. `state` is read, or learned if it is empty."""
        import pandas

        plain, variables = self._parsed.plain, self._parsed.variables
        parts = {name: as_numbers(frame[name]) for name in plain}
        if variables:
            given = {
                name: as_levels(frame[column], self.levels[column]) if name[0] == "c" else as_numbers(frame[column])
                for name, column in variables.items()
            }
            found = evaluate_terms(self._parsed.rest, pandas.DataFrame(given, index=frame.index), state)
            parts |= {self._name(name): values for name, values in found.items()}
        design = pandas.DataFrame(parts, index=frame.index, dtype=float)
        check_finite_design(design)
        return design

    def _name(self, ours: str) -> str:
        """Replace internal variables in a column's name by the names in the data."""
        return re.sub(r"\b[ncd](\d+)_", lambda found: self.columns[int(found[1])], ours)

    def to_state(self) -> dict[str, Any]:
        """Return everything as JSON."""
        unset = {
            one.name for one in fields(self) if one.name in ADDED_FIELDS and getattr(self, one.name) == one.default
        }
        state = {name: value for name, value in asdict(self).items() if name not in unset}
        return state | {"transforms": encode_transforms(self.transforms)}

    @classmethod
    def from_state(cls, state: Any) -> "Encoding":
        """Invert `to_state`. The formula is checked again, so that nothing in a file can run as a program."""
        try:
            encoding = cls(**state)
            check_encoding(encoding)
            if encoding.training is not None:
                training = TrainingData.from_state(encoding.training, encoding.levels)
                object.__setattr__(encoding, "training", training)
            object.__setattr__(encoding, "transforms", decode_transforms(encoding.transforms))
            parsed = encoding._parsed
            used, learned = {*parsed.plain, *parsed.variables.values()}, {*encoding.means, *encoding.levels}
            if parsed.target != encoding.target or used != set(encoding.inputs) or not used <= learned:
                raise ValueError("columns that it does not name")
            if encoding.training is not None and set(encoding.training.columns) != used:
                raise ValueError("training data of other columns")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise StorageError(f"the model's formula must be one that viper wrote; got {error}") from None
        return encoding


# --- formulaic ---


@cache
def formula_functions() -> dict[str, Any]:
    """Return functions that formulaic lacks, and its splines with NaN beyond the range of the fit.

    `check_finite_design` reports the NaN.
    """
    from formulaic.transforms import TRANSFORMS
    from formulaic.utils.stateful_transforms import stateful_transform

    def bs(x: Any, df: int | None = None, degree: int = 3, _state: Any = None) -> Any:
        return TRANSFORMS["bs"](x, df=df, degree=degree, extrapolation="na", _state=_state)

    of_numbers = {"log1p": np.log1p, "sqrt": np.sqrt, "abs": np.abs, "bs": stateful_transform(bs)}
    return of_numbers | {"days": np.asarray, "year": year_of, "month": month_of, "weekday": weekday_of}


MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def calendar_days(days: Any) -> np.ndarray:
    """Return the dates that lie so many days after 1970-01-01; the time of day is left out."""
    return np.floor(np.asarray(days, dtype=np.float64)).astype("datetime64[D]")


def year_of(days: Any) -> np.ndarray:
    return calendar_days(days).astype("datetime64[Y]").astype(float) + 1970.0


def month_of(days: Any) -> "pandas.Series[Any]":
    """Return the month as a category of twelve levels, whichever are there."""
    return as_category(calendar_days(days).astype("datetime64[M]").astype(np.int64) % 12, MONTHS)


def weekday_of(days: Any) -> "pandas.Series[Any]":
    """Return the day of the week as a category of seven levels; 1970-01-01 was a Thursday."""
    return as_category((calendar_days(days).astype(np.int64) + 3) % 7, WEEKDAYS)


def as_category(codes: np.ndarray, levels: tuple[str, ...]) -> "pandas.Series[Any]":
    import pandas

    return pandas.Series(pandas.Categorical.from_codes(codes, categories=list(levels)))


def evaluate_terms(rest: str, frame: "pandas.DataFrame", state: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the columns of the terms in `rest`, without the intercept.

    The `state` of functions that have learned is read; that of all others is learned and added.
    """
    from formulaic import Formula, ModelSpec

    if not len(frame):  # formulaic needs a row to determine the names
        return {name: column[:0] for name, column in evaluate_terms(rest, placeholder_row(frame), state).items()}
    with formula_errors(), np.errstate(all="ignore"):
        spec = ModelSpec(formula=Formula(rest), transform_state=state, na_action="ignore", output="pandas")
        matrix = spec.get_model_matrix(frame.reset_index(drop=True), context=formula_functions())
    state.update(matrix.model_spec.transform_state)
    return {str(name): matrix[name].to_numpy(dtype=float) for name in matrix if name != "Intercept"}


def placeholder_row(frame: "pandas.DataFrame") -> "pandas.DataFrame":
    """Return one row of first levels and ones, which has the same columns as any other."""
    import pandas

    row: dict[str, Any] = {name: [1.0] for name in frame}
    for name, column in frame.select_dtypes("category").items():
        row[str(name)] = pandas.Categorical.from_codes([0], dtype=column.dtype)
    return pandas.DataFrame(row)


@contextmanager
def formula_errors() -> Iterator[None]:
    """Turn formulaic's errors into a FormulaError."""
    from formulaic.errors import FormulaicError

    try:
        yield
    except (FormulaicError, ValueError, TypeError, ArithmeticError, KeyError, IndexError) as error:
        reason = str(error.__cause__ or error).splitlines()[0][:200]
        raise FormulaError(f"the formula must have a value for every row; got: {reason}") from None


def formula_has_intercept(rest: str) -> bool:
    from formulaic import Formula

    return rest == "1" or any(str(term) == "1" for term in Formula(rest))


def check_finite_design(design: "pandas.DataFrame") -> None:
    bad = ~np.isfinite(design.to_numpy())
    if bad.any():
        row, column = np.argwhere(bad)[0]
        fix = "Logarithms and roots need positive numbers, and splines need numbers in the range of the fit."
        raise RowError(f"{design.columns[column]} must be finite", f"{design.iat[row, column]}", design.index[row], fix)


# --- state as JSON ---


def encode_transforms(state: Any) -> Any:
    """Return the state of formulaic's functions as JSON."""
    if isinstance(state, dict):
        return {str(name): encode_transforms(value) for name, value in state.items()}
    if isinstance(state, list | tuple | np.ndarray):
        return [encode_transforms(value) for value in state] if np.ndim(state) else np.asarray(state).item()
    if isinstance(state, np.generic | float | int | bool) or state is None:
        return python_value(state)
    raise FormulaError(f"functions in a formula must learn only numbers; got {type(state).__name__} in {state!r:.60}.")


def decode_transforms(state: Any) -> Any:
    """Invert `encode_transforms`: keys that were numbers become numbers again."""
    if isinstance(state, dict):
        return {int(name) if str(name).isdecimal() else name: decode_transforms(value) for name, value in state.items()}
    return [decode_transforms(value) for value in state] if isinstance(state, list) else state


def check_encoding(encoding: Encoding) -> None:
    """Check that values read from a file have the types that `learn_formula` produces."""
    kinds: dict[type, tuple[str, ...]] = {
        str: ("formula", "target", "missing", "unseen", "beyond"),
        list: ("columns", "names", "centre", "scale"),
        bool: ("intercept", "standardize"),
        dict: ("means", "levels", "common", "transforms", "counts", "record"),
    }
    for kind, names in kinds.items():
        for name in names:
            if type(getattr(encoding, name)) is not kind:
                raise TypeError(f"{name} that is not a {kind.__name__}")
    if encoding.unseen not in UNSEEN_RULES or encoding.beyond not in BEYOND_RULES:
        raise ValueError("unknown rules for new rows")
    texts = [*encoding.columns, *encoding.names, *encoding.means, *encoding.levels]
    numbers = [*encoding.centre, *encoding.scale, *encoding.means.values()]
    if not all(isinstance(text, str) for text in texts) or encoding.missing not in MISSING_RULES:
        raise TypeError("names that are not text")
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
        raise TypeError("scales that are not finite numbers")
    if not len(encoding.names) == len(encoding.centre) == len(encoding.scale):
        raise TypeError("names and scales that do not match")
    if not isinstance(encoding.positive, str | int | float | None):
        raise TypeError("a positive class that is not a label")
    if not all(isinstance(levels, list) and levels for levels in encoding.levels.values()):
        raise TypeError("levels that are not a list")
