"""What a formula learned from a table, as plain data: stored with the model, applied to other rows.

frame → checked columns → missing values by rule → formulaic → standardised or not → X
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from viper.errors import FormulaError, RowError, counted, listed
from viper.formula.columns import as_frame, as_levels, as_numbers
from viper.formula.grammar import ParsedFormula, parse_formula

if TYPE_CHECKING:
    import pandas

MISSING_RULES = ("error", "drop", "mean")


@dataclass(frozen=True)
class Encoding:
    """What a formula learned from the data: how to make the columns of X, also from other rows.

    Attributes
    ----------
    formula : str
        With `.` spelled out.
    target : str
    columns : list of str
        The columns it reads, the target first.
    missing : {"error", "drop", "mean"}
        What becomes of rows with missing values.
    means, levels, common : dict
        Of columns used as numbers their means; of columns used as categories their levels, the reference first, and
        the most common one.
    transforms : dict
        State of functions such as `center`, by call.
    names : list of str
        Of the columns of X.
    intercept : bool
    centre, scale : list of float
        X is (raw - centre) / scale; centre 0 and scale 1 where it is left as it is.
    standardize : bool
        Whether that was asked for.
    counts : dict
        Missing values of each column in the data it was learned from.
    record : dict
        JSON that travels with the model: what the command line reports of the fit.
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

    # --- use ---

    def encode(self, data: Any) -> "pandas.DataFrame":
        """The columns of X for rows of raw columns; other columns are ignored.

        Raises
        ------
        FormulaError
            If a column is missing or of another kind than in the fit, a level is new, a value is missing (unless the
            rule is "mean") or a function has no finite value.
        """
        frame = self._filled(self._select(data))
        raw = self._design(frame, self.transforms)
        if list(raw) != self.names:
            raise FormulaError(f"the formula must give the columns {self.names}; got {list(raw)}. Fit it again.")
        return (raw - np.array(self.centre)) / np.array(self.scale)

    def complete(self, data: Any) -> np.ndarray:
        """Which rows have no missing value in the columns of the formula."""
        return ~self._select(data).isna().to_numpy().any(1)

    @property
    def inputs(self) -> list[str]:
        """The columns it reads, without the target."""
        return self.columns[1:]

    @property
    def units(self) -> dict[str, str]:
        """Of each column of X, in words: what the change by one is that a coefficient speaks of."""
        return {name: self._unit(name, *at) for name, *at in zip(self.names, self.centre, self.scale, strict=True)}

    def _unit(self, name: str, centre: float, scale: float) -> str:
        if (centre, scale) != (0.0, 1.0):
            return f"sd, {scale:.3g}"
        level = re.fullmatch(r"(?:C\()?(.+?)\)?\[T\.(.*)\]", name)
        if level and level[1] in self.levels and ":" not in name:
            return f"vs {self.levels[level[1]][0]}"
        return "1"

    # --- how ---

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
        return frame[self.inputs]

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
        return frame.fillna({name: self.means.get(name, self.common.get(name)) for name in holes})

    def _design(self, frame: "pandas.DataFrame", state: dict[str, Any]) -> "pandas.DataFrame":
        """The columns of X before they are standardised; `state` is read, or learned if empty."""
        import pandas

        plain, variables = self._parsed.plain, self._parsed.variables
        parts = {name: as_numbers(frame[name]) for name in plain}
        if variables:
            given = pandas.DataFrame(
                {
                    name: as_levels(frame[column], self.levels[column])
                    if name.startswith("c")
                    else as_numbers(frame[column])
                    for name, column in variables.items()
                },
                index=frame.index,
            )
            found = evaluate_terms(self._parsed.rest, given, state)
            parts |= {self._name(name): values for name, values in found.items()}
        design = pandas.DataFrame(parts, index=frame.index, dtype=float)
        check_finite_design(design)
        return design

    def _name(self, ours: str) -> str:
        """A column's name with the names of the data in it."""
        return re.sub(r"\b[nc](\d+)_", lambda found: self.columns[int(found[1])], ours)

    # --- storage ---

    def to_state(self) -> dict[str, Any]:
        """Everything as JSON."""
        return asdict(self) | {"transforms": encode_transforms(self.transforms)}

    @classmethod
    def from_state(cls, state: Any) -> "Encoding":
        """What `to_state` gave; the formula is checked again, so that nothing in it can run as a program."""
        from viper.errors import StorageError  # late: it needs torch, and learning a formula does not

        try:
            encoding = cls(**state)
            check_encoding(encoding)
            object.__setattr__(encoding, "transforms", decode_transforms(encoding.transforms))
            parsed = encoding._parsed
            used = {*parsed.plain, *parsed.variables.values()}
            if parsed.target != encoding.target or used != set(encoding.inputs) or not used <= encoding.known:
                raise ValueError("other columns than it names")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise StorageError(f"the model's formula must be one that viper wrote; got {error}") from None
        return encoding

    @property
    def known(self) -> set[str]:
        return {*self.means, *self.levels}


# --- formulaic ---


@cache
def formula_functions() -> dict[str, Any]:
    """Functions that formulaic does not bring, and its splines with NaN beyond the range of the fit, to be reported."""
    from formulaic.transforms import TRANSFORMS
    from formulaic.utils.stateful_transforms import stateful_transform

    def bs(x: Any, df: int | None = None, degree: int = 3, _state: Any = None) -> Any:
        return TRANSFORMS["bs"](x, df=df, degree=degree, extrapolation="na", _state=_state)

    return {"log1p": np.log1p, "sqrt": np.sqrt, "abs": np.abs, "bs": stateful_transform(bs)}


def evaluate_terms(rest: str, frame: "pandas.DataFrame", state: dict[str, Any]) -> dict[str, np.ndarray]:
    """Columns of the terms in `rest`, without the intercept; `state` of the functions is read, and written if new."""
    from formulaic import Formula, ModelSpec

    if not len(frame):  # formulaic wants rows; the names are those of any
        return {name: column[:0] for name, column in evaluate_terms(rest, placeholder_row(frame), state).items()}
    spec = ModelSpec(formula=Formula(rest), transform_state=state, na_action="ignore", output="pandas")
    with formula_errors(rest), np.errstate(all="ignore"):
        matrix = spec.get_model_matrix(frame.reset_index(drop=True), context=formula_functions())
    state.update(matrix.model_spec.transform_state)
    return {str(name): matrix[name].to_numpy(dtype=float) for name in matrix if name != "Intercept"}


def placeholder_row(frame: "pandas.DataFrame") -> "pandas.DataFrame":
    """One row of first levels and ones, for its columns' names."""
    import pandas

    return pandas.DataFrame(
        {
            name: pandas.Categorical.from_codes([0], dtype=column.dtype)
            if isinstance(column.dtype, pandas.CategoricalDtype)
            else [1.0]
            for name, column in frame.items()
        }
    )


@contextmanager
def formula_errors(rest: str) -> Iterator[None]:
    """What formulaic cannot evaluate, as one error of ours."""
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
        raise RowError(
            f"{design.columns[column]} must be finite",
            f"{design.iat[row, column]}",
            design.index[row],
            "Logarithms and roots need positive numbers, splines those in the range of the fit.",
        )


# --- state as JSON ---


def python_value(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def encode_transforms(state: Any) -> Any:
    """The state of formulaic's functions in JSON's words."""
    if isinstance(state, dict):
        return {str(name): encode_transforms(value) for name, value in state.items()}
    if isinstance(state, list | tuple | np.ndarray):
        return [encode_transforms(value) for value in state] if np.ndim(state) else np.asarray(state).item()
    if isinstance(state, np.generic | float | int | bool) or state is None:
        return python_value(state)
    raise FormulaError(f"functions in a formula must learn only numbers; got {type(state).__name__} in {state!r:.60}.")


def decode_transforms(state: Any) -> Any:
    """`encode_transforms` undone: keys that were numbers are numbers again."""
    if isinstance(state, dict):
        return {int(name) if str(name).isdecimal() else name: decode_transforms(value) for name, value in state.items()}
    return [decode_transforms(value) for value in state] if isinstance(state, list) else state


def check_encoding(encoding: Encoding) -> None:
    """The types that `learn` gives, whatever a file says."""
    kinds: dict[type, tuple[str, ...]] = {
        str: ("formula", "target", "missing"),
        list: ("columns", "names", "centre", "scale"),
        bool: ("intercept", "standardize"),
        dict: ("means", "levels", "common", "transforms", "counts", "record"),
    }
    for kind, names in kinds.items():
        for name in names:
            if type(getattr(encoding, name)) is not kind:
                raise TypeError(f"{name} that is no {kind.__name__}")
    texts = [*encoding.columns, *encoding.names, *encoding.means, *encoding.levels]
    numbers = [*encoding.centre, *encoding.scale, *encoding.means.values()]
    if not all(isinstance(text, str) for text in texts) or encoding.missing not in MISSING_RULES:
        raise TypeError("names that are no text")
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
        raise TypeError("numbers that are none")
    if not len(encoding.names) == len(encoding.centre) == len(encoding.scale):
        raise TypeError("names and scales that do not match")
    if not all(isinstance(levels, list) and levels for levels in encoding.levels.values()):
        raise TypeError("levels that are no list")
