"""When a Gaussian process warns that its intervals omit the uncertainty of the mean function."""

import warnings

import gpytorch
import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_iris, load_wine

from viper.errors import NarrowIntervalsWarning
from viper.gp.classifier import VariationalGPClassifier
from viper.gp.mean_uncertainty import rank_with_constant, weights_estimated

three = np.array([[0.0], [1.0], [2.0]]), np.array([0, 1, 1])


def pair(load, first, second):
    data = load()
    rows = np.isin(data.target, (first, second))
    return data.data[rows], data.target[rows]


def drawn(f, X, seed=0):
    return X, np.random.default_rng(seed).random(len(X)) < 1 / (1 + np.exp(-f(X)))


def normal(n, p):
    return np.random.default_rng(1).normal(size=(n, p))


def warns(X, y, priors=None, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NarrowIntervalsWarning)
        VariationalGPClassifier(random_state=0, n_inducing=50, priors=priors, **options).fit(X, y)
    return any(issubclass(warning.category, NarrowIntervalsWarning) for warning in caught)


@pytest.mark.parametrize(
    "rows",
    [
        three,
        pair(load_iris, 0, 1),
        pair(load_iris, 1, 2),
        pair(load_wine, 0, 1),
        pair(load_wine, 0, 2),
        load_breast_cancer(return_X_y=True),
        drawn(lambda X: 0.3 + 1.5 * X[:, 0], normal(200, 1)),
    ],
    ids=["three rows", "iris 0/1", "iris 1/2", "wine 0/1", "wine 0/2", "breast cancer", "a line"],
)
def test_the_fit_warns_if_the_mean_explains_the_data(rows):
    """The output scale need not be near 0: it is 250 for breast cancer and 17 for wine 0/2."""
    assert warns(*rows)
    assert not warns(*rows, priors="default")


@pytest.mark.parametrize(
    "rows",
    [
        drawn(lambda X: -4.5 * np.sin(np.pi / 2 * X[:, 0]), np.random.default_rng(1).uniform(0, 5, (80, 1))),
        drawn(lambda X: 2 * (X**2).sum(1) - 3, normal(400, 2)),
        drawn(lambda X: 3 * np.sign(X[:, 0] * X[:, 1]), normal(400, 2)),
        drawn(lambda X: 2 * X[:, 0] + np.sin(3 * X[:, 1]), normal(500, 2)),
        drawn(lambda X: X[:, 0] + X[:, 1] + 2 * np.sin(2 * X[:, 2]), normal(500, 8)),
    ],
    ids=["wave", "ring", "quadrants", "line and wave", "line and wave of 8 columns"],
)
def test_the_fit_does_not_warn_if_the_kernel_does_the_work(rows):
    assert not warns(*rows)


def test_dependent_columns_do_not_count_as_weights():
    X, y = drawn(lambda X: 3.0 * X[:, 0] ** 2 - 2.0, normal(300, 2))
    assert rank_with_constant(torch.from_numpy(X)) == 3
    for more in (np.ones((300, 20)), X[:, [0] * 20]):
        assert rank_with_constant(torch.from_numpy(np.column_stack([X, more]))) == 3
        assert not warns(np.column_stack([X, more]), y)


def test_the_warning_names_the_factor_and_the_line_of_the_user():
    with pytest.warns(NarrowIntervalsWarning, match=r"10 times too narrow\. Use mean='linear' with priors") as caught:
        VariationalGPClassifier(random_state=0, priors=None).fit(*three)
    assert caught[0].filename == __file__


def test_fixed_weights_are_not_estimates():
    mean = gpytorch.means.LinearMean(1).double().initialize(weights=2.0, bias=0.0).requires_grad_(False)
    assert not warns(*three, mean=mean)


def estimated(model, X, y, weight=None):
    source = model._open_labelled_rows(X, y, sample_weight=weight, offset=None)
    return float(sum(weights_estimated(block, model.posterior_)[0] for block in source.blocks()))


def test_a_linear_kernel_of_wide_prior_holds_as_many_weights_as_columns():
    """q is the posterior of p weights under a nearly flat prior, so γ = tr (BZ(ZᵀBZ)⁻¹Zᵀ) = p."""
    X, y = drawn(lambda X: X[:, 0] - X[:, 1], normal(400, 3))
    kernel = gpytorch.kernels.LinearKernel(ard_num_dims=3).initialize(variance=1e4).requires_grad_(False)
    model = VariationalGPClassifier(kernel=kernel, mean="zero", inducing=np.eye(3), learn_inducing=False, jitter=0.0)
    # a prior of sd 100 has the share 1e-4 / 50 of the information about each weight
    assert estimated(model.fit(X, y), X, y) == pytest.approx(3.0, rel=1e-5)
    twice = estimated(model, X, y, np.full(len(y), 2.0))
    assert twice == pytest.approx(2 * estimated(model, X, y), rel=1e-12)
