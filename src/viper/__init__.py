"""viper: Bayesian classification with honest uncertainty."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from viper.softplus import ExpectedSigmoid, ExpectedSoftplus, expected_sigmoid, expected_softplus
from viper.terms import terms_needed

if TYPE_CHECKING:
    from viper.gp import VariationalGPClassifier
    from viper.logistic import VariationalLogisticRegression
    from viper.models import load
    from viper.sources import Blocks, Files
    from viper.storage import StorageError

__all__ = [
    "Blocks",
    "ExpectedSigmoid",
    "ExpectedSoftplus",
    "Files",
    "StorageError",
    "VariationalGPClassifier",
    "VariationalLogisticRegression",
    "expected_sigmoid",
    "expected_softplus",
    "load",
    "terms_needed",
]

# Loaded on first use, so that `import viper` stays light: name -> module
LATER = {
    "Blocks": "viper.sources",
    "Files": "viper.sources",
    "StorageError": "viper.storage",
    "VariationalGPClassifier": "viper.gp",
    "VariationalLogisticRegression": "viper.logistic",
    "datasets": "viper.datasets",
    "load": "viper.models",
    "reference": "viper.reference",
}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module 'viper' has no attribute {name!r}")
    module = import_module(LATER[name])
    return module if LATER[name].endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *LATER})
