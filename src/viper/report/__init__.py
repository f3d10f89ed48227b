"""A report of a fitted model: one HTML page that holds everything it shows and loads nothing."""

from os import PathLike
from typing import TYPE_CHECKING, Any

from viper.data.storage import write_bytes
from viper.report.page import render
from viper.report.study import read

if TYPE_CHECKING:
    import pandas

__all__ = ["write"]


def write(
    model: Any,
    data: "pandas.DataFrame",
    target: str,
    path: str | PathLike[str],
    overwrite: bool = False,
    *,
    spatial: tuple[str, str] | None = None,
    held_out: bool = False,
) -> None:
    """Write a report of `model`, seen through the rows of `data`, to one self-contained HTML file.

    Numbers are computed from all rows; pictures of rows show an even sample, and the page says so.

    Parameters
    ----------
    model : fitted VariationalLogisticRegression or VariationalGPClassifier
    data : DataFrame
        The model's columns as it takes them, and the target. Rows with missing values are left out, and counted.
        The first other column of text or whole numbers that all differ names the rows.
    target : str
        The column of `data` with the classes.
    path : str or path
    overwrite : bool, default False
        Whether to replace an existing file.
    spatial : pair of column names, optional
        Coordinates for a map. By default columns named lon and lat, x and y and the like, or the only two of a GP.
    held_out : bool, default False
        Whether the model has learned from none of these rows, which the page then says.

    Raises
    ------
    StorageError
        If the file exists and `overwrite` is False, or if it cannot be written.
    """
    write_bytes(path, render(read(model, data, target, spatial, held_out)).encode(), overwrite)
