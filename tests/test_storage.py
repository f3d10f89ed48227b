"""Files of tensors: what is written comes back, and damaged, forged or foreign files are refused in one line."""

import errno
import json
import os
import pickle
import random
import stat
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch

from viper.data import model_file
from viper.data.model_file import FORMAT_VERSION, read_tensors, write_tensors
from viper.data.writing import atomic_file, frame_writer
from viper.errors import StorageError

TENSORS = {
    "mean": torch.tensor([0.1, -2.5, 1e-300], dtype=torch.float64),
    "factor": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "labels": torch.tensor([True, False]),
    "counts": torch.tensor(7),
    "none": torch.zeros(0, 4),
}
METADATA = {
    "tol": 1e-9,
    "third": 1 / 3,
    "minus zero": -0.0,
    "smallest": 5e-324,
    "whole": 10**30,
    "names": ["größe", "β\n\"'\\", "\ud800", ""],
    "nested": {"a": [True, None, {"b": 1.0}]},
    "zeros": "0" * 64,
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.viper"


@pytest.fixture
def saved(path):
    write_tensors(path, "logistic", TENSORS, METADATA)
    return path


def assert_same(tensors, expected):
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert tensors[name].shape == tensor.shape
        assert torch.equal(tensors[name], tensor.detach())


def refused(path, *words):
    """`read_tensors` raises, with one line that names the file and contains `words`."""
    with pytest.raises(StorageError) as error:
        read_tensors(path)
    message = str(error.value)
    assert message.endswith(".")
    assert all(word in message for word in (str(path), *words)), message


def forge(path, text, tensors=TENSORS):
    """A file with any text in the place of the document, and the digest that belongs to it."""
    contents = safetensors.torch.save(tensors, {"viper": text})
    path.write_bytes(contents.replace(b"0" * 64, model_file.hashlib.sha256(contents).hexdigest().encode(), 1))


def document(**changes):
    size = sum(tensor.nbytes for tensor in TENSORS.values())
    return {
        "sha256": "0" * 64,
        "format_version": FORMAT_VERSION,
        "viper_version": "9.9",
        "data_bytes": size,
        "kind": "logistic",
        "metadata": {},
    } | changes


# --- what is written is read ---


def test_round_trip(saved):
    kind, tensors, metadata = read_tensors(saved)
    assert kind == "logistic"
    assert_same(tensors, TENSORS)
    assert repr(metadata) == repr(METADATA)


@pytest.mark.parametrize("tensors", [{}, {"x": torch.tensor(1.5)}])
def test_little_is_enough(path, tensors):
    write_tensors(path, "", tensors, {})
    assert_same(read_tensors(path)[1], tensors)


def test_views_shared_and_differentiable_tensors(path):
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    tensors = {"base": base, "same": base, "transposed": base.T, "part": base[:, 1], "expanded": base[:1].expand(5, 4)}
    write_tensors(path, "k", tensors, {})
    assert_same(read_tensors(path)[1], tensors)


def test_what_is_read_is_writable(saved):
    _, tensors, _ = read_tensors(saved)
    tensors["mean"].add_(1.0)


def test_equal_models_are_equal_files(saved, tmp_path):
    write_tensors(tmp_path / "again", "logistic", dict(reversed(TENSORS.items())), METADATA)
    assert (tmp_path / "again").read_bytes() == saved.read_bytes()


def test_the_file_is_safetensors(saved):
    assert_same(safetensors.torch.load_file(saved), TENSORS)
    with safetensors.safe_open(saved, "pt") as file:
        content = json.loads(file.metadata()["viper"])
    assert content["format_version"] == FORMAT_VERSION
    assert content["kind"] == "logistic"


def test_strings_and_numpy_scalars_that_are_python_values(path):
    write_tensors(str(path), "k", {}, {"name": np.str_("x"), "scale": np.float64(0.1)})
    assert read_tensors(str(path))[2] == {"name": "x", "scale": 0.1}


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_permissions_follow_the_umask(path, tmp_path):
    (tmp_path / "plain").touch()
    write_tensors(path, "k", TENSORS, {})
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


# --- what cannot be written ---


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"x": np.ones(2)}, "ndarray"),
        ({"x": {1, 2}}, "set"),
        ({"x": b"bytes"}, "bytes"),
        ({"x": float("nan")}, "Out of range float.*NaN or infinity to None"),
        ({"x": [float("inf")]}, "Out of range float"),
        ({"x": np.int64(1)}, "int64"),
        ({"x": (1, 2)}, "tuples to lists"),
        ({1: "x"}, "keys to strings"),
        ({"a": {"b": [0, {3: "x"}]}}, r"the key 3 in metadata\['a'\]\['b'\]\[1\]\."),
        ([1], r"\[1\]"),
    ],
)
def test_metadata_that_json_would_change(path, metadata, words):
    with pytest.raises(TypeError, match=rf"^metadata must come back from JSON unchanged; got .*{words}"):
        write_tensors(path, "k", {}, metadata)
    assert not path.exists()


def test_metadata_that_holds_itself(path):
    loop = {}
    loop["loop"] = loop
    with pytest.raises(TypeError, match="Circular"):
        write_tensors(path, "k", {}, loop)


@pytest.mark.parametrize(
    "tensors", [{"x": np.ones(2)}, {"x": torch.eye(2).to_sparse()}, {"__metadata__": torch.ones(1)}]
)
def test_values_other_than_tensors_are_refused(path, tensors):
    with pytest.raises(TypeError, match=r"^tensors must map names to dense tensors; got "):
        write_tensors(path, "k", tensors, {})


@pytest.mark.slow
def test_a_header_too_large(path):
    with pytest.raises(StorageError, match=r"^names and metadata must fit in 16777216 bytes and "):
        write_tensors(path, "k", {}, {"x": "x" * model_file.LARGEST_HEADER})


def test_refuses_to_overwrite(saved):
    before = saved.read_bytes()
    with pytest.raises(StorageError, match=r"^path must be new; got .*exists\. Pass overwrite=True"):
        write_tensors(saved, "other", {}, {})
    assert saved.read_bytes() == before


def test_overwrites_on_request(saved):
    write_tensors(saved, "other", {}, {}, overwrite=True)
    assert read_tensors(saved) == ("other", {}, {})
    assert list(saved.parent.iterdir()) == [saved]


def test_overwrite_needs_nothing_to_overwrite(path):
    write_tensors(path, "k", {}, {}, overwrite=True)
    assert read_tensors(path)[0] == "k"


def test_links_are_followed(saved, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(saved)
    with pytest.raises(StorageError, match="exists"):
        write_tensors(link, "new", {}, {})
    write_tensors(link, "new", {}, {}, overwrite=True)
    assert link.is_symlink()
    assert read_tensors(saved)[0] == "new"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_missing_directory_and_a_directory(tmp_path, overwrite):
    with pytest.raises(StorageError, match=r"directory of path must exist; got .*absent\. Create it"):
        write_tensors(tmp_path / "absent" / "model", "k", {}, {}, overwrite)
    with pytest.raises(StorageError, match=r"path must be a regular file or a new name; got .* which is a directory"):
        write_tensors(tmp_path, "k", {}, {}, overwrite)
    with pytest.raises(StorageError, match=r"path must be writable; got .*: File name too long"):
        write_tensors(tmp_path / ("x" * 300), "k", {}, {}, overwrite)


def test_a_directory_that_may_not_be_written(tmp_path):
    directory = tmp_path / "read-only"
    directory.mkdir(mode=0o500)
    if os.access(directory, os.W_OK):
        directory = Path("/proc/self")  # the superuser may write anywhere but here
        if not directory.is_dir():
            pytest.skip("no directory that the superuser may not write to")
    with pytest.raises(StorageError, match="path must be writable; got "):
        write_tensors(directory / "model", "k", TENSORS, {})
    assert not (directory / "model").exists()


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_failure_leaves_what_was_there(saved, monkeypatch, step, failure):
    def fail(*_):
        raise failure

    before = saved.read_bytes()
    monkeypatch.setattr(os, "fsync", fail) if step == "fsync" else monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(StorageError if isinstance(failure, OSError) else KeyboardInterrupt):
        write_tensors(saved, "new", {}, {}, overwrite=True)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


FULL_DISK = """
import resource, sys, torch
from viper.errors import StorageError
from viper.data.model_file import write_tensors

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for overwrite in (False, True):
    try:
        write_tensors(sys.argv[1 + overwrite], "k", {"x": torch.zeros(10_000)}, {}, overwrite)
    except StorageError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on file sizes is simulated with Linux's")
def test_a_full_disk(saved, tmp_path):
    before = saved.read_bytes()
    command = [sys.executable, "-c", FULL_DISK, tmp_path / "new", saved]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("path must be writable; got ") == 2
    assert saved.read_bytes() == before
    assert list(tmp_path.iterdir()) == [saved]


@pytest.mark.parametrize("exists", [False, True])
def test_a_file_system_without_links(path, monkeypatch, exists):
    def unsupported(self, *_):
        if exists:
            self.write_text("came first")
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", unsupported)
    if exists:
        with pytest.raises(StorageError, match="which exists"):
            write_tensors(path, "k", {}, {})
        assert path.read_text() == "came first"
    else:
        write_tensors(path, "k", {}, {})
        assert read_tensors(path)[0] == "k"
    assert list(path.parent.iterdir()) == [path]


# --- writers at the same time ---


def test_one_of_many_writers_wins(path):
    def attempt(i):
        try:
            write_tensors(path, str(i), {"x": torch.full((1000,), i)}, {})
        except StorageError:
            return None
        return str(i)

    for _ in range(5):
        with ThreadPoolExecutor(8) as pool:
            winners = [kind for kind in pool.map(attempt, range(8)) if kind]
        assert [read_tensors(path)[0]] == winners
        assert list(path.parent.iterdir()) == [path]
        path.unlink()


def test_a_reader_sees_one_writer_or_another(saved):
    def overwrite(i):
        write_tensors(saved, str(i), {"x": torch.full((1000,), i)}, {"i": i}, overwrite=True)

    overwrite(-1)
    with ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(overwrite, i) for i in range(40)]
        while not all(task.done() for task in pending):
            kind, tensors, metadata = read_tensors(saved)
            assert kind == str(metadata["i"])
            assert (tensors["x"] == metadata["i"]).all()
    assert [task.result() for task in pending] == [None] * 40
    assert list(saved.parent.iterdir()) == [saved]


# --- what cannot be read ---


def test_paths_that_are_not_files(tmp_path):
    refused(tmp_path / "absent", "path must be a file; got", "not there", "Check the name")
    refused(tmp_path, "is a directory")
    refused(Path(os.devnull), "not a file")
    refused(tmp_path / ("x" * 300), "File name too long")


def test_truncated_anywhere(saved):
    contents = saved.read_bytes()
    for length in [*range(16), *range(16, len(contents), 3), len(contents) - 1]:
        saved.write_bytes(contents[:length])
        refused(saved, "truncated" if length < 8 or length == len(contents) - 1 else "")


def test_any_byte_changed(saved):
    contents = bytearray(saved.read_bytes())
    for place in range(len(contents)):
        mask = (0x01, 0x02, 0x10, 0x20, 0x80)[place % 5]
        contents[place] ^= mask
        saved.write_bytes(contents)
        refused(saved)
        contents[place] ^= mask
    saved.write_bytes(contents)
    read_tensors(saved)


def test_many_bytes_changed(saved):
    contents = saved.read_bytes()
    generator = random.Random(0)
    for _ in range(500):
        changed = bytearray(contents)
        start, length = generator.randrange(len(contents)), generator.randrange(1, 64)
        changed[start : start + length] = generator.randbytes(generator.choice([0, length, 2 * length]))
        if changed != contents:
            saved.write_bytes(changed)
            refused(saved)


def test_bytes_added(saved):
    saved.write_bytes(saved.read_bytes() + b"\0")
    refused(saved, "must hold 58 bytes of data; got 59", "changed after it was saved")


def test_a_changed_number_is_named(saved):
    saved.write_bytes(saved.read_bytes()[:-1] + b"\1")
    refused(saved, "must have sha256", "changed after it was saved. Copy or save it again.")


def test_a_newer_version(path):
    forge(path, json.dumps({"format_version": FORMAT_VERSION + 1, "viper_version": "9.9", "who": "knows"}))
    refused(path, f"at most {FORMAT_VERSION}; got {FORMAT_VERSION + 1}", "viper 9.9. Upgrade viper.")


@pytest.mark.parametrize(
    "metadata", [None, {"format": "pt"}, {"viper": "{"}, {"viper": "3"}, {"viper": '"format_version"'}]
)
def test_another_programs_safetensors(path, metadata):
    safetensors.torch.save_file(TENSORS, path, metadata)
    refused(path, "model saved by viper; got")


def test_a_forged_file_is_read_as_far_as_it_is_true(path):
    forge(path, json.dumps(document()))
    assert_same(read_tensors(path)[1], TENSORS)


@pytest.mark.parametrize(
    "changes",
    [
        {"data_bytes": "81"},
        {"data_bytes": 4e8},
        {"data_bytes": 10**30},
        {"kind": None},
        {"metadata": [1]},
        {"metadata": None},
        {"format_version": True},
        {"format_version": None},
        {"format_version": float("nan")},
        {"sha256": None},
        {"sha256": ""},
        {"sha256": "\ud800"},
        {"unknown": 1},
    ],
)
def test_a_forged_document(path, changes):
    forge(path, json.dumps(document(**changes)))
    refused(path)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"format_version": ' + "1" * 5000 + "}", '{"sha256": "0"}', "NaN", ""],
    ids=["deep", "long number", "incomplete", "NaN", "empty"],
)
def test_a_forged_text(path, text):
    forge(path, text)
    refused(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "object", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]},
        {},
    ],
    ids=str,
)
def test_a_forged_tensor(path, entry):
    header = json.dumps({"__metadata__": {"viper": json.dumps(document(data_bytes=8))}, "x": entry}).encode()
    contents = len(header).to_bytes(8, "little") + header + bytes(8)
    path.write_bytes(contents.replace(b"0" * 64, model_file.hashlib.sha256(contents).hexdigest().encode(), 1))
    refused(
        path, "its tensor 'x' must fit its shape and type; got" if entry.get("data_offsets") != [8, 16] else "damaged"
    )


@pytest.mark.parametrize("length", [0, 1, 2**20, model_file.LARGEST_HEADER + 1, 2**63, 2**64 - 1])
def test_a_header_length_that_cannot_be(path, length):
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    refused(path)


def test_a_header_larger_than_allowed_is_not_read(path, monkeypatch):
    monkeypatch.setattr(model_file, "LARGEST_HEADER", 100)
    path.write_bytes((101).to_bytes(8, "little") + b" " * 101)
    refused(path, "a header of 101")


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def write_zip(path, trap):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pkl", pickle.dumps(trap))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path, trap: path.write_bytes(pickle.dumps(trap)), "a pickle"),
        (lambda path, trap: path.write_bytes(pickle.dumps(trap, protocol=0)), "another format"),
        (lambda path, trap: torch.save(trap, path), "a zip archive"),
        (write_zip, "a zip archive"),
        (lambda path, trap: forge(path, pickle.dumps(trap, protocol=0).decode()), "without a JSON header"),
        (lambda path, trap: path.write_bytes(b"\x93NUMPY\x01\x00" + pickle.dumps(trap)), "another format"),
        (lambda path, trap: path.write_bytes(b""), "0 bytes"),
        (lambda path, trap: path.write_text("a,b\n1,2\n" * 100), "another format"),
        (lambda path, trap: path.write_bytes(bytes(1000)), "another format"),
    ],
    ids=["pickle", "text pickle", "torch.save", "zip", "pickle in header", "npy", "empty", "csv", "zeros"],
)
def test_other_files_are_refused_and_nothing_is_run(path, tmp_path, make, words):
    trap = tmp_path / "sprung"
    make(path, Trap(trap))
    refused(path, words)
    assert not trap.exists()


def test_random_bytes(path):
    generator = random.Random(1)
    for _ in range(200):
        path.write_bytes(generator.randbytes(generator.randrange(200)))
        refused(path)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_model_goes_through_a_pipe(overwrite, saved):
    pipe = saved.with_name("pipe")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_tensors(pipe, "logistic", TENSORS, METADATA, overwrite)
    with os.fdopen(reader, "rb") as file:  # the model fits the buffer of a pipe
        assert file.read() == saved.read_bytes()
    assert pipe.is_fifo()
    assert {*saved.parent.iterdir()} == {pipe, saved}


# --- temporary files ---


def test_temporary_files_of_killed_writers_are_removed(tmp_path):
    """Those that are old and unlocked. One that a writer still holds stays, and so does one that is new."""
    program = (
        "import os, sys, time\nfrom viper.data.writing import atomic_file\n"
        "with atomic_file(sys.argv[1]) as file:\n    file.write(b'half')\n    file.flush()\n"
        "    print('writing', flush=True)\n    time.sleep(60)\n"
    )
    start = lambda: subprocess.Popen(  # noqa: E731
        [sys.executable, "-c", program, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    )
    temporaries = lambda: sorted(tmp_path.glob(".viper-*.tmp"))  # noqa: E731
    killed = start()
    killed.stdout.readline()
    killed.kill()
    killed.wait()
    killed.stdout.close()
    (abandoned,) = temporaries()
    long_ago = time.time() - 3600
    alive = start()
    try:
        alive.stdout.readline()
        assert len(temporaries()) == 2  # the abandoned one was too new to be removed
        for path in temporaries():
            os.utime(path, (long_ago, long_ago))
        with atomic_file(tmp_path / "other") as file:
            file.write(b"whole")
        assert len(temporaries()) == 1
        assert abandoned not in temporaries()
    finally:
        alive.kill()
        alive.wait()
        alive.stdout.close()
    assert (tmp_path / "other").read_bytes() == b"whole"


def test_a_directory_is_written_to_the_disk_too(tmp_path, monkeypatch):
    """So that a file has its new name after a power cut: first the file is synchronised, then its directory."""
    done = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (done.append(stat.S_IFMT(os.fstat(number).st_mode)), fsync(number)))
    for overwrite in (False, True):
        with atomic_file(tmp_path / "file", overwrite) as file:
            file.write(b"content")
    assert done == [stat.S_IFREG, stat.S_IFDIR] * 2


def test_compressed_output_names_no_temporary_file(tmp_path):
    with frame_writer(tmp_path / "p.csv.gz") as write:
        write(pd.DataFrame({"a": [1.0]}))
    assert b"viper" not in (tmp_path / "p.csv.gz").read_bytes()[:40]
