"""Results on disk: checked before the work, written in parts, there as a whole or not at all."""

import gzip
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from viper.data import storage
from viper.data.arrow import arrow
from viper.errors import OutputError, StorageError

if TYPE_CHECKING:
    import pandas


def check_output(path: Path, overwrite: bool) -> None:
    """Whether a result can be written there, before the work that makes it."""
    if path.is_dir():
        raise OutputError(f"the output must be a file; got {path}, which is a directory. Add a file name.")
    if not path.parent.is_dir():
        raise OutputError(f"the output's directory must exist; got {path.parent}. Make it first.")
    if path.exists() and not overwrite:
        raise OutputError(f"the output must be new; got {path}, which exists. Pass --force to replace it.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"the output's directory must be writable; got {path.parent}, which is not. Choose another.")


@contextmanager
def writing(path: Path, overwrite: bool = False) -> Iterator[Callable[["pandas.DataFrame"], None]]:
    """A function that appends frames to a table at `path`, CSV (also .gz) or Parquet: all of it, or nothing."""
    from viper.data.storage import publish

    check_output(path, overwrite)
    final = path.resolve()
    temporary = final.with_name(f".viper-{secrets.token_hex(8)}.tmp")
    try:
        with writer(temporary, final.name) as write:
            yield write
        publish(temporary, final, overwrite)
    except FileExistsError:
        raise OutputError(f"the output must be new; got {path}, which exists. Pass --force to replace it.") from None
    except OSError as error:
        raise OutputError(f"the output must be writable; got {path}: {error.strerror}.") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writer(temporary: Path, name: str) -> Iterator[Callable[["pandas.DataFrame"], None]]:
    if name.endswith((".parquet", ".pq")):
        with parquet_writer(temporary) as write:
            yield write
        return
    with temporary.open("xb") as raw:
        file: Any = gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) if name.endswith(".gz") else raw
        yield lambda frame: append_csv(frame, file)
        if file is not raw:
            file.close()
        raw.flush()
        os.fsync(raw.fileno())


def append_csv(frame: "pandas.DataFrame", file: Any) -> None:
    """Rows as CSV, after a header if they are the first."""
    file.write(frame.to_csv(index=False, header=not file.tell(), lineterminator="\n").encode())


@contextmanager
def parquet_writer(path: Path) -> Iterator[Callable[["pandas.DataFrame"], None]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise OutputError("Parquet needs pyarrow, which is not there. Run: pip install 'vi-per[arrow]'") from None
    made: list[Any] = []

    def write(frame: "pandas.DataFrame") -> None:
        table = pyarrow.Table.from_pandas(frame, schema=made[0].schema if made else None, preserve_index=False)
        if not made:
            made.append(pyarrow.parquet.ParquetWriter(path, table.schema))
        made[0].write_table(table)

    try:
        yield write
    finally:
        for one in made:
            one.close()


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
        raise StorageError(
            f"path must end in {' or '.join(SUFFIXES)}, as Parquet is what is written; got {path}. Rename it."
        )
    rows = 0
    with new_file(Path(path).resolve(), overwrite) as file:
        writer = None
        for group in grouped(parts):
            table = arrow().table(group)
            writer = writer or parquet_into(file, table.schema)
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


def parquet_into(file: Any, schema: Any) -> Any:
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
        raise StorageError(f"path must be new; got {path}, which exists. Pass overwrite=True to replace it.") from error
    except OSError as error:
        raise StorageError(f"path must be writable; got {path}: {error.strerror or error}.") from error
