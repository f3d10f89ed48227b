"""Runs that are killed at any moment, by SIGKILL or by a signal that can be caught.

Whatever was to be written is there whole, as if nothing had happened, or not at all. A fit with a checkpoint continues
and ends with the same posterior to the last bit. A signal that can be caught leaves no temporary file, says one line,
and ends with 128 plus its number.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import viper
from hostile.harness import SilentlyWrong, run_command

ROWS = 4_000
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM)


class Material(NamedTuple):
    """Files to work on, what comes of them undisturbed, and how long that takes."""

    table: Path
    model: Path
    coefficients: np.ndarray
    outputs: dict[str, bytes]
    seconds: dict[str, float]


def commands(table: Path, model: Path) -> dict[str, tuple[Any, ...]]:
    """The commands to kill, by the file that they write."""
    return {
        "out.csv": ("predict", model, table, "--out", "out.csv"),
        "out.csv.gz": ("predict", model, table, "--out", "out.csv.gz"),
        "out.parquet": ("predict", model, table, "--out", "out.parquet"),
        "out.viper": ("fit", table, "--target", "y", "--cv", "0", "--out", "out.viper"),
    }


def prepare(folder: Path) -> Material:
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # so that a model file is the same whenever it is written
    rng = np.random.default_rng(3)
    table = pd.DataFrame(rng.normal(size=(ROWS, 6)), columns=list("abcdef"))
    table["y"] = (rng.random(ROWS) < 1 / (1 + np.exp(-table["a"]))).astype(int)
    path, model = folder / "table.csv", folder / "model.viper"
    table.to_csv(path, index=False)
    here = Path.cwd()
    os.chdir(folder)
    try:
        run_command("fit", path, "--target", "y", "--cv", "0", "--out", model)
        outputs, seconds = {}, {}
        for name, command in commands(path, model).items():
            run_command(*command, "--force")
            began = time.monotonic()
            code, _, err = run_command(*command, "--force")
            assert code == 0, err
            outputs[name], seconds[name] = Path(name).read_bytes(), time.monotonic() - began
            Path(name).unlink()
        began = time.monotonic()
        fitted = fit_with_checkpoint(path, Path("checkpoint"))
        seconds["checkpoint"] = time.monotonic() - began
    finally:
        os.chdir(here)
    return Material(path, model, fitted.posterior_.mean.numpy(), outputs, seconds)


def fit_with_checkpoint(table: Path, folder: Path) -> Any:
    model = viper.VariationalLogisticRegression(verbose=False)
    return model.fit(viper.Files(str(table), target="y"), checkpoint=folder)


def run_case(material: Material, seed: int) -> tuple[str, str]:
    generator = random.Random(seed)
    for old in Path().iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    if generator.random() < 0.3:
        return killed_fit(material, generator)
    return killed_command(material, generator)


def killed_fit(material: Material, generator: random.Random) -> tuple[str, str]:
    """Kill a fit one to three times, then let it end: the posterior is the same to the last bit."""
    folder = Path("checkpoint")
    for _ in range(generator.choice([1, 1, 2, 3])):
        delay = generator.uniform(0.0, 1.1) * material.seconds["checkpoint"]
        in_child(lambda: fit_with_checkpoint(material.table, folder) and None, signal.SIGKILL, delay)
    fitted = fit_with_checkpoint(material.table, folder)
    if not np.array_equal(fitted.posterior_.mean.numpy(), material.coefficients):
        raise SilentlyWrong("a resumed fit ends elsewhere")
    if folder.exists():
        raise SilentlyWrong("the checkpoint of a complete fit is still there")
    return "right", ""


def killed_command(material: Material, generator: random.Random) -> tuple[str, str]:
    name, command = generator.choice(list(commands(material.table, material.model).items()))
    target, number = Path(name), generator.choice(SIGNALS)
    if before := generator.random() < 0.3:
        target.write_bytes(b"what was there")
        command = (*command, "--force")
    delay = generator.uniform(0.0, 1.2) * material.seconds[name]
    code, err = in_child(lambda: run_and_exit(command), number, delay)
    contents = target.read_bytes() if target.exists() else None
    whole = is_same(contents, material.outputs[name], name)
    if not whole and contents != (b"what was there" if before else None):
        raise SilentlyWrong(f"{name} after signal {int(number)}: {len(contents or b'')} bytes that are neither")
    if number == signal.SIGKILL:
        return "right", ""
    left = [path.name for path in Path().iterdir() if path not in (target, Path("stderr"))]
    if left:
        raise SilentlyWrong(f"{left} are left behind by signal {int(number)}")
    if code == 0 and whole:
        return "right", ""
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith("note:")]
    if code == 128 + number and len(lines) == 1 and lines[0].startswith("viper: interrupted"):
        return "line", ""
    return "raw", f"{name}, signal {int(number)}: exit {code}, {err[-300:]}"


def is_same(contents: bytes | None, expected: bytes, name: str) -> bool:
    """Whether the output is whole. The times in a model file differ; it is whole if it loads."""
    if contents is None or not name.endswith(".viper"):
        return contents == expected
    try:
        viper.load(name)
    except ValueError:
        return False
    return True


def run_and_exit(command: tuple[Any, ...]) -> None:
    """The command with the process's own output, as a shell runs it."""
    from viper.cli import main

    main([str(argument) for argument in command])


def in_child(function: Callable[[], None], number: int, delay: float) -> tuple[int, str]:
    """Run a function in a child, and send it a signal after a while: its exit code and what it wrote to stderr."""
    from viper.cli.signals import catch_signals

    end, start = os.pipe()
    process = os.fork()
    if not process:
        code = 1
        try:
            out, err = os.open(os.devnull, os.O_WRONLY), os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(err, 2)
            catch_signals()
            os.write(start, b"x")
            function()
            code = 0
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 0
        finally:
            os._exit(code)
    os.close(start)
    os.read(end, 1)
    os.close(end)
    time.sleep(delay)
    os.kill(process, number)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return status, Path("stderr").read_text(encoding="utf-8", errors="replace") if Path("stderr").exists() else ""
