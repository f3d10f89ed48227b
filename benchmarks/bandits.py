"""Regret of bandits with yes/no rewards, and the time of a decision with its update, beside other packages.

Simulated worlds: contexts N(0, I), weights of each arm N(0, 0.5² I), agents that know neither. "Wide prior" gives every
agent that has a prior ten times the standard deviation; in "rare rewards" a random arm earns about 3 %. In "digits" an
arm is one of ten digits and earns 1 if the image shows it. Regret is the sum of P(best arm) - P(chosen arm); with
digits, the number of wrong answers. All agents see the same worlds.

The peers come with `pip install bayesianbandits mabwiser contextualbandits vowpalwabbit polyagamma`; those that are
absent are left out. Thompson sampling by Gibbs sampling of the exact posterior (Polya-Gamma, two sweeps a decision) is
what approximate posteriors are measured by.
"""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits

import viper
from benchmarks.table import Page, Table, machine
from viper.decisions.arms import chances
from viper.decisions.outcomes import NEW_FACTOR, Played
from viper.decisions.weights import Scales, Weights
from viper.inference.threads import one_thread

ARMS, COLUMNS, ROUNDS, SEEDS = 10, 10, 2_000, 10
MORE_SEEDS = range(110, 160)  # worlds in which our Thompson sampling is compared with that of the exact posterior
WEIGHT_SD = 0.5
POSTERIOR_SEEDS = range(160, 164)  # worlds from which an arm's posterior is compared with the exact one
FEW_REWARDS = (4, 8, 16, 32, 64, 128)
POSTERIORS = ("viper.Bandit", "largest ELBO", "one step a reward")
DRAWS, FREEDOM = 20_000, 8
DIGITS_SEEDS = range(1_000, 1_125)  # more worlds of digits, since the difference there is small
STEP_SEEDS, STEPS = (
    range(170, 175),
    (60, 120, 240, 480, 960, 1_600),
)  # where single decisions are compared with exact ones
STEP_CONTEXTS, STEP_DRAWS, STEP_FREEDOM = 150, 8_000, 40
LOG_WEIGHTS = np.array([[1.0, -1.0, 0.0, 0.5], [0.0, 1.0, -1.0, 0.5], [0.5, 0.0, 0.5, -1.0]])  # columns × arms
LOGGERS = ("arms at random", "a policy that prefers bad arms")
DECISIONS = 150  # of large agents
LOGS, FEWER_LOGS = 2_000, 400
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
REGRET_TITLE, EXACT_TITLE = "Regret", "Thompson sampling beside that of the exact posterior, more worlds"
SIZE_TITLE = "Many arms, many weights"
COVERAGE_TITLE = "Intervals for another policy's reward"
POSTERIOR_TITLE = "The posterior of an arm with few rewards, wide prior"
STEP_TITLE = "Single decisions of Thompson sampling on digits"
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
        lost = {
            setting: {name: [play_world(name, setting, seed).regret for seed in MORE_SEEDS] for name in (OURS, GIBBS)}
            for setting in SETTINGS
        }
        lost["digits, more"] = {
            name: [play_world(name, "digits", seed).regret for seed in DIGITS_SEEDS] for name in (OURS, GIBBS)
        }
        page.tables.append(exact_table(lost))
        page.tables += [step_table(), posterior_table(), size_table(), coverage_table()]
    return page


def exact_table(lost: dict[str, dict[str, list[float]]]) -> Table:
    """Regret of two Thompson samplings by setting and agent, in the same worlds."""
    pairs = [(one[OURS], one[GIBBS], np.subtract(one[OURS], one[GIBBS])) for one in lost.values()]
    rows: list[list[str | float]] = [
        [name, *map(mean_and_error, values)]
        for name, values in zip((OURS, GIBBS, "difference"), zip(*pairs, strict=True), strict=True)
    ]
    notes = [
        f"{len(pairs[0][0])} worlds that are not in the table above ({len(DIGITS_SEEDS)} others in the last column); "
        "± standard error of the mean over worlds."
    ]
    return Table(EXACT_TITLE, ["agent", *lost], rows, notes)


# ---------------------------------------------------------------------------------------------------------------------
# The posterior of one arm


class Gaussian(NamedTuple):
    mean: np.ndarray
    covariance: np.ndarray


def bandits_posterior(X: np.ndarray, y: np.ndarray, scale: float, visited: bool = True) -> Gaussian:
    """What `viper.Bandit` knows after these rewards; without visits of older ones, after one step a reward."""
    weights = Weights("disjoint", Scales(scale, scale), 1, 0, COLUMNS)
    for time_, (x, reward) in enumerate(zip(X, y, strict=True)):
        if visited:
            weights.observe(Played(time_, 0, 1.0, reward, x))
        else:
            weights.keep(0, (time_, 0.0, 1.0, reward, *NEW_FACTOR), x)
            weights.visit(0, 0, 0, np.inf)
    return Gaussian(weights.posterior.own_mean[0], weights.posterior.own_covariance[0])


def largest_elbo(X: np.ndarray, y: np.ndarray, scale: float) -> Gaussian:
    model = viper.VariationalLogisticRegression(prior_scale=scale, fit_intercept=False, verbose=False)
    posterior = model.partial_fit(X, y, classes=[0.0, 1.0]).posterior_
    return Gaussian(posterior.mean.numpy(), posterior.covariance().numpy())


def exact_draws(
    X: np.ndarray, y: np.ndarray, precision: np.ndarray | float, like: Gaussian, generator: np.random.Generator,
    draws: int = DRAWS, freedom: int = FREEDOM,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Draws from a Student's t around a Gaussian, and their weights as draws from the exact posterior."""
    found = generator.standard_normal((draws, len(like.mean)))
    found /= np.sqrt(generator.chisquare(freedom, (draws, 1)) / freedom)
    log_weight = 0.5 * (freedom + len(like.mean)) * np.log1p((found**2).sum(1) / freedom)
    found = like.mean + found @ np.linalg.cholesky(like.covariance).T
    log_weight -= 0.5 * (found**2 * precision).sum(1)
    log_weight -= np.logaddexp(0.0, -(found @ X.T) * (2.0 * y - 1.0)).sum(1)
    weight = np.exp(log_weight - log_weight.max())
    return found, weight / weight.sum()


def exact_moments(
    X: np.ndarray, y: np.ndarray, scale: float, like: Gaussian, at: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sd of w'x at some x."""
    draws, weight = exact_draws(X, y, scale**-2.0, like, generator)
    f = draws @ at.T
    mean = weight @ f
    return mean, np.sqrt(weight @ (f - mean) ** 2)


class Step(NamedTuple):
    """What Thompson sampling knows at a time: chances of the right digit by three posteriors, and how two differ."""

    ours: float
    exact_moments: float
    exact: float
    shift: float  # of means, root mean square, in exact sds
    log_ratio: float  # of sds


def steps(seed: int) -> Iterator[tuple[int, Step]]:
    """The next decision at some times of our Thompson sampling, about some of all digits."""
    setting, generator = SETTINGS["digits"], np.random.default_rng([26, seed])
    world = setting.make(seed)
    precision = np.append(np.full(world.context.shape[1], setting.prior_scale**-2.0), setting.intercept_scale**-2.0)
    player = viper.Bandit(
        range(ARMS), "thompson", prior_scale=setting.prior_scale, intercept_scale=setting.intercept_scale,
        random_state=seed,
    )  # fmt: skip
    for time_, (context, chance, luck) in enumerate(zip(*world, strict=True)):
        if time_ in STEPS:
            some = generator.choice(len(world.context), STEP_CONTEXTS, replace=False)
            yield time_, step(player, precision, world.context[some], world.chance[some].argmax(1), generator)
        choice = player.pull(context)
        player.update(choice.id, float(luck < chance[choice.arm]))


def step(
    player: viper.Bandit, precision: np.ndarray, context: np.ndarray, right: np.ndarray, generator: np.random.Generator
) -> Step:
    at, log, posterior = np.c_[context, np.ones(len(context))], player.log(), player._weights.posterior
    f = np.empty((ARMS, STEP_DRAWS, len(at)))
    t, v, mean, variance = np.empty((4, ARMS, len(at)))
    for arm in range(ARMS):
        mine = log.arm == arm
        q = Gaussian(posterior.own_mean[arm], posterior.own_covariance[arm])
        X = np.c_[log.context[mine], np.ones(mine.sum())]
        draws, weight = exact_draws(X, log.reward[mine], precision, q, generator, STEP_DRAWS, STEP_FREEDOM)
        values = draws @ at.T
        t[arm], v[arm] = at @ q.mean, np.einsum("ij,jk,ik->i", at, q.covariance, at)
        mean[arm] = weight @ values
        variance[arm] = weight @ (values - mean[arm]) ** 2
        f[arm] = values[generator.choice(STEP_DRAWS, STEP_DRAWS, p=weight)]
    gaussian, matched = (
        float(np.mean([chances(*moments)[0][one] for *moments, one in zip(*pair, right, strict=True)]))
        for pair in ((t.T, v.T), (mean.T, variance.T))
    )
    shift, log_ratio = (t - mean) / np.sqrt(variance), 0.5 * np.log(v / variance)
    exact = float((f.argmax(0) == right).mean())
    return Step(gaussian, matched, exact, float(np.sqrt(np.mean(shift**2))), float(log_ratio.mean()))


def step_table() -> Table:
    """How often the next decision is right by our posterior, by a Gaussian with exact moments, by the exact one."""
    found: dict[int, list[Step]] = {}
    for seed in STEP_SEEDS:
        for time_, one in steps(seed):
            found.setdefault(time_, []).append(one)
    rows: list[list[str | float]] = []
    for time_, all_of_them in found.items():
        ours, matched, exact, shift, log_ratio = np.transpose(all_of_them)
        gap = exact - ours
        error = 100.0 * gap.std(ddof=1) / np.sqrt(len(gap))
        rows.append(
            [
                f"{time_:,}",
                *(f"{100.0 * one.mean():.2f}" for one in (ours, matched, exact)),
                f"{100.0 * gap.mean():.2f} ± {error:.2f}",
                f"{np.sqrt(np.mean(shift**2)):.3f}",
                f"{np.exp(log_ratio.mean()):.3f}",
            ]
        )
    columns = ["decision", "right, viper", "right, exact moments", "right, exact", "exact - viper", "error", "sd"]
    notes = [
        f"Percent of {STEP_CONTEXTS} digits, by posteriors that know the same rewards, those of our Thompson sampling; "
        f"{len(STEP_SEEDS)} worlds. error: root mean square of the mean of the log-odds, in exact sds; sd: relative to "
        f"the exact one. Exact: {STEP_DRAWS:,} weighted draws an arm."
    ]
    return Table(STEP_TITLE, columns, rows, notes)


def few_rewards(seed: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The first n rewards of every arm that has so many, from a log of our Thompson sampling under a wide prior."""
    world = SETTINGS["wide prior"].make(seed)
    player = viper.Bandit(range(ARMS), "thompson", prior_scale=WIDE, intercept_scale=WIDE, random_state=seed)
    for context, chance, luck in zip(*world, strict=True):
        choice = player.pull(context)
        player.update(choice.id, float(luck < chance[choice.arm]))
    log = player.log()
    for arm, n in itertools.product(range(ARMS), FEW_REWARDS):
        mine = np.flatnonzero(log.arm == arm)[:n]
        if len(mine) == n:
            yield n, np.c_[log.context[mine], np.ones(n)], log.reward[mine]


def posterior_table() -> Table:
    """Mean and sd of log-odds by three posteriors, relative to those of the exact one."""
    found: dict[tuple[int, str], list[np.ndarray]] = {}
    for seed in POSTERIOR_SEEDS:
        generator = np.random.default_rng([23, seed])
        at = np.c_[generator.standard_normal((20, COLUMNS)), np.ones(20)]
        for n, X, y in few_rewards(seed):
            ours = bandits_posterior(X, y, WIDE)
            mean, sd = exact_moments(X, y, WIDE, ours, at, generator)
            three = ours, largest_elbo(X, y, WIDE), bandits_posterior(X, y, WIDE, visited=False)
            for name, q in zip(POSTERIORS, three, strict=True):
                own = np.sqrt(np.einsum("ij,jk,ik->i", at, q.covariance, at))
                found.setdefault((n, name), []).append(np.array([(at @ q.mean - mean) / sd, np.log(own / sd)]))
    rows: list[list[str | float]] = []
    for n in FEW_REWARDS:
        shift, log_sd = zip(*(np.concatenate(found[n, name], 1) for name in POSTERIORS), strict=True)
        errors = [f"{np.sqrt(np.mean(one**2)):.2f}" for one in shift]
        rows.append([str(n), *(f"{np.exp(one.mean()):.2f}" for one in log_sd), *errors])
    columns = ["rewards of the arm", *(f"{what}, {name}" for what in ("sd", "error") for name in POSTERIORS)]
    notes = [
        f"Log-odds at 20 contexts, for the arms of {len(POSTERIOR_SEEDS)} worlds. sd: geometric mean, relative to the "
        f"exact posterior's; error: root mean square of the mean's, in exact sds. Exact: {DRAWS:,} weighted draws."
    ]
    return Table(POSTERIOR_TITLE, columns, rows, notes)


def size_table() -> Table:
    """Milliseconds of a decision with its update, and of a refresh, of agents with many arms or weights."""
    rows: list[list[str | float]] = []
    for policy, model, arms, columns in (
        ("ucb", "disjoint", 10_000, 10),
        ("ids", "disjoint", 10_000, 10),
        ("ids", "hybrid", 60, 9),
        ("ids", "hybrid", 300, 9),
        ("ids", "hybrid", 10_000, 9),
    ):
        generator = np.random.default_rng(0)
        agent = viper.Bandit(range(arms), policy, model, refresh="never", random_state=0)
        features = generator.standard_normal((arms, 4)) if model == "hybrid" else None
        start = time.process_time()
        for _ in range(DECISIONS):
            choice = agent.pull(generator.standard_normal(columns), features)
            agent.update(choice.id, float(generator.random() < 0.3))
        between = time.process_time()
        agent.refresh()
        spent = time.process_time() - between
        what = f"{policy}, {model}, {arms:,} arms, {columns} columns" + (", 4 features" if model == "hybrid" else "")
        rows.append([what, 1e3 * (between - start) / DECISIONS, 1e3 * spent])
    notes = [f"Processor time; decisions: mean of the first {DECISIONS}; refresh: of their rewards."]
    return Table(SIZE_TITLE, ["agent", "ms, decision with update", "ms, refresh"], rows, notes)


# ---------------------------------------------------------------------------------------------------------------------
# What another policy would have earned


def simulated_log(logger: str, rows: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A log of four arms, by a policy at random or by one that prefers bad arms, and the best arm of every row."""
    generator = np.random.default_rng([24, seed])
    context = generator.standard_normal((rows, 3))
    chance = 1.0 / (1.0 + np.exp(-context @ LOG_WEIGHTS))
    share = np.ones_like(chance) if logger == LOGGERS[0] else np.exp(-2.0 * chance)
    share /= share.sum(1, keepdims=True)
    arm = (share.cumsum(1) < generator.random((rows, 1))).sum(1)
    row = np.arange(rows)
    reward = (generator.random(rows) < chance[row, arm]).astype(float)
    log = {"context": context, "arm": arm, "propensity": share[row, arm], "reward": reward}
    return log, np.eye(LOG_WEIGHTS.shape[1])[chance.argmax(1)]


def best_reward() -> float:
    """E max of the arms' chances, over contexts."""
    context = np.random.default_rng(25).standard_normal((1_000_000, 3))
    return float((1.0 / (1.0 + np.exp(-(context @ LOG_WEIGHTS).max(1)))).mean())


def coverage_table(logs: int = LOGS, doubly_robust: int = FEWER_LOGS) -> Table:
    """How often 95 % intervals hold the reward of the best policy. The third, which fits models, has fewer logs."""
    truth, table = best_reward(), []
    for logger, rows in itertools.product(LOGGERS, (100, 1_000)):
        held: list[list[bool]] = [[], [], []]
        counted = []
        for seed in range(logs):
            log, best = simulated_log(logger, rows, seed)
            policy = best if seed < doubly_robust else best[np.arange(rows), log["arm"]]
            found = viper.decisions.evaluate(log, policy, arms=range(LOG_WEIGHTS.shape[1]))
            counted.append(found.effective_rows)
            for one, estimate in zip(held, (found.ips, found.snips, found.dr), strict=True):
                one.extend([estimate.lower <= truth <= estimate.upper] if estimate else [])
        table.append([logger, f"{rows:,}", f"{np.median(counted):.0f}", *(f"{np.mean(one):.3f}" for one in held)])
        print(*table[-1], flush=True)
    errors = [f"{np.sqrt(0.95 * 0.05 / count):.3f}" for count in (logs, doubly_robust)]
    notes = [
        f"{logs:,} simulated logs of four arms each ({doubly_robust:,} for DR). "
        f"Standard errors {errors[0]} and {errors[1]}."
    ]
    return Table(
        COVERAGE_TITLE, ["logs", "rows", "rows that count", "IPS covers", "SNIPS covers", "DR covers"], table, notes
    )


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
    return Page(
        "Bandits with yes/no rewards",
        tables,
        [REGRET_TITLE, EXACT_TITLE, STEP_TITLE, POSTERIOR_TITLE, SIZE_TITLE, COVERAGE_TITLE],
    )
