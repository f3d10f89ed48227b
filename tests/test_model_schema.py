"""Forged model files, whose digest is right: what viper would not write is refused in one line, and takes no memory."""

import hashlib
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from memory import PEAK

import viper
from viper.data.model_file import read_tensors, write_tensors
from viper.data.schema import NOTHING, PLAIN, WHOLE, Entries, Items, Layout, fields_of, rule_of
from viper.errors import StorageError
from viper.formula.encoding import ENCODING, Encoding
from viper.models.saving import estimator_of

FILES = Path(__file__).parent / "data" / "models"
NAMES = sorted(path.stem for path in FILES.glob("*.viper"))


def refused(path, *words):
    """Loading raises a StorageError of one printable line that names the file and contains `words`."""
    with pytest.raises(StorageError) as error:
        viper.load(path)
    message = str(error.value)
    assert message.isprintable()
    assert message.endswith(".")
    assert all(word in message for word in (str(path), *words)), message


def changed(path, name, change):
    """The model file `name` with its tensors and metadata changed, written to `path`."""
    kind, tensors, metadata = read_tensors(FILES / f"{name}.viper")
    kind = change(tensors, metadata) or kind
    write_tensors(path, kind, tensors, metadata)
    return path


def set_in(place, value):
    """A change of the metadata at a place such as "fit.elbo_"."""

    def change(tensors, metadata):
        *path, last = place.split(".")
        for key in path:
            metadata = metadata[key]
        metadata[last] = value

    return change


@pytest.mark.parametrize(
    ("name", "place", "value", "words"),
    [
        ("logistic_full", "fit.predict", 1, "fit must have only what viper writes; got 'predict'"),
        ("logistic_full", "fit.__class__", "x", "fit must have only what viper writes"),
        ("logistic_full", "fit.elbo_", "x", "fit.elbo_ must be a finite number; got 'x'"),
        ("logistic_full", "fit.n_iter_", -1, "fit.n_iter_ must be a whole number from 0 on; got -1"),
        ("logistic_full", "fit.converged_", 1, "fit.converged_ must be true or false; got 1"),
        ("logistic_full", "more", 1, "must have only what viper writes; got 'more'"),
        ("logistic_full", "names", ["a"], "names must be 4; got 1"),
        ("logistic_full", "features", 5, "must have shape"),
        ("logistic_full", "features", 0, "features must be a whole number from 1 on"),
        ("logistic_full", "posterior", "Empty", "posterior must be one of"),
        ("logistic_full", "options.bound", "x", "bound must be one of"),
        ("logistic_full", "options.tol", [1], "options.tol must be a finite number; got [1]"),
        ("logistic_full", "options.more", 1, "options must have only what viper writes; got 'more'"),
        ("logistic_full", "options.random_state", "x", "options.random_state must be a seed"),
        ("logistic_full", "classes.values", [0], "classes must be different labels of type <i8; got [0]"),
        ("logistic_full", "classes.values", [0, 0], "classes must be different labels of type <i8; got [0, 0]"),
        ("logistic_full", "classes.values", ["a", "b"], "classes must be different labels of type <i8; got ['a', 'b']"),
        ("logistic_full", "classes.dtype", "|V8", "classes.dtype must be a type of labels"),
        ("gp_rbf", "options.kernel", "x", "kernel must be one of"),
        ("gp_rbf", "options.kernel", "linear", "kernel and mean must be those of the saved model"),
        ("gp_rbf", "fit.jitter_", 1.0, "fit.jitter_ must be a number from 0 to 0.01; got 1.0"),
        ("gp_rbf", "starts", [["a", 1]], "starts[0] must be a start"),
        ("gp_rbf", "features", 2 * 10**8, "centre must have shape (200000000); got (4)"),
        ("logistic_formula", "formula.levels", {"ward": []}, "levels"),
        ("logistic_formula", "formula.scale", [0, 1, 1, 1], "formula.scale[0] must be a positive number; got 0"),
        ("logistic_formula", "formula.missing", "x", "formula.missing must be one of"),
        ("logistic_formula", "formula.record", {"more": 1}, "formula.record must have only what viper writes"),
        ("logistic_formula", "formula.record", {"scores": {"how": "", "auc": "x"}}, "record.scores['auc'] must be"),
        ("logistic_formula", "formula.record", {"scores": {"auc": 0.9}}, "formula.record.scores must have 'how'"),
        ("logistic_formula", "formula.record", {"diagnosis": {"k_hat": 0.1}}, "diagnosis must have 'reliable'"),
        ("format2_multiple", "formula.training.rows", "x", "formula.training.rows must be a whole number"),
        ("format2_multiple", "formula.missing", "mean", "an imputation where there is none"),
    ],
)
def test_a_forged_value_is_named(tmp_path, name, place, value, words):
    refused(changed(tmp_path / "m", name, set_in(place, value)), "cannot be loaded", words)


def fill(name, value):
    return lambda tensors, metadata: tensors.update({name: torch.full_like(tensors[name], value)})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("logistic_full", fill("posterior.mean", np.nan), "posterior.mean must be finite"),
        ("logistic_full", fill("posterior.factor", 0.0), "posterior.factor must be a finite matrix with an inverse"),
        ("logistic_full", fill("prior.precision", -1.0), "prior.precision must be positive"),
        ("logistic_full", fill("history", np.inf), "history must be the iterations"),
        ("logistic_diagonal", fill("posterior.variance", 0.0), "posterior.variance must be finite and positive"),
        ("logistic_wide", fill("posterior.basis", 0.5), "posterior.basis must be orthonormal columns"),
        ("gp_rbf", fill("scale", 0.0), "scale must be finite and positive"),
        ("gp_rbf", fill("model.kernel.raw_outputscale", 1e6), "raw_outputscale must be neither zero nor infinite"),
        (
            "logistic_full",
            lambda t, m: t.pop("prior.mean") is None or None,
            "the file must have 'prior.mean'; got none",
        ),
        ("logistic_full", lambda t, m: t.update(x=torch.ones(1)), "the file must have only what viper writes; got 'x'"),
        (
            "logistic_full",
            lambda t, m: t.update({"prior.mean": torch.ones(5)}),
            "prior.mean must be float64; got float32",
        ),
        (
            "logistic_full",
            lambda t, m: "other",
            "one of ['bandit', 'experiment', 'gp', 'logistic', 'mixed', 'ordinal', 'preference']; got 'other'",
        ),
    ],
)
def test_forged_tensors_are_named(tmp_path, name, change, words):
    refused(changed(tmp_path / "m", name, change), "cannot be loaded", words)


def test_what_is_not_valid_is_not_saved(tmp_path):
    model = viper.load(FILES / "logistic_full.viper")
    model.elbo_ = "x"
    with pytest.raises(
        StorageError, match=r"^the model cannot be saved: fit\.elbo_ must be a finite number; got 'x'\.$"
    ):
        model.save(tmp_path / "m")
    model = viper.load(FILES / "logistic_full.viper")
    model.posterior_.mean[0] = np.nan
    with pytest.raises(StorageError, match=r"^the model cannot be saved: posterior\.mean must be finite; got "):
        model.save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("name", NAMES)
def test_any_field_may_be_missing_or_strange(tmp_path, name):
    """Every value of the metadata in turn is left out and replaced; the file loads as a model or is refused."""
    kind, tensors, metadata = read_tensors(FILES / f"{name}.viper")
    estimator = estimator_of(kind)
    layouts = {key: Layout(x.dtype, tuple(x.shape), 0, 0) for key, x in tensors.items()}
    for place in places(metadata):
        for strange in (None, [], {}, "x", -1, True, 1e308, ["x"], {"x": 1}):
            other = json.loads(json.dumps(metadata))
            *path, last = place
            inner = other
            for key in path:
                inner = inner[key]
            inner[last] = strange
            try:
                estimator._check_header(layouts, other)
            except StorageError as error:
                assert str(error).isprintable()  # noqa: PT017


def places(value, path=()):
    """The paths to the values of dictionaries, and to the first of each list."""
    inner = value.items() if isinstance(value, dict) else [*enumerate(value)][:1] if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def test_rules_follow_the_types_of_fields():
    assert {*ENCODING.required, *ENCODING.optional} == {field.name for field in fields(Encoding)}
    assert rule_of(dict[str, list[int]]) == Entries(Items(WHOLE))
    with pytest.raises(TypeError, match="must have a type of JSON"):
        rule_of(complex)
    with pytest.raises(StorageError, match=r"x must be finite numbers and text, not deeply nested"):
        PLAIN.check(json.loads("[" * 30 + "]" * 30), "x")
    assert fields_of(Encoding, formula=PLAIN, imputation=NOTHING).required["formula"] is PLAIN


# --- sizes ---


LOAD = """
import viper
viper.VariationalGPClassifier  # imported before the memory is measured
for path in sys.argv[1:]:
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = peak()
    try:
        viper.load(path)
        outcome = "loaded"
    except viper.errors.StorageError as error:
        assert str(error).isprintable(), error
        outcome = "refused"
    print(outcome, (peak() - before) // 1_000_000)
"""


def forged(path, name, change_header, tail=0):
    """The file `name` with another header, the digest that belongs to it, and a tail that takes no space on a disk."""
    contents = (FILES / f"{name}.viper").read_bytes()
    end = 8 + int.from_bytes(contents[:8], "little")
    entries = json.loads(contents[8:end])
    document = json.loads(entries["__metadata__"]["viper"]) | {"sha256": "0" * 64}
    change_header(document, entries)
    entries["__metadata__"]["viper"] = json.dumps(document)
    header = json.dumps(entries).encode()
    whole = len(header).to_bytes(8, "little") + header + contents[end:]
    path.write_bytes(whole.replace(b"0" * 64, hashlib.sha256(whole).hexdigest().encode(), 1))
    if tail:
        with path.open("ab") as file:
            file.truncate(path.stat().st_size + tail)
    return path


def wide_labels(document, entries):
    document["metadata"]["classes"] = {"dtype": "<U500000000", "values": ["a", "b"]}


def many_features(document, entries):
    document["metadata"]["features"] = 2 * 10**8


def long_tail(document, entries):
    document["data_bytes"] += 1 << 30


def large_tensor(document, entries):
    document["data_bytes"] += 1 << 30
    entries["more"] = {"dtype": "F64", "shape": [1 << 27], "data_offsets": [document["data_bytes"] - (1 << 30), 0]}
    entries["more"]["data_offsets"][1] = document["data_bytes"]


def large_header(document, entries):
    document["metadata"]["more"] = "x" * 50_000_000


def many_lists(document, entries):
    document["metadata"]["more"] = [[]] * 5_000_000


BOMBS = {  # change -> the file that is changed, its tail, and what becomes of it
    wide_labels: ("logistic_full", 0, "loaded"),  # the width is not believed
    many_features: ("gp_rbf", 0, "refused"),
    long_tail: ("logistic_full", 1 << 30, "refused"),
    large_tensor: ("logistic_full", 1 << 30, "refused"),
    large_header: ("logistic_full", 0, "refused"),
    many_lists: ("logistic_full", 0, "refused"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read as Linux tells it")
def test_a_tiny_file_takes_little_memory(tmp_path):
    paths = [forged(tmp_path / change.__name__, name, change, tail) for change, (name, tail, _) in BOMBS.items()]
    done = subprocess.run([sys.executable, "-c", PEAK + LOAD, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line, path, (*_, expected) in zip(done.stdout.splitlines(), paths, BOMBS.values(), strict=True):
        outcome, megabytes = line.split()
        assert (outcome, int(megabytes) < 100) == (expected, True), (path.name, line)
