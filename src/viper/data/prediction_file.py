"""Predictions of rows larger than memory, written to a Parquet file as they are made: all of it, or nothing."""

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from viper.data.arrow import arrow
from viper.models import storage

SUFFIXES = (".parquet", ".pq")
GROUP_ROWS = 1 << 19  # of a row group: what is held before it is written


def write(path: str | PathLike[str], parts: Iterable[dict[str, np.ndarray]], overwrite: bool) -> int:
    """Write columns, part after part, to a Parquet file; the number of rows.

    Raises
    ------
    StorageError
        If the file is not named as Parquet, exists and `overwrite` is False, or if it cannot be written.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise storage.StorageError(
            f"path must end in {' or '.join(SUFFIXES)}, as Parquet is what is written; got {path}. Rename it."
        )
    rows = 0
    with new_file(Path(path).resolve(), overwrite) as file:
        writer = None
        for group in grouped(parts):
            table = arrow().table(group)
            writer = writer or parquet_writer(file, table.schema)
            with storing(path):
                writer.write_table(table)
            rows += table.num_rows
        if writer is None:
            raise ValueError("there must be at least one row to predict; got none.")
        with storing(path):
            writer.close()
    return rows


def grouped(parts: Iterable[dict[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """The same rows in parts of at least GROUP_ROWS, but for the last."""
    held: list[dict[str, np.ndarray]] = []
    count = 0
    for part in parts:
        held.append(part)
        count += len(next(iter(part.values())))
        if count >= GROUP_ROWS:
            yield joined(held)
            held, count = [], 0
    if held:
        yield joined(held)


def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def parquet_writer(file: Any, schema: Any) -> Any:
    import pyarrow.parquet as parquet

    return parquet.ParquetWriter(file, schema)


@contextmanager
def new_file(path: Path, overwrite: bool) -> Iterator[Any]:
    """A file under a temporary name, which gets its own when it is complete and on the disk."""
    temporary = path.with_name(f".viper-{secrets.token_hex(8)}.tmp")
    try:
        with storing(path):
            storage.check_target(path, overwrite)
            file = temporary.open("xb")
        with file:
            yield file
            with storing(path):
                file.flush()
                os.fsync(file.fileno())
        with storing(path):
            storage.publish(temporary, path, overwrite)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def storing(path: str | PathLike[str]) -> Iterator[None]:
    """Errors of the file system, in the words of storage.py."""
    try:
        yield
    except FileExistsError as error:
        raise storage.StorageError(
            f"path must be new; got {path}, which exists. Pass overwrite=True to replace it."
        ) from error
    except OSError as error:
        raise storage.StorageError(f"path must be writable; got {path}: {error.strerror or error}.") from error
