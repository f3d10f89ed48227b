"""The charts of the report: each function turns numbers of a study into SVG."""

import math

import numpy as np
import scipy.special

from viper.report.study import Coefficient, Study
from viper.report.svg import Chart, Scale, element, image, path_data, text_mark, title_element
from viper.report.views import Effect, Trace, spaced_indices
from viper.report.words import about, factor, percent, percent_range, readable_number

PERCENTS = [(k / 4, f"{25 * k}%") for k in range(5)]
UNIT = (0.0, 1.0)
DENSITY_POINTS = 201
SMEAR = 0.01  # δ: half the width of the window over which a density is averaged; page.js uses the same number


# --- how well it predicts ---


def percent_chart(x_label: str, y_label: str) -> Chart:
    chart = Chart(UNIT, UNIT, width=380, height=350, margins=(14, 24, 46, 58))
    chart.y_axis(y_label, PERCENTS)
    chart.x_axis(x_label, PERCENTS)
    return chart


def reliability_chart(study: Study) -> str:
    table = study.calibration
    chart = percent_chart("predicted probability", f"share that {study.predicate('was')}")
    chart.line([0, 1], [0, 1], "guide")
    chart.band(table["predicted"], table["lower"], table["upper"])
    largest = table["rows"].max()
    for predicted, observed, n, low, high in table.itertuples(index=False):
        chart.interval(predicted, low, high)
        tooltip = f"{n:,} rows given {about(predicted)}: {percent(observed)} {study.predicate('were')}"
        chart.dot(predicted, observed, 3.5 + 6.0 * math.sqrt(n / largest), f"{tooltip} ({percent_range(low, high)})")
    return chart.svg(f"Reliability diagram: share that {study.predicate('was')} against predicted probability")


def roc_chart(study: Study) -> str:
    false, true = thinned(*study.roc)
    chart = percent_chart(f"share of {study.negative} flagged by mistake", f"share of {study.positive} found")
    chart.line([0, 1], [0, 1], "guide")
    chart.band(false, np.zeros_like(true), true, "wash")
    tooltips = [
        f"To find {percent(t)} of {study.positive}, {percent(f)} of the others are flagged"
        for f, t in zip(false, true, strict=True)
    ]
    chart.probed_line(false, true, tooltips)
    return chart.svg(f"ROC curve, area {study.scores.auc:.3f}")


def precision_recall_chart(study: Study) -> str:
    from sklearn.metrics import precision_recall_curve

    precision, recall, _ = precision_recall_curve(study.label, study.predictions.probability)
    recall, precision = thinned(recall[::-1], precision[::-1])
    share = float(study.label.mean())
    chart = percent_chart(f"share of {study.positive} found", f"share of flagged that {study.predicate('are')}")
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


# --- what drives it ---


class Forest:
    """Small charts on one common scale: one per coefficient for the rows of a table, and one that shows the axis."""

    width, height = 300, 26

    def __init__(self, coefficients: list[Coefficient]) -> None:
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

    def line(self, c: Coefficient) -> str:
        middle = 0.5 * self.height
        tone = "" if c.clear else " unclear"
        low, mean, high = (float(x) for x in self.scale(np.array([c.lower, c.mean, c.upper])))
        zero = float(self.scale(0.0))
        marks = (
            element("line", x1=zero, x2=zero, y1=0.0, y2=float(self.height), class_="axis")
            + element("line", x1=low, x2=high, y1=middle, y2=middle, class_="interval" + tone)
            + element("circle", cx=mean, cy=middle, r=4.5, class_="dot" + tone)
        )
        label = f"{c.name}: odds times {factor(math.exp(c.mean))}"
        return image(marks, self.width, self.height, label, "forest")


def relevance_bar(share: float, label: str) -> str:
    marks = element("rect", x=0.0, y=8.0, width=max(300.0 * share, 1.0), height=10.0, rx=2.0, class_="bar")
    return image(marks, Forest.width, Forest.height, label, "forest")


def effect_chart(study: Study, e: Effect) -> str:
    seen = e.predictions
    tooltips = [
        f"{e.name} {readable_number(v)}: {percent(p)} ({percent_range(low, high)})"
        for v, p, low, high in zip(e.values, seen.probability, seen.lower, seen.upper, strict=True)
    ]
    values = e.values.astype(float) if e.curve else np.arange(len(e.values))
    ends = (values[0], values[-1]) if e.curve else (-0.6, len(values) - 0.4)
    chart = Chart(ends, UNIT, width=820, height=380, margins=(14, 24, 46, 58))
    chart.y_axis(f"probability of {study.positive}", PERCENTS)
    if e.curve:
        chart.x_axis(e.name, [(t, readable_number(t)) for t in chart.x.ticks(6)])
        chart.band(values, seen.lower, seen.upper)
        chart.probed_line(values, seen.probability, tooltips)
    else:
        short = [name if len(name := readable_number(v)) < 14 else name[:12] + "…" for v in e.values]
        chart.x_axis(e.name, list(enumerate(short)))
        for k, content in enumerate(tooltips):
            chart.interval(k, seen.lower[k], seen.upper[k], "interval wide")
            chart.dot(k, seen.probability[k], 6.0, content)
    return chart.svg(f"Probability of {study.positive} against {e.name}, with its {study.level_name} band")


# --- how sure it is ---


def width_histogram(study: Study) -> str:
    count, edges = np.histogram(study.predictions.width, bins=20, range=UNIT)
    share = count / count.sum()
    top = 1.08 * share.max()
    chart = Chart(UNIT, (0.0, top), width=560, height=250)
    chart.y_axis("share of rows", [(t, f"{100 * t:.3g}%") for t in chart.y.ticks(4)])
    chart.x_axis("width of the interval, in percentage points", [(k / 5, str(20 * k)) for k in range(6)])
    for n, s, left, right in zip(count, share, edges[:-1], edges[1:], strict=True):
        tooltip = f"{n:,} rows ({percent(s)}): interval {100 * left:.0f} to {100 * right:.0f} points wide"
        chart.box((left + 0.003, right - 0.003), (0.0, float(s)), tooltip, class_="bar")
    return chart.svg("Histogram of the widths of the probability intervals")


def rows_chart(study: Study, labels: list[str]) -> str:
    """The sampled rows in order of their log-odds, each with its interval. `labels` holds the names of all rows."""
    rows = study.sampled
    chart = Chart((-1.0, float(len(rows))), UNIT, width=1060, height=320, margins=(14, 16, 34, 58))
    chart.y_axis(f"probability of {study.positive}", PERCENTS)
    chart.x_axis("rows, from the least to the most probable", [])
    for at, k in enumerate(rows):
        x, p = float(chart.x(at)), float(study.predictions.probability[k])
        low, high = float(study.predictions.lower[k]), float(study.predictions.upper[k])
        outcome = study.class_names[int(study.label[k])]
        tooltip = f"row {labels[k]}: {percent(p)} ({percent_range(low, high)}); outcome: {outcome}"
        marks = (
            element("line", x1=x, x2=x, y1=float(chart.y(low)), y2=float(chart.y(high)))
            + element("circle", cx=x, cy=float(chart.y(p)), r=3.0)
            + title_element(tooltip)
        )
        chart.add(element("g", marks, class_="person yes" if study.label[k] else "person no", data_row=int(k)))
    return chart.svg(f"Probability of {study.positive} for {len(rows)} rows, each with its {study.level_name} interval")


def density_curve(theta: float, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """A grid of p, and the density of s(f), f ~ N(ϑ, τ²), averaged over two percentage points around each p.

    [Φ((logit(p+δ) - ϑ)/τ) - Φ((logit(p-δ) - ϑ)/τ)] / 2δ is finite even where the density has a spike at 0 or 1.
    """
    p = np.linspace(0.0, 1.0, DENSITY_POINTS)
    low, high = np.clip(p - SMEAR, 0.0, 1.0), np.clip(p + SMEAR, 0.0, 1.0)
    below = [scipy.special.ndtr((scipy.special.logit(end) - theta) / tau) for end in (low, high)]
    return p, (below[1] - below[0]) / (high - low)


def density_chart(study: Study, k: int) -> str:
    """What the model believes about one row's probability. The script redraws this chart for other rows."""
    chart = Chart(UNIT, UNIT, width=420, height=240, margins=(14, 20, 46, 20))
    chart.x_axis(f"probability of {study.positive}", PERCENTS)
    p, height = density_curve(float(study.predictions.latent[k]), max(float(study.predictions.latent_sd[k]), 1e-6))
    x, y, floor = chart.x(p), chart.y(0.96 * height / height.max()), chart.y.start
    inside = (p >= study.predictions.lower[k] - SMEAR) & (p <= study.predictions.upper[k] + SMEAR)
    there = np.concatenate([x[inside][:1], x[inside], x[inside][-1:]])
    shade = path_data(there, np.concatenate([[floor], y[inside], [floor]]), close=True)
    chart.add(element("path", d=shade, class_="band", id="density-band"))
    chart.add(element("path", d=path_data(x, y), class_="line", id="density-line"))
    mean = float(chart.x(study.predictions.probability[k]))
    chart.add(element("line", x1=mean, x2=mean, y1=chart.y.end, y2=floor, class_="mean", id="density-mean"))
    return chart.svg("Density of the chosen row's probability; the dashed line is its mean", id="density")


# --- maps and convergence ---


def map_chart(study: Study, what: str) -> str:
    """Mean or sd of the probability over two columns, with the sampled rows on top."""
    grid = study.map
    assert grid is not None
    values = grid.probability if what == "mean" else grid.sd
    top = 1.0 if what == "mean" else max(float(values.max()), 1e-9)
    half_x, half_y = 0.5 * (grid.x[1] - grid.x[0]), 0.5 * (grid.y[1] - grid.y[0])
    chart = Chart(
        (grid.x[0] - half_x, grid.x[-1] + half_x), (grid.y[0] - half_y, grid.y[-1] + half_y), width=520, height=440
    )
    chart.y_axis(grid.names[1], [(t, readable_number(t)) for t in chart.y.ticks(5)])
    chart.x_axis(grid.names[0], [(t, readable_number(t)) for t in chart.x.ticks(5)])
    for i, y in enumerate(grid.y):
        for j, x in enumerate(grid.x):
            place = f"{grid.names[0]} {readable_number(x)}, {grid.names[1]} {readable_number(y)}"
            tooltip = f"{place}: {percent(grid.probability[i, j])}, sd {100 * grid.sd[i, j]:.0f} points"
            colour = scale_colour(float(values[i, j]) / top, what)
            chart.box((x - half_x, x + half_x), (y - half_y, y + half_y), tooltip, fill=colour, stroke=colour)
    columns = list(study.frame.columns.astype(str))
    first, second = (study.frame.iloc[:, columns.index(name)].to_numpy(dtype=float) for name in grid.names)
    for k in study.sampled:
        if study.label[k]:
            chart.triangle(first[k], second[k], 3.2, "site yes")
        else:
            chart.dot(first[k], second[k], 2.6, None, "site no")
    name = "Probability" if what == "mean" else "Standard deviation of the probability"
    return chart.svg(f"Map: {name} of {study.positive} over {grid.names[0]} and {grid.names[1]}")


# Stops of the two colour scales: blue to white to vermilion, and dark blue to yellow
SHADES = {
    "mean": [(0, 90, 156), (140, 190, 222), (246, 244, 240), (240, 168, 120), (196, 70, 10)],
    "sd": [(20, 34, 70), (58, 80, 112), (124, 123, 120), (190, 172, 90), (252, 228, 66)],
}


def scale_colour(share: float, what: str) -> str:
    stops = np.array(SHADES[what], dtype=float)
    at = min(max(share, 0.0), 1.0) * (len(stops) - 1)
    k = min(int(at), len(stops) - 2)
    return "#" + "".join(f"{round(c):02x}" for c in stops[k] + (at - k) * (stops[k + 1] - stops[k]))


def map_legend(what: str, low: str, high: str) -> str:
    """The colour scale of a map, with its ends labelled."""
    width = 240 / 40
    marks = "".join(
        element("rect", x=k * width, y=0.0, width=width + 0.5, height=12.0, fill=scale_colour(k / 39, what))
        for k in range(40)
    )
    marks += text_mark(low, 0.0, 28.0, "tick") + text_mark(high, 240.0, 28.0, "tick", text_anchor="end")
    return image(marks, 240, 32, f"Colours from {low} to {high}", "legend")


def convergence_chart(trace: Trace) -> str:
    at = spaced_indices(len(trace.values), 300)
    values = np.maximum(trace.values[at], 1e-17)
    low, high = 10.0 ** math.floor(math.log10(values.min())), 10.0 ** math.ceil(math.log10(values.max()) + 1e-9)
    x, y = (1.0, float(max(at[-1] + 1, 2))), (low, high if high > low else 10 * low)
    chart = Chart(x, y, width=640, height=260, margins=(14, 16, 46, 70), log_y=True)
    chart.y_axis("nats", [(t, f"{t:.0e}".replace("e-0", "e-").replace("e+0", "e")) for t in chart.y.ticks(5)])
    whole = [t for t in chart.x.ticks(8) if t == int(t) and t >= 1] or [1.0]
    chart.x_axis("iteration", [(t, f"{t:,.0f}") for t in whole])
    chart.line(at + 1.0, values)
    if len(at) < 60:
        for k, v in zip(at, values, strict=True):
            chart.dot(k + 1.0, v, 4.0, f"iteration {k + 1}: {v:.1e} {trace.meaning}")
    return chart.svg(f"Convergence: {trace.meaning}, by iteration")
