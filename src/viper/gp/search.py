"""The search for kernel, mean function and inducing points.

Several starts climb the profile, on a sample if there are many rows. Those that fall behind are dropped, and the best
one continues to the maximum, at the end on all rows. Inducing points that are not learned are placed again on the way,
as many as the kernel needs.

Families of kernels (one lengthscale or many, different shapes) are compared by their evidence. With k hyperparameters
and curvature H at the mode, Laplace's approximation is

    log ∫ e^{G(θ)} p(θ) dθ ≈ G + log p + ½ k log 2π - ½ log |H|.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from viper.gp.kernels import stationary_shape
from viper.gp.lbfgs import Climb
from viper.gp.model import Features, Observations, Sites, SparseGP
from viper.gp.natural_adam import natural_adam
from viper.gp.profile import Profile
from viper.gp.starts import AS_GIVEN, Candidate, candidates, greedy, null_model
from viper.inference.newton import Iteration
from viper.inference.problem import Gaussian, gaussian
from viper.inference.threads import PASS_THREADS, one_thread
from viper.softplus.pointwise import Bound

RACE_ROWS = 4_000  # rows on which the starts of larger fits race
LEAST_TOGETHER = 1e7  # least rows × points² for starts to climb on several threads
MOST_ON_CPU = 1e7  # most rows × points² of a climb that stays on the CPU
GROWTH = 8  # factor by which the number of rows grows from stage to stage
FEW_ROWS = 10_000  # up to this many rows, tolerances are in nats; beyond, in nats per this many rows
SAMPLE_TOLERANCE = 0.05  # nats on a sample; smaller gains say nothing about all rows
FIRST_TOLERANCE = 0.1  # nats; tolerance of the inner problem at the beginning
LAST_SHARE = 0.01  # tolerance of the inner problem at the end, as a share of the tolerance for steps
INNER_SHARE = 0.1  # error of the inner maximum, as a share of a step's gain
# For the race:
MEAN_LAST_STEPS = 6
ROUND = 5  # steps
SURVIVORS = {10: 2, 20: 1}  # after this many steps, at most this many starts are left
QUICK_SURVIVORS = {5: 1}  # the same if priors leave few optima
HOPE = 2.0  # a start is dropped if even this many times the gain of its last round would not reach the best
MET = 0.7  # kernels count as equal if no parameter (log scale) differs by more: a factor of two
# For inducing points that are not learned:
FIRST_POINTS = 64  # number in the race
MOST_GROWTHS = 2  # how often they are placed again
CLIMBING_POINTS = 200  # largest number in a climb
CLIMBING_TOLERANCE = 0.1  # nats; hyperparameters need not be known better
ROUGHER = 0.5  # factor of the lengthscales: a climb has enough points for a kernel this much rougher
SOLVING_BUDGET = 1e9  # rows × points² of the final q
FEWEST_POINTS, MOST_POINTS_PLACED = 100, 1000  # limits of the number that this budget allows
LARGEST_LOSS = 0.5  # nats of the ELBO that may be lost for want of points
# For the curvature:
DIFFERENCE = 0.1  # change of a log scale over which gradients are compared
MOST_DIFFERENCES = 12
CURVATURE_TOLERANCE = 1e-4  # nats; tolerance of the inner problem
LEAST_CURVATURE = 0.25  # that of a standard deviation of 2, a factor of seven in a scale
HOPELESS = 5.0  # nats; families further behind after the race are dropped
UNITS = (0.05, 20.0)  # inducing points move in units of the lengthscales, limited to this range

Answer = TypeVar("Answer")
StepReport = Callable[[int, float, float], None]  # rows, objective, gain of a step


def report_nothing(rows: int, objective: float, gain: float) -> None:
    pass


Placing = Literal["as given", "greedily", "as needed"]  # inducing points: given, a given number, or as many as needed


class Family(NamedTuple):
    """Kernels of one shape, with one lengthscale or one per column. The evidence decides among families."""

    shape: str
    many: bool

    def __str__(self) -> str:
        if self == LINE:
            return "a line"
        return f"{self.shape}, {'many lengthscales' if self.many else 'one lengthscale'}"


ANY_FAMILY = Family("", True)
LINE = Family("line", False)  # no kernel: f is the mean function alone


class Start(NamedTuple):
    """One start: its name, the objective it reached, and its cost.

    The objective is the profile of the ELBO as the search computes it (to 1e-6 nats per row), plus the log prior of the
    hyperparameters if they have one. With n_inducing="auto", residuals are integrated out (model.py), which is not a
    bound.
    """

    start: str
    elbo: float
    evaluations: int
    seconds: float


class Found(NamedTuple):
    """The model that was found, with its q if the search determined it, otherwise with sites close to it."""

    model: SparseGP
    starts: list[Start]
    steps: int
    converged: bool
    q: Gaussian | None = None
    sites: Sites | None = None
    family: Family = ANY_FAMILY
    evidence: float = 0.0  # log evidence of the family, as in the module's docstring
    spread: np.ndarray | None = None  # S with SSᵀ = H⁻¹, the covariance of the hyperparameters

    def on(self, device: torch.device) -> "Found":
        """The model and its sites on a device."""
        if self.model.inducing.device == device:
            return self
        return self._replace(model=self.model.on(device), sites=None if self.sites is None else self.sites.on(device))

    @property
    def status(self) -> str:
        steps = f"{self.steps} steps for hyperparameters" if self.q is None else f"{self.steps} passes"
        return "converged" if self.converged else f"not converged in {steps}"


@dataclass(frozen=True)
class Search:
    """The rows, the bound, the limits and the random numbers of a search, by either solver."""

    rows: Observations
    bound: Bound
    diagonal: bool
    steps: int
    tol: float
    generator: np.random.Generator
    progress: Callable[[Iteration], None] | None = None
    marginal: bool = False  # whether residuals of rows are integrated out (model.py)
    represented: float = 1.0  # rows that each row stands for, if the rows are a sample

    def families(self, models: dict[Family, SparseGP], count: int, placing: Placing, curvature: bool) -> list[Found]:
        """The best model of each family, the best kernel first.

        A family with many lengthscales also starts from the best kernel with one. Families that are far behind after
        the race are dropped.
        """
        sizes = stages(len(self.rows))
        few = self.nearby(self.sample(sizes[0]), max(model.dimension for model in models.values()))
        leaders: list[Leader] = []
        kernels = len(models.keys() - {LINE})
        for family, model in ((family, model.on(few.inputs.device)) for family, model in models.items()):
            known = [
                with_scales_of(x.best.model, model) for x in leaders if x.family.shape == family.shape and family.many
            ]
            number = count if kernels == 1 else min(count, 2)
            leader = self.race(few, model, number, placing, known, quick=curvature and self.marginal)
            spread = self.spread(leader.best.model, few) if curvature or len(models) > 1 else None
            prefix = f"{family}: " if kernels > 1 else ""
            leaders.append(replace(leader, family=family, spread=spread, prefix=prefix))
        leaders.sort(key=lambda x: (x.family == LINE, -x.evidence))
        least = min(max(leader.evidence for leader in leaders) - HOPELESS, leaders[0].evidence)
        hopeful = [leader for leader in leaders if leader.evidence >= least]
        others = [start for leader in leaders if leader.evidence < least for start in leader.found().starts]
        for leader in hopeful:
            for size in sizes[1:]:
                leader.attempts.append(self.continue_on(leader.best, self.sample(size)))
            if placing == "as needed":
                self.grow(leader)
        best, *rest = sorted(
            (leader.found().on(self.rows.inputs.device) for leader in hopeful),
            key=lambda x: (x.family == LINE, -x.evidence),
        )
        return [best._replace(starts=[*best.starts, *others]), *rest]

    def spread(self, model: SparseGP, rows: Observations) -> np.ndarray:
        """S with SSᵀ = H⁻¹, where H, the curvature at the mode, is estimated by differences of the gradient.

        With many lengthscales, only those that the data have pulled furthest from their prior get a difference each.
        The others share one, because their part of H is nearly diagonal.
        """
        model = model.copy_at()
        profile = self.profile_on(model, rows, CURVATURE_TOLERANCE)
        x, own = model.free_vector(), furthest_from_prior(model)
        others = np.where(own, 0.0, (-1.0) ** np.arange(len(x)))
        base = profile(x)[1]
        change = lambda step: (base - profile(x + DIFFERENCE * step)[1]) / DIFFERENCE  # noqa: E731
        H = np.diag(others if own.all() else others * change(others))
        H[own] = np.array([change(unit) for unit in np.eye(len(x))[own]]).reshape(own.sum(), len(x))
        H[:, own] = np.where(own[:, None], 0.5 * (H[:, own] + H[own].T), H[own].T)
        H[own] = H[:, own].T
        values, vectors = np.linalg.eigh(H)
        return vectors / np.sqrt(np.maximum(values, LEAST_CURVATURE))

    def race(
        self, few: Observations, model: SparseGP, count: int, placing: Placing, known: list[Candidate], quick: bool
    ) -> "Leader":
        """Climb the profile from `count` starts and the known ones, on the rows `few`.

        A quick race is good enough for hyperparameters that will be averaged over.
        """
        tol = max(CLIMBING_TOLERANCE if quick else 0.0, self.tolerance(few))
        first = max(FIRST_TOLERANCE, tol) if count > 1 else LAST_SHARE * tol
        report = self.reporter()
        starts = self.candidates(model, few, count)
        if known:  # these replace the model as given
            starts = itertools.chain((start for start in starts if start.name != AS_GIVEN), known)
        begun = starts if placing == "as given" else self.with_greedy_points(starts, model, few)
        attempts = [Attempt(start, lambda m: self.profile_on(m, few, first), report) for start in begun]
        best = race(attempts, self.steps, tol, QUICK_SURVIVORS if quick else SURVIVORS)
        if not math.isfinite(best.value):
            Features(best.model, few.take(slice(0, 2)))  # raises if the kernel is to blame
            raise ValueError("the ELBO must be finite for at least one start; got none. Check kernel and mean.")
        return Leader([*(x for x in attempts if x is not best), best])

    def grow(self, leader: "Leader") -> None:
        """While there are too few inducing points, climb on with as many as a rougher kernel would need."""
        for _ in range(MOST_GROWTHS):
            best = leader.best
            rows, information, rough = best.profile.rows, best.profile.information(), rougher(best.model)
            # if F includes the residual, a rougher kernel may be better and merely lack points
            judged = best.model if self.marginal else rough
            if information is None or loss(judged, rows, information) <= LARGEST_LOSS:
                return
            chosen_by = importance(rows) if self.marginal else information
            points = greedy(rough, rows.inputs, chosen_by, min(CLIMBING_POINTS, len(rows)), LARGEST_LOSS)
            if len(points) <= len(best.model.inducing):
                return
            leader.attempts.append(self.continue_with(best, points))

    def continue_with(self, best: "Attempt", points: Tensor) -> "Attempt":
        """Continue the best climb with other inducing points."""
        model = best.model.with_points(points)
        rows, sites = self.nearby(best.profile.rows, model.dimension), best.profile.last_sites()
        sites = None if sites is None else sites.on(rows.inputs.device)
        tol = max(CLIMBING_TOLERANCE, self.tolerance(rows))
        new = best.continued(
            f"{len(points)} inducing points",
            lambda model: self.profile_on(model, rows, max(FIRST_TOLERANCE, tol)).resumed(sites),
            model.on(rows.inputs.device),
        )
        new.run(self.steps, tol)
        return new

    def completed(self, found: Found, rows: int) -> Found:
        """Give the model as many inducing points as the posterior of `rows` rows needs, judged by its sites."""
        if found.sites is None:
            return found
        information = found.sites.information()
        most = points_within(SOLVING_BUDGET, rows)
        points = greedy(found.model, self.rows.inputs, information, min(most, len(self.rows)), LARGEST_LOSS)
        return found._replace(model=found.model.with_points(points))

    def thinned(self, found: Found) -> Found:
        """Drop inducing points that not even a rougher kernel needs, given the information of each row."""
        count = len(found.model.inducing)
        if not count or found.sites is None:
            return found
        points = greedy(rougher(found.model), self.rows.inputs, found.sites.information(), count, LARGEST_LOSS)
        return found._replace(model=found.model.with_points(points)) if len(points) < count else found

    def greedily(self, model: SparseGP, few: Observations, information: Tensor) -> Tensor:
        """Choose the model's inducing points among these few rows, or among all rows if these are too few."""
        count = len(model.inducing)
        if count < len(few):
            return greedy(model, few.inputs, information, count)
        if count < len(self.rows):
            return greedy(model, self.rows.inputs, self.information(model, self.rows), count)
        return model.inducing.detach()

    def with_greedy_points(
        self, starts: Iterator[Candidate], model: SparseGP, few: Observations
    ) -> Iterator[Candidate]:
        """The starts, each with inducing points chosen for its kernel."""
        information = importance(few) if self.marginal else self.information(model, few)
        for start in starts:
            with torch.no_grad():
                start.model.inducing.copy_(self.greedily(start.model, few, information))
            yield start

    def candidates(self, model: SparseGP, rows: Observations, count: int) -> Iterator[Candidate]:
        """Models to climb from."""
        return candidates(model, rows, count, self.generator)

    def information(self, model: SparseGP, rows: Observations) -> Tensor:
        """The information of each row under the mean function alone."""
        return null_model(model, rows)[1]

    def nearby(self, rows: Observations, dimension: int) -> Observations:
        """The rows, on the CPU if their products are too small for a GPU to be faster."""
        return rows.on("cpu" if len(rows) * dimension**2 <= MOST_ON_CPU else self.rows.inputs.device)

    def sample(self, size: int) -> Observations:
        return self.rows if size >= len(self.rows) else self.rows.scatter(size, self.generator)

    def profile_on(self, model: SparseGP, rows: Observations, tol: float, start: Gaussian | None = None) -> Profile:
        """The profile of all rows, estimated from `rows`."""
        scale = len(self.rows) / len(rows)
        return Profile(model, rows, self.bound, self.diagonal, scale, tol, start=start, marginal=self.marginal)

    def tolerance(self, rows: Observations) -> float:
        """The smallest gain worth a step. On a sample, gains below `SAMPLE_TOLERANCE` say nothing about all rows."""
        scale = self.represented * len(self.rows) / len(rows)
        asked = self.tol * max(1.0, len(rows) / FEW_ROWS)
        return max(asked, SAMPLE_TOLERANCE * scale) if scale > 1.0 else asked

    def continue_on(self, best: "Attempt", rows: Observations) -> "Attempt":
        """Continue the best climb on more rows."""
        model, q = best.model.on(rows.inputs.device), best.profile.posterior()
        if q is not None and q.mean.device != rows.inputs.device:
            q = gaussian(q.mean.to(rows.inputs), q.precision.to(rows.inputs))
        tol = self.tolerance(rows)
        new = best.continued(
            f"{len(rows):,} rows", lambda _: self.profile_on(model, rows, max(FIRST_TOLERANCE, tol), q), model
        )
        new.run(self.steps, tol)
        return new

    def reporter(self) -> StepReport:
        """Passes the steps of L-BFGS to `progress`, with the gain in place of the move of q."""
        began, lock = time.perf_counter(), Lock()

        def report(rows: int, objective: float, gain: float) -> None:
            if self.progress is not None:
                with lock:  # starts may climb together
                    self.progress(Iteration(rows, True, objective, 1.0, gain, time.perf_counter() - began))

        return report

    def natural_adam(self, model: SparseGP, learning_rate: float, batch_size: int | None, placing: Placing) -> Found:
        """The paper's recipe, from the kernel and mean as given."""
        began = time.perf_counter()
        if placing != "as given":
            few = self.sample(stages(len(self.rows))[0])
            with torch.no_grad():
                model.inducing.copy_(self.greedily(model, few, self.information(model, few)))
        q, history, converged = natural_adam(
            model,
            self.rows,
            self.bound,
            diagonal=self.diagonal,
            learning_rate=learning_rate,
            batch_size=batch_size,
            max_iter=self.steps,
            tol=self.tol,
            generator=self.generator,
        )
        start = Start(AS_GIVEN, max(history), len(history), time.perf_counter() - began)
        return Found(model, [start], len(history), converged, q)


def furthest_from_prior(model: SparseGP) -> np.ndarray:
    """Whether each free parameter is a scalar, or among the `MOST_DIFFERENCES` that the prior pulls on most."""
    single = np.concatenate([np.zeros(0, bool), *(np.full(x.numel(), x.numel() == 1) for x in model.free)])
    prior = model.log_prior()
    if len(single) <= MOST_DIFFERENCES or prior is None:
        return np.full_like(single, True)
    model.zero_grad(set_to_none=True)
    prior.backward()
    pull = np.where(single, np.inf, np.abs(model.free_gradient()))
    return pull >= np.sort(pull)[-MOST_DIFFERENCES]


def together(tasks: list[Callable[[], Answer]], size: float) -> list[Answer]:
    """The results of the tasks, run on the threads of this fit if products (rows × points²) are large enough.

    With small products, most of the time is spent under Python's lock. Results do not depend on the number of threads.
    """
    threads = min(PASS_THREADS.get(), len(tasks)) if size >= LEAST_TOGETHER else 1
    if threads <= 1:
        return [task() for task in tasks]

    def alone(task: Callable[[], Answer]) -> Answer:
        with one_thread():
            return task()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(alone, tasks))


def points_within(budget: float, rows: int) -> int:
    """The largest number M of inducing points with n M² within the budget."""
    return min(rows, int(np.clip(math.sqrt(budget / rows), FEWEST_POINTS, MOST_POINTS_PLACED)))


def loss(model: SparseGP, rows: Observations, information: Tensor) -> float:
    """½ Σ b r: about what the ELBO loses for want of inducing points, in nats, where b is each row's information."""
    with torch.no_grad():
        residuals = [block.residual for block in Features(model, rows, rough=True).blocks()]
    return 0.5 * float(information @ torch.cat([x for x in residuals if x is not None]))


def importance(rows: Observations) -> Tensor:
    """The largest information that each row may have, c/4.

    If points were chosen by information from the labels, the profile with few points would differ from that with all.
    """
    return torch.full_like(rows.label, 0.25) if rows.weight is None else 0.25 * rows.weight


def rougher(model: SparseGP) -> SparseGP:
    """The model with shorter lengthscales, if it has lengthscales."""
    if stationary_shape(model.kernel) is None:
        return model
    other = model.copy()
    other.kernel.base_kernel.initialize(lengthscale=ROUGHER * model.kernel.base_kernel.lengthscale.detach())
    return other


def with_scales_of(found: SparseGP, model: SparseGP) -> Candidate:
    """The model, with the scales found for only one lengthscale."""
    other = model.copy()
    length = found.kernel.base_kernel.lengthscale.detach()
    other.kernel.base_kernel.initialize(lengthscale=length.expand_as(other.kernel.base_kernel.lengthscale))
    other.kernel.initialize(outputscale=found.kernel.outputscale.detach())
    other.mean.load_state_dict(found.mean.state_dict())
    return Candidate("as with one lengthscale", other)


def stages(rows: int) -> list[int]:
    """The number of rows of each stage; the last stage uses all rows."""
    sizes, size = [], RACE_ROWS
    while 2 * size < rows:
        sizes.append(size)
        size *= GROWTH
    return [*sizes, rows]


# ---------------------------------------------------------------------------------------------------------------------
# The race


class Attempt:
    """One start and its climb; `report` is called after every step."""

    def __init__(
        self, candidate: Candidate, profile: Callable[[SparseGP], Profile], report: StepReport = report_nothing
    ) -> None:
        began = time.perf_counter()
        self.candidate, self.profile, self.report = candidate, profile(candidate.model), report
        self.spent = 0
        model = candidate.model
        held = [x for x in model.mean.parameters() if x.requires_grad] if candidate.mean_last else []
        if held:
            for parameter in held:
                parameter.requires_grad_(False)
            first = self.begin().run(MEAN_LAST_STEPS, 1e-2)
            self.spent = first.evaluations
            model.set_free(first.x)
            for parameter in held:
                parameter.requires_grad_(True)
        self.climb = self.begin()
        self.seconds = time.perf_counter() - began

    def begin(self) -> Climb:
        model = self.candidate.model
        return Climb(self.profile, model.free_vector(), parameter_units(model), parameter_groups(model))

    def run(self, steps: int, tol: float) -> None:
        """Take up to `steps` more steps; the smaller the last gain, the more precisely the inner problem is solved."""
        began = time.perf_counter()
        for _ in range(steps):
            if self.climb.finished:
                break
            before = self.climb.value
            self.climb.run(1, tol)
            gain = self.climb.value - before
            self.profile.tol = min(self.profile.tol, max(LAST_SHARE * tol, INNER_SHARE * gain))
            self.report(len(self.profile.rows), self.climb.value, gain)
        self.seconds += time.perf_counter() - began

    @property
    def value(self) -> float:
        return self.climb.value

    @property
    def model(self) -> SparseGP:
        """The model at the best θ found."""
        self.candidate.model.set_free(self.climb.x)
        return self.candidate.model

    def continued(self, name: str, profile: Callable[[SparseGP], Profile], model: SparseGP | None = None) -> "Attempt":
        """The same climb on other rows or inducing points, keeping what was learned about the curvature."""
        new = Attempt(Candidate(name, model or self.model), profile, self.report)
        new.climb.pairs.extend(self.climb.pairs)
        return new

    def account(self) -> Start:
        return Start(self.candidate.name, self.value, self.spent + self.climb.evaluations, self.seconds)


@dataclass(frozen=True)
class Leader:
    """The climbs of a family; the last one is the best."""

    attempts: list[Attempt]
    family: Family = ANY_FAMILY
    spread: np.ndarray | None = None
    prefix: str = ""  # put before the names of its starts

    @property
    def best(self) -> Attempt:
        return self.attempts[-1]

    @property
    def evidence(self) -> float:
        """The log evidence, as in the module's docstring."""
        if self.spread is None:
            return self.best.value
        return self.best.value + float(np.linalg.slogdet(math.sqrt(2.0 * math.pi) * self.spread)[1])

    def starts(self) -> list[Start]:
        return [start._replace(start=self.prefix + start.start) for start in (x.account() for x in self.attempts)]

    def found(self) -> Found:
        climb, sites = self.best.climb, self.best.profile.last_sites()
        return Found(
            self.best.model,
            [] if self.family == LINE else self.starts(),
            climb.steps,
            climb.finished,
            sites=sites,
            family=self.family,
            evidence=self.evidence,
            spread=self.spread,
        )


def race(attempts: list[Attempt], steps: int, tol: float, survivors: dict[int, int]) -> Attempt:
    """Climb a little from all starts, further from the better ones, and to the top from the best (`steps` at most)."""
    still = attempts
    done = 0
    while len(still) > 1 and done < min(steps, max(survivors)):
        before = [attempt.value for attempt in still]
        together([partial(attempt.run, min(ROUND, steps - done), tol) for attempt in still], still[0].profile.size)
        done += ROUND
        best = max(attempt.value for attempt in still)
        hoped = [attempt.value + HOPE * (attempt.value - value) for attempt, value in zip(still, before, strict=True)]
        still = [attempt for attempt, hope in zip(still, hoped, strict=True) if hope >= best]
        still = distinct_attempts(sorted(still, key=lambda attempt: -attempt.value))[: survivors.get(done)]
    winner = max(still, key=lambda attempt: attempt.value)
    winner.run(max(0, steps - winner.climb.steps), tol)
    return winner


def distinct_attempts(attempts: list[Attempt]) -> list[Attempt]:
    """The attempts, without those whose kernel has become equal to that of a better one."""
    kept: list[Attempt] = []
    scales: list[np.ndarray] = []
    for attempt in attempts:
        kernel = [x.detach().cpu().numpy().reshape(-1) for x in attempt.model.kernel.parameters() if x.requires_grad]
        mine = np.concatenate([*kernel, np.zeros(0)])
        if not len(mine) or all(np.abs(mine - other).max() > MET for other in scales):
            kept.append(attempt)
            scales.append(mine)
    return kept


def parameter_units(model: SparseGP) -> np.ndarray:
    """The scale of changes in each free parameter: for an inducing point, one lengthscale."""
    scaled = stationary_shape(model.kernel) is not None
    length = model.kernel.base_kernel.lengthscale.detach().cpu().numpy().clip(*UNITS) if scaled else 1.0
    parts = [np.ones(x.shape) * (length if x is model.inducing else 1.0) for x in model.free]
    return np.concatenate([part.reshape(-1) for part in parts]) if parts else np.zeros(0)


def parameter_groups(model: SparseGP) -> np.ndarray:
    """The group of each free parameter, by curvature: one per tensor, and one per column of the inducing points."""
    parts: list[np.ndarray] = []
    for x in model.free:
        first = parts[-1].max() + 1 if parts else 0
        own = np.arange(x.shape[1]) if x is model.inducing else np.zeros(1, dtype=np.intp)
        parts.append(np.broadcast_to(first + own, x.shape or (1,)).reshape(-1))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.intp)
