"""What a command prints: tables, notes and progress on a terminal, plain text into a pipe, JSON for programs.

Results go to stdout, everything else to stderr. Colours follow NO_COLOR and appear only on a terminal.
"""

import json
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, NoReturn

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from viper.cli.signals import stop_if_interrupted

PIPE_WIDTH = 132  # characters in a line where there is no terminal
LONGEST_NAME = 40  # characters; longer names are cut
SHORTEST_NAME = 20  # characters to which names are cut where the line is short
PATIENT_SECONDS = 2.0  # before progress is noted where there is no terminal
STRIP_WIDTH = 17  # characters of a drawn interval


# Characters that change a terminal's state or the order of its text, with their escapes in a Python string.
CONTROLS = {*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)}
ESCAPED = {code: ascii(chr(code))[1:-1] for code in CONTROLS}
ESCAPED_IN_LINES = {code: text for code, text in ESCAPED.items() if chr(code) not in "\n\t"}
ESCAPED_IN_JSON = {code: f"\\u{code:04x}" for code in ESCAPED_IN_LINES if code >= 0x7F}  # JSON escapes the others


class TerminalConsole(Console):
    """A console that raises BrokenPipeError when the reader of a pipe is gone."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def console(stderr: bool = False) -> TerminalConsole:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return TerminalConsole(stderr=stderr, highlight=False, emoji=False, width=width)


def printable(text: str) -> str:
    """Escape the control characters of text that may come from a file, except line breaks and tabs."""
    return text.translate(ESCAPED_IN_LINES)


def say(text: str = "") -> None:
    """Print lines of the result; long lines are wrapped and keep their indentation.

    Square brackets are rich's markup, so pass text from users through `escape`.
    """
    out = console()
    for line in Text.from_markup(printable(text), emoji=False).split("\n", allow_blank=True):
        indent = len(line.plain) - len(line.plain.lstrip(" "))
        for part in line[indent:].wrap(out, max(out.width - indent, 1)) if line.plain.strip() else [line]:
            part.rstrip()
            out.print(Text(" " * indent) + part, soft_wrap=True)


def note(text: str) -> None:
    """Print a note on stderr."""
    console(stderr=True).print(f"[dim]note:[/] {escape(printable(text))}", soft_wrap=True)


def print_json(document: Any) -> None:
    """Print JSON on stdout; numbers that are not finite become null."""
    text = json.dumps(json_ready(document), indent=2, ensure_ascii=False)
    sys.stdout.write(text.translate(ESCAPED_IN_JSON) + "\n")


def json_ready(value: Any) -> Any:
    """Return the value in the types that JSON has."""
    if isinstance(value, dict):
        return {str(name): json_ready(item) for name, item in value.items()}
    if hasattr(value, "_asdict"):
        return json_ready(value._asdict())
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy
        return json_ready(value.tolist())
    if isinstance(value, PurePath):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(
    titles: Iterable[str],
    rows: Iterable[Iterable[str | Text]],
    left: int = 1,
    longest: int = LONGEST_NAME,
    spare: Iterable[int] = (),
) -> list[int]:
    """Print a light table whose first `left` columns are text; return the indices of the columns that are shown.

    Only text is cut. If the screen is too narrow, the columns in `spare` are left out in that order; if that is not
    enough, the table is wider than the screen. Other columns are numbers, or `Text` to be printed as it is.
    """
    columns = [list(column) for column in zip(titles, *(map(escaped_cell, row) for row in rows), strict=True)]
    widths = [max(cell_len(str(cell)) for cell in column) for column in columns]
    widths[:left] = [min(width, longest) for width in widths[:left]]
    screen, shown = console(), list(range(len(columns)))
    table_width = lambda cut: 2 * len(shown) + 1 + sum(min(widths[i], cut) if i < left else widths[i] for i in shown)  # noqa: E731
    for i in spare:
        if table_width(SHORTEST_NAME) > screen.width:
            shown.remove(i)
    cut = next((cut for cut in range(longest, SHORTEST_NAME, -1) if table_width(cut) <= screen.width), SHORTEST_NAME)
    screen.width = max(screen.width, table_width(cut))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for i in shown:
        drawn = i < left or any(isinstance(cell, Text) and cell.justify != "right" for cell in columns[i])
        width = min(widths[i], cut) if i < left else widths[i]
        table.add_column(columns[i][0], justify="left" if drawn else "right", no_wrap=True, width=width)
    for row in zip(*(columns[i][1:] for i in shown), strict=True):
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    screen.print(table)
    return shown


def escaped_cell(cell: str | Text) -> str | Text:
    """Return the cell with its control characters escaped, line breaks included."""
    if isinstance(cell, str):
        return cell.translate(ESCAPED)
    cell.plain = cell.plain.translate(ESCAPED)
    return cell


def short_number(value: float | None, digits: int = 3) -> str:
    """Return a number with that many decimals, or in scientific notation if it is huge or tiny."""
    if value is None or not math.isfinite(value):
        return "–" if value is None or math.isnan(value) else "∞" if value > 0 else "-∞"
    if value and not 10**-digits <= abs(value) < 10**6:
        return f"{value:.2e}"
    return f"{value:,.{digits}f}"


def significant_number(value: float | None, digits: int = 3) -> str:
    """Return a number with that many significant digits, in scientific notation only if it is huge or below 1e-6."""
    if not value or not math.isfinite(value) or not 1e-6 <= abs(value) < 10**6:
        return "0" if value == 0 else short_number(value)
    return f"{value:,.{max(digits - 1 - math.floor(math.log10(abs(value))), 0)}f}"


def plus_minus(value: float, error: float) -> str:
    """Return a number with its standard error, both with the decimals at which the error has two digits."""
    if not (error > 0 and math.isfinite(error)):
        return significant_number(value, 2)
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{round(value, digits) + 0.0:,.{digits}f} ± {error:,.{digits}f}"


def share_text(share: float) -> str:
    """Return a share with three decimals, or as many as show two digits of it and of its distance from one."""
    rest = min(share, 1.0 - share)
    if rest <= 0.0:
        return f"{share:.0f}"
    return f"{share:.{min(max(3, 1 - math.floor(math.log10(rest))), 8)}f}"


def fixed_number(value: float, digits: int) -> str:
    """Return a number with that many decimals, even if they are all zero."""
    return f"{value:,.{digits}f}" if abs(value) < 10**6 else short_number(value, digits)


def interval_strip(low: float, middle: float, high: float, ends: tuple[float, float]) -> Text:
    """Draw an interval on an axis from `ends[0]` to `ends[1]`, with a mark at zero and arrows where it goes beyond."""
    place = lambda x: round((min(max(x, ends[0]), ends[1]) - ends[0]) / (ends[1] - ends[0]) * (STRIP_WIDTH - 1))  # noqa: E731
    cells = [" "] * STRIP_WIDTH
    cells[place(0.0)] = "│"
    for i in range(place(low), place(high) + 1):
        cells[i] = "─" if cells[i] == " " else "┼"
    if ends[0] <= middle <= ends[1]:
        cells[place(middle)] = "●"
    if low < ends[0]:
        cells[0] = "◂"
    if high > ends[1]:
        cells[-1] = "▸"
    return Text("".join(cells), style="bold green" if low > 0 or high < 0 else "dim")


@contextmanager
def show_progress(title: str, total: int, quiet: bool = False) -> Iterator[Any]:
    """Show progress on stderr; yields a function to call after each step.

    On a terminal it is a bar. Elsewhere it is a line with the steps done so far, at most every two seconds.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        yield (lambda text=None, by=1: stop_if_interrupted()) if quiet else progress_lines(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as bars:
        task = bars.add_task(title, total=total)

        def advance(text: str | None = None, by: int = 1) -> None:
            stop_if_interrupted()
            bars.update(task, advance=by, description=text)

        yield advance


def progress_lines(title: str, total: int) -> Callable[..., None]:
    """Return a function that prints the steps of `show_progress` as notes, at most one every two seconds."""
    began, noted, done = time.monotonic(), 0.0, 0

    def step(text: str | None = None, by: int = 1) -> None:
        nonlocal title, noted, done
        stop_if_interrupted()
        title, done = text or title, done + by
        seconds = time.monotonic() - began
        if by and seconds - noted > PATIENT_SECONDS:
            noted = seconds
            note(f"{title}: {done} of {total}, {seconds:.0f} s.")

    return step


@contextmanager
def note_if_slow(title: str, quiet: bool = False) -> Iterator[None]:
    """Note on stderr that something takes longer than two seconds, unless stderr is a terminal."""
    timer = threading.Timer(PATIENT_SECONDS, note, [f"{title} …"])
    timer.daemon = True
    if not (quiet or sys.stderr.isatty()):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def show_warnings_as_notes() -> None:
    """Print warnings of viper as notes, each once, and ignore those of other libraries."""
    seen: set[str] = set()

    def show_one(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        text = str(message)
        if category.__module__.startswith("viper.") and text not in seen:
            seen.add(text)
            note(text)

    warnings.showwarning = show_one
