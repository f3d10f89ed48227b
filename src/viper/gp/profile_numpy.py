"""The profile on a CPU with all rows in one block: model.py and profile.py in NumPy, several times faster.

With hundreds of rows and tens of inducing points a matrix product takes microseconds, no longer than PyTorch needs to
dispatch one. Value and gradient therefore take as few operations as possible. With G = Aᵀ diag(b) A,

    ∂F/∂K_xz = e (L⁻ᵀμ)ᵀ - diag(b) A (Σ - J) L⁻¹,     (∂F/∂A)ᵀ A = μ (Aᵀe)ᵀ - (Σ - J) G,

e = c(y - g), b = c h, and J = I for the inducing points and 0 for the weights of the mean function. If residuals are
integrated out, A above is κA, and gradients in K_xz and in o are multiplied by κ. The derivative ρ in r, above -b/2, is
then given by `slope_in_residual`, and its contribution -2ρA to the gradient in A replaces bAJ.

Rows are taken in pieces of a fixed size. Several threads may share them, and sums are added in the order of the rows,
so the answer does not depend on the number of threads.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

from viper.gp.kernels import ARRAY_SHAPES, Shape, covariance, stationary_shape, variances, weight_columns
from viper.gp.model import SOFTENING, Observations, SparseGP, cholesky_with_jitter, pull_back, slope_in_residual
from viper.inference.anderson import weights_from_gram
from viper.inference.problem import Gaussian
from viper.inference.threads import PASS_THREADS, thread_pools
from viper.softplus.pointwise import Formula

LARGEST_DENSE = 1 << 23  # entries of A (64 MB)
MOST_INNER_STEPS = 200
SHORTEST_INNER_STEP = 1e-6
MIXED_ITERATES = 10
FAST_MOVE = 0.1  # a move below this share of the last one needs no damping
SITE_DAMPING = 0.6
SURELY = 3.0  # an estimated move is surely too large from this many times the tolerance on
PIECE_ROWS = 512
LEAST_SHARED = 2e7  # rows × columns² from which threads share the pieces: a millisecond, where starting them takes 0.2

OfPiece = TypeVar("OfPiece")


def dense_profile_applies(rows: Observations, points: int, diagonal: bool) -> bool:
    return not diagonal and rows.inputs.device.type == "cpu" and len(rows) * points <= LARGEST_DENSE


def in_pieces(task: Callable[[slice], OfPiece], rows: int, columns: int) -> list[OfPiece]:
    """What the task returns for each piece of the rows, in their order; on the threads of this fit if that pays."""
    pieces = [slice(start, start + PIECE_ROWS) for start in range(0, max(rows, 1), PIECE_ROWS)]
    threads = min(PASS_THREADS.get(), len(pieces)) if rows * columns**2 >= LEAST_SHARED else 1
    if threads <= 1:
        return [task(piece) for piece in pieces]
    alone = partial(thread_pools().limit, limits=1, user_api="openmp")
    with ThreadPoolExecutor(threads, initializer=alone) as pool:
        return list(pool.map(task, pieces))


def total(parts: list[np.ndarray]) -> np.ndarray:
    """Their sum, added up in their order."""
    return reduce(np.add, parts)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


class Kernels(NamedTuple):
    """Kernel matrices and means at one θ, and `pull`, which backpropagates their gradients to the parameters."""

    cross: np.ndarray  # K_xz
    among: np.ndarray  # K_zz
    variance: np.ndarray  # diag K_xx
    mean: np.ndarray
    columns: np.ndarray  # B, for weights of the mean function
    pull: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


def by_autograd(model: SparseGP, inputs: Tensor) -> Kernels:
    """The matrices of any kernel."""
    kernel, z = model.kernel, model.inducing
    with torch.enable_grad():
        made = (
            covariance(kernel, inputs, z),
            covariance(kernel, z, z),
            variances(kernel, inputs),
            model.mean(inputs),
            weight_columns(model.mean, inputs),
        )

    def pull(*slopes: np.ndarray) -> None:
        pull_back(made, tuple(map(torch.from_numpy, slopes)))

    cross, among, variance, mean, columns = (x.detach().numpy() for x in made)
    return Kernels(cross, among, variance, mean, columns, pull)


def in_closed_form(model: SparseGP, shape: Shape, inputs: Tensor, squares: np.ndarray) -> Kernels:
    """The matrices of a stationary kernel s φ(r²), r² = Σ_j (x_j - z_j)²/ℓ_j²."""
    on_arrays = ARRAY_SHAPES[shape]
    with torch.enable_grad():
        lengthscale, scale, mean = model.kernel.base_kernel.lengthscale, model.kernel.outputscale, model.mean(inputs)
        columns = weight_columns(model.mean, inputs)
    ell, s = lengthscale.detach().numpy().reshape(-1), float(scale.detach())
    z = model.inducing.detach().numpy()
    u, v = inputs.numpy() / ell, z / ell
    norms = np.square(v).sum(1)
    rate = np.broadcast_to(ell**-2, squares.shape[1:])
    u_norms, value_z, decay_z = squares @ rate, *on_arrays(distances(v, v, norms, norms))
    same = decay_z is value_z
    cross, value = np.empty((2, len(u), len(v)))
    decay = value if same else np.empty_like(value)

    def shape_of(piece: slice) -> None:
        value[piece], decay[piece] = on_arrays(distances(u[piece], v, u_norms[piece], norms))
        np.multiply(s, value[piece], out=cross[piece])

    in_pieces(shape_of, *value.shape)

    def pull(
        to_cross: np.ndarray, to_among: np.ndarray, to_variance: np.ndarray, to_mean: np.ndarray, to_columns: np.ndarray
    ) -> None:
        def cross_part(piece: slice) -> tuple[float, np.ndarray, np.ndarray]:
            return chain(u[piece], v, to_cross[piece], None if same else value[piece], decay[piece])

        parts = in_pieces(cross_part, *value.shape)
        of_scale, of_z, of_rate = chain(v, v, to_among, None if same else value_z, decay_z)
        to_scale = float(to_variance.sum()) + sum(part[0] for part in parts) + of_scale
        to_z = total([part[1] for part in parts]) + 2.0 * of_z  # K_zz and its slope are symmetric
        to_length = s * (total([part[2] for part in parts]) + of_rate) / ell
        if len(ell) == 1:
            to_length = to_length.sum(keepdims=True)
        if model.inducing.requires_grad:
            model.inducing.grad = torch.from_numpy(s * to_z / ell)
        made, slopes = (lengthscale, scale, mean, columns), (to_length, np.array(to_scale), to_mean, to_columns)
        pull_back(made, tuple(torch.from_numpy(to).reshape(x.shape) for x, to in zip(made, slopes, strict=True)))

    others = mean.detach().numpy(), columns.detach().numpy()
    return Kernels(cross, s * value_z, np.full(len(u), s), *others, pull)


def chain(
    u: np.ndarray, v: np.ndarray, slope: np.ndarray, value: np.ndarray | None, decay: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """From ∂F/∂K, over s, the slopes in s, in v and in the rates ℓ⁻², by which squares count; no value if φ = decay."""
    # W = -2 s φ'(r²) ∂/∂K, so that the differential is -½ Σ W d(r²)
    weight = slope * decay
    by_row, by_point, pulled = weight.sum(1), weight.sum(0), weight.T @ u
    to_scale = float(by_row.sum() if value is None else np.vdot(slope, value))
    to_rate = by_row @ np.square(u) + by_point @ np.square(v) - 2.0 * (pulled * v).sum(0)
    return to_scale, pulled - by_point[:, None] * v, to_rate


def distances(u: np.ndarray, v: np.ndarray, u_norms: np.ndarray, v_norms: np.ndarray) -> np.ndarray:
    """‖u - v‖² between all pairs."""
    square = (-2.0 * u) @ v.T
    square += u_norms[:, None]
    square += v_norms
    return np.maximum(square, 0.0, out=square)


# ---------------------------------------------------------------------------------------------------------------------
# q


class Normal(NamedTuple):
    """q = N(μ, Λ⁻¹), with log|Λ| and F such that Λ⁻¹ = FFᵀ."""

    mean: np.ndarray
    precision: np.ndarray
    factor: np.ndarray
    log_determinant: float


def normal(precision: np.ndarray, shift: np.ndarray, start: np.ndarray | None = None) -> Normal | None:
    """The q with precision Λ and mean `start` + Λ⁻¹ shift; None if Λ is not positive definite."""
    root, info = lapack.dpotrf(precision.T, lower=1)
    diagonal = root.diagonal()
    if info or not np.isfinite(diagonal).all():
        return None
    inverse, _ = lapack.dtrtri(root, lower=1)
    factor = np.ascontiguousarray(inverse.T)
    mean = factor @ (inverse @ shift)
    return Normal(mean if start is None else start + mean, precision, factor, 2.0 * np.log(diagonal).sum())


def from_tensors(q: Gaussian) -> Normal:
    return Normal(q.mean.numpy(), q.precision.numpy(), q.factor.numpy(), q.log_determinant)


class RowMoments(NamedTuple):
    """What the rows contribute at a q: F, e = c(y - g), b = c h, Aμ, τ² and the likelihood's gradient in μ."""

    value: float
    e: np.ndarray
    b: np.ndarray
    shift: np.ndarray
    tau2: np.ndarray
    pulled: np.ndarray  # Aᵀ e

    @property
    def sites(self) -> np.ndarray:
        return np.stack([self.b, self.e + self.b * self.shift])


@dataclass
class DenseFeatures:
    """A, r and o of all rows, their labels and weights, and the formula of the bound."""

    design: np.ndarray
    residual: np.ndarray
    offset: np.ndarray
    label: np.ndarray
    weight: np.ndarray | float
    formula: Formula
    scratch: np.ndarray  # of the shape of A: allocating an array of that size costs as much as filling it

    def gram(self, b: np.ndarray) -> np.ndarray:
        """Aᵀ diag(b) A."""
        if b.min() < 0.0:
            return (self.design * b[:, None]).T @ self.design
        root = np.sqrt(b)[:, None]

        def part(piece: slice) -> np.ndarray:
            scaled = np.multiply(self.design[piece], root[piece], out=self.scratch[piece])
            return scaled.T @ scaled  # NumPy computes only one triangle of this product

        return total(in_pieces(part, *self.design.shape))

    def from_sites(self, sites: np.ndarray) -> Normal | None:
        """Λ = I + Aᵀ diag(b) A, Λμ = Aᵀ t."""
        return normal(plus_identity(self.gram(sites[0])), self.design.T @ sites[1])

    def row_moments(self, q: Normal) -> RowMoments:

        def spread_of(piece: slice) -> np.ndarray:
            spread = np.matmul(self.design[piece], q.factor, out=self.scratch[piece])
            return np.einsum("ij,ij->i", spread, spread)

        shift = self.design @ q.mean
        theta, tau2 = shift + self.offset, np.concatenate(in_pieces(spread_of, *self.design.shape)) + self.residual
        eta, g, h = (x.numpy() for x in self.formula(torch.from_numpy(theta), torch.from_numpy(tau2)))
        gain = self.label * theta - eta
        value = float((self.weight * gain).sum() if isinstance(self.weight, np.ndarray) else self.weight * gain.sum())
        kl = 0.5 * (q.log_determinant - len(q.mean) + np.vdot(q.factor, q.factor) + q.mean @ q.mean)
        e = self.weight * (self.label - g)
        return RowMoments(value - float(kl), e, self.weight * h, shift, tau2, self.design.T @ e)

    def step(self, q: Normal, moments: RowMoments, gram: np.ndarray, rho: float) -> Normal | None:
        """The natural-gradient step of length ρ (steps.py)."""
        precision = plus_identity(gram.copy())
        if rho < 1.0:
            precision = q.precision + rho * (precision - q.precision)
        return normal(precision, rho * (moments.pulled - q.mean), q.mean)


def plus_identity(matrix: np.ndarray) -> np.ndarray:
    matrix.flat[:: len(matrix) + 1] += 1.0
    return matrix


def next_move(q: Normal, gram: np.ndarray, slope: np.ndarray) -> float:
    """KL(q ‖ q') to the natural-gradient step q', Λ' = I + G and δ = Λ'⁻¹ slope; ∞ if Λ' is not positive definite.

    ½ [log|Λ| - log|Λ'| - d + tr(Λ'Σ) + δᵀΛ'δ], as in `steps.divergence`.
    """
    root, info = lapack.dpotrf(plus_identity(gram.copy()).T, lower=1)
    if info:
        return math.inf
    half, _ = lapack.dtrtrs(root, slope, lower=1)
    trace = np.vdot(gram @ q.factor, q.factor) + np.vdot(q.factor, q.factor)
    move = q.log_determinant - 2.0 * np.log(root.diagonal()).sum() - len(slope) + trace + half @ half
    return 0.5 * float(move) if np.isfinite(move) else math.inf


class AndersonSites:
    """Anderson's mixture of sites x = (b, t), whose residuals f are the sites at their q minus x.

    The next x is the combination with the least Σ γ_k f_k. Sites belong to rows, so what was learned about the
    iteration at one θ still helps at the next θ.
    """

    def __init__(self, rows: int) -> None:
        self.last: tuple[np.ndarray, np.ndarray] | None = None
        self.count = 0
        self.points, self.residuals = np.zeros((2, MIXED_ITERATES, 2, rows))  # differences of successive sites

    def combine(self, x: np.ndarray, residual: np.ndarray, moments: RowMoments, damping: float) -> np.ndarray:
        """The next sites."""
        if self.last is not None:
            slot = self.count % MIXED_ITERATES
            np.subtract(x, self.last[0], out=self.points[slot])
            np.subtract(residual, self.last[1], out=self.residuals[slot])
            self.count += 1
        self.last = x, residual
        mixed = x + damping * residual
        known = min(self.count, MIXED_ITERATES)
        if known:
            changes = whitened_sites(self.residuals[:known], moments)
            weights = weights_from_gram(changes @ changes.T, changes @ whitened_sites(residual[None], moments)[0])
            if weights is not None:
                flat = (known, -1)
                mixed -= (weights @ self.points[:known].reshape(flat)).reshape(x.shape)
                mixed -= damping * (weights @ self.residuals[:known].reshape(flat)).reshape(x.shape)
                np.maximum(mixed[0], 0.0, out=mixed[0])
        return mixed


def whitened_sites(sites: np.ndarray, moments: RowMoments) -> np.ndarray:
    """Changes of b and t, scaled by how far they move q at their row: τ² δb/√2 and τ (δt - δb Aμ)."""
    b, t = sites[:, 0], sites[:, 1]
    return np.concatenate([b * (math.sqrt(0.5) * moments.tau2), (t - b * moments.shift) * np.sqrt(moments.tau2)], 1)


# ---------------------------------------------------------------------------------------------------------------------
# The profile


class Projected(NamedTuple):
    """The rows at one θ: kernels, L⁻¹, the jitter, K_xz L⁻ᵀ, κ, and A, r and o."""

    kernels: Kernels
    inverse: np.ndarray
    jitter: float
    induced: np.ndarray
    kappa: np.ndarray
    features: DenseFeatures


class DenseProfile:
    """G and the gradients of the free parameters; each inner search starts from the sites of the last one."""

    def __init__(
        self,
        model: SparseGP,
        rows: Observations,
        formula: Formula,
        scale: float,
        start: Gaussian | None = None,
        marginal: bool = False,
    ) -> None:
        self.start, self.marginal = start, marginal
        self.model, self.inputs, self.formula = model, rows.inputs, formula
        self.squares = np.square(rows.inputs.numpy())
        self.label = rows.label.numpy()
        self.given = None if rows.offset is None else rows.offset.numpy()
        self.weight = scale if rows.weight is None else scale * rows.weight.numpy()
        self.sites: np.ndarray | None = None
        self.mixer = AndersonSites(len(rows))
        self.scratch = np.empty((len(rows), model.dimension))
        self.excess = 1.0  # ratio of the exact move to the rough one, as last computed

    def evaluate(self, tol: float) -> tuple[float, Callable[[], None]]:
        """Set the gradients of the model's parameters; return G and a function that keeps the sites for the next call.

        Raises ValueError if K_zz has no Cholesky factor or F overflows.
        """
        at = self.projected()
        kernels, inverse, induced, kappa, features = at.kernels, at.inverse, at.induced, at.kappa, at.features
        design, offset = features.design, features.offset
        q, moments, gram = self.maximise(features, tol)
        # Σ - J and the gradients in the module's docstring; those in K_xz and in B are side by side
        points = len(inverse)
        excess = q.factor @ q.factor.T
        to_variance, e, b = -0.5 * moments.b, moments.e, moments.b
        if self.marginal:
            to_variance = slope_in_residual(kappa, e, b, moments.shift + offset, moments.tau2)
            e, b = kappa * e, kappa * b
        else:
            excess.flat[: points * (len(excess) + 1) : len(excess) + 1] -= 1.0
        to_cross, to_columns = np.empty_like(induced), np.empty_like(kernels.columns)

        def slopes_of(piece: slice) -> np.ndarray:
            """Set the gradients in K_xz and in the other columns, and return the share of -2ρA in (∂F/∂A)ᵀA."""
            slope = np.matmul(design[piece], excess, out=self.scratch[piece])
            slope *= -b[piece, None]
            slope += np.outer(e[piece], q.mean)
            more = np.zeros((points, points))
            if self.marginal:
                scaled = 2.0 * to_variance[piece, None] * induced[piece]
                slope[:, :points] -= scaled
                more = scaled.T @ induced[piece]
            np.matmul(slope[:, :points], inverse, out=to_cross[piece])
            to_columns[piece] = slope[:, points:]
            return more

        more = total(in_pieces(slopes_of, *design.shape))
        pulled = excess[:points] @ gram[:, :points] + more - np.outer(q.mean[:points], moments.pulled[:points])
        lower = np.tril(pulled)
        lower.flat[:: len(lower) + 1] *= 0.5
        # through L: ∂F/∂K_zz = L⁻ᵀ sym Φ(-(∂F/∂A)ᵀA) L⁻¹; Φ takes the lower triangle and halves its diagonal
        to_among = 0.5 * inverse.T @ (lower + lower.T) @ inverse
        # the jitter is a multiple of the mean of the diagonal
        to_among.flat[:: len(lower) + 1] += at.jitter * to_among.trace() / max(1, points)
        kernels.pull(to_cross, to_among, to_variance, e, to_columns)
        sites = moments.sites
        return moments.value, lambda: setattr(self, "sites", sites)

    def maximum(self, tol: float) -> tuple[float, Normal]:
        """G and the best q, without gradients. Raises as `evaluate` does."""
        features = self.projected().features
        _, moments, gram = self.maximise(features, tol)
        q = normal(plus_identity(gram), features.design.T @ moments.sites[1])
        if q is None:
            raise ValueError("the precision of q must be positive definite; got one that is not.")
        return moments.value, q

    def projected(self) -> "Projected":
        """The rows at the current θ."""
        model = self.model
        if (shape := stationary_shape(model.kernel)) is not None:
            kernels = in_closed_form(model, shape, self.inputs, self.squares)
        else:
            kernels = by_autograd(model, self.inputs)
        root, jitter = cholesky_with_jitter(torch.from_numpy(kernels.among), model.jitter)
        inverse = lapack.dtrtri(root.numpy().T, lower=0)[0].T if len(root) else root.numpy()  # L⁻¹
        induced = np.concatenate(in_pieces(lambda piece: kernels.cross[piece] @ inverse.T, *kernels.cross.shape))
        residual = np.maximum(kernels.variance - np.einsum("ij,ij->i", induced, induced), 0.0)
        design = np.concatenate([induced, kernels.columns], 1)
        offset = kernels.mean if self.given is None else kernels.mean + self.given
        kappa = 1.0 / np.sqrt(1.0 + SOFTENING * residual)
        if self.marginal:
            design *= kappa[:, None]
            offset, residual = kappa * offset, np.zeros_like(residual)
        features = DenseFeatures(design, residual, offset, self.label, self.weight, self.formula, self.scratch)
        return Projected(kernels, inverse, jitter, induced, kappa, features)

    def maximise(self, features: DenseFeatures, tol: float) -> tuple[Normal, RowMoments, np.ndarray]:
        """Accelerated natural-gradient steps until a plain one would move q by less than `tol`: q, moments and G."""
        x, q = self.begin(features)
        moments, last = features.row_moments(q), math.inf
        self.mixer.last = None
        for _ in range(MOST_INNER_STEPS):
            after = moments.sites
            # an estimate, as if rows were independent; the exact move is computed only if it may be small enough
            move = 0.5 * float(np.square(whitened_sites((after - x)[None], moments)).sum())
            if move * self.excess < SURELY * tol:
                gram = features.gram(moments.b)
                exact = next_move(q, gram, moments.pulled - q.mean)
                if exact < tol:
                    return q, moments, gram
                self.excess = min(max(exact / move, 1.0), 100.0)
            mixed = self.mixer.combine(x, after - x, moments, 1.0 if move < FAST_MOVE * last else SITE_DAMPING)
            ahead = self.attempt(features, features.from_sites(mixed), moments.value - tol)
            last, rho = move, 1.0
            while ahead is None and rho > SHORTEST_INNER_STEP:
                mixed = x + rho * (after - x)
                ahead = self.attempt(
                    features, features.step(q, moments, features.gram(moments.b), rho), moments.value - tol
                )
                rho *= 0.5
            if ahead is None:
                break
            x, (q, moments) = mixed, ahead
        return q, moments, features.gram(moments.b)

    def begin(self, features: DenseFeatures) -> tuple[np.ndarray, Normal]:
        """Return the first sites and q: those of the last call, one step from the given q, or `steps.opening`."""
        x = self.sites
        if x is None and self.start is not None:
            x = features.row_moments(from_tensors(self.start)).sites
        if x is not None and (q := features.from_sites(x)) is not None:
            return x, q
        s = torch.sigmoid(torch.from_numpy(features.offset)).numpy()
        x = np.stack([self.weight * np.full_like(s, 0.25), self.weight * (self.label - s)])
        q = features.from_sites(x)
        if q is None:
            raise ValueError("the rows must give finite sums; got an overflow or NaN. Scale the features and offsets.")
        return x, q

    def attempt(self, features: DenseFeatures, new: Normal | None, least: float) -> tuple[Normal, RowMoments] | None:
        """Return `new` with its moments, or None if F is below `least` there."""
        if new is None:
            return None
        moments = features.row_moments(new)
        return (new, moments) if moments.value >= least else None
