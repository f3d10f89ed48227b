"""Changes to the pages while the site is built: formulas become MathML, and the import diagram is drawn."""

import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.utils import get_relative_url

sys.path.insert(0, str(Path(__file__).parent))
import commands
import diagram

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
OUTWARD = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")
MADE = re.compile(r"<!-- made: (\w+) ?(.*?) -->")
DIAGRAM = "<!-- made: diagram -->"
# the values of an option, {"full", "low-rank"} in a docstring; mkdocstrings shows them as names: full, low - rank
CHOICES = re.compile(r'<code>\(((?:<span title="[^"]*">\w+</span>(?:, | - )?)+)\)')
WORKER = "https://unpkg.com/iframe-worker/shim"  # the theme would fetch it, to search without a server

# Operators as TeX spaces them, where a browser's dictionary says otherwise.
TIGHT = re.compile(r'<mo(?: fence="false")?(?: stretchy="false")?>(&#x0002F;|&#x0007C;|&#x02016;)</mo>')
SIGN = re.compile(
    r"(<mo[^>]*>(?:&#x0003D;|&#x00028;|&#x0005B;|&#x02248;|&#x02264;|&#x02265;|,)</mo>|<mrow>)<mo>(&#x02212;)</mo>"
)
# a prime is already raised
PRIME = re.compile(
    r"<msup>(<mi[^>]*>[^<]*</mi>|<mrow>(?:<mi[^>]*>[^<]*</mi>)+</mrow>)<mi>(&#x0(?:2032|2033|2034|2057);)</mi></msup>"
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace <!-- made: kind name ... --> in a page by what it names, made from the repository."""
    markdown = OUTWARD.sub(lambda found: inward(found, Path(page.file.abs_src_path).parent), markdown)
    return MADE.sub(lambda found: MAKERS[found[1]](*found[2].split()) if found[1] in MAKERS else found[0], markdown)


def inward(found: re.Match[str], folder: Path) -> str:
    """Replace a link to a file that is not a page by the file's name; in the repository, the link works."""
    place = (folder / found[2]).resolve()
    if place.is_relative_to(diagram.ROOT / "docs") or not place.is_relative_to(diagram.ROOT):
        return found[0]
    return f"{found[1]} (`{place.relative_to(diagram.ROOT)}`)"


def modules(*names: str) -> str:
    """Return the reference of these modules, by the names under which users import them."""
    return "\n\n".join(f"::: viper.{name}\n    options:\n      heading_level: 2" for name in names)


def results(name: str) -> str:
    """Return a committed table, with its headings one level down; for a GPU's, the heading says so."""
    text = (diagram.ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")
    title, _, rest = re.sub("^#", "##", text, flags=re.MULTILINE).partition("\n")
    return f"{title}{', on a GPU' if name.endswith('_cuda') else ''}\n{rest}"


MAKERS = {"commands": commands.markdown, "modules": modules, "results": results}


def on_page_content(html: str, **_: Any) -> str:
    """Write formulas as MathML, so that a page needs no script and no font to show them, and draw the diagram."""
    if DIAGRAM in html:
        html = html.replace(DIAGRAM, diagram.svg())
    return FORMULA.sub(lambda found: mathml(found[3], display=found[2] == "["), html)


def mathml(tex: str, display: bool) -> str:
    formula = convert(unescape(tex).strip(), display="block" if display else "inline")
    formula = TIGHT.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', formula)
    formula = SIGN.sub(r'\1<mo form="prefix" lspace="0" rspace="0">\2</mo>', formula)
    formula = PRIME.sub(r'<mrow>\1<mo lspace="0" rspace="0">\2</mo></mrow>', formula)
    return f'<div class="formula">{formula}</div>' if display else formula


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Show the values of options as they are typed; let pages opened from a file be searched, by our own script."""
    output = CHOICES.sub(quoted_words, output)
    return output.replace(WORKER, get_relative_url("site/worker.js", page.url))


def quoted_words(found: re.Match[str]) -> str:
    words = re.sub("<[^>]*>", "", found[1]).replace(" - ", "-").split(", ")
    return found[0] if {*words} <= {"int", "float"} else "<code>" + ", ".join(f"&quot;{word}&quot;" for word in words)


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    return output_content.replace(WORKER, "site/worker.js")
