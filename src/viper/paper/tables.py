"""A table of results with the published values beside ours: in the terminal, as CSV, Markdown and LaTeX."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from viper.data.writing import atomic_file

if TYPE_CHECKING:
    from rich.table import Table as RichTable


class Spread(NamedTuple):
    """Median with the 2.5 % and 97.5 % quantiles."""

    median: float
    low: float
    high: float


Cell = str | float | Spread | None


def spread_of(values: Iterable[float]) -> Spread | None:
    """Median and quantiles of the values that are not NaN, or None if there are none."""
    import numpy as np

    array = np.asarray([value for value in values if value == value], float)
    return Spread(*np.quantile(array, [0.5, 0.025, 0.975]).tolist()) if len(array) else None


@dataclass(frozen=True)
class ResultTable:
    """Cells under column names. `name` is used for its files; numbers are formatted here, not by the caller."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default_factory=tuple)

    def show(self) -> None:
        """Print to the terminal: without quantiles if the table is too wide, and in pieces if it still is."""
        from rich.console import Console

        console = Console()
        full = self.texts()
        texts = full if sum(self.widths(full)) <= console.width else self.texts(short=True)
        console.print(f"\n{self.title}", style="bold", highlight=False)
        for piece in self.pieces(self.widths(texts), console.width):
            console.print(self.drawn(texts, piece))
        for note in self.notes:
            console.print(note, style="dim", highlight=False)

    def widths(self, texts: list[list[str]]) -> list[int]:
        """Characters per column, with the space between columns."""
        return [max(map(len, column)) + 3 for column in zip(self.columns, *texts, strict=True)]

    def pieces(self, widths: list[int], room: int) -> list[list[int]]:
        """Columns to print side by side: the leading columns of words, repeated, and as many others as fit."""
        words = [all(isinstance(row[j], str) for row in self.rows) for j in range(len(self.columns))]
        labels = list(range([*words, False].index(False)))
        taken = sum(widths[j] for j in labels)
        pieces: list[list[int]] = [[]]
        for j in range(len(labels), len(widths)):
            if pieces[-1] and taken + sum(widths[k] for k in [*pieces[-1], j]) > room:
                pieces.append([])
            pieces[-1].append(j)
        return [labels + piece for piece in pieces]

    def drawn(self, texts: list[list[str]], piece: list[int]) -> "RichTable":
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable

        drawn = RichTable(box=SIMPLE_HEAD)
        for j in piece:
            numeric = any(isinstance(row[j], float | Spread) for row in self.rows)
            drawn.add_column(self.columns[j], justify="right" if numeric else "left", no_wrap=True)
        for row in texts:
            drawn.add_row(*(row[j] for j in piece), style="dim" if "published" in row else None)
        return drawn

    def texts(self, short: bool = False) -> list[list[str]]:
        """The cells as text; `short` leaves out quantiles."""
        return [[cell_text(cell, short) for cell in row] for row in self.rows]

    def write(self, folder: Path) -> list[Path]:
        """Write the table as CSV, Markdown and LaTeX; return the paths."""
        made = {"csv": self.as_csv(), "md": self.as_markdown(), "tex": self.as_latex()}
        paths = [folder / f"{self.name}.{ending}" for ending in made]
        for path, content in zip(paths, made.values(), strict=True):
            with atomic_file(path, overwrite=True) as file:
                file.write(content.encode())
        return paths

    def as_csv(self) -> str:
        """CSV with every digit, and three columns for a median with quantiles."""
        spreads = [any(isinstance(row[j], Spread) for row in self.rows) for j in range(len(self.columns))]
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        header: list[str] = []
        for name, wide in zip(self.columns, spreads, strict=True):
            header += [name, f"{name} 2.5%", f"{name} 97.5%"] if wide else [name]
        writer.writerow(header)
        for row in self.rows:
            line: list[str | float | None] = []
            for cell, wide in zip(row, spreads, strict=True):
                parts = list(cell) if isinstance(cell, Spread) else [cell, None, None]
                line += parts if wide else parts[:1]
            writer.writerow(f"{x:.8g}" if isinstance(x, float) else x for x in line)
        return buffer.getvalue()

    def as_markdown(self) -> str:
        """Markdown with aligned columns, readable as plain text."""
        lines = [list(self.columns), *self.texts()]
        widths = [max(len(line[j]) for line in lines) for j in range(len(self.columns))]
        padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
        rule = ["-" * w for w in widths]
        body = "\n".join("| " + " | ".join(line) + " |" for line in [padded[0], rule, *padded[1:]])
        return "\n\n".join([f"# {self.title}", body, *self.notes]) + "\n"

    def as_latex(self) -> str:
        """A LaTeX tabular with rules of the package booktabs."""
        lines = [" & ".join(map(escape_latex, line)) + r" \\" for line in [self.columns, *self.texts()]]
        rows = "\n    ".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
        notes = " ".join(map(escape_latex, self.notes))
        return (
            "\\begin{table}\n  \\centering\n"
            f"  \\caption{{{escape_latex(self.title)}{'. ' + notes if notes else ''}}}\n"
            f"  \\begin{{tabular}}{{{'l' * len(self.columns)}}}\n    {rows}\n  \\end{{tabular}}\n\\end{{table}}\n"
        )


def cell_text(cell: Cell, short: bool = False) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Spread):
        median, low, high = format_number(cell.median), format_number(cell.low, 2), format_number(cell.high, 2)
        return median if short else f"{median} ({low}, {high})"
    return format_number(cell)


def format_number(x: float, digits: int = 3) -> str:
    """Significant digits, with an exponent only if the number is very small or large; "-" for NaN."""
    if x != x:
        return "-"
    if x == 0 or 1e-3 <= abs(x) < 1e7:
        return f"{x:,.0f}" if abs(x) >= 10 ** (digits - 1) else f"{x:.{digits}g}"
    return f"{x:.{digits - 1}e}"


MATH_COMMANDS = {"η": r"\eta", "ϑ": r"\vartheta", "τ": r"\tau", "β": r"\beta", "Σ": r"\Sigma", "∞": r"\infty"}
MATH_COMMANDS |= {"×": r"\times", "±": r"\pm", "≤": r"\leq", "≥": r"\geq", "→": r"\to", "‖": r"\|", "<": "<", ">": ">"}
MATH_COMMANDS |= {
    "√": r"\surd",
    "π": r"\pi",
    "σ": r"\sigma",
    "μ": r"\mu",
    "ϵ": r"\epsilon",
    "·": r"\cdot",
    "−": "-",
    "≈": r"\approx",
}
MATH_COMMANDS |= {character: f"^{digit}" for digit, character in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")} | {"⁻": "^-", "*": "^*"}
MATH_COMMANDS |= {character: f"_{digit}" for digit, character in enumerate("₀₁₂₃₄₅₆₇₈₉")}
LATEX_CHARACTERS = {
    **{character: f"${command}$" for character, command in MATH_COMMANDS.items()},
    **{character: rf"\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "ó": r"\'o",
    "–": "--",
}


def escape_latex(words: str) -> str:
    """Escape words for LaTeX."""
    return "".join(LATEX_CHARACTERS.get(c, c) for c in words)
