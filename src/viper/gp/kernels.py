"""Kernels and mean functions: GPyTorch modules by name, and how covariances are evaluated.

Every kernel is a GPyTorch module. The common stationary ones, k(x, z) = s φ(r²) with r² = Σ_j (x_j - z_j)²/ℓ_j², are
evaluated by one function with its derivative in closed form, several times faster than autograd. GPyTorch evaluates all
others.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean, LinearMean, Mean, ZeroMean
from gpytorch.priors import NormalPrior
from torch import Tensor

from viper.errors import shown
from viper.gp.additive import AdditiveKernel, is_additive, read_pairs

KERNELS = ("rbf", "matern32", "matern52", "linear", "additive")
MEANS = ("linear", "constant", "zero")
PRIORS = ("default", "short", None)
LENGTHSCALES = ("auto", "one", "many")
LEAST_SQUARE = 1e-30  # squared distance, so that Matern kernels have a derivative at 0
# The default priors: median and standard deviation of the logarithm, on standardised columns
TYPICAL_LENGTH, LENGTH_SPREAD = 1.35, 0.7  # times √p, the typical distance between rows
SHORT_LENGTH = 0.8  # instead, of functions over a box that are largest within it
TYPICAL_SCALE, SCALE_SPREAD = 3.0, 1.5  # variance of the log-odds
TYPICAL_SLOPE, SLOPE_SPREAD = 1.0, 1.0  # over √p
LEVEL_SCALE = 5.0  # prior sd of the common level of the log-odds
TYPICAL_TIE, TIE_SPREAD = 0.5, 1.0  # difference of two items within which a tie is likely


def logarithmic() -> Positive:
    """Keeps a scale positive through exp, so that the optimiser can change it a thousandfold in a few steps."""
    return Positive(transform=torch.exp, inv_transform=torch.log)


def make_kernel(
    kernel: Any, columns: int, *, priors: str | None = None, many: bool = True, names: list[str] | None = None
) -> Kernel:
    """Return a kernel in float64: by name, with its priors and one lengthscale or many; or a copy of GPyTorch's."""
    if isinstance(kernel, Kernel):
        made = copy.deepcopy(kernel)
    elif kernel == "linear":
        made = LinearKernel(ard_num_dims=columns, variance_constraint=logarithmic())
        made.initialize(variance=1.0)
        if priors is not None:
            variance = log_normal(TYPICAL_SLOPE**2 / columns, 2.0 * SLOPE_SPREAD)
            made.register_prior("log_variance_prior", variance, log_variance)
    elif is_additive(kernel):
        pairs = read_pairs(kernel, [f"x{j}" for j in range(columns)] if names is None else names)
        made = make_additive(columns, pairs, priors)
    elif kernel in KERNELS:
        options = {"ard_num_dims": columns if many else None, "lengthscale_constraint": logarithmic()}
        base = RBFKernel(**options) if kernel == "rbf" else MaternKernel(nu=int(kernel[-2]) / 2, **options)
        made = ScaleKernel(base, outputscale_constraint=logarithmic())
        made.initialize(outputscale=1.0)
        base.initialize(lengthscale=math.sqrt(columns))
        if priors is not None:
            length = log_normal(typical_length(priors) * math.sqrt(columns), LENGTH_SPREAD)
            base.register_prior("log_lengthscale_prior", length, log_lengthscale)
            made.register_prior("log_outputscale_prior", log_normal(TYPICAL_SCALE, SCALE_SPREAD), log_outputscale)
    else:
        raise ValueError(f"kernel must be one of {[*KERNELS, 'auto']} or a gpytorch Kernel; got {shown(kernel)}.")
    if made.batch_shape != torch.Size([]):
        raise ValueError(f"kernel must not have a batch shape; got {tuple(made.batch_shape)}. Fit one model per batch.")
    return check_parameters(made.double(), "kernel")


def make_additive(columns: int, pairs: list[tuple[int, int]], priors: str | None) -> AdditiveKernel:
    """The additive kernel; its terms share the variance that other kernels have."""
    made = AdditiveKernel(columns, pairs, (logarithmic(), logarithmic()))
    share = TYPICAL_SCALE / len(made.terms)
    raw = {"raw_lengthscales": TYPICAL_LENGTH, "raw_outputscales": share}
    made.initialize(**{name: torch.full_like(getattr(made, name), math.log(value)) for name, value in raw.items()})
    if priors is not None:
        length = log_normal(typical_length(priors), LENGTH_SPREAD)
        made.register_prior("log_lengthscales_prior", length, log_lengthscales)
        made.register_prior("log_outputscales_prior", log_normal(share, SCALE_SPREAD), log_outputscales)
    return made


def typical_length(priors: str) -> float:
    """The median of lengthscales, over √p, by the word for their priors."""
    return SHORT_LENGTH if priors == "short" else TYPICAL_LENGTH


def log_normal(median: float, spread: float) -> NormalPrior:
    """The prior of the logarithm of a scale, as a density of the logarithm."""
    return NormalPrior(*torch.tensor([math.log(median), spread], dtype=torch.float64))


# closures of these priors; functions of a module can be pickled


def log_lengthscale(kernel: Any) -> Tensor:
    return kernel.raw_lengthscale


def log_outputscale(kernel: Any) -> Tensor:
    return kernel.raw_outputscale


def log_lengthscales(kernel: Any) -> Tensor:
    return kernel.raw_lengthscales


def log_outputscales(kernel: Any) -> Tensor:
    return kernel.raw_outputscales


def log_variance(kernel: Any) -> Tensor:
    return kernel.raw_variance


def log_slope(mean: Any) -> Tensor:
    return mean.raw_slope


class UncertainMean(Mean):
    """m(x) = s xᵀβ + s₀β₀ with β ~ N(0, I): the weights are in q, as further columns [s x, s₀] of the design.

    What is left for the mean function itself is 0. Without `slopes` only the level β₀ is left.
    """

    def __init__(self, columns: int, slopes: bool) -> None:
        super().__init__()
        self.slopes = slopes
        if slopes:
            median = TYPICAL_SLOPE / math.sqrt(columns)
            start = torch.tensor(math.log(median), dtype=torch.float64)
            self.register_parameter("raw_slope", torch.nn.Parameter(start))
            self.register_constraint("raw_slope", logarithmic())
            self.register_prior("log_slope_prior", log_normal(median, SLOPE_SPREAD), log_slope)

    @property
    def slope(self) -> Tensor:
        """s, the prior standard deviation of a weight."""
        return self.raw_slope_constraint.transform(self.raw_slope)

    def columns(self, x: Tensor) -> Tensor:
        level = torch.full_like(x[:, :1], LEVEL_SCALE)
        return torch.cat([self.slope * x, level], 1) if self.slopes else level

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[:, 0])


class PairKernel(Kernel):
    """Covariances of differences: a row (x, x') of 2p columns is f(x) - f(x'), a row x of p columns is f(x) itself.

    With the signs σ of the items of a row, k(u, v) = Σ_i Σ_j σ_i σ_j k(u_i, v_j). Further columns are not looked at.
    """

    def __init__(self, of: Kernel, columns: int) -> None:
        super().__init__()
        self.of, self.columns = of, columns

    @property
    def base_kernel(self) -> Any:
        return self.of.base_kernel

    @property
    def outputscale(self) -> Tensor:
        return self.of.outputscale

    @outputscale.setter
    def outputscale(self, value: Tensor) -> None:
        self.of.initialize(outputscale=value)

    def matrix(self, x: Tensor, z: Tensor) -> Tensor:
        """K_xz."""
        u, v = pair_items(x, self.columns), pair_items(z, self.columns)
        K = covariance(self.of, torch.cat(u), torch.cat(v))
        K = K[: len(x)] - K[len(x) :] if len(u) == 2 else K
        return K[:, : len(z)] - K[:, len(z) :] if len(v) == 2 else K

    def diagonal_of(self, x: Tensor) -> Tensor:
        """diag K_xx."""
        items = pair_items(x, self.columns)
        if len(items) == 1:
            return variances(self.of, x)
        return variances(self.of, items[0]) + variances(self.of, items[1]) - 2.0 * paired_covariance(self.of, *items)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: Any) -> Tensor:
        return self.diagonal_of(x1) if diag else self.matrix(x1, x2)


def pair_items(x: Tensor, columns: int) -> list[Tensor]:
    """The two items of rows that are pairs, or the one of rows that are items."""
    return [x] if x.shape[1] == columns else [x[:, :columns], x[:, columns : 2 * columns]]


class PairMean(UncertainMean):
    """Differences of a linear function of the items, without its level, which no comparison can tell.

    With ties, a row has the sign σ in its last column, and adds the threshold as σ t.
    """

    def __init__(self, columns: int, slopes: bool, ties: float | None = None) -> None:
        super().__init__(columns, slopes)
        self.items = columns
        if ties is not None:
            start = torch.tensor(math.log(TYPICAL_TIE), dtype=torch.float64)
            self.register_parameter("raw_tie", torch.nn.Parameter(start))
            self.register_constraint("raw_tie", logarithmic())
            self.register_prior("log_tie_prior", TiePrior(ties), log_tie)

    @property
    def tie(self) -> Tensor:
        """t: at a difference of t either side of 0, an item is as likely to win as not to."""
        return self.raw_tie_constraint.transform(self.raw_tie)

    def columns(self, x: Tensor) -> Tensor:
        if not self.slopes:
            return x[:, :0]
        items = pair_items(x, self.items)
        return self.slope * (items[0] if len(items) == 1 else items[0] - items[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.tie * x[:, -1] if x.shape[1] == 2 * self.items + 1 else torch.zeros_like(x[:, 0])


class TiePrior(NormalPrior):
    """The prior of log t, and what ties of this total weight add to the likelihood beyond rows: log(1 - e^{-2t})."""

    def __init__(self, weight: float) -> None:
        super().__init__(*torch.tensor([math.log(TYPICAL_TIE), TIE_SPREAD], dtype=torch.float64))
        self.weight = weight

    def log_prob(self, x: Tensor) -> Tensor:
        return super().log_prob(x) + tie_constant(self.weight, x.exp())


def tie_constant(weight: float, threshold: Tensor) -> Tensor:
    """Σ c log(1 - e^{-2t}) over ties."""
    return weight * torch.log(-torch.expm1(-2.0 * threshold))


def log_tie(mean: Any) -> Tensor:
    return mean.raw_tie


class NoKernel(Kernel):
    """k = 0: f is the mean function alone, without inducing points."""

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: Any) -> Tensor:
        return x1.new_zeros(len(x1)) if diag else x1.new_zeros(len(x1), len(x2))


def weight_columns(mean: Mean, x: Tensor) -> Tensor:
    """The columns of the design that belong to weights of the mean function: n × k, k = 0 for point estimates."""
    return mean.columns(x) if isinstance(mean, UncertainMean) else x[:, :0]


def make_mean(mean: Any, columns: int, *, priors: str | None = None) -> Mean:
    """Return a mean function in float64, by name or as a copy of a GPyTorch mean.

    With priors the weights are in q; without, they are parameters that begin at zero.
    """
    if isinstance(mean, Mean):
        return check_parameters(copy.deepcopy(mean).double(), "mean")
    if mean == "zero":
        return ZeroMean()
    if mean not in MEANS:
        raise ValueError(f"mean must be one of {list(MEANS)} or a gpytorch Mean; got {shown(mean)}.")
    if priors is not None:
        return UncertainMean(columns, mean == "linear").double()
    if mean == "constant":
        return ConstantMean().double()
    with torch.random.fork_rng(devices=[]):  # its random weights are overwritten; leave the global generator alone
        made = LinearMean(columns).double()
    made.initialize(weights=0.0, bias=0.0)
    return made


def check_parameters(module: Any, name: str) -> Any:
    for label, parameter in module.named_parameters():
        if not bool(parameter.isfinite().all()):
            got = shown(parameter.detach().tolist())
            raise ValueError(f"parameters of {name} must be finite; got {got} for {label}.")
    return module


def check_loaded(model: Any) -> None:
    """Raise a ValueError unless all parameters of a model are finite, also as their constraints transform them."""
    check_parameters(model, "the model")
    for part in (model.kernel, model.mean):
        for label, parameter, constraint in part.named_parameters_and_constraints():
            value = parameter if constraint is None else constraint.transform(parameter)
            if not bool(value.isfinite().all()) or (constraint is not None and not bool((value != 0).all())):
                raise ValueError(f"{label} must be neither zero nor infinite; got {shown(value.tolist())}.")


def check_shapes(kernel: Any, mean: Any, x: Tensor) -> None:
    """Raise unless kernel and mean take rows of this width and give one number per pair and per row."""
    try:
        with torch.no_grad():
            pairs, single = tuple(covariance(kernel, x, x).shape), tuple(mean(x).shape)
    except (RuntimeError, IndexError, ValueError, AssertionError) as error:
        raise ValueError(
            f"kernel and mean must take rows of {x.shape[1]} columns; got an error: {error}. Check active_dims, "
            "ard_num_dims and input_size."
        ) from error
    if pairs != (len(x), len(x)) or single != (len(x),):
        wanted = f"{(len(x), len(x))} and {(len(x),)}"
        raise ValueError(f"kernel and mean must give shapes {wanted} for {len(x)} rows; got {pairs} and {single}.")


def log_prior(module: torch.nn.Module) -> Tensor | None:
    """Σ log p(θ) over the priors that the kernel or mean registers, or None if there are none."""
    if not isinstance(module, gpytorch.Module):
        return None
    terms = [prior.log_prob(closure(owner)).sum() for _, owner, prior, closure, _ in module.named_priors()]
    return torch.stack(terms).sum() if terms else None


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def covariance(kernel: Kernel, x: Tensor, z: Tensor) -> Tensor:
    """K_xz as a dense matrix."""
    shape = stationary_shape(kernel)
    if shape is not None:
        base = kernel.base_kernel
        return _Stationary.apply(x, z, base.lengthscale.reshape(-1), kernel.outputscale, shape)
    if isinstance(kernel, AdditiveKernel | PairKernel):
        return kernel.matrix(x, z)
    if isinstance(kernel, NoKernel):
        return kernel.forward(x, z)
    return kernel(x, z).to_dense()


def variances(kernel: Kernel, x: Tensor) -> Tensor:
    """diag K_xx."""
    if stationary_shape(kernel) is not None:
        return kernel.outputscale.expand(len(x))
    if isinstance(kernel, AdditiveKernel):
        return kernel.outputscales.sum().expand(len(x))
    if isinstance(kernel, PairKernel):
        return kernel.diagonal_of(x)
    if isinstance(kernel, NoKernel):
        return kernel.forward(x, x, diag=True)
    return kernel(x, diag=True)


def paired_covariance(kernel: Kernel, x: Tensor, z: Tensor) -> Tensor:
    """k(x_i, z_i) of each row i."""
    if (shape := stationary_shape(kernel)) is not None:
        square = ((x - z) / kernel.base_kernel.lengthscale).square().sum(1)
        return kernel.outputscale * shape(square.clamp(min=LEAST_SQUARE))[0]
    return kernel(x, z, diag=True)


Shape = Callable[[Tensor], tuple[Tensor, Tensor]]


def stationary_shape(kernel: Kernel) -> Shape | None:
    """Return φ if the kernel is one of the stationary ones below, scaled and over all columns; otherwise None."""
    if type(kernel) is not ScaleKernel or kernel.active_dims is not None:
        return None
    base = kernel.base_kernel
    if base.active_dims is not None or base.batch_shape != torch.Size([]):
        return None
    if type(base) is RBFKernel:
        return gaussian_shape
    if type(base) is MaternKernel and base.nu in (1.5, 2.5):
        return matern32_shape if base.nu == 1.5 else matern52_shape
    return None


def gaussian_shape(square: Tensor) -> tuple[Tensor, Tensor]:
    """φ = e^{-r²/2} and -2 dφ/d(r²) = φ."""
    value = torch.exp(-0.5 * square)
    return value, value


def matern32_shape(square: Tensor) -> tuple[Tensor, Tensor]:
    """φ = (1 + t) e^{-t} with t = √3 r, and -2 dφ/d(r²) = 3 e^{-t}."""
    t = torch.sqrt(3.0 * square)
    decay = torch.exp(-t)
    return (1.0 + t) * decay, 3.0 * decay


def matern52_shape(square: Tensor) -> tuple[Tensor, Tensor]:
    """φ = (1 + t + t²/3) e^{-t} with t = √5 r, and -2 dφ/d(r²) = 5/3 (1 + t) e^{-t}."""
    t = torch.sqrt(5.0 * square)
    decay = torch.exp(-t)
    return (1.0 + t + t * t / 3.0) * decay, 5.0 / 3.0 * (1.0 + t) * decay


def gaussian_array(square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`gaussian_shape` of an array, computed in place."""
    square *= -0.5
    value = np.exp(square, out=square)
    return value, value


def on_arrays(shape: Shape) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    def evaluate(square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, decay = shape(torch.from_numpy(square))
        return value.numpy(), decay.numpy()

    return evaluate


ARRAY_SHAPES: dict[Shape, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    # the same on arrays
    gaussian_shape: gaussian_array,
    matern32_shape: on_arrays(matern32_shape),
    matern52_shape: on_arrays(matern52_shape),
}


class _Stationary(torch.autograd.Function):
    """(x, z, ℓ, s) -> s φ(r²), with gradients by matrix products instead of differences between all pairs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, lengthscale: Tensor, scale: Tensor, shape: Shape) -> Tensor:
        u, v = x / lengthscale, z / lengthscale
        square = (
            torch.addmm(v.square().sum(1), u, v.T, alpha=-2.0).add_(u.square().sum(1, keepdim=True)).clamp_(min=0.0)
        )
        value, decay = shape(square)
        ctx.save_for_backward(u, v, lengthscale, scale, value, decay)
        return scale * value

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        u, v, lengthscale, scale, value, decay = ctx.saved_tensors
        # W = -2 s φ'(r²) ∂/∂K, so that the differential is -½ Σ W d(r²)
        weight = slope * decay
        to_scale = (weight if decay is value else slope * value).sum()
        weight.mul_(scale)
        rows, columns = weight.sum(1, keepdim=True), weight.sum(0)[:, None]
        pulled = weight.T @ u
        to_x = (weight @ v - rows * u) / lengthscale if ctx.needs_input_grad[0] else None
        to_z = (pulled - columns * v) / lengthscale if ctx.needs_input_grad[1] else None
        to_length = (
            (rows * u.square()).sum(0) + (columns * v.square()).sum(0) - 2.0 * (pulled * v).sum(0)
        ) / lengthscale
        if len(lengthscale) == 1:
            to_length = to_length.sum()[None]
        return to_x, to_z, to_length, to_scale, None
