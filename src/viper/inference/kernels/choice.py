"""Which kernel computes a block's sums: one pass in C on a CPU, a few Triton kernels on a CUDA device, or none.

The plain formulas of sums.py are the reference. They also take over when no kernel applies: other bounds, variances
beyond a kernel's range, sparse or (on a CPU) float32 rows, many columns, no C library, no Triton.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from viper.inference.kernels.compiled import MOST_COMPILED, MOST_DIAGONAL, compiled_sums
from viper.inference.rows import Block, Dense
from viper.softplus.pointwise import KernelRecipe

# (μ, F, how much of the curvature, whether float32 is enough) -> value, magnitude, gradient, curvature; or None. On a
# CPU it also takes a list to which ϑ and τ² of the rows are appended.
Kernel = Callable[..., list[Tensor] | None]

MOST_CUDA = 64  # columns; one program of a kernel can hold their curvature matrix


def kernel_for(block: Block, recipe: KernelRecipe | None, columns: int, full: bool) -> Kernel | None:
    """Return the kernel for these rows, or None. It returns the sums of `row_sums`, or None beyond its range.

    With `full`, the factor of Σ or the curvature is a matrix; otherwise both are diagonal or absent.
    """
    if recipe is None or not isinstance(block.design, Dense):
        return None
    X = block.design.matrix
    if X.device.type == "cpu":
        fits = X.dtype == torch.float64 and columns <= (MOST_COMPILED if full else MOST_DIAGONAL)
        return partial(compiled_sums, block, recipe) if fits else None
    fits = X.is_cuda and X.stride(1) == 1 and columns <= MOST_CUDA and block.residual is None
    return partial(triton_sums(), block, recipe) if fits and has_triton() else None


@cache
def has_triton() -> bool:
    """Return whether Triton is installed; it comes with the CUDA builds of torch."""
    return find_spec("triton") is not None


@cache
def triton_sums() -> Callable[..., list[Tensor] | None]:
    """Return the function of triton.py, imported on first use."""
    from viper.inference.kernels.triton import launch

    return launch
