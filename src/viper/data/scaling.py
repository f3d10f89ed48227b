"""Means and standard deviations of columns of any size."""

import numpy as np


def column_moments(X: np.ndarray, weight: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each column, with optional weights of the rows.

    Each column is first divided by the power of two next to its largest entry. That changes no digits, and squares
    neither overflow nor vanish for entries from 1e-300 to 1e300.
    """
    power = np.frexp(np.abs(X).max(0))[1]
    scaled = np.ldexp(X, -power)
    mean = np.average(scaled, axis=0, weights=weight)
    sd = np.sqrt(np.average(np.square(scaled - mean), axis=0, weights=weight))
    return np.ldexp(mean, power), np.ldexp(sd, power)
