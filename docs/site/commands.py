"""The reference of the commands, generated from the program."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))


def markdown() -> str:
    """Return a section for each command: what it does, its examples and its options."""
    try:
        import typer

        from viper.cli.app import app
    except ImportError:
        return "`viper --help` describes the commands."
    group: Any = typer.main.get_command(app)
    return "\n\n".join(section(name, command) for name, command in group.commands.items() if not command.hidden)


def section(name: str, command: Any) -> str:
    parts = [f"## viper {name}", plain(command.help)]
    if command.epilog:
        lines = [line for line in plain(command.epilog).splitlines() if line.startswith("viper ")]
        parts += ["```\n" + "\n".join(lines) + "\n```"] if lines else []
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    rows = [f"| `{param.name.upper()}` | {cell(param)} | |" for param in arguments]
    rows += [
        f"| {' '.join(f'`{name}`' for name in param.opts)} | {cell(param)} | {default(param)} |" for param in options
    ]
    table = "\n".join(["| argument or option | | default |", "|---|---|---|", *rows])
    return "\n\n".join([*parts, table])


def cell(param: Any) -> str:
    return plain(getattr(param, "help", None)).replace("\n", " ").replace("|", "\\|")


def default(param: Any) -> str:
    value = getattr(param.default, "value", param.default)
    shown = getattr(param, "show_default", True) and value not in (None, False, ..., "", ())
    return f"`{value}`" if shown and not callable(value) else ""


def plain(text: str | None) -> str:
    """Remove rich's markup."""
    from rich.text import Text

    return Text.from_markup(text or "").plain.strip()
