"""Hyperparameters that all classes share, and the weights of each class's mean function, as one table."""

from typing import TYPE_CHECKING

import torch

from viper.gp.kernels import UncertainMean
from viper.gp.model import Scaler, SparseGP
from viper.gp.summary import kernel_parameters, kernel_scales, priors_in_words
from viper.inference.classes.posterior import StarPosterior

if TYPE_CHECKING:
    import pandas


def class_hyperparameter_table(
    model: SparseGP, posterior: StarPosterior, scaler: Scaler, names: list[str], labels: list[str]
) -> "pandas.DataFrame":
    """Lengthscale and relevance per column, and the centred weights of each class; the rest is in `attrs`."""
    import pandas

    frame = pandas.DataFrame(kernel_scales(model.kernel, scaler), index=names)
    frame.attrs = {
        "kernel": kernel_parameters(model.kernel),
        "priors": priors_in_words(model.kernel) | priors_in_words(model.mean),
    }
    if hasattr(model.kernel, "outputscale"):
        frame.attrs["output_scale"] = float(model.kernel.outputscale.detach())
    if not isinstance(model.mean, UncertainMean):
        return frame
    points = len(model.inducing)
    mean, sd = posterior.mean[:, points:], posterior.variance.sqrt()[:, points:]
    if model.mean.slopes:
        frame.attrs["slope_scale"] = float(model.mean.slope.detach())
        unit = frame.attrs["slope_scale"] / scaler.scale
        for k, label in enumerate(labels):
            frame[f"mean_weight ({label})"] = mean[k, :-1].numpy() * unit
            frame[f"mean_weight_sd ({label})"] = sd[k, :-1].numpy() * unit
    at_zero = model.mean.columns(torch.from_numpy(-scaler.centre / scaler.scale)[None]).detach()[0]
    frame.attrs["intercept"] = dict(zip(labels, (mean @ at_zero).tolist(), strict=True))
    return frame
