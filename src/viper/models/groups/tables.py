"""Tables of effects of groups: variance components, intraclass correlations, and the effects themselves."""

from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.optimize
import scipy.special

from viper.errors import instead
from viper.inference.groups.components import component_count, covariance_of
from viper.models.groups.levels import GroupFactor
from viper.models.prediction import half_width

if TYPE_CHECKING:
    import pandas

LATENT_VARIANCE = np.pi**2 / 3.0  # variance of the standard logistic, the noise of a latent score


def weighted_quantile(values: np.ndarray, shares: np.ndarray, levels: list[float]) -> np.ndarray:
    """Quantiles of weighted values, interpolated between the middles of their shares."""
    order = np.argsort(values)
    middle = np.cumsum(shares[order]) - 0.5 * shares[order]
    return np.interp(levels, middle, values[order])


def mixture_interval(weights: np.ndarray, means: np.ndarray, sds: np.ndarray, level: float) -> np.ndarray:
    """Central interval of each column's mixture of normals Σ π_k N(m_k, s_k²): d × 2."""
    z = half_width(level)

    def end(j: int, probability: float) -> float:
        m, s = means[:, j], sds[:, j]

        def excess(x: float) -> float:
            return float(weights @ scipy.special.ndtr((x - m) / s)) - probability

        low, high = float((m - 3.0 * z * s).min()), float((m + 3.0 * z * s).max())
        return float(scipy.optimize.brentq(excess, low - 1e-9, high + 1e-9, xtol=1e-10))

    tail = 0.5 - 0.5 * level
    return np.array([[end(j, tail), end(j, 1.0 - tail)] for j in range(means.shape[1])]).reshape(-1, 2)


def component_draws(factors: list[GroupFactor], order: list[int], values: np.ndarray) -> dict[str, np.ndarray]:
    """Standard deviations, correlations and intraclass correlations for each value of θ, by name."""
    at, covariances = 0, {}
    for f in order:
        width = factors[f].width
        part = values[:, at : at + component_count(width)]
        covariances[f] = np.array([covariance_of(theta, width) for theta in part])
        at += component_count(width)
    found: dict[str, np.ndarray] = {}
    for f, factor in enumerate(factors):
        D, names, group = covariances[f], factor.effects, factor.term.name
        sds = np.sqrt(np.diagonal(D, axis1=1, axis2=2))
        found |= {f"sd({name} | {group})": sds[:, c] for c, name in enumerate(names)}
        for i in range(factor.width):
            for j in range(i):
                rho = D[:, i, j] / (sds[:, i] * sds[:, j])
                found[f"cor({names[j]}, {names[i]} | {group})"] = rho
    intercepts = {f: covariances[f][:, 0, 0] for f, factor in enumerate(factors) if factor.term.intercept}
    total = LATENT_VARIANCE + sum(intercepts.values())
    return found | {f"icc({factors[f].term.name})": D / total for f, D in intercepts.items()}


def component_frame(draws: dict[str, np.ndarray], shares: np.ndarray, level: float) -> "pandas.DataFrame":
    """Mean, sd and interval of each variance component."""
    import pandas

    half_width(level)
    rows = {}
    for name, values in draws.items():
        mean = float(shares @ values)
        ends = weighted_quantile(values, shares, [0.5 - 0.5 * level, 0.5 + 0.5 * level])
        sd = float(np.sqrt(shares @ np.square(values - mean)))
        rows[name] = {"mean": mean, "sd": sd, "lower": ends[0], "upper": ends[1]}
    return pandas.DataFrame.from_dict(rows, orient="index")


def effect_frame(factor: GroupFactor, means: np.ndarray, variances: np.ndarray, level: float) -> "pandas.DataFrame":
    """Mean, sd and interval of the effects of a factor's groups, with the rows that each group has."""
    import pandas

    sd = np.sqrt(variances)
    reach = half_width(level) * sd
    index = [(group, effect) for group in factor.levels for effect in factor.effects]
    columns: dict[str, Any] = {"mean": means, "sd": sd, "lower": means - reach, "upper": means + reach}
    table = {name: x.reshape(-1) for name, x in columns.items()} | {"rows": np.repeat(factor.rows, factor.width)}
    names = [factor.term.name, "effect"]
    return pandas.DataFrame(table, index=pandas.MultiIndex.from_tuples(index, names=names))


def factor_number(factors: list[GroupFactor], name: str | None) -> int:
    """The index of the factor with this name: the first, if several terms have the same groups."""
    names = [factor.term.name for factor in factors]
    if name is None and len(names) == 1:
        return 0
    if name not in names:
        rule = "groups must be the name of one of several group terms" if name is None else "groups must name a term"
        raise ValueError(f"{rule}; got {name!r}. {instead(str(name), names)}")
    return names.index(name)
