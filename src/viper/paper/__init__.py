"""The paper, reproduced: every figure and table, with the published value and the exact answer beside ours.

    run → runs.csv → tables → figures

`reproduce("logistic")` does all four and each can be repeated alone. Everything of an artefact lies in its own folder:
`runs.csv` (one row per run and method, appended as runs finish), `runs.json` (the configuration they were made with),
tables as CSV, Markdown and LaTeX, figures as PNG and PDF. An interrupted study goes on where it stopped.

To add an artefact, write a module with a list ARTEFACTS of `viper.paper.artefact.Artefact` values (its docstring says
what each field is for; bounds.py is a small example) and name the module in MODULES below.
"""

import sys
from importlib import import_module
from pathlib import Path

from viper.errors import Unavailable
from viper.paper.artefact import Artefact, Request
from viper.paper.pipeline import STEPS, Outcome, reproduce_one

__all__ = ["Artefact", "Outcome", "Unavailable", "artefacts", "reproduce"]

MODULES = ["bounds", "acceleration", "logistic", "toy", "soil", "public", "scaling"]


def artefacts() -> list[Artefact]:
    """Everything that can be reproduced, in the order of the paper."""
    return [artefact for name in MODULES for artefact in import_module(f"viper.paper.{name}").ARTEFACTS]


def reproduce(
    artefact: str,
    *,
    runs: int | None = None,
    jobs: int = 1,
    out: Path = Path("results"),
    seed: int = 1,
    quick: bool = False,
    data: Path | None = None,
    step: str | None = None,
) -> list[Outcome]:
    """Reproduce one artefact of the paper, or all of them.

    Parameters
    ----------
    artefact : str
        A name from `artefacts()`, or "all".
    runs : int, optional
        Number of runs (seeds) of a simulation; by default as many as in the paper. More can be added later.
    jobs : int, default 1
        Processes; -1 for one per core. Where a Dask client is active, its cluster does the work.
    out : Path, default "results"
        Where to write: a folder per artefact.
    seed : int, default 1
        The first seed; the published runs used 1 to 100.
    quick : bool, default False
        A small version of everything, in `out`/quick: to see that it works, in about a minute.
    data : Path, optional
        Folder with data files that are not generated.
    step : {"run", "table", "figure"}, optional
        One step alone; tables and figures are made from the runs there are.

    Returns
    -------
    list of Outcome
        For each artefact its tables and the files written.
    """
    known = {one.name: one for one in artefacts()}
    if artefact != "all" and artefact not in known:
        raise ValueError(f"artefact must be 'all' or one of {list(known)}; got {artefact!r}.")
    if step is not None and step not in STEPS:
        raise ValueError(f"step must be one of {list(STEPS)}; got {step!r}. Leave it out for all of them.")
    for name, number in (("runs", runs), ("jobs", jobs)):
        if number is not None and number < 1 and not (name == "jobs" and number == -1):
            raise ValueError(f"{name} must be at least 1; got {number}.")
    request = Request(runs, seed, quick, data)
    folder = Path(out) / "quick" if quick else Path(out)
    if artefact != "all":
        return [reproduce_one(known[artefact], request, jobs, folder, step)]
    return [one_of_all(one, request, jobs, folder, step) for one in known.values()]


def one_of_all(one: Artefact, request: Request, jobs: int, folder: Path, step: str | None) -> Outcome:
    """Like `reproduce_one`, but an artefact that needs what is not there is skipped, with the reason."""
    try:
        return reproduce_one(one, request, jobs, folder, step)
    except (ImportError, Unavailable) as error:
        print(f"{one.name} is skipped: {error}", file=sys.stderr)
        return Outcome(one.name, skipped=str(error))
