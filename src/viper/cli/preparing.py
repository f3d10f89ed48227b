"""From a file to rows: with a formula for a new model, or with the columns and classes that a fitted one needs."""

import difflib
import re
import shlex
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from viper.data.csv_text import spelled_numbers
from viper.data.excel import sheet_names
from viper.data.table_file import TableFile, check_numbers
from viper.errors import FileError, FormulaError, instead, listed
from viper.formula.columns import (
    check_column_count,
    has_row_numbers,
    is_text,
    left_out_columns,
    target_without_blanks,
    with_days,
    without_blanks,
)
from viper.formula.grammar import GroupTerm, quote_column, split_groups, split_sides, tokenize

if TYPE_CHECKING:
    import numpy as np
    import pandas

    from viper.formula.learn import Learned

MOST_ABSENT_SHOWN = 8  # missing columns that a message lists
MOST_ALIKE_SHOWN = 3  # groups of levels that differ in capitals only, in a note
MOST_CLASSES = 20  # in a target,
MOST_CLASS_SHARE = 0.05  # or this many per row, if that is more
BY_DROP = "by --drop"  # the reason recorded for a column that the user left out

# --- for a model to be fitted ---


class RowCounts(NamedTuple):
    """How much each row counts, which rows belong together, and whether covariances allow for that."""

    weight: "np.ndarray | None" = None
    groups: "np.ndarray | None" = None
    robust: bool = False

    def part(self, rows: "np.ndarray") -> "RowCounts":
        """Return the counts of some of the rows."""
        weight, groups = (None if vector is None else vector[rows] for vector in (self.weight, self.groups))
        return RowCounts(weight, groups, self.robust)

    def of_fit(self, learned: "Learned") -> "RowCounts":
        """Return the counts of the rows that were fitted. With robust covariances, weights are one on average."""
        used = self.part(learned.kept)
        return (
            used if used.weight is None or not used.robust else used._replace(weight=used.weight / used.weight.mean())
        )

    def completed(self, model: Any) -> Any:
        """Return the model that was fitted to these rows, with robust covariances if they were asked for."""
        return model.robust(groups=self.groups) if self.robust else model


EACH_ROW = RowCounts()  # every row counts once


class PreparedRows(NamedTuple):
    """Rows, the formula to fit, notes for the user, the reasons why columns were left out, and the rows' counts."""

    frame: "pandas.DataFrame"
    formula: str
    notes: list[str]
    left_out: dict[str, str]
    counts: RowCounts = EACH_ROW

    @property
    def group_terms(self) -> tuple[GroupTerm, ...]:
        """Return the formula's terms such as (1 | ward)."""
        return split_groups(split_sides(tokenize(self.formula))[1])[1]


def prepare_rows(
    table: TableFile,
    target: str | None,
    formula: str | None,
    drop: list[str] | None,
    category: list[str] | None,
    missing: str,
    weights: str | None = None,
    groups: str | None = None,
    robust: bool = False,
) -> PreparedRows:
    """Read a table and decide on the formula: the given one, or the sum of all usable columns.

    The columns `weights` and `groups` are not features unless the formula names them.
    """
    dropped, categories = tuple(drop or ()), tuple(category or ())
    if formula is not None:
        left = split_sides(tokenize(formula))[0][0][1]
        if target not in (None, left):
            raise FormulaError(f"--target and the formula must agree; got {target!r} and {left!r}. Give one of them.")
        target = left
    named = (*categories, *names_in(formula or ""))
    beside = {option: name for option, name in (("--weights", weights), ("--groups", groups)) if name is not None}
    frame = table.read((*categories, *([] if groups is None or groups in named else [groups])))
    read_notes = reading_notes(table, frame)
    if target is None and table.kind().word == "libsvm":
        target = "y"
    if target is None:
        raise FileError(f"--target must name the column to predict; got none. Choose one of {listed(frame)}.")
    check_named_columns(frame, target, dropped, categories, beside)
    check_target_classes(frame, target, missing)
    counts = RowCounts(
        None if weights is None else read_weight_column(frame[weights], table),
        None if groups is None else read_group_column(frame[groups], table),
        robust,
    )
    dropped = (*dropped, *(name for name in beside.values() if name not in (*named, *dropped)))
    frame = frame.drop(columns=list(dropped))
    given = formula is not None and ("sign", ".") not in tokenize(formula)
    wanted = {*named} if given else {*frame}
    asked = [name for name in frame if name in wanted]
    check_column_count(len(asked) - 1)
    check_numbers(frame[asked], table, (target, *categories, *in_c(formula or "")))
    useless = {} if given else left_out_columns(frame, target, named, how_to_use)
    left_out = {name: why for name, why in useless.items() if name not in named}
    frame = frame.drop(columns=list(left_out))
    used = [name for name in asked if name in frame]
    notes = [*read_notes, *(f"column {name!r} is left out: {why}." for name, why in left_out.items())]
    notes += column_notes(frame, target, used, named)
    why = {name: f"given as {option}" for option, name in beside.items() if name not in (drop or ())}
    left_out = {name: why.get(name, BY_DROP) for name in dropped} | left_out
    return PreparedRows(frame, formula or all_columns(frame, target, categories, left_out), notes, left_out, counts)


def read_weight_column(column: "pandas.Series[Any]", table: TableFile) -> "np.ndarray":
    """Return the weights; raises FileError, with the first faulty line, unless all are numbers of at least 0."""
    import numpy as np

    values = spelled_numbers(column)
    bad = ~(np.isfinite(values) & (values >= 0.0))
    if bad.any():
        raise FileError(
            f"--weights must be a column of numbers of at least 0; got {first_cell(column, bad, table)}. Correct the "
            "weights, or leave these rows out of the table."
        )
    if not values.any():
        raise FileError(f"--weights must be positive in some row; got only zeros in {column.name!r}.")
    return values


def read_group_column(column: "pandas.Series[Any]", table: TableFile) -> "np.ndarray":
    """Return the group of each row as a number; raises FileError if one has none."""
    import pandas

    codes, names = pandas.factorize(without_blanks(column))
    if (codes < 0).any():
        raise FileError(
            f"--groups must say which group each row belongs to; got {first_cell(column, codes < 0, table)}. Give each "
            "such row a group of its own."
        )
    if len(names) < 2:
        raise FileError(f"--groups must have at least two groups; got {len(names)} in {column.name!r}.")
    return codes


def first_cell(column: "pandas.Series[Any]", chosen: "np.ndarray", table: TableFile) -> str:
    """Describe the first of the chosen cells and its place, and say how many more there are."""
    row, more = int(chosen.argmax()), int(chosen.sum()) - 1
    got = "a missing value" if column.isna().iloc[row] else repr(str(column.iloc[row]))
    others = "" if not more else f", and {more:,} more such cell{'s' * (more > 1)}"
    return f"{got} in column {column.name!r}, {table.place(row)}{others}"


def how_to_use(name: str) -> str:
    return f"Pass --drop {name!r}, or --category {name!r} to use it anyway."


def reading_notes(table: TableFile, frame: "pandas.DataFrame") -> list[str]:
    """Return notes about how a text file or sheet was read, where that is not obvious."""
    from viper.data.csv_text import decimal_of, line_break_in, row_number_column

    kind = table.kind().word
    if kind not in ("csv", "excel"):
        return []
    notes = []
    if (first := row_number_column(table.text)) is not None:
        named = f"named {first!r}" if first.strip() else "without a name"
        notes.append(f"the first column, {named}, is left out: it looks like row numbers.")
    if table.decimal is None and kind == "csv" and decimal_of(table) == ",":
        notes.append("commas are read as decimal points; pass --decimal . if they are not.")
    if kind == "csv" and table.multiline and (found := line_break_in(frame)) is not None:
        notes.append(
            f"some cells span lines; the first is in column {found[0]!r} and begins in {table.place(found[1])}."
        )
    if kind == "excel" and table.sheet is None and len(names := sheet_names(table.source)) > 1:
        notes.append(f"sheet {names[0]!r} is read, the first of {len(names)}; pass --sheet for another.")
    return notes


def column_notes(frame: "pandas.DataFrame", target: str, used: Iterable[str], named: Collection[str]) -> list[str]:
    """Return notes about columns that are used, but perhaps not as the user meant."""
    notes = []
    for name, column in frame[list(used)].items():
        trimmed = column if column.dtype.kind in "iuf" else without_blanks(column)
        if trimmed is not column and (name != target or column.nunique() > trimmed.nunique()):
            cells = int((trimmed.astype(object) != column.astype(object))[column.notna()].sum())
            notes.append(f"blanks around the text of column {name!r} are removed, in {cells:,} cells.")
        if alike := spelled_alike(trimmed):
            which = ", ".join(" and ".join(map(repr, group)) for group in alike[:MOST_ALIKE_SHOWN])
            more = f" and {len(alike) - MOST_ALIKE_SHOWN} more" if len(alike) > MOST_ALIKE_SHOWN else ""
            notes.append(f"column {name!r} distinguishes {which}{more}; spell them alike if they mean the same.")
        if name != target and name not in named and has_row_numbers(column):
            notes.append(
                f"column {name!r} has a different whole number in every row; "
                f"pass --drop {name!r} if it only identifies rows."
            )
    return notes


def spelled_alike(column: "pandas.Series[Any]") -> list[list[str]]:
    """Return the levels of a column of text that differ in capitals only, as groups in order."""
    groups: dict[str, list[str]] = {}
    for level in sorted({*column.dropna()}, key=str) if is_text(column) else ():
        groups.setdefault(str(level).casefold(), []).append(str(level))
    return [group for group in groups.values() if len(group) > 1]


def check_named_columns(
    frame: "pandas.DataFrame",
    target: str,
    drop: tuple[str, ...],
    category: tuple[str, ...],
    beside: dict[str, str],
) -> None:
    one_each = (("--target", (target,)), *((option, (name,)) for option, name in beside.items()))
    for option, names in (*one_each, ("--drop", drop), ("--category", category)):
        for name in names:
            check_option_column(frame, name, option)
    if target in drop:
        raise FileError(f"--drop must not remove the target; got {target!r}.")
    for option, name in beside.items():
        if name == target:
            raise FileError(f"{option} must not be the target; got {name!r} for both.")


def check_option_column(frame: "pandas.DataFrame", name: str, option: str) -> None:
    """Raise FileError, with a suggestion, if the column that an option names does not exist."""
    if name in frame.columns:
        return
    parts = [part.strip() for part in name.split(",")]
    if option != "--target" and len(parts) > 1 and set(parts) <= set(frame.columns):
        hint = f"Repeat the option for each column: {' '.join(f'{option} {shlex.quote(part)}' for part in parts)}."
    else:
        hint = instead(name, frame.columns)
    raise FileError(f"{option} must be a column of the table; got {name!r}. {hint}")


def check_target_classes(frame: "pandas.DataFrame", target: str, missing: str) -> None:
    column = target_without_blanks(frame[target])
    if missing == "error" and column.isna().any():
        raise FileError(
            f"the target must have no missing values; got {int(column.isna().sum())} in {target!r}. "
            "Pass --missing drop to leave those rows out."
        )
    known = column.dropna()
    classes = known.unique()
    shown = ", ".join(repr(getattr(value, "item", lambda v=value: v)()) for value in classes[:5])
    got = f"got {len(classes)} in {target!r}: {shown}{' …' if len(classes) > 5 else ''}"
    if len(classes) < 2:
        raise FileError(f"the target must have at least two classes; {got}. Name another column with --target.")
    measured = known.dtype.kind == "f" and len(classes) > 2 and bool((known % 1 != 0).any())
    if measured or len(classes) > max(MOST_CLASSES, len(known) * MOST_CLASS_SHARE):
        raise FileError(
            f"the target must have a few classes, with several rows each; {got}. Recode it as a question with few "
            "answers, such as above or below a limit."
        )


def names_in(formula: str) -> list[str]:
    return [text for kind, text in tokenize(formula) if kind in ("word", "quoted")]


def in_c(formula: str) -> list[str]:
    """Return the columns that the formula treats as categories by C(), and the columns of its group terms."""
    groups = split_groups(split_sides(tokenize(formula))[1])[1] if formula else ()
    return [name for term in groups for name in term.columns] + [
        name.strip("` ") for name in re.findall(r"\bC\(\s*(`[^`]*`|\w+)", formula)
    ]


def all_columns(frame: "pandas.DataFrame", target: str, category: tuple[str, ...], left_out: dict[str, str]) -> str:
    """Return a formula with all columns of the frame, those in `category` as categories."""
    terms = [
        f"C({quote_column(name)})" if name in category and not is_text(frame[name]) else quote_column(name)
        for name in frame.columns.drop(target)
    ]
    if not terms:
        got = ", ".join(f"{name!r} ({why})" for name, why in [*left_out.items()][:3]) or "no other"
        raise FileError(f"the table must have a column of use besides the target; got {got}. Add one.")
    return f"{quote_column(target)} ~ {' + '.join(terms)}"


# --- for a fitted model ---


class LabelledRows(NamedTuple):
    """Rows with their classes, to evaluate a fitted model on."""

    frame: "pandas.DataFrame"
    target: str
    number: "np.ndarray"  # the number of a row's class, from 0; -1 without a class
    known: "np.ndarray"  # whether a row has a class


def labelled_rows(model: Any, table: TableFile, target: str | None, as_text: tuple[str, ...] = ()) -> LabelledRows:
    """Read the rows of a table, some columns as text, and check that it has the model's columns and classes."""
    import numpy as np

    name = target or target_of(model)
    if getattr(model, "multilabel_", False):
        raise ValueError(
            f"--target must name one of the labels of the model, {listed(map(str, model.classes_))}; got "
            f"{'none' if target is None else repr(target)}. A report is about a single label."
        )
    if name is None:
        raise ValueError("--target must name the column with the classes; got none, and the model does not know it.")
    text = (*text_inputs(model), *as_text)
    frame = table.read((*text, name) if isinstance(model.classes_[0], str) else text)
    check_model_columns(frame, input_columns(model))
    if target is None and name not in frame.columns:
        raise FileError(
            f"the table must have the target of the model, to compare predictions with; got no {name!r}. Pass --target "
            "if its column has another name."
        )
    check_option_column(frame, name, "--target")
    if hasattr(model, "formula_"):  # dates become numbers of days, as in the model
        frame = with_days(frame, model.formula_.parsed.dates)
    column, classes = frame[name], model.classes_
    if isinstance(classes[0], str) and {*map(str.strip, classes)} == {*classes}:
        column = without_blanks(column)
        frame = frame.assign(**{name: column})
    number = np.full(len(column), -1)
    for k, label in enumerate(classes):
        number[(column == label).to_numpy(dtype=bool, na_value=False)] = k
    other = (number < 0) & column.notna().to_numpy()
    if other.any():
        row = int(other.argmax())
        raise ValueError(
            f"column {name!r} must hold the classes of the model, {list(map(str, classes))}; got "
            f"{str(column.iloc[row])!r} in {table.place(row)}. Recode it."
        )
    return LabelledRows(frame, name, number, column.notna().to_numpy())


def input_columns(model: Any) -> list[str]:
    """Return the columns of a table that a model needs, before they are encoded."""
    if hasattr(model, "formula_"):
        return model.formula_.raw_inputs
    if hasattr(model, "feature_names_in_"):
        return [str(name) for name in model.feature_names_in_]
    raise ValueError("the model must know its columns by name; got one fitted to an array. Fit it to a DataFrame.")


def target_of(model: Any) -> str | None:
    return model.formula_.target if hasattr(model, "formula_") else None


def text_inputs(model: Any) -> tuple[str, ...]:
    """Return the model's columns of text, which are read as text even if they look like numbers."""
    levels = dict(model.formula_.levels) if hasattr(model, "formula_") else {}
    for factor in getattr(model, "factors_", ()):
        joined = len(factor.term.columns) > 1  # as text
        levels |= {name: [""] if joined else factor.levels for name in factor.term.columns if name not in levels}
    return tuple(name for name, values in levels.items() if isinstance(values[0], str))


def check_model_columns(frame: "pandas.DataFrame", names: list[str]) -> None:
    """Raise ValueError, with the likely misspelt columns, if the model needs columns that are not there."""
    absent = [name for name in names if name not in frame.columns]
    if not absent:
        return
    spare = {str(name).casefold(): str(name) for name in frame.columns if name not in names}
    near = [difflib.get_close_matches(name.casefold(), spare, 1, 0.7) for name in absent[:MOST_ABSENT_SHOWN]]
    shown = [f"{name!r} ({spare[m[0]]!r}?)" if m else repr(name) for name, m in zip(absent, near, strict=False)]
    more = f" and {len(absent) - MOST_ABSENT_SHOWN} more" if len(absent) > MOST_ABSENT_SHOWN else ""
    others = f" It has {listed(spare.values())} instead." if spare else ""
    raise ValueError(
        f"the table must have the {len(names)} columns of the model; got no {', '.join(shown)}{more}.{others}"
    )
