"""L-BFGS in the metric of a star, used if the fixed point of the precisions is unstable, as with separated classes.

Under a wide prior the log-odds of separated classes have such large sds that curvatures change faster than precisions
follow, and steps that hold one of them fixed to solve for the other overshoot. With w_k = μ_k + F_k z the likelihood is
concave in (μ, F), and its gradient needs only the same sums:

    μ_k = μ⁰_k + F⁰_k a_k,  F_k = F⁰_k T_k,  T_k upper triangular with diagonal e^{t_k};
    ∂F/∂a_k = F⁰_kᵀ ∂F/∂μ_k,  ∂F/∂T_k = -F⁰_kᵀ R_k F_k,  R_k = A_k - (P_k - P_k M⁻¹ P_k).
"""

import math
from collections.abc import Callable

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from viper.inference.classes.problem import ClassProblem, Evaluated
from viper.inference.classes.star import Star, centred_classes, diagonals, star_from, tied

ASCENT_STEPS, ASCENT_MEMORY = 300, 30
MOST_DIGITS_LOST = 1e9  # P_jj (P⁻¹)_jj of a class; with more, rounding in P exceeds what is left to gain
LARGEST_CHANGE = 1.5  # largest change in the logarithm of a conditional sd
LEAST_SLOPE = 0.01  # slope at which a climb ends, over √(nats that may be left); the curvature of F is about one


class StarCoordinates:
    """A vector x for every star; zero is the star q."""

    def __init__(self, q: Star) -> None:
        self.q, (self.classes, self.size) = q, q.mean.shape
        self.factor = q.factor.sqrt() if q.diagonal else q.factor
        self.above = torch.triu_indices(self.size, self.size, 1)

    @property
    def length(self) -> int:
        above = 0 if self.q.diagonal else self.above.shape[1]
        return self.classes * (2 * self.size + above)

    def bounds(self) -> np.ndarray:
        """Lower and upper limits of the coordinates, so that no long step ends on a plateau where variances vanish."""
        ends = np.full((2, self.length), np.inf)
        means = self.classes * self.size
        ends[:, means : 2 * means] = LARGEST_CHANGE
        ends[0] *= -1.0
        return ends

    def times(self, vectors: Tensor, transposed: bool = False) -> Tensor:
        """F⁰_k v_k, or F⁰_kᵀ v_k."""
        if self.q.diagonal:
            return self.factor * vectors
        return ((self.factor.mT if transposed else self.factor) @ vectors[..., None])[..., 0]

    def split(self, x: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Split x into means, diagonals, and entries above them, for each class."""
        mean, log_diagonal, above = (
            torch.from_numpy(x).to(self.factor).tensor_split([self.classes * self.size, 2 * self.classes * self.size])
        )
        return mean.view(self.classes, -1), log_diagonal.view(self.classes, -1).exp(), above.view(self.classes, -1)

    def star(self, x: np.ndarray) -> Star | None:
        """The star at x."""
        shift, diagonal, above = self.split(x)
        mean = centred_classes(self.q.mean + self.times(shift))
        if self.q.diagonal:
            return star_from(mean, (self.factor * diagonal).square().reciprocal())
        T = torch.diag_embed(diagonal)
        T[:, self.above[0], self.above[1]] = above
        factor = self.factor @ T
        eye = torch.eye(self.size, dtype=T.dtype, device=T.device).expand_as(T)
        inverse = torch.linalg.solve_triangular(factor, eye, upper=True)
        precision = inverse.mT @ inverse
        lost = diagonals(precision) * factor.square().sum(-1)
        return star_from(mean, precision) if bool((lost < MOST_DIGITS_LOST).all()) else None

    def gradient(self, x: np.ndarray, problem: ClassProblem, q: Star, at: Evaluated) -> np.ndarray:
        """∂F/∂x, where q is the star at x."""
        diagonal = self.split(x)[1]
        to_mean = self.times(problem.gradient(q.mean, at.sums), transposed=True)
        residual = problem.target(at.sums.gram) - (q.precision - tied(q.precision))
        if self.q.diagonal:
            parts = [to_mean, -residual * q.factor]
        else:
            slope = -(self.factor.mT @ (residual @ q.factor))
            parts = [to_mean, diagonals(slope) * diagonal, slope[:, self.above[0], self.above[1]]]
        return torch.cat([part.reshape(-1) for part in parts]).cpu().numpy()


def climb_star(
    problem: ClassProblem,
    q: Star,
    enough: float,
    evaluate: Callable[[Star], Evaluated],
    seen: Callable[[Star, Evaluated], None],
) -> None:
    """Climb from q until `enough` nats are left, and call `seen` with each star that is better than all before it."""
    coordinates, best = StarCoordinates(q), -np.inf

    def negative(x: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best
        star = coordinates.star(x)
        if star is None:
            return np.inf, np.zeros_like(x)
        at = evaluate(star)
        if not np.isfinite(at.objective):
            return np.inf, np.zeros_like(x)
        if at.objective > best:
            best = at.objective
            seen(star, at)
        return -at.objective, -coordinates.gradient(x, problem, star, at)

    slope = LEAST_SLOPE * math.sqrt(enough)
    options = {"maxiter": ASCENT_STEPS, "maxcor": ASCENT_MEMORY, "ftol": 1e-16, "gtol": slope}
    bounds = scipy.optimize.Bounds(*coordinates.bounds())
    start = np.zeros(coordinates.length)
    scipy.optimize.minimize(negative, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
