"""Utilities of items from answers to "this one or that one", with the scikit-learn interface."""

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data import checks
from viper.data.model_file import write_tensors
from viper.data.schema import NUMBER, TEXT, WHOLE, Fields, Items, Layout, Numbers, Value, or_none
from viper.errors import StorageError, shown
from viper.gp.average import Component, family_weights
from viper.gp.fitting.choices import AUTO, STATIONARY
from viper.gp.joint import LatentProcess, LatentRows
from viper.gp.kernels import PairMean
from viper.gp.pairs.answers import FITS, Answers, read_answers
from viper.gp.pairs.process import PairProcess, PairRows
from viper.gp.summary import kernel_parameters, kernel_scales, priors_in_words
from viper.inference.importance import Diagnosis
from viper.models.saving import State, as_storage_error
from viper.softplus.information import answer_information
from viper.softplus.normal import difference

if TYPE_CHECKING:
    import pandas

PREFERENCE = "preference"
PAIR_MEANS = ("linear", "zero")
PREFERENCE_FIELDS = Fields(
    {
        "process": Value("the metadata of a Gaussian process", lambda x: type(x) is dict),
        "names": or_none(Items(TEXT)),
        "constant": NUMBER,
        "items": WHOLE,
        "pairs": WHOLE,
    }
)


class ItemRows(NamedTuple):
    """Items as inputs of each component, the mean of f, and its differences between components."""

    parts: list[LatentRows]
    mean: Tensor
    between: Tensor  # D with D Dᵀ the covariance of the components' means


class ItemProcess:
    """Joint mean and covariance of f at items, averaged over hyperparameters and differentiable in the items."""

    def __init__(self, process: PairProcess) -> None:
        components: list[Component] = process.components_
        self.weights = torch.tensor([one.weight for one in components], dtype=torch.float64)
        self.parts = [LatentProcess([one._replace(weight=1.0)], process.item_scaler) for one in components]

    def rows(self, X: Tensor) -> ItemRows:
        """Items n × p."""
        found = [part.rows(X) for part in self.parts]
        thetas = torch.stack([one.mean for one in found])
        mean = self.weights @ thetas
        return ItemRows(found, mean, ((thetas - mean) * self.weights.sqrt()[:, None]).T)

    def between(self, u: ItemRows, v: ItemRows) -> Tensor:
        """Covariances between two sets of items: n × m."""
        inside = torch.stack([part.between(a, b) for part, a, b in zip(self.parts, u.parts, v.parts, strict=True)])
        return torch.einsum("k,kij->ij", self.weights, inside) + u.between @ v.between.T

    def among(self, rows: ItemRows, q: int) -> Tensor:
        """Covariances within each run of q consecutive items: n/q × q × q."""
        inside = torch.stack([part.among(a, q) for part, a in zip(self.parts, rows.parts, strict=True)])
        D = rows.between.reshape(-1, q, len(self.parts))
        return torch.einsum("k,kbij->bij", self.weights, inside) + D @ D.mT


class VariationalPreferenceGP(BaseEstimator):
    """A Gaussian process of utilities, learned from which item of a pair was preferred.

    P(x is preferred to x') = s(f(x) - f(x')), where f is a Gaussian process. The posterior maximises the exact ELBO:
    differences of f are the log-odds of `VariationalGPClassifier`, with its priors, search and average over
    hyperparameters. With ties, P(tie) = s(t - d) s(t + d) (1 - e^{-2t}) for the difference d and a threshold t that is
    learned. Choices among several follow the softmax of f, approximated by weighted pairs. Utilities are in log-odds.
    Answers identify only their differences: f has the prior mean 0.

    Parameters
    ----------
    kernel : {"rbf", "matern32", "matern52", "auto", "linear"} or gpytorch.kernels.Kernel, default "rbf"
    mean : {"linear", "zero"}, default "linear"
        Whether a linear function of the columns is added, whose weights have a posterior.
    priors, lengthscales, hyperparameters, n_inducing, standardize, n_starts
        As for `VariationalGPClassifier`. Inducing values are differences of f, chosen among the pairs.
    max_iter, tol, random_state, n_jobs, verbose
        As for `VariationalGPClassifier`.

    Attributes
    ----------
    process_ : the fitted Gaussian process of differences, whose rows are pairs
    elbo_ : float
        The exact ELBO; with choices among several, that of the weighted pairs.
    threshold_ : float or None
        t of ties, in log-odds; None without ties.
    outcomes_ : tuple of str
        What the columns of `predict_proba` stand for.
    n_features_in_, feature_names_in_
    n_items_, n_pairs_ : int
        Numbers of compared items and of pairs.

    Examples
    --------
    >>> import numpy as np
    >>> import viper
    >>> X = np.linspace(0.0, 1.0, 6)[:, None]
    >>> pairs = [[3, 0], [3, 5], [2, 1], [3, 4], [2, 0], [2, 5], [4, 5], [1, 0]]  # the first of each was preferred
    >>> model = viper.VariationalPreferenceGP(random_state=0).fit(X, pairs)
    >>> model.predict_proba([[0.5]], [[0.0]]).round(1)
    array([[0.9, 0.1]])
    """

    def __init__(
        self,
        kernel: Any = "rbf",
        *,
        mean: str = "linear",
        priors: str | None = "default",
        lengthscales: str = "auto",
        hyperparameters: str = "average",
        n_inducing: Any = "auto",
        standardize: bool = True,
        n_starts: int = 5,
        max_iter: int | None = None,
        tol: float = 2e-3,
        random_state: Any = None,
        n_jobs: int | None = None,
        verbose: Any = "auto",
    ) -> None:
        self.kernel = kernel
        self.mean = mean
        self.priors = priors
        self.lengthscales = lengthscales
        self.hyperparameters = hyperparameters
        self.n_inducing = n_inducing
        self.standardize = standardize
        self.n_starts = n_starts
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.verbose = verbose

    # -----------------------------------------------------------------------------------------------------------------
    # Fitting

    def fit(self, X: Any, pairs: Any, ties: Any = None, sample_weight: Any = None) -> "VariationalPreferenceGP":
        """Fit utilities to answers.

        Parameters
        ----------
        X : array or DataFrame (n, p)
            Items.
        pairs : array of int (m, 2), or (m, k), or list of lists
            For each answer, the row number of the preferred item, then that of the other item, or those of all others
            for a choice among k.
        ties : array of bool (m,), optional
            Which answers are ties; the order of their items does not matter. If given, even as all False, the model has
            a threshold for ties.
        sample_weight : array (m,), optional
            A weight of k counts an answer k times.
        """
        self._check_options()
        items = dense(checks.read_features(self, X, reset=True))
        answers = read_answers(pairs, len(items))
        first, second = answers.pairs.T
        same = (items[first] == items[second]).all(1)
        if same.any():
            k = int(same.argmax())
            raise ValueError(
                f"the items of a pair must differ; got equal rows {first[k]} and {second[k]} of X in pair "
                f"{answers.per_pair(np.arange(len(answers.sizes)))[k]}. Leave the pair out: it says nothing about "
                "utilities."
            )
        tied = None if ties is None else read_ties(ties, answers)
        self._fit_answers(items, answers, tied, checks.read_weights(sample_weight, len(answers.sizes)))
        self.n_items_, self.n_pairs_ = len(np.unique(answers.items)), len(first)
        self._constant = self.process_.tie_constant()
        return self

    def _fit_answers(self, X: np.ndarray, answers: Answers, tied: np.ndarray | None, weight: Tensor | None) -> None:
        """Fit to pairs; with choices among more than two, several times, each with weights from the fit before."""
        first, second = answers.pairs.T
        for k in range(FITS if answers.largest > 2 else 1):
            own = weight
            if answers.largest > 2:
                given = answers.per_pair(np.ones(len(answers.sizes)) if weight is None else weight.numpy())
                own = torch.from_numpy(given * (answers.weights(self._process(), X) if k else answers.first_weights))
            rows = PairRows(X[first], X[second], tied, own)
            self.process_ = PairProcess(**self.get_params(deep=False)).fit_pairs(rows)

    def _check_options(self) -> None:
        checks.check_word(self.mean, "mean", PAIR_MEANS)
        if isinstance(self.kernel, str):
            checks.check_word(self.kernel, "kernel", (*STATIONARY, AUTO, "linear"))

    @property
    def elbo_(self) -> float:
        return self.process_.elbo_ + self._constant

    @property
    def converged_(self) -> bool:
        return self.process_.converged_

    @property
    def components_(self) -> list[Component]:
        """The Gaussian processes over which predictions are averaged."""
        return self.process_.components_

    @property
    def threshold_(self) -> float | None:
        return float(self.process_.model_.mean.tie.detach()) if self.process_.tied_ else None

    @property
    def outcomes_(self) -> tuple[str, ...]:
        return ("first", "tie", "second") if self.process_.tied_ else ("first", "second")

    # -----------------------------------------------------------------------------------------------------------------
    # Predictions

    def predict_proba(self, A: Any, B: Any) -> np.ndarray:
        """Posterior-averaged probabilities of the answers for items A against B, row by row, in order of `outcomes_`.

        E s(f(a) - f(b)), in closed form.
        """
        process, a, b = self._pairs(A, B)
        wins = process.predict_proba(process.rows_of(a, b))
        if not process.tied_:
            return wins[:, ::-1].copy()
        loses = process.predict_proba(process.rows_of(a, b, 1.0))[:, 0]
        return np.column_stack([wins[:, 1], np.maximum(wins[:, 0] - loses, 0.0), loses])

    def predict_std(self, A: Any, B: Any) -> np.ndarray:
        """Posterior standard deviation of the probability that a is preferred to b."""
        process, a, b = self._pairs(A, B)
        return process.predict_std(process.rows_of(a, b))

    def predict_interval(self, A: Any, B: Any, level: float = 0.95) -> np.ndarray:
        """Credible interval of the probability that a is preferred to b, n × 2."""
        process, a, b = self._pairs(A, B)
        return process.predict_interval(process.rows_of(a, b), level)

    def predict_information(self, A: Any, B: Any) -> np.ndarray:
        """Expected information of an answer about f(a) - f(b), in nats; in a model with ties, of one without a tie."""
        mean, covariance = self._pair_moments(*self._pairs(A, B)[1:])
        return answer_information(*difference(mean, covariance)).numpy()

    def predict_latent(self, X: Any, *, return_cov: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Posterior mean and standard deviation of the utilities f(x), or their mean and covariance.

        Parameters
        ----------
        X : array (n, p)
        return_cov : bool, default False
            Return the n × n covariance of the utilities in place of their standard deviations.
        """
        check_is_fitted(self, "process_")
        items = ItemProcess(self.process_)
        with torch.no_grad():
            rows = items.rows(torch.from_numpy(dense(checks.read_features(self, X, reset=False))))
            if not return_cov:
                return rows.mean.numpy(), items.among(rows, 1)[:, 0, 0].clamp(min=0.0).sqrt().numpy()
            C = items.between(rows, rows)
        return rows.mean.numpy(), (0.5 * (C + C.T)).numpy()

    def sample(self, X: Any, n: int = 1, random_state: Any = None) -> np.ndarray:
        """`n` joint draws of the utilities at the rows of X: n × rows."""
        n = checks.read_whole(n, "n", 0)
        mean, C = self.predict_latent(X, return_cov=True)
        generator = check_random_state(self.random_state if random_state is None else random_state)
        values, vectors = np.linalg.eigh(C)
        return mean + (generator.standard_normal((n, len(mean))) * np.sqrt(values.clip(min=0.0))) @ vectors.T

    def score(self, A: Any, B: Any, answers: Any = None) -> float:
        """Mean log probability of answers, given as column numbers of `predict_proba`; by default A is preferred."""
        p = self.predict_proba(A, B)
        column = np.zeros(len(p), dtype=int) if answers is None else checks.rectangular(answers, "answers")
        if column.shape != (len(p),) or not np.isin(column, np.arange(p.shape[1])).all():
            raise ValueError(
                f"answers must be numbers from 0 to {p.shape[1] - 1}, one for each of {len(p)} pairs; "
                f"got {shown(answers)}."
            )
        column = column.astype(int)
        return float(np.log(np.clip(p[np.arange(len(p)), column], 1e-300, None)).mean())

    def _pairs(self, A: Any, B: Any) -> tuple[PairProcess, np.ndarray, np.ndarray]:
        check_is_fitted(self, "process_")
        a, b = (dense(checks.read_features(self, x, reset=False)) for x in (A, B))
        if len(a) != len(b):
            raise ValueError(f"A and B must have the same number of items; got {len(a)} and {len(b)}. Repeat one item.")
        return self.process_, a, b

    def _process(self) -> ItemProcess:
        """The joint distribution of f at any items, differentiable in the items."""
        return ItemProcess(self.process_)

    def _pair_moments(self, a: np.ndarray, b: np.ndarray) -> tuple[Tensor, Tensor]:
        items = ItemProcess(self.process_)
        with torch.no_grad():
            rows = items.rows(torch.from_numpy(np.stack([a, b], 1).reshape(2 * len(a), -1)))
            return rows.mean.reshape(-1, 2), items.among(rows, 2)

    # -----------------------------------------------------------------------------------------------------------------
    # What was learned

    def summary(self) -> "pandas.DataFrame":
        """Per column, in the units of X: lengthscale, relevance (1/lengthscale in standard deviations), mean weight.

        Everything else is in ``.attrs``: "output_scale", "slope_scale", "threshold" of ties, "priors", "kernel", the
        weights of the "families" of kernels, the number of "inducing_points", and their "inducing_cost" in nats.
        """
        import pandas

        check_is_fitted(self, "process_")
        process = self.process_
        model, scaler = process.model_, process.item_scaler
        kernel, mean = getattr(model.kernel, "of", model.kernel), model.mean
        names = getattr(self, "feature_names_in_", [f"x{j}" for j in range(self.n_features_in_)])
        frame = pandas.DataFrame(index=[str(name) for name in names])
        for name, values in kernel_scales(kernel, scaler).items():
            frame[name] = values
        assert isinstance(mean, PairMean)
        if mean.slopes:
            own, unit = slice(len(model.inducing), None), float(mean.slope.detach()) / scaler.scale
            q = process.posterior_
            frame["mean_weight"], frame["mean_weight_sd"] = (
                q.mean[own].numpy() * unit,
                q.variance[own].sqrt().numpy() * unit,
            )
        frame.attrs = {
            "kernel": kernel_parameters(kernel),
            "priors": priors_in_words(kernel) | priors_in_words(mean),
            "families": family_weights(process.components_),
            "inducing_points": len(process.inducing_points_),
            "inducing_cost": process.inducing_cost_,
        }
        if hasattr(kernel, "outputscale"):
            frame.attrs["output_scale"] = float(kernel.outputscale.detach())
        if mean.slopes:
            frame.attrs["slope_scale"] = float(mean.slope.detach())
        if process.tied_:
            frame.attrs["threshold"] = self.threshold_
        return frame

    def diagnose(self, draws: int = 4000, random_state: Any = None) -> Diagnosis:
        """How close the posterior of the differences is to the exact one, by importance sampling (Pareto k̂)."""
        check_is_fitted(self, "process_")
        return self.process_.diagnose(draws=draws, random_state=random_state)

    # -----------------------------------------------------------------------------------------------------------------
    # Storage

    def save(self, path: str | PathLike[str], overwrite: bool = False) -> None:
        """Write the fitted model to one file, which `viper.load` reads. The items are not part of it."""
        check_is_fitted(self, "process_")
        state = self._pack()
        with as_storage_error("the model cannot be saved"):
            self._check_header(
                {n: Layout(x.dtype, tuple(x.shape), 0, 0) for n, x in state.tensors.items()}, state.metadata
            )
        write_tensors(path, PREFERENCE, *state, overwrite)

    def _pack(self) -> State:
        process = self.process_._pack()
        names = getattr(self, "feature_names_in_", None)
        metadata = {
            "process": process.metadata,
            "names": None if names is None else [str(name) for name in names],
            "constant": self._constant,
            "items": self.n_items_,
            "pairs": self.n_pairs_,
        }
        return State(process.tensors, metadata)

    @classmethod
    def _check_header(cls, layouts: Mapping[str, Layout], metadata: dict[str, Any]) -> dict[str, Numbers]:
        PREFERENCE_FIELDS.check(metadata, "")
        rules = PairProcess._check_header(layouts, metadata["process"])
        columns = metadata["process"]["features"]
        if columns < 2 or (metadata["names"] is not None and len(metadata["names"]) != columns // 2):
            raise StorageError(f"names must be {columns // 2}; got {shown(metadata['names'])}.")
        return rules

    @classmethod
    def _required_objects(cls, metadata: dict[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
        return PairProcess._required_objects(metadata["process"], objects)

    @classmethod
    def _unpack(cls, state: State, objects: dict[str, Any]) -> "VariationalPreferenceGP":
        cls._check_header({n: Layout(x.dtype, tuple(x.shape), 0, 0) for n, x in state.tensors.items()}, state.metadata)
        metadata = state.metadata
        process = PairProcess._unpack(State(state.tensors, metadata["process"]), objects)
        model = cls(**{name: getattr(process, name) for name in cls().get_params()})
        model._check_options()
        model.process_, model.n_features_in_ = process, process._choices.width
        if metadata["names"] is not None:
            model.feature_names_in_ = np.array(metadata["names"], dtype=object)
        model.n_items_, model.n_pairs_, model._constant = metadata["items"], metadata["pairs"], metadata["constant"]
        return model


def dense(X: Any) -> np.ndarray:
    X = X.cpu().numpy() if isinstance(X, Tensor) else X.toarray() if scipy.sparse.issparse(X) else X
    return np.ascontiguousarray(X, dtype=np.float64)


def read_ties(ties: Any, answers: Answers) -> np.ndarray:
    if answers.largest > 2:
        raise ValueError(f"ties are answers about two items; got a choice among {answers.largest}. Leave ties out.")
    pairs, given = len(answers.sizes), np.asarray(ties.detach().cpu() if isinstance(ties, Tensor) else ties)
    if given.shape != (pairs,):
        raise ValueError(f"ties must have one value for each of the {pairs} pairs; got shape {given.shape}.")
    try:
        known = np.isin(given, [0, 1])
    except TypeError:
        known = np.array([x in (0, 1) for x in given.tolist()])
    if not known.all():
        got = shown(given[~known].tolist()[0])
        raise ValueError(f"ties must be True (a tie) or False (the first item was preferred); got {got}.")
    return given.astype(bool)
