"""Rows larger than memory: time per row and peak memory of a fit, by where the rows are kept.

Every kind is measured in its own process. The files lie in a temporary directory (TMPDIR); ten million rows need 5 GB,
and while rows are kept in a file, 2 GB more.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table import Table, machine

FEATURES = 25
FILE_ROWS = 1_000_000
REPEATS = 3
IN_MEMORY, MAP, CSV, BY_PYARROW = "in memory", "memory map", "CSV", "CSV, by pyarrow.csv.read_csv"
KEPT, IN_FILE, READ_AGAIN = "Parquet, kept in memory", "Parquet, kept in a file", "Parquet, read again"
MANY, FEW = 10_000_000, 4_000_000
FULL_ROWS = {
    IN_MEMORY: FEW,
    MAP: MANY,
    KEPT: FEW,
    IN_FILE: MANY,
    READ_AGAIN: MANY,
    CSV: 1_000_000,
    BY_PYARROW: 1_000_000,
}
QUICK_ROWS = dict.fromkeys(FULL_ROWS, 400_000) | {CSV: 100_000, BY_PYARROW: 100_000}


def run(quick: bool, device: str) -> Table:
    sizes = QUICK_ROWS if quick else FULL_ROWS
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder), max(sizes.values()), sizes[CSV])
        results = {kind: measure_in_own_process(kind, folder, rows) for kind, rows in sizes.items()}
    base = results[IN_MEMORY]["seconds"] / sizes[IN_MEMORY]
    rows = []
    for kind, x in results.items():
        each = x["seconds"] / sizes[kind]
        rows.append([kind, sizes[kind], x["seconds"], 1e6 * each, each / base, x["passes"], x["peak"], x["before"]])
    names = ["rows kept", "rows", "processor seconds", "µs per row", "ratio", "passes", "peak MB", "before MB"]
    notes = [
        f"Full covariance, {FEATURES} features of float64 and an intercept; files in the page cache. Seconds of "
        f"processor time, of all threads together, the least of {REPEATS} fits, one after the other: a virtual machine "
        "that hands freed memory back to its host takes up to thirty times as long to touch new memory for the first "
        "time. Ratio: time per row to that in memory. Peak resident memory of the process, and what it was before the "
        "fits. The last row reads a table with pyarrow.csv.read_csv, copies its columns into a matrix and fits that.",
        machine("cpu"),
    ]
    return Table("Rows larger than memory", names, rows, notes)


def write_rows(folder: Path, rows: int, csv_rows: int) -> None:
    """Write the same rows as X.npy and y.npy, and as Parquet files; the first of them also as a CSV file."""
    import pyarrow
    import pyarrow.csv as csv
    import pyarrow.parquet as parquet

    beta = np.random.default_rng(0).uniform(-1, 1, FEATURES)
    X = np.lib.format.open_memmap(folder / "X.npy", "w+", np.float64, (rows, FEATURES))
    y = np.lib.format.open_memmap(folder / "y.npy", "w+", np.int8, (rows,))
    for i, start in enumerate(range(0, rows, FILE_ROWS)):
        rng = np.random.default_rng(i + 1)
        part = slice(start, min(rows, start + FILE_ROWS))
        A = rng.standard_normal((part.stop - start, FEATURES))
        X[part], y[part] = A, rng.random(len(A)) < 1 / (1 + np.exp(-A @ beta - 0.2))
        table = pyarrow.table({**{f"x{j}": A[:, j] for j in range(FEATURES)}, "y": y[part]})
        parquet.write_table(table, folder / f"{i:04d}.parquet", use_dictionary=False)
        if not i:
            csv.write_csv(table[:csv_rows], folder / "rows.csv")


def measure_in_own_process(kind: str, folder: str, rows: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.scaling", kind, folder, str(rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def measure_fit(kind: str, folder: Path, rows: int) -> dict[str, float]:
    """Fit the first rows; return seconds of all threads together, passes over the rows, and memory."""
    import viper
    from viper.data import kept

    if kind == IN_FILE:
        kept.SHARE_FOR_CACHE = 0.0
    open_rows = opener(kind, folder, rows)
    model = viper.VariationalLogisticRegression(random_state=0)
    model.fit(np.eye(FEATURES), np.arange(FEATURES) % 2)  # loads what is loaded at first use
    before, seconds = peak_memory(), []
    for _ in range(REPEATS):
        start = time.process_time()
        model.fit(*open_rows())
        seconds.append(time.process_time() - start)
    return {"seconds": min(seconds), "passes": model.passes_, "peak": peak_memory(), "before": before}


def opener(kind: str, folder: Path, rows: int) -> Callable[[], tuple[Any, ...]]:
    """Return a function that opens the rows; what it does counts as part of the fit."""
    import viper

    mapped = tuple(np.load(folder / name, mmap_mode="r")[:rows] for name in ("X.npy", "y.npy"))
    if kind in (IN_MEMORY, MAP):
        source = tuple(np.array(x) for x in mapped) if kind == IN_MEMORY else mapped
        return lambda: source
    if kind == BY_PYARROW:
        return lambda: read_csv(folder / "rows.csv")
    files = [folder / "rows.csv"] if kind == CSV else sorted(folder.glob("*.parquet"))[: -(-rows // FILE_ROWS)]
    return lambda: (viper.Files(files, target="y", cache=0 if kind == READ_AGAIN else None),)


def read_csv(path: Path) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow.csv as csv

    table = csv.read_csv(path)
    return np.column_stack([table[f"x{j}"].to_numpy() for j in range(FEATURES)]), table["y"].to_numpy()


def peak_memory() -> float:
    """Largest resident memory of this process so far, in MB; on Linux `ru_maxrss` would include its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text(encoding="utf-8").splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


if __name__ == "__main__":
    print(json.dumps(measure_fit(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
