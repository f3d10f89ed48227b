"""The Gaussian posterior of a bandit's weights: w, which all arms share, and w_a, which belong to arm a alone.

    disjoint   f_a = w_a'(context, 1)
    shared     f_a = w'(features of a, context, 1)
    hybrid     f_a = w'(features of a, context, 1) + w_a'(context, 1)

Given w, the weights of different arms are independent. The precision is therefore an arrow matrix, and work and memory
are linear in the number of arms. It is the sum of a base (the prior, and outcomes that are no longer kept) and the
factors of the outcomes that are kept. A decision treats the arms' log-odds as independent.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from viper.decisions import arms
from viper.decisions.arms import ArmPosterior
from viper.decisions.compiled import Addresses, arm_library
from viper.decisions.outcomes import ARM, COLUMNS, NEW_FACTOR, PRECISION, SHIFT, TIME, WEIGHT, Outcomes, Played
from viper.inference.groups.arrow import Arrow, Split

MODELS = ("disjoint", "shared", "hybrid")
POLICIES = ("ids", "ucb", "thompson", "epsilon-greedy", "greedy")  # in the order of _arms.c
MOST_WEIGHTS = 4_000  # most weights that one arm depends on, shared and own
MOST_ENTRIES = 1 << 28  # most entries of all covariances: 2 GB
VISITED, CALM = 8, 0.05  # stop when this many older rewards in a row have moved f by less than this share of its sd
MOST_VISITED = 256  # rewards, or as many as change MOST_CHANGED entries of a covariance
MOST_CHANGED = 1 << 20
ROUNDED_AWAY = 1e-12  # rounding error of a precision matrix, as a share of its diagonal
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
    """The posterior of a model's weights, with the prior and the factors that it consists of."""

    def __init__(self, model: str, scales: Scales, arm_count: int, features: int, context: int) -> None:
        self.model, self.scales, self.arm_count = model, scales, arm_count
        self.features, self.context = features, context
        self.width = features + context + 1
        self.shared = 0 if model == "disjoint" else self.width
        self.own = 0 if model == "shared" else context + 1
        if self.shared + self.own > MOST_WEIGHTS:
            raise ValueError(
                f"an arm may have {MOST_WEIGHTS:,} weights; got {self.shared + self.own:,}. Use fewer columns."
            )
        if (entries := self.shared**2 + arm_count * self.own * (self.shared + self.own)) > MOST_ENTRIES:
            raise ValueError(
                f"covariances may take {8e-9 * MOST_ENTRIES:.1f} GB of memory; got {8e-9 * entries:.1f}. Use fewer "
                "arms or columns, or model='shared'."
            )
        self.base, self.base_shift = self.prior(), Split(np.zeros(self.shared), np.zeros((arm_count, self.own)))
        self.outcomes: dict[int, Outcomes] = {}  # of each arm, or of all together if they share weights
        self.kept = 0
        self.set(weights_given(self.base, self.base_shift))

    def prior(self) -> Arrow:
        """The prior's precision: weights that arms share, and each arm's own ones."""
        precision = np.full(self.width, self.scales.prior**-2.0)
        precision[-1] = self.scales.intercept**-2.0
        own = np.tile(np.diag(precision[self.width - self.own :]), (self.arm_count, 1, 1))
        return Arrow(np.diag(precision[: self.shared]), np.zeros((self.arm_count, self.own, self.shared)), own)

    def set(self, posterior: ArmPosterior) -> None:
        self.posterior = ArmPosterior(*map(np.ascontiguousarray, posterior))
        self.addresses = Addresses(self.posterior, self.width)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "addresses"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.set(self.posterior)

    # --- vectors ---

    def vectors(self, features: np.ndarray | None, context: np.ndarray) -> np.ndarray:
        """(features of an arm, context, 1), as many rows as features have."""
        rows, first = (1, 0) if features is None else features.shape
        found = np.ones((rows, first + len(context) + 1))
        found[:, first:-1] = context
        if features is not None:
            found[:, :first] = features
        return found

    def keep(self, arm: int, row: Sequence[float] | np.ndarray, vector: np.ndarray) -> int:
        """Add an outcome to those that are kept, as a row of their table. Returns its block."""
        block = arm if self.model == "disjoint" else 0
        if block not in self.outcomes:
            self.outcomes[block] = Outcomes(self.width)
        self.outcomes[block].append(row, vector)
        self.kept += 1
        return block

    # --- decisions and outcomes ---

    def decide(self, policy: Policy, arm: np.ndarray, vectors: np.ndarray) -> Odds:
        """What is known of these arms, and with which chances a policy chooses among them."""
        code = POLICIES.index(policy.name)
        if (functions := arm_library()) is not None:
            return Odds(*self.addresses.decision(functions, code, policy.spread, policy.epsilon, vectors, arm))
        t, v = arms.arm_moments(vectors, self.posterior, arm)
        reward, information = arms.rewards(t, v)
        return Odds(t, v, reward, information, chances_of(policy, t, v, reward, information))

    def observe(self, row: Played) -> None:
        """Change the posterior by one outcome, and the factors of older ones that it moves."""
        block = self.keep(row.arm, (*row[:4], *NEW_FACTOR), row.vector)
        most = min(MOST_VISITED, MOST_CHANGED // (self.shared + self.own) ** 2)
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
            visited = self.addresses.visits(functions, kept, least, most, calm)
        else:
            visited = arms.visits(kept.vectors, kept.table, kept.next, least, most, calm, self.posterior)
        kept.next = (kept.next + visited) % kept.count

    def rebuild(self) -> None:
        """The posterior from its base and all factors, without what steps have rounded away."""
        precision, shift = copy.deepcopy((self.base, self.base_shift))
        for outcomes in self.outcomes.values():
            self.tell(outcomes, outcomes.count, precision, shift)
        self.set(weights_given(precision, shift))

    def tell(self, outcomes: Outcomes, count: int, precision: Arrow, shift: Split) -> None:
        """Add the factors of the oldest outcomes to a precision and a shift."""
        table, vectors = outcomes.table[:count], outcomes.vectors[:count]
        for arm in np.unique(table[:, ARM]).astype(np.intp):
            mine = table[:, ARM] == arm
            told, x = table[mine], vectors[mine]
            u, c = x[:, : self.shared], x[:, self.width - self.own :]
            weighted, pushed = told[:, WEIGHT] * told[:, PRECISION], told[:, WEIGHT] * told[:, SHIFT]
            across = c.T * weighted
            precision.border[...] += (u.T * weighted) @ u
            precision.cross[arm] += across @ u
            precision.blocks[arm] += across @ c
            shift.border[...] += u.T @ pushed
            shift.groups[arm] += c.T @ pushed

    def absorb(self, count: int) -> None:
        """No longer keep the oldest outcomes: their factors stay, in the base."""
        last = np.sort(np.concatenate([outcomes.table[:, TIME] for outcomes in self.outcomes.values()]))[count - 1]
        for outcomes in self.outcomes.values():
            old = int(np.searchsorted(outcomes.table[:, TIME], last, "right"))
            self.tell(outcomes, old, self.base, self.base_shift)
            outcomes.drop(old)
            self.kept -= old

    def discount(self, forget: float, since: int, now: int) -> None:
        """Multiply weights by `forget` for each reward since then; those of later ones, for each after their own."""
        if forget == 1.0 or since == now:
            return
        share = forget ** (now - since)
        self.base = self.prior().mixed(self.base, share)
        self.base_shift = Split(*(share * part for part in self.base_shift))
        for outcomes in self.outcomes.values():
            outcomes.table[:, WEIGHT] *= forget ** (now - np.maximum(outcomes.table[:, TIME], since))
        self.rebuild()

    def played(self) -> tuple[np.ndarray, np.ndarray]:
        """Table and vectors of all kept outcomes, oldest first."""
        parts = [(outcomes.table, outcomes.vectors) for outcomes in self.outcomes.values()]
        parts = parts or [(np.empty((0, COLUMNS)), np.empty((0, self.width)))]
        table, vectors = (np.concatenate(one) for one in zip(*parts, strict=True))
        order = table[:, TIME].argsort()
        return table[order], vectors[order]

    def with_arm(self, like: np.ndarray | None) -> "Weights":
        """The same with one more arm, which starts from the prior or, if `like` names arms, from what they share.

        The latter is the Gaussian with the mean and covariance of a draw from one of them, taken at random.
        """
        more = Weights(self.model, self.scales, self.arm_count + 1, self.features, self.context)
        for mine, its in ((self.base, more.base), (self.base_shift, more.base_shift), (self.posterior, more.posterior)):
            for old, new in zip(mine, its, strict=True):
                new[: len(old)] = old
        more.outcomes, more.kept = self.outcomes, self.kept
        if like is not None and self.model == "disjoint":
            own_mean, own_covariance = more.posterior.own_mean, more.posterior.own_covariance
            means = self.posterior.own_mean[like]
            between = (means - means.mean(0)).T @ (means - means.mean(0)) / len(means)
            own_mean[-1], own_covariance[-1] = means.mean(0), self.posterior.own_covariance[like].mean(0) + between
            more.base.blocks[-1] = np.linalg.inv(own_covariance[-1])
            more.base_shift.groups[-1] = more.base.blocks[-1] @ own_mean[-1]
        return more


def weights_given(precision: Arrow, shift: Split) -> ArmPosterior:
    """The Gaussian with density proportional to exp(shift'w - w' precision w / 2).

    If rounding has left the precision indefinite, its diagonal grows by the size of the rounding error.
    """
    try:
        return solved_arrow(precision, shift)
    except np.linalg.LinAlgError:
        return solved_arrow(Arrow(raised(precision.border), precision.cross, raised(precision.blocks)), shift)


def solved_arrow(precision: Arrow, shift: Split) -> ArmPosterior:
    """The own weights given the shared ones, and by Schur's complement the shared ones alone."""
    arms_and_own = [0, 1], [0, 1]
    own_root = inverse_roots(precision.blocks)
    half = own_root @ precision.cross
    slope = -own_root.transpose(0, 2, 1) @ half
    own_covariance = own_root.transpose(0, 2, 1) @ own_root
    root = inverse_roots(precision.border - np.tensordot(half, half, arms_and_own))
    covariance = root.T @ root
    mean = covariance @ (shift.border + np.tensordot(slope, shift.groups, arms_and_own))
    return ArmPosterior(mean, covariance, np.einsum("kij,kj->ki", own_covariance, shift.groups), slope, own_covariance)


def inverse_roots(precision: np.ndarray) -> np.ndarray:
    """R with R'R the inverse of a matrix, or of each of many, in units in which their diagonals are 1."""
    diagonal = np.einsum("...ii->...i", precision)
    if not (diagonal > 0.0).all():
        raise np.linalg.LinAlgError
    unit = diagonal**-0.5
    root = np.linalg.cholesky(precision * (unit[..., :, None] * unit[..., None, :]))
    return np.linalg.inv(root) * unit[..., None, :]


def raised(precision: np.ndarray) -> np.ndarray:
    """The same with larger diagonals."""
    return precision * (1.0 + ROUNDED_AWAY * np.eye(precision.shape[-1]))


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
