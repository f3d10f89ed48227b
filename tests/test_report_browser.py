"""The report in a real browser: it loads nothing else, draws its charts, and works by keyboard and without a script."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import scipy.special

import viper
from viper import report
from viper.report import charts

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="needs chromium and chromedriver on the PATH")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Reports of a logistic regression and of a Gaussian process."""
    folder = tmp_path_factory.mktemp("reports")
    generator = np.random.default_rng(0)
    data = pd.DataFrame(generator.normal(size=(150, 3)), columns=["lon", "lat", "<b>dose</b>"])
    label = generator.random(150) < scipy.special.expit(2 * data["lon"] - data["<b>dose</b>"])
    data["ill"] = np.where(label, "yes", "<i>no</i>")
    logistic = viper.VariationalLogisticRegression(random_state=0).fit(data.drop(columns="ill"), data["ill"])
    process = viper.VariationalGPClassifier(mean="constant", n_inducing=10, n_starts=1, random_state=0)
    process.fit(data[["lon", "lat"]], data["ill"])
    for name, model in {"logistic": logistic, "process": process}.items():
        report.write(model, data, "ill", folder / f"{name}.html")
    report.write(logistic, data, "ill", folder / "rowless.html", rows=False)
    return folder


@pytest.fixture
def page(browser, files):
    """The logistic report, freshly loaded, in light colours."""
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    if browser.current_url.startswith("file:"):
        browser.execute_script("localStorage.clear()")
    browser.get((files / "logistic.html").as_uri())
    return browser


def find(page, selector):
    return page.find_elements("css selector", selector)


def show(page, element):
    """Scroll to the element and wait until the page has been redrawn."""
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)
    page.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def click(page, element):
    show(page, element)
    element.click()


def colour(page, selector="html", name="background-color"):
    return page.execute_script(
        f"return getComputedStyle(document.querySelector('{selector}')).getPropertyValue('{name}')"
    )


# --- self-contained ---


@pytest.mark.parametrize("name", ["logistic", "process"])
def test_it_loads_nothing_else_and_logs_no_errors(browser, files, name):
    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    address = (files / f"{name}.html").as_uri()
    browser.get(address)
    assert browser.get_log("browser") == []
    events = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert {url for url in asked if not url.startswith("data:")} == {address}
    assert browser.execute_script("return document.compatMode") == "CSS1Compat"


def test_only_the_pages_own_script_runs(browser, files, tmp_path):
    """The page's script has run; a script, a handler, a style and a link of an intruder have not."""
    text = (files / "logistic.html").read_text(encoding="utf-8")
    attack = (
        "<script>document.title = 'owned'</script>"
        "<svg onload=\"document.title = 'owned'\"></svg>"
        "<style>h1 { color: rgb(1, 2, 3) }</style>"
        "<base href='https://example.invalid/'>"
        "<form action='https://example.invalid/' id='form'><button>go</button></form>"
    )
    (tmp_path / "report.html").write_text(text.replace("<main>", f"<main>{attack}"), encoding="utf-8")
    browser.get((tmp_path / "report.html").as_uri())
    assert browser.execute_script("return document.documentElement.classList.contains('js')")
    assert browser.title == "Probability of yes"
    assert colour(browser, "h1", "color") != "rgb(1, 2, 3)"
    assert browser.execute_script("return document.baseURI").startswith("file:")
    refused = " ".join(entry["message"] for entry in browser.get_log("browser"))
    assert refused.count("Content Security Policy") >= 4
    browser.execute_script("document.getElementById('form').submit()")
    assert browser.current_url.startswith("file:")
    assert "form-action" in " ".join(entry["message"] for entry in browser.get_log("browser"))


def test_a_page_without_rows_works(browser, files, tmp_path):
    browser.get_log("browser")
    browser.get((files / "rowless.html").as_uri())
    assert browser.get_log("browser") == []
    assert find(browser, ".person, .pick, .site, #density") == []
    assert len([figure for figure in find(browser, "figure.effect") if figure.is_displayed()]) == 1


def test_the_contents_lead_to_every_section(page):
    links = find(page, "nav.contents a")
    assert [link.get_attribute("href").split("#")[1] for link in links] == [
        section.get_attribute("id") for section in find(page, "main > section")
    ]
    assert [link.text for link in links] == [heading.text for heading in find(page, "main > section > h2")]


@pytest.mark.parametrize("name", ["logistic", "process"])
def test_every_chart_is_drawn(browser, files, name):
    browser.get((files / f"{name}.html").as_uri())
    shown = [chart for chart in find(browser, "svg.chart") if chart.is_displayed()]
    assert len(shown) >= 8
    for chart in shown:
        size, marks = browser.execute_script(
            "return [arguments[0].getBoundingClientRect().width,"
            " [...arguments[0].querySelectorAll('path, circle, rect')].filter(m => m.getBBox().width > 0).length]",
            chart,
        )
        assert size > 200, chart.get_attribute("aria-label")
        assert marks >= 1, chart.get_attribute("aria-label")


def test_names_are_text_not_markup(page):
    assert find(page, "b, i") == []
    assert "<b>dose</b>" in page.find_element("id", "coefficients").text


@pytest.mark.parametrize("name", ["logistic", "process"])
def test_the_accessibility_tree_has_names(browser, files, name):
    browser.get((files / f"{name}.html").as_uri())
    browser.execute_cdp_cmd("Accessibility.enable", {})
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    browser.execute_cdp_cmd("Accessibility.disable", {})
    role = lambda node: node.get("role", {}).get("value")  # noqa: E731
    named = {"image", "button", "combobox", "table", "heading", "columnheader", "rowheader", "region"}
    seen = [node for node in nodes if role(node) in named and not node.get("ignored")]
    assert {"image", "button", "table", "heading", "columnheader"} <= {role(node) for node in seen}
    assert [role(node) for node in seen if not node.get("name", {}).get("value", "").strip()] == []


# --- controls ---


def test_theme_follows_the_system_and_the_button(page):
    light = colour(page)
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    dark = colour(page)
    assert dark != light
    page.refresh()
    button = page.find_element("id", "theme")
    assert (button.text, button.get_attribute("aria-pressed")) == ("Light", "true")
    button.click()
    assert (colour(page), button.text) == (light, "Dark")
    page.refresh()
    assert colour(page) == light  # remembered


def test_tables_sort(page):
    table = page.find_element("css selector", "table.rows")
    column = lambda k: [  # noqa: E731
        float(cell.get_attribute("data-sort"))
        for cell in table.find_elements("css selector", f"tbody tr > :nth-child({k})")
    ]
    (button,) = table.find_elements("css selector", "th:nth-child(2) button")
    click(page, button)
    assert column(2) == sorted(column(2), reverse=True)
    click(page, button)
    assert column(2) == sorted(column(2))
    assert button.find_element("xpath", "..").get_attribute("aria-sort") == "ascending"
    names = page.find_element("css selector", "#coefficients table th:nth-child(1) button")
    click(page, names)
    click(page, names)
    shown = [cell.text for cell in find(page, "#coefficients table tbody th")]
    assert shown == sorted(shown)


def test_choosing_a_row_draws_its_density(page):
    data = json.loads(page.find_element("id", "data").get_attribute("textContent"))
    line = page.find_element("id", "density-line")
    before = line.get_attribute("d")
    pick = find(page, "button.pick")[7]
    row = data["rows"][pick.get_attribute("data-row")]
    click(page, pick)
    assert line.get_attribute("d") != before
    assert page.find_element("id", "row-name").text == row["name"]
    assert row["note"] in page.find_element("id", "row-panel").text
    assert [b for b in find(page, "button.pick") if b.get_attribute("aria-pressed") == "true"] == [pick]
    points = np.array([[float(x) for x in point.split(",")] for point in line.get_attribute("d")[1:].split("L")])
    start, end = data["axes"][row["axis"]]["ends"]
    p, height = charts.density_curve(row["theta"], row["tau"], (start, end))
    np.testing.assert_allclose(points[:, 0], 20 + 380 * (p - start) / (end - start), atol=0.06)
    np.testing.assert_allclose(points[:, 1], 194 - 0.96 * 180 * height / height.max(), atol=0.06)


def test_the_script_repeats_what_the_page_had(page, files):
    """The script redraws the first row, which Python has drawn already: chart and sentence stay the same."""
    text = (files / "logistic.html").read_text(encoding="utf-8")
    for id_, attribute in (("density-line", "d"), ("density-band", "d"), ("density-mean", "x1")):
        drawn = page.find_element("id", id_).get_attribute(attribute)
        (element,) = (part for part in text.split("<") if f'id="{id_}"' in part)
        original = element.split(f'{attribute}="')[1].split('"')[0]
        numbers = [np.array([float(x) for x in s.strip("MZ").replace("L", ",").split(",")]) for s in (drawn, original)]
        np.testing.assert_allclose(*numbers, atol=0.11)
    sentence = page.find_element("id", "row-text").get_attribute("textContent")
    assert f'aria-live="polite">{sentence}<' in text


@pytest.mark.parametrize(
    ("theta", "tau", "ends"),
    [
        (0.3, 0.7, (0, 1)),
        (-6.0, 1.0, (0, 1)),
        (-6.0, 0.2, (0, 0.01)),
        (5.0, 0.3, (0.95, 1)),
        (0.0, 12.0, (0, 1)),
        (40.0, 3.0, (0, 1)),
        (2.0, 1e-9, (0, 1)),
    ],
)
def test_density_of_the_script_is_exact(page, theta, tau, ends):
    found = np.array(page.execute_script(f"return viperReport.density({theta}, {tau}, {list(ends)})"))
    p, height = charts.density_curve(theta, max(tau, 1e-6), ends)
    np.testing.assert_allclose(found[:, 0], p, atol=1e-12)
    np.testing.assert_allclose(found[:, 1], height, atol=1e-3 * height.max())


def test_the_axis_of_the_density_follows_the_row(page):
    data = json.loads(page.find_element("id", "data").get_attribute("textContent"))
    ticks = lambda: [e.get_attribute("textContent") for e in find(page, "#density .tick")]  # noqa: E731
    seen = set()
    for person in find(page, "g.person")[::15]:
        page.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", person)
        axis = data["rows"][person.get_attribute("data-row")]["axis"]
        assert ticks() == data["axes"][axis]["ticks"]
        seen.add(axis)
    assert len(seen) > 1


def test_rows_of_the_chart_can_be_chosen(page):
    person = find(page, "g.person")[3]
    page.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", person)
    chosen = find(page, "g.person.chosen")
    assert chosen == [person]
    data = json.loads(page.find_element("id", "data").get_attribute("textContent"))
    name = data["rows"][person.get_attribute("data-row")]["name"]
    assert page.find_element("id", "row-name").text == name


def test_choosing_a_column_shows_its_curve(page):
    shown = lambda: [e for e in find(page, "figure.effect") if e.is_displayed()]  # noqa: E731
    (first,) = shown()
    select = page.find_element("id", "effect")
    names = [option.text for option in find(page, "#effect option")]
    assert len(names) == 3
    page.execute_script("arguments[0].focus()", select)
    select.send_keys("\ue015")  # arrow down: by keyboard
    (second,) = shown()
    assert second != first
    assert second.find_element("tag name", "h3").text == names[1]


def test_marks_have_tooltips(page):
    tip = page.find_element("id", "tip")
    assert not tip.is_displayed()
    dot = find(page, "#performance circle.dot")[0]
    show(page, dot)
    webdriver.ActionChains(page).move_to_element(dot).perform()
    assert tip.is_displayed()
    assert "rows given" in tip.text
    box = tip.rect
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 1200


def test_controls_are_reached_by_keyboard(page):
    page.find_element("tag name", "body").send_keys("\ue004")
    reached = []
    for _ in range(45):
        active = page.switch_to.active_element
        reached.append(active.get_attribute("id") or active.get_attribute("class") or active.tag_name)
        active.send_keys("\ue004")
    assert reached[:2] == ["skip", "theme"]
    assert "sort" in reached
    assert "effect" in reached
    assert {"threshold", "cost-fp", "cost-fn", "budget"} <= set(reached)


# --- print, phones, and no script ---


def test_print_is_light_and_shows_all(page):
    page.find_element("id", "theme").click()
    assert colour(page) != "rgb(255, 255, 255)"
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert colour(page) == "rgb(255, 255, 255)"
    assert not page.find_element("id", "theme").is_displayed()
    assert all(figure.is_displayed() for figure in find(page, "figure.effect"))
    assert len(page.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 10_000


BEYOND = """
const width = document.documentElement.clientWidth;
return [...document.querySelectorAll("svg.chart, svg.chart *, table, th, td, p")]
  .map(element => [element, element.getBoundingClientRect()])
  .filter(([_, box]) => box.width > 0 && (box.right > width + 1 || box.left < -1))
  .map(([element, box]) => `${element.tagName} ${Math.round(box.right)}: ${element.textContent.slice(0, 40)}`)
"""


SMALL_OR_OVERLAPPING = """
return [...document.querySelectorAll("figure.effect")].flatMap(figure => {
  const boxes = [...figure.querySelectorAll("text.tick[text-anchor=middle]")].map(tick => tick.getBoundingClientRect());
  return [...boxes.filter(box => box.height < 8), ...boxes.slice(1).filter((box, k) => box.left < boxes[k].right)];
}).length
"""  # 8 CSS pixels are 6 pt


def test_nothing_is_cropped_on_paper(browser, tmp_path):
    """Charts and tables, with long names and levels, lie within A4 and within Letter less wide margins."""
    generator = np.random.default_rng(0)
    data = pd.DataFrame({"Sex": generator.choice(["female", "male"], 120), "ldl": generator.normal(size=120)})
    data["Ward of the first admission"] = generator.choice(["a ward with a long name", "east", "north"], 120)
    data["month"] = [f"{month:%b}" for month in pd.date_range("2024-01-01", periods=120, freq="MS")]
    data["ill"] = np.where(generator.random(120) < scipy.special.expit(data["ldl"]), "yes", "no")
    formula = "ill ~ Sex * ldl + `Ward of the first admission` + month"
    model = viper.VariationalLogisticRegression.from_formula(formula, data)
    report.write(model, data, "ill", tmp_path / "report.html")
    browser.get((tmp_path / "report.html").as_uri())
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        for width in (718, 620):  # CSS pixels
            size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": True}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            assert browser.execute_script(BEYOND) == []
            assert browser.execute_script(SMALL_OR_OVERLAPPING) == 0
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


SIDEWAYS = """
return [...document.querySelectorAll(".scroll, .frame")]
  .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.textContent.slice(0, 60))
"""


def test_a_phone_scrolls_only_vertically(page):
    size = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= 390
        assert page.execute_script(SIDEWAYS) == []
        assert page.find_element("id", "theme").is_displayed()
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_without_a_script_everything_is_readable(page):
    page.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page.refresh()
        assert not page.find_element("id", "theme").is_displayed()
        assert all(figure.is_displayed() for figure in find(page, "figure.effect"))
        assert page.find_element("css selector", "p.verdict strong").text
        assert page.find_element("id", "density-line").get_attribute("d").startswith("M")
        assert page.find_element("id", "row-text").text.startswith("The model gives")
    finally:
        page.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_threshold_can_be_chosen_by_keyboard_cost_and_budget(page):
    """Every shown number is that of `confusion` at the threshold."""
    from selenium.webdriver.common.keys import Keys

    steps = page.execute_script("return JSON.parse(document.getElementById('data').textContent).decisions")
    slider = find(page, "#threshold")[0]
    show(page, slider)
    shown = lambda name: find(page, f"td[data-decision={name}]")[0].text  # noqa: E731
    assert shown("acted") == steps["steps"][steps["first"]]["acted"]
    slider.send_keys(Keys.ARROW_RIGHT)
    k = steps["first"] + 1
    assert int(slider.get_attribute("value")) == k
    assert slider.get_attribute("aria-valuetext") == find(page, "#threshold-shown")[0].text
    for name in ("tp", "fp", "fn", "tn", "sensitivity", "ppv_interval"):
        assert shown(name) == steps["steps"][k][name]
    assert float(find(page, "#threshold-mark")[0].get_attribute("x1")) == pytest.approx(steps["marks"][k])
    assert find(page, "#decision-cost")[0].text == ""
    find(page, "#cost-fn")[0].send_keys("4")
    k = int(slider.get_attribute("value"))
    assert steps["numbers"][k][0] == pytest.approx(0.2, abs=0.02)
    _, alarms, misses, _ = steps["numbers"][k]
    assert f"cost {alarms + 4 * misses} in all" in find(page, "#decision-cost")[0].text
    find(page, "#budget")[0].send_keys("20")
    acted = [number[3] for number in steps["numbers"]]
    assert int(shown("acted")) == max(n for n in acted if n <= 20)
