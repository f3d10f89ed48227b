"""Values of a sparse Gaussian process at many rows together, as a linear model of a few independent normals.

Given the inducing values, f = o + A w + e, where e has the covariance R = K_xx - AAᵀ between rows. Points p, chosen one
by one where R leaves most unexplained, add columns to A:

    f = o + [A, V] (w, e_p) + rest,      V = (K_xp - A A_pᵀ) L⁻ᵀ,      LLᵀ = R_pp,      e_p ~ N(0, I).

What then remains is small, and is treated as independent between rows.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from viper.gp.average import Averaged, Component
from viper.gp.kernels import covariance
from viper.gp.model import Features, Observations
from viper.inference.posterior import Diagonal, Full, Posterior
from viper.inference.rows import Block, BlockSource, Dense

MOST_POINTS = 200  # added to the inducing points
LEAST_LEFT = 1e-8  # of the mean prior variance: what is left is explained


class JointFeatures:
    """The points that explain how f varies between rows given the inducing values, and the columns they add."""

    def __init__(self, components: list[Component], inputs: Tensor) -> None:
        self.averaged = Averaged(components, inputs.device) if len(components) > 1 else None
        with torch.no_grad():
            self.inducing = Features.of_no_rows(components[0].model, inputs.device)
            self.model = self.inducing.model
            self.points, self.design, self.root = self.chosen(inputs)

    def chosen(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return points p, A_p, and the Cholesky factor of R_pp, by pivoting."""
        block = self.inducing.block_of(Observations(inputs, inputs.new_zeros(len(inputs))))
        A, left = self.induced(block), block.residual.clone()  # type: ignore[union-attr]
        least = LEAST_LEFT * float((left + A.square().sum(1)).mean())
        found = inputs.new_zeros(len(inputs), min(MOST_POINTS, len(inputs)))
        index: list[int] = []
        for k in range(found.shape[1]):
            i = int(left.argmax())
            if float(left[i]) <= least:
                break
            column = covariance(self.model.kernel, inputs, inputs[i : i + 1])[:, 0] - A @ A[i]
            found[:, k] = (column - found[:, :k] @ found[i, :k]) / left[i].sqrt()
            left = (left - found[:, k].square()).clamp_(min=0.0)
            left[i] = 0.0
            index.append(i)
        return inputs[index], A[index], torch.tril(found[index, : len(index)])

    def induced(self, block: Block) -> Tensor:
        """A without the columns of the mean function's weights."""
        return block.design.matrix[:, : len(self.inducing.root)]  # type: ignore[attr-defined]

    def of(self, rows: Observations, block_rows: int) -> "JointRows":
        return JointRows(self, rows, block_rows)

    def extended(self, posterior: Posterior) -> Posterior:
        """The posterior of (w, e_p)."""
        more = len(self.points)
        mean = torch.cat([posterior.mean, posterior.mean.new_zeros(more)])
        if isinstance(posterior, Diagonal):
            return Diagonal(mean, torch.cat([posterior.variance, posterior.variance.new_ones(more)]))
        assert isinstance(posterior, Full)
        return Full(mean, torch.block_diag(posterior.factor, torch.eye(more, dtype=mean.dtype)))


class JointRows(BlockSource):
    """Rows in memory with the columns [A, V], for predictions."""

    def __init__(self, features: JointFeatures, rows: Observations, block_rows: int) -> None:
        self.features, self.data, self.block_rows = features, rows, block_rows

    @property
    def rows(self) -> int:
        return len(self.data)

    @property
    def dimension(self) -> int:
        joint = self.features
        return (joint.averaged or joint.inducing).dimension + len(joint.points)

    @property
    def device(self) -> torch.device:
        return self.data.inputs.device

    def blocks(self) -> Iterator[Block]:
        with torch.no_grad():
            for start in range(0, self.rows, self.block_rows):
                yield self.extended(self.data.take(slice(start, start + self.block_rows)))

    def extended(self, rows: Observations) -> Block:
        joint, block = self.features, self.features.inducing.block_of(rows)
        residual = block.residual
        between = covariance(joint.model.kernel, rows.inputs, joint.points) - joint.induced(block) @ joint.design.T
        # V = (K_xp - A A_pᵀ) L⁻ᵀ
        V = torch.linalg.solve_triangular(joint.root, between.T, upper=False).T
        assert residual is not None
        left = (residual - V.square().sum(1)).clamp_(min=0.0)
        if joint.averaged is not None:
            block, c = joint.averaged.stretched(rows)
            V, left = c[:, None] * V, c.square() * left
        return replace(block, design=Dense(torch.cat([block.design.matrix, V], 1)), residual=left)  # type: ignore[attr-defined]
