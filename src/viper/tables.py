"""Parquet, Arrow and CSV files as batches of columns, through pyarrow: which there are, whether they agree, their rows.

Everything that can be wrong with a file is said here, with the name of the file.
"""

import glob
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {
    ".parquet": "Parquet",
    ".pq": "Parquet",
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".ipc": "Arrow",
    ".csv": "CSV",
    ".tsv": "CSV",
}
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
    def kind(self) -> str:
        suffixes = [suffix.lower() for suffix in self.path.suffixes]
        return next((KINDS[suffix] for suffix in reversed(suffixes[-2:]) if suffix in KINDS), "Parquet")

    @cached_property
    def schema(self) -> Any:
        """Columns and their types; of a CSV file, as its first block suggests them."""
        with self.readable():
            if self.kind == "Parquet":
                return self.parquet().schema_arrow
            if self.kind == "Arrow":
                return arrow().ipc.open_file(self.path).schema
            with self.csv({}) as reader:
                return reader.schema

    def batches(self, columns: list[str], features: list[str], rows: int) -> Iterator[Any]:
        """Record batches of these columns, of about so many rows."""
        with self.readable():
            if self.kind == "Parquet":
                # page by page: neither a file nor a row group is ever held whole
                yield from self.parquet().iter_batches(rows, columns=columns, use_threads=False)
            elif self.kind == "Arrow":
                with arrow().memory_map(str(self.path)) as file:
                    reader = arrow().ipc.open_file(file)
                    for i in range(reader.num_record_batches):
                        yield reader.get_batch(i).select(columns)
            else:
                types = {
                    name: arrow().float64() if name in features else self.schema.field(name).type for name in columns
                }
                with self.csv({"include_columns": columns, "column_types": types}) as reader:
                    yield from reader

    def parquet(self) -> Any:
        import pyarrow.parquet as parquet

        return parquet.ParquetFile(self.path, buffer_size=PAGE_BUFFER, pre_buffer=False)

    def csv(self, convert: dict[str, Any]) -> Any:
        from pyarrow import csv

        return csv.open_csv(
            self.path,
            # one thread, so that complaints give the line
            read_options=csv.ReadOptions(block_size=CSV_BLOCK, use_threads=False),
            parse_options=csv.ParseOptions(delimiter="\t" if ".tsv" in self.path.suffixes else ","),
            convert_options=csv.ConvertOptions(**convert),
        )

    @contextmanager
    def readable(self) -> Iterator[None]:
        try:
            yield
        except (arrow().ArrowException, OSError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ValueError(
                f"{self.path} must be a readable {self.kind} file; got: {reason}. Write it again, or leave it out."
            ) from error

    def place(self, start: int) -> Callable[[int], str]:
        """The i-th row after the first `start` ones, in words; of a CSV file, its line."""
        word, first = ("line", start + 2) if self.kind == "CSV" else ("row", start)
        return lambda i: f"{self.path}, {word} {first + i}"


def find(path: Any) -> list[File]:
    """The files of a path, directory, pattern or list of these, each in the order of their names."""
    if isinstance(path, list | tuple):
        return [file for one in path for file in find(one)]
    here = Path(path)
    if here.is_dir():
        found = [x for x in here.rglob("*") if set(x.suffixes) & set(KINDS) and x.is_file() and x.name[0] not in "._"]
    else:
        found = [here] if here.is_file() else [Path(name) for name in glob.glob(str(path))]  # noqa: PTH207
    if not found:
        raise ValueError(f"path must name at least one file; got {str(path)!r}, which names none. Check the name.")
    return [File(x) for x in sorted(found)]


def check(
    files: list[File], chosen: list[str] | None, apart: set[str], others: dict[str, str | None]
) -> dict[str, Any]:
    """The features with the type that holds all their values; a complaint unless all files have all columns.

    Without `chosen`, the features are the columns of the first file but for those set `apart`.
    """
    features = [name for name in files[0].schema.names if name not in apart] if chosen is None else chosen
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
    if exactly is not None and (more := sorted(there - set(features) - exactly)):
        raise ValueError(
            f"every file must have the columns of the first, {first.path}; got {more[:5]} too in {file.path}. "
            "Name the columns to use: features=[...]."
        )
    target = others["target"]
    if target is not None and (kind := file.schema.field(target).type) != (of := first.schema.field(target).type):
        raise ValueError(
            f"the labels must have one type in all files; got {kind} in {file.path} and {of} in {first.path}."
        )
    for role in ("weight", "offset"):
        if (column := others[role]) is not None:
            number_type(file, column)


def number_type(file: File, name: str) -> np.dtype:
    """float32 for what it holds exactly, else float64; a complaint if the column holds no numbers."""
    types, kind = arrow().types, file.schema.field(name).type
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
    if types.is_dictionary(column.type) or types.is_string(column.type) or types.is_large_string(column.type):
        # far fewer texts than rows
        column = column if types.is_dictionary(column.type) else column.dictionary_encode()
        texts = np.array([*column.dictionary.to_pylist(), None], dtype=object)
        return texts[column.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False)]
    if types.is_decimal(column.type):
        column = column.cast(arrow().float64())
    return column.to_numpy(zero_copy_only=False)
