"""An experiment as tensors and JSON, for its file: inputs, options, answers and open questions.

Models are not stored: they are a function of the answers, and are fitted again when needed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.data.schema import (
    ABOVE_ZERO,
    BOOLEAN,
    LABEL,
    NUMBER,
    TEXT,
    WHOLE,
    Either,
    Fields,
    Items,
    Layout,
    Numbers,
    Range,
    Value,
    between,
    check_layouts,
    check_tensors,
    numbers,
    or_none,
)
from viper.decisions.inputs import ChoiceInput, Inputs, Linear, NumberInput
from viper.decisions.preferences import ANSWERS
from viper.errors import StorageError, shown
from viper.models.saving import State

EXPERIMENT = "experiment"
EXPERIMENT_OPTIONS = Fields(
    {
        "goal": TEXT,
        "outcome": TEXT,
        "acquisition": TEXT,
        "threshold": between(0.0, 1.0),
        "initial": WHOLE,
        "stop": or_none(ABOVE_ZERO),
        "random_state": WHOLE,
    }
)
IS_CHOICE = Value("choices", lambda x: type(x) is dict and set(x) == {"values"} and type(x["values"]) is list)
INPUT_FIELDS = Either(IS_CHOICE, Fields({"low": NUMBER, "high": NUMBER, "integer": BOOLEAN, "log": BOOLEAN}))
LINEAR_FIELDS = Fields({"weights": Items(NUMBER), "most": NUMBER})
EXPERIMENT_METADATA = Fields(
    {
        "options": EXPERIMENT_OPTIONS,
        "names": or_none(Items(TEXT)),
        "inputs": Items(INPUT_FIELDS),
        "constraints": Items(or_none(LINEAR_FIELDS)),  # null for a function
        "asked": WHOLE,
    }
)
ANY_NUMBER = Range("finite, or NaN for a run that failed", lambda x: not bool(x.isinf().any()))
EXPERIMENT_TENSORS: dict[str, Numbers] = {
    "x": numbers("nd"),
    "y": numbers("n", range=ANY_NUMBER),
    "pending": numbers("kd"),
}


def pack_experiment(experiment: Any) -> State:
    inputs = experiment.items
    metadata = {
        "options": {
            "goal": experiment.goal,
            "outcome": experiment.outcome,
            "acquisition": experiment.acquisition,
            "threshold": experiment.threshold,
            "initial": experiment.initial,
            "stop": experiment.stop,
            "random_state": experiment.random_state,
        },
        "names": inputs.names,
        "inputs": [
            {"values": list(part.values)} if isinstance(part, ChoiceInput) else part._asdict() for part in inputs.parts
        ],
        "constraints": [
            {"weights": list(one.weights), "most": one.most} if isinstance(one, Linear) else None
            for one in inputs.constraints
        ],
        "asked": experiment._asked,
    }
    arrays = {"x": experiment._x, "y": experiment._y, "pending": experiment._pending}
    return State({name: stored_copy(x) for name, x in arrays.items()}, metadata)


def stored_copy(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(x, dtype=np.float64))


def required_functions(metadata: dict[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
    """The constraints that are functions, which the file does not hold."""
    if strange := [name for name in objects if name != "constraints"]:
        raise TypeError(f"an experiment is loaded with constraints or nothing; got {shown(strange[0])}.")
    given = objects.get("constraints", ())
    functions = [one for one in (given if isinstance(given, list | tuple) else [given]) if callable(one)]
    wanted = sum(one is None for one in metadata["constraints"])
    if len(functions) != wanted:
        raise TypeError(
            f"constraints must have as many functions as this experiment, {wanted}; got {len(functions)}. Pass them to "
            "load, in their order."
        )
    return {"constraints": functions}


def unpack_experiment(cls: Any, state: State, objects: dict[str, Any]) -> Any:
    """The experiment whose `pack_experiment` returned this state."""
    metadata = state.metadata
    layouts = {name: Layout(x.dtype, tuple(x.shape), 0, 0) for name, x in state.tensors.items()}
    check_tensors(check_experiment(layouts, metadata), state.tensors)
    functions = list(objects["constraints"])
    constraints = [
        functions.pop(0) if one is None else Linear(tuple(one["weights"]), one["most"])
        for one in metadata["constraints"]
    ]
    options = dict(metadata["options"])
    if options["goal"] != "threshold":
        del options["threshold"]  # which nothing uses; files hold it for every goal
    experiment = cls(stored_bounds(metadata), constraints=constraints, **options)
    tensors = {name: x.numpy().copy() for name, x in state.tensors.items()}
    experiment._x, experiment._y, experiment._pending = (tensors[name] for name in ("x", "y", "pending"))
    check_points(experiment.inputs, experiment._x, experiment._pending)
    known = tuple(ANSWERS.values()) if experiment.goal == "prefer" else (0.0, 1.0)
    if experiment.outcome == "binary" and not np.isin(experiment._y, known).all():
        raise StorageError(f"answers must be one of {known}; got others.")
    experiment._asked = metadata["asked"]
    return experiment


def stored_bounds(metadata: dict[str, Any]) -> Any:
    parts = [ChoiceInput(tuple(one["values"])) if "values" in one else NumberInput(**one) for one in metadata["inputs"]]
    return parts if metadata["names"] is None else dict(zip(metadata["names"], parts, strict=True))


def check_points(inputs: Inputs, *points: np.ndarray) -> None:
    """Raise a StorageError unless the numbers of all points are those of the inputs."""
    for numbers_ in points:
        for j, part in enumerate(inputs.parts):
            x = numbers_[:, j]
            whole = isinstance(part, ChoiceInput) or part.integer
            low, high = (0, len(part.values) - 1) if isinstance(part, ChoiceInput) else (part.low, part.high)
            if not ((x >= low) & (x <= high)).all() or (whole and (x != np.rint(x)).any()):
                raise StorageError(f"points must lie within the bounds of {inputs.labels[j]}; got others.")


def check_experiment(layouts: Mapping[str, Layout], metadata: dict[str, Any]) -> dict[str, Numbers]:
    """Raise a StorageError unless names, sizes and metadata are as they must be; return the rules for the numbers."""
    EXPERIMENT_METADATA.check(metadata, "")
    names, inputs = metadata["names"], metadata["inputs"]
    for one in inputs:
        if "values" in one:
            Items(LABEL).check(one["values"], "choices")
            if len(one["values"]) < 2 or len(set(one["values"])) < len(one["values"]):
                raise StorageError("choices must be two or more, all different; got others.")
        elif not one["low"] < one["high"] or (one["log"] and one["low"] <= 0):
            raise StorageError(f"bounds must have the lower first, and be positive for a log scale; got {shown(one)}.")
    if not inputs or (names is not None and (len(names) != len(inputs) or len(set(names)) < len(names))):
        raise StorageError("inputs must be at least one, each with a name of its own; got others.")
    for one in metadata["constraints"]:
        if one is not None and len(one["weights"]) != len(inputs):
            raise StorageError(f"a constraint must have {len(inputs)} weights; got {len(one['weights'])}.")
    check_layouts(
        EXPERIMENT_TENSORS, layouts, {"d": len(inputs) * (2 if metadata["options"]["goal"] == "prefer" else 1)}
    )
    return EXPERIMENT_TENSORS
