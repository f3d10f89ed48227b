"""The page: a template filled with the sections, the style sheet, the script and its data."""

import datetime
import json
from html import escape
from importlib.resources import files
from string import Template

from viper.data.model_file import viper_version
from viper.report import sections
from viper.report.row_section import RowSection
from viper.report.study import Study


def render(study: Study) -> str:
    rows = RowSection(study)
    parts = [
        sections.summary_section(study),
        sections.performance_section(study),
        sections.drivers_section(study),
        sections.effects_section(study),
        rows.markup(),
        sections.map_section(study),
        sections.trust_section(study),
        sections.fit_section(study),
    ]
    return Template(resource("page.html")).substitute(
        title=escape(f"Probability of {study.positive}"),
        subtitle=escape(sections.subtitle(study)),
        sections="\n".join(filter(None, parts)),
        footer=escape(footer(study)),
        style=resource("page.css"),
        script=resource("page.js"),
        # escaped so that no "</script>" or "<!--" in the data ends the element early
        data=json.dumps(rows.payload()).replace("<", "\\u003c"),
    )


def resource(name: str) -> str:
    return files("viper.report").joinpath(name).read_text(encoding="utf-8")


def footer(study: Study) -> str:
    version = viper_version()
    author = "viper" if version == "unknown" else f"viper {version}"
    return (
        f"Written by {author} on {datetime.date.today():%d %B %Y}. This page is self-contained and loads nothing from "
        f"the network. A {study.level_name} interval contains the probability with {study.level_name} certainty, given "
        "the model and its prior. Odds are p / (1 − p): even chances are odds of one."
    )
