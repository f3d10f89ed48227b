"""Run the benchmarks named on the command line, or all of them.

A benchmark is a module in this folder with a function `run(quick, device)` that returns a table or a page of tables.
"""

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NOT_BENCHMARKS = {"__init__", "__main__", "table", "runs", "peers"}


def main() -> None:
    names = sorted(path.stem.replace("_", "-") for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(names)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works; writes no results")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--data", help="folder of the data sets for gp and gp-quality, with a NAME.csv.gz in each")
    parser.add_argument(
        "--scratch", help="gp-quality, asking, experiments: folder of finished parts (default: results/NAME)"
    )
    parser.add_argument(
        "--methods", help="gp-quality, experiments: run only these, separated by ';'; '' only makes the tables"
    )
    parser.add_argument("--splits", type=int, help="gp-quality: random splits of each data set (default: 10)")
    parser.add_argument("--seeds", type=int, help="asking, experiments: seeds of each row (default: 10, 20)")
    parser.add_argument("--coverage", action="store_true", help="gp-quality: run only the coverage simulations")
    parser.add_argument("--tables", help="asking, logistic, mixed, networks: only tables of these titles, between ';'")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"name must be one of {names}; got {sorted(unknown)}")
    own: dict[str, dict[str, Any]] = {
        "asking": {name: getattr(options, name) for name in ("tables", "scratch", "seeds")},
        "gp": {"data": options.data},
        "logistic": {"tables": options.tables},
        "mixed": {"tables": options.tables},
        "experiments": {name: getattr(options, name) for name in ("scratch", "methods", "seeds")},
        "networks": {"tables": options.tables},
        "gp-quality": {name: getattr(options, name) for name in ("data", "scratch", "methods", "splits", "coverage")},
    }
    for name in options.names or names:
        module = name.replace("-", "_")
        table = import_module(f"benchmarks.{module}").run(
            quick=options.quick, device=options.device, **own.get(name, {})
        )
        print(table.text())
        if not options.quick:
            table.write(HERE / "results", module if options.device == "cpu" else f"{module}_{options.device}")


if __name__ == "__main__":
    main()
