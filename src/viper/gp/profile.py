"""The profile G(θ) = max_q F(q; θ): its value and gradient at any θ.

Each search for the inner maximum starts from the sites of the last one.

With a large output scale the natural-gradient iteration of the solver contracts slowly, or not at all without damping.
Anderson's method accelerates it here: the next natural parameters are the combination of the last few that has the
least residual.
"""

import math
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from viper.gp.model import Features, Observations, Sites, SparseGP, backward
from viper.gp.profile_numpy import (
    FAST_MOVE,
    MIXED_ITERATES,
    MOST_INNER_STEPS,
    SHORTEST_INNER_STEP,
    DenseProfile,
    dense_profile_applies,
)
from viper.inference.anderson import weights_from_gram
from viper.inference.posterior import Diagonal, Full
from viper.inference.problem import Gaussian, Prior, Problem, divergence, gaussian, kl_to_prior
from viper.inference.rows import BLOCK_ROWS, RowSource
from viper.inference.steps import diagonal_step, full_step, opening
from viper.inference.sums import Sums
from viper.softplus.pointwise import Bound

# raised if K_zz has no Cholesky factor (NotPositiveDefinite) or numbers overflow
SINGULAR = (ValueError, torch.linalg.LinAlgError, np.linalg.LinAlgError)  # type: ignore[attr-defined]
HALF_STEP = 0.5  # damping of a mixture, and the factor that shortens a step that lowers F


def identity_prior(source: RowSource) -> Prior:
    """N(0, I), the prior of the whitened inducing values."""
    zeros = torch.zeros(source.dimension, dtype=torch.float64, device=source.device)
    return Prior(zeros, torch.ones_like(zeros))


class Profile:
    """θ -> G(θ) + log prior(θ) and its gradient."""

    def __init__(
        self,
        model: SparseGP,
        rows: Observations,
        bound: Bound,
        diagonal: bool = False,
        scale: float = 1.0,
        tol: float = 1e-2,
        sites: Sites | None = None,
        start: Gaussian | None = None,
        marginal: bool = False,
    ) -> None:
        self.model, self.rows, self.bound, self.diagonal, self.scale = model, rows, bound, diagonal, scale
        self.marginal = marginal  # whether residuals are integrated out (model.py)
        self.sites, self.start = sites, start  # where the first inner search starts
        self.tol = tol  # nats by which the last inner step may move q
        self.inner_steps = 0
        small = dense_profile_applies(rows, model.dimension, diagonal)
        self.dense = DenseProfile(model, rows, bound.moments, scale, start, marginal) if small else None

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient; -∞ where K_zz has no factor or F is not finite."""
        nowhere = -math.inf, np.zeros_like(x)
        self.model.set_free(x)
        self.model.zero_grad(set_to_none=True)
        try:
            with np.errstate(all="ignore"):  # an overflow shows in the value
                value, keep = self.by_torch() if self.dense is None else self.dense.evaluate(self.tol)
        except SINGULAR:
            return nowhere
        prior = self.model.log_prior()
        if prior is not None and prior.requires_grad:
            prior.backward()
            value += float(prior.detach())
        gradient = self.model.free_gradient()
        if not math.isfinite(value) or not np.isfinite(gradient).all():
            return nowhere
        keep()
        return value, gradient

    @property
    def size(self) -> float:
        """Rows × points², the cost of a product."""
        return float(len(self.rows) * self.model.dimension**2)

    def maximum(self) -> tuple[float, Full | Diagonal] | None:
        """G(θ) + log prior(θ) and the best q at the current θ, without gradients; None if there is none."""
        try:
            with np.errstate(all="ignore"), torch.no_grad():
                if self.dense is None:
                    value, q = self.maximum_by_torch()
                else:
                    value, found = self.dense.maximum(self.tol)
                    q = Full(torch.from_numpy(found.mean), torch.from_numpy(found.factor))
                prior = self.model.log_prior()
        except SINGULAR:
            return None
        value += 0.0 if prior is None else float(prior)
        return (value, q) if math.isfinite(value) else None

    def nearly_best(self, source: Features) -> Gaussian:
        """The best q at the current θ, to `tol`, where these are the rows' features."""
        if self.dense is not None:
            self.resumed(self.sites)
            with np.errstate(all="ignore"), suppress(*SINGULAR):
                _, found = self.dense.maximum(self.tol)
                q = gaussian(torch.from_numpy(found.mean), torch.from_numpy(found.precision))
                if q is not None:
                    return q
        return self.solve(source)

    def maximum_by_torch(self) -> tuple[float, Full | Diagonal]:
        source = self.features()
        q = self.solve(source)
        value, _ = self.inner_problem(source).evaluate(q, q.factor, gram=False)
        return value, (Diagonal if self.diagonal else Full)(q.mean, q.factor)

    def by_torch(self) -> tuple[float, Callable[[], None]]:
        """Set the gradients; return G and a function that keeps the sites for the next call."""
        source = self.features()
        q = self.solve(source)
        factor = q.factor
        value, sites = backward(source, q, factor, self.bound.moments, self.scale)
        return value - kl_to_prior(q, factor, identity_prior(source)), lambda: setattr(self, "sites", sites)

    def features(self) -> Features:
        return Features(self.model, self.rows, rough=True, marginal=self.marginal)

    def resumed(self, sites: Sites | None) -> "Profile":
        """Start the first inner search from these sites."""
        self.sites = sites
        if self.dense is not None and sites is not None:
            self.dense.sites = self.scale * torch.stack([torch.cat(sites.precision), torch.cat(sites.target)]).numpy()
        return self

    def information(self) -> Tensor | None:
        """c h of each row at the last θ."""
        sites = self.last_sites()
        return None if sites is None else self.scale * sites.information()

    def last_sites(self) -> Sites | None:
        """The sites at the last θ."""
        if self.dense is None or self.dense.sites is None:
            return self.sites
        b, t = torch.from_numpy(self.dense.sites / self.scale)
        return Sites(list(b.split(BLOCK_ROWS)), list(t.split(BLOCK_ROWS)))  # in blocks, as in `Features`

    def solve(self, source: Features) -> Gaussian:
        """The best q at the current θ, to `tol`."""
        problem = self.inner_problem(source)
        q = self.start if self.sites is None else self.sites.posterior(source, self.diagonal, self.scale)
        return self.iterate(problem, q or opening(problem))

    def inner_problem(self, source: Features) -> Problem:
        return Problem(source, identity_prior(source), self.bound, diagonal=self.diagonal, scale=self.scale)

    def posterior(self) -> Gaussian | None:
        """The q of the last sites at the current θ, which is near the best one."""
        sites = self.last_sites()
        with torch.no_grad():
            return None if sites is None else sites.posterior(self.features(), self.diagonal, self.scale)

    def iterate(self, problem: Problem, q: Gaussian) -> Gaussian:
        """Natural-gradient steps from q until one moves it by less than `tol`; F is not evaluated after that one."""
        plain = diagonal_step if self.diagonal else full_step
        value, total = problem.evaluate(q, q.factor)
        mixer = None if self.diagonal else Anderson(q)
        last = math.inf
        for _ in range(MOST_INNER_STEPS):
            new = plain(problem, q, total, 1.0)
            move = math.inf if new is None else divergence(q, new)
            if new is not None and move < self.tol:
                return new
            if mixer is not None and new is not None:
                new = mixer.combine(q, new, 1.0 if move < FAST_MOVE * last else HALF_STEP)
            moved = self.accept(problem, plain, q, value, total, new)
            if moved is None:
                return q
            q, value, total = moved
            last = move
        return q

    def accept(
        self, problem: Problem, plain: object, q: Gaussian, value: float, total: Sums, new: Gaussian | None
    ) -> tuple[Gaussian, float, Sums] | None:
        """Return the proposal unless it lowers F; otherwise halve a plain step until it does not lower F, or None."""
        rho = 1.0
        while rho > SHORTEST_INNER_STEP:
            if new is not None:
                self.inner_steps += 1
                new_value, new_total = problem.evaluate(new, new.factor)
                if new_value >= value - self.tol:
                    return new, new_value, new_total
            rho *= HALF_STEP
            new = plain(problem, q, total, rho)  # type: ignore[operator]
        return None


class Anderson:
    """Combines the last natural parameters x_k = (Λμ, Λ) and their residuals f_k = step(x_k) - x_k.

    The combination Σ γ_k x_k, Σ γ_k = 1, is the one whose Σ γ_k f_k is smallest in the metric of the first q.
    """

    def __init__(self, reference: Gaussian) -> None:
        self.reference = reference
        self.points: list[Tensor] = []
        self.residuals: list[Tensor] = []
        self.whitened: list[Tensor] = []

    def combine(self, q: Gaussian, new: Gaussian, damping: float) -> Gaussian:
        x, residual = natural(q), natural(new)
        residual = residual - x
        for kept, item in zip(
            (self.points, self.residuals, self.whitened), (x, residual, self.whiten(residual)), strict=True
        ):
            kept.append(item)
            del kept[: -MIXED_ITERATES - 1]
        if len(self.points) == 1:
            return new
        # γ by least squares on differences from the newest
        change = self.whitened[-1] - torch.stack(self.whitened[:-1])
        weights = weights_from_gram((change @ change.T).cpu().numpy(), (change @ self.whitened[-1]).cpu().numpy())
        if weights is None:
            return new
        for weight, x_old, f_old in zip(weights.tolist(), self.points[:-1], self.residuals[:-1], strict=True):
            x = x - weight * (self.points[-1] - x_old)
            residual = residual - weight * (self.residuals[-1] - f_old)
        mixed = x + damping * residual
        found = gaussian(mixed[:, 0], mixed[:, 1:].contiguous())
        if found is None or found.cholesky is None:
            return new
        mean = torch.cholesky_solve(mixed[:, :1], found.cholesky)[:, 0]
        return Gaussian(mean, found.precision, found.cholesky)

    def whiten(self, residual: Tensor) -> Tensor:
        """The residuals of μ and Λ, as L⁻¹(δ(Λμ) - δΛ μ) and L⁻¹ δΛ L⁻ᵀ/√2."""
        root, mean = self.reference.cholesky, self.reference.mean
        assert root is not None
        shift = residual[:, :1] - residual[:, 1:] @ mean[:, None]
        half = torch.linalg.solve_triangular(root, torch.cat([shift, residual[:, 1:]], 1), upper=False)
        both = torch.linalg.solve_triangular(root, half[:, 1:].T, upper=False)
        return torch.cat([half[:, 0], both.reshape(-1) * math.sqrt(0.5)])


def natural(q: Gaussian) -> Tensor:
    """(Λμ, Λ) side by side."""
    return torch.cat([(q.precision @ q.mean)[:, None], q.precision], 1)
