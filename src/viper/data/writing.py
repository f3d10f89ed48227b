"""Results on disk: checked before the work, written in parts, there as a whole or not at all."""

import gzip
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


class OutputError(ValueError):
    """The result cannot be written there."""


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
    from viper.models.storage import publish

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
