"""How many questions does an experiment need? Errors by number of answers, beside AEPsych and BoTorch.

Three tasks on the unit cube, with two and four inputs. All answers are simulated by a probit, which is what the models
of the peers assume and ours do not; every method of a seed gets the same first points (a Sobol sequence) and the same
luck.

threshold: where is the probability above 75 %? On AEPsych's own test functions. The error is the share of 2,048 points
    that are on the wrong side.
maximum: where is the probability of a yes largest? The error is how far it is below the largest, at the point that a
    method holds to be the best.
probability: how likely is it that an item is preferred to another? The error is the Kullback-Leibler divergence of the
    probability from the true one, averaged over 2,048 pairs, after answers about pairs that are spread evenly.
preference: which item is the best, by answers to "this one or that one"? The error is the utility that the item held to
    be the best lacks, in standard deviations of the utility over the cube.

The peers come with `pip install botorch` and `pip install --no-deps aepsych pyro-ppl pyro-api torcheval pathos dill
multiprocess ppft pox`. A peer that is absent is left out.

viper is `viper.Experiment` with its defaults; "Sobol" and "random" are its model with questions that do not depend on
answers.

Every (task, function, method, seed) is one line of a JSON-lines file, one file per method, in `results/experiments` or
`--scratch`: a run goes on where it was interrupted, and a method whose file is removed is run again. The tables are
made of these lines.
"""

import contextlib
import json
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from scipy.special import rel_entr
from scipy.stats import norm, qmc

import viper
from benchmarks.runs import read_runs
from benchmarks.table import Page, Table, machine, seconds
from viper.decisions.preferences import fit_preferences
from viper.inference.threads import one_thread

TARGET = 0.75
TEST_POINTS = 2_048
EVERY = 10  # answers between two looks at the error
SEEDS = 20
NOISE = 0.35  # sd of the utility of an item at one tasting
PAIRED = ("probability", "preference")
BALD_POINTS, BALD_DRAWS = 4_000, 1_024
GOALS = {"threshold": "threshold", "maximum": "maximise", "probability": "prefer", "preference": "prefer"}
KEPT = Path(__file__).parent / "results" / "experiments"
Function = Callable[[np.ndarray], np.ndarray]


class Problem(NamedTuple):
    """A task, a function on the unit cube (in probits), its number of inputs, of first questions and of all."""

    task: str
    function: Function
    inputs: int
    first: int
    questions: int


class Learner(Protocol):
    """One run of a method. Items of a preference come in pairs, 2 × inputs; the answer 1 prefers the first."""

    def ask(self) -> np.ndarray:
        """The next question: a point, or a pair of them."""

    def tell(self, question: np.ndarray, answer: int) -> None:
        """Learn from an answer."""

    def fit(self) -> None:
        """Fit the model to all answers so far."""

    def latent(self, X: np.ndarray) -> np.ndarray:
        """The posterior mean of the latent function, which is 0 where a threshold's probability is `TARGET`."""


# ---------------------------------------------------------------------------------------------------------------------
# Functions, in probits; x in the unit cube


def discrimination(x: np.ndarray) -> np.ndarray:
    """Owen et al. (2021), `novel_discrimination_testfun` of AEPsych: two inputs in [-1, 1], chance is one half."""
    frequency, amplitude = (2.0 * x - 1.0).T
    return (amplitude + 1.0) / parabola(frequency)


def detection(x: np.ndarray) -> np.ndarray:
    """The same for detection, `novel_detection_testfun`."""
    frequency, amplitude = (2.0 * x - 1.0).T
    return 2.0 * (amplitude + 1.0) / parabola(frequency) - 4.0


def parabola(frequency: np.ndarray) -> np.ndarray:
    return 0.05 + 0.4 * (-1.0 + 0.2 * frequency) ** 2 * frequency**2


HIGH_LOWER = np.array([-1.0, -1.0, 0.5, 0.05, 0.05, 0.0, 0.0, 0.5])
HIGH_UPPER = np.array([1.0, 1.0, 1.5, 0.15, 0.2, 0.9, 1.57, 2.0])


def high_discrimination(x: np.ndarray) -> np.ndarray:
    """`discrim_highdim` of AEPsych, with four of its eight inputs in the middle: amplitude, frequency, two scales."""
    middle = np.full((len(x), 8), 0.5)
    middle[:, :4] = x
    amplitude, frequency, scale, shift, variance, asymmetry, phase, period = (
        HIGH_LOWER + (HIGH_UPPER - HIGH_LOWER) * middle
    ).T
    angle = period * 0.6 * np.pi * frequency
    wave = -0.5 * scale * np.cos(angle + phase) + scale / 2.0 + shift
    context = wave * (-asymmetry * np.sin(0.5 * angle + phase) + (2.0 - asymmetry)) - 1.0
    z = (amplitude - context) / (variance + variance * (1.0 + context))
    return norm.ppf(np.clip(0.5 + 0.5 * norm.cdf(z), 0.5, 1.0 - 1e-5))


def branin(x: np.ndarray) -> np.ndarray:
    """Minus Branin's function, with mean 0 and standard deviation 1 over the cube; three equal maxima."""
    a, b = 15.0 * x[:, 0] - 5.0, 15.0 * x[:, 1]
    value = (b - 5.1 / (4 * np.pi**2) * a**2 + 5.0 / np.pi * a - 6.0) ** 2
    value = value + 10.0 * (1.0 - 1.0 / (8 * np.pi)) * np.cos(a) + 10.0
    return (54.31 - value) / 51.33


HARTMANN_A = np.array([[10, 3, 17, 3.5], [0.05, 10, 17, 0.1], [3, 3.5, 1.7, 10], [17, 8, 0.05, 10]])
HARTMANN_P = 1e-4 * np.array(
    [[1312, 1696, 5569, 124], [2329, 4135, 8307, 3736], [2348, 1451, 3522, 2883], [4047, 8828, 8732, 5743]]
)
HARTMANN_C = np.array([1.0, 1.2, 3.0, 3.2])


def hartmann(x: np.ndarray) -> np.ndarray:
    """Hartmann's function of four inputs (the first four of six), with mean 0 and standard deviation 1."""
    inside = (HARTMANN_A * (x[:, None] - HARTMANN_P) ** 2).sum(-1)
    return (np.exp(-inside) @ HARTMANN_C - 0.4366) / 0.5069


def peak(x: np.ndarray) -> np.ndarray:
    """A yes is likely on a small hill only: 97 % at the top, 7 % far from it, with a second, lower hill."""
    d = x.shape[1]
    high = np.exp(-((x - 0.7) ** 2).sum(1) / (0.08 * d))
    low = np.exp(-((x - 0.25) ** 2).sum(1) / (0.06 * d))
    return 3.4 * high + 2.2 * low - 1.5


PROBLEMS = {
    "discrimination, 2 inputs": Problem("threshold", discrimination, 2, 10, 100),
    "detection, 2 inputs": Problem("threshold", detection, 2, 10, 100),
    "discrimination, 4 inputs": Problem("threshold", high_discrimination, 4, 20, 100),
    "two hills, 2 inputs": Problem("maximum", peak, 2, 10, 50),
    "two hills, 4 inputs": Problem("maximum", peak, 4, 20, 80),
    "Branin, 60 pairs": Problem("probability", branin, 2, 60, 60),
    "Hartmann, 100 pairs": Problem("probability", hartmann, 4, 100, 100),
    "Branin, 2 inputs": Problem("preference", branin, 2, 6, 40),
    "Hartmann, 4 inputs": Problem("preference", hartmann, 4, 10, 60),
}


# ---------------------------------------------------------------------------------------------------------------------
# Methods


def sobol(inputs: int, count: int, seed: int) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a number of points that is no power of two
        return qmc.Sobol(inputs, seed=seed).random(count)


class Aepsych:
    """AEPsych's variational probit model, refitted after every answer, and one of its acquisition functions."""

    def __init__(self, problem: Problem, acquisition: str) -> None:
        with contextlib.chdir(tempfile.mkdtemp()):  # it makes a folder for its log
            import aepsych.acquisition
        from aepsych.generators import OptimizeAcqfGenerator
        from aepsych.models import GPClassificationModel
        from botorch.acquisition import qLogNoisyExpectedImprovement

        logging.disable(logging.CRITICAL)
        lower, upper = torch.zeros(problem.inputs).double(), torch.ones(problem.inputs).double()
        self.model = GPClassificationModel(dim=problem.inputs)
        self.X, self.y = np.zeros((0, problem.inputs)), np.zeros(0)
        self.level = norm.ppf(TARGET) if problem.task == "threshold" else 0.0
        self.noisy = acquisition == "qLogNEI"
        options: dict[str, Any] = {"target": TARGET, "lb": lower, "ub": upper}
        if acquisition == "MCLevelSetEstimation":
            options = {"target": TARGET, "beta": 3.84, "objective": aepsych.acquisition.ProbitObjective()}
        chosen = qLogNoisyExpectedImprovement if self.noisy else getattr(aepsych.acquisition, acquisition)
        self.generator = OptimizeAcqfGenerator(lower, upper, chosen, {} if self.noisy else options)

    def ask(self) -> np.ndarray:
        return self.generator.gen(1, self.model)[0].numpy()

    def tell(self, question: np.ndarray, answer: int) -> None:
        self.X, self.y = np.vstack([self.X, question]), np.append(self.y, answer)

    def fit(self) -> None:
        self.model.fit(torch.from_numpy(self.X), torch.from_numpy(self.y))

    def latent(self, X: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.model.predict(torch.from_numpy(X))[0].numpy() - self.level


class Botorch:
    """BoTorch's PairwiseGP (Laplace, probit) and qEUBO, which is climbed from the best 4 of 256 points."""

    def __init__(self, problem: Problem, random: np.random.Generator | None) -> None:
        self.inputs, self.random = problem.inputs, random
        self.items, self.pairs = np.zeros((0, problem.inputs)), np.zeros((0, 2), dtype=int)
        self.model: Any = None

    def ask(self) -> np.ndarray:
        if self.random is not None:
            return self.random.random((2, self.inputs))
        from botorch.acquisition.preference import qExpectedUtilityOfBestOption
        from botorch.optim import optimize_acqf

        bounds = torch.stack([torch.zeros(self.inputs), torch.ones(self.inputs)]).double()
        found, _ = optimize_acqf(qExpectedUtilityOfBestOption(self.model), bounds, 2, 4, 256)
        return found.numpy()

    def tell(self, question: np.ndarray, answer: int) -> None:
        first = len(self.items)
        self.items = np.vstack([self.items, question])
        self.pairs = np.vstack([self.pairs, [first, first + 1] if answer else [first + 1, first]])

    def fit(self) -> None:
        from botorch.fit import fit_gpytorch_mll
        from botorch.models.pairwise_gp import PairwiseGP, PairwiseLaplaceMarginalLogLikelihood
        from botorch.models.transforms.input import Normalize

        bounds = torch.stack([torch.zeros(self.inputs), torch.ones(self.inputs)]).double()
        transform = Normalize(d=self.inputs, bounds=bounds)
        self.model = PairwiseGP(torch.from_numpy(self.items), torch.from_numpy(self.pairs), input_transform=transform)
        fit_gpytorch_mll(PairwiseLaplaceMarginalLogLikelihood(self.model.likelihood, self.model))

    def latent(self, X: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.model.posterior(torch.from_numpy(X)).mean[:, 0].numpy()

    def chance(self, A: np.ndarray, B: np.ndarray) -> np.ndarray:
        """E Φ(d/√2) for d ~ N(δ, σ²): Φ(δ/√(2 + σ²))."""
        with torch.no_grad():
            f = self.model.posterior(torch.from_numpy(np.stack([A, B], 1)))
            mean, C = f.mean[..., 0], f.covariance_matrix
        variance = C[:, 0, 0] + C[:, 1, 1] - 2.0 * C[:, 0, 1]
        return norm.cdf(((mean[:, 0] - mean[:, 1]) / (2.0 + variance).sqrt()).numpy())


class Viper:
    """`viper.Experiment`; or its model with questions in a Sobol sequence or at random."""

    def __init__(self, problem: Problem, seed: int, asking: str = "", options: dict[str, Any] | None = None) -> None:
        self.problem = problem
        bounds: Any = [(0.0, 1.0)] * problem.inputs
        goal = GOALS[problem.task]
        threshold = TARGET if goal == "threshold" else None
        self.experiment = viper.Experiment(bounds, goal, threshold=threshold, initial=problem.first, random_state=seed)
        if options is not None:
            self.experiment._fit = partial(fit_preferences, standardize=False, random_state=0, **options)
        self.items = 2 if problem.task in PAIRED else 1
        self.plan = None
        if asking == "Sobol":
            points = sobol(problem.inputs, self.items * problem.questions, 1_000 + seed)
            self.plan = iter(points.reshape(problem.questions, -1)[problem.first :])
        if asking == "random":
            self.plan = iter(np.random.default_rng([23, seed]).random((problem.questions, self.items * problem.inputs)))

    def ask(self) -> np.ndarray:
        if self.plan is not None:
            found = next(self.plan)
            return found.reshape(2, -1) if self.items == 2 else found
        return np.asarray(self.experiment.ask())

    def tell(self, question: np.ndarray, answer: int) -> None:
        given: Any = answer if self.items == 1 else "first" if answer else "second"
        self.experiment.tell(question, given)

    def fit(self) -> None:
        _ = self.experiment.model

    def chance(self, A: np.ndarray, B: np.ndarray) -> np.ndarray:
        """The probability that the first item is preferred."""
        p: np.ndarray = self.experiment.model.predict_proba(*map(self.experiment.columns, (A, B)))[:, 0]
        return p

    def latent(self, X: np.ndarray) -> np.ndarray:
        mean: np.ndarray = self.experiment.model.predict_latent(self.experiment.columns(X))[0]
        return mean - math.log(TARGET / (1.0 - TARGET)) if self.problem.task == "threshold" else mean


class Method(NamedTuple):
    """Makes a learner for a seed; the tasks it can do; the package it needs."""

    make: Callable[[Problem, int], Any]
    tasks: tuple[str, ...]
    package: str = "viper"


def aepsych_method(acquisition: str, task: str) -> Method:
    return Method(lambda problem, seed: Aepsych(problem, acquisition), (task,), "aepsych")


def viper_method(asking: str = "") -> Method:
    return Method(lambda problem, seed: Viper(problem, seed, asking), tuple(x for x in GOALS if x != "probability"))


def preference_model(**options: Any) -> Method:
    return Method(lambda problem, seed: Viper(problem, seed, options=options), ("probability",))


METHODS: dict[str, Method] = {
    "viper": viper_method(),
    "viper's model, Sobol": viper_method("Sobol"),
    "viper's model, random": viper_method("random"),
    "viper, defaults": preference_model(),
    "viper, as in an experiment": preference_model(mean="zero", priors="short"),
    "viper, no priors": preference_model(mean="zero", priors=None, lengthscales="one"),
    "BoTorch, PairwiseGP": Method(lambda problem, seed: Botorch(problem, None), ("probability",), "botorch"),
    "AEPsych, EAVC": aepsych_method("EAVC", "threshold"),
    "AEPsych, GlobalMI": aepsych_method("GlobalMI", "threshold"),
    "AEPsych, MC level set": aepsych_method("MCLevelSetEstimation", "threshold"),
    "AEPsych, qLogNEI": aepsych_method("qLogNEI", "maximum"),
    "BoTorch, PairwiseGP, qEUBO": Method(lambda problem, seed: Botorch(problem, None), ("preference",), "botorch"),
    "BoTorch, PairwiseGP, random pairs": Method(
        lambda problem, seed: Botorch(problem, np.random.default_rng([22, seed])), ("preference",), "botorch"
    ),
}


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def answer(problem: Problem, question: np.ndarray, luck: float) -> int:
    """A simulated answer: Φ(f(x)), or Φ((f(x) - f(x'))/(√2 σ)), σ = `NOISE`."""
    f = problem.function(np.atleast_2d(question))
    chance = norm.cdf(f[0]) if problem.task not in PAIRED else norm.cdf((f[0] - f[1]) / (math.sqrt(2.0) * NOISE))
    return int(luck < chance)


def best_point(learner: Learner, problem: Problem) -> np.ndarray:
    """Where the posterior mean is largest: by a Sobol sequence, then by ever closer points around the best."""
    generator = np.random.default_rng(5)
    X = sobol(problem.inputs, TEST_POINTS, 4)
    best = X[np.argmax(learner.latent(X))]
    for spread in (0.1, 0.03, 0.01):
        near = np.clip(best + spread * generator.standard_normal((512, problem.inputs)), 0.0, 1.0)
        near[0] = best
        best = near[np.argmax(learner.latent(near))]
    return best


def largest(problem: Problem) -> float:
    """The maximum of the function."""
    generator = np.random.default_rng(6)
    X = sobol(problem.inputs, 1 << 14, 4)
    f = problem.function(X)
    best = X[np.argmax(f)]
    for spread in (0.05, 0.01, 0.002, 0.0005):
        near = np.clip(best + spread * generator.standard_normal((4_096, problem.inputs)), 0.0, 1.0)
        near[0] = best
        best = near[np.argmax(problem.function(near))]
    return float(problem.function(best[None])[0])


def error(learner: Learner, problem: Problem, top: float) -> float:
    if problem.task == "threshold":
        X = sobol(problem.inputs, TEST_POINTS, 3)
        return float(np.mean((learner.latent(X) > 0.0) != (problem.function(X) > norm.ppf(TARGET))))
    if problem.task == "probability":
        return divergence(learner, problem)
    found = float(problem.function(best_point(learner, problem)[None])[0])
    return float(norm.cdf(top) - norm.cdf(found)) if problem.task == "maximum" else top - found


def divergence(learner: Any, problem: Problem) -> float:
    """KL of the learner's probabilities from the true ones, per pair."""
    A, B = sobol(2 * problem.inputs, TEST_POINTS, 3).reshape(TEST_POINTS, 2, -1).swapaxes(0, 1)
    p = norm.cdf((problem.function(A) - problem.function(B)) / (math.sqrt(2.0) * NOISE))
    q = np.clip(learner.chance(A, B), 1e-300, 1.0 - 1e-16)
    return float(np.mean(rel_entr(p, q) + rel_entr(1.0 - p, 1.0 - q)))


def run_one(problem: Problem, method: Method, seed: int) -> dict[str, Any]:
    """Errors by number of answers, and the median processor seconds of a question with the fit before it."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the peers draw from the global generators
    generator = np.random.default_rng([22, seed])
    items = 2 if problem.task in PAIRED else 1
    start = sobol(problem.inputs, items * problem.first, 1_000 + seed)
    luck = generator.random(problem.questions)
    learner, top = method.make(problem, seed), largest(problem)
    errors, spent = {}, []
    for k in range(problem.questions):
        began = time.process_time()
        if k < problem.first:
            question = start[k] if items == 1 else start[2 * k : 2 * k + 2]
        else:
            question = learner.ask()
            spent.append(time.process_time() - began)
        learner.tell(question, answer(problem, question, luck[k]))
        if k + 1 >= problem.first:
            began = time.process_time()
            learner.fit()
            spent[-1:] = [sum(spent[-1:]) + time.process_time() - began]
        if k + 1 >= problem.first and ((k + 1) % EVERY == 0 or k + 1 == problem.questions):
            errors[str(k + 1)] = error(learner, problem, top)
    return {"errors": errors, "seconds": float(np.median(spent))}


def file_name(method: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in method).strip("_") + ".jsonl"


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The runs of all methods."""
    return [run for method in METHODS for run in read_runs(folder / file_name(method))]


def fill(folder: Path, methods: Iterable[str], problems: Iterable[str], seeds: int) -> None:
    """Run what is missing, seed by seed, so that an early stop leaves fewer seeds of everything."""
    folder.mkdir(parents=True, exist_ok=True)
    done = {(x["problem"], x["method"], x["seed"]) for x in read_lines(folder)}
    for seed in range(seeds):
        for name in problems:
            problem = PROBLEMS[name]
            for method in methods:
                able = problem.task in METHODS[method].tasks and find_spec(METHODS[method].package) is not None
                if not able or (name, method, seed) in done:
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # peers warn of their own deprecations
                    line = {"problem": name, "method": method, "seed": seed} | run_one(problem, METHODS[method], seed)
                with (folder / file_name(method)).open("a", encoding="utf-8") as kept:
                    kept.write(json.dumps(line) + "\n")
                print(f"{name}, {method}, seed {seed}: {line['errors']}, {line['seconds']:.2f} s", flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def error_table(task: str, lines: list[dict[str, Any]]) -> Table:
    """Mean errors with their standard errors, by number of answers."""
    names = [name for name, problem in PROBLEMS.items() if problem.task == task]
    counts = sorted({int(k) for x in lines if x["problem"] in names for k in x["errors"]})
    rows: list[list[str | float]] = []
    for name in names:
        for method in METHODS:
            found = [x for x in lines if x["problem"] == name and x["method"] == method]
            if not found:
                continue
            cells: list[str | float] = []
            for k in counts:
                errors = [x["errors"][str(k)] for x in found if str(k) in x["errors"]]
                spread = f" ± {np.std(errors, ddof=1) / math.sqrt(len(errors)):.3f}" if len(errors) > 1 else ""
                cells.append(f"{np.mean(errors):.3f}{spread}" if errors else "-")
            rows.append([name, method, f"{len(found)}", *cells, float(np.median([x["seconds"] for x in found]))])
    columns = ["function", "method", "seeds", *[f"{k} answers" for k in counts], "seconds a question"]
    return Table(TITLES[task], columns, rows, NOTES[task])


TITLES = {
    "threshold": "Where is the probability above 75 %?",
    "maximum": "Where is it largest?",
    "probability": "How likely is it that one item is preferred to another?",
    "preference": "Which item is the best?",
}
NOTES = {
    "threshold": [f"Share of {TEST_POINTS:,} points on the wrong side; mean over seeds ± its standard error."],
    "maximum": [
        "The largest probability less that of the point held to be the best; mean over seeds ± its standard error."
    ],
    "probability": [
        "Kullback-Leibler divergence from the truth, per pair; mean over seeds ± its standard error.",
        '"As in an experiment" is without a linear part and with priors="short"; "no priors" is one lengthscale and an '
        "output scale by maximum likelihood, without a linear part.",
    ],
    "preference": ["Utility that the item held to be the best lacks, in sds; mean over seeds ± its standard error."],
}


def bald_table(device: str) -> Table:
    """Nanoseconds per point of the information of an answer, and its error, in closed form and by draws."""
    from viper.softplus.information import answer_information

    generator = torch.Generator().manual_seed(0)
    mean = 6.0 * torch.rand(BALD_POINTS, generator=generator, dtype=torch.float64) - 3.0
    sd = 3.0 * torch.rand(BALD_POINTS, generator=generator, dtype=torch.float64) + 0.05
    normal = torch.special.ndtri(torch.from_numpy(sobol(1, BALD_DRAWS, 0)[:, 0]).clamp(1e-9, 1.0 - 1e-9))

    def by_draws() -> torch.Tensor:
        p = torch.sigmoid(mean[:, None] + sd[:, None] * normal)
        entropy = lambda x: torch.special.entr(x) + torch.special.entr(1.0 - x)  # noqa: E731
        return entropy(p.mean(1)) - entropy(p).mean(1)

    z = torch.linspace(-9.0, 9.0, 2_001, dtype=torch.float64)
    nodes = mean[:, None] + sd[:, None] * z
    share = torch.exp(-0.5 * z.square()) / torch.exp(-0.5 * z.square()).sum()
    p = torch.sigmoid(nodes) @ share
    given = (torch.nn.functional.softplus(nodes) - nodes * torch.sigmoid(nodes)) @ share
    exact = torch.special.entr(p) + torch.special.entr(1.0 - p) - given
    rows: list[list[str | float]] = []
    for name, function in {
        "viper, closed form": lambda: answer_information(mean, sd.square()),
        f"{BALD_DRAWS:,} Sobol draws": by_draws,
    }.items():
        found = function()
        duration = min(seconds(function, device) for _ in range(20))
        rows.append([name, 1e9 * duration / BALD_POINTS, float((found - exact).abs().max())])
    columns = ["information of an answer (BALD)", "ns per point", "worst error, nats"]
    note = f"{BALD_POINTS:,} points, ϑ in [-3, 3], τ in [0.05, 3.05]. Processor time; errors against 2,001 nodes."
    return Table("Information", columns, rows, [note])


def run(
    quick: bool, device: str = "cpu", scratch: str | None = None, methods: str | None = None, seeds: int | None = None
) -> Page:
    folder = Path(scratch) if scratch else Path(tempfile.mkdtemp()) if quick else KEPT
    names = list(METHODS) if methods is None else [name for name in METHODS if name in methods.split(";")]
    with one_thread():
        problems = ["discrimination, 2 inputs", "Branin, 2 inputs"] if quick else list(PROBLEMS)
        if quick:
            for name in problems:
                PROBLEMS[name] = PROBLEMS[name]._replace(questions=20)
        fill(folder, names, problems, 1 if quick else seeds or SEEDS)
        lines = read_lines(folder)
        found = [error_table(task, lines) for task in TITLES]
        tables = [table for table in found if table.rows] + [bald_table(device)]
    tables[0].notes += [
        "Seconds: median processor time of a question with the fit before it; the machine was not idle. Where rows "
        "have different numbers of seeds, these are the first ones.",
        machine(device),
    ]
    return Page("Experiments", tables)
