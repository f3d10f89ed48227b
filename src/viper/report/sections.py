"""The sections on the model as a whole, in the order of the page."""

import math
from html import escape

from viper.models.facts import ModelFacts
from viper.report import charts, views, words
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
from viper.report.words import factor, percent, percent_range, readable_number, with_decimals

MOST_NAMES = 40  # columns of the model that are named


def subtitle(study: Study) -> str:
    kind = "Gaussian process classification" if study.is_gp else "Bayesian logistic regression"
    rows = "one row" if len(study.label) == 1 else f"{len(study.label):,} rows"
    used = " that it was fitted to" if study.from_training else " that it has not seen" * study.held_out
    return f"{kind} of {study.target}, judged on {rows}{used}."


def summary_section(study: Study) -> str:
    _, verdict, _ = words.closeness_verdict(study)
    auc = study.scores.auc
    tiles = {
        "rows": f"{len(study.label):,}",
        f"of which {study.positive}": percent(study.label.mean()),
        "AUC: chance of ranking a pair correctly": "–" if auc is None else f"{auc:.3f}",
        "Brier score: 0 is perfect": f"{study.scores.brier:.3f}",
        "closeness to the exact posterior": verdict.lower(),
    }
    sentences = (words.ranking_sentence, words.calibration_sentence, words.driver_sentence, words.width_sentence)
    items = "".join(element("li", escape(finding)) for sentence in sentences if (finding := sentence(study)))
    caution = (
        "The model learned from these rows, which flatters it. For an honest test, make the report from rows it has "
        "not seen."
        if study.from_training
        else "The model has learned from none of these rows: the scores are an honest test."
        if study.held_out
        else "If the model has learned from some of these rows, the scores flatter it."
    )
    findings = definition_list(tiles, "tiles") + element("ul", items)
    return section("summary", "In short", findings, paragraph(caution, "note"))


def performance_section(study: Study) -> str:
    titles = ("Predicted", "Rows", f"That {study.predicate('were')}", "Margin")
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
    example = words.group_sentence(study.calibration, study.predicate("were"))
    reliability = figure(
        "Do its percentages come true?",
        f"{example} On the dashed line, predictions come true exactly.",
        charts.reliability_chart(study),
        element("details", element("summary", "The numbers") + listing),
    )
    title = "How well it predicts"
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
            table_cell(percent(c.direction), c.direction),
        ]
        for c in shown
    ]
    text = (
        f"How the odds of {study.positive} change when one column changes as listed and all others stay the same. Bars "
        "are intervals; those that cross the line of no change are grey, because their direction is uncertain."
    )
    more = f"These are the {len(shown)} surest of {len(found):,} coefficients." if len(found) > len(shown) else None
    listing = data_table("Coefficients with credible intervals", head, rows, "sortable coefficients")
    return section("coefficients", "What drives the probability", paragraph(text), listing, paragraph(more, "note"))


def relevance_section(study: Study) -> str:
    frame = study.model.summary()
    if "relevance" not in frame:
        return ""
    found = frame.sort_values("relevance", ascending=False)
    shown = found[:MOST_COEFFICIENTS]
    top = float(shown["relevance"].iloc[0]) or 1.0
    other = next(name for name in ("lengthscale", "prior_sd") if name in frame)
    head = [sort_heading("Column"), column_heading("Relevance", "wide"), sort_heading("Relevance", "number")]
    head.append(sort_heading(other.replace("_", " ").capitalize(), "number"))
    rows = []
    for name, strength, own in zip(shown.index, shown["relevance"], shown[other], strict=True):
        bar = charts.relevance_bar(float(strength) / top, f"{name}: relevance {strength:.3g}")
        numbers = [table_cell(readable_number(float(x)), x) for x in (strength, own)]
        rows.append([row_heading(escape(str(name))), element("td", bar, class_="wide"), *numbers])
    text = (
        "How quickly the prediction changes along each column. A lengthscale is the distance, in the column's own "
        "units, over which the log-odds stay similar: the shorter it is, the more the column matters. Relevance is one "
        "over the lengthscale in standard deviations."
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
    drawn = (figure(e.name, words.effect_sentence(e), charts.effect_chart(study, e), class_="effect") for e in shown)
    text = (
        "The probability as one column varies and every other stays at its typical value. The band contains the "
        f"probability with {study.level_name} certainty; it widens where the model has seen few rows."
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


def map_section(study: Study) -> str:
    if study.map is None:
        return ""
    names = study.map.names
    others = ", with every other column at its typical value" if study.frame.shape[1] > 2 else ""
    mean = figure(
        "The probability",
        f"Over {names[0]} and {names[1]}{others}. Marks are rows; triangles are those that {study.predicate('were')}.",
        charts.map_chart(study, "mean"),
        charts.map_legend("mean", "0%", "100%"),
    )
    sd = figure(
        "How uncertain it is there",
        "The standard deviation of the probability: bright where the model is unsure.",
        charts.map_chart(study, "sd"),
        charts.map_legend("sd", "0 points", f"{100 * float(study.map.sd.max()):.0f} points"),
    )
    return section("map", "Where", side_by_side(mean, sd))


def trust_section(study: Study) -> str:
    verdicts = {
        "Is the posterior close to the exact one?": words.closeness_verdict(study),
        "Is the arithmetic right?": words.arithmetic_verdict(study),
        "Did the search finish?": words.search_verdict(study),
    }
    cards = ""
    for question, (kind, verdict, explanation) in verdicts.items():
        content = element("h3", escape(question)) + paragraph(verdict, "mark") + paragraph(explanation)
        cards += element("div", content, class_=f"card {kind}")
    cards = element("div", cards, class_="cards")
    return section("trust", "Can this be trusted?", cards, starts_table(study), trace_figure(study))


def starts_table(study: Study) -> str:
    found = getattr(study.model, "starts_", None)
    if not found:
        return ""
    best = max(start.elbo for start in found)
    titles = ("ELBO reached", "Below the best", "Evaluations")
    head = [column_heading("Start"), *(column_heading(title, "number") for title in titles)]
    rows = [
        [
            table_cell(str(start.start)),
            table_cell(with_decimals(start.elbo, 3), start.elbo),
            table_cell(readable_number(best - start.elbo), best - start.elbo),
            table_cell(f"{start.evaluations:,}", start.evaluations),
        ]
        for start in found
    ]
    return data_table("Where the kernel search started, and what each start reached", head, rows)


def trace_figure(study: Study) -> str:
    if not len(study.model.history_):
        return ""
    trace = views.convergence_trace(study.model)
    stage = " of the last stage, at the chosen kernel" if study.is_gp else ""
    sentence = (
        f"{trace.meaning[0].upper()}{trace.meaning[1:]}, by iteration{stage}. A nat is a unit of information; "
        "anything far below one is negligible."
    )
    return figure("How the search converged", sentence, charts.convergence_chart(trace), class_="small")


def fit_section(study: Study) -> str:
    facts = study.facts
    names = [str(name) for name in study.frame.columns]
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    terms = f" with {facts.terms} terms" if facts.terms else ""
    pairs = {
        "Target": f"{study.target} ({study.positive}, against {study.negative})",
        "Columns": ", ".join(names[:MOST_NAMES]) + more,
        **({} if facts.formula is None else {"Formula": str(facts.formula)}),
        **model_pairs(facts),
        "Posterior": f"Gaussian, {facts.covariance} covariance",
        "Expected log(1 + eˣ)": "exact" if facts.exact else f"bound {facts.bound!r}{terms}",
        "ELBO": with_decimals(facts.elbo, 4),
        "Log score of these rows": f"{with_decimals(study.scores.log_score, 4)} per row",
        "Rows left out": "; ".join(f"{n:,} {reason}" for reason, n in study.left_out.items()) or "none",
    }
    return section("fitted", "What was fitted", definition_list(pairs, "facts"))


def model_pairs(facts: ModelFacts) -> dict[str, str]:
    """Kernel and inducing points of a Gaussian process, or the prior of the coefficients."""
    if facts.process is not None:
        kernel = f"{facts.process.kernel}, with a {facts.process.mean} mean"
        return {"Kernel": kernel, "Inducing points": f"{facts.process.inducing:,}"}
    assert facts.prior is not None
    if facts.prior.correlated:
        return {"Prior of the coefficients": "normal, with a given covariance"}
    low, high = facts.prior.range
    sd = f"{low:.3g}" if math.isclose(low, high) else f"{low:.3g} to {high:.3g}"
    chosen = ", chosen by the ELBO" if facts.prior.chosen else ""
    return {"Prior of the coefficients": f"normal, standard deviation {sd}{chosen}"}
