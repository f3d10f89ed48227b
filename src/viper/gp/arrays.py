"""Kernel and mean function as NumPy arrays, with the way back to the gradients of their parameters.

Scaled stationary kernels are differentiated in closed form, all others by autograd.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.gp.kernels import SHAPES, Shape, covariance, variances
from viper.gp.model import SparseGP, pull_back


class Kernels(NamedTuple):
    """What kernel and mean function say at one θ, and how their gradients go on to the parameters."""

    cross: np.ndarray  # K_xz
    among: np.ndarray  # K_zz
    variance: np.ndarray  # diag K_xx
    mean: np.ndarray
    pull: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


def by_autograd(model: SparseGP, inputs: Tensor) -> Kernels:
    """Any kernel."""
    kernel, z = model.kernel, model.inducing
    with torch.enable_grad():
        made = covariance(kernel, inputs, z), covariance(kernel, z, z), variances(kernel, inputs), model.mean(inputs)

    def pull(*slopes: np.ndarray) -> None:
        pull_back(made, tuple(map(torch.from_numpy, slopes)))

    cross, among, variance, mean = (x.detach().numpy() for x in made)
    return Kernels(cross, among, variance, mean, pull)


def in_closed_form(model: SparseGP, shape: Shape, inputs: Tensor, squares: np.ndarray) -> Kernels:
    """s φ(r²), r² = Σ_j (x_j - z_j)²/ℓ_j²."""
    on_arrays = SHAPES[shape]
    with torch.enable_grad():
        lengthscale, scale, mean = model.kernel.base_kernel.lengthscale, model.kernel.outputscale, model.mean(inputs)
    ell, s = lengthscale.detach().numpy().reshape(-1), float(scale.detach())
    z = model.inducing.detach().numpy()
    u, v = inputs.numpy() / ell, z / ell
    norms = np.square(v).sum(1)
    rate = np.broadcast_to(ell**-2, squares.shape[1:])
    value, decay = on_arrays(distances(u, v, squares @ rate, norms))
    value_z, decay_z = on_arrays(distances(v, v, norms, norms))

    def pull(to_cross: np.ndarray, to_among: np.ndarray, to_variance: np.ndarray, to_mean: np.ndarray) -> None:
        to_scale = float(to_variance.sum())
        to_z, to_rate = np.zeros_like(z), np.zeros(len(rate))
        parts = (u, 1.0, to_cross, value, decay), (v, 2.0, to_among, value_z, decay_z)
        for a, times, slope, phi, down in parts:
            # W = -2 s φ'(r²) ∂/∂K, so that the differential is -½ Σ W d(r²)
            weight = slope * down
            to_scale += float(weight.sum() if down is phi else np.vdot(slope, phi))
            rows, columns, pulled = weight.sum(1), weight.sum(0), weight.T @ a
            to_z += times * (pulled - columns[:, None] * v)  # K_zz and its slope are symmetric
            to_rate += rows @ np.square(a) + columns @ np.square(v) - 2.0 * (pulled * v).sum(0)
        to_length = s * to_rate / ell
        if len(ell) == 1:
            to_length = to_length.sum(keepdims=True)
        if model.inducing.requires_grad:
            model.inducing.grad = torch.from_numpy(s * to_z / ell)
        made, slopes = (lengthscale, scale, mean), (to_length, np.array(to_scale), to_mean)
        pull_back(made, tuple(torch.from_numpy(to).reshape(x.shape) for x, to in zip(made, slopes, strict=True)))

    return Kernels(s * value, s * value_z, np.full(len(u), s), mean.detach().numpy(), pull)


def distances(u: np.ndarray, v: np.ndarray, u_norms: np.ndarray, v_norms: np.ndarray) -> np.ndarray:
    """‖u - v‖² between all pairs."""
    square = (-2.0 * u) @ v.T
    square += u_norms[:, None]
    square += v_norms
    return np.maximum(square, 0.0, out=square)
