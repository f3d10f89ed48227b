"""Markup of the page as text: elements, tables and figures of HTML, and charts in SVG.

Colours come from the page's style sheet, through classes. The content of `element`, and arguments whose names end in
`markup`, are markup already; every other text is escaped here. A mark's <title> is its tooltip, which the browser
shows until the script takes over.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

MOST_PHONE_COLUMNS = 4  # a table with more is stacked on a phone


def element(name: str, content: str = "", **attributes: Any) -> str:
    """<name attributes>content</name>. In attribute names, a trailing underscore is dropped; others become hyphens."""
    pairs = (
        f' {key.rstrip("_").replace("_", "-")}="{escape(attribute_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{''.join(pairs)}>{content}</{name}>" if content else f"<{name}{''.join(pairs)}/>"


def attribute_value(value: Any) -> str:
    """Floats to a tenth, which for lengths is a tenth of a pixel; other values unchanged."""
    return f"{float(value):.1f}".removesuffix(".0") if isinstance(value, float | np.floating) else str(value)


# --- HTML ---


def paragraph(sentence: str | None, class_: str | None = None, **attributes: Any) -> str:
    return element("p", escape(sentence), class_=class_, **attributes) if sentence else ""


def section(id_: str, heading: str, *markup: str) -> str:
    head = element("h2", escape(heading), id=f"{id_}-title")
    return element("section", head + "".join(markup), id=id_, aria_labelledby=f"{id_}-title")


def figure(heading: str, sentence: str, chart_markup: str, after_markup: str = "", class_: str | None = None) -> str:
    caption = element("figcaption", element("h3", escape(heading)) + paragraph(sentence))
    frame = element("div", chart_markup, class_="frame")
    return element("figure", caption + frame + element("div", after_markup or " "), class_=class_)


def side_by_side(*markup: str) -> str:
    return element("div", "".join(markup), class_="columns")


def table_cell(shown: str, sort: Any = None) -> str:
    """A cell of a table; `sort` is the number that the column is sorted by, if not the text shown."""
    key = None if sort is None else repr(float(sort))
    return element("td", escape(shown) or " ", class_="number" if key else None, data_sort=key)


def column_heading(markup: str, class_: str | None = None) -> str:
    return element("th", markup, scope="col", class_=class_)


def sort_heading(name: str, class_: str | None = None) -> str:
    """A column heading that sorts the table."""
    return column_heading(element("button", escape(name), type="button", class_="sort"), class_)


def row_heading(markup: str, **attributes: Any) -> str:
    return element("th", markup, scope="row", **attributes)


def data_table(caption: str, head_markup: list[str], rows_markup: list[list[str]], class_: str | None = None) -> str:
    """A table from its column headings and its rows of cells.

    With many columns, or with a chart, it is stacked on a phone: each row a block, each cell a line with its heading.
    """
    head = element("thead", element("tr", "".join(head_markup)))
    labels = [heading_text(heading) for heading in head_markup]
    rows = ["".join(map(labelled_cell, row, labels)) for row in rows_markup]
    body = element("tbody", "".join(element("tr", row) for row in rows) or " ")
    too_wide = len(labels) > MOST_PHONE_COLUMNS or any('class="wide"' in heading for heading in head_markup)
    classes = " ".join(filter(None, (class_, "stacked" if too_wide else None)))
    whole = element("table", element("caption", escape(caption)) + head + body, class_=classes or None)
    return element("div", whole, class_="scroll", tabindex="0", role="group", aria_label=caption)


def heading_text(markup: str) -> str:
    """The text of a heading, without its elements; none for a chart's axis."""
    return "" if "<svg" in markup else re.sub(r"<[^>]*>", "", markup).strip()


def labelled_cell(markup: str, label: str) -> str:
    """The cell with the heading of its column, unless it is empty."""
    if not label or not markup.startswith("<td") or markup.endswith("> </td>"):
        return markup
    return markup.replace("<td", f'<td data-label="{label}"', 1)


def definition_list(pairs: dict[str, str], class_: str) -> str:
    items = "".join(element("div", element("dt", escape(k)) + element("dd", escape(v))) for k, v in pairs.items())
    return element("dl", items, class_=class_)


# --- SVG ---


POSITIONS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda value: np.asarray(value, dtype=float),
    "log": np.log,
    "log-odds": lambda p: np.log(p) - np.log1p(-np.asarray(p)),
}
STEPS = (1, 2, 2.5, 5, 10)
TICK_WIDTH = 7.0  # width of a letter beside an axis
ODDS_TICKS = [
    *(m * 10.0**k for k in range(-6, -1) for m in (1, 2, 5)),
    *(0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9),
    *(1.0 - m * 10.0**k for k in range(-2, -7, -1) for m in (5, 2, 1)),
]  # probabilities that ticks of a log-odds scale may have


class Scale:
    """A map of [low, high] to pixels [start, end]. Logarithmic and log-odds scales draw values beyond at their ends."""

    def __init__(self, low: float, high: float, start: float, end: float, kind: str = "linear") -> None:
        self.low, self.high, self.start, self.end, self.kind = low, high, start, end, kind

    def __call__(self, value: Any) -> Any:
        position = POSITIONS[self.kind]
        if self.kind != "linear":
            value = np.clip(value, self.low, self.high)
        share = (position(value) - position(self.low)) / (position(self.high) - position(self.low))
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round numbers in the domain; powers of ten on a logarithmic scale."""
        if self.kind == "log":
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            every = max(1, math.ceil(len(powers) / count))
            return [10.0**k for k in powers if k % every == 0]
        if self.kind == "log-odds":
            return self.odds_ticks(count)
        raw = (self.high - self.low) / count
        base = 10.0 ** math.floor(math.log10(raw))
        step = base * next(m for m in STEPS if m * base >= 0.999 * raw)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(k * step, 12) for k in range(first, last + 1)]

    def odds_ticks(self, count: int) -> list[float]:
        """Round probabilities, the first and the last of the domain among them, at least 1/(2 count) of it apart."""
        inside = [p for p in ODDS_TICKS if self.low * (1 - 1e-9) <= p <= self.high * (1 + 1e-9)]
        apart = abs(self.end - self.start) / (2 * count)
        chosen = inside[:1]
        for p in inside[1:]:
            if abs(float(self(p) - self(chosen[-1]))) >= apart:
                chosen.append(p)
        return chosen


def image(markup: str, width: int, height: int, label: str, class_: str, **attributes: Any) -> str:
    """The marks as one SVG image; screen readers read `label` aloud."""
    box = f"0 0 {width} {height}"
    return element("svg", markup, viewBox=box, role="img", aria_label=label, class_=class_, **attributes)


def text_mark(content: str, x: float, y: float, class_: str = "", **attributes: Any) -> str:
    return element("text", escape(content), x=float(x), y=float(y), class_=class_ or None, **attributes)


def shorten(label: str, pixels: float) -> str:
    """The label, cut off where it would not fit."""
    most = int(pixels / 8)
    return label if len(label) <= most else label[: most - 1] + "…"


def title_element(content: str | None) -> str:
    return f"<title>{escape(content)}</title>" if content else ""


def path_data(x: Iterable[float], y: Iterable[float], close: bool = False) -> str:
    """The attribute `d` of a path through the points."""
    points = "L".join(f"{attribute_value(float(a))},{attribute_value(float(b))}" for a, b in zip(x, y, strict=True))
    return f"M{points}{'Z' if close else ''}"


def spaced_step(places: Sequence[float], sizes: Sequence[float]) -> int:
    """The smallest k for which every k-th name, centred at its place, keeps clear of the next."""

    def clear(k: int) -> bool:
        kept = list(zip(places, sizes, strict=True))[::k]
        return all(abs(b - a) >= 0.5 * (s + t) for (a, s), (b, t) in itertools.pairwise(kept))

    return next(k for k in range(1, len(places) + 2) if clear(k))


class Chart:
    """One chart: a frame with two scales, and its marks in drawing order."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        width: int = 480,
        height: int = 320,
        margins: tuple[int, int, int, int] = (14, 16, 46, 58),
        x_kind: str = "linear",
        y_kind: str = "linear",
    ) -> None:
        top, right, bottom, left = margins
        self.width, self.height = width, height
        self.x = Scale(*x, float(left), float(width - right), x_kind)
        self.y = Scale(*y, float(height - bottom), float(top), y_kind)
        self.parts: list[str] = []

    def add(self, *markup: str) -> None:
        self.parts.extend(markup)

    def x_axis(self, label: str, ticks: Sequence[tuple[float, str]]) -> None:
        """Draw the axis below; if names would overlap, only every second tick, or fewer, has one."""
        floor = self.y.start
        places = [float(self.x(value)) for value, _ in ticks]
        step = spaced_step(places, [TICK_WIDTH * (len(name) + 1) for _, name in ticks])
        self.add(element("line", x1=self.x.start, x2=self.x.end, y1=floor, y2=floor, class_="axis"))
        for k, (at, (_, name)) in enumerate(zip(places, ticks, strict=True)):
            self.add(element("line", x1=at, x2=at, y1=floor, y2=floor + 4.0, class_="axis"))
            if k % step == 0:
                self.add(text_mark(name, at, floor + 19.0, "tick", text_anchor="middle"))
        middle = 0.5 * (self.x.start + self.x.end)
        self.add(text_mark(shorten(label, self.width), middle, self.height - 6.0, "label", text_anchor="middle"))

    def y_axis(self, label: str, ticks: Sequence[tuple[float, str]]) -> None:
        for value, name in ticks:
            at = float(self.y(value))
            self.add(element("line", x1=self.x.start, x2=self.x.end, y1=at, y2=at, class_="grid"))
            self.add(text_mark(name, self.x.start - 8.0, at + 4.0, "tick", text_anchor="end"))
        middle = 0.5 * (self.y.start + self.y.end)
        where = f"rotate(-90) translate({attribute_value(-middle)},14)"
        shown = escape(shorten(label, self.height))
        self.add(element("text", shown, transform=where, class_="label", text_anchor="middle"))

    def line(self, x: Any, y: Any, class_: str = "line") -> None:
        self.add(element("path", d=path_data(self.x(x), self.y(y)), class_=class_))

    def band(self, x: Any, low: Any, high: Any, class_: str = "band") -> None:
        there, back = np.asarray(x), np.asarray(x)[::-1]
        edge = np.concatenate([self.y(low), self.y(np.asarray(high)[::-1])])
        self.add(element("path", d=path_data(self.x(np.concatenate([there, back])), edge, close=True), class_=class_))

    def interval(self, x: float, low: float, high: float, class_: str = "interval") -> None:
        at = float(self.x(x))
        self.add(element("line", x1=at, x2=at, y1=float(self.y(low)), y2=float(self.y(high)), class_=class_))

    def dot(self, x: float, y: float, radius: float, tooltip: str | None = None, class_: str = "dot") -> None:
        at = {"cx": float(self.x(x)), "cy": float(self.y(y)), "r": radius}
        self.add(element("circle", title_element(tooltip), **at, class_=class_))

    def triangle(self, x: float, y: float, radius: float, class_: str) -> None:
        x, y, r = float(self.x(x)), float(self.y(y)), radius
        self.add(element("path", d=path_data([x - r, x, x + r], [y + r, y - r, y + r], close=True), class_=class_))

    def box(self, x: tuple[float, float], y: tuple[float, float], tooltip: str | None = None, **look: Any) -> None:
        left, right = sorted((float(self.x(x[0])), float(self.x(x[1]))))
        top, bottom = sorted((float(self.y(y[0])), float(self.y(y[1]))))
        shape = {"x": left, "y": top, "width": right - left, "height": bottom - top}
        self.add(element("rect", title_element(tooltip), **shape, **look))

    def probed_line(self, x: Any, y: Any, tooltips: Sequence[str]) -> None:
        """A line with an invisible column around each point: the pointer over one shows the point and its tooltip."""
        self.line(x, y)
        at = np.asarray(self.x(x), dtype=float)
        edges = np.concatenate([[self.x.start], 0.5 * (at[1:] + at[:-1]), [self.x.end]])
        for k, content in enumerate(tooltips):
            shape = {"x": edges[k], "y": self.y.end, "width": max(edges[k + 1] - edges[k], 0.5)}
            area = element("rect", **shape, height=self.y.start - self.y.end)
            mark = element("circle", cx=at[k], cy=float(self.y(y[k])), r=4.0)
            self.add(element("g", area + mark + title_element(content), class_="probe"))

    def svg(self, label: str, **attributes: Any) -> str:
        return image("".join(self.parts), self.width, self.height, label, "chart", **attributes)
