"""The hyperparameters of a fitted Gaussian process as a table, in the units of X."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from viper.gp.additive import AdditiveKernel
from viper.gp.kernels import UncertainMean
from viper.gp.model import Scaler, SparseGP
from viper.inference.posterior import Posterior

if TYPE_CHECKING:
    import pandas


def hyperparameter_table(model: SparseGP, posterior: Posterior, scaler: Scaler, names: list[str]) -> "pandas.DataFrame":
    """Lengthscale, relevance and mean weight per column; the rest is in `attrs`."""
    import pandas

    frame = pandas.DataFrame(index=names)
    weights = uncertain_weights(model, posterior, scaler) or mean_weights(model.mean, scaler)
    for name, values in {**kernel_scales(model.kernel, scaler), **weights}.items():
        frame[name] = values
    frame.attrs = {
        "kernel": kernel_parameters(model.kernel),
        "priors": priors_in_words(model.kernel) | priors_in_words(model.mean),
    }
    if isinstance(model.kernel, AdditiveKernel):
        frame.attrs["output_scale"] = float(model.kernel.outputscales.sum().detach())
    if hasattr(model.kernel, "outputscale"):
        frame.attrs["output_scale"] = float(model.kernel.outputscale.detach())
    if isinstance(model.mean, UncertainMean) and model.mean.slopes:
        frame.attrs["slope_scale"] = float(model.mean.slope.detach())
    frame.attrs |= level(model, posterior, scaler)
    return frame


def uncertain_weights(model: SparseGP, posterior: Posterior, scaler: Scaler) -> dict[str, np.ndarray]:
    """Posterior mean and standard deviation of the weights of the mean function, in the units of X."""
    if not isinstance(model.mean, UncertainMean) or not model.mean.slopes:
        return {}
    own = slice(len(model.inducing), -1)
    unit = float(model.mean.slope.detach()) / scaler.scale
    sd = posterior.variance.sqrt()
    return {"mean_weight": posterior.mean[own].numpy() * unit, "mean_weight_sd": sd[own].numpy() * unit}


def kernel_scales(kernel: Any, scaler: Scaler) -> dict[str, np.ndarray]:
    """Scales by column, if the kernel acts on all columns; otherwise none."""
    if isinstance(kernel, AdditiveKernel):
        count = len(scaler.scale)
        own, s = (x.detach().cpu().numpy()[:count] for x in (kernel.lengthscales, kernel.outputscales))
        # the slope of a term has the prior variance s/ℓ²
        return {"lengthscale": own * scaler.scale, "term_sd": np.sqrt(s), "relevance": np.sqrt(s) / own}
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


def level(model: SparseGP, posterior: Posterior, scaler: Scaler) -> dict[str, float]:
    """The value of the mean function at x = 0 in the units of X, if it is known."""
    mean = model.mean
    if isinstance(mean, UncertainMean):
        own, x = posterior.mean[len(model.inducing) :], torch.from_numpy(-scaler.centre / scaler.scale)
        return {"intercept": float(mean.columns(x[None]).detach()[0] @ own)}
    if hasattr(mean, "constant"):
        return {"intercept": float(mean.constant.detach())}
    if weights := mean_weights(mean, scaler):
        bias = 0.0 if mean.bias is None else float(mean.bias.detach())
        return {"intercept": bias - float(weights["mean_weight"] @ scaler.centre)}
    return {}


def priors_in_words(module: Any) -> dict[str, str]:
    """The priors of a kernel or mean function, by name; for scales, the median on standardised columns."""
    if not hasattr(module, "named_priors"):
        return {}
    found: dict[str, str] = {}
    for name, _, prior, _, _ in module.named_priors():
        short = name.rpartition(".")[2].removesuffix("_prior")
        if short.startswith("log_"):
            median, spread = math.exp(float(prior.loc)), float(prior.scale)
            found[short.removeprefix("log_")] = f"log-normal, median {median:.3g}, log-sd {spread:.3g}"
        else:
            found[short] = repr(prior)
    return found


def kernel_parameters(kernel: Any) -> dict[str, Any]:
    """All parameters of a kernel by name, transformed by their constraints, for standardised columns."""
    named = kernel.named_parameters_and_constraints()
    return {
        name.replace("raw_", ""): (x if c is None else c.transform(x)).detach().cpu().numpy().squeeze().tolist()
        for name, x, c in named
    }
