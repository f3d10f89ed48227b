"""The import diagram of the architecture page, drawn from the code: every module in its room, with what it imports."""

import ast
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "viper"

PER_ROW, WIDTH, HEIGHT, GAP_X, GAP_Y, LEFT = 6, 142, 26, 8, 16, 100  # modules in a line; the others in pixels


def rooms() -> dict[str, list[str]]:
    """Return the rooms, lowest first, each with its modules, in the order that the tests enforce."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8"))
    (order,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and target(node) == "ROOMS"]
    return {room: modules_of(room) for room in ast.literal_eval(order)}


def target(node: ast.Assign) -> str:
    return node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""


def modules_of(room: str) -> list[str]:
    """Return the dotted names of a room's modules; the `__init__` of a room that only documents it is left out."""
    if (PACKAGE / f"{room}.py").is_file():
        return [room]
    return sorted(dotted(path) for path in (PACKAGE / room).rglob("*.py") if path.name != "__init__.py")


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def place_of(module: str) -> Path:
    """Return the file of a module or of a package's `__init__`."""
    path = PACKAGE.joinpath(*module.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"


def imported(path: Path) -> Iterator[str]:
    """Yield the dotted names below `viper` of everything that a file may import: modules, and names in them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name.removeprefix("viper.") for name in node.names if name.name.startswith("viper."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "viper":
            origin = (node.module or "").removeprefix("viper").removeprefix(".")
            yield origin
            yield from (f"{origin}.{name.name}".removeprefix(".") for name in node.names)


def purpose(module: str) -> str:
    """Return the first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(place_of(module).read_text(encoding="utf-8")))
    return (text or module).splitlines()[0]


def svg() -> str:
    """Draw the command line on top and errors at the bottom, so that every line leads down or stays in its room."""
    places: dict[str, tuple[float, float]] = {}
    bands, y = "", 10.0
    for room, modules in reversed(rooms().items()):
        top = y
        for start in range(0, len(modules), PER_ROW):
            for i, module in enumerate(modules[start : start + PER_ROW]):
                places[module] = (LEFT + i * (WIDTH + GAP_X), y + GAP_Y / 2)
            y += HEIGHT + GAP_Y
        bands += f'<rect class="band" x="4" y="{top}" width="{width() - 8}" height="{y - top}" rx="8"/>'
        bands += f'<text class="layer" x="14" y="{(top + y) / 2 + 4}">{room}</text>'
        y += 12
    drawn = "".join(module_svg(module, places) for module in places)
    return (
        f'<svg class="imports" viewBox="0 0 {width()} {y}" role="img" aria-label="Which module imports which">'
        f"{bands}{drawn}</svg>"
    )


def width() -> int:
    return LEFT + PER_ROW * (WIDTH + GAP_X) + 4


def module_svg(module: str, places: dict[str, tuple[float, float]]) -> str:
    """Draw a box, and lines from its lower edge to what the module imports."""
    x, y = places[module]
    names = {*imported(place_of(module))} & {*places} - {module}
    lines = "".join(f'<path d="{curve(x, y, *places[name])}"/>' for name in sorted(names))
    title = f"<title>{escape(module)}: {escape(purpose(module))}</title>"
    box = f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>'
    label = escape(module.partition(".")[2] or module)
    text = f'<text x="{x + WIDTH / 2}" y="{y + HEIGHT / 2 + 4}">{label}</text>'
    return f'<g class="module" tabindex="0">{title}{lines}{box}{text}</g>'


def curve(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return the path from the bottom of one box to the top of another, or an arc below if it is beside or above."""
    start, end = (x + WIDTH / 2, y + HEIGHT), (to_x + WIDTH / 2, to_y)
    if to_y <= y:
        end = (end[0], to_y + HEIGHT)
        dip = y + HEIGHT + GAP_Y
        return f"M{start[0]},{start[1]} C{start[0]},{dip} {end[0]},{dip} {end[0]},{end[1]}"
    middle = (start[1] + end[1]) / 2
    return f"M{start[0]},{start[1]} C{start[0]},{middle} {end[0]},{middle} {end[0]},{end[1]}"
