"""Numbers of the published runs, as far as tables need them.

`published_logistic.csv` holds the median and the 2.5 % and 97.5 % quantiles of every metric over the authors' 100 runs,
computed from the per-seed files in the folder results/ of github.com/mkomod/vi-per. The paper's own tables print the
lower of the two middle values where these files give their mean; they agree in all else.
"""

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from viper.paper.tables import Spread

if TYPE_CHECKING:
    import pandas

METRICS = ("elbo_mc", "kl_mc", "f_mse", "f_coverage", "f_width", "auc", "runtime")


@cache
def logistic() -> "pandas.DataFrame":
    """One row per setting, n, p, method and family."""
    import pandas

    with (files("viper.paper") / "published_logistic.csv").open(encoding="utf-8") as file:
        frame = pandas.read_csv(file, dtype={"setting": str})
    return frame.set_index(["setting", "n", "p", "method", "family"])


def published(setting: str, n: int, p: int, method: str, family: str) -> dict[str, Spread | None]:
    """The published metrics of a method, by name; empty if it was not among the published ones."""
    key = (setting, n, p, method, family)
    if key not in logistic().index:
        return {}
    row = logistic().loc[key]
    return {name: spread_of(row, name) for name in METRICS}


def spread_of(row: "pandas.Series", name: str) -> Spread | None:
    values = [float(row[name]), float(row[f"{name}_low"]), float(row[f"{name}_high"])]
    return Spread(*values) if values[0] == values[0] else None
