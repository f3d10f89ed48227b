"""Parquet, Arrow and CSV files as batches of columns, through pyarrow: which there are, whether they agree, their rows.

Everything that can be wrong with a file is said here, with the name of the file.
"""

import glob
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from viper.data.csv_text import likely_separator, line_of, records_of

KINDS = {
    ".parquet": "Parquet",
    ".pq": "Parquet",
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".ipc": "Arrow",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".txt": "CSV",
}
IN_FOLDERS = [ending for ending in KINDS if ending != ".txt"]  # notes often lie there too: their name must be given
NO_ROWS = {".bak", ".crc", ".md5", ".sha256", ".tmp"}  # what lies beside files of rows, with the same name before it
MAGIC = {b"PAR1": "Parquet", b"ARROW1": "Arrow"}
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
CSV_BLOCK = 1 << 22  # bytes parsed at a time
PAGE_BUFFER = 1 << 20  # bytes of a Parquet column held while its pages are read


def arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ImportError("reading and writing files needs pyarrow. Run: pip install 'vi-per[arrow]'") from None
    return pyarrow


@dataclass(frozen=True)
class File:
    """One file of a table."""

    path: Path

    @cached_property
    def endings(self) -> list[str]:
        """What the name ends in, in small letters: that of a kind, and before it that of a compression, if any."""
        endings = [ending.lower() for ending in self.path.suffixes[-2:]]
        return endings[::-1] if endings and endings[-1] in COMPRESSED else [*endings[-1:]]

    @cached_property
    def kind(self) -> str:
        if self.endings and self.endings[-1] in KINDS:
            return KINDS[self.endings[-1]]
        with self.path.open("rb") as file:
            start = file.read(6)
        found = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
        if found is None:
            raise ValueError(f"the name of a file must end in one of {', '.join(KINDS)}; got {self.path}. Rename it.")
        return found

    @cached_property
    def schema(self) -> Any:
        """Columns and their types; of a CSV file, as its first block suggests them."""
        with self.readable():
            if self.kind == "Parquet":
                return self.parquet().schema_arrow
            if self.kind == "Arrow":
                with arrow().memory_map(str(self.path)) as file:
                    return open_ipc(file).schema
            with self.csv({}) as reader:
                found = reader.schema
                list(found.names)  # so that names that are not UTF-8 are found here
                return found

    @cached_property
    def index(self) -> set[str]:
        """The columns that name or number rows: pandas' index, and a first one without a name in a CSV file."""
        if self.kind == "CSV":
            return {""} & {*self.schema.names[:1]}
        known = (self.schema.pandas_metadata or {}).get("index_columns", [])
        return {name for name in known if isinstance(name, str)}

    def batches(self, columns: list[str], numbers: set[str], rows: int) -> Iterator[Any]:
        """Record batches of these columns, those in `numbers` as such, of about so many rows."""
        with self.readable():
            if self.kind == "Parquet":
                # page by page: neither a file nor a row group is ever held whole
                yield from self.parquet().iter_batches(rows, columns=columns, use_threads=False)
            elif self.kind == "Arrow":
                with arrow().memory_map(str(self.path)) as file:
                    whole = (batch.select(columns) for batch in ipc_batches(open_ipc(file)))
                    yield from (batch.slice(i, rows) for batch in whole for i in range(0, batch.num_rows, rows))
            else:
                types = {
                    name: arrow().float64() if name in numbers else self.schema.field(name).type for name in columns
                }
                with self.csv({"include_columns": columns, "column_types": types}) as reader:
                    yield from reader

    def parquet(self) -> Any:
        import pyarrow.parquet as parquet

        return parquet.ParquetFile(
            self.path, buffer_size=PAGE_BUFFER, pre_buffer=False, page_checksum_verification=True
        )

    def csv(self, convert: dict[str, Any]) -> Any:
        from pyarrow import csv

        return csv.open_csv(
            self.bytes(),
            # one thread, so that complaints give the line
            read_options=csv.ReadOptions(block_size=CSV_BLOCK, use_threads=False),
            parse_options=csv.ParseOptions(delimiter=self.separator, newlines_in_values=True),
            # an empty cell or NA is a missing label
            convert_options=csv.ConvertOptions(strings_can_be_null=True, **convert),
        )

    def bytes(self) -> Any:
        """The content, decompressed; pyarrow knows endings in small letters only."""
        return arrow().input_stream(str(self.path), compression=COMPRESSED.get(self.endings[0]))

    def text(self) -> io.TextIOWrapper:
        """A CSV file to look for marks and lines in, which no byte can stop."""
        return io.TextIOWrapper(self.bytes(), encoding="latin-1", newline="")

    @cached_property
    def separator(self) -> str:
        if ".tsv" in self.endings:
            return "\t"
        with self.text() as file:
            return likely_separator(file)

    @contextmanager
    def readable(self) -> Iterator[None]:
        try:
            yield
        except (arrow().ArrowException, OSError, UnicodeDecodeError) as error:
            reason, fix = self.in_words(error)
            raise ValueError(f"{self.path} must be a readable {self.kind} file; got: {reason}. {fix}") from error

    def in_words(self, error: Exception) -> tuple[str, str]:
        """The first line of pyarrow's complaint, of a CSV file with the column's name and the line; and what to do."""
        reason = str(error).splitlines()[0].rstrip(".")
        encoding = "Write it again, in UTF-8." if re.search("(?i)utf-?8", reason) else None
        cell = re.match(r"In CSV column #(\d+): Row #(\d+): (.*)", reason)
        if cell:  # rows are counted from 1, with the header
            where = f"column {self.schema.names[int(cell[1])]!r}, {self.at(int(cell[2]) - 2)}"
            return f"{where}: {cell[3]}", encoding or "Correct the cell; numbers have a decimal point."
        row = re.match(r"CSV parse error: Row #(\d+): (.*)", reason)
        if row:
            return f"{self.at(int(row[1]) - 2)}: {row[2]}", "Correct the line."
        return reason, encoding or "Write it again, or leave it out."

    def at(self, row: int) -> str:
        """The place of a row, counted from 0; in a CSV file the line on which it begins."""
        line = None
        if self.kind == "CSV":
            with self.text() as file:
                line = line_of(records_of(file, self.separator), row)
        return f"row {row}" if line is None else f"line {line}"

    def place(self, start: int) -> Callable[[int], str]:
        """The i-th row after the first `start` ones, in words."""
        return lambda i: f"{self.path}, {self.at(start + i)}"


class Dataset(File):
    """A dataset of pyarrow in place of a file, with whatever columns it makes of the names of folders."""

    kind = "Dataset"
    dataset: Any

    def __init__(self, dataset: Any) -> None:
        super().__init__(Path("the dataset"))
        vars(self).update(dataset=dataset, schema=dataset.schema)

    def batches(self, columns: list[str], numbers: set[str], rows: int) -> Iterator[Any]:
        with self.readable():
            few = {"batch_readahead": 1, "fragment_readahead": 1, "use_threads": False}
            yield from self.dataset.to_batches(columns=columns, batch_size=rows, **few)


def is_dataset(x: Any) -> bool:
    """Whether x is a dataset of pyarrow, without importing it."""
    return type(x).__module__.startswith("pyarrow") and hasattr(x, "scanner")


def open_ipc(source: Any) -> Any:
    """A reader of Arrow's file format, or of its stream format."""
    try:
        return arrow().ipc.open_file(source)
    except arrow().ArrowInvalid:
        source.seek(0)
        return arrow().ipc.open_stream(source)


def ipc_batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "get_batch"):
        return (reader.get_batch(i) for i in range(reader.num_record_batches))
    return iter(reader)


def find(path: Any) -> list[File]:
    """The files of a path, directory, pattern or list of these, each in the order of their names."""
    if isinstance(path, list | tuple) and path:
        return [file for one in path for file in find(one)]
    if is_dataset(path):
        return [Dataset(path)]
    if not isinstance(path, str | PathLike):
        raise ValueError(f"path must be a file, a folder, a pattern or a list of these; got {path!r:.60}.")
    here = Path(path)
    if here.is_dir():
        there = [x for x in here.rglob("*") if x.name[0] not in "._" and x.is_file()]
        # also 2.parquet.gzip, known by its first bytes, and d.csv.zip, which is refused: no rows are left out silently
        files = [File(x) for x in there if {ending.lower() for ending in x.suffixes} & {*IN_FOLDERS}]
        files = [file for file in files if file.path.suffix.lower() not in NO_ROWS]
    else:
        files = [File(Path(x)) for x in ([here] if here.is_file() else glob.glob(str(path)))]  # noqa: PTH207
    if not files:
        fix = f"Its files must end in one of {', '.join(IN_FOLDERS)}." if here.is_dir() else "Check the name."
        raise ValueError(f"path must name at least one file; got {str(path)!r}, which names none. {fix}")
    return sorted(files, key=lambda file: file.path)


def check(
    files: list[File], chosen: list[str] | None, apart: set[str], others: dict[str, str | None]
) -> dict[str, Any]:
    """The features with the type that holds all their values; a complaint unless all files have all columns.

    Without `chosen`, the features are the columns of the first file but for its index and those set `apart`.
    """
    some = [name for name in files[0].schema.names if name not in apart | files[0].index]
    features = some if chosen is None else chosen
    if not features:
        raise ValueError(f"features must name at least one column; got none in {files[0].path}.")
    kinds = {name: np.dtype(np.float32) for name in features}
    for file in files:
        check_columns(file, features, others, files[0], exactly=None if chosen is not None else apart)
        for name in features:
            kinds[name] = np.result_type(kinds[name], number_type(file, name))
    return kinds


def check_columns(
    file: File, features: list[str], others: dict[str, str | None], first: File, exactly: set[str] | None
) -> None:
    """All columns are there, and the other columns are of the same type as in the first file."""
    there = set(file.schema.names)
    roles = dict.fromkeys(features, "features") | {n: role for role, n in others.items() if n is not None}
    for name, role in roles.items():
        if name not in there:
            raise ValueError(
                f"{role} must name columns of every file; got {name!r}, which {file.path} does not have. "
                f"It has {file.schema.names[:10]}."
            )
        if len(file.schema.get_all_field_indices(name)) > 1:
            raise ValueError(f"columns must have different names; got {name!r} twice in {file.path}. Rename one.")
    if exactly is not None and (more := sorted(there - set(features) - exactly - file.index)):
        raise ValueError(
            f"every file must have the columns of the first, {first.path}; got {more[:5]} too in {file.path}. "
            "Name the columns to use: features=[...]."
        )
    if (target := others["target"]) is not None and label_kind(file, target) != label_kind(first, target):
        kind, of = (x.schema.field(target).type for x in (file, first))
        raise ValueError(
            f"the labels must have one type in all files; got {kind} in {file.path} and {of} in {first.path}."
        )
    for role in ("weight", "offset"):
        if (column := others[role]) is not None:
            number_type(file, column)


def label_kind(file: File, name: str) -> str:
    """What kind of labels a column holds: numbers, or text, however they are stored."""
    types, kind = arrow().types, file.schema.field(name).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_binary(kind) or types.is_large_binary(kind):  # so pyarrow calls text of a CSV file that is not UTF-8
        fix = "Write it again, in UTF-8." if file.kind == "CSV" else "Write text."
        raise ValueError(f"the labels in column {name!r} must be text or numbers; got bytes in {file.path}. {fix}")
    if is_text(kind):
        return "text"
    return "number" if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) else str(kind)


def is_text(kind: Any) -> bool:
    types = arrow().types
    views = hasattr(types, "is_string_view") and types.is_string_view(kind)
    return bool(types.is_string(kind) or types.is_large_string(kind) or views)


def number_type(file: File, name: str) -> np.dtype:
    """float32 for what it holds exactly, else float64; a complaint if the column holds no numbers.

    What a column of a CSV file holds is seen when it is read: then the complaint gives the line.
    """
    types, kind = arrow().types, file.schema.field(name).type
    if file.kind == "CSV":
        return np.dtype(np.float64)
    if types.is_float32(kind) or types.is_float16(kind) or types.is_boolean(kind):
        return np.dtype(np.float32)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind):
        return np.dtype(np.float64)
    raise ValueError(
        f"column {name!r} must be numeric; got {kind} in {file.path}. Encode text and dates as numbers, or name the "
        "columns to use: features=[...]."
    )


def matrix(batch: Any, names: list[str], dtype: Any) -> np.ndarray:
    """The columns of a batch as rows."""
    return np.stack([vector(batch, name) for name in names], axis=1, dtype=dtype, casting="unsafe")


def vector(batch: Any, name: str) -> np.ndarray:
    """One column as an array; missing values are NaN, or None among texts."""
    column, types = batch.column(name), arrow().types
    if types.is_dictionary(column.type) and not is_text(column.type.value_type):
        column = column.dictionary_decode()
    if types.is_dictionary(column.type) or is_text(column.type):
        # far fewer texts than rows
        column = column if types.is_dictionary(column.type) else column.dictionary_encode()
        texts = np.array([*column.dictionary.to_pylist(), None], dtype=object)
        return texts[column.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False)]
    if types.is_decimal(column.type) or (types.is_boolean(column.type) and column.null_count):
        column = column.cast(arrow().float64())
    return column.to_numpy(zero_copy_only=False)
