"""Mutated tables: CSV in several dialects, gz, Parquet, Arrow, Excel, LIBSVM.

Half of the cases write the same rows in another dialect or format; the fit must be the same to the last digits. The
others damage the file, or put something strange into cells, names and rows; the command must then succeed with finite
numbers, or say in one line what is wrong.
"""

import gzip
import io
import json
import math
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

import viper
from hostile.harness import SilentlyWrong, choose, outcome_of, outcome_of_command, run_command

ROWS = 40
OTHERS = 16_000  # columns of a wide table
CELLS = [
    *[
        "",
        " ",
        "NA",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "1e-400",
        "1e308",
        "-1e308",
        "0x10",
        "1_000",
        "1,5",
        "1.5.2",
        "--",
        "+",
    ],
    *[
        "\0",
        "\x1b[31m",
        '"',
        '""',
        '"a',
        "'",
        "=1+1",
        "@SUM(A1)",
        "\ufeff",
        "é",
        "🐍",
        "\u202e",
        "<b>",
        "[bold]",
        ":x:",
        "\\",
    ],
    *[
        "True",
        "2020-01-01",
        "31.12.2020",
        "1 000",
        "12%",
        "$3",
        "a" * 3000,
        "9" * 400,
        "null",
        "None",
        "#N/A",
        "１２",
        "٣",
    ],
]
NAMES = [
    "",
    " ",
    "y",
    "x1",
    "intercept",
    "Unnamed: 0",
    "a b",
    "`",
    "a`b",
    "C(x1)",
    "1",
    "é",
    "[red]",
    "a:x:b",
    "\x1b[2J",
    "label",
]
NAMES += [
    "probability",
    "x" * 500,
    "~",
    "I(x1)",
    "a\nb",
    'a"b',
    "True",
    "None",
    "__class__",
    "index",
    "=1+1",
    "<script>",
]


XML_CHANGES = [  # in a workbook
    (b'<c r="A2"', b'<c r="XFD1048576"'),
    (b'<c r="A2"', b'<c r="2A"'),
    (b'<row r="2"', b'<row r="900000"'),
    (b'<row r="2"', b'<row r="x"'),
    (b't="n"', b't="d"'),
    (b't="n"', b't="e"'),
    (b't="s"', b't="n"'),
    (b"<v>", b"<f>1/0</f><v>"),
    (b"<v>1</v>", b"<v>99999999</v>"),
    (b"<v>1</v>", b"<v>-1</v>"),
    (b"<v>1</v>", b"<v>1e999</v>"),
    (b's="1"', b's="77"'),
    (b"<si>", b"<si><r/>"),
    (b"rId1", b"rId9"),
    (b'sheetId="1"', b'sheetId="x"'),
    (b"utf-8", b"utf-16"),
    (b"UTF-8", b"EBCDIC"),
    (b"?>", b'?><!DOCTYPE a [<!ENTITY b "c"><!ENTITY d "&b;&b;">]>'),
    (b"</worksheet>", b""),
]


class Material(NamedTuple):
    table: pd.DataFrame
    elbo: float  # of the fit to the unchanged table
    model: Path


def prepare(folder: Path) -> Material:
    rng = np.random.default_rng(1)
    table = pd.DataFrame(
        {"x1": rng.normal(size=ROWS), "x2": rng.integers(0, 90, ROWS), "ward": rng.choice(list("abc"), ROWS)}
    )
    table["y"] = np.where(rng.random(ROWS) < 0.5, "yes", "no")
    path, model = folder / "table.csv", folder / "model.viper"
    table.to_csv(path, index=False)
    code, out, err = run_command("fit", path, "--target", "y", "--cv", "0", "--json", "--out", model)
    assert code == 0, err
    return Material(table, json.loads(out)["elbo"], model)


def run_case(material: Material, seed: int) -> tuple[str, str]:
    generator = random.Random(seed)
    for old in Path().glob("rows*"):
        old.unlink()
    if seed % 60 == 0:
        return fit_same_rows(material, wide(material.table), "--formula", "y ~ x1 + x2 + ward")
    if generator.random() < 0.3:
        return same_rows(material, generator)
    path = choose(generator, ATTACKS)(material.table.copy(), generator)
    return use(material, path, generator)


# --- the same rows, written otherwise ---


def same_rows(material: Material, generator: random.Random) -> tuple[str, str]:
    """Fit the same rows in another dialect or format; the ELBO must not notice."""
    table, options = material.table, []
    kind = generator.choice(["csv", "csv", "gz", "parquet", "feather", "xlsx"])
    if kind in ("parquet", "feather", "xlsx"):
        path = write_binary(table, generator, kind)
    else:
        separator = generator.choice([",", ";", "\t", "|"])
        decimal = "," if separator == ";" and generator.random() < 0.5 else "."
        ending, quoting = generator.choice(["\n", "\r\n"]), generator.choice([0, 1, 2])
        text = table.to_csv(index=False, sep=separator, decimal=decimal, lineterminator=ending, quoting=quoting)
        coding = generator.choice(["utf-8", "utf-8-sig"])
        path = Path(generator.choice(["rows.csv", "rows.txt", "rows"]) + (".gz" if kind == "gz" else ""))
        data = text.encode(coding)
        path.write_bytes(gzip.compress(data) if kind == "gz" else data)
        options = ["--decimal", ","] if decimal == "," else []
    return fit_same_rows(material, path, "--target", "y", *options)


def wide(table: pd.DataFrame) -> Path:
    """Thousands of other columns, which take thousands of times the work of one, not its square."""
    others = [",".join(f"other{i}" for i in range(OTHERS)), *[",".join(["1.5"] * OTHERS)] * len(table)]
    path = Path("rows.csv")
    lines = zip(table.to_csv(index=False).splitlines(), others, strict=True)
    path.write_text("\n".join(f"{row},{more}" for row, more in lines))
    return path


def fit_same_rows(material: Material, path: Path, *options: str) -> tuple[str, str]:
    code, out, err = run_command("fit", path, "--cv", "0", "--json", *options)
    if code:
        return "wrong", f"{path}: exit {code}: {err[-300:]}"
    elbo = json.loads(out)["elbo"]
    if abs(elbo - material.elbo) > 1e-9 * abs(elbo):
        raise SilentlyWrong(f"{path}: an ELBO of {elbo} for {material.elbo}")
    return "right", ""


def as_cell(value: Any) -> Any:
    """A value without the characters that no cell of a workbook can hold."""
    return ILLEGAL_CHARACTERS_RE.sub("", value) if isinstance(value, str) else value


def write_binary(table: pd.DataFrame, generator: random.Random, kind: str) -> Path:
    path = Path(f"rows.{kind}")
    if kind == "xlsx":
        table.map(as_cell).rename(columns=as_cell).to_excel(path, index=False)
    elif kind == "parquet":
        compression = generator.choice(["snappy", "gzip", "none", "zstd"])
        table.to_parquet(path, index=False, compression=None if compression == "none" else compression)
    else:
        compression = generator.choice(["uncompressed", "lz4", "zstd"])
        table.to_feather(path, compression=compression)
    return path


# --- attacks ---


def as_csv(table: pd.DataFrame, generator: random.Random) -> str:
    return table.to_csv(index=False, sep=generator.choice([",", ";", "\t"]), quoting=generator.choice([0, 1]))


def damage(data: bytes, generator: random.Random) -> bytes:
    """Bytes changed, lost, doubled or cut off."""
    changed = bytearray(data)
    for _ in range(generator.choice([1, 1, 2, 8])):
        at, length = generator.randrange(max(1, len(changed))), generator.choice([1, 1, 4, 30, 200])
        match generator.randrange(5):
            case 0 if changed:
                changed[at] ^= 1 << generator.randrange(8)
            case 1:
                changed[at : at + length] = generator.randbytes(length)
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = changed[at : at + length]
            case 4:
                del changed[max(1, at) :]
    return bytes(changed)


def damaged_text(table: pd.DataFrame, generator: random.Random) -> Path:
    data = damage(as_csv(table, generator).encode(), generator)
    return written(data, generator.choice(["rows.csv", "rows.csv.gz", "rows.tsv", "rows"]), generator)


def written(data: bytes, name: str, generator: random.Random) -> Path:
    """A file by its name; one that is called gz is compressed, mostly, and then perhaps damaged."""
    path = Path(name)
    if name.endswith(".gz") and generator.random() < 0.9:
        data = gzip.compress(data)
        data = damage(data, generator) if generator.random() < 0.5 else data
    path.write_bytes(data)
    return path


def damaged_binary(table: pd.DataFrame, generator: random.Random) -> Path:
    path = write_binary(table, generator, generator.choice(["parquet", "feather", "xlsx"]))
    path.write_bytes(damage(path.read_bytes(), generator))
    return path


def damaged_workbook(table: pd.DataFrame, generator: random.Random) -> Path:
    """A sound archive of which one part is damaged, swapped or gone."""
    path = write_binary(table, generator, "xlsx")
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = generator.choice([*parts, *[part for part in parts if "sheet" in part or "workbook" in part] * 3])
    match generator.randrange(4):
        case 0:
            parts[name] = damage(parts[name], generator)
        case 1:
            parts[name] = parts[generator.choice([*parts])]
        case 2:
            del parts[name]
        case 3:
            old, new = generator.choice(XML_CHANGES)
            parts = {one: text.replace(old, new, generator.choice([1, -1])) for one, text in parts.items()}
    with zipfile.ZipFile(path, "w", generator.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for one, text in parts.items():
            archive.writestr(one, text)
    return path


def strange_cells(table: pd.DataFrame, generator: random.Random) -> Path:
    """Some cells become something that a column of its kind does not hold."""
    cells = table.astype(object)
    for _ in range(generator.choice([1, 2, 5, 30])):
        cells.iat[generator.randrange(ROWS), generator.randrange(cells.shape[1])] = generator.choice(CELLS)
    path = Path("rows.csv")
    if generator.random() < 0.3:
        lines = [",".join(map(str, row)) for row in [cells.columns, *cells.to_numpy()]]  # nothing is quoted
        path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    else:
        cells.to_csv(path, index=False, escapechar="\\")
    return path


def strange_names(table: pd.DataFrame, generator: random.Random) -> Path:
    names = [generator.choice(NAMES) if generator.random() < 0.4 else name for name in table.columns]
    table.columns = names
    if generator.random() < 0.3 and len(set(names)) == len(names):
        return write_binary(table, generator, generator.choice(["parquet", "xlsx"]))
    path = Path("rows.csv")
    table.to_csv(path, index=False)
    return path


def strange_rows(table: pd.DataFrame, generator: random.Random) -> Path:
    """Rows that are too long or short, empty, comments, a second header, no rows at all, one row, one class."""
    lines = as_csv(table, generator).splitlines()
    for _ in range(generator.choice([1, 3])):
        if not lines:
            break
        at = generator.randrange(1, len(lines)) if len(lines) > 1 else 0
        match generator.randrange(8):
            case 0:
                lines[at] += generator.choice([",", ",1", ";;;", "\t", '"'])
            case 1:
                lines[at] = lines[at].rpartition(",")[0]
            case 2:
                lines.insert(at, generator.choice(["", "# comment", " ", lines[0], '"', ",,,"]))
            case 3:
                lines = lines[: generator.choice([1, 2, 3])]
            case 4:
                lines = [lines[0]] + [line for line in lines[1:] if "yes" in line]
            case 5:
                lines = lines[1:]
            case 6:
                lines[at] = lines[at].replace(",", ", ").replace("yes", generator.choice(["Yes", "yes ", "maybe"]))
            case 7:
                lines[0] = lines[0].replace("x1", generator.choice(NAMES).replace("\n", " "))
    path = Path("rows.csv")
    path.write_text(
        generator.choice(["\n", "\r\n", "\r", "\n\r"]).join(lines), encoding="utf-8", errors="surrogatepass"
    )
    return path


def strange_types(table: pd.DataFrame, generator: random.Random) -> Path:
    """Columns of types that only Parquet and Arrow have."""
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet

    made: dict[str, Any] = {
        "list": pa.array([[1, 2]] * ROWS),
        "struct": pa.array([{"a": 1}] * ROWS),
        "map": pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int64())),
        "binary": pa.array([b"\xff"] * ROWS),
        "decimal": pa.array(range(ROWS)).cast(pa.decimal128(21, 2)),
        "date": pa.array(range(ROWS), pa.int32()).cast(pa.date32()),
        "time": pa.array(range(ROWS), pa.int64()).cast(pa.timestamp("ns", "UTC")),
        "null": pa.nulls(ROWS),
        "dictionary": pa.array(["a", "b"] * (ROWS // 2)).dictionary_encode(),
        "bool": pa.array([True, None] * (ROWS // 2)),
        "nan": pa.array([math.nan, 1.0] * (ROWS // 2)),
        "half": pa.array(np.arange(ROWS, dtype=np.float16)),
        "big": pa.array([2**63] * ROWS, pa.uint64()),
        "duration": pa.array(range(ROWS), pa.duration("s")),
    }
    kind = generator.choice(sorted(made))
    rows = pa.Table.from_pandas(table)
    place = generator.choice([*table.columns, "more"])
    at = rows.schema.get_field_index(place)
    rows = rows.append_column("more", made[kind]) if at < 0 else rows.set_column(at, place, made[kind])
    if generator.random() < 0.2:
        rows = rows.append_column(generator.choice(table.columns), made["decimal"])  # a name that is there twice
    path = Path(generator.choice(["rows.parquet", "rows.feather", "rows.arrow"]))
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(rows, path)
    else:
        try:
            pyarrow.feather.write_feather(rows, path)
        except ValueError:  # which has no duplicate names
            pyarrow.parquet.write_table(rows, path)
    return path


def libsvm(table: pd.DataFrame, generator: random.Random) -> Path:
    lines = [f"{generator.choice([0, 1])} 1:{x:.3f} 2:{z}" for x, z in zip(table["x1"], table["x2"], strict=True)]
    for _ in range(generator.choice([0, 1, 3])):
        at = generator.randrange(len(lines))
        lines[at] += generator.choice(
            [" 3", " 2:1", " 5:x", " 2147483648:1", " 99999999999:1", " -1:2", " 3:nan", " :", " qid:1"]
        )
    text = "\n".join(lines)
    data = text.encode() if generator.random() < 0.5 else damage(text.encode(), generator)
    path = Path("rows.libsvm")
    path.write_bytes(data)
    return path


def bomb(table: pd.DataFrame, generator: random.Random) -> Path:
    """Few bytes that become many."""
    path = Path("rows.csv.gz")
    text = as_csv(table, generator)
    match generator.randrange(3):
        case 0:
            path.write_bytes(gzip.compress(text.encode() + b"1" * 60_000_000, 1))
        case 1:
            path.write_bytes(gzip.compress((text + "\n" + "," * 200_000).encode()))
        case 2:
            path = Path("rows.parquet")
            pd.DataFrame({"x1": np.zeros(3_000_000), "y": np.arange(3_000_000) % 2}).to_parquet(path)
    return path


def other_file(table: pd.DataFrame, generator: random.Random) -> Path:
    """Something that is no table, or has the name of another kind."""
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(9))
    contents = [
        b"",
        b"\0" * 500,
        b"PK\x03\x04" + bytes(90),
        b"\x80\x04N.",
        buffer.getvalue(),
        generator.randbytes(300),
        b"\n\n\n",
    ]
    contents += [
        b"PAR1" + bytes(50) + b"PAR1",
        b"ARROW1\0\0" + bytes(50),
        b"\x1f\x8b" + bytes(40),
        b"{}",
        b"y\n",
        b"y,x1",
    ]
    path = Path(
        generator.choice(["rows.csv", "rows.parquet", "rows.feather", "rows.csv.gz", "rows.libsvm", "rows.txt"])
    )
    path.write_bytes(generator.choice(contents))
    return path


ATTACKS = {
    damaged_text: 5,
    damaged_binary: 5,
    damaged_workbook: 3,
    strange_cells: 5,
    strange_names: 3,
    strange_rows: 5,
    strange_types: 3,
    libsvm: 2,
    other_file: 1,
    bomb: 0.1,
}


# --- what is done with a table ---


def use(material: Material, path: Path, generator: random.Random) -> tuple[str, str]:
    match generator.randrange(6):
        case 0:
            return predict(material, path)
        case 1 if path.suffix != ".xlsx":
            return stream(path)
        case 2:
            return describe(material, path, generator)
    target = [] if path.suffix == ".libsvm" else ["--target", "y"]
    missing = generator.choice(["error", "drop", "mean", "indicator", "multiple"])
    code, out, err = run_command("fit", path, *target, "--cv", "0", "--json", "--missing", missing)
    if code:
        return outcome_of_command(code, err)
    document = json.loads(out)
    rows = document["coefficients"]
    if not all(math.isfinite(row[name]) for row in rows for name in ("mean", "sd", "lower", "upper")):
        raise SilentlyWrong("coefficients that are not finite")
    return "right", ""


def describe(material: Material, path: Path, generator: random.Random) -> tuple[str, str]:
    """What other commands say of a table, as JSON or as text."""
    other: list[tuple[Any, ...]] = [
        ("missing", path, "--target", "y"),
        ("missing", path),
        ("evaluate", material.model, path),
        ("evaluate", material.model, path, "--by", "ward", "--checks"),
        ("effects", material.model, path),
        ("effects", material.model, path, "--contrast", "ward", "--by", "ward"),
        ("report", material.model, path, "--out", "rows.html", "--force"),
    ]
    command = generator.choice(other)
    more = ["--json"] if command[0] != "report" and generator.random() < 0.5 else []
    code, out, err = run_command(*command, *more)
    if code not in (0, 5):
        return outcome_of_command(code, err)
    if more:
        json.loads(out, parse_constant=refuse_constant)
    return "right", ""


def refuse_constant(word: str) -> None:
    raise SilentlyWrong(f"{word} in JSON")


def predict(material: Material, path: Path) -> tuple[str, str]:
    code, _, err = run_command("predict", material.model, path, "--out", "rows_out.csv", "--force")
    if code not in (0, 5):  # 5: some rows have no prediction, and a note says why
        return outcome_of_command(code, err)
    found = pd.read_csv("rows_out.csv")
    probability = found.filter(regex="^probability").iloc[:, 0].dropna()
    if not ((probability >= 0) & (probability <= 1)).all():
        raise SilentlyWrong("probabilities that are none")
    return "right", ""


def stream(path: Path) -> tuple[str, str]:
    """The same file by `viper.Files`, in Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = viper.VariationalLogisticRegression().fit(viper.Files(str(path), target="y"))
        except (ValueError, ImportError) as error:
            return outcome_of(error)
    if not np.isfinite(model.coef_).all():
        raise SilentlyWrong("coefficients that are not finite")
    return "right", ""
