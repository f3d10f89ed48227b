"""Gaussian processes of more than two classes: identities of the profile, the mixture and the estimator."""

import math

import numpy as np
import pytest
import torch
from sklearn.base import clone

import viper
from viper.gp.classes.mixture import matched_moments
from viper.gp.classes.profile import ClassProfile
from viper.gp.classes.rows import ClassFeatures, merged_by_class
from viper.gp.kernels import make_kernel, make_mean
from viper.gp.model import Features, Observations, SparseGP
from viper.gp.profile import identity_prior
from viper.inference.classes.problem import ClassProblem
from viper.inference.classes.solver import fit_star
from viper.inference.classes.sums import EXACT_CLASSES
from viper.inference.newton import newton
from viper.inference.problem import Problem
from viper.softplus.bounds import build_bound

QUICK = {"n_starts": 1, "lengthscales": "one", "hyperparameters": "mode", "random_state": 0, "max_iter": 8}
pytestmark = pytest.mark.filterwarnings("ignore::viper.errors.ConvergenceWarning")


def sectors(n=60, seed=0, classes=3):
    """Points in the plane with classes by angle, which no linear function separates."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    angle = (np.arctan2(X[:, 1], X[:, 0]) + rng.normal(0, 0.2, n)) % (2 * math.pi)
    return X, np.floor(2 * classes * angle / (2 * math.pi)).astype(int) % classes


def process(points=12, columns=2, mean="linear"):
    """A kernel with parameters away from their defaults, and inducing points."""
    kernel, mean = make_kernel("rbf", columns, priors="default"), make_mean(mean, columns, priors="default")
    kernel.initialize(outputscale=2.0)
    kernel.base_kernel.initialize(lengthscale=torch.tensor([[0.8, 1.4]], dtype=torch.float64))
    inducing = torch.from_numpy(np.random.default_rng(1).normal(size=(points, columns)))
    return SparseGP(kernel, mean, inducing, True, 1e-8)


def observations(n=60, classes=3, **more):
    X, y = sectors(n, classes=classes)
    return Observations(torch.from_numpy(X), torch.from_numpy(y.astype(float)), **more)


@pytest.fixture(scope="module")
def fitted():
    X, y = sectors(80)
    names = np.array(["ash", "birch", "cedar"])
    return X, names[y], viper.VariationalGPClassifier(random_state=0, n_starts=2).fit(X, names[y])


# --- the profile ---


@pytest.mark.parametrize("diagonal", [False, True])
def test_the_gradient_of_the_profile(diagonal):
    model = process()
    profile = ClassProfile(model, observations(), 3, diagonal, tol=1e-8)
    x = model.free_vector()
    _, gradient = profile(x)
    direction = np.random.default_rng(2).normal(size=len(x)) / math.sqrt(len(x))
    step = 1e-2
    rise = (profile(x + step * direction)[0] - profile(x - step * direction)[0]) / (2 * step)
    assert gradient @ direction == pytest.approx(rise, rel=1e-2)  # the integrals of the search are rough


def test_two_classes_are_the_binary_process_with_twice_the_variance():
    X, y = sectors(50, classes=2)
    rows = Observations(torch.from_numpy(X), torch.from_numpy(y.astype(float)))
    one, two = process(mean="zero"), process(mean="zero")
    two.kernel.initialize(outputscale=2.0 * one.kernel.outputscale.detach())
    with torch.no_grad():
        ours, binary = ClassFeatures(one, rows), Features(two, rows)
    star = fit_star(ClassProblem(ours, 2, identity_prior(ours)))
    exact = build_bound("viper", None, 1, 1, 0, None)
    result = newton(Problem(binary, identity_prior(binary), exact), None, tol=1e-12)
    assert star.objective == pytest.approx(result.objective, abs=1e-6)
    theta = next(ours.blocks()).design.project(star.q.mean.T.contiguous())
    f = next(binary.blocks()).design.project(result.q.mean)
    torch.testing.assert_close(theta[:, 1] - theta[:, 0], f, atol=1e-3, rtol=1e-3)


def test_sites_give_the_star_they_come_from():
    profile = ClassProfile(process(), observations(), 3, tol=1e-9)
    profile(profile.model.free_vector())
    with torch.no_grad():
        problem = profile.problem(profile.features())
    star = profile.class_sites.star(problem)
    torch.testing.assert_close(star.mean, profile.q.mean, atol=1e-3, rtol=1e-3)
    assert problem.evaluate(star, EXACT_CLASSES).objective == pytest.approx(
        problem.evaluate(profile.q, EXACT_CLASSES).objective, abs=1e-2
    )


def test_equal_rows_of_a_class_are_merged():
    rows = observations(20, weight=torch.full((20,), 2.0, dtype=torch.float64))
    twice = Observations(torch.cat([rows.inputs] * 2), torch.cat([rows.label] * 2))
    one, other = merged_by_class(rows), merged_by_class(twice)
    for name in ("inputs", "label", "weight"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))
    apart = Observations(rows.inputs[:1].expand(2, 2), torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert len(merged_by_class(apart)) == 2  # one point, two classes


def test_the_average_has_the_probabilities_of_the_mixture():
    generator = torch.Generator().manual_seed(0)
    thetas = 3.0 * torch.randn(4, 30, 5, generator=generator, dtype=torch.float64)
    variances = 9.0 * torch.rand(4, 30, 5, generator=generator, dtype=torch.float64)
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    theta, tau2 = matched_moments(weights, thetas, variances)
    each = EXACT_CLASSES(thetas.reshape(-1, 5), variances.reshape(-1, 5))[1].reshape(4, 30, 5)
    mixture = torch.einsum("c,cnk->nk", weights, each)
    torch.testing.assert_close(EXACT_CLASSES(theta, tau2)[1], mixture, atol=1e-8, rtol=0.0)


# --- the estimator ---


def test_it_learns_what_no_line_can(fitted):
    _, _, model = fitted
    X, y = sectors(300, seed=5)
    y = model.classes_[y]
    linear = viper.VariationalLogisticRegression().fit(*fitted[:2])
    assert model.score(X, y) > max(0.75, linear.score(X, y) + 0.2)
    probability = model.predict_proba(X)
    assert probability.shape == (300, 3)
    np.testing.assert_allclose(probability.sum(1), 1.0, atol=1e-9)
    assert (model.predict(X) == model.classes_[probability.argmax(1)]).all()


def test_shapes_and_order_of_predictions(fitted):
    X, _, model = fitted
    interval, sd, p = model.predict_interval(X), model.predict_std(X), model.predict_proba(X)
    assert interval.shape == (80, 3, 2)
    assert ((interval[..., 0] < interval[..., 1]) & (interval >= 0.0).all(-1) & (interval <= 1.0).all(-1)).all()
    assert (sd**2 <= p * (1.0 - p) + 1e-12).all()
    assert (model.decision_function(X).argmax(1) == p.argmax(1)).all()
    wide, narrow = (np.diff(model.predict_interval(X, level=level)).ravel() for level in (0.99, 0.5))
    assert (wide > narrow).all()
    far = model.predict_proba([[50.0, 50.0]])  # the mean function is uncertain there
    assert far.max() < 0.99


def test_predictions_are_averaged_over_components(fitted):
    X, _, model = fitted
    assert len(model.components_) > 1
    assert sum(component.weight for component in model.components_) == pytest.approx(1.0)
    assert model.components_[0].posterior is model.posterior_
    single = []
    for component in model.components_:
        twin = clone(model)
        for name in ("classes_", "n_features_in_", "_scaler", "posterior_", "family_"):
            setattr(twin, name, getattr(model, name))
        twin.components_ = [component._replace(weight=1.0)]
        single.append(component.weight * twin.predict_proba(X))
    np.testing.assert_allclose(model.predict_proba(X), sum(single), atol=1e-8)


def test_the_elbo(fitted):
    X, y, model = fitted
    assert model.elbo(X, y) == pytest.approx(model.elbo_, abs=1e-6)
    assert model.elbo_bound_ <= model.elbo_ <= model.elbo_bound_ + 1e-3
    assert model.elbo_ > -80 * math.log(3)  # better than knowing nothing


def test_the_diagnosis_knows_the_evidence(fitted):
    X, y, model = fitted
    found = model.diagnose(draws=1000)
    assert found.k_hat < 0.9
    assert model.elbo_ - 0.1 < found.log_evidence < model.elbo_ + 3.0  # a lower bound, and close
    again = model.diagnose(X, y, draws=1000)
    assert again.log_evidence == pytest.approx(found.log_evidence, abs=1e-6)


def test_the_order_of_rows_and_the_names_of_classes_do_not_matter():
    X, y = sectors(45)
    model = viper.VariationalGPClassifier(**QUICK).fit(X, y)
    order = np.random.default_rng(0).permutation(45)
    shuffled = viper.VariationalGPClassifier(**QUICK).fit(X[order], y[order])
    np.testing.assert_allclose(shuffled.predict_proba(X), model.predict_proba(X), atol=1e-8)
    renamed = viper.VariationalGPClassifier(**QUICK).fit(X, (y + 1) % 3)
    np.testing.assert_allclose(renamed.predict_proba(X)[:, [1, 2, 0]], model.predict_proba(X), atol=1e-4)


def test_weights_count_rows_and_a_common_offset_changes_nothing():
    X, y = sectors(40)
    weight = np.where(np.arange(40) % 4 == 0, 2.0, 1.0)
    twice = np.concatenate([np.arange(40), np.arange(0, 40, 4)])
    repeated = viper.VariationalGPClassifier(**QUICK).fit(X[twice], y[twice])
    shift = np.repeat(np.linspace(-1, 1, 40)[:, None], 3, 1)
    weighted = viper.VariationalGPClassifier(**QUICK).fit(X, y, sample_weight=weight)
    np.testing.assert_allclose(weighted.predict_proba(X), repeated.predict_proba(X), atol=1e-8)
    moved = viper.VariationalGPClassifier(**QUICK).fit(X, y, sample_weight=weight, offset=shift)
    np.testing.assert_allclose(moved.predict_proba(X, offset=shift), weighted.predict_proba(X), atol=1e-3)


def test_an_offset_counts_as_part_of_the_function():
    X, y = sectors(40)
    model = viper.VariationalGPClassifier(**QUICK).fit(X, y)
    favoured = np.zeros((40, 3))
    favoured[:, 1] = 3.0
    assert (model.predict_proba(X, offset=favoured)[:, 1] > model.predict_proba(X)[:, 1]).all()


def test_files_keep_everything(fitted, tmp_path):
    X, y, model = fitted
    model.save(tmp_path / "model.viper")
    loaded = viper.load(tmp_path / "model.viper")
    np.testing.assert_array_equal(loaded.predict_interval(X), model.predict_interval(X))
    assert list(loaded.classes_) == list(model.classes_)
    assert loaded.elbo(X, y) == pytest.approx(model.elbo_, abs=1e-6)
    assert loaded.summary().equals(model.summary())


def test_the_summary_has_weights_by_class(fitted):
    _, _, model = fitted
    table = model.summary()
    assert {"lengthscale", "relevance", "mean_weight (ash)", "mean_weight_sd (cedar)"} <= {*table.columns}
    weights = table[[f"mean_weight ({label})" for label in model.classes_]].to_numpy()
    np.testing.assert_allclose(weights.sum(1), 0.0, atol=1e-9)
    assert {*table.attrs["intercept"]} == {*model.classes_}


@pytest.mark.parametrize(
    "options", [{"covariance": "diagonal"}, {"mean": "zero", "kernel": "matern52"}, {"priors": None}]
)
def test_other_options(options):
    X, y = sectors(40)
    model = viper.VariationalGPClassifier(**{**QUICK, "n_inducing": 10, **options}).fit(X, y)
    assert np.isfinite(model.elbo_)
    np.testing.assert_allclose(model.predict_proba(X).sum(1), 1.0, atol=1e-9)


def test_a_warm_start_goes_on():
    X, y = sectors(40)
    model = viper.VariationalGPClassifier(**QUICK, warm_start=True).fit(X, y)
    first = model.objective_
    assert model.fit(X, y).objective_ >= first - 0.05


def test_rows_that_come_later(tmp_path):
    X, y = sectors(60)
    options = {**QUICK, "inducing": X[:20], "learn_inducing": False}
    model = viper.VariationalGPClassifier(**options).fit(X[:40], y[:40])
    model.save(tmp_path / "model.viper")
    problem = model.partial_fit(X[40:], y[40:])
    rows = Observations(torch.from_numpy(model._scaler.apply(X)), torch.from_numpy(y.astype(float)))
    with torch.no_grad():
        features = ClassFeatures(model.model_, rows)
    whole = fit_star(ClassProblem(features, 3, identity_prior(features)))
    assert problem.elbo_ == pytest.approx(whole.objective, abs=1e-6)  # of all rows together
    later = viper.load(tmp_path / "model.viper").partial_fit(X[40:], y[40:])  # with the star as prior
    assert np.abs(later.predict_proba(X) - model.predict_proba(X)).max() < 0.05
    # the evidence of new rows is conditional on the earlier ones, also after loading
    later.save(tmp_path / "later.viper")
    for one in (later, viper.load(tmp_path / "later.viper")):
        found = one.diagnose(X[40:], y[40:], draws=500)
        assert -3 * found.log_evidence_error < found.log_evidence - later.elbo_ < 1.0


@pytest.mark.filterwarnings("ignore::viper.errors.ImportanceWarning")
@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto")
def test_draws_of_the_exact_posterior_and_without_each_row(fitted):
    arviz_stats = pytest.importorskip("arviz_stats")
    X, _, model = fitted
    corrected = model.corrected(draws=1000)
    p = corrected.predict_proba(X)
    np.testing.assert_allclose(p.sum(1), 1.0, atol=1e-12)
    assert np.abs(p - model.predict_proba(X)).max() < 0.25  # only predict_proba averages over hyperparameters
    assert corrected.to_arviz(10, 2)["posterior"]["coefficient"].dims == ("chain", "draw", "class", "feature")
    found = model.loo(draws=500)
    assert found.rows == len(X)
    tree = model.to_arviz(draws=500, chains=1, random_state=0)
    lp, log_q = tree["sample_stats"]["lp"], tree["sample_stats"]["log_q"]
    other = arviz_stats.loo_approximate_posterior(tree, log_p=lp, log_q=log_q, pointwise=True)
    # expected log densities there, log of expected densities here: Jensen
    assert (found.pointwise >= other.elpd_i.values.ravel() - 1e-3).all()
    assert found.elpd_loo == pytest.approx(other.elpd, abs=5.0)


def test_methods_for_two_classes_refuse_more(fitted):
    X, _, model = fitted
    with pytest.raises(ValueError, match=r"latent_prior\(\) is for two classes; got a model of 3"):
        model.latent_prior()
    for name in ("average", "contrast", "slopes", "sample"):
        with pytest.raises(ValueError, match=rf"{name}\(\) is for two classes; got a model of 3"):
            getattr(model, name)(X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "natural-adam"}, "solver must be 'profile' for 3 classes; got 'natural-adam'"),
        ({"bound": "pg"}, "the expectation is exact for 3 classes; got 'pg'"),
        ({"terms": 5}, "the expectation is exact for 3 classes; got 'terms=5'"),
    ],
)
def test_options_for_two_classes_are_refused(options, message):
    X, y = sectors(30)
    with pytest.raises(ValueError, match=message):
        viper.VariationalGPClassifier(**options).fit(X, y)


def test_a_class_without_weight_and_several_labels_are_refused():
    X, y = sectors(30)
    with pytest.raises(ValueError, match="every class must have rows with a positive weight; got none of class 1"):
        viper.VariationalGPClassifier().fit(X, y, sample_weight=(y != 1).astype(float))
    with pytest.raises(ValueError, match="y must have one column; got 3"):
        viper.VariationalGPClassifier().fit(X, np.eye(3)[y])


def test_a_rough_kernel_gets_more_inducing_points():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200, 3))
    y = np.sin(1.5 * X).argmax(1)
    options = {"n_starts": 1, "lengthscales": "one", "hyperparameters": "mode", "mean": "constant"}
    few = viper.VariationalGPClassifier(**options).fit(X, y)
    every = viper.VariationalGPClassifier(**options, inducing=X, learn_inducing=False).fit(X, y)
    assert len(few.starts_) > 1  # the race has 64 points
    assert few.elbo_ == pytest.approx(every.elbo_, abs=1.0)  # half a nat may be lost, and kernels differ slightly
    np.testing.assert_allclose(few.predict_proba(X), every.predict_proba(X), atol=0.05)
