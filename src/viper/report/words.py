"""Numbers, findings and verdicts in plain words. Every function returns plain text, which the page escapes."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.special

from viper.report.study import Study
from viper.report.views import Effect, Outlyingness

if TYPE_CHECKING:
    import pandas

THIN, JOIN = "\N{NARROW NO-BREAK SPACE}", "\N{WORD JOINER}"
ENOUGH = 5  # rows that a group must have to serve as an example


def percent(p: float) -> str:
    """68 %, or <1 % and >99 % near the ends."""
    x = 100.0 * float(p)
    if 0.0 < x < 1.0:
        return f"<1{THIN}%"
    if 99.0 < x < 100.0:
        return f">99{THIN}%"
    return f"{x:.0f}{THIN}%"


def percent_range(low: float, high: float) -> str:
    """61–75 %, with one more digit where both ends would round to the same number. No line breaks at the dash."""
    low, high = 100.0 * float(low), 100.0 * float(high)
    digits = 0 if round(low) != round(high) or low == high else 1
    return f"{low:.{digits}f}{JOIN}–{JOIN}{high:.{digits}f}{THIN}%"


def about(p: float) -> str:
    """'about 70 %', or 'less than 1 %' and 'more than 99 %' near the ends."""
    return f"less than 1{THIN}%" if p < 0.01 else f"more than 99{THIN}%" if p > 0.99 else f"about {percent(p)}"


def points(width: float) -> str:
    """A difference of probabilities in percentage points."""
    x = 100.0 * float(width)
    return "one percentage point" if x < 1.5 else f"{x:.0f} percentage points"


def readable_number(x: Any) -> str:
    """Three significant digits; anything but a number as it is."""
    if isinstance(x, bool | np.bool_) or not isinstance(x, int | float | np.integer | np.floating):
        return str(x)
    x = float(x)
    if not math.isfinite(x):
        return str(x)
    if x == 0 or 1e-3 <= abs(x) < 1e6:
        return (f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}").replace("-", "−")
    digits, power = f"{x:.1e}".split("e")
    return f"{digits}e{int(power)}".replace("-", "−")


def with_decimals(x: float, digits: int) -> str:
    return f"{x:,.{digits}f}".replace("-", "−")


def factor(x: float) -> str:
    """A factor with two or three significant digits: 0.043, 2.45, 12.3, 150."""
    if not 1e-4 < x < 1e6:
        return f"{x:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 0.1 else f"{x:.2g}"


# --- findings ---


def ranking_sentence(study: Study) -> str:
    if study.scores.auc is None:
        return f"All rows {study.predicate('are', int(study.label[0]))}, so the model's ranking cannot be judged."
    return (
        f"Given one row that {study.predicate('is')} and one that {study.predicate('is', 0)}, the model assigns the "
        f"higher probability to the right one {100 * study.scores.auc:.1f} times in 100."
    )


def recall_sentence(study: Study, share: float = 0.95) -> str:
    """What it costs to find most of the positive rows."""
    false, true = study.roc
    cost = float(false[np.argmax(true >= share)])
    return (
        f"To find {percent(share)} of the rows that {study.predicate('were')}, {percent(cost)} of those that "
        f"{study.predicate('were', 0)} would be flagged by mistake."
    )


def calibration_sentence(study: Study) -> str:
    table = study.calibration
    right = int(((table["lower"] <= table["predicted"]) & (table["predicted"] <= table["upper"])).sum())
    groups, least, most = len(table["rows"]), int(table["rows"].min()), int(table["rows"].max())
    size = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    verdict = (
        "Nothing here contradicts its percentages"
        if right == groups
        else "Its percentages mostly hold up"
        if right >= 0.8 * groups
        else "Its percentages need care"
    )
    came_out = f"{right} of {groups} groups of rows ({size} in each) came out as predicted"
    return f"{verdict}: {came_out}, within their margins."


def group_sentence(table: "pandas.DataFrame", were: str) -> str:
    """One group as an example: the largest that is not nearly certain, or the largest of all."""
    open_ = (table["predicted"] > 0.1) & (table["predicted"] < 0.9) & (table["rows"] >= ENOUGH)
    k = int(np.argmax(np.where(open_, table["rows"], 0) if open_.any() else table["rows"]))
    count = "the row" if table["rows"][k] == 1 else f"the {table['rows'][k]:,} rows"
    return (
        f"Of {count} given {about(table['predicted'][k])}, {percent(table['observed'][k])} {were} "
        f"(margin {percent_range(table['lower'][k], table['upper'][k])})."
    )


def precision_sentence(study: Study) -> str:
    """What happens at the threshold ½."""
    flagged = study.predictions.probability > 0.5
    hits = int((flagged & study.label).sum())
    if not flagged.any():
        return f"No row is given more than 50{THIN}%."
    total = f". That is {hits:,} of all {int(study.label.sum()):,} rows that {study.predicate('were')}" * bool(hits)
    return (
        f"Of the {int(flagged.sum()):,} rows given more than 50{THIN}%, {hits:,} {study.predicate('were')} "
        f"({percent(hits / flagged.sum())}){total}."
    )


def width_sentence(study: Study) -> str:
    half, tenth = np.quantile(study.predictions.width, [0.5, 0.9])
    return (
        f"For half of the rows, the {study.level_name} interval of the probability is at most {points(half)} wide; "
        f"for one row in ten, it is wider than {points(tenth)}."
    )


def driver_sentence(study: Study) -> str | None:
    """The strongest single finding about a column."""
    if study.coefficients is not None:
        clear = [c for c in study.coefficients if c.clear]
        if not clear:
            return "No single coefficient is clearly above or below zero; together they may still predict well."
        top = max(clear, key=lambda c: abs(c.mean))
        ends = f"{factor(math.exp(top.lower))} to {factor(math.exp(top.upper))}"
        return (
            f"The strongest clear effect is that of {top.name} ({top.unit}): it multiplies the odds of "
            f"{study.positive} by {factor(math.exp(top.mean))} ({ends}), all else being equal."
        )
    if study.effects:
        top_effect = study.effects[0]
        low, high = top_effect.predictions.probability.min(), top_effect.predictions.probability.max()
        return (
            f"{top_effect.name} moves the prediction most: from {percent(low)} to {percent(high)}, with all other "
            "columns at typical values."
        )
    return None


def effect_sentence(e: Effect) -> str:
    seen = e.predictions
    k = int(np.argmax(seen.width if e.curve else seen.probability))
    value, interval = readable_number(e.values[k]), percent_range(seen.lower[k], seen.upper[k])
    if not e.curve:
        return f"The probability is highest for {value}: {percent(seen.probability[k])} ({interval})."
    first, last = (f"{percent(seen.probability[j])} at {readable_number(e.values[j])}" for j in (0, -1))
    return f"The probability goes from {first} to {last}. It is least certain at {value}: {interval}."


def row_sentence(study: Study, k: int) -> str:
    """The prediction for one row; page.js writes the same sentence for other rows."""
    seen = study.predictions
    return (
        f"The model gives {percent(seen.probability[k])}; the {study.level_name} interval is "
        f"{percent_range(seen.lower[k], seen.upper[k])}."
    )


def unusual_sentence(found: Outlyingness, k: int) -> str:
    parts = [
        f"{name} is {readable_number(value)} ({abs(z):.1f} sd {'above' if z > 0 else 'below'} the mean)"
        for name, value, z in found.extremes(k)
        if abs(z) >= 2.0
    ]
    if found.rarity[k] >= 0.9 and len(found.names) > 1:
        parts.append(f"its combination of values is rarer than that of {percent(found.rarity[k])} of the rows")
    return f"Unusual: {'; '.join(parts)}." if parts else "None of its values is unusual."


def row_note(study: Study, found: Outlyingness, k: int) -> str:
    """The outcome of a row, how sure the model is that its probability exceeds ½, and what is unusual about it."""
    seen = study.predictions
    above = float(scipy.special.ndtr(seen.latent[k] / max(float(seen.latent_sd[k]), 1e-300)))
    return (
        f"Outcome: {study.class_names[int(study.label[k])]}. The chance that its probability is above 50{THIN}% is "
        f"{percent(above)}. {unusual_sentence(found, k)}"
    )


Verdict = tuple[str, str, str]  # class of the card, verdict in a word or two, explanation


def closeness_verdict(study: Study) -> Verdict:
    """Whether the Gaussian posterior is certified to be close to the exact one."""
    d = study.diagnosis
    if d is None:
        return "open", "Not measured", study.no_diagnosis
    text = (
        f"{d.verdict} The Pareto diagnostic k̂ is {d.k_hat:.2f} (close below 0.5, usable below {d.threshold:.2f}); "
        f"{d.draws:,} weighted draws are worth {d.effective_sample_size:,.0f} independent ones."
    )
    if d.reliable:
        gap = max(d.log_evidence - study.facts.elbo, 0.0)
        text += f" By the same draws, the fitted posterior is about {gap:.2g} nats from the exact one."
        return "good", "Certified" if d.close else "Usable", text
    return ("good", "Close", text) if d.close else ("bad", "Not certified", text)


def arithmetic_verdict(study: Study) -> Verdict:
    """The certified gap between the ELBO and a lower bound that allows for every rounding error."""
    facts = study.facts
    gap = float(facts.allowance)
    text = (
        f"The evidence lower bound (ELBO) of this fit is {with_decimals(facts.elbo, 4)}. Allowing for every rounding "
        f"error along the way, it is certified to within {gap:.1e} nats"
        + (": the number is right to the last digit shown." if gap < 5e-5 else ".")
    )
    loss = float(facts.elbo - study.model.objective_)
    if abs(loss) > 1e-6:
        text += f" The bound that was maximised ({facts.bound}) lies {loss:.2g} nats below the exact ELBO."
    return ("good", "Certified", text) if 0.0 <= gap < 1e-3 else ("bad", "With a gap", text)


def search_verdict(study: Study) -> Verdict:
    facts = study.facts
    if not facts.converged:
        return "bad", "No", f"The search did not finish: {facts.status}. Fit again with a larger max_iter."
    steps = "iteration" if facts.iterations == 1 else "iterations"
    text = f"The search finished after {facts.iterations:,} {steps}: further steps would not change the answer."
    return "good", "Yes", text
