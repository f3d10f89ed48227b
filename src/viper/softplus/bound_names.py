"""The words by which a bound is chosen. Importing them loads no other library, so the command line can list them."""

from typing import Literal, get_args

FitBound = Literal["viper", "pg", "mc", "quadrature"]  # a model may be fitted with these
BoundName = Literal[FitBound, "certified"]

FIT_BOUNDS: tuple[str, ...] = get_args(FitBound)
BOUND_NAMES: tuple[str, ...] = get_args(BoundName)
