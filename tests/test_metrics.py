"""Scores against their definitions and against scikit-learn."""

import math

import numpy as np
import pytest
from scipy.stats import beta
from sklearn.calibration import calibration_curve

from viper.report.metrics import calibration, scores

GENERATOR = np.random.default_rng(0)
PROBABILITY = GENERATOR.beta(0.7, 0.7, 500)
LABEL = GENERATOR.random(500) < PROBABILITY


def test_scores_by_definition():
    found = scores(LABEL, PROBABILITY, np.stack([PROBABILITY * 0.5, PROBABILITY], 1))
    right = np.where(LABEL, PROBABILITY, 1 - PROBABILITY)
    assert found.rows == 500
    assert found.log_score == pytest.approx(np.log(right).mean(), rel=1e-12)
    assert found.brier == pytest.approx(((1 - right) ** 2).mean(), rel=1e-12)
    assert found.accuracy == (right > 0.5).mean()
    assert found.interval_width == pytest.approx(PROBABILITY.mean() / 2)
    pairs = PROBABILITY[LABEL][:, None] - PROBABILITY[~LABEL]
    assert found.auc == pytest.approx((pairs > 0).mean() + (pairs == 0).mean() / 2)


def test_calibration_is_scikit_learns_with_counts():
    table = calibration(LABEL, PROBABILITY, 7)
    observed, predicted = calibration_curve(LABEL, PROBABILITY, n_bins=7, strategy="quantile")
    np.testing.assert_allclose(table["observed"], observed)
    np.testing.assert_allclose(table["predicted"], predicted)
    assert table["rows"].sum() == 500
    error = np.abs(observed - predicted) @ table["rows"] / 500
    assert scores(LABEL, PROBABILITY, bins=7).calibration_error == pytest.approx(error)


def test_calibration_counts_and_jeffreys_intervals():
    probability = np.array([0.05, 0.08, 0.15, 0.95, 0.35, 0.65, 0.66, 0.68, 0.7])
    label = np.array([False, False, False, True, False, True, True, False, True])
    table = calibration(label, probability, bins=3, level=0.9)
    np.testing.assert_array_equal(table["rows"], [3, 3, 3])
    np.testing.assert_allclose(table["observed"], [0.0, 2 / 3, 2 / 3])
    np.testing.assert_allclose(table["predicted"], [0.28 / 3, 1.66 / 3, 2.33 / 3])
    exact = beta(2.5, 1.5).ppf([0.05, 0.95])
    np.testing.assert_allclose([table["lower"][1], table["upper"][1]], exact)
    assert table["lower"][0] == 0.0


def test_calibration_reaches_the_ends_and_needs_a_bin():
    probability = np.random.default_rng(0).random(300)
    label = probability > 0.4
    table = calibration(label, probability)
    assert (table["upper"].iloc[-1], table["lower"][0]) == (1.0, 0.0)
    with pytest.raises(ValueError, match="bins must be at least 1; got 0"):
        calibration(label, probability, bins=0)


def test_intervals_of_shares_have_their_mass():
    row = calibration(LABEL, PROBABILITY, 1, level=0.8).iloc[0]
    posterior = beta(LABEL.sum() + 0.5, (~LABEL).sum() + 0.5)
    assert posterior.cdf(row["lower"]) == pytest.approx(0.1)
    assert posterior.cdf(row["upper"]) == pytest.approx(0.9)


def test_intervals_of_bins_without_or_with_only_positives_reach_the_end():
    table = calibration([False] * 4 + [True] * 4, np.linspace(0.01, 0.99, 8), 2)
    assert (table["lower"][0], table["upper"][1]) == (0.0, 1.0)
    assert table["upper"][0] == pytest.approx(beta(0.5, 4.5).ppf(0.975))


def test_equal_probabilities_share_a_bin():
    table = calibration([True, False, True, False], [0.3, 0.3, 0.3, 0.3], 10)
    assert table["rows"].tolist() == [4]
    assert table["observed"].tolist() == [0.5]


def test_one_class_has_no_auc():
    found = scores([True, True], [0.25, 0.5])
    assert found.auc is None
    assert found.log_score == pytest.approx((math.log(0.25) + math.log(0.5)) / 2)


@pytest.mark.parametrize(
    ("label", "probability", "message"),
    [
        ([0, 1], [0.1, 0.2], "label must be True or False"),
        ([True], [0.1, 0.2], "label must be True or False"),
        ([], [], "label must be True or False"),
        ([True, False], [0.1, 1.2], r"probability must lie in \[0, 1\]; got 0.1 to 1.2"),
    ],
)
def test_bad_input_is_refused(label, probability, message):
    with pytest.raises(ValueError, match=message):
        scores(label, probability)
