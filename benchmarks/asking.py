"""How `viper.Experiment` should choose questions: the error after 20 and 40 answers, by acquisition function.

Simulated yes/no answers on three functions of two inputs and one of four, none of which the comparison with other
packages uses. "threshold": share of the space on the wrong side of p = 0.75; "maximise": largest p less that of the
point recommended; "learn": mean absolute error of p. "sobol" spreads its questions evenly, "random" at random, with the
same model.

"compare" asks for pairs by the expected best averaged over hyperparameters, or by that of their mixture. The error is
the utility that the recommended item lacks, in sds of the utility over the cube.

"prefer" compares models by the same error, after 20 answers about pairs of a Sobol sequence.

Every (goal, world, acquisition or model, seed) is one line of a JSON-lines file, one file per goal, in `results/asking`
or `--scratch`: a run does what is missing there, seed by seed.
"""

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import qmc

import viper
from benchmarks.runs import read_runs
from benchmarks.table import Page, Table, machine
from viper.decisions.experiment import PREFERENCE_MODEL
from viper.decisions.preferences import fit_preferences
from viper.inference.threads import one_thread

THRESHOLD = 0.75
CHECKED = (20, 40)  # answers after which errors are taken
SEEDS = 10
TEST_POINTS = 4_000


class World(NamedTuple):
    """Log-odds on a unit cube."""

    columns: int
    log_odds: Callable[[np.ndarray], np.ndarray]


def hill(X: np.ndarray, centre: list[float], width: float) -> np.ndarray:
    return np.exp(-0.5 * np.square((X - np.array(centre)) / width).sum(1))


WORLDS = {
    "ridge": World(2, lambda X: 4.0 * np.sin(6.0 * X[:, 0]) + 6.0 * X[:, 1] - 2.0),
    "hill": World(2, lambda X: 7.0 * hill(X, [0.3, 0.65], 0.22) - 3.5),
    "two hills": World(2, lambda X: 4.5 * hill(X, [0.2, 0.25], 0.15) + 6.0 * hill(X, [0.75, 0.7], 0.12) - 3.0),
    "four inputs": World(4, lambda X: 5.0 * X[:, 0] + 4.0 * np.sin(4.0 * X[:, 1]) - 4.0 * X[:, 2] - 1.5),
}
GOALS = {  # the worlds and the acquisition functions of each
    "threshold": (
        ("ridge", "hill", "four inputs"),
        ("straddle", "look-ahead", "entropy", "sobol", "random"),
    ),
    "maximise": (
        ("hill", "two hills"),
        ("thompson", "ucb", "maximum-information", "improvement", "sobol", "random"),
    ),
    "learn": (("ridge", "hill"), ("look-ahead", "information", "sobol", "random")),
}


def quadratic(X: np.ndarray) -> np.ndarray:
    return -20.0 * np.square(X[:, 0] - 0.6) - 6.0 * np.square(X[:, 1] - 0.3)


def valley(X: np.ndarray) -> np.ndarray:
    """Rosenbrock's function on a logarithmic scale."""
    z = 3.0 * X - 1.2
    return -np.log1p((20.0 * np.square(z[:, 1:] - np.square(z[:, :-1])) + np.square(1.0 - z[:, :-1])).sum(1))


def four_wells(X: np.ndarray) -> np.ndarray:
    """Styblinski and Tang's function."""
    z = 8.0 * X - 4.0
    return (16.0 * z**2 - z**4 - 5.0 * z).sum(1)


def three_hills(X: np.ndarray) -> np.ndarray:
    lower = 3.0 * hill(X, [0.2, 0.3, 0.7, 0.6], 0.25) + 2.5 * hill(X, [0.8, 0.2, 0.5, 0.8], 0.3)
    return lower + 4.0 * hill(X, [0.7, 0.8, 0.3, 0.2], 0.2)


UTILITIES = {
    "wave, 2 inputs": World(2, lambda X: 2.0 * np.sin(4.0 * X[:, 0]) + X[:, 1]),
    "quadratic, 2": World(2, quadratic),
    "four wells, 2": World(2, four_wells),
    "valley, 3": World(3, valley),
    "line, 4": World(4, lambda X: X @ np.array([3.0, -2.0, 1.0, 0.5])),
    "hill, 4": World(4, lambda X: hill(X, [0.3, 0.6, 0.75, 0.4], 0.22)),
}
COMPARED = {
    "wave, 2 inputs": UTILITIES["wave, 2 inputs"],
    "three hills, 4": World(4, three_hills),
}
WAYS = ("best", "best-mixture")
MODELS: dict[str, dict[str, Any]] = {
    "as in an experiment": {},
    "longer lengthscales": {"priors": "default"},
    "and a linear part": {"priors": "default", "mean": "linear"},
}
PAIRS = 20
CERTAINTY = 3.4  # log-odds of an answer by the difference in sds
MODEL_SEEDS = 20  # of comparisons for preferences
KEPT = Path(__file__).parent / "results" / "asking"


def error_of(experiment: viper.Experiment, goal: str, points: np.ndarray, p: np.ndarray, world: World) -> float:
    if goal == "maximise":
        found = 1.0 / (1.0 + np.exp(-world.log_odds(experiment.best().x[None])[0]))
        return float(p.max() - found)
    mean = experiment.estimate(points).mean
    return float(((mean > THRESHOLD) != (p > THRESHOLD)).mean() if goal == "threshold" else np.abs(mean - p).mean())


def play(goal: str, name: str, acquisition: str, seed: int) -> dict[str, Any]:
    """Errors by number of answers, and mean processor seconds of an ask with the fit before it."""
    most = CHECKED[-1]
    world = WORLDS[name]
    random = np.random.default_rng([31, seed])
    points = random.random((TEST_POINTS, world.columns))
    p = 1.0 / (1.0 + np.exp(-world.log_odds(points)))
    given = acquisition in ("sobol", "random")
    experiment = viper.Experiment(
        [(0.0, 1.0)] * world.columns,
        goal,
        threshold=THRESHOLD if goal == "threshold" else None,
        acquisition="auto" if given else acquisition,
        initial=most if acquisition == "sobol" else None,
        random_state=seed,
    )
    errors, times = {}, []
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(most):
            start = time.process_time()
            x = random.random(world.columns) if acquisition == "random" else experiment.ask()
            between = time.process_time()
            answer = random.random() < 1.0 / (1.0 + np.exp(-world.log_odds(x[None])[0]))
            experiment.tell(x, answer)
            if k >= experiment.initial:
                times.append(between - start)
            if k + 1 in CHECKED:
                errors[str(k + 1)] = error_of(experiment, goal, points, p, world)
    return {"errors": errors, "seconds": float(np.mean(times or [0.0]))}


class Taste(NamedTuple):
    """A utility, in sds over the cube, and its largest value."""

    utility: Callable[[np.ndarray], np.ndarray]
    largest: float

    def prefers_second(self, pair: np.ndarray, luck: float) -> bool:
        gain = CERTAINTY * float(np.diff(self.utility(pair))[0])
        return luck < 1.0 / (1.0 + np.exp(-gain))

    def lack(self, experiment: viper.Experiment) -> float:
        return self.largest - float(self.utility(experiment.best().x[None])[0])


def taste_of(world: World) -> Taste:
    many = qmc.Sobol(world.columns, seed=9).random(1 << 14)
    f = world.log_odds(many)
    return Taste(lambda X: (world.log_odds(X) - f.mean()) / f.std(), float((f.max() - f.mean()) / f.std()))


def compare(name: str, way: str, seed: int) -> dict[str, Any]:
    """What the recommended item lacks, where the experiment asks."""
    world = COMPARED[name]
    taste, random = taste_of(world), np.random.default_rng([41, seed])
    experiment = viper.Experiment([(0.0, 1.0)] * world.columns, "prefer", acquisition=way, random_state=seed)
    errors, times = {}, []
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(CHECKED[-1]):
            start = time.process_time()
            pair = np.asarray(experiment.ask())
            times.append(time.process_time() - start)
            experiment.tell(pair, "second" if taste.prefers_second(pair, random.random()) else "first")
            if k + 1 in CHECKED:
                errors[str(k + 1)] = taste.lack(experiment)
    return {"errors": errors, "seconds": float(np.mean(times[experiment.initial :]))}


def lacking(name: str, model: str, seed: int) -> dict[str, Any]:
    """What the recommended item lacks after answers about pairs that are spread evenly."""
    world = UTILITIES[name]
    taste = taste_of(world)
    random = np.random.default_rng([37, seed])
    experiment = viper.Experiment([(0.0, 1.0)] * world.columns, "prefer")
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        experiment._fit = partial(fit_preferences, **PREFERENCE_MODEL | MODELS[model])
        for pair in qmc.Sobol(world.columns, seed=seed).random(2 * PAIRS).reshape(PAIRS, 2, -1):
            experiment.tell(pair, "second" if taste.prefers_second(pair, random.random()) else "first")
        return {"errors": {str(PAIRS): taste.lack(experiment)}, "seconds": 0.0}


# ---------------------------------------------------------------------------------------------------------------------
# Runs

ROWS = GOALS | {"compare": (tuple(COMPARED), WAYS), "prefer": (tuple(UTILITIES), tuple(MODELS))}


def plan(goals: list[str], quick: bool, seeds: int | None) -> Iterator[tuple[str, str, str, int]]:
    """What to run: goals, worlds, acquisition functions or models, and seeds; seed by seed."""
    for goal in goals:
        worlds, words = ROWS[goal]
        usual = MODEL_SEEDS if goal in ("compare", "prefer") else SEEDS
        most = 2 if quick else seeds or usual
        for seed in range(most):
            yield from ((goal, name, word, seed) for name in worlds for word in words)


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The runs of all goals."""
    return [run for file in sorted(folder.glob("*.jsonl")) for run in read_runs(file)]


def fill(folder: Path, wanted: Iterable[tuple[str, str, str, int]]) -> None:
    """Run what is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    done = {(x["goal"], x["world"], x["way"], x["seed"]) for x in read_lines(folder)}
    for goal, name, word, seed in wanted:
        if (goal, name, word, seed) in done:
            continue
        by = {"prefer": lacking, "compare": compare}.get(goal, partial(play, goal))
        found = by(name, word, seed)
        line = {"goal": goal, "world": name, "way": word, "seed": seed, **found}
        with (folder / f"{goal}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{goal}, {name}, {word}, seed {seed}: {found['errors']}", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def goal_table(goal: str, lines: list[dict[str, Any]]) -> Table:
    """Mean errors with their standard errors, of the seeds that all rows have."""
    worlds, words = ROWS[goal]
    found = {(x["world"], x["way"], x["seed"]): x for x in lines if x["goal"] == goal}
    seeds = sorted({x["seed"] for x in found.values()})
    seeds = [s for s in seeds if all((name, word, s) in found for name in worlds for word in words)]
    after = (PAIRS,) if goal == "prefer" else CHECKED
    rows: list[list[str | float]] = []
    for word in words if seeds else ():
        row: list[str | float] = [word]
        for name in worlds:
            for k in after:
                errors = np.array([found[name, word, s]["errors"][str(k)] for s in seeds])
                spread = f" ± {errors.std(ddof=1) / np.sqrt(len(errors)):.3f}" if len(errors) > 1 else ""
                row.append(f"{errors.mean():.3f}{spread}")
        asked = np.mean([found[name, word, s]["seconds"] for name in worlds for s in seeds])
        rows.append(row if goal == "prefer" else [*row, "" if word in ("sobol", "random") else f"{asked:.2f}"])
    if goal == "prefer":
        note = f"Utility that the recommended item lacks beside the best of 16,384, in sds, after {PAIRS} answers"
        return Table(goal, ["model", *UTILITIES], rows, [f"{note}; {len(seeds)} seeds. The first row is the default."])
    columns = ["acquisition", *[f"{name}, {k}" for name in worlds for k in after], "seconds"]
    what = "Utility that the recommended item lacks, in sds; " if goal == "compare" else ""
    return Table(goal, columns, rows, [f"{what}{len(seeds)} seeds."])


def run(
    quick: bool,
    device: str = "cpu",
    tables: str | None = None,
    scratch: str | None = None,
    seeds: int | None = None,
) -> Page:
    wanted = list(ROWS) if tables is None else tables.split(";")
    folder = Path(scratch) if scratch else Path(tempfile.mkdtemp()) if quick else KEPT
    fill(folder, plan(wanted, quick, seeds))
    lines = read_lines(folder)
    made = [table for table in (goal_table(goal, lines) for goal in ROWS) if table.rows]
    made[0].notes += [
        "± standard error of the mean over seeds, which are the same in all rows of a table. Columns: the world, and "
        "the number of answers. Seconds: processor time of an ask, with the fit of the model to all answers, mean over "
        "all trials. The first row of each table is the default.",
        machine(device),
    ]
    return Page("Which question to ask next", made, list(ROWS))
