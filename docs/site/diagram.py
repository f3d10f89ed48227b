"""The import diagram of the architecture page, drawn from the code: modules by layer, each with what it imports."""

import ast
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "viper"
FIRST_ESTIMATOR = "design"  # where inference ends

PER_ROW, WIDTH, HEIGHT, GAP_X, GAP_Y, LEFT = 8, 108, 28, 10, 22, 112


def layers() -> list[tuple[str, list[str]]]:
    """Names of the layers with their modules, lowest first, from the rule that the tests enforce."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    (rule,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and target(node) == "LAYERS"]
    names: dict[str, list[str]] = {}
    order = eval(compile(ast.Expression(rule), "LAYERS", "eval"), names)
    bands: dict[str, list[str]] = {"numerics": [], "inference": [], "estimators": [], "applications": []}
    band = "inference"
    for module in order:
        band = "estimators" if module == FIRST_ESTIMATOR else band
        own = next((name.lower() for name in ("NUMERICS", "APPLICATIONS") if module in names[name]), band)
        if sources(module):
            bands[own].append(module)
    return list(bands.items())


def target(node: ast.Assign) -> str:
    return node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""


def sources(module: str) -> list[Path]:
    """The files of a module or package; none if it does not exist (yet)."""
    single = PACKAGE / f"{module}.py"
    return [single] if single.is_file() else sorted((PACKAGE / module).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """First names after `viper.` of everything that a file imports from the package."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[1] for name in node.names if name.name.startswith("viper."))
        elif isinstance(node, ast.ImportFrom) and node.module == "viper":
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("viper."):
            yield (node.module or "").split(".")[1]


def purpose(module: str) -> str:
    """The first line of a module's docstring."""
    path = PACKAGE / f"{module}.py"
    path = path if path.is_file() else PACKAGE / module / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) if path.is_file() else None
    return (text or module).splitlines()[0]


def svg() -> str:
    """Applications on top, numerics at the bottom: every line leads down. Pointing at a module shows its own."""
    places: dict[str, tuple[float, float]] = {}
    bands, y = "", 10.0
    for band, modules in reversed(layers()):
        rows = [modules[i : i + PER_ROW] for i in range(0, len(modules), PER_ROW)][::-1]
        top = y
        for row in rows:
            for i, module in enumerate(row):
                places[module] = (LEFT + i * (WIDTH + GAP_X), y + GAP_Y / 2)
            y += HEIGHT + GAP_Y
        bands += f'<rect class="band" x="4" y="{top}" width="{width() - 8}" height="{y - top}" rx="8"/>'
        bands += f'<text class="layer" x="14" y="{(top + y) / 2 + 4}">{band}</text>'
        y += 14
    drawn = "".join(module_svg(module, places) for module in places)
    return (
        f'<svg class="imports" viewBox="0 0 {width()} {y}" role="img" aria-label="Which module imports which">'
        f"{bands}{drawn}</svg>"
    )


def width() -> int:
    return LEFT + PER_ROW * (WIDTH + GAP_X) + 4


def module_svg(module: str, places: dict[str, tuple[float, float]]) -> str:
    """A box, and lines from its lower edge to what it imports."""
    x, y = places[module]
    names = {name for path in sources(module) for name in imported(path)} & {*places} - {module}
    lines = "".join(f'<path d="{curve(x, y, *places[name])}"/>' for name in sorted(names))
    title = f"<title>{escape(module)}: {escape(purpose(module))}</title>"
    box = f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>'
    text = f'<text x="{x + WIDTH / 2}" y="{y + HEIGHT / 2 + 4}">{escape(module)}</text>'
    return f'<g class="module" tabindex="0">{title}{lines}{box}{text}</g>'


def curve(x: float, y: float, to_x: float, to_y: float) -> str:
    """From the bottom of one box to the top of another; within a row, an arc below."""
    start, end = (x + WIDTH / 2, y + HEIGHT), (to_x + WIDTH / 2, to_y)
    if to_y <= y:
        end = (end[0], to_y + HEIGHT)
        dip = y + HEIGHT + GAP_Y
        return f"M{start[0]},{start[1]} C{start[0]},{dip} {end[0]},{dip} {end[0]},{end[1]}"
    middle = (start[1] + end[1]) / 2
    return f"M{start[0]},{start[1]} C{start[0]},{middle} {end[0]},{middle} {end[0]},{end[1]}"
