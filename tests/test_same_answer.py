"""One algorithm, one answer: wherever the rows are kept, the posterior and the steps to it are the same."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from tolerances import TOLERANCE

import viper
from viper import VariationalLogisticRegression
from viper.data import stream

pyarrow = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")
ROWS, WIDTH = 60_000, 17  # above what starts coarse stages, float32 curvatures and the step from a subset's mode
NAMES = [f"x{j}" for j in range(WIDTH)]
CASES = {
    "full": ("float64", {}),
    "diagonal": ("float64", {"covariance": "diagonal"}),
    "polya-gamma": ("float64", {"bound": "pg"}),
    "float32 rows": ("float32", {}),
    "float32 products": ("float64", {"dtype": "float32"}),
}


@cache
def made(dtype):
    """A frame of features x0, x1, ..., labels "no" and "yes", weights w and offsets o."""
    rng = np.random.default_rng(7)
    X = rng.standard_normal((ROWS, WIDTH)).astype(dtype)
    frame = pd.DataFrame(X, columns=NAMES)
    f = X @ rng.uniform(-1, 1, WIDTH) - 0.3
    frame["w"], frame["o"] = rng.uniform(0.5, 2.0, ROWS), rng.uniform(-0.5, 0.5, ROWS)
    frame["y"] = np.where(rng.random(ROWS) < 1 / (1 + np.exp(-f - frame["o"])), "yes", "no")
    return frame


def split(frame):
    return frame[NAMES].to_numpy(), frame["y"].to_numpy(), frame["w"].to_numpy(), frame["o"].to_numpy()


def in_odd_blocks(frame, folder):
    """Blocks of random sizes, some of them empty."""

    def blocks():
        rng, start = np.random.default_rng(1), 0
        while start < len(frame):
            stop = start + int(rng.choice([0, 1, 7, 999, 5000, 40_000]))
            yield split(frame[start:stop])
            start = stop

    return (viper.Blocks(blocks, names=NAMES),)


def as_memory_map(frame, folder):
    X, y, weight, offset = split(frame)
    np.save(folder / "X.npy", np.ascontiguousarray(X))
    np.save(folder / "y.npy", y == "yes")
    return np.load(folder / "X.npy", mmap_mode="r"), np.load(folder / "y.npy", mmap_mode="r"), weight, offset


def as_parquet(frame, folder):
    """Three files of uneven size, with row groups that fit no block."""
    for i, (start, stop) in enumerate([(0, 9), (9, 41_001), (41_001, ROWS)]):
        frame[start:stop].to_parquet(folder / f"part-{i}.parquet", row_group_size=3001)
    return (viper.Files(folder / "*.parquet", target="y", weight="w", offset="o"),)


def as_arrow(frame, folder):
    frame.to_feather(folder / "rows.arrow", chunksize=10_007)
    return (viper.Files(folder, target="y", weight="w", offset="o"),)


def as_csv(frame, folder):
    csv.write_csv(pyarrow.Table.from_pandas(frame), folder / "rows.csv")
    return (viper.Files(folder / "rows.csv", target="y", weight="w", offset="o"),)


KEPT = {kind.__name__: kind for kind in (in_odd_blocks, as_memory_map, as_parquet, as_arrow, as_csv)}


def matters(kept, case):
    """Whether to test this case; text is slow to read, and hardly any code after reading depends on it."""
    return kept != "as_csv" or case in ("full", "float32 rows")


@cache
def in_memory(case):
    dtype, options = CASES[case]
    frame = made(dtype)
    return VariationalLogisticRegression(random_state=3, **options).fit(frame[NAMES], *split(frame)[1:])


@pytest.mark.parametrize(("kept", "case"), [(kept, case) for kept in KEPT for case in CASES if matters(kept, case)])
def test_same_posterior_and_history(kept, case, tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "CHUNK_BYTES", 1 << 22)  # so that there are several chunks
    dtype, options = CASES[case]
    one, other = VariationalLogisticRegression(random_state=3, **options), in_memory(case)
    one.fit(*KEPT[kept](made(dtype), tmp_path))
    assert_same(one, other, case, kept)
    if kept != "as_memory_map":
        assert list(one.feature_names_in_) == NAMES
        assert list(one.classes_) == ["no", "yes"]


def assert_same(one, other, case, kept):
    # sums in float32 are as exact as that; and its numbers, written as text, are not those they were written from
    rounded = case == "float32 products" or (case == "float32 rows" and kept == "as_csv")
    tolerance = TOLERANCE["float32"] if rounded else 1e-10
    np.testing.assert_allclose(one.coef_, other.coef_, rtol=tolerance)
    scale = np.abs(other.covariance_).max()
    np.testing.assert_allclose(one.covariance_, other.covariance_, rtol=tolerance, atol=tolerance * scale)
    assert one.elbo_ == pytest.approx(other.elbo_, rel=tolerance)
    assert one.passes_ == other.passes_
    for a, b in zip(one.history_, other.history_, strict=True):
        assert (a.rows, a.rough, a.step) == (b.rows, b.rough, b.step)
        assert a.objective == pytest.approx(b.objective, rel=tolerance)
        # rough moves come from float32 curvatures
        assert a.move == pytest.approx(b.move, rel=1e-2 if rounded else 1e-4, abs=1e-9)


@pytest.fixture(scope="module", params=[2, 3])
def cluster(request):
    pytest.importorskip("distributed")
    from dask_workers import in_use, workers

    with workers(request.param) as client, in_use(client):
        yield client


@pytest.mark.parametrize("case", CASES)
def test_same_posterior_on_workers(cluster, case, tmp_path):
    import dask.dataframe

    dtype, options = CASES[case]
    as_parquet(made(dtype), tmp_path)
    frame = dask.dataframe.read_parquet(tmp_path)
    one = VariationalLogisticRegression(random_state=3, **options)
    one.fit(frame[NAMES], frame["y"], frame["w"], frame["o"])
    assert_same(one, in_memory(case), case, "by workers")
    assert list(one.feature_names_in_) == NAMES


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kept", ["in memory", "in_odd_blocks", "as_memory_map", "as_parquet"])
def test_same_posterior_on_a_gpu(kept, case, tmp_path):
    dtype, options = CASES[case]
    frame = made(dtype)
    rows = split(frame) if kept == "in memory" else KEPT[kept](frame, tmp_path)
    one, other = VariationalLogisticRegression(random_state=3, device="cuda", **options).fit(*rows), in_memory(case)
    tolerance = TOLERANCE["float32"] if case == "float32 products" else 1e-8  # other steps to the same optimum
    np.testing.assert_allclose(one.coef_, other.coef_, rtol=tolerance, atol=tolerance * 1e-2)
    assert one.elbo_ == pytest.approx(other.elbo_, rel=1e-10 if case != "float32 products" else tolerance)
