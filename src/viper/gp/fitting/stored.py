"""How a file keeps the components of a Gaussian process, and what is checked when it is read."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from viper.data.schema import Layout, Value, check_layouts, check_tensors, is_number
from viper.errors import StorageError, shown
from viper.gp.average import Component
from viper.gp.fitting.choices import Choices
from viper.gp.kernels import check_loaded
from viper.gp.model import SparseGP
from viper.gp.search import Family, Start
from viper.models.saving import POSTERIOR_FIELDS, State, posterior_shape


def is_start(value: Any) -> bool:
    """Whether a JSON value is a `Start` as a list."""
    if type(value) is not list or len(value) != len(Start._fields) or type(value[0]) is not str:
        return False
    return all(is_number(x) for x in value[1:]) and type(value[2]) is int


def is_family(value: Any) -> bool:
    """Whether a JSON value is a `Family` as a list."""
    return type(value) is list and len(value) == 2 and type(value[0]) is str and type(value[1]) is bool


def is_component(value: Any) -> bool:
    """Whether a JSON value is the weight and the `Family` of a component as a list."""
    return (
        type(value) is list and bool(value) and is_number(value[0]) and 0.0 < value[0] <= 1.0 and is_family(value[1:])
    )


START = Value("a start: a name and three numbers", is_start)
FAMILY = Value("a kernel and whether it has many lengthscales", is_family)
COMPONENT = Value("a weight, a kernel and whether it has many lengthscales", is_component)


def component_state(components: list[Component]) -> State:
    """All components but the first, which the estimator stores as its own, and the weights of all."""
    if len(components) == 1:
        return State({}, {})
    tensors: dict[str, Tensor] = {}
    for k, component in enumerate(components[1:], start=1):
        tensors |= {f"component.{k}.model.{name}": x for name, x in component.model.state_dict().items()}
        parts = {one.name: getattr(component.posterior, one.name) for one in fields(component.posterior)}
        tensors |= {f"component.{k}.posterior.{name}": x for name, x in parts.items()}
    return State(tensors, {"components": [[component.weight, *component.family] for component in components]})


def read_components(
    state: State, first: Component, choices: Choices, jitter: float, sizes: dict[str, int]
) -> list[Component]:
    """All components of a file; of the first, only the weight is read here."""
    found = [first]
    stored = state.metadata.get("components", [])
    numbers_of = {name.split(".")[1] for name in state.tensors if name.startswith("component.")}
    if numbers_of != {str(k) for k in range(1, len(stored))}:
        raise StorageError(f"the file must have {len(stored)} components; got parts of {shown(sorted(numbers_of))}.")
    for k, (weight, *family) in enumerate(stored[1:], start=1):
        part = State(state.part(f"component.{k}"), {})
        shape = posterior_shape(part.tensors)
        posterior_part = part.part("posterior")
        layouts = {name: Layout(x.dtype, tuple(x.shape), 0, 0) for name, x in posterior_part.items()}
        if shape is not type(first.posterior):
            raise StorageError(f"all components must be of one kind; got {shape.__name__} after the first.")
        check_layouts(POSTERIOR_FIELDS[shape], layouts, dict(sizes))
        check_tensors(POSTERIOR_FIELDS[shape], posterior_part)
        posterior = shape(**posterior_part)
        model = read_model(part.part("model"), choices, Family(*family), False, jitter, posterior)
        found.append(Component(weight, Family(*family), model, posterior))
    return [found[0]._replace(weight=stored[0][0]), *found[1:]] if stored else found


def read_model(
    parameters: dict[str, Tensor], choices: Choices, family: Family, learn_inducing: bool, jitter: float, posterior: Any
) -> SparseGP:
    """Kernel, mean and inducing points with stored parameters, for predictions and warm starts."""
    if "inducing" not in parameters:
        raise StorageError("the file must have inducing points of every component; got none for one of them.")
    points = torch.zeros_like(parameters["inducing"])
    model = SparseGP(*choices.kernel_and_mean(family), points, learn_inducing, jitter)
    expected, found = (
        {name: (list(x.shape), str(x.dtype)) for name, x in parts.items()} for parts in (model.state_dict(), parameters)
    )
    if expected != found:
        name = min(name for name in {*expected, *found} if expected.get(name) != found.get(name))
        got = f"{expected.get(name)} for {found.get(name)} as {shown(name)}"
        raise StorageError(f"kernel and mean must be those of the saved model; got {got}.")
    model.load_state_dict(parameters)
    check_loaded(model)
    if model.dimension != posterior.mean.shape[-1] or model.inducing.shape[1] != choices.columns:
        raise StorageError(f"the posterior must have {model.dimension} entries; got {posterior.mean.shape[-1]}.")
    return model
