"""The posterior of a bandit's weights: Gaussian, one block an arm or one block for all.

    disjoint   f_a = w_a'(context, 1)
    shared     f_a = w'(features of a, context, 1)
    hybrid     f_a = w'(features of a, context, 1) + w_a'(context, 1)

A decision sees the arms' log-odds as independent. A block's precision is that of its base, the prior and outcomes that
are no longer kept, plus those of the factors of the kept ones.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from viper.decisions import arms
from viper.decisions.compiled import Addresses, arm_library
from viper.decisions.outcomes import ARM, COLUMNS, NEW_FACTOR, PRECISION, SHIFT, TIME, WEIGHT, Outcomes, Played

MODELS = ("disjoint", "shared", "hybrid")
POLICIES = ("ids", "ucb", "thompson", "epsilon-greedy", "greedy")  # in the order of _arms.c
MOST_WEIGHTS = 4_000  # of a block; their covariance takes 128 MB
VISITED, CALM = 8, 0.05  # a reward is learned when so many older ones in turn move f by less than this share of its sd
MOST_VISITED = 256  # rewards, or as many as change MOST_CHANGED entries of a covariance
MOST_CHANGED = 1 << 20
ROUNDED_AWAY = 1e-12  # share of the diagonal of a precision matrix
SETTLED, MOST_ROUNDS = 1e-7, 100  # a refresh ends when no factor moves f by more than this share of its sd


class Policy(NamedTuple):
    """How arms are chosen: by name; the spread is in sds of the log-odds, and a share of epsilon takes any arm."""

    name: str
    spread: float
    epsilon: float


class Odds(NamedTuple):
    """What is known of each arm: mean and variance of its log-odds, E s(f), information, chance of being chosen."""

    mean: np.ndarray
    variance: np.ndarray
    reward: np.ndarray
    information: np.ndarray
    chance: np.ndarray


class Scales(NamedTuple):
    """Prior standard deviations of weights and of intercepts."""

    prior: float
    intercept: float


class Weights:
    """Means (blocks × size) and covariances (blocks × size × size) of the weights of a model."""

    def __init__(self, model: str, scales: Scales, arm_count: int, features: int, context: int) -> None:
        self.model, self.scales, self.arm_count = model, scales, arm_count
        self.features, self.context = features, context
        width = features + context + 1
        size = width + arm_count * (context + 1) if model == "hybrid" else width
        if size > MOST_WEIGHTS:
            fix = "Use fewer arms or columns, or model='disjoint'." if model == "hybrid" else "Use fewer columns."
            raise ValueError(f"model={model!r} allows {MOST_WEIGHTS:,} weights of one block; got {size:,}. {fix}")
        own = np.full(context + 1, scales.prior)
        own[-1] = scales.intercept
        common = np.concatenate([np.full(features, scales.prior), own])
        if model == "hybrid":
            self.sd = np.concatenate([common, np.tile(own, arm_count)])[None]
        else:
            self.sd = np.tile(common, (arm_count if model == "disjoint" else 1, 1))
        self.base_precision, self.base_shift = prior_precision(self.sd), np.zeros_like(self.sd)
        self.outcomes: dict[int, Outcomes] = {}  # by block
        self.kept = 0
        self.set(np.zeros_like(self.sd), np.stack([np.diag(row**2) for row in self.sd]))

    def set(self, mean: np.ndarray, covariance: np.ndarray) -> None:
        self.mean, self.covariance = np.ascontiguousarray(mean), np.ascontiguousarray(covariance)
        self.addresses = Addresses(self.mean, self.covariance)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "addresses"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.set(self.mean, self.covariance)

    # --- vectors ---

    def vectors(self, features: np.ndarray | None, context: np.ndarray) -> np.ndarray:
        """(features of an arm, context, 1), as many rows as features have."""
        rows, first = (1, 0) if features is None else features.shape
        found = np.ones((rows, first + len(context) + 1))
        found[:, first:-1] = context
        if features is not None:
            found[:, :first] = features
        return found

    def design(self, arm: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """The vectors x with f = w'x of arms."""
        if self.model != "hybrid":
            return vectors
        own, width = self.context + 1, vectors.shape[1]
        x = np.zeros((len(arm), self.mean.shape[1]))
        x[:, :width] = vectors
        places = width + arm[:, None] * own + np.arange(own)
        np.put_along_axis(x, places, np.broadcast_to(vectors[:, -own:], places.shape), 1)
        return x

    def blocks(self, arm: np.ndarray) -> np.ndarray:
        """The block of each arm."""
        return arm if self.model == "disjoint" else np.zeros_like(arm)

    def keep(self, arm: int, row: Sequence[float] | np.ndarray, vector: np.ndarray) -> int:
        """Add an outcome to those that are kept, as a row of their table. Returns its block."""
        block = arm if self.model == "disjoint" else 0
        if block not in self.outcomes:
            self.outcomes[block] = Outcomes(self.features + self.context + 1)
        self.outcomes[block].append(row, vector)
        self.kept += 1
        return block

    # --- decisions and outcomes ---

    def decide(self, policy: Policy, arm: np.ndarray, vectors: np.ndarray) -> Odds:
        """What is known of these arms, and with which chances a policy chooses among them."""
        x, block = self.design(arm, vectors), self.blocks(arm)
        code = POLICIES.index(policy.name)
        if (functions := arm_library()) is not None:
            return Odds(*self.addresses.decision(functions, code, policy.spread, policy.epsilon, x, block))
        t, v = arms.arm_moments(x, self.mean, self.covariance, block)
        reward, information = arms.rewards(t, v)
        return Odds(t, v, reward, information, chances_of(policy, t, v, reward, information))

    def observe(self, row: Played) -> None:
        """Change the posterior by one outcome, and the factors of older ones that it moves."""
        block = self.keep(row.arm, (*row[:4], *NEW_FACTOR), row.vector)
        most = min(MOST_VISITED, MOST_CHANGED // self.mean.shape[1] ** 2)
        self.visit(block, min(VISITED, most, self.outcomes[block].count - 1), most, CALM)

    def refit(self) -> None:
        """Visit all kept outcomes until no factor moves any more."""
        self.rebuild()
        for block, outcomes in self.outcomes.items():
            if outcomes.count:
                self.visit(block, outcomes.count, MOST_ROUNDS * outcomes.count, SETTLED)

    def visit(self, block: int, least: int, most: int, calm: float) -> None:
        """Visit outcomes of a block until `least` in turn have moved f by less than `calm`, or `most` are visited."""
        kept = self.outcomes[block]
        if (functions := arm_library()) is not None:
            visited = self.addresses.visits(functions, block, kept, self.context + 1, least, most, calm)
        else:
            X = self.design(kept.table[:, ARM].astype(np.intp), kept.vectors)
            posterior = self.mean[block], self.covariance[block]
            visited = arms.visits(X, kept.table, kept.next, least, most, calm, *posterior)
        kept.next = (kept.next + visited) % kept.count

    def rebuild(self) -> None:
        """The posterior from its base and all factors, without what steps have rounded away."""
        precision, shift = self.base_precision.copy(), self.base_shift.copy()
        for block, outcomes in self.outcomes.items():
            told = self.told(outcomes, outcomes.count)
            precision[block] += told[0]
            shift[block] += told[1]
        covariance = inverses(precision)
        self.set(np.einsum("kij,kj->ki", covariance, shift), covariance)

    def told(self, outcomes: Outcomes, count: int) -> tuple[np.ndarray, np.ndarray]:
        """What the factors of the oldest outcomes add to the precision and to the shift of their block."""
        table = outcomes.table[:count]
        X = self.design(table[:, ARM].astype(np.intp), outcomes.vectors[:count])
        return (X.T * (table[:, WEIGHT] * table[:, PRECISION])) @ X, X.T @ (table[:, WEIGHT] * table[:, SHIFT])

    def absorb(self, count: int) -> None:
        """No longer keep the oldest outcomes: their factors stay, in the base."""
        last = np.sort(np.concatenate([outcomes.table[:, TIME] for outcomes in self.outcomes.values()]))[count - 1]
        for block, outcomes in self.outcomes.items():
            old = int(np.searchsorted(outcomes.table[:, TIME], last, "right"))
            told = self.told(outcomes, old)
            self.base_precision[block] += told[0]
            self.base_shift[block] += told[1]
            outcomes.drop(old)
            self.kept -= old

    def discount(self, forget: float, since: int, now: int) -> None:
        """Multiply weights by `forget` for each reward since then; those of later ones, for each after their own."""
        if forget == 1.0 or since == now:
            return
        prior, share = prior_precision(self.sd), forget ** (now - since)
        self.base_precision = prior + share * (self.base_precision - prior)
        self.base_shift *= share
        for outcomes in self.outcomes.values():
            outcomes.table[:, WEIGHT] *= forget ** (now - np.maximum(outcomes.table[:, TIME], since))
        self.rebuild()

    def played(self) -> tuple[np.ndarray, np.ndarray]:
        """Table and vectors of all kept outcomes, oldest first."""
        parts = [(outcomes.table, outcomes.vectors) for outcomes in self.outcomes.values()]
        parts = parts or [(np.empty((0, COLUMNS)), np.empty((0, self.features + self.context + 1)))]
        table, vectors = (np.concatenate(one) for one in zip(*parts, strict=True))
        order = table[:, TIME].argsort()
        return table[order], vectors[order]

    def with_arm(self, like: np.ndarray | None) -> "Weights":
        """The same with one more arm, which starts from the prior or, if `like` names arms, from what they share.

        The latter is the Gaussian with the mean and covariance of a draw from one of them, taken at random.
        """
        more = Weights(self.model, self.scales, self.arm_count + 1, self.features, self.context)
        blocks, size = self.mean.shape
        for name in ("mean", "base_shift"):
            getattr(more, name)[:blocks, :size] = getattr(self, name)
        for name in ("covariance", "base_precision"):
            getattr(more, name)[:blocks, :size, :size] = getattr(self, name)
        more.outcomes, more.kept = self.outcomes, self.kept
        if like is not None and self.model == "disjoint":
            means = self.mean[like]
            between = (means - means.mean(0)).T @ (means - means.mean(0)) / len(means)
            more.mean[-1], more.covariance[-1] = means.mean(0), self.covariance[like].mean(0) + between
            more.base_precision[-1] = np.linalg.inv(more.covariance[-1])
            more.base_shift[-1] = more.base_precision[-1] @ more.mean[-1]
        return more


def prior_precision(sd: np.ndarray) -> np.ndarray:
    """A diagonal matrix of sd⁻² for each row."""
    return np.stack([np.diag(row**-2.0) for row in sd])


def inverses(precision: np.ndarray) -> np.ndarray:
    """L⁻ᵀ L⁻¹ of precision matrices, in units in which their diagonals are 1; where rounding has left one that is not
    positive definite, with as much more on all diagonals as rounding may have taken.
    """
    unit = np.einsum("kii->ki", precision) ** -0.5
    units = unit[:, :, None] * unit[:, None]
    correlations = precision * units
    try:
        root = np.linalg.cholesky(correlations)
    except np.linalg.LinAlgError:
        root = np.linalg.cholesky(correlations + ROUNDED_AWAY * np.eye(unit.shape[1]))
    inverse = np.linalg.inv(root)
    return (inverse.transpose(0, 2, 1) @ inverse) * units


def chances_of(policy: Policy, t: np.ndarray, v: np.ndarray, reward: np.ndarray, information: np.ndarray) -> np.ndarray:
    """The chance with which a policy chooses each arm; a share of epsilon takes any."""
    if policy.name == "thompson":
        chance = arms.chances(t, v, policy.spread)[0]
    elif policy.name == "ids":
        best = arms.chances(t, v, policy.spread)[1]
        chance = arms.least_ratio(np.maximum(best - reward, 0.0), information)
    elif policy.name == "ucb":
        chance = arms.largest(t + policy.spread * np.sqrt(v))
    else:
        chance = arms.largest(reward)
    return policy.epsilon / len(t) + (1.0 - policy.epsilon) * chance
