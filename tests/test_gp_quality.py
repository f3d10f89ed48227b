"""The benchmark of probabilities: its splits, its scores, and the tables made from its lines."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
from viper.metrics import calibration

import viper

pytest.importorskip("gpytorch")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def quality():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module("benchmarks.gp_quality")


def test_the_halves_are_disjoint_and_large_enough(quality):
    assert not set(quality.CHOSEN_ON) & set(quality.HELD_OUT)
    assert len(quality.SETS) >= 14
    assert set(quality.SHARED) < set(quality.SETS)


@pytest.mark.parametrize("name", ["wdbc", "wine", "iris", "digits-3-8", "fair", "anes96"])
def test_sets_of_packages_have_two_classes(quality, name):
    rows = quality.read_set(name, None)
    assert rows is not None
    assert np.isfinite(rows.X).all()
    assert set(rows.y) == {0.0, 1.0}
    assert 0.25 < rows.y.mean() < 0.75


def test_sets_without_their_files_are_absent(quality, tmp_path):
    assert quality.read_set("heart", None) is None
    assert quality.read_set("heart", tmp_path) is None


def test_splits_are_repeatable_disjoint_and_standardised(quality):
    rows = quality.Rows(np.arange(200.0)[:, None] * [1.0, 0.0], np.arange(200) % 2.0)
    first, again, other = (quality.split_rows(rows, number, 50) for number in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.X, other.X)
    assert first.X.shape == (50, 1)  # without the constant column
    assert len(first.y_test) == 150
    assert not set(first.X.ravel()) & set(first.X_test.ravel())
    assert first.X.mean(0) == pytest.approx(0, abs=1e-12)
    assert first.X.std(0) == pytest.approx(1)
    assert len(quality.split_rows(rows, 0, 500).y) == 140  # 70 %


def test_a_smaller_split_is_the_beginning_of_a_larger_one(quality):
    rows = quality.Rows(np.random.default_rng(0).normal(size=(100, 2)), np.arange(100) % 2.0)
    small, large = (quality.split_rows(rows, 0, size) for size in (20, 60))
    assert np.array_equal(large.y[:20], small.y)


def test_scores_are_those_of_the_library_and_of_scikit_learn(quality):
    generator = np.random.default_rng(1)
    p = generator.uniform(0.01, 0.99, 300)
    y = (generator.random(300) < p).astype(float)
    found = quality.score_split(quality.Split(np.zeros((5, 1)), np.zeros(5), np.zeros((300, 1)), y), lambda _: p)
    table = calibration(y > 0, p)
    gap = np.average(abs(table["observed"] - table["predicted"]), weights=table["rows"])
    expected = {
        "rows": 5,
        "log loss": log_loss(y, p),
        "AUC": roc_auc_score(y, p),
        "Brier": brier_score_loss(y, p),
        "calibration error": gap,
    }
    assert found.pop("seconds") >= 0
    assert found == pytest.approx(expected, rel=1e-12)


def write_lines(quality, folder, losses):
    """A scratch folder: method -> data -> losses by split."""
    for method, by_set in losses.items():
        for data, found in by_set.items():
            for split, loss in enumerate(found):
                line = {"data": data, "split": split, "size": 500, "method": method, "rows": 70, "log loss": loss}
                rest = {"AUC": 0.5, "Brier": 0.25, "calibration error": 0.1, "seconds": 1.0}
                quality.append(folder / quality.file_name(method), line | rest)


LOSSES = {
    "viper GP": {"heart": [0.4, 0.5], "iris": [0.1, 0.3]},
    "viper logistic regression": {"heart": [0.5, 0.5], "iris": [0.1, 0.1]},
    "scikit-learn GPC, one lengthscale": {"heart": [0.6, 0.6], "iris": [0.3, 0.3]},
    "random forest": {"heart": [0.3, 0.3], "iris": [0.4, 0.4]},
}


def test_ranks_ratios_and_wins(quality, tmp_path):
    write_lines(quality, tmp_path, LOSSES)
    losses = quality.by_split(quality.read_lines(tmp_path), 500, "log loss")
    assert quality.mean(losses["heart"]["viper GP"]) == pytest.approx(0.45)
    assert quality.ratios(losses, "viper GP") == pytest.approx({"heart": 0.9, "iris": 2.0})
    assert quality.mean_rank(losses, "viper GP", LOSSES) == 2.0  # second of four on both
    assert quality.mean_rank(losses, "viper GP", quality.GAUSSIAN_PROCESSES) == 1.0
    assert quality.mean_rank(losses, "random forest", LOSSES) == 2.5  # first and last


def test_methods_are_compared_on_the_splits_that_both_have(quality):
    assert quality.ratio({0: 0.2, 1: 0.4, 2: 9.0}, {0: 0.1, 1: 0.2}) == pytest.approx(2.0)
    assert np.isnan(quality.ratio({0: 0.2}, {1: 0.2}))


def test_tables_of_a_folder(quality, tmp_path):
    write_lines(quality, tmp_path, LOSSES)
    key = {"truth": "linear", "rows": 100, "columns": 3}
    for repeat, covered in enumerate([0.9, 1.0]):
        quality.append(tmp_path / quality.COVERAGE_FILE, key | {"repeat": repeat, "coverage": covered})
    page = quality.make_page(tmp_path, "cpu", ["splice"])
    tables = {table.title: table for table in page.tables}
    assert ["heart", "chosen on", "70", "0.4500", "0.5000", "0.6000", "**0.3000**"] in tables["Log loss, 500 rows"].rows
    ours = tables["Summary, 500 rows, all sets"].rows[0]
    assert ours[:5] == ["viper GP", "2.00", "1.00", "2.000 (iris)", "1 of 2"]
    assert "0.950 ± 0.050" in tables["Coverage of 95 % intervals"].rows[4]
    assert "splice: skipped" in page.text()
    assert "Log loss, 2,000 rows" not in page.text()


def test_a_run_goes_on_after_a_line_cut_short(quality, tmp_path, monkeypatch, capsys):
    calls = []

    def base_rate(split):
        calls.append(len(split.y))
        return np.full(len(split.y_test), split.y.mean())

    monkeypatch.setitem(quality.METHODS, "random forest", base_rate)
    fill = (tmp_path, None, ["random forest"], 2, (500,), ("iris", "wine"))
    quality.fill(*fill)
    assert calls == [70, 124, 70, 124]
    quality.fill(*fill)
    assert len(calls) == 4  # nothing is missing
    file = tmp_path / quality.file_name("random forest")
    file.write_text(file.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    quality.fill(*fill)
    assert calls[4:] == [124]
    lines = quality.read_lines(tmp_path)
    assert len({quality.key_of(line) for line in lines}) == len(lines) == 4
    assert "iris 500 0 random forest" in capsys.readouterr().out


def test_simulated_truths(quality):
    split, probability = quality.simulate("linear", 100, 3, 0)
    again, _ = quality.simulate("linear", 100, 3, 0)
    assert np.array_equal(split.X, again.X)
    f = np.log(probability / (1 - probability)) - quality.TRUTH_LEVEL
    slopes = np.linalg.lstsq(split.X_test, f, rcond=None)[0]
    assert abs(slopes) == pytest.approx(quality.TRUTH_SLOPE / np.sqrt(3))
    draws = [quality.simulate("a draw from a GP", 100, 10, repeat)[1] for repeat in range(150)]
    variance = np.mean([np.square(np.log(p / (1 - p))).mean() for p in draws])
    low, high = quality.TRUTH_SCALES
    assert variance == pytest.approx((high - low) / np.log(high / low), rel=0.3)  # 150 draws of 200 correlated values


def test_the_benchmark_of_the_paper_has_the_recipe_of_the_documentation(quality):
    """So that its table, and what docs/paper.md says by it, stay those of the paper when defaults change."""
    options = importlib.import_module("benchmarks.gp").PAPER
    recipe = {name: options[name] for name in ("kernel", "mean", "priors", "lengthscales", "n_inducing")}
    text = ", ".join(f"{name}={value!r}" for name, value in recipe.items()).replace("'", '"')
    assert text in " ".join(viper.VariationalGPClassifier.__doc__.split())
