"""The expected softplus E[log(1+e^x)] of a Gaussian x: formulas, bounds and autograd."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from viper.softplus.expectation import (
        ExpectedSigmoid,
        ExpectedSoftplus,
        expected_sigmoid,
        expected_softplus,
        terms_needed,
    )

__all__ = ["ExpectedSigmoid", "ExpectedSoftplus", "expected_sigmoid", "expected_softplus", "terms_needed"]


def __getattr__(name: str) -> Any:
    """Load the public names, and with them torch, on first use."""
    if name in __all__:
        return getattr(import_module("viper.softplus.expectation"), name)
    raise AttributeError(f"module 'viper.softplus' has no attribute {name!r}")
