"""Missing values drawn from what the other columns say about them.

A fit draws them by chained equations (van Buuren & Groothuis-Oudshoorn 2011): each incomplete column in turn is
regressed on all others and on the outcome, the regression is drawn from its posterior, and the missing values from the
regression. Numbers are taken from observed rows with similar predictions; the levels of a category are drawn by
logistic regressions, each of one level against those that follow.

A prediction does not know the outcome. It uses the means and covariances of the columns in the fit: numbers are drawn
from their conditional normal distribution, categories by Bayes' rule for normal columns with a common covariance.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch

from viper.errors import ConvergenceWarning, FormulaError, users_line
from viper.inference.newton import newton
from viper.inference.problem import Prior, Problem
from viper.inference.rows import Arrays
from viper.inference.threads import one_thread
from viper.softplus.bounds import build_bound

DONORS = 5  # observed rows from which one is drawn, as in R's mice
RIDGE = 1e-5  # relative to the diagonal of XᵀX, as in mice: separates collinear columns
SLOPE_SD, INTERCEPT_SD = 3.0, 10.0  # prior of the logistic regressions, for standardised columns
DRAW_TOLERANCE = 1e-4  # nats to the optimum: far below the spread of a draw
MOST_IMPUTED_COLUMNS = 2_000  # numbers and levels; the cost of a regression grows with the cube
FEWEST_COMPARED = 5  # sweeps of each chain in R-hat
UNSETTLED_RHAT = 1.5  # R-hat of five sweeps whose successive means correlate by about 0.7
LARGEST_NUMBER = 1e100  # so that sums of squares are finite
COVARIANCE_RIDGE = 1e-8  # relative to the variances: enough for collinear columns, too small to matter otherwise
DRAWS = 50  # draws per predicted row; for numbers alone their means and covariances are exact
ALTERNATIONS = 10  # between numbers and categories in the prediction of a row that lacks several
DRAWN_ENTRIES = 1 << 22  # numbers held at once, rows × draws × columns (32 MB)


@dataclass(frozen=True)
class CodedColumns:
    """Raw columns as numbers (NaN is missing) and levels (codes from 0, and -1 is missing), without the target."""

    numbers: dict[str, np.ndarray]
    codes: dict[str, np.ndarray]
    counts: dict[str, int]  # number of levels

    @property
    def rows(self) -> int:
        return len(next(iter([*self.numbers.values(), *self.codes.values()])))

    @property
    def names(self) -> list[str]:
        return [*self.numbers, *self.codes]

    @cached_property
    def holes(self) -> np.ndarray:
        """Which values are missing: rows × columns, in the order of `names`."""
        masks = [np.isnan(x) for x in self.numbers.values()] + [x < 0 for x in self.codes.values()]
        return np.stack(masks, 1)

    @cached_property
    def blocks(self) -> dict[str, slice]:
        """The slice of `matrix` that holds each raw column."""
        ends = np.cumsum([1] * len(self.numbers) + [self.counts[name] - 1 for name in self.codes]).tolist()
        return {name: slice(a, b) for name, a, b in zip(self.names, [0, *ends], ends, strict=False)}

    def matrix(self) -> np.ndarray:
        """Return the numbers, and one column of zeros and ones for each level but the first."""
        parts = [x[:, None] for x in self.numbers.values()]
        parts += [level_indicators(x, self.counts[name]) for name, x in self.codes.items()]
        return np.concatenate(parts, 1, dtype=np.float64)

    def take(self, index: Any) -> "CodedColumns":
        numbers = {name: x[index] for name, x in self.numbers.items()}
        return CodedColumns(numbers, {name: x[index] for name, x in self.codes.items()}, self.counts)


def level_indicators(codes: np.ndarray, levels: int) -> np.ndarray:
    """Return for each level but the first which rows have it."""
    return codes[:, None] == np.arange(1, levels)


# --- for a fit ---


class CompletedTables(Sequence[CodedColumns]):
    """Copies of a table with different draws of the missing values. Only the draws are stored."""

    def __init__(self, columns: CodedColumns, drawn: list[dict[str, np.ndarray]]) -> None:
        self.columns, self.drawn = columns, drawn

    def __len__(self) -> int:
        return len(self.drawn)

    def __getitem__(self, k: Any) -> Any:
        numbers, codes = dict(self.columns.numbers), dict(self.columns.codes)
        for name, values in self.drawn[k].items():
            column = (numbers if name in numbers else codes)[name].copy()
            column[self.columns.holes[:, self.columns.names.index(name)]] = values
            (numbers if name in numbers else codes)[name] = column
        return CodedColumns(numbers, codes, self.columns.counts)


def complete_tables(
    columns: CodedColumns,
    outcome: np.ndarray,
    count: int,
    sweeps: int,
    seed: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> CompletedTables:
    """Draw the missing values `count` times by chained equations, each time from a new start.

    `outcome` has a column for each class but the first, which says whether a row is in it. `report` is called after
    each sweep.
    Without missing values there is one table.
    """
    width = columns.blocks[columns.names[-1]].stop
    if width > MOST_IMPUTED_COLUMNS:
        raise FormulaError(
            f"missing='multiple' handles at most {MOST_IMPUTED_COLUMNS:,} columns and levels; got {width:,}. Leave "
            "columns out, group levels, or choose missing='indicator'."
        )
    if columns.holes.all(0).any():
        name = columns.names[int(columns.holes.all(0).argmax())]
        raise FormulaError(f"every column must have values; got none in {name!r}. Leave it out of the formula.")
    for name, values in columns.numbers.items():
        if (largest := float(np.nanmax(np.abs(values)))) > LARGEST_NUMBER:
            rule = f"missing='multiple' takes numbers up to {LARGEST_NUMBER:g}"
            raise FormulaError(f"{rule}; got {largest:g} in {name!r}. Divide the column by something.")
    if not columns.holes.any():
        return CompletedTables(columns, [{}])
    drawn, means = [], np.zeros((count, sweeps, int(columns.holes.any(0).sum())))
    for k, generator in enumerate(np.random.default_rng(seed).spawn(count)):
        chain = Chain(columns, outcome, generator)
        for sweep in range(sweeps):
            chain.sweep()
            means[k, sweep] = [chain.values(name)[rows].mean() for name, rows in chain.missing.items()]
            report(k * sweeps + sweep + 1, count * sweeps)
        drawn.append({name: chain.values(name)[rows] for name, rows in chain.missing.items()})
    warn_of_unsettled(dict(zip(drawn[0], chain_agreement(means).tolist(), strict=True)))
    return CompletedTables(columns, drawn)


def chain_agreement(means: np.ndarray) -> np.ndarray:
    """R-hat of each column's drawn mean (chains × sweeps × columns), over the second half of the sweeps.

    It compares the variance between chains with that within them, and is 1 if they agree. Few sweeps say nothing.
    """
    late = means[:, means.shape[1] // 2 :]
    n = late.shape[1]
    if n < FEWEST_COMPARED:
        return np.ones(means.shape[2])
    within, between = late.var(1, ddof=1).mean(0), late.mean(1).var(0, ddof=1)
    ratio = np.divide(between, within, out=np.zeros_like(between), where=within > 0)
    return np.sqrt((n - 1.0) / n + ratio)


def warn_of_unsettled(agreement: dict[str, float]) -> None:
    name, worst = max(agreement.items(), key=lambda pair: pair[1])
    if worst > UNSETTLED_RHAT:
        warnings.warn(
            f"The draws of {name!r} still depend on where they began (R-hat {worst:.1f} between the tables), probably "
            "because columns with the same information are missing together. Raise sweeps, or leave one of them out.",
            ConvergenceWarning,
            stacklevel=users_line(),
        )


class Chain:
    """A table whose missing values are drawn repeatedly. Its design is A = [1, outcome, standardised columns]."""

    def __init__(self, columns: CodedColumns, outcome: np.ndarray, generator: np.random.Generator) -> None:
        self.generator = generator
        counts = columns.holes.sum(0)
        order = [j for j in np.argsort(counts, kind="stable") if counts[j]]
        self.missing = {columns.names[j]: np.flatnonzero(columns.holes[:, j]) for j in order}
        self.columns = CodedColumns(dict(columns.numbers), dict(columns.codes), columns.counts)
        for name, rows in self.missing.items():
            values = self.values(name).copy()
            values[rows] = generator.choice(np.delete(values, rows), len(rows))
            self._store(name, values)
        matrix = self.columns.matrix()
        numbers = np.arange(matrix.shape[1]) < len(columns.numbers)
        self.centre = np.where(numbers, matrix.mean(0), 0.0)
        self.scale = np.where(numbers & (matrix.std(0) > 0), matrix.std(0), 1.0)
        head = np.column_stack([np.ones(len(matrix)), outcome - outcome.mean(0)])
        self.before = head.shape[1]
        self.design = np.concatenate([head, (matrix - self.centre) / self.scale], 1)
        self.gram = self.design.T @ self.design

    def values(self, name: str) -> np.ndarray:
        return self.columns.numbers[name] if name in self.columns.numbers else self.columns.codes[name]

    def _store(self, name: str, values: np.ndarray) -> None:
        (self.columns.numbers if name in self.columns.numbers else self.columns.codes)[name] = values

    def sweep(self) -> None:
        """Draw every incomplete column once, those with the fewest missing values first."""
        for name, rows in self.missing.items():
            values = self.values(name).copy()
            draw = self._matched if name in self.columns.numbers else self._levels
            values[rows] = draw(name, rows)
            self._store(name, values)
            self._update(name, rows)

    def _own(self, name: str) -> np.ndarray:
        """Return the positions of a raw column in the design."""
        block = self.columns.blocks[name]
        return np.arange(block.start + self.before, block.stop + self.before)

    def _update(self, name: str, rows: np.ndarray) -> None:
        own, block = self._own(name), self.columns.blocks[name]
        drawn = self.values(name)[rows]
        new = drawn[:, None] if name in self.columns.numbers else level_indicators(drawn, self.columns.counts[name])
        self.design[rows, own[0] : own[-1] + 1] = (new - self.centre[block]) / self.scale[block]
        self.gram[:, own] = self.design.T @ self.design[:, own]
        self.gram[own] = self.gram[:, own].T

    def _matched(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Predictive mean matching: return values of observed rows with similar predictions."""
        (own,), A = self._own(name), self.design
        others = np.delete(np.arange(A.shape[1]), own)
        gram = self.gram - A[rows].T @ A[rows]  # over the rows where the column is observed
        observed = np.delete(np.arange(len(A)), rows)
        best, drawn = np.zeros((2, A.shape[1]))
        mean, factor = regression(gram[np.ix_(others, others)], gram[others, own])
        best[others] = mean
        predicted = A @ best
        residual = float(np.square(A[observed, own] - predicted[observed]).sum())
        # σ² = RSS/χ², β = β̂ + σFz
        sigma = np.sqrt(residual / self.generator.chisquare(max(1, len(observed) - len(others))))
        drawn[others] = mean + sigma * (factor @ self.generator.standard_normal(len(others)))
        match = nearest_donors(predicted[observed], A[rows] @ drawn, self.generator)
        return self.columns.numbers[name][observed[match]]

    def _levels(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Draw levels one after the other: is it the most common one? If not, is it the next, and so on."""
        others = np.delete(np.arange(self.design.shape[1]), self._own(name))
        codes = np.delete(self.columns.codes[name], rows)
        seen, new = np.delete(self.design, rows, 0)[:, others], self.design[np.ix_(rows, others)]
        rows_with = np.bincount(codes, minlength=self.columns.counts[name])
        order = [level for level in np.argsort(-rows_with, kind="stable").tolist() if rows_with[level]]
        drawn, left = np.full(len(rows), order[-1]), np.arange(len(rows))
        for level in order[:-1]:
            if not len(left):
                break
            label = codes == level
            log_odds = new[left] @ logistic_draw(seen, label, self.generator)
            chosen = self.generator.logistic(size=len(left)) < log_odds
            drawn[left[chosen]] = level
            left, codes, seen = left[~chosen], codes[~label], seen[~label]
        return drawn


def regression(gram: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return β̂ = V Xᵀy and F with FFᵀ = V, where V = (XᵀX + κ diag XᵀX)⁻¹."""
    scale = 1.0 / np.sqrt(np.maximum(np.diag(gram), np.finfo(float).tiny))
    values, vectors = np.linalg.eigh(gram * scale[:, None] * scale)
    factor = scale[:, None] * vectors / np.sqrt(np.maximum(values, 0.0) + RIDGE)
    return factor @ (factor.T @ right), factor


def nearest_donors(observed: np.ndarray, wanted: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return, for each wanted prediction, an observed row: one of the DONORS nearest, drawn at random."""
    order = np.argsort(observed, kind="stable")
    ordered = observed[order]
    near = np.searchsorted(ordered, wanted)[:, None] + np.arange(-DONORS, DONORS)
    outside = (near < 0) | (near >= len(ordered))
    near = near.clip(0, len(ordered) - 1)
    distance = np.where(outside, np.inf, np.abs(ordered[near] - wanted[:, None]))
    donors = min(DONORS, len(ordered))
    rank = np.argsort(distance, 1, kind="stable")[:, :donors]
    place = np.arange(len(wanted))
    chosen = ordered[near[place, rank[place, generator.integers(donors, size=len(wanted))]]]
    # rows with the same prediction are equally near
    first, last = (np.searchsorted(ordered, chosen, side) for side in ("left", "right"))
    return order[generator.integers(first, last)]


def logistic_draw(rows: np.ndarray, label: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draw the coefficients of a logistic regression from their posterior. The first column is the intercept."""
    precision = torch.full((rows.shape[1],), SLOPE_SD**-2, dtype=torch.float64)
    precision[0] = INTERCEPT_SD**-2
    source = Arrays(torch.from_numpy(np.ascontiguousarray(rows)), torch.from_numpy(label))
    bound = build_bound("viper", None, None, None, None, DRAW_TOLERANCE)
    with one_thread():
        found = newton(Problem(source, Prior(torch.zeros_like(precision), precision), bound), tol=DRAW_TOLERANCE)
    noise = torch.from_numpy(generator.standard_normal(len(precision)))
    return (found.q.mean + found.factor @ noise).numpy()


# --- for a prediction ---


@dataclass(frozen=True)
class Imputation:
    """What the columns say about each other, without the outcome: enough to draw missing values of new rows.

    Attributes
    ----------
    mean, covariance : array
        Mean and covariance of the columns of `CodedColumns.matrix`, over the completed tables of the fit.
    low, high : array
        The smallest and the largest value of each column of numbers in the fit.
    """

    mean: np.ndarray
    covariance: np.ndarray
    low: np.ndarray
    high: np.ndarray
    _discriminants: dict[str, tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def learn(cls, tables: Sequence[CodedColumns]) -> "Imputation":
        """Learn from completed tables."""
        first = tables[0]
        reference = first.matrix().mean(0)  # near the mean, so that no digits cancel
        total, square = np.zeros_like(reference), np.zeros((len(reference), len(reference)))
        for table in tables:
            matrix = table.matrix() - reference
            total += matrix.sum(0)
            square += matrix.T @ matrix
        rows = len(tables) * first.rows
        covariance = square / rows - np.outer(total, total) / rows**2
        # drawn numbers are those of observed rows, so the range is the same in all tables
        low, high = (np.array([fold(x) for x in first.numbers.values()], dtype=float) for fold in (np.min, np.max))
        return cls(reference + total / rows, 0.5 * (covariance + covariance.T), low, high)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return everything that is stored, by name."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.init}

    def check(self, width: int, numbers: int) -> None:
        """Raise a ValueError unless these are the moments of `width` columns, of which the first are `numbers`."""
        shapes = {"mean": (width,), "covariance": (width, width), "low": (numbers,), "high": (numbers,)}
        for name, array in self.arrays().items():
            if array.shape != shapes[name] or array.dtype != np.float64 or not np.isfinite(array).all():
                raise ValueError(f"imputation.{name} that is not {shapes[name]} finite numbers")
        if not np.array_equal(self.covariance, self.covariance.T) or not (self.low <= self.high).all():
            raise ValueError("an imputation that is not symmetric, or without a range")

    def draws(self, columns: CodedColumns) -> CodedColumns:
        """Return every row DRAWS times, with missing values drawn. A row's draws do not depend on other rows."""
        drawn = columns.take(np.repeat(np.arange(columns.rows), DRAWS))
        patterns, group = np.unique(columns.holes, axis=0, return_inverse=True)
        for k, holes in enumerate(patterns):
            if not holes.any():
                continue
            rows = np.flatnonzero(group.ravel() == k)
            places = (rows[:, None] * DRAWS + np.arange(DRAWS)).ravel()
            filled = self._filled(columns.take(rows), holes)
            for name in np.array(columns.names)[holes]:
                ours = filled.numbers if name in filled.numbers else filled.codes
                theirs = drawn.numbers if name in drawn.numbers else drawn.codes
                theirs[name][places] = ours[name]
        return drawn

    def _filled(self, columns: CodedColumns, holes: np.ndarray) -> CodedColumns:
        """Draw the missing values of rows in which the same columns are missing."""
        names = [name for name, hole in zip(columns.names, holes, strict=True) if hole]
        unknown = np.concatenate([np.arange(*columns.blocks[name].indices(len(self.mean))) for name in names])
        numbers = unknown[unknown < len(columns.numbers)]
        categories = [name for name in names if name in columns.codes]
        matrix = np.nan_to_num(columns.matrix())
        matrix[:, unknown] = self._conditional(unknown)[0](matrix)
        matrix = np.repeat(matrix, DRAWS, 0)
        numbers_given, factor = self._conditional(numbers)
        codes = {}
        for sweep in range(1 if len(categories) + bool(len(numbers)) == 1 else ALTERNATIONS):
            generator = np.random.default_rng(sweep)
            for name in categories:
                codes[name] = self._level_draws(columns, name, matrix, generator)
                matrix[:, columns.blocks[name]] = level_indicators(codes[name], columns.counts[name])
            if len(numbers):
                noise = balanced_noise(DRAWS, len(numbers), generator) @ factor.T
                matrix[:, numbers] = numbers_given(matrix) + np.tile(noise, (columns.rows, 1))
        repeated = columns.take(np.repeat(np.arange(columns.rows), DRAWS))
        values = {name: matrix[:, columns.blocks[name].start] for name in names if name in columns.numbers}
        return CodedColumns(repeated.numbers | values, repeated.codes | codes, columns.counts)

    def _conditional(self, unknown: np.ndarray) -> tuple[Callable[[np.ndarray], np.ndarray], np.ndarray]:
        """Return E[z_u | z_o] as a function of rows z, and F with FFᵀ = Cov(z_u | z_o), for o all other columns."""
        known = np.delete(np.arange(len(self.mean)), unknown)
        across = self.covariance[np.ix_(known, unknown)]
        slope = solve_scaled(self.covariance[np.ix_(known, known)], across)
        rest = self.covariance[np.ix_(unknown, unknown)] - across.T @ slope
        values, vectors = np.linalg.eigh(0.5 * (rest + rest.T))
        given = lambda z: self.mean[unknown] + (z[:, known] - self.mean[known]) @ slope  # noqa: E731
        return given, vectors * np.sqrt(np.maximum(values, 0.0))

    def _level_draws(
        self, columns: CodedColumns, name: str, matrix: np.ndarray, generator: np.random.Generator
    ) -> np.ndarray:
        """Draw a level for each row of `matrix`, which has DRAWS rows for each row of the table."""
        if name not in self._discriminants:
            self._discriminants[name] = self._discriminant(columns.blocks[name])
        constant, slope = self._discriminants[name]
        score = constant + matrix @ slope
        share = np.exp(score - score.max(1, keepdims=True)).cumsum(1)
        # one draw from each DRAWS-th of the distribution, in random order
        u = (generator.permutation(DRAWS) + 0.5) / DRAWS
        return (share < np.tile(u, columns.rows)[:, None] * share[:, -1:]).sum(1)

    def _discriminant(self, block: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return constants and slopes of log p(level | z) = log π + zᵀW⁻¹m - ½ mᵀW⁻¹m + constant.

        The means m of a level are a regression on its indicators, and W is the covariance of the residuals.
        """
        own = np.arange(len(self.mean))[block]
        others = np.delete(np.arange(len(self.mean)), own)
        share = np.append(1.0 - self.mean[own].sum(), self.mean[own]).clip(min=1e-12)
        across = self.covariance[np.ix_(own, others)]
        slope = solve_scaled(self.covariance[np.ix_(own, own)], across)
        levels = np.eye(len(own) + 1)[:, 1:] - self.mean[own]
        means = self.mean[others] + levels @ slope
        within = self.covariance[np.ix_(others, others)] - across.T @ slope
        weights = np.zeros((len(self.mean), len(share)))
        if len(others):
            weights[others] = solve_scaled(within, means.T)
        return np.log(share) - 0.5 * np.einsum("lo,ol->l", means, weights[others]), weights


def solve_scaled(covariance: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return C⁻¹ R for a covariance that may be singular: its variances are raised by a factor 1 + COVARIANCE_RIDGE."""
    sd = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    scale = 1.0 / np.where(sd > 0.0, sd, 1.0)
    scaled = covariance * scale[:, None] * scale
    scaled[np.diag_indices_from(scaled)] = 1.0 + COVARIANCE_RIDGE
    return scale[:, None] * np.linalg.solve(scaled, scale[:, None] * right)


def balanced_noise(draws: int, width: int, generator: np.random.Generator) -> np.ndarray:
    """Return standard normal noise (draws × width) whose columns have exactly mean 0, variance 1 and no correlation.

    With it, the draws of a normal distribution have its mean and covariance. If there are as many columns as `draws` or
    more, not all correlations can be zero.
    """
    noise = generator.standard_normal((draws, width))
    for start in range(0, width, draws - 1):
        part = noise[:, start : start + draws - 1]
        basis, upper = np.linalg.qr(part - part.mean(0))
        noise[:, start : start + draws - 1] = np.sqrt(draws) * basis * np.sign(np.diag(upper))
    return noise
