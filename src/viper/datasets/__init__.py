"""The paper's data: five public sets, and soil liquefaction (the real file, or a calibrated stand-in)."""

from viper.datasets.download import cache_folder
from viper.datasets.liquefaction import Liquefaction, make_liquefaction, read_liquefaction
from viper.datasets.public import SETS, PublicData
from viper.datasets.public import load_public as load
from viper.errors import DataError

__all__ = [
    "SETS",
    "DataError",
    "Liquefaction",
    "PublicData",
    "cache_folder",
    "load",
    "make_liquefaction",
    "read_liquefaction",
]
