"""How `viper.Experiment` should choose questions: the error after 20 and 40 answers, by acquisition function.

Simulated yes/no answers on three functions of two inputs and one of four, none of which the comparison with other
packages uses. "threshold": share of the space on the wrong side of p = 0.75; "maximise": largest p less that of the
point recommended; "learn": mean absolute error of p. "sobol" spreads its questions evenly, "random" at random, with the
same model.

"prefer" compares models instead: the utility that the recommended item lacks, in sds of the utility over the cube,
after 20 answers about pairs of a Sobol sequence.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import qmc

import viper
from benchmarks.table import Page, Table, machine
from viper.decisions.experiment import PREFERENCE_MODEL
from viper.decisions.preferences import fit_preferences
from viper.inference.threads import one_thread

THRESHOLD = 0.75
CHECKED = (20, 40)  # answers after which errors are taken
SEEDS = 5
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


UTILITIES = {
    "wave, 2 inputs": World(2, lambda X: 2.0 * np.sin(4.0 * X[:, 0]) + X[:, 1]),
    "quadratic, 2": World(2, quadratic),
    "four wells, 2": World(2, four_wells),
    "valley, 3": World(3, valley),
    "line, 4": World(4, lambda X: X @ np.array([3.0, -2.0, 1.0, 0.5])),
    "hill, 4": World(4, lambda X: hill(X, [0.3, 0.6, 0.75, 0.4], 0.22)),
}
MODELS: dict[str, dict[str, Any]] = {
    "as in an experiment": {},
    "longer lengthscales": {"priors": "default"},
    "and a linear part": {"priors": "default", "mean": "linear"},
}
PAIRS = 20
CERTAINTY = 3.4  # log-odds of an answer by the difference in sds
MODEL_SEEDS = 10


class Played(NamedTuple):
    """Errors after so many answers, and processor seconds of an ask with its tell, median and mean."""

    errors: list[float]
    median: float
    mean: float


def error_of(experiment: viper.Experiment, goal: str, points: np.ndarray, p: np.ndarray, world: World) -> float:
    if goal == "maximise":
        found = 1.0 / (1.0 + np.exp(-world.log_odds(experiment.best().x[None])[0]))
        return float(p.max() - found)
    mean = experiment.estimate(points).mean
    return float(((mean > THRESHOLD) != (p > THRESHOLD)).mean() if goal == "threshold" else np.abs(mean - p).mean())


def play(goal: str, name: str, acquisition: str, seed: int, most: int = CHECKED[-1]) -> Played:
    world = WORLDS[name]
    random = np.random.default_rng([31, seed])
    points = random.random((TEST_POINTS, world.columns))
    p = 1.0 / (1.0 + np.exp(-world.log_odds(points)))
    given = acquisition in ("sobol", "random")
    experiment = viper.Experiment(
        [(0.0, 1.0)] * world.columns,
        goal,
        threshold=THRESHOLD,
        acquisition="auto" if given else acquisition,
        initial=most if acquisition == "sobol" else None,
        random_state=seed,
    )
    errors, times = [], []
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
                errors.append(error_of(experiment, goal, points, p, world))
    return Played(errors, float(np.median(times or [0.0])), float(np.mean(times or [0.0])))


def lacking(world: World, options: dict[str, Any], seed: int) -> float:
    """What the recommended item lacks after answers about pairs that are spread evenly."""
    many = qmc.Sobol(world.columns, seed=9).random(1 << 14)
    f = world.log_odds(many)
    utility = lambda X: (world.log_odds(X) - f.mean()) / f.std()  # noqa: E731
    random = np.random.default_rng([37, seed])
    experiment = viper.Experiment([(0.0, 1.0)] * world.columns, "prefer")
    experiment._fit = partial(fit_preferences, **PREFERENCE_MODEL | options)
    for pair in qmc.Sobol(world.columns, seed=seed).random(2 * PAIRS).reshape(PAIRS, 2, -1):
        gain = CERTAINTY * float(np.diff(utility(pair))[0])
        experiment.tell(pair, "second" if random.random() < 1.0 / (1.0 + np.exp(-gain)) else "first")
    return float(utility(many).max() - utility(experiment.best().x[None])[0])


def model_table(quick: bool) -> Table:
    seeds = range(2 if quick else MODEL_SEEDS)
    rows: list[list[str | float]] = []
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for word, options in MODELS.items():
            found = [[lacking(world, options, seed) for seed in seeds] for world in UTILITIES.values()]
            rows.append([word, *(f"{np.mean(one):.2f} ± {np.std(one, ddof=1) / len(one) ** 0.5:.2f}" for one in found)])
    note = (
        f"Utility that the recommended item lacks beside the best of 16,384, in sds, after {PAIRS} answers; "
        f"{len(seeds)} seeds. The first row is the default."
    )
    return Table("prefer", ["model", *UTILITIES], rows, [note])


Found = dict[tuple[str, str, str], list[Played]]  # by goal, world and acquisition


def run(quick: bool, device: str = "cpu", tables: str | None = None) -> Page:
    wanted = [*GOALS, "prefer"] if tables is None else tables.split(";")
    found = play_all(quick, wanted)
    made = goal_tables(found, device) if found else []
    made += [model_table(quick)] if "prefer" in wanted else []
    return Page("Which question to ask next", made, [*GOALS, "prefer"])


def play_all(quick: bool, wanted: list[str]) -> Found:
    found: Found = {}
    for goal, (worlds, words) in GOALS.items():
        if goal not in wanted:
            continue
        for name in worlds:
            for word in words:
                seeds = range(1 if quick else SEEDS)
                found[goal, name, word] = [play(goal, name, word, seed, CHECKED[0 if quick else -1]) for seed in seeds]
                last = np.mean([one.errors[-1] for one in found[goal, name, word]])
                print(f"{goal}, {name}, {word}: {last:.3f}", flush=True)
    return found


def goal_tables(found: Found, device: str) -> list[Table]:
    tables = []
    after = CHECKED[: len(next(iter(found.values()))[0].errors)]
    for goal, (worlds, words) in GOALS.items():
        if goal not in {goal for goal, _, _ in found}:
            continue
        rows: list[list[str | float]] = []
        for word in words:
            if not all((goal, name, word) in found for name in worlds):
                continue
            row: list[str | float] = [word]
            for name in worlds:
                for k in range(len(after)):
                    errors = np.array([one.errors[k] for one in found[goal, name, word]])
                    spread = f" ± {errors.std(ddof=1) / np.sqrt(len(errors)):.3f}" if len(errors) > 1 else ""
                    row.append(f"{errors.mean():.3f}{spread}")
            asked = [one.mean for name in worlds for one in found[goal, name, word]]
            count = min(len(found[goal, name, word]) for name in worlds)
            rows.append([*row, "" if word in ("sobol", "random") else f"{np.mean(asked):.2f}", str(count)])
        columns = ["acquisition", *[f"{name}, {n}" for name in worlds for n in after], "seconds", "seeds"]
        tables.append(Table(goal, columns, rows, []))
    tables[-1].notes.extend(
        [
            "± standard error of the mean over seeds. Columns: the world, and the number of answers. Seconds: "
            "processor time of an ask, with the fit of the model to all answers, mean over all trials. The first row "
            "of each table is the default.",
            machine(device),
        ]
    )
    return tables
