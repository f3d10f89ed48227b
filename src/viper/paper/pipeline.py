"""run → csv → table → figure; each step can also be done alone."""

import importlib.metadata
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from viper.paper.artefact import Artefact, Config, Job, Request, Row
from viper.paper.records import Records
from viper.paper.tables import ResultTable

if TYPE_CHECKING:
    import pandas

STEPS = ("run", "table", "figure")


@dataclass
class Outcome:
    """What a call produced: the number of runs done now and in total, the tables, and the files written.

    If the artefact was skipped, `skipped` says why.
    """

    artefact: str
    made: int = 0
    runs: int = 0
    tables: list[ResultTable] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    skipped: str | None = None


def reproduce_one(artefact: Artefact, request: Request, jobs: int, out: Path, step: str | None) -> Outcome:
    """Do the requested step, or all three in order."""
    records = Records(out / artefact.name, artefact)
    outcome = Outcome(artefact.name)
    if step in (None, "run"):
        outcome.made = make_runs(artefact, request, jobs, records)
        outcome.files.append(records.csv)
    outcome.runs = records.count()
    if step == "run":
        return outcome
    frame, config = finished_runs(artefact, out), records.config()
    if step in (None, "table"):
        outcome.tables = artefact.tables(frame, config)
        for table in outcome.tables:
            table.show()
            outcome.files += table.write(records.folder)
    if step in (None, "figure"):
        from viper.paper.figures import figure_style, save_figure

        with figure_style():
            for name, figure in artefact.figures(frame, config).items():
                outcome.files += save_figure(figure, records.folder / name)
    return outcome


def finished_runs(artefact: Artefact, out: Path) -> "pandas.DataFrame":
    """The finished runs of an artefact, followed by those of the artefacts joined to it."""
    import pandas

    frame, *others = (Records(out / one.name, one).frame() for one in (artefact, *artefact.joined))
    if frame.empty:
        raise FileNotFoundError(
            f"tables and figures need finished runs; got none in {out / artefact.name}. "
            f"Run `viper reproduce {artefact.name}` first."
        )
    return pandas.concat([frame, *(other for other in others if not other.empty)], ignore_index=True)


# ---------------------------------------------------------------------------------------------------------------------
# Runs


class Done(NamedTuple):
    """A finished run, as returned by the process that did it."""

    job: Job
    rows: list[Row]
    seconds: float
    versions: str


def make_runs(artefact: Artefact, request: Request, jobs: int, records: Records) -> int:
    """Do the missing runs and return their number."""
    config = artefact.configure(request)
    with records.open(config) as finished:
        missing = [job for job in artefact.jobs(request) if records.key(job) not in finished]
        if not missing:
            return 0
        with progress_bar(artefact, missing) as advance:
            for done in completed_runs(artefact, missing, config, request.data, jobs):
                records.append(*done)
                advance(done.job)
    return len(missing)


def completed_runs(artefact: Artefact, todo: list[Job], config: Config, data: Path | None, jobs: int) -> Iterator[Done]:
    """Do runs in this process, in others, or on the cluster of an active Dask client; yield them as they finish."""
    if jobs == 1 and not has_dask_client():
        yield from (make_run(artefact, job, config, data) for job in todo)
        return
    from joblib import Parallel, delayed, parallel_config

    with parallel_config("dask") if has_dask_client() else nullcontext():
        # batches of one, so that each run is on disk as soon as it is done
        pool = Parallel(n_jobs=-1 if has_dask_client() else jobs, batch_size=1, return_as="generator_unordered")
        parent = None if has_dask_client() else os.getpid()
        yield from pool(delayed(make_run)(artefact, job, config, data, parent) for job in todo)


def has_dask_client() -> bool:
    """Whether a Dask client is active in this process."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return False
    try:
        distributed.default_client()
    except ValueError:
        return False
    return True


@cache
def exit_with_parent(parent: int) -> None:
    """End this process when the one that started it ends, even if that one was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    if os.getppid() == parent:
        threading.Thread(target=watch, daemon=True).start()


def make_run(artefact: Artefact, job: Job, config: Config, data: Path | None, parent: int | None = None) -> Done:
    """Do one run on one thread."""
    import torch
    from threadpoolctl import threadpool_limits

    if parent is not None:
        exit_with_parent(parent)
    threads = torch.get_num_threads()
    start = time.perf_counter()
    try:
        torch.set_num_threads(1)
        with threadpool_limits(1):
            rows = list(artefact.run(job, config, data))
    except Exception as error:
        described = ", ".join(f"{key} = {value}" for key, value in job.items())
        error.add_note(f"In run {described} of {artefact.name}. Finished runs are kept: the same command continues.")
        raise
    finally:
        torch.set_num_threads(threads)
    return Done(job, rows, time.perf_counter() - start, library_versions())


def library_versions() -> str:
    """The package versions used by a run."""
    import numpy
    import torch

    try:
        ours = importlib.metadata.version("vi-per")
    except importlib.metadata.PackageNotFoundError:
        ours = "source"
    return f"viper {ours} torch {torch.__version__} numpy {numpy.__version__}"


@contextmanager
def progress_bar(artefact: Artefact, todo: list[Job]) -> Iterator[Any]:
    """A bar with the time left, in which each run counts as much as it is expected to cost."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[made]}/{task.fields[count]} runs"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        total = sum(map(artefact.cost, todo))
        task = bar.add_task(artefact.name, total=total, made=0, count=len(todo))
        made = 0

        def advance(job: Job) -> None:
            nonlocal made
            made += 1
            bar.update(task, advance=artefact.cost(job), made=made)

        yield advance
