"""Gaussian processes of two classes: the fit, its updates, and its predictions."""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from viper.gp.average import (
    Averaged,
    AveragedRows,
    AveragedView,
    Component,
    points_to_average,
    posterior_of,
    weighted_components,
)
from viper.gp.fitting.case import Case, FittedProcess, Known
from viper.gp.mean_uncertainty import intervals_too_narrow_by
from viper.gp.model import Features, InducedSource, InducedView, Observations, Scaler, SparseGP
from viper.gp.online import PLACED_ROWS, as_start, with_more_points, with_more_values
from viper.gp.profile import Profile, identity_prior
from viper.gp.search import Found, Search
from viper.gp.summary import hyperparameter_table
from viper.inference.device import choose_device
from viper.inference.importance import residual_cost
from viper.inference.newton import Result, exact_elbo, newton
from viper.inference.posterior import Diagonal, Full, moved
from viper.inference.problem import Gaussian, Problem, gaussian
from viper.inference.progress import Progress, tasks_of
from viper.inference.rows import BLOCK_ROWS, Arrays, RowSource, joined_rows
from viper.inference.threads import pass_threads
from viper.models.diagnosis import CorrectedPosterior, summary_of_draws
from viper.models.prediction import TWO_CLASSES, largest_sd
from viper.softplus.pointwise import Bound

if TYPE_CHECKING:
    import pandas

Q_TOLERANCE = 1e-12  # nats; tolerance of q at the chosen hyperparameters


class TwoClasses(Case):
    """One function, the log-odds of the second class."""

    reading = TWO_CLASSES
    corrected = CorrectedPosterior
    block_rows = None

    def merged(self, rows: Observations) -> Observations:
        return rows.merged()

    def device(self, known: Arrays, rows: int) -> torch.device:
        return choose_device(self.choices.options.device, known.features)

    def search(
        self,
        rows: Observations,
        bounds: tuple[Bound, Bound],
        generator: np.random.Generator,
        progress: Progress,
        represented: float,
    ) -> Search:
        choices = self.choices
        tol, marginal = float(choices.options.tol), choices.places_as_needed
        return Search(rows, bounds[1], choices.diagonal, choices.steps, tol, generator, progress, marginal, represented)

    def finish(
        self,
        families: list[Found],
        search: Search,
        source: RowSource | None,
        scaler: Scaler,
        bounds: tuple[Bound, Bound],
        places: bool,
    ) -> FittedProcess:
        rows, found, (exact, fast) = search.rows, families[0], bounds
        if places and search.marginal:
            found = search.completed(found, len(rows) if source is None else source.rows)
        with torch.no_grad():
            features = Features(found.model, rows)
        problem, result = self.solve(found, features, exact, fast, search.progress)
        narrow = intervals_too_narrow_by(found.model.mean, features, self.posterior(result), rows.inputs)
        if source is not None:
            problem, result = self.solve_all(found.model.on("cpu"), source, scaler, exact, result.q)
        first = Component(1.0, found.family, found.model.on("cpu"), moved(self.posterior(result), "cpu"))
        components = self.averaged(first, families, search) if source is None else [first]
        sd = None if source is None else largest_sd(features, first.posterior)
        return FittedProcess(
            [found, *families[1:]],
            components,
            exact_elbo(problem, result),
            result,
            max(0.0, residual_cost(problem.source, self.posterior(result))),
            features.jitter,
            sd,
            problem.prior,
            narrow,
        )

    def solve(self, found: Found, features: Features, exact: Bound, fast: Bound, report: Any) -> tuple[Problem, Result]:
        """The best q at the chosen θ, to full precision; "natural-adam" has already found one."""
        diagonal = self.choices.diagonal
        problem = Problem(features, identity_prior(features), exact, diagonal=diagonal)
        if found.q is None:
            profile = Profile(found.model, features.data, fast, diagonal, tol=1e-8, sites=found.sites)
            return problem, newton(problem, profile.nearly_best(features), tol=Q_TOLERANCE, report=report)
        value, total = problem.evaluate(found.q, found.q.factor, gram=False)
        magnitude = total.magnitude
        return problem, Result(found.q, found.q.factor, value, found.converged, found.status, magnitude=magnitude)

    def solve_all(
        self, model: SparseGP, source: RowSource, scaler: Scaler, exact: Bound, near: Gaussian
    ) -> tuple[Problem, Result]:
        """The best q on all rows of a source, starting from the best q on a sample."""
        options, seen = self.choices.options, InducedSource(source, InducedView(model, scaler))
        problem = Problem(seen, identity_prior(seen), exact, diagonal=self.choices.diagonal)
        with closing(Progress(options.verbose, tasks_of(options), source.rows)) as progress:
            source.observe(progress.rows_done)
            start = gaussian(near.mean.cpu(), near.precision.cpu())
            return problem, newton(problem, start, tol=Q_TOLERANCE, report=progress)

    def posterior(self, result: Result) -> Full | Diagonal:
        return (Diagonal if self.choices.diagonal else Full)(result.q.mean, result.factor)

    def averaged(self, first: Component, families: list[Found], search: Search) -> list[Component]:
        """The components over which predictions are averaged, the fitted model first."""
        if not self.choices.averages(len(search.rows)):
            return [first]
        if search.marginal:
            families = [search.thinned(family) for family in families]
        mode, *others = weighted_components(points_to_average(families, search.generator), search)
        return [first._replace(weight=mode.weight, family=mode.family), *others]

    def update(self, known: Known, new: RowSource, seed: int) -> FittedProcess:
        options = self.choices.options
        few = new if new.rows <= PLACED_ROWS else new.sample(PLACED_ROWS, np.random.default_rng(0))
        rows = Observations.from_arrays(few.in_memory()).standardised(known.scaler, torch.device("cpu"))
        source = new if known.rows is None else joined_rows(known.rows, new)
        exact, _ = self.choices.bounds(seed)
        components: list[Component] = []
        with closing(Progress(options.verbose, None, source.rows)) as progress, pass_threads(options.n_jobs):
            source.observe(progress.rows_done)
            for component in reversed(known.components):  # the fitted model comes last; its fit is reported
                model = with_more_points(component.model, component.posterior, rows, new.rows / len(rows))
                sizes = len(component.model.inducing), len(model.inducing)
                start = with_more_values(component.posterior, *sizes).as_prior()
                induced = self.induced(source, model, known.scaler)
                prior = start if known.rows is None else identity_prior(induced)
                problem = Problem(induced, moved(prior, induced.device), exact, diagonal=self.choices.diagonal)
                near = as_start(moved(start, induced.device))
                result = newton(problem, near, tol=Q_TOLERANCE, report=progress)
                components.insert(0, component._replace(model=model, posterior=moved(self.posterior(result), "cpu")))
            return FittedProcess(
                [known.found._replace(model=model)],
                components,
                exact_elbo(problem, result),
                result,
                max(0.0, residual_cost(problem.source, self.posterior(result))),
                known.jitter,
                None,
                prior,
            )

    # --- what a fitted process says about rows ---

    def standardised(self, known: Arrays, scaler: Scaler) -> Observations:
        return Observations.from_arrays(known).standardised(scaler, self.device(known, known.rows))

    def induced(self, source: RowSource, model: SparseGP, scaler: Scaler, block_rows: int | None = None) -> RowSource:
        if source.traits.where != "memory":
            return InducedSource(source, InducedView(model, scaler))
        rows = self.standardised(source.in_memory(), scaler)
        with torch.no_grad():
            return Features(model.on(rows.inputs.device), rows, block_rows)

    def projected(self, source: RowSource, components: list[Component], scaler: Scaler) -> RowSource:
        if len(components) == 1:
            return self.induced(source, components[0].model, scaler)
        if source.traits.where == "memory":
            return averaged_rows(components, self.standardised(source.in_memory(), scaler))
        return InducedSource(source, AveragedView(tuple(components), scaler))

    def predictive(self, components: list[Component], scaler: Scaler) -> Any:
        return posterior_of(components)

    def summaries(self, draws: Tensor, summary: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Any], int]:
        return partial(summary_of_draws, draws=draws, summary=summary), len(draws)

    def table(self, component: Component, scaler: Scaler, labels: list[str]) -> "pandas.DataFrame":
        return hyperparameter_table(component.model, component.posterior, scaler, self.choices.names)


def averaged_rows(components: list[Component], rows: Observations) -> AveragedRows:
    return AveragedRows(Averaged(components, rows.inputs.device), rows, BLOCK_ROWS)
