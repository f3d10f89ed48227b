"""Models with effects of groups beside their exact posterior: k̂, weighted draws, leave-one-out, draws for ArviZ."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from viper.inference.groups.components import ComponentPrior, component_count, covariance_of
from viper.inference.groups.conditional import GroupIntegrals, GroupMoments
from viper.inference.groups.weighing import GroupWeighedFit
from viper.inference.importance import SEED, Diagnosis, WeightedDraws, weigh
from viper.inference.progress import StepProgress
from viper.models.arviz import LARGEST_POINTWISE, arviz_container, by_chain, coefficient_draws, count_draws
from viper.models.diagnosis import LATENT_DRAWS, CorrectedPosterior, DiagnosisMixin
from viper.models.groups.reading import GroupedInput, RowsAndGroups, TakesGroups
from viper.models.groups.tables import component_draws, component_frame
from viper.models.loo import ROWS_AT_ONCE, LeaveOneOut, leave_one_out_result, weighted_rows

if TYPE_CHECKING:
    import pandas

EFFECTS = "effects of"  # begins the names of ArviZ's variables of group effects


class CorrectedGroups(TakesGroups, CorrectedPosterior):
    """Summaries and predictions from draws of the border and of θ with weights.

    The effects of the factor with the most groups are integrated out: given each draw, predictions treat each of them
    as normal, with its exact mean and variance.
    """

    def __init__(self, *given: Any, components: Callable[[float, WeightedDraws], "pandas.DataFrame"]) -> None:
        super().__init__(*given)
        self._components = components

    @property
    def coefficients(self) -> WeightedDraws:
        """The draws of the fixed effects, with the intercept last."""
        return WeightedDraws(self.weighted.draws[:, : len(self.names)], self.weighted.weights)

    def summary(self, level: float = 0.95) -> "pandas.DataFrame":
        """The estimator's `summary`, computed from the weighted draws."""
        import pandas

        return pandas.concat([super().summary(level), self.components(level)])

    def components(self, level: float = 0.95) -> "pandas.DataFrame":
        """The estimator's `components`, with corrected weights of their values."""
        return self._components(level, self.weighted)


class GroupDiagnosisMixin(TakesGroups, DiagnosisMixin):
    """Models with effects of groups that can be compared with their exact posterior, and corrected.

    The exact posterior is that of everything but the factor with the most groups, whose effects are integrated out by
    quadrature, averaged over the variance components at the points of the mixture. The weights correct the means and
    spreads of all effects and the weights of the points.
    """

    factors_: list[Any]
    quadrature_: bool
    component_scale: float
    _order: list[int]
    _points: dict[str, Tensor]

    def _read_rows(self, X: Any, offset: Any) -> GroupedInput:
        raise NotImplementedError

    def _fixed(self, design: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _codes(self, factor: Any, table: "pandas.DataFrame") -> np.ndarray:
        raise NotImplementedError

    def diagnose(
        self,
        X: Any = None,
        y: Any = None,
        *,
        groups: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
        draws: int = 1000,
        random_state: Any = None,
    ) -> Diagnosis:
        """Measure by importance weights (PSIS) how close the posterior is to the exact one.

        Draws are of the fixed effects and of the effects of all factors but the one with the most groups, whose effects
        are integrated out exactly. Variance components take the values of the mixture, so the weights also judge how
        those values are weighted. `elbo` is that of the mixture, with variance components integrated out. The rows are
        those of the fit; pass them again after loading a model from a file.
        """
        return self._weighed(RowsAndGroups(X, groups), y, sample_weight, offset, draws, random_state)[1]

    def corrected(
        self,
        X: Any = None,
        y: Any = None,
        *,
        groups: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
        draws: int = 1000,
        random_state: Any = None,
    ) -> CorrectedGroups:
        """Return the exact posterior as weighted draws, with the same summaries and predictions as the estimator.

        It uses the same rows and draws as `diagnose`. Variance components keep the values of the mixture; their weights
        are corrected.
        """
        weighted, diagnosis, moments = self._weighed(
            RowsAndGroups(X, groups), y, sample_weight, offset, draws, random_state, keeps=True
        )
        summarise = partial(self._summarise_draws, moments=moments)
        names, estimator = self._names(), type(self).__name__
        return CorrectedGroups(
            weighted, diagnosis, names, self.classes_, summarise, estimator, components=self._corrected_components
        )

    def _corrected_components(self, level: float, weighted: WeightedDraws) -> "pandas.DataFrame":
        """Variance components; the share of each value is scaled like the weight of the nearest point."""
        points = {name: x.numpy() for name, x in self._points.items()}
        thetas, fine, shares = (points[f"{x}"] for x in ("points.theta", "components.theta", "components.share"))
        scale = np.sqrt(shares @ np.square(fine - shares @ fine))

        def nearest(values: np.ndarray) -> np.ndarray:
            return np.array([np.square((thetas - x) / scale).sum(1).argmin() for x in values])

        drawn = nearest(weighted.draws[:, -thetas.shape[1] :].numpy())
        before = np.bincount(drawn, minlength=len(thetas)) / len(drawn)
        after = np.bincount(drawn, weighted.weights.numpy(), len(thetas))
        change = np.divide(after, before, out=np.ones(len(thetas)), where=before > 0)
        shares = shares * change[nearest(fine)]
        return component_frame(component_draws(self.factors_, self._order, fine), shares / shares.sum(), level)

    def _weighed(
        self,
        X: RowsAndGroups,
        y: Any,
        sample_weight: Any,
        offset: Any,
        draws: int,
        random_state: Any,
        *,
        keeps: bool = False,
    ) -> tuple[WeightedDraws, Diagnosis, GroupMoments | None]:
        fit = self._weighed_fit(X, y, sample_weight, offset, "diagnose")
        fit.keeps = keeps
        generator = self._generator_of_draws(random_state)
        with closing(StepProgress(self.verbose, "weighing draws: row")) as progress:
            weighted, found = weigh([fit], self.elbo_, self.covariance, draws, generator, progress.step)
        return weighted, found.about(fit.elbo), fit.moments

    def _weighed_fit(self, X: Any, y: Any, sample_weight: Any, offset: Any, what: str) -> GroupWeighedFit:
        check_is_fitted(self, "posterior_")
        rows = self._given_or_grouped_rows(X, y, sample_weight, offset)
        if rows is None:
            raise ValueError(f"{what} needs the training rows; got a model without them. Pass X and y.")
        points = {name: x.numpy() for name, x in self._points.items()}
        prior = self.prior_
        precision = prior.precision if prior.precision.ndim == 2 else torch.diag(prior.precision)
        spread = np.cov(points["components.theta"].T, aweights=points["components.share"])
        return GroupWeighedFit(
            rows,
            prior.mean.numpy(),
            precision.numpy(),
            ComponentPrior(float(self.component_scale)),
            self.quadrature_,
            points["points.theta"],
            points["points.weight"],
            np.atleast_2d(spread),
        )

    def _given_or_grouped_rows(self, X: Any, y: Any, sample_weight: Any, offset: Any) -> Any:
        data, groups = X if isinstance(X, RowsAndGroups) else (X, None)
        if data is None and y is None and groups is None:
            return getattr(self, "_grouped_rows", None)
        return self._open_labelled_rows(RowsAndGroups(data, groups), y, sample_weight=sample_weight, offset=offset)

    # --- leave-one-out ---

    def loo(
        self,
        X: Any = None,
        y: Any = None,
        *,
        groups: Any = None,
        leave_out: str = "row",
        sample_weight: Any = None,
        offset: Any = None,
        draws: int = 1000,
        random_state: Any = None,
    ) -> LeaveOneOut:
        """Estimate how well each row, or each group, is predicted from all the others, by importance weights.

        A row is predicted as a member of its known group, whose other rows are kept. If `leave_out` names the factor
        with the most groups, each of these groups is predicted as a new one, all its rows together; `pointwise` is then
        by group, in the order of `levels`. Both integrate the group's effect exactly, so the weights are about as even
        as those of `diagnose`. To leave out groups of another factor, refit without each of them, as
        `viper fit --groups` does.
        """
        main = self.factors_[self._order[0]].term.name if hasattr(self, "_order") else ""
        if leave_out not in ("row", main):
            others = [factor.term.name for factor in self.factors_]
            fix = "Hold its groups out and refit, as viper fit --groups does" if leave_out in others else "Choose one"
            raise ValueError(
                f"leave_out must be 'row' or {main!r}, the factor with the most groups; got {leave_out!r}. {fix}."
            )
        fit = self._weighed_fit(RowsAndGroups(X, groups), y, sample_weight, offset, "loo")
        rows, by_row = fit.rows, leave_out == "row"
        count = rows.rows if by_row else rows.main.levels
        if draws * count > 8 * LARGEST_POINTWISE:
            raise ValueError(
                f"loo needs one number for each draw and {leave_out}; got {draws:,} × {count:,}. Pass fewer draws, or "
                "hold rows out."
            )
        each = np.empty((count, draws))

        def visit(part: slice, inside: slice, at: slice, found: GroupIntegrals) -> None:
            if by_row:
                each[part, at] = found.log_without_row()
            else:
                each[inside, at] = found.log_integral

        generator = self._generator_of_draws(random_state)
        with closing(StepProgress(self.verbose, "leaving out: row")) as progress:
            _, log_ratio, _ = fit.weighed(draws, generator, progress.step, visit)
        correction = (log_ratio - log_ratio.max()).numpy()
        blocks = (torch.from_numpy(each[start : start + ROWS_AT_ONCE].T) for start in range(0, count, ROWS_AT_ONCE))
        parts = [np.stack(weighted_rows(block, block, correction)) for block in blocks]
        found = np.concatenate(parts, 1)
        if by_row and rows.places is not None:
            found[:, rows.places] = found.copy()
        return leave_one_out_result(found, draws)

    # --- draws ---

    def to_arviz(
        self,
        X: Any = None,
        y: Any = None,
        *,
        groups: Any = None,
        sample_weight: Any = None,
        offset: Any = None,
        draws: int = 1000,
        chains: int = 4,
        random_state: Any = None,
    ) -> Any:
        """Return independent draws from the posterior, in the container of the installed ArviZ.

        The groups are posterior ("coefficient" by feature, "intercept", "component" for variance components, and
        "effects of hospital" by group and effect), observed_data, and log_likelihood by row if draws × rows is at most
        16 million. A model loaded from a file has no training rows: pass them again, or the result holds only fixed
        effects and components. Variance components take the few values of the mixture.
        """
        check_is_fitted(self, "posterior_")
        shape, count = (chains, draws), count_draws(chains, draws)
        seed = check_random_state(self.random_state if random_state is None else random_state).randint(2**31)
        generator = np.random.default_rng(seed)
        rows = self._given_or_grouped_rows(RowsAndGroups(X, groups), y, sample_weight, offset)
        effects: dict[int, np.ndarray] = {}
        if rows is None:
            fixed, thetas = self._fixed_draws(count, generator)
        else:
            fit = self._weighed_fit(RowsAndGroups(X, groups), y, sample_weight, offset, "to_arviz")
            mixed = generator.permutation(count)  # components come one after the other
            border, main, thetas = (x[mixed] for x in fit.effects(count, generator))
            effects = dict(zip(self._order, [main, *border_effects(fit, border)], strict=True))
            fixed = border[:, : len(self._names())]
        parts = component_draws(self.factors_, self._order, thetas)
        found: dict[str, dict[str, Any]] = {
            "posterior": {
                **coefficient_draws(torch.from_numpy(np.ascontiguousarray(fixed)), self._names(), shape),
                "component": by_chain(torch.from_numpy(np.stack(list(parts.values()), -1)), shape),
            }
        }
        coords: dict[str, list[Any]] = {"parameter": list(parts)}
        dims = {"coefficient": ["feature"], "y": ["row"], "component": ["parameter"]}
        for f, values in sorted(effects.items()):
            factor = self.factors_[f]
            name, kinds = f"{EFFECTS} {factor.term.name}", f"effect of {factor.term.name}"
            while name in found["posterior"]:  # two terms of the same groups
                name, kinds = f"{name}, more", f"{kinds}, more"
            dims[name], coords[factor.term.name], coords[kinds] = (
                [factor.term.name, kinds],
                list(factor.levels),
                factor.effects,
            )
            found["posterior"][name] = by_chain(torch.from_numpy(np.ascontiguousarray(values)), shape)
        if rows is not None and rows.rows * count <= LARGEST_POINTWISE:
            found |= self._row_draws(rows, border, main, shape)
        return arviz_container(found, self._names(), type(self).__name__, coords, dims)

    def _fixed_draws(self, count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws of fixed effects and θ from the mixture."""
        points = {name: x.numpy() for name, x in self._points.items()}
        which = generator.choice(len(points["points.weight"]), size=count, p=points["points.weight"])
        roots = np.linalg.cholesky(points["points.covariance"])
        noise = generator.standard_normal((count, points["points.mean"].shape[1]))
        fixed = points["points.mean"][which] + np.einsum("nij,nj->ni", roots[which], noise)
        return fixed, points["points.theta"][which]

    def _row_draws(self, rows: Any, border: np.ndarray, main: np.ndarray, shape: tuple[int, int]) -> dict[str, Any]:
        """Labels and log likelihoods of the rows, in the order in which they were given."""
        from viper.inference.groups.conditional import known_log_odds

        f = known_log_odds(rows, slice(0, rows.rows), border)
        f += np.einsum("nr,snr->ns", rows.main.columns, main[:, rows.main.codes], optimize=True)
        each = rows.label[:, None] * f - np.logaddexp(0.0, f)
        each = each if rows.weight is None else rows.weight[:, None] * each
        label, back = np.empty(rows.rows), np.empty_like(each)
        label[rows.places], back[rows.places] = rows.label, each
        likelihood = by_chain(torch.from_numpy(np.ascontiguousarray(back.T)), shape)
        return {"observed_data": {"y": label}, "log_likelihood": {"y": likelihood}}

    # --- predictions from draws ---

    def _summarise_draws(
        self,
        X: Any,
        offset: Any,
        draws: Tensor,
        summary: Callable[[Tensor], Tensor],
        moments: GroupMoments | None = None,
    ) -> Iterator[Tensor]:
        """Yield summary(f) block by block, with f as draws × rows."""
        check_is_fitted(self, "posterior_")
        assert moments is not None
        read = self._read_rows(X, offset)
        step = max(1, LATENT_DRAWS // len(draws))
        for start in range(0, len(read.design), step):
            part = slice(start, start + step)
            own = None if read.offset is None else read.offset[part]
            some = GroupedInput(read.design[part], read.table.iloc[part], own)
            yield summary(self._drawn_log_odds(some, draws, moments))

    def _drawn_log_odds(self, read: GroupedInput, draws: Tensor, moments: GroupMoments) -> Tensor:
        """f of some rows, draws × rows; effects that are not in the draws are drawn from a fixed seed."""
        border = draws.numpy()
        at = border.shape[1] - self._points["points.theta"].shape[1]
        generator, start = np.random.default_rng(SEED), len(self._names())
        f = border[:, :start] @ self._fixed(read.design).T
        if read.offset is not None:
            f += read.offset
        for place, number in enumerate(self._order):
            factor = self.factors_[number]
            codes, Z, width = self._codes(factor, read.table), factor.multiplied(read.design), factor.width
            new = codes < 0
            theta = border[:, at : at + component_count(width)]
            at += component_count(width)
            spread = np.zeros_like(f)
            if new.any():
                D = np.array([covariance_of(one, width) for one in theta])
                spread[:, new] = np.einsum("ni,sij,nj->sn", Z[new], D, Z[new], optimize=True)
            known = np.flatnonzero(~new)
            if place == 0:
                mean, covariance = moments.mean[codes[known]], moments.covariance[codes[known]]
                f[:, known] += np.einsum("nsr,nr->sn", mean, Z[known], optimize=True)
                spread[:, known] = np.einsum("nsij,ni,nj->sn", covariance, Z[known], Z[known], optimize=True)
            else:
                effects = border[:, start : start + len(factor.levels) * width].reshape(len(border), -1, width)
                f[:, known] += np.einsum("snr,nr->sn", effects[:, codes[known]], Z[known], optimize=True)
                start += len(factor.levels) * width
            if spread.any():
                f += np.sqrt(np.maximum(spread, 0.0)) * generator.standard_normal(f.shape)
        return torch.from_numpy(f)


def border_effects(fit: GroupWeighedFit, border: np.ndarray) -> list[np.ndarray]:
    """The effects of all factors but the main one, S × levels × r each."""
    rows = fit.rows
    return [
        border[:, start : start + factor.effects].reshape(len(border), factor.levels, factor.width)
        for factor, start in zip(rows.others, rows.starts[1:], strict=True)
    ]
