"""Fits Gaussian processes of K classes: the search for the kernel they share, then q at the kernel found."""

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.errors import shown
from viper.gp.average import Component, points_to_average
from viper.gp.classes.mixture import AVERAGED_ENTRIES, weighted_class_components
from viper.gp.classes.rows import ClassFeatures, merged_by_class
from viper.gp.classes.search import ClassSearch
from viper.gp.model import InducedSource, InducedView, Observations, Scaler, SparseGP
from viper.gp.profile import identity_prior
from viper.gp.search import Found
from viper.inference.classes.posterior import StarPosterior, posterior_of_star
from viper.inference.classes.problem import ClassProblem
from viper.inference.classes.solver import StarResult, fit_star
from viper.inference.classes.star import Star
from viper.inference.device import choose_device
from viper.inference.posterior import moved
from viper.inference.progress import Progress, tasks_of
from viper.inference.rows import Arrays, Block, RowSource, joined_rows
from viper.inference.threads import pass_threads
from viper.models.classes.fitting import FittedClasses

MOST_STAR_STEPS = 500
FEWEST_ON_GPU = 100_000  # rows × classes; with fewer, a GPU takes longer than the compiled pass


class FittedProcesses(NamedTuple):
    """What was found: the kernel of each family, q with its problem, and the components to average over."""

    families: list[Found]
    fit: FittedClasses
    components: list[Component]
    jitter: float


def check_class_options(model: Any) -> None:
    """Raise if an option is for two classes only."""
    K = len(model.classes_)
    if model.solver != "profile":
        raise ValueError(f"solver must be 'profile' for {K} classes; got {model.solver!r}, which is for two.")
    if model.bound != "viper" or model.terms is not None:
        got = model.bound if model.bound != "viper" else f"terms={model.terms}"
        raise ValueError(f"the expectation is exact for {K} classes; got {shown(got)}, which is for two. Leave it out.")
    if not isinstance(model.mean, str):
        raise ValueError(
            f"mean must be a name for {K} classes; got {type(model.mean).__name__}. A function that all classes share "
            "changes no probability."
        )


def fit_processes(
    model: Any, known: Arrays, source: RowSource | None, random: np.random.RandomState
) -> FittedProcesses:
    """Search on rows in memory, then fit q to them or, if they are a sample, to all rows of their source."""
    check_class_options(model)
    before, classes, diagonal = model._before(), len(model.classes_), model.covariance == "diagonal"
    rows = merged_by_class(Observations.from_arrays(known))
    if before is None:
        model._scaler = Scaler.fit(rows, model.standardize)
    device = (
        choose_device(model.device, known.features) if len(rows) * classes >= FEWEST_ON_GPU else torch.device("cpu")
    )
    rows = rows.standardised(model._scaler, device)
    exact, _ = model._bound(int(random.randint(2**31)))
    generator = np.random.default_rng(random.randint(2**31))
    steps = int(model.max_iter or model._default_steps())
    progress = Progress(model.verbose, tasks_of(model), len(rows))
    search = ClassSearch(rows, exact, diagonal, steps, float(model.tol), generator, progress, classes=classes)
    with closing(progress), pass_threads(model.n_jobs):
        families = model._search(search, before)
        if before is None and model._places_as_needed():
            families = [search.completed(x, len(rows) if source is None else source.rows) for x in families]
        found = families[0]
        with torch.no_grad():
            features = ClassFeatures(found.model, rows)
        problem, result = best_star(found, features, classes, diagonal, progress)
        components = averaged_classes(model, families, search) if source is None else []
        if source is not None:
            everything = InducedSource(source, InducedView(found.model.on("cpu"), model._scaler, ClassFeatures))
            problem = ClassProblem(everything, classes, identity_prior(everything), diagonal)
            source.observe(progress.rows_done)
            result = fit_star(problem, Star(result.q.mean.cpu(), result.q.precision.cpu()), report=progress)
    fit = FittedClasses(moved(posterior_of_star(result.q), "cpu"), problem.prior, problem, result)
    return FittedProcesses(families, fit, components, features.jitter)


def update_processes(model: Any, new: RowSource) -> tuple[FittedClasses, list[Component]]:
    """Find q again for all rows or, if only the new ones are known, with q so far as their prior; kernels stay."""
    known, classes = model._raw_rows, len(model.classes_)
    source = new if known is None else joined_rows(known, new)
    components: list[Component] = []
    with closing(Progress(model.verbose, None, source.rows)) as progress, pass_threads(model.n_jobs):
        source.observe(progress.rows_done)
        for component in reversed(model.components_):  # the fitted model is the first, and stays
            posterior: Any = component.posterior
            rows = projected(source, component.model, model._scaler)
            prior = identity_prior(rows) if known is not None else posterior.as_prior()
            problem = ClassProblem(rows, classes, prior, model.covariance == "diagonal")
            result = fit_star(problem, posterior.star, report=progress, max_iter=MOST_STAR_STEPS)
            fit = FittedClasses(moved(posterior_of_star(result.q), "cpu"), prior, problem, result)
            components.insert(0, component._replace(posterior=fit.posterior))
    return fit, components


def class_residual_cost(fit: FittedClasses) -> float:
    """Σ_i c_i {η(ϑ_i, τ_i²) - η(ϑ_i, τ_i² - r_i)}: what inducing points cost, in nats."""
    posterior = moved(fit.posterior, fit.problem.source.device)
    cost = fit.problem.source.reduce(partial(block_class_cost, posterior=posterior))[0]
    return max(0.0, float(cost))


def block_class_cost(block: Block, posterior: StarPosterior) -> list[Tensor]:
    free, full = (posterior.expected_log_likelihoods(x) for x in (replace(block, residual=None), block))
    return [(free - full).sum() if block.weight is None else block.weight @ (free - full)]


def projected(source: RowSource, model: SparseGP, scaler: Scaler, block_rows: int | None = None) -> RowSource:
    """The rows of any source, projected on inducing points."""
    if source.traits.where != "memory":
        return InducedSource(source, InducedView(model, scaler, ClassFeatures))
    rows = Observations.from_arrays(source.in_memory()).standardised(scaler, torch.device("cpu"))
    with torch.no_grad():
        return ClassFeatures(model, rows, block_rows)


def best_star(
    found: Found, features: ClassFeatures, classes: int, diagonal: bool, progress: Progress
) -> tuple[ClassProblem, StarResult]:
    """The best q at the chosen θ, to full precision."""
    problem = ClassProblem(features, classes, identity_prior(features), diagonal)
    near = None if found.sites is None else found.sites.star(problem)  # type: ignore[attr-defined]
    return problem, fit_star(problem, near, report=progress, max_iter=MOST_STAR_STEPS)


def averaged_classes(model: Any, families: list[Found], search: ClassSearch) -> list[Component]:
    """The components over which predictions are averaged, the mode first; none if that would take long."""
    size = max(found.model.dimension for found in families)
    if not model._averages(search.rows) or len(search.rows) * search.classes * size**2 > AVERAGED_ENTRIES:
        return []
    return weighted_class_components(points_to_average(families, search.generator), search)
