"""An estimator's options and labels as JSON and tensors, and back: what storage.py can hold."""

from importlib import import_module
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.data import storage
from viper.data.storage import PLAIN, encode_labels
from viper.errors import StorageError
from viper.formula.encoding import Encoding
from viper.inference.newton import Iteration
from viper.inference.posterior import Diagonal, Full, LowRank
from viper.inference.problem import Prior


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


FIT_SCALARS = ("elbo_", "elbo_bound_", "kl_", "objective_", "n_iter_", "converged_", "status_", "passes_")


def pack(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What storage.py writes; the training rows are not part of it."""
    options, tensors = encode_options(model.get_params(deep=False))
    tensors |= {f"posterior.{name}": x for name, x in vars(model.posterior_).items()}
    tensors |= {"prior.mean": model.prior_.mean, "prior.precision": model.prior_.precision}
    tensors |= {
        "prior_scale": torch.from_numpy(model.prior_scale_),
        "history": torch.tensor(model.history_, dtype=torch.float64),
    }
    names = getattr(model, "feature_names_in_", None)
    metadata = {
        "options": options,
        "posterior": type(model.posterior_).__name__,
        "classes": encode_labels(model.classes_),
        "features": model.n_features_in_,
        "names": None if names is None else [str(name) for name in names],
        "fit": {name: getattr(model, name) for name in FIT_SCALARS},
        **encode_formula(model),
    }
    return tensors, metadata


def unpack(model: Any, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Set the fitted attributes that were packed."""
    shape = {kind.__name__: kind for kind in (Full, Diagonal, LowRank)}[metadata["posterior"]]
    parts = {name.removeprefix("posterior."): x for name, x in tensors.items() if name.startswith("posterior.")}
    model.posterior_, model.prior_ = shape(**parts), Prior(tensors["prior.mean"], tensors["prior.precision"])
    model.prior_scale_, model.classes_ = tensors["prior_scale"].numpy(), decode_labels(metadata["classes"])
    model.n_features_in_ = metadata["features"]
    if metadata["names"] is not None:
        model.feature_names_in_ = np.array(metadata["names"], dtype=object)
    model.history_ = [Iteration(int(row[0]), bool(row[1]), *row[2:]) for row in tensors["history"].tolist()]
    for name, value in metadata["fit"].items():
        setattr(model, name, value)
    decode_formula(model, metadata)


KINDS = {"logistic": "VariationalLogisticRegression", "gp": "VariationalGPClassifier"}


def load(path: str | PathLike[str], **objects: Any) -> Any:
    """The estimator saved at `path` by its `save`. Nothing in the file is executed.

    A Gaussian process with a kernel or mean of its own, not one chosen by a word, needs it again: `kernel=`, `mean=`.

    Raises
    ------
    StorageError
        If the file is missing, damaged, written by a newer viper or by another program.
    """
    kind, tensors, metadata = storage.read(path)
    if kind not in KINDS:
        raise StorageError(f"the model must be one of {sorted(KINDS)}; got {kind!r}. Update viper.")
    estimator = getattr(import_module("viper"), KINDS[kind])  # there, a missing extra is named
    return estimator._from_state(tensors, metadata, **objects)
