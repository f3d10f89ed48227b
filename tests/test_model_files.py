"""Model files of earlier versions load, and predict what they predicted when they were saved."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import viper
from viper.data import model_file

FILES = Path(__file__).parent / "data" / "models"
EXPECTED = json.loads((FILES / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_file_of_version_0_1_predicts_as_it_did(name):
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
