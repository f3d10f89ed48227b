"""Where the search begins: models to climb from, and inducing points.

The profile has many local optima: the mean function may take all the signal, or the kernel may act on one group of
columns and miss another. A screen scores groups of columns by what a kernel on them alone would gain over the mean
function. The best few groups that do not repeat each other become starts, and so do several lengthscales for all
columns.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.means import ConstantMean, LinearMean
from sklearn.cluster import KMeans
from torch import Tensor

from viper.gp.kernels import UncertainMean, covariance, stationary_shape, variances
from viper.gp.model import Observations, SparseGP

AS_GIVEN = "as given"  # name of the start that leaves the model as it is
LONG = 10.0  # lengthscale of a column outside the group: its effect is nearly linear
FACTORS = (0.5, 2.0, 1.0, 0.25, 4.0)  # plain lengthscales, as multiples of √p
# For the screen:
SCREEN_ROWS = 2000
SCREEN_POINTS, FEW_SCREEN_POINTS = 60, 24  # inducing points if several groups are wanted, or one
LENGTHS = (0.5, 1.0, 2.0)  # lengthscales on standardised columns, as multiples of √(size of the group)
SCALES = torch.logspace(-1.0, 2.5, 8, dtype=torch.float64)
BEAM = 3  # groups that are extended in each round
WIDTH = 16  # best columns, which may be added to groups
DEPTH = 4  # most columns in a group, unless it has all
RIDGE = 1e-2  # keeps coefficients finite if the data are separable


@dataclass
class Candidate:
    """A model to climb from; with `mean_last` the mean function stays fixed at first."""

    name: str
    model: SparseGP
    mean_last: bool = False


def candidates(model: SparseGP, rows: Observations, count: int, generator: np.random.Generator) -> Iterator[Candidate]:
    """Up to `count` models to climb from: those that the screen finds, the model as given, then other lengthscales."""
    if count == 1 or not model.free:
        yield Candidate(AS_GIVEN, model)
        return
    screened = 0
    if can_screen(model):
        coefficients, _ = null_model(model, rows)
        for candidate in screened_models(model, rows, max(1, count - 2), generator):
            set_mean(candidate.model.mean, coefficients)
            screened += 1
            yield candidate
    mean_last = not isinstance(model.mean, UncertainMean)
    yield Candidate(AS_GIVEN, model.copy(), mean_last)
    if not any(learns_lengthscale(module) for module in model.kernel.modules()):
        return
    root = math.sqrt(rows.inputs.shape[1])
    for factor in FACTORS[: max(0, count - screened - 1)]:
        other = model.copy()
        for module in other.kernel.modules():
            if learns_lengthscale(module):
                module.initialize(lengthscale=torch.full_like(module.lengthscale, factor * root))
        yield Candidate(f"lengthscale {factor:g}√p", other)


def learns_lengthscale(module: Any) -> bool:
    return getattr(module, "has_lengthscale", False) and module.raw_lengthscale.requires_grad


def can_screen(model: SparseGP) -> bool:
    kernel = model.kernel
    if stationary_shape(kernel) is None:
        return False
    return learns_lengthscale(kernel.base_kernel) and bool(kernel.raw_outputscale.requires_grad)


def screened_models(
    model: SparseGP, rows: Observations, count: int, generator: np.random.Generator
) -> Iterator[Candidate]:
    """A start for each of the best groups: short lengthscales on its columns, long ones on all others."""
    shape = stationary_shape(model.kernel)
    assert shape is not None
    few = rows if len(rows) <= SCREEN_ROWS else rows.scatter(SCREEN_ROWS, generator)
    _, information = null_model(model, few)
    most = SCREEN_POINTS if count > 1 else FEW_SCREEN_POINTS
    points = greedy(model, few.inputs, information, min(most, len(few)))
    screen = Screen(few, points, model.mean, shape)
    everything = tuple(range(few.inputs.shape[1]))
    shared = model.kernel.base_kernel.lengthscale.numel() == 1
    for group in [screen.best(everything)] if shared else distinct_groups(screen.groups(count > 1), count):
        other = model.copy()
        length = torch.full_like(other.kernel.base_kernel.lengthscale, LONG)
        own = group.length * math.sqrt(len(group.columns))
        length[0, 0 if shared else list(group.columns)] = own
        other.kernel.base_kernel.initialize(lengthscale=length)
        other.kernel.initialize(outputscale=torch.full_like(other.kernel.outputscale, group.scale))
        name = "all" if len(group.columns) == rows.inputs.shape[1] else ", ".join(map(str, group.columns))
        yield Candidate(f"columns {name}", other)


def set_mean(mean: Any, coefficients: Tensor) -> None:
    if type(mean) is LinearMean and mean.weights.requires_grad:
        mean.initialize(weights=coefficients[:-1, None], bias=coefficients[-1:])
    elif type(mean) is ConstantMean and mean.raw_constant.requires_grad:
        mean.initialize(constant=coefficients[0])


# ---------------------------------------------------------------------------------------------------------------------
# The mean function alone


def mean_columns(mean: Any, inputs: Tensor) -> Tensor:
    """The columns that a named mean function combines linearly: [X, 1], [1] or none."""
    if isinstance(mean, UncertainMean):
        return mean.columns(inputs).detach()
    ones = torch.ones_like(inputs[:, :1])
    if type(mean) is LinearMean:
        return torch.cat([inputs, ones], 1)
    return ones if type(mean) is ConstantMean else ones[:, :0]


def best_mean(basis: Tensor, rows: Observations, ridge: float) -> tuple[Tensor, Tensor]:
    """Ridge logistic regression on the mean's columns by Newton's method: coefficients and probabilities."""
    weight = 1.0 if rows.weight is None else rows.weight
    offset = 0.0 if rows.offset is None else rows.offset
    beta = torch.zeros_like(basis[0])
    for _ in range(15 if len(beta) else 0):
        s = torch.sigmoid(offset + basis @ beta)
        curvature = (basis * (weight * s * (1.0 - s))[:, None]).T @ basis
        curvature.diagonal().add_(ridge)
        step = torch.linalg.solve(curvature, basis.T @ (weight * (rows.label - s)) - ridge * beta)
        beta = beta + step
        if float(step.abs().max()) < 1e-6:
            break
    return beta, torch.sigmoid(offset + basis @ beta)


def ridge_of(mean: Any) -> float:
    """The prior precision of the weights of a mean function, if it has one."""
    return 1.0 if isinstance(mean, UncertainMean) else RIDGE


def null_model(model: SparseGP, rows: Observations) -> tuple[Tensor, Tensor]:
    """The mean function alone: its best coefficients, and each row's information c s(1-s) there."""
    coefficients, s = best_mean(mean_columns(model.mean, rows.inputs), rows, ridge_of(model.mean))
    information = s * (1.0 - s)
    return coefficients, information if rows.weight is None else rows.weight * information


# ---------------------------------------------------------------------------------------------------------------------
# The screen


class Group(NamedTuple):
    """Columns for a kernel to act on, what it would gain, and its best output scale and lengthscale."""

    gain: float
    columns: tuple[int, ...]
    scale: float
    length: float


class Screen:
    """Scores groups of columns by the gain over the mean function alone, to second order in f.

    Let H be the information of the mean function alone and e its residuals. A kernel K ≈ sBBᵀ gains

        ½ [s rᵀB' (I + s B'ᵀB')⁻¹ B'ᵀr - log |I + s B'ᵀB'|],

    where B' = H^{1/2}B and r = H^{-1/2}e are made orthogonal to the columns of the mean function.
    """

    def __init__(self, rows: Observations, inducing: Tensor, mean: Any, shape: Callable[..., Any]) -> None:
        self.inputs, self.shape = rows.inputs, shape
        self.points = inducing
        self.basis = mean_columns(mean, rows.inputs)
        _, s = best_mean(self.basis, rows, ridge_of(mean))
        weight = 1.0 if rows.weight is None else rows.weight
        # H^{1/2} and H^{-1/2} e, orthogonal to the mean's columns
        self.root = (weight * s * (1.0 - s)).clamp(min=1e-8).sqrt()
        self.span = torch.linalg.qr(self.basis * self.root[:, None]).Q
        self.residual = self.outside((weight * (rows.label - s) / self.root)[:, None])[:, 0]

    def outside(self, x: Tensor) -> Tensor:
        return x - self.span @ (self.span.T @ x)

    def gain(self, columns: tuple[int, ...], length: float) -> Group:
        pick = list(columns)
        ell = length * math.sqrt(len(pick))
        u, v = self.inputs[:, pick] / ell, self.points[:, pick] / ell
        among = self.shape(torch.cdist(v, v).square())[0]
        among.diagonal().add_(1e-6)
        cross = self.shape(torch.cdist(u, v, compute_mode="use_mm_for_euclid_dist").square())[0]
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(among), cross.T, upper=False).T
        half = self.outside(half * self.root[:, None])
        values, vectors = torch.linalg.eigh(half.T @ half)
        along = (vectors.T @ (half.T @ self.residual)).square()
        scales = SCALES.to(values)[:, None]
        grown = scales * values.clamp(min=0.0)
        gains = 0.5 * (scales * along / (1.0 + grown) - torch.log1p(grown)).sum(1)
        best = int(gains.argmax())
        return Group(float(gains[best]), columns, float(SCALES[best]), length)

    def best(self, columns: tuple[int, ...], lengths: tuple[float, ...] = LENGTHS) -> Group:
        return max(self.gain(columns, length) for length in lengths)

    def groups(self, several: bool) -> list[Group]:
        """Single columns, all columns, and groups grown from the best single ones, in order of gain.

        Without `several`, only one good group is wanted, and about a quarter as many are scored.
        """
        lengths, beam = (LENGTHS, BEAM) if several else (LENGTHS[1:2], 1)
        count = self.inputs.shape[1]
        singles = sorted((self.best((j,), lengths) for j in range(count)), reverse=True)
        useful = [group.columns[0] for group in singles[:WIDTH]]
        found = {group.columns: group for group in singles}
        everything = tuple(range(count))
        if everything not in found:
            found[everything] = self.best(everything)
        front = singles[:beam]
        for _ in range(1, min(DEPTH, count - 1)):
            wider = {tuple(sorted({*group.columns, j})) for group in front for j in useful if j not in group.columns}
            scored = sorted((self.best(columns, lengths[:2]) for columns in sorted(wider - set(found))), reverse=True)
            found |= {group.columns: group for group in scored}
            if not scored or scored[0].gain < front[0].gain:
                break
            front = scored[:beam]
        return sorted(found.values(), reverse=True)


def distinct_groups(groups: list[Group], count: int) -> list[Group]:
    """The best groups, without those that share at least half of their joint columns with a better one."""
    chosen: list[Group] = []
    for group in groups:
        mine = set(group.columns)
        alike = (len(mine & set(o.columns)) / len(mine | set(o.columns)) for o in chosen)
        if len(chosen) < count and all(x < 0.5 for x in alike):
            chosen.append(group)
    return chosen


# ---------------------------------------------------------------------------------------------------------------------
# Inducing points


def inducing_points(rows: Observations, count: int, word: str, seed: int) -> Tensor:
    """The `count` points to start from; for "greedy", placeholders until a start's kernel is known (`greedy`)."""
    if word == "kmeans":
        return k_means(rows, count, seed)
    if word == "greedy":
        return rows.inputs[:count].clone()
    index = np.random.default_rng(seed).choice(len(rows), count, replace=False)
    return rows.inputs[torch.from_numpy(index).to(rows.inputs.device)].clone()


def k_means(rows: Observations, count: int, seed: int) -> Tensor:
    """Centres of `count` clusters of the (weighted) rows, or of a sample if there are many rows."""
    inputs = rows.inputs.cpu().numpy()
    weight = None if rows.weight is None else rows.weight.cpu().numpy()
    if len(inputs) > 100 * count:
        index = np.sort(np.random.default_rng(seed).choice(len(inputs), 100 * count, replace=False))
        inputs, weight = inputs[index], None if weight is None else weight[index]
    found = KMeans(count, n_init=1, max_iter=20, random_state=seed).fit(inputs, sample_weight=weight)
    return torch.from_numpy(np.asarray(found.cluster_centers_, dtype=np.float64)).to(rows.inputs)


def read_inducing(value: Any, columns: int) -> np.ndarray:
    """Inducing points given as an array, one per row, in the units of X."""
    points = np.asarray(value, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != columns or not len(points):
        raise ValueError(f"inducing points must have shape (M, {columns}), M >= 1; got {points.shape}.")
    if not np.isfinite(points).all():
        raise ValueError("inducing points must be finite; got NaN or infinity.")
    return points


def greedy(
    model: SparseGP,
    inputs: Tensor,
    information: Tensor,
    count: int,
    loss: float = -1.0,
    explained: Tensor | None = None,
) -> Tensor:
    """Up to `count` rows chosen one by one, each where its information h times its unexplained variance r is largest.

    This is the pivoted Cholesky decomposition of H^{1/2} K H^{1/2}. It stops when ½ Σ h r is at most `loss`. To
    continue from existing points, pass the rows' A for these as `explained`.
    """
    root = information.clamp(min=1e-12).sqrt()
    with torch.no_grad():
        column_of = kernel_columns(model.kernel, inputs)
        known = inputs.new_zeros(count, len(inputs))
        known = known if explained is None else torch.cat([(root[:, None] * explained).T, known])
        left = (variances(model.kernel, inputs) * information - known.square().sum(0)).clamp_(min=0.0)
        chosen: list[int] = []
        for k in range(len(known) - count, len(known)):
            i = int(left.argmax())
            chosen.append(i)
            row = torch.mul(column_of(i), root, out=known[k]).mul_(root[i])
            row.sub_(known[:k, i] @ known[:k]).div_(left[i].clamp(min=1e-12).sqrt())
            left.addcmul_(row, row, value=-1.0).clamp_(min=0.0)[i] = 0.0
            if loss >= 0.0 and 0.5 * float(left.sum()) <= loss:
                break
            left[i] = -1.0
    return inputs[chosen]


def kernel_columns(kernel: Any, inputs: Tensor) -> Callable[[int], Tensor]:
    """i -> column i of K_xx."""
    shape = stationary_shape(kernel)
    if shape is None:
        return lambda i: covariance(kernel, inputs, inputs[i : i + 1])[:, 0]
    u, scale = inputs / kernel.base_kernel.lengthscale, kernel.outputscale
    return lambda i: scale * shape((u - u[i]).square_().sum(1))[0]
