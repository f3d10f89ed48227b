"""The sections on the fit itself: whether to believe it, and what it was."""

import math
from html import escape
from typing import Any

import numpy as np

from viper.report import charts, views, words
from viper.report.parts import cell, facts, figure, heading, p, section, table
from viper.report.study import Study
from viper.report.svg import element
from viper.report.words import number, number_with


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
        "Log score of these rows": f"{number_with(study.log_score, 4)} per row",
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
