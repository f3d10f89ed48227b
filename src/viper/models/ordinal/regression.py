"""Bayesian ordinal regression with the scikit-learn interface."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data import checks
from viper.data.checks import RowFormat
from viper.data.model_file import MANY_LABELS
from viper.data.open import is_kept_elsewhere, open_labelled_rows, open_rows
from viper.data.schema import BOOLEAN, DEFINITE, Fields, Numbers, Rule, numbers, one_of
from viper.errors import FormulaError
from viper.formula.columns import as_frame
from viper.formula.grammar import split_sides, tokenize
from viper.formula.learn import FormulaMixin, by_formula
from viper.inference.newton import Iteration
from viper.inference.ordinal.gaps import GapPrior, Gaps, log_one_minus_exp
from viper.inference.ordinal.importance import OrdinalWeighedFit
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.ordinal.rows import LevelRows, OrderedRows
from viper.inference.posterior import Full, moved
from viper.inference.problem import Prior
from viper.inference.progress import Callbacks, as_task, tasks_of
from viper.inference.rows import Block, RowSource
from viper.inference.threads import check_jobs
from viper.models.diagnosis import LATENT_DRAWS, CorrectedPosterior, DiagnosisMixin, summary_frame
from viper.models.effects import AnyPosterior, EffectsMixin, OpenRows
from viper.models.facts import coefficient_names
from viper.models.fitting import FitOptions, check_update
from viper.models.notebook import NotebookMixin
from viper.models.onnx import OnnxMixin
from viper.models.ordinal.corrected import (
    CorrectedOrdinal,
    as_parameters,
    levels_to_arviz,
    summary_of_ordinal_draws,
    threshold_names,
)
from viper.models.ordinal.fitting import FittedOrdinal, fit_ordinal
from viper.models.ordinal.levels import as_labels, check_levels, given_levels, level_numbers, read_levels, sorted_levels
from viper.models.ordinal.reading import ordinal_reading
from viper.models.ordinal.sandwich import robust_levels
from viper.models.prediction import TWO_CLASSES, TargetReading, half_width
from viper.models.prior import DEFAULT_SCALE, PriorMixin, check_scale_word, make_prior
from viper.models.saving import REGRESSION_SCALARS, REGRESSION_TENSORS, State, StateMixin
from viper.models.weighting import WEIGHTING, WEIGHTING_FIELDS, ClassWeightMixin

if TYPE_CHECKING:
    import pandas

GAP_PRIOR_TENSORS = {  # stored if the prior is the posterior given earlier rows
    "gap_prior.mean": numbers("g"),
    "gap_prior.precision": numbers("gg", range=DEFINITE),
    "gap_prior.moving": numbers("dg"),
}
DEFAULT_GAP_SCALE = 2.0  # prior sd of the log gaps: 95 % of gaps between 0.02 and 50


class VariationalOrdinalRegression(
    FormulaMixin,
    NotebookMixin,
    PriorMixin,
    ClassWeightMixin,
    DiagnosisMixin,
    EffectsMixin,
    StateMixin,
    OnnxMixin,
    Callbacks,
    ClassifierMixin,
    BaseEstimator,
):
    """Bayesian ordinal regression by variational inference: outcomes in levels that have an order.

    P(y_i ≤ k) = s(c_k - x_iᵀβ) with thresholds c_1 < … < c_{K-1} (proportional odds): e^β multiplies the odds of being
    above any level. Each row is two softplus terms, so the ELBO of β is exact; the thresholds are integrated over. With
    two levels the posterior is that of `VariationalLogisticRegression`.

    Parameters
    ----------
    categories : list, optional
        The levels, from the lowest to the highest. By default the categories of an ordered pandas Categorical, or
        sorted numbers. Words must be given in order.
    prior_mean : float, array of n_features or dict, default 0
        Prior means of the coefficients.
    prior_scale : float, array of n_features, dict, covariance matrix, "auto" or "ard", default 1
        Prior standard deviations of the coefficients, as in `VariationalLogisticRegression`.
    threshold_scale : float, default 10
        Prior standard deviation of the mean of the thresholds, around 0.
    gap_scale : float, default 2
        Prior standard deviation of the logarithms of the gaps between neighbouring thresholds, around 0.
    class_weight : None, "balanced" or dict, default None
        Factors for the weights of the rows of each level, as in `VariationalLogisticRegression`. No
        `prevalence_offset` undoes them, because no thresholds correspond to other shares of the levels.
    max_iter : int, optional
        Largest number of iterations of a fit given the thresholds, by default 200.
    tol : float, optional
        The fit given the thresholds stops when less than this many nats are left to the optimum, by default 3e-9.
    device, dtype, n_jobs, random_state, verbose
        As in `VariationalLogisticRegression`.

    Attributes
    ----------
    classes_ : array
        The levels, from the lowest to the highest.
    coef_ : array (n_features,)
        Posterior means of the coefficients.
    thresholds_ : array (n_levels - 1,)
        Posterior means of the thresholds.
    covariance_ : array
        Posterior covariance of coefficients and thresholds.
    posterior_ : OrdinalPosterior
        The posterior of the coefficients given the log gaps, and that of the log gaps.
    elbo_ : float
        The ELBO: exact for the coefficients, and averaged over the gaps by a weighted sum over a few points.
    elbo_bound_ : float
        `elbo_` less all rounding errors.
    prior_scale_ : array
        The prior scales that were used, including those chosen by "auto" or "ard".
    gap_prior_ : GapPrior
        The prior of the log gaps.
    class_weight_, class_share_, robust_groups_
        As in `VariationalLogisticRegression`.
    history_, n_iter_, passes_, converged_, status_
        The iterations of the solver, of all fits together, and how they ended.
    n_features_in_, feature_names_in_, formula_
        As in `VariationalLogisticRegression`.

    Examples
    --------
    >>> import numpy as np
    >>> import viper
    >>> x = np.linspace(-2, 2, 60)
    >>> y = np.digitize(x + np.sin(40 * x), [-1, 0, 1])
    >>> model = viper.VariationalOrdinalRegression().fit(x[:, None], y)
    >>> model.predict_proba([[1.0]]).round(2)
    array([[0.02, 0.1 , 0.35, 0.53]])
    """

    feature_names_in_: np.ndarray
    posterior_: OrdinalPosterior  # type: ignore[assignment]
    bound: ClassVar[str] = "viper"
    terms: ClassVar[int | None] = None
    covariance: ClassVar[str] = "full"  # type: ignore[misc]
    fit_intercept: ClassVar[bool] = True

    _kind = "ordinal"
    _labels = MANY_LABELS
    _fit_scalars: ClassVar[Mapping[str, Rule]] = REGRESSION_SCALARS
    _own_fields = Fields(
        {"posterior": one_of(OrdinalPosterior.__name__), "ordered": BOOLEAN}, {WEIGHTING: WEIGHTING_FIELDS}
    )
    _own_tensors: ClassVar[Mapping[str, Numbers]] = REGRESSION_TENSORS
    _options_before: ClassVar[Mapping[str, Any]] = {"class_weight": None}

    def __init__(
        self,
        *,
        categories: Any = None,
        prior_mean: Any = 0.0,
        prior_scale: Any = DEFAULT_SCALE,
        threshold_scale: float = 10.0,
        gap_scale: float = DEFAULT_GAP_SCALE,
        class_weight: Any = None,
        max_iter: int | None = None,
        tol: float | None = None,
        device: Any = None,
        dtype: str = "float64",
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: Any = "auto",
    ) -> None:
        self.categories = categories
        self.prior_mean = prior_mean
        self.prior_scale = prior_scale
        self.threshold_scale = threshold_scale
        self.gap_scale = gap_scale
        self.class_weight = class_weight
        self.max_iter = max_iter
        self.tol = tol
        self.device = device
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    # -----------------------------------------------------------------------------------------------------------------
    # Fitting

    @classmethod
    def from_formula(cls, formula: str, data: Any, *, categories: Any = None, **given: Any) -> Self:
        """Fit to a table with named columns, by a formula such as ``severity ~ age + C(ward)``.

        The levels of the target are ordered as its ordered pandas categories, by `categories`, or as numbers.
        Everything else is as in `VariationalLogisticRegression.from_formula`.
        """
        if given.get("positive") is not None:
            raise FormulaError(
                f"positive names the one of two classes whose probability is modelled; got {given['positive']!r} for "
                "ordered levels. Leave it out: all levels have a probability."
            )
        if categories is None:
            frame = as_frame(data)
            target = split_sides(tokenize(formula))[0][0][1]
            kind = frame[target].dtype if target in frame else None
            ordered = getattr(kind, "ordered", None)
            categories = list(kind.categories) if ordered else None  # type: ignore[union-attr]
            if ordered is False:
                read_levels(frame[target].dropna(), None)  # raises: the levels have no order
        return super().from_formula(formula, data, categories=categories, **given)

    @as_task
    @by_formula
    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None
    ) -> "VariationalOrdinalRegression":
        """Fit the posterior.

        Parameters
        ----------
        X : array, DataFrame, CSR/CSC matrix or tensor (n, p); or a memory map, viper.Files or viper.Blocks
            The rows. Those in memory are copied; rows of the middle levels take twice their memory.
        y : array (n,)
            The levels: an ordered pandas Categorical, numbers, or words whose order `categories` gives.
        sample_weight : array (n,), optional
            A weight of k counts a row k times.
        offset : array (n,), optional
            Known part of the score xᵀβ of each row.
        """
        self._check_options()
        self.classes_, source = self._open_fit(X, y, sample_weight, offset)
        check_levels(self.classes_, LevelRows(source, len(self.classes_)).counts())
        source = self._weighted_rows(source)
        solve = lambda scale, start, last: self._fit(source, self._prior(scale), self._gap_prior())  # noqa: E731
        return self._keep(source, self._fit_scales(solve, careful=True))

    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        classes: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
        forget: float = 1.0,
    ) -> "VariationalOrdinalRegression":
        """Update the posterior of coefficients and thresholds with new rows: the current posterior is their prior.

        Parameters
        ----------
        X, y, sample_weight, offset
            As in `fit`.
        classes : list, optional
            The levels in order, if `categories` does not give them and the first rows do not contain all.
        forget : float in (0, 1], default 1
            Factor that multiplies the precision of the current posterior. Below 1, old rows lose weight.
        """
        if check_update(self, forget):
            known = self.categories if classes is None else classes
            self.classes_, source = self._open_fit(X, y, sample_weight, offset, known, complete=known is None)
            scale = self._scale()
            prior, of_gaps, start, self.prior_scale_ = self._prior(scale), self._gap_prior(), None, scale.numpy()
        else:
            source = self._open_labelled_rows(X, y, sample_weight=sample_weight, offset=offset)
            (prior, of_gaps), start = self.posterior_.as_prior(forget), self.posterior_.log_gaps
        source = self._weighted_rows(source)
        return self._keep(source, self._fit(source, prior, of_gaps, start))

    def _fit(self, source: RowSource, prior: Prior, of_gaps: GapPrior, start: Tensor | None = None) -> FittedOrdinal:
        rows = LevelRows(source, len(self.classes_))
        seed = checks.seed_of(self.random_state)
        return fit_ordinal(rows, Gaps(rows.counts(), of_gaps), prior, self._options(), seed, start)

    def _open_fit(
        self, X: Any, y: Any, sample_weight: Any, offset: Any, categories: Any = None, complete: bool = True
    ) -> tuple[np.ndarray, RowSource]:
        """Return the levels, and the rows with level numbers as labels. With `complete`, every level must occur."""
        categories = self.categories if categories is None else categories
        if is_kept_elsewhere(X):
            known = None if categories is None else given_levels(categories)
            return self._open_elsewhere(X, y, sample_weight, offset, known, reset=True)
        levels, found = read_levels(y, categories, complete)
        return levels, self._open_arrays(X, found, levels, sample_weight, offset, reset=True)

    def _open_arrays(
        self, X: Any, found: np.ndarray, levels: np.ndarray, sample_weight: Any, offset: Any, reset: bool = False
    ) -> RowSource:
        known = np.arange(len(levels)) if len(levels) > 2 else np.array([False, True])
        label = as_labels(found, len(levels)).numpy()
        given = {"sample_weight": sample_weight, "reset": reset, "classes": known}
        source = open_labelled_rows(self, X, label, self._row_format(classes=0), **given)[1].in_memory()
        own = checks.read_vector(offset, "offset", source.rows)
        return source if own is None else replace(source, offset=own.to(source.device))

    def _open_elsewhere(
        self, X: Any, y: Any, sample_weight: Any, offset: Any, known: np.ndarray | None, reset: bool = False
    ) -> tuple[np.ndarray, RowSource]:
        """Rows in files, blocks or a collection, with labels numbered in sorted order."""
        classes = None if known is None else np.unique(known.astype(str) if known.dtype.kind == "O" else known)
        given = {"sample_weight": sample_weight, "offset": offset, "reset": reset, "classes": classes}
        format = replace(self._row_format(classes=0), keep=reset)
        found, source = open_labelled_rows(self, X, y, format, **given)
        levels = sorted_levels(found) if known is None else known
        order = level_numbers(found, levels)
        ordered = bool((order == np.arange(len(order))).all())
        return levels, source if ordered else OrderedRows(source, torch.from_numpy(order))

    def _check_options(self) -> None:
        words: dict[str, tuple[str | bool, ...]] = {
            "dtype": ("float64", "float32"),
            "verbose": ("auto", True, False),
        }
        check_scale_word(self.prior_scale)
        checks.check_options(self, words, ("tol", "threshold_scale", "gap_scale"), ("max_iter",))
        check_jobs(self.n_jobs)

    def _row_format(self, block_rows: int | None = None, classes: int = 2) -> RowFormat:
        return RowFormat(True, self.device, self.dtype, self.verbose, True, block_rows, None, classes)

    def _prior(self, scale: Tensor) -> Prior:
        return make_prior(self._prior_mean(), scale, self.threshold_scale, True)

    def _gap_prior(self) -> GapPrior:
        return GapPrior.independent(len(self.classes_) - 2, self.n_features_in_ + 1, float(self.gap_scale))

    def _options(self) -> FitOptions:
        return FitOptions(
            bound="viper",
            terms=None,
            samples=1,
            nodes=1,
            covariance="full",
            rank=0,
            solver="newton",
            max_iter=self.max_iter,
            tol=self.tol,
            learning_rate=0.0,
            batch_size=None,
            dtype=self.dtype,
            n_jobs=self.n_jobs,
            verbose=self.verbose,
            tasks=tasks_of(self),
        )

    def _keep(self, source: RowSource, fit: FittedOrdinal) -> "VariationalOrdinalRegression":
        """Set the fitted attributes."""
        source.release()
        self.posterior_, self.prior_, self.gap_prior_ = fit.ordinal, moved(fit.prior, "cpu"), fit.gap_prior
        self._set_means()
        self.elbo_, self.elbo_bound_, self.kl_ = fit.certified()
        self.objective_ = self.elbo_
        self.history_, self.n_iter_ = fit.result.history, max(1, fit.result.iterations)
        self.converged_, self.status_, self.passes_ = fit.result.converged, fit.result.status, fit.result.passes
        self._training_rows, self._largest_sd, self.robust_groups_ = source, None, 0
        return self

    def _set_means(self) -> None:
        mean = self.posterior_.parameters()[0].numpy()
        self.coef_, self.thresholds_ = mean[: self.n_features_in_].copy(), mean[self.n_features_in_ :].copy()

    # -----------------------------------------------------------------------------------------------------------------
    # What was learned

    @property
    def covariance_(self) -> np.ndarray:
        check_is_fitted(self, "posterior_")
        return self.posterior_.parameters()[1].numpy()

    @property
    def multiclass_(self) -> bool:
        """Whether there are more than two levels."""
        return len(getattr(self, "classes_", ())) > 2

    @property
    def _reading(self) -> TargetReading:
        check_is_fitted(self, "posterior_")
        return ordinal_reading(self.posterior_) if self.posterior_.size else TWO_CLASSES

    def _names(self) -> list[str]:
        return [*coefficient_names(self._columns(), False), *threshold_names(self.classes_)]

    def coefficient_interval(self, level: float = 0.95) -> np.ndarray:
        """Credible intervals of the coefficients, then of the thresholds."""
        check_is_fitted(self, "posterior_")
        mean, covariance = self.posterior_.parameters()
        reach = half_width(level) * covariance.diagonal().sqrt()
        return torch.stack([mean - reach, mean + reach], -1).numpy()

    def summary(self, level: float = 0.95) -> "pandas.DataFrame":
        """Mean, sd, interval, odds ratio with interval and probability of direction of coefficients and thresholds.

        The odds ratio of a column multiplies the odds of being above any level. That of a threshold "a | b" is the odds
        of level a or below, where all columns are 0.
        """
        check_is_fitted(self, "posterior_")
        mean, covariance = self.posterior_.parameters()
        sd = covariance.diagonal().sqrt()
        low, high = torch.from_numpy(self.coefficient_interval(level)).T
        return summary_frame(self._names(), mean, sd, low, high, torch.special.ndtr(mean / sd), level)

    def robust(
        self, X: Any = None, y: Any = None, *, sample_weight: Any = None, offset: Any = None, groups: Any = None
    ) -> Self:
        """Return a copy of the model with robust covariances: for survey weights, class weights, and repeated rows.

        As for `VariationalLogisticRegression`, for coefficients and thresholds together.

        Parameters
        ----------
        X, y, sample_weight, offset
            The rows of the fit. Pass them again after loading a model from a file.
        groups : array (n,), optional
            The group of each row of the fit. By default, each row is a group of its own.
        """
        fit = self._weighed_fit(X, y, sample_weight, offset, "robust")
        model = copy.copy(self)
        found, model.robust_groups_ = robust_levels(fit.posterior, fit.prior, fit.gap_prior, fit.source, groups)
        model.posterior_, model._largest_sd = moved(found, "cpu"), None
        model._set_means()
        return model

    def prevalence_offset(self, prevalence: Any = None) -> Any:
        """As for `VariationalLogisticRegression`, but for two levels only."""
        check_is_fitted(self, "posterior_")
        if self.multiclass_:
            raise ValueError(
                f"prevalence_offset is for two classes; got {len(self.classes_)} levels in order, whose shares an "
                "offset cannot change one by one. Weight the rows by sample_weight instead."
            )
        return super().prevalence_offset(prevalence)

    def sample(self, n: int = 1, random_state: Any = None) -> np.ndarray:
        """Draw coefficients and thresholds, which are in order, from the posterior: n × (n_features + n_levels - 1)."""
        check_is_fitted(self, "posterior_")
        n = checks.read_whole(n, "n", 0)
        generator = check_random_state(self.random_state if random_state is None else random_state)
        return as_parameters(self._draws(n, generator)[0], len(self.posterior_.mean)).numpy()

    def _draws(self, n: int, generator: Any) -> tuple[Tensor, Tensor]:
        """Draws of (w, δ), and their noise."""
        q = self.posterior_
        noise = torch.from_numpy(generator.standard_normal((n, *q.noise_shape)))
        return q.draw(noise), noise

    def predict_proba(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior-averaged probabilities of the levels, n × K."""
        return super().predict_proba(X, offset)

    def predict_std(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior standard deviations of the probabilities of the levels, n × K; of two levels, one per row."""
        return super().predict_std(X, offset)

    def predict_interval(self, X: Any, level: float = 0.95, offset: Any = None) -> np.ndarray:
        """Credible intervals of the probabilities of the levels, n × K × 2; of two levels, n × 2 of the higher."""
        return super().predict_interval(X, level, offset)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """Share of rows whose level is the most probable one."""
        if not is_kept_elsewhere(X):
            return super().score(X, y, sample_weight, offset)
        check_is_fitted(self, "posterior_")
        rows = self._open_labelled_rows(X, y, sample_weight=sample_weight, offset=offset)
        reading, posterior = self._reading, moved(self.posterior_, rows.device)
        found = list(rows.map(partial(correct_levels, reading=reading, posterior=posterior)))
        return float(sum(correct for correct, _ in found) / sum(total for _, total in found))

    def elbo(self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """The ELBO of the given rows under the fitted posterior and the prior of the fit."""
        check_is_fitted(self, "posterior_")
        source = self._known_weights(self._open_labelled_rows(X, y, sample_weight=sample_weight, offset=offset))
        rows, q = LevelRows(source, len(self.classes_)), self.posterior_
        places, weights = q.points()
        constants = log_one_minus_exp((q.log_gaps + places @ q.gap_factor.T).exp()) @ rows.counts()[1:-1]
        return rows.expected_log_likelihood(q) + float(weights @ constants) - self.kl_

    def _open_labelled_rows(self, X: Any, y: Any, *, sample_weight: Any, offset: Any) -> RowSource:
        if is_kept_elsewhere(X):
            return self._open_elsewhere(X, y, sample_weight, offset, self.classes_)[1]
        if y is None:
            raise ValueError("This estimator requires y to be passed, but the target y is None.")
        found = level_numbers(np.asarray(y), self.classes_)
        return self._open_arrays(X, found, self.classes_, sample_weight, offset)

    def _open_rows(self, X: Any, offset: Any) -> RowSource:
        return open_rows(self, X, offset, self._row_format())

    def _weighed_on(self, source: RowSource) -> OrdinalWeighedFit:
        posterior, prior = moved(self.posterior_, source.device), moved(self.prior_, source.device)
        return OrdinalWeighedFit(posterior, prior, moved(self.gap_prior_, source.device), source)

    def _joint(self, points: Callable[[], Any]) -> tuple[OpenRows, AnyPosterior]:
        def opened(X: Any, offset: Any, block_rows: int) -> RowSource:
            return open_rows(self, X, offset, self._row_format(block_rows))

        q = self.posterior_
        return opened, q if q.size else Full(q.mean, q.factor)

    def _corrected_kind(self) -> type[CorrectedPosterior]:
        return CorrectedOrdinal

    def _summarise_draws(self, X: Any, offset: Any, draws: Tensor, summary: Callable[..., Tensor]) -> Iterator[Tensor]:
        check_is_fitted(self, "posterior_")
        block_rows = max(1, LATENT_DRAWS // (len(draws) * len(self.classes_)))
        rows = open_rows(self, X, offset, self._row_format(block_rows=block_rows))
        return rows.map(partial(summary_of_ordinal_draws, draws=draws, summary=summary))

    def _arviz_draws(self, source: RowSource | None, shape: tuple[int, int], seed: int) -> Any:
        fit = None if source is None else self._weighed_on(source)
        return levels_to_arviz(fit, self.posterior_, self._names(), self.classes_, shape, seed)

    # -----------------------------------------------------------------------------------------------------------------
    # Storage and scikit-learn

    def _pack(self) -> State:
        """As for all estimators, except that categories are not among the options: they are the classes."""
        given, self.categories = self.categories, None
        try:
            return super()._pack()
        finally:
            self.categories = given

    def _own_state(self) -> State:
        tensors = {
            "prior.mean": self.prior_.mean,
            "prior.precision": self.prior_.precision,
            "prior_scale": torch.from_numpy(self.prior_scale_),
            "history": torch.tensor(self.history_, dtype=torch.float64),
        }
        if not self.gap_prior_.same_as(self._gap_prior()):
            tensors |= {f"gap_prior.{name}": x for name, x in vars(self.gap_prior_).items()}
        known = {"posterior": type(self.posterior_).__name__, "ordered": self._words()}
        return State(tensors, known | self._weighting_state())

    def _words(self) -> bool:
        """Whether the levels are not in sorted order."""
        return self.classes_.dtype.kind not in "biuf" or bool((np.sort(self.classes_) != self.classes_).any())

    @classmethod
    def _sizes(cls, metadata: dict[str, Any]) -> dict[str, int]:
        columns = metadata["features"]
        return {"p": columns, "d": columns + 1, "g": len(metadata["classes"]["values"]) - 2}

    @classmethod
    def _tensor_rules(cls, names: Collection[str], metadata: dict[str, Any]) -> Mapping[str, Numbers]:
        updated = any(name.startswith("gap_prior.") for name in names)
        return {**cls._own_tensors, **(GAP_PRIOR_TENSORS if updated else {})}

    def _restore_own_state(self, state: State) -> None:
        tensors = state.tensors
        self.prior_ = Prior(tensors["prior.mean"], tensors["prior.precision"])
        self.prior_scale_ = tensors["prior_scale"].numpy()
        self.gap_prior_ = GapPrior(**given) if (given := state.part("gap_prior")) else self._gap_prior()
        self._restore_weighting(state.metadata)
        self.history_ = [Iteration(int(row[0]), bool(row[1]), *row[2:]) for row in tensors["history"].tolist()]
        if state.metadata["ordered"]:
            self.categories = self.classes_.tolist()
        self._set_means()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = True
        tags.classifier_tags.poor_score = True  # it is not meant for classes without an order
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        known = {"_largest_sd": self.largest_sd_} if hasattr(self, "posterior_") else {}
        return {name: value for name, value in (state | known).items() if name != "_training_rows"}


def correct_levels(block: Block, reading: TargetReading, posterior: OrdinalPosterior) -> tuple[float, float]:
    """The weight of the rows of a block whose level is the most probable one, and that of all."""
    found = reading.probabilities(*posterior.latent(block)).argmax(1) == block.label.cpu().numpy()
    weight = np.ones(len(found)) if block.weight is None else block.weight.cpu().numpy()
    return float(weight @ found), float(weight.sum())
