"""An estimator's options and labels as JSON and tensors, and back: what storage.py can hold."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.formula.encoding import Encoding
from viper.models.storage import StorageError

PLAIN = (str, bool, int, float, type(None))


def encode_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Constructor options: plain ones as JSON, numeric arrays as tensors, a device by its name, no generators."""
    plain: dict[str, Any] = {}
    arrays: dict[str, Tensor] = {}
    for name, given in options.items():
        value = given.item() if isinstance(given, np.generic) else given
        if isinstance(value, PLAIN):
            plain[name] = value
        elif isinstance(value, torch.device):
            plain[name] = str(value)
        elif isinstance(value, np.random.RandomState | np.random.Generator):
            plain[name] = None
        elif isinstance(value, list | tuple | np.ndarray | Tensor):
            arrays[f"option.{name}"] = torch.as_tensor(np.asarray(value, dtype=np.float64))
        else:
            raise TypeError(f"{name} must be a number, word or array to be saved; got {type(value).__name__}.")
    return plain, arrays


def decode_options(plain: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The inverse of `encode_options`; arrays come back as NumPy's."""
    prefix = "option."
    arrays = {name[len(prefix) :]: x.numpy() for name, x in tensors.items() if name.startswith(prefix)}
    return plain | arrays


def encode_labels(classes: np.ndarray) -> dict[str, Any]:
    return {"dtype": classes.dtype.str if classes.dtype.kind != "O" else "object", "values": classes.tolist()}


def decode_labels(saved: dict[str, Any]) -> np.ndarray:
    return np.array(saved["values"], dtype=saved["dtype"])


def encode_formula(model: Any) -> dict[str, Any]:
    """The metadata of a model made by a formula; none of another."""
    return {"formula": model.formula_.to_state()} if hasattr(model, "formula_") else {}


def decode_formula(model: Any, metadata: dict[str, Any]) -> None:
    if "formula" in metadata:
        model.formula_ = Encoding.from_state(metadata["formula"])
        if model.formula_.names != list(getattr(model, "feature_names_in_", [])):
            raise StorageError("the model's formula must give its columns; got others. Save it again.")
