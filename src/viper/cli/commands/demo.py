"""`viper demo`: posteriors on real data, where they are unsure and why, with a report and pictures."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.markup import escape

import viper
from viper.cli.terminal import say

if TYPE_CHECKING:
    import pandas

    from viper.models.prediction import Predictions

MAP_COLUMNS = ["concave points", "radius"]  # what the Gaussian process sees: two, so that it can be drawn as a map
TUMOUR_CLASS = "diagnosis"  # the target


def run_demo(
    folder: Annotated[
        Path, typer.Option("--folder", "-o", help="Folder for the report and the pictures; created if missing.")
    ] = Path(),
) -> None:
    """Fit models to real data, show where they are sure and where they are not, and write a report and pictures.

    The files are report.html, posterior.png and bound.png; those of an earlier run are replaced.

    Examples
    --------
    viper demo
    viper demo --folder pictures
    """
    from importlib.util import find_spec

    from viper.data.writing import make_folder
    from viper.errors import OutputError, StorageError

    if find_spec("matplotlib") is None:
        raise ImportError("viper demo needs matplotlib. Run: pip install 'vi-per[plot]'")
    make_folder(folder, "--folder")
    import torch
    from rich.console import Console

    console = Console(highlight=False)
    torch.set_num_threads(1)  # with so little work, more threads are slower
    with console.status("Fitting"):
        tumours = load_tumours()
        logistic = timed_fit(viper.VariationalLogisticRegression, tumours, tumours.columns, prior_scale="auto")
        process = timed_process(console, tumours)
    chapters = {
        "Breast cancer: is a tumour malignant?": score_table(tumours, logistic, process),
        "What drives it": odds_table(logistic.model),
        "Where the interval is wide, and why": tell_twins_apart(tumours, logistic),
        "Can the posterior be trusted?": str(logistic.model.diagnose()),
        "The expected softplus, by different methods": bound_table(),
    }
    for heading, content in chapters.items():
        console.print()
        console.rule(f"[bold]{heading}", align="left", style="cyan")
        console.print(content)
    pictures = folder / "posterior.png", folder / "bound.png"
    with console.status("Drawing"):
        draw_posteriors(tumours, logistic, process, pictures[0])
        draw_bounds(pictures[1])
        page = folder / "report.html"
        try:
            viper.report.write(logistic.model, tumours.test, TUMOUR_CLASS, page, overwrite=True, held_out=True)
        except StorageError as error:
            raise OutputError(str(error)) from None
    say(
        f"\nOpen [bold]{escape(str(page))}[/bold] in a browser to explore the numbers above.\n"
        f"The pictures are {escape(f'{pictures[0]} and {pictures[1]}')}."
    )


# --- data and models ---


class Tumours(NamedTuple):
    """Wisconsin breast cancer: 569 tumours, ten measurements averaged over cells; a third is held out."""

    columns: list[str]
    train: "pandas.DataFrame"
    test: "pandas.DataFrame"


def load_tumours() -> Tumours:
    import numpy as np
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    frame, benign = load_breast_cancer(return_X_y=True, as_frame=True)
    frame = frame.filter(like="mean ").rename(columns=lambda name: name.removeprefix("mean "))
    label = np.where(benign, "benign", "malignant")
    train, test, own, other = train_test_split(frame, label, test_size=0.33, random_state=0, stratify=label)
    return Tumours(list(frame.columns), train.assign(**{TUMOUR_CLASS: own}), test.assign(**{TUMOUR_CLASS: other}))


class TimedFit(NamedTuple):
    model: Any
    columns: list[str]
    seconds: float


def timed_fit(estimator: Any, tumours: Tumours, columns: list[str], **options: Any) -> TimedFit:
    """Fit by a formula, which standardises inside the model: everything shown is in the units of the table."""
    formula = f"{TUMOUR_CLASS} ~ {' + '.join(f'`{name}`' for name in columns)}"
    began = time.perf_counter()
    model = estimator.from_formula(formula, tumours.train, random_state=0, **options)
    return TimedFit(model, columns, time.perf_counter() - began)


def timed_process(console: Any, tumours: Tumours) -> TimedFit | None:
    """Fit the Gaussian process; without GPyTorch, print the reason and return None."""
    try:
        estimator = viper.VariationalGPClassifier
    except ImportError as error:
        console.print(f"Without the Gaussian process: {error}", markup=False)
        return None
    return timed_fit(estimator, tumours, MAP_COLUMNS)


# --- what is printed ---


def number_table(first: str, others: tuple[str, ...]) -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def score_table(tumours: Tumours, logistic: TimedFit, process: TimedFit | None) -> Any:
    """Score the models on the held-out tumours."""
    from rich.console import Group

    from viper.report.metrics import scores

    table = number_table("", ("columns", "seconds", "ELBO", "AUC", "log score", "Brier"))
    malignant = tumours.test[TUMOUR_CLASS] == "malignant"
    models = {"logistic regression": logistic, **({"Gaussian process": process} if process else {})}
    for name, (model, columns, seconds) in models.items():
        score = scores(malignant, model.predict_proba(tumours.test[columns])[:, 1])
        shown = (f"{value:.3f}" for value in (score.auc, score.log_score, score.brier))
        table.add_row(name, str(len(columns)), f"{seconds:.2f}", f"{model.elbo_:.2f}", *shown)
    return Group(f"Fitted to {len(tumours.train)} tumours; scored on {len(tumours.test)} held-out ones.\n", table)


def odds_table(model: Any) -> Any:
    from viper.report.words import percent

    steps = dict(zip(model.formula_.names, model.formula_.scale, strict=True))
    titles = ("which is", "multiplies the odds by", "95 % interval", "probability of sign")
    table = number_table("one more standard deviation of", titles)
    summary = model.summary().drop(index="intercept").sort_values("p_direction", ascending=False)
    for name, row in summary.iterrows():
        interval = f"{row['odds_lower']:.2f} – {row['odds_upper']:.2f}"
        step = f"{steps[str(name)]:.3g}"
        table.add_row(str(name), step, f"{row['odds_ratio']:.2f}", interval, percent(row["p_direction"]))
    return table


def tell_twins_apart(tumours: Tumours, fit: TimedFit) -> str:
    """Describe two held-out tumours with about the same probability, one of which is far less certain."""
    from viper.models.prediction import predictions
    from viper.report.views import Outlyingness
    from viper.report.words import JOIN, percent, percent_range, unusual_sentence

    X = tumours.test[fit.columns]
    seen, found = predictions(fit.model, X), Outlyingness(X)
    lines = ["Two held-out tumours with about the same probability, numbered as in report.html:", ""]
    for k in find_twins(seen):
        interval = percent_range(seen.lower[k], seen.upper[k]).replace(JOIN, "")
        lines += [
            f"[bold]tumour {k + 1}[/bold]: malignant with probability "
            f"[bold]{percent(seen.probability[k])}[/bold], 95 % interval [bold]{interval}[/bold] "
            f"(log-odds {seen.latent[k]:.1f} ± {seen.latent_sd[k]:.1f}); it was {tumours.test[TUMOUR_CLASS].iloc[k]}.",
            unusual_sentence(found, k),
            "",
        ]
    lines.append(
        "The first interval is wide because the model has seen few such tumours: far from the others, the uncertainty "
        "of every coefficient counts. A point estimate could not tell the two apart."
    )
    return "\n".join(lines)


def find_twins(seen: "Predictions") -> tuple[int, int]:
    """Find two undecided rows that differ by less than 5 points in probability and as much as possible in width."""
    import numpy as np

    undecided = np.abs(seen.probability - 0.5) < 0.4
    alike = np.abs(seen.probability[:, None] - seen.probability) < 0.05
    contrast = np.where(alike & undecided & undecided[:, None], seen.width[:, None] - seen.width, -1.0)
    wide, narrow = np.unravel_index(int(np.argmax(contrast)), contrast.shape)
    return int(wide), int(narrow)


def bound_table() -> Any:
    """Value, slope and curvature at ϑ = 1, τ = 2, and the worst relative error of the value over the paper's range."""
    import torch
    from rich.console import Group

    from viper.report import views

    theta, tau = torch.meshgrid(torch.linspace(-8, 6, 57).double(), torch.logspace(-2, 1, 31).double(), indexing="ij")
    errors = views.relative_errors(theta, tau**2)
    table = number_table("E log(1+eˣ), X ~ N(1, 2²)", ("value", "slope", "curvature", "worst relative error"))
    for name, options in views.SOFTPLUS_OPTIONS.items():
        numbers = [f"{x:.8f}" for x in viper.expected_softplus(1.0, 4.0, **options)]
        table.add_row(name, *numbers, f"{errors[name].max():.1e}")
    remark = (
        "\nThe last column is the worst relative error of the value for ϑ from -8 to 6 and τ from 0.01 to 10; "
        "at ϑ = -8 and small τ the value is 0.0003."
    )
    return Group(table, remark)


# --- what is drawn ---


def draw_posteriors(tumours: Tumours, logistic: TimedFit, process: TimedFit | None, path: Path) -> None:
    """Draw odds ratios, held-out tumours with their intervals, and two maps of the Gaussian process if there is one."""
    from matplotlib.figure import Figure

    from viper.report import plot

    test, outcome = tumours.test, tumours.test[TUMOUR_CLASS]
    lines = 2 if process else 1
    figure = Figure(figsize=(14, 5.5 * lines), layout="constrained")
    forest, people, *maps = figure.subplots(lines, 2).ravel()
    plot.forest(logistic.model, ax=forest)
    plot.titled(forest, "Odds ratio of malignancy per standard deviation, 95 % interval")
    plot.observations(logistic.model, test[logistic.columns], outcome, ax=people)
    plot.titled(people, "Held-out tumours: probability of malignancy, 95 % interval")
    if process:
        for ax, show in zip(maps, ("mean", "sd"), strict=True):
            plot.probability_map(process.model, test[MAP_COLUMNS], outcome, show=show, ax=ax)
    save_picture(figure, path, 110)


def draw_bounds(path: Path) -> None:
    """Draw errors against ϑ and against τ, and the number of terms for 1 % (the paper's Figure 1)."""
    import torch
    from matplotlib.figure import Figure

    from viper.report import plot

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    by_mean, by_sd, by_terms = figure.subplots(1, 3)
    plot.bounds("mean", ax=by_mean)
    plot.bounds("sd", ax=by_sd)
    plot.canvas(by_terms)
    means, sds = torch.linspace(-8, 6, 281).double(), torch.logspace(-2, 1, 301).double()
    theta, variance = torch.meshgrid(means, sds**2, indexing="ij")
    needed = viper.terms_needed(theta, variance, 0.01)
    mesh = by_terms.pcolormesh(means.numpy(), sds.numpy(), needed.T.numpy(), cmap="viridis", rasterized=True)
    by_terms.set(xlabel="ϑ", ylabel="τ", yscale="log")
    plot.titled(by_terms, "l needed for a relative error of 1 %")
    figure.colorbar(mesh, ax=by_terms)
    save_picture(figure, path, 150)


def save_picture(figure: Any, path: Path, dpi: int) -> None:
    from viper.data.writing import IN_A_SHELL, checked_file

    with checked_file(path, True, IN_A_SHELL) as file:
        figure.savefig(file, dpi=dpi, format="png")
