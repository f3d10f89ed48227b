"""Pieces of HTML. Text passes through `escape` here; arguments named markup are markup already."""

from html import escape
from typing import Any

from viper.report.svg import element


def p(sentence: str | None, class_: str | None = None, **attributes: Any) -> str:
    return element("p", escape(sentence), class_=class_, **attributes) if sentence else ""


def section(id_: str, heading: str, *markup: str) -> str:
    head = element("h2", escape(heading), id=f"{id_}-title")
    return element("section", head + "".join(markup), id=id_, aria_labelledby=f"{id_}-title")


def figure(heading: str, sentence: str, chart_markup: str, after_markup: str = "", class_: str | None = None) -> str:
    caption = element("figcaption", element("h3", escape(heading)) + p(sentence))
    frame = element("div", chart_markup, class_="frame")
    return element("figure", caption + frame + element("div", after_markup or " "), class_=class_)


def columns(*markup: str) -> str:
    return element("div", "".join(markup), class_="columns")


def cell(shown: str, sort: Any = None, class_: str | None = None) -> str:
    """A cell of a table; `sort` is the number to sort by, where it is not what is shown."""
    key = None if sort is None else repr(float(sort))
    return element("td", escape(shown) or " ", class_=class_ or ("number" if key else None), data_sort=key)


def sort_button(name: str) -> str:
    return element("button", escape(name), type="button", class_="sort")


def heading(markup: str, class_: str | None = None) -> str:
    return element("th", markup, scope="col", class_=class_)


def row_heading(markup: str, **attributes: Any) -> str:
    return element("th", markup, scope="row", **attributes)


def table(caption: str, head_markup: list[str], rows_markup: list[list[str]], class_: str | None = None) -> str:
    """A table of headings and of rows of cells."""
    head = element("thead", element("tr", "".join(head_markup)))
    body = element("tbody", "".join(element("tr", "".join(row)) for row in rows_markup) or " ")
    whole = element("table", element("caption", escape(caption)) + head + body, class_=class_)
    return element("div", whole, class_="scroll", tabindex="0", role="group", aria_label=caption)


def facts(pairs: dict[str, str], class_: str) -> str:
    """A list of names and what they are."""
    items = "".join(element("div", element("dt", escape(k)) + element("dd", escape(v))) for k, v in pairs.items())
    return element("dl", items, class_=class_)
