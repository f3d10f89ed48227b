"""How good the Gaussian approximation is, and its correction by importance weights.

Draw β from q, weight each draw by the true joint density over q, and smooth the largest weights (PSIS, by ArviZ). The
shape k̂ of the weights' tail says whether the weighted draws represent the exact posterior. If so, they *are* the exact
posterior up to Monte Carlo error, and their mean weight estimates the evidence p(y).

Rows of a sparse Gaussian process have a residual variance r: given the inducing values w, f_i ~ N(ϑ_i, r_i). Their
likelihood is then the variational one,

    log p̃(y|w) = Σ_i c_i E[log p(y_i|f_i) | w] = Σ_i c_i (y_i ϑ_i - η(ϑ_i, r_i)),

for three reasons. ELBO = E_q log p̃(y|w) - KL(q ‖ p), so p(w) p̃(y|w) is what the Gaussian q approximates, and the
weights measure the error of the Gaussian alone. By Jensen's inequality, ∫ p̃(y|w) p(w) dw lies between e^ELBO and the
evidence of the full process, whatever the correlations of f given w; the product of expected probabilities would be the
evidence of another model, in which they are independent. Without residual variance, p̃ is the likelihood itself. What
r costs is reported apart from k̂ (`residual_cost`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from viper.errors import shown
from viper.inference.classes.importance import ClassWeighedFit
from viper.inference.groups.weighing import GroupWeighedFit
from viper.inference.mixture.posterior import GaussianMixture, count_gaussians
from viper.inference.posterior import Posterior, latent, noise_shape, prior_log_density
from viper.inference.problem import Prior
from viper.inference.rows import Block, RowSource, reported_sum
from viper.softplus.limit import fast_limit, limit

# Share of effective draws, 1/(1+χ²(p‖q)), above which weights hardly differ. By the Cauchy-Schwarz inequality, the mean
# of any f is then off by at most √(1/0.9 - 1) = ⅓ of its sd, and by so much only if all of the error lies in f.
EVEN_WEIGHTS = 0.9
FEWEST_DRAWS = 100  # fewer draws do not show the tail of the weights
DRAWS_PER_BLOCK = 256
LINEAR = 40.0  # above, log(1+e^f) is f to the last digit
RESIDUAL_ERROR = 1e-8  # nats per row, of log p̃
COSTLY = 1.0  # nats; residual variance that costs more is mentioned in the verdict
SEED = 1  # default seed, as on the command line, so that results repeat


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on q: Pareto k̂, effective sample size of the weights, log evidence with its standard error.

    `residual_cost` is what inducing points cost, in nats of the ELBO, because they leave variance unexplained; None
    if there are none. The log evidence is conditional on the hyperparameters, and a lower bound with inducing points.
    """

    k_hat: float
    threshold: float
    draws: int
    effective_sample_size: float
    log_evidence: float
    log_evidence_error: float
    elbo: float
    covariance: str = "full"  # the family of q
    residual_cost: float | None = None
    several: bool = False  # whether there are more than two classes
    components: int = 1  # Gaussians in the mixture q

    def about(self, elbo: float) -> "Diagnosis":
        """Return the same verdict with another ELBO."""
        return replace(self, elbo=elbo)

    @property
    def reliable(self) -> bool:
        """Whether k̂ is below min(1 - 1/log₁₀ S, 0.7) for S draws (Vehtari et al. 2024)."""
        return self.k_hat < self.threshold

    @property
    def close(self) -> bool:
        """Whether q may be used as it is: k̂ is small, or the weights are nearly equal, whatever their estimated tail.

        k̂ is estimated from a few of the largest weights. If these hardly differ from the others, it is mostly noise.
        """
        return self.k_hat < 0.5 or self.effective_sample_size > EVEN_WEIGHTS * self.draws

    @property
    def verdict(self) -> str:
        """What to do, in words."""
        return self._verdict_on_gaussian + self._remark_on_inducing

    @property
    def _verdict_on_gaussian(self) -> str:
        what, exact = "The Gaussian posterior", "the exact one"
        if self.components > 1:
            what, exact = f"The mixture of {self.components} Gaussians", "the exact posterior"
        if self.k_hat < 0.5:
            return f"{what} is close to {exact}; use it as it is."
        if self.close:
            return (
                f"{what} is close to {exact}, since the weights of its draws are nearly equal; "
                f"use it as it is.{'' if self.reliable else ' Only far quantiles may differ.'}"
            )
        if self.reliable:
            return f"{what} is usable; corrected() removes its remaining error."
        narrower = "a tighter prior" if self.residual_cost is None else "a prior for smaller output scales"
        prefer = narrower if self.covariance == "full" else f"covariance='full' and {narrower}"
        other = "hold rows out" if self.several else "compare with viper.reference.sample_posterior(model)"
        return f"{what} is not close enough for importance weights to certify it. Prefer {prefer}, or {other}."

    @property
    def _remark_on_inducing(self) -> str:
        if self.residual_cost is None or self.residual_cost < COSTLY:
            return ""
        return (
            f" But the inducing points leave some variance unexplained, which costs {self.residual_cost:.1f} nats: "
            "use more of them."
        )

    def __str__(self) -> str:
        inducing = (
            "" if self.residual_cost is None else f", inducing points cost {max(self.residual_cost, 0.0):.3f} nats"
        )
        return (
            f"k̂ = {self.k_hat:.2f} (threshold {self.threshold:.2f}), {self.effective_sample_size:.0f} effective of "
            f"{self.draws} draws, log evidence {self.log_evidence:.3f} ± {self.log_evidence_error:.3f} "
            f"(ELBO {self.elbo:.3f}){inducing}\n{self.verdict}"
        )


@dataclass(frozen=True)
class WeightedDraws:
    """Draws of β from q with normalised, smoothed importance weights: the exact posterior up to Monte Carlo error."""

    draws: Tensor  # draws × dimension
    weights: Tensor  # sum to one

    @property
    def mean(self) -> Tensor:
        return self.weights @ self.draws

    @property
    def variance(self) -> Tensor:
        return self.weights @ (self.draws - self.mean).square()

    def resample(self, count: int, generator: np.random.Generator) -> Tensor:
        """Equally weighted draws, chosen by systematic resampling in random order."""
        positions = (np.arange(count) + generator.random()) / count
        index = np.searchsorted(np.cumsum(self.weights.numpy()), positions).clip(max=len(self.weights) - 1)
        return self.draws[torch.from_numpy(generator.permutation(index))]


class WeighedFit(NamedTuple):
    """A posterior q with the prior and the rows that it was fitted to."""

    posterior: Posterior | GaussianMixture
    prior: Prior
    source: RowSource
    sparse: bool = False  # whether the rows have a residual variance, which inducing points leave unexplained

    def weighed(
        self, count: int, generator: np.random.Generator, report: Callable[[int, int], None] | None = None
    ) -> tuple[Tensor, Tensor, float]:
        """Return draws from q, log p(y|β)p(β)/q(β) without its mean, and that mean's log: the log evidence."""
        device = self.posterior.mean.device
        noise = torch.from_numpy(generator.standard_normal((count, *noise_shape(self.posterior)))).to(device)
        draws = self.posterior.draw(noise)
        log_joint = log_likelihood(self.source, draws, report) + prior_log_density(self.prior, draws)
        log_ratio = (log_joint - self.posterior.log_density(noise)).cpu()
        log_evidence = float(torch.logsumexp(log_ratio, 0)) - math.log(count)
        return draws.cpu(), log_ratio - log_evidence, log_evidence


def weigh(
    fits: Sequence["WeighedFit | ClassWeighedFit | GroupWeighedFit"],
    elbo: float,
    covariance: str,
    count: int,
    generator: np.random.Generator,
    report: Callable[[int, int], None] | None = None,
) -> tuple[WeightedDraws, Diagnosis]:
    """Draw from q, weight by p(y|β)p(β)/q(β), and judge the weights.

    Several fits, to completed tables, share the draws. Together the draws represent the mixture of the exact
    posteriors, in which every table has the same weight; the log evidence is the mean over tables.
    """
    check_draw_count(count)
    shares = [len(part) for part in np.array_split(np.arange(max(count, 2 * len(fits))), len(fits))]
    parts = [fit.weighed(share, generator, report) for fit, share in zip(fits, shares, strict=True)]
    draws, log_ratio = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    posterior, count = fits[0].posterior, len(draws)
    log_weights, k_hat = pareto_smoothed(log_ratio)
    weights = torch.softmax(log_weights, 0)
    size = 1.0 / float(weights.square().sum())
    # log evidence is the log of the mean raw weight; smoothing is only for the draws
    log_evidence = float(np.mean([part[2] for part in parts]))
    diagnosis = Diagnosis(
        k_hat=k_hat,
        threshold=min(1.0 - 1.0 / math.log10(count), 0.7),
        draws=count,
        effective_sample_size=size,
        log_evidence=log_evidence,
        log_evidence_error=math.sqrt(max(0.0, 1.0 / size - 1.0 / count)),
        elbo=elbo,
        covariance=covariance,
        residual_cost=residual_cost(fits[0].source, cast(Posterior, posterior)) if fits[0].sparse else None,
        several=isinstance(fits[0], ClassWeighedFit),
        components=count_gaussians(posterior),
    )
    return WeightedDraws(draws, weights), diagnosis


def check_draw_count(count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, Integral):
        raise TypeError(f"draws must be a whole number; got {shown(count)}.")
    if count < FEWEST_DRAWS:
        raise ValueError(f"draws must be at least {FEWEST_DRAWS}; got {count}.")


def pareto_smoothed(log_ratio: Tensor) -> tuple[Tensor, float]:
    """Pareto-smoothed log weights and k̂, by ArviZ."""
    from arviz_stats.base.array import array_stats

    if float(log_ratio.max() - log_ratio.min()) < 1e-9:
        return torch.zeros_like(log_ratio), -math.inf  # q is the posterior
    # psislw is designed for leave-one-out: it weights by the reciprocal of its argument
    log_weights, k_hat = array_stats.psislw(-log_ratio.numpy())
    return torch.from_numpy(np.array(log_weights)), float(k_hat)


def log_likelihood(source: RowSource, draws: Tensor, report: Callable[[int, int], None] | None = None) -> Tensor:
    """Σ_i c_i (y_i f_i - η(f_i, r_i)) for each draw, f = o + Aβ. `report` is called with rows done and all rows."""
    return reported_sum(source, partial(block_log_likelihood, draws=draws), torch.zeros_like(draws[:, 0]), report)


def block_log_likelihood(block: Block, draws: Tensor) -> list[Tensor]:
    weight = torch.ones_like(block.label) if block.weight is None else block.weight
    pull = block.design.pull(weight * block.label)  # Σ c y a, so that labels cost nothing per draw
    fixed = 0.0 if block.offset is None else torch.dot(weight * block.label, block.offset)
    parts = []
    for some in draws.split(DRAWS_PER_BLOCK):
        f = block.design.project(some.T)
        if block.offset is not None:
            f = f + block.offset[:, None]
        parts.append(some @ pull + fixed - weight @ softplus_given_draws(f, block.residual))
    return [torch.cat(parts)]


def softplus_given_draws(f: Tensor, residual: Tensor | None) -> Tensor:
    """η(f, r), rows × draws; it is log(1+e^f) without residual variance."""
    if residual is None or not bool(residual.any()):
        return torch.nn.functional.softplus(f, threshold=LINEAR)
    bound = fast_limit(RESIDUAL_ERROR)
    assert bound is not None
    return bound.moments(f, residual[:, None].expand_as(f))[0]


def residual_cost(source: RowSource, posterior: Posterior) -> float:
    """Σ_i c_i (η(ϑ_i, τ_i²) - η(ϑ_i, τ_i² - r_i)), about ½ Σ b_i r_i: what the trace of K_xx - AAᵀ costs, in nats."""
    return float(source.reduce(partial(block_residual_cost, posterior=posterior))[0])


def block_residual_cost(block: Block, posterior: Posterior) -> list[Tensor]:
    theta, tau2 = latent(block, posterior)
    if block.residual is None:
        return [torch.zeros_like(theta[:1]).sum()]
    explained = (tau2 - block.residual).clamp(min=0.0)
    cost = limit().moments(theta, tau2)[0] - limit().moments(theta, explained)[0]
    return [cost.sum() if block.weight is None else block.weight @ cost]


def weighted_quantiles(values: Tensor, weights: Tensor, levels: list[float]) -> Tensor:
    """Quantiles of each column of `values` (draws × k) under the weights of the draws: levels × k."""
    ordered, order = values.sort(0)
    mass = weights[order].cumsum(0)
    index = torch.stack([(mass < level).sum(0) for level in levels]).clamp(max=len(values) - 1)
    return torch.gather(ordered, 0, index)
