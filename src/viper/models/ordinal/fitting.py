"""Fits an ordinal regression: the log gaps δ of the thresholds, and the coefficients w given them.

First the maximum of the profile is found by Newton's method, with q(w) given δ by the binary solver:

    G(δ) = max_q F(q; δ) + Σ_k n_k log(1 - e^{-g_k}) + log p(δ).

By the envelope theorem its gradient is that of F at the inner optimum. With the negative Hessian H of G at the maximum,
δ ~ N(δ̂, H⁻¹), and the mean of w follows δ. Then the means of δ and w are moved to where the ELBO of both,

    E_δ[F(q(w|δ); δ) + Σ_k n_k log(1 - e^{-g_k}) + log p(δ)] + entropy of δ,

is largest. The expectation over δ is a weighted sum over a few points (`OrdinalPosterior.points`).
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from viper.errors import ConvergenceWarning, NotFinite, users_line
from viper.inference.newton import Result
from viper.inference.ordinal.gaps import GapPrior, Gaps, inverse_root, log_one_minus_exp, thresholds_of
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.ordinal.rows import LevelRows
from viper.inference.posterior import Posterior, moved, square_factor
from viper.inference.problem import Gaussian, Prior, Problem
from viper.models.fitting import LARGEST_FULL, FitOptions, FittedPosterior, fit_posterior

GAP_TOLERANCE = 1e-8  # nats that a step in δ would still gain
INNER_NOISE = 1e-7  # nats by which the inner optimum may be off
SETTLED_GAIN = 1e-8  # nats that moving the means would still gain
MOST_GAP_STEPS, MOST_HALVINGS, MOST_SETTLING = 100, 30, 30


@dataclass(frozen=True)
class FittedOrdinal:
    """A posterior with its prior, the last problem that the binary solver solved, and its result.

    `posterior` is that of w given the gaps at the maximum of G, `ordinal` that of both; `result.objective` is G there.
    """

    posterior: Posterior
    prior: Prior
    problem: Problem
    result: Result
    ordinal: OrdinalPosterior
    gap_prior: GapPrior
    elbo: float
    kl: float
    error: float  # bound on rounding

    def __iter__(self) -> Iterator[Any]:
        """The first four fields, which the search for the prior unpacks."""
        return iter((self.posterior, self.prior, self.problem, self.result))

    def certified(self) -> tuple[float, float, float]:
        """The ELBO, a lower bound on it that allows for rounding, and KL(q ‖ p) of coefficients and gaps."""
        return self.elbo, self.elbo - self.error, self.kl


class GapState(NamedTuple):
    """A δ with the fit given δ, and the derivatives of G there."""

    delta: Tensor
    fit: FittedPosterior
    value: float
    slope: Tensor
    bend: Tensor
    response: Tensor  # dμ/dδ

    @property
    def step(self) -> Tensor:
        root = inverse_root(self.bend)
        return root @ (root @ self.slope)

    @property
    def gain(self) -> float:
        """What the step gains, in nats."""
        return 0.5 * float(self.slope @ self.step)

    def posterior(self) -> OrdinalPosterior:
        """Laplace's approximation for δ, with q(w) given δ."""
        q = moved(self.fit.posterior, "cpu")
        return OrdinalPosterior(q.mean, square_factor(q), self.response, self.delta, inverse_root(self.bend))


def fit_ordinal(
    rows: LevelRows, gaps: Gaps, prior: Prior, options: FitOptions, seed: int, start: Tensor | None = None
) -> FittedOrdinal:
    """Fit coefficients and gaps under a given prior, from a given δ or from the shares of the levels."""
    check_columns(rows)
    passes, history = 0.0, []

    def evaluated(delta: Tensor, warm: Gaussian | None) -> GapState:
        nonlocal passes
        fit = fit_posterior(rows.at(thresholds_of(delta)), gaps.prior.given(prior, delta), options, seed, warm)
        passes += fit.result.passes + 1.0
        history.extend(fit.result.history)
        return gap_state(rows, gaps, prior, delta, fit)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        state = evaluated(gaps.start() if start is None else start, None)
        state, converged = climb_gaps(state, evaluated)
    others = [one for one in caught if not issubclass(one.category, ConvergenceWarning)]
    for one in [*others, *(caught[-1:] if not state.fit.result.converged else [])]:
        warnings.warn(one.message, one.category, stacklevel=users_line())
    if not converged:
        warnings.warn(
            f"The search for the thresholds stopped early: a step would still gain {state.gain:.1e} nats. Merge rare "
            "levels, or use a narrower prior.",
            ConvergenceWarning,
            stacklevel=users_line(),
        )
    fit, result = state.fit, state.fit.result
    result = replace(
        result,
        objective=state.value,
        passes=passes,
        history=history,
        converged=result.converged and converged,
        status=result.status if converged else "the search for the thresholds stopped early",
    )
    ordinal, elbo, kl = move_to_elbo_maximum(rows, gaps, prior, state.posterior(), result)
    if not math.isfinite(elbo):
        raise NotFinite(f"levels must have more rows for a finite ELBO; got {gaps.size + 2} levels. Merge neighbours.")
    exact, bound, _ = fit.certified()
    return FittedOrdinal(fit.posterior, prior, fit.problem, result, ordinal, gaps.prior, elbo, kl, exact - bound)


def check_columns(rows: LevelRows) -> None:
    if rows.source.dimension > LARGEST_FULL:
        raise ValueError(
            f"ordinal regression keeps a full covariance of at most {LARGEST_FULL} coefficients; got "
            f"{rows.source.dimension}. Leave out columns, or combine them."
        )


def gap_state(rows: LevelRows, gaps: Gaps, prior: Prior, delta: Tensor, fit: FittedPosterior) -> GapState:
    """Evaluate G and its derivatives, by one pass; `prior` is that of w given the prior mean of δ."""
    q, none = moved(fit.posterior, "cpu"), torch.zeros(gaps.size, gaps.size, dtype=torch.float64)
    at = OrdinalPosterior(q.mean, square_factor(q), q.mean.new_zeros(len(q.mean), gaps.size), delta, none)
    sums = rows.threshold_sums(at)
    places, weights = at.points()
    own = gaps.prior.given(prior, delta)
    slope, bend, response = gaps.derivatives(delta.expand(len(places), -1), weights, sums, at.mean, at.factor, own)
    return GapState(delta, fit, fit.result.objective + float(gaps.constant(delta)), slope, bend, response)


def move_to_elbo_maximum(
    rows: LevelRows, gaps: Gaps, prior: Prior, q: OrdinalPosterior, result: Result
) -> tuple[OrdinalPosterior, float, float]:
    """Move the means of δ and w from the maximum of G to that of the ELBO, and return q, the ELBO, and KL(q ‖ p)."""
    for _ in range(MOST_SETTLING):
        places, weights = q.points()
        delta = q.log_gaps + places @ q.gap_factor.T
        sums = rows.threshold_sums(q)
        own = gaps.prior.given(prior, q.log_gaps)
        pull = sums.pull - own.apply(q.mean - own.mean)
        slope, bend, _ = gaps.derivatives(delta, weights, sums, q.mean, q.factor, own)
        slope = slope + q.response.T @ pull
        root = inverse_root(bend)
        shift = root @ (root @ slope)
        gain = 0.5 * float(slope @ shift + (q.factor.T @ pull).square().sum())
        wider = float((torch.linalg.slogdet(root)[1] - torch.linalg.slogdet(q.gap_factor)[1]).abs())
        if gain < SETTLED_GAIN and wider < SETTLED_GAIN**0.5:
            break
        mean = q.mean + q.factor @ (q.factor.T @ pull) + q.response @ shift
        q = replace(q, mean=mean, log_gaps=q.log_gaps + shift, gap_factor=root)
        result.passes += len(places)
    kl = divergence_from_prior(q, prior, gaps.prior)
    constants = gaps.middle * log_one_minus_exp(delta.exp())
    return q, rows.expected_log_likelihood(q) + float(weights @ constants.sum(1)) - kl, kl


def divergence_from_prior(q: OrdinalPosterior, prior: Prior, of_gaps: GapPrior) -> float:
    """KL(q ‖ p) of coefficients and log gaps."""
    own = of_gaps.given(prior, q.log_gaps)
    shift, apart = q.mean - own.mean, (q.response - of_gaps.moving) @ q.gap_factor
    spread = (q.factor * own.apply(q.factor)).sum() + (apart * own.apply(apart)).sum()
    of_w = 0.5 * float(spread + shift @ own.apply(shift) - own.log_determinant - len(shift))
    away = q.log_gaps - of_gaps.mean
    spread = (q.gap_factor * (of_gaps.precision @ q.gap_factor)).sum()
    determinant = torch.linalg.slogdet(of_gaps.precision).logabsdet
    of_delta = 0.5 * float(spread + away @ of_gaps.precision @ away - determinant - q.size)
    return of_w + of_delta - sum(float(torch.linalg.slogdet(part)[1]) for part in (q.factor, q.gap_factor))


def climb_gaps(state: GapState, evaluated: Callable[[Tensor, Gaussian | None], GapState]) -> tuple[GapState, bool]:
    """Newton's method on G: a step is halved until G does not fall."""
    for _ in range(MOST_GAP_STEPS):
        if state.gain < GAP_TOLERANCE:
            return state, True
        length = 1.0
        for _ in range(MOST_HALVINGS):
            shift = length * state.step
            tried = evaluated(state.delta + shift, expected_posterior(state, shift))
            if tried.value >= state.value - INNER_NOISE:
                break
            length *= 0.5
        else:
            return state, state.gain < INNER_NOISE
        state = tried
    return state, False


def expected_posterior(state: GapState, shift: Tensor) -> Gaussian | None:
    """Where q is expected after a shift of δ, or None if the solver works in other coordinates than the columns."""
    q = state.fit.result.q
    if state.fit.problem.prior is not state.fit.prior or q.cholesky is None:
        return None
    return Gaussian(q.mean + (state.response @ shift).to(q.mean), q.precision, q.cholesky)
