"""The posterior of a bandit's weights: Gaussian, one block an arm or one block for all.

    disjoint   f_a = w_a'(context, 1)
    shared     f_a = w'(features of a, context, 1)
    hybrid     f_a = w'(features of a, context, 1) + w_a'(context, 1)

A decision sees the arms' log-odds as independent. One outcome is a step of moment matching; `refit` is a fit to rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from viper.decisions import arms
from viper.decisions.compiled import Addresses, arm_library
from viper.models.logistic import VariationalLogisticRegression

MODELS = ("disjoint", "shared", "hybrid")
POLICIES = ("ids", "ucb", "thompson", "epsilon-greedy", "greedy")  # in the order of _arms.c
LARGEST_HYBRID = 4_000  # weights; their covariance takes 128 MB


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


class Played(NamedTuple):
    """One outcome: when it came, of which arm, the vector it was chosen by, its propensity and its reward."""

    time: int
    arm: int
    vector: np.ndarray  # features of the arm, context
    propensity: float
    reward: float


class Scales(NamedTuple):
    """Prior standard deviations of weights and of intercepts."""

    prior: float
    intercept: float


class Weights:
    """Means (blocks × size) and covariances (blocks × size × size) of the weights of a model."""

    def __init__(self, model: str, scales: Scales, arm_count: int, features: int, context: int) -> None:
        self.model, self.scales, self.arm_count = model, scales, arm_count
        self.features, self.context = features, context
        own = np.full(context + 1, scales.prior)
        own[-1] = scales.intercept
        common = np.concatenate([np.full(features, scales.prior), own])
        if model == "disjoint":
            self.sd = np.tile(own, (arm_count, 1))
        elif model == "shared":
            self.sd = common[None]
        else:
            self.sd = np.concatenate([common, np.tile(own, arm_count)])[None]
        if self.sd.shape[1] > LARGEST_HYBRID:
            raise ValueError(
                f"model={model!r} allows {LARGEST_HYBRID} weights; got {self.sd.shape[1]}. Use fewer arms or columns, "
                "or model='disjoint'."
            )
        self.set(np.zeros_like(self.sd), np.stack([np.diag(row**2) for row in self.sd]))

    def set(self, mean: np.ndarray, covariance: np.ndarray) -> None:
        self.mean, self.covariance = np.ascontiguousarray(mean), np.ascontiguousarray(covariance)
        self.addresses = Addresses(self.mean, self.covariance)

    def copy(self) -> "Weights":
        other = object.__new__(Weights)
        other.__dict__.update(self.__dict__)
        other.set(self.mean.copy(), self.covariance.copy())
        return other

    # --- vectors ---

    def design(self, arm: np.ndarray, features: np.ndarray | None, context: np.ndarray) -> np.ndarray:
        """The vectors x with f = w'x of arms, (1 or n × size); features (n × columns), context (1 or n × columns)."""
        own = np.ones((len(context), self.context + 1))
        own[:, :-1] = context
        if self.model == "disjoint":
            return own
        parts = [] if features is None or not self.features else [features]
        common = np.concatenate([*parts, np.broadcast_to(own, (len(arm), own.shape[1]))], 1)
        if self.model == "shared":
            return np.ascontiguousarray(common)
        x = np.zeros((len(arm), self.mean.shape[1]))
        x[:, : common.shape[1]] = common
        first = common.shape[1] + arm[:, None] * own.shape[1] + np.arange(own.shape[1])
        np.put_along_axis(x, first, np.broadcast_to(own, (len(arm), own.shape[1])), 1)
        return x

    def blocks(self, arm: np.ndarray) -> np.ndarray:
        """The block of each arm."""
        return arm if self.model == "disjoint" else np.zeros_like(arm)

    def design_of(self, rows: Sequence[Played]) -> np.ndarray:
        vectors = np.array([row.vector for row in rows]).reshape(len(rows), -1)
        arm = np.array([row.arm for row in rows], dtype=np.intp)
        return self.design(arm, vectors[:, : self.features], vectors[:, self.features :])

    # --- decisions and outcomes ---

    def decide(self, policy: Policy, arm: np.ndarray, features: np.ndarray | None, context: np.ndarray) -> Odds:
        """What is known of these arms, and with which chances a policy chooses among them."""
        x, block = self.design(arm, features, context[None]), self.blocks(arm)
        code = POLICIES.index(policy.name)
        if (functions := arm_library()) is not None:
            return Odds(*self.addresses.decision(functions, code, policy.spread, policy.epsilon, x, block))
        t, v = arms.arm_moments(x, self.mean, self.covariance, block)
        reward, information = arms.rewards(t, v)
        return Odds(t, v, reward, information, chances_of(policy, t, v, reward, information))

    def observe(self, row: Played) -> None:
        """Change the posterior by one outcome."""
        arm = np.array([row.arm], dtype=np.intp)
        x = self.design(arm, row.vector[None, : self.features], row.vector[None, self.features :])
        block = int(self.blocks(arm)[0])
        if (functions := arm_library()) is not None:
            self.addresses.step(functions, x, row.reward, block)
        else:
            arms.observe(x[0], row.reward, self.mean[block], self.covariance[block])

    def refit(self, rows: Sequence[Played], weight: np.ndarray) -> "Weights":
        """The posterior of weighted rows, if these weights are their prior."""
        fitted = self.copy()
        arm = np.array([row.arm for row in rows], dtype=np.intp)
        X, y = self.design_of(rows), np.array([row.reward for row in rows])
        block = self.blocks(arm)
        for one in np.unique(block):
            mine = block == one
            model = VariationalLogisticRegression(
                prior_mean=self.mean[one], prior_scale=self.covariance[one], fit_intercept=False, verbose=False
            )
            model.partial_fit(X[mine], y[mine], classes=[0.0, 1.0], sample_weight=weight[mine])
            posterior: Any = model.posterior_
            fitted.mean[one], fitted.covariance[one] = posterior.mean.numpy(), posterior.covariance().numpy()
        return fitted

    def discount(self, share: float) -> None:
        """Keep this share of what rows have told: precision and natural mean move back to those of the prior."""
        if share == 1.0:
            return
        precision = np.linalg.inv(self.covariance)
        natural = np.einsum("kij,kj->ki", precision, self.mean)
        before = np.stack([np.diag(row**-2.0) for row in self.sd])
        covariance = np.linalg.inv(before + share * (precision - before))
        covariance = 0.5 * (covariance + covariance.transpose(0, 2, 1))
        self.set(np.einsum("kij,kj->ki", covariance, share * natural), covariance)

    def with_arm(self, like: np.ndarray | None) -> "Weights":
        """The same with one more arm, which starts from the prior or, if `like` names arms, from what they share.

        The latter is the Gaussian with the mean and covariance of a draw from one of them, taken at random.
        """
        more = Weights(self.model, self.scales, self.arm_count + 1, self.features, self.context)
        if self.model == "shared":
            more.set(self.mean, self.covariance)
        elif self.model == "disjoint":
            more.mean[:-1], more.covariance[:-1] = self.mean, self.covariance
            if like is not None:
                means = self.mean[like]
                more.mean[-1] = means.mean(0)
                between = (means - means.mean(0)).T @ (means - means.mean(0)) / len(means)
                more.covariance[-1] = self.covariance[like].mean(0) + between
        else:
            size = self.mean.shape[1]
            more.mean[0, :size], more.covariance[0, :size, :size] = self.mean[0], self.covariance[0]
        return more


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
