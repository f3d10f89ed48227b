"""Finished runs, kept as JSON lines, so that a benchmark continues where it was interrupted."""

import json
from pathlib import Path
from typing import Any


def read_runs(file: Path) -> list[dict[str, Any]]:
    """The runs in a file, if it exists, without a line that an interruption cut short."""
    runs = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            runs.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return runs
