"""Predictions of a Gaussian process averaged over hyperparameters."""

import math
import pickle

import numpy as np
import pytest
import torch

import viper
from viper.data import model_file
from viper.errors import StorageError
from viper.gp.average import PAIRS, Averaged, points_to_average
from viper.gp.classifier import VariationalGPClassifier
from viper.gp.model import Features, Observations, SparseGP
from viper.gp.profile import Profile
from viper.gp.search import LARGEST_LOSS, LINE, Family, Found, Search, furthest_from_prior
from viper.inference.posterior import latent
from viper.softplus.limit import limit, mean_of_same_probability


@pytest.fixture(scope="module")
def data():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(90, 2)) * [1.0, 3.0]
    f = 2 * np.sin(2 * X[:, 0]) + X[:, 1] / 3
    return X, generator.random(90) < 1 / (1 + np.exp(-f))


@pytest.fixture(scope="module")
def fitted(data):
    return VariationalGPClassifier(n_starts=2, tol=0.05, random_state=0).fit(*data)


@pytest.fixture(scope="module")
def new():
    return np.random.default_rng(1).normal(size=(30, 2)) * [1.5, 4.0]


def moments(model, X):
    """ϑ and τ² of each component, and the weights."""
    rows = Observations(torch.from_numpy(model._scaler.apply(X)), torch.zeros(len(X)).double())
    parts = []
    for component in model.components_:
        with torch.no_grad():
            block = next(Features(component.model, rows).blocks())
            parts.append(torch.stack(latent(block, component.posterior)).numpy())
    return np.array(parts).transpose(1, 0, 2), np.array([component.weight for component in model.components_])


def test_several_kinds_of_kernels_are_weighted(fitted):
    assert len(fitted.components_) > PAIRS
    assert sum(component.weight for component in fitted.components_) == pytest.approx(1.0)
    weights = fitted.summary().attrs["families"]
    assert sum(weights.values()) == pytest.approx(1.0)
    assert set(weights) <= {"rbf, one lengthscale", "rbf, many lengthscales", "a line"}
    assert fitted.components_[0].model is fitted.model_
    assert fitted.family_ == fitted.components_[0].family
    assert fitted.summary().attrs["inducing_points"] == len(fitted.inducing_points_)


def test_the_average_has_variance_and_probabilities_of_the_mixture(fitted, new):
    (means, variances), weights = moments(fitted, new)
    variance = weights @ (variances + (means - weights @ means) ** 2)
    np.testing.assert_allclose(fitted.predict_latent(new)[1] ** 2, variance, rtol=1e-9)
    g = limit().moments(torch.from_numpy(means), torch.from_numpy(variances))[1].numpy()
    probability = fitted.predict_proba(new)[:, 1]
    np.testing.assert_allclose(probability, weights @ g, rtol=1e-9)
    np.testing.assert_allclose(1 - probability, weights @ (1 - g), rtol=1e-9)
    # against draws from the mixture itself
    generator = np.random.default_rng(2)
    chosen = generator.choice(len(weights), size=20_000, p=weights)
    draws = means[chosen] + np.sqrt(variances[chosen]) * generator.standard_normal((20_000, len(new)))
    probability = 1 / (1 + np.exp(-draws))
    assert np.abs(probability.mean(0) - fitted.predict_proba(new)[:, 1]).max() < 0.02
    lower, upper = fitted.predict_interval(new).T
    inside = ((lower <= probability) & (probability <= upper)).mean(0)
    assert inside.min() > 0.92
    assert inside.max() < 0.98


def test_a_mixture_of_equal_normals_is_that_normal():
    mean, variance = torch.tensor([[-30.0, -2.0, 0.0, 5.0], [4.0, 1e-4, 9.0, 100.0]], dtype=torch.float64)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    found = mean_of_same_probability(weights, mean.expand(3, 4), variance.expand(3, 4), variance)
    torch.testing.assert_close(found, mean, rtol=1e-9, atol=1e-12)


def test_a_row_that_is_sure_in_every_component_stays_sure():
    """f is about 3, 10 or 30; a normal around their mean, 14, with their variance, 12², would give 0.89."""
    weights, narrow = torch.full((3,), 1 / 3).double(), torch.full((3, 1), 1e-4).double()
    thetas, variance = torch.tensor([[3.0], [10.0], [30.0]]).double(), torch.tensor([144.0]).double()
    mean = mean_of_same_probability(weights, thetas, narrow, variance)
    expected = float(torch.sigmoid(thetas).mean())
    assert float(limit().moments(mean, variance)[1]) == pytest.approx(expected, rel=1e-5)


def test_joint_draws_and_averages_agree_with_predictions(fitted, new):
    mean, sd = fitted.predict_latent(new)
    draws = fitted.sample(new, 20_000, random_state=0)
    assert np.abs((draws.mean(0) - mean) / sd).max() < 5 / math.sqrt(20_000)
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.03)
    average = fitted.average(new, draws=2000)
    assert average["estimate"].iloc[0] == pytest.approx(fitted.predict_proba(new)[:, 1].mean(), abs=1e-9)
    assert average["sd"].iloc[0] == pytest.approx((1 / (1 + np.exp(-draws))).mean(1).std(), rel=0.1)


def test_one_component_is_the_plain_process(fitted, new):
    """Averaging over two equal components, or over none, changes nothing."""
    alone = VariationalGPClassifier(n_starts=2, tol=0.05, random_state=0, hyperparameters="mode")
    vars(alone).update({name: value for name, value in vars(fitted).items() if name.endswith("_")})
    alone._scaler = fitted._scaler
    main = fitted.components_[0]
    alone.components_ = [main._replace(weight=1.0)]
    expected = alone.predict_latent(new)
    alone.components_ = [main._replace(weight=0.5)] * 2
    np.testing.assert_allclose(alone.predict_latent(new), expected, rtol=1e-10)
    rows = Observations(torch.from_numpy(alone._scaler.apply(new)), torch.zeros(30).double())
    averaged = Averaged([main._replace(weight=1.0)])
    with torch.no_grad():
        found = latent(averaged.block_of(rows), averaged.posterior)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-10)
    np.testing.assert_allclose(found[1].sqrt(), expected[1], rtol=1e-10)


def test_mode_alone(data, new):
    model = VariationalGPClassifier(n_starts=2, tol=0.05, hyperparameters="mode", lengthscales="one").fit(*data)
    assert len(model.components_) == 1
    assert model.predict_latent(new)[1].min() > 0


def test_elbo_is_that_of_the_mode(fitted, data):
    assert fitted.elbo(*data) == pytest.approx(fitted.elbo_, rel=1e-9)


def test_rows_in_blocks_are_predicted_as_in_memory(fitted, new):
    blocks = viper.Blocks(lambda: [(new[:10],), (new[10:],)])
    np.testing.assert_allclose(fitted.predict_proba(blocks), fitted.predict_proba(new), rtol=1e-9)


def test_points_have_the_moments_of_the_gaussian_at_the_mode(fitted):
    model = fitted.model_
    size = len(model.copy_at().free_vector())
    spread = np.random.default_rng(0).normal(size=(size, size))
    found = Found(model, [], 1, True, family=Family("rbf", False), spread=spread)
    x = model.copy_at().free_vector()
    total = np.zeros((size, size))
    for seed in range(100 if size > PAIRS else 1):
        points = points_to_average([found], np.random.default_rng(seed))
        steps = np.array([point.model.free_vector() - x for point in points])
        weights = np.exp([point.log_weight for point in points])
        assert weights.sum() == pytest.approx(1.0)
        assert np.abs(weights @ steps).max() < 1e-12
        total += steps.T @ (weights[:, None] * steps)
    expected = spread @ spread.T
    assert np.abs(total / (100 if size > PAIRS else 1) - expected).max() < 0.2 * np.abs(expected).max()


def test_the_spread_is_the_curvature_of_the_profile(data):
    """Second differences of the profile with its log prior, at the mode."""
    X, y = data
    model = VariationalGPClassifier(lengthscales="one", n_inducing=90, n_starts=1, tol=1e-6, jitter=1e-6).fit(X, y)
    rows = Observations(torch.from_numpy(model._scaler.apply(X)), torch.from_numpy(y * 1.0))
    profile = Profile(model.model_.copy_at(), rows, limit(), tol=1e-12)
    x = profile.model.free_vector()
    steps = 0.05 * np.eye(len(x))
    curvature = [
        [(profile(x + a + b)[0] - profile(x + a - b)[0] - profile(x - a + b)[0] + profile(x - a - b)[0]) for b in steps]
        for a in steps
    ]
    covariance = np.linalg.inv(-np.array(curvature) / (4 * 0.05**2))
    points = np.array([component.model.free_vector() - x for component in model.components_[1:]])
    found = points.T @ points / len(model.components_)  # k pairs of equal weight
    np.testing.assert_allclose(np.sqrt(np.diag(found)), np.sqrt(np.diag(covariance)), rtol=0.2)


def test_the_largest_sd_of_a_training_row_is_known_without_the_rows(fitted, data):
    sd = fitted.predict_latent(data[0])[1].max()
    copied = pickle.loads(pickle.dumps(fitted))
    assert copied._raw_rows is None
    assert copied.largest_sd_ == pytest.approx(sd, rel=1e-12)


def test_saved_and_loaded(fitted, new, tmp_path):
    fitted.save(tmp_path / "m")
    again = viper.load(tmp_path / "m")
    np.testing.assert_array_equal(again.predict_proba(new), fitted.predict_proba(new))
    np.testing.assert_array_equal(again.predict_interval(new), fitted.predict_interval(new))
    assert again.family_ == fitted.family_
    assert [c.weight for c in again.components_] == [c.weight for c in fitted.components_]
    assert again.summary().attrs["families"] == fitted.summary().attrs["families"]
    assert again.inducing_cost_ == fitted.inducing_cost_


def test_kernels_by_evidence(data, new, tmp_path):
    """Each shape is fitted as if alone, the one with the best evidence comes first, and files remember it."""
    options = {"lengthscales": "one", "n_starts": 1, "random_state": 0}
    model = VariationalGPClassifier("auto", **options).fit(*data)
    assert {family.split(",")[0] for family in model.summary().attrs["families"]} == {"rbf", "matern32", "matern52"}
    alone = VariationalGPClassifier(model.family_.shape, **options).fit(*data)
    assert model.elbo_ == alone.elbo_
    model.save(tmp_path / "m")
    again = viper.load(tmp_path / "m")
    assert again.family_ == model.family_
    np.testing.assert_array_equal(again.predict_proba(new), model.predict_proba(new))
    with pytest.raises(ValueError, match="kernel='auto' needs priors"):
        VariationalGPClassifier("auto", priors=None).fit(*data)


def test_summary_says_what_inducing_points_cost(fitted, data):
    cost = fitted.summary().attrs["inducing_cost"]
    assert 0.0 < cost < 0.7  # half a nat, up to the approximation that placed them
    assert cost == pytest.approx(fitted.diagnose().residual_cost)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, m: m["components"].pop(), "the file must have"),
        (lambda t, m: m["components"][1].__setitem__(0, -1.0), r"components\[1\] must be a weight"),
        (lambda t, m: m["components"][1].__setitem__(1, "x"), "kernel must be one of"),
        (lambda t, m: t.pop("component.1.posterior.mean"), "posterior"),
        (lambda t, m: t.pop("component.2.model.inducing"), "inducing points of every component"),
        (lambda t, m: t["component.1.posterior.mean"].fill_(math.nan), "finite"),
        (lambda t, m: t.update({"component.1.posterior.mean": torch.zeros(1).double()}), "shape|entries"),
    ],
)
def test_forged_components_are_refused(fitted, tmp_path, change, words):
    fitted.save(tmp_path / "m")
    kind, tensors, metadata = model_file.read_tensors(tmp_path / "m")
    tensors = {name: x.clone() for name, x in tensors.items()}
    change(tensors, metadata)
    model_file.write_tensors(tmp_path / "forged", kind, tensors, metadata, True)
    with pytest.raises(StorageError, match=words):
        viper.load(tmp_path / "forged")


# ---------------------------------------------------------------------------------------------------------------------
# A line


@pytest.fixture(scope="module")
def straight():
    generator = np.random.default_rng(3)
    X = generator.normal(size=(150, 2))
    return X, generator.random(150) < 1 / (1 + np.exp(-(0.3 + 1.5 * X[:, 0])))


@pytest.fixture(scope="module")
def line(straight):
    return VariationalGPClassifier(n_starts=2, lengthscales="one", random_state=0).fit(*straight)


def line_components(model):
    return [component for component in model.components_ if component.family == LINE]


def test_a_line_counts_where_the_truth_is_one(line):
    assert line.summary().attrs["families"]["a line"] > 0.2
    assert line.family_ == Family("rbf", False)  # summary describes a model with a kernel
    assert not any("line" in start.start.split(":")[0] for start in line.starts_)
    for component in line_components(line):
        assert len(component.model.inducing) == 0
        assert component.model.dimension == 3


def test_a_line_is_logistic_regression(line, straight, new):
    """The posterior of the weights of [s x, 5] under N(0, I) is the one that the other solver finds."""
    component, *_ = line_components(line)
    X, y = straight
    slope = float(component.model.mean.slope.detach())
    columns = lambda x: np.column_stack([slope * line._scaler.apply(x), np.full(len(x), 5.0)])  # noqa: E731
    options = {"fit_intercept": False, "prior_scale": 1.0}
    twin = viper.VariationalLogisticRegression(**options).fit(columns(X), y)
    q = component.posterior
    np.testing.assert_allclose(twin.posterior_.mean, q.mean, atol=5e-3)
    np.testing.assert_allclose(twin.posterior_.covariance(), q.covariance(), atol=5e-3)


def test_a_line_is_left_out_where_it_has_no_part(straight):
    X, y = straight
    for options in ({"mean": "constant"}, {"hyperparameters": "mode"}):
        model = VariationalGPClassifier(n_starts=1, lengthscales="one", tol=0.1, **options).fit(X[:40], y[:40])
        assert not line_components(model)


def test_a_line_is_saved_and_updated(line, straight, new, tmp_path):
    line.save(tmp_path / "line.safetensors")
    loaded = viper.load(tmp_path / "line.safetensors")
    np.testing.assert_array_equal(loaded.predict_proba(new), line.predict_proba(new))
    draws = loaded.sample(new, 4000, random_state=0)
    mean, sd = loaded.predict_latent(new)
    assert np.abs((draws.mean(0) - mean) / sd).max() < 5 / math.sqrt(4000)
    X, y = straight
    loaded.partial_fit(X[:20], y[:20])
    assert len(line_components(loaded)) == len(line_components(line))
    assert np.isfinite(loaded.predict_proba(new)).all()


def test_lengthscales_that_share_a_difference_have_their_own_curvature(data, monkeypatch):
    """Exact for a parabola in which the parameters that share a difference are independent of each other."""
    monkeypatch.setattr("viper.gp.search.MOST_DIFFERENCES", 4)
    wide = VariationalGPClassifier(lengthscales="many", priors="default")
    wide.n_features_in_, wide.classes_ = 6, np.arange(2)
    model = SparseGP(*wide._choices.kernel_and_mean(Family("rbf", True)), torch.zeros(3, 6).double(), False, 1e-8)
    lengths = torch.tensor([[0.1, 3.3, 3.2, 40.0, 3.4, 3.3]]).double()
    model.kernel.base_kernel.initialize(lengthscale=lengths)  # only the first and fourth are far from their prior
    own = furthest_from_prior(model)
    names = [name for name, x in model.named_parameters() if x.requires_grad for _ in range(x.numel())]
    assert [name for name, mine in zip(names, own, strict=True) if not mine] == [names[2]] * 4
    generator = np.random.default_rng(0)
    half = generator.normal(size=(8, 8))
    H = half @ half.T + 4 * np.eye(8)
    both = ~own[:, None] & ~own
    H[both & ~np.eye(8, dtype=bool)] = 0.0
    H += 20 * np.eye(8)
    middle = model.free_vector()
    parabola = lambda x: (-0.5 * (x - middle) @ H @ (x - middle), -H @ (x - middle))  # noqa: E731
    monkeypatch.setattr(Search, "profile_on", lambda *_: parabola)
    rows = Observations(torch.zeros(5, 6).double(), torch.zeros(5).double())
    search = Search(rows, limit(), False, 1, 1e-2, generator)
    S = search.spread(model, rows)
    np.testing.assert_allclose(S @ S.T, np.linalg.inv(H), rtol=1e-8, atol=1e-10)


def test_a_copy_shares_what_does_not_change(fitted):
    model = fitted.model_
    other = model.copy()
    for (name, mine), copied in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, copied), name
        assert mine.data_ptr() != copied.data_ptr(), name
    other.set_free(other.free_vector() + 1.0)
    base = model.kernel.base_kernel
    assert not torch.equal(base.lengthscale, other.kernel.base_kernel.lengthscale)
    assert other.kernel.base_kernel.raw_lengthscale_constraint is base.raw_lengthscale_constraint
    with torch.no_grad():
        assert float(other.log_prior()) != float(model.log_prior())


def test_many_lengthscales_start_from_one_instead_of_as_given(fitted):
    starts = {start.start for start in fitted.starts_}
    assert "rbf, many lengthscales: as with one lengthscale" in starts
    assert "rbf, many lengthscales: as given" not in starts
    assert "rbf, one lengthscale: as given" in starts


def search_of(data, fitted):
    """A search on the rows of a fit."""
    rows = Observations(torch.from_numpy(fitted._scaler.apply(data[0])), torch.from_numpy(data[1] * 1.0))
    return Search(rows, limit(), False, 10, 1e-2, np.random.default_rng(0), marginal=True)


def test_points_of_the_average_are_left_out_where_a_rougher_kernel_does_not_need_them(data, fitted):
    """The profiles with all rows as points and with those that remain differ by less than points may cost."""
    search = search_of(data, fitted)
    model = fitted.model_.copy_at().with_points(search.rows.inputs)
    profile = search.profile_on(model, search.rows, 1e-6)
    whole, _ = profile(model.free_vector())
    found = Found(model, [], 1, True, sites=profile.last_sites(), family=fitted.family_)
    thin = search.thinned(found)
    assert 5 < len(thin.model.inducing) < len(data[0])
    left, _ = search.profile_on(thin.model, search.rows, 1e-6)(thin.model.free_vector())
    assert abs(left - whole) < LARGEST_LOSS
    again = search.thinned(thin)
    assert len(again.model.inducing) == len(thin.model.inducing)


def test_a_model_without_points_has_none_to_leave_out(data, fitted):
    search = search_of(data, fitted)
    model = fitted.model_.copy_at().with_points(search.rows.inputs[:0])
    found = Found(model, [], 1, True, family=LINE)
    assert search.thinned(found) is found
