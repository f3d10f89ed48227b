"""Logistic regression with effects of groups (random effects), with the scikit-learn interface."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import scipy.sparse
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data import checks
from viper.data.checks import read_features, read_labels, read_vector, read_weights
from viper.data.schema import (
    BOOLEAN,
    DEFINITE,
    LABEL,
    NUMBER,
    SHARES,
    TEXT,
    WHOLE,
    Fields,
    Items,
    Numbers,
    Rule,
    numbers,
)
from viper.errors import StorageError
from viper.formula.columns import as_frame
from viper.formula.grammar import GroupTerm, parse_groups
from viper.formula.learn import FormulaMixin, by_formula
from viper.formula.screening import Remark
from viper.inference.groups.components import component_count, covariance_of
from viper.inference.groups.rows import Factor, GroupedRows, sorted_rows
from viper.inference.groups.sums import expected_terms
from viper.inference.problem import Prior
from viper.inference.progress import Callbacks, as_task, tasks_of
from viper.inference.threads import check_jobs
from viper.models.diagnosis import summary_frame
from viper.models.facts import coefficient_names
from viper.models.groups.diagnosis import GroupDiagnosisMixin
from viper.models.groups.effects import GroupEffectsMixin
from viper.models.groups.fitting import FittedGroups, GroupOptions, MetPosterior, fit_groups, group_latent
from viper.models.groups.levels import (
    AVERAGE,
    GroupFactor,
    as_group_table,
    check_border,
    group_remarks,
    joined_columns,
    learn_factor,
    named_new,
    new_group_error,
)
from viper.models.groups.reading import GroupedInput, RowsAndGroups, count_of_rows
from viper.models.groups.tables import component_draws, component_frame, effect_frame, factor_number, mixture_interval
from viper.models.notebook import NotebookMixin
from viper.models.prior import DEFAULT_SCALE, PriorMixin, make_prior
from viper.models.saving import State, StateMixin
from viper.softplus.limit import mean_of_same_probability

if TYPE_CHECKING:
    import pandas

POINT_TENSORS = {  # the mixture over variance components: weights, values, fixed effects given these
    "points.weight": numbers("k", range=SHARES),
    "points.theta": numbers("kt"),
    "points.mean": numbers("kf"),
    "points.covariance": numbers("kff"),
    "components.theta": numbers("mt"),
    "components.share": numbers("m", range=SHARES),
}
FACTOR_FIELDS = Fields(
    {
        "columns": Items(TEXT),
        "intercept": BOOLEAN,
        "slopes": Items(TEXT),
        "levels": Items(LABEL),
        "rows": Items(WHOLE),
    }
)


class VariationalMixedRegression(
    FormulaMixin,
    NotebookMixin,
    PriorMixin,
    GroupEffectsMixin,
    GroupDiagnosisMixin,
    StateMixin,
    Callbacks,
    ClassifierMixin,
    BaseEstimator,
):
    """Bayesian logistic regression with effects of groups: patients seen twice, hospitals, players, items.

    y_i ~ Bernoulli(s(x_iᵀβ + Σ_f z_ifᵀ b_f[g_f(i)])), where the effects b of the groups of a factor f are N(0, D_f).
    Given D, the posterior of all effects is approximated by the Gaussian that maximises the ELBO, which is computed
    exactly; its precision is an arrow matrix, so time and memory are linear in rows and groups. Everything is averaged
    over the posterior of D, at a few points (as in INLA).

    Parameters
    ----------
    effects : str, optional
        Which effects vary between which groups, as in a formula: ``"(1 | hospital) + (1 + age | patient)"``. The
        default is an intercept for every column of `groups`. `from_formula` sets it.
    prior_mean, prior_scale, intercept_scale, fit_intercept
        The prior of the fixed effects, as for VariationalLogisticRegression.
    component_scale : float, default 2.5
        Scale of the prior of standard deviations of group effects: half-t with 3 degrees of freedom. Correlations have
        the LKJ prior with shape 2.
    quadrature : "auto" or bool, default "auto"
        Whether to correct the evidence for what Gaussian posteriors of single groups miss, by adaptive Gauss-Hermite
        quadrature over one effect per group of the largest factor. "auto" does so if these groups have less than ten
        rows of the rarer class on average, and one effect each.
    new_groups : {"error", "average"}, default "error"
        What happens in predictions to groups that were not in the fit, and to rows without a group: an error, or the
        probability averaged over the effects that such a group may have.
    n_jobs : int, optional
        Threads of a pass over many rows, as for VariationalLogisticRegression.
    random_state : int, RandomState or None
        Seeds the choice of groups that large fits look at first. None means a fixed seed.
    verbose : bool or "auto", default "auto"
        Whether to show progress. "auto" shows it on a terminal once a fit has taken two seconds.

    Attributes
    ----------
    coef_, intercept_ : arrays (1, n_features) and (1,)
        Posterior means of the fixed effects.
    posterior_ : GroupPosterior
        Means of all effects, and covariances of those that meet in a row.
    factors_ : list of GroupFactor
        The group terms, with their groups (`levels`) and how many rows each had (`rows`).
    elbo_ : float
        The exact ELBO at the most probable variance components.
    quadrature_ : bool
        Whether quadrature was used.
    points_ : int
        Number of values of the variance components in the mixture.
    n_iter_ : int
        Number of steps, over all values of the variance components.
    converged_, status_, history_, classes_, n_features_in_, feature_names_in_, formula_
        As for VariationalLogisticRegression.

    Examples
    --------
    >>> import numpy as np
    >>> import viper
    >>> rng = np.random.default_rng(1)
    >>> ward = np.repeat(np.arange(30), 20)
    >>> age = rng.standard_normal(600)
    >>> y = rng.random(600) < 1 / (1 + np.exp(-0.5 * age - rng.normal(0, 1, 30)[ward]))
    >>> model = viper.VariationalMixedRegression().fit(age[:, None], y, groups={"ward": ward})
    >>> model.components().round(2)
                          mean    sd  lower  upper
    sd(intercept | ward)  1.01  0.19   0.69   1.43
    icc(ward)             0.24  0.07   0.13   0.38
    """

    feature_names_in_: np.ndarray
    posterior_: Any

    bound, terms, covariance = "viper", None, "full"  # as facts and files have them for every estimator
    _kind = "mixed"
    _fit_scalars: ClassVar[Mapping[str, Rule]] = {
        "elbo_": NUMBER,
        "n_iter_": WHOLE,
        "converged_": BOOLEAN,
        "status_": TEXT,
        "quadrature_": BOOLEAN,
    }
    _own_fields = Fields({"factors": Items(FACTOR_FIELDS), "order": Items(WHOLE)}, {"kl": NUMBER})
    _own_tensors: ClassVar[Mapping[str, Numbers]] = {
        "prior_scale": numbers("p", "pp", range=DEFINITE),
        **POINT_TENSORS,
    }
    _options_before: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        *,
        effects: str | None = None,
        prior_mean: Any = 0.0,
        prior_scale: Any = DEFAULT_SCALE,
        intercept_scale: float = 10.0,
        fit_intercept: bool = True,
        component_scale: float = 2.5,
        quadrature: Any = "auto",
        new_groups: str = "error",
        n_jobs: int | None = None,
        random_state: Any = None,
        verbose: Any = "auto",
    ) -> None:
        self.effects = effects
        self.prior_mean = prior_mean
        self.prior_scale = prior_scale
        self.intercept_scale = intercept_scale
        self.fit_intercept = fit_intercept
        self.component_scale = component_scale
        self.quadrature = quadrature
        self.new_groups = new_groups
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.verbose = verbose

    # -----------------------------------------------------------------------------------------------------------------
    # Fitting

    @as_task
    @by_formula
    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None, *, groups: Any = None
    ) -> "VariationalMixedRegression":
        """Fit fixed effects, effects of groups and variance components.

        Parameters
        ----------
        X : array or DataFrame (n, p), or None
            The columns of the fixed effects. None if there is only an intercept.
        y : array (n,)
            The two classes.
        sample_weight : array (n,), optional
            A weight of k counts a row k times.
        offset : array (n,), optional
            Known part of the log-odds of each row.
        groups : array (n,), or DataFrame or dict of such columns
            The group of each row; with several columns, one for each way of grouping. Groups may be nested or
            crossed.
        """
        self._check_options()
        design = self._read_columns(X, y, reset=True)
        rows = len(design)
        self.classes_, label = read_labels(y, rows)
        weight, known = read_weights(sample_weight, rows), read_vector(offset, "offset", rows)
        table = as_group_table(groups, rows)
        names = self._columns()
        self.factors_ = [learn_factor(term, table, names, design) for term in self._terms(list(table.columns))]
        self.prior_scale_ = self._scale().numpy()
        prior = self._prior()
        check_border(self.factors_, len(prior.mean))
        factors = [Factor(one.codes(table), len(one.levels), one.multiplied(design)) for one in self.factors_]
        options = GroupOptions(
            float(self.component_scale),
            self.quadrature,
            self.n_jobs,
            self.verbose,
            checks.seed_of(self.random_state),
            tasks_of(self),
        )
        numbers = [None if x is None else x.numpy() for x in (weight, known)]
        fit = fit_groups(
            self._fixed(design), label.numpy().astype(float), factors, numbers[0], numbers[1], prior, options
        )
        self.prior_ = prior
        return self._keep(fit)

    def _prior(self) -> Prior:
        scale = torch.from_numpy(self.prior_scale_)
        return make_prior(self._prior_mean(), scale, self.intercept_scale, bool(self.fit_intercept))

    def _terms(self, columns: list[str]) -> tuple[GroupTerm, ...]:
        return parse_groups(self.effects) if self.effects else tuple(GroupTerm((name,), True) for name in columns)

    def _read_columns(self, X: Any, y: Any, *, reset: bool) -> np.ndarray:
        """Return the columns of the fixed effects, without the intercept; there may be none."""
        if X is None or (hasattr(X, "shape") and len(X.shape) == 2 and X.shape[1] == 0):
            if not reset and self.n_features_in_:
                raise ValueError(f"X must have {self.n_features_in_} features, as in fit; got none.")
            self.n_features_in_ = 0 if reset else self.n_features_in_
            if reset and not self.fit_intercept:
                raise ValueError("a model must have columns or an intercept; got neither. Set fit_intercept=True.")
            return np.empty((len(y) if X is None else len(X), 0))
        design = read_features(self, X, reset=reset)
        if scipy.sparse.issparse(design):
            raise ValueError("X must be dense for effects of groups; got a sparse matrix. Convert it with .toarray().")
        if isinstance(design, Tensor):
            design = design.cpu().numpy()
        return np.asarray(design, dtype=np.float64)

    def _fixed(self, design: np.ndarray) -> np.ndarray:
        return np.column_stack([design, np.ones(len(design))]) if self.fit_intercept else design

    def _check_options(self) -> None:
        words: dict[str, tuple[str | bool, ...]] = {
            "quadrature": ("auto", True, False),
            "new_groups": ("error", AVERAGE),
            "verbose": ("auto", True, False),
        }
        checks.check_options(self, words, ("component_scale", "intercept_scale"), ())
        if isinstance(self.prior_scale, str):
            raise ValueError(
                f"prior_scale must be numbers for effects of groups; got {self.prior_scale!r}. Only the scales of "
                "group effects are learned."
            )
        check_jobs(self.n_jobs)

    def _keep(self, fit: FittedGroups) -> "VariationalMixedRegression":
        """Set the fitted attributes."""
        found, pooled = fit.found, fit.found.pooled
        self.posterior_, self._order = fit.posterior, fit.order
        arrays = (
            pooled.weights,
            pooled.thetas,
            pooled.fixed_means,
            pooled.fixed_covariances,
            found.values,
            found.shares,
        )
        self._points = {
            name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in zip(POINT_TENSORS, arrays, strict=True)
        }
        self.elbo_, self.quadrature_, self.history_ = found.elbo, fit.quadrature, fit.history
        self.n_iter_, self.converged_ = max(1, len(fit.history)), found.converged
        self.status_ = "converged" if found.converged else "not converged"
        self._largest_sd, self.kl_ = fit.largest_sd, fit.expected - found.elbo
        self._grouped_rows = fit.rows
        self._set_means()
        return self

    def _set_means(self) -> None:
        mean = self.posterior_.mean.numpy()
        self.coef_ = mean[None, : self.n_features_in_].copy()
        last = mean[self.n_features_in_ : self.n_features_in_ + 1]
        self.intercept_ = last.copy() if self.fit_intercept else np.zeros(1)

    # -----------------------------------------------------------------------------------------------------------------
    # What was learned

    @property
    def points_(self) -> int:
        return len(self._points["points.weight"])

    @property
    def objective_(self) -> float:
        """What the fit maximised, given the variance components: the ELBO itself."""
        return self.elbo_

    @property
    def elbo_bound_(self) -> float:
        """A lower bound on `elbo_` that allows for the errors of its sums, at most 1e-9 a row."""
        return self.elbo_ - 1e-9 * float(self.factors_[0].rows.sum()) - 1e-12 * abs(self.elbo_)

    @property
    def covariance_(self) -> np.ndarray:
        """Posterior covariance of the fixed effects, with the intercept last."""
        check_is_fitted(self, "posterior_")
        size = len(self._names())
        return self.posterior_.border[:size, :size].numpy()

    def _names(self) -> list[str]:
        return coefficient_names(self._columns(), self.fit_intercept)

    def coefficient_interval(self, level: float = 0.95) -> np.ndarray:
        """Credible intervals of the fixed effects, with the intercept last: quantiles of the mixture, d × 2."""
        check_is_fitted(self, "posterior_")
        weights, means = (self._points[f"points.{name}"].numpy() for name in ("weight", "mean"))
        sds = self._points["points.covariance"].diagonal(dim1=1, dim2=2).sqrt().numpy()
        return mixture_interval(weights, means, sds, level)

    def summary(self, level: float = 0.95) -> "pandas.DataFrame":
        """Fixed effects as for VariationalLogisticRegression; below them variance components, as in `components`."""
        import pandas

        check_is_fitted(self, "posterior_")
        size = len(self._names())
        mean, sd = self.posterior_.mean[:size], self.posterior_.variance[:size].sqrt()
        low, high = torch.from_numpy(self.coefficient_interval(level)).T
        weights, means = self._points["points.weight"], self._points["points.mean"]
        sds = self._points["points.covariance"].diagonal(dim1=1, dim2=2).sqrt()
        positive = weights @ torch.special.ndtr(means / sds)
        fixed = summary_frame(self._names(), mean, sd, low, high, positive, level)
        table = pandas.concat([fixed, self.components(level)])
        table.attrs["level"] = level
        return table

    def components(self, level: float = 0.95) -> "pandas.DataFrame":
        """Variance components: standard deviations and correlations of group effects, with intervals.

        `icc` is the intraclass correlation: the share of a group's intercepts in the variance of the log-odds, whose
        logistic noise has variance π²/3.
        """
        check_is_fitted(self, "posterior_")
        draws = component_draws(self.factors_, self._order, self._points["components.theta"].numpy())
        return component_frame(draws, self._points["components.share"].numpy(), level)

    def group_effects(self, groups: str | None = None, level: float = 0.95) -> "pandas.DataFrame":
        """Mean, sd and interval of each group's effects, and its rows. `groups` names one of several terms."""
        check_is_fitted(self, "posterior_")
        f = factor_number(self.factors_, groups)
        return effect_frame(self.factors_[f], *self._effects_of(f), level)

    def _effects_of(self, f: int) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances of the effects of a factor, G × r."""
        posterior, place = self.posterior_, self._order.index(f)
        if place == 0:
            return posterior.effects.numpy(), posterior.blocks.diagonal(dim1=1, dim2=2).numpy()
        width = self.factors_[f].width
        start = len(self._names()) + sum(self._effect_count(k) for k in self._order[1:place])
        part = slice(start, start + self._effect_count(f))
        return posterior.mean[part].numpy().reshape(-1, width), posterior.variance[part].numpy().reshape(-1, width)

    def _effect_count(self, f: int) -> int:
        return len(self.factors_[f].levels) * self.factors_[f].width

    def sample(self, n: int = 1, random_state: Any = None) -> np.ndarray:
        """Draw fixed effects (intercept last) from the posterior: n × d."""
        check_is_fitted(self, "posterior_")
        n = checks.read_whole(n, "n", 0)
        generator = check_random_state(self.random_state if random_state is None else random_state)
        return self._fixed_draws(n, generator)[0]

    # -----------------------------------------------------------------------------------------------------------------
    # Predictions

    def score(
        self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None, *, groups: Any = None
    ) -> float:
        """Share of rows whose class is predicted correctly."""
        from sklearn.metrics import accuracy_score

        return float(accuracy_score(y, self.predict(X, offset, groups=groups), sample_weight=sample_weight))

    def predict_to(self, X: Any, path: Any, **given: Any) -> int:
        raise ValueError("predict_to is not for effects of groups; use predict_table, and write its rows.")

    def to_onnx(self, *given: Any, **options: Any) -> Any:
        """Not available: the graph would have to contain every group's name and covariances."""
        raise ValueError(
            f"to_onnx is for models without effects of groups; got {self.factors_[0].term}. Use viper serve, or fit "
            "VariationalLogisticRegression with C() of the groups."
        )

    def elbo(
        self, X: Any, y: Any = None, sample_weight: Any = None, offset: Any = None, *, groups: Any = None
    ) -> float:
        """E log p(y | effects) under the fitted posterior, less `kl_`; `elbo_` if the rows are those of the fit."""
        read = self._read_rows(RowsAndGroups(X, groups), offset)
        label, weight = self._labels_and_weights(y, sample_weight, len(read.design))
        terms = expected_terms(label, *self._latent(*read))
        return float(terms.sum() if weight is None else weight @ terms) - self.kl_

    def _predict(self, X: Any, offset: Any, function: Any) -> Any:
        mean, variance = self._latent(*self._read_rows(X, offset))
        return function(torch.from_numpy(mean), torch.from_numpy(variance))

    def _read_rows(self, X: Any, offset: Any) -> GroupedInput:
        """Columns, groups and offset of rows, which a model with a formula finds in a table."""
        check_is_fitted(self, "posterior_")
        data, groups = X if isinstance(X, RowsAndGroups) else RowsAndGroups(X, None)
        # held-out rows come with their groups
        data, groups = data if isinstance(data, RowsAndGroups) else (data, groups)
        if hasattr(self, "formula_"):
            if groups is not None:
                raise ValueError("a model with a formula finds groups in the table; got groups=. Leave it out.")
            data = as_frame(data)
            groups, data = data, self.formula_.encode(data)
            design = np.asarray(data, dtype=np.float64)
        else:
            rows = len(data) if data is not None else len(as_group_table(groups, count_of_rows(groups)))
            design = self._read_columns(data, np.empty(rows), reset=False)
            groups = as_group_table(groups, len(design))
        known = read_vector(offset, "offset", len(design))
        return GroupedInput(design, groups, None if known is None else known.numpy())

    def _open_labelled_rows(self, X: Any, y: Any, *, sample_weight: Any, offset: Any) -> Any:
        """Rows with labels, sorted by the factor with the most groups. All groups must be known."""
        read = self._read_rows(X, offset)
        label, weight = self._labels_and_weights(y, sample_weight, len(read.design))
        factors = []
        for factor in (self.factors_[f] for f in self._order):
            codes = factor.codes(read.table)
            if (codes < 0).any():
                raise new_group_error(factor, joined_columns(read.table, factor.term.columns), codes)
            factors.append(Factor(codes, len(factor.levels), factor.multiplied(read.design)))
        main = self.factors_[self._order[0]]
        if len(np.unique(factors[0].codes)) < len(main.levels):
            raise ValueError(
                f"the rows must be those of the fit, with all {len(main.levels):,} groups of {main.term.name!r}; got "
                f"{len(np.unique(factors[0].codes)):,} of them. Pass the rows of the fit."
            )
        return sorted_rows(self._fixed(read.design), label, factors, weight, read.offset)[0]

    def _labels_and_weights(self, y: Any, sample_weight: Any, rows: int) -> tuple[np.ndarray, np.ndarray | None]:
        weight = read_weights(sample_weight, rows)
        label = read_labels(y, rows, self.classes_)[1].numpy().astype(float)
        return label, None if weight is None else weight.numpy()

    def _latent(
        self, design: np.ndarray, table: "pandas.DataFrame", offset: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """ϑ and τ² of rows, where the effects of new groups have their prior variance."""
        factors, extra = self._known_factors(design, table)
        mean, variance = group_latent(self._fixed(design), factors, offset, self.posterior_)
        averaged = np.flatnonzero(extra.any(0))
        if len(averaged):
            weights = self._points["points.weight"]
            each = torch.from_numpy(variance[averaged] + extra[:, averaged])
            total = weights @ each
            same = torch.from_numpy(mean[averaged]).expand_as(each)
            mean[averaged] = mean_of_same_probability(weights, same, each, total).numpy()
            variance[averaged] = total.numpy()
        return mean, variance

    def _known_factors(self, design: np.ndarray, table: "pandas.DataFrame") -> tuple[list[Factor], np.ndarray]:
        """The factors in the posterior's order, zero in rows of new groups, and the variance that these add, K × n."""
        factors, extra = [], np.zeros((self.points_, len(design)))
        thetas = self._points["points.theta"].numpy()
        at = 0
        for f in self._order:
            factor = self.factors_[f]
            codes, Z = self._codes(factor, table), factor.multiplied(design)
            new = codes < 0
            size = component_count(factor.width)
            if new.any():
                D = np.array([covariance_of(theta[at : at + size], factor.width) for theta in thetas])
                extra[:, new] += np.einsum("ni,kij,nj->kn", Z[new], D, Z[new])
                Z = np.where(new[:, None], 0.0, Z)
            factors.append(Factor(np.maximum(codes, 0), len(factor.levels), Z))
            at += size
        return factors, extra

    def _design_and_spread(self, read: GroupedInput) -> tuple[Any, np.ndarray]:
        """The sparse design of all effects, and the variance that new groups add.

        The latter is the prior variance of their effects, averaged over the points.
        """
        factors, extra = self._known_factors(read.design, read.table)
        main = factors[0]
        rows = GroupedRows(self._fixed(read.design), np.zeros(len(read.design)), tuple(factors))
        every = np.arange(rows.rows + 1)
        border = scipy.sparse.csr_array(np.pad(rows.X, [(0, 0), (0, rows.border - rows.fixed)]))
        for place, values in rows.sparse:
            border = border + scipy.sparse.csr_array((values, place, every), shape=border.shape)
        width = main.width
        places = (main.codes[:, None] * width + np.arange(width)).ravel()
        own = scipy.sparse.csr_array(
            (main.columns.ravel(), places, width * every), shape=(rows.rows, main.levels * width)
        )
        return scipy.sparse.hstack([border, own], format="csr"), self._points["points.weight"].numpy() @ extra

    @property
    def _averages(self) -> bool:
        """Whether new groups are averaged over."""
        return self.new_groups == AVERAGE or (hasattr(self, "formula_") and self.formula_.unseen != "error")

    def _codes(self, factor: GroupFactor, table: "pandas.DataFrame") -> np.ndarray:
        if absent := [name for name in factor.term.columns if name not in table.columns]:
            raise ValueError(f"groups must have the columns of the fit; got none named {absent[0]!r}.")
        codes = factor.codes(table)
        if (codes[~named_new(factor, table)] < 0).any() and not self._averages:
            raise new_group_error(factor, joined_columns(table, factor.term.columns), codes)
        return codes

    def _group_remarks(self, frame: "pandas.DataFrame") -> list[Remark]:
        return [remark for factor in self.factors_ for remark in group_remarks(factor, frame, self._averages)]

    # -----------------------------------------------------------------------------------------------------------------
    # Storage

    @classmethod
    def _fields(cls) -> Fields:
        found = super()._fields()
        return Fields({**found.required, "features": WHOLE}, found.optional)

    @classmethod
    def _sizes(cls, metadata: dict[str, Any]) -> dict[str, int]:
        columns = metadata["features"]
        return {"p": columns, "f": columns + bool(metadata["options"].get("fit_intercept", True))}

    @classmethod
    def _tensor_rules(cls, names: Collection[str], metadata: dict[str, Any]) -> Mapping[str, Numbers]:
        return cls._own_tensors

    def _own_state(self) -> State:
        factors = [
            {
                "columns": list(factor.term.columns),
                "intercept": factor.term.intercept,
                "slopes": list(factor.term.slopes),
                "levels": factor.levels,
                "rows": factor.rows.tolist(),
            }
            for factor in self.factors_
        ]
        tensors = {"prior_scale": torch.from_numpy(self.prior_scale_), **self._points}
        known = {} if np.isnan(self.kl_) else {"kl": self.kl_}
        return State(tensors, {"factors": factors, "order": list(self._order), **known})

    def _restore_own_state(self, state: State) -> None:
        self._points = {name: state.tensors[name] for name in POINT_TENSORS}
        self.prior_scale_, self.history_ = state.tensors["prior_scale"].numpy(), []
        names, factors = self._columns(), []
        for one in state.metadata["factors"]:
            term = GroupTerm(tuple(one["columns"]), one["intercept"], tuple(one["slopes"]))
            if not {*term.slopes} <= {*names} or not len({*one["levels"]}) == len(one["levels"]) == len(one["rows"]):
                raise StorageError("groups must have distinct levels and slopes of known columns; got others.")
            factors.append(
                GroupFactor(term, one["levels"], np.array(one["rows"]), [names.index(x) for x in term.slopes])
            )
        self.factors_, self._order = factors, state.metadata["order"]
        self.kl_ = state.metadata.get("kl", float("nan"))
        self._check_shapes()
        self._set_means()
        self.prior_ = self._prior()

    def _check_shapes(self) -> None:
        """Raise a StorageError unless factors, their order and the posterior belong together."""
        counts = [self._effect_count(f) for f in range(len(self.factors_))]
        if sorted(self._order) != list(range(len(counts))) or not counts or min(counts) < 1:
            raise StorageError("the order of group terms must name each once; got another.")
        main, q = self.factors_[self._order[0]], self.posterior_
        border = len(self._names()) + sum(counts[f] for f in self._order[1:])
        size = sum(component_count(factor.width) for factor in self.factors_)
        right = tuple(q.effects.shape) == (len(main.levels), main.width) and len(q.mean) == border
        right = right and (not isinstance(q, MetPosterior) or q.is_whole())
        if not right or self._points["points.theta"].shape[1] != size:
            raise StorageError("the posterior must have an effect for each group; got another number.")

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_grouped_rows"}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags
