"""The formats of tables; reads Parquet, Arrow and CSV files as batches of columns through pyarrow.

Finds the files of a path, checks that they have the same columns, and reads their rows. Error messages name the
file and, for CSV, the line.
"""

import glob
import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from json import JSONDecodeError
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from viper.data.csv_text import (
    check_distinct_names,
    likely_separator,
    line_of_row,
    parsed_records,
    refuse_line_break,
    refuse_ragged,
    shows_commas,
    spelled_numbers,
)
from viper.errors import FileError, listed, shown

if TYPE_CHECKING:
    import pandas

Given = TypeVar("Given")
Parsed = TypeVar("Parsed")


# --- the formats ---


class TableFormat(NamedTuple):
    """A format of tables: its name on the command line and in messages, its suffixes, and its first bytes."""

    word: str
    title: str
    suffixes: tuple[str, ...] = ()
    magic: bytes | None = None


PARQUET = TableFormat("parquet", "Parquet", (".parquet", ".pq"), b"PAR1")
ARROW = TableFormat("arrow", "Arrow", (".arrow", ".feather", ".ipc"), b"ARROW1")
CSV = TableFormat("csv", "CSV", (".csv", ".tsv", ".txt"))
EXCEL = TableFormat("excel", "Excel", (".xlsx", ".xlsm"), b"PK\x03\x04")
LIBSVM = TableFormat("libsvm", "LIBSVM", (".libsvm", ".svm", ".svmlight"))
DATASET = TableFormat("dataset", "Dataset")
FORMATS = {one.word: one for one in (CSV, PARQUET, ARROW, EXCEL, LIBSVM)}
BY_SUFFIX = {suffix: one for one in (PARQUET, ARROW, CSV, EXCEL, LIBSVM) for suffix in one.suffixes}

DAMAGE = (
    UnicodeDecodeError,
    JSONDecodeError,
    RecursionError,
    KeyError,
    TypeError,
    AttributeError,
)  # what damaged pandas metadata may raise
STREAMED = tuple(suffix for one in (PARQUET, ARROW, CSV) for suffix in one.suffixes)  # formats that ArrowFile reads
IN_FOLDERS = [suffix for suffix in STREAMED if suffix != ".txt"]  # folders often hold notes: a .txt must be named
NO_ROWS = {".bak", ".crc", ".md5", ".sha256", ".tmp"}  # suffixes of companion files, which hold no rows
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


def first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(9)


def format_by_magic(start: bytes) -> TableFormat | None:
    """Return the format whose files begin with these bytes, or None."""
    return next((one for one in FORMATS.values() if one.magic and start.startswith(one.magic)), None)


# --- one file ---

CSV_BLOCK = 1 << 22  # bytes parsed at a time
CSV_LINES = 1 << 20  # bytes of whole lines that each of several threads parses at a time; they stay in its cache
PAGE_BUFFER = 1 << 16  # least bytes of a Parquet column to read at a time; larger pages are read on their own
FRAME_ROWS = 1 << 20  # rows read at a time when all are requested
PLAIN_TYPES = {"decimal": "float64", "date": "datetime64[s]"}  # Python objects in a frame -> what they become


def import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ImportError("reading and writing files needs pyarrow. Run: pip install 'vi-per[arrow]'") from None
    return pyarrow


@dataclass(frozen=True)
class ArrowFile:
    """One file of a table. The format is the one given, or is recognised by the file's name or first bytes."""

    path: Path
    given: TableFormat | None = None

    @cached_property
    def endings(self) -> list[str]:
        """Return the suffixes in lower case: that of the compression, if any, and that of the format."""
        endings = [ending.lower() for ending in self.path.suffixes[-2:]]
        return endings[::-1] if endings and endings[-1] in COMPRESSED else [*endings[-1:]]

    @cached_property
    def format(self) -> TableFormat:
        if self.given is not None:
            return self.given
        if self.endings and self.endings[-1] in STREAMED:
            return BY_SUFFIX[self.endings[-1]]
        found = format_by_magic(first_bytes(self.path))
        if found is None:
            raise ValueError(
                f"the name of a file must end in one of {', '.join(STREAMED)}; got {self.path}. Rename it."
            )
        return found

    @cached_property
    def schema(self) -> Any:
        """The columns and their types, which for a CSV file are inferred from its first block."""
        with self.readable():
            if self.format == PARQUET:
                found = self.parquet().schema_arrow
            else:
                with self.mapped() if self.format == ARROW else self.csv({}) as source:
                    found = (open_ipc(source) if self.format == ARROW else source).schema
            list(found.names)  # raises here if a name is not UTF-8,
            dict(found.pandas_metadata or {})  # or if the metadata of pandas are damaged
            return found

    @property
    def count(self) -> int | None:
        """The number of rows, if it is known without reading them."""
        if self.format != PARQUET:
            return None
        with self.readable():
            return int(self.parquet().metadata.num_rows)

    @cached_property
    def index(self) -> set[str]:
        """The columns that name or number rows: pandas' index, and an unnamed first column of a CSV file."""
        if self.format == CSV:
            return {""} & {*self.schema.names[:1]}
        known = (self.schema.pandas_metadata or {}).get("index_columns", [])
        return {name for name in known if isinstance(name, str)}

    def batches(self, columns: list[str], numbers: set[str], rows: int, multiline: bool = False) -> Iterator[Any]:
        """Yield record batches of these columns, about `rows` rows each; CSV columns in `numbers` become float64.

        Unless `multiline`, a cell of a CSV file that spans lines is an error.
        """
        from viper.inference.threads import PASS_THREADS

        with self.readable():
            if self.format != CSV:
                yield from self.stored_batches(rows, columns, threads=PASS_THREADS.get() > 1)
                return
            real, field = import_pyarrow().float64(), self.schema.field
            types = {name: real if name in numbers else field(name).type for name in columns}
            chosen = {"include_columns": columns, "column_types": types}
            yield from self.csv_batches(chosen, PASS_THREADS.get(), multiline)

    def frames(self, rows: int | None, check_size: Callable[[float], None]) -> Iterator["pandas.DataFrame"]:
        """Yield all columns of a Parquet or Arrow file, in frames of at most `rows` rows or in one.

        `check_size` is called with the bytes of a frame of all rows, as soon as they are known.
        """
        with self.readable():
            check_distinct_names(self.schema.names, self.path)
            if rows is None and self.format == PARQUET:
                about = self.parquet().metadata
                check_size(8.0 * about.num_rows * about.num_columns)
            batches = self.stored_batches(rows or FRAME_ROWS, threads=True)
            if rows is None:
                batches = sized_batches(batches, check_size)
                yield plain_columns(import_pyarrow().Table.from_batches(batches, self.schema).to_pandas())
            else:
                yield from (plain_columns(batch.to_pandas()) for batch in batches)

    def stored_batches(self, rows: int, columns: list[str] | None = None, threads: bool = False) -> Iterator[Any]:
        """Yield record batches of a Parquet or Arrow file: all columns or some, at most `rows` rows each."""
        if self.format == PARQUET:
            # page by page, so that neither a file nor a row group is ever held whole
            yield from self.parquet().iter_batches(rows, columns=columns, use_threads=threads)
            return
        with self.mapped() as file:
            reader = open_ipc(file)
            count = getattr(reader, "num_record_batches", None)  # unknown for a stream
            for batch in reader if count is None else map(reader.get_batch, range(count)):
                chosen = batch if columns is None else batch.select(columns)
                chosen.validate(full=True)  # a damaged offset would be followed out of the mapped file
                yield from (chosen.slice(start, rows) for start in range(0, batch.num_rows, rows))

    def csv_batches(self, chosen: dict[str, Any], threads: int, multiline: bool) -> Iterator[Any]:
        """Yield the rows of a CSV file, parsed in blocks of whole lines by several threads.

        From the first block with an error, or where rows are not lines, one thread parses the file in one go, so that
        errors name the line.
        """
        done = 0
        for table in mapped_ahead(partial(self.parsed_lines, chosen=chosen), self.whole_lines(), threads):
            if table is None:
                break
            done += table.num_rows
            yield from table.to_batches()
        else:
            return
        rows = 0
        with self.csv(chosen) as reader:
            for batch in reader:
                yield batch.slice(min(max(0, done - rows), batch.num_rows))
                rows += batch.num_rows
        if not multiline:
            self.check_line_breaks(rows)

    def whole_lines(self) -> Iterator[tuple[bytes, bool] | None]:
        """Yield the content of a CSV file in blocks that end with a line, and whether a block is the first.

        Yields None and stops if lines are very long or do not end in a line feed.
        """
        rest, first = b"", True
        with self.bytes() as file:
            while part := file.read(CSV_LINES):
                end = part.rfind(b"\n") + 1
                if end:
                    yield rest + part[:end], first
                    rest, first = b"", False
                rest += part[end:]
                if len(rest) > CSV_BLOCK:
                    yield None
                    return
        if rest:
            yield rest, first

    def parsed_lines(self, lines: tuple[bytes, bool] | None, chosen: dict[str, Any]) -> Any:
        """Return the rows of some lines, or None if a cell might span lines or pyarrow finds something wrong."""
        if lines is None:
            return None
        block, first = lines
        quotes = block.count(b'"')
        if quotes % 2:
            return None
        try:
            with self.csv(chosen, import_pyarrow().BufferReader(block), None if first else self.schema.names) as reader:
                table = reader.read_all().combine_chunks()
        except (import_pyarrow().ArrowException, *DAMAGE):
            return None
        count = block.count(b"\n") + (not block.endswith(b"\n")) - first
        return None if quotes and table.num_rows != count else table

    def mapped(self) -> Any:
        return import_pyarrow().memory_map(str(self.path))

    def parquet(self) -> Any:
        import pyarrow.parquet as parquet

        return parquet.ParquetFile(
            self.path, buffer_size=PAGE_BUFFER, pre_buffer=False, page_checksum_verification=True
        )

    def csv(self, convert: dict[str, Any], source: Any = None, names: list[str] | None = None) -> Any:
        """Return a reader of the file or of `source`; its first line names the columns, unless `names` are given."""
        from pyarrow import csv

        return csv.open_csv(
            source or self.bytes(),
            # one thread, so that errors name the line
            read_options=csv.ReadOptions(block_size=CSV_BLOCK, use_threads=False, column_names=names),
            parse_options=csv.ParseOptions(delimiter=self.separator, newlines_in_values=True),
            # an empty cell or NA is a missing label
            convert_options=csv.ConvertOptions(strings_can_be_null=True, decimal_point=self.decimal, **convert),
        )

    def bytes(self) -> Any:
        """Open the content, decompressed here because pyarrow only recognises lower-case suffixes."""
        return import_pyarrow().input_stream(str(self.path), compression=COMPRESSED.get(self.endings[0]))

    def text(self) -> io.TextIOWrapper:
        """Open a CSV file as text, to find separators and lines; no byte fails to decode."""
        return io.TextIOWrapper(self.bytes(), encoding="latin-1", newline="")

    @cached_property
    def separator(self) -> str:
        if ".tsv" in self.endings:
            return "\t"
        with self.text() as file:
            return likely_separator(file)

    @cached_property
    def decimal(self) -> str:
        """The decimal mark of a CSV file: a comma where its cells show it, otherwise a point."""
        if self.separator == ",":
            return "."
        with self.text() as file:
            return "," if shows_commas(parsed_records(file, self.separator, self.path), ()) else "."

    @cached_property
    def stamp(self) -> tuple[int, int] | None:
        """Size and time of the last change, as they were when the file was first examined."""
        return stamp_of(self.path)

    def check_line_breaks(self, rows: int) -> None:
        """Raise if a cell of a CSV file with this number of rows spans lines, which gives it more lines than rows."""
        if self.format == CSV and self.lines > rows + 1 and self.first_line_break is not None:
            refuse_line_break(self.path, "one", self.first_line_break, "write multiline=True")

    @cached_property
    def lines(self) -> int:
        """The number of lines of a CSV file, without empty ones at its end."""
        count, last = 0, b""
        with self.bytes() as file:
            while part := file.read(CSV_BLOCK):
                count, last = count + part.count(b"\n"), part
        return count + (not last.endswith(b"\n"))

    @cached_property
    def first_line_break(self) -> int | None:
        """The line on which the first cell begins that spans lines, or None."""
        with self.text() as file:
            rows = parsed_records(file, self.separator, self.path)
            return next((line for line, fields in rows if any("\n" in field for field in fields)), None)

    def check_unchanged(self) -> None:
        """Raise if the file has been written to since it was first examined."""
        if self.stamp != stamp_of(self.path):
            raise FileError(
                f"the source must have the same rows in every pass; got {self.path}, which was written to or removed "
                "since the first. Do not write to files during a fit."
            )

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Turn the errors of pyarrow and of the file system into a FileError that names the file and the line."""
        try:
            yield
        except (import_pyarrow().ArrowException, OSError, *DAMAGE) as error:
            reason, fix = self.in_words(error)
            text = f"{self.path} must be a readable {self.format.title} file; got: {reason}. {fix}"
            raise FileError(text) from error

    def in_words(self, error: Exception) -> tuple[str, str]:
        """Return the first line of pyarrow's message, with column and line for CSV, and the fix."""
        reason = str(error).splitlines()[0].rstrip(".")
        encoding = "Write it again, in UTF-8." if re.search("(?i)utf-?8", reason) else None
        cell = re.match(r"In CSV column #(\d+): Row #(\d+): (.*)", reason)
        if cell:  # rows are counted from 1, including the header
            where = f"column {shown(self.schema.names[int(cell[1])])}, {self.at(int(cell[2]) - 2)}"
            return f"{where}: {cell[3]}", encoding or "Correct the cell; numbers have a decimal point."
        row = re.match(r"CSV parse error: Row #(\d+): Expected (\d+) columns, got (\d+)", reason)
        if row:
            refuse_ragged(self.path, self.at(int(row[1]) - 2), int(row[2]), int(row[3]))
        return reason, encoding or "Write it again, or leave it out."

    def at(self, row: int) -> str:
        """Return the position of a row, counted from 0; for CSV, the line on which it begins."""
        line = None
        if self.format == CSV:
            with self.text() as file:
                line = line_of_row(parsed_records(file, self.separator, self.path), row)
        return f"row {row}" if line is None else f"line {line}"

    def place(self, start: int) -> Callable[[int], str]:
        """Return a function that names the i-th row after the first `start` rows."""
        return lambda i: f"{self.path}, {self.at(start + i)}"


class DatasetFile(ArrowFile):
    """A pyarrow dataset used like a file, including the columns it derives from folder names."""

    dataset: Any
    parts: list[ArrowFile]

    def __init__(self, dataset: Any) -> None:
        super().__init__(Path("the dataset"), DATASET)
        parts = [ArrowFile(Path(name)) for name in getattr(dataset, "files", []) if Path(name).is_file()]
        vars(self).update(dataset=dataset, schema=dataset.schema, parts=parts, stamp=None)

    def check_unchanged(self) -> None:
        for part in self.parts:
            part.check_unchanged()

    def batches(self, columns: list[str], numbers: set[str], rows: int, multiline: bool = False) -> Iterator[Any]:
        with self.readable():
            few = {"batch_readahead": 1, "fragment_readahead": 1, "use_threads": False}
            for batch in self.dataset.to_batches(columns=columns, batch_size=rows, **few):
                batch.validate(full=True)  # a damaged offset would be followed out of a mapped file
                yield batch


def mapped_ahead(function: Callable[[Given], Parsed], items: Iterable[Given], threads: int) -> Iterator[Parsed]:
    """Yield function(item) for each item, in order, computed by threads that run a few items ahead."""
    with ThreadPoolExecutor(threads) as pool:
        coming: deque[Future[Parsed]] = deque()
        for item in items:
            coming.append(pool.submit(function, item))
            if len(coming) > threads:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def sized_batches(batches: Iterable[Any], check_size: Callable[[float], None]) -> Iterator[Any]:
    """Yield the same batches, and pass the number of bytes so far to `check_size`."""
    total = 0
    for batch in batches:
        total += batch.nbytes
        check_size(float(total))
        yield batch


def stamp_of(path: Path) -> tuple[int, int] | None:
    """Return size and time of the last change of a file, or None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def is_dataset(x: Any) -> bool:
    """Return whether x is a pyarrow dataset, without importing pyarrow."""
    return type(x).__module__.startswith("pyarrow") and hasattr(x, "scanner")


def open_ipc(source: Any) -> Any:
    """Return a reader of Arrow's file format or of its stream format."""
    pyarrow = import_pyarrow()
    try:
        return pyarrow.ipc.open_file(source)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        return pyarrow.ipc.open_stream(source)


# --- the files of a path ---


def find_files(path: Any) -> list[ArrowFile]:
    """Return the files of a path, folder, pattern or list of these; folders and patterns are sorted by name."""
    if isinstance(path, list | tuple) and path:
        return [file for one in path for file in find_files(one)]
    if is_dataset(path):
        return [DatasetFile(path)]
    if not isinstance(path, str | PathLike):
        raise ValueError(f"path must be a file, a folder, a pattern or a list of these; got {shown(path)}.")
    here = Path(path)
    if here.is_dir():
        there = [x for x in here.rglob("*") if x.name[0] not in "._" and x.is_file()]
        # includes 2.parquet.gzip, recognised by its first bytes, and d.csv.zip, which is refused and not just skipped
        files = [ArrowFile(x) for x in there if {ending.lower() for ending in x.suffixes} & {*IN_FOLDERS}]
        files = [file for file in files if file.path.suffix.lower() not in NO_ROWS]
    else:
        files = [ArrowFile(Path(x)) for x in ([here] if here.exists() else glob.glob(str(path)))]  # noqa: PTH207
        if odd := [file.path for file in files if not file.path.is_file()]:
            raise ValueError(
                f"path must name regular files, which can be read in every pass; got {str(odd[0])!r}. Save a stream as "
                "a file first."
            )
    if not files:
        fix = f"Its files must end in one of {', '.join(IN_FOLDERS)}." if here.is_dir() else "Check the name."
        raise ValueError(f"path must name at least one file; got {str(path)!r}, which names none. {fix}")
    return sorted(files, key=lambda file: file.path)


def feature_types(
    files: list[ArrowFile], chosen: list[str] | None, apart: set[str], others: dict[str, str | None]
) -> dict[str, Any]:
    """Return the features, each with the float type that holds its values in all files.

    Without `chosen`, the features are the columns of the first file except its index and those in `apart`. Raises
    unless every file has every column.
    """
    some = [name for name in files[0].schema.names if name not in apart | files[0].index]
    features = some if chosen is None else chosen
    if not features:
        raise ValueError(f"features must name at least one column; got none in {files[0].path}.")
    kinds = {name: np.dtype(np.float32) for name in features}
    for file in files:
        check_file(file, features, others, files[0], exactly=None if chosen is not None else apart)
        for name in features:
            kinds[name] = np.result_type(kinds[name], float_type(file, name))
    return kinds


def check_file(
    file: ArrowFile, features: list[str], others: dict[str, str | None], first: ArrowFile, exactly: set[str] | None
) -> None:
    """Raise unless all columns exist, labels have the type of the first file, and weight and offset are numeric."""
    there = set(file.schema.names)
    roles = dict.fromkeys(features, "features") | {n: role for role, n in others.items() if n is not None}
    for name, role in roles.items():
        if name not in there:
            raise ValueError(
                f"{role} must name columns of every file; got {shown(name)}, which {file.path} does not have. "
                f"It has {listed(file.schema.names)}."
            )
        if len(file.schema.get_all_field_indices(name)) > 1:
            raise ValueError(f"columns must have different names; got {shown(name)} twice in {file.path}. Rename one.")
    if exactly is not None and (more := sorted(there - set(features) - exactly - file.index)):
        raise ValueError(
            f"every file must have the columns of the first, {first.path}; got {listed(more)} too in {file.path}. "
            "Name the columns to use: features=[...]."
        )
    if (target := others["target"]) is not None and label_kind(file, target) != label_kind(first, target):
        kind, of = (x.schema.field(target).type for x in (file, first))
        raise ValueError(
            f"the labels must have one type in all files; got {kind} in {file.path} and {of} in {first.path}."
        )
    for role in ("weight", "offset"):
        if (column := others[role]) is not None:
            float_type(file, column)


def label_kind(file: ArrowFile, name: str) -> str:
    """Return the kind of labels in a column, numbers or text, however they are stored."""
    types, kind = import_pyarrow().types, file.schema.field(name).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_binary(kind) or types.is_large_binary(kind):  # pyarrow's type for CSV text that is not UTF-8
        fix = "Write it again, in UTF-8." if file.format == CSV else "Write text."
        raise ValueError(f"the labels in column {shown(name)} must be text or numbers; got bytes in {file.path}. {fix}")
    if is_text_type(kind):
        return "text"
    return "number" if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) else str(kind)


def is_text_type(kind: Any) -> bool:
    types = import_pyarrow().types
    views = hasattr(types, "is_string_view") and types.is_string_view(kind)
    return bool(types.is_string(kind) or types.is_large_string(kind) or views)


def float_type(file: ArrowFile, name: str) -> np.dtype:
    """Return float32 if it holds the values exactly, otherwise float64. Raises if the column is not numeric.

    CSV columns are checked only when they are read, because only then can the message name the line.
    """
    types, kind = import_pyarrow().types, file.schema.field(name).type
    if file.format == CSV:
        return np.dtype(np.float64)
    if types.is_float32(kind) or types.is_float16(kind) or types.is_boolean(kind):
        return np.dtype(np.float32)
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind):
        return np.dtype(np.float64)
    raise ValueError(
        f"column {shown(name)} must be numeric; got {kind} in {file.path}. Encode text and dates as numbers, or name "
        "the columns to use: features=[...]."
    )


# --- from batches to arrays ---


def batch_vector(batch: Any, name: str) -> np.ndarray:
    """Return a column of a batch as an array; missing values become NaN, or None in a text column."""
    pyarrow = import_pyarrow()
    column, types = batch.column(name), pyarrow.types
    if types.is_dictionary(column.type) and not is_text_type(column.type.value_type):
        column = column.dictionary_decode()
    if types.is_dictionary(column.type) or is_text_type(column.type):
        # there are far fewer distinct texts than rows
        column = column if types.is_dictionary(column.type) else column.dictionary_encode()
        texts = np.array([*column.dictionary.to_pylist(), None], dtype=object)
        return texts[column.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False)]
    if types.is_decimal(column.type) or (types.is_boolean(column.type) and column.null_count):
        column = column.cast(pyarrow.float64())
    return column.to_numpy(zero_copy_only=False)


def plain_columns(frame: "pandas.DataFrame") -> "pandas.DataFrame":
    """Return the rows with Python's numbers converted to NumPy's, and with dates as timestamps, not objects."""
    from pandas.api.types import infer_dtype

    odd = [name for name, kind in frame.dtypes.items() if str(kind).startswith(("object", "decimal", "date32"))]
    kinds = {name: infer_dtype(frame[name]) for name in odd}
    numbers = [name for name, kind in kinds.items() if kind in ("integer", "floating", "mixed-integer-float")]
    found = {name: PLAIN_TYPES[kind] for name, kind in kinds.items() if kind in PLAIN_TYPES}
    return frame.assign(**{name: plain_numbers(frame[name]) for name in numbers}).astype(found) if odd else frame


def plain_numbers(column: "pandas.Series[Any]") -> "pandas.Series[Any]":
    """Convert Python's numbers to 64-bit integers if possible, otherwise to floats; those too large are infinite."""
    import pandas
    from pandas.api.types import infer_dtype

    if infer_dtype(column) == "integer":
        with suppress(OverflowError):
            return column.astype("Int64" if column.isna().any() else "int64")
    return pandas.Series(spelled_numbers(column), index=column.index, name=column.name)
