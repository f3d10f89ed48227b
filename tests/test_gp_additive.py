"""The additive kernel against GPyTorch's, and its effects against averages over all combinations of values."""

import math

import gpytorch
import numpy as np
import pandas as pd
import pytest
import torch
from tolerances import TOLERANCE

import viper
from viper.gp.additive import read_pairs
from viper.gp.classifier import VariationalGPClassifier
from viper.gp.kernels import covariance, make_kernel, variances, weight_columns
from viper.gp.model import Features, Observations

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


def few_values(n=150, seed=0):
    """Columns with few values, so that all combinations can be listed."""
    generator = np.random.default_rng(seed)
    X = np.column_stack(
        [generator.choice(levels, n) for levels in ([-2.0, 0.0, 1.0, 3.0], [0.0, 1.0], [1.0, 2.0, 5.0])]
    )
    f = np.sin(X[:, 0]) + X[:, 1] * (X[:, 2] - 2.0) - 0.5
    return X, generator.random(n) < 1 / (1 + np.exp(-f))


@pytest.fixture(scope="module", params=["linear", "constant"])
def fitted(request):
    model = VariationalGPClassifier("additive + x1:x2", mean=request.param, n_inducing=12, n_starts=1, random_state=0)
    return model.fit(*few_values())


# --- the kernel ---


def by_gpytorch(kernel):
    """The same kernel, as a sum of products of GPyTorch's."""
    total = None
    for term, s in zip(kernel.terms, kernel.outputscales.detach(), strict=True):
        part = None
        for j, k in zip(term.columns, term.places, strict=True):
            base = gpytorch.kernels.RBFKernel(active_dims=(j,)).double()
            base.lengthscale = kernel.lengthscales.detach()[k]
            part = base if part is None else part * base
        scaled = gpytorch.kernels.ScaleKernel(part).double()
        scaled.outputscale = s
        total = scaled if total is None else total + scaled
    return total


def test_the_kernel_is_a_sum_of_products():
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (7, 4))
    kernel = make_kernel("additive + x2:x0", 3)
    kernel.initialize(raw_lengthscales=torch.tensor([0.1, -0.3, 0.2, 0.5, -0.6], dtype=torch.float64))
    kernel.initialize(raw_outputscales=torch.tensor([0.3, -0.2, 0.1, 0.9], dtype=torch.float64))
    expected = by_gpytorch(kernel)(x, z).to_dense().detach()
    np.testing.assert_allclose(covariance(kernel, x, z).detach(), expected, rtol=TOLERANCE["special"])
    np.testing.assert_allclose(kernel(x, z).to_dense().detach(), expected, rtol=TOLERANCE["special"])
    for values in (variances(kernel, x), kernel(x, diag=True)):
        np.testing.assert_allclose(values.detach(), covariance(kernel, x, x).diagonal().detach(), rtol=1e-14)


def test_its_gradients_are_right():
    generator = torch.Generator().manual_seed(1)
    x, z = (torch.randn(n, 2, dtype=torch.float64, generator=generator).requires_grad_() for n in (5, 3))
    kernel = make_kernel("additive + x0:x1", 2)
    from viper.gp.additive import _Additive

    length, scale = (torch.rand(n, dtype=torch.float64, generator=generator).add(0.5).requires_grad_() for n in (4, 3))
    assert torch.autograd.gradcheck(lambda *given: _Additive.apply(*given, kernel.terms), (x, z, length, scale))


@pytest.mark.parametrize(
    ("kernel", "names", "pairs"),
    [
        ("additive", ["a"], []),
        ("additive+a:c + b:c", ["a", "b", "c"], [(0, 2), (1, 2)]),
        ("additive + `a + b`:`c:d`", ["c:d", "a + b"], [(0, 1)]),
        ("additive + body mass:age", ["age", "body mass"], [(0, 1)]),
    ],
)
def test_pairs_are_named_as_in_a_formula(kernel, names, pairs):
    assert read_pairs(kernel, names) == pairs


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("additive + a", "with pairs as in 'additive \\+ a:b'; got 'additive \\+ a'"),
        ("additive + a:b:c", "with pairs as in"),
        ("additive + a:x", "must name columns; got 'x'"),
        ("additive + a:a", "must differ and have two columns; got a:a"),
        ("additive + a:b + b:a", "must differ and have two columns; got b:a"),
    ],
)
def test_what_pairs_must_be(kernel, message):
    with pytest.raises(ValueError, match=message):
        read_pairs(kernel, ["a", "b", "c"])


# --- effects ---


def combinations(X):
    """All combinations of the columns' values, weighted as if columns were independent."""
    levels = [np.unique(X[:, j], return_counts=True) for j in range(X.shape[1])]
    grids = np.meshgrid(*(values for values, _ in levels), indexing="ij")
    weights = np.einsum("i,j,k->ijk", *(counts / len(X) for _, counts in levels))
    return np.stack([grid.reshape(-1) for grid in grids], 1), weights


def joint_posterior(model, X):
    """Mean and covariance of f at the rows of X, written out."""
    inputs = torch.from_numpy((X - model._scaler.centre) / model._scaler.scale)
    features = Features(model.model_, Observations(inputs, torch.zeros(len(X), dtype=torch.float64)))
    A = features.in_memory().features.numpy()
    induced = A[:, : len(model.inducing_points_)]
    with torch.no_grad():
        K = covariance(model.model_.kernel, inputs, inputs).numpy()
        assert weight_columns(model.model_.mean, inputs).shape[1] == A.shape[1] - induced.shape[1]
    cov = K - induced @ induced.T + A @ model.posterior_.covariance().numpy() @ A.T
    return A @ model.posterior_.mean.numpy(), cov


def averaging(weights, kept):
    """The matrix that averages over all columns but `kept`."""
    shape = weights.shape
    rows = []
    for index in np.ndindex(*(shape[j] for j in kept)):
        select = np.zeros(shape)
        where = [slice(None)] * 3
        for j, i in zip(kept, index, strict=True):
            where[j] = i
        select[tuple(where)] = weights[tuple(where)] / weights[tuple(where)].sum()
        rows.append(select.reshape(-1))
    return np.array(rows)


def test_effects_are_averages_over_combinations(fitted):
    X, _ = few_values()
    grid, weights = combinations(X)
    mean, cov = joint_posterior(fitted, grid)
    everything = weights.reshape(-1)[None]
    found = {effect.columns: effect for effect in fitted.term_effects(X)}
    assert len(found) == 4
    for columns, effect in found.items():
        kept = [int(name[1:]) for name in columns]
        T = averaging(weights, kept) - everything
        if len(kept) == 2:
            sizes = [weights.shape[j] for j in kept]
            first, second = (averaging(weights, [j]) - everything for j in kept)
            T = T - np.repeat(first, sizes[1], 0) - np.tile(second, (sizes[0], 1))
        np.testing.assert_allclose(effect.mean.reshape(-1), T @ mean, atol=1e-10)
        expected = np.sqrt(np.clip(np.diag(T @ cov @ T.T), 0.0, None))
        np.testing.assert_allclose(effect.sd.reshape(-1), expected, atol=1e-6)  # √ of rounding, 1e-13
        for j, values in zip(kept, effect.values, strict=True):
            np.testing.assert_array_equal(values, np.unique(X[:, j]))


def test_effects_add_up_and_have_average_zero(fitted):
    X, _ = few_values()
    total = np.zeros(len(X))
    for effect in fitted.term_effects():
        at = tuple(np.searchsorted(v, X[:, int(c[1:])]) for v, c in zip(effect.values, effect.columns, strict=True))
        total += effect.mean[at]
        if len(at) == 1:
            assert abs(effect.mean[at].mean()) < 1e-10
    rest = fitted.predict_latent(X)[0] - total
    assert np.ptp(rest) < 1e-9


def test_intervals_of_effects_have_their_level(fitted):
    for effect in fitted.term_effects(level=0.5):
        np.testing.assert_allclose(effect.upper - effect.lower, 2 * 0.6744897501960817 * effect.sd, rtol=1e-9)


def test_pairs_pay_where_there_are_pairs():
    X, y = few_values(400)
    plain, paired = (
        VariationalGPClassifier(kernel, n_inducing=24, n_starts=1, random_state=0).fit(X, y)
        for kernel in ("additive", "additive + x1:x2")
    )
    assert paired.elbo_ > plain.elbo_ + 2.0
    table = paired.summary()
    assert {"lengthscale", "term_sd", "relevance"} <= set(table)
    slope = table["term_sd"] / (table["lengthscale"] / paired._scaler.scale)
    np.testing.assert_allclose(table["relevance"], slope)
    assert table.attrs["output_scale"] > float((table["term_sd"] ** 2).sum())  # the rest is the pair's


def test_a_curve_is_found():
    generator = np.random.default_rng(3)
    X = generator.uniform(-2, 2, (600, 2))
    y = generator.random(600) < 1 / (1 + np.exp(-2 * np.sin(2 * X[:, 0])))
    frame = pd.DataFrame(X, columns=["wave", "noise"])
    model = VariationalGPClassifier("additive", n_inducing=30, n_starts=1, random_state=0).fit(frame, y)
    wave, noise = model.term_effects()
    assert (wave.name, noise.name) == ("wave", "noise")
    truth = 2 * np.sin(2 * wave.values[0]) - (2 * np.sin(2 * X[:, 0])).mean()
    assert ((wave.lower < truth) & (truth < wave.upper)).mean() > 0.8
    assert ((noise.lower < 0) & (noise.upper > 0)).mean() > 0.9


def test_it_is_saved_and_loaded(tmp_path, fitted):
    X, _ = few_values()
    fitted.save(tmp_path / "model.viper")
    loaded = viper.load(tmp_path / "model.viper")
    np.testing.assert_allclose(loaded.predict_proba(X), fitted.predict_proba(X), rtol=TOLERANCE["roundoff"] * 10)
    with pytest.raises(ValueError, match="needs rows to average over; got a model without its training rows"):
        loaded.term_effects()
    for mine, other in zip(loaded.term_effects(X), fitted.term_effects(), strict=True):
        np.testing.assert_allclose(mine.mean, other.mean, atol=1e-12)


def test_what_has_no_effects_of_terms():
    X, y = few_values(40)
    with pytest.raises(ValueError, match="term_effects needs kernel='additive'; got 'rbf'"):
        VariationalGPClassifier("rbf", n_inducing=5, n_starts=1).fit(X, y).term_effects()


# --- pictures ---


def test_the_picture_has_a_panel_per_term(fitted):
    X, _ = few_values()
    axes = viper.plot.terms(fitted, X)
    assert [ax.get_title(loc="left").split(",")[0] for ax in axes] == [e.name for e in fitted.term_effects()]
    assert len(viper.plot.terms(fitted, top=2)) == 2
    relevance = viper.plot.forest(fitted)
    assert "slope" in relevance.get_title(loc="left")
    matplotlib.pyplot.close("all")


def test_the_report_shows_the_terms(tmp_path):
    X, y = few_values(120)
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = VariationalGPClassifier("additive + b:c", n_inducing=10, n_starts=1, random_state=0).fit(frame, y)
    path = tmp_path / "report.html"
    viper.report.write(model, frame.assign(ill=y), "ill", path)
    text = path.read_text(encoding="utf-8")
    assert "What each column adds" in text
    assert "b:c" in text
    assert "Is the posterior right?" in text
    assert math.isfinite(model.diagnose().k_hat)
