"""Tables and the figure of the logistic regression study."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from viper.paper.figures import METHOD_MARKS
from viper.paper.methods import FAMILIES, TABLE_ORDER
from viper.paper.published import published_logistic
from viper.paper.tables import Cell, ResultTable, spread_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

StudyCell = tuple[str, int, int]  # setting, n, p

VARIATIONAL = [(method, family) for family in FAMILIES for method in TABLE_ORDER]
POSTERIORS = [*VARIATIONAL, ("corrected", "-"), ("MCMC", "-")]

# Columns of the tables: heading, metric of ours, metric of the published runs (if there is one).
STUDY_METRICS = (
    ("ELBO", "elbo", ""),
    ("ELBO, sampled", "elbo_mc", "elbo_mc"),
    ("KL_MC", "kl_mc", "kl_mc"),
    ("KL*", "kl_optimum", ""),
    ("MSE", "f_mse", "f_mse"),
    ("coverage", "f_coverage", "f_coverage"),
    ("CI width", "f_width", "f_width"),
    ("AUC", "auc", "auc"),
    ("seconds", "runtime", "runtime"),
)
NOTE = (
    "Median (2.5 %, 97.5 % quantile) over {runs}. ELBO: exact; sampled: from draws, as in the paper. KL_MC: from VI-MC "
    "of the same source to the method; KL*: from the exact optimum of the ELBO in the family. Published VI-PG ELBOs "
    "were evaluated at another q than the fitted one, and published KL_MC are from a VI-MC that had not converged."
)


def all_cells(frame: "pandas.DataFrame") -> list[StudyCell]:
    """The cells of the study that have runs, in order."""
    keys = frame[["setting", "n", "p"]].astype({"setting": str}).drop_duplicates()
    return sorted((str(s), int(n), int(p)) for s, n, p in keys.itertuples(index=False))


def runs_of(frame: "pandas.DataFrame", cell: StudyCell, method: str, family: str) -> "pandas.DataFrame":
    """The runs of one method in one cell."""
    setting, n, p = cell
    of_cell = (frame.setting.astype(str) == setting) & (frame.n == n) & (frame.p == p)
    return frame[of_cell & (frame.method == method) & (frame.family == family)]


def comparison_table(name: str, title: str, frame: "pandas.DataFrame", chosen: list[StudyCell]) -> ResultTable:
    """Every method in the chosen cells, with the published line below ours."""
    rows: list[list[Cell]] = []
    for cell in chosen:
        for method, family in POSTERIORS:
            runs = runs_of(frame, cell, method, family)
            theirs = [published_logistic(*cell, method, family, other) for _, _, other in STUDY_METRICS]
            label: list[Cell] = [f"{cell[1]:,} / {cell[2]}", family, method]
            if len(runs):
                rows.append([*label, "ours", *(spread_of(runs[ours]) for _, ours, _ in STUDY_METRICS)])
            if any(theirs):
                rows.append([*label, "published", *theirs])
    columns = ["n / p", "family", "method", "source", *(heading for heading, _, _ in STUDY_METRICS)]
    return ResultTable(name, title, columns, rows, [NOTE.format(runs=run_counts(frame, chosen))])


def run_counts(frame: "pandas.DataFrame", chosen: list[StudyCell]) -> str:
    """The number of runs of the variational methods, and of MCMC."""
    ours = [len(runs_of(frame, cell, "VI-PER limit", "Q'")) for cell in chosen]
    mcmc = [len(runs_of(frame, cell, "MCMC", "-")) for cell in chosen]
    words = f"{count_range(ours)} runs"
    return f"{words} ({count_range(mcmc)} of MCMC)" if any(mcmc) else words


def count_range(counts: list[int]) -> str:
    """The smallest and largest count, or the count if they are equal."""
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def optimum_table(frame: "pandas.DataFrame") -> ResultTable:
    """KL from the exact optimum to every fit."""
    rows: list[list[Cell]] = [
        [c[0], f"{c[1]:,} / {c[2]}", *(spread_of(runs_of(frame, c, *m).kl_optimum) for m in VARIATIONAL)]
        for c in all_cells(frame)
    ]
    columns = ["setting", "n / p", *(f"{method} {family}" for method, family in VARIATIONAL)]
    note = (
        "KL(optimum ‖ fit) in nats: median (2.5 %, 97.5 % quantile). The optimum comes from another program: "
        "trapezoidal sums and a fixed-point iteration in NumPy. Published VI-MC fits under Q' were 0.04 to 1.8 away."
    )
    return ResultTable("optimum", "Distance to the exact optimum", columns, rows, [note])


class PairedMetric(NamedTuple):
    """A metric's mean over runs with chains, its mean difference from MCMC on the same data, and two errors of MCMC."""

    mean: float
    difference: float
    of_chains: float  # error of one run, from the differences between its four chains
    of_study: float  # standard error of MCMC's mean over the data sets, sd/√runs


COMPARED = {"MSE": "f_mse", "coverage": "f_coverage", "CI width": "f_width"}
# By cell and method: the number of runs, and the metrics.
Agreement = dict[tuple[StudyCell, str], tuple[int, list[PairedMetric]]]


def agreement_with_mcmc(frame: "pandas.DataFrame") -> Agreement:
    """VI-PER limit (Q'), the corrected posterior and VI-PG (Q') beside MCMC on the same data."""
    found: Agreement = {}
    for cell in all_cells(frame):
        chains = runs_of(frame, cell, "MCMC", "-").set_index("seed")
        for method, family in (("VI-PER limit", "Q'"), ("corrected", "-"), ("VI-PG", "Q'")):
            runs = runs_of(frame, cell, method, family).set_index("seed")
            both = runs.index.intersection(chains.index)
            if len(both):
                found[cell, method] = len(both), paired_metrics(runs.loc[both], chains.loc[both])
    return found


def paired_metrics(runs: "pandas.DataFrame", chains: "pandas.DataFrame") -> list[PairedMetric]:
    out = []
    for name in COMPARED.values():
        error = float((chains[f"{name}_error"] ** 2).mean() ** 0.5)
        difference = float((runs[name] - chains[name]).mean())
        out.append(PairedMetric(float(runs[name].mean()), difference, error, float(chains[name].sem())))
    return out


def agreement_tables(frame: "pandas.DataFrame") -> list[ResultTable]:
    """The differences from MCMC, and how many of them are small."""
    found = agreement_with_mcmc(frame)
    rows: list[list[Cell]] = [
        [cell[0], f"{cell[1]:,} / {cell[2]}", method, str(count), *(x for metric in metrics for x in metric)]
        for (cell, method), (count, metrics) in found.items()
    ]
    columns = ["setting", "n / p", "method", "runs"]
    columns += [name + what for name in COMPARED for what in ("", " - MCMC", ", MC error", ", study error")]
    note = (
        "Means over the runs that have chains; the difference from MCMC on the same data; the Monte Carlo error of one "
        "run's chains, from the differences between the four; and that of the study, the standard error of MCMC's mean "
        "over the data sets."
    )
    title = "The posterior by MCMC, and by others on the same data"
    return [ResultTable("agreement", title, columns, rows, [note]), cells_within_error(found)]


# The meanings of "within Monte Carlo error": the error, from the number of runs and a metric.
MONTE_CARLO_ERRORS: dict[str, Callable[[int, PairedMetric], float]] = {
    "one run's chains": lambda runs, metric: metric.of_chains,
    "the runs' chains": lambda runs, metric: metric.of_chains / runs**0.5,
    "the study": lambda runs, metric: metric.of_study,
}


def cells_within_error(found: Agreement) -> ResultTable:
    """The number of cells whose difference from MCMC is within twice each error."""
    rows: list[list[Cell]] = []
    for method in dict.fromkeys(method for _, method in found):
        every = [beside for (_, other), beside in found.items() if other == method]
        for name, error in MONTE_CARLO_ERRORS.items():
            metrics = ([(error(runs, of[j]), of[j].difference) for runs, of in every] for j in range(len(COMPARED)))
            rows.append([method, name, *map(share_within, metrics)])
    note = (
        "Errors of MCMC: of one run's chains; of their mean over the runs, which is √runs smaller; of the study, the "
        "standard error of MCMC's mean over the data sets, which is wide, since data sets differ and the differences "
        "are on the same ones. The corrected posterior has a Monte Carlo error of its own, not counted here."
    )
    title = "Cells within two Monte Carlo errors of MCMC"
    return ResultTable("agreement-cells", title, ["method", "error of", *COMPARED], rows, [note])


def share_within(pairs: list[tuple[float, float]]) -> Cell:
    """How many differences are within two errors; those without an error are left out (e.g. a single run)."""
    inside = [abs(difference) <= 2.0 * error for error, difference in pairs if error == error]
    return f"{sum(inside)} of {len(inside)}" if inside else None


# ---------------------------------------------------------------------------------------------------------------------
# Figure


def study_figure(frame: "pandas.DataFrame") -> "Figure":
    """Family Q': distance to the optimum, coverage, and widths relative to the corrected posterior's, cell by cell."""
    import matplotlib.pyplot as plt

    every = all_cells(frame)
    figure, axes = plt.subplots(3, 1, figsize=(max(6.0, 0.5 * len(every)), 8.5), sharex=True)
    panels = (
        ("kl_optimum", "KL from the exact optimum, nats"),
        ("f_coverage", "coverage of the 95 % interval of f"),
        ("f_width", "width of that interval, relative to the exact posterior's"),
    )
    for axis, (metric, title) in zip(axes, panels, strict=True):
        for shift, (method, mark) in zip((-0.3, -0.15, 0.0, 0.15, 0.3), METHOD_MARKS.items(), strict=True):
            draw_method(axis, frame, metric, method, shift, mark)
        axis.set_title(title)
    axes[0].set_yscale("log")
    axes[1].axhline(0.95, color="black", lw=0.8)
    axes[2].axhline(1.0, color="black", lw=0.8)
    axes[0].legend(ncols=5, loc="lower left", bbox_to_anchor=(0.0, 1.1))
    axes[2].set_xticks(range(len(every)), [f"{s}: {n:,} / {p}" for s, n, p in every], rotation=90)
    axes[2].set_xlabel("setting: n / p (median, 2.5 % and 97.5 % quantile over the runs)")
    return figure


def draw_method(axis: Any, frame: "pandas.DataFrame", metric: str, method: str, shift: float, mark: Any) -> None:
    """One method's medians with quantiles, cell by cell."""
    family = "-" if method == "MCMC" else "Q'"
    points = []
    for j, cell in enumerate(all_cells(frame)):
        values = runs_of(frame, cell, method, family).set_index("seed")[metric]
        if metric == "f_width":
            values = values / runs_of(frame, cell, "corrected", "-").set_index("seed")[metric].reindex(values.index)
        if found := spread_of(values):
            points.append((j + shift, *found))
    if points:
        x, median, low, high = zip(*points, strict=True)
        axis.vlines(x, low, high, color=mark["color"], alpha=0.5, lw=1.5)
        axis.plot(x, median, ls="", ms=4.5, label=method, **mark)
