"""The sparse Gaussian process as rows for the shared solver, and the gradient of its ELBO in everything but q.

With inducing points z, K_zz = LLᵀ and whitened values w (u = m(z) + Lw, prior N(0, I)), the rows become

    A = K_xz L⁻ᵀ,      o = m(x) + the user's offset,      r = diag K_xx - rowsum(A²).

Weights of the mean function that have a prior are additional coordinates of w, with columns B appended to A; they leave
no residual.

At a fixed q(w) = N(μ, Σ), the kernel, the mean and z enter F only through ϑ = o + Aμ and τ² = r + diag(AΣAᵀ):

    dF = Σ_i c_i [(y_i - g_i) dϑ_i - ½ h_i dτ_i²],

which at the best q is also the gradient of the profile G(θ) = max_q F(q; θ) (envelope theorem).

With few inducing points, r is large for rough kernels. F takes the expectation over the residual outside the logarithm,
so it falls far below the evidence and would choose a smooth kernel, whose intervals are too narrow. The search for
hyperparameters can therefore integrate residuals out of each row's probability, as if independent between rows,

    E s(a + e) ≈ s(κa),   e ~ N(0, r),   κ = (1 + πr/8)^{-1/2}     (MacKay 1992),

so A and o become κA and κo, and r becomes 0. With all rows as inducing points this is F again.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from gpytorch.constraints import Interval
from gpytorch.priors import Prior
from torch import Tensor

from viper.data.scaling import column_moments
from viper.errors import NotPositiveDefinite
from viper.gp.kernels import covariance, log_prior, variances, weight_columns
from viper.inference.problem import Gaussian, cholesky
from viper.inference.rows import (
    BLOCK_ROWS,
    Arrays,
    Block,
    BlockSource,
    Dense,
    Mapped,
    RowFunction,
    RowSource,
    SourceWrapper,
    Sparse,
    join_blocks,
    product,
)
from viper.softplus.pointwise import Formula

LARGEST_JITTER = 1e-2  # relative to the mean variance of the inducing values; if more is needed, K is not a covariance
BLOCK_ROWS_GPU = 1 << 17
KEPT_FEATURES = 1 << 24  # most entries of A kept between passes (128 MB), along with what gradients need
KEPT_ROUGHLY = 1 << 28  # most entries of A kept in float32 (1 GB), where that is precise enough


SOFTENING = math.pi / 8.0  # coefficient of r in κ


class SparseGP(torch.nn.Module):
    """Kernel, mean function and inducing points, on standardised inputs in float64."""

    def __init__(self, kernel: Any, mean: Any, inducing: Tensor, learn_inducing: bool, jitter: float) -> None:
        super().__init__()
        self.kernel, self.mean = kernel, mean
        self.inducing = torch.nn.Parameter(inducing, requires_grad=learn_inducing)
        self.jitter = jitter

    @property
    def dimension(self) -> int:
        """The dimension of q: inducing points, and weights of the mean function that have a posterior."""
        return len(self.inducing) + weight_columns(self.mean, self.inducing[:1]).shape[1]

    @property
    def free(self) -> list[torch.nn.Parameter]:
        """The parameters to learn."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def free_vector(self) -> np.ndarray:
        """The parameters to learn, as one vector."""
        return flattened([parameter.detach() for parameter in self.free])

    def free_gradient(self) -> np.ndarray:
        """The gradients of these parameters as one vector; zero where there is none."""
        return flattened([torch.zeros_like(x) if x.grad is None else x.grad for x in self.free])

    def set_free(self, values: np.ndarray) -> None:
        """Set the parameters to learn from one vector."""
        with torch.no_grad():
            start = 0
            for parameter in self.free:
                part = torch.from_numpy(values[start : start + parameter.numel()])
                parameter.copy_(part.reshape(parameter.shape))
                start += parameter.numel()

    def copy(self) -> "SparseGP":
        """A copy with its own parameters; constraints and priors, which do not change, are shared."""
        fixed = (x for x in self.modules() if isinstance(x, Interval | Prior) and not any(True for _ in x.parameters()))
        return copy.deepcopy(self, {id(x): x for x in fixed})

    def copy_at(self, change: np.ndarray | float = 0.0) -> "SparseGP":
        """A copy with the parameters of kernel and mean changed by `change`, and its inducing points fixed."""
        other = self.copy()
        other.inducing.requires_grad_(False)
        other.set_free(other.free_vector() + change)
        return other

    def on(self, device: torch.device | str) -> "SparseGP":
        """The model on a device: itself, or a copy if it is elsewhere."""
        there = self.inducing.device == torch.device(device)
        return self if there else copy.deepcopy(self).to(device)

    def with_points(self, points: Tensor) -> "SparseGP":
        """A copy with other inducing points."""
        other = self.copy()
        other.inducing = torch.nn.Parameter(points.detach().clone(), requires_grad=self.inducing.requires_grad)
        return other

    def log_prior(self) -> Tensor | None:
        terms = [term for term in (log_prior(self.kernel), log_prior(self.mean)) if term is not None]
        return sum(terms[1:], terms[0]) if terms else None


def flattened(parts: list[Tensor]) -> np.ndarray:
    return torch.cat([x.reshape(-1) for x in parts]).cpu().numpy() if parts else np.zeros(0)


def cholesky_with_jitter(matrix: Tensor, jitter: float) -> tuple[Tensor, float]:
    """L with LLᵀ = K + j k̄ I, k̄ the mean of K's diagonal; j grows tenfold from `jitter` until L exists."""
    if not len(matrix):
        return matrix, jitter
    level = matrix.diagonal().mean()
    while jitter <= LARGEST_JITTER and bool(level > 0) and bool(matrix.isfinite().all()):
        raised = matrix.clone()
        raised.diagonal().add_(jitter * level)
        factor, info = torch.linalg.cholesky_ex(raised)
        if not int(info) and bool(factor.diagonal().isfinite().all()):
            return factor, jitter
        jitter = max(10.0 * jitter, 1e-12)
    raise NotPositiveDefinite(
        f"kernel must give a positive definite matrix at the inducing points; got one that is not finite, or not "
        f"positive definite even with a jitter of {LARGEST_JITTER} of its mean variance."
    )


# ---------------------------------------------------------------------------------------------------------------------
# Rows


@dataclass(frozen=True)
class Observations:
    """Observations in memory: inputs, labels in [0, 1], and optionally offset and weights."""

    inputs: Tensor
    label: Tensor
    _: KW_ONLY
    offset: Tensor | None = None
    weight: Tensor | None = None

    @classmethod
    def from_arrays(cls, rows: Arrays) -> "Observations":
        """The rows on the CPU in float64; a sparse matrix becomes dense."""
        here = lambda x: None if x is None else x.to("cpu", torch.float64)  # noqa: E731
        X, label = rows.dense_design().cpu().contiguous(), rows.label.to("cpu", torch.float64)
        return cls(X, label, offset=here(rows.offset), weight=here(rows.weight))

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, index: Any) -> "Observations":
        pick = lambda x: None if x is None else x[index]  # noqa: E731
        return Observations(self.inputs[index], self.label[index], offset=pick(self.offset), weight=pick(self.weight))

    def scatter(self, k: int, generator: np.random.Generator) -> "Observations":
        """About k rows: one at random from each of k equally long runs of rows."""
        index = np.floor((np.arange(k) + generator.random(k)) * (len(self) / k)).astype(np.int64)
        return self.take(torch.from_numpy(index).to(self.inputs.device))

    def on(self, device: torch.device | str) -> "Observations":
        """The rows on a device: themselves, or a copy if they are elsewhere."""
        if self.inputs.device == torch.device(device):
            return self
        there = lambda x: None if x is None else x.to(device)  # noqa: E731
        inputs, label = self.inputs.to(device), self.label.to(device)
        return Observations(inputs, label, offset=there(self.offset), weight=there(self.weight))

    def merged(self) -> "Observations":
        """Merge equal rows (add weights, average labels), sort them lexicographically, and drop rows of weight zero.

        The objective is the same, and the search for hyperparameters depends neither on the order of the rows nor on
        whether they are repeated or weighted.
        """
        X, y = self.inputs.numpy(), self.label.numpy()
        c = np.ones(len(X)) if self.weight is None else self.weight.numpy()
        kept = c > 0.0
        keys = X if self.offset is None else np.column_stack([X, self.offset.numpy()])
        keys, c, y = keys[kept], c[kept], y[kept]
        order = np.lexsort(keys.T[::-1])
        keys = keys[order]
        first = np.concatenate([[True], (keys[1:] != keys[:-1]).any(1)])
        group = np.cumsum(first) - 1
        total = np.bincount(group, c[order])
        share = np.bincount(group, c[order] * y[order]) / total
        unique = np.ascontiguousarray(keys[first])
        columns = X.shape[1]
        return Observations(
            torch.from_numpy(np.ascontiguousarray(unique[:, :columns])),
            torch.from_numpy(share),
            offset=None if self.offset is None else torch.from_numpy(unique[:, columns].copy()),
            weight=None if (total == 1.0).all() else torch.from_numpy(total),
        )

    def standardised(self, scaler: "Scaler", device: torch.device) -> "Observations":
        """The rows as inputs of kernel and mean, on `device`."""
        return replace(self, inputs=torch.from_numpy(scaler.apply(self.inputs.numpy()))).on(device)


@dataclass(frozen=True)
class Scaler:
    """x -> (x - centre)/scale; a constant column is only centred."""

    centre: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, rows: Observations, standardize: bool) -> "Scaler":
        X = rows.inputs.numpy()
        if not standardize:
            return cls(np.zeros(X.shape[1]), np.ones(X.shape[1]))
        c = None if rows.weight is None else rows.weight.numpy()
        centre, scale = column_moments(X, c)
        flat = scale <= 1e-12 * np.abs(X).max(0)
        return cls(centre, np.where(flat, 1.0, scale))

    def apply(self, X: np.ndarray) -> np.ndarray:
        return (X - self.centre) / self.scale

    def undo(self, X: np.ndarray) -> np.ndarray:
        return X * self.scale + self.centre


def block_rows_on(device: torch.device) -> int:
    return BLOCK_ROWS if device.type == "cpu" else BLOCK_ROWS_GPU


def blocks_on(device: torch.device, parts: list[Tensor]) -> list[Tensor]:
    """Values of all rows, given by block, on a device and in blocks of the size used there."""
    return parts if parts[0].device == device else list(torch.cat(parts).to(device).split(block_rows_on(device)))


class Features(BlockSource):
    """Rows in memory, projected on the inducing points: a source of blocks (A, o, r, y, c) for the solver.

    A is kept between passes if it is small enough, or kept in float32 if `rough`; otherwise each pass recomputes it.
    If `marginal`, residuals are integrated out, as in the module's docstring.
    """

    def __init__(
        self,
        model: SparseGP,
        rows: Observations,
        block_rows: int | None = None,
        rough: bool = False,
        marginal: bool = False,
    ) -> None:
        self.model, self.data, self.marginal = model, rows, marginal
        self.block_rows = block_rows or block_rows_on(rows.inputs.device)
        with torch.enable_grad():
            self.among = covariance(model.kernel, model.inducing, model.inducing)
        self.root, self.jitter = cholesky_with_jitter(self.among.detach(), model.jitter)
        eye = torch.eye(len(self.root), dtype=self.root.dtype, device=self.root.device)
        self.inverse = torch.linalg.solve_triangular(self.root, eye, upper=False)  # L⁻¹
        self.kept: list[tuple[tuple[Tensor, ...], Block]] | None = None
        self.kept_roughly: list[Block] | None = None
        if self.rows * self.dimension <= KEPT_FEATURES:
            with torch.enable_grad():
                self.kept = list(self.parts())
        elif rough and self.rows * self.dimension <= KEPT_ROUGHLY:
            with torch.no_grad():
                self.kept_roughly = [replace(block, design=block.design.single()) for _, block in self.parts()]

    @classmethod
    def of_no_rows(cls, model: SparseGP, device: torch.device | str = "cpu") -> "Features":
        """Features without rows of their own, for projecting others (`block_of`)."""
        there = model.on(device)
        nothing = there.inducing.detach().new_zeros
        return cls(there, Observations(nothing(0, there.inducing.shape[1]), nothing(0)))

    @property
    def rows(self) -> int:
        return len(self.data)

    @property
    def dimension(self) -> int:
        return self.model.dimension

    @property
    def device(self) -> torch.device:
        return self.root.device

    def blocks(self) -> Iterator[Block]:
        if self.kept is not None:
            yield from (block for _, block in self.kept)
            return
        if self.kept_roughly is not None:
            yield from self.kept_roughly
            return
        with torch.no_grad():
            for _, block in self.parts():
                yield block

    def sample(self, k: int, generator: np.random.Generator) -> "Features":
        return Features(self.model, self.data.scatter(k, generator), self.block_rows, marginal=self.marginal)

    def parts(self) -> Iterator[tuple[tuple[Tensor, ...], Block]]:
        """For each block, K_xz, diag K_xx, m(x) and B with their autograd graphs, and the resulting block."""
        for start in range(0, self.rows, self.block_rows):
            rows = self.data.take(slice(start, start + self.block_rows))
            made = self.evaluate(rows.inputs)
            yield made, self.block(rows, *(x.detach() for x in made))

    def graphs(self) -> Iterable[tuple[tuple[Tensor, ...], Block]]:
        """The same, kept from the start or recomputed."""
        return self.parts() if self.kept is None else self.kept

    def block_of(self, rows: Observations) -> Block:
        """Project any rows."""
        return self.block(rows, *self.evaluate(rows.inputs))

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kernel, mean = self.model.kernel, self.model.mean
        return covariance(kernel, x, self.model.inducing), variances(kernel, x), mean(x), weight_columns(mean, x)

    def block(self, rows: Observations, cross: Tensor, variance: Tensor, mean: Tensor, columns: Tensor) -> Block:
        # A = K_xz L⁻ᵀ
        design = product(cross, self.inverse.T)
        residual = (variance - design.square().sum(1)).clamp_(min=0.0)
        offset = mean
        if rows.offset is not None:  # (n,), or a column for each class
            offset = rows.offset + (mean if rows.offset.ndim == 1 else mean[:, None])
        if columns.shape[1]:
            design = torch.cat([design, columns], 1)
        if self.marginal:
            kappa = (1.0 + SOFTENING * residual).rsqrt()
            design, offset, residual = kappa[:, None] * design, kappa * offset, torch.zeros_like(residual)
        return Block(Dense(design), rows.label, offset=offset, residual=residual, weight=rows.weight)


class View(Protocol):
    """Projects a block of rows, on whatever device or worker they are."""

    @property
    def dimension(self) -> int: ...

    def __call__(self, block: Block) -> Block: ...


@dataclass(frozen=True)
class InducedView:
    """Projects a block of rows on the inducing points: (X, y, c, ...) -> (A, o, r, y, c)."""

    model: SparseGP
    scaler: Scaler
    kind: type[Features] = Features

    def __reduce__(self) -> Any:
        return InducedView, (self.model, self.scaler, self.kind)  # without the features, which hold autograd's graph

    @cached_property
    def features(self) -> Features:
        with torch.no_grad():
            return self.kind.of_no_rows(self.model)

    @property
    def dimension(self) -> int:
        return self.model.dimension

    def __call__(self, block: Block) -> Block:
        with torch.no_grad():
            return self.features.block_of(standardised_block(block, self.scaler))


def standardised_block(block: Block, scaler: Scaler) -> Observations:
    """The rows of a block as inputs of kernel and mean."""
    assert isinstance(block.design, Dense | Sparse)
    X = block.design.matrix
    inputs = torch.from_numpy(scaler.apply(X.double().numpy() if isinstance(X, Tensor) else X.toarray()))
    return Observations(inputs, block.label, offset=block.offset, weight=block.weight)


@dataclass(frozen=True)
class InducedSource(SourceWrapper):
    """The rows of any source, projected on the inducing points block by block, where the rows are."""

    source: RowSource
    view: View

    @property
    def dimension(self) -> int:
        return self.view.dimension

    def reduce(self, function: RowFunction) -> list[Tensor]:
        return self.source.reduce(partial(apply_to_view, view=self.view, function=function))

    def map(self, function: Callable[[Block], Mapped]) -> Iterator[Mapped]:
        return self.source.map(partial(apply_to_view, view=self.view, function=function))

    def apply(self, function: Callable[[Block], np.ndarray]) -> Any:
        return self.source.apply(partial(apply_to_view, view=self.view, function=function))

    def sample(self, k: int, generator: np.random.Generator) -> "InducedSource":
        return InducedSource(self.source.sample(k, generator), self.view)

    def in_memory(self) -> Arrays:
        return join_blocks(list(self.map(lambda block: block)))

    def head(self) -> Block:
        return self.view(self.source.head())


def apply_to_view(block: Block, view: View, function: Callable[[Block], Mapped]) -> Mapped:
    return function(view(block))


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


@dataclass(frozen=True)
class Sites:
    """q as a sum of contributions from each observation: Λ = I + Aᵀ diag(b) A and Λμ = Aᵀ t.

    At a nearby θ, the same sites give a q close to the best one.
    """

    precision: list[Tensor]  # b = c h, by block
    target: list[Tensor]  # t = c (y - g) + b Aμ

    def information(self) -> Tensor:
        """c h of each row."""
        return torch.cat(self.precision).clamp(min=0.0)

    def on(self, device: torch.device) -> "Sites":
        """The sites on a device, in blocks of the size used there."""
        return Sites(blocks_on(device, self.precision), blocks_on(device, self.target))

    def posterior(self, source: Features, diagonal: bool, scale: float = 1.0) -> Gaussian | None:
        """The q that these sites give with the features of another θ; None if Λ is not positive definite."""
        size = source.dimension
        gram, pulled = source.root.new_zeros(size, size), source.root.new_zeros(size)
        for block, b, t in zip(source.blocks(), self.precision, self.target, strict=True):
            gram += block.design.gram(b)
            pulled += block.design.pull(t)
        precision = gram * scale
        precision.diagonal().add_(1.0)
        root = cholesky(precision)
        if root is None:
            return None
        mean = torch.cholesky_solve(scale * pulled[:, None], root)[:, 0]
        return Gaussian(mean, precision.diagonal().clone()) if diagonal else Gaussian(mean, precision, root)


class ChainRule:
    """Carries derivatives in A, diag K_xx and m(x) back to the free parameters, block by block."""

    def __init__(self, source: Features) -> None:
        self.source, self.inner = source, torch.zeros_like(source.inverse)

    def block(self, made: tuple[Tensor, ...], design: Tensor, slope: Tensor, to_variance: Tensor, e: Tensor) -> None:
        """Backpropagate ∂F/∂A, ∂F/∂(diag K_xx) and ∂F/∂m(x) of a block; `finish` takes what goes through L."""
        inverse = self.source.inverse
        points = len(inverse)
        induced, columns = slope[:, :points], slope[:, points:]
        self.inner += product(induced.T, design[:, :points])
        pull_back(made, (product(induced, inverse), to_variance, e, columns))

    def finish(self) -> None:
        """Through L: ∂F/∂K_zz = L⁻ᵀ sym Φ(-(∂F/∂A)ᵀA) L⁻¹; Φ takes the lower triangle and halves its diagonal."""
        source = self.source
        if source.among.requires_grad:
            lower = torch.tril(-self.inner)
            lower.diagonal().mul_(0.5)
            slope = 0.5 * source.inverse.T @ (lower + lower.T) @ source.inverse
            # the jitter is a multiple of the mean of the diagonal
            slope.diagonal().add_(source.jitter * slope.diagonal().mean())
            source.among.backward(slope)


def backward(
    source: Features, q: Gaussian, factor: Tensor, moments: Formula, scale: float = 1.0
) -> tuple[float, Sites]:
    """Add ∂F/∂θ at q to the gradients of the free parameters; return the likelihood part of F and the sites of q."""
    mean, points = q.mean, len(source.inverse)
    # Σ - J, where J is the identity for the inducing points, because r depends on their columns of A, and 0 for others
    excess = factor @ factor.T if factor.ndim == 2 else torch.diag(factor)
    if not source.marginal:
        excess.diagonal()[:points].sub_(1.0)
    sites, chain = Sites([], []), ChainRule(source)
    value = 0.0
    with torch.enable_grad():
        for made, block in source.graphs():
            assert isinstance(block.design, Dense)
            design, offset, residual = block.design.matrix, block.offset, block.residual
            assert offset is not None
            assert residual is not None
            shift = product(design, mean)
            twisted = product(design, excess)
            squares = design[:, :points].square().sum(1)
            # τ² = r + diag(AΣAᵀ)
            tau2 = (twisted * design).sum(1).add_(0.0 if source.marginal else squares).clamp_(min=0.0).add_(residual)
            eta, g, h = moments(shift + offset, tau2)
            gain = block.label * (shift + offset) - eta
            weight = scale if block.weight is None else scale * block.weight
            value += float((weight * gain).sum())
            e, b = weight * (block.label - g), weight * h
            sites.precision.append(b / scale)
            sites.target.append((e + b * shift) / scale)
            # ∂F/∂A = e μᵀ - diag(b) A(Σ - J)
            slope = torch.outer(e, mean).sub_(b[:, None] * twisted)
            to_variance = -0.5 * b
            if source.marginal:
                kappa = kappa_of(squares, made[1].detach())
                to_variance = slope_in_residual(kappa, e, b, shift + offset, tau2)
                design, e, slope = design / kappa[:, None], kappa * e, slope.mul_(kappa[:, None])
                slope[:, :points].sub_(2.0 * to_variance[:, None] * design[:, :points])
            chain.block(made, design, slope, to_variance, e)
        chain.finish()
    return value, sites


def kappa_of(squares: Any, variance: Any) -> Any:
    """κ = (1 + πr/8)^{-1/2} from Σ_j κ²A_ij² and K_ii; r = K_ii - Σ_j A_ij²."""
    return ((1.0 + SOFTENING * squares) / (1.0 + SOFTENING * variance.clip(squares))) ** 0.5


def slope_in_residual(kappa: Any, e: Any, b: Any, theta: Any, tau2: Any) -> Any:
    """∂F/∂r = ∂F/∂κ dκ/dr, where κ scales both ϑ and τ: κ ∂F/∂κ = e ϑ - b τ²."""
    return -0.5 * SOFTENING * kappa**2 * (e * theta - b * tau2)


def pull_back(made: tuple[Tensor, ...], slopes: tuple[Tensor, ...]) -> None:
    """Backpropagate through K_xz, diag K_xx, m(x) and B, where these depend on free parameters."""
    pairs = [(x, slope) for x, slope in zip(made, slopes, strict=True) if x.requires_grad]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [slope for _, slope in pairs])
