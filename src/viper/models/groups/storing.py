"""What a model file holds of a posterior of group effects."""

from typing import Any

from viper.data.schema import DEFINITE, Numbers, Range, numbers
from viper.models.groups.fitting import GroupPosterior, MetPosterior

WHOLES = Range("whole numbers from 0 on", lambda x: bool(((x >= 0) & (x == x.floor())).all()))
GROUP_FIELDS: dict[Any, dict[str, Numbers]] = {  # d effects in the border, g groups with r effects each
    GroupPosterior: {
        "mean": numbers("d"),
        "border": numbers("dd", range=DEFINITE),
        "effects": numbers("gr"),
        "cross": numbers("grd"),
        "blocks": numbers("grr"),
    },
    MetPosterior: {  # e pairs of groups and effects of the border
        "mean": numbers("d"),
        "border": numbers("dd", range=DEFINITE),
        "effects": numbers("gr"),
        "cross": numbers("er"),
        "blocks": numbers("grr"),
        "column": numbers("e", range=WHOLES),
        "count": numbers("g", range=WHOLES),
        "fixed": numbers("f", range=WHOLES),
    },
}
