"""What a model file holds of a posterior of group effects."""

from typing import Any

from viper.data.schema import DEFINITE, Numbers, numbers
from viper.models.groups.fitting import GroupPosterior

GROUP_FIELDS: dict[Any, dict[str, Numbers]] = {  # d effects in the border, g groups with r effects each
    GroupPosterior: {
        "mean": numbers("d"),
        "border": numbers("dd", range=DEFINITE),
        "effects": numbers("gr"),
        "cross": numbers("grd"),
        "blocks": numbers("grr"),
    }
}
