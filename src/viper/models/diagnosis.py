"""Measures how close the Gaussian posterior is to the exact one, and represents the exact one by weighted draws."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.data.checks import read_whole
from viper.errors import ImportanceWarning
from viper.inference.classes.importance import ClassWeighedFit
from viper.inference.classes.posterior import StarPosterior
from viper.inference.classes.together import LabelRows
from viper.inference.importance import SEED, Diagnosis, WeighedFit, WeightedDraws, weigh, weighted_quantiles
from viper.inference.posterior import Several, moved
from viper.inference.progress import StepProgress
from viper.inference.rows import Block, RowSource
from viper.models.arviz import classes_to_arviz, count_draws, draws_to_arviz, labels_to_arviz, posterior_to_arviz
from viper.models.loo import LeaveOneOut, leave_one_out
from viper.models.prediction import PredictionMixin, half_width, log_odds

if TYPE_CHECKING:
    import pandas


LATENT_DRAWS = 1 << 22  # values of f(x) held at once, rows × draws (32 MB)


class CorrectedPosterior:
    """Summaries and predictions from draws β_s with weights w_s. `diagnosis` says how far to trust them.

    `summarise(X, offset, draws, summary)` yields summary(f) block by block, where f = o + Xβ is draws × rows.
    """

    def __init__(
        self,
        weighted: WeightedDraws,
        diagnosis: Diagnosis,
        names: list[str],
        classes: np.ndarray,
        summarise: Callable[[Any, Any, Tensor, Callable[[Tensor], Tensor]], Iterator[Tensor]],
        estimator: str = "VariationalLogisticRegression",
    ) -> None:
        self.weighted, self.diagnosis, self.names = weighted, diagnosis, names
        self.classes_ = classes
        self._summarise, self._estimator = summarise, estimator

    @property
    def coefficients(self) -> WeightedDraws:
        """The draws of the coefficients, intercept last."""
        return self.weighted

    @property
    def mean_(self) -> np.ndarray:
        """Posterior means of the coefficients, intercept last."""
        return self.coefficients.mean.numpy()

    @property
    def sd_(self) -> np.ndarray:
        """Posterior standard deviations of the coefficients, intercept last."""
        return self.coefficients.variance.sqrt().numpy()

    def sample(self, n: int = 1, random_state: Any = None) -> np.ndarray:
        """Return equally weighted draws of the coefficients, n × d. Without `random_state`, every call draws anew."""
        generator = np.random.default_rng(check_random_state(random_state).randint(2**31))
        return self.coefficients.resample(read_whole(n, "n", 0), generator).numpy()

    def to_arviz(self, draws: int = 1000, chains: int = 4, random_state: Any = None) -> Any:
        """Return equally weighted draws in the container of the installed ArviZ."""
        sample = self.sample(count_draws(chains, draws), random_state)
        return draws_to_arviz(torch.from_numpy(sample), self.names, (chains, draws), self._estimator)

    def coefficient_interval(self, level: float = 0.95) -> np.ndarray:
        """Credible intervals of the coefficients, d × 2."""
        return self._quantiles(self.coefficients.draws, level).T.numpy()

    def summary(self, level: float = 0.95) -> "pandas.DataFrame":
        """Mean, sd, interval, odds ratio with interval and probability of direction of every coefficient."""
        low, high = self._quantiles(self.coefficients.draws, level)
        positive = self.coefficients.weights @ (self.coefficients.draws > 0).double()
        mean, sd = self.coefficients.mean, self.coefficients.variance.sqrt()
        return summary_frame(self.names, mean, sd, low, high, positive, level)

    def predict_latent(self, X: Any, offset: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the latent f(x), per row."""
        mean, sd = self._over_rows(X, offset, self._moments)
        return mean, sd

    def predict_proba(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior-averaged probabilities of the two classes, n × 2."""
        weights = self.weighted.weights
        return self._over_rows(
            X, offset, lambda f: torch.stack([weights @ torch.sigmoid(sign * f) for sign in (-1.0, 1.0)])
        ).T

    def predict_std(self, X: Any, offset: Any = None) -> np.ndarray:
        """Posterior standard deviation of the probability, per row."""
        return self._over_rows(X, offset, lambda f: self._moments(torch.sigmoid(f)))[1]

    def predict_interval(self, X: Any, level: float = 0.95, offset: Any = None) -> np.ndarray:
        """Credible interval of the probability of the second class, n × 2."""
        return self._over_rows(X, offset, lambda f: torch.sigmoid(self._quantiles(f, level))).T

    def decision_function(self, X: Any, offset: Any = None) -> np.ndarray:
        """Log-odds of the posterior-averaged probability."""
        return log_odds(self.predict_proba(X, offset))

    def predict(self, X: Any, offset: Any = None) -> np.ndarray:
        """The more probable class, per row."""
        return self.classes_[(self.predict_proba(X, offset)[:, 1] > 0.5).astype(int)]

    def _over_rows(self, X: Any, offset: Any, summary: Callable[[Tensor], Tensor]) -> np.ndarray:
        """Return a summary (k × rows) of the draws of f (draws × rows)."""
        return torch.cat(list(self._summarise(X, offset, self.weighted.draws, summary)), 1).numpy()

    def _moments(self, values: Tensor) -> Tensor:
        mean = self.weighted.weights @ values
        return torch.stack([mean, (self.weighted.weights @ (values - mean).square()).sqrt()])

    def _quantiles(self, values: Tensor, level: float) -> Tensor:
        half_width(level)  # checks `level`
        return weighted_quantiles(values, self.weighted.weights, [0.5 - 0.5 * level, 0.5 + 0.5 * level])


def summary_of_draws(block: Block, draws: Tensor, summary: Callable[[Tensor], Tensor]) -> Tensor:
    """Return summary(f) for the rows of a block, where f = o + Xβ is draws × rows.

    A residual variance that a row has given β is added to f as noise, with a fixed seed.
    """
    f = block.design.project(draws.to(block.label.device).T).T
    f = (f if block.offset is None else f + block.offset).cpu()
    if block.residual is not None:
        noise = torch.from_numpy(np.random.default_rng(SEED).standard_normal(f.shape))
        f = f + block.residual.cpu().sqrt() * noise
    return summary(f)


class DiagnosisMixin(PredictionMixin):
    """Estimators whose Gaussian posterior can be compared with the exact one, and corrected.

    It is a posterior of coefficients or, for Gaussian processes (`_sparse`), of whitened inducing values.
    """

    _sparse = False
    prior_: Any
    elbo_: float
    covariance: str
    random_state: Any
    verbose: Any

    def _names(self) -> list[str]:
        raise NotImplementedError

    def _summarise_draws(
        self, X: Any, offset: Any, draws: Tensor, summary: Callable[[Tensor], Tensor]
    ) -> Iterator[Tensor]:
        raise NotImplementedError

    def diagnose(
        self,
        X: Any = None,
        y: Any = None,
        *,
        sample_weight: Any = None,
        offset: Any = None,
        draws: int = 4000,
        random_state: Any = None,
    ) -> Diagnosis:
        """Measure by importance weights (PSIS) how close the Gaussian posterior is to the exact one.

        The rows are those of the fit; pass them again after loading a model from a file. The seed of the draws is
        `random_state`, or the estimator's if that is an integer, or a fixed number, so repeated calls give
        the same answer.

        For a Gaussian process, the draws are of the whitened inducing values, given kernel, mean function and inducing
        points, and `residual_cost` is what the inducing points cost in nats. Only held-out rows can judge the choice
        of the kernel.
        """
        return self._weigh(X, y, sample_weight, offset, draws, random_state)[1]

    def corrected(
        self,
        X: Any = None,
        y: Any = None,
        *,
        sample_weight: Any = None,
        offset: Any = None,
        draws: int = 4000,
        random_state: Any = None,
    ) -> CorrectedPosterior:
        """Return the exact posterior as weighted draws, with the same summaries and predictions as the estimator.

        It uses the same rows and draws as `diagnose`. Where k̂ is too large it warns: a few draws then carry all the
        weight, and the Gaussian posterior of the model itself is the better answer.
        """
        weighted, diagnosis = self._weigh(X, y, sample_weight, offset, draws, random_state)
        if not (diagnosis.reliable or diagnosis.close):
            few = "Few draws carry all the weight, so what corrected() returns is worse than the model: use the model."
            warnings.warn(f"{diagnosis} {few}", ImportanceWarning, stacklevel=2)
        names, estimator = self._names(), type(self).__name__
        kind = self._corrected_kind()
        return kind(weighted, diagnosis, names, self.classes_, self._summarise_draws, estimator)

    def _corrected_kind(self) -> type[CorrectedPosterior]:
        return CorrectedPosterior

    def loo(
        self,
        X: Any = None,
        y: Any = None,
        *,
        sample_weight: Any = None,
        offset: Any = None,
        draws: int = 4000,
        random_state: Any = None,
    ) -> LeaveOneOut:
        """Estimate how well each row is predicted from all the others, by importance weights (PSIS-LOO).

        The rows are those of the fit; pass them again after loading a model from a file. The result has `elpd_loo` with
        its standard error `se`, `p_loo`, and for each row `pointwise` and `k_hat`; `a.loo().minus(b.loo())` compares
        two models of the same rows. The draws are those of `diagnose`, weighted to represent the exact posterior, so
        the result describes the model, not its Gaussian approximation. A row of weight k counts as k rows that are left
        out together. A thousand rows take one or two seconds.
        """
        fit = self._weighed_fit(X, y, sample_weight, offset, "loo")
        generator = self._generator_of_draws(random_state)
        progress = StepProgress(self.verbose, "leaving out row")
        try:
            return leave_one_out(fit, draws, generator, progress.step)
        finally:
            progress.close()

    def to_arviz(
        self,
        X: Any = None,
        y: Any = None,
        *,
        sample_weight: Any = None,
        offset: Any = None,
        draws: int = 1000,
        chains: int = 4,
        random_state: Any = None,
    ) -> Any:
        """Return independent draws from the posterior, in the container of the installed ArviZ.

        The groups are posterior ("coefficient" by feature, "intercept"; for a Gaussian process the whitened inducing
        values w0, w1, … as "coefficient"; for ordered levels "threshold" instead of an intercept), sample_stats
        ("lp" = log p(y, β) and "log_q" = log q(β)), observed_data, and log_likelihood by row if draws × rows is at most
        16 million. A model loaded from a file has no training rows: pass them again, or the result holds only the
        posterior and "log_q".
        """
        check_is_fitted(self, "posterior_")
        source = self._given_or_training_rows(X, y, sample_weight, offset)
        seed = check_random_state(self.random_state if random_state is None else random_state).randint(2**31)
        return self._arviz_draws(source, (chains, draws), seed)

    def _arviz_draws(self, source: RowSource | None, shape: tuple[int, int], seed: int) -> Any:
        """Return chains × draws from the posterior in ArviZ's container, with densities if there are rows."""
        device, estimator = "cpu" if source is None else source.device, type(self).__name__
        if isinstance(self.posterior_, Several):
            fits = self.estimators_  # type: ignore[attr-defined]
            rows = [None if source is None else fit._known_weights(LabelRows(source, j)) for j, fit in enumerate(fits)]
            given = [
                (moved(fit.posterior_, device), moved(fit.prior_, device), own)
                for fit, own in zip(fits, rows, strict=True)
            ]
            return labels_to_arviz(given, self.classes_.tolist(), self._names(), shape, seed)
        posterior: Any = moved(self.posterior_, device)
        prior = moved(self.prior_, device)
        if isinstance(posterior, StarPosterior):
            classes = self.classes_.tolist()
            return classes_to_arviz(posterior, prior, source, classes, self._names(), shape, seed, estimator)
        return posterior_to_arviz(posterior, prior, source, self._names(), shape, seed, estimator)

    def _given_or_training_rows(self, X: Any, y: Any, sample_weight: Any, offset: Any) -> RowSource | None:
        if X is None:
            return getattr(self, "_training_rows", None)
        source = self._open_labelled_rows(X, y, sample_weight=sample_weight, offset=offset)
        return source if source.traits.labels else self._known_weights(source)

    def _weigh(
        self, X: Any, y: Any, sample_weight: Any, offset: Any, draws: int, random_state: Any
    ) -> tuple[WeightedDraws, Diagnosis]:
        check_is_fitted(self, "posterior_")
        fits = getattr(self, "_completed_fits", None)  # the fits behind a pooled posterior
        if fits is None or X is not None:
            weighed = [self._weighed_fit(X, y, sample_weight, offset, "diagnose")]
        else:
            weighed = [fit._weighed_fit(None, None, None, None, "diagnose") for fit in fits]
        generator = self._generator_of_draws(random_state)
        with closing(StepProgress(self.verbose, "weighing draws: row")) as progress:
            return weigh(weighed, self.elbo_, self.covariance, draws, generator, progress.step)

    def _weighed_fit(self, X: Any, y: Any, sample_weight: Any, offset: Any, what: str) -> Any:
        """The rows, and the posterior and prior on their device."""
        check_is_fitted(self, "posterior_")
        if hasattr(self, "missing_information_"):
            raise ValueError(
                f"{what} compares a posterior with rows; got one pooled from several completed tables "
                "(missing='multiple'), which no file holds. Call diagnose() on the model just fitted, or hold rows out."
            )
        if getattr(self, "robust_groups_", 0):
            raise ValueError(
                f"{what} judges a posterior; got robust covariances. Call it on the model that robust() came from."
            )
        source = self._given_or_training_rows(X, y, sample_weight, offset)
        if source is None:
            raise ValueError(f"{what} needs the training rows; got a model without them. Pass X and y.")
        return self._weighed_on(source)

    def _weighed_on(self, source: RowSource) -> Any:
        """The fit with its rows, on their device."""
        prior = moved(self.prior_, source.device)
        posterior: Any = moved(self.posterior_, source.device)
        if isinstance(posterior, StarPosterior):
            return ClassWeighedFit(posterior, prior, source)
        return WeighedFit(posterior, prior, source, self._sparse)

    def _generator_of_draws(self, random_state: Any) -> np.random.Generator:
        if random_state is None:
            random_state = self.random_state if isinstance(self.random_state, int | np.integer) else SEED
        return np.random.default_rng(check_random_state(random_state).randint(2**31))


def summary_frame(
    names: list[str], mean: Tensor, sd: Tensor, low: Tensor, high: Tensor, positive: Tensor, level: float
) -> "pandas.DataFrame":
    """Return one row per coefficient: mean, sd, interval, odds ratio with interval, probability of direction."""
    import pandas

    columns = {
        "mean": mean,
        "sd": sd,
        "lower": low,
        "upper": high,
        "odds_ratio": mean.exp(),
        "odds_lower": low.exp(),
        "odds_upper": high.exp(),
        "p_direction": torch.maximum(positive, 1.0 - positive),
    }
    frame = pandas.DataFrame({name: column.cpu().numpy() for name, column in columns.items()}, index=names)
    frame.attrs["level"] = level
    return frame
