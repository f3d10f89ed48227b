"""New rows for a fitted Gaussian process, against a fit to all rows with the same hyperparameters."""

import numpy as np
import pytest
import torch
from tolerances import TOLERANCE

import viper
from viper.data.blocks import Blocks
from viper.gp.classifier import VariationalGPClassifier
from viper.gp.model import Features, Observations
from viper.gp.profile import identity_prior
from viper.inference.newton import newton
from viper.inference.problem import Problem
from viper.inference.rows import Arrays, joined_rows
from viper.softplus.limit import limit

GAIN = 1e-3  # nats by which a refit may be better


def rows(n, seed=0, low=-2.0, high=2.0):
    generator = np.random.default_rng(seed)
    X = generator.uniform(low, high, (n, 2))
    f = 2 * np.sin(2 * X[:, 0]) + X[:, 1]
    return X, np.where(generator.random(n) < 1 / (1 + np.exp(-f)), "yes", "no")


def classifier(**options):
    return VariationalGPClassifier(**{"n_inducing": 25, "n_starts": 1, "random_state": 0, **options})


def best_elbo(model, X, y, **given):
    """The ELBO of all rows at their best q, for the kernel, mean and inducing points of a model."""
    label = torch.from_numpy((y == model.classes_[1]).astype(float))
    inputs = torch.from_numpy((X - model._scaler.centre) / model._scaler.scale)
    tensors = {name: torch.from_numpy(x) for name, x in given.items()}
    features = Features(model.model_, Observations(inputs, label, **tensors))
    return newton(Problem(features, identity_prior(features), limit()), tol=1e-12).objective


@pytest.fixture(scope="module")
def old():
    return rows(150)


@pytest.mark.parametrize("mean", ["linear", "zero"])
def test_new_rows_are_as_good_as_a_refit(old, mean):
    X, y = rows(60, 1)
    model = classifier(mean=mean).fit(*old)
    kernel = {name: x.clone() for name, x in model.model_.kernel.state_dict().items()}
    for part in (slice(0, 1), slice(1, 20), slice(20, 60)):
        model.partial_fit(X[part], y[part])
    both = np.concatenate([old[0], X]), np.concatenate([old[1], y])
    assert model.elbo_ == pytest.approx(best_elbo(model, *both), abs=TOLERANCE["converged"])
    assert model.elbo(*both) == pytest.approx(model.elbo_, rel=1e-9)
    assert all(torch.equal(x, kernel[name]) for name, x in model.model_.kernel.state_dict().items())
    assert model.diagnose().close


def test_weights_and_offsets_are_those_of_a_refit(old):
    (X, y), new = old, rows(30, 2)
    generator = np.random.default_rng(0)
    weight, offset = generator.integers(1, 4, 150).astype(float), generator.normal(size=30)
    model = classifier().fit(X, y, sample_weight=weight).partial_fit(*new, offset=offset)
    expected = best_elbo(
        model,
        np.concatenate([X, new[0]]),
        np.concatenate([y, new[1]]),
        weight=np.r_[weight, np.ones(30)],
        offset=np.r_[np.zeros(150), offset],
    )
    assert model.elbo_ == pytest.approx(expected, abs=TOLERANCE["converged"])


def test_rows_outside_get_inducing_points(old):
    X, y = rows(40, 3, 3.0, 5.0)
    model = classifier().fit(*old)
    points = len(model.inducing_points_)
    model.partial_fit(X, y)
    added = model.inducing_points_[points:]
    assert len(added) > 0
    assert (added > 2.9).all()  # all at new rows
    assert model.diagnose(X, y, draws=100).residual_cost < 0.1
    assert model.posterior_.mean.shape == (len(model.inducing_points_) + 3,)  # plus the weights of the linear mean
    both = np.concatenate([old[0], X]), np.concatenate([old[1], y])
    assert model.elbo_ == pytest.approx(best_elbo(model, *both), abs=TOLERANCE["converged"])
    more = len(model.inducing_points_)
    assert len(model.partial_fit(old[0][:40], old[1][:40]).inducing_points_) == more  # earlier rows are not outside


def test_a_model_from_a_file_goes_on_from_its_posterior(old, tmp_path):
    X, y = rows(20, 5)
    model = classifier().fit(*old)
    model.save(tmp_path / "model.viper")
    loaded = viper.load(tmp_path / "model.viper").partial_fit(X, y)
    model.partial_fit(X, y)
    both = np.concatenate([old[0], X]), np.concatenate([old[1], y])
    np.testing.assert_allclose(loaded.predict_latent(X)[0], model.predict_latent(X)[0], atol=0.1)
    # ELBO of all rows under N(0, I), not under the prior of the new rows
    kl = 0.5 * float(loaded.posterior_.covariance().trace() + loaded.posterior_.mean.square().sum())
    kl -= 0.5 * len(loaded.posterior_.mean) + float(loaded.posterior_.log_scale)
    assert model.elbo_ - (loaded.elbo(*both) + loaded.kl_ - kl) == pytest.approx(0.0, abs=20 * GAIN)
    loaded.save(tmp_path / "again.viper")
    again = viper.load(tmp_path / "again.viper")
    assert again.diagnose(X, y) == loaded.diagnose(X, y)
    assert again.diagnose(X, y).close


def test_the_first_call_is_a_fit(old):
    X, y = old
    online, fitted = classifier().partial_fit(X, y), classifier().fit(X, y)
    np.testing.assert_array_equal(online.predict_proba(X), fitted.predict_proba(X))
    one = classifier().partial_fit(X[y == "no"], y[y == "no"], classes=["no", "yes"])
    one.partial_fit(X[y == "yes"], y[y == "yes"])
    assert list(one.classes_) == ["no", "yes"]
    assert one.score(X, y) > 0.6  # its kernel was learned from one class


def test_what_it_refuses(old):
    X, y = old
    with pytest.raises(ValueError, match="partial_fit needs class_weight as a dictionary; got 'balanced'"):
        classifier(class_weight="balanced").partial_fit(X, y)
    model = classifier(class_weight={"yes": 2.0}).partial_fit(X, y).partial_fit(X, y)
    np.testing.assert_array_equal(model.class_weight_, [1.0, 2.0])
    with pytest.raises(ValueError, match="perhaps"):
        model.partial_fit(X[:1], ["perhaps"])
    with pytest.raises(ValueError, match="2 features"):
        model.partial_fit(X[:, :1], y)


def test_rows_in_blocks_update_as_rows_in_memory(old):
    X, y = rows(90, 6)
    blocks = Blocks(lambda: iter([(X[:50], y[:50]), (X[50:], y[50:])]))
    stream, memory = (classifier().fit(*old).partial_fit(*new) for new in ((blocks,), (X, y)))
    assert stream.elbo_ == pytest.approx(memory.elbo_, abs=TOLERANCE["converged"])
    stream.partial_fit(*rows(10, 7))
    memory.partial_fit(*rows(10, 7))
    np.testing.assert_allclose(stream.predict_proba(X), memory.predict_proba(X), atol=1e-6)


def test_joined_rows_add_up():
    generator = np.random.default_rng(0)
    parts = [
        Arrays(generator.normal(size=(n, 3)), torch.ones(n, dtype=torch.float64), weight=weight)
        for n, weight in ((4, None), (3, torch.full((3,), 2.0, dtype=torch.float64)))
    ]
    both = joined_rows(*parts)
    assert both.rows == 7
    np.testing.assert_array_equal(both.in_memory().weight, [1, 1, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(both.in_memory().features, np.concatenate([part.features for part in parts]))
