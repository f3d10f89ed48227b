"""The sections on the model as a whole: in short, how well it predicts, what drives it, where."""

import math
from html import escape
from typing import Any

import numpy as np

from viper.report import charts, views, words
from viper.report.study import MOST_COEFFICIENTS, MOST_EFFECTS, Study
from viper.report.svg import (
    cell,
    columns,
    element,
    facts,
    figure,
    heading,
    p,
    row_heading,
    section,
    sort_button,
    table,
)
from viper.report.views import Effect
from viper.report.words import factor, number, number_with, percent, span


def trust(study: Study) -> str:
    cards = [
        ("Is the posterior close to the exact one?", *words.closeness(study)),
        ("Is the arithmetic right?", *words.arithmetic(study)),
        ("Did the search finish?", *words.search(study)),
    ]
    boxes = "".join(
        element("div", element("h3", escape(name)) + p(word, "mark") + p(told), class_=f"card {kind}")
        for name, kind, word, told in cards
    )
    return section("trust", "Can this be trusted?", element("div", boxes, class_="cards"), starts(study), trace(study))


def starts(study: Study) -> str:
    """Where the search for a kernel began."""
    found = getattr(study.model, "starts_", None)
    if not found:
        return ""
    best = max(start.elbo for start in found)
    head = [heading("Start")] + [heading(t, "number") for t in ("ELBO reached", "Below the best", "Evaluations")]
    rows = [
        [
            cell(str(s.start)),
            cell(number_with(s.elbo, 3), s.elbo),
            cell(number(best - s.elbo), best - s.elbo),
            cell(f"{s.evaluations:,}", s.evaluations),
        ]
        for s in found
    ]
    return table("Where the search for the kernel began, and what it reached", head, rows)


def trace(study: Study) -> str:
    if not len(study.model.history_):
        return ""
    found = views.trace(study.model)
    last = " of the last stage, at the chosen kernel" if study.is_gp else ""
    sentence = (
        f"{found.meaning[0].upper()}{found.meaning[1:]}, by iteration{last}. A nat is a unit of information; "
        "anything far below one is unnoticeable."
    )
    return figure("The way to the answer", sentence, charts.convergence(found), class_="small")


def fitted(study: Study) -> str:
    model, encoding = study.model, getattr(study.model, "formula_", None)
    names = [str(name) for name in study.frame.columns]
    pairs = {
        "Target": f"{study.target} ({study.positive}, against {study.negative})",
        "Columns": ", ".join(names[:40]) + (f" and {len(names) - 40:,} more" if len(names) > 40 else ""),
        **({} if encoding is None else {"Formula": str(encoding.formula)}),
        **(gp_facts(model) if study.is_gp else logistic_facts(model)),
        "Expected log(1 + eˣ)": "exact" if model.bound == "viper" and model.terms is None else by_bound(model),
        "ELBO": number_with(model.elbo_, 4),
        "Log score of these rows": f"{number_with(study.scores.log_score, 4)} per row",
        "Rows left out": "; ".join(f"{n:,} {why}" for why, n in study.left_out.items()) or "none",
    }
    return section("fitted", "What was fitted", facts(pairs, "facts"))


def by_bound(model: Any) -> str:
    return f"bound {model.bound!r}" + (f" with {model.terms} terms" if model.terms else "")


def logistic_facts(model: Any) -> dict[str, str]:
    scale = np.asarray(model.prior_scale_)
    if scale.ndim == 2:
        prior = "normal, with a given covariance"
    else:
        low, high = float(scale.min()), float(scale.max())
        sd = f"{low:.3g}" if math.isclose(low, high) else f"{low:.3g} to {high:.3g}"
        chosen = ", chosen by the ELBO" if isinstance(model.prior_scale, str) else ""
        prior = f"normal, standard deviation {sd}{chosen}"
    return {"Prior of the coefficients": prior, "Posterior": f"Gaussian, {model.covariance} covariance"}


def gp_facts(model: Any) -> dict[str, str]:
    kernel, mean = (part if isinstance(part, str) else type(part).__name__ for part in (model.kernel, model.mean))
    return {
        "Kernel": f"{kernel}, with a {mean} mean",
        "Inducing points": f"{len(model.inducing_points_):,}",
        "Posterior": f"Gaussian, {model.covariance} covariance",
    }


def subtitle(study: Study) -> str:
    kind = "Gaussian process classification" if study.is_gp else "Bayesian logistic regression"
    rows = "one row" if len(study.label) == 1 else f"{len(study.label):,} rows"
    used = " that it was fitted to" if study.from_training else " that it has not seen" * study.held_out
    return f"{kind} of {study.target}, seen through {rows}{used}."


def summary(study: Study) -> str:
    _, verdict, _ = words.closeness(study)
    tiles = {
        "rows": f"{len(study.label):,}",
        f"of them {study.positive}": percent(study.label.mean()),
        "AUC: chance to rank a pair rightly": "–" if study.scores.auc is None else f"{study.scores.auc:.3f}",
        "Brier score: 0 is perfect": f"{study.scores.brier:.3f}",
        "closeness to the exact posterior": verdict.lower(),
    }
    findings = [words.ranking(study), words.calibration(study), words.driver(study), words.certainty(study)]
    items = "".join(element("li", escape(finding)) for finding in findings if finding)
    caution = (
        "These are the rows that the model learned from, which flatters it. For an honest test, make the report from "
        "rows it has not seen."
        if study.from_training
        else "The model has learned from none of these rows: the scores are an honest test."
        if study.held_out
        else "If the model has learned from some of these rows, the scores flatter it."
    )
    return section("summary", "In short", facts(tiles, "tiles"), element("ul", items), p(caution, "note"))


# --- how well it predicts ---


def performance(study: Study) -> str:
    titles = ("Predicted", "Rows", f"That {study.which('were')}", "Margin")
    rows = [
        [cell(percent(q), q), cell(f"{n:,}", n), cell(percent(o), o), cell(span(low, high), low)]
        for n, q, o, low, high in zip(*study.reliability, strict=True)
    ]
    listing = table("Reliability by group of rows", [heading(escape(t), "number") for t in titles], rows)
    reliability = figure(
        "Do its percentages come true?",
        words.reliable_group(study.reliability, study.which("were")) + " On the dashed line, they come true exactly.",
        charts.reliability(study),
        element("details", element("summary", "The numbers") + listing),
    )
    if study.scores.auc is None:
        return section("performance", "How well it predicts", columns(reliability), p(words.ranking(study)))
    found = figure("Does it find them?", words.finding(study), charts.roc(study))
    right = figure("Are those it flags the right ones?", words.precision(study), charts.precision_recall(study))
    return section("performance", "How well it predicts", columns(reliability, found, right))


# --- what drives it ---


def drivers(study: Study) -> str:
    found = study.coefficients
    if found is None:
        return relevance(study)
    if not found:
        return ""
    shown = found[:MOST_COEFFICIENTS]
    forest = charts.Forest(shown)
    head = [
        heading(sort_button("Column")),
        heading("Change"),
        heading(forest.axis(), "wide"),
        heading(sort_button("Odds are multiplied by"), "number"),
        heading(escape(f"{study.level_name} interval"), "number"),
        heading(sort_button("Sure of direction"), "number"),
    ]
    rows = [
        [
            row_heading(escape(c.name)),
            cell(c.unit),
            element("td", forest.line(c), class_="wide"),
            cell(factor(math.exp(c.mean)), c.mean),
            cell(f"{factor(math.exp(c.lower))} to {factor(math.exp(c.upper))}", c.lower),
            cell(percent(c.direction), c.direction),
        ]
        for c in shown
    ]
    text = (
        f"What happens to the odds of {study.positive} when one column changes as the second says and all others stay. "
        "Bars are intervals; those that cross the line of no change are grey, because their direction is open."
    )
    more = f"The {len(shown)} surest of {len(found):,} coefficients are shown." if len(found) > len(shown) else None
    listing = table("Coefficients with credible intervals", head, rows, "sortable coefficients")
    return section("coefficients", "What drives the probability", p(text), listing, p(more, "note"))


def relevance(study: Study) -> str:
    """The lengthscales of a Gaussian process, as relevance."""
    frame = study.model.summary()
    if "relevance" not in frame:
        return ""
    found = frame.sort_values("relevance", ascending=False)
    shown = found[:MOST_COEFFICIENTS]
    top = float(shown["relevance"].iloc[0]) or 1.0
    other = next(name for name in ("lengthscale", "prior_sd") if name in frame)
    head = [heading(sort_button("Column")), heading("Relevance", "wide")]
    head += [heading(sort_button(t), "number") for t in ("Relevance", other.replace("_", " ").capitalize())]
    rows = []
    for name, strength, own in zip(shown.index, shown["relevance"], shown[other], strict=True):
        bar = charts.relevance_bar(float(strength) / top, f"{name}: relevance {strength:.3g}")
        numbers = [cell(number(float(x)), x) for x in (strength, own)]
        rows.append([row_heading(escape(str(name))), element("td", bar, class_="wide"), *numbers])
    text = (
        "How quickly the prediction changes along each column. A lengthscale is the distance, in the column's own "
        "units, over which the log-odds stay alike: the shorter it is, the more the column matters. Relevance is one "
        "over the lengthscale in standard deviations."
    )
    more = f"The {len(shown)} largest of {len(found):,} are shown." if len(found) > len(shown) else None
    listing = table("Relevance of the columns", head, rows, "sortable coefficients")
    return section("coefficients", "What drives the probability", p(text), listing, p(more, "note"))


def effects(study: Study) -> str:
    shown = study.effects[:MOST_EFFECTS]
    if not shown:
        return ""
    options = "".join(element("option", escape(e.name), value=str(k)) for k, e in enumerate(shown))
    control = element("label", "Column ", for_="effect") + element("select", options, id="effect")
    pictures = "".join(figure(e.name, ends(e), charts.effect(study, e), class_="effect") for e in shown)
    text = (
        "The probability as one column moves and every other stays at its typical value. The band holds the "
        f"probability with {study.level_name} certainty: where few rows have been seen, it widens."
    )
    left = len(study.effects) - len(shown)
    more = f"Columns are in the order of their effect; {left:,} with smaller ones are not drawn." if left else None
    return section(
        "effects",
        "One column at a time",
        p(text),
        element("div", control, class_="control"),
        element("div", pictures, class_="effects"),
        p(more, "note"),
    )


def ends(e: Effect) -> str:
    """A partial effect in words."""
    seen = e.predictions
    if not e.curve:
        k = int(np.argmax(seen.probability))
        interval = span(seen.lower[k], seen.upper[k])
        return f"It is highest for {number(e.values[k])}: {percent(seen.probability[k])} ({interval})."
    first, last = (f"{percent(seen.probability[k])} at {number(e.values[k])}" for k in (0, -1))
    k = int(np.argmax(seen.width))
    interval = span(seen.lower[k], seen.upper[k])
    return f"The probability goes from {first} to {last}. It is least certain at {number(e.values[k])}: {interval}."


# --- where ---


def where(study: Study) -> str:
    if study.map is None:
        return ""
    names = study.map.names
    others = ", every other column at its typical value" if study.frame.shape[1] > 2 else ""
    mean = figure(
        "The probability",
        f"Over {names[0]} and {names[1]}{others}. Marks are rows, triangles those that {study.which('were')}.",
        charts.field_map(study, "mean"),
        charts.legend("mean", "0%", "100%"),
    )
    sd = figure(
        "How unsure it is there",
        "The standard deviation of the probability: bright where the model cannot know.",
        charts.field_map(study, "sd"),
        charts.legend("sd", "0 points", f"{100 * float(study.map.sd.max()):.0f} points"),
    )
    return section("map", "Where", columns(mean, sd))
