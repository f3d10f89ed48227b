"""runs.csv and runs.json: finished runs, kept whatever happens to the process that does them.

A run is appended in one write, followed by fsync. Its rows are numbered (1/9 … 9/9), so that a run torn by a power cut
is noticed when the file is next opened, and is repeated.
"""

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from viper.data.writing import atomic_file
from viper.paper.artefact import Artefact, Config, Job, Row

if TYPE_CHECKING:
    import pandas

ADDED = ("seconds", "versions", "part")  # columns of every artefact, after its own
CSV_DIGITS = 10  # significant: a hundred thousand times finer than any Monte Carlo error in the file

Key = tuple[str, ...]


class Records:
    """The finished runs of one artefact in its folder."""

    def __init__(self, folder: Path, artefact: Artefact) -> None:
        self.folder, self.artefact = folder, artefact
        self.csv, self.json = folder / "runs.csv", folder / "runs.json"
        self.header = [*artefact.keys, *artefact.columns, *ADDED]

    # --- writing ---

    @contextmanager
    def open(self, config: Config) -> Iterator[set[Key]]:
        """Lock the folder, check the configuration and repair the file; yield the keys of the finished runs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(self.folder):
            self.check(config)
            yield self.repair()

    def check(self, config: Config) -> None:
        """Write the configuration, or compare it with that of the existing runs."""
        text = json.dumps({"artefact": self.artefact.name, "columns": self.header, **config}, indent=2) + "\n"
        if not self.csv.exists():
            with atomic_file(self.json, overwrite=True) as file:
                file.write(text.encode())
            return
        old = json.loads(self.json.read_text(encoding="utf-8")) if self.json.exists() else {}
        new = json.loads(text)
        if differing := sorted(name for name in {*old, *new} if old.get(name) != new.get(name)):
            first = differing[0]
            raise ValueError(
                f"runs in one file must share a configuration; got {first} = {new.get(first)!r} where {self.csv} was "
                f"made with {old.get(first)!r}. Choose another --out, or delete that folder to start over."
            )

    def repair(self) -> set[Key]:
        """Drop torn runs and return the keys of the finished ones."""
        if not self.csv.exists():
            return set()
        text = self.csv.read_bytes()
        runs = self.finished(text)
        whole = self.lines(row for rows in runs.values() for row in rows)
        if whole != text:
            with atomic_file(self.csv, overwrite=True) as file:
                file.write(whole)
        return set(runs)

    def finished(self, text: bytes) -> dict[Key, list[list[str]]]:
        """The complete runs in a file's text, in the order of their first rows."""
        whole = text[: text.rfind(b"\n") + 1].decode()
        runs: dict[Key, list[list[str]]] = {}
        for row in list(csv.reader(io.StringIO(whole)))[1:]:
            if len(row) == len(self.header):
                runs.setdefault(tuple(row[: len(self.artefact.keys)]), []).append(row)
        return {key: rows for key, rows in runs.items() if [row[-1] for row in rows] == part_labels(len(rows))}

    def lines(self, rows: Iterator[Sequence[str]], header: bool = True) -> bytes:
        """Rows as CSV."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        if header:
            writer.writerow(self.header)
        writer.writerows(rows)
        return buffer.getvalue().encode()

    def key(self, job: Job) -> Key:
        """What identifies a job among the finished runs."""
        return tuple(csv_cell(job[name]) for name in self.artefact.keys)

    def append(self, job: Job, rows: Sequence[Row], seconds: float, versions: str) -> None:
        """Add a finished run."""
        numbered = zip(rows, part_labels(len(rows)), strict=True)
        added = [[*self.key(job), *self.cells(row), csv_cell(seconds), versions, part] for row, part in numbered]
        content = self.lines(iter(added), header=not self.csv.exists())
        with self.csv.open("ab") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def cells(self, row: Row) -> list[str]:
        if unknown := {*row} - {*self.artefact.columns}:
            raise ValueError(f"rows of {self.artefact.name} must have the columns it declares; got {sorted(unknown)}.")
        return [csv_cell(row.get(name)) for name in self.artefact.columns]

    # --- reading ---

    def count(self) -> int:
        """The number of finished runs."""
        return len(self.finished(self.csv.read_bytes())) if self.csv.exists() else 0

    def config(self) -> Config:
        """The configuration of the existing runs."""
        read: Config = json.loads(self.json.read_text(encoding="utf-8"))
        return read

    def frame(self) -> "pandas.DataFrame":
        """All finished runs; empty if there are none."""
        import pandas

        content = self.csv.read_bytes() if self.csv.exists() else b""
        rows = self.lines(row for rows in self.finished(content).values() for row in rows)
        return pandas.read_csv(io.BytesIO(rows))


def part_labels(count: int) -> list[str]:
    return [f"{i}/{count}" for i in range(1, count + 1)]


def csv_cell(value: Any) -> str:
    """A value as text: numbers to ten digits, None as the empty string."""
    if value is None:
        return ""
    if isinstance(value, str | bool | int):
        return str(value)
    return f"{float(value):.{CSV_DIGITS}g}"


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder. The lock is released when its owner ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RuntimeError(
            f"one process at a time may write to a folder; got a second for {folder}. Wait for the first."
        ) from error
    else:
        yield
    finally:
        os.close(descriptor)
