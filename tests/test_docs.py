"""The documentation site: it builds without a warning, asks nothing of the network, and names only what exists."""

import csv
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pages import ROOT

NEEDED = ["mkdocs", "material", "mkdocstrings", "latex2mathml"]
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
site_tools = pytest.mark.skipif(bool(missing), reason=f"the site needs {', '.join(missing)}")

# What a browser fetches of its own accord, by tag and attribute. Links are for readers, who may follow them.
FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}
ELSEWHERE = re.compile(r"^(https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


class Fetches(HTMLParser):
    """Addresses that a page makes a browser fetch."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if (name := FETCHED.get(tag)) and (address := dict(attributes).get(name)):
            self.found.append(address)


@site_tools
def test_no_page_fetches_anything_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        found = Fetches(page.read_text(encoding="utf-8")).found
        assert found
        assert [address for address in found if ELSEWHERE.match(address)] == [], page
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"@import|url\([\"']?(?:https?:)?//[^)]*", text) == [], sheet


@site_tools
def test_what_pages_fetch_is_there(site):
    for page in site.rglob("*.html"):
        for address in Fetches(page.read_text(encoding="utf-8")).found:
            if address.startswith(("data:", "#")) or page.name == "404.html":
                continue
            assert (page.parent / address.split("#")[0].split("?")[0]).is_file(), (page, address)


@site_tools
def test_every_formula_is_mathml(site):
    for page in (site / "math").glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "<math" in text
        assert "arithmatex" not in text
        visible = re.sub(r"<code.*?</code>|<annotation.*?</annotation>|<script.*?</script>", "", text, flags=re.DOTALL)
        assert re.findall(r"\\[a-z]+\{|\$\$", visible) == [], page


@site_tools
def test_words_that_an_option_may_be_are_shown_as_they_are_typed(site):
    text = (site / "reference" / "estimators.html").read_text(encoding="utf-8")
    assert "(<code>&quot;full&quot;, &quot;diagonal&quot;, &quot;low-rank&quot;</code>, default:" in text


@site_tools
def test_every_page_is_in_the_navigation(site):
    index = (site / "index.html").read_text(encoding="utf-8")
    known = set(re.findall(r'href="([^"#:]+\.html)"', index))
    unlisted = {str(page.relative_to(site)) for page in site.rglob("*.html")} - known
    assert unlisted <= {"404.html"}


@site_tools
def test_the_import_diagram_is_that_of_the_code(site):
    text = (site / "architecture.html").read_text(encoding="utf-8")
    (svg,) = re.findall(r'<svg class="imports".*?</svg>', text, flags=re.DOTALL)
    drawn = {group.find("title").text.split(":")[0] for group in ElementTree.fromstring(svg).findall("g")}
    package = ROOT / "src" / "viper"
    modules = {".".join(path.relative_to(package).with_suffix("").parts) for path in package.rglob("*.py")}
    assert drawn == {name for name in modules if "__" not in name}
    assert svg.count("<path d=") > len(drawn)


@site_tools
def test_the_search_index_finds_a_page(site):
    assert "predict_interval" in (site / "search" / "search_index.js").read_text(encoding="utf-8")


# --- in a real browser ---


@pytest.fixture(scope="module")
def browser():
    selenium = pytest.importorskip("selenium")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = shutil.which("chromedriver")  # else Selenium looks for one
    service = webdriver.ChromeService(executable_path=found) if found else None
    try:
        driver = webdriver.Chrome(options=options, service=service)
    except selenium.common.exceptions.WebDriverException as error:
        pytest.skip(f"no Chromium: {error.msg}")
    yield driver
    driver.quit()


@site_tools
@pytest.mark.parametrize("page", ["index", "math/limit", "architecture", "reference/estimators"])
def test_a_browser_shows_the_page_without_complaint_or_request(site, browser, page):
    browser.get((site / f"{page}.html").as_uri())
    assert browser.execute_script("return document.querySelector('h1').textContent.length") > 3
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    requests = re.findall(
        r'"url":"(https?://[^"]*)', str([entry["message"] for entry in browser.get_log("performance")])
    )
    assert requests == []
    for image in browser.find_elements("css selector", "article img"):
        assert browser.execute_script("return arguments[0].naturalWidth", image) > 0


@site_tools
def test_search_works_in_a_page_opened_from_a_file(site, browser):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site / "index.html").as_uri())
    browser.execute_script("document.querySelector('label[for=__search]').click()")
    box = browser.find_element("css selector", "input.md-search__input")
    box.send_keys("separation")
    results = lambda driver: driver.find_elements("css selector", ".md-search-result__link")  # noqa: E731
    found = WebDriverWait(browser, 20).until(results)
    assert any("troubles" in (link.get_attribute("href") or "") for link in found)


# --- names on the pages ---


def test_the_map_from_paper_to_code_names_what_exists():
    text = (ROOT / "docs" / "paper-to-code.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:[a-z_]+\.)+)(\w+)`", text)
    assert len(names) > 15
    for module, name in names:
        assert hasattr(importlib.import_module(f"viper.{module.strip('.')}"), name), f"{module}{name}"


def test_files_named_on_pages_exist():
    for page in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]:
        for name in re.findall(r"`([\w/]+\.(?:py|c))`", page.read_text(encoding="utf-8")):
            places = [ROOT / name, ROOT / "src" / "viper" / name]
            assert any(Path(place).is_file() for place in places), f"{page.name} names {name}"


# --- numbers on the pages ---


def benchmark(name, table):
    """Rows of a committed table, as dictionaries."""
    rows = {}
    with (ROOT / "benchmarks" / "results" / f"{name}.csv").open(encoding="utf-8") as file:
        for cell in csv.DictReader(file):
            if cell["table"] == table:
                rows.setdefault(cell["row"], {})[cell["column"]] = cell["value"]
    return list(rows.values())


def test_times_on_the_pages_are_those_of_the_benchmarks():
    fits = benchmark("logistic", "Time of a fit")
    of = {row["rows × columns"]: (float(row["viper full, ms"]), float(row["lbfgs (default), ms"])) for row in fits}
    large = "{:.2f} s .* {:.2f} s".format(*(ms / 1000 for ms in of["1,000,000 × 25"]))
    ours, theirs = of["1,000 × 25"]
    pages = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("index.md", "tutorials/million.md")}
    for text in pages.values():
        assert re.search(large, text.replace("\n", " ")), large
    assert f"{theirs:.1f} ms against {ours:.1f} ms" in pages["index.md"].replace("\n", " ")
    (extra,) = [row for row in benchmark("logistic", "Peak extra memory") if row["fit"] == "viper"]
    assert f"needs {float(extra['extra, MB']):.0f} MB" in pages["tutorials/million.md"].replace("\n", " ")


# --- words that people search for ---

SEARCHED = [
    "marginal effect",
    "contrast",
    "confusion matrix",
    "decision curve",
    "subgroup",
    "imbalance",
    "class_weight",
    "positive class",
    "imputation",
    "missing at random",
    "survey weights",
    "privacy",
    "posterior predictive",
    "CPU-only install",
    "repeated rows per patient",
    "old model files",
]


@pytest.mark.parametrize("words", SEARCHED)
def test_what_people_search_for_has_an_answer(words):
    pages = (ROOT / "docs").rglob("*.md")
    assert any(words.lower() in page.read_text(encoding="utf-8").lower() for page in pages)
