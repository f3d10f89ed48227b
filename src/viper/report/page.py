"""The page: a template filled with the sections, the style sheet, the script and its data."""

import base64
import datetime
import hashlib
import json
import re
from collections.abc import Callable
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from viper.data.model_file import viper_version
from viper.report import sections
from viper.report.average_section import average_section
from viper.report.card import card_section, drift_section
from viper.report.missing import missing_section
from viper.report.row_section import RowSection
from viper.report.study import Study
from viper.report.svg import element


class ReportPage:
    """A study as a page: what it says, whether it predicts, what to do, why, which rows, and whether to trust it."""

    def __init__(self, study: Study) -> None:
        self.study, self.title = study, f"Probability of {study.positive}"
        self.rows = RowSection(study) if study.show_rows else None
        self.decisions = sections.DecisionSection(study) if 0 < study.base_rate < 1 else None
        self.writers: list[Callable[[Any], str]] = [
            sections.summary_section,
            sections.performance_section,
            sections.groups_section,
            lambda _: "" if self.decisions is None else self.decisions.markup(),
            average_section,
            sections.drivers_section,
            sections.effects_of_groups_section,
            sections.terms_section,
            sections.effects_section,
            lambda study: sections.certainty_section(study, self.rows),
            sections.map_section,
            missing_section,
            drift_section,
            sections.checks_section,
            sections.trust_section,
            card_section,
        ]

    def text(self, step: Callable[[], None] = lambda: None) -> str:
        """The whole page; `step` is called after each section."""
        body = "\n".join(filter(None, (self._written(writer, step) for writer in self.writers)))
        style, script = resource("page.css"), resource("page.js")
        return Template(resource("page.html")).substitute(
            title=escape(self.title),
            subtitle=escape(sections.subtitle(self.study)),
            policy=content_policy(style, script),
            contents=table_of_contents(body),
            sections=body,
            footer=escape(footer(self.study)),
            style=style,
            script=script,
            # escaped so that no "</script>" or "<!--" in the data ends the element early
            data=json.dumps(self.payload()).replace("<", "\\u003c"),
        )

    def _written(self, writer: Callable[[Any], str], step: Callable[[], None]) -> str:
        markup = writer(self.study)
        step()
        return markup

    def payload(self) -> dict[str, Any]:
        """What the script reads: single rows, if they may be shown, and what happens at each threshold."""
        found = {} if self.rows is None else self.rows.payload()
        return found if self.decisions is None else {**found, "decisions": self.decisions.payload()}


def content_policy(style: str, script: str) -> str:
    """A policy by which nothing is loaded, and only this style and this script, known by their digests, apply."""
    known = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (style, script)
    ]
    return (
        f"default-src 'none'; style-src {known[0]}; script-src {known[1]}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def table_of_contents(body: str) -> str:
    """Links to all sections, by their headings."""
    headings = re.findall(r'<h2 id="([^"]*)-title">(.*?)</h2>', body)
    links = "".join(element("li", element("a", heading, href=f"#{id_}")) for id_, heading in headings)
    return element("nav", element("ol", links), aria_label="Contents", class_="contents")


def resource(name: str) -> str:
    return files("viper.report").joinpath(name).read_text(encoding="utf-8")


def footer(study: Study) -> str:
    version = viper_version()
    author = "viper" if version == "unknown" else f"viper {version}"
    return (
        f"Written by {author} on {datetime.date.today():%d %B %Y}. This page is complete in one file and loads nothing "
        f"from the network. A {study.level_name} interval contains the probability with {study.level_name} certainty, "
        "if the model and its assumptions are right."
    )
