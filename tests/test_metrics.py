"""Scores against their definitions and against scikit-learn."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import beta, ncx2, norm, poisson, ttest_1samp, ttest_rel
from sklearn.calibration import calibration_curve
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss

from viper.report.metrics import (
    auc_interval,
    by_group,
    calibration,
    entropy,
    joint_limit,
    judge_calibration,
    misfits,
    rare_misfit,
    row_scores,
    score_differences,
    scores,
)

GENERATOR = np.random.default_rng(0)
PROBABILITY = GENERATOR.beta(0.7, 0.7, 500)
LABEL = GENERATOR.random(500) < PROBABILITY


def test_the_base_rate_for_every_row_has_no_calibration_error():
    label = np.arange(303) % 3 == 0
    assert scores(label, np.full(303, label.mean())).calibration_error == 0.0
    shuffled = np.tile([True] + [False] * 6, 100)
    assert scores(shuffled, np.full(700, shuffled.mean()), bins=1).calibration_error == 0.0


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


# --- skill against the base rate ---


def test_skill_is_that_against_scikit_learns_dummy():
    found = scores(LABEL, PROBABILITY)
    dummy = DummyClassifier(strategy="prior").fit(PROBABILITY[:, None], LABEL)
    base = dummy.predict_proba(PROBABILITY[:, None])[:, 1]
    assert found.log_skill == pytest.approx(1 - log_loss(LABEL, PROBABILITY) / log_loss(LABEL, base), rel=1e-12)
    expected = 1 - brier_score_loss(LABEL, PROBABILITY) / brier_score_loss(LABEL, base)
    assert found.brier_skill == pytest.approx(expected, rel=1e-12)
    assert found.base_accuracy == pytest.approx(dummy.score(PROBABILITY[:, None], LABEL))
    assert found.average_precision == average_precision_score(LABEL, PROBABILITY)
    worthless = scores(LABEL, base)
    assert worthless.log_skill == pytest.approx(0, abs=1e-12)
    assert worthless.brier_skill == pytest.approx(0, abs=1e-12)
    assert worthless.average_precision == pytest.approx(worthless.base_rate)


def test_one_class_has_no_skill():
    found = scores([True, True], [0.25, 0.5])
    assert (found.log_skill, found.brier_skill, found.average_precision) == (None, None, None)
    assert (found.base_rate, found.base_accuracy) == (1.0, 1.0)


# --- the verdict on calibration ---


def drawn(rows: int, base: float, error: float, seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Rows whose true log-odds lie `error` above the predicted ones, and the share of the entropy that this costs."""
    generator = np.random.default_rng(seed)
    f = logit(base) + generator.normal(0, 1, rows)
    p, t = expit(f), expit(f + error)
    label = generator.random(rows) < t
    lost = np.mean(t * np.log(t / p) + (1 - t) * np.log((1 - t) / (1 - p)))
    return label, p, lost / entropy(label.mean())


def test_an_error_is_judged_by_its_size_not_by_its_significance():
    """84,410 rows, as in the report that called a perfect reliability line into question."""
    label, probability, _ = drawn(84_410, 0.18, 0.05, 1)
    table = calibration(label, probability)
    assert (~table["predicted"].between(table["lower"], table["upper"])).sum() >= 2  # some groups are clearly off
    found = judge_calibration(label, probability)
    assert found.p_value < 0.005
    assert found.verdict == "good"
    assert "too small to matter" in found.sentence


@pytest.mark.parametrize(("error", "verdict"), [(0.0, "good"), (0.3, "fair"), (0.8, "poor"), (-0.8, "poor")])
@pytest.mark.parametrize("base", [0.5, 0.01])
def test_many_rows_get_the_verdict_of_their_error(error, base, verdict):
    label, probability, _ = drawn(80_000, base, error, 2)
    found = judge_calibration(label, probability)
    assert found.verdict == verdict
    if abs(error) > 0.2:
        assert ("too low" if error > 0 else "too high") in found.direction


def test_few_rows_are_never_found_good():
    verdicts = [judge_calibration(*drawn(30, 0.4, 0.0, seed)[:2]) for seed in range(200)]
    assert all(found.verdict != "good" for found in verdicts)
    assert sum(found.verdict == "unclear" for found in verdicts) > 190
    assert "30 rows are too few" in verdicts[0].sentence
    rare = judge_calibration(np.arange(5000) < 46, np.full(5000, 0.0092))
    assert "46 rows with the rarer outcome are too few" in rare._replace(verdict="unclear").sentence


@pytest.mark.parametrize(("rows", "base", "error"), [(2000, 0.5, 0.4), (4000, 0.2, -0.3)])
def test_the_interval_of_the_loss_covers_it(rows, base, error):
    missed = np.zeros(2)
    for seed in range(200):
        label, probability, lost = drawn(rows, base, error, seed)
        found = judge_calibration(label, probability)
        missed += [found.lower > lost, found.upper < lost]
    assert np.all(missed < 22)  # 10 are expected on each side, with sd 3.1


def test_the_p_value_is_uniform_if_probabilities_are_right():
    p = np.array([judge_calibration(*drawn(1000, 0.1, 0.0, seed)[:2]).p_value for seed in range(300)])
    assert 0.4 < p.mean() < 0.6
    assert (p < 0.05).mean() < 0.1


def test_the_loss_by_definition():
    label, probability, _ = drawn(5000, 0.3, 0.5, 3)
    found = judge_calibration(label, probability)
    parts = np.array_split(np.argsort(probability), 10)
    counts = np.array([label[i].sum() - probability[i].sum() for i in parts])
    q = np.sum(counts**2 / [np.sum(probability[i] * (1 - probability[i])) for i in parts])
    unit = 2 * 5000 * entropy(label.mean())
    assert found.loss == pytest.approx((q - 10) / unit)
    assert ncx2.cdf(q, 10, found.lower * unit) == pytest.approx(0.95)
    assert ncx2.cdf(q, 10, found.upper * unit) == pytest.approx(0.05)


def test_rare_counts_have_scores_of_their_distribution():
    squared, mean = rare_misfit(2.0, 4)
    tail = poisson.sf(4, 2.0) + 0.5 * poisson.pmf(4, 2.0)
    assert squared == pytest.approx(norm.isf(tail) ** 2)
    draws = np.random.default_rng(0).poisson(2.0, 20_000)
    assert mean == pytest.approx(np.mean([rare_misfit(2.0, k)[0] for k in draws[:4000]]), abs=0.08)


def test_confident_and_wrong_is_poor():
    wrong = judge_calibration([True] * 10 + [False] * 10, [0.0] * 10 + [1.0] * 10)
    assert wrong.verdict == "poor"
    right = judge_calibration([True] * 10 + [False] * 10, [1.0] * 10 + [0.0] * 10)
    assert right.loss == 0
    assert judge_calibration([False] * 2000, np.full(2000, 0.3)).verdict == "poor"
    assert judge_calibration([False] * 20, np.zeros(20)).p_value > 0.9


def test_shift_and_slope_are_those_of_logistic_regressions():
    label, probability, _ = drawn(3000, 0.3, 0.4, 5)
    found, x = judge_calibration(label, probability), logit(probability)
    shift = brentq(lambda a: expit(x + a).sum() - label.sum(), -5, 5)
    assert found.shift == pytest.approx(shift, rel=1e-9)
    p = expit(x + shift)
    assert found.shift_error == pytest.approx(np.sum(p * (1 - p)) ** -0.5)
    other = LogisticRegression(C=np.inf, tol=1e-12, max_iter=1000).fit(x[:, None], label)
    assert found.slope == pytest.approx(other.coef_[0, 0], rel=1e-6)
    p = other.predict_proba(x[:, None])[:, 1]
    design = np.stack([x, np.ones_like(x)])
    assert found.slope_error == pytest.approx(np.sqrt(np.linalg.inv((design * p * (1 - p)) @ design.T)[0, 0]), rel=1e-5)


def test_extreme_predictions_are_called_so():
    label, probability, _ = drawn(20_000, 0.5, 0.0, 6)
    found = judge_calibration(label, expit(2 * logit(probability)))
    assert found.direction == "They are too extreme."
    assert found.slope == pytest.approx(0.5, abs=0.05)


# --- differences ---


def test_differences_are_those_of_a_paired_t_test():
    worse = np.clip(PROBABILITY + np.random.default_rng(1).normal(0, 0.1, 500), 0.01, 0.99)
    for score, loss in (("log_score", lambda p: -log_loss(LABEL, p)), ("brier", lambda p: brier_score_loss(LABEL, p))):
        table = score_differences(LABEL, {"worse": worse, "best": PROBABILITY}, score)
        assert table.index.tolist() == ["best", "worse"]
        assert table["score"].tolist() == pytest.approx([loss(PROBABILITY), loss(worse)])
        test = ttest_rel(row_scores(LABEL, worse, score), row_scores(LABEL, PROBABILITY, score))
        assert table["difference"]["worse"] / table["error"]["worse"] == pytest.approx(test.statistic)
        assert table["clear"].tolist() == [False, bool(abs(test.statistic) > 2)]


def test_differences_need_a_known_score():
    with pytest.raises(ValueError, match="score must be 'log_score' or 'brier'; got 'auc'"):
        score_differences(LABEL, {"a": PROBABILITY}, "auc")


# --- subgroups ---


def test_group_scores_are_those_of_their_rows_alone():
    group = np.random.default_rng(7).choice(["a", "b", "c"], 500, p=[0.6, 0.38, 0.02])
    table = by_group(LABEL, PROBABILITY, group)
    assert table.index.tolist() == ["a", "b", "c"]
    for name in "abc":
        here, alone = group == name, scores(LABEL[group == name], PROBABILITY[group == name])
        row = table.loc[name]
        assert (row["rows"], row["observed"]) == (here.sum(), LABEL[here].mean())
        assert [row["log_score"], row["brier"], row["auc"]] == pytest.approx([alone.log_score, alone.brier, alone.auc])
        assert [row["observed_lower"], row["observed_upper"]] == pytest.approx(
            beta(LABEL[here].sum() + 0.5, (~LABEL[here]).sum() + 0.5).ppf([0.025, 0.975])
        )
    assert table["few"].tolist() == [False, False, True]
    values = row_scores(LABEL[group == "a"], PROBABILITY[group == "a"], "brier")
    interval = ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert table.loc["a", ["brier_lower", "brier_upper"]].tolist() == pytest.approx(list(interval))


def test_the_interval_of_the_auc_is_delongs_and_covers():
    generator, covered = np.random.default_rng(8), 0
    for _ in range(300):
        r = np.concatenate([generator.normal(0, 1, 40), generator.normal(1.2, 1, 60)])
        low, high = auc_interval(np.arange(100) >= 40, r)
        covered += low <= norm.cdf(1.2 / np.sqrt(2)) <= high
    assert 0.925 < covered / 300 < 0.98
    label = np.arange(100) >= 40
    psi = (r[label][:, None] > r[~label]).astype(float)  # by definition
    variance = psi.mean(1).var(ddof=1) / 60 + psi.mean(0).var(ddof=1) / 40
    area = psi.mean()
    expected = expit(logit(area) + np.array([-1, 1]) * norm.ppf(0.975) * np.sqrt(variance) / (area * (1 - area)))
    assert [low, high] == pytest.approx(expected.tolist())
    perfect = auc_interval([False] * 5 + [True] * 9, np.arange(14))
    assert perfect == (pytest.approx(beta(5.5, 0.5).ppf(0.025)), 1.0)


def test_groups_differ_only_where_chance_would_not_take_any_of_them():
    generator, false_alarms = np.random.default_rng(9), 0
    for _ in range(200):
        p = generator.beta(2, 5, 1000)
        squares, _ = misfits(generator.random(1000) < p, p, np.arange(1000) % 20)
        false_alarms += squares.max() > joint_limit(20, 0.95)
    assert false_alarms < 22  # 10 are expected, with sd 3.1; without the correction 128 would be
    p, group = generator.beta(2, 5, 4000), np.arange(4000) % 8
    label = generator.random(4000) < np.where(group == 3, p + 0.15, p)
    assert by_group(label, p, group)["differs"].tolist() == [k == 3 for k in range(8)]


def test_numbers_are_cut_into_ranges_and_other_columns_keep_their_levels():
    pandas = pytest.importorskip("pandas")
    age = pandas.Series(np.linspace(20, 70, 500), name="age")
    age[:7] = np.nan
    table = by_group(LABEL, PROBABILITY, age, ranges=4)
    assert table.index.name == "age"
    assert len(table) == 5
    assert table.index[-1] == "missing"
    assert table.index[:2].tolist() == ["below 33", "33 to 45"]
    assert table["rows"].sum() == 500
    size = pandas.Series(pandas.Categorical(["small", "large"] * 250, ["small", "large"], ordered=True))
    assert by_group(LABEL, PROBABILITY, size).index.tolist() == ["small", "large"]
    many = np.array([f"{k % 50:02d}" for k in range(500)])
    assert by_group(LABEL, PROBABILITY, many).index[-1] == "31 other levels"
    assert by_group(LABEL, PROBABILITY, many)["rows"].sum() == 500
    dates = pandas.date_range("2020-01-01", periods=500).to_series()
    assert by_group(LABEL, PROBABILITY, dates, ranges=2).index[0] == "below 2020-09-06"


def test_groups_together_get_one_verdict():
    generator = np.random.default_rng(10)
    p, group = generator.beta(2, 5, 20_000), np.arange(20_000) % 4
    shifted = generator.random(20_000) < np.where(group == 0, 0.5 * p, p + 0.5 * (1 - p) * (group == 1))
    assert judge_calibration(shifted, p, groups=group).verdict == "poor"
    assert judge_calibration(generator.random(20_000) < p, p, groups=group).verdict == "good"


def test_groups_need_a_value_per_row():
    with pytest.raises(ValueError, match="group must have one value per row; got 2 for 500 rows"):
        by_group(LABEL, PROBABILITY, [1, 2])


# --- rows that count more than once ---


@pytest.mark.parametrize("bins", [1, 4, 10])
def test_weights_of_rows_equal_repeated_rows(bins):
    generator = np.random.default_rng(3)
    probability = generator.random(157).round(2)
    label, weight = generator.random(157) < probability, generator.integers(0, 4, 157)
    interval = np.stack([0.5 * probability, 0.5 + 0.5 * probability], 1)
    every = np.repeat(np.arange(157), weight)
    found = scores(label, probability, interval, bins, sample_weight=weight)
    repeated = scores(label[every], probability[every], interval[every], bins)
    np.testing.assert_allclose(found[1:], repeated[1:], rtol=1e-12)
    table = calibration(label, probability, bins, sample_weight=weight)
    pd.testing.assert_frame_equal(table, calibration(label[every], probability[every], bins), check_dtype=False)
    verdict = judge_calibration(label, probability, bins, sample_weight=weight)
    assert verdict[1:] == pytest.approx(judge_calibration(label[every], probability[every], bins)[1:], rel=1e-8)
    ones = calibration(label, probability, bins, sample_weight=np.ones(157))
    pd.testing.assert_frame_equal(ones, calibration(label, probability, bins), check_dtype=False)
    for wrong in ([1.0], np.full(157, -1.0), np.zeros(157)):
        with pytest.raises(ValueError, match="sample_weight must be one number of at least 0 for each of the 157 rows"):
            scores(label, probability, sample_weight=wrong)


def test_predictions_far_too_high_are_not_called_cautious_as_well():
    """With log-odds 20 too high, and a slope of 3 among them, the one thing to say is that they are too high."""
    rng = np.random.default_rng(4)
    score = rng.normal(size=2_000)
    label = rng.random(2_000) < expit(3.0 * score)
    near, far = judge_calibration(label, expit(score)), judge_calibration(label, expit(score + 20.0))
    assert near.direction == "They are too cautious."
    assert far.slope > 2
    assert far.direction == "They are too high."
