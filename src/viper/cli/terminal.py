"""What people see: tables, notes and progress for a terminal, plain text for a pipe, JSON for machines.

Results go to stdout, everything else to stderr. Colours follow NO_COLOR and are left out where there is no terminal.
"""

import json
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 132  # columns where there is no terminal to ask
LONGEST = 40  # characters of a name on one line
PATIENCE = 2.0  # seconds before progress is told where there is no terminal
STRIP = 17  # characters of a drawn interval


class Screen(Console):
    """A console that leaves a closed pipe to the command."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def console(stderr: bool = False) -> Screen:
    stream = sys.stderr if stderr else sys.stdout
    return Screen(stderr=stderr, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)


def say(text: str = "") -> None:
    """A line of the result; square brackets are rich's markup, so pass what users wrote through `escape`."""
    console().print(text)


def note(text: str) -> None:
    """Something to know, on stderr."""
    console(stderr=True).print(f"[dim]note:[/] {escape(text)}", soft_wrap=True)


def emit(document: Any) -> None:
    """JSON on stdout; what is not finite becomes null."""
    sys.stdout.write(json.dumps(plain(document), indent=2, ensure_ascii=False) + "\n")


def plain(value: Any) -> Any:
    """Only what JSON knows."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def grid(titles: Iterable[str], rows: Iterable[Iterable[str | Text]], left: int = 1, longest: int = LONGEST) -> Table:
    """A light table whose first `left` columns are text and the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for i, title in enumerate(titles):
        text = {"justify": "left", "no_wrap": True, "overflow": "ellipsis", "max_width": longest}
        table.add_column(title, **(text if i < left else {"justify": "right", "no_wrap": True}))  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else escape(cell) for cell in row))
    return table


def show(table: Table) -> None:
    console().print(table)


def number(value: float | None, digits: int = 3) -> str:
    """A number with that many decimals, or in short form if it is large or tiny."""
    if value is None or not math.isfinite(value):
        return "–" if value is None or math.isnan(value) else "∞" if value > 0 else "-∞"
    if value and not 10**-digits <= abs(value) < 10**6:
        return f"{value:.2e}"
    return f"{value:,.{digits}f}"


def fixed(value: float, digits: int) -> str:
    """A number with that many decimals, also if they are all zero."""
    return f"{value:,.{digits}f}" if abs(value) < 10**6 else number(value, digits)


def strip(low: float, middle: float, high: float, ends: tuple[float, float]) -> Text:
    """An interval drawn on a line from `ends[0]` to `ends[1]`, with a mark at zero."""
    place = lambda x: round((min(max(x, ends[0]), ends[1]) - ends[0]) / (ends[1] - ends[0]) * (STRIP - 1))  # noqa: E731
    cells = [" "] * STRIP
    cells[place(0.0)] = "│"
    for i in range(place(low), place(high) + 1):
        cells[i] = "─" if cells[i] == " " else "┼"
    cells[place(middle)] = "●"
    return Text("".join(cells), style="bold green" if low > 0 or high < 0 else "dim")


@contextmanager
def progress(title: str, total: int, quiet: bool = False) -> Iterator[Any]:
    """Progress on stderr: yields a function to call after each step.

    A bar on a terminal; elsewhere a line for each step, once it takes longer than two seconds.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        yield (lambda text=None, by=1: None) if quiet else lines(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as bars:
        task = bars.add_task(title, total=total)
        yield lambda text=None, by=1: bars.update(task, advance=by, description=text)


def lines(title: str, total: int) -> Callable[..., None]:
    """A step of `progress` as a line."""
    began, done = time.monotonic(), 0

    def step(text: str | None = None, by: int = 1) -> None:
        nonlocal title, done
        title, done = text or title, done + by
        seconds = time.monotonic() - began
        if by and seconds > PATIENCE:
            note(f"{title}: {done} of {total}, {seconds:.0f} s.")

    return step


@contextmanager
def waiting(title: str, quiet: bool = False) -> Iterator[None]:
    """A line on stderr where there is no terminal, once something takes longer than two seconds."""
    timer = threading.Timer(PATIENCE, note, [f"{title} …"])
    timer.daemon = True
    if not (quiet or sys.stderr.isatty()):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def show_warnings_as_notes() -> None:
    """Warnings of viper as notes, each once; those of other libraries not at all."""
    seen: set[str] = set()

    def show_one(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        text = str(message)
        if category.__module__.startswith("viper.") and text not in seen:
            seen.add(text)
            note(text)

    warnings.showwarning = show_one
