"""Load a saved model, whichever estimator it is."""

from importlib import import_module
from os import PathLike
from typing import Any

from viper.models import storage

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
        raise storage.StorageError(f"the model must be one of {sorted(KINDS)}; got {kind!r}. Update viper.")
    estimator = getattr(import_module("viper"), KINDS[kind])  # there, a missing extra is named
    return estimator._from_state(tensors, metadata, **objects)
