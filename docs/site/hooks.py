"""What happens to the pages while the site is built: formulas become MathML, and the import diagram is drawn."""

import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

sys.path.insert(0, str(Path(__file__).parent))
import diagram  # noqa: E402

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Formulas as MathML, so that a page needs no script and no font to show them."""
    return FORMULA.sub(lambda found: mathml(found[3], display=found[2] == "["), html)


def mathml(tex: str, display: bool) -> str:
    formula = convert(unescape(tex).strip(), display="block" if display else "inline")
    return f'<div class="formula">{formula}</div>' if display else formula


def on_page_markdown(markdown: str, **_: Any) -> str:
    return (
        markdown.replace("<!-- import diagram -->", diagram.svg())
        if "<!-- import diagram -->" in markdown
        else markdown
    )
