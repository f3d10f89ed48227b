"""Experiments: what may be asked for, answers in any order, saving, and that asking pays."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit
from scipy.stats import norm

import viper
from viper.decisions.experiment import ACQUISITIONS, searched_rows
from viper.decisions.inputs import Inputs, Linear
from viper.decisions.regression import GaussianRegression, Moments, expected_gain
from viper.errors import StorageError

MIXED = {"dose": (0.0, 10.0), "rate": (0.01, 1.0, "log"), "shots": (1, 5, "integer"), "catalyst": ["a", "b", "c"]}


def short_of(dose):
    return lambda point: point["dose"] + point["shots"] <= dose


def played(experiment, p, count, seed=0):
    random = np.random.default_rng(seed)
    for _ in range(count):
        x = experiment.ask()
        experiment.tell(x, random.random() < p(x))
    return experiment


def by_dose(x):
    return expit(2.0 * (x["dose"] - 4.0) - (x["catalyst"] == "b"))


@pytest.fixture(scope="module")
def mixed():
    constraints = [({"dose": 1.0, "shots": 1.0}, 11.0), short_of(11.5)]
    made = viper.Experiment(MIXED, "threshold", threshold=0.75, constraints=constraints, initial=6, random_state=3)
    return played(made, by_dose, 10)


# --- points ---


def test_points_come_back_from_every_form():
    inputs = Inputs(MIXED)
    numbers = inputs.numbers(np.random.default_rng(0).random((50, 4)))
    np.testing.assert_allclose(inputs.numbers(inputs.units(numbers)), numbers, rtol=1e-12)
    np.testing.assert_allclose(inputs.read(inputs.values(numbers)), numbers, rtol=1e-12)
    np.testing.assert_allclose(inputs.read([inputs.point(row) for row in numbers]), numbers, rtol=1e-12)


def test_columns_have_the_scale_of_the_priors():
    columns = Inputs(MIXED).columns(Inputs(MIXED).numbers(np.random.default_rng(0).random((20_000, 4))))
    np.testing.assert_allclose(columns[:, :2].std(0), 1.0, atol=0.01)
    assert columns[:, 2].std() == pytest.approx(math.sqrt(24 / 25), abs=0.01)  # five equal shares
    np.testing.assert_array_equal(columns[:, 3:].sum(1), 1.0)
    assert np.abs(columns[:, :3]).max() <= math.sqrt(3.0) + 1e-12


def test_whole_numbers_get_equal_shares():
    numbers = Inputs([(1, 4, "integer")]).numbers((np.arange(4000)[:, None] + 0.5) / 4000)
    np.testing.assert_array_equal(np.bincount(numbers[:, 0].astype(int))[1:], 1000)


def test_asked_points_keep_bounds_kinds_and_constraints(mixed):
    table = mixed.answers[0]
    assert list(table.columns) == list(MIXED)
    assert table["dose"].between(0, 10).all()
    assert table["rate"].between(0.01, 1.0).all()
    assert set(table["shots"]) <= {1, 2, 3, 4, 5}
    assert isinstance(mixed.ask(1).to_dict("records")[0]["shots"], int)
    assert set(table["catalyst"]) <= {"a", "b", "c"}
    assert (table["dose"] + table["shots"] <= 11.0 + 1e-9).all()
    mixed.cancel()


def test_a_linear_constraint_is_its_function():
    inputs = Inputs(MIXED, [({"dose": 2.0, "shots": -1.0}, 3.0)])
    function = Inputs(MIXED, lambda point: 2.0 * point["dose"] - point["shots"] <= 3.0)
    numbers = inputs.numbers(np.random.default_rng(1).random((400, 4)))
    np.testing.assert_array_equal(inputs.allowed(numbers), function.allowed(numbers))
    np.testing.assert_array_equal(inputs.spread(40, 2), function.spread(40, 2))


def test_first_points_are_of_a_sobol_sequence():
    experiment = viper.Experiment([(0.0, 1.0)] * 2, initial=8, random_state=1)
    points = np.concatenate([experiment.ask(3), experiment.ask(5)])
    np.testing.assert_array_equal(points, experiment.inputs.spread(8, experiment._seed(0)))
    assert sorted(np.floor(8 * points[:, 0]).astype(int)) == list(range(8))


# --- answers ---


def test_order_and_batches_of_answers_do_not_matter():
    x = np.random.default_rng(0).random((12, 2))
    y = (x[:, 0] > 0.5).astype(int)
    one, many = (viper.Experiment([(0.0, 1.0)] * 2, initial=2) for _ in range(2))
    for point, answer in zip(x[::-1], y[::-1], strict=True):
        one.tell(point, answer)
    many.tell(x, y)
    np.testing.assert_allclose(one.estimate(x).mean, many.estimate(x).mean, atol=1e-9)


def test_points_that_await_answers_are_not_asked_again():
    experiment = viper.Experiment([(0.0, 1.0)], "learn", initial=2)
    experiment.tell([[0.1], [0.5], [0.9]], [0, 1, 0])
    points = experiment.ask(4)[:, 0]
    assert len(experiment.pending) == 4
    assert np.diff(np.sort(points)).min() > 0.02
    experiment.tell(points[[2, 0], None], [1, 1])
    np.testing.assert_array_equal(experiment.pending[:, 0], points[[1, 3]])
    experiment.cancel(points[1:2, None])
    np.testing.assert_array_equal(experiment.pending[:, 0], points[3:])


def test_an_interrupted_ask_leaves_no_open_question(monkeypatch):
    one, other = (viper.Experiment([(0.0, 1.0)], "learn", initial=2) for _ in range(2))
    for experiment in (one, other):
        experiment.tell([[0.1], [0.5], [0.9]], [0, 1, 0])
        experiment.ask()
    spread, searched = Inputs.best, []

    def interrupted(*given):
        searched.append(given)
        if len(searched) == 3:
            raise KeyboardInterrupt
        return spread(*given)

    monkeypatch.setattr(Inputs, "best", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.ask(4)
    assert len(one.pending) == 1
    np.testing.assert_array_equal(one.ask(2), other.ask(2))


@pytest.mark.parametrize(
    ("goal", "word"), [(g, w) for g in ACQUISITIONS if g not in ("real", "prefer") for w in ACQUISITIONS[g]]
)
def test_every_acquisition_asks_within_bounds(goal, word):
    experiment = viper.Experiment([(0.0, 1.0)], goal, acquisition=word, initial=2)
    experiment.tell([[0.1], [0.4], [0.9]], [0, 1, 1])
    assert 0.0 <= experiment.ask()[0] <= 1.0


def test_answers_of_one_kind_are_enough():
    experiment = viper.Experiment([(0.0, 1.0)], initial=2).tell([[0.2], [0.8]], [1, 1])
    assert 0.0 <= experiment.ask()[0] <= 1.0
    assert (experiment.estimate([[0.5]]).mean > 0.5).all()


def test_the_estimate_is_that_of_the_model(mixed):
    table = mixed.answers[0]
    found = mixed.estimate(table, level=0.8)
    columns = mixed.columns(table)
    np.testing.assert_array_equal(found.mean, mixed.model.predict_proba(columns)[:, 1])
    np.testing.assert_array_equal(found.lower, mixed.model.predict_interval(columns, 0.8)[:, 0])
    mean, sd = mixed.model.predict_latent(columns)
    np.testing.assert_allclose(found.above, norm.sf((math.log(3.0) - mean) / sd), rtol=1e-9)


def test_many_answers_search_hyperparameters_less_often():
    sizes = [searched_rows(n) for n in range(1, 400)]
    assert sizes[:100] == list(range(1, 101))
    assert len(set(sizes[100:])) < 16
    assert all(k <= n < 1.12 * k + 1 for n, k in enumerate(sizes, start=1))


# --- asking pays ---


def test_look_ahead_asks_near_the_threshold():
    x = np.linspace(0.0, 1.0, 41)[:, None]
    experiment = viper.Experiment([(0.0, 1.0)], threshold=0.75, initial=2).tell(x, x[:, 0] > 0.6)
    assert np.abs(experiment.ask(3) - 0.6).max() < 0.1


@pytest.mark.slow
def test_look_ahead_beats_sobol():
    def p(x):
        return expit(4.0 * np.sin(6.0 * x[0]) + 6.0 * x[1] - 2.0)

    grid = np.random.default_rng(0).random((2000, 2))
    above = p(grid.T) > 0.75

    def wrong(seed, **options):
        made = viper.Experiment([(0.0, 1.0)] * 2, threshold=0.75, random_state=seed, **options)
        return np.mean((played(made, p, 40, seed).estimate(grid).mean > 0.75) != above)

    asked, spread = (
        [wrong(seed, **given) for seed in range(6)] for given in ({"acquisition": "look-ahead"}, {"initial": 40})
    )
    assert np.mean(asked) < 0.8 * np.mean(spread)


def test_a_certain_maximum_is_found():
    experiment = viper.Experiment({"x": (0.0, 1.0)}, "maximise", random_state=0)
    played(experiment, lambda x: expit(6.0 - 80.0 * (x["x"] - 0.7) ** 2), 14)
    best = experiment.best()
    assert best.x["x"] == pytest.approx(0.7, abs=0.15)
    assert best.interval[0] < best.mean < best.interval[1]


def test_information_stops_an_experiment():
    experiment = viper.Experiment([(0.0, 1.0)], threshold=0.5, initial=2, stop=1e-3)
    assert not experiment.done
    experiment.tell([[0.1], [0.3], [0.7], [0.9]], [0, 0, 1, 1])
    early = experiment.progress()
    assert not experiment.done
    x = np.linspace(0.0, 1.0, 200)[:, None]
    experiment.tell(x, x[:, 0] > 0.5)
    late = experiment.progress()
    assert late.information < early.information
    assert late.left < early.left
    assert experiment.done
    assert (late.answers, late.pending) == (204, 0)


def test_what_is_left_is_the_expected_share_of_errors(mixed):
    found = mixed.progress()
    mean, sd = mixed.model.predict_latent(mixed._reference())
    above = norm.sf((math.log(3.0) - mean) / sd)
    assert found.left == pytest.approx(np.minimum(above, 1.0 - above).mean(), rel=1e-9)


# --- pictures ---


@pytest.mark.parametrize("columns", ["dose", ("dose", "rate")])
def test_pictures_show_the_estimate_and_the_answers(mixed, columns):
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure

    ax = viper.plot.experiment(mixed, columns=columns, at={"catalyst": "a"}, size=9, ax=Figure().subplots())
    one = columns == "dose"
    assert ax.get_xlabel() == "dose"
    dots = np.concatenate([one.get_offsets() for one in ax.collections if len(one.get_offsets())])
    assert {round(float(x), 6) for x in mixed.answers[0]["dose"]} <= {round(float(x), 6) for x in dots[:, 0]}
    # answers at the bounds are not cut off
    assert not any(one.get_clip_on() for one in ax.collections if isinstance(one, PathCollection))
    if one:
        x, y = ax.lines[0].get_data()
        middle = viper.report.views.experiment_grid(mixed, columns, {"catalyst": "a"}, 0.95, 9)
        np.testing.assert_allclose(x, np.linspace(0.0, 10.0, 9))
        np.testing.assert_allclose(y, middle.estimate.mean)
    else:
        assert ax.get_yscale() == "log"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "columns must be one input or two; got 4"),
        ({"columns": "dosis"}, "columns must be inputs of the experiment; got 'dosis'. Choose one of"),
        ({"columns": "catalyst"}, "columns must be numbers; got choices"),
        ({"columns": "dose", "at": {"x": 1}}, "at must name inputs; got 'x'"),
    ],
)
def test_pictures_of_other_inputs_are_refused(mixed, given, message):
    with pytest.raises(ValueError, match=message):
        viper.plot.experiment(mixed, **given)


# --- measurements that may fail ---


def test_regression_is_the_formula_and_its_evidence_is_at_a_maximum():
    random = np.random.default_rng(4)
    X = random.normal(size=(15, 2))
    y = 3.0 + np.sin(2.0 * X[:, 0]) + 0.1 * random.normal(size=15)
    found = GaussianRegression(X, y)
    Z = random.normal(size=(4, 2))
    theta = found.theta
    x, z = torch.from_numpy(X), torch.from_numpy(Z)
    K = found.kernel(theta, x, x) + (theta[-1].exp() + 1e-6) * torch.eye(15)
    across = found.kernel(theta, z, x)
    expected = found.centre + found.unit * (across @ torch.linalg.solve(K, found.y))
    variance = found.kernel(theta, z, z) - across @ torch.linalg.solve(K, across.T)
    moments = found.predict(Z)
    np.testing.assert_allclose(moments.mean, expected, rtol=1e-9)
    np.testing.assert_allclose(moments.sd, found.unit * variance.diagonal().sqrt(), rtol=1e-7)
    # the evidence is that of a multivariate normal, and no direction improves it
    log_density = torch.distributions.MultivariateNormal(torch.zeros(15).double(), K).log_prob(found.y)
    prior = ((theta - found.prior_mean) / found.prior_sd).square().sum()
    constant = 7.5 * math.log(2.0 * math.pi)
    assert float(found.loss(theta)) == pytest.approx(float(0.5 * prior - log_density) - constant, rel=1e-9)
    leaf = theta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(found.loss(leaf), leaf)
    assert float(slope.abs().max()) < 1e-2
    # a pending run at a point leaves the mean, and the variance that a measurement there would leave
    pending = found.predict(Z, Z[:1])
    np.testing.assert_allclose(pending.mean, moments.mean, rtol=1e-12)
    noise = float(theta[-1].exp()) + 1e-6
    left = variance - variance[:, :1] @ variance[:1] / (variance[0, 0] + noise)
    np.testing.assert_allclose(pending.sd, found.unit * left.diagonal().sqrt(), rtol=1e-6)


def test_expected_gain_is_quadrature():
    moments = Moments(np.array([-1.0, 0.3, 2.0]), np.array([0.5, 1.5, 0.2]))
    z = np.linspace(-10.0, 10.0, 200_001)
    f = moments.mean[:, None] + moments.sd[:, None] * z
    expected = np.trapezoid(np.maximum(f - 0.4, 0.0) * norm.pdf(z), z, axis=1)
    np.testing.assert_allclose(expected_gain(moments, 0.4), expected, atol=1e-8)


def test_failed_runs_are_learned_and_avoided():
    experiment = viper.Experiment({"x": (0.0, 1.0), "z": (0.0, 1.0)}, "minimise", outcome="real", random_state=0)
    for _ in range(14):
        x = experiment.ask()
        failed = x["x"] > 0.7
        experiment.tell(x, None if failed else (x["x"] - 1.0) ** 2 + x["z"])
    best = experiment.best()
    assert best.x["x"] == pytest.approx(0.62, abs=0.15)
    assert best.x["z"] < 0.2
    found = experiment.estimate([{"x": 0.3, "z": 0.5}, {"x": 0.98, "z": 0.5}])
    assert found.feasible[0] > 0.8 > 0.4 > found.feasible[1]
    assert found.mean[0] == pytest.approx(0.7**2 + 0.5, abs=0.1)


def test_failures_may_be_named_or_missing():
    three = [viper.Experiment([(0.0, 1.0)], "maximise", outcome="real", initial=2) for _ in range(3)]
    three[0].tell([[0.1], [0.5], [0.9]], [1.0, 2.0, None])
    three[1].tell([[0.1], [0.5], [0.9]], [1.0, 2.0, math.nan])
    three[2].tell([[0.1], [0.5], [0.9]], [1.0, 2.0, 7.0], failed=[False, False, True])
    assert len({float(one.ask()[0]) for one in three}) == 1


# --- files ---


@pytest.mark.parametrize("outcome", ["binary", "real"])
def test_a_saved_experiment_goes_on_as_it_would_have(tmp_path, outcome):
    functions = [lambda point: point["dose"] <= 9.0]
    constraints = [({"dose": 1.0, "shots": 1.0}, 12.0), *functions]
    stop = 0.01 if outcome == "binary" else None
    made = viper.Experiment(
        MIXED, "maximise", outcome=outcome, constraints=constraints, initial=4, stop=stop, random_state=7
    )
    for k in range(7):
        x = made.ask()
        made.tell(x, k % 2 if outcome == "binary" else None if k == 2 else x["dose"])
    made.ask(2)
    made.save(tmp_path / "run.viper")
    loaded = viper.load(tmp_path / "run.viper", constraints=functions)
    assert loaded.inputs.constraints[0] == Linear((1.0, 0.0, 1.0, 0.0), 12.0)
    pd.testing.assert_frame_equal(made.pending, loaded.pending)
    for _ in range(2):
        points = [one.ask(2) for one in (made, loaded)]
        pd.testing.assert_frame_equal(*points)
        for one, table in zip((made, loaded), points, strict=True):
            one.tell(table.iloc[1], 1)
    assert made.best() == loaded.best()
    assert made.stop == loaded.stop


def test_the_seed_determines_the_questions():
    same, other = ([played(viper.Experiment([(0.0, 1.0)], random_state=seed), lambda x: x[0], 6) for _ in range(2)]
                   for seed in (1, 2))  # fmt: skip
    np.testing.assert_array_equal(same[0].answers[0], same[1].answers[0])
    assert not np.array_equal(same[0].answers[0], other[0].answers[0])


def test_a_file_with_a_function_needs_it_again(tmp_path):
    made = viper.Experiment([(0.0, 1.0)], constraints=[lambda x: x[0] < 0.9])
    made.save(tmp_path / "run.viper")
    with pytest.raises(TypeError, match="constraints must have as many functions as this experiment, 1; got 0"):
        viper.load(tmp_path / "run.viper")
    with pytest.raises(TypeError, match="is loaded with constraints or nothing; got 'kernel'"):
        viper.load(tmp_path / "run.viper", kernel=1)


def test_files_with_a_threshold_that_nothing_used_still_load(tmp_path):
    from viper.data.model_file import write_tensors
    from viper.decisions.experiment_file import EXPERIMENT, pack_experiment

    state = pack_experiment(viper.Experiment([(0.0, 1.0)], "learn"))
    state.metadata["options"].update(threshold=0.75)
    write_tensors(tmp_path / "run.viper", EXPERIMENT, *state)
    assert viper.load(tmp_path / "run.viper").goal == "learn"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, t: m["inputs"][0].update(low=2.0), "bounds must have the lower first"),
        (lambda m, t: m["inputs"][1].update(values=["a", "a"]), "choices must be two or more, all different"),
        (lambda m, t: m["names"].pop(), "each with a name of its own"),
        (lambda m, t: m["options"].update(goal="win"), "goal must be one of"),
        (lambda m, t: m.update(asked=-1), "asked must be a whole number"),
        (lambda m, t: t["x"].fill_(7.0), "points must lie within the bounds of x"),
        (lambda m, t: t["y"].fill_(0.5), "answers must be one of"),
        (lambda m, t: t.update(pending=torch.zeros(1, 3).double()), "pending must have shape"),
        (lambda m, t: m["constraints"][0].update(weights=[1.0]), "a constraint must have 2 weights; got 1"),
    ],
)
def test_a_changed_file_is_refused(tmp_path, change, message):
    from viper.data.model_file import write_tensors
    from viper.decisions.experiment_file import EXPERIMENT, pack_experiment

    made = viper.Experiment({"x": (0.0, 1.0), "kind": ["a", "b"]}, constraints=[({"x": 1.0}, 0.9)])
    made.tell([{"x": 0.2, "kind": "a"}], 1)
    state = pack_experiment(made)
    change(state.metadata, state.tensors)
    write_tensors(tmp_path / "run.viper", EXPERIMENT, *state)
    with pytest.raises(StorageError, match=message):
        viper.load(tmp_path / "run.viper")


# --- bad input ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bounds": {}}, "bounds must have at least one input; got none"),
        ({"bounds": 3}, "bounds and constraints must be lists or dictionaries; got 3"),
        ({"bounds": {"x": 3}}, r"bounds of x must be \(low, high\) or a list of choices; got 3"),
        ({"bounds": [(1.0, 0.0)]}, r"bounds of x0 must be finite, the lower first; got \(1, 0\)"),
        ({"bounds": [(0.0, 1.0, "log")]}, "bounds of x0 must be positive for a log scale"),
        ({"bounds": [(0.5, 3, "integer")]}, "bounds of x0 must be whole numbers"),
        ({"bounds": [(0.0, 1.0, "even")]}, "bounds of x0 may end with .*; got 'even'"),
        ({"bounds": {"x": ["a"]}}, "choices of x must be two or more, all different"),
        ({"bounds": {"x": [None, "a"]}}, "choices of x must be texts or finite numbers"),
        ({"bounds": [["a", "b"]]}, "bounds with choices must name them; got a list"),
        ({"goal": "win"}, "goal must be one of"),
        ({"goal": "minimise"}, "goal='minimise' needs outcome='real'; got 'binary'"),
        ({"outcome": "real"}, "outcome='real' needs goal='maximise' or 'minimise'; got 'threshold'"),
        ({"outcome": "count"}, "outcome must be one of"),
        ({"goal": "maximise", "threshold": 0.75}, "for goal='threshold'; got 0.75 with goal='maximise'. Leave it out"),
        ({"goal": "prefer", "threshold": 0.5}, "threshold is for goal='threshold'; got 0.5 with goal='prefer'"),
        ({"threshold": 1.0}, "threshold must lie strictly between 0 and 1"),
        ({"initial": 0}, "initial must be a whole number from 1 on; got 0"),
        ({"stop": -1.0}, "stop must be a positive number; got -1.0"),
        ({"acquisition": "ucb"}, "acquisition must be one of .*; got 'ucb'"),
        ({"acquisition": ["straddle"]}, r"acquisition must be one of .*; got \['straddle'\]"),
        (
            {"goal": "maximise", "outcome": "real", "acquisition": "ucb"},
            r"one of \['auto', 'improvement'\] for outcome='real'; got 'ucb'",
        ),
        ({"random_state": "a"}, "random_state must be a whole number from 0 on; got 'a'"),
        ({"constraints": [3]}, "a constraint must be a function of a point, or a pair"),
        ({"constraints": [([1.0], 2.0)]}, "a constraint must have 2 finite weights"),
        ({"constraints": [({"x9": 1.0}, 2.0)]}, "a constraint must name inputs; got 'x9'. Choose one of"),
        ({"constraints": [([1.0, "a"], 2.0)]}, "a constraint's weights must be numbers"),
        ({"constraints": [([1.0, 0.0], math.nan)]}, r"and a finite bound; got \(\[1.0, 0.0\], nan\)"),
        ({"bounds": {1: (0.0, 1.0)}}, "names of inputs must be texts; got 1. Write '1'."),
        ({"bounds": {"x": ["a", math.nan]}}, "choices of x must be texts or finite numbers"),
        ({"bounds": [(-1e308, 1e308)]}, "bounds of x0 must be finite"),
        ({"goal": "maximise", "outcome": "real", "stop": 0.1}, "stop is for yes/no answers and preferences; got 0.1"),
    ],
)
def test_bad_options_get_one_clear_error(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        viper.Experiment(**{"bounds": [(0.0, 1.0)] * 2, **given})


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda e: e.ask(0), "n must be a whole number from 1 on; got 0"),
        (lambda e: e.tell({"x": 0.5}, 1), "a point must have a value for every input; got none for 'kind'"),
        (
            lambda e: e.tell({"x": 0.5, "kind": "a", "y": 1}, 1),
            "a point must have no other values than inputs; got 'y'",
        ),
        (lambda e: e.tell({"x": 2.0, "kind": "a"}, 1), r"x must lie in \[0, 1\]; got 2.0"),
        (lambda e: e.tell({"x": "a", "kind": "a"}, 1), "x must be a number; got 'a'"),
        (lambda e: e.tell({"x": math.nan, "kind": "a"}, 1), r"x must lie in \[0, 1\]; got nan"),
        (lambda e: e.tell({"x": 0.5, "kind": "d"}, 1), "kind must be one of .*; got 'd'"),
        (lambda e: e.tell([[0.5]], 1), "a point must have 2 inputs"),
        (lambda e: e.tell("here", 1), "points must be a table, an array or dictionaries; got str"),
        (lambda e: e.tell({"x": 0.5, "kind": "a"}, 0.3), "an answer must be 0 or 1; got 0.3"),
        (lambda e: e.tell({"x": 0.5, "kind": "a"}, [1, 0]), "an answer for every point, 1; got 2"),
        (lambda e: e.tell({"x": 0.5, "kind": "a"}, 1, failed=True), "failed is for outcome='real'; got True"),
        (lambda e: e.cancel({"x": 0.5, "kind": "a"}), "x must be a point that awaits its answer"),
        (lambda e: e.estimate({"x": 0.5, "kind": "a"}), "the experiment needs answers first; got none"),
        (lambda e: e.best(), r"best\(\) is for goals that seek a point; got goal='threshold'. Use estimate"),
    ],
)
def test_bad_points_and_answers_get_one_clear_error(act, message):
    with pytest.raises((ValueError, TypeError), match=message):
        act(viper.Experiment({"x": (0.0, 1.0), "kind": ["a", "b"]}))


def test_measurements_are_checked():
    experiment = viper.Experiment([(0.0, 1.0)], "maximise", outcome="real", initial=1)
    with pytest.raises(ValueError, match="a measurement must be a finite number, or None if the run failed; got True"):
        experiment.tell([0.5], True)
    with pytest.raises(ValueError, match="failed must have a value for every answer, 1; got 2"):
        experiment.tell([0.5], 1.0, failed=[True, False])
    with pytest.raises(TypeError, match="failed must be True or False; got 'no'"):
        experiment.tell([0.5], 1.0, failed="no")
    with pytest.raises(ValueError, match=r"a measurement must lie within ±1e\+150; got 1e\+200. Use a larger unit"):
        experiment.tell([0.5], 1e200)
    with pytest.raises(ValueError, match="is about yes/no answers; got outcome='real'"):
        experiment.information()
    experiment.tell([0.5], None)
    with pytest.raises(ValueError, match="needs a run that did not fail; got none"):
        experiment.best()
    assert 0.0 <= experiment.ask()[0] <= 1.0


@pytest.mark.parametrize("unit", [1.0, 1e-300])
def test_intervals_follow_the_unit_of_measurements(unit):
    """Where all measurements are equal, or too small to be squared, too."""
    experiment = viper.Experiment([(0.0, 1.0)], "maximise", outcome="real", initial=1)
    found = experiment.tell([[0.1], [0.5], [0.9]], [3.0 * unit] * 3).estimate([[0.3]])
    assert 0.0 < float((found.upper - found.lower)[0]) < unit
    assert found.mean[0] == pytest.approx(3.0 * unit)


def test_many_questions_before_any_answer_are_spread():
    experiment = viper.Experiment([(0.0, 1.0)], initial=2)
    points = experiment.ask(6)
    assert len(np.unique(points)) == len(experiment.pending) == 6
    assert np.array_equal(points, np.vstack([viper.Experiment([(0.0, 1.0)], initial=6).ask(6)]))


def test_answers_may_be_numpy_scalars_and_tensors():
    experiment = viper.Experiment([(0.0, 1.0)])
    experiment.tell([0.5], np.array(1)).tell([0.4], torch.tensor(0)).tell([[0.1], [0.2]], torch.tensor([True, False]))
    assert experiment.answers[1].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_preferences_are_about_two_different_points():
    experiment = viper.Experiment({"x": (0.0, 1.0)}, "prefer")
    assert repr(experiment).startswith("Experiment(['x'], goal='prefer')")
    with pytest.raises(ValueError, match=r"the points of a pair must differ; got {'x': 0\.5} twice"):
        experiment.tell(({"x": 0.5}, {"x": 0.5}), "first")
    with pytest.raises(TypeError, match="must be about a pair of points, as `ask` returns it; got one"):
        experiment.tell({"x": 0.5}, "first")
    with pytest.raises(ValueError, match="failed is for outcome='real'; got 'second' with goal='prefer'"):
        experiment.tell(({"x": 0.5}, {"x": 0.2}), "first", "second")


def test_ties_alone_are_learned_without_a_warning():
    experiment = viper.Experiment({"x": (0.0, 1.0)}, "prefer", initial=2)
    experiment.tell([({"x": 0.1}, {"x": 0.6})] * 3, ["tie"] * 3)
    assert experiment.model.predict_proba([[-1.0]], [[1.0]])[0, 1] > 0.5


def test_constraints_must_leave_points():
    experiment = viper.Experiment([(0.0, 1.0)], constraints=[lambda x: False])
    with pytest.raises(ValueError, match="constraints must leave points to ask for; got none among 131,072"):
        experiment.ask()
