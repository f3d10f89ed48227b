"""Tables of results, printed and saved as CSV and Markdown; and the measurement of durations."""

import csv
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Table:
    """Rows of cells under column names, between a title and notes. Numbers are formatted here, not by the caller."""

    title: str
    columns: list[str]
    rows: list[list[str | float]]
    notes: list[str]

    def cells(self) -> list[list[str]]:
        return [[cell if isinstance(cell, str) else format_number(cell) for cell in row] for row in self.rows]

    def text(self) -> str:
        """Markdown with aligned columns, readable as plain text."""
        lines = [self.columns, *self.cells()]
        widths = [max(len(line[j]) for line in lines) for j in range(len(self.columns))]
        padded = [
            [c.ljust(w) if j == 0 else c.rjust(w) for j, (c, w) in enumerate(zip(line, widths, strict=True))]
            for line in lines
        ]
        rule = ["-" * w if j == 0 else "-" * (w - 1) + ":" for j, w in enumerate(widths)]
        body = "\n".join("| " + " | ".join(line) + " |" for line in [padded[0], rule, *padded[1:]])
        return "\n\n".join([f"# {self.title}", body, *self.notes]) + "\n"

    def write(self, folder: Path, name: str) -> None:
        """Write `folder/name.md`, as printed, and `folder/name.csv`, with every digit."""
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.md").write_text(self.text(), encoding="utf-8")
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([self.columns, *self.rows])


@dataclass
class Page:
    """Several tables, as one Markdown page and as one CSV with a line per cell.

    `order` holds the titles of all tables that the page may have; those not made in this run are kept from the last.
    """

    title: str
    tables: list[Table]
    order: list[str] = field(default_factory=list)

    def text(self) -> str:
        return "\n".join([f"# {self.title}\n", *("#" + table.text() for table in self.tables)])

    def write(self, folder: Path, name: str) -> None:
        folder.mkdir(exist_ok=True)
        page, cells = folder / f"{name}.md", folder / f"{name}.csv"
        texts: dict[str, str] = {}
        lines: dict[str, list[list[str | float]]] = {}
        if self.order and page.exists() and cells.exists():
            for part in page.read_text(encoding="utf-8").split("\n## ")[1:]:
                texts[part.split("\n")[0]] = f"## {part.rstrip()}\n"
            with cells.open(newline="", encoding="utf-8") as file:
                for row in list(csv.reader(file))[1:]:
                    lines.setdefault(row[0], []).append([*row])
        for table in self.tables:
            texts[table.title], lines[table.title] = "#" + table.text(), list(long_form(table))
        titles = [title for title in self.order or texts if title in texts]
        page.write_text("\n".join([f"# {self.title}\n", *(texts[title] for title in titles)]), encoding="utf-8")
        with cells.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["table", "row", "column", "value"])
            writer.writerows(cell for title in titles for cell in lines[title])


def long_form(table: Table) -> Iterator[list[str | float]]:
    for i, row in enumerate(table.rows):
        for column, value in zip(table.columns, row, strict=True):
            yield [table.title, i, column, value]


def format_number(x: float) -> str:
    """Three digits, with an exponent only if the number is very small or large; "-" for NaN."""
    if x != x:
        return "-"
    if x == 0 or 1e-2 <= abs(x) < 1e6:
        return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"
    return f"{x:.1e}"


def machine(device: str) -> str:
    """The processor and the versions that the numbers come from."""
    chip = torch.cuda.get_device_name() if device == "cuda" else processor()
    return (
        f"{chip}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, Python {platform.python_version()}."
    )


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def seconds(work: Callable[[], object], device: str) -> float:
    """Processor time of one call (with one thread, its duration on an idle machine); on a GPU, time between events."""
    if device != "cuda":
        start = time.process_time()
        work()
        return time.process_time() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before.record()
    work()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def interleaved(
    contenders: Mapping[str, Callable[[], object]], device: str, rounds: int, budget: float
) -> dict[str, float]:
    """The shortest of several durations of each contender; they take turns, so that a busy spell affects all alike.

    A turn is two calls, because the first may pay for memory that the previous contender released. A contender that has
    used up its `budget` of seconds is not called again.
    """
    best, spent = dict.fromkeys(contenders, float("inf")), dict.fromkeys(contenders, 0.0)
    for _ in range(rounds):
        for name, work in contenders.items():
            for _ in range(2):
                if spent[name] <= budget:
                    duration = seconds(work, device)
                    best[name], spent[name] = min(best[name], duration), spent[name] + duration
    return best
