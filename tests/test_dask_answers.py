"""Fits and predictions on Dask collections: the same answer wherever the partitions are."""

import sys
from contextlib import contextmanager
from functools import partial

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch

pytest.importorskip("distributed")

import cloudpickle
import dask
import dask.array as da
import dask.dataframe as dd
import joblib
from dask_workers import (
    FRAME,
    NAMES,
    OFFSET,
    SAME,
    UNEVEN,
    WEIGHT,
    N,
    X,
    Y,
    arrays,
    assert_same,
    classifier,
    cut,
    frames,
    in_memory,
    partitioned,
)
from sklearn.model_selection import cross_val_score

import viper
from viper.data.dask import partitions
from viper.data.dask.partitions import Partitions
from viper.inference.rows import Arrays

# the workers cannot import this file
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def sparse():
    chunks = da.from_array(X, chunks=(9_000, 5)).map_blocks(scipy.sparse.csr_matrix)
    return [chunks, *arrays(9_000)[1:]]


def mixed():
    """A DataFrame with labels in other partitions, weights in memory and a number as offset."""
    return [frames()[0], arrays(5_000)[1], WEIGHT, 0.25]


LAYOUTS = {
    "even": partial(arrays, X=(7_000, 5)),
    "uneven, one empty, columns cut, all different": partial(arrays, X=(UNEVEN, 2), y=5_000, w=N, o=(UNEVEN,)),
    "frame": frames,
    "sorted: partitions of one class": None,
    "sparse": sparse,
    "mixed": mixed,
}


def by_class():
    order = np.argsort(Y, kind="stable")
    return [da.from_array(x[order], chunks=6_000) for x in (X, Y, WEIGHT, OFFSET)]


LAYOUTS["sorted: partitions of one class"] = by_class


# --- the same answer ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_posterior_is_that_of_the_rows_in_memory(layout, somewhere):
    given = LAYOUTS[layout]()
    model = classifier().fit(*given)
    assert_same(model, classifier().fit(*in_memory(given)))
    assert model.elbo(*given) == pytest.approx(model.elbo_, rel=SAME)


@pytest.mark.parametrize(
    "options",
    [
        {"covariance": "diagonal"},
        {"bound": "viper", "terms": 5},
        {"bound": "mc", "samples": 100},
        {"bound": "pg", "fit_intercept": False},
        {"prior_scale": "auto"},
        {"solver": "adam", "max_iter": 5, "tol": 1.0},
    ],
    ids=str,
)
def test_every_option_works_on_workers(options, client):
    few = slice(0, 2_000)
    given = da.from_array(X[few], chunks=(700, 5)), da.from_array(Y[few], chunks=700)
    # the last of the fits of "auto" begins at its optimum, where rounding decides whether there is a step to take
    way = options != {"prior_scale": "auto"}
    assert_same(classifier(**options).fit(*given), classifier(**options).fit(X[few], Y[few]), way)


def test_float32(client):
    given = arrays(X=(7_000, 5))
    single, double = classifier(dtype="float32").fit(*given), classifier().fit(*given)
    distance = (single.posterior_.mean - double.posterior_.mean).abs() / double.posterior_.variance.sqrt()
    assert distance.max() < 1e-3  # standard deviations: what float32 products allow


def test_a_checkpoint_of_other_rows_is_refused(somewhere, monkeypatch, tmp_path):
    """Different rows with the same number, width and names are refused; the same rows in other partitions are not."""
    original, made = Partitions.reduce, []

    def reduce(source, function):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(1)
        return original(source, function)

    rows = arrays()[:2]
    expected = classifier().fit(*rows).coef_
    with monkeypatch.context() as patched:
        patched.setattr(Partitions, "reduce", reduce)
        with pytest.raises(KeyboardInterrupt):
            classifier().fit(*rows, checkpoint=tmp_path / "fit")
    for other in [(da.from_array(X + 0.1, chunks=7_000), rows[1]), (rows[0], da.from_array(Y[::-1], chunks=7_000))]:
        with pytest.raises(ValueError, match=r"checkpoint must belong to the same fit; got .*'first rows'"):
            classifier().fit(*other, checkpoint=tmp_path / "fit")
    resumed = classifier().fit(*arrays(chunks=5_000)[:2], checkpoint=tmp_path / "fit")
    np.testing.assert_allclose(resumed.coef_, expected, rtol=SAME)
    assert not (tmp_path / "fit").exists()


def test_a_second_batch_continues_the_first(somewhere):
    half = N // 2
    parts = [[x[:half] for x in (X, Y, WEIGHT, OFFSET)], [x[half:] for x in (X, Y, WEIGHT, OFFSET)]]
    lazily, plainly = classifier(), classifier()
    for X_, y, weight, offset in parts:
        plainly.partial_fit(X_, y, sample_weight=weight, offset=offset)
        cut = [da.from_array(x, chunks=5_000) for x in (X_, y, weight, offset)]
        lazily.partial_fit(cut[0], cut[1], sample_weight=cut[2], offset=cut[3])
    assert_same(lazily, plainly)


def test_subsets_are_those_of_arrays(monkeypatch, somewhere):
    source = partitioned(cut(X, (UNEVEN, 5)))
    here = Arrays(torch.from_numpy(X), torch.zeros(N, dtype=torch.bool))
    for limit_ in (partitions.IN_MEMORY, 0):
        monkeypatch.setattr(partitions, "IN_MEMORY", limit_)
        subset = source.sample(500, np.random.default_rng(1))
        assert isinstance(subset, Arrays if limit_ else Partitions)
        found = subset.in_memory() if isinstance(subset, Partitions) else subset
        assert torch.equal(found.features, here.sample(500, np.random.default_rng(1)).features)


def test_a_common_origin_is_made_once(somewhere, tmp_path):
    """Otherwise rows and labels that cannot be reproduced would not match."""

    def load(i):
        with (tmp_path / "loads").open("a") as file:
            file.write("x")
        return FRAME[i * 6_000 : (i + 1) * 6_000].sample(frac=1.0)  # in a different order each time

    frame = dd.from_map(load, range(4))
    model = classifier().fit(frame[NAMES], frame["y"])
    assert (tmp_path / "loads").stat().st_size <= 5  # four, and one to find the columns
    np.testing.assert_allclose(model.coef_, classifier().fit(X, Y).coef_, atol=1e-6)


def test_more_coefficients_than_rows(somewhere):
    wide, y = np.random.default_rng(5).normal(size=(30, 50)), np.arange(30) % 2
    model = classifier().fit(da.from_array(wide, chunks=(7, 20)), da.from_array(y, chunks=7))
    np.testing.assert_allclose(model.posterior_.mean, classifier().fit(wide, y).posterior_.mean, atol=SAME)


# --- predictions ---


@contextmanager
def nothing_computed():
    def refuse(*_, **__):
        raise AssertionError("this was to be lazy")

    with dask.config.set(scheduler=refuse):
        yield


METHODS = ["predict", "predict_proba", "predict_std", "predict_interval", "decision_function", "predict_latent"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", [arrays, partial(arrays, X=(UNEVEN, 3), o=4_000), frames])
def test_predictions_are_lazy(layout, method):
    collection, _, _, offset = layout()
    names = NAMES if layout is frames else None
    model = classifier().fit(X if names is None else FRAME[NAMES], Y)
    rows = FRAME[NAMES] if names else X
    expected = getattr(model, method)(rows, offset=OFFSET)
    with nothing_computed():
        found = getattr(model, method)(collection, offset=offset)
    pairs = zip(found, expected, strict=True) if method == "predict_latent" else [(found, expected)]
    for lazy, now in pairs:
        assert isinstance(lazy, da.Array)
        assert (lazy.dtype, lazy.ndim, lazy.shape[1:]) == (now.dtype, now.ndim, now.shape[1:])
        if names is None:
            assert lazy.shape == now.shape
        if now.dtype.kind == "f":
            np.testing.assert_allclose(lazy.compute(), now, rtol=1e-13, atol=1e-15)  # the last block is shorter
        else:
            assert (lazy.compute() == now).all()


def test_predictions_are_written_partition_by_partition(somewhere, tmp_path):
    model = classifier().fit(X, Y)
    rows, _, _, offset = arrays(X=(UNEVEN, 3), o=4_000)
    assert model.predict_to(rows, tmp_path / "lazy.parquet", offset=offset) == N
    model.predict_to(X, tmp_path / "plain.parquet", offset=OFFSET)
    lazy, plain = (pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("lazy", "plain"))
    pd.testing.assert_frame_equal(lazy, plain, rtol=1e-13, atol=1e-15)


def test_corrected_predictions_of_collections():
    corrected = classifier().fit(X, Y).corrected(draws=200)
    rows, _, _, offset = arrays(X=(UNEVEN, 3), o=4_000)
    for method in ("predict_proba", "predict_interval", "predict_std"):
        now = getattr(corrected, method)(X, offset=OFFSET)
        np.testing.assert_allclose(getattr(corrected, method)(rows, offset=offset), now, rtol=1e-12)


def test_predictions_on_workers(client):
    given = frames()
    model = classifier().fit(*given)
    assert model.feature_names_in_.tolist() == NAMES
    expected = classifier().fit(FRAME[NAMES], Y, WEIGHT, OFFSET)
    np.testing.assert_allclose(model.predict_proba(given[0]).compute(), expected.predict_proba(FRAME[NAMES]), atol=SAME)
    assert model.score(given[0], given[1], given[2]) == pytest.approx(expected.score(FRAME[NAMES], Y, WEIGHT), rel=SAME)


@pytest.mark.parametrize("draws", [400, 4000, 12_000])
def test_diagnosis_on_workers(client, draws):
    """Draws small enough to travel with the tasks, and draws that are sent ahead."""
    given = arrays()
    model = classifier().fit(*given)
    assert model.diagnose(draws=draws).k_hat == pytest.approx(
        classifier().fit(*in_memory(given)).diagnose(draws=draws).k_hat, abs=1e-4
    )


# --- Gaussian processes ---


@pytest.fixture(scope="module")
def curve():
    """Rows of a nonlinear function, more than the search uses."""
    rng = np.random.default_rng(2)
    x = rng.uniform(-2, 2, (50_000, 1))
    return x, rng.random(50_000) < 1 / (1 + np.exp(-3 * np.sin(2 * x[:, 0])))


def test_a_gaussian_process_is_that_of_a_stream(curve, client):
    x, y = curve
    options = {"n_inducing": 8, "n_starts": 1, "max_iter": 8, "tol": 10.0, "random_state": 1}
    lazy = da.from_array(x, chunks=(9_000, 1)), da.from_array(y, chunks=20_000)
    there = viper.VariationalGPClassifier(**options).fit(*lazy)
    here = viper.VariationalGPClassifier(**options).fit(viper.Blocks(lambda: [(x, y)]))
    np.testing.assert_allclose(there.posterior_.mean, here.posterior_.mean, rtol=1e-8, atol=1e-8)
    assert there.elbo_ == pytest.approx(here.elbo_, rel=SAME)
    assert there.elbo(*lazy) == pytest.approx(there.elbo_, rel=SAME)
    with nothing_computed():
        lazily = there.predict_proba(lazy[0])
    np.testing.assert_allclose(lazily[:500].compute(), there.predict_proba(x[:500]), rtol=1e-12)
    assert there.score(*lazy) == there.score(x, y)


def test_a_gaussian_process_takes_its_options_there(curve, client):
    """An additive kernel, class weights, new rows and the diagnosis agree with those for the same rows in blocks."""
    x, y = curve
    both = np.column_stack([x, x[::-1]])
    options = {"kernel": "additive + x0:x1", "class_weight": {True: 2.0}, "n_inducing": 8, "n_starts": 1}
    options |= {"max_iter": 4, "tol": 10.0, "random_state": 1}
    lazy = da.from_array(both, chunks=(9_000, 2)), da.from_array(y, chunks=20_000)
    there = viper.VariationalGPClassifier(**options).fit(*lazy)
    here = viper.VariationalGPClassifier(**options).fit(viper.Blocks(lambda: [(both, y)]))
    assert there.elbo_ == pytest.approx(here.elbo_, rel=SAME)
    found, expected = (model.diagnose(draws=200) for model in (there, here))
    assert found.log_evidence == pytest.approx(expected.log_evidence, rel=1e-8)
    assert found.residual_cost == pytest.approx(expected.residual_cost, rel=1e-6)
    for mine, other in zip(there.term_effects(both[:500]), here.term_effects(both[:500]), strict=True):
        np.testing.assert_allclose(mine.mean, other.mean, atol=1e-6)
    there.partial_fit(*(part[:2_000] for part in lazy))
    here.partial_fit(both[:2_000], y[:2_000])
    assert there.elbo_ == pytest.approx(here.elbo_, rel=SAME)


# --- joblib ---


def test_estimators_travel_to_joblib_on_dask(client):
    few = slice(0, 1_000)
    with joblib.parallel_config(backend="dask"):
        there = cross_val_score(classifier(), X[few], Y[few], cv=3)
    assert there.tolist() == cross_val_score(classifier(), X[few], Y[few], cv=3).tolist()
