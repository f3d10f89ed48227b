"""Every exception and warning that a user may catch, and how messages word lists of names.

Wrong arguments raise Python's ValueError and TypeError. Missing optional packages raise ImportError, which says what to
install.
"""

import difflib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

LONGEST_LINE = 1000  # characters of a message
ALIKE = 0.7  # similarity from which a name counts as a likely typo of another


# --- exceptions ---


class OneLineError(ValueError):
    """An error whose message is one line of printable text, whatever names and values of the user it quotes."""

    def __init__(self, message: str) -> None:
        super().__init__(as_one_line(message))


class StorageError(OneLineError):
    """A model file cannot be written, or cannot be read: it is missing, damaged, too new or from another program."""


class OutputError(OneLineError):
    """Predictions, tables or reports cannot be written to the path that was given."""


class RequestError(OneLineError):
    """A request to `viper serve` cannot be answered; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FileError(OneLineError):
    """A file of rows cannot be read as a table."""


class FormulaError(OneLineError):
    """A formula cannot be parsed, or does not fit the data."""


class RowError(FormulaError):
    """A value in one row cannot be used; `row` is that row's label in the table's index."""

    def __init__(self, rule: str, got: str, row: Any, fix: str) -> None:
        super().__init__(f"{rule}; got {got} in row {row}. {fix}".strip())
        self.row = row


class DataError(OneLineError):
    """A data set is missing, cannot be downloaded, or does not have the expected contents."""


class NotPositiveDefinite(ValueError):
    """The kernel matrix at the inducing points has no Cholesky factor, even with the largest jitter."""


class NotFinite(ValueError):
    """The sums over rows overflow, or their curvature has no Cholesky factor."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(
            message or "the rows must give finite sums; got an overflow or NaN. Scale the features and offsets."
        )


class Unavailable(RuntimeError):
    """An artefact of the paper needs something that is missing, such as a download; the message says what to do.

    `reproduce("all")` reports it and continues with the next artefact.
    """


# --- warnings ---


if TYPE_CHECKING:
    from sklearn.exceptions import ConvergenceWarning as SklearnConvergenceWarning

    class ConvergenceWarning(SklearnConvergenceWarning):
        """A solver, a search or a Markov chain stopped before it converged."""


def __getattr__(name: str) -> Any:
    """Make ConvergenceWarning on first use, because its parent is scikit-learn's, which takes a second to import."""
    if name != "ConvergenceWarning":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sklearn.exceptions import ConvergenceWarning as Parent

    about = {"__module__": __name__, "__doc__": "A solver, a search or a Markov chain stopped before it converged."}
    return globals().setdefault(name, type(name, (Parent,), about))


class ImportanceWarning(UserWarning):
    """The importance weights are too uneven for the corrected posterior to be trusted."""


class WeightWarning(UserWarning):
    """Weights of rows are neither counts nor one on average, so intervals may be far too narrow or too wide."""


class LeftOutWarning(UserWarning):
    """`.` in a formula does not stand for a column, because it is constant, dates or an identifier."""


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; the fit continues without it."""


class CacheWarning(UserWarning):
    """Rows of files could not be kept for later passes; the fit decodes the files again in every pass."""


class JitterWarning(UserWarning):
    """The kernel matrix at the inducing points needed more jitter than was asked for."""


class NarrowIntervalsWarning(UserWarning):
    """The mean function, which has no uncertainty, explains most of the data, so the intervals are too narrow."""


def users_line() -> int:
    """Return the `stacklevel` that points a warning at the first line outside viper and scikit-learn."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("viper.", "sklearn.")):
        frame, level = frame.f_back, level + 1
    return level


# --- wording ---


def as_one_line(text: str) -> str:
    """Return text on one line, without characters that a terminal obeys; from a long one, the middle is left out."""
    plain = "".join(c if c.isprintable() else " " if c in "\n\t\r" else ascii(c)[1:-1] for c in text)
    return plain if len(plain) <= LONGEST_LINE else f"{plain[: LONGEST_LINE // 2]} … {plain[-LONGEST_LINE // 2 :]}"


def shown(value: Any, most: int = 60) -> str:
    """Return a value as Python writes it, on one line, cut to a length, without characters that a terminal obeys."""
    text = as_one_line(repr(value))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def instead(name: str, names: Iterable[Any]) -> str:
    """Suggest the name closest to an unknown one, or list the known names."""
    every = {str(one): one.item() if hasattr(one, "item") else one for one in names}
    by_letters = {one.casefold(): one for one in reversed(every)}
    near = difflib.get_close_matches(name, every, 1, ALIKE)
    near = near or [by_letters[one] for one in difflib.get_close_matches(name.casefold(), by_letters, 1, ALIKE)]
    return f"Did you mean {shown(every[near[0]])}?" if near else f"Choose one of {listed(every.values())}."


def listed(names: Iterable[Any], most: int = 8) -> str:
    """Return the names as text: all of them, or the first few and the number of others."""
    every = list(names)
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return ", ".join(map(shown, every[:most])) + more


def counted(counts: dict[str, int], most: int = 6) -> str:
    """Return the counts by column as text: "3 in 'age', 1 in 'dose'"."""
    first = ", ".join(f"{number} in {shown(name)}" for name, number in [*counts.items()][:most])
    return first + (f" and {len(counts) - most} more columns" if len(counts) > most else "")
