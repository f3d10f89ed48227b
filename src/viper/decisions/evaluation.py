"""What another policy would have earned, from a log of decisions with their propensities.

With w_i = π(a_i | x_i) / propensity_i, rewards r_i and a model r̂ of rewards that has not seen row i,

    IPS    mean of w r                                 unbiased
    SNIPS  Σ w r / Σ w                                 less variable
    DR     mean of Σ_a π(a | x) r̂(x, a) + w (r - r̂)     unbiased, and less variable the better r̂ is

Intervals:

    IPS     Student's t after Hall's transformation, which removes skewness (1992, J. R. Stat. Soc. B 54)
    SNIPS   all θ with (θ - SNIPS)² ≤ z² V(θ), V(θ) = (n V₁ + 20 V₂) / (n + 20), where n rows count
    DR      Student's t with a shift for skewness (Johnson 1978, J. Am. Stat. Assoc. 73) and n - 1 degrees of freedom

V₁ = Σ w² (r - θ)² / (Σ w)² is what the rewards say and V₂ = θ (1 - θ) / n the variance of n rewards that are 1 with
probability θ, so that a few rewards which are all alike do not promise certainty. With V₂ alone the interval is
Wilson's; the log's own reward has that one.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student

from viper.decisions.bandit import Bandit, Log, finite_array
from viper.errors import shown
from viper.models.logistic import VariationalLogisticRegression

FOLDS = 5
FEW_EFFECTIVE = 30  # rows that count; with fewer, intervals are rough
PSEUDO_ROWS = 20.0  # rows; chosen on simulated logs other than those of benchmarks/bandits.py
SUM_ERROR = 1e-6  # probabilities add up to 1 within


class Estimate(NamedTuple):
    """Mean reward of a policy, with its interval."""

    value: float
    lower: float
    upper: float


class Evaluation(NamedTuple):
    """What a policy would have earned per decision, by three estimators, beside what the log earned.

    `effective_rows` is (Σ w)² / Σ w², the number of rows that count; `largest_weight` is the largest w.
    """

    logged: Estimate
    ips: Estimate
    snips: Estimate
    dr: Estimate | None
    effective_rows: float
    largest_weight: float

    def __str__(self) -> str:
        lines = [f"{'':8}{'reward':>8}   interval"]
        for name in ("logged", "ips", "snips", "dr"):
            one = getattr(self, name)
            if one is not None:
                lines.append(f"{name:8}{one.value:8.4f}   {one.lower:.4f} to {one.upper:.4f}")
        lines.append(f"{self.effective_rows:,.0f} rows count, the largest weight is {self.largest_weight:.3g}.")
        if self.effective_rows < FEW_EFFECTIVE:
            lines.append("Too few rows count for an interval: the policy differs too much from the log's.")
        return "\n".join(lines)


def evaluate(log: Any, policy: Any, *, arms: Any = None, level: float = 0.95, random_state: int = 0) -> Evaluation:
    """Estimate the mean reward that another policy would have earned, from a log of decisions.

    Parameters
    ----------
    log : Log, DataFrame or dict
        With `context` (n × columns), `arm`, `propensity` and `reward`. `Bandit.log` returns one. In a DataFrame, all
        other columns are the context.
    policy : Bandit, function, or array
        A bandit, as it is now; a function of one context that returns an arm, or a dict of probabilities; probabilities
        of all arms (n × arms, in the order of `arms`); or only those of the logged arms (n), without DR then.
    arms : list, optional
        All arms; if not given, those of the bandit or of the log, sorted.
    level : float, default 0.95
        Probability that an interval contains the truth.
    random_state : int, default 0
        Seed of the folds of the reward model.

    Returns
    -------
    Evaluation
        `print` shows it as a table.
    """
    level = checked_level(level)
    rows = read_log(log)
    names = all_arms(arms, policy, rows.arm)
    number = {name: k for k, name in enumerate(names)}
    if unknown := [arm for arm in rows.arm if arm not in number]:
        raise ValueError(f"arms must contain every arm of the log; got none like {shown(unknown[0])}.")
    chosen = np.array([number[arm] for arm in rows.arm])
    chances, logged_chance = target_chances(policy, rows, names, chosen)
    weight = logged_chance / rows.propensity
    earned = weight * rows.reward
    doubly = None
    if chances is not None:
        predicted = cross_fitted_rewards(rows, chosen, len(names), random_state)
        own = predicted[np.arange(len(chosen)), chosen]
        doubly = shifted_estimate((chances * predicted).sum(1) + weight * (rows.reward - own), level, weight)
    ratio = ratio_estimate(rows.reward, level, weight)
    return Evaluation(
        ratio_estimate(rows.reward, level, np.ones_like(weight), math.inf),
        unskewed_estimate(earned, level) if np.ptp(earned) > 0.0 else ratio._replace(value=float(earned[0])),
        ratio,
        doubly,
        rows_that_count(weight),
        float(weight.max()),
    )


def checked_level(level: Any) -> float:
    if isinstance(level, bool) or not isinstance(level, Real) or not 0.0 < float(level) < 1.0:
        raise ValueError(f"level must lie between 0 and 1; got {shown(level)}.")
    return float(level)


def all_arms(arms: Any, policy: Any, logged: np.ndarray) -> list[Any]:
    """Those given, or the arms of a bandit and those that it no longer has, or those of the log."""
    if arms is None:
        mine = policy.arms if isinstance(policy, Bandit) else []
        return [*mine, *(arm for arm in distinct_arms(logged) if arm not in mine)]
    names = list(arms)
    if len(distinct_arms(names)) < len(names):
        raise ValueError(f"arms must be all different; got {shown(names)}.")
    return names


def rows_that_count(weight: np.ndarray) -> float:
    """(Σ w)² / Σ w²."""
    return float(weight.sum() ** 2 / (weight**2).sum()) if weight.any() else 0.0


def unskewed_estimate(values: np.ndarray, level: float) -> Estimate:
    """Mean of values that are not all alike, with Hall's interval."""
    mean, variance, n = float(values.mean()), float(values.var(ddof=1)), len(values)
    tilt = float(((values - mean) ** 3).mean()) / (variance * math.sqrt(variance * n))
    quantile, error = float(student.ppf(0.5 + 0.5 * level, n - 1)), math.sqrt(variance / n)
    return within_0_and_1(mean, mean - error * untilted(quantile, tilt), mean - error * untilted(-quantile, tilt))


def untilted(t: float, tilt: float) -> float:
    """The u with u + tilt u²/3 + tilt² u³/27 + tilt/6 = t; of u = (mean - truth) / error, t is hardly skewed."""
    return 3.0 / tilt * (float(np.cbrt(1.0 + tilt * (t - tilt / 6.0))) - 1.0) if abs(tilt) > 1e-6 else t


def ratio_estimate(reward: np.ndarray, level: float, weight: np.ndarray, smoothing: float = PSEUDO_ROWS) -> Estimate:
    """Σ w r / Σ w, and the θ with (θ - Σ w r / Σ w)² ≤ z² V(θ), which is a θ² - 2 b θ + c ≤ 0."""
    if not weight.any():
        return Estimate(math.nan, 0.0, 1.0)
    share, count = weight / weight.sum(), rows_that_count(weight)
    ratio, mine = float(share @ reward), 1.0 / (1.0 + smoothing / count)  # mine: share of V₁
    spread = float(norm.ppf(0.5 + 0.5 * level)) ** 2 / count
    won = float(share**2 @ reward) * count  # share of rows that won, weighted by w²
    a = 1.0 + spread * (1.0 - 2.0 * mine)
    b, c = ratio + spread * (0.5 - mine * (won + 0.5)), ratio**2 - spread * mine * won
    if a <= 0.0:
        return Estimate(ratio, 0.0, 1.0)
    half = math.sqrt(max(b * b - a * c, 0.0))
    return within_0_and_1(ratio, (b - half) / a, (b + half) / a)


def shifted_estimate(values: np.ndarray, level: float, weight: np.ndarray) -> Estimate:
    """Mean with Johnson's interval, and as many degrees of freedom as rows count by their weights."""
    mean, variance, n = float(values.mean()), float(values.var(ddof=1)), len(values)
    freedom = max(rows_that_count(weight) - 1.0, 1.0)
    half = float(student.ppf(0.5 + 0.5 * level, freedom)) * math.sqrt(variance / n)
    shift = float(((values - mean) ** 3).mean()) / (6.0 * variance * n) if variance > 0.0 else 0.0
    return within_0_and_1(mean, mean + shift - half, mean + shift + half)


def within_0_and_1(value: float, lower: float, upper: float) -> Estimate:
    """An interval of a reward, which lies between 0 and 1."""
    return Estimate(value, min(max(lower, 0.0), 1.0), max(min(upper, 1.0), 0.0))


def read_log(log: Any) -> Log:
    """Check a log, whatever holds it."""
    if hasattr(log, "_asdict"):
        log = log._asdict()
    if not isinstance(log, Mapping) and not hasattr(log, "columns"):
        raise TypeError(f"log must be a Log, a DataFrame or a dict; got {type(log).__name__}.")
    if missing := [name for name in ("arm", "propensity", "reward") if name not in log]:
        raise ValueError(f"log must have {missing[0]!r}; got none. Bandit.log() returns a whole one.")
    arm = np.asarray(log["arm"], dtype=object)
    if arm.ndim != 1:
        raise ValueError(f"arm must be a list of arms; got {shown(log['arm'])}.")
    n = len(arm)
    if n < 2:
        raise ValueError(f"log must have at least two rows; got {n}.")
    if hasattr(log, "columns"):
        others = [name for name in log.columns if name not in ("arm", "propensity", "reward")]
        context = finite_array(log[others], "context", 2)
    else:
        context = finite_array(log["context"], "context", 2) if "context" in log else np.zeros((n, 0))
    propensity, reward = (finite_array(log[name], name, 1) for name in ("propensity", "reward"))
    features = finite_array(log["features"], "features", 2) if isinstance(log, Mapping) and "features" in log else None
    features = np.zeros((n, 0)) if features is None else features
    for name, part in (("context", context), ("propensity", propensity), ("reward", reward), ("features", features)):
        if len(part) != n:
            raise ValueError(f"{name} must have {n} rows, one an arm; got {len(part)}.")
    if not ((propensity > 0) & (propensity <= 1)).all():
        bad = propensity[~((propensity > 0) & (propensity <= 1))][0]
        raise ValueError(
            f"propensities must lie in (0, 1]; got {bad:g}. Log the probability of the arm that was drawn."
        )
    if not np.isin(reward, (0.0, 1.0)).all():
        raise ValueError(f"rewards must be 0 or 1; got {shown(reward[~np.isin(reward, (0.0, 1.0))][0])}.")
    return Log(context, arm, propensity, reward, features)


def distinct_arms(arms: Iterable[Any]) -> list[Any]:
    """Texts and numbers, each once, in order."""
    found = list(arms)
    if bad := [arm for arm in found if not isinstance(arm, str | Real)]:
        raise TypeError(f"an arm must be a text or a number; got {shown(bad[0])}.")
    return sorted(set(found), key=lambda name: (isinstance(name, str), name))


def target_chances(
    policy: Any, rows: Log, names: list[Any], chosen: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray]:
    """The policy's probabilities of all arms in every row, if they are known, and of the logged ones."""
    n = len(chosen)
    if isinstance(policy, Bandit):
        if policy.model == "shared" or rows.features.shape[1]:
            raise ValueError("a bandit whose arms have features needs its probabilities as an array; got the bandit.")
        policy = policy.probabilities
    if callable(policy):
        chances = np.array([read_decision(policy, context, names) for context in rows.context])
    else:
        try:
            given = np.asarray(policy, dtype=np.float64)
        except (TypeError, ValueError):
            raise TypeError(
                f"policy must be a Bandit, a function or probabilities; got {shown(policy)}. For one arm, pass "
                "lambda context: arm."
            ) from None
        if given.shape == (n,):
            check_chances(given)
            return None, given
        if given.shape != (n, len(names)):
            raise ValueError(f"policy must have shape ({n}, {len(names)}) or ({n},); got {given.shape}.")
        chances = given
    check_chances(chances)
    if np.abs(chances.sum(1) - 1.0).max() > SUM_ERROR:
        raise ValueError(f"probabilities of the arms must add up to 1; got {chances.sum(1)[0]:g} in the first row.")
    return chances, chances[np.arange(n), chosen]


def check_chances(chances: np.ndarray) -> None:
    if not ((chances >= -SUM_ERROR) & (chances <= 1.0 + SUM_ERROR)).all():
        raise ValueError("probabilities of a policy must lie between 0 and 1; got others.")


def read_decision(policy: Callable[[np.ndarray], Any], context: np.ndarray, names: list[Any]) -> np.ndarray:
    """Probabilities of all arms in one context, from an arm or a dict."""
    decision = policy(context)
    chance = np.zeros(len(names))
    for arm, share in decision.items() if isinstance(decision, Mapping) else ((decision, 1.0),):
        if arm not in names:
            raise ValueError(f"policy must return arms among {shown(names)}; got {shown(arm)}.")
        if not isinstance(share, Real):
            raise TypeError(f"policy must return probabilities of arms; got {shown(share)}.")
        chance[names.index(arm)] = share
    return chance


def cross_fitted_rewards(rows: Log, chosen: np.ndarray, arms: int, seed: int) -> np.ndarray:
    """r̂(x_i, a) of every arm, by a logistic regression for each arm, from the folds without row i."""
    n = len(chosen)
    fold = np.random.default_rng(seed).permutation(n) % min(FOLDS, n)
    predicted = np.empty((n, arms))
    for one in np.unique(fold):
        held = fold == one
        for arm in range(arms):
            mine = ~held & (chosen == arm)
            if not mine.any():
                predicted[held, arm] = rows.reward[~held].mean()
                continue
            model = VariationalLogisticRegression(verbose=False)
            model.partial_fit(with_column(rows.context[mine]), rows.reward[mine], classes=[0.0, 1.0])
            predicted[held, arm] = model.predict_proba(with_column(rows.context[held]))[:, 1]
    return predicted


def with_column(context: np.ndarray) -> np.ndarray:
    """A context of no columns as one of zeros, which a regression needs."""
    return context if context.shape[1] else np.zeros((len(context), 1))
