"""The section on single rows: an overview chart, a table of the least certain rows, and one chosen row in detail."""

import math
from html import escape
from typing import Any

import numpy as np

from viper.report import charts, words
from viper.report.study import MOST_MARKS, Study
from viper.report.svg import data_table, element, figure, paragraph, row_heading, sort_heading, table_cell
from viper.report.views import Outlyingness
from viper.report.words import chance, chance_range, column_value

SHOWN_COLUMNS = 2  # columns of the data in the table of the least certain rows


class RowSection:
    """The section, and the data that the script needs for it."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.levels = getattr(getattr(study.model, "formula_", None), "levels", {})
        self.names, self.kind = study.names, study.naming
        found = Outlyingness(study.columns)
        self.shown = sorted({*map(int, study.uncertain), *map(int, study.sampled)})
        self.notes = {k: words.row_note(study, found, k) for k in self.shown}

    def payload(self) -> dict[str, Any]:
        """What the script needs to draw the density of any row on the page."""
        digits = lambda x: float(f"{float(x):.6g}")  # noqa: E731
        columns = ("theta", "tau", "mean", "low", "high")
        seen = self.study.predictions
        values = (seen.latent, seen.latent_sd, seen.probability, seen.lower, seen.upper)
        axes = {k: charts.density_ends(self.study, k) for k in self.shown}
        windows = sorted(set(axes.values()))
        rows = {
            str(k): {
                "name": self.names[k],
                "text": words.row_sentence(self.study, k),
                "note": self.notes[k],
                "axis": windows.index(axes[k]),
                **{name: digits(value[k]) for name, value in zip(columns, values, strict=True)},
            }
            for k in self.shown
        }
        scales = [{"ends": ends, "ticks": charts.density_ticks(ends)} for ends in windows]
        return {"rows": rows, "axes": scales, "first": str(int(self.study.uncertain[0]))}

    def markup(self) -> str:
        chooser = element("div", self.panel() + element("div", self.listing(), class_="listing"), class_="chooser")
        return self.overview() + chooser

    def overview(self) -> str:
        study = self.study
        text = f"Each line is the {study.level_name} interval of one row's probability. Choose a row to see more below."
        if len(study.sampled) < len(study.label):
            text += f" The chart shows {len(study.sampled):,} of the {len(study.label):,} rows, evenly spaced"
            rare = study.class_names[int(study.base_rate < 0.5)]
            text += f", and more of those with {rare} than their share." if len(study.sampled) > MOST_MARKS else "."
        if study.naming == "Row":
            text += " Rows have their numbers in the table, counted from 1 without the heading."
        keys = "".join(
            element("span", " ", class_=f"key {kind}") + escape(name) + " "
            for kind, name in (("yes", study.positive), ("no", study.negative))
        )
        chart = charts.rows_chart(study, [f"{self.kind.lower()} {name}" for name in self.names])
        text += charts.rows_axis(study).note
        return figure("Row by row", text, chart, element("p", keys, class_="keys"), "full")

    def panel(self) -> str:
        """The least certain row in detail; the script replaces it with other rows."""
        first = int(self.study.uncertain[0])
        name = element("span", escape(self.names[first]), id="row-name")
        content = (
            element("h3", f"{escape(self.kind)} {name}")
            + paragraph(words.row_sentence(self.study, first), id="row-text", aria_live="polite")
            + charts.density_chart(self.study, first)
            + paragraph(self.notes[first], id="row-note")
        )
        return element("div", content, class_="panel", id="row-panel")

    def listing(self) -> str:
        study = self.study
        columns = [e.name for e in study.effects[:SHOWN_COLUMNS]]
        titles = [self.kind, "Probability", "Interval", "Outcome", *columns]
        head = [sort_heading(t, None if t in (self.kind, "Outcome") else "number") for t in titles]
        lines = [self.line(k, columns) for k in map(int, study.uncertain)]
        some = len(lines) < len(study.label)
        caption = f"The {len(lines)} rows with the widest intervals" if some else "All rows"
        return data_table(caption, head, lines, "sortable rows")

    def line(self, k: int, columns: list[str]) -> list[str]:
        study, seen = self.study, self.study.predictions
        pressed = "true" if k == int(study.uncertain[0]) else "false"
        look = {"type": "button", "class_": "pick", "data_row": k, "aria_pressed": pressed}
        pick = element("button", escape(self.names[k]), **look, aria_label=f"Show {self.kind.lower()} {self.names[k]}")
        known = [str(name) for name in study.frame.columns]
        return [
            row_heading(pick, data_sort=repr(float(k))),
            table_cell(chance(seen.probability[k]), seen.probability[k]),
            table_cell(chance_range(seen.lower[k], seen.upper[k]), seen.width[k]),
            table_cell(study.class_names[int(study.label[k])]),
            *(self.data_cell(name, study.frame.iloc[k, known.index(name)]) for name in columns),
        ]

    def data_cell(self, name: str, content: Any) -> str:
        """A value of the data; levels are sorted in their own order, such as that of the calendar."""
        if content is None or content != content:
            return table_cell("missing", -math.inf)
        if isinstance(content, int | float | np.integer | np.floating) and not isinstance(content, bool):
            return table_cell(column_value(content, name in self.study.dates), content)
        levels = [str(level) for level in self.levels.get(name, ())]
        place = levels.index(str(content)) if str(content) in levels else len(levels)
        return element("td", escape(str(content)), data_sort=repr(float(place)))
