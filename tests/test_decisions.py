"""Thresholds, confusion matrices and decision curves against scikit-learn, their definitions and brute force."""

import numpy as np
import pytest
from scipy.stats import beta
from sklearn.metrics import confusion_matrix, precision_score, recall_score
from viper.metrics import budget_threshold, confusion, cost_threshold, decision_curve

from viper.report.decisions import default_thresholds

GENERATOR = np.random.default_rng(0)
PROBABILITY = GENERATOR.beta(0.6, 2.0, 800).round(3)  # some are equal
LABEL = GENERATOR.random(800) < PROBABILITY


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.25, 0.5, float(PROBABILITY[7]), 0.9, 1.0])
def test_counts_and_rates_are_scikit_learns(threshold):
    found, acted = confusion(LABEL, PROBABILITY, threshold), threshold <= PROBABILITY
    expected = confusion_matrix(LABEL, acted, labels=[False, True])
    assert [
        [found.true_negative, found.false_positive],
        [found.false_negative, found.true_positive],
    ] == expected.tolist()
    rates = found.rates()["value"]
    assert rates["sensitivity"] == recall_score(LABEL, acted)
    assert rates["specificity"] == recall_score(~LABEL, ~acted)
    for name, side, chosen in (("ppv", LABEL, acted), ("npv", ~LABEL, ~acted)):
        expected = precision_score(side, chosen, zero_division=np.nan)
        assert rates[name] == pytest.approx(expected, nan_ok=True)
    assert rates["acted"] == acted.mean()


def test_a_cost_threshold_minimises_the_expected_cost():
    t = cost_threshold(cost_fp=2.0, cost_fn=5.0)
    expected = lambda threshold: np.where(threshold <= PROBABILITY, 2.0 * (1 - PROBABILITY), 5.0 * PROBABILITY).sum()  # noqa: E731
    others = np.linspace(0, 1, 501)
    assert expected(t) <= min(map(expected, others)) + 1e-9
    found = confusion(LABEL, PROBABILITY, t)
    assert found.cost(2.0, 5.0) == 2 * found.false_positive + 5 * found.false_negative


@pytest.mark.parametrize("budget", [1, 10, 0.1, 0.25, 333, 799, 800, 5000, 0.999])
def test_a_budget_is_used_as_far_as_ties_allow(budget):
    most = int(budget * 800) if budget < 1 else budget
    acted = (budget_threshold(PROBABILITY, budget) <= PROBABILITY).sum()
    assert acted <= most
    counts = [(t <= PROBABILITY).sum() for t in np.append(np.unique(PROBABILITY), 2.0)]
    assert acted == max(n for n in counts if n <= most)


def test_a_budget_smaller_than_a_tie_acts_on_nobody():
    t = budget_threshold([0.3, 0.3, 0.3, 0.1], 2)
    assert confusion([True] * 4, [0.3, 0.3, 0.3, 0.1], t).acted == 0
    assert confusion([True] * 3, [1.0, 1.0, 1.0], budget_threshold([1.0, 1.0, 1.0], 2)).acted == 0


def test_intervals_of_rates_have_their_mass_and_their_coverage():
    rates = confusion(LABEL, PROBABILITY, 0.3).rates(0.9)
    k, n = rates.loc["ppv", ["count", "rows"]]
    posterior = beta(k + 0.5, n - k + 0.5)
    assert posterior.cdf(rates.loc["ppv", ["lower", "upper"]].astype(float)) == pytest.approx([0.05, 0.95])
    generator, covered, truth = np.random.default_rng(3), 0, 0.0
    p = generator.beta(0.6, 2.0, 400_000)
    truth = p[p >= 0.3].mean()  # of labels drawn from these probabilities
    for _ in range(400):
        chosen = generator.choice(p, 150)
        row = confusion(generator.random(150) < chosen, chosen, 0.3).rates().loc["ppv"]
        covered += row["lower"] <= truth <= row["upper"]
    assert 0.925 < covered / 400 < 0.975


def test_rates_without_rows_are_unknown():
    rates = confusion([True, False], [0.2, 0.3], 0.9).rates()
    assert np.isnan(rates.loc["ppv", "value"])
    assert rates.loc["ppv", ["lower", "upper"]].tolist() == [0.0, 1.0]


def test_net_benefit_by_definition():
    table = decision_curve(LABEL, PROBABILITY, [0.1, 0.35])
    for row in table.itertuples():
        t, acted = row.threshold, row.threshold <= PROBABILITY
        expected = ((acted & LABEL).sum() - t / (1 - t) * (acted & ~LABEL).sum()) / 800
        assert row.net_benefit == pytest.approx(expected)
        assert row.act_on_all == pytest.approx(LABEL.mean() - t / (1 - t) * (1 - LABEL.mean()))
        assert row.gain == pytest.approx(expected - max(row.act_on_all, 0.0))
        assert row.lower < row.net_benefit < row.upper
        assert row.acted == acted.mean()


def test_the_threshold_of_the_costs_has_the_least_cost_and_the_greatest_benefit():
    """cost = n b c₋ - n (c₊ + c₋)(1 - t) · net benefit at t = c₊/(c₊+c₋): the two rank all rules alike."""
    t = cost_threshold(1.0, 4.0)
    row, found = decision_curve(LABEL, PROBABILITY, [t]).iloc[0], confusion(LABEL, PROBABILITY, t)
    assert found.cost(1.0, 4.0) == pytest.approx(4.0 * LABEL.sum() - 800 * 4.0 * row["net_benefit"])


def test_intervals_of_net_benefit_cover():
    generator, inside = np.random.default_rng(4), np.zeros(2)
    p = generator.beta(0.6, 2.0, 500_000)
    y = generator.random(500_000) < p
    truth = decision_curve(y, p, [0.2]).iloc[0]
    for _ in range(300):
        chosen = generator.integers(0, len(p), 200)
        row = decision_curve(y[chosen], p[chosen], [0.2]).iloc[0]
        inside += [
            row["lower"] <= truth["net_benefit"] <= row["upper"],
            row["gain_lower"] <= truth["gain"] <= row["gain_upper"],
        ]
    assert np.all(inside / 300 > 0.92)


def test_thresholds_are_scaled_to_rare_outcomes():
    found = default_thresholds(np.array([0.001, 0.01, 0.04]))
    assert (found[0], found[-1], len(found)) == (pytest.approx(0.0004), 0.04, 100)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost_threshold(-1, 1), "cost_fp must be a number of at least 0; got -1"),
        (lambda: cost_threshold(0, 0), "cost_fp or cost_fn must be above 0"),
        (lambda: budget_threshold([0.1], 0), "budget must be a number of rows, or a share"),
        (lambda: budget_threshold([0.1], 2.5), "budget must be a number of rows, or a share .*; got 2.5"),
        (lambda: confusion([True], [0.1], float("nan")), "threshold must be a number; got nan"),
        (lambda: decision_curve([True], [0.1], [0.0]), "thresholds must lie strictly between 0 and 1"),
    ],
)
def test_senseless_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
