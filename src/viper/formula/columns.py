"""One raw column of a table: its kind, its numbers, its levels, its dates. Error messages name the column and row.

A column is numbers, a category (text, booleans, pandas' categories) or dates. Dates are neither numbers nor
categories: a formula says which part of a date counts.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from viper.data.arrow import plain_columns
from viper.data.blocks import is_lazy
from viper.data.csv_text import spelled_numbers
from viper.errors import FormulaError, RowError
from viper.formula.grammar import DATE_FUNCTIONS, quote_column

if TYPE_CHECKING:
    import pandas


ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?")
OTHER_DATE = re.compile(r"\s*\d{1,4}[./-]\d{1,2}[./-]\d{1,4}\b")
MICROSECONDS_PER_DAY = 86_400_000_000
MOST_COLUMNS = 20_000  # columns of a formula; a model file's header has room for the metadata of about twice as many
ONE_KIND = ("string", "boolean", "integer", "floating", "empty")  # kinds that pandas may infer for a column of objects
FEWEST_COUNTED = 20  # rows from which integers that all differ may be row numbers
FEWEST_TEXTS = 5  # rows from which texts that all differ are taken for names rather than for categories
SAME_TO = 1e-12  # relative to a column's size; smaller differences keep hardly a digit once the mean is subtracted
FIRST_COMPARED = 1000  # rows among which columns other than identifiers repeat a value
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def as_frame(data: Any) -> "pandas.DataFrame":
    """Return named columns as a pandas frame. They may come from pandas, polars, Arrow or a dictionary of columns."""
    import pandas

    if is_lazy(data):
        raise FormulaError("a model with a formula needs a table in memory; got a LazyFrame. Pass its collect().")
    if isinstance(data, pandas.DataFrame):
        frame = data
    elif hasattr(data, "to_pandas") and type(data).__module__.startswith("pyarrow"):
        frame = data.to_pandas()
    elif isinstance(data, dict) or (hasattr(data, "columns") and hasattr(data, "get_column")):
        frame = pandas.DataFrame({name: as_column(data[name]) for name in getattr(data, "columns", data)})
    else:
        raise FormulaError(
            f"a model with a formula needs a table with named columns; got {kind_of(data)}. Pass a DataFrame that "
            "is in memory."
        )
    if not all(isinstance(name, str) for name in frame.columns):
        frame = frame.set_axis([str(name) for name in frame.columns], axis=1)
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise FormulaError(f"columns must have different names; got {twice!r} twice. Rename one.")
    return plain_columns(frame)


def kind_of(data: Any) -> str:
    """Return the name of an object's type, with the package it comes from: list, None, numpy.ndarray."""
    kind, package = type(data).__name__, type(data).__module__.partition(".")[0]
    return "None" if data is None else kind if package == "builtins" else f"{package}.{kind}"


def check_column_count(count: int) -> None:
    """Raise if a formula has more columns than a model can remember in its file."""
    if count > MOST_COLUMNS:
        raise FormulaError(
            f"a formula may have at most {MOST_COLUMNS:,} columns; got {count:,}. Name the ones you need, or fit the "
            "array of their numbers in Python."
        )


def as_column(values: Any) -> Any:
    """Return an array; masked entries are missing values."""
    import pandas

    if isinstance(values, np.ma.MaskedArray):
        return pandas.Series(values.data).mask(np.ma.getmaskarray(values))
    return np.asarray(values)


def is_text(column: "pandas.Series[Any]") -> bool:
    """Return whether the column is a category by itself: text, booleans, pandas' categories. Dates are not."""
    from pandas.api import types

    kind = column.dtype
    if types.is_bool_dtype(kind) or isinstance(kind, types.CategoricalDtype):
        return True
    return not (types.is_numeric_dtype(kind) or kind.kind in "Mmc" or is_date(column))


def is_date(column: "pandas.Series[Any]") -> bool:
    """Return whether the column holds dates: by its type, or because all of its texts are ISO 8601 dates."""
    from pandas.api import types

    if column.dtype.kind == "M":
        return True
    if not types.is_object_dtype(column.dtype) and not types.is_string_dtype(column.dtype):
        return False
    there = column.notna().to_numpy()
    if not len(there) or not is_iso(column.iat[int(there.argmax())]):
        return False
    texts = column[there].unique()
    return all(map(is_iso, texts)) and bool(parsed_dates(texts).notna().all())


def is_iso(value: Any) -> bool:
    return isinstance(value, str) and ISO_DATE.fullmatch(value.strip()) is not None


def parsed_dates(texts: Any) -> "pandas.Series[Any]":
    """Return dates from ISO 8601 text, with NaT for any other text; times with an offset are converted to UTC."""
    import pandas

    written = pandas.Series(texts, dtype=object).map(lambda text: text.strip() if isinstance(text, str) else text)
    return pandas.to_datetime(written, format="ISO8601", errors="coerce", utc=True).dt.tz_localize(None)


def as_days(column: "pandas.Series[Any]") -> np.ndarray:
    """Return days since 1970-01-01 as float64, with NaN for missing dates. Numbers are taken as such days."""
    import pandas
    from pandas.api import types

    if types.is_numeric_dtype(column.dtype) and not types.is_bool_dtype(column.dtype):
        return as_numbers(column)
    if column.dtype.kind == "M":
        dates = column.dt.tz_localize(None) if getattr(column.dtype, "tz", None) is not None else column
    else:
        codes, texts = pandas.factorize(column)
        parsed = parsed_dates(texts)
        if parsed.isna().any():
            row = int(np.flatnonzero(np.isin(codes, np.flatnonzero(parsed.isna())))[0])
            rule = f"column {column.name!r} must hold dates such as 2024-12-31"
            raise RowError(rule, f"{column.iat[row]!r:.60}", column.index[row], "Correct it.")
        dates = parsed.reindex(codes)  # the code of a missing value is -1
    micro = dates.to_numpy(dtype="datetime64[us]")
    return np.where(np.isnat(micro), np.nan, micro.astype(np.int64) / MICROSECONDS_PER_DAY)


def as_dates(days: "pandas.Series[Any]") -> "pandas.Series[Any]":
    """Invert `as_days`."""
    import pandas

    return pandas.to_datetime(days, unit="D")


def with_days(frame: "pandas.DataFrame", dates: Iterable[str]) -> "pandas.DataFrame":
    """Return the frame with the columns of dates as days since 1970-01-01."""
    found = {name: as_days(frame[name]) for name in dates}
    return frame.assign(**found) if found else frame


def as_numbers(column: "pandas.Series[Any]") -> np.ndarray:
    """Return float64 numbers, with NaN for missing values. Infinite values raise an error."""
    import pandas
    from pandas.api import types

    check_no_dates(column)
    if column.dtype == object and types.infer_dtype(column) in ("empty", "integer", "floating", "mixed-integer-float"):
        numbers = spelled_numbers(column)  # a column of None and numbers, or of None alone
        column = pandas.Series(numbers, index=column.index, name=column.name)
    if types.is_bool_dtype(column.dtype) or not types.is_numeric_dtype(column.dtype) or column.dtype.kind == "c":
        check_no_text(column)
        raise FormulaError(f"column {column.name!r} must be numeric; got {column.dtype}. Use C() for categories.")
    values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isinf(values).any():
        row = int(np.flatnonzero(np.isinf(values))[0])
        raise RowError(f"column {column.name!r} must be finite", f"{values[row]}", column.index[row], "Correct it.")
    return values


def check_no_dates(column: "pandas.Series[Any]") -> None:
    name = column.name
    if column.dtype.kind == "m":
        raise FormulaError(f"column {name!r} must be numeric or text; got durations. Convert them to numbers.")
    if is_date(column):
        ways = ", ".join(f"{function}({quote_column(str(name))})" for function in DATE_FUNCTIONS)
        raise FormulaError(f"column {name!r} must be numeric or text; got dates. Write which part counts: {ways}.")


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
    """Return the position of each value among the levels, -1 for any other. Blanks around text are ignored."""
    import pandas

    index = pandas.Index(levels)
    codes = index.get_indexer(pandas.Index(spelled_levels(column, levels)))
    odd = np.flatnonzero((codes < 0) & column.notna().to_numpy())
    if len(odd):
        codes[odd] = index.get_indexer(pandas.Index([as_trimmed(value) for value in column.iloc[odd]], dtype=object))
    return codes


def spelled_levels(column: "pandas.Series[Any]", levels: list[Any]) -> "pandas.Series[Any]":
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

    if column.dtype.kind in "Mm":
        check_no_dates(column)
    check_plain_values(column)
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
    """Return the values sorted: "2" before "10", and months and days of the week as in the calendar."""
    every = list(values)
    if (places := calendar_places(every)) is not None:
        return sorted(every, key=lambda value: (places[value], value))
    try:
        return sorted(every, key=lambda value: (float(value), value))
    except ValueError:
        return sorted(every)


def calendar_places(values: Iterable[Any]) -> dict[Any, int] | None:
    """Return each value's place in the year or the week, if all are English names of months, or all of weekdays."""
    every = list(values)
    if len(every) < 2 or not all(isinstance(value, str) for value in every):
        return None
    for names in (CALENDAR_MONTHS, CALENDAR_DAYS):
        places = {value: names.get(value.strip().rstrip(".").casefold()) for value in every}
        if None not in places.values():
            return places  # type: ignore[return-value]
    return None


def calendar_table(names: Iterable[str], *others: str) -> dict[str, int]:
    """Return the place of each name, written out, cut to three letters, or in one of the other ways."""
    return {
        short: k
        for k, name in enumerate(names)
        for short in (name, name[:3], *(other for other in others if name.startswith(other)))
    }


YEAR = "january february march april may june july august september october november december"
WEEK = "monday tuesday wednesday thursday friday saturday sunday"
CALENDAR_MONTHS = calendar_table(YEAR.split(), "sept")
CALENDAR_DAYS = calendar_table(WEEK.split(), "tues", "thur", "thurs")


def without_blanks(column: "pandas.Series[Any]") -> "pandas.Series[Any]":
    """Return the column without blanks around its text; the same column if there are none."""
    import pandas

    if not is_text(column):
        return column
    check_plain_values(column)
    codes, values = pandas.factorize(column)
    trimmed = [as_trimmed(value) for value in values]
    if all(new is old or new == old for new, old in zip(trimmed, values, strict=True)):
        return column
    if isinstance(column.dtype, pandas.CategoricalDtype):
        order = {as_trimmed(level): None for level in column.cat.categories}
        kind = pandas.CategoricalDtype([*order], column.cat.ordered)
    else:
        kind = column.dtype
    new = pandas.Series([*trimmed, None], dtype=object).iloc[codes]
    return new.set_axis(column.index).astype(kind).rename(column.name)


def target_without_blanks(column: "pandas.Series[Any]") -> "pandas.Series[Any]":
    """Return the labels without the blanks around them, if only these blanks make more than two classes."""
    check_plain_values(column)
    if column.nunique() > 2 and 1 < (trimmed := without_blanks(column)).nunique() < column.nunique():
        return trimmed
    return column


def as_trimmed(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def check_plain_values(column: "pandas.Series[Any]") -> None:
    """Raise unless every cell is one value: not a list, a mapping, an array or bytes."""
    from pandas.api import types

    if column.dtype.kind != "O" or types.infer_dtype(column) in ONE_KIND:
        return
    for value in column:
        if isinstance(value, list | tuple | dict | set | bytes | bytearray | np.ndarray):
            raise FormulaError(
                f"column {column.name!r} must have one number, text or date in every row; got {type(value).__name__}. "
                "Leave the column out."
            )


# --- the columns that a model can use ---

MOST_UNNAMED_LEVELS = 50  # levels of a text column, unless it is named
IDENTIFIER = re.compile(r"(?i:index|row|row_?names?|(.*[\W_])?(id|uuid|guid)|id[\W_].*)|.*[a-z0-9]I[dD]")


def left_out_columns(
    frame: "pandas.DataFrame", target: str, named: Collection[str], how_to_use: Callable[[str], str]
) -> dict[str, str]:
    """Return the columns that are no use to a model by themselves, each with the reason.

    Raises a FormulaError for text with many levels that each occur in several rows, because it may matter. There is no
    limit for columns in `named`.
    """
    found = {}
    for name, column in frame.items():
        if name == target or is_varied_number(column):
            continue
        check_plain_values(column)
        different = column.nunique()
        if why := reason_to_leave_out(column, different):
            found[str(name)] = why
        elif is_text(column) and different > MOST_UNNAMED_LEVELS and name not in named:
            some = column.dropna().iloc[0]
            dates = "Write dates as 2024-12-31. " if OTHER_DATE.match(str(some)) else ""
            raise FormulaError(
                f"a text column must have at most {MOST_UNNAMED_LEVELS} levels; got {different} in {name!r}, such as "
                f"{some!r:.40}. {dates}{how_to_use(name)}"
            )
    return found


def is_varied_number(column: "pandas.Series[Any]") -> bool:
    """Return quickly whether the column holds numbers that differ, and is not named like an identifier."""
    if not isinstance(column.dtype, np.dtype) or column.dtype.kind not in "iuf" or not len(column):
        return False
    return differs_visibly(column) and not IDENTIFIER.fullmatch(str(column.name))


def differs_visibly(column: "pandas.Series[Any]") -> bool:
    """Return whether numbers differ by more than SAME_TO of their size, that is, visibly to a fit."""
    values = column.to_numpy(dtype=float, na_value=np.nan)
    values = values[values == values]
    least, most = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    size = max(abs(least), abs(most))
    return least != most and (most - least > SAME_TO * size or math.isinf(size))


def reason_to_leave_out(column: "pandas.Series[Any]", different: int) -> str | None:
    """Return why a column with so many different values is no use to a model by itself, or None."""
    if different < 2:
        return "the same in all rows" if different else "no values"
    if column.dtype.kind in "iuf" and not differs_visibly(column):
        return "the same in all rows to 12 digits; subtract its smallest value to use the others"
    if column.dtype.kind == "m":
        return "durations, which are neither numbers nor categories"
    if is_date(column):
        ways = [f"{function}({quote_column(str(column.name))})" for function in DATE_FUNCTIONS]
        return f"dates; name {', '.join(ways[:-1])} or {ways[-1]} in a formula to use them"
    if is_identifier(column, different):
        return "it identifies rows; name it in a formula to use it"
    return reason_to_leave_text_out(column, different) if is_text(column) else None


def reason_to_leave_text_out(column: "pandas.Series[Any]", different: int) -> str | None:
    """Return why a text column is no use to a model if it looks like names, notes or ticket numbers, or None."""
    known = column.dropna()
    if different == len(known) >= FEWEST_TEXTS:
        why = f"it identifies rows, as its {different:,} texts all differ"
    elif different > MOST_UNNAMED_LEVELS and 2 * different > len(known):
        why = f"it has {different:,} different texts in {len(known):,} rows; name it in a formula to use it"
    else:
        return None
    return f"{why}; write dates as 2024-12-31" if OTHER_DATE.match(str(known.iloc[0])) else why


def differs_in_every_row(known: "pandas.Series[Any]", different: int) -> bool:
    """Return whether no value occurs twice, although a category would repeat one in so many rows."""
    return different == len(known) >= FEWEST_COUNTED


def is_identifier(column: "pandas.Series[Any]", different: int) -> bool:
    """Return whether the column is named like an identifier and holds as many different integers as one."""
    if not IDENTIFIER.fullmatch(str(column.name)) or not is_whole(column):
        return False
    return different > MOST_UNNAMED_LEVELS or different == len(column)


def has_row_numbers(column: "pandas.Series[Any]") -> bool:
    """Return whether the column has a different integer in every row, as row numbers and identifiers do."""
    if len(column) < FEWEST_COUNTED or column.dtype.kind not in "iuf" or not column.iloc[:FIRST_COMPARED].is_unique:
        return False
    return is_whole(column) and bool(column.is_unique)


def is_whole(column: "pandas.Series[Any]") -> bool:
    """Return whether the column holds integers only, and none is missing."""
    from pandas.api import types

    if types.is_bool_dtype(column.dtype) or not types.is_numeric_dtype(column.dtype) or column.isna().any():
        return False
    return column.dtype.kind in "iu" or (column.dtype.kind == "f" and bool((column % 1 == 0).all()))


def calendar_days(days: Any) -> np.ndarray:
    """Return the dates that lie this many days after 1970-01-01, without the time of day."""
    return np.floor(np.asarray(days, dtype=np.float64)).astype("datetime64[D]")


def date_text(day: float) -> str:
    """Return the date that lies this many days after 1970-01-01, such as 2024-12-31."""
    return str(calendar_days(day))


def number_text(x: float, digits: int = 3) -> str:
    """Return a number as people write it: 0.043, 12.3, 1990, 288,000, 1.2e10. `digits` apply below 1,000."""
    x = float(x)
    if x != 0.0 and not 1e-3 <= abs(x) < 1e9:
        mantissa, _, power = f"{x:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(power)}" if power else mantissa
    x = float(f"{x:.{max(digits, math.floor(math.log10(abs(x) or 1.0)) + 1)}g}")
    return f"{x:,.{digits}f}".rstrip("0").rstrip(".") if abs(x) >= 10_000 else f"{x:.15g}"


def python_value(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
