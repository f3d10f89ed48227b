"""`viper reproduce`: the paper's tables and figures, from this code."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from viper.cli import options

EXAMPLES = ["viper reproduce", "viper reproduce figure-1 --quick", "viper reproduce all --jobs 4 --out results"]


def reproduce(
    artefact: Annotated[
        str | None, typer.Argument(help="Its name, or all; without one, the list of them.", show_default=False)
    ] = None,
    runs: Annotated[int | None, typer.Option(help="Repetitions. (default: the paper's)", min=1)] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Processes; -1 for one per core.", min=-1)] = 1,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for results.")] = Path("results"),
    seed: options.Seed = 1,
    quick: Annotated[bool, typer.Option("--quick", help="A small version, in seconds.")] = False,
    data: Annotated[Path | None, typer.Option(help="Folder with the paper's data sets.", show_default=False)] = None,
    step: Annotated[str | None, typer.Option(help="Only this step: run, table or figure.", show_default=False)] = None,
    listed: Annotated[bool, typer.Option("--list", help="Only list the artefacts.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compute a table or figure of the paper again."""
    try:
        from viper import paper
    except ImportError as error:
        raise ImportError(
            f"the paper's artefacts need more packages: {error}. Run: pip install 'vi-per[all]'"
        ) from None
    from rich.markup import escape

    from viper.cli.terminal import emit, grid, number, say, show

    known = list(paper.artefacts())
    if artefact is None or listed:
        if as_json:
            emit([{key: str(getattr(one, key)) for key in ("name", "what", "where", "minutes")} for one in known])
            return
        rows = [[one.name, one.what, str(one.where), number(float(one.minutes), 1)] for one in known]
        show(grid(["artefact", "what", "in the paper", "minutes"], rows, left=3, longest=60))
        return
    names = [one.name for one in known]
    if artefact not in (*names, "all"):
        import difflib

        near = difflib.get_close_matches(artefact, names, 1, 0.6)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(names)}."
        raise ValueError(f"the artefact must be one of the paper's; got {artefact!r}. {hint}")
    given: dict[str, Any] = {
        "runs": runs,
        "jobs": jobs,
        "out": out,
        "seed": seed,
        "quick": quick,
        "data": data,
        "step": step,
    }
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        outcomes = paper.reproduce(artefact, **given)
    if as_json:
        emit([summary_of(outcome) for outcome in outcomes])
        return
    for outcome in outcomes:
        if outcome.skipped is None:
            say(f"[bold]{outcome.artefact}[/]: {outcome.made} runs made, {outcome.runs} in all")
            for file in outcome.files:
                say(f"  {escape(str(file))}")


def summary_of(outcome: Any) -> dict[str, Any]:
    """An outcome as JSON, by its files."""
    plain = {name: getattr(outcome, name) for name in ("artefact", "made", "runs", "skipped")}
    return {**plain, "files": [str(file) for file in outcome.files]}
