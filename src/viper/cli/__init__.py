"""`viper`: from a CSV to probabilities with intervals, in a terminal.

Exit codes: 0 success; 1 a bug in viper; 2 a wrong command line; 3 input that cannot be used; 4 output that cannot be
written; 5 some rows have no prediction; 130 interrupted (143 by SIGTERM); 141 the reader of a pipe is gone.
"""

import sys
from typing import NoReturn

from viper.cli.signals import catch_signals, exit_code

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the program and exit. Signals are caught before the first slow import."""
    catch_signals()
    try:
        from viper.cli.app import run_program

        run_program(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("viper: interrupted; no partial output is left.\n")
        sys.exit(exit_code())
