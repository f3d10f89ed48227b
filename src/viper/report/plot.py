"""Plots of fitted models. Every function draws into `ax`, or into a new figure, and returns the Axes. `terms` returns
several, because it draws a panel for each term.

Colours are Okabe and Ito's, which colour-blind readers can tell apart. Matplotlib's global settings are left alone.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from viper.data.checks import read_labels
from viper.errors import listed
from viper.formula.columns import date_text
from viper.models.prediction import check_model, check_one_probability, predictions
from viper.report import views
from viper.report.metrics import binned_residuals, calibration, decision_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "bounds",
    "convergence",
    "densities",
    "experiment",
    "forest",
    "net_benefit",
    "observations",
    "partial_effect",
    "probability_map",
    "reliability",
    "residuals",
    "shrinkage",
    "terms",
]

BLUE, ORANGE, RED, SKY, GREY = "#0072B2", "#E69F00", "#D55E00", "#56B4E9", "#8A8F98"
YELLOW = "#F0E442"  # for marks on a coloured background
INK = "#30343B"


def canvas(ax: "Axes | None", size: tuple[float, float] = (6.4, 4.2)) -> "Axes":
    """`ax`, or the Axes of a new figure, with the two spines at left and bottom."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("viper.plot needs matplotlib; install it with pip install 'vi-per[plot]'") from error
    if ax is None:
        _, ax = plt.subplots(figsize=size, layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.tick_params(color=GREY, labelcolor=INK)
    return ax


def titled(ax: "Axes", text: str) -> "Axes":
    ax.set_title(text, loc="left", color=INK, fontsize=11)
    return ax


def percent_axis(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def coefficient_summary(model: Any, what: str, level: float = 0.95) -> Any:
    """The summary of a model with coefficients, without the intercept."""
    check_model(model)
    if not hasattr(model, "coefficient_interval"):
        kind = type(model).__name__
        raise TypeError(f"{what} needs a model with coefficients; got {kind}. Use partial_effect or forest.")
    table = model.summary(level)
    if table.index.nlevels == 1:
        own = model.components().index if hasattr(model, "factors_") else []  # variance components are not coefficients
        return table.drop(index=["intercept", *own], errors="ignore")
    table = table[table.index.get_level_values(1) != "intercept"]  # by class or label
    return table.set_axis([f"{label}: {name}" for label, name in table.index])


# --- what the model learned ---


def forest(model: Any, *, level: float = 0.95, top: int | None = None, odds: bool = True, ax: Any = None) -> "Axes":
    """Coefficients with credible intervals, the largest on top; for a Gaussian process, the relevance of its columns.

    Parameters
    ----------
    model : fitted VariationalLogisticRegression or VariationalGPClassifier
    level : float, default 0.95
    top : int, optional
        How many to show: those with the largest absolute means.
    odds : bool, default True
        Whether to show odds ratios on a logarithmic axis instead of coefficients.
    ax : matplotlib Axes, optional
    """
    check_model(model)
    if not hasattr(model, "coefficient_interval"):
        return relevance_forest(model, top, ax)
    table = coefficient_summary(model, "forest", level)
    table = table.loc[table["mean"].abs().sort_values().index[-(top or len(table)) :]].sort_values("mean")
    names = ["odds_ratio", "odds_lower", "odds_upper"] if odds else ["mean", "lower", "upper"]
    middle, low, high = (table[name].to_numpy() for name in names)
    ax = canvas(ax, (6.4, 1.0 + 0.24 * len(table)))
    colours = np.where((table["lower"] > 0) | (table["upper"] < 0), BLUE, GREY)
    at = np.arange(len(table))
    ax.hlines(at, low, high, colors=colours, lw=2)
    ax.scatter(middle, at, c=colours, s=22, zorder=3)
    ax.axvline(1.0 if odds else 0.0, color=INK, lw=0.8)
    units = [unit_of(model, name) for name in table.index]
    ax.set_yticks(at, [f"{name}{f' ({unit})' * bool(unit)}" for name, unit in zip(table.index, units, strict=True)])
    ax.tick_params("y", labelsize=8)
    ax.set_ylim(-0.6, len(table) - 0.4)
    if odds:
        plain_log_axis(ax, wide=bool(table["upper"].max() - table["lower"].min() > np.log(100.0)))
    per_sd = [unit.startswith("per sd") for unit in units]
    per = " per sd" if all(per_sd) else " per unit" if not any(per_sd) else ""  # otherwise each label says it
    return titled(ax, f"{'Odds ratio' if odds else 'Coefficient'}{per}, {100 * level:g} % interval")


def unit_of(model: Any, name: Any) -> str:
    """The unit of a coefficient, in the words of the model's formula; empty if it is per 1."""
    units = model.formula_.units if hasattr(model, "formula_") else {}
    unit = units.get(str(name)) or units.get(str(name).partition(": ")[2], "1")
    return "" if unit == "1" else f"per {unit}" if unit.startswith("sd") else unit


def plain_log_axis(ax: "Axes", wide: bool) -> None:
    """Ticks at 0.1, 1, 10 and so on, with 2 and 5 between them unless the axis spans a wide range."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def relevance_forest(model: Any, top: int | None, ax: Any) -> "Axes":
    """1 / lengthscale in standard deviations: how quickly the log-odds change along each column."""
    table = model.summary()
    if "relevance" not in table:
        raise TypeError(
            f"forest needs a kernel with one lengthscale or variance per column; got {type(model.kernel).__name__}."
        )
    values = table["relevance"].sort_values().iloc[-(top or len(table)) :]
    ax = canvas(ax, (6.4, 1.0 + 0.24 * len(values)))
    ax.hlines(np.arange(len(values)), 0.0, values, color=BLUE, lw=2)
    ax.scatter(values, np.arange(len(values)), color=BLUE, s=22, zorder=3)
    ax.set_yticks(np.arange(len(values)), [str(name) for name in values.index], fontsize=8)
    ax.set(xlim=(0.0, None), ylim=(-0.6, len(values) - 0.4))
    additive = "term_sd" in table
    what = (
        "prior sd of a term's slope, per standard deviation" if additive else "1 / lengthscale, in standard deviations"
    )
    return titled(ax, f"Relevance: {what}")


def terms(model: Any, X: Any = None, *, level: float = 0.95, points: int = 61, top: int | None = None) -> np.ndarray:
    """What each column and pair of an additive Gaussian process adds to the log-odds: a new figure, a panel each.

    Bands are exact intervals of the effects, which have average zero over the rows of X, by default those of the fit.
    `top` is how many to show, the largest first. Returns the Axes of the panels.
    """
    check_model(model)
    if not hasattr(model, "term_effects"):
        raise TypeError(f"terms needs kernel='additive'; got {type(model).__name__}. Use partial_effect.")
    import matplotlib.pyplot as plt

    found = model.term_effects(X, points=points, level=level)[:top]
    across = min(3, len(found))
    down = -(-len(found) // across)
    _, grid = plt.subplots(down, across, figsize=(3.6 * across, 2.9 * down), layout="constrained", squeeze=False)
    axes = grid.reshape(-1)
    curves = [e for e in found if len(e.columns) == 1]
    ends = (min(e.lower.min() for e in curves), max(e.upper.max() for e in curves)) if curves else (-1.0, 1.0)
    for ax, effect in zip(axes, found, strict=False):
        draw_term(canvas(ax), effect, ends, level)
    for ax in axes[len(found) :]:
        ax.remove()
    return axes[: len(found)]


def draw_term(ax: "Axes", effect: Any, ends: tuple[float, float], level: float) -> None:
    """A curve with its band, or the surface of a pair."""
    if len(effect.columns) == 2:
        reach = float(np.abs(effect.mean).max()) or 1.0
        shades = ax.pcolormesh(*effect.values, effect.mean.T, cmap="RdBu_r", vmin=-reach, vmax=reach, shading="nearest")
        ax.figure.colorbar(shades, ax=ax, label="log-odds")
        ax.set(xlabel=effect.columns[0], ylabel=effect.columns[1])
        titled(ax, f"{effect.name}, mean")
        return
    (values,) = effect.values
    ax.axhline(0.0, color=GREY, lw=0.8)
    if len(values) > views.FEW_VALUES:
        ax.fill_between(values, effect.lower, effect.upper, color=BLUE, alpha=0.22, lw=0)
        ax.plot(values, effect.mean, color=BLUE, lw=2)
    else:
        ax.vlines(values, effect.lower, effect.upper, color=BLUE, lw=2)
        ax.scatter(values, effect.mean, color=BLUE, zorder=3)
        ax.set_xticks(values)
        ax.margins(x=0.2)
    room = 0.04 * (ends[1] - ends[0])
    ax.set(xlabel=effect.name, ylabel="log-odds", ylim=(ends[0] - room, ends[1] + room))
    titled(ax, f"{effect.name}, {100 * level:g} % band")


def densities(model: Any, names: Any = None, *, level: float = 0.95, ax: Any = None) -> "Axes":
    """Posterior densities of coefficients, one above the other; the shaded part holds `level` of the mass.

    By default, the eight coefficients with the largest absolute means.
    """
    table = coefficient_summary(model, "densities", level)
    if names is None:
        names = table["mean"].abs().sort_values(ascending=False).index[:8]
    missing = [name for name in names if name not in table.index]
    if missing:
        raise ValueError(f"names must be coefficients of the model; got {missing}. They are {listed(table.index)}.")
    table = table.loc[list(names)[::-1]]
    ax = canvas(ax, (6.4, 1.2 + 0.45 * len(table)))
    z = np.linspace(-3.6, 3.6, 241)
    shape = np.exp(-0.5 * z**2)
    for at, (_, row) in enumerate(table.iterrows()):
        x = row["mean"] + row["sd"] * z
        inside = (x >= row["lower"]) & (x <= row["upper"])
        # heights show precision: the narrowest density is the tallest
        height = 0.9 * shape * np.sqrt(table["sd"].min() / row["sd"])
        ax.fill_between(x, at, at + height, where=inside, color=BLUE, alpha=0.35, lw=0)
        ax.plot(x, at + height, color=BLUE, lw=1.4)
    ax.axvline(0.0, color=INK, lw=0.8)
    ax.set_yticks(np.arange(len(table)), [str(name) for name in table.index])
    return titled(ax, f"Posterior of the coefficients, {100 * level:g} % shaded")


def partial_effect(
    model: Any, X: Any, feature: Any, *, level: float = 0.95, points: int = 61, ax: Any = None
) -> "Axes":
    """The probability with its credible band as one column of X varies, with the others at their medians."""
    effect = views.column_effect(model, X, feature, level, points)
    seen = effect.predictions
    ax = canvas(ax)
    if effect.curve:
        ax.fill_between(effect.values.astype(float), seen.lower, seen.upper, color=BLUE, alpha=0.22, lw=0)
        ax.plot(effect.values.astype(float), seen.probability, color=BLUE, lw=2)
        if effect.dated:
            ax.set_xticks(*zip(*views.date_ticks(*effect.values[[0, -1]]), strict=True))
    else:
        at = np.arange(len(effect.values))
        ax.vlines(at, seen.lower, seen.upper, color=BLUE, lw=2)
        ax.scatter(at, seen.probability, color=BLUE, zorder=3)
        ax.set_xticks(at, [date_text(value) if effect.dated else str(value) for value in effect.values])
        ax.margins(x=0.2)
    ax.set(xlabel=effect.name, ylabel=f"probability of {model.classes_[1]}", ylim=(-0.02, 1.02))
    percent_axis(ax.yaxis)
    return titled(ax, f"{effect.name}, all else typical, {100 * level:g} % band")


# --- what it predicts for rows ---


def is_positive(model: Any, y: Any) -> np.ndarray:
    """Which rows belong to the second class."""
    check_one_probability(model)
    return read_labels(y, len(y), model.classes_)[1].numpy()


def observations(model: Any, X: Any, y: Any = None, *, level: float = 0.95, most: int = 400, ax: Any = None) -> "Axes":
    """The probability of every row with its interval, in order of the log-odds; at most `most` rows, evenly spaced."""
    seen = predictions(model, X, level)
    order = np.argsort(seen.latent, kind="stable")
    order = order[views.spaced_indices(len(order), most)]
    seen = seen.take(order)
    ax = canvas(ax, (7.2, 4.2))
    at = np.arange(len(order))
    groups: list[tuple[Any, str, str | None]] = [(np.ones(len(order), dtype=bool), BLUE, None)]
    if y is not None:
        positive = is_positive(model, y)[order]
        groups = [(~positive, BLUE, str(model.classes_[0])), (positive, RED, str(model.classes_[1]))]
    for group, colour, label in groups:
        ax.vlines(at[group], seen.lower[group], seen.upper[group], color=colour, alpha=0.4, lw=1.5)
        ax.plot(at[group], seen.probability[group], ".", color=colour, label=label, ms=4)
    if y is not None:
        ax.legend(frameon=False, loc="best")
    ax.set(xticks=[], xlabel="rows, in order of their log-odds", ylim=(-0.02, 1.02))
    ax.set_ylabel(f"probability of {model.classes_[1]}")
    percent_axis(ax.yaxis)
    return titled(ax, f"Probability of every row, {100 * level:g} % interval")


def reliability(model: Any, X: Any, y: Any, *, bins: int = 10, level: float = 0.95, ax: Any = None) -> "Axes":
    """Share of positives against predicted probability, by bin, with the interval of each share.

    With more than two classes, that of each class against all others.
    """
    check_model(model)
    several = len(model.classes_) > 2 and not getattr(model, "multilabel_", False)
    if several:
        columns = zip(model.classes_, np.asarray(model.predict_proba(X)).T, strict=True)
        tables = {str(name): calibration(np.asarray(y) == name, p, bins, level) for name, p in columns}
    else:
        tables = {"": calibration(is_positive(model, y), predictions(model, X).probability, bins, level)}
    ax = canvas(ax, (4.8, 4.6))
    ax.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 3)))
    for k, (name, table) in enumerate(tables.items()):
        colour = f"C{k}" if several else BLUE
        if not several:
            ax.fill_between(table["predicted"], table["lower"], table["upper"], color=colour, alpha=0.15, lw=0)
        ax.vlines(table["predicted"], table["lower"], table["upper"], color=colour, lw=1.5)
        sizes = 18 + 90 * np.sqrt(table["rows"] / table["rows"].max())
        look = {"color": colour, "zorder": 3, "edgecolor": "white", "label": name}
        ax.scatter(table["predicted"], table["observed"], s=sizes, **look)
    if several:
        ax.legend(frameon=False)
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="predicted probability", ylabel="share that was positive")
    ax.set_aspect("equal")
    percent_axis(ax.xaxis)
    percent_axis(ax.yaxis)
    return titled(ax, f"Reliability, {100 * level:g} % intervals")


def net_benefit(model: Any, X: Any, y: Any, *, level: float = 0.95, ax: Any = None) -> "Axes":
    """Net benefit of acting by the model, on everybody and on nobody, against the threshold: the decision curve."""
    curve = decision_curve(is_positive(model, y), predictions(model, X).probability, level=level)
    ax, at = canvas(ax), curve["threshold"]
    ax.fill_between(at, curve["lower"], curve["upper"], color=BLUE, alpha=0.15, lw=0)
    ax.plot(at, curve["act_on_all"], color=ORANGE, lw=1.5, label="acting on everybody")
    ax.axhline(0.0, color=GREY, lw=1.5, label="acting on nobody")
    ax.plot(at, curve["net_benefit"], color=BLUE, lw=2, label="acting by the model")
    top = float(curve["upper"].max())
    ax.set(xlim=(0.0, float(at.iloc[-1])), ylim=(-0.12 * top, 1.05 * top), xlabel="threshold", ylabel="net benefit")
    percent_axis(ax.xaxis)
    ax.legend(frameon=False, fontsize=8)
    return titled(ax, f"Decision curve, {100 * level:g} % band")


def residuals(model: Any, X: Any, y: Any, *, values: Any = None, level: float = 0.95, ax: Any = None) -> "Axes":
    """Mean of y - p in groups of rows with similar probabilities or `values`, over the band of chance."""
    table = binned_residuals(is_positive(model, y), predictions(model, X).probability, values, level=level)
    ax = canvas(ax)
    ax.fill_between(table["value"], -table["band"], table["band"], color=BLUE, alpha=0.15, lw=0)
    ax.axhline(0.0, color=GREY, lw=1, ls=(0, (4, 3)))
    colours = np.where(table["outside"], RED, BLUE)
    ax.scatter(table["value"], table["residual"], s=22, c=colours, zorder=3)
    name = "predicted probability" if values is None else str(getattr(values, "name", None) or "value")
    ax.set(xlabel=name, ylabel="observed minus predicted share")
    return titled(ax, f"Residuals, {100 * level:g} % band")


def shrinkage(model: Any, groups: str | None = None, *, level: float = 0.95, top: int = 40, ax: Any = None) -> "Axes":
    """Intercepts of groups with intervals, sorted, beside estimates from each group's own rows alone.

    The second is b̂ = μ/(1 - v/σ²), where μ and v are posterior mean and variance and σ² the variance between groups:
    the less a group's rows tell, the more its effect is drawn towards zero. With more than `top` groups, every k-th of
    the sorted ones is shown.
    """
    if not hasattr(model, "group_effects"):
        raise ValueError(f"shrinkage needs a model with effects of groups; got {type(model).__name__}.")
    table = model.group_effects(groups, level)
    name = str(table.index.names[0])
    if "intercept" not in table.index.get_level_values("effect"):
        raise ValueError(f"shrinkage shows intercepts of groups; got a term of {name!r} without. Name another term.")
    table = table.xs("intercept", level="effect").sort_values("mean")
    table = table.iloc[:: max(1, -(-len(table) // top))]
    variance = model.components(level).loc[f"sd(intercept | {name})", "mean"] ** 2
    own = table["mean"] / np.clip(1.0 - table["sd"] ** 2 / variance, 0.05, 1.0)
    ax = canvas(ax, (6.4, max(2.4, 0.6 + 0.19 * len(table))))
    place = np.arange(len(table))
    ax.hlines(place, table["lower"], table["upper"], color=BLUE, linewidth=1.2)
    ax.plot(table["mean"], place, "o", color=BLUE, markersize=4, label=f"effect, {100 * level:g} % interval")
    ax.plot(own, place, "o", markerfacecolor="none", color=ORANGE, markersize=4, label="from its own rows alone")
    ax.axvline(0.0, color=GREY, linewidth=0.8)
    ax.set_yticks(place, [str(group) for group in table.index], fontsize=8)
    ax.set_xlabel("log-odds, relative to the mean of all groups")
    ax.legend(frameon=False, fontsize=8, loc="lower right")
    return titled(ax, f"Effects of {name}")


def probability_map(
    model: Any, X: Any, y: Any = None, *, columns: Any = None, show: str = "mean", size: int = 80, ax: Any = None
) -> "Axes":
    """Mean or sd of the probability over two columns of X, with the others at their medians and the rows on top.

    Parameters
    ----------
    model : fitted estimator
    X : array or DataFrame (n, p)
    y : array (n,), optional
        Labels, to mark the rows by class.
    columns : pair of column names, optional
        Required if X has more than two.
    show : {"mean", "sd"}, default "mean"
    size : int, default 80
        Points along each side of the grid.
    ax : matplotlib Axes, optional
    """
    if show not in ("mean", "sd"):
        raise ValueError(f"show must be 'mean' or 'sd'; got {show!r}.")
    field = views.probability_grid(model, X, columns, size)
    ax = canvas(ax, (5.8, 4.6))
    values, colours, top = (field.probability, "RdBu_r", 1.0) if show == "mean" else (field.sd, "cividis", None)
    mesh = ax.pcolormesh(field.x, field.y, values, cmap=colours, vmin=0.0, vmax=top, shading="gouraud", rasterized=True)
    if show == "mean":
        ax.contour(field.x, field.y, values, levels=[0.5], colors=INK, linewidths=1)
    frame = views.frame_of(X)
    first, second = (frame.iloc[:, list(frame.columns.astype(str)).index(name)] for name in field.names)
    if y is None:
        ax.scatter(first, second, s=6, color=INK, alpha=0.5, lw=0)
    else:
        positive = is_positive(model, y)
        # classes differ in shape and colour, both light with a dark rim: legible on the darkest and lightest background
        for group, marker, face, label in ((~positive, "o", "white", 0), (positive, "^", YELLOW, 1)):
            look = {"marker": marker, "facecolor": face, "edgecolor": INK, "label": str(model.classes_[label])}
            ax.scatter(first[group], second[group], s=20, lw=0.7, **look)
        ax.legend(frameon=True, fontsize=8, loc="best")
    ax.figure.colorbar(mesh, ax=ax)
    ax.set(xlabel=field.names[0], ylabel=field.names[1])
    what = "Probability" if show == "mean" else "Standard deviation of the probability"
    return titled(ax, f"{what} of {model.classes_[1]}")


# --- what an experiment asked ---


def experiment(
    made: Any, *, columns: Any = None, at: Any = None, level: float = 0.95, size: int = 61, ax: Any = None
) -> "Axes":
    """What an experiment has found out along one input or two, and where it asked.

    Over one input: the expected outcome with its interval, or the utility. Over two: the map of it. With
    ``goal="threshold"`` also where it crosses the threshold, and the band that holds the crossing: the points whose
    side of the threshold is not known with probability (1 + level)/2.

    Parameters
    ----------
    made : viper.Experiment
        With answers.
    columns : name or pair of names, optional
        The inputs to show; by default all, if there are one or two.
    at : dictionary, optional
        Values of the other inputs; by default those of `best()`, or of the middle of the answers.
    level : float, default 0.95
    size : int, default 61
        Points along each side.
    ax : matplotlib Axes, optional
    """
    shown = views.experiment_grid(made, columns, at, level, size)
    low = 0.5 - 0.5 * level
    if len(shown.names) == 1:
        ax = canvas(ax)
        found = shown.estimate
        ax.fill_between(shown.x, found.lower, found.upper, color=SKY, alpha=0.35, lw=0)
        ax.plot(shown.x, found.mean, color=BLUE, lw=1.8)
        if found.above is not None:
            ax.axhline(made.threshold, color=GREY, lw=0.8, ls="--")
            unsure = (found.above > low) & (found.above < 1.0 - low)
            ax.fill_between(shown.x, 0.0, 1.0, where=unsure, color=ORANGE, alpha=0.18, lw=0)
        told = np.interp(shown.asked[:, 0], shown.x, found.mean) if made.goal == "prefer" else shown.answers
        ax.scatter(shown.asked[:, 0], told, s=14, color=INK, alpha=0.6, lw=0, clip_on=False, zorder=3)
        ax.set(xlabel=shown.names[0])
        if shown.log[0]:
            ax.set_xscale("log")
        return titled(ax, shown.title)
    ax = canvas(ax, (5.8, 4.6))
    shape = (size, size)
    values = shown.estimate.mean.reshape(shape)
    binary, pairs = made.outcome == "binary", made.goal == "prefer"
    limits = {"vmin": 0.0, "vmax": 1.0, "cmap": "RdBu_r"} if binary and not pairs else {"cmap": "cividis"}
    mesh = ax.pcolormesh(shown.x, shown.y, values, shading="gouraud", rasterized=True, **limits)
    if shown.estimate.above is not None:
        above = shown.estimate.above.reshape(shape)
        for probability, style in ((0.5, "solid"), (low, "dashed"), (1.0 - low, "dashed")):
            if above.min() < probability < above.max():
                ax.contour(shown.x, shown.y, above, levels=[probability], colors=INK, linewidths=1, linestyles=style)
    good = shown.answers == 1 if binary else np.isfinite(shown.answers)
    labels = ("not preferred", "preferred") if pairs else ("no", "yes") if binary else ("failed", "measured")
    for group, marker, face, label in ((~good, "o", "white", labels[0]), (good, "^", YELLOW, labels[1])):
        look = {"marker": marker, "facecolor": face, "edgecolor": INK, "label": label}
        # whole markers at the bounds too, where many questions are
        ax.scatter(shown.asked[group, 0], shown.asked[group, 1], s=22, lw=0.7, clip_on=False, zorder=3, **look)
    ax.legend(frameon=True, fontsize=8, loc="best")
    ax.figure.colorbar(mesh, ax=ax)
    ax.set(xlabel=shown.names[0], ylabel=shown.names[1])
    for name, is_log in zip("xy", shown.log, strict=True):
        if is_log:
            getattr(ax, f"set_{name}scale")("log")
    return titled(ax, shown.title)


# --- how the fit went ---

FLOOR = 1e-17  # where a logarithmic axis shows 0; below every rounding error


def convergence(model: Any, *, ax: Any = None) -> "Axes":
    """How far each iteration moved the posterior, in nats; for Adam, how far the objective lay below the final one.

    For a Gaussian process, how far each start of the kernel search stayed below the best one.
    """
    if getattr(model, "starts_", None):
        return starts_race(model, ax)
    trace = views.convergence_trace(model)
    if not len(trace.values):
        raise ValueError("convergence needs the history of the fit; got a model without one. Plot it before saving.")
    ax = canvas(ax)
    at, marker = np.arange(1, len(trace.values) + 1), "o" if len(trace.values) < 60 else ""
    ax.semilogy(at, trace.values.clip(FLOOR), color=BLUE, lw=1.6, marker=marker, ms=4)
    ax.set(xlabel="iteration", ylabel=trace.meaning)
    ax.xaxis.get_major_locator().set_params(integer=True)
    return titled(ax, f"Convergence: {model.status_}, ELBO {model.elbo_:.4f}")


def starts_race(model: Any, ax: Any) -> "Axes":
    ax = canvas(ax, (6.4, 1.4 + 0.3 * len(model.starts_)))
    ranked = sorted(model.starts_, key=lambda start: start.elbo)
    below = [ranked[-1].elbo - start.elbo for start in ranked]
    at = np.arange(len(ranked))
    ax.hlines(at, 0.0, below, color=GREY, lw=1.6)
    ax.scatter(below, at, color=[*[GREY] * (len(ranked) - 1), BLUE], zorder=3)
    ax.set_yticks(at, [f"{start.start} ({start.evaluations} evaluations)" for start in ranked], fontsize=8)
    ax.set(xlabel="nats below the best start", ylim=(-0.6, len(ranked) - 0.4))
    return titled(ax, f"Starts of the search: {model.status_}, ELBO {model.elbo_:.4f}")


def bounds(over: str = "mean", *, mean: float = 1.0, sd: float = 2.0, ax: Any = None) -> "Axes":
    """Relative error of every method for E[log(1+e^X)], X ~ N(mean, sd²), over the mean or over the sd.

    The other parameter is held at `mean` or `sd`. The reference value is computed by brute force.
    """
    if over not in ("mean", "sd"):
        raise ValueError(f"over must be 'mean' or 'sd'; got {over!r}.")
    along = torch.linspace(-8, 6, 281).double() if over == "mean" else torch.logspace(-2, 1, 301).double()
    fixed = torch.full_like(along, sd if over == "mean" else mean)
    errors = views.relative_errors(*((along, fixed**2) if over == "mean" else (fixed, along**2)))
    ax = canvas(ax)
    for (name, error), colour in zip(errors.items(), (RED, GREY, SKY, ORANGE, BLUE), strict=True):
        width = 2 if "VI-PER" in name else 1.4
        ax.semilogy(along.numpy(), error.clamp(FLOOR).numpy(), color=colour, lw=width, label=name)
    if over == "sd":
        ax.set_xscale("log")
    ax.set(xlabel="ϑ" if over == "mean" else "τ", ylim=(FLOOR, 10))
    # there are no curves there
    ax.legend(frameon=False, fontsize=8, loc=(0.02, 0.2) if over == "mean" else "upper left")
    return titled(ax, f"Relative error at {f'τ = {sd:g}' if over == 'mean' else f'ϑ = {mean:g}'}")
