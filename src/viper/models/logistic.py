"""Bayesian logistic regression with the scikit-learn interface."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data import checks
from viper.data.arrays import RowFormat
from viper.data.checkpoint import resumable
from viper.data.open import open_labelled_rows, open_rows
from viper.formula.learn import FormulaMixin, by_formula, formula_template
from viper.inference.newton import Iteration, exact_elbo
from viper.inference.posterior import moved
from viper.inference.problem import Gaussian, Prior
from viper.inference.progress import Callbacks, as_task, tasks_of
from viper.inference.rows import RowSource
from viper.models.diagnosis import DiagnosisMixin, summary_frame, summary_of_draws
from viper.models.fitting import FitOptions, FittedPosterior, fit_posterior
from viper.models.notebook import NotebookMixin
from viper.models.onnx import export_onnx
from viper.models.prediction import PredictionMixin, half_width
from viper.models.prior import best_scales, make_prior, read_mean, read_scale
from viper.models.state import State, StateMixin
from viper.softplus.words import FIT_BOUNDS

if TYPE_CHECKING:
    import pandas

LATENT_DRAWS = 1 << 22  # values of f(x) held at once, over rows and draws (32 MB)


class VariationalLogisticRegression(
    FormulaMixin, NotebookMixin, DiagnosisMixin, StateMixin, PredictionMixin, Callbacks, ClassifierMixin, BaseEstimator
):
    """Bayesian logistic regression by variational inference: a posterior for less than a point estimate costs.

    y_i ~ Bernoulli(s(x_iᵀβ)) with a Gaussian prior on β; the posterior is approximated by the Gaussian q that maximises
    the ELBO, which here is exact (Komodromos, Evangelou & Filippi 2024, in the limit l → ∞).

    Parameters
    ----------
    bound : {"viper", "pg", "mc", "quadrature"}, default "viper"
        Treatment of E[log(1+e^X)]: exact (default), or with `terms` the paper's η_l; Pólya-Gamma; Monte Carlo.
    terms : int, optional
        l of the paper's bound η_l. None is the limit.
    covariance : {"full", "diagonal"}, default "full"
        The variational family: the paper's Q' or its mean-field Q.
    prior_mean : float or array of n_features, default 0
        Prior means of the coefficients; that of the intercept is 0.
    prior_scale : float, array of n_features, covariance matrix, "auto" or "ard", default 1
        Prior standard deviations of the coefficients (or their prior covariance, if a matrix). A scale σ corresponds to
        scikit-learn's C = σ². "auto" chooses one common scale, "ard" one per feature, by maximising the ELBO.
    intercept_scale : float, default 10
        Prior standard deviation of the intercept.
    fit_intercept : bool, default True
        Whether to add a column of ones.
    solver : {"newton", "adam"}, default "newton"
        Natural-gradient Newton steps, or the paper's gradient ascent.
    max_iter : int, optional
        Default 200 for Newton, 10,000 for Adam.
    tol : float, optional
        Newton stops when, at its rate, less than `tol` nats are left to the optimum (default 3e-9, less where the ELBO
        is small, and 1e-12 for bounds other than the exact one); Adam when the relative change of the ELBO is below
        `tol` (default 1e-8).
    learning_rate : float, default 0.05
        Of Adam.
    batch_size : int, optional
        Rows of a step of Adam; all by default.
    samples : int, default 1000
        Random numbers of bound="mc".
    nodes : int, default 64
        Nodes of bound="quadrature".
    device : str or torch.device, optional
        Where to compute; by default the CPU, or where a tensor X lies.
    dtype : {"float64", "float32"}, default "float64"
        Precision of the products with X. float32 halves the work; the posterior moves by about 1e-4 of its widths.
    random_state : int, RandomState or None
        Seeds the choice of rows that large fits look at first, the random numbers of bound="mc", and Adam's start and
        minibatches. None means a fixed seed, so that a fit repeats bit for bit on one machine. `diagnose` and
        `corrected` use this seed if it is an integer, otherwise a fixed one; `sample` and `to_arviz` draw afresh in
        every call if it is None.
    verbose : bool or "auto", default "auto"
        Show progress: always, never, or on a terminal once a fit takes longer than two seconds.

    Attributes
    ----------
    coef_ : array (1, n_features); intercept_ : array (1,)
        Posterior means.
    covariance_ : array
        Posterior covariance of the coefficients, the intercept last.
    posterior_ : the posterior as a value, with `mean`, `variance`, `draw`, ...
    elbo_ : float
        The exact ELBO at the fitted posterior, whatever the bound.
    elbo_bound_ : float
        A certified lower bound of `elbo_`, and so of the log evidence.
    objective_ : float
        What was maximised: the ELBO under the chosen bound.
    history_ : list of Iteration; n_iter_ : int; converged_ : bool; status_ : str; passes_ : float
        The solver's account; `passes_` counts passes over all rows.
    prior_scale_ : array
        The scales used, also when chosen by "auto" or "ard".
    classes_, n_features_in_, feature_names_in_
    formula_ : of a model made by `from_formula`, its Encoding

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

    _kind = "logistic"
    _fit_scalars = ("elbo_", "elbo_bound_", "kl_", "objective_", "n_iter_", "converged_", "status_", "passes_")

    def __init__(
        self,
        *,
        bound: str = "viper",
        terms: int | None = None,
        covariance: str = "full",
        prior_mean: Any = 0.0,
        prior_scale: Any = 1.0,
        intercept_scale: float = 10.0,
        fit_intercept: bool = True,
        solver: str = "newton",
        max_iter: int | None = None,
        tol: float | None = None,
        learning_rate: float = 0.05,
        batch_size: int | None = None,
        samples: int = 1000,
        nodes: int = 64,
        device: Any = None,
        dtype: str = "float64",
        random_state: Any = None,
        verbose: Any = "auto",
    ) -> None:
        self.bound = bound
        self.terms = terms
        self.covariance = covariance
        self.prior_mean = prior_mean
        self.prior_scale = prior_scale
        self.intercept_scale = intercept_scale
        self.fit_intercept = fit_intercept
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.samples = samples
        self.nodes = nodes
        self.device = device
        self.dtype = dtype
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
            The last three may be larger than memory. Files and blocks bring labels and weights with them.
        y : array of two labels (n,)
        sample_weight : array (n,), optional
            A weight of k counts a row k times; m successes in n trials are two rows with weights m and n - m.
        offset : array (n,), optional
            Known part of the log-odds of each row.
        checkpoint : path, optional
            A folder in which every completed pass is kept until the fit is complete. If it is interrupted, the same
            call goes on from there.
        """
        self._check_options()
        self.classes_, source = open_labelled_rows(
            self, X, y, self._row_format(), sample_weight=sample_weight, offset=offset, reset=True
        )
        with resumable(self, source, checkpoint, checks.seed_of(self.random_state)) as (passes, seed):
            if isinstance(self.prior_scale, str):
                # the same random numbers for every scale
                solve = lambda scale, start: self._fit(passes, self._prior(scale), seed, start)  # noqa: E731
                scale, fit = best_scales(solve, self.n_features_in_, self.prior_scale == "ard")
            else:
                scale = read_scale(self.prior_scale, "prior_scale", self.n_features_in_)
                fit = self._fit(passes, self._prior(scale), seed)
            self.prior_scale_ = scale.numpy()
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
        """Update the posterior with new rows: yesterday's posterior is today's prior.

        Parameters
        ----------
        X, y, sample_weight, offset : as in `fit`
        classes : array of the two labels
            Needed in the first call if its rows do not show both.
        forget : float in (0, 1], default 1
            Multiplies the precision of what was known before; below 1, old rows fade.
        """
        if not 0.0 < forget <= 1.0:
            raise ValueError(f"forget must lie in (0, 1]; got {forget!r}. 1 forgets nothing.")
        first = not hasattr(self, "posterior_")
        if first:
            if formula_template(self) is not None:
                raise ValueError("partial_fit needs what a formula learns; got a model without. Call fit first.")
            self._check_options()
        known = classes if first else self.classes_
        given = {"sample_weight": sample_weight, "offset": offset, "reset": first, "classes": known}
        self.classes_, source = open_labelled_rows(self, X, y, self._row_format(), **given)
        if first:
            if isinstance(self.prior_scale, str):
                raise ValueError(
                    f"partial_fit needs numbers for prior_scale; got {self.prior_scale!r}. Call fit first."
                )
            scale = read_scale(self.prior_scale, "prior_scale", self.n_features_in_)
            self.prior_scale_ = scale.numpy()
        prior = self._prior(scale) if first else self.posterior_.as_prior(forget)
        return self._keep(source, self._fit(source, prior, checks.seed_of(self.random_state)))

    def _check_options(self) -> None:
        checks.check_word(self.bound, "bound", FIT_BOUNDS)
        checks.check_word(self.covariance, "covariance", ("full", "diagonal"))
        checks.check_word(self.solver, "solver", ("newton", "adam"))
        checks.check_word(self.dtype, "dtype", ("float64", "float32"))
        if isinstance(self.prior_scale, str):
            checks.check_word(self.prior_scale, "prior_scale", ("auto", "ard"))
        checks.check_word(self.verbose, "verbose", ("auto", True, False))
        for name in ("max_iter", "tol", "learning_rate", "batch_size"):
            if (value := getattr(self, name)) is not None:
                checks.check_positive(value, name, integer=name in ("max_iter", "batch_size"))

    def _row_format(self, block_rows: int | None = None) -> RowFormat:
        return RowFormat(bool(self.fit_intercept), self.device, self.dtype, self.verbose, True, block_rows)

    def _prior(self, scale: Tensor) -> Prior:
        mean = read_mean(self.prior_mean, self.n_features_in_)
        own = read_scale(self.intercept_scale, "intercept_scale", 1) if self.fit_intercept else None
        return make_prior(mean, scale, own)

    def _fit(self, source: RowSource, prior: Prior, seed: int, start: Gaussian | None = None) -> FittedPosterior:
        return fit_posterior(source, prior, self._options(), seed, start)

    def _options(self) -> FitOptions:
        chosen = {field.name: getattr(self, field.name) for field in fields(FitOptions) if field.name != "tasks"}
        return FitOptions(**chosen, tasks=tasks_of(self))

    def _keep(self, source: RowSource, fit: FittedPosterior) -> "VariationalLogisticRegression":
        """Set the fitted attributes."""
        self.posterior_, self.prior_ = moved(fit.posterior, "cpu"), moved(fit.prior, "cpu")
        self._set_means()
        self.elbo_, self.elbo_bound_, self.kl_ = exact_elbo(fit.problem, fit.result)
        self.objective_ = fit.result.objective
        self.history_, self.n_iter_ = fit.result.history, max(1, fit.result.iterations)
        self.converged_, self.status_, self.passes_ = fit.result.converged, fit.result.status, fit.result.passes
        self._training_rows = source
        return self

    def _set_means(self) -> None:
        mean = self.posterior_.mean.numpy()
        self.coef_ = mean[None, : self.n_features_in_].copy()
        self.intercept_ = mean[self.n_features_in_ :].copy() if self.fit_intercept else np.zeros(1)

    # -----------------------------------------------------------------------------------------------------------------
    # What was learned

    @property
    def covariance_(self) -> np.ndarray:
        check_is_fitted(self, "posterior_")
        return self.posterior_.covariance().numpy()

    def _names(self) -> list[str]:
        names = getattr(self, "feature_names_in_", [f"x{j}" for j in range(self.n_features_in_)])
        return [*map(str, names), *(["intercept"] if self.fit_intercept else [])]

    def coefficient_interval(self, level: float = 0.95) -> np.ndarray:
        """Credible intervals of the coefficients (intercept last), d × 2."""
        check_is_fitted(self, "posterior_")
        reach = half_width(level) * self.posterior_.variance.sqrt()
        return torch.stack([self.posterior_.mean - reach, self.posterior_.mean + reach], 1).numpy()

    def summary(self, level: float = 0.95) -> "pandas.DataFrame":
        """Mean, sd, interval, odds ratio with interval and probability of direction of every coefficient."""
        check_is_fitted(self, "posterior_")
        mean, sd = self.posterior_.mean, self.posterior_.variance.sqrt()
        low, high = torch.from_numpy(self.coefficient_interval(level)).T
        return summary_frame(self._names(), mean, sd, low, high, torch.special.ndtr(mean / sd), level)

    def sample(self, n: int = 1, random_state: Any = None) -> np.ndarray:
        """`n` draws of the coefficients (intercept last) from the posterior, n × d.

        `random_state` is by default that of the estimator; if that is None too, every call draws afresh.
        """
        check_is_fitted(self, "posterior_")
        generator = check_random_state(self.random_state if random_state is None else random_state)
        noise = torch.from_numpy(generator.standard_normal((n, len(self.posterior_.mean))))
        return self.posterior_.draw(noise).numpy()

    def _open_labelled_rows(self, X: Any, y: Any, *, sample_weight: Any, offset: Any) -> RowSource:
        given = {"sample_weight": sample_weight, "offset": offset, "classes": self.classes_}
        return open_labelled_rows(self, X, y, self._row_format(), **given)[1]

    def _open_rows(self, X: Any, offset: Any) -> RowSource:
        return open_rows(self, X, offset, self._row_format())

    def _summarise_draws(
        self, X: Any, offset: Any, draws: Tensor, summary: Callable[[Tensor], Tensor]
    ) -> Iterator[Tensor]:
        check_is_fitted(self, "posterior_")
        rows = open_rows(self, X, offset, self._row_format(block_rows=max(1, LATENT_DRAWS // len(draws))))
        return rows.map(partial(summary_of_draws, draws=draws, summary=summary))

    # -----------------------------------------------------------------------------------------------------------------
    # Storage and scikit-learn

    def _own_state(self) -> State:
        tensors = {
            "prior.mean": self.prior_.mean,
            "prior.precision": self.prior_.precision,
            "prior_scale": torch.from_numpy(self.prior_scale_),
            "history": torch.tensor(self.history_, dtype=torch.float64),
        }
        return State(tensors, {"posterior": type(self.posterior_).__name__})

    def _restore_own_state(self, state: State) -> None:
        tensors = state.tensors
        self.prior_ = Prior(tensors["prior.mean"], tensors["prior.precision"])
        self.prior_scale_ = tensors["prior_scale"].numpy()
        self.history_ = [Iteration(int(row[0]), bool(row[1]), *row[2:]) for row in tensors["history"].tolist()]
        self._set_means()

    def to_onnx(
        self, path: str | PathLike[str] | None = None, *, dtype: str = "float32", overwrite: bool = False
    ) -> Any:
        """`predict` and `predict_proba` as an ONNX model with input "X" and outputs "label" and "probabilities".

        Parameters
        ----------
        path : str or Path, optional
            Where to write it.
        dtype : {"float32", "float64"}, default "float32"
            Of the input and the probabilities; inside, all is float64. There is no offset.
        overwrite : bool, default False

        Returns
        -------
        onnx.ModelProto
        """
        check_is_fitted(self, "posterior_")
        return export_onnx(self, path, dtype, overwrite)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_training_rows"}
