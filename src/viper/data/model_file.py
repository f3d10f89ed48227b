"""Save and load: one safetensors file per model, with everything that is not a tensor as JSON in its header.

    length of the header, 8 bytes
    header, JSON: {"__metadata__": {"viper": document}, name: {"dtype": …, "shape": …, "data_offsets": …}, …}
    data of the tensors

The document is a `Document`, as JSON. Its sha256 is that of the whole file with zeros in place of the digest. Nothing
in the file is code, and no tensor is created before the digest is verified.
"""

import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from viper.data.writing import IN_PYTHON, checked_file, worded_errors
from viper.errors import StorageError

FORMAT_VERSION = 1
LARGEST_HEADER = 100_000_000  # bytes; safetensors' own limit
IMPOSSIBLE_HEADER = 1 << 40  # bytes; a text file, read as a model, would announce a far longer header
NO_DIGEST = "0" * 64
JSON_SCALARS = (str, bool, int, float, type(None))  # what JSON stores unchanged
OTHER_FORMATS = {b"PK\x03\x04": "a zip archive, as torch.save writes", b"\x80": "a pickle"}


class Document(NamedTuple):
    """What the header says: the file's digest, the version that wrote it, and what it holds."""

    sha256: str  # the first field, so that its placeholder is the first run of 64 zeros in the file
    format_version: int
    viper_version: str
    data_bytes: int
    kind: str
    metadata: dict[str, Any]


def write_tensors(
    path: str | os.PathLike[str],
    kind: str,
    tensors: dict[str, Tensor],
    metadata: dict[str, Any],
    overwrite: bool = False,
) -> None:
    """Write a model to `path`: all of it, or nothing.

    Links are followed. Tensors may be on any device. Metadata must come back from JSON unchanged: finite
    numbers, strings, booleans, None, lists, and dictionaries with string keys. Anything else raises a TypeError.

    Raises
    ------
    StorageError
        If the file exists and `overwrite` is False, or if it cannot be written.
    """
    write_bytes(path, encode_file(kind, tensors, metadata), overwrite)


def write_bytes(path: str | os.PathLike[str], contents: bytes, overwrite: bool = False) -> None:
    """Write a file: all of it, or nothing. Raises a StorageError as `write_tensors` does."""
    path = Path(path).absolute()
    with worded_errors(path, IN_PYTHON), checked_file(path, overwrite, IN_PYTHON) as file:
        file.write(contents)


def read_tensors(path: str | os.PathLike[str]) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Read (kind, tensors, metadata) as given to `write_tensors`; the tensors are on the CPU.

    Raises
    ------
    StorageError
        If the file is missing, damaged, written by a newer viper or by another program.
    """
    path = Path(path)
    try:
        if not path.is_file():
            what = "a directory" if path.is_dir() else "not a file" if path.exists() else "not there"
            raise StorageError(f"path must be a file; got {path}, which is {what}. Check the name.")
        with path.open("rb") as file:
            head = read_head(file, path)
            document = parse_document(head, path)
            contents = head + file.read()
    except OSError as error:
        raise StorageError(f"path must be readable; got {path}: {error.strerror}.") from error
    check_contents(contents, len(head), document, path)
    return document.kind, decode_tensors(contents, path), document.metadata


# --- writing ---


def encode_file(kind: str, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> bytes:
    """Return the bytes of the file."""
    plain = {name: plain_tensor(name, tensor) for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in plain.values())
    document = Document(NO_DIGEST, FORMAT_VERSION, viper_version(), size, kind, plain_metadata(metadata))
    try:
        contents = safetensors.torch.save(plain, {"viper": json.dumps(document._asdict())})
    except SafetensorError as error:
        raise StorageError(f"names and metadata must fit in {LARGEST_HEADER} bytes; got {error}.") from error
    return contents.replace(NO_DIGEST.encode(), hashlib.sha256(contents).hexdigest().encode(), 1)


def plain_tensor(name: str, tensor: Tensor) -> Tensor:
    """Return a copy on the CPU that shares no memory."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or name == "__metadata__":
        raise TypeError(f"tensors must map names to dense tensors; got {type(tensor).__name__} for {name!r}.")
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def plain_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata as JSON will read them back. Raises a TypeError if they would differ."""
    rule = "metadata must come back from JSON unchanged"
    try:
        copy = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{rule}; got {error}. Convert arrays to tensors, and NaN or infinity to None.") from error
    if not isinstance(copy, dict) or copy != metadata:
        raise TypeError(f"{rule}; got {first_change(metadata, copy)}. Convert tuples to lists, and keys to strings.")
    return copy


def first_change(given: Any, copy: Any, path: str = "metadata") -> str:
    """Describe the first value or key that JSON changes, and its location."""
    if isinstance(given, dict):
        if odd := [key for key in given if not isinstance(key, str)]:
            return f"the key {odd[0]!r} in {path}"
        inner = [(value, copy[key], f"{path}[{key!r}]") for key, value in given.items()]
    elif isinstance(given, list):
        inner = [(value, back, f"{path}[{i}]") for i, (value, back) in enumerate(zip(given, copy, strict=True))]
    else:
        return f"{given!r:.60} at {path}"
    return next((first_change(*part) for part in inner if part[0] != part[1]), f"{given!r:.60} at {path}")


def encode_labels(classes: np.ndarray) -> dict[str, Any]:
    return {"dtype": classes.dtype.str if classes.dtype.kind != "O" else "object", "values": classes.tolist()}


def viper_version() -> str:
    try:
        return version("vi-per")
    except PackageNotFoundError:  # run from source, not installed
        return "unknown"


# --- reading ---


def read_head(file: BinaryIO, path: Path) -> bytes:
    """Return the header, including the 8 bytes of its length."""
    start, size = file.read(8), os.fstat(file.fileno()).st_size
    length = int.from_bytes(start, "little")
    if not 0 < length <= min(LARGEST_HEADER, size - 8):
        other = (name for magic, name in OTHER_FORMATS.items() if start.startswith(magic))
        what = f"truncated or another format: {size} bytes, with a header of {length}"
        refuse_file(path, next(other, "a file of another format" if length > IMPOSSIBLE_HEADER else what))
    return start + file.read(length)


def parse_document(head: bytes, path: Path) -> Document:
    """Return the header's document. Raises if it is invalid or written by a newer format version."""
    try:
        content = json.loads(json.loads(head[8:].decode())["__metadata__"]["viper"])
        if content["format_version"] <= FORMAT_VERSION:
            document = Document(**content)
            if [type(x) for x in document] == [str, int, str, int, str, dict] and document.sha256.isascii():
                return document
            raise TypeError
    except (KeyError, TypeError):
        refuse_file(path, "without viper's metadata: damaged, or written by another program")
    except (ValueError, RecursionError):
        refuse_file(path, "without a JSON header: damaged, or another format")
    raise StorageError(
        f"format version must be at most {FORMAT_VERSION}; got {content['format_version']} in {path}, "
        f"written by viper {content.get('viper_version')}. Upgrade viper."
    )


def refuse_file(path: Path, what: str) -> NoReturn:
    raise StorageError(f"path must be a model saved by viper; got {path}, which is {what}.") from None


def check_contents(contents: bytes, head: int, document: Document, path: Path) -> None:
    """Raise unless the file is complete and unchanged."""
    if (size := len(contents) - head) < document.data_bytes:
        rule = f"{path} must hold {document.data_bytes} bytes of data; got {size}"
        raise StorageError(f"{rule}: it is truncated. Copy or save it again.")
    digest = hashlib.sha256(contents[:head].replace(document.sha256.encode(), NO_DIGEST.encode(), 1))
    digest.update(memoryview(contents)[head:])
    if digest.hexdigest() != document.sha256:
        rule = f"{path} must have sha256 {document.sha256}; got {digest.hexdigest()}"
        raise StorageError(f"{rule}: it changed after it was saved. Copy or save it again.")


def decode_tensors(contents: bytes, path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(contents)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise StorageError(f"{path} must hold tensors that torch can read; got {error}.") from error
