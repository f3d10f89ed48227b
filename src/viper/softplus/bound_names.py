"""The names of the bounds. Importing this module loads no other library, so the command line can list them."""

from typing import Literal, get_args

FitBound = Literal["viper", "pg", "mc", "quadrature"]  # bounds that a model can be fitted with
BoundName = Literal[FitBound, "certified"]

FIT_BOUNDS: tuple[str, ...] = get_args(FitBound)
BOUND_NAMES: tuple[str, ...] = get_args(BoundName)
