"""`viper reproduce`: compute the paper's tables and figures."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from viper.cli import options
from viper.cli.terminal import print_json, print_table, say, short_number


def reproduce_artefact(
    artefact: Annotated[
        str | None, typer.Argument(help="Name of a table or figure, or all. (default: list them)", show_default=False)
    ] = None,
    runs: Annotated[int | None, options.optional("Number of runs. (default: as many as in the paper)", min=1)] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Number of processes; -1 for one per core.", min=-1)] = 1,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write results to.")] = Path("results"),
    seed: Annotated[int, typer.Option(help="Seed of the first run; the others count up from it.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Make a small version, in the folder quick of --out.")] = False,
    data: Annotated[Path | None, options.optional("Folder with the data sets that cannot be generated.")] = None,
    step: Annotated[str | None, options.optional("Take only one step: run, table or figure. (default: all)")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the tables and figures, and exit.")] = False,
    as_json: options.Json = False,
) -> None:
    """Reproduce a table or figure of the paper: do its runs, then write the table or figure.

    Finished runs are kept; an interrupted command continues where it stopped.

    Examples
    --------
    viper reproduce
    viper reproduce figure-1 --quick
    viper reproduce all --jobs 4 --out results
    """
    try:
        from viper import paper
    except ImportError as error:
        raise ImportError(
            f"the paper's artefacts need more packages: {error}. Run: pip install 'vi-per[all]'"
        ) from None
    from viper.data.writing import make_folder
    from viper.errors import instead

    known = list(paper.artefacts())
    if artefact is None or listed:
        list_artefacts(known, as_json)
        return
    names = [one.name for one in known]
    if artefact not in (*names, "all"):
        raise ValueError(f"the artefact must be one of the paper's; got {artefact!r}. {instead(artefact, names)}")
    make_folder(out, "--out")
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        outcomes = paper.reproduce(
            artefact, runs=runs, jobs=jobs, out=out, seed=seed, quick=quick, data=data, step=step
        )
    if as_json:
        keys = ("artefact", "made", "runs", "skipped", "files")
        print_json([{key: getattr(one, key) for key in keys} for one in outcomes])
        return
    for one in outcomes:
        if one.skipped is None:
            say(f"[bold]{one.artefact}[/]: {one.made} run{'s' * (one.made != 1)} made, {one.runs} in all")
            for file in one.files:
                say(f"  {escape(str(file))}")


def list_artefacts(known: list[Any], as_json: bool) -> None:
    if as_json:
        print_json([{key: str(getattr(one, key)) for key in ("name", "what", "where", "minutes")} for one in known])
        return
    rows = [[one.name, one.what, str(one.where), short_number(float(one.minutes), 1)] for one in known]
    print_table(["artefact", "what", "in the paper", "minutes"], rows, left=3, longest=60)
