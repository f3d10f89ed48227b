"""Rows that are slow to read, kept until a fit ends: in memory while they fit, otherwise in a temporary file.

The file has no name, so the system deletes it when the process ends, however that happens. It is mapped, so its pages
can leave memory when it is needed elsewhere. If there is no room, rows are read again in every pass.
"""

import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from viper.data.blocks import Chunk, release_pages
from viper.errors import CacheWarning, users_line
from viper.inference.memory import SHARE_FOR_CACHE, available_memory, system_text

SHARE_OF_DISK = 0.5  # share of the free space for temporary files that rows may take
FILES_IN_MEMORY = {"tmpfs", "ramfs"}  # file systems that store files in memory


class Room(NamedTuple):
    """Bytes that kept rows may take in memory, and otherwise in a temporary file."""

    memory: float
    file: float


def room_for_rows(most: int | None) -> Room:
    """Return the room for at most this many bytes; by default, for as many as fit in the available memory."""
    available = available_memory()
    if most is None:
        return Room(SHARE_FOR_CACHE * available, min(available, temporary_space()))
    return Room(min(most, SHARE_FOR_CACHE * available), most)


def temporary_space() -> float:
    """Return the bytes that temporary files may take; 0 if there is no folder for them, or it is in memory."""
    try:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
    except OSError:
        return 0.0
    return 0.0 if file_system(folder) in FILES_IN_MEMORY else SHARE_OF_DISK * free


def file_system(folder: str) -> str:
    """Return the type of the file system that contains a folder, or an empty string if it is not reported."""
    place, kind, most = Path(folder).resolve(), "", 0
    for line in system_text("/proc/mounts").splitlines():
        _, mounted, its_kind, *_ = line.split()
        mounted = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mounted)  # \040 is a space
        if place.is_relative_to(mounted) and len(mounted) >= most:  # a later mount hides earlier ones at the same place
            kind, most = its_kind, len(mounted)
    return kind


class KeptRows:
    """All rows of a source in chunks, with their features in memory, or in a temporary file if there are too many.

    `size` is the number of bytes of all rows, or 0 if unknown.
    """

    def __init__(self, room: Room, row_bytes: int, size: int = 0) -> None:
        self.room, self.row_bytes, self.size = room, row_bytes, size
        self.rows, self.chunks, self.complete = 0, list[Chunk](), True
        self.file: Any = None
        self.map: np.memmap | None = None

    def add(self, chunk: Chunk) -> None:
        """Keep the next rows; if there is no room for them, drop all rows."""
        self.rows += len(chunk.features)
        needed = max(self.size, self.rows * self.row_bytes)
        if self.file is None and needed <= self.room.memory:
            self.chunks.append(chunk)
        elif self.complete:
            self.complete = needed <= self.room.file and self.add_to_file(chunk)
        if not self.complete:
            self.chunks.clear()

    def add_to_file(self, chunk: Chunk) -> bool:
        """Write the features of these rows, and of all rows so far, to a file. Returns False if that fails."""
        try:
            if self.file is None:
                self.file = new_file(self.size)
                self.chunks = [self.written(each) for each in self.chunks]
            self.chunks.append(self.written(chunk))
        except OSError as error:
            warnings.warn(
                f"The fit continues, but decodes its files again in every pass: {error.strerror or error}, in the "
                f"folder of temporary files, {tempfile.tempdir}. Free disk space there, or change TMPDIR.",
                CacheWarning,
                stacklevel=users_line(),
            )
            return False
        return True

    def written(self, chunk: Chunk) -> Chunk:
        """Write the features of a chunk and return it without them; `open` restores them."""
        rest = np.ascontiguousarray(chunk.features).data.cast("B")
        while rest:
            rest = rest[self.file.write(rest) :]
        return replace(chunk, features=np.empty((len(chunk.features), 0), chunk.features.dtype))

    def open(self, width: int, check: Callable[[Chunk], Chunk]) -> None:
        """Check each chunk and make it ready for passes."""
        self.chunks = [check(chunk) for chunk in self.chunks]
        if self.file is None:
            return
        self.map = np.memmap(self.file, self.chunks[0].features.dtype, "r", shape=(self.rows, width))
        ends = np.cumsum([len(chunk.features) for chunk in self.chunks])
        parts = np.split(np.asarray(self.map), ends[:-1])
        self.chunks = [replace(chunk, features=part) for chunk, part in zip(self.chunks, parts, strict=True)]

    def close(self) -> None:
        """Close the file; its mapping stays valid."""
        if self.file is not None:
            self.file.close()

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the chunks; pages of the file are released once a chunk has been used."""
        for chunk in self.chunks:
            yield chunk
            if self.map is not None:
                release_pages(self.map, chunk.features)


def new_file(size: int) -> Any:
    """Return a file without a name, with this many bytes reserved if the system supports it."""
    file = tempfile.TemporaryFile(buffering=0, prefix="viper-")  # noqa: SIM115
    try:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        file.close()
        raise
    return file
