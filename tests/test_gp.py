"""The Gaussian-process classifier: identities with logistic regression, gradients, invariances, bad input."""

import itertools
import math
import warnings

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.utils.estimator_checks import parametrize_with_checks
from tolerances import TOLERANCE

import viper
from viper.errors import ConvergenceWarning, JitterWarning, NotPositiveDefinite, StorageError
from viper.gp.classifier import VariationalGPClassifier
from viper.gp.kernels import KERNELS, LEVEL_SCALE, SLOPE_SPREAD, covariance, make_kernel, make_mean, variances
from viper.gp.lbfgs import Climb
from viper.gp.model import Features, Observations, SparseGP, cholesky_with_jitter
from viper.gp.profile import Profile, identity_prior
from viper.gp.search import Attempt, Family, Search, distinct_attempts
from viper.gp.starts import Candidate
from viper.inference.newton import newton
from viper.inference.problem import Problem
from viper.softplus.limit import limit

rbf = gpytorch.kernels.RBFKernel


def wavy(n=120, p=2, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(n, p)) * np.linspace(1, 3, p)
    f = 3 * np.sin(2 * X[:, 0]) + X[:, -1] / 3
    return X, np.where(generator.random(n) < 1 / (1 + np.exp(-f)), "yes", "no")


@pytest.fixture(scope="module")
def data():
    return wavy()


@pytest.fixture(scope="module")
def fitted(data):
    return VariationalGPClassifier(n_inducing=20, random_state=0, n_starts=3).fit(*data)


def fixed(kernel):
    return kernel.requires_grad_(False)


def only_posterior(**options):
    """Nothing to learn but q."""
    return VariationalGPClassifier(standardize=False, mean="zero", learn_inducing=False, n_starts=1, **options)


# --- equivalences ---


def test_linear_kernel_with_p_inducing_points_is_logistic_regression():
    generator = np.random.default_rng(1)
    X = generator.normal(size=(200, 4))
    y = X @ [1, -1, 0.5, 0] + generator.logistic(size=200) > 0
    kernel = fixed(gpytorch.kernels.LinearKernel().initialize(variance=4.0))
    gp = only_posterior(kernel=kernel, inducing=generator.normal(size=(4, 4)), jitter=0.0).fit(X, y)
    linear = viper.VariationalLogisticRegression(prior_scale=2.0, fit_intercept=False, tol=1e-12).fit(X, y)
    assert gp.elbo_ == pytest.approx(linear.elbo_, rel=TOLERANCE["converged"])
    np.testing.assert_allclose(gp.predict_proba(X), linear.predict_proba(X), rtol=1e-6)  # to the solver's tolerance
    np.testing.assert_allclose(gp.predict_latent(X)[1], linear.predict_latent(X)[1], rtol=1e-6)


def test_inducing_points_at_the_data_are_the_full_process(data):
    X, y = data
    X, y = X[:40], y[:40]
    kernel = fixed(gpytorch.kernels.ScaleKernel(rbf()).initialize(outputscale=2.0))
    gp = only_posterior(kernel=kernel, n_inducing=1000, jitter=1e-12).fit(X, y)
    # the full variational process: f = Lw with K = LLᵀ is a logistic regression on the rows of L
    K = kernel.double()(torch.from_numpy(X)).to_dense().detach().numpy()
    L = np.linalg.cholesky(K + 1e-12 * 2.0 * np.eye(40))
    linear = viper.VariationalLogisticRegression(fit_intercept=False, tol=1e-12).fit(L, y)
    assert gp.elbo_ == pytest.approx(linear.elbo_, rel=TOLERANCE["converged"])
    np.testing.assert_allclose(gp.predict_proba(X), linear.predict_proba(L), rtol=1e-5)


def test_more_inducing_points_than_rows(data):
    X, y = data
    gp = VariationalGPClassifier(n_inducing=500, random_state=0, max_iter=60).fit(X[:30], y[:30])
    assert gp.inducing_points_.shape == (30, 2)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradient_of_the_profile(kernel):
    X, y = wavy(80, 3)
    model = SparseGP(make_kernel(kernel, 3), make_mean("linear", 3), torch.from_numpy(X[:8].copy()), True, 1e-8)
    generator = np.random.default_rng(2)
    weight = torch.from_numpy(generator.random(80))
    label = torch.from_numpy((y == "yes") * 1.0)
    rows = Observations(torch.from_numpy(X), label, offset=torch.ones(80).double(), weight=weight)
    profile = Profile(model, rows, limit(), tol=1e-15)
    x = model.free_vector()
    x += 0.2 * generator.normal(size=len(x))
    direction = generator.normal(size=len(x))
    step = 1e-5
    difference = (profile(x + step * direction)[0] - profile(x - step * direction)[0]) / (2 * step)
    assert profile(x)[1] @ direction == pytest.approx(difference, rel=1e-6)  # the inner optimum is found to 1e-15 nats


@pytest.mark.parametrize("marginal", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_profile_in_arrays_is_that_in_tensors(kernel, marginal):
    """The fast path for few rows on a CPU against the general one, with weights, offset and scale."""
    generator = np.random.default_rng(2)
    draw = lambda *shape: torch.from_numpy(generator.normal(size=shape))  # noqa: E731
    rows = Observations(draw(60, 3), (draw(60) > 0).double(), offset=draw(60), weight=draw(60).square())
    model = SparseGP(make_kernel(kernel, 3), make_mean("linear", 3), draw(8, 3), True, 1e-8)
    x = model.free_vector()
    in_arrays = Profile(model, rows, limit(), scale=1.7, tol=1e-14, marginal=marginal)
    in_tensors = Profile(model, rows, limit(), scale=1.7, tol=1e-14, marginal=marginal)
    assert in_arrays.dense is not None
    in_tensors.dense = None
    for theta in (x, x + 0.1):
        value, slope = in_arrays(theta)
        expected, expected_slope = in_tensors(theta)
        assert value == pytest.approx(expected, abs=1e-9)
        assert np.allclose(slope, expected_slope, rtol=1e-5, atol=1e-5)
    found, expected_sites = in_arrays.last_sites(), in_tensors.last_sites()
    assert torch.allclose(found.precision[0], expected_sites.precision[0], atol=1e-6)
    assert torch.allclose(found.target[0], expected_sites.target[0], atol=1e-6)


def test_integrating_residuals_out_makes_few_points_do_as_all(data):
    """With all rows as points the profile is that of the ELBO; with few, it stays near, where the ELBO does not."""
    X, y = data
    rows = Observations(torch.from_numpy(X), torch.from_numpy((y == "yes") * 1.0))
    kernel = make_kernel("rbf", X.shape[1])
    kernel.base_kernel.initialize(lengthscale=0.5)

    def profile(points, marginal):
        model = SparseGP(kernel, make_mean("zero", X.shape[1]), torch.from_numpy(X[:points].copy()), False, 1e-8)
        return Profile(model, rows, limit(), tol=1e-10, marginal=marginal)(model.free_vector())[0]

    every = profile(len(X), False)
    assert profile(len(X), True) == pytest.approx(every, abs=1e-4)  # the jitter leaves a residual of 1e-8
    assert abs(profile(30, True) - every) < 0.2 * (every - profile(30, False))


@pytest.mark.parametrize("kernel", KERNELS[:3])
def test_closed_form_kernels_are_gpytorchs(kernel):
    k = make_kernel(kernel, 3)
    k.base_kernel.initialize(lengthscale=torch.tensor([[0.5, 1.0, 2.0]]))
    x, z = torch.randn(9, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    inputs = [z, *k.parameters()]
    weights = torch.randn(9, 4, dtype=torch.float64)
    ours, theirs = covariance(k, x, z), k(x, z).to_dense()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(variances(k, x), k(x, diag=True))
    pairs = [torch.autograd.grad((K * weights).sum(), inputs) for K in (ours, theirs)]
    torch.testing.assert_close(*pairs)


def test_blocks_change_nothing(data):
    X, y = data
    model = SparseGP(make_kernel("rbf", 2), make_mean("zero", 2), torch.from_numpy(X[:15].copy()), True, 1e-8)
    rows = Observations(torch.from_numpy(X), torch.from_numpy((y == "yes") * 1.0))
    values = []
    for size in (7, 1000):
        source = Features(model, rows, size)
        values.append(newton(Problem(source, identity_prior(source), limit())).objective)
    assert values[0] == pytest.approx(values[1], rel=TOLERANCE["roundoff"] * 100)  # sums in another order


def test_features_made_anew_on_every_pass_give_the_same(data, monkeypatch):
    X, y = data
    results = []
    for kept in (1 << 24, 0):
        monkeypatch.setattr("viper.gp.model.KEPT_FEATURES", kept)
        results.append(VariationalGPClassifier(n_inducing=10, n_starts=1, max_iter=5, random_state=0))
        with pytest.warns(ConvergenceWarning):
            results[-1].fit(X, y)
    assert results[0].elbo_ == pytest.approx(results[1].elbo_, rel=1e-9)


def test_order_repetition_and_weights_of_rows_change_nothing(data, fitted):
    X, y = data
    order = np.random.default_rng(3).permutation(len(y))
    again = VariationalGPClassifier(n_inducing=20, random_state=0, n_starts=3).fit(X[order], y[order])
    assert again.elbo_ == pytest.approx(fitted.elbo_, rel=1e-6)  # sums depend on how memory is aligned
    repeated = VariationalGPClassifier(n_inducing=20, random_state=0, n_starts=2).fit(np.r_[X, X], np.r_[y, y])
    weighted = VariationalGPClassifier(n_inducing=20, random_state=0, n_starts=2).fit(X, y, np.full(len(y), 2.0))
    assert repeated.elbo_ == pytest.approx(weighted.elbo_, rel=1e-6)


def test_scale_of_columns_changes_nothing(data, fitted):
    X, y = data
    scaled = VariationalGPClassifier(n_inducing=20, random_state=0, n_starts=3).fit(X * [1e-6, 1e6] + [3, 1e7], y)
    assert scaled.elbo_ == pytest.approx(fitted.elbo_, abs=1e-2)  # the search stops at gains of 1e-3 nats
    np.testing.assert_allclose(scaled.summary()["lengthscale"] / [1e-6, 1e6], fitted.summary()["lengthscale"], rtol=0.1)


@pytest.mark.parametrize("options", [{"terms": 12}, {"bound": "pg"}, {"bound": "mc", "samples": 200}])
def test_the_exact_elbo_is_at_least_that_of_every_bound(data, options):
    X, y = data
    kernel = fixed(gpytorch.kernels.ScaleKernel(rbf()).initialize(outputscale=4.0))
    exact = only_posterior(kernel=kernel, n_inducing=15, random_state=0).fit(X, y)
    other = only_posterior(kernel=kernel, n_inducing=15, random_state=0, **options).fit(X, y)
    assert other.elbo_ <= exact.elbo_ + 1e-8
    if options.get("bound") != "mc":
        assert other.objective_ <= other.elbo_ + 1e-9
    assert exact.elbo_bound_ < exact.elbo_


def test_diagonal_covariance_is_below_full(data):
    X, y = data
    kernel = fixed(gpytorch.kernels.ScaleKernel(rbf()).initialize(outputscale=4.0))
    full = only_posterior(kernel=kernel, n_inducing=15, random_state=0).fit(X, y)
    diagonal = only_posterior(kernel=kernel, n_inducing=15, random_state=0, covariance="diagonal").fit(X, y)
    assert diagonal.elbo_ < full.elbo_
    assert type(diagonal.posterior_).__name__ == "Diagonal"


# --- the estimator ---


def test_learning_helps_and_says_how(data, fitted):
    X, y = data
    assert fitted.score(X, y) > 0.75
    reached = fitted.elbo_ + fitted.model_.log_prior().item()
    assert reached == pytest.approx(max(start.elbo for start in fitted.starts_), abs=1e-3)
    assert fitted.elbo(X, y) == pytest.approx(fitted.elbo_, rel=1e-9)
    assert all(start.evaluations > 0 and start.seconds > 0 for start in fitted.starts_)
    assert fitted.jitter_ == 1e-8
    collapsed = viper.VariationalLogisticRegression(prior_scale=10.0).fit(X, y)
    assert fitted.elbo_ > collapsed.elbo_
    summary = fitted.summary()
    assert list(summary) == ["lengthscale", "relevance", "mean_weight", "mean_weight_sd"]
    assert summary.attrs["output_scale"] > 0
    assert summary["relevance"]["x0"] > summary["relevance"]["x1"]


def test_sample_has_the_moments_of_the_latent(data, fitted):
    X, _ = data
    draws = fitted.sample(X[:5], 20_000, random_state=1)
    mean, sd = fitted.predict_latent(X[:5])
    np.testing.assert_allclose(draws.mean(0), mean, atol=5 * sd.max() / math.sqrt(20_000))
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.03)  # Monte Carlo error of 20,000 draws


def test_offset(data):
    X, y = data
    kernel = fixed(gpytorch.kernels.ScaleKernel(rbf()))
    gp = only_posterior(kernel=kernel, n_inducing=15, random_state=0).fit(X, y, offset=np.full(len(y), 2.0))
    shifted = gp.predict_latent(X, offset=np.full(len(y), 2.0))[0] - gp.predict_latent(X)[0]
    np.testing.assert_allclose(shifted, 2.0, rtol=1e-12)
    share = (y == gp.classes_[1]).mean()
    assert gp.score(X, y, offset=np.full(len(y), 1e3)) == pytest.approx(share)


@pytest.mark.parametrize("kernel", ["matern32", "matern52", "linear"])
@pytest.mark.parametrize("mean", ["constant", "zero"])
def test_words(data, kernel, mean):
    X, y = data
    gp = VariationalGPClassifier(kernel=kernel, mean=mean, n_inducing=10, n_starts=2, random_state=0).fit(X, y)
    assert math.isfinite(gp.elbo_)
    assert gp.predict_proba(X).shape == (len(y), 2)


def test_kernels_and_means_of_the_user(data):
    X, y = data
    length = gpytorch.priors.GammaPrior(3.0, 6.0)
    kernel = (
        gpytorch.kernels.ScaleKernel(rbf(active_dims=[0], lengthscale_prior=length)) + gpytorch.kernels.LinearKernel()
    )
    mean = gpytorch.means.ConstantMean()
    gp = VariationalGPClassifier(kernel=kernel, mean=mean, n_inducing=12, n_starts=2, random_state=0).fit(X, y)
    assert gp.elbo_ > -70
    assert kernel.kernels[0].base_kernel.lengthscale.item() == pytest.approx(math.log(2))  # the user's own is untouched
    periodic = gpytorch.kernels.ScaleKernel(gpytorch.kernels.PeriodicKernel(ard_num_dims=2))
    assert math.isfinite(VariationalGPClassifier(kernel=periodic, n_inducing=8, n_starts=2, tol=0.1).fit(X, y).elbo_)


@pytest.mark.filterwarnings("ignore::viper.errors.ConvergenceWarning")
def test_natural_adam_approaches_the_profile(data, fitted):
    X, y = data
    options = {"n_inducing": 20, "random_state": 0, "solver": "natural-adam", "learning_rate": 0.1}
    adam = VariationalGPClassifier(max_iter=200, **options).fit(X, y)
    assert fitted.elbo_ + 0.1 > adam.elbo_ > fitted.elbo_ - 5
    batched = VariationalGPClassifier(max_iter=40, batch_size=30, **options).fit(X, y)
    assert batched.elbo_ > fitted.elbo_ - 15
    with pytest.warns(ConvergenceWarning):
        VariationalGPClassifier(max_iter=2, **options).fit(X, y)


def test_only_the_kernel_is_given_by_position(data):
    """As in scikit-learn's GaussianProcessClassifier."""
    assert VariationalGPClassifier("matern52").kernel == "matern52"
    with pytest.raises(TypeError, match="positional"):
        VariationalGPClassifier("matern52", "zero")


def is_row(points, X):
    return (np.abs(points[:, None] - X).sum(2) < 1e-9).any(1)


@pytest.mark.filterwarnings("ignore::viper.errors.ConvergenceWarning", "ignore::viper.errors.NarrowIntervalsWarning")
@pytest.mark.parametrize("solver", ["profile", "natural-adam"])
def test_greedy_points_are_rows_whatever_the_solver(data, solver, monkeypatch):
    X, y = data
    options = {"n_inducing": 12, "learn_inducing": False, "n_starts": 2, "max_iter": 3, "solver": solver}
    centres = VariationalGPClassifier(inducing="kmeans", **options).fit(X, y).inducing_points_
    assert not is_row(centres, X).all()
    monkeypatch.setattr("viper.gp.starts.k_means", None)  # not needed
    greedy = VariationalGPClassifier(**options).fit(X, y).inducing_points_
    assert is_row(greedy, X).all()
    # the first is where the information s(1-s) of the mean function alone is largest
    if solver == "natural-adam":
        null = viper.VariationalLogisticRegression(prior_scale=10.0).fit(X, y)  # as the ridge of the null model
        p = null.predict_proba(X)[:, 1]
        assert (np.abs(greedy[0] - X).sum(1) < 1e-9) @ (p * (1 - p)) > np.quantile(p * (1 - p), 0.9)
    # more points than rows in the race: they are chosen among all rows
    monkeypatch.setattr("viper.gp.search.RACE_ROWS", 10)
    many = VariationalGPClassifier(**options).fit(X, y).inducing_points_
    assert is_row(many, X).all()
    assert len(np.unique(many, axis=0)) == 12


@pytest.mark.filterwarnings("ignore::viper.errors.ConvergenceWarning")
@pytest.mark.parametrize(
    "options",
    [{"bound": "mc", "samples": 50}, {"inducing": "subset"}, {"solver": "natural-adam", "batch_size": 30}],
)
def test_without_a_seed_a_fit_repeats_bit_for_bit(data, options):
    X, y = data
    fits = []
    for seed in (1, 2):
        np.random.seed(seed)  # noqa: NPY002, of the global generator, which must not matter
        torch.manual_seed(seed)
        options = {"n_inducing": 6, "n_starts": 1, "max_iter": 3} | options
        fits.append(VariationalGPClassifier(**options).fit(X, y))
    np.testing.assert_array_equal(fits[0].posterior_.mean, fits[1].posterior_.mean)
    np.testing.assert_array_equal(fits[0].inducing_points_, fits[1].inducing_points_)
    assert fits[0].elbo_ == fits[1].elbo_


def test_warm_start_takes_fewer_steps(data):
    X, y = data
    gp = VariationalGPClassifier(n_inducing=15, n_starts=2, warm_start=True, random_state=0).fit(X, y)
    first, steps = gp.elbo_ + gp.model_.log_prior().item(), gp.n_iter_
    gp.fit(X, y)
    assert gp.elbo_ + gp.model_.log_prior().item() >= first - 1e-6
    assert gp.n_iter_ < max(steps, 10)


def test_warm_start_after_a_file_learns_as_without(data, tmp_path):
    X, y = data
    options = {"lengthscales": "many", "n_inducing": 8, "n_starts": 1, "warm_start": True, "random_state": 0}
    gp = VariationalGPClassifier(**options).fit(X[::2], y[::2])
    gp.save(tmp_path / "m")
    loaded, before = viper.load(tmp_path / "m"), gp.inducing_points_
    assert loaded.fit(X, y).elbo_ == pytest.approx(gp.fit(X, y).elbo_, abs=1e-6)
    assert not np.allclose(loaded.inducing_points_, before)


def test_save_and_load(data, fitted, tmp_path):
    X, _ = data
    fitted.save(tmp_path / "m")
    again = viper.load(tmp_path / "m")
    np.testing.assert_array_equal(again.predict_proba(X), fitted.predict_proba(X))
    assert (again.elbo_, again.starts_) == (fitted.elbo_, fitted.starts_)
    np.testing.assert_array_equal(again.classes_, fitted.classes_)


def test_a_kernel_of_the_users_is_given_again(data, tmp_path):
    X, y = data
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RQKernel())
    gp = VariationalGPClassifier(kernel=kernel, n_inducing=8, n_starts=1, tol=0.1, random_state=0).fit(X, y)
    gp.save(tmp_path / "m")
    with pytest.raises(StorageError, match=r"kernel must be passed again .* ScaleKernel"):
        viper.load(tmp_path / "m")
    with pytest.raises(StorageError, match="must be those of the saved model"):
        viper.load(tmp_path / "m", kernel=rbf())
    again = viper.load(tmp_path / "m", kernel=kernel)
    np.testing.assert_array_equal(again.predict_proba(X), gp.predict_proba(X))


@pytest.mark.filterwarnings(
    "ignore::viper.errors.ConvergenceWarning",
    "ignore::viper.errors.JitterWarning",
    "ignore::viper.errors.NarrowIntervalsWarning",  # the rows of these checks are few and linear
)
@parametrize_with_checks([VariationalGPClassifier(n_inducing=5, n_starts=1, max_iter=1, random_state=0)])
def test_scikit_learn(estimator, check):
    check(estimator)


def test_many_rows_are_searched_through_few(monkeypatch):
    """Racing on 50 rows, then climbing on 400 and on all, with A in float32, finds as good an optimum."""
    X, y = wavy(900)
    options = {"lengthscales": "many", "n_inducing": 12, "n_starts": 2, "random_state": 0, "tol": 1e-2}
    direct = VariationalGPClassifier(**options).fit(X, y)
    monkeypatch.setattr("viper.gp.search.RACE_ROWS", 50)
    monkeypatch.setattr("viper.gp.model.BLOCK_ROWS", 300)
    monkeypatch.setattr("viper.gp.profile.BLOCK_ROWS", 300)
    monkeypatch.setattr("viper.gp.model.KEPT_FEATURES", 0)
    monkeypatch.setattr("viper.gp.profile_numpy.LARGEST_DENSE", 5000)
    staged = VariationalGPClassifier(**options).fit(X, y)
    assert [start.start for start in staged.starts_[2:]] == ["400 rows", "900 rows"]
    assert staged.elbo_ == pytest.approx(direct.elbo_, abs=1.0)
    assert staged.elbo(X, y) == pytest.approx(staged.elbo_, rel=1e-9)


def test_progress_of_the_search(data, capsys):
    X, y = data
    VariationalGPClassifier(n_inducing=5, n_starts=2, tol=0.1, verbose=True).fit(X, y)
    assert "120 rows  objective" in capsys.readouterr().err


@pytest.mark.parametrize("diagonal", [False, True])
def test_every_tensor_is_made_on_its_device(data, diagonal, monkeypatch):
    """The default device holds no numbers here, so a tensor made without an explicit device would break the search."""
    monkeypatch.setattr("viper.gp.profile.dense_profile_applies", lambda *_: False)  # what runs on a GPU
    X, y = data
    model = SparseGP(make_kernel("rbf", 2), make_mean("linear", 2), torch.from_numpy(X[:8].copy()), True, 1e-8)
    rows = Observations(torch.from_numpy(X), torch.from_numpy((y == "yes") * 1.0))
    bound = limit()
    make = lambda: np.random.default_rng(0)  # noqa: E731
    with torch.device("meta"):
        found = Search(rows, bound, diagonal, 3, 1e-3, make()).families(
            {Family("rbf", True): model}, 3, "greedily", False
        )[0]
        Search(rows, bound, diagonal, 3, 1e-3, make()).natural_adam(model, 0.1, 50, True)
    assert math.isfinite(max(start.elbo for start in found.starts))


class Elsewhere(Observations):
    """Rows as if on another device, from which they can only be brought here."""

    def take(self, index):
        return Elsewhere(**vars(super().take(index)))

    def on(self, device):
        return Observations(**vars(self)) if torch.device(device).type == "cpu" and device == "cpu" else self


def test_small_races_run_on_the_cpu(data, monkeypatch):
    """Wherever the rows are, starts climb on the CPU if their products are small, and the last climb where they are."""
    monkeypatch.setattr("viper.gp.search.RACE_ROWS", 30)
    X, y = data
    model = SparseGP(make_kernel("rbf", 2), make_mean("linear", 2), torch.from_numpy(X[:8].copy()), True, 1e-8)
    rows = Elsewhere(torch.from_numpy(X), torch.from_numpy((y == "yes") * 1.0))
    seen = []
    profile_on = Search.profile_on
    monkeypatch.setattr(
        Search,
        "profile_on",
        lambda self, m, r, *more: (seen.append((len(r), type(r))), profile_on(self, m, r, *more))[1],
    )
    for most, races_on in ((1e8, Observations), (10.0, Elsewhere)):
        seen.clear()
        monkeypatch.setattr("viper.gp.search.MOST_ON_CPU", most)
        search = Search(rows, limit(), False, 3, 1e-3, np.random.default_rng(0))
        search.families({Family("rbf", True): model}, 2, "greedily", False)
        assert set(seen) == {(30, races_on), (len(X), Elsewhere)}


@pytest.mark.parametrize(("represented", "few", "tolerance"), [(1, 120, 1e-3), (1, 40, 0.15), (5, 120, 0.25)])
def test_gains_on_a_sample_count_as_much_as_it_says(data, represented, few, tolerance):
    """0.05 nats per row of the sample, for so many rows as each of them stands for."""
    rows = Observations(torch.from_numpy(data[0]), torch.from_numpy((data[1] == "yes") * 1.0))
    search = Search(rows, limit(), False, 1, 1e-3, np.random.default_rng(0), represented=represented)
    assert search.tolerance(rows.take(slice(few))) == pytest.approx(tolerance)


def test_starts_that_climb_together_end_where_they_would_alone(data, monkeypatch):
    monkeypatch.setattr("viper.gp.search.LEAST_TOGETHER", 0)
    options = {"n_starts": 3, "tol": 0.05, "random_state": 0}
    one, two = (VariationalGPClassifier(n_jobs=jobs, **options).fit(*data) for jobs in (1, 2))
    assert [start[:3] for start in one.starts_] == [start[:3] for start in two.starts_]
    assert len(one.components_) == len(two.components_) > 1
    np.testing.assert_array_equal(one.predict_proba(data[0]), two.predict_proba(data[0]))


# --- bad and hard input ---


class Broken(gpytorch.kernels.Kernel):
    def forward(self, x1, x2, diag=False, **_):
        K = -torch.eye(x1.shape[-2], x2.shape[-2], dtype=x1.dtype) - x1[..., :1] @ x2[..., :1].mT
        return K.diagonal(dim1=-1, dim2=-2) if diag else K


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "cubic"}, "kernel must be one of"),
        ({"mean": "cubic"}, "mean must be one of"),
        ({"kernel": rbf(ard_num_dims=7)}, "must take rows of 2 columns"),
        ({"kernel": rbf(active_dims=[0, 5])}, "must take rows of 2 columns"),
        ({"kernel": rbf(batch_shape=torch.Size([3]))}, "must not have a batch shape"),
        ({"kernel": Broken()}, "kernel must give a positive definite matrix"),
        ({"mean": gpytorch.means.LinearMean(5)}, "must take rows of 2 columns"),
        ({"n_inducing": 0}, "n_inducing must be 'auto' or a positive integer; got 0"),
        ({"n_inducing": "all"}, "n_inducing must be 'auto' or a positive integer; got 'all'"),
        ({"n_inducing": None}, "n_inducing must be 'auto' or a positive integer; got None"),
        ({"n_starts": None}, "n_starts must be a whole number from 1 on; got None"),
        ({"inducing": "grid"}, "inducing must be one of"),
        ({"inducing": np.zeros((3, 5))}, r"must have shape \(M, 2\)"),
        ({"inducing": np.full((3, 2), np.nan)}, "inducing points must be finite"),
        ({"bound": "best"}, "bound must be one of"),
        ({"covariance": "low"}, "covariance must be one of"),
        ({"solver": "newton"}, "solver must be one of"),
        ({"jitter": -1.0}, r"jitter must lie in \[0, 0.01\]; got -1.0"),
        ({"tol": 0.0}, "tol must be a positive number"),
    ],
)
def test_bad_options(data, options, message):
    with pytest.raises(ValueError, match=message):
        VariationalGPClassifier(**options).fit(*data)


def test_hyperparameters_that_are_not_numbers(data):
    kernel = gpytorch.kernels.ScaleKernel(rbf())
    kernel.raw_outputscale.data.fill_(math.nan)
    with pytest.raises(ValueError, match="parameters of kernel must be finite; got nan for raw_outputscale"):
        VariationalGPClassifier(kernel=kernel).fit(*data)


def test_a_step_too_far_is_taken_back():
    model = SparseGP(make_kernel("rbf", 1), make_mean("zero", 1), torch.zeros(3, 1).double(), True, 1e-8)
    rows = Observations(torch.linspace(0, 1, 9).double()[:, None], (torch.arange(9) % 2).double())
    profile = Profile(model, rows, limit())
    value, slope = profile(np.full(len(model.free_vector()), np.nan))
    assert value == -math.inf
    assert not slope.any()
    model.set_free(np.zeros(5))
    assert math.isfinite(profile(np.zeros(5))[0])


def test_units_of_parameters():
    """A badly scaled parabola takes few steps if its units are known."""
    size = np.array([1e-3, 1.0, 1e3])
    objective = lambda x: (-0.5 * float(((x / size - 1) ** 2).sum()), -(x / size - 1) / size)  # noqa: E731
    climb = Climb(objective, np.zeros(3), size).run(20, 1e-12)
    assert climb.finished
    assert climb.evaluations < 10
    assert np.allclose(climb.x, size)


def test_starts_that_met_are_one():
    X, y = wavy(40)
    rows = Observations(torch.from_numpy(X), torch.from_numpy((y == "yes") * 1.0))
    attempts = []
    for length in (1.0, 1.1, 9.0):
        model = SparseGP(make_kernel("rbf", 2), make_mean("zero", 2), rows.inputs[:5].clone(), True, 1e-8)
        model.kernel.base_kernel.initialize(lengthscale=length)
        attempts.append(Attempt(Candidate("", model), lambda m: Profile(m, rows, limit())))
    assert distinct_attempts(attempts) == [attempts[0], attempts[2]]


def test_jitter_reports_itself(data):
    X, y = data
    singular = only_posterior(kernel=fixed(gpytorch.kernels.LinearKernel()), inducing=X[:20], jitter=0.0)
    with pytest.warns(JitterWarning, match="needed a jitter of 1e-1"):
        singular.fit(X, y)
    assert singular.jitter_ > 0
    with pytest.raises(NotPositiveDefinite):
        cholesky_with_jitter(-torch.eye(3), 1e-8)


@pytest.mark.parametrize("p", [1, 60])
def test_few_and_many_columns(p):
    X, y = wavy(60, p)
    gp = VariationalGPClassifier(mean="constant", n_inducing=10, n_starts=2, random_state=0, tol=0.1).fit(X, y)
    assert math.isfinite(gp.elbo_)


def test_duplicate_rows_and_constant_columns(data):
    X, y = data
    X = np.column_stack([np.round(X), np.full(len(y), 7.0)])
    gp = VariationalGPClassifier(n_inducing=10, n_starts=2, random_state=0, tol=0.1).fit(X, y)
    assert np.isfinite(gp.predict_proba(X)).all()


def test_intervals_include_what_the_mean_explains():
    """A linear truth: as point estimates, the weights leave nothing to the kernel."""
    rng = np.random.default_rng(1)
    X = rng.standard_normal((200, 2))
    y = rng.random(200) < 1 / (1 + np.exp(0.5 * X[:, 1] - X[:, 0]))
    with pytest.warns(
        UserWarning, match="its weights are point estimates: intervals are more than 10 times too narrow"
    ):
        point = VariationalGPClassifier(n_inducing=20, priors=None, random_state=0).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = VariationalGPClassifier(n_inducing=20, random_state=0).fit(X, y)
    logistic = viper.VariationalLogisticRegression().fit(X, y)
    width = [np.diff(fit.predict_interval(X)).mean() for fit in (point, model, logistic)]
    assert width[0] < 0.1 * width[1]
    assert width[1] > 0.8 * width[2]


# --- priors ---


def test_a_linear_mean_beside_a_kernel_of_nothing_is_logistic_regression():
    """f = s xᵀβ + 5β₀ with β ~ N(0, I), as in q of the regression with these prior scales."""
    generator = np.random.default_rng(1)
    X = generator.normal(size=(200, 4))
    y = X @ [1, -1, 0.5, 0] + generator.logistic(size=200) > 1
    nothing = fixed(gpytorch.kernels.ScaleKernel(rbf()).initialize(outputscale=1e-14))
    gp = VariationalGPClassifier(nothing, standardize=False, n_inducing=3, learn_inducing=False, tol=1e-9).fit(X, y)
    slope = gp.summary().attrs["slope_scale"]
    linear = viper.VariationalLogisticRegression(prior_scale=slope, intercept_scale=LEVEL_SCALE, tol=1e-12).fit(X, y)
    assert gp.elbo_ == pytest.approx(linear.elbo_, abs=1e-8)
    np.testing.assert_allclose(gp.predict_proba(X), linear.predict_proba(X), rtol=1e-6)
    np.testing.assert_allclose(gp.predict_latent(X)[1], linear.predict_latent(X)[1], rtol=1e-6)
    np.testing.assert_allclose(gp.summary()["mean_weight"], linear.coef_[0], rtol=1e-6)
    np.testing.assert_allclose(gp.summary()["mean_weight_sd"], np.sqrt(np.diag(linear.covariance_))[:-1], rtol=1e-6)
    assert gp.summary().attrs["intercept"] == pytest.approx(float(linear.intercept_[0]), rel=1e-6)
    # s is at the mode of the ELBO plus the log prior of log s
    objective = [
        viper.VariationalLogisticRegression(prior_scale=s, intercept_scale=LEVEL_SCALE, tol=1e-12).fit(X, y).elbo_
        - 0.5 * (math.log(s * 2.0) / SLOPE_SPREAD) ** 2
        for s in slope * np.exp([-0.02, 0.0, 0.02])
    ]
    assert objective[1] > max(objective[0], objective[2])


def test_a_linear_mean_beside_a_kernel_is_a_linear_kernel_more():
    """s² xᵀz + 25 added to the kernel, with all rows as inducing points, is the same process."""
    X, y = wavy(60)
    X = (X - X.mean(0)) / X.std(0)
    wave = gpytorch.kernels.ScaleKernel(rbf()).initialize(outputscale=2.0)
    beside = VariationalGPClassifier(fixed(wave), n_inducing=100, jitter=1e-10, tol=1e-8).fit(X, y)
    slope = beside.summary().attrs["slope_scale"]
    line = gpytorch.kernels.LinearKernel().initialize(variance=slope**2)
    level = gpytorch.kernels.ConstantKernel().initialize(constant=torch.tensor(LEVEL_SCALE**2))
    inside = only_posterior(kernel=fixed(wave + line + level), n_inducing=100, jitter=1e-10).fit(X, y)
    new = np.random.default_rng(3).normal(size=(20, 2)) * 2
    assert beside.elbo_ == pytest.approx(inside.elbo_, abs=1e-5)
    np.testing.assert_allclose(beside.predict_proba(new), inside.predict_proba(new), rtol=1e-4)
    np.testing.assert_allclose(beside.predict_latent(new)[1], inside.predict_latent(new)[1], rtol=1e-4)
    draws = beside.sample(new, 4000, random_state=0)
    expected, sd = beside.predict_latent(new)
    assert np.abs(draws.mean(0) - expected).max() < 5 * sd.max() / math.sqrt(4000)
    np.testing.assert_allclose(draws.std(0), sd, rtol=0.1)


@pytest.mark.parametrize("mean", ["linear", "constant"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradient_of_the_profile_with_priors(kernel, mean):
    generator = np.random.default_rng(2)
    draw = lambda *shape: torch.from_numpy(generator.normal(size=shape))  # noqa: E731
    rows = Observations(draw(60, 3), (draw(60) > 0).double(), offset=draw(60), weight=draw(60).square())
    many = kernel != "matern52"
    made = make_kernel(kernel, 3, priors="default", many=many), make_mean(mean, 3, priors="default")
    model = SparseGP(*made, draw(8, 3), True, 1e-8)
    x = model.free_vector() + 0.2 * generator.normal(size=len(model.free_vector()))
    direction, step = generator.normal(size=len(x)), 1e-5
    for dense, marginal in itertools.product((True, False), (True, False)):
        profile = Profile(model, rows, limit(), scale=1.7, tol=1e-15, marginal=marginal)
        assert profile.dense is not None
        profile.dense = profile.dense if dense else None
        difference = (profile(x + step * direction)[0] - profile(x - step * direction)[0]) / (2 * step)
        assert profile(x)[1] @ direction == pytest.approx(difference, rel=1e-6)


def test_priors_are_shown_and_count_as_densities_of_logarithms(data):
    X, y = data
    model = VariationalGPClassifier(n_inducing=10, n_starts=1, tol=0.1, random_state=0).fit(X, y)
    shown = model.summary().attrs["priors"]
    assert shown["lengthscale"] == "log-normal, median 1.91, log-sd 0.7"  # 1.35 √2
    assert set(shown) == {"lengthscale", "outputscale", "slope"}
    kernel, slope = model.model_.kernel, model.model_.mean.slope.item()
    expected = (
        scipy.stats.norm.logpdf(
            kernel.base_kernel.lengthscale.detach().log().numpy(), math.log(1.35 * math.sqrt(2)), 0.7
        ).sum()
        + scipy.stats.norm.logpdf(kernel.outputscale.log().item(), math.log(3.0), 1.5)
        + scipy.stats.norm.logpdf(math.log(slope), math.log(1 / math.sqrt(2)), 1.0)
    )
    assert model.model_.log_prior().item() == pytest.approx(expected, rel=1e-12)
    assert VariationalGPClassifier(priors=None, n_inducing=10, n_starts=1, tol=0.1).fit(X, y).model_.log_prior() is None


@pytest.mark.parametrize("kernel", ["rbf", "additive"])
def test_short_priors_are_the_default_ones_with_other_lengthscales(kernel):
    """log N(log l; log 0.8 √c, 0.7²) in place of log N(log l; log 1.35 √c, 0.7²); an additive part has c = 1."""
    root = math.sqrt(3.0) if kernel == "rbf" else 1.0
    default, short = (make_kernel(kernel, 3, priors=priors) for priors in ("default", "short"))
    priors = [{name: (prior, of(module)) for name, module, prior, of, _ in k.named_priors()} for k in (default, short)]
    assert priors[0].keys() == priors[1].keys()
    for name, (prior, value) in priors[0].items():
        medians = [math.exp(found[name][0].loc.item()) for found in priors]
        assert priors[1][name][0].scale == prior.scale
        assert torch.equal(priors[1][name][1], value)
        if "lengthscale" in name:
            assert medians == pytest.approx([1.35 * root, 0.8 * root])
        else:
            assert medians[0] == medians[1]


def test_a_file_knows_its_short_priors(data, tmp_path):
    options = {"priors": "short", "n_inducing": 10, "n_starts": 1, "tol": 0.1, "random_state": 0}
    model = VariationalGPClassifier(**options).fit(*data)
    assert model.summary().attrs["priors"]["lengthscale"] == "log-normal, median 1.13, log-sd 0.7"  # 0.8 √2
    model.save(tmp_path / "short.viper")
    again = viper.load(tmp_path / "short.viper")
    assert again.priors == "short"
    assert again.model_.log_prior().item() == model.model_.log_prior().item()


def test_one_lengthscale_for_all_columns(data):
    X, y = data
    model = VariationalGPClassifier(lengthscales="one", n_inducing=10, n_starts=2, tol=0.1).fit(X, y)
    lengths = model.summary()["lengthscale"] / X.std(0)
    assert lengths.iloc[0] == pytest.approx(lengths.iloc[1], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priors": "weak"}, "priors must be 'default', 'short' or None; got 'weak'"),
        ({"lengthscales": 3}, r"lengthscales must be one of \['auto', 'one', 'many'\]; got 3"),
    ],
)
def test_wrong_priors(data, options, message):
    with pytest.raises(ValueError, match=message):
        VariationalGPClassifier(**options).fit(*data)
