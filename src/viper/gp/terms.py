"""The posterior of each term of an additive Gaussian process, exactly from q.

f = Σ_t f_t, and every f_t is jointly Gaussian with the inducing values. With K_zz = LLᵀ and A_t = k_t(x, z) L⁻ᵀ,
f_t is A_t w plus a part independent of w, so under q its mean is A_t μ and its covariance

    k_t(x, x') - A_t A_t'ᵀ + A_t Σ A_t'ᵀ.

The data identify only the sum of the terms: constants can move between terms, and main effects into pairs. Averages
over the rows, with columns treated as independent, make effects unique: the effect of a column is the average of f over
all other columns, less its own average; the effect of a pair is what its term adds to the effects of its two columns.
Every effect therefore averages to zero along each of its columns. Weights of a linear mean belong to the effects of
their columns. All effects are linear in f, hence Gaussian.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.gp.additive import AdditiveKernel, KernelTerm, decay
from viper.gp.kernels import weight_columns
from viper.gp.model import Features, Scaler, SparseGP
from viper.inference.posterior import Posterior

AVERAGED = 400  # rows over which effects are averaged
FEW = 6  # a column with at most this many distinct values is shown value by value
TAIL = 0.01  # share of a column's values left out at each end of its curve


class TermEffect(NamedTuple):
    """What one column, or a pair of columns, adds to the log-odds: posterior mean and interval of the effect.

    `values` has an array for each column, in the units of X. For a pair, all others are matrices: first column by
    second.
    """

    columns: tuple[str, ...]
    values: tuple[np.ndarray, ...]
    mean: np.ndarray
    sd: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    @property
    def name(self) -> str:
        return ":".join(self.columns)


class Centred(NamedTuple):
    """φ of one column of a term, between some values v, the inducing points z and all rows x."""

    cross: Tensor  # φ(v, z) less its average over the rows
    among: Tensor  # the diagonal of φ(v, v) with both arguments centred
    mean_cross: Tensor  # the average of φ(x, z) over the rows
    mean_among: Tensor  # the average of φ(x, x') over all pairs of rows


def centred(values: Tensor, data: Tensor, points: Tensor, lengthscale: Tensor) -> Centred:
    """φ and its averages over the rows `data`, for one column."""
    mean_cross = decay(data, points, lengthscale).mean(0)
    within = decay(data, data, lengthscale)
    toward = decay(values, data, lengthscale).mean(1)
    among = 1.0 - 2.0 * toward + within.mean()
    return Centred(decay(values, points, lengthscale) - mean_cross, among, mean_cross, within.mean())


class TermEffects:
    """Effects of the terms of a fitted model, averaged over rows on the scale of the kernel."""

    def __init__(self, model: SparseGP, posterior: Posterior, scaler: Scaler, rows: np.ndarray, z: float) -> None:
        assert isinstance(model.kernel, AdditiveKernel)
        self.model, self.posterior, self.scaler, self.rows, self.z = model, posterior, scaler, rows, z
        with torch.no_grad():
            self.features = Features.of_no_rows(model)
            self.lengthscales, self.scales = model.kernel.lengthscales, model.kernel.outputscales
            few = rows[np.unique(np.linspace(0, len(rows) - 1, min(AVERAGED, len(rows))).astype(int))]
            self.data, self.points = torch.from_numpy(scaler.apply(few)), model.inducing.detach()

    def part(self, term: KernelTerm, j: int, values: Tensor) -> Centred:
        """φ of column j in a term."""
        length = self.lengthscales[term.places[term.columns.index(j)]]
        return centred(values, self.data[:, j], self.points[:, j], length)

    def of_column(self, j: int, name: str, count: int) -> TermEffect:
        values = self.grid(j, count)
        inputs = self.scaled(j, values)
        cross, variance = torch.zeros(len(inputs), len(self.points), dtype=inputs.dtype), torch.zeros_like(inputs)
        for term, s in zip(self.model.kernel.terms, self.scales, strict=True):
            if j not in term.columns:
                continue
            own = self.part(term, j, inputs)
            others = [self.part(term, k, inputs[:0]) for k in term.columns if k != j]
            cross += s * own.cross * (others[0].mean_cross if others else 1.0)
            variance += s * own.among * (others[0].mean_among if others else 1.0)
        return self.effect((name,), (values,), cross, variance, self.slope(j, inputs))

    def of_pair(self, term: KernelTerm, s: Tensor, names: tuple[str, str], count: int) -> TermEffect:
        values = [self.grid(j, count) for j in term.columns]
        first, second = (self.part(term, j, self.scaled(j, x)) for j, x in zip(term.columns, values, strict=True))
        cross = s * (first.cross[:, None] * second.cross).reshape(-1, len(self.points))
        variance = s * torch.outer(first.among, second.among).reshape(-1)
        return self.effect(names, tuple(values), cross, variance, None)

    def effect(
        self,
        names: tuple[str, ...],
        values: tuple[np.ndarray, ...],
        cross: Tensor,
        variance: Tensor,
        slope: Tensor | None,
    ) -> TermEffect:
        """The effect under q, from covariances with the inducing values, prior variances, and columns of the mean."""
        A = cross @ self.features.inverse.T
        left = (variance - A.square().sum(1)).clamp(min=0.0)
        more = A.new_zeros(len(A), len(self.posterior.mean) - A.shape[1]) if slope is None else slope
        design = torch.cat([A, more], 1)
        mean = design @ self.posterior.mean
        spread = ((design @ self.posterior.covariance()) * design).sum(1).clamp(min=0.0)
        sd = (spread + left).sqrt()
        shape = tuple(len(x) for x in values)
        found = (x.numpy().reshape(shape) for x in (mean, sd, mean - self.z * sd, mean + self.z * sd))
        return TermEffect(names, values, *found)

    def slope(self, j: int, inputs: Tensor) -> Tensor:
        """The columns of the mean function's weights at values of column j, less those at the average row."""
        at = self.data.mean(0).repeat(len(inputs) + 1, 1)
        at[:-1, j] = inputs
        columns = weight_columns(self.model.mean, at).detach()
        if not columns.shape[1] and hasattr(self.model.mean, "weights"):
            raise ValueError(
                "term_effects needs a posterior of the mean's weights; got point estimates. Use priors='default'."
            )
        return columns[:-1] - columns[-1]

    def scaled(self, j: int, values: np.ndarray) -> Tensor:
        return torch.from_numpy((values - self.scaler.centre[j]) / self.scaler.scale[j])

    def grid(self, j: int, count: int) -> np.ndarray:
        """Values of a column at which its effect is shown: all of them if there are few, otherwise an even grid."""
        distinct = np.unique(self.rows[:, j])
        if len(distinct) <= FEW:
            return distinct
        low, high = np.quantile(self.rows[:, j], [TAIL, 1.0 - TAIL])
        ends = (low, high) if low < high else (distinct[0], distinct[-1])
        return np.linspace(*ends, count)


def effects_of_terms(
    model: SparseGP, posterior: Posterior, scaler: Scaler, rows: np.ndarray, names: list[str], points: int, z: float
) -> list[TermEffect]:
    """The effects of all columns, then of all pairs, each with the largest first."""
    found = TermEffects(model, posterior, scaler, rows, z)
    with torch.no_grad():
        columns = [found.of_column(j, name, points) for j, name in enumerate(names)]
        terms: Any = zip(model.kernel.terms, found.scales, strict=True)
        pairs = [
            found.of_pair(term, s, (names[term.columns[0]], names[term.columns[1]]), max(2, points // 2))
            for term, s in terms
            if len(term.columns) == 2
        ]
    return [
        *sorted(columns, key=lambda e: -float(np.ptp(e.mean))),
        *sorted(pairs, key=lambda e: -float(np.ptp(e.mean))),
    ]
