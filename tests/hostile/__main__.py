"""Runs hostile cases and prints a table of their outcomes: `python -m hostile [KIND ...] [-n COUNT] [--seed FIRST]`."""

import argparse
import importlib
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from hostile.harness import GOOD, heading, run_cases

COUNTS = {  # cases of `make hostile`
    "models": 10_000,
    "tables": 5_000,
    "formulas": 5_000,
    "designs": 1_000,
    "reports": 300,
    "kills": 500,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="hostile")
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(COUNTS)}; all by default")
    parser.add_argument("-n", type=int, default=None, help="number of cases of each kind")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the usual numbers of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--json", type=Path, default=None, help="file for the faults")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tallies = []
    print(heading())
    for kind in options.kinds or COUNTS:
        count = options.n or max(1, round(options.scale * COUNTS[kind]))
        with tempfile.TemporaryDirectory() as folder:
            module = importlib.import_module(f"hostile.{kind}")
            tally = run_cases(module, Path(folder), range(options.seed, options.seed + count), options.workers)
        print(tally.row, flush=True)
        tallies.append(tally)
    for tally in tallies:
        for (outcome, detail), number in Counter((x["outcome"], x["detail"]) for x in tally.faults).most_common(40):
            seed = next(x["seed"] for x in tally.faults if (x["outcome"], x["detail"]) == (outcome, detail))
            print(f"{tally.name} {outcome}, {number} times, first with seed {seed}: {detail}")
    if options.json is not None:
        options.json.write_text(json.dumps({tally.name: tally.faults for tally in tallies}, indent=1))
    return int(any(outcome not in GOOD for tally in tallies for outcome in tally.counts))


if __name__ == "__main__":
    sys.exit(main())
