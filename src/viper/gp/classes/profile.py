"""The profile G(θ) = max_q F(q; θ) of K classes that share a kernel.

With whitened coordinates w_k ~ N(0, I) of each class, ϑ_k = o_k + Aμ_k and τ_k² = r + diag(A P_k⁻¹ Aᵀ),

    dF = Σ_i c_i Σ_k [(1[y_i = k] - g_ik) dϑ_ik - ½ h_ik dτ_ik²]

at the best star q, because its own derivatives vanish there (envelope theorem).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.gp.classes.rows import ClassFeatures
from viper.gp.model import ChainRule, Features, Observations, SparseGP, blocks_on
from viper.gp.profile import Profile, identity_prior
from viper.inference.classes.problem import ClassProblem
from viper.inference.classes.solver import Proposal, StarRun
from viper.inference.classes.star import Star, centred_classes, solve_precisions, star_divergence, star_from
from viper.inference.classes.sums import ROUGH_CLASSES, ClassFormula
from viper.inference.rows import Dense, product

QUICK_STEPS = 30
QUICK = 0.1  # precisions are solved until they change by less than this share of their first change
WAITED, TOO_LITTLE = 2, 0.03  # stop after this many steps in a row that gain less than this share of the tolerance


class ClassSites(NamedTuple):
    """The contribution of each row to q, by class and block. At a nearby θ, it gives a q close to the best one.

    With G_k = Aᵀ diag(b_k) A, the means solve (I + G_k) μ_k = Aᵀt_k, and the precisions follow from G_k.
    """

    precision: list[Tensor]  # b_k = c h_k
    target: list[Tensor]  # t_k = c (1[y = k] - g_k) + b_k Aμ_k

    def information(self) -> Tensor:
        """c Σ_k h_k of each row."""
        return torch.cat(self.precision).sum(1).clamp(min=0.0)

    def on(self, device: torch.device) -> "ClassSites":
        """The sites on a device, in blocks of the size used there."""
        return ClassSites(blocks_on(device, self.precision), blocks_on(device, self.target))

    def star(self, problem: ClassProblem) -> Star | None:
        """The q that these sites give with the features of a problem; None if it is not a Gaussian."""
        gram: Tensor | float = 0.0
        pulled: Tensor | float = 0.0
        for block, b, t in zip(problem.source.map(lambda block: block), self.precision, self.target, strict=True):
            gram = gram + torch.stack([block.design.gram(column) for column in b.T.contiguous()])
            pulled = pulled + block.design.pull(t).T
        assert isinstance(gram, Tensor)
        assert isinstance(pulled, Tensor)
        precision = problem.scale * gram
        precision.diagonal(dim1=1, dim2=2).add_(1.0)
        root, info = torch.linalg.cholesky_ex(precision)
        if bool(info.any()):
            return None
        mean = torch.cholesky_solve(problem.scale * pulled[..., None], root)[..., 0]
        if problem.diagonal:
            precision = precision.diagonal(dim1=1, dim2=2).clone()
            gram = gram.diagonal(dim1=1, dim2=2)
        return star_from(centred_classes(mean), problem.precisions(problem.scale * gram, precision))


def class_backward(source: Features, q: Star, moments: ClassFormula, scale: float = 1.0) -> tuple[float, ClassSites]:
    """Add ∂F/∂θ at q to the gradients of the free parameters; return the likelihood part of F and the sites of q."""
    points = len(source.inverse)
    # P_k⁻¹ - J, where J is the identity for inducing points, because r depends on their columns of A, and 0 for others
    excess = torch.diag_embed(q.factor) if q.diagonal else q.factor @ q.factor.mT
    excess.diagonal(dim1=1, dim2=2)[:, :points].sub_(1.0)
    sites, chain = ClassSites([], []), ChainRule(source)
    value = 0.0
    with torch.enable_grad():
        for made, block in source.graphs():
            assert isinstance(block.design, Dense)
            assert block.residual is not None
            design = block.design.matrix
            shift = product(design, q.mean.T)
            theta = shift if block.offset is None else shift + block.offset
            twisted = [product(design, one) for one in excess]
            own = design[:, :points].square().sum(1)
            tau2 = torch.stack([(x * design).sum(1).add_(own).clamp_(min=0.0).add_(block.residual) for x in twisted], 1)
            eta, g, h = moments(theta, tau2)
            weight = (torch.ones_like(eta) if block.weight is None else block.weight) * scale
            label = block.label.long()[:, None]
            value += float(weight @ (theta.gather(1, label)[:, 0] - eta))
            e = weight[:, None] * (-g).scatter_add(1, label, torch.ones_like(g[:, :1]))
            b = weight[:, None] * h
            sites.precision.append(b / scale)
            sites.target.append((e + b * shift) / scale)
            # ∂F/∂A = Σ_k e_k μ_kᵀ - diag(b_k) A(P_k⁻¹ - J)
            slope = product(e, q.mean)
            for column, x in zip(b.T, twisted, strict=True):
                slope.sub_(column[:, None] * x)
            chain.block(made, design, slope, -0.5 * b.sum(1), torch.zeros_like(eta))
        chain.finish()
    return value, sites


class QuickProblem(ClassProblem):
    """A problem whose precisions need not be exact, because the next step changes them."""

    def precisions(self, gram: Tensor, start: Tensor) -> Tensor:
        return super().precisions(gram, start) if len(gram) == 1 else solve_precisions(self.target(gram), start, QUICK)


class QuickRun(StarRun):
    """Steps with rough integrals, until one moves q by less than the tolerance or several gain too little."""

    stalled = 0

    def best_from(self, near: Star | None) -> Star:
        """The best q, starting from one that is near, if known, otherwise from the mode."""
        if near is None:
            near = self.first_star(np.random.default_rng(0))
        self.start(near, ROUGH_CLASSES)
        self.iterate(self.tol)
        return self.q

    def nearly_there(self, move: float, share: float, enough: float) -> bool:
        return move < enough

    def step(self, new: Proposal, weights: list[float], share: float) -> bool:
        before = self.at.objective
        moved = super().step(new, weights, share)
        gain = self.at.objective - before
        self.stalled = self.stalled + 1 if gain < TOO_LITTLE * self.enough() else 0
        return moved and self.stalled < WAITED


class ClassProfile(Profile):
    """θ -> G(θ) + log prior(θ) and its gradient, for K classes."""

    def __init__(
        self,
        model: SparseGP,
        rows: Observations,
        classes: int,
        diagonal: bool = False,
        scale: float = 1.0,
        tol: float = 1e-2,
    ) -> None:
        self.model, self.rows, self.diagonal, self.scale, self.tol = model, rows, diagonal, scale, tol
        self.classes, self.dense = classes, None
        self.class_sites: ClassSites | None = None
        self.q: Star | None = None  # the best q at the last θ

    def features(self) -> ClassFeatures:
        return ClassFeatures(self.model, self.rows, rough=True)

    def problem(self, source: Features) -> ClassProblem:
        return QuickProblem(source, self.classes, identity_prior(source), self.diagonal, self.scale)

    def by_torch(self) -> tuple[float, Callable[[], None]]:
        source = self.features()
        problem = self.problem(source)
        q = self.best(problem)
        value, sites = class_backward(source, q, ROUGH_CLASSES, self.scale)
        value -= star_divergence(q, problem.contrasts)
        return value, lambda: self.keep(sites, q)

    def keep(self, sites: ClassSites, q: Star) -> None:
        self.class_sites, self.q = sites, q

    def best(self, problem: ClassProblem) -> Star:
        """The best q at the current θ, to `tol`."""
        near = None if self.class_sites is None else self.class_sites.star(problem)
        return QuickRun(problem, self.tol, QUICK_STEPS, None).best_from(near)

    def resumed(self, sites: ClassSites | None) -> "ClassProfile":  # type: ignore[override]
        self.class_sites = sites
        return self

    def last_sites(self) -> ClassSites | None:  # type: ignore[override]
        return self.class_sites
