"""The state of a fitted estimator: tensors by name, and everything else as JSON. `save` writes it, `load` reads it.

    estimator --_pack--> State --write_tensors--> file --read_tensors--> State --_unpack--> estimator

Options, classes, columns, posterior, scalars and formula are packed here for all estimators. Each estimator packs
the rest of its state in `_own_state`, and restores it in `_restore_own_state`.
"""

from dataclasses import fields
from importlib import import_module
from os import PathLike
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data.model_file import JSON_SCALARS, encode_labels, read_tensors, write_tensors
from viper.errors import StorageError
from viper.formula.encoding import Encoding
from viper.inference.posterior import Diagonal, Full, LowRank, Posterior

# `_kind`, as stored in a model file -> the public name of the estimator
ESTIMATORS = {"logistic": "VariationalLogisticRegression", "gp": "VariationalGPClassifier"}


class State(NamedTuple):
    """What a model file holds."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix.`, by the rest of their names."""
        start = f"{prefix}."
        return {name.removeprefix(start): x for name, x in self.tensors.items() if name.startswith(start)}


class StateMixin:
    """Estimators that can be saved to a file and loaded from it."""

    _kind: ClassVar[str]  # a key of ESTIMATORS
    _fit_scalars: ClassVar[tuple[str, ...]]  # fitted attributes that are numbers, booleans or words
    _objects: ClassVar[tuple[str, ...]] = ()  # options that may be objects, which a file cannot hold

    classes_: np.ndarray
    posterior_: Posterior
    n_features_in_: int

    def save(self, path: str | PathLike[str], overwrite: bool = False) -> None:
        """Write the fitted model to one file, which `viper.load` reads.

        The training rows are not part of it. If a kernel or mean function was given as an object, only its parameters
        are stored: pass the object again to `viper.load`.
        """
        check_is_fitted(self, "posterior_")
        write_tensors(path, self._kind, *self._pack(), overwrite)

    def _pack(self) -> State:
        given = self.get_params(deep=False)  # type: ignore[attr-defined]
        objects = {name: type(given[name]).__name__ for name in self._objects if not isinstance(given[name], str)}
        options, tensors = encode_options({name: value for name, value in given.items() if name not in objects})
        own = self._own_state()
        names = getattr(self, "feature_names_in_", None)
        metadata = {
            "options": options,
            **({"objects": objects} if self._objects else {}),
            "classes": encode_labels(self.classes_),
            "features": self.n_features_in_,
            "names": None if names is None else [str(name) for name in names],
            **own.metadata,
            "fit": {name: getattr(self, name) for name in self._fit_scalars},
            **({"formula": self.formula_.to_state()} if hasattr(self, "formula_") else {}),
        }
        posterior = {f"posterior.{name}": x for name, x in vars(self.posterior_).items()}
        return State(tensors | posterior | own.tensors | self._imputation_tensors(), metadata)

    def _imputation_tensors(self) -> dict[str, Tensor]:
        """What missing="multiple" draws from: float64 arrays, whose shapes `Imputation.check` verifies."""
        imputation = getattr(getattr(self, "formula_", None), "imputation", None)
        if imputation is None:
            return {}
        return {f"imputation.{name}": torch.from_numpy(x) for name, x in imputation.arrays().items()}

    @classmethod
    def _unpack(cls, state: State, **objects: Any) -> Self:
        """Return the estimator whose `_pack` returned this state; `objects` are the options that a file cannot hold."""
        metadata = state.metadata
        arrays = {name: x.numpy() for name, x in state.part("option").items()}
        model = cls(**metadata["options"], **arrays, **cls._required_objects(metadata, objects))
        model.classes_ = np.array(metadata["classes"]["values"], dtype=metadata["classes"]["dtype"])
        model.n_features_in_ = metadata["features"]
        if metadata["names"] is not None:
            model.feature_names_in_ = np.array(metadata["names"], dtype=object)  # type: ignore[attr-defined]
        model.posterior_ = decode_posterior(state)
        for name, value in metadata["fit"].items():
            setattr(model, name, value)
        model._restore_own_state(state)
        if "formula" in metadata:
            model._restore_formula(metadata["formula"], state.part("imputation"))
        return model

    @classmethod
    def _required_objects(cls, metadata: dict[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
        if unknown := [name for name in objects if name not in cls._objects]:
            raise TypeError(f"objects passed to load {cls.__name__} must be {list(cls._objects)}; got {unknown}.")
        wanted = metadata.get("objects", {})
        for name, kind in wanted.items():
            if objects.get(name) is None:
                raise StorageError(
                    f"{name} must be passed again to load this model, which was fitted with a {kind}; got none. "
                    f"Call viper.load(path, {name}=...)."
                )
        return {name: objects[name] for name in wanted}

    def _restore_formula(self, state: Any, imputation: dict[str, Tensor]) -> None:
        self.formula_ = Encoding.from_state(state, {name: x.numpy() for name, x in imputation.items()})
        if self.formula_.names != list(getattr(self, "feature_names_in_", [])):
            raise StorageError("the formula must produce the columns of the model; got different ones. Save it again.")

    def _own_state(self) -> State:
        """Return the state that only this kind of estimator has."""
        raise NotImplementedError

    def _restore_own_state(self, state: State) -> None:
        """Set the fitted attributes that `_own_state` stored; options and shared attributes are set already."""
        raise NotImplementedError


def load(path: str | PathLike[str], **objects: Any) -> Any:
    """Return the estimator that its `save` wrote to `path`. Nothing in the file is executed.

    A Gaussian process that was given its kernel or mean function as an object needs the object again: pass
    `kernel=` or `mean=`.

    Raises
    ------
    StorageError
        If the file is missing, damaged, or written by a newer viper or another program.
    """
    kind, tensors, metadata = read_tensors(path)
    if kind not in ESTIMATORS:
        raise StorageError(f"the model must be one of {sorted(ESTIMATORS)}; got {kind!r}. Update viper.")
    estimator = getattr(import_module("viper"), ESTIMATORS[kind])  # the top level names the missing extra
    return estimator._unpack(State(tensors, metadata), **objects)


def encode_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split constructor options into JSON and tensors. A device is stored by its name, a random generator as None."""
    plain: dict[str, Any] = {}
    arrays: dict[str, Tensor] = {}
    for name, given in options.items():
        value = given.item() if isinstance(given, np.generic) else given
        if isinstance(value, JSON_SCALARS):
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


def decode_posterior(state: State) -> Posterior:
    """Return the posterior whose fields are stored; their names determine which of the three shapes it has."""
    parts = state.part("posterior")
    for shape in (Full, Diagonal, LowRank):
        if {field.name for field in fields(shape)} == set(parts):
            return shape(**parts)
    raise StorageError(f"the model's posterior must be full, diagonal or low-rank; got parts {sorted(parts)}.")
