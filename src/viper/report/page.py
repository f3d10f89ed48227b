"""The page: the sections, put into the template with style, script and data."""

import datetime
import json
from html import escape
from importlib.resources import files
from string import Template

from viper.data.storage import viper_version
from viper.report.row_section import Rows
from viper.report.sections import drivers, effects, fitted, performance, subtitle, summary, trust, where
from viper.report.study import Study


def render(study: Study) -> str:
    """The whole page as text."""
    rows = Rows(study)
    sections = [
        summary(study),
        performance(study),
        drivers(study),
        effects(study),
        rows.section(),
        where(study),
        trust(study),
        fitted(study),
    ]
    return Template(resource("page.html")).substitute(
        title=escape(f"Probability of {study.positive}"),
        subtitle=escape(subtitle(study)),
        sections="\n".join(section for section in sections if section),
        footer=escape(footer(study)),
        style=resource("page.css"),
        script=resource("page.js"),
        # so that no "</script>" or "<!--" in it can end the element early
        data=json.dumps(rows.payload()).replace("<", "\\u003c"),
    )


def resource(name: str) -> str:
    return files("viper.report").joinpath(name).read_text(encoding="utf-8")


def footer(study: Study) -> str:
    version = viper_version()
    author = "viper" if version == "unknown" else f"viper {version}"
    return (
        f"Written by {author} on {datetime.date.today():%d %B %Y}. This page holds everything it shows and loads "
        f"nothing from the network. An interval of {study.level_name} contains the probability with {study.level_name} "
        "certainty, given the model and its prior. Odds are p / (1 − p): even chances are odds of one."
    )
