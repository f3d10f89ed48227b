"""Rows that are read in chunks: errors are reported once, with their place, and no rows are lost or left in memory."""

import gzip
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from tolerances import TOLERANCE

import viper
from viper import StorageError, VariationalLogisticRegression
from viper.data import arrow, kept, stream
from viper.data.checks import RowFormat
from viper.data.files import FileReader
from viper.data.open import describe, open_labelled_rows
from viper.data.stream import Stream, ignore_progress, scan
from viper.errors import CacheWarning
from viper.inference import memory

pyarrow = pytest.importorskip("pyarrow")
resource = pytest.importorskip("resource")  # not on Windows
NAMES = ["a", "b", "c"]


def frame(rows=3000, seed=0):
    rng = np.random.default_rng(seed)
    made = pd.DataFrame(rng.standard_normal((rows, 3)), columns=NAMES)
    made["y"] = (made["a"] - made["b"] + rng.logistic(size=rows) > 0).astype(int)
    return made


@pytest.fixture
def parts(tmp_path):
    """Three Parquet files of 1000 rows, and a function that rewrites the third."""
    whole = frame()
    for i in range(3):
        whole[1000 * i : 1000 * (i + 1)].to_parquet(tmp_path / f"{i}.parquet", write_page_checksum=True)
    return tmp_path, lambda change: change(whole[2000:].copy()).to_parquet(tmp_path / "2.parquet")


def fit(source, **options):
    return VariationalLogisticRegression(random_state=0, **options).fit(source)


# --- files that do not agree, or cannot be read ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="b"), r"features must name columns of every file; got 'b', which .*2\.parquet does"),
        (lambda f: f.drop(columns="y"), r"target must name columns of every file; got 'y', which .*2\.parquet does"),
        (lambda f: f.assign(b="text"), r"column 'b' must be numeric; got .*string in .*2\.parquet"),
        (lambda f: f.assign(b=pd.Timestamp("2020-01-01")), r"column 'b' must be numeric; got timestamp.* in .*2\.pa"),
        (lambda f: f.assign(more=1.0), r"every file must have the columns of the first.*got 'more' too in .*2\.pa"),
        (lambda f: f.assign(y="no"), r"labels must have one type in all files; got .*string in .*2\.parquet and int64"),
        (
            lambda f: f.assign(c=f["c"].where(f.index != 2017)),
            r"X must be finite; got NaN .* in .*2\.parquet, row 17\.",
        ),
        (lambda f: f.assign(y=f["y"].where(f.index != 2005).astype("Int64")), r"y must be finite.*2\.parquet, row 5"),
    ],
)
def test_the_third_file_is_wrong(parts, change, message):
    folder, rewrite = parts
    rewrite(change)
    with pytest.raises(ValueError, match=message):
        fit(viper.Files(folder / "*.parquet", target="y"))


def test_types_that_hold_the_same_numbers_may_differ(parts):
    folder, rewrite = parts
    source = viper.Files(folder, target="y")
    rewrite(lambda f: f.assign(a=f["a"].round()))
    expected = fit(source).coef_
    rewrite(lambda f: f.assign(a=f["a"].round().astype("int32"))[["y", "c", "b", "a"]])
    np.testing.assert_array_equal(fit(source).coef_, expected)


@pytest.mark.parametrize("damage", [lambda x: x[:2000], lambda x: b"", lambda x: x[:300] + bytes(400) + x[700:]])
def test_damaged_file(parts, damage):
    folder, _ = parts
    path = folder / "2.parquet"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"2\.parquet must be a readable Parquet file; got: .*\. Write it again"):
        fit(viper.Files(folder, target="y"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (viper.Files("nowhere/*.parquet", target="y"), "path must name at least one file; got 'nowhere"),
        (viper.Files("nowhere"), "target must name the column of labels; got None"),
    ],
)
def test_nothing_to_read(source, message):
    with pytest.raises(ValueError, match=message):
        fit(source)


def test_labels_beside_files(parts):
    with pytest.raises(ValueError, match="y must come from the source of the rows; got list beside Files"):
        VariationalLogisticRegression().fit(viper.Files(parts[0], target="y"), [0, 1])


def test_predictions_take_the_columns_of_the_fit(parts):
    folder, _ = parts
    model = fit(viper.Files(folder, target="y", features=["c", "a"]))
    expected = model.predict_proba(frame()[["c", "a"]])
    np.testing.assert_allclose(model.predict_proba(viper.Files(folder)), expected, rtol=TOLERANCE["roundoff"])
    frame().drop(columns="a").to_parquet(folder / "new.parquet")
    with pytest.raises(ValueError, match=r"features must name columns of every file; got 'a', which .*new\.parquet"):
        model.predict(viper.Files(folder / "new.parquet"))


def test_score_counts_weights(parts):
    folder, _ = parts
    whole = frame().assign(w=np.linspace(0.0, 1.0, 3000))
    whole.to_parquet(folder / "weighted.pq")
    model = fit(viper.Files(folder / "weighted.pq", target="y", weight="w"))
    expected = model.score(whole[NAMES], whole["y"], whole["w"])
    assert 0.5 < expected < 1.0
    assert model.score(viper.Files(folder / "weighted.pq", target="y", weight="w")) == pytest.approx(
        expected, rel=1e-14
    )


# --- CSV ---


def write_lines(path, lines):
    path.write_text("\n".join(["a,b,y", *lines]) + "\n", encoding="utf-8")
    return viper.Files(path, target="y")


@pytest.mark.parametrize("block", [1000, 1 << 22])
def test_text_among_the_numbers_of_a_csv(tmp_path, monkeypatch, block):
    monkeypatch.setattr("viper.data.arrow.CSV_BLOCK", block)
    lines = [f"{i / 7},{-i % 5},{i % 2}" for i in range(400)]
    source = write_lines(tmp_path / "rows.csv", [*lines, "1.5,many,0", *lines])
    # the heading is line 1
    with pytest.raises(ValueError, match=r"rows\.csv must be .* CSV file; got: column 'b', line 402: .*'many'"):
        fit(source)


@pytest.mark.parametrize("missing", ["", "NA", "nan", "inf"])
def test_missing_number_in_a_csv(tmp_path, missing):
    lines = [f"{i / 7},{-i % 5},{i % 2}" for i in range(400)]
    source = write_lines(tmp_path / "rows.csv", [*lines, f"1.5,{missing},0", *lines])
    with pytest.raises(ValueError, match=r"X must be finite; got NaN or infinity in .*rows\.csv, line 402\."):
        fit(source)


def whole_csv(rows=400):
    """Text with blank lines, empty cells in quotes, and labels in quotes."""
    rng = np.random.default_rng(3)
    lines = [f'{a!r},"{b!r}","{"yes" if a > b else "no, not"}"' for a, b in rng.standard_normal((rows, 2)).tolist()]
    return [*lines[:250], "", *lines[250:]]


def coefficients(source, threads):
    return VariationalLogisticRegression(random_state=0, n_jobs=threads).fit(source).coef_


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_blocks_of_lines_are_the_rows_of_the_file(tmp_path, monkeypatch, suffix, end):
    text = end.join(["a,b,y", *whole_csv()])  # no line feed after the last line
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith("gz") else text.encode())
    source = viper.Files(path, target="y")
    expected = coefficients(source, 1)
    monkeypatch.setattr(arrow, "CSV_LINES", 1000)
    monkeypatch.setattr(arrow, "CSV_BLOCK", 4000)
    for threads in (1, 3):
        np.testing.assert_array_equal(coefficients(source, threads), expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("at", [3, 200, 201, 202, 203, 399])
def test_a_cell_that_spans_lines_is_found_in_any_block(tmp_path, monkeypatch, threads, at):
    """Even if a block ends inside the cell, or a line of the cell would be a valid row."""
    monkeypatch.setattr(arrow, "CSV_LINES", 1000)
    lines, path = [line for line in whole_csv() if line], tmp_path / "rows.csv"
    expected = coefficients(write_lines(path, lines), 1)
    for note in ('"two\nlines"', '"\n"', '"one\n1,2,yes,\nthree"'):
        noted = [f"{line},{note if i == at else ''}" for i, line in enumerate(lines)]
        path.write_text("\n".join(["a,b,y,note", *noted]), encoding="utf-8")
        source = viper.Files(path, target="y", features=["a", "b"])
        with pytest.raises(ValueError, match=rf"got one, which begins in line {at + 2} of .*rows\.csv"):
            coefficients(source, threads)
        found = coefficients(replace(source, multiline=True), threads)
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE["roundoff"])


def test_whole_numbers_at_first(tmp_path, monkeypatch):
    """A column that looks like integers in the first block may still hold other numbers."""
    monkeypatch.setattr("viper.data.arrow.CSV_BLOCK", 1000)
    rng = np.random.default_rng(0)
    a, y = np.concatenate([np.arange(300.0) % 7, rng.standard_normal(300)]), rng.integers(0, 2, 600)
    source = write_lines(
        tmp_path / "rows.csv", [f"{x:.17g},{i % 3},{k}" for i, (x, k) in enumerate(zip(a, y, strict=True))]
    )
    expected = VariationalLogisticRegression(random_state=0).fit(np.column_stack([a, np.arange(600) % 3]), y)
    np.testing.assert_allclose(fit(source).coef_, expected.coef_, rtol=1e-10)


def test_missing_booleans(tmp_path):
    whole = frame().assign(a=pd.array([None, *[True, False] * 1499, True], dtype="boolean"))
    whole.to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"X must be finite; .*rows\.parquet, row 0\."):
        fit(viper.Files(tmp_path, target="y"))
    with pytest.raises(ValueError, match=r"y must be finite; .*rows\.parquet, row 0\."):
        fit(viper.Files(tmp_path, target="a"))


# --- functions that yield blocks ---


def blocks(count=20, rows=50, **changed):
    """A factory of `count` blocks; `changed` maps a block's number, such as "at17", to a function of the block."""

    def factory():
        for i in range(count):
            part = frame(rows, seed=i)
            block = part[NAMES].to_numpy(), part["y"].to_numpy()
            yield changed.get(f"at{i}", lambda X, y: (X, y))(*block)

    return factory


def with_nan(X, y):
    return np.where(np.arange(150).reshape(50, 3) == 10, np.nan, X), y


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: iter(()), "must yield at least one block; got none"),
        (blocks(at17=with_nan), "X must be finite; got NaN or infinity in block 17, row 3"),
        (
            blocks(at3=lambda X, y: (X[:, :2], y)),
            "X must have 3 columns, as the first block; got shape .50, 2. in block 3",
        ),
        (
            blocks(at3=lambda X, y: (X, y[:-1])),
            r"y must have one entry per row of X, \(50,\); got shape \(49,\) in block 3",
        ),
        (
            blocks(**{f"at{i}": lambda X, y, i=i: (X, y, np.full(50, 2.0 - i)) for i in range(20)}),
            "sample_weight must not be negative; got -1.0 in block 3, row 0",
        ),
        (blocks(at3=lambda X, y: (X, y, np.ones(50))), "same parts; got 3 in block 3 and 2 before"),
        (blocks(at3=lambda X, y: X), "a block must be .X, y., .* got 1 part.s. in block 3"),
        (blocks(at3=lambda X, y: (X.astype(str), y)), None),
        (blocks(at3=lambda X, y: ([["p", "q", "r"]] * 50, y)), "X must be a dense numeric array; got .* in block 3"),
        (blocks(at3=lambda X, y: (X, y + X[:, 0])), "Unknown label type: continuous"),
        (lambda: (frame(50)[NAMES] for _ in range(3)), "a block must be .X, y."),
    ],
)
def test_blocks_that_are_wrong(factory, message):
    if message is None:  # numbers as text are read as numbers, as everywhere in NumPy
        assert fit(factory).converged_
        return
    with pytest.raises(ValueError, match=message):
        fit(factory)


def test_a_generator_is_no_factory():
    for source in (blocks()(), viper.Blocks(blocks()())):
        with pytest.raises(ValueError, match="X must be readable once per pass; got a generator"):
            fit(source)


SAME = iter([*blocks()()])
SHARED = iter([*blocks(1)()])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (viper.Blocks(3), "must be a function that returns blocks; got int"),
        (viper.Blocks([*blocks()()]), r"must be a function that returns blocks; got list\. Write Blocks\(lambda: "),
        (lambda: None, "must return an iterable of blocks; got NoneType"),
        (lambda: SAME, "must start over in every call; got the same iterator twice"),
        (lambda: map(tuple, SHARED), "at least one row; got none. Let a function start over"),
        (blocks(at0=lambda X, y: (scipy.sparse.csr_array(X), y)), r"got csr_array in block 0\. Yield X\.toarray\(\)"),
        (
            blocks(at3=lambda X, y: (X, np.where(y, "yes", None))),
            "in every row; got none or NA in block 3, row",
        ),
        (viper.Blocks(blocks(), names="abc"), "names must be a list of columns; got the text 'abc'"),
        ("rows/*.parquet", r"X must be rows; got the path 'rows/\*\.parquet'\. Write viper\.Files\('rows/\*\.parquet'"),
        (Path("rows"), r"X must be rows; got the path 'rows'\. Write viper\.Files\('rows', target="),
    ],
)
def test_sources_that_are_none(source, message):
    with pytest.raises(ValueError, match=message):
        fit(source)


def frames(second, kind=lambda x: x):
    """Two blocks with named columns, the second made by a function."""
    whole = frame(1000)
    first, other = whole[:500], whole[500:]
    return lambda: [(kind(first[NAMES]), first["y"]), (kind(second(other[NAMES])), other["y"])]


@pytest.mark.parametrize("kind", [lambda x: x, pyarrow.Table.from_pandas])
def test_columns_of_blocks_are_told_by_their_names(kind):
    whole = frame(1000)
    expected = VariationalLogisticRegression(random_state=0).fit(whole[NAMES], whole["y"]).coef_
    for second in (lambda x: x, lambda x: x[["c", "a", "b"]]):
        model = fit(frames(second, kind))
        assert list(model.feature_names_in_) == NAMES
        np.testing.assert_allclose(model.coef_, expected, rtol=1e-10)
    turned = fit(viper.Blocks(frames(lambda x: x[["b", "a", "c"]], kind), names=["c", "b", "a"]))
    np.testing.assert_allclose(turned.coef_, expected[:, ::-1], rtol=1e-7)  # by other steps
    renamed = fit(viper.Blocks(frames(lambda x: x[["b", "a", "c"]], kind), names=["p", "q", "r"]))
    np.testing.assert_allclose(renamed.coef_, expected, rtol=1e-10)
    with pytest.raises(ValueError, match=r"columns of the first, \['a', 'b', 'c'\]; got \['a', 'b', 'd'\] in block 1"):
        fit(frames(lambda x: x.rename(columns={"c": "d"}), kind))


def test_one_column_of_labels_and_a_number_for_all_rows(tmp_path):
    whole = frame(1000)
    X, y = whole[NAMES].to_numpy(), whole["y"].to_numpy()
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    expected = VariationalLogisticRegression(random_state=0).fit(X, y, 2.0, 0.5)
    for labels in (y[:, None], whole[["y"]]):
        model = VariationalLogisticRegression(random_state=0)
        np.testing.assert_allclose(model.fit(mapped, labels, 2.0, 0.5).coef_, expected.coef_, rtol=1e-10)
        np.testing.assert_allclose(fit(lambda y=labels: [(X, y, 2.0, 0.5)]).coef_, expected.coef_, rtol=1e-10)
    probability = model.predict_proba(mapped, offset=0.5)
    np.testing.assert_allclose(probability, expected.predict_proba(X, offset=0.5), rtol=1e-9)


def test_rows_that_change_between_passes():
    calls = []

    def shrinking():
        calls.append(1)
        return blocks(20 if len(calls) <= 3 else 19)()

    with pytest.raises(ValueError, match="same rows in every pass; got 1000 rows, and now 950"):
        fit(shrinking)


def random_rows(generator):
    """Two blocks of random rows, whose labels depend on them."""
    for _ in range(2):
        X = generator.standard_normal((500, 3))
        yield X, X[:, 0] + generator.logistic(size=500) > 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_that_are_others_in_every_pass(dtype):
    generator = np.random.default_rng(0)
    with pytest.raises(ValueError, match="same rows in every pass; got different ones at the start"):
        fit(lambda: ((X.astype(dtype), y) for X, y in random_rows(generator)))


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e150])
def test_rounding_is_no_change(scale):
    """Rows may be computed in a different order in every pass."""
    noise = np.random.default_rng(1)

    def rows():
        for X, y in random_rows(np.random.default_rng(0)):
            yield scale * (X + 1e-13 * noise.standard_normal(X.shape)), y

    found = scan(describe(rows).open(True, None), None, ignore_progress)
    assert (found.classes.tolist(), found.rows) == ([False, True], 1000)
    stream = Stream(describe(rows).open(True, None), np.array([False, True]), 1000)
    for _ in range(3):
        assert sum(chunk.rows for chunk in stream.chunks()) == 1000


def test_an_error_of_the_function_itself_comes_through():
    def broken(X, y):
        raise RuntimeError("the disk is gone")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="the disk is gone"):
        fit(blocks(at5=broken))
    assert threading.active_count() == before


def test_minibatches_need_memory():
    with pytest.raises(ValueError, match="batch_size needs rows in memory"):
        fit(blocks(), solver="adam", batch_size=10)


def test_more_columns_than_rows():
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((30, 50)), np.arange(30) % 2
    expected = VariationalLogisticRegression().fit(X, y)
    np.testing.assert_allclose(fit(lambda: [(X[:7], y[:7]), (X[7:], y[7:])]).coef_, expected.coef_, rtol=1e-10)


# --- memory maps ---


def test_every_view_of_a_memory_map(tmp_path):
    whole = frame()
    np.save(tmp_path / "X.npy", whole[NAMES].to_numpy())
    for mode in ("r", "r+", "c"):
        X = np.load(tmp_path / "X.npy", mmap_mode=mode)
        if mode == "c":
            X[5] = 0.0  # only in this process
        for view in (X, X[100:2000], X[::2], X[:, :2], X[:, ::-1]):
            y = whole["y"].to_numpy()[: len(view)]
            one, other = (VariationalLogisticRegression(random_state=0).fit(x, y) for x in (view, np.array(view)))
            np.testing.assert_allclose(one.coef_, other.coef_, rtol=1e-10)


def test_what_was_read_of_a_memory_map_is_given_back(tmp_path, monkeypatch):
    """Pages of the map that are resident after a pass; the map itself would keep all of them."""
    monkeypatch.setattr("viper.data.blocks.available_memory", lambda: 4e7)
    X = np.lib.format.open_memmap(tmp_path / "X.npy", "w+", np.float64, (200_000, 10))
    X[:] = 1.0
    X.flush()
    for _ in stream.read_ahead(describe(X).open(False, None).read(10_000)):
        pass
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("only Linux says what is resident")
    text = maps.read_text(encoding="utf-8")
    after = text[text.index("X.npy") :]
    resident = int(next(line for line in after.splitlines() if line.startswith("Rss")).split()[1])
    assert resident < 1000  # kB, of 16,000


@pytest.mark.parametrize(
    ("shape", "dtype", "y", "message"),
    [
        ((30,), "float64", [0, 1] * 15, "X must be a 2-D array"),
        ((30, 2), "U3", [0, 1] * 15, "X must be numeric; got dtype <U3"),
        ((30, 2), "float64", [0, 1] * 14, r"y must have one entry per row of X, \(30,\); got shape \(28,\)"),
        ((30, 2), "float64", None, "requires y to be passed"),
        ((30, 2), "float64", [1] * 30, "at least two classes; got 1 class: 1"),
    ],
)
def test_memory_maps_that_are_wrong(tmp_path, shape, dtype, y, message):
    X = np.memmap(tmp_path / "X", dtype, "w+", shape=shape)
    with pytest.raises(ValueError, match=message):
        VariationalLogisticRegression().fit(X, y)


# --- read ahead ---


def test_read_ahead_keeps_order_and_stops_when_left():
    made = []

    def numbers():
        for i in range(100):
            made.append(i)
            yield i

    taken = []
    for i in stream.read_ahead(numbers()):
        taken.append(i)
        if i == 5:
            break
    assert taken == list(range(6))
    assert len(made) <= 8
    assert list(stream.read_ahead(iter(range(10)))) == list(range(10))


# --- predictions into a file ---


def test_predictions_are_those_of_the_other_methods(parts):
    folder, _ = parts
    model = fit(viper.Files(folder, target="y"))
    assert model.predict_to(viper.Files(folder), folder / "out.pq", level=0.9) == 3000
    written, X = pd.read_parquet(folder / "out.pq"), frame()[NAMES]
    np.testing.assert_array_equal(written["label"], model.predict(X))
    rounding = TOLERANCE["roundoff"]
    np.testing.assert_allclose(written["probability"], model.predict_proba(X)[:, 1], rtol=rounding)
    np.testing.assert_allclose(written["sd"], model.predict_std(X), rtol=rounding)
    np.testing.assert_allclose(written[["lower", "upper"]], model.predict_interval(X, 0.9), rtol=rounding)
    with pytest.raises(StorageError, match="path must be new"):
        model.predict_to(X, folder / "out.pq")
    with pytest.raises(StorageError, match=r"must end in \.parquet or \.pq.*out\.csv"):
        model.predict_to(X, folder / "out.csv")
    assert model.predict_to(X[:10], folder / "out.pq", overwrite=True) == 10


def test_rows_that_fail_halfway_leave_no_file(parts):
    folder, rewrite = parts
    model = fit(viper.Files(folder, target="y"))
    rewrite(lambda f: f.assign(a=f["a"].where(f.index != 2500)))
    with pytest.raises(ValueError, match=r"2\.parquet, row 500"):
        model.predict_to(viper.Files(folder), folder / "out.pq")
    assert sorted(path.name for path in folder.iterdir()) == ["0.parquet", "1.parquet", "2.parquet"]


def test_disk_full_while_predictions_are_written(tmp_path):
    """A limit on the size of files plays a full disk: writing fails at the same place, with EFBIG instead of ENOSPC."""
    X = np.random.default_rng(0).standard_normal((60_000, 3))
    model = VariationalLogisticRegression().fit(X, X[:, 0] > X[:, 1])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StorageError, match=r"path must be writable; got .*out\.parquet: .*too large"):
            model.predict_to(X, tmp_path / "out.parquet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


# --- progress ---


def test_passes_and_rows_per_second_are_shown(capsys):
    model = fit(blocks(), verbose=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == model.n_iter_
    assert "1,000 rows" in lines[-1]
    assert "rows/s" in lines[-1]


# --- rows that are kept during a fit ---


@pytest.fixture
def reads(monkeypatch):
    """How often the features of a file were decoded."""
    found = []
    original = FileReader.read

    def read(self, rows, features=True):
        found.extend([self] if features else [])
        return original(self, rows, features)

    monkeypatch.setattr(FileReader, "read", read)
    return found


@pytest.fixture
def in_a_file(monkeypatch):
    """No room in memory, so that rows are kept in a temporary file."""
    monkeypatch.setattr(kept, "SHARE_FOR_CACHE", 0.0)
    monkeypatch.setattr(kept, "temporary_space", lambda: 1e9)


def assert_same_fit(one, other):
    np.testing.assert_array_equal(one.coef_, other.coef_)
    np.testing.assert_array_equal(one.covariance_, other.covariance_)
    assert one.history_[-1].objective == other.history_[-1].objective


@pytest.fixture
def read_again(parts):
    return fit(viper.Files(parts[0], target="y", cache=0))


def test_files_are_decoded_once_if_their_rows_fit(parts, read_again, reads):
    model = fit(viper.Files(parts[0], target="y"))
    assert len(reads) == 1
    assert model._training_rows.kept is None
    assert_same_fit(model, read_again)
    assert model.diagnose() is not None  # reads them again
    assert len(reads) > 1


def test_files_are_decoded_again_without_room(parts, reads):
    fit(viper.Files(parts[0], target="y", cache=0))
    assert len(reads) > 3


def test_rows_are_kept_in_a_file_that_nobody_sees(parts, read_again, reads, in_a_file, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    sizes = []
    original = kept.new_file
    monkeypatch.setattr(kept, "new_file", lambda size: sizes.append(size) or original(size))
    assert_same_fit(fit(viper.Files(parts[0], target="y")), read_again)
    assert len(reads) == 1
    assert sizes == [3000 * 25]
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("memory", [0.0, 5e4])
def test_rows_are_kept_in_a_file_though_nobody_knew_their_number(tmp_path, reads, in_a_file, monkeypatch, memory):
    """The rows of a CSV file; the first of them may have fitted in memory."""
    monkeypatch.setattr(stream, "CHUNK_BYTES", 1 << 14)
    monkeypatch.setattr(kept, "room_for_rows", lambda most: kept.Room(memory, 0.0 if most == 0 else 1e9))
    monkeypatch.setattr("viper.data.files.room_for_rows", kept.room_for_rows)
    frame().to_csv(tmp_path / "rows.csv", index=False)
    one, other = (fit(viper.Files(tmp_path / "rows.csv", target="y", cache=most)) for most in (None, 0))
    assert_same_fit(one, other)


def test_a_disk_that_is_full_does_not_end_the_fit(parts, read_again, in_a_file):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.warns(
            CacheWarning, match=r"decodes its files again in every pass: File too large, in .*, /\S+\. Free disk space"
        ):
            model = fit(viper.Files(parts[0], target="y"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_same_fit(model, read_again)


@pytest.mark.parametrize(("budget", "once"), [(3000 * 25, True), (3000 * 25 - 1, False)])
@pytest.mark.parametrize("where", ["memory", "file"])
def test_the_budget_counts_features_and_labels(parts, reads, budget, once, where, request):
    """Three features of eight bytes and a label of one."""
    if where == "file":
        request.getfixturevalue("in_a_file")
    fit(viper.Files(parts[0], target="y", cache=budget))
    assert (len(reads) == 1) is once


@pytest.mark.parametrize(("share", "file", "once"), [(4.0, 0.0, True), (3.9, 0.0, False), (3.9, 1.0, True)])
def test_the_default_is_a_quarter_of_the_memory_or_a_file(parts, reads, monkeypatch, share, file, once):
    monkeypatch.setattr(kept, "available_memory", lambda: share * 3000 * 25)
    monkeypatch.setattr(kept, "temporary_space", lambda: file * 3000 * 25)
    fit(viper.Files(parts[0], target="y"))
    assert (len(reads) == 1) is once


def test_temporary_files_in_memory_are_no_room(monkeypatch, tmp_path):
    assert kept.temporary_space() >= 0.0
    mounts = f"a / ext4 rw\nb {tmp_path} tmpfs rw\n"
    monkeypatch.setattr(kept, "system_text", lambda path: mounts)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert kept.temporary_space() == 0.0
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path.parent))
    assert kept.temporary_space() > 0.0
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", list)
    assert kept.temporary_space() == 0.0


def test_a_temporary_folder_that_is_gone_is_no_room(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert kept.temporary_space() == 0.0


def test_file_systems_as_the_system_writes_them(monkeypatch, tmp_path):
    """A space in a folder's name is written in octal; a later mount hides an earlier one at the same place."""
    folder = tmp_path / "two words"
    folder.mkdir()
    written = str(folder).replace(" ", r"\040")
    monkeypatch.setattr(kept, "system_text", lambda path: f"a / ext4 rw\nb {written} xfs rw\nc {written} tmpfs rw\n")
    assert kept.file_system(str(folder / "below")) == "tmpfs"
    assert kept.file_system(str(tmp_path)) == "ext4"
    monkeypatch.setattr(kept, "system_text", lambda path: "")
    assert kept.file_system(str(folder)) == ""


def test_texts_of_the_system_need_not_be_utf_8(tmp_path):
    (tmp_path / "mounts").write_bytes(b"a /M\xfcll ext4 rw\n")
    assert memory.system_text(str(tmp_path / "mounts")).split()[2] == "ext4"


def test_memory_of_a_control_group(tmp_path, monkeypatch):
    assert 0 < memory.available_memory() <= memory.machine_memory()
    monkeypatch.setattr(memory, "GROUP", str(tmp_path))
    for name, text in {"max": "5000000", "current": "3000000", "stat": "anon 7\ninactive_file 500000"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert memory.available_memory() == 2_500_000
    assert memory.machine_memory() == 5_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() > 2_500_000
    assert memory.machine_memory() > 5_000_000


@pytest.mark.parametrize("cache", [-1, 0.5, "1 GB", True])
def test_odd_budgets(parts, cache):
    with pytest.raises(ValueError, match=r"cache must be a number of bytes or None; got .*\. Use 0 to keep no rows\."):
        fit(viper.Files(parts[0], target="y", cache=cache))


def test_a_change_is_noticed_though_rows_are_kept(parts):
    folder, rewrite = parts
    source = viper.Files(folder, target="y")
    opened = open_labelled_rows(VariationalLogisticRegression(), source, None, RowFormat(keep=True), reset=True)[1]
    assert opened.kept is not None
    assert sum(chunk.rows for chunk in opened.chunks()) == 3000
    rewrite(lambda f: f.assign(a=0.0))
    with pytest.raises(ValueError, match=r"same rows in every pass; got .*2\.parquet, which was written to"):
        list(opened.chunks())


@pytest.mark.filterwarnings("ignore:The search stopped early")
@pytest.mark.parametrize("model", [viper.VariationalOrdinalRegression(), viper.VariationalGPClassifier(max_iter=5)])
def test_no_estimator_keeps_rows_after_its_fit(parts, model, reads):
    """A Gaussian process searches on some of the rows, and an ordinal model reads levels first."""
    model.fit(viper.Files(parts[0] / "0.parquet", target="y"))
    assert len(reads) == 1
    source = model._training_rows
    while hasattr(source, "source"):
        source = source.source
    assert getattr(source, "kept", None) is None
