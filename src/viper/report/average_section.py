"""The section on average effects: by how many percentage points the average probability changes with each column."""

from html import escape

import numpy as np

from viper.report import charts, words
from viper.report.study import Study
from viper.report.svg import (
    column_heading,
    data_table,
    element,
    paragraph,
    row_heading,
    section,
    sort_heading,
    table_cell,
)
from viper.report.words import chance, chance_range, signed_points

MOST_SENTENCES = 3  # changes that are described in words
MOST_LISTED = 40  # changes in the table


def average_section(study: Study) -> str:
    found = study.average_effects
    if not found.effects:
        return ""
    shown = found.effects[:MOST_LISTED]
    clear = [e for e in found.effects if e.clear][:MOST_SENTENCES]
    items = "".join(element("li", escape(words.average_sentence(e))) for e in clear)
    none = None if clear else "No change of a single column clearly raises or lowers the average probability."
    left = len(found.effects) - len(shown)
    more = f"{left:,} smaller changes are not listed." if left else None
    caution = (
        "These are differences between predictions. They say what would happen if someone changed a column only if no "
        "cause of the outcome that is missing from the model is related to that column."
    )
    return section(
        "average",
        "What changes the probability, on average",
        paragraph(introduction(study)),
        element("ul", items) if items else paragraph(none),
        effects_table(study),
        paragraph(more, "note"),
        paragraph(caution, "note"),
    )


def introduction(study: Study) -> str:
    found = study.average_effects
    every = len(study.label)
    rows = f"the {every:,} rows" if found.rows == every else f"{found.rows:,} of the {every:,} rows, evenly spaced"
    return (
        f"Averaged over {rows}, the model's probability of {study.positive} is {chance(found.probability)} "
        f"({chance_range(found.lower, found.upper)}). The table says by how many percentage points this average "
        "changes if one column changes as listed in every row, and all others stay as they are. Bars are "
        f"{study.level_name} intervals; those that cross zero are grey, because their direction is uncertain."
    )


def effects_table(study: Study) -> str:
    shown = study.average_effects.effects[:MOST_LISTED]
    forest = charts.PointsForest(shown)
    digits = words.point_digits(float(np.median([e.upper - e.lower for e in shown])))
    head = [
        sort_heading("Column"),
        column_heading("Change"),
        column_heading(forest.axis(), "wide"),
        sort_heading("Points", "number"),
        column_heading(escape(f"{study.level_name} interval"), "number"),
        column_heading("Average before → after", "number"),
        sort_heading("Sure of direction", "number"),
    ]
    rows = [
        [
            row_heading(escape(e.name)),
            table_cell(e.change),
            element("td", forest.line(e), class_="wide"),
            table_cell(signed_points(e.mean, digits), e.mean),
            table_cell(f"{signed_points(e.lower, digits)} to {signed_points(e.upper, digits)}", e.lower),
            table_cell(f"{chance(e.before)} → {chance(e.after)}", e.after),
            table_cell(chance(e.direction), e.direction),
        ]
        for e in shown
    ]
    return data_table("Changes of the average probability, in percentage points", head, rows, "sortable coefficients")
