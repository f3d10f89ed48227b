"""Load a saved model, whichever estimator it is."""

from os import PathLike
from typing import Any

from viper import storage
from viper.logistic import VariationalLogisticRegression

KINDS = {"logistic": VariationalLogisticRegression}


def load(path: str | PathLike[str]) -> Any:
    """The estimator saved at `path` by its `save`. Nothing in the file is executed.

    Raises
    ------
    StorageError
        If the file is missing, damaged, written by a newer viper or by another program.
    """
    kind, tensors, metadata = storage.read(path)
    if kind not in KINDS:
        raise storage.StorageError(f"the model must be one of {sorted(KINDS)}; got {kind!r}. Update viper.")
    return KINDS[kind]._from_state(tensors, metadata)
