"""Every ```python block in README.md and docs/ runs, and prints what the page shows."""

import re

import pytest
from pages import OPENING, PAGES, ROOT, Block, Document, blocks_of, difference

NARROW = pytest.mark.filterwarnings("ignore::viper.errors.NarrowIntervalsWarning")
MARKS = {"docs/gp.md": NARROW}  # by page: this one shows fits that warn
FOLLOWED = ROOT / "docs" / "command-line.md"  # test_cli runs its blocks and the commands between them
DOCUMENTS = [
    Document(str(page.relative_to(ROOT)), blocks_of(page.read_text(encoding="utf-8")))
    for page in PAGES
    if page != FOLLOWED
]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    return {document.name: tmp_path_factory.mktemp("page") for document in DOCUMENTS}


@pytest.mark.parametrize(
    ("document", "index"),
    [
        pytest.param(document, index, id=f"{document.name}:{block.line}", marks=MARKS.get(document.name, ()))
        for document in DOCUMENTS
        for index, block in enumerate(document.blocks)
    ],
)
def test_block_runs(document, index, directory_of):
    block: Block = document.blocks[index]
    if block.skip:
        pytest.skip(block.skip)
    document.run_through(index, directory_of[document.name])
    if block.output is not None:
        assert difference(block.output, document.printed[index]) is None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_is_overlooked(page):
    """Every fence that looks like Python is one of the blocks above."""
    text = page.read_text(encoding="utf-8")
    assert len(OPENING.findall(text)) == len(blocks_of(text))


PAGE = """\
```python
x = 1
print(x, "is 0.501")
```

```text
1 is 0.50
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
    assert [(b.line, b.skip) for b in page.blocks] == [(2, None), (12, "needs a cluster"), (17, None)]
    page.run_through(2, tmp_path)
    assert page.namespace["y"] == 2
    assert [block.output for block in page.blocks] == ["1 is 0.50\n", None, None]
    assert difference(page.blocks[0].output, page.printed[0]) is None


def test_a_failing_block_fails(tmp_path):
    page = Document("page", blocks_of("```python\nassert False, 'the page is wrong'\n```\n"))
    with pytest.raises(AssertionError, match="the page is wrong"):
        page.run_through(0, tmp_path)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("p = 0.50", "p = 0.51"),
        ("p = 0.5", "q = 0.5"),
        ("1 2", "1"),
        ("1,000 rows", "1,001 rows"),
        ("1e-3", "2e-3"),
        ("4e-10", "4e-9"),
    ],
)
def test_a_wrong_output_is_seen(shown, printed):
    assert re.search("the page shows", difference(shown, printed))
    assert difference(printed, printed) is None


@pytest.mark.parametrize(
    ("shown", "printed"),
    [("0.42", "0.4178"), ("1,234", "1233.6"), ("8e-06", "7.9e-06"), ("4e-10", "3e-10"), ("0", "-0")],
)
def test_digits_that_are_not_shown_do_not_count(shown, printed):
    assert difference(shown, printed) is None
