"""Every promise of docs/security.md names a test, and the tests exist."""

import ast
import re
from pathlib import Path

import pytest

from viper.data import model_file
from viper.formula import columns, grammar, imputation, learn

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PROMISES = [line for line in PAGE.splitlines() if re.match(r"\| .*\| `tests/", line)]
TESTS = sorted(set(re.findall(r"`(tests/\w+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("file", "test"), TESTS, ids=[test for _, test in TESTS])
def test_a_promise_has_its_test(file, test):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_a_test():
    tables = re.findall(r"\| promise \| test \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE)
    assert len(PROMISES) == sum(table.count("\n") for table in tables) >= 20


def test_the_limits_are_those_of_the_code():
    limits = [learn.MOST_LEVELS, columns.MOST_COLUMNS, grammar.MOST_TERMS, imputation.MOST_IMPUTED_COLUMNS]
    for number in (*limits, model_file.MOST_CONTAINERS):
        assert f"| {number:,}" in PAGE or f", {number:,}" in PAGE
    assert f"{model_file.LARGEST_HEADER >> 20} MiB" in PAGE
    assert f"| powers in a formula | {grammar.MOST_POWER} |" in PAGE
    formats = [int(number) for number in re.findall(r"^\| (\d+) \| .*version", PAGE, re.MULTILINE)]
    assert formats == [*range(1, model_file.FORMAT_VERSION + 1)]
