"""Rows larger than memory: time per row and peak memory of a fit, by where the rows are kept.

Every fit runs in its own process. The files lie in a temporary directory (TMPDIR); twenty million rows need 9 GB.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.table import Table, machine

FEATURES = 25
FILE_ROWS = 1_000_000
KEPT, READ_AGAIN = "Parquet, kept", "Parquet, read again"
CACHES = {KEPT: None, READ_AGAIN: 0}  # of viper.Files
FULL_ROWS = {"in memory": 4_000_000, "memory map": 20_000_000, KEPT: 4_000_000, READ_AGAIN: 20_000_000}
QUICK_ROWS = {"in memory": 200_000, "memory map": 400_000, KEPT: 400_000, READ_AGAIN: 400_000}


def run(quick: bool, device: str) -> Table:
    sizes = QUICK_ROWS if quick else FULL_ROWS
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder), max(sizes.values()))
        results = {kind: measure_in_own_process(kind, folder, rows) for kind, rows in sizes.items()}
    base = results["in memory"]["seconds"] / sizes["in memory"]
    rows = []
    for kind, x in results.items():
        each = x["seconds"] / sizes[kind]
        rows.append([kind, sizes[kind], x["seconds"], 1e6 * each, each / base, x["passes"], x["peak"], x["before"]])
    names = ["rows kept", "rows", "processor seconds", "µs per row", "ratio", "passes", "peak MB", "before MB"]
    notes = [
        f"Full covariance, {FEATURES} features of float64 and an intercept; files in the page cache. Seconds of "
        "processor time, of all threads together. Ratio: time per row to that in memory. Peak resident memory of the "
        "process, and what it was before the fit. Rows of Parquet files are kept if they fit in a quarter of the "
        "available memory, and otherwise decoded in every pass.",
        machine("cpu"),
    ]
    return Table("Rows larger than memory", names, rows, notes)


def write_rows(folder: Path, rows: int) -> None:
    """Write the same rows as X.npy and y.npy, and as Parquet files."""
    import pyarrow
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


def measure_in_own_process(kind: str, folder: str, rows: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.scaling", kind, folder, str(rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def measure_fit(kind: str, folder: Path, rows: int) -> dict[str, float]:
    """Fit the first rows once; return seconds of all threads together, passes over the rows, and memory."""
    import viper

    source = (np.load(folder / "X.npy", mmap_mode="r")[:rows], np.load(folder / "y.npy", mmap_mode="r")[:rows])
    if kind == "in memory":
        source = tuple(np.array(x) for x in source)
    elif kind in CACHES:
        files = sorted(folder.glob("*.parquet"))[: -(-rows // FILE_ROWS)]
        source = (viper.Files(files, target="y", cache=CACHES[kind]),)
    model = viper.VariationalLogisticRegression(random_state=0)
    model.fit(np.eye(FEATURES), np.arange(FEATURES) % 2)  # loads what is loaded at first use
    before, start = peak_memory(), time.process_time()
    model.fit(*source)
    return {"seconds": time.process_time() - start, "passes": model.passes_, "peak": peak_memory(), "before": before}


def peak_memory() -> float:
    """Largest resident memory of this process so far, in MB; on Linux `ru_maxrss` would include its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text(encoding="utf-8").splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


if __name__ == "__main__":
    print(json.dumps(measure_fit(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
