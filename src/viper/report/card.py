"""The model card: what was fitted, to which rows, when and with which versions; and the columns, then and now."""

import math
from datetime import datetime
from html import escape
from typing import Any

import numpy as np

from viper.formula.columns import date_text
from viper.formula.training import TrainingColumn, TrainingData
from viper.models.facts import ModelFacts, scales_by_name
from viper.report import views
from viper.report.study import Study
from viper.report.svg import (
    column_heading,
    data_table,
    definition_list,
    element,
    paragraph,
    row_heading,
    section,
    table_cell,
)
from viper.report.words import column_value, drift_in_words, listed_in_words, percent, readable_number, with_decimals

MOST_NAMES = 40  # columns that are named in a sentence
MOST_OPEN = 20  # rows of the table of columns that are shown without a click
MOST_LEVELS = 4  # levels of a category that are named
MOST_DRIFTED_LISTED = 20  # columns that differ from those of the fit and are listed
MIDDLE = (0.1, 0.9)  # quantiles shown in place of the range if single values must not be shown


def card_section(study: Study) -> str:
    return section("card", "Model card", definition_list(card_facts(study), "facts"), columns_table(study))


def card_facts(study: Study) -> dict[str, str]:
    facts, held_out = study.facts, study.cross_validated
    terms = f" with {facts.terms} terms" if facts.terms else ""
    names = [str(name) for name in study.frame.columns]
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    pairs = {
        "Predicts": study.predicted,
        "Columns": ", ".join(names[:MOST_NAMES]) + more,
        **({} if facts.formula is None else {"Formula": str(facts.formula)}),
        **({} if study.training is None else training_facts(study.training)),
        **model_pairs(facts),
        **{title.capitalize(): text for title, text in facts.weighting.lines().items()},
        "Posterior": facts.family[0].upper() + facts.family[1:],
        "Expected log(1 + eˣ)": "exact" if facts.exact else f"bound {facts.bound!r}{terms}",
        "ELBO, the score that the fit maximised": f"{with_decimals(facts.elbo, 4)} nats",
    }
    if held_out is not None:
        auc = "" if held_out.auc is None else f"AUC {held_out.auc:.3f}, "
        numbers = f"{auc}skill {held_out.log_skill:.3f}, Brier score {held_out.brier:#.3g}"
        pairs[f"Scores in {held_out.how}"] = f"{numbers}, log score {with_decimals(held_out.log_score, 4)} per row"
    left_out = "; ".join(f"{n:,} {reason}" for reason, n in study.left_out.items()) or "none"
    return pairs | {
        "Rows of this report": f"{len(study.label):,}; left out: {left_out}",
        "Log score of these rows": f"{with_decimals(study.scores.log_score, 4)} per row, the mean log probability of "
        "what happened",
    }


def training_facts(training: TrainingData) -> dict[str, str]:
    """Date, file, rows and versions of the fit."""
    counts = ", ".join(f"{label}: {n:,}" for label, n in training.class_counts.items())
    unused = training.rows - training.rows_used
    gone = f"; {unused:,} more were left out because of missing values" if unused else ""
    pairs = {"Fitted on": f"{datetime.fromisoformat(training.date):%d %B %Y, %H:%M} UTC"}
    if (file := training.file) is not None:
        digest = "" if file.sha256 is None else f", sha256 {file.sha256}"
        pairs["Fitted to the file"] = f"{file.name} ({file.size:,} bytes{digest})"
        if file.left_out:
            pairs["Columns not used"] = "; ".join(f"{name} ({why})" for name, why in file.left_out.items())
    return pairs | {
        "Rows of the fit": f"{training.rows_used:,} ({counts}){gone}",
        "Versions": ", ".join(f"{name} {number}" for name, number in training.versions.items()),
    }


def model_pairs(facts: ModelFacts) -> dict[str, str]:
    """Kernel and inducing points of a Gaussian process, or the prior of the coefficients."""
    if facts.process is not None:
        kernel = f"{facts.process.kernel}, with a {facts.process.mean} mean"
        return {"Kernel": kernel, "Inducing points": f"{facts.process.inducing:,}"}
    assert facts.prior is not None
    if facts.prior.correlated:
        return {"Prior of the coefficients": "normal, with a given covariance"}
    low, high = facts.prior.range
    sd = f"{low:.3g}" if math.isclose(low, high) else f"{low:.3g} to {high:.3g} ({scales_by_name(facts.prior.sds)})"
    chosen = ", chosen by the ELBO" if facts.prior.chosen else ""
    return {"Prior of the coefficients": f"normal, standard deviation {sd}{chosen}"}


# --- columns ---


def drift_section(study: Study) -> str:
    """How these rows differ from those of the fit, column by column."""
    if study.training is None or study.from_training:
        return ""
    found = study.drifted[:MOST_DRIFTED_LISTED]
    title = "Are these rows like those of the fit?"
    if not found:
        same = "Yes: no column differs more from the rows of the fit than chance or small changes would explain."
        return section("drift", title, paragraph(same))
    text = (
        "A model is only known to hold for rows like those it learned from. These columns differ, the most different "
        "first. The index of change compares how often each range of values occurs: below 0.1 there is little change, "
        "above 0.25 a major one."
    )
    titles = ("What differs", "In the fit", "In these rows")
    head = [column_heading("Column"), *map(column_heading, titles), column_heading("Index of change", "number")]
    rows = []
    for d in found:
        assert study.training is not None
        levels = study.model.formula_.levels.get(d.column, [])
        before = remembered_values(study.training.columns[d.column], levels, study.show_rows)  # dates do not drift
        rows.append(
            [
                row_heading(escape(d.column)),
                table_cell(drift_in_words(d)),
                table_cell(before),
                table_cell(values_in_words(study.frame[d.column], study.show_rows)),
                table_cell(f"{d.psi:.2f}", d.psi),
            ]
        )
    left = len(study.drifted) - len(found)
    more = f"{left:,} more columns differ, but less." if left > 0 else None
    listing = data_table("Columns that differ from the rows of the fit", head, rows, "columns-read")
    return section("drift", title, paragraph(text), listing, paragraph(more, "note"))


def columns_table(study: Study) -> str:
    """What each raw column contained in the rows of the fit, if the model has a record of them, and in these."""
    training = study.training
    titles = ["Values in these rows", "Missing"]
    if training is not None:
        titles = ["Values in the fit", "Missing in the fit", "Values in these rows", "Missing here"]
    head = [column_heading("Column"), *(column_heading(t, "number" if "Missing" in t else None) for t in titles)]
    rows = []
    for name in study.columns:
        cells = [row_heading(escape(str(name)))]
        if training is not None:
            column, share = training.columns[str(name)], training.missing_shares[str(name)]
            levels = study.model.formula_.levels.get(str(name), [])
            before = remembered_values(column, levels, study.show_rows, name in study.dates)
            cells += [table_cell(before), table_cell(percent(share), share)]
        here = study.frame[name]
        gone = float(here.isna().mean())
        now = values_in_words(here, study.show_rows, name in study.dates)
        rows.append([*cells, table_cell(now), table_cell(percent(gone), gone)])
    table = data_table("The columns that the model reads", head, rows, "columns-read")
    if len(rows) <= MOST_OPEN:
        return table
    return element("details", element("summary", f"The {len(rows):,} columns that the model reads") + table)


def remembered_values(column: TrainingColumn, levels: list[Any], extremes: bool, dated: bool = False) -> str:
    """The range of numbers in the rows of the fit, or the commonest levels of a category."""
    if column.kind == "category":
        return levels_in_words(dict(zip(map(str, levels), column.rows, strict=True)))
    assert column.low is not None
    assert column.high is not None
    ends = (column.low, column.high) if extremes or not column.cuts else (column.cuts[0], column.cuts[-1])
    return range_in_words(*ends, extremes, dated)


def values_in_words(column: Any, extremes: bool, dated: bool = False) -> str:
    """The range of the numbers in a column, or its commonest levels."""
    known = column.dropna()
    if not len(known):
        return "none"
    if views.is_category(column):
        return levels_in_words({str(level): int(n) for level, n in known.value_counts().items()})
    low, high = np.quantile(known.to_numpy(dtype=float), (0.0, 1.0) if extremes else MIDDLE)
    return range_in_words(float(low), float(high), extremes, dated)


def range_in_words(low: float, high: float, extremes: bool, dated: bool = False) -> str:
    """'3.14 to 9.81', or 'mostly 3.1 to 9.8', with two digits, where no single value may be shown; of dates, months."""
    if extremes:
        return f"{column_value(low, dated)} to {column_value(high, dated)}"
    if dated:
        return f"mostly {date_text(low)[:-3]} to {date_text(high)[:-3]}"
    low, high = (float(f"{x:.2g}") for x in (low, high))
    return f"mostly {readable_number(low)} to {readable_number(high)}"


def levels_in_words(counts: dict[str, int]) -> str:
    """'a (60 %), b (30 %) and 3 more'."""
    total = max(1, sum(counts.values()))
    ranked = sorted(counts, key=lambda level: -counts[level])
    parts = [f"{level} ({percent(counts[level] / total)})" for level in ranked[:MOST_LEVELS]]
    more = len(ranked) - MOST_LEVELS
    return listed_in_words([*parts, f"{more:,} more"] if more > 0 else parts)
