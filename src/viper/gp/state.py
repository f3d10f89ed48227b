"""A fitted Gaussian process as a table, and as tensors and JSON."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from viper.data.storage import encode_labels
from viper.errors import StorageError
from viper.gp.kernels import make_kernel, make_mean
from viper.gp.model import Scaler, SparseGP
from viper.inference.posterior import Diagonal, Full
from viper.models.state import decode_formula, decode_labels, encode_formula, encode_options

if TYPE_CHECKING:
    import pandas


def describe(model: SparseGP, scaler: Scaler, names: list[str]) -> "pandas.DataFrame":
    """Lengthscales, relevance and mean weights by column, in the units of X; in `attrs` what belongs to no column."""
    import pandas

    frame = pandas.DataFrame(index=names)
    for name, values in {**by_column(model.kernel, scaler), **mean_weights(model.mean, scaler)}.items():
        frame[name] = values
    frame.attrs = {"kernel": parameters(model.kernel), **intercept(model.mean, scaler)}
    if hasattr(model.kernel, "outputscale"):
        frame.attrs["output_scale"] = float(model.kernel.outputscale.detach())
    return frame


def by_column(kernel: Any, scaler: Scaler) -> dict[str, np.ndarray]:
    """What a kernel over all columns says of each."""
    base = getattr(kernel, "base_kernel", kernel)
    if base.active_dims is not None or kernel.active_dims is not None:
        return {}
    if getattr(base, "has_lengthscale", False) and (length := spread(base.lengthscale, scaler)) is not None:
        return {"lengthscale": length * scaler.scale, "relevance": 1.0 / length}
    if hasattr(base, "raw_variance") and (variance := spread(base.variance, scaler)) is not None:
        return {"prior_sd": np.sqrt(variance) / scaler.scale, "relevance": np.sqrt(variance)}
    return {}


def spread(parameter: Tensor, scaler: Scaler) -> np.ndarray | None:
    """One number per column, if the parameter has one for each or one for all."""
    values = parameter.detach().cpu().numpy().reshape(-1)
    return np.broadcast_to(values, scaler.scale.shape) if values.size in (1, scaler.scale.size) else None


def mean_weights(mean: Any, scaler: Scaler) -> dict[str, np.ndarray]:
    weights = getattr(mean, "weights", None)
    if weights is None or weights.numel() != scaler.scale.size:
        return {}
    return {"mean_weight": weights.detach().cpu().numpy().reshape(-1) / scaler.scale}


def intercept(mean: Any, scaler: Scaler) -> dict[str, float]:
    """Of the mean function, at x = 0 in the units of X."""
    if hasattr(mean, "constant"):
        return {"intercept": float(mean.constant.detach())}
    if weights := mean_weights(mean, scaler):
        bias = 0.0 if mean.bias is None else float(mean.bias.detach())
        return {"intercept": bias - float(weights["mean_weight"] @ scaler.centre)}
    return {}


def parameters(kernel: Any) -> dict[str, Any]:
    """All parameters of a kernel by name, on their own scale, for standardised columns."""
    named = kernel.named_parameters_and_constraints()
    return {
        name.replace("raw_", ""): (x if c is None else c.transform(x)).detach().cpu().numpy().squeeze().tolist()
        for name, x, c in named
    }


def objects(options: dict[str, Any]) -> dict[str, str]:
    """Kernel and mean that are no words: only their parameters can be stored."""
    return {name: type(options[name]).__name__ for name in ("kernel", "mean") if not isinstance(options[name], str)}


def with_objects(options: dict[str, Any], wanted: dict[str, str], given: dict[str, Any]) -> dict[str, Any]:
    """The options of a stored model with the objects that the caller gives again."""
    for name, kind in wanted.items():
        if given[name] is None:
            raise StorageError(
                f"{name} must be given again to load this model, which has its own {kind}; got none. "
                f"Call viper.load(path, {name}=...)."
            )
    return options | {name: given[name] for name in wanted}


def restore(fitted: Any, tensors: dict[str, Tensor], jitter: float, learn_inducing: bool) -> SparseGP:
    """Kernel, mean and inducing points with stored parameters; those that a warm start would learn, it still does."""
    columns = fitted.n_features_in_
    state = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
    points = torch.zeros_like(state["inducing"])
    kernel, mean = make_kernel(fitted.kernel, columns), make_mean(fitted.mean, columns)
    model = SparseGP(kernel, mean, points, learn_inducing, jitter)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise StorageError(f"kernel and mean must be those of the saved model; got {error}.") from None
    return model


def pack(fitted: Any, scalars: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A fitted estimator as tensors and JSON."""
    given = fitted.get_params(deep=False)
    own = objects(given)
    options, tensors = encode_options({name: value for name, value in given.items() if name not in own})
    tensors |= {f"posterior.{name}": x for name, x in vars(fitted.posterior_).items()}
    tensors |= {f"model.{name}": x for name, x in fitted.model_.state_dict().items()}
    tensors |= {"centre": torch.from_numpy(fitted._scaler.centre), "scale": torch.from_numpy(fitted._scaler.scale)}
    names = getattr(fitted, "feature_names_in_", None)
    return tensors, {
        "options": options,
        "objects": own,
        "classes": encode_labels(fitted.classes_),
        "features": fitted.n_features_in_,
        "names": None if names is None else [str(name) for name in names],
        "learns_inducing": fitted.model_.inducing.requires_grad,
        "starts": [list(start) for start in fitted.starts_],
        "fit": {name: getattr(fitted, name) for name in scalars},
        **encode_formula(fitted),
    }


def unpack(fitted: Any, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Set what was packed, but options and starts, as the attributes of an estimator."""
    fitted.n_features_in_ = metadata["features"]
    if metadata["names"] is not None:
        fitted.feature_names_in_ = np.array(metadata["names"], dtype=object)
    learn_inducing = bool(metadata.get("learns_inducing", fitted.learn_inducing))
    fitted.model_ = restore(fitted, tensors, metadata["fit"]["jitter_"], learn_inducing)
    parts = {name.removeprefix("posterior."): x for name, x in tensors.items() if name.startswith("posterior.")}
    fitted.posterior_ = (Full if "factor" in parts else Diagonal)(**parts)
    fitted._scaler = Scaler(tensors["centre"].numpy(), tensors["scale"].numpy())
    fitted.classes_, fitted.history_ = decode_labels(metadata["classes"]), []
    for name, value in metadata["fit"].items():
        setattr(fitted, name, value)
    decode_formula(fitted, metadata)
