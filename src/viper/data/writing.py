"""Files that appear complete or not at all: the atomic writer, and tables written through it part by part."""

import errno
import gzip
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from viper.data.arrow import PARQUET, import_pyarrow
from viper.errors import OutputError, StorageError

if TYPE_CHECKING:
    import pandas

TEMPORARY = ".viper-{}.tmp"  # name of a file that is not complete
ABANDONED_SECONDS = 60  # age from which such a file may be deleted, if no writer has locked it
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")  # characters at which a spreadsheet begins a formula
OTHER_TABLES = (".arrow", ".feather", ".ipc", ".json", ".jsonl", ".ods", ".tsv", ".xls", ".xlsm", ".xlsx")
OTHER_PAGES = (".doc", ".docx", ".gz", ".md", ".odt", ".pdf", ".png", ".ppt", ".pptx", ".svg", ".tex", ".txt", ".zip")
GROUP_ROWS = 1 << 19  # rows of a Parquet row group, held in memory until it is written
REFUSED = {stat.S_IFDIR: "a directory", stat.S_IFBLK: "a block device", stat.S_IFSOCK: "a socket"}


# --- one file ---


@contextmanager
def atomic_file(path: str | PathLike[str], overwrite: bool = False) -> Iterator[BinaryIO]:
    """Open a file under a temporary name beside `path`; it is renamed to `path` once it is complete and on disk.

    If anything fails, nothing is left behind and an existing file stays as it was. Links are followed. Raises
    FileExistsError if the file exists and `overwrite` is False, even if another writer has just created it.

    A pipe or character device, such as /dev/stdout or /dev/null, is never replaced: the bytes are written through it.
    """
    if (kind := file_kind(Path(path))) in REFUSED:
        raise OSError(errno.EINVAL, f"it is {REFUSED[kind]}")
    if is_stream(Path(path)):
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND), "wb")
        try:
            yield file
            file.flush()
        finally:
            with suppress(OSError):  # if the other end is closed, the write has already raised
                file.close()
        return
    final = linked_file(path)
    temporary = final.with_name(TEMPORARY.format(secrets.token_hex(8)))
    try:
        if final.exists() and not overwrite:
            raise FileExistsError
        remove_abandoned(final.parent)
        with temporary.open("xb") as file:
            lock(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, final, overwrite)
    finally:
        with suppress(OSError):  # whatever caused the failure may prevent this too
            temporary.unlink()


def lock(descriptor: int) -> bool:
    """Lock an open file until it is closed or its process is killed. Returns False if another process has the lock."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):  # Windows has no such locks
        return False
    return True


def remove_abandoned(folder: Path) -> None:
    """Delete the temporary files of killed writers: those that are not new and not locked."""
    for path in folder.glob(TEMPORARY.format("*")):
        with suppress(OSError):  # another process may be faster, or the file may belong to another user
            if time.time() - path.stat().st_mtime < ABANDONED_SECONDS:
                continue
            with path.open("rb") as file:
                if lock(file.fileno()):
                    path.unlink()


def linked_file(path: str | PathLike[str]) -> Path:
    """The file that `path` leads to, whether it exists or not. Raises an OSError if links lead in a circle."""
    final = Path(os.path.realpath(path))
    if final.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return final


def folder_of(path: Path) -> Path:
    """The folder of the file that `path` leads to."""
    return linked_file(path).parent if path.is_symlink() else path.parent


def file_kind(path: Path) -> int:
    """The type of the file that `path` leads to, such as stat.S_IFREG, or 0 if there is none."""
    return stat.S_IFMT(path.stat().st_mode) if path.exists() else 0


def is_stream(path: Path) -> bool:
    """Whether bytes are written through `path`: a pipe, a character device, or whatever standard output is."""
    return str(path) in ("/dev/stdout", "/dev/stderr") or file_kind(path) in (stat.S_IFIFO, stat.S_IFCHR)


def publish(temporary: Path, path: Path, overwrite: bool) -> None:
    """Give the finished file its name. A hard link, unlike a rename, fails if another writer came first."""
    if not overwrite:
        try:
            path.hardlink_to(temporary)
        except OSError:
            if path.exists():
                raise FileExistsError from None
            # no hard links here: a file that appears between this check and the renaming goes unnoticed
        else:
            write_directory(path.parent)
            return
    temporary.replace(path)
    write_directory(path.parent)


def write_directory(folder: Path) -> None:
    """Write a directory to the disk, so that a new name in it survives a power cut. Not all systems can do that."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_folder(path: Path, option: str) -> None:
    """Create a folder for output, or raise an OutputError if it cannot be created or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path, prefix=".viper-", suffix=".tmp"):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{option} must be a folder that can be written to; got {path}: {reason}.") from None


# --- file-system errors, reworded for the caller ---


class Wording(NamedTuple):
    """How messages about a file to write name it and the option that replaces it, and the exception they raise."""

    error: type[ValueError]
    target: str
    option: str


IN_PYTHON = Wording(StorageError, "path", "overwrite=True")
IN_A_SHELL = Wording(OutputError, "the output", "--force")


def check_target(path: Path, overwrite: bool, wording: Wording) -> None:
    """Raise if no new file can be created at `path`."""
    with worded_errors(path, wording):
        if not (folder := folder_of(path)).is_dir():
            raise wording.error(f"the directory of {wording.target} must exist; got {folder}. Create it first.")
        if (kind := file_kind(path)) in REFUSED:
            rule = f"{wording.target} must be a regular file or a new name"
            raise wording.error(f"{rule}; got {path}, which is {REFUSED[kind]}. Add or change the file name.")
        if kind and not overwrite and not is_stream(path):
            raise FileExistsError


def check_output(path: Path, overwrite: bool, *inputs: Path) -> None:
    """Raise an OutputError, before a command starts, if its output cannot be written or would replace its input."""
    check_target(path, overwrite, IN_A_SHELL)
    if file_kind(path) == stat.S_IFREG and any(other.exists() and path.samefile(other) for other in inputs):
        raise OutputError(f"the output must be a different file from the input; got {path} for both. Rename it.")
    if is_stream(path) and not os.access(path, os.W_OK):
        raise OutputError(f"the output must be writable; got {path}, which is not. Choose another.")
    if not is_stream(path) and not os.access(folder := folder_of(path), os.W_OK | os.X_OK):
        raise OutputError(f"the directory of the output must be writable; got {folder}, which is not. Choose another.")


class OutputFormat(NamedTuple):
    """What a file to write contains, how its name should end, and the endings that would mislead."""

    name: str
    endings: str
    others: tuple[str, ...]


TABLE_OUTPUT = OutputFormat("CSV or Parquet", ".csv, .csv.gz or .parquet", OTHER_TABLES)
PAGE_OUTPUT = OutputFormat("HTML", ".html", (*OTHER_PAGES, *OTHER_TABLES, *PARQUET.suffixes, ".csv", ".viper"))


def check_ending(path: Path, format: OutputFormat, wording: Wording) -> None:
    """Raise if the name of the file that `path` leads to is that of another format."""
    with worded_errors(path, wording):
        name = linked_file(path).name
    if name.lower().endswith(format.others):
        raise wording.error(f"{wording.target} must be {format.name}; got {path}. End its name in {format.endings}.")


@contextmanager
def worded_errors(path: str | PathLike[str], wording: Wording) -> Iterator[None]:
    """Turn file-system errors into the caller's exception."""
    error, target, option = wording
    try:
        yield
    except FileExistsError as cause:
        raise error(f"{target} must be new; got {path}, which exists. Pass {option} to replace it.") from cause
    except OSError as cause:
        raise error(f"{target} must be writable; got {path}: {cause.strerror or cause}.") from cause


@contextmanager
def checked_file(path: Path, overwrite: bool, wording: Wording) -> Iterator[BinaryIO]:
    """Open an `atomic_file` that raises the caller's exception; errors raised while it is open pass through."""
    with ExitStack() as stack:
        with worded_errors(path, wording):
            check_target(path, overwrite, wording)
            file = stack.enter_context(atomic_file(path, overwrite))
        yield file
        with worded_errors(path, wording):
            stack.close()


# --- tables ---


@contextmanager
def frame_writer(path: Path, overwrite: bool = False) -> Iterator[Callable[["pandas.DataFrame"], None]]:
    """Yield a function that appends frames to a table at `path`: CSV (also .gz) or Parquet, as its name says.

    Raises
    ------
    OutputError
        If the file exists and `overwrite` is False, if its name is that of another format, or if it cannot be written.
    """
    check_output(path, overwrite)
    check_ending(path, TABLE_OUTPUT, IN_A_SHELL)
    name = linked_file(path).name
    with checked_file(path, overwrite, IN_A_SHELL) as file:
        if not name.endswith(PARQUET.suffixes):
            with csv_writer(file, path, name.endswith(".gz")) as append:
                yield append
            return
        try:
            from_pandas = import_pyarrow().Table.from_pandas
        except ImportError as error:
            raise OutputError(str(error)) from None
        with parquet_writer(file, path, IN_A_SHELL, partial(from_pandas, preserve_index=False)) as append:
            yield append


@contextmanager
def csv_writer(file: BinaryIO, path: Path, compressed: bool) -> Iterator[Callable[["pandas.DataFrame"], None]]:
    """Yield a function that appends frames as CSV; the first also writes the header."""
    out: Any = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if compressed else file
    header = iter([True])  # used up by the first frame; a pipe has no position that would tell which is first

    def append(frame: "pandas.DataFrame") -> None:
        text = frame.to_csv(index=False, header=next(header, False), lineterminator="\n")
        with worded_errors(path, IN_A_SHELL):
            out.write(text.encode())

    yield append
    if compressed:
        with worded_errors(path, IN_A_SHELL):
            out.close()


def without_formulas(frame: "pandas.DataFrame") -> "pandas.DataFrame":
    """Put an apostrophe before every text and column name that a spreadsheet would take for a formula."""
    from pandas.api.types import is_numeric_dtype

    quoted = lambda cell: f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA_SIGNS) else cell  # noqa: E731
    texts = {name: frame[name].map(quoted) for name in frame.columns if not is_numeric_dtype(frame[name])}
    return frame.assign(**texts).rename(columns=quoted)


def write_columns(path: str | PathLike[str], parts: Iterable[dict[str, np.ndarray]], overwrite: bool) -> int:
    """Write columns, part by part, to a Parquet file and return the number of rows.

    Raises
    ------
    StorageError
        If the name is not that of a Parquet file, the file exists and `overwrite` is False, or it cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in PARQUET.suffixes:
        endings = " or ".join(PARQUET.suffixes)
        raise StorageError(f"path must end in {endings}, because the file is Parquet; got {path}. Rename it.")
    rows, final, table = 0, path.absolute(), import_pyarrow().table
    with checked_file(final, overwrite, IN_PYTHON) as file, parquet_writer(file, final, IN_PYTHON, table) as append:
        for group in grouped(parts):
            append(group)
            rows += len(next(iter(group.values())))
        if not rows:
            raise ValueError("there must be at least one row to predict; got none.")
    return rows


@contextmanager
def parquet_writer(
    file: BinaryIO, path: Path, wording: Wording, table: Callable[..., Any]
) -> Iterator[Callable[[Any], None]]:
    """Yield a function that appends parts, converted by `table` to pyarrow, to a Parquet file with one schema."""
    import pyarrow.parquet as parquet

    writer: Any = None

    def append(part: Any) -> None:
        nonlocal writer
        rows = table(part, schema=None if writer is None else writer.schema)
        with worded_errors(path, wording):
            writer = writer or parquet.ParquetWriter(file, rows.schema)
            writer.write_table(rows)

    try:
        yield append
        with worded_errors(path, wording):
            if writer is not None:
                writer.close()
    finally:
        with suppress(Exception):  # if it is still open, another error is being raised and the file will be deleted
            writer.close()


def grouped(parts: Iterable[dict[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
    """Yield the same rows in parts of at least GROUP_ROWS, except for the last."""
    held: dict[str, list[np.ndarray]] = {}
    count = 0
    for part in parts:
        for name, values in part.items():
            held.setdefault(name, []).append(values)
        count += len(values)
        if count >= GROUP_ROWS:
            yield {name: np.concatenate(arrays) for name, arrays in held.items()}
            held, count = {}, 0
    if held:
        yield {name: np.concatenate(arrays) for name, arrays in held.items()}
