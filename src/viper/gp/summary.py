"""The hyperparameters of a fitted Gaussian process as a table, in the units of X."""

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from viper.gp.model import Scaler, SparseGP

if TYPE_CHECKING:
    import pandas


def hyperparameter_table(model: SparseGP, scaler: Scaler, names: list[str]) -> "pandas.DataFrame":
    """Lengthscale, relevance and mean weight per column; everything that does not belong to a column is in `attrs`."""
    import pandas

    frame = pandas.DataFrame(index=names)
    for name, values in {**kernel_scales(model.kernel, scaler), **mean_weights(model.mean, scaler)}.items():
        frame[name] = values
    frame.attrs = {"kernel": kernel_parameters(model.kernel), **mean_intercept(model.mean, scaler)}
    if hasattr(model.kernel, "outputscale"):
        frame.attrs["output_scale"] = float(model.kernel.outputscale.detach())
    return frame


def kernel_scales(kernel: Any, scaler: Scaler) -> dict[str, np.ndarray]:
    """The scales of a kernel over all columns, for each column; none for other kernels."""
    base = getattr(kernel, "base_kernel", kernel)
    if base.active_dims is not None or kernel.active_dims is not None:
        return {}
    if getattr(base, "has_lengthscale", False) and (length := per_column(base.lengthscale, scaler)) is not None:
        return {"lengthscale": length * scaler.scale, "relevance": 1.0 / length}
    if hasattr(base, "raw_variance") and (variance := per_column(base.variance, scaler)) is not None:
        return {"prior_sd": np.sqrt(variance) / scaler.scale, "relevance": np.sqrt(variance)}
    return {}


def per_column(parameter: Tensor, scaler: Scaler) -> np.ndarray | None:
    """One number per column, if the parameter has one for each column or one for all; otherwise None."""
    values = parameter.detach().cpu().numpy().reshape(-1)
    return np.broadcast_to(values, scaler.scale.shape) if values.size in (1, scaler.scale.size) else None


def mean_weights(mean: Any, scaler: Scaler) -> dict[str, np.ndarray]:
    weights = getattr(mean, "weights", None)
    if weights is None or weights.numel() != scaler.scale.size:
        return {}
    return {"mean_weight": weights.detach().cpu().numpy().reshape(-1) / scaler.scale}


def mean_intercept(mean: Any, scaler: Scaler) -> dict[str, float]:
    """The value of the mean function at x = 0 in the units of X, if it is known."""
    if hasattr(mean, "constant"):
        return {"intercept": float(mean.constant.detach())}
    if weights := mean_weights(mean, scaler):
        bias = 0.0 if mean.bias is None else float(mean.bias.detach())
        return {"intercept": bias - float(weights["mean_weight"] @ scaler.centre)}
    return {}


def kernel_parameters(kernel: Any) -> dict[str, Any]:
    """All parameters of a kernel by name, on their own scale, for standardised columns."""
    named = kernel.named_parameters_and_constraints()
    return {
        name.replace("raw_", ""): (x if c is None else c.transform(x)).detach().cpu().numpy().squeeze().tolist()
        for name, x, c in named
    }
