"""Soil liquefaction in 25 earthquakes (the paper's Section 4.1): the real file, or a stand-in made to resemble it.

The real data belong to Zhan et al. (2023) and are not public. The stand-in draws rows from a mixture of two Gaussians
and labels from a logistic regression, calibrated so that the posterior is the published one (see liquefaction.json):
its coefficients, its covariance and the prevalence are right; its earthquakes are only names, and no label is real.
"""

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.ndimage
import scipy.special

from viper.errors import DataError

FEATURES = ("lnPGV", "lnVs30", "lnprecip", "lndw", "lnwtd")
NEEDED = ("lon", "lat", "liq", "earthquake", *FEATURES)
HELD_OUT = "lomaprieta1989"
TRAINING_ROWS, GRID = 1_719_400, (310, 290)  # 310 × 290 = 89,900 test rows, as in the real file
TRAINING_QUAKES = 24
BOX = (-122.6, -121.1, 36.4, 37.6)  # degrees around Loma Prieta: west, east, south, north
SMOOTHNESS = 6.0  # blur of the stand-in's maps, in grid cells
BLOCK_OF_ROWS = 200_000


class Liquefaction(NamedTuple):
    """Training and test rows of the model: five features centred by the training mean, not scaled.

    `quake` is the index of a training row's earthquake in `quakes`; `position` holds longitude and latitude of the test
    rows.
    """

    X: np.ndarray
    y: np.ndarray
    quake: np.ndarray
    quakes: list[str]
    X_test: np.ndarray
    y_test: np.ndarray
    position: np.ndarray
    source: str


# --- the stand-in ---


def make_liquefaction(
    seed: int = 1, rows: int = TRAINING_ROWS, grid: tuple[int, int] = GRID, chunk: int = BLOCK_OF_ROWS
) -> Liquefaction:
    """Draw the stand-in: `rows` training rows of 24 earthquakes, and one more earthquake on a grid of cells.

    The training rows are independent. The features of the test earthquake vary smoothly over the grid, with the same
    distribution in each cell, so that they can be mapped.
    """
    constants = generator_constants()
    generator = np.random.default_rng(seed)
    X, y = np.empty((rows, len(FEATURES))), np.empty(rows, dtype=bool)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        count = part.stop - start
        second = generator.random(count) >= constants["pi"]
        X[part] = mixture_rows(second, generator.standard_normal((count, len(FEATURES))), constants)
        y[part] = draw_labels(X[part], generator, constants)
    X_test, position = smooth_rows(grid, generator, constants)
    y_test = draw_labels(X_test, generator, constants)
    centre = X.mean(0)
    X -= centre
    shares = generator.dirichlet(np.full(TRAINING_QUAKES, 2.0))  # uneven, as in any inventory
    quake = np.sort(generator.choice(TRAINING_QUAKES, size=rows, p=shares)).astype(np.int8)
    names = [f"standin{number:02d}" for number in range(1, TRAINING_QUAKES + 1)]
    return Liquefaction(X, y, quake, names, X_test - centre, y_test, position, f"stand-in, seed {seed}")


def generator_constants() -> dict[str, Any]:
    text = (resources.files("viper.datasets") / "liquefaction.json").read_text(encoding="utf-8")
    return {name: value if isinstance(value, str) else np.array(value) for name, value in json.loads(text).items()}


def mixture_rows(second: np.ndarray, noise: np.ndarray, constants: dict[str, Any]) -> np.ndarray:
    """Rows μ_k + C_k^{1/2} z; `second` is true for rows of the second component."""
    rows = np.empty_like(noise)
    for chosen, k in ((~second, 1), (second, 2)):
        factor = np.linalg.cholesky(constants[f"C{k}"])
        rows[chosen] = constants[f"mu{k}"] + noise[chosen] @ factor.T
    return rows


def draw_labels(X: np.ndarray, generator: np.random.Generator, constants: dict[str, Any]) -> np.ndarray:
    """y ~ Bernoulli(s(α + βᵀx))."""
    return generator.random(len(X)) < scipy.special.expit(constants["intercept"] + X @ constants["beta"])


def smooth_rows(
    grid: tuple[int, int], generator: np.random.Generator, constants: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Features and positions of the cells of a grid: the same mixture, with noise and component smooth in space."""
    fields = np.stack([smooth_field(grid, generator) for _ in range(1 + len(FEATURES))], axis=-1).reshape(-1, 6)
    second = scipy.special.ndtr(fields[:, 0]) >= constants["pi"]
    west, east, south, north = BOX
    longitude, latitude = np.meshgrid(np.linspace(west, east, grid[1]), np.linspace(south, north, grid[0]))
    position = np.column_stack([longitude.ravel(), latitude.ravel()])
    return mixture_rows(second, fields[:, 1:], constants), position


def smooth_field(grid: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """A stationary Gaussian field on a grid, N(0, 1) in each cell: white noise, blurred and rescaled."""
    spread = min(SMOOTHNESS, min(grid) / 16)
    blurred = scipy.ndimage.gaussian_filter(generator.standard_normal(grid), spread, mode="wrap")
    # its standard deviation is the norm of the blurring kernel
    impulse = np.zeros(grid)
    impulse[0, 0] = 1.0
    return blurred / np.linalg.norm(scipy.ndimage.gaussian_filter(impulse, spread, mode="wrap"))


# --- the real file ---


def read_liquefaction(path: str | Path, chunk: int = BLOCK_OF_ROWS) -> Liquefaction:
    """Read the data of Zhan et al. (2023) from a CSV file; the test rows are those of the Loma Prieta earthquake.

    Required columns: lon, lat, liq, earthquake, lnPGV, lnVs30, lnprecip, lndw, lnwtd; others are ignored.

    Raises
    ------
    DataError
        If columns are missing or empty, or a value is not a number.
    """
    path = Path(path).expanduser()
    parts = list(read_blocks(path, chunk))
    values = np.concatenate([numbers for numbers, _ in parts]) if parts else np.empty((0, len(NEEDED) - 1))
    names = np.concatenate([quakes for _, quakes in parts]) if parts else np.empty(0, dtype=str)
    test = names == HELD_OUT
    if test.all() or not test.any():
        text = "the column earthquake must contain lomaprieta1989 (the test rows) and others"
        raise DataError(f"{text}; got {sorted(set(names.tolist()))[:5]} in {path}. Check the column.")
    position, label, X = values[:, :2], values[:, 2].astype(bool), values[:, 3:]
    quakes, quake = np.unique(names[~test], return_inverse=True)
    centre = X[~test].mean(0)
    return Liquefaction(
        *(X[~test] - centre, label[~test], quake.astype(np.int16), quakes.tolist()),
        *(X[test] - centre, label[test], position[test], str(path.name)),
    )


def read_blocks(path: Path, chunk: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(lon, lat, liq and the features as numbers; earthquakes as text), a block of lines at a time."""
    import pandas as pd

    numeric = [name for name in NEEDED if name != "earthquake"]
    try:
        header = list(pd.read_csv(path, nrows=0).columns)
        if missing := [name for name in NEEDED if name not in header]:
            raise DataError(f"{path} must have the columns {list(NEEDED)}; got none named {missing}. Add them.")
        line = 2
        with pd.read_csv(path, usecols=list(NEEDED), dtype={"earthquake": str}, chunksize=chunk) as reader:
            for part in reader:
                check_block(part, numeric, path, line)
                yield part[numeric].to_numpy(float), part["earthquake"].to_numpy(str)
                line += len(part)
    except OSError as error:
        raise DataError(f"{path} must be a readable file; got {error.strerror}. Check its name.") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise DataError(f"{path} must be a table of comma-separated values; got {error}. Export it again.") from error


def check_block(part: Any, numeric: list[str], path: Path, line: int) -> None:
    """Raise for the first value that cannot be used, with its line and column."""
    import pandas as pd

    for name in numeric:
        value = pd.to_numeric(part[name], errors="coerce").to_numpy(float)
        wrong = ~np.isin(value, (0.0, 1.0)) if name == "liq" else ~np.isfinite(value)
        if wrong.any():
            where = int(np.flatnonzero(wrong)[0])
            rule = "0 or 1" if name == "liq" else "a finite number"
            got = part[name].iloc[where]
            raise DataError(f"{name} must be {rule}; got {got} in line {line + where} of {path}. Correct or remove it.")
    empty = part["earthquake"].isna().to_numpy()
    if empty.any():
        where = line + int(np.flatnonzero(empty)[0])
        raise DataError(f"earthquake must be a name; got nothing in line {where} of {path}. Correct or remove it.")
