"""Arrays that NumPy would silently turn into other numbers, and files that change while they are read."""

import os
import time

import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from tolerances import TOLERANCE

import viper
from viper import Blocks, Files
from viper.errors import FileError

RNG = np.random.default_rng(2)
X = RNG.normal(size=(300, 2))
Y = (X[:, 0] + RNG.normal(size=300) > 0).astype(int)
MASK = np.zeros(X.shape, bool)
MASK[7] = True
FRAME = pd.DataFrame(X, columns=["a", "b"]).assign(y=Y)
Logistic = viper.VariationalLogisticRegression


def fitted(X=X, y=Y, **options):
    return Logistic().fit(X, y, **options)


def test_masks_are_not_ignored():
    masked = np.ma.MaskedArray(X, MASK)
    with pytest.raises(ValueError, match=r"X must have a value in every entry; got 2 masked entries\. Leave"):
        fitted(masked)
    with pytest.raises(ValueError, match="got 2 masked entries in block 0"):
        fitted(Blocks(lambda: [(masked, Y)]), None)
    for name in ("y", "sample_weight", "offset"):
        vector = np.ma.MaskedArray(np.abs(Y * 1.0), MASK[:, 0])
        with pytest.raises(ValueError, match=f"{name} must have a value in every entry; got 1 masked entries"):
            fitted(**{name: vector})
    with pytest.raises(ValueError, match="masked"):
        fitted().predict_proba(masked)
    np.testing.assert_array_equal(fitted(np.ma.MaskedArray(X)).coef_, fitted().coef_)
    columns = {"a": np.ma.MaskedArray(X[:, 0], MASK[:, 0]), "y": Y}
    model = Logistic.from_formula("y ~ a", columns, missing="drop")
    assert model.formula_.counts == {"a": 1}


@pytest.mark.parametrize("kind", ["pandas", "polars", "arrow", "numpy"])
def test_dates_are_refused_whoever_holds_them(kind):
    days = np.arange(300).astype("datetime64[D]")
    frame = pd.DataFrame({"a": X[:, 0], "day": days.astype("datetime64[s]")})
    table = {"pandas": frame, "polars": polars.from_pandas(frame), "arrow": pa.Table.from_pandas(frame)}.get(kind)
    with pytest.raises(ValueError, match="X must be numeric; got"):
        fitted(np.stack([days, days], 1) if table is None else table)
    if kind == "polars":
        with pytest.raises(ValueError, match=r"got column 'day' \(Datetime.*in block 0\. Encode dates as numbers"):
            fitted(Blocks(lambda: [(table, Y)]), None)


@pytest.mark.parametrize(
    "column",
    [
        pd.date_range("2024-01-01", periods=300, tz="Europe/Berlin"),
        pd.to_timedelta(np.arange(300), "h"),
        pd.period_range("2024-01-01", periods=300),
    ],
    ids=lambda column: str(column.dtype),
)
def test_frames_of_nothing_but_dates_are_refused(column):
    with pytest.raises((ValueError, TypeError), match=r"X must be numeric; got column 'when' \((date|time|period)"):
        fitted(pd.DataFrame({"when": column}))


def test_plans_twins_and_records_in_frames_are_refused_in_one_line():
    table = polars.from_pandas(FRAME)
    for given in ({"X": table.lazy()}, {"y": table["y"].to_frame().lazy()}):
        with pytest.raises(ValueError, match=r"must be in memory; got a LazyFrame\. Pass .*collect\(\)"):
            fitted(**given)
    with pytest.raises(ValueError, match="needs a table in memory; got a LazyFrame"):
        Logistic.from_formula("y ~ a", table.lazy())
    with pytest.raises(ValueError, match="columns must have different names; got 'a' twice"):
        fitted(FRAME[["a", "b", "a"]])
    with pytest.raises(ValueError, match=r"X must be numeric; got column 's' \(Struct"):
        fitted(table.select(polars.struct("a", "b").alias("s")))


@pytest.mark.parametrize("kind", ["Int64", "int32[pyarrow]", "UInt8", "boolean"])
def test_nullable_labels_keep_their_type(kind):
    model = fitted(y=pd.Series(Y).astype(kind))
    assert model.classes_.dtype.kind in "iub"
    assert model.predict(X).dtype == model.classes_.dtype
    np.testing.assert_array_equal(model.coef_, fitted().coef_)
    holes = pd.Series(Y).astype(kind).mask(np.arange(300) == 3)
    with pytest.raises(ValueError, match="y must have a label in every row; got none in 1 of 300 rows"):
        fitted(y=holes)


def test_arrow_tables():
    columns = [pa.array(X[:, 0]), pa.array(X[:, 1])]
    table = pa.Table.from_arrays(columns, names=["a", "b"])
    np.testing.assert_array_equal(fitted(table).coef_, fitted(X[:, :2]).coef_)
    with pytest.raises(ValueError, match="columns must have different names; got 'a' twice"):
        fitted(pa.Table.from_arrays(columns, names=["a", "a"]))


def test_records_are_refused():
    records = FRAME[["a", "b"]].to_records(index=False)
    for rows in (records, np.asarray(records)):
        with pytest.raises(ValueError, match=r"got records with the fields \['a', 'b'\].*Pass pandas\.DataFrame"):
            fitted(rows)
    np.testing.assert_array_equal(fitted(pd.DataFrame(records)).coef_, fitted().coef_)


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">i4"])
def test_maps_of_the_other_byte_order(dtype, tmp_path):
    values = np.round(X * 100) / (1 if dtype == ">i4" else 128)  # exact in each type
    written = np.memmap(tmp_path / "X", dtype, "w+", shape=X.shape)
    written[:] = values
    written.flush()
    mapped = np.memmap(tmp_path / "X", dtype, "r", shape=X.shape)
    np.testing.assert_allclose(fitted(mapped).coef_, fitted(values).coef_, rtol=TOLERANCE["converged"])
    np.testing.assert_array_equal(fitted(values.astype(dtype)).coef_, fitted(values).coef_)
    big = np.memmap(tmp_path / "y", ">i8", "w+", shape=Y.shape)
    big[:] = Y
    np.testing.assert_array_equal(fitted(mapped, big).coef_, fitted(mapped).coef_)


# --- sources that change ---


def passes(source, change):
    """Read a source twice, and change it between."""
    reader = source.open(True, None)
    list(reader.read(50))
    change()
    list(reader.read(50))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_file_that_changes_beyond_its_first_rows_is_noticed(suffix, tmp_path):
    path = tmp_path / f"t.{suffix}"
    write = (
        (lambda frame: frame.to_csv(path, index=False)) if suffix == "csv" else (lambda frame: frame.to_parquet(path))
    )
    write(FRAME)
    changed = FRAME.assign(a=FRAME["a"].where(FRAME.index < 290, 0.0))
    rule = "the source must have the same rows in every pass; got .*, which was written to or removed"
    with pytest.raises(FileError, match=rule):
        passes(Files(path, target="y"), lambda: write(changed))
    with pytest.raises(FileError, match=rule):
        passes(Files(path, target="y"), lambda: write(FRAME.rename(columns={"a": "c"})))
    with pytest.raises(FileError, match=rule):
        passes(Files(path, target="y"), path.unlink)
    write(FRAME)
    passes(Files(path, target="y"), lambda: None)


def test_a_dataset_whose_file_changes_is_noticed(tmp_path):
    path = tmp_path / "t.parquet"
    FRAME.to_parquet(path)
    with pytest.raises(FileError, match="which was written to or removed"):
        passes(Files(pa.dataset.dataset(path), target="y"), lambda: FRAME[::-1].to_parquet(path))


def test_a_map_whose_file_changes_is_noticed(tmp_path):
    writer = np.memmap(tmp_path / "X", "f8", "w+", shape=X.shape)
    writer[:] = X
    reader = viper.data.blocks.MemoryMap(np.memmap(tmp_path / "X", "f8", "r+", shape=X.shape), Y).open(True, None)
    list(reader.read(50))

    def change():
        writer[290] = 0.0
        writer.flush()
        os.utime(tmp_path / "X", ns=(time.time_ns(), time.time_ns()))  # clocks of file systems are coarse

    list(reader.read(50))
    change()
    with pytest.raises(ValueError, match=r"got .*X, which was written to since the first\. Do not write to a"):
        list(reader.read(50))


def test_a_damaged_dataset_is_refused(tmp_path):
    table = pa.table({"x": np.arange(60.0), "s": [f"level {i % 2}" for i in range(60)]})
    path = tmp_path / "t.arrow"
    with pa.ipc.new_file(str(path), table.schema) as sink:
        sink.write_table(table)
    contents = bytearray(path.read_bytes())
    offset = contents.index(np.arange(0, 7 * 60 + 1, 7, dtype=np.int32).tobytes())
    contents[offset + 7] = 127  # the second text begins 2 GB further on
    path.write_bytes(contents)
    with pytest.raises(FileError, match="the dataset must be a readable Dataset file; got: "):
        list(Files(pa.dataset.dataset(path, format="ipc"), target="s", features=["x"]).open(True, None).read(10))


def test_parquet_written_with_other_columns(tmp_path):
    pq.write_table(pa.table({"a": X[:, 0], "y": Y}), tmp_path / "t.parquet")
    reader = Files(tmp_path / "t.parquet", target="y").open(True, None)
    pq.write_table(pa.table({"b": X[:, 0], "y": Y}), tmp_path / "t.parquet")
    vars(reader.files[0]).pop("stamp")  # changed within the resolution of the clock
    with pytest.raises(ValueError, match="every pass must find the same columns; got no 'a' in"):
        list(reader.read(10))
