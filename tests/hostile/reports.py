"""Reports about columns, labels and values that are HTML and scripts: none of it becomes part of the page.

Every page is parsed. Where there is a browser, each twentieth is also opened in it, and must load without an error and
run nothing but its own script.
"""

import random
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from hostile.harness import SilentlyWrong, outcome_of_command, run_command

RLIMITS = False  # a browser reserves more address space than it uses
BROWSED = 20  # one in so many
ROWS = 60
LINKS = ("href", "src", "action", "formaction", "xlink:href", "data")  # attributes that a browser follows
PAYLOADS = [
    "<xss>",
    "<script>hit()</script>",
    "</script><xss>",
    "</style><xss>",
    "</title><xss>",
    "</textarea><xss>",
    "--><xss><!--",
    "<!--",
    "]]><xss>",
    "<img src=x onerror=hit()>",
    "<svg onload=hit()>",
    '" onmouseover="hit()',
    "' onfocus='hit()' autofocus='",
    "javascript:hit()",
    "&lt;xss&gt;",
    "&#60;xss&#62;",
    "\\u003cxss\\u003e",
    "${hit()}",
    "`+hit()+`".replace("`", "'"),
    "\u2028hit()",
    "{{hit()}}",
    "%3Cxss%3E",
    "\x1b[31m",
    "\u202e",
    "a\nb",
    "é" * 100,
    "🐍",
    "w" * 300,
    " ",
    "[bold red]",
    "$\\alpha$",
    "__proto__",
    "constructor",
]


class Material(NamedTuple):
    scripts: int  # in a page about a plain table


def prepare(folder: Path) -> Material:
    path = folder / "table.csv"
    plain_table(np.random.default_rng(0)).to_csv(path, index=False)
    code, out, err = write_report(path, folder, "y")
    assert code == 0, out + err
    return Material(read_page((folder / "out.html").read_text(encoding="utf-8")).tags.count("script"))


def plain_table(rng: np.random.Generator) -> pd.DataFrame:
    table = pd.DataFrame(
        {"a": rng.normal(size=ROWS), "b": rng.normal(size=ROWS), "ward": rng.choice(list("uvw"), ROWS)}
    )
    table["y"] = np.where(rng.random(ROWS) < 1 / (1 + np.exp(-2 * table["a"])), "yes", "no")
    return table


def write_report(path: Path, folder: Path, target: str) -> tuple[int, str, str]:
    model = folder / "model.viper"
    done = run_command("fit", path, "--target", target, "--cv", "0", "--out", model, "--force")
    return done if done[0] else run_command("report", model, path, "--out", folder / "out.html", "--force")


class Page(HTMLParser):
    """What a browser would make of a page: its elements, and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.odd: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            runs = name in LINKS and (value or "").strip().lower().startswith("javascript:")
            if name.startswith("on") or runs:
                self.odd.append(f"<{tag} {name}={value!r:.60}>")
        if tag in ("xss", "img"):
            self.odd.append(f"<{tag}>")


def read_page(text: str) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    return page


def run_case(material: Material, seed: int) -> tuple[str, str]:
    generator = random.Random(seed)
    table = plain_table(np.random.default_rng(seed))
    payload = lambda: generator.choice(PAYLOADS)  # noqa: E731
    names = {name: payload() for name in table if generator.random() < 0.5}
    if generator.random() < 0.6:
        table["ward"] = table["ward"].replace({"u": payload() + "u", "v": payload() + "v"})
    if generator.random() < 0.6:
        table["y"] = table["y"].replace({"yes": payload() + "1", "no": payload() + "0"})
    table = table.rename(columns={name: f"{new}{i}" for i, (name, new) in enumerate(names.items())})
    path = Path(generator.choice(["rows.csv", "<xss>.csv", "a'b\"&.csv"]))
    table.to_csv(path, index=False)
    code, _, err = write_report(path, Path(), table.columns[-1])
    if code:
        return outcome_of_command(code, err)
    page = read_page(Path("out.html").read_text(encoding="utf-8"))
    if page.odd or page.tags.count("script") != material.scripts:
        raise SilentlyWrong(f"the page has {page.odd[:3]} and {page.tags.count('script')} scripts")
    if seed % BROWSED == 0:
        check_in_browser(Path("out.html").absolute())
    return "right", ""


# --- in a browser ---

DRIVER: list[Any] = []


def check_in_browser(path: Path) -> None:
    if not DRIVER:
        DRIVER.append(start_browser())
    if (driver := DRIVER[0]) is None:
        return
    driver.get(path.as_uri())
    found = driver.execute_script("return [typeof window.hit, document.querySelectorAll('xss, img').length]")
    errors = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    if found != ["undefined", 0] or errors:
        raise SilentlyWrong(f"in the browser: {found}, {errors[:2]}")


def start_browser() -> Any:
    """A browser without a window, or None where there is none."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    chromedriver = shutil.which("chromedriver")
    if not (chromium and chromedriver):
        return None
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))


def close() -> None:
    """Close the browser of this worker."""
    for driver in filter(None, DRIVER):
        driver.quit()
