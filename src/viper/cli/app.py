"""The program: its commands, and what becomes of everything that can go wrong."""

import functools
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from viper.cli import bound, compare, demo, evaluate, fit, predict, report, reproduce, summary
from viper.cli.terminal import console, show_warnings_as_notes

FAULT, USAGE, INPUT, OUTPUT, SIGNALLED, CLOSED_PIPE = 1, 2, 3, 4, 128, 141
UsageError: Any = typer.BadParameter.__base__  # click's, or the copy of it that newer versions of typer carry

app = typer.Typer(
    name="viper",
    help="Bayesian classification with honest uncertainty: probabilities, and how sure they are.",
    epilog="Begin with: viper fit data.csv --target y --out model.viper",
    rich_markup_mode="rich",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        from viper.inference.kernels.compiled import is_compiled

        try:
            found = version("vi-per")
        except PackageNotFoundError:
            found = "(from its sources)"
        rows = "compiled" if is_compiled() else "not compiled: no C compiler could build it when viper was installed"
        sys.stdout.write(f"viper {found} (pass over rows: {rows})\n")
        raise typer.Exit


@app.callback()
def viper(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", callback=show_version)] = False,
) -> None:
    """Bayesian classification with honest uncertainty: probabilities, and how sure they are."""


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with one line on stderr and an exit code for whatever goes wrong."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        show_warnings_as_notes()
        try:
            command(*args, **options)
            sys.stdout.flush()
        except (UsageError, typer.Exit):
            raise
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing to flush into at the end
            raise typer.Exit(CLOSED_PIPE) from None
        except (Exception, KeyboardInterrupt) as error:
            if os.environ.get("VIPER_TRACEBACK"):
                raise
            text, code = verdict(error)
            complain(text)
            raise typer.Exit(code) from None

    return run


def verdict(error: BaseException) -> tuple[str, int]:
    """What to say, and the exit code."""
    from viper.errors import OutputError

    if SIGNALS or isinstance(error, KeyboardInterrupt):  # libraries in C turn the interrupt into errors of their own
        return "interrupted; no partial output is left.", SIGNALLED + (SIGNALS or [signal.SIGINT])[-1]
    if isinstance(error, OutputError):
        return one_line(error), OUTPUT
    if isinstance(error, ValueError | OSError | ImportError):
        return one_line(error), INPUT
    if isinstance(error, MemoryError):
        return "the data need more memory than there is. Use fewer columns, or --covariance diagonal.", INPUT
    fault = f"this is a fault of viper: {type(error).__name__}: {one_line(error)}"
    return f"{fault} Please report it; VIPER_TRACEBACK=1 shows where.", FAULT


SIGNALS: list[int] = []  # received, the last one last


def interrupt(number: int, frame: Any) -> NoReturn:
    """Ctrl-C and SIGTERM: leave in order, so that no partial output stays behind."""
    SIGNALS.append(number)
    raise KeyboardInterrupt


def one_line(error: BaseException) -> str:
    """The message, with options as they are written here."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"\b(missing|covariance|bound|solver)='(\w+)'", r"--\1 \2", text)
    return text.replace("overwrite=True", "--force")


def complain(text: str) -> None:
    """One line on stderr."""
    screen = console(stderr=True)
    screen.print("[bold red]viper:[/] ", end="")
    screen.print(text, markup=False, soft_wrap=True)


for module in (fit, predict, evaluate, summary, compare, bound, report, demo, reproduce):
    name = module.__name__.rpartition(".")[2]
    app.command(name, epilog="\n\n".join(["[bold]Examples[/]", *module.EXAMPLES]))(guarded(getattr(module, name)))


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the program and exit."""
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        code = app(args=arguments, prog_name="viper", standalone_mode=False)
    except UsageError as error:
        where = error.ctx.command_path if error.ctx else "viper"
        complain(f"{error.format_message().rstrip('.')}. See: {where} --help")
        code = USAGE
    except typer.Exit as done:
        code = done.exit_code
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted; no partial output is left.")
        code = SIGNALLED + signal.SIGINT
    sys.exit(code if isinstance(code, int) else 0)
