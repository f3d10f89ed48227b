"""The help of the program and its commands: plain text, with room for whole sentences on narrow terminals."""

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

LINES_OF_HELP = {"max_content_width": 100}  # columns, as longer lines are hard to read
NAMES_WIDTH = 26  # columns for the names of options; longer ones have a line of their own
VALUE_WORDS = {  # typer's name of a type -> the word for its values
    "str": "text",
    "list[str]": "text",
    "int": "integer",
    "list[int]": "integer",
    "int range": "integer",
    "float": "number",
    "float range": "number",
}
SUBJECTS = {"argument": "Arguments", "option": "Options"}  # sections of parameters that do not name one


class HelpfulProgram(TyperGroup):
    """The program. Its help lists the commands, each with the first sentence of its own help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_sentence(made.help or "")) for name, made in self.commands.items()])


def first_sentence(text: str) -> str:
    return text.partition("\n\n")[0].partition(". ")[0].rstrip(".") + "."


def with_plain_kinds(names: str) -> str:
    """Describe an option's values as `<text>` or `<integer>`, not by Python's types."""
    return re.sub("<([^<>]+)>", lambda found: f"<{VALUE_WORDS.get(found[1], found[1])}>", names)


class HelpfulCommand(TyperCommand):
    """A command whose help has its options in the sections that `rich_help_panel` names."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                subject = getattr(parameter, "rich_help_panel", None) or SUBJECTS[parameter.param_type_name]
                sections.setdefault(subject, []).append((with_plain_kinds(record[0]), record[1]))
        for subject, records in sections.items():
            with formatter.section(subject):
                formatter.write_dl(records, col_max=NAMES_WIDTH)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The examples, each on a line of its own that can be copied."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
