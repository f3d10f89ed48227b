"""Pages with ```python blocks: how they are read, run, and compared with the ```text blocks that show their output.

The blocks of one file share a namespace and a temporary directory and run in order, as a reader would run
them. A block is left out only if the line before it says why: <!-- skip: reason -->. A ```text block that
follows one shows what it prints; `python tests/pages.py docs/start.md ...` rewrites those.
"""

import contextlib
import io
import re
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

OPENING = re.compile(r"^[ \t]*```[ \t]*(py|python\d?)\b", re.MULTILINE)
BLOCK = re.compile(
    r"(?:^[ \t]*<!-- skip: (?P<skip>\S.*?) -->[ \t]*\n\s*?)?"
    r"^(?P<fence>[ \t]*```)python[ \t]*\n(?P<source>.*?)^(?P=fence)[ \t]*$"
    r"(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?")
REMAINDER = 1e-8  # what an iteration or rounding leaves: its digits differ between machines, its size does not
ROUNDING = 1e-13
ALL_DIGITS = 15  # a number with so many shows everything that a float holds
FIT = 1e-7  # to which such numbers agree: a fit ends 1e-8 nats before its optimum, and rounding decides where


@dataclass(frozen=True)
class Block:
    line: int
    source: str
    skip: str | None
    output: str | None = None
    span: tuple[int, int] = (0, 0)  # of the output, in the text of the page


@dataclass
class Document:
    """A page, its blocks, and how far its reader has come."""

    name: str
    blocks: list[Block]
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: list[str] = field(default_factory=list)

    def run_through(self, index: int, directory: Path) -> None:
        """Run the blocks up to and including `index` that have not run yet."""
        with contextlib.chdir(directory):
            for block in self.blocks[len(self.printed) : index + 1]:
                stdout = io.StringIO()
                if block.skip is None:
                    # Leading newlines make tracebacks show the line of the page.
                    code = compile("\n" * (block.line - 1) + block.source, self.name, "exec")
                    with contextlib.redirect_stdout(stdout):
                        exec(code, self.namespace)
                self.printed.append(stdout.getvalue())


def blocks_of(text: str) -> list[Block]:
    def block(found: re.Match[str]) -> Block:
        line = text.count("\n", 0, found.start("source")) + 1
        source = textwrap.dedent(found["source"])
        return Block(line, source, found["skip"], found["output"], found.span("output"))

    return [block(found) for found in BLOCK.finditer(text)]


def difference(shown: str, printed: str) -> str | None:
    """Where two outputs differ: words must be equal, and so must numbers, to the digits shown."""
    words = [NUMBER.sub("#", text).split() for text in (shown, printed)]
    if words[0] != words[1]:
        return f"the page shows\n{shown}\nbut the block prints\n{printed}"
    for old, new in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        if not agree(old, new):
            return f"the page shows {old}, the block prints {new}, in\n{printed}"
    return None


def agree(shown: str, printed: str) -> bool:
    """Whether a printed number, rounded to the digits that the page shows, is the number shown."""
    x, y = (Decimal(number.replace(",", "")) for number in (shown, printed))
    if "e" in shown and abs(x) < REMAINDER:
        return max(x, y) < ROUNDING or x / 2 < y < 2 * x
    if len(x.as_tuple().digits) >= ALL_DIGITS:
        return abs(x - y) <= abs(x) * Decimal(FIT)
    return y.quantize(x) == x


def rewrite(path: Path) -> None:
    """Put what its blocks print into a page."""
    text = path.read_text(encoding="utf-8")
    page = Document(path.name, blocks_of(text))
    with tempfile.TemporaryDirectory() as directory:
        page.run_through(len(page.blocks) - 1, Path(directory))
    for block, printed in reversed(list(zip(page.blocks, page.printed, strict=True))):
        if block.output is not None:
            start, end = block.span
            lines = [line.rstrip() for line in printed.splitlines()]
            text = text[:start] + "\n".join(lines) + "\n" + text[end:]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rewrite(Path(name))
