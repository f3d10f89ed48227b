"""`python -m viper.demo [FOLDER]`: posteriors on real data, where they are unsure and why, a report and pictures."""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import viper
from viper import report
from viper.report import plot, views
from viper.report.words import JOIN, percent, percent_range, unusual_sentence


def bound_table() -> Any:
    """Value, slope and curvature at ϑ = 1, τ = 2, and the worst relative error of the value over the paper's range."""
    from rich.console import Group
    from rich.table import Table

    theta, tau = torch.meshgrid(torch.linspace(-8, 6, 57).double(), torch.logspace(-2, 1, 31).double(), indexing="ij")
    errors = views.relative_errors(theta, tau**2)
    found = Table(box=None, header_style="dim", pad_edge=False)
    found.add_column("E log(1+eˣ), X ~ N(1, 2²)")
    for name in ("value", "slope", "curvature", "worst relative error"):
        found.add_column(name, justify="right")
    for name, options in views.SOFTPLUS_OPTIONS.items():
        numbers = [f"{x:.8f}" for x in viper.expected_softplus(1.0, 4.0, **options)]
        found.add_row(name, *numbers, f"{errors[name].max():.1e}")
    told = (
        "\nThe last column is of the value, and relative to it, over ϑ from -8 to 6 and τ from 0.01 to 10; "
        "at ϑ = -8 and small τ the value is 0.0003."
    )
    return Group(found, told)


def bound_picture(path: Path) -> None:
    """Errors against ϑ and against τ, and the number of terms for 1 % (the paper's Figure 1)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
    plot.title(by_terms, "l needed for a relative error of 1 %")
    figure.colorbar(mesh, ax=by_terms)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150)


TWO = ["concave points", "radius"]  # what the Gaussian process sees: enough for a map
TARGET = "diagnosis"


def main(folder: str | Path = ".") -> None:
    """Fit logistic regression and a Gaussian process, tell what they say, and write report and pictures into `folder`.

    `report.html`, `posterior.png` and `bound.png` of an earlier run are replaced.
    """
    from rich.console import Console

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    torch.set_num_threads(1)  # so little work is slower when shared
    with console.status("Fitting"):
        data = Data()
        logistic = fit(viper.VariationalLogisticRegression, data, data.columns, prior_scale="auto")
        process = gaussian_process(console, data)
    tell(console, "Breast cancer: is a tumour malignant?", fitted(data, logistic, process))
    tell(console, "What drives it", coefficients(logistic.model))
    tell(console, "Where the interval is wide, and why", doubt(data, logistic))
    tell(console, "Can the posterior be trusted?", str(logistic.model.diagnose()))
    tell(console, "The expectation beneath, and how well others do", bound_table())
    with console.status("Drawing"):
        picture(data, logistic, process, folder / "posterior.png")
        bound_picture(folder / "bound.png")
        report.write(logistic.model, data.test, TARGET, folder / "report.html", overwrite=True, held_out=True)
    console.print(
        f"\nOpen [bold]{folder / 'report.html'}[/bold] in a browser: every number above, to look around in.\n"
        f"The pictures are {folder / 'posterior.png'} and {folder / 'bound.png'}."
    )


class Data:
    """Wisconsin breast cancer: 569 tumours, ten measurements averaged over cells; a third is held out."""

    def __init__(self) -> None:
        from sklearn.datasets import load_breast_cancer
        from sklearn.model_selection import train_test_split

        frame, benign = load_breast_cancer(return_X_y=True, as_frame=True)
        frame = frame.filter(like="mean ").rename(columns=lambda name: name.removeprefix("mean "))
        self.columns = list(frame.columns)
        label = np.where(benign, "benign", "malignant")
        train, test, own, other = train_test_split(frame, label, test_size=0.33, random_state=0, stratify=label)
        self.train, self.test = train.assign(**{TARGET: own}), test.assign(**{TARGET: other})


class Fitted(NamedTuple):
    model: Any
    columns: list[str]
    seconds: float


def fit(estimator: Any, data: Data, columns: list[str], **options: Any) -> Fitted:
    """A formula standardises inside, so that everything told is in the units of the table."""
    formula = f"{TARGET} ~ {' + '.join(f'`{name}`' for name in columns)}"
    began = time.perf_counter()
    model = estimator.from_formula(formula, data.train, random_state=0, **options)
    return Fitted(model, columns, time.perf_counter() - began)


def gaussian_process(console: Any, data: Data) -> Fitted | None:
    """The Gaussian process; a word on why not where GPyTorch is not there."""
    try:
        estimator = viper.VariationalGPClassifier
    except ImportError as error:
        console.print(f"Without the Gaussian process: {error}", markup=False)
        return None
    return fit(estimator, data, TWO, mean="constant")


def tell(console: Any, heading: str, content: Any) -> None:
    console.print()
    console.rule(f"[bold]{heading}", align="left", style="cyan")
    console.print(content)


# --- what is told ---


def fitted(data: Data, logistic: Fitted, process: Fitted | None) -> Any:
    """The models on the held-out tumours."""
    from rich.console import Group
    from rich.table import Table
    from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

    found = Table(box=None, header_style="dim", pad_edge=False)
    found.add_column("")
    for name in ("columns", "seconds", "ELBO", "AUC", "log score", "Brier"):
        found.add_column(name, justify="right")
    malignant = data.test[TARGET] == "malignant"
    models = {"logistic regression": logistic, **({"Gaussian process": process} if process else {})}
    for name, (model, columns, seconds) in models.items():
        seen = views.predictions(model, data.test[columns])
        scores = (roc_auc_score(malignant, seen.probability), -log_loss(malignant, seen.probability))
        found.add_row(
            name,
            str(len(columns)),
            f"{seconds:.2f}",
            f"{model.elbo_:.2f}",
            *(f"{score:.3f}" for score in (*scores, brier_score_loss(malignant, seen.probability))),
        )
    told = f"Learned from {len(data.train)} tumours; the scores are those of the {len(data.test)} that were held out.\n"
    return Group(told, found)


def coefficients(model: Any) -> Any:
    from rich.table import Table

    table, size = (
        model.summary().drop(index="intercept"),
        dict(zip(model.formula_.names, model.formula_.scale, strict=True)),
    )
    found = Table(box=None, header_style="dim", pad_edge=False)
    found.add_column("one standard deviation more of")
    for name in ("that is", "multiplies the odds by", "95 % interval", "sure of direction"):
        found.add_column(name, justify="right")
    for name, row in table.sort_values("p_direction", ascending=False).iterrows():
        interval = f"{row['odds_lower']:.2f} – {row['odds_upper']:.2f}"
        step = f"{size[str(name)]:.3g}"
        found.add_row(str(name), step, f"{row['odds_ratio']:.2f}", interval, percent(row["p_direction"]))
    return found


def doubt(data: Data, fitted: Fitted) -> str:
    """Two held-out tumours with about the same probability, of which one is far less certain."""
    X = data.test[fitted.columns]
    seen, found = views.predictions(fitted.model, X), views.Outlyingness(X)
    lines = ["Two held-out tumours to which the model gives about the same probability:", ""]
    for k in twins(seen):
        interval = percent_range(seen.lower[k], seen.upper[k]).replace(JOIN, "")
        lines += [
            f"[bold]tumour {data.test.index[k]}[/bold]: malignant with probability "
            f"[bold]{percent(seen.probability[k])}[/bold], 95 % interval [bold]{interval}[/bold] "
            f"(log-odds {seen.latent[k]:.1f} ± {seen.latent_sd[k]:.1f}); it was {data.test[TARGET].iloc[k]}.",
            unusual_sentence(found, k),
            "",
        ]
    lines.append(
        "The first interval is wide because the model has seen few such tumours: far from the rest, the uncertainty of "
        "every coefficient counts. A point estimate could not tell the two apart."
    )
    return "\n".join(lines)


def twins(seen: views.Predictions) -> tuple[int, int]:
    """Two undecided rows that differ by less than 5 points in probability and by as much as possible in width."""
    undecided = np.abs(seen.probability - 0.5) < 0.4
    alike = np.abs(seen.probability[:, None] - seen.probability) < 0.05
    contrast = np.where(alike & undecided & undecided[:, None], seen.width[:, None] - seen.width, -1.0)
    wide, narrow = np.unravel_index(int(np.argmax(contrast)), contrast.shape)
    return int(wide), int(narrow)


def picture(data: Data, logistic: Fitted, process: Fitted | None, path: Path) -> None:
    """Odds ratios, every held-out tumour with its interval, and the Gaussian process's two maps if there is one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = 2 if process else 1
    figure = Figure(figsize=(14, 5.5 * lines), layout="constrained")
    forest, people, *maps = figure.subplots(lines, 2).ravel()
    plot.forest(logistic.model, ax=forest)
    plot.title(forest, "Odds ratio of malignancy per standard deviation, 95 % interval")
    plot.observations(logistic.model, data.test[logistic.columns], data.test[TARGET], ax=people)
    plot.title(people, "Held-out tumours: probability of malignancy, 95 % interval")
    if process:
        for ax, show in zip(maps, ("mean", "sd"), strict=True):
            plot.probability_map(process.model, data.test[TWO], data.test[TARGET], show=show, ax=ax)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(prog="python -m viper.demo", description=__doc__)
    arguments.add_argument("folder", nargs="?", default=".", help="where report and pictures go (default: here)")
    main(arguments.parse_args().folder)
