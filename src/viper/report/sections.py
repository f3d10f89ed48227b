"""The sections on the model as a whole, in the order of the page."""

import math
from html import escape
from typing import Any

import numpy as np

from viper.report import charts, trust, views, words
from viper.report.checks import binned_residuals
from viper.report.decisions import confusion, decision_curve, shown_thresholds
from viper.report.metrics import by_group, judge_calibration
from viper.report.row_section import RowSection
from viper.report.shares import named_groups
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

MOST_GROUP_EFFECTS = 10  # listed of each factor
KINDS = {
    "mixed": "Bayesian logistic regression with effects of groups",
    "logistic": "Bayesian logistic regression",
    "ordinal": "Bayesian ordinal regression",
    "gp": "Gaussian process classification",
}


def subtitle(study: Study) -> str:
    kind = KINDS[study.facts.kind]
    rows = "one row" if len(study.label) == 1 else f"{len(study.label):,} rows"
    used = " that it was fitted to" if study.from_training else " that it has not seen" * study.held_out
    return f"{kind} of {study.target}, judged on {rows}{used}."


def summary_section(study: Study) -> str:
    verdict = trust.overall_verdict(study)
    found, where = study.honest_scores
    where = where and f", {where}"
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
    """Whether the scores on this page are honest."""
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
        [row_heading(escape(name)), *(table_cell("–" if x is None else readable_number(x), x or 0.0) for x in pair)]
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
        f"compare the chances for and against: odds of 3 are 3 to 1, or 75{THIN}%. Bars are intervals; those that "
        "cross the line of no change are grey, because their direction is uncertain."
    )
    more = f"These are the {len(shown)} surest of {len(found):,} coefficients." if len(found) > len(shown) else None
    listing = data_table("Coefficients with credible intervals", head, rows, "sortable coefficients")
    caution = paragraph(words.entangled_sentence(study.entangled), "note")
    return section("coefficients", "The coefficients", paragraph(text), caution, listing, paragraph(more, "note"))


def effects_of_groups_section(study: Study) -> str:
    """How much groups differ, and the groups that differ most from the others."""
    if not study.grouped:
        return ""
    head = [
        column_heading("Between groups"),
        column_heading("Mean", "number"),
        column_heading(escape(f"{study.level_name} interval"), "number"),
    ]
    parts = study.model.components(study.level)
    rows = [
        [
            row_heading(escape(str(name))),
            table_cell(f"{row['mean']:.2f}", row["mean"]),
            table_cell(f"{row['lower']:.2f} to {row['upper']:.2f}", row["lower"]),
        ]
        for name, row in parts.iterrows()
    ]
    text = (
        "sd is the standard deviation of log-odds between groups, icc the share of the variance of log-odds that lies "
        "between groups. A group's effect is drawn towards zero, more so if it has few rows. For a new group, "
        "predictions average over the effects that it may have, or are refused."
    )
    listing = data_table("How much groups differ", head, rows, "components")
    tables = [effects_of_factor(study, factor) for factor in study.model.factors_] if study.show_rows else []
    return section("effects-of-groups", "How do groups differ?", paragraph(text), listing, *tables)


def effects_of_factor(study: Study, factor: Any) -> str:
    """The effects of a factor that differ most from zero."""
    name = factor.term.name
    found = study.model.group_effects(name, study.level)
    found = found.reindex(found["mean"].abs().sort_values(ascending=False, kind="stable").index)
    head = [
        column_heading(escape(name)),
        column_heading("Effect"),
        column_heading("Odds are multiplied by", "number"),
        column_heading(escape(f"{study.level_name} interval"), "number"),
        column_heading("Rows", "number"),
    ]
    rows = [
        [
            row_heading(escape(str(group))),
            table_cell(escape(str(effect))),
            table_cell(factor_in_words(row["mean"]), row["mean"]),
            table_cell(f"{factor_in_words(row['lower'])} to {factor_in_words(row['upper'])}", row["lower"]),
            table_cell(f"{int(row['rows']):,}", row["rows"]),
        ]
        for (group, effect), row in found.head(MOST_GROUP_EFFECTS).iterrows()
    ]
    some = f"The {len(rows)} largest of {len(found):,} effects" if len(found) > len(rows) else "Effects"
    return data_table(f"{some} of {name}", head, rows, "group-effects")


def factor_in_words(log_odds: float) -> str:
    return factor(math.exp(log_odds))


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
        "units, over which the prediction stays similar: the shorter it is, the more the column matters. "
    )
    if "term_sd" in frame:
        text += (
            "Relevance also counts how large the column's effect is: the size of its slope before the data are seen."
        )
    else:
        text += "Relevance is the same in other words: one over the lengthscale, in standard deviations of the column."
    more = f"These are the {len(shown)} most relevant of {len(found):,} columns." if len(found) > len(shown) else None
    listing = data_table("Relevance of the columns", head, rows, "sortable coefficients")
    return section("coefficients", "What drives the probability", paragraph(text), listing, paragraph(more, "note"))


def terms_section(study: Study) -> str:
    """What each column and pair of an additive Gaussian process adds to the log-odds."""
    found = study.terms
    if not found:
        return ""
    shown = found[:MOST_EFFECTS]
    curves = [e for e in shown if len(e.columns) == 1]
    low, high = min(e.lower.min() for e in curves), max(e.upper.max() for e in curves)
    ends = float(low - 0.05 * (high - low)), float(high + 0.05 * (high - low))
    drawn = [figure(e.name, words.term_sentence(e), charts.term_chart(e, ends)) for e in shown]
    text = (
        "The log-odds are a sum of these effects, each less its average over the rows, so that zero is an average row. "
        f"A log-odds of +0.7 doubles the odds, −0.7 halves them. Bands contain an effect with {study.level_name} "
        "certainty. The effect of a pair is what it adds to those of its two columns."
    )
    more = f"{len(found) - len(shown):,} with smaller effects are not shown." if len(found) > len(shown) else None
    return section("terms", "What each column adds", paragraph(text), side_by_side(*drawn), paragraph(more, "note"))


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


# --- decisions ---


class DecisionSection:
    """What acting on rows from a threshold on gets right and wrong; the script lets the reader choose the threshold."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.thresholds, self.first = shown_thresholds(study.label, study.predictions.probability)
        self.curve = decision_curve(study.label, study.predictions.probability, self.thresholds, study.level)
        probability = study.predictions.probability
        self.found = [confusion(study.label, probability, threshold) for threshold in self.thresholds]
        self.steps = [self.step(k) for k in range(len(self.found))]

    def step(self, k: int) -> dict[str, str]:
        """What the page shows at one threshold, in words."""
        found, rates = self.found[k], self.found[k].rates(self.study.level)
        acted = "no row is" if not found.acted else "one row is" if found.acted == 1 else f"{found.acted:,} rows are"
        worth = (1 - found.threshold) / found.threshold
        ratio = f"one miss is as bad as {float(f'{worth:.2g}'):,g} false alarms"
        if worth < 1:
            ratio = f"one false alarm is as bad as {float(f'{1 / worth:.2g}'):,g} misses"
        if f"{worth:.2g}" == "1":
            ratio = "one miss is as bad as one false alarm"
        shown = {
            "threshold": percent(found.threshold),
            "sentence": f"Right if {ratio}. Of {found.rows:,} rows, {acted} acted on.",
            "tp": f"{found.true_positive:,}",
            "fp": f"{found.false_positive:,}",
            "fn": f"{found.false_negative:,}",
            "tn": f"{found.true_negative:,}",
            "benefit": f"{readable_number(100 * self.curve['net_benefit'][k])}",
            "acted": f"{found.acted:,}",
            "left": f"{found.rows - found.acted:,}",
        }
        for name in ("sensitivity", "specificity", "ppv", "npv"):
            rate = rates.loc[name]
            known = rate["rows"] > 0
            shown[name] = percent(rate["value"]) if known else "–"
            shown[f"{name}_interval"] = percent_range(rate["lower"], rate["upper"]) if known else "–"
        return shown

    def payload(self) -> dict[str, Any]:
        """What the script needs to show another threshold."""
        ends = float(self.curve["threshold"].iloc[-1])
        numbers = [[float(f.threshold), f.false_positive, f.false_negative, f.acted] for f in self.found]
        marks = [
            round(64 + (520 - 24 - 64) * float(t) / ends, 1) for t in self.thresholds
        ]  # the frame of benefit_chart
        return {"first": self.first, "steps": self.steps, "numbers": numbers, "marks": marks}

    def markup(self) -> str:
        study = self.study
        text = (
            "Act on every row whose probability reaches a threshold, and leave the others alone. The lower the "
            "threshold, the fewer are missed, but the more false alarms there are. Which one is right depends on what "
            f"the two mistakes cost. Here it starts at the average, {percent(study.base_rate)}."
        )
        allowance = (
            f"The {study.level_name} intervals allow for the number of rows. They treat the model as given, so they "
            f"are honest only for rows that it has not learned from."
        )
        panel = element("div", self.panel(), class_="panel still")
        curve = figure(
            "Is acting by the model worth it?",
            self.benefit_sentence(),
            charts.benefit_chart(study, self.curve, float(self.thresholds[self.first])),
        )
        return section(
            "decisions",
            "What if you act on it?",
            paragraph(text),
            self.controls(),
            element("div", panel + curve, class_="deciding"),
            self.listing(),
            paragraph(allowance, "note"),
        )

    def controls(self) -> str:
        shown = self.steps[self.first]["threshold"]
        slider = (
            element("label", "Threshold ", for_="threshold")
            + element(
                "input",
                type="range",
                id="threshold",
                min="0",
                max=str(len(self.steps) - 1),
                value=str(self.first),
                aria_valuetext=shown,
            )
            + element("output", escape(shown), for_="threshold", id="threshold-shown", data_decision="threshold")
        )
        numbers = "".join(
            element(
                "label", escape(f"{title} ") + element("input", type="number", id=id_, min="0", step=step), for_=id_
            )
            for id_, title, step in (
                ("cost-fp", "A false alarm costs", "any"),
                ("cost-fn", "A miss costs", "any"),
                ("budget", "Rows I can act on", "1"),
            )
        )
        return element("div", element("p", slider) + element("p", numbers), class_="control choices")

    def panel(self) -> str:
        study, step = self.study, self.steps[self.first]
        cell = lambda name, class_="number": element("td", escape(step[name]), class_=class_, data_decision=name)  # noqa: E731
        heading = element("h3", "Threshold " + element("span", escape(step["threshold"]), data_decision="threshold"))
        head = [column_heading("Rows")] + [
            column_heading(escape(c), "number") for c in (study.positive, study.negative)
        ]
        head.append(column_heading("All", "number"))
        matrix = [
            [row_heading("Acted on"), cell("tp"), cell("fp"), cell("acted")],
            [row_heading("Left alone"), cell("fn"), cell("tn"), cell("left")],
        ]
        names = {
            "sensitivity": f"of {study.positive}, acted on (sensitivity)",
            "ppv": f"of those acted on, {study.positive} (PPV)",
            "specificity": f"of {study.negative}, left alone (specificity)",
            "npv": f"of those left alone, {study.negative} (NPV)",
        }
        rates = [[row_heading(escape(title)), cell(name), cell(f"{name}_interval")] for name, title in names.items()]
        rate_head = [column_heading("Share"), column_heading("Here", "number")]
        rate_head.append(column_heading(escape(study.level_name), "number"))
        return (
            heading
            + paragraph(step["sentence"], data_decision="sentence", aria_live="polite")
            + paragraph(" ", "cost", id="decision-cost", aria_live="polite")
            + data_table("Confusion matrix", head, matrix, "matrix")
            + data_table("What is right and wrong about it", rate_head, rates, "rates")
        )

    def benefit_sentence(self) -> str:
        """At which thresholds the model is worth more than acting on everybody or nobody."""
        what = (
            "Net benefit counts hits, and subtracts false alarms at the price that the threshold sets. Dashed: acting "
            "on everybody, and on nobody, which is zero."
        )
        sure, likely = self.curve["gain_lower"] > 0, self.curve["gain"] > 0
        if not likely.any():
            return f"{what} At no threshold is the model worth more than the better of those two."
        better, how = (sure, "clearly worth") if sure.any() else (likely, "worth")
        at = self.curve.loc[better, "threshold"]
        where = (
            f"at {percent(at.iloc[0])}" if len(at) == 1 else f"between {percent(at.iloc[0])} and {percent(at.iloc[-1])}"
        )
        return f"{what} The model is {how} more than the better of those two at thresholds {where}."

    def listing(self) -> str:
        titles = ("Threshold", "Acted on", "Hits", "False alarms", "Misses", "Of all hits, found", "Right when acting")
        chosen = views.spaced_indices(len(self.steps), 12)
        keys = ("threshold", "acted", "tp", "fp", "fn", "sensitivity", "ppv")
        rows = []
        for k in chosen:
            f = self.found[k]
            sort = (f.threshold, f.acted, f.true_positive, f.false_positive, f.false_negative, *(2 * [k]))
            step = self.steps[k]
            rows.append([table_cell(step[key], x) for key, x in zip(keys, sort, strict=True)])
        head = [column_heading(title, "number") for title in titles]
        table = data_table("What acting from each threshold on gets right and wrong", head, rows)
        return element("details", element("summary", "Other thresholds") + table)


# --- groups and checks ---


def groups_section(study: Study) -> str:
    """Scores and calibration by column, each with one verdict on all of its groups."""
    parts = [group_listing(study, name, column) for name, column in study.groupings.items()]
    if not any(parts):
        return ""
    text = (
        f"Dot and bar: the share that {study.predicate('had')}, with its {study.level_name} interval; upright line: "
        "the share that was predicted. A group “differs” if it is further off than chance would take any of the "
        "groups. Groups with fewer than ten rows of one outcome are grey: their numbers say little."
    )
    return section("groups", "Is it as good for every group?", paragraph(text), *parts)


def group_listing(study: Study, name: str, column: Any) -> str:
    probability = study.predictions.probability
    table = by_group(study.label, probability, column, study.level)
    if len(table) < 2:
        return ""
    strips = charts.ShareStrips(table)
    titles = ("Rows", "Predicted", "Observed")
    head = [column_heading(escape(name)), *(column_heading(title, "number") for title in titles)]
    head += [column_heading(strips.axis(), "wide"), column_heading("AUC", "number"), column_heading("Remark")]
    rows = []
    for group, row in zip(table.index, table.itertuples(), strict=True):
        observed = f"{percent(row.observed)} ({percent_range(row.observed_lower, row.observed_upper)})"
        auc = "–" if math.isnan(row.auc) else f"{row.auc:.2f} ({row.auc_lower:.2f} to {row.auc_upper:.2f})"
        cells = [
            row_heading(escape(str(group))),
            table_cell(f"{row.rows:,}", row.rows),
            table_cell(chance(row.predicted), row.predicted),
            table_cell(observed, row.observed),
            element("td", strips.line(str(group), row), class_="wide"),
            table_cell(auc, row.rows),
            table_cell(", ".join(["differs"] * row.differs + ["few rows"] * row.few)),
        ]
        rows.append(cells)
    verdict = judge_calibration(study.label, probability, groups=named_groups(column).place).sentence
    across = paragraph(f"Across these groups: {verdict[0].lower()}{verdict[1:]}")
    caption = f"Predicted and observed shares, and ranking, by {name}"
    return element("h3", escape(f"By {name}")) + across + data_table(caption, head, rows, "groups")


def checks_section(study: Study) -> str:
    """Residuals in groups, outcomes drawn from the posterior, and leave-one-out."""
    probability = study.predictions.probability
    table = binned_residuals(study.label, probability, level=study.level)
    outside, expected = int(table["outside"].sum()), (1 - study.level) * len(table)
    figures = [
        figure(
            "What the model gets wrong, by probability",
            f"Each dot is a group of rows: how many more or fewer {study.predicate('had')} than predicted. The band is "
            f"what chance allows. {outside} of {len(table)} lie outside; by chance alone it would be about "
            f"{readable_number(expected)}.",
            charts.residual_chart(table, "predicted probability", True),
        )
    ]
    for name in study.bent_columns:
        values = study.frame[name].to_numpy(dtype=float, na_value=np.nan)
        known = np.isfinite(values)
        by_column = binned_residuals(study.label[known], probability[known], values[known], level=study.level)
        sentence = (
            f"Dots that do not scatter around zero mean that {name} has an effect that the model cannot describe, "
            "such as a bend. A spline can describe one."
        )
        figures.append(
            figure(
                f"What it gets wrong, by {name}",
                sentence,
                charts.residual_chart(by_column, name, False, name in study.dates),
            )
        )
    shown = side_by_side(*figures) if len(figures) > 1 else element("div", figures[0], class_="small")
    title = "Do the rows look as the model expects?"
    return section("checks", title, shown, drawn_outcomes(study), leave_one_out_part(study))


def drawn_outcomes(study: Study) -> str:
    """Posterior predictive checks."""
    table = study.predictive
    names = {
        "positives": f"Rows that {study.predicate('have')}",
        "log score": "Log score of the probabilities, per row",
        "Brier score": "Brier score of the probabilities",
    }
    head = [
        column_heading("Statistic"),
        *(column_heading(t, "number") for t in ("Observed", "Expected", study.level_name)),
    ]
    head.append(column_heading("Remark"))
    rows = []
    for key, title in names.items():
        row = table.loc[key]
        count = key == "positives"
        form = (lambda x: f"{x:,.0f}") if count else (lambda x: f"{x:#.3g}".replace("-", "−"))
        cells = [table_cell(form(row[x]), row[x]) for x in ("observed", "expected")]
        cells.append(table_cell(f"{form(row['lower'])} to {form(row['upper'])}", row["lower"]))
        rows.append([row_heading(escape(title)), *cells, table_cell("unusual" if row["unusual"] else "as expected")])
    text = (
        "If the model is right, outcomes drawn from it look like those that were observed. Many sets of outcomes were "
        f"drawn, allowing for what the model does not know; {study.level_name} of them lie between the two numbers."
    )
    caption = "Outcomes drawn from the posterior (posterior predictive check)"
    return (
        element("h3", "Would the model have produced such outcomes?")
        + paragraph(text)
        + data_table(caption, head, rows)
    )


def leave_one_out_part(study: Study) -> str:
    """Leave-one-out of the rows of the fit."""
    found = study.loo
    if found is None:
        return ""
    own, loo = study.scores.log_score, found.elpd_loo / found.rows
    doubtful = len(found.doubtful)
    trusted = (
        "This can be trusted for every row."
        if not doubtful
        else f"For {doubtful:,} of the rows it cannot be trusted, because the fit depends on them too much."
    )
    text = (
        f"Predicted from all other rows, a row has a log score of {with_decimals(loo, 4)} on average (±{THIN}"
        f"{with_decimals(found.se / found.rows, 4)}; 0 is perfect); by a model that has seen it, "
        f"{with_decimals(own, 4)}. The difference is what the model learned by heart: as much as "
        f"{readable_number(found.p_loo)} free parameters would. {trusted}"
    )
    return element("h3", "How well does it predict a row that it has not seen?") + paragraph(text)
