"""The commands about the paper: `viper bound`, its expected softplus, and `viper reproduce`, its tables and figures."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from viper.cli import options
from viper.cli.terminal import print_json, print_table, say, short_number


def compare_bounds(
    mean: Annotated[float, typer.Option(help="Mean of X.", show_default=False)],
    sd: Annotated[float, typer.Option(help="Standard deviation of X.", show_default=False)],
    terms: Annotated[
        list[int] | None, options.optional("Number of terms l of the paper's bound. Repeat for more. (default: 5, 12)")
    ] = None,
    samples: Annotated[int, typer.Option(help="Number of Monte Carlo samples.", min=2)] = 1000,
    nodes: Annotated[int, typer.Option(help="Number of Gauss-Hermite nodes.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the Monte Carlo samples.")] = 1,
    as_json: options.Json = False,
) -> None:
    """Compute the expected softplus E log(1+e^X), X ~ N(mean, sd²), its derivatives, and the gap of every bound.

    Examples
    --------
    viper bound --mean 1 --sd 2
    viper bound --mean 0 --sd 0.1 --terms 12 --json
    """
    if sd < 0:
        raise typer.BadParameter(f"--sd must not be negative; got {sd:g}")
    from viper import expected_sigmoid, expected_softplus, terms_needed

    variance = sd * sd
    ways: dict[str, dict[str, Any]] = {"exact": {}, "certified above": {"bound": "certified"}}
    ways |= {f"paper's bound, l = {l}": {"terms": l} for l in terms or (5, 12)}
    ways |= {"Jaakkola-Jordan (Pólya-Gamma)": {"bound": "pg"}}
    ways |= {f"Gauss-Hermite, {nodes} nodes": {"bound": "quadrature", "nodes": nodes}}
    ways |= {f"Monte Carlo, {samples} samples": {"bound": "mc", "samples": samples, "random_state": seed}}
    found = {name: expected_softplus(mean, variance, **options) for name, options in ways.items()}
    exact = found["exact"].value
    rows: list[dict[str, Any]] = [
        {"method": name, **{key: float(x) for key, x in value._asdict().items()}, "gap": float(value.value - exact)}
        for name, value in found.items()
    ]
    probability = expected_sigmoid(mean, variance)
    document = {
        "mean": mean,
        "sd": sd,
        "methods": rows,
        "probability": {"mean": float(probability.mean), "sd": float(probability.std)},
        "terms_for_1_percent": int(terms_needed(mean, variance, 0.01)),
    }
    if as_json:
        print_json(document)
        return
    say(f"[bold]E log(1+eˣ)[/] for X ~ N({mean:g}, {sd:g}²) is [bold green]{exact:.15g}[/]")
    digits = lambda x: short_number(x, 8)  # noqa: E731
    cells = [
        [row["method"], f"{row['value']:.12g}", f"{row['gap']:+.1e}", digits(row["slope"]), digits(row["curvature"])]
        for row in rows
    ]
    print_table(["", "value", "gap", "∂/∂mean", "2 ∂/∂variance"], cells)
    above = found["certified above"].value - exact
    say(f"Certificate: the true value is proven to lie below the second line, which is {above:.0e} above the first.")
    say(f"The probability s(X) has mean {digits(float(probability.mean))} and sd {digits(float(probability.std))}.")
    say(f"The paper's bound is within 1 % from l = {document['terms_for_1_percent']:,} terms on.")


def reproduce_artefact(
    artefact: Annotated[
        str | None, typer.Argument(help="Name of a table or figure, or all. (default: list them)", show_default=False)
    ] = None,
    runs: Annotated[int | None, options.optional("Number of runs. (default: as many as in the paper)", min=1)] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Number of processes; -1 for one per core.", min=-1)] = 1,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write results to.")] = Path("results"),
    seed: Annotated[int, typer.Option(help="Seed of the first run; the others count up from it.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Make a small version, in --out/quick.")] = False,
    data: Annotated[Path | None, options.optional("Folder with the data sets that are not generated.")] = None,
    step: Annotated[str | None, options.optional("Do one step only: run, table or figure. (default: all)")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the tables and figures, and stop.")] = False,
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
            say(f"[bold]{one.artefact}[/]: {one.made} runs made, {one.runs} in all")
            for file in one.files:
                say(f"  {escape(str(file))}")


def list_artefacts(known: list[Any], as_json: bool) -> None:
    if as_json:
        print_json([{key: str(getattr(one, key)) for key in ("name", "what", "where", "minutes")} for one in known])
        return
    rows = [[one.name, one.what, str(one.where), short_number(float(one.minutes), 1)] for one in known]
    print_table(["artefact", "what", "in the paper", "minutes"], rows, left=3, longest=60)
