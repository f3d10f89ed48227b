"""Bayesian logistic regression with the scikit-learn interface."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data import checks
from viper.data.checkpoint import resumable
from viper.data.checks import RowFormat
from viper.data.indicators import has_several_columns
from viper.data.model_file import MANY_LABELS
from viper.data.open import is_kept_elsewhere, open_labelled_rows, open_rows
from viper.data.schema import (
    SHARES,
    Fields,
    Layout,
    Numbers,
    Rule,
    numbers,
    one_of,
)
from viper.formula.learn import FormulaMixin, by_formula
from viper.inference.mixture.posterior import GaussianMixture
from viper.inference.newton import Iteration
from viper.inference.ordinal.posterior import OrdinalPosterior
from viper.inference.posterior import moved, noise_shape
from viper.inference.problem import Prior
from viper.inference.progress import Callbacks, as_task, tasks_of
from viper.inference.robust import robust_posterior
from viper.inference.rows import RowSource
from viper.inference.threads import check_jobs
from viper.models.classes.corrected import CorrectedClasses, class_summary, summary_of_class_draws
from viper.models.classes.fitting import fit_classes, unsupported_options, with_class_means
from viper.models.classes.labels import (
    LABELS_READING,
    answers_by_label,
    by_label,
    check_labels_header,
    fit_labels,
    labels_as_table,
    labels_state,
    restored_labels,
    stacked_answers,
    sum_of_labels,
    summary_of_labels,
    with_estimators,
)
from viper.models.classes.pooling import pool_stars, star_spread_of_draws
from viper.models.classes.reading import SOFTMAX_READING
from viper.models.classes.sandwich import robust_classes
from viper.models.classes.storing import prior_from, prior_tensors, star_tensors
from viper.models.diagnosis import LATENT_DRAWS, CorrectedPosterior, DiagnosisMixin, summary_frame, summary_of_draws
from viper.models.effects import AnyPosterior, EffectsMixin, OpenRows
from viper.models.facts import coefficient_names
from viper.models.fitting import FitOptions, check_rank, check_update, fit_posterior
from viper.models.mixture.reading import mixture_reading
from viper.models.mixture.refined import (
    check_components,
    check_components_option,
    check_one_component,
    check_small_rows,
    refined_fit,
)
from viper.models.notebook import NotebookMixin
from viper.models.onnx import OnnxMixin
from viper.models.pooling import pool_posteriors, spread_of_draws
from viper.models.prediction import TWO_CLASSES, TargetReading, half_width
from viper.models.prior import DEFAULT_SCALE, PriorMixin, check_scale_word, make_prior
from viper.models.saving import POSTERIOR_FIELDS, REGRESSION_SCALARS, REGRESSION_TENSORS, State, StateMixin
from viper.models.weighting import WEIGHTING, WEIGHTING_FIELDS, ClassWeightMixin
from viper.softplus.bound_names import FIT_BOUNDS

if TYPE_CHECKING:
    import pandas

SEARCH_TOLERANCE = 1e-5  # nats; of fits with several classes while a search tries their scales
DEFAULT_RANK = 16  # for covariance="low-rank"


class VariationalLogisticRegression(
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
    """Bayesian logistic regression by variational inference: a posterior at less than the cost of a point estimate.

    y_i ~ Bernoulli(s(x_iᵀβ)), with a Gaussian prior on β. The posterior is approximated by the Gaussian q that
    maximises the ELBO, which is computed exactly (Komodromos, Evangelou & Filippi 2024, in the limit l → ∞).

    Parameters
    ----------
    bound : {"viper", "pg", "mc", "quadrature"}, default "viper"
        How E[log(1+e^X)] is computed: "viper" is exact, or the paper's bound η_l if `terms` is given; "pg" is the
        Pólya-Gamma bound, "mc" Monte Carlo, "quadrature" Gauss-Hermite quadrature.
    terms : int, optional
        Number of terms l of the paper's bound η_l. None stands for the limit l → ∞, which is exact.
    covariance : {"full", "diagonal", "low-rank"}, default "full"
        The variational family: the paper's Q', its mean-field Q, or one between the two for many columns, whose
        precision is a diagonal plus a matrix of rank `rank`.
    components : int, default 1
        Number of Gaussians in the posterior. A mixture of several fits the skewed posteriors of few rows or rare
        classes. Two classes, covariance="full" and the exact bound only. See `refined`.
    rank : int, default 16
        Rank for covariance="low-rank": 0 is the diagonal family, the number of rows or columns the full one. Time and
        memory are proportional to it.
    prior_mean : float, array of n_features or dict, default 0
        Prior means of the coefficients. The prior mean of the intercept is 0. With more than two classes, 0 or an array
        with one row per class.
    prior_scale : float, array of n_features, dict, covariance matrix, "auto" or "ard", default 1
        Prior standard deviations of the coefficients, or their prior covariance if it is a matrix. A scale σ
        corresponds to scikit-learn's C = σ². A dictionary gives them by name, such as ``{"age": 0.5, "ward": 2}``: the
        name of a column of X, or of a formula's term or category for all of its columns. Columns that it does not name
        get the number of "*", or the default. "auto" chooses one common scale, "ard" one per feature, by maximising
        the ELBO.
    intercept_scale : float, default 10
        Prior standard deviation of the intercept.
    fit_intercept : bool, default True
        Whether to add a column of ones.
    class_weight : None, "balanced" or dict, default None
        Factors for the weights of the rows of each class, such as ``{"no": 1, "yes": 10}``; "balanced" gives both
        classes the same total weight. Probabilities then refer to a population in which the classes have these shares;
        `prevalence_offset` undoes that. Intervals change too, as if there were more or fewer rows: use `robust` for
        correct ones.
    solver : {"newton", "adam"}, default "newton"
        Natural-gradient Newton steps, or the paper's gradient ascent.
    max_iter : int, optional
        Largest number of iterations, by default 200 for "newton" and 10,000 for "adam".
    tol : float, optional
        "newton" stops when, at its rate of convergence, less than `tol` nats are left to the optimum. The default is
        3e-9, less if the ELBO is small, and 1e-12 for bounds other than the exact one. "adam" stops when the relative
        change of the ELBO is below `tol`, by default 1e-8.
    learning_rate : float, default 0.05
        Learning rate of "adam".
    batch_size : int, optional
        Rows in each step of "adam"; by default all.
    samples : int, default 1000
        Number of samples for bound="mc".
    nodes : int, default 64
        Number of nodes for bound="quadrature".
    device : str or torch.device, optional
        Device to compute on. The default is the CPU, or the device of X if that is a tensor.
    dtype : {"float64", "float32"}, default "float64"
        Precision of the products with X. float32 takes half the time and moves the posterior by about 1e-4 of its
        width.
    n_jobs : int, optional
        Threads of a pass over dense rows in float64; the result is the same to the last bit for any number. -1 means
        all processors, -2 all but one. None, the default, follows an enclosing ``joblib.parallel_config``; inside
        joblib's workers, such as those of ``GridSearchCV(n_jobs=2)``, it means one thread, and otherwise as many as
        torch uses: all processors, unless OMP_NUM_THREADS or `torch.set_num_threads` allows fewer. Small fits always
        use one.
    random_state : int, RandomState or None
        Seeds the choice of rows that large fits look at first, the random numbers of bound="mc", and Adam's start and
        minibatches. None means a fixed seed, so that a fit repeats bit for bit on one machine. `diagnose` and
        `corrected` use this seed if it is an integer, otherwise a fixed one; `sample` and `to_arviz` draw afresh in
        every call if it is None.
    verbose : bool or "auto", default "auto"
        Whether to show progress. "auto" shows it on a terminal once a fit has taken two seconds.

    Attributes
    ----------
    coef_ : array (1, n_features)
        Posterior means of the coefficients. With more than two classes a row for each, centred over classes; with
        several labels a row for each.
    intercept_ : array (1,)
        Posterior mean of the intercept; an entry for each class or label if there are more.
    covariance_ : array
        Posterior covariance of the coefficients, with the intercept last; one matrix for each class if there are more
        than two, and for each of several labels.
    posterior_ : Full, Diagonal, LowRank or GaussianMixture
        The posterior, with `mean`, `variance`, `covariance()` and `draw(noise)`.
    elbo_ : float
        The exact ELBO of the fitted posterior, whatever the bound; for several components a lower bound on it, see
        `posterior_.entropy_gap()`.
    elbo_bound_ : float
        A certified lower bound on `elbo_`, and therefore on the log evidence.
    objective_ : float
        The ELBO under the chosen bound, which is what the solver maximised.
    class_weight_ : array (2,)
        The factors of the classes that were used.
    class_share_ : float
        Share of the second class among the rows, counted by their weights; NaN for streamed rows without class_weight.
        With more than two classes, the shares of all.
    robust_groups_ : int
        Number of independent groups of rows behind robust covariances; 0 for the posterior itself.
    prior_scale_ : array
        The prior scales that were used, including those chosen by "auto" or "ard".
    history_ : list of Iteration
        The iterations of the solver.
    n_iter_ : int
        Number of iterations.
    passes_ : float
        Number of passes over all rows.
    converged_ : bool
        Whether the solver converged.
    status_ : str
        Why the solver stopped, in words.
    classes_ : array
        The classes; with two, probabilities and coefficients refer to the second. With several labels, their names: the
        column names of y, or 0, 1, ….
    multilabel_, multiclass_ : bool
        Whether y had several columns, and whether it had more than two classes.
    estimators_ : list of VariationalLogisticRegression
        The model of each label, if there are several. `elbo_`, `elbo_bound_`, `kl_` and `objective_` are sums over
        them, `history_` is a list of theirs, and `passes_` counts the passes that they share.
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : array of str
        Names of the columns, if X had names.
    formula_ : Encoding
        How tables become X, if the model was created by `from_formula`.
    missing_information_ : array
        Share of each coefficient's posterior variance that is due to missing values, with the intercept last. Only
        with missing="multiple", where the posterior is pooled by Rubin's rules and `elbo_`, `elbo_bound_` and
        `objective_` are means over the completed tables.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.preprocessing import scale
    >>> import viper
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = viper.VariationalLogisticRegression().fit(scale(X), y)
    >>> model.predict_interval(scale(X)[13:14]).round(2)
    array([[0.05, 0.73]])
    """

    feature_names_in_: np.ndarray

    _kind = "logistic"
    _labels = MANY_LABELS
    _fit_scalars: ClassVar[Mapping[str, Rule]] = REGRESSION_SCALARS
    _own_fields = Fields(
        {"posterior": one_of(*(shape.__name__ for shape in POSTERIOR_FIELDS if shape is not OrdinalPosterior))},
        {WEIGHTING: WEIGHTING_FIELDS},
    )
    _own_tensors: ClassVar[Mapping[str, Numbers]] = REGRESSION_TENSORS
    _optional_tensors: ClassVar[Mapping[str, Numbers]] = {
        "missing_information": numbers("d", "cd", range=SHARES),
        "prior.loadings": numbers("db"),
    }
    _options_before: ClassVar[Mapping[str, Any]] = {
        **StateMixin._options_before,
        "rank": DEFAULT_RANK,
        "components": 1,
    }

    def __init__(
        self,
        *,
        bound: str = "viper",
        terms: int | None = None,
        covariance: str = "full",
        rank: int = DEFAULT_RANK,
        components: int = 1,
        prior_mean: Any = 0.0,
        prior_scale: Any = DEFAULT_SCALE,
        intercept_scale: float = 10.0,
        fit_intercept: bool = True,
        class_weight: Any = None,
        solver: str = "newton",
        max_iter: int | None = None,
        tol: float | None = None,
        learning_rate: float = 0.05,
        batch_size: int | None = None,
        samples: int = 1000,
        nodes: int = 64,
        device: Any = None,
        dtype: str = "float64",
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: Any = "auto",
    ) -> None:
        self.bound = bound
        self.terms = terms
        self.covariance = covariance
        self.rank = rank
        self.components = components
        self.prior_mean = prior_mean
        self.prior_scale = prior_scale
        self.intercept_scale = intercept_scale
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.samples = samples
        self.nodes = nodes
        self.device = device
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    # -----------------------------------------------------------------------------------------------------------------
    # Fitting

    @as_task
    @by_formula
    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None, *, checkpoint: Any = None
    ) -> "VariationalLogisticRegression":
        """Fit the posterior.

        Parameters
        ----------
        X : array, DataFrame, CSR/CSC matrix or tensor (n, p); or a memory map, viper.Files or viper.Blocks
            The rows. The last three may be larger than memory; Files and Blocks contain labels and weights themselves.
        y : array (n,) or (n, L)
            The classes, two or more; or, for several labels, a column of zeros and ones for each: an array, a sparse
            matrix or a DataFrame, whose columns are the names of the labels. Each label gets the posterior of a fit by
            itself; a pass over X serves all of them.
        sample_weight : array (n,), optional
            A weight of k counts a row k times. Write m successes in n trials as two rows with weights m and n - m.
            Survey weights are not counts: divide them by their mean, and use `robust` after the fit.
        offset : array (n,), optional
            Known part of the log-odds of each row. More than two classes need a column for each; several labels may
            have one each.
        checkpoint : path, optional
            A folder in which every completed pass is stored until the fit is complete. If the fit is interrupted, the
            same call continues from there.
        """
        self._check_options()
        self.__dict__.pop("estimators_", None)  # left by an earlier fit to several labels
        format = replace(self._row_format(labels=0, classes=0), keep=True)
        self.classes_, source = open_labelled_rows(
            self, X, y, format, sample_weight=sample_weight, offset=offset, reset=True
        )
        if self.components > 1 and (source.traits.labels or self.multiclass_):
            several = "several labels" if source.traits.labels else f"{len(self.classes_)}"
            raise ValueError(f"components={self.components} is for two classes; got {several}. Use components=1.")
        if self.components > 1:
            check_small_rows(source)
        if not source.traits.labels:
            source = self._weighted_rows(source, complete=True)
        with resumable(self, source, checkpoint, checks.seed_of(self.random_state)) as (passes, seed):
            if source.traits.labels:
                return fit_labels(self, passes, partial(type(self)._fit_label, seed=seed), source)
            return self._fit_rows(passes, seed, source)

    def _fit_label(self, rows: RowSource, seed: int) -> "VariationalLogisticRegression":
        """Fit one of several labels."""
        rows = self._weighted_rows(rows)
        return self._fit_rows(rows, seed, rows)

    def _fit_rows(self, passes: RowSource, seed: int, source: RowSource) -> "VariationalLogisticRegression":
        """Fit under the given prior, or find the best; `passes` are the rows of `source`, perhaps with a log."""
        # the same random numbers for every scale
        solve = lambda scale, start, last: self._fit(passes, self._prior(scale), seed, start, last)  # noqa: E731
        fit = self._fit_scales(solve, careful=self.multiclass_)
        if self.components > 1:
            exact, bound, _ = fit.certified()
            fit = refined_fit(fit.posterior, fit.prior, source, self.components, fit.result, exact - bound)
        return self._keep(source, fit)

    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        classes: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
        forget: float = 1.0,
    ) -> "VariationalLogisticRegression":
        """Update the posterior with new rows: the current posterior is their prior.

        Parameters
        ----------
        X, y, sample_weight, offset
            As in `fit`.
        classes : array (2,), optional
            The two labels. Required in the first call if its rows contain only one of them.
        forget : float in (0, 1], default 1
            Factor that multiplies the precision of the current posterior. Below 1, old rows lose weight.
        """
        check_one_component(self, "partial_fit")
        first = check_update(self, forget)
        known = self.classes_ if not first else None if classes is None else np.asarray(classes)
        if first and known is not None and y is not None and not has_several_columns(y):
            known = checks.distinct(known)
        given = {"sample_weight": sample_weight, "offset": offset, "reset": first, "classes": known}
        format = self._row_format(labels=0, classes=0) if first else self._row_format()
        self.classes_, source = open_labelled_rows(self, X, y, replace(format, keep=True), **given)
        seed = checks.seed_of(self.random_state)
        if source.traits.labels:
            return fit_labels(self, source, partial(type(self)._update, forget=forget, seed=seed), source)
        return self._update(source, forget, seed)

    def _update(self, source: RowSource, forget: float, seed: int) -> "VariationalLogisticRegression":
        """Fit new rows, with the current posterior, if there is one, as their prior."""
        source = self._weighted_rows(source)
        if hasattr(self, "posterior_"):
            prior = self.posterior_.as_prior(forget)
        else:
            scale = self._scale()
            prior, self.prior_scale_ = self._prior(scale), scale.numpy()
        return self._keep(source, self._fit(source, prior, seed))

    def _check_options(self) -> None:
        words: dict[str, tuple[str | bool, ...]] = {
            "bound": FIT_BOUNDS,
            "covariance": ("full", "diagonal", "low-rank"),
            "solver": ("newton", "adam"),
            "dtype": ("float64", "float32"),
            "verbose": ("auto", True, False),
        }
        check_scale_word(self.prior_scale)
        checks.check_options(self, words, ("tol", "learning_rate"), ("max_iter", "batch_size"))
        check_jobs(self.n_jobs)
        check_rank(self.rank)
        check_components_option(self)

    def _row_format(
        self, block_rows: int | None = None, labels: int | None = None, classes: int | None = None
    ) -> RowFormat:
        labels = len(self.classes_) if self.multilabel_ else labels
        classes = classes if classes is not None else len(self.classes_) if self.multiclass_ else 2
        options = bool(self.fit_intercept), self.device, self.dtype, self.verbose
        return RowFormat(*options, True, block_rows, labels, classes)

    def _prior(self, scale: Tensor) -> Prior:
        mean = self._prior_mean()
        if not self.multiclass_:
            return make_prior(mean, scale, self.intercept_scale, bool(self.fit_intercept))
        shared = make_prior(0.0, scale, self.intercept_scale, bool(self.fit_intercept))
        return with_class_means(shared, mean, len(self.classes_), self.n_features_in_)

    def _fit(self, source: RowSource, prior: Any, seed: int, start: Any = None, last: bool = True) -> Any:
        if self.multiclass_:
            options = self._options()
            options = options if last or options.tol is not None else replace(options, tol=SEARCH_TOLERANCE)
            return fit_classes(source, prior, len(self.classes_), options, seed, start)
        return fit_posterior(source, prior, self._options(), seed, start)

    def _options(self) -> FitOptions:
        chosen = {field.name: getattr(self, field.name) for field in fields(FitOptions) if field.name != "tasks"}
        return FitOptions(**chosen, tasks=tasks_of(self))

    def _keep(self, source: RowSource, fit: Any) -> "VariationalLogisticRegression":
        """Set the fitted attributes."""
        source.release()
        self.posterior_, self.prior_ = moved(fit.posterior, "cpu"), moved(fit.prior, "cpu")
        self._set_means()
        self.elbo_, self.elbo_bound_, self.kl_ = fit.certified()
        self.objective_ = fit.result.objective
        self.history_, self.n_iter_ = fit.result.history, max(1, fit.result.iterations)
        self.converged_, self.status_, self.passes_ = fit.result.converged, fit.result.status, fit.result.passes
        self._training_rows, self._largest_sd, self.robust_groups_ = source, None, 0
        return self

    def _pool(self, fits: "list[VariationalLogisticRegression]") -> None:
        """Set the fitted attributes from fits to several completed tables, by Rubin's rules."""
        first = fits[0]
        check_one_component(first, "missing='multiple'")
        for name in ("n_features_in_", "feature_names_in_", "classes_"):
            setattr(self, name, getattr(first, name))
        pool = pool_stars if first.multiclass_ else pool_posteriors
        pooled = pool([cast(Any, fit.posterior_) for fit in fits])
        self.posterior_, self.missing_information_ = pooled.posterior, pooled.missing_information.numpy()
        self.prior_, self.prior_scale_, self.history_ = first.prior_, first.prior_scale_, first.history_
        self._set_means()
        for name in ("elbo_", "elbo_bound_", "kl_", "objective_"):
            setattr(self, name, float(np.mean([getattr(fit, name) for fit in fits])))
        self.n_iter_, self.passes_ = max(fit.n_iter_ for fit in fits), sum(fit.passes_ for fit in fits)
        worst = min(fits, key=lambda fit: fit.converged_)
        self.converged_, self.status_ = worst.converged_, worst.status_
        self._completed_fits, self._largest_sd, self.robust_groups_ = fits, None, 0
        self.class_weight_, self.class_share_ = first.class_weight_, first.class_share_

    def _set_means(self) -> None:
        mean = np.atleast_2d(self.posterior_.mean.numpy())
        self.coef_ = mean[:, : self.n_features_in_].copy()
        self.intercept_ = mean[:, self.n_features_in_].copy() if self.fit_intercept else np.zeros(len(mean))

    # -----------------------------------------------------------------------------------------------------------------
    # What was learned

    @property
    def multilabel_(self) -> bool:
        """Whether y had a column for each of several labels."""
        return hasattr(self, "estimators_")

    @property
    def multiclass_(self) -> bool:
        """Whether y had more than two classes."""
        return len(getattr(self, "classes_", ())) > 2 and not self.multilabel_

    @property
    def largest_sd_(self) -> Any:
        """Largest posterior sd of the log-odds among the training rows; an array if there are several labels."""
        if self.multilabel_:
            return stacked_answers(self, [fit.largest_sd_ for fit in self.estimators_])
        return super().largest_sd_

    @property
    def _reading(self) -> TargetReading:
        if isinstance(posterior := getattr(self, "posterior_", None), GaussianMixture):
            return mixture_reading(posterior)
        return LABELS_READING if self.multilabel_ else SOFTMAX_READING if self.multiclass_ else TWO_CLASSES

    @property
    def covariance_(self) -> np.ndarray:
        check_is_fitted(self, "posterior_")
        return self.posterior_.covariance().numpy()

    def _names(self) -> list[str]:
        return coefficient_names(self._columns(), self.fit_intercept)

    @by_label(stacked_answers)
    def coefficient_interval(self, level: float = 0.95) -> np.ndarray:
        """Credible intervals of the coefficients, with the intercept last: d × 2."""
        check_is_fitted(self, "posterior_")
        reach = half_width(level) * self.posterior_.variance.sqrt()
        if isinstance(self.posterior_, GaussianMixture):
            return self.posterior_.coefficient_ends(level).numpy()
        return torch.stack([self.posterior_.mean - reach, self.posterior_.mean + reach], -1).numpy()

    @by_label(summary_of_labels)
    def summary(self, level: float = 0.95, baseline: Any = None) -> "pandas.DataFrame":
        """Mean, sd, interval, odds ratio with interval and probability of direction of every coefficient.

        With more than two classes there is one table for each: of coefficients less their mean over classes, or less
        those of the class `baseline`, which gives odds ratios between the two classes.
        """
        check_is_fitted(self, "posterior_")
        if self.multiclass_:
            table = class_summary(cast(Any, self.posterior_), self._names(), self.classes_, level, baseline)
            if hasattr(self, "missing_information_") and baseline is None:
                table["missing_information"] = self.missing_information_.ravel()
            return table
        if baseline is not None:
            raise ValueError(f"baseline is for more than two classes; got {baseline!r} and two. Leave it out.")
        mean, sd = self.posterior_.mean, self.posterior_.variance.sqrt()
        low, high = torch.from_numpy(self.coefficient_interval(level)).T
        q: Any = self.posterior_
        positive = q.positive() if isinstance(q, GaussianMixture) else torch.special.ndtr(mean / sd)
        table = summary_frame(self._names(), mean, sd, low, high, positive, level)
        if hasattr(self, "missing_information_"):
            table["missing_information"] = self.missing_information_
        return table

    @by_label(with_estimators)
    def robust(
        self, X: Any = None, y: Any = None, *, sample_weight: Any = None, offset: Any = None, groups: Any = None
    ) -> Self:
        """Return a copy of the model with robust covariances: for survey weights, class weights, and repeated rows.

        The posterior treats a row of weight k as k independent rows. The covariance returned here is estimated from the
        variation of the rows' scores (the sandwich). In large samples it is right to first order even if weights are
        not counts, or if the rows of a group, such as visits of one patient, resemble each other. Means stay as they
        are; sds, intervals and predicted probabilities use the new covariance. It is not a posterior, so `diagnose`
        cannot judge it.

        Parameters
        ----------
        X, y, sample_weight, offset
            The rows of the fit. Pass them again after loading a model from a file.
        groups : array (n,), optional
            The group of each row of the fit. By default, each row is a group of its own.
        """
        check_is_fitted(self, "posterior_")
        check_one_component(self, "robust")
        model = copy.copy(self)
        if X is None and hasattr(self, "_completed_fits"):
            model._pool([fit.robust(groups=groups) for fit in self._completed_fits])
            model.robust_groups_ = model._completed_fits[0].robust_groups_
            return model
        posterior, prior, source, _ = self._weighed_fit(X, y, sample_weight, offset, "robust")
        robust = robust_classes if self.multiclass_ else robust_posterior
        found: Any
        found, model.robust_groups_ = robust(posterior, prior, source, groups)
        model.posterior_, model._largest_sd = moved(found, "cpu"), None
        return model

    @by_label(answers_by_label)
    def refined(
        self,
        components: int = 2,
        X: Any = None,
        y: Any = None,
        *,
        sample_weight: Any = None,
        offset: Any = None,
    ) -> Self:
        """Return a copy of the model whose posterior is a mixture of Gaussians: for few rows, or a rare outcome.

        The ELBO of the mixture is maximised, with a lower bound in place of its entropy; with one component this is the
        ordinary posterior. The copy is what `fit` with `components` returns, and its summaries and predictions are in
        closed form. `corrected` is not tied to a family, but has Monte Carlo error.

        Parameters
        ----------
        components : int, default 2
            Number of Gaussians. Two capture the skewness along one direction, four along two.
        X, y, sample_weight, offset
            The rows of the fit. Pass them again after loading a model from a file.
        """
        posterior, prior, source, _ = self._weighed_fit(X, y, sample_weight, offset, "refined")
        check_one_component(self, "refined")
        model = copy.copy(self)
        model.components, model._training_rows = check_components(components), source
        if model.components == 1:
            return model
        check_components_option(model)
        error = self.elbo_ - self.elbo_bound_
        fit = refined_fit(posterior, prior, source, model.components, None, error)
        model.posterior_ = fit.posterior  # type: ignore[assignment]
        model._largest_sd = None
        model.elbo_, model.elbo_bound_, model.kl_ = fit.certified()
        model._set_means()
        return model

    def sample(self, n: int = 1, random_state: Any = None) -> np.ndarray:
        """Draw coefficients (intercept last) from the posterior: n × d.

        `random_state` is that of the estimator by default; if both are None, every call returns new draws.
        """
        check_is_fitted(self, "posterior_")
        n = checks.read_whole(n, "n", 0)
        generator = check_random_state(self.random_state if random_state is None else random_state)
        if self.multilabel_:
            return np.stack([fit.sample(n, generator) for fit in self.estimators_], 1)
        noise = torch.from_numpy(generator.standard_normal((n, *noise_shape(self.posterior_))))
        return self.posterior_.draw(noise).numpy()

    average = by_label(labels_as_table)(EffectsMixin.average)
    contrast = by_label(labels_as_table)(EffectsMixin.contrast)
    slopes = by_label(labels_as_table)(EffectsMixin.slopes)
    diagnose = by_label(answers_by_label)(DiagnosisMixin.diagnose)
    corrected = by_label(answers_by_label)(DiagnosisMixin.corrected)
    loo = by_label(answers_by_label)(DiagnosisMixin.loo)
    elbo = by_label(sum_of_labels)(DiagnosisMixin.elbo)
    prevalence_offset = by_label(stacked_answers)(ClassWeightMixin.prevalence_offset)

    def _open_labelled_rows(self, X: Any, y: Any, *, sample_weight: Any, offset: Any) -> RowSource:
        given = {"sample_weight": sample_weight, "offset": offset, "classes": self.classes_}
        return self._with_imputed(X, lambda rows: open_labelled_rows(self, rows, y, self._row_format(), **given)[1])

    def _open_rows(self, X: Any, offset: Any) -> RowSource:
        return self._with_imputed(X, lambda rows: open_rows(self, rows, offset, self._row_format()))

    def _with_imputed(self, X: Any, open_source: Callable[[Any], RowSource]) -> RowSource:
        """Open rows; if missing values are drawn, the variance of the log-odds includes that of the draws."""
        encoding = getattr(self, "formula_", None)
        if encoding is None or encoding.imputation is None or is_kept_elsewhere(X):
            return open_source(X)
        spread = star_spread_of_draws if self.multiclass_ else spread_of_draws
        imputed = encoding.impute(X, lambda x: spread(torch.from_numpy(x), cast(Any, self.posterior_)).numpy())
        return replace(open_source(imputed).in_memory(), residual=torch.from_numpy(imputed.residual))

    def _corrected_kind(self) -> type[CorrectedPosterior]:
        return CorrectedClasses if self.multiclass_ else CorrectedPosterior

    def _joint(self, points: Callable[[], Any]) -> tuple[OpenRows, AnyPosterior]:
        def opened(X: Any, offset: Any, block_rows: int) -> RowSource:
            return self._with_imputed(X, lambda rows: open_rows(self, rows, offset, self._row_format(block_rows)))

        return opened, self.posterior_

    def _summarise_draws(
        self, X: Any, offset: Any, draws: Tensor, summary: Callable[[Tensor], Tensor]
    ) -> Iterator[Tensor]:
        check_is_fitted(self, "posterior_")
        per_row = len(draws) * (draws.shape[1] if self.multiclass_ else 1)
        rows = open_rows(self, X, offset, self._row_format(block_rows=max(1, LATENT_DRAWS // per_row)))
        of_block = summary_of_class_draws if self.multiclass_ else summary_of_draws
        return rows.map(partial(of_block, draws=draws, summary=summary))

    # -----------------------------------------------------------------------------------------------------------------
    # Storage and scikit-learn

    def _pack(self) -> State:
        return labels_state(self, StateMixin._pack) if self.multilabel_ else super()._pack()

    @classmethod
    def _check_header(cls, layouts: Mapping[str, Layout], metadata: dict[str, Any]) -> dict[str, Numbers]:
        if isinstance(metadata, dict) and "labels" in metadata:
            return check_labels_header(layouts, metadata, super()._check_header)
        return super()._check_header(layouts, metadata)

    @classmethod
    def _unpack(cls, state: State, objects: dict[str, Any]) -> Self:
        if "labels" in state.metadata:
            cls._check_state(state)
            unpack = super()._unpack
            return restored_labels(state, lambda one: unpack(one, objects))
        return super()._unpack(state, objects)

    def _own_state(self) -> State:
        tensors = {
            **prior_tensors(self.prior_),
            "prior_scale": torch.from_numpy(self.prior_scale_),
            "history": torch.tensor(self.history_, dtype=torch.float64),
        }
        if hasattr(self, "missing_information_"):
            tensors["missing_information"] = torch.from_numpy(self.missing_information_)
        return State(tensors, {"posterior": type(self.posterior_).__name__, **self._weighting_state()})

    @classmethod
    def _sizes(cls, metadata: dict[str, Any]) -> dict[str, int]:
        columns, classes = metadata["features"], len(metadata["classes"]["values"])
        width = columns + bool(metadata["options"].get("fit_intercept", True))
        return {"p": columns, "d": width, "c": classes if classes > 2 else -1}  # no tensor has -1 of anything

    @classmethod
    def _tensor_rules(cls, names: Collection[str], metadata: dict[str, Any]) -> Mapping[str, Numbers]:
        return star_tensors(names, metadata, cls._own_tensors)

    def _restore_own_state(self, state: State) -> None:
        tensors = state.tensors
        self.prior_ = prior_from(tensors)
        self.prior_scale_ = tensors["prior_scale"].numpy()
        if "missing_information" in tensors:
            self.missing_information_ = tensors["missing_information"].numpy()
        self._restore_weighting(state.metadata)
        self.history_ = [Iteration(int(row[0]), bool(row[1]), *row[2:]) for row in tensors["history"].tolist()]
        self._set_means()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = not unsupported_options(self)
        tags.classifier_tags.multi_label = True
        tags.target_tags.multi_output = True
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        fitted = hasattr(self, "posterior_") and not self.multilabel_  # the estimators of labels have their own
        known = {"_largest_sd": self.largest_sd_} if fitted else {}
        left_out = ("_training_rows", "_completed_fits")
        return {name: value for name, value in (state | known).items() if name not in left_out}
