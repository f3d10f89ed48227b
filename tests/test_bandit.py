"""Bandits: propensities, posteriors, files, evaluation. Identities, and a second way to every number."""

import copy
import pickle
import re
import threading

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, norm
from tolerances import TOLERANCE

import viper
from viper.decisions import arms, compiled, evaluate, evaluation
from viper.decisions import bandit as bandit_module
from viper.decisions import weights as weights_module
from viper.decisions.arms import ArmPosterior
from viper.decisions.outcomes import Played
from viper.decisions.weights import POLICIES, Policy, Scales, Weights
from viper.inference.groups.arrow import Arrow, Split

K, D = 5, 3
CONTEXT = np.array([0.3, -1.2, 0.7])


def odds(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=K), rng.gamma(2.0, 0.5, K)


def played(rounds, seed=0, chance=0.4, **options):
    """A bandit after some rounds with random contexts and rewards."""
    rng = np.random.default_rng(seed)
    agent = viper.Bandit([f"arm {k}" for k in range(K)], random_state=seed, **options)
    for _ in range(rounds):
        agent.update(agent.pull(rng.normal(size=D)).id, int(rng.random() < chance))
    return agent


def with_one(X):
    return np.c_[X, np.ones(len(X))]


def random_part(like, rng):
    """Random numbers of the shape of a posterior's part, and covariances where it has two equal last axes."""
    found = rng.normal(size=like.shape)
    square = like.ndim > 1 and like.shape[-1] == like.shape[-2]
    return found @ found.swapaxes(-1, -2) / like.shape[-1] if square else found


def without_library(monkeypatch):
    monkeypatch.setattr("viper.decisions.weights.arm_library", lambda: None)


# --- formulas ---


def test_chances_are_those_of_the_largest():
    t, v = odds()
    nodes, weights = np.polynomial.hermite_e.hermegauss(160)
    sd = np.sqrt(v)
    for k in range(K):
        u = t[k] + sd[k] * nodes
        others = np.prod([norm.cdf(u, t[j], sd[j]) for j in range(K) if j != k], axis=0)
        assert arms.chances(t, v)[0][k] == pytest.approx(weights @ others / weights.sum(), abs=1e-6)
    assert arms.chances(t, v)[0].sum() == pytest.approx(1.0, abs=TOLERANCE["special"])


def test_log_odds_beyond_the_range_of_exp_are_quiet():
    """Warnings are errors here."""
    chance, best = arms.chances(np.array([-2e3, -3e3]), np.ones(2))
    assert chance == pytest.approx([1.0, 0.0])
    assert best == 0.0


def test_the_best_of_one_arm_is_that_arm():
    t, v = np.array([0.4]), np.array([2.0])
    chance, best = arms.chances(t, v)
    assert chance == pytest.approx([1.0])
    assert best == pytest.approx(arms.rewards(t, v)[0][0], abs=1e-6)


def test_an_arm_that_is_known_for_certain():
    t, v = np.array([0.0, 1.0, -1.0]), np.array([0.0, 0.0, 4.0])
    above = norm.sf(1.0, -1.0, 2.0)
    assert arms.chances(t, v)[0] == pytest.approx([0.0, 1.0 - above, above], abs=1e-3)  # sds are widened by 1/128
    assert arms.chances(np.zeros(4), np.zeros(4))[0] == pytest.approx(np.full(4, 0.25))


def test_rewards_and_information_are_integrals():
    t, v = odds(1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    p = 1.0 / (1.0 + np.exp(-(t[:, None] + np.sqrt(v)[:, None] * nodes)))
    mean = p @ weights / weights.sum()

    def entropy(q):
        return -q * np.log(q) - (1 - q) * np.log(1 - q)

    reward, information = arms.rewards(t, v)
    assert reward == pytest.approx(mean, abs=1e-7)
    assert information == pytest.approx(entropy(mean) - entropy(p) @ weights / weights.sum(), abs=1e-6)


def test_the_least_ratio_is_least_among_all_pairs():
    rng = np.random.default_rng(3)
    for _ in range(20):
        regret, information = rng.random(8), rng.random(8)
        chance = arms.least_ratio(regret, information)
        found = (regret @ chance) ** 2 / (information @ chance)
        q = np.linspace(0, 1, 201)[:, None, None]
        r = q * regret[:, None] + (1 - q) * regret
        g = q * information[:, None] + (1 - q) * information
        assert found <= (r**2 / g).min() + 1e-12
        assert np.count_nonzero(chance) <= 2
        assert chance.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(("t", "v"), [(0.3, 1.0), (-2.0, 9.0), (-30.0, 4.0), (-60.0, 90.0), (25.0, 2.0)])
def test_the_step_matches_moments(t, v):
    """Mean and variance of N(t, v) s(±f), by a fine grid."""
    f = np.linspace(t - 14 * np.sqrt(v) - 5, t + 14 * np.sqrt(v) + 5, 400_001)
    for reward in (0.0, 1.0):
        log_density = -0.5 * (f - t) ** 2 / v - np.logaddexp(0.0, -f if reward else f)
        density = np.exp(log_density - log_density.max())
        mean = f @ density / density.sum()
        variance = (f - mean) ** 2 @ density / density.sum()
        slope, curvature = arms.matched_step(t, v, reward)
        # far in a tail, where E s(f) is 1e-9, the mixture's error of 7e-9 shows; in sds of f
        assert t + v * slope == pytest.approx(mean, abs=3e-4 * np.sqrt(v))
        assert v - v**2 * curvature == pytest.approx(variance, rel=5e-3)


@pytest.mark.parametrize("model", ["disjoint", "shared", "hybrid"])
@pytest.mark.parametrize("policy", POLICIES)
def test_compiled_decisions_are_the_formulas(model, policy, monkeypatch):
    if compiled.arm_library() is None:
        pytest.skip("the library is not built")
    rng = np.random.default_rng(5)
    columns = 0 if model == "disjoint" else 2
    weights = Weights(model, Scales(1.0, 2.0), K, columns, D)
    weights.set(ArmPosterior(*(random_part(part, rng) for part in weights.posterior)))
    plain, rule = copy.deepcopy(weights), Policy(policy, 0.8, 0.2)
    vectors = weights.vectors(rng.normal(size=(K, columns)) if columns else None, CONTEXT)
    there = weights.decide(rule, np.arange(K), vectors)
    without_library(monkeypatch)
    here = plain.decide(rule, np.arange(K), vectors)
    for one, other in zip(there, here, strict=True):
        assert one == pytest.approx(other, abs=1e-9)


@pytest.mark.parametrize("model", ["disjoint", "shared", "hybrid"])
def test_compiled_visits_are_the_formulas(model, monkeypatch):
    if compiled.arm_library() is None:
        pytest.skip("the library is not built")
    rng = np.random.default_rng(5)
    columns = 0 if model == "disjoint" else 2
    agents = [Weights(model, Scales(10.0, 2.0), K, columns, D) for _ in range(2)]
    for time in range(60):
        arm, vector = int(rng.integers(2)), np.append(rng.normal(size=columns + D), 1.0)
        row = Played(time, arm, 1.0, float(rng.integers(2)), vector)
        agents[0].observe(row)
        with monkeypatch.context() as patch:
            without_library(patch)
            agents[1].observe(row)
        if time == 30:
            for one in agents:
                one.discount(0.9, 30, 31)
    agents[0].refit()
    without_library(monkeypatch)
    agents[1].refit()
    assert [one.next for one in agents[0].outcomes.values()] == [one.next for one in agents[1].outcomes.values()]
    assert agents[0].played()[0] == pytest.approx(agents[1].played()[0], abs=1e-9)
    for one, other in zip(agents[0].posterior, agents[1].posterior, strict=True):
        assert one == pytest.approx(other, abs=1e-8)


# --- the posterior ---


def test_every_factor_matches_the_moments_of_its_likelihood():
    """Along x, the other factors times the likelihood have the posterior's mean and variance: by a fine grid."""
    agent = played(60, policy="thompson", forget=0.99, prior_scale=10.0)
    agent.refresh()
    weights = agent._weights
    for block, kept in weights.outcomes.items():
        for row, x in zip(kept.table, kept.vectors, strict=True):
            reward, weight, precision, shift = row[3:]
            t, v = weights.posterior.own_mean[block] @ x, x @ weights.posterior.own_covariance[block] @ x
            rest_precision, rest_shift = 1 / v - weight * precision, t / v - weight * shift
            f = np.linspace(t - 12 * np.sqrt(v), t + 12 * np.sqrt(v), 20_001)
            log_density = rest_shift * f - 0.5 * rest_precision * f**2 - np.logaddexp(0.0, -f if reward else f)
            density = np.exp(log_density - log_density.max())
            density /= density.sum()
            mean, matched = f @ density, 1 / (rest_precision + precision)
            assert mean == pytest.approx(matched * (rest_shift + shift), abs=1e-5 * np.sqrt(v))
            assert (f - mean) ** 2 @ density == pytest.approx(matched, rel=1e-5)


def test_the_weights_given_few_rewards_under_a_wide_prior():
    """Means and sds of log-odds beside the exact ones, by weighted draws; those of the largest ELBO are too narrow."""
    rng, columns, scale, freedom = np.random.default_rng(0), 9, 10.0, 8
    X, y = rng.normal(size=(12, columns)), rng.integers(0, 2, 12)
    agent = viper.Bandit(["a"], prior_scale=scale, intercept_scale=scale)
    for x, reward in zip(X, y, strict=True):
        agent.update(agent.pull(x).id, int(reward))
    weights = agent._weights
    draws = rng.standard_normal((40_000, columns + 1)) / np.sqrt(rng.chisquare(freedom, (40_000, 1)) / freedom)
    log_weight = 0.5 * (freedom + columns + 1) * np.log1p((draws**2).sum(1) / freedom)
    draws = weights.posterior.own_mean[0] + draws @ np.linalg.cholesky(weights.posterior.own_covariance[0]).T
    log_weight -= 0.5 * (draws**2).sum(1) / scale**2
    log_weight -= np.logaddexp(0.0, -(draws @ with_one(X).T) * (2 * y - 1)).sum(1)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    assert 1 / (weight**2).sum() > 2_000
    x = with_one(rng.normal(size=(30, columns)))
    f = draws @ x.T
    mean = weight @ f
    sd = np.sqrt(weight @ (f - mean) ** 2)
    odds = [weights.decide(agent.policy, np.array([0]), one[None]) for one in x]
    assert [one.mean[0] for one in odds] == pytest.approx(mean, abs=0.1 * sd.mean())
    ratio = np.sqrt([one.variance[0] for one in odds]) / sd
    assert ratio == pytest.approx(np.ones(30), abs=0.06)  # of 2,000 draws that count: 2 %
    nearest = viper.VariationalLogisticRegression(prior_scale=scale, fit_intercept=False)
    covariance = nearest.partial_fit(with_one(X), y).posterior_.covariance().numpy()
    assert np.mean(np.sqrt(np.einsum("ij,jk,ik->i", x, covariance, x)) / sd) < 0.92


def test_one_arm_is_partial_fit():
    """With many rewards both are the exact posterior; step by step and refreshed it is the same."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(300, D)), rng.integers(0, 2, 300)
    agent = viper.Bandit(["only"], prior_scale=1.0, intercept_scale=10.0, refresh="never")
    for x, reward in zip(X, y, strict=True):
        agent.update(agent.pull(x).id, int(reward))
    stepwise = agent.pull(CONTEXT).probability
    agent.refresh()
    model = viper.VariationalLogisticRegression(prior_scale=1.0, intercept_scale=10.0).partial_fit(X, y)
    assert agent.pull(CONTEXT).probability == pytest.approx(model.predict_proba(CONTEXT[None])[0, 1], abs=1e-4)
    assert agent.pull(CONTEXT).interval == pytest.approx(model.predict_interval(CONTEXT[None])[0], abs=1e-3)
    assert stepwise == pytest.approx(agent.pull(CONTEXT).probability, abs=1e-3)


def test_rewards_in_any_order_and_in_batches_give_one_posterior_when_refreshed():
    agents = [viper.Bandit(["a", "b"], "greedy", refresh="never", random_state=0) for _ in range(2)]
    contexts = np.random.default_rng(1).normal(size=(30, D))
    rewards = np.random.default_rng(2).integers(0, 2, 30)
    ids = [[agent.pull(x).id for x in contexts] for agent in agents]
    agents[0].update(ids[0], rewards)
    for i in reversed(range(30)):
        agents[1].update(ids[1][i], rewards[i])
    for agent in agents:
        agent.refresh()
    assert agents[0].pull(CONTEXT).probability == pytest.approx(agents[1].pull(CONTEXT).probability, abs=1e-7)


def test_the_work_of_one_reward_does_not_grow_with_the_number_of_rewards(monkeypatch):
    found = []
    visits = arms.visits
    monkeypatch.setattr(arms, "visits", lambda *given: found.append(visits(*given)) or found[-1])
    without_library(monkeypatch)
    played(400, refresh="never")
    assert max(found) <= weights_module.MOST_VISITED
    assert np.mean(found[-100:]) < 1.5 * weights_module.VISITED


def test_rewards_that_are_no_longer_kept_stay_in_the_posterior():
    """With the factors that they had: nearly what they would be told anew, and nothing like forgetting them."""
    short, long, none = (
        played(rounds, memory=memory, refresh="never", epsilon=1.0)
        for rounds, memory in ((150, 100), (150, 1000), (1, 1000))
    )
    assert len(short.log().reward) <= 100
    for agent in (short, long):
        agent.refresh()
    chances = [[agent.pull(CONTEXT, allowed=arm).probability for arm in agent.arms] for agent in (short, long, none)]
    assert chances[0] == pytest.approx(chances[1], abs=0.03)  # whose sds are 0.1
    assert np.abs(np.subtract(chances[2], chances[1])).max() > 0.1


def own_covariances(precision):
    """Of arms that share no weights."""
    arms_count, own, _ = precision.shape
    no = Arrow(np.zeros((0, 0)), np.zeros((arms_count, own, 0)), precision)
    return weights_module.weights_given(no, Split(np.zeros(0), np.zeros((arms_count, own)))).own_covariance


def test_precisions_that_are_singular_but_for_rounding_have_inverses():
    """P = e I + 1 1ᵀ, where e is less than rounding: along 1 the variance is that of one row."""
    precision = np.full((1, 2, 2), 1.0) + 1e-17 * np.eye(2)
    covariance = own_covariances(precision)[0]
    assert np.ones(2) @ covariance @ np.ones(2) == pytest.approx(1.0, abs=1e-3)
    assert covariance[0, 0] > 1e11
    root, units = np.random.default_rng(0).normal(size=(3, 4, 4)), np.outer(*[[1e-6, 1.0, 1e3, 1e8]] * 2)
    found = own_covariances(root @ root.transpose(0, 2, 1) * units) * units
    exact = np.linalg.inv(root)
    assert found == pytest.approx(exact.transpose(0, 2, 1) @ exact, rel=1e-9)


@pytest.mark.parametrize("scale", [1e6, 1e8])
def test_hybrid_weights_under_a_prior_without_limits(scale):
    """What arms share and what is their own is known only together: every reward is learned nevertheless."""
    agent = played(200, model="hybrid", prior_scale=scale, intercept_scale=scale)
    agent.refresh()
    table = agent.log()
    other = viper.Bandit(agent.arms, model="hybrid", prior_scale=1e4, intercept_scale=1e4)
    for context, arm, reward in zip(table.context, table.arm, table.reward, strict=True):
        other.update(other.pull(context, allowed=[arm]).id, int(reward))
    other.refresh()
    for arm in agent.arms:
        one, two = (bandit.pull(CONTEXT, allowed=[arm]) for bandit in (agent, other))
        assert one.probability == pytest.approx(two.probability, abs=0.01)
        assert one.interval == pytest.approx(two.interval, abs=0.01)


def test_forgetting_keeps_up_with_a_world_that_changes():
    """Sixty rewards, then sixty failures: half of all, or hardly any if the older ones count for less."""
    found = []
    for forget in (1.0, 0.9):
        agent = viper.Bandit(["a"], forget=forget, refresh="never", random_state=0)
        for reward in [1] * 60 + [0] * 60:
            agent.update(agent.pull(CONTEXT).id, reward)
        stepwise = agent.pull(CONTEXT).probability
        agent.refresh()
        found.append(agent.pull(CONTEXT).probability)
    assert found[0] == pytest.approx(0.5, abs=0.02)
    assert found[1] == pytest.approx(stepwise, abs=0.05)
    assert found[1] < 0.15


@pytest.mark.parametrize("forget", [0.999, 0.99, 0.5])
def test_the_newest_reward_counts_fully_and_each_older_one_less(forget):
    """Weights of forget^k for k later rewards, when all is up to date; until then at most 1 % off."""
    agent = played(100, forget=forget, refresh="never")
    table = agent._weights.played()[0]
    weights = forget ** (100 - table[:, 0])
    assert table[:, 4] == pytest.approx(weights, rel=0.0101)
    agent.refresh()
    assert agent._weights.played()[0][:, 4] == pytest.approx(weights, rel=1e-12)
    assert agent._weights.played()[0][-1, 4] == 1.0


def test_what_is_no_longer_kept_is_forgotten_alike():
    """The base has what the factors of its outcomes told, by the weights that they would have now."""
    short, long = (
        played(80, forget=0.97, memory=memory, refresh="never", model="disjoint", epsilon=1.0) for memory in (60, 1000)
    )
    for agent in (short, long):
        agent.refresh()
    chances = [[agent.pull(CONTEXT, allowed=arm).probability for arm in agent.arms] for agent in (short, long)]
    assert chances[0] == pytest.approx(chances[1], abs=0.03)


def test_shared_weights_of_indicators_are_disjoint_arms():
    rng = np.random.default_rng(4)
    agents = {
        "disjoint": viper.Bandit(range(3), "ucb", "disjoint", intercept_scale=1.0, refresh="never"),
        "shared": viper.Bandit(range(3), "ucb", "shared", intercept_scale=1e-6, refresh="never"),
    }
    for _ in range(40):
        x, reward = rng.normal(size=2), int(rng.integers(2))
        features = np.kron(np.eye(3), np.append(x, 1.0))
        choices = [agents["disjoint"].pull(x), agents["shared"].pull(features=features)]
        assert choices[0].probability == pytest.approx(choices[1].probability, abs=1e-6)
        for agent, choice in zip(agents.values(), choices, strict=True):
            agent.update(choice.id, reward)
            agent.refresh()


@pytest.mark.parametrize(("memory", "forget"), [(1_000, 1.0), (40, 1.0), (1_000, 0.97), (40, 0.97)])
def test_hybrid_weights_are_shared_ones_of_the_whole_design(memory, forget):
    """The arrow matrix beside the dense one: own weights of an arm as shared weights of features that others lack."""
    rng, columns, options = np.random.default_rng(7), 2, {"memory": memory, "forget": forget, "refresh": "never"}
    own = rng.normal(size=(K, columns))
    hybrid = viper.Bandit(range(K), "ucb", "hybrid", intercept_scale=1.0, **options)
    dense = viper.Bandit(range(K), "ucb", "shared", intercept_scale=1e-7, **options)

    def odds_of_all(context):
        x = np.append(context, 1.0)
        whole = np.c_[own, np.tile(x, (K, 1)), np.kron(np.eye(K), x)]
        choices = hybrid.pull(context, own, slate=K), dense.pull(features=whole, slate=K)
        for one, other in zip(*choices, strict=True):
            assert one.arm == other.arm
            assert one.probability == pytest.approx(other.probability, abs=1e-9)
            assert one.interval == pytest.approx(other.interval, abs=1e-9)
        return choices

    for _ in range(70):
        choices, reward = odds_of_all(rng.normal(size=D)), int(rng.integers(2))
        for agent, (choice, *_) in zip((hybrid, dense), choices, strict=True):
            agent.update(choice.id, reward)
    for agent in (hybrid, dense):
        agent.refresh()
    odds_of_all(CONTEXT)


def test_the_memory_of_hybrid_weights_grows_as_the_number_of_arms():
    entries = [
        sum(part.size for part in Weights("hybrid", Scales(1.0, 1.0), arm_count, 4, 9).posterior)
        for arm_count in (1_000, 2_000)
    ]
    assert entries[1] < 2.0 * entries[0]


# --- decisions ---


@pytest.mark.parametrize("policy", POLICIES)
def test_propensities_are_how_often_arms_are_drawn(policy):
    agent = played(60, policy=policy)
    chance = agent.probabilities(CONTEXT)
    assert sum(chance.values()) == pytest.approx(1.0)
    drawn = [agent.pull(CONTEXT) for _ in range(4000)]
    for arm, expected in chance.items():
        share = np.mean([choice.arm == arm for choice in drawn])
        assert share == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / 4000) + 1e-12)
    assert all(choice.propensity == chance[choice.arm] for choice in drawn)


def test_a_slate_has_different_arms_and_the_chances_of_what_was_left():
    agent = played(60, policy="thompson")
    first, second = agent.pull(CONTEXT, slate=2)
    assert first.arm != second.arm
    left = [arm for arm in agent.arms if arm != first.arm]
    assert second.propensity == pytest.approx(agent.probabilities(CONTEXT, allowed=left)[second.arm])
    everything = agent.pull(CONTEXT, slate=K)
    assert {choice.arm for choice in everything} == set(agent.arms)
    assert everything[-1].propensity == pytest.approx(1.0)


def test_only_allowed_arms_are_chosen_and_retired_ones_return():
    agent = played(40, policy="thompson")
    assert {agent.pull(CONTEXT, allowed=["arm 1", "arm 3"]).arm for _ in range(50)} <= {"arm 1", "arm 3"}
    assert agent.probabilities(CONTEXT, allowed="arm 1") == {"arm 1": 1.0}
    waiting = agent.pull(CONTEXT, allowed=["arm 2"])
    before = agent.probabilities(CONTEXT)
    agent.retire_arm("arm 2")
    assert "arm 2" not in agent.probabilities(CONTEXT)
    agent.add_arm("arm 2")
    assert agent.probabilities(CONTEXT) == pytest.approx(before)
    agent.update(waiting.id, 1)


def test_a_new_arm_starts_from_the_prior_or_from_the_others():
    agent = played(200, chance=0.9, policy="epsilon-greedy", epsilon=1.0, refresh="never")
    agent.add_arm("cold")
    agent.add_arm("warm", like="all")
    cold, warm = (agent.pull(CONTEXT, allowed=[arm]) for arm in ("cold", "warm"))
    assert cold.probability == pytest.approx(0.5)
    assert warm.probability > 0.7
    width = [one.interval[1] - one.interval[0] for one in (cold, warm)]
    assert width[1] < width[0]
    agent.refresh()
    assert agent.pull(CONTEXT, allowed=["warm"]).probability == pytest.approx(warm.probability)


def test_a_copy_goes_its_own_way():
    agent = played(20)
    for other in (copy.deepcopy(agent), pickle.loads(pickle.dumps(agent))):
        before = other.probabilities(CONTEXT)
        assert before == agent.probabilities(CONTEXT)
        agent.update(agent.pull(CONTEXT).id, 1)
        assert other.probabilities(CONTEXT) == before


def test_what_is_copied_does_not_change_while_it_is_copied():
    """Pickling and copying walk through what `__getstate__` returns, while other threads may go on."""
    agent = played(20)
    state = agent.__getstate__()
    before = [part.copy() for part in state["_weights"].posterior]
    played_before = state["_weights"].played()[0].copy()
    for _ in range(5):
        agent.update(agent.pull(CONTEXT).id, 1)
    for one, other in zip(state["_weights"].posterior, before, strict=True):
        assert (one == other).all()
    assert (state["_weights"].played()[0] == played_before).all()
    assert state["_next_id"] == 20


def test_the_same_seed_decides_the_same():
    one, other = (played(50, policy="thompson") for _ in range(2))
    assert [one.pull(CONTEXT).arm for _ in range(20)] == [other.pull(CONTEXT).arm for _ in range(20)]


def test_without_contexts_it_is_a_plain_bandit():
    agent = viper.Bandit([1, 2], random_state=0)
    for _ in range(60):
        choice = agent.pull()
        agent.update(choice.id, int(choice.arm == 2))
    assert agent.pull().arm == 2


def test_threads_share_one_bandit():
    agent = viper.Bandit(["a", "b"], random_state=0)

    def work():
        for _ in range(50):
            agent.update(agent.pull(CONTEXT).id, 1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(agent.log().reward) == 200


def test_ten_thousand_arms():
    agent = viper.Bandit(range(10_000), "ids", random_state=0)
    choice = agent.pull(CONTEXT)
    agent.update(choice.id, 1)
    assert sum(agent.probabilities(CONTEXT).values()) == pytest.approx(1.0)


# --- files ---


@pytest.mark.parametrize("model", ["disjoint", "hybrid"])
def test_a_saved_bandit_goes_on_as_the_first_one(model, tmp_path):
    agent = played(70, policy="thompson", model=model, memory=50, forget=0.99)
    agent.retire_arm("arm 4")
    waiting = agent.pull(CONTEXT)
    agent.save(tmp_path / "agent.viper")
    loaded = viper.load(tmp_path / "agent.viper")
    assert repr(loaded) == repr(agent)
    for one in (agent, loaded):
        one.update(waiting.id, 1)
    for reward in [0, 1, 1] * 20:
        choices = agent.pull(CONTEXT), loaded.pull(CONTEXT)
        assert choices[0] == choices[1]
        for one, choice in zip((agent, loaded), choices, strict=True):
            one.update(choice.id, reward)
    for one in (agent, loaded):
        one.refresh()
    assert agent.pull(CONTEXT) == loaded.pull(CONTEXT)
    assert (loaded.log().propensity == agent.log().propensity).all()


def test_a_bandit_of_contexts_with_large_units_is_saved(tmp_path):
    agent = viper.Bandit(["a", "b"], "thompson", memory=100, random_state=0)
    for x in 1e8 * np.random.default_rng(0).normal(size=(300, D)):
        agent.update(agent.pull(x).id, 1)
    agent.save(tmp_path / "agent.viper")
    assert viper.load(tmp_path / "agent.viper").pull(CONTEXT) == agent.pull(CONTEXT)


def test_a_bandit_may_learn_while_it_is_written(tmp_path, monkeypatch):
    agent = played(30)
    before = agent.probabilities(CONTEXT)
    write = bandit_module.write_tensors

    def slow_write(*given):
        for reward in [0, 1] * 10:
            agent.update(agent.pull(CONTEXT).id, reward)
        agent.add_arm("new")
        write(*given)

    monkeypatch.setattr(bandit_module, "write_tensors", slow_write)
    agent.save(tmp_path / "agent.viper")
    assert agent.probabilities(CONTEXT) != before
    assert viper.load(tmp_path / "agent.viper").probabilities(CONTEXT) == before


def test_a_bandit_that_has_seen_nothing_can_be_saved(tmp_path):
    viper.Bandit(["a", *np.arange(2)], random_state=1).save(tmp_path / "agent.viper")
    assert viper.load(tmp_path / "agent.viper").arms == ["a", 0, 1]


def test_a_damaged_file_is_one_clear_line(tmp_path):
    played(5).save(tmp_path / "agent.viper")
    damaged = bytearray((tmp_path / "agent.viper").read_bytes())
    damaged[-9] ^= 1
    (tmp_path / "agent.viper").write_bytes(damaged)
    with pytest.raises(viper.StorageError):
        viper.load(tmp_path / "agent.viper")


# --- evaluation ---


def logged(n, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    chance = 1 / (1 + np.exp(-X @ np.array([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]])))
    propensity = np.array([0.5, 0.3, 0.2])
    arm = rng.choice(3, n, p=propensity)
    reward = (rng.random(n) < chance[np.arange(n), arm]).astype(float)
    return {"context": X, "arm": arm, "propensity": propensity[arm], "reward": reward}, chance


def test_the_logs_own_policy_earns_what_the_log_earned():
    log, _ = logged(400)
    found = evaluate(log, np.tile([0.5, 0.3, 0.2], (400, 1)))
    assert found.ips.value == pytest.approx(log["reward"].mean(), abs=TOLERANCE["special"])
    assert found.snips.value == pytest.approx(log["reward"].mean(), abs=TOLERANCE["special"])
    assert found.dr.value == pytest.approx(log["reward"].mean(), abs=0.05)
    assert found.effective_rows == pytest.approx(400)


@pytest.mark.parametrize("n", [150, 600])
def test_intervals_cover(n):
    """The best arm by the true chances, 120 logs: 95 % ± three standard errors for IPS and SNIPS."""
    hits = np.zeros(2)
    for seed in range(120):
        log, chance = logged(n, seed)
        best = np.eye(3)[chance.argmax(1)]
        found = evaluate(log, best[np.arange(n), log["arm"]])
        truth = 0.7425  # E max of three chances, by four million draws
        hits += [one.lower <= truth <= one.upper for one in (found.ips, found.snips)]
    assert (np.abs(hits / 120 - 0.95) < 0.06).all()


def test_intervals_of_rewards_that_are_nearly_all_alike_cover():
    """Nineteen in twenty rewards are 1, and about ten rows count; by Student's t, a third of the intervals miss."""
    hits, logs = 0, 400
    for seed in range(logs):
        rng = np.random.default_rng(seed)
        propensity = rng.choice([0.05, 0.5], 60)
        weight = (rng.random(60) < propensity) / propensity
        found = evaluation.ratio_estimate((rng.random(60) < 0.95).astype(float), 0.95, weight)
        hits += found.lower <= 0.95 <= found.upper
    assert hits / logs == pytest.approx(0.95, abs=0.035)


def test_the_ends_of_an_interval_are_as_far_as_their_own_variance_says():
    rng = np.random.default_rng(0)
    weight, reward, z = rng.gamma(0.5, 1.0, 40), rng.integers(0, 2, 40).astype(float), norm.ppf(0.95)
    share = weight / weight.sum()
    count = 1.0 / (share**2).sum()
    value, *ends = evaluation.ratio_estimate(reward, 0.9, weight)
    assert value == pytest.approx(share @ reward)
    for end in ends:
        told, smooth = (share**2 * (reward - end) ** 2).sum(), end * (1.0 - end) / count
        variance = (count * told + evaluation.PSEUDO_ROWS * smooth) / (count + evaluation.PSEUDO_ROWS)
        assert (end - value) ** 2 == pytest.approx(z**2 * variance)


def test_the_interval_of_the_logs_own_reward_is_wilsons():
    log, _ = logged(20)
    for wins in (0, 3, 20):
        found = evaluate(log | {"reward": np.repeat([1.0, 0.0], [wins, 20 - wins])}, np.ones(20)).logged
        wilson = binomtest(wins, 20).proportion_ci(method="wilson")
        assert found[1:] == pytest.approx([wilson.low, wilson.high], abs=1e-9)


@pytest.mark.parametrize("tilt", [-0.4, 0.0, 1e-7, 0.05, 0.6])
def test_untilting_is_the_inverse_of_halls_transformation(tilt):
    for t in (-2.0, 0.3, 2.0):
        u = evaluation.untilted(t, tilt)
        assert u + tilt * u**2 / 3 + tilt**2 * u**3 / 27 + tilt / 6 == pytest.approx(t, abs=1e-6)


def test_intervals_where_nothing_varies():
    log, _ = logged(40)
    found = evaluate(log | {"reward": np.ones(40)}, np.tile([0.5, 0.3, 0.2], (40, 1)))
    for one in (found.logged, found.snips):
        assert one.value == pytest.approx(1.0)
        assert one.lower < 0.98
        assert one.upper == pytest.approx(1.0)
    unlucky = evaluate(log | {"reward": np.zeros(40)}, np.tile([0.5, 0.3, 0.2], (40, 1)))
    assert unlucky.ips == unlucky.snips
    assert unlucky.ips.upper > 0.02
    never = evaluate(log, np.zeros(40))
    assert np.isnan(never.snips.value)
    assert never.snips[1:] == (0.0, 1.0)
    assert never.effective_rows == 0.0


@pytest.mark.slow
def test_doubly_robust_intervals_cover():
    """As above, 40 logs, three standard errors; models that have seen their rows would promise too much."""
    hits = 0
    for seed in range(40):
        log, chance = logged(150, seed)
        found = evaluate(log, np.eye(3)[chance.argmax(1)])
        hits += found.dr.lower <= 0.7425 <= found.dr.upper
    assert abs(hits / 40 - 0.95) < 0.11


def test_policies_may_be_functions_arrays_and_bandits():
    log, _ = logged(300)
    by_array = evaluate(log, np.eye(3)[(log["context"][:, 0] < 0).astype(int)])
    by_function = evaluate(log, lambda x: 0 if x[0] >= 0 else 1, arms=[0, 1, 2])
    assert by_function == by_array
    frame = pd.DataFrame(log["context"], columns=["u", "v"]).assign(
        arm=log["arm"], propensity=log["propensity"], reward=log["reward"]
    )
    assert evaluate(frame, lambda x: {0: 0.5, 1: 0.5}) == evaluate(log, lambda x: {0: 0.5, 1: 0.5})
    agent = played(80, policy="epsilon-greedy")
    assert "rows count" in str(evaluate(agent.log(), agent))
    agent.retire_arm("arm 0")
    assert evaluate(agent.log(), agent, arms=[*agent.arms, "arm 0"]) == evaluate(agent.log(), agent)


# --- bad input ---


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: viper.Bandit([]), "at least one"),
        (lambda: viper.Bandit(["a", "a"]), "all different; got 'a' twice"),
        (lambda: viper.Bandit([None]), "a text or a number"),
        (lambda: viper.Bandit("abc"), "arms must be a list of texts or numbers; got 'abc'"),
        (lambda: viper.Bandit(3), "arms must be a list of texts or numbers; got 3"),
        (lambda: viper.Bandit([np.nan, 1]), "a text or a finite number; got nan"),
        (lambda: viper.Bandit(["a"], random_state="x"), "random_state must be a whole number from 0 on"),
        (lambda: played(2).update("x", 1), "must be a number, or ids and rewards lists of numbers; got 'x'"),
        (lambda: played(2).update([0], 1), "reward must be a number, or ids and rewards lists"),
        (lambda: played(2).update(played(2).pull(CONTEXT), 1), "id must be a number, or ids and rewards lists"),
        (lambda: played(2).update([[0]], [1]), "awaits its reward; got [0]"),
        (lambda: evaluate(logged(5)[0], "a"), "policy must be a Bandit, a function or probabilities; got 'a'"),
        (lambda: evaluate(logged(5)[0], lambda x: {0: "x"}), "must return probabilities of arms; got 'x'"),
        (lambda: evaluate(logged(5)[0], np.ones(5), arms=[0, 1, 2, 1]), "arms must be all different"),
        (lambda: evaluate(logged(5)[0], np.ones(5), level="x"), "level must lie between 0 and 1; got 'x'"),
        (lambda: evaluate(logged(5)[0] | {"arm": 3}, np.ones(5)), "arm must be a list of arms; got 3"),
        (lambda: evaluate(logged(5)[0] | {"arm": [None] * 5}, np.ones(5)), "an arm must be a text or a number"),
        (lambda: viper.Bandit(["a"], "exp3"), "policy must be one of"),
        (lambda: viper.Bandit(["a"], model="deep"), "model must be one of"),
        (lambda: viper.Bandit(["a"], spread=0), "spread must be a number from 1e-50 to 1e+50; got 0"),
        (lambda: viper.Bandit(["a"], prior_scale=1e200), "prior_scale must be a number from 1e-50 to 1e+50; got"),
        (lambda: viper.Bandit(["a"], intercept_scale=np.nan), "intercept_scale must be a number from"),
        (lambda: viper.Bandit(["a"], epsilon=2), "epsilon must lie between 0 and 1"),
        (lambda: viper.Bandit(["a"], memory=1.5), "memory must be a whole number"),
        (lambda: viper.Bandit(["a"], forget=0), "forget must be a number above 0"),
        (lambda: played(2).pull([1.0]), "context must have 3 columns, as before; got 1"),
        (lambda: played(2).pull([1.0, np.nan, 0.0]), "context must be finite"),
        (lambda: played(2).pull([1.0, -1e200, 0.0]), "context must be from -1e+50 to 1e+50"),
        (lambda: viper.Bandit(["a"]).pull(np.zeros(5_000)), "got 5,001. Use fewer columns."),
        (
            lambda: viper.Bandit(["a"], model="hybrid").pull(np.zeros(2_000)),
            "may have 4,000 weights; got 4,002.",
        ),
        (lambda: viper.Bandit(range(9_000)).pull(np.zeros(300)), "may take 2.1 GB of memory; got 6.5."),
        (lambda: played(2).pull("abc"), "context must be numbers"),
        (lambda: played(2).pull(CONTEXT, features=np.ones((K, 1))), "features need model="),
        (lambda: played(2).pull(CONTEXT, allowed=[]), "at least one, each named once"),
        (lambda: played(2).pull(CONTEXT, allowed=["arm 1", "arm 1"]), "each named once"),
        (lambda: played(2).pull(CONTEXT, allowed=["z"]), "got 'z'"),
        (lambda: played(2).pull(CONTEXT, slate=K + 1), "slate must be a whole number from 1 to 5"),
        (lambda: played(2).update(0, 1), "awaits its reward; got 0"),
        (lambda: played(2).update([99], [1, 0]), "a reward for every id"),
        (lambda: viper.Bandit(["a"]).retire_arm("a"), "at least one arm"),
        (lambda: viper.Bandit(["a"], model="shared").pull(CONTEXT), "needs features"),
        (lambda: evaluate({"arm": [1]}, [1.0]), "log must have 'propensity'"),
        (lambda: evaluate(logged(5)[0] | {"propensity": np.zeros(5)}, np.ones(5)), "propensities must lie in"),
        (lambda: evaluate(logged(5)[0], np.ones((5, 2)), arms=[0, 1, 2]), "policy must have shape"),
        (lambda: evaluate(logged(50)[0], np.ones((50, 3))), "must add up to 1"),
        (lambda: evaluate(logged(50)[0], lambda x: 7), "got 7"),
    ],
)
def test_bad_input_is_one_clear_error(call, words):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        call()


def test_a_refused_arm_changes_nothing(monkeypatch):
    agent = viper.Bandit(range(2), model="hybrid", random_state=0)
    before = agent.probabilities(CONTEXT)
    monkeypatch.setattr(weights_module, "MOST_ENTRIES", 3 * (D + 1) ** 2 * 2)
    for arm, like, error in (
        ("z", None, ValueError),
        ([1], None, TypeError),
        (0, None, ValueError),
        ("z", "q", ValueError),
    ):
        with pytest.raises(error):
            agent.add_arm(arm, like=like)
    assert agent.probabilities(CONTEXT) == before


def test_a_refused_reward_changes_nothing():
    agent = played(3, refresh="never")
    ids = [agent.pull(CONTEXT).id for _ in range(2)]
    before = agent.probabilities(CONTEXT)
    for reward in (0.5, "yes", None, np.nan):
        with pytest.raises(ValueError, match="a reward must be 0 or 1"):
            agent.update(ids, [1, reward])
    with pytest.raises(ValueError, match="awaits its reward"):
        agent.update([ids[0], ids[0]], [1, 1])
    assert agent.probabilities(CONTEXT) == before
    agent.update(ids, [1, 0])
