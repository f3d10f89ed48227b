"""What the options of a Gaussian process mean: candidate kernels, inducing points, the search, averages."""

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from viper.gp.average import AVERAGED_ROWS
from viper.gp.kernels import NoKernel, check_shapes, make_kernel, make_mean
from viper.gp.model import Observations, Scaler, SparseGP
from viper.gp.search import FIRST_POINTS, LINE, Family, Found, Placing, Search
from viper.gp.starts import inducing_points, read_inducing
from viper.models.fitting import without_cusp
from viper.softplus.bounds import build_bound
from viper.softplus.limit import mixture
from viper.softplus.mixture_table import MIXTURES
from viper.softplus.pointwise import Bound

AUTO = "auto"
STATIONARY = ("rbf", "matern32", "matern52")  # kernels with lengthscales
MOST_LENGTHSCALES = 100  # most columns for which "auto" considers a lengthscale for each
DEFAULT_STEPS = {"profile": 300, "natural-adam": 1500}
SEARCH_ERROR = 1e-6  # nats per row; error of the bound in the search for hyperparameters


class Before(NamedTuple):
    """The previous result, from which a warm start begins."""

    model: SparseGP
    family: Family
    scaler: Scaler


@dataclass(frozen=True)
class Choices:
    """The options of an estimator, for the columns and classes of its rows."""

    options: Any  # the estimator
    classes: int

    @property
    def columns(self) -> int:
        return int(self.options.n_features_in_)

    @property
    def width(self) -> int:
        """Number of columns that the kernel sees."""
        return self.columns

    def scaler(self, rows: Observations) -> Scaler:
        """The standardisation of the rows for the kernel."""
        return Scaler.fit(rows, self.options.standardize)

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [str(x) for x in getattr(self.options, "feature_names_in_", [f"x{j}" for j in range(self.columns)])]

    @property
    def diagonal(self) -> bool:
        return bool(self.options.covariance == "diagonal")

    @property
    def steps(self) -> int:
        return int(self.options.max_iter or DEFAULT_STEPS[self.options.solver])

    @property
    def shape(self) -> str:
        kernel = self.options.kernel
        return kernel if isinstance(kernel, str) else type(kernel).__name__

    @property
    def places_as_needed(self) -> bool:
        """Whether there are as many inducing points as the kernel needs."""
        options = self.options
        automatic = isinstance(options.n_inducing, str) and isinstance(options.inducing, str)
        return automatic and options.inducing == "greedy" and options.solver == "profile"

    def bounds(self, seed: int) -> tuple[Bound, Bound]:
        """The bound to maximise, and a fast approximation of it for the search."""
        options = self.options
        chosen = build_bound(options.bound, options.terms, options.samples, options.nodes, seed, None)
        if options.bound != "viper" or options.terms is not None:
            chosen = without_cusp(chosen)
            return chosen, chosen
        return chosen, mixture(next(table for table in MIXTURES if table.error <= SEARCH_ERROR))

    def averages(self, rows: int) -> bool:
        """Whether predictions are averaged over hyperparameters, which must then all have priors."""
        options = self.options
        named = self.shape in (*STATIONARY, AUTO) and isinstance(options.mean, str) and options.priors is not None
        few = options.lengthscales == "one" or self.width <= MOST_LENGTHSCALES
        averaged = options.hyperparameters == "average" and options.solver == "profile"
        return named and few and averaged and rows <= AVERAGED_ROWS

    # --- kernels ---

    def families(self) -> list[Family]:
        """The kernels to choose from; only one without priors or with "natural-adam"."""
        options, only = self.options, self.only_family()
        shapes = STATIONARY if only.shape == AUTO else (only.shape,)
        choosing = options.lengthscales == AUTO and options.priors is not None and options.solver == "profile"
        if shapes[0] in STATIONARY and choosing and 1 < self.width <= MOST_LENGTHSCALES:
            return [Family(shape, many) for shape in shapes for many in (False, True)]
        return [Family(shape, only.many) for shape in shapes]

    def only_family(self) -> Family:
        """The family, if there is no choice."""
        options = self.options
        few = options.priors is not None and options.solver == "profile" and self.width > MOST_LENGTHSCALES
        return Family(self.shape, options.lengthscales == "many" or (options.lengthscales == AUTO and not few))

    def kernel_and_mean(self, family: Family) -> tuple[Any, Any]:
        options = self.options
        chosen = NoKernel() if family == LINE else family.shape if isinstance(options.kernel, str) else options.kernel
        kernel = make_kernel(chosen, self.columns, priors=options.priors, many=family.many, names=self.names)
        priors = "default" if self.classes > 2 else options.priors  # the weights of each class are always part of q
        return kernel, make_mean(options.mean, self.columns, priors=priors)

    def line(self, rows: Observations) -> dict[Family, SparseGP]:
        """The model without a kernel, if the average includes it: only for two classes."""
        if self.classes > 2 or self.options.mean != "linear" or not self.averages(len(rows)):
            return {}
        return {LINE: self.model_of(LINE, rows.inputs[:0], False).to(rows.inputs)}

    def model_of(self, family: Family, points: Tensor, learn: bool) -> SparseGP:
        return SparseGP(*self.kernel_and_mean(family), points, learn, float(self.options.jitter))

    # --- inducing points, and the search ---

    def inducing(self, rows: Observations, scaler: Scaler, generator: np.random.Generator) -> tuple[Tensor, bool]:
        """Where the inducing points start, and whether they are learned."""
        options = self.options
        if not isinstance(options.inducing, str):
            points = scaler.apply(read_inducing(options.inducing, rows.inputs.shape[1]))
            return torch.from_numpy(points).to(rows.inputs), bool(options.learn_inducing)
        automatic = isinstance(options.n_inducing, str)
        count = FIRST_POINTS if automatic else int(options.n_inducing)
        if count >= len(rows):
            return torch.unique(rows.inputs, dim=0), False
        seed = int(generator.integers(2**31))
        return inducing_points(rows, count, options.inducing, seed), bool(options.learn_inducing) and not automatic

    def search(self, search: Search, scaler: Scaler, before: Before | None) -> list[Found]:
        """The best model of each family, the best family first."""
        rows, options = search.rows, self.options
        if before is not None:
            again = {before.family: copy.deepcopy(before.model).to(rows.inputs), **self.line(rows)}
            return self.climb(search, again, 1, "as given")
        points, learn = self.inducing(rows, scaler, search.generator)
        models: dict[Family, SparseGP] = {}
        for family in self.families():
            model = self.model_of(family, points.clone(), learn).to(rows.inputs)
            check_shapes(model.kernel, model.mean, rows.inputs[:2])
            models[family] = model
        models |= self.line(rows)
        greedily = isinstance(options.inducing, str) and options.inducing == "greedy"
        placing: Placing = "as needed" if self.places_as_needed else "greedily" if greedily else "as given"
        return self.climb(search, models, int(options.n_starts), placing)

    def climb(self, search: Search, models: dict[Family, SparseGP], count: int, placing: Placing) -> list[Found]:
        if self.options.solver == "natural-adam":
            (family, model), *_ = models.items()
            found = search.natural_adam(model, float(self.options.learning_rate), self.options.batch_size, placing)
            return [found._replace(family=family)]
        return search.families(models, count, placing, self.averages(len(search.rows)))
