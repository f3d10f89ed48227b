"""A bandit as tensors and JSON, for its file: what `Bandit.save` writes and `viper.load` reads."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.data.schema import (
    ABOVE_ZERO,
    LABEL,
    WHOLE,
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
    one_of,
    or_none,
)
from viper.decisions.arms import ArmPosterior
from viper.decisions.outcomes import ARM, COLUMNS, PRECISION, WEIGHT
from viper.decisions.weights import MODELS, POLICIES, Weights, weights_given
from viper.errors import StorageError
from viper.inference.groups.arrow import Arrow, Split
from viper.models.saving import State

KIND = "bandit"
REFRESHES = ("doublings", "never")
COUNTS = ("_next_id", "_time", "_forgotten", "_refreshed")
LONG_NUMBER = Value("digits", lambda x: type(x) is str and x.isascii() and x.isdigit() and len(x) <= 64)
OPTIONS = Fields(
    {
        "policy": one_of(*POLICIES),
        "model": one_of(*MODELS),
        "prior_scale": ABOVE_ZERO,
        "intercept_scale": ABOVE_ZERO,
        "spread": ABOVE_ZERO,
        "epsilon": between(0.0, 1.0),
        "memory": WHOLE,
        "forget": between(0.0, 1.0),
        "refresh": one_of(*REFRESHES),
    }
)
METADATA = Fields(
    {
        "options": OPTIONS,
        "arms": Items(LABEL),
        "known_arms": Items(LABEL),
        "columns": or_none(Fields({"features": WHOLE, "context": WHOLE})),
        "counts": Fields(dict.fromkeys(COUNTS, WHOLE)),
        "generator": Fields({"state": LONG_NUMBER, "inc": LONG_NUMBER, "has_uint32": WHOLE, "uinteger": WHOLE}),
    }
)


KEPT_OUTCOMES = Range(
    "outcomes with weights from 0 to 1 and precisions from 0 on",
    lambda x: bool(x.isfinite().all() and (x[:, [WEIGHT, PRECISION]] >= 0).all() and (x[:, WEIGHT] <= 1).all()),
)
OPEN_FIELDS = 3  # numbers of an open choice beside its vector
BANDIT_TENSORS = {  # s shared weights, a arms of w own ones, b tables of o outcomes, p open choices
    "mean": numbers("s"),
    "covariance": numbers("ss"),
    "own_mean": numbers("aw"),
    "slope": numbers("aws"),
    "own_covariance": numbers("aww"),
    "base_border": numbers("ss"),
    "base_cross": numbers("aws"),
    "base_blocks": numbers("aww"),
    "base_shift_border": numbers("s"),
    "base_shift_groups": numbers("aw"),
    "next": numbers("b"),
    "played": numbers("oc", range=KEPT_OUTCOMES),
    "open": numbers("pd"),
}


class Pending(NamedTuple):
    """A choice that awaits its reward."""

    arm: int
    vector: np.ndarray
    propensity: float


def pack_bandit(agent: Any) -> State:
    bits = agent._generator.bit_generator.state
    if bits["bit_generator"] != "PCG64":
        raise StorageError(
            f"random_state must be a seed or a PCG64 generator to be saved; got {bits['bit_generator']}."
        )
    weights = agent._weights
    metadata = {
        "options": {
            "policy": agent.policy.name,
            "model": agent.model,
            "prior_scale": agent.scales.prior,
            "intercept_scale": agent.scales.intercept,
            "spread": agent.policy.spread,
            "epsilon": agent.policy.epsilon,
            "memory": agent.memory,
            "forget": agent.forget,
            "refresh": agent.refreshing,
        },
        "arms": list(agent.arms),
        "known_arms": list(agent._number),
        "columns": None if weights is None else {"features": weights.features, "context": weights.context},
        "counts": {name: getattr(agent, name) for name in COUNTS},
        "generator": {name: str(bits["state"][name]) for name in ("state", "inc")}
        | {name: int(bits[name]) for name in ("has_uint32", "uinteger")},
    }
    return State({} if weights is None else pack_weights(weights, agent._pending), metadata)


def pack_weights(weights: Weights, pending: dict[int, Pending]) -> dict[str, Tensor]:
    tables = [outcomes for outcomes in weights.outcomes.values() if outcomes.count]
    played = [np.empty((0, COLUMNS + weights.width))]
    played += [np.concatenate([outcomes.table, outcomes.vectors], 1) for outcomes in tables]
    waiting = [[number, one.arm, one.propensity, *one.vector] for number, one in pending.items()]
    arrays = {
        **weights.posterior._asdict(),
        **{f"base_{name}": part for name, part in weights.base._asdict().items()},
        **{f"base_shift_{name}": part for name, part in weights.base_shift._asdict().items()},
        "next": np.array([outcomes.next for outcomes in tables], dtype=float),
        "played": np.concatenate(played),
        "open": np.array(waiting, dtype=float).reshape(len(waiting), OPEN_FIELDS + weights.width),
    }
    return {name: stored(x) for name, x in arrays.items()}


def unpack_bandit(cls: Any, state: State) -> Any:
    """The bandit whose `pack_bandit` returned this state."""
    layouts = {name: Layout(x.dtype, tuple(x.shape), 0, 0) for name, x in state.tensors.items()}
    check_tensors(check_header(layouts, state.metadata), state.tensors)
    metadata, counts = state.metadata, state.metadata["counts"]
    agent = cls(metadata["known_arms"], **metadata["options"])
    for arm in [arm for arm in metadata["known_arms"] if arm not in metadata["arms"]]:
        agent.retire_arm(arm)
    agent.arms = list(metadata["arms"])
    agent._allowed = np.array([agent._number[arm] for arm in agent.arms], dtype=np.intp)
    for name in COUNTS:
        setattr(agent, name, counts[name])
    bits = agent._generator.bit_generator
    given = metadata["generator"]
    bits.state = {
        "bit_generator": "PCG64",
        "state": {name: int(given[name]) for name in ("state", "inc")},
        "has_uint32": given["has_uint32"],
        "uinteger": given["uinteger"],
    }
    if metadata["columns"] is not None:
        arrays = {name: x.numpy().copy() for name, x in state.tensors.items()}
        agent._weights = unpack_weights(agent, metadata["columns"], arrays)
        agent._pending = {
            int(row[0]): Pending(arm_number(row[1], agent), row[OPEN_FIELDS:], float(row[2])) for row in arrays["open"]
        }
    return agent


def unpack_weights(agent: Any, columns: dict[str, int], arrays: dict[str, np.ndarray]) -> Weights:
    weights = Weights(agent.model, agent.scales, len(agent._number), columns["features"], columns["context"])
    for name, like in weights.posterior._asdict().items():
        if arrays[name].shape != like.shape:
            raise StorageError(f"{name} must have shape {like.shape}; got {arrays[name].shape}.")
    weights.base = Arrow(*(arrays[f"base_{name}"] for name in Arrow._fields))
    weights.base_shift = Split(*(arrays[f"base_shift_{name}"] for name in Split._fields))
    try:
        weights_given(weights.base, weights.base_shift)
    except np.linalg.LinAlgError:
        raise StorageError("the base must have a positive definite precision; got another.") from None
    weights.set(ArmPosterior(*(arrays[name] for name in ArmPosterior._fields)))
    for row in arrays["played"]:
        weights.keep(arm_number(row[ARM], agent), row[:COLUMNS], row[COLUMNS:])
    if len(weights.outcomes) != len(arrays["next"]):
        raise StorageError(f"there must be {len(weights.outcomes)} next outcomes; got {len(arrays['next'])}.")
    for outcomes, following in zip(weights.outcomes.values(), arrays["next"].tolist(), strict=True):
        outcomes.next = int(following)
        if not 0 <= outcomes.next < outcomes.count:
            raise StorageError(f"the next outcome must be one of {outcomes.count}; got {following:g}.")
    return weights


def arm_number(value: float, agent: Any) -> int:
    if not 0 <= value < len(agent._number) or value != int(value):
        raise StorageError(f"an arm's number must be below {len(agent._number)}; got {value:g}.")
    return int(value)


def check_header(layouts: Mapping[str, Layout], metadata: dict[str, Any]) -> dict[str, Numbers]:
    """Raise a StorageError unless names, sizes and metadata are as they must be; return the rules for the numbers."""
    METADATA.check(metadata, "")
    known, arms, columns = metadata["known_arms"], metadata["arms"], metadata["columns"]
    if not arms or len(set(known)) != len(known) or len(set(arms)) != len(arms) or not set(arms) <= set(known):
        raise StorageError("arms must be at least one, all different and known; got others.")
    if columns is None:
        check_layouts({}, layouts, {})
        return {}
    width = columns["features"] + columns["context"] + 1
    check_layouts(BANDIT_TENSORS, layouts, {"c": COLUMNS + width, "d": OPEN_FIELDS + width})
    return BANDIT_TENSORS


def stored(x: np.ndarray) -> Tensor:
    """A copy, which stays as it is while other threads go on."""
    return torch.from_numpy(np.array(x, dtype=np.float64, order="C"))
