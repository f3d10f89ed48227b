"""The sparse Gaussian process as rows of the one solver, and the gradient of its ELBO in everything else.

With inducing points z, K_zz = LLᵀ and whitened values w (u = m(z) + Lw, prior N(0, I)), observation i sees

    A = K_xz L⁻ᵀ,      o = m(x) + the user's offset,      r = diag K_xx - rowsum(A²).

For given q(w) = N(μ, Σ), kernel, mean and z act on F only through ϑ = o + Aμ and τ² = r + diag(AΣAᵀ):

    dF = Σ_i c_i [(y_i - g_i) dϑ_i - ½ h_i dτ_i²],

which at the best q is also the gradient of the profile G(θ) = max_q F(q; θ) (envelope theorem).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.sparse
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from viper.gp.kernels import covariance, log_prior, variances
from viper.inference.problem import Gaussian, cholesky
from viper.inference.rows import BLOCK_ROWS, Block, BlockSource, Dense, product
from viper.softplus.pointwise import Formula

LARGEST_JITTER = 1e-2  # relative to the mean variance of the inducing values; what needs more is no covariance
BLOCK_ROWS_GPU = 1 << 17
KEPT_FEATURES = 1 << 24  # entries of A that are kept between passes (128 MB), with all that gradients need
KEPT_ROUGHLY = 1 << 28  # entries of A that are kept in float32 (1 GB), where that is enough


class NotPositiveDefinite(ValueError):
    """K_zz has no Cholesky factor, even with the largest jitter."""


class SparseGP(torch.nn.Module):
    """Kernel, mean function and inducing points, on standardised inputs in float64."""

    def __init__(self, kernel: Any, mean: Any, inducing: Tensor, learn_inducing: bool, jitter: float) -> None:
        super().__init__()
        self.kernel, self.mean = kernel, mean
        self.inducing = torch.nn.Parameter(inducing, requires_grad=learn_inducing)
        self.jitter = jitter

    @property
    def free(self) -> list[torch.nn.Parameter]:
        """The parameters to learn."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def log_prior(self) -> Tensor | None:
        terms = [term for term in (log_prior(self.kernel), log_prior(self.mean)) if term is not None]
        return sum(terms[1:], terms[0]) if terms else None


def root_with_jitter(matrix: Tensor, jitter: float) -> tuple[Tensor, float]:
    """L with LLᵀ = K + j k̄ I, k̄ the mean of K's diagonal; j grows tenfold from `jitter` until there is an L."""
    level = matrix.diagonal().mean()
    while jitter <= LARGEST_JITTER and bool(level > 0) and bool(matrix.isfinite().all()):
        raised = matrix.clone()
        raised.diagonal().add_(jitter * level)
        factor, info = torch.linalg.cholesky_ex(raised)
        if not int(info) and bool(factor.diagonal().isfinite().all()):
            return factor, jitter
        jitter = max(10.0 * jitter, 1e-12)
    raise NotPositiveDefinite(
        f"kernel must give a positive definite matrix at the inducing points; got one that is not, with a "
        f"jitter of {LARGEST_JITTER} of its mean variance, or that is not finite."
    )


@dataclass(frozen=True)
class Rows:
    """What was observed: standardised inputs, labels in [0, 1], and optionally offset and weights."""

    inputs: Tensor
    label: Tensor
    offset: Tensor | None = field(default=None, kw_only=True)
    weight: Tensor | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, index: Any) -> "Rows":
        pick = lambda x: None if x is None else x[index]  # noqa: E731
        return Rows(self.inputs[index], self.label[index], offset=pick(self.offset), weight=pick(self.weight))

    def scatter(self, k: int, generator: np.random.Generator) -> "Rows":
        """About k rows, one at random from each of k equal runs."""
        index = np.floor((np.arange(k) + generator.random(k)) * (len(self) / k)).astype(np.int64)
        return self.take(torch.from_numpy(index).to(self.inputs.device))


class Features(BlockSource):
    """The rows seen through the inducing points: a source of blocks (A, o, r, y, c) for the solver.

    A is kept between passes if it is not too large; beyond, in float32 if `rough`, or each pass makes it anew.
    """

    def __init__(self, model: SparseGP, rows: Rows, block_rows: int | None = None, rough: bool = False) -> None:
        self.model, self.data = model, rows
        self.block_rows = block_rows or (BLOCK_ROWS if rows.inputs.device.type == "cpu" else BLOCK_ROWS_GPU)
        with torch.enable_grad():
            self.among = covariance(model.kernel, model.inducing, model.inducing)
        self.root, self.jitter = root_with_jitter(self.among.detach(), model.jitter)
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

    @property
    def rows(self) -> int:
        return len(self.data)

    @property
    def dimension(self) -> int:
        return len(self.root)

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
        return Features(self.model, self.data.scatter(k, generator), self.block_rows)

    def parts(self) -> Iterator[tuple[tuple[Tensor, ...], Block]]:
        """K_xz, diag K_xx and m(x) as autograd sees them, and the block they make, block by block."""
        for start in range(0, self.rows, self.block_rows):
            rows = self.data.take(slice(start, start + self.block_rows))
            made = self.evaluate(rows.inputs)
            yield made, self.block(rows, *(x.detach() for x in made))

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kernel, mean = self.model.kernel, self.model.mean
        return covariance(kernel, x, self.model.inducing), variances(kernel, x), mean(x)

    def block(self, rows: Rows, cross: Tensor, variance: Tensor, mean: Tensor) -> Block:
        # A = K_xz L⁻ᵀ
        design = product(cross, self.inverse.T)
        residual = (variance - design.square().sum(1)).clamp_(min=0.0)
        offset = mean if rows.offset is None else mean + rows.offset
        return Block(Dense(design), rows.label, offset=offset, residual=residual, weight=rows.weight)


@dataclass(frozen=True)
class Sites:
    """q as each observation's contribution to it: Λ = I + Aᵀ diag(b) A and Λμ = Aᵀ t; good at neighbouring θ too."""

    precision: list[Tensor]  # b = c h, by block
    target: list[Tensor]  # t = c (y - g) + b Aμ

    def posterior(self, source: Features, diagonal: bool, scale: float = 1.0) -> Gaussian | None:
        """The q these sites make with the features of another θ; None if that is no distribution."""
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


def backward(
    source: Features, q: Gaussian, factor: Tensor, moments: Formula, scale: float = 1.0
) -> tuple[float, Sites]:
    """Add ∂F/∂θ at q to the gradients of the model's free parameters; the likelihood part of F, and q's sites."""
    mean, inverse = q.mean, source.inverse
    # Σ - I
    excess = factor @ factor.T if factor.ndim == 2 else torch.diag(factor)
    excess.diagonal().sub_(1.0)
    inner = torch.zeros_like(excess)
    sites = Sites([], [])
    value = 0.0
    with torch.enable_grad():
        for made, block in source.kept if source.kept is not None else source.parts():
            assert isinstance(block.design, Dense)
            design, offset, residual = block.design.matrix, block.offset, block.residual
            assert offset is not None
            assert residual is not None
            shift = product(design, mean)
            twisted = product(design, excess)
            # τ² = r + diag(AΣAᵀ)
            tau2 = ((twisted + design) * design).sum(1).clamp_(min=0.0).add_(residual)
            eta, g, h = moments(shift + offset, tau2)
            gain = block.label * (shift + offset) - eta
            weight = scale if block.weight is None else scale * block.weight
            value += float((weight * gain).sum())
            e, b = weight * (block.label - g), weight * h
            sites.precision.append(b / scale)
            sites.target.append((e + b * shift) / scale)
            # ∂F/∂A = e μᵀ - diag(b) A(Σ - I)
            slope = torch.outer(e, mean).sub_(b[:, None] * twisted)
            inner += product(slope.T, design)
            pull_back(made, (product(slope, inverse), -0.5 * b, e))
        if source.among.requires_grad:
            # through L: ∂F/∂K_zz = L⁻ᵀ sym Φ(-(∂F/∂A)ᵀA) L⁻¹, Φ the lower triangle with half its diagonal
            lower = torch.tril(-inner)
            lower.diagonal().mul_(0.5)
            slope = 0.5 * inverse.T @ (lower + lower.T) @ inverse
            # the jitter is a multiple of the mean of the diagonal
            slope.diagonal().add_(source.jitter * slope.diagonal().mean())
            source.among.backward(slope)
    return value, sites


def pull_back(made: tuple[Tensor, ...], slopes: tuple[Tensor, ...]) -> None:
    """Continue the gradient from K_xz, diag K_xx and m(x), those of them that depend on free parameters."""
    pairs = [(x, slope) for x, slope in zip(made, slopes, strict=True) if x.requires_grad]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [slope for _, slope in pairs])


def expand(model: SparseGP, values: np.ndarray) -> None:
    """Set the free parameters from one vector."""
    with torch.no_grad():
        start = 0
        for parameter in model.free:
            part = torch.from_numpy(values[start : start + parameter.numel()])
            parameter.copy_(part.reshape(parameter.shape))
            start += parameter.numel()


def flatten(model: SparseGP, gradient: bool = False) -> np.ndarray:
    """The free parameters, or their gradients, as one vector."""
    parts = []
    for parameter in model.free:
        x = parameter.grad if gradient else parameter
        parts.append(torch.zeros_like(parameter) if x is None else x.detach())
    return torch.cat([x.reshape(-1) for x in parts]).cpu().numpy() if parts else np.zeros(0)


def dense(X: Any) -> np.ndarray:
    """X as a float64 NumPy array; sparse matrices are made dense."""
    if scipy.sparse.issparse(X):
        X = X.toarray()
    return np.ascontiguousarray(X.detach().cpu().numpy() if isinstance(X, Tensor) else X, dtype=np.float64)


def merge(
    X: np.ndarray, label: Tensor, offset: Tensor | None, weight: Tensor | None
) -> tuple[np.ndarray, Tensor, Tensor | None, Tensor | None]:
    """Equal rows as one with their weights added and labels averaged, in lexicographic order; none of weight zero.

    The objective is the same, and neither the order of the rows nor whether they are repeated or weighted leads the
    search for hyperparameters elsewhere.
    """
    c = np.ones(len(X)) if weight is None else weight.numpy()
    kept = c > 0.0
    keys = X if offset is None else np.column_stack([X, offset.numpy()])
    keys, c, y = keys[kept], c[kept], label.numpy().astype(np.float64)[kept]
    order = np.lexsort(keys.T[::-1])
    keys = keys[order]
    first = np.concatenate([[True], (keys[1:] != keys[:-1]).any(1)])
    group = np.cumsum(first) - 1
    total = np.bincount(group, c[order])
    share = np.bincount(group, c[order] * y[order]) / total
    unique = np.ascontiguousarray(keys[first])
    columns = X.shape[1]
    return (
        np.ascontiguousarray(unique[:, :columns]),
        torch.from_numpy(share),
        None if offset is None else torch.from_numpy(unique[:, columns].copy()),
        None if (total == 1.0).all() else torch.from_numpy(total),
    )


@dataclass(frozen=True)
class Scaler:
    """x -> (x - centre)/scale; a constant column is only centred."""

    centre: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, X: np.ndarray, weight: Tensor | None, standardize: bool) -> "Scaler":
        if not standardize:
            return cls(np.zeros(X.shape[1]), np.ones(X.shape[1]))
        c = None if weight is None else weight.numpy()
        centre = np.average(X, axis=0, weights=c)
        scale = np.sqrt(np.average((X - centre) ** 2, axis=0, weights=c))
        flat = scale <= 1e-12 * np.maximum(np.abs(X).max(0), np.finfo(float).tiny)
        return cls(centre, np.where(flat, 1.0, scale))

    def apply(self, X: np.ndarray) -> np.ndarray:
        return (X - self.centre) / self.scale


def k_means(rows: Rows, count: int, seed: int) -> Tensor:
    """Centres of `count` clusters of the (weighted) rows; of a sample of them where they are many."""
    inputs = rows.inputs.cpu().numpy()
    weight = None if rows.weight is None else rows.weight.cpu().numpy()
    if len(inputs) > 100 * count:
        index = np.sort(np.random.default_rng(seed).choice(len(inputs), 100 * count, replace=False))
        inputs, weight = inputs[index], None if weight is None else weight[index]
    found = KMeans(count, n_init=1, max_iter=20, random_state=seed).fit(inputs, sample_weight=weight)
    return torch.from_numpy(np.asarray(found.cluster_centers_, dtype=np.float64)).to(rows.inputs)


def random_rows(rows: Rows, count: int, seed: int) -> Tensor:
    index = np.random.default_rng(seed).choice(len(rows), count, replace=False)
    return rows.inputs[torch.from_numpy(index).to(rows.inputs.device)].clone()


def read_inducing(value: Any, columns: int) -> np.ndarray:
    """Inducing points given as an array, one per row, in the units of X."""
    points = np.asarray(value, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != columns or not len(points):
        raise ValueError(f"inducing points must have shape (M, {columns}), M >= 1; got {points.shape}.")
    if not np.isfinite(points).all():
        raise ValueError("inducing points must be finite; got NaN or infinity.")
    return points
