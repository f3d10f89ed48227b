"""Average predictions, contrasts and slopes: how the probability changes, on average over rows, when a column does.

    A(β) = Σ_i w_i s(x_iᵀβ) / Σ_i w_i,      q(β) = N(μ, Σ)

is the average over rows whose columns were changed before they were encoded. A contrast is the difference of two such
averages, a slope a difference over a tiny step. What is known about A:

- E[A] is the average of E[s(f_i)], which is exact.
- With L = E[∇A]ᵀ(β - μ), where E[∇A] = Σ_i w_i E[s'(f_i)] x_i / Σ_i w_i is exact too, Cov(A, L) = Var L (Stein's
  lemma). Hence Var A = Var L + Var(A - L), of which only the second, smaller part is estimated from draws.
- Quantiles are those of the draws, after the sampling noise of L, whose distribution is known, is removed from them.

With more than two classes, or ordered levels, each class has its own average (classes/averages.py,
ordinal/averages.py), and tables have a column that names it.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse
import scipy.special
import torch
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data.checks import check_word, read_offset, read_weights
from viper.data.open import is_kept_elsewhere
from viper.errors import instead, listed
from viper.formula.columns import (
    MONTHS,
    WEEKDAYS,
    as_frame,
    calendar_days,
    is_iso,
    number_text,
    parsed_dates,
    sorted_values,
    with_days,
    without_blanks,
)
from viper.inference.classes.posterior import StarPosterior
from viper.inference.importance import SEED
from viper.inference.mixture.posterior import GaussianMixture
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.posterior import Posterior, latent, moved, noise_shape
from viper.inference.progress import Progress
from viper.inference.rows import BLOCK_ROWS, Block, Dense, RowSource, scattered
from viper.models.classes.averages import TILE, FlatStar, add_class_block
from viper.models.ordinal.averages import LevelJoint, add_level_block
from viper.models.prediction import half_width
from viper.softplus.limit import limit

if TYPE_CHECKING:
    import pandas

CHUNK_ROWS = 65_536  # rows that are changed and encoded at a time
DRAWN_ROWS = 10_000  # most rows of an average from which the part nonlinear in β is estimated
DRAW_BUDGET = 20_000_000  # rows × draws of one average, by default
FEWEST_USUAL, MOST_DRAWS = 2000, 10_000  # default number of draws
NEEDED_DRAWS = 100_000  # most draws by default, for levels close to 1
TAIL_DRAWS = 5  # least number of draws beyond each end of an interval
MOST_GROUPS = 1000  # groups, or combinations of given values
SAMPLED_POINTS = 2000  # changed rows from which a Gaussian process learns how its rows vary together
SLOPE_STEP = 1e-4  # in standard deviations of the column; central differences are then accurate to about 1e-9
RANGES = ("sd", "iqr", "minmax")  # named changes of a number
ORDERS = ("reference", "pairwise", "sequential")  # ways to pair the levels of a category
MEASURES = ("difference", "ratio", "odds")
OF_CLASS = "class"  # the column that names the class of an average
NEW_GROUP = "new"  # value of a group column that stands for a group not in the fit

OpenRows = Callable[[Any, Any, int], RowSource]
AnyPosterior = Posterior | StarPosterior | OrdinalPosterior | GaussianMixture


class EffectsMixin:
    """Estimators with average predictions, contrasts and slopes."""

    posterior_: Posterior
    verbose: Any
    random_state: Any

    def _joint(self, points: Callable[[], Any]) -> tuple[OpenRows, AnyPosterior]:
        """Return a function that opens X and offset as f = o + Aβ in blocks of rows, and the posterior of β.

        `points` returns some of the rows that will be opened.
        """
        raise NotImplementedError

    def average(
        self,
        X: Any,
        *,
        at: dict[Any, Any] | None = None,
        by: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
        level: float = 0.95,
        draws: int | None = None,
        random_state: Any = None,
    ) -> "pandas.DataFrame":
        """Average probability of the second class over the rows of X, with its credible interval.

        With more than two classes, each has its own average; here, in `contrast` and in `slopes`, the column `class`
        names it.

        Parameters
        ----------
        X : array or DataFrame (n, p)
            The rows, with the columns that `predict_proba` takes; raw columns if the model has a formula.
        at : dict, optional
            Column -> value, or list of values, that is set in every row first. There is one average for each
            combination.
        by : column name, list of names, or array (n,), optional
            Groups of rows to average over separately. The columns need not be among those of the model.
        sample_weight : array (n,), optional
            Weights of the rows in the average.
        offset : array (n,), optional
            Known part of the log-odds of each row; with more than two classes n × K.
        level : float, default 0.95
            Posterior mass of the interval.
        draws : int, optional
            Number of draws behind the interval. The default is 10,000 for up to 2,000 rows, and falls to 2,000 for
            10,000 rows or more. The estimate itself is exact.
        random_state : int, optional
            Seed of the draws, by default that of the estimator, or a fixed one.

        Returns
        -------
        DataFrame
            A row for each group and combination of values: `estimate`, `sd`, `lower`, `upper`.
        """
        study = EffectStudy(self, X, at, by, sample_weight, offset, level, draws, random_state)
        return study.table([Comparison({}, [OBSERVED])], "average")

    def contrast(
        self,
        X: Any,
        variables: Any = None,
        *,
        measure: str = "difference",
        at: dict[Any, Any] | None = None,
        by: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
        level: float = 0.95,
        draws: int | None = None,
        random_state: Any = None,
    ) -> "pandas.DataFrame":
        """How much the average probability changes when one column changes and the others stay as they are.

        Parameters
        ----------
        X : array or DataFrame (n, p)
            The rows to average over, as in `average`.
        variables : column name, list of names, or dict, optional
            The columns to change, by default each in turn, or a dict of column -> change:

            - a number d: from the observed value x to x + d in every row, in days for dates;
            - a list of values: from the first, given to every row, to each of the others;
            - "sd": by one standard deviation, half of it below and half above the observed value;
            - "iqr" or "minmax": from the lower to the upper quartile of the column, or between its extremes;
            - "reference", "pairwise" or "sequential" for categories: every level against the reference, all pairs, or
              each level against the one before;
            - None: for numbers, a round number of about one standard deviation, or from 0 to 1 if there are no other
              values; for categories, "reference"; for dates, if the model uses only the month or the day of the week,
              each against the first; if it uses the date itself too, a year or whole weeks, in the rows that can be
              moved without leaving the months of the fit.
        measure : {"difference", "ratio", "odds"}, default "difference"
            Difference of the two average probabilities (risk difference), their ratio (risk ratio), or the ratio of
            their odds. The estimate of a ratio is its posterior median.
        at, by, sample_weight, offset, level, draws, random_state
            As in `average`.

        Returns
        -------
        DataFrame
            A row for each contrast, group and combination of values: `variable`, `contrast`, the average probabilities
            `before` and `after` the change, `estimate`, `sd`, `lower`, `upper` and `p_direction`, the posterior
            probability of the more probable sign of the change.
        """
        check_word(measure, "measure", MEASURES)
        study = EffectStudy(self, X, at, by, sample_weight, offset, level, draws, random_state)
        return study.table(list(study.contrasts(variables, measure)), measure)

    def slopes(
        self,
        X: Any,
        variables: Any = None,
        *,
        at: dict[Any, Any] | None = None,
        by: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
        level: float = 0.95,
        draws: int | None = None,
        random_state: Any = None,
    ) -> "pandas.DataFrame":
        """Average derivative of the probability with respect to a numeric column (average marginal effect).

        Parameters
        ----------
        X : array or DataFrame (n, p)
            The rows to average over, as in `average`.
        variables : column name or list of names, optional
            Numeric columns, by default all of them.
        at, by, sample_weight, offset, level, draws, random_state
            As in `average`.

        Returns
        -------
        DataFrame
            A row for each column, group and combination of values: `variable`, `estimate`, `sd`, `lower`, `upper` and
            `p_direction`, the posterior probability of the more probable sign.
        """
        study = EffectStudy(self, X, at, by, sample_weight, offset, level, draws, random_state)
        return study.table(list(study.slopes(variables)), "difference")


# --- rows whose columns can be changed ---


class NamedRows:
    """Rows of a table, for a model that knows its columns by name."""

    def __init__(self, model: Any, X: Any) -> None:
        self.frame = as_frame(X)
        self.encoding = getattr(model, "formula_", None)
        own = getattr(model, "feature_names_in_", None)
        wanted = (model._columns() if own is None else own) if self.encoding is None else self.encoding.inputs
        self.plain = [str(name) for name in wanted]  # columns that change by default
        self.groups = [name for name in grouping_columns(model) if name not in self.plain]
        self.names = [*self.plain, *self.groups]
        if absent := [name for name in self.names if name not in self.frame.columns]:
            raise ValueError(f"X must have the columns of the fit; got none named {listed(absent)}.")
        given = grouping_columns(model)
        self.levels = {
            **({} if self.encoding is None else self.encoding.levels),
            **{name: given[name] or sorted_values(without_blanks(self.frame[name]).unique()) for name in self.groups},
        }
        self.dates = {} if self.encoding is None else self.encoding.date_functions
        self.inputs = with_days(self.frame[self.names], self.dates)

    def __len__(self) -> int:
        return len(self.frame)

    def numbers(self, name: str) -> np.ndarray:
        """The values of a numeric column, or the days of dates; missing ones are filled in as in the fit."""
        values = self.inputs[name].to_numpy(dtype=np.float64, na_value=np.nan)
        filled = self.encoding.means if self.encoding is not None and self.encoding.fills else {}
        return np.where(np.isnan(values), filled.get(name, np.nan), values)

    def has_missing(self, name: str) -> bool:
        return bool(self.inputs[name].isna().any())

    def grouping(self, name: Any) -> Any:
        if name not in self.frame.columns:
            raise ValueError(f"by must name columns of X; got {name!r}. {instead(str(name), self.frame.columns)}")
        return without_blanks(self.frame[name])

    def changed(self, part: Any, values: dict[str, Any]) -> Any:
        """Return some of the rows, with new values in some of their columns."""
        return self.inputs.iloc[part].assign(**values)


class PlainRows:
    """Rows of an array or a sparse matrix; its columns are named x0, x1, ... or by their index."""

    def __init__(self, X: Any) -> None:
        self.X = X.tocsr() if scipy.sparse.issparse(X) else np.asarray(X.cpu() if isinstance(X, Tensor) else X)
        if self.X.ndim != 2:
            raise ValueError(f"X must have two dimensions; got {self.X.ndim}. Pass rows by columns.")
        self.names = self.plain = [f"x{j}" for j in range(self.X.shape[1])]
        self.groups: list[str] = []
        self.levels: dict[str, list[Any]] = {}
        self.dates: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return int(self.X.shape[0])

    def numbers(self, name: str) -> np.ndarray:
        column: Any = self.X[:, [self.names.index(name)]]
        return np.asarray(column.toarray() if scipy.sparse.issparse(column) else column, dtype=np.float64).ravel()

    def has_missing(self, name: str) -> bool:
        return False

    def grouping(self, name: Any) -> Any:
        name = f"x{name}" if isinstance(name, int) else name
        if name not in self.names:
            raise ValueError(f"by must name columns of X; got {name!r}. {instead(str(name), self.names)}")
        return self.numbers(name)

    def changed(self, part: Any, values: dict[str, Any]) -> Any:
        rows = self.X[part]
        if scipy.sparse.issparse(rows):
            for name, new in values.items():
                j, gap = self.names.index(name), new - PlainRows(rows).numbers(name)
                at = np.arange(len(gap))
                rows = (rows + scipy.sparse.csr_array((gap, (at, np.full_like(at, j))), shape=rows.shape)).tocsr()
            return rows
        rows = np.array(rows, dtype=np.float64)
        for name, new in values.items():
            rows[:, self.names.index(name)] = new
        return rows


def grouping_columns(model: Any) -> dict[str, list[Any]]:
    """Columns of groups, each with its groups; with none if it says which group only together with others."""
    found: dict[str, list[Any]] = {}
    for factor in getattr(model, "factors_", []):
        for name in factor.term.columns:
            found[name] = factor.levels if len(factor.term.columns) == 1 else found.get(name, [])
    return found


def changeable_rows(model: Any, X: Any) -> NamedRows | PlainRows:
    """Return the rows of X in a form whose columns can be changed."""
    if is_kept_elsewhere(X):
        raise ValueError(
            f"effects need rows in memory; got {type(X).__name__}. Pass a DataFrame or array, such as some of the rows."
        )
    named = (
        hasattr(model, "formula_")
        or hasattr(model, "factors_")
        or (hasattr(model, "feature_names_in_") and hasattr(X, "columns"))
    )
    rows = NamedRows(model, X) if named else PlainRows(X)
    if not len(rows):
        raise ValueError("effects need at least one row to average over; got none.")
    return rows


# --- what is compared ---


class Side(NamedTuple):
    """An average to compute: columns with their new values, one for all rows or one for each.

    Sides with the same `key` are computed once. `scale` multiplies the weight of each
    row.
    """

    key: Hashable
    values: dict[str, Any]
    scale: np.ndarray | None = None


OBSERVED = Side((), {})


class Comparison(NamedTuple):
    """An average, or two of them, the second compared with the first."""

    labels: dict[str, Any]
    sides: list[Side]


@dataclass(frozen=True)
class Averages:
    """Averages A of probabilities, one for each group, or for each group and class: E[A], E[∇A] and draws of A."""

    mean: Tensor  # groups
    gradient: Tensor  # groups × d
    draws: Tensor  # groups × draws

    def minus(self, other: "Averages") -> "Averages":
        return Averages(self.mean - other.mean, self.gradient - other.gradient, self.draws - other.draws)

    def on_log_scale(self, odds: bool) -> "Averages":
        """log A, or log A/(1-A), to first order in the gradient; the mean is that of the draws."""
        transform = torch.logit if odds else torch.log
        rate = 1.0 / (self.mean * (1.0 - self.mean) if odds else self.mean)
        draws = transform(self.draws.clamp(min=torch.finfo(torch.float64).tiny))
        return Averages(draws.mean(1), rate[:, None] * self.gradient, draws)


class EffectStudy:
    """Rows, groups and draws of one call, and the averages computed so far."""

    def __init__(
        self,
        model: Any,
        X: Any,
        at: dict[Any, Any] | None,
        by: Any,
        sample_weight: Any,
        offset: Any,
        level: float,
        draws: int | None,
        random_state: Any,
    ) -> None:
        check_is_fitted(model, "posterior_")
        half_width(level)
        self.model, self.level = model, level
        self.rows = changeable_rows(model, X)
        count = len(self.rows)
        self.classes = model.classes_.tolist() if getattr(model, "multiclass_", False) else None
        several = isinstance(model.posterior_, StarPosterior)
        self.offset = read_offset(offset, count, len(model.classes_) if several else 2)
        weight = read_weights(sample_weight, count)
        self.weight = np.ones(count) if weight is None else weight.numpy()
        self.at = self.read_at({} if at is None else at)
        self.group, self.groups = self.read_groups(by)
        if self.classes is not None and OF_CLASS in {*self.at[0], *self.groups[0]}:
            raise ValueError(f"the table has a column {OF_CLASS!r} of its own; got one in X. Rename it in X.")
        self.draw_count = self.read_draws(draws)
        if hasattr(model, "factors_"):
            model._check_draws(self.draw_count)
        self.drawn = rows_to_draw(self.group, self.weight, DRAWN_ROWS)
        if random_state is None:
            random_state = model.random_state if isinstance(model.random_state, int | np.integer) else SEED
        self.seed = int(check_random_state(random_state).randint(2**31))

    # --- what the caller asked for ---

    def column(self, name: Any, option: str) -> str:
        """Return the name of a column of the model; columns of plain arrays may be given by their index."""
        text = f"x{name}" if isinstance(self.rows, PlainRows) and isinstance(name, int | np.integer) else str(name)
        if text not in self.rows.names:
            raise ValueError(f"{option} must name columns of the model; got {name!r}. {instead(text, self.rows.names)}")
        return text

    def value(self, name: str, given: Any, option: str) -> Any:
        """Return a value that the column may have: one of its levels, a date, or a finite number."""
        levels = self.rows.levels.get(name)
        if levels is not None:
            for known in levels:
                if given == known or str(given) == str(known):
                    return known
            if name in self.rows.groups and given == NEW_GROUP:
                return given
            known_levels = instead(str(given), levels)
            raise ValueError(f"{option} must give {name!r} one of its levels; got {given!r}. {known_levels}")
        return (self.date if name in self.rows.dates else self.number)(name, given, option)

    def date(self, name: str, given: Any, option: str) -> str:
        """Return a date as text, which the model reads and a table shows."""
        text = str(given).strip()
        moment = parsed_dates([text if is_iso(text) else None]).iloc[0]
        if moment != moment:  # NaT
            raise ValueError(f"{option} must give {name!r} a date, such as 2024-12-31; got {str(given)!r}.")
        return str(moment.date() if moment == moment.normalize() else moment)

    def number(self, name: str, given: Any, option: str) -> float:
        """Return a finite number."""
        try:
            number = float(given)
        except (TypeError, ValueError):
            number = np.nan
        if not np.isfinite(number):
            raise ValueError(f"{option} must give {name!r} a number; got {given!r}.")
        return number

    def read_at(self, at: dict[Any, Any]) -> list[dict[str, Any]]:
        """Return every combination of the given values, by column."""
        if not isinstance(at, dict):
            raise TypeError(f"at must be a dict of columns and values; got {type(at).__name__}. Write {{'age': 50}}.")
        values = {}
        for key, given in at.items():
            name = self.column(key, "at")
            values[name] = [self.value(name, one, "at") for one in (given if is_sequence(given) else [given])]
        found = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
        if len(found) > MOST_GROUPS:
            raise ValueError(f"at may have at most {MOST_GROUPS:,} combinations of values; got {len(found):,}.")
        return found

    def read_groups(self, by: Any) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Return the group of each row, and the labels of each group."""
        import pandas

        if by is None:
            return np.zeros(len(self.rows), dtype=np.int64), [{}]
        if isinstance(by, str | int):
            columns = {str(by): self.rows.grouping(by)}
        elif is_sequence(by) and all(isinstance(name, str) for name in by) and len(by) != len(self.rows):
            columns = {name: self.rows.grouping(name) for name in by}
        else:
            columns = {str(getattr(by, "name", None) or "group"): np.asarray(by)}
            if np.shape(by) != (len(self.rows),):
                raise ValueError(
                    f"by must have one entry for each of the {len(self.rows):,} rows; got shape {np.shape(by)}."
                )
        for name in columns:
            if any(name in values for values in self.at):
                raise ValueError(f"by and at must name different columns; got {name!r} in both. Leave out one.")
        table = pandas.DataFrame({name: with_ordered_levels(np.asarray(values)) for name, values in columns.items()})
        grouped = table.groupby(list(columns), dropna=False, sort=True, observed=True)
        if grouped.ngroups > MOST_GROUPS:
            raise ValueError(
                f"by may make at most {MOST_GROUPS:,} groups; got {grouped.ngroups:,}. Group the values first, as with "
                "pandas.qcut."
            )
        code = grouped.ngroup().to_numpy()
        first = np.unique(code, return_index=True)[1]
        return code, table.iloc[first].to_dict("records")

    def read_draws(self, draws: int | None) -> int:
        """Return the number of draws, an even one, and check that the interval's ends lie well among them."""
        least = int(np.ceil(2 * TAIL_DRAWS / (1.0 - self.level) - 1e-6))
        if draws is None:
            if least > NEEDED_DRAWS:
                most = 1.0 - 2 * TAIL_DRAWS / NEEDED_DRAWS
                raise ValueError(f"the level of effects must be at most {most:g}; got {self.level!r}.")
            budget = DRAW_BUDGET // min(len(self.rows), DRAWN_ROWS) // len(self.outcomes)
            usual = min(max(budget, FEWEST_USUAL), MOST_DRAWS)
            return max(usual, least + least % 2)
        if not isinstance(draws, int | np.integer) or draws < least:
            raise ValueError(f"draws must be at least {least:,} for a {100 * self.level:g} % interval; got {draws!r}.")
        return int(draws) + int(draws) % 2

    def chosen(self, variables: Any) -> dict[str, Any]:
        """Return the columns to change, with the change that was asked for, or None."""
        if variables is None:
            fixed = {name for values in self.at for name in values}
            return dict.fromkeys(name for name in self.rows.plain if name not in fixed)
        if isinstance(variables, dict):
            given = {self.column(name, "variables"): change for name, change in variables.items()}
        else:
            names = variables if is_sequence(variables) else [variables]
            given = dict.fromkeys(self.column(name, "variables") for name in names)
        for name in given:
            if any(name in values for values in self.at):
                raise ValueError(f"variables and at must name different columns; got {name!r} in both. Leave out one.")
        return given

    # --- contrasts and slopes ---

    def contrasts(self, variables: Any, measure: str) -> Iterator[Comparison]:
        sign = " - " if measure == "difference" else " / "
        for name, change in self.chosen(variables).items():
            if name in self.rows.levels:
                pairs = self.level_pairs(name, change)
            elif change is None and self.rows.dates.get(name, set()) in ({"month"}, {"weekday"}, {"month", "weekday"}):
                pairs = self.calendar_pairs(name)
            else:
                pairs = self.number_pairs(name, change)
            for low, high, label in pairs:
                text = label or f"{readable_value(high.key)}{sign}{readable_value(low.key)}"
                sides = [side._replace(key=(name, side.key)) if side.values else side for side in (low, high)]
                yield Comparison({"variable": name, "contrast": text}, sides)

    def level_pairs(self, name: str, change: Any) -> Iterator[tuple[Side, Side, str]]:
        levels, order = self.rows.levels[name], "reference"
        if isinstance(change, str):
            check_word(change, f"the contrast of {name!r}", ORDERS)
            order = change
        elif change is not None:
            if not is_sequence(change) or len(change) < 2:
                raise ValueError(
                    f"the contrast of {name!r}, a category, must be a list of levels or one of {list(ORDERS)}; got "
                    f"{change!r}."
                )
            levels = [self.value(name, level, f"the contrast of {name!r}") for level in change]
        pairs = {
            "reference": ((levels[0], level) for level in levels[1:]),
            "pairwise": combinations(levels, 2),
            "sequential": pairwise(levels),
        }
        for low, high in pairs[order]:
            yield Side(low, {name: low}), Side(high, {name: high}), ""

    def number_pairs(self, name: str, change: Any) -> Iterator[tuple[Side, Side, str]]:
        x, dated = self.rows.numbers(name), name in self.rows.dates
        unit = " days" if dated else ""
        if change is None and is_binary(x) and not dated:
            change = [0.0, 1.0]
        if isinstance(change, str):
            if change not in RANGES:
                words = "a number of days, a list of dates" if dated else "a number, a list of numbers"
                words = f"{words} or one of {list(RANGES)}"
                raise ValueError(f"the contrast of {name!r} must be {words}; got {change!r}.")
            if change == "sd":
                half = 0.5 * float(np.nanstd(x))
                yield (
                    Side("-sd/2", {name: x - half}),
                    Side("+sd/2", {name: x + half}),
                    f"+{number_text(2 * half)}{unit}",
                )
                return
            ends = np.nanquantile(x, (0.25, 0.75) if change == "iqr" else (0.0, 1.0))
            change = [str(day) for day in calendar_days(ends)] if dated else [float(q) for q in ends]
        if is_sequence(change):
            if len(change) < 2:
                raise ValueError(f"the contrast of {name!r} must have two values or more; got {change!r}.")
            low, *others = (self.value(name, value, f"the contrast of {name!r}") for value in change)
            for high in others:
                yield Side(low, {name: low}), Side(high, {name: high}), ""
            return
        step = round_step(x) if change is None else self.number(name, change, f"the contrast of {name!r}")
        step = self.days_to_move(name, step) if change is None and dated else step
        label = f"{'+' * (step >= 0)}{number_text(step, 6)}{unit}"
        if change is None and dated and (new := self.new_months(name, x + step)).any():
            yield from self.pair_among(name, x, step, ~new, label)
        elif change is None and self.within_range(name):
            low = np.minimum(x, max(np.nanmax(x) - step, np.nanmin(x)))
            high = np.minimum(low + step, np.nanmax(x))
            yield Side("below", {name: low}), Side(label, {name: high}), label
        else:
            # where a value is missing, the mean that stands for it is changed
            low = Side("filled in", {name: x}) if self.rows.has_missing(name) else OBSERVED
            yield low, Side(label, {name: x + step}), label

    def days_to_move(self, name: str, step: float) -> float:
        """About as many days as `step`; a year or whole weeks, if the month or the day of the week counts too."""
        functions, x = self.rows.dates[name], self.rows.numbers(name)
        if "month" in functions and np.nanmax(x) - np.nanmin(x) >= 365.0:
            return 364.0 if "weekday" in functions else 365.0
        return max(7.0 * round(step / 7.0), 7.0) if "weekday" in functions else max(step, 1.0)

    def new_months(self, name: str, days: np.ndarray) -> np.ndarray:
        """Which dates lie in a month, or on a day of the week, that the model does not know."""
        found = getattr(self.model, "formula_", None)
        new = {} if found is None else found.new_dates(name, days)
        return np.any([*new.values()], axis=0) if new else np.zeros(len(days), dtype=bool)

    def pair_among(
        self, name: str, x: np.ndarray, step: float, kept: np.ndarray, label: str
    ) -> Iterator[tuple[Side, Side, str]]:
        """The rows before and after a step, averaged over those rows only that can be moved.

        If a group has no such rows, months and days of the week are compared instead.
        """
        mass, groups = self.weight * kept, len(self.groups)
        total, left = (np.bincount(self.group, weight, groups) for weight in (self.weight, mass))
        if (left > 0).all():
            scale = kept * (total / left)[self.group]
            yield (
                Side(f"before {label}", {name: x}, scale),
                Side(label, {name: np.where(kept, x + step, x)}, scale),
                label,
            )
        else:
            yield from self.calendar_pairs(name)

    def calendar_pairs(self, name: str) -> Iterator[tuple[Side, Side, str]]:
        """Compare months with the day of the week held fixed, then days of the week with the month held fixed."""
        x = np.floor(self.rows.numbers(name))
        weekday = (x + 3) % 7  # 1970-01-01 was a Thursday
        month = calendar_days(x).astype("datetime64[M]")

        def within(months: np.ndarray, days: Any) -> np.ndarray:
            """Return the first such days of the week in the months."""
            first = months.astype("datetime64[D]").astype(np.float64)
            return np.asarray(first + (days - (first + 3)) % 7)

        ways = {
            "month": (MONTHS, month.astype(int) % 12, lambda k: within(np.full(len(x), k, "datetime64[M]"), weekday)),
            "weekday": (WEEKDAYS, weekday, lambda k: within(month, k)),
        }
        for function, (names, place, moved_to) in ways.items():
            if function in self.rows.dates[name]:
                low, *others = (Side(names[k], {name: moved_to(k)}) for k in np.unique(place).astype(int))
                for high in others:
                    yield low, high, ""

    def within_range(self, name: str) -> bool:
        """Whether the model has no predictions beyond the column's range, because it is a spline."""
        encoding = getattr(self.model, "formula_", None)
        return encoding is not None and name in encoding.splines

    def slopes(self, variables: Any) -> Iterator[Comparison]:
        for name, change in self.chosen(variables).items():
            if name in self.rows.levels:
                if variables is None:
                    continue
                raise ValueError(f"slopes need numbers; got {name!r}, a category. Use contrast.")
            if self.rows.dates.get(name, {"days"}) != {"days"}:
                if variables is None:
                    continue
                raise ValueError(
                    f"slopes need numbers; got {name!r}, dates whose year, month or weekday counts. Use contrast."
                )
            if change is not None:
                raise TypeError("variables of slopes must be names; got a dict. Use contrast for changes of any size.")
            x = self.rows.numbers(name)
            step = SLOPE_STEP * (float(np.nanstd(x)) or abs(float(np.nanmean(x))) or 1.0)
            low, high = x - step, x + step
            if self.within_range(name) and np.nanmin(x) < np.nanmax(x):
                low, high = np.maximum(low, np.nanmin(x)), np.minimum(high, np.nanmax(x))
            sides = [Side((name, end), {name: ends}, 1.0 / (high - low)) for end, ends in enumerate((low, high))]
            yield Comparison({"variable": name}, sides)

    # --- averages ---

    @property
    def outcomes(self) -> list[dict[str, Any]]:
        """The labels of one group's averages: none for two classes, otherwise one for each class."""
        return [{}] if self.classes is None else [{OF_CLASS: label} for label in self.classes]

    def table(self, comparisons: list[Comparison], measure: str) -> "pandas.DataFrame":
        """Return one row for each comparison, combination of given values, and group."""
        import pandas

        if not comparisons:
            raise ValueError("there must be a column to change; got none. The columns at given values do not count.")
        total = np.bincount(self.group, self.weight, len(self.groups))
        used = np.flatnonzero(total > 0)
        records = []
        distinct = {side.key for comparison in comparisons for side in comparison.sides}
        with closing(Progress(self.model.verbose, rows=len(self.rows), passes=len(distinct) * len(self.at))) as shown:
            for given in self.at:
                view = JointView(self, given, [side for comparison in comparisons for side in comparison.sides], shown)
                for comparison in comparisons:
                    averages = [view.averages(side) for side in comparison.sides]
                    found = view.summary(averages, measure)
                    if "contrast" in comparison.labels:
                        found = {"before": averages[0].mean.numpy(), "after": averages[1].mean.numpy(), **found}
                    for k in used:
                        labels = {**comparison.labels, **given, **self.groups[k]}
                        for j, one in enumerate(self.outcomes):
                            at = k * len(self.outcomes) + j
                            numbers = {name: float(column[at]) for name, column in found.items()}
                            records.append({**one, **labels, **numbers})
        frame = pandas.DataFrame(records)
        frame.attrs |= {"level": self.level, "measure": measure, "rows": len(self.rows), "draws": self.draw_count}
        return frame


class JointView:
    """The rows with some columns at given values, and the averages over them with their posteriors."""

    def __init__(self, study: EffectStudy, given: dict[str, Any], sides: list[Side], progress: Progress) -> None:
        self.study, self.given, self.progress = study, given, progress
        self.known: dict[Hashable, Averages] = {}
        self.last_use = {side.key: k for k, side in enumerate(sides)}
        self.uses = 0
        self.open, self.posterior = study.model._joint(lambda: self.sample(sides))
        self.joint, self.add = joint_form(self.posterior)
        shape = study.draw_count // 2, *noise_shape(self.joint)
        noise = torch.from_numpy(np.random.default_rng(study.seed).standard_normal(shape))
        self.draws = self.joint.draw(torch.cat([noise, -noise]))

    def sample(self, sides: list[Side]) -> list[Any]:
        """Return some of the rows on every side, evenly spaced."""
        study = self.study
        count = min(len(study.rows), max(1, SAMPLED_POINTS // len(sides)))
        rows = scattered(len(study.rows), count, np.random.default_rng(SEED)).numpy()
        return [study.rows.changed(rows, self.values(side, rows)) for side in sides]

    def values(self, side: Side, part: Any) -> dict[str, Any]:
        here = {name: x[part] if np.ndim(x) else x for name, x in side.values.items()}
        return {**self.given, **here}

    def averages(self, side: Side) -> Averages:
        """Return the averages over the rows on one side, which are kept as long as they are needed."""
        self.uses += 1
        found = self.known[side.key] if side.key in self.known else self.compute(side)
        self.known = {
            key: kept for key, kept in (self.known | {side.key: found}).items() if self.last_use[key] >= self.uses
        }
        return found

    def compute(self, side: Side) -> Averages:
        """Return the averages of a side. With many rows, the part nonlinear in β is drawn from some of them."""
        some = self.study.drawn
        drawn = self.sums(side, some, self.draws)
        if len(some) == np.count_nonzero(self.study.weight):
            return drawn
        exact = self.sums(side, np.arange(len(self.study.rows)), self.draws[:0])
        # A ≈ E[A] + L + (A' - E[A'] - L'), where A' is the average over some of the rows
        linear = (exact.gradient - drawn.gradient) @ (self.draws - self.joint.mean).T
        return Averages(exact.mean, exact.gradient, drawn.draws + (exact.mean - drawn.mean)[:, None] + linear)

    def sums(self, side: Side, index: np.ndarray, draws: Tensor) -> Averages:
        """Return the averages over the rows with these indices."""
        study, groups = self.study, len(self.study.groups)
        weight, group = study.weight[index], study.group[index]
        outcomes = len(study.outcomes)
        total = torch.from_numpy(np.bincount(group, weight, groups)).repeat_interleave(outcomes)
        weight = weight if side.scale is None else weight * side.scale[index]
        found = Averages(
            torch.zeros(groups * outcomes, dtype=torch.float64),
            torch.zeros(groups * outcomes, len(self.joint.mean), dtype=torch.float64),
            torch.zeros(groups * outcomes, len(draws), dtype=torch.float64),
        )
        coefficients, posterior = draws.T.contiguous(), self.posterior
        block_rows = max(1, TILE // len(draws)) if len(draws) and outcomes == 1 else BLOCK_ROWS
        for start in range(0, len(index), CHUNK_ROWS):
            chunk = index[start : start + CHUNK_ROWS]
            in_order = chunk[-1] - chunk[0] == len(chunk) - 1
            part = slice(int(chunk[0]), int(chunk[-1]) + 1) if in_order else chunk  # a slice need not be copied
            offset = None if study.offset is None else study.offset[part].numpy()
            source = self.open(study.rows.changed(part, self.values(side, part)), offset, block_rows)
            if source.device != coefficients.device:
                coefficients, posterior = coefficients.to(source.device), moved(self.posterior, source.device)
            done = start
            for block in source.map(lambda block: block):
                at = slice(done, done + len(block.label))
                member = torch.zeros(groups, len(block.label), dtype=torch.float64)
                member[group[at], torch.arange(len(block.label))] = torch.from_numpy(weight[at])
                self.add(found, block, member.to(source.device), posterior, coefficients)
                done = at.stop
                self.progress.rows_done(len(block.label))
        safe = total.clamp(min=torch.finfo(torch.float64).tiny)  # groups without weight are left out of the table
        return Averages(found.mean / safe, found.gradient / safe[:, None], found.draws / safe[:, None])

    def summary(self, averages: list[Averages], measure: str) -> dict[str, np.ndarray]:
        """Return estimate, sd and interval of an average, or of a comparison, with the probability of its sign."""
        if measure == "average":
            return self.moments(averages[0])
        if measure == "difference":
            return self.moments(averages[1].minus(averages[0]), signed=True)
        low, high = (average.on_log_scale(measure == "odds") for average in averages)
        change = high.minus(low)
        found = self.moments(change, signed=True)
        ratio = {end: np.exp(found[end]) for end in ("lower", "upper")}
        median = np.exp(np.quantile(self.stratified(change), 0.5, axis=1))
        return found | {"estimate": median, "sd": change.draws.exp().std(1).numpy(), **ratio}

    def moments(self, found: Averages, signed: bool = False) -> dict[str, np.ndarray]:
        # Var A = Var L + Var(A - L)
        rest = (found.draws - self.linear(found)).var(1)
        sd = (self.linear_variance(found) + rest).sqrt().numpy()
        estimate, draws = found.mean.numpy(), self.stratified(found)
        tail = 0.5 - 0.5 * self.study.level
        lower, upper = np.quantile(draws, [tail, 1.0 - tail], axis=1)
        columns = {"estimate": estimate, "sd": sd, "lower": lower, "upper": upper}
        return columns | ({"p_direction": probability_of_direction(draws, estimate, sd)} if signed else {})

    def linear(self, found: Averages) -> Tensor:
        """L = E[∇A]ᵀ(β - μ) of every draw, groups × draws."""
        return found.gradient @ (self.draws - self.joint.mean).T

    def linear_variance(self, found: Averages) -> Tensor:
        return self.joint.spread(Dense(found.gradient))

    def stratified(self, found: Averages) -> np.ndarray:
        """Draws of A in which L is replaced by the quantile of N(0, Var L) at its rank.

        So the linear part of A has no sampling noise. Results stay within the range of the draws.
        """
        along, draws = self.linear(found).numpy(), found.draws.numpy()
        rank = along.argsort(1).argsort(1)
        sd = self.linear_variance(found).sqrt().numpy()[:, None]
        even = sd * scipy.special.ndtri((rank + 0.5) / draws.shape[1])
        return np.clip(draws + even - along, draws.min(1, keepdims=True), draws.max(1, keepdims=True))


def joint_form(posterior: AnyPosterior) -> tuple[Any, Callable[..., None]]:
    """Return the distribution of the parameters as one vector, and the function that adds a block to averages."""
    if isinstance(posterior, StarPosterior):
        return FlatStar(posterior), add_class_block
    if isinstance(posterior, OrdinalPosterior):
        return LevelJoint(posterior), add_level_block
    return posterior, add_mixture_block if isinstance(posterior, GaussianMixture) else add_block


def add_block(found: Averages, block: Block, member: Tensor, posterior: Posterior, coefficients: Tensor) -> None:
    """Add a block's sums over rows. `member` (groups × rows) is each row's weight in each group."""
    _, probability, density = limit().moments(*latent(block, posterior))
    found.mean.add_((member @ probability).cpu())
    found.gradient.add_(block.design.pull((member * density).T.contiguous()).T.cpu())
    if not coefficients.numel():
        return
    if block.residual is not None:  # independent between rows: it moves the average, but not its spread
        without = limit().moments(*latent(replace(block, residual=None), posterior))[1]
        found.draws.add_((member @ (probability - without)).cpu()[:, None])
    add_draws(found, block, member, coefficients)


def add_draws(found: Averages, block: Block, member: Tensor, coefficients: Tensor) -> None:
    """Add the averages under each draw of the coefficients."""
    log_odds = block.design.project(coefficients)
    if block.offset is not None:
        log_odds += block.offset[:, None]
    found.draws.add_((member @ log_odds.sigmoid_()).cpu())


def add_mixture_block(
    found: Averages, block: Block, member: Tensor, posterior: GaussianMixture, coefficients: Tensor
) -> None:
    """`add_block` for a mixture, to which Stein's lemma does not apply: L is 0, and everything else is from draws."""
    found.mean.add_((member @ (limit().moments(*latent(block, posterior))[1] @ posterior.weights)).cpu())
    if coefficients.numel():
        add_draws(found, block, member, coefficients)


def probability_of_direction(draws: np.ndarray, estimate: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """P(A > 0) or P(A < 0), whichever is larger, per row of draws; if all draws agree, that of a normal A."""
    share = np.maximum((draws > 0).mean(1), (draws < 0).mean(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        normal = np.nan_to_num(scipy.special.ndtr(np.abs(estimate) / sd), nan=0.5)
    return np.where(share == 1.0, np.maximum(normal, 1.0 - 1.0 / draws.shape[1]), np.where(sd > 0, share, normal))


# --- numbers ---


def rows_to_draw(group: np.ndarray, weight: np.ndarray, most: int) -> np.ndarray:
    """Return the indices of about `most` rows of positive weight: random ones, equally many from each group."""
    known = np.flatnonzero(weight > 0)
    if len(known) <= most:
        return known
    order = known[np.lexsort((np.random.default_rng(SEED).random(len(known)), group[known]))]
    counts = np.bincount(group[known])
    place = np.arange(len(known)) - np.repeat(np.cumsum(counts) - counts, counts)
    quota = max(1, most // int(np.count_nonzero(counts)))
    return np.sort(order[place < quota])


def is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) and np.ndim(value) == 1


def with_ordered_levels(values: np.ndarray) -> Any:
    """Text as a category whose levels are in order, such as that of the calendar; anything else unchanged."""
    import pandas

    if values.dtype.kind not in "OU":
        return values
    known = pandas.unique(values[~pandas.isna(values)])
    if not all(isinstance(value, str) for value in known):
        return values
    return pandas.Categorical(values, categories=sorted_values(known))


def is_binary(x: np.ndarray) -> bool:
    known = x[~np.isnan(x)]
    return bool(np.isin(known, (0.0, 1.0)).all())


def round_step(x: np.ndarray) -> float:
    """The number 1, 2 or 5 times a power of ten that is nearest to one standard deviation; 1 if that is zero."""
    sd = float(np.nanstd(x))
    if not 0.0 < sd < np.inf:
        return 1.0
    power = 10.0 ** np.floor(np.log10(sd))
    return float(f"{min((power * m for m in (1, 2, 5, 10)), key=lambda step: abs(np.log(step / sd))):.0e}")


def readable_value(value: Any) -> str:
    return number_text(value, 6) if isinstance(value, float) else str(value)
