"""Can this be trusted? Three questions, each with its own verdict, and the worst of them as the headline."""

import math
from typing import NamedTuple

from viper.report.study import Study
from viper.report.words import drift_in_words, listed_in_words, percent, with_decimals

CLEAR = 2.0  # standard errors from zero at which a gain in the log score is clear
MOST_DRIFTED = 4  # drifted columns that a sentence names
LEAST_EFFECTIVE = 0.5  # share of effective draws above which a posterior with a large k̂ is not far off
LEAST_GAP = 1e-3  # nats; with a smaller gap, the certified bound counts as the ELBO itself
SEVERITY = {"good": 0, "open": 1, "fair": 2, "bad": 3}
HEADLINES = {
    "good": "Its numbers can be trusted for rows like these.",
    "open": "Its numbers are not fully tested.",
    "fair": "Use its numbers with care.",
    "bad": "Do not trust its numbers.",
}
DOUBTS = {
    ("Is the posterior right?", "open"): "whether its intervals have the right width was not measured",
    ("Is the posterior right?", "fair"): "its intervals may be a little too narrow or too wide",
    ("Is the posterior right?", "bad"): "its intervals may be wrong",
    ("Is the arithmetic right?", "bad"): "its arithmetic is not certified",
}


class Verdict(NamedTuple):
    """An answer: its kind, which is good, open (not known), fair or bad; a word or two; and an explanation."""

    kind: str
    word: str
    text: str


def verdicts(study: Study) -> dict[str, Verdict]:
    """The three questions and their answers."""
    return {
        "Does it predict?": prediction_verdict(study),
        "Is the posterior right?": posterior_verdict(study),
        "Is the arithmetic right?": arithmetic_verdict(study),
    }


def overall_verdict(study: Study) -> Verdict:
    """The worst of the three answers, as a headline with its reason."""
    answers = verdicts(study)
    question = max(answers, key=lambda name: SEVERITY[answers[name].kind])
    worst = answers[question]
    if worst.kind == "good":
        text = "It beats the average, its posterior is close to the exact one, and its arithmetic is certified."
    elif question != "Does it predict?":
        good = "It beats the average. But " if answers["Does it predict?"].kind == "good" else ""
        doubt = DOUBTS[question, worst.kind]
        text = f"{good}{doubt if good else doubt.capitalize()}: see “Can this be trusted?” below."
    else:
        text = worst.text
    headline = HEADLINES[worst.kind]
    if worst.kind == "bad" and question == "Does it predict?":
        headline = "Do not trust its numbers for rows like these."
    return Verdict(worst.kind, headline, text)


# --- does it predict? ---


def prediction_verdict(study: Study) -> Verdict:
    if study.from_training:
        return recorded_verdict(study)
    if study.scores.log_skill is None:
        only = study.predicate("have", int(study.label[0]))
        return Verdict("open", "Not known", f"All rows {only}, so they cannot show how well it tells the two apart.")
    gain, error = study.gain
    base = f"always predicting their average, {percent(study.base_rate)}"
    if gain < -CLEAR * error:
        return Verdict("bad", "No", f"On these rows it predicts worse than {base}.{drift_remark(study)}")
    if gain < CLEAR * error:
        return Verdict("bad", "Not shown", f"On these rows it is not clearly better than {base}.{drift_remark(study)}")
    skill = f"On these rows it is {percent(study.scores.log_skill)} better than {base}."
    found = study.calibration_verdict
    text = f"{skill} {found.sentence}{drift_remark(study)}"
    if found.verdict == "poor" or drift_remark(study):
        return Verdict("fair", "With care", text)
    return Verdict("open", "Probably", text) if found.verdict == "unclear" else Verdict("good", "Yes", text)


def drift_remark(study: Study) -> str:
    """A sentence to append about the columns in which these rows differ from those of the fit, if there are any."""
    found = study.drifted
    if not found:
        return ""
    names = listed_in_words([d.column for d in found[:MOST_DRIFTED]])
    more = f", and {len(found) - MOST_DRIFTED:,} more" if len(found) > MOST_DRIFTED else ""
    which = f"column {names} differs" if len(found) == 1 else f"columns {names}{more} differ"
    first = f" ({drift_in_words(found[0])})" if len(found) == 1 else ""
    return f" These rows are unlike those of the fit: {which}{first}."


def recorded_verdict(study: Study) -> Verdict:
    """For rows of the fit: what cross-validation, or rows held out then, showed."""
    flattered = "These are the rows that it learned from, so they cannot show how well it predicts others."
    found = study.cross_validated
    if found is None:
        return Verdict("open", "Not tested", f"{flattered} Make the report from rows that it has not seen.")
    test = f"{flattered} In {found.how}, on rows that it had not seen, its predictions were"
    base = f"always predicting the average, {percent(found.base_rate)}"
    if found.log_skill <= 0.0:
        return Verdict("bad", "No", f"{test} worse than {base}.")
    text = f"{test} {percent(found.log_skill)} better than {base}."
    calibration = study.calibration_verdict
    if calibration.verdict == "poor":
        return Verdict("fair", "With care", f"{text} {calibration.sentence}")
    if calibration.verdict == "unclear":
        return Verdict("open", "Probably", f"{text} {calibration.sentence}")
    return Verdict("good", "Yes", text)


# --- is the posterior right? ---


def posterior_verdict(study: Study) -> Verdict:
    """Whether the search ended, and whether the Gaussian that it found is close to the exact posterior."""
    facts = study.facts
    if not facts.converged:
        text = f"The search for it did not finish: {facts.status}. The model should be fitted again, with more steps."
        return Verdict("bad", "Not found", text)
    d = study.diagnosis
    if d is None:
        return Verdict("open", "Not measured", study.no_diagnosis)
    worth = f"{d.draws:,} weighted draws are worth {d.effective_sample_size:,.0f} independent ones"
    numbers = (
        f"k̂, which measures the distance between the two, is {d.k_hat:.2f} (close below 0.5, usable below "
        f"{d.threshold:.2f}); {worth}."
    )
    if d.close and d.k_hat >= 0.5:
        far = "" if d.reliable else " Only the far ends of intervals beyond 95 % may differ."
        numbers = (
            f"{worth}, so hardly any draw had to be weighted (k̂ = {d.k_hat:.2f}, which is mostly chance then).{far}"
        )
    if not math.isfinite(d.k_hat):
        numbers = f"All of {d.draws:,} draws have the same weight: the two are equal."
    if d.residual_cost is not None:
        cost = with_decimals(d.residual_cost, 3)
        numbers += f" The variance that its inducing points leave unexplained costs {cost} nats of the ELBO."
    start = "Its intervals come from an approximation, a Gaussian, of the exact posterior."
    if d.close:
        return Verdict("good", "Close", f"{start} The two are close: the intervals can be used as they are. {numbers}")
    if d.reliable:
        differ = "The two differ a little, so the intervals may be a little too narrow or too wide."
        return Verdict("fair", "Usable", f"{start} {differ} {numbers}")
    text = (
        f"{start} The two may differ so much that the intervals are wrong. The person who fitted the model can try a "
        f"tighter prior, or compare with the exact posterior by sampling. {numbers}"
    )
    near = d.effective_sample_size > LEAST_EFFECTIVE * d.draws
    return Verdict("fair" if near else "bad", "Not certified", text)


# --- is the arithmetic right? ---


def arithmetic_verdict(study: Study) -> Verdict:
    """The certified gap between the ELBO and a lower bound that allows for every rounding error."""
    facts = study.facts
    gap = float(facts.allowance)
    text = (
        f"The score that the fit maximised (the evidence lower bound, ELBO) is {with_decimals(facts.elbo, 4)} nats, "
        f"units of information. Allowing for every rounding error along the way, it is certified to within {gap:.1e} "
        + ("nats: right to the last digit shown." if gap < 5e-5 else "nats.")
    )
    loss = float(facts.elbo - study.model.objective_)
    if abs(loss) > 1e-6:
        text += f" The fit maximised a bound on it ({facts.bound}), which lies {loss:.2g} nats lower."
    return Verdict("good", "Certified", text) if 0.0 <= gap < LEAST_GAP else Verdict("bad", "With a gap", text)
