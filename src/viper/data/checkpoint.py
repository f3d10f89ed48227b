"""An interrupted fit goes on from its last completed pass.

All that a fit learns from its rows are sums over them, so a checkpoint is nothing but these: a folder with one file per
completed pass. A fit that is begun again takes its first sums from there instead of from the rows, comes to where it
was interrupted, and ends with the same posterior. Of each pass the log also knows what was asked for; where that is
not what is asked now, the pass is made again.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.data import storage
from viper.data.checks import in_memory
from viper.data.storage import JSON_SCALARS, encode_labels
from viper.errors import CheckpointWarning, StorageError
from viper.inference.rows import Arrays, InBlocks, RowFunction, Source, Through

HEADER = "fit.viper"
FEW_ENTRIES = 1 << 14  # by which rows on a cluster are recognised


class Log:
    """The sums of the passes of one fit, in `folder`; `problem` says in JSON's types which fit it is."""

    def __init__(self, folder: str | PathLike[str], problem: dict[str, Any], seed: int) -> None:
        self.folder, self.count, self.writable = Path(folder), 0, True
        begun = self.begun(problem)
        self.seed = seed if begun is None else int(begun["seed"])
        if begun is None:
            self.write(HEADER, {}, {"problem": problem, "seed": seed})

    def begun(self, problem: dict[str, Any]) -> dict[str, Any] | None:
        """What the folder says of the fit that was interrupted, if there was one; a complaint if it was another."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            pass  # a file, of which more below
        except OSError as error:
            raise ValueError(
                f"checkpoint must be a folder that can be made; got {self.folder}: {error.strerror}. Name another."
            ) from None
        if not self.folder.is_dir() or (any(self.folder.glob("[!.]*")) and not (self.folder / HEADER).is_file()):
            raise ValueError(
                f"checkpoint must be a new folder or one of an interrupted fit; got {self.folder}, which is neither."
            )
        if not (self.folder / HEADER).is_file():
            return None
        try:
            begun = storage.read_tensors(self.folder / HEADER)[2]
        except StorageError as error:
            raise ValueError(
                f"checkpoint must be whole; got {self.folder}, which is damaged: {error} Delete the folder to begin "
                "anew."
            ) from None
        before = begun.get("problem", {})
        if before != problem:
            other = [name for name in sorted({*before, *problem}) if before.get(name) != problem.get(name)]
            was, now = ({name: facts.get(name) for name in other} for facts in (before, problem))
            raise ValueError(
                f"checkpoint must be of the same fit; got {self.folder}, begun with {was!s:.200}, for {now!s:.200}. "
                "Use the same rows and options to go on, or another folder to begin anew."
            )
        return begun

    def sums(self, asked: str, source: Source, function: RowFunction) -> list[Tensor]:
        """The sums of one pass: those of the log, if it made this pass, else of the rows."""
        name = f"{self.count:06d}.pass"
        self.count += 1
        with suppress(StorageError, OSError):  # not there, or damaged: the pass is made again
            _, tensors, metadata = storage.read_tensors(self.folder / name)
            if metadata.get("asked") == asked:
                given = next((x for x in function.keywords.values() if isinstance(x, Tensor)), None)
                home = source.device if given is None else given.device
                return [tensors[str(i)].to(home) for i in range(len(tensors))]
        found = source.reduce(function)
        self.write(name, {str(i): x for i, x in enumerate(found)}, {"asked": asked})
        return found

    def write(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
        """One file, whole or not at all; what cannot be written costs the checkpoint, not the fit."""
        if not self.writable:
            return
        try:
            storage.write_tensors(self.folder / name, "checkpoint", tensors, metadata, overwrite=True)
        except StorageError as error:
            self.writable = False
            warnings.warn(
                f"The fit goes on, but could be resumed only from before: {error} Make room and start it again.",
                CheckpointWarning,
                stacklevel=2,
            )

    def remove(self) -> None:
        """The fit is complete: nothing is left to resume."""
        for path in [*self.folder.glob("*.pass"), *self.folder.glob(".viper-*.tmp"), self.folder / HEADER]:
            path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


@dataclass(frozen=True)
class Logged(Through):
    """A source whose passes are kept in a log, and those of its subsets."""

    source: Source
    log: Log

    def reduce(self, function: RowFunction) -> list[Tensor]:
        return self.log.sums(digest((self.rows, function)), self.source, function)

    def subset(self, k: int, generator: np.random.Generator) -> "Logged":
        return Logged(self.source.subset(k, generator), self.log)

    def whole(self) -> Arrays:
        return in_memory(self.source)


@contextmanager
def resumable(
    estimator: Any, source: Source, folder: str | PathLike[str] | None, seed: int
) -> Iterator[tuple[Source, int]]:
    """The source with a log in `folder`, if there is to be one, and the seed of the fit that is resumed."""
    if folder is None:
        yield source, seed
        return
    if not isinstance(folder, str | PathLike) or not str(folder):
        raise ValueError(f"checkpoint must be the name of a folder; got {folder!r}. Write checkpoint='fit-of-today'.")
    log = Log(folder, facts(estimator, source), seed)
    yield Logged(source, log), log.seed
    log.remove()


def facts(estimator: Any, source: Source) -> dict[str, Any]:
    """By which a fit is recognised: its options, how many rows, how wide, and some of them."""
    options = {name: x for name, x in estimator.get_params(deep=False).items() if name != "verbose"}
    if isinstance(source, InBlocks):
        first: Any = next(source.blocks(), None)
    else:  # rows elsewhere have no first block: a few of them, always the same
        few = min(source.rows, 1 + FEW_ENTRIES // source.dimension)
        first = in_memory(source.subset(few, np.random.default_rng(0)))
    return {
        "estimator": type(estimator).__name__,
        **{name: x if isinstance(x, JSON_SCALARS) else digest(x) for name, x in options.items()},
        "names": [str(name) for name in getattr(estimator, "feature_names_in_", [])],
        "classes": encode_labels(estimator.classes_),
        "rows": source.rows,
        "dimension": source.dimension,
        "first rows": digest(first),
    }


def digest(value: Any) -> str:
    """A short fingerprint of numbers, arrays, modules, and functions with what they were given."""
    total = hashlib.sha256()
    for part in contents(value):
        total.update(part)
    return total.hexdigest()[:32]


def contents(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, partial):
        yield from contents((value.func, value.args, value.keywords))
    elif isinstance(value, torch.nn.Module):
        yield type(value).__qualname__.encode()
        yield from contents(value.state_dict())
    elif isinstance(value, dict):
        for name in sorted(value):
            yield from contents((name, value[name]))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from contents({field.name: getattr(value, field.name) for field in fields(value)})
    elif isinstance(value, list | tuple):
        for item in value:
            yield from contents(item)
    elif hasattr(value, "indptr"):  # a sparse matrix
        yield from contents((value.data, value.indices, value.indptr))
    elif isinstance(value, JSON_SCALARS):
        yield json.dumps(value).encode()
    else:
        yield getattr(value, "__qualname__", type(value).__qualname__).encode()
