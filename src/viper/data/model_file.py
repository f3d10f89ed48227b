"""Save and load: one safetensors file per model, with everything that is not a tensor as JSON in its header.

    length of the header, 8 bytes
    header, JSON: {"__metadata__": {"viper": document}, name: {"dtype": …, "shape": …, "data_offsets": …}, …}
    data of the tensors

The document is a `Document`, as JSON. Its sha256 is that of the whole file with zeros in place of the digest. Nothing
in the file is code. No size in it is trusted: the sizes of header and tensors are compared with that of the file before
anything is allocated for them, and no tensor is created before the digest is verified.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from viper.data.schema import LABEL, Fields, Items, Layout, Value, refuse_value
from viper.data.writing import IN_PYTHON, checked_file, worded_errors
from viper.errors import StorageError, shown

FORMAT_VERSION = 2  # 1: version 0.1.0; 2: since then, with training data and imputations. Both can be read
LARGEST_HEADER = 1 << 24  # bytes; as JSON in memory it may take twenty times as much
MOST_CONTAINERS = 1_000_000  # lists and dictionaries in a header, each of which takes at least 60 bytes
MOST_AXES = 8
IMPOSSIBLE_HEADER = 1 << 40  # bytes; a text file, read as a model, would claim a far longer header
NO_DIGEST = "0" * 64
JSON_SCALARS = (str, bool, int, float, type(None))  # what JSON stores unchanged
DTYPES = {  # as safetensors names them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LABEL_DTYPE = re.compile(r"object|\|b1|\|[iu]1|[<>](?:[iu][248]|f[248]|U\d{1,9})")
DTYPE_OF_LABELS = Value("a type of labels", lambda x: type(x) is str and bool(LABEL_DTYPE.fullmatch(x)))
LABELS = Fields({"dtype": DTYPE_OF_LABELS, "values": Items(LABEL, 2)})
MANY_LABELS = Fields({"dtype": DTYPE_OF_LABELS, "values": Items(LABEL)})
OTHER_FORMATS = {b"PK\x03\x04": "a zip archive, as torch.save writes", b"\x80": "a pickle"}


class Document(NamedTuple):
    """The content of the header: the file's digest, the version that wrote it, and what the file holds."""

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


CheckHeader = Callable[[str, dict[str, Layout], dict[str, Any]], None]


def read_tensors(
    path: str | os.PathLike[str], check: CheckHeader | None = None
) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """Read (kind, tensors, metadata) as given to `write_tensors`; the tensors are on the CPU.

    `check(kind, layouts, metadata)` is called before the tensors are read, and raises if it rejects them.

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
            document, layouts = parse_head(head, path)
            size = os.fstat(file.fileno()).st_size - len(head)
            check_extent(size, document, layouts, path)
            if check is not None:
                check(document.kind, layouts, document.metadata)
            data = read_data(file, size, head, document, path)
    except (OSError, ValueError) as error:
        if isinstance(error, StorageError):
            raise
        words = getattr(error, "strerror", None) or error  # a ValueError if the name contains a null character
        raise StorageError(f"path must be readable; got {path}: {words}.") from error
    tensors = {name: decode_tensor(data, layout) for name, layout in layouts.items()}
    return document.kind, tensors, document.metadata


# --- writing ---


def encode_file(kind: str, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> bytes:
    """Return the bytes of the file."""
    plain = {name: plain_tensor(name, tensor) for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in plain.values())
    document = Document(NO_DIGEST, FORMAT_VERSION, viper_version(), size, kind, plain_metadata(metadata))
    text = json.dumps(document._asdict())
    rule = f"names and metadata must fit in {LARGEST_HEADER} bytes and {MOST_CONTAINERS} lists"
    if len(text) > LARGEST_HEADER:
        raise StorageError(f"{rule}; got {len(text)} bytes. Use fewer columns or levels.")
    try:
        contents = safetensors.torch.save(plain, {"viper": text})
    except SafetensorError as error:
        raise StorageError(f"{rule}; got {shown(str(error))}.") from error
    if not is_readable(contents[8 : (end := 8 + int.from_bytes(contents[:8], "little"))]):
        raise StorageError(f"{rule}; got {end} bytes. Use fewer columns or levels.")
    return contents.replace(NO_DIGEST.encode(), hashlib.sha256(contents).hexdigest().encode(), 1)


def plain_tensor(name: str, tensor: Tensor) -> Tensor:
    """Return a copy on the CPU that shares no memory."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or name == "__metadata__":
        raise TypeError(f"tensors must map names to dense tensors; got {type(tensor).__name__} for {name!r}.")
    if tensor.dtype not in DTYPES.values():
        raise TypeError(f"tensors must hold real numbers to be saved; got {tensor.dtype} for {name!r}.")
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
    """Return labels as JSON; text is as wide as its longest label, and types that NumPy lacks become objects."""
    values = classes.tolist()
    kind = np.array(values).dtype.str if classes.dtype.kind == "U" else classes.dtype.str
    return {"dtype": kind if classes.dtype.kind in "biufU" else "object", "values": values}


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
    head = start + file.read(length)
    if not is_readable(head):
        refuse_file(path, f"damaged: its header has more than {MOST_CONTAINERS} lists")
    return head


def is_readable(head: bytes) -> bool:
    """Return whether a header is small enough to be parsed; brackets inside text count too."""
    return len(head) <= LARGEST_HEADER + 8 and head.count(b"[") + head.count(b"{") <= MOST_CONTAINERS


def parse_head(head: bytes, path: Path) -> tuple[Document, dict[str, Layout]]:
    """Return the header's document, and the layouts of the tensors that it declares.

    Raises if it is invalid or of a newer format version.
    """
    try:
        entries = parse_json(head[8:].decode())
        content = parse_json(entries.pop("__metadata__")["viper"])
        number = content["format_version"]
        if type(number) is int and number > FORMAT_VERSION:
            writer = shown(content.get("viper_version")).strip("'")
            raise StorageError(
                f"format version must be at most {FORMAT_VERSION}; got {shown(number)} in {path}, "
                f"written by viper {writer}. Upgrade viper."
            )
        document = Document(**content)
        if [type(x) for x in document] != [str, int, str, int, str, dict] or not document.sha256.isascii():
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        refuse_file(path, "without viper's metadata: damaged, or written by another program")
    except (ValueError, RecursionError) as error:
        if isinstance(error, StorageError):
            raise
        refuse_file(path, "without a JSON header: damaged, or another format")
    return document, {name: parse_layout(name, entry, path) for name, entry in entries.items()}


def parse_json(text: Any) -> Any:
    """Parse JSON as `write_tensors` writes it, without NaN and infinity."""
    if not isinstance(text, str):
        raise TypeError
    return json.loads(text, parse_constant=refuse_constant)


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def parse_layout(name: str, entry: Any, path: Path) -> Layout:
    """Return the layout of one tensor. Raises unless its bytes are aligned and as many as its shape implies."""
    try:
        dtype, shape, (start, end) = (entry[key] for key in ("dtype", "shape", "data_offsets"))
        if len(entry) == 3 and len(shape) <= MOST_AXES and all(type(x) is int and x >= 0 for x in (*shape, start, end)):
            layout = Layout(DTYPES[dtype], tuple(shape), start, end)
            width = layout.dtype.itemsize
            if end - start == prod(shape) * width and start % width == 0:
                return layout
    except (KeyError, TypeError, ValueError):
        pass
    return refuse_file(path, f"damaged: its tensor {shown(name)} must fit its shape and type; got {shown(entry)}")


def refuse_file(path: Path, what: str) -> NoReturn:
    raise StorageError(f"path must be a model saved by viper; got {path}, which is {what}.") from None


def check_extent(size: int, document: Document, layouts: dict[str, Layout], path: Path) -> None:
    """Raise unless the tensors follow each other without gaps, and are all the data in the file."""
    if size < document.data_bytes:
        rule = f"{path} must hold {shown(document.data_bytes)} bytes of data; got {size}"
        raise StorageError(f"{rule}: it is truncated. Copy or save it again.")
    end = 0
    for layout in sorted(layouts.values(), key=lambda layout: (layout.start, layout.end)):
        if layout.start != end:
            refuse_file(path, "damaged: its tensors overlap or have gaps between them")
        end = layout.end
    if not size == document.data_bytes == end:
        rule = f"{path} must hold {end} bytes of data; got {size}"
        raise StorageError(f"{rule}: it changed after it was saved. Copy or save it again.")


def read_data(file: BinaryIO, size: int, head: bytes, document: Document, path: Path) -> bytearray:
    """Return the bytes after the header. Raises unless the whole file matches its digest."""
    data = bytearray(size)
    if file.readinto(data) != size:  # type: ignore[attr-defined]
        refuse_file(path, "being written to")
    digest = hashlib.sha256(head.replace(document.sha256.encode(), NO_DIGEST.encode(), 1))
    digest.update(data)
    if digest.hexdigest() != document.sha256:
        rule = f"{path} must have sha256 {shown(document.sha256, 70)}; got {digest.hexdigest()}"
        raise StorageError(f"{rule}: it changed after it was saved. Copy or save it again.")
    return data


def decode_tensor(data: bytearray, layout: Layout) -> Tensor:
    """Return a tensor that shares the memory of the data."""
    if layout.start == layout.end:
        return torch.empty(layout.shape, dtype=layout.dtype)
    boolean = layout.dtype is torch.bool  # a byte of a boolean may be neither 0 nor 1
    found = torch.frombuffer(
        data,
        dtype=torch.uint8 if boolean else layout.dtype,
        count=prod(layout.shape),
        offset=layout.start,
    ).reshape(layout.shape)
    return found != 0 if boolean else found


def decode_labels(state: Any, where: str, rule: Fields = LABELS) -> np.ndarray:
    """Invert `encode_labels`. The width of text in the file is not trusted."""
    rule.check(state, where)
    name, values = state["dtype"], state["values"]
    kind = "object" if name == "object" else np.dtype(name[:2] + ("1" if name[1] == "U" else name[2:])).kind
    wanted = {"b": (bool,), "i": (int,), "u": (int,), "f": (float,), "U": (str,), "object": (str, bool, int, float)}[
        kind
    ]
    try:
        labels = np.array(values) if kind == "U" else np.array(values, dtype=name)
        same = labels.tolist() == values and all(type(value) in wanted for value in values)
        same &= kind != "object" or all(type(value) is not int or abs(value) < 2**63 for value in values)
        same &= len({isinstance(value, str) for value in values}) == 1
    except (OverflowError, ValueError, TypeError):
        same = False
    if not same or len(values) < 2 or len({*values}) < len(values):
        refuse_value(where, f"{'two' if rule is LABELS else 'different'} labels of type {name}", values)
    return labels
