"""Tables and figures of the logistic regression study."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from viper.paper.artefact import Config
from viper.paper.figures import COLOURS
from viper.paper.published import published
from viper.paper.tables import Cell, Table, spread

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

METHODS = [(method, family) for family in ("Q", "Q'") for method in ("VI-PER", "VI-PER limit", "VI-MC", "VI-PG")]
ALL = [*METHODS, ("corrected", "-"), ("MCMC", "-")]

# Columns of the tables: heading, metric of ours, metric of the published runs.
METRICS = (
    ("ELBO", "elbo", None),
    ("ELBO, sampled", "elbo_mc", "elbo_mc"),
    ("KL_MC", "kl_mc", "kl_mc"),
    ("KL*", "kl_optimum", None),
    ("MSE", "f_mse", "f_mse"),
    ("coverage", "f_coverage", "f_coverage"),
    ("CI width", "f_width", "f_width"),
    ("AUC", "auc", "auc"),
    ("seconds", "runtime", "runtime"),
)
NOTES = (
    "Median (2.5 %, 97.5 % quantile) over {runs}. ELBO: exact; sampled: from draws, as in the paper. KL_MC: from VI-MC "
    "of the same source to the method; KL*: from the exact optimum of the ELBO in the family. Published VI-PG ELBOs "
    "were evaluated at another q than the fitted one, and published KL_MC are from a VI-MC that had not converged.",
)


def cells(frame: "pandas.DataFrame") -> list[tuple[str, int, int]]:
    """(setting, n, p) in order."""
    keys = frame[["setting", "n", "p"]].astype({"setting": str}).drop_duplicates()
    return sorted((str(s), int(n), int(p)) for s, n, p in keys.itertuples(index=False))


def part(frame: "pandas.DataFrame", cell: tuple[str, int, int], method: str, family: str) -> "pandas.DataFrame":
    """The runs of one method in one cell."""
    setting, n, p = cell
    of_cell = (frame.setting.astype(str) == setting) & (frame.n == n) & (frame.p == p)
    return frame[of_cell & (frame.method == method) & (frame.family == family)]


def tables(frame: "pandas.DataFrame", config: Config) -> list[Table]:
    every = cells(frame)
    by_setting = [
        comparison(f"setting-{s}", f"Logistic regression, Setting {s}", frame, [c for c in every if c[0] == s])
        for s in sorted({c[0] for c in every})
    ]
    main = [c for c in every if c[0] == "3" and c[1] >= 1000 and c[2] == 25]
    first = [comparison("table-2", "Logistic regression results (the paper's Table 2)", frame, main)] if main else []
    beside = against_posterior(agreement(frame)) if (frame.method == "MCMC").any() else []
    return [*by_setting, *first, to_the_optimum(frame), *beside]


def text_tables(frame: "pandas.DataFrame", config: Config) -> list[Table]:
    title = "Logistic regression, Setting 3 as in the paper's text: x ~ N(0, W⁻¹), W ~ Wishart(p + 3, I)"
    return [comparison("setting-3-text", title, frame, cells(frame)), to_the_optimum(frame)]


def mcmc_tables(frame: "pandas.DataFrame", config: Config) -> list[Table]:
    return [comparison("mcmc", "The posterior by MCMC", frame, cells(frame))]


def comparison(name: str, title: str, frame: "pandas.DataFrame", chosen: list[tuple[str, int, int]]) -> Table:
    """Ours and, below each, the published line."""
    rows: list[list[Cell]] = []
    for cell in chosen:
        for method, family in ALL:
            runs = part(frame, cell, method, family)
            theirs = published(*cell, method, family)
            label: list[Cell] = [f"{cell[1]:,} / {cell[2]}", family, method]
            if len(runs):
                rows.append([*label, "ours", *(spread(runs[ours]) for _, ours, _ in METRICS)])
            if theirs:
                rows.append([*label, "published", *(theirs.get(other or "") for _, _, other in METRICS)])
    columns = ["n / p", "family", "method", "source", *(heading for heading, _, _ in METRICS)]
    return Table(name, title, columns, rows, [note.format(runs=counted(frame, chosen)) for note in NOTES])


def counted(frame: "pandas.DataFrame", chosen: list[tuple[str, int, int]]) -> str:
    """How many runs there are of the variational methods, and of MCMC."""
    ours = [len(part(frame, cell, "VI-PER limit", "Q'")) for cell in chosen]
    mcmc = [len(part(frame, cell, "MCMC", "-")) for cell in chosen]
    words = f"{span(ours)} runs"
    return f"{words} ({span(mcmc)} of MCMC)" if any(mcmc) else words


def span(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def to_the_optimum(frame: "pandas.DataFrame") -> Table:
    """KL from the exact optimum to every fit."""
    rows: list[list[Cell]] = [
        [c[0], f"{c[1]:,} / {c[2]}", *(spread(part(frame, c, *m).kl_optimum) for m in METHODS)] for c in cells(frame)
    ]
    columns = ["setting", "n / p", *(f"{method} {family}" for method, family in METHODS)]
    note = (
        "KL(optimum ‖ fit) in nats: median (2.5 %, 97.5 % quantile). The optimum comes from another program: "
        "trapezoidal sums and a fixed-point iteration in NumPy. Published VI-MC fits under Q' were 0.04 to 1.8 away."
    )
    return Table("optimum", "Distance to the exact optimum", columns, rows, [note])


class Paired(NamedTuple):
    """A metric's mean over runs with chains, its mean difference from MCMC on the same data, and two errors of MCMC."""

    mean: float
    difference: float
    of_chains: float  # of one run, from the differences between its four chains
    of_study: float  # of MCMC's mean over the data sets: sd/√runs


COMPARED = {"MSE": "f_mse", "coverage": "f_coverage", "CI width": "f_width"}
Agreement = dict[tuple[tuple[str, int, int], str], tuple[int, list[Paired]]]  # by cell and method: runs, metrics


def agreement(frame: "pandas.DataFrame") -> Agreement:
    """VI-PER limit (Q'), the corrected posterior and VI-PG (Q') beside MCMC on the same data."""
    found: Agreement = {}
    for cell in cells(frame):
        chains = part(frame, cell, "MCMC", "-").set_index("seed")
        for method, family in (("VI-PER limit", "Q'"), ("corrected", "-"), ("VI-PG", "Q'")):
            runs = part(frame, cell, method, family).set_index("seed")
            both = runs.index.intersection(chains.index)
            if len(both):
                found[cell, method] = len(both), paired(runs.loc[both], chains.loc[both])
    return found


def paired(runs: "pandas.DataFrame", chains: "pandas.DataFrame") -> list[Paired]:
    out = []
    for name in COMPARED.values():
        error = float((chains[f"{name}_error"] ** 2).mean() ** 0.5)
        difference = float((runs[name] - chains[name]).mean())
        out.append(Paired(float(runs[name].mean()), difference, error, float(chains[name].sem())))
    return out


def against_posterior(found: Agreement) -> list[Table]:
    """The differences, and how many of them are small."""
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
    return [Table("agreement", title, columns, rows, [note]), within(found)]


# What "within Monte Carlo error" can mean, from the number of runs and a metric.
ERRORS: dict[str, Callable[[int, Paired], float]] = {
    "one run's chains": lambda runs, metric: metric.of_chains,
    "the runs' chains": lambda runs, metric: metric.of_chains / runs**0.5,
    "the study": lambda runs, metric: metric.of_study,
}


def within(found: Agreement) -> Table:
    """Cells whose difference from MCMC is within twice each error."""
    rows: list[list[Cell]] = []
    for method in dict.fromkeys(method for _, method in found):
        every = [beside for (_, other), beside in found.items() if other == method]
        for name, error in ERRORS.items():
            metrics = ([(error(runs, of[j]), of[j].difference) for runs, of in every] for j in range(len(COMPARED)))
            rows.append([method, name, *map(share_within, metrics)])
    note = (
        "Errors of MCMC: of one run's chains; of their mean over the runs, which is √runs smaller; of the study, the "
        "standard error of MCMC's mean over the data sets, which is wide, since data sets differ and the differences "
        "are on the same ones. The corrected posterior has a Monte Carlo error of its own, not counted here."
    )
    title = "Cells within two Monte Carlo errors of MCMC"
    return Table("agreement-cells", title, ["method", "error of", *COMPARED], rows, [note])


def share_within(pairs: list[tuple[float, float]]) -> Cell:
    """How many differences are within two errors, where there is an error: a single run has none of the study."""
    inside = [abs(difference) <= 2.0 * error for error, difference in pairs if error == error]
    return f"{sum(inside)} of {len(inside)}" if inside else None


# ---------------------------------------------------------------------------------------------------------------------
# Figure

LOOKS = {
    "VI-PER": {"color": COLOURS["VI-PER"], "marker": "o"},
    "VI-PER limit": {"color": COLOURS["limit"], "marker": "D"},
    "VI-MC": {"color": COLOURS["VI-MC"], "marker": "s"},
    "VI-PG": {"color": COLOURS["VI-PG"], "marker": "^"},
    "MCMC": {"color": COLOURS["MCMC"], "marker": "x"},
}


def figures(frame: "pandas.DataFrame", config: Config) -> "dict[str, Figure]":
    """Family Q': distance to the optimum, coverage, and widths relative to the corrected posterior's, cell by cell."""
    import matplotlib.pyplot as plt

    every = cells(frame)
    figure, axes = plt.subplots(3, 1, figsize=(max(6.0, 0.5 * len(every)), 8.5), sharex=True)
    panels = (
        ("kl_optimum", "KL from the exact optimum, nats"),
        ("f_coverage", "coverage of the 95 % interval of f"),
        ("f_width", "width of that interval, relative to the exact posterior's"),
    )
    for axis, (metric, title) in zip(axes, panels, strict=True):
        for shift, (method, look) in zip((-0.3, -0.15, 0.0, 0.15, 0.3), LOOKS.items(), strict=True):
            draw(axis, frame, every, metric, method, shift, look)
        axis.set_title(title)
    axes[0].set_yscale("log")
    axes[1].axhline(0.95, color="black", lw=0.8)
    axes[2].axhline(1.0, color="black", lw=0.8)
    axes[0].legend(ncols=5, loc="lower left", bbox_to_anchor=(0.0, 1.1))
    axes[2].set_xticks(range(len(every)), [f"{s}: {n:,} / {p}" for s, n, p in every], rotation=90)
    axes[2].set_xlabel("setting: n / p (median, 2.5 % and 97.5 % quantile over the runs)")
    return {"logistic": figure}


def draw(axis: Any, frame: "pandas.DataFrame", every: Any, metric: str, method: str, shift: float, look: Any) -> None:
    """One method's medians with quantiles."""
    family = "-" if method == "MCMC" else "Q'"
    points = []
    for j, cell in enumerate(every):
        values = part(frame, cell, method, family).set_index("seed")[metric]
        if metric == "f_width":
            values = values / part(frame, cell, "corrected", "-").set_index("seed")[metric].reindex(values.index)
        if found := spread(values):
            points.append((j + shift, *found))
    if points:
        x, median, low, high = zip(*points, strict=True)
        axis.vlines(x, low, high, color=look["color"], alpha=0.5, lw=1.5)
        axis.plot(x, median, ls="", ms=4.5, label=method, **look)
