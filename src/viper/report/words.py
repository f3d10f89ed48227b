"""Numbers and findings in plain words. Everything returned is plain text; the page escapes it."""

import math
from typing import Any

import numpy as np
import scipy.special

from viper.report.study import Study
from viper.report.views import Reliability, Unusual

THIN, JOIN = "\N{NARROW NO-BREAK SPACE}", "\N{WORD JOINER}"
ENOUGH = 5  # rows that a group needs to serve as an example


def percent(p: float) -> str:
    """68 %, or on which side of the last percent it lies."""
    x = 100.0 * float(p)
    if 0.0 < x < 1.0:
        return f"<1{THIN}%"
    if 99.0 < x < 100.0:
        return f">99{THIN}%"
    return f"{x:.0f}{THIN}%"


def span(low: float, high: float) -> str:
    """61–75 %; one more digit where both ends would round to the same. The dash does not break a line."""
    low, high = 100.0 * float(low), 100.0 * float(high)
    digits = 0 if round(low) != round(high) or low == high else 1
    return f"{low:.{digits}f}{JOIN}–{JOIN}{high:.{digits}f}{THIN}%"


def about(p: float) -> str:
    """'about 70 %', or on which side of the last percent."""
    return (
        "less than 1" + THIN + "%" if p < 0.01 else "more than 99" + THIN + "%" if p > 0.99 else f"about {percent(p)}"
    )


def points(width: float) -> str:
    """A difference of probabilities in percentage points."""
    x = 100.0 * float(width)
    return "one percentage point" if x < 1.5 else f"{x:.0f} percentage points"


def number(x: Any) -> str:
    """Three digits that count."""
    if isinstance(x, bool | np.bool_) or not isinstance(x, int | float | np.integer | np.floating):
        return str(x)
    x = float(x)
    if not math.isfinite(x):
        return str(x)
    if x == 0 or 1e-3 <= abs(x) < 1e6:
        return (f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}").replace("-", "−")
    digits, power = f"{x:.1e}".split("e")
    return f"{digits}e{int(power)}".replace("-", "−")


def number_with(x: float, digits: int) -> str:
    return f"{x:,.{digits}f}".replace("-", "−")


def factor(x: float) -> str:
    """A multiplier with two digits that count, or three: 0.043, 2.45, 12.3, 150."""
    if not 1e-4 < x < 1e6:
        return f"{x:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 0.1 else f"{x:.2g}"


# --- findings ---


def ranking(study: Study) -> str:
    if study.scores.auc is None:
        return f"All rows {study.which('are', int(study.label[0]))}, so how well the model ranks rows cannot be seen."
    return (
        f"Shown one row that {study.which('is')} and one that {study.which('is', 0)}, the model gives the higher "
        f"probability to the right one {100 * study.scores.auc:.1f} times in 100."
    )


def finding(study: Study, share: float = 0.95) -> str:
    """The price of finding most of the positive rows."""
    from sklearn.metrics import roc_curve

    false, true, _ = roc_curve(study.label, study.seen.probability)
    price = float(false[np.argmax(true >= share)])
    return (
        f"To find {percent(share)} of the rows that {study.which('were')}, {percent(price)} of those that "
        f"{study.which('were', 0)} would be flagged by mistake."
    )


def calibration(study: Study) -> str:
    table = study.reliability
    right = int(((table.lower <= table.predicted) & (table.predicted <= table.upper)).sum())
    groups, least, most = len(table.rows), int(table.rows.min()), int(table.rows.max())
    size = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    found = f"{right} of {groups} groups of rows ({size} in each) came out as predicted, within their margins."
    if right == groups:
        return f"Nothing here contradicts its percentages: {found}"
    return (
        f"Its percentages mostly hold up: {found}" if right >= 0.8 * groups else f"Its percentages need care: {found}"
    )


def reliable_group(table: Reliability, were: str) -> str:
    """One group as an example: the largest that is not nearly certain, or the largest of all."""
    open_ = (table.predicted > 0.1) & (table.predicted < 0.9) & (table.rows >= ENOUGH)
    k = int(np.argmax(np.where(open_, table.rows, 0) if open_.any() else table.rows))
    count = "the row" if table.rows[k] == 1 else f"the {table.rows[k]:,} rows"
    return (
        f"Of {count} given {about(table.predicted[k])}, {percent(table.observed[k])} {were} "
        f"(margin {span(table.lower[k], table.upper[k])})."
    )


def precision(study: Study) -> str:
    """What happens at the threshold ½."""
    said = study.seen.probability > 0.5
    hits = int((said & study.label).sum())
    if not said.any():
        return f"No row is given more than 50{THIN}%."
    found = f", and those are {hits:,} of all {int(study.label.sum()):,} that {study.which('were')}" * bool(hits)
    return (
        f"Of the {int(said.sum()):,} rows given more than 50{THIN}%, {hits:,} {study.which('were')} "
        f"({percent(hits / said.sum())}){found}."
    )


def certainty(study: Study) -> str:
    half, tenth = np.quantile(study.seen.width, [0.5, 0.9])
    return (
        f"For half of the rows the {study.level_name} interval of the probability is at most {points(half)} wide; "
        f"for one row in ten it is wider than {points(tenth)}."
    )


def driver(study: Study) -> str | None:
    """The strongest single finding about a column."""
    if study.coefficients is not None:
        clear = [c for c in study.coefficients if c.clear]
        if not clear:
            return "No single coefficient is clearly above or below zero; together they may still predict well."
        top = max(clear, key=lambda c: abs(c.mean))
        ends = f"{factor(math.exp(top.lower))} to {factor(math.exp(top.upper))}"
        return (
            f"The strongest clear effect is that of {top.name} ({top.unit}): it multiplies the odds of "
            f"{study.positive} by {factor(math.exp(top.mean))} ({ends}), all else equal."
        )
    if study.effects:
        most = study.effects[0]
        low, high = most.predictions.probability.min(), most.predictions.probability.max()
        return f"{most.name} moves the prediction most: from {percent(low)} to {percent(high)}, all else typical."
    return None


def row(study: Study, k: int) -> str:
    """What the model says of one row."""
    seen = study.seen
    return (
        f"The model gives {percent(seen.probability[k])}; the {study.level_name} interval is "
        f"{span(seen.lower[k], seen.upper[k])}."
    )


def unusual(found: Unusual, k: int) -> str:
    """In what a row is unusual."""
    told = [
        f"{name} is {number(value)} ({abs(z):.1f} sd {'above' if z > 0 else 'below'} the mean)"
        for name, value, z in found.columns(k)
        if abs(z) >= 2.0
    ]
    rare = found.rarity[k] >= 0.9 and len(found.names) > 1
    combined = f"its values together are rarer than those of {percent(found.rarity[k])} of the rows" if rare else ""
    parts = [*told, *([combined] if combined else [])]
    return f"Unusual: {'; '.join(parts)}." if parts else "No value is unusual."


def row_note(study: Study, found: Unusual, k: int) -> str:
    """What a row was, the chance that its probability is above ½, and in what it is unusual."""
    above = float(scipy.special.ndtr(study.seen.latent[k] / max(float(study.seen.latent_sd[k]), 1e-300)))
    return (
        f"Outcome: {study.names[int(study.label[k])]}. That its probability is above 50{THIN}% has a chance of "
        f"{percent(above)}. {unusual(found, k)}"
    )


# --- the certificate ---


Verdict = tuple[str, str, str]  # class of its card, one word, sentence


def closeness(study: Study) -> Verdict:
    """Whether the Gaussian posterior is certified close to the exact one."""
    if study.diagnosis is None:
        return "open", "Not measured", study.no_diagnosis
    d = study.diagnosis
    text = (
        f"{d.verdict} The Pareto diagnostic k̂ is {d.k_hat:.2f} (close below 0.5, usable below {d.threshold:.2f}); "
        f"{d.draws:,} weighted draws are worth {d.effective_sample_size:,.0f}."
    )
    if d.reliable:
        gap = max(d.log_evidence - study.model.elbo_, 0.0)
        text += f" By the same draws, the fitted posterior is about {gap:.2g} nats from the exact one."
        return "good", "Certified" if d.close else "Usable", text
    if d.close:
        return "good", "Close", text
    return "bad", "Not certified", text


def arithmetic(study: Study) -> Verdict:
    """The certified gap between the ELBO and a bound that allows for every rounding error."""
    model = study.model
    gap = float(model.elbo_ - model.elbo_bound_)
    good = 0.0 <= gap < 1e-3
    text = (
        f"The evidence lower bound (ELBO) of this fit is {number_with(model.elbo_, 4)}. Allowing for every rounding "
        f"error on the way, that is certified to within {gap:.1e} nats"
        + (": the number is right to the last digit shown." if gap < 5e-5 else ".")
    )
    loss = float(model.elbo_ - model.objective_)
    if abs(loss) > 1e-6:
        text += f" The bound that was maximised ({model.bound}) lies {loss:.2g} nats below the exact ELBO."
    return ("good", "Certified", text) if good else ("bad", "With a gap", text)


def search(study: Study) -> Verdict:
    model = study.model
    steps = "iteration" if model.n_iter_ == 1 else "iterations"
    if model.converged_:
        return (
            "good",
            "Yes",
            f"The search finished after {model.n_iter_:,} {steps}: no further step would change the answer.",
        )
    return "bad", "No", f"The search did not finish: {model.status_}. Fit again with a larger max_iter."
