"""E[log(1+e^X)] of a Gaussian X and E[log Σ e^{f_k}] of several: formulas, bounds and autograd."""

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
    from viper.softplus.logsumexp import ExpectedLogSumExp, expected_logsumexp

__all__ = [
    "ExpectedLogSumExp",
    "ExpectedSigmoid",
    "ExpectedSoftplus",
    "expected_logsumexp",
    "expected_sigmoid",
    "expected_softplus",
    "terms_needed",
]


def __getattr__(name: str) -> Any:
    """Load the public names, and with them torch, on first use."""
    if name in __all__:
        module = "logsumexp" if name.lower().endswith("logsumexp") else "expectation"
        return getattr(import_module(f"viper.softplus.{module}"), name)
    raise AttributeError(f"module 'viper.softplus' has no attribute {name!r}")
