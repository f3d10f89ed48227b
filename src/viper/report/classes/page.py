"""The page of a model with more than two classes: its scores, which classes it confuses, and its calibration."""

import math
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from viper.report import charts, trust
from viper.report.card import card_section, drift_section
from viper.report.metrics import Scores, by_class, calibration, class_scores, confusion_table, judge_calibration
from viper.report.missing import missing_section
from viper.report.page import ReportPage
from viper.report.sections import caution
from viper.report.study import MOST_COEFFICIENTS, Coefficient, Study, read_study
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
from viper.report.words import (
    THIN,
    chance,
    factor,
    filled_sentence,
    group_sentence,
    listed_in_words,
    percent,
    readable_number,
)

if TYPE_CHECKING:
    import pandas

    from viper.report.trust import Verdict

MOST_DRAWN = 12  # classes whose calibration is drawn, the commonest first


@dataclass(frozen=True)
class ClassStudy(Study):
    """A model of K classes, and labelled rows; `label` is the number of the class."""

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(f"{self.target} = {label}" if self.bare else str(label) for label in self.model.classes_)

    @property
    def predicted(self) -> str:
        return f"the probabilities of {listed_in_words(list(self.class_names))}"

    @cached_property
    def probability(self) -> np.ndarray:
        return self.model.predict_proba(self.X)

    @cached_property
    def scores(self) -> Scores:
        return class_scores(self.label, self.probability, self.model.predict_interval(self.X, self.level))

    @cached_property
    def each_class(self) -> "pandas.DataFrame":
        return by_class(self.label, self.probability, self.class_names)

    @cached_property
    def cross_validated(self) -> Any:
        """Scores that `viper fit` found on held-out rows, if any."""
        found = self.record.get("scores")
        return SimpleNamespace(**found) if isinstance(found, dict) and "log_skill" in found else None

    def one_class(self, k: int) -> Any:
        """The class against all others, as charts read it."""
        own, p = self.label == k, self.probability[:, k]
        name = self.class_names[k]
        return SimpleNamespace(
            calibration=calibration(own, p, level=self.level),
            verdict=judge_calibration(own, p),
            predicate=lambda have: f"{have} {name}" if self.bare else f"{have} the outcome “{name}”",
        )


class ClassPage(ReportPage):
    """A study of K classes as a page."""

    def __init__(self, study: ClassStudy) -> None:
        self.study, self.title = study, f"Probabilities of {study.target}"
        self.rows, self.decisions = None, None
        self.writers = [
            classes_summary_section,
            confusion_section,
            class_calibration_section,
            class_coefficients_section,
            missing_section,
            drift_section,
            class_trust_section,
            card_section,
        ]


def any_study(model: Any, *given: Any) -> Study:
    """A study of a model of any number of classes; the rest is as in `read_study`."""
    read: Any = partial(read_study, kind=ClassStudy if len(getattr(model, "classes_", ())) > 2 else Study)
    found: Study = read(model, *given)
    return found


def any_page(study: Study) -> ReportPage:
    return ClassPage(study) if isinstance(study, ClassStudy) else ReportPage(study)


def classes_summary_section(study: ClassStudy) -> str:
    honest = study.cross_validated if study.from_training else None
    found, where = (study.scores, "") if honest is None else (honest, f", in {honest.how}")
    skill = found.log_skill
    tiles = {
        "rows": f"{len(study.label):,}",
        "classes": f"{len(study.class_names)}",
        f"accuracy{where}: how often the most probable class is the true one": percent(found.accuracy),
        f"accuracy of always saying {study.class_names[int(np.bincount(study.label).argmax())]}": percent(
            float(study.scores.base_accuracy or 0.0)
        ),
        f"AUC{where}: how often a pair is ranked correctly, on average over classes; 0.5 is chance": (
            "–" if found.auc is None else f"{found.auc:.3f}"
        ),
        f"skill{where}: 0{THIN}% is no better than predicting the shares of the classes, 100{THIN}% is perfect": (
            "–" if skill is None else f"below 0{THIN}%" if skill < 0.0 else percent(skill)
        ),
        f"Brier score{where}: squared error of all probabilities of a row, 0 is perfect": f"{found.brier:#.3g}",
    }
    verdict = class_verdict(study)
    headline = element("strong", escape(verdict[1])) + " " + escape(verdict[2])
    items = "".join(element("li", escape(text)) for text in (hardest_pair(study), filled_sentence(study)) if text)
    return section(
        "summary",
        "In short",
        element("p", headline, class_=f"verdict {verdict[0]}"),
        definition_list(tiles, "tiles"),
        element("ul", items),
        paragraph(caution(study), "note"),
    )


def class_verdict(study: ClassStudy) -> tuple[str, str, str]:
    """Kind, word and sentence: whether it predicts better than the shares of the classes."""
    found = study.cross_validated if study.from_training and study.cross_validated is not None else study.scores
    if found.log_skill is None or found.log_skill <= 0.0:
        return "bad", "Do not use it.", "It predicts no better than the shares of the classes."
    drifted = f" {len(study.drifted)} columns differ from the rows of the fit." if study.drifted else ""
    loss = f"It avoids {percent(found.log_skill)} of the loss of predicting the shares of the classes."
    return ("fair", "Use it with care.", loss + drifted) if drifted else ("good", "It predicts.", loss)


def hardest_pair(study: ClassStudy) -> str | None:
    """The two classes that are confused most often, in a sentence."""
    table = confusion_table(study.label, study.probability).to_numpy().copy()
    np.fill_diagonal(table, 0)
    both = table + table.T
    if not both.any():
        return "No class is mistaken for another."
    j, k = np.unravel_index(both.argmax(), both.shape)
    names = study.class_names
    return f"Most often confused are {names[min(j, k)]} and {names[max(j, k)]}: {int(both[j, k]):,} rows."


def confusion_section(study: ClassStudy) -> str:
    table = confusion_table(study.label, study.probability, study.class_names)
    head = [column_heading("True class")]
    head += [column_heading(escape(f"most probable: {name}"), "number") for name in table.columns]
    counts = [
        [row_heading(escape(str(name))), *(table_cell(f"{n:,}", n) for n in row)]
        for name, row in zip(table.index, table.to_numpy().tolist(), strict=True)
    ]
    titles = {"share": "Share of rows", "predicted": "Mean probability", "recall": "Found", "precision": "Right"}
    heads = [sort_heading("Class"), *(sort_heading(title, "number") for title in titles.values())]
    heads.append(sort_heading("AUC against the others", "number"))
    shown = lambda x: "–" if math.isnan(x) else percent(x)  # noqa: E731
    rows = [
        [
            row_heading(escape(str(name))),
            *(table_cell(shown(row[column]), row[column]) for column in titles),
            table_cell("–" if math.isnan(row["auc"]) else f"{row['auc']:.3f}", row["auc"]),
        ]
        for name, row in study.each_class.iterrows()
    ]
    text = "Lines: the true class. Columns: the class that the model thinks most probable. On the diagonal it is right."
    note = (
        "Found: share of the rows of a class for which it is the most probable one. Right: share of the rows with this "
        "most probable class that belong to it."
    )
    return section(
        "confusion",
        "What is confused",
        paragraph(text),
        data_table("Rows by true and most probable class", head, counts),
        data_table("Each class against all others", heads, rows, "sortable"),
        paragraph(note, "note"),
    )


def class_calibration_section(study: ClassStudy) -> str:
    commonest = np.argsort(-np.bincount(study.label, minlength=len(study.class_names)), kind="stable")[:MOST_DRAWN]
    drawn = []
    for k in sorted(commonest.tolist()):
        one = study.one_class(k)
        sentence = f"{one.verdict.sentence} {group_sentence(one.calibration, one.predicate('had'))}"
        drawn.append(figure(study.class_names[k], sentence, charts.reliability_chart(one)))
    left = len(study.class_names) - len(drawn)
    more = f"{left:,} rarer classes are not drawn." if left else None
    text = "Predicted probability against observed share, for each class against all others."
    return section(
        "calibration", "Do its percentages come true?", paragraph(text), side_by_side(*drawn), paragraph(more, "note")
    )


def class_coefficients_section(study: ClassStudy) -> str:
    """Odds of each class against the commonest, or of higher levels, when one column changes."""
    if study.is_gp:
        return ""
    ordered = study.facts.ordered
    baseline = int(np.bincount(study.label, minlength=len(study.class_names)).argmax())
    found = class_coefficients(study, {} if ordered else {"baseline": study.model.classes_[baseline]})
    if not found:
        return ""
    shown = found[:MOST_COEFFICIENTS]
    forest = charts.Forest([c for _, c in shown])
    head = [
        sort_heading("Odds of" if ordered else "Class"),
        sort_heading("Column"),
        column_heading("Change"),
        column_heading(forest.axis(), "wide"),
        sort_heading("Odds are multiplied by", "number"),
        sort_heading("Sure of direction", "number"),
    ]
    rows = [
        [
            row_heading(escape(label)),
            table_cell(escape(c.name)),
            table_cell(c.unit),
            element("td", forest.line(c), class_="wide"),
            table_cell(factor(math.exp(c.mean)), c.mean),
            table_cell(chance(c.direction), c.direction),
        ]
        for label, c in shown
    ]
    odds = "higher levels, wherever the line is drawn," if ordered else f"a class against {study.class_names[baseline]}"
    text = (
        f"How the odds of {odds} change when one column changes as listed and "
        f"all others stay the same. Bars are {study.level_name} intervals; grey ones cross the line of no change."
    )
    more = f"These are the {len(shown)} surest of {len(found):,}." if len(found) > len(shown) else None
    caption = f"{'Coefficients' if ordered else 'Contrasts of classes'} with credible intervals"
    listing = data_table(caption, head, rows, "sortable coefficients")
    return section("coefficients", "The coefficients", paragraph(text), listing, paragraph(more, "note"))


def class_coefficients(study: ClassStudy, baseline: dict[str, Any]) -> list[tuple[str, Coefficient]]:
    """Each class and each coefficient of it, the surest first; levels in order share theirs."""
    table = study.model.summary(study.level, **baseline)
    if study.facts.ordered:  # without the thresholds
        table = table.iloc[: study.model.n_features_in_]
    found: list[tuple[str, Coefficient]] = []
    for key, row in table.iterrows():
        label, name = ("any higher level", key) if study.facts.ordered else key
        if name == "intercept":
            continue
        title, step, unit = study._changes.get(str(name), (str(name), 1.0, "+1"))
        mean, lower, upper = (step * float(row[part]) for part in ("mean", "lower", "upper"))
        found.append((str(label), Coefficient(title, unit, mean, lower, upper, float(row["p_direction"]))))
    return sorted(found, key=lambda pair: (-pair[1].direction, -abs(pair[1].mean)))


def class_trust_section(study: ClassStudy) -> str:
    """Whether the approximation and the arithmetic can be trusted."""
    found: dict[str, Verdict] = {
        "Is the posterior right?": trust.posterior_verdict(study),
        "Is the arithmetic right?": trust.arithmetic_verdict(study),
    }
    cards = ""
    for question, (kind, verdict, explanation) in found.items():
        content = element("h3", escape(question)) + paragraph(verdict, "mark") + paragraph(explanation)
        cards += element("div", content, class_=f"card {kind}")
    gain = f"Mean log score {readable_number(study.scores.log_score)} on these rows."
    return section("trust", "Can this be trusted?", element("div", cards, class_="cards"), paragraph(gain, "note"))
