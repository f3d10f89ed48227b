"""`viper bound`: the expected softplus E[log(1+e^X)] by every method."""

from typing import Annotated, Any

import typer

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
    ways: dict[str, dict[str, Any]] = {"exact": {}, "certified upper bound": {"bound": "certified"}}
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
    above = found["certified upper bound"].value - exact
    say(f"Certificate: the true value provably lies below the second line, which is {above:.0e} above the first.")
    say(f"The probability s(X) has mean {digits(float(probability.mean))} and sd {digits(float(probability.std))}.")
    say(f"The paper's bound is within 1 % with l = {document['terms_for_1_percent']:,} terms or more.")
