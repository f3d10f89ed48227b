"""Tables as people have them: decimal commas, stray quotes, spreadsheets, pipes, and files made to exhaust memory."""

import gc
import gzip
import io
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import openpyxl
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tolerances import TOLERANCE

import viper
from viper.data import excel
from viper.data.csv_text import MOST_LINE, decimal_of
from viper.data.table_file import TableFile, check_numbers
from viper.errors import FileError, FormulaError

RNG = np.random.default_rng(1)
ROWS = 120
FRAME = pd.DataFrame(
    {
        "age": RNG.normal(50, 9, ROWS).round(1),
        "dose": RNG.integers(1, 9, ROWS) / 4,
        "ward": RNG.choice(["east", "north"], ROWS),
    }
)
FRAME["y"] = np.where(RNG.random(ROWS) < 1 / (1 + np.exp(-(FRAME["age"] - 50) / 9)), "yes", "no")


def fit(command, *arguments):
    code, out, err = command("fit", *arguments, "--json", "--cv", "0")
    assert code == 0, err
    return json.loads(out), err


def refused(command, *arguments):
    code, out, err = command("fit", *arguments)
    assert (code, out) == (3, ""), err
    return err


def means(document):
    return {row["name"]: row["mean"] for row in document["coefficients"]}


def same(one, other):
    assert means(one) == pytest.approx(means(other), rel=TOLERANCE["converged"])


@pytest.fixture
def plain(command):
    FRAME.to_csv("plain.csv", index=False)
    return fit(command, "plain.csv", "-t", "y")[0]


# --- decimal commas ---


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_decimal_commas_are_recognised_and_said(separator, command, plain):
    FRAME.to_csv("t.csv", index=False, sep=separator, decimal=",")
    document, err = fit(command, "t.csv", "-t", "y", "-o", "m.viper")
    same(document, plain)
    assert "commas are read as decimal points; pass --decimal . if they are not." in err
    assert command("predict", "m.viper", "t.csv", "-o", "p.csv")[0] == 0
    fit(command, "plain.csv", "-t", "y", "-o", "plain.viper")
    assert command("predict", "plain.viper", "plain.csv", "-o", "q.csv")[0] == 0
    np.testing.assert_allclose(pd.read_csv("p.csv")["probability"], pd.read_csv("q.csv")["probability"], rtol=1e-7)
    assert "commas are read" not in fit(command, "plain.csv", "-t", "y")[1]


def test_decimal_commas_in_files(tmp_path):
    numbers = FRAME[["age", "dose", "y"]]
    numbers.to_csv(tmp_path / "comma.csv", index=False, sep=";", decimal=",")
    numbers.to_csv(tmp_path / "point.csv", index=False, sep=";")
    one, other = (
        viper.VariationalLogisticRegression().fit(viper.Files(tmp_path / name, target="y"))
        for name in ("comma.csv", "point.csv")
    )
    np.testing.assert_array_equal(one.coef_, other.coef_)


def test_commas_that_may_be_something_else_are_asked_about(command):
    few = pd.DataFrame({"x": ["1,5", "2,5"] * 30, "z": RNG.normal(size=60), "y": [0, 1, 1] * 20})
    few.to_csv("quoted.csv", index=False)  # with two values, it became a category
    err = refused(command, "quoted.csv", "-t", "y")
    assert "column 'x' must be numbers with a decimal point, or text; got '1,5' in line 2. Pass --decimal ," in err
    document, _ = fit(command, "quoted.csv", "-t", "y", "--category", "x")
    assert "x[T.2,5]" in means(document)
    few.assign(x=["1,234", "2,345"] * 30, z=1).to_csv("thousands.csv", index=False, sep=";")
    assert refused(command, "thousands.csv", "-t", "y").endswith("Remove the commas if they mark thousands.")
    few.assign(x=few["x"].str.replace(",", ".")).to_csv("points.csv", index=False, sep=";")
    err = refused(command, "points.csv", "-t", "y", "--decimal", ",")
    assert "must have decimal commas, as the table has; got '1.5' in line 2. Pass --decimal ." in err


def test_which_files_show_decimal_commas(tmp_path):
    def mark(text, **options):
        (tmp_path / "t.csv").write_text(text)
        return decimal_of(TableFile(tmp_path / "t.csv", **options))

    assert mark("a;b\n1,5;x\n2;y\n") == ","
    assert mark("a;b\n0,125;x\n2;y\n") == ","  # no thousands
    assert mark("a;b\n1,125;x\n2,500;y\n") == "."  # thousands, perhaps
    assert mark("a;b\n1,5;2.5\n2;3.5\n") == "."  # both
    assert mark("a;b\n1,5;x\nz;y\n") == "."  # text
    assert mark("a;b\n1,5;x\n?;y\n", missing=("?",)) == ","
    assert mark('a,b\n"1,5",x\n2,y\n') == "."
    assert mark("a;b\n1,5;x\n", decimal=".") == "."


# --- quotes ---


def test_a_pair_of_stray_quotes_is_found(command, tmp_path):
    lines = FRAME.to_csv(index=False).splitlines()
    lines[9] = lines[9].replace("east", '"east').replace("north", '"north')
    lines[19] = lines[19].replace(",yes", '",yes').replace(",no", '",no')
    (tmp_path / "t.csv").write_text("\n".join(lines))
    err = refused(command, "t.csv", "-t", "y")
    assert "a cell must not span lines; got one in column 'ward', which begins in line 10 of t.csv." in err
    document, err = fit(command, "t.csv", "-t", "y", "--multiline")
    assert document["data"]["rows"] == ROWS - 10
    assert "some cells span lines; the first is in column 'ward' and begins in line 10." in err
    FRAME.to_csv("plain.csv", index=False)
    fit(command, "plain.csv", "-t", "y", "-o", "m.viper")
    code, _, err = command("predict", "m.viper", "t.csv", "-o", "p.csv")
    assert (code, Path("p.csv").exists()) == (3, False)
    assert "line 10" in err
    with pytest.raises(FileError, match=r"one in column 'ward', which begins in line 10 of"):
        list(TableFile(tmp_path / "t.csv").chunks(3))
    source = {"target": "y", "features": ["age", "dose"]}  # the cell is in a column that is not read
    with pytest.raises(FileError, match=r"begins in line 10 of .*or write multiline=True"):
        viper.VariationalLogisticRegression().fit(viper.Files(tmp_path / "t.csv", **source))
    viper.VariationalLogisticRegression().fit(viper.Files(tmp_path / "t.csv", **source, multiline=True))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ('1,"2,1\n3,4,0\n5,6,1"\n2,3,1\n', "a cell must not span lines; got one, which begins in line 4 of"),
        ('1,"2,1\n3,4,0\n', "quotes must be closed; got one that is not, in the row that begins in line 4 of"),
    ],
)
def test_an_open_quote_is_named_where_it_opens(rows, words, command, tmp_path):
    (tmp_path / "t.csv").write_text(f"a,b,y\n1,2,0\n\n{rows}")
    assert words in refused(command, "t.csv", "-t", "y")


def test_a_name_that_spans_lines(command, tmp_path):
    (tmp_path / "t.csv").write_text('a,"b\n1,2\n3",y\n1,2,0\n2,3,1\n')
    assert "got a name, which begins in line 1" in refused(command, "t.csv", "-t", "y")


def test_a_first_column_of_row_numbers_is_left_out_and_said(command, plain):
    FRAME.to_csv("index.csv")
    document, err = fit(command, "index.csv", "-t", "y")
    same(document, plain)
    assert "the first column, without a name, is left out: it looks like row numbers." in err
    FRAME.reset_index(names="Unnamed: 0").to_csv("again.csv", index=False)
    document, err = fit(command, "again.csv", "-t", "y")
    same(document, plain)
    assert "the first column, named 'Unnamed: 0', is left out" in err
    FRAME.rename(columns={"age": "Unnamed: 0 but of use"}).to_csv("kept.csv", index=False)
    assert "Unnamed: 0 but of use" in means(fit(command, "kept.csv", "-t", "y")[0])


@pytest.mark.parametrize(
    ("option", "mark"), [("separator", ""), ("separator", ";;"), ("decimal", ""), ("decimal", "ab")]
)
def test_marks_are_one_character(option, mark, command, plain):
    err = refused(command, "plain.csv", "-t", "y", f"--{option}", mark)
    assert f"the {option} must be one character; got {mark!r}" in err


def test_undecodable_gzip_is_known_by_its_bytes(tmp_path):
    path = tmp_path / "t.csv"  # not .gz
    path.write_bytes(gzip.compress("name,y\nb,0\nJosé,1\n".encode("latin-1")))
    with pytest.raises(FileError, match=r"got byte 0xe9 at position 14, in line 3\. Pass --encoding latin-1"):
        TableFile(path).read()


# --- Excel ---


def workbook(path, sheets):
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    book.save(path)


def rows_of(frame):
    return [list(frame.columns), *frame.astype(object).values.tolist()]


def test_a_workbook_gives_the_same_model(command, plain):
    workbook("t.xlsx", {"data": rows_of(FRAME), "notes": [["nothing"], [1]]})
    document, err = fit(command, "t.xlsx", "-t", "y", "-o", "m.viper")
    same(document, plain)
    assert "sheet 'data' is read, the first of 2; pass --sheet for another." in err
    for sheet in ("data", "1"):
        document, err = fit(command, "t.xlsx", "-t", "y", "--sheet", sheet)
        same(document, plain)
        assert "sheet" not in err
    for sheet, hint in (("dta", "Did you mean 'data'?"), ("3", "Choose one of 'data', 'notes'.")):
        err = refused(command, "t.xlsx", "-t", "y", "--sheet", sheet)
        assert err.endswith(f"--sheet must be a sheet of t.xlsx, or its number; got {sheet!r}. {hint}")
    assert command("predict", "m.viper", "t.xlsx", "-o", "p.csv")[0] == 0
    assert pd.read_csv("p.csv")["probability"].count() == ROWS


def test_the_cells_of_a_workbook(tmp_path):
    when = datetime(2024, 2, 29, 13, 30)
    rows = [
        ["n", "text", "day", "time", "yes", "formula"],
        [0.1, "a\nb", date(2024, 2, 29), when, True, "=1+1"],
        [None, None, None, None, None, None],
        [2, "c, d", date(1900, 3, 1), when, False, None],
    ]
    path = tmp_path / "t.xlsx"
    workbook(path, {"one": rows})
    table = TableFile(path)
    frame = table.read()
    assert frame["n"].tolist() == [0.1, 2.0]
    assert frame["text"].tolist() == ["a b", "c, d"]
    assert frame["day"].tolist() == ["2024-02-29", "1900-03-01"]
    assert frame["time"].tolist() == ["2024-02-29 13:30:00"] * 2
    assert frame["yes"].tolist() == [True, False]
    assert [table.place(row) for row in range(2)] == ["row 2", "row 4"]


def test_faults_of_a_workbook_name_the_row(command):
    bad = rows_of(FRAME)
    bad[30][0] = "fifty"
    workbook("t.xlsx", {"data": bad})
    err = refused(command, "t.xlsx", "-t", "y")
    assert "column 'age' must be numeric, as most of it is; got 'fifty' in row 31." in err
    bad[30] = [*rows_of(FRAME)[30], "beside"]
    workbook("t.xlsx", {"data": bad})
    err = refused(command, "t.xlsx", "-t", "y")
    assert "every row must have 4 cells, like the header; got 5 in row 31 of t.xlsx." in err
    Path("t.xls").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" * 10)
    assert "got a workbook of old Excel. Save it as .xlsx or as CSV." in refused(command, "t.xls", "-t", "y")


def test_without_openpyxl_the_message_says_what_to_install(command, monkeypatch):
    workbook("t.xlsx", {"data": rows_of(FRAME)})
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    err = refused(command, "t.xlsx", "-t", "y")
    assert "reading Excel files needs openpyxl. Run: pip install 'vi-per[excel]'" in err


# --- pipes ---


@pytest.mark.parametrize("kind", ["csv", "parquet", "csv.gz"])
def test_standard_input_and_pipes_are_read_once(kind, command, plain, monkeypatch):
    (FRAME.to_parquet if kind == "parquet" else FRAME.to_csv)(f"t.{kind}", index=False)
    contents = Path(f"t.{kind}").read_bytes()
    os.mkfifo("pipe")
    feeding = threading.Thread(target=lambda: Path("pipe").write_bytes(contents))
    feeding.start()
    document, _ = fit(command, "pipe", "-t", "y")
    feeding.join()
    same(document, plain)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(contents)))
    document, _ = fit(command, "-", "-t", "y")
    same(document, plain)
    assert document["data"]["file"] == "standard input"


def test_streams_of_a_shell(plain, command):
    fit(command, "plain.csv", "-t", "y", "-o", "m.viper")
    command("predict", "m.viper", "plain.csv", "-o", "p.csv")
    line = f"cat plain.csv | {sys.executable} -m viper predict m.viper /dev/stdin"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout == Path("p.csv").read_text(), done.stderr


def test_what_is_said_about_streams(command, tmp_path):
    line = f"printf 'a,b\\n1\\n' | {sys.executable} -m viper fit - -t a"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3
    assert "line 2 of standard input" in done.stderr
    assert "which is a device or a socket" in refused(command, "/dev/zero", "-t", "y")
    os.mkfifo("pipe")
    with pytest.raises(ValueError, match="path must name regular files, which can be read in every pass; got 'pipe'"):
        viper.VariationalLogisticRegression().fit(viper.Files("pipe", target="y"))


@pytest.mark.parametrize("change", ["cut", "compressed", "text", "no sheet", "not XML"])
def test_a_damaged_workbook_is_one_line(change, command):
    """openpyxl does not validate what it reads, and raises errors of many types."""
    FRAME.to_excel("t.xlsx", index=False)
    whole = Path("t.xlsx").read_bytes()
    with zipfile.ZipFile("t.xlsx") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
        at = archive.getinfo("xl/worksheets/sheet1.xml").header_offset + 150
    sheet = "xl/worksheets/sheet1.xml"
    if change == "no sheet":
        del parts[sheet]
    changed = {"text": parts.get(sheet, b"").replace(b't="n"', b't="s"'), "not XML": b"<a>"}.get(change)
    with zipfile.ZipFile("t.xlsx", "w") as archive:
        for name, text in parts.items():
            archive.writestr(name, changed if changed is not None and name == sheet else text)
    if change == "cut":
        Path("t.xlsx").write_bytes(whole[: len(whole) // 2])
    if change == "compressed":
        Path("t.xlsx").write_bytes(whole[:at] + bytes(99) + whole[at + 99 :])
    assert "t.xlsx must be an Excel workbook; got a zip archive or a damaged file: " in refused(
        command, "t.xlsx", "-t", "y"
    )


def test_a_stream_that_the_disk_has_no_room_for(command, monkeypatch):
    Path("t.csv").write_text("x,y\n" + "1,0\n2,1\n" * 400)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    os.mkfifo("pipe")
    threading.Thread(target=lambda: Path("pipe").write_bytes(Path("t.csv").read_bytes()), daemon=True).start()
    err = refused(command, "pipe", "-t", "y")
    assert (
        "and may take half of the free space there; got pipe, which needs more. Set TMPDIR to a folder on a larger disk"
        in err
    )


# --- files made to exhaust memory or time ---


def test_a_bomb_of_one_line(command, tmp_path):
    with gzip.open(tmp_path / "t.csv.gz", "wb", compresslevel=1) as file:
        file.write(b"a,b\n1,")
        for _ in range(3):
            file.write(b"1" * MOST_LINE)
    assert "a line of a table may have at most 17 MB; got a longer one in t.csv.gz." in refused(
        command, "t.csv.gz", "-t", "a"
    )


@pytest.mark.parametrize("mark", [",", ";"])
def test_a_cell_longer_than_csv_allows(mark, command):
    """Python's csv module has its own limit, which applies when lines are counted or decimal commas searched for."""
    rows = [f"{i}{mark}{i % 2}" for i in range(30)]
    Path("t.csv").write_text("\n".join([f"x{mark}y", *rows, "1" * 200_000, ""]))
    message = "t.csv must be CSV; got field larger than field limit (131072) in line 32. Check its quotes"
    assert message in refused(command, "t.csv", "-t", "y")
    with pytest.raises(FileError, match=re.escape(message) if mark == ";" else "every line must have 2 fields"):
        viper.VariationalLogisticRegression().fit(viper.Files("t.csv", target="y"))


def test_a_bomb_of_lines(command, monkeypatch):
    monkeypatch.setattr("viper.data.csv_text.MOST_BYTES", 5_000)
    with gzip.open("t.csv.gz", "wb") as file:
        file.write(b"a,y\n" + b"1,0\n2,1\n" * 2_500)
    err = refused(command, "t.csv.gz", "-t", "y")
    assert "a table may take at most 5e-06 GB in memory; got t.csv.gz, which takes" in err
    assert err.endswith("Pass --max-gb 1 if it is meant to.")
    fit(command, "t.csv.gz", "-t", "y", "--max-gb", "1")


def test_twice_as_many_columns_are_twice_the_work(tmp_path):
    """Counted in function calls, in Python and in C libraries."""

    def calls(columns):
        path, counts = tmp_path / "t.csv", Counter()
        path.write_text("\n".join([",".join(f"x{i}" for i in range(columns)), *[",".join(["1.5"] * columns)] * 2]))
        gc.disable()  # what earlier tests left would call its finalisers here
        sys.setprofile(lambda frame, event, argument: counts.update([event]))
        try:
            table = TableFile(path)
            check_numbers(table.read(), table)
        finally:
            sys.setprofile(None)
            gc.enable()
        return counts["call"] + counts["c_call"]

    calls(10)
    few, more, many = calls(500), calls(1_000), calls(2_000)
    assert many - more == pytest.approx(2 * (more - few), rel=0.01)


def test_many_columns_are_one_line_before_the_work_begins(command, monkeypatch):
    monkeypatch.setattr("viper.formula.columns.MOST_COLUMNS", 3)
    frame = FRAME.assign(more=1.0)
    frame.to_csv("t.csv", index=False)
    message = "a formula may have at most 3 columns; got 4. Name the ones you need, or fit the array"
    assert message in refused(command, "t.csv", "-t", "y")
    with pytest.raises(FormulaError, match=message):
        viper.VariationalLogisticRegression.from_formula("y ~ age + dose + ward + more", frame)
    fit(command, "t.csv", "--formula", "y ~ age + dose + ward")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_bomb_of_equal_rows(suffix, command, monkeypatch):
    table = pa.table({"x": np.zeros(200_000), "y": np.arange(200_000) % 2})
    if suffix == "parquet":
        pq.write_table(table, "t.parquet")
    else:
        with pa.ipc.new_file("t.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as sink:
            sink.write_table(table, 1000)
    monkeypatch.setattr("viper.data.csv_text.MOST_BYTES", 100_000)
    monkeypatch.setattr("viper.data.csv_text.MOST_GROWTH", 1)
    err = refused(command, f"t.{suffix}", "-t", "y")
    assert f"got t.{suffix}, which takes" in err
    assert "Pass --max-gb 1 if" in err
    assert "a column of use besides the target; got" in refused(command, f"t.{suffix}", "-t", "y", "--max-gb", "1")


def test_a_workbook_that_unpacks_to_too_much(command, monkeypatch):
    workbook("t.xlsx", {"data": rows_of(FRAME)})
    monkeypatch.setattr("viper.data.csv_text.MOST_BYTES", 1000)
    monkeypatch.setattr("viper.data.csv_text.MOST_GROWTH", 0)
    assert "got t.xlsx, which takes" in refused(command, "t.xlsx", "-t", "y")


@pytest.mark.parametrize("index", [2**31, 2**40, 10**30])
def test_a_large_libsvm_index(index, command, tmp_path):
    (tmp_path / "t.libsvm").write_text(f"1 1:2\n0 {index}:1\n")
    assert "t.libsvm must be LIBSVM text" in refused(command, "t.libsvm", "-t", "y")


def test_columns_of_one_name_in_parquet(command):
    columns = [pa.array([1.0, 2.0]), pa.array([3.0, 4.0]), pa.array([0, 1])]
    pq.write_table(pa.Table.from_arrays(columns, ["a", "a", "y"]), "t.parquet")
    assert "columns must have different names; got 'a' twice in t.parquet. Rename one." in refused(
        command, "t.parquet", "-t", "y"
    )


def test_sheets_are_listed_in_order(tmp_path):
    workbook(tmp_path / "t.xlsx", {"b": [[1]], "a": [[2]]})
    assert excel.sheet_names(tmp_path / "t.xlsx") == ["b", "a"]
