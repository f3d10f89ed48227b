"""Numbers, findings and verdicts in plain words. Every function returns plain text, which the page escapes."""

import math
from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.special

from viper.formula.columns import date_text, number_text

if TYPE_CHECKING:
    import pandas

    from viper.formula.drift import ColumnDrift
    from viper.report.study import Study
    from viper.report.views import AverageEffect, Effect, Outlyingness

THIN, JOIN = "\N{NARROW NO-BREAK SPACE}", "\N{WORD JOINER}"
ENOUGH = 5  # rows that a group must have to serve as an example
MOST_ENTANGLED = 4  # columns that a sentence about interactions names
MOST_LEGS = 3  # stretches of a curve between turns that are described one by one
MOST_FILLED = 4  # columns with filled-in values that a sentence names
LEAST_PERCENT = 0.01  # percentages nearer to 0 or 100 are written <0.01 % and >99.99 %
NEARLY_ALL = 0.985  # width of an interval that says nothing: points round to 99 or 100
NEVER = 1e-12  # what a probability that underflows to 0 counts as in words


def percent(p: float) -> str:
    """68 %, 3.4 %, 0.034 %, 99.7 %: two digits of a small probability, one of the complement of a large one."""
    return f"{percent_digits(p)}{THIN}%"


def percent_digits(p: float, more: int = 0) -> str:
    """A percentage without its sign, never rounded to 0 or 100 unless it is; `more` digits than `percent` shows."""
    x = 100.0 * float(p)
    if 0.0 < x < LEAST_PERCENT:
        return f"<{LEAST_PERCENT:g}"
    if 100.0 - LEAST_PERCENT < x < 100.0:
        return f">{100.0 - LEAST_PERCENT:g}"
    if x <= 50.0:
        return f"{x:.{2 + more}g}"
    shown = round(100.0 - x, max(0, -math.floor(math.log10(100.0 - x))) + more) if x < 100.0 else 0.0
    return f"{100.0 - shown:.6g}"


def percent_range(low: float, high: float) -> str:
    """61–75 %, with another digit where both ends would round to the same number. No line breaks at the dash."""
    ends = [percent_digits(low), percent_digits(high)]
    if ends[0] == ends[1] and low < high and ends[0][0] not in "<>":
        ends = [percent_digits(low, 1), percent_digits(high, 1)]
    if ends[0] == ends[1]:
        return f"{ends[0]}{THIN}%"
    dash = f"{JOIN}–{JOIN}" if ends[1][0] != ">" else " to "
    return f"{ends[0]}{dash}{ends[1]}{THIN}%"


def chance(p: float) -> str:
    """A probability that a model gives: `percent`, but never 0 % or 100 %, which no model can know."""
    return percent(min(max(float(p), NEVER), 1.0 - NEVER))


def chance_range(low: float, high: float) -> str:
    """A credible interval of a probability: `percent_range`, but never from 0 % or to 100 %."""
    return percent_range(*(min(max(float(p), NEVER), 1.0 - NEVER) for p in (low, high)))


def about_percent(p: float) -> str:
    """'about 70 %', or 'less than 0.01 %' and 'more than 99.99 %' near the ends."""
    digits = percent_digits(p)
    word = {"<": "less than ", ">": "more than "}.get(digits[0], "about ")
    return f"{word}{digits.lstrip('<>')}{THIN}%"


def points(width: float) -> str:
    """A difference of probabilities in percentage points."""
    digits = readable_number(float(f"{100.0 * float(width):.2g}"))
    return "one percentage point" if digits == "1" else f"{digits} percentage points"


def signed_points(change: float, digits: int) -> str:
    """+4.8, −43.2 or 0.0: a change of a probability in percentage points."""
    text = with_decimals(100.0 * float(change), digits)
    return text.removeprefix("−") if not text.strip("−0.") else text if change < 0 else f"+{text}"


def point_digits(width: float) -> int:
    """Decimals of percentage points that an interval of this width deserves: 0 from ten points on, 1 from one."""
    return min(max(math.ceil(-math.log10(10.0 * width)), 0), 6) if width > 0 else 1


def readable_number(x: Any) -> str:
    """Three significant digits of a number; other values unchanged."""
    if isinstance(x, bool | np.bool_) or not isinstance(x, int | float | np.integer | np.floating):
        return str(x)
    return number_text(float(x)).replace("-", "−")


def column_value(value: Any, dated: bool) -> str:
    """A value of a column: a date where the column holds days since 1970, otherwise as `readable_number` writes it."""
    return date_text(float(value)) if dated else readable_number(value)


def with_decimals(x: float, digits: int) -> str:
    return f"{x:,.{digits}f}".replace("-", "−")


def factor(x: float) -> str:
    """A factor with two or three significant digits: 0.043, 2.45, 12.3, 150."""
    if not 1e-4 < x < 1e6:
        return f"{x:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 0.1 else f"{x:.2g}"


# --- findings ---


def ranking_sentence(study: "Study") -> str:
    if study.scores.auc is None:
        return f"All rows {study.predicate('have', int(study.label[0]))}, so the model's ranking cannot be judged."
    found, where = study.honest_scores
    if found.auc is None:
        return "The model's ranking of rows that it had not seen was not recorded."
    opening = f"{where[0].upper()}{where[1:]}, given" if where else "Given"
    return (
        f"{opening} one row that {study.predicate('has')} and one that {study.predicate('has', 0)}, the model gives "
        f"the higher probability to the right one {100 * found.auc:.1f} times in 100; a coin would, 50 times."
    )


def skill_sentence(study: "Study") -> str | None:
    """The score against that of predicting the base rate for every row."""
    found, where = study.honest_scores
    skill = found.log_skill
    if skill is None or skill <= 0.0:
        return None
    return (
        f"Compared with always predicting the average, {percent(study.base_rate)}, its skill is {percent(skill)}"
        f"{where and f' {where}'}: 0{THIN}% would be no better, and 100{THIN}% perfect."
    )


def recall_sentence(study: "Study", share: float = 0.95) -> str:
    """What it costs to find most of the positive rows."""
    false, true = study.roc
    cost = float(false[np.argmax(true >= share)])
    return (
        f"To find {percent(share)} of the rows that {study.predicate('had')}, {percent(cost)} of those that "
        f"{study.predicate('had', 0)} would be flagged by mistake."
    )


def group_sentence(table: "pandas.DataFrame", were: str) -> str:
    """One group as an example: the largest that is not nearly certain, or the one with the highest prediction."""
    open_ = (table["predicted"] > 0.1) & (table["predicted"] < 0.9) & (table["rows"] >= ENOUGH)
    k = int(np.argmax(np.where(open_, table["rows"], 0) if open_.any() else table["predicted"]))
    count = "the row" if table["rows"][k] == 1 else f"the {table['rows'][k]:,} rows"
    return (
        f"Of {count} to which the model gave {about_percent(table['predicted'][k])}, "
        f"{percent(table['observed'][k])} {were} "
        f"(allowing for chance, {percent_range(table['lower'][k], table['upper'][k])})."
    )


def precision_sentence(study: "Study") -> str:
    """How many are right among the rows ranked highest, as many as there are positive ones."""
    positive = int(study.label.sum())
    top = np.argsort(-study.predictions.latent, kind="stable")[:positive]
    hits = int(study.label[top].sum())
    rows = "row" if positive == 1 else "rows"
    return (
        f"{positive:,} {rows} {study.predicate('had')}. Of the {positive:,} {rows} to which the model gave the highest "
        f"probabilities, {percent(hits / positive)} did; of all rows, "
        f"{percent(study.base_rate)} (the dashed line)."
    )


def width_sentence(study: "Study") -> str:
    half, tenth = np.quantile(study.predictions.width, [0.5, 0.9])
    if 100.0 * tenth < LEAST_PERCENT:
        return f"Nine in ten {study.level_name} intervals are narrower than {points(LEAST_PERCENT / 100)}."
    half = max(half, LEAST_PERCENT / 100)
    if half > NEARLY_ALL:
        return (
            f"Most {study.level_name} intervals reach from nearly 0{THIN}% to nearly 100{THIN}%: about most rows the "
            "model knows hardly anything."
        )
    start = f"Half of the {study.level_name} intervals are narrower than {points(half)}"
    if tenth > NEARLY_ALL:
        return f"{start}; one in ten reaches from nearly 0{THIN}% to nearly 100{THIN}%."
    if points(half) == points(tenth):
        return f"{start}, and hardly any is much wider."
    return f"{start}; one in ten is wider than {points(tenth)}."


def filled_sentence(study: "Study") -> str | None:
    """How many values were missing and filled in, the worst columns first."""
    if not study.filled:
        return None
    encoding = study.model.formula_
    worst = sorted(study.filled.items(), key=lambda pair: -pair[1])
    drawn = encoding.missing == "multiple"
    values = {name: f"the mean ({column_value(mean, name in study.dates)})" for name, mean in encoding.means.items()}
    values |= {name: f"“{level}”" for name, level in encoding.common.items()}
    parts = [
        f"{percent(share)} of {name}{'' if drawn else f' with {values[name]}'}" for name, share in worst[:MOST_FILLED]
    ]
    more = len(worst) - MOST_FILLED
    also = f", and some of {more} other column{'s' * (more > 1)}" if more > 0 else ""
    if drawn:
        where = f"{listed_in_words(parts)}{also}"
        return f"Missing values were drawn from the other columns: {where}. All intervals allow for this."
    return f"Missing values were filled in: {listed_in_words(parts)}{also}. The intervals do not allow for this."


def drift_in_words(found: "ColumnDrift") -> str:
    """What about a column differs from the rows of the fit."""
    number, parts = found.shift is not None, []
    if found.outside > 0.0:
        where = "far outside the range of the fit" if number else "not among the levels of the fit"
        parts.append(f"{percent(found.outside)} of its values are {where}")
    if found.shift is not None and abs(found.shift) >= 0.1:
        way = "higher" if found.shift > 0 else "lower"
        parts.append(f"its mean is {readable_number(float(f'{abs(found.shift):.2g}'))} standard deviations {way}")
    if abs(found.missing - found.missing_before) >= 0.02:
        parts.append(f"{percent(found.missing)} of it is missing instead of {percent(found.missing_before)}")
    return listed_in_words(parts) if parts else "its values are spread differently"


def listed_in_words(parts: list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def driver_sentence(study: "Study") -> str | None:
    """The largest clear change of the average probability."""
    clear = [e for e in study.average_effects.effects if e.clear]
    if clear:
        return average_sentence(clear[0])
    if not study.average_effects.effects:
        return None
    return "No change of a single column clearly raises or lowers the average probability."


def average_sentence(e: "AverageEffect") -> str:
    """What would happen if one column changed in every row."""
    digits = point_digits(e.upper - e.lower)
    size, low, high = (f"{100.0 * x:.{digits}f}" for x in (abs(e.mean), *sorted((abs(e.lower), abs(e.upper)))))
    way, unit = "higher" if e.mean > 0 else "lower", "percentage point" if float(size) == 1.0 else "percentage points"
    return (
        f"If {e.name} were {e.change} in every row, the average probability would be {size} {unit} {way} "
        f"({low} to {high}): {chance(e.after)} instead of {chance(e.before)}."
    )


def entangled_sentence(columns: list[str]) -> str | None:
    """Why the coefficients of these columns do not describe their effects."""
    if not columns:
        return None
    some = columns[:MOST_ENTANGLED]
    more = f"{len(columns) - MOST_ENTANGLED} more columns"
    named = listed_in_words(some if len(columns) == len(some) else [*some, more])
    verb, they = ("appears", "it does") if len(columns) == 1 else ("appear", "they do")
    return (
        f"{named} {verb} in more than one line (× marks columns that act together), so no single line tells what "
        f"{they}: a line holds only where the columns it is joined with are zero or at their first level. For what a "
        "column does in all, see “What changes the probability, on average” above and “One column at a time” below."
    )


def effect_sentence(e: "Effect") -> str:
    """A curve from turn to turn; or the categories with the highest and the lowest probability."""
    p = e.predictions.probability
    values, at = [column_value(value, e.dated) for value in e.values], "on" if e.dated else "at"
    said = [f"{chance(p[k])} {at} {values[k]}" for k in range(len(p))]
    top, least = int(np.argmax(p)), int(np.argmin(p))
    if not e.curve:
        interval = chance_range(e.predictions.lower[top], e.predictions.upper[top])
        return (
            f"The probability is highest for {values[top]}, {chance(p[top])} ({interval}), and "
            f"lowest for {values[least]}, {chance(p[least])}."
        )
    if chance(p[top]) == chance(p[least]):
        return f"The probability hardly changes: it is {chance(p[top])} everywhere."
    turns = e.turns
    verbs = ["rises" if p[b] > p[a] else "falls" for a, b in pairwise(turns)]
    if len(verbs) > MOST_LEGS:
        return (
            f"The probability rises and falls several times: it is highest, {said[top]}, and lowest, {said[least]}. It "
            f"begins with {said[0]} and ends with {said[-1]}."
        )
    legs = [f"{verb} to {said[k]}" for verb, k in zip(verbs, turns[1:], strict=True)]
    legs[0] = f"{verbs[0]} from {said[0]} to {said[turns[1]]}"
    return f"The probability {', then '.join(legs)}."


def row_sentence(study: "Study", k: int) -> str:
    """The prediction for one row."""
    seen = study.predictions
    return (
        f"The model gives {chance(seen.probability[k])}; the {study.level_name} interval is "
        f"{chance_range(seen.lower[k], seen.upper[k])}."
    )


def unusual_sentence(found: "Outlyingness", k: int, dates: Collection[str] = ()) -> str:
    parts = []
    for name, value, z in found.extremes(k):
        if abs(z) >= 2.0:
            ways = ("later", "earlier") if name in dates else ("higher", "lower")
            distance = f"{abs(z):.1f} standard deviations {ways[z < 0]} than the average"
            parts.append(f"{name} is {column_value(value, name in dates)}, {distance}")
    if len(found.names) > 1 and (rarity := found.rarity(k)) >= 0.9:
        parts.append(f"{chance(rarity)} of the rows have a more usual combination of values")
    return f"Unusual: {'; '.join(parts)}." if parts else "None of its values is unusual."


def row_note(study: "Study", found: "Outlyingness", k: int) -> str:
    """The outcome of a row, how surely its probability is above or below the average, and what is unusual about it."""
    seen, base = study.predictions, study.base_rate
    outcome = f"Outcome: {study.class_names[int(study.label[k])]}."
    if not 0.0 < base < 1.0:
        return f"{outcome} {unusual_sentence(found, k, study.dates)}"
    distance = float(seen.latent[k]) - float(scipy.special.logit(base))
    sure = float(scipy.special.ndtr(abs(distance) / max(float(seen.latent_sd[k]), 1e-300)))
    side = "above" if distance > 0 else "below"
    return (
        f"{outcome} The model is {chance(sure)} sure that the probability is {side} the average of all rows, "
        f"{percent(base)}. {unusual_sentence(found, k, study.dates)}"
    )


def term_sentence(effect: Any) -> str:
    """The ends of an effect on the log-odds, and whether it is clear."""
    low, high = int(np.argmin(effect.mean)), int(np.argmax(effect.mean))
    if len(effect.columns) == 2:
        reach = float(np.abs(effect.mean).max())
        sure = bool(((effect.lower > 0) | (effect.upper < 0)).any())
        return f"Up to {reach:.2f} either way{'' if sure else '; it may be nothing'}."
    (values,) = effect.values
    sure = bool(effect.lower.max() > effect.upper.min())
    ends = [f"{effect.mean[k]:+.2f} at {readable_number(values[k])}".replace("-", "−") for k in (low, high)]
    return f"From {ends[0]} to {ends[1]}{'' if sure else '; it may be nothing'}."
