"""The state of a fitted estimator: tensors by name, and everything else as JSON. `save` writes it, `load` reads it.

    estimator --_pack--> State --write_tensors--> file --read_tensors--> State --_unpack--> estimator

Options, classes, columns, posterior, scalars and formula are packed here for all estimators. Each estimator packs
the rest of its state in `_own_state`, and restores it in `_restore_own_state`. The rules for all of it are declared in
tables: `POSTERIOR_FIELDS` here, and `_fit_scalars`, `_own_fields` and `_own_tensors` of the estimator. A state that
breaks them is neither written nor read.
"""

import inspect
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from os import PathLike
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data.model_file import JSON_SCALARS, LABELS, decode_labels, encode_labels, read_tensors, write_tensors
from viper.data.schema import (
    ABOVE_ZERO,
    BOOLEAN,
    DEFINITE,
    INVERTIBLE,
    LABEL,
    NORMALISED,
    NUMBER,
    POSITIVE,
    SCALAR,
    TEXT,
    WHOLE,
    Either,
    Fields,
    Items,
    Layout,
    Numbers,
    Range,
    Rule,
    Value,
    check_layouts,
    check_tensors,
    numbers,
    or_none,
    rule_of,
)
from viper.errors import StorageError, shown
from viper.formula.columns import python_value
from viper.formula.encoding import ENCODING, Encoding
from viper.inference.mixture.posterior import GaussianMixture
from viper.inference.newton import Iteration
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.posterior import Diagonal, Full, LowRank, Posterior
from viper.models.classes.storing import EACH_INVERTIBLE, STAR_FIELDS
from viper.models.facts import model_card
from viper.models.groups.storing import GROUP_FIELDS

# `_kind`, as stored in a model file -> the public name of the estimator
ESTIMATORS = {
    "logistic": "VariationalLogisticRegression",
    "ordinal": "VariationalOrdinalRegression",
    "gp": "VariationalGPClassifier",
    "mixed": "VariationalMixedRegression",
    "preference": "VariationalPreferenceGP",
    "bandit": "Bandit",
    "experiment": "Experiment",
}
WHOLE_SHARES = Range(
    "positive shares that sum to 1", lambda x: bool((x > 0).all()) and abs(float(x.sum()) - 1.0) < 1e-9
)
POSTERIOR_FIELDS: dict[Any, dict[str, Numbers]] = {  # d coefficients or inducing points
    Full: {"mean": numbers("d"), "factor": numbers("dd", range=INVERTIBLE)},
    Diagonal: {"mean": numbers("d"), "variance": numbers("d", range=POSITIVE)},
    LowRank: {
        "prior_mean": numbers("d"),
        "prior_sd": numbers("d", range=POSITIVE),
        "basis": numbers("dr", range=NORMALISED),
        "inner_mean": numbers("r"),
        "inner_factor": numbers("rr", range=INVERTIBLE),
    },
}
POSTERIOR_FIELDS |= STAR_FIELDS
POSTERIOR_FIELDS |= {  # j components
    GaussianMixture: {
        "weights": numbers("j", range=WHOLE_SHARES),
        "means": numbers("jd"),
        "factors": numbers("jdd", range=EACH_INVERTIBLE),
        "guess_offsets": numbers("j"),
        "guess_slopes": numbers("jd"),
    }
}


def up_to(size: float) -> Range:
    return Range(f"numbers of at most {size:g} in size", lambda x: bool((x.abs() <= size).all()))


# gaps are exponentials; up to this size, their products are finite
GAP_FACTOR = Range(
    "a matrix with an inverse and entries of at most 15 in size",
    lambda x: up_to(15.0).holds(x) and INVERTIBLE.holds(x),
)
ORDINAL_FIELDS: dict[Any, dict[str, Numbers]] = {  # g gaps between thresholds
    OrdinalPosterior: {
        "mean": numbers("d", range=up_to(1e50)),
        "factor": numbers("dd", range=INVERTIBLE),
        "response": numbers("dg", range=up_to(1e50)),
        "log_gaps": numbers("g", range=up_to(100.0)),
        "gap_factor": numbers("gg", range=GAP_FACTOR),
    }
}
POSTERIOR_FIELDS |= ORDINAL_FIELDS
HISTORY = Range(
    "the iterations of a solver", lambda x: x.ndim == 1 or bool((x[:, :2] >= 0).all() & x[:, :2].isfinite().all())
)
POSTERIOR_FIELDS |= GROUP_FIELDS
ENTRIES = "entries"  # marks an option that is a dictionary
IMPUTATION_FIELDS = {  # their sizes are compared with the formula's columns by `Imputation.check`
    "mean": numbers("w"),
    "covariance": numbers("ww"),
    "low": numbers("k"),
    "high": numbers("k"),
}
SCALAR_OR_NAMED = Either(SCALAR, Fields({ENTRIES: Items(Items(LABEL, 2))}))  # or one number by name, as pairs
DEVICE_NAME = re.compile(r"[a-z]{1,20}(:\d{1,3})?")  # as torch writes it
OPTION_RULES: dict[Any, Rule] = {  # by name or type; others have `rule_of` their type in the constructor
    "random_state": or_none(Value("a seed", lambda x: type(x) is int and 0 <= x < 2**32)),
    "device": or_none(Value("the name of a device", lambda x: type(x) is str and bool(DEVICE_NAME.fullmatch(x)))),
    bool: Value("true or false", lambda x: type(x) in (bool, int) and x in (0, 1)),
    "prior_mean": SCALAR_OR_NAMED,
    "prior_scale": SCALAR_OR_NAMED,
    "class_weight": SCALAR_OR_NAMED,
    Any: SCALAR,
}
ARRAY_OPTION = numbers("", "p", "ap")  # an option that is an array: p columns, or a matrix


# What regressions store of a fit, with d coefficients for p columns
REGRESSION_SCALARS: Mapping[str, Rule] = {
    "elbo_": NUMBER,
    "elbo_bound_": NUMBER,
    "kl_": NUMBER,
    "objective_": NUMBER,
    "n_iter_": WHOLE,
    "converged_": BOOLEAN,
    "status_": TEXT,
    "passes_": NUMBER,
}
REGRESSION_TENSORS: Mapping[str, Numbers] = {
    "prior.mean": numbers("d"),
    "prior.precision": numbers("d", "dd", range=DEFINITE),
    "prior_scale": numbers("p", "pp", range=DEFINITE),
    "history": numbers(f"n{len(Iteration._fields)}", "0", range=HISTORY),
}


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
    _fit_scalars: ClassVar[Mapping[str, Rule]]  # fitted attributes that are numbers, booleans or words
    _own_fields: ClassVar[Fields]  # what `_own_state` adds to the metadata
    _own_tensors: ClassVar[Mapping[str, Numbers]]  # and its tensors: p columns, d coefficients or inducing points
    _optional_tensors: ClassVar[Mapping[str, Numbers]] = {}  # those that only some models have
    _labels: ClassVar[Fields] = LABELS  # the classes
    _objects: ClassVar[tuple[str, ...]] = ()  # options that may be objects, which a file cannot hold
    # options that earlier versions did not have, with the values they imply; a file holds only other values
    _options_before: ClassVar[Mapping[str, Any]] = {"class_weight": None, "n_jobs": None}

    classes_: np.ndarray
    posterior_: Posterior
    n_features_in_: int

    def save(self, path: str | PathLike[str], overwrite: bool = False) -> None:
        """Write the fitted model to one file, which `viper.load` reads.

        The training rows are not part of it. If a kernel or mean function was given as an object, only its parameters
        are stored: pass the object again to `viper.load`.
        """
        check_is_fitted(self, "posterior_")
        state = self._pack()
        with as_storage_error("the model cannot be saved"):
            self._check_state(state)
        write_tensors(path, self._kind, *state, overwrite)

    def card(self) -> dict[str, Any]:
        """Return the model card as JSON: what was fitted, to which data, with which prior, scores and versions.

        For a model fitted by a formula, this includes the number of rows, the date, and the columns with their ranges
        or levels and shares of missing values; for one fitted by `viper fit`, also the file with its digest, and the
        scores. A model file contains all of it, but no rows.
        """
        check_is_fitted(self, "posterior_")
        return model_card(self)

    def _pack(self) -> State:
        given = {
            name: value
            for name, value in self.get_params(deep=False).items()  # type: ignore[attr-defined]
            if name not in self._options_before or not same_option(value, self._options_before[name])
        }
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
            "fit": {name: getattr(self, name) for name in self._fit_scalars} | self._reference(),
            **({"formula": self.formula_.to_state()} if hasattr(self, "formula_") else {}),
        }
        posterior = {f"posterior.{one.name}": getattr(self.posterior_, one.name) for one in fields(self.posterior_)}
        return State(tensors | posterior | own.tensors | self._imputation_tensors(), metadata)

    def _reference(self) -> dict[str, float]:
        """What new rows are compared with, where it is known."""
        farthest = self.largest_sd_  # type: ignore[attr-defined]
        return {} if math.isnan(farthest) else {"largest_sd": farthest}

    def _imputation_tensors(self) -> dict[str, Tensor]:
        """What missing="multiple" draws from: float64 arrays, whose shapes `Imputation.check` verifies."""
        imputation = getattr(getattr(self, "formula_", None), "imputation", None)
        if imputation is None:
            return {}
        return {f"imputation.{name}": torch.from_numpy(x) for name, x in imputation.arrays().items()}

    @classmethod
    def _unpack(cls, state: State, objects: dict[str, Any]) -> Self:
        """Return the estimator whose `_pack` returned this state; `objects` are the options that a file cannot hold."""
        cls._check_state(state)
        metadata = state.metadata
        arrays = {name: x.numpy() for name, x in state.part("option").items()}
        plain = {name: decode_option(value) for name, value in metadata["options"].items()}
        model = cls(**{**cls._options_before, **plain}, **arrays, **objects)
        model._check_options()
        model.classes_ = decode_labels(metadata["classes"], "classes", cls._labels)
        model.n_features_in_ = metadata["features"]
        if metadata["names"] is not None:
            model.feature_names_in_ = np.array(metadata["names"], dtype=object)  # type: ignore[attr-defined]
        model.posterior_ = posterior_shape(state.tensors)(**state.part("posterior"))
        for name in cls._fit_scalars:
            setattr(model, name, metadata["fit"][name])
        model._largest_sd = metadata["fit"].get("largest_sd")  # type: ignore[attr-defined]
        model._restore_own_state(state)
        if "formula" in metadata:
            model._restore_formula(metadata["formula"], state.part("imputation"))
        return model

    @classmethod
    def _check_state(cls, state: State) -> None:
        """Raise a StorageError unless the state obeys the rules."""
        layouts = {name: Layout(x.dtype, tuple(x.shape), 0, 0) for name, x in state.tensors.items()}
        check_tensors(cls._check_header(layouts, state.metadata), state.tensors)

    @classmethod
    def _check_header(cls, layouts: Mapping[str, Layout], metadata: dict[str, Any]) -> dict[str, Numbers]:
        """Raise unless everything but the numbers in the tensors obeys the rules; return the rules for these."""
        cls._fields().check(metadata, "")
        if metadata["names"] is not None and len(metadata["names"]) != metadata["features"]:
            raise StorageError(f"names must be {metadata['features']}; got {len(metadata['names'])}.")
        given = [*metadata["options"], *metadata.get("objects", {})]
        free = {name for name in cls._option_rules() if name not in given}
        shape = posterior_shape(layouts)
        if metadata.get("posterior", shape.__name__) != shape.__name__:
            raise StorageError(f"the posterior must be {metadata['posterior']}; got the parts of {shape.__name__}.")
        rules = {f"posterior.{name}": rule for name, rule in POSTERIOR_FIELDS[shape].items()}
        rules |= {**cls._tensor_rules(layouts, metadata)}
        if any(name.startswith("imputation.") for name in layouts):
            rules |= {f"imputation.{name}": rule for name, rule in IMPUTATION_FIELDS.items()}
        rules |= {name: rule for name, rule in cls._optional_tensors.items() if name in layouts}
        rules |= {name: ARRAY_OPTION for name in layouts if name.removeprefix("option.") in free}
        check_layouts(rules, layouts, cls._sizes(metadata), filter(cls._is_checked_later, layouts))
        return rules

    @classmethod
    def _tensor_rules(cls, names: Collection[str], metadata: dict[str, Any]) -> Mapping[str, Numbers]:
        """The rules of this estimator's own tensors, given the names of all."""
        return cls._own_tensors

    @classmethod
    def _fields(cls) -> Fields:
        """The rules of the metadata."""
        shared: dict[str, Rule] = {
            "options": Fields({}, cls._option_rules()),
            "classes": cls._labels,
            "features": Value("a whole number from 1 on", lambda x: WHOLE.holds(x) and x > 0),
            "names": or_none(Items(TEXT)),
            "fit": Fields(cls._fit_scalars, {"largest_sd": ABOVE_ZERO}),
        }
        more: dict[str, Rule] = {"formula": ENCODING}
        if cls._objects:
            more["objects"] = Fields({}, dict.fromkeys(cls._objects, TEXT))
        return Fields({**shared, **cls._own_fields.required}, {**more, **cls._own_fields.optional})

    @classmethod
    def _option_rules(cls) -> dict[str, Rule]:
        parameters = inspect.signature(cls).parameters.values()
        known = OPTION_RULES
        return {x.name: known.get(x.name) or known.get(x.annotation) or rule_of(x.annotation) for x in parameters}

    @classmethod
    def _sizes(cls, metadata: dict[str, Any]) -> dict[str, int]:
        """The sizes of tensors that the metadata determine."""
        return {"p": metadata["features"]}

    @staticmethod
    def _is_checked_later(name: str) -> bool:
        """Whether `_restore_own_state` checks this tensor."""
        return False

    def _check_options(self) -> None:
        """Raise a ValueError if an option has a wrong value."""
        raise NotImplementedError

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
    failure = f"{path} cannot be loaded"

    def check_header(kind: str, layouts: dict[str, Layout], metadata: dict[str, Any]) -> None:
        with as_storage_error(failure):
            estimator_of(kind)._check_header(layouts, metadata)

    kind, tensors, metadata = read_tensors(path, check_header)
    estimator = estimator_of(kind)
    given = estimator._required_objects(metadata, objects)
    with as_storage_error(failure):
        return estimator._unpack(State(tensors, metadata), given)


def estimator_of(kind: str) -> Any:
    if kind not in ESTIMATORS:
        raise StorageError(f"the model must be one of {sorted(ESTIMATORS)}; got {shown(kind)}. Update viper.")
    return getattr(import_module("viper"), ESTIMATORS[kind])  # the top level names the missing extra


@contextmanager
def as_storage_error(failure: str) -> Iterator[None]:
    """Turn what is wrong with a state into a StorageError of one line that begins with `failure`."""
    try:
        yield
    except ValueError as error:
        raise StorageError(f"{failure}: {' '.join(str(error).split())}") from None


def same_option(value: Any, other: Any) -> bool:
    return value is other or (isinstance(value, str | int) and bool(value == other))


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
        elif isinstance(value, dict):  # as pairs, because names may be numbers
            plain[name] = {ENTRIES: [[python_value(key), python_value(entry)] for key, entry in value.items()]}
        elif isinstance(value, list | tuple | np.ndarray | Tensor):
            arrays[f"option.{name}"] = torch.as_tensor(np.asarray(value, dtype=np.float64))
        else:
            raise TypeError(f"{name} must be a number, word or array to be saved; got {type(value).__name__}.")
    return plain, arrays


def decode_option(value: Any) -> Any:
    """Invert `encode_options` for an option that is not an array."""
    return dict(value[ENTRIES]) if isinstance(value, dict) else value


def posterior_shape(names: Iterable[str]) -> type[Posterior]:
    """Return the kind of posterior whose fields are stored."""
    parts = {name.removeprefix("posterior.") for name in names if name.startswith("posterior.")}
    for shape, rules in POSTERIOR_FIELDS.items():
        if parts == set(rules):
            return shape
    raise StorageError(f"the posterior must be full, diagonal, low-rank or a star; got parts {shown(sorted(parts))}.")
