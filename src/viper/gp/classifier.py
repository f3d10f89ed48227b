"""Gaussian-process classification with the scikit-learn interface."""

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

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
    BOOLEAN,
    DEFINITE,
    NUMBER,
    POSITIVE,
    TEXT,
    WHOLE,
    Fields,
    Items,
    Numbers,
    Rule,
    between,
    numbers,
)
from viper.errors import ConvergenceWarning, JitterWarning, StorageError, shown, users_line
from viper.formula.learn import FormulaMixin, by_formula, formula_template
from viper.gp.additive import is_additive
from viper.gp.average import (
    Averaged,
    Component,
    family_weights,
)
from viper.gp.classes.fitting import (
    SeveralClasses,
)
from viper.gp.fitting.case import Case, FittedProcess, Known
from viper.gp.fitting.choices import AUTO, DEFAULT_STEPS, Before, Choices
from viper.gp.fitting.stored import COMPONENT, FAMILY, START, component_state, read_components, read_model
from viper.gp.fitting.two_classes import TwoClasses
from viper.gp.joint import JointFeatures, LatentProcess
from viper.gp.kernels import (
    LENGTHSCALES,
    PRIORS,
    covariance,
    weight_columns,
)
from viper.gp.mean_uncertainty import warn_of_narrow_intervals
from viper.gp.model import LARGEST_JITTER, Observations, Scaler, SparseGP
from viper.gp.online import PLACED_ROWS
from viper.gp.search import Family, Found, Start
from viper.gp.terms import TermEffect, effects_of_terms
from viper.inference.classes.star import Star
from viper.inference.device import choose_device
from viper.inference.posterior import Posterior, moved
from viper.inference.problem import Prior
from viper.inference.progress import Callbacks, as_task
from viper.inference.rows import Arrays, RowSource, joined_rows
from viper.inference.threads import check_jobs
from viper.models.classes.guard import for_two_classes
from viper.models.classes.storing import STAR_PRIOR, prior_from, prior_tensors
from viper.models.diagnosis import LATENT_DRAWS, CorrectedPosterior, DiagnosisMixin
from viper.models.effects import EffectsMixin, OpenRows
from viper.models.notebook import NotebookMixin
from viper.models.prediction import TargetReading, half_width, largest_sd
from viper.models.saving import State, StateMixin
from viper.models.weighting import WEIGHTING, WEIGHTING_FIELDS, ClassWeightMixin
from viper.softplus.bound_names import FIT_BOUNDS

if TYPE_CHECKING:
    import pandas

SEARCH_ROWS = 40_000  # rows on which to search hyperparameters, if the rows are not in memory
ROW_FORMAT = RowFormat()


class VariationalGPClassifier(
    FormulaMixin,
    NotebookMixin,
    ClassWeightMixin,
    StateMixin,
    EffectsMixin,
    DiagnosisMixin,
    Callbacks,
    ClassifierMixin,
    BaseEstimator,
):
    """Gaussian-process classification by variational inference, with inducing points and the exact ELBO.

    y_i ~ Bernoulli(s(f(x_i))), where f is a Gaussian process. The posterior of f at the inducing points is the Gaussian
    q that maximises the ELBO, found by the same solver as in logistic regression.

    More than two classes have a function each, y_i ~ Categorical(softmax(f(x_i))), with the same kernel and inducing
    points. Predictions then have a column for each class, and methods that are for two classes say so.

    By default nothing needs to be chosen: hyperparameters have priors, the evidence decides between one lengthscale and
    one per column, there are as many inducing points as the kernel needs, and predictions are averaged over
    hyperparameters. `summary` and `components_` show what was chosen. The paper's recipe, which maximises the ELBO over
    everything, is ``kernel="rbf", mean="linear", priors=None, lengthscales="many", n_inducing=50``.

    Parameters
    ----------
    kernel : {"rbf", "matern32", "matern52", "auto", "linear", "additive"} or gpytorch.kernels.Kernel, default "rbf"
        "auto" fits the first three and weights them by their evidence, in three times the time; it needs priors.
        "additive" adds up functions of single columns, "additive + age:bmi" also one of this pair: see `term_effects`.
        A kernel object is copied; its constraints, priors and fixed parameters (``requires_grad_(False)``) are
        respected. Its inputs are the standardised columns.
    mean : {"linear", "constant", "zero"} or gpytorch.means.Mean, default "linear"
        What is added to the kernel's part: a linear function of the columns, a common level, or nothing. With priors
        its weights have a posterior, and intervals include their uncertainty. With more than two classes each class has
        weights of its own, which always have a posterior, and a gpytorch Mean, shared by all, would change nothing.
    priors : {"default", "short", None}, default "default"
        Weakly informative priors of the hyperparameters of named kernels and means, on standardised columns:
        log-normal with a median of 1.35 √p for lengthscales (p columns), 3 for the output scale, which is
        the prior variance of the kernel's part, and 1/√p for the prior standard deviation of the weights of a linear
        mean; the level is N(0, 5²). `summary` lists them. "short" has a median of 0.8 √p for lengthscales, which suits
        functions over a box that are largest within it. With None, all hyperparameters and the weights of the mean
        maximise the ELBO alone, as in the paper: intervals then do not include the uncertainty of the weights, and a
        NarrowIntervalsWarning says so if a linear mean explains most of the data.
    lengthscales : {"auto", "one", "many"}, default "auto"
        Whether a named kernel has one lengthscale for all columns, or one for each. "auto" fits both and weights them
        by their evidence; with more than 100 columns it means "one", and without priors "many".
    hyperparameters : {"average", "mode"}, default "average"
        Predict from the average over hyperparameters, or from the best ones alone. The average has the mean and the
        variance of a mixture: a few points of a Gaussian at the mode of each kind of kernel, weighted by evidence
        (`components_`). It needs named kernels and means with priors, and at most 10,000 rows in memory; otherwise, and
        by "natural-adam", predictions are those at the mode.
    n_inducing : "auto" or int, default "auto"
        Number of inducing points. "auto" places as many as are needed for the ELBO to lose no more than half a nat, all
        rows if need be, within a budget of time: at most 1,000, and 316 for 10,000 rows. If there are no more
        distinct rows than a given number, all of them are inducing points, which gives the full variational
        Gaussian process.
    inducing : {"greedy", "kmeans", "subset"} or array (M, n_features), default "greedy"
        Where the inducing points start: at rows chosen one by one where the unexplained variance is largest, at
        cluster centres, at random rows, or at the given points.
    learn_inducing : bool, default True
        Whether a given number of inducing points is then learned. With "auto" they stay at rows.
    covariance : {"full", "diagonal"}, default "full"
        Covariance of q, over the whitened inducing values.
    bound : {"viper", "pg", "mc", "quadrature"}, default "viper"
        Treatment of E[log(1+e^f)]: exact (default), or with `terms` the paper's η_l; Pólya-Gamma; Monte Carlo;
        quadrature.
    terms, samples, nodes : int, optional
        Options of the bounds "viper", "mc" and "quadrature".
    standardize : bool, default True
        Centre and scale the columns. `summary` and `inducing_points_` are in the original units.
    class_weight : None, "balanced" or dict, default None
        Factors for the weights of the rows of each class; "balanced" gives both the same total weight. Probabilities
        are then those of a population in which the classes have these shares, until `prevalence_offset` takes
        that back, and intervals count each row as often as its weight says.
    n_starts : int, default 5
        Number of starting points of the search, at most two for each family where several are compared; `starts_`
        reports how each one fared.
    solver : {"profile", "natural-adam"}, default "profile"
        L-BFGS on the profile, or the paper's recipe: natural gradients for q, Adam for everything else.
    max_iter : int, optional
        Steps of L-BFGS (default 300), or passes of "natural-adam" over the rows (default 1500).
    tol : float, default 2e-3
        L-BFGS stops when steps gain less than this in the ELBO (in nats; from 10,000 rows on, in nats per 10,000 rows),
        "natural-adam" when 20 passes gain less (in nats).
    learning_rate : float, default 0.05
        Learning rate of "natural-adam".
    batch_size : int, optional
        Rows per step of "natural-adam"; all rows by default.
    jitter : float, default 1e-8
        Added to the diagonal of the inducing points' kernel matrix, relative to its mean. If the matrix is still not
        positive definite, the jitter is raised tenfold, repeatedly, up to 0.01. `jitter_` is the value used, and a
        JitterWarning says if it was raised.
    warm_start : bool, default False
        Whether `fit` starts where the last fit ended, if the number of columns is the same.
    random_state : int, RandomState or None
        Seeds the choice of rows and clusters, the minibatches of "natural-adam" and Monte Carlo. None means a fixed
        seed, so that a fit repeats bit for bit on one machine; `sample` draws afresh in every call if it is None.
    n_jobs : int, optional
        Threads of the passes that fit q, as for `VariationalLogisticRegression`; the search uses one.
    device : str or torch.device, optional
        Device to compute on: by default the CPU, or that of X if X is a tensor. The fitted model is on the CPU.
    verbose : bool or "auto", default "auto"
        Show progress: always, never, or on a terminal once a fit takes longer than two seconds.

    Attributes
    ----------
    posterior_ : q of the whitened inducing values, with `mean`, `variance`, `draw`, ...
    model_ : kernel, mean and inducing points on standardised columns, as one torch module
    components_ : list of Component
        The Gaussian processes over which predictions are averaged, each with `weight`, `family` (kernel and
        lengthscales), `model` and `posterior`; the first one is that of `model_` and `posterior_`.
    family_ : Family
        Kernel and lengthscales of `model_`.
    inducing_points_ : array (M, n_features), in the units of X
    inducing_cost_ : float or None
        What the inducing points cost, in nats of the ELBO, because they leave variance unexplained; None if the model
        is from a file of an older version.
    elbo_ : float
        The exact ELBO at the fitted q, whatever the bound.
    elbo_bound_ : float
        A certified lower bound on `elbo_`, given kernel, mean and inducing points.
    objective_ : float
        The ELBO under the chosen bound, without the log prior of the hyperparameters.
    starts_ : list of Start
        Name, objective reached, evaluations and seconds of every start; those that fell behind were stopped early.
    jitter_ : float
    history_ : list of Iteration; n_iter_ : int; converged_ : bool; status_ : str
    classes_, n_features_in_, feature_names_in_
    multiclass_ : bool
    formula_ : the Encoding, if the model was created by `from_formula`

    Examples
    --------
    >>> import numpy as np
    >>> import viper
    >>> x = np.linspace(0, 5, 60)[:, None]
    >>> y = np.sin(np.pi * x[:, 0] / 2) < 0
    >>> model = viper.VariationalGPClassifier(random_state=0).fit(x, y)
    >>> model.predict([[1.0], [3.0]])
    array([False,  True])
    """

    _kind = "gp"
    _labels = MANY_LABELS
    _sparse = True
    _raw_rows: RowSource | None = None
    model_: SparseGP
    posterior_: Any  # Posterior, or StarPosterior for more than two classes
    _own_prior: Prior | Star | None = None  # of q, where what earlier rows said is only known as a Gaussian
    _fit_scalars: ClassVar[Mapping[str, Rule]] = {
        "elbo_": NUMBER,
        "elbo_bound_": NUMBER,
        "objective_": NUMBER,
        "kl_": NUMBER,
        "jitter_": between(0.0, LARGEST_JITTER),
        "n_iter_": WHOLE,
        "converged_": BOOLEAN,
        "status_": TEXT,
    }
    _own_fields = Fields(
        {"starts": Items(START)},
        {
            "learns_inducing": BOOLEAN,
            "inducing_cost": NUMBER,
            "family": FAMILY,
            "components": Items(COMPONENT),
            WEIGHTING: WEIGHTING_FIELDS,
        },
    )
    _own_tensors: ClassVar[Mapping[str, Numbers]] = {
        "centre": numbers("p"),
        "scale": numbers("p", range=POSITIVE),
        "model.inducing": numbers("mp"),
    }
    _optional_tensors: ClassVar[Mapping[str, Numbers]] = {
        "prior.mean": numbers("d"),
        "prior.precision": numbers("d", "dd", range=DEFINITE),
        **STAR_PRIOR,
    }
    _objects = ("kernel", "mean")
    components_: list[Component]
    inducing_cost_: float | None
    _options_before: ClassVar[Mapping[str, Any]] = {
        **StateMixin._options_before,
        "priors": None,
        "lengthscales": "many",
        "hyperparameters": "mode",
    }

    def __init__(
        self,
        kernel: Any = "rbf",
        *,
        mean: Any = "linear",
        priors: str | None = "default",
        lengthscales: str = "auto",
        hyperparameters: str = "average",
        n_inducing: Any = "auto",
        inducing: Any = "greedy",
        learn_inducing: bool = True,
        covariance: str = "full",
        bound: str = "viper",
        terms: int | None = None,
        samples: int = 1000,
        nodes: int = 64,
        standardize: bool = True,
        class_weight: Any = None,
        n_starts: int = 5,
        solver: str = "profile",
        max_iter: int | None = None,
        tol: float = 2e-3,
        learning_rate: float = 0.05,
        batch_size: int | None = None,
        jitter: float = 1e-8,
        warm_start: bool = False,
        random_state: Any = None,
        n_jobs: int | None = None,
        device: Any = None,
        verbose: Any = "auto",
    ) -> None:
        self.kernel = kernel
        self.mean = mean
        self.priors = priors
        self.lengthscales = lengthscales
        self.hyperparameters = hyperparameters
        self.n_inducing = n_inducing
        self.inducing = inducing
        self.learn_inducing = learn_inducing
        self.covariance = covariance
        self.bound = bound
        self.terms = terms
        self.samples = samples
        self.nodes = nodes
        self.standardize = standardize
        self.class_weight = class_weight
        self.n_starts = n_starts
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.jitter = jitter
        self.warm_start = warm_start
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.device = device
        self.verbose = verbose

    # -----------------------------------------------------------------------------------------------------------------
    # Fitting

    @as_task
    @by_formula
    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None, *, checkpoint: Any = None
    ) -> "VariationalGPClassifier":
        """Fit posterior, kernel, mean function and inducing points.

        Parameters
        ----------
        X : array, DataFrame, sparse matrix (made dense) or tensor (n, p); or a memory map, viper.Files or viper.Blocks
            The last three may be larger than memory: 40,000 random rows then determine kernel, mean function and
            inducing points, and all rows determine the posterior.
        y : array of labels (n,)
            Two classes or more.
        sample_weight : array (n,), optional
            A weight of k counts a row k times.
        offset : array (n,), optional
            Known part of the log-odds of each row; with more than two classes n × K, a column for each.
        checkpoint : path, optional
            For rows that are not in memory: a folder that keeps the result of every completed pass until the fit is
            complete. If the fit is interrupted, the same call repeats the search and resumes after the last pass.
        """
        return self._fit_opened(X, y, sample_weight, offset, checkpoint)

    def _fit_opened(
        self, X: Any, y: Any, sample_weight: Any, offset: Any, checkpoint: Any = None, classes: Any = None
    ) -> "VariationalGPClassifier":
        self._check_options()
        random = checks.random_of_fit(self.random_state)
        if has_several_columns(y):
            raise ValueError(
                f"y must have one column; got {np.shape(y)[1]}. For several labels, use VariationalLogisticRegression, "
                "or scikit-learn's MultiOutputClassifier around this estimator."
            )
        known_classes = None if classes is None else checks.distinct(np.asarray(classes))
        given = {"sample_weight": sample_weight, "offset": offset, "reset": True, "classes": known_classes}
        self.classes_, source = open_labelled_rows(self, X, y, replace(ROW_FORMAT, classes=0, keep=True), **given)
        self._own_prior = None
        source = self._weighted_rows(source, complete=classes is None)
        if source.traits.where == "memory":
            self._fit(source.in_memory(), None, random)
            self._raw_rows = source
            return self
        with resumable(self, source, checkpoint, int(random.randint(2**31))) as (passes, seed):
            few = passes.rows <= SEARCH_ROWS
            known = passes.in_memory() if few else weighted_sample(passes, SEARCH_ROWS, seed)
            self._fit(known, None if few else passes, np.random.RandomState(seed))
        source.release()
        self._raw_rows = source
        return self

    def partial_fit(
        self, X: Any, y: Any = None, classes: Any = None, sample_weight: Any = None, offset: Any = None
    ) -> "VariationalGPClassifier":
        """Update the posterior with new rows; kernel and mean function stay as they are.

        The first call is a fit. As long as the model remembers its rows, the result is that of all rows together; after
        loading it from a file, the posterior so far is the prior of the new rows. Inducing points are added at new rows
        that lie outside, where the ones that are there leave much unexplained; with more than two classes they stay.

        Parameters
        ----------
        X, y, sample_weight, offset
            As in `fit`.
        classes : array, optional
            All labels. Required in the first call if its rows do not contain all of them.
        """
        first = not hasattr(self, "posterior_")
        if isinstance(self.class_weight, str):
            raise ValueError(
                f"partial_fit needs class_weight as a dictionary; got {self.class_weight!r}. Name both classes."
            )
        if first:
            if formula_template(self) is not None:
                raise ValueError("partial_fit needs a fitted formula; got one that is not fitted. Call fit first.")
            return self._fit_opened(X, y, sample_weight, offset, classes=classes)
        given = {"sample_weight": sample_weight, "offset": offset, "classes": self.classes_}
        source = self._known_weights(open_labelled_rows(self, X, y, self._row_format(), **given)[1])
        self._update(source)
        return self

    def _update(self, new: RowSource) -> None:
        """Find q again for all rows or, if only the new ones are known, with q so far as their prior."""
        found = Found(self.model_, self.starts_, self.n_iter_, True, family=self.family_)
        known = Known(self.components_, self._raw_rows, self._scaler, found, self.jitter_)
        fitted = self._case.update(known, new, checks.seed_of(self.random_state))
        self._keep(fitted)
        self._own_prior = None if self._raw_rows is not None else moved(fitted.prior, "cpu")
        self._raw_rows = None if self._raw_rows is None else joined_rows(self._raw_rows, new)
        self._warn(True)

    def _check_options(self) -> None:
        words: dict[str, tuple[str | bool, ...]] = {
            "bound": FIT_BOUNDS,
            "covariance": ("full", "diagonal"),
            "solver": tuple(DEFAULT_STEPS),
            "lengthscales": LENGTHSCALES,
            "hyperparameters": ("average", "mode"),
            "verbose": ("auto", True, False),
        }
        if isinstance(self.inducing, str):
            words["inducing"] = ("greedy", "kmeans", "subset")
        checks.check_options(self, words, ("tol", "learning_rate"), ("max_iter", "batch_size"))
        checks.read_whole(self.n_starts, "n_starts", 1)
        self._check_n_inducing()
        check_jobs(self.n_jobs)
        if not (self.priors is None or isinstance(self.priors, str)) or self.priors not in PRIORS:
            raise ValueError(f"priors must be 'default', 'short' or None; got {shown(self.priors)}.")
        if isinstance(self.kernel, str) and self.kernel == AUTO and (self.priors is None or self.solver != "profile"):
            got = f"priors={shown(self.priors)} and solver={shown(self.solver)}"
            raise ValueError(f"kernel='auto' needs priors and solver='profile'; got {got}. Name a kernel.")
        if not 0.0 <= self.jitter <= 1e-2:
            raise ValueError(f"jitter must lie in [0, 0.01]; got {self.jitter!r}. It is relative to the mean variance.")

    def _check_n_inducing(self) -> None:
        count = self.n_inducing
        if isinstance(count, str) and count == AUTO:
            return
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
            raise ValueError(f"n_inducing must be 'auto' or a positive integer; got {shown(count)}.")

    def _fit(self, known: Arrays, source: RowSource | None, random: np.random.RandomState) -> None:
        """Search on rows in memory, then fit q to them or, if they are a sample, to all rows of their source."""
        self._scaler, fitted = self._case.fit(known, source, self._before(), random)
        self._keep(fitted)
        self._warn(fitted.families[0].converged)
        warn_of_narrow_intervals(fitted.narrow)

    def _before(self) -> Before | None:
        """What a warm start begins from, or None."""
        model = getattr(self, "model_", None) if self.warm_start else None
        if model is None or model.inducing.shape[1] != self.n_features_in_:
            return None
        return Before(model, self.family_, self._scaler)

    @property
    def _choices(self) -> Choices:
        return Choices(self, len(getattr(self, "classes_", ())))

    @property
    def _case(self) -> Case:
        """All that depends on whether there are two classes or more."""
        return (SeveralClasses if self.multiclass_ else TwoClasses)(self._choices)

    @property
    def multiclass_(self) -> bool:
        """Whether y had more than two classes."""
        return len(getattr(self, "classes_", ())) > 2

    @property
    def _reading(self) -> TargetReading:
        return self._case.reading

    @property
    def _predictive(self) -> Any:
        return self._case.predictive(self.components_, self._scaler)

    def _row_format(self, block_rows: int | None = None) -> RowFormat:
        return replace(ROW_FORMAT, classes=max(2, len(self.classes_)), block_rows=block_rows)

    def _keep(self, fitted: FittedProcess) -> None:
        """Set the fitted attributes."""
        (found, *_), result = fitted.families, fitted.result
        self.components_ = fitted.components
        self.model_, self.posterior_ = fitted.components[0].model, fitted.components[0].posterior
        self.inducing_cost_, self.jitter_ = fitted.inducing_cost, fitted.jitter
        self.elbo_, self.elbo_bound_, self.kl_ = fitted.elbo
        self.objective_, self.history_, self.n_iter_ = result.objective, result.history, max(1, found.steps)
        self.converged_ = bool(result.converged and found.converged)
        self.status_ = found.status if result.converged else result.status
        self.family_ = found.family
        self.starts_ = [start for family in fitted.families for start in family.starts]
        self.inducing_points_ = self._inducing_points()
        self._largest_sd = fitted.largest_sd

    def _warn(self, searched: bool) -> None:
        if not self.converged_:
            search = "The search stopped early", "Raise max_iter, or tol if the ELBO is good enough."
            posterior = "The solver for the posterior stopped early", "Use more inducing points, or another kernel."
            what, advice = posterior if searched else search
            warnings.warn(f"{what}: {self.status_}. {advice}", ConvergenceWarning, stacklevel=users_line())
        if self.jitter_ > self.jitter:
            warnings.warn(
                f"The kernel matrix of the inducing points needed a jitter of {self.jitter_:g} instead of "
                f"{self.jitter:g}. This smooths predictions; fewer inducing points need less jitter.",
                JitterWarning,
                stacklevel=users_line(),
            )

    def _inducing_points(self) -> np.ndarray:
        """The inducing points in the units of X."""
        return self._scaler.undo(self.model_.inducing.detach().numpy())

    # -----------------------------------------------------------------------------------------------------------------
    # What was learned

    def _induced(self, source: RowSource, block_rows: int | None = None) -> RowSource:
        """Rows projected on the inducing points of the fitted model."""
        return self._case.induced(source, self.model_, self._scaler, block_rows)

    def _projected(self, source: RowSource) -> RowSource:
        """Rows as predictions take them."""
        return self._case.projected(source, self.components_, self._scaler)

    def _open_rows(self, X: Any, offset: Any) -> RowSource:
        return self._projected(open_rows(self, X, offset, self._row_format(self._case.block_rows)))

    def _open_labelled_rows(self, X: Any, y: Any, *, sample_weight: Any, offset: Any) -> RowSource:
        given = {"sample_weight": sample_weight, "offset": offset, "classes": self.classes_}
        return self._projected(open_labelled_rows(self, X, y, self._row_format(), **given)[1])

    def elbo(self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """The exact ELBO of the given rows under the fitted posterior, at the fitted hyperparameters (`model_`)."""
        check_is_fitted(self, "posterior_")
        twin = copy.copy(self)
        twin.components_ = [Component(1.0, self.family_, self.model_, self.posterior_)]
        twin.posterior_ = twin._predictive
        return super(VariationalGPClassifier, twin).elbo(X, y, sample_weight, offset)

    @property
    def largest_sd_(self) -> float:
        """Largest posterior sd of the log-odds among the training rows; NaN if they are neither here nor recorded."""
        if self._largest_sd is None and self._raw_rows is not None:
            self._largest_sd = largest_sd(self._projected(self._raw_rows), self._predictive)
        return math.nan if self._largest_sd is None else self._largest_sd

    @property
    def _training_rows(self) -> RowSource | None:
        return None if self._raw_rows is None else self._induced(self._raw_rows)

    def _given_or_training_rows(self, X: Any, y: Any, sample_weight: Any, offset: Any) -> RowSource | None:
        if X is None:
            return self._training_rows
        given = {"sample_weight": sample_weight, "offset": offset, "classes": self.classes_}
        return self._induced(self._known_weights(open_labelled_rows(self, X, y, self._row_format(), **given)[1]))

    @property
    def prior_(self) -> Prior | Star:
        """The prior N(0, I) of the whitened inducing values, or q before the last rows if earlier ones are unknown."""
        if self._own_prior is not None:
            return self._own_prior
        zeros = torch.zeros(self.posterior_.mean.shape[-1], dtype=torch.float64)
        return Prior(zeros, torch.ones_like(zeros))

    def _names(self) -> list[str]:
        return [f"w{j}" for j in range(self.posterior_.mean.shape[-1])]

    def _summarise_draws(
        self, X: Any, offset: Any, draws: Tensor, summary: Callable[[Tensor], Tensor]
    ) -> Iterator[Tensor]:
        check_is_fitted(self, "posterior_")
        of_block, numbers_of_a_row = self._case.summaries(draws, summary)
        block_rows = max(1, LATENT_DRAWS // numbers_of_a_row)
        return self._induced(open_rows(self, X, offset, self._row_format(block_rows)), block_rows).map(of_block)

    def _corrected_kind(self) -> type[CorrectedPosterior]:
        return self._case.corrected

    @for_two_classes
    def latent_prior(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Prior mean and covariance of f at the training rows under the fitted kernel, their labels and weights."""
        check_is_fitted(self, "posterior_")
        if self._raw_rows is None:
            raise ValueError("latent_prior needs the training rows; got a model without them. Fit it again.")
        given = Observations.from_arrays(self._raw_rows.in_memory())
        rows = given.standardised(self._scaler, torch.device("cpu"))
        with torch.no_grad():
            mean, K = self.model_.mean(rows.inputs).detach(), covariance(self.model_.kernel, rows.inputs, rows.inputs)
            B = weight_columns(self.model_.mean, rows.inputs)
            K = K + B @ B.T
        mean = mean if rows.offset is None else mean + rows.offset
        return mean.numpy(), K.numpy(), rows.label.numpy(), None if rows.weight is None else rows.weight.numpy()

    def predict_latent(self, X: Any, offset: Any = None, *, return_cov: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and standard deviation of the log-odds f(x), per row; or their mean and covariance.

        Parameters
        ----------
        X : array (n, p)
        offset : array (n,), optional
        return_cov : bool, default False
            Return the n × n covariance of f between the rows of X in place of standard deviations, as scikit-learn's
            `GaussianProcessRegressor` does. It includes what inducing points leave unexplained, and the average over
            hyperparameters; its diagonal is the squared standard deviation. For two classes.
        """
        mean, sd = super().predict_latent(X, offset)
        return (mean, self._latent_covariance(X)) if return_cov else (mean, sd)

    @for_two_classes
    def _latent_covariance(self, X: Any) -> np.ndarray:
        if is_kept_elsewhere(X):
            raise ValueError(f"return_cov needs rows in memory; got {type(X).__name__}. Pass a part of them.")
        inputs = Observations.from_arrays(open_rows(self, X, None, ROW_FORMAT).in_memory()).inputs
        process = self._process()
        with torch.no_grad():
            rows = process.rows(inputs)
            C = process.between(rows, rows)
        C = 0.5 * (C + C.T)
        C.diagonal().copy_(process.variance(rows))
        return C.numpy()

    def _process(self) -> LatentProcess:
        """f at any rows together, differentiable in the rows."""
        return LatentProcess(self.components_, self._scaler)

    @for_two_classes
    def sample(self, X: Any, n: int = 1, random_state: Any = None, offset: Any = None) -> np.ndarray:
        """`n` joint draws of f, the log-odds, at the rows of X: n × rows."""
        check_is_fitted(self, "posterior_")
        n = checks.read_whole(n, "n", 0)
        source: Any = self._induced(open_rows(self, X, offset, ROW_FORMAT).in_memory())
        dimension = len(self._predictive.mean)
        generator = check_random_state(self.random_state if random_state is None else random_state)
        noise = torch.from_numpy(generator.standard_normal((n, dimension + source.rows))).to(source.root)
        # Cov f = AΣAᵀ + (K_xx - AAᵀ)
        with torch.no_grad():
            rows = source.in_memory()
            A, mean = rows.features, rows.offset
            induced = A[:, : len(source.root)]
            rest = covariance(source.model.kernel, source.data.inputs, source.data.inputs) - induced @ induced.T
            if len(self.components_) > 1:
                block, c = Averaged(self.components_, A.device).stretched(source.data)
                A, mean, rest = block.design.matrix, block.offset, c[:, None] * rest * c  # type: ignore[attr-defined]
        if not bool(rest.isfinite().all()):
            raise ValueError("the kernel must be finite at the rows of X; got NaN or infinity. Check their scale.")
        values, vectors = torch.linalg.eigh(rest)
        along = moved(self._predictive, A.device).draw(noise[:, :dimension]) @ A.T
        across = (noise[:, dimension:] * values.clamp(min=0.0).sqrt()) @ vectors.T
        return (mean + along + across).cpu().numpy()

    def _joint(self, points: Callable[[], Any]) -> tuple[OpenRows, Posterior]:
        sample = [open_rows(self, X, None, ROW_FORMAT).in_memory() for X in points()]
        inputs = torch.cat([Observations.from_arrays(rows).inputs for rows in sample])
        device = choose_device(self.device, inputs)
        known = torch.from_numpy(self._scaler.apply(inputs.numpy())).to(device)
        joint = JointFeatures(self.components_, known)

        def opened(X: Any, offset: Any, block_rows: int) -> RowSource:
            rows = Observations.from_arrays(open_rows(self, X, offset, ROW_FORMAT).in_memory())
            return joint.of(rows.standardised(self._scaler, device), block_rows)

        return opened, joint.extended(self._predictive)

    average = for_two_classes(EffectsMixin.average)
    contrast = for_two_classes(EffectsMixin.contrast)
    slopes = for_two_classes(EffectsMixin.slopes)

    def summary(self) -> "pandas.DataFrame":
        """Per column, in the units of X: lengthscale, relevance (1/lengthscale in standard deviations), mean weight.

        Everything else is in ``.attrs``: "output_scale", "slope_scale" (prior standard deviation of the weights of the
        mean), the "intercept" of the mean function, the "priors", all parameters of the "kernel" by name, for
        standardised columns, the weights of the "families" of kernels over which predictions are averaged, the number
        of "inducing_points", and their "inducing_cost": what the ELBO loses because they leave variance unexplained, in
        nats. Hyperparameters are those of the first component, the mode. With more than two classes the weights of the
        mean are by class, `mean_weight (label)`, less their mean over classes.
        """
        check_is_fitted(self, "posterior_")
        labels = [str(label) for label in self.classes_.tolist()]
        table = self._case.table(self.components_[0], self._scaler, labels)
        table.attrs |= {"families": family_weights(self.components_), "inducing_points": len(self.inducing_points_)}
        if self.inducing_cost_ is not None:
            table.attrs["inducing_cost"] = self.inducing_cost_
        return table

    @for_two_classes
    def term_effects(self, X: Any = None, *, points: int = 41, level: float = 0.95) -> list[TermEffect]:
        """What each column, and each pair, adds to the log-odds: for ``kernel="additive"``.

        Mean and interval are exact under the posterior, at the fitted hyperparameters. Effects are averaged over the
        rows of X, by default those of the fit, so that each has average zero along its columns (see `viper.gp.terms`).
        Columns come first, then pairs, the largest effects first. A TermEffect has `columns`, `values` in the
        units of X, `mean`, `sd`, `lower` and `upper`.
        """
        check_is_fitted(self, "posterior_")
        if not is_additive(self.kernel):
            raise ValueError(
                f"term_effects needs kernel='additive'; got {self.kernel!r:.60}. Use viper.plot.partial_effect."
            )
        if X is None and self._raw_rows is None:
            raise ValueError("term_effects needs rows to average over; got a model without its training rows. Pass X.")
        if is_kept_elsewhere(X):
            raise ValueError(
                f"term_effects averages over rows in memory; got {type(X).__name__}. Pass a sample of them."
            )
        known = self._raw_rows if X is None else open_rows(self, X, None, ROW_FORMAT)
        assert known is not None
        few = known if known.rows <= PLACED_ROWS else known.sample(PLACED_ROWS, np.random.default_rng(0))
        rows = Observations.from_arrays(few.in_memory()).inputs.numpy()
        z = half_width(level)
        return effects_of_terms(self.model_, self.posterior_, self._scaler, rows, self._choices.names, int(points), z)

    # -----------------------------------------------------------------------------------------------------------------
    # Storage and scikit-learn

    def _own_state(self) -> State:
        tensors = {f"model.{name}": x for name, x in self.model_.state_dict().items()}
        tensors |= {"centre": torch.from_numpy(self._scaler.centre), "scale": torch.from_numpy(self._scaler.scale)}
        if self._own_prior is not None:
            tensors |= prior_tensors(self._own_prior)
        learns = self.model_.inducing.requires_grad
        metadata = {"learns_inducing": learns, "starts": [list(start) for start in self.starts_]}
        if self.inducing_cost_ is not None:
            metadata["inducing_cost"] = self.inducing_cost_
        if self.family_ != self._choices.only_family():
            metadata["family"] = list(self.family_)
        averaged = component_state(self.components_)
        return State(tensors | averaged.tensors, {**metadata, **averaged.metadata, **self._weighting_state()})

    def _restore_own_state(self, state: State) -> None:
        self._scaler = Scaler(state.tensors["centre"].numpy(), state.tensors["scale"].numpy())
        self._restore_weighting(state.metadata)
        if any(name.startswith("prior.") for name in state.tensors):
            self._own_prior = prior_from(state.tensors)
        self.inducing_cost_ = state.metadata.get("inducing_cost")
        learns = bool(state.metadata.get("learns_inducing", self.learn_inducing))
        choices = self._choices
        self.family_ = Family(*state.metadata.get("family", choices.only_family()))
        self.model_ = read_model(state.part("model"), choices, self.family_, learns, self.jitter_, self.posterior_)
        first = Component(1.0, self.family_, self.model_, self.posterior_)
        sizes = self._class_sizes(len(self.classes_))
        self.components_ = read_components(state, first, choices, self.jitter_, sizes)
        self.inducing_points_ = self._inducing_points()
        self.starts_, self.history_ = [Start(*start) for start in state.metadata["starts"]], []

    @staticmethod
    def _is_checked_later(name: str) -> bool:
        return name.startswith(("model.", "component."))

    @staticmethod
    def _class_sizes(classes: int) -> dict[str, int]:
        return {"k": classes if classes > 2 else -1}  # no tensor has -1 of anything

    @classmethod
    def _sizes(cls, metadata: dict[str, Any]) -> dict[str, int]:
        return super()._sizes(metadata) | cls._class_sizes(len(metadata["classes"]["values"]))

    @classmethod
    def _tensor_rules(cls, names: Collection[str], metadata: dict[str, Any]) -> Mapping[str, Numbers]:
        classes = len(metadata["classes"]["values"])
        if classes < 2 or ("posterior.means" in names) != (classes > 2):
            raise StorageError(f"the posterior must be one of {classes} classes; got another.")
        return cls._own_tensors

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = True
        return tags

    def __getstate__(self) -> dict[str, Any]:
        if hasattr(self, "posterior_"):
            _ = self.largest_sd_  # while the rows are here
        return {name: value for name, value in super().__getstate__().items() if name != "_raw_rows"}

    def to_onnx(self, *_: Any, **__: Any) -> Any:
        """Not available: the graph of a Gaussian process depends on its kernel, which may be any GPyTorch module."""
        raise NotImplementedError(
            "to_onnx exports VariationalLogisticRegression; got a Gaussian process, whose graph depends on its kernel. "
            "Use save and viper.load, or torch.onnx.export on your own module."
        )


def weighted_sample(source: RowSource, size: int, seed: int) -> Arrays:
    """Random rows in memory, each weighted by the number of rows that it stands for."""
    rows = source.sample(size, np.random.default_rng(seed)).in_memory()
    scale = torch.full((rows.rows,), source.rows / rows.rows, dtype=torch.float64)
    weight = scale if rows.weight is None else scale * rows.weight.cpu()
    return replace(rows, weight=checks.read_weights(weight, rows.rows))
