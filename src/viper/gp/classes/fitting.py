"""Gaussian processes of K classes: the search for the kernel they share, then q at the kernel found."""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from viper.errors import shown
from viper.gp.average import Component, points_to_average
from viper.gp.classes.mixture import AVERAGED_ENTRIES, ClassProcesses, Projections, weighted_class_components
from viper.gp.classes.rows import ClassFeatures, merged_by_class
from viper.gp.classes.search import ClassSearch
from viper.gp.classes.summary import class_hyperparameter_table
from viper.gp.fitting.case import Case, FittedProcess, Known
from viper.gp.fitting.choices import Before
from viper.gp.model import InducedSource, InducedView, Observations, Scaler, SparseGP
from viper.gp.profile import identity_prior
from viper.gp.search import Found, Search
from viper.inference.classes.posterior import StarPosterior, posterior_of_star
from viper.inference.classes.problem import ClassProblem
from viper.inference.classes.solver import StarResult, fit_star
from viper.inference.classes.star import Star
from viper.inference.device import choose_device
from viper.inference.posterior import moved
from viper.inference.progress import Progress
from viper.inference.rows import BLOCK_ROWS, Arrays, Block, RowSource, joined_rows
from viper.inference.threads import pass_threads
from viper.models.classes.corrected import CorrectedClasses, summary_of_class_draws
from viper.models.classes.fitting import FittedClasses
from viper.models.classes.reading import SOFTMAX_READING
from viper.softplus.pointwise import Bound

if TYPE_CHECKING:
    import pandas

MOST_STAR_STEPS = 500
FEWEST_ON_GPU = 100_000  # rows × classes; with fewer, a GPU takes longer than the compiled pass


class SeveralClasses(Case):
    """A function for each class, with the same kernel."""

    reading = SOFTMAX_READING
    corrected = CorrectedClasses
    block_rows = BLOCK_ROWS

    def fit(
        self, known: Arrays, source: RowSource | None, before: Before | None, random: np.random.RandomState
    ) -> tuple[Scaler, FittedProcess]:
        self.check()
        return super().fit(known, source, before, random)

    def check(self) -> None:
        """Raise if an option is for two classes only."""
        options, K = self.choices.options, self.choices.classes
        if options.solver != "profile":
            raise ValueError(f"solver must be 'profile' for {K} classes; got {options.solver!r}, which is for two.")
        if options.bound != "viper" or options.terms is not None:
            got = options.bound if options.bound != "viper" else f"terms={options.terms}"
            raise ValueError(
                f"the expectation is exact for {K} classes; got {shown(got)}, which is for two. Leave it out."
            )
        if not isinstance(options.mean, str):
            raise ValueError(
                f"mean must be a name for {K} classes; got {type(options.mean).__name__}. A function that all classes "
                "share changes no probability."
            )

    def merged(self, rows: Observations) -> Observations:
        return merged_by_class(rows)

    def device(self, known: Arrays, rows: int) -> torch.device:
        few = rows * self.choices.classes < FEWEST_ON_GPU
        return torch.device("cpu") if few else choose_device(self.choices.options.device, known.features)

    def search(
        self,
        rows: Observations,
        bounds: tuple[Bound, Bound],
        generator: np.random.Generator,
        progress: Progress,
        represented: float,
    ) -> ClassSearch:
        choices = self.choices
        return ClassSearch(
            rows,
            bounds[0],
            choices.diagonal,
            choices.steps,
            float(choices.options.tol),
            generator,
            progress,
            represented=represented,
            classes=choices.classes,
        )

    def finish(
        self,
        families: list[Found],
        search: Search,
        source: RowSource | None,
        scaler: Scaler,
        bounds: tuple[Bound, Bound],
        places: bool,
    ) -> FittedProcess:
        rows, choices = search.rows, self.choices
        if places and choices.places_as_needed:
            families = [search.completed(x, len(rows) if source is None else source.rows) for x in families]
        found = families[0]
        with torch.no_grad():
            features = ClassFeatures(found.model, rows)
        problem, result = self.solve(found, features, search.progress)
        if source is not None:
            everything = InducedSource(source, InducedView(found.model.on("cpu"), scaler, ClassFeatures))
            problem = ClassProblem(everything, choices.classes, identity_prior(everything), choices.diagonal)
            if search.progress is not None:
                source.observe(search.progress.rows_done)  # type: ignore[attr-defined]
            near = Star(result.q.mean.cpu(), result.q.precision.cpu())
            result = fit_star(problem, near, report=search.progress)
        fit = fitted_classes(problem, result)
        first = Component(1.0, found.family, found.model.on("cpu"), fit.posterior)
        components = self.averaged(first, families, search) if source is None else [first]
        cost = class_residual_cost(fit)
        return FittedProcess(families, components, fit.certified(), result, cost, features.jitter, math.nan, fit.prior)

    def solve(self, found: Found, features: ClassFeatures, report: Any) -> tuple[ClassProblem, StarResult]:
        """The best q at the chosen θ, to full precision."""
        problem = ClassProblem(features, self.choices.classes, identity_prior(features), self.choices.diagonal)
        near = None if found.sites is None else found.sites.star(problem)  # type: ignore[attr-defined]
        return problem, fit_star(problem, near, report=report, max_iter=MOST_STAR_STEPS)

    def averaged(self, first: Component, families: list[Found], search: Search) -> list[Component]:
        """The components over which predictions are averaged, the mode first; it alone if more take too long."""
        size = max(found.model.dimension for found in families)
        entries = len(search.rows) * self.choices.classes * size**2
        if not self.choices.averages(len(search.rows)) or entries > AVERAGED_ENTRIES:
            return [first]
        assert isinstance(search, ClassSearch)
        mode, *others = weighted_class_components(points_to_average(families, search.generator), search)
        return [mode._replace(model=first.model, posterior=first.posterior), *others]

    def update(self, known: Known, new: RowSource, seed: int) -> FittedProcess:
        options = self.choices.options
        source = new if known.rows is None else joined_rows(known.rows, new)
        components: list[Component] = []
        with closing(Progress(options.verbose, None, source.rows)) as progress, pass_threads(options.n_jobs):
            source.observe(progress.rows_done)
            for component in reversed(known.components):  # the fitted model comes last; its fit is reported
                posterior: Any = component.posterior
                rows = self.induced(source, component.model, known.scaler)
                prior = identity_prior(rows) if known.rows is not None else posterior.as_prior()
                problem = ClassProblem(rows, self.choices.classes, prior, self.choices.diagonal)
                result = fit_star(problem, posterior.star, report=progress, max_iter=MOST_STAR_STEPS)
                fit = fitted_classes(problem, result)
                components.insert(0, component._replace(posterior=fit.posterior))
            cost = class_residual_cost(fit)
        return FittedProcess(
            [known.found], components, fit.certified(), result, cost, known.jitter, math.nan, fit.prior
        )

    # --- what a fitted process says about rows ---

    def induced(self, source: RowSource, model: SparseGP, scaler: Scaler, block_rows: int | None = None) -> RowSource:
        if source.traits.where != "memory":
            return InducedSource(source, InducedView(model, scaler, ClassFeatures))
        rows = Observations.from_arrays(source.in_memory()).standardised(scaler, torch.device("cpu"))
        with torch.no_grad():
            return ClassFeatures(model, rows, block_rows)

    def projected(self, source: RowSource, components: list[Component], scaler: Scaler) -> RowSource:
        return source  # the posterior projects them

    def predictive(self, components: list[Component], scaler: Scaler) -> ClassProcesses:
        return ClassProcesses(Projections(tuple(components), scaler))

    def summaries(self, draws: Tensor, summary: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Any], int]:
        return partial(summary_of_class_draws, draws=draws, summary=summary), len(draws) * draws.shape[1]

    def table(self, component: Component, scaler: Scaler, labels: list[str]) -> "pandas.DataFrame":
        return class_hyperparameter_table(component.model, component.posterior, scaler, self.choices.names, labels)


def fitted_classes(problem: ClassProblem, result: StarResult) -> FittedClasses:
    return FittedClasses(moved(posterior_of_star(result.q), "cpu"), problem.prior, problem, result)


def class_residual_cost(fit: FittedClasses) -> float:
    """Σ_i c_i {η(ϑ_i, τ_i²) - η(ϑ_i, τ_i² - r_i)}: what inducing points cost, in nats."""
    posterior = moved(fit.posterior, fit.problem.source.device)
    cost = fit.problem.source.reduce(partial(block_class_cost, posterior=posterior))[0]
    return max(0.0, float(cost))


def block_class_cost(block: Block, posterior: StarPosterior) -> list[Tensor]:
    free, full = (posterior.expected_log_likelihoods(x) for x in (replace(block, residual=None), block))
    return [(free - full).sum() if block.weight is None else block.weight @ (free - full)]
