"""The steps of a fit for any number of classes. Two and more classes differ in the profile, in q and in its use."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.gp.average import Component
from viper.gp.fitting.choices import Before, Choices
from viper.gp.model import Observations, Scaler, SparseGP
from viper.gp.search import Found, Search
from viper.inference.classes.star import Star
from viper.inference.problem import Prior
from viper.inference.progress import Progress, tasks_of
from viper.inference.rows import Arrays, RowSource
from viper.inference.threads import pass_threads
from viper.models.diagnosis import CorrectedPosterior
from viper.models.prediction import TargetReading
from viper.softplus.pointwise import Bound

if TYPE_CHECKING:
    import pandas


class FittedProcess(NamedTuple):
    """The result of a fit, or of an update with new rows."""

    families: list[Found]  # the best first
    components: list[Component]  # over which predictions are averaged; the first is the model itself
    elbo: tuple[float, float, float]  # the exact ELBO, a lower bound on it, and KL(q ‖ p)
    result: Any  # that of the solver, with objective, history, converged and status
    inducing_cost: float
    jitter: float
    largest_sd: float | None  # of f at the rows; None if it is computed when needed
    prior: Prior | Star  # of q
    narrow: float = 1.0  # factor found by `intervals_too_narrow_by`


class Known(NamedTuple):
    """What new rows are added to: components, the earlier rows if available, and what the search found."""

    components: list[Component]
    rows: RowSource | None
    scaler: Scaler
    found: Found
    jitter: float


@dataclass(frozen=True)
class Case(ABC):
    """The options of an estimator, for two classes or for more."""

    choices: Choices

    reading: ClassVar[TargetReading]  # what f says about the target
    corrected: ClassVar[type[CorrectedPosterior]]
    block_rows: ClassVar[int | None]  # for predictions, if the size of a block matters

    def fit(
        self, known: Arrays, source: RowSource | None, before: Before | None, random: np.random.RandomState
    ) -> tuple[Scaler, FittedProcess]:
        """Search on rows in memory, then fit q to them or, if they are a sample, to all rows of their source."""
        choices, options = self.choices, self.choices.options
        rows = self.merged(Observations.from_arrays(known))
        scaler = choices.scaler(rows) if before is None else before.scaler
        rows = rows.standardised(scaler, self.device(known, len(rows)))
        bounds = choices.bounds(int(random.randint(2**31)))
        generator = np.random.default_rng(random.randint(2**31))
        progress = Progress(options.verbose, tasks_of(options), len(rows))
        search = self.search(rows, bounds, generator, progress, 1.0 if source is None else source.rows / known.rows)
        with closing(progress), pass_threads(options.n_jobs):
            families = choices.search(search, scaler, before)
            return scaler, self.finish(families, search, source, scaler, bounds, before is None)

    @abstractmethod
    def merged(self, rows: Observations) -> Observations:
        """Merge equal rows, and sort them, so that their original order does not matter."""

    @abstractmethod
    def device(self, known: Arrays, rows: int) -> torch.device:
        """The device to compute on."""

    @abstractmethod
    def search(
        self,
        rows: Observations,
        bounds: tuple[Bound, Bound],
        generator: np.random.Generator,
        progress: Progress,
        represented: float,
    ) -> Search:
        """The search on these rows, each of which stands for `represented` rows."""

    @abstractmethod
    def finish(
        self,
        families: list[Found],
        search: Search,
        source: RowSource | None,
        scaler: Scaler,
        bounds: tuple[Bound, Bound],
        places: bool,
    ) -> FittedProcess:
        """Find q on all rows at the hyperparameters found; if `places`, more inducing points may be placed."""

    @abstractmethod
    def update(self, known: Known, new: RowSource, seed: int) -> FittedProcess:
        """Find q for all rows or, if only the new ones are available, with the previous q as prior; kernels stay."""

    # --- what a fitted process says about rows ---

    @abstractmethod
    def induced(self, source: RowSource, model: SparseGP, scaler: Scaler, block_rows: int | None = None) -> RowSource:
        """Rows projected on the inducing points of a model."""

    @abstractmethod
    def projected(self, source: RowSource, components: list[Component], scaler: Scaler) -> RowSource:
        """Rows in the form that predictions need."""

    @abstractmethod
    def predictive(self, components: list[Component], scaler: Scaler) -> Any:
        """The posterior used for predictions."""

    @abstractmethod
    def summaries(self, draws: Tensor, summary: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Any], int]:
        """A function that summarises a block by draws of the whitened values, and how many numbers it needs per row."""

    @abstractmethod
    def table(self, component: Component, scaler: Scaler, labels: list[str]) -> "pandas.DataFrame":
        """Hyperparameters and weights of the mean, by column."""
