"""The paper, reproduced: every figure and table, with the published value and the exact answer beside ours.

    run → runs.csv → tables → figures

`reproduce("logistic")` does all four, and each step can be repeated alone. Every artefact has its own folder:
`runs.csv` (one row per run and method, appended as runs finish), `runs.json` (the configuration of these runs),
tables as CSV, Markdown and LaTeX, figures as PNG and PDF. An interrupted study continues where it stopped.

To add an artefact, write a subclass of `viper.paper.artefact.Artefact` (acceleration.py is a small example) and list it
in `artefacts` below.
"""

import sys
from pathlib import Path

from viper.errors import Unavailable
from viper.paper.artefact import Artefact, Request
from viper.paper.pipeline import STEPS, Outcome, reproduce_one

__all__ = ["Artefact", "Outcome", "Unavailable", "artefacts", "reproduce"]


def artefacts() -> list[Artefact]:
    """Everything that can be reproduced, in the order of the paper."""
    from viper.paper.acceleration import Acceleration
    from viper.paper.bounds import Figure1, RelativeErrors, TermsNeeded
    from viper.paper.logistic import LogisticMCMC, LogisticStudy, LogisticText
    from viper.paper.public import PublicSets
    from viper.paper.scaling import ElboByTerms, Runtime
    from viper.paper.soil import Soil
    from viper.paper.toy import ToyExample

    bounds = [Figure1(), RelativeErrors(), TermsNeeded(), Acceleration()]
    logistic = [LogisticMCMC(), LogisticStudy(), LogisticText()]
    return [*bounds, *logistic, ToyExample(), Soil(), PublicSets(), Runtime(), ElboByTerms()]


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
        Number of processes; -1 for one per core. If a Dask client is active, its cluster does the work.
    out : Path, default "results"
        Where to write: one folder per artefact.
    seed : int, default 1
        The first seed; the published runs used 1 to 100.
    quick : bool, default False
        Make a small version of everything in `out`/quick, to check in about a minute that it works.
    data : Path, optional
        Folder with data files that are not generated.
    step : {"run", "table", "figure"}, optional
        Do only this step; tables and figures use the finished runs.

    Returns
    -------
    list of Outcome
        The tables and the files written, for each artefact.
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
    return [reproduce_or_skip(one, request, jobs, folder, step) for one in known.values()]


def reproduce_or_skip(artefact: Artefact, request: Request, jobs: int, folder: Path, step: str | None) -> Outcome:
    """Like `reproduce_one`, but skips an artefact whose packages or data are missing, and says why."""
    try:
        return reproduce_one(artefact, request, jobs, folder, step)
    except (ImportError, Unavailable) as error:
        print(f"{artefact.name} is skipped: {error}", file=sys.stderr)
        return Outcome(artefact.name, skipped=str(error))
