"""The section on single rows: all of them in one picture, the least certain in a table, one chosen in detail."""

from html import escape
from typing import Any

import numpy as np

from viper.report import charts, words
from viper.report.study import Study
from viper.report.svg import cell, element, figure, heading, p, row_heading, section, sort_button, table
from viper.report.views import Unusual
from viper.report.words import number, percent, span

SHOWN_COLUMNS = 2  # columns of the data shown beside an uncertain row


class Rows:
    """Names and notes of the rows that the page shows."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.names = [str(label) for label in study.frame.index]
        self.kind = str(study.frame.index.name or "Row")
        found = Unusual(study.frame)
        self.shown = sorted({*map(int, study.uncertain), *map(int, study.marked)})
        self.notes = {k: words.row_note(study, found, k) for k in self.shown}

    def payload(self) -> dict[str, Any]:
        """What the script needs to draw the density of any row shown."""
        digits = lambda x: float(f"{float(x):.6g}")  # noqa: E731
        columns = ("theta", "tau", "mean", "low", "high")
        seen = self.study.seen
        values = (seen.latent, seen.latent_sd, seen.probability, seen.lower, seen.upper)
        rows = {
            str(k): {
                "name": self.names[k],
                "note": self.notes[k],
                **{name: digits(value[k]) for name, value in zip(columns, values, strict=True)},
            }
            for k in self.shown
        }
        return {"rows": rows, "level": self.study.level_name, "first": str(int(self.study.uncertain[0]))}

    def section(self) -> str:
        study = self.study
        chooser = element("div", self.panel() + element("div", self.listing(), class_="listing"), class_="chooser")
        widths = figure("How wide are the intervals?", words.certainty(study), charts.widths(study), class_="small")
        return section("certainty", "How sure it is", self.picture(), chooser, widths)

    def picture(self) -> str:
        study = self.study
        text = f"Each line is the {study.level_name} interval of one row's probability. Choose a row to see more below."
        if len(study.marked) < len(study.label):
            text += f" Shown are {len(study.marked):,} of the {len(study.label):,} rows, evenly spaced in this order."
        keys = "".join(
            element("span", " ", class_=f"key {kind}") + escape(name) + " "
            for kind, name in (("yes", study.positive), ("no", study.negative))
        )
        return figure("Row by row", text, charts.strip(study, self.names), element("p", keys, class_="keys"), "full")

    def panel(self) -> str:
        """The first row's density; the script puts others in its place."""
        first = int(self.study.uncertain[0])
        name = element("span", escape(self.names[first]), id="row-name")
        content = (
            element("h3", f"{escape(self.kind)} {name}")
            + p(words.row(self.study, first), id="row-text", aria_live="polite")
            + charts.density(self.study, first)
            + p(self.notes[first], id="row-note")
        )
        return element("div", content, class_="panel", id="row-panel")

    def listing(self) -> str:
        """The least certain rows."""
        study = self.study
        columns = [e.name for e in study.effects[:SHOWN_COLUMNS]]
        titles = [self.kind, "Probability", "Interval", "Outcome", *columns]
        head = [heading(sort_button(t), None if t in (self.kind, "Outcome") else "number") for t in titles]
        lines = [self.line(k, columns) for k in map(int, study.uncertain)]
        some = len(lines) < len(study.label)
        caption = f"The {len(lines)} rows with the widest intervals" if some else "All rows"
        return table(caption, head, lines, "sortable rows")

    def line(self, k: int, columns: list[str]) -> list[str]:
        study, seen = self.study, self.study.seen
        pressed = "true" if k == int(study.uncertain[0]) else "false"
        look = {"type": "button", "class_": "pick", "data_row": k, "aria_pressed": pressed}
        pick = element("button", escape(self.names[k]), **look, aria_label=f"Show {self.kind.lower()} {self.names[k]}")
        known = [str(name) for name in study.frame.columns]
        return [
            row_heading(pick, data_sort=repr(float(k))),
            cell(percent(seen.probability[k]), seen.probability[k]),
            cell(span(seen.lower[k], seen.upper[k]), seen.width[k]),
            cell(study.names[int(study.label[k])]),
            *(data_cell(study.frame.iloc[k, known.index(name)]) for name in columns),
        ]


def data_cell(content: Any) -> str:
    is_number = isinstance(content, int | float | np.integer | np.floating) and not isinstance(content, bool)
    return cell(number(content), content) if is_number else cell(str(content))
