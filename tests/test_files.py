"""`viper.Files` on files written by others: with an index, in other dialects, with mixed types or wrong cells."""

import gzip

import numpy as np
import pandas as pd
import pytest
from tolerances import TOLERANCE

import viper
from viper import VariationalLogisticRegression

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
NAMES = ["a", "b", "c"]


def frame(rows=400):
    rng = np.random.default_rng(0)
    made = pd.DataFrame(rng.standard_normal((rows, 3)).round(3), columns=NAMES)
    made["y"] = np.where(made["a"] - made["b"] + rng.logistic(size=rows) > 0, "yes", "no")
    return made


ROWS = frame()
LINES = [f"{a},{b},{y}" for a, b, y in zip(ROWS["a"], ROWS["b"], ROWS["y"], strict=True)]


def fit(path, **options):
    source = viper.Files(path, **{"target": "y"} | options)
    return VariationalLogisticRegression(random_state=0).fit(source)


def assert_fits(path, names=NAMES, **options):
    expected = VariationalLogisticRegression(random_state=0).fit(ROWS[names], ROWS["y"])
    model = fit(path, **options)
    assert list(model.feature_names_in_) == names
    np.testing.assert_allclose(model.coef_, expected.coef_, rtol=1e-8)
    probability = model.predict_proba(viper.Files(path, multiline=options.get("multiline", False)))
    np.testing.assert_allclose(probability[:, 1], model.predict_proba(ROWS[names])[:, 1], rtol=TOLERANCE["roundoff"])


def write_lines(path, lines, header="a,b,y", encoding="utf-8"):
    path.write_bytes("\n".join([header, *lines, ""]).encode(encoding))
    return path


# --- which columns are features ---


@pytest.mark.parametrize("index", [None, "id"])
@pytest.mark.parametrize("name", ["rows.parquet", "ROWS.ARROW"])
def test_the_index_of_a_frame_is_no_feature(index, name, tmp_path):
    shuffled = ROWS.set_axis(np.random.default_rng(1).permutation(400), axis=0).rename_axis(index)
    table = pa.Table.from_pandas(shuffled)
    column = "__index_level_0__" if index is None else index
    assert column in table.column_names
    if name.endswith("parquet"):
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_file(str(tmp_path / name), table.schema) as sink:
            sink.write_table(table)
    assert_fits(tmp_path)
    asked = fit(tmp_path, features=[column, "a"])
    assert list(asked.feature_names_in_) == [column, "a"]


def test_an_index_in_some_of_the_files(tmp_path):
    ROWS[:200].to_parquet(tmp_path / "0.parquet")
    ROWS[200:].set_axis(np.random.default_rng(1).permutation(200), axis=0).to_parquet(tmp_path / "1.parquet")
    assert_fits(tmp_path)


def test_row_numbers_in_a_csv_are_no_feature(tmp_path):
    ROWS.to_csv(tmp_path / "rows.csv")
    assert_fits(tmp_path)
    assert list(fit(tmp_path, features=["", "a"]).feature_names_in_) == ["", "a"]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (["a", "a", "b"], "features must name each column once; got 'a' twice"),
        ("abc", r"features must be a list of columns; got the text 'abc'\. Write features=\['abc'\]"),
        (["a", "y"], "features must not contain the target; got 'y'"),
    ],
)
def test_features_that_are_wrong(features, message, tmp_path):
    ROWS.to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, features=features)


def test_a_name_that_occurs_twice(tmp_path):
    path = write_lines(tmp_path / "rows.csv", LINES, "a,a,y")
    with pytest.raises(ValueError, match=r"columns must have different names; got 'a' twice in .*rows\.csv\. Rename"):
        fit(path)
    write_lines(path, [f"1,2,{line}" for line in LINES], "x,x,a,b,y")
    assert_fits(path, ["a", "b"], features=["a", "b"])


# --- which files ---


@pytest.mark.parametrize("path", [[], None, 3, [None]])
def test_a_path_that_is_none(path):
    with pytest.raises(ValueError, match=r"path must be a file, a folder, a pattern or a list of these; got"):
        fit(path)


def test_endings_that_are_not_known(tmp_path):
    path = write_lines(tmp_path / "rows.dat", LINES)
    with pytest.raises(ValueError, match=r"must end in one of \.parquet, .*\.csv.*; got .*rows\.dat\. Rename it"):
        fit(path)
    with pytest.raises(ValueError, match=r"which names none\. Its files must end in one of \.parquet"):
        fit(tmp_path)
    ROWS.to_parquet(path)  # recognised by its first bytes
    assert_fits(path)


@pytest.mark.parametrize("count", [1, 5])
def test_files_with_column_names_only(count, tmp_path):
    """The advice was for functions."""
    for i in range(count):
        (tmp_path / f"{i}.csv").write_text("dose,ill\n")
    named = r"0\.csv" if count == 1 else r"0\.csv and 4 more"
    with pytest.raises(
        ValueError, match=rf"files must have at least one row; got only column names in .*{named}\. Name"
    ):
        viper.VariationalLogisticRegression().fit(viper.Files(f"{tmp_path}/*.csv", target="ill"))


def test_only_files_of_a_known_kind_in_a_folder(tmp_path):
    ROWS.to_csv(tmp_path / "rows.csv", index=False)
    for name in ("rows.csv.bak", "notes.txt", ".rows.csv", "rows.csv.crc"):
        (tmp_path / name).write_text("nothing\n")
    assert_fits(tmp_path)


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("rows.csv", ";"),
        ("rows.csv", "\t"),
        ("rows.csv", "|"),
        ("rows.txt", ","),
        ("rows.txt", ";"),
        ("ROWS.TSV", "\t"),
    ],
)
def test_separators(name, mark, tmp_path):
    ROWS.to_csv(tmp_path / name, index=False, sep=mark)
    assert_fits(tmp_path / name)


def test_marks_in_names_are_no_separators(tmp_path):
    ROWS.rename(columns={"a": "a|1|2|3;4"}).to_csv(tmp_path / "rows.csv", index=False)
    assert list(fit(tmp_path).feature_names_in_) == ["a|1|2|3;4", "b", "c"]


def test_no_file_of_rows_is_left_out(tmp_path):
    ROWS[:200].to_parquet(tmp_path / "1.parquet")
    ROWS[200:].to_parquet(tmp_path / "2.parquet.gzip")
    assert_fits(tmp_path)
    (tmp_path / "3.parquet.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"the name of a file must end in one of .* got .*zip"):
        assert_fits(tmp_path)


def test_names_of_columns_may_be_an_index(tmp_path):
    ROWS.to_csv(tmp_path / "rows.csv", index=False)
    given = ROWS.columns.drop("y")
    for features in (given, given.to_numpy()):
        source = viper.Files(tmp_path, target="y", features=features)
        assert list(viper.VariationalLogisticRegression().fit(source).feature_names_in_) == list(given)


def test_names_in_capitals_and_compressed(tmp_path):
    (tmp_path / "R.CSV.GZ").write_bytes(gzip.compress(ROWS.to_csv(index=False).encode()))
    assert_fits(tmp_path)


def test_the_stream_format_of_arrow(tmp_path):
    table = pa.Table.from_pandas(ROWS)
    with pa.ipc.new_stream(str(tmp_path / "rows.arrow"), table.schema) as sink:
        sink.write_table(table, 150)
    assert_fits(tmp_path)


def test_folders_whose_names_are_values(tmp_path):
    """A dataset derives columns from folder names; files have only their own."""
    datasets = pytest.importorskip("pyarrow.dataset")
    for year in (2020, 2021):
        (tmp_path / f"year={year}").mkdir()
        ROWS[ROWS.index % 2 == year % 2].to_parquet(tmp_path / f"year={year}" / "rows.parquet")
    dataset = datasets.dataset(tmp_path, partitioning="hive")
    model = fit(dataset)
    assert list(model.feature_names_in_) == [*NAMES, "year"]
    ordered = pd.concat([ROWS[::2].assign(year=2020), ROWS[1::2].assign(year=2021)])
    expected = VariationalLogisticRegression(random_state=0).fit(ordered[[*NAMES, "year"]], ordered["y"])
    np.testing.assert_allclose(model.coef_, expected.coef_, rtol=1e-10)
    assert list(fit(tmp_path).feature_names_in_) == NAMES
    with pytest.raises(ValueError, match=r"got a pyarrow dataset\. Write viper\.Files\(dataset, target"):
        VariationalLogisticRegression().fit(dataset)


# --- labels ---


@pytest.mark.parametrize("missing", ["", "NA", "null"])
def test_missing_labels_in_a_csv(missing, tmp_path):
    path = write_lines(tmp_path / "rows.csv", [*LINES[:10], f"1,2,{missing}", *LINES])
    with pytest.raises(ValueError, match=r"have a label in every row; got none or NA in .*rows\.csv, line 12\."):
        fit(path)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, r"in every row; got none or NA in "),
    ],
    ids=["none"],
)
def test_a_label_that_is_wrong_in_the_third_file(label, message, tmp_path):
    for i in range(3):
        part = ROWS[100 * i : 100 * (i + 1)]
        part.assign(y=part["y"].where(part.index != 217, label)).to_parquet(tmp_path / f"{i}.parquet")
    with pytest.raises(ValueError, match=message + r".*2\.parquet, row 17\.") as found:
        fit(tmp_path)
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 1000


@pytest.mark.parametrize("types", [["str", "category", "large", "view"], ["int32", "int64", "category", "float64"]])
def test_labels_of_one_kind_in_several_types(types, tmp_path):
    numbers = types[0].startswith("int")
    rows = ROWS.assign(y=(ROWS["y"] == "yes").astype(int)) if numbers else ROWS
    for i, kind in enumerate(types):
        part = rows[100 * i : 100 * (i + 1)]
        if kind in ("large", "view"):
            other = pa.large_string() if kind == "large" or not hasattr(pa, "string_view") else pa.string_view()
            table = pa.Table.from_pandas(part, preserve_index=False)
            table = table.set_column(3, "y", table["y"].cast(other))
        else:
            table = pa.Table.from_pandas(part.assign(y=part["y"].astype(kind)), preserve_index=False)
        pq.write_table(table, tmp_path / f"{i}.parquet")
    assert_fits(tmp_path)
    assert fit(tmp_path).classes_.tolist() == ([0, 1] if numbers else ["no", "yes"])


@pytest.mark.parametrize(
    ("header", "label", "count", "message"),
    [
        ("a,b,y", "jä", 1, r"the labels in column 'y' must be text or numbers; got bytes in .*rows\.csv"),
        ("ä,b,y", "ja", 1, r"rows\.csv must be a readable CSV file; got: .*0xe4"),
        ("a,b,y", "jä", 40, r"rows\.csv must be a readable CSV file; got: column 'y', line 402: .*UTF8"),
    ],
)
def test_a_csv_that_is_not_utf8(header, label, count, message, tmp_path, monkeypatch):
    monkeypatch.setattr("viper.data.arrow.CSV_BLOCK", 1000)
    lines = [*(LINES * count)[: 10 * count], f"1,2,{label}"]
    path = write_lines(tmp_path / "rows.csv", lines, header, "latin-1")
    with pytest.raises(ValueError, match=message + r".*\. Write it again, in UTF-8\."):
        fit(path)


# --- cells and lines ---


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,many,no,", r"column 'b', line 18: .*'many'\. Correct the cell; numbers have a decimal point\."),
        ("1,2,no,3,4", r"every line must have 4 fields, like the header; got 5 in line 18 of .*rows\.csv"),
        ("1,,no,", r"X must be finite; got NaN or infinity in .*rows\.csv.*, line 18\."),
    ],
)
@pytest.mark.parametrize("ending", ["", ".GZ"])
def test_lines_are_counted_with_blank_ones_and_those_in_quotes(line, message, ending, tmp_path, monkeypatch):
    monkeypatch.setattr("viper.data.arrow.CSV_BLOCK", 300)
    lines = [f"{line}," for line in LINES]
    before = [*lines[:10], "", "", '1,2,no,"three', "", 'lines"', "", line, *lines]
    path = write_lines(tmp_path / "rows.csv", before, "a,b,y,note")
    if ending:
        path = path.rename(tmp_path / f"rows.csv{ending}")
        path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        fit(path, features=["a", "b"], multiline=True)


def test_values_with_line_breaks_across_blocks(tmp_path, monkeypatch):
    """A text column that is not used may contain anything."""
    monkeypatch.setattr("viper.data.arrow.CSV_BLOCK", 200)
    ROWS.assign(note='first\nsecond, "third"\n').to_csv(tmp_path / "rows.csv", index=False)
    assert_fits(tmp_path, features=NAMES, multiline=True)


def test_decimal_commas(tmp_path):
    ROWS.to_csv(tmp_path / "rows.csv", index=False, sep=";", decimal=",")
    assert_fits(tmp_path)
