"""The published numbers that the tables need.

`published_logistic.csv` and `published_gp.csv` hold the median and the 2.5 % and 97.5 % quantiles of every metric over
the authors' 100 runs, computed from the per-seed files in the folder results/ of github.com/mkomod/vi-per. The paper's
own tables print the lower of the two middle values where these files give their mean; otherwise they agree.
"""

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from viper.paper.tables import Spread

if TYPE_CHECKING:
    import pandas

# Appendix B.2, "less than 17 for all values", 12, 7 and 5: terms needed, by relative error
PUBLISHED_TERMS = {0.005: 17, 0.01: 12, 0.025: 7, 0.05: 5}

# Section 4.1, the table "Soil Liquefaction results": ELBO, KL_MC, CI width, AUC (test), by family and method
PUBLISHED_SOIL: dict[tuple[str, str], tuple[float, float | None, float, float]] = {
    ("Q", "VI-PER"): (-835200.0, 1.83, 0.0335, 0.858),
    ("Q", "VI-MC"): (-835300.0, None, 0.0335, 0.857),
    ("Q", "VI-PG"): (-921600.0, 73.49, 0.0065, 0.857),
    ("Q'", "VI-PER"): (-835200.0, 9.11, 0.0129, 0.858),
    ("Q'", "VI-MC"): (-835200.0, None, 0.0121, 0.857),
    ("Q'", "VI-PG"): (-835200.0, 4.82, 0.0101, 0.857),
}

# Fits stored with the paper's code (results/application/f1.pt and f5.pt), Q': posterior means and sds
PUBLISHED_SOIL_FITS = {
    "VI-PER": (
        (-1.37591, 0.32528, -1.92874, 0.70634, -0.56111, -0.20129),
        (0.00274, 0.00196, 0.01244, 0.00426, 0.00520, 0.00330),
    ),
    "VI-MC": (
        (-1.36665, 0.32391, -1.90221, 0.69800, -0.55263, -0.20731),
        (0.00254, 0.00190, 0.01178, 0.00413, 0.00377, 0.00310),
    ),
}


@cache
def published_frame(study: str) -> "pandas.DataFrame":
    """Metrics by (setting, n, p, method, family) for "logistic", by (setting, method) for "gp"."""
    import pandas

    with (files("viper.paper") / f"published_{study}.csv").open(encoding="utf-8") as file:
        frame = pandas.read_csv(file, dtype={"setting": str})
    return frame.set_index(["setting", "n", "p", "method", "family"] if study == "logistic" else ["setting", "method"])


def published_logistic(setting: str, n: int, p: int, method: str, family: str, metric: str) -> Spread | None:
    """A metric of the logistic regression study, or None if it was not published."""
    return published_spread("logistic", (setting, n, p, method, family), metric)


def published_gp(setting: str, method: str, metric: str) -> Spread | None:
    """A metric of a Gaussian process on the toy example or a public data set, or None if it was not published."""
    return published_spread("gp", (setting, method), metric)


def published_spread(study: str, key: tuple[str | int, ...], metric: str) -> Spread | None:
    """Median and quantiles of one metric, if they were published."""
    frame = published_frame(study)
    if key not in frame.index or metric not in frame:
        return None
    row = frame.loc[key]
    median, low, high = (float(row[metric + ending]) for ending in ("", "_low", "_high"))
    return Spread(median, low, high) if median == median else None
