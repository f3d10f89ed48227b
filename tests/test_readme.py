"""Every ```python block in README.md and docs/ runs.

The blocks of one file share a namespace and a temporary directory and run in order, as a reader would run
them. A block is left out only if the line before it says why: <!-- skip: reason -->.
"""

import contextlib
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

OPENING = re.compile(r"^[ \t]*```[ \t]*(py|python\d?)\b", re.MULTILINE)
BLOCK = re.compile(
    r"(?:^[ \t]*<!-- skip: (?P<skip>\S.*?) -->[ \t]*\n\s*?)?"
    r"^(?P<fence>[ \t]*```)python[ \t]*\n(?P<source>.*?)^(?P=fence)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    line: int
    source: str
    skip: str | None


@dataclass
class Document:
    """A page, its blocks, and how far its reader has come."""

    name: str
    blocks: list[Block]
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    done: int = 0

    def run_through(self, index: int, directory: Path) -> None:
        """Run the blocks up to and including `index` that have not run yet."""
        with contextlib.chdir(directory):
            for block in self.blocks[self.done : index + 1]:
                if block.skip is None:
                    # Leading newlines make tracebacks show the line of the page.
                    code = compile("\n" * (block.line - 1) + block.source, self.name, "exec")
                    exec(code, self.namespace)
                self.done += 1


def blocks_of(text: str) -> list[Block]:
    def block(found: re.Match[str]) -> Block:
        line = text.count("\n", 0, found.start("source")) + 1
        return Block(line, textwrap.dedent(found["source"]), found["skip"])

    return [block(found) for found in BLOCK.finditer(text)]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [Document(str(page.relative_to(ROOT)), blocks_of(page.read_text(encoding="utf-8"))) for page in PAGES]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    return {document.name: tmp_path_factory.mktemp("page") for document in DOCUMENTS}


@pytest.mark.parametrize(
    ("document", "index"),
    [
        pytest.param(document, index, id=f"{document.name}:{block.line}")
        for document in DOCUMENTS
        for index, block in enumerate(document.blocks)
    ],
)
def test_block_runs(document, index, directory_of):
    if reason := document.blocks[index].skip:
        pytest.skip(reason)
    document.run_through(index, directory_of[document.name])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_is_overlooked(page):
    """Every fence that looks like Python is one of the blocks above."""
    text = page.read_text(encoding="utf-8")
    assert len(OPENING.findall(text)) == len(blocks_of(text))


PAGE = """\
```python
x = 1
```

<!-- skip: needs a cluster -->
```python
x = 2
```

- a list
  ```python
  y = x + 1
  ```
"""


def test_blocks_are_found_and_share_a_namespace(tmp_path):
    page = Document("page", blocks_of(PAGE))
    assert [(b.line, b.skip) for b in page.blocks] == [(2, None), (7, "needs a cluster"), (12, None)]
    page.run_through(2, tmp_path)
    assert page.namespace["y"] == 2


def test_a_failing_block_fails(tmp_path):
    page = Document("page", blocks_of("```python\nassert False, 'the page is wrong'\n```\n"))
    with pytest.raises(AssertionError, match="the page is wrong"):
        page.run_through(0, tmp_path)
