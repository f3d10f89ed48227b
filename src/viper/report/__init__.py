"""Reports of a fitted model: scores, plots, and one self-contained HTML page."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    row_labels: str | None = None,
    rows: bool = True,
    by: "Iterable[str] | None" = None,
) -> None:
    """Write a report on `model` and its predictions for the rows of `data` to one self-contained HTML file.

    Numbers are computed from all rows. Charts of single rows show an evenly spaced sample and say so.

    Parameters
    ----------
    model : fitted VariationalLogisticRegression or VariationalGPClassifier
    data : DataFrame
        The model's columns, untransformed, and the target. Rows with missing values are left out and counted, unless
        the model fills them in.
    target : str
        The column of `data` with the classes.
    path : str or path
    overwrite : bool, default False
        Whether to replace an existing file.
    spatial : pair of column names, optional
        Coordinates for a map. By default, columns named lon and lat, x and y or the like, or the only two columns of a
        Gaussian process.
    held_out : bool, default False
        Whether all rows are new to the model; the page then says so.
    row_labels : str, optional
        The column of `data` by which rows are named on the page, such as a case number. By default rows are numbered,
        and neither the index nor any column that the model does not use gets into the file.
    rows : bool, default True
        Whether single rows may be shown. If not, the file holds numbers about groups of rows only.
    by : column names, optional
        Columns of `data` by which rows are grouped, to score each group. By default up to three columns of the model:
        its categories, then those with the largest effects.

    Raises
    ------
    StorageError
        If the file exists and `overwrite` is False, if its name is that of another format, or if it cannot be written.
    """
    from viper.data.model_file import write_bytes
    from viper.data.writing import IN_PYTHON, PAGE_OUTPUT, check_ending, check_target
    from viper.report.classes.page import any_page, any_study

    check_target(Path(path).absolute(), overwrite, IN_PYTHON)
    check_ending(Path(path), PAGE_OUTPUT, IN_PYTHON)
    study = any_study(model, data, target, spatial, held_out, row_labels, rows, by)
    write_bytes(path, any_page(study).text().encode(), overwrite)
