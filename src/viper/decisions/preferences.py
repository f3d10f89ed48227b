"""Which items to compare next: acquisition functions of pairs, for a `VariationalPreferenceGP`.

The answer for the pair (x, x') has the log-odds d = f(x) - f(x'), whose mean δ and variance σ² follow from the joint
posterior of f. Both functions are closed forms with gradients in the items:

    information  H(E s(d)) - E H(s(d)),      expected best  E max(f(x), f(x')) = ϑ' + δ Φ(δ/σ) + σ φ(δ/σ).

The expected best is averaged over the components of the model. Of more than two items, for answers that choose one of
k, it is that of joint draws.

Whatever a pending answer will be, it adds a precision of h = E s'(d) along d, as a label does along f
(`viper.decisions.latent`).
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from viper.data.checks import check_word, read_whole
from viper.decisions.acquisition import BATCH_DRAWS, Acquisition, read_array
from viper.decisions.inputs import CANDIDATES, Inputs
from viper.decisions.latent import EstimatorLatent, Joint, LatentModel, label_precisions
from viper.errors import shown
from viper.gp.joint import LEAST_LATENT_VARIANCE, joint_draws, sobol_uniforms
from viper.softplus.information import answer_information
from viper.softplus.normal import cdf, difference, pdf

if TYPE_CHECKING:
    from viper.gp.pairs.preference import VariationalPreferenceGP

ANSWERS = {"first": 1.0, "tie": 0.5, "second": 0.0}
AVERAGES = ("values", "moments")
ITEMS_AT_ONCE = 1_024


class PairConditioned:
    """The utilities once pending pairs, 2k items one pair after the other, have been answered."""

    def __init__(self, latent: LatentModel, pending: Tensor | None) -> None:
        self.latent = latent
        self.fixed = None if pending is None else latent.fixed(pending)
        if self.fixed is None:
            return
        pairs = len(self.fixed.mean) // 2
        # S f are the differences of the pairs
        self.signs = torch.kron(torch.eye(pairs), torch.tensor([[1.0, -1.0]])).to(self.fixed.mean)
        C = self.signs @ self.fixed.covariance @ self.signs.T
        self.noisy = C + torch.diag(1.0 / label_precisions(self.signs @ self.fixed.mean, C))

    def joint(self, X: Tensor) -> Joint:
        """f at items X, b × q × p."""
        found = self.latent.joint(X, self.fixed)
        if self.fixed is None:
            return found
        # C_xx' - Cov(f_x, d) (C_dd + diag 1/h)⁻¹ Cov(d, f_x')
        toward = found.across @ self.signs.T
        C = found.covariance - toward @ torch.linalg.solve(self.noisy, toward.mT)
        return Joint(found.mean, C, found.across[..., :0])


class PairAcquisition(Acquisition):
    """A function of pairs of items. A tensor or array of batches × 2 × columns gives a number for each batch."""

    _most_items: int | None = 2

    def __init__(self, model: Any, *, pending: Any = None) -> None:
        if getattr(model, "process_", None) is None:
            raise TypeError(f"model must be a fitted VariationalPreferenceGP; got {type(model).__name__}. Call fit.")
        super().__init__(EstimatorLatent(model), pending=pending)
        self.model = model

    def set_X_pending(self, X_pending: Any = None) -> None:
        """Set the pairs that await their answers: 2k items, one pair after the other."""
        if X_pending is not None and np.ndim(X_pending) == 3:  # pairs
            X_pending = X_pending.reshape(-1, X_pending.shape[-1])
        self.X_pending = None if X_pending is None else self._read_points(X_pending, "pending")
        if self.X_pending is not None and len(self.X_pending) % 2:
            raise ValueError(f"pending must be pairs of items; got {len(self.X_pending)} items. Pass 2k rows.")
        if self.X_pending is not None and not len(self.X_pending):
            self.X_pending = None
        self._pairs = PairConditioned(self.latent, self.X_pending)

    def forward(self, X: Tensor) -> Tensor:
        """The values of b batches of items."""
        return self.of_batch(self._pairs.joint(X))

    def __call__(self, X: Any) -> Any:
        """The value of each batch of items."""
        tensor = X if isinstance(X, Tensor) else torch.from_numpy(read_array(X, "X"))
        if not bool(tensor.isfinite().all()):
            raise ValueError("X must be finite; got NaN or infinity.")
        few, most = tensor.shape[-2] if tensor.ndim > 1 else 0, self._most_items
        if tensor.ndim < 2 or few < 2 or (most is not None and few > most):
            count = "2" if most == 2 else "at least 2"
            raise ValueError(f"X must be batches × {count} items × columns; got shape {tuple(tensor.shape)}.")
        if not len(tensor):
            raise ValueError("X must have at least one batch of items; got none.")
        if isinstance(X, Tensor):
            return super().__call__(X)
        with torch.no_grad():
            return super().__call__(tensor).numpy()


class PairInformation(PairAcquisition):
    """H(E s(d)) - E H(s(d)), in nats: what the answer says about d = f(x) - f(x'), called BALD. In closed form.

    Parameters
    ----------
    model : VariationalPreferenceGP
        Fitted.
    pending : tensor or array (2k, columns), optional
        Pairs that await their answers, item by item.
    """

    def of_batch(self, joint: Joint) -> Tensor:
        mean, variance = difference(joint.mean, joint.covariance)
        return answer_information(mean, variance.clamp(min=LEAST_LATENT_VARIANCE))


class ExpectedBest(PairAcquisition):
    """E max f over the items of a batch, called EUBO: closed form for two, joint draws for more.

    Asking for the better of two items with the largest expected best finds the best item (Astudillo et al. 2023).

    The expectation is that given hyperparameters, averaged over them. With the moments of their mixture,
    ``average="moments"``, it asks about items that are further apart: where only the scale of f is uncertain, their
    difference has a large variance although it is certain which of them is better.

    Parameters
    ----------
    model, pending
        As in `PairInformation`.
    average : {"values", "moments"}, default "values"
        How to average over hyperparameters: the expected best given each component, or the moments of f.
    draws, random_state : int, default 256 and 0
        Joint draws of more than two items, by a scrambled Sobol sequence, and their seed.
    """

    _most_items = None

    def __init__(
        self,
        model: Any,
        *,
        average: str = "values",
        draws: int = BATCH_DRAWS,
        random_state: int = 0,
        pending: Any = None,
    ) -> None:
        check_word(average, "average", AVERAGES)
        self.average = average
        self.draws, self.random_state = read_whole(draws, "draws", 1), int(random_state)
        super().__init__(model, pending=pending)

    def set_X_pending(self, X_pending: Any = None) -> None:
        super().set_X_pending(X_pending)
        if self.average == "values":
            weights, latents = components_of(self.latent)
            self._weights, self._given = weights, [PairConditioned(one, self.X_pending) for one in latents]

    def forward(self, X: Tensor) -> Tensor:
        if self.average == "moments":
            return super().forward(X)
        return self._weights @ torch.stack([self.of_batch(given.joint(X)) for given in self._given])

    def of_batch(self, joint: Joint) -> Tensor:
        if joint.mean.shape[1] == 2:
            mean, variance = difference(joint.mean, joint.covariance)
            return joint.mean[:, 1] + expected_positive_part(mean, variance.clamp(min=LEAST_LATENT_VARIANCE))
        uniform = sobol_uniforms(self.draws, joint.mean.shape[1], self.random_state).to(joint.mean)
        return joint_draws(joint.mean, joint.covariance, uniform).amax(-1).mean(1)


def components_of(latent: Any) -> tuple[Tensor, list[LatentModel]]:
    """The weights of the components of a preference model, and the utilities given each."""
    found = []
    for part in latent.process.parts:
        one = copy.copy(latent)
        one.process = part
        found.append(one)
    return latent.process.weights, found


class PairInputs(Inputs):
    """Pairs of items as points with twice the inputs: first the numbers of one item, then those of the other."""

    def __init__(self, items: Inputs) -> None:
        self.items = items
        self.names, self.labels = items.names, [*items.labels, *items.labels]
        self.parts, self.constraints = [*items.parts, *items.parts], [*items.constraints, differ]

    def halves(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return numbers[:, : len(self.items)], numbers[:, len(self.items) :]

    def columns(self, numbers: np.ndarray) -> np.ndarray:
        """Pairs as acquisition functions see them: n × 2 × columns."""
        return np.stack([self.items.columns(half) for half in self.halves(numbers)], 1)

    def point(self, numbers: np.ndarray) -> Any:
        """The two items of a pair."""
        return tuple(self.items.point(half[0]) for half in self.halves(numbers[None]))

    def values(self, numbers: np.ndarray) -> Any:
        """Pairs as a list of two items each; as an array n × 2 × inputs, if inputs have no names."""
        if self.names is None:
            return np.stack(self.halves(numbers), 1)
        return [self.point(row) for row in numbers]

    def read(self, x: Any) -> np.ndarray:
        """A pair of items, or several pairs, as numbers."""
        if isinstance(x, np.ndarray | Tensor):
            x = list(np.asarray(x) if np.ndim(x) == 3 else np.asarray(x)[None])
        if isinstance(x, Mapping):
            raise TypeError(f"an answer must be about a pair of points, as `ask` returns it; got one, {shown(x)}.")
        several = isinstance(x, list) and bool(x) and np.shape(x[0])[:1] == (2,) and not is_item(x[0], len(self.items))
        pairs = [self.items.read(list(pair)) for pair in (x if several else [x]) if hasattr(pair, "__iter__")]
        if not pairs or any(len(pair) != 2 for pair in pairs):
            raise TypeError(f"an answer must be about a pair of points, as `ask` returns it; got {shown(x)}.")
        if same := [pair for pair in pairs if (pair[0] == pair[1]).all()]:
            raise ValueError(f"the points of a pair must differ; got {shown(self.items.point(same[0][0]))} twice.")
        return np.array([pair.ravel() for pair in pairs])

    def allowed(self, numbers: np.ndarray) -> np.ndarray:
        first, second = self.halves(numbers)
        kept = np.any(first != second, 1)
        return kept & self.items.allowed(first) & self.items.allowed(second) if self.items.constraints else kept

    def rivals(self, champion: np.ndarray, seed: int) -> np.ndarray:
        """The champion paired with many other items."""
        others = self.items.spread(CANDIDATES, seed + 1)
        pairs = np.hstack([np.broadcast_to(champion, others.shape), others])
        return pairs[self.allowed(pairs)]


def is_item(x: Any, inputs: int) -> bool:
    """Whether x is one item rather than two."""
    return isinstance(x, Mapping) or (np.ndim(x) == 1 and len(x) == inputs and not isinstance(x[0], Mapping))


def differ(pair: Any) -> bool:
    """The constraint on every pair; `PairInputs.allowed` checks it."""
    return pair[0] != pair[1]


def fit_preferences(pairs: np.ndarray, answers: np.ndarray, **options: Any) -> "VariationalPreferenceGP":
    """Fit utilities to pairs, n × 2 × columns, with answers as numbers of `ANSWERS`."""
    from viper.gp.pairs.preference import VariationalPreferenceGP

    n = len(pairs)
    items = pairs.reshape(2 * n, -1)
    number = np.arange(2 * n).reshape(n, 2)
    number = np.where((answers > 0.0)[:, None], number, number[:, ::-1])
    ties = answers == ANSWERS["tie"]
    return VariationalPreferenceGP(verbose=False, **options).fit(items, number, ties if ties.any() else None)


def centred_utilities(model: Any, X: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sd of f(x) - f̄, where f̄ is the average of f over reference items.

    Answers say nothing about the level of f, whose prior would widen the intervals of f itself.
    """
    process = model._process()
    with torch.no_grad():
        r = process.rows(torch.from_numpy(reference))
        means, variances = [], []
        for part in np.array_split(X, range(ITEMS_AT_ONCE, len(X), ITEMS_AT_ONCE)):
            x = process.rows(torch.from_numpy(np.ascontiguousarray(part)))
            means.append(x.mean - r.mean.mean())
            # Var f(x) - 2 Cov(f(x), f̄) + Var f̄
            variances.append(process.among(x, 1)[:, 0, 0] - 2.0 * process.between(x, r).mean(1))
        variance = torch.cat(variances) + process.between(r, r).mean()
        return torch.cat(means).numpy(), variance.clamp(min=0.0).sqrt().numpy()


def expected_positive_part(mean: Tensor, variance: Tensor) -> Tensor:
    """E max(d, 0) = δ Φ(δ/σ) + σ φ(δ/σ) for d ~ N(δ, σ²)."""
    sd = variance.sqrt()
    return mean * cdf(mean / sd) + sd * pdf(mean / sd)
