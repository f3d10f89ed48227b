"""One raw column of a table: its kind, its numbers, its levels. Error messages name the column and row."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from viper.data.arrow import plain_columns
from viper.errors import FormulaError, RowError

if TYPE_CHECKING:
    import pandas


def as_frame(data: Any) -> "pandas.DataFrame":
    """Return named columns as a pandas frame. They may come from pandas, polars, Arrow or a dictionary of columns."""
    import pandas

    if isinstance(data, pandas.DataFrame):
        frame = data
    elif hasattr(data, "to_pandas") and type(data).__module__.startswith("pyarrow"):
        frame = data.to_pandas()
    elif isinstance(data, dict) or (hasattr(data, "columns") and hasattr(data, "get_column")):
        frame = pandas.DataFrame({name: np.asarray(data[name]) for name in getattr(data, "columns", data)})
    else:
        raise FormulaError(
            f"a model with a formula needs a table with named columns; got {type(data).__module__}."
            f"{type(data).__name__}. Pass a DataFrame that is in memory."
        )
    if not all(isinstance(name, str) for name in frame.columns):
        frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise FormulaError(f"columns must have different names; got {twice!r} twice. Rename one.")
    return plain_columns(frame)


def is_text(column: "pandas.Series[Any]") -> bool:
    """Return whether the column's type makes it a category: text, booleans, pandas' categories. Dates are neither."""
    from pandas.api import types

    kind = column.dtype
    return bool(types.is_bool_dtype(kind) or not (types.is_numeric_dtype(kind) or kind.kind in "Mmc"))


def as_numbers(column: "pandas.Series[Any]") -> np.ndarray:
    """Return float64 numbers, with NaN for missing values. Infinite values raise an error."""
    from pandas.api import types

    check_no_dates(column)
    if column.dtype == object and types.infer_dtype(column) in ("empty", "integer", "floating", "mixed-integer-float"):
        column = column.where(column.notna(), np.nan).astype(np.float64)  # None among numbers, or nothing else
    if types.is_bool_dtype(column.dtype) or not types.is_numeric_dtype(column.dtype) or column.dtype.kind == "c":
        check_no_text(column)
        raise FormulaError(f"column {column.name!r} must be numeric; got {column.dtype}. Use C() for categories.")
    values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isinf(values).any():
        row = int(np.flatnonzero(np.isinf(values))[0])
        raise RowError(f"column {column.name!r} must be finite", f"{values[row]}", column.index[row], "Correct it.")
    return values


def check_no_dates(column: "pandas.Series[Any]") -> None:
    if column.dtype.kind in "Mm":
        raise FormulaError(f"column {column.name!r} must be numeric or text; got dates. Convert them to numbers.")


def check_no_text(column: "pandas.Series[Any]") -> None:
    """Raise a RowError for the first value that is text and not a number."""
    for row, value in column.items():
        if isinstance(value, str):
            try:
                float(value)
            except ValueError:
                rule = f"column {column.name!r} must be numeric"
                raise RowError(rule, f"{value!r:.60}", row, "Correct it, or use C() for categories.") from None


def as_levels(column: "pandas.Series[Any]", levels: list[Any]) -> "pandas.Categorical":
    """Return the column as a category with these levels. Any other value raises a RowError."""
    import pandas

    codes = level_codes(column, levels)
    new = np.flatnonzero((codes < 0) & column.notna().to_numpy())
    if len(new):
        rule = f"column {column.name!r} must be one of {levels[:8]}{' …' if len(levels) > 8 else ''}, as in the fit"
        got = repr(python_value(column.iloc[new[0]]))
        raise RowError(rule, got, column.index[new[0]], "Fit again with such rows, or leave them out.")
    return pandas.Categorical.from_codes(codes, categories=levels)


def level_codes(column: "pandas.Series[Any]", levels: list[Any]) -> np.ndarray:
    """Return the position of each value among the levels, -1 for any other."""
    import pandas

    return pandas.Index(levels).get_indexer(pandas.Index(as_written(column, levels)))


def as_written(column: "pandas.Series[Any]", levels: list[Any]) -> "pandas.Series[Any]":
    """Replace numbers by the levels they spell if all levels are text: 1 and 1.0 become "1"."""
    texts = set(levels)
    if isinstance(column.dtype, np.dtype) and column.dtype.kind == "O":
        numbers = column.map(lambda value: isinstance(value, int | float)).any()
    else:
        numbers = column.dtype.kind in "biuf"
    if not numbers or not all(isinstance(level, str) for level in levels):
        return column

    def written(value: Any) -> Any:
        whole = isinstance(value, float) and value.is_integer()
        spelled = [str(value), *([str(int(value))] if whole else [])]
        return next((text for text in spelled if text in texts), value)

    return column.astype(object).map(written)


def levels_of(column: "pandas.Series[Any]", most: int) -> list[Any]:
    """Return the distinct values in order, as plain Python values."""
    import pandas

    check_no_dates(column)
    present = column.dropna().unique()
    if isinstance(column.dtype, pandas.CategoricalDtype):
        present = [level for level in column.cat.categories if level in set(present)]
    else:
        try:
            present = sorted_values(present)
        except TypeError:
            kinds = sorted({type(value).__name__ for value in present})
            raise FormulaError(
                f"column {column.name!r} must contain one kind of value; got {', '.join(kinds)}. Recode it."
            ) from None
    if len(present) > most:
        raise FormulaError(f"column {column.name!r} must have at most {most} levels; got {len(present)}. Group them.")
    return [python_value(value) for value in present]


def sorted_values(values: Iterable[Any]) -> list[Any]:
    """Return the values sorted; text that spells numbers is in the order of the numbers: "2" before "10"."""
    every = list(values)
    try:
        return sorted(every, key=lambda value: (float(value), value))
    except ValueError:
        return sorted(every)


def without_blanks(column: "pandas.Series[Any]") -> "pandas.Series[Any]":
    """Return the column without blanks around its text; the same column if there are none."""
    import pandas

    if not is_text(column):
        return column
    codes, values = pandas.factorize(column)
    trimmed = [value.strip() if isinstance(value, str) else value for value in values]
    if all(new is old or new == old for new, old in zip(trimmed, values, strict=True)):
        return column
    if isinstance(column.dtype, pandas.CategoricalDtype):
        order = {level.strip() if isinstance(level, str) else level: None for level in column.cat.categories}
        kind = pandas.CategoricalDtype([*order], column.cat.ordered)
    else:
        kind = column.dtype
    new = pandas.Series([*trimmed, None], dtype=object).iloc[codes]
    return new.set_axis(column.index).astype(kind).rename(column.name)


def python_value(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
