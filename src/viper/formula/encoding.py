"""What a formula learned from a table. It is plain data, stored with the model and applied to other rows.

frame → checked columns → missing values by rule → formulaic → standardised, if asked for → X
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from viper.data.schema import (
    ABOVE_ZERO,
    BOOLEAN,
    LABEL,
    NOTHING,
    NUMBER,
    PLAIN,
    TEXT,
    WHOLE,
    Entries,
    Fields,
    Items,
    fields_of,
    one_of,
    or_none,
)
from viper.errors import FormulaError, RowError, StorageError, counted, listed, shown
from viper.formula.columns import (
    MONTHS,
    WEEKDAYS,
    as_frame,
    as_levels,
    as_numbers,
    calendar_days,
    level_codes,
    number_text,
    python_value,
    with_days,
)
from viper.formula.grammar import ParsedFormula, parse_formula
from viper.formula.imputation import DRAWN_ENTRIES, DRAWS, CodedColumns, Imputation
from viper.formula.training import TrainingData, check_training_data

if TYPE_CHECKING:
    import pandas

MISSING_RULES = ("error", "drop", "mean", "indicator", "multiple")
SEEN = "seen"  # key of the state that month() and weekday() learn
MISSING_LEVEL = "missing"  # the level of a category's missing values, for missing="indicator"
UNSEEN_RULES = ("error", "missing", "baseline")
BEYOND_RULES = ("refuse", "clamp")
NEW_ROW_RULES = {"unseen": UNSEEN_RULES, "beyond": BEYOND_RULES}
LONE_CATEGORIES = re.compile(r"1(?: \+ c\d+_)+")  # terms that do not need formulaic, which is slow for many rows
ADDED_FIELDS = (
    "positive",
    "unseen",
    "beyond",
    "training",
    "imputations",
    "sweeps",
    "grouping",
)  # stored unless the default


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
    missing : {"error", "drop", "mean", "indicator", "multiple"}
        What happens to rows with missing values.
    means : dict
        Means of the columns that are used as numbers.
    levels : dict
        Levels of the columns that are used as categories, with the reference first.
    common : dict
        The level that is filled in for each of these columns: the most common one, or MISSING_LEVEL.
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
    imputations, sweeps : int
        For missing="multiple", how many tables were completed, and how often each chain drew every column.
    grouping : list of str, optional
        Columns that say to which groups a row belongs, for models with group effects. They are not among `columns`.
    imputation : Imputation, optional
        For missing="multiple", what the missing values of new rows are drawn from. A model file holds it as arrays.
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
    imputations: int = 20
    sweeps: int = 10
    grouping: list[str] | None = None
    imputation: Imputation | None = field(default=None, compare=False)

    def encode(self, data: Any) -> "pandas.DataFrame":
        """Return the columns of X for rows of raw columns. Columns that the formula does not name are ignored.

        Raises
        ------
        FormulaError
            If a column is missing or of another kind than in the fit, a level is new (if `unseen` is "error"), a
            value is missing (if `missing` is "error" or "drop"), or a function has no finite value.
        """
        if isinstance(data, ImputedRows):
            return data.design
        return self._standardised(self._select(data)) if self.imputation is None else self.impute(data).design

    def impute(self, data: Any, spread: Callable[[np.ndarray], np.ndarray] | None = None) -> "ImputedRows":
        """Return the columns of X, averaged over draws of the missing values, and the `spread` of these draws.

        `spread` takes deviations from the mean (rows × draws × columns of X) and returns one number per row, or one per
        row and class.
        """
        selected = self._select(data)
        design = self._standardised(selected)
        residual: np.ndarray | None = None
        rows = np.flatnonzero(selected.isna().to_numpy().any(1))
        values = design.to_numpy(copy=True) if len(rows) else design.to_numpy()
        for some in np.split(rows, range(0, len(rows), max(1, DRAWN_ENTRIES // (DRAWS * max(1, len(self.names)))))[1:]):
            if len(some):
                drawn = self._drawn_designs(selected.iloc[some])
                values[some] = drawn.mean(1)
                if spread is not None:
                    found = spread(drawn - values[some][:, None])
                    residual = np.zeros((len(design), *found.shape[1:])) if residual is None else residual
                    residual[some] = found
        residual = np.zeros(len(design)) if residual is None else residual
        return ImputedRows(type(design)(values, index=design.index, columns=design.columns), residual)

    def _standardised(self, selected: "pandas.DataFrame") -> "pandas.DataFrame":
        """Return X for raw columns whose missing values are filled in or, if drawn, replaced later."""
        return self._scaled(self._with_indicators(self._design(self._filled(selected), self.transforms), selected))

    def _scaled(self, raw: "pandas.DataFrame") -> "pandas.DataFrame":
        if list(raw) != self.names:
            raise FormulaError(f"the formula must produce the columns {self.names}; got {list(raw)}. Fit it again.")
        values = (raw.to_numpy() - np.array(self.centre)) / np.array(self.scale)  # much faster than frames
        return type(raw)(values, index=raw.index, columns=raw.columns)

    @property
    def rules(self) -> dict[str, str]:
        """Return the rules for new rows, by name."""
        return {name: getattr(self, name) for name in NEW_ROW_RULES}

    def with_rules(self, **rules: str) -> "Encoding":
        """Return the encoding with other rules for new rows. Raises a FormulaError for unknown ones."""
        for name, rule in rules.items():
            known = NEW_ROW_RULES[name]
            if rule not in known:
                raise FormulaError(f"{name} must be one of {list(known)}; got {rule!r}.")
        return replace(self, **rules)  # type: ignore[arg-type]

    def _with_indicators(self, raw: "pandas.DataFrame", selected: "pandas.DataFrame") -> "pandas.DataFrame":
        """Add a column of zeros and ones for each column of numbers that had missing values in the fit."""
        return raw.assign(**{missing_name(name): selected[name].isna().astype(float) for name in self.indicators})

    @property
    def indicators(self) -> list[str]:
        """Return the columns of numbers whose missing values are marked by a column of X."""
        if self.missing != "indicator":
            return []
        return [name for name in self.means if missing_name(name) in self.names]

    @property
    def fills(self) -> bool:
        """Return whether rows with missing values can be predicted."""
        return self.missing not in ("error", "drop")

    @property
    def missing_treatment(self) -> str:
        """Describe what was done about missing values."""
        return {
            "mean": "filled in with means and most common levels",
            "indicator": "filled in, and marked by columns and levels of their own",
            "multiple": f"drawn {self.imputations} times, given all other columns",
        }.get(self.missing, "")

    # --- missing values that are drawn ---

    def coded(self, selected: "pandas.DataFrame") -> CodedColumns:
        """Return the raw columns as numbers and codes of levels. A column that is used as both is a category."""
        numbers = {name: as_numbers(selected[name]) for name in self.inputs if name not in self.levels}
        codes = {name: as_levels(selected[name], levels).codes for name, levels in self.levels.items()}
        return CodedColumns(numbers, codes, {name: len(levels) for name, levels in self.levels.items()})

    def raw_columns(self, coded: CodedColumns, index: Any) -> "pandas.DataFrame":
        """Invert `coded`."""
        import pandas

        levels = {name: decoded_levels(codes, self.levels[name]) for name, codes in coded.codes.items()}
        return pandas.DataFrame(coded.numbers | levels, index=index)[self.inputs]

    def _drawn_designs(self, selected: "pandas.DataFrame") -> np.ndarray:
        """Return draws of X for rows with missing values: rows × draws × columns.

        Numbers inside functions and interactions stay in the range of the fit, where a logarithm or a spline is known.
        """
        assert self.imputation is not None
        drawn = self.imputation.draws(self.coded(selected))
        for j, name in enumerate(drawn.numbers):
            if name not in self.parsed.plain:
                missing = np.repeat(selected[name].isna().to_numpy(), DRAWS)
                within = drawn.numbers[name].clip(self.imputation.low[j], self.imputation.high[j])
                drawn.numbers[name] = np.where(missing, within, drawn.numbers[name])
        raw = self.raw_columns(drawn, np.repeat(selected.index.to_numpy(), DRAWS))
        X = self._scaled(self._design(raw, self.transforms)).to_numpy()
        return X.reshape(len(selected), DRAWS, -1)

    def complete(self, data: Any) -> np.ndarray:
        """Return which rows have no missing value in the columns of the formula."""
        return ~self._select(data).isna().to_numpy().any(1)

    @property
    def inputs(self) -> list[str]:
        """Return the columns that the formula reads, without the target."""
        return self.columns[1:]

    @property
    def raw_inputs(self) -> list[str]:
        """Return the columns that a model of this formula needs: its inputs, and those of groups."""
        return list(dict.fromkeys([*self.inputs, *(self.grouping or ())]))

    @property
    def units(self) -> dict[str, str]:
        """Describe, for each column of X, the change in raw units to which its coefficient refers."""
        return {name: self._unit(name, *at) for name, *at in zip(self.names, self.centre, self.scale, strict=True)}

    @property
    def splines(self) -> set[str]:
        """Return the columns inside bs(), which has no value beyond the range of the fit."""
        calls = [factor for term in self._terms() for factor in term if "bs(" in factor]
        return {column for call in calls for column in self._columns_in(call)}

    @property
    def date_functions(self) -> dict[str, set[str]]:
        """Return the columns of dates, each with the functions that the formula applies to it."""
        rest = self.parsed.rest
        return {
            column: set(re.findall(rf"\b(\w+)\({name}\)", rest))
            for name, column in self.parsed.variables.items()
            if name[0] == "d"
        }

    @property
    def seen_calendar(self) -> list[tuple[str, str, list[int]]]:
        """Return the calls of month() and weekday(): function, column of dates, and the places seen in the fit."""
        calls = calendar_calls(self.parsed.rest)
        return [
            (function, self.parsed.variables[call[len(function) + 1 : -1]], self.transforms[call][SEEN])
            for call, function in calls
        ]

    @property
    def calendar_levels(self) -> dict[str, list[str]]:
        """Return the months and days of the week that the fit has seen, by call such as month(seen)."""
        return {
            f"{function}({column})": [CALENDAR[function][0][k] for k in seen]
            for function, column, seen in self.seen_calendar
        }

    def new_dates(self, name: str, days: np.ndarray) -> dict[str, np.ndarray]:
        """Return, by function, which dates of a column lie in a month or on a weekday that the fit has not seen."""
        known, found = ~np.isnan(days), {}
        for function, column, seen in self.seen_calendar:
            if column == name:
                places = calendar_places_of(function, np.where(known, days, 0.0))
                found[function] = known & ~np.isin(places, seen)
        return {function: new for function, new in found.items() if new.any()}

    @property
    def entangled(self) -> list[str]:
        """Return the columns whose effect is not described by a single coefficient.

        They are in an interaction, in several terms, or in a function that makes several columns.
        """
        mentions, found = Counter[str](), set[str]()
        for term in self._terms():
            columns = {column for factor in term for column in self._columns_in(factor)}
            mentions.update(columns)
            if len(columns) > 1 or any(name in factor for factor in term for name in ("bs(", "poly(")):
                found |= columns
        return [name for name in self.inputs if name in found or mentions[name] > 1]

    def _terms(self) -> list[list[str]]:
        """Return the terms other than plain columns, each as its factors, in internal variables."""
        if self.parsed.rest == "1":
            return []
        from formulaic import Formula

        return [[str(factor) for factor in term.factors] for term in Formula(self.parsed.rest)]

    def _columns_in(self, factor: str) -> list[str]:
        return [self.parsed.variables[name] for name in re.findall(r"\b[ncd]\d+_", factor)]

    def _unit(self, name: str, centre: float, scale: float) -> str:
        if (centre, scale) != (0.0, 1.0):
            days = " days" if re.fullmatch(r"days\(.+\)", name) else ""
            return f"sd, {number_text(float(f'{scale:.3g}'))}{days}"
        for call, levels in self.calendar_levels.items():
            if name.startswith(f"{call}[T.") and ":" not in name:
                return f"vs {levels[0]}"
        level = re.fullmatch(r"(?:C\()?(.+?)\)?\[T\.(.*)\]", name)
        if level and level[1] in self.levels and ":" not in name:
            return f"vs {self.levels[level[1]][0]}"
        return "1"

    @cached_property
    def parsed(self) -> ParsedFormula:
        """The parsed formula."""
        every = [*self.columns, *(self.grouping or ())]
        return parse_formula(self.formula, every, [name for name in self.levels if name not in self.means])

    def _select(self, data: Any) -> "pandas.DataFrame":
        """Return the columns that the formula reads, with the rule for new levels applied."""
        return self._known(self._given(data))

    def _given(self, data: Any) -> "pandas.DataFrame":
        """Return the columns that the formula reads, with dates as days."""
        return with_days(self._raw(data)[self.inputs], self.parsed.dates)

    def _raw(self, data: Any) -> "pandas.DataFrame":
        """Return the columns that the formula reads and those of groups, unchanged."""
        frame = as_frame(data)
        absent = [name for name in self.raw_inputs if name not in frame.columns]
        if absent:
            raise FormulaError(
                f"the data must have the columns of the fit; got none named {listed(absent)}. "
                f"It has {listed(frame.columns)}."
            )
        return frame[self.raw_inputs]

    def _known(self, frame: "pandas.DataFrame") -> "pandas.DataFrame":
        """Apply the rule for levels, months and days of the week that were not in the training data.

        If new levels are an error, they are found later, when they are encoded.
        """
        frame = frame.assign(**{name: self.known_dates(frame[name]) for name in self.parsed.dates})
        if self.unseen == "error":
            return frame
        return frame.assign(**{name: self.known_levels(frame[name]) for name in self.levels})

    def known_dates(self, column: "pandas.Series[Any]") -> "pandas.Series[Any]":
        """Return days. Those in new months raise an error, become missing, or stay and count as the first month."""
        for function, new in self.new_dates(str(column.name), column.to_numpy()).items():
            if self.unseen == "error":
                row = int(np.flatnonzero(new)[0])
                rule = f"{function}({column.name}) must be among those of the fit"
                got = f"{calendar_name(function, column.iat[row])} ({calendar_days(column.iat[row])})"
                raise RowError(rule, got, column.index[row], "Fit again with such rows, or leave them out.")
            if self.unseen == "missing":
                column = column.mask(new)
        return column

    def known_levels(self, column: "pandas.Series[Any]") -> "pandas.Series[Any]":
        """Return the column with levels that were not in the training data set to missing or to the reference level."""
        levels = self.levels[str(column.name)]
        new = (level_codes(column, levels) < 0) & column.notna().to_numpy()
        if not new.any():
            return column
        return column.astype(object).mask(new, None if self.unseen == "missing" else levels[0])

    def _filled(self, frame: "pandas.DataFrame") -> "pandas.DataFrame":
        counts = frame.isna().sum()
        holes = {str(name): int(number) for name, number in counts.items() if number}
        if not holes:
            return frame
        if not self.fills:
            name = next(iter(holes))
            row = frame.index[int(np.flatnonzero(frame[name].isna())[0])]
            got = f"{counted(holes)}, the first"
            raise RowError(
                "rows must have no missing values", got, row, "Leave them out, or fit with missing='multiple'."
            )
        return self._with_means(frame, holes)

    def _with_means(self, frame: "pandas.DataFrame", holes: Iterable[str]) -> "pandas.DataFrame":
        """Fill in means and most common levels in the columns that have holes."""
        values = {name: self.common.get(name, self.means.get(name)) for name in holes}
        # not every type can hold the value: pandas' Int64 has no mean, its categories no new level
        able = {name: as_numbers(frame[name]) if name in self.means else frame[name].astype(object) for name in holes}
        return frame.assign(**able).fillna(values)

    def _design(self, frame: "pandas.DataFrame", state: dict[str, Any]) -> "pandas.DataFrame":
        """Return the columns of X before they are standardised. `state` is read, or learned if it is empty."""
        design = self._evaluated(frame, state)
        if self.beyond == "clamp" and (bad := undefined_cells(design).any(1)).any():
            design.loc[bad] = self._evaluated(frame[bad], state, clamp=True).to_numpy()
        check_finite_design(design)
        return design

    def _evaluated(self, frame: "pandas.DataFrame", state: dict[str, Any], clamp: bool = False) -> "pandas.DataFrame":
        """Return the raw columns of X, with NaN where undefined; `clamp` moves numbers to the end of a spline."""
        import pandas

        plain, variables = self.parsed.plain, self.parsed.variables
        parts = {name: as_numbers(frame[name]) for name in plain}
        if variables:
            given = {
                name: as_levels(frame[column], self.levels[column]) if name[0] == "c" else as_numbers(frame[column])
                for name, column in variables.items()
            }
            if LONE_CATEGORIES.fullmatch(self.parsed.rest):
                found = {name: values for variable in given for name, values in indicators(variable, given[variable])}
            else:
                found = evaluate_terms(self.parsed.rest, pandas.DataFrame(given, index=frame.index), state, clamp)
            parts |= {self._name(name): values for name, values in found.items()}
        values = np.column_stack([*parts.values()]) if parts else np.empty((len(frame), 0))
        return pandas.DataFrame(values, index=frame.index, columns=[*parts], dtype=float)

    @property
    def has_functions(self) -> bool:
        """Whether the formula has functions such as `log`, which may have no value for some numbers."""
        return "(" in self.parsed.rest

    def _name(self, ours: str) -> str:
        """Replace internal variables in the name of a column by the names in the data."""
        return re.sub(r"\b[ncd](\d+)_", lambda found: self.columns[int(found[1])], ours)

    def to_state(self) -> dict[str, Any]:
        """Return everything as JSON."""
        unset = {
            one.name for one in fields(self) if one.name in ADDED_FIELDS and getattr(self, one.name) == one.default
        }
        plain = replace(self, imputation=None)
        state = {name: value for name, value in asdict(plain).items() if name not in {*unset, "imputation"}}
        return state | {"transforms": encode_transforms(self.transforms)}

    @classmethod
    def from_state(cls, state: Any, imputation: dict[str, np.ndarray] | None = None) -> "Encoding":
        """Invert `to_state`. The formula is checked again, so nothing in a file can run as a program.

        `imputation` holds the arrays of the imputation, if there is one.
        """
        ENCODING.check(state, "formula")
        decoded = {
            "transforms": decode_transforms(state["transforms"]),
            "training": state.get("training") and TrainingData.from_state(state["training"]),
            "imputation": Imputation(**imputation) if imputation else None,
        }
        try:
            encoding = with_whole_calendar(cls(**state | decoded))
            check_encoding(encoding)
        except ValueError as error:
            raise StorageError(
                f"the model's formula must be one that viper wrote; got {str(error).rstrip('.')}."
            ) from None
        return encoding


def with_whole_calendar(encoding: Encoding) -> Encoding:
    """Complete the encoding of a file from before months were learned: all months and weekdays count as seen."""
    old = {
        call: {SEEN: list(range(len(CALENDAR[function][0])))}
        for call, function in calendar_calls(encoding.parsed.rest)
        if call not in encoding.transforms
    }
    return replace(encoding, transforms=encoding.transforms | old) if old else encoding


class ImputedRows(NamedTuple):
    """Rows of X whose missing values were drawn several times: the mean of the draws, and their spread."""

    design: "pandas.DataFrame"
    residual: np.ndarray  # rows, or rows × classes; 0 for rows without missing values


def decoded_levels(codes: np.ndarray, levels: list[Any]) -> np.ndarray:
    """Return the level of each code, and None for -1."""
    there = np.array(levels) if len({type(level) for level in levels}) == 1 else np.array(levels, dtype=object)
    return there[codes] if (codes >= 0).all() else np.array([*levels, None], dtype=object)[codes]


def missing_name(name: str) -> str:
    """Return the name of the column of X that marks missing values of a column of numbers."""
    return f"{name} is missing"


# --- formulaic ---


@cache
def formula_functions(clamp: bool) -> dict[str, Any]:
    """Return functions that formulaic lacks, and its splines with NaN, or their end, beyond the range of the fit.

    `check_finite_design` reports the NaN.
    """
    from formulaic.transforms import TRANSFORMS
    from formulaic.utils.stateful_transforms import stateful_transform

    def bs(x: Any, df: int | None = None, degree: int = 3, _state: Any = None) -> Any:
        return TRANSFORMS["bs"](x, df=df, degree=degree, extrapolation="clip" if clamp else "na", _state=_state)

    def month(x: Any, _state: Any = None) -> Any:
        return calendar_category("month", x, _state)

    def weekday(x: Any, _state: Any = None) -> Any:
        return calendar_category("weekday", x, _state)

    of_numbers = {"log1p": np.log1p, "sqrt": np.sqrt, "abs": np.abs, "bs": stateful_transform(bs)}
    of_dates = {"month": stateful_transform(month), "weekday": stateful_transform(weekday)}
    return of_numbers | {"days": np.asarray, "year": year_of} | of_dates


# function -> its levels, and the place of each day since 1970-01-01, a Thursday, among them
CALENDAR: dict[str, tuple[tuple[str, ...], Callable[[np.ndarray], np.ndarray]]] = {
    "month": (MONTHS, lambda dates: dates.astype("datetime64[M]").astype(np.int64) % 12),
    "weekday": (WEEKDAYS, lambda dates: (dates.astype(np.int64) + 3) % 7),
}


def calendar_calls(rest: str) -> list[tuple[str, str]]:
    """Return the calls of month() and weekday() in a formula, each with its function."""
    return sorted(set(re.findall(r"\b((month|weekday)\(d\d+_\))", rest)))


def check_calendar_state(function: str, state: Any) -> None:
    """Raise a ValueError unless these are places in the year or the week, in order."""
    seen: Any = state.get(SEEN) if isinstance(state, dict) else None
    whole = isinstance(seen, list) and bool(seen) and all(type(k) is int for k in seen)
    if not whole or seen != sorted({*seen} & {*range(len(CALENDAR[function][0]))}):
        raise ValueError(f"{function}() of other {function}s")


def calendar_name(function: str, day: float) -> str:
    """Return the month or the day of the week of a date."""
    return CALENDAR[function][0][int(calendar_places_of(function, day))]


def year_of(days: Any) -> np.ndarray:
    return calendar_days(days).astype("datetime64[Y]").astype(float) + 1970.0


def calendar_places_of(function: str, days: Any) -> np.ndarray:
    """Return the month of each date as 0 to 11, or the day of the week as 0 to 6."""
    return CALENDAR[function][1](calendar_days(days))


def calendar_category(function: str, days: Any, state: dict[str, Any]) -> "pandas.Series[Any]":
    """Return months or days of the week as a category of those that the fit has seen; others count as the first."""
    import pandas

    places = calendar_places_of(function, days)
    seen = state.setdefault(SEEN, np.unique(places).tolist())
    codes = np.array([seen.index(k) if k in seen else 0 for k in range(len(CALENDAR[function][0]))])
    return pandas.Series(pandas.Categorical.from_codes(codes[places], [CALENDAR[function][0][k] for k in seen]))


def indicators(variable: str, category: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a column of zeros and ones for each level but the first, as formulaic would: a category by itself."""
    for k, level in enumerate(category.categories[1:], 1):
        yield f"{variable}[T.{level}]", (category.codes == k).astype(np.float64)


def evaluate_terms(
    rest: str, frame: "pandas.DataFrame", state: dict[str, Any], clamp: bool = False
) -> dict[str, np.ndarray]:
    """Return the columns of the terms in `rest`, without the intercept.

    The `state` of functions is read if they have learned one, and otherwise learned and added.
    """
    from formulaic import Formula, ModelSpec

    if not len(frame):  # formulaic needs a row to determine the names
        return {name: column[:0] for name, column in evaluate_terms(rest, placeholder_row(frame), state).items()}
    with formula_errors(), np.errstate(all="ignore"):
        spec = ModelSpec(formula=Formula(rest), transform_state=state, na_action="ignore", output="pandas")
        matrix = spec.get_model_matrix(frame.reset_index(drop=True), context=formula_functions(clamp))
    state.update(matrix.model_spec.transform_state)
    return {str(name): matrix[name].to_numpy(dtype=float) for name in matrix if name != "Intercept"}


def placeholder_row(frame: "pandas.DataFrame") -> "pandas.DataFrame":
    """Return one row of first levels and ones, which has the same columns of X as any other."""
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
    except (FormulaicError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
        reason = str(error.__cause__ or error).splitlines()[0][:200]
        raise FormulaError(f"the formula must have a value for every row; got: {reason}") from None


def formula_has_intercept(rest: str) -> bool:
    from formulaic import Formula

    return rest == "1" or any(str(term) == "1" for term in Formula(rest))


def undefined_cells(design: "pandas.DataFrame") -> np.ndarray:
    """Return which cells are not finite, as a mask."""
    return ~np.isfinite(design.to_numpy())


def check_finite_design(design: "pandas.DataFrame") -> None:
    bad = undefined_cells(design)
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


VERDICT = {"reliable": BOOLEAN, "close": BOOLEAN, "verdict": TEXT}
RECORD = Fields(
    {},
    {
        "seconds": NUMBER,
        "scores": or_none(Entries(or_none(NUMBER), {"how": TEXT}, required=("how",))),
        "diagnosis": or_none(Entries(or_none(NUMBER), VERDICT, required=("k_hat", "reliable", "verdict"))),
        "weighting": Fields({}, {"weights": TEXT, "groups": TEXT}),  # names of columns
        # files of version 0.1; now in `training`
        "data": Fields(
            {
                "file": TEXT,
                "rows": WHOLE,
                "rows_used": WHOLE,
                "class_counts": Entries(WHOLE),
                "missing": Entries(WHOLE),
            },
            {"left_out": Entries(TEXT)},
        ),
    },
)
ENCODING = fields_of(
    Encoding,
    missing=one_of(*MISSING_RULES),
    unseen=one_of(*UNSEEN_RULES),
    beyond=one_of(*BEYOND_RULES),
    levels=Entries(Items(LABEL)),
    common=Entries(LABEL),
    transforms=Entries(PLAIN),
    scale=Items(ABOVE_ZERO),
    positive=or_none(LABEL),
    imputation=NOTHING,  # kept in tensors
    record=RECORD,
)


def check_encoding(encoding: Encoding) -> None:
    """Raise a ValueError unless the parts of an encoding that was read from a file are consistent."""
    parsed = encoding.parsed
    used, learned = {*parsed.plain, *parsed.variables.values()}, {*encoding.means, *encoding.levels}
    if parsed.grouping != (encoding.grouping or []):
        raise ValueError("groups that it does not name")
    if parsed.target != encoding.target or not used == set(encoding.inputs) == learned:
        raise ValueError("columns that it does not name")
    if not len(encoding.names) == len(encoding.centre) == len(encoding.scale):
        raise ValueError("names and scales that do not match")
    for call, function in calendar_calls(parsed.rest):
        check_calendar_state(function, encoding.transforms[call])
    for name, levels in encoding.levels.items():
        if not levels or len(set(levels)) < len(levels) or encoding.common.get(name) not in levels:
            raise ValueError(f"levels that are not distinct, or not those of {shown(name)}")
        if len({isinstance(level, str) for level in levels}) > 1:
            raise ValueError(f"levels of {shown(name)} that are text and numbers")
    if encoding.training is not None:
        check_training_data(encoding.training, encoding.levels)
        if set(encoding.training.columns) != used:
            raise ValueError("training data of other columns")
    if (encoding.imputation is not None) != (encoding.missing == "multiple"):
        raise ValueError("an imputation where there is none, or none where there is one")
    if encoding.imputation is not None:
        numbers = sum(name not in encoding.levels for name in encoding.inputs)
        width = numbers + sum(len(levels) - 1 for levels in encoding.levels.values())
        encoding.imputation.check(width, numbers)
