"""Contextual bandits with yes/no rewards: which arm to try next, with the probability of having chosen it."""

import copy
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from viper.data.model_file import write_tensors
from viper.decisions import storing
from viper.decisions.outcomes import ARM, PROPENSITY, REWARD, Played
from viper.decisions.storing import Pending
from viper.decisions.weights import MODELS, POLICIES, Policy, Scales, Weights
from viper.errors import shown
from viper.models.saving import State

FIRST_REFRESH = 64  # rewards; then at every doubling
FORGETTING_STEP = 0.01  # share of the weight of old rewards that is forgotten at a time
MOST_PENDING = 100_000  # choices that await their reward; the oldest is given up
LARGEST_ENTRY = 1e50  # of contexts, features, scales and their inverses, so that variances of log-odds are finite
LEVEL = 1.959963984540054  # sds of a 95 % interval


class Choice(NamedTuple):
    """One decision.

    Attributes
    ----------
    arm
        The arm to play.
    propensity : float
        The probability with which this arm was drawn; in a slate, given the arms before it. Drawn from this very
        number, so that evaluations that divide by it are not biased.
    probability : float
        The expected reward, E s(f).
    interval : tuple of two floats
        A 95 % interval of the probability.
    id : int
        What `update` needs.
    """

    arm: Any
    propensity: float
    probability: float
    interval: tuple[float, float]
    id: int


class Log(NamedTuple):
    """Decisions whose rewards are known, oldest first; a row each. `viper.decisions.evaluate` reads it."""

    context: np.ndarray
    arm: np.ndarray
    propensity: np.ndarray
    reward: np.ndarray
    features: np.ndarray  # of the chosen arm


class Bandit:
    """A contextual bandit with yes/no rewards and the posterior of a logistic regression for every arm.

    Each arm a has log-odds f_a, linear in what is known of it, with a Gaussian posterior. A policy turns them into a
    probability for every arm, the arm is drawn by these probabilities, and the one drawn is logged: the propensity.
    The posterior is by expectation propagation, whose means and variances are closest to the exact ones where an arm
    has few rewards.

    Parameters
    ----------
    arms : list
        The arms: texts or numbers, all different. `add_arm` and `retire_arm` change them.
    policy : {"ids", "ucb", "thompson", "epsilon-greedy", "greedy"}, default "ids"
        "ids" is information-directed: the one or two arms with the least squared expected regret per nat that the
        reward tells about the arm. "ucb" takes the largest mean + `spread` · sd of the log-odds. "thompson" takes each
        arm with the probability that it is the best one, its log-odds having `spread` times their sd.
    model : {"disjoint", "shared", "hybrid"}, default "disjoint"
        Which weights the arms have: their own, for the context; common ones, for their features and the context; or
        both.
    prior_scale, intercept_scale : float, default 1 and 2.5
        Standard deviations of the weights, and of intercepts.
    spread : float, default 1
        Sds of the log-odds: more explores more. For "ids", "ucb" and "thompson".
    epsilon : float, optional
        Share of decisions in which every arm has the same chance, whatever the policy. By default 0.1 for
        "epsilon-greedy" and 0 for the others. Set it above 0 if you want to evaluate other policies from the log.
    memory : int, default 10,000
        Rewards that are kept, for `refresh` and for `log`. Older ones stay in the posterior.
    forget : float in (0, 1], default 1
        Each new reward multiplies the weight of all older ones by this number. Choose it below 1 if the world changes.
    refresh : {"doublings", "never"}, default "doublings"
        When `refresh` runs by itself: whenever the number of rewards has doubled, or never.
    random_state : int, Generator or None
        The same seed gives the same decisions.

    Examples
    --------
    >>> import viper
    >>> agent = viper.Bandit(["a", "b"], random_state=0)
    >>> choice = agent.pull([0.5, -1.0])
    >>> agent.update(choice.id, 1)
    >>> agent.pull([0.5, -1.0]).probability > 0.5
    True
    """

    def __init__(
        self,
        arms: Sequence[Any],
        policy: str = "ids",
        model: str = "disjoint",
        *,
        prior_scale: float = 1.0,
        intercept_scale: float = 2.5,
        spread: float = 1.0,
        epsilon: float | None = None,
        memory: Any = 10_000,
        forget: float = 1.0,
        refresh: str = "doublings",
        random_state: Any = None,
    ) -> None:
        for name, value, known in (
            ("policy", policy, POLICIES),
            ("model", model, MODELS),
            ("refresh", refresh, storing.REFRESHES),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {list(known)}; got {shown(value)}.")
        epsilon = (0.1 if policy == "epsilon-greedy" else 0.0) if epsilon is None else share(epsilon, "epsilon")
        self.policy = Policy(policy, scale_within(spread, "spread"), epsilon)
        self.model = model
        self.scales = Scales(scale_within(prior_scale, "prior_scale"), scale_within(intercept_scale, "intercept_scale"))
        if isinstance(memory, bool) or not isinstance(memory, Integral) or memory < 2:
            raise ValueError(f"memory must be a whole number from 2 on; got {shown(memory)}.")
        self.memory, self.refreshing = int(memory), refresh
        self.forget = share(forget, "forget")
        if not self.forget:
            raise ValueError("forget must be a number above 0; got 0. Use 1 to forget nothing.")
        self.arms: list[Any] = []
        self._number: dict[Any, int] = {}  # of each arm, retired ones too
        self._allowed = np.zeros(0, dtype=np.intp)
        if isinstance(arms, str) or not isinstance(arms, Iterable):
            raise TypeError(f"arms must be a list of texts or numbers; got {shown(arms)}.")
        for arm in arms:
            self._name_arm(self._new_name(arm))
        if not self.arms:
            raise ValueError("arms must be at least one; got none.")
        self._generator = generator_of(random_state)
        self._lock = threading.RLock()
        self._weights: Weights | None = None  # until the first context says how many columns there are
        self._pending: dict[int, Pending] = {}
        self._next_id = 0
        self._time = 0  # rewards so far
        self._forgotten = 0  # rewards up to which forgetting is done
        self._refreshed = 0  # rewards at the last refresh

    # --- arms ---

    def add_arm(self, arm: Any, like: Any = None) -> None:
        """Add an arm, or take a retired one back.

        Parameters
        ----------
        arm
            Its name.
        like : arm, list of arms or "all", optional
            Arms it may be similar to: a new one then starts from a draw from one of them, not from the prior. For
            model="disjoint"; with others, arms share what they have in common anyway.
        """
        with self._lock:
            arm = self._new_name(arm)
            alike = None if like is None else self._named(self.arms if is_all(like) else like)[1]
            if arm not in self._number and self._weights is not None:
                self._weights = self._weights.with_arm(alike)
            self._name_arm(arm)

    def retire_arm(self, arm: Any) -> None:
        """No longer choose an arm. Rewards that are still to come are taken, and `add_arm` takes it back."""
        with self._lock:
            number = self._named([arm])[1][0]
            if len(self.arms) == 1:
                raise ValueError(f"a bandit needs at least one arm; got {shown(arm)}, the last. Add another first.")
            self.arms.remove(arm)
            self._allowed = self._allowed[self._allowed != number]

    def _new_name(self, arm: Any) -> Any:
        """The name of an arm that is to be added, checked."""
        arm = arm.item() if isinstance(arm, np.generic) else arm  # as files store it
        if not isinstance(arm, str | Real):
            raise TypeError(f"an arm must be a text or a number; got {type(arm).__name__}.")
        if arm in (math.inf, -math.inf) or arm != arm:
            raise ValueError(f"an arm must be a text or a finite number; got {arm}.")
        if arm in self.arms:
            raise ValueError(f"arms must be all different; got {shown(arm)} twice.")
        return arm

    def _name_arm(self, arm: Any) -> None:
        number = self._number.setdefault(arm, len(self._number))
        self.arms.append(arm)
        self._allowed = np.append(self._allowed, number).astype(np.intp)

    def _named(self, arms: Any) -> tuple[list[Any], np.ndarray]:
        """Names and numbers of some arms, given as one or as a list; of all, if None."""
        if arms is None:
            return self.arms, self._allowed
        names = [arms] if isinstance(arms, str | Real) else list(arms)
        if unknown := [name for name in names if name not in self.arms]:
            raise ValueError(f"arms must be among {shown(self.arms)}; got {shown(unknown[0])}.")
        if not names or len(set(names)) < len(names):
            raise ValueError(f"arms must be at least one, each named once; got {shown(names)}.")
        return names, np.array([self._number[name] for name in names], dtype=np.intp)

    # --- decisions ---

    def pull(self, context: Any = None, features: Any = None, allowed: Any = None, slate: Any = None) -> Any:
        """Choose an arm.

        Parameters
        ----------
        context : array of numbers, optional
            What is known of the occasion. Always as many columns; none for a bandit without contexts.
        features : array (arms, columns) or dict of arrays, optional
            What is known of the arms, in the order of `arms` or of `allowed`. Needed by model="shared".
        allowed : list of arms, optional
            The arms that may be chosen now; all, if not given.
        slate : int, optional
            Choose so many different arms, one after the other, and return a list.

        Returns
        -------
        Choice
            With `arm`, `propensity`, `probability`, `interval` and `id`.
        """
        with self._lock:
            names, numbers = self._named(allowed)
            weights, vectors = self._read(context, features, names)
            if slate is None:
                return self._choose(weights, numbers, names, vectors)[1]
            if isinstance(slate, bool) or not isinstance(slate, Integral) or not 1 <= int(slate) <= len(names):
                raise ValueError(f"slate must be a whole number from 1 to {len(names)}, the arms; got {shown(slate)}.")
            choices, left = [], np.arange(len(names))
            for _ in range(int(slate)):
                rows = vectors[left] if len(vectors) > 1 else vectors
                position, choice = self._choose(weights, numbers[left], [names[i] for i in left], rows)
                choices.append(choice)
                left = np.delete(left, position)
            return choices

    def probabilities(self, context: Any = None, features: Any = None, allowed: Any = None) -> dict[Any, float]:
        """The probability with which `pull` would choose each arm now."""
        with self._lock:
            names, numbers = self._named(allowed)
            weights, vectors = self._read(context, features, names)
            odds = weights.decide(self.policy, numbers, vectors)
            return dict(zip(names, odds.chance.tolist(), strict=True))

    def _choose(
        self, weights: Weights, numbers: np.ndarray, names: Sequence[Any], vectors: np.ndarray
    ) -> tuple[int, Choice]:
        odds = weights.decide(self.policy, numbers, vectors)
        total = odds.chance.cumsum()
        position = int(total.searchsorted(self._generator.random() * total[-1], "right"))
        if position == len(total):  # the product was rounded up
            position = int(odds.chance.argmax())
        vector = vectors[position].copy() if len(vectors) > 1 else vectors[0]
        mean, sd = float(odds.mean[position]), math.sqrt(odds.variance[position])
        choice = Choice(
            names[position],
            float(odds.chance[position]),
            float(odds.reward[position]),
            (logistic(mean - LEVEL * sd), logistic(mean + LEVEL * sd)),
            self._next_id,
        )
        self._pending[self._next_id] = Pending(int(numbers[position]), vector, choice.propensity)
        self._next_id += 1
        if len(self._pending) > MOST_PENDING:
            del self._pending[next(iter(self._pending))]
        return position, choice

    def _read(self, context: Any, features: Any, names: Sequence[Any]) -> tuple[Weights, np.ndarray]:
        """Check context and features; the first ones say how many columns there are. Returns the arms' vectors."""
        place = np.zeros(0) if context is None else finite_array(context, "context", 1)
        if self.model == "disjoint":
            if features is not None:
                raise ValueError("features need model='shared' or 'hybrid'; got model='disjoint'. Choose another.")
            own = None
        elif features is None:
            if self.model == "shared":
                raise ValueError("model='shared' needs features of the arms; got none. Pass features=.")
            own = None
        else:
            own = self._read_features(features, names)
        columns = 0 if own is None else own.shape[1]
        if self._weights is None:
            self._weights = Weights(self.model, self.scales, len(self._number), columns, len(place))
        for what, got, known in (
            ("context", len(place), self._weights.context),
            ("features", columns, self._weights.features),
        ):
            if got != known:
                raise ValueError(f"{what} must have {known} columns, as before; got {got}.")
        return self._weights, self._weights.vectors(own, place)

    def _read_features(self, features: Any, names: Sequence[Any]) -> np.ndarray:
        if isinstance(features, Mapping):
            if missing := [name for name in names if name not in features]:
                raise ValueError(f"features must have every arm that may be chosen; got none of {shown(missing[0])}.")
            features = [features[name] for name in names]
        own = finite_array(features, "features", 2)
        if len(own) != len(names):
            raise ValueError(f"features must have a row an arm, {len(names)}; got {len(own)}.")
        return own

    # --- rewards ---

    def update(self, id: Any, reward: Any) -> None:
        """Learn from rewards, 0 or 1: of one choice or of many, now or days later, in any order.

        Nothing is learned if any of them is refused.
        """
        with self._lock:
            ids, given = (
                ([id], [reward]) if isinstance(id, Integral) else (items_in(id, "id"), items_in(reward, "reward"))
            )
            if len(ids) != len(given):
                raise ValueError(f"there must be a reward for every id, {len(ids)}; got {len(given)}.")
            values = [checked_reward(value) for value in given]
            seen: set[Any] = set()
            for one in ids:
                if not isinstance(one, Integral) or one not in self._pending or one in seen:
                    raise ValueError(
                        f"id must be that of a choice that awaits its reward; got {shown(one)}. Each takes one reward, "
                        f"and the last {MOST_PENDING:,} choices are remembered."
                    )
                seen.add(one)
            for one, value in zip(ids, values, strict=True):
                self._learn(self._pending.pop(one), value)

    def _learn(self, pending: Pending, reward: float) -> None:
        assert self._weights is not None
        self._time += 1
        self._weights.observe(Played(self._time, pending.arm, pending.propensity, reward, pending.vector))
        if self.forget ** (self._time - self._forgotten) < 1.0 - FORGETTING_STEP:
            self._forget()
        if self._weights.kept > self.memory:
            self._forget()
            self._weights.absorb(self._weights.kept // 2)
        if self.refreshing == "doublings" and self._time >= max(FIRST_REFRESH, 2 * self._refreshed):
            self.refresh()

    def _forget(self) -> None:
        """Discount what was told before, up to now."""
        assert self._weights is not None
        self._weights.discount(self.forget, self._forgotten, self._time)
        self._forgotten = self._time

    def refresh(self) -> None:
        """Visit all kept rewards until the posterior no longer moves: it is then the same whatever their order was."""
        with self._lock:
            if self._weights is None:
                return
            self._forget()
            self._weights.refit()
            self._refreshed = self._time

    def log(self) -> Log:
        """The kept decisions whose rewards are known."""
        with self._lock:
            weights = self._weights or Weights(self.model, self.scales, len(self._number), 0, 0)
            names, (table, vectors) = list(self._number), weights.played()
            return Log(
                vectors[:, weights.features : -1],
                np.array([names[int(arm)] for arm in table[:, ARM]], dtype=object),
                table[:, PROPENSITY],
                table[:, REWARD],
                vectors[:, : weights.features],
            )

    # --- files ---

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Write everything to one file, which `viper.load` reads: arms, posterior, kept rewards, open choices, seed.

        The loaded bandit goes on as this one would.
        """
        with self._lock:
            state = storing.pack_bandit(self)
        write_tensors(path, storing.KIND, *state, overwrite)

    _kind = storing.KIND
    _check_header = staticmethod(storing.check_header)

    @classmethod
    def _required_objects(cls, metadata: dict[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
        if objects:
            raise TypeError(f"a bandit is loaded without objects; got {list(objects)}.")
        return {}

    @classmethod
    def _unpack(cls, state: State, objects: dict[str, Any]) -> "Bandit":
        return storing.unpack_bandit(cls, state)

    def __repr__(self) -> str:
        return f"Bandit({shown(self.arms)}, policy={self.policy.name!r}, model={self.model!r}), {self._time} rewards"

    def __getstate__(self) -> dict[str, Any]:
        """A copy of everything, which stays as it is while other threads go on."""
        with self._lock:
            return copy.deepcopy({name: value for name, value in self.__dict__.items() if name != "_lock"})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()


def is_all(like: Any) -> bool:
    return isinstance(like, str) and like == "all"


def logistic(f: float) -> float:
    return 1.0 / (1.0 + math.exp(-f)) if f > -700.0 else math.exp(f)


def scale_within(value: Any, name: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not 1.0 / LARGEST_ENTRY <= float(value) <= LARGEST_ENTRY
    ):
        raise ValueError(
            f"{name} must be a number from {1.0 / LARGEST_ENTRY:g} to {LARGEST_ENTRY:g}; got {shown(value)}."
        )
    return float(value)


def share(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"{name} must lie between 0 and 1; got {shown(value)}.")
    return float(value)


def generator_of(random_state: Any) -> np.random.Generator:
    try:
        return np.random.default_rng(random_state)
    except (TypeError, ValueError):
        raise ValueError(
            f"random_state must be a whole number from 0 on, a Generator or None; got {shown(random_state)}."
        ) from None


def items_in(value: Any, name: str) -> list[Any]:
    """The items of a list, an array or the like."""
    if isinstance(value, str | Choice) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a number, or ids and rewards lists of numbers; got {shown(value)}.")
    return list(value)


def checked_reward(value: Any) -> float:
    if not isinstance(value, Real | np.bool_) or value not in (0, 1):
        raise ValueError(f"a reward must be 0 or 1; got {shown(value)}. For others, choose a threshold.")
    return float(value)


def finite_array(value: Any, name: str, axes: int) -> np.ndarray:
    """The value as a float64 array with so many axes."""
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be numbers; got {shown(value)}.") from None
    if array.ndim != axes:
        shape = "a list of numbers" if axes == 1 else "a table of numbers"
        raise ValueError(f"{name} must be {shape}; got {array.ndim} axes.")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite; got {shown(value)}.")
    if (np.abs(array) > LARGEST_ENTRY).any():
        raise ValueError(
            f"{name} must be from {-LARGEST_ENTRY:g} to {LARGEST_ENTRY:g}; got {shown(value)}. Change the units."
        )
    return array
