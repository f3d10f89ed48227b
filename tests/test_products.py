"""The mean field by products with A and Aᵀ alone: the same answer as with d × d matrices, at every shape."""

import numpy as np
import pytest
import scipy.sparse
import torch
from test_solver import assert_same_posterior, data, kl, optimum

import viper
from viper import VariationalLogisticRegression
from viper.inference.kernels import compiled
from viper.inference.problem import products_are_cheaper
from viper.inference.rows import Arrays, Block, Dense, SourceTraits, Sparse
from viper.inference.sums import row_sums
from viper.softplus.limit import limit

TIGHT = 1e-13  # nats, where two fits are to agree to 1e-6 of a standard deviation


def choose(monkeypatch, products):
    monkeypatch.setattr("viper.models.fitting.products_are_cheaper", lambda source: products)


def fit(X, y, fit_options=None, **options):
    return VariationalLogisticRegression(covariance="diagonal", **options).fit(X, y, **fit_options or {})


def both(monkeypatch, X, y, fit_options=None, **options):
    """The fit by products, and with matrices."""
    found = []
    for products in (True, False):
        choose(monkeypatch, products)
        found.append(fit(X, y, fit_options, **options))
        assert found[-1].converged_
    return found


SHAPES = {"tall": (300, 8), "square": (60, 60), "wide": (40, 150)}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_and_matrices_agree(monkeypatch, shape, sparse):
    """With weights, offset and unequal priors."""
    n, p = SHAPES[shape]
    X, y = data(n, p, 21)
    X[np.abs(X) < 0.3] = 0.0
    rng = np.random.default_rng(0)
    given = {"sample_weight": rng.uniform(0.5, 2.0, n), "offset": rng.normal(size=n)}
    options = {"prior_scale": rng.uniform(0.3, 2.0, p), "prior_mean": rng.normal(size=p)}
    one, other = both(monkeypatch, scipy.sparse.csr_array(X) if sparse else X, y, given, tol=TIGHT, **options)
    assert_same_posterior(one, other)
    assert one.elbo_ == pytest.approx(other.elbo_, rel=1e-12)
    assert one.elbo_bound_ <= one.elbo_


@pytest.mark.parametrize("shape", SHAPES)
def test_the_default_ends_at_the_independent_optimum(monkeypatch, shape):
    n, p = SHAPES[shape]
    X, y = data(n, p, 3)
    X /= np.sqrt(p)
    choose(monkeypatch, True)
    model = fit(X, y, fit_intercept=False)
    exact = optimum(X, y, 1.0, diagonal=True)
    assert kl(model.posterior_.mean.numpy(), model.covariance_, *exact) < 1e-8


def test_a_prior_covariance(monkeypatch):
    X, y = data(80, 6, 5)
    root = np.random.default_rng(1).standard_normal((6, 6))
    assert_same_posterior(*both(monkeypatch, X, y, tol=TIGHT, prior_scale=root @ root.T + np.eye(6)))


@pytest.mark.parametrize("options", [{"bound": "pg"}, {"terms": 5}, {"bound": "mc", "samples": 64, "random_state": 0}])
def test_other_bounds(monkeypatch, options):
    X, y = data(120, 5, 6)
    assert_same_posterior(*both(monkeypatch, X, y, **options), within=1e-5)


def test_columns_that_are_nearly_the_same(monkeypatch):
    """Quasi-Newton steps are many; the matrices take over, at the same optimum."""
    rng = np.random.default_rng(2)
    X = rng.standard_normal((400, 1)) + 1e-3 * rng.standard_normal((400, 12))
    y = (X[:, 0] + rng.logistic(size=400) > 0).astype(int)
    assert_same_posterior(*both(monkeypatch, X, y, tol=TIGHT, prior_scale=30.0), within=1e-5)


def test_units_do_not_matter(monkeypatch):
    """Columns times s with prior scales over s: coefficients over s, the same evidence."""
    X, y = data(50, 70, 7)
    s = 10.0 ** np.random.default_rng(0).uniform(-3, 3, 70)
    choose(monkeypatch, True)
    plain, scaled = fit(X, y, tol=TIGHT), fit(X * s, y, tol=TIGHT, prior_scale=1.0 / s)
    sd = np.sqrt(plain.posterior_.variance.numpy())[:-1]
    assert np.abs(scaled.coef_[0] * s - plain.coef_[0]).max() < 1e-6 * sd.min()
    np.testing.assert_allclose(np.sqrt(scaled.posterior_.variance.numpy())[:-1] * s, sd, rtol=1e-6)
    assert scaled.elbo_ == pytest.approx(plain.elbo_, rel=1e-11)


def test_every_source(monkeypatch, tmp_path):
    X, y = data(500, 9, 8)
    choose(monkeypatch, True)
    here = fit(X, y, tol=TIGHT)
    mapped = np.memmap(tmp_path / "rows", dtype=float, mode="w+", shape=X.shape)
    mapped[:] = X
    blocks = viper.Blocks(lambda: ((X[i : i + 90], y[i : i + 90]) for i in range(0, 500, 90)))
    for given in ((mapped, y), (blocks, None)):
        assert_same_posterior(here, fit(*given, tol=TIGHT))


def test_a_warm_start_and_a_chosen_scale(monkeypatch):
    X, y = data(150, 6, 9)
    one, other = both(monkeypatch, X, y, prior_scale="auto")
    assert one.prior_scale_ == pytest.approx(other.prior_scale_, rel=1e-4)  # flat at the optimum


def test_many_rows_begin_on_some_of_them(monkeypatch):
    X, y = data(30_000, 4, 10)
    one, other = both(monkeypatch, X, y, tol=TIGHT)
    assert_same_posterior(one, other)


def test_entries_of_a_sparse_matrix_that_are_given_twice_add_up():
    X, y = data(60, 3, 11)
    twice = scipy.sparse.csr_matrix(
        (np.concatenate([0.25 * X, 0.75 * X], 1).ravel(), np.tile(np.arange(3), 120), np.arange(0, 361, 6)), X.shape
    )
    assert twice.nnz == 2 * X.size
    for intercept in (False, True):
        assert_same_posterior(fit(X, y, fit_intercept=intercept), fit(twice, y, fit_intercept=intercept))
    assert twice.nnz == 2 * X.size  # left as it was given


# --- the choice ---


def source(rows, columns, where="memory"):
    class Shape:
        traits = SourceTraits(where)

    Shape.rows, Shape.dimension = rows, columns
    return Shape


@pytest.mark.parametrize(
    ("rows", "columns", "where", "products"),
    [
        (1_000_000, 25, "memory", False),
        (20_000, 300, "memory", True),
        (300, 3000, "memory", True),
        (20_000, 300, "stream", False),  # reading costs more than solving
        (20_000, 3000, "stream", True),
        (100, 20_000, "cluster", True),  # no matrix of that size
    ],
)
def test_the_choice_is_by_cost(rows, columns, where, products):
    assert products_are_cheaper(source(rows, columns, where)) == products


# --- the products ---


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 33, 100])
def test_wide_rows_as_they_are(rows, intercept):
    """The compiled halves of a pass, and the whole, against the plain formulas."""
    rng = np.random.default_rng(rows)
    X = torch.from_numpy(rng.standard_normal((rows, 131)))[:, :130]  # with gaps between the rows
    design, d = Dense(X, intercept), 130 + intercept
    mean, v, g, h = (torch.from_numpy(rng.random(k)) for k in (d, d, rows, rows))
    A = torch.cat([X, torch.ones(rows, 1)], 1)[:, :d]
    if compiled.is_compiled():
        theta, tau2 = compiled.wide_latent(design, mean, v)
        slope, diagonal = compiled.wide_gather(design, g, h)
        for found, exact in ((theta, A @ mean), (tau2, A**2 @ v), (slope, A.T @ g), (diagonal, (A**2).T @ h)):
            torch.testing.assert_close(found, exact, rtol=1e-13, atol=1e-13)
    block = Block(design, g.round(), offset=h, weight=h, residual=g)
    for spread in (v / d, 10.0 * v):  # within the reach of the compiled nodes, and beyond
        given = {"mean": mean / d, "factor": spread, "moments": limit().moments, "single": False, "certify": True}
        fast = row_sums(block, recipe=limit().kernel, gram="diagonal", **given)
        plain = row_sums(block, recipe=None, gram="full", **given)
        for one, other in zip(fast, [*plain[:3], plain[3].diagonal()], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("intercept", [False, True])
def test_sparse_products_are_dense_products(intercept):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((30, 7)) * (rng.random((30, 7)) < 0.4)
    one, other = Dense(torch.from_numpy(X), intercept), Sparse(scipy.sparse.csr_array(X), intercept)
    d = 7 + intercept
    v, F, w = (torch.from_numpy(rng.random(shape)) for shape in (d, (d, d), 30))
    pairs = [(m.project(v), m.project(F), m.spread(v), m.spread(F), m.pull(w), m.gram(w)) for m in (one, other)]
    pairs = [
        (*found, m.gram_diagonal(w), m.gram_product(w, v), m.peaks())
        for found, m in zip(pairs, (one, other), strict=True)
    ]
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(one.gram_product(w, v), one.gram(w) @ v, rtol=1e-12, atol=1e-12)


def test_blocks_of_sparse_rows_are_views():
    X = scipy.sparse.random(50, 20, 0.2, format="csr", random_state=0)
    rows = Arrays(X, torch.zeros(50, dtype=torch.float64), intercept=True, block_rows=16)
    parts = [block.design.matrix for block in rows.blocks()]
    assert (scipy.sparse.vstack(parts) != X).nnz == 0
    assert all(np.shares_memory(part.data, X.data) for part in parts)
