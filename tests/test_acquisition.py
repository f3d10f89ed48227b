"""Acquisition functions: values against quadrature, gradients against differences, batches, and BoTorch."""

import gpytorch
import mpmath
import numpy as np
import pytest
import torch
from botorch.optim import optimize_acqf
from scipy.special import expit, logit
from scipy.stats import norm, qmc

import viper
from tests.tolerances import TOLERANCE
from viper import acquisition
from viper.decisions.acquisition import Acquisition
from viper.decisions.latent import after_label, latent_of
from viper.softplus.improvement import after_answer, expected_excess

RNG = np.random.default_rng(5)
X = RNG.uniform(-2.0, 2.0, (40, 2))
Y = (RNG.random(40) < expit(3.0 * np.sin(2.0 * X[:, 0]) + X[:, 1])).astype(int)
POINTS = RNG.uniform(-2.0, 2.0, (7, 2))
REFERENCE = RNG.uniform(-2.0, 2.0, (30, 2))
Z, W = np.polynomial.hermite_e.hermegauss(150)
W = W / W.sum()


@pytest.fixture(scope="module")
def model():
    return viper.VariationalGPClassifier(random_state=0).fit(X, Y)


@pytest.fixture(scope="module")
def single():
    """One component, so that a refit differs by the row alone."""
    return viper.VariationalGPClassifier(hyperparameters="mode", lengthscales="one", n_starts=1, random_state=0).fit(
        X, Y
    )


MAKERS = {
    "information": acquisition.Information,
    "straddle": lambda model: acquisition.Straddle(model, 0.7),
    "uncertainty": lambda model: acquisition.LevelSetUncertainty(model, 0.7),
    "errors": lambda model: acquisition.LevelSetLookAhead(model, REFERENCE, 0.7),
    "entropy": lambda model: acquisition.LevelSetLookAhead(model, REFERENCE, 0.7, measure="entropy"),
    "probability": lambda model: acquisition.ProbabilityLookAhead(model, REFERENCE),
    "ucb": acquisition.UpperConfidenceBound,
    "improvement": lambda model: acquisition.ExpectedImprovement(model, 0.8),
    "chance": lambda model: acquisition.ProbabilityOfImprovement(model, 0.8),
    "draw": lambda model: acquisition.PosteriorDraw(model, REFERENCE),
    "maximum": lambda model: acquisition.MaximumInformation(model, REFERENCE, draws=5),
}
BY_DRAWS = ("improvement", "chance", "draw")


def entropy(p):
    return -p * np.log(p) - (1.0 - p) * np.log1p(-p)


# --- the joint covariance of f ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hyperparameters": "mode", "n_inducing": 8},
        {"kernel": "additive"},
        {"covariance": "diagonal", "hyperparameters": "mode"},
    ],
    ids=str,
)
def test_covariance_is_that_of_draws(options):
    fitted = viper.VariationalGPClassifier(n_starts=1, random_state=0, **options).fit(X, Y)
    mean, C = fitted.predict_latent(POINTS, return_cov=True)
    same, sd = fitted.predict_latent(POINTS)
    np.testing.assert_array_equal(mean, same)
    np.testing.assert_allclose(np.diag(C), sd**2, rtol=TOLERANCE["autograd"])
    np.testing.assert_array_equal(C, C.T)
    draws = fitted.sample(POINTS, 40_000, random_state=1)
    # standard errors of a covariance: √((C_ii C_jj + C_ij²)/n)
    error = np.sqrt((np.outer(sd, sd) ** 2 + C**2) / 40_000)
    assert np.abs((np.cov(draws.T) - C) / error).max() < 4.5


def test_covariance_needs_two_classes(model):
    three = viper.VariationalGPClassifier(n_starts=1, hyperparameters="mode").fit(X, np.arange(40) % 3)
    with pytest.raises(ValueError, match="is for two classes; got a model of 3"):
        three.predict_latent(POINTS, return_cov=True)


# --- single points against quadrature ---


def test_information_is_quadrature_and_what_the_model_says(model):
    mean, sd = model.predict_latent(POINTS)
    p = expit(mean[:, None] + sd[:, None] * Z)
    expected = entropy(p @ W) - entropy(np.clip(p, 1e-300, 1.0 - 1e-16)) @ W
    found = acquisition.Information(model)(POINTS)
    np.testing.assert_allclose(found, expected, rtol=1e-6)  # 150 nodes, sds up to 4
    np.testing.assert_allclose(found, model.predict_information(POINTS), rtol=TOLERANCE["autograd"])


@pytest.mark.parametrize("sd", [0.05, 0.7, 1.0, 1.3, 6.0])
@pytest.mark.parametrize(("mean", "level"), [(0.3, 1.0), (-2.0, 0.5), (3.0, -1.0), (-1.0, 4.0)])
def test_expected_excess_is_quadrature(mean, sd, level):
    m, s, b = map(mpmath.mpf, (mean, sd, level))
    logistic = lambda x: 1 / (1 + mpmath.exp(-x))  # noqa: E731
    ends = sorted({b, max(b, m), max(b, m) + s, max(b, m) + 4 * s, max(b, m) + 12 * s})
    expected = mpmath.quad(lambda f: (logistic(f) - logistic(b)) * mpmath.npdf(f, m, s), ends)
    found = expected_excess(*(torch.tensor(x, dtype=torch.float64) for x in (mean, sd**2, level)))
    assert float(found) == pytest.approx(float(expected), abs=1e-12)


def test_improvement_is_quadrature(model):
    mean, sd = model.predict_latent(POINTS)
    b = logit(0.8)
    z = (b - mean) / sd
    np.testing.assert_allclose(
        acquisition.ProbabilityOfImprovement(model, 0.8)(POINTS), norm.sf(z), atol=TOLERANCE["autograd"]
    )
    grid = np.linspace(0.0, 1.0, 20_001) ** 2 * 14.0  # beyond the kink, which is its first point
    f = b + sd[:, None] * grid
    density = norm.pdf((f - mean[:, None]) / sd[:, None])
    expected = np.trapezoid((expit(f) - 0.8) * density, grid, axis=1)
    found = acquisition.ExpectedImprovement(model, 0.8)(POINTS)
    np.testing.assert_allclose(found, expected, atol=1e-7)  # of the trapezoidal rule


def test_moments_after_an_answer_are_quadrature():
    mean, variance = np.array([-1.5, 0.2, 3.0]), np.array([0.3, 2.0, 5.0])
    after = after_answer(torch.from_numpy(mean), torch.from_numpy(variance))
    f = mean[:, None] + np.sqrt(variance)[:, None] * Z
    for chance, m, v, p in (
        (after.chance, after.mean_yes, after.variance_yes, expit(f)),
        (1.0 - after.chance, after.mean_no, after.variance_no, expit(-f)),
    ):
        total = p @ W
        middle = (p * f) @ W / total
        np.testing.assert_allclose(chance.numpy(), total, rtol=1e-7)  # 150 nodes, sd √5
        np.testing.assert_allclose(m.numpy(), middle, rtol=1e-6)
        np.testing.assert_allclose(v.numpy(), (p * (f - middle[:, None]) ** 2) @ W / total, rtol=1e-5)


def test_bounds_and_sides_by_their_formulas(model):
    mean, sd = model.predict_latent(POINTS)
    z = (mean - logit(0.7)) / sd
    close = {"rtol": 1e-9, "atol": 1e-12}
    np.testing.assert_allclose(MAKERS["straddle"](model)(POINTS), 1.96 * sd - np.abs(mean - logit(0.7)), **close)
    np.testing.assert_allclose(MAKERS["uncertainty"](model)(POINTS), entropy(norm.cdf(z)), **close)
    np.testing.assert_allclose(MAKERS["ucb"](model)(POINTS), expit(mean + sd), **close)


# --- look-ahead ---


def test_look_ahead_is_bayes_rule_by_quadrature(single):
    """By the exact posterior of f at a reference point given either answer, from N(f(x), f(z)) by quadrature."""
    both = np.concatenate([POINTS[:1], REFERENCE[:3]])
    mean, C = single.predict_latent(both, return_cov=True)
    f = mean[0] + np.sqrt(C[0, 0]) * Z
    b = logit(0.7)
    sd = np.sqrt(np.diag(C)[1:] - C[0, 1:] ** 2 / C[0, 0])
    given = mean[1:] + np.outer(f - mean[0], C[0, 1:] / C[0, 0])
    above = norm.cdf((given - b) / sd)
    wrong_now = norm.cdf(-np.abs(mean[1:] - b) / np.sqrt(np.diag(C)[1:]))
    after = sum(np.minimum((W * p) @ above, (W * p) @ (1.0 - above)) for p in (expit(f), expit(-f)))
    found = acquisition.LevelSetLookAhead(single, REFERENCE[:3], 0.7)(POINTS[:1])
    # one normal in place of the exact posterior: 1e-3 of a probability
    assert found[0] == pytest.approx((wrong_now - after).mean(), abs=1e-3)


@pytest.mark.parametrize("name", ["errors", "probability"])
def test_look_ahead_is_two_refits(single, name):
    """With either answer added as a row; the refit's Gaussian is another one than that of matched moments."""
    import copy

    def measure(fitted):
        mean, sd = fitted.predict_latent(REFERENCE)
        if name == "errors":
            return norm.cdf(-np.abs(mean - logit(0.7)) / sd).mean()
        return (fitted.predict_std(REFERENCE) ** 2).mean()

    values = MAKERS[name](single)(POINTS)
    expected = []
    for point in POINTS:
        chance = single.predict_proba(point[None])[0, 1]
        after = [measure(copy.deepcopy(single).partial_fit(point[None], [answer])) for answer in (0, 1)]
        expected.append(measure(single) - (1.0 - chance) * after[0] - chance * after[1])
    np.testing.assert_allclose(values, expected, atol=0.1 * np.max(expected))
    assert np.corrcoef(values, expected)[0, 1] > 0.97


# --- gradients, batches, pending points ---


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_are_differences(model, name):
    function = MAKERS[name](model)
    function.set_X_pending(POINTS[5:6])
    x = torch.from_numpy(POINTS[:4].reshape(2, 2, 2)).requires_grad_()
    (slope,) = torch.autograd.grad(function(x).sum(), x)
    step = 1e-5
    for place in ((0, 0, 0), (1, 1, 1)):
        up, down = (x.detach().clone() for _ in range(2))
        up[place] += step
        down[place] -= step
        expected = float(function(up).sum() - function(down).sum()) / (2.0 * step)
        # the conditional mean of a draw divides by a covariance that is nearly singular
        assert float(slope[place]) == pytest.approx(expected, rel=1e-3 if name == "draw" else 1e-5, abs=1e-7)


@pytest.mark.parametrize("name", MAKERS)
def test_a_batch_of_one_is_the_point(model, name):
    function = MAKERS[name](model)
    alone = function(POINTS)
    batched = function(torch.from_numpy(POINTS[:, None]))
    np.testing.assert_array_equal(batched.numpy(), alone)
    assert function(torch.from_numpy(POINTS[:6].reshape(3, 2, 1, 2))).shape == (3, 2)


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in BY_DRAWS])
def test_a_batch_is_a_point_and_another_given_the_first(model, name):
    function = MAKERS[name](model)
    first, second = torch.from_numpy(POINTS[:1]), torch.from_numpy(POINTS[1:2])
    together = function(torch.stack([first, second], 1))
    alone = function(first[None])
    function.set_X_pending(first)
    np.testing.assert_allclose(together.numpy(), (alone + function(second[None])).numpy(), rtol=1e-8, atol=1e-12)


def test_a_batch_of_improvements_is_that_of_draws(model):
    mean, C = model.predict_latent(POINTS[:3], return_cov=True)
    f = np.random.default_rng(0).multivariate_normal(mean, C, 200_000)
    top = expit(f).max(1)
    batch = torch.from_numpy(POINTS[None, :3])
    improvement = acquisition.ExpectedImprovement(model, 0.8, draws=4096)(batch)
    assert float(improvement) == pytest.approx(np.maximum(top - 0.8, 0.0).mean(), abs=1e-3)
    chance = acquisition.ProbabilityOfImprovement(model, 0.8, draws=4096)(batch)
    assert float(chance) == pytest.approx((top > 0.8).mean(), abs=4e-3)


def test_greedy_batches_are_those_of_suggest(model):
    found = viper.decisions.suggest(model, REFERENCE, n=4)
    function, chosen = acquisition.Information(model), []
    for _ in range(4):
        function.set_X_pending(REFERENCE[chosen] if chosen else None)
        values = function(REFERENCE)
        values[chosen] = -1.0
        chosen.append(int(values.argmax()))
    assert chosen == found.rows.tolist()


def test_labels_to_come_leave_the_covariance_of_a_precision():
    C = torch.from_numpy(np.cov(RNG.normal(size=(4, 9))))
    h = torch.tensor(0.17, dtype=torch.float64)
    expected = torch.linalg.inv(torch.linalg.inv(C) + torch.diag(torch.eye(4, dtype=torch.float64)[1] * h))
    np.testing.assert_allclose(after_label(C, 1, h), expected, rtol=TOLERANCE["autograd"])


def test_draws_have_the_posterior_of_the_reference_points(single):
    few = REFERENCE[:4]
    mean, C = single.predict_latent(few, return_cov=True)
    latent = latent_of(single)  # once for all draws
    draws = np.array([logit(acquisition.PosteriorDraw(latent, few, random_state=k)(few)) for k in range(400)])
    assert np.abs((draws.mean(0) - mean) / np.sqrt(np.diag(C) / 400)).max() < 4.0
    np.testing.assert_allclose(draws.var(0), np.diag(C), rtol=0.3)


def test_information_about_the_maximum_is_bayes_rule(single):
    """Given p*, f is a normal cut off there: E s(f) by quadrature on a grid."""
    function = acquisition.MaximumInformation(single, REFERENCE, draws=3, random_state=2)
    mean, sd = single.predict_latent(POINTS)
    given = []
    for top in function.tops.numpy():
        grid = np.linspace(-12.0, 0.0, 20_001)[None, :] + np.minimum((top - mean) / sd, 12.0)[:, None]
        density = norm.pdf(grid)
        value = expit(mean[:, None] + sd[:, None] * grid)
        given.append((value * density).sum(1) / density.sum(1))
    expected = entropy(np.mean(given, axis=0)) - entropy(np.array(given)).mean(0)
    np.testing.assert_allclose(function(POINTS), expected, atol=1e-5)  # sums over a grid


# --- GPyTorch and BoTorch ---


class Approximate(gpytorch.models.ApproximateGP):
    def __init__(self, points):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, distribution))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.fixture(scope="module")
def module():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Approximate(torch.from_numpy(X[:10])).double()
        strategy = made.variational_strategy
        strategy._variational_distribution.variational_mean.data.copy_(torch.randn(10))
        strategy.variational_params_initialized.fill_(1)
    return made.eval()


@pytest.mark.parametrize("name", MAKERS)
def test_gpytorch_models_are_taken_as_they_are(module, name):
    function = MAKERS[name](module)
    function.set_X_pending(torch.from_numpy(POINTS[5:6]))
    x = torch.from_numpy(POINTS[:4].reshape(2, 2, 2)).requires_grad_()
    value = function(x)
    assert value.shape == (2,)
    (slope,) = torch.autograd.grad(value.sum(), x)
    assert bool(slope.isfinite().all())


def test_information_of_a_gpytorch_model_is_that_of_its_moments(module):
    found = module(torch.from_numpy(POINTS))
    mean, sd = found.mean.detach().numpy(), found.variance.detach().sqrt().numpy()
    p = expit(mean[:, None] + sd[:, None] * Z)
    expected = entropy(p @ W) - entropy(p) @ W
    np.testing.assert_allclose(acquisition.Information(module)(POINTS), expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["errors", "improvement", "draw"])
def test_botorch_optimises_them(model, name):
    bounds = torch.tensor([[-2.0, -2.0], [2.0, 2.0]], dtype=torch.float64)
    function = MAKERS[name](model)
    grid = 4.0 * qmc.Sobol(2, seed=0).random(256) - 2.0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        point, value = optimize_acqf(function, bounds, q=1, num_restarts=2, raw_samples=32)
        pair, _ = optimize_acqf(function, bounds, q=2, num_restarts=1, raw_samples=8, sequential=True)
    assert float(value) >= function(grid).max() - 1e-3
    assert bool(((point >= -2.0) & (point <= 2.0)).all())
    assert pair.shape == (2, 2)
    assert function.X_pending is None


# --- bad input ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: acquisition.Straddle(m, 1.0), "threshold must lie strictly between 0 and 1; got 1.0"),
        (lambda m: acquisition.Straddle(m, "high"), "threshold must be a probability; got 'high'"),
        (lambda m: acquisition.Straddle(m, spread=0), "spread must be a positive number; got 0"),
        (lambda m: acquisition.ExpectedImprovement(m, -0.1), "best must lie strictly between 0 and 1"),
        (lambda m: acquisition.ExpectedImprovement(m, 0.5, draws=0), "draws must be a whole number from 1 on; got 0"),
        (lambda m: acquisition.MaximumInformation(m, REFERENCE, draws=1.5), "draws must be a whole number from 1 on"),
        (lambda m: acquisition.LevelSetLookAhead(m, REFERENCE, measure="x"), "measure must be 'errors' or 'entropy'"),
        (lambda m: acquisition.LevelSetLookAhead(m, REFERENCE[:, :1]), r"reference must be points × 2; got shape \(30"),
        (lambda m: acquisition.LevelSetLookAhead(m, REFERENCE * np.nan), "reference must be finite; got NaN"),
        (lambda m: acquisition.Information(m, pending=["a"]), "pending must be numbers; got"),
        (lambda m: acquisition.Information(m)(POINTS[:, :1]), "X must be points × 2"),
        (lambda m: acquisition.Information(m)(torch.zeros(3)), "X must be a tensor of batches × q × 2; got shape"),
        (lambda m: acquisition.Information(3), "model must be a VariationalGPClassifier or a GPyTorch model"),
        (lambda m: acquisition.Information(viper.VariationalGPClassifier()), "model must be fitted; got one that"),
        (
            lambda m: acquisition.Information(torch.nn.Linear(2, 1).double())(POINTS),
            "model must return a MultivariateNormal",
        ),
    ],
)
def test_bad_input_gets_one_clear_error(model, make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(model)


def test_every_public_acquisition_is_tested():
    public = {getattr(acquisition, name) for name in acquisition.__all__}
    assert all(issubclass(one, Acquisition) for one in public)
    model = viper.VariationalGPClassifier(hyperparameters="mode", n_starts=1).fit(X, Y)
    assert public == {type(make(model)) for make in MAKERS.values()}
