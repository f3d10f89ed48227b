"""`viper`: from a CSV to probabilities with intervals, in a terminal.

Exit codes: 0 done; 1 a fault of viper's; 2 a wrong command line; 3 input that cannot be used; 4 output that cannot be
written; 130 interrupted; 141 the reader of a pipe went away.
"""

from viper.cli.app import main

__all__ = ["main"]
