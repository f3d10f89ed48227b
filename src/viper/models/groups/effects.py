"""Average predictions, contrasts and slopes of models with effects of groups, for known groups and for new ones.

The posterior of all effects, as averages over rows need it: the border is N(m, S), and given it groups are
independent,

    b_g | w ~ N(μ_g + T_g (w - m), R_g),      T_g = Cov(b_g, w) S⁻¹,      R_g = Var b_g - T_g Cov(w, b_g),

which has the moments of the mixture wherever a group meets the border, and is exact for a mixture of one point.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.linalg
import scipy.sparse
import torch
from torch import Tensor

from viper.inference.memory import available_memory
from viper.inference.rows import Arrays, Dense, Matrix, RowSource, Sparse
from viper.models.effects import EffectsMixin, OpenRows
from viper.models.groups.fitting import GroupPosterior, MetPosterior
from viper.models.groups.levels import as_group_table
from viper.models.groups.reading import GroupedInput

if TYPE_CHECKING:
    import pandas

DRAWN_COPIES = 4  # arrays as large as all draws of all effects


@dataclass(frozen=True)
class AllEffects:
    """The effects of the border, then those of the main factor's groups, as one Gaussian."""

    posterior: GroupPosterior | MetPosterior

    @property
    def mean(self) -> Tensor:
        return torch.cat([self.posterior.mean, self.posterior.effects.flatten()])

    @cached_property
    def root(self) -> np.ndarray:
        """Lower F with S = FFᵀ."""
        return np.linalg.cholesky(self.posterior.border.numpy())

    @cached_property
    def ties(self) -> Any:
        """T, groups and effects × border."""
        return self.posterior.ties()

    @cached_property
    def rest(self) -> Any:
        """Lower L with R = LLᵀ, as a block-diagonal matrix."""
        G, r = self.posterior.effects.shape
        if isinstance(self.posterior, MetPosterior):
            met = self.posterior.met
            explained = met.conditional_ties(self.posterior.border.numpy()).within(met)
        else:
            explained = self.ties.reshape(G, r, -1) @ self.posterior.cross.numpy().transpose(0, 2, 1)
        R = self.posterior.blocks.numpy() - explained
        values, vectors = np.linalg.eigh(0.5 * (R + R.transpose(0, 2, 1)))
        blocks = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
        return scipy.sparse.bsr_array((blocks, np.arange(G), np.arange(G + 1)), shape=(G * r, G * r))

    def draw(self, noise: Tensor) -> Tensor:
        """Draws (k × all effects) from standard normal noise of the same shape."""
        here, there = np.split(noise.numpy(), [len(self.root)], axis=1)
        border = here @ self.root.T
        groups = (self.ties @ border.T).T + (self.rest @ there.T).T
        return self.mean + torch.from_numpy(np.concatenate([border, groups], 1))

    def spread(self, design: Matrix) -> Tensor:
        """diag(A Σ Aᵀ) = |Fᵀ(a_w + Tᵀa_g)|² + |Lᵀa_g|²."""
        assert isinstance(design, Dense | Sparse)
        A: Any = design.matrix.numpy() if isinstance(design, Dense) else design.matrix
        d = len(self.root)
        border, groups = A[:, :d], A[:, d:]
        moved = (border.toarray() if scipy.sparse.issparse(border) else border) + groups @ self.ties
        left = groups @ self.rest
        own = left.multiply(left).sum(1) if scipy.sparse.issparse(left) else np.square(left).sum(1)
        return torch.from_numpy(np.square(moved @ self.root).sum(1) + np.asarray(own).ravel())


class GroupEffectsMixin(EffectsMixin):
    """`average`, `contrast` and `slopes` for rows in groups.

    `at` and `contrast` also take columns of groups, with known groups or "new" for a group that was not in the fit and
    whose effect is averaged over: ``at={"hospital": "new"}`` is what to expect in a new hospital.
    """

    posterior_: Any
    factors_: list[Any]

    def _read_rows(self, X: Any, offset: Any) -> GroupedInput:
        raise NotImplementedError

    def _design_and_spread(self, read: GroupedInput) -> tuple[Any, np.ndarray]:
        raise NotImplementedError

    def _columns(self) -> list[str]:
        raise NotImplementedError

    def average(self, X: Any, *, groups: Any = None, **given: Any) -> "pandas.DataFrame":
        """Average probability over the rows of X, as in VariationalLogisticRegression.

        `groups` are those of the rows; a model with a formula finds them in X. `at` may set groups, or "new" for a new
        one: ``at={"hospital": ["H01", "new"]}``.
        """
        return super().average(self._effect_table(X, groups), **given)

    def contrast(self, X: Any, variables: Any = None, *, groups: Any = None, **given: Any) -> "pandas.DataFrame":
        """How much the average probability changes when one column does, as in VariationalLogisticRegression.

        A column of groups changes only if it is named: ``variables={"hospital": ["H01", "H02"]}``.
        """
        return super().contrast(self._effect_table(X, groups), variables, **given)

    def slopes(self, X: Any, variables: Any = None, *, groups: Any = None, **given: Any) -> "pandas.DataFrame":
        """Average derivative of the probability in a numeric column, as in VariationalLogisticRegression."""
        return super().slopes(self._effect_table(X, groups), variables, **given)

    def _effect_table(self, X: Any, groups: Any) -> Any:
        """Rows with their groups in one table."""
        import pandas

        if hasattr(self, "formula_"):
            if groups is not None:
                raise ValueError("a model with a formula finds groups in the table; got groups=. Leave it out.")
            return X
        table = as_group_table(groups, len(X))
        if hasattr(X, "columns"):
            plain = pandas.DataFrame(X)[self._columns()]
        else:
            plain = pandas.DataFrame(np.asarray(X, dtype=float), columns=self._columns())
        if both := [name for name in table.columns if name in plain.columns]:
            raise ValueError(f"groups must have names that no column of X has; got {both[0]!r}. Rename one.")
        return pandas.concat([plain.reset_index(drop=True), table.reset_index(drop=True)], axis=1)

    def _joint(self, points: Callable[[], Any]) -> tuple[OpenRows, Any]:
        def opened(X: Any, offset: Any, block_rows: int) -> RowSource:
            if hasattr(self, "formula_"):
                read = self._read_rows(X, offset)
            else:
                names = self._columns()
                read = GroupedInput(X[names].to_numpy(dtype=float), X.drop(columns=names), offset)
            design, spread = self._design_and_spread(read)
            label = torch.zeros(len(read.design), dtype=torch.float64)
            known = None if read.offset is None else torch.from_numpy(np.asarray(read.offset, dtype=float))
            residual = torch.from_numpy(spread) if spread.any() else None
            return Arrays(design, label, offset=known, residual=residual, block_rows=block_rows)

        return opened, AllEffects(self.posterior_)

    def _check_draws(self, draws: int) -> None:
        """Raise before any work if draws of all effects do not fit in memory."""
        effects = len(self.posterior_.mean) + self.posterior_.effects.numel()
        need = 8.0 * DRAWN_COPIES * draws * effects
        if need > (there := available_memory()):
            raise ValueError(
                f"draws of all {effects:,} effects must fit in memory; got {draws:,} draws, which need about "
                f"{need / 1e9:.1f} GB of {there / 1e9:.1f} GB. Pass fewer, as draws=."
            )
