"""From a file to rows and a formula: which columns take part, and what to say about those that do not."""

import re
from typing import TYPE_CHECKING, NamedTuple

from viper.data.table_file import TableFile, check_numbers
from viper.errors import FileError, FormulaError, instead, listed
from viper.formula.columns import is_text
from viper.formula.grammar import quote, split_sides, tokenize

if TYPE_CHECKING:
    import pandas

MOST_LEVELS = 50  # of a text column that nobody asked for by name


class Prepared(NamedTuple):
    """Rows, the formula for them, and what a person should know."""

    frame: "pandas.DataFrame"
    formula: str
    notes: list[str]
    left_out: dict[str, str]


def prepare(
    table: TableFile,
    target: str | None,
    formula: str | None,
    drop: tuple[str, ...],
    category: tuple[str, ...],
    missing: str,
) -> Prepared:
    """Read a table and settle its formula: the one given, or all columns."""
    if formula is not None:
        named = split_sides(tokenize(formula))[0][0][1]
        if target not in (None, named):
            raise FormulaError(f"--target and the formula must agree; got {target!r} and {named!r}. Give one of them.")
        target = named
    frame = table.read(category)
    if target is None and table.kind().word == "libsvm":
        target = "y"
    if target is None:
        raise FileError(f"--target must name the column to predict; got none. There are {listed(frame)}.")
    check_names(frame, target, drop, category)
    check_target(frame, target, missing)
    frame = frame.drop(columns=list(drop))
    if formula is not None:
        check_numbers(frame[mentioned(formula, frame)], table, (target, *category, *in_c(formula)))
        return Prepared(frame, formula, [], dict.fromkeys(drop, "by --drop"))
    return everything(frame, table, target, category, drop)


def check_names(frame: "pandas.DataFrame", target: str, drop: tuple[str, ...], category: tuple[str, ...]) -> None:
    check_option(frame, target, "--target")
    for option, names in (("--drop", drop), ("--category", category)):
        for name in names:
            check_option(frame, name, option)
    if target in drop:
        raise FileError(f"--drop must leave the target; got {target!r}.")


def check_option(frame: "pandas.DataFrame", name: str, option: str) -> None:
    """The column that an option names is there; if not, say which may be meant."""
    if name in frame.columns:
        return
    parts = name.split(",")
    if option != "--target" and len(parts) > 1 and set(parts) <= set(frame.columns):
        hint = f"Repeat the option for each column: {' '.join(f'{option} {part}' for part in parts)}."
    else:
        hint = instead(name, frame.columns)
    raise FileError(f"{option} must be a column of the table; got {name!r}. {hint}")


def check_target(frame: "pandas.DataFrame", target: str, missing: str) -> None:
    """Two classes."""
    column = frame[target]
    if missing == "error" and column.isna().any():
        raise FileError(
            f"the target must have no missing values; got {int(column.isna().sum())} in {target!r}. "
            "Pass --missing drop to leave those rows out."
        )
    classes = column.dropna().unique()
    if len(classes) != 2:
        shown = ", ".join(repr(getattr(value, "item", lambda v=value: v)()) for value in classes[:5])
        fix = (
            "Name another column with --target."
            if len(classes) < 2
            else "Keep the rows of two classes, or make it a yes-or-no question."
        )
        raise FileError(
            f"the target must have exactly two classes; got {len(classes)} in {target!r}: {shown}"
            f"{' …' if len(classes) > 5 else ''}. {fix}"
        )


def mentioned(formula: str, frame: "pandas.DataFrame") -> list[str]:
    words = {text for kind, text in tokenize(formula) if kind in ("word", "quoted")}
    every = ("sign", ".") in tokenize(formula)
    return [name for name in frame.columns if every or name in words]


def in_c(formula: str) -> list[str]:
    return [name.strip("` ") for name in re.findall(r"\bC\(\s*(`[^`]*`|\w+)", formula)]


def everything(
    frame: "pandas.DataFrame", table: TableFile, target: str, category: tuple[str, ...], drop: tuple[str, ...]
) -> Prepared:
    """All columns but the target, without those that say nothing; text becomes categories."""
    check_numbers(frame, table, (target, *category))
    terms, left_out = [], dict.fromkeys(drop, "by --drop")
    for name in frame.columns.drop(target):
        column = frame[name]
        different = column.nunique()
        if different < 2:
            left_out[name] = "the same in all rows" if different else "no values"
        elif column.dtype.kind in "Mm":
            raise FileError(
                f"column {name!r} must be numeric or text; got dates. Make numbers of it, or --drop {name!r}."
            )
        elif is_text(column) and different > MOST_LEVELS and name not in category:
            raise FileError(
                f"a text column must have at most {MOST_LEVELS} levels; got {different} in {name!r}, such as "
                f"{column.dropna().iloc[0]!r:.40}. Pass --drop {name!r}, or --category {name!r} to use it all the same."
            )
        else:
            terms.append(f"C({quote(name)})" if name in category and not is_text(column) else quote(name))
    if not terms:
        raise FileError(f"the table must have columns besides the target that differ; got {listed(frame)}.")
    notes = [f"column {name!r} is left out: {why}." for name, why in left_out.items() if why != "by --drop"]
    return Prepared(frame, f"{quote(target)} ~ {' + '.join(terms)}", notes, left_out)
