"""Checkpoints: an interrupted fit continues from its last completed pass.

A fit learns about its rows only through sums, so a checkpoint holds nothing else: it is a folder with one file per
completed pass. A restarted fit takes its first sums from there instead of from the rows, reaches the point where it was
interrupted, and ends with the same posterior. Each file also records which sums were requested; if a pass requests
others, it reads the rows again.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.data.model_file import JSON_SCALARS, encode_labels, read_tensors, write_tensors
from viper.errors import CheckpointWarning, StorageError, shown
from viper.inference.rows import RowFunction, RowSource, SourceTraits, SourceWrapper

HEADER = "fit.viper"


class PassLog:
    """The sums of the passes of one fit, in `folder`; `problem` identifies the fit, as JSON."""

    def __init__(self, folder: str | PathLike[str], problem: dict[str, Any], seed: int) -> None:
        self.folder, self.count, self.writable = Path(folder), 0, True
        header = self.read_header(problem)
        self.seed = seed if header is None else int(header["seed"])
        if header is None:
            self.write(HEADER, {}, {"problem": problem, "seed": seed})

    def read_header(self, problem: dict[str, Any]) -> dict[str, Any] | None:
        """Return the header of the interrupted fit, or None if there is none. Raises if it was a different fit."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            pass  # it is a file; the check below raises
        except OSError as error:
            raise ValueError(
                f"checkpoint must be a folder that can be created; got {self.folder}: {error.strerror}. Name another."
            ) from None
        if not self.folder.is_dir() or (any(self.folder.glob("[!.]*")) and not (self.folder / HEADER).is_file()):
            raise ValueError(
                f"checkpoint must be a new folder or one of an interrupted fit; got {self.folder}, which is neither."
            )
        if not (self.folder / HEADER).is_file():
            return None
        try:
            header = read_tensors(self.folder / HEADER)[2]
        except StorageError as error:
            raise ValueError(
                f"checkpoint must be intact; got {self.folder}, which is damaged: {error} Delete the folder to start "
                "over."
            ) from None
        before = header.get("problem", {})
        if before != problem:
            other = [name for name in sorted({*before, *problem}) if before.get(name) != problem.get(name)]
            was, now = ({name: identity.get(name) for name in other} for identity in (before, problem))
            raise ValueError(
                f"checkpoint must belong to the same fit; got {self.folder}, started with {was!s:.200}, for "
                f"{now!s:.200}. Use the same rows and options to continue, or another folder to start over."
            )
        return header

    def sums(self, asked: str, source: RowSource, function: RowFunction) -> list[Tensor]:
        """Return the sums of one pass, from the log if it has them, otherwise from the rows."""
        name = f"{self.count:06d}.pass"
        self.count += 1
        with suppress(StorageError, OSError):  # missing or damaged: make the pass again
            _, tensors, metadata = read_tensors(self.folder / name)
            if metadata.get("asked") == asked:
                given = next((x for x in function.keywords.values() if isinstance(x, Tensor)), None)
                home = source.device if given is None else given.device
                return [tensors[str(i)].to(home) for i in range(len(tensors))]
        found = source.reduce(function)
        self.write(name, {str(i): x for i, x in enumerate(found)}, {"asked": asked})
        return found

    def write(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        """Write one file, completely or not at all. If that fails, the fit continues without checkpoints."""
        if not self.writable:
            return
        try:
            write_tensors(self.folder / name, "checkpoint", tensors, metadata, overwrite=True)
        except StorageError as error:
            self.writable = False
            warnings.warn(
                f"The fit continues, but no further passes are checkpointed: {error} Free disk space and restart to "
                "checkpoint again.",
                CheckpointWarning,
                stacklevel=2,
            )

    def remove(self) -> None:
        """Delete the checkpoint of a completed fit."""
        for path in [*self.folder.glob("*.pass"), *self.folder.glob(".viper-*.tmp"), self.folder / HEADER]:
            path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


@dataclass(frozen=True)
class LoggedSource(SourceWrapper):
    """A source whose passes, and those of its samples, are kept in a log."""

    source: RowSource
    log: PassLog

    @property
    def traits(self) -> SourceTraits:
        """Not in memory: minibatches of the arrays would bypass the log."""
        traits = self.source.traits
        return replace(traits, where="stream") if traits.where == "memory" else traits

    def reduce(self, function: RowFunction) -> list[Tensor]:
        return self.log.sums(digest((self.rows, function)), self.source, function)

    def sample(self, k: int, generator: np.random.Generator) -> "LoggedSource":
        return LoggedSource(self.source.sample(k, generator), self.log)


@contextmanager
def resumable(
    estimator: Any, source: RowSource, folder: str | PathLike[str] | None, seed: int
) -> Iterator[tuple[RowSource, int]]:
    """Return the source, with a log in `folder` if given, and the seed, which an interrupted fit keeps."""
    if folder is None:
        yield source, seed
        return
    if not isinstance(folder, str | PathLike) or not str(folder):
        raise ValueError(
            f"checkpoint must be the name of a folder; got {shown(folder)}. Write checkpoint='fit-of-today'."
        )
    log = PassLog(folder, fit_identity(estimator, source), seed)
    yield LoggedSource(source, log), log.seed
    log.remove()


def fit_identity(estimator: Any, source: RowSource) -> dict[str, Any]:
    """Return what identifies a fit: its options, the numbers of rows and columns, and some of the rows."""
    options = {name: x for name, x in estimator.get_params(deep=False).items() if name not in ("verbose", "n_jobs")}
    return {
        "estimator": type(estimator).__name__,
        **{name: x if isinstance(x, JSON_SCALARS) else digest(x) for name, x in options.items()},
        "names": [str(name) for name in getattr(estimator, "feature_names_in_", [])],
        "classes": encode_labels(estimator.classes_),
        "rows": source.rows,
        "dimension": source.dimension,
        "first rows": digest(source.head()),
    }


def digest(value: Any) -> str:
    """Return a short fingerprint of numbers, arrays, modules, and functions with their arguments."""
    total = hashlib.sha256()
    for part in content_bytes(value):
        total.update(part)
    return total.hexdigest()[:32]


def content_bytes(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, partial):
        yield from content_bytes((value.func, value.args, value.keywords))
    elif isinstance(value, torch.nn.Module):
        yield type(value).__qualname__.encode()
        yield from content_bytes(value.state_dict())
    elif isinstance(value, dict):
        for name in sorted(value):
            yield from content_bytes((name, value[name]))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from content_bytes({field.name: getattr(value, field.name) for field in fields(value)})
    elif isinstance(value, list | tuple):
        for item in value:
            yield from content_bytes(item)
    elif hasattr(value, "indptr"):  # a sparse matrix
        yield from content_bytes((value.data, value.indices, value.indptr))
    elif isinstance(value, JSON_SCALARS):
        yield json.dumps(value).encode()
    else:
        yield getattr(value, "__qualname__", type(value).__qualname__).encode()
