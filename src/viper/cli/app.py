"""The program and its commands. Every failure becomes one line on stderr and an exit code."""

import errno
import functools
import inspect
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from viper.cli.commands.bound import compare_bounds
from viper.cli.commands.compare import compare_models
from viper.cli.commands.demo import run_demo
from viper.cli.commands.effects import show_effects
from viper.cli.commands.evaluate import evaluate_model
from viper.cli.commands.fit import fit_table
from viper.cli.commands.missing import report_missing
from viper.cli.commands.predict import predict_rows
from viper.cli.commands.report import write_report
from viper.cli.commands.reproduce import reproduce_artefact
from viper.cli.commands.serve import serve_model
from viper.cli.commands.suggest import suggest_rows
from viper.cli.commands.summary import show_summary
from viper.cli.help import LINES_OF_HELP, HelpfulCommand, HelpfulProgram
from viper.cli.options import with_reading_options
from viper.cli.signals import stop_if_interrupted
from viper.cli.terminal import console, printable, show_warnings_as_notes

COMMANDS: dict[str, Callable[..., None]] = {  # in the order of `viper --help`
    "missing": report_missing,
    "fit": fit_table,
    "predict": predict_rows,
    "suggest": suggest_rows,
    "evaluate": evaluate_model,
    "summary": show_summary,
    "effects": show_effects,
    "compare": compare_models,
    "report": write_report,
    "serve": serve_model,
    "demo": run_demo,
    "bound": compare_bounds,
    "reproduce": reproduce_artefact,
}
FAULT, USAGE, INPUT, OUTPUT, CLOSED_PIPE = 1, 2, 3, 4, 141  # exit codes; after a signal, 128 plus its number
DISK_FAULTS = {errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG}  # errors that only writing can cause
TYPED = {"prior_scale": "--prior", "positive": "--positive"}  # Python names of options -> their names here
UsageError: Any = typer.BadParameter.__base__  # click's, or the copy that newer versions of typer bundle

app = typer.Typer(
    name="viper",
    cls=HelpfulProgram,
    epilog="To begin: viper fit data.csv --target y --out model.viper",
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], **LINES_OF_HELP},
    pretty_exceptions_enable=False,
)


def print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        from viper.inference.kernels.library import is_compiled

        try:
            found = version("vi-per")
        except PackageNotFoundError:
            found = "(from its sources)"
        rows = "compiled" if is_compiled() else "not compiled: no C compiler could build it when viper was installed"
        sys.stdout.write(f"viper {found} (pass over rows: {rows})\n")
        raise typer.Exit


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=print_version)
    ] = False,
) -> None:
    """Bayesian classification with honest uncertainty: every probability comes with an interval."""


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with every error turned into one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        show_warnings_as_notes()
        try:
            command(*args, **options)
            sys.stdout.flush()
            stop_if_interrupted()
        except (UsageError, typer.Exit):
            raise
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit succeeds
            raise typer.Exit(CLOSED_PIPE) from None
        except Exception as error:
            if os.environ.get("VIPER_TRACEBACK"):
                raise
            stop_if_interrupted()  # libraries in C raise other errors when interrupted
            text, code = message_and_exit_code(error)
            print_error(text)
            raise typer.Exit(code) from None

    return run


def message_and_exit_code(error: BaseException) -> tuple[str, int]:
    from viper.errors import OutputError

    if isinstance(error, OutputError):
        return one_line(error), OUTPUT
    if isinstance(error, OSError) and error.errno in DISK_FAULTS:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"the output must be writable; got {where}{error.strerror}. Free some space, or write elsewhere.", OUTPUT
    if isinstance(error, ValueError | OSError | ImportError):
        return one_line(error), INPUT
    if isinstance(error, OverflowError):
        return f"numbers must not overflow; got {one_line(error)}. Rescale them.", INPUT
    if isinstance(error, MemoryError):
        return "there is not enough memory for the data. Use fewer columns, or --covariance diagonal.", INPUT
    bug = f"this is a bug in viper: {type(error).__name__}: {one_line(error)}"
    return f"{bug} Please report it; VIPER_TRACEBACK=1 shows where it happened.", FAULT


def one_line(error: BaseException) -> str:
    """Return the message on one line, with options as they are written on a command line."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"\b(missing|unseen|beyond|covariance|bound|solver)='([\w-]+)'", r"--\1 \2", text)
    text = re.sub(rf"^({'|'.join(TYPED)})\b", lambda name: TYPED[name[0]], text)
    return text.replace("overwrite=True", "--force")


def usage_words(error: Any) -> str:
    """Reword typer's message about a wrong command line in the style of the other messages, and add the value."""
    from viper.errors import shown

    message = error.format_message().rstrip(".").replace("Value error, ", "")
    found = re.match(r"Invalid value for '([\w-]+)'[^:]*: Input should be (.*?)(, unable to parse .*)?$", message)
    if found is None:
        return message
    given = [one["input"] for one in getattr(error.__cause__, "errors", list)()]  # by pydantic, in newer typer
    rule = f"{found[1]} must be {found[2]}"
    if not given:
        return rule
    return f"{rule}; got {shown(given[0]) if found[3] else given[0]}"  # a number is shown as it was typed


def print_error(text: str) -> None:
    screen = console(stderr=True)
    screen.print("[bold red]viper:[/] ", end="")
    screen.print(printable(text), markup=False, soft_wrap=True)


def register(name: str, command: Callable[..., None]) -> None:
    """Add a command to the program. The examples in its docstring end its help, one per line."""
    text, _, examples = inspect.cleandoc(command.__doc__ or "").partition("Examples\n--------\n")
    made = app.command(name, cls=HelpfulCommand, help=text.strip(), epilog=examples.strip())
    made(guarded(with_reading_options(command)))


for name, command in COMMANDS.items():
    register(name, command)


def check_standard_streams() -> None:
    """Exit with one line if standard output is closed. If another stream is, open it on the null device instead.

    Otherwise the next file to be opened would get its number and receive whatever is printed. Pipes and files get
    UTF-8; a terminal shows a question mark for a character that it lacks.
    """
    closed = [number for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)) if stream is None]
    for _ in closed:
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if 1 in closed:
        print_error("standard output must be open; got a closed one. Redirect it to a file, or to /dev/null.")
        sys.exit(OUTPUT)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding, errors = (None, "replace") if stream.isatty() else ("utf-8", "backslashreplace")
            stream.reconfigure(encoding=encoding, errors=errors)


def run_program(arguments: list[str] | None = None) -> NoReturn:
    """Run the command that the arguments name, and exit."""
    check_standard_streams()
    try:
        code = app(args=arguments, prog_name="viper", standalone_mode=False)
    except UsageError as error:
        if error.ctx is not None and error.format_message() == error.ctx.get_help():  # `viper` alone
            sys.stderr.write(error.format_message() + "\n")
        else:
            where = error.ctx.command_path if error.ctx else "viper"
            message = usage_words(error)
            print_error(f"{message}{'' if message.endswith('?') else '.'} See: {where} --help")
        code = USAGE
    except typer.Exit as done:
        code = done.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    stop_if_interrupted()  # typer turns an interrupt into an exit of its own
    sys.exit(code if isinstance(code, int) else 0)
