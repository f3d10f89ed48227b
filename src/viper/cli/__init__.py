"""`viper`: from a CSV to probabilities with intervals, in a terminal.

Exit codes: 0 success; 1 a bug in viper; 2 a wrong command line; 3 input that cannot be used; 4 output that cannot be
written; 5 some rows have no prediction; 130 interrupted; 143 terminated; 141 broken pipe.
"""

import atexit
import gc
import sys
from typing import NoReturn

from viper.cli.signals import catch_signals, exit_code

__all__ = ["main"]

FEWEST_NEW_OBJECTS = 50_000  # between garbage collections; imports create far more, and none of them is garbage


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the program and exit. Signals are caught before the first slow import.

    Garbage collection, during the imports and at exit, would take a third of the time of a short command.
    """
    catch_signals()
    gc.set_threshold(FEWEST_NEW_OBJECTS, 10, 10)
    atexit.register(gc.freeze)  # no collection at exit: the process frees everything
    try:
        from viper.cli.app import run_program

        run_program(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("viper: interrupted; no partial output is left.\n")
        sys.exit(exit_code())
