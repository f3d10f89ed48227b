"""Download one file into a folder: whole and verified, or not at all."""

import errno
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path

from viper.data.writing import atomic_file
from viper.errors import DataError

QUIET_SECONDS = 2.0  # seconds before progress is shown
TIMEOUT = 30.0  # seconds without an answer
READ_BYTES = 1 << 16  # bytes received at a time
FETCH_BY_HAND = "Fetch the file by other means, and pass its folder: data=DIR (--data DIR in the terminal)."


def cache_folder() -> Path:
    """Where downloads are kept: the folder named by VIPER_DATA, or the platform's cache folder for the user."""
    if chosen := os.environ.get("VIPER_DATA"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        root = str(Path.home() / "Library" / "Caches")
    else:
        root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "viper"


def download(url: str, path: Path, check: Callable[[Path], object]) -> None:
    """Download `url` to `path`, unless `check`, which is called with a temporary path, raises an error.

    If it is interrupted, an existing file at `path` is kept. Two processes may download the same file at once.

    Raises
    ------
    DataError
        If the server does not send the whole file, or the folder cannot be written. Errors of `check` propagate.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, overwrite=True) as file:
            file.writelines(received_chunks(url))
            file.flush()
            check(Path(file.name))
    except OSError as error:  # from the file; those from the server are DataErrors already
        full = " Free some space, or choose another folder with VIPER_DATA." if error.errno == errno.ENOSPC else ""
        text = f"The folder for data must be writable; got {path.parent}: {error.strerror}."
        raise DataError(text + (full or " Choose another with the environment variable VIPER_DATA.")) from error


def received_chunks(url: str) -> Iterator[bytes]:
    """Yield what the server sends, with progress on a terminal. Raises a DataError if the server fails."""
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "viper"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            promised = answer.headers.get("Content-Length")
            expected = int(promised) if promised else None
            received = 0
            progress = DownloadProgress(url, expected)
            # read1 returns what has arrived, and raises the connection's errors
            while chunk := answer.read1(READ_BYTES):
                yield chunk
                received += len(chunk)
                progress(received)
            progress.close()
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"{url} must exist on the server; got {error.code} {error.reason}. {FETCH_BY_HAND}") from error
    except (OSError, HTTPException) as error:  # no network, no such host, refused, reset, timed out, cut short
        reason = getattr(error, "reason", None) or error
        raise DataError(f"{url} must be reachable; got {type(error).__name__}: {reason}. {FETCH_BY_HAND}") from error
    if expected is not None and received != expected:
        raise DataError(f"{url} must arrive whole; got {received:,} of {expected:,} bytes. Try again. {FETCH_BY_HAND}")


class DownloadProgress:
    """Shows bytes received and seconds left on a terminal, once a download has taken two seconds."""

    def __init__(self, url: str, expected: int | None) -> None:
        self.name, self.expected = url.rsplit("/", 1)[-1], expected
        self.began, self.shown = time.monotonic(), False

    def __call__(self, received: int) -> None:
        seconds = time.monotonic() - self.began
        if seconds < QUIET_SECONDS or not sys.stderr.isatty():
            return
        text = f"{self.name}: {received:,} bytes"
        if self.expected:
            left = seconds * (self.expected - received) / received
            text += f" of {self.expected:,}, {left:.0f} s left"
        sys.stderr.write("\r" + text)
        sys.stderr.flush()
        self.shown = True

    def close(self) -> None:
        if self.shown:
            sys.stderr.write("\n")
