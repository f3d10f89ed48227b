"""Gaussian-process classification with the scikit-learn interface."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data import checks
from viper.data.open import Form, kept_elsewhere, labelled, unlabelled
from viper.errors import ConvergenceWarning, JitterWarning, StorageError, users_line
from viper.formula.learn import FormulaMixin, by_formula
from viper.gp import mean_uncertainty, state, stream
from viper.gp.kernels import check_shapes, covariance, make_kernel, make_mean
from viper.gp.model import Features, Rows, Scaler, SparseGP, dense, k_means, merge, random_rows, read_inducing
from viper.gp.profile import Profile, identity_prior
from viper.gp.search import Found, Search, Start
from viper.inference.device import choose_device
from viper.inference.newton import Result, exact_elbo, newton
from viper.inference.posterior import Diagonal, Full, latent, moved
from viper.inference.problem import Problem
from viper.inference.progress import Callbacks, Progress, as_task, tasks_of
from viper.inference.rows import Source
from viper.inference.threads import one_thread
from viper.models.fitting import without_cusp
from viper.models.notebook import NotebookMixin
from viper.models.prediction import PredictionMixin
from viper.models.state import State, StateMixin
from viper.softplus.bounds import build_bound
from viper.softplus.limit import mixture
from viper.softplus.mixture_table import MIXTURES
from viper.softplus.pointwise import Bound
from viper.softplus.words import FIT_BOUNDS

if TYPE_CHECKING:
    import pandas

DEFAULT_STEPS = {"profile": 300, "natural-adam": 1500}
SEARCH_ERROR = 1e-6  # per row, of the objective by which hyperparameters are searched
FORM = Form()  # of rows that are not in memory
TOLERANCE = 1e-12  # nats, of q at the chosen hyperparameters


class VariationalGPClassifier(
    FormulaMixin, NotebookMixin, StateMixin, PredictionMixin, Callbacks, ClassifierMixin, BaseEstimator
):
    """Gaussian-process classification by variational inference, with inducing points and the exact ELBO.

    y_i ~ Bernoulli(s(f(x_i))), f a Gaussian process. The posterior of f at the inducing points is the Gaussian q that
    maximises the ELBO, found by the same solver as logistic regression; kernel, mean function and inducing points
    maximise the ELBO that is left when q is at its best (the profile).

    Parameters
    ----------
    kernel : {"rbf", "matern32", "matern52", "linear"} or gpytorch.kernels.Kernel, default "rbf"
        The words have one lengthscale (for "linear", one variance) per column. A kernel object is copied; its
        constraints, priors and fixed parameters (``requires_grad_(False)``) are respected. It sees the columns
        standardised.
    mean : {"linear", "constant", "zero"} or gpytorch.means.Mean, default "linear"
        Its weights are point estimates, so what it explains has no interval: where a linear mean explains most of the
        data (a NarrowIntervalsWarning says so), "constant" gives the honest intervals.
    n_inducing : int, default 50
        From the number of distinct rows on, the inducing points are the rows: the full variational Gaussian process.
    inducing : {"greedy", "kmeans", "subset"} or array (M, n_features), default "greedy"
        Where the inducing points begin: rows of largest unexplained variance, centres of clusters, random rows, or
        as given.
    learn_inducing : bool, default True
    covariance : {"full", "diagonal"}, default "full"
        Of q at the (whitened) inducing values.
    bound : {"viper", "pg", "mc", "quadrature"}, default "viper"
        Treatment of E[log(1+e^f)]: exact (default), or with `terms` the paper's η_l; Pólya-Gamma; Monte Carlo.
    terms, samples, nodes : int, optional
        Of the bounds "viper", "mc" and "quadrature".
    standardize : bool, default True
        Centre and scale the columns; undone in `summary` and `inducing_points_`.
    n_starts : int, default 5
        How many beginnings are tried; their fates are in `starts_`.
    solver : {"profile", "natural-adam"}, default "profile"
        L-BFGS on the profile, or the paper's recipe (natural gradients for q, Adam for the rest).
    max_iter : int, optional
        Steps of L-BFGS (default 300), or passes over the rows of "natural-adam" (default 1500).
    tol : float, default 2e-3
        Gain of the ELBO in nats (from 10,000 rows on, in nats for as many rows) below which L-BFGS stops, or over 20
        passes of "natural-adam".
    learning_rate : float, default 0.05
        Of "natural-adam".
    batch_size : int, optional
        Rows of a step of "natural-adam"; all by default.
    jitter : float, default 1e-8
        Added to the kernel matrix of the inducing points, relative to its mean variance. Where that is not enough it is
        raised tenfold until it is, at most to 0.01; `jitter_` says what was used, and a JitterWarning that it was
        raised.
    warm_start : bool, default False
        Whether `fit` begins where the last one ended, if that had as many columns.
    random_state : int, RandomState or None
        Seeds clusters, random rows and Monte Carlo. None means a fixed seed, so that a fit can be repeated; `sample`
        draws afresh in every call if it is None.
    device : str or torch.device, optional
        Where to compute; by default the CPU, or where a tensor X lies. What is fitted lies on the CPU.
    verbose : bool or "auto", default "auto"

    Attributes
    ----------
    posterior_ : q of the whitened inducing values, with `mean`, `variance`, `draw`, ...
    model_ : kernel, mean and inducing points on standardised columns, as one torch module
    inducing_points_ : array (M, n_features), in the units of X
    elbo_ : float
        The exact ELBO at the fitted q, whatever the bound.
    elbo_bound_ : float
        A certified lower bound of `elbo_`, given kernel, mean and inducing points.
    objective_ : float
        The ELBO under the chosen bound, without the log prior of hyperparameters.
    starts_ : list of Start
        Name, objective reached, evaluations and seconds of every start; those overtaken by others stopped early.
    jitter_ : float
    history_ : list of Iteration; n_iter_ : int; converged_ : bool; status_ : str
    classes_, n_features_in_, feature_names_in_
    formula_ : of a model made by `from_formula`, its Encoding

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
    _fit_scalars = ("elbo_", "elbo_bound_", "objective_", "kl_", "jitter_", "n_iter_", "converged_", "status_")
    _objects = ("kernel", "mean")

    def __init__(
        self,
        *,
        kernel: Any = "rbf",
        mean: Any = "linear",
        n_inducing: int = 50,
        inducing: Any = "greedy",
        learn_inducing: bool = True,
        covariance: str = "full",
        bound: str = "viper",
        terms: int | None = None,
        samples: int = 1000,
        nodes: int = 64,
        standardize: bool = True,
        n_starts: int = 5,
        solver: str = "profile",
        max_iter: int | None = None,
        tol: float = 2e-3,
        learning_rate: float = 0.05,
        batch_size: int | None = None,
        jitter: float = 1e-8,
        warm_start: bool = False,
        random_state: Any = None,
        device: Any = None,
        verbose: Any = "auto",
    ) -> None:
        self.kernel = kernel
        self.mean = mean
        self.n_inducing = n_inducing
        self.inducing = inducing
        self.learn_inducing = learn_inducing
        self.covariance = covariance
        self.bound = bound
        self.terms = terms
        self.samples = samples
        self.nodes = nodes
        self.standardize = standardize
        self.n_starts = n_starts
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.jitter = jitter
        self.warm_start = warm_start
        self.random_state = random_state
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
            Of the last three, which may be larger than memory, 40,000 random rows choose kernel, mean function and
            inducing points, and all rows the posterior.
        y : array of two labels (n,)
        sample_weight : array (n,), optional
            A weight of k counts a row k times.
        offset : array (n,), optional
            Known part of the log-odds of each row.
        checkpoint : path, optional
            A folder in which every completed pass over rows that are not in memory is kept until the fit is complete.
            If it is interrupted, the same call searches again and goes on from there.
        """
        self._check_options()
        if kept_elsewhere(X):
            self.classes_, source = labelled(self, X, y, sample_weight, offset, FORM, reset=True)
            return stream.fit(self, source, self._bound, checkpoint)
        before = getattr(self, "model_", None) if self.warm_start else None
        X = checks.read_features(self, X, reset=True)
        device, X = choose_device(self.device, X), dense(X)
        self.classes_, label = checks.read_labels(y, len(X))
        weight = checks.read_weights(sample_weight, len(X))
        X, label, offset, weight = merge(X, label.cpu(), checks.read_vector(offset, "offset", len(X)), weight)
        if before is not None and before.inducing.shape[1] != X.shape[1]:
            before = None
        if before is None:
            self._scaler = Scaler.fit(X, weight, self.standardize)
        rows = self._rows(X, label, offset, weight, device)
        random = checks.random_of_fit(self.random_state)
        exact, fast = self._bound(int(random.randint(2**31)))
        generator = np.random.default_rng(random.randint(2**31))
        steps = int(self.max_iter or DEFAULT_STEPS[self.solver])
        progress = Progress(self.verbose, tasks_of(self), len(rows))
        search = Search(rows, fast, self.covariance == "diagonal", steps, float(self.tol), generator, progress)
        with closing(progress), one_thread():
            found = self._search(search, before)
            narrow = self._keep(found, rows, exact, fast, progress)
        self._warn()
        mean_uncertainty.warn(narrow)
        return self

    def _check_options(self) -> None:
        checks.check_word(self.bound, "bound", FIT_BOUNDS)
        checks.check_word(self.covariance, "covariance", ("full", "diagonal"))
        checks.check_word(self.solver, "solver", tuple(DEFAULT_STEPS))
        checks.check_word(self.verbose, "verbose", ("auto", True, False))
        if isinstance(self.inducing, str):
            checks.check_word(self.inducing, "inducing", ("greedy", "kmeans", "subset"))
        for name in ("n_inducing", "n_starts", "max_iter", "tol", "learning_rate", "batch_size"):
            if (value := getattr(self, name)) is not None:
                checks.check_positive(value, name, whole=name not in ("tol", "learning_rate"))
        if not 0.0 <= self.jitter <= 1e-2:
            raise ValueError(f"jitter must lie in [0, 0.01]; got {self.jitter!r}. It is relative to the mean variance.")

    def _rows(
        self, X: np.ndarray, label: Tensor, offset: Tensor | None, weight: Tensor | None, device: torch.device
    ) -> Rows:
        inputs = torch.from_numpy(self._scaler.apply(X)).to(device)
        there = lambda x: None if x is None else x.to(inputs)  # noqa: E731
        return Rows(inputs, label.to(inputs), there(offset), there(weight))

    def _bound(self, seed: int) -> tuple[Bound, Bound]:
        """What is maximised, and its fast version for the search."""
        chosen = build_bound(self.bound, self.terms, self.samples, self.nodes, seed, None)
        if self.bound != "viper" or self.terms is not None:
            chosen = without_cusp(chosen)
            return chosen, chosen
        return chosen, mixture(next(table for table in MIXTURES if table.error <= SEARCH_ERROR))

    def _search(self, search: Search, before: SparseGP | None) -> Found:
        rows = search.rows
        if before is None:
            kernel, mean = make_kernel(self.kernel, rows.inputs.shape[1]), make_mean(self.mean, rows.inputs.shape[1])
            points, learn = self._inducing(rows, search.generator)
            model = SparseGP(kernel, mean, points, learn, float(self.jitter)).to(rows.inputs)
            check_shapes(model.kernel, model.mean, rows.inputs[:2])
        else:
            model = copy.deepcopy(before).to(rows.inputs)
        if self.solver == "natural-adam":
            return search.natural_adam(model, float(self.learning_rate), self.batch_size)
        greedily = before is None and isinstance(self.inducing, str) and self.inducing == "greedy"
        return search.profile(model, 1 if before is not None else int(self.n_starts), greedily)

    def _inducing(self, rows: Rows, generator: np.random.Generator) -> tuple[Tensor, bool]:
        """Where the inducing points begin, and whether they are learned."""
        if not isinstance(self.inducing, str):
            points = self._scaler.apply(read_inducing(self.inducing, rows.inputs.shape[1]))
            return torch.from_numpy(points).to(rows.inputs), bool(self.learn_inducing)
        if self.n_inducing >= len(rows):
            return torch.unique(rows.inputs, dim=0), False
        begin = random_rows if self.inducing == "subset" else k_means
        return begin(rows, int(self.n_inducing), int(generator.integers(2**31))), bool(self.learn_inducing)

    def _keep(self, found: Found, rows: Rows, exact: Bound, fast: Bound, progress: Progress) -> float:
        """Find q at the chosen θ to full precision (unless Adam chose both) and set the fitted attributes.

        Returned is by how much intervals are too narrow.
        """
        diagonal = self.covariance == "diagonal"
        with torch.no_grad():
            source = Features(found.model, rows)
        problem = Problem(source, identity_prior(source), exact, diagonal=diagonal)
        if found.q is None:
            profile = Profile(found.model, rows, fast, diagonal, tol=1e-8, sites=found.sites)
            result = newton(problem, profile.solve(source), tol=TOLERANCE, report=progress)
        else:
            value, total = problem.evaluate(found.q, found.q.factor, gram=False)
            status = "converged" if found.converged else f"not converged in {found.steps} passes"
            result = Result(found.q, found.q.factor, value, found.converged, status, magnitude=total.magnitude)
        posterior = (Diagonal if diagonal else Full)(result.q.mean, result.factor)
        self.posterior_ = moved(posterior, "cpu")
        self.elbo_, self.elbo_bound_, self.kl_ = exact_elbo(problem, result)
        self.objective_, self.history_, self.n_iter_ = result.objective, result.history, max(1, found.steps)
        self.converged_ = bool(result.converged and found.converged)
        stopped = f"not converged in {found.steps} steps for hyperparameters" if result.converged else result.status
        self.status_ = "converged" if self.converged_ else stopped
        self.starts_, self.jitter_, self.inducing_points_ = (
            found.starts,
            source.jitter,
            self._undo(found.model.inducing),
        )
        narrow = mean_uncertainty.too_narrow(found.model.mean, source, posterior, rows.inputs)
        self.model_ = found.model.cpu()  # last: the source above looks through it
        return narrow

    def _warn(self) -> None:
        if not self.converged_:
            text = f"The search stopped early: {self.status_}. Raise max_iter, or tol if the ELBO is good enough."
            warnings.warn(text, ConvergenceWarning, stacklevel=users_line())
        if self.jitter_ > self.jitter:
            warnings.warn(
                f"The kernel matrix of the inducing points needed a jitter of {self.jitter_:g} instead of "
                f"{self.jitter:g}. Predictions are smoother by as much; fewer inducing points need less.",
                JitterWarning,
                stacklevel=users_line(),
            )

    def _undo(self, points: Tensor) -> np.ndarray:
        return points.detach().cpu().numpy() * self._scaler.scale + self._scaler.centre

    # -----------------------------------------------------------------------------------------------------------------
    # What was learned

    def _features(self, X: Any, y: Any = None, weight: Any = None, offset: Any = None) -> Features:
        X = checks.read_features(self, X, reset=False)
        device, X = choose_device(self.device, X), dense(X)
        known = torch.zeros(len(X), dtype=torch.bool)
        label = known if y is None else checks.read_labels(y, len(X), self.classes_)[1]
        given = checks.read_vector(offset, "offset", len(X))
        rows = self._rows(X, label, given, checks.read_weights(weight, len(X)), device)
        model = self.model_ if device.type == "cpu" else copy.deepcopy(self.model_).to(device)
        with torch.no_grad():
            return Features(model, rows)

    def _seen(self, source: Source) -> stream.Seen:
        """Rows that are kept elsewhere, through the inducing points."""
        return stream.Seen(source, stream.Look(self.model_, self._scaler))

    def _latent_blocks(self, X: Any, offset: Any) -> Iterator[tuple[Tensor, Tensor]]:
        check_is_fitted(self, "posterior_")
        elsewhere = kept_elsewhere(X)
        rows = self._seen(unlabelled(self, X, offset, FORM)) if elsewhere else self._features(X, offset=offset)
        posterior = moved(self.posterior_, rows.device)
        return (latent(block, posterior) for block in rows.blocks())

    def _labelled(self, X: Any, y: Any, sample_weight: Any, offset: Any) -> Source:
        if not kept_elsewhere(X):
            return self._features(X, y, sample_weight, offset)
        return self._seen(labelled(self, X, y, sample_weight, offset, FORM, classes=self.classes_)[1])

    def sample(self, X: Any, n: int = 1, random_state: Any = None, offset: Any = None) -> np.ndarray:
        """`n` joint draws of f, the log-odds, at the rows of X: n × rows."""
        check_is_fitted(self, "posterior_")
        source = self._features(X, offset=offset)
        generator = check_random_state(self.random_state if random_state is None else random_state)
        noise = torch.from_numpy(generator.standard_normal((n, source.dimension + source.rows))).to(source.root)
        # Cov f = AΣAᵀ + (K_xx - AAᵀ)
        with torch.no_grad():
            A, mean = source.whole()
            rest = covariance(source.model.kernel, source.data.inputs, source.data.inputs) - A @ A.T
        values, vectors = torch.linalg.eigh(rest)
        along = moved(self.posterior_, A.device).draw(noise[:, : source.dimension]) @ A.T
        across = (noise[:, source.dimension :] * values.clamp(min=0.0).sqrt()) @ vectors.T
        return (mean + along + across).cpu().numpy()

    def summary(self) -> "pandas.DataFrame":
        """Per column, in the units of X: lengthscale, relevance (1/lengthscale in standard deviations), mean weight.

        What belongs to no column is in ``.attrs``: "output_scale", "intercept" of the mean function, and all parameters
        of the "kernel" by name, for standardised columns.
        """
        check_is_fitted(self, "posterior_")
        names = getattr(self, "feature_names_in_", [f"x{j}" for j in range(self.n_features_in_)])
        return state.describe(self.model_, self._scaler, [str(name) for name in names])

    @property
    def diagnose(self) -> Any:
        """Not offered: importance weights would be those of q given kernel, mean and inducing points."""
        raise AttributeError(
            "diagnose is of VariationalLogisticRegression; got a Gaussian process, whose kernel and mean are point "
            "estimates. See starts_, elbo_bound_ and scores on held-out rows."
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Storage and scikit-learn

    def _own_state(self) -> State:
        tensors = {f"model.{name}": x for name, x in self.model_.state_dict().items()}
        tensors |= {"centre": torch.from_numpy(self._scaler.centre), "scale": torch.from_numpy(self._scaler.scale)}
        learns = self.model_.inducing.requires_grad
        return State(tensors, {"learns_inducing": learns, "starts": [list(start) for start in self.starts_]})

    def _restore_own_state(self, state: State) -> None:
        self._scaler = Scaler(state.tensors["centre"].numpy(), state.tensors["scale"].numpy())
        learns = bool(state.metadata.get("learns_inducing", self.learn_inducing))
        self.model_ = self._stored_model(state.part("model"), learns)
        self.inducing_points_ = self._undo(self.model_.inducing)
        self.starts_, self.history_ = [Start(*start) for start in state.metadata["starts"]], []

    def _stored_model(self, parameters: dict[str, Tensor], learn_inducing: bool) -> SparseGP:
        """Kernel, mean and inducing points with stored parameters; a warm start learns those that were learned."""
        columns, points = self.n_features_in_, torch.zeros_like(parameters["inducing"])
        kernel, mean = make_kernel(self.kernel, columns), make_mean(self.mean, columns)
        model = SparseGP(kernel, mean, points, learn_inducing, self.jitter_)
        try:
            model.load_state_dict(parameters)
        except RuntimeError as error:
            raise StorageError(f"kernel and mean must be those of the saved model; got {error}.") from None
        return model

    def to_onnx(self, *_: Any, **__: Any) -> Any:
        """Not offered: the graph of a Gaussian process depends on its kernel, which may be any GPyTorch module."""
        raise NotImplementedError(
            "to_onnx exports VariationalLogisticRegression; got a Gaussian process, whose graph depends on its kernel. "
            "Use save and viper.load, or torch.onnx.export on your own module."
        )
