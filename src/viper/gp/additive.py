"""The additive kernel: f is a sum of functions of single columns and of chosen pairs of columns.

    k(x, z) = Σ_j s_j φ_j(x_j, z_j) + Σ_(j,k) s_jk φ_jk(x_j, z_j) φ'_jk(x_k, z_k),      φ(x, z) = exp(-(x - z)²/2ℓ²),

with its own lengthscale in every φ and its own output scale s for every term.
"""

import re
from typing import Any, NamedTuple

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from torch import Tensor

from viper.errors import instead

WORD = "additive"
PIECES = re.compile(r"`[^`]*`|[^`+:]+|[+:]")


class KernelTerm(NamedTuple):
    """A term: its columns, and the positions of its lengthscales among those of the kernel."""

    columns: tuple[int, ...]
    places: tuple[int, ...]


def is_additive(kernel: Any) -> bool:
    """Whether the option `kernel` is "additive", perhaps with pairs."""
    return isinstance(kernel, str) and kernel.split("+")[0].strip() == WORD


def read_pairs(kernel: str, names: list[str]) -> list[tuple[int, int]]:
    """The pairs of "additive + a:b + c:d" as column numbers; names that contain + or : are in backticks."""
    pieces = [piece.strip() for piece in PIECES.findall(kernel) if piece.strip()]
    pairs: list[tuple[int, int]] = []
    rest = pieces[1:]
    while rest:
        plus, first, colon, second, *rest = [*rest, "", "", ""] if len(rest) < 4 else rest
        if (plus, colon) != ("+", ":"):
            raise ValueError(f"kernel must be 'additive', with pairs as in 'additive + a:b'; got {kernel!r:.80}.")
        pair = sorted((column_number(first, names), column_number(second, names)))
        if pair[0] == pair[1] or tuple(pair) in pairs:
            raise ValueError(f"pairs of an additive kernel must differ and have two columns; got {first}:{second}.")
        pairs.append((pair[0], pair[1]))
        rest = [piece for piece in rest if piece]
    return pairs


def column_number(name: str, names: list[str]) -> int:
    name = name.strip("`").strip()
    if name not in names:
        raise ValueError(f"pairs of an additive kernel must name columns; got {name!r}. {instead(name, names)}")
    return names.index(name)


class AdditiveKernel(Kernel):
    """The additive kernel over all columns and some pairs. `lengthscales` follow the order of the terms' columns."""

    def __init__(self, columns: int, pairs: list[tuple[int, int]], constraints: tuple[Interval, Interval]) -> None:
        super().__init__()
        self.terms = [KernelTerm((j,), (j,)) for j in range(columns)]
        self.terms += [KernelTerm(pair, (columns + 2 * k, columns + 2 * k + 1)) for k, pair in enumerate(pairs)]
        sizes = columns + 2 * len(pairs), len(self.terms)
        for name, size, constraint in zip(("lengthscales", "outputscales"), sizes, constraints, strict=True):
            self.register_parameter(f"raw_{name}", torch.nn.Parameter(torch.zeros(size, dtype=torch.float64)))
            self.register_constraint(f"raw_{name}", constraint)

    @property
    def lengthscales(self) -> Tensor:
        return self.raw_lengthscales_constraint.transform(self.raw_lengthscales)

    @property
    def outputscales(self) -> Tensor:
        """Prior variances of the terms."""
        return self.raw_outputscales_constraint.transform(self.raw_outputscales)

    def matrix(self, x: Tensor, z: Tensor) -> Tensor:
        """K_xz."""
        return _Additive.apply(x, z, self.lengthscales, self.outputscales, self.terms)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: Any) -> Tensor:
        return self.outputscales.sum().expand(len(x1)) if diag else self.matrix(x1, x2)


def decay(x: Tensor, z: Tensor, lengthscale: Tensor) -> Tensor:
    """φ of one column, as a matrix: rows of x by rows of z."""
    return torch.exp(-0.5 * ((x[:, None] - z) / lengthscale).square_())


def term_decay(term: KernelTerm, x: Tensor, z: Tensor, lengthscales: Tensor) -> Tensor:
    """The product of a term's φ."""
    parts = [decay(x[:, j], z[:, j], lengthscales[k]) for j, k in zip(term.columns, term.places, strict=True)]
    return parts[0] if len(parts) == 1 else parts[0] * parts[1]


class _Additive(torch.autograd.Function):
    """(x, z, ℓ, s) -> K, with gradients term by term, so that memory holds one term at a time."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor, lengthscales: Tensor, scales: Tensor, terms: list[KernelTerm]
    ) -> Tensor:
        ctx.save_for_backward(x, z, lengthscales, scales)
        ctx.terms = terms
        total = x.new_zeros(len(x), len(z))
        for term, s in zip(terms, scales, strict=True):
            total.add_(term_decay(term, x, z, lengthscales).mul_(s))
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, z, lengthscales, scales = ctx.saved_tensors
        to_x, to_z = torch.zeros_like(x), torch.zeros_like(z)
        to_length, to_scale = torch.zeros_like(lengthscales), torch.zeros_like(scales)
        for t, term in enumerate(ctx.terms):
            weight = term_decay(term, x, z, lengthscales).mul_(slope)
            to_scale[t] = weight.sum()
            rows, columns = weight.sum(1), weight.sum(0)
            for j, k in zip(term.columns, term.places, strict=True):
                u, v = x[:, j] / lengthscales[k], z[:, j] / lengthscales[k]
                pulled = weight.T @ u
                # the differential of φ is -φ (u - v) d(u - v)
                to_x[:, j] += scales[t] * (weight @ v - rows * u) / lengthscales[k]
                to_z[:, j] += scales[t] * (pulled - columns * v) / lengthscales[k]
                square = rows @ u.square() + columns @ v.square() - 2.0 * (pulled @ v)
                to_length[k] += scales[t] * square / lengthscales[k]
        return to_x, to_z, to_length, to_scale, None
