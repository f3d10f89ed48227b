"""A fitted logistic regression as tensors and JSON."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from viper.inference.newton import Iteration
from viper.inference.posterior import Diagonal, Full, LowRank
from viper.inference.rows import Prior
from viper.models.state import decode_formula, decode_labels, encode_formula, encode_labels, encode_options

FIT_SCALARS = ("elbo_", "elbo_bound_", "kl_", "objective_", "n_iter_", "converged_", "status_", "passes_")


def pack(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What storage.py writes; the training rows are not part of it."""
    options, tensors = encode_options(model.get_params(deep=False))
    tensors |= {f"posterior.{name}": x for name, x in vars(model.posterior_).items()}
    tensors |= {"prior.mean": model.prior_.mean, "prior.precision": model.prior_.precision}
    tensors |= {
        "prior_scale": torch.from_numpy(model.prior_scale_),
        "history": torch.tensor(model.history_, dtype=torch.float64),
    }
    names = getattr(model, "feature_names_in_", None)
    metadata = {
        "options": options,
        "posterior": type(model.posterior_).__name__,
        "classes": encode_labels(model.classes_),
        "features": model.n_features_in_,
        "names": None if names is None else [str(name) for name in names],
        "fit": {name: getattr(model, name) for name in FIT_SCALARS},
        **encode_formula(model),
    }
    return tensors, metadata


def unpack(model: Any, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Set the fitted attributes that were packed."""
    shape = {kind.__name__: kind for kind in (Full, Diagonal, LowRank)}[metadata["posterior"]]
    parts = {name.removeprefix("posterior."): x for name, x in tensors.items() if name.startswith("posterior.")}
    model.posterior_, model.prior_ = shape(**parts), Prior(tensors["prior.mean"], tensors["prior.precision"])
    model.prior_scale_, model.classes_ = tensors["prior_scale"].numpy(), decode_labels(metadata["classes"])
    model.n_features_in_ = metadata["features"]
    if metadata["names"] is not None:
        model.feature_names_in_ = np.array(metadata["names"], dtype=object)
    model.history_ = [Iteration(int(row[0]), bool(row[1]), *row[2:]) for row in tensors["history"].tolist()]
    for name, value in metadata["fit"].items():
        setattr(model, name, value)
    decode_formula(model, metadata)
