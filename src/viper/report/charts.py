"""The charts of the report: each function turns numbers of a study into SVG."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.special

from viper.report.study import Coefficient, Study
from viper.report.svg import (
    ODDS_TICKS,
    TICK_WIDTH,
    Chart,
    Scale,
    element,
    image,
    path_data,
    spaced_step,
    text_mark,
    title_element,
)
from viper.report.views import FEW_VALUES, AverageEffect, Effect, Trace, date_ticks, spaced_indices
from viper.report.words import (
    THIN,
    about_percent,
    chance,
    chance_range,
    column_value,
    factor,
    percent,
    percent_range,
    point_digits,
    points,
    readable_number,
    signed_points,
)

if TYPE_CHECKING:
    import pandas

PERCENTS = [(k / 4, f"{25 * k}{THIN}%") for k in range(5)]
UNIT = (0.0, 1.0)
ROWS_TICK_HEIGHT = 36.0  # height of a name beside the chart of rows, which a phone shows at a third of its size
DENSITY_POINTS = 201
SMEAR = 0.01  # δ: half the width of the window over which a density is averaged, as a share of the axis; see page.js
ROUND_ENDS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)  # where an axis may end, times a power of ten
NARROW = 0.6  # an axis of probabilities is cut if all lie below this, or above one minus this
FIRST_RECALL = 0.05  # recall at which the precision-recall curve begins
LEAST_SHOWN = 1e-4  # smallest probability on a scale of log-odds; smaller ones are drawn at its end
CROWDED = 0.17  # if half of the values lie in so small a share of the axis, its scale is stretched


# --- axes of probabilities ---


class ProbabilityAxis(NamedTuple):
    """An axis of probabilities that suits the values to show: 0 to 100 %, a part of it, or a scale of log-odds."""

    low: float
    high: float
    kind: str  # kind of scale: "linear" or "log-odds"

    @property
    def ends(self) -> tuple[float, float]:
        return self.low, self.high

    @property
    def full(self) -> bool:
        return self.ends == UNIT

    @property
    def ticks(self) -> list[tuple[float, str]]:
        if self.full:
            return PERCENTS
        found = Scale(*self.ends, 0.0, 1.0, self.kind).ticks(5)
        return [(t, f"{100 * t:.6g}{THIN}%") for t in found]

    @property
    def note(self) -> str:
        """A sentence for the caption if the axis is not the usual one."""
        if self.kind == "log-odds":
            which = "small" if self.low < 1.0 - self.high else "large"
            stretched = f"The scale is stretched so that {which} probabilities can be told apart"
            return f" {stretched}; what lies beyond is drawn at its ends."
        if self.full:
            return ""
        return f" The scale ends at {percent(self.high)}." if self.low == 0.0 else f" It starts at {percent(self.low)}."


def probability_axis(values: Any, extent: Any = ()) -> ProbabilityAxis:
    """The axis for `values` on which `extent`, such as ends of intervals, can be drawn too.

    On a scale of log-odds, a few of the outermost may lie beyond its ends.
    """
    values = np.asarray(values, dtype=float)
    every = np.concatenate([values, np.asarray(extent, dtype=float).ravel()])
    low, high = 0.0, 1.0
    if every.max() < NARROW:
        high = round_end(every.max())
    elif every.min() > 1.0 - NARROW:
        low = 1.0 - round_end(1.0 - every.min())
    tenth, half, most = np.quantile(values, [0.1, 0.5, 0.9])
    if most < 0.5 and half - low < CROWDED * (high - low):
        least, largest = odds_ends(values, every)
    elif tenth > 0.5 and high - half < CROWDED * (high - low):
        largest, least = (1.0 - end for end in odds_ends(1.0 - values, 1.0 - every))
    else:
        return ProbabilityAxis(low, high, "linear")
    stretched = ProbabilityAxis(odds_end(least), 1.0 - odds_end(1.0 - largest), "log-odds")
    return stretched if len(stretched.ticks) > 2 else ProbabilityAxis(low, high, "linear")


def odds_ends(values: np.ndarray, every: np.ndarray) -> tuple[float, float]:
    """The ends of a log-odds scale for small probabilities.

    It reaches the largest value, unless the largest 2 % of the values would take a third of it.
    """
    least, largest = max(float(np.quantile(values, 0.02)) / 1.5, LEAST_SHOWN), float(np.quantile(every, 0.98))
    far = max(float(values.max()), largest)
    f_least, f_largest, f_far = scipy.special.logit(np.clip([least, largest, far], 1e-9, 1.0 - 1e-9))
    return least, far if f_far - f_largest < 0.5 * (f_largest - f_least) else largest


def round_end(top: float) -> float:
    """The smallest round number that is at least 4 % above `top`, and at most one."""
    top = max(1.04 * float(top), LEAST_SHOWN)
    base = 10.0 ** math.floor(math.log10(top))
    return min(round(base * next(m for m in ROUND_ENDS if m * base >= top), 12), 1.0)


def odds_end(p: float) -> float:
    """The largest tick of a log-odds scale that is at most p, or the smallest of all."""
    return max((t for t in ODDS_TICKS if t <= p), default=ODDS_TICKS[0])


FULL = ProbabilityAxis(*UNIT, "linear")


def share_chart(x_label: str, y_label: str, x: ProbabilityAxis = FULL, y: ProbabilityAxis = FULL) -> Chart:
    """A square chart of one percentage against another."""
    chart = Chart(x.ends, y.ends, width=380, height=350, margins=(14, 24, 46, 64), x_kind=x.kind, y_kind=y.kind)
    chart.y_axis(y_label, y.ticks)
    chart.x_axis(x_label, x.ticks)
    return chart


def value_ticks(scale: Scale, dated: bool, count: int) -> list[tuple[float, str]]:
    """Ticks of an axis that shows a column of the data."""
    if dated:
        return date_ticks(scale.low, scale.high, count)
    return [(t, readable_number(t)) for t in scale.ticks(count)]


# --- how well it predicts ---


def reliability_axis(study: Study) -> ProbabilityAxis:
    table = study.calibration
    return probability_axis(table["predicted"], table[["observed", "lower", "upper"]])


def reliability_chart(study: Study) -> str:
    table, axis = study.calibration, reliability_axis(study)
    chart = share_chart("predicted probability", "observed share", axis, axis)
    chart.line(axis.ends, axis.ends, "guide")
    chart.band(table["predicted"], table["lower"], table["upper"])
    largest = table["rows"].max()
    for predicted, observed, n, low, high in table.itertuples(index=False):
        chart.interval(predicted, low, high)
        tooltip = f"{n:,} rows given {about_percent(predicted)}: {percent(observed)} {study.predicate('had')}"
        chart.dot(predicted, observed, 3.5 + 6.0 * math.sqrt(n / largest), f"{tooltip} ({percent_range(low, high)})")
    return chart.svg(f"Reliability diagram: share that {study.predicate('had')} against predicted probability")


def roc_chart(study: Study) -> str:
    false, true = thinned(*study.roc)
    chart = share_chart(f"share of {study.negative} flagged by mistake", f"share of {study.positive} found")
    chart.line([0, 1], [0, 1], "guide")
    chart.band(false, np.zeros_like(true), true, "wash")
    tooltips = [
        f"To find {percent(t)} of {study.positive}, {percent(f)} of the others are flagged"
        for f, t in zip(false, true, strict=True)
    ]
    chart.probed_line(false, true, tooltips)
    return chart.svg(f"ROC curve, area {study.scores.auc:.3f}")


def precision_recall_chart(study: Study) -> str:
    """Precision against recall, beginning at a recall of 5 %: before that, single rows decide."""
    from sklearn.metrics import precision_recall_curve

    precision, recall, _ = precision_recall_curve(study.label, study.predictions.probability)
    kept = (recall >= FIRST_RECALL) & (recall > 0.0)
    recall, precision = thinned(recall[kept][::-1], precision[kept][::-1])
    share = float(study.label.mean())
    axis = FULL if precision.max() > NARROW else ProbabilityAxis(0.0, round_end(precision.max()), "linear")
    chart = share_chart(f"share of {study.positive} found", "share of flagged rows that are right", y=axis)
    chart.line([0, 1], [share, share], "guide")
    tooltips = [
        f"{percent(r)} of {study.positive} found, {percent(p)} of those flagged are right"
        for r, p in zip(recall, precision, strict=True)
    ]
    chart.probed_line(recall, precision, tooltips)
    return chart.svg("Precision-recall curve")


def thinned(x: np.ndarray, y: np.ndarray, most: int = 150) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points of a curve, evenly spaced along it and including its ends."""
    along = np.concatenate([[0.0], np.cumsum(np.hypot(np.diff(x), np.diff(y)))])
    at = np.unique(np.searchsorted(along, np.linspace(0.0, along[-1], most)).clip(max=len(x) - 1))
    return x[at], y[at]


# --- decisions, groups and checks ---


def benefit_chart(study: Study, curve: "pandas.DataFrame", threshold: float) -> str:
    """Net benefit per 100 rows against the threshold; the script moves the mark at the chosen one."""
    at, top = curve["threshold"].to_numpy(), 100.0 * max(float(curve["upper"].max()), 1e-9)
    low = -0.12 * top
    chart = Chart((0.0, float(at[-1])), (low, 1.04 * top), width=520, height=350, margins=(14, 24, 46, 64))
    chart.y_axis("net benefit, in hits per 100 rows", [(t, readable_number(t)) for t in chart.y.ticks(5) if t >= 0.0])
    chart.x_axis("threshold", [(t, f"{100 * t:.6g}{THIN}%") for t in chart.x.ticks(5)])
    inside = lambda name: np.clip(100.0 * curve[name].to_numpy(), low, None)  # noqa: E731
    chart.band(at, inside("lower"), inside("upper"))
    everyone = 100.0 * curve["act_on_all"].to_numpy()
    chart.line([0.0, *at[everyone > low]], [100.0 * study.base_rate, *everyone[everyone > low]], "guide")
    chart.line([0.0, float(at[-1])], [0.0, 0.0], "guide")
    tooltips = [
        f"At {percent(row.threshold)}: {readable_number(100 * row.net_benefit)} hits per 100 rows; acting on "
        f"everybody: {readable_number(100 * row.act_on_all)}"
        for row in curve.itertuples()
    ]
    chart.probed_line(at, inside("net_benefit"), tooltips)
    mark = float(chart.x(min(threshold, float(at[-1]))))
    chart.add(element("line", x1=mark, x2=mark, y1=chart.y.end, y2=chart.y.start, class_="mean", id="threshold-mark"))
    return chart.svg("Decision curve: net benefit of acting by the model, on everybody (dashed) and on nobody (dashed)")


class ShareStrips:
    """Small charts on one scale from zero: the observed share of a group with its interval, and the predicted share."""

    def __init__(self, table: "pandas.DataFrame") -> None:
        known = table[["predicted", "observed"]].to_numpy().max()
        ends = table.loc[~table["few"], "observed_upper"]
        top = max(float(known), float(ends.max()) if len(ends) else 0.0)
        self.scale = Scale(0.0, min(1.0, round_end(top)) or 1.0, 6.0, Forest.width - 6.0)

    def axis(self) -> str:
        ends = [(0.0, "start"), (self.scale.high, "end")]
        marks = "".join(
            text_mark(f"{100 * t:.6g}{THIN}%", float(self.scale(t)), 17.0, "tick", text_anchor=anchor)
            for t, anchor in ends
        )
        return image(marks, Forest.width, Forest.height, f"Scale from 0 to {percent(self.scale.high)}", "forest")

    def line(self, name: str, row: Any) -> str:
        middle = 0.5 * Forest.height
        place = lambda share: float(self.scale(min(float(share), self.scale.high)))  # noqa: E731
        tone = " unclear" if row.few else ""
        low, high, observed = place(row.observed_lower), place(row.observed_upper), place(row.observed)
        predicted = place(row.predicted)
        marks = (
            element("line", x1=low, x2=high, y1=middle, y2=middle, class_="interval" + tone)
            + element("circle", cx=observed, cy=middle, r=4.5, class_="dot" + tone)
            + element("line", x1=predicted, x2=predicted, y1=2.0, y2=Forest.height - 2.0, class_="predicted")
        )
        label = f"{name}: predicted {percent(row.predicted)}, observed {percent(row.observed)}"
        return image(marks, Forest.width, Forest.height, label, "forest")


def residual_chart(table: "pandas.DataFrame", label: str, is_probability: bool, dated: bool = False) -> str:
    """Mean residuals of groups, in percentage points, over the band that contains them if the model is right."""
    residual, band = 100.0 * table["residual"].to_numpy(), 100.0 * table["band"].to_numpy()
    reach = 1.1 * max(float(np.abs(residual).max()), float(band.max()), 1e-9)
    value = table["value"].to_numpy()
    axis = probability_axis(value) if is_probability else None
    pad = 0.03 * float(np.ptp(value)) or 1.0
    ends = (float(value.min()) - pad, float(value.max()) + pad) if axis is None else axis.ends
    kind = "linear" if axis is None else axis.kind
    chart = Chart(ends, (-reach, reach), width=520, height=330, margins=(14, 24, 46, 64), x_kind=kind)
    chart.y_axis("observed − predicted, in points", [(t, readable_number(t)) for t in chart.y.ticks(5)])
    chart.x_axis(label, value_ticks(chart.x, dated, 5) if axis is None else axis.ticks)
    at = np.clip(value, *ends)
    chart.band(at, -band, band)
    chart.line(ends, [0.0, 0.0], "guide")
    for x, row, r in zip(at, table.itertuples(), residual, strict=True):
        where = percent(row.value) if is_probability else column_value(row.value, dated)
        tooltip = f"{row.rows:,} rows with {label} around {where}: {readable_number(r)} points off"
        chart.dot(float(x), r, 4.5, tooltip, "dot" if row.outside else "dot unclear")
    return chart.svg(f"Residuals in groups of rows against {label}, with the band of chance")


# --- what drives it ---


class Forest:
    """Small charts on one common scale: one per coefficient for the rows of a table, and one that shows the axis."""

    width, height = 300, 26

    def __init__(self, coefficients: Sequence[Coefficient | AverageEffect]) -> None:
        low = min(0.0, *(c.lower for c in coefficients))
        high = max(0.0, *(c.upper for c in coefficients))
        pad = 0.04 * (high - low) or 0.1
        self.scale = Scale(low - pad, high + pad, 6.0, self.width - 6.0)

    def ticks(self) -> list[float]:
        """Factors of the odds: powers of ten, or of a smaller base where the range is small."""
        reach = max(-self.scale.low, self.scale.high)
        base = next((b for b in (1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0, 1e4) if reach < 2.9 * math.log(b)), 1e8)
        return [base**k for k in range(-2, 3) if self.scale.low <= k * math.log(base) <= self.scale.high]

    def axis(self) -> str:
        names = {t: factor(t).rstrip("0").rstrip(".") if t < 100 else factor(t) for t in self.ticks()}
        marks = "".join(
            text_mark(f"×{name}", float(self.scale(math.log(t))), 17.0, "tick", text_anchor="middle")
            for t, name in names.items()
        )
        return image(marks, self.width, self.height, "Scale: the factor by which the odds are multiplied", "forest")

    def line(self, c: Coefficient | AverageEffect) -> str:
        middle = 0.5 * self.height
        tone = "" if c.clear else " unclear"
        low, mean, high = (float(x) for x in self.scale(np.array([c.lower, c.mean, c.upper])))
        zero = float(self.scale(0.0))
        marks = (
            element("line", x1=zero, x2=zero, y1=0.0, y2=float(self.height), class_="axis")
            + element("line", x1=low, x2=high, y1=middle, y2=middle, class_="interval" + tone)
            + element("circle", cx=mean, cy=middle, r=4.5, class_="dot" + tone)
        )
        return image(marks, self.width, self.height, self.label(c), "forest")

    def label(self, c: Any) -> str:
        return f"{c.name}: odds times {factor(math.exp(c.mean))}"


class PointsForest(Forest):
    """The same for changes of an average probability, in percentage points."""

    def axis(self) -> str:
        marks = "".join(
            text_mark(readable_number(100.0 * t), float(self.scale(t)), 17.0, "tick", text_anchor="middle")
            for t in self.scale.ticks(4)
        )
        return image(marks, self.width, self.height, "Scale: the change in percentage points", "forest")

    def label(self, c: Any) -> str:
        return f"{c.name}, {c.change}: {signed_points(c.mean, point_digits(c.upper - c.lower))} percentage points"


def relevance_bar(share: float, label: str) -> str:
    marks = element("rect", x=0.0, y=8.0, width=max(300.0 * share, 1.0), height=10.0, rx=2.0, class_="bar")
    return image(marks, Forest.width, Forest.height, label, "forest")


def effects_axis(effects: list[Effect]) -> ProbabilityAxis:
    """One axis for all columns, so that their effects can be compared."""
    curves = np.concatenate([e.predictions.probability for e in effects])
    return probability_axis(curves, [end for e in effects for end in (*e.predictions.lower, *e.predictions.upper)])


def level_names(e: Effect) -> list[str]:
    """The levels of a category as ticks; long ones are cut."""
    return [name if len(name := column_value(v, e.dated)) < 14 else name[:12] + "…" for v in e.values]


def names_height(e: Effect) -> int:
    """Room for names below an axis, in pixels, that are too many or too long to stand side by side."""
    longest = max(map(len, level_names(e)))
    return 0 if TICK_WIDTH * (longest + 1) * len(e.values) <= 430 else round(4.5 * longest)


def effect_chart(study: Study, e: Effect, axis: ProbabilityAxis) -> str:
    seen = e.predictions
    tooltips = [
        f"{e.name} {column_value(v, e.dated)}: {chance(p)} ({chance_range(low, high)})"
        for v, p, low, high in zip(e.values, seen.probability, seen.lower, seen.upper, strict=True)
    ]
    values = e.values.astype(float) if e.curve else np.arange(len(e.values))
    ends = (values[0], values[-1]) if e.curve else (-0.6, len(values) - 0.4)
    margins = (14, 24, 46 if e.curve else 46 + names_height(e), 66)
    chart = Chart(ends, axis.ends, width=520, height=300 + margins[2] - 46, margins=margins, y_kind=axis.kind)
    chart.y_axis(f"probability of {study.positive}", axis.ticks)
    if e.curve:
        chart.x_axis(e.name, value_ticks(chart.x, e.dated, 5))
        chart.band(values, seen.lower, seen.upper)
        chart.probed_line(values, seen.probability, tooltips)
    else:
        chart.x_axis(e.name, list(enumerate(level_names(e))))
        for k, content in enumerate(tooltips):
            chart.interval(k, seen.lower[k], seen.upper[k], "interval wide")
            chart.dot(k, seen.probability[k], 6.0, content)
    return chart.svg(f"Probability of {study.positive} against {e.name}, with its {study.level_name} band")


def term_chart(effect: Any, ends: tuple[float, float]) -> str:
    """What a column adds to the log-odds, with its band; for a pair, the surface of means."""
    if len(effect.columns) == 2:
        return pair_chart(effect)
    (values,) = effect.values
    at = values if len(values) > FEW_VALUES else np.arange(len(values))
    x = (at[0], at[-1]) if len(values) > FEW_VALUES else (-0.6, len(values) - 0.4)
    chart = Chart(x, ends, width=420, height=260)
    chart.y_axis("log-odds", [(t, readable_number(t)) for t in chart.y.ticks(4)])
    tooltips = [
        f"{effect.name} {readable_number(v)}: {m:+.2f} ({low:+.2f} to {high:+.2f})".replace("-", "−")
        for v, m, low, high in zip(values, effect.mean, effect.lower, effect.upper, strict=True)
    ]
    if len(values) > FEW_VALUES:
        chart.x_axis(effect.name, [(t, readable_number(t)) for t in chart.x.ticks(5)])
        chart.band(at, effect.lower, effect.upper)
        chart.probed_line(at, effect.mean, tooltips)
    else:
        chart.x_axis(effect.name, [(float(k), readable_number(v)) for k, v in enumerate(values)])
        for k, content in enumerate(tooltips):
            chart.interval(k, effect.lower[k], effect.upper[k], "interval wide")
            chart.dot(k, effect.mean[k], 6.0, content)
    return chart.svg(f"What {effect.name} adds to the log-odds, with its band")


def pair_chart(effect: Any) -> str:
    """What a pair adds to the log-odds beyond its two columns, in colours around zero."""
    edges = [cell_edges(values) for values in effect.values]
    chart = Chart(*((edge[0], edge[-1]) for edge in edges), width=420, height=320)
    chart.y_axis(effect.columns[1], [(t, readable_number(t)) for t in chart.y.ticks(5)])
    chart.x_axis(effect.columns[0], [(t, readable_number(t)) for t in chart.x.ticks(5)])
    reach = float(np.abs(effect.mean).max()) or 1.0
    for i, x in enumerate(effect.values[0]):
        for j, y in enumerate(effect.values[1]):
            place = f"{effect.columns[0]} {readable_number(x)}, {effect.columns[1]} {readable_number(y)}"
            ends = f"{effect.lower[i, j]:+.2f} to {effect.upper[i, j]:+.2f}"
            tooltip = f"{place}: {effect.mean[i, j]:+.2f} ({ends})".replace("-", "−")
            colour = scale_colour(0.5 + 0.5 * float(effect.mean[i, j]) / reach, "mean")
            sides = (edges[0][i], edges[0][i + 1]), (edges[1][j], edges[1][j + 1])
            chart.box(*sides, tooltip, fill=colour, stroke=colour)
    return chart.svg(f"What {effect.columns[0]} and {effect.columns[1]} add to the log-odds together")


def cell_edges(values: np.ndarray) -> np.ndarray:
    """The ends of cells around values: midpoints, and as far beyond the first and the last."""
    if len(values) == 1:
        return np.array([values[0] - 0.5, values[0] + 0.5])
    middle = 0.5 * (values[1:] + values[:-1])
    return np.concatenate([[2 * values[0] - middle[0]], middle, [2 * values[-1] - middle[-1]]])


# --- how sure it is ---


def width_histogram(study: Study) -> str:
    width = study.predictions.width
    reach = round_end(min(float(width.max()), 1.5 * float(np.quantile(width, 0.99))))
    beyond = " (last bar: all wider ones)" if width.max() > reach else ""
    count, edges = np.histogram(np.minimum(width, reach), bins=20, range=(0.0, reach))
    share = count / count.sum()
    top = 1.08 * share.max()
    chart = Chart((0.0, reach), (0.0, top), width=560, height=250)
    chart.y_axis("share of rows", [(t, f"{100 * t:.3g}{THIN}%") for t in chart.y.ticks(4)])
    ticks = [(t, f"{100 * t:.6g}") for t in chart.x.ticks(5)]
    chart.x_axis(f"width in percentage points{beyond}", ticks)
    for n, s, left, right in zip(count, share, edges[:-1], edges[1:], strict=True):
        ends = f"{100 * left:.3g} to {100 * right:.3g} points"
        if beyond and right == edges[-1]:
            ends = f"{100 * left:.3g} points or more"
        gap = 0.003 * reach
        chart.box((left + gap, right - gap), (0.0, float(s)), f"{n:,} rows ({percent(s)}): {ends} wide", class_="bar")
    return chart.svg("Histogram of the widths of the probability intervals")


def rows_axis(study: Study) -> ProbabilityAxis:
    seen = study.predictions.take(study.sampled)
    return probability_axis(seen.probability, np.concatenate([seen.lower, seen.upper]))


def rows_chart(study: Study, labels: list[str]) -> str:
    """The sampled rows in order of their log-odds, each with its interval. `labels` holds the names of all rows."""
    rows, axis = study.sampled, rows_axis(study)
    ends = (-1.0, float(len(rows)))
    chart = Chart(ends, axis.ends, width=1060, height=320, margins=(14, 16, 34, 66), y_kind=axis.kind)
    step = spaced_step([float(chart.y(t)) for t, _ in axis.ticks], [ROWS_TICK_HEIGHT] * len(axis.ticks))
    chart.y_axis(f"probability of {study.positive}", axis.ticks[::step])
    chart.x_axis("rows, from the least to the most probable", [])
    for at, k in enumerate(rows):
        x, p = float(chart.x(at)), float(study.predictions.probability[k])
        low, high = float(study.predictions.lower[k]), float(study.predictions.upper[k])
        outcome = study.class_names[int(study.label[k])]
        tooltip = f"{labels[k]}: {chance(p)} ({chance_range(low, high)}); outcome: {outcome}"
        marks = (
            element("line", x1=x, x2=x, y1=float(chart.y(low)), y2=float(chart.y(high)))
            + element("circle", cx=x, cy=float(chart.y(p)), r=3.0)
            + title_element(tooltip)
        )
        chart.add(element("g", marks, class_="person yes" if study.label[k] else "person no", data_row=int(k)))
    return chart.svg(f"Probability of {study.positive} for {len(rows)} rows, each with its {study.level_name} interval")


def density_ends(study: Study, k: int) -> tuple[float, float]:
    """Where the axis of one row's density starts and ends: 0 to 100 %, or a part of it around a narrow interval."""
    seen = study.predictions
    reach = 4.0 * float(seen.latent_sd[k])  # in log-odds: nearly all of the mass
    low, high = scipy.special.expit(seen.latent[k] + np.array([-reach, reach]))
    if high < 0.5 * NARROW:
        return 0.0, round_end(high)
    return (1.0 - round_end(1.0 - low), 1.0) if low > 1.0 - 0.5 * NARROW else UNIT


def density_ticks(ends: tuple[float, float]) -> list[str]:
    """The labels of five ticks, evenly spaced from end to end."""
    return [f"{100 * t:.6g}{THIN}%" for t in np.linspace(*ends, 5)]


def density_curve(theta: float, tau: float, ends: tuple[float, float] = UNIT) -> tuple[np.ndarray, np.ndarray]:
    """A grid of p from end to end, and the density of s(f), f ~ N(ϑ, τ²), averaged over a window around each p.

    [Φ((logit(p+δ) - ϑ)/τ) - Φ((logit(p-δ) - ϑ)/τ)] / 2δ is finite even where the density has a spike at 0 or 1. The
    window is 2 % of the axis wide.
    """
    p, half = np.linspace(*ends, DENSITY_POINTS), SMEAR * (ends[1] - ends[0])
    low, high = np.clip(p - half, *ends), np.clip(p + half, *ends)
    below = [scipy.special.ndtr((scipy.special.logit(end) - theta) / tau) for end in (low, high)]
    return p, (below[1] - below[0]) / (high - low)


def density_chart(study: Study, k: int) -> str:
    """What the model believes about one row's probability. The script redraws this chart for other rows."""
    ends = density_ends(study, k)
    chart = Chart(ends, UNIT, width=420, height=240, margins=(14, 20, 46, 20))
    chart.x_axis(f"probability of {study.positive}", list(zip(np.linspace(*ends, 5), density_ticks(ends), strict=True)))
    theta, tau = float(study.predictions.latent[k]), max(float(study.predictions.latent_sd[k]), 1e-6)
    p, height = density_curve(theta, tau, ends)
    x, y, floor = chart.x(p), chart.y(0.96 * height / height.max()), chart.y.start
    half = SMEAR * (ends[1] - ends[0])
    inside = (p >= study.predictions.lower[k] - half) & (p <= study.predictions.upper[k] + half)
    there = np.concatenate([x[inside][:1], x[inside], x[inside][-1:]])
    shade = path_data(there, np.concatenate([[floor], y[inside], [floor]]), close=True)
    chart.add(element("path", d=shade, class_="band", id="density-band"))
    chart.add(element("path", d=path_data(x, y), class_="line", id="density-line"))
    mean = float(chart.x(study.predictions.probability[k]))
    chart.add(element("line", x1=mean, x2=mean, y1=chart.y.end, y2=floor, class_="mean", id="density-mean"))
    return chart.svg("Density of the chosen row's probability; the dashed line is its mean", id="density")


# --- maps and convergence ---


def map_axis(study: Study, what: str) -> ProbabilityAxis:
    """The scale of a map's colours."""
    grid = study.map
    assert grid is not None
    if what == "sd":
        return ProbabilityAxis(0.0, max(float(grid.sd.max()), 1e-9), "linear")
    return probability_axis(grid.probability.ravel())


def map_chart(study: Study, what: str, marks: bool = True) -> str:
    """Mean or sd of the probability over two columns, with the sampled rows on top."""
    grid, axis = study.map, map_axis(study, what)
    assert grid is not None
    values = Scale(*axis.ends, 0.0, 1.0, axis.kind)(grid.probability if what == "mean" else grid.sd)
    shades = map_shades(axis, what)
    half_x, half_y = 0.5 * (grid.x[1] - grid.x[0]), 0.5 * (grid.y[1] - grid.y[0])
    chart = Chart(
        (grid.x[0] - half_x, grid.x[-1] + half_x), (grid.y[0] - half_y, grid.y[-1] + half_y), width=520, height=440
    )
    dated = [name in study.dates for name in grid.names]
    chart.y_axis(grid.names[1], value_ticks(chart.y, dated[1], 5))
    chart.x_axis(grid.names[0], value_ticks(chart.x, dated[0], 5))
    for i, y in enumerate(grid.y):
        for j, x in enumerate(grid.x):
            place = f"{grid.names[0]} {column_value(x, dated[0])}, {grid.names[1]} {column_value(y, dated[1])}"
            tooltip = f"{place}: {chance(grid.probability[i, j])}, give or take {points(grid.sd[i, j])}"
            colour = scale_colour(float(values[i, j]), shades)
            chart.box((x - half_x, x + half_x), (y - half_y, y + half_y), tooltip, fill=colour, stroke=colour)
    if marks:
        mark_rows(chart, study)
    name = "Probability" if what == "mean" else "Standard deviation of the probability"
    return chart.svg(f"Map: {name} of {study.positive} over {grid.names[0]} and {grid.names[1]}")


def mark_rows(chart: Chart, study: Study) -> None:
    """Add the sampled rows to a map, the classes in different shapes."""
    assert study.map is not None
    columns = list(study.frame.columns.astype(str))
    first, second = (study.frame.iloc[:, columns.index(name)].to_numpy(dtype=float) for name in study.map.names)
    for k in study.sampled:
        if study.label[k]:
            chart.triangle(first[k], second[k], 3.2, "site yes")
        else:
            chart.dot(first[k], second[k], 2.6, None, "site no")


# Stops of the colour scales: blue to white to vermilion around 50 %, white to vermilion, and dark blue to yellow
SHADES = {
    "mean": [(0, 90, 156), (140, 190, 222), (246, 244, 240), (240, 168, 120), (196, 70, 10)],
    "part": [(246, 244, 240), (243, 206, 180), (240, 168, 120), (218, 119, 65), (196, 70, 10)],
    "sd": [(20, 34, 70), (58, 80, 112), (124, 123, 120), (190, 172, 90), (252, 228, 66)],
}


def map_shades(axis: ProbabilityAxis, what: str) -> str:
    """The colours around 50 % only where the scale has 50 % in its middle."""
    return "part" if what == "mean" and not axis.full else what


def scale_colour(share: float, shades: str) -> str:
    stops = np.array(SHADES[shades], dtype=float)
    at = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    k = min(int(at), len(stops) - 2)
    return "#" + "".join(f"{round(c):02x}" for c in stops[k] + (at - k) * (stops[k + 1] - stops[k]))


def map_legend(study: Study, what: str) -> str:
    """The colour scale of a map, with its ticks labelled."""
    axis = map_axis(study, what)
    shades, width = map_shades(axis, what), 240 / 40
    marks = "".join(
        element("rect", x=k * width, y=0.0, width=width + 0.5, height=12.0, fill=scale_colour(k / 39, shades))
        for k in range(40)
    )
    scale = Scale(*axis.ends, 0.0, 240.0, axis.kind)
    ticks = axis.ticks if what == "mean" else [(t, f"{100 * t:.6g}") for t in scale.ticks(3)]
    for t, name in ticks:
        at = float(scale(t))
        side = "start" if at < 12 else "end" if at > 228 else "middle"
        marks += text_mark(name, at, 28.0, "tick", text_anchor=side)
    return image(marks, 240, 32, f"Colours from {ticks[0][1]} to {ticks[-1][1]}", "legend")


def convergence_chart(trace: Trace) -> str:
    at = spaced_indices(len(trace.values), 300)
    values = np.maximum(trace.values[at], 1e-17)
    low, high = 10.0 ** math.floor(math.log10(values.min())), 10.0 ** math.ceil(math.log10(values.max()) + 1e-9)
    x, y = (1.0, float(max(at[-1] + 1, 2))), (low, high if high > low else 10 * low)
    chart = Chart(x, y, width=640, height=260, margins=(14, 16, 46, 70), y_kind="log")
    chart.y_axis("nats", [(t, f"{t:.0e}".replace("e-0", "e-").replace("e+0", "e")) for t in chart.y.ticks(5)])
    whole = [t for t in chart.x.ticks(8) if t == int(t) and t >= 1] or [1.0]
    chart.x_axis("iteration", [(t, f"{t:,.0f}") for t in whole])
    chart.line(at + 1.0, values)
    if len(at) < 60:
        for k, v in zip(at, values, strict=True):
            chart.dot(k + 1.0, v, 4.0, f"iteration {k + 1}: {v:.1e} {trace.meaning}")
    return chart.svg(f"Convergence: {trace.meaning}, by iteration")
