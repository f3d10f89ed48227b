"""viper: Bayesian classification with honest uncertainty."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from viper import nn
    from viper.data.blocks import Blocks
    from viper.data.files import Files
    from viper.decisions import acquisition
    from viper.decisions.bandit import Bandit
    from viper.decisions.experiment import Experiment
    from viper.errors import StorageError
    from viper.gp import likelihood as gpytorch
    from viper.gp.classifier import VariationalGPClassifier
    from viper.gp.pairs.preference import VariationalPreferenceGP
    from viper.models import reference
    from viper.models.groups.mixed import VariationalMixedRegression
    from viper.models.logistic import VariationalLogisticRegression
    from viper.models.ordinal.regression import VariationalOrdinalRegression
    from viper.models.saving import load
    from viper.report import metrics, plot
    from viper.softplus import (
        ExpectedLogSumExp,
        ExpectedSigmoid,
        ExpectedSoftplus,
        expected_logsumexp,
        expected_sigmoid,
        expected_softplus,
        terms_needed,
    )

__all__ = [
    "Bandit",
    "Blocks",
    "ExpectedLogSumExp",
    "ExpectedSigmoid",
    "ExpectedSoftplus",
    "Experiment",
    "Files",
    "StorageError",
    "VariationalGPClassifier",
    "VariationalLogisticRegression",
    "VariationalMixedRegression",
    "VariationalOrdinalRegression",
    "VariationalPreferenceGP",
    "acquisition",
    "datasets",
    "decisions",
    "expected_logsumexp",
    "expected_sigmoid",
    "expected_softplus",
    "gpytorch",
    "load",
    "metrics",
    "nn",
    "plot",
    "reference",
    "report",
    "terms_needed",
]

# Loaded on first use, so that `import viper` and `viper --help` need no torch: name -> the module that defines it
NAMES = {
    "Bandit": "viper.decisions.bandit",
    "Blocks": "viper.data.blocks",
    "Experiment": "viper.decisions.experiment",
    "ExpectedLogSumExp": "viper.softplus.logsumexp",
    "ExpectedSigmoid": "viper.softplus.expectation",
    "ExpectedSoftplus": "viper.softplus.expectation",
    "Files": "viper.data.files",
    "StorageError": "viper.errors",
    "VariationalGPClassifier": "viper.gp.classifier",
    "VariationalLogisticRegression": "viper.models.logistic",
    "VariationalOrdinalRegression": "viper.models.ordinal.regression",
    "VariationalMixedRegression": "viper.models.groups.mixed",
    "VariationalPreferenceGP": "viper.gp.pairs.preference",
    "expected_logsumexp": "viper.softplus.logsumexp",
    "expected_sigmoid": "viper.softplus.expectation",
    "expected_softplus": "viper.softplus.expectation",
    "load": "viper.models.saving",
    "terms_needed": "viper.softplus.expectation",
}
# Public modules: the name users type -> where it lives
MODULES = {
    "viper.acquisition": "viper.decisions.acquisition",
    "viper.datasets": "viper.datasets",
    "viper.decisions": "viper.decisions",
    "viper.gpytorch": "viper.gp.likelihood",
    "viper.metrics": "viper.report.metrics",
    "viper.nn": "viper.nn",
    "viper.plot": "viper.report.plot",
    "viper.reference": "viper.models.reference",
    "viper.report": "viper.report",
}


class PublicModules(MetaPathFinder, Loader):
    """Makes `import viper.plot` find viper.report.plot, and likewise every entry of MODULES."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if MODULES.get(name, name) != name else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_or_explain(MODULES[spec.name], spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the module has already run under its real name; only restore its spec, which the import system replaced
        module.__spec__ = module.__spec__.loader_state if module.__spec__ else None


sys.meta_path.append(PublicModules())


def import_or_explain(module: str, wanted: str) -> ModuleType:
    """Import a module; if GPyTorch is missing, say that `wanted` needs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "gpytorch":
            raise
        raise ImportError(f"{wanted} needs GPyTorch. Run: pip install 'vi-per[gp]'") from error


def __getattr__(name: str) -> Any:
    if f"viper.{name}" in MODULES:
        return import_module(f"viper.{name}")
    if name in NAMES:
        value = globals()[name] = getattr(import_or_explain(NAMES[name], name), name)
        return value
    raise AttributeError(f"module 'viper' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
