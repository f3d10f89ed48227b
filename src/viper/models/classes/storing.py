"""What a model file of more than two classes must hold: stars, as posterior and after `partial_fit` as prior too."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from viper.data.schema import DEFINITE, INVERTIBLE, POSITIVE, Numbers, Range, numbers
from viper.errors import StorageError
from viper.inference.classes.posterior import DiagonalStar, FullStar
from viper.inference.classes.star import Star
from viper.inference.problem import Prior

SHARED_NAMES, STAR_NAMES = ("prior.mean", "prior.precision"), ("prior.means", "prior.precisions")
EACH_INVERTIBLE = Range("finite matrices with an inverse", lambda x: all(map(INVERTIBLE.holds, x)))
EACH_DEFINITE = Range("positive, or positive definite matrices", lambda x: all(map(DEFINITE.holds, x)))
STAR_FIELDS: dict[Any, dict[str, Numbers]] = {  # k classes, d coefficients of each
    FullStar: {"means": numbers("kd"), "factors": numbers("kdd", range=EACH_INVERTIBLE)},
    DiagonalStar: {"means": numbers("kd"), "variances": numbers("kd", range=POSITIVE)},
}
SHARED_PRIOR = {SHARED_NAMES[0]: numbers("d", "kd"), SHARED_NAMES[1]: numbers("d", "dd", range=DEFINITE)}
STAR_PRIOR = {STAR_NAMES[0]: numbers("kd"), STAR_NAMES[1]: numbers("kd", "kdd", range=EACH_DEFINITE)}


def prior_tensors(prior: Prior | Star) -> dict[str, Tensor]:
    names = STAR_NAMES if isinstance(prior, Star) else SHARED_NAMES
    return dict(zip(names, (prior.mean, prior.precision), strict=True))


def prior_from(tensors: Mapping[str, Tensor]) -> Prior | Star:
    if STAR_NAMES[0] in tensors:
        return Star(*(tensors[name] for name in STAR_NAMES))
    return Prior(*(tensors[name] for name in SHARED_NAMES))


def star_tensors(
    names: Collection[str], metadata: Mapping[str, Any], own: Mapping[str, Numbers]
) -> Mapping[str, Numbers]:
    """The rules of the tensors that are not of the posterior. Raises if the posterior is not of so many classes."""
    classes = len(metadata["classes"]["values"])
    star = metadata["posterior"] in {shape.__name__ for shape in STAR_FIELDS}
    if star != (classes > 2):
        raise StorageError(f"the posterior must be one of {classes} classes; got {metadata['posterior']}.")
    if not star:
        return own
    rest = {name: rule for name, rule in own.items() if name not in SHARED_NAMES}
    return {**(STAR_PRIOR if STAR_NAMES[0] in names else SHARED_PRIOR), **rest}
