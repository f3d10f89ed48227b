"""Runs cases in worker processes, and names what became of each.

right     the result is what it should be
line      one clear line says what is wrong
wrong     a result that is not right, without a word
raw       an exception of Python or of a library, or more than one line
crash     the process died
hang      more than 5 seconds of computing
memory    more than 500 MB

A worker runs many cases, since importing takes longer than most of them. It is forked from a process that has imported
everything, and replaced when it dies or hangs. A case is
repeated by its seed: `python -m hostile models --seed 7 -n 1`.
"""

import contextlib
import io
import json
import os
import random
import resource
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OUTCOMES = ("right", "line", "wrong", "raw", "crash", "hang", "memory")
GOOD = ("right", "line")
MOST_SECONDS = 5.0  # of computing, since other processes may be busy too
MOST_WAITING = 120.0  # seconds until a worker is given up
MOST_MEMORY = 500e6  # bytes that a case may add
ADDRESS_SPACE = 4 << 30  # bytes beyond those at the start, after which a worker gets no more
LONGEST_LINE = 1500  # characters


class SilentlyWrong(AssertionError):
    """A result that is not right, without a word."""


@dataclass
class Tally:
    """Outcomes of one kind of cases, and those that are not good."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, report: dict[str, Any]) -> None:
        self.counts[report["outcome"]] += 1
        if report["outcome"] not in GOOD:
            self.faults.append(report)

    @property
    def row(self) -> str:
        cells = " ".join(f"{self.counts[outcome]:>7,}" for outcome in OUTCOMES)
        return f"{self.name:<10} {sum(self.counts.values()):>7,} {cells} {self.seconds:>7.0f} s"


def heading() -> str:
    return f"{'':<10} {'cases':>7} " + " ".join(f"{outcome:>7}" for outcome in OUTCOMES)


def run_cases(module: Any, folder: Path, seeds: range, workers: int = 1) -> Tally:
    """Run the cases of all seeds and return what became of them."""
    tally = Tally(module.__name__.rpartition(".")[2])
    began = time.monotonic()
    material = module.prepare(folder)
    shares = [list(seeds)[i::workers] for i in range(workers)]
    live = [Worker(module, material, folder / f"worker{i}", share) for i, share in enumerate(shares) if share]
    while live:
        select.select([worker.pipe for worker in live], [], [], 0.5)
        for worker in live:
            for report in worker.reports():
                tally.add(report)
        live = [worker for worker in live if worker.pending]
    tally.seconds = time.monotonic() - began
    return tally


class Worker:
    """A process that runs cases one after the other, and is started again when it dies."""

    def __init__(self, module: Any, material: Any, folder: Path, seeds: list[int]) -> None:
        self.module, self.material, self.folder, self.pending = module, material, folder, seeds
        folder.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        sys.stdout.flush()
        end, start = os.pipe()
        self.process = os.fork()
        if not self.process:
            try:
                os.close(end)
                work(self.module, self.material, self.folder, self.pending, start)
            finally:
                os._exit(0)
        os.close(start)
        self.pipe, self.partial, self.since = end, b"", time.monotonic()

    def reports(self) -> Iterator[dict[str, Any]]:
        """What has been reported since; a case that killed its worker, or will not end, is reported here."""
        if select.select([self.pipe], [], [], 0)[0]:
            part = os.read(self.pipe, 1 << 20)
            if not part:
                yield from self.replace("crash")
                return
            *lines, self.partial = (self.partial + part).split(b"\n")
            for line in lines:
                self.pending.pop(0)
                self.since = time.monotonic()
                yield json.loads(line)
        elif self.pending and time.monotonic() - self.since > MOST_WAITING:
            os.kill(self.process, signal.SIGKILL)
            yield from self.replace("hang")

    def replace(self, outcome: str) -> Iterator[dict[str, Any]]:
        os.close(self.pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        if self.pending:
            detail = f"the worker ended with status {status}"
            yield {"seed": self.pending.pop(0), "outcome": outcome, "detail": detail}
        if self.pending:
            self.start()


def work(module: Any, material: Any, folder: Path, seeds: list[int], pipe: int) -> None:
    """Run the cases of all seeds and report each of them through the pipe."""
    if getattr(module, "RLIMITS", True):
        limit = memory("VmSize") + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    try:
        for seed in seeds:
            report = run_one(module, material, seed)
            os.write(pipe, json.dumps(report).encode() + b"\n")
    finally:
        getattr(module, "close", lambda: None)()


def run_one(module: Any, material: Any, seed: int) -> dict[str, Any]:
    """Run the case of one seed and name its outcome."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins again
    before, began = memory("VmRSS"), time.process_time()
    detail = ""
    try:
        outcome = module.run_case(material, seed)
        if isinstance(outcome, tuple):
            outcome, detail = outcome
    except MemoryError:
        outcome, detail = "memory", "MemoryError"
    except Exception as error:  # noqa: BLE001
        outcome, detail = outcome_of(error)
    seconds, added = time.process_time() - began, memory("VmHWM") - before
    if outcome in GOOD and seconds > MOST_SECONDS:
        outcome, detail = "hang", f"{seconds:.1f} s"
    elif outcome in GOOD and added > MOST_MEMORY:
        outcome, detail = "memory", f"{added / 1e6:.0f} MB"
    return {"seed": seed, "outcome": outcome, "detail": detail}


def memory(name: str) -> int:
    """A figure of this process from Linux, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


# --- outcomes ---


def outcome_of(error: Exception) -> tuple[str, str]:
    """Name what an exception is to the user who meets it."""
    if isinstance(error, SilentlyWrong):
        return "wrong", str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:300]}"
    return ("line" if is_clear(error) else "raw"), where


def is_clear(error: Exception) -> bool:
    """Whether an exception says in one line of plain text what is wrong with what the user gave."""
    text = str(error)
    if text.startswith("The feature names should match those that were passed during fit."):
        return True  # scikit-learn's message, which its own checks ask for
    wording = any(word in text for word in (" must ", "; got ", " needs ", " cannot "))
    return isinstance(error, ValueError | TypeError | ImportError) and wording and is_one_line(text)


def is_one_line(text: str) -> bool:
    return text.isprintable() and 0 < len(text) <= LONGEST_LINE


def run_command(*arguments: Any) -> tuple[int, str, str]:
    """Run the command line in this process: exit code, standard output, standard error."""
    from viper.cli import main
    from viper.cli.signals import RECEIVED

    RECEIVED.clear()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    return code, out.getvalue(), err.getvalue()


def outcome_of_command(code: int, err: str) -> tuple[str, str]:
    """Name what a command that did not succeed is to its user: one line that begins with "viper:" and tells a fault."""
    lines = [line for line in err.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("viper:")]
    if code in (2, 3, 4) and len(told) == 1 and lines[-1] == told[0] and is_one_line(told[0]):
        return "line", told[0]
    return "raw", f"exit {code}: {err[-400:]}"


def choose(generator: random.Random, options: dict[Callable[..., Any], float]) -> Callable[..., Any]:
    """One of the functions, by their weights."""
    return generator.choices(list(options), list(options.values()))[0]
