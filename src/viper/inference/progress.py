"""Report the progress of long fits: on stderr, and to scikit-learn's callbacks (`set_callbacks`, 1.9 and later)."""

import sys
import time
from collections.abc import Callable
from functools import wraps
from threading import Timer
from typing import Any, TypeVar, cast

from viper.inference.newton import Iteration

try:
    from sklearn.callback import CallbackSupportMixin, with_callbacks
except ImportError:  # scikit-learn < 1.9
    CallbackSupportMixin, with_callbacks = object, None

SILENT_SECONDS = 2.0  # seconds before anything is shown
REFRESH_SECONDS = 0.1  # seconds between two updates of the line


class Progress:
    """Shows all iterations if `verbose` is True, none if False; with "auto", a line on a terminal after two seconds.

    It is called with each `Iteration`. A source with slow passes may also report its blocks to `rows_done`. Every
    iteration is a task of `tasks`, if given. `rows` is the number of rows in one pass, `passes` the number of passes if
    known.
    """

    def __init__(
        self, verbose: Any, tasks: "Tasks | None" = None, rows: int | None = None, passes: int | None = None
    ) -> None:
        self.verbose, self.tasks, self.rows, self.passes = verbose, tasks, rows, passes
        self.began = time.perf_counter()
        self.rows_read = 0  # so far, in all passes
        self.by_block = False
        self.last: Iteration | None = None
        self._line: Any = None  # rich's live display, once there is something to show
        self._drawn = 0.0
        self._waiting: Timer | None = None

    def __call__(self, step: Iteration) -> None:
        self.last = step
        self.rows = max(self.rows or 0, step.rows)
        if not self.by_block:
            self.rows_read += step.rows
        if self.tasks is not None:
            self.tasks.next()
        if self.verbose != "auto" and self.verbose:
            rate, passes = self.rows_read / max(self.seconds, 1e-9), self.rows_read / self.rows
            sys.stderr.write(
                f"{step.seconds:7.1f} s  {step.rows:>11,} rows  objective {step.objective:.6f}  "
                f"moved {step.move:.1e} nats  pass {passes:.1f}  {rate:,.0f} rows/s\n"
            )
            sys.stderr.flush()
        self._show()

    def rows_done(self, rows: int) -> None:
        """Count `rows` more rows as read."""
        self.by_block = True
        self.rows_read += rows
        self._show()

    def expect(self, what: str) -> None:
        """Show `what` the fit is doing if nothing is reported in the first seconds."""
        if self.verbose == "auto" and sys.stderr.isatty():
            self._waiting = Timer(SILENT_SECONDS, self._draw, [what])
            self._waiting.daemon = True
            self._waiting.start()

    def close(self) -> None:
        """Remove the line and end the last task."""
        self._stop_waiting()
        if self._line is not None:
            self._line.stop()
            self._line = None
        if self.tasks is not None:
            self.tasks.close()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def text(self) -> str:
        """Seconds, passes, rows per second, and the state of the solver."""
        seconds = self.seconds
        parts = [f"{seconds:.0f} s"]
        if self.rows:
            of_all = f" of {self.passes:,}" if self.passes else ""
            parts.append(f"pass {self.rows_read / self.rows:.1f}{of_all}")
        parts.append(f"{self.rows_read / max(seconds, 1e-9):,.0f} rows/s")
        if self.last is not None:
            parts.append(f"objective {self.last.objective:.3f}")
            parts.append(f"moved {self.last.move:.0e} nats")
        return "  ".join(parts)

    def _show(self) -> None:
        """Draw the line of verbose="auto", at most ten times a second."""
        now = self.seconds
        early = now < SILENT_SECONDS or now - self._drawn < REFRESH_SECONDS
        if self.verbose != "auto" or early or not sys.stderr.isatty():
            return
        self._stop_waiting()
        self._drawn = now
        self._draw(self.text)

    def _draw(self, text: str) -> None:
        if self._line is None:
            from rich.console import Console
            from rich.status import Status

            self._line = Status(text, console=Console(file=sys.stderr))
            self._line.start()
        self._line.update(text)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting.join()
            self._waiting = None


class StepProgress(Progress):
    """Shows how many of some equal steps are done, on a terminal and after two seconds."""

    def __init__(self, verbose: Any, title: str) -> None:
        super().__init__(verbose)
        self.title, self.done, self.total = title, 0, 0

    def step(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        self._show()

    @property
    def text(self) -> str:
        return f"{self.seconds:.0f} s  {self.title} {self.done} of {self.total}"


# ---------------------------------------------------------------------------------------------------------------------
# scikit-learn's callbacks


class Callbacks(CallbackSupportMixin):
    """Lets an estimator accept callbacks; does nothing before scikit-learn 1.9."""


class Tasks:
    """The iterations of a fit as subtasks of its callback context. One is always open, so the last one ends empty."""

    def __init__(self, estimator: Any) -> None:
        self.estimator, self.context = estimator, estimator._callback_fit_ctx
        self.open: Any = None
        self._begin()

    def _begin(self) -> None:
        self.open = self.context.subcontext(task_name="iteration")
        self.open.call_on_fit_task_begin(estimator=self.estimator)

    def next(self) -> None:
        """End the task of this iteration and begin the next."""
        self.open.call_on_fit_task_end(estimator=self.estimator)
        self._begin()

    def close(self) -> None:
        self.open.call_on_fit_task_end(estimator=self.estimator)


def tasks_of(estimator: Any) -> Tasks | None:
    """Return the tasks to which this fit reports its iterations, or None if no callback is set."""
    return Tasks(estimator) if hasattr(estimator, "_callback_fit_ctx") else None


FitMethod = TypeVar("FitMethod", bound=Callable[..., Any])


def as_task(fit: FitMethod) -> FitMethod:
    """Wrap `fit` so that it also calls the estimator's callbacks at its beginning and end."""
    if with_callbacks is None:
        return fit

    @wraps(fit)
    def reported(estimator: Any, X: Any, y: Any = None, *args: Any, **metadata: Any) -> Any:
        if not getattr(estimator, "_skl_callbacks", None):
            return fit(estimator, X, y, *args, **metadata)
        context = estimator._init_callback_context(max_subtasks=None)
        context.call_on_fit_task_begin(estimator=estimator, X=X, y=y, metadata=metadata)
        fitted = fit(estimator, X, y, *args, **metadata)
        # `dict`: nothing needs to be added to the estimator for it to predict
        context.call_on_fit_task_end(estimator=estimator, X=X, y=y, metadata=metadata, reconstruction_attributes=dict)
        return fitted

    return cast(FitMethod, with_callbacks(reported))
