"""Run the benchmarks named on the command line, or all of them.

A benchmark is a module in this folder with a function `run(quick, device)` that returns a table or a page of tables.
"""

import argparse
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).parent
NOT_BENCHMARKS = {"__init__", "__main__", "table", "peers"}


def main() -> None:
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(names)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; no results are kept")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--data", help="folder with the data sets for gp, each in its own folder as NAME.csv.gz")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"name must be one of {names}; got {sorted(unknown)}")
    for name in options.names or names:
        extra = {"data": options.data} if name == "gp" else {}
        table = import_module(f"benchmarks.{name}").run(quick=options.quick, device=options.device, **extra)
        print(table.text())
        if not options.quick:
            table.write(HERE / "results", name if options.device == "cpu" else f"{name}_{options.device}")


if __name__ == "__main__":
    main()
