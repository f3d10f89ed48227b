"""The language of formulas: `y ~ age + C(ward) + log(x1):x2`, and nothing that could run as a program.

`(1 + age | patient)` is a group term: effects that vary between the groups of a column. A formula is
split into tokens, each column is replaced by a plain variable name, and only the result is passed to
formulaic, which evaluates calls as Python. A formula can contain only columns, numbers, the functions below,
+ - * / : ^ | and brackets. Loading a model runs the same checks, so a model file cannot run code, whoever wrote it.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, NoReturn

from viper.errors import FormulaError, instead

# function -> its options after the first argument, with the largest number each may be
DATE_FUNCTIONS = ("days", "year", "month", "weekday")  # their only argument is a column of dates
FUNCTIONS: dict[str, dict[str, int]] = {
    **{name: {} for name in ("log", "log1p", "exp", "sqrt", "abs", "center", "scale", "I")},
    "poly": {"degree": 10, "raw": 1},
    "bs": {"df": 100, "degree": 10},
    **{name: {} for name in DATE_FUNCTIONS},
}
MOST_TERMS = 10_000  # with interactions expanded; columns that are terms by themselves do not count
MOST_CALL_TOKENS = 1_000  # names, numbers and signs in one call
MOST_POWER = 10  # in (a + b)^2 and I(a**2)
TOKEN = re.compile(
    r"\s*(?:(?P<quoted>`[^`]*`)|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<word>[^\W\d]\w*)"
    r"|(?P<text>\"[^\"\\]*\"|'[^'\\]*')|(?P<sign>\*\*|[-+*/:^(),=~.|]))"
)
Token = tuple[str, str]  # the kind, a group name of TOKEN, and the text without quotes


class GroupTerm(NamedTuple):
    """Effects that vary between groups: an intercept, slopes of columns, or both. `columns` together name a group."""

    columns: tuple[str, ...]
    intercept: bool
    slopes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the grouping: hospital, or hospital:ward."""
        return ":".join(self.columns)

    def __str__(self) -> str:
        effects = ["1" if self.intercept else "0", *map(quote_column, self.slopes)]
        return f"({' + '.join(effects)} | {':'.join(map(quote_column, self.columns))})"


class ParsedFormula(NamedTuple):
    """A parsed formula.

    Internal variables stand for columns: n0_, n1_, … for numbers, c0_, c1_, … for categories, d0_, d1_, … for dates.
    """

    target: str
    formula: str  # as written, with `.` replaced by columns
    plain: tuple[str, ...]  # columns that are terms by themselves and occur nowhere else
    rest: str  # every other term, in internal variables
    variables: dict[str, str]  # variable in `rest` -> column
    reference: dict[str, str]  # column -> the level named in Treatment("…")
    groups: tuple[GroupTerm, ...] = ()

    @property
    def grouping(self) -> list[str]:
        """Return the columns that say to which groups a row belongs."""
        return list(dict.fromkeys(column for term in self.groups for column in term.columns))

    @property
    def dates(self) -> list[str]:
        """Return the columns of dates."""
        return [column for name, column in self.variables.items() if name[0] == "d"]


def quote_column(column: str) -> str:
    """Return the column's name as written in a formula."""
    if "`" in column:
        raise FormulaError(f"columns in a formula must have no ` in their names; got {column!r}. Rename or drop it.")
    return column if column.isidentifier() and column not in ("True", "False") else f"`{column}`"


def parse_formula(
    formula: str, columns: Iterable[str], categories: Iterable[str], left_out: Iterable[str] = ()
) -> ParsedFormula:
    """Check a formula against the columns of the data, where `categories` are text, and parse it.

    The columns in `left_out` are not among those that `.` stands for.
    """
    place, categories = {name: i for i, name in enumerate(columns)}, set(categories)
    left, right = split_sides(tokenize(formula))
    target = known_column(left[0][1], place)
    right, groups = split_groups(right)
    grouping = {known_column(column, place) for term in groups for column in term.columns}
    if target in grouping:
        raise FormulaError(f"the target must not be a group; got {target!r} on both sides of {formula!r:.80}.")
    apart = {target, *left_out, *grouping}
    right = expand_dot(right, [name for name in place if name not in apart])
    if any(kind in ("word", "quoted") and text == target for kind, text in right):
        raise FormulaError(f"the target must not explain itself; got {target!r} on both sides of {formula!r:.80}.")
    every = split_terms(right)
    for _, part in every:
        if is_column(part):
            known_column(part[0][1], place)
    parts = without_removed(every)
    mentions = Counter(text for _, part in parts for kind, text in part if kind in ("word", "quoted"))
    plain, others = [], []
    for sign, part in parts:
        name = part[0][1]
        alone = is_column(part) and mentions[name] == 1 and sign == "+"
        if alone and known_column(name, place) not in categories:
            plain.append(name)
        else:
            others.append((sign, part))
    translation = Translation(place, categories)
    rest = "1" + "".join(f" {sign} {translation.translate(part)}" for sign, part in others)
    if dated := {*translation.of_kind("d")} & {*translation.of_kind("n"), *translation.of_kind("c"), *plain}:
        name = min(dated)
        raise FormulaError(f"a column must be used in one way; got {name!r} as dates and otherwise. Choose one.")
    terms = " ".join(
        [
            *(f"{sign} {''.join(map(spell_token, part))}" for sign, part in parts),
            *(f"+ {term}" for term in groups),
        ]
    )
    written = f"{quote_column(target)} ~ {terms.removeprefix('+ ')}"
    return ParsedFormula(target, written, tuple(plain), rest, translation.variables, translation.reference, groups)


def tokenize(formula: str) -> list[Token]:
    """Return the tokens of a formula. Anything else in it raises a FormulaError."""
    if not isinstance(formula, str):
        raise FormulaError(f"a formula must be text; got {type(formula).__name__}. Write 'y ~ age + C(ward)'.")
    tokens, at, end = [], 0, len(formula.rstrip())
    while at < end:
        found = TOKEN.match(formula, at)
        if found is None or found.lastgroup is None:
            rest = formula[at:].strip()
            raise FormulaError(
                f"a formula may contain columns, numbers, C, {', '.join(FUNCTIONS)} and + - * / : ^ ( ); "
                f"got {rest[:20]!r}. Put the names of columns with other characters in `backticks`."
            )
        text = found[found.lastgroup]
        tokens.append((found.lastgroup, text[1:-1] if found.lastgroup in ("quoted", "text") else text))
        at = found.end()
    return tokens


def spell_token(token: Token) -> str:
    kind, text = token
    if kind in ("word", "quoted"):
        return text if kind == "word" else quote_column(text)
    if kind == "text":
        return f"'{text}'" if '"' in text else f'"{text}"'
    return f" {text} " if text in ("+", "-", "*") else text


def split_sides(tokens: list[Token]) -> tuple[list[Token], list[Token]]:
    """Return the tokens to the left and right of the single `~`."""
    at = [i for i, (kind, text) in enumerate(tokens) if (kind, text) == ("sign", "~")]
    if len(at) != 1:
        raise FormulaError(f"a formula must have one ~; got {len(at)}. Write 'y ~ age + C(ward)'.")
    left, right = tokens[: at[0]], tokens[at[0] + 1 :]
    if len(left) != 1 or left[0][0] not in ("word", "quoted"):
        raise FormulaError("the left side of ~ must be the target's column; got something else. Write 'y ~ age'.")
    if not right:
        raise FormulaError("a formula must have terms to the right of ~; got none. Write 'y ~ .' for all columns.")
    return left, right


def expand_dot(tokens: list[Token], columns: list[str]) -> list[Token]:
    """Replace `.` by the sum of all other columns, in brackets unless it is itself a term of a sum."""
    if ("sign", ".") in tokens and not columns:
        raise FormulaError("`.` in a formula must stand for at least one column; got none that can be used.")
    everything: list[Token] = []
    for name in columns:
        quote_column(name)
        everything += [("sign", "+"), ("quoted", name)]
    spelled: list[Token] = []
    for i, token in enumerate(tokens):
        if token != ("sign", "."):
            spelled.append(token)
            continue
        check_no_module(tokens, i)
        if i and tokens[i - 1] not in [("sign", sign) for sign in ("+", "-", "*", "/", ":", "(")]:
            raise FormulaError(f"`.` in a formula must stand for all other columns; got it after {tokens[i - 1][1]!r}.")
        around = {("sign", "+"), ("sign", "-")}
        bare = (i == 0 or tokens[i - 1] == ("sign", "+")) and (i + 1 == len(tokens) or tokens[i + 1] in around)
        spelled += everything[1:] if bare else [("sign", "("), *everything[1:], ("sign", ")")]
    return spelled


def split_groups(tokens: list[Token]) -> tuple[list[Token], tuple[GroupTerm, ...]]:
    """Return the tokens without terms such as (1 + age | patient), and these terms."""
    bar, kept, groups, at = ("sign", "|"), [], [], 0
    while at < len(tokens):
        end = closing_bracket(tokens, at) if tokens[at] == ("sign", "(") else at
        inside = tokens[at + 1 : end]
        if bar not in inside or (at and tokens[at - 1][0] == "word"):
            kept += tokens[at : end + 1]
        elif (kept and kept[-1] != ("sign", "+")) or tokens[end + 1 : end + 2] not in (
            [],
            [("sign", "+")],
            [("sign", "-")],
        ):
            raise FormulaError(GROUP_TERM.format("one that is not a term of a sum"))
        else:
            groups += group_terms(inside, inside.index(bar))
            kept = kept[:-1]  # drop the sign before it
        at = end + 1
    if bar in kept:
        raise FormulaError(GROUP_TERM.format("a | elsewhere"))
    kept = kept[1:] if kept[:1] == [("sign", "+")] else kept
    if len(set(groups)) < len(groups):
        raise FormulaError(f"group terms must differ; got {max(groups, key=groups.count)} twice. Leave one out.")
    return kept or [("number", "1")], tuple(groups)


GROUP_TERM = "effects of groups must be written as (1 | hospital) or (1 + age | patient); got {}."


def group_terms(inside: list[Token], bar: int) -> list[GroupTerm]:
    """Return the terms of one bracket: two for nested groups, one for each effect if they are uncorrelated (||)."""
    alone = inside[bar + 1 : bar + 2] == [("sign", "|")]
    left, right = inside[:bar], inside[bar + 1 + alone :]
    intercept, slopes = True, []
    for sign, part in split_terms(left) if left else []:
        if part in ([("number", "1")], [("number", "0")]):
            intercept = (part[0][1] == "1") == (sign == "+")
        elif is_column(part) and sign == "+":
            slopes.append(part[0][1])
        else:
            text = "".join(map(spell_token, part))
            fix = " Effects that vary are 1, 0 and columns of numbers; compute others first, and name the column."
            raise FormulaError(GROUP_TERM.format(f"{text!r} left of |") + fix)
    names, signs = [text for _, text in right[::2]], {sign for _, sign in right[1::2]}
    fine = (
        len(right) % 2 == 1
        and all(kind in ("word", "quoted") for kind, _ in right[::2])
        and signs in ({":"}, {"/"}, set())
    )
    if not left or not fine or not (intercept or slopes) or len({*slopes}) < len(slopes) or len({*names}) < len(names):
        raise FormulaError(GROUP_TERM.format(f"({''.join(map(spell_token, inside))})"))
    groups = [tuple(names[: k + 1]) for k in range(len(names))] if signs == {"/"} else [tuple(names)]
    if not alone:
        return [GroupTerm(columns, intercept, tuple(slopes)) for columns in groups]
    effects = [*([(True, ())] if intercept else []), *((False, (slope,)) for slope in slopes)]
    return [GroupTerm(columns, *effect) for columns in groups for effect in effects]


def parse_groups(text: str) -> tuple[GroupTerm, ...]:
    """Return the terms of text such as "(1 | hospital) + (1 + age | patient)"."""
    rest, groups = split_groups(tokenize(text))
    if rest != [("number", "1")] or not groups:
        raise FormulaError(GROUP_TERM.format(repr(text)[:80]))
    return groups


def check_no_module(tokens: list[Token], dot: int) -> None:
    """Raise an error for `np.log(x)`, which must be written `log(x)` here."""
    calls = tokens[dot + 2 : dot + 3] == [("sign", "(")] and tokens[dot + 1][1] in FUNCTIONS
    if calls and dot and tokens[dot - 1][0] == "word":
        call = "".join(map(spell_token, tokens[dot + 1 : closing_bracket(tokens, dot + 2) + 1]))
        got = f"{tokens[dot - 1][1]}.{tokens[dot + 1][1]}()"
        raise FormulaError(f"functions in a formula must be written without a module; got {got}. Write {call}.")


def split_terms(tokens: list[Token]) -> list[tuple[str, list[Token]]]:
    """Return the terms of the outermost sum with their signs."""
    parts: list[tuple[str, list[Token]]] = [("+", [])]
    depth = 0
    for token in tokens:
        depth += {("sign", "("): 1, ("sign", ")"): -1}.get(token, 0)
        if depth == 0 and token in (("sign", "+"), ("sign", "-")):
            parts.append((token[1], []))
        else:
            parts[-1][1].append(token)
    if not parts[0][1]:  # the formula begins with a sign
        parts = parts[1:]
    if not all(part for _, part in parts):
        raise FormulaError("every + and - in a formula must be followed by a term; got one that is not.")
    return parts


def is_column(part: list[Token]) -> bool:
    return len(part) == 1 and part[0][0] in ("word", "quoted")


def without_removed(parts: list[tuple[str, list[Token]]]) -> list[tuple[str, list[Token]]]:
    """Drop columns that a term removes and at most one term adds, so that `. - id` does not read id."""
    removed = {part[0][1] for sign, part in parts if sign == "-" and is_column(part)}
    mentions = Counter(text for _, part in parts for kind, text in part if kind in ("word", "quoted"))
    added = {part[0][1] for sign, part in parts if sign == "+" and is_column(part)}
    gone = {name for name in removed if mentions[name] == 1 + (name in added)}
    return [(sign, part) for sign, part in parts if not (is_column(part) and part[0][1] in gone)]


def known_column(name: str, columns: Mapping[str, int]) -> str:
    if name not in columns:
        hint = instead(name, columns)
        ticks = any(repr(one) in hint and quote_column(one) != one for one in columns if "`" not in one)
        hint += " Put names with blanks or signs in `backticks`." * ticks
        raise FormulaError(f"a formula must name columns of the data; got {name!r}. {hint}")
    return name


class Translation:
    """Translates tokens to the text that formulaic reads."""

    def __init__(self, columns: Mapping[str, int], categories: set[str]) -> None:
        self.columns = columns
        self.categories = categories
        self.variables: dict[str, str] = {}
        self.size = 0  # number of terms so far, with interactions expanded
        self.reference: dict[str, str] = {}

    def translate(self, part: list[Token]) -> str:
        """Translate one term. Calls are checked separately and count as one name towards its size."""
        pieces: list[str] = []
        outline: list[str] = []
        at = 0
        while at < len(part):
            kind, text = part[at]
            if kind == "word" and part[at + 1 : at + 2] == [("sign", "(")]:
                end = closing_bracket(part, at + 1)
                pieces.append(self.call(text, part[at + 2 : end]))
                outline.append("x")
                at = end
            elif kind in ("word", "quoted"):
                pieces.append(self.variable(text, "c" if text in self.categories else "n"))
                outline.append("x")
            elif kind == "text" or text in (",", "=", "."):
                raise FormulaError(f"a formula may contain {text!r} only in a call; got it between terms.")
            else:
                pieces.append(text)
                outline.append({":": "@", "^": "**"}.get(text, text))
            at += 1
        self.size += expanded_size(" ".join(outline))
        if self.size > MOST_TERMS:
            raise FormulaError(f"a formula may have at most {MOST_TERMS:,} terms; got more. Name the ones you need.")
        return "".join(pieces)

    def variable(self, column: str, kind: str) -> str:
        name = f"{kind}{self.columns[known_column(column, self.columns)]}_"
        self.variables[name] = column
        return name

    def of_kind(self, kind: str) -> list[str]:
        """Return the columns of the variables of one kind."""
        return [column for name, column in self.variables.items() if name[0] == kind]

    def call(self, function: str, inside: list[Token]) -> str:
        if function == "C":
            return self.category(inside)
        if function not in FUNCTIONS:
            if (meant := called_column(function, inside, self.columns)) is not None:
                raise FormulaError(
                    f"names of columns with brackets must be in `backticks`; got {meant}. Write {quote_column(meant)}."
                )
            raise FormulaError(
                f"functions in a formula must be C, {', '.join(FUNCTIONS)}; got {function}(). Compute that column "
                "first, and name it in the formula."
            )
        if len(inside) > MOST_CALL_TOKENS:
            raise FormulaError(
                f"a call may have at most {MOST_CALL_TOKENS:,} parts; got {len(inside):,} in {function}()."
            )
        pieces = []
        around = [("word", function), ("sign", "("), *inside, ("sign", ")")]
        for i, (kind, text) in enumerate(inside):
            of_date = around[i][0] == "word" and around[i][1] in DATE_FUNCTIONS and around[i + 1] == ("sign", "(")
            if of_date:
                if kind not in ("word", "quoted") or around[i + 3] != ("sign", ")"):
                    raise FormulaError(f"{around[i][1]}() must contain one column of dates; got something else.")
                pieces.append(self.variable(text, "d"))
                continue
            if kind == "text":
                raise FormulaError(f"{function}() must contain columns and numbers; got {text!r}.")
            of_python = text in ("True", "False") or inside[i + 1 : i + 2] in ([("sign", "(")], [("sign", "=")])
            column = kind == "quoted" or (kind == "word" and not of_python)
            if column and text in self.categories:
                raise FormulaError(f"{function}() must contain numbers; got {text!r}, a column of text. Use C({text}).")
            pieces.append(self.variable(text, "n") if column else "**" if text == "^" else text)
        source = f"{function}({''.join(pieces)})"
        check_call(source, self.variables)
        return source

    def category(self, inside: list[Token]) -> str:
        """Translate C(column) or C(column, Treatment("level")), where the level is the reference."""
        column, option = inside[:1], inside[1:]
        if not column or column[0][0] not in ("word", "quoted"):
            raise FormulaError("C() must contain one column; got something else. Write C(ward).")
        name = known_column(column[0][1], self.columns)
        if option:
            expected = [("sign", ","), ("word", "Treatment"), ("sign", "("), ("text", ""), ("sign", ")")]
            if [kind for kind, _ in option] != [kind for kind, _ in expected] or option[1][1] != "Treatment":
                raise FormulaError(f'C() may contain a column and Treatment("level"); got more in C({name}, …).')
            if self.reference.setdefault(name, option[3][1]) != option[3][1]:
                raise FormulaError(f"C({name}) must have one reference level; got two.")
        return f"C({self.variable(name, 'c')})"


def called_column(function: str, inside: list[Token], columns: Iterable[str]) -> str | None:
    """Return the column whose name was written without backticks and reads as a call, such as Age (years)."""
    letters = lambda text: re.sub(r"[\W_]", "", text).casefold()  # noqa: E731
    written = letters(function + "".join(text for _, text in inside))
    return next((name for name in columns if letters(name) == written), None)


def check_powers(formula: str) -> None:
    """Raise an error for `age^2`: outside a call a power means interactions, so that of one column is the column.

    It is no part of `parse_formula`, because models with such a formula must still load.
    """
    tokens, calls = tokenize(formula), [False]
    for i, token in enumerate(tokens):
        if token == ("sign", "("):
            calls.append(calls[-1] or tokens[i - 1][0] == "word")
        elif token == ("sign", ")") and len(calls) > 1:
            calls.pop()
        elif token in (("sign", "^"), ("sign", "**")) and not calls[-1] and tokens[i - 1][0] in ("word", "quoted"):
            name = spell_token(tokens[i - 1])
            raise FormulaError(
                f"a power outside of I() must be of a sum, whose interactions it means; got {name}{token[1]}…, which "
                f"is {name} itself. Write I({name}**2), or poly({name}, 2)."
            )


def closing_bracket(tokens: list[Token], start: int) -> int:
    """Return the position where the bracket that opens at `start` closes."""
    depth = 0
    for at in range(start, len(tokens)):
        depth += {("sign", "("): 1, ("sign", ")"): -1}.get(tokens[at], 0)
        if depth == 0:
            return at
    raise FormulaError("every bracket in a formula must be closed; got one that is not.")


def check_call(source: str, variables: Iterable[str]) -> None:
    """Check that a call contains known functions of columns and numbers, and nothing else that Python would run."""
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        refuse_call(source)
    names = set(variables)
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        match node:
            case ast.Call(func=ast.Name(id=function), args=[ast.Name()]) if function in DATE_FUNCTIONS:
                pass
            case ast.Call(func=ast.Name(id=function), args=[first, *options], keywords=keywords) if (
                function in FUNCTIONS and function not in DATE_FUNCTIONS
            ):
                check_call_options(function, options, keywords, source)
                pending.append(first)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if (
                0 <= power <= MOST_POWER and any(isinstance(x, ast.Name) and x.id in names for x in ast.walk(left))
            ):  # a power of numbers alone could take forever to compute
                pending.append(left)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
                pending += [left, right]
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
                pending.append(operand)
            case ast.Name(id=name) if name in names:
                pass
            case ast.Constant(value=int() | float()):
                pass
            case _:
                refuse_call(source)


def check_call_options(function: str, options: list[ast.expr], keywords: list[ast.keyword], source: str) -> None:
    """Check that the options of a call have known names and are integers in the allowed range."""
    allowed = FUNCTIONS[function]
    given = [*zip(allowed, options, strict=False), *((keyword.arg or "", keyword.value) for keyword in keywords)]
    if len(options) > len(allowed):
        refuse_call(source)
    for name, value in given:
        if name not in allowed or not isinstance(value, ast.Constant) or type(value.value) not in (int, bool):
            refuse_call(source)
        if not 0 <= int(value.value) <= allowed[name]:  # type: ignore[arg-type]
            raise FormulaError(f"{name} of {function}() must be at most {allowed[name]}; got {value.value!r}.")


def refuse_call(source: str) -> NoReturn:
    called = re.sub(r"\b[ncd](\d+)_", "…", source)
    raise FormulaError(
        f"a call in a formula must be a function of columns and numbers, such as log(age + 1) or poly(age, 3); "
        f"got {called:.60}."
    )


def expanded_size(outline: str) -> int:
    """Return how many terms a product of brackets has, without expanding it."""
    if outline == "x":  # the most common case
        return 1
    try:
        return count_terms(ast.parse(outline, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        raise FormulaError("a formula must be terms joined by + - * / : ^; got something else. Check it.") from None


def count_terms(node: ast.AST) -> int:
    match node:
        case ast.Name() | ast.Constant(value=0 | 1):
            return 1
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return count_terms(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if 1 <= power <= MOST_POWER:
            return min((count_terms(left) + 1) ** power, MOST_TERMS + 1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return count_terms(left) + count_terms(right)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() | ast.MatMult(), right=right):
            return min((count_terms(left) + 1) * (count_terms(right) + 1), MOST_TERMS + 1)
    raise ValueError
