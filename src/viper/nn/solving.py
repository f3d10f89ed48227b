"""The best Gaussian weights of a head given its body: those of logistic regression, by the same solvers.

`fitted_weights` goes all the way; `take_natural_step` makes one step on a batch,

    Λ_ρ = (1-ρ) Λ + ρ (S₀⁻¹ + n/b Aᵀ diag(h) A),      μ_ρ = μ + ρ Λ_ρ⁻¹ [n/b Aᵀ(y - g) - S₀⁻¹ μ].

Outputs that share a shift are classes; others are labels, each with its own problem.
"""

import copy
import warnings
from functools import partial
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from viper.errors import ConvergenceWarning, NotFinite, users_line
from viper.inference.classes.problem import ClassProblem
from viper.inference.classes.star import solve_precisions, star_from, tied
from viper.inference.classes.sums import EXACT_CLASSES
from viper.inference.classes.together import LabelRows, fit_together
from viper.inference.low_rank.family import LowRankGaussian
from viper.inference.problem import Prior, Problem, gaussian
from viper.inference.rows import Block, RowSource
from viper.inference.steps import gradient
from viper.models.classes.fitting import FittedClasses, fit_classes
from viper.models.fitting import FitOptions, FittedPosterior, fit_low_rank, fit_posterior
from viper.nn.logits import softmax_moments
from viper.nn.weights import GaussianWeights
from viper.softplus.limit import limit

LOW_RANK_STEPS, LOW_RANK_GAIN = 500, 1e-8  # L-BFGS: most steps, and the least gain of a step in nats per row


# --- one step ---


def take_natural_step(q: GaussianWeights, source: RowSource, prior: Prior, scale: float, rate: float) -> None:
    """Move q by a share `rate` of a natural-gradient step; every row stands for `scale` rows."""
    step = step_of_classes if q.shares_shift else step_of_labels
    step(q, source, prior, scale, rate)


def step_of_classes(q: GaussianWeights, source: RowSource, prior: Prior, scale: float, rate: float) -> None:
    """Move the part of the precisions that is due to the rows, P - P M⁻¹ P, and then the means."""
    diagonal = q.covariance == "diagonal"
    problem = ClassProblem(source, len(q.mean), prior, diagonal, scale)
    star = q.to_star()
    sums, _ = problem.total(star.mean, star.factor, EXACT_CLASSES, "diagonal" if diagonal else "full")
    target = torch.lerp(star.precision - tied(star.precision), problem.target(sums.gram), rate)
    new = star_from(star.mean, solve_precisions(target, star.precision))
    if new is None:
        raise NotFinite
    mean = star.mean + rate * new.solve(problem.gradient(star.mean, sums))
    q.assign(slice(None), mean, new.factor)


def step_of_labels(q: GaussianWeights, source: RowSource, prior: Prior, scale: float, rate: float) -> None:
    """Move the Gaussian of every label."""
    diagonal = q.covariance == "diagonal"
    for k, rows in enumerate(rows_of_labels(source, len(q.mean))):
        problem = Problem(rows, prior, limit(), diagonal=diagonal, scale=scale, iterative=diagonal)
        own = q.to_gaussian(k)
        total = problem.total(own.mean, own.factor)
        target = prior.diagonal + total.gram if diagonal else prior.plus(total.gram)
        new = gaussian(own.mean, torch.lerp(own.precision, target, rate))
        if new is None:
            raise NotFinite
        slope, factor = gradient(problem, own, total), new.factor
        move = factor * slope if diagonal else factor @ (factor.T @ slope)
        q.assign(k, own.mean + rate * move, factor)


def rows_of_labels(source: RowSource, labels: int) -> list[RowSource]:
    """The same rows with one label at a time."""
    return [source] if labels == 1 else [LabelRows(source, k) for k in range(labels)]


# --- all the way ---


def fitted_weights(q: GaussianWeights, source: RowSource, prior: Prior, verbose: Any, start: Any = None) -> list[Any]:
    """Fits in the family of q: one for all classes, or one for each label."""
    if q.shares_shift:  # the search of low rank begins at the mean field
        covariance = "diagonal" if q.covariance == "low-rank" else q.covariance
        return [fit_classes(source, prior, len(q.mean), solver_options(covariance, q.rank, verbose), 0, start)]
    solve: Any = fit_low_rank if q.covariance == "low-rank" else fit_posterior
    options = solver_options(q.covariance, q.rank, verbose)
    fits = [
        partial(solve, rows, prior=prior, options=options, seed=0, start=start)
        for rows in rows_of_labels(source, len(q.mean))
    ]
    return [fits[0]()] if len(fits) == 1 else fit_together(source, fits, list(range(len(fits))))[0]


def solver_options(covariance: str, rank: int, verbose: Any) -> FitOptions:
    """The estimators' defaults."""
    return FitOptions(
        bound="viper",
        terms=None,
        samples=1000,
        nodes=64,
        covariance=covariance,
        rank=rank,
        solver="newton",
        max_iter=None,
        tol=None,
        learning_rate=0.05,
        batch_size=None,
        dtype="float64",
        n_jobs=None,
        verbose=verbose,
    )


def take_over(q: GaussianWeights, fits: list[Any]) -> None:
    """Set q to what the solvers found."""
    if q.shares_shift:
        return take_over_classes(q, fits[0])
    for k, fit in enumerate(fits):
        take_over_label(q, k, fit)
    return None


def take_over_classes(q: GaussianWeights, fit: FittedClasses) -> None:
    means, factor = fit.posterior.means, fit.posterior.factor
    if q.covariance != "low-rank":
        return q.assign(slice(None), means, factor)
    q.assign_loadings(slice(None), means, factor.sqrt(), means.new_zeros(*means.shape, 0))
    return climb_low_rank(q, fit.problem)


def take_over_label(q: GaussianWeights, k: int, fit: FittedPosterior) -> None:
    posterior, found = fit.posterior, fit.result.q
    if isinstance(found, LowRankGaussian):
        return q.assign_loadings(k, found.mean, found.sd, found.loadings)
    if q.covariance == "diagonal":
        return q.assign(k, posterior.mean, posterior.variance)
    factor = getattr(posterior, "factor", None)
    if factor is None:  # fewer rows than coefficients: the posterior is known in their span
        factor = torch.linalg.cholesky(posterior.covariance())
    return q.assign(k, posterior.mean, factor)


# --- classes of low rank ---


def climb_low_rank(q: GaussianWeights, problem: ClassProblem) -> None:
    """Climb from a q without loadings to the optimum of the ELBO, all rows in memory, by L-BFGS in float64."""
    moving = copy.deepcopy(q).double().requires_grad_(True)  # so that a frozen head can be fitted, too
    climb = LowRankClimb(moving, problem)
    options = {"maxiter": LOW_RANK_STEPS, "maxcor": 30, "ftol": LOW_RANK_GAIN, "gtol": 0.0}
    start = np.zeros(len(climb.first))
    found = scipy.optimize.minimize(climb.negative, start, jac=True, method="L-BFGS-B", options=options)
    climb.negative(found.x)
    if found.nit >= LOW_RANK_STEPS:
        warnings.warn(
            f"The fit of low rank stopped early, after {LOW_RANK_STEPS} steps. Standardise the features, or use "
            "covariance='full' or 'diagonal'.",
            ConvergenceWarning,
            stacklevel=users_line(),
        )
    q.load_state_dict(moving.state_dict())


class LowRankClimb:
    """-ELBO per row, with coordinates in which its curvature is about one: means in sds of the mean field."""

    def __init__(self, q: GaussianWeights, problem: ClassProblem) -> None:
        self.q, self.rows, self.blocks = q, problem.source.rows, list(problem.source.in_memory().blocks())
        assert isinstance(problem.prior, Prior)
        self.prior_sd = problem.prior.precision.rsqrt()
        self.moved = [q.mean, q.log_scale, q.loadings]
        with torch.no_grad():  # loadings that are zero have no gradient
            first = torch.randn(q.loadings.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            q.loadings.copy_(first.to(q.mean.device) / q.mean.shape[1] ** 0.5)
        self.first = parameters_to_vector(self.moved).detach()
        self.units = torch.ones_like(self.first)
        self.units[: q.mean.numel()] = q.log_scale.detach().exp().reshape(-1)

    @torch.enable_grad()
    def negative(self, z: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient at z, to which q is moved."""
        vector_to_parameters(self.first + self.units * torch.from_numpy(z).to(self.units), self.moved)
        self.q.zero_grad()
        total = self.q.divergence_from(self.prior_sd) / self.rows
        total.backward()
        for block in self.blocks:
            part = negative_class_likelihood(self.q, block) / self.rows
            part.backward()
            total = total.detach() + part.detach()
        slopes: list[Any] = [parameter.grad for parameter in self.moved]
        return float(total), (self.units * parameters_to_vector(slopes)).cpu().numpy()


def negative_class_likelihood(q: GaussianWeights, block: Block) -> Tensor:
    """-Σ_i E log p(y_i | f_i) of the rows of a block with classes, differentiable in q."""
    design: Any = block.design
    mean, variance = design.matrix @ q.mean.T, q.latent_variance(design.matrix)
    mean = mean if block.offset is None else mean + block.offset
    variance = variance if block.residual is None else variance + block.residual[:, None]
    return (softmax_moments(mean, variance)[0] - mean.gather(1, block.label.long()[:, None])[:, 0]).sum()
