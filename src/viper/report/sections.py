"""The sections on the model as a whole, in the order of the page."""

import math
from html import escape

from viper.report import charts, trust, views, words
from viper.report.row_section import RowSection
from viper.report.study import MOST_COEFFICIENTS, MOST_EFFECTS, Study
from viper.report.svg import (
    column_heading,
    data_table,
    definition_list,
    element,
    figure,
    paragraph,
    row_heading,
    section,
    side_by_side,
    sort_heading,
    table_cell,
)
from viper.report.words import THIN, chance, factor, percent, percent_range, readable_number, with_decimals


def subtitle(study: Study) -> str:
    kind = "Gaussian process classification" if study.is_gp else "Bayesian logistic regression"
    rows = "one row" if len(study.label) == 1 else f"{len(study.label):,} rows"
    used = " that it was fitted to" if study.from_training else " that it has not seen" * study.held_out
    return f"{kind} of {study.target}, judged on {rows}{used}."


def summary_section(study: Study) -> str:
    verdict = trust.overall_verdict(study)
    honest = study.cross_validated if study.from_training else None
    found, where = (study.scores, "") if honest is None else (honest, f", in {honest.how}")
    auc, skill = found.auc, found.log_skill
    tiles = {
        "rows": f"{len(study.label):,}",
        f"of which {study.positive}, the average": percent(study.base_rate),
        f"AUC: how often a pair is ranked correctly{where}; 0.5 is chance": "–" if auc is None else f"{auc:.3f}",
        f"skill{where}: 0{THIN}% is no better than predicting the average, 100{THIN}% is perfect": (
            "–" if skill is None else f"below 0{THIN}%" if skill < 0.0 else percent(skill)
        ),
        f"Brier score: mean squared error of the probabilities{where}, 0 is perfect": f"{found.brier:#.3g}",
    }
    headline = element("strong", escape(verdict.word)) + " " + escape(verdict.text)
    sentences = (
        words.ranking_sentence,
        words.skill_sentence,
        lambda study: study.calibration_verdict.sentence,
        words.driver_sentence,
        words.width_sentence,
        words.filled_sentence,
    )
    items = "".join(element("li", escape(finding)) for sentence in sentences if (finding := sentence(study)))
    return section(
        "summary",
        "In short",
        element("p", headline, class_=f"verdict {verdict.kind}"),
        definition_list(tiles, "tiles"),
        element("ul", items),
        cross_validation(study),
        paragraph(caution(study), "note"),
    )


def caution(study: Study) -> str:
    """Whether the scores on this page are honest ones."""
    if study.from_training:
        instead = " The scores of cross-validation above are the honest ones." if study.cross_validated else ""
        return f"The model learned from these rows, which flatters its scores on this page.{instead}"
    if study.held_out:
        return "The model has learned from none of these rows: the scores are an honest test."
    return "If the model has learned from some of these rows, the scores flatter it."


def cross_validation(study: Study) -> str:
    """The scores that `viper fit` found on held-out rows, beside those of the rows of the fit, which flatter."""
    held_out, here = study.cross_validated, study.scores
    if held_out is None or not study.from_training:
        return ""
    names = {
        "AUC": (held_out.auc, here.auc),
        "Skill": (held_out.log_skill, here.log_skill),
        "Brier score": (held_out.brier, here.brier),
        "Log score": (held_out.log_score, here.log_score),
    }
    head = [column_heading("Score"), column_heading(f"Honest: {held_out.how}", "number")]
    head.append(column_heading("These rows, which it learned from", "number"))
    rows = [
        [row_heading(escape(name)), *(table_cell("–" if x is None else f"{x:.3f}", x or 0.0) for x in pair)]
        for name, pair in names.items()
    ]
    return data_table("Scores on rows that the model had not seen, and on these", head, rows)


def performance_section(study: Study) -> str:
    titles = ("Predicted", "Rows", f"That {study.predicate('had')}", "Allowing for chance")
    rows = [
        [
            table_cell(percent(predicted), predicted),
            table_cell(f"{n:,}", n),
            table_cell(percent(observed), observed),
            table_cell(percent_range(low, high), low),
        ]
        for predicted, observed, n, low, high in study.calibration.itertuples(index=False)
    ]
    listing = data_table("Reliability by group of rows", [column_heading(escape(t), "number") for t in titles], rows)
    example = words.group_sentence(study.calibration, study.predicate("had"))
    reliability = figure(
        "Do its percentages come true?",
        f"{example} On the dashed line, they come true exactly.{charts.reliability_axis(study).note}",
        charts.reliability_chart(study),
        element("details", element("summary", "The numbers") + listing),
    )
    title = "Does it predict?"
    if study.scores.auc is None:
        return section("performance", title, side_by_side(reliability), paragraph(words.ranking_sentence(study)))
    found = figure("Does it find them?", words.recall_sentence(study), charts.roc_chart(study))
    precision = charts.precision_recall_chart(study)
    right = figure("Are those it flags the right ones?", words.precision_sentence(study), precision)
    return section("performance", title, side_by_side(reliability, found, right))


def drivers_section(study: Study) -> str:
    """Coefficients; for a Gaussian process, the relevance of its columns."""
    found = study.coefficients
    if found is None:
        return relevance_section(study)
    if not found:
        return ""
    shown = found[:MOST_COEFFICIENTS]
    forest = charts.Forest(shown)
    head = [
        sort_heading("Column"),
        column_heading("Change"),
        column_heading(forest.axis(), "wide"),
        sort_heading("Odds are multiplied by", "number"),
        column_heading(escape(f"{study.level_name} interval"), "number"),
        sort_heading("Sure of direction", "number"),
    ]
    rows = [
        [
            row_heading(escape(c.name)),
            table_cell(c.unit),
            element("td", forest.line(c), class_="wide"),
            table_cell(factor(math.exp(c.mean)), c.mean),
            table_cell(f"{factor(math.exp(c.lower))} to {factor(math.exp(c.upper))}", c.lower),
            table_cell(chance(c.direction), c.direction),
        ]
        for c in shown
    ]
    text = (
        f"How the odds of {study.positive} change when one column changes as listed and all others stay the same. Odds "
        "compare the chances for and against: odds of 3 are 3 to 1, or 75 %. Bars are intervals; those that cross the "
        "line of no change are grey, because their direction is uncertain."
    )
    more = f"These are the {len(shown)} surest of {len(found):,} coefficients." if len(found) > len(shown) else None
    listing = data_table("Coefficients with credible intervals", head, rows, "sortable coefficients")
    caution = paragraph(words.entangled_sentence(study.entangled), "note")
    return section("coefficients", "The coefficients", paragraph(text), caution, listing, paragraph(more, "note"))


def relevance_section(study: Study) -> str:
    frame = study.model.summary()
    if "relevance" not in frame:
        return ""
    found = frame.sort_values("relevance", ascending=False)
    shown = found[:MOST_COEFFICIENTS]
    top = float(shown["relevance"].iloc[0]) or 1.0
    other = next(name for name in ("lengthscale", "prior_sd") if name in frame)
    head = [sort_heading("Column"), column_heading("Relevance", "wide"), sort_heading("As a number", "number")]
    head.append(sort_heading(other.replace("_", " ").capitalize(), "number"))
    rows = []
    for name, strength, own in zip(shown.index, shown["relevance"], shown[other], strict=True):
        bar = charts.relevance_bar(float(strength) / top, f"{name}: relevance {strength:.3g}")
        numbers = [table_cell(readable_number(float(x)), x) for x in (strength, own)]
        rows.append([row_heading(escape(str(name))), element("td", bar, class_="wide"), *numbers])
    text = (
        "How quickly the prediction changes along each column. A lengthscale is the distance, in the column's own "
        "units, over which the prediction stays similar: the shorter it is, the more the column matters. Relevance is "
        "the same in other words: one over the lengthscale, measured in standard deviations of the column."
    )
    more = f"These are the {len(shown)} most relevant of {len(found):,} columns." if len(found) > len(shown) else None
    listing = data_table("Relevance of the columns", head, rows, "sortable coefficients")
    return section("coefficients", "What drives the probability", paragraph(text), listing, paragraph(more, "note"))


def effects_section(study: Study) -> str:
    shown = study.effects[:MOST_EFFECTS]
    if not shown:
        return ""
    options = "".join(element("option", escape(e.name), value=str(k)) for k, e in enumerate(shown))
    control = element("label", "Column ", for_="effect") + element("select", options, id="effect")
    axis = charts.effects_axis(shown)
    drawn = (
        figure(e.name, words.effect_sentence(e), charts.effect_chart(study, e, axis), class_="effect") for e in shown
    )
    text = (
        "The probability as one column varies and every other stays at its typical value. The band contains the "
        f"probability with {study.level_name} certainty; it is wide where the model has seen few rows.{axis.note}"
    )
    left = len(study.effects) - len(shown)
    more = f"Columns are in order of their effect; {left:,} with smaller effects are not shown." if left else None
    return section(
        "effects",
        "One column at a time",
        paragraph(text),
        element("div", control, class_="control"),
        element("div", "".join(drawn), class_="effects"),
        paragraph(more, "note"),
    )


def certainty_section(study: Study, rows: RowSection | None) -> str:
    """How wide the intervals are; and single rows, if they may be shown."""
    histogram = charts.width_histogram(study)
    widths = figure("How wide are the intervals?", words.width_sentence(study), histogram, class_="small")
    return section("certainty", "How sure it is", "" if rows is None else rows.markup(), widths)


def map_section(study: Study) -> str:
    if study.map is None:
        return ""
    names = study.map.names
    others = ", with every other column at its typical value" if study.frame.shape[1] > 2 else ""
    sampled = "Marks are rows" if len(study.sampled) == len(study.label) else f"Marks are {len(study.sampled):,} rows"
    marks = f" {sampled}; triangles are those that {study.predicate('had')}." if study.show_rows else ""
    mean = figure(
        "The probability",
        f"Over {names[0]} and {names[1]}{others}.{marks}{charts.map_axis(study, 'mean').note}",
        charts.map_chart(study, "mean", study.show_rows),
        charts.map_legend(study, "mean"),
    )
    sd = figure(
        "How uncertain it is there",
        "The standard deviation of the probability, in percentage points: bright where the model is unsure.",
        charts.map_chart(study, "sd", study.show_rows),
        charts.map_legend(study, "sd"),
    )
    return section("map", "Where", side_by_side(mean, sd))


def trust_section(study: Study) -> str:
    cards = ""
    for question, (kind, verdict, explanation) in trust.verdicts(study).items():
        content = element("h3", escape(question)) + paragraph(verdict, "mark") + paragraph(explanation)
        cards += element("div", content, class_=f"card {kind}")
    text = (
        "Three different questions. A model can be computed without a fault and still predict badly, or predict well "
        "with intervals that are too narrow. The verdict at the top is the worst of the three answers."
    )
    cards = element("div", cards, class_="cards")
    return section("trust", "Can this be trusted?", paragraph(text), cards, search_details(study))


def search_details(study: Study) -> str:
    facts = study.facts
    steps = "one step" if facts.iterations == 1 else f"{facts.iterations:,} steps"
    end = "finished; more steps would not change the answer" if facts.converged else f"did not finish: {facts.status}"
    content = paragraph(f"After {steps}, the search {end}.") + starts_table(study) + trace_figure(study)
    return element("details", element("summary", "How the fit was found") + content)


def starts_table(study: Study) -> str:
    found = getattr(study.model, "starts_", None)
    if not found:
        return ""
    best = max(start.elbo for start in found)
    titles = ("ELBO reached", "Below the best, in nats", "Times it was computed")
    head = [column_heading("Start"), *(column_heading(title, "number") for title in titles)]
    rows = [
        [
            table_cell(str(number)),
            table_cell(with_decimals(start.elbo, 3), start.elbo),
            table_cell(readable_number(best - start.elbo), best - start.elbo),
            table_cell(f"{start.evaluations:,}", start.evaluations),
        ]
        for number, start in enumerate(found, 1)
    ]
    caption = "The search began from several places, because it may stop short of the best one. What each reached:"
    return data_table(caption, head, rows)


def trace_figure(study: Study) -> str:
    if not len(study.model.history_):
        return ""
    trace = views.convergence_trace(study.model)
    stage = " of the last stage, at the chosen kernel" if study.is_gp else ""
    sentence = (
        f"{trace.meaning[0].upper()}{trace.meaning[1:]}, by iteration{stage}. A nat is a unit of information, like a "
        "bit but 1.44 times as large; anything far below one is negligible."
    )
    return figure("How the search converged", sentence, charts.convergence_chart(trace), class_="small")
