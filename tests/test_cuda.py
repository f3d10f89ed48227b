"""The estimator on a GPU gives what it gives on the CPU."""

import numpy as np
import pytest
import torch

from viper import VariationalLogisticRegression
from viper.inference.rows import Block, Dense
from viper.inference.start import WITHOUT_VARIANCE
from viper.inference.steps import LARGEST_CURVATURE
from viper.inference.sums import row_sums
from viper.softplus.limit import limit

pytestmark = pytest.mark.cuda


def data(n, p, seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, p))
    y = rng.random(n) < 1 / (1 + np.exp(-X @ rng.uniform(-1, 1, p) - 0.2))
    return X, y


@pytest.mark.parametrize("columns", [3, 8])
@pytest.mark.parametrize("options", [{}, {"covariance": "diagonal"}, {"bound": "pg"}, {"terms": 5}, {"solver": "adam"}])
def test_same_posterior(options, columns):
    X, y = data(30_000, columns, 0)
    weight, offset = np.linspace(0.5, 1.5, len(X)), np.linspace(-0.3, 0.3, len(X))
    cpu, gpu = (
        VariationalLogisticRegression(device=device, random_state=0, **options).fit(X, y, weight, offset)
        for device in ("cpu", "cuda")
    )
    np.testing.assert_allclose(gpu.coef_, cpu.coef_, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(gpu.covariance_, cpu.covariance_, rtol=1e-7, atol=1e-12)
    assert gpu.elbo_ == pytest.approx(cpu.elbo_, rel=1e-11)
    np.testing.assert_allclose(
        gpu.predict_proba(X[:50], offset[:50]), cpu.predict_proba(X[:50], offset[:50]), rtol=1e-8
    )


def test_tensors_that_lie_there_and_more_columns_than_rows():
    X, y = data(50, 80, 1)
    there = torch.from_numpy(X).cuda()
    gpu, cpu = VariationalLogisticRegression().fit(there, y), VariationalLogisticRegression().fit(X, y)
    np.testing.assert_allclose(gpu.coef_, cpu.coef_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(gpu.predict_std(there), cpu.predict_std(X), rtol=1e-6)
    pytest.importorskip("arviz_stats")
    assert gpu.diagnose().effective_sample_size > 10


def test_float32_on_the_device():
    X, y = data(20_000, 20, 2)
    double, single = (
        VariationalLogisticRegression(device="cuda", dtype=dtype).fit(X, y) for dtype in ("float64", "float32")
    )
    sd = np.sqrt(np.diag(double.covariance_))
    assert np.max(np.abs(single.coef_ - double.coef_)[0] / sd[:-1]) < 1e-2


# --- the kernels of a pass, beside the plain formulas ---

FORMULAS = {
    "heat": limit(),
    "softplus": WITHOUT_VARIANCE,
    "quarter": LARGEST_CURVATURE,
}


def both_ways(formula, block, mean, factor, gram="full"):
    """Value, magnitude, gradient and curvature of a block by the kernels and without them."""
    bound = FORMULAS[formula]
    asked = {"mean": mean.cuda(), "factor": None if factor is None else factor.cuda(), "moments": bound.moments}
    asked |= {"gram": gram, "single": False, "certify": formula == "heat"}
    return row_sums(block, recipe=bound.kernel, **asked), row_sums(block, recipe=None, **asked)


def a_block(rows, columns, intercept, dtype=torch.float64, extras=True, seed=0):
    rng = np.random.default_rng(seed)
    X = torch.from_numpy(rng.standard_normal((rows, columns))).to(dtype).cuda()
    label, offset, weight = (torch.from_numpy(x).cuda() for x in rng.random((3, rows)))
    block = Block(Dense(X, intercept), label, **({"offset": offset, "weight": weight} if extras else {}))
    size = columns + intercept
    mean, factor = (torch.from_numpy(x) for x in (rng.standard_normal(size), rng.uniform(-0.02, 0.02, (size, size))))
    return block, mean, factor


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("shape", [(1, False), (1, True), (6, True), (8, False), (9, True), (10, True), (25, True)])
def test_kernels_give_the_plain_sums(formula, shape):
    """Any factor of Σ, a number of rows that fills no tile, and each formula as it is used."""
    block, mean, factor = a_block(70_001, *shape, extras=formula != "softplus")
    for gram in ("full", "none") if formula == "softplus" else ("full",):
        fused, plain = both_ways(formula, block, mean, factor if formula == "heat" else None, gram)
        for name, a, b in zip(("value", "magnitude", "gradient", "curvature"), fused, plain, strict=True):
            if (name, formula) != ("value", "quarter"):  # nobody asks for it
                torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-11, atol=1e-9)


def test_offsets_and_weights_may_be_left_out():
    for columns in (6, 25):
        block, mean, factor = a_block(5_003, columns, True, extras=False)
        for a, b in zip(*both_ways("heat", block, mean, factor), strict=True):
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-11, atol=1e-9)


def test_kernels_take_rows_as_they_lie():
    """In float32, or with other columns between them and an address that is no multiple of 16."""
    block, mean, factor = a_block(5_003, 6, True, torch.float32)
    for a, b in zip(*both_ways("heat", block, mean, factor), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-4, atol=1e-2)
    whole, mean, factor = a_block(5_003, 9, False)
    part = Block(
        Dense(whole.design.matrix[1:, 1:7], True), whole.label[1:], offset=whole.offset[1:], weight=whole.weight[1:]
    )
    for a, b in zip(*both_ways("heat", part, mean[:7], factor[:7, :7].contiguous()), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-11, atol=1e-9)


def test_sums_repeat_to_the_last_bit():
    for columns in (6, 25):
        block, mean, factor = a_block(300_000, columns, True)
        first = both_ways("heat", block, mean, factor)[0]
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(first, both_ways("heat", block, mean, factor)[0], strict=True))


def test_variances_beyond_reach_take_the_plain_formulas():
    block, mean, factor = a_block(2_000, 6, True)
    for a, b in zip(*both_ways("heat", block, mean, 100.0 * factor), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32, torch.int8])
def test_labels_that_lie_there(kind):
    X, y = data(3_000, 3, 4)
    there, labels = torch.from_numpy(X).cuda(), torch.from_numpy(y).to(kind).cuda()
    model, plain = (VariationalLogisticRegression(random_state=0).fit(there, one) for one in (labels, y))
    np.testing.assert_array_equal(model.coef_, plain.coef_)
    assert model.classes_.dtype == labels.cpu().numpy().dtype
    with pytest.raises(ValueError, match="at least two classes; got 1"):
        model.fit(there, torch.ones_like(labels))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_lie_there_are_finite(bad):
    X, y = data(3_000, 3, 4)
    there = torch.from_numpy(X).cuda()
    there[1234, 1] = bad
    with pytest.raises(ValueError, match="X must be finite; got NaN or infinity"):
        VariationalLogisticRegression().fit(there, torch.from_numpy(y).cuda())


@pytest.mark.parametrize("columns", [4, 20, 80])
def test_several_labels_there(columns):
    """By the narrow kernel, the wide ones, and the plain formulas."""
    rng = np.random.default_rng(8)
    X = rng.standard_normal((3000, columns))
    Y = (X[:, :3] + rng.logistic(size=(3000, 3)) > 0).astype(int)
    cpu, gpu = (VariationalLogisticRegression(device=device).fit(X, Y) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu.coef_, cpu.coef_, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_more_classes_there(covariance):
    rng = np.random.default_rng(9)
    X = rng.standard_normal((2000, 5))
    y = (X[:, :3] + rng.gumbel(size=(2000, 3))).argmax(1)
    cpu, gpu = (
        VariationalLogisticRegression(covariance=covariance, device=device).fit(X, y) for device in ("cpu", "cuda")
    )
    assert gpu.elbo_ == pytest.approx(cpu.elbo_, abs=1e-6)
    np.testing.assert_allclose(gpu.predict_proba(X), cpu.predict_proba(X), atol=1e-6)
