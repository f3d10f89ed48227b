"""Regret of bandits with yes/no rewards, and the time of a decision with its update, beside other packages.

Simulated worlds: contexts N(0, I), weights of each arm N(0, 0.5² I), agents that know neither. "Wide prior" gives every
agent that has a prior ten times the standard deviation; in "rare rewards" a random arm earns about 3 %. In "digits" an
arm is one of ten digits and earns 1 if the image shows it. Regret is the sum of P(best arm) - P(chosen arm); with
digits, the number of wrong answers. All agents see the same worlds.

The peers come with `pip install bayesianbandits mabwiser contextualbandits vowpalwabbit polyagamma`; those that are
absent are left out. Thompson sampling by Gibbs sampling of the exact posterior (Polya-Gamma, two sweeps a decision) is
what approximate posteriors are measured by.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits

import viper
from benchmarks.table import Page, Table, machine
from viper.inference.threads import one_thread

ARMS, COLUMNS, ROUNDS, SEEDS = 10, 10, 2_000, 10
MORE_SEEDS = range(10, 60)  # worlds in which our Thompson sampling is compared with that of the exact posterior
WEIGHT_SD = 0.5
RARE = -4.3  # intercept for which a random arm earns about 3 %
WIDE = 10.0
BATCH = 50  # rounds between fits of contextualbandits, whose models are not updated by rows
SWEEPS = 2
DIGITS_SCALE = 0.3  # prior sd of the weights of 64 standardised pixels, for every agent that has a prior


class World(NamedTuple):
    """Contexts, the probability of a reward for each arm, and uniform numbers that decide."""

    context: np.ndarray
    chance: np.ndarray
    luck: np.ndarray


class Setting(NamedTuple):
    """A kind of world, and the prior sd that agents assume."""

    make: Callable[[int], World]
    prior_scale: float
    intercept_scale: float


class Agent(NamedTuple):
    """Choose an arm for a context; learn from its reward."""

    choose: Callable[[np.ndarray], int]
    learn: Callable[[np.ndarray, int, float], None]


def simulated(intercept: float) -> Callable[[int], World]:
    def make(seed: int) -> World:
        generator = np.random.default_rng([20, seed])
        weights = WEIGHT_SD * generator.standard_normal((ARMS, COLUMNS))
        context = generator.standard_normal((ROUNDS, COLUMNS))
        chance = 1.0 / (1.0 + np.exp(-(context @ weights.T + intercept)))
        return World(context, chance, generator.random(ROUNDS))

    return make


def digits(seed: int) -> World:
    X, y = load_digits(return_X_y=True)
    X = (X - X.mean(0)) / np.maximum(X.std(0), 1.0)
    order = np.random.default_rng([21, seed]).permutation(len(y))
    return World(X[order], np.eye(ARMS)[y[order]], np.full(len(y), 0.5))


SETTINGS = {
    "plain": Setting(simulated(0.0), 1.0, 1.0),
    "wide prior": Setting(simulated(0.0), WIDE, WIDE),
    "rare rewards": Setting(simulated(RARE), 1.0, 5.0),
    "digits": Setting(digits, DIGITS_SCALE, 2.5),
}


def with_one(context: np.ndarray) -> np.ndarray:
    return np.append(context, 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# Agents


def ours(policy: str, spread: float = 1.0) -> Callable[[Setting, int, int], Agent]:
    def make(setting: Setting, columns: int, seed: int) -> Agent:
        agent = viper.Bandit(
            range(ARMS), policy, prior_scale=setting.prior_scale, intercept_scale=setting.intercept_scale,
            spread=spread, random_state=seed,
        )  # fmt: skip
        last: list[int] = []

        def choose(context: np.ndarray) -> int:
            choice = agent.pull(context)
            last[:] = [choice.id]
            return int(choice.arm)

        return Agent(choose, lambda context, arm, reward: agent.update(last[0], reward))

    return make


def gibbs(setting: Setting, columns: int, seed: int) -> Agent:
    from polyagamma import random_polyagamma

    generator = np.random.default_rng([seed, 1])
    prior = np.full(columns + 1, setting.prior_scale**-2.0)
    prior[-1] = setting.intercept_scale**-2.0
    rows: list[list[np.ndarray]] = [[] for _ in range(ARMS)]
    rewards: list[list[float]] = [[] for _ in range(ARMS)]
    draw = generator.standard_normal((ARMS, columns + 1)) / np.sqrt(prior)

    def choose(context: np.ndarray) -> int:
        for arm in range(ARMS):
            X, y = np.array(rows[arm]).reshape(-1, columns + 1), np.array(rewards[arm])
            for _ in range(SWEEPS):
                omega = random_polyagamma(1.0, X @ draw[arm], random_state=generator) if len(y) else np.zeros(0)
                root = np.linalg.cholesky(X.T @ (omega[:, None] * X) + np.diag(prior))
                centre = np.linalg.solve(root, X.T @ (y - 0.5))
                draw[arm] = np.linalg.solve(root.T, centre + generator.standard_normal(columns + 1))
        return int((draw @ with_one(context)).argmax())

    def learn(context: np.ndarray, arm: int, reward: float) -> None:
        rows[arm].append(with_one(context))
        rewards[arm].append(reward)

    return Agent(choose, learn)


def bayesianbandits(policy: str) -> Callable[[Setting, int, int], Agent]:
    def make(setting: Setting, columns: int, seed: int) -> Agent:
        import bayesianbandits as package
        from bayesianbandits.policies import InformationDirectedSampling

        # one precision for all weights; that of the intercept cannot differ
        learners = [package.BayesianGLM(alpha=setting.prior_scale**-2.0, random_state=seed + k) for k in range(ARMS)]
        arms = [package.Arm(k, learner=learner) for k, learner in enumerate(learners)]
        rule = package.ThompsonSampling() if policy == "thompson" else InformationDirectedSampling()
        agent = package.ContextualAgent(arms, rule, random_seed=seed)
        return Agent(
            lambda context: int(agent.pull(with_one(context)[None])[0]),
            lambda context, arm, reward: agent.update(with_one(context)[None], np.array([reward])),
        )

    return make


def mabwiser(name: str) -> Callable[[Setting, int, int], Agent]:
    def make(setting: Setting, columns: int, seed: int) -> Agent:
        from mabwiser.mab import MAB, LearningPolicy

        agent = MAB(list(range(ARMS)), getattr(LearningPolicy, name)(), seed=seed)
        for arm in range(ARMS):
            first = {"decisions": [arm], "rewards": [0], "contexts": [[0.0] * (columns + 1)]}
            (agent.partial_fit if arm else agent.fit)(**first)

        def learn(context: np.ndarray, arm: int, reward: float) -> None:
            agent.partial_fit([arm], [reward], [with_one(context).tolist()])

        return Agent(lambda context: int(agent.predict([with_one(context).tolist()])), learn)

    return make


def contextualbandits(name: str) -> Callable[[Setting, int, int], Agent]:
    def make(setting: Setting, columns: int, seed: int) -> Agent:
        from contextualbandits import online

        agent = getattr(online, name)(nchoices=ARMS, random_state=seed + 1)
        kept: tuple[list[np.ndarray], list[int], list[float]] = ([], [], [])

        def choose(context: np.ndarray) -> int:
            if len(kept[1]) < BATCH:
                return len(kept[1]) % ARMS
            return int(np.ravel(agent.predict(context[None]))[0])

        def learn(context: np.ndarray, arm: int, reward: float) -> None:
            for part, value in zip(kept, (context, arm, reward), strict=True):
                part.append(value)  # type: ignore[arg-type]
            if len(kept[1]) % BATCH == 0:
                agent.fit(np.array(kept[0]), np.array(kept[1]), np.array(kept[2]))

        return Agent(choose, learn)

    return make


def vowpal_wabbit(setting: Setting, columns: int, seed: int) -> Agent:
    import vowpalwabbit

    generator = np.random.default_rng(seed)
    agent = vowpalwabbit.Workspace(f"--cb_explore {ARMS} --quiet --random_seed {seed + 1}")
    last: list[float] = []

    def text(context: np.ndarray) -> str:
        return "| " + " ".join(f"x{j}:{value:.6g}" for j, value in enumerate(context))

    def choose(context: np.ndarray) -> int:
        chance = np.array(agent.predict(text(context)))
        arm = int(generator.choice(ARMS, p=chance / chance.sum()))
        last[:] = [float(chance[arm])]
        return arm

    def learn(context: np.ndarray, arm: int, reward: float) -> None:
        agent.learn(f"{arm + 1}:{-reward}:{last[0]} {text(context)}")

    return Agent(choose, learn)


OURS, GIBBS = "viper, thompson", "Thompson, Gibbs sampling"
PEER = "bayesianbandits, Thompson (its default)"
REGRET_TITLE, WIDE_TITLE = "Regret", "Thompson sampling under a wide prior, more worlds"
AGENTS: dict[str, tuple[str, Callable[[Setting, int, int], Agent]]] = {
    "viper, ids (default)": ("viper", ours("ids")),
    "viper, ucb": ("viper", ours("ucb")),
    OURS: ("viper", ours("thompson")),
    "viper, thompson, spread 0.5": ("viper", ours("thompson", 0.5)),
    "viper, epsilon-greedy": ("viper", ours("epsilon-greedy")),
    "viper, greedy": ("viper", ours("greedy")),
    GIBBS: ("polyagamma", gibbs),
    PEER: ("bayesianbandits", bayesianbandits("thompson")),
    "bayesianbandits, ids": ("bayesianbandits", bayesianbandits("ids")),
    "MABWiser, LinTS": ("mabwiser", mabwiser("LinTS")),
    "MABWiser, LinUCB": ("mabwiser", mabwiser("LinUCB")),
    "contextualbandits, LogisticUCB": ("contextualbandits", contextualbandits("LogisticUCB")),
    "contextualbandits, LogisticTS": ("contextualbandits", contextualbandits("LogisticTS")),
    "Vowpal Wabbit, --cb_explore": ("vowpalwabbit", vowpal_wabbit),
}


# ---------------------------------------------------------------------------------------------------------------------
# Runs


class Result(NamedTuple):
    """Regret of one world, and processor seconds of a decision with its update."""

    regret: float
    median: float
    mean: float


Found = dict[str, dict[str, list[Result]]]  # by agent and setting


def play(agent: Agent, world: World) -> Result:
    """All rounds of a world."""
    lost, times = 0.0, []
    for context, chance, luck in zip(*world, strict=True):
        start = time.process_time()
        arm = agent.choose(context)
        between = time.process_time()
        lost += chance.max() - chance[arm]
        reward = float(luck < chance[arm])
        again = time.process_time()
        agent.learn(context, arm, reward)
        times.append(time.process_time() - again + between - start)
    return Result(float(lost), float(np.median(times)), float(np.mean(times)))


def play_world(name: str, setting_name: str, seed: int, rounds: int | None = None) -> Result:
    setting = SETTINGS[setting_name]
    world = World(*(part[:rounds] for part in setting.make(seed)))
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return play(AGENTS[name][1](setting, world.context.shape[1], seed), world)


def run(quick: bool, device: str = "cpu") -> Page:
    found: Found = {}
    for name, (package, _) in AGENTS.items():
        for setting in SETTINGS if find_spec(package) else ():
            results = [play_world(name, setting, seed, 200 if quick else None) for seed in range(1 if quick else SEEDS)]
            found.setdefault(name, {})[setting] = results
            print(f"{name}, {setting}: {np.mean([one.regret for one in results]):.1f}", flush=True)
    page = make_page(found, device)
    if find_spec("polyagamma") and not quick:
        lost = {name: [play_world(name, "wide prior", seed).regret for seed in MORE_SEEDS] for name in (OURS, GIBBS)}
        page.tables.append(wide_table(lost))
    return page


def wide_table(lost: dict[str, list[float]]) -> Table:
    """Thompson sampling under a wide prior, where the posterior of few rewards is most skewed, in the same worlds."""
    rows: list[list[str | float]] = [[name, mean_and_error(regret)] for name, regret in lost.items()]
    rows.append(["difference", mean_and_error(np.subtract(lost[OURS], lost[GIBBS]))])
    notes = [f"{len(lost[OURS])} worlds that are not in the table above; ± standard error of the mean over worlds."]
    return Table(WIDE_TITLE, ["agent", "wide prior"], rows, notes)


def mean_and_error(values: Sequence[float] | np.ndarray) -> str:
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return f"{np.mean(values):.1f} ± {error:.1f}"


def make_page(found: Found, device: str) -> Page:
    rows: list[list[str | float]] = []
    for name, settings in found.items():
        row: list[str | float] = [name]
        row.extend(mean_and_error([one.regret for one in results]) for results in settings.values())
        plain = settings["plain"]
        rows.append([*row, 1e6 * min(one.median for one in plain), 1e6 * min(one.mean for one in plain)])
    count = max(len(results) for settings in found.values() for results in settings.values())
    absent = [f"{name}: {package} is not installed." for name, (package, _) in AGENTS.items() if name not in found]
    notes = [
        f"{count} worlds each; ± standard error of the mean over worlds. {ARMS} arms, {ROUNDS:,} rounds (digits: "
        f"1,797), {COLUMNS} columns (digits: 64). µs: processor time of a decision with its update in the plain "
        "worlds, of the fastest world; the mean includes refreshes and fits. contextualbandits is fitted every "
        f"{BATCH} rounds.",
        *absent,
        machine(device),
    ]
    columns = ["agent", *SETTINGS, "µs, median", "µs, mean"]
    tables = [Table(REGRET_TITLE, columns, rows, notes)]
    return Page("Bandits with yes/no rewards", tables, [REGRET_TITLE, WIDE_TITLE])
