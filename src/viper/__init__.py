"""viper: Bayesian classification with honest uncertainty."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from viper.gp import VariationalGPClassifier
    from viper.logistic import VariationalLogisticRegression
    from viper.models import load
    from viper.softplus import ExpectedSigmoid, ExpectedSoftplus, expected_sigmoid, expected_softplus
    from viper.sources import Blocks, Files
    from viper.storage import StorageError
    from viper.terms import terms_needed

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

# Loaded on first use, so that `import viper` and `viper --help` need no torch: name -> module
LATER = {
    "Blocks": "viper.sources",
    "ExpectedSigmoid": "viper.softplus",
    "ExpectedSoftplus": "viper.softplus",
    "Files": "viper.sources",
    "StorageError": "viper.storage",
    "VariationalGPClassifier": "viper.gp",
    "VariationalLogisticRegression": "viper.logistic",
    "datasets": "viper.datasets",
    "expected_sigmoid": "viper.softplus",
    "expected_softplus": "viper.softplus",
    "load": "viper.models",
    "plot": "viper.plot",
    "reference": "viper.reference",
    "report": "viper.report",
    "terms_needed": "viper.terms",
}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module 'viper' has no attribute {name!r}")
    try:
        module = import_module(LATER[name])
    except ModuleNotFoundError as error:
        if error.name != "gpytorch":
            raise
        raise ImportError(f"{name} needs GPyTorch. Run: pip install 'vi-per[gp]'") from error
    value = globals()[name] = module if LATER[name].endswith(f".{name}") else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *LATER})
