"""Progress of long fits, on stderr."""

import sys
import time
from typing import Any

from viper.solver import Iteration

PATIENCE = 2.0  # seconds before anything is shown


class Progress:
    """Shows iterations: all of them if `verbose` is True, none if False; if "auto", on a terminal after two seconds."""

    def __init__(self, verbose: Any) -> None:
        self.verbose = verbose
        self.open_line = False
        self.began, self.seen = time.perf_counter(), 0

    def __call__(self, step: Iteration) -> None:
        always = self.verbose != "auto" and bool(self.verbose)
        if not always and (self.verbose != "auto" or step.seconds < PATIENCE or not sys.stderr.isatty()):
            return
        text = (
            f"{step.seconds:7.1f} s  {step.rows:>11,} rows  objective {step.objective:.6f}  moved {step.move:.1e} nats"
        )
        if self.seen:
            rate = self.seen / (time.perf_counter() - self.began)
            text += f"  pass {self.seen / step.rows:.1f}  {rate:,.0f} rows/s"
        sys.stderr.write(text + "\n" if always else "\r" + text)
        sys.stderr.flush()
        self.open_line = not always

    def rows_done(self, rows: int) -> None:
        """Count rows that were read."""
        self.seen += rows

    def close(self) -> None:
        if self.open_line:
            sys.stderr.write("\n")
