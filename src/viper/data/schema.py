"""What a file may hold, declared in tables that are checked both on writing and on reading.

A table maps names to rules: those for JSON values below, or `Numbers` for tensors. Sizes, types and names are checked
before any tensor is read, and the numbers in the tensors afterwards. Anything else raises a one-line StorageError.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import NoneType
from typing import Any, NamedTuple, NoReturn, Protocol, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from viper.errors import StorageError, shown

LARGEST_COUNT = 1 << 62
MOST_NESTED = 16  # most levels of lists and dictionaries in a value of any kind
CLOSE = 1e-6  # largest relative deviation from a symmetric or normalised matrix that counts as rounding


def refuse_value(where: str, words: str, value: Any) -> NoReturn:
    raise StorageError(f"{where} must be {words}; got {shown(value)}.") from None


# --- JSON values ---


class Rule(Protocol):
    """A rule that a value must satisfy."""

    def check(self, value: Any, where: str) -> None:
        """Raise a StorageError unless the value, found at `where` in the file, satisfies the rule."""


@dataclass(frozen=True)
class Value:
    """One value: what it must be, in words, and a function that checks it."""

    words: str
    holds: Callable[[Any], bool]

    def check(self, value: Any, where: str) -> None:
        if not self.holds(value):
            refuse_value(where, self.words, value)


@dataclass(frozen=True)
class Items:
    """A list, with a rule for each entry, and its length if that is fixed."""

    each: Rule
    length: int | None = None

    def check(self, value: Any, where: str) -> None:
        if type(value) is not list or self.length not in (None, len(value)):
            refuse_value(where, "a list" if self.length is None else f"a list of {self.length}", value)
        for i, item in enumerate(value):
            self.each.check(item, f"{where}[{i}]")


@dataclass(frozen=True)
class Entries:
    """A dictionary with any names, and one rule for all values except those of special names; some are required."""

    each: Rule
    but: Mapping[str, Rule] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    def check(self, value: Any, where: str) -> None:
        check_keys(value, where)
        check_complete(value, self.required, value, where)
        for name, item in value.items():
            self.but.get(name, self.each).check(item, f"{where}[{shown(name)}]")


@dataclass(frozen=True)
class Fields:
    """A dictionary with these names, and a rule for each; those in `optional` may be absent. `where` may be empty."""

    required: Mapping[str, Rule]
    optional: Mapping[str, Rule] = field(default_factory=dict)

    def check(self, value: Any, where: str) -> None:
        check_keys(value, where or "the model")
        check_complete(value, self.required, self.optional, where or "the model")
        for name, item in value.items():
            (self.required.get(name) or self.optional[name]).check(item, f"{where}.{name}".lstrip("."))


@dataclass(frozen=True)
class Either:
    """A value that satisfies one of two rules; the message describes the second."""

    first: Value
    second: Rule

    def check(self, value: Any, where: str) -> None:
        if not self.first.holds(value):
            self.second.check(value, where)


def check_keys(value: Any, where: str) -> None:
    if type(value) is not dict or not all(type(name) is str for name in value):
        refuse_value(where, "a dictionary", value)


def check_complete(names: Iterable[str], required: Iterable[str], optional: Iterable[str], where: str) -> None:
    """Raise unless all required names are there, and no unknown ones."""
    found, needed = set(names), set(required)
    if absent := sorted(needed - found):
        raise StorageError(f"{where} must have {shown(absent[0])}; got none.")
    if strange := sorted(found - needed - set(optional)):
        raise StorageError(f"{where} must have only what viper writes; got {shown(strange[0])}.")


def is_number(value: Any) -> bool:
    """Whether the value is an int or float that is finite as a float."""
    return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max


def is_scalar(value: Any) -> bool:
    return value is None or type(value) in (str, bool) or is_number(value)


def is_plain(value: Any, depth: int = MOST_NESTED) -> bool:
    """Whether the value consists of finite numbers, texts, booleans and None, in lists and dictionaries."""
    if isinstance(value, list | dict):
        inner = value if isinstance(value, list) else value.values()
        return depth > 0 and all(is_plain(item, depth - 1) for item in inner)
    return is_scalar(value)


TEXT = Value("text", lambda x: type(x) is str)
BOOLEAN = Value("true or false", lambda x: type(x) is bool)
NUMBER = Value("a finite number", is_number)
WHOLE = Value("a whole number from 0 on", lambda x: type(x) is int and 0 <= x <= LARGEST_COUNT)
SCALAR = Value("a number, text, true, false or null", is_scalar)
LABEL = Value("a number, text, true or false", lambda x: x is not None and is_scalar(x))
PLAIN = Value("finite numbers and text, not deeply nested", is_plain)
ABOVE_ZERO = Value("a positive number", lambda x: is_number(x) and x > 0)
NOTHING = Value("null", lambda x: x is None)


def or_none(rule: Rule) -> Either:
    return Either(NOTHING, rule)


def one_of(*words: str) -> Value:
    return Value(f"one of {list(words)}", lambda x: type(x) is str and x in words)


def between(low: float, high: float) -> Value:
    return Value(f"a number from {low:g} to {high:g}", lambda x: is_number(x) and low <= x <= high)


# --- dataclasses ---


def rule_of(annotation: Any) -> Rule:
    """Return the rule of a type: `int` is a whole number from 0 on, `list[str]` a list of texts, and so on."""
    simple: dict[Any, Rule] = {str: TEXT, bool: BOOLEAN, int: WHOLE, float: NUMBER, Any: PLAIN}
    if annotation in simple:
        return simple[annotation]
    if is_dataclass(annotation):
        return fields_of(annotation)
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (list, dict):
        return Items(rule_of(parts[0])) if origin is list else Entries(rule_of(parts[1]))
    if len(parts) == 2 and NoneType in parts:
        return or_none(rule_of(next(part for part in parts if part is not NoneType)))
    raise TypeError(f"a field to be saved must have a type of JSON; got {annotation}.")


def fields_of(kind: Any, **special: Rule) -> Fields:
    """Return the rules of a dataclass as JSON, by the types of its fields; those with a default may be absent."""
    types = get_type_hints(kind)
    rules = {one.name: special.get(one.name) or rule_of(types[one.name]) for one in fields(kind)}
    free = {one.name for one in fields(kind) if one.default is not MISSING or one.default_factory is not MISSING}
    return Fields(
        {name: rule for name, rule in rules.items() if name not in free},
        {name: rule for name, rule in rules.items() if name in free},
    )


# --- tensors ---


class Layout(NamedTuple):
    """A tensor before it is read: its type, its shape, and where in the data its bytes are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class Range(NamedTuple):
    """What the numbers of a tensor must be, in words, and a function that checks them."""

    words: str
    holds: Callable[[Tensor], bool]


@dataclass(frozen=True)
class Numbers:
    """A float64 tensor. A shape has a letter per axis, which stands for the same size everywhere: "d", "dd", "n6"."""

    shapes: tuple[str, ...]
    range: Range

    def check_layout(self, layout: Layout, sizes: dict[str, int], where: str) -> None:
        """Check type and shape, and add the sizes of letters that occur for the first time."""
        if layout.dtype is not torch.float64:
            raise StorageError(f"{where} must be float64; got {str(layout.dtype).removeprefix('torch.')}.")
        for shape in self.shapes:
            if len(shape) == len(layout.shape):
                known = {letter: sizes.get(letter, size) for letter, size in zip(shape, layout.shape, strict=True)}
                known |= {letter: int(letter) for letter in shape if letter.isdecimal()}
                if tuple(known[letter] for letter in shape) == layout.shape:
                    sizes.update(known)
                    return
        wanted = [", ".join(str(sizes.get(letter, letter)) for letter in shape) for shape in self.shapes]
        got = ", ".join(map(str, layout.shape))
        raise StorageError(f"{where} must have shape ({') or ('.join(wanted)}); got ({got:.60}).")

    def check_numbers(self, tensor: Tensor, where: str) -> None:
        if not self.range.holds(tensor):
            raise StorageError(f"{where} must be {self.range.words}; got other numbers.")


def numbers(*shapes: str, range: Range | None = None) -> Numbers:
    return Numbers(shapes, range or FINITE)


def is_finite(x: Tensor) -> bool:
    return math.isfinite(float(x.sum())) or bool(x.isfinite().all())


def all_positive(x: Tensor) -> bool:
    return is_finite(x) and bool((x > 0).all())


def is_invertible(x: Tensor) -> bool:
    """Whether a factor F has an inverse, and FFᵀ a finite positive diagonal. For a triangular F, its diagonal tells."""
    squares = x.square().sum(1)
    if not is_finite(x) or not bool(((squares > 0) & squares.isfinite()).all()):
        return False
    if not bool(x.tril(-1).any()) or not bool(x.triu(1).any()):
        return bool(x.diagonal().ne(0).all())
    return math.isfinite(float(torch.linalg.slogdet(x).logabsdet))


def is_definite(x: Tensor) -> bool:
    """Whether a vector is positive, or a matrix symmetric and positive definite."""
    if x.ndim == 1:
        return all_positive(x)
    if not is_finite(x) or not bool((x.diagonal() > 0).all()):
        return False
    root = x.diagonal().sqrt()
    alike = x / root / root[:, None]  # correlations, so that columns of any scale are judged alike
    symmetric = bool((alike - alike.T).abs().amax() <= CLOSE)
    return symmetric and not int(torch.linalg.cholesky_ex(alike).info)


def is_normalised(x: Tensor) -> bool:
    """Whether the columns of a matrix have length 1 and its rows at most 1, as with orthonormal columns."""
    if not is_finite(x) or x.shape[1] > x.shape[0]:
        return False
    squares = x.square()
    return bool((squares.sum(0) - 1.0).abs().le(CLOSE).all()) and bool(squares.sum(1).le(1.0 + CLOSE).all())


FINITE = Range("finite", is_finite)
POSITIVE = Range("finite and positive", all_positive)
SHARES = Range("shares from 0 to 1", lambda x: bool(((x >= 0) & (x <= 1)).all()))
INVERTIBLE = Range("a finite matrix with an inverse", is_invertible)
DEFINITE = Range("positive, or a positive definite matrix", is_definite)
NORMALISED = Range("orthonormal columns", is_normalised)


def check_layouts(
    rules: Mapping[str, Numbers], found: Mapping[str, Layout], sizes: dict[str, int], free: Iterable[str] = ()
) -> None:
    """Check names, types and shapes of all tensors; those in `free` are optional and checked by the caller."""
    check_complete(found, rules, free, "the file")
    for name, rule in rules.items():
        rule.check_layout(found[name], sizes, name)


def check_tensors(rules: Mapping[str, Numbers], found: Mapping[str, Tensor]) -> None:
    """Check the numbers in the tensors."""
    for name, rule in rules.items():
        rule.check_numbers(found[name], name)
