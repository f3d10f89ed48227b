"""Model files of earlier versions load, and predict what they predicted when they were saved.

Those named format2 are of format 2, all others of format 1, as version 0.1.0 wrote them. When the format changes, its
number rises and files of the new format are added here; none is ever removed or written again.
"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import viper
from viper.data import model_file
from viper.errors import StorageError

FILES = Path(__file__).parent / "data" / "models"
EXPECTED = json.loads((FILES / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_an_old_model_file_predicts_as_it_did(name):
    expected = EXPECTED[name]
    model = viper.load(FILES / f"{name}.viper")
    rows = pd.DataFrame(expected["rows"]) if isinstance(expected["rows"], dict) else np.array(expected["rows"])
    assert model.classes_.tolist() == expected["classes"]
    assert model.elbo_ == expected["elbo"]
    # the recipe is deterministic; processors and BLAS libraries differ in the last digits
    np.testing.assert_allclose(model.predict_proba(rows)[:, 1], expected["probability"], rtol=1e-9)
    np.testing.assert_allclose(model.predict_interval(rows), expected["interval"], rtol=1e-7)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_loaded_model_is_saved_as_it_was(name):
    kind, tensors, metadata = model_file.read_tensors(FILES / f"{name}.viper")
    model = viper.load(FILES / f"{name}.viper")
    state = model._pack()
    assert (model._kind, state.metadata) == (kind, metadata)
    assert set(state.tensors) == set(tensors)
    assert all(torch.equal(state.tensors[part], tensors[part]) for part in tensors)


def test_every_model_file_is_tested():
    assert {path.stem for path in FILES.glob("*.viper")} == set(EXPECTED)


def test_every_format_has_files():
    found = {}
    for path in FILES.glob("*.viper"):
        with path.open("rb") as file:
            found[path.name] = model_file.parse_head(model_file.read_head(file, path), path)[0].format_version
    assert {*found.values()} == {*range(1, model_file.FORMAT_VERSION + 1)}
    assert all((number == 2) == name.startswith("format2") for name, number in found.items())


def test_a_newer_format_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "newer.viper"
    model = viper.load(FILES / "logistic_full.viper")
    monkeypatch.setattr(model_file, "FORMAT_VERSION", model_file.FORMAT_VERSION + 1)
    monkeypatch.setattr(model_file, "viper_version", lambda: "9.9")
    model.save(path)
    monkeypatch.undo()
    known = model_file.FORMAT_VERSION
    with pytest.raises(StorageError) as error:
        viper.load(path)
    assert str(error.value) == (
        f"format version must be at most {known}; got {known + 1} in {path}, written by viper 9.9. Upgrade viper."
    )
