"""Preferences: identities, quadrature, the exact posterior by MCMC, BoTorch's PairwiseGP, files and errors."""

import warnings

import gpytorch
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit, logit
from scipy.stats import norm
from sklearn.base import clone
from tolerances import TOLERANCE

import viper
from viper import VariationalLogisticRegression, VariationalPreferenceGP
from viper.decisions.preferences import ExpectedBest, PairInformation
from viper.errors import StorageError
from viper.gp.kernels import PairKernel, covariance, make_kernel, tie_constant, variances
from viper.gp.likelihood import OrdinalLikelihood
from viper.gp.pairs.answers import choice_weights, read_answers
from viper.softplus.normal import difference

QUICK = {"hyperparameters": "mode", "lengthscales": "one", "mean": "zero", "random_state": 0, "verbose": False}


def utility(X):
    return 2.0 * np.sin(4.0 * X[:, 0]) + X[:, 1]


def answers(m=40, seed=0, columns=2):
    """Items, pairs with the better one first, and whether an answer was close to a tie."""
    generator = np.random.default_rng(seed)
    X = generator.random((m, columns))
    pairs = np.array([generator.choice(m, 2, replace=False) for _ in range(m)])
    d = utility(X)[pairs[:, 0]] - utility(X)[pairs[:, 1]] + generator.logistic(size=m) * 0.4
    return X, np.where((d > 0)[:, None], pairs, pairs[:, ::-1]), np.abs(d) < 0.5


@pytest.fixture(scope="module")
def fitted():
    X, pairs, _ = answers()
    return VariationalPreferenceGP(**QUICK).fit(X, pairs)


@pytest.fixture(scope="module")
def tied():
    X, pairs, ties = answers()
    return VariationalPreferenceGP(**QUICK).fit(X, pairs, ties)


@pytest.fixture(scope="module")
def averaged():
    X, pairs, _ = answers(seed=3)
    return VariationalPreferenceGP(random_state=0, verbose=False).fit(X, pairs)


A, B = np.random.default_rng(9).random((2, 7, 2))  # items to compare


# --- identities ---


@pytest.mark.parametrize("name", ["rbf", "matern32"])
def test_pairs_are_differences_of_items(name):
    of = make_kernel(name, 2)
    kernel, X = PairKernel(of, 2), torch.from_numpy(answers(12)[0])
    S = torch.kron(torch.eye(6), torch.tensor([[1.0, -1.0]])).double()
    K, pairs = covariance(of, X, X), X.reshape(6, 4)
    np.testing.assert_allclose(covariance(kernel, pairs, pairs).detach(), (S @ K @ S.T).detach(), atol=1e-13)
    np.testing.assert_allclose(covariance(kernel, X, pairs).detach(), (K @ S.T).detach(), atol=1e-13)
    np.testing.assert_allclose(variances(kernel, pairs).detach(), (S @ K @ S.T).diagonal().detach(), atol=1e-13)
    np.testing.assert_allclose(variances(kernel, X).detach(), K.diagonal().detach(), atol=1e-13)


def test_a_linear_kernel_is_logistic_regression_on_differences():
    X, pairs, _ = answers()
    linear = gpytorch.kernels.LinearKernel()
    linear.variance = 1.7
    linear.requires_grad_(False)
    model = VariationalPreferenceGP(linear, mean="zero", standardize=False, verbose=False).fit(X, pairs)
    D, y = X[pairs[:, 0]] - X[pairs[:, 1]], np.arange(len(pairs)) % 2
    D = np.where(y[:, None] == 1, D, -D)
    line = VariationalLogisticRegression(prior_scale=np.sqrt(1.7), fit_intercept=False).fit(D, y)
    # the jitter of the inducing values, 1e-8 of their variance, is all that differs
    assert model.elbo_ == pytest.approx(line.elbo_, rel=1e-6)
    np.testing.assert_allclose(model.predict_proba(A, B)[:, 0], line.predict_proba(A - B)[:, 1], atol=1e-6)
    np.testing.assert_allclose(model.predict_std(A, B), line.predict_std(A - B), atol=1e-6)
    np.testing.assert_allclose(model.predict_latent(A)[0], A @ line.coef_[0], atol=1e-5)


def test_swapped_answers_flip_and_numbers_of_items_do_not_matter(fitted):
    X, pairs, _ = answers()
    other = VariationalPreferenceGP(**QUICK).fit(X, pairs[:, ::-1])
    np.testing.assert_allclose(other.predict_proba(A, B), fitted.predict_proba(B, A), atol=TOLERANCE["converged"])
    order = np.random.default_rng(1).permutation(len(X))
    renumbered = VariationalPreferenceGP(**QUICK).fit(X[order], np.argsort(order)[pairs][::-1])
    np.testing.assert_allclose(renumbered.predict_proba(A, B), fitted.predict_proba(A, B), atol=TOLERANCE["roundoff"])
    np.testing.assert_allclose(
        fitted.predict_proba(A, B), fitted.predict_proba(B, A)[:, ::-1], atol=TOLERANCE["special"]
    )


def test_repeated_answers_are_weights():
    X, pairs, ties = answers(20)
    count = np.arange(20) % 3
    repeated = VariationalPreferenceGP(**QUICK).fit(X, np.repeat(pairs, count, 0), np.repeat(ties, count))
    used = np.unique(pairs[count > 0])
    assert set(used) == set(np.unique(pairs)) or repeated.n_items_ == len(used)
    kept = count > 0
    weighted = VariationalPreferenceGP(**QUICK).fit(X, pairs[kept], ties[kept], sample_weight=count[kept])
    np.testing.assert_allclose(repeated.predict_proba(A, B), weighted.predict_proba(A, B), atol=TOLERANCE["converged"])
    assert repeated.elbo_ == pytest.approx(weighted.elbo_, rel=TOLERANCE["converged"])


def test_moments_of_items_are_those_of_pairs(fitted):
    process = fitted.process_
    mean, sd = process.predict_latent(process.rows_of(A, B))
    found = difference(*fitted._pair_moments(A, B))
    np.testing.assert_allclose(found[0], mean, atol=TOLERANCE["autograd"])
    np.testing.assert_allclose(found[1].sqrt(), sd, atol=TOLERANCE["autograd"])
    latent_mean, C = fitted.predict_latent(np.vstack([A, B]), return_cov=True)
    np.testing.assert_allclose(np.sqrt(C.diagonal()), fitted.predict_latent(np.vstack([A, B]))[1], rtol=1e-10)
    np.testing.assert_allclose((C[:7, :7] + C[7:, 7:] - C[:7, 7:] - C[7:, :7]).diagonal(), found[1], atol=1e-10)
    draws = fitted.sample(np.vstack([A, B]), 20_000, random_state=0)
    np.testing.assert_allclose(draws.mean(0), latent_mean, atol=5 * np.sqrt(C.diagonal().max() / 20_000))
    np.testing.assert_allclose(np.cov(draws.T), C, atol=0.05 * C.diagonal().max())


def test_the_average_over_hyperparameters_is_a_mixture(averaged):
    assert len(averaged.components_) > 1
    mean, C = averaged.predict_latent(A, return_cov=True)
    parts = []
    for component in averaged.components_:
        twin = clone(averaged)
        twin.process_ = object.__new__(type(averaged.process_))
        vars(twin.process_).update(vars(averaged.process_), components_=[component._replace(weight=1.0)])
        twin.n_features_in_ = 2
        parts.append(twin.predict_latent(A, return_cov=True))
    weights = np.array([component.weight for component in averaged.components_])
    means = np.array([m for m, _ in parts])
    np.testing.assert_allclose(mean, weights @ means, atol=TOLERANCE["autograd"])
    spread = sum(w * (V + np.outer(m, m)) for w, (m, V) in zip(weights, parts, strict=True)) - np.outer(mean, mean)
    np.testing.assert_allclose(C, spread, atol=TOLERANCE["autograd"])


# --- ties ---


def test_the_three_answers_add_up_to_one(tied):
    d, t = np.meshgrid(np.linspace(-6, 6, 25), [1e-3, 0.3, 2.0])
    tie = expit(t - d) * expit(t + d) * np.exp(tie_constant(1.0, torch.from_numpy(t)).numpy())
    np.testing.assert_allclose(expit(d - t) + tie + expit(-d - t), 1.0, rtol=TOLERANCE["special"])
    p = tied.predict_proba(A, B)
    assert tied.outcomes_ == ("first", "tie", "second")
    assert (p > 0).all()
    np.testing.assert_allclose(p.sum(1), 1.0, rtol=TOLERANCE["special"])
    np.testing.assert_allclose(p, tied.predict_proba(B, A)[:, ::-1], atol=TOLERANCE["special"])


def test_ties_are_the_middle_of_three_levels(tied):
    """The ELBO is that of an ordinal likelihood with the thresholds -t and t, and so are probabilities."""
    X, pairs, ties = answers()
    t = tied.threshold_
    likelihood = OrdinalLikelihood(3, thresholds=torch.tensor([-t, t], dtype=torch.float64), learn=False).double()
    mean, variance = difference(*tied._pair_moments(X[pairs[:, 0]], X[pairs[:, 1]]))
    f = gpytorch.distributions.MultivariateNormal(mean, torch.diag(variance))
    levels = torch.from_numpy(np.where(ties, 1, 2))
    elbo = float(likelihood.expected_log_prob(levels, f).sum()) - tied.process_.kl_
    assert tied.elbo_ == pytest.approx(elbo, rel=TOLERANCE["converged"])
    at = difference(*tied._pair_moments(A, B))
    probabilities = likelihood(gpytorch.distributions.MultivariateNormal(at[0], torch.diag(at[1]))).probs
    np.testing.assert_allclose(tied.predict_proba(A, B)[:, ::-1], probabilities, atol=1e-10)


def test_the_threshold_is_where_the_objective_is_largest(tied):
    """L-BFGS moves the threshold together with the kernel: neighbours have a lower profile plus log prior."""
    from viper.gp.model import Observations
    from viper.gp.profile import Profile

    process = tied.process_
    rows = Observations.from_arrays(process._raw_rows.in_memory()).standardised(process._scaler, torch.device("cpu"))
    exact, _ = process._choices.bounds(0)

    def value(change):
        model = process.model_.copy_at()
        with torch.no_grad():
            model.mean.raw_tie += change
        return Profile(model, rows, exact, tol=1e-10).maximum()[0]

    assert value(0.0) > max(value(0.3), value(-0.3)) - 0.05  # the search stops when steps gain less than 0.05 nats


def test_no_ties_make_a_small_threshold():
    X, pairs, _ = answers()
    without = VariationalPreferenceGP(**QUICK).fit(X, pairs, np.zeros(len(pairs), bool))
    assert without.threshold_ < 0.5
    assert without.predict_proba(A, B)[:, 1].max() < 0.2


# --- acquisition ---


def normal_average(mean, variance, function):
    """E function(d) for d ~ N(mean, variance), by the trapezoid on a grid fine enough for a kink."""
    z = np.linspace(-9.0, 9.0, 20_001)
    density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
    return np.trapezoid(function(mean[:, None] + np.sqrt(variance)[:, None] * z) * density, z)


def entropy(f):
    """-Σ p log p of yes and no with log-odds f."""
    return np.logaddexp(0.0, f) - f * expit(f)


def test_information_and_expected_best_are_integrals(fitted, averaged):
    for model in (fitted, averaged):
        pairs = np.stack([A, B], 1)
        mean, C = model._pair_moments(A, B)
        d, v = (x.numpy() for x in difference(mean, C))
        information = entropy(logit(normal_average(d, v, expit))) - normal_average(d, v, entropy)
        # the grid leaves 1e-7 of the kink of max(d, 0)
        np.testing.assert_allclose(PairInformation(model)(pairs), information, atol=1e-9)
        np.testing.assert_allclose(model.predict_information(A, B), information, atol=1e-9)
        best = mean[:, 1].numpy() + normal_average(d, v, lambda x: np.maximum(x, 0.0))
        np.testing.assert_allclose(ExpectedBest(model, average="moments")(pairs), best, atol=1e-6)


def test_the_expected_best_is_averaged_over_hyperparameters(averaged):
    """E max given each component, by quadrature; pending pairs condition each component."""
    process, expected = averaged._process(), 0.0
    assert len(process.weights) > 1
    for weight, part in zip(process.weights, process.parts, strict=True):
        with torch.no_grad():
            rows = part.rows(torch.from_numpy(np.stack([A, B], 1).reshape(-1, A.shape[1])))
            d, v = (x.numpy() for x in difference(rows.mean.reshape(-1, 2), part.among(rows, 2)))
        better = normal_average(d, v, lambda x: np.maximum(x, 0.0))
        expected = expected + float(weight) * (rows.mean.reshape(-1, 2)[:, 1].numpy() + better)
    pairs = np.stack([A, B], 1)
    found = ExpectedBest(averaged)
    # the grid leaves 1e-7 of the kink
    np.testing.assert_allclose(found(pairs), expected, atol=1e-6)
    pending = ExpectedBest(averaged, pending=np.vstack([A[4], B[4]]))
    assert (pending(pairs) <= found(pairs) + 1e-12).all()
    assert pending(pairs)[4] < found(pairs)[4] - 1e-3
    X = torch.from_numpy(pairs[:2]).requires_grad_(True)
    assert torch.autograd.gradcheck(pending, X, atol=1e-6)
    with pytest.raises(ValueError, match=r"average must be one of .*; got 'mean'"):
        ExpectedBest(averaged, average="mean")


@pytest.mark.parametrize("kind", [PairInformation, ExpectedBest])
def test_gradients(kind, fitted):
    function = kind(fitted, pending=A[:4])
    X = torch.from_numpy(np.stack([A, B], 1)[:2]).requires_grad_(True)
    assert torch.autograd.gradcheck(function, X, atol=1e-6)


def test_the_best_of_several_is_that_of_draws(fitted):
    items = A[:4][None]
    draws = fitted.sample(A[:4], 100_000, random_state=1).max(1)
    found = ExpectedBest(fitted, draws=4096)(items)
    # 4096 Sobol points and 100,000 draws: each within 0.01
    assert found[0] == pytest.approx(draws.mean(), abs=0.02)
    two = ExpectedBest(fitted)(np.stack([A, B], 1))
    again = ExpectedBest(fitted)(np.stack([B, A], 1))
    np.testing.assert_allclose(two, again, rtol=TOLERANCE["autograd"])


def test_pending_answers_condition_the_joint_posterior(fitted):
    """As if each pending answer were a Gaussian one of precision h along its difference."""
    pending, pairs = np.vstack([A[0], B[0], A[1], B[1]]), np.stack([A, B], 1)
    points = np.vstack([pending, A[4], B[4]])
    mean, C = fitted.predict_latent(points, return_cov=True)
    for i in (0, 2):
        sign = np.zeros(6)
        sign[i], sign[i + 1] = 1.0, -1.0
        v = sign @ C @ sign
        h = float(viper.expected_softplus(sign @ mean, v).curvature)
        column = C @ sign
        C = C - h / (1.0 + h * v) * np.outer(column, column)
    v = C[4, 4] + C[5, 5] - 2.0 * C[4, 5]
    expected = viper.softplus.information.answer_information(torch.tensor(mean[4] - mean[5]), torch.tensor(v))
    assert PairInformation(fitted, pending=pending)(pairs)[4] == pytest.approx(float(expected), rel=1e-8)
    assert (PairInformation(fitted, pending=pending)(pairs) <= PairInformation(fitted)(pairs) + 1e-12).all()


# --- against others ---


def test_the_exact_posterior(fitted):
    from viper.reference import sample_latent

    prior = fitted.process_.latent_prior()
    exact = sample_latent(*prior[:3], sample_weight=prior[3], draws=500, warmup=300, random_state=0)
    rows = fitted.process_._raw_rows.in_memory().features.numpy()
    mean, sd = fitted.process_.predict_latent(rows)
    # a Gaussian beside a slightly skewed posterior, and Monte Carlo errors of a few hundredths of an sd
    assert np.abs((mean - exact.mean()) / exact.sd()).max() < 0.25
    assert np.abs(sd / exact.sd() - 1.0).max() < 0.15


def test_botorch_orders_items_alike(fitted):
    pytest.importorskip("botorch")
    from botorch.models.pairwise_gp import PairwiseGP

    X, pairs, _ = answers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = PairwiseGP(torch.from_numpy(X), torch.from_numpy(pairs.copy()))
        peer.covar_module.base_kernel.lengthscale = (
            fitted.process_.model_.kernel.of.base_kernel.lengthscale[0, 0] * 0.29
        )
        found = peer.posterior(torch.from_numpy(np.vstack([A, B]))).mean.detach().numpy()[:, 0]
    assert np.corrcoef(found, fitted.predict_latent(np.vstack([A, B]))[0])[0, 1] > 0.9


# --- the estimator ---


def test_one_pair_is_enough():
    model = VariationalPreferenceGP(random_state=0, verbose=False).fit([[0.0], [1.0]], [[1, 0]])
    assert 0.5 < model.predict_proba([[1.0]], [[0.0]])[0, 0] < 1.0
    low, high = model.predict_interval([[1.0]], [[0.0]])[0]
    assert low < 0.5 < high


def test_summary_names_columns_and_the_threshold():
    X, pairs, ties = answers()
    model = VariationalPreferenceGP(random_state=0, verbose=False)
    table = model.fit(pd.DataFrame(X, columns=["sugar", "salt"]), pairs, ties).summary()
    assert list(table.index) == ["sugar", "salt"]
    assert "lengthscale" in table
    assert table.attrs["threshold"] == model.threshold_
    assert "tie" in table.attrs["priors"]
    assert model.score(pd.DataFrame(A, columns=["sugar", "salt"]), pd.DataFrame(B, columns=["sugar", "salt"])) < 0


def test_files(tmp_path, fitted, tied, averaged):
    for k, model in enumerate((fitted, tied, averaged)):
        model.save(tmp_path / f"{k}.viper")
        back = viper.load(tmp_path / f"{k}.viper")
        assert np.array_equal(back.predict_proba(A, B), model.predict_proba(A, B))
        for found, known in zip(back.predict_latent(A), model.predict_latent(A), strict=True):
            np.testing.assert_allclose(found, known, rtol=TOLERANCE["special"])
        assert (back.elbo_, back.threshold_, back.n_pairs_) == (model.elbo_, model.threshold_, model.n_pairs_)
        assert back.get_params() == model.get_params()
    state = fitted._pack()
    for name, value in (("pairs", -1), ("process", {}), ("names", ["a"]), ("constant", "x")):
        with pytest.raises(StorageError):
            VariationalPreferenceGP._unpack(state._replace(metadata={**state.metadata, name: value}), {})


def choices(m, k, seed=0):
    """Items, and choices among k of them by a softmax, the chosen one first."""
    generator = np.random.default_rng(seed)
    X = generator.random((8, 2))
    asked = np.array([generator.choice(8, k, replace=False) for _ in range(m)])
    f = utility(X)[asked] + generator.gumbel(size=(m, k))
    return X, np.take_along_axis(asked, np.argsort(-f, 1), 1)


def test_weighted_pairs_have_the_slope_and_the_curvature_of_a_choice():
    """With w = p_c + p_j: the score e_c - p of the softmax, and on average over choices its curvature."""
    f = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64)
    p, k = f.softmax(0), 4

    def pairs(g, c):
        return sum((p[c] + p[j]) * torch.nn.functional.logsigmoid(g[c] - g[j]) for j in range(k) if j != c)

    for c in range(k):
        score = torch.func.grad(lambda g, c=c: pairs(g, c))(f)
        np.testing.assert_allclose(score, torch.eye(k, dtype=torch.float64)[c] - p, atol=TOLERANCE["roundoff"])
    curvature = -sum(p[c] * torch.func.hessian(lambda g, c=c: pairs(g, c))(f) for c in range(k))
    softmax = torch.func.hessian(lambda g: g.logsumexp(0))(f)
    np.testing.assert_allclose(curvature, softmax, atol=TOLERANCE["roundoff"])


def test_weights_of_choices_are_averages_over_the_posterior(averaged):
    X, asked = choices(5, 4)
    found = choice_weights(averaged._process(), X[asked])
    f = averaged.sample(X, 40_000, random_state=0)[:, asked]
    p = np.exp(f - f.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    expected = p[..., 1:].mean(0) / expit(f[..., 1:] - f[..., :1]).mean(0)
    np.testing.assert_allclose(found, expected, atol=0.03)  # 512 Sobol points
    np.testing.assert_allclose(choice_weights(averaged._process(), X[asked[:, :2]]), 1.0, rtol=TOLERANCE["special"])


@pytest.mark.parametrize("k", [3, 6])
def test_choices_have_the_posterior_of_the_softmax(k):
    """Importance sampling of the exact posterior of all items, from twice the covariance that was fitted."""
    X, asked = choices(30, k)
    kernel = make_kernel("rbf", 2)
    kernel.initialize(outputscale=3.0)
    kernel.base_kernel.initialize(lengthscale=0.5)
    kernel.requires_grad_(False)
    options = {"mean": "zero", "standardize": False, "n_inducing": 300, "random_state": 0, "verbose": False}
    model = VariationalPreferenceGP(kernel, **options).fit(X, asked)
    mean, C = model.predict_latent(X, return_cov=True)
    Z = torch.from_numpy(X)
    prior = torch.distributions.MultivariateNormal(torch.zeros(8).double(), covariance(kernel, Z, Z))
    q = torch.distributions.MultivariateNormal(torch.from_numpy(mean), torch.from_numpy(2.0 * C))
    torch.manual_seed(0)
    f = q.sample((200_000,))
    chosen = f[:, asked].log_softmax(-1)[..., 0].sum(-1)
    weight = (chosen + prior.log_prob(f) - q.log_prob(f)).softmax(0)
    beside = f - f.mean(1, keepdim=True)  # only differences are known
    exact = weight @ beside
    sd = (weight @ (beside - exact).square()).sqrt()
    centre = np.eye(8) - 1.0 / 8.0
    # a Gaussian beside a slightly skewed posterior; pairs without weights have sds of 0.86 and 0.69 of the exact ones
    np.testing.assert_allclose((centre @ mean - exact.numpy()) / sd.numpy(), 0.0, atol=0.1)
    np.testing.assert_allclose(np.sqrt((centre @ C @ centre).diagonal()), sd, rtol=0.1)


def test_lists_of_any_length_may_hold_tensors_and_numbers_of_numpy():
    known = read_answers([[0, 1], [2, 3, 4]], 5)
    for given in (
        [torch.tensor([0, 1]), torch.tensor([2, 3, 4])],
        (np.array([0, 1], np.uint8), range(2, 5)),
        [list(np.arange(2)), list(np.arange(2.0, 5.0))],
    ):
        for one, other in zip(read_answers(given, 5), known, strict=True):
            np.testing.assert_array_equal(one, other)
    boxed = np.array([[np.int64(0), np.int64(1)]], dtype=object)
    assert read_answers(boxed, 5).pairs.tolist() == [[0, 1]]


def test_choices_among_two_are_pairs_and_may_be_of_any_length():
    X, asked = choices(12, 3)
    lists = [row[: 2 + k % 2].tolist() for k, row in enumerate(asked)]
    answers = read_answers(lists, len(X))
    assert answers.pairs.tolist() == [[row[0], other] for row in lists for other in row[1:]]
    model = VariationalPreferenceGP(**QUICK).fit(X, lists, sample_weight=np.arange(12) % 2)
    kept = VariationalPreferenceGP(**QUICK).fit(X, asked[1::2])
    np.testing.assert_allclose(model.predict_proba(A, B), kept.predict_proba(A, B), atol=TOLERANCE["converged"])
    assert kept.n_pairs_ == 12


@pytest.mark.parametrize(
    ("pairs", "ties", "words"),
    [
        (np.zeros((0, 2), int), None, "at least one; got none"),
        ([[0, 0]], None, "item 0 twice in pair 0"),
        ([[0, 1], [2, 40]], None, "0 to 39; got 40 in pair 1"),
        ([[0, -1]], None, "0 to 39; got -1"),
        ([[0.5, 1]], None, "numbers of rows of X; got 0.5"),
        ([[0.0, np.nan]], None, "numbers of rows of X; got nan"),
        ([["a", "b"]], None, "numbers of rows of X; got 'a'"),
        ([0, 1], None, "two columns or more"),
        ([[0, 1, 2], [3, 1, 3]], None, "item 3 twice in pair 1"),
        ([[0, 1, 2]], [True], "about two items; got a choice among 3"),
        ([[0, 1], [2]], None, r"two items or more, the best one first; got .2. in pair 1"),
        ([[0, 1], [2, 3, 4], [[5, 6], [7, 8]]], None, r"list of two items or more.* in pair 2"),
        ([[0, 1], [2, 3, 4], 5], None, "list of two items or more.* got 5 in pair 2"),
        ([[0, 1]], [2], "True .a tie. or False .* got 2"),
        ([[0, 1]], ["maybe"], "True .a tie. or False .* got 'maybe'"),
        ([[0, 1]], [True, False], "one value for each of the 1 pairs"),
    ],
)
def test_bad_pairs(pairs, ties, words):
    with pytest.raises(ValueError, match=words):
        VariationalPreferenceGP().fit(answers()[0], pairs, ties)


def test_other_bad_input(fitted):
    X, pairs, _ = answers()
    equal = np.vstack([X, X[:1]])
    with pytest.raises(ValueError, match="must differ; got equal rows 40 and 0"):
        VariationalPreferenceGP().fit(equal, [[40, 0]])
    with pytest.raises(ValueError, match="X must be finite"):
        VariationalPreferenceGP().fit(np.where(X > 0.9, np.nan, X), pairs)
    with pytest.raises(ValueError, match="mean must be"):
        VariationalPreferenceGP(mean="constant").fit(X, pairs)
    with pytest.raises(ValueError, match="kernel must be"):
        VariationalPreferenceGP("additive").fit(X, pairs)
    with pytest.raises(ValueError, match="same number of items; got 7 and 3"):
        fitted.predict_proba(A, B[:3])
    with pytest.raises(ValueError, match="2 items"):
        PairInformation(fitted)(A[None, :3])
    with pytest.raises(ValueError, match="X must be finite"):
        PairInformation(fitted)(np.full((1, 2, A.shape[1]), np.nan))
    with pytest.raises(ValueError, match="at least one batch of items; got none"):
        PairInformation(fitted)(A[None, :0].reshape(0, 2, A.shape[1]))
    for wrong in ([0, 5], [0], ["first", "second"]):
        with pytest.raises(ValueError, match="answers must be numbers from 0 to 1, one for each of 2 pairs"):
            fitted.score(A[:2], B[:2], wrong)
    with pytest.raises(TypeError, match=r"got one of preferences.* Use PairInformation"):
        viper.decisions.suggest(fitted, A)
    with pytest.raises(TypeError, match=r"got one of preferences. Use viper.decisions.PairInformation"):
        viper.acquisition.Information(fitted)
    with pytest.raises(ValueError, match="pairs of items; got 3"):
        PairInformation(fitted, pending=A[:3])
    with pytest.raises(TypeError, match="fitted VariationalPreferenceGP"):
        ExpectedBest(VariationalPreferenceGP())
    with pytest.raises(ValueError, match="draws must be a whole number from 1 on; got 0"):
        ExpectedBest(fitted, draws=0)
    for wrong in (-1, 2.5, True):
        with pytest.raises(ValueError, match=f"n must be a whole number from 0 on; got {wrong}"):
            fitted.sample(A, wrong)


# --- experiments ---


def run(experiment, count, seed=0):
    generator = np.random.default_rng(seed)
    for _ in range(count):
        a, b = experiment.ask()
        d = utility(np.array([list(a.values())]))[0] - utility(np.array([list(b.values())]))[0]
        d += 0.3 * generator.logistic()
        experiment.tell((a, b), "tie" if abs(d) < 0.1 else "first" if d > 0 else "second")
    return experiment


@pytest.fixture(scope="module")
def experiment():
    return run(viper.Experiment({"sugar": (0, 1), "milk": (0, 1)}, goal="prefer", initial=6), 20)


def test_an_experiment_finds_what_is_preferred(experiment):
    top = utility(np.array([[np.pi / 8.0, 1.0]]))[0]
    best = experiment.best()
    assert utility(np.array([list(best.x.values())]))[0] > top - 0.5  # of a range of 4.5
    assert best.interval[0] < best.mean < best.interval[1]
    found = experiment.estimate([{"sugar": 0.4, "milk": 0.9}, {"sugar": 1.0, "milk": 0.0}])
    assert found.mean[0] > found.mean[1]
    progress = experiment.progress()
    assert progress.answers == 20
    assert 0.0 < progress.information < np.log(2.0)
    assert progress.left > 0.0


def test_utilities_of_an_experiment_are_those_less_their_average(experiment):
    """C d with d = e_x - 1/r over r reference items, by the joint covariance of all of them."""
    points = [{"sugar": 0.4, "milk": 0.9}, {"sugar": 1.0, "milk": 0.0}]
    found = experiment.estimate(points, level=0.5)
    X = np.vstack([experiment.columns(points), experiment._reference()])
    mean, C = experiment.model.predict_latent(X, return_cov=True)
    d = np.hstack([np.eye(2), np.full((2, len(X) - 2), -1.0 / (len(X) - 2))])
    np.testing.assert_allclose(found.mean, d @ mean, atol=TOLERANCE["roundoff"])
    width = 2.0 * norm.ppf(0.75) * np.sqrt((d @ C @ d.T).diagonal())
    np.testing.assert_allclose(found.upper - found.lower, width, atol=TOLERANCE["special"])
    many = [points[0]] * 1_500  # more than are computed at once
    np.testing.assert_allclose(experiment.estimate(many, level=0.5).upper, found.upper[0], atol=TOLERANCE["special"])


@pytest.mark.parametrize("columns", ["sugar", ("sugar", "milk")])
def test_pictures_show_utilities_and_both_items_of_every_pair(experiment, columns):
    from matplotlib.figure import Figure

    ax = viper.plot.experiment(experiment, columns=columns, size=9, ax=Figure().subplots())
    assert ax.get_title(loc="left") == "Utility after 20 answers"
    grid = viper.report.views.experiment_grid(experiment, columns, None, 0.95, 9)
    answers = experiment.answers[1]
    np.testing.assert_array_equal(grid.answers, np.r_[answers, 1.0 - answers])
    first, second = zip(*experiment.answers[0], strict=True)
    np.testing.assert_allclose(grid.asked[:, 0], [item["sugar"] for item in (*first, *second)])
    if columns == "sugar":  # the other input is that of the best item
        points = [{"sugar": x, "milk": experiment.best().x["milk"]} for x in grid.x]
        np.testing.assert_allclose(ax.lines[0].get_ydata(), experiment.estimate(points).mean)


def test_an_experiment_without_answers_has_no_picture():
    with pytest.raises(ValueError, match="needs answers to be shown; got none"):
        viper.plot.experiment(viper.Experiment({"sugar": (0, 1)}, goal="prefer"))


def test_a_stored_experiment_goes_on_alike(experiment, tmp_path):
    experiment.save(tmp_path / "tastes.viper")
    back = viper.load(tmp_path / "tastes.viper")
    assert back.ask() == experiment.ask()
    assert len(back.pending) == 1
    assert isinstance(back.pending[0], tuple)
    assert back.cancel().ask(2)[0] != back.pending[1]


def test_experiments_say_what_an_answer_is():
    asked = viper.Experiment([(0, 1), (0, 1)], goal="prefer", constraints=[([1.0, 1.0], 1.2)])
    pair = asked.ask()
    assert len(pair) == 2
    assert (np.sum(pair, 1) <= 1.2).all()
    assert asked.ask(3).shape == (3, 2, 2)
    with pytest.raises(ValueError, match=r"one of .'first', 'tie', 'second'.; got 1"):
        asked.tell(pair, 1)
    with pytest.raises((TypeError, ValueError), match=r"pair of points|2 inputs"):
        asked.tell([0.1, 0.2], "first")
    asked.tell(pair, "second").tell(np.array([[[0.1, 0.2], [0.3, 0.4]], [[0.5, 0.1], [0.2, 0.2]]]), ["first", "tie"])
    assert len(asked.answers[1]) == 3
    assert asked.answers[0].shape == (3, 2, 2)
    whole = viper.Experiment({"shots": (1, 2, "integer")}, goal="prefer", initial=6)
    pairs = whole.ask(6)
    assert all(a != b for a, b in pairs)
