"""The mean field by products with A and Aᵀ alone: the same answer as with d × d matrices, at every shape."""

import numpy as np
import pytest
import scipy.sparse
import torch
from test_solver import assert_same_posterior, data, kl, optimum

import viper
from viper import VariationalLogisticRegression
from viper.inference.anderson import whitened
from viper.inference.kernels import compiled, library
from viper.inference.problem import divergence, gaussian, products_are_cheaper
from viper.inference.rows import Arrays, Block, Dense, SourceTraits, Sparse
from viper.inference.sums import row_sums
from viper.softplus.limit import limit

TIGHT = 1e-14  # nats, where two fits are to agree to 1e-6 of the smallest standard deviation


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
    """They take many products, so matrices take over, with the same optimum."""
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
    if library.is_compiled():
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


# --- the full family on wide data ---


def test_a_triangular_factor_takes_half_the_operations():
    rng = np.random.default_rng(0)
    for intercept in (False, True):
        design, d = Dense(torch.from_numpy(rng.standard_normal((40, 300))), intercept), 300 + intercept
        upper = torch.from_numpy(rng.standard_normal((d, d))).triu()
        plain = design.project(upper).square().sum(1)
        torch.testing.assert_close(design.spread(upper), plain, rtol=1e-12, atol=0)
        torch.testing.assert_close(design.spread(upper.T.contiguous()), design.project(upper.T).square().sum(1))
        weights = torch.from_numpy(rng.random(40))
        exact = design.pull(torch.diag(weights) @ design.pull(torch.eye(40, dtype=torch.float64)).T)
        for some in (weights, -weights):
            torch.testing.assert_close(design.gram(some), exact * some.sign()[0], rtol=1e-12, atol=1e-12)


def test_the_factor_of_a_large_precision():
    root = torch.from_numpy(np.random.default_rng(0).standard_normal((300, 400)))
    q = gaussian(root[:, 0], root @ root.T)
    torch.testing.assert_close(q.factor @ q.factor.T, torch.linalg.inv(q.precision), rtol=1e-9, atol=1e-12)
    assert not q.factor.tril(-1).any()


def test_random_directions_measure_a_step():
    rng = np.random.default_rng(0)
    root = torch.from_numpy(rng.standard_normal((300, 400)))
    old = gaussian(root[:, 0], root @ root.T)
    new = gaussian(old.mean + 1e-4 * root[:, 1], old.precision + 1e-3 * root[:, :50] @ root[:, :50].T)
    residual = whitened(old, new)
    assert 0.5 * float(residual @ residual) == pytest.approx(divergence(old, new), rel=0.1)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_start_from_the_mean_field_ends_where_the_mode_does(monkeypatch, sparse):
    X, y = data(120, 40, 12)
    X[np.abs(X) < 1.0] = 0.0
    rows = scipy.sparse.csr_array(X) if sparse else X
    mode = VariationalLogisticRegression(tol=TIGHT).fit(rows, y)
    monkeypatch.setattr("viper.inference.start.mean_field_helps", lambda problem: True)
    assert_same_posterior(mode, VariationalLogisticRegression(tol=TIGHT).fit(rows, y))


def test_sparse_rows_keep_their_columns_unless_they_are_far_fewer():
    X = scipy.sparse.random(290, 300, 0.02, format="csr", random_state=0)
    y = np.arange(290) % 2
    model = VariationalLogisticRegression()
    assert type(model.fit(X, y).posterior_).__name__ == "Full"
    dense = VariationalLogisticRegression().fit(X.toarray(), y)
    assert type(dense.posterior_).__name__ == "LowRank"
    assert_same_posterior(model, dense, within=1e-4)
    assert model.elbo_ == pytest.approx(dense.elbo_, rel=1e-10)
    assert type(VariationalLogisticRegression().fit(X[:100], y[:100]).posterior_).__name__ == "LowRank"


def test_a_covariance_that_does_not_fit_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr("viper.models.fitting.machine_memory", lambda: 1e6)
    X, y = data(400, 150, 13)
    monkeypatch.setattr("viper.models.fitting.run_solver", None)
    with pytest.raises(ValueError, match=r"must fit in memory; got 151 coefficients and 400 rows.*'diagonal'"):
        VariationalLogisticRegression().fit(X, y)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_sparse_rows_in_one_reading(intercept, kind):
    """The compiled halves of a pass over a slice of sparse rows; the plain formulas handle other index types."""
    X = scipy.sparse.random(40, 30, 0.2, format="csr", random_state=0)
    X.indices, X.indptr = X.indices.astype(kind), X.indptr.astype(kind)
    part = next(Arrays(X, torch.zeros(40).double(), intercept=intercept, block_rows=25).blocks()).design
    rng = np.random.default_rng(0)
    d = 30 + intercept
    mean, v, g, h = (torch.from_numpy(rng.random(k)) for k in (d, d, 25, 25))
    found = compiled.wide_latent(part, mean, v), compiled.wide_gather(part, g, h)
    if kind is np.int64 or not library.is_compiled():
        assert found == (None, None)
        return
    A = torch.from_numpy(np.column_stack([X[:25].toarray(), np.ones(25)])[:, :d])
    exact = (A @ mean, A**2 @ v), (A.T @ g, (A**2).T @ h)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)
