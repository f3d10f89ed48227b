"""An experiment that asks the next question: yes/no answers, preferences, or measurements that may fail."""

import copy
import math
import os
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch

from viper.data.checks import read_whole
from viper.data.model_file import write_tensors
from viper.decisions import acquisition as acquisitions
from viper.decisions import experiment_file
from viper.decisions.inputs import Inputs
from viper.decisions.preferences import (
    ANSWERS,
    ExpectedBest,
    PairInformation,
    PairInputs,
    centred_utilities,
    fit_preferences,
)
from viper.decisions.regression import GaussianRegression, Moments, expected_gain
from viper.errors import shown
from viper.gp.classifier import VariationalGPClassifier
from viper.models.prediction import half_width
from viper.models.saving import State
from viper.softplus.normal import cdf

GOALS = ("maximise", "minimise", "threshold", "learn", "prefer")
OUTCOMES = ("binary", "real")
REFERENCE = 512  # points over which look-aheads average
REFERENCE_SEED = 20_240_607
EVERY_TIME = 100  # answers up to which every ask searches for hyperparameters; beyond, whenever there are 10 % more
MORE_ROWS = 1.1
LARGEST_MEASUREMENT = 1e150  # its square is still a number
# One start in place of five, and one family of kernels: a third of the time of the default
EXPERIMENT_MODEL: dict[str, Any] = {
    "mean": "constant",
    "lengthscales": "many",
    "n_starts": 1,
    "standardize": False,
    "random_state": 0,
    "verbose": False,
}
# With a linear part the utilities at opposite corners are the least certain: an experiment would compare them forever
PREFERENCE_MODEL: dict[str, Any] = {"mean": "zero", "priors": "short", "standardize": False, "random_state": 0}


class Best(NamedTuple):
    """The point held to be the best so far."""

    x: Any  # a dictionary, or an array if inputs have no names
    mean: float  # its probability of a yes, expected measurement, or utility
    interval: tuple[float, float]


class PointEstimate(NamedTuple):
    """What is known at points."""

    mean: np.ndarray  # the probability of a yes, the expected measurement, or the utility less its average
    lower: np.ndarray
    upper: np.ndarray
    above: np.ndarray | None = None  # the probability that p lies above the threshold
    feasible: np.ndarray | None = None  # the probability that a run does not fail


class ExperimentProgress(NamedTuple):
    """How far an experiment is."""

    answers: int
    pending: int
    information: float  # nats that the best next answer is expected to tell about what is sought
    left: float  # what is still unknown: see `Experiment.progress`


class Experiment:
    """Ask about the points whose answers say most about what you are looking for, and learn from the answers.

    Answers are yes or no, 1 or 0. The log-odds of p(x), the probability of a yes, are a Gaussian process
    (`VariationalGPClassifier`, averaged over hyperparameters). With ``outcome="real"`` answers are measurements, and
    runs may fail. With ``goal="prefer"`` a question is a pair of points, and the answer says which is better: "first",
    "second" or "tie". Each point then has a utility, in log-odds (`VariationalPreferenceGP`). Only differences of
    utilities can be learned, so `estimate` and `best` give them less their average over all inputs.

    Parameters
    ----------
    bounds : dictionary or list
        The inputs, by name: ``{"dose": (0, 10), "rate": (0.01, 1, "log"), "shots": (1, 5, "integer"), "catalyst":
        ["a", "b"]}``. A list of (low, high), if points are to be arrays. A list of two numbers is a range.
    goal : {"threshold", "maximise", "learn", "prefer", "minimise"}
        Find where p crosses `threshold`; find where p, or a measurement, is largest; learn p everywhere; or find the
        point that is preferred to all others. "minimise" is for measurements.
    threshold : float, optional
        The probability sought by ``goal="threshold"``; by default 0.5.
    outcome : {"binary", "real"}, default "binary"
    constraints : list, optional
        Functions of a point that say whether it is allowed, and pairs (weights, most) for Σ weights · x <= most, with
        weights as a dictionary by name or in order.
    initial : int, optional
        Points of a Sobol sequence to begin with; by default 2 d + 2.
    acquisition : str, default "auto"
        How to choose: see the table of the guide. "auto" is the first of the goal's.
    stop : float, optional
        `done` becomes true once the best next answer is expected to say less than this about what is sought, in nats.
    random_state : int, default 0
        The same seed and the same answers give the same questions.

    Examples
    --------
    >>> import viper
    >>> experiment = viper.Experiment({"dose": (0, 10)}, goal="threshold", threshold=0.75)
    >>> for _ in range(12):
    ...     x = experiment.ask()
    ...     experiment.tell(x, x["dose"] > 6) and None
    >>> experiment.estimate([{"dose": 2.0}, {"dose": 9.0}]).mean.round()
    array([0., 1.])
    """

    def __init__(
        self,
        bounds: Any,
        goal: str = "threshold",
        *,
        threshold: float | None = None,
        outcome: str = "binary",
        constraints: Any = (),
        initial: int | None = None,
        acquisition: str = "auto",
        stop: float | None = None,
        random_state: int = 0,
    ) -> None:
        for name, value, known in (("goal", goal, GOALS), ("outcome", outcome, OUTCOMES)):
            if value not in known:
                raise ValueError(f"{name} must be one of {list(known)}; got {shown(value)}.")
        if outcome == "binary" and goal == "minimise":
            raise ValueError("goal='minimise' needs outcome='real'; got 'binary'. Swap yes and no, and maximise.")
        if outcome == "real" and goal not in ("maximise", "minimise"):
            raise ValueError(f"outcome='real' needs goal='maximise' or 'minimise'; got {goal!r}.")
        words = ACQUISITIONS["real" if outcome == "real" else goal]
        if acquisition not in ["auto", *words]:
            asked = f"{outcome=}" if outcome == "real" else f"{goal=}"
            raise ValueError(f"acquisition must be one of {['auto', *words]} for {asked}; got {shown(acquisition)}.")
        if threshold is not None and goal != "threshold":
            raise ValueError(f"threshold is for goal='threshold'; got {shown(threshold)} with {goal=}. Leave it out.")
        if outcome == "real" and stop is not None:
            raise ValueError(f"stop is for yes/no answers and preferences; got {shown(stop)} with outcome='real'.")
        self.items = Inputs(bounds, constraints)
        self.inputs = PairInputs(self.items) if goal == "prefer" else self.items  # of a question
        self.goal, self.outcome, self.acquisition = goal, outcome, acquisition
        self.threshold = 0.5 if threshold is None else threshold
        self.level = acquisitions.log_odds_of(self.threshold, "threshold")
        self.threshold = float(self.threshold)
        self.initial = 2 * len(self.items) + 2 if initial is None else read_whole(initial, "initial", 1)
        self.stop = None if stop is None else acquisitions.positive_number(stop, "stop")
        self.random_state = read_whole(random_state, "random_state", 0)
        self._x = np.zeros((0, len(self.inputs)))  # numbers of the points that have answers
        self._y = np.zeros(0)  # NaN for runs that failed
        self._pending = np.zeros((0, len(self.inputs)))
        self._asked = 0
        self._fitted: tuple[int, Any] = (-1, None)  # answers it was fitted to, and the model
        self._searched: tuple[int, Any] = (-1, None)  # likewise, with hyperparameters of its own
        self._measured: tuple[int, Any] = (-1, None)  # likewise, of measurements

    # --- ask and tell ---

    def ask(self, n: int | None = None) -> Any:
        """The next point, or the next n points as a table (an array, if inputs have no names).

        Questions that are still open are taken into account.
        """
        count = 1 if n is None else read_whole(n, "n", 1)
        before = self._asked, self._pending
        try:
            found = np.stack([self._next() for _ in range(count)])
        except BaseException:  # an interrupt too: either all n questions are open, or none
            self._asked, self._pending = before
            raise
        return self.inputs.point(found[0]) if n is None else self.inputs.values(found)

    def _next(self) -> np.ndarray:
        if not len(self._x) or (self._asked < self.initial and len(self._x) < self.initial):
            point = self.inputs.spread(self._asked + 1, self._seed(0))[-1]
        else:
            seed = self._seed(1 + self._asked)
            point = self.inputs.best(self._worth(), seed, self._known(seed))[0]
        self._asked += 1
        self._pending = np.concatenate([self._pending, point[None]])
        return point

    def _known(self, seed: int) -> np.ndarray:
        """Extra candidates for the search: earlier questions; of pairs, the best item so far against many others."""
        return self.inputs.rivals(self._best_numbers(), seed) if isinstance(self.inputs, PairInputs) else self._x

    def _seed(self, k: int) -> int:
        return int(np.random.SeedSequence([self.random_state, k]).generate_state(1)[0] >> 1)

    def _worth(self) -> Callable[[np.ndarray], np.ndarray]:
        words = ACQUISITIONS["real" if self.outcome == "real" else self.goal]
        return words[next(iter(words)) if self.acquisition == "auto" else self.acquisition](self)

    def tell(self, x: Any, y: Any, failed: Any = None) -> "Experiment":
        """Learn from answers about one point or many, in any order, whether `ask` proposed them or not.

        Parameters
        ----------
        x : dictionary, table, list of dictionaries, or array
            With ``goal="prefer"`` a pair of points, as `ask` returns it, or a list of pairs.
        y : bool, number, text, or list
            0 or 1; with ``outcome="real"`` a number, or None or NaN for a run that failed; with ``goal="prefer"``
            "first", "second" or "tie".
        failed : bool or list, optional
            Which runs failed, with ``outcome="real"``.
        """
        numbers = self.inputs.read(x)
        answers = self._read_answers(y, failed, len(numbers))
        if len(answers) != len(numbers):
            raise ValueError(f"there must be an answer for every point, {len(numbers)}; got {len(answers)}.")
        pending = self._pending
        for point in numbers:
            same = np.flatnonzero(np.isclose(pending, point, rtol=1e-9, atol=1e-12).all(1))
            if len(same):
                pending = np.delete(pending, same[0], axis=0)
        x, y = np.concatenate([self._x, numbers]), np.concatenate([self._y, answers])
        self._x, self._y, self._pending = x, y, pending
        return self

    def _read_answers(self, y: Any, failed: Any, count: int) -> np.ndarray:
        y = y.tolist() if isinstance(y, np.ndarray | torch.Tensor) else y
        given = [y] * count if y is None else [y] if np.ndim(y) == 0 else list(y)
        if failed is not None and self.outcome == "binary":
            fix = "Pass the two points as one pair." if self.goal == "prefer" else "Leave those runs out."
            raise ValueError(f"failed is for outcome='real'; got {shown(failed)} with goal={self.goal!r}. {fix}")
        if self.goal == "prefer":
            if wrong := [one for one in given if one not in list(ANSWERS)]:
                raise ValueError(
                    f"an answer must be one of {list(ANSWERS)}; got {shown(wrong[0])}. Which of the pair is better?"
                )
            return np.array([ANSWERS[str(one)] for one in given])
        if self.outcome == "binary":
            return np.array([checked_answer(value) for value in given])
        lost = [False] * len(given) if failed is None else [failed] if np.ndim(failed) == 0 else list(failed)
        if len(lost) != len(given):
            raise ValueError(f"failed must have a value for every answer, {len(given)}; got {len(lost)}.")
        if wrong := [one for one in lost if not isinstance(one, bool | np.bool_)]:
            raise TypeError(f"failed must be True or False; got {shown(wrong[0])}.")
        return np.array([math.nan if f else checked_value(v) for v, f in zip(given, lost, strict=True)])

    def cancel(self, x: Any = None) -> "Experiment":
        """Stop waiting for the answers about these points; by default, about all that are pending."""
        if x is None:
            self._pending = self._pending[:0]
            return self
        for point in self.inputs.read(x):
            same = np.flatnonzero(np.isclose(self._pending, point, rtol=1e-9, atol=1e-12).all(1))
            if not len(same):
                got = shown(self.inputs.point(point))
                raise ValueError(f"x must be a point that awaits its answer; got {got}.")
            self._pending = np.delete(self._pending, same[0], axis=0)
        return self

    # --- what is known ---

    @property
    def model(self) -> Any:
        """The model fitted to the answers so far; for measurements, that of which runs succeed.

        A VariationalGPClassifier, or for ``goal="prefer"`` a VariationalPreferenceGP. It takes `columns(x)`, not x.
        """
        answers = np.isfinite(self._y) if self.outcome == "real" else self._y
        answers = answers if self.goal == "prefer" else answers.astype(int)
        if not len(answers):
            raise ValueError("the experiment needs answers first; got none. Call tell.")
        if self._fitted[0] != len(answers):
            self._fitted = len(answers), self._fit(self.inputs.columns(self._x), answers)
        return self._fitted[1]

    def _fit(self, X: np.ndarray, y: np.ndarray) -> Any:
        """Hyperparameters from the first k answers, the posterior from all of them; from nothing but the answers."""
        if self.goal == "prefer":
            return fit_preferences(X, y, **PREFERENCE_MODEL)
        k = searched_rows(len(y))
        if self._searched[0] != k:
            first = VariationalGPClassifier(**EXPERIMENT_MODEL)
            self._searched = k, first.partial_fit(X[:k], y[:k], classes=[0, 1])
        if k == len(y):
            return self._searched[1]
        return copy.deepcopy(self._searched[1]).partial_fit(X[k:], y[k:])

    def columns(self, x: Any) -> np.ndarray:
        """Points as the columns that `model` takes."""
        return self.items.columns(self.items.read(x))

    @property
    def answers(self) -> tuple[Any, np.ndarray]:
        """Points and answers so far, in the order of `tell`; NaN for runs that failed."""
        return self.inputs.values(self._x), self._y.copy()

    @property
    def pending(self) -> Any:
        """Questions that are still open."""
        return self.inputs.values(self._pending)

    def estimate(self, x: Any, level: float = 0.95) -> PointEstimate:
        """The probability of a yes, the measurement or the utility at points, with intervals."""
        columns = self.columns(x)
        z = half_width(level)
        if self.outcome == "real":
            moments = self._regression.predict(columns)
            return PointEstimate(
                moments.mean,
                moments.mean - z * moments.sd,
                moments.mean + z * moments.sd,
                None,
                self._feasible(columns),
            )
        model = self.model
        if self.goal == "prefer":
            mean, sd = centred_utilities(model, columns, self._reference())
            return PointEstimate(mean, mean - z * sd, mean + z * sd)
        low, high = model.predict_interval(columns, level).T
        above = None
        if self.goal == "threshold":
            mean, sd = model.predict_latent(columns)
            above = normal_cdf((mean - self.level) / sd)
        return PointEstimate(model.predict_proba(columns)[:, 1], low, high, above)

    def best(self, level: float = 0.95) -> Best:
        """The point with the largest expected p or utility; or measurement, times the chance to succeed."""
        if self.goal not in ("maximise", "minimise", "prefer"):
            raise ValueError(f"best() is for goals that seek a point; got goal={self.goal!r}. Use estimate().")
        numbers = self._best_measured() if self.outcome == "real" else self._best_numbers()
        found = self.estimate(self.items.values(numbers[None]), level)
        return Best(self.items.point(numbers), float(found.mean[0]), (float(found.lower[0]), float(found.upper[0])))

    def _best_numbers(self) -> np.ndarray:
        """The point with the largest expected p, or utility."""
        model, items, known = self.model, self.items, self._x.reshape(-1, len(self.items))
        if self.goal == "prefer":
            return items.best(lambda points: model.predict_latent(items.columns(points))[0], REFERENCE_SEED, known)[0]
        return items.best(lambda points: model.predict_proba(items.columns(points))[:, 1], REFERENCE_SEED, known)[0]

    # --- when to stop ---

    def information(self) -> float:
        """How many nats the best next answer is expected to add to what is known about the goal.

        "learn": about the log-odds at that point; "threshold": about which side of the threshold a random point is on;
        "maximise": about the largest p; "prefer": about the difference between the two items. Not for measurements.
        """
        if self.outcome == "real":
            raise ValueError("information() is about yes/no answers; got outcome='real'. Watch best().")
        worth = INFORMATION_SOUGHT[self.goal](self)
        return self.inputs.best(worth, self._seed(0), self._known(self._seed(0)))[1]

    @property
    def done(self) -> bool:
        """Whether the best next answer is expected to add less than `stop`. Without `stop`, always false."""
        return self.stop is not None and len(self._x) >= self.initial and self.information() < self.stop

    def progress(self) -> ExperimentProgress:
        """How many answers there are, how many are pending, `information()`, and what is `left` to learn.

        `left` is, for "threshold", the share of the space expected to be on the wrong side; for "maximise", by how much
        the largest p is expected to exceed that of `best()`; for "prefer", the same of utilities; for "learn", the mean
        sd of p.
        """
        return ExperimentProgress(len(self._x), len(self._pending), self.information(), self._left())

    def _left(self) -> float:
        columns = self._reference()
        mean, sd = self.model.predict_latent(columns)
        if self.goal == "threshold":
            return float(normal_cdf(-np.abs(mean - self.level) / sd).mean())
        if self.goal == "learn":
            return float(self.model.predict_std(columns).mean())
        best = self.columns(self.best().x)
        f = self.model.sample(np.concatenate([best, columns]), 256, random_state=0)
        p = f if self.goal == "prefer" else 1.0 / (1.0 + np.exp(-f))
        return float((p.max(1) - p[:, 0]).mean())

    # --- acquisitions ---

    def _reference(self) -> np.ndarray:
        return self.items.columns(self.items.spread(REFERENCE, REFERENCE_SEED))

    def _by(self, make: Callable[..., Any], *given: Any, **options: Any) -> Callable[[np.ndarray], np.ndarray]:
        """An acquisition function of the model, as a function of numbers."""
        pending = self.inputs.columns(self._pending) if len(self._pending) else None
        function = make(self.model, *given, pending=pending, **options)
        return lambda points: function(self.inputs.columns(points))

    def _best_probability(self) -> float:
        return float(np.clip(self.model.predict_proba(self.inputs.columns(self._x))[:, 1].max(), 1e-6, 1.0 - 1e-6))

    # --- measurements that may fail ---

    @property
    def _regression(self) -> GaussianRegression:
        good = np.isfinite(self._y)
        if not good.any():
            raise ValueError("the experiment needs a run that did not fail; got none. Call tell.")
        if self._measured[0] != len(self._y):
            self._measured = len(self._y), GaussianRegression(self.inputs.columns(self._x[good]), self._y[good])
        found: GaussianRegression = self._measured[1]
        return found

    def _feasible(self, columns: np.ndarray) -> np.ndarray:
        if np.isfinite(self._y).all():
            return np.ones(len(columns))
        p: np.ndarray = self.model.predict_proba(columns)[:, 1]
        return p

    def _toward(self, moments: Moments) -> Moments:
        return moments if self.goal == "maximise" else Moments(-moments.mean, moments.sd)

    def _best_measured(self) -> np.ndarray:
        """The point with the largest expected gain over the worst measurement, times its chance to succeed."""
        regression = self._regression
        worst = float(self._toward(regression.predict(regression.X.numpy())).mean.min())

        def worth(points: np.ndarray) -> np.ndarray:
            columns = self.inputs.columns(points)
            return (self._toward(regression.predict(columns)).mean - worst) * self._feasible(columns)

        return self.inputs.best(worth, REFERENCE_SEED, self._x[np.isfinite(self._y)])[0]

    def _gain(self) -> Callable[[np.ndarray], np.ndarray]:
        """Expected improvement times the chance that the run succeeds."""
        if not np.isfinite(self._y).any():
            return self._by(acquisitions.UpperConfidenceBound)
        regression, pending = self._regression, self.inputs.columns(self._pending)
        best = float(self._toward(regression.predict(regression.X.numpy())).mean.max())

        def worth(points: np.ndarray) -> np.ndarray:
            columns = self.inputs.columns(points)
            gain = expected_gain(self._toward(regression.predict(columns, pending)), best)
            return np.log(np.maximum(gain, 1e-300)) + np.log(np.maximum(self._feasible(columns), 1e-300))

        return worth

    # --- files ---

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Write everything to one file for `viper.load`. The loaded experiment goes on exactly as this one would.

        Constraints that are functions are not written; pass them to `viper.load(path, constraints=[...])`.
        """
        write_tensors(path, experiment_file.EXPERIMENT, *experiment_file.pack_experiment(self), overwrite)

    _kind = experiment_file.EXPERIMENT
    _check_header = staticmethod(experiment_file.check_experiment)
    _required_objects = staticmethod(experiment_file.required_functions)

    @classmethod
    def _unpack(cls, state: State, objects: dict[str, Any]) -> "Experiment":
        return experiment_file.unpack_experiment(cls, state, objects)

    def __repr__(self) -> str:
        return (
            f"Experiment({shown(self.items.labels)}, goal={self.goal!r}), {len(self._x)} answers, "
            f"{len(self._pending)} pending"
        )


Worth = Callable[[Experiment], Callable[[np.ndarray], np.ndarray]]
# The first of each goal is the default
ACQUISITIONS: dict[str, dict[str, Worth]] = {
    "threshold": {
        "straddle": lambda e: e._by(acquisitions.Straddle, e.threshold),
        "look-ahead": lambda e: e._by(acquisitions.LevelSetLookAhead, e._reference(), e.threshold),
        "entropy": lambda e: e._by(acquisitions.LevelSetLookAhead, e._reference(), e.threshold, measure="entropy"),
        "information": lambda e: e._by(acquisitions.Information),
    },
    "maximise": {
        "thompson": lambda e: e._by(acquisitions.PosteriorDraw, e._reference(), random_state=e._seed(e._asked)),
        "maximum-information": lambda e: e._by(acquisitions.MaximumInformation, e._reference()),
        "improvement": lambda e: e._by(acquisitions.ExpectedImprovement, e._best_probability()),
        "ucb": lambda e: e._by(acquisitions.UpperConfidenceBound),
    },
    "learn": {
        "look-ahead": lambda e: e._by(acquisitions.ProbabilityLookAhead, e._reference()),
        "information": lambda e: e._by(acquisitions.Information),
    },
    "prefer": {
        "best": lambda e: e._by(ExpectedBest),
        "best-mixture": lambda e: e._by(ExpectedBest, average="moments"),
        "information": lambda e: e._by(PairInformation),
    },
    "real": {"improvement": lambda e: e._gain()},
}
INFORMATION_SOUGHT: dict[str, Worth] = {
    "threshold": ACQUISITIONS["threshold"]["entropy"],
    "maximise": ACQUISITIONS["maximise"]["maximum-information"],
    "learn": ACQUISITIONS["learn"]["information"],
    "prefer": ACQUISITIONS["prefer"]["information"],
}


def searched_rows(n: int) -> int:
    """How many of n answers, the first ones, hyperparameters are found from."""
    k = EVERY_TIME
    if n <= k:
        return n
    while int(k * MORE_ROWS) <= n:
        k = int(k * MORE_ROWS)
    return k


def normal_cdf(z: np.ndarray) -> np.ndarray:
    p: np.ndarray = cdf(torch.from_numpy(np.asarray(z, dtype=float))).numpy()
    return p


def checked_answer(value: Any) -> float:
    if not isinstance(value, Real | np.bool_) or value not in (0, 1):
        raise ValueError(f"an answer must be 0 or 1; got {shown(value)}. For measurements, use outcome='real'.")
    return float(value)


def checked_value(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real) or math.isinf(float(value)):
        raise ValueError(f"a measurement must be a finite number, or None if the run failed; got {shown(value)}.")
    if abs(float(value)) > LARGEST_MEASUREMENT:
        raise ValueError(f"a measurement must lie within ±{LARGEST_MEASUREMENT:g}; got {value:g}. Use a larger unit.")
    return float(value)
