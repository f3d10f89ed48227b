"""What a model file of more than two classes must hold: stars, as posterior and after `partial_fit` as prior too."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from viper.data.schema import DEFINITE, INVERTIBLE, POSITIVE, Numbers, Range, numbers
from viper.errors import StorageError, shown
from viper.inference.classes.posterior import DiagonalStar, FullStar
from viper.inference.classes.star import Star
from viper.inference.problem import Prior
from viper.models.classes.contrasts import ContrastGaussian

SHARED_NAMES, STAR_NAMES = ("prior.mean", "prior.precision"), ("prior.means", "prior.precisions")
LOADINGS = "prior.loadings"
EACH_INVERTIBLE = Range("finite matrices with an inverse", lambda x: all(map(INVERTIBLE.holds, x)))
EACH_DEFINITE = Range("positive, or positive definite matrices", lambda x: all(map(DEFINITE.holds, x)))


def is_contrast_root(x: Tensor) -> bool:
    """Whether it is finite, its sum over classes is zero, and no contrast is known exactly."""
    if not bool(x.isfinite().all()) or x.shape[2] != (len(x) - 1) * x.shape[1]:
        return False
    centred = bool(x.sum(0).abs().max() <= 1e-9 * x.abs().max())
    return centred and INVERTIBLE.holds((x[:-1] - x[-1]).flatten(0, 1))


CENTRED_ROOT = Range("a root of the covariance of contrasts", is_contrast_root)
STAR_FIELDS: dict[Any, dict[str, Numbers]] = {  # c classes, d coefficients of each
    FullStar: {"means": numbers("cd"), "factors": numbers("cdd", range=EACH_INVERTIBLE)},
    DiagonalStar: {"means": numbers("cd"), "variances": numbers("cd", range=POSITIVE)},
    ContrastGaussian: {"means": numbers("cd"), "root": numbers("cdr", range=CENTRED_ROOT)},
}
SHARED_PRIOR = {SHARED_NAMES[0]: numbers("d", "cd"), SHARED_NAMES[1]: numbers("d", "dd", range=DEFINITE)}
STAR_PRIOR = {STAR_NAMES[0]: numbers("cd"), STAR_NAMES[1]: numbers("cd", "cdd", range=EACH_DEFINITE)}


def prior_tensors(prior: Prior | Star) -> dict[str, Tensor]:
    if isinstance(prior, Star):
        return dict(zip(STAR_NAMES, (prior.mean, prior.precision), strict=True))
    given = dict(zip(SHARED_NAMES, (prior.mean, prior.precision), strict=True))
    return given if prior.loadings is None else given | {LOADINGS: prior.loadings}


def prior_from(tensors: Mapping[str, Tensor]) -> Prior | Star:
    if STAR_NAMES[0] in tensors:
        return Star(*(tensors[name] for name in STAR_NAMES))
    mean, precision = (tensors[name] for name in SHARED_NAMES)
    return Prior(mean, precision, tensors.get(LOADINGS))


def star_tensors(
    names: Collection[str], metadata: Mapping[str, Any], own: Mapping[str, Numbers]
) -> Mapping[str, Numbers]:
    """The rules for tensors outside the posterior. Raises if the posterior has another number of classes."""
    classes = len(metadata["classes"]["values"])
    star = metadata["posterior"] in {shape.__name__ for shape in STAR_FIELDS}
    if star != (classes > 2):
        raise StorageError(f"the posterior must be one of {classes} classes; got {metadata['posterior']}.")
    if not star:
        return own
    if (labels := metadata["classes"]["values"]) != sorted(labels, key=lambda label: (str(type(label)), label)):
        raise StorageError(f"classes must be sorted; got {shown(labels)}.")
    if LOADINGS in names:
        raise StorageError(f"{LOADINGS} must be that of two classes; got {classes} classes.")
    rest = {name: rule for name, rule in own.items() if name not in SHARED_NAMES}
    return {**(STAR_PRIOR if STAR_NAMES[0] in names else SHARED_PRIOR), **rest}
